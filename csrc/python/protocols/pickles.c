/* SPDX-License-Identifier: Apache-2.0 */
/* Has the C part of pickling buffers, whose other part is
 * cumem/interchange/pickling.py. A pickle has the bytes, or the name of memory that
 * other processes open by it. */
#include "python/core/package.h"
#include "python/protocols/protocols.h"

PyObject *
cm_buffer_reduce_ex(PyObject *self, PyObject *protocol)
{
    const cm_buffer *buffer = (const cm_buffer *)(void *)self;
    PyObject *pooled = buffer->storage->pool != NULL ? Py_True : Py_False;
    PyObject *shared = cm_shared_facts(buffer);
    return shared == NULL ? NULL
                          : cm_package_call("interchange.pickling", "reduce",
                                            Py_BuildValue("(OOON)", self, protocol,
                                                          pooled, shared));
}
