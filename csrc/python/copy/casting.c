/* SPDX-License-Identifier: Apache-2.0 */
/* Finds out whether the elements of a copy may be converted to the dtype of its target,
 * and how.
 *
 * The casting rules are NumPy's, such as "same_kind". NumPy is asked whether the rule
 * of a call allows elements of one dtype to become elements of the other. If it does,
 * and both dtypes are in the list of numbers in base/dtypes.h, the copy threads convert
 * the elements. If one of the dtypes is not in that list, NumPy converts the elements,
 * a piece at a time, in the thread that copies the piece. The package has the texts of
 * the refusals. */
#include "python/copy/call.h"

#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"

/* -- the rule ----------------------------------------------------------------------------- */

static const char *const rules[CM_RULE_COUNT] = {
    [CM_RULE_NO] = "no",         [CM_RULE_EQUIV] = "equiv",
    [CM_RULE_SAFE] = "safe",     [CM_RULE_SAME_KIND] = "same_kind",
    [CM_RULE_UNSAFE] = "unsafe",
};

/* Return the rule that an argument names, or CM_RULE_COUNT with TypeError or
 * ValueError. */
static cm_casting_rule
read_rule(PyObject *casting)
{
    if (PyUnicode_Check(casting)) {
        for (int rule = 0; rule < CM_RULE_COUNT; rule++) {
            if (PyUnicode_CompareWithASCIIString(casting, rules[rule]) == 0) {
                return (cm_casting_rule)rule;
            }
        }
    }
    (void)cm_package_refuse("buffers.casting", "refuse_rule", PyTuple_Pack(1, casting));
    return CM_RULE_COUNT;
}

/* Return the name of the strictest rule that allows the conversion, or "" if none
 * does. */
static const char *
find_rule(PyObject *from, PyObject *to)
{
    for (int rule = 0; rule < CM_RULE_COUNT; rule++) {
        if (cm_numpy_can_cast(from, to, (cm_casting_rule)rule)) {
            return rules[rule];
        }
    }
    return "";
}

int
cm_check_rule(const char *before, PyObject *from, PyObject *to, PyObject *casting)
{
    cm_casting_rule rule = read_rule(casting);
    if (rule == CM_RULE_COUNT) {
        return -1;
    }
    if (cm_numpy_can_cast(from, to, rule)) {
        return 0;
    }
    return cm_package_refuse(
        "buffers.casting", "refuse_casting",
        Py_BuildValue("(sOOOs)", before, from, to, casting, find_rule(from, to)));
}

PyObject *
cm_check_casting_of(PyObject *module CM_UNUSED, PyObject *args)
{
    const char *before;
    PyObject *from, *to, *casting;
    if (!PyArg_ParseTuple(args, "sOOO:_check_casting", &before, &from, &to, &casting)) {
        return NULL;
    }
    if (!cm_numpy_is_dtype(from) || !cm_numpy_is_dtype(to)) {
        PyErr_SetString(PyExc_TypeError, "_check_casting() takes two dtypes");
        return NULL;
    }
    if (cm_check_rule(before, from, to, casting) < 0) {
        return NULL;
    }
    return Py_NewRef(Py_None);
}

int
cm_check_dtypes(const char *before, const cm_operand *dst, const cm_operand *src)
{
    if (cm_numpy_dtype_equal(dst->dtype, src->dtype)) {
        return 0;
    }
    return cm_package_refuse("buffers.casting", "refuse_dtypes",
                             Py_BuildValue("(sOO)", before, src->dtype, dst->dtype));
}

/* -- scale= and offset= ------------------------------------------------------------------- */

/* Read a real number, or take `fallback` if none is given. A text is refused, even one
 * that float() would read. Returns 0, or -1 with an exception, which the object's own
 * __float__() may have raised. */
static int
read_real(PyObject *value, const char *name, double fallback, double *out)
{
    *out = fallback;
    if (!cm_arg_is_given(value)) {
        return 0;
    }
    PyObject *type = (PyObject *)(void *)Py_TYPE(value);
    if (PyUnicode_Check(value) || PyBytes_Check(value)
        || !PyObject_HasAttrString(type, "__float__")) {
        return cm_package_refuse("buffers.arguments", "refuse_type",
                                 Py_BuildValue("(sOs)", name, value, "a real number"));
    }
    PyObject *number = PyNumber_Float(value);
    if (number == NULL) {
        return -1;
    }
    *out = PyFloat_AsDouble(number);
    Py_DECREF(number);
    return 0;
}

