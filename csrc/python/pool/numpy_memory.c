/* SPDX-License-Identifier: Apache-2.0 */
/* Lets NumPy make its arrays in page-locked memory (NEP 49).
 *
 * NumPy asks a handler for the bytes of arrays. There is one for each context and a
 * default one for the process. Within `with numpy_pinned():` the context has a handler
 * of ours; to pin arrays in the whole process, our functions are written into the
 * default handler (docs/decisions/0015). They are never taken out again, since arrays
 * of the default handler may from then on lie in page-locked or in ordinary memory, and
 * only our functions can tell which. An array lies in page-locked memory if its address
 * is in the map `process.storages`.
 *
 *   np.empty(n)   numpy_malloc()   From min_nbytes on, pin() takes a block of the pool.
 *                                  Smaller arrays, and those for which there is no
 *                                  block, get memory from NumPy's own malloc.
 *   del array     numpy_free()     Memory in the map goes back to the pool, with a
 *                                  fence, since anybody may have started a copy from
 *                                  the array. NumPy's own free takes all other memory.
 *
 * NumPy holds the GIL in these calls, except in some calls of realloc. We give the GIL
 * up while a pool looks for more memory, as NumPy's own calloc does, but not in
 * realloc, because the array still points to memory that realloc may free. Nothing here
 * waits for a device or runs Python code. */
#include <stdlib.h>
#include <string.h>

#include "base/address_map.h"
#include "docstrings.h"
#include "python/buffer/storage.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/pool/pool_object.h"

/* Says where new arrays are made. It belongs to a capsule, which all arrays of its
 * handler keep alive. */
typedef struct pinning {
    /* This comes first, since it is what NumPy sees. Its ctx points to this struct. */
    cm_numpy_handler handler;
    cm_state *state;      /* kept alive by the pool */
    cm_pool_object *pool; /* owned; NULL if there is no pool to take from */
    size_t min_nbytes;
    /* owned: the handler outside of the block; NULL if the block was not entered
     * yet. */
    PyObject *outer;
    bool ended; /* the block is over in all contexts */
} pinning;

/* There is one for the process, as there is one default handler of NumPy's. Guarded by
 * the GIL. */
static struct {
    /* Storages of pinned arrays, by the addresses of their bytes. */
    cm_address_map storages;
    cm_numpy_allocator numpy; /* NumPy's own functions, for all other arrays */
    /* owned: the capsule that the default handler uses, or NULL. */
    PyObject *enabled;
} process;

/* A loop that makes and drops arrays spends its time writing to memory. This much
 * memory stays in the processor's cache, so that the loop is twice as fast as with 64
 * MiB. */
enum { FENCE_LIMIT = 4 << 20 };

static pinning *
pinning_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, CM_NUMPY_HANDLER);
}

static void numpy_free(void *ctx, void *host, size_t nbytes);

/* True for a capsule of ours, but not for that of the default handler, which may have
 * our functions but no block. */
static bool
is_own(PyObject *capsule)
{
    if (capsule == NULL || !PyCapsule_IsValid(capsule, CM_NUMPY_HANDLER)) {
        return false;
    }
    const pinning *p = pinning_of(capsule);
    return p->handler.allocator.free == numpy_free && p->handler.allocator.ctx == p;
}

/* Check that it is a capsule of ours. Returns 0, or -1 with TypeError. */
static int
check_own(PyObject *capsule)
{
    return is_own(capsule) ? 0
                           : cm_arg_refuse(capsule == NULL ? Py_None : capsule,
                                           "handler", "one of numpy_pinned()'s");
}

/* -- one array's memory ------------------------------------------------------------------ */

/* Make an exported storage of `block`, so that it is listed, keeps shutdown() away and
 * goes back with a fence, because others may copy from it unseen. Returns its bytes, or
 * NULL if there is no memory. */
static void *
enlist(cm_state *state, cm_pool *pool, cm_block *block)
{
    const cm_pool_config *config = cm_pool_get_config(pool);
    cm_storage *storage = cm_storage_new(state, config->kind, config->device);
    if (storage == NULL) {
        PyErr_Clear();
        cm_pool_free(pool, block, NULL, 0, 0);
        return NULL;
    }
    storage->flags = config->flags;
    storage->pool = pool;
    storage->block = block;
    storage->host = block->host;
    storage->address = block->address;
    storage->nbytes = block->nbytes;
    if (!cm_address_map_put(&process.storages, (uintptr_t)block->host, storage)) {
        cm_storage_release(storage, true);
        return NULL;
    }
    cm_storage_begin_export(storage);
    return storage->host;
}

