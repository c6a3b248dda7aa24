/* SPDX-License-Identifier: Apache-2.0 */
/* Puts the pool of a Region to sleep and wakes it. pool/sleep.c does the part that
 * needs no Python.
 *
 * A pool knows its memory, but it does not know the buffers over it, and it does not
 * copy bytes. So sleep() here takes these steps:
 *
 *   1. With the GIL held, it refuses if a call of ours works on a buffer of the pool,
 *      and otherwise marks the storages of all its buffers as asleep. From then on each
 *      use of such a buffer through cumem raises an error.
 *   2. It waits for transfers that began before that, and collects the streams that the
 *      storages remember. If anybody else may work on the memory, because it was
 *      exported or because a block belongs to no buffer, the pool waits for whole
 *      devices.
 *   3. The pool settles, sleep_bytes.c moves its bytes to page-locked memory or to
 *      files, and the pool gives its memory back.
 *
 * wake() gets the memory, moves the bytes back, and takes the marks away. Nobody can
 * use the buffers before that, so every later use sees the bytes.
 *
 * The page-locked memory comes from a pool that only this pool uses. It counts against
 * the pinned limit as any other does, and forked children get no copy of it. As nobody
 * else has blocks of it, all of it can go back at once.
 *
 * Locks: the GIL is held, and released for whatever waits. cumem/pools/region.py lets
 * one thread at a time in for each pool. */
#include <stdlib.h>

#include "docstrings.h"
#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/copy/sleep_bytes.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/wait.h"
#include "python/pool/pool_object.h"

/* One call, for one pool. */
typedef struct sleep_call {
    cm_state *state;
    cm_pool *pool; /* on loan */
    /* Collects the streams of all storages, without duplicates, and holds them. No copy
     * is made with it. */
    cm_call streams;
    unsigned flags; /* CM_POOL_FREE_FENCE if unknown work may run on the memory */
    cm_sleep_files files;
} sleep_call;

/* -- the storages of the pool --------------------------------------------------------- */

/* Return the next storage after `node`, in the list of all storages, that has a block
 * of the pool, or NULL if there is none. */
static cm_storage *
next_storage(const sleep_call *self, const cm_list *node)
{
    for (const cm_list *n = node->next; n != &self->state->storages; n = n->next) {
        cm_storage *storage = CM_LIST_ENTRY(n, cm_storage, node);
        if (storage->pool == self->pool && storage->block != NULL) {
            return storage;
        }
    }
    return NULL;
}

static cm_storage *
first_storage(const sleep_call *self)
{
    return next_storage(self, &self->state->storages);
}

static void
mark_storages(const sleep_call *self, bool asleep)
{
    for (cm_storage *s = first_storage(self); s != NULL;
         s = next_storage(self, &s->node)) {
        s->is_asleep = asleep;
    }
}

/* Shut the pool, unless a call is at work on it. Returns 0, or -1 with BufferError, or
 * RuntimeError in a forked child. */
static int
shut(const sleep_call *self)
{
    for (cm_storage *s = first_storage(self); s != NULL;
         s = next_storage(self, &s->node)) {
        if (s->call_count > 0) {
            return cm_package_refuse(
                "pools.region", "refuse_call",
                Py_BuildValue(
                    "(KK)", (unsigned long long)cm_pool_get_config(self->pool)->serial,
                    (unsigned long long)s->nbytes));
        }
    }
    if (cm_py_check(self->state, cm_pool_shut(self->pool), "while going to sleep")
        < 0) {
        return -1;
    }
    mark_storages(self, true);
    return 0;
}

/* Open the pool again, and let its buffers be used. */
static void
reopen(const sleep_call *self, bool keep_host)
{
    PyThreadState *thread = cm_gil_give();
    cm_pool_reopen(self->pool, keep_host); /* giving memory back may wait */
    cm_gil_take(thread);
    if (cm_pool_is_awake(self->pool)) {
        mark_storages(self, false);
    }
}

/* -- work that comes first -------------------------------------------------------------- */

/* Wait for all transfers of the pool's storages. No new ones begin. Returns 0, or -1
 * with what a signal handler raised. */
static int
wait_for_transfers(const sleep_call *self)
{
    int result = 0;
    cm_storage *s = first_storage(self);
    while (result == 0 && s != NULL) {
        if (!cm_storage_is_in_transfer(s) || !cm_storage_try_hold(s)) {
            s = next_storage(self, &s->node);
            continue;
        }
        /* The GIL is released meanwhile, so the list is begun anew. */
        result = cm_storage_wait_transfers(s);
        cm_storage_release(s, true);
        s = first_storage(self);
    }
    return result;
}

