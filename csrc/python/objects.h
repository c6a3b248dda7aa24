/* SPDX-License-Identifier: Apache-2.0 */
/* The structs behind the Python types and the storage they share. A view holds its
 * storage, the storage holds its pool block, registration or foreign owner: whoever has
 * a pointer keeps the memory. Every object carries its module state (types are final).
 */
#ifndef CM_PYTHON_OBJECTS_H
#define CM_PYTHON_OBJECTS_H

#include <stdatomic.h>

#include "python/state.h"
#include "python/storage_transfers.h"

/* Counted in one number, so that one of them sees that it was the last. */
#define CM_HOLD_EXPORT UINT64_C(1)
#define CM_HOLD_TRANSFER (UINT64_C(1) << 32)

/* One piece of memory, shared by all buffers that look at it. Counted atomically:
 * DLPack deleters drop it from threads without the GIL. Everything else needs the GIL.
 * Exactly one of block, registration+view, foreign is what keeps the bytes. */
typedef struct cm_storage {
    atomic_size_t refs;
    atomic_uint_least64_t holds; /* CM_HOLD_*: what its bytes must outlive */
    cm_list node;                /* in state->storages while open */
    cm_state *state;             /* borrowed */
    uint64_t generation;         /* of the state when it was made */
    cm_kind kind;                /* what consumers may do with it */
    cm_kind residency;           /* where the planner thinks the bytes are */
    int device;                  /* index; 0 for pageable memory that has none */
    unsigned flags;     /* of cudaHostAlloc / cudaMallocManaged / cudaHostRegister */
    void *host;         /* first byte for the host; NULL for device memory */
    cm_address address; /* first byte for the device; 0 if it cannot reach it */
    uint64_t nbytes;
    bool readonly;
    atomic_bool closed; /* by free(), a with block or shutdown(): the bytes are gone, or
                           go with the last hold */
    bool was_exported; /* someone may still work on it that we cannot see: fence on free
                        */
    bool was_named; /* __cuda_array_interface__ gave the address away: its consumers may
                       have kept no more than the object */
    bool unlocks;   /* an import whose pages stay locked until then */
    bool was_captured;   /* a graph may use it at any time: the pool keeps the block */
    uint64_t late_count; /* fills left to streams: writes that no ticket tells of */
    uint64_t seen_count; /* so many of them were waited for */
    size_t view_count;   /* exports through the buffer protocol, ever; each consumer may
                             have kept no more than the object, so the bytes then go with
                             the last reference. Our own arrays take theirs back. GIL */
    cm_pool *pool;       /* kept by the block, held if there is none; NULL for foreign
                            memory */
    cm_block *block;     /* owned, of pool */
    cm_registration *registration; /* owned; NULL unless register() made it */
    PyObject *foreign; /* owned: keeps foreign memory alive (object, memoryview,
                          capsule) */
    void (*foreign_drop)(void *argument); /* instead of or beside `foreign`: C clean-up
                                           */
    void *foreign_argument;
    cm_stream **uses;       /* held streams that worked on it, no duplicates; GIL */
    uint32_t lasting_count; /* so many of them, the first, are others' as well: what is
                               queued there may use it for as long as it lives */
    uint64_t use_calls;     /* times that one was named */
    uint64_t forget_count;  /* times that some were forgotten */
    cm_stream *first_use;   /* uses points here while one is enough */
    uint32_t use_count;
    uint32_t use_capacity;
    bool first_is_lent; /* uses[0] is the state's own record, not held */
    bool in_root;       /* part of a cm_root: freed with it */
    cm_writer *writers; /* unfinished transfers of it, and some finished; GIL */
    uint32_t writer_count;
    uint32_t writer_capacity;
    uint32_t forget_at;    /* so many of them: look again which have finished */
    uint64_t writer_total; /* that there ever were */
    uint64_t failed_total; /* the engine's count when it last looked */
    uint64_t many_call; /* the last copy_many() that named it, and which it was there */
    size_t many_index;
    cm_grave grave;      /* so that what is let go without the GIL cannot fail */
    atomic_bool burying; /* the grave waits, with a reference, for the bytes to go */
} cm_storage;

