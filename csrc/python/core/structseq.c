/* SPDX-License-Identifier: Apache-2.0 */
#include "python/core/structseq.h"

#include "docstrings.h"
#include "python/core/state.h"

#define FIELD(owner, field) {#field, CM_DOC__##owner##_##field},
#define TABLE(owner)                                                                   \
    static PyStructSequence_Field fields_of_##owner[] = {                              \
        CM_FIELDS_##owner(FIELD){NULL, NULL},                                          \
    };
CM_STRUCTSEQS(TABLE)
#undef TABLE
#undef FIELD

#define DESCRIPTION(owner)                                                             \
    {                                                                                  \
        .name = "cumem._core._" #owner,                                                \
        .doc = CM_DOC__##owner,                                                        \
        .fields = fields_of_##owner,                                                   \
        .n_in_sequence = CM_##owner##_COUNT,                                           \
    },
static PyStructSequence_Desc descriptions[] = {CM_STRUCTSEQS(DESCRIPTION)};
#undef DESCRIPTION

PyTypeObject *
cm_structseq_type(cm_state *state, cm_structseq which)
{
    PyTypeObject **type = &state->structseq_types[which];
    if (*type == NULL) {
        PyTypeObject *made = PyStructSequence_NewType(&descriptions[which]);
        if (*type == NULL) {
            *type = made;
        }
        else {
            /* a garbage collection ran code that needed the type as well */
            Py_XDECREF((PyObject *)made);
        }
    }
    return *type;
}

PyObject *
cm_structseq_new(cm_state *state, cm_structseq which, PyObject **members)
{
    int count = descriptions[which].n_in_sequence;
    PyTypeObject *type = cm_structseq_type(state, which);
    PyObject *made = type == NULL ? NULL : PyStructSequence_New(type);
    bool is_complete = made != NULL;
    for (int i = 0; i < count; i++) {
        is_complete = is_complete && members[i] != NULL;
        if (made == NULL) {
            Py_XDECREF(members[i]);
        }
        else {
            PyStructSequence_SetItem(made, i, members[i]); /* takes it over */
        }
    }
    if (!is_complete) {
        Py_CLEAR(made);
    }
    return made;
}