/* Collect the streams that worked on the pool, and find out whether others may have.
 * Returns 0, or -1 with MemoryError. */
static int
collect_streams(sleep_call *self)
{
    uint64_t block_count = 0;
    for (cm_storage *s = first_storage(self); s != NULL;
         s = next_storage(self, &s->node)) {
        block_count++;
        if (cm_storage_has_left(s)) {
            self->flags = CM_POOL_FREE_FENCE;
        }
        for (uint32_t i = 0; i < s->use_count; i++) {
            if (cm_call_come_after_stream(&self->streams, s->uses[i]) < 0) {
                return -1;
            }
        }
    }
    cm_pool_counters counters;
    cm_pool_read(self->pool, &counters);
    if (counters.live_count != block_count) {
        /* Some blocks were handed to the allocator of another library. */
        self->flags = CM_POOL_FREE_FENCE;
    }
    return 0;
}

/* -- room for the bytes ----------------------------------------------------------------- */

/* Fail before anything is copied if the limits leave no room for the bytes, even after
 * other pools have given back the memory that they cache. Called without the GIL. */
static cm_status
check_host(const sleep_call *self, const cm_wait_hooks *hooks)
{
    cm_status status = cm_pool_check_host(self->pool);
    if (cm_pool_is_short(status)) {
        cm_trim_request r = {.kind = CM_KIND_PINNED, .device = -1};
        CM_TRY(cm_pools_trim(self->state->runtime, &r, hooks));
        status = cm_pool_check_host(self->pool);
    }
    return status;
}

/* -- sleep -------------------------------------------------------------------------------- */

/* Go to sleep, once all transfers have ended. Sets *asleep to whether the pool sleeps,
 * which it may do in spite of a failure. Called without the GIL. */
static cm_status
fall_asleep(sleep_call *self, cm_engine *engine, bool keep, const cm_wait_hooks *hooks,
            bool *asleep)
{
    cm_pool *pool = self->pool;
    bool to_host = self->files.count == 0;
    CM_TRY(cm_pool_settle(pool, self->streams.after, self->streams.after_count,
                          self->flags, hooks));
    if (keep) {
        CM_TRY(cm_pool_plan_save(pool, to_host));
    }
    if (keep && to_host) {
        CM_TRY(check_host(self, hooks));
        cm_status status = cm_sleep_save(self->state, engine, pool, hooks);
        if (!cm_is_ok(status)) {
            cm_pool_map_back(pool, asleep);
            return status;
        }
    }
    if (keep && !to_host) {
        CM_TRY(cm_sleep_transfer_files(self->state, engine, pool, &self->files, true,
                                       hooks));
    }
    return cm_pool_fall_asleep(pool, asleep);
}

/* True if `status` is the failure of a file, which files.failure describes. */
static bool
has_file_failed(const sleep_call *self, cm_status status)
{
    const cm_file_failure *failure = &self->files.failure;
    return status.code == CM_ESYSTEM && (failure->at_end || failure->error != 0);
}

/* Take the GIL again after the part of a call that ran without it and returned
 * `status`. Returns 0, or -1 with an exception. If a file was at fault there is no
 * exception, since end_call() returns the file's failure to the caller. */
static int
end_wait(const sleep_call *self, const cm_pool_waiter *waiter, cm_status status,
         const char *doing)
{
    cm_pool_waiter_end(waiter, status);
    bool is_raised = PyErr_Occurred() && status.code == CM_ECANCELLED;
    if (is_raised || has_file_failed(self, status)) {
        return -1;
    }
    return cm_py_check(self->state, status, doing);
}

/* Do the rest of sleep() after shut(). Returns 0, or -1 with an exception. */
static int
put_to_sleep(sleep_call *self, bool keep, bool *asleep)
{
    cm_state *state = self->state;
    int device = cm_pool_get_config(self->pool)->device;
    cm_engine *engine = cm_state_engine(state, device);
    if (engine == NULL || wait_for_transfers(self) < 0 || collect_streams(self) < 0) {
        return -1;
    }
    if (keep && self->files.count == 0
        && cm_pool_find_host(state, self->pool, UINT64_MAX, "while going to sleep")
               == NULL) {
        return -1;
    }
    cm_pool_waiter waiter = {state, cm_gil_give()};
    cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
    cm_status status = fall_asleep(self, engine, keep, &hooks, asleep);
    return end_wait(self, &waiter, status, "while going to sleep");
}

