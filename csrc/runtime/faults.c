/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the fault wrapper. Its body for each operation is generated from ops.h. */
#include "runtime/faults.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base/thread.h"

typedef struct cm_faults {
    cm_runtime base; /* first, so that a cm_runtime pointer can be cast to this */
    atomic_int plan_op;
    _Atomic uint64_t plan_nth;
    _Atomic int32_t plan_code;
    atomic_bool plan_repeat;
    atomic_int injected;
    _Atomic uint64_t counts[CM_OP_COUNT];    /* [CM_OP_none] counts all operations */
    _Atomic uint32_t delays_us[CM_OP_COUNT]; /* [CM_OP_none] delays all operations */
    int (*is_held)(void);
    _Atomic uint64_t held_counts[CM_OP_COUNT];
} cm_faults;

/* Count a call, and delay it if cm_faults_delay() asked for that. Returns true if the
 * plan makes the call fail, and then sets *code. */
static bool
should_fail(cm_runtime *rt, cm_op op, int32_t *code)
{
    cm_faults *faults = (cm_faults *)rt;
    uint64_t of_all = atomic_fetch_add(&faults->counts[CM_OP_none], 1) + 1;
    uint64_t of_op = atomic_fetch_add(&faults->counts[op], 1) + 1;
    if (faults->is_held != NULL && faults->is_held()) {
        atomic_fetch_add(&faults->held_counts[op], 1);
    }
    uint32_t delay_us = atomic_load(&faults->delays_us[op]);
    uint32_t delay_all_us = atomic_load(&faults->delays_us[CM_OP_none]);
    delay_us = delay_us > delay_all_us ? delay_us : delay_all_us;
    if (delay_us != 0) {
        cm_sleep_ns((uint64_t)delay_us * 1000u);
    }
    int plan_op = atomic_load(&faults->plan_op);
    if (plan_op != CM_OP_none && plan_op != (int)op) {
        return false;
    }
    uint64_t nth = atomic_load(&faults->plan_nth);
    uint64_t seen = plan_op == CM_OP_none ? of_all : of_op;
    if (nth == 0 || seen < nth || (seen > nth && !atomic_load(&faults->plan_repeat))) {
        return false;
    }
    atomic_store(&faults->injected, (int)op);
    *code = atomic_load(&faults->plan_code);
    return true;
}

#define FAULTS_BODY(name, cuda, driver, arg, params, args)                             \
    static cm_status faults_##name CM_OP_PARAMS params                                 \
    {                                                                                  \
        int32_t code;                                                                  \
        if (should_fail(rt, CM_OP_##name, &code)) {                                    \
            return (cm_status){code, CM_OP_##name, 0,                                  \
                               (uint64_t)CM_ARGUMENT_VALUE arg};                       \
        }                                                                              \
        rt = rt->inner;                                                                \
        return rt->ops->name CM_OP_ARGS args;                                          \
    }
CM_OPS(FAULTS_BODY)
#undef FAULTS_BODY

static const cm_ops_table faults_ops = {
#define FAULTS_FIELD(name, cuda, driver, arg, params, args) .name = faults_##name,
    CM_OPS(FAULTS_FIELD)
#undef FAULTS_FIELD
};

static void
faults_close(cm_runtime *rt)
{
    rt->inner->close(rt->inner);
    free(rt);
}

cm_status
cm_faults_open(cm_runtime *inner, int (*is_held)(void), cm_runtime **out)
{
    cm_faults *faults = calloc(1, sizeof(*faults));
    CM_TRY(cm_allocated(faults != NULL, sizeof(*faults)));
    faults->is_held = is_held;
    cm_runtime *base = &faults->base;
    *base = *inner; /* this copy is not updated when `inner` wakes, so `inner` is asked
                       instead */
    base->ops = &faults_ops;
    base->inner = inner;
    base->close = faults_close;
    *out = base;
    return cm_ok();
}

void
cm_faults_plan(cm_runtime *rt, cm_op op, uint64_t nth, int32_t code, bool repeat)
{
    cm_faults *faults = (cm_faults *)rt;
    atomic_store(&faults->plan_nth, 0);
    for (int i = 0; i < CM_OP_COUNT; i++) {
        atomic_store(&faults->counts[i], 0);
    }
    atomic_store(&faults->injected, CM_OP_none);
    atomic_store(&faults->plan_op, (int)op);
    atomic_store(&faults->plan_code, code);
    atomic_store(&faults->plan_repeat, repeat);
    atomic_store(&faults->plan_nth, nth);
}

uint64_t
cm_faults_count(const cm_runtime *rt, cm_op op)
{
    const cm_faults *faults = (const cm_faults *)rt;
    return (unsigned)op < CM_OP_COUNT ? atomic_load(&faults->counts[op]) : 0;
}

cm_op
cm_faults_last_injected(const cm_runtime *rt)
{
    return (cm_op)atomic_load(&((const cm_faults *)rt)->injected);
}

void
cm_faults_delay(cm_runtime *rt, cm_op op, uint32_t delay_us)
{
    if ((unsigned)op < CM_OP_COUNT) {
        atomic_store(&((cm_faults *)rt)->delays_us[op], delay_us);
    }
}

uint64_t
cm_faults_count_held(const cm_runtime *rt, cm_op op)
{
    return atomic_load(&((const cm_faults *)rt)->held_counts[op]);
}
