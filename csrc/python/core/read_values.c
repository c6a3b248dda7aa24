/* SPDX-License-Identifier: Apache-2.0 */
/* From values to elements of a dtype, for whatever is no single number: lists, text,
 * times, records, arrays. A value keeps its meaning or is refused.
 *
 * NumPy reads the value first, in the dtype that the value has by itself, and converts
 * that. By itself NumPy would cut text, wrap integers round, make text of numbers that
 * stand beside text, and floats of integers that no 64 bits hold together. So this file
 * looks at what NumPy made, reads again in a wider dtype where that helps, and compares
 * each converted element with the one that it was made of: floats may be rounded, and
 * nothing else may change.
 *
 *     value      an int, float, list, date, record …
 *     natural    the array that NumPy makes of it, wide enough to hold it exactly
 *     result     the same elements in the dtype that they are written to
 *
 * The texts of refusals are cumem/buffers/values.py's. */
#include <math.h>
#include <string.h>

#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/values.h"

/* Kinds of values. Of the numbers each goes into those after it; bools are integers. */
typedef enum value_kind {
    OF_INTEGERS,
    OF_REALS,
    OF_COMPLEX_NUMBERS,
    OF_TEXT,
    OF_TIMES,
    OF_SPANS,
    OF_RAW_BYTES,
    OF_RECORDS,
    OF_OTHERS,
    KIND_COUNT,
    NO_KIND = -1, /* with an exception */
} value_kind;

/* Elements that are compared together: what the check makes of them stays in a cache.
 */
enum { BLOCK_COUNT = 8192 };

/* -- kinds of dtypes --------------------------------------------------------------- */

/* Convert one number to a dtype of another package and back, and read what has become
 * of it. That is NaN if such numbers cannot be converted. 0, or -1 with an exception
 * that is no error. */
static int
echo(PyObject *dtype, bool is_complex, double real, double imaginary, double out[2])
{
    double parts[2] = {real, imaginary};
    size_t nbytes = is_complex ? sizeof(parts) : sizeof(double);
    PyObject *there = NULL;
    PyObject *back = NULL;
    PyObject *plain = cm_numpy_dtype_listed(is_complex ? CM_COMPLEX128 : CM_FLOAT64);
    PyObject *number = plain == NULL ? NULL : cm_numpy_empty(plain, 0, NULL);
    if (number != NULL) {
        memcpy(cm_numpy_data(number), parts, nbytes);
        there = PyObject_CallMethod(number, "astype", "O", dtype);
    }
    if (there != NULL) {
        back = PyObject_CallMethod(there, "astype", "O", plain);
    }
    out[0] = NAN;
    out[1] = 0;
    if (back != NULL) {
        memcpy(out, cm_numpy_data(back), nbytes);
    }
    else if (PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
    }
    Py_XDECREF(back);
    Py_XDECREF(there);
    Py_XDECREF(number);
    Py_XDECREF(plain);
    return PyErr_Occurred() ? -1 : 0;
}

/* The kind of a dtype that another package has registered. Its letter says nothing, so
 * numbers are sent there and back. */
static value_kind
ask_kind(PyObject *dtype)
{
    double back[2];
    if (echo(dtype, true, 0, 1, back) < 0) {
        return NO_KIND;
    }
    if (back[0] == 0 && back[1] == 1) {
        return OF_COMPLEX_NUMBERS;
    }
    if (echo(dtype, false, 0.5, 0, back) < 0) {
        return NO_KIND;
    }
    if (back[0] == 0.5) {
        return OF_REALS;
    }
    if (echo(dtype, false, 1, 0, back) < 0) {
        return NO_KIND;
    }
    return back[0] == 1 ? OF_INTEGERS : OF_OTHERS;
}

static value_kind
kind_of(PyObject *dtype)
{
    if (cm_numpy_is_registered(dtype)) {
        return ask_kind(dtype);
    }
    if (cm_numpy_has_fields(dtype)) {
        return OF_RECORDS;
    }
    switch (cm_numpy_letter(dtype)) {
    case 'b':
    case 'i':
    case 'u':
        return OF_INTEGERS;
    case 'f':
        return OF_REALS;
    case 'c':
        return OF_COMPLEX_NUMBERS;
    case 'S':
    case 'U':
        return OF_TEXT;
    case 'M':
        return OF_TIMES;
    case 'm':
        return OF_SPANS;
    case 'V':
        return OF_RAW_BYTES;
    default:
        return OF_OTHERS;
    }
}

