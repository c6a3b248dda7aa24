/* SPDX-License-Identifier: Apache-2.0 */
/* Puts the module cumem._core together from the tables of the other folders. Importing
 * it makes no CUDA call and loads no driver. */
#include "python/module/module.h"
#include "python/buffer/managed.h"
#include "python/buffer/methods.h"
#include "python/copy/configure.h"
#include "python/copy/copy_functions.h"
#include "python/core/numpy_bridge.h"
#include "python/core/recording.h"
#include "python/device/objects.h"
#include "python/device/wait.h"
#include "python/pool/limits.h"
#include "python/pool/pool_object.h"
#include "python/protocols/protocols.h"

PyDoc_STRVAR(module_doc,
             "The compiled part of cumem: buffers, streams, copies and protocols.\n"
             "\n"
             "Everything public is found in ``cumem`` itself.");

/* -- exec ------------------------------------------------------------------------------- */

static int
make_words(cm_state *state)
{
#define MAKE(word)                                                                     \
    if ((state->words[CM_WORD_##word] = PyUnicode_InternFromString(#word)) == NULL) {  \
        return -1;                                                                     \
    }
    CM_WORDS(MAKE)
#undef MAKE
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        state->kind_words[kind] = PyUnicode_InternFromString(cm_kinds[kind].text);
        if (state->kind_words[kind] == NULL) {
            return -1;
        }
    }
    return 0;
}

static int
add_functions(PyObject *module)
{
    PyMethodDef *const tables[] = {
        cm_protocol_methods,  cm_constructor_methods,     cm_copy_methods,
        cm_device_methods,    cm_driver_methods,          cm_pool_methods,
        cm_shutdown_methods,  cm_configure_methods,       cm_multi_device_methods,
        cm_copy_many_methods, cm_managed_methods,         cm_numpy_memory_methods,
        cm_recording_methods, cm_emulated_stream_methods, cm_dtype_methods,
        cm_row_methods,       cm_sleeping_methods,
    };
    for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++) {
        if (PyModule_AddFunctions(module, tables[i]) < 0) {
            return -1;
        }
    }
    return cm_testing_methods == NULL
               ? 0
               : PyModule_AddFunctions(module, cm_testing_methods);
}

static PyObject *
make_kind(cm_state *state, cm_kind kind)
{
    unsigned traits = cm_kinds[kind].traits;
    PyObject *members[CM_KindFacts_COUNT] = {
        [CM_KindFacts_page_locked] =
            PyBool_FromLong((traits & CM_MEMORY_PAGE_LOCKED) != 0),
        [CM_KindFacts_migrates] = PyBool_FromLong((traits & CM_MEMORY_MIGRATES) != 0),
        [CM_KindFacts_on_device] = PyBool_FromLong((traits & CM_MEMORY_ON_DEVICE) != 0),
        [CM_KindFacts_flags] = PyLong_FromUnsignedLong(cm_kinds[kind].flags),
    };
    return cm_structseq_new(state, CM_STRUCTSEQ_KindFacts, members);
}

/* Make the dict that describes each kind of memory. */
static PyObject *
make_kinds(cm_state *state)
{
    PyObject *kinds = PyDict_New();
    for (int kind = 0; kinds != NULL && kind < CM_KIND_COUNT; kind++) {
        PyObject *facts = make_kind(state, (cm_kind)kind);
        if (facts == NULL
            || PyDict_SetItem(kinds, state->kind_words[kind], facts) < 0) {
            Py_CLEAR(kinds);
        }
        Py_XDECREF(facts);
    }
    return kinds;
}

/* Add constants that the package needs: the kinds of memory with their usual flags, and
 * the version of the runtime that is linked. */
static int
add_constants(PyObject *module)
{
    PyObject *kinds = make_kinds(cm_state_of_module(module));
    int result = -1;
    if (kinds != NULL && PyModule_AddObjectRef(module, "_KINDS", kinds) == 0) {
        result =
            PyModule_AddIntConstant(module, "_BUILT_RUNTIME", cm_cuda_built_version());
    }
    Py_XDECREF(kinds);
    return result;
}

/* Refuse an interpreter in which cumem would corrupt memory or hang. Returns 0, or -1
 * with ImportError. */
static int
check_interpreter(void)
{
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_ImportError,
                        "cumem works only in the main interpreter, which runs its "
                        "deferred clean-up and its exit handler: import it there, or "
                        "use processes instead of subinterpreters");
        return -1;
    }
    return 0;
}

