/* SPDX-License-Identifier: Apache-2.0 */
/* A status is the outcome of a call, a value of 16 bytes that is returned in two
 * registers. So reporting an error needs no thread-local variable and no allocation.
 * This file knows nothing of CUDA: only the runtime layer knows which operation the
 * number `op` stands for. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/attributes.h"

typedef struct cm_status {
    int32_t code; /* 0 for success; > 0 for a cudaError_t; < 0 for one of CM_E… below */
    uint16_t op;  /* the operation of runtime/ops.h that failed; 0 if none did */
    uint16_t spare; /* always 0 */
    uint64_t arg;   /* the operation's most telling argument, such as a byte count */
} cm_status;

/* Our own errors. Their texts, and those of CUDA's errors, are in
 * cumem/base/error_codes.py. */
enum {
    CM_OK = 0,
    CM_EINVALID = -1,
    CM_ESHAPE = -2,
    CM_EOVERFLOW = -3, /* a size or an offset does not fit in 63 bits */
    CM_ECLOSED = -4,
    CM_ENOMEM = -5, /* ordinary host memory */
    CM_ELIMIT = -6,
    CM_EFORKED = -7, /* CUDA cannot be used in a forked child process */
    CM_ENOTSUP = -8, /* the driver or the device cannot do this */
    CM_EBUSY = -9,   /* the memory is in use */
    CM_ETHREAD = -10,
    CM_ESYSTEM = -11, /* a system call failed; the argument is its errno */
    CM_ECANCELLED = -12,
    CM_ETIMEOUT = -13,
    CM_EHOSTMEMORY = -14, /* more host memory is asked for than the process may use */
    CM_ENUMA = -15,       /* the memory came from another node */
    CM_EMANAGED = -16,    /* the device has no concurrent managed access */
    CM_ECAPTURING = -17,  /* a captured graph cannot contain what the host does */
    CM_EFAULT = -18, /* a mapped file was cut short, or cannot be read or written */
    /* An element cannot be converted; the argument is the cast's number. */
    CM_ECAST = -19,
    /* Some of the row numbers that a kernel read do not name a row. The argument says
     * whether they are the target's or the source's: it is a sum of CM_ROWS_WRONG_…
     * (runtime/kernel_jobs.h) and CM_ROWS_WRONG_TAKEN below. */
    CM_EROWS = -20,
    CM_EASLEEP = -21, /* the memory's pool sleeps (pool/sleep.c) */
};

/* This bit is set in the argument of CM_EROWS if the call was take_rows(), so that the
 * message names its argument `rows` where other calls have `src_rows`. */
enum { CM_ROWS_WRONG_TAKEN = 4 };

static inline cm_status
cm_ok(void)
{
    return (cm_status){0, 0, 0, 0};
}

/* Make one of our own failures. `arg` is the value that was wrong, or 0. */
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

/* Return the first of two outcomes if it is a failure, else the second. */
static inline cm_status
cm_first_failure(cm_status first, cm_status second)
{
    return cm_is_ok(first) ? second : first;
}

/* Ignore a failure about which nothing can be done and of which nobody needs to know.
 * The caller says why in a comment. */
static inline void
cm_ignore(cm_status status)
{
    (void)status;
}

/* Return the outcome of an allocation of `nbytes`; `succeeded` says whether it gave
 * memory. Fails: CM_ENOMEM. */
CM_NODISCARD static inline cm_status
cm_allocated(bool succeeded, uint64_t nbytes)
{
    return succeeded ? cm_ok() : cm_fail(CM_ENOMEM, nbytes);
}

/* Return the status of `call` if it is a failure. This is the only macro that may
 * return. */
#define CM_TRY(call)                                                                   \
    do {                                                                               \
        cm_status cm_try_status_ = (call);                                             \
        if (CM_UNLIKELY(cm_try_status_.code != CM_OK)) {                               \
            return cm_try_status_;                                                     \
        }                                                                              \
    } while (0)
