/* SPDX-License-Identifier: Apache-2.0 */
/* Chains of what is current, in context variables. */
#include "python/core/override.h"

#include "python/core/package.h"
#include "python/core/types.h"

/* A chain is None or a tuple (block, what is outside of it). It is never changed, since
 * contexts share it: a block that ends in the middle has the links inside of it made
 * anew. What a block owns is dropped when it is over. */
typedef struct block_object {
    PyObject_HEAD
    cm_override *override; /* NULL: the state is gone */
    cm_list node;          /* of override->blocks */
    PyObject *object;      /* owned; NULL: over, in all contexts */
    PyObject *frame;       /* owned: that entered; NULL: none, or left in its context */
    PyObject *token;       /* owned: of the context it was entered in; NULL likewise */
    bool is_relinked;      /* since then, so that the token's chain is an old one */
} block_object;

/* Borrowed: the block at the head of a chain; NULL at its end. */
static block_object *
head_of(PyObject *chain)
{
    return chain == NULL || chain == Py_None
               ? NULL
               : (block_object *)(void *)PyTuple_GetItem(chain, 0);
}

static PyObject *
outside_of(PyObject *chain)
{
    return PyTuple_GetItem(chain, 1);
}

/* -- life ------------------------------------------------------------------------------ */

static void
forget_home(block_object *self)
{
    Py_CLEAR(self->frame);
    Py_CLEAR(self->token);
}

/* In every context. May run anything. */
static void
end_block(block_object *self)
{
    if (self->override != NULL && self->object != NULL) {
        self->override->open_count--;
    }
    Py_CLEAR(self->object);
    forget_home(self);
}

static int
block_traverse(PyObject *op, visitproc visit, void *arg)
{
    block_object *self = (block_object *)(void *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->object);
    Py_VISIT(self->frame);
    Py_VISIT(self->token);
    return 0;
}

static int
block_clear(PyObject *op)
{
    end_block((block_object *)(void *)op);
    return 0;
}

static void
block_dealloc(PyObject *op)
{
    block_object *self = (block_object *)(void *)op;
    PyObject_GC_UnTrack(op);
    end_block(self);
    if (self->override != NULL) {
        cm_list_remove(&self->node);
    }
    cm_object_free(op);
}

static PyType_Slot block_slots[] = {
    {Py_tp_traverse, block_traverse},
    {Py_tp_clear, block_clear},
    {Py_tp_dealloc, block_dealloc},
    {0, NULL},
};