/* Read the descriptors of the files. Returns 0, or -1 with an exception. */
static int
read_files(sleep_call *self, PyObject *fds)
{
    Py_ssize_t count = PyTuple_Size(fds);
    if (count > CM_FILE_MAX) {
        PyErr_Format(PyExc_ValueError, "there must be at most %d files",
                     (int)CM_FILE_MAX);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t fd;
        if (cm_arg_int64(PyTuple_GetItem(fds, i), "fd", &fd) < 0) {
            return -1;
        }
        self->files.fds[i] = (int)fd;
    }
    self->files.count = (uint32_t)count;
    return 0;
}

/* Read the arguments (pool, flag, fds), and begin a call, which end_call() ends.
 * Returns 0, or -1 with an exception. */
static int
begin_call(sleep_call *self, PyObject *module, PyObject *args, PyObject **op, int *flag)
{
    *self = (sleep_call){.state = cm_state_of_module(module)};
    self->streams.state = self->state;
    PyObject *fds;
    if (!PyArg_ParseTuple(args, "O!pO!", self->state->pool_base, op, flag,
                          &PyTuple_Type, &fds)
        || read_files(self, fds) < 0) {
        return -1;
    }
    self->pool = cm_pool_object_take(*op);
    return self->pool == NULL ? -1 : 0;
}

/* End a call. Returns None, a _FileFailure if a file was at fault, or NULL with an
 * exception. */
