/* SPDX-License-Identifier: Apache-2.0 */
/* Makes answers of several members that have names. A function that tells the package
 * more than one thing answers a struct sequence, as os.stat() does, so that its caller
 * reads `answer.total_nbytes` and does not have to know what stands at which position.
 *
 * cumem/_core.pyi has a class for each of these types, such as `_DeviceFacts`, with a
 * property and a docstring for each member. The build lists these classes in
 * structseqs.h (csrc/headers.py), and from that list follow the types, the text that
 * help() shows, and the numbers of the members, such as CM_DeviceFacts_total_nbytes.
 * To add a member, add it to the stub and fill it in where the answer is made. If
 * nobody fills it in, the call raises SystemError. All functions need the GIL. */
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

/* Return the type of an answer, borrowed, or NULL with an exception. A type is made
 * when it is first needed and kept in the state: to make all of them would take a tenth
 * of the time of the import. */
PyTypeObject *cm_structseq_type(struct cm_state *state, cm_structseq which);
/* Make an answer of `members`, one for each of its numbers above, and take over their
 * references. A member may be NULL if it could not be made and an exception is set.
 * Returns a new reference, or NULL with an exception. */
PyObject *cm_structseq_new(struct cm_state *state, cm_structseq which,
                           PyObject **members);
