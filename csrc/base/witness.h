/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a forked child, or any child of its own, still has what it inherited.
 *
 * A pipe or a pidfd would not do: who closes all descriptors, as daemons do, would look
 * dead, and a grandchild has no pidfd of ours. So the child inherits a mapping, which
 * nobody but exec and the end of the process takes away: that of a page of a file in
 * memory, writable and shared. The kernel does not let a file be sealed against writing
 * while such a mapping is left anywhere, however it came there, and says so. Locks: none. */
#pragma once

#include <stdbool.h>

typedef struct cm_witness {
    int fd; /* -1: nothing could be made, so the child is thought to live for ever */
    void *page; /* mapped from before a fork until after it; else NULL */
} cm_witness;

/* Before a fork: map the page that the child is to inherit. */
void cm_witness_create(cm_witness *witness);
/* After it, in the parent: only children have the page from now on. */
void cm_witness_leave(cm_witness *witness);
/* After it, in the child: the page stays for good, and nothing else. */
void cm_witness_inherit(cm_witness *witness);
/* In the parent: no process has the page any more. True once, true for ever. */
bool cm_witness_is_over(const cm_witness *witness);
void cm_witness_close(cm_witness *witness);
