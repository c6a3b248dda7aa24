/* SPDX-License-Identifier: Apache-2.0 */
/* Buffer.flags tells how the memory was made, and has NumPy's flags as they are now.
 *
 * All of this fits into one number: five flags of NumPy's, and four facts about the
 * memory. The package turns the number into an object for users (a tuple of names with
 * attributes, cumem/buffers/flags.py). Such objects never change, and there are few
 * different numbers, so each object is made once and kept in a dictionary by its
 * number. After that, the getter only computes the number and looks it up. */
#include "python/buffer/methods.h"

/* The lowest bits of the number. Above them come the kind of memory and the flags that
 * the memory was made with. */
enum {
    IS_C_CONTIGUOUS = 1 << 0,
    IS_F_CONTIGUOUS = 1 << 1,
    OWNS_DATA = 1 << 2,
    IS_WRITEABLE = 1 << 3,
    IS_ALIGNED = 1 << 4,
    IS_REGISTERED = 1 << 5,
    HAS_POOL = 1 << 6,
    KIND_SHIFT = 7,
    FLAGS_SHIFT = 10,
};
_Static_assert(CM_KIND_COUNT <= 1 << (FLAGS_SHIFT - KIND_SHIFT), "a kind has 3 bits");

static bool
is_aligned(const cm_buffer *self)
{
    int64_t alignment = cm_numpy_alignment(self->dtype);
    bool has_memory = !self->storage->closed && !cm_buffer_with_ended(self);
    for (int i = 0; i < self->ndim; i++) {
        if (cm_buffer_shape(self)[i] > 1
            && cm_buffer_strides(self)[i] % alignment != 0) {
            return false;
        }
    }
    if (!has_memory) {
        return true; /* there is no address, and the strides are aligned */
    }
    uint64_t place = cm_kind_is_on_device(cm_buffer_kind(self))
                         ? cm_buffer_address(self)
                         : (uint64_t)(uintptr_t)cm_buffer_host(self);
    return place % (uint64_t)alignment == 0;
}

static unsigned long
summarize(const cm_buffer *self)
{
    const cm_storage *storage = self->storage;
    unsigned long summary = (unsigned long)storage->kind << KIND_SHIFT;
    summary |= (unsigned long)storage->flags << FLAGS_SHIFT;
    summary |= cm_buffer_is_contiguous(self, false) ? IS_C_CONTIGUOUS : 0;
    summary |= cm_buffer_is_contiguous(self, true) ? IS_F_CONTIGUOUS : 0;
    summary |= storage->pool != NULL && self->base == NULL ? OWNS_DATA : 0;
    summary |= self->readonly ? 0 : IS_WRITEABLE;
    summary |= is_aligned(self) ? IS_ALIGNED : 0;
    summary |= storage->registration != NULL ? IS_REGISTERED : 0;
    summary |= storage->pool != NULL ? HAS_POOL : 0;
    return summary;
}

static PyObject *
truth(unsigned long summary, unsigned long flag)
{
    return (summary & flag) != 0 ? Py_True : Py_False;
}

static PyObject *
make_flags(const cm_buffer *self, unsigned long summary)
{
    const cm_storage *storage = self->storage;
    return cm_package_call(
        "buffers.texts", "buffer_flags",
        Py_BuildValue("(sIOOOOOOO)", cm_kinds[storage->kind].text, storage->flags,
                      truth(summary, IS_REGISTERED), truth(summary, HAS_POOL),
                      truth(summary, IS_C_CONTIGUOUS), truth(summary, IS_F_CONTIGUOUS),
                      truth(summary, OWNS_DATA), truth(summary, IS_WRITEABLE),
                      truth(summary, IS_ALIGNED)));
}

PyObject *
cm_buffer_get_flags(PyObject *object, void *closure CM_UNUSED)
{
    const cm_buffer *self = (const cm_buffer *)object;
    PyObject **known = &self->state->known_flags;
    unsigned long summary = summarize(self);
    if (*known == NULL && (*known = PyDict_New()) == NULL) {
        return NULL;
    }
    PyObject *number = PyLong_FromUnsignedLong(summary);
    if (number == NULL) {
        return NULL;
    }
    PyObject *flags = Py_XNewRef(PyDict_GetItemWithError(*known, number));
    if (flags == NULL && !PyErr_Occurred()) {
        flags = make_flags(self, summary);
        if (flags != NULL && PyDict_SetItem(*known, number, flags) < 0) {
            Py_CLEAR(flags);
        }
    }
    Py_DECREF(number);
    return flags;
}
