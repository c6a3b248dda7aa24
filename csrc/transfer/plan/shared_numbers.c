/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/shared_numbers.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

/* One allocation. Callers know only the address of its first number. */
typedef struct shared {
    atomic_uint owner_count;
    int64_t numbers[];
} shared;

static shared *
shared_of(int64_t *numbers)
{
    return (shared *)(void *)((char *)numbers - offsetof(shared, numbers));
}

int64_t *
cm_shared_numbers_create(uint64_t count)
{
    if (count > (SIZE_MAX - sizeof(shared)) / sizeof(int64_t)) {
        return NULL;
    }
    shared *made = malloc(sizeof(*made) + (size_t)count * sizeof(int64_t));
    if (made == NULL) {
        return NULL;
    }
    atomic_init(&made->owner_count, 1);
    return made->numbers;
}

int64_t *
cm_shared_numbers_hold(int64_t *numbers)
{
    if (numbers != NULL) {
        atomic_fetch_add_explicit(&shared_of(numbers)->owner_count, 1,
                                  memory_order_relaxed);
    }
    return numbers;
}

void
cm_shared_numbers_release(int64_t *numbers)
{
    if (numbers != NULL && atomic_fetch_sub(&shared_of(numbers)->owner_count, 1) == 1) {
        free(shared_of(numbers));
    }
}
