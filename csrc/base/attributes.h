/* SPDX-License-Identifier: Apache-2.0 */
/* Compiler attributes under one set of names. Knows nothing of the rest of the core. */
#ifndef CM_BASE_ATTRIBUTES_H
#define CM_BASE_ATTRIBUTES_H

/* The result must be looked at: ignoring it is a compile error under -Werror. */
#define CM_NODISCARD __attribute__((warn_unused_result))
#define CM_PRINTF(format_index, first_index)                                           \
    __attribute__((format(printf, format_index, first_index)))
#define CM_UNUSED __attribute__((unused))
#define CM_LIKELY(x) __builtin_expect(!!(x), 1)
#define CM_UNLIKELY(x) __builtin_expect(!!(x), 0)

#endif
