/* SPDX-License-Identifier: Apache-2.0 */
/* This is the only file that includes Python.h. The build chooses the limited API (see
 * setup.py), and no other file declares what that API lacks. */
#pragma once

#include <Python.h>
#include <structmember.h> /* T_PYSSIZET and READONLY, Py_… only since 3.12 */

#include "base/array.h"
#include "base/attributes.h"
#include "base/recorder.h"

#if PY_VERSION_HEX < 0x030B0000
#    error "cumem needs Python 3.11 or newer"
#endif

/* In debug builds each call of a Python function from these folders first checks that
 * its thread has the GIL. If it does not, the process ends with a message that names
 * the place of the call. In other builds such a call is a race, which crashes rarely,
 * and then somewhere else: a call that read the current device without the GIL was
 * found only after months. */
#ifdef CM_DEBUG
#    include <stdio.h>
#    include <stdlib.h>
#    ifdef Py_LIMITED_API
PyAPI_FUNC(int) PyGILState_Check(void); /* exported, though the limited API leaves it
                                           out */
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
/* Makes the same check in a function of ours that needs the GIL even though it may not
 * call Python: some do so only in rare cases, and others change data that only the GIL
 * guards. */
#    define CM_NEEDS_GIL() cm_gil_check(__FILE__, __LINE__)
#else
#    define CM_NEEDS_GIL() ((void)0)
#endif

/* Give up the GIL by PyEval_SaveThread(). Events that this thread notes without the GIL
 * are noted on behalf of the Python code that calls us. */
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

/* Make `call` without the GIL, so that other threads may have it meanwhile, and return
 * the answer. */
#define CM_WITHOUT_GIL(call)                                                           \
    __extension__({                                                                    \
        PyThreadState *cm_thread_ = cm_gil_give();                                     \
        __typeof__(call) cm_answer_ = (call);                                          \
        cm_gil_take(cm_thread_);                                                       \
        cm_answer_;                                                                    \
    })

/* Drop what *place owns, and let it own `value` instead, whose reference is taken over.
 * This is Py_XSETREF, which the limited API leaves out. */
static inline void
cm_replace(PyObject **place, PyObject *value)
{
    PyObject *old = *place;
    *place = value;
    Py_XDECREF(old);
}

/* Make sure that an array of `count` items has room for one more. The array begins as
 * `inside`, which has room for `inside_count` items, or as nothing if that is NULL.
 * *room must be 0 at first. Returns 0, or -1 with MemoryError. */
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

/* Append `item`, whose reference is taken over, to a list that is being made. If there
 * is no item or no memory the list is dropped, and *list is NULL. So a caller can go on
 * after a failure and look at *list once at the end. */
static inline void
cm_append(PyObject **list, PyObject *item)
{
    if (*list != NULL && (item == NULL || PyList_Append(*list, item) < 0)) {
        Py_CLEAR(*list);
    }
    Py_XDECREF(item);
}