/* A new storage with refs 1, in state->storages, nothing filled in but what is given.
 * NULL with MemoryError. */
cm_storage *cm_storage_new(cm_state *state, cm_kind kind, int device);
/* The same in place; `fresh`: never initialised before. */
void cm_storage_init(cm_storage *storage, cm_state *state, cm_kind kind, int device,
                     bool fresh);
/* Memory from `pool` for a new storage, first used on `stream` (NULL: any); nbytes 0
 * takes no block: host and address stay NULL. When there is not enough, all that cumem
 * knows is tried before OutOfMemoryError. 0 or -1. The caller keeps the pool meanwhile.
 */
int cm_storage_fill(cm_storage *storage, cm_pool *pool, uint64_t nbytes,
                    cm_stream *stream);
cm_storage *cm_storage_hold(cm_storage *storage);
/* Any thread. With no GIL, Python references go to the graveyard. */
void cm_storage_release(cm_storage *storage, bool have_gil);
/* Close it. The bytes go now, or when the last transfer that uses it is done; what went
 * through the buffer protocol, with the last reference. BufferError while exported,
 * then nothing is done; CudaError where giving back failed. 0 or -1. */
int cm_storage_close(cm_storage *storage);
/* The same for the end of a `with` block: exports put it off too. Failures go to the
 * unraisable hook. */
void cm_storage_retire(cm_storage *storage);
/* Close it and unlock registered pages now, once the streams that use them are done
 * (GIL released). Nothing else may use it. 0, or -1 with CudaError. */
int cm_storage_unlock(cm_storage *storage);
/* "cannot <what> with 2 live exports": 0, or -1 with BufferError. */
int cm_storage_check_not_exported(const cm_storage *storage, const char *what);
/* 0, or -1 with ValueError "… is closed". */
int cm_storage_check_open(const cm_storage *storage);
/* Remember that `stream` works on it. 0, or -1 with MemoryError. GIL held. */
int cm_storage_add_use(cm_storage *storage, cm_stream *stream);
/* The same of a stream on which others work on it, now or later. */
int cm_storage_add_lasting_use(cm_storage *storage, cm_stream *stream);
/* What was remembered when `use_calls` was read came before a call of ours that is done
 * or, if `by` is not NULL, queued there: forget it, but for `by` and lasting ones.
 * Nothing happens where another was named since. GIL, released for streams that end. */
void cm_storage_forget_uses(cm_storage *storage, const cm_stream *by,
                            uint64_t use_calls);
/* Wait (GIL released) for unfinished transfers into it, so that the host reads what was
 * written; with `streams` also for the work of its streams. 0, or -1 with the failure.
 */
int cm_storage_wait(cm_storage *storage, bool streams);
/* A stream that it remembers was given work that writes it. GIL held. */
void cm_storage_set_late(cm_storage *storage);
bool cm_storage_is_late(const cm_storage *storage);
/* The transfers alone, not what fill() queued: for work that is ordered after that
 * anyway. */
int cm_storage_wait_writers(cm_storage *storage);
/* Keep free() and shutdown() of other threads away (BufferError) while a call of ours
 * works on it without the GIL. */
void cm_storage_pin(cm_storage *storage);
void cm_storage_unpin(cm_storage *storage);
/* Count an export; was_exported is set for good. */
void cm_storage_begin_export(cm_storage *storage);
void cm_storage_end_export(cm_storage *storage);
/* Without the GIL, and a reference as well. */
void cm_storage_drop_export(cm_storage *storage);
/* A reference of a transfer, and its end, which fits cm_keep.drop. */
cm_storage *cm_storage_hold_transfer(cm_storage *storage);
void cm_storage_drop_transfer(void *storage);

