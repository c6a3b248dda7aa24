/* SPDX-License-Identifier: Apache-2.0 */
/* What the dlpack files share: element types and capsules. GIL held. */
#ifndef CM_PYTHON_PROTOCOLS_DLPACK_H
#define CM_PYTHON_PROTOCOLS_DLPACK_H

#include "python/buffer/buffer_object.h"
#include "python/protocols/dlpack_abi.h"

/* 0, or -1 with BufferError when DLPack has no code for the dtype. Reads the name of
 * one of another package, which may run Python code. */
int cm_dlpack_from_dtype(PyObject *dtype, cm_dl_dtype *out);
/* New numpy.dtype; BufferError when NumPy has none (ml_dtypes is used when it is
 * there). */
PyObject *cm_dlpack_to_dtype(cm_dl_dtype type);

/* A capsule over `buffer`, as elements of `type` in memory of `device` at `data` (NULL
 * when it is empty); holds and counts the storage until its consumer is done. Nothing
 * that may run Python code comes before it is counted. BufferError for strides that
 * DLPack cannot describe; the legacy form also for a read-only buffer. */
PyObject *cm_dlpack_legacy(const cm_buffer *buffer, cm_dl_dtype type,
                           cm_dl_device device, void *data);
PyObject *cm_dlpack_versioned(const cm_buffer *buffer, cm_dl_dtype type,
                              cm_dl_device device, void *data, uint32_t minor,
                              bool copied);

/* A buffer over an unused capsule, which is used from the beginning of the call on;
 * NotImplemented (new reference) if it is none.
 * `advertised` is what __dlpack_device__() said of it: such a capsule was made for us,
 * and whatever is wrong with it, its deleter is called exactly once. NULL: the caller's
 * own capsule, which stays unused unless it is accepted. */
PyObject *cm_dlpack_import(cm_state *state, PyObject *capsule,
                           const cm_dl_device *advertised);
/* The same of a tensor without a capsule, which is taken over: its deleter is called
 * once, now on failure. Ordinary memory of up to `unasked` bytes is not asked about. */
PyObject *cm_dlpack_import_managed(cm_state *state, cm_dl_versioned *managed,
                                   uint64_t unasked);
/* Let it go without an import. Keeps a pending exception. */
void cm_dlpack_discard(cm_dl_versioned *managed);
/* The stream that the data is wanted on: `given`, or that device's default; *out is
 * NULL for memory that the CPU reads. Give it back. 0, or -1 with an exception. */
int cm_dlpack_choose_stream(cm_state *state, cm_dl_device device, cm_stream *given,
                            cm_stream **out);
/* Let `stream` wait for the exporter's. 0, or -1 with CudaError. */
int cm_dlpack_follow_handle(cm_state *state, cm_stream *stream, uint64_t handle);
/* What was ordered on `stream`, of the exporter's device, also comes before the stream
 * asked for. 0, or -1 with an exception. */
int cm_dlpack_pass_on(cm_state *state, PyObject *buffer, cm_stream *given,
                      cm_stream *stream);
/* Let the work on `given`, or on the device's default stream (NULL), and with it the
 * buffer, come after what the exporter's stream `handle` of that device was given.
 * 0, or -1 with an exception. */
int cm_dlpack_follow(cm_state *state, PyObject *buffer, cm_dl_device device,
                     cm_stream *given, uint64_t handle);
/* A device that this process has. 0, or -1 with ValueError or BufferError. */
int cm_dlpack_check_device(const cm_runtime *rt, cm_dl_device device);

#endif
