/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a storage by hand, and what puts it off: exports, pins and transfers. */
#include "python/errors.h"
#include "python/storage.h"

/* -- closing ------------------------------------------------------------------------- */

static bool
is_idle(const cm_storage *storage)
{
    /* state NULL: the module is gone, and the runtime with it */
    return storage->state != NULL && storage->view_count == 0
           && atomic_load(&storage->holds) == 0;
}

void
cm_storage_end_if_idle(cm_storage *storage)
{
    if (storage->closed && is_idle(storage)) {
        cm_storage_give_back(storage);
    }
}

int
cm_storage_check_not_exported(const cm_storage *storage, const char *what)
{
    size_t exports = cm_storage_count_exports(storage);
    if (exports > 0) {
        PyErr_Format(PyExc_BufferError,
                     "cannot %s with %zu live export%s: drop the arrays, memoryviews "
                     "and tensors over it first",
                     what, exports, exports == 1 ? "" : "s");
        return -1;
    }
    return 0;
}

/* Give back what `remains` has; 0, or -1 with CudaError. */
static int
give(cm_state *state, cm_storage_remains *remains, const char *doing)
{
    cm_status status = cm_storage_remains_give(state, remains);
    return cm_is_ok(status) ? 0 : cm_py_raise_int(state, status, doing);
}

int
cm_storage_close(cm_storage *storage)
{
    if (cm_storage_check_not_exported(storage, "free a buffer") < 0) {
        return -1;
    }
    storage->closed = true; /* first: a transfer that ends now looks at it */
    if (!is_idle(storage) || cm_storage_try_give_back(storage)) {
        return 0;
    }
    cm_storage_remains remains;
    cm_storage_detach(storage, &remains);
    return give(storage->state, &remains, "while freeing a buffer");
}

void
cm_storage_retire(cm_storage *storage)
{
    storage->closed = true;
    cm_storage_end_if_idle(storage);
}

int
cm_storage_unlock(cm_storage *storage)
{
    storage->closed = true;
    if (storage->state == NULL) {
        return 0;
    }
    cm_storage_remains remains;
    cm_storage_detach(storage, &remains);
    if (storage->view_count > 0) { /* others may still read the bytes, unlocked */
        storage->foreign = remains.foreign;
        storage->foreign_drop = remains.foreign_drop;
        storage->foreign_argument = remains.foreign_argument;
        remains.foreign = NULL;
        remains.foreign_drop = NULL;
    }
    return give(storage->state, &remains, "while unregistering host memory");
}

int
cm_storage_check_open(const cm_storage *storage)
{
    if (CM_UNLIKELY(storage->closed)) {
        PyErr_SetString(
            PyExc_ValueError,
            "the buffer is closed: its memory was given back by free(), the "
            "end of a with block or shutdown()");
        return -1;
    }
    return 0;
}

/* -- holds --------------------------------------------------------------------------- */

static void
add_hold(cm_storage *storage, uint64_t hold)
{
    atomic_fetch_add_explicit(&storage->holds, hold, memory_order_relaxed);
}

/* True when it was the last one of a closed storage. Sequentially consistent, as is
 * closing: of two threads that end and close at least one sees both. */
static bool
end_hold(cm_storage *storage, uint64_t hold)
{
    return atomic_fetch_sub(&storage->holds, hold) == hold && storage->closed;
}

static void
drop_hold(cm_storage *storage, uint64_t hold)
{
    if (end_hold(storage, hold) && !atomic_exchange(&storage->burying, true)) {
        cm_grave_bury(&storage->grave); /* takes the reference over */
    }
    else {
        cm_storage_release(storage, false);
    }
}

void
cm_storage_pin(cm_storage *storage)
{
    add_hold(storage, CM_HOLD_EXPORT);
}

void
cm_storage_unpin(cm_storage *storage)
{
    if (CM_UNLIKELY(end_hold(storage, CM_HOLD_EXPORT))) {
        cm_storage_end_if_idle(storage);
    }
}

void
cm_storage_begin_export(cm_storage *storage)
{
    storage->was_exported = true;
    add_hold(storage, CM_HOLD_EXPORT);
}

void
cm_storage_end_export(cm_storage *storage)
{
    cm_storage_unpin(storage);
}

void
cm_storage_drop_export(cm_storage *storage)
{
    drop_hold(storage, CM_HOLD_EXPORT);
}

cm_storage *
cm_storage_hold_transfer(cm_storage *storage)
{
    add_hold(storage, CM_HOLD_TRANSFER);
    return cm_storage_hold(storage);
}

void
cm_storage_drop_transfer(void *storage)
{
    drop_hold(storage, CM_HOLD_TRANSFER);
}
