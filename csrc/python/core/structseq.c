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

int
cm_structseqs_add(PyObject *module, cm_state *state)
{
    for (int which = 0; which < CM_STRUCTSEQ_COUNT; which++) {
        PyTypeObject *type = PyStructSequence_NewType(&descriptions[which]);
        state->structseq_types[which] = type;
        if (type == NULL || PyModule_AddType(module, type) < 0) {
            return -1;
        }
    }
    return 0;
}

PyObject *
cm_structseq_new(const cm_state *state, cm_structseq which, PyObject **members)
{
    int count = descriptions[which].n_in_sequence;
    PyObject *made = PyStructSequence_New(state->structseq_types[which]);
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
