/* SPDX-License-Identifier: Apache-2.0 */
/* Counts the owners of arrays of row numbers. The call or the plan that has checked the
 * numbers is one owner. Each copy that threads make by these numbers is another one,
 * since it may outlive the call. An array does not change once it has a second owner.
 * Locks: none; the owners are counted. */
#pragma once

#include <stdint.h>

/* Make an array that its caller owns. Returns NULL if there is no memory. */
int64_t *cm_shared_numbers_create(uint64_t count);
/* Add an owner, and return the array. Does nothing with NULL. */
int64_t *cm_shared_numbers_hold(int64_t *numbers);
/* Remove an owner. The last one to go frees the array. Does nothing with NULL. */
void cm_shared_numbers_release(int64_t *numbers);