/* May values of one dtype be written as another, as far as their kinds say? 1 or 0, or
 * -1 with an exception. */
static int
keeps_kind(PyObject *source, PyObject *target)
{
    value_kind was = kind_of(source);
    value_kind to = was == NO_KIND ? NO_KIND : kind_of(target);
    switch (to) {
    case NO_KIND:
        return -1;
    case OF_INTEGERS:
    case OF_REALS:
    case OF_COMPLEX_NUMBERS:
        return was <= to;
    case OF_TIMES:
    case OF_SPANS:
        return was == to || was == OF_INTEGERS; /* so many of the dtype's units */
    case OF_RAW_BYTES:
        return was == to || cm_numpy_letter(source) == 'S';
    case OF_TEXT:
        return was == to;
    default:
        return 0;
    }
}

/* -- kinds of objects -------------------------------------------------------------- */

static value_kind
kind_of_item(PyObject *item)
{
    if (PyLong_Check(item) || cm_numpy_is_integer_scalar(item)) {
        return OF_INTEGERS;
    }
    if (PyFloat_Check(item) || cm_numpy_is_real_scalar(item)) {
        return OF_REALS;
    }
    if (PyComplex_Check(item) || cm_numpy_is_complex_scalar(item)) {
        return OF_COMPLEX_NUMBERS;
    }
    return PyUnicode_Check(item) || PyBytes_Check(item) ? OF_TEXT : OF_OTHERS;
}

/* An array of the objects that a value holds, in one row. A new reference, or NULL with
 * an exception. */
static PyObject *
items_of(PyObject *value)
{
    PyObject *dtype = cm_numpy_dtype_of_letter('O');
    PyObject *array = dtype == NULL ? NULL : cm_numpy_from_any(value, dtype, false);
    PyObject *row =
        array == NULL ? NULL : PyObject_CallMethod(array, "reshape", "i", -1);
    Py_XDECREF(array);
    Py_XDECREF(dtype);
    return row;
}

/* The one kind that all items of a value have: of numbers the widest, and OTHER if they
 * share none. The items are looked at one by one. */
static value_kind
kind_of_items(PyObject *value)
{
    PyObject *items = items_of(value);
    if (items == NULL) {
        return NO_KIND;
    }
    bool found[KIND_COUNT] = {false};
    PyObject *const *objects = cm_numpy_data(items);
    for (int64_t i = 0; i < cm_numpy_size(items); i++) {
        found[kind_of_item(objects[i])] = true;
    }
    Py_DECREF(items);
    value_kind widest = OF_INTEGERS;
    int count = 0;
    for (int kind = 0; kind < KIND_COUNT; kind++) {
        if (found[kind]) {
            widest = (value_kind)kind;
            count++;
        }
    }
    bool is_one = widest <= OF_COMPLEX_NUMBERS || count == 1;
    return is_one ? widest : OF_OTHERS;
}

/* True if an item is a negative integer, which NumPy 1.26 turns into the largest number
 * without sign, with no more than a warning. */
static int
has_negative(PyObject *value)
{
    PyObject *items = items_of(value);
    PyObject *zero = items == NULL ? NULL : PyLong_FromLong(0);
    int answer = zero == NULL ? -1 : 0;
    for (int64_t i = 0; answer == 0 && i < cm_numpy_size(items); i++) {
        PyObject *const *objects = cm_numpy_data(items);
        answer = PyObject_RichCompareBool(objects[i], zero, Py_LT);
    }
    Py_XDECREF(zero);
    Py_XDECREF(items);
    return answer;
}

/* -- reading ----------------------------------------------------------------------- */

/* Raise what to pass instead of something that NumPy makes an array of Python objects
 * of. */
static PyObject *
refuse_objects(PyObject *value)
{
    (void)cm_package_refuse("buffers.values", "refuse_objects", PyTuple_Pack(1, value));
    return NULL;
}

/* Have NumPy read a value as the dtype of a letter. */
static PyObject *
read_as(PyObject *value, char letter)
{
    PyObject *dtype = cm_numpy_dtype_of_letter(letter);
    PyObject *array = dtype == NULL ? NULL : cm_numpy_from_any(value, dtype, false);
    Py_XDECREF(dtype);
    return array;
}

