/* SPDX-License-Identifier: Apache-2.0 */
/* DLPack as a consumer speaks it: ask an object for a tensor that is ready on our
 * stream, by __dlpack__() or the C exchange API, and make a buffer of it. */
#include <string.h>

#include "base/checked_math.h"
#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/protocols/dlpack.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"

/* -- which stream the data is wanted on, and what it waits for ---------------------- */

/* Let `stream` wait for the exporter's. 0, or -1 with CudaError. */
static int
follow_handle(cm_state *state, cm_stream *stream, uint64_t handle)
{
    cm_status status;
    cm_stream *theirs;
    Py_BEGIN_ALLOW_THREADS
    status =
        cm_stream_wrap(stream->rt, stream->device,
                       handle == 0 ? CM_STREAM_LEGACY : handle, NULL, NULL, &theirs);
    if (cm_is_ok(status)) {
        status = cm_stream_follow(stream, theirs);
        cm_stream_release(theirs);
    }
    Py_END_ALLOW_THREADS
    return cm_is_ok(status) ? 0
                            : cm_py_raise_int(state, status, "while importing DLPack");
}

/* The stream that the data is wanted on: `given`, or that device's default; *out is
 * NULL for memory that the CPU reads. Give it back. 0, or -1 with an exception. */
static int
choose_stream(cm_state *state, cm_dl_device device, cm_stream *given, cm_stream **out)
{
    *out = NULL;
    if (device.type != CM_DL_CUDA && device.type != CM_DL_CUDA_MANAGED) {
        return 0;
    }
    int where = device.type == CM_DL_CUDA ? device.id : -1;
    if (given != NULL && (where < 0 || given->device == where)) {
        *out = cm_stream_take(state, given);
        return 0;
    }
    /* a stream of another device says nothing to the exporter: one of its own goes
     * between */
    *out = cm_stream_from_object(state, Py_None, where);
    return *out == NULL ? -1 : 0;
}

/* What was ordered on `stream`, of the exporter's device, also comes before the stream
 * asked for. 0, or -1 with an exception. */
static int
pass_on(cm_state *state, PyObject *buffer, cm_stream *given, cm_stream *stream)
{
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_stream_follow(given, stream);
    Py_END_ALLOW_THREADS
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, "while importing DLPack");
    }
    return cm_storage_add_lasting_use(((cm_buffer *)(void *)buffer)->storage, given);
}

/* Let the work on `given`, or on the device's default stream (NULL), and with it the
 * buffer, come after what the exporter's stream `handle` of that device was given.
 * 0, or -1 with an exception. */
static int
follow(cm_state *state, PyObject *buffer, cm_dl_device device, cm_stream *given,
       uint64_t handle)
{
    cm_stream *stream;
    if (choose_stream(state, device, given, &stream) < 0) {
        return -1;
    }
    if (stream == NULL) {
        return 0;
    }
    int result = follow_handle(state, stream, handle);
    if (result == 0) {
        result =
            cm_storage_add_lasting_use(((cm_buffer *)(void *)buffer)->storage, stream);
    }
    if (result == 0 && given != NULL && stream != given) {
        result = pass_on(state, buffer, given, stream);
    }
    cm_stream_give(state, stream);
    return result;
}

/* -- a capsule or a tensor becomes a buffer ----------------------------------------- */

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

