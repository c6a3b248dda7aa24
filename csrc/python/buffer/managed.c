/* SPDX-License-Identifier: Apache-2.0 */
/* Has prefetch_pages(), and the methods and properties of ManagedBuffer that move
 * pages, give advice about them and tell where they are. page_calls.c makes the calls
 * of the driver, residency.c says where pages are, managed_block.c has the block of
 * `with buf.on(...)`. */
#include "python/buffer/managed.h"

#include <stdlib.h>

#include "docstrings.h"
#include "python/buffer/methods.h"
#include "python/buffer/page_calls.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"

/* Return None, or NULL if `result` says that an exception is set. */
static PyObject *
none_unless(int result)
{
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* -- prefetch ------------------------------------------------------------------------------ */

/* Prefetch `buffer_count` buffers; there is at least one. */
static int
prefetch(cm_state *state, cm_buffer *const *buffers, Py_ssize_t buffer_count,
         int location, PyObject *given, int home, bool by_rows)
{
    cm_stream *stream = cm_stream_from_object(state, given, home);
    if (stream == NULL) {
        return -1;
    }
    cm_page_call call = {
        .work = CM_PAGES_PREFETCH,
        .location = location,
        .stream = stream,
        .by_rows = by_rows,
    };
    int result = cm_pages_submit(state, &call, buffers, buffer_count);
    cm_stream_give(state, stream);
    return result;
}

int
cm_buffer_prefetch_to(cm_buffer *self, int location, PyObject *stream, int home)
{
    if (prefetch(self->state, &self, 1, location, stream, home, false) < 0) {
        return -1;
    }
    return cm_buffer_note_side(self, location >= 0);
}

PyObject *
cm_buffer_prefetch_pages(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
    static const char *const names[] = {"to", "stream", NULL};
    cm_buffer *self = (cm_buffer *)object;
    PyObject *values[2];
    int location;
    if (cm_args_parse("prefetch_pages", args, nargs, kwnames, names, 2, 0, values) < 0
        || cm_arg_location(self->state, values[0], "to", &location) < 0) {
        return NULL;
    }
    int home = cm_buffer_home(self, location);
    return none_unless(cm_buffer_prefetch_to(self, location, values[1], home));
}

static bool
is_managed(const cm_state *state, PyObject *object)
{
    return Py_TYPE(object) == state->buffer_types[CM_KIND_MANAGED];
}

/* Prefetch the buffers of a tuple, whose items may be any objects. */
static int
prefetch_tuple(cm_state *state, PyObject *tuple, PyObject *to, PyObject *stream)
{
    Py_ssize_t count = PyTuple_Size(tuple);
    cm_buffer **buffers = calloc((size_t)count + 1, sizeof(cm_buffer *));
    int result = -1;
    int location;
    if (buffers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PyTuple_GetItem(tuple, i);
        if (!is_managed(state, object)) {
            cm_arg_refuse(object, "buffers", "ManagedBuffers");
            goto done;
        }
        buffers[i] = (cm_buffer *)object;
    }
    result = cm_arg_location(state, to, "to", &location);
    if (result == 0 && count > 0) {
        int home = cm_buffer_home(buffers[0], location);
        result = prefetch(state, buffers, count, location, stream, home, false);
    }
done:
    free(buffers);
    return result;
}

static PyObject *
prefetch_pages(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames)
{
    static const char *const names[] = {"buffers", "to", "stream", NULL};
    PyObject *values[3];
    if (cm_args_parse("prefetch_pages", args, nargs, kwnames, names, 3, 1, values)
        < 0) {
        return NULL;
    }
    PyObject *tuple = PySequence_Tuple(values[0]);
    if (tuple == NULL) {
        return NULL;
    }
    int result =
        prefetch_tuple(cm_state_of_module(module), tuple, values[1], values[2]);
    Py_DECREF(tuple);
    return none_unless(result);
}

/* This is the Python function _prefetch_rows(tile, device, stream). It is for tiles(),
 * which has streams of its own and whose moves do not count as thrashing. */
static PyObject *
prefetch_rows(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *tile, *device, *stream;
    int location = CM_HOST_LOCATION;
    if (!PyArg_ParseTuple(args, "O!OO:_prefetch_rows",
                          state->buffer_types[CM_KIND_MANAGED], &tile, &device,
                          &stream)) {
        return NULL;
    }
    if (device != Py_None && cm_arg_device(state, device, "device", &location) < 0) {
        return NULL;
    }
    cm_buffer *self = (cm_buffer *)tile;
    int home = cm_buffer_home(self, location);
    return none_unless(prefetch(state, &self, 1, location, stream, home, true));
}

/* -- discard ------------------------------------------------------------------------------- */

static int
discard_on(cm_buffer *self, cm_stream *stream, cm_stream *follower)
{
    cm_page_call call = {
        .work = CM_PAGES_DISCARD,
        .location = CM_HOST_LOCATION, /* a discard ignores it */
        .stream = stream,
        .follower = follower,
    };
    return cm_pages_submit(self->state, &call, &self, 1);
}

/* Discard on `side`, after all earlier work of `legacy` and before all later work of
 * it. Of the two streams, only `legacy` is noted as one that uses the memory. `side` is
 * new each time, so a loop of discards would otherwise make the storage's list of
 * streams grow. */
static int
discard_between(cm_buffer *self, cm_stream *legacy, cm_stream *side)
{
    cm_state *state = self->state;
    cm_status status = CM_WITHOUT_GIL(cm_stream_follow(side, legacy));
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, NULL);
    }
    if (discard_on(self, side, legacy) < 0) {
        return -1;
    }
    status = CM_WITHOUT_GIL(cm_stream_follow(legacy, side));
    if (!cm_is_ok(status)) {
        (void)cm_storage_add_use(self->storage, side);
        return cm_py_raise_int(state, status, NULL);
    }
    return 0;
}

