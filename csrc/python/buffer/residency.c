/* SPDX-License-Identifier: Apache-2.0 */
/* page_residency() says where the pages of managed memory are, as far as that is known.
 *
 * The driver says where a range was last sent if all of it was sent to the same place,
 * and nothing otherwise. So a range about which the driver says nothing is halved until
 * the driver answers, or until the range is too short to be divided. Example: 8 MiB, of
 * which the first 2 MiB were sent to device 0.
 *
 *     0-8  not known: halve
 *     0-4  not known: halve
 *     0-2  device 0
 *     2-4  not known: halved again and again, down to 64 KiB, with no answer
 *     4-8  the same
 *
 * Neighbours with the same answer are joined: (0, 2 MiB, device 0), (2, 8 MiB,
 * None). */
#include "base/page_table.h"
#include "python/buffer/managed.h"
#include "python/buffer/page_calls.h"

enum {
    /* The memory is divided into about this many ranges at most. */
    MOST_RANGES = 1024,
    STEP_NBYTES = 64 << 10, /* ranges are cut at multiples of this or more */
    MOST_WAITING = 64, /* ranges that wait to be asked about; each halving adds two */
};

typedef struct range {
    uint64_t begin; /* in bytes of the span */
    uint64_t end;
} range;

/* The answer as it grows. Ranges that follow each other and have one location are
 * joined. */
typedef struct sent_list {
    cm_state *state;
    PyObject *list; /* owned; NULL if an exception is set */
    range last;     /* not in the list yet; empty if there is none */
    int location;   /* the location of `last` */
} sent_list;

static void
put_last(sent_list *sent)
{
    if (sent->last.begin < sent->last.end) {
        cm_append(&sent->list,
                  Py_BuildValue("(KKN)", (unsigned long long)sent->last.begin,
                                (unsigned long long)sent->last.end,
                                cm_location_new(sent->state, sent->location)));
    }
}

static void
add_range(sent_list *sent, range next, int location)
{
    bool has_last = sent->last.begin < sent->last.end;
    if (has_last && sent->location == location) {
        sent->last.end = next.end;
        return;
    }
    put_last(sent);
    sent->last = next;
    sent->location = location;
}

/* Return the middle of a range, moved up to an address that is a multiple of `step`. */
static uint64_t
middle_of(cm_address address, range whole, uint64_t step)
{
    uint64_t middle = address + whole.begin + (whole.end - whole.begin) / 2;
    return (middle + step - 1) / step * step - address;
}

/* Find where each range was last sent. Returns a new tuple of (begin, end, place), or
 * NULL with an exception. */
static PyObject *
find_sent(const cm_buffer *self, cm_address address, uint64_t nbytes)
{
    sent_list sent = {.state = self->state, .list = PyList_New(0)};
    range waiting[MOST_WAITING];
    int count = 0;
    uint64_t least = nbytes / MOST_RANGES > 1 ? nbytes / MOST_RANGES : 1;
    uint64_t step = (least + STEP_NBYTES - 1) / STEP_NBYTES * STEP_NBYTES;
    if (nbytes > 0) {
        waiting[count++] = (range){0, nbytes};
    }
    while (count > 0 && sent.list != NULL) {
        range next = waiting[--count];
        int location = CM_NO_LOCATION;
        if (cm_pages_ask(self, next.begin, next.end, CM_RANGE_PREFETCHED, &location, 1)
            < 0) {
            Py_CLEAR(sent.list);
            break;
        }
        uint64_t middle = middle_of(address, next, step);
        bool can_halve =
            next.begin < middle && middle < next.end && count + 2 <= MOST_WAITING;
        if (location != CM_NO_LOCATION || !can_halve) {
            add_range(&sent, next, location);
            continue;
        }
        waiting[count++] = (range){middle, next.end};
        waiting[count++] = (range){next.begin, middle};
    }
    if (sent.list != NULL) {
        put_last(&sent);
    }
    PyObject *answer = sent.list == NULL ? NULL : PyList_AsTuple(sent.list);
    Py_XDECREF(sent.list);
    return answer;
}

/* Count the bytes on pages that are on the host. Returns a new int, or None if the
 * system does not say. */
static PyObject *
find_host_nbytes(cm_address address, uint64_t nbytes, bool *sampled)
{
    uint64_t there;
    bool is_known;
    Py_BEGIN_ALLOW_THREADS
    is_known = cm_page_table_count(address, nbytes, &there, sampled);
    Py_END_ALLOW_THREADS
    if (!is_known) {
        return Py_NewRef(Py_None);
    }
    return PyLong_FromUnsignedLongLong(there);
}

static PyObject *
residency_of(PyObject *object, cm_address address, uint64_t nbytes)
{
    PyObject *host_nbytes = NULL, *sent = NULL, *preferred = NULL;
    PyObject *read_mostly = NULL, *accessed_by = NULL, *answer = NULL;
    bool sampled;
    host_nbytes = find_host_nbytes(address, nbytes, &sampled);
    if (host_nbytes == NULL) {
        goto fail;
    }
    sent = find_sent((cm_buffer *)object, address, nbytes);
    if (sent == NULL) {
        goto fail;
    }
    preferred = cm_buffer_get_preferred_location(object, NULL);
    if (preferred == NULL) {
        goto fail;
    }
    read_mostly = cm_buffer_get_read_mostly(object, NULL);
    if (read_mostly == NULL) {
        goto fail;
    }
    accessed_by = cm_buffer_get_accessed_by(object, NULL);
    if (accessed_by == NULL) {
        goto fail;
    }
    answer =
        cm_package_call("transfers.managed", "Residency",
                        Py_BuildValue("(KOOOOOO)", (unsigned long long)nbytes, sent,
                                      host_nbytes, sampled ? Py_True : Py_False,
                                      preferred, read_mostly, accessed_by));
fail:
    Py_XDECREF(accessed_by);
    Py_XDECREF(read_mostly);
    Py_XDECREF(preferred);
    Py_XDECREF(sent);
    Py_XDECREF(host_nbytes);
    return answer;
}

/* Keeps the memory open, so that all answers are about the same memory. */
PyObject *
cm_buffer_page_residency(PyObject *object, PyObject *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    cm_address address;
    uint64_t nbytes;
    if (cm_pages_find_span(self, &address, &nbytes) < 0) {
        return NULL;
    }
    cm_storage_keep_open(self->storage);
    PyObject *answer = residency_of(object, address, nbytes);
    cm_storage_allow_close(self->storage);
    return answer;
}
