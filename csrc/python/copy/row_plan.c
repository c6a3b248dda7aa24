/* SPDX-License-Identifier: Apache-2.0 */
/* cumem.RowPlan copies the same rows again and again, all layers together or one by
 * one.
 *
 * The idea
 * --------
 * copy_rows() reads its arrays, pairs them, reads and checks the numbers, looks for a
 * device whose kernel can copy, puts the numbers where that kernel reads them, and then
 * copies. A plan does all of that but the copy when it is made. It keeps the outcome in
 * the structs that a call of copy_rows() has for itself (rows_call.h): a cm_row_copy
 * and, if a kernel copies, a cm_rows_kernel. Neither changes afterwards. A copy works
 * on a cm_row_copy of its own, which borrows the ends of one layer or of all, and then
 * goes the same way as a call. So several threads may copy by one plan at the same
 * time.
 *
 * Example: 32 layers of a cache are loaded while the model computes. copy_layers()
 * makes 32 copies, each of which comes after the one before, and returns their
 * Transfers. The stream of the model waits for each by Transfer.order() before it
 * computes that layer.
 *
 * Wrong numbers in memory of a device
 * -----------------------------------
 * Each copy has a word of its own, from which its ticket learns that the kernel has met
 * wrong numbers. A graph has no ticket. So the plan owns one more word for all of its
 * copies: in a graph the kernel writes into it, and elsewhere the tickets do. check()
 * reads that word and clears it.
 *
 * Who keeps what
 * --------------
 * The plan keeps its arrays open, as an export does: free() of a buffer raises
 * BufferError until close(). Arrays of other libraries may move, though, so each copy
 * looks whether they have. A copy that is under way keeps its ends, the numbers and the
 * word as the engine keeps all memory, whatever becomes of the plan. A graph keeps them
 * as well, since all of these are ends of the copy and memory that was used in a
 * capture never goes back to its pool.
 *
 * Locks: none; the GIL is held, and released to copy. close() may come from another
 * thread meanwhile, so the last copy that is under way drops the ends. */
#include <stdlib.h>

#include "base/nvtx.h"
#include "docstrings.h"
#include "python/copy/copy_functions.h"
#include "python/copy/rows_call.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"

typedef struct row_plan {
    PyObject_HEAD
    cm_state *state;
    cm_runtime *rt; /* borrowed; a forked child has another one */
    uint64_t generation;
    cm_row_copy copy; /* what is prepared; its ends own the arrays and the numbers */
    cm_rows_kernel kernel;
    bool has_kernel; /* the kernel copies, unless runs are better */
    /* The plan reports these three numbers even after it is closed. */
    Py_ssize_t layer_count;
    uint64_t row_count; /* of each layer */
    uint64_t nbytes;    /* of all layers */
    Py_ssize_t users;   /* calls under way, or the constructor, that need the ends */
    bool is_ready;      /* the constructor is done */
    bool closed;
    PyObject *weakrefs;
} row_plan;

/* -- life --------------------------------------------------------------------------- */

/* Count one more call, or one less, that uses the memory of the ends. */
static void
count_calls(const row_plan *self, bool begins)
{
    for (int side = CM_DST; side <= CM_SRC; side++) {
        const cm_rows_end *end = &self->copy.ends[side];
        for (Py_ssize_t i = 0; i < end->read_count; i++) {
            cm_storage_count_call(end->operands[i].storage, begins);
        }
        cm_storage_count_call(self->kernel.memory[side].storage, begins);
    }
}

/* A plan keeps its ends open between its copies too. Only while a copy is under way is
 * their memory used by a call. */
static void
begin_use(row_plan *self)
{
    if (self->users++ == 0) {
        count_calls(self, true);
    }
}

static void
end_use(row_plan *self)
{
    if (--self->users == 0) {
        count_calls(self, false);
    }
}