/* A device that this process has. 0, or -1 with ValueError or BufferError. */
static int
check_device(const cm_runtime *rt, cm_dl_device device)
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
    if (rt == NULL || check_device(rt, tensor->device) < 0
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

/* A buffer over an unused capsule, which is used from the beginning of the call on;
 * NotImplemented (new reference) if it is none.
 * `advertised` is what __dlpack_device__() said of it: such a capsule was made for us,
 * and whatever is wrong with it, its deleter is called exactly once. NULL: the caller's
 * own capsule, which stays unused unless it is accepted. */
static PyObject *
import_capsule(cm_state *state, PyObject *capsule, const cm_dl_device *advertised)
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

/* The same of a tensor without a capsule, which is taken over: its deleter is called
 * once, now on failure. Ordinary memory of up to `unasked` bytes is not asked about. */
static PyObject *
import_managed(cm_state *state, cm_dl_versioned *managed, uint64_t unasked)
{
    opened source = {.versioned = managed};
    PyObject *buffer = import_opened(state, &source, NULL, unasked);
    if (buffer == NULL) {
        discard(&source);
    }
    return buffer;
}

/* Let it go without an import. Keeps a pending exception. */
static void
discard_managed(cm_dl_versioned *managed)
{
    if (managed != NULL) {
        discard(&(opened){.versioned = managed});
    }
}

/* -- asked by __dlpack__() ---------------------------------------------------------- */

/* 1 and a new reference, 0 without, -1 with an exception. */
static int
find_method(PyObject *object, const char *name, PyObject **out)
{
    *out = PyObject_GetAttrString(object, name);
    if (*out != NULL) {
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

static int
ask_device(PyObject *method, cm_dl_device *out)
{
    int64_t type;
    int64_t id;
    PyObject *pair = PyObject_CallNoArgs(method);
    if (pair == NULL) {
        return -1;
    }
    int result = -1;
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_Format(PyExc_TypeError, "__dlpack_device__() answered %R, not (type, id)",
                     pair);
    }
    else if (cm_arg_int64(PyTuple_GetItem(pair, 0), "__dlpack_device__()[0]", &type)
                 == 0
             && cm_arg_int64(PyTuple_GetItem(pair, 1), "__dlpack_device__()[1]", &id)
                    == 0) {
        if (type < INT32_MIN || type > INT32_MAX || id < INT32_MIN || id > INT32_MAX) {
            PyErr_Format(PyExc_ValueError, "__dlpack_device__() answered %R", pair);
        }
        else {
            *out = (cm_dl_device){(int32_t)type, (int32_t)id};
            result = 0;
        }
    }
    Py_DECREF(pair);
    return result;
}

/* __dlpack__(stream=…, max_version=(1, 0)) with what is wanted of them. */
static PyObject *
call_dlpack(PyObject *method, cm_stream *stream, bool with_version)
{
    PyObject *result = NULL;
    PyObject *value = NULL;
    PyObject *none = PyTuple_New(0);
    PyObject *keywords = PyDict_New();
    int failed = none == NULL || keywords == NULL;
    if (!failed && stream != NULL) {
        uint64_t handle = cm_stream_tell_handle(stream);
        handle = handle == 0 ? CM_STREAM_LEGACY : handle;
        value = PyLong_FromUnsignedLongLong(handle);
        failed = value == NULL || PyDict_SetItemString(keywords, "stream", value) < 0;
        Py_CLEAR(value);
    }
    if (!failed && with_version) {
        value = Py_BuildValue("ii", CM_DL_MAJOR, 0);
        failed =
            value == NULL || PyDict_SetItemString(keywords, "max_version", value) < 0;
        Py_CLEAR(value);
    }
    if (!failed) {
        result = PyObject_Call(method, none, keywords);
    }
    Py_XDECREF(none);
    Py_XDECREF(keywords);
    return result;
}

/* Older exporters do not know max_version, the oldest not even stream. */
static PyObject *
ask_capsule(cm_state *state, PyObject *method, cm_stream *stream)
{
    PyObject *capsule = call_dlpack(method, stream, true);
    if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        capsule = call_dlpack(method, stream, false);
    }
    if (stream != NULL && capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        capsule = call_dlpack(method, NULL, false);
        /* an exporter that takes no stream has made the legacy default stream wait */
        if (capsule != NULL && follow_handle(state, stream, CM_STREAM_LEGACY) < 0) {
            Py_CLEAR(capsule);
        }
    }
    return capsule;
}

/* With the memory's device current: PyTorch refuses to export that of another one. */
static PyObject *
ask_on_device(cm_state *state, PyObject *method, cm_dl_device device, cm_stream *stream)
{
    if (device.type != CM_DL_CUDA) {
        return ask_capsule(state, method, stream);
    }
    cm_runtime *rt = cm_state_runtime(state); /* the object's own code was run before */
    if (rt == NULL) {
        return NULL;
    }
    cm_device_guard guard;
    cm_status status;
    PyObject *capsule = NULL;
    cm_state_enter(state);
    Py_BEGIN_ALLOW_THREADS
    status = cm_device_enter(rt, device.id, &guard);
    Py_END_ALLOW_THREADS
    if (cm_is_ok(status)) {
        capsule = ask_capsule(state, method, stream);
        Py_BEGIN_ALLOW_THREADS
        cm_device_leave(rt, &guard);
        Py_END_ALLOW_THREADS
    }
    else {
        cm_py_raise(state, status, "while importing DLPack");
    }
    cm_state_leave(state);
    return capsule;
}

/* -- may it be written ------------------------------------------------------------------------ */

/* A capsule of before 1.0 does not say. What else the object tells is asked in turn. */
typedef enum writing {
    WRITING_FAILED = -1,
    WRITING_ALLOWED,
    WRITING_DENIED,
    WRITING_UNSAID
} writing;

/* An object that cannot answer has said nothing. */
static writing
forgive(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return WRITING_FAILED;
    }
    PyErr_Clear();
    return WRITING_UNSAID;
}