/* Read integers of up to 64 bits, with a sign or without one. OverflowError where they
 * do not fit. */
static PyObject *
read_integers(PyObject *value)
{
    PyObject *array = read_as(value, 'q');
    if (array != NULL || !PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return array;
    }
    cm_kept_error kept = cm_error_keep();
    int is_negative = has_negative(value);
    if (is_negative > 0) {
        cm_error_restore(kept);
        return NULL;
    }
    Py_XDECREF(kept.type);
    Py_XDECREF(kept.value);
    Py_XDECREF(kept.traceback);
    return is_negative < 0 ? NULL : read_as(value, 'Q');
}

/* Read numbers that NumPy by itself would not read so, in a dtype with room for all of
 * them: `found` is the widest kind among them. */
static PyObject *
read_numbers(PyObject *value, value_kind found, PyObject *dtype, value_kind to)
{
    bool extended = cm_numpy_is_extended(dtype);
    PyObject *array;
    if (found == OF_COMPLEX_NUMBERS) {
        array = read_as(value, extended ? 'G' : 'D');
    }
    else if (found == OF_REALS || to == OF_REALS || to == OF_COMPLEX_NUMBERS) {
        array = read_as(value, extended ? 'g' : 'd');
    }
    else {
        array = read_integers(value);
    }
    if (array == NULL && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_OverflowError,
                     "an integer among the values does not fit into dtype %S; use a "
                     "wider dtype",
                     dtype);
    }
    return array;
}

/* Read dates and spans of Python, or text, in a unit that NumPy chooses for them. */
static PyObject *
read_times(PyObject *value, value_kind to)
{
    return read_as(value, to == OF_TIMES ? 'M' : 'm');
}

static bool
is_time(value_kind kind)
{
    return kind == OF_TIMES || kind == OF_SPANS;
}

static bool
is_sequence(PyObject *value)
{
    return PyList_Check(value) || PyTuple_Check(value);
}

/* True if NumPy, which made an array of this kind for a target of kind `to`, may have
 * changed what a list of values means. */
static bool
may_differ(PyObject *value, value_kind read, value_kind to)
{
    return is_sequence(value)
           && (read == OF_TEXT || (read == OF_REALS && to == OF_INTEGERS));
}

/* `natural` as it is, or read once more where NumPy's reading has changed what was
 * meant. Takes `natural` over. A new reference, or NULL with an exception. */
static PyObject *
read_again(PyObject *value, PyObject *natural, PyObject *dtype, value_kind to)
{
    PyObject *answer = NULL;
    bool has_objects = cm_numpy_has_objects(natural);
    if (has_objects && cm_numpy_is_array(value)) {
        answer = refuse_objects(value);
        goto done;
    }
    if (has_objects && is_time(to)) {
        answer = read_times(value, to);
        goto done;
    }
    if (!has_objects) {
        value_kind read = kind_of(cm_numpy_dtype_of(natural));
        if (read == NO_KIND) {
            goto done;
        }
        if (!may_differ(value, read, to)) {
            return natural;
        }
    }
    value_kind found = kind_of_items(value);
    if (found == NO_KIND) {
        goto done;
    }
    if (found <= OF_COMPLEX_NUMBERS) {
        answer = read_numbers(value, found, dtype, to);
        goto done;
    }
    if (found != OF_OTHERS && !has_objects) {
        return natural;
    }
    answer = refuse_objects(value);
done:
    Py_DECREF(natural);
    return answer;
}

/* Read a value as the dtype that it has by itself, large enough to hold it exactly. A
 * new reference, or NULL with an exception. */
static PyObject *
read_naturally(PyObject *value, PyObject *dtype)
{
    PyObject *natural = cm_numpy_from_any(value, NULL, false);
    value_kind to = natural == NULL ? NO_KIND : kind_of(dtype);
    if (to == NO_KIND) {
        Py_XDECREF(natural);
        return NULL;
    }
    natural = read_again(value, natural, dtype, to);
    if (natural == NULL || !(is_time(to) || cm_numpy_has_objects(natural))) {
        return natural;
    }
    PyObject *times = NULL;
    if (cm_numpy_has_objects(natural)) {
        refuse_objects(value);
    }
    else if (kind_of(cm_numpy_dtype_of(natural)) != OF_TEXT) {
        return natural;
    }
    else {
        times = read_times(natural, to); /* "2020-01-01" */
    }
    Py_DECREF(natural);
    return times;
}

