/* SPDX-License-Identifier: Apache-2.0 */
/* Translates between DLPack and cumem: element types to dtypes and back, with the list
 * in base/dtypes.h, and devices to kinds of memory. If something has no counterpart, a
 * function of the Python package raises the error that says why. */
#include "python/protocols/dlpack.h"
#include "python/core/numpy_bridge.h"

int
cm_dlpack_from_dtype(PyObject *dtype, cm_dl_dtype *out)
{
    const cm_dtype_row *row = &cm_dtypes[cm_numpy_listed(dtype)];
    if (row->bits == 0 || row->code < 0) {
        return cm_package_refuse("interchange.foreign_memory", "refuse_dlpack_dtype",
                                 PyTuple_Pack(1, dtype));
    }
    *out = (cm_dl_dtype){.code = (uint8_t)row->code, .bits = row->bits, .lanes = 1};
    return 0;
}

/* Raise the error about a type that has no dtype here. `name` is its name in ml_dtypes,
 * or NULL if that package does not have it either. Always returns NULL. */
static PyObject *
refuse_type(cm_dl_dtype type, const char *name)
{
    (void)cm_package_refuse(
        "interchange.foreign_memory", "refuse_dlpack_type",
        Py_BuildValue("(iiiz)", (int)type.code, (int)type.bits, (int)type.lanes, name));
    return NULL;
}

PyObject *
cm_dlpack_to_dtype(cm_dl_dtype type)
{
    cm_dtype found =
        type.lanes == 1 ? cm_dtype_of_code(type.code, type.bits) : CM_NUMBER_NONE;
    if (found == CM_NUMBER_NONE) {
        return refuse_type(type, NULL);
    }
    PyObject *dtype = cm_numpy_dtype_listed(found);
    if (dtype == NULL
        && (PyErr_ExceptionMatches(PyExc_ImportError)
            || PyErr_ExceptionMatches(PyExc_AttributeError))) {
        PyErr_Clear();
        return refuse_type(type, cm_dtypes[found].name);
    }
    return dtype;
}

int
cm_dlpack_check_device(const cm_runtime *rt, cm_dl_device device, cm_kind *kind)
{
    int count = 1; /* how many devices of this type there are */
    *kind = CM_KIND_PAGEABLE;
    switch (device.type) {
    case CM_DL_CPU:
        break;
    case CM_DL_CUDA_HOST:
        *kind = CM_KIND_PINNED;
        break;
    case CM_DL_CUDA_MANAGED:
        *kind = CM_KIND_MANAGED;
        break;
    case CM_DL_CUDA:
        *kind = CM_KIND_DEVICE;
        count = rt->device_count;
        break;
    default:
        count = 0;
    }
    if (device.id >= 0 && device.id < count) {
        return 0;
    }
    return cm_package_refuse(
        "interchange.foreign_memory", "refuse_device",
        Py_BuildValue("(iii)", (int)device.type, (int)device.id, count));
}
