/* SPDX-License-Identifier: Apache-2.0 */
/* Attributes of buffers. Those of the layout work on closed buffers too; those that
 * name memory do not. */

#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/core/arguments.h"
#include "python/core/tuples.h"
#include "python/module/module.h"
#include "python/protocols/protocols.h"

static cm_kind
visible_kind(const cm_buffer *self)
{
    return self->as_device ? CM_KIND_DEVICE : self->storage->kind;
}

static bool
is_closed(const cm_buffer *self)
{
    const cm_buffer *base = (const cm_buffer *)self->base;
    return self->deferred || self->storage->closed || (base != NULL && base->deferred);
}

static PyObject *
get_ptr(PyObject *object, void *closure CM_UNUSED)
{
    const cm_buffer *self = (const cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    if (visible_kind(self) == CM_KIND_DEVICE) {
        return PyLong_FromUnsignedLongLong(cm_buffer_address(self));
    }
    return PyLong_FromVoidPtr(cm_buffer_host(self));
}

static PyObject *
get_device_ptr(PyObject *object, void *closure CM_UNUSED)
{
    const cm_buffer *self = (const cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(cm_buffer_address(self));
}

static PyObject *
get_nbytes(PyObject *object, void *closure CM_UNUSED)
{
    return PyLong_FromUnsignedLongLong(cm_buffer_nbytes((const cm_buffer *)object));
}

static PyObject *
get_shape(PyObject *object, void *closure CM_UNUSED)
{
    const cm_buffer *self = (const cm_buffer *)object;
    return cm_tuple_from(cm_buffer_shape(self), self->ndim);
}

static PyObject *
get_strides(PyObject *object, void *closure CM_UNUSED)
{
    const cm_buffer *self = (const cm_buffer *)object;
    return cm_tuple_from(cm_buffer_strides(self), self->ndim);
}

static PyObject *
get_dtype(PyObject *object, void *closure CM_UNUSED)
{
    return Py_NewRef(((const cm_buffer *)object)->dtype);
}

static PyObject *
get_ndim(PyObject *object, void *closure CM_UNUSED)
{
    return PyLong_FromLong(((const cm_buffer *)object)->ndim);
}

static PyObject *
get_size(PyObject *object, void *closure CM_UNUSED)
{
    const cm_buffer *self = (const cm_buffer *)object;
    return PyLong_FromUnsignedLongLong(cm_buffer_nbytes(self)
                                       / (uint64_t)self->itemsize);
}

static PyObject *
get_itemsize(PyObject *object, void *closure CM_UNUSED)
{
    return PyLong_FromLongLong(((const cm_buffer *)object)->itemsize);
}

static PyObject *
get_kind(PyObject *object, void *closure CM_UNUSED)
{
    return PyUnicode_FromString(cm_kind_name(visible_kind((const cm_buffer *)object)));
}

static PyObject *
get_residency(PyObject *object, void *closure CM_UNUSED)
{
    const cm_storage *storage = ((const cm_buffer *)object)->storage;
    return PyUnicode_FromString(cm_kind_name(storage->residency));
}

static PyObject *
get_device(PyObject *object, void *closure CM_UNUSED)
{
    const cm_buffer *self = (const cm_buffer *)object;
    if (self->storage->kind == CM_KIND_PAGEABLE) {
        return Py_NewRef(Py_None);
    }
    return cm_device_object_new(self->state, self->storage->device);
}

static PyObject *
get_readonly(PyObject *object, void *closure CM_UNUSED)
{
    return PyBool_FromLong(((const cm_buffer *)object)->readonly);
}

static PyObject *
get_base(PyObject *object, void *closure CM_UNUSED)
{
    PyObject *base = ((const cm_buffer *)object)->base;
    return Py_NewRef(base == NULL ? Py_None : base);
}

static PyObject *
get_closed(PyObject *object, void *closure CM_UNUSED)
{
    return PyBool_FromLong(is_closed((const cm_buffer *)object));
}

/* How the memory was made: names of the flags that apply to its kind. */
static int
flag_names(const cm_storage *storage, const char **names)
{
    int count = 0;
    unsigned flags = storage->flags;
    if (storage->registration != NULL) {
        names[count++] = "registered";
        if ((flags & CM_REGISTER_READ_ONLY) != 0) {
            names[count++] = "read_only";
        }
    }
    else if (storage->pool == NULL || storage->kind == CM_KIND_DEVICE) {
        return 0;
    }
    else if (storage->kind == CM_KIND_MANAGED) {
        names[count++] = flags == CM_MANAGED_HOST ? "host" : "global";
    }
    else {
        if ((flags & CM_HOST_ALLOC_PORTABLE) != 0) {
            names[count++] = "portable";
        }
        if ((flags & CM_HOST_ALLOC_MAPPED) != 0) {
            names[count++] = "mapped";
        }
        if ((flags & CM_HOST_ALLOC_WRITE_COMBINED) != 0) {
            names[count++] = "write_combined";
        }
    }
    return count;
}

static PyObject *
get_flags(PyObject *object, void *closure CM_UNUSED)
{
    const char *names[4];
    int count = flag_names(((const cm_buffer *)object)->storage, names);
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple != NULL && i < count; i++) {
        PyObject *name = PyUnicode_FromString(names[i]);
        if (name == NULL || PyTuple_SetItem(tuple, i, name) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

#define GETTER(name, doc) {#name, get_##name, NULL, PyDoc_STR(doc), NULL}

PyGetSetDef cm_buffer_getters[] = {
    GETTER(
        ptr,
        "Address of element 0 as an int: the host's, on device memory the device's;\n"
        "0 if there are no bytes. ValueError if the buffer is closed."),
    GETTER(nbytes, "Bytes of all elements, without gaps between them."),
    GETTER(shape, "Lengths of the axes in elements."),
    GETTER(strides, "Steps along the axes in bytes; may be negative."),
    GETTER(dtype, "The ``numpy.dtype`` of the elements."),
    GETTER(ndim, "Number of axes."),
    GETTER(size, "Number of elements."),
    GETTER(itemsize, "Bytes of one element."),
    GETTER(kind, "What consumers may do with the memory: ``'pinned'``, ``'mapped'``,\n"
                 "``'managed'``, ``'device'`` or ``'pageable'``."),
    GETTER(residency,
           "Where copies take the bytes to be, as a name of `kind`; differs from\n"
           "`kind` after ``as_device()``."),
    GETTER(device,
           "The `Device` whose context made the memory; None for ordinary memory."),
    GETTER(readonly, "Whether writing is refused."),
    GETTER(base, "The buffer that this one is a view of, or None."),
    GETTER(flags, "How the memory was made: of ``'portable'``, ``'mapped'``,\n"
                  "``'write_combined'``, ``'global'``, ``'host'``, ``'registered'``,\n"
                  "``'read_only'`` those that apply."),
    GETTER(closed,
           "Whether `free`, the end of a with block or ``shutdown()`` closed it."),
    {"T", cm_buffer_get_transposed, NULL,
     PyDoc_STR("View with the axes reversed; see `transpose`."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(array_interface_doc,
             "CUDA array interface, version 3: a dict by which CuPy, Numba, torch and JAX\n"
             "take the memory over without a copy. AttributeError on the emulated device.");

#define ARRAY_INTERFACE                                                                \
    {"__cuda_array_interface__", cm_buffer_array_interface, NULL, array_interface_doc, \
     NULL}

PyGetSetDef cm_mapped_buffer_getters[] = {
    GETTER(device_ptr,
           "Address of element 0 for the device, as an int; 0 if there are no\n"
           "bytes. ValueError if the buffer is closed."),
    ARRAY_INTERFACE,
    {NULL, NULL, NULL, NULL, NULL},
};

PyGetSetDef cm_managed_buffer_getters[] = {
    {"prefetch_location", cm_buffer_get_prefetch_location, NULL,
     cm_buffer_prefetch_location_doc, NULL},
    ARRAY_INTERFACE,
    {NULL, NULL, NULL, NULL, NULL},
};

PyGetSetDef cm_device_buffer_getters[] = {
    ARRAY_INTERFACE,
    {NULL, NULL, NULL, NULL, NULL},
};

/* -- repr ----------------------------------------------------------------------------- */

/* ", device=0", ", device=0, emulated", ", closed" or "". */
static PyObject *
repr_tail(const cm_buffer *self)
{
    if (is_closed(self)) {
        return PyUnicode_FromString(", closed");
    }
    const char *readonly = self->readonly ? ", readonly" : "";
    if (self->storage->kind == CM_KIND_PAGEABLE) {
        return PyUnicode_FromString(readonly);
    }
    const cm_runtime *runtime = self->state->runtime;
    bool emulated = runtime != NULL && runtime->backend == CM_BACKEND_EMULATED;
    return PyUnicode_FromFormat(", device=%d%s%s", self->storage->device, readonly,
                                emulated ? ", emulated" : "");
}

PyObject *
cm_buffer_repr(PyObject *object)
{
    const cm_buffer *self = (const cm_buffer *)object;
    PyObject *name = PyType_GetName(Py_TYPE(object));
    PyObject *shape = get_shape(object, NULL);
    PyObject *tail = repr_tail(self);
    PyObject *text = NULL;
    if (name != NULL && shape != NULL && tail != NULL) {
        text = PyUnicode_FromFormat("cumem.%U(shape=%R, dtype=%S, nbytes=%llu%U)", name,
                                    shape, self->dtype,
                                    (unsigned long long)cm_buffer_nbytes(self), tail);
    }
    Py_XDECREF(tail);
    Py_XDECREF(shape);
    Py_XDECREF(name);
    return text;
}
