/* SPDX-License-Identifier: Apache-2.0 */
/* Test hooks over the fault wrapper: count calls, make the nth fail, delay them. */
#include <string.h>

#include "python/core/arguments.h"
#include "python/module/testing.h"
#include "runtime/faults.h"

/* An operation by either of its names; None is any. */
static int
parse_op(PyObject *object, cm_op *out)
{
    *out = CM_OP_none;
    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (!PyUnicode_Check(object)) {
        return cm_arg_refuse(object, "op", "a str or None");
    }
    for (int op = CM_OP_none + 1; op < CM_OP_COUNT; op++) {
        if (PyUnicode_CompareWithASCIIString(object, cm_op_name((cm_op)op)) == 0
            || PyUnicode_CompareWithASCIIString(object, cm_op_cuda_name((cm_op)op))
                   == 0) {
            *out = (cm_op)op;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "op: there is no operation %R", object);
    return -1;
}

static PyObject *
op_names(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    for (int op = CM_OP_none + 1; list != NULL && op < CM_OP_COUNT; op++) {
        PyObject *row =
            Py_BuildValue("ssi", cm_op_name((cm_op)op), cm_op_cuda_name((cm_op)op),
                          cm_op_min_driver((cm_op)op));
        if (row == NULL || PyList_Append(list, row) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(row);
    }
    return list;
}

static cm_runtime *
faults_runtime(PyObject *module)
{
    cm_runtime *rt = cm_state_runtime(cm_state_of_module(module));
    if (rt != NULL && !cm_is_faults(rt)) {
        PyErr_SetString(PyExc_RuntimeError, "opened without configure(faults=True)");
        return NULL;
    }
    return rt;
}

PyDoc_STRVAR(plan_fault_doc,
"plan_fault($module, /, op, nth, code=2, repeat=False)\n--\n\n"
"Let the `nth` call (1 is the next) of an operation fail; 0 ends it. Resets the counts.");

static PyObject *
plan_fault(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"op", "nth", "code", "repeat", NULL};
    PyObject *values[4];
    int64_t nth = 0;
    int64_t code = CM_CUDA_OUT_OF_MEMORY;
    bool repeat = false;
    cm_op op;
    if (cm_args_parse("plan_fault", args, nargs, kwnames, names, 4, 2, values) < 0
        || parse_op(values[0], &op) < 0
        || cm_testing_int(values[1], "nth", 0, INT64_MAX, &nth) < 0
        || cm_testing_int(values[2], "code", INT32_MIN, INT32_MAX, &code) < 0
        || (values[3] != NULL && cm_arg_bool(values[3], "repeat", &repeat) < 0)) {
        return NULL;
    }
    cm_runtime *rt = faults_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_faults_plan(rt, op, (uint64_t)nth, (int32_t)code, repeat);
    Py_RETURN_NONE;
}

static PyObject *
fault_count(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
            PyObject *kwnames)
{
    static const char *const names[] = {"op", NULL};
    PyObject *value;
    cm_op op;
    if (cm_args_parse("fault_count", args, nargs, kwnames, names, 1, 0, &value) < 0
        || parse_op(value, &op) < 0) {
        return NULL;
    }
    const cm_runtime *rt = faults_runtime(module);
    return rt == NULL ? NULL : PyLong_FromUnsignedLongLong(cm_faults_count(rt, op));
}

static PyObject *
fault_struck(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_runtime *rt = faults_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_op op = cm_faults_struck(rt);
    if (op == CM_OP_none) {
        Py_RETURN_NONE;
    }
    return PyUnicode_FromString(cm_op_name(op));
}

static PyObject *
delay_op(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"op", "us", NULL};
    PyObject *values[2];
    int64_t delay = 0;
    cm_op op;
    if (cm_args_parse("delay_op", args, nargs, kwnames, names, 2, 2, values) < 0
        || parse_op(values[0], &op) < 0
        || cm_testing_int(values[1], "us", 0, UINT32_MAX, &delay) < 0) {
        return NULL;
    }
    cm_runtime *rt = faults_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_faults_delay(rt, op, (uint32_t)delay);
    Py_RETURN_NONE;
}

static PyObject *
calls_with_gil(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_runtime *rt = faults_runtime(module);
    PyObject *counts = rt == NULL ? NULL : PyDict_New();
    for (int op = 1; counts != NULL && op < CM_OP_COUNT; op++) {
        uint64_t count = cm_faults_count_held(rt, (cm_op)op);
        PyObject *number = count == 0 ? NULL : PyLong_FromUnsignedLongLong(count);
        if (count != 0
            && (number == NULL
                || PyDict_SetItemString(counts, cm_op_name((cm_op)op), number) < 0)) {
            Py_CLEAR(counts);
        }
        Py_XDECREF(number);
    }
    return counts;
}

PyMethodDef cm_testing_fault_methods[] = {
    {"op_names", op_names, METH_NOARGS, "(name, CUDA's name, oldest driver) of each."},
    {"plan_fault", CM_TESTING_FAST(plan_fault), CM_TESTING_KEYWORDS, plan_fault_doc},
    {"fault_count", CM_TESTING_FAST(fault_count), CM_TESTING_KEYWORDS,
     "Calls since the last plan_fault()."},
    {"fault_struck", fault_struck, METH_NOARGS, "The operation made to fail, or None."},
    {"delay_op", CM_TESTING_FAST(delay_op), CM_TESTING_KEYWORDS,
     "Delay each call by so many microseconds."},
    {"calls_with_gil", calls_with_gil, METH_NOARGS,
     "Runtime calls made with the GIL held, by operation."},
    {NULL, NULL, 0, NULL},
};
