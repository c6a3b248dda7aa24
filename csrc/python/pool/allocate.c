/* SPDX-License-Identifier: Apache-2.0 */
/* Makes buffers over fresh memory, given kind, shape, order and dtype, and takes
 * several steps before an allocation fails.
 *
 * When memory is short
 * --------------------
 * cm_pool_alloc() has already waited for memory in flight and trimmed its own pool.
 * Then these steps are taken, in this order, and the allocation is tried again after
 * each:
 *
 *   1. run_steps()   trim the other pools of the same memory (cm_pool_trim_others())
 *                    wait for transfers of buffers that were dropped or freed
 *                    if the pool spills, put idle buffers to sleep (spilling.c)
 *   2. relieve()     in cumem/pools/out_of_memory.py: callbacks of the user,
 *                    then a garbage collection
 *   3. raise()       OutOfMemoryError, to which explain() adds what was tried, what the
 *                    pools hold, and what to do about it
 * The second step is Python code, so it gets the attempt as a capsule, and passes that
 * to _retry(). */
#include "python/pool/allocate.h"

#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/wait.h"
#include "python/pool/limits.h"
#include "python/pool/spilling.h"
#include "transfer/plan/layout.h"

/* -- order ---------------------------------------------------------------------------- */

/* Compute strides without gaps, where axes[0] is the slowest axis and the last of
 * `axes` is the fastest. */
static void
set_strides(int ndim, int64_t itemsize, const int64_t *shape, const int *axes,
            int64_t *strides)
{
    int64_t step = itemsize;
    for (int i = ndim - 1; i >= 0; i--) {
        strides[axes[i]] = step;
        step *= shape[axes[i]] > 0 ? shape[axes[i]] : 1;
    }
}

static void
set_order(int ndim, char order, int *axes)
{
    for (int i = 0; i < ndim; i++) {
        axes[i] = order == 'F' ? ndim - 1 - i : i;
    }
}

/* Sort the axes by falling distance of their elements; equal ones stay in C order. */
static void
sort_axes(const cm_region *like, int *axes)
{
    cm_layout sorted = {.ndim = like->ndim};
    for (int i = 0; i < like->ndim; i++) {
        sorted.axes[i] = (cm_axis){.length = i, .stride = {like->strides[i]}};
    }
    cm_layout_sort(&sorted, CM_DST);
    for (int i = 0; i < like->ndim; i++) {
        axes[i] = (int)sorted.axes[i].length; /* `length` holds which axis it is */
    }
}

/* -- when there is not enough ------------------------------------------------------------ */

typedef struct attempt {
    cm_state *state;
    cm_pool *pool;
    uint64_t nbytes;
    cm_stream *stream;
    cm_block *block;
    cm_status status;
    bool waits;             /* for transfers */
    unsigned awaited_count; /* of storages that transfers kept */
    PyObject *tried;        /* owned: a list of str; NULL until the package was asked */
    cm_spill_report spills; /* if the pool spills */
} attempt;

static const char capsule_name[] = "cumem's attempt to allocate";

static bool
is_shortage(cm_status status)
{
    return status.code == CM_CUDA_OUT_OF_MEMORY || status.code == CM_ELIMIT
           || status.code == CM_EHOSTMEMORY;
}

/* Try to allocate. Returns true if nothing is left to try, because there is a block or
 * an error of another sort. */
static bool
try_again(attempt *self)
{
    cm_status status;
    cm_block *block = NULL;
    cm_state_enter(self->state);
    cm_pool_waiter waiter = {self->state, cm_gil_give()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    status = cm_pool_alloc(self->pool, self->nbytes, self->stream, &hooks, &block);
    cm_pool_waiter_end(&waiter, status);
    cm_state_leave(self->state);
    self->status = status;
    self->block = cm_is_ok(status) ? block : NULL;
    return !is_shortage(status);
}

/* Call a callback of the user. An Exception that it raises must not hide that memory is
 * short; anything else (Ctrl-C) must not be lost. Returns 0, or -1 with an
 * exception. */
static int
call_back(attempt *self, PyObject *callback)
{
    const cm_pool_config *config = cm_pool_get_config(self->pool);
    PyObject *answer =
        PyObject_CallFunction(callback, "siK", cm_kinds[config->kind].text,
                              config->device, (unsigned long long)self->nbytes);
    Py_XDECREF(answer);
    if (answer == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1;
        }
        PyErr_WriteUnraisable(callback);
    }
    return 0;
}

