/* SPDX-License-Identifier: Apache-2.0 */
/* OutOfMemoryError: the numbers, what they say, and what to do about it. */
#include <stdio.h>

#include "base/host_memory.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/sizes.h"
#include "python/pool/limits.h"
#include "python/pool/out_of_memory.h"

/* -- the numbers --------------------------------------------------------------------- */

typedef struct numbers {
    cm_kind kind;
    int device;
    uint64_t requested;
    uint64_t limit;          /* the one that allows least; UINT64_MAX: none */
    uint64_t left;           /* of it */
    uint64_t smallest_limit; /* however much of it is in use; UINT64_MAX: none */
    uint64_t others; /* held by other pools against that limit, or of that kind */
    cm_pool_counters pool;
    bool has_driver; /* the next three are known: device and managed memory */
    uint64_t driver_free;
    uint64_t driver_total;
    uint64_t outside;   /* of the device's memory held by others than our pools */
    uint64_t available; /* that the host may still give; UINT64_MAX: not asked */
} numbers;

/* Bytes that our pools hold of the device's own memory. */
static int
sum_reserved(cm_state *state, int device, uint64_t *out)
{
    cm_pool_entry *entries;
    size_t count;
    *out = 0;
    if (cm_pools_take_all(state, &entries, &count) < 0) {
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        const cm_pool_config *config = cm_pool_get_config(entries[i].pool);
        if (config->kind == CM_KIND_DEVICE && config->device == device) {
            cm_pool_counters counters;
            cm_pool_read(entries[i].pool, &counters);
            *out += counters.reserved_nbytes;
        }
    }
    cm_pools_give_all(state, entries, count);
    return 0;
}

/* What cannot be read is left out: the error matters more. */
static int
read_driver(cm_state *state, numbers *n)
{
    cm_runtime *rt = state->runtime;
    cm_status status;
    cm_state_enter(state);
    Py_BEGIN_ALLOW_THREADS
    cm_device_guard guard;
    status = cm_device_enter(rt, n->device, &guard);
    if (cm_is_ok(status)) {
        status = cm_rt_memory_info(rt, &n->driver_free, &n->driver_total);
        cm_device_leave(rt, &guard);
    }
    Py_END_ALLOW_THREADS
    cm_state_leave(state);
    n->has_driver = cm_is_ok(status);
    uint64_t ours = 0;
    if (!n->has_driver) {
        return 0;
    }
    if (sum_reserved(state, n->device, &ours) < 0) {
        return -1;
    }
    uint64_t used = n->driver_total - n->driver_free;
    n->outside = used > ours ? used - ours : 0;
    return 0;
}

static void
read_limits(const cm_budget *own, numbers *n)
{
    const cm_budget *tightest = cm_budget_tightest(own);
    n->limit = atomic_load(&tightest->limit_nbytes);
    n->left = cm_budget_left(tightest);
    n->smallest_limit = UINT64_MAX;
    for (const cm_budget *b = own; b != NULL; b = b->parent) {
        uint64_t limit = atomic_load(&b->limit_nbytes);
        n->smallest_limit = limit < n->smallest_limit ? limit : n->smallest_limit;
    }
    uint64_t used = atomic_load(&tightest->used_nbytes);
    uint64_t ours = atomic_load(&own->used_nbytes);
    n->others = used > ours ? used - ours : 0;
}

static int
read_numbers(cm_state *state, const cm_shortage *shortage, numbers *n)
{
    const cm_pool_config *config = cm_pool_get_config(shortage->pool);
    *n = (numbers){.kind = config->kind,
                   .device = config->device,
                   .requested = shortage->nbytes,
                   .available = UINT64_MAX};
    read_limits(config->budget, n);
    cm_pool_read(shortage->pool, &n->pool);
    if (!cm_kind_is_host(n->kind)) {
        return read_driver(state, n);
    }
    cm_host_memory memory;
    cm_host_memory_read(NULL, &memory);
    n->available = memory.available_nbytes;
    return 0;
}

static double
fragmentation(const cm_pool_counters *pool)
{
    if (pool->cached_nbytes == 0) {
        return 0;
    }
    return 1 - (double)pool->largest_free_nbytes / (double)pool->cached_nbytes;
}

/* -- the advice ---------------------------------------------------------------------- */

enum { TEXT = 32, ADVICE = 320 };

