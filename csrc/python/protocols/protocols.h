/* SPDX-License-Identifier: Apache-2.0 */
/* The interchange protocols, out and in. Incoming descriptions are untrusted: every
 * size, stride, offset and pointer is checked before use, and a lie that shows in the
 * values is a ValueError, TypeError or BufferError that says which field. GIL held
 * throughout. */
#pragma once

#include "python/buffer/buffer_object.h"

/* -- out: slots, getters and methods that the buffer types put into their tables --------- */

/* Py_bf_getbuffer and Py_bf_releasebuffer of the four host-usable types. */
int cm_buffer_getbuffer(PyObject *self, Py_buffer *view, int flags);
void cm_buffer_releasebuffer(PyObject *self, Py_buffer *view);
/* `__cuda_array_interface__` getter of mapped, managed and device buffers;
 * AttributeError on the emulated device. */
PyObject *cm_buffer_array_interface(PyObject *self, void *closure);
/* True if that getter would answer. It hands nothing over to find out. */
bool cm_buffer_has_array_interface(const cm_buffer *buffer);
/* The dictionary itself, whatever the backend: for tests on the emulated device. */
PyObject *cm_array_interface_dict(PyObject *self);
/* __reduce_ex__ (METH_O), and what unpickling needs of the module (METH_O). */
PyObject *cm_buffer_reduce_ex(PyObject *self, PyObject *protocol);
PyObject *cm_freeze(PyObject *module, PyObject *object);

/* -- in ----------------------------------------------------------------------------------- */

/* asbuffer(): any exporter's memory as a buffer, without a copy. With `stream` (NULL:
 * the current one of its device) the buffer is ready on that. NULL with an exception.
 */
PyObject *cm_asbuffer(cm_state *state, PyObject *object, cm_stream *stream);
/* A DLPack capsule, or an object whose type has DLPack's C functions, to a new Buffer
 * without a copy; NULL with an exception; NotImplemented (new reference) for others.
 * The driver is not asked about up to `unasked` bytes of the host's memory that come by
 * those functions. */
PyObject *cm_import_dlpack(cm_state *state, PyObject *object, cm_stream *stream,
                           uint64_t unasked);

/* The device that another library's object says its memory is on; -1: it is no
 * device's, or the object does not say. Runs its code; raises nothing. */
int cm_exporter_device(const cm_state *state, PyObject *object);

/* For cumem/interchange/importing.py, which knows the other protocols; METH_VARARGS,
 * but for the first, which is METH_O. */
PyObject *cm_take_tensor(PyObject *module, PyObject *args);
PyObject *cm_on_dlpack_device(PyObject *module, PyObject *args);
PyObject *cm_import_entries(PyObject *module, PyObject *args);
PyObject *cm_order_import(PyObject *module, PyObject *args);

/* For cumem/pools/registering.py; METH_VARARGS. */
PyObject *cm_register_memory(PyObject *module, PyObject *args);
PyObject *cm_unregister_memory(PyObject *module, PyObject *args);

/* asbuffer() and the hidden functions above. */
extern PyMethodDef cm_protocol_methods[];

/* -- any copy operand ---------------------------------------------------------------------- */

/* What copy() reads or writes, with all that keeps it alive. */
typedef struct cm_operand {
    cm_region region;
    PyObject *dtype;     /* owned */
    PyObject *keep;      /* owned: object that must live until the copy is done */
    PyObject *locked;    /* owned: keeps page-locked memory so; NULL: it is not ours */
    cm_storage *storage; /* borrowed from `keep` when it is one of our buffers; else
                            NULL */
    bool readonly;
} cm_operand;

/* An array over one of our buffers shares the buffer's streams and unfinished
 * transfers: its storage, which the array keeps, or NULL. */
cm_storage *cm_operand_storage_of(const cm_state *state, PyObject *array);
/* 0; or -1 with TypeError, where elements of an array of NumPy's are masked. */
int cm_check_unmasked(PyObject *array);
/* A Buffer, an array or an exporter; no value that copy() would make an array of. */
bool cm_operand_is_memory(const cm_state *state, PyObject *object);
/* When the driver is asked what memory of the host is, which takes it longer than all
 * else before a short copy: now; now unless it is short, and then it counts as ordinary
 * memory; of arrays, by the caller. */
typedef enum cm_asking { CM_ASK, CM_ASK_UNLESS_SHORT, CM_ASK_LATER } cm_asking;
/* Reading one end runs foreign code and lets other threads run: from here to fini the
 * memory of a buffer cannot be freed.
 * `target_dtype` (NULL for a target) gives scalars and lists their dtype.
 * CM_ASK_UNLESS_SHORT is for an end of a copy to or from a device that is waited for. 0
 * or -1. */
int cm_operand_init(cm_state *state, cm_operand *operand, PyObject *object,
                    PyObject *target_dtype, cm_stream *stream, cm_asking asking);
void cm_operand_fini(cm_operand *operand);
