/* SPDX-License-Identifier: Apache-2.0 */
/* From a DLPack capsule to a buffer: every field is checked before it is used. */
#include "base/checked_math.h"
#include "python/core/arguments.h"
#include "python/protocols/dlpack.h"
#include "python/protocols/import.h"

static const char what[] = "DLPack tensor";

/* -- a capsule ---------------------------------------------------------------------------- */

/* A tensor that is ours until it is handed on: of a capsule, or without one. */
typedef struct opened {
    PyObject *capsule;          /* borrowed; or NULL */
    cm_dl_versioned *versioned; /* one of the two is set */
    cm_dl_legacy *legacy;
} opened;

/* False when it is no unused DLPack capsule. Renamed at once, so that whoever comes
 * next, from another thread or from code that the import runs, finds it used. */
static bool
open_capsule(PyObject *capsule, opened *out)
{
    *out = (opened){capsule, NULL, NULL};
    if (PyCapsule_IsValid(capsule, CM_DL_VERSIONED_NAME)) {
        out->versioned = PyCapsule_GetPointer(capsule, CM_DL_VERSIONED_NAME);
        return out->versioned != NULL
               && PyCapsule_SetName(capsule, CM_DL_VERSIONED_USED) == 0;
    }
    if (PyCapsule_IsValid(capsule, CM_DL_LEGACY_NAME)) {
        out->legacy = PyCapsule_GetPointer(capsule, CM_DL_LEGACY_NAME);
        return out->legacy != NULL
               && PyCapsule_SetName(capsule, CM_DL_LEGACY_USED) == 0;
    }
    return false;
}

static void
drop_versioned(void *argument)
{
    cm_dl_versioned *managed = argument;
    if (managed->deleter != NULL) {
        managed->deleter(managed);
    }
}

static void
drop_legacy(void *argument)
{
    cm_dl_legacy *managed = argument;
    if (managed->deleter != NULL) {
        managed->deleter(managed);
    }
}

/* The capsule is as it was: it still owns its tensor. */
static void
put_back(const opened *source)
{
    (void)PyCapsule_SetName(source->capsule, source->versioned != NULL
                                                 ? CM_DL_VERSIONED_NAME
                                                 : CM_DL_LEGACY_NAME);
}

/* Throw the tensor away. Keeps a pending exception. */
static void
discard(const opened *source)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (source->versioned != NULL) {
        drop_versioned(source->versioned);
    }
    else {
        drop_legacy(source->legacy);
    }
    PyErr_Restore(type, value, traceback);
}

/* -- checks ------------------------------------------------------------------------------- */

static int
refuse(const char *why)
{
    PyErr_Format(PyExc_ValueError, "%s: %s", what, why);
    return -1;
}

static int
read_extents(const cm_dl_tensor *tensor, cm_region *region)
{
    if (tensor->ndim < 0 || tensor->ndim > CM_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "%s: ndim is %d, not 0 to %d", what,
                     (int)tensor->ndim, CM_MAX_NDIM);
        return -1;
    }
    region->ndim = (int)tensor->ndim;
    if (region->ndim > 0 && tensor->shape == NULL) {
        return refuse("shape is NULL");
    }
    bool empty = false;
    for (int i = 0; i < region->ndim; i++) {
        region->shape[i] = tensor->shape[i];
        empty = empty || region->shape[i] == 0;
        if (region->shape[i] < 0) {
            PyErr_Format(PyExc_ValueError, "%s: shape[%d] is %lld", what, i,
                         (long long)region->shape[i]);
            return -1;
        }
    }
    if (tensor->strides == NULL || empty) {
        if (!cm_is_ok(cm_region_set_c_strides(region))) {
            return refuse("the number of bytes does not fit in 63 bits");
        }
        return 0;
    }
    for (int i = 0; i < region->ndim; i++) {
        if (!cm_mul_i64(tensor->strides[i], region->itemsize, &region->strides[i])) {
            PyErr_Format(
                PyExc_ValueError,
                "%s: strides[%d] is %lld elements, which is no number of bytes", what,
                i, (long long)tensor->strides[i]);
            return -1;
        }
    }
    return 0;
}