/* Drop everything that the plan keeps, unless a copy is under way. */
static void
drop_parts(row_plan *self)
{
    if (self->users > 0) {
        return;
    }
    count_calls(self, true); /* dropping the ends takes this back */
    /* Dropping an array may run Python code, which must not find the array here any
     * more. */
    cm_row_copy copy = self->copy;
    cm_rows_kernel kernel = self->kernel;
    memset(&self->copy, 0, sizeof(self->copy));
    memset(&self->kernel, 0, sizeof(self->kernel));
    cm_rows_kernel_fini(&kernel);
    cm_rows_end_fini(&copy.ends[CM_DST]);
    cm_rows_end_fini(&copy.ends[CM_SRC]);
}

static int
visit_operand(const cm_operand *operand, visitproc visit, void *arg)
{
    Py_VISIT(operand->dtype);
    Py_VISIT(operand->keep);
    Py_VISIT(operand->locked);
    return 0;
}

static int
plan_traverse(PyObject *op, visitproc visit, void *arg)
{
    const row_plan *self = (row_plan *)(void *)op;
    Py_VISIT(Py_TYPE(op));
    int result = 0;
    for (int side = CM_DST; result == 0 && side <= CM_SRC; side++) {
        const cm_rows_end *end = &self->copy.ends[side];
        Py_VISIT(end->arrays);
        Py_VISIT(end->given.array);
        Py_VISIT(end->given.on_device);
        for (Py_ssize_t i = 0; result == 0 && i < end->read_count; i++) {
            result = visit_operand(&end->operands[i], visit, arg);
        }
    }
    return result;
}

static int
plan_clear(PyObject *op)
{
    row_plan *self = (row_plan *)(void *)op;
    self->closed = true;
    drop_parts(self);
    return 0;
}

static void
plan_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    (void)plan_clear(op);
    cm_object_free(op);
}

/* -- construction ------------------------------------------------------------------- */

/* The arguments of RowPlan(), by their places. */
enum { DSTS, SRCS, DST_ROWS, SRC_ROWS, MAX_SMS, PLAN_COUNT };

/* Begin an end, which keeps its arrays even if the list that was given changes. Returns
 * 0, or -1 with an exception. */
static int
begin_end(cm_rows_end *end, PyObject *object)
{
    int result = cm_rows_end_begin(end, object);
    end->object = end->arrays;
    return result;
}

static uint64_t
row_nbytes(const cm_region *array)
{
    uint64_t nbytes = (uint64_t)array->itemsize;
    for (int axis = 1; axis < array->ndim; axis++) {
        nbytes *= (uint64_t)array->shape[axis];
    }
    return nbytes;
}

/* Count the layers, the rows and their bytes. */
static void
measure(row_plan *self)
{
    const cm_rows_end *src = &self->copy.ends[CM_SRC];
    self->layer_count = self->copy.layer_count;
    self->row_count = src->numbers.count;
    for (Py_ssize_t i = 0; i < self->layer_count; i++) {
        self->nbytes += self->row_count * row_nbytes(&src->operands[i].region);
    }
}

/* Read and check the arguments, as copy_rows() does. Returns 0, or -1 with an
 * exception. */
static int
read_arguments(cm_row_copy *copy, PyObject *const *values)
{
    PyObject *const numbers[2] = {values[DST_ROWS], values[SRC_ROWS]};
    if (cm_rows_read_max_sms(copy, values[MAX_SMS]) < 0
        || begin_end(&copy->ends[CM_DST], values[DSTS]) < 0
        || begin_end(&copy->ends[CM_SRC], values[SRCS]) < 0
        || cm_rows_read_end(copy, CM_DST) < 0 || cm_rows_read_end(copy, CM_SRC) < 0
        || cm_rows_check_layers(copy) < 0) {
        return -1;
    }
    return cm_rows_read_numbers(copy, numbers);
}

/* Check the numbers that the host has. If the arrays of each end have equal numbers of
 * rows, which is the usual case, the numbers are settled for all copies. Returns 0, or
 * -1 with an exception. */
