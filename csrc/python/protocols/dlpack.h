/* SPDX-License-Identifier: Apache-2.0 */
/* DLPack: its binary interface in our own words, ABI major version 1 (versioned) and
 * the unversioned one before it (legacy), and what an exporter needs. GIL held. Only
 * the dlpack files include this. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "python/buffer/buffer_object.h"

/* -- the binary interface ----------------------------------------------------------- */

enum { CM_DL_MAJOR = 1, CM_DL_MINOR = 3 };

/* device types that cumem knows */
enum { CM_DL_CPU = 1, CM_DL_CUDA = 2, CM_DL_CUDA_HOST = 3, CM_DL_CUDA_MANAGED = 13 };

enum { CM_DL_FLAG_READ_ONLY = 1, CM_DL_FLAG_IS_COPIED = 2 };

typedef struct cm_dl_version {
    uint32_t major;
    uint32_t minor;
} cm_dl_version;

typedef struct cm_dl_device {
    int32_t type;
    int32_t id;
} cm_dl_device;

typedef struct cm_dl_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} cm_dl_dtype;

typedef struct cm_dl_tensor {
    void *data;
    cm_dl_device device;
    int32_t ndim;
    cm_dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: C order (before 1.2) */
    uint64_t byte_offset;
} cm_dl_tensor;

/* Capsule "dltensor". */
typedef struct cm_dl_legacy {
    cm_dl_tensor tensor;
    void *context;
    void (*deleter)(struct cm_dl_legacy *self);
} cm_dl_legacy;

/* Capsule "dltensor_versioned". Of another major version only the first three fields
 * may be used. */
typedef struct cm_dl_versioned {
    cm_dl_version version;
    void *context;
    void (*deleter)(struct cm_dl_versioned *self);
    uint64_t flags;
    cm_dl_tensor tensor;
} cm_dl_versioned;

/* Since 1.3 a type may carry one in the capsule "dlpack_exchange_api": the protocol as
 * C functions, which wait for no stream: the memory is used on the current one. They
 * return 0, or -1 with an exception; the GIL is held, but by who calls the first, which
 * tells what failed. Other major versions of the table are chained by `previous`. */
typedef void (*cm_dl_tell)(void *context, const char *kind, const char *message);
typedef struct cm_dl_exchange {
    cm_dl_version version;
    const struct cm_dl_exchange *previous;
    int (*allocate)(const cm_dl_tensor *like, cm_dl_versioned **out, void *context,
                    cm_dl_tell tell);
    int (*from_object)(void *object, cm_dl_versioned **out); /* the caller deletes it */
    int (*to_object)(cm_dl_versioned *managed, void **out);  /* takes it over */
    int (*borrow)(void *object, cm_dl_tensor *out); /* good until control returns */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
} cm_dl_exchange;

_Static_assert(sizeof(cm_dl_dtype) == 4 && sizeof(cm_dl_device) == 8, "DLPack ABI");
_Static_assert(offsetof(cm_dl_tensor, shape) == 24 && sizeof(cm_dl_tensor) == 48,
               "DLPack ABI");
_Static_assert(sizeof(cm_dl_legacy) == 64, "DLPack ABI");
_Static_assert(offsetof(cm_dl_versioned, tensor) == 32 && sizeof(cm_dl_versioned) == 80,
               "DLPack ABI");
_Static_assert(offsetof(cm_dl_exchange, from_object) == 24
                   && sizeof(cm_dl_exchange) == 56,
               "DLPack ABI");

#define CM_DL_LEGACY_NAME "dltensor"
#define CM_DL_LEGACY_USED "used_dltensor"
#define CM_DL_VERSIONED_NAME "dltensor_versioned"
#define CM_DL_VERSIONED_USED "used_dltensor_versioned"
#define CM_DL_EXCHANGE_NAME "dlpack_exchange_api"

/* -- element types ---------------------------------------------------------------- */

/* 0, or -1 with BufferError when DLPack has no code for the dtype. One of another
 * package is asked for its name, which may run Python code. */
int cm_dlpack_from_dtype(PyObject *dtype, cm_dl_dtype *out);
/* New numpy.dtype; BufferError when NumPy has none (ml_dtypes is used where it is). */
PyObject *cm_dlpack_to_dtype(cm_dl_dtype type);

/* As __dlpack__(max_version=(1, 3), copy=False) of a consumer on the current stream. */
PyObject *cm_dlpack_current(PyObject *buffer);
