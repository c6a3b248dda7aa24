/* SPDX-License-Identifier: Apache-2.0 */
/* This header has Stream, Event, Transfer and Device as C objects, and reads arguments
 * that are streams. Each object carries its module state (the types are final). The GIL
 * is held throughout; whatever can wait releases it. */
#pragma once

#include "python/core/state.h"

typedef struct cm_stream_object {
    PyObject_HEAD
    cm_state *state;
    cm_stream *stream; /* held; NULL after close() or shutdown() */
    cm_list node;      /* in state->streams while open */
    /* The id of `stream`, kept for equality and hash after close(). */
    uint64_t id;
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
    bool timing;   /* the event records the time */
    bool blocking; /* synchronize() sleeps rather than spinning */
    bool recorded; /* the event was recorded at least once */
    /* close() was called; the last call that is under way destroys the handle. */
    bool closing;
    int users; /* calls that are under way with the GIL released */
    PyObject *weakrefs;
} cm_event_object;

/* -- streams ------------------------------------------------------------------------------ */

/* Make a Stream around a record, which it holds. Returns NULL with an exception if it
 * fails. */
PyObject *cm_stream_object_new(cm_state *state, cm_stream *stream);
/* Take the record of a Stream on loan, since another thread may close the Stream while
 * the GIL is released. Returns NULL with ValueError if the Stream is closed, or with
 * RuntimeError in a forked child. */
cm_stream *cm_stream_object_take(PyObject *op);
/* Close a Stream: release its record. This does nothing if the Stream is closed. */
void cm_stream_object_close(cm_stream_object *self);
/* Close every open Stream, for shutdown. Their records move to `out`, which has room
 * for all of them, and the caller has to release them. Returns how many there are. */
size_t cm_streams_collect(cm_state *state, cm_stream **out);
/* Return the Stream that is current for `device` in this context. Returns a new
 * reference, or NULL with an exception. */
PyObject *cm_current_stream(cm_state *state, int device);

/* Read any stream argument: None (the current stream of `device`), a Stream, or a
 * stream of another library with __cuda_stream__, .cuda_stream (PyTorch), .ptr (CuPy)
 * or .handle (Numba), or an int. `device` -1 means cumem's current one. Returns the
 * record, on loan, or NULL with an exception. May run Python code. */
cm_stream *cm_stream_from_object(cm_state *state, PyObject *object, int device);
/* Do the same as cm_stream_from_object() for an argument that is not called
 * `stream`. */
cm_stream *cm_stream_from_argument(cm_state *state, PyObject *object,
                                   const char *argument, int device);
/* Do the same as cm_stream_from_object() for memory of `device`. A stream of another
 * device is a ValueError. */
cm_stream *cm_stream_for_device(cm_state *state, PyObject *object, int device);
/* Read the handle of a stream of another library, from an object or from the handle
 * itself as an int. *keep says whether the stream lives as long as the object, which is
 * unknown for an int. Returns 0, or -1 with an exception: a TypeError or ValueError
 * that calls the stream `argument`, or what the object's own code raised. May run
 * Python code. */
int cm_stream_read_handle(const cm_state *state, PyObject *object, const char *argument,
                          uint64_t *handle, bool *keep);
/* Return the record of the stream that `stream=None` means. It is borrowed until Python
 * code runs or the GIL is released, or until cm_state_leave(), since only shutdown()
 * gives these records up. Returns NULL without an exception if only
 * cm_stream_for_device() can find out which record that is. */
static inline cm_stream *
cm_stream_lent(const cm_state *state, int device)
{
    bool is_default =
        !cm_state_has_blocks(state) || cm_override_is_empty(&state->current_stream);
    return is_default ? state->default_streams[device] : NULL;
}

/* Return the stream on which the work of other streams of `device` is brought together
 * for a consumer, who can be given the handle of only one stream. The stream is ours,
 * so its handle is neither that of a default stream nor one that another library may
 * destroy. It is held for the caller. Returns NULL with an exception if it fails. Needs
 * the GIL, and may give it up in between. */
cm_stream *cm_joining_stream(cm_state *state, int device);

/* A loan holds the record and, as cm_state_enter() does, keeps shutdown() away. The GIL
 * is held; giving back may release it. */
cm_stream *cm_stream_take(cm_state *state, cm_stream *stream);
void cm_stream_give(cm_state *state, cm_stream *stream); /* does nothing for NULL */

