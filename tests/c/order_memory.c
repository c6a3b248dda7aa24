/* SPDX-License-Identifier: Apache-2.0 */
/* Has the oracle's hooks for the operations that make memory and give it back. They
 * keep a list of all ranges of memory, and check that no work may still run on memory
 * that goes back to the runtime. */
#include "order_private.h"

/* Check that the host has seen the end of all work on these bytes, and forget its
 * uses. */
static void
give_back_locked(uint64_t begin, uint64_t nbytes)
{
    for (uint32_t i = order_it->use_count; i-- > 0;) {
        const oracle_use *use = &order_it->uses[i];
        if (use->begin < begin + nbytes && begin < use->end) {
            if (!order_is_seen_locked(use)) {
                order_fail("memory goes back while work may run on it", use->begin,
                           use->seq);
            }
            order_it->uses[i] = order_it->uses[--order_it->use_count];
        }
    }
}

/* Note a range that the runtime has given. */
static void
add_range(uint64_t begin, uint64_t nbytes)
{
    cm_mutex_lock(&order_it->lock);
    order_it->ranges = order_more(order_it->ranges, order_it->range_count,
                                  &order_it->range_capacity, sizeof(*order_it->ranges));
    order_it->ranges[order_it->range_count++] = (oracle_range){begin, nbytes};
    order_it->held_nbytes += nbytes;
    cm_mutex_unlock(&order_it->lock);
}

/* Check and forget the range that begins here, if there is one. */
static void
remove_range(uint64_t begin)
{
    cm_mutex_lock(&order_it->lock);
    for (uint32_t i = 0; i < order_it->range_count; i++) {
        if (order_it->ranges[i].begin == begin) {
            give_back_locked(begin, order_it->ranges[i].nbytes);
            order_it->held_nbytes -= order_it->ranges[i].nbytes;
            order_it->ranges[i] = order_it->ranges[--order_it->range_count];
            break;
        }
    }
    cm_mutex_unlock(&order_it->lock);
}

static cm_status
hook_address_map(cm_runtime *rt, cm_address address, uint64_t nbytes, uint64_t handle)
{
    cm_status status = order_it->real->address_map(rt, address, nbytes, handle);
    cm_mutex_lock(&order_it->lock);
    order_it->held_nbytes += cm_is_ok(status) ? nbytes : 0;
    cm_mutex_unlock(&order_it->lock);
    return status;
}

static cm_status
hook_address_unmap(cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    cm_mutex_lock(&order_it->lock);
    give_back_locked(address, nbytes);
    order_it->held_nbytes -= nbytes;
    cm_mutex_unlock(&order_it->lock);
    return order_it->real->address_unmap(rt, address, nbytes);
}

static cm_status
hook_host_register(cm_runtime *rt, void *host, uint64_t nbytes, unsigned flags)
{
    cm_status status = order_it->real->host_register(rt, host, nbytes, flags);
    if (cm_is_ok(status)) {
        add_range((uint64_t)(uintptr_t)host, nbytes);
    }
    return status;
}

static cm_status
hook_host_unregister(cm_runtime *rt, void *host)
{
    remove_range((uint64_t)(uintptr_t)host);
    return order_it->real->host_unregister(rt, host);
}

static cm_status
hook_host_alloc(cm_runtime *rt, uint64_t nbytes, unsigned flags, void **out)
{
    cm_status status = order_it->real->host_alloc(rt, nbytes, flags, out);
    if (cm_is_ok(status)) {
        add_range((uint64_t)(uintptr_t)*out, nbytes);
    }
    return status;
}

static cm_status
hook_host_free(cm_runtime *rt, void *host)
{
    remove_range((uint64_t)(uintptr_t)host);
    return order_it->real->host_free(rt, host);
}

static cm_status
hook_device_alloc(cm_runtime *rt, uint64_t nbytes, cm_address *out)
{
    cm_status status = order_it->real->device_alloc(rt, nbytes, out);
    if (cm_is_ok(status)) {
        add_range(*out, nbytes);
    }
    return status;
}

static cm_status
hook_managed_alloc(cm_runtime *rt, uint64_t nbytes, unsigned flags, cm_address *out)
{
    cm_status status = order_it->real->managed_alloc(rt, nbytes, flags, out);
    if (cm_is_ok(status)) {
        add_range(*out, nbytes);
    }
    return status;
}

static cm_status
hook_device_free(cm_runtime *rt, cm_address address)
{
    remove_range(address);
    return order_it->real->device_free(rt, address);
}

void
order_hook_memory(cm_ops_table *table)
{
    table->address_map = hook_address_map;
    table->address_unmap = hook_address_unmap;
    table->host_register = hook_host_register;
    table->host_unregister = hook_host_unregister;
    table->host_alloc = hook_host_alloc;
    table->host_free = hook_host_free;
    table->device_alloc = hook_device_alloc;
    table->managed_alloc = hook_managed_alloc;
    table->device_free = hook_device_free;
}
