/* SPDX-License-Identifier: Apache-2.0 */
/* Imports memory by DLPack. This file asks an object for a tensor that is ready on our
 * stream, by the C exchange API or by __dlpack__(), and makes a buffer of the
 * tensor. */
#include <stdarg.h>

#include "base/checked_math.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/protocols/dlpack.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"

#define WHAT "DLPack tensor"

/* Raise ValueError. Always returns -1. */
static int
refuse(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    PyErr_FormatV(PyExc_ValueError, format, values);
    va_end(values);
    return -1;
}

/* -- a tensor ----------------------------------------------------------------------- */

/* A tensor that we own until a buffer takes it over. */
typedef struct taken {
    void *managed;              /* a cm_dl_versioned or a cm_dl_legacy */
    void (*drop)(void *);       /* frees `managed` */
    const cm_dl_tensor *tensor; /* inside `managed`; NULL if its version is not ours */
    uint64_t flags;
} taken;

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

static taken
tensor_of_versioned(cm_dl_versioned *managed)
{
    /* In other versions the members after `deleter` may be elsewhere. */
    bool ours = managed->version.major == CM_DL_MAJOR;
    return (taken){managed, drop_versioned, ours ? &managed->tensor : NULL,
                   ours ? managed->flags : 0};
}

/* Take the tensor of an unused DLPack capsule. Returns false for any other object. The
 * capsule is renamed at once, so that others, in another thread or in code that the
 * import runs, find it used. */
static bool
open_capsule(PyObject *capsule, taken *out)
{
    if (PyCapsule_IsValid(capsule, CM_DL_VERSIONED_NAME)) {
        *out = tensor_of_versioned(PyCapsule_GetPointer(capsule, CM_DL_VERSIONED_NAME));
        return PyCapsule_SetName(capsule, CM_DL_VERSIONED_USED) == 0;
    }
    cm_dl_legacy *managed = PyCapsule_IsValid(capsule, CM_DL_LEGACY_NAME)
                                ? PyCapsule_GetPointer(capsule, CM_DL_LEGACY_NAME)
                                : NULL;
    if (managed != NULL) {
        *out = (taken){managed, drop_legacy, &managed->tensor, 0};
        return PyCapsule_SetName(capsule, CM_DL_LEGACY_USED) == 0;
    }
    return false;
}

/* Free the tensor. A pending exception is kept. */
static void
discard(const taken *from)
{
    cm_kept_error kept = cm_error_keep();
    from->drop(from->managed);
    cm_error_restore(kept);
}

/* -- from a tensor to a buffer ------------------------------------------------------- */

static int
read_tensor(const cm_dl_tensor *tensor, cm_import *import)
{
    cm_region *region = &import->region;
    region->itemsize = tensor->dtype.bits / 8;
    region->ndim = (int)tensor->ndim;
    if (region->ndim < 0 || region->ndim > CM_MAX_NDIM) {
        return refuse(WHAT ": ndim is %d, not 0 to %d", region->ndim, CM_MAX_NDIM);
    }
    if (region->ndim > 0 && tensor->shape == NULL) {
        return refuse(WHAT ": shape is NULL");
    }
    bool empty = false;
    for (int i = 0; i < region->ndim; i++) {
        region->shape[i] = tensor->shape[i];
        empty = empty || region->shape[i] == 0;
        if (region->shape[i] < 0) {
            return refuse(WHAT ": shape[%d] is %lld", i, (long long)region->shape[i]);
        }
    }
    bool dense = tensor->strides == NULL || empty;
    if (dense && !cm_is_ok(cm_region_set_c_strides(region))) {
        return refuse(WHAT ": the number of bytes does not fit in 63 bits");
    }
    for (int i = 0; i < region->ndim && !dense; i++) {
        if (!cm_mul_i64(tensor->strides[i], region->itemsize, &region->strides[i])) {
            return refuse(
                WHAT ": strides[%d] is %lld elements: more bytes than fit in 63 bits",
                i, (long long)tensor->strides[i]);
        }
    }
    uint64_t data = (uint64_t)(uintptr_t)tensor->data;
    import->data = 0; /* with NULL the offset does not matter */
    if (data != 0 && !cm_add_u64(data, tensor->byte_offset, &import->data)) {
        return refuse(WHAT ": data plus byte_offset leaves the address space");
    }
    return cm_import_measure(import, WHAT);
}

