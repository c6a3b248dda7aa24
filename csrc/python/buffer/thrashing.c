/* SPDX-License-Identifier: Apache-2.0 */
/* Finds thrashing, in which the host and a device keep taking the same bytes of managed
 * memory from each other. Each turn moves pages by faults, which is slow and looks like
 * slow code, so it is worth a warning. Only calls that hand the memory to one side are
 * seen. An array that was made over the memory earlier can touch it without any call.
 *
 * The storage remembers the last use: which side, and which bytes. If the other side
 * then uses some of these bytes, that is a turn. Sixteen turns within ten seconds are
 * thrashing, and there is one warning about it. A use of other bytes sets the count of
 * turns back to 0, so a loop that moves one part after another there and back causes no
 * warning. */
#include "base/thread.h"
#include "python/buffer/methods.h"
#include "python/buffer/page_calls.h"

enum { MANY_TURNS = 16 };
#define WINDOW_NS (UINT64_C(10) * 1000 * 1000 * 1000)

/* Return 1 if the user has advised where the memory should be, so that its moves are
 * intended, 0 if not, or -1 with an exception. */
static int
is_steered(const cm_buffer *self)
{
    int read_mostly = 0;
    int preferred = CM_NO_LOCATION;
    if (cm_pages_ask(self, 0, UINT64_MAX, CM_RANGE_READ_MOSTLY, &read_mostly, 1) < 0
        || cm_pages_ask(self, 0, UINT64_MAX, CM_RANGE_PREFERRED, &preferred, 1) < 0) {
        return -1;
    }
    return read_mostly != 0 || preferred != CM_NO_LOCATION;
}

/* Warn, unless the moves are intended. Each storage gets at most one warning. If the
 * warning is not given this time, it may be given later, since advice may be taken
 * back, and a driver that did not answer may answer later. So the driver is asked again
 * after another sixteen turns (page_calls.c sets the count back when advice is
 * given). */
static int
warn(cm_buffer *self)
{
    int steered = is_steered(self);
    if (steered < 0) {
        self->storage->side_turns = 0;
        return -1;
    }
    if (steered) {
        return 0;
    }
    self->storage->thrashing_was_warned = true; /* first: repr() may come here again */
    return cm_package_do("transfers.managed", "warn_of_thrashing",
                         PyTuple_Pack(1, (PyObject *)self));
}

int
cm_buffer_note_side(cm_buffer *self, bool on_device)
{
    cm_storage *storage = self->storage;
    int64_t low, high;
    if (!cm_kind_migrates(storage->kind)) {
        return 0;
    }
    if (cm_buffer_bounds(self, &low, &high) < 0) {
        return -1;
    }
    low += self->offset;
    high += self->offset;
    bool is_first = storage->side_high == 0;
    bool is_same = low < storage->side_high && storage->side_low < high;
    if (is_same && storage->side_is_device == on_device) {
        return 0; /* most uses are like this */
    }
    if (is_first) {
        storage->thrashing_was_warned = false;
    }
    uint64_t now = cm_now_ns();
    if (!is_same || now - storage->side_since_ns > WINDOW_NS) {
        storage->side_turns = 0;
        storage->side_since_ns = now;
    }
    storage->side_turns += is_same;
    storage->side_low = low;
    storage->side_high = high;
    storage->side_is_device = on_device;
    if (storage->side_turns != MANY_TURNS || storage->thrashing_was_warned) {
        return 0;
    }
    return warn(self);
}
