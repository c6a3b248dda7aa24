/* SPDX-License-Identifier: Apache-2.0 */
/* Who may touch which bytes, told from the runtime calls alone: hooks under an emulated
 * runtime follow what each stream's work stands behind (events, waits, the legacy
 * stream, devices) and what the host has seen end. Uses of memory are named to it; a
 * range is then asked about when it is handed out or goes back to the runtime. Knows
 * nothing of pools, and so shares none of their mistakes. One at a time in a process.
 * Locks: one, never held across a runtime call. */
#pragma once

#include "base/thread.h"
#include "runtime/runtime.h"

enum { ORACLE_LINES = 64, ORACLE_DEVICES = 2, ORACLE_BUCKETS = 512 };

/* By line: so much of its work has ended before. */
typedef struct oracle_clock {
    uint64_t of[ORACLE_LINES];
} oracle_clock;

/* A stream, also after it was destroyed. */
typedef struct oracle_line {
    uint64_t handle;
    int device;
    bool is_open;
    bool is_blocking; /* ordered with the legacy stream */
    bool is_shut;
    uint64_t shut_seq; /* work after this one waits for the gate */
    uint64_t seq;      /* of its work; goes on when the place is used again */
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

/* A range that the runtime must be given back whole. */
typedef struct oracle_range {
    uint64_t begin, nbytes;
} oracle_range;

typedef struct order_oracle {
    cm_mutex lock;
    cm_runtime *rt; /* borrowed: the emulated one */
    const cm_ops_table *real;
    bool is_alone; /* one thread: what is shut stays so until it is opened here */
    uint32_t line_count;
    oracle_line lines[ORACLE_LINES]; /* [device]: legacy, [2 + device]: per thread */
    oracle_event *events[ORACLE_BUCKETS];
    oracle_clock seen; /* by the host */
    oracle_use *uses;
    uint32_t use_count, use_capacity;
    oracle_range *ranges;
    uint32_t range_count, range_capacity;
    uint64_t held_nbytes;   /* from the runtime: in ranges, and mapped */
    uint64_t ordered_count; /* ranges asked for that order alone made free */
    char wrong[200];        /* the first thing that was; "" */
} order_oracle;

/* `rt` is the emulated runtime itself; its table is replaced. */
void oracle_open(order_oracle *oracle, cm_runtime *rt, bool is_alone);
void oracle_close(order_oracle *oracle);

/* Shut or open the gate of a line's stream. Opened before the host waits. */
void oracle_gate(order_oracle *oracle, uint32_t line, bool shut);
void oracle_open_gates(order_oracle *oracle);
/* The line of a stream that is there; default streams' by the device. */
uint32_t oracle_find(order_oracle *oracle, uint64_t handle, int device);
/* Work is about to be queued that touches [begin, begin + nbytes). */
void oracle_use_range(order_oracle *oracle, uint32_t line, uint64_t begin,
                      uint64_t nbytes);
/* New work of `line` (of the host: ORACLE_LINES) may touch the range, or `wrong` is
 * set. True: only because it comes after work that may still run. */
bool oracle_ask(order_oracle *oracle, uint32_t line, uint64_t begin, uint64_t nbytes);
/* Wait for all that the devices do; the gates are opened first. */
void oracle_drain(order_oracle *oracle);
