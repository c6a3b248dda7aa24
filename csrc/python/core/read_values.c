/* SPDX-License-Identifier: Apache-2.0 */
/* Turns values into elements of a dtype, if they are anything but a single number:
 * lists, text, times, records or arrays. A value that cannot keep its meaning in that
 * dtype is refused.
 *
 * NumPy first reads the value in the dtype that it chooses itself, and then converts
 * the result to the dtype that is asked for. Left alone, NumPy would cut text off, let
 * integers wrap round, turn numbers in a list with text into text, and turn integers
 * that have no 64-bit type in common into floats. So this file looks at the array that
 * NumPy made, reads the value again in a wider dtype if that helps, and compares each
 * converted element with the one that it was made from. Floats may be rounded, but
 * nothing else may change.
 *
 *     value      an int, float, list, date, record …
 *     natural    the array that NumPy makes of it, wide enough to hold it exactly
 *     result     the same elements in the dtype that they are written to
 *
 * The texts of refusals are in cumem/buffers/values.py. */
#include <math.h>
#include <string.h>

#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/values.h"

/* The kinds of values. The kinds of numbers come first, in an order in which a value of
 * one kind can be written as each kind after it. Bools count as integers. */
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
    NO_KIND = -1, /* the kind could not be found, and an exception is set */
} value_kind;

/* The number of elements that are converted and compared at a time. It is small enough
 * for the arrays that the comparison makes of them to stay in a cache. */
enum { BLOCK_COUNT = 8192 };

/* -- kinds of dtypes --------------------------------------------------------------- */

/* Convert one number to a dtype of another package and back, and write what comes back
 * to `out`. If such numbers cannot be converted, *out is NaN. Returns 0, or -1 with an
 * exception that says nothing about the dtype: MemoryError, or one that is not an
 * Exception, such as KeyboardInterrupt. */
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
    else if (PyErr_ExceptionMatches(PyExc_Exception)
             && !PyErr_ExceptionMatches(PyExc_MemoryError)) {
        PyErr_Clear();
    }
    Py_XDECREF(back);
    Py_XDECREF(there);
    Py_XDECREF(number);
    Py_XDECREF(plain);
    return PyErr_Occurred() ? -1 : 0;
}

/* Find out the kind of a dtype that another package has registered. Its letter says
 * nothing about its kind, so a few numbers are converted to it and back. */
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

/* Return 1 if the kinds of two dtypes allow values of the first to be written as the
 * second, 0 if they do not, or -1 with an exception. */
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
        return was == to || was == OF_INTEGERS; /* integers count units */
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

/* Make a one-dimensional array of all Python objects in a value. Returns a new
 * reference, or NULL with an exception. */
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

/* Return the kind that all items of a value have in common. If they are all numbers,
 * that is the widest kind among them. If they have no kind in common, this returns
 * OF_OTHERS. This looks at each item. */
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

/* Return 1 if an item of the value is negative, 0 if none is, or -1 with an exception.
 * NumPy 1.26 would read a negative integer as a huge unsigned one, and only warn. */
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

/* Raise TypeError or OverflowError for a value that NumPy can only read as Python
 * objects, and say what to pass instead. Always returns NULL. */
static PyObject *
refuse_objects(PyObject *value)
{
    (void)cm_package_refuse("buffers.values", "refuse_objects", PyTuple_Pack(1, value));
    return NULL;
}

/* Let NumPy read a value as the dtype that it calls by this letter. Returns a new
 * reference, or NULL with an exception. */
static PyObject *
read_as(PyObject *value, char letter)
{
    PyObject *dtype = cm_numpy_dtype_of_letter(letter);
    PyObject *array = dtype == NULL ? NULL : cm_numpy_from_any(value, dtype, false);
    Py_XDECREF(dtype);
    return array;
}

/* Read integers as int64, or as uint64 if they do not fit into that and none is
 * negative. Returns a new reference, or NULL with an exception, which is OverflowError
 * if they fit into neither. */
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

/* Read numbers in a dtype with room for all of them. If left alone, NumPy would turn
 * these numbers into something else. `found` is the widest kind among them, and `to` is
 * the kind of `dtype`, which they will be converted to. Returns a new reference, or
 * NULL with an exception. */
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

/* Read Python's dates and spans of time, or text, in a unit that NumPy chooses for
 * them. Returns a new reference, or NULL with an exception. */
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

/* True if NumPy may have changed the meaning of a list when it read it as an array of
 * kind `read`. NumPy makes text of numbers that stand beside text, and floats of large
 * integers, which matters if the target is to hold integers. */
