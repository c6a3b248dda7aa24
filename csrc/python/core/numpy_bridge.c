/* SPDX-License-Identifier: Apache-2.0 */
/* Calls the NumPy C API for the rest of the extension. It is built against NumPy 2,
 * runs on NumPy 1.26 and later, and works under the limited API. */
#include "python/core/numpy_bridge.h"

#include "python/core/errors.h"

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wundef"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#pragma GCC diagnostic ignored "-Wunused-function"
#include <numpy/arrayobject.h>
#pragma GCC diagnostic pop

_Static_assert(sizeof(npy_intp) == sizeof(int64_t), "cumem needs a 64-bit platform");

enum {
    FORMAT_CACHE_MAX = 512,
    KNOWN_DTYPES = 64,
};

/* A dict from dtypes to the formats that NumPy gave for them. It is emptied when it
 * grows past FORMAT_CACHE_MAX. Guarded by the GIL, though a dict is safe without it
 * too. */
static PyObject *format_cache;

/* The type mmap.mmap, which owns the memory of mapped files; NULL until it is first
 * needed. Guarded by the GIL; never dropped. */
static PyTypeObject *mmap_type;

/* Return the type mmap.mmap, or NULL while nobody has imported mmap. Then there is no
 * object of that type, so the module need not be loaded to find out. */
static PyTypeObject *
find_mmap_type(void)
{
    if (mmap_type != NULL) {
        return mmap_type;
    }
    PyObject *type = cm_find_loaded("mmap", "mmap");
    if (type != NULL && PyType_Check(type)) {
        mmap_type = (PyTypeObject *)type;
        return mmap_type;
    }
    Py_XDECREF(type);
    return NULL;
}

/* Two tables, which are filled in once, when the module is loaded. One has, for the
 * type number of each of NumPy's own dtypes, the dtype's row in the list of
 * base/dtypes.h. The other has the first type number of each row, since C has several
 * integers of one size and NumPy has a dtype for each of them. */
static uint8_t rows_of_types[NPY_NTYPES_LEGACY];
static int types_of_rows[CM_NUMBER_COUNT];

static int
learn_own_types(void)
{
    for (int type = NPY_NTYPES_LEGACY - 1; type >= 0; type--) {
        PyArray_Descr *descr = PyArray_DescrFromType(type);
        if (descr == NULL) {
            return -1;
        }
        for (int row = CM_NUMBER_NONE + 1; row < CM_NUMBER_COUNT; row++) {
            if (cm_dtypes[row].kind == descr->kind
                && cm_dtypes[row].nbytes == (int64_t)PyDataType_ELSIZE(descr)) {
                rows_of_types[type] = (uint8_t)row;
                types_of_rows[row] = type;
            }
        }
        Py_DECREF((PyObject *)descr);
    }
    return 0;
}

int
cm_numpy_import(void)
{
    if (PyArray_API == NULL && _import_array() < 0) {
        return -1;
    }
    if (learn_own_types() < 0) {
        return -1;
    }
    if (format_cache == NULL) {
        format_cache = PyDict_New();
    }
    return format_cache == NULL ? -1 : 0;
}

uintptr_t
cm_numpy_code(void)
{
    return (uintptr_t)PyArray_API[0]; /* PyArray_GetNDArrayCVersion() */
}

/* -- dtypes ------------------------------------------------------------------------------- */

static int
refuse(void *dtype)
{
    return cm_package_refuse("buffers.arguments", "refuse_dtype",
                             PyTuple_Pack(1, dtype));
}

static int
check_usable(PyArray_Descr *descr)
{
    if (PyDataType_FLAGCHK(descr, NPY_ITEM_REFCOUNT)
        || PyDataType_FLAGCHK(descr, NPY_ITEM_IS_POINTER)
        || PyDataType_HASSUBARRAY(descr) || PyDataType_ELSIZE(descr) <= 0) {
        return refuse(descr);
    }
    return 0;
}

/* A small cache of objects that users pass as a dtype, with the dtypes that they mean.
 * Only an object that means the same plain number for ever gets an entry, which owns
 * the object and the dtype. An entry is replaced by the next one for the same place.
 * Guarded by the GIL. */
static struct known_dtype {
    PyObject *object;
    PyObject *dtype;
    int64_t itemsize;
} known_dtypes[KNOWN_DTYPES];

static struct known_dtype *
place_of(PyObject *object)
{
    uint64_t hash = (uint64_t)(uintptr_t)object * UINT64_C(0x9E3779B97F4A7C15);
    return &known_dtypes[hash >> 58];
}

/* True if an object always means the same dtype. Classes that are written in Python may
 * change what they mean. */
static bool
is_constant(PyObject *object)
{
    if (PyType_Check(object)) {
        return (PyType_GetFlags((PyTypeObject *)object) & Py_TPFLAGS_HEAPTYPE) == 0;
    }
    return object == Py_None || Py_IS_TYPE(object, &PyUnicode_Type)
           || PyArray_DescrCheck(object);
}