/* Called by the package to try once more, after a callback or (None) a garbage
 * collection. Returns True if nothing is left to try. */
PyObject *
cm_shortage_retry(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    PyObject *callback;
    if (!PyArg_ParseTuple(args, "OO:_retry", &capsule, &callback)) {
        return NULL;
    }
    attempt *self = PyCapsule_GetPointer(capsule, capsule_name);
    if (self == NULL || (callback != Py_None && call_back(self, callback) < 0)) {
        return NULL;
    }
    cm_state_drop_deferred(self->state);
    bool done = try_again(self);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}

/* True if the bytes go back to the pool as soon as the transfers of the storage have
 * ended, since nobody else has it any more. */
static bool
is_left_to_transfers(const cm_storage *storage)
{
    uint64_t holds = atomic_load(&storage->holds);
    uint64_t transfers = holds / CM_HOLD_TRANSFER;
    return transfers > 0 && holds % CM_HOLD_TRANSFER == 0 && !storage->is_moving
           && (storage->closed || atomic_load(&storage->refs) == transfers);
}

/* Return the oldest storage of the pool that is left to transfers, held, or NULL. */
static cm_storage *
find_left_to_transfers(const attempt *self)
{
    const cm_list *all = &self->state->storages;
    for (cm_list *node = all->next; node != all; node = node->next) {
        cm_storage *storage = CM_LIST_ENTRY(node, cm_storage, node);
        if (storage->pool == self->pool && is_left_to_transfers(storage)
            && cm_storage_try_hold(storage)) {
            return storage;
        }
    }
    return NULL;
}

/* Wait for the transfers of storages that nobody else has, one storage after the other,
 * until the allocation succeeds or there are no more. A loop that makes a buffer,
 * starts a copy from it and drops it would otherwise reach a limit although it keeps
 * nothing. Returns 1 if nothing is left to try, 0 if the shortage goes on, or -1 with
 * an exception. */
static int
wait_for_transfers(attempt *self)
{
    cm_storage *storage;
    while (self->waits && (storage = find_left_to_transfers(self)) != NULL) {
        int waited = cm_storage_wait_transfers(storage);
        cm_storage_release(storage, true);
        if (waited < 0) {
            return -1;
        }
        self->awaited_count++;
        cm_state_drop_deferred(self->state);
        if (try_again(self)) {
            return PyErr_Occurred() ? -1 : 1;
        }
    }
    return 0;
}

/* Put idle buffers of the pool to sleep until the allocation succeeds, or no more can
 * sleep. Returns 1 if nothing is left to try, 0 if the shortage goes on, or -1 with an
 * exception. */
static int
spill(attempt *self)
{
    while (cm_pool_get_config(self->pool)->spills) {
        int spilled = cm_spill(self->state, self->pool, self->nbytes, self->status,
                               &self->spills);
        if (spilled < 0) {
            return -1;
        }
        if (spilled == 0) {
            self->status = cm_spill_reason(self->status, &self->spills);
            return is_shortage(self->status) ? 0 : 1;
        }
        if (try_again(self)) {
            return PyErr_Occurred() ? -1 : 1;
        }
    }
    return 0;
}

/* Add what the spill has done to the list of what was tried. Returns 0, or -1 with an
 * exception. */
static int
note_spill(const attempt *self)
{
    PyObject *text = cm_spill_describe(self->state, &self->spills);
    int result = text == NULL ? -1 : PyList_Append(self->tried, text);
    Py_XDECREF(text);
    return result;
}

/* Take the steps of this file, and then leave the rest to the package, which knows the
 * callbacks. It does not matter if a pool cannot be trimmed, as long as
 * the allocation succeeds. Returns 0, or -1 with an exception, perhaps that of a signal
 * handler. */