static int
read_data(const cm_dl_tensor *tensor, cm_import *import)
{
    uint64_t data = (uint64_t)(uintptr_t)tensor->data;
    if (data == 0) { /* an offset from nowhere is still nowhere */
        import->data = 0;
        return 0;
    }
    if (!cm_add_u64(data, tensor->byte_offset, &import->data)) {
        return refuse("data plus byte_offset leaves the address space");
    }
    return 0;
}

int
cm_dlpack_check_device(const cm_runtime *rt, cm_dl_device device)
{
    switch (device.type) {
    case CM_DL_CPU:
    case CM_DL_CUDA_HOST:
    case CM_DL_CUDA_MANAGED:
        if (device.id != 0) {
            PyErr_Format(PyExc_ValueError, "%s: device (%d, %d): the id must be 0",
                         what, (int)device.type, (int)device.id);
            return -1;
        }
        return 0;
    case CM_DL_CUDA:
        if (device.id < 0 || device.id >= rt->device_count) {
            PyErr_Format(
                PyExc_ValueError, "%s: device (%d, %d), but there %s %d device%s", what,
                (int)device.type, (int)device.id, rt->device_count == 1 ? "is" : "are",
                rt->device_count, rt->device_count == 1 ? "" : "s");
            return -1;
        }
        return 0;
    default:
        PyErr_Format(
            PyExc_BufferError,
            "%s: device type %d: cumem knows 1 (CPU), 2 (CUDA), 3 (pinned) and 13 "
            "(managed)",
            what, (int)device.type);
        return -1;
    }
}

/* Does what the driver says of the pointer agree with the device type? */
static int
check_claim(const cm_pointer_info *info, cm_dl_device device)
{
    bool agrees = true;
    if (device.type == CM_DL_CUDA_HOST) {
        agrees = info->kind == CM_KIND_PINNED;
    }
    else if (device.type == CM_DL_CUDA_MANAGED) {
        agrees = info->kind == CM_KIND_MANAGED;
    }
    else if (device.type == CM_DL_CUDA) {
        /* mapped and managed memory may be handed out as a device's */
        agrees = info->kind != CM_KIND_PAGEABLE;
    }
    if (!agrees) {
        PyErr_Format(PyExc_ValueError,
                     "%s: device (%d, %d), but to the driver the address is %s memory",
                     what, (int)device.type, (int)device.id, cm_kind_name(info->kind));
        return -1;
    }
    if (info->kind == CM_KIND_DEVICE && info->device != device.id) {
        PyErr_Format(PyExc_ValueError,
                     "%s: device (%d, %d), but the memory is on device %d", what,
                     (int)device.type, (int)device.id, info->device);
        return -1;
    }
    return 0;
}

static int
place(cm_state *state, cm_import *import, cm_dl_device device, uint64_t unasked)
{
    static const struct {
        int32_t type;
        cm_kind kind;
    } kinds[] = {{CM_DL_CPU, CM_KIND_PAGEABLE},
                 {CM_DL_CUDA, CM_KIND_DEVICE},
                 {CM_DL_CUDA_HOST, CM_KIND_PINNED},
                 {CM_DL_CUDA_MANAGED, CM_KIND_MANAGED}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (kinds[i].type == device.type) {
            import->kind = kinds[i].kind;
        }
    }
    import->host = device.type == CM_DL_CPU;
    if (import->nbytes <= (import->host ? unasked : 0)) {
        cm_import_place(import, NULL, device.id);
        return 0;
    }
    cm_pointer_info info;
    if (cm_import_probe(state, import, what, &info) < 0
        || check_claim(&info, device) < 0) {
        return -1;
    }
    if (device.type == CM_DL_CPU) {
        import->kind = info.kind; /* torch calls its pinned memory the CPU's */
    }
    cm_import_place(import, &info, device.id);
    return 0;
}