/* Discard on a stream of our own, since the driver takes no discard on the legacy
 * default stream. Until `legacy` comes after that stream, nobody else knows of its
 * work. So the storage is kept open meanwhile, and neither free() nor shutdown() can
 * end it. */
static int
discard_beside(cm_buffer *self, cm_stream *legacy)
{
    cm_state *state = self->state;
    cm_stream *side;
    cm_status status = CM_WITHOUT_GIL(
        cm_stream_create(legacy->rt, legacy->device, CM_STREAM_NON_BLOCKING, 0, &side));
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, "making a stream");
    }
    if (state->context_count != atomic_load(&legacy->rt->context_count)) {
        state->admit_peers(state); /* the device is in use from now on */
    }
    cm_storage_keep_open(self->storage);
    int result = discard_between(self, legacy, side);
    cm_storage_allow_close(self->storage);
    cm_state_enter(state); /* cm_stream_give() leaves it */
    cm_stream_give(state, side);
    return result;
}

PyObject *
cm_buffer_discard(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    static const char *const names[] = {"stream", NULL};
    cm_buffer *self = (cm_buffer *)object;
    cm_state *state = self->state;
    PyObject *given;
    cm_address address;
    uint64_t nbytes;
    if (cm_args_parse("discard", args, nargs, kwnames, names, 1, 0, &given) < 0
        || cm_pages_find_span(self, &address, &nbytes) < 0) {
        return NULL;
    }
    if (nbytes != cm_buffer_nbytes(self)) {
        PyErr_SetString(PyExc_ValueError,
                        "discard() needs a contiguous buffer: what lies between the "
                        "elements of this one would be lost");
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(state, given, self->storage->device);
    if (stream == NULL) {
        return NULL;
    }
    int result = cm_stream_is_legacy(stream) ? discard_beside(self, stream)
                                             : discard_on(self, stream, NULL);
    cm_stream_give(state, stream);
    return none_unless(result);
}

/* -- advice: from arguments to calls of the driver --------------------------------- */

typedef struct advice {
    int number; /* CM_ADVISE_… */
    int location;
} advice;

/* A list with room for a call that sets everything: read_mostly, preferred_location,
 * and accessed_by for each device and the host. */
typedef struct advice_list {
    int count;
    advice items[2 + CM_MAX_DEVICES + 1];
} advice_list;

static void
add_advice(advice_list *list, int number, int location)
{
    list->items[list->count++] = (advice){number, location};
}

static int
read_read_mostly(PyObject *value, advice_list *list)
{
    bool is_true = value == Py_True;
    if (!PyBool_Check(value)) {
        int truth = cm_numpy_is_bool(value) ? PyObject_IsTrue(value) : -1;
        if (truth < 0) {
            return cm_arg_refuse(value, "read_mostly", "true or false");
        }
        is_true = truth > 0;
    }
    add_advice(list, is_true ? CM_ADVISE_READ_MOSTLY : CM_ADVISE_NOT_READ_MOSTLY,
               CM_HOST_LOCATION);
    return 0;
}

static int
read_preferred_location(cm_state *state, PyObject *value, advice_list *list)
{
    int location;
    if (value == Py_None) {
        add_advice(list, CM_ADVISE_NOT_PREFERRED, CM_HOST_LOCATION);
        return 0;
    }
    if (cm_arg_location(state, value, "preferred_location", &location) < 0) {
        return -1;
    }
    add_advice(list, CM_ADVISE_PREFERRED, location);
    return 0;
}

/* The value that accessed_by is to have: devices and the host, each at most once. */
typedef struct accessors {
    bool host;
    bool devices[CM_MAX_DEVICES];
} accessors;

/* Read the locations that the iterator gives. */
static int
collect_accessors(cm_state *state, PyObject *iterator, accessors *wanted)
{
    bool has_node = false;
    PyObject *item;
    while ((item = PyIter_Next(iterator)) != NULL) {
        int location;
        int result = cm_arg_location(state, item, "accessed_by", &location);
        Py_DECREF(item);
        if (result < 0) {
            return -1;
        }
        if (location >= 0) {
            wanted->devices[location] = true;
        }
        else if (location == CM_HOST_LOCATION) {
            wanted->host = true;
        }
        else {
            has_node = true;
        }
    }
    if (PyErr_Occurred()) {
        return -1;
    }
    if (has_node) {
        PyErr_SetString(PyExc_ValueError,
                        "accessed_by takes devices and \"cpu\", but no NUMA nodes");
        return -1;
    }
    return 0;
}

/* Find the devices whose access the driver may be told to forget. The driver refuses
 * that for devices without concurrent access. An old driver does not know the attribute
 * for this, and then no device counts as having such access. */
static int
find_concurrent(cm_state *state, int *count, bool *concurrent)
{
    cm_runtime *rt = cm_state_runtime(state);
    cm_status status = cm_ok();
    if (rt == NULL) {
        return -1;
    }
    *count = rt->device_count;
    cm_state_enter(state);
    for (int i = 0; i < *count && cm_is_ok(status); i++) {
        int value = 0;
        status = CM_WITHOUT_GIL(cm_rt_device_attribute(
            rt, CM_ATTRIBUTE_concurrent_managed_access, i, &value));
        if (status.code == CM_CUDA_INVALID_VALUE) {
            status = cm_ok();
            value = 0;
        }
        concurrent[i] = value != 0;
    }
    cm_state_leave(state);
    return cm_py_check(state, status, NULL);
}

/* Read accessed_by. The list begins with the advice that removes the devices which are
 * not wanted, so that exactly the wanted ones are left. */
static int
read_accessed_by(cm_state *state, PyObject *value, advice_list *list)
{
    accessors wanted = {.host = false};
    bool concurrent[CM_MAX_DEVICES];
    int device_count;
    PyObject *iterator = PyUnicode_Check(value) ? NULL : PyObject_GetIter(value);
    if (iterator == NULL) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear();
        return cm_arg_refuse(value, "accessed_by", "a sequence of devices");
    }
    int result = collect_accessors(state, iterator, &wanted);
    Py_DECREF(iterator);
    if (result < 0 || find_concurrent(state, &device_count, concurrent) < 0) {
        return -1;
    }
    if (!wanted.host) {
        add_advice(list, CM_ADVISE_NOT_ACCESSED_BY, CM_HOST_LOCATION);
    }
    for (int i = 0; i < device_count; i++) {
        if (concurrent[i] && !wanted.devices[i]) {
            add_advice(list, CM_ADVISE_NOT_ACCESSED_BY, i);
        }
    }
    if (wanted.host) {
        add_advice(list, CM_ADVISE_ACCESSED_BY, CM_HOST_LOCATION);
    }
    for (int i = 0; i < CM_MAX_DEVICES; i++) {
        if (wanted.devices[i]) {
            add_advice(list, CM_ADVISE_ACCESSED_BY, i);
        }
    }
    return 0;
}

