/* SPDX-License-Identifier: Apache-2.0 */
/* What kind of memory arrays have, asked of the driver for all of them at once. */
#include "python/copy/batch_pairs.h"
#include "python/core/errors.h"
#include "python/protocols/import.h"

static cm_piece_end *
end_of(cm_many_pairs *self, const cm_many_question *question)
{
    cm_piece *piece = &self->pieces[question->piece];
    return question->is_dst ? &piece->dst : &piece->src;
}

/* The kind of the end from those of its first and last byte; DEVICE: not the host's. */
static cm_status
ask(cm_registry *registry, cm_page_shares *locked, cm_piece_end *end, uint64_t nbytes)
{
    cm_pointer_info first, last;
    CM_TRY(cm_registry_probe(registry, (uintptr_t)end->host, nbytes, locked, &first,
                             &last));
    if (first.kind == CM_KIND_DEVICE || last.kind == CM_KIND_DEVICE) {
        end->kind = CM_KIND_DEVICE;
    }
    else if (first.kind == last.kind && first.device == last.device
             && first.kind != CM_KIND_PAGEABLE) {
        end->kind = first.kind;
        end->device = first.device;
        end->address = first.device_address;
    }
    return cm_ok();
}

static cm_status
ask_all(cm_many_pairs *self, cm_registry *registry, cm_runtime *rt, int device,
        cm_page_shares *locked)
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, device, &guard));
    cm_status status = cm_ok();
    for (uint64_t i = 0; i < self->question_count && cm_is_ok(status); i++) {
        const cm_many_question *question = &self->questions[i];
        status = ask(registry, locked, end_of(self, question),
                     self->pieces[question->piece].nbytes);
    }
    cm_device_leave(rt, &guard);
    return status;
}

/* Until the engine has shares of its own. Takes them over. */
static int
keep_locked(cm_many_pairs *self, cm_registry *registry, cm_page_shares *locked)
{
    PyObject *pages = cm_locked_pages_new(self->state, registry, locked);
    int result = pages == NULL ? -1 : PyList_Append(self->kept, pages);
    Py_XDECREF(pages);
    return result;
}

int
cm_many_pairs_ask(cm_many_pairs *self, uint64_t *failed)
{
    cm_runtime *rt = cm_state_runtime(self->state);
    if (rt == NULL) {
        return -1;
    }
    int device = self->state->current_device;
    cm_registry *registry = self->state->registry;
    cm_page_shares locked = {.count = 0};
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ask_all(self, registry, rt, device, &locked);
    Py_END_ALLOW_THREADS
    if (locked.count > 0 && keep_locked(self, registry, &locked) < 0) {
        return -1;
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, "while asking about arrays");
    }
    for (uint64_t i = 0; i < self->question_count; i++) {
        const cm_piece_end *end = end_of(self, &self->questions[i]);
        if (end->kind == CM_KIND_DEVICE) {
            *failed = self->pieces[self->questions[i].piece].index;
            PyErr_SetString(PyExc_ValueError, "array: the address is device memory, "
                                              "which the host may not touch");
            return -1;
        }
        if (end->kind != CM_KIND_PAGEABLE && end->device >= 0) {
            self->any_devices |= UINT64_C(1) << end->device;
        }
    }
    return 0;
}