static PyObject *
end_call(sleep_call *self, PyObject *op, int result)
{
    cm_call_fini(&self->streams);
    cm_pool_object_give(op, self->pool);
    if (result < 0 && !PyErr_Occurred()) {
        return cm_file_failure_new(self->state, &self->files.failure);
    }
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* This is the Python function _sleep(pool, keep, fds). */
static PyObject *
sleep_pool(PyObject *module, PyObject *args)
{
    PyObject *op;
    int keep;
    sleep_call self;
    if (begin_call(&self, module, args, &op, &keep) < 0) {
        return NULL;
    }
    int result = shut(&self);
    if (result == 0) {
        bool asleep = false;
        result = put_to_sleep(&self, keep != 0, &asleep);
        if (!asleep) {
            cm_kept_error kept = cm_error_keep();
            reopen(&self, false);
            cm_error_restore(kept);
        }
    }
    return end_call(&self, op, result);
}

/* Read a list that has the address of each part and then its length, in order of
 * address. Returns an array that the caller frees, or NULL with an exception. */
static cm_spare_part *
read_spare(PyObject *list, uint64_t *count)
{
    Py_ssize_t length = PyList_Size(list);
    cm_spare_part *parts = calloc((size_t)length / 2 + 1, sizeof(*parts));
    if (parts == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    uint64_t end = 0;
    for (Py_ssize_t i = 0; i + 1 < length; i += 2) {
        uint64_t address = PyLong_AsUnsignedLongLong(PyList_GetItem(list, i));
        uint64_t nbytes = PyErr_Occurred()
                              ? 0
                              : PyLong_AsUnsignedLongLong(PyList_GetItem(list, i + 1));
        if (PyErr_Occurred()) {
            goto fail;
        }
        if (address < end || nbytes > UINT64_MAX - address) {
            PyErr_SetString(PyExc_ValueError, "spare parts are not in order");
            goto fail;
        }
        parts[i / 2] = (cm_spare_part){address, nbytes};
        end = address + nbytes;
    }
    *count = (uint64_t)length / 2;
    return parts;
fail:
    free(parts);
    return NULL;
}

/* This is the Python function _set_spare(pool, parts). */
static PyObject *
set_spare(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *op, *list;
    if (!PyArg_ParseTuple(args, "O!O!", state->pool_base, &op, &PyList_Type, &list)) {
        return NULL;
    }
    uint64_t count;
    cm_spare_part *parts = read_spare(list, &count);
    if (parts == NULL) {
        return NULL;
    }
    cm_pool *pool = cm_pool_object_take(op);
    cm_status status = cm_ok();
    if (pool != NULL) {
        status = cm_pool_set_spare(pool, parts, count);
        cm_pool_object_give(op, pool);
    }
    free(parts);
    if (PyErr_Occurred()) {
        return NULL;
    }
    return cm_py_answer(state, status, "while going to sleep", Py_NewRef(Py_None));
}

/* -- wake --------------------------------------------------------------------------------- */

/* Give the pool memory again, and copy the bytes back from page-locked memory. After a
 * failure the pool is asleep. If the driver then refuses to take some of the memory
 * back, the pool keeps that memory, counts it as lost, and uses it when it wakes the
 * next time. */
static cm_status
wake_from_host(const sleep_call *self, cm_engine *engine, const cm_wait_hooks *hooks)
{
    CM_TRY(cm_pool_begin_waking(self->pool));
    cm_status status = cm_sleep_restore(self->state, engine, self->pool, hooks);
    cm_pool_end_waking(self->pool, !cm_is_ok(status));
    return status;
}

/* Do the same with bytes that are in files. */
static cm_status
wake_from_files(sleep_call *self, cm_engine *engine, const cm_wait_hooks *hooks)
{
    CM_TRY(cm_pool_begin_waking(self->pool));
    cm_status status = cm_pool_map_until(self->pool, UINT64_MAX);
    if (cm_is_ok(status)) {
        status = cm_sleep_transfer_files(self->state, engine, self->pool, &self->files,
                                         false, hooks);
    }
    cm_pool_end_waking(self->pool, !cm_is_ok(status));
    return status;
}

static cm_status
try_to_wake(sleep_call *self, cm_engine *engine, const cm_wait_hooks *hooks)
{
    return self->files.count == 0 ? wake_from_host(self, engine, hooks)
                                  : wake_from_files(self, engine, hooks);
}

/* Wake the pool. If there is no memory, other pools give back what they have cached,
 * and it is tried once more. Called without the GIL. */
static cm_status
wake_up(sleep_call *self, cm_engine *engine, const cm_wait_hooks *hooks)
{
    cm_status status = try_to_wake(self, engine, hooks);
    if (cm_pool_is_short(status)) {
        cm_trim_request r = {0};
        CM_TRY(cm_pool_trim_others(self->pool, status, hooks, &r));
        status = r.released_nbytes > 0 ? try_to_wake(self, engine, hooks) : status;
    }
    return status;
}

/* This is the Python function _wake(pool, keep_host, fds). */
static PyObject *
wake_pool(PyObject *module, PyObject *args)
{
    PyObject *op;
    int keep_host;
    sleep_call self;
    if (begin_call(&self, module, args, &op, &keep_host) < 0) {
        return NULL;
    }
    int device = cm_pool_get_config(self.pool)->device;
    cm_engine *engine = cm_state_engine(self.state, device);
    int result = -1;
    if (engine != NULL) {
        cm_pool_waiter waiter = {self.state, cm_gil_give()};
        cm_wait_hooks hooks = cm_wait_hooks_of(&waiter);
        cm_status status = wake_up(&self, engine, &hooks);
        result = end_wait(&self, &waiter, status, "while waking up");
        if (cm_is_ok(status)) {
            reopen(&self, keep_host != 0);
        }
    }
    return end_call(&self, op, result);
}

/* -- the rest ----------------------------------------------------------------------------- */

/* This is the Python function _is_asleep(pool). */
static PyObject *
is_asleep(PyObject *module, PyObject *op)
{
    const cm_state *state = cm_state_of_module(module);
    cm_pool_object *self;
    if (cm_arg_pool(state, op, &self) < 0) {
        return NULL;
    }
    return PyBool_FromLong(self != NULL && self->pool != NULL
                           && cm_pool_is_asleep(self->pool));
}

/* This is the Python function _forget_saved(pool). */
static PyObject *
forget_saved(PyObject *module, PyObject *op)
{
    cm_state *state = cm_state_of_module(module);
    cm_pool_object *self;
    if (cm_arg_pool(state, op, &self) < 0) {
        return NULL;
    }
    cm_pool *pool = self == NULL || self->pool == NULL ? NULL : cm_pool_object_take(op);
    if (pool != NULL) {
        PyThreadState *thread = cm_gil_give();
        cm_pool_forget_saved(pool);
        cm_gil_take(thread);
        cm_pool_object_give(op, pool);
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

PyMethodDef cm_sleeping_methods[] = {
    {"_sleep", sleep_pool, METH_VARARGS, CM_DOC__sleep},
    {"_set_spare", set_spare, METH_VARARGS, CM_DOC__set_spare},
    {"_wake", wake_pool, METH_VARARGS, CM_DOC__wake},
    {"_is_asleep", is_asleep, METH_O, CM_DOC__is_asleep},
    {"_forget_saved", forget_saved, METH_O, CM_DOC__forget_saved},
    {NULL, NULL, 0, NULL},
};
