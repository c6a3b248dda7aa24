/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/file_check.h"

#include "python/core/arguments.h"

/* "out: …" or "ranges[3]: …", in UTF-8 that lives as long as *keep. NULL with an
 * exception. */
static const char *
prefix(const cm_file_end_name *name, const char *text, PyObject **keep)
{
    *keep = name->argument == Py_None
                ? PyUnicode_FromFormat("ranges[%zd]: %s", name->index, text)
                : PyUnicode_FromFormat("%U: %s", name->argument, text);
    return *keep == NULL ? NULL : PyUnicode_AsUTF8AndSize(*keep, NULL);
}

int
cm_file_check_memory(const cm_state *state, const cm_file_end_name *name,
                     PyObject *object)
{
    PyObject *keep;
    if (cm_operand_is_memory(state, object)) {
        return 0;
    }
    const char *what = prefix(name, name->writes ? "the source" : "the target", &keep);
    if (what != NULL) {
        (void)cm_arg_refuse(object, what,
                            "a Buffer, an array or an object with DLPack, "
                            "__cuda_array_interface__ or the buffer protocol");
    }
    Py_XDECREF(keep);
    return -1;
}

static int
refuse_readonly(const cm_file_end_name *name, PyObject *object)
{
    PyObject *keep;
    const char *what = prefix(name, "the target", &keep);
    if (what != NULL) {
        PyErr_Format(PyExc_ValueError, "%s (%R) is read-only", what,
                     (PyObject *)Py_TYPE(object));
    }
    Py_XDECREF(keep);
    return -1;
}

static int
refuse_axis(const cm_file_end_name *name, int axis)
{
    PyObject *keep;
    const char *what = prefix(name, "elements share memory", &keep);
    if (what != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "%s: stride 0 along axis %d; read into memory that holds each "
                     "element once",
                     what, axis);
    }
    Py_XDECREF(keep);
    return -1;
}

/* The first axis whose elements are all the same one; -1: there is none. */
static int
find_repeated_axis(const cm_region *region)
{
    int found = -1;
    for (int axis = region->ndim - 1; axis >= 0; axis--) {
        if (region->shape[axis] == 0) {
            return -1;
        }
        found = region->shape[axis] > 1 && region->strides[axis] == 0 ? axis : found;
    }
    return found;
}

int
cm_file_check_operand(const cm_file_end_name *name, PyObject *object,
                      const cm_operand *operand)
{
    if (name->writes) {
        return 0;
    }
    if (operand->readonly) {
        return refuse_readonly(name, object);
    }
    int axis = find_repeated_axis(&operand->region);
    return axis < 0 ? 0 : refuse_axis(name, axis);
}

int
cm_file_parse_offset(const cm_file_end_name *name, PyObject *object, uint64_t *out)
{
    int64_t offset = 0;
    PyObject *keep = NULL;
    const char *what =
        name->argument == Py_None ? prefix(name, "offset", &keep) : "offset";
    int result = what == NULL ? -1 : cm_arg_int64(object, what, &offset);
    if (result == 0 && offset < 0) {
        PyErr_Format(PyExc_ValueError, "%s must not be negative, not %lld", what,
                     (long long)offset);
        result = -1;
    }
    *out = (uint64_t)offset;
    Py_XDECREF(keep);
    return result;
}
