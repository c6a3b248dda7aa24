/* SPDX-License-Identifier: Apache-2.0 */
/* Pairs of whatever copy() takes, read into a request of the engine: fast, for there
 * may be many thousands, and complete before anything is copied. GIL held, but while
 * the driver is asked. */
#ifndef CM_PYTHON_COPY_BATCH_PAIRS_H
#define CM_PYTHON_COPY_BATCH_PAIRS_H

#include "python/protocols/protocols.h"
#include "transfer/batch/batch.h"

/* A storage at an end of at least one pair. */
typedef struct cm_many_storage {
    cm_storage *storage; /* held and pinned */
    bool written;
} cm_many_storage;

/* Where the driver must say what kind of memory an array has. */
typedef struct cm_many_question {
    uint64_t piece;
    bool is_dst;
} cm_many_question;

typedef struct cm_many_pairs {
    cm_state *state;   /* borrowed */
    cm_stream *stream; /* borrowed; may be NULL: given to exporters of DLPack */
    PyObject *pairs;   /* owned tuple */
    uint64_t call;     /* its number */
    cm_piece *pieces;  /* owned arrays */
    uint64_t piece_count;
    cm_piece_regions *others;
    uint32_t other_count;
    uint32_t other_room;
    cm_many_storage *storages;
    uint32_t storage_count;
    uint32_t storage_room;
    cm_many_question *questions;
    uint64_t question_count;
    PyObject *kept;       /* owned list: whatever else keeps memory alive */
    uint64_t devices;     /* of ends that are a device's, by index */
    uint64_t any_devices; /* of ends that are not ordinary memory */
    int first_device;     /* of the first end that is a device's; -1: there is none */
    cm_operand dst;       /* of the pair being read */
    cm_operand src;
} cm_many_pairs;

/* Read all of `iterable`; the struct is all zero but for `state` and `stream`. 0, or -1
 * with an exception that names the pair; cm_many_pairs_fini either way. */
int cm_many_pairs_read(cm_many_pairs *self, PyObject *iterable);
void cm_many_pairs_fini(cm_many_pairs *self);

/* batch_ask.c: the last step of the reading. 0, or -1; *failed is the pair, if it is
 * one. */
int cm_many_pairs_ask(cm_many_pairs *self, uint64_t *failed);

#endif
