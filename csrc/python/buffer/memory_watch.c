/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the object that has foreign bytes, keeps it, and checks that its memory is
 * still where it was. */
#include "python/buffer/memory_watch.h"

#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"

/* -- where memory is ---------------------------------------------------------------------- */

/* Make a number of `value`, which this takes over. Returns 0, or -1 with an exception.
 * If `value` is NULL, the caller has already set it. */
static int
take_number(PyObject *value, uint64_t *out)
{
    if (value == NULL) {
        return -1;
    }
    *out = PyLong_AsUnsignedLongLong(value);
    Py_DECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

/* Read the address and the size of the bytes in `memory`. An array has them in its C
 * struct, a storage of PyTorch's has two methods, and a buffer of pyarrow's has two
 * attributes. The type is asked which of them it has, since asking the object would
 * make a bound method each time. */
static int
read_place(const cm_state *state, PyObject *memory, uint64_t *address, uint64_t *nbytes)
{
    PyObject *const *words = state->words;
    if (cm_numpy_is_array(memory)) {
        cm_numpy_place(memory, address, nbytes);
        return 0;
    }
    if (PyObject_HasAttr((PyObject *)Py_TYPE(memory), words[CM_WORD_data_ptr])) {
        if (take_number(
                PyObject_CallMethodObjArgs(memory, words[CM_WORD_data_ptr], NULL),
                address)
            < 0) {
            return -1;
        }
        return take_number(
            PyObject_CallMethodObjArgs(memory, words[CM_WORD_nbytes], NULL), nbytes);
    }
    if (take_number(PyObject_GetAttr(memory, words[CM_WORD_address]), address) < 0) {
        return -1;
    }
    return take_number(PyObject_GetAttr(memory, words[CM_WORD_size]), nbytes);
}

/* -- keeping owners ----------------------------------------------------------------------- */

/* Keep the storage of a tensor. A tensor that only wraps others has none, and raises an
 * error, which is cleared. Returns 0, or -1 with another exception. */
static int
keep_storage_of(cm_storage *storage, PyObject *tensor)
{
    PyObject *name = storage->state->words[CM_WORD_untyped_storage];
    storage->memory = PyObject_CallMethodObjArgs(tensor, name, NULL);
    /* If an object does not tell where its memory is, the memory is not watched. That
     * is not a failure, here and in the other functions. */
    return storage->memory != NULL ? 0 : cm_error_forgive();
}

/* Return the object that owns an array's memory, as a new reference. If the array was
 * made from a memoryview of another array, the search continues with that array. The
 * owner is itself an array if its memory belongs to no other object. */
static PyObject *
last_owner(PyObject *array)
{
    PyObject *owner = cm_numpy_root(array);
    for (PyObject *next; cm_numpy_is_array(owner);) {
        next = cm_numpy_owner(owner);
        if (next == NULL) {
            PyObject *root = cm_numpy_root(owner);
            Py_DECREF(owner);
            return root;
        }
        Py_DECREF(owner);
        owner = next;
    }
    return owner;
}

PyObject *
cm_memory_under(cm_state *state, PyObject *array)
{
    PyObject *name = state->words[CM_WORD_untyped_storage];
    PyObject *owner = cm_numpy_is_array(array) ? last_owner(array) : NULL;
    PyObject *found = NULL;
    if (owner != NULL && PyObject_HasAttr(owner, name)) {
        found = PyObject_CallMethodObjArgs(owner, name, NULL);
        PyErr_Clear(); /* a tensor that only wraps others has none */
    }
    Py_XDECREF(owner);
    return found;
}

/* Keep the owner of an array's memory if the owner can move the memory. That is so for
 * the storage of a tensor, a resizable buffer and an array, which all can be resized.
 * Returns 0, or -1 with an exception. */
static int
keep_owner_of(cm_storage *storage, PyObject *array)
{
    PyObject *owner = last_owner(array);
    if (cm_numpy_is_array(owner)) {
        storage->memory = owner;
        return 0;
    }
    const cm_state *state = storage->state;
    int result = 0;
    if (PyObject_HasAttr(owner, state->words[CM_WORD_untyped_storage])) {
        result = keep_storage_of(storage, owner);
    }
    else if (PyObject_HasAttr(owner, state->words[CM_WORD_resize])
             && PyObject_HasAttr(owner, state->words[CM_WORD_address])) {
        storage->memory = Py_NewRef(owner);
    }
    Py_DECREF(owner);
    return result;
}

int
cm_memory_keep(cm_storage *storage, PyObject *object)
{
    const cm_state *state = storage->state;
    if (storage->memory != NULL) {
        return 0;
    }
    if (cm_numpy_is_array(object)) {
        return keep_owner_of(storage, object);
    }
    bool is_tensor =
        state->exchange_type == (PyObject *)Py_TYPE(object)
        || PyObject_HasAttr(object, state->words[CM_WORD_untyped_storage]) != 0;
    return is_tensor ? keep_storage_of(storage, object) : 0;
}

/* -- watching memory ---------------------------------------------------------------------- */

/* True if the bytes of `storage` lie within the `nbytes` at `address`. A tensor that
 * only wraps others may answer with a storage of PyTorch's in which these bytes do not
 * lie. */
static bool
holds_bytes_of(const cm_storage *storage, uint64_t address, uint64_t nbytes)
{
    uint64_t first = storage->host != NULL ? (uint64_t)(uintptr_t)storage->host
                                           : (uint64_t)storage->address;
    return first >= address && first - address <= nbytes
           && storage->nbytes <= nbytes - (first - address);
}

/* Make a storage of PyTorch's refuse to be resized. Only storages on the CPU can do
 * that, and each can be asked only once. */
static int
fix_size(const cm_storage *storage)
{
    PyObject *name = storage->state->words[CM_WORD_resizable];
    if (storage->host == NULL || cm_numpy_is_array(storage->memory)
        || !PyObject_HasAttr((PyObject *)Py_TYPE(storage->memory), name)) {
        return 0;
    }
    PyObject *can = PyObject_CallMethodObjArgs(storage->memory, name, NULL);
    Py_XDECREF(can);
    if (can == NULL) {
        return cm_error_forgive();
    }
    return can == Py_False ? 0
                           : cm_package_do("interchange.foreign_memory", "fix_size",
                                           PyTuple_Pack(1, storage->memory));
}

int
cm_memory_watch(cm_storage *storage)
{
    uint64_t address, nbytes;
    if (storage->memory == NULL || storage->is_watched || storage->nbytes == 0) {
        return 0;
    }
    if (read_place(storage->state, storage->memory, &address, &nbytes) < 0) {
        return cm_error_forgive();
    }
    if (!holds_bytes_of(storage, address, nbytes)) {
        return 0;
    }
    storage->memory_address = address;
    storage->memory_nbytes = nbytes;
    storage->is_watched = true;
    return fix_size(storage);
}

void
cm_memory_share(cm_storage *storage, const cm_storage *other)
{
    storage->memory = Py_XNewRef(other->memory);
    storage->memory_address = other->memory_address;
    storage->memory_nbytes = other->memory_nbytes;
    storage->is_watched = other->is_watched;
}

/* Check that `memory` is still where it was. Returns 0, or -1 with BufferError, whose
 * text depends on `in_copy`: whether a copy has been using the memory in the
 * meantime. */
static int
check_place(const cm_state *state, PyObject *memory, uint64_t was_address,
            uint64_t was_nbytes, bool in_copy)
{
    uint64_t address, nbytes;
    if (read_place(state, memory, &address, &nbytes) < 0) {
        return -1;
    }
    if (address == was_address && nbytes == was_nbytes) {
        return 0;
    }
    return cm_package_refuse(
        "interchange.foreign_memory", "refuse_moved",
        Py_BuildValue("(OKKKKO)", memory, (unsigned long long)was_address,
                      (unsigned long long)was_nbytes, (unsigned long long)address,
                      (unsigned long long)nbytes, in_copy ? Py_True : Py_False));
}

int
cm_memory_check(const cm_storage *storage)
{
    /* The call may run Python code, which may close the storage. */
    PyObject *memory = Py_NewRef(storage->memory);
    int result = check_place(storage->state, memory, storage->memory_address,
                             storage->memory_nbytes, false);
    Py_DECREF(memory);
    return result;
}

/* -- for copies in the background --------------------------------------------------------- */

/* Append `memory` and its place to the list. Several handles may share the list, so it
 * is a Python list: the garbage collector then sees each reference in it only once. */
static int
note(cm_state *state, PyObject *memory, uint64_t address, uint64_t nbytes,
     PyObject **list)
{
    if (*list == NULL) {
        *list = PyList_New(0);
    }
    PyObject *members[CM_MemoryPlace_COUNT] = {
        [CM_MemoryPlace_memory] = Py_NewRef(memory),
        [CM_MemoryPlace_address] = PyLong_FromUnsignedLongLong(address),
        [CM_MemoryPlace_nbytes] = PyLong_FromUnsignedLongLong(nbytes),
    };
    cm_append(list, cm_structseq_new(state, CM_STRUCTSEQ_MemoryPlace, members));
    return *list == NULL ? -1 : 0;
}

/* Check that the memory of one item of the list is still where it was. */
static int
check_noted(const cm_state *state, PyObject *place)
{
    PyObject *address = PyStructSequence_GetItem(place, CM_MemoryPlace_address);
    PyObject *nbytes = PyStructSequence_GetItem(place, CM_MemoryPlace_nbytes);
    return check_place(state, PyStructSequence_GetItem(place, CM_MemoryPlace_memory),
                       PyLong_AsUnsignedLongLong(address),
                       PyLong_AsUnsignedLongLong(nbytes), true);
}

int
cm_memory_note(const cm_storage *storage, PyObject **list)
{
    if (!storage->is_watched) {
        return 0;
    }
    return note(storage->state, storage->memory, storage->memory_address,
                storage->memory_nbytes, list);
}

int
cm_memory_note_place(cm_state *state, PyObject *memory, PyObject **list)
{
    uint64_t address, nbytes;
    if (read_place(state, memory, &address, &nbytes) < 0) {
        return cm_error_forgive();
    }
    return note(state, memory, address, nbytes, list);
}

int
cm_memory_check_noted(cm_state *state, PyObject *list)
{
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
        if (check_noted(state, PyList_GetItem(list, i)) < 0) {
            return -1;
        }
    }
    return 0;
}
