/* SPDX-License-Identifier: Apache-2.0 */
/* From objects to the parts of a copy between one end and several. */
#include <stdlib.h>

#include "python/copy/multi_device.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/tuples.h"
#include "transfer/plan/overlap.h"

/* "target" or "source": what there are several of. */
static const char *
noun_of(const cm_several *several)
{
    return several->kind == CM_SEVERAL_GATHER ? "source" : "target";
}

/* -- objects ----------------------------------------------------------------------------- */

/* Memory is a sequence, too, but not one of ends. */
static int
take_objects(cm_several *several, PyObject *objects)
{
    bool is_end = cm_buffer_check(several->state, objects) || cm_numpy_is_array(objects)
                  || PyUnicode_Check(objects) || PyObject_CheckBuffer(objects);
    several->objects = is_end ? NULL : PySequence_Tuple(objects);
    if (several->objects == NULL) {
        if (is_end || PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "%s: expected a list of %ss, not %R",
                         several->name, noun_of(several), (PyObject *)Py_TYPE(objects));
        }
        return -1;
    }
    Py_ssize_t count = PyTuple_Size(several->objects);
    if (count <= 0 || count > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: there must be at least one %s",
                     several->name, noun_of(several));
        return -1;
    }
    several->count = (uint32_t)count;
    return 0;
}

