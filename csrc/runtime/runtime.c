/* SPDX-License-Identifier: Apache-2.0 */
/* Implements what all runtimes share: the facts about kinds and operations, the page by
 * which a child finds out that it was forked, waking a runtime, the runtime for the
 * host alone, and entering a device. */
#include "runtime/runtime.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/machine.h"

const cm_kind_fact cm_kinds[CM_KIND_COUNT] = {
#define KIND_FACT(name, text, traits, flags) {#text, (traits), (flags)},
    CM_KINDS(KIND_FACT)
#undef KIND_FACT
};

const cm_op_fact cm_op_facts[CM_OP_COUNT] = {
#define OP_FACT(name, cuda, driver, arg, params, args)                                 \
    [CM_OP_##name] = {#name, #cuda, CM_ARGUMENT_KIND arg, (driver)},
    CM_OPS(OP_FACT)
#undef OP_FACT
};

/* ---- the page that is wiped on fork ------------------------------------------------- */

/* Linux itself wipes such a page in the child (MADV_WIPEONFORK), however the process
 * forks. Sandboxes such as gVisor refuse that advice. There a handler of
 * pthread_atfork() writes zero to the page in the child. The handler does not run in
 * children that were made by the bare system call, so in a sandbox such a child does
 * not learn that it was forked. */
enum { PAGES_BY_HAND = 64 };

static struct {
    pthread_mutex_t lock;
    bool watches_forks;
    const volatile uint32_t *pages[PAGES_BY_HAND];
} by_hand = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Write to a page that nobody else writes. Returns 0, or -1 with errno. */
static int
write_page(const volatile uint32_t *page, uint32_t value)
{
    void *place = (void *)(uintptr_t)page;
    if (mprotect(place, cm_page_nbytes(), PROT_READ | PROT_WRITE) != 0) {
        return -1;
    }
    *(volatile uint32_t *)place = value;
    (void)mprotect(place, cm_page_nbytes(), PROT_READ);
    return 0;
}

static void
before_fork(void)
{
    (void)pthread_mutex_lock(&by_hand.lock);
}

static void
after_fork_in_parent(void)
{
    (void)pthread_mutex_unlock(&by_hand.lock);
}

static void
after_fork_in_child(void)
{
    for (int i = 0; i < PAGES_BY_HAND; i++) {
        if (by_hand.pages[i] != NULL) {
            (void)write_page(by_hand.pages[i], 0);
        }
    }
    (void)pthread_mutex_unlock(&by_hand.lock);
}

/* Set the handlers, unless they are set already. Returns false if there is no memory
 * for them. */
static bool
watch_forks(void)
{
    (void)pthread_mutex_lock(&by_hand.lock);
    if (!by_hand.watches_forks) {
        by_hand.watches_forks =
            pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
    }
    bool watches = by_hand.watches_forks;
    (void)pthread_mutex_unlock(&by_hand.lock);
    return watches;
}

/* Replace `old` by `page` in the list of pages that the handler wipes, in which NULL is
 * a free place. Returns false if `old` is not in the list. */
static bool
replace_by_hand(const volatile uint32_t *old, const volatile uint32_t *page)
{
    bool found = false;
    (void)pthread_mutex_lock(&by_hand.lock);
    for (int i = 0; i < PAGES_BY_HAND && !found; i++) {
        if (by_hand.pages[i] == old) {
            by_hand.pages[i] = page;
            found = true;
        }
    }
    (void)pthread_mutex_unlock(&by_hand.lock);
    return found;
}

cm_status
cm_alive_page_create(const volatile uint32_t **out)
{
    void *page = mmap(NULL, cm_page_nbytes(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
        return cm_fail(CM_ESYSTEM, (uint64_t)errno);
    }
    /* This only finds out whether the kernel can wipe the page. It is armed later. */
    bool wipes = madvise(page, cm_page_nbytes(), MADV_WIPEONFORK) == 0
                 && madvise(page, cm_page_nbytes(), MADV_KEEPONFORK) == 0;
    if (!wipes && !watch_forks()) {
        (void)munmap(page, cm_page_nbytes());
        return cm_fail(CM_ENOMEM, 0);
    }
    *(volatile uint32_t *)page = 1;
    /* Nobody writes to the page from here on, so it can be read without a lock. */
    (void)mprotect(page, cm_page_nbytes(), PROT_READ);
    *out = (const volatile uint32_t *)page;
    return cm_ok();
}

void
cm_alive_page_arm(const volatile uint32_t *page)
{
    void *place = (void *)(uintptr_t)page;
    if (madvise(place, cm_page_nbytes(), MADV_WIPEONFORK) != 0) {
        (void)replace_by_hand(NULL, page);
    }
}

cm_status
cm_alive_page_reset(const volatile uint32_t *page)
{
    void *place = (void *)(uintptr_t)page;
    (void)replace_by_hand(page, NULL);
    (void)madvise(place, cm_page_nbytes(), MADV_KEEPONFORK);
    if (write_page(page, 1) != 0) {
        return cm_fail(CM_ESYSTEM, (uint64_t)errno);
    }
    return cm_ok();
}

void
cm_alive_page_destroy(const volatile uint32_t *page)
{
    if (page != NULL) {
        (void)replace_by_hand(page, NULL);
        (void)munmap((void *)(uintptr_t)page, cm_page_nbytes());
    }
}

/* ---- from sleep to work -------------------------------------------------------------- */

/* Return the runtime under all fault wrappers. Only that one knows whether it is bound
 * and awake. */
static cm_runtime *
innermost(cm_runtime *rt)
{
    while (rt->inner != NULL) {
        rt = rt->inner;
    }
    return rt;
}

void
cm_runtime_bind(cm_runtime *rt)
{
    rt = innermost(rt);
    if (!atomic_load_explicit(&rt->is_bound, memory_order_relaxed)) {
        cm_alive_page_arm(rt->alive); /* doing this twice does no harm */
        atomic_store(&rt->is_bound, true);
    }
}

cm_status
cm_runtime_revive(cm_runtime *rt)
{
    rt = innermost(rt);
    /* A thread of the parent may have held the lock at the fork. */
    rt->waking = (cm_mutex)PTHREAD_MUTEX_INITIALIZER;
    atomic_store(&rt->is_bound, false);
    return cm_alive_page_reset(rt->alive);
}

cm_status
cm_runtime_wake(cm_runtime *rt)
{
    rt = innermost(rt);
    if (rt->is_host_only) {
        /* The `wake` of such a runtime does nothing but refuse, so it may run in
         * several threads at a time. */
        return rt->wake(rt);
    }
    /* Bind first. A child that is forked while another thread holds the lock then finds
     * out that it is forked, and never waits for the lock. */
    cm_runtime_bind(rt);
    cm_status status = cm_ok();
    cm_mutex_lock(&rt->waking);
    if (!atomic_load(&rt->is_awake)) {
        status = rt->wake(rt);
        atomic_store_explicit(&rt->is_awake, cm_is_ok(status), memory_order_release);
    }
    cm_mutex_unlock(&rt->waking);
    return status;
}

bool
cm_runtime_wake_if_started(cm_runtime *rt)
{
    rt = innermost(rt);
    return cm_runtime_is_awake(rt)
           || (rt->is_started != NULL && rt->is_started(rt)
               && cm_is_ok(cm_runtime_wake(rt)));
}

/* ---- for the host alone ----------------------------------------------------------- */
/* A runtime whose devices never run anything. It refuses to queue work and to make
 * memory. So every stream is idle and every event has passed, which it can say without
 * a driver. Copies from host to host need these answers, since they may have to wait
 * for streams and events. */

#define HOST_ONLY_BODY(name, cuda, driver, arg, params, args)                          \
    static cm_status host_only_##name CM_OP_PARAMS params                              \
    {                                                                                  \
        (void)sizeof(cm_rt_##name CM_OP_ARGS args); /* this uses all arguments */      \
        return rt->wake(rt);                                                           \
    }
CM_OPS(HOST_ONLY_BODY)
#undef HOST_ONLY_BODY

static const cm_ops_table refusing_ops = {
#define HOST_ONLY_FIELD(name, cuda, driver, arg, params, args) .name = host_only_##name,
    CM_OPS(HOST_ONLY_FIELD)
#undef HOST_ONLY_FIELD
};

static cm_status
refuse_in_child(cm_runtime *rt CM_UNUSED)
{
    return cm_fail(CM_EFORKED, 0);
}

static cm_status
device_set(cm_runtime *rt CM_UNUSED, int device CM_UNUSED)
{
    return cm_ok();
}

static cm_status
context_get(cm_runtime *rt CM_UNUSED, uint64_t *out)
{
    *out = 1;
    return cm_ok();
}

static cm_status
keep_handle(cm_runtime *rt CM_UNUSED, uint64_t handle CM_UNUSED)
{
    return cm_ok();
}

static cm_status
keep_handles(cm_runtime *rt CM_UNUSED, uint64_t first CM_UNUSED,
             uint64_t second CM_UNUSED)
{
    return cm_ok();
}

static cm_status
answer_done(cm_runtime *rt CM_UNUSED, uint64_t handle CM_UNUSED, bool *out)
{
    *out = true;
    return cm_ok();
}

static cm_status
answer_not_capturing(cm_runtime *rt CM_UNUSED, uint64_t stream CM_UNUSED, bool *out)
{
    *out = false;
    return cm_ok();
}

static cm_status
exchange_mode(cm_runtime *rt CM_UNUSED, int *mode CM_UNUSED)
{
    return cm_ok();
}

static cm_status
event_create(cm_runtime *rt CM_UNUSED, unsigned flags CM_UNUSED, uint64_t *out)
{
    *out = 1; /* any number will do but 0, which means none */
    return cm_ok();
}

static cm_status
stream_get_id(cm_runtime *rt CM_UNUSED, uint64_t stream, uint64_t *out)
{
    *out = stream;
    return cm_ok();
}

/* These facts were copied from the parent's runtime, and are still true in the
 * child. */
static cm_status
answer_driver_version(cm_runtime *rt, int *out)
{
    *out = rt->driver_version;
    return cm_ok();
}

static cm_status
answer_device_count(cm_runtime *rt, int *out)
{
    *out = rt->device_count;
    return cm_ok();
}

static cm_status
answer_runtime_version(cm_runtime *rt, int *out)
{
    *out = rt->runtime_version;
    return cm_ok();
}

typedef struct host_only {
    cm_runtime base; /* first, so that a cm_runtime pointer can be cast to this */
    cm_ops_table ops;
} host_only;

static void
host_only_close(cm_runtime *rt)
{
    cm_alive_page_destroy(rt->alive);
    free(rt);
}

cm_status
cm_host_only_open(const cm_runtime *parent, cm_runtime **out)
{
    host_only *made = calloc(1, sizeof(*made));
    CM_TRY(cm_allocated(made != NULL, sizeof(*made)));
    cm_runtime *rt = &made->base;
    made->ops = refusing_ops;
    made->ops.device_set = device_set;
    made->ops.context_get = context_get;
    made->ops.context_set = keep_handle;
    made->ops.capture_mode_exchange = exchange_mode;
    made->ops.stream_get_id = stream_get_id;
    made->ops.stream_query = answer_done;
    made->ops.stream_synchronize = keep_handle;
    made->ops.stream_is_capturing = answer_not_capturing;
    made->ops.stream_wait_event = keep_handles;
    made->ops.event_create = event_create;
    made->ops.event_destroy = keep_handle;
    made->ops.event_record = keep_handles;
    made->ops.event_query = answer_done;
    made->ops.event_synchronize = keep_handle;
    made->ops.driver_version = answer_driver_version;
    made->ops.device_count = answer_device_count;
    made->ops.runtime_version = answer_runtime_version;
    rt->ops = &made->ops;
    rt->backend = parent->backend;
    rt->driver_version = parent->driver_version;
    rt->runtime_version = parent->runtime_version;
    rt->device_count = parent->device_count;
    rt->reason = parent->reason;
    rt->wake = refuse_in_child;
    rt->is_host_only = true;
    rt->close = host_only_close;
    cm_status status = cm_alive_page_create(&rt->alive);
    if (!cm_is_ok(status)) {
        free(rt);
        return status;
    }
    *out = rt;
    return status;
}

/* ---- entering a device without changing it for the caller ------------------------- */

/* The context that was current before is made current again afterwards, or none if
 * there was none, so that nothing is ever created on device 0 by accident. */

/* Make a context current again. The thread's next call relies on this, so it is tried
 * twice. */
static void
put_back(cm_runtime *rt, uint64_t context)
{
    (void)CM_TRY_TWICE(cm_rt_context_set(rt, context));
}

/* Enter a device whose primary context is not known. Only cudaSetDevice() can find the
 * context, the first time and after a device reset. */
static cm_status
enter_by_device(cm_runtime *rt, int device, cm_device_guard *guard)
{
    CM_TRY(cm_rt_device_set(rt, device));
    uint64_t context = 0;
    cm_status status = cm_rt_context_get(rt, &context);
    if (!cm_is_ok(status)) {
        put_back(rt, guard->previous);
        return status;
    }
    uint64_t before =
        atomic_exchange_explicit(&rt->primary[device], context, memory_order_relaxed);
    if (before != context) {
        (void)atomic_fetch_add_explicit(&rt->context_count, 1, memory_order_release);
    }
    guard->switched = context != guard->previous;
    return cm_ok();
}

cm_status
cm_device_enter(cm_runtime *rt, int device, cm_device_guard *guard)
{
    *guard = (cm_device_guard){0, false};
    if (device < 0 || device >= rt->device_count || device >= CM_MAX_DEVICES) {
        return (cm_status){CM_CUDA_INVALID_DEVICE, CM_OP_device_set, 0,
                           (uint64_t)(int64_t)device};
    }
    CM_TRY(cm_rt_context_get(rt, &guard->previous));
    uint64_t primary = atomic_load_explicit(&rt->primary[device], memory_order_relaxed);
    if (primary == 0) {
        return enter_by_device(rt, device, guard);
    }
    if (primary == guard->previous) {
        return cm_ok();
    }
    cm_status status = cm_rt_context_set(rt, primary);
    guard->switched = cm_is_ok(status);
    bool is_gone = status.code == CM_CUDA_DEVICE_UNINITIALIZED
                   || status.code == CM_CUDA_CONTEXT_DESTROYED;
    return is_gone ? enter_by_device(rt, device, guard) : status;
}

/* Devices that we have entered come first, since their contexts are known. */
int
cm_device_with_context(cm_runtime *rt, int preferred)
{
    uint64_t entered = cm_devices_in_use(rt, false);
    uint64_t devices = entered != 0 ? entered : cm_devices_in_use(rt, true);
    if (preferred >= 0 && preferred < CM_MAX_DEVICES
        && (devices >> preferred & 1) != 0) {
        return preferred;
    }
    return devices == 0 ? -1 : __builtin_ctzll(devices);
}

cm_status
cm_device_enter_any(cm_runtime *rt, int device, cm_device_guard *guard)
{
    uint64_t context = 0;
    *guard = (cm_device_guard){0, false};
    CM_TRY(cm_rt_context_get(rt, &context));
    if (context != 0) {
        return cm_ok();
    }
    int other = cm_device_with_context(rt, device);
    return cm_device_enter(rt, other < 0 ? device : other, guard);
}

cm_status
cm_host_may_be_locked(cm_runtime *rt, bool *out)
{
    uint64_t context = 0;
    *out = false;
    if (!cm_runtime_wake_if_started(rt)) { /* nobody has started the driver */
        return cm_ok();
    }
    *out = true;
    CM_TRY(cm_rt_context_get(rt, &context));
    *out = context != 0 || cm_device_with_context(rt, -1) >= 0;
    return cm_ok();
}

bool
cm_device_was_entered(const cm_runtime *rt, int device)
{
    return device >= 0 && device < CM_MAX_DEVICES
           && atomic_load_explicit(&rt->primary[device], memory_order_relaxed) != 0;
}

uint64_t
cm_devices_in_use(cm_runtime *rt, bool by_anyone)
{
    uint64_t devices = 0;
    if (by_anyone && !cm_runtime_wake_if_started(rt)) {
        return 0; /* without a driver nobody has a context */
    }
    for (int d = 0; d < rt->device_count; d++) {
        bool active = cm_device_was_entered(rt, d);
        if (!active && by_anyone) {
            active = true;
            cm_ignore(cm_rt_context_is_active(rt, d, &active));
        }
        devices |= active ? UINT64_C(1) << d : 0;
    }
    return devices;
}

void
cm_device_leave(cm_runtime *rt, const cm_device_guard *guard)
{
    if (guard->switched) {
        put_back(rt, guard->previous);
    }
}
