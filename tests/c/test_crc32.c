/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of checksums that are added up from parts. Those of whole messages are compared
 * with a division bit by bit. */
#include <stdlib.h>

#include "base/crc32.h"
#include "check.h"

enum { ROOM = 700 };

/* Return the checksum of a message, one bit at a time. */
static uint32_t
checksum_of(const unsigned char *bytes, size_t nbytes)
{
    uint32_t sum = UINT32_MAX;
    for (size_t i = 0; i < nbytes; i++) {
        sum ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) {
            sum = (sum & 1) != 0 ? (sum >> 1) ^ UINT32_C(0xEDB88320) : sum >> 1;
        }
    }
    return ~sum;
}

static void
fill_bytes(unsigned char *to, size_t nbytes)
{
    uint32_t state = 1;
    for (size_t i = 0; i < nbytes; i++) {
        state = state * 1664525 + 1013904223;
        to[i] = (unsigned char)(state >> 24);
    }
}

static void
test_known_message_has_known_checksum(void)
{
    CHECK_EQ(cm_crc32_of_zeros(9) ^ cm_crc32_of_part("123456789", 9, 0), 0xCBF43926);
    CHECK_EQ(cm_crc32_of_zeros(0), 0);
}

static void
test_each_length_and_alignment_equals_division_by_bits(void)
{
    unsigned char bytes[ROOM + 16];
    fill_bytes(bytes, sizeof(bytes));
    for (size_t nbytes = 0; nbytes <= ROOM; nbytes++) {
        const unsigned char *part = bytes + nbytes % 16;
        CHECK_EQ(cm_crc32_of_zeros(nbytes) ^ cm_crc32_of_part(part, nbytes, 0),
                 checksum_of(part, nbytes));
    }
}

static void
test_long_messages_equal_division_by_bits(void)
{
    enum { LONG = 70001 };
    unsigned char *bytes = malloc(LONG);
    CHECK(bytes != NULL);
    fill_bytes(bytes, LONG);
    for (size_t nbytes = LONG - 80; nbytes <= LONG; nbytes++) {
        CHECK_EQ(cm_crc32_of_zeros(nbytes) ^ cm_crc32_of_part(bytes, nbytes, 0),
                 checksum_of(bytes, nbytes));
    }
    free(bytes);
}

static void
test_parts_in_any_order_add_up_to_the_whole(void)
{
    unsigned char bytes[ROOM];
    fill_bytes(bytes, sizeof(bytes));
    uint32_t whole = checksum_of(bytes, ROOM);
    for (size_t first = 0; first <= ROOM; first++) {
        size_t second = (ROOM - first) / 3;
        size_t third = ROOM - first - second;
        uint32_t sum = cm_crc32_of_part(bytes + first + second, third, 0);
        sum ^= cm_crc32_of_part(bytes, first, second + third);
        sum ^= cm_crc32_of_zeros(ROOM);
        sum ^= cm_crc32_of_part(bytes + first, second, third);
        CHECK_EQ(sum, whole);
    }
}

/* A division in two steps must leave the same remainder as one division. The first step
 * divides a byte with zeros behind it. The second step divides the four bytes that
 * remain, with 77 zeros behind them. In the one division the byte is followed by the
 * zeros of both steps, and by four zeros for the bytes that remained. */
static void
test_zeros_behind_a_part_are_appended_in_any_steps(void)
{
    const uint64_t counts[] = {0, 1, 1000, UINT64_C(1) << 32, (UINT64_C(5) << 40) + 3};
    unsigned char one = 1;
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        uint32_t left = cm_crc32_of_part(&one, 1, counts[i]);
        unsigned char bytes[sizeof(left)];
        for (size_t k = 0; k < sizeof(bytes); k++) {
            bytes[k] = (unsigned char)(left >> (8 * k));
        }
        CHECK_EQ(cm_crc32_of_part(bytes, sizeof(bytes), 77),
                 cm_crc32_of_part(&one, 1, counts[i] + sizeof(bytes) + 77));
    }
}

/* clang-format off */
MAIN(RUN(test_known_message_has_known_checksum)
     RUN(test_each_length_and_alignment_equals_division_by_bits)
     RUN(test_long_messages_equal_division_by_bits)
     RUN(test_parts_in_any_order_add_up_to_the_whole)
     RUN(test_zeros_behind_a_part_are_appended_in_any_steps))
/* clang-format on */
