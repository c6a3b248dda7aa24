/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the CUDA runtime share: its struct and one body per operation. A
 * body answers a bare code (0, a cudaError_t, or one of CM_E…) and leaves the rest to
 * the wrappers that cuda.c generates: the driver's age, the operation's name, the
 * telling argument and CUDA's sticky error. Private to cuda*.c; includes no CUDA header
 * itself. */
#ifndef CM_RUNTIME_CUDA_PRIVATE_H
#define CM_RUNTIME_CUDA_PRIVATE_H

#include <stdint.h>

#include "runtime/runtime.h"

typedef struct cm_cuda_driver cm_cuda_driver;

typedef struct cm_cuda {
    cm_runtime base;        /* first: a cm_runtime * is a cm_cuda * */
    cm_cuda_driver *driver; /* owned */
} cm_cuda;

#define CM_CUDA_BODY(name, cuda, oldest, arg, params, args)                            \
    CM_NODISCARD int32_t cm_cuda_##name params;
CM_OPS(CM_CUDA_BODY)
#undef CM_CUDA_BODY

/* Look up the driver's functions by version. A function that the driver lacks is not a
 * failure here: its operations answer CM_ENOTSUP.
 * Owns: the caller ends *out with cm_cuda_driver_close(). Fails: CM_ENOMEM. */
CM_NODISCARD int32_t cm_cuda_driver_open(int driver_version, cm_cuda_driver **out);
void cm_cuda_driver_close(cm_cuda_driver *driver);

/* Giving something back while the process, the context or the driver goes away is no
 * failure: it is gone already. */
CM_NODISCARD static inline int32_t
cm_cuda_freed(int32_t code)
{
    switch (code) {
    case CM_CUDA_UNLOADING:
    case CM_CUDA_CONTEXT_DESTROYED:
    case CM_CUDA_INSUFFICIENT_DRIVER:
        return CM_OK;
    default:
        return code;
    }
}

/* Handles and addresses travel as integers; here they become pointers again. */
static inline void *
cm_cuda_pointer(uint64_t value)
{
    return (void *)(uintptr_t)value;
}

static inline uint64_t
cm_cuda_integer(const void *pointer)
{
    return (uint64_t)(uintptr_t)pointer;
}

#endif
