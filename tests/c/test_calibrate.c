/* SPDX-License-Identifier: Apache-2.0 */
/* transfer/calibrate.h: the emulated device measured as if it were one. What comes out
 * means nothing there; that it comes out, and that nothing is left behind, does. */
#include <math.h>

#include "engine_world.h"
#include "transfer/run/calibrate.h"

#define PATIENCE_NS (UINT64_C(60) * 1000 * 1000 * 1000)
#define HASTE_NS (UINT64_C(100) * 1000 * 1000)

static void
test_calibrate_finds_figures_that_make_sense(void)
{
    world w;
    cm_measured m;
    cm_tuning t;
    open_world(&w);
    for (int device = 0; device < WORLD_DEVICES; device++) {
        uint64_t budget_ns = device == 0 ? PATIENCE_NS : HASTE_NS;
        CHECK_OK(cm_engine_calibrate(w.engine, device, budget_ns, &m));
        for (int i = 0; i < CM_MEASURED_COUNT; i++) {
            double value = *cm_measured_at(&m, i);
            CHECK(isfinite(value) && value >= 0);
        }
        CHECK(m.up_rate > 0 && m.down_rate > 0);
        CHECK(m.copy_rate_1 > 0 && m.wake_ns > 0);
        CHECK(m.driver_up_rate > 0 && m.driver_down_rate > 0);
        cm_tuning_derive(&m, 4, &t);
        CHECK(cm_tuning_check(&t, NULL));
        CHECK_OK(cm_engine_set_tuning(w.engine, &t));
    }
    CHECK_EQ(cm_engine_count_pending(w.engine), 0);
    CHECK_CODE(cm_engine_calibrate(w.engine, -1, PATIENCE_NS, &m), CM_EINVALID);
    CHECK_CODE(cm_engine_calibrate(w.engine, CM_MAX_DEVICES, PATIENCE_NS, &m),
               CM_EINVALID);
    CHECK(!cm_is_ok(cm_engine_calibrate(w.engine, WORLD_DEVICES, PATIENCE_NS, &m)));
    close_world(&w);
}

/* Some call of each operation that is used fails. */
static void
test_calibrate_that_fails_leaves_nothing_behind(void)
{
    world w;
    cm_measured m;
    uint64_t counts[CM_OP_COUNT] = {0};
    open_world(&w);
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    CHECK_OK(cm_engine_calibrate(w.engine, 0, HASTE_NS, &m));
    for (int op = CM_OP_none + 1; op < CM_OP_COUNT; op++) {
        counts[op] = cm_faults_count(w.rt, (cm_op)op);
    }
    close_world(&w);
    for (int op = CM_OP_none + 1; op < CM_OP_COUNT; op++) {
        if (counts[op] == 0) {
            continue;
        }
        open_world(&w);
        cm_faults_plan(w.rt, (cm_op)op, 1 + (counts[op] > 100 ? 20 : 0), 999, false);
        cm_status status = cm_engine_calibrate(w.engine, 0, HASTE_NS, &m);
        CHECK(cm_is_ok(status) || cm_faults_struck(w.rt) == (cm_op)op);
        cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
        CHECK_EQ(cm_engine_count_pending(w.engine), 0);
        close_world(&w);
    }
    CHECK_GT(counts[CM_OP_copy_async], 0);
}

/* clang-format off */
MAIN(RUN(test_calibrate_finds_figures_that_make_sense)
     RUN(test_calibrate_that_fails_leaves_nothing_behind))
/* clang-format on */
