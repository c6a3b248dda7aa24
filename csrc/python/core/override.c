/* SPDX-License-Identifier: Apache-2.0 */
/* Chains of what is current, in context variables. */
#include "python/core/override.h"

/* A chain is never changed, since contexts share it: a block that ends in the middle
 * has the links inside of it copied. What is owned is dropped when the block is over.
 */
typedef struct link_object {
    PyObject_HEAD
    cm_override *override; /* NULL: the state is gone */
    cm_list node;          /* of override->links */
    PyObject *object;      /* owned; NULL: over, in all contexts */
    PyObject *outer;       /* owned: a link or None */
    PyObject *frame;       /* owned: that entered; NULL: none, or left in its context */
    PyObject *token;       /* owned: of the context it was entered in; NULL likewise */
    uint64_t serial;       /* of the block; copies have the same */
    bool has_twin;         /* it is such a copy, or was copied */
} link_object;

static link_object *
as_link(PyObject *op)
{
    return op == NULL || op == Py_None ? NULL : (link_object *)(void *)op;
}

/* -- life ------------------------------------------------------------------------------ */

static void
forget_home(link_object *self)
{
    Py_CLEAR(self->frame);
    Py_CLEAR(self->token);
}

/* The block is over wherever this link lives on. */
static void
end_link(link_object *self)
{
    if (self->override != NULL && self->object != NULL) {
        self->override->open_count--;
    }
    Py_CLEAR(self->object);
    forget_home(self);
}

static int
link_traverse(PyObject *op, visitproc visit, void *arg)
{
    link_object *self = (link_object *)(void *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->object);
    Py_VISIT(self->outer);
    Py_VISIT(self->frame);
    Py_VISIT(self->token);
    return 0;
}

static int
link_clear(PyObject *op)
{
    link_object *self = (link_object *)(void *)op;
    end_link(self);
    Py_CLEAR(self->outer);
    return 0;
}

static void
link_dealloc(PyObject *op)
{
    link_object *self = (link_object *)(void *)op;
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    end_link(self);
    if (self->override != NULL) {
        cm_list_remove(&self->node);
    }
    PyObject *outer = self->outer;
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(op);
    while (as_link(outer) != NULL && Py_REFCNT(outer) == 1) { /* not by recursion */
        PyObject *next = as_link(outer)->outer;
        as_link(outer)->outer = NULL;
        Py_DECREF(outer);
        outer = next;
    }
    Py_XDECREF(outer);
    Py_DECREF(type);
}

static PyType_Slot link_slots[] = {
    {Py_tp_traverse, link_traverse},
    {Py_tp_clear, link_clear},
    {Py_tp_dealloc, link_dealloc},
    {0, NULL},
};