static void
remember(PyObject *object, PyArray_Descr *descr)
{
    bool number = descr->type_num <= NPY_CLONGDOUBLE || descr->type_num == NPY_HALF;
    if (number && PyDataType_METADATA(descr) == NULL && is_constant(object)) {
        struct known_dtype *place = place_of(object);
        struct known_dtype old = *place;
        place->object = Py_NewRef(object);
        place->dtype = Py_NewRef((PyObject *)descr);
        place->itemsize = (int64_t)PyDataType_ELSIZE(descr);
        Py_XDECREF(old.object);
        Py_XDECREF(old.dtype);
    }
}

PyObject *
cm_numpy_known_dtype(PyObject *object, int64_t *itemsize)
{
    const struct known_dtype *place = place_of(object);
    *itemsize = place->itemsize;
    return place->object == object ? place->dtype : NULL;
}

/* Find a type of ml_dtypes. If the module is loaded, this takes no import. While
 * another thread is still importing it, the module may lack the type; then the import
 * below waits for that thread. Returns a new reference, or NULL with an exception. */
static PyObject *
find_type(const char *name)
{
    PyObject *type = cm_find_loaded("ml_dtypes", name);
    if (type != NULL) {
        return type;
    }
    PyObject *module = PyImport_ImportModule("ml_dtypes");
    type = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    Py_XDECREF(module);
    return type;
}

/* True if a text is the name of a type of ml_dtypes. Either our list of dtypes has it
 * and NumPy does not, or it looks like the name of a type that is newer than the list.
 */
static bool
is_name_of_ml_dtypes(const char *text)
{
    static const char *const words[] = {"bcomplex32", "int1",  "int2", "int4",
                                        "uint1",      "uint2", "uint4"};
    static const char *const beginnings[] = {"float4_", "float6_", "float8_"};
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
    cm_dtype listed = cm_dtype_named(text);
    if (listed != CM_NUMBER_NONE) {
        return cm_dtypes[listed].kind == 0;
    }
    for (size_t i = 0; i < sizeof(words) / sizeof(*words); i++) {
        if (strcmp(text, words[i]) == 0) {
            return true;
        }
    }
    for (size_t i = 0; i < sizeof(beginnings) / sizeof(*beginnings); i++) {
        size_t length = strlen(beginnings[i]);
        if (strncmp(text, beginnings[i], length) == 0 && text[length] != '\0') {
            return text[strspn(text, letters)] == '\0';
        }
    }
    return false;
}

/* Load a type of ml_dtypes by its name. NumPy knows the names of these types once
 * somebody has imported the package. They should mean the same before that, so that a
 * program does not depend on the order of its imports. So this imports ml_dtypes, and
 * returns true if it has the type. If it returns false an exception may be set, but not
 * one that only says that the type is missing. */
static bool
load_named_type(const char *name)
{
    PyObject *type = find_type(name);
    if (type == NULL
        && (PyErr_ExceptionMatches(PyExc_ImportError)
            || PyErr_ExceptionMatches(PyExc_AttributeError))) {
        PyErr_Clear();
    }
    Py_XDECREF(type);
    return type != NULL;
}

/* Handle the TypeError that NumPy has raised for an object that was given as a dtype.
 * If the object names a type of ml_dtypes, this loads the type and reads the object
 * again. Otherwise the package raises an error that says what to type. Returns a new
 * reference, or NULL with an exception. */
static PyObject *
read_unknown_dtype(PyObject *object)
{
    PyArray_Descr *descr = NULL;
    cm_kept_error kept = cm_error_keep();
    const char *text =
        PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, NULL) : NULL;
    PyErr_Clear(); /* the text may hold a surrogate, which no name does */
    bool is_of_ml_dtypes = text != NULL && is_name_of_ml_dtypes(text);
    if (is_of_ml_dtypes && load_named_type(text)) {
        (void)PyArray_DescrConverter(object, &descr);
    }
    else if (!PyErr_Occurred()) {
        PyErr_NormalizeException(&kept.type, &kept.value, &kept.traceback);
        cm_package_refuse("buffers.arguments", "refuse_unknown_dtype",
                          Py_BuildValue("(OOO)", object, kept.value,
                                        is_of_ml_dtypes ? Py_True : Py_False));
    }
    Py_XDECREF(kept.type);
    Py_XDECREF(kept.value);
    Py_XDECREF(kept.traceback);
    return (PyObject *)descr;
}

PyObject *
cm_numpy_read_dtype(PyObject *object)
{
    PyArray_Descr *descr = NULL;
    if (object == Py_None) {
        return (PyObject *)PyArray_DescrFromType(NPY_DOUBLE);
    }
    if (!PyArray_DescrConverter(object, &descr)
        && PyErr_ExceptionMatches(PyExc_TypeError)) {
        return read_unknown_dtype(object);
    }
    return (PyObject *)descr;
}

