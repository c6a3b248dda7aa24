/* SPDX-License-Identifier: Apache-2.0 */
/* A route is a way that the bytes of a copy can go.
 *
 * Each route is a row of a table. The row has the text that users see, the functions
 * that do what differs from route to route, and facts that all other code asks for:
 * whether a thread of the host works, whether the bytes go through page-locked slots,
 * and so on. A plan points at its row (`plan.row`). Code that has a plan reads the
 * facts from the row, and never asks which row it is. So whoever adds a route adds a
 * row and a file, and changes nothing else:
 *
 *     if (job->plan.row->uses_ring) ...       and not: if it is STAGED or PEER_STAGED
 *
 * The functions of a row, in the order in which they are called:
 *
 *   suits   is called when the copy is planned, and says whether the route suits it.
 *           Each row names the kinds of ends that it is for (`ends`). The rows for the
 *           ends of this copy are asked from the first to the last, and the first row
 *           that suits is taken. The last of these rows suits every plan.
 *   reserve is called when the job's turn has come, before it moves anything. It takes
 *           the memory that the route cannot do without. If there is no such memory,
 *           `reserve` may plan the copy anew. From then on the route of the job stays
 *           as it is.
 *   move    queues the copy, or makes it.
 *   drain   is called once all is queued, and does the rest of the host's work.
 *
 * CM_ROUTES has all ways to move, or fill, one region, and nothing else.
 * CM_ROUTES_OF_MANY has the ways to move many runs (batch/) and to read or write files
 * (file/). The code that makes a job of this sort sets its row directly. Nobody
 * searches for such a row, so it has no `suits`.
 *
 * Some things that look like routes have no row. A short copy (routes/short_copy.c) is
 * made by its caller before there is a plan, since planning takes longer than the copy.
 * If a copy needs only one call, which queues it on the caller's stream
 * (routes/queued_copy.c), there is nothing to be planned. Users see these two as
 * "host", "direct" or "peer". A broadcast (routes/broadcast.c) is not a route of its
 * own, but a copy that has several targets. It goes by one of the rows that pack, and
 * sends each slot to each device. */
#pragma once

#include <stdatomic.h>
#include <stddef.h>

#include "base/status.h"

/* X(name, text for users, suits, move, other members of cm_route_row) */
/* clang-format off */
#define CM_ROUTES(X)                                                                     \
    /* between two ends that the host reaches */                                         \
    X(HOST, "host", cm_host_suits, cm_job_run_on_host,                                   \
      .ends = CM_ENDS_HOST, .uses_host = true)                                           \
    /* a call of the runtime writes one element to all places of a region */             \
    X(FILL, "fill", cm_fill_suits, cm_job_fill,                                          \
      .ends = CM_ENDS_FILL, .fits_graph = true)                                          \
    X(DIRECT, "direct", cm_direct_suits, cm_job_copy_direct,                             \
      .ends = CM_ENDS_DEVICE, .fits_graph = true)                                        \
    X(DIRECT_2D, "direct-2d", cm_2d_suits, cm_job_copy_2d,                               \
      .ends = CM_ENDS_DEVICE, .fits_graph = true)                                        \
    X(KERNEL, "kernel", cm_kernel_suits, cm_job_copy_by_kernel,                          \
      .ends = CM_ENDS_DEVICE | CM_ENDS_DEVICES, .fits_graph = true)                      \
    /* between devices that do not reach each other; in a graph it copies as PEER        \
     * does */                                                                           \
    X(PEER_STAGED, "peer-staged", cm_peer_staged_suits, cm_job_copy_peer,                \
      .ends = CM_ENDS_DEVICES, .reserve = cm_peer_staged_reserve,                        \
      .uses_ring = true, .crosses = true, .fits_graph = true)                            \
    X(PEER, "peer", cm_peer_suits, cm_job_copy_peer,                                     \
      .ends = CM_ENDS_DEVICES, .crosses = true, .fits_graph = true)                      \
    /* In the first of these two rows the host puts the elements in order, and in the    \
     * second a kernel of the device does. The `suits` of the first row sets a member    \
     * of the plan that the `suits` of the second row reads. So no row may come between  \
     * the two. */                                                                       \
    X(STAGED, "staged", cm_staged_suits, cm_job_copy_staged, .ends = CM_ENDS_DEVICE,     \
      .reserve = cm_staged_reserve, .drain = cm_staged_drain,                            \
      .uses_host = true, .uses_ring = true, .packs = true)                               \
    X(STAGED_KERNEL, "staged-kernel", cm_staged_kernel_suits, cm_job_copy_staged,        \
      .ends = CM_ENDS_DEVICE,                                                            \
      .reserve = cm_staged_reserve, .drain = cm_staged_drain,                            \
      .uses_host = true, .uses_ring = true, .packs = true)

