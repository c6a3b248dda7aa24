/* SPDX-License-Identifier: Apache-2.0 */
/* A witness tells the parent whether a forked child, or any descendant of it, still has
 * the memory that it inherited.
 *
 * A pipe or a pidfd would not do: a child that closes all its descriptors, as daemons
 * do, would look dead, and the parent has no pidfd of a grandchild. So the child
 * inherits a mapping, which only exec and the end of the process take away: one page of
 * a file in memory, mapped writable and shared. The kernel refuses to seal a file
 * against writing while any process has such a mapping. So the parent tries to seal the
 * file, and learns from that whether any process is left.
 *
 *   parent                                child
 *   cm_witness_create()  maps the page
 *   fork                                  has the page, too
 *   cm_witness_leave()   unmaps it        cm_witness_inherit()  keeps it
 *   cm_witness_is_over() false
 *                                         ends, or calls exec
 *   cm_witness_is_over() true
 * Locks: none. */
#pragma once

#include <stdbool.h>

typedef struct cm_witness {
    int fd;     /* -1 if the file could not be made; the child then counts as alive */
    void *page; /* mapped from before a fork until after it; else NULL */
} cm_witness;

/* Before a fork: map the page that the child is to inherit. */
void cm_witness_create(cm_witness *witness);
/* After the fork, in the parent: from now on only children have the page. */
void cm_witness_leave(cm_witness *witness);
/* After the fork, in the child: keep the page for good, but close the file. */
void cm_witness_inherit(cm_witness *witness);
/* In the parent: true if no process has the page any more. Once true, it stays true. */
bool cm_witness_is_over(const cm_witness *witness);
/* Close the file of the witness. cm_witness_is_over() is false from then on. */
void cm_witness_close(cm_witness *witness);