PyObject *
cm_numpy_dtype(PyObject *object)
{
    object = object == NULL ? Py_None : object;
    const struct known_dtype *known = place_of(object);
    if (known->object == object) {
        return Py_NewRef(known->dtype);
    }
    PyArray_Descr *descr = (PyArray_Descr *)cm_numpy_read_dtype(object);
    if (descr == NULL || check_usable(descr) < 0) {
        Py_XDECREF((PyObject *)descr);
        return NULL;
    }
    remember(object, descr);
    return (PyObject *)descr;
}

bool
cm_numpy_is_dtype(PyObject *object)
{
    return PyArray_DescrCheck(object);
}

int64_t
cm_numpy_itemsize(PyObject *dtype)
{
    return (int64_t)PyDataType_ELSIZE((PyArray_Descr *)dtype);
}

int64_t
cm_numpy_alignment(PyObject *dtype)
{
    return (int64_t)PyDataType_ALIGNMENT((PyArray_Descr *)dtype);
}

bool
cm_numpy_is_registered(PyObject *dtype)
{
    return ((PyArray_Descr *)dtype)->type_num >= NPY_USERDEF;
}

char
cm_numpy_letter(PyObject *dtype)
{
    return ((PyArray_Descr *)dtype)->kind;
}

bool
cm_numpy_has_fields(PyObject *dtype)
{
    return PyDataType_HASFIELDS((PyArray_Descr *)dtype);
}

bool
cm_numpy_is_extended(PyObject *dtype)
{
    int type = ((PyArray_Descr *)dtype)->type_num;
    return type == NPY_LONGDOUBLE || type == NPY_CLONGDOUBLE;
}

bool
cm_numpy_has_metadata(PyObject *dtype)
{
    return PyDataType_METADATA((PyArray_Descr *)dtype) != NULL;
}

bool
cm_numpy_dtype_equal(PyObject *a, PyObject *b)
{
    return a == b || PyArray_EquivTypes((PyArray_Descr *)a, (PyArray_Descr *)b);
}

char
cm_numpy_plain_kind(PyObject *dtype)
{
    const PyArray_Descr *descr = (const PyArray_Descr *)dtype;
    bool is_plain = PyArray_ISNBO(descr->byteorder) && !PyDataType_HASFIELDS(descr)
                    && descr->type_num < NPY_USERDEF
                    && descr->type_num != NPY_LONGDOUBLE
                    && descr->type_num != NPY_CLONGDOUBLE;
    return is_plain ? descr->kind : 0;
}

/* -- buffer formats ----------------------------------------------------------------------- */

/* Ask a memoryview of an array of NumPy's for the format of the dtype. Returns a new
 * str, or NULL with an exception, which is a ValueError if NumPy has no format for the
 * dtype. */
static PyObject *
ask_format(PyObject *dtype)
{
    Py_buffer view;
    PyObject *array = cm_numpy_empty(dtype, 0, NULL);
    if (array == NULL) {
        return NULL;
    }
    PyObject *format = NULL;
    if (PyObject_GetBuffer(array, &view, PyBUF_FULL_RO) == 0) {
        format = PyUnicode_FromString(view.format);
        PyBuffer_Release(&view);
    }
    else if (PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear(); /* NumPy's error has only a letter, and the package's the whole
                          dtype */
        cm_package_refuse("buffers.arguments", "refuse_format", PyTuple_Pack(1, dtype));
    }
    Py_DECREF(array);
    return format;
}

PyObject *
cm_numpy_format(PyObject *dtype)
{
    const PyArray_Descr *descr = (const PyArray_Descr *)dtype;
    if ((descr->type_num == NPY_LONGLONG || descr->type_num == NPY_ULONGLONG)
        /* The cache takes equal dtypes for the same. These two equal NPY_LONG and
         * NPY_ULONG, but have other formats, so they do not go through the cache. */
        && PyArray_ISNBO(descr->byteorder)) {
        return PyUnicode_InternFromString(descr->type_num == NPY_LONGLONG ? "q" : "Q");
    }
    PyObject *known = PyDict_GetItemWithError(format_cache, dtype);
    if (known != NULL || PyErr_Occurred()) {
        return Py_XNewRef(known);
    }
    PyObject *format = ask_format(dtype);
    if (format == NULL) {
        return NULL;
    }
    if (PyDict_Size(format_cache) >= FORMAT_CACHE_MAX) {
        PyDict_Clear(format_cache);
    }
    if (PyDict_SetItem(format_cache, dtype, format) < 0) {
        Py_DECREF(format);
        return NULL;
    }
    return format;
}

/* -- arrays: NumPy 1.26 makes none of more than 32 dimensions ---------------------------- */