/* Check that the driver's answer fits the claimed device, whose memory is of this kind.
 * Returns 0, or -1 with ValueError. */
static int
check_claim(const cm_pointer_info *info, cm_dl_device device, cm_kind kind)
{
    /* Mapped and managed memory may be exported as a device's. */
    bool agrees = cm_kind_is_on_device(kind)
                      ? !cm_kind_is_pageable(info->kind)
                      : cm_kind_is_pageable(kind) || info->kind == kind;
    if (!agrees) {
        return refuse(
            WHAT ": device (%d, %d), but the driver says that the address is %s memory",
            (int)device.type, (int)device.id, cm_kinds[info->kind].text);
    }
    if (cm_kind_is_on_device(info->kind) && info->device != device.id) {
        return refuse(WHAT ": device (%d, %d), but the memory is on device %d",
                      (int)device.type, (int)device.id, info->device);
    }
    return 0;
}

static int
place(cm_state *state, cm_import *import, cm_dl_device device, uint64_t unasked)
{
    import->host = device.type == CM_DL_CPU;
    if (import->nbytes <= (import->host ? unasked : 0)) {
        cm_import_place(import, NULL, device.id);
        return 0;
    }
    cm_pointer_info info;
    if (cm_import_probe(state, import, WHAT, &info) < 0
        || check_claim(&info, device, import->kind) < 0) {
        return -1;
    }
    if (import->host) {
        import->kind = info.kind; /* PyTorch, for example, calls its pinned memory the
                                     CPU's */
    }
    cm_import_place(import, &info, device.id);
    return 0;
}

/* Make a buffer, which takes the tensor over. If that fails, this returns NULL with an
 * exception, and the tensor is still the caller's. */
static PyObject *
import_taken(cm_state *state, const taken *from, uint64_t unasked)
{
    const cm_dl_tensor *tensor = from->tensor;
    cm_runtime *rt = cm_state_runtime(state);
    cm_import import = {.readonly = (from->flags & CM_DL_FLAG_READ_ONLY) != 0,
                        .drop = from->drop,
                        .argument = from->managed};
    if (tensor == NULL) {
        const cm_dl_versioned *managed = from->managed;
        PyErr_Format(PyExc_BufferError, WHAT " of version %u.%u: cumem reads 1.x",
                     (unsigned)managed->version.major,
                     (unsigned)managed->version.minor);
        return NULL;
    }
    if (rt == NULL || cm_dlpack_check_device(rt, tensor->device, &import.kind) < 0
        || (import.dtype = cm_dlpack_to_dtype(tensor->dtype)) == NULL) {
        return NULL;
    }
    PyObject *buffer = NULL;
    if (read_tensor(tensor, &import) == 0
        && place(state, &import, tensor->device, unasked) == 0) {
        buffer = cm_import_finish(state, &import);
    }
    Py_XDECREF(import.locked);
    Py_DECREF(import.dtype);
    return buffer;
}

/* Import a capsule that the caller has given. It stays unused unless the import
 * succeeds. */
static PyObject *
import_bare_capsule(cm_state *state, PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, CM_DL_VERSIONED_USED)
        || PyCapsule_IsValid(capsule, CM_DL_LEGACY_USED)) {
        refuse("this DLPack capsule was consumed before");
        return NULL;
    }
    taken from;
    if (!open_capsule(capsule, &from)) {
        return Py_NewRef(Py_NotImplemented);
    }
    PyObject *buffer = import_taken(state, &from, 0);
    if (buffer == NULL) {
        (void)PyCapsule_SetName(capsule, from.drop == drop_versioned
                                             ? CM_DL_VERSIONED_NAME
                                             : CM_DL_LEGACY_NAME);
    }
    return buffer;
}

