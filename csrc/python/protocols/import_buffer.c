/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers over NumPy arrays and over anything with the buffer protocol, which NumPy
 * reads for us: it knows every format. */
#include "python/core/numpy_bridge.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"

PyObject *
cm_import_array(cm_state *state, PyObject *array)
{
    static const char what[] = "array";
    cm_import import = {.kind = CM_KIND_PAGEABLE, .host = true, .foreign = array};
    PyObject *dtype;
    if (cm_numpy_region(array, &import.region, &dtype, &import.readonly) < 0) {
        return NULL;
    }
    PyObject *buffer = NULL;
    cm_pointer_info info;
    import.dtype = dtype;
    import.data = (uint64_t)(uintptr_t)import.region.host;
    if (cm_import_measure(&import, what) == 0
        && (import.nbytes == 0 || cm_import_probe(state, &import, what, &info) == 0)) {
        if (import.nbytes > 0) {
            import.kind = info.kind;
        }
        cm_import_place(&import, import.nbytes > 0 ? &info : NULL, -1);
        buffer = cm_import_finish(state, &import);
    }
    Py_XDECREF(import.locked);
    Py_DECREF(dtype);
    return buffer;
}

/* Memory behind pointers (PIL-style suboffsets) is not one piece. */
static int
check_suboffsets(PyObject *view)
{
    PyObject *suboffsets = PyObject_GetAttrString(view, "suboffsets");
    if (suboffsets == NULL) {
        return -1;
    }
    Py_ssize_t count = PyObject_Size(suboffsets);
    Py_DECREF(suboffsets);
    if (count > 0) {
        PyErr_SetString(PyExc_BufferError,
                        "a buffer with suboffsets is not one piece of memory");
    }
    return count == 0 ? 0 : -1;
}

PyObject *
cm_import_buffer(cm_state *state, PyObject *object)
{
    if (!PyObject_CheckBuffer(object)) {
        return Py_NewRef(Py_NotImplemented);
    }
    PyObject *view = PyMemoryView_FromObject(object);
    if (view == NULL) {
        return NULL;
    }
    PyObject *array = NULL;
    if (check_suboffsets(view) == 0) {
        array = cm_numpy_as_array(view, NULL); /* holds the view, and so the export */
    }
    Py_DECREF(view);
    if (array == NULL) {
        return NULL;
    }
    PyObject *buffer = cm_import_array(state, array);
    Py_DECREF(array);
    return buffer;
}
