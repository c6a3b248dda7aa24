/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the stacks and tags of events and the moments of calls (recording.h), and has
 * the functions by which the package uses the recorder and the profiler's tool. */
#include "python/core/recording.h"

#include <dlfcn.h>
#include <stdlib.h>

#include "base/address_map.h"
#include "base/nvtx.h"
#include "docstrings.h"
#include "python/core/errors.h"

/* Functions that the limited API leaves out, but that every CPython since 3.11 has. */
typedef struct internals {
    /* Returns NULL if this thread does not have the GIL. */
    PyThreadState *(*current_thread)(void);
    PyFrameObject *(*outer_frame)(PyFrameObject *frame);
    int (*place_in_code)(PyFrameObject *frame);
    int (*read_variable)(PyObject *variable, PyObject *otherwise, PyObject **value);
} internals;

enum {
    DEPTH = 32,           /* how many frames of a stack are kept, the innermost ones */
    STACKS_MAX = 1 << 20, /* further stacks have number 0 */
};

typedef struct frame {
    PyObject *code; /* owned, and never dropped */
    int place;      /* the instruction's place in the bytes of the code */
} frame;

typedef struct stack {
    uint32_t number;
    uint32_t count;
    frame frames[]; /* innermost first */
} stack;

/* The process has one of these, as it has one recorder. A stack keeps its number for
 * good, since an unfinished transfer may still have it. */
static struct recording {
    internals python;
    PyObject *tags; /* owned ContextVar of ints; NULL if there are none */
    /* These are also read without the GIL: */
    atomic_bool has_tags;
    /* Events of at least this many bytes have a stack. With UINT64_MAX none has. */
    _Atomic uint64_t least_nbytes;
    /* The stacks by a hash of 64 bits. Stacks with the same hash count as the same. */
    cm_address_map known;
    stack **stacks; /* owned, by their numbers less 1 */
    uint32_t count;
    uint32_t room;
} recording;

cm_tracemalloc cm_tracing;

/* Find functions by their names. The entry of a function that does not exist becomes
 * NULL. */
static void
find_functions(const char *const *names, int count, void *out)
{
    for (int i = 0; i < count; i++) {
        void *found = dlsym(RTLD_DEFAULT, names[i]);
        memcpy((char *)out + (size_t)i * sizeof(found), &found, sizeof(found));
    }
}

void
cm_tracing_init(void)
{
    static const char *const names[] = {"PyTraceMalloc_Track", "PyTraceMalloc_Untrack"};
    static const char *const others[] = {"_PyThreadState_UncheckedGet",
                                         "PyFrame_GetBack", "PyFrame_GetLasti",
                                         "PyContextVar_Get"};
    static const char *const newer = "PyThreadState_GetUnchecked";
    find_functions(names, 2, &cm_tracing);
    find_functions(others, 4, &recording.python);
    if (recording.python.current_thread == NULL) {
        find_functions(&newer, 1, &recording.python);
    }
}

/* -- moments ----------------------------------------------------------------------------- */

/* Return gc.get_count()[0], which a collection sets to 0, or -1 if it is not known. */
static long
count_young(void)
{
    static PyObject *get_count; /* owned, as long as the process lives; guarded by the
                                   GIL */
    if (get_count == NULL) {
        PyObject *module = PyImport_ImportModule("gc");
        get_count = module == NULL ? NULL : PyObject_GetAttrString(module, "get_count");
        Py_XDECREF(module);
    }
    PyObject *counts = get_count == NULL ? NULL : PyObject_CallNoArgs(get_count);
    PyObject *young = counts == NULL ? NULL : PyTuple_GetItem(counts, 0);
    long count = young == NULL ? -1 : PyLong_AsLong(young);
    Py_XDECREF(counts);
    return count;
}

cm_moment
cm_moment_now(void)
{
    cm_moment now = {.frame = NULL};
    if (recording.python.place_in_code == NULL) {
        return now;
    }
    cm_kept_error kept = cm_error_keep();
    int collects = PyGC_Disable(); /* a collection would run finalizers here */
    PyFrameObject *at = PyEval_GetFrame();
    long young = at == NULL ? -1 : count_young();
    if (young >= 0) {
        now = (cm_moment){at, recording.python.place_in_code(at), young};
    }
    if (collects) {
        (void)PyGC_Enable();
    }
    PyErr_Clear();
    cm_error_restore(kept);
    return now;
}

