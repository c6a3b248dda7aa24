/* SPDX-License-Identifier: Apache-2.0 */
/* Has the assertions of the C tests, and runs the tests. When a check fails it prints
 * the values that it compared, the failure is counted, and the function that the check
 * is in returns. In a test function this ends the test. Any thread may make checks.
 * MAIN lists the tests of a program, which exits with a status other than 0 if a check
 * has failed.
 *     static void
 *     test_pool_empty_has_no_bytes(void)
 *     {
 *         CHECK_EQ(count(), 0);
 *         CHECK_OK(cm_pool_create(rt, &config, &pool));
 *     }
 *
 *     MAIN(RUN(test_pool_empty_has_no_bytes)) */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/attributes.h"
#include "base/status.h"

static atomic_int check_failures;

/* Tests use this as the step of a loop, or divide the number of rounds by it, so that a
 * single thread repeats less. It is `n` under ThreadSanitizer, where each round takes
 * many times as long and more rounds of one thread find nothing new. In any other build
 * it is 1. */
#define CHECK_EVERY(n) (CHECK_TSAN ? (n) : 1)
#ifdef __SANITIZE_THREAD__
#    define CHECK_TSAN 1
#else
#    define CHECK_TSAN 0
#endif

/* Marks a function whose loop goes over memory of the test itself. The sanitizers do
 * not watch it, since they would find nothing there and watching would take most of the
 * time. */
#define CHECK_UNWATCHED                                                                \
    __attribute__((no_sanitize("address,undefined,thread"), optimize("O2")))

#define CHECK_FAIL_(...)                                                               \
    do {                                                                               \
        atomic_fetch_add(&check_failures, 1);                                          \
        fprintf(stderr, "%s:%d: in %s: ", __FILE__, __LINE__, __func__);               \
        fprintf(stderr, __VA_ARGS__);                                                  \
        fputc('\n', stderr);                                                           \
    } while (0)

/* Check that the condition is true. */
#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            CHECK_FAIL_("CHECK(%s) is false", #condition);                             \
            return;                                                                    \
        }                                                                              \
    } while (0)

/* Check that two integers, or pointers cast to uintptr_t, stand in the relation
 * `op`. */
#define CHECK_REL_(a, op, b)                                                           \
    do {                                                                               \
        long long check_a_ = (long long)(a);                                           \
        long long check_b_ = (long long)(b);                                           \
        if (!(check_a_ op check_b_)) {                                                 \
            CHECK_FAIL_("%s %s %s: %lld (%#llx) against %lld (%#llx)", #a, #op, #b,    \
                        check_a_, (unsigned long long)check_a_, check_b_,              \
                        (unsigned long long)check_b_);                                 \
            return;                                                                    \
        }                                                                              \
    } while (0)
#define CHECK_EQ(a, b) CHECK_REL_(a, ==, b)
#define CHECK_NE(a, b) CHECK_REL_(a, !=, b)
#define CHECK_LT(a, b) CHECK_REL_(a, <, b)
#define CHECK_LE(a, b) CHECK_REL_(a, <=, b)
#define CHECK_GT(a, b) CHECK_REL_(a, >, b)
#define CHECK_GE(a, b) CHECK_REL_(a, >=, b)

#define CHECK_PTR_EQ(a, b)                                                             \
    do {                                                                               \
        const volatile void *check_a_ = (a);                                           \
        const volatile void *check_b_ = (b);                                           \
        if (check_a_ != check_b_) {                                                    \
            CHECK_FAIL_("%s == %s: %p against %p", #a, #b, (const void *)check_a_,     \
                        (const void *)check_b_);                                       \
            return;                                                                    \
        }                                                                              \
    } while (0)

/* Check that two strings are equal. NULL equals only NULL. */
#define CHECK_STR_EQ(a, b)                                                             \
    do {                                                                               \
        const char *check_a_ = (a);                                                    \
        const char *check_b_ = (b);                                                    \
        if (check_a_ == NULL || check_b_ == NULL ? check_a_ != check_b_                \
                                                 : strcmp(check_a_, check_b_) != 0) {  \
            CHECK_FAIL_("%s == %s: \"%s\" against \"%s\"", #a, #b,                     \
                        check_a_ ? check_a_ : "(null)",                                \
                        check_b_ ? check_b_ : "(null)");                               \
            return;                                                                    \
        }                                                                              \
    } while (0)

/* Return the place of the first byte that differs, or `nbytes` if there is none. The
 * loop runs only if memcmp() has found a difference. A sanitizer would check each
 * access of the loop, whereas it checks the whole range of memcmp() at once. */
