/* SPDX-License-Identifier: Apache-2.0 */
/* Converts between locations of managed memory and what users write and read for them:
 * a device, "cpu" or "host", or "numa:N". */
#include <string.h>

#include "python/buffer/managed.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"

#define NUMA_PREFIX "numa:"
enum { OLDEST_WITH_NODES = 12020, DECIMAL = 10 };

static bool
is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Return the node in "numa:1", which is a number of one or two digits, or -1 for any
 * other text. */
static int
node_of(const char *text, Py_ssize_t size)
{
    Py_ssize_t begin = (Py_ssize_t)sizeof(NUMA_PREFIX) - 1;
    if (size <= begin || size > begin + 2
        || strncmp(text, NUMA_PREFIX, (size_t)begin) != 0) {
        return -1;
    }
    int node = 0;
    for (Py_ssize_t i = begin; i < size; i++) {
        if (!is_digit(text[i])) {
            return -1;
        }
        node = node * DECIMAL + (text[i] - '0');
    }
    return node;
}

static int
find_node(cm_state *state, int node, const char *name, int *out)
{
    int version = 0;
    cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL) {
        return -1;
    }
    cm_state_enter(state);
    cm_status status = CM_WITHOUT_GIL(cm_rt_driver_version(rt, &version));
    cm_state_leave(state);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, NULL);
    }
    if (version < OLDEST_WITH_NODES) {
        return cm_package_refuse("buffers.arguments", "refuse_node",
                                 Py_BuildValue("(si)", name, OLDEST_WITH_NODES));
    }
    *out = CM_NUMA_LOCATION(node);
    return 0;
}

static int
read_text(cm_state *state, PyObject *object, const char *name, int *out)
{
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == NULL) { /* it has a surrogate, so it names no place */
        PyErr_Clear();
        text = "";
        size = 0;
    }
    bool is_host = (size == 3 && memcmp(text, "cpu", 3) == 0)
                   || (size == 4 && memcmp(text, "host", 4) == 0);
    if (is_host) {
        *out = CM_HOST_LOCATION;
        return 0;
    }
    int node = node_of(text, size);
    if (node >= 0) {
        return find_node(state, node, name, out);
    }
    if (strncmp(text, "cuda", 4) == 0) {
        return cm_arg_device(state, object, name, out);
    }
    return cm_package_refuse("buffers.arguments", "refuse_location",
                             Py_BuildValue("(sO)", name, object));
}

int
cm_arg_location(cm_state *state, PyObject *object, const char *name, int *out)
{
    if (object != NULL && PyUnicode_Check(object)) {
        return read_text(state, object, name, out);
    }
    if (cm_arg_device(state, object, name, out) == 0) {
        return 0;
    }
    bool is_of_devices = strcmp(name, "device") == 0;
    if (is_of_devices || !PyErr_ExceptionMatches(PyExc_TypeError)) {
        return -1;
    }
    PyErr_Clear(); /* its message names only devices, but other places are allowed
                      here */
    bool takes_nodes = strcmp(name, "accessed_by") != 0;
    return cm_arg_refuse(object, name,
                         takes_nodes ? "a device, \"cpu\" or \"numa:N\""
                                     : "a device or \"cpu\"");
}

PyObject *
cm_location_new(cm_state *state, int location)
{
    if (location >= 0) {
        return cm_device_object_new(state, location);
    }
    if (location == CM_NO_LOCATION) {
        return Py_NewRef(Py_None);
    }
    if (location == CM_HOST_LOCATION) {
        return PyUnicode_FromString("host");
    }
    return PyUnicode_FromFormat(NUMA_PREFIX "%d", CM_NUMA_LOCATION(0) - location);
}