PyObject *
cm_value_read_array(PyObject *value)
{
    PyObject *array = cm_numpy_from_any(value, NULL, true);
    if (array == NULL) {
        return NULL;
    }
    PyObject *plain = NULL;
    if (cm_numpy_has_objects(array)) {
        refuse_objects(value);
    }
    /* netCDF4 gives masked arrays without being asked. */
    else if (!cm_numpy_may_be_masked(array)
             || cm_package_do("buffers.values", "refuse_masked", PyTuple_Pack(1, array))
                    == 0) {
        plain = cm_numpy_from_any(array, NULL, false);
    }
    Py_DECREF(array);
    return plain;
}

/* -- comparing --------------------------------------------------------------------- */

/* Did a part of a number stay the same? Rounding is no change, and a finite number
 * stays one. A dtype without infinities takes its largest number, `limit`, for all
 * beyond. */
static bool
part_stayed(long double was, long double now, long double limit)
{
    if (isfinite(was) && isfinite(now)) {
        return fabsl(was) <= limit;
    }
    if (isnan(was)) {
        return isnan(now);
    }
    return was == now;
}

/* The largest number of a dtype without infinities; infinity for the others. Negative
 * with an exception. */
static long double
limit_of(PyObject *dtype, bool is_complex)
{
    double back[2];
    if (!cm_numpy_is_registered(dtype)) {
        return (long double)INFINITY;
    }
    if (echo(dtype, is_complex, INFINITY, 0, back) < 0) {
        return -1;
    }
    double largest = hypot(back[0], back[1]);
    return isnan(largest) ? (long double)INFINITY : (long double)largest;
}

/* Find the first number of `was` that is another one in `now`; -1: there is none. A
 * long double tells all 64-bit integers apart, and even a double would tell them from
 * what they wrap round to. 0, or -1 with an exception. */
static int
find_changed_number(PyObject *was, PyObject *now, int64_t *found)
{
    PyObject *dtype = cm_numpy_dtype_of(now);
    value_kind kind = kind_of(dtype);
    PyObject *numbers = NULL; /* so many units, where they are times */
    PyObject *before = NULL;
    PyObject *after = NULL;
    int result = -1;
    if (kind == NO_KIND) {
        return -1;
    }
    bool is_complex = kind == OF_COMPLEX_NUMBERS;
    bool is_exact = !is_complex && kind != OF_REALS;
    long double limit = is_exact ? 0 : limit_of(dtype, is_complex);
    numbers = is_time(kind) ? cm_numpy_cast_array(now, 'q') : Py_NewRef(now);
    if (numbers == NULL || limit < 0) {
        goto done;
    }
    const char widest = is_complex ? 'G' : 'g';
    before = cm_numpy_cast_array(was, widest);
    if (before == NULL) {
        goto done;
    }
    after = cm_numpy_cast_array(numbers, widest);
    if (after == NULL) {
        goto done;
    }
    const long double *a = cm_numpy_data(before);
    const long double *b = cm_numpy_data(after);
    int64_t parts = is_complex ? 2 : 1;
    int64_t count = cm_numpy_size(before) * parts;
    *found = -1;
    for (int64_t i = 0; i < count && *found < 0; i++) {
        bool same = is_exact ? a[i] == b[i] : part_stayed(a[i], b[i], limit);
        *found = same ? -1 : i / parts;
    }
    result = 0;
done:
    Py_XDECREF(after);
    Py_XDECREF(before);
    Py_XDECREF(numbers);
    return result;
}

/* True if two items have the same bytes as far as both reach, and what is left of the
 * first is zero: zeros at the end of an item count for nothing. */
static bool
bytes_stayed(const char *was, size_t was_nbytes, const char *now, size_t now_nbytes)
{
    size_t shared = was_nbytes < now_nbytes ? was_nbytes : now_nbytes;
    if (memcmp(was, now, shared) != 0) {
        return false;
    }
    for (size_t i = shared; i < was_nbytes; i++) {
        if (was[i] != 0) {
            return false;
        }
    }
    return true;
}

