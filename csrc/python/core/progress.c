/* SPDX-License-Identifier: Apache-2.0 */
/* Calls the package's bars, and callables of the user. */
#include "python/core/progress.h"

#include "python/core/arguments.h"
#include "python/core/errors.h"

int
cm_progress_open(PyObject *object, const char *title, cm_progress *out)
{
    out->tell = NULL;
    if (!cm_arg_is_given(object) || object == Py_False) {
        return 0;
    }
    out->tell = cm_package_call("buffers.progress", "begin",
                                Py_BuildValue("(Os)", object, title));
    return out->tell == NULL ? -1 : 0;
}

int
cm_progress_tell(const cm_progress *progress, uint64_t done, uint64_t total)
{
    if (progress->tell == NULL) {
        return 0;
    }
    PyObject *answer = PyObject_CallFunction(progress->tell, "KK", done, total);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

int
cm_progress_close(cm_progress *progress)
{
    cm_kept_error kept = cm_error_keep();
    int result =
        progress->tell == NULL
            ? 0
            : cm_package_do("buffers.progress", "end", PyTuple_Pack(1, progress->tell));
    Py_CLEAR(progress->tell);
    if (kept.type != NULL) {
        cm_error_restore(kept);
        result = -1;
    }
    return result;
}