static int
init_overrides(PyObject *module, cm_state *state)
{
    static const char *const names[] = {"cumem.current_stream", "cumem.current_pool",
                                        "cumem.current_device"};
    cm_override *const overrides[] = {&state->current_stream, &state->current_pool,
                                      &state->entered_device};
    PyObject *block_type = cm_block_type_new(module);
    if (block_type == NULL) {
        return -1;
    }
    int result = 0;
    for (size_t i = 0; i < 3 && result == 0; i++) {
        result =
            cm_override_init(overrides[i], block_type, names[i], &state->block_count);
    }
    Py_DECREF(block_type);
    return result;
}

static int
core_exec(PyObject *module)
{
    cm_state *state = cm_state_of_module(module);
    if (check_interpreter() < 0) {
        return -1;
    }
    cm_signals_init();
    cm_tracing_init();
    cm_limits_init(state);
    state->open_runtime = cm_state_open;
    state->leave_parent = cm_state_leave_parent;
    state->admit_peers = cm_pools_admit_peers;
    cm_state_init(state);
    if (cm_numpy_import() < 0 || make_words(state) < 0
        || init_overrides(module, state) < 0
        || cm_register_buffer_types(module, state) < 0
        || cm_register_device_base(module, state) < 0
        || cm_register_stream_type(module, state) < 0
        || cm_register_event_type(module, state) < 0
        || cm_register_transfer_type(module, state) < 0
        || cm_register_row_plan_type(module, state) < 0
        || cm_register_pool_type(module, state) < 0 || add_functions(module) < 0
        || PyModule_AddIntConstant(module, "_TRACE_DOMAIN", CM_TRACE_DOMAIN) < 0
        || cm_add_dtypes(module) < 0 || add_constants(module) < 0) {
        return -1;
    }
    return 0;
}

/* -- life ------------------------------------------------------------------------------- */

static int
visit_all(PyObject **first, size_t count, visitproc visit, void *arg)
{
    for (size_t i = 0; i < count; i++) {
        if (visit == NULL) {
            Py_CLEAR(first[i]);
        }
        else {
            Py_VISIT(first[i]);
        }
    }
    return 0;
}

/* Visit every object that the state owns, except the buffers that are kept for reuse.
 * If `visit` is NULL, drop the objects instead. */
static int
visit_owned(cm_state *state, visitproc visit, void *arg)
{
    enum {
        COUNT = (offsetof(cm_state, exchange_table) - offsetof(cm_state, devices))
        / sizeof(PyObject *)
    };
    char *first = (char *)state + offsetof(cm_state, devices);
    int result = visit_all((PyObject **)(void *)first, COUNT, visit, arg);
    cm_override *const overrides[] = {&state->current_stream, &state->current_pool,
                                      &state->entered_device};
    for (size_t i = 0; result == 0 && i < 3; i++) {
        if (visit == NULL) {
            cm_override_fini(overrides[i]);
        }
        result = visit_all(&overrides[i]->variable, CM_OVERRIDE_OBJECTS, visit, arg);
    }
    return result;
}

static int
core_traverse(PyObject *module, visitproc visit, void *arg)
{
    cm_state *state = cm_state_of_module(module);
    for (int kind = 0; state != NULL && kind < CM_KIND_COUNT; kind++) {
        /* Kept buffers hold a reference to their type. */
        cm_inline_buffer *root = state->free_inline[kind].first;
        for (; root != NULL; root = (cm_inline_buffer *)root->buffer.base) {
            Py_VISIT(Py_TYPE((PyObject *)root));
        }
    }
    return state == NULL ? 0 : visit_owned(state, visit, arg);
}

static int
core_clear(PyObject *module)
{
    cm_state *state = cm_state_of_module(module);
    if (state == NULL) {
        return 0;
    }
    cm_inline_buffers_clear(state);
    return visit_owned(state, NULL, NULL);
}

static void
core_free(void *module)
{
    (void)core_clear(module);
    cm_state *state = cm_state_of_module(module);
    if (state != NULL && state->storages.next != NULL) {
        cm_state_fini(state);
    }
    if (state != NULL) {
        PyMem_Free(atomic_exchange(&state->spare_call, NULL));
    }
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)core_exec},
    {0, NULL},
};

static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "cumem._core",
    .m_doc = module_doc,
    .m_size = sizeof(cm_state),
    .m_slots = slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
