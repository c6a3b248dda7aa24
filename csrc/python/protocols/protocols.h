/* SPDX-License-Identifier: Apache-2.0 */
/* This header has the interchange protocols, for memory that goes out and for memory
 * that comes in.
 *
 * Out: buffers have the buffer protocol (buffer_export.c) and __cuda_array_interface__
 * (array_interface.c). The export of DLPack is in python/copy, since it may have to
 * make a copy.
 *
 * In: cm_operand_init() and asbuffer() take any object (operand.c). Our own buffers and
 * NumPy's arrays are read as they are. Then DLPack is tried, by its C functions and by
 * __dlpack__() (dlpack_import.c), then the CUDA array interface
 * (import_array_interface.c), and last the buffer protocol (operand.c). Each importer
 * describes the memory in a cm_import, and import.c checks the description, asks the
 * driver about the memory, and makes a buffer over it.
 *
 * Descriptions that come in are not trusted: each size, stride, offset and pointer is
 * checked before it is used, and a value that cannot be true raises a ValueError,
 * TypeError or BufferError that names the field. The GIL is held throughout. */
#pragma once

#include "python/buffer/buffer_object.h"

/* -- out: slots, getters and methods that the buffer types put into their tables --- */

/* Py_bf_getbuffer and Py_bf_releasebuffer of the four types that the host may use. */
int cm_buffer_getbuffer(PyObject *self, Py_buffer *view, int flags);
void cm_buffer_releasebuffer(PyObject *self, Py_buffer *view);
/* The getter of `__cuda_array_interface__` of mapped, managed and device buffers. It
 * raises AttributeError on the emulated device. */
PyObject *cm_buffer_array_interface(PyObject *self, void *closure);
/* True if that getter would answer. Finding that out does not count as an export. */
bool cm_buffer_has_array_interface(const cm_buffer *buffer);
/* Make the dictionary itself, on any backend. Tests use it on the emulated device. */
PyObject *cm_array_interface_dict(PyObject *self);
/* __reduce_ex__ (METH_O), and the function of the module that unpickling needs
 * (METH_O). */
PyObject *cm_buffer_reduce_ex(PyObject *self, PyObject *protocol);
PyObject *cm_freeze(PyObject *module, PyObject *object);
/* Make a new buffer, and its storage, read-only. */
void cm_buffer_freeze(cm_buffer *buffer);

/* -- in ----------------------------------------------------------------------------------- */

/* Make a buffer of any exporter's memory, without a copy, as asbuffer() does. The
 * buffer is ready on `stream`, or on the current stream of its device if that is NULL.
 * Returns NULL with an exception. */
PyObject *cm_asbuffer(cm_state *state, PyObject *object, cm_stream *stream);
/* Do the same as cm_asbuffer() with a stream that is any stream argument. NULL and None
 * mean that none was given. */
PyObject *cm_asbuffer_on(cm_state *state, PyObject *object, PyObject *stream);
/* Make a new Buffer over the memory of a DLPack capsule, or of an object whose type has
 * DLPack's C functions. Nothing is copied. Returns NULL with an exception, or a new
 * reference to NotImplemented for other objects. The driver is not asked about host
 * memory of up to `unasked` bytes that comes by those functions. */
PyObject *cm_import_dlpack(cm_state *state, PyObject *object, cm_stream *stream,
                           uint64_t unasked);

/* Ask another library's object which device its memory is on. Returns -1 if no device
 * has it, or if the object does not say. This runs the object's code, and raises
 * nothing. */
int cm_exporter_device(const cm_state *state, PyObject *object);

/* Ask an object by its `__dlpack_device__` and `__dlpack__`, and make a buffer over its
 * memory. The buffer is ready on `stream`, or otherwise on the current stream of its
 * device. Returns NULL with an exception. Returns NotImplemented (a new reference) if
 * the object lacks these methods, and if DLPack cannot describe its memory but
 * `has_buffer` says that it has the buffer protocol too. */
