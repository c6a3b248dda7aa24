/* SPDX-License-Identifier: Apache-2.0 */
/* Gives names to attributes of the compiler. This file knows nothing of the rest of the
 * core. */
#pragma once

/* The caller must look at the result: ignoring it is a compile error under -Werror. */
#define CM_NODISCARD __attribute__((warn_unused_result))
#define CM_PRINTF(format_index, first_index)                                           \
    __attribute__((format(printf, format_index, first_index)))
#define CM_UNUSED __attribute__((unused))
/* For a function that is rarely called. It is not inlined, so that its caller sets
 * aside no registers and no stack for it. */
#define CM_COLD __attribute__((cold, noinline))
/* Always inlined, so that the compiler makes a copy of the code for each constant that
 * is passed. */
#define CM_INLINE inline __attribute__((always_inline))
#define CM_LIKELY(x) __builtin_expect(!!(x), 1)
#define CM_UNLIKELY(x) __builtin_expect(!!(x), 0)