PyObject *
cm_numpy_view(PyObject *owner, void *host, PyObject *dtype, int ndim,
              const int64_t *shape, const int64_t *strides, bool readonly)
{
    /* For NULL, NumPy would allocate memory. An array without an address has no bytes,
     * so any address will do. */
    static char nothing[1];
    Py_INCREF(dtype); /* stolen */
    PyObject *array = PyArray_NewFromDescr(
        &PyArray_Type, (PyArray_Descr *)dtype, ndim, shape, strides,
        host == NULL ? nothing : host, readonly ? 0 : NPY_ARRAY_WRITEABLE, NULL);
    if (array == NULL) {
        return NULL;
    }
    Py_INCREF(owner); /* stolen, even on failure */
    if (PyArray_SetBaseObject((PyArrayObject *)array, owner) < 0) {
        Py_DECREF(array);
        return NULL;
    }
    return array;
}

PyObject *
cm_numpy_empty(PyObject *dtype, int ndim, const int64_t *shape)
{
    Py_INCREF(dtype); /* stolen */
    return PyArray_Empty(ndim, shape, (PyArray_Descr *)dtype, 0);
}

PyObject *
cm_numpy_from_any(PyObject *object, PyObject *dtype, bool keeps_subclass)
{
    int flags = NPY_ARRAY_FORCECAST | (keeps_subclass ? 0 : NPY_ARRAY_ENSUREARRAY);
    Py_XINCREF(dtype); /* stolen */
    return PyArray_FromAny(object, (PyArray_Descr *)dtype, 0, 0, flags, NULL);
}

PyObject *
cm_numpy_dtype_of_letter(char letter)
{
    return (PyObject *)PyArray_DescrFromType(letter);
}

PyObject *
cm_numpy_cast_array(PyObject *array, char letter)
{
    PyArray_Descr *descr = PyArray_DescrFromType(letter);
    return descr == NULL ? NULL : PyArray_CastToType((PyArrayObject *)array, descr, 0);
}

PyObject *
cm_numpy_empty_like(PyObject *array, PyObject *dtype)
{
    Py_INCREF(dtype); /* stolen */
    return PyArray_NewLikeArray((PyArrayObject *)array, NPY_KEEPORDER,
                                (PyArray_Descr *)dtype, 0);
}

PyObject *
cm_numpy_zeros_like(PyObject *array, PyObject *dtype)
{
    PyArrayObject *like = (PyArrayObject *)array;
    Py_INCREF(dtype); /* stolen */
    return PyArray_Zeros(PyArray_NDIM(like), PyArray_DIMS(like), (PyArray_Descr *)dtype,
                         0);
}

int
cm_numpy_copy_into(PyObject *to, PyObject *from)
{
    return PyArray_CopyInto((PyArrayObject *)to, (PyArrayObject *)from);
}

PyObject *
cm_numpy_dtype_of(PyObject *array)
{
    return (PyObject *)PyArray_DESCR((PyArrayObject *)array);
}

int64_t
cm_numpy_size(PyObject *array)
{
    return PyArray_SIZE((PyArrayObject *)array);
}

bool
cm_numpy_same_shape(PyObject *a, PyObject *b)
{
    return PyArray_SAMESHAPE((PyArrayObject *)a, (PyArrayObject *)b) != 0;
}

bool
cm_numpy_is_c_contiguous(PyObject *array)
{
    return PyArray_IS_C_CONTIGUOUS((PyArrayObject *)array) != 0;
}

uint64_t
cm_numpy_run_nbytes(PyObject *object)
{
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_IS_C_CONTIGUOUS(array)) {
        return 0;
    }
    uint64_t nbytes = (uint64_t)PyDataType_ELSIZE(PyArray_DESCR(array));
    for (int i = 0; i < PyArray_NDIM(array); i++) {
        nbytes *= (uint64_t)PyArray_DIM(array, i); /* NumPy has made sure it fits */
    }
    return nbytes;
}

bool
cm_numpy_has_objects(PyObject *array)
{
    return PyDataType_REFCHK(PyArray_DESCR((PyArrayObject *)array)) != 0;
}

PyObject *
cm_numpy_item(PyObject *array)
{
    PyArrayObject *self = (PyArrayObject *)array;
    return PyArray_GETITEM(self, PyArray_DATA(self));
}

bool
cm_numpy_is_array(PyObject *object)
{
    return PyArray_Check(object);
}

bool
cm_numpy_is_array_of(PyObject *object, PyObject *dtype)
{
    return PyArray_Check(object)
           && PyArray_EquivTypes(PyArray_DESCR((PyArrayObject *)object),
                                 (PyArray_Descr *)dtype);
}

int
cm_numpy_ndim(PyObject *array)
{
    return PyArray_NDIM((PyArrayObject *)array);
}

void *
cm_numpy_data(PyObject *array)
{
    return PyArray_DATA((PyArrayObject *)array);
}

bool
cm_numpy_may_be_masked(PyObject *array)
{
    PyObject *type = (PyObject *)Py_TYPE(array);
    return type != (PyObject *)&PyArray_Type && PyObject_HasAttrString(type, "filled");
}

bool
cm_numpy_is_scalar(PyObject *object)
{
    return PyArray_IsScalar(object, Generic);
}

bool
cm_numpy_is_integer_scalar(PyObject *object)
{
    return PyArray_IsScalar(object, Integer) || PyArray_IsScalar(object, Bool);
}

