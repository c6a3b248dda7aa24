/* SPDX-License-Identifier: Apache-2.0 */
#include "base/dtypes.h"

#include <stddef.h>
#include <string.h>

/* The values that the columns `on_device` and `code` of the list may have. */
enum { HOST = false, DEVICE = true, NO_CODE = -1 };

#define ROW(its_class, id, its_name, type, reads, on_device, its_kind, its_bits,       \
            its_code, its_file, its_rank, its_torch)                                   \
    [CM_##id] = {                                                                      \
        .name = its_name,                                                              \
        .file = its_file,                                                              \
        .torch = its_torch,                                                            \
        .nbytes = (its_bits) / 8,                                                      \
        .bits = its_bits,                                                              \
        .kind = its_kind,                                                              \
        .code = its_code,                                                              \
        .rank = its_rank,                                                              \
        .class_of = its_class,                                                         \
        .converts_on_device = on_device,                                               \
    },

/* clang-format off */
const cm_dtype_row cm_dtypes[CM_DTYPE_COUNT] = {
    CM_INTEGERS(ROW, CM_CLASS_INTEGER)
    CM_FLOATS(ROW, CM_CLASS_FLOAT)
    CM_COMPLEX_NUMBERS(ROW, CM_CLASS_COMPLEX)
    CM_OTHER_DTYPES(ROW, CM_CLASS_OF_OTHER_DTYPES)
};
/* clang-format on */

cm_dtype
cm_dtype_named(const char *name)
{
    for (int dtype = CM_NUMBER_NONE + 1; dtype < CM_DTYPE_COUNT; dtype++) {
        if (strcmp(cm_dtypes[dtype].name, name) == 0) {
            return (cm_dtype)dtype;
        }
    }
    return CM_NUMBER_NONE;
}

cm_dtype
cm_dtype_of_code(int code, int bits)
{
    for (int dtype = CM_NUMBER_NONE + 1; dtype < CM_DTYPE_COUNT; dtype++) {
        const cm_dtype_row *row = &cm_dtypes[dtype];
        if (row->code != NO_CODE && row->code == code && row->bits == bits) {
            return (cm_dtype)dtype;
        }
    }
    return CM_NUMBER_NONE;
}
