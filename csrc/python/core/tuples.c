/* SPDX-License-Identifier: Apache-2.0 */
#include "python/core/tuples.h"

PyObject *
cm_tuple_from(const int64_t *values, int count)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple != NULL && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL || PyTuple_SetItem(tuple, i, value) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}