static int
check_numbers(cm_row_copy *copy)
{
    if (cm_rows_keep_numbers(copy) < 0) {
        return -1;
    }
    for (Py_ssize_t layer = 0; layer < copy->layer_count; layer++) {
        for (int side = CM_DST; side <= CM_SRC; side++) {
            if (copy->ends[side].given.on_device == NULL
                && cm_rows_settle(copy, layer, side) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* Check the numbers and, if a kernel may copy, put them where it reads them. Returns 0,
 * or -1 with an exception. */
static int
prepare(row_plan *self)
{
    int device;
    if (check_numbers(&self->copy) < 0) {
        return -1;
    }
    int found = cm_rows_choose(&self->copy, &device);
    if (found <= 0) {
        return found;
    }
    self->has_kernel = true;
    if (cm_rows_kernel_init(&self->kernel, &self->copy, device) < 0) {
        return -1;
    }
    return cm_rows_kernel_add_word(&self->kernel);
}

/* Fill in a new plan. The caller has entered the state. Returns 0, or -1 with an
 * exception. */
static int
init_plan(row_plan *self, PyObject *const *values)
{
    cm_row_copy *copy = &self->copy;
    copy->state = self->state;
    copy->function = "RowPlan";
    copy->is_plan = true;
    cm_rows_name_ends(copy, "dsts", "srcs");
    self->rt = cm_state_runtime(self->state);
    self->generation = self->state->generation;
    if (self->rt == NULL || read_arguments(copy, values) < 0 || prepare(self) < 0) {
        return -1;
    }
    measure(self);
    self->is_ready = true;
    return 0;
}

/* This is the constructor RowPlan(dsts, srcs, dst_rows=None, src_rows=None, *,
 * max_sms=None). */
static PyObject *
plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"dsts",     "srcs",    "dst_rows",
                                        "src_rows", "max_sms", NULL};
    PyObject *values[PLAN_COUNT];
    if (cm_args_parse_new("RowPlan", args, kwargs, names, 4, 2, values) < 0) {
        return NULL;
    }
    PyObject *op = PyType_GenericAlloc(type, 0);
    if (op == NULL) {
        return NULL;
    }
    row_plan *self = (row_plan *)(void *)op;
    self->state = PyType_GetModuleState(type);
    /* Reading the arrays runs Python code, which may find the plan in gc.get_objects()
     * and close it. */
    begin_use(self);
    cm_state_enter(self->state);
    int result = init_plan(self, values);
    cm_state_leave(self->state);
    end_use(self);
    if (result < 0) {
        Py_CLEAR(op);
    }
    else if (self->closed) {
        drop_parts(self);
    }
    return op;
}

/* Check that a plan can be used. Returns 0, or -1 with ValueError or, in a forked
 * child, with RuntimeError. */
static int
check_open(const row_plan *self)
{
    cm_state *state = self->state;
    if (self->closed || !self->is_ready || self->generation != state->generation) {
        PyErr_SetString(PyExc_ValueError, "the plan is closed: make another one");
        return -1;
    }
    if (self->rt != state->runtime || cm_runtime_is_forked(self->rt)) {
        return cm_py_raise_int(state, cm_fail(CM_EFORKED, 0),
                               "using a plan that the parent has made: make it in this "
                               "process");
    }
    return 0;
}

/* -- a copy ------------------------------------------------------------------------- */

/* The layers that a copy has. */
typedef struct layers {
    Py_ssize_t first;
    Py_ssize_t count;
} layers;

/* Read the argument layer=. If it is not given, the copy has all layers. Returns 0, or
 * -1 with an exception. */
static int
read_layer(const row_plan *self, PyObject *given, layers *out)
{
    int64_t layer;
    Py_ssize_t count = self->layer_count;
    *out = (layers){0, count};
    if (!cm_arg_is_given(given)) {
        return 0;
    }
    if (cm_arg_int64(given, "layer", &layer) < 0) {
        return -1;
    }
    if (layer < -count || layer >= count) {
        PyErr_Format(PyExc_IndexError, "layer is %lld, but the plan has %zd layers",
                     (long long)layer, count);
        return -1;
    }
    *out = (layers){(Py_ssize_t)layer + (layer < 0 ? count : 0), 1};
    return 0;
}

/* Check that the memory of an end is still there, and at the same address. Returns 0,
 * or -1 with an exception. */
static int
check_memory(const cm_operand *operand)
{
    return operand->storage == NULL ? 0 : cm_storage_check_open(operand->storage);
}

/* Borrow an end of the plan for one copy. Returns 0, or -1 with an exception. */
static int
borrow_end(const row_plan *self, cm_side side, layers which, cm_rows_end *out)
{
    const cm_rows_end *end = &self->copy.ends[side];
    *out = (cm_rows_end){.name = end->name,
                         .numbers_name = end->numbers_name,
                         .object = end->object,
                         .is_list = end->is_list,
                         .operands = end->operands + which.first,
                         .given = {.count = end->given.count,
                                   .array = Py_XNewRef(end->given.array),
                                   .on_device = Py_XNewRef(end->given.on_device)}};
    cm_chosen_rows_share(&out->numbers, &end->numbers);
    for (Py_ssize_t i = 0; i < which.count; i++) {
        if (check_memory(&out->operands[i]) < 0) {
            return -1;
        }
    }
    return self->kernel.has_memory[side] ? check_memory(&self->kernel.memory[side]) : 0;
}

/* Drop the parts of a borrowed end that the copy owns. */
static void
give_end_back(cm_rows_end *end)
{
    cm_chosen_rows_fini(&end->numbers);
    cm_given_rows_fini(&end->given);
}

/* Copy some layers, and make the answer, which is None or a Transfer. `copy` has the
 * arguments of this copy alone. Returns NULL with an exception if it fails. */
static PyObject *
copy_layers_by(row_plan *self, cm_row_copy *copy, layers which)
{
    int copied = 0;
    PyObject *answer = NULL;
    CM_NVTX(copy->function, 0);
    copy->state = self->state;
    copy->is_plan = true;
    copy->max_sms = self->copy.max_sms;
    copy->first_layer = which.first;
    copy->layer_count = which.count;
    if (borrow_end(self, CM_DST, which, &copy->ends[CM_DST]) < 0
        || borrow_end(self, CM_SRC, which, &copy->ends[CM_SRC]) < 0) {
        goto end;
    }
    if (self->has_kernel && which.count > 0) {
        cm_rows_kernel kernel = self->kernel;
        kernel.copy = copy;
        copied = cm_rows_copy_by_kernel(&kernel, &answer);
    }
    if (copied == 0) {
        answer = cm_rows_copy_by_runs(copy);
    }
end:
    give_end_back(&copy->ends[CM_DST]);
    give_end_back(&copy->ends[CM_SRC]);
    cm_rows_end_fini(&copy->between);
    Py_XDECREF(copy->packed);
    return answer;
}

/* Begin a call that copies: read stream= and progress=, and keep close() from dropping
 * the ends. leave() has to be called in any case. Returns 0, or -1 with an
 * exception. */
static int
enter(row_plan *self, cm_call_frame *frame, PyObject *stream, PyObject *progress)
{
    const cm_rows_end *ends = self->copy.ends;
    begin_use(self);
    *frame = (cm_call_frame){.state = self->state};
    cm_state_enter(self->state);
    if (check_open(self) < 0 || cm_state_runtime(self->state) == NULL) {
        return -1;
    }
    int device = cm_device_hint_of(self->state, ends[CM_DST].object,
                                   ends[CM_SRC].object, stream, 1);
    int result = cm_call_enter(frame, self->state, stream, device, progress, "copy");
    cm_state_leave(self->state); /* cm_call_enter() has entered it as well */
    return result;
}

static PyObject *
leave(row_plan *self, cm_call_frame *frame, PyObject *answer)
{
    answer = cm_call_leave(frame, answer);
    end_use(self);
    if (self->closed) {
        drop_parts(self);
    }
    return answer;
}

/* This is the method copy(*, stream=None, layer=None, progress=None). */
static PyObject *
plan_copy(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { STREAM, LAYER, PROGRESS, COUNT };
    static const char *const names[] = {"stream", "layer", "progress", NULL};
    row_plan *self = (row_plan *)(void *)op;
    PyObject *values[COUNT];
    PyObject *answer = NULL;
    cm_call_frame frame;
    layers which;
    if (cm_args_parse("copy", args, nargs, kwnames, names, 0, 0, values) < 0) {
        return NULL;
    }
    if (enter(self, &frame, values[STREAM], values[PROGRESS]) == 0
        && read_layer(self, values[LAYER], &which) == 0) {
        cm_row_copy copy = {.function = "RowPlan.copy",
                            .blocking = true,
                            .stream = frame.stream,
                            .stream_argument = values[STREAM],
                            .progress = &frame.progress};
        answer = copy_layers_by(self, &copy, which);
    }
    return leave(self, &frame, answer);
}

/* This is the method copy_async(*, stream=None, after=None, layer=None). */
static PyObject *
plan_copy_async(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    enum { STREAM, AFTER, LAYER, COUNT };
    static const char *const names[] = {"stream", "after", "layer", NULL};
    row_plan *self = (row_plan *)(void *)op;
    PyObject *values[COUNT];
    PyObject *answer = NULL;
    cm_call_frame frame;
    layers which;
    if (cm_args_parse("copy_async", args, nargs, kwnames, names, 0, 0, values) < 0) {
        return NULL;
    }
    if (enter(self, &frame, values[STREAM], NULL) == 0
        && read_layer(self, values[LAYER], &which) == 0) {
        cm_row_copy copy = {.function = "RowPlan.copy_async",
                            .stream = frame.stream,
                            .stream_argument = values[STREAM],
                            .after = values[AFTER]};
        answer = copy_layers_by(self, &copy, which);
    }
    return leave(self, &frame, answer);
}

/* Start the copy of each layer, after that of the layer before. On a stream the layers
 * have this order anyway, and a layer in which the host has a part need not wait until
 * the layer before is over. Only the first layer has to come after the streams that
 * were given. Returns a list of Transfers, or NULL with an exception, after which some
 * of the copies may be under way. */
static PyObject *
start_layers(row_plan *self, const cm_row_copy *given)
{
    cm_ticket *before = NULL; /* borrowed from the Transfer of the layer before, which
                                 is in the list */
    PyObject *transfers = PyList_New(0);
    for (Py_ssize_t i = 0; transfers != NULL && i < self->layer_count; i++) {
        cm_row_copy copy = *given;
        if (before != NULL) {
            copy.after = NULL;
        }
        if (copy.stream == NULL) {
            copy.after_ticket = before;
        }
        PyObject *transfer = copy_layers_by(self, &copy, (layers){i, 1});
        if (transfer == NULL || PyList_Append(transfers, transfer) < 0) {
            Py_CLEAR(transfers);
        }
        else {
            before = ((cm_transfer_object *)(void *)transfer)->ticket;
        }
        Py_XDECREF(transfer);
    }
    return transfers;
}

/* This is the method copy_layers(*, stream=None, after=None). */
static PyObject *
plan_copy_layers(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames)
{
    enum { STREAM, AFTER, COUNT };
    static const char *const names[] = {"stream", "after", NULL};
    row_plan *self = (row_plan *)(void *)op;
    PyObject *values[COUNT];
    PyObject *answer = NULL;
    cm_call_frame frame;
    if (cm_args_parse("copy_layers", args, nargs, kwnames, names, 0, 0, values) < 0) {
        return NULL;
    }
    if (enter(self, &frame, values[STREAM], NULL) == 0) {
        cm_row_copy copy = {.function = "RowPlan.copy_layers",
                            .stream = frame.stream,
                            .stream_argument = values[STREAM],
                            .after = values[AFTER]};
        answer = start_layers(self, &copy);
    }
    return leave(self, &frame, answer);
}

/* -- wrong numbers ------------------------------------------------------------------ */

/* This is the method check(), which reads the word for wrong numbers and clears it. A
 * ticket writes to that word when somebody finds that its copy has ended, so the engine
 * first looks which copies have ended. */
static PyObject *
plan_check(PyObject *op, PyObject *Py_UNUSED(unused))
{
    row_plan *self = (row_plan *)(void *)op;
    cm_state *state = self->state;
    if (check_open(self) < 0) {
        return NULL;
    }
    cm_engine *engine = cm_state_engine(state, -1);
    if (engine == NULL) {
        return NULL;
    }
    cm_state_enter(state);
    begin_use(self);
    Py_BEGIN_ALLOW_THREADS
    cm_engine_poll(engine);
    Py_END_ALLOW_THREADS
    uint32_t wrong = 0;
    if (self->kernel.word != NULL) {
        void *word = self->kernel.word->region.host;
        wrong = atomic_exchange((_Atomic uint32_t *)word, 0);
    }
    end_use(self);
    if (self->closed) {
        drop_parts(self);
    }
    cm_state_leave(state);
    if (wrong != 0) {
        return cm_py_raise(state, cm_fail(CM_EROWS, wrong), "in copies of a plan");
    }
    return Py_NewRef(Py_None);
}

/* -- the rest ----------------------------------------------------------------------- */

static PyObject *
plan_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    (void)plan_clear(op);
    return Py_NewRef(Py_None);
}

static PyObject *
plan_enter(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return check_open((row_plan *)(void *)op) < 0 ? NULL : Py_NewRef(op);
}

static PyObject *
plan_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    return plan_close(op, NULL);
}

