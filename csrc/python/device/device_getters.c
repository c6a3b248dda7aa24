/* SPDX-License-Identifier: Apache-2.0 */
/* What a Device tells of itself. */
#include <string.h>

#include "python/core/errors.h"
#include "python/device/device_type.h"

static int
describe(PyObject *op, cm_device_info *out)
{
    cm_device_object *self = (cm_device_object *)(void *)op;
    cm_runtime *rt = cm_device_take_runtime(self);
    if (rt == NULL) {
        return -1;
    }
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_rt_device_describe(rt, self->index, out);
    Py_END_ALLOW_THREADS
    cm_device_give_runtime(self);
    return cm_is_ok(status) ? 0 : cm_py_raise_int(self->state, status, NULL);
}

static PyObject *
device_get_index(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(((cm_device_object *)(void *)op)->index);
}

static PyObject *
device_get_name(PyObject *op, void *Py_UNUSED(closure))
{
    cm_device_info info;
    return describe(op, &info) < 0
               ? NULL
               : PyUnicode_DecodeUTF8(info.name, (Py_ssize_t)strnlen(info.name, 256),
                                      "replace");
}

static PyObject *
device_get_uuid(PyObject *op, void *Py_UNUSED(closure))
{
    static const char digits[] = "0123456789abcdef";
    cm_device_info info;
    if (describe(op, &info) < 0) {
        return NULL;
    }
    char text[64] = "GPU-";
    size_t used = 4;
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10) {
            text[used++] = '-';
        }
        text[used++] = digits[info.uuid[i] >> 4];
        text[used++] = digits[info.uuid[i] & 15];
    }
    return PyUnicode_FromStringAndSize(text, (Py_ssize_t)used);
}

static PyObject *
device_get_pci_bus_id(PyObject *op, void *Py_UNUSED(closure))
{
    cm_device_info info;
    return describe(op, &info) < 0 ? NULL : PyUnicode_FromString(info.pci_bus_id);
}

static PyObject *
device_get_total_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    cm_device_info info;
    return describe(op, &info) < 0 ? NULL
                                   : PyLong_FromUnsignedLongLong(info.total_nbytes);
}

static PyObject *
device_get_compute_capability(PyObject *op, void *Py_UNUSED(closure))
{
    enum { MAJOR = 75, MINOR = 76 }; /* as in CM_DEVICE_ATTRIBUTES */
    cm_device_object *self = (cm_device_object *)(void *)op;
    cm_runtime *rt = cm_device_take_runtime(self);
    if (rt == NULL) {
        return NULL;
    }
    int major = 0;
    int minor = 0;
    cm_status status = cm_rt_device_attribute(rt, MAJOR, self->index, &major);
    if (cm_is_ok(status)) {
        status = cm_rt_device_attribute(rt, MINOR, self->index, &minor);
    }
    cm_device_give_runtime(self);
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, NULL);
    }
    return Py_BuildValue("ii", major, minor);
}

static PyObject *
device_get_emulated(PyObject *op, void *Py_UNUSED(closure))
{
    const cm_device_object *self = (cm_device_object *)(void *)op;
    const cm_runtime *rt = cm_device_take_runtime(self);
    if (rt == NULL) {
        return NULL;
    }
    bool emulated = rt->backend == CM_BACKEND_EMULATED;
    cm_device_give_runtime(self);
    return PyBool_FromLong(emulated);
}

PyGetSetDef cm_device_getset[] = {
    {"index", device_get_index, NULL, "Number of the device, from 0.", NULL},
    {"name", device_get_name, NULL, "Name of the product.", NULL},
    {"uuid", device_get_uuid, NULL,
     "\"GPU-…\" as nvidia-smi prints it; the same in every process.", NULL},
    {"pci_bus_id", device_get_pci_bus_id, NULL, "Place on the bus: \"0000:1b:00.0\".",
     NULL},
    {"total_nbytes", device_get_total_nbytes, NULL, "Bytes of memory on the device.",
     NULL},
    {"compute_capability", device_get_compute_capability, NULL,
     "Tuple of two ints, e.g. (9, 0).", NULL},
    {"emulated", device_get_emulated, NULL, "True when it is no real GPU.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