/* Live Py_buffer exports, DLPack capsules and tensors, and pins. */
static inline size_t
cm_storage_count_exports(const cm_storage *storage)
{
    return atomic_load(&storage->holds) % CM_HOLD_TRANSFER;
}

/* Is a transfer of it not done? */
static inline bool
cm_storage_is_in_transfer(const cm_storage *storage)
{
    return atomic_load(&storage->holds) >= CM_HOLD_TRANSFER;
}

enum { CM_FEW_NDIM = 4 };

typedef struct cm_buffer {
    PyObject_HEAD
    cm_state *state;     /* borrowed */
    cm_storage *storage; /* held; never NULL */
    PyObject *dtype;     /* owned: numpy.dtype */
    PyObject *base;      /* owned: the buffer this is a view of; NULL for none */
    PyObject *weakrefs;
    int64_t offset; /* of element 0 from the storage's first byte */
    int64_t itemsize;
    int ndim;
    bool readonly;
    bool deferred;  /* left its `with` block: closed, whatever becomes of the storage */
    bool as_device; /* made by as_device(): device type over mapped or managed memory */
    int64_t *extents; /* shape[ndim] then strides[ndim] in bytes: `few`, or owned beyond
                         CM_FEW_NDIM */
    int64_t few[2 * CM_FEW_NDIM];
} cm_buffer;

/* A buffer over memory of its own, in one piece with its storage. The storage may live
 * longer; both go with it. */
typedef struct cm_root {
    cm_buffer buffer;
    cm_storage storage;
} cm_root;

/* A buffer with storage and room for its extents; memory, extents and itemsize are the
 * caller's to fill in. NULL with MemoryError. */
cm_root *cm_root_new(cm_state *state, cm_kind kind, int device, PyObject *dtype,
                     int ndim);
/* One that was kept, of one dimension and with no dtype, or NULL without an exception.
 */
static inline cm_root *
cm_root_take(cm_state *state, cm_kind kind)
{
    cm_root_list *list = &state->free_roots[kind];
    cm_root *root = list->first;
    if (CM_LIKELY(root != NULL)) {
        list->first = (cm_root *)root->buffer.base;
        list->room++;
        root->buffer.base = NULL;
        Py_INCREF((PyObject *)root); /* from 0, where its last owner left it */
    }
    return root;
}

/* By the storage's end, GIL held. */
void cm_root_free(cm_root *root);
/* At the module's end: kept ones go, and none is kept any more. */
void cm_roots_clear(cm_state *state);

static inline int64_t *
cm_buffer_shape(const cm_buffer *buffer)
{
    return buffer->extents;
}

static inline int64_t *
cm_buffer_strides(const cm_buffer *buffer)
{
    return buffer->extents + buffer->ndim;
}

/* The Python type for a kind: PinnedBuffer … HostBuffer. Borrowed. */
PyTypeObject *cm_buffer_type_of(const cm_state *state, cm_kind kind);
bool cm_buffer_check(const cm_state *state, PyObject *object);

/* A new buffer of `type` over `storage` (held). dtype and base are held too; shape and
 * strides (bytes; NULL: C order) are copied. Trusts its arguments: callers check that
 * they lie inside the storage. NULL with an exception. */
PyObject *cm_buffer_new(cm_state *state, PyTypeObject *type, cm_storage *storage,
                        int64_t offset, PyObject *dtype, int ndim, const int64_t *shape,
                        const int64_t *strides, bool readonly, PyObject *base);
/* Address of element 0: for the host (NULL on device memory) and for the device. A
 * buffer with no bytes answers 0. On the emulated device the host address of device
 * memory is NULL too. */
void *cm_buffer_host(const cm_buffer *buffer);
cm_address cm_buffer_address(const cm_buffer *buffer);
uint64_t cm_buffer_nbytes(const cm_buffer *buffer);
/* Closed storage or left `with` block: 0, or -1 with ValueError. */
int cm_buffer_check_open(const cm_buffer *buffer);
/* RuntimeError in a forked child that did not get the bytes. 0 or -1. */
int cm_buffer_check_inherited(const cm_buffer *buffer);
/* The buffer as a region. */
void cm_buffer_region(const cm_buffer *buffer, cm_region *out);

