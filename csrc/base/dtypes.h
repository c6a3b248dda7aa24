/* SPDX-License-Identifier: Apache-2.0 */
/* This is the one list of the dtypes that cumem knows by name.
 *
 * Everything else that has to tell one dtype from another is made from this list, or is
 * checked against it. In C these are the loops that convert numbers (base/convert.c),
 * the kernel that converts them on a device (transfer/device/strided.ptx, into which
 * csrc/headers.py puts the numbers) and its emulation, the element types of DLPack
 * (python/protocols/dlpack.c) and NumPy's type numbers (python/core/numpy_bridge.c).
 * The package takes the types of safetensors files and the texts of errors from it, by
 * way of `_core._DTYPES`.
 *
 * To add a dtype, add a row. If the copy threads are to convert it as well, put the row
 * among the numbers, and say in base/convert.c how one value of it is read (`F32_…`,
 * `F64_…`) and written (`…_F32`, `…_F64`). This needs a C type of exactly as many bits.
 * If its row says DEVICE, add a branch to strided.ptx. The build fails if that file
 * does not name the dtype, but only a run on a GPU shows whether the branch is correct.
 * If NumPy lacks the dtype, add the rules of its casts to can_cast_meant() in
 * python/core/numpy_bridge.c. If ml_dtypes is not installed, elements of the dtype are
 * shown as integers of the same size, like those of bfloat16. If the dtype stands
 * between others in the order of safetensors files (`rank`, below), raise the ranks
 * above it. The pages safetensors.md and casting.md list dtypes by hand, and the
 * docstring of copy() in cumem/_core.pyi lists the numbers. Buffers may have many other
 * dtypes, such as times and records, which NumPy handles by itself. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* X(context, id, name, type, reads, on_device, kind, bits, code, file, rank, torch)
 *
 * context   whatever the user of the list wants to pass on to X
 * id        the dtype is CM_<id> in C, and in PTX
 * name      its name in NumPy, or in ml_dtypes if NumPy has no such dtype
 * type      the C type of an element
 * reads     the converter that makes a float of an element (convert.c); for a complex
 *           number the id of its two parts, of which the real one comes first
 * on_device DEVICE if the kernel can make a float32 of it, else HOST
 * kind      numpy.dtype.kind; 0 for the dtypes of ml_dtypes
 * bits      of one element
 * code      DLPack's type code (DLDataTypeCode), or NO_CODE
 * file      its name in safetensors files, or NULL
 * rank      tensors with a higher rank come first in a safetensors file
 * torch     its name in PyTorch, or NULL
 *
 * csrc/headers.py reads the ids from this text, in their order. */
/* clang-format off */
#define CM_INTEGERS(X, to)                                                                    \
    X(to, BOOL, "bool", uint8_t, BOOL, DEVICE, 'b', 8, 6, "BOOL", 0, "bool")                  \
    X(to, INT8, "int8", int8_t, PLAIN, DEVICE, 'i', 8, 0, "I8", 5, "int8")                    \
    X(to, UINT8, "uint8", uint8_t, PLAIN, DEVICE, 'u', 8, 1, "U8", 4, "uint8")                \
    X(to, INT16, "int16", int16_t, PLAIN, DEVICE, 'i', 16, 0, "I16", 11, "int16")             \
    X(to, UINT16, "uint16", uint16_t, PLAIN, DEVICE, 'u', 16, 1, "U16", 12, "uint16")         \
    X(to, INT32, "int32", int32_t, PLAIN, HOST, 'i', 32, 0, "I32", 15, "int32")               \
    X(to, UINT32, "uint32", uint32_t, PLAIN, HOST, 'u', 32, 1, "U32", 16, "uint32")           \
    X(to, INT64, "int64", int64_t, PLAIN, HOST, 'i', 64, 0, "I64", 20, "int64")               \
    X(to, UINT64, "uint64", uint64_t, PLAIN, HOST, 'u', 64, 1, "U64", 21, "uint64")
#define CM_FLOATS(X, to)                                                                      \
    X(to, FLOAT16, "float16", uint16_t, FLOAT16, DEVICE, 'f', 16, 2, "F16", 13, "float16")    \
    X(to, BFLOAT16, "bfloat16", uint16_t, BFLOAT16, DEVICE, 0, 16, 4, "BF16", 14, "bfloat16") \
    X(to, FLOAT32, "float32", float, PLAIN, HOST, 'f', 32, 2, "F32", 17, "float32")           \
    X(to, FLOAT64, "float64", double, PLAIN, HOST, 'f', 64, 2, "F64", 19, "float64")
#define CM_COMPLEX_NUMBERS(X, to)                                                             \
    X(to, COMPLEX64, "complex64", cm_complex64, FLOAT32, HOST, 'c', 64, 5, "C64", 18, "complex64") \
    X(to, COMPLEX128, "complex128", cm_complex128, FLOAT64, HOST, 'c', 128, 5, NULL, 0, "complex128")
