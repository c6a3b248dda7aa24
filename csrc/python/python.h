/* SPDX-License-Identifier: Apache-2.0 */
/* The one place that includes Python.h. The limited API is set by the build (see
 * setup.py); what it lacks is declared nowhere else. */
#pragma once

#include <Python.h>
#include <structmember.h> /* T_PYSSIZET and READONLY, Py_… only since 3.12 */

#include "base/array.h"
#include "base/attributes.h"
#include "base/recorder.h"

#if PY_VERSION_HEX < 0x030B0000
#    error "cumem needs Python 3.11 or newer"
#endif

/* In debug builds each function of Python's that these folders call looks first whether
 * its thread has the GIL, and ends the process with the place of the call where it has
 * not. Without the GIL such a call is a race that crashes rarely, and elsewhere: one
 * that read the current device after the GIL was given up was found only after months.
 */
#ifdef CM_DEBUG
#    include <stdio.h>
#    include <stdlib.h>
#    ifdef Py_LIMITED_API
PyAPI_FUNC(int) PyGILState_Check(void); /* there, though the limited API leaves it out
                                         */
#    endif

static inline void
cm_gil_check(const char *file, int line)
{
    if (PyGILState_Check() == 0) {
        (void)fprintf(stderr, "cumem: %s:%d calls Python without the GIL\n", file,
                      line);
        __builtin_trap();
    }
}

#    include "gil_checks.h"
/* The same for functions of ours that are for threads with the GIL: some call Python in
 * few cases alone, others change what only the GIL guards. */
#    define CM_NEEDS_GIL() cm_gil_check(__FILE__, __LINE__)
#else
#    define CM_NEEDS_GIL() ((void)0)
#endif

/* PyEval_SaveThread(): what is noted without the GIL is noted on behalf of its caller.
 */
static inline PyThreadState *
cm_gil_give(void)
{
    if (cm_recorder_is_on()) {
        (void)cm_recorder_lend_origin(cm_recorder_find_origin(UINT64_MAX - 1));
    }
    return PyEval_SaveThread();
}

static inline void
cm_gil_take(PyThreadState *thread)
{
    PyEval_RestoreThread(thread);
    if (cm_recorder_is_on()) {
        (void)cm_recorder_lend_origin((cm_event_origin){0, 0});
    }
}

/* What `call` answers, during which other threads may have the GIL. */
#define CM_WITHOUT_GIL(call)                                                           \
    __extension__({                                                                    \
        PyThreadState *cm_thread_ = cm_gil_give();                                     \
        __typeof__(call) cm_answer_ = (call);                                          \
        cm_gil_take(cm_thread_);                                                       \
        cm_answer_;                                                                    \
    })

/* Put `value`, which is taken over, in the place of what *place owns: Py_XSETREF, which
 * the limited API leaves out. */
static inline void
cm_replace(PyObject **place, PyObject *value)
{
    PyObject *old = *place;
    *place = value;
    Py_XDECREF(old);
}

/* See to it that an array of `count` items has room for one more. It begins as
 * `inside`, which has room for `inside_count` items (NULL: as nothing), and *room is 0
 * at first. Returns 0, or -1 with MemoryError. */
static inline int
cm_reserve(void *array_pointer, size_t item_nbytes, void *inside, uint32_t inside_count,
           uint32_t count, uint32_t *room)
{
    if (inside != NULL && *room == 0) {
        memcpy(array_pointer, &inside, sizeof(inside));
        *room = inside_count;
    }
    if (count < *room) {
        return 0;
    }
    uint32_t reserved =
        cm_array_reserve(array_pointer, item_nbytes, inside, count, *room);
    if (reserved == 0) {
        PyErr_NoMemory();
        return -1;
    }
    *room = reserved;
    return 0;
}

/* Append `item`, which is taken over, to a list that is being made; *list is given up,
 * and NULL, where there was none, no item, or no memory. */
static inline void
cm_append(PyObject **list, PyObject *item)
{
    if (*list != NULL && (item == NULL || PyList_Append(*list, item) < 0)) {
        Py_CLEAR(*list);
    }
    Py_XDECREF(item);
}
