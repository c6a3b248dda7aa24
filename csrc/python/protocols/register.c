/* SPDX-License-Identifier: Apache-2.0 */
/* register(): from any object with host memory to a Registration. */
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/pool/registration.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"

#include <stdio.h>

PyDoc_STRVAR(register_doc,
"register($module, obj, *, mapped=False, read_only=None, device=None)\n--\n\n"
"Page-lock memory that exists already, in place.\n\n"
"Copies from and to it then run as fast as with `empty_pinned`. Locking costs time for\n"
"every page, so it pays for memory that is used more than once.\n\n"
"Parameters\n----------\n"
"obj : object\n"
"    Anything with the buffer protocol (NumPy arrays, ``bytearray``, ``mmap``, shared\n"
"    memory), or a CPU tensor that exports DLPack. It may be unaligned, sliced or empty.\n"
"    Of a strided one, all bytes from the first to the last element are locked.\n"
"mapped : bool\n"
"    Give a `MappedBuffer`, which kernels can reach as well.\n"
"read_only : bool, optional\n"
"    By default the buffer is read-only if `obj` is. True: a read-only buffer of anything.\n"
"    False: a writable one or an error. A mapping that may not be written is locked for\n"
"    reading only, where the device can; other pages of what is read-only are locked as\n"
"    usual.\n"
"device : Device, int or str, optional\n"
"    In whose context; the memory is locked for all devices.\n\n"
"Returns\n-------\nRegistration\n"
"    With ``buffer`` of the shape, dtype and strides of `obj`, without a copy. In a\n"
"    ``with`` block the target is that buffer, and the end unlocks it.\n\n"
"Raises\n------\n"
"TypeError\n    If `obj` has no host memory, or its items are Python objects.\n"
"ValueError\n    If the device does not exist, the shape of `obj` makes no sense, or ``read_only`` is\n"
"    False and `obj` is read-only.\n"
"CudaError\n"
"    If the memory cannot be locked, or with ``mapped`` if it was locked before in parts\n"
"    that have no common address for devices (the note says where).\n\n"
"Notes\n-----\n"
"Memory that is locked already, by this or another library, is shared and not an error.\n"
"`obj` stays alive as long as the buffer or a view of it. **Blocks** while pages are\n"
"locked, GIL released.\n\n"
"Whole pages are locked, with whatever else lies on the first and the last of them.\n"
"CUDA refuses one copy across the edge of locked pages (cudaErrorInvalidValue). cumem's\n"
"own copies go in pieces there; other libraries' do not, and a neighbour on such a page,\n"
"like a small array of the same heap, may meet that edge. Memory that begins and ends\n"
"at pages, as an ``mmap`` does, has no neighbours.");

static const char what[] = "obj";

/* What is to be registered, and what keeps it alive. */
typedef struct source {
    cm_region region;
    PyObject *dtype;     /* owned */
    PyObject *keep;      /* owned; NULL when `storage` is set */
    cm_storage *storage; /* held and exported: one of our own buffers */
    bool readonly;
} source;

/* -- reading the object ------------------------------------------------------------ */

static int
refuse(PyObject *object)
{
    return cm_arg_refuse(object, "obj",
                         "an object with host memory (buffer protocol or a DLPack CPU "
                         "tensor)");
}

/* Memory that the driver moves or that only the device has. */
static int
refuse_kind(cm_kind kind)
{
    PyErr_Format(PyExc_TypeError,
                 "obj must be host memory that stays where it is, not %s memory: that "
                 "cannot be page-locked, and copies of it need no registration",
                 cm_kind_name(kind));
    return -1;
}

static int
source_from_buffer(const cm_state *state, source *out, PyObject *object)
{
    cm_buffer *buffer = (cm_buffer *)(void *)object;
    if (cm_buffer_check_open(buffer) < 0) {
        return -1;
    }
    if (Py_TYPE(object) == state->managed_type
        || Py_TYPE(object) == state->device_buffer_type
        || buffer->storage->residency == CM_KIND_DEVICE) {
        return refuse_kind(buffer->storage->kind);
    }
    cm_buffer_region(buffer, &out->region);
    out->dtype = buffer->dtype;
    Py_INCREF(out->dtype);
    out->readonly = buffer->readonly;
    return 0;
}

