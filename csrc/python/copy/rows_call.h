/* SPDX-License-Identifier: Apache-2.0 */
/* Three files share the work of a call of copy_rows(), copy_rows_async() or
 * take_rows(). rows_ends.c reads and checks the two ends of the copy, each of which is
 * an array or a list of arrays, and the numbers of the rows. The arrays at one position
 * of the two ends are a pair, which is called a layer. rows_by_kernel.c lets a kernel
 * of a device copy the rows, and the kernel reads the numbers itself. rows.c has the
 * Python functions. If no kernel copies, rows.c makes runs of bytes from the numbers
 * and lets the engine copy the runs.
 *
 * A RowPlan (row_plan.c) reads and checks the ends and the numbers once, and then
 * copies as often as it is asked to. It keeps a cm_row_copy and, if a kernel copies, a
 * cm_rows_kernel. Each copy by the plan makes a cm_row_copy for itself. That struct
 * borrows the plan's arrays for the layers that are copied.
 *
 * Locks: none; the GIL is held, except where a function says otherwise. */
#pragma once

#include "python/copy/many.h"
#include "python/copy/rows_chosen.h"
#include "transfer/rows/layers.h"

/* One end: the arrays of all layers, and the numbers of the rows. */
typedef struct cm_rows_end {
    const char *name;         /* the name of the argument, for errors */
    const char *numbers_name; /* the name of the argument that has the numbers */
    PyObject *object;         /* borrowed: the argument */
    PyObject *arrays;         /* owned tuple; one item if the argument is an array */
    bool is_list;             /* the argument is a list or a tuple */
    cm_operand *operands;     /* owned array */
    Py_ssize_t read_count;    /* how many operands have been read */
    cm_given_rows given;      /* the numbers, as the argument has them */
    cm_chosen_rows numbers; /* has only `count` before cm_rows_keep_numbers() copies the
                               numbers into it */
} cm_rows_end;

/* One copy. Each copy by a plan has a struct of its own, and all these structs share
 * the ends and the numbers that the plan has read and checked. */
typedef struct cm_row_copy {
    cm_state *state;      /* borrowed */
    const char *function; /* the name of the called function, for errors */
    bool is_plan; /* the struct belongs to a RowPlan or to a copy by a RowPlan; the ends
                     then outlive the call, so each copy checks whether their memory has
                     moved */
    Py_ssize_t first_layer; /* the number that layer 0 of this copy has in the whole
                               plan, for errors */
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
    /* Set by cm_rows_choose(): threads of the host gather the rows, although they lie
     * in page-locked memory that a kernel could read. */
    bool gathers;
    /* If the ends touch, `packed` is an owned list of buffers, one for each layer,
     * through which the rows are copied, and `between` describes these buffers as an
     * end. */
    PyObject *packed;
    cm_rows_end between;
} cm_row_copy;

/* What a kernel needs to copy the rows of a cm_row_copy. A plan prepares one of these
 * structs. Each copy by the plan works on a copy of that struct, in which it sets
 * `copy` and `flag` for itself. */
typedef struct cm_rows_kernel {
    cm_row_copy *copy; /* borrowed; a copy by a plan sets its own, which may have only
                          some of the plan's layers */
    int device;        /* the device whose kernel copies */
    cm_kernel_numbers known[2]; /* by cm_side: what the host has written */
    cm_row_numbers read[2];     /* by cm_side: what the kernel reads */
    cm_address sheet; /* the memory to which the host has written the numbers of both
                         ends */
    uint64_t sheet_nbytes; /* 0 if the host has no numbers */
    cm_operand memory[2];  /* by cm_side: where the kernel reads numbers */
    bool has_memory[2];
    /* Owned: one uint32 of page-locked memory. All copies by a plan share this word. If
     * a copy meets wrong numbers, its ticket notes here which end had them. In a graph,
     * which has no ticket, the kernel itself writes into the word. NULL if there is no
     * such word. */
    cm_operand *word;
    PyObject *flag; /* owned by each copy: a buffer of one uint32, in which the kernel
                       notes wrong numbers for the copy's ticket; NULL if the kernel
                       notes wrong numbers in `word` or does not note them */
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
/* Take the numbers of both ends from the arguments dst_rows and src_rows. At most one
 * of the two arguments may be None. Returns 0, or -1 with an exception. */
int cm_rows_read_numbers(cm_row_copy *self, PyObject *const given[2]);
/* Return how many rows the shortest array of an end has. A number that names a row of
 * the shortest array names a row of each array. */
int64_t cm_rows_shortest(const cm_row_copy *self, cm_side side);
/* Copy the numbers that the host has into `numbers` of each end, unless they are there
 * already. Returns 0, or -1 with an exception. */
int cm_rows_keep_numbers(cm_row_copy *self);
/* Settle the numbers of one end for the array of a layer, as cm_chosen_rows_settle()
 * does, and refuse them if they are wrong. cm_rows_keep_numbers() has to be called
 * before. Returns 0, or -1 with an exception. */
int cm_rows_settle(cm_row_copy *self, Py_ssize_t layer, cm_side side);
/* Refuse a number of a row. Always returns -1, with IndexError or ValueError. */
int cm_rows_refuse_number(const cm_row_copy *self, Py_ssize_t layer, cm_side side,
                          cm_row_fault fault);
/* Set *out to whether an array that is written may have bytes in common with another
 * array of either end. Their addresses and their files decide. Needs no GIL.
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
/* Make self->word, in which wrong numbers are noted. If no numbers lie on a device, no
 * word is made, since the host has then checked all numbers. Returns 0, or -1 with an
 * exception. */
int cm_rows_kernel_add_word(cm_rows_kernel *self);
/* Copy the rows of self->copy. It may have fewer layers than the copy for which
 * cm_rows_kernel_init() was called. Returns 1 with *answer, which is None or a
 * Transfer, or -1 with an exception. Returns 0 without copying if the host has all
 * numbers and they show that another way is better. That is so if the rows are few or
 * long runs, or if arrays touch in such a way that the numbers do not tell whether rows
 * touch. */
int cm_rows_copy_by_kernel(cm_rows_kernel *self, PyObject **answer);
/* Copy the numbers that lie on a device to the host, after the work that the call comes
 * after, and wait for them. Returns 0, or -1 with an exception, for example if the
 * call's stream captures. */
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
/* Copy the rows as runs, which are made of the numbers. Numbers that lie on a device
 * are fetched first. Returns None or a Transfer, or NULL with an exception. */
PyObject *cm_rows_copy_by_runs(cm_row_copy *self);