/* -- advise() and the properties ------------------------------------------------------------ */

static int
advise(cm_buffer *self, const advice_list *list)
{
    int result = 0;
    for (int i = 0; i < list->count && result == 0; i++) {
        cm_page_call call = {
            .work = CM_PAGES_ADVISE,
            .location = list->items[i].location,
            .advice = list->items[i].number,
        };
        result = cm_pages_submit(self->state, &call, &self, 1);
    }
    return result;
}

/* This reads all arguments before it makes the first call of the driver. */
PyObject *
cm_buffer_advise(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames)
{
    static const char *const names[] = {"read_mostly", "preferred_location",
                                        "accessed_by", NULL};
    cm_buffer *self = (cm_buffer *)object;
    advice_list list = {.count = 0};
    PyObject *values[3];
    if (cm_args_parse("advise", args, nargs, kwnames, names, 0, 0, values) < 0) {
        return NULL;
    }
    if (cm_arg_is_given(values[0]) && read_read_mostly(values[0], &list) < 0) {
        return NULL;
    }
    if (values[1] != NULL && values[1] != Py_Ellipsis
        && read_preferred_location(self->state, values[1], &list) < 0) {
        return NULL;
    }
    if (cm_arg_is_given(values[2])
        && read_accessed_by(self->state, values[2], &list) < 0) {
        return NULL;
    }
    return none_unless(advise(self, &list));
}

