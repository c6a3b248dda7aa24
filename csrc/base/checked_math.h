/* SPDX-License-Identifier: Apache-2.0 */
/* Computes sums and products, and tells whether they overflow. Every size, stride and
 * offset that comes from outside passes through these before it is used. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* If the exact result fits, each of these writes it to *out and returns true. Otherwise
 * it returns false. */
static inline bool
cm_add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

static inline bool
cm_mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static inline bool
cm_add_i64(int64_t a, int64_t b, int64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

static inline bool
cm_mul_i64(int64_t a, int64_t b, int64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

/* Return the length of a stride, without its direction. */
static inline uint64_t
cm_magnitude(int64_t stride)
{
    return stride < 0 ? 0 - (uint64_t)stride : (uint64_t)stride;
}

/* Round `n` up to a multiple of `step`, a power of two. */
static inline bool
cm_round_up_u64(uint64_t n, uint64_t step, uint64_t *out)
{
    uint64_t sum;
    if (!cm_add_u64(n, step - 1, &sum)) {
        return false;
    }
    *out = sum & ~(step - 1);
    return true;
}

/* Round up to a multiple of any `step`. The caller knows that the result fits. */
static inline uint64_t
cm_round_up_to(uint64_t n, uint64_t step)
{
    return (n + step - 1) / step * step;
}

static inline uint64_t
cm_least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline bool
cm_is_power_of_two(uint64_t n)
{
    return n != 0 && (n & (n - 1)) == 0;
}