static PyType_Spec block_spec = {
    .name = "cumem._core._Current",
    .basicsize = sizeof(block_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = block_slots,
};

int
cm_override_init(cm_override *override, PyObject *module, const char *name)
{
    cm_list_init(&override->blocks);
    override->type = PyType_FromModuleAndSpec(module, &block_spec, NULL);
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
    while (override->blocks.next != NULL
           && (node = cm_list_pop_front(&override->blocks)) != NULL) {
        CM_LIST_ENTRY(node, block_object, node)->override = NULL;
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
    for (block_object *b; object == NULL && (b = head_of(*at)) != NULL;
         *at = outside_of(*at)) {
        object = b->object;
    }
    return object;
}

/* The token of the change; new reference. */
static PyObject *
write_chain(const cm_override *override, PyObject *chain)
{
    return PyObject_CallMethod(override->variable, "set", "(O)", chain);
}

/* Borrowed: `chain` from its first block on that is not over, or None. */
static PyObject *
skip_over(PyObject *chain)
{
    while (head_of(chain) != NULL && head_of(chain)->object == NULL) {
        chain = outside_of(chain);
    }
    return chain;
}

/* `chain` without the block `out`, which is in it. New reference; NULL with an
 * exception. */
static PyObject *
chain_without(PyObject *chain, const block_object *out)
{
    PyObject *inside = PyList_New(0); /* of `out`, innermost first */
    for (; inside != NULL && head_of(chain) != out; chain = outside_of(chain)) {
        if (head_of(chain)->object != NULL
            && PyList_Append(inside, (PyObject *)(void *)head_of(chain)) < 0) {
            Py_CLEAR(inside);
        }
    }
    PyObject *rest = inside == NULL ? NULL : Py_NewRef(skip_over(outside_of(chain)));
    for (Py_ssize_t i = rest == NULL ? 0 : PyList_Size(inside); rest != NULL && i > 0;
         i--) {
        PyObject *block = PyList_GetItem(inside, i - 1);
        PyObject *more = PyTuple_Pack(2, block, rest);
        ((block_object *)(void *)block)->is_relinked = true;
        Py_DECREF(rest);
        rest = more;
    }
    Py_XDECREF(inside);
    return rest;
}

/* -- blocks ---------------------------------------------------------------------------- */

int
cm_override_enter(cm_override *override, PyObject *object)
{
    PyObject *chain = cm_override_read(override);
    PyObject *op =
        chain == NULL ? NULL
                      : PyType_GenericAlloc((PyTypeObject *)(void *) override->type, 0);
    block_object *self = (block_object *)(void *)op;
    if (self != NULL) {
        self->override = override;
        cm_list_push_front(&override->blocks, &self->node);
        override->open_count++;
        self->object = Py_NewRef(object);
        self->frame = Py_XNewRef((PyObject *)(void *)PyEval_GetFrame());
        PyObject *inner = PyTuple_Pack(2, op, skip_over(chain));
        self->token = inner == NULL ? NULL : write_chain(override, inner);
        Py_XDECREF(inner);
    }
    int result = self == NULL || self->token == NULL ? -1 : 0;
    Py_XDECREF(op);
    Py_XDECREF(chain);
    return result;
}

/* In `chain` the innermost block of `object`; with `frame` the one that it entered. */
static block_object *
find_in(PyObject *chain, const PyObject *object, const PyObject *frame)
{
    block_object *b;
    while ((b = head_of(chain)) != NULL
           && (b->object != object || (frame != NULL && b->frame != frame))) {
        chain = outside_of(chain);
    }
    return b;
}

/* Anywhere, where it was not left: the last block of `object` that `frame` entered;
 * without a frame the only block of the object. */
static block_object *
find_anywhere(const cm_override *override, const PyObject *object,
              const PyObject *frame)
{
    block_object *found = NULL;
    const cm_list *blocks = &override->blocks;
    for (const cm_list *n = blocks->next; n != blocks; n = n->next) {
        block_object *b = CM_LIST_ENTRY(n, block_object, node);
        if (b->object != object || b->token == NULL
            || (frame != NULL && b->frame != frame)) {
            continue;
        }
        if (frame != NULL || found != NULL) {
            return frame != NULL ? b : NULL;
        }
        found = b;
    }
    return found;
}

/* True in the context that the block was entered in, where the chain of then is current
 * again; false also where it was left already. -1 with an exception. */
static int
go_home(const cm_override *override, const block_object *self)
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

/* Take `self` out of `chain`, that of this context. True if it was entered in it, -1
 * with an exception. */
static int
leave(const cm_override *override, PyObject *chain, block_object *self)
{
    PyObject *rest = chain_without(chain, self);
    int home = rest == NULL ? -1 : go_home(override, self);
    /* The innermost block of this context, with all around it still as they were? */
    bool done = home > 0 && head_of(chain) == self && !self->is_relinked;
    PyObject *token = home < 0 || done ? NULL : write_chain(override, rest);
    Py_XDECREF(rest);
    if (token == NULL && !done) {
        return -1;
    }
    Py_XDECREF(token);
    return home;
}

int
cm_override_exit(cm_override *override, PyObject *object, const char *what)
{
    PyObject *chain = cm_override_read(override);
    if (chain == NULL) {
        return -1;
    }
    const PyObject *frame = (PyObject *)(void *)PyEval_GetFrame();
    block_object *self = NULL;
    bool is_here = false;
    /* What this frame entered, or else any: a function entered it, as stacks do. */
    for (int any = frame == NULL; self == NULL && any <= 1; any++) {
        self = find_in(chain, object, any ? NULL : frame);
        is_here = self != NULL;
        if (self == NULL) {
            self = find_anywhere(override, object, any ? NULL : frame);
        }
    }
    PyObject *held = Py_XNewRef((PyObject *)(void *)self);
    int home = is_here ? leave(override, chain, self) : 0;
    if (home > 0) {
        forget_home(self); /* contexts that were copied inside go on with the block */
    }
    else if (home == 0 && self != NULL) {
        end_block(self);
    }
    if (home == 0) {
        cm_package_refuse("extension.texts", "refuse_exit",
                          Py_BuildValue("(si)", what, self != NULL));
    }
    Py_XDECREF(held);
    Py_DECREF(chain);
    return home > 0 ? 0 : -1;
}