/* Take memory of a pool. `ctx` is NULL for the default handler. Returns NULL if the
 * memory has to come from NumPy. */
static void *
pin(void *ctx, size_t nbytes, bool may_grow)
{
    const pinning *p = ctx;
    if (p == NULL && process.enabled != NULL) {
        p = pinning_of(process.enabled);
    }
    if (p == NULL || nbytes < p->min_nbytes || p->ended || p->pool == NULL
        || p->pool->pool == NULL || p->state->exiting) {
        return NULL;
    }
    cm_state *state = p->state; /* without the GIL `p` may end */
    cm_pool *pool = p->pool->pool;
    cm_block *block =
        cm_pool_try_alloc(pool, nbytes, NULL, may_grow ? FENCE_LIMIT : UINT64_MAX);
    if (block == NULL && may_grow) {
        (void)cm_pool_hold(pool);
        cm_state_enter(state);
        PyThreadState *thread = cm_gil_give();
        block = cm_pool_alloc_optional(pool, nbytes, FENCE_LIMIT);
        cm_pool_release(pool);
        cm_gil_take(thread);
        cm_state_leave(state);
    }
    return block == NULL ? NULL : enlist(state, pool, block);
}

/* True in a forked child. For a storage of a module that is gone it is false, since
 * that cannot be found out any more. */
static bool
is_forked(const cm_storage *storage)
{
    return storage->state != NULL
           && (storage->block == NULL || cm_runtime_is_forked(storage->state->runtime));
}

/* True in a forked child that has the bytes. */
static bool
is_inherited(const cm_storage *storage)
{
    return storage->block == NULL ? !storage->was_not_inherited
                                  : cm_block_is_inherited(storage->block);
}

/* Give memory back. If this storage may be the last that keeps its pool alive, giving
 * it back would end the pool, and that waits. So it is then left to a later call into
 * cumem. */
static void
give(cm_storage *storage)
{
    bool is_last =
        !is_forked(storage) && !cm_pool_free_is_quick(storage->pool, NULL, 0, 0);
    if (!is_last && storage->block != NULL) {
        cm_pool_free(storage->pool, storage->block, NULL, 0, CM_POOL_FREE_FENCE);
        storage->pool = NULL;
        storage->block = NULL;
    }
    cm_storage_release(storage, !is_last);
}

/* -- the functions that NumPy calls; free() is not always given the right size ----------- */

static void *
numpy_malloc(void *ctx, size_t nbytes)
{
    void *host = pin(ctx, nbytes, true);
    return host != NULL ? host : process.numpy.malloc(process.numpy.ctx, nbytes);
}

static void *
numpy_calloc(void *ctx, size_t count, size_t item_nbytes)
{
    size_t nbytes;
    bool fits = !__builtin_mul_overflow(count, item_nbytes, &nbytes);
    void *host = fits ? pin(ctx, nbytes, true) : NULL;
    if (host == NULL) {
        return process.numpy.calloc(process.numpy.ctx, count, item_nbytes);
    }
    PyThreadState *thread = cm_gil_give();
    memset(host, 0, nbytes);
    cm_gil_take(thread);
    return host;
}

static void
numpy_free(void *Py_UNUSED(ctx), void *host, size_t nbytes)
{
    cm_storage *storage = cm_address_map_find(&process.storages, (uintptr_t)host, true);
    if (storage == NULL) {
        process.numpy.free(process.numpy.ctx, host, nbytes);
        return;
    }
    give(storage);
}

/* Move an array's bytes to a place with room for `nbytes`. Returns the place, or NULL
 * if there is none, and then the bytes stay where they are. */
static void *
relocate(void *ctx, void *host, size_t nbytes)
{
    const cm_storage *storage =
        cm_address_map_find(&process.storages, (uintptr_t)host, false);
    uint64_t room = nbytes;
    if (storage == NULL) { /* its old size is not known */
        host = process.numpy.realloc(process.numpy.ctx, host, nbytes);
    }
    else if (is_forked(storage) && !is_inherited(storage)) {
        return NULL; /* this child does not have its bytes */
    }
    else {
        room = storage->nbytes;
    }
    if (host == NULL || (storage != NULL && nbytes <= room && nbytes >= room / 2)) {
        return host;
    }
    void *moved = pin(ctx, nbytes, false);
    if (moved == NULL && storage != NULL) {
        moved = process.numpy.malloc(process.numpy.ctx, nbytes);
    }
    if (moved == NULL) { /* the bytes are still where they were */
        return nbytes <= room ? host : NULL;
    }
    memcpy(moved, host, nbytes < room ? nbytes : room);
    numpy_free(ctx, host, nbytes);
    return moved;
}

