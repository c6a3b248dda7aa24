/* SPDX-License-Identifier: Apache-2.0 */
/* Answers of several members that have names. A function that tells the package more
 * than one thing answers a struct sequence, as os.stat() does: its caller reads
 * `answer.total_nbytes` and does not have to know what stands at which position.
 *
 * cumem/_core.pyi has a class for each of these types, `_DeviceFacts` for example, with
 * a property and a docstring for each member. csrc/headers.py lists these classes in
 * structseqs.h, and all else follows from that list: the types here, the number
 * CM_DeviceFacts_total_nbytes of each member, and what help() shows. So a member is
 * added in the stub and filled in where the answer is made; one that is in the stub and
 * not filled in fails the call. All functions need the GIL. */
#pragma once

#include "python/python.h"
#include "structseqs.h"

struct cm_state;

#define CM_STRUCTSEQ(owner) CM_STRUCTSEQ_##owner,
typedef enum cm_structseq {
    CM_STRUCTSEQS(CM_STRUCTSEQ) CM_STRUCTSEQ_COUNT,
} cm_structseq;
#undef CM_STRUCTSEQ

#define CM_FIELD(owner, field) CM_##owner##_##field,
#define CM_FIELDS(owner) enum { CM_FIELDS_##owner(CM_FIELD) CM_##owner##_COUNT };
CM_STRUCTSEQS(CM_FIELDS)
#undef CM_FIELDS
#undef CM_FIELD

/* Make the types, keep them in the state and add them to the module. 0, or -1 with an
 * exception. */
int cm_structseqs_add(PyObject *module, struct cm_state *state);
/* Make an answer of these members, one for each number above, which this takes over.
 * One that is NULL could not be made, with the exception set. A new reference, or NULL
 * with an exception. */
PyObject *cm_structseq_new(const struct cm_state *state, cm_structseq which,
                           PyObject **members);
