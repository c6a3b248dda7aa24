/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps chains of current objects in context variables. All code that changes a chain
 * is in this file, in C, where no signal handler can run between two steps. */
#include "python/core/override.h"

#include "python/core/state.h"
#include "python/core/types.h"

/* -- blocks ---------------------------------------------------------------------------- */

/* A `with` block: the object that it made current, and where it was entered. Most are
 * deallocated when the block ends, and then no Python code may run, since a Ctrl-C that
 * came there would be lost. */
typedef struct with_block {
    PyObject_HEAD
    cm_list node;     /* in override->entered, until the block is over everywhere */
    PyObject *object; /* owned; NULL if the block is over in all contexts */
    PyObject *frame;  /* owned; NULL if no frame entered it, or if it was left in its
                         own context */
    PyObject *token;  /* owned; NULL if the block was left */
    bool is_relinked; /* its link was made anew, so its token belongs to an old chain */
    uint32_t *count; /* borrowed: the counter of blocks in the list, while this block is
                        one of them; else NULL */
} with_block;

static void
put_into_list(cm_override *override, with_block *self)
{
    cm_list_push_back(&override->entered, &self->node);
    self->count = override->block_count;
    ++*self->count;
}

static void
take_from_list(with_block *self)
{
    if (self->count != NULL) {
        cm_list_remove(&self->node);
        --*self->count;
        self->count = NULL;
    }
}

static int
block_traverse(PyObject *op, visitproc visit, void *arg)
{
    with_block *self = (with_block *)(void *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->object);
    Py_VISIT(self->frame);
    Py_VISIT(self->token);
    return 0;
}

static int
block_clear(PyObject *op)
{
    with_block *self = (with_block *)(void *)op;
    Py_CLEAR(self->object);
    Py_CLEAR(self->frame);
    Py_CLEAR(self->token);
    return 0;
}

static void
block_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    take_from_list((with_block *)(void *)op);
    (void)block_clear(op);
    cm_object_free(op);
}

PyObject *
cm_block_type_new(PyObject *module)
{
    static PyType_Slot slots[] = {
        {Py_tp_traverse, block_traverse},
        {Py_tp_clear, block_clear},
        {Py_tp_dealloc, block_dealloc},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "cumem._core._Block",
        .basicsize = sizeof(with_block),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE
                 | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = slots,
    };
    return PyType_FromModuleAndSpec(module, &spec, NULL);
}

/* Make a block that belongs to the calling frame and has no object yet. */
static with_block *
block_new(const cm_override *override)
{
    PyObject *op =
        PyType_GenericAlloc((PyTypeObject *)(void *) override->block_type, 0);
    with_block *self = (with_block *)(void *)op;
    if (self != NULL) {
        cm_list_init(&self->node);
        self->frame = Py_XNewRef((PyObject *)(void *)PyEval_GetFrame());
    }
    return self;
}

/* Mark the block as left, either in this context or in every context. */
static void
block_end(with_block *self, bool everywhere)
{
    if (everywhere) {
        take_from_list(self);
        Py_CLEAR(self->object);
    }
    Py_CLEAR(self->frame);
    Py_CLEAR(self->token);
}

/* -- the variable ---------------------------------------------------------------------- */

static PyObject *
make_variable(const char *name)
{
    PyObject *contextvars = PyImport_ImportModule("contextvars");
    if (contextvars == NULL) {
        return NULL;
    }
    PyObject *variable = PyObject_CallMethod(contextvars, "ContextVar", "s", name);
    Py_DECREF(contextvars);
    return variable;
}

int
cm_override_init(cm_override *override, PyObject *block_type, const char *name,
                 uint32_t *block_count)
{
    cm_list_init(&override->entered);
    override->block_count = block_count;
    override->block_type = Py_NewRef(block_type);
    override->variable = make_variable(name);
    if (override->variable == NULL) {
        return -1;
    }
    override->getter = PyObject_GetAttrString(override->variable, "get");
    override->setter = PyObject_GetAttrString(override->variable, "set");
    override->resetter = PyObject_GetAttrString(override->variable, "reset");
    if (override->getter == NULL || override->setter == NULL
        || override->resetter == NULL) {
        return -1;
    }
    return 0;
}

void
cm_override_fini(cm_override *override)
{
    if (override->entered.next == NULL) { /* cm_override_init() was never called */
        return;
    }
    while (!cm_list_is_empty(&override->entered)) {
        take_from_list(CM_LIST_ENTRY(override->entered.next, with_block, node));
    }
}

