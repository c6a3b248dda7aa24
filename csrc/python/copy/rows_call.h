/* SPDX-License-Identifier: Apache-2.0 */
/* Three files share the work of a call of copy_rows(), or of a function like it.
 * rows_ends.c reads and checks the ends. rows_by_kernel.c lets a kernel copy, which
 * reads the numbers itself. rows.c has the Python functions, and copies by runs that
 * the host makes of the numbers.
 *
 * A RowPlan (row_plan.c) reads and checks the ends and the numbers once, and copies as
 * often as it is asked to. It keeps a cm_row_copy and, if a kernel copies, a
 * cm_rows_kernel. Each of its copies works on a cm_row_copy of its own, which borrows
 * the ends of some layers.
 *
 * Locks: none; the GIL is held, except where a function says otherwise. */
#pragma once

#include "python/copy/many.h"
#include "python/copy/rows_chosen.h"
#include "transfer/rows/layers.h"

/* One end: the arrays of all layers, and the numbers of the rows. */
typedef struct cm_rows_end {
    const char *name;         /* of the argument, for errors */
    const char *numbers_name; /* of the argument with the numbers */
    PyObject *object;         /* borrowed: the argument */
    PyObject *arrays;         /* owned tuple; one item if the argument is an array */
    bool is_list;             /* the argument is a list or a tuple */
    cm_operand *operands;     /* owned array */
    Py_ssize_t read_count;    /* how many operands have been read */
    cm_given_rows given;      /* the numbers, as the argument has them */
    cm_chosen_rows numbers;   /* only their count until cm_rows_keep_numbers() */
} cm_rows_end;

/* One copy. The copies of a plan share what was read and checked once, and each has a
 * struct of its own. */
typedef struct cm_row_copy {
    cm_state *state;      /* borrowed */
    const char *function; /* the name of the called function, for errors */
    bool is_plan; /* the ends outlive the call, and each copy checks whether their
                     memory has moved */
    Py_ssize_t first_layer; /* of the whole plan, for errors */
    bool blocking;
    cm_stream *stream;           /* borrowed; may be NULL */
    const cm_progress *progress; /* borrowed; NULL if there is none */
    PyObject *stream_argument;   /* borrowed: the argument stream=; may be NULL */
    uint32_t max_sms;            /* 0 for as many as the kernel takes */
    PyObject *after;             /* borrowed; NULL or None if there is none */
    cm_ticket *after_ticket; /* borrowed; the copy comes after this ticket, too; may be
                                NULL */
    cm_rows_end ends[2];     /* by cm_side */
    Py_ssize_t layer_count;
    /* Owned list of packed memory, and its description, where ends touch. */
    PyObject *packed;
    cm_rows_end between;
} cm_row_copy;

/* What a kernel needs to copy the rows of a cm_row_copy. A plan prepares one of these
 * structs. Each copy by the plan copies the struct and sets the members that are its
 * own. */
typedef struct cm_rows_kernel {
    cm_row_copy *copy; /* borrowed: each copy has its own, with some of the layers */
    int device;        /* the device whose kernel copies */
    cm_kernel_numbers known[2]; /* by cm_side: what the host has written */
    cm_row_numbers read[2];     /* by cm_side: what the kernel reads */
    cm_address sheet;           /* where the host's numbers of both ends begin */
    uint64_t sheet_nbytes;      /* 0 if the host has none */
    cm_operand memory[2];       /* by cm_side: where the kernel reads numbers */
    bool has_memory[2];
    /* Owned: one uint32 of page-locked memory, in which all copies of a plan gather
     * which ends had wrong numbers. In a graph the kernel writes into it. NULL if there
     * is no such word. */
    cm_operand *word;
    PyObject *flag; /* owned by each copy: a buffer of one uint32, which its ticket
                       reads; NULL if wrong numbers are noted in the word of the plan or
                       are not noted */
} cm_rows_kernel;

/* If there are more numbers than this, the GIL is released while they are looked
 * through. With fewer numbers, getting the GIL back may take longer than looking. */
enum { CM_ROWS_MANY_NUMBERS = 4096 };

/* -- rows_ends.c ------------------------------------------------------------------------- */

/* Begin an end: an array, or a list or tuple of arrays. Returns 0, or -1 with an
 * exception. */
int cm_rows_end_begin(cm_rows_end *end, PyObject *object);
void cm_rows_end_fini(cm_rows_end *end);
/* Read the arrays of an end, which has begun. Returns 0, or -1 with an exception. */
int cm_rows_read_end(cm_row_copy *self, cm_side side);
/* Check that both ends have the same number of layers, and that each pair of arrays
 * fits together. Returns 0, or -1 with TypeError or ValueError. */
int cm_rows_check_layers(cm_row_copy *self);
/* Take the numbers of an end from an argument that is not None. Returns 0, or -1 with
 * an exception. */
int cm_rows_take_numbers(cm_row_copy *self, cm_side side, PyObject *argument);
/* Take the arguments dst_rows and src_rows, of which one at most is None. Returns 0, or
 * -1 with an exception. */