bool
cm_moment_lasts(const cm_moment *then)
{
    if (then->frame == NULL) {
        return false;
    }
    cm_moment now = cm_moment_now();
    return now.frame == then->frame && now.place == then->place
           && now.young >= then->young;
}

/* -- stacks ------------------------------------------------------------------------------ */

/* Add a stack and return its number, or 0 if there are too many or there is no
 * memory. */
static uint32_t
add_stack(uint64_t hash, const frame *frames, uint32_t count)
{
    uint32_t room = cm_array_reserve(&recording.stacks, sizeof(stack *), NULL,
                                     recording.count, recording.room);
    stack *new = room == 0 || recording.count == STACKS_MAX
                     ? NULL
                     : malloc(sizeof(*new) + count * sizeof(*frames));
    recording.room = room != 0 ? room : recording.room;
    if (new == NULL || !cm_address_map_put(&recording.known, hash, new)) {
        free(new);
        return 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        new->frames[i] = frames[i];
        Py_INCREF(frames[i].code);
    }
    new->count = count;
    recording.stacks[recording.count++] = new;
    return new->number = recording.count;
}

/* Return the number of this thread's stack. The code objects are not held
 * meanwhile, since the frames that run them stay alive until this call returns. */
static uint32_t
find_stack(PyThreadState *thread)
{
    frame frames[DEPTH];
    uint32_t count = 0;
    uint64_t hash = 1;
    int collects = PyGC_Disable(); /* a collection would run finalizers here */
    PyFrameObject *at = PyThreadState_GetFrame(thread);
    while (at != NULL && count < DEPTH) {
        PyObject *code = (PyObject *)(void *)PyFrame_GetCode(at);
        int place = recording.python.place_in_code(at);
        frames[count++] = (frame){code, place};
        hash = (hash ^ (uint64_t)(uintptr_t)code ^ ((uint64_t)(uint32_t)place << 32))
               * UINT64_C(0x9E3779B97F4A7C15);
        hash ^= hash >> 29;
        Py_DECREF(code); /* the frame keeps it alive */
        PyFrameObject *outer = recording.python.outer_frame(at);
        Py_DECREF((PyObject *)(void *)at);
        at = outer;
    }
    Py_XDECREF((PyObject *)(void *)at);
    if (collects) {
        (void)PyGC_Enable();
    }
    if (count == 0) {
        return 0;
    }
    hash |= hash == 0;
    const stack *known = cm_address_map_find(&recording.known, hash, false);
    return known != NULL ? known->number : add_stack(hash, frames, count);
}

/* -- who is asked ------------------------------------------------------------------------ */

static uint32_t
find_tag(void)
{
    PyObject *value = NULL;
    uint32_t tag = 0;
    if (recording.python.read_variable(recording.tags, NULL, &value) == 0
        && value != NULL) {
        tag = (uint32_t)PyLong_AsLong(value);
    }
    Py_XDECREF(value);
    return tag;
}

/* Find the stack and tag of an event that this thread notes. In a thread that has the
 * GIL they are those of its own Python code. A thread without the GIL uses those that
 * it was lent. */
static cm_event_origin
find_origin(uint64_t nbytes, cm_event_origin lent)
{
    bool has_tags = atomic_load_explicit(&recording.has_tags, memory_order_relaxed);
    bool has_stack =
        nbytes >= atomic_load_explicit(&recording.least_nbytes, memory_order_relaxed);
    cm_event_origin none = {has_stack ? lent.stack : 0, lent.tag};
    if (!has_stack && !has_tags) {
        return none;
    }
    PyThreadState *thread = recording.python.current_thread();
    if (thread == NULL || thread != PyGILState_GetThisThreadState()) {
        return none;
    }
    return (cm_event_origin){has_stack ? find_stack(thread) : 0,
                             has_tags ? find_tag() : 0};
}

cm_event_origin
cm_recording_lend_caller(bool may)
{
    cm_event_origin origin = {0, 0};
    may = may && (recording.least_nbytes != UINT64_MAX || recording.has_tags);
    if (may && cm_recorder_is_on() && PyGILState_GetThisThreadState() != NULL) {
        PyGILState_STATE gil = PyGILState_Ensure();
        origin = cm_recorder_find_origin(UINT64_MAX - 1);
        PyGILState_Release(gil);
    }
    return cm_recorder_lend_origin(origin);
}

