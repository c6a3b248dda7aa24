/* SPDX-License-Identifier: Apache-2.0 */
/* Declares the binary interface of DLPack, and the functions that an exporter needs.
 * The declarations cover ABI major version 1 (versioned) and the unversioned one before
 * it (legacy). The GIL is held. Only the dlpack files include this. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "python/buffer/buffer_object.h"

/* -- the binary interface ----------------------------------------------------------- */

enum { CM_DL_MAJOR = 1, CM_DL_MINOR = 3 };

/* The device types that cumem knows. */
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
    int64_t *strides; /* in elements; NULL for C order (before 1.2) */
    uint64_t byte_offset;
} cm_dl_tensor;

/* The content of a capsule named "dltensor". */
typedef struct cm_dl_legacy {
    cm_dl_tensor tensor;
    void *context;
    void (*deleter)(struct cm_dl_legacy *self);
} cm_dl_legacy;

/* The content of a capsule named "dltensor_versioned". If its major version is not
 * ours, only the first three members may be used. */
typedef struct cm_dl_versioned {
    cm_dl_version version;
    void *context;
    void (*deleter)(struct cm_dl_versioned *self);
    uint64_t flags;
    cm_dl_tensor tensor;
} cm_dl_versioned;

/* The protocol as a table of C functions, which a type may have since version 1.3, in a
 * capsule named "dlpack_exchange_api". These functions wait for no stream: the memory
 * is used on the current stream. All but `allocate` are called with the GIL held and
 * return 0, or -1 with an exception; `allocate` reports what failed by calling
 * `set_error`. Tables of other major versions are found through `previous`. */
typedef void (*cm_dl_set_error)(void *context, const char *kind, const char *message);
typedef struct cm_dl_exchange {
    cm_dl_version version;
    const struct cm_dl_exchange *previous;
    int (*allocate)(const cm_dl_tensor *like, cm_dl_versioned **out, void *context,
                    cm_dl_set_error set_error);
    int (*from_object)(void *object, cm_dl_versioned **out); /* the caller owns *out */
    int (*to_object)(cm_dl_versioned *managed, void **out);  /* takes `managed` over */
    /* Valid until the caller returns to Python. */
    int (*borrow)(void *object, cm_dl_tensor *out);
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

/* Find DLPack's code for a dtype. Returns 0, or -1 with BufferError if it has none. A
 * dtype of another package is asked for its name, which may run Python code. */
int cm_dlpack_from_dtype(PyObject *dtype, cm_dl_dtype *out);
/* Make a numpy.dtype of DLPack's code. Types of ml_dtypes are found if that package is
 * there. Returns a new reference, or NULL with an exception, which is a BufferError if
 * NumPy has no such dtype. */
PyObject *cm_dlpack_to_dtype(cm_dl_dtype type);

/* -- devices ------------------------------------------------------------------------ */

/* Find the kind of memory that a DLPack device stands for, if this process has that
 * device. Returns 0, or -1 with ValueError or BufferError. */
int cm_dlpack_check_device(const cm_runtime *rt, cm_dl_device device, cm_kind *kind);

/* -- out ---------------------------------------------------------------------------- */

/* Export as __dlpack__(max_version=(1, 3), copy=False) does for a consumer on the
 * current stream. */
PyObject *cm_dlpack_current(PyObject *buffer);
/* Export memory that nobody has used yet, as __dlpack__(stream=-1, max_version=(1, 3),
 * dl_device=device) does. */
PyObject *cm_dlpack_fresh(PyObject *buffer, cm_dl_device device);
