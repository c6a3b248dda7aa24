/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the emulated device share: its struct and one body per operation. A
 * body answers a bare code (0, a cudaError_t or one of CM_E…); the wrappers that
 * emulated.c generates add the driver's age, the operation's name and the telling
 * argument. Private
 * to emulated*.c. Locks: `lock` guards threads and modules, and is held alone. */
#ifndef CM_RUNTIME_EMULATED_PRIVATE_H
#define CM_RUNTIME_EMULATED_PRIVATE_H

#include <pthread.h>

#include "base/thread.h"
#include "runtime/emulated_handles.h"
#include "runtime/emulated_memory.h"
#include "runtime/emulated_stream.h"

typedef struct cm_emulated {
    cm_runtime base; /* first: a cm_runtime * is a cm_emulated * */
    cm_emulated_config config;
    cm_emulated_memory *memory;   /* owned */
    cm_emulated_streams *streams; /* owned */
    cm_mutex lock;
    pthread_key_t key;             /* the thread's cm_emulated_thread */
    cm_emulated_thread *threads;   /* owned; some of threads that have gone */
    cm_emulated_handles modules;   /* of struct module, owned */
    cm_emulated_handles functions; /* of struct module too: the one it is from */
    uint64_t next_module;
} cm_emulated;

#define CM_EMULATED_BODY(name, cuda, driver, arg, params, args)                        \
    CM_NODISCARD int32_t cm_emulated_op_##name params;
CM_OPS(CM_EMULATED_BODY)
#undef CM_EMULATED_BODY

/* Codes that only the emulated device answers. */
enum {
    CM_CUDA_INITIALIZATION = 3,
    CM_CUDA_INVALID_CONFIGURATION = 9,
    CM_CUDA_INVALID_PITCH = 12,
    CM_CUDA_PEER_UNSUPPORTED = 217,
    CM_CUDA_INVALID_PTX = 218,
    CM_CUDA_SYMBOL_NOT_FOUND = 500,
    CM_CUDA_MISALIGNED_ADDRESS = 716,
};

static inline cm_emulated *
cm_emulated_of(cm_runtime *rt)
{
    return (cm_emulated *)rt;
}

/* What the calling thread has current; makes the record, but no context. Fails: out of
 * memory. */
int32_t cm_emulated_self(cm_emulated *emulated, cm_emulated_thread **out);
/* The same for calls that need a context: like CUDA's runtime they make device 0
 * current for a thread that has none. */
int32_t cm_emulated_enter(cm_emulated *emulated, cm_emulated_thread **out);
/* Enter for a call that a capture forbids. */
int32_t cm_emulated_enter_unsafe(cm_emulated *emulated, cm_emulated_thread **out);
/* Enter for a call that a failed device refuses, too. */
int32_t cm_emulated_enter_healthy(cm_emulated *emulated, cm_emulated_thread **out);

/* emulated_table.c: launch cm_table_copy on the stream, which is of self's device. */
int32_t cm_emulated_table_launch(cm_emulated *emulated, cm_emulated_thread *self,
                                 uint64_t thread_count, const void *params,
                                 uint64_t params_nbytes, uint64_t stream);

void cm_emulated_modules_reset(cm_emulated *emulated, int device);

#endif
