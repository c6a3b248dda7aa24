/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses which calls of the runtime fail in a fault sweep. A sweep first makes a copy,
 * or whatever it is about, without a fault, and counts the calls of each operation.
 * Then it makes the same copy once for each call that is chosen, and lets that call
 * fail: it plans a fault of call `sweep.nth` of `sweep.op` as long as
 * fault_sweep_next() finds one.
 *
 * While a thread waits for a stream it asks again and again whether an event is over,
 * so some operations have hundreds of calls that are all made at one place in the code.
 * Their number depends on the speed of the machine, and a sweep over all of them takes
 * far longer than one over the rest and shows nothing new. Only some of these calls
 * are chosen: the first ones, and as many of the later ones, with the last among
 * them. */
#pragma once

#include "check.h"
#include "runtime/faults.h"

/* How many calls are chosen of an operation that a waiting thread repeats. */
enum { FAULT_SWEEP_REPEATED = 12 };

typedef struct fault_sweep {
    cm_op op;     /* the operation whose call fails now */
    uint64_t nth; /* which of its calls fails, from 1 on */
    uint64_t counts[CM_OP_COUNT];
    uint64_t most;
    uint64_t turn; /* how many calls of `op` were chosen so far */
} fault_sweep;

/* True if a thread that waits calls the operation again and again. The last four belong
 * to the scope (runtime/scope.h) around the question. */
CM_UNUSED static bool
fault_sweep_is_repeated(cm_op op)
{
    return op == CM_OP_event_query || op == CM_OP_stream_query
           || op == CM_OP_context_get || op == CM_OP_context_set
           || op == CM_OP_context_device || op == CM_OP_capture_mode_exchange;
}

/* Begin a sweep over the calls that were made since the last plan of faults. At most
 * `most` calls of each operation are chosen. */
CM_UNUSED static void
fault_sweep_begin(fault_sweep *sweep, const cm_runtime *rt, uint64_t most)
{
    *sweep = (fault_sweep){.op = CM_OP_none, .most = most};
    for (int op = CM_OP_none + 1; op < CM_OP_COUNT; op++) {
        sweep->counts[op] = cm_faults_count(rt, (cm_op)op);
    }
}

/* Choose the next call, which is the call `nth` of the operation `op`. Returns false if
 * all have had their turn. */
CM_UNUSED static bool
fault_sweep_next(fault_sweep *sweep)
{
    uint64_t most = sweep->most;
    if (fault_sweep_is_repeated(sweep->op) && most > FAULT_SWEEP_REPEATED) {
        most = FAULT_SWEEP_REPEATED;
    }
    uint64_t count = sweep->counts[sweep->op];
    if (sweep->turn >= (count < most ? count : most)) {
        do {
            sweep->op++;
            if (sweep->op == CM_OP_COUNT) {
                return false;
            }
        } while (sweep->counts[sweep->op] == 0);
        sweep->turn = 0;
        return fault_sweep_next(sweep);
    }
    sweep->turn++;
    sweep->nth = sweep->turn;
    uint64_t first = most / 2;
    if (count > most && sweep->turn > first) {
        sweep->nth = first + (count - first) * (sweep->turn - first) / (most - first);
    }
    return true;
}
