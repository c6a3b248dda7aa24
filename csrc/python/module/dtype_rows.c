/* SPDX-License-Identifier: Apache-2.0 */
/* Gives the package the list of base/dtypes.h as `_core._DTYPES`, and reads objects
 * that users pass as dtypes. */
#include "docstrings.h"
#include "python/core/numpy_bridge.h"
#include "python/core/structseq.h"
#include "python/module/module.h"

static PyObject *
text_or_none(const char *text)
{
    return text == NULL ? Py_NewRef(Py_None) : PyUnicode_FromString(text);
}

static PyObject *
make_row(cm_state *state, cm_dtype dtype)
{
    const cm_dtype_row *row = &cm_dtypes[dtype];
    bool is_number = dtype < CM_NUMBER_COUNT;
    bool is_complex = row->class_of == CM_CLASS_COMPLEX;
    PyObject *members[CM_Dtype_COUNT] = {
        [CM_Dtype_name] = PyUnicode_FromString(row->name),
        [CM_Dtype_kind] = PyUnicode_FromStringAndSize(&row->kind, row->kind != 0),
        [CM_Dtype_bits] = PyLong_FromLong(row->bits),
        [CM_Dtype_dlpack_code] =
            row->code < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(row->code),
        [CM_Dtype_file_name] = text_or_none(row->file),
        [CM_Dtype_file_rank] = PyLong_FromLong(row->rank),
        [CM_Dtype_torch_name] = text_or_none(row->torch),
        [CM_Dtype_converts] = PyBool_FromLong(is_number),
        [CM_Dtype_scales] = PyBool_FromLong(is_number && !is_complex),
    };
    return cm_structseq_new(state, CM_STRUCTSEQ_Dtype, members);
}

static PyObject *
read_dtype(PyObject *module CM_UNUSED, PyObject *object)
{
    return cm_numpy_read_dtype(object);
}

PyMethodDef cm_dtype_methods[] = {
    {"_read_dtype", read_dtype, METH_O, CM_DOC__read_dtype},
    {NULL, NULL, 0, NULL},
};

int
cm_add_dtypes(PyObject *module)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *rows = PyDict_New();
    int result = rows == NULL ? -1 : 0;
    for (int dtype = CM_NUMBER_NONE + 1; dtype < CM_DTYPE_COUNT && result == 0;
         dtype++) {
        PyObject *row = make_row(state, (cm_dtype)dtype);
        result =
            row == NULL ? -1 : PyDict_SetItemString(rows, cm_dtypes[dtype].name, row);
        Py_XDECREF(row);
    }
    if (result == 0) {
        result = PyModule_AddObjectRef(module, "_DTYPES", rows);
    }
    Py_XDECREF(rows);
    return result;
}
