/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the buffer types. What a type lacks is part of its meaning: other libraries
 * probe for attributes and slots, so only memory that the host can read has the buffer
 * protocol, and only memory that a device can reach has the CUDA array interface. */
#include "docstrings.h"
#include "python/buffer/buffer_object.h"
#include "python/buffer/managed.h"
#include "python/buffer/methods.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/core/types.h"
#include "python/module/module.h"
#include "python/protocols/protocols.h"

/* -- attributes: a closed buffer still has those of its layout --------------------- */

enum attribute {
    AT_ptr,
    AT_device_ptr,
    AT__address,
    AT_nbytes,
    AT_size,
    AT_shape,
    AT_strides,
    AT_kind,
    AT_residency,
    AT_device,
    AT_closed,
};

static PyObject *
address_of(const cm_buffer *self, bool on_device)
{
    return on_device || cm_kind_is_on_device(cm_buffer_kind(self))
               ? PyLong_FromUnsignedLongLong(cm_buffer_address(self))
               : PyLong_FromVoidPtr(cm_buffer_host(self));
}

static PyObject *
get(PyObject *object, void *attribute)
{
    const cm_buffer *self = (const cm_buffer *)object;
    const cm_storage *storage = self->storage;
    switch ((uintptr_t)attribute) {
    case AT_ptr:
    case AT_device_ptr:
        if (cm_buffer_check_open(self) < 0) {
            return NULL;
        }
        self->storage->address_was_read = true;
        return address_of(self, (uintptr_t)attribute == AT_device_ptr);
    case AT__address:
        return cm_buffer_check_there(self) < 0 ? NULL : address_of(self, false);
    case AT_nbytes:
        return PyLong_FromUnsignedLongLong(cm_buffer_nbytes(self));
    case AT_size:
        return PyLong_FromLongLong(cm_buffer_size(self));
    case AT_shape:
        return cm_tuple_from(cm_buffer_shape(self), self->ndim);
    case AT_strides:
        return cm_tuple_from(cm_buffer_strides(self), self->ndim);
    case AT_kind:
        return PyUnicode_FromString(cm_kinds[cm_buffer_kind(self)].text);
    case AT_residency:
        return PyUnicode_FromString(cm_kinds[storage->copy_kind].text);
    case AT_device:
        return cm_kind_is_pageable(storage->kind)
                   ? Py_NewRef(Py_None)
                   : cm_device_object_new(self->state, storage->device);
    default:
        return PyBool_FromLong(storage->closed || cm_buffer_with_ended(self));
    }
}

