/* SPDX-License-Identifier: Apache-2.0 */
/* A hook for C tests of the engine. It calls a function of the test before each
 * asynchronous copy that the engine gives to the runtime, in the thread that does
 * so. */
#pragma once

#include <unistd.h>

#include "engine_world.h"

static cm_ops_table hooked_ops;
static const cm_ops_table *real_ops;
static void (*before_copy)(cm_address dst, cm_address src, uint64_t nbytes);

static cm_status
hooked_copy_async(cm_runtime *rt, cm_address dst, cm_address src, uint64_t nbytes,
                  uint64_t stream)
{
    before_copy(dst, src, nbytes);
    return real_ops->copy_async(rt, dst, src, nbytes, stream);
}

/* Install the hook. A test calls this before anything uses the world, and the hook ends
 * when the world is closed. */
CM_UNUSED static void
hook_copies(world *w, void (*hook)(cm_address dst, cm_address src, uint64_t nbytes))
{
    real_ops = w->rt->ops;
    hooked_ops = *real_ops;
    hooked_ops.copy_async = hooked_copy_async;
    before_copy = hook;
    w->rt->ops = &hooked_ops;
}

/* Wait until another thread has set the flag. If that never happens the program ends as
 * failed. */
CM_UNUSED static void
wait_for_flag(const atomic_bool *flag)
{
    WAIT_UNTIL(atomic_load(flag));
}
