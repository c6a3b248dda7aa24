/* SPDX-License-Identifier: Apache-2.0 */
/* DLPack capsules over buffers. What a capsule owns is plain C: its deleter may run in
 * any thread, without the GIL, and after the interpreter has ended. */
#include <stdlib.h>

#include "base/checked_math.h"
#include "python/protocols/dlpack.h"

/* What a capsule owns. */
typedef struct export {
    cm_storage *storage; /* held, counted as an export */
    union {
        cm_dl_legacy legacy;
        cm_dl_versioned versioned;
    } managed;
    int64_t extents[]; /* shape, then strides in elements; never empty */
} export;

static void
export_destroy(export *self)
{
    cm_storage_drop_export(self->storage);
    free(self);
}

static void
delete_legacy(cm_dl_legacy *managed)
{
    export_destroy(managed->context);
}

static void
delete_versioned(cm_dl_versioned *managed)
{
    export_destroy(managed->context);
}

/* A capsule that nobody consumed still owns its tensor; a used one has another name. */
static void
destroy_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, CM_DL_LEGACY_NAME)) {
        cm_dl_legacy *managed = PyCapsule_GetPointer(capsule, CM_DL_LEGACY_NAME);
        managed->deleter(managed);
    }
    else if (PyCapsule_IsValid(capsule, CM_DL_VERSIONED_NAME)) {
        cm_dl_versioned *managed = PyCapsule_GetPointer(capsule, CM_DL_VERSIONED_NAME);
        managed->deleter(managed);
    }
}

/* Shape, and strides in elements. 0, or -1 with BufferError. */
static int
fill_extents(const cm_buffer *buffer, int64_t *extents)
{
    int64_t *steps = extents + buffer->ndim;
    bool empty = cm_buffer_nbytes(buffer) == 0;
    int64_t dense = 1;
    for (int i = buffer->ndim - 1; i >= 0; i--) {
        int64_t length = cm_buffer_shape(buffer)[i];
        int64_t step = cm_buffer_strides(buffer)[i];
        extents[i] = length;
        if (empty || length == 1) {
            steps[i] = dense; /* never stepped by */
        }
        else if (step < 0) {
            PyErr_SetString(
                PyExc_BufferError,
                "DLPack export of negative strides: PyTorch ends the process "
                "over them; hand over copy() of this view, or the buffer "
                "before it is reversed");
            return -1;
        }
        else if (step % buffer->itemsize == 0) {
            steps[i] = step / buffer->itemsize;
        }
        else {
            PyErr_Format(
                PyExc_BufferError,
                "DLPack counts strides in elements: %lld bytes are no multiple of "
                "the itemsize %lld",
                (long long)step, (long long)buffer->itemsize);
            return -1;
        }
        (void)cm_mul_i64(dense, length > 0 ? length : 1, &dense); /* if empty: any */
    }
    return 0;
}

/* Hold and count the storage, and describe the buffer in *tensor. */
static export *
export_new(const cm_buffer *buffer, cm_dl_dtype type, cm_dl_device device, void *data,
           cm_dl_tensor *tensor)
{
    size_t extents = 2 * (size_t)(buffer->ndim > 0 ? buffer->ndim : 1);
    export *self = calloc(1, sizeof *self + extents * sizeof *self->extents);
    if (self == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (fill_extents(buffer, self->extents) < 0) {
        free(self);
        return NULL;
    }
    tensor->data = data;
    tensor->device = device;
    tensor->ndim = buffer->ndim;
    tensor->dtype = type;
    tensor->shape = self->extents;
    tensor->strides = self->extents + buffer->ndim;
    tensor->byte_offset = 0;
    self->storage = cm_storage_hold(buffer->storage);
    cm_storage_begin_export(self->storage);
    return self;
}

PyObject *
cm_dlpack_legacy(const cm_buffer *buffer, cm_dl_dtype type, cm_dl_device device,
                 void *data)
{
    if (buffer->readonly) {
        PyErr_SetString(
            PyExc_BufferError,
            "the buffer is read-only, which DLPack before 1.0 cannot say: ask "
            "with max_version=(1, 0)");
        return NULL;
    }
    cm_dl_tensor tensor;
    export *self = export_new(buffer, type, device, data, &tensor);
    if (self == NULL) {
        return NULL;
    }
    self->managed.legacy = (cm_dl_legacy){tensor, self, delete_legacy};
    PyObject *capsule =
        PyCapsule_New(&self->managed.legacy, CM_DL_LEGACY_NAME, destroy_capsule);
    if (capsule == NULL) {
        export_destroy(self);
    }
    return capsule;
}

PyObject *
cm_dlpack_versioned(const cm_buffer *buffer, cm_dl_dtype type, cm_dl_device device,
                    void *data, uint32_t minor, bool copied)
{
    cm_dl_tensor tensor;
    export *self = export_new(buffer, type, device, data, &tensor);
    if (self == NULL) {
        return NULL;
    }
    self->managed.versioned = (cm_dl_versioned){
        .version = {CM_DL_MAJOR, minor},
        .context = self,
        .deleter = delete_versioned,
        .flags = (buffer->readonly ? CM_DL_FLAG_READ_ONLY : 0u)
                 | (copied ? CM_DL_FLAG_IS_COPIED : 0u),
        .tensor = tensor,
    };
    PyObject *capsule =
        PyCapsule_New(&self->managed.versioned, CM_DL_VERSIONED_NAME, destroy_capsule);
    if (capsule == NULL) {
        export_destroy(self);
    }
    return capsule;
}