bool
cm_numpy_is_real_scalar(PyObject *object)
{
    return PyArray_IsScalar(object, Floating);
}

bool
cm_numpy_is_complex_scalar(PyObject *object)
{
    return PyArray_IsScalar(object, ComplexFloating);
}

bool
cm_numpy_is_bool(PyObject *object)
{
    return PyArray_IsScalar(object, Bool);
}

/* Return the array at the root of views of views. *base is the object whose memory that
 * array shows, or NULL. */
static PyArrayObject *
find_root(PyObject *array, PyObject **base)
{
    PyArrayObject *root = (PyArrayObject *)array;
    while ((*base = PyArray_BASE(root)) != NULL && PyArray_Check(*base)) {
        root = (PyArrayObject *)*base;
    }
    return root;
}

/* True if the array's memory belongs to an mmap.mmap. That is so for a numpy.memmap,
 * and for an array that frombuffer() makes over an mmap.mmap. */
static bool
is_file(PyObject *array)
{
    PyObject *owner = cm_numpy_owner(array);
    while (owner != NULL && PyArray_Check(owner)) {
        PyObject *next = cm_numpy_owner(owner);
        Py_DECREF(owner);
        owner = next;
    }
    PyTypeObject *type = owner == NULL ? NULL : find_mmap_type();
    bool is = type != NULL && PyObject_TypeCheck(owner, type);
    Py_XDECREF(owner);
    return is;
}

void
cm_numpy_layout(PyObject *object, cm_region *out)
{
    PyArrayObject *array = (PyArrayObject *)object;
    out->ndim = PyArray_NDIM(array);
    for (int i = 0; i < out->ndim; i++) {
        out->shape[i] = (int64_t)PyArray_DIM(array, i);
        out->strides[i] = (int64_t)PyArray_STRIDE(array, i);
    }
    out->itemsize = (int64_t)PyDataType_ELSIZE(PyArray_DESCR(array));
}

int
cm_numpy_region(PyObject *object, cm_region *out, PyObject **dtype, bool *readonly)
{
    PyArrayObject *array = (PyArrayObject *)object;
    PyArray_Descr *descr = PyArray_DESCR(array);
    PyObject *base;
    if (check_usable(descr) < 0) {
        return -1;
    }
    cm_numpy_layout(object, out);
    out->is_heap = PyArray_CHKFLAGS(find_root(object, &base), NPY_ARRAY_OWNDATA);
    out->is_file = base != NULL && is_file(object);
    out->host = PyArray_DATA(array);
    out->address = 0;
    out->kind = CM_KIND_PAGEABLE;
    out->device = -1;
    *readonly = !PyArray_ISWRITEABLE(array);
    *dtype = Py_NewRef((PyObject *)descr);
    return 0;
}

PyObject *
cm_numpy_owner(PyObject *array)
{
    PyObject *base;
    find_root(array, &base);
    if (base == NULL) {
        return NULL;
    }
    if (!PyMemoryView_Check(base)) {
        return Py_NewRef(base);
    }
    PyObject *exporter = PyObject_GetAttrString(base, "obj");
    if (exporter == NULL) {
        PyErr_Clear(); /* a released memoryview has no `obj` */
    }
    return exporter;
}

PyObject *
cm_numpy_root(PyObject *array)
{
    PyObject *base;
    return Py_NewRef((PyObject *)find_root(array, &base));
}

void
cm_numpy_place(PyObject *array, uint64_t *address, uint64_t *nbytes)
{
    *address = (uint64_t)(uintptr_t)PyArray_DATA((PyArrayObject *)array);
    *nbytes = (uint64_t)PyArray_NBYTES((PyArrayObject *)array);
}

/* -- which row of the list of dtypes ----------------------------------------------------- */

/* The type numbers under which ml_dtypes has registered its dtypes with NumPy. An entry
 * is 0 until such a dtype is seen for the first time. Packages register dtypes while
 * they are loaded, and a number never changes its meaning, so nothing guards this
 * table. */
static int registered[CM_DTYPE_COUNT];

/* Find the row of a dtype that another package has registered, by the name of its
 * type. */
static cm_dtype
find_registered(const PyArray_Descr *descr)
{
    for (int dtype = CM_NUMBER_NONE + 1; dtype < CM_DTYPE_COUNT; dtype++) {
        if (registered[dtype] == descr->type_num) {
            return (cm_dtype)dtype;
        }
    }
    cm_dtype found = CM_NUMBER_NONE;
    PyObject *name = PyObject_GetAttrString((PyObject *)descr->typeobj, "__name__");
    const char *text = name == NULL ? NULL : PyUnicode_AsUTF8AndSize(name, NULL);
    if (text != NULL) {
        found = cm_dtype_named(text);
    }
    PyErr_Clear();
    Py_XDECREF(name);
    if (cm_dtypes[found].kind != 0) {
        return CM_NUMBER_NONE; /* another package's dtype with the name of one of
                                  NumPy's */
    }
    if (found != CM_NUMBER_NONE) {
        registered[found] = descr->type_num;
    }
    return found;
}