int cm_rows_read_numbers(cm_row_copy *self, PyObject *const given[2]);
/* Return the number of rows of the shortest array of an end. A number that is right for
 * this one is right for all of them. */
int64_t cm_rows_shortest(const cm_row_copy *self, cm_side side);
/* Copy the numbers that the host has into `numbers` of each end, unless they are there
 * already. Returns 0, or -1 with an exception. */
int cm_rows_keep_numbers(cm_row_copy *self);
/* Settle the numbers of one end, which have been kept, for the array of a layer, and
 * refuse them if they are wrong. Returns 0, or -1 with an exception. */
int cm_rows_settle(cm_row_copy *self, Py_ssize_t layer, cm_side side);
/* Refuse a number of a row. Always returns -1, with IndexError or ValueError. */
int cm_rows_refuse_number(const cm_row_copy *self, Py_ssize_t layer, cm_side side,
                          cm_row_fault fault);
/* Set *out to whether two arrays of the ends, of which one is written, have bytes in
 * common, as far as their addresses or their files can tell. Needs no GIL.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_rows_find_meeting_arrays(cm_runtime *rt,
                                                   cm_rows_end *const ends[2],
                                                   Py_ssize_t count, bool *out);
/* Set *out to whether, in each layer, target and source are the same array, and this
 * array touches no array of another layer. If so, two rows touch only if they have the
 * same number. Needs no GIL.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_rows_are_in_place(cm_runtime *rt, cm_rows_end *const ends[2],
                                            Py_ssize_t count, bool *out);
/* Let a call come after the streams and the transfer that were given. Returns 0, or -1
 * with an exception. */
int cm_rows_come_after_given(const cm_row_copy *self, cm_call *call);
/* Make and describe the packed memory of all layers. For rows on a device the packed
 * memory is on `device`, or on the device of the rows if `device` is -1. Returns 0, or
 * -1 with an exception. */
int cm_rows_begin_between(cm_row_copy *self, int device);

/* Return the arrays of a layer. */
static inline cm_layer
cm_rows_layer_of(const cm_row_copy *self, Py_ssize_t index)
{
    const cm_operand *dst = &self->ends[CM_DST].operands[index];
    const cm_operand *src = &self->ends[CM_SRC].operands[index];
    return (cm_layer){.array = {dst->region, src->region},
                      .owner = {dst->storage, src->storage}};
}

/* True if numbers of either end lie on a device. */
static inline bool
cm_rows_are_on_device(const cm_row_copy *self)
{
    return self->ends[CM_DST].given.on_device != NULL
           || self->ends[CM_SRC].given.on_device != NULL;
}

/* -- rows_by_kernel.c --------------------------------------------------------------- */

/* Return the device that has the numbers of an end. They must be on a device. */
int cm_rows_device_of_numbers(const cm_rows_end *end);
/* Find a device whose kernel can copy all rows by numbers that it reads itself. Returns
 * 1, 0 if there is none, or -1 with an exception. */
int cm_rows_find_device(cm_row_copy *self, int *device);
/* Prepare copies by the kernel of the device: check the numbers that the host has, and
 * put them where the kernel reads them. Returns 0, or -1 with an exception;
 * cm_rows_kernel_fini() has to be called in any case. */
int cm_rows_kernel_init(cm_rows_kernel *self, cm_row_copy *copy, int device);
void cm_rows_kernel_fini(cm_rows_kernel *self);
/* Make the word for wrong numbers. Without numbers on a device there is none. Returns
 * 0, or -1 with an exception. */
int cm_rows_kernel_add_word(cm_rows_kernel *self);
/* Copy the rows of self->copy. What cm_rows_kernel_init() has prepared may be for more
 * layers than these. Returns 1 with *answer, which is None or a Transfer, or -1 with an
 * exception. Returns 0 without copying if the host has all numbers and they show that
 * another way is better. That is so if the rows are few or long runs, or if arrays
 * touch in such a way that the numbers do not tell whether rows touch. */
int cm_rows_copy_by_kernel(cm_rows_kernel *self, PyObject **answer);
/* Fetch numbers from a device, in the order of the call, and wait for them. Returns 0,
 * or -1 with an exception, for example if the call's stream captures. */
int cm_rows_fetch_numbers(cm_row_copy *self);

/* -- rows.c ------------------------------------------------------------------------- */

/* Set the names by which errors call the two arguments: dst and src, or dsts and srcs.
 */
void cm_rows_name_ends(cm_row_copy *self, const char *dst, const char *src);
/* Read the argument max_sms=, which may be NULL. Returns 0, or -1 with TypeError or
 * ValueError. */
int cm_rows_read_max_sms(cm_row_copy *self, PyObject *given);
/* Find out who may copy what was read. Returns 1 if the kernel of *device may, 0 if
 * runs are made of the numbers, or -1 with an exception. */
int cm_rows_choose(cm_row_copy *self, int *device);
/* Copy runs that are made of the numbers, after fetching those that lie on a device.
 * Returns None or a Transfer, or NULL with an exception. */
PyObject *cm_rows_copy_by_runs(cm_row_copy *self);