typedef struct cm_stream_object {
    PyObject_HEAD
    cm_state *state;
    cm_stream *stream; /* held; NULL after close() or shutdown() */
    cm_list node;      /* in state->streams while open */
    uint64_t id;       /* of `stream`, kept for equality and hash after close() */
    int device;
    uint64_t generation;
    PyObject *weakrefs;
} cm_stream_object;

typedef struct cm_event_object {
    PyObject_HEAD
    cm_state *state;
    cm_runtime *rt;  /* borrowed; NULL after close() or shutdown() */
    cm_list node;    /* in state->events while open */
    uint64_t handle; /* owned */
    int device;
    bool timing;
    bool blocking; /* synchronize() sleeps rather than spinning */
    bool recorded;
    bool closing; /* close() was called; the last call under way destroys the handle */
    int users;    /* calls under way with the GIL released */
    PyObject *weakrefs;
} cm_event_object;

/* A new Python object around a record (held) or a device index (trusted). */
PyObject *cm_stream_object_new(cm_state *state, cm_stream *stream);
PyObject *cm_device_object_new(cm_state *state, int index);
/* The Stream that is current for `device` in this context; new reference. */
PyObject *cm_current_stream(cm_state *state, int device);

/* Any stream argument to a record on loan: None (the current stream of `device`), a
 * Stream, __cuda_stream__, .cuda_stream (torch), .ptr (CuPy), .handle (Numba) or an
 * int. `device` -1 means cumem's current one. NULL with an exception. */
cm_stream *cm_stream_from_object(cm_state *state, PyObject *object, int device);
/* The same for memory of `device`: ValueError for a stream of another one. */
cm_stream *cm_stream_for_device(cm_state *state, PyObject *object, int device);
/* The record that None means, borrowed until Python code runs or the GIL is released;
 * NULL, without an exception, where that takes cm_stream_for_device() to find out. */
static inline cm_stream *
cm_stream_lent(const cm_state *state, int device)
{
    return cm_override_is_empty(&state->current_stream) ? state->default_streams[device]
                                                        : NULL;
}

/* Streams on loan, in an owned array. */
typedef struct cm_stream_list {
    cm_stream **streams;
    uint32_t count;
} cm_stream_list;

/* Takes one stream, or a tuple or list of them; NULL and None: none. 0, or -1 with an
 * exception; to be given back in either case. */
int cm_stream_list_take(cm_state *state, PyObject *object, const char *argument,
                        int device, cm_stream_list *out);
void cm_stream_list_give(cm_state *state, cm_stream_list *list);

/* A loan holds the record and, as cm_state_enter() does, keeps shutdown() away. GIL
 * held; the give may release it. */
cm_stream *cm_stream_take(cm_state *state, cm_stream *stream);
void cm_stream_give(cm_state *state, cm_stream *stream); /* NULL: does nothing */

typedef struct cm_transfer_object {
    PyObject_HEAD
    cm_state *state;
    cm_ticket *ticket; /* held */
    PyObject *dst;     /* owned: both ends stay alive as long as the handle */
    PyObject *src;
    PyObject *weakrefs;
} cm_transfer_object;

/* registrars: each makes its heap types and stores them in the state; 0 or -1 */
int cm_register_buffer_types(PyObject *module, cm_state *state);
int cm_register_stream_type(PyObject *module, cm_state *state);
int cm_register_event_type(PyObject *module, cm_state *state);
int cm_register_device_type(PyObject *module, cm_state *state);
int cm_register_transfer_type(PyObject *module, cm_state *state);
int cm_register_registration_type(PyObject *module, cm_state *state);
int cm_register_pool_type(PyObject *module, cm_state *state);
int cm_register_testing(PyObject *module, cm_state *state);

#endif