static writing
ask_buffer(PyObject *object)
{
    Py_buffer view;
    if (!PyObject_CheckBuffer(object)
        || PyObject_GetBuffer(object, &view, PyBUF_FULL_RO) < 0) {
        return forgive();
    }
    writing found = view.readonly ? WRITING_DENIED : WRITING_ALLOWED;
    PyBuffer_Release(&view);
    return found;
}

static writing
ask_array_interface(PyObject *object)
{
    PyObject *dict = PyObject_GetAttrString(object, "__cuda_array_interface__");
    PyObject *data = dict == NULL ? NULL : PyMapping_GetItemString(dict, "data");
    PyObject *flag = data == NULL ? NULL : PySequence_GetItem(data, 1);
    int denied = flag == NULL ? -1 : PyObject_IsTrue(flag);
    Py_XDECREF(flag);
    Py_XDECREF(data);
    Py_XDECREF(dict);
    return denied < 0 ? forgive() : denied ? WRITING_DENIED : WRITING_ALLOWED;
}

/* JAX's arrays never change, and on a GPU or in bfloat16 nothing but their type says
 * so. */
static writing
ask_type(PyObject *object)
{
    static const char *const names[] = {"jax", "jax.", "jaxlib", "jaxlib."};
    PyObject *module =
        PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__module__");
    const char *text = module != NULL && PyUnicode_Check(module)
                           ? PyUnicode_AsUTF8AndSize(module, NULL)
                           : NULL;
    writing found = WRITING_UNSAID;
    for (size_t i = 0; text != NULL && i < sizeof names / sizeof *names; i++) {
        size_t length = strlen(names[i]);
        bool is_package = names[i][length - 1] == '.';
        if (is_package ? strncmp(text, names[i], length) == 0
                       : strcmp(text, names[i]) == 0) {
            found = WRITING_DENIED;
        }
    }
    Py_XDECREF(module);
    return found == WRITING_UNSAID ? forgive() : found;
}

static writing
ask_who_writes(PyObject *object)
{
    writing found = ask_buffer(object);
    found = found == WRITING_UNSAID ? ask_array_interface(object) : found;
    return found == WRITING_UNSAID ? ask_type(object) : found;
}

/* -- the capsule -------------------------------------------------------------------------- */

