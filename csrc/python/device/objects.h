/* SPDX-License-Identifier: Apache-2.0 */
/* Stream, Event and Transfer as C objects, Devices, and streams as arguments. Every
 * object carries its module state (types are final). GIL held throughout; what can wait
 * releases it. */
#pragma once

#include "python/core/state.h"

typedef struct cm_stream_object {
    PyObject_HEAD
    cm_state *state;
    cm_stream *stream; /* held; NULL after close() or shutdown() */
    cm_list node;      /* in state->streams while open */
    uint64_t id;       /* of `stream`, kept for equality and hash after close() */
    int device;
    uint64_t generation;
    PyObject *weakrefs;
} cm_stream_object;

typedef struct cm_event_object {
    PyObject_HEAD
    cm_state *state;
    cm_runtime *rt;  /* borrowed; NULL after close() or shutdown() */
    cm_list node;    /* in state->events while open */
    uint64_t handle; /* owned */
    int device;
    bool timing;
    bool blocking; /* synchronize() sleeps rather than spinning */
    bool recorded;
    bool closing; /* close() was called; the last call under way destroys the handle */
    int users;    /* calls under way with the GIL released */
    PyObject *weakrefs;
} cm_event_object;

/* -- streams ------------------------------------------------------------------------------ */

/* A new Stream around a record (held). */
PyObject *cm_stream_object_new(cm_state *state, cm_stream *stream);
/* Its record, on loan: another thread may close the Stream while the GIL is released.
 * NULL with ValueError, or RuntimeError in a forked child. */
cm_stream *cm_stream_object_take(PyObject *op);
/* Let go of the record; nothing is done where it is closed. */
void cm_stream_object_close(cm_stream_object *self);
/* Close every open Stream, for shutdown: their records, to be released, move to `out`,
 * which has room. Returns how many. */
size_t cm_streams_collect(cm_state *state, cm_stream **out);
/* The Stream that is current for `device` in this context; new reference. */
PyObject *cm_current_stream(cm_state *state, int device);

/* Any stream argument to a record on loan: None (the current stream of `device`), a
 * Stream, __cuda_stream__, .cuda_stream (torch), .ptr (CuPy), .handle (Numba) or an
 * int. `device` -1 means cumem's current one. NULL with an exception. */
cm_stream *cm_stream_from_object(cm_state *state, PyObject *object, int device);
/* The same where the argument is not called `stream`. */
cm_stream *cm_stream_from_argument(cm_state *state, PyObject *object,
                                   const char *argument, int device);
/* The same for memory of `device`: ValueError for a stream of another one. */
cm_stream *cm_stream_for_device(cm_state *state, PyObject *object, int device);
/* The handle of a stream of another library, of which it is an object or the handle as
 * an int. *keep: the stream lasts as long as the object, which an int does not say of
 * any. 0, or -1 with TypeError or ValueError, which call it `argument`, or with what
 * the object's own code raised. May run Python code. */
int cm_stream_read_handle(const cm_state *state, PyObject *object, const char *argument,
                          uint64_t *handle, bool *keep);
/* The record that None means, borrowed until Python code runs or the GIL is released;
 * NULL, without an exception, where that takes cm_stream_for_device() to find out. */
static inline cm_stream *
cm_stream_lent(const cm_state *state, int device)
{
    return cm_override_is_empty(&state->current_stream) ? state->default_streams[device]
                                                        : NULL;
}

/* A loan holds the record and, as cm_state_enter() does, keeps shutdown() away. GIL
 * held; the give may release it. */
cm_stream *cm_stream_take(cm_state *state, cm_stream *stream);
void cm_stream_give(cm_state *state, cm_stream *stream); /* NULL: does nothing */

/* -- events ------------------------------------------------------------------------------- */

/* What an Event had. */
typedef struct cm_detached_event {
    cm_runtime *rt; /* borrowed */
    uint64_t handle;
    int device;
} cm_detached_event;

/* A new Event on `device` (trusted). NULL with CudaError. */
PyObject *cm_event_object_new(cm_state *state, int device, bool timing, bool blocking);
/* Move the event to the end of `stream` (borrowed). 0; -1: ValueError, CudaError. */
int cm_event_record(cm_event_object *event, const cm_stream *stream);
/* Let `stream` wait for it. 0, or -1 with ValueError, CudaError. */
int cm_event_order(cm_event_object *event, cm_stream *stream);
/* Close every open Event, for shutdown: what they had moves to `out`, which has room.
 * Returns how many. */
size_t cm_events_collect(cm_state *state, cm_detached_event *out);
/* Any thread. In a forked child it leaks. Fails: event_destroy, cm_device_enter. */
CM_NODISCARD cm_status cm_detached_event_free(const cm_detached_event *detached);

/* -- devices ------------------------------------------------------------------------------ */

/* Make the base of Device, which has its `with` blocks. */
int cm_register_device_base(PyObject *module, cm_state *state);
/* The Device of an index (trusted); new reference, NULL with an exception. */
PyObject *cm_device_object_new(cm_state *state, int index);
/* What is current, and what cumem/devices/device.py asks for; ends with an empty row.
 */
extern PyMethodDef cm_device_methods[];
/* What the driver is asked; ends with an empty row. */
extern PyMethodDef cm_driver_methods[];

/* -- transfers ---------------------------------------------------------------------------- */

typedef struct cm_transfer_object {
    PyObject_HEAD
    cm_state *state;
    cm_ticket *ticket; /* held */
    PyObject *dst;     /* owned: both ends stay alive as long as the handle */
    PyObject *src;
    PyObject *module; /* owned: its end tells of a failure, for which it needs the state
                       */
    PyObject *weakrefs;
    PyObject *watched; /* owned: what may have moved during the copy; NULL: nothing */
    int (*check)(cm_state *state, PyObject *watched); /* 0, or -1 with BufferError */
    int device; /* whose default stream order(None) and order(1) mean; -1: no one's */
} cm_transfer_object;

/* A new Transfer. Takes over `ticket`, also on failure; holds dst and src. */
PyObject *cm_transfer_object_new(cm_state *state, cm_ticket *ticket, PyObject *dst,
                                 PyObject *src, int device);
/* Let the first who sees that it is done `check` what is `watched`, a list. */
void cm_transfer_watch(PyObject *transfer, PyObject *watched,
                       int (*check)(cm_state *state, PyObject *watched));
/* Let `stream` wait for it. Blocks as cm_ticket_order does; Ctrl-C ends the waiting. 0,
 * or -1 with an exception. */
int cm_transfer_order(const cm_transfer_object *transfer, cm_stream *stream);

/* -- types -------------------------------------------------------------------------------- */

int cm_register_stream_type(PyObject *module, cm_state *state);
/* _wrap_stream(object, device, lasts); METH_VARARGS. */
PyObject *cm_wrap_stream(PyObject *module, PyObject *args);
int cm_register_event_type(PyObject *module, cm_state *state);
int cm_register_transfer_type(PyObject *module, cm_state *state);