static void *
numpy_realloc(void *ctx, void *host, size_t nbytes)
{
    /* numpy.fromstring() calls this without the GIL. */
    PyGILState_STATE gil = PyGILState_Ensure();
    void *moved = relocate(ctx, host, nbytes);
    PyGILState_Release(gil);
    return moved;
}

/* -- blocks and the switch --------------------------------------------------------------- */

static const cm_numpy_allocator functions = {NULL, numpy_malloc, numpy_calloc,
                                             numpy_realloc, numpy_free};

/* This is the Python function _numpy_enter(capsule). The capsule is NumPy's handler in
 * this context from now on. */
static PyObject *
enter(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    if (check_own(capsule) < 0) {
        return NULL;
    }
    pinning *p = pinning_of(capsule);
    if (p->outer != NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this numpy_pinned() has had its block: make another one");
        return NULL;
    }
    p->outer = cm_numpy_exchange_handler(capsule);
    return p->outer == NULL ? NULL : Py_NewRef(Py_None);
}

/* Find the first handler, from `capsule` outwards, whose block is not over. Returns a
 * new reference, or NULL if `capsule` is NULL. */
static PyObject *
find_current(PyObject *capsule)
{
    while (is_own(capsule) && pinning_of(capsule)->ended) {
        capsule = pinning_of(capsule)->outer;
    }
    return Py_XNewRef(capsule);
}

/* This is the Python function _numpy_leave(capsule). Blocks may end in any order, so
 * NumPy gets the handler of the innermost one that is not over. Those that are over are
 * dropped, since otherwise blocks that overlap would keep each other alive for ever. */
static PyObject *
leave(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *given = PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : NULL;
    if (check_own(given) < 0) {
        return NULL;
    }
    pinning_of(given)->ended = true;
    PyObject *was = cm_numpy_exchange_handler(NULL);
    PyObject *at = find_current(was);
    PyObject *unset = at == NULL ? NULL : cm_numpy_exchange_handler(at);
    int result = unset == NULL ? -1 : 0;
    Py_XDECREF(was);
    Py_XDECREF(unset);
    while (is_own(at)) {
        PyObject *outer = find_current(pinning_of(at)->outer);
        cm_replace(&pinning_of(at)->outer, Py_XNewRef(outer));
        Py_DECREF(at);
        at = outer;
    }
    Py_XDECREF(at);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* This is the Python function _numpy_enable(capsule). The default handler uses the
 * capsule from now on, in every thread. None gives it NumPy's own functions back. */
static PyObject *
enable(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    if (capsule != Py_None && check_own(capsule) < 0) {
        return NULL;
    }
    PyObject *old = process.enabled;
    process.enabled = capsule == Py_None ? NULL : Py_NewRef(capsule);
    if (process.enabled != NULL) {
        cm_numpy_default_handler()->allocator = functions;
    }
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static void
destroy(PyObject *capsule)
{
    pinning *p = pinning_of(capsule);
    Py_XDECREF((PyObject *)p->pool); /* the pool's end may wait, without the GIL */
    Py_XDECREF(p->outer);
    free(p);
}

static PyObject *
handler(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    unsigned long long min_nbytes;
    PyObject *object;
    cm_pool_object *pool;
    if (!PyArg_ParseTuple(args, "KO:_numpy_handler", &min_nbytes, &object)
        || cm_arg_pool(state, object, &pool) < 0) {
        return NULL;
    }
    pinning *p = calloc(1, sizeof(*p));
    if (p == NULL) {
        return PyErr_NoMemory();
    }
    *p =
        (pinning){{"cumem_pinned", 1, functions}, state, pool, min_nbytes, NULL, false};
    p->handler.allocator.ctx = p;
    if (process.numpy.malloc == NULL) {
        process.numpy = cm_numpy_default_handler()->allocator;
    }
    PyObject *capsule = PyCapsule_New(p, CM_NUMPY_HANDLER, destroy);
    if (capsule == NULL) {
        free(p);
        return NULL;
    }
    Py_XINCREF((PyObject *)pool);
    return capsule;
}

PyMethodDef cm_numpy_memory_methods[] = {
    {"_numpy_handler", handler, METH_VARARGS, CM_DOC__numpy_handler},
    {"_numpy_enter", enter, METH_O, CM_DOC__numpy_enter},
    {"_numpy_leave", leave, METH_VARARGS, CM_DOC__numpy_leave},
    {"_numpy_enable", enable, METH_O, CM_DOC__numpy_enable},
    {NULL, NULL, 0, NULL},
};
