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
    if (self->override != NULL) {
        cm_list_remove(&self->node); /* nobody finds it while it ends */
    }
    end_block(self);
    cm_object_free(op);
}

/* For the package: with True in every context. */
static PyObject *
block_end(PyObject *op, PyObject *everywhere)
{
    (everywhere == Py_True ? end_block : forget_home)((block_object *)(void *)op);
    Py_RETURN_NONE;
}

static PyMethodDef block_methods[] = {
    {"end", block_end, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef block_members[] = {
    {"object", T_OBJECT, offsetof(block_object, object), READONLY, NULL},
    {"frame", T_OBJECT, offsetof(block_object, frame), READONLY, NULL},
    {"token", T_OBJECT, offsetof(block_object, token), READONLY, NULL},
    {"is_relinked", T_BOOL, offsetof(block_object, is_relinked), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot block_slots[] = {
    {Py_tp_traverse, block_traverse}, {Py_tp_clear, block_clear},
    {Py_tp_dealloc, block_dealloc},   {Py_tp_methods, block_methods},
    {Py_tp_members, block_members},   {0, NULL},
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

/* Borrowed: `chain` from its first block on that is not over, or None. */
static PyObject *
skip_over(PyObject *chain)
{
    while (head_of(chain) != NULL && head_of(chain)->object == NULL) {
        chain = outside_of(chain);
    }
    return chain;
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
        self->token = inner == NULL ? NULL
                                    : PyObject_CallMethod(override->variable, "set",
                                                          "(O)", inner);
        Py_XDECREF(inner);
    }
    int result = self == NULL || self->token == NULL ? -1 : 0;
    Py_XDECREF(op);
    Py_XDECREF(chain);
    return result;
}

/* The blocks of `object` that were not left, the last first; new reference. */
static PyObject *
list_entered(const cm_override *override, const PyObject *object)
{
    PyObject *list = PyList_New(0);
    const cm_list *blocks = &override->blocks;
    for (const cm_list *n = blocks->next; n != blocks; n = n->next) {
        block_object *b = CM_LIST_ENTRY(n, block_object, node);
        if (b->object == object && b->token != NULL) {
            cm_append(&list, Py_NewRef((PyObject *)(void *)b));
        }
    }
    return list;
}

/* Here the innermost block, in the frame and the context that it was entered in, with
 * all around it still as it was; any other is left to the package. */
int
cm_override_exit(cm_override *override, PyObject *object, const char *what)
{
    PyObject *chain = cm_override_read(override);
    PyObject *frame = (PyObject *)(void *)PyEval_GetFrame();
    block_object *self = head_of(chain);
    bool is_usual = self != NULL && self->object == object && self->frame == frame
                    && self->token != NULL && !self->is_relinked;
    PyObject *done =
        is_usual ? PyObject_CallMethod(override->variable, "reset", "(O)", self->token)
                 : NULL;
    if (done != NULL) {
        forget_home(self); /* contexts that were copied inside go on with the block */
    }
    else if (chain != NULL && (!is_usual || PyErr_ExceptionMatches(PyExc_ValueError))) {
        PyErr_Clear();
        done = cm_package_call("extension.blocks", "leave",
                               Py_BuildValue("(ONOOs)", override->variable,
                                             list_entered(override, object), object,
                                             frame == NULL ? Py_None : frame, what));
    }
    Py_XDECREF(done);
    Py_XDECREF(chain);
    return done == NULL ? -1 : 0;
}
