/* SPDX-License-Identifier: Apache-2.0 */
/* What the package does for the extension, which imports none of it. */
#include "python/module/module.h"

PyDoc_STRVAR(install_doc,
"_install_hooks($module, /, *, stats, snapshot, progress, calibration)\n--\n\n"
"What makes the answers of Pool.stats() and Pool.snapshot(), makes the bar of\n"
"progress=True, and takes the figures that are kept of a device.");

static PyObject *
install_hooks(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"stats", "snapshot", "progress", "calibration", NULL};
    cm_hooks given;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOO:_install_hooks", names,
                                     &given.stats, &given.snapshot, &given.progress,
                                     &given.calibration)) {
        return NULL;
    }
    cm_state *state = cm_state_of_module(module);
    cm_hooks old = state->hooks;
    state->hooks = (cm_hooks){
        .stats = Py_NewRef(given.stats),
        .snapshot = Py_NewRef(given.snapshot),
        .progress = Py_NewRef(given.progress),
        .calibration = Py_NewRef(given.calibration),
    };
    Py_XDECREF(old.stats);
    Py_XDECREF(old.snapshot);
    Py_XDECREF(old.progress);
    Py_XDECREF(old.calibration);
    Py_RETURN_NONE;
}

PyMethodDef cm_hook_methods[] = {
    {"_install_hooks", (PyCFunction)(void (*)(void))install_hooks,
     METH_VARARGS | METH_KEYWORDS, install_doc},
    {NULL, NULL, 0, NULL},
};