enum fact { FACT_layer_count, FACT_nbytes, FACT_closed };

static PyObject *
plan_get(PyObject *op, void *fact)
{
    const row_plan *self = (row_plan *)(void *)op;
    bool is_closed = self->closed || self->generation != self->state->generation;
    switch ((uintptr_t)fact) {
    case FACT_layer_count:
        return PyLong_FromSsize_t(self->layer_count);
    case FACT_nbytes:
        return PyLong_FromUnsignedLongLong(self->nbytes);
    default:
        return PyBool_FromLong(is_closed);
    }
}

static PyObject *
plan_repr(PyObject *op)
{
    const row_plan *self = (row_plan *)(void *)op;
    return cm_package_call(
        "buffers.texts", "row_plan_repr",
        Py_BuildValue("(OKN)", op, (unsigned long long)self->row_count,
                      PyBool_FromLong(cm_state_is_emulated(self->state))));
}

/* This refuses pickle and copy, always with TypeError. A plan is bound to memory of
 * this process, so neither a pickle nor a copy of it could be used. */
static PyObject *
plan_reduce(PyObject *op CM_UNUSED, PyObject *Py_UNUSED(protocol))
{
    PyErr_SetString(PyExc_TypeError,
                    "a RowPlan cannot be pickled or copied: make another one with "
                    "RowPlan(dsts, srcs, dst_rows, src_rows)");
    return NULL;
}