/* The copy threads leave these to NumPy, which asks ml_dtypes. */
#define CM_FOREIGN_DTYPES(X, to)                                                              \
    X(to, COMPLEX32, "complex32", void, NONE, HOST, 0, 32, 5, NULL, 0, "complex32")           \
    X(to, FLOAT8_E3M4, "float8_e3m4", void, NONE, HOST, 0, 8, 7, NULL, 0, NULL)               \
    X(to, FLOAT8_E4M3, "float8_e4m3", void, NONE, HOST, 0, 8, 8, NULL, 0, NULL)               \
    X(to, FLOAT8_E4M3B11FNUZ, "float8_e4m3b11fnuz", void, NONE, HOST, 0, 8, 9, NULL, 0, NULL) \
    X(to, FLOAT8_E4M3FN, "float8_e4m3fn", void, NONE, HOST, 0, 8, 10, "F8_E4M3", 7, "float8_e4m3fn") \
    X(to, FLOAT8_E4M3FNUZ, "float8_e4m3fnuz", void, NONE, HOST, 0, 8, 11, "F8_E4M3FNUZ", 9, "float8_e4m3fnuz") \
    X(to, FLOAT8_E5M2, "float8_e5m2", void, NONE, HOST, 0, 8, 12, "F8_E5M2", 6, "float8_e5m2") \
    X(to, FLOAT8_E5M2FNUZ, "float8_e5m2fnuz", void, NONE, HOST, 0, 8, 13, "F8_E5M2FNUZ", 10, "float8_e5m2fnuz") \
    X(to, FLOAT8_E8M0FNU, "float8_e8m0fnu", void, NONE, HOST, 0, 8, 14, "F8_E8M0", 8, "float8_e8m0fnu")
/* Files pack several of these elements into a byte, and a buffer holds such bytes. In
 * an array of ml_dtypes each element has a byte of its own. Neither layout is
 * exported with DLPack's codes for packed elements. */
#define CM_PACKED_DTYPES(X, to)                                                               \
    X(to, FLOAT4_E2M1FN, "float4_e2m1fn", void, NONE, HOST, 0, 4, NO_CODE, "F4", 1, "float4_e2m1fn_x2") \
    X(to, FLOAT6_E2M3FN, "float6_e2m3fn", void, NONE, HOST, 0, 6, NO_CODE, "F6_E2M3", 2, NULL) \
    X(to, FLOAT6_E3M2FN, "float6_e3m2fn", void, NONE, HOST, 0, 6, NO_CODE, "F6_E3M2", 3, NULL)

/* The numbers that copy threads convert. CM_REALS are those without an imaginary part,
 * and CM_NUMBERS are all of them. */
#define CM_REALS(X, to)                                                                       \
    CM_INTEGERS(X, to)                                                                        \
    CM_FLOATS(X, to)
#define CM_NUMBERS(X, to)                                                                     \
    CM_REALS(X, to)                                                                           \
    CM_COMPLEX_NUMBERS(X, to)
#define CM_OTHER_DTYPES(X, to)                                                                \
    CM_FOREIGN_DTYPES(X, to)                                                                  \
    CM_PACKED_DTYPES(X, to)
#define CM_DTYPES(X, to)                                                                      \
    CM_NUMBERS(X, to)                                                                         \
    CM_OTHER_DTYPES(X, to)
/* clang-format on */

typedef struct cm_complex64 {
    float real;
    float imaginary;
} cm_complex64;

typedef struct cm_complex128 {
    double real;
    double imaginary;
} cm_complex128;

/* The numbers come first: CM_BOOL up to CM_NUMBER_COUNT - 1. */
typedef enum cm_dtype {
    CM_NUMBER_NONE,
#define CM_DTYPE_ID(to, id, ...) CM_##id,
    CM_NUMBERS(CM_DTYPE_ID, ) CM_NUMBER_COUNT,
    CM_LAST_NUMBER = CM_NUMBER_COUNT - 1,
    CM_OTHER_DTYPES(CM_DTYPE_ID, ) CM_DTYPE_COUNT,
#undef CM_DTYPE_ID
    /* What a device makes of the numbers whose rows say DEVICE. strided.ptx stores a
     * float32 whatever this constant says, and nothing checks that the two agree. */
    CM_DEVICE_CONVERTS_TO = CM_FLOAT32,
} cm_dtype;

/* A dtype that the copy threads convert, or CM_NUMBER_NONE. */
typedef cm_dtype cm_number;

/* The classes are in the order of NumPy's "same_kind" rule: a conversion within a class
 * or to a later one may lose range or precision, but no fraction and no imaginary
 * part. */
typedef enum cm_number_class {
    CM_CLASS_INTEGER, /* bool as well */
    CM_CLASS_FLOAT,
    CM_CLASS_COMPLEX,
    CM_CLASS_OF_OTHER_DTYPES, /* the copy threads do not convert them */
} cm_number_class;

/* A row of the list, without the parts that only the compiler needs. */
typedef struct cm_dtype_row {
    const char *name;
    const char *file;
    const char *torch;
    int64_t nbytes; /* of one element; 0 if several share a byte */
    uint8_t bits;
    char kind;
    int8_t code; /* DLPack's, or -1 */
    uint8_t rank;
    cm_number_class class_of; /* the class of the dtype in casting rules */
    bool converts_on_device;
} cm_dtype_row;

/* The rows, indexed by cm_dtype. The row of CM_NUMBER_NONE is all zero. */
extern const cm_dtype_row cm_dtypes[CM_DTYPE_COUNT];

static inline uint64_t
cm_number_nbytes(cm_number number)
{
    return (uint64_t)cm_dtypes[number].nbytes;
}

static inline cm_number_class
cm_number_class_of(cm_number number)
{
    return cm_dtypes[number].class_of;
}

/* Find a dtype. Both return CM_NUMBER_NONE if the list has no such dtype. */
cm_dtype cm_dtype_named(const char *name);
cm_dtype cm_dtype_of_code(int code, int bits); /* DLPack's code */