/* -- functions for the package ----------------------------------------------------------- */

static PyObject *
recorder_open(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long capacity, least_nbytes;
    PyObject *tags;
    const internals *python = &recording.python;
    if (!PyArg_ParseTuple(args, "KKO", &capacity, &least_nbytes, &tags)) {
        return NULL;
    }
    if (python->current_thread == NULL || python->outer_frame == NULL
        || python->place_in_code == NULL || python->read_variable == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "a recording needs CPython, whose frames it reads");
        return NULL;
    }
    recording.least_nbytes = least_nbytes;
    cm_replace(&recording.tags, tags == Py_None ? NULL : Py_NewRef(tags));
    recording.has_tags = tags != Py_None;
    return cm_recorder_open(capacity, find_origin) ? Py_NewRef(Py_None)
                                                   : PyErr_NoMemory();
}

static PyObject *
recorder_close(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    cm_recorder_close();
    Py_RETURN_NONE;
}

static PyObject *
recorder_count(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLongLong(cm_recorder_count());
}

static PyObject *
recorder_read(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long begin, end;
    if (!PyArg_ParseTuple(args, "KK", &begin, &end)) {
        return NULL;
    }
    uint64_t count = cm_recorder_count(); /* there are no rows from that number on */
    end = end < count ? end : count;
    end = end < begin ? begin : end;
    if (end - begin > PY_SSIZE_T_MAX / CM_EVENT_NBYTES) {
        return PyErr_NoMemory();
    }
    PyObject *bytes =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)((end - begin) * CM_EVENT_NBYTES));
    if (bytes == NULL) {
        return NULL;
    }
    uint64_t first = cm_recorder_read(begin, end, PyBytes_AsString(bytes));
    return Py_BuildValue("(KN)", (unsigned long long)first, bytes);
}

static PyObject *
recorder_stacks(PyObject *Py_UNUSED(module), PyObject *begin)
{
    unsigned long i = PyLong_AsUnsignedLong(begin);
    if (PyErr_Occurred()) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (; list != NULL && i <= recording.count; i++) {
        const stack *s = i == 0 ? NULL : recording.stacks[i - 1];
        PyObject *frames = PyList_New(0);
        for (uint32_t k = 0; s != NULL && frames != NULL && k < s->count; k++) {
            cm_append(&frames,
                      Py_BuildValue("(Oi)", s->frames[k].code, s->frames[k].place));
        }
        cm_append(&list, frames);
    }
    return list;
}

/* -- ranges of a profiler's tool -------------------------------------------------------- */

int
cm_attach_profiler(void)
{
    const char *variable = getenv("NVTX_INJECTION64_PATH");
    if (variable == NULL || *variable == '\0') {
        return 0;
    }
    /* The path is copied, since another thread may change the environment. */
    PyObject *path = PyBytes_FromString(variable);
    if (path == NULL) {
        return -1;
    }
    char reason[512];
    const char *text = PyBytes_AsString(path);
    bool attached = CM_WITHOUT_GIL(cm_nvtx_attach(text, reason, sizeof(reason)));
    int result = 0;
    if (!attached) {
        result = cm_package_do("base.nvtx", "warn_of_tool",
                               Py_BuildValue("(NN)", PyUnicode_DecodeFSDefault(text),
                                             PyUnicode_DecodeFSDefault(reason)));
    }
    Py_DECREF(path);
    return result;
}

static PyObject *
nvtx_listens(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(atomic_load(&cm_nvtx_tool_now) != NULL);
}

/* -- table ------------------------------------------------------------------------------ */

PyMethodDef cm_recording_methods[] = {
    {"_nvtx_listens", nvtx_listens, METH_NOARGS, CM_DOC__nvtx_listens},
    {"_recorder_open", recorder_open, METH_VARARGS, CM_DOC__recorder_open},
    {"_recorder_close", recorder_close, METH_NOARGS, CM_DOC__recorder_close},
    {"_recorder_count", recorder_count, METH_NOARGS, CM_DOC__recorder_count},
    {"_recorder_read", recorder_read, METH_VARARGS, CM_DOC__recorder_read},
    {"_recorder_stacks", recorder_stacks, METH_O, CM_DOC__recorder_stacks},
    {NULL, NULL, 0, NULL},
};
