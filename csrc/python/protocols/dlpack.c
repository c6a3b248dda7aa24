/* SPDX-License-Identifier: Apache-2.0 */
/* Between NumPy's dtypes and DLPack's element types. */
#include "python/protocols/dlpack.h"

#include "python/core/numpy_bridge.h"

static const struct {
    char kind;
    uint8_t code;
} plain_kinds[] = {
    {'b', CM_DL_BOOL},  {'i', CM_DL_INT},     {'u', CM_DL_UINT},
    {'f', CM_DL_FLOAT}, {'c', CM_DL_COMPLEX},
};

/* Types of the ml_dtypes package, one byte or more an element. */
static const struct {
    const char *name;
    uint8_t code;
    uint8_t bits;
} named_types[] = {
    {"bfloat16", CM_DL_BFLOAT, 16},
    {"float8_e3m4", CM_DL_FLOAT8_E3M4, 8},
    {"float8_e4m3", CM_DL_FLOAT8_E4M3, 8},
    {"float8_e4m3b11fnuz", CM_DL_FLOAT8_E4M3B11FNUZ, 8},
    {"float8_e4m3fn", CM_DL_FLOAT8_E4M3FN, 8},
    {"float8_e4m3fnuz", CM_DL_FLOAT8_E4M3FNUZ, 8},
    {"float8_e5m2", CM_DL_FLOAT8_E5M2, 8},
    {"float8_e5m2fnuz", CM_DL_FLOAT8_E5M2FNUZ, 8},
    {"float8_e8m0fnu", CM_DL_FLOAT8_E8M0FNU, 8},
    {"complex32", CM_DL_COMPLEX, 32},
};

enum {
    PLAIN_COUNT = sizeof plain_kinds / sizeof *plain_kinds,
    NAMED_COUNT = sizeof named_types / sizeof *named_types,
};

static int
refuse_dtype(PyObject *dtype, const char *why)
{
    PyErr_Format(PyExc_BufferError, "DLPack cannot describe dtype %R: %s", dtype, why);
    return -1;
}

static int
from_named(PyObject *dtype, cm_dl_dtype *out)
{
    PyObject *name = PyObject_GetAttrString(dtype, "name");
    if (name == NULL) {
        return -1;
    }
    for (size_t i = 0; i < NAMED_COUNT; i++) {
        if (PyUnicode_Check(name)
            && PyUnicode_CompareWithASCIIString(name, named_types[i].name) == 0) {
            *out = (cm_dl_dtype){named_types[i].code, named_types[i].bits, 1};
            Py_DECREF(name);
            return 0;
        }
    }
    Py_DECREF(name);
    return refuse_dtype(dtype, "it has no code for this type");
}

int
cm_dlpack_from_dtype(PyObject *dtype, cm_dl_dtype *out)
{
    cm_dtype_traits traits;
    cm_numpy_dtype_traits(dtype, &traits);
    if (traits.user) {
        return from_named(dtype, out);
    }
    if (!traits.native) {
        return refuse_dtype(dtype, "the bytes are not in this machine's order");
    }
    if (traits.extended) {
        return refuse_dtype(dtype, "extended precision has no code");
    }
    for (size_t i = 0; i < PLAIN_COUNT; i++) {
        if (plain_kinds[i].kind == traits.kind) {
            *out =
                (cm_dl_dtype){plain_kinds[i].code, (uint8_t)(traits.itemsize * 8), 1};
            return 0;
        }
    }
    if (traits.kind == 'M' || traits.kind == 'm') {
        return refuse_dtype(dtype,
                            "it has no code for times; hand over view('i8') and view "
                            "the result as this dtype again");
    }
    return refuse_dtype(dtype,
                        "only numbers and booleans have codes; view('u1') carries the "
                        "bytes");
}

static PyObject *
refuse_type(cm_dl_dtype type, const char *why)
{
    PyErr_Format(PyExc_BufferError, "DLPack element type code %d with %d bits: %s",
                 (int)type.code, (int)type.bits, why);
    return NULL;
}

static PyObject *
to_named(cm_dl_dtype type, const char *name)
{
    PyObject *module = PyImport_ImportModule("ml_dtypes");
    PyObject *scalar = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    Py_XDECREF(module);
    if (scalar == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_ImportError)
            && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return NULL;
        }
        PyErr_Clear();
        return refuse_type(type, "NumPy has this type only with the ml_dtypes package, "
                                 "which is not installed or too old");
    }
    PyObject *dtype = cm_numpy_dtype(scalar);
    Py_DECREF(scalar);
    return dtype;
}

PyObject *
cm_dlpack_to_dtype(cm_dl_dtype type)
{
    if (type.lanes != 1) {
        PyErr_Format(PyExc_BufferError, "DLPack element type has %d lanes, not 1",
                     (int)type.lanes);
        return NULL;
    }
    for (size_t i = 0; i < NAMED_COUNT; i++) {
        if (named_types[i].code == type.code && named_types[i].bits == type.bits) {
            return to_named(type, named_types[i].name);
        }
    }
    if (type.bits == 0 || type.bits % 8 != 0) {
        return refuse_type(type, "elements must fill whole bytes");
    }
    for (size_t i = 0; i < PLAIN_COUNT; i++) {
        if (plain_kinds[i].code == type.code) {
            PyObject *dtype =
                cm_numpy_dtype_of_kind(plain_kinds[i].kind, type.bits / 8);
            if (dtype != NULL || PyErr_Occurred()) {
                return dtype;
            }
        }
    }
    return refuse_type(type, "NumPy has no such type");
}
