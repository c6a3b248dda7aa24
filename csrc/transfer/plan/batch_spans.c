/* SPDX-License-Identifier: Apache-2.0 */
/* Do runs of addresses touch each other? */
#include <string.h>

#include "transfer/plan/batch_plan.h"

enum { DIGIT_BITS = 8, DIGITS = 64 / DIGIT_BITS, BUCKETS = 1 << DIGIT_BITS };

static bool
is_sorted(const cm_byte_span *spans, uint64_t count)
{
    for (uint64_t i = 1; i < count; i++) {
        if (spans[i].begin < spans[i - 1].begin) {
            return false;
        }
    }
    return true;
}

static unsigned
digit_of(const cm_byte_span *span, int digit)
{
    return (unsigned)(span->begin >> (digit * DIGIT_BITS)) % BUCKETS;
}

/* By one digit, from `spans` to `out`; false: all have the same one, nothing is done.
 */
static bool
sort_by_digit(const cm_byte_span *spans, cm_byte_span *out, uint64_t count, int digit)
{
    uint64_t places[BUCKETS] = {0};
    for (uint64_t i = 0; i < count; i++) {
        places[digit_of(&spans[i], digit)]++;
    }
    if (places[digit_of(&spans[0], digit)] == count) {
        return false;
    }
    uint64_t place = 0;
    for (int bucket = 0; bucket < BUCKETS; bucket++) {
        uint64_t next = place + places[bucket];
        places[bucket] = place;
        place = next;
    }
    for (uint64_t i = 0; i < count; i++) {
        out[places[digit_of(&spans[i], digit)]++] = spans[i];
    }
    return true;
}

/* By where they begin. Digits that all share, as most of an address, cost one look. */
static void
sort_spans(cm_byte_span *spans, cm_byte_span *spare, uint64_t count)
{
    cm_byte_span *from = spans;
    cm_byte_span *to = spare;
    if (is_sorted(spans, count)) {
        return;
    }
    for (int digit = 0; digit < DIGITS; digit++) {
        if (sort_by_digit(from, to, count, digit)) {
            cm_byte_span *next = from;
            from = to;
            to = next;
        }
    }
    if (from != spans) {
        memcpy(spans, from, (size_t)count * sizeof(*spans));
    }
}

static cm_byte_span
hull_of(const cm_byte_span *spans, uint64_t count)
{
    cm_byte_span hull = spans[0];
    for (uint64_t i = 1; i < count; i++) {
        hull.begin = spans[i].begin < hull.begin ? spans[i].begin : hull.begin;
        hull.end = spans[i].end > hull.end ? spans[i].end : hull.end;
    }
    return hull;
}

static bool
meet(cm_byte_span a, cm_byte_span b)
{
    return a.begin < b.end && b.begin < a.end;
}

bool
cm_byte_spans_touch(cm_byte_span *dst, cm_byte_span *src, uint64_t count,
                    cm_byte_span *spare)
{
    if (count == 0) {
        return false;
    }
    sort_spans(dst, spare, count);
    for (uint64_t i = 1; i < count; i++) {
        if (meet(dst[i - 1], dst[i])) {
            return true;
        }
    }
    if (!meet(hull_of(dst, count), hull_of(src, count))) {
        return false;
    }
    sort_spans(src, spare, count);
    for (uint64_t i = 0, k = 0; i < count && k < count;) {
        if (meet(dst[i], src[k])) {
            return true;
        }
        if (dst[i].end < src[k].end) {
            i++;
        }
        else {
            k++;
        }
    }
    return false;
}