#define ATTRIBUTE(type, name)                                                          \
    {#name, get, NULL, CM_DOC_##type##_##name, (void *)AT_##name}

/* Names that users of NumPy, CuPy or PyTorch are likely to type. The error of each says
 * what to type here. They are descriptors, since a type with a __getattr__ would lose
 * the interpreter's fast access to all its attributes. */
/* clang-format off */
#define HINTS(X)                                                                       \
    X(clone) X(close) X(contiguous) X(copy_) X(cpu) X(cuda) X(data_ptr) X(detach)      \
    X(fill_) X(float) X(get) X(is_cuda) X(is_pinned) X(max) X(mean) X(min) X(numel)    \
    X(pin_memory) X(set) X(sum) X(take) X(to) X(tobytes) X(tofile) X(type) X(zero_)
#define ARITHMETIC(X)                                                                  \
    X(add) X(subtract) X(multiply) X(true_divide) X(floor_divide) X(remainder)         \
    X(matrix_multiply) X(and) X(or) X(xor) X(lshift) X(rshift)
/* clang-format on */

static PyGetSetDef buffer_getters[] = {
    ATTRIBUTE(Buffer, ptr),
    ATTRIBUTE(Buffer, _address),
    ATTRIBUTE(Buffer, nbytes),
    ATTRIBUTE(Buffer, shape),
    ATTRIBUTE(Buffer, strides),
    ATTRIBUTE(Buffer, size),
    ATTRIBUTE(Buffer, kind),
    ATTRIBUTE(Buffer, residency),
    ATTRIBUTE(Buffer, device),
    ATTRIBUTE(Buffer, closed),
    {"flags", cm_buffer_get_flags, NULL, CM_DOC_Buffer_flags, NULL},
    {"T", cm_buffer_get_transposed, NULL, CM_DOC_Buffer_T, NULL},
    HINTS(CM_HINT){NULL, NULL, NULL, NULL, NULL},
};

#define ARRAY_INTERFACE                                                                \
    {"__cuda_array_interface__", cm_buffer_array_interface, NULL,                      \
     CM_DOC_MappedBuffer___cuda_array_interface__, NULL}

static PyGetSetDef mapped_getters[] = {
    ATTRIBUTE(MappedBuffer, device_ptr),
    ARRAY_INTERFACE,
    {NULL, NULL, NULL, NULL, NULL},
};

#define ADVICE(name)                                                                   \
    {#name, cm_buffer_get_##name, cm_buffer_set_##name, CM_DOC_ManagedBuffer_##name,   \
     NULL}

static PyGetSetDef managed_getters[] = {
    {"prefetch_location", cm_buffer_get_prefetch_location, NULL,
     CM_DOC_ManagedBuffer_prefetch_location, NULL},
    ADVICE(read_mostly),
    ADVICE(preferred_location),
    ADVICE(accessed_by),
    CM_HINT(prefetch) /* the former name of prefetch_pages() */
    ARRAY_INTERFACE,
    {NULL, NULL, NULL, NULL, NULL},
};

static PyGetSetDef device_getters[] = {
    ARRAY_INTERFACE,
    {NULL, NULL, NULL, NULL, NULL},
};

/* -- slots that the package fills ------------------------------------------------------ */

#define ASK(slot, module, function, more)                                              \
    static PyObject *buffer_##slot(PyObject *object)                                   \
    {                                                                                  \
        return cm_package_call(module, function, PyTuple_Pack(2, object, more));       \
    }
ASK(unary, "buffers.hints", "refuse_arithmetic", object)

/* Ask the package for the text of repr(), or for that of str(), which shows values. */
static PyObject *
buffer_text(PyObject *object, bool with_values)
{
    const cm_state *state = ((const cm_buffer *)object)->state;
    bool is_lost = state->runtime != NULL && state->runtime->is_host_only;
    return cm_package_call("buffers.texts", "buffer_text",
                           Py_BuildValue("(ONNN)", object, PyBool_FromLong(with_values),
                                         PyBool_FromLong(cm_state_is_emulated(state)),
                                         PyBool_FromLong(is_lost)));
}

static PyObject *
buffer_repr(PyObject *object)
{
    return buffer_text(object, false);
}

static PyObject *
buffer_str(PyObject *object)
{
    return buffer_text(object, true);
}

/* List the names that can be read of the buffer now. Whether the CUDA array interface
 * is one of them depends on its memory, its strides and its dtype. The memory is not
 * there while its region sleeps, or if another library has moved it. */
static PyObject *
buffer_dir(PyObject *object, PyObject *unused CM_UNUSED)
{
    const cm_buffer *self = (const cm_buffer *)object;
    bool has_interface = cm_buffer_has_array_interface(self);
    bool is_there = cm_buffer_check_there(self) == 0;
    if (!is_there) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) { /* Ctrl-C, for example */
            return NULL;
        }
        PyErr_Clear();
    }
    return cm_package_call("interchange.listing", "list_names",
                           Py_BuildValue("(ONN)", object,
                                         PyBool_FromLong(has_interface),
                                         PyBool_FromLong(is_there)));
}

/* Ask the package for the HTML that a notebook shows. */
static PyObject *
buffer_html(PyObject *object, PyObject *unused CM_UNUSED)
{
    bool is_emulated = cm_state_is_emulated(((const cm_buffer *)object)->state);
    return cm_package_call("tools.notebook.objects", "_repr_html_",
                           Py_BuildValue("(ON)", object, PyBool_FromLong(is_emulated)));
}

