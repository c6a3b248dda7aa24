/* SPDX-License-Identifier: Apache-2.0 */
/* What cumem/tools/_testing.py, the hooks of the test-suite, is made of: it calls
 * functions of the core by their addresses. Not part of the public interface. */
#include <stddef.h>

#include "python/core/errors.h"
#include "python/module/module.h"
#include "python/protocols/protocols.h"
#include "runtime/emulated/emulated.h"
#include "runtime/faults.h"

/* Of each name an address, an offset or a count. */
PyObject *
cm_addresses(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
#define NAMED(name)                                                                    \
    {                                                                                  \
        #name, (uintptr_t)(name)                                                       \
    }
    const struct {
        const char *name;
        uintptr_t value;
    } rows[] = {
        NAMED(cm_array_interface_dict),
        NAMED(cm_deferred_add),
        NAMED(cm_deferred_new),
        NAMED(cm_device_enter),
        NAMED(cm_device_leave),
        NAMED(cm_devices_in_use),
        NAMED(cm_emulated_host_pages),
        NAMED(cm_emulated_read_counts),
        NAMED(cm_emulated_set_capturing),
        NAMED(cm_engine_count_pending),
        NAMED(cm_engine_deny_peers),
        NAMED(cm_engine_poll),
        NAMED(cm_engine_counts),
        NAMED(cm_faults_count),
        NAMED(cm_faults_count_held),
        NAMED(cm_faults_delay),
        NAMED(cm_faults_plan),
        NAMED(cm_faults_struck),
        NAMED(cm_op_facts),
        NAMED(cm_pool_check),
        NAMED(cm_py_raise),
        NAMED(cm_registry_count),
        NAMED(cm_routes),
        NAMED(cm_runtime_host_alias),
        NAMED(cm_state_drop_deferred),
        NAMED(cm_state_engine),
        NAMED(cm_storage_order_handle),
        NAMED(state),
        {"runtime", (uintptr_t)state->runtime},
        {"has_faults", state->runtime != NULL && state->runtime->inner != NULL},
        {"registry", (uintptr_t)state->registry},
        {"engine", (uintptr_t)state->engine},
        {"storages", cm_list_count(&state->storages)},
        {"call_pending", (uintptr_t)&state->call_pending},
        {"storage_of_buffer", offsetof(cm_buffer, storage)},
        {"file_faults", (uintptr_t)&state->file_faults},
        {"op_count", CM_OP_COUNT},
        {"route_count", CM_ROUTE_COUNT},
        {"route_size", sizeof(cm_route_row)}, /* begins with its name */
    };
#undef NAMED
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < sizeof(rows) / sizeof(rows[0]); i++) {
        cm_append(&list, Py_BuildValue("(sK)", rows[i].name,
                                       (unsigned long long)rows[i].value));
    }
    return list;
}