/* Return the row of the list that a dtype has, in either byte order. */
static cm_dtype
find_row(const PyArray_Descr *descr)
{
    if (descr->type_num >= NPY_USERDEF) {
        return find_registered(descr);
    }
    return descr->type_num < NPY_NTYPES_LEGACY
               ? (cm_dtype)rows_of_types[descr->type_num]
               : CM_NUMBER_NONE;
}

/* Return the same row if it is that of a dtype that the copy threads convert, or else
 * CM_NUMBER_NONE. */
static cm_number
number_of(const PyArray_Descr *descr)
{
    cm_dtype dtype = find_row(descr);
    return dtype < CM_NUMBER_COUNT ? dtype : CM_NUMBER_NONE;
}

cm_dtype
cm_numpy_listed(PyObject *dtype)
{
    const PyArray_Descr *descr = (const PyArray_Descr *)dtype;
    bool is_plain = PyArray_ISNBO(descr->byteorder) && !PyDataType_HASFIELDS(descr);
    return is_plain ? find_row(descr) : CM_NUMBER_NONE;
}

PyObject *
cm_numpy_dtype_listed(cm_dtype dtype)
{
    if (cm_dtypes[dtype].kind != 0) {
        return (PyObject *)PyArray_DescrFromType(types_of_rows[dtype]);
    }
    PyArray_Descr *descr = NULL;
    PyObject *type = find_type(cm_dtypes[dtype].name);
    if (type != NULL) {
        (void)PyArray_DescrConverter(type, &descr);
        Py_DECREF(type);
    }
    return (PyObject *)descr;
}

cm_number
cm_numpy_number(PyObject *dtype, bool *swapped)
{
    const PyArray_Descr *descr = (const PyArray_Descr *)dtype;
    *swapped = !PyArray_ISNBO(descr->byteorder);
    return number_of(descr);
}

cm_number
cm_numpy_read_scalar(PyObject *scalar, void *out)
{
    PyArray_Descr *descr = PyArray_DescrFromScalar(scalar);
    if (descr == NULL) {
        PyErr_Clear();
        return CM_NUMBER_NONE;
    }
    cm_number number = number_of(descr);
    Py_DECREF(descr);
    if (number != CM_NUMBER_NONE && cm_dtypes[number].kind == 0) {
        /* Only ml_dtypes knows where in its object the bytes are, so the object is read
         * as a float of Python's. */
        double real = PyFloat_AsDouble(scalar);
        memcpy(out, &real, sizeof(real));
        number = CM_FLOAT64;
    }
    else if (number != CM_NUMBER_NONE) {
        PyArray_ScalarAsCtype(scalar, out);
    }
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return CM_NUMBER_NONE;
    }
    return number;
}

/* -- from one dtype to another ----------------------------------------------------------- */

_Static_assert(CM_RULE_NO == (int)NPY_NO_CASTING
                   && CM_RULE_EQUIV == (int)NPY_EQUIV_CASTING
                   && CM_RULE_SAFE == (int)NPY_SAFE_CASTING
                   && CM_RULE_SAME_KIND == (int)NPY_SAME_KIND_CASTING
                   && CM_RULE_UNSAFE == (int)NPY_UNSAFE_CASTING,
               "the rules are NumPy's");

cm_number
cm_numpy_stands_for(PyObject *dtype)
{
    PyObject *noted = PyDataType_METADATA((PyArray_Descr *)dtype);
    if (noted == NULL) {
        return CM_NUMBER_NONE;
    }
    /* The key is STANDS_FOR of cumem/buffers/casting.py. */
    PyObject *name = PyDict_GetItemString(noted, "cumem.stands_for");
    const char *text = name != NULL && PyUnicode_Check(name)
                           ? PyUnicode_AsUTF8AndSize(name, NULL)
                           : NULL;
    PyErr_Clear();
    cm_dtype found = text == NULL ? CM_NUMBER_NONE : cm_dtype_named(text);
    return found < CM_NUMBER_COUNT ? found : CM_NUMBER_NONE;
}

cm_number
cm_numpy_number_meant(PyObject *dtype, bool *swapped)
{
    cm_number number = cm_numpy_number(dtype, swapped);
    cm_number meant = cm_numpy_stands_for(dtype);
    return meant == CM_NUMBER_NONE ? number : meant;
}

/* True if the rule allows a conversion in which integers stand for numbers. bfloat16 is
 * the only number that they stand for. By the rules of ml_dtypes it can be converted to
 * each dtype to which float32 can, or to anything by "unsafe". A dtype can be converted
 * to bfloat16 if it can be converted to float16. The exception is float16, which is
 * judged as if it were float32, since bfloat16 does not hold all of its numbers. */
