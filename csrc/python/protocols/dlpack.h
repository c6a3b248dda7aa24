/* SPDX-License-Identifier: Apache-2.0 */
/* DLPack as an exporter speaks it. GIL held. */
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

/* The arguments of __dlpack__, read. */
typedef struct cm_dlpack_request {
    bool has_stream;
    int64_t stream; /* -1: do not order */
    bool versioned;
    uint32_t minor;
    bool has_device;
    cm_dl_device device;
    int copy; /* -1: when needed, 0: never, 1: always */
} cm_dlpack_request;

/* The values of stream, max_version, dl_device and copy, NULL where one is not given.
 * 0, or -1 with TypeError, ValueError or BufferError. */
int cm_dlpack_read_request(PyObject *const *values, cm_dlpack_request *out);
/* ValueError that says what streams there are; always -1. */
int cm_dlpack_refuse_stream(int64_t stream);

#endif