PyObject *cm_import_by_dlpack(cm_state *state, PyObject *object, cm_stream *stream,
                              bool has_buffer);

/* Make a buffer over the memory of an object with the CUDA array interface in the same
 * way. Returns NotImplemented if the object has none. */
PyObject *cm_import_by_array_interface(cm_state *state, PyObject *object,
                                       cm_stream *stream);

/* For cumem/pools/registering.py; METH_VARARGS. */
PyObject *cm_register_memory(PyObject *module, PyObject *args);
PyObject *cm_unregister_memory(PyObject *module, PyObject *args);

/* For cumem/pools/sharing.py: make a buffer over memory that has a name
 * (METH_VARARGS). */
PyObject *cm_shared_pinned(PyObject *module, PyObject *args);
/* Return what a pickle says of a buffer over such memory, or None for any other
 * buffer. */
PyObject *cm_shared_facts(const cm_buffer *buffer);
/* register.c: page-lock the memory of a storage that `locks_late`, in the context of
 * `device`. The GIL is released meanwhile, and another thread may lock it first.
 * Returns 0, or -1 with OutOfMemoryError or CudaError. */
int cm_storage_lock_pages(cm_state *state, cm_storage *storage, int device);

/* asbuffer() and the private functions above. */
extern PyMethodDef cm_protocol_methods[];

/* -- any copy operand ---------------------------------------------------------------------- */

/* One end of a copy: memory that copy() reads or writes, with everything that keeps it
 * alive. */
typedef struct cm_operand {
    cm_region region;
    PyObject *dtype; /* owned */
    PyObject *keep;  /* owned: the object that must live until the copy is done */
    /* owned: keeps the memory page-locked; NULL if we have not locked it */
    PyObject *locked;
    /* Borrowed from `keep` if that is one of our buffers, or an array over one; else
     * NULL. */
    cm_storage *storage;
    /* The number of its bytes if they are one run in C's order; 0 if they are not, or
     * if there are none. Buffers and arrays know this about themselves, so it need not
     * be found out from the strides later. */
    uint64_t run_nbytes;
    bool readonly;
} cm_operand;

/* Find the storage of an array over one of our buffers, whose streams and unfinished
 * transfers the array shares. The array keeps the storage alive. Returns NULL for other
 * arrays. */
cm_storage *cm_operand_storage_of(const cm_state *state, PyObject *array);
/* Refuse an array of NumPy's whose elements are masked. Returns 0, or -1 with
 * TypeError. */
int cm_check_unmasked(PyObject *array);
/* True if the object has memory of its own, as a Buffer, an array or another exporter
 * does. False if it is a value, from which copy() would make an array. */
bool cm_operand_is_memory(const cm_state *state, PyObject *object);
/* Says when the driver is asked about the kind of host memory. Asking takes longer than
 * everything else that comes before a short copy. */
typedef enum cm_asking {
    CM_ASK,              /* now */
    CM_ASK_UNLESS_SHORT, /* now, unless the memory is short, which then counts as
                            ordinary */
    CM_ASK_LATER         /* the caller will ask about arrays */
} cm_asking;
/* Read one end of a copy. This runs foreign code and lets other threads run, so the
 * memory of a buffer is kept open from here to cm_operand_fini() and cannot be freed
 * meanwhile.
 *
 * `target_dtype` gives scalars and lists their dtype; it is NULL for a target.
 * CM_ASK_UNLESS_SHORT is for an end of a copy to or from a device that the caller waits
 * for. Returns 0, or -1 with an exception. */
int cm_operand_init(cm_state *state, cm_operand *operand, PyObject *object,
                    PyObject *target_dtype, cm_stream *stream, cm_asking asking);
void cm_operand_fini(cm_operand *operand);

/* Do the same as cm_operands_lock() when at least one end is still to be locked. */
int cm_operands_lock_late(cm_state *state, cm_operand *dst, cm_operand *src);