static int
run_steps(attempt *self)
{
    cm_trim_request r = {0};
    cm_pool_waiter waiter = {self->state, cm_gil_give()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    cm_status status = cm_pool_trim_others(self->pool, self->status, &hooks, &r);
    cm_pool_waiter_end(&waiter, status);
    if (!cm_is_ok(status)) {
        return -1;
    }
    if (r.released_nbytes > 0 && try_again(self)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    int done = wait_for_transfers(self);
    if (done == 0) {
        done = spill(self);
    }
    if (done != 0) {
        return done < 0 ? -1 : 0;
    }
    PyObject *capsule = PyCapsule_New(self, capsule_name, NULL);
    self->tried =
        capsule == NULL
            ? NULL
            : cm_package_call("pools.out_of_memory", "relieve",
                              Py_BuildValue("(OiKI)", capsule, r.count,
                                            (unsigned long long)r.released_nbytes,
                                            self->awaited_count));
    if (capsule != NULL) {
        (void)PyCapsule_SetName(capsule, NULL); /* the struct that it points to ends
                                                   here */
        Py_DECREF(capsule);
    }
    if (self->tried == NULL) {
        return -1;
    }
    return cm_pool_get_config(self->pool)->spills ? note_spill(self) : 0;
}

/* Raise the error. The package adds the request and, to an OutOfMemoryError, numbers,
 * their meaning and advice. If there is not even memory for that, the error is raised
 * as it is. */
static void
raise(attempt *self)
{
    const cm_pool_config *config = cm_pool_get_config(self->pool);
    PyObject *error = cm_py_exception_new(self->state, self->status, NULL);
    if (error == NULL) {
        return;
    }
    cm_state_enter(self->state);
    PyObject *explained = cm_package_call(
        "pools.out_of_memory", "explain",
        Py_BuildValue("(OKsiKNO)", error, (unsigned long long)(uintptr_t)self->pool,
                      cm_kinds[config->kind].text, config->device,
                      (unsigned long long)self->nbytes, cm_limits_list(config->budget),
                      self->tried == NULL ? Py_None : self->tried));
    cm_state_leave(self->state);
    if (explained == NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
    }
    if (!PyErr_Occurred()) {
        PyErr_SetObject((PyObject *)(void *)Py_TYPE(error), error);
    }
    Py_XDECREF(explained);
    Py_DECREF(error);
}

/* Take all steps. Returns 0, or -1 with an exception, and then without a block. */
static int
take_steps(attempt *self)
{
    /* Python code runs, which must not shut down meanwhile. */
    cm_state_enter(self->state);
    int result = run_steps(self);
    cm_state_leave(self->state);
    if (result < 0 && self->block != NULL) {
        cm_pool_free(self->pool, self->block, NULL, 0, 0);
        self->block = NULL;
    }
    return result;
}

cm_status
cm_shortage_relieve(void *state, cm_pool *pool, uint64_t nbytes, cm_stream *stream,
                    cm_status status, cm_block **out)
{
    attempt self = {.state = state,
                    .pool = pool,
                    .nbytes = nbytes,
                    .stream = stream,
                    .status = status};
    cm_event_origin caller = cm_recorder_lend_origin((cm_event_origin){0, 0});
    PyGILState_STATE gil = PyGILState_Ensure();
    if (take_steps(&self) < 0) {
        self.status = cm_fail(CM_ECANCELLED, 0);
    }
    Py_XDECREF(self.tried);
    PyGILState_Release(gil);
    (void)cm_recorder_lend_origin(caller);
    *out = self.block;
    return self.status;
}

/* Allocate a block as cm_pool_alloc() does, and take the steps above if there is not
 * enough memory. Returns NULL with an exception, which is OutOfMemoryError with all
 * that is known, or one such as KeyboardInterrupt that a callback raised. */
static cm_block *
alloc_block(cm_state *state, cm_pool *pool, uint64_t nbytes, cm_stream *stream)
{
    attempt self = {.state = state,
                    .pool = pool,
                    .nbytes = nbytes,
                    .stream = stream,
                    .waits = true};
    if (!try_again(&self)) {
        (void)take_steps(&self);
    }
    if (self.block == NULL && !PyErr_Occurred()) {
        raise(&self);
    }
    Py_XDECREF(self.tried);
    return self.block;
}

/* -- allocation ----------------------------------------------------------------------- */

/* Fill a new storage with memory of `pool`, first used on `stream`, or on any stream if
 * that is NULL. With 0 bytes it takes no block, and host and address stay NULL. When
 * there is not enough memory, everything above is tried before OutOfMemoryError.
 * Returns 0, or -1 with an exception. The caller keeps the pool. */
static int
fill_storage(cm_storage *storage, cm_pool *pool, uint64_t nbytes, cm_stream *stream)
{
    const cm_pool_config *config = cm_pool_get_config(pool);
    storage->flags = config->flags;
    storage->nbytes = nbytes;
    if (CM_UNLIKELY(nbytes == 0)) {
        storage->pool = cm_pool_hold(pool);
        return 0;
    }
    cm_block *block = cm_pool_try_alloc(pool, nbytes, stream, 0);
    if (CM_UNLIKELY(block == NULL)) {
        block = alloc_block(storage->state, pool, nbytes, stream);
        if (block == NULL) {
            return -1;
        }
        /* While this thread was without the GIL, another one may have begun to put the
         * pool to sleep. */
        storage->is_asleep = !cm_pool_is_awake(pool);
    }
    storage->pool = pool;
    storage->block = block;
    storage->host = block->host;
    storage->address = block->address;
    cm_storage_enrol(storage, config);
    cm_storage_trace(storage);
    if (stream != NULL) {
        cm_storage_set_first_use(storage, stream);
    }
    return 0;
}

static PyObject *
allocate_from(cm_state *state, cm_pool *pool, uint64_t nbytes, PyObject *dtype,
              int ndim, const int64_t *shape, const int64_t *strides, cm_stream *stream)
{
    const cm_pool_config *config = cm_pool_get_config(pool);
    cm_inline_buffer *root =
        cm_inline_buffer_new(state, config->kind, config->device, dtype, ndim);
    if (CM_UNLIKELY(root == NULL)) {
        return NULL;
    }
    root->buffer.itemsize = cm_numpy_itemsize(dtype);
    int64_t *extents = root->buffer.extents;
    for (int i = 0; i < ndim; i++) {
        extents[i] = shape[i];
        extents[ndim + i] = strides[i];
    }
    if (CM_UNLIKELY(fill_storage(&root->storage, pool, nbytes, stream) < 0)) {
        Py_DECREF((PyObject *)root);
        return NULL;
    }
    return (PyObject *)root;
}

void
cm_strides_in_order(const cm_region *like, char order, int64_t itemsize,
                    int64_t *strides)
{
    int axes[CM_MAX_NDIM] = {0};
    bool is_c = order == 'C';
    bool is_fortran = order == 'F';
    if (order == 'A' || order == 'K') {
        is_c = cm_region_is_c_contiguous(like);
        is_fortran = !is_c && cm_region_is_f_contiguous(like);
        is_c = is_c || (order == 'A' && !is_fortran);
    }
    if (is_c || is_fortran) {
        set_order(like->ndim, is_fortran ? 'F' : 'C', axes);
    }
    else {
        sort_axes(like, axes);
    }
    set_strides(like->ndim, itemsize, like->shape, axes, strides);
}

PyObject *
cm_buffer_allocate(cm_state *state, cm_pool *pool, PyObject *dtype,
                   const cm_region *like, char order, cm_stream *stream)
{
    uint64_t nbytes;
    int64_t strides[CM_MAX_NDIM] = {0};
    int64_t itemsize = cm_numpy_itemsize(dtype);
    if (pool == NULL) {
        return NULL;
    }
    PyObject *buffer = NULL;
    if (cm_arg_nbytes(like->ndim, like->shape, itemsize, &nbytes) == 0) {
        cm_strides_in_order(like, order, itemsize, strides);
        buffer = allocate_from(state, pool, nbytes, dtype, like->ndim, like->shape,
                               strides, stream);
    }
    if (buffer != NULL) {
        cm_pool_release(pool); /* never the last hold, since the buffer has one */
    }
    else {
        cm_pool_let_go(state, pool);
    }
    return buffer;
}

PyObject *
cm_buffer_allocate_kind(cm_state *state, cm_kind kind, unsigned flags, int device,
                        PyObject *dtype, const cm_region *like, char order)
{
    cm_stream *stream = NULL;
    if (cm_kind_is_ordered(kind)) {
        stream = cm_stream_for_device(state, Py_None, device);
        if (stream == NULL) {
            return NULL;
        }
    }
    cm_pool *pool = cm_pool_choose(state, NULL, kind, flags, device);
    PyObject *buffer = cm_buffer_allocate(state, pool, dtype, like, order, stream);
    cm_stream_give(state, stream);
    return buffer;
}