static int
refuse_deletion(const char *name)
{
    PyErr_Format(PyExc_AttributeError, "cannot delete %s: set it to False, None or ()",
                 name);
    return -1;
}

int
cm_buffer_set_read_mostly(PyObject *object, PyObject *value, void *unused CM_UNUSED)
{
    advice_list list = {.count = 0};
    if (value == NULL) {
        return refuse_deletion("read_mostly");
    }
    if (read_read_mostly(value, &list) < 0) {
        return -1;
    }
    return advise((cm_buffer *)object, &list);
}

int
cm_buffer_set_preferred_location(PyObject *object, PyObject *value,
                                 void *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    advice_list list = {.count = 0};
    if (value == NULL) {
        return refuse_deletion("preferred_location");
    }
    if (value == Py_Ellipsis) { /* in advise(), Ellipsis leaves the property as it is */
        return cm_arg_refuse(value, "preferred_location",
                             "a device, \"cpu\", \"numa:N\" or None");
    }
    if (read_preferred_location(self->state, value, &list) < 0) {
        return -1;
    }
    return advise(self, &list);
}

int
cm_buffer_set_accessed_by(PyObject *object, PyObject *value, void *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    advice_list list = {.count = 0};
    if (value == NULL) {
        return refuse_deletion("accessed_by");
    }
    if (read_accessed_by(self->state, value, &list) < 0) {
        return -1;
    }
    return advise(self, &list);
}

/* -- what the driver knows --------------------------------------------------------- */

/* Ask for one number about all pages; `empty` is the answer for a buffer without
 * bytes. */
static int
ask_about_all(const cm_buffer *self, int attribute, int empty, int *out)
{
    *out = empty;
    return cm_pages_ask(self, 0, UINT64_MAX, attribute, out, 1);
}

int
cm_buffer_read_prefetch_location(const cm_buffer *self, int *out)
{
    return ask_about_all(self, CM_RANGE_PREFETCHED, CM_NO_LOCATION, out);
}

static PyObject *
get_location(const cm_buffer *self, int attribute)
{
    int location;
    if (ask_about_all(self, attribute, CM_NO_LOCATION, &location) < 0) {
        return NULL;
    }
    return cm_location_new(self->state, location);
}

PyObject *
cm_buffer_get_prefetch_location(PyObject *object, void *unused CM_UNUSED)
{
    return get_location((cm_buffer *)object, CM_RANGE_PREFETCHED);
}

PyObject *
cm_buffer_get_preferred_location(PyObject *object, void *unused CM_UNUSED)
{
    return get_location((cm_buffer *)object, CM_RANGE_PREFERRED);
}

PyObject *
cm_buffer_get_read_mostly(PyObject *object, void *unused CM_UNUSED)
{
    int is_so;
    if (ask_about_all((cm_buffer *)object, CM_RANGE_READ_MOSTLY, 0, &is_so) < 0) {
        return NULL;
    }
    return PyBool_FromLong(is_so);
}

/* Lists the host before the devices, which come in their order. */
PyObject *
cm_buffer_get_accessed_by(PyObject *object, void *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    cm_state *state = self->state;
    const cm_runtime *rt = cm_state_runtime(state);
    int found[CM_MAX_DEVICES + 1];
    if (rt == NULL) {
        return NULL;
    }
    int device_count = rt->device_count;
    for (int i = 0; i <= device_count; i++) {
        found[i] = CM_NO_LOCATION;
    }
    if (cm_pages_ask(self, 0, UINT64_MAX, CM_RANGE_ACCESSED_BY, found, device_count + 1)
        < 0) {
        return NULL;
    }
    PyObject *places = PyList_New(0);
    for (int location = CM_HOST_LOCATION; location < device_count; location++) {
        for (int i = 0; i <= device_count && places != NULL; i++) {
            if (found[i] == location) {
                cm_append(&places, cm_location_new(state, location));
            }
        }
    }
    PyObject *answer = places == NULL ? NULL : PyList_AsTuple(places);
    Py_XDECREF(places);
    return answer;
}

PyMethodDef cm_managed_methods[] = {
    {"prefetch_pages", CM_METHOD(prefetch_pages), CM_KEYWORDS, CM_DOC_prefetch_pages},
    {"_prefetch_rows", prefetch_rows, METH_VARARGS, CM_DOC__prefetch_rows},
    {NULL, NULL, 0, NULL},
};
