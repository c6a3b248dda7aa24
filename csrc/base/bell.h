/* SPDX-License-Identifier: Apache-2.0 */
/* A bell is an eventfd that is written to when something is done, so that a thread or
 * an event loop wakes up. Everybody who may still ring it holds a reference, and all of
 * them share one descriptor. So a program that waits for a thousand transfers at the
 * same time does not reach the limit of descriptors, which is 1,024 on many systems.
 *
 *   cm_bell_create()   by the event loop, which reads the eventfd
 *   cm_bell_hold()     for each transfer that the loop waits for
 *   cm_bell_ring()     when such a transfer is done
 *   cm_bell_release()  by the transfer, and by the loop at its end
 *
 * The bell duplicates the descriptor that it is made of. A loop that ends before its
 * transfers may close its own descriptor. The transfers then write to an eventfd that
 * nobody reads, and never to a file that has got the same number since.
 *
 * Locks: none. The count is atomic, and the descriptor never changes. */
#pragma once

#include "base/status.h"

typedef struct cm_bell cm_bell;

/* Make a bell of the eventfd `fd`, which remains the caller's.
 * Fails: CM_ENOMEM, CM_ESYSTEM. */
CM_NODISCARD cm_status cm_bell_create(int fd, cm_bell **out);
cm_bell *cm_bell_hold(cm_bell *bell); /* returns the bell */
/* Add 1 to the counter of the eventfd. */
void cm_bell_ring(const cm_bell *bell);
/* Give a reference back. The last one to go closes the descriptor. */
void cm_bell_release(cm_bell *bell);
