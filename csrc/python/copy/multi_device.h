/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between one end and several: broadcast, scatter and gather. What is asked for
 * is checked and collected with the GIL held (multi_device_call.c), then run
 * (multi_device_run.c). */
#ifndef CM_PYTHON_COPY_MULTI_DEVICE_H
#define CM_PYTHON_COPY_MULTI_DEVICE_H

#include "python/buffer/buffer_object.h"
#include "python/core/progress.h"
#include "python/protocols/protocols.h"
#include "transfer/routes/spread.h"

typedef enum cm_several_kind {
    CM_SEVERAL_BROADCAST,
    CM_SEVERAL_SCATTER,
    CM_SEVERAL_GATHER,
} cm_several_kind;

/* Shared by the copies of one call; counted, for they may outlive it. */
typedef struct cm_several_shared {
    atomic_uint refs;
    atomic_bool cancelled;
} cm_several_shared;

/* Part i is from srcs[i] to dsts[i]; parts with the same lead[i] are one copy of the
 * engine, whose ticket is tickets[lead[i]]. */
typedef struct cm_several {
    cm_state *state;
    cm_several_kind kind;
    const char *name; /* of the function, for errors */
    bool blocking;
    uint32_t count;
    PyObject *one_object; /* borrowed */
    PyObject *objects;    /* owned: tuple of the others */
    cm_operand one;
    cm_operand *many; /* this and all arrays below: owned, [count] */
    cm_region *dsts;
    cm_region *srcs;
    uint32_t *lead;
    cm_ticket **tickets;  /* held */
    cm_stream *stream;    /* on loan; NULL: none was given */
    cm_stream **currents; /* on loan: current streams that come first, [count + 1] */
    uint32_t current_count;
    cm_several_shared *shared;
    const cm_progress *progress; /* borrowed; NULL: nobody is told */
} cm_several;

/* Takes `one` and the iterable `objects` in. 0, or -1 with an exception; call fini in
 * either case. */
int cm_several_init(cm_several *several, PyObject *objects, int64_t axis);
void cm_several_fini(cm_several *several);
/* A list of Transfers, or None when blocking; NULL with an exception. */
PyObject *cm_several_run(cm_several *several);

/* For the module's method table. */
extern PyMethodDef cm_several_methods[];

#endif
