/* SPDX-License-Identifier: Apache-2.0 */
/* Whatever copy() is given, as a region with all that keeps it alive. */
#include "python/core/numpy_bridge.h"
#include "python/core/tuples.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"

static int
init_buffer(cm_operand *operand, PyObject *object)
{
    const cm_buffer *buffer = (const cm_buffer *)(void *)object;
    if (cm_buffer_check_open(buffer) < 0) {
        return -1;
    }
    cm_buffer_region(buffer, &operand->region);
    operand->dtype = Py_NewRef(buffer->dtype);
    operand->keep = Py_NewRef(object);
    operand->storage = buffer->storage;
    operand->readonly = buffer->readonly;
    cm_storage_pin(operand->storage);
    return 0;
}

/* An array over one of our buffers shares the buffer's streams and unfinished
 * transfers. */
static cm_storage *
find_storage(const cm_state *state, PyObject *array)
{
    PyObject *owner = cm_numpy_owner(array);
    cm_storage *storage = NULL;
    if (owner != NULL && cm_buffer_check(state, owner)) {
        storage = ((cm_buffer *)(void *)owner)->storage; /* kept by the array */
    }
    Py_XDECREF(owner);
    return storage;
}

enum { SHORT_NBYTES = 64 << 10 };

/* `array` is kept. Where it is page-locked or managed, the planner should know; up to
 * `unasked` bytes of memory that is not ours it is not worth the question, which takes
 * the driver longer than all else before a short copy. */
static int
init_array(cm_state *state, cm_operand *operand, PyObject *array, uint64_t unasked)
{
    static const char what[] = "array";
    cm_import import = {.kind = CM_KIND_PAGEABLE, .host = true};
    PyObject *dtype;
    cm_pointer_info info;
    if (cm_numpy_region(array, &import.region, &dtype, &import.readonly) < 0) {
        return -1;
    }
    import.data = (uint64_t)(uintptr_t)import.region.host;
    cm_storage *storage = find_storage(state, array);
    if (storage != NULL) {
        cm_storage_pin(storage);
    }
    bool asks = false;
    int result = cm_import_measure(&import, what);
    if (result == 0) {
        asks = import.nbytes > (storage == NULL ? unasked : 0);
        result = asks ? cm_import_probe(state, &import, what, &info) : 0;
    }
    if (result < 0) {
        if (storage != NULL) {
            cm_storage_unpin(storage);
        }
        Py_XDECREF(import.locked);
        Py_DECREF(dtype);
        return -1;
    }
    cm_import_place(&import, asks ? &info : NULL, -1);
    operand->region = import.region;
    operand->dtype = dtype;
    operand->keep = Py_NewRef(array);
    operand->locked = import.locked;
    operand->storage = storage;
    operand->readonly = import.readonly;
    return 0;
}

static bool
is_python_scalar(PyObject *object)
{
    return PyLong_Check(object) || PyFloat_Check(object) || PyComplex_Check(object)
           || PyUnicode_Check(object);
}

/* bytes are a run of uint8, but one value of a bytes or void dtype. */
static bool
is_bytes_value(PyObject *object, PyObject *target_dtype)
{
    if (!PyBytes_Check(object) || target_dtype == NULL) {
        return false;
    }
    cm_dtype_traits traits;
    cm_numpy_dtype_traits(target_dtype, &traits);
    return traits.kind == 'S' || (traits.kind == 'V' && !traits.fields && !traits.user);
}

/* Dates and spans of Python, which NumPy by itself would keep as objects. */
static bool
is_time_value(PyObject *object, PyObject *target_dtype)
{
    cm_dtype_traits traits;
    cm_numpy_dtype_traits(target_dtype, &traits);
    return (traits.kind == 'M' || traits.kind == 'm')
           && !PyObject_HasAttrString(object, "__array__")
           && !PyObject_HasAttrString(object, "__array_interface__");
}

/* Python values become elements of the target's dtype, if they stay the same. */
static int
init_value(cm_state *state, cm_operand *operand, PyObject *object,
           PyObject *target_dtype)
{
    if (target_dtype == NULL) {
        PyErr_Format(
            PyExc_TypeError,
            "an object of type %R cannot be written to: expected a Buffer, a NumPy "
            "array, or an object with DLPack, __cuda_array_interface__ or the "
            "buffer protocol",
            (PyObject *)Py_TYPE(object));
        return -1;
    }
    bool is_value = is_python_scalar(object) || cm_numpy_is_scalar(object)
                    || PyList_Check(object) || PyTuple_Check(object)
                    || is_bytes_value(object, target_dtype) || object == Py_None
                    || is_time_value(object, target_dtype);
    /* What only NumPy can read is an array: its dtype is compared and not converted. */
    PyObject *array = is_value ? cm_numpy_as_value(object, target_dtype)
                               : cm_numpy_as_array(object, NULL);
    if (array == NULL) {
        return -1;
    }
    /* what was made of a value just now is ordinary memory */
    int result = init_array(state, operand, array, is_value ? UINT64_MAX : 0);
    Py_DECREF(array);
    if (result == 0) {
        operand->is_scalar = operand->region.ndim == 0;
    }
    return result;
}

