/* SPDX-License-Identifier: Apache-2.0 */
/* Calls the package's bars, and callables of the user. */
#include "python/core/progress.h"

#include "python/core/arguments.h"
#include "python/core/errors.h"

int
cm_progress_open(PyObject *object, const char *title, cm_progress *out)
{
    out->report = NULL;
    if (!cm_arg_is_given(object) || object == Py_False) {
        return 0;
    }
    out->report = cm_package_call("buffers.progress", "begin",
                                  Py_BuildValue("(Os)", object, title));
    return out->report == NULL ? -1 : 0;
}

int
cm_progress_report(const cm_progress *progress, uint64_t done, uint64_t total)
{
    if (progress->report == NULL) {
        return 0;
    }
    PyObject *answer = PyObject_CallFunction(progress->report, "KK", done, total);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

int
cm_progress_close(cm_progress *progress)
{
    cm_kept_error kept = cm_error_keep();
    int result = progress->report == NULL
                     ? 0
                     : cm_package_do("buffers.progress", "end",
                                     PyTuple_Pack(1, progress->report));
    Py_CLEAR(progress->report);
    if (kept.type != NULL) {
        cm_error_restore(kept);
        result = -1;
    }
    return result;
}