/* Refuse `in`, which would otherwise compare the views one by one, by identity. */
static int
buffer_contains(PyObject *object, PyObject *value CM_UNUSED)
{
    return cm_package_refuse("buffers.views", "refuse_search", PyTuple_Pack(1, object));
}

/* Buffers do no arithmetic. The package says what to type, or answers NotImplemented so
 * that the other operand may do it. It never answers that for an operation in place,
 * since `buf += array` would then make `buf` an array. */
#define REFUSE(name)                                                                   \
    static PyObject *name(PyObject *a, PyObject *b)                                    \
    {                                                                                  \
        return cm_package_call("buffers.hints", #name, PyTuple_Pack(2, a, b));         \
    }                                                                                  \
    static PyObject *name##_power(PyObject *a, PyObject *b, PyObject *Py_UNUSED(c))    \
    {                                                                                  \
        return name(a, b);                                                             \
    }
REFUSE(refuse_arithmetic)
REFUSE(refuse_in_place)

static PyObject *
buffer_round(PyObject *object, PyObject *const *args CM_UNUSED, Py_ssize_t nargs)
{
    if (nargs > 1) {
        PyErr_Format(PyExc_TypeError, "__round__() takes at most 1 argument, not %zd",
                     nargs);
        return NULL;
    }
    return refuse_in_place(object, Py_None);
}

/* True for a number of Python's. NumPy's numbers are left to NumPy, which compares
 * elements itself. */
static bool
is_number(PyObject *object)
{
    return (PyLong_Check(object) || PyFloat_Check(object) || PyComplex_Check(object))
           && !cm_numpy_is_scalar(object);
}

/* Buffers are equal if they are the same object. A user who compares one with a number
 * means its elements, so that is refused: "not equal" would be a wrong answer that
 * nobody notices. */
static PyObject *
buffer_compare(PyObject *a, PyObject *b, int op)
{
    if (op != Py_EQ && op != Py_NE) {
        return refuse_arithmetic(a, b);
    }
    return is_number(b) ? cm_package_call("buffers.hints", "refuse_equality",
                                          PyTuple_Pack(2, a, b))
                        : Py_NewRef(Py_NotImplemented);
}

#define REFUSED(name)                                                                  \
    {Py_nb_##name, (void *)refuse_arithmetic},                                         \
        {Py_nb_inplace_##name, (void *)refuse_in_place},

/* -- tables --------------------------------------------------------------------------- */

#define KEYWORDED(name)                                                                \
    {#name, CM_METHOD(cm_buffer_##name), CM_KEYWORDS, CM_DOC_Buffer_##name}

static PyMethodDef buffer_methods[] = {
    KEYWORDED(reshape),
    KEYWORDED(transpose),
    KEYWORDED(squeeze),
    KEYWORDED(view),
    {"as_device", cm_buffer_as_device, METH_NOARGS, CM_DOC_Buffer_as_device},
    KEYWORDED(ravel),
    KEYWORDED(flatten),
    KEYWORDED(copy),
    KEYWORDED(astype),
    {"__reversed__", cm_buffer_reversed, METH_NOARGS, CM_DOC_Buffer___reversed__},
    {"__copy__", cm_buffer_copied, METH_NOARGS, CM_DOC_Buffer___copy__},
    {"__deepcopy__", cm_buffer_copied, METH_O, CM_DOC_Buffer___deepcopy__},
    {"numpy", cm_buffer_numpy, METH_NOARGS, CM_DOC_Buffer_numpy},
    {"__bytes__", cm_buffer_bytes, METH_NOARGS, CM_DOC_Buffer___bytes__},
    {"_read_by", cm_buffer_read_by, METH_O, CM_DOC_Buffer__read_by},
    KEYWORDED(to_numpy),
    KEYWORDED(fill),
    {"item", CM_METHOD(cm_buffer_item), METH_FASTCALL, CM_DOC_Buffer_item},
    {"tolist", cm_buffer_tolist, METH_NOARGS, CM_DOC_Buffer_tolist},
    /* Device buffers have this method too, though it refuses there, since without it
     * NumPy would make an array of objects. */
    {"__array__", CM_METHOD(cm_buffer_array), CM_KEYWORDS, CM_DOC_Buffer___array__},
    {"__complex__", cm_buffer_complex, METH_NOARGS, CM_DOC_Buffer___complex__},
    {"__format__", cm_buffer_format, METH_O, CM_DOC_Buffer___format__},
    {"__round__", CM_METHOD(buffer_round), METH_FASTCALL, CM_DOC_Buffer___round__},
    {"record_stream", cm_buffer_record_stream, METH_O, CM_DOC_Buffer_record_stream},
    {"keep", CM_METHOD(cm_buffer_keep), CM_KEYWORDS, CM_DOC_Buffer_keep},
    {"free", cm_buffer_free, METH_NOARGS, CM_DOC_Buffer_free},
    {"__enter__", cm_buffer_enter, METH_NOARGS, CM_DOC_Buffer___enter__},
    {"__exit__", CM_METHOD(cm_buffer_exit), METH_FASTCALL, CM_DOC_Buffer___exit__},
    {"__dlpack__", CM_METHOD(cm_buffer_dlpack), CM_KEYWORDS, CM_DOC_Buffer___dlpack__},
    {"__dlpack_device__", cm_buffer_dlpack_device, METH_NOARGS,
     CM_DOC_Buffer___dlpack_device__},
    {"__dir__", buffer_dir, METH_NOARGS, CM_DOC_Buffer___dir__},
    {"__reduce_ex__", cm_buffer_reduce_ex, METH_O, CM_DOC_Buffer___reduce_ex__},
    {"_repr_html_", buffer_html, METH_NOARGS, CM_DOC_Buffer__repr_html_},
    {NULL, NULL, 0, NULL},
};

#define STEERING(name)                                                                 \
    {#name, CM_METHOD(cm_buffer_##name), CM_KEYWORDS, CM_DOC_ManagedBuffer_##name}

static PyMethodDef managed_methods[] = {
    STEERING(prefetch_pages),
    STEERING(advise),
    STEERING(discard),
    STEERING(on),
    {"page_residency", cm_buffer_page_residency, METH_NOARGS,
     CM_DOC_ManagedBuffer_page_residency},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef buffer_members[] = {
    {"dtype", T_OBJECT, offsetof(cm_buffer, dtype), READONLY, CM_DOC_Buffer_dtype},
    {"ndim", T_INT, offsetof(cm_buffer, ndim), READONLY, CM_DOC_Buffer_ndim},
    {"itemsize", T_LONGLONG, offsetof(cm_buffer, itemsize), READONLY,
     CM_DOC_Buffer_itemsize},
    {"readonly", T_BOOL, offsetof(cm_buffer, readonly), READONLY,
     CM_DOC_Buffer_readonly},
    {"base", T_OBJECT, offsetof(cm_buffer, base), READONLY, CM_DOC_Buffer_base},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(cm_buffer, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* -- the types ------------------------------------------------------------------------ */

static PyType_Slot buffer_slots[] = {
    /* This becomes the hash of `object`, which a type with a comparison does not
     * inherit. */
    {Py_tp_hash, NULL},
    {Py_tp_doc, (void *)CM_DOC_Buffer},
    {Py_tp_dealloc, (void *)cm_buffer_dealloc},
    {Py_tp_members, buffer_members},
    {Py_tp_methods, buffer_methods},
    {Py_tp_getset, buffer_getters},
    {Py_tp_repr, (void *)buffer_repr},
    {Py_tp_str, (void *)buffer_str},
    {Py_mp_subscript, (void *)cm_buffer_subscript},
    {Py_mp_ass_subscript, (void *)cm_buffer_ass_subscript},
    {Py_mp_length, (void *)cm_buffer_length},
    /* Without int and float Python would read the bytes of a buffer as digits. */
    {Py_nb_int, (void *)cm_buffer_int},
    {Py_nb_float, (void *)cm_buffer_float},
    {Py_nb_bool, (void *)cm_buffer_bool},
    {Py_tp_iter, (void *)cm_buffer_iter},
    ARITHMETIC(REFUSED){Py_nb_divmod, (void *)refuse_arithmetic},
    {Py_nb_power, (void *)refuse_arithmetic_power},
    {Py_nb_inplace_power, (void *)refuse_in_place_power},
    {Py_nb_negative, (void *)buffer_unary},
    {Py_nb_positive, (void *)buffer_unary},
    {Py_nb_absolute, (void *)buffer_unary},
    {Py_nb_invert, (void *)buffer_unary},
    {Py_tp_richcompare, (void *)buffer_compare},
    /* There is no sq_item: with it others would take a buffer for a list, element by
     * element. */
    {Py_sq_contains, (void *)buffer_contains},
    {0, NULL},
};

int
cm_register_buffer_types(PyObject *module, cm_state *state)
{
    static PyGetSetDef no_getters[] = {{NULL, NULL, NULL, NULL, NULL}};
    static PyMethodDef no_methods[] = {{NULL, NULL, 0, NULL}};
    static const struct {
        const char *name;
        const char *doc;
        PyGetSetDef *getters;
        PyMethodDef *methods;
    } types[CM_KIND_COUNT] = {
        [CM_KIND_PAGEABLE] = {"cumem.HostBuffer", CM_DOC_HostBuffer, no_getters,
                              no_methods},
        [CM_KIND_PINNED] = {"cumem.PinnedBuffer", CM_DOC_PinnedBuffer, no_getters,
                            no_methods},
        [CM_KIND_MAPPED] = {"cumem.MappedBuffer", CM_DOC_MappedBuffer, mapped_getters,
                            no_methods},
        [CM_KIND_MANAGED] = {"cumem.ManagedBuffer", CM_DOC_ManagedBuffer,
                             managed_getters, managed_methods},
        [CM_KIND_DEVICE] = {"cumem.DeviceBuffer", CM_DOC_DeviceBuffer, device_getters,
                            no_methods},
    };
    unsigned flags = Py_TPFLAGS_DISALLOW_INSTANTIATION;
    buffer_slots[0].pfunc = PyType_GetSlot(&PyBaseObject_Type, Py_tp_hash);
    if (cm_register_rows_type(module, state) < 0
        || cm_register_managed_block_type(module, state) < 0) {
        return -1;
    }
    int result = cm_type_add(module, "cumem.Buffer", sizeof(cm_buffer),
                             flags | Py_TPFLAGS_BASETYPE, buffer_slots, NULL,
                             &state->buffer_type);
    for (int kind = 0; result == 0 && kind < CM_KIND_COUNT; kind++) {
        PyType_Slot slots[] = {
            {Py_tp_doc, (void *)types[kind].doc},
            {Py_tp_dealloc, (void *)cm_buffer_dealloc},
            {Py_tp_getset, types[kind].getters},
            {Py_tp_methods, types[kind].methods},
            {Py_bf_getbuffer, (void *)cm_buffer_getbuffer},
            {Py_bf_releasebuffer, (void *)cm_buffer_releasebuffer},
            {0, NULL},
        };
        if (cm_kind_is_on_device((cm_kind)kind)) {
            slots[4].slot = 0; /* the host cannot read this memory */
        }
        PyTypeObject **type = &state->buffer_types[kind];
        result = cm_type_add(module, types[kind].name, sizeof(cm_buffer), flags, slots,
                             state->buffer_type, type);
        result = result < 0 ? -1 : cm_dlpack_add_exchange(*type);
    }
    return result;
}
