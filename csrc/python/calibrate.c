/* SPDX-License-Identifier: Apache-2.0 */
/* When the machine is measured, or figures of it are looked for: the package does the
 * rest. */
#include "transfer/calibrate.h"

#include "base/cpu_count.h"
#include "python/arguments.h"
#include "python/configure.h"
#include "python/copy_functions.h"
#include "python/errors.h"

enum {
    LOOK_NBYTES = 64 << 10,   /* shorter copies do not notice */
    MEASURE_NBYTES = 64 << 20 /* longer ones gain more than measuring takes, and soon */
};

/* Exceptions that are no errors, KeyboardInterrupt for one, end what is done; others
 * never end a copy. */
static int
settle_exception(void)
{
    if (!PyErr_Occurred()) {
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_WriteUnraisable(NULL);
    return 0;
}

/* Figures known by now are taken; where there are none, and `measures`, they are found.
 */
static int
ask(cm_state *state, int device, bool measures)
{
    state->tuning.has_looked = true;
    state->tuning.has_measured |= measures;
    cm_state_enter(state);
    PyObject *hook = state->hooks.calibration;
    PyObject *done =
        hook == NULL
            ? Py_NewRef(Py_False)
            : PyObject_CallFunction(hook, "iO", device, measures ? Py_True : Py_False);
    if (done != NULL) {
        state->tuning.has_measured |= PyObject_IsTrue(done) == 1;
    }
    Py_XDECREF(done);
    cm_state_leave(state);
    return settle_exception();
}

/* In a forked child nothing that is found could be put to use. */
static bool
is_real(const cm_state *state)
{
    return state->runtime != NULL && !cm_runtime_is_forked(state->runtime)
           && (state->runtime->backend != CM_BACKEND_EMULATED || state->tuning.as_real);
}

int
cm_calibrate_look(cm_state *state)
{
    return state->tuning.has_looked || !is_real(state)
               ? 0
               : ask(state, state->current_device, false);
}

static bool
is_idle(const cm_stream *stream)
{
    bool idle = false;
    bool capturing = true;
    return cm_is_ok(cm_stream_ask_capturing(stream->rt, stream->device, stream->handle,
                                            &capturing))
           && !capturing && cm_is_ok(cm_stream_query(stream, &idle)) && idle;
}

/* Nothing is under way that would be disturbed, or would disturb. */
static bool
is_quiet(cm_state *state, const cm_copy_request *request)
{
    if (request->stream == NULL || cm_engine_count_pending(state->engine) > 0) {
        return false;
    }
    bool idle;
    Py_BEGIN_ALLOW_THREADS
    idle = is_idle(request->stream);
    Py_END_ALLOW_THREADS
    return idle;
}

int
cm_calibrate_for(cm_state *state, const cm_copy_request *request)
{
    const cm_region *dst = &request->dst;
    const cm_region *device = dst->kind == CM_KIND_DEVICE ? dst : &request->src;
    const cm_region *host = device == dst ? &request->src : dst;
    int64_t count;
    if (CM_LIKELY(state->tuning.has_measured) || !is_real(state)
        || device->kind != CM_KIND_DEVICE || host->kind != CM_KIND_PAGEABLE
        || !cm_is_ok(cm_region_count(dst, &count))) {
        return 0;
    }
    int64_t most = INT64_MAX / dst->itemsize;
    int64_t nbytes = count < most ? count * dst->itemsize : INT64_MAX;
    bool measures =
        request->blocking && nbytes >= MEASURE_NBYTES && is_quiet(state, request);
    if (nbytes < LOOK_NBYTES || (state->tuning.has_looked && !measures)) {
        return 0;
    }
    return ask(state, device->device, measures);
}

PyDoc_STRVAR(calibrate_doc,
"_calibrate($module, device, /)\n--\n\n"
"Measure the machine with that device; figures by name.");

static PyObject *
calibrate(PyObject *module, PyObject *object)
{
    cm_state *state = cm_state_of_module(module);
    cm_measured measured;
    int device;
    if (cm_state_runtime(state) == NULL
        || cm_arg_device(state, object, "device", &device) < 0) {
        return NULL;
    }
    cm_engine *engine = cm_state_engine(state, device);
    if (engine == NULL) {
        return NULL;
    }
    cm_status status;
    cm_state_enter(state);
    Py_BEGIN_ALLOW_THREADS
    status = cm_engine_calibrate(engine, device, CM_CALIBRATE_NS, &measured);
    Py_END_ALLOW_THREADS
    cm_state_leave(state);
    return cm_is_ok(status) ? cm_measured_to_object(&measured)
                            : cm_py_raise(state, status, "while measuring the machine");
}

PyDoc_STRVAR(cpu_count_doc,
"_cpu_count($module, /)\n--\n\n"
"Threads that can run at once in this process.");

static PyObject *
cpu_count(PyObject *module CM_UNUSED, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLong(cm_usable_cpu_count(NULL));
}

PyMethodDef cm_calibrate_methods[] = {
    {"_cpu_count", cpu_count, METH_NOARGS, cpu_count_doc},
    {"_calibrate", calibrate, METH_O, calibrate_doc},
    {NULL, NULL, 0, NULL},
};
