/* SPDX-License-Identifier: Apache-2.0 */
/* The outcome of a call as a value: 16 bytes, returned in two registers, no
 * thread-local and no allocation on the error path. Knows nothing of CUDA: `op` is a
 * plain number that the runtime layer gives a meaning. */
#ifndef CM_BASE_STATUS_H
#define CM_BASE_STATUS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/attributes.h"

typedef struct cm_status {
    int32_t code;   /* 0 success; > 0 a cudaError_t; < 0 one of CM_E… below */
    uint16_t op;    /* the operation of runtime/ops.h that failed; 0 = none */
    uint16_t spare; /* always 0 */
    uint64_t arg;   /* that operation's telling argument, e.g. a byte count */
} cm_status;

/* Our own errors: X(name, code, text). The text completes "cumem: …". */
#define CM_ERRORS(X)                                                                   \
    X(CM_EINVALID, -1, "invalid argument")                                             \
    X(CM_ESHAPE, -2, "shapes do not match")                                            \
    X(CM_EOVERFLOW, -3, "a size or an offset does not fit in 63 bits")                 \
    X(CM_ECLOSED, -4, "the object is closed")                                          \
    X(CM_ENOMEM, -5, "out of ordinary host memory")                                    \
    X(CM_ELIMIT, -6, "the limit would be passed")                                      \
    X(CM_EFORKED, -7,                                                                  \
      "CUDA cannot be used in a forked child process; start it with "                  \
      "multiprocessing's "                                                             \
      "spawn or forkserver")                                                           \
    X(CM_ENOTSUP, -8, "the driver or device cannot do this")                           \
    X(CM_EBUSY, -9, "the memory is in use")                                            \
    X(CM_ETHREAD, -10, "a thread could not be started")                                \
    X(CM_ESYSTEM, -11, "a system call failed")                                         \
    X(CM_ECANCELLED, -12, "the transfer was cancelled")                                \
    X(CM_ETIMEOUT, -13, "the time given has passed")                                   \
    X(CM_EHOSTMEMORY, -14,                                                             \
      "the process may not use that much more memory (cgroup memory.max, or what the " \
      "machine has left)")                                                             \
    X(CM_ENUMA, -15, "the memory did not come from the NUMA node asked for")           \
    X(CM_ECAPTURING, -17,                                                              \
      "the stream is being captured, and a graph cannot hold what the host does or "   \
      "what has to be waited for")                                                     \
    X(CM_EFAULT, -18,                                                                  \
      "memory of the copy cannot be had: the file that is mapped there was cut "       \
      "short, or cannot be read or written")

enum {
    CM_OK = 0,
#define CM_ERROR_ENUM(name, code, text) name = (code),
    CM_ERRORS(CM_ERROR_ENUM)
#undef CM_ERROR_ENUM
};

static inline cm_status
cm_ok(void)
{
    return (cm_status){0, 0, 0, 0};
}

/* One of our own failures, with the argument that shows what was wrong (0 if none). */
static inline cm_status
cm_fail(int32_t code, uint64_t arg)
{
    return (cm_status){code, 0, 0, arg};
}

static inline bool
cm_is_ok(cm_status status)
{
    return status.code == CM_OK;
}

/* "CM_EINVALID" and "invalid argument"; NULL for a code that is not one of ours. */
const char *cm_error_name(int32_t code);
const char *cm_error_text(int32_t code);

/* Return early on failure: the only macro that may return. */
#define CM_TRY(call)                                                                   \
    do {                                                                               \
        cm_status cm_try_status_ = (call);                                             \
        if (CM_UNLIKELY(cm_try_status_.code != CM_OK)) {                               \
            return cm_try_status_;                                                     \
        }                                                                              \
    } while (0)

#endif
