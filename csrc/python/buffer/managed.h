/* SPDX-License-Identifier: Apache-2.0 */
/* This header has what only managed memory can do. Its pages can be moved ahead of use,
 * and the driver takes advice about them, says where they are, and can discard them.
 * All functions need the GIL, and release it while the driver is called. */
#pragma once

#include "python/buffer/buffer_object.h"

/* -- places: a device's index, CM_HOST_LOCATION, CM_NUMA_LOCATION(node) -------------------- */

/* Read an argument that names a place for memory: "cpu", "host", "numa:N", or a device
 * in any form that cm_arg_device() takes. Returns 0, or -1 with TypeError, ValueError
 * or CudaError, which is raised if the driver is too old for NUMA nodes, for
 * instance. */
int cm_arg_location(cm_state *state, PyObject *object, const char *name, int *out);
/* Make a location as users see it: a Device, "host", "numa:N", or None for
 * CM_NO_LOCATION. Returns a new reference, or NULL with an exception. */
PyObject *cm_location_new(cm_state *state, int location);

/* -- pages --------------------------------------------------------------------------------- */

/* Queue a move of the buffer's pages on `stream`, which is any stream argument; NULL or
 * None is the current stream of the device `home`. Warns if the host and a device
 * keep using the pages by turns. Returns 0, or -1 with an exception. */
int cm_buffer_prefetch_to(cm_buffer *self, int location, PyObject *stream, int home);
/* Return the device on whose current stream a move to `location` is queued. It is the
 * device of the location or, for the host, that of the buffer's memory. */
static inline int
cm_buffer_home(const cm_buffer *self, int location)
{
    return location >= 0 ? location : self->storage->device;
}

/* -- methods: METH_FASTCALL | METH_KEYWORDS, and METH_NOARGS ------------------------------- */

PyObject *cm_buffer_prefetch_pages(PyObject *self, PyObject *const *args,
                                   Py_ssize_t nargs, PyObject *kwnames);
PyObject *cm_buffer_advise(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames);
PyObject *cm_buffer_discard(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames);
PyObject *cm_buffer_page_residency(PyObject *self, PyObject *unused);
/* In managed_block.c: on(), and the type of the block that it returns, which is added
 * to the module. */
PyObject *cm_buffer_on(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *kwnames);
int cm_register_managed_block_type(PyObject *module, cm_state *state);

/* -- getters and setters ------------------------------------------------------------------- */

PyObject *cm_buffer_get_prefetch_location(PyObject *self, void *unused);
PyObject *cm_buffer_get_read_mostly(PyObject *self, void *unused);
PyObject *cm_buffer_get_preferred_location(PyObject *self, void *unused);
PyObject *cm_buffer_get_accessed_by(PyObject *self, void *unused);
int cm_buffer_set_read_mostly(PyObject *self, PyObject *value, void *unused);
int cm_buffer_set_preferred_location(PyObject *self, PyObject *value, void *unused);
int cm_buffer_set_accessed_by(PyObject *self, PyObject *value, void *unused);

/* The functions that managed.c adds to the module: prefetch_pages(), and
 * _prefetch_rows(), which tiles() of the package calls. The table ends with an empty
 * row. */
extern PyMethodDef cm_managed_methods[];