static PyObject *
import_asked(cm_state *state, PyObject *object, PyObject *capsule,
             cm_dl_device advertised, cm_stream *stream)
{
    PyObject *buffer = Py_NewRef(Py_NotImplemented);
    if (PyCapsule_CheckExact(capsule)) {
        bool is_old = PyCapsule_IsValid(capsule, CM_DL_LEGACY_NAME);
        Py_DECREF(buffer);
        buffer = import_capsule(state, capsule, &advertised);
        writing found = is_old && buffer != NULL && buffer != Py_NotImplemented
                            ? ask_who_writes(object)
                            : WRITING_UNSAID;
        if (found == WRITING_FAILED) {
            Py_CLEAR(buffer);
        }
        else if (found == WRITING_DENIED) {
            ((cm_buffer *)(void *)buffer)->readonly = true;
            ((cm_buffer *)(void *)buffer)->storage->readonly = true;
        }
    }
    if (buffer == Py_NotImplemented) {
        Py_DECREF(buffer);
        PyErr_Format(PyExc_TypeError,
                     "__dlpack__() answered %R, not a fresh DLPack capsule", capsule);
        return NULL;
    }
    if (buffer != NULL && stream != NULL
        && cm_storage_add_lasting_use(((cm_buffer *)(void *)buffer)->storage, stream)
               < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

/* Its destructor may be Python code, which must not see our exception. */
static void
drop_capsule(PyObject *capsule)
{
    PyObject *type;
    PyObject *value;
    PyObject *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_DECREF(capsule);
    PyErr_Restore(type, value, traceback);
}

static PyObject *
import_from(cm_state *state, PyObject *object, PyObject *method,
            PyObject *device_method, cm_stream *given)
{
    cm_dl_device advertised;
    cm_stream *stream;
    cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL || ask_device(device_method, &advertised) < 0
        || check_device(rt, advertised) < 0
        || choose_stream(state, advertised, given, &stream) < 0) {
        return NULL;
    }
    PyObject *buffer = NULL;
    PyObject *capsule = ask_on_device(state, method, advertised, stream);
    if (capsule != NULL) {
        buffer = import_asked(state, object, capsule, advertised, stream);
        drop_capsule(capsule);
        if (buffer != NULL && given != NULL && stream != NULL && stream != given
            && pass_on(state, buffer, given, stream) < 0) {
            Py_CLEAR(buffer);
        }
    }
    else if (PyErr_ExceptionMatches(PyExc_BufferError)
             && PyObject_CheckBuffer(object)) {
        PyErr_Clear(); /* what DLPack cannot say, the buffer protocol may */
        buffer = Py_NewRef(Py_NotImplemented);
    }
    cm_stream_give(state, stream);
    return buffer;
}

static PyObject *
import_bare_capsule(cm_state *state, PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, CM_DL_VERSIONED_USED)
        || PyCapsule_IsValid(capsule, CM_DL_LEGACY_USED)) {
        PyErr_SetString(PyExc_ValueError, "this DLPack capsule was consumed before");
        return NULL;
    }
    return import_capsule(state, capsule, NULL);
}

/* The imaginary part of a conjugated tensor of PyTorch's has the other sign when it is
 * read, of which DLPack cannot tell. Such parts lie apart, so that only those are
 * asked. 0, or -1 with an exception. */
static int
check_sign(PyObject *object, PyObject *buffer)
{
    cm_region region;
    PyObject *method;
    cm_buffer_region((cm_buffer *)(void *)buffer, &region);
    int64_t count;
    if (cm_region_is_c_contiguous(&region)
        && !(cm_is_ok(cm_region_count(&region, &count)) && count == 1)) {
        return 0;
    }
    int found = find_method(object, "is_neg", &method);
    if (found <= 0) {
        return found;
    }
    PyObject *answer = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    bool is_negative = answer == Py_True;
    Py_XDECREF(answer);
    if (is_negative) {
        PyErr_SetString(PyExc_BufferError,
                        "a tensor with the negative bit set has other values than its "
                        "memory: take tensor.resolve_neg()");
    }
    return answer == NULL || is_negative ? -1 : 0;
}

static PyObject *
import_object(cm_state *state, PyObject *object, cm_stream *stream, uint64_t unasked)
{
    PyObject *buffer = cm_import_exchange(state, object, stream, unasked);
    if (buffer != Py_NotImplemented) {
        return buffer;
    }
    Py_DECREF(buffer);
    buffer = NULL;
    PyObject *method = NULL;
    PyObject *device_method = NULL;
    int found = PyType_Check(object) ? 0 : find_method(object, "__dlpack__", &method);
    if (found == 1) {
        found = find_method(object, "__dlpack_device__", &device_method);
    }
    if (found == 1) {
        buffer = import_from(state, object, method, device_method, stream);
    }
    else if (found == 0) {
        buffer = Py_NewRef(Py_NotImplemented);
    }
    Py_XDECREF(method);
    Py_XDECREF(device_method);
    return buffer;
}

