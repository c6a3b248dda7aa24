/* SPDX-License-Identifier: Apache-2.0 */
/* The order oracle says who may touch which bytes. It learns this from the calls of the
 * runtime alone. Hooks under an emulated runtime follow the order between streams,
 * which comes from events, waits, the legacy stream and waits for devices. They also
 * note which work the host has seen end. Tests report each use of memory to it. It
 * checks a range of memory when that is handed out and when it goes back to the
 * runtime. It knows nothing of pools, so it cannot share a mistake of theirs. Only one
 * oracle can be open in a process. Locks: one, which is never held across a call of the
 * runtime, except while a gate is moved. */
#pragma once

#include "base/thread.h"
#include "runtime/runtime.h"

enum { ORACLE_LINES = 64, ORACLE_DEVICES = 2, ORACLE_BUCKETS = 512 };

/* A clock says how much work has come before. For each line it has the number of the
 * last work that is included. */
typedef struct oracle_clock {
    uint64_t of[ORACLE_LINES];
} oracle_clock;

/* A line is a stream. It remains after the stream was destroyed, until the host has
 * seen the end of each use that is noted for it. */
typedef struct oracle_line {
    uint64_t handle;
    int device;
    bool is_open;
    /* It is ordered after the legacy stream, and the legacy stream after it. */
    bool is_blocking;
    bool is_shut;
    uint64_t shut_seq; /* the gate holds back work after this number */
    /* The number of the line's last work. It goes on counting when another stream gets
     * this place. */
    uint64_t seq;
    /* What the line's next work comes after because of events and waits. */
    oracle_clock after;
} oracle_line;

/* An event, with the clock of the work that it stands for. */
typedef struct oracle_event {
    struct oracle_event *next;
    uint64_t handle;
    oracle_clock clock;
} oracle_event;

/* Work number `seq` of `line` touches these bytes. */
typedef struct oracle_use {
    uint64_t begin, end;
    uint32_t line;
    uint64_t seq;
} oracle_use;

/* A range of memory that the runtime has given, and takes back only as a whole. */
typedef struct oracle_range {
    uint64_t begin, nbytes;
} oracle_range;

typedef struct order_oracle {
    cm_mutex lock;
    cm_runtime *rt; /* borrowed; the emulated runtime */
    /* The table of the runtime before the hooks replaced it. */
    const cm_ops_table *real;
    /* The test has a single thread, so a gate stays shut until this thread opens it. */
    bool is_alone;
    uint32_t line_count;
    /* First come the legacy streams of the devices, then their per-thread streams. */
    oracle_line lines[ORACLE_LINES];
    oracle_event *events[ORACLE_BUCKETS];
    oracle_clock seen; /* the work whose end the host has seen */
    oracle_use *uses;
    uint32_t use_count, use_capacity;
    oracle_range *ranges;
    uint32_t range_count, range_capacity;
    /* The bytes that the runtime has given and not got back, in ranges and in mapped
     * memory. */
    uint64_t held_nbytes;
    /* How many ranges were free only for the stream that asked, because its order says
     * so. */
    uint64_t ordered_count;
    char wrong[200]; /* the first mistake that was found, or "" */
} order_oracle;

/* Open an oracle. `rt` is the emulated runtime itself, whose table is replaced until
 * oracle_close(). */
void oracle_open(order_oracle *oracle, cm_runtime *rt, bool is_alone);
void oracle_close(order_oracle *oracle);

/* Shut or open the gate of a line's stream. The hooks open all gates before the host
 * waits for anything, so that it cannot wait for ever. */
void oracle_gate(order_oracle *oracle, uint32_t line, bool shut);
/* Open all gates. */
void oracle_open_gates(order_oracle *oracle);
/* Return the line of a stream that exists. Default streams are found by their
 * device. */
uint32_t oracle_find(order_oracle *oracle, uint64_t handle, int device);
/* Note that a stream is about to get work that touches [begin, begin + nbytes). */
void oracle_use_range(order_oracle *oracle, uint32_t line, uint64_t begin,
                      uint64_t nbytes);
/* Check that new work of `line`, or of the host for ORACLE_LINES, may touch the range.
 * If it may not, `wrong` is set. Returns true if it may only because it comes after
 * work that has perhaps not ended. */
bool oracle_ask(order_oracle *oracle, uint32_t line, uint64_t begin, uint64_t nbytes);
/* Open the gates and wait for everything that the devices do. */
void oracle_drain(order_oracle *oracle);