static int
make_room(cm_several *several)
{
    size_t count = several->count;
    several->many = PyMem_Calloc(count, sizeof(*several->many));
    several->dsts = PyMem_Calloc(count, sizeof(*several->dsts));
    several->srcs = PyMem_Calloc(count, sizeof(*several->srcs));
    several->lead = PyMem_Calloc(count, sizeof(*several->lead));
    several->tickets = PyMem_Calloc(count, sizeof(*several->tickets));
    several->currents = PyMem_Calloc(count + 1, sizeof(*several->currents));
    several->shared = malloc(sizeof(*several->shared));
    if (several->many == NULL || several->dsts == NULL || several->srcs == NULL
        || several->lead == NULL || several->tickets == NULL
        || several->currents == NULL || several->shared == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    atomic_init(&several->shared->refs, 1);
    atomic_init(&several->shared->cancelled, false);
    return 0;
}

static int
read_one(cm_several *several, PyObject *dtype)
{
    return cm_operand_init(several->state, &several->one, several->one_object, dtype,
                           several->stream);
}

static int
read_many(cm_several *several, PyObject *dtype)
{
    for (uint32_t i = 0; i < several->count; i++) {
        PyObject *object = PyTuple_GetItem(several->objects, (Py_ssize_t)i);
        if (cm_operand_init(several->state, &several->many[i], object, dtype,
                            several->stream)
            < 0) {
            return -1;
        }
    }
    return 0;
}

/* Targets first: values become elements of their dtype. */
static int
read_operands(cm_several *several)
{
    if (several->kind == CM_SEVERAL_GATHER) {
        return read_one(several, NULL) < 0 ? -1
                                           : read_many(several, several->one.dtype);
    }
    return read_many(several, NULL) < 0 ? -1
                                        : read_one(several, several->many[0].dtype);
}

static int
check_operands(const cm_several *several)
{
    bool gathers = several->kind == CM_SEVERAL_GATHER;
    for (uint32_t i = 0; i < several->count; i++) {
        if ((gathers ? &several->one : &several->many[i])->readonly) {
            PyErr_Format(PyExc_ValueError, "%s: target %u is read-only", several->name,
                         gathers ? 0u : i);
            return -1;
        }
        int equal = cm_numpy_dtype_equal(several->many[i].dtype, several->one.dtype);
        if (equal < 0) {
            return -1;
        }
        if (equal == 0) {
            PyErr_Format(PyExc_TypeError,
                         "%s: %s %u has dtype %S, the %s has dtype %S; convert first",
                         several->name, noun_of(several), i, several->many[i].dtype,
                         gathers ? "target" : "source", several->one.dtype);
            return -1;
        }
    }
    return 0;
}

/* -- shapes ------------------------------------------------------------------------------ */

/* "{name}: {noun} {i} of shape (…) {why} (…)" */
static int
refuse_shape(const cm_several *several, uint32_t i, const char *why,
             const cm_region *other)
{
    PyObject *mine =
        cm_tuple_from(several->many[i].region.shape, several->many[i].region.ndim);
    PyObject *theirs = cm_tuple_from(other->shape, other->ndim);
    if (mine != NULL && theirs != NULL) {
        PyErr_Format(PyExc_ValueError, "%s: %s %u of shape %R %s %R", several->name,
                     noun_of(several), i, mine, why, theirs);
    }
    Py_XDECREF(mine);
    Py_XDECREF(theirs);
    return -1;
}

static bool
is_shape_equal(const cm_region *a, const cm_region *b, int but)
{
    if (a->ndim != b->ndim) {
        return false;
    }
    for (int axis = 0; axis < a->ndim; axis++) {
        if (axis != but && a->shape[axis] != b->shape[axis]) {
            return false;
        }
    }
    return true;
}

static int
make_broadcast_parts(cm_several *several)
{
    for (uint32_t i = 0; i < several->count; i++) {
        const cm_region *first = &several->many[0].region;
        several->dsts[i] = several->many[i].region;
        several->srcs[i] = several->one.region;
        if (!is_shape_equal(&several->dsts[i], first, -1)) {
            return refuse_shape(several, i, "must have the shape of target 0,", first);
        }
        if (!cm_is_ok(cm_region_broadcast(&several->dsts[i], &several->srcs[i]))) {
            return refuse_shape(several, i, "does not fit the source of shape",
                                &several->one.region);
        }
    }
    return 0;
}

/* The part of `whole` that begins at `start` along the axis and is as long as `part`.
 */
static cm_region
slice_of(const cm_region *whole, const cm_region *part, int axis, int64_t start)
{
    cm_region slice = *whole;
    /* a part of no length may begin past the end, which no stride need reach */
    int64_t offset = part->shape[axis] == 0 ? 0 : start * whole->strides[axis];
    slice.shape[axis] = part->shape[axis];
    slice.host = whole->host == NULL ? NULL : (char *)whole->host + offset;
    slice.address = whole->address == 0 ? 0 : whole->address + (uint64_t)offset;
    return slice;
}

static int
make_sliced_parts(cm_several *several, int64_t axis)
{
    const cm_region *whole = &several->one.region;
    bool gathers = several->kind == CM_SEVERAL_GATHER;
    const char *what = gathers ? "target" : "source";
    if (axis < -whole->ndim || axis >= whole->ndim) {
        PyErr_Format(PyExc_ValueError,
                     "%s: axis %lld is out of range for a %s with %d axes",
                     several->name, (long long)axis, what, whole->ndim);
        return -1;
    }
    int along = (int)(axis < 0 ? axis + whole->ndim : axis);
    if (gathers && whole->shape[along] > 1 && whole->strides[along] == 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s: elements of the target share memory: stride 0 along axis %d",
                     several->name, along);
        return -1;
    }
    int64_t start = 0;
    for (uint32_t i = 0; i < several->count; i++) {
        const cm_region *part = &several->many[i].region;
        if (!is_shape_equal(part, whole, along)) {
            return refuse_shape(several, i, "does not fit a slice of shape", whole);
        }
        if (part->shape[along] > whole->shape[along] - start) {
            start = -1;
            break;
        }
        cm_region slice = slice_of(whole, part, along, start);
        several->dsts[i] = gathers ? slice : *part;
        several->srcs[i] = gathers ? *part : slice;
        start += part->shape[along];
    }
    if (start != whole->shape[along]) {
        PyErr_Format(PyExc_ValueError,
                     "%s: the lengths of the %ss along axis %d must add up to the %lld "
                     "of the %s",
                     several->name, noun_of(several), along,
                     (long long)whole->shape[along], what);
        return -1;
    }
    return 0;
}

