/* SPDX-License-Identifier: Apache-2.0 */
/* What the importers share: from a described piece of foreign memory to a Buffer, after
 * every check that does not depend on the protocol. Knows no protocol. GIL held. */
#pragma once

#include "python/buffer/buffer_object.h"

/* Foreign memory as its exporter describes it. Importers fill in everything but
 * `first`, `nbytes` and `low`, which cm_import_measure() writes. */
typedef struct cm_import {
    cm_region region; /* ndim, itemsize, shape, strides */
    uint64_t data;    /* address of element 0, as claimed; anything when empty */
    bool host;        /* claimed to be the host's address, not a device's */
    PyObject *dtype;  /* borrowed */
    bool readonly;
    cm_kind kind;      /* what consumers may do with it */
    uint64_t first;    /* lowest byte; 0 when empty */
    uint64_t nbytes;   /* bytes from the lowest to the highest; 0 when empty */
    int64_t low;       /* of the lowest byte, relative to element 0; <= 0 */
    PyObject *foreign; /* borrowed: keeps the bytes alive; may be NULL */
    void (*drop)(void *argument); /* once, when the last buffer is gone; or NULL */
    void *argument;
    PyObject *locked; /* owned, or NULL: what keeps page-locked memory so */
} cm_import;

/* Check shape, strides and address for overflow and NULL. `what` names the source in
 * errors, e.g. "__cuda_array_interface__". 0, or -1 with ValueError. */
int cm_import_measure(cm_import *import, const char *what);

/* Ask the driver about the first and the last byte (nbytes > 0). Memory that only a
 * driver can vouch for must be one allocation (`host` false): both must agree, and the
 * emulated device looks at every byte. The host's memory (`host` true) may not be a
 * device's; it is PAGEABLE where the two ends differ, e.g. when half of it is
 * page-locked. What we have locked stays so with `locked`.
 * 0, or -1 with ValueError or CudaError. */
int cm_import_probe(cm_state *state, cm_import *import, const char *what,
                    cm_pointer_info *info);

/* Set region.kind, .host, .address and .device from what the driver said (NULL:
 * ordinary or no memory; `device` is used then). */
void cm_import_place(cm_import *import, const cm_pointer_info *info, int device);

/* An object that gives these shares back at its end; takes them. NULL: it raised. */
PyObject *cm_locked_pages_new(cm_state *state, cm_registry *registry,
                              cm_page_shares *shares);

/* Let `given`, or the current stream of the buffer's device (NULL), and with it the
 * buffer come after what the exporter gave its stream `handle` of `device`. 0, or -1
 * with CudaError. */
int cm_import_order(cm_state *state, PyObject *buffer, cm_stream *given, int device,
                    uint64_t handle);

/* The buffer. Takes over `drop` on success only, `locked` never. NULL: it raised. */
PyObject *cm_import_finish(cm_state *state, const cm_import *import);

/* An ndarray's memory; the driver is not asked about up to `unasked` bytes. `dtype` and
 * `locked` are owned by the caller on success. 0 or -1. */
int cm_import_read_array(cm_state *state, PyObject *array, uint64_t unasked,
                         cm_import *out);
/* An ndarray (which is kept) to a buffer over its memory. */
PyObject *cm_import_array(cm_state *state, PyObject *array);