/* Has it a protocol that cm_import_object reads? */
static bool
is_exporter(PyObject *object)
{
    static const char *const names[] = {"__dlpack__", "__cuda_array_interface__",
                                        "__dlpack_c_exchange_api__"};
    if (PyObject_CheckBuffer(object) || PyCapsule_CheckExact(object)) {
        return true;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        /* on the type: a property that raises is still an exporter, with its reason */
        if (PyObject_HasAttrString((PyObject *)Py_TYPE(object), names[i])
            || PyObject_HasAttrString(object, names[i])) {
            return true;
        }
    }
    return false;
}

bool
cm_operand_is_memory(const cm_state *state, PyObject *object)
{
    if (cm_buffer_check(state, object) || cm_numpy_is_array(object)) {
        return true;
    }
    return !is_python_scalar(object) && !cm_numpy_is_scalar(object)
           && !PyList_Check(object) && !PyTuple_Check(object) && is_exporter(object);
}

static int
init_operand(cm_state *state, cm_operand *operand, PyObject *object,
             PyObject *target_dtype, cm_stream *stream, uint64_t unasked)
{
    operand->dtype = NULL;
    operand->keep = NULL;
    operand->locked = NULL;
    operand->storage = NULL;
    operand->readonly = false;
    operand->is_scalar = false;
    if (cm_buffer_check(state, object)) {
        return init_buffer(operand, object);
    }
    if (cm_numpy_is_array(object)) {
        return init_array(state, operand, object, unasked);
    }
    if (is_bytes_value(object, target_dtype) || !cm_operand_is_memory(state, object)) {
        return init_value(state, operand, object, target_dtype);
    }
    PyObject *buffer = cm_import_object_short(state, object, stream, unasked);
    if (buffer == NULL) {
        return -1;
    }
    int result = init_buffer(operand, buffer);
    Py_DECREF(buffer);
    return result;
}

int
cm_operand_init(cm_state *state, cm_operand *operand, PyObject *object,
                PyObject *target_dtype, cm_stream *stream)
{
    return init_operand(state, operand, object, target_dtype, stream, 0);
}

enum { CONCURRENT_MANAGED_ACCESS = 89 }; /* CUdevice_attribute */

/* Else what another library's managed memory may be asked for is not known. */
static bool
shares_managed(cm_state *state)
{
    cm_runtime *rt = cm_state_runtime(state);
    bool all = state->shares_managed;
    if (all || rt == NULL) {
        return all;
    }
    all = true;
    for (int device = 0; device < rt->device_count && all; device++) {
        int concurrent = 0;
        all = cm_is_ok(cm_rt_device_attribute(rt, CONCURRENT_MANAGED_ACCESS, device,
                                              &concurrent))
              && concurrent == 1;
    }
    state->shares_managed = all;
    return all;
}

int
cm_operand_init_short(cm_state *state, cm_operand *operand, PyObject *object,
                      PyObject *target_dtype, cm_stream *stream)
{
    bool ours = cm_buffer_check(state, object);
    return init_operand(state, operand, object, target_dtype, stream,
                        !ours && shares_managed(state) ? SHORT_NBYTES : 0);
}

void
cm_operand_fini(cm_operand *operand)
{
    if (operand->storage != NULL) {
        cm_storage_unpin(operand->storage); /* `keep` still holds it */
    }
    operand->storage = NULL;
    Py_CLEAR(operand->dtype);
    Py_CLEAR(operand->locked);
    Py_CLEAR(operand->keep);
}

int
cm_refuse_shapes(const char *before, const cm_region *dst, const cm_region *src)
{
    PyObject *to = cm_tuple_from(dst->shape, dst->ndim);
    PyObject *from = cm_tuple_from(src->shape, src->ndim);
    if (to != NULL && from != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "%sthe source of shape %R does not fit the target of shape %R",
                     before, from, to);
    }
    Py_XDECREF(to);
    Py_XDECREF(from);
    return -1;
}