CM_UNUSED static size_t
check_same_until_(const unsigned char *a, const unsigned char *b, size_t nbytes)
{
    if (nbytes == 0 || memcmp(a, b, nbytes) == 0) {
        return nbytes;
    }
    size_t i = 0;
    while (i < nbytes && a[i] == b[i]) {
        i++;
    }
    return i;
}

/* Return the place of the first byte that is not `value`, or `nbytes` if there is none.
 * All bytes equal the first one as long as each of them equals the next, so the bytes
 * are compared with themselves, shifted by one. */
CM_UNUSED static size_t
check_filled_until_(const unsigned char *a, unsigned char value, size_t nbytes)
{
    if (nbytes == 0 || a[0] != value) {
        return 0;
    }
    return 1 + check_same_until_(a, a + 1, nbytes - 1);
}

/* Check that the `nbytes` bytes at `a` equal those at `b`. A failure prints the first
 * byte that differs. */
#define CHECK_BYTES_EQ(a, b, nbytes)                                                   \
    do {                                                                               \
        const unsigned char *check_a_ = (const unsigned char *)(a);                    \
        const unsigned char *check_b_ = (const unsigned char *)(b);                    \
        size_t check_n_ = (size_t)(nbytes);                                            \
        size_t check_i_ = check_same_until_(check_a_, check_b_, check_n_);             \
        if (check_i_ < check_n_) {                                                     \
            CHECK_FAIL_("%s and %s differ at byte %zu of %zu: %#x against %#x", #a,    \
                        #b, check_i_, check_n_, check_a_[check_i_],                    \
                        check_b_[check_i_]);                                           \
            return;                                                                    \
        }                                                                              \
    } while (0)

/* Check that each of the `nbytes` bytes at `a` has the value. */
#define CHECK_FILLED(a, value, nbytes)                                                 \
    do {                                                                               \
        const unsigned char *check_a_ = (const unsigned char *)(a);                    \
        size_t check_n_ = (size_t)(nbytes);                                            \
        size_t check_i_ =                                                              \
            check_filled_until_(check_a_, (unsigned char)(value), check_n_);           \
        if (check_i_ < check_n_) {                                                     \
            CHECK_FAIL_("%s: byte %zu of %zu is %#x, not %#x", #a, check_i_, check_n_, \
                        check_a_[check_i_], (unsigned)(value));                        \
            return;                                                                    \
        }                                                                              \
    } while (0)

/* Check that the call returns a cm_status with the code `expected`. */
#define CHECK_CODE(call, expected)                                                     \
    do {                                                                               \
        cm_status check_status_ = (call);                                              \
        int32_t check_code_ = (int32_t)(expected);                                     \
        if (check_status_.code != check_code_) {                                       \
            CHECK_FAIL_("%s answered code %d (op %u, arg %#llx), not %d", #call,       \
                        check_status_.code, check_status_.op,                          \
                        (unsigned long long)check_status_.arg, check_code_);           \
            return;                                                                    \
        }                                                                              \
    } while (0)
#define CHECK_OK(call) CHECK_CODE(call, CM_OK)

/* For use in MAIN: run one test and print whether its checks held. Nothing happens if
 * the program was started with an argument that the test's name does not contain. */
#define RUN(test)                                                                      \
    do {                                                                               \
        if (only == NULL || strstr(#test, only) != NULL) {                             \
            int before_ = atomic_load(&check_failures);                                \
            test();                                                                    \
            bool good_ = atomic_load(&check_failures) == before_;                      \
            printf("%s %s\n", good_ ? "ok    " : "FAILED", #test);                     \
            fflush(stdout);                                                            \
            ran++;                                                                     \
        }                                                                              \
    } while (0);

/* Do the same for a test that maps gigabytes in a single thread. It is left out under
 * ThreadSanitizer, which writes several bytes of its own for each byte of the test. */
#define RUN_WITHOUT_TSAN(test)                                                         \
    if (CHECK_TSAN) {                                                                  \
        printf("skip   %s\n", #test);                                                  \
        (void)test;                                                                    \
    }                                                                                  \
    else                                                                               \
        RUN(test)

/* Define main(), as in MAIN(RUN(test_a) RUN(test_b)). If the program is started with an
 * argument, it runs only the tests whose names contain that text. */
#define MAIN(runs)                                                                     \
    int main(int argc, char **argv)                                                    \
    {                                                                                  \
        const char *only = argc > 1 ? argv[1] : NULL;                                  \
        int ran = 0;                                                                   \
        runs;                                                                          \
        int failed = atomic_load(&check_failures);                                     \
        printf("%d tests, %d failed checks\n", ran, failed);                           \
        return failed == 0 && ran > 0 ? 0 : 1;                                         \
    }
