/* SPDX-License-Identifier: Apache-2.0 */
/* One call for many copies, as the files that make it see it. Locks: none; it belongs to
 * the thread that calls. */
#ifndef CM_TRANSFER_BATCH_CALL_H
#define CM_TRANSFER_BATCH_CALL_H

#include "transfer/batch/batch.h"
#include "transfer/routes/pieces.h"
#include "transfer/run/run.h"

enum { CM_MANY_GROUP_MAX = 200 };

/* What the caller wants dropped once, when the last part and the whole are done. */
typedef struct cm_shared_keep {
    atomic_uint refs;
    uint32_t count;
    cm_keep keep[4];
} cm_shared_keep;

/* One call. Group g has the shape shapes[g]; groups[i] is that of piece i. */
typedef struct cm_many_call {
    cm_engine *engine;
    const cm_many_request *request;
    cm_tuning tuning; /* not resolved */
    uint8_t *groups;  /* owned */
    uint32_t group_count;
    uint64_t alone_count; /* pieces whose way is ALONE */
    bool in_order;        /* one after the other: they touch each other */
    cm_ticket **parts;    /* owned array, held */
    uint64_t part_count;
    cm_ticket *last;        /* borrowed: the part that the next comes after, in order */
    cm_ticket **after;      /* owned array: those of `request` and room for one more */
    uint64_t nbytes;        /* of all parts */
    uint64_t asked_ns;      /* when whether to go on */
    cm_shared_keep *shared; /* counted */
    cm_copy_request common; /* of each part; `keep` is the shared one */
    cm_many shapes[CM_MANY_GROUP_MAX];
} cm_many_call;

/* group.c: start the job of a group; takes over `many`, and the keeps of
 * `request`. */
CM_NODISCARD cm_status cm_many_start_group(cm_many_call *call,
                                           const cm_copy_request *request,
                                           cm_many *many, cm_ticket **out);
void cm_many_set_ends(cm_copy_request *request, const cm_piece *piece);

/* parts.c: start all groups and what goes alone, as parts of one ticket, which is
 * also given where the call failed while some are under way. Takes over the keeps of
 * the request. */
CM_NODISCARD cm_status cm_many_start_several(cm_many_call *call, cm_ticket **out);
/* What that has left in `call`. */
void cm_many_end_several(cm_many_call *call);

#endif