/* -- from a capsule to a buffer ----------------------------------------------------------- */

/* `advertised` is what __dlpack_device__ said; NULL for a bare capsule. */
static int
check_advertised(const cm_dl_device *advertised, cm_dl_device device)
{
    if (advertised == NULL || advertised->type == device.type) {
        bool moved = advertised != NULL && advertised->id != device.id;
        return moved && device.type == CM_DL_CUDA
                   ? refuse("its device is not the one that __dlpack_device__() named")
                   : 0;
    }
    /* pinned memory is commonly handed out as the CPU's */
    bool host = advertised->type == CM_DL_CUDA_HOST && device.type == CM_DL_CPU;
    bool managed = advertised->type == CM_DL_CUDA_MANAGED && device.type == CM_DL_CUDA;
    return host || managed
               ? 0
               : refuse(
                     "its device type is not the one that __dlpack_device__() named");
}

static PyObject *
import_tensor(cm_state *state, const opened *source, const cm_dl_tensor *tensor,
              uint64_t flags, const cm_dl_device *advertised, uint64_t unasked)
{
    cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL || cm_dlpack_check_device(rt, tensor->device) < 0
        || check_advertised(advertised, tensor->device) < 0) {
        return NULL;
    }
    cm_import import = {.readonly = (flags & CM_DL_FLAG_READ_ONLY) != 0};
    PyObject *dtype = cm_dlpack_to_dtype(tensor->dtype);
    if (dtype == NULL) {
        return NULL;
    }
    PyObject *buffer = NULL;
    import.dtype = dtype;
    import.region.itemsize = tensor->dtype.bits / 8;
    import.drop = source->versioned != NULL ? drop_versioned : drop_legacy;
    import.argument =
        source->versioned != NULL ? (void *)source->versioned : (void *)source->legacy;
    if (read_extents(tensor, &import.region) == 0 && read_data(tensor, &import) == 0
        && cm_import_measure(&import, what) == 0
        && place(state, &import, tensor->device, unasked) == 0) {
        buffer = cm_import_finish(state, &import);
    }
    Py_XDECREF(import.locked);
    Py_DECREF(dtype);
    return buffer;
}

static PyObject *
import_opened(cm_state *state, const opened *source, const cm_dl_device *advertised,
              uint64_t unasked)
{
    if (source->legacy != NULL) {
        return import_tensor(state, source, &source->legacy->tensor, 0, advertised,
                             unasked);
    }
    const cm_dl_versioned *managed = source->versioned;
    if (managed->version.major != CM_DL_MAJOR) { /* the rest may lie elsewhere */
        PyErr_Format(PyExc_BufferError, "%s of version %u.%u: cumem reads 1.x", what,
                     (unsigned)managed->version.major,
                     (unsigned)managed->version.minor);
        return NULL;
    }
    return import_tensor(state, source, &managed->tensor, managed->flags, advertised,
                         unasked);
}

PyObject *
cm_dlpack_import(cm_state *state, PyObject *capsule, const cm_dl_device *advertised)
{
    opened source;
    if (!open_capsule(capsule, &source)) {
        return Py_NewRef(Py_NotImplemented);
    }
    PyObject *buffer = import_opened(state, &source, advertised, 0);
    if (buffer == NULL && advertised != NULL) {
        discard(&source);
    }
    else if (buffer == NULL) {
        put_back(&source);
    }
    return buffer;
}

PyObject *
cm_dlpack_import_managed(cm_state *state, cm_dl_versioned *managed, uint64_t unasked)
{
    opened source = {.versioned = managed};
    PyObject *buffer = import_opened(state, &source, NULL, unasked);
    if (buffer == NULL) {
        discard(&source);
    }
    return buffer;
}

void
cm_dlpack_discard(cm_dl_versioned *managed)
{
    if (managed != NULL) {
        discard(&(opened){.versioned = managed});
    }
}
