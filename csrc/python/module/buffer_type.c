/* SPDX-License-Identifier: Apache-2.0 */
/* The six buffer types. What a type lacks is part of its meaning: other libraries probe
 * for attributes and slots, so only memory that the host can read has the buffer
 * protocol, and only memory that a device can reach has the CUDA array interface. */
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/copy/buffer_methods.h"
#include "python/core/arguments.h"
#include "python/core/tuples.h"
#include "python/module/module.h"
#include "python/protocols/protocols.h"

/* -- attributes: of the layout on closed buffers too, of the memory not -------------- */

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

static PyGetSetDef buffer_getters[] = {
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

static PyGetSetDef mapped_getters[] = {
    GETTER(device_ptr,
           "Address of element 0 for the device, as an int; 0 if there are no\n"
           "bytes. ValueError if the buffer is closed."),
    ARRAY_INTERFACE,
    {NULL, NULL, NULL, NULL, NULL},
};

static PyGetSetDef managed_getters[] = {
    {"prefetch_location", cm_buffer_get_prefetch_location, NULL,
     cm_buffer_prefetch_location_doc, NULL},
    ARRAY_INTERFACE,
    {NULL, NULL, NULL, NULL, NULL},
};

static PyGetSetDef device_getters[] = {
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

static PyObject *
buffer_repr(PyObject *object)
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

/* -- docstrings ----------------------------------------------------------------------- */

PyDoc_STRVAR(buffer_doc,
             "Memory with a shape and a dtype, on the host or on a device.\n"
             "\n"
             "Base of the types that say by their name what the memory is. Made by\n"
             "`empty`, `zeros`, `full`, `array` and their kin, never by calling the type.\n"
             "Indexing with integers, slices, Ellipsis and None gives views that keep the\n"
             "memory alive; ``buf[index] = value`` copies. Iterating gives the views\n"
             "``buf[0]``, ``buf[1]``, …; ``in`` is refused. ``==`` is identity, so that\n"
             "buffers can be keys; compare values with ``numpy()``. Dropping a buffer never waits:\n"
             "its memory is reused when all work that cumem knows of is done with it.\n");

PyDoc_STRVAR(pinned_doc,
             "Page-locked host memory: the fast end of copies to and from devices.\n"
             "\n"
             "Has the buffer protocol, so that NumPy, torch and MPI read and write it\n"
             "without a copy.\n");

PyDoc_STRVAR(mapped_doc,
             "Page-locked host memory that devices also read and write over the bus.\n"
             "\n"
             "Has the buffer protocol for the host and the CUDA array interface for\n"
             "devices.\n");

PyDoc_STRVAR(managed_doc,
             "Unified memory: one address for host and devices, pages move on use.\n"
             "\n"
             "Has the buffer protocol for the host and the CUDA array interface for\n"
             "devices.\n");

PyDoc_STRVAR(device_doc,
             "Memory of a device, which the host cannot touch.\n"
             "\n"
             "Has the CUDA array interface and no buffer protocol.\n");

PyDoc_STRVAR(host_doc,
             "Ordinary memory that belongs to another object, from `asbuffer`.\n");

PyDoc_STRVAR(dlpack_doc,
             "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, "
             "copy=None)\n"
             "--\n"
             "\n"
             "DLPack: a capsule by which another library takes the memory over.\n"
             "\n"
             "Parameters\n"
             "----------\n"
             "stream : int, optional\n"
             "    The consumer's stream: work on it is ordered after ours and remembered.\n"
             "    -1 orders nothing.\n"
             "max_version : tuple of int, optional\n"
             "    Newest version the consumer reads; without it the old capsule is made.\n"
             "dl_device : tuple of int, optional\n"
             "    Device type and index to export to; ``(1, 0)`` is the CPU.\n"
             "copy : bool, optional\n"
             "    True always copies, False never does.\n"
             "\n"
             "Raises\n"
             "------\n"
             "BufferError\n"
             "    The export that was asked for is not possible.\n"
             "ValueError\n"
             "    An argument is wrong, or the buffer is closed.\n"
             "\n"
             "Notes\n"
             "-----\n"
             "Blocks: exports to the CPU wait for pending work; others do not.\n"
             "Ordered after: work that cumem knows of on this buffer.\n");

PyDoc_STRVAR(dlpack_device_doc,
             "__dlpack_device__($self, /)\n"
             "--\n"
             "\n"
             "DLPack: device type and index, ``(3, 0)`` for pinned and mapped, ``(13, 0)``\n"
             "for managed, ``(2, index)`` for device and ``(1, 0)`` for ordinary memory and\n"
             "on the emulated device.");

/* -- tables --------------------------------------------------------------------------- */

#define AS_METHOD(function) ((PyCFunction)(void (*)(void))(function))
#define WITH_KEYWORDS (METH_FASTCALL | METH_KEYWORDS)

static PyMethodDef buffer_methods[] = {
    {"numpy", cm_buffer_numpy, METH_NOARGS, cm_buffer_numpy_doc},
    {"to_numpy", AS_METHOD(cm_buffer_to_numpy), WITH_KEYWORDS, cm_buffer_to_numpy_doc},
    {"as_device", cm_buffer_as_device, METH_NOARGS, cm_buffer_as_device_doc},
    {"reshape", AS_METHOD(cm_buffer_reshape), WITH_KEYWORDS, cm_buffer_reshape_doc},
    {"transpose", AS_METHOD(cm_buffer_transpose), METH_FASTCALL,
     cm_buffer_transpose_doc},
    {"view", AS_METHOD(cm_buffer_view), WITH_KEYWORDS, cm_buffer_view_doc},
    {"fill", AS_METHOD(cm_buffer_fill), WITH_KEYWORDS, cm_buffer_fill_doc},
    {"copy", AS_METHOD(cm_buffer_copy), WITH_KEYWORDS, cm_buffer_copy_doc},
    {"__copy__", cm_buffer_dunder_copy, METH_NOARGS, cm_buffer_dunder_copy_doc},
    {"__deepcopy__", cm_buffer_deepcopy, METH_O, cm_buffer_deepcopy_doc},
    {"__reversed__", cm_buffer_reversed, METH_NOARGS, cm_buffer_reversed_doc},
    {"record_stream", cm_buffer_record_stream, METH_O, cm_buffer_record_stream_doc},
    {"free", cm_buffer_free, METH_NOARGS, cm_buffer_free_doc},
    {"__enter__", cm_buffer_enter, METH_NOARGS, cm_buffer_enter_doc},
    {"__exit__", AS_METHOD(cm_buffer_exit), METH_FASTCALL, cm_buffer_exit_doc},
    {"__dlpack__", AS_METHOD(cm_buffer_dlpack), WITH_KEYWORDS, dlpack_doc},
    {"__dlpack_device__", cm_buffer_dlpack_device, METH_NOARGS, dlpack_device_doc},
    /* of device memory too, where it says no: without it NumPy makes an object array */
    {"__array__", AS_METHOD(cm_buffer_array), WITH_KEYWORDS, cm_buffer_array_doc},
    {"__complex__", cm_buffer_complex, METH_NOARGS, cm_buffer_complex_doc},
    {"__reduce_ex__", cm_buffer_reduce_ex, METH_O, cm_buffer_reduce_ex_doc},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef managed_methods[] = {
    {"prefetch", AS_METHOD(cm_buffer_prefetch), WITH_KEYWORDS, cm_buffer_prefetch_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(cm_buffer, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* -- specs ---------------------------------------------------------------------------- */

static PyGetSetDef no_getters[] = {{NULL, NULL, NULL, NULL, NULL}};

#define COMMON_SLOTS(doc)                                                              \
    {Py_tp_doc, (void *)(doc)}, {Py_tp_dealloc, (void *)cm_buffer_dealloc},            \
    {                                                                                  \
        Py_tp_members, members                                                         \
    }

#define HOST_SLOTS                                                                     \
    {Py_bf_getbuffer, (void *)cm_buffer_getbuffer},                                    \
    {                                                                                  \
        Py_bf_releasebuffer, (void *)cm_buffer_releasebuffer                           \
    }

static PyType_Slot buffer_slots[] = {
    COMMON_SLOTS(buffer_doc),
    {Py_tp_methods, buffer_methods},
    {Py_tp_getset, buffer_getters},
    {Py_tp_repr, (void *)buffer_repr},
    {Py_mp_subscript, (void *)cm_buffer_subscript},
    {Py_mp_ass_subscript, (void *)cm_buffer_ass_subscript},
    {Py_mp_length, (void *)cm_buffer_length},
    {Py_nb_int, (void *)cm_buffer_int},
    {Py_nb_float, (void *)cm_buffer_float},
    {Py_nb_bool, (void *)cm_buffer_bool},
    {Py_tp_iter, (void *)cm_buffer_iter},
    /* no sq_item: with it others would take a buffer for a list, element by element */
    {Py_sq_contains, (void *)cm_buffer_contains},
    {0, NULL},
};

static PyType_Slot pinned_slots[] = {
    COMMON_SLOTS(pinned_doc),
    HOST_SLOTS,
    {Py_tp_getset, no_getters},
    {0, NULL},
};

static PyType_Slot mapped_slots[] = {
    COMMON_SLOTS(mapped_doc),
    HOST_SLOTS,
    {Py_tp_getset, mapped_getters},
    {0, NULL},
};

static PyType_Slot managed_slots[] = {
    COMMON_SLOTS(managed_doc),       HOST_SLOTS, {Py_tp_methods, managed_methods},
    {Py_tp_getset, managed_getters}, {0, NULL},
};

static PyType_Slot device_slots[] = {
    COMMON_SLOTS(device_doc),
    {Py_tp_getset, device_getters},
    {0, NULL},
};

static PyType_Slot host_slots[] = {
    COMMON_SLOTS(host_doc),
    HOST_SLOTS,
    {Py_tp_getset, no_getters},
    {0, NULL},
};

#define BUFFER_FLAGS                                                                   \
    (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE)

static PyType_Spec buffer_spec = {
    .name = "cumem.Buffer",
    .basicsize = sizeof(cm_buffer),
    .flags = BUFFER_FLAGS | Py_TPFLAGS_BASETYPE, /* of the next five; it has no __new__
                                                  */
    .slots = buffer_slots,
};

#define SPEC(variable, type_name, type_slots)                                          \
    static PyType_Spec variable = {                                                    \
        .name = type_name,                                                             \
        .basicsize = sizeof(cm_buffer),                                                \
        .flags = BUFFER_FLAGS,                                                         \
        .slots = type_slots,                                                           \
    }

SPEC(pinned_spec, "cumem.PinnedBuffer", pinned_slots);
SPEC(mapped_spec, "cumem.MappedBuffer", mapped_slots);
SPEC(managed_spec, "cumem.ManagedBuffer", managed_slots);
SPEC(device_spec, "cumem.DeviceBuffer", device_slots);
SPEC(host_spec, "cumem.HostBuffer", host_slots);

/* -- registrar ------------------------------------------------------------------------ */

static int
register_type(PyObject *module, PyType_Spec *spec, PyTypeObject *base,
              PyTypeObject **out)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, (PyObject *)base);
    if (type == NULL) {
        return -1;
    }
    *out = (PyTypeObject *)type;
    return PyModule_AddType(module, *out);
}

int
cm_register_buffer_types(PyObject *module, cm_state *state)
{
    if (register_type(module, &buffer_spec, NULL, &state->buffer_type) < 0) {
        return -1;
    }
    PyTypeObject *base = state->buffer_type;
    if (register_type(module, &pinned_spec, base, &state->pinned_type) < 0
        || register_type(module, &mapped_spec, base, &state->mapped_type) < 0
        || register_type(module, &managed_spec, base, &state->managed_type) < 0
        || register_type(module, &device_spec, base, &state->device_buffer_type) < 0
        || register_type(module, &host_spec, base, &state->host_type) < 0) {
        return -1;
    }
    return 0;
}