/* As find_changed_number(), for text, times and raw bytes, which are converted back.
 * Raw bytes are never converted. */
static int
find_changed_bytes(PyObject *was, PyObject *now, int64_t *found)
{
    PyObject *dtype = cm_numpy_dtype_of(was);
    bool is_raw = cm_numpy_letter(cm_numpy_dtype_of(now)) == 'V';
    PyObject *back =
        is_raw ? Py_NewRef(now) : PyObject_CallMethod(now, "astype", "O", dtype);
    PyObject *before = back == NULL ? NULL : PyObject_CallMethod(was, "tobytes", NULL);
    PyObject *after =
        before == NULL ? NULL : PyObject_CallMethod(back, "tobytes", NULL);
    int result = -1;
    if (after != NULL) {
        size_t was_nbytes = (size_t)cm_numpy_itemsize(dtype);
        size_t now_nbytes = (size_t)cm_numpy_itemsize(cm_numpy_dtype_of(back));
        const char *a = PyBytes_AsString(before);
        const char *b = PyBytes_AsString(after);
        int64_t count = cm_numpy_size(was);
        *found = -1;
        for (int64_t i = 0; i < count && *found < 0; i++) {
            bool same = bytes_stayed(a + (size_t)i * was_nbytes, was_nbytes,
                                     b + (size_t)i * now_nbytes, now_nbytes);
            *found = same ? -1 : i;
        }
        result = 0;
    }
    Py_XDECREF(after);
    Py_XDECREF(before);
    Py_XDECREF(back);
    return result;
}

/* Check that converted elements, one row of them, are the same as before. 0, or -1 with
 * OverflowError for a number, ValueError for others. */
static int
check_same(PyObject *was, PyObject *now)
{
    PyObject *dtype = cm_numpy_dtype_of(was);
    value_kind kind = kind_of(dtype);
    int64_t changed = -1;
    if (kind == NO_KIND) {
        return -1;
    }
    bool is_number = kind <= OF_COMPLEX_NUMBERS;
    int result = is_number ? find_changed_number(was, now, &changed)
                           : find_changed_bytes(was, now, &changed);
    if (result < 0 || changed < 0) {
        return result;
    }
    PyObject *value = PySequence_GetItem(was, (Py_ssize_t)changed);
    if (value == NULL) {
        return -1;
    }
    return cm_package_refuse("buffers.values", "refuse_change",
                             Py_BuildValue("(NNOO)", value, PyBool_FromLong(is_number),
                                           dtype, cm_numpy_dtype_of(now)));
}

/* -- converting -------------------------------------------------------------------- */

/* Can a number neither wrap round nor become infinite on the way? */
static bool
is_harmless(PyObject *source, PyObject *target)
{
    if (cm_numpy_is_registered(source) || cm_numpy_is_registered(target)) {
        return false;
    }
    char from = cm_numpy_letter(source);
    char to = cm_numpy_letter(target);
    if (from == 'b' || from == 'i' || from == 'u') {
        if (to == 'f' || to == 'c') {
            return cm_numpy_itemsize(target) >= 4; /* float32 holds all 64-bit integers
                                                    */
        }
    }
    else if (from != 'f' && from != 'c') {
        return false;
    }
    return cm_numpy_can_cast(source, target, CM_RULE_SAFE);
}

/* Convert a row of elements to another, block by block, and compare. */
static int
convert_row(PyObject *to, PyObject *from)
{
    int64_t count = cm_numpy_size(from);
    int result = 0;
    for (int64_t first = 0; first < count && result == 0; first += BLOCK_COUNT) {
        Py_ssize_t end = (Py_ssize_t)(first + BLOCK_COUNT);
        PyObject *now = PySequence_GetSlice(to, (Py_ssize_t)first, end);
        PyObject *was =
            now == NULL ? NULL : PySequence_GetSlice(from, (Py_ssize_t)first, end);
        result = was == NULL ? -1 : cm_numpy_copy_into(now, was);
        if (result == 0) {
            result = check_same(was, now);
        }
        Py_XDECREF(was);
        Py_XDECREF(now);
    }
    return result;
}

