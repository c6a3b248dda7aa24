/* SPDX-License-Identifier: Apache-2.0 */
/* Dtypes as the package reads them: the list of base/dtypes.h, which is
 * `_core._DTYPES`, and whatever a user gives for a dtype. */
#include "docstrings.h"
#include "python/core/numpy_bridge.h"
#include "python/module/module.h"

enum { FIELD_COUNT = 9 };

static PyStructSequence_Field fields[FIELD_COUNT + 1] = {
    {"name", "What NumPy calls it, or ml_dtypes where NumPy has no such dtype."},
    {"kind", "numpy.dtype.kind, or an empty text where NumPy has no such dtype."},
    {"bits", "Of one element."},
    {"dlpack_code", "DLPack's type code, or None."},
    {"file_name", "What safetensors files call it, or None."},
    {"file_rank", "Tensors of types of higher ranks come first in such files."},
    {"torch_name", "What PyTorch calls it, or None."},
    {"converts", "Whether the copy threads convert its elements themselves."},
    {"scales", "Whether scale= and offset= may be given for it."},
    {NULL, NULL},
};

static PyStructSequence_Desc description = {
    .name = "cumem._core._Dtype",
    .doc = CM_DOC__Dtype,
    .fields = fields,
    .n_in_sequence = FIELD_COUNT,
};

static PyObject *
text_or_none(const char *text)
{
    return text == NULL ? Py_NewRef(Py_None) : PyUnicode_FromString(text);
}

static PyObject *
make_row(PyTypeObject *type, cm_dtype dtype)
{
    const cm_dtype_row *row = &cm_dtypes[dtype];
    bool is_number = dtype < CM_NUMBER_COUNT;
    bool is_complex = row->class_of == CM_CLASS_COMPLEX;
    PyObject *made = PyStructSequence_New(type);
    if (made == NULL) {
        return NULL;
    }
    PyObject *values[FIELD_COUNT] = {
        PyUnicode_FromString(row->name),
        PyUnicode_FromStringAndSize(&row->kind, row->kind != 0),
        PyLong_FromLong(row->bits),
        row->code < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(row->code),
        text_or_none(row->file),
        PyLong_FromLong(row->rank),
        text_or_none(row->torch),
        PyBool_FromLong(is_number),
        PyBool_FromLong(is_number && !is_complex),
    };
    for (int i = 0; i < FIELD_COUNT; i++) {
        PyStructSequence_SetItem(made, i, values[i]); /* takes it over, NULL too */
    }
    if (PyErr_Occurred()) {
        Py_CLEAR(made);
    }
    return made;
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
    PyTypeObject *type = PyStructSequence_NewType(&description);
    PyObject *rows = PyDict_New();
    int result = type == NULL || rows == NULL ? -1 : PyModule_AddType(module, type);
    for (int dtype = CM_NUMBER_NONE + 1; dtype < CM_DTYPE_COUNT && result == 0;
         dtype++) {
        PyObject *row = make_row(type, (cm_dtype)dtype);
        result =
            row == NULL ? -1 : PyDict_SetItemString(rows, cm_dtypes[dtype].name, row);
        Py_XDECREF(row);
    }
    if (result == 0) {
        result = PyModule_AddObjectRef(module, "_DTYPES", rows);
    }
    Py_XDECREF(rows);
    Py_XDECREF((PyObject *)type);
    return result;
}
