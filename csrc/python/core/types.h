/* SPDX-License-Identifier: Apache-2.0 */
/* This header has what all types of objects have in common: how their tables are
 * written, and how the types and their objects are made and freed. */
#pragma once

#include <stddef.h>

#include "python/python.h"

/* Casts a function of any calling convention to what a table of methods holds. */
#define CM_METHOD(function) ((PyCFunction)(void (*)(void))(function))
#define CM_KEYWORDS (METH_FASTCALL | METH_KEYWORDS)

/* The table of members of a type whose objects have a member `weakrefs` and show no
 * other. */
#define CM_WEAKREFS(type)                                                              \
    {                                                                                  \
        {"__weaklistoffset__", T_PYSSIZET, offsetof(type, weakrefs), READONLY, NULL},  \
        {NULL, 0, 0, 0, NULL},                                                         \
    }

/* Make a type whose objects have `nbytes` bytes, keep it in *out and add it to the
 * module. Returns 0, or -1 with an exception. */
static inline int
cm_type_add(PyObject *module, const char *name, size_t nbytes, unsigned flags,
            PyType_Slot *slots, PyTypeObject *base, PyTypeObject **out)
{
    PyType_Spec spec = {
        .name = name,
        .basicsize = (int)nbytes,
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | flags,
        .slots = slots,
    };
    *out = (PyTypeObject *)(void *)PyType_FromModuleAndSpec(module, &spec,
                                                            (PyObject *)(void *)base);
    return *out == NULL ? -1 : PyModule_AddType(module, *out);
}

/* The last step of a dealloc: free the object's memory, and drop the reference that it
 * has to its type. */
static inline void
cm_object_free(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(op);
    Py_DECREF(type);
}