PyObject *
cm_override_read(const cm_override *override)
{
    return PyObject_CallFunctionObjArgs(override->getter, Py_None, NULL);
}

/* Make the chain current. Returns the token that sets it back, or NULL with an
 * exception. */
static PyObject *
set(const cm_override *override, PyObject *chain)
{
    return PyObject_CallFunctionObjArgs(override->setter, chain, NULL);
}

/* Set the variable back to the value that it had before the token was given. Returns 1,
 * or 0 if the token is from another context, or -1 with an exception. */
static int
reset(const cm_override *override, PyObject *token)
{
    Py_INCREF(token); /* the block may drop its reference meanwhile */
    PyObject *done = PyObject_CallFunctionObjArgs(override->resetter, token, NULL);
    Py_DECREF(token);
    if (done != NULL) {
        Py_DECREF(done);
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_ValueError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

/* -- chains ---------------------------------------------------------------------------- */

/* Return the innermost block of a chain, or NULL at its end. This and the next two
 * functions return borrowed references. */
static with_block *
head_of(PyObject *chain)
{
    if (chain == NULL || chain == Py_None) {
        return NULL;
    }
    return (with_block *)(void *)PyTuple_GetItem(chain, 0);
}

/* Return the part of a chain outside of its innermost block. */
static PyObject *
tail_of(PyObject *chain)
{
    return PyTuple_GetItem(chain, 1);
}

/* Return the part of a chain that begins at its innermost block which is not over. */
static PyObject *
skip_over(PyObject *chain)
{
    with_block *head;
    while ((head = head_of(chain)) != NULL && head->object == NULL) {
        chain = tail_of(chain);
    }
    return chain;
}

PyObject *
cm_override_step(PyObject **at)
{
    PyObject *chain = skip_over(*at);
    with_block *head = head_of(chain);
    *at = head == NULL ? NULL : tail_of(chain);
    return head == NULL ? NULL : head->object;
}

/* -- the beginning of a block ---------------------------------------------------------- */

/* Make the block current in this context, inside of all others. Returns 0, or -1 with
 * an exception. */
static int
link_block(const cm_override *override, with_block *self)
{
    PyObject *outer = cm_override_read(override);
    if (outer == NULL) {
        return -1;
    }
    PyObject *chain = PyTuple_Pack(2, (PyObject *)(void *)self, skip_over(outer));
    Py_DECREF(outer);
    if (chain == NULL) {
        return -1;
    }
    self->token = set(override, chain);
    Py_DECREF(chain);
    return self->token == NULL ? -1 : 0;
}

PyObject *
cm_override_enter(cm_override *override, PyObject *object)
{
    with_block *self = block_new(override);
    if (self == NULL) {
        return NULL;
    }
    PyObject *answer = NULL;
    if (link_block(override, self) == 0) {
        self->object = Py_NewRef(object);
        put_into_list(override, self);
        answer = Py_NewRef(object);
    }
    Py_DECREF((PyObject *)(void *)self); /* the chain keeps it alive */
    return answer;
}

/* -- the end of a block ---------------------------------------------------------------- */

/* Find the innermost block of this context that has `object` and that `frame` entered.
 * Without a frame (NULL) any will do. */
static with_block *
find_here(PyObject *chain, PyObject *object, PyObject *frame)
{
    with_block *each;
    while ((each = head_of(chain)) != NULL) {
        if (each->object == object && (frame == NULL || each->frame == frame)) {
            return each;
        }
        chain = tail_of(chain);
    }
    return NULL;
}

/* Find, in all contexts, the last block that has `object`, that `frame` entered and
 * that nobody has left. Without a frame (NULL) it is found only if it is the only
 * one. */
static with_block *
find_anywhere(cm_override *override, PyObject *object, PyObject *frame)
{
    with_block *found = NULL;
    for (cm_list *node = override->entered.prev; node != &override->entered;
         node = node->prev) {
        with_block *each = CM_LIST_ENTRY(node, with_block, node);
        if (each->object != object || each->token == NULL) {
            continue;
        }
        if (frame == NULL) {
            if (found != NULL) {
                return NULL;
            }
            found = each;
        }
        else if (each->frame == frame) {
            return each;
        }
    }
    return found;
}

/* Find the block that an exit is to end. It is one that this frame entered, or else one
 * that a function entered for it, as contextlib.ExitStack does. Returns it borrowed, or
 * NULL if there is none. */
static with_block *
find_block(cm_override *override, PyObject *chain, PyObject *object, PyObject *frame,
           bool *is_here)
{
    with_block *found = find_here(chain, object, frame);
    *is_here = found != NULL;
    if (found == NULL) {
        found = find_anywhere(override, object, frame);
    }
    if (found == NULL && frame != NULL) {
        return find_block(override, chain, object, NULL, is_here);
    }
    return found;
}

/* Make the chain without `self`, which is in it. The links inside of it are made anew.
 * Returns a new reference, or NULL with an exception. */
static PyObject *
make_without(PyObject *chain, const with_block *self)
{
    /* Blocks inside of it, from the innermost outwards. */
    PyObject *inside = PyList_New(0);
    while (inside != NULL && head_of(chain) != self) {
        cm_append(&inside, Py_NewRef((PyObject *)(void *)head_of(chain)));
        chain = tail_of(chain);
    }
    if (inside == NULL) {
        return NULL;
    }
    PyObject *rest = Py_NewRef(skip_over(tail_of(chain)));
    for (Py_ssize_t i = PyList_Size(inside) - 1; i >= 0 && rest != NULL; i--) {
        PyObject *op = PyList_GetItem(inside, i);
        with_block *each = (with_block *)(void *)op;
        if (each->object != NULL) {
            cm_replace(&rest, PyTuple_Pack(2, op, rest));
            each->is_relinked = true;
        }
    }
    Py_DECREF(inside);
    return rest;
}

/* Make the chain of this context without `self` current. Returns 1 if the block was
 * entered in this context, 0 if it was entered in another, or -1 with an exception. */
static int
take_out(const cm_override *override, PyObject *chain, const with_block *self)
{
    PyObject *rest = make_without(chain, self);
    if (rest == NULL) {
        return -1;
    }
    int is_home = self->token == NULL ? 0 : reset(override, self->token);
    if (is_home == 1 && head_of(chain) == self && !self->is_relinked) {
        /* The chain outside of the block has not changed, so setting the token back was
         * enough. */
        Py_DECREF(rest);
        return 1;
    }
    if (is_home >= 0) {
        PyObject *token = set(override, rest);
        is_home = token == NULL ? -1 : is_home;
        Py_XDECREF(token);
    }
    Py_DECREF(rest);
    return is_home;
}

/* End a block in any way but the usual one. Returns 0, or -1 with an exception. */
static int
leave(cm_override *override, PyObject *chain, PyObject *object, PyObject *frame,
      const char *what)
{
    bool is_here;
    with_block *self = find_block(override, chain, object, frame, &is_here);
    if (self == NULL) {
        return cm_package_refuse("devices.blocks", "refuse_stray_end",
                                 Py_BuildValue("(s)", what));
    }
    Py_INCREF((PyObject *)(void *)self);
    int is_home = is_here ? take_out(override, chain, self) : 0;
    /* A block that was left in its own context is still current in contexts that were
     * copied inside of it. */
    if (is_home >= 0) {
        block_end(self, is_home == 0);
    }
    Py_DECREF((PyObject *)(void *)self);
    if (is_home != 0) {
        return is_home < 0 ? -1 : 0;
    }
    return cm_package_refuse("devices.blocks", "refuse_end_elsewhere",
                             Py_BuildValue("(s)", what));
}

/* End the innermost block in the frame that entered it, which is the usual case and
 * needs no search. Returns 1, or 0 if this is not that case, or -1 with an
 * exception. */
static int
leave_usual(const cm_override *override, PyObject *chain, PyObject *object,
            PyObject *frame)
{
    with_block *self = head_of(chain);
    if (self == NULL || self->object != object || self->frame != frame
        || self->token == NULL || self->is_relinked) {
        return 0;
    }
    int is_home = reset(override, self->token);
    if (is_home == 1) {
        block_end(self, false);
    }
    return is_home;
}

PyObject *
cm_override_exit(cm_override *override, PyObject *object, const char *what)
{
    PyObject *chain = cm_override_read(override);
    if (chain == NULL) {
        return NULL;
    }
    PyObject *frame = Py_XNewRef((PyObject *)(void *)PyEval_GetFrame());
    int done = leave_usual(override, chain, object, frame);
    if (done == 0) {
        done = leave(override, chain, object, frame, what);
    }
    else if (done > 0) {
        done = 0;
    }
    Py_XDECREF(frame);
    Py_DECREF(chain);
    return done < 0 ? NULL : Py_NewRef(Py_None);
}