/* -- tables ------------------------------------------------------------------------- */

static PyMethodDef plan_methods[] = {
    {"copy", CM_METHOD(plan_copy), CM_KEYWORDS, CM_DOC_RowPlan_copy},
    {"copy_async", CM_METHOD(plan_copy_async), CM_KEYWORDS, CM_DOC_RowPlan_copy_async},
    {"copy_layers", CM_METHOD(plan_copy_layers), CM_KEYWORDS,
     CM_DOC_RowPlan_copy_layers},
    {"check", plan_check, METH_NOARGS, CM_DOC_RowPlan_check},
    {"close", plan_close, METH_NOARGS, CM_DOC_RowPlan_close},
    {"__enter__", plan_enter, METH_NOARGS, CM_DOC_RowPlan___enter__},
    {"__exit__", plan_exit, METH_VARARGS, CM_DOC_RowPlan___exit__},
    {"__reduce_ex__", plan_reduce, METH_O, CM_DOC_RowPlan___reduce_ex__},
    {NULL, NULL, 0, NULL},
};

#define FACT(name) {#name, plan_get, NULL, CM_DOC_RowPlan_##name, (void *)FACT_##name}

static PyGetSetDef plan_getset[] = {
    FACT(layer_count),
    FACT(nbytes),
    FACT(closed),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef plan_members[] = CM_WEAKREFS(row_plan);

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, (void *)CM_DOC_RowPlan}, {Py_tp_new, plan_new},
    {Py_tp_traverse, plan_traverse},     {Py_tp_clear, plan_clear},
    {Py_tp_dealloc, plan_dealloc},       {Py_tp_repr, plan_repr},
    {Py_tp_methods, plan_methods},       {Py_tp_getset, plan_getset},
    {Py_tp_members, plan_members},       {0, NULL},
};

int
cm_register_row_plan_type(PyObject *module, cm_state *state)
{
    return cm_type_add(module, "cumem.RowPlan", sizeof(row_plan), Py_TPFLAGS_HAVE_GC,
                       plan_slots, NULL, &state->row_plan_type);
}