static bool
can_cast_meant(PyArray_Descr *from, PyArray_Descr *to, bool is_from_meant,
               bool is_to_meant, NPY_CASTING rule)
{
    PyArray_Descr *single = PyArray_DescrFromType(NPY_FLOAT32);
    PyArray_Descr *half = PyArray_DescrFromType(NPY_FLOAT16);
    if (is_from_meant && !is_to_meant) {
        from = single;
        rule = rule == NPY_SAME_KIND_CASTING ? NPY_SAFE_CASTING : rule;
    }
    if (is_to_meant) {
        from = PyArray_EquivTypes(from, half) ? single : from;
        to = half;
    }
    bool can = PyArray_CanCastTypeTo(from, to, rule);
    Py_DECREF((PyObject *)single);
    Py_DECREF((PyObject *)half);
    return can;
}

bool
cm_numpy_can_cast(PyObject *from, PyObject *to, cm_casting_rule rule)
{
    bool is_from_meant = cm_numpy_stands_for(from) != CM_NUMBER_NONE;
    bool is_to_meant = cm_numpy_stands_for(to) != CM_NUMBER_NONE;
    PyArray_Descr *source = (PyArray_Descr *)from;
    PyArray_Descr *target = (PyArray_Descr *)to;
    if (is_from_meant || is_to_meant) {
        return can_cast_meant(source, target, is_from_meant, is_to_meant,
                              (NPY_CASTING)rule);
    }
    return PyArray_CanCastTypeTo(source, target, (NPY_CASTING)rule);
}

/* True if an attribute of a dtype's type is a text that contains `part`. */
static bool
type_name_contains(const PyArray_Descr *descr, const char *attribute, const char *part)
{
    PyObject *said = PyObject_GetAttrString((PyObject *)descr->typeobj, attribute);
    const char *text = said != NULL && PyUnicode_Check(said)
                           ? PyUnicode_AsUTF8AndSize(said, NULL)
                           : NULL;
    bool does = text != NULL && strstr(text, part) != NULL;
    PyErr_Clear();
    Py_XDECREF(said);
    return does;
}

/* True for a complex dtype of ml_dtypes. Its complex dtypes have the same `kind` as
 * some of its real ones, so only their names show that they are complex. */
static bool
is_complex(const PyArray_Descr *descr)
{
    return descr->kind == 'c'
           || (descr->type_num >= NPY_USERDEF
               && type_name_contains(descr, "__name__", "complex"));
}

static bool
is_real(const PyArray_Descr *descr)
{
    if (descr->kind == 'i' || descr->kind == 'u' || descr->kind == 'f') {
        return true;
    }
    return descr->type_num >= NPY_USERDEF
           && type_name_contains(descr, "__module__", "ml_dtypes")
           && !is_complex(descr);
}

bool
cm_numpy_drops_imaginary(PyObject *from, PyObject *to)
{
    return is_complex((const PyArray_Descr *)from)
           && is_real((const PyArray_Descr *)to);
}

PyObject *
cm_numpy_part_read(PyObject *from, bool drops_imaginary)
{
    PyArray_Descr *descr = (PyArray_Descr *)from;
    int part;
    if (!drops_imaginary) {
        return Py_NewRef(from);
    }
    switch (descr->type_num) {
    case NPY_CFLOAT:
        part = NPY_FLOAT;
        break;
    case NPY_CDOUBLE:
        part = NPY_DOUBLE;
        break;
    case NPY_CLONGDOUBLE:
        part = NPY_LONGDOUBLE;
        break;
    default:
        return Py_NewRef(from);
    }
    PyArray_Descr *native = PyArray_DescrFromType(part);
    if (PyArray_ISNBO(descr->byteorder)) {
        return (PyObject *)native;
    }
    PyArray_Descr *swapped = PyArray_DescrNewByteorder(native, NPY_SWAP);
    Py_DECREF((PyObject *)native);
    return (PyObject *)swapped;
}

PyObject *
cm_numpy_enter_quiet_block(void)
{
    PyObject *block = NULL;
    PyObject *entered = NULL;
    PyObject *arguments = PyTuple_New(0);
    PyObject *keywords = Py_BuildValue("{ss}", "all", "ignore");
    PyObject *numpy = PyImport_ImportModule("numpy");
    PyObject *make = numpy == NULL ? NULL : PyObject_GetAttrString(numpy, "errstate");
    if (make != NULL && arguments != NULL && keywords != NULL) {
        block = PyObject_Call(make, arguments, keywords);
    }
    if (block != NULL) {
        entered = PyObject_CallMethod(block, "__enter__", NULL);
    }
    if (entered == NULL) {
        Py_CLEAR(block);
    }
    Py_XDECREF(entered);
    Py_XDECREF(make);
    Py_XDECREF(numpy);
    Py_XDECREF(keywords);
    Py_XDECREF(arguments);
    return block;
}

void
cm_numpy_leave_quiet_block(PyObject *block)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *left =
        PyObject_CallMethod(block, "__exit__", "OOO", Py_None, Py_None, Py_None);
    if (left == NULL) {
        PyErr_WriteUnraisable(block);
    }
    Py_XDECREF(left);
    Py_DECREF(block);
    PyErr_Restore(type, value, traceback);
}

