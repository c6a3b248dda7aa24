/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the turns of the interpreter's threads shorter while a call works without the
 * GIL and will need the GIL again at its end.
 *
 * The idea
 * --------
 * A thread that wants the GIL back gets it only when another thread's turn is over,
 * which Python lets last 5 ms (sys.setswitchinterval). If one other thread computes,
 * the call waits for one turn. If several compute, all of them want the GIL at the end
 * of each turn. Python gives it to any of them, so the call may wait for many turns:
 * three computing threads can make a copy of 20 ms take 60. No call can ask for the GIL
 * with more weight, but if the turns are shorter, so is the wait.
 *
 * So a call that gives the GIL up asks for short turns, and restores their length when
 * it has the GIL again. This is done only where it helps:
 *
 *   - The last such call had to wait for the GIL, so there are threads that compute. If
 *     there are none, nothing is changed.
 *   - Turns have the length that Python gives them. A program that has chosen another
 *     length keeps it.
 *
 * Example: a thread uploads arrays while three others compute. The first upload waits
 * for the GIL as long as it takes. The four threads take turns of half a millisecond
 * while a later upload runs, and turns of 5 ms at all other times.
 *
 * Edges
 * -----
 * Several calls may wait at the same time; the last one to end restores the length,
 * unless the program has set another one meanwhile. In a forked child the calls of the
 * parent's other threads never end, so there the next call begins anew. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Guarded by the GIL. */
typedef struct cm_turns {
    bool is_contested;   /* the last call had to wait for the GIL */
    uint32_t call_count; /* the calls that wait now and have asked for short turns */
    pid_t process;       /* the process of these calls */
} cm_turns;

enum {
    /* A thread that gets the GIL later than this had to wait for another one's turn. */
    CM_TURNS_CONTESTED_NS = 200 * 1000
};

/* Ask for short turns, before the GIL is given up, if turns->is_contested. Returns
 * false if nothing was asked for. The caller may leave this out if turns->is_contested
 * is false and no call waits. Keeps an exception that is set. */
bool cm_turns_shorten(cm_turns *turns);
/* End what cm_turns_shorten() has asked for. The last call that ends restores the
 * length of turns. Keeps an exception that is set. */
void cm_turns_restore(cm_turns *turns);