/* Check that elements of `dtype` can be scaled, that is, that they are numbers without
 * an imaginary part. Returns 0, or -1 with TypeError. */
static int
check_scaled(const char *before, PyObject *dtype, cm_number number)
{
    if (number != CM_NUMBER_NONE && cm_number_class_of(number) != CM_CLASS_COMPLEX) {
        return 0;
    }
    return cm_package_refuse("buffers.casting", "refuse_scale",
                             Py_BuildValue("(sO)", before, dtype));
}

/* -- what converts the elements ----------------------------------------------------------- */

/* Says how elements of one dtype become elements of another. If neither the copy
 * threads nor NumPy convert them, they stay as they are. */
typedef struct plan {
    cm_convert convert; /* what the copy threads do, if both dtypes are numbers */
    PyObject *by_numpy; /* owned; the dtype by which NumPy reads the source; NULL unless
                           NumPy converts the elements */
    bool drops_imaginary;
} plan;

/* Fill in the plan for two dtypes. The caller has checked that the rule allows the
 * conversion, and has put the scale into the plan. Returns 0, or -1 with TypeError. */
static int
make_plan(const char *before, PyObject *from, PyObject *to, plan *out)
{
    cm_convert *convert = &out->convert;
    convert->from = cm_numpy_number_meant(from, &convert->from_swapped);
    convert->to = cm_numpy_number_meant(to, &convert->to_swapped);
    if (!convert->scales && cm_numpy_dtype_equal(from, to)
        && cm_numpy_stands_for(from) == cm_numpy_stands_for(to)) {
        *convert = (cm_convert){.from = CM_NUMBER_NONE};
        return 0;
    }
    if (convert->scales
        && (check_scaled(before, from, convert->from) < 0
            || check_scaled(before, to, convert->to) < 0)) {
        return -1;
    }
    out->drops_imaginary = cm_numpy_drops_imaginary(from, to);
    if (convert->from != CM_NUMBER_NONE && convert->to != CM_NUMBER_NONE) {
        return 0;
    }
    *convert = (cm_convert){.from = CM_NUMBER_NONE};
    out->by_numpy = cm_numpy_part_read(from, out->drops_imaginary);
    return out->by_numpy == NULL ? -1 : 0;
}

/* Check that NumPy can convert elements of one dtype to the other. Returns 0, or -1
 * with TypeError. */
static int
check_numpy(const char *before, PyObject *from, PyObject *part, PyObject *to)
{
    if (cm_numpy_try_cast(part, to) == 0) {
        return 0;
    }
    PyObject *type, *why, *traceback;
    PyErr_Fetch(&type, &why, &traceback);
    PyErr_NormalizeException(&type, &why, &traceback);
    int result = cm_package_refuse("buffers.casting", "refuse_conversion",
                                   Py_BuildValue("(sOOO)", before, from, to, why));
    Py_XDECREF(type);
    Py_XDECREF(why);
    Py_XDECREF(traceback);
    return result;
}

/* Let a call convert its elements as the plan says. Fills in *out. If NumPy converts
 * the elements, the call keeps the object that makes the conversion. Returns 0, or -1
 * with an exception. */
static int
follow_plan(cm_call *call, const plan *found, PyObject *to, cm_convert *out)
{
    *out = found->convert;
    if (found->by_numpy == NULL) {
        return 0;
    }
    PyObject *cast = cm_numpy_cast_new(found->by_numpy, to, &out->cast);
    int result = cast == NULL ? -1 : cm_call_keep_object(call, cast);
    Py_XDECREF(cast);
    return result;
}

/* Warn if imaginary parts are dropped. Each call warns, even if its plan was kept by an
 * earlier one. Returns 0, or -1 if the warning is an exception. */