/* -- asked by the C exchange API ---------------------------------------------------- */

/* Read the table of a type. A subclass does not get the table of its base, since it may
 * have changed what the functions mean. Returns NULL without an exception if the type
 * has no table. */
static const cm_dl_exchange *
read_table(PyObject *type)
{
    PyObject *capsule = cm_package_call("interchange.foreign_memory", "find_table",
                                        PyTuple_Pack(1, type));
    const cm_dl_exchange *table =
        capsule != NULL && PyCapsule_IsValid(capsule, CM_DL_EXCHANGE_NAME)
            ? PyCapsule_GetPointer(capsule, CM_DL_EXCHANGE_NAME)
            : NULL;
    Py_XDECREF(capsule);
    while (table != NULL && table->version.major != CM_DL_MAJOR) {
        table = table->previous;
    }
    return table != NULL && table->from_object != NULL ? table : NULL;
}

/* Find the table of a type. The last type that had one is remembered. A type without a
 * table is not remembered, since keeping it could keep alive a type that is about to
 * go. */
static const cm_dl_exchange *
find_table(cm_state *state, PyObject *type)
{
    if (state->exchange_type == type) {
        return state->exchange_table;
    }
    const cm_dl_exchange *table = read_table(type);
    if (table != NULL) {
        PyObject *old = state->exchange_type;
        state->exchange_type = Py_NewRef(type);
        state->exchange_table = table;
        Py_XDECREF(old);
    }
    return table;
}

/* Return 1 if the tensor requires a gradient, 0 if not, or -1 with an exception.
 * __dlpack__() refuses such a tensor and says what to do. */
static int
has_gradient(const cm_state *state, PyObject *object)
{
    PyObject *value = PyObject_GetAttr(object, state->words[CM_WORD_requires_grad]);
    bool fails = value == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError);
    bool has = value != NULL && value != Py_False;
    if (value == NULL && !fails) {
        PyErr_Clear();
    }
    Py_XDECREF(value);
    return fails ? -1 : has;
}

/* Called after a function of the table has failed. Returns 1 if the object is to be
 * asked in Python, where it says why, or -1 if the exception is one that must not be
 * swallowed, such as KeyboardInterrupt. */
static int
leave_to_python(void)
{
    return cm_error_forgive() < 0 ? -1 : 1;
}

/* Ask for the stream that the exporter works on now, if there is one for the memory.
 * Returns 0, or 1 if the object has to be asked in Python, or -1 with an exception.
 * Complex tensors are left to Python, since one may have to be conjugated when it is
 * read. */
static int
ask_stream(const cm_dl_exchange *table, const cm_dl_tensor *tensor, uint64_t *handle)
{
    void *stream = NULL;
    *handle = 0;
    if (tensor == NULL || tensor->dtype.code == cm_dtypes[CM_COMPLEX64].code) {
        return 1;
    }
    if (tensor->device.type == CM_DL_CPU) {
        return 0;
    }
    if (tensor->device.type != CM_DL_CUDA || table->current_stream == NULL) {
        return 1;
    }
    if (table->current_stream(tensor->device.type, tensor->device.id, &stream) != 0) {
        return leave_to_python();
    }
    *handle = (uint64_t)(uintptr_t)stream;
    return 0;
}

/* Import an object whose type has a table by C calls alone. This is for memory of the
 * host or of a GPU. Returns NotImplemented also for objects that have to be asked in
 * Python. */
