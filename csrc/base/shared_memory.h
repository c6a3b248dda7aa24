/* SPDX-License-Identifier: Apache-2.0 */
/* Shares memory among processes. Any process of the same user and machine opens the
 * memory by its name. The memory goes back to the system with its last user, however
 * that user ends.
 *
 * The idea
 * --------
 * The bytes are a memfd, a file without a place in any folder, which the kernel frees
 * as soon as no process has it. Its size is sealed, so that no process can shorten the
 * memory under the others. A memfd has no name by which it could be opened. So a small
 * file in a private folder, the note, says which process has the memfd, and by which
 * number. Another process then opens /proc/PID/fd/NUMBER, which is the memfd itself.
 * The kernel allows that to processes that may read each other's memory: those of one
 * user, in one namespace of processes, that have not forbidden this (prctl(2),
 * PR_SET_DUMPABLE). Nobody has to answer, so no user needs a thread or a socket for it.
 *
 * The note has two bytes on which processes take locks. The kernel releases a lock when
 * the last descriptor of the open file that has it is closed, also by SIGKILL.
 *
 *   - Byte 0, the gate, is locked for writing by whoever opens or ends the memory.
 *     While a process makes and populates it, others wait here.
 *   - Byte 1, the users, is locked for reading by each user. The next process asks
 *     whether it could lock this byte for writing, which is possible only if no user is
 *     left. So it finds out whether there are users.
 *
 * Example: A opens "kv", which nobody has. It takes the gate, makes the memfd,
 * populates it, writes the note, locks the users and leaves the gate. B takes the gate,
 * sees that there are users, reads in the note that A has the memfd as descriptor 5,
 * and opens it. If A is killed while it populates, the gate opens for B without a user
 * behind it, and B begins anew. If A ends later, C finds that the note is out of date.
 * It then looks through /proc for a process that has the memfd, which is B.
 *
 * Edges
 * -----
 * The name of a memfd is no more than a text, which /proc shows. It contains a random
 * token, so that a descriptor that was closed and given to another file, or a process
 * number that was used again, is not taken for the memfd.
 *
 * A forked child inherits the mapping, and the lock of the users with it. So it counts
 * as a user as long as it keeps its descriptors. If another thread had a gate at the
 * fork, the child closes that gate, since the thread does not exist in the child and
 * would never leave. The child also drops memory that such a thread was populating,
 * since nobody but the parent can finish that.
 *
 * The note is unlinked by the last user. After SIGKILL it stays, holds no memory, and
 * is used again by the next process that opens the name.
 *
 * Locks: none that a caller could meet. */
#pragma once

#include "base/status.h"

typedef struct cm_shared_memory cm_shared_memory;

enum {
    CM_SHARED_NAME_NBYTES = 200,  /* the longest name, without the zero at its end */
    CM_SHARED_FORM_NBYTES = 4000, /* the longest form, with the zero at its end */
};

/* Distinguishes one memory from all others that had the same name before it, or will
 * have it afterwards. */
typedef struct cm_shared_token {
    uint64_t words[2];
} cm_shared_token;

typedef struct cm_shared_request {
    const char *name; /* UTF-8 without '/' */
    uint64_t nbytes;
    /* What the bytes are, as a text that must be the same for all users. Borrowed. */
    const char *form;
    /* If this call makes the memory, the memory must come from this node.
     * CM_NUMA_NO_NODE means any node. */
    int numa_node;
    /* Open the memory that has this token and no other, or else fail. If this is NULL,
     * any memory of the name will do, and it is made if nobody has it. */
    const cm_shared_token *token;
} cm_shared_request;

/* Open the memory, or make and populate it with all threads if nobody has it. After
 * CM_ESHAPE `found_form` is the form under which the name is in use.
 * Blocks: while another process makes or opens the memory of this name.
 * Fails:  CM_ESHAPE if the name is in use with another form or size; CM_ECLOSED if the
 *         memory of the token is gone; CM_EBUSY if the memory has users, but none from
 *         which this process may take it; CM_EHOSTMEMORY with the bytes that can be
 *         had; CM_ENOMEM; CM_EINVALID if the name is not valid, or there is no such
 *         node; CM_ENUMA if the memory came from another node; CM_ECANCELLED if a
 *         signal came while it waited; CM_ESYSTEM with the errno, which is EPERM if the
 *         folder of the notes belongs to another user. */
CM_NODISCARD cm_status cm_shared_open(const cm_shared_request *request,
                                      char found_form[CM_SHARED_FORM_NBYTES],
                                      cm_shared_memory **out);
cm_shared_memory *cm_shared_hold(cm_shared_memory *memory);
/* Drop a reference. The last one unmaps the memory, and unlinks the note if no other
 * process has the memory. */
void cm_shared_release(cm_shared_memory *memory);

char *cm_shared_host(const cm_shared_memory *memory);
uint64_t cm_shared_nbytes(const cm_shared_memory *memory);
const char *cm_shared_name(const cm_shared_memory *memory);
const char *cm_shared_form(const cm_shared_memory *memory);
cm_shared_token cm_shared_token_of(const cm_shared_memory *memory);
