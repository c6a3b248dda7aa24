/* SPDX-License-Identifier: Apache-2.0 */
#include "python/core/sizes.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "python/core/arguments.h"

static const char *
skip_space(const char *text)
{
    while (isspace((unsigned char)*text)) {
        text++;
    }
    return text;
}

/* "1", "1.", "1.5", ".5". NULL: no number. */
static const char *
parse_number(const char *text, long double *out)
{
    long double value = 0;
    long double step = 1;
    const char *begin = text;
    while (isdigit((unsigned char)*text)) {
        value = value * 10 + (*text++ - '0');
    }
    bool has_digits = text != begin;
    if (*text == '.') {
        text++;
        for (; isdigit((unsigned char)*text); has_digits = true) {
            step *= 10;
            value = value * 10 + (*text++ - '0');
        }
    }
    *out = value / step;
    return has_digits ? text : NULL;
}

/* 1024 to the power of the unit's prefix for "KiB", 1000 for "KB"; 0: no unit. */
static long double
unit_factor(const char *unit, size_t length)
{
    static const char prefixes[] = "kmgtpe";
    if (length == 0 || (length == 1 && (unit[0] == 'b' || unit[0] == 'B'))) {
        return 1;
    }
    bool is_binary = length == 3 && strncasecmp(unit + 1, "ib", 2) == 0;
    bool is_decimal = length == 2 && strncasecmp(unit + 1, "b", 1) == 0;
    const char *prefix = strchr(prefixes, tolower((unsigned char)unit[0]));
    if (prefix == NULL || (!is_binary && !is_decimal)) {
        return 0;
    }
    long double factor = 1;
    for (const char *p = prefixes; p <= prefix; p++) {
        factor *= is_binary ? 1024 : 1000;
    }
    return factor;
}

bool
cm_size_parse(const char *text, uint64_t whole_nbytes, uint64_t *out)
{
    long double number = 0;
    const char *unit = parse_number(skip_space(text), &number);
    if (unit == NULL) {
        return false;
    }
    unit = skip_space(unit);
    const char *end = unit;
    while (isalpha((unsigned char)*end) || *end == '%') {
        end++;
    }
    if (*skip_space(end) != '\0') {
        return false;
    }
    if (end - unit == 1 && *unit == '%') {
        if (number > 100 || whole_nbytes == UINT64_MAX) {
            return false;
        }
        *out = (uint64_t)(number * (long double)whole_nbytes / 100);
        return true;
    }
    long double nbytes = number * unit_factor(unit, (size_t)(end - unit));
    bool is_zero = number <= 0 && unit_factor(unit, (size_t)(end - unit)) > 0;
    if (nbytes >= 0x1p63L || (nbytes <= 0 && !is_zero)) {
        return false;
    }
    *out = (uint64_t)nbytes;
    return true;
}

bool
cm_size_is_share(const char *text)
{
    return strchr(text, '%') != NULL;
}

void
cm_size_format(uint64_t nbytes, char out[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)nbytes;
    size_t unit = 0;
    while (value >= 1024 && unit < 6) {
        value /= 1024;
        unit++;
    }
    (void)snprintf(out, 32, "%.4g %s", value, units[unit]);
}

/* Its characters; NULL (no exception) for anything but a str. */
static const char *
text_of(PyObject *object)
{
    const char *text =
        PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, NULL) : NULL;
    if (text == NULL) {
        PyErr_Clear();
    }
    return text;
}

bool
cm_arg_size_is_share(PyObject *object)
{
    const char *text = text_of(object);
    return text != NULL && cm_size_is_share(text);
}

static int
read_size(PyObject *object, const char *name, const char *expected,
          uint64_t whole_nbytes, uint64_t *out)
{
    if (PyBool_Check(object) || (!PyUnicode_Check(object) && !PyIndex_Check(object))) {
        return cm_arg_refuse(object, name, expected);
    }
    if (PyUnicode_Check(object)) {
        const char *text = text_of(object);
        if (text != NULL && cm_size_parse(text, whole_nbytes, out)) {
            return 0;
        }
        if (text != NULL && cm_size_is_share(text) && whole_nbytes == UINT64_MAX) {
            PyErr_Format(PyExc_ValueError,
                         "%s: a share such as %R has no meaning here, or what it is a "
                         "share of is not known",
                         name, object);
            return -1;
        }
        PyErr_Format(PyExc_ValueError, "%s must be %s, not %R", name, expected, object);
        return -1;
    }
    int64_t value;
    if (cm_arg_int64(object, name, &value) < 0) {
        return -1;
    }
    if (value < 0) {
        PyErr_Format(PyExc_ValueError, "%s must not be negative, got %lld", name,
                     (long long)value);
        return -1;
    }
    *out = (uint64_t)value;
    return 0;
}

int
cm_arg_size(PyObject *object, const char *name, uint64_t whole_nbytes, uint64_t *out)
{
    return read_size(object, name, CM_SIZE_EXPECTED, whole_nbytes, out);
}

int
cm_arg_size_whole(PyObject *object, const char *name, uint64_t *out)
{
    return read_size(object, name, CM_SIZE_EXPECTED_WHOLE, UINT64_MAX, out);
}