static void
advise_on_limit(const numbers *n, uint64_t piece, char *out)
{
    char limit[TEXT];
    char first[TEXT];
    char others[TEXT];
    if (n->requested > n->smallest_limit) {
        cm_size_format(n->smallest_limit, limit);
        (void)snprintf(
            out, ADVICE,
            "more than the limit of %s can never be had: ask for less, work "
            "in pieces, or raise it with cumem.set_limit(\"%s\", ...) or the "
            "pool's limit",
            limit, cm_kind_name(n->kind));
        return;
    }
    cm_size_format(n->limit, limit);
    if (n->left >= n->requested) {
        cm_size_format(piece, first);
        (void)snprintf(
            out, ADVICE,
            "memory is taken in pieces, here of %s, and that passes the limit "
            "of %s: raise it with cumem.set_limit(\"%s\", ...) or the pool's "
            "limit",
            first, limit, cm_kind_name(n->kind));
        return;
    }
    cm_size_format(n->pool.live_nbytes, first);
    if (n->others > n->pool.live_nbytes) {
        cm_size_format(n->others, others);
        (void)snprintf(
            out, ADVICE,
            "other pools hold %s and buffers of this one %s, and the limit is "
            "%s for all of them: drop buffers of the others (cumem.stats() "
            "lists the pools), or raise it with cumem.set_limit(\"%s\", ...)",
            others, first, limit, cm_kind_name(n->kind));
        return;
    }
    (void)snprintf(out, ADVICE,
                   "buffers of this pool hold %s and the limit is %s: drop buffers, or "
                   "raise it with cumem.set_limit(\"%s\", ...) or the pool's limit",
                   first, limit, cm_kind_name(n->kind));
}

static void
advise_on_host(const numbers *n, char *out)
{
    char available[TEXT];
    cm_size_format(n->available, available);
    (void)snprintf(out, ADVICE,
                   "only %s can be had from this machine or container now: page-lock "
                   "less at a time by copying in pieces, or give the container more "
                   "memory",
                   available);
}

static void
advise_on_device(const numbers *n, char *out)
{
    char first[TEXT];
    cm_size_format(n->driver_total, first);
    if (n->has_driver && n->requested > n->driver_total) {
        (void)snprintf(
            out, ADVICE,
            "the device has %s in all: work in pieces, or use managed memory, "
            "which may be larger than the device",
            first);
        return;
    }
    if (n->has_driver && n->outside > n->pool.live_nbytes) {
        cm_size_format(n->outside, first);
        (void)snprintf(
            out, ADVICE,
            "%s of the device are held outside cumem: let the other libraries "
            "give back what they cache (torch.cuda.empty_cache(), CuPy's "
            "free_all_blocks()), or look with nvidia-smi which other process "
            "has it",
            first);
        return;
    }
    if (n->pool.cached_nbytes >= n->requested) {
        cm_size_format(n->pool.cached_nbytes, first);
        (void)snprintf(
            out, ADVICE,
            "%s are free but in pieces that buffers in between keep apart: "
            "allocate large buffers first, or give short-lived ones a Pool of "
            "their own",
            first);
        return;
    }
    if (n->others > n->pool.live_nbytes) {
        cm_size_format(n->others, first);
        (void)snprintf(out, ADVICE,
                       "other pools hold %s: drop buffers of theirs that are done with "
                       "(cumem.stats() lists the pools), or work in smaller pieces",
                       first);
        return;
    }
    cm_size_format(n->pool.live_nbytes, first);
    (void)snprintf(
        out, ADVICE,
        "buffers hold %s of this pool: drop those that are done with, or work "
        "in smaller pieces",
        first);
}

static void
advise(const numbers *n, cm_status status, char *out)
{
    if (status.code == CM_ELIMIT) {
        advise_on_limit(n, status.arg, out);
    }
    else if (cm_kind_is_host(n->kind)) {
        advise_on_host(n, out);
    }
    else {
        advise_on_device(n, out);
    }
}

/* -- the text ------------------------------------------------------------------------ */

static PyObject *
join_tried(PyObject *tried)
{
    PyObject *comma = PyUnicode_FromString("; ");
    PyObject *text = comma == NULL ? NULL : PyUnicode_Join(comma, tried);
    Py_XDECREF(comma);
    return text;
}