static int
warn_of_imaginary(const plan *found)
{
    if (!found->drops_imaginary) {
        return 0;
    }
    return cm_package_do("buffers.casting", "warn_of_imaginary", PyTuple_New(0));
}

/* -- plans that were made before ---------------------------------------------------------- */

/* The copies of a loop need the same plan again and again, so plans are kept in this
 * table. A hash of the addresses of the two dtypes chooses the entry in which a plan
 * may be kept. A new plan replaces the old plan in its entry. An entry owns its
 * objects, so that no other object can get their addresses. Dtypes with metadata are
 * not kept, because their metadata may keep anything alive. The GIL guards the table.
 */
enum { KNOWN_PLANS = 64 };
static struct known_plan {
    PyObject *from;
    PyObject *to;
    PyObject *casting;
    plan plan;
} known_plans[KNOWN_PLANS];

static struct known_plan *
place_of_plan(const PyObject *from, const PyObject *to)
{
    uint64_t key = (uint64_t)(uintptr_t)from * 3 + (uint64_t)(uintptr_t)to;
    return &known_plans[key * UINT64_C(0x9E3779B97F4A7C15) >> 58];
}

/* Keep a plan, if it follows from the two dtypes and the rule alone. */
static void
remember_plan(PyObject *from, PyObject *to, PyObject *casting, const plan *made)
{
    if (made->convert.scales || !PyUnicode_CheckExact(casting)
        || cm_numpy_has_metadata(from) || cm_numpy_has_metadata(to)) {
        return;
    }
    struct known_plan *place = place_of_plan(from, to);
    struct known_plan old = *place;
    *place =
        (struct known_plan){Py_NewRef(from), Py_NewRef(to), Py_NewRef(casting), *made};
    Py_XINCREF(made->by_numpy);
    Py_XDECREF(old.from);
    Py_XDECREF(old.to);
    Py_XDECREF(old.casting);
    Py_XDECREF(old.plan.by_numpy);
}

/* Return the plan that was kept for these three objects, or NULL. */
static const plan *
recall_plan(PyObject *from, PyObject *to, PyObject *casting)
{
    const struct known_plan *place = place_of_plan(from, to);
    bool is_known = place->from == from && place->to == to && place->casting == casting;
    return is_known ? &place->plan : NULL;
}

/* -- all of it ------------------------------------------------------------------------------ */

int
cm_check_casting(cm_call *call, const char *before, const cm_operand *dst,
                 const cm_operand *src, cm_casting how, cm_convert *out)
{
    PyObject *from = src->dtype;
    PyObject *to = dst->dtype;
    plan made = {.by_numpy = NULL};
    int result = -1;
    *out = (cm_convert){.from = CM_NUMBER_NONE};
    bool scales = cm_arg_is_given(how.scale) || cm_arg_is_given(how.offset);
    if (!cm_arg_is_given(how.casting)) {
        if (!scales) {
            return cm_check_dtypes(before, dst, src);
        }
        return cm_package_refuse("buffers.casting", "refuse_scale_alone",
                                 Py_BuildValue("(s)", before));
    }
    const plan *known = scales ? NULL : recall_plan(from, to, how.casting);
    if (known != NULL) {
        made = *known;
        Py_XINCREF(made.by_numpy); /* the warning may run code that copies, and so
                                      replaces the plan in the entry */
        if (warn_of_imaginary(&made) < 0) {
            goto leave;
        }
        result = follow_plan(call, &made, to, out);
        goto leave;
    }
    made.convert.scales = scales;
    if (cm_check_rule(before, from, to, how.casting) < 0
        || read_real(how.scale, "scale", 1.0, &made.convert.scale) < 0
        || read_real(how.offset, "offset", 0.0, &made.convert.offset) < 0
        || make_plan(before, from, to, &made) < 0 || warn_of_imaginary(&made) < 0) {
        goto leave;
    }
    if (made.by_numpy != NULL && check_numpy(before, from, made.by_numpy, to) < 0) {
        goto leave;
    }
    remember_plan(from, to, how.casting, &made);
    result = follow_plan(call, &made, to, out);
leave:
    Py_XDECREF(made.by_numpy);
    return result < 0 ? -1 : cm_convert_is_on(out);
}