/* Let NumPy convert the elements of one array into another. The rule was checked
 * before. NumPy is kept from warning of numbers that become infinite, since the
 * engine's own conversion does not warn of them either. Returns 0, or -1 with NumPy's
 * exception. */
static int
convert_by_numpy(PyObject *to, PyObject *from)
{
    PyObject *block = cm_numpy_enter_quiet_block();
    if (block == NULL) {
        return -1;
    }
    int result = PyArray_CopyInto((PyArrayObject *)to, (PyArrayObject *)from);
    cm_numpy_leave_quiet_block(block);
    return result;
}

/* Make an array of one element, which is zero. Returns a new reference, or NULL with an
 * exception. */
static PyObject *
array_of_zero(PyObject *dtype)
{
    npy_intp length = 1;
    Py_INCREF(dtype); /* stolen */
    return PyArray_Zeros(1, &length, (PyArray_Descr *)dtype, 0);
}

/* NumPy raises its TypeError only when it converts an element, so this converts one
 * that is zero. Other errors are about that element and are not raised: an empty text,
 * for example, cannot become a number, but other texts can. */
int
cm_numpy_try_cast(PyObject *from, PyObject *to)
{
    PyObject *source = array_of_zero(from);
    PyObject *target = source == NULL ? NULL : array_of_zero(to);
    int result = target == NULL ? -1 : convert_by_numpy(target, source);
    Py_XDECREF(source);
    Py_XDECREF(target);
    if (result < 0 && !PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        return 0;
    }
    return result;
}

typedef struct numpy_cast {
    cm_cast cast;
    PyObject *from; /* owned, as `to` is */
    PyObject *to;
} numpy_cast;

static const char cast_name[] = "cumem.cast";

/* Make an array over memory, which lives for one call. Returns a new reference, or NULL
 * with an exception. */
static PyObject *
array_over(PyObject *dtype, int ndim, const int64_t *shape, const int64_t *strides,
           const void *memory, int flags)
{
    Py_INCREF(dtype); /* stolen */
    return PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)dtype, ndim,
                                (const npy_intp *)shape, (const npy_intp *)strides,
                                (void *)(uintptr_t)memory, flags, NULL);
}

/* Hand the exception that is set to the package, which keeps it for the code that reads
 * how the copy ended. */
static void
note_failure(const cm_cast *cast)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *noted =
        cm_package_call("base.errors", "note_cast_failure",
                        Py_BuildValue("(KO)", (unsigned long long)cast->number,
                                      value == NULL ? Py_None : value));
    if (noted == NULL) {
        PyErr_WriteUnraisable(NULL);
    }
    Py_XDECREF(noted);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

/* Convert one part of a copy. A thread of the engine has no thread state of its own,
 * and gets one for the call. */
static bool
run_cast(const cm_cast *cast, int ndim, const int64_t *shape, void *dst,
         const int64_t *dst_strides, const void *src, const int64_t *src_strides)
{
    const numpy_cast *self = (const numpy_cast *)(const void *)cast;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *to =
        array_over(self->to, ndim, shape, dst_strides, dst, NPY_ARRAY_WRITEABLE);
    PyObject *from = array_over(self->from, ndim, shape, src_strides, src, 0);
    bool is_done = to != NULL && from != NULL && convert_by_numpy(to, from) == 0;
    if (!is_done) {
        note_failure(cast);
    }
    Py_XDECREF(to);
    Py_XDECREF(from);
    PyGILState_Release(gil);
    return is_done;
}

static void
cast_free(PyObject *capsule)
{
    numpy_cast *self = PyCapsule_GetPointer(capsule, cast_name);
    Py_XDECREF(self->from);
    Py_XDECREF(self->to);
    PyMem_Free(self);
}

PyObject *
cm_numpy_cast_new(PyObject *from, PyObject *to, const cm_cast **out)
{
    static _Atomic uint64_t count;
    numpy_cast *self = PyMem_Calloc(1, sizeof(*self));
    if (self == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(self, cast_name, cast_free);
    if (capsule == NULL) {
        PyMem_Free(self);
        return NULL;
    }
    self->cast = (cm_cast){.run = run_cast, .number = ++count};
    self->from = Py_NewRef(from);
    self->to = Py_NewRef(to);
    *out = &self->cast;
    return capsule;
}

/* -- where the bytes of new arrays come from --------------------------------------------- */

_Static_assert(sizeof(cm_numpy_handler) == sizeof(PyDataMem_Handler)
                   && offsetof(cm_numpy_handler, allocator.free)
                          == offsetof(PyDataMem_Handler, allocator.free),
               "declared as NumPy does");

cm_numpy_handler *
cm_numpy_default_handler(void)
{
    return PyCapsule_GetPointer(PyDataMem_DefaultHandler, CM_NUMPY_HANDLER);
}

PyObject *
cm_numpy_exchange_handler(PyObject *capsule)
{
    return PyDataMem_SetHandler(capsule);
}
