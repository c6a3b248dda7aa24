/* SPDX-License-Identifier: Apache-2.0 */
/* Says who may touch which bytes, from nothing but the calls of the runtime. Hooks
 * under an emulated runtime follow what the work of each stream comes after (events,
 * waits, the legacy stream, devices), and what the host has seen end. Tests tell it of
 * each use of memory. It is then asked about a range when that is handed out or goes
 * back to the runtime. It knows nothing of pools, and so shares none of their mistakes.
 * There is one at a time in a process. Locks: one, never held across a call of the
 * runtime. */
#pragma once

#include "base/thread.h"
#include "runtime/runtime.h"

enum { ORACLE_LINES = 64, ORACLE_DEVICES = 2, ORACLE_BUCKETS = 512 };

/* For each line, how much of its work has ended before. */
typedef struct oracle_clock {
    uint64_t of[ORACLE_LINES];
} oracle_clock;

/* A line is a stream, even after it was destroyed. */
typedef struct oracle_line {
    uint64_t handle;
    int device;
    bool is_open;
    bool is_blocking; /* it is ordered with the legacy stream */
    bool is_shut;
    uint64_t shut_seq; /* work after this one waits for the gate */
    /* The number of its last work; goes on when another stream gets the place. */
    uint64_t seq;
    oracle_clock after;
} oracle_line;

typedef struct oracle_event {
    struct oracle_event *next;
    uint64_t handle;
    oracle_clock clock;
} oracle_event;

/* Work `seq` of `line` on some bytes. */
typedef struct oracle_use {
    uint64_t begin, end;
    uint32_t line;
    uint64_t seq;
} oracle_use;

/* A range that must go back to the runtime whole. */
typedef struct oracle_range {
    uint64_t begin, nbytes;
} oracle_range;

typedef struct order_oracle {
    cm_mutex lock;
    cm_runtime *rt; /* borrowed: the emulated one */
    const cm_ops_table *real;
    /* There is one thread, so a gate stays shut until it is opened here. */
    bool is_alone;
    uint32_t line_count;
    oracle_line lines[ORACLE_LINES]; /* [device]: legacy, [2 + device]: per thread */
    oracle_event *events[ORACLE_BUCKETS];
    oracle_clock seen; /* seen by the host */
    oracle_use *uses;
    uint32_t use_count, use_capacity;
    oracle_range *ranges;
    uint32_t range_count, range_capacity;
    /* What the runtime has given: ranges, and memory that is mapped. */
    uint64_t held_nbytes;
    /* How many ranges asked for were free only because of their order. */
    uint64_t ordered_count;
    char wrong[200]; /* the first thing that was wrong, or "" */
} order_oracle;

/* `rt` is the emulated runtime itself; its table is replaced. */
void oracle_open(order_oracle *oracle, cm_runtime *rt, bool is_alone);
void oracle_close(order_oracle *oracle);

/* Shut or open the gate of a line's stream. The gate is opened before the host
 * waits. */
void oracle_gate(order_oracle *oracle, uint32_t line, bool shut);
void oracle_open_gates(order_oracle *oracle);
/* The line of a stream that exists. Default streams are found by their device. */
uint32_t oracle_find(order_oracle *oracle, uint64_t handle, int device);
/* Note that work is about to be queued that touches [begin, begin + nbytes). */
void oracle_use_range(order_oracle *oracle, uint32_t line, uint64_t begin,
                      uint64_t nbytes);
/* Ask whether new work of `line` (ORACLE_LINES for the host) may touch the range; if
 * not, `wrong` is set. True if it may only because it comes after work that may still
 * run. */
bool oracle_ask(order_oracle *oracle, uint32_t line, uint64_t begin, uint64_t nbytes);
/* Wait for everything that the devices do, after opening the gates. */
void oracle_drain(order_oracle *oracle);
