/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a Buffer of a described piece of foreign memory, after all checks that do not
 * depend on the protocol. All importers use it, and it knows none of their protocols.
 *
 * An importer fills in a cm_import from the exporter's description, and then calls:
 *
 *     cm_import_measure()   do shape, strides and address make sense?
 *     cm_import_probe()     what does the driver say about the memory?
 *     cm_import_place()     where is it, for the host and for a device?
 *     cm_import_finish()    a Buffer over it, which keeps the exporter's memory alive
 *     cm_import_order()     our stream comes after what the exporter's stream was given
 *
 * The GIL is held. */
#pragma once

#include "python/buffer/buffer_object.h"

/* Foreign memory as its exporter describes it. Importers fill in everything but
 * `first`, `nbytes` and `low`, which cm_import_measure() writes. */
typedef struct cm_import {
    cm_region region; /* ndim, itemsize, shape, strides */
    /* The claimed address of element 0, or anything if the memory is empty. */
    uint64_t data;
    bool host;       /* the exporter claims that this is an address of the host */
    PyObject *dtype; /* borrowed */
    bool readonly;
    cm_kind kind;      /* says what consumers may do with it */
    uint64_t first;    /* address of the lowest byte; 0 if empty */
    uint64_t nbytes;   /* from the lowest byte to the highest; 0 if empty */
    int64_t low;       /* the place of the lowest byte relative to element 0; <= 0 */
    PyObject *foreign; /* borrowed: keeps the bytes alive; may be NULL */
    /* Called once, when the last buffer is gone; may be NULL. */
    void (*drop)(void *argument);
    void *argument;
    PyObject *locked; /* owned, or NULL: keeps page-locked memory locked */
} cm_import;

/* Check shape, strides and address for overflow and NULL. `what` names the source in
 * errors, for example "__cuda_array_interface__". Returns 0, or -1 with ValueError. */
int cm_import_measure(cm_import *import, const char *what);

/* Ask the driver about the first and the last byte (nbytes > 0).
 *
 * Memory for which only the driver can vouch (`host` is false) must be one allocation:
 * the two answers must agree, and on the emulated device all bytes are looked at.
 * If the exporter claims memory of the host (`host` is true), an answer that it is a
 * device's is an error. Such memory counts as PAGEABLE if the two answers differ, for
 * example if half of it is page-locked. Pages that we have locked stay locked as long
 * as `locked` lives.
 *
 * Returns 0, or -1 with ValueError or CudaError. */
int cm_import_probe(cm_state *state, cm_import *import, const char *what,
                    cm_pointer_info *info);

/* Set region.kind, .host, .address and .device to what the driver said. `info` is NULL
 * for ordinary memory and for no memory, and `device` is used then. */
void cm_import_place(cm_import *import, const cm_pointer_info *info, int device);

/* Make an object that gives `shares` of locked pages back when it is dropped. It takes
 * the shares over, even if it fails. Returns NULL with an exception if it fails. */
PyObject *cm_locked_pages_new(cm_state *state, cm_registry *registry,
                              cm_page_shares *shares);

/* Make `stream` wait for everything that the exporter gave its stream `handle` of
 * `device`. Returns 0, or -1 with CudaError. */
int cm_import_follow(cm_state *state, cm_stream *stream, int device, uint64_t handle);
/* Do the same as cm_import_follow() with the stream `given` or, if that is NULL, with
 * the current stream of the buffer's device, and let the buffer remember the stream
 * that now waits. Returns 0, or -1 with CudaError. */
int cm_import_order(cm_state *state, PyObject *buffer, cm_stream *given, int device,
                    uint64_t handle);

/* Make the buffer. It takes over `drop` only if it succeeds, and never takes `locked`.
 * Returns NULL with an exception if it fails. */
PyObject *cm_import_finish(cm_state *state, const cm_import *import);

/* Find out what memory `region` of an ndarray lies in, as cm_numpy_region() has read
 * it. The driver is asked only if there are more than `unasked` bytes. After success
 * the caller owns `locked`. Returns 0, or -1 with an exception. */
int cm_import_ask_about(cm_state *state, PyObject *array, const cm_region *region,
                        uint64_t unasked, cm_import *out);
/* Make a buffer over the memory of an ndarray, which the buffer keeps. */
PyObject *cm_import_array(cm_state *state, PyObject *array);
