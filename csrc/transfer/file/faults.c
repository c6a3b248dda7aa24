/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/file/faults.h"

#include <errno.h>

/* Count the read or write, and hold it while the gate is shut. */
static uint64_t
count_call(cm_file_faults *faults, bool is_direct)
{
    const cm_file_plan *plan = &faults->plan;
    uint64_t number = ++faults->count;
    faults->direct_count += is_direct;
    if (plan->held != 0 && number >= plan->held && faults->is_shut) {
        faults->is_waiting = true;
        cm_cond_signal_all(&faults->changed);
        while (faults->is_shut) {
            cm_cond_wait(&faults->changed, &faults->lock);
        }
    }
    return number;
}

static bool
enter(void *context, cm_file_call call, uint64_t *nbytes)
{
    cm_file_faults *faults = context;
    const cm_file_plan *plan = &faults->plan;
    uint64_t number = 0;
    cm_mutex_lock(&faults->lock);
    if (call <= CM_FILE_WRITE_DIRECT) {
        number = count_call(faults, call >= CM_FILE_READ_DIRECT);
    }
    faults->open_count += call == CM_FILE_OPENED_DIRECT;
    faults->open_count -= call == CM_FILE_CLOSE_DIRECT;
    faults->advised_count += call == CM_FILE_ADVISE;
    cm_mutex_unlock(&faults->lock);
    if (number == 0) {
        return !(call == CM_FILE_OPEN_DIRECT && plan->no_direct)
               && !(call == CM_FILE_ASK_CACHE && plan->is_cold);
    }
    if (plan->most != 0 && *nbytes > plan->most) {
        *nbytes = plan->most;
    }
    errno = plan->error;
    return plan->nth == 0 || number < plan->nth
           || (number > plan->nth && !plan->repeat);
}

void
cm_file_faults_init(cm_file_faults *faults)
{
    *faults = (cm_file_faults){.hook = {enter, faults}};
    cm_mutex_init(&faults->lock);
    cm_cond_init(&faults->changed);
}

void
cm_file_faults_fini(cm_file_faults *faults)
{
    cm_cond_fini(&faults->changed);
    cm_mutex_fini(&faults->lock);
}

void
cm_file_faults_set(cm_file_faults *faults, const cm_file_plan *plan)
{
    cm_mutex_lock(&faults->lock);
    faults->plan = *plan;
    faults->count = 0;
    faults->direct_count = 0;
    faults->advised_count = 0;
    faults->is_shut = plan->held != 0;
    faults->is_waiting = false;
    cm_mutex_unlock(&faults->lock);
}

void
cm_file_faults_await(cm_file_faults *faults)
{
    cm_mutex_lock(&faults->lock);
    while (!faults->is_waiting) {
        cm_cond_wait(&faults->changed, &faults->lock);
    }
    cm_mutex_unlock(&faults->lock);
}

void
cm_file_faults_open(cm_file_faults *faults)
{
    cm_mutex_lock(&faults->lock);
    faults->is_shut = false;
    cm_cond_signal_all(&faults->changed);
    cm_mutex_unlock(&faults->lock);
}
