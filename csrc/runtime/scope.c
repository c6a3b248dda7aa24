/* SPDX-License-Identifier: Apache-2.0 */
/* Enters and leaves a scope, which scope.h explains. */
#include "runtime/scope.h"

cm_status
cm_scope_enter(cm_runtime *rt, int device, int mode, cm_scope *scope)
{
    scope->rt = rt;
    CM_TRY(cm_device_enter(rt, device, &scope->guard));
    scope->mode = mode;
    cm_status status = cm_rt_capture_mode_exchange(rt, &scope->mode);
    if (!cm_is_ok(status)) {
        cm_device_leave(rt, &scope->guard);
    }
    else if (scope->mode > mode) {
        int laxer = scope->mode;
        (void)CM_TRY_TWICE(cm_rt_capture_mode_exchange(rt, &laxer));
    }
    return status;
}

void
cm_scope_leave(cm_scope *scope)
{
    /* Try twice: if the thread stayed relaxed, forbidden calls would no longer fail in
     * its own captures. */
    (void)CM_TRY_TWICE(cm_rt_capture_mode_exchange(scope->rt, &scope->mode));
    cm_device_leave(scope->rt, &scope->guard);
}

cm_status
cm_scope_accept_gone(cm_status status)
{
    return cm_code_is_unloading(status.code) ? cm_ok() : status;
}