/* A buffer that was imported just now: nobody else can free it. Steals `imported`. */
static int
source_from_import(const cm_state *state, source *out, PyObject *imported)
{
    if (Py_TYPE(imported) != state->host_type && Py_TYPE(imported) != state->pinned_type
        && Py_TYPE(imported) != state->mapped_type) {
        cm_kind kind = ((cm_buffer *)(void *)imported)->storage->kind;
        Py_DECREF(imported);
        return refuse_kind(kind);
    }
    if (source_from_buffer(state, out, imported) < 0) {
        Py_DECREF(imported);
        return -1;
    }
    out->keep = imported;
    return 0;
}

/* multiprocessing's SharedMemory has its memoryview in .buf: new reference, or NULL
 * without an exception when `object` is nothing of the kind. */
static PyObject *
find_shared_memory(PyObject *object)
{
    PyObject *view = PyObject_GetAttrString(object, "buf");
    if (view == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
    }
    else if (view != NULL && !PyMemoryView_Check(view)) {
        Py_CLEAR(view);
    }
    return view;
}

static PyObject *
import_host(cm_state *state, PyObject *object)
{
    PyObject *imported = cm_import_buffer(state, object);
    if (imported != Py_NotImplemented) {
        return imported;
    }
    Py_DECREF(imported);
    PyObject *view = find_shared_memory(object);
    if (view != NULL) {
        imported = cm_import_buffer(state, view);
        Py_DECREF(view);
        return imported;
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    return cm_import_dlpack(state, object, NULL, 0);
}

static int
source_init(cm_state *state, source *out, PyObject *object)
{
    if (cm_buffer_check(state, object)) {
        if (source_from_buffer(state, out, object) < 0) {
            return -1;
        }
        out->storage = cm_storage_hold(((cm_buffer *)(void *)object)->storage);
        cm_storage_begin_export(out->storage); /* so that free() refuses */
        return 0;
    }
    if (cm_numpy_is_array(object)) { /* also those whose dtype has no buffer format */
        if (cm_numpy_region(object, &out->region, &out->dtype, &out->readonly) < 0) {
            return -1;
        }
        out->keep = object;
        Py_INCREF(object);
        return 0;
    }
    PyObject *imported = import_host(state, object);
    if (imported == NULL) {
        return -1;
    }
    if (imported == Py_NotImplemented) {
        Py_DECREF(imported);
        return refuse(object);
    }
    return source_from_import(state, out, imported);
}

/* Also the storage's `foreign_drop`. */
static void
drop_storage(void *argument)
{
    cm_storage_end_export(argument);
    cm_storage_release(argument, true);
}

static void
source_fini(source *self)
{
    Py_XDECREF(self->dtype);
    Py_XDECREF(self->keep);
    if (self->storage != NULL) {
        drop_storage(self->storage);
    }
}

/* -- registering ------------------------------------------------------------------- */

/* Whether the buffer is to be read-only: 0 or 1, or -1 with an exception. */
static int
decide_read_only(PyObject *wish, bool readonly)
{
    bool read_only = readonly;
    if (wish != NULL && wish != Py_None
        && cm_arg_bool(wish, "read_only", &read_only) < 0) {
        return -1;
    }
    if (readonly && !read_only) {
        PyErr_SetString(
            PyExc_ValueError,
            "read_only=False, but obj is read-only: leave read_only out for "
            "a read-only buffer, or pass a writable object");
        return -1;
    }
    return read_only;
}

/* Can the device lock memory for reading only? Else only pages that may be written are
 * lockable, which those of a read-only object often are. 0 or 1, or -1. */
static int
can_lock_read_only(cm_state *state, int device)
{
    enum { HOST_REGISTER_READ_ONLY = 113 }; /* as in CM_DEVICE_ATTRIBUTES */
    int supported = 0;
    cm_status status = cm_rt_device_attribute(state->runtime, HOST_REGISTER_READ_ONLY,
                                              device, &supported);
    return cm_is_ok(status)
               ? supported != 0
               : cm_py_raise_int(state, status, "while registering read-only memory");
}

/* Why mapping it failed, where the driver's own words do not say. */
static int
refuse_mapping(cm_state *state, const cm_storage *storage, cm_status status)
{
    char doing[320];
    unsigned long long offset =
        (unsigned long long)(status.arg - (uint64_t)(uintptr_t)storage->host);
    if (status.code == CM_ENOTSUP) {
        (void)snprintf(
            doing, sizeof(doing),
            "while registering with mapped=True: parts of the memory were "
            "page-locked before, and from byte %llu on devices reach it by an "
            "address that does not follow on: end the earlier registration "
            "first, or register without mapped",
            offset);
    }
    else {
        (void)snprintf(
            doing, sizeof(doing),
            "while registering with mapped=True: devices have no address for "
            "the memory; whoever page-locked it before may not have mapped it");
    }
    return cm_py_raise_int(state, status, doing);
}

/* Lock what `bytes` reaches and fill `storage` in. */
static int
lock_pages(cm_state *state, cm_storage *storage, const cm_import *bytes,
           bool lock_read_only, bool mapped)
{
    storage->host = (void *)(uintptr_t)bytes->first;
    storage->nbytes = bytes->nbytes;
    storage->flags = CM_REGISTER_PORTABLE | CM_REGISTER_MAPPED;
    cm_registration *registration = NULL;
    cm_registry *registry = state->registry;
    cm_address address = 0;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_registry_register(registry, storage->device, storage->host,
                                  storage->nbytes, lock_read_only, &registration);
    if (cm_is_ok(status)) {
        status = cm_registration_device_address(registration, &address);
    }
    Py_END_ALLOW_THREADS
    storage->registration = registration; /* goes with the storage */
    if (registration != NULL && cm_registration_is_read_only(registration)) {
        storage->flags |= CM_REGISTER_READ_ONLY;
    }
    if (registration != NULL
        && (status.code == CM_ENOTSUP || status.code == CM_CUDA_INVALID_VALUE)) {
        if (mapped) {
            return refuse_mapping(state, storage, status);
        }
        status = cm_ok(); /* locked by somebody else, unmapped: copies need no address
                           */
        address = 0;
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, "while registering host memory");
    }
    storage->address = address;
    return 0;
}