/* Call `act` with the handle of an emulated stream whose device is current, without the
 * GIL. `object` is any stream argument. Returns None, or NULL with an exception, which
 * is a RuntimeError if no emulated device is open. */
PyObject *cm_emulated_stream_act(cm_state *state, PyObject *object,
                                 cm_status (*act)(cm_runtime *rt, uint64_t handle));
/* The Python functions _hold_stream() and _release_stream(). The table ends with an
 * empty row. */
extern PyMethodDef cm_emulated_stream_methods[];

/* -- events ------------------------------------------------------------------------------- */

/* What a closed Event leaves behind: a handle that is still to be destroyed. */
typedef struct cm_detached_event {
    cm_runtime *rt; /* borrowed */
    uint64_t handle;
    int device;
} cm_detached_event;

/* Make an Event on `device`, which is not checked. Returns NULL with an exception if it
 * fails. */
PyObject *cm_event_object_new(cm_state *state, int device, bool timing, bool blocking);
/* Record the event at the end of `stream` (borrowed). Returns 0, or -1 with ValueError
 * or CudaError. */
int cm_event_record(cm_event_object *event, const cm_stream *stream);
/* Let `stream` wait for the event. Returns 0, or -1 with ValueError or CudaError. */
int cm_event_order(cm_event_object *event, cm_stream *stream);
/* Close every open Event, for shutdown. Their handles move to `out`, which has room for
 * all of them. Returns how many there were. */
size_t cm_events_collect(cm_state *state, cm_detached_event *out);
/* Destroy the handle, from any thread. In a forked child it leaks.
 * Fails: event_destroy; as cm_device_enter(). */
CM_NODISCARD cm_status cm_detached_event_free(const cm_detached_event *detached);

/* -- devices ------------------------------------------------------------------------------ */

/* Make the base of Device, which has its `with` blocks. Returns 0, or -1 with an
 * exception. */
int cm_register_device_base(PyObject *module, cm_state *state);
/* Return the Device of an index, which is not checked. Returns a new reference, or NULL
 * with an exception. */
PyObject *cm_device_object_new(cm_state *state, int index);
/* Functions about the current device and stream, and those that cumem/devices/device.py
 * calls; the table ends with an empty row. */
extern PyMethodDef cm_device_methods[];
/* Functions that ask the driver. The table ends with an empty row. */
extern PyMethodDef cm_driver_methods[];

/* -- transfers ---------------------------------------------------------------------------- */

typedef struct cm_transfer_object {
    PyObject_HEAD
    cm_state *state;
    cm_ticket *ticket; /* held */
    PyObject *dst;     /* owned: both ends stay alive as long as the handle */
    PyObject *src;
    /* owned: the end of this object may report a failure, for which it needs the
     * state. */
    PyObject *module;
    PyObject *weakrefs;
    /* owned: memory that may have moved during the copy; may be NULL */
    PyObject *watched;
    int (*check)(cm_state *state, PyObject *watched); /* 0, or -1 with BufferError */
    PyObject *file_name; /* owned: the file that the transfer writes; may be NULL */
    /* The device whose default stream order(None) and order(1) mean; -1 if there is
     * none. */
    int device;
} cm_transfer_object;

/* Make a Transfer. It takes over `ticket`, even on failure, and holds dst and src.
 * Returns NULL with an exception if it fails. */
PyObject *cm_transfer_object_new(cm_state *state, cm_ticket *ticket, PyObject *dst,
                                 PyObject *src, int device);
/* Whoever first sees that the copy is done calls `check` with `watched`, a list. */
void cm_transfer_watch(PyObject *transfer, PyObject *watched,
                       int (*check)(cm_state *state, PyObject *watched));
/* Say which file the transfer writes. An error of the system then has this name. */
void cm_transfer_name_file(PyObject *transfer, PyObject *name);
/* Let `stream` wait for the copy. Blocks as cm_ticket_order() does; Ctrl-C ends that
 * wait. Returns 0, or -1 with an exception. */
int cm_transfer_order(const cm_transfer_object *transfer, cm_stream *stream);

/* -- types -------------------------------------------------------------------------------- */

int cm_register_stream_type(PyObject *module, cm_state *state);
/* The Python function _wrap_stream(object, device, lasts); METH_VARARGS. */
PyObject *cm_wrap_stream(PyObject *module, PyObject *args);
int cm_register_event_type(PyObject *module, cm_state *state);
int cm_register_transfer_type(PyObject *module, cm_state *state);