static PyObject *
import_exchange(cm_state *state, PyObject *object, cm_stream *given, uint64_t unasked)
{
    cm_dl_versioned *managed = NULL;
    const cm_dl_exchange *table = find_table(state, (PyObject *)Py_TYPE(object));
    if (table == NULL) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
    }
    int left = has_gradient(state, object);
    if (left == 0 && (table->from_object(object, &managed) != 0 || managed == NULL)) {
        left = leave_to_python();
    }
    if (left != 0) {
        return left > 0 ? Py_NewRef(Py_NotImplemented) : NULL;
    }
    taken from = tensor_of_versioned(managed);
    uint64_t handle;
    PyObject *buffer = NULL;
    left = ask_stream(table, from.tensor, &handle);
    if (left == 0) {
        buffer = import_taken(state, &from, unasked);
    }
    if (buffer == NULL) {
        discard(&from);
        return left > 0 ? Py_NewRef(Py_NotImplemented) : NULL;
    }
    cm_dl_device device = from.tensor->device;
    if (device.type == CM_DL_CUDA
        && cm_import_order(state, buffer, given, device.id, handle) < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

/* -- asked in Python ---------------------------------------------------------------- */

/* An object with `__dlpack__` and `__dlpack_device__` that is asked for its memory. */
typedef struct exporter {
    PyObject *object; /* borrowed */
    PyObject *method; /* owned: its `__dlpack__` */
    cm_dl_device device;
    cm_stream *given; /* borrowed: the stream on which the buffer is to be ready; may be
                         NULL */
    bool has_buffer;  /* the object has the buffer protocol too */
} exporter;

/* Read what `__dlpack_device__` answered. Returns 0, or -1 with TypeError. */
static int
read_device(PyObject *answer, cm_dl_device *out)
{
    bool is_pair = PyTuple_Check(answer) && PyTuple_Size(answer) == 2;
    PyObject *type = is_pair ? PyTuple_GetItem(answer, 0) : NULL;
    PyObject *id = is_pair ? PyTuple_GetItem(answer, 1) : NULL;
    if (is_pair && PyLong_Check(type) && PyLong_Check(id)) {
        int type_overflow;
        int id_overflow;
        long long numbers[2] = {PyLong_AsLongLongAndOverflow(type, &type_overflow),
                                PyLong_AsLongLongAndOverflow(id, &id_overflow)};
        bool fits = type_overflow == 0 && id_overflow == 0;
        if (fits && numbers[0] > INT32_MIN && numbers[0] <= INT32_MAX
            && numbers[1] > INT32_MIN && numbers[1] <= INT32_MAX) {
            *out = (cm_dl_device){(int32_t)numbers[0], (int32_t)numbers[1]};
            return 0;
        }
    }
    PyErr_Format(PyExc_TypeError, "__dlpack_device__() answered %R, not (type, id)",
                 answer);
    return -1;
}

/* Find the two methods, and ask which device the memory is on. Returns 1, or 0 if the
 * object lacks a method, or -1 with an exception. */
static int
ask_device(const cm_state *state, exporter *self)
{
    PyObject *ask = NULL;
    int found =
        cm_arg_find_word(self->object, state->words[CM_WORD___dlpack__], &self->method);
    if (found > 0) {
        found = cm_arg_find_word(self->object, state->words[CM_WORD___dlpack_device__],
                                 &ask);
    }
    if (found <= 0) {
        return found;
    }
    PyObject *answer = PyObject_CallNoArgs(ask);
    Py_DECREF(ask);
    int result = answer == NULL ? -1 : read_device(answer, &self->device);
    Py_XDECREF(answer);
    return result < 0 ? -1 : 1;
}

/* Call `__dlpack__` with these keywords, without those that are NULL. */
static PyObject *
call_with(PyObject *method, PyObject *version, PyObject *stream)
{
    PyObject *capsule = NULL;
    PyObject *nothing = PyTuple_New(0);
    PyObject *named = PyDict_New();
    if (nothing == NULL || named == NULL) {
        goto done;
    }
    if (version != NULL && PyDict_SetItemString(named, "max_version", version) < 0) {
        goto done;
    }
    if (stream != NULL && PyDict_SetItemString(named, "stream", stream) < 0) {
        goto done;
    }
    capsule = PyObject_Call(method, nothing, named);
done:
    Py_XDECREF(nothing);
    Py_XDECREF(named);
    return capsule;
}

/* True if a call failed because the function does not know one of the keywords. That
 * exception is then cleared. */
static bool
knew_no_keyword(const PyObject *capsule)
{
    if (capsule != NULL || !PyErr_ExceptionMatches(PyExc_TypeError)) {
        return false;
    }
    PyErr_Clear();
    return true;
}

/* Ask for a capsule that is ready on the stream of this handle, or name no stream if
 * the handle is 0. Older exporters do not accept `max_version`, and the oldest do not
 * accept `stream` either; *knows says whether this one accepted it. Returns a new
 * reference, or NULL with an exception. */
static PyObject *
ask_capsule(PyObject *method, uint64_t handle, bool *knows)
{
    PyObject *stream = NULL;
    PyObject *version = Py_BuildValue("(ii)", 1, 0);
    PyObject *capsule = NULL;
    *knows = false;
    if (version == NULL) {
        return NULL;
    }
    if (handle != 0) {
        stream = PyLong_FromUnsignedLongLong(handle);
        if (stream == NULL) {
            goto done;
        }
    }
    *knows = stream != NULL;
    capsule = call_with(method, version, stream);
    if (stream != NULL && knew_no_keyword(capsule)) {
        capsule = call_with(method, NULL, stream);
    }
    if (knew_no_keyword(capsule)) {
        *knows = false;
        capsule = call_with(method, NULL, NULL);
    }
done:
    Py_XDECREF(stream);
    Py_DECREF(version);
    return capsule;
}

/* True if the device of a tensor agrees with the one that `__dlpack_device__` named.
 * Pinned memory is commonly handed out as the CPU's and managed memory as a device's,
 * so these agree too. */
static bool
is_announced_device(cm_dl_device announced, cm_dl_device found)
{
    if (announced.type == found.type) {
        return announced.type != CM_DL_CUDA || announced.id == found.id;
    }
    return (announced.type == CM_DL_CUDA_HOST && found.type == CM_DL_CPU)
           || (announced.type == CM_DL_CUDA_MANAGED && found.type == CM_DL_CUDA);
}

/* Read the second member of the entry "data" of an object's CUDA array interface.
 * Returns 1 if it says that the memory is read-only, 0 if not, or -1 with an
 * exception. */
static int
is_interface_readonly(PyObject *object)
{
    PyObject *entries;
    int found = cm_arg_find_attribute(object, "__cuda_array_interface__", &entries);
    if (found <= 0) {
        return found;
    }
    PyObject *key = PyUnicode_FromString("data");
    PyObject *data = key == NULL ? NULL : PyObject_GetItem(entries, key);
    PyObject *flag = data == NULL ? NULL : PySequence_GetItem(data, 1);
    int is_readonly = flag == NULL ? -1 : PyObject_IsTrue(flag);
    Py_XDECREF(flag);
    Py_XDECREF(data);
    Py_XDECREF(key);
    Py_DECREF(entries);
    return is_readonly;
}

/* Arrays of JAX never change, but on a GPU or in bfloat16 only their type shows it. */
static bool
is_of_jax(PyObject *object)
{
    PyObject *module =
        PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__module__");
    const char *text = module != NULL && PyUnicode_Check(module)
                           ? PyUnicode_AsUTF8AndSize(module, NULL)
                           : NULL;
    bool is = false;
    if (text != NULL) {
        size_t length = strcspn(text, ".");
        is = (length == 3 && strncmp(text, "jax", 3) == 0)
             || (length == 6 && strncmp(text, "jaxlib", 6) == 0);
    }
    PyErr_Clear();
    Py_XDECREF(module);
    return is;
}

/* Return 1 if an exporter says that its memory must not be written, which an old
 * capsule cannot express, or 0 if not. If the exporter has the buffer protocol, that is
 * asked; otherwise its CUDA array interface is. Returns -1 with an exception such as
 * KeyboardInterrupt. */
static int
is_readonly(const exporter *self)
{
    Py_buffer view;
    if (self->has_buffer) {
        if (PyObject_GetBuffer(self->object, &view, PyBUF_FULL_RO) == 0) {
            int answer = view.readonly != 0;
            PyBuffer_Release(&view);
            return answer;
        }
        if (cm_error_forgive() < 0) { /* a failed answer does not forbid writing */
            return -1;
        }
    }
    int answer = is_interface_readonly(self->object);
    if (answer < 0 && cm_error_forgive() < 0) {
        return -1;
    }
    return answer > 0 || is_of_jax(self->object);
}

/* Make a buffer of a capsule that was made for us, which must be fresh, and whose
 * memory must be where the exporter said. Whatever is wrong with it, its deleter is
 * called exactly once. Returns NULL with an exception if it fails. */
static PyObject *
take_capsule(cm_state *state, const exporter *self, PyObject *capsule)
{
    taken from;
    if (!PyCapsule_CheckExact(capsule) || !open_capsule(capsule, &from)) {
        return PyErr_Format(PyExc_TypeError,
                            "__dlpack__() answered %R, not a fresh DLPack capsule",
                            capsule);
    }
    bool is_legacy = from.drop == drop_legacy;
    PyObject *buffer = import_taken(state, &from, 0);
    if (buffer == NULL) {
        discard(&from);
        return NULL;
    }
    if (!is_announced_device(self->device, from.tensor->device)) {
        Py_DECREF(buffer); /* this also frees the tensor */
        refuse(WHAT ": its device is not the one that __dlpack_device__() named");
        return NULL;
    }
    int is_frozen = is_legacy ? is_readonly(self) : 0;
    if (is_frozen > 0) {
        cm_buffer_freeze((cm_buffer *)(void *)buffer);
    }
    if (is_frozen < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

/* Ask for the tensor, which is to be ready on `stream`, and order the buffer. `stream`
 * is NULL for memory that the CPU reads. Returns NotImplemented if DLPack cannot
 * describe the memory and the object has the buffer protocol too. */
static PyObject *
import_on_stream(cm_state *state, const exporter *self, cm_stream *stream)
{
    bool knows;
    uint64_t handle = 0;
    if (stream != NULL) {
        handle = cm_stream_export_handle(stream);
        handle = handle == 0 ? CM_STREAM_LEGACY : handle;
    }
    PyObject *capsule = ask_capsule(self->method, handle, &knows);
    if (capsule == NULL) {
        if (self->has_buffer && PyErr_ExceptionMatches(PyExc_BufferError)) {
            PyErr_Clear();
            return Py_NewRef(Py_NotImplemented);
        }
        return NULL;
    }
    PyObject *buffer = NULL;
    /* The oldest exporters made the legacy default stream wait. */
    if (stream == NULL || knows
        || cm_import_follow(state, stream, stream->device, CM_STREAM_LEGACY) == 0) {
        buffer = take_capsule(state, self, capsule);
    }
    cm_kept_error kept = cm_error_keep(); /* a capsule may end in Python code */
    Py_DECREF(capsule);
    cm_error_restore(kept);
    if (buffer == NULL) {
        return NULL;
    }
    cm_stream *after = self->given == NULL ? stream : self->given;
    if ((stream != NULL
         && cm_import_order(state, buffer, after, stream->device, handle) < 0)
        || cm_package_do("interchange.foreign_memory", "check_sign",
                         PyTuple_Pack(1, self->object))
               < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

/* Choose the stream on which the exporter is to have its memory ready, and ask. An
 * exporter cannot use a stream of another device. So if our stream is of another
 * device, the exporter gets a stream of its own device. */
static PyObject *
import_from(cm_state *state, const exporter *self)
{
    bool is_of_device = self->device.type == CM_DL_CUDA;
    cm_stream *stream = NULL;
    if (is_of_device || self->device.type == CM_DL_CUDA_MANAGED) {
        bool helps = self->given != NULL
                     && (!is_of_device || self->given->device == self->device.id);
        stream = helps ? cm_stream_take(state, self->given)
                       : cm_stream_from_object(state, Py_None,
                                               is_of_device ? self->device.id : -1);
        if (stream == NULL) {
            return NULL;
        }
    }
    PyObject *buffer = import_on_stream(state, self, stream);
    cm_stream_give(state, stream);
    return buffer;
}

/* Do the same as import_from() with the memory's device current, since PyTorch refuses
 * to export memory of another device. */
static PyObject *
import_on_device(cm_state *state, const exporter *self)
{
    cm_kind kind;
    cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL || cm_dlpack_check_device(rt, self->device, &kind) < 0) {
        return NULL;
    }
    if (self->device.type != CM_DL_CUDA) {
        return import_from(state, self);
    }
    cm_device_guard guard;
    cm_status status = CM_WITHOUT_GIL(cm_device_enter(rt, self->device.id, &guard));
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, "while importing DLPack");
    }
    PyObject *buffer = import_from(state, self);
    Py_BEGIN_ALLOW_THREADS
    cm_device_leave(rt, &guard);
    Py_END_ALLOW_THREADS
    return buffer;
}

PyObject *
cm_import_by_dlpack(cm_state *state, PyObject *object, cm_stream *stream,
                    bool has_buffer)
{
    exporter self = {.object = object, .given = stream, .has_buffer = has_buffer};
    PyObject *buffer = NULL;
    int found = ask_device(state, &self);
    if (found == 0) {
        buffer = Py_NewRef(Py_NotImplemented);
    }
    else if (found > 0) {
        buffer = import_on_device(state, &self);
    }
    Py_XDECREF(self.method);
    return buffer;
}

/* -- either way ---------------------------------------------------------------------- */

/* Check that a tensor of PyTorch's is not an imaginary part whose sign is to be changed
 * when it is read, as that of a conjugated tensor is. DLPack cannot say so. The
 * elements of such parts lie apart, so only tensors with gaps, or of one element, are
 * asked. Returns 0, or -1 with an exception. */
static int
check_sign(PyObject *object, PyObject *imported)
{
    const cm_buffer *buffer = (const cm_buffer *)(void *)imported;
    cm_region region;
    cm_buffer_region(buffer, &region);
    if (cm_region_is_c_contiguous(&region)
        && cm_buffer_nbytes(buffer) != (uint64_t)buffer->itemsize) {
        return 0;
    }
    return cm_package_do("interchange.foreign_memory", "check_sign",
                         PyTuple_Pack(1, object));
}

PyObject *
cm_import_dlpack(cm_state *state, PyObject *object, cm_stream *stream, uint64_t unasked)
{
    if (PyCapsule_CheckExact(object)) {
        return import_bare_capsule(state, object);
    }
    PyObject *buffer = import_exchange(state, object, stream, unasked);
    if (buffer != NULL && buffer != Py_NotImplemented
        && check_sign(object, buffer) < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

int
cm_exporter_device(const cm_state *state, PyObject *object)
{
    int type = 0;
    int device = -1;
    PyObject *ask = NULL;
    PyObject *answer = NULL;
    if (!cm_numpy_is_array(object) && !PyType_Check(object)) {
        ask = PyObject_GetAttrString(object, "__dlpack_device__");
        answer = ask == NULL ? NULL : PyObject_CallNoArgs(ask);
    }
    bool is_read = answer != NULL && PyTuple_Check(answer)
                   && PyArg_ParseTuple(answer, "ii", &type, &device);
    Py_XDECREF(answer);
    Py_XDECREF(ask);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        PyErr_SetInterrupt(); /* the call that asked will see it as soon as it waits */
    }
    PyErr_Clear(); /* an import of the object will say what is wrong with it */
    bool exists = is_read && type == CM_DL_CUDA && state->runtime != NULL && device >= 0
                  && device < state->runtime->device_count;
    return exists ? device : -1;
}