/* Convert and compare the elements of one array to another of its shape. 0 or -1. */
static int
convert_checked(PyObject *result, PyObject *natural)
{
    int done = -1;
    PyObject *now = NULL;
    PyObject *shaped = NULL;
    PyObject *was = PyObject_CallMethod(natural, "reshape", "i", -1);
    if (was == NULL) {
        return -1;
    }
    bool is_row = cm_numpy_is_c_contiguous(result);
    int64_t count = cm_numpy_size(was);
    now = is_row ? PyObject_CallMethod(result, "reshape", "i", -1)
                 : cm_numpy_empty(cm_numpy_dtype_of(result), 1, &count);
    if (now == NULL || convert_row(now, was) < 0) {
        goto done;
    }
    if (is_row) {
        done = 0;
        goto done;
    }
    PyObject *shape = PyObject_GetAttrString(result, "shape");
    shaped = shape == NULL ? NULL : PyObject_CallMethod(now, "reshape", "O", shape);
    Py_XDECREF(shape);
    if (shaped != NULL) {
        done = cm_numpy_copy_into(result, shaped);
    }
done:
    Py_XDECREF(shaped);
    Py_XDECREF(now);
    Py_DECREF(was);
    return done;
}

/* As convert_checked(), without the warnings that NumPy would give of what the check
 * refuses. */
static int
convert_quietly(PyObject *result, PyObject *natural)
{
    PyObject *block = cm_numpy_enter_quiet_block();
    if (block == NULL) {
        return -1;
    }
    int done = convert_checked(result, natural);
    cm_numpy_leave_quiet_block(block);
    return done;
}

/* Plain values, no records, as `dtype`, laid out as they are. Takes `natural` over. A
 * new reference, or NULL with an exception. */
static PyObject *
convert(PyObject *natural, PyObject *dtype)
{
    PyObject *source = cm_numpy_dtype_of(natural);
    PyObject *result = NULL;
    if (cm_numpy_dtype_equal(source, dtype)) {
        return natural;
    }
    int keeps = keeps_kind(source, dtype);
    if (keeps == 0) {
        (void)cm_package_refuse("buffers.values", "refuse_kind",
                                PyTuple_Pack(2, source, dtype));
    }
    if (keeps > 0) {
        result = cm_numpy_empty_like(natural, dtype);
    }
    if (result != NULL) {
        int done = is_harmless(source, dtype) ? cm_numpy_copy_into(result, natural)
                                              : convert_quietly(result, natural);
        if (done < 0) {
            Py_CLEAR(result);
        }
    }
    Py_DECREF(natural);
    return result;
}

/* -- structured dtypes, field by field, each as a value of its own ------------------- */

/* A field of a dtype: the dtype of its elements, and how many of them it has. */
typedef struct field {
    PyObject *base; /* owned, as is the next */
    PyObject *shape;
} field;

static int
read_field(PyObject *dtype, PyObject *name, field *out)
{
    PyObject *of = PyObject_GetItem(dtype, name);
    out->base = of == NULL ? NULL : PyObject_GetAttrString(of, "base");
    out->shape = out->base == NULL ? NULL : PyObject_GetAttrString(of, "shape");
    Py_XDECREF(of);
    if (out->shape == NULL) {
        Py_CLEAR(out->base);
        return -1;
    }
    return 0;
}

/* The same fields, for Python objects: NumPy puts tuples into it as they are. A new
 * dtype, or NULL with an exception. */
static PyObject *
object_dtype(PyObject *dtype)
{
    if (!cm_numpy_has_fields(dtype)) {
        return cm_numpy_dtype_of_letter('O');
    }
    PyObject *fields = PyList_New(0);
    PyObject *names = PyObject_GetAttrString(dtype, "names");
    Py_ssize_t count = names == NULL ? 0 : PyTuple_Size(names);
    for (Py_ssize_t i = 0; fields != NULL && i < count; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        field of;
        if (read_field(dtype, name, &of) < 0) {
            Py_CLEAR(fields);
            break;
        }
        PyObject *inner = object_dtype(of.base);
        cm_append(&fields,
                  inner == NULL ? NULL : Py_BuildValue("(ONO)", name, inner, of.shape));
        Py_DECREF(of.base);
        Py_DECREF(of.shape);
    }
    PyObject *made =
        fields == NULL || names == NULL ? NULL : cm_numpy_read_dtype(fields);
    Py_XDECREF(names);
    Py_XDECREF(fields);
    return made;
}