/* Parts are copied in any order. One target twice gets the same bytes twice. */
static int
check_targets(const cm_several *several)
{
    uint32_t first, second;
    bool overlap;
    bool skips_same = several->kind == CM_SEVERAL_BROADCAST;
    cm_status status =
        cm_overlap_find(several->state->runtime, several->dsts, several->count,
                        skips_same, &first, &second, &overlap);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(several->state, status, NULL);
    }
    if (overlap) {
        PyErr_Format(PyExc_ValueError,
                     "%s: targets %u and %u overlap, and which is written last is not "
                     "defined",
                     several->name, first, second);
        return -1;
    }
    return 0;
}

static int
check_overlap(const cm_several *several)
{
    if (several->kind != CM_SEVERAL_GATHER && check_targets(several) < 0) {
        return -1;
    }
    const cm_region *one = &several->one.region;
    cm_byte_span place = cm_overlap_span(several->state->runtime, one);
    for (uint32_t i = 0; i < several->count; i++) {
        const cm_region *each = &several->many[i].region;
        cm_byte_span mine = cm_overlap_span(several->state->runtime, each);
        if (cm_overlap_is_real(each, mine.begin, one, place.begin)
            && !cm_region_is_same(&several->dsts[i], &several->srcs[i])) {
            PyErr_Format(PyExc_ValueError,
                         "%s: %s %u overlaps the %s; use copy() for that one",
                         several->name, noun_of(several), i,
                         several->kind == CM_SEVERAL_GATHER ? "target" : "source");
            return -1;
        }
    }
    return 0;
}

/* -- order ------------------------------------------------------------------------------- */

static int
check_capture(const cm_several *several, const cm_stream *stream)
{
    if (!cm_stream_may_capture(stream)) { /* the GIL stays */
        return 0;
    }
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_stream_check_not_capturing(stream);
    Py_END_ALLOW_THREADS
    return cm_is_ok(status) ? 0
                            : cm_py_raise_int(several->state, status, "while copying");
}

/* As copy() does: a blocking call comes after the current streams of its devices. */
static int
add_current(cm_several *several, const cm_region *region)
{
    if (region->kind != CM_KIND_DEVICE) {
        return 0;
    }
    for (uint32_t i = 0; i < several->current_count; i++) {
        if (several->currents[i]->device == region->device) {
            return 0;
        }
    }
    cm_stream *stream = cm_stream_from_object(several->state, Py_None, region->device);
    if (stream == NULL) {
        return -1;
    }
    several->currents[several->current_count++] = stream;
    return check_capture(several, stream);
}

static int
choose_currents(cm_several *several)
{
    if (several->stream != NULL) {
        return check_capture(several, several->stream);
    }
    for (uint32_t i = 0; i < several->count && several->blocking; i++) {
        if (add_current(several, &several->many[i].region) < 0) {
            return -1;
        }
    }
    return several->blocking ? add_current(several, &several->one.region) : 0;
}

/* -- life -------------------------------------------------------------------------------- */

int
cm_several_init(cm_several *several, PyObject *objects, int64_t axis)
{
    cm_state_enter(several->state);
    if (cm_state_runtime(several->state) == NULL || take_objects(several, objects) < 0
        || make_room(several) < 0 || read_operands(several) < 0
        || check_operands(several) < 0
        || (several->kind == CM_SEVERAL_BROADCAST ? make_broadcast_parts(several)
                                                  : make_sliced_parts(several, axis))
               < 0
        || check_overlap(several) < 0) {
        return -1;
    }
    return choose_currents(several);
}

void
cm_several_fini(cm_several *several)
{
    for (uint32_t i = 0; several->many != NULL && i < several->count; i++) {
        cm_operand_fini(&several->many[i]);
    }
    for (uint32_t i = 0; i < several->current_count; i++) {
        cm_stream_give(several->state, several->currents[i]);
    }
    cm_operand_fini(&several->one);
    PyMem_Free(several->many);
    PyMem_Free(several->dsts);
    PyMem_Free(several->srcs);
    PyMem_Free(several->lead);
    PyMem_Free(several->tickets);
    PyMem_Free(several->currents);
    if (several->shared != NULL && atomic_fetch_sub(&several->shared->refs, 1) == 1) {
        free(several->shared);
    }
    Py_CLEAR(several->objects);
    cm_state_leave(several->state);
}