/* X(name, text for users, move, other members of cm_route_row) */
#define CM_ROUTES_OF_MANY(X)                                                             \
    /* many runs at once: one kernel moves them, or the host gathers them in slots or    \
     * spreads them out */                                                               \
    X(TABLE, "table", cm_many_copy_by_table, .fits_graph = true)                         \
    X(STAGED_TABLE, "staged-table", cm_job_copy_staged, .drain = cm_staged_drain,        \
      .uses_host = true, .uses_ring = true, .joins_runs = true)                          \
    /* rows of an array, whose numbers a kernel reads */                                 \
    X(ROWS, "rows", cm_job_copy_rows, .fits_graph = true)                                \
    /* between memory and a file */                                                      \
    X(FILE, "file", cm_job_copy_file, .uses_host = true, .uses_ring = true)
/* clang-format on */

/* What lies at the two ends of a plan. Rows that are for other ends are not asked
 * whether they suit. */
typedef enum cm_route_ends {
    CM_ENDS_HOST = 1,    /* the host reaches both ends, and no device takes part in the
                            copy */
    CM_ENDS_DEVICE = 2,  /* one device does the work, on its own or with the host */
    CM_ENDS_DEVICES = 4, /* each end lies on a device of its own */
    CM_ENDS_FILL = 8, /* the source is a single element, and a device does the work */
} cm_route_ends;

typedef enum cm_route {
    CM_ROUTE_NOTHING, /* the text of a plan without a row: no bytes have to move */
#define CM_ROUTE_NAME(name, ...) CM_ROUTE_##name,
    CM_ROUTES(CM_ROUTE_NAME) CM_ROUTES_OF_MANY(CM_ROUTE_NAME)
#undef CM_ROUTE_NAME
        CM_ROUTE_SEVERAL, /* the text of a batch whose parts have routes of their own */
    CM_ROUTE_COUNT
} cm_route;

struct cm_job;
struct cm_plan;
struct cm_plan_ends;

typedef struct cm_route_row {
    const char *text; /* for users; comes first, because tests read it at that place */
    unsigned index;   /* the index of the row in cm_routes, where index 0 stands for a
                         plan without a row */
    unsigned ends;    /* the ends that the route is for: one or several bits of
                         cm_route_ends */
    /* Says whether this route suits the plan, which already has its devices and its
     * layout. It may set members of the plan that the route needs, or that the `suits`
     * of a later row reads. It changes nothing else, and calls no runtime. */
    bool (*suits)(struct cm_plan *plan, const struct cm_plan_ends *ends);
    cm_status (*move)(struct cm_job *job);
    cm_status (*reserve)(struct cm_job *job); /* NULL if there is nothing to do */
    cm_status (*drain)(struct cm_job *job);   /* NULL if there is nothing to do */
    bool uses_host;  /* a thread of the host works until the end */
    bool uses_ring;  /* the bytes go through page-locked slots */
    bool packs;      /* the host packs one region into the slots, or unpacks it from
                        them */
    bool joins_runs; /* many runs share a slot */
    bool crosses;    /* the copy is between two devices */
    /* A stream that is being captured can take the copy. If the route crosses, the
     * stream can take it only if it is a single run. */
    bool fits_graph;
} cm_route_row;

/* Indexed by cm_route. */
extern const cm_route_row cm_routes[CM_ROUTE_COUNT];

/* Choose the row of CM_ROUTES for a plan of one region. */
const cm_route_row *cm_route_choose(struct cm_plan *plan,
                                    const struct cm_plan_ends *ends);

static inline const char *
cm_route_text(const cm_route_row *row)
{
    return row == NULL ? "nothing" : row->text;
}

/* How many copies went by each route, plans without a row included. */
typedef struct cm_route_counts {
    _Atomic uint64_t of[CM_ROUTE_COUNT];
} cm_route_counts;