/* Write the elements of `source`, as values of one field, into that field of `result`.
 * Where they are Python objects they are read as a list, one level of which may be a
 * sub-array's. */
static int
write_field(PyObject *result, PyObject *name, PyObject *source, bool as_objects)
{
    field of;
    int done = -1;
    PyObject *given = NULL;
    PyObject *converted = NULL;
    PyObject *target = PyObject_GetItem(result, name);
    if (target == NULL || read_field(cm_numpy_dtype_of(result), name, &of) < 0) {
        Py_XDECREF(target);
        return -1;
    }
    given =
        as_objects ? PyObject_CallMethod(source, "tolist", NULL) : Py_NewRef(source);
    converted = given == NULL ? NULL : cm_value_read(given, of.base);
    if (converted != NULL && !cm_numpy_same_shape(converted, target)) {
        PyErr_Format(PyExc_ValueError, "a value does not have the shape of field %R",
                     name);
    }
    else if (converted != NULL) {
        done = cm_numpy_copy_into(target, converted);
    }
    Py_XDECREF(converted);
    Py_XDECREF(given);
    Py_DECREF(of.base);
    Py_DECREF(of.shape);
    Py_DECREF(target);
    return done;
}

/* Write all fields of `result` from those of `natural`, by position, as NumPy does;
 * what has no fields goes into every one. 0 or -1. */
static int
write_fields(PyObject *result, PyObject *natural, bool as_objects)
{
    PyObject *dtype = cm_numpy_dtype_of(result);
    PyObject *source = cm_numpy_dtype_of(natural);
    PyObject *names = PyObject_GetAttrString(dtype, "names");
    PyObject *sources = names == NULL ? NULL : PyObject_GetAttrString(source, "names");
    int done = sources == NULL ? -1 : 0;
    Py_ssize_t count = done < 0 ? 0 : PyTuple_Size(names);
    bool has_fields = done == 0 && sources != Py_None;
    if (has_fields && PyTuple_Size(sources) != count) {
        PyErr_Format(PyExc_TypeError,
                     "a value of dtype %S has not the fields of a target of dtype %S",
                     source, dtype);
        done = -1;
    }
    for (Py_ssize_t i = 0; done == 0 && i < count; i++) {
        PyObject *from = has_fields
                             ? PyObject_GetItem(natural, PyTuple_GetItem(sources, i))
                             : Py_NewRef(natural);
        done = from == NULL
                   ? -1
                   : write_field(result, PyTuple_GetItem(names, i), from, as_objects);
        Py_XDECREF(from);
    }
    Py_XDECREF(sources);
    Py_XDECREF(names);
    return done;
}

/* Read records: tuples, lists of them, or arrays. A new reference, or NULL with an
 * exception. */
static PyObject *
read_records(PyObject *value, PyObject *dtype)
{
    bool as_objects = is_sequence(value);
    PyObject *natural = NULL;
    if (as_objects) {
        PyObject *objects = object_dtype(dtype);
        natural = objects == NULL ? NULL : cm_numpy_from_any(value, objects, false);
        Py_XDECREF(objects);
    }
    else {
        natural = cm_value_read_array(value);
    }
    if (natural == NULL || cm_numpy_dtype_equal(cm_numpy_dtype_of(natural), dtype)) {
        return natural;
    }
    PyObject *result = cm_numpy_zeros_like(natural, dtype);
    if (result != NULL && cm_numpy_size(natural) > 0
        && write_fields(result, natural, as_objects) < 0) {
        Py_CLEAR(result);
    }
    Py_DECREF(natural);
    return result;
}

PyObject *
cm_value_read(PyObject *value, PyObject *dtype)
{
    if (value == Py_None) {
        PyErr_SetString(PyExc_TypeError, "None is not a value that can be written");
        return NULL;
    }
    if (cm_numpy_has_fields(dtype)) {
        return read_records(value, dtype);
    }
    PyObject *natural = read_naturally(value, dtype);
    if (natural == NULL) {
        return NULL;
    }
    if (cm_numpy_size(natural) == 0 && is_sequence(value)) {
        Py_DECREF(natural);
        return cm_numpy_from_any(value, dtype, false);
    }
    return convert(natural, dtype);
}
