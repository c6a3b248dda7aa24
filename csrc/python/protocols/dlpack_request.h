/* SPDX-License-Identifier: Apache-2.0 */
/* What a consumer asks of __dlpack__(). GIL held. */
#ifndef CM_PYTHON_PROTOCOLS_DLPACK_REQUEST_H
#define CM_PYTHON_PROTOCOLS_DLPACK_REQUEST_H

#include "python/protocols/dlpack.h"

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