static PyObject *
write_detail(const numbers *n, PyObject *tried, const char *advice)
{
    char requested[TEXT];
    char limit[TEXT] = "none";
    char live[TEXT];
    char cached[TEXT];
    char in_flight[TEXT];
    char largest[TEXT];
    char others[TEXT];
    char beyond[160] = "";
    cm_size_format(n->requested, requested);
    cm_size_format(n->pool.live_nbytes, live);
    cm_size_format(n->pool.cached_nbytes, cached);
    cm_size_format(n->pool.in_flight_nbytes, in_flight);
    cm_size_format(n->pool.largest_free_nbytes, largest);
    cm_size_format(n->others, others);
    if (n->limit != UINT64_MAX) {
        cm_size_format(n->limit, limit);
    }
    if (n->has_driver) {
        char unused[TEXT];
        char total[TEXT];
        char outside[TEXT];
        cm_size_format(n->driver_free, unused);
        cm_size_format(n->driver_total, total);
        cm_size_format(n->outside, outside);
        (void)snprintf(beyond, sizeof(beyond),
                       ", the driver has %s free of %s, %s are held outside cumem",
                       unused, total, outside);
    }
    else if (n->available != UINT64_MAX) {
        char available[TEXT];
        cm_size_format(n->available, available);
        (void)snprintf(beyond, sizeof(beyond), ", the host can still give %s",
                       available);
    }
    PyObject *steps = join_tried(tried);
    if (steps == NULL) {
        return NULL;
    }
    PyObject *text = PyUnicode_FromFormat(
        "asked for %s (%llu bytes) of %s memory on device %d; limit %s; the pool has "
        "%s "
        "live, %s cached, %s in flight, largest free %s, fragmentation %d%%, other "
        "pools "
        "hold %s%s%s. Tried: "
        "%U. Advice: %s",
        requested, (unsigned long long)n->requested, cm_kind_name(n->kind), n->device,
        limit, live, cached, in_flight, largest,
        (int)(fragmentation(&n->pool) * 100 + 0.5), others,
        n->limit != UINT64_MAX ? " against the same limit" : "", beyond, steps, advice);
    Py_DECREF(steps);
    return text;
}

/* -- the exception ------------------------------------------------------------------- */

/* Steals `value`. */
static bool
set(PyObject *exception, const char *name, PyObject *value)
{
    bool good = value != NULL && PyObject_SetAttrString(exception, name, value) == 0;
    Py_XDECREF(value);
    return good;
}

static bool
set_number(PyObject *exception, const char *name, uint64_t value)
{
    return set(exception, name, PyLong_FromUnsignedLongLong(value));
}

static PyObject *
known(bool is_known, uint64_t value)
{
    return is_known ? PyLong_FromUnsignedLongLong(value) : Py_NewRef(Py_None);
}

static bool
set_fields(PyObject *exception, const numbers *n, PyObject *tried, const char *advice)
{
    const cm_pool_counters *pool = &n->pool;
    return set_number(exception, "requested", n->requested)
           && set(exception, "kind", PyUnicode_FromString(cm_kind_name(n->kind)))
           && set(exception, "device", PyLong_FromLong(n->device))
           && set(exception, "limit", cm_limit_to_object(n->limit))
           && set_number(exception, "live", pool->live_nbytes)
           && set_number(exception, "cached", pool->cached_nbytes)
           && set_number(exception, "in_flight", pool->in_flight_nbytes)
           && set_number(exception, "others", n->others)
           && set_number(exception, "largest_free", pool->largest_free_nbytes)
           && set(exception, "fragmentation", PyFloat_FromDouble(fragmentation(pool)))
           && set(exception, "driver_free", known(n->has_driver, n->driver_free))
           && set(exception, "driver_total", known(n->has_driver, n->driver_total))
           && set(exception, "outside", known(n->has_driver, n->outside))
           && set(exception, "available", cm_limit_to_object(n->available))
           && set(exception, "tried", PyList_AsTuple(tried))
           && set(exception, "advice", PyUnicode_FromString(advice));
}

void
cm_shortage_raise(cm_state *state, const cm_shortage *shortage)
{
    numbers n;
    char advice[ADVICE];
    if (read_numbers(state, shortage, &n) < 0) {
        return;
    }
    advise(&n, shortage->status, advice);
    PyObject *detail = write_detail(&n, shortage->tried, advice);
    if (detail == NULL) {
        return;
    }
    PyObject *exception = cm_py_exception_new(state, shortage->status, detail);
    Py_DECREF(detail);
    if (exception != NULL && set_fields(exception, &n, shortage->tried, advice)) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    }
    Py_XDECREF(exception);
}