PyObject *
cm_import_dlpack(cm_state *state, PyObject *object, cm_stream *stream, uint64_t unasked)
{
    if (PyCapsule_CheckExact(object)) {
        return import_bare_capsule(state, object);
    }
    PyObject *buffer = import_object(state, object, stream, unasked);
    if (buffer != NULL && buffer != Py_NotImplemented
        && check_sign(object, buffer) < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

/* -- asked by the C exchange API ---------------------------------------------------- */

/* A type's own: one that inherits it may have changed what it means. NULL without an
 * exception: it has none. */
static const cm_dl_exchange *
read_table(PyObject *type)
{
    PyObject *names = PyObject_GetAttrString(type, "__dict__");
    PyObject *lacks = names == NULL ? PyExc_AttributeError : PyExc_KeyError;
    PyObject *capsule =
        names == NULL ? NULL
                      : PyMapping_GetItemString(names, "__dlpack_c_exchange_api__");
    Py_XDECREF(names);
    const cm_dl_exchange *table = NULL;
    if (capsule != NULL && PyCapsule_IsValid(capsule, CM_DL_EXCHANGE_NAME)) {
        table = PyCapsule_GetPointer(capsule, CM_DL_EXCHANGE_NAME);
    }
    Py_XDECREF(capsule);
    if (capsule == NULL && PyErr_ExceptionMatches(lacks)) {
        PyErr_Clear();
    }
    while (table != NULL && table->version.major != CM_DL_MAJOR) {
        table = table->previous;
    }
    return table != NULL && table->from_object != NULL ? table : NULL;
}

/* A type without a table is not remembered: it may be one that is soon to go. */
static const cm_dl_exchange *
find_table(cm_state *state, PyObject *type)
{
    if (state->exchange.type == type) {
        return state->exchange.table;
    }
    const cm_dl_exchange *table = read_table(type);
    if (table != NULL) {
        PyObject *old = state->exchange.type;
        state->exchange.type = Py_NewRef(type);
        state->exchange.table = table;
        Py_XDECREF(old);
    }
    return table;
}

/* Such a tensor is refused by __dlpack__(), which says what to do. -1 with an
 * exception. */
static int
has_gradient(PyObject *object)
{
    PyObject *value = PyObject_GetAttrString(object, "requires_grad");
    if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        return 0;
    }
    int has = value == NULL ? -1 : value != Py_False;
    Py_XDECREF(value);
    return has;
}

/* A function of the table failed: 1, since asked in Python the object says why; -1
 * where the exception is no error. */
static int
leave_to_python(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_Clear();
    return 1;
}

/* A complex tensor may be one that is to be conjugated when it is read. */
static bool
needs_python(const cm_dl_versioned *managed)
{
    return managed->version.major != CM_DL_MAJOR
           || managed->tensor.dtype.code == CM_DL_COMPLEX;
}

/* The stream that the exporter works on now, where the memory has any: 0, or 1 where
 * only Python can tell, -1 with an exception. */
static int
ask_stream(const cm_dl_exchange *table, cm_dl_device device, uint64_t *handle)
{
    void *stream = NULL;
    if (device.type == CM_DL_CPU) {
        return 0;
    }
    if (device.type != CM_DL_CUDA || table->current_stream == NULL) {
        return 1;
    }
    if (table->current_stream(device.type, device.id, &stream) != 0) {
        return leave_to_python();
    }
    *handle = (uint64_t)(uintptr_t)stream;
    return 0;
}

static PyObject *
take(cm_state *state, const cm_dl_exchange *table, cm_dl_versioned *managed,
     cm_stream *given, uint64_t unasked)
{
    cm_dl_device device = managed->tensor.device;
    uint64_t handle = 0;
    int left = needs_python(managed) ? 1 : ask_stream(table, device, &handle);
    if (left != 0) {
        discard_managed(managed);
        return left > 0 ? Py_NewRef(Py_NotImplemented) : NULL;
    }
    PyObject *buffer = import_managed(state, managed, unasked);
    if (buffer != NULL && follow(state, buffer, device, given, handle) < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

PyObject *
cm_import_exchange(cm_state *state, PyObject *object, cm_stream *given,
                   uint64_t unasked)
{
    cm_dl_versioned *managed = NULL;
    const cm_dl_exchange *table = find_table(state, (PyObject *)Py_TYPE(object));
    int left = table == NULL ? (PyErr_Occurred() ? -1 : 1) : has_gradient(object);
    if (left == 0 && (table->from_object(object, &managed) != 0 || managed == NULL)) {
        left = leave_to_python();
    }
    if (left != 0) {
        return left > 0 ? Py_NewRef(Py_NotImplemented) : NULL;
    }
    return take(state, table, managed, given, unasked);
}