static PyType_Spec link_spec = {
    .name = "cumem._core._Current",
    .basicsize = sizeof(link_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = link_slots,
};

int
cm_override_init(cm_override *override, PyObject *module, const char *name)
{
    cm_list_init(&override->links);
    override->type = PyType_FromModuleAndSpec(module, &link_spec, NULL);
    PyObject *contextvars = PyImport_ImportModule("contextvars");
    if (override->type == NULL || contextvars == NULL) {
        Py_XDECREF(contextvars);
        return -1;
    }
    PyObject *type = PyObject_GetAttrString(contextvars, "ContextVar");
    PyObject *names = Py_BuildValue("(s)", name);
    PyObject *keywords = Py_BuildValue("{sO}", "default", Py_None);
    if (type != NULL && names != NULL && keywords != NULL) {
        override->variable = PyObject_Call(type, names, keywords);
    }
    Py_XDECREF(keywords);
    Py_XDECREF(names);
    Py_XDECREF(type);
    Py_DECREF(contextvars);
    if (override->variable == NULL) {
        return -1;
    }
    override->getter = PyObject_GetAttrString(override->variable, "get");
    return override->getter == NULL ? -1 : 0;
}

void
cm_override_fini(cm_override *override)
{
    cm_list *node;
    while (override->links.next != NULL
           && (node = cm_list_pop_front(&override->links)) != NULL) {
        CM_LIST_ENTRY(node, link_object, node)->override = NULL;
    }
}

/* -- chains ---------------------------------------------------------------------------- */

PyObject *
cm_override_read(const cm_override *override)
{
    return PyObject_CallNoArgs(override->getter);
}

PyObject *
cm_override_step(PyObject **at)
{
    PyObject *object = NULL;
    for (link_object *l; object == NULL && (l = as_link(*at)) != NULL; *at = l->outer) {
        object = l->object;
    }
    return object;
}

/* The token of the change; new reference. */
static PyObject *
write_chain(const cm_override *override, PyObject *chain)
{
    return PyObject_CallMethod(override->variable, "set", "(O)", chain);
}

static link_object *
new_link(cm_override *override, PyObject *object, PyObject *outer, PyObject *frame)
{
    PyObject *op = PyType_GenericAlloc((PyTypeObject *)(void *) override->type, 0);
    link_object *self = (link_object *)(void *)op;
    if (self != NULL) {
        self->override = override;
        cm_list_push_front(&override->links, &self->node);
        self->object = Py_NewRef(object);
        self->outer = Py_NewRef(outer);
        self->frame = Py_XNewRef(frame);
        override->open_count++;
    }
    return self;
}

/* Borrowed: the first link of `chain` that is not over, or None. */
static PyObject *
skip_over(PyObject *chain)
{
    while (as_link(chain) != NULL && as_link(chain)->object == NULL) {
        chain = as_link(chain)->outer;
    }
    return chain;
}

/* Takes over the reference to `outer`. */
static void
set_outer(link_object *self, PyObject *outer)
{
    PyObject *before = self->outer;
    self->outer = outer;
    Py_DECREF(before);
}

/* `chain` without its link `out`. New reference; NULL with an exception. */
static PyObject *
chain_without(cm_override *override, PyObject *chain, const link_object *out)
{
    PyObject *first = NULL;
    link_object *last = NULL;
    for (link_object *l = as_link(chain); l != out; l = as_link(l->outer)) {
        if (l->object == NULL) {
            continue;
        }
        link_object *copy = new_link(override, l->object, Py_None, l->frame);
        if (copy == NULL) {
            Py_XDECREF(first);
            return NULL;
        }
        copy->token = Py_XNewRef(l->token);
        copy->serial = l->serial;
        copy->has_twin = l->has_twin = true;
        if (last == NULL) {
            first = (PyObject *)(void *)copy;
        }
        else {
            set_outer(last, (PyObject *)(void *)copy);
        }
        last = copy;
    }
    PyObject *rest = Py_NewRef(skip_over(out->outer));
    if (last == NULL) {
        return rest;
    }
    set_outer(last, rest);
    return first;
}

/* -- blocks ---------------------------------------------------------------------------- */

int
cm_override_enter(cm_override *override, PyObject *object)
{
    PyObject *chain = cm_override_read(override);
    if (chain == NULL) {
        return -1;
    }
    link_object *self = new_link(override, object, skip_over(chain),
                                 (PyObject *)(void *)PyEval_GetFrame());
    Py_DECREF(chain);
    if (self == NULL) {
        return -1;
    }
    self->serial = ++override->serial;
    self->token = write_chain(override, (PyObject *)(void *)self);
    int result = self->token == NULL ? -1 : 0;
    Py_DECREF((PyObject *)(void *)self);
    return result;
}

/* In `chain` the innermost link of `object`; with `frame` the one that it entered. */
static link_object *
find_link(PyObject *chain, const PyObject *object, const PyObject *frame)
{
    link_object *l = as_link(chain);
    while (l != NULL && (l->object != object || (frame != NULL && l->frame != frame))) {
        l = as_link(l->outer);
    }
    return l;
}

/* Anywhere: the last link of `object` that `frame` entered; without a frame the only
 * block of the object. */
static link_object *
find_anywhere(const cm_override *override, const PyObject *object,
              const PyObject *frame)
{
    link_object *found = NULL;
    const cm_list *links = &override->links;
    for (const cm_list *n = links->next; n != links; n = n->next) {
        link_object *l = CM_LIST_ENTRY(n, link_object, node);
        if (l->object != object || l->token == NULL
            || (frame != NULL && l->frame != frame)) {
            continue;
        }
        if (found == NULL || l->serial > found->serial) {
            if (found != NULL && frame == NULL) {
                return NULL;
            }
            found = l;
        }
        else if (l->serial != found->serial && frame == NULL) {
            return NULL;
        }
    }
    return found;
}

/* The block is over in every context. */
static void
end_block(cm_override *override, uint64_t serial)
{
    cm_list *links = &override->links;
    for (cm_list *n = links->next; n != links;) {
        link_object *l = CM_LIST_ENTRY(n, link_object, node);
        n = n->next;
        if (l->serial == serial && l->object != NULL) {
            Py_INCREF((PyObject *)(void *)l);
            end_link(l); /* may run anything, and change the list */
            Py_DECREF((PyObject *)(void *)l);
            n = links->next;
        }
    }
}

/* Left where it was entered: contexts that were copied inside go on with the links. */
static void
leave_home(cm_override *override, const link_object *self)
{
    uint64_t serial = self->serial;
    cm_list *links = &override->links;
    for (cm_list *n = links->next; self->has_twin && n != links;) {
        link_object *l = CM_LIST_ENTRY(n, link_object, node);
        n = n->next;
        if (l->serial == serial && l->token != NULL) {
            Py_INCREF((PyObject *)(void *)l);
            forget_home(l); /* as above */
            Py_DECREF((PyObject *)(void *)l);
            n = links->next;
        }
    }
}

/* True in the context that the block was entered in; false also where it was left
 * already. -1 with an exception. */
static int
is_at_home(const cm_override *override, const link_object *self)
{
    if (self->token == NULL) {
        return 0;
    }
    PyObject *done =
        PyObject_CallMethod(override->variable, "reset", "(O)", self->token);
    if (done == NULL && !PyErr_ExceptionMatches(PyExc_ValueError)) {
        return -1;
    }
    PyErr_Clear();
    Py_XDECREF(done);
    return done != NULL;
}

static int
raise_away(const char *what)
{
    PyErr_Format(PyExc_RuntimeError,
                 "the %s was entered in another thread or context: a with block must "
                 "end where it began; it is current in neither of them now",
                 what);
    return -1;
}

/* Take `self` out of `chain`, that of this context. */
static int
leave(cm_override *override, PyObject *chain, link_object *self, const char *what)
{
    PyObject *rest = chain_without(override, chain, self);
    int home = rest == NULL ? -1 : is_at_home(override, self);
    /* The innermost block of this context, with all around it still as they were? */
    bool done = home > 0 && as_link(chain) == self && !self->has_twin;
    PyObject *token = home < 0 || done ? NULL : write_chain(override, rest);
    Py_XDECREF(rest);
    if (token == NULL && !done) {
        return -1;
    }
    Py_XDECREF(token);
    if (home == 0) {
        end_block(override, self->serial);
        return raise_away(what);
    }
    leave_home(override, self);
    forget_home(self);
    return 0;
}

int
cm_override_exit(cm_override *override, PyObject *object, const char *what)
{
    PyObject *chain = cm_override_read(override);
    if (chain == NULL) {
        return -1;
    }
    PyObject *frame = (PyObject *)(void *)PyEval_GetFrame();
    link_object *self = frame == NULL ? NULL : find_link(chain, object, frame);
    link_object *elsewhere = NULL;
    if (self == NULL && frame != NULL) {
        elsewhere = find_anywhere(override, object, frame);
    }
    if (self == NULL && elsewhere == NULL) { /* entered by a function, as stacks do */
        self = find_link(chain, object, NULL);
    }
    if (self == NULL && elsewhere == NULL) {
        elsewhere = find_anywhere(override, object, NULL);
    }
    int result = -1;
    if (self != NULL) {
        Py_INCREF((PyObject *)(void *)self);
        result = leave(override, chain, self, what);
        Py_DECREF((PyObject *)(void *)self);
    }
    else if (elsewhere != NULL) {
        end_block(override, elsewhere->serial);
        result = raise_away(what);
    }
    else {
        PyErr_Format(PyExc_RuntimeError,
                     "the %s is not entered here, or its block ended elsewhere", what);
    }
    Py_DECREF(chain);
    return result;
}