/* A storage over the bytes of `from`, locked; it takes over what keeps them alive. */
static cm_storage *
make_storage(cm_state *state, source *from, const cm_import *bytes, int device,
             bool read_only, bool mapped)
{
    cm_storage *storage =
        cm_storage_new(state, mapped ? CM_KIND_MAPPED : CM_KIND_PINNED, device);
    if (storage == NULL) {
        return NULL;
    }
    storage->readonly = read_only;
    storage->foreign = from->keep;
    from->keep = NULL;
    if (from->storage != NULL) {
        storage->foreign_drop = drop_storage;
        storage->foreign_argument = from->storage;
        from->storage = NULL;
    }
    int lock_read_only = read_only ? can_lock_read_only(state, device) : 0;
    if (lock_read_only < 0
        || (bytes->nbytes > 0
            && lock_pages(state, storage, bytes, lock_read_only == 1, mapped) < 0)) {
        cm_storage_release(storage, true);
        return NULL;
    }
    return storage;
}

static PyObject *
register_source(cm_state *state, source *from, PyObject *read_only_wish, bool mapped,
                int device)
{
    cm_import bytes = {.region = from->region,
                       .data = (uint64_t)(uintptr_t)from->region.host};
    if (cm_import_measure(&bytes, what) < 0) {
        return NULL;
    }
    int read_only = decide_read_only(read_only_wish, from->readonly);
    if (read_only < 0) {
        return NULL;
    }
    cm_storage *storage =
        make_storage(state, from, &bytes, device, read_only == 1, mapped);
    if (storage == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    PyObject *buffer =
        cm_buffer_new(state, cm_buffer_type_of(state, storage->kind), storage,
                      -bytes.low, from->dtype, from->region.ndim, from->region.shape,
                      from->region.strides, storage->readonly, NULL);
    cm_storage_release(storage, true);
    if (buffer != NULL) {
        result = cm_registration_object_new(state, buffer);
        Py_DECREF(buffer);
    }
    return result;
}

static PyObject *
register_object(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    static const char *const names[] = {"obj", "mapped", "read_only", "device", NULL};
    PyObject *values[4];
    cm_state *state = cm_state_of_module(module);
    bool mapped = false;
    int device;
    if (cm_args_parse("register", args, nargs, kwnames, names, 1, 1, values) < 0
        || (values[1] != NULL && cm_arg_bool(values[1], "mapped", &mapped) < 0)
        || cm_arg_device(state, values[3], "device", &device) < 0) {
        return NULL;
    }
    source from = {.dtype = NULL};
    PyObject *result = NULL;
    cm_state_enter(state); /* reading `obj` may run its code */
    if (source_init(state, &from, values[0]) == 0) {
        result = register_source(state, &from, values[2], mapped, device);
    }
    source_fini(&from);
    cm_state_leave(state);
    return result;
}

PyMethodDef cm_registration_methods[] = {
    {"register", (PyCFunction)(void (*)(void))register_object,
     METH_FASTCALL | METH_KEYWORDS, register_doc},
    {NULL, NULL, 0, NULL},
};
