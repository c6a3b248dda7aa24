/* SPDX-License-Identifier: Apache-2.0 */
#include "python/core/progress.h"

#include "python/core/arguments.h"
#include "python/core/errors.h"

int
cm_progress_open(PyObject *object, const char *title, cm_progress *out)
{
    *out = (cm_progress){.tell = NULL};
    if (!cm_arg_is_given(object) || object == Py_False) {
        return 0;
    }
    if (object == Py_True) {
        out->tell = cm_package_call("progress", "Bar", Py_BuildValue("(s)", title));
        out->is_bar = true;
        return out->tell == NULL ? -1 : 0;
    }
    if (!PyCallable_Check(object)) {
        return cm_arg_refuse(object, "progress", "a bool or a callable(done, total)");
    }
    out->tell = Py_NewRef(object);
    return 0;
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
    int result = 0;
    if (progress->is_bar && progress->tell != NULL) {
        PyObject *answer = PyObject_CallMethod(progress->tell, "close", NULL);
        result = answer == NULL ? -1 : 0;
        Py_XDECREF(answer);
    }
    Py_CLEAR(progress->tell);
    if (kept.type != NULL) {
        cm_error_restore(kept);
        result = -1;
    }
    return result;
}