static bool
may_differ(PyObject *value, value_kind read, value_kind to)
{
    return is_sequence(value)
           && (read == OF_TEXT || (read == OF_REALS && to == OF_INTEGERS));
}

/* Read the value once more if `natural`, the array that NumPy made of it, may have lost
 * the meaning of it. Otherwise return `natural` as it is. Takes `natural` over. Returns
 * a new reference, or NULL with an exception. */
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

/* Read a value in a dtype of its own, which is wide enough to hold it exactly. `dtype`
 * is the one that it will be converted to. Returns a new reference, or NULL with an
 * exception. */
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
        times = read_times(natural, to); /* text such as "2020-01-01" */
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
    /* Masked arrays are common, since netCDF4 returns them unless it is told not to. */
    else if (!cm_numpy_may_be_masked(array)
             || cm_package_do("buffers.values", "refuse_masked", PyTuple_Pack(1, array))
                    == 0) {
        plain = cm_numpy_from_any(array, NULL, false);
    }
    Py_DECREF(array);
    return plain;
}

/* -- comparing --------------------------------------------------------------------- */

/* True if a part of a number has stayed the same. Rounding does not count as a change,
 * but a finite number must not become infinite or NaN. `limit` is the largest number of
 * the target's dtype. A dtype without infinities turns every larger number into its
 * largest, and that does count as a change. */
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

/* Return the largest number of a dtype that has no infinities, or infinity for the
 * other dtypes. A negative answer means that an exception is set. */
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

/* Compare the numbers of `was` with those that they became in `now`, and set *found to
 * the index of the first that changed, or to -1 if none did. They are compared as long
 * doubles, which can tell all 64-bit integers apart. Even where a long double is only a
 * double, an integer and the integer to which it wraps round become different ones.
 * Returns 0, or -1 with an exception. */
static int
find_changed_number(PyObject *was, PyObject *now, int64_t *found)
{
    PyObject *dtype = cm_numpy_dtype_of(now);
    value_kind kind = kind_of(dtype);
    PyObject *numbers = NULL; /* `now` or, if `now` holds times, their units */
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

/* True if two items have the same bytes, not counting zeros at the end of `was`. If
 * `now` is longer, its further bytes are not looked at. */
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

/* Do the same as find_changed_number() for text, times and raw bytes. `now` is
 * converted back and compared byte by byte, except if it holds raw bytes, which have
 * not been converted. */
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

/* Check that the elements of a one-dimensional array are still the same after the
 * conversion of `was` to `now`. Returns 0, or -1 with an exception, which is
 * OverflowError if a number changed and ValueError if anything else did. */
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

/* True if no number can wrap round or become infinite when it is converted, so that
 * nothing has to be compared. */
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
            /* float32 rounds large integers, but no 64-bit integer is beyond its
             * range. */
            return cm_numpy_itemsize(target) >= 4;
        }
    }
    else if (from != 'f' && from != 'c') {
        return false;
    }
    return cm_numpy_can_cast(source, target, CM_RULE_SAFE);
}

/* Convert the elements of one one-dimensional array into another, block by block, and
 * check each block. Returns 0, or -1 with an exception. */
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

/* Convert the elements of one array into another of its shape, and check that they stay
 * the same. Returns 0, or -1 with an exception. */
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

/* Do the same as convert_checked(), but keep NumPy from warning of values that the
 * check refuses anyway. */
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

/* Convert an array of values that are not records to `dtype`, and keep the order in
 * which its elements are stored. Takes `natural` over. Returns a new reference, or NULL
 * with an exception. */
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

/* -- structured dtypes, each field of which is read as a value ----------------------- */

/* What is known of a field of a structured dtype: the dtype of its elements, and the
 * shape in which it has them. */
typedef struct field {
    PyObject *base; /* owned, as `shape` is */
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

/* Make a dtype with the same fields as `dtype`, but for Python objects, so that NumPy
 * stores the members of tuples as they are. For a dtype without fields it is the dtype
 * of objects. Returns a new reference, or NULL with an exception. */
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

/* Write the elements of `source` into one field of `result`. With `as_objects` they are
 * Python objects, and are read as a list. If the field is a sub-array, the inner levels
 * of that list are the sub-array's. Returns 0, or -1 with an exception. */
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

/* Write the fields of `natural` into those of `result`, matching them by position as
 * NumPy does. If `natural` has no fields, its elements are written into each field.
 * Returns 0, or -1 with an exception. */
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
                     "a value of dtype %S and its target of dtype %S have different "
                     "numbers of fields",
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

/* Read a tuple, a list of tuples or an array as records of a structured dtype. Returns
 * a new reference, or NULL with an exception. */
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
