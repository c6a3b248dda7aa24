/* SPDX-License-Identifier: Apache-2.0 */
/* DLPack's element types as dtypes, both ways: those that NumPy itself has. The others
 * are NAMED_TYPES of cumem/interchange/foreign_memory.py. */
#include "python/protocols/dlpack.h"
#include "python/core/numpy_bridge.h"

static const struct {
    char kind;
    uint8_t code;
} plain_kinds[] = {
    {'b', CM_DL_BOOL},  {'i', CM_DL_INT},     {'u', CM_DL_UINT},
    {'f', CM_DL_FLOAT}, {'c', CM_DL_COMPLEX},
};

enum { PLAIN_COUNT = sizeof plain_kinds / sizeof *plain_kinds };

int
cm_dlpack_from_dtype(PyObject *dtype, cm_dl_dtype *out)
{
    char kind = cm_numpy_plain_kind(dtype);
    for (size_t i = 0; i < PLAIN_COUNT; i++) {
        if (plain_kinds[i].kind == kind) {
            uint8_t bits = (uint8_t)(cm_numpy_itemsize(dtype) * 8);
            *out = (cm_dl_dtype){plain_kinds[i].code, bits, 1};
            return 0;
        }
    }
    PyObject *answer = cm_package_call("interchange.foreign_memory", "find_code",
                                       PyTuple_Pack(1, dtype));
    *out = (cm_dl_dtype){.lanes = 1};
    bool found =
        answer != NULL && PyArg_ParseTuple(answer, "bb", &out->code, &out->bits);
    Py_XDECREF(answer);
    return found ? 0 : -1;
}

PyObject *
cm_dlpack_to_dtype(cm_dl_dtype type)
{
    bool plain = type.lanes == 1 && type.bits % 8 == 0;
    for (size_t i = 0; plain && i < PLAIN_COUNT; i++) {
        if (plain_kinds[i].code == type.code) {
            PyObject *dtype =
                cm_numpy_dtype_of_kind(plain_kinds[i].kind, type.bits / 8);
            if (dtype != NULL || PyErr_Occurred()) {
                return dtype;
            }
        }
    }
    return cm_package_call(
        "interchange.foreign_memory", "find_dtype",
        Py_BuildValue("(iii)", (int)type.code, (int)type.bits, (int)type.lanes));
}
