/* SPDX-License-Identifier: Apache-2.0 */
/* Names and texts of operations and errors, all generated from the two lists. */
#include "runtime/runtime.h"

#include <stddef.h>

#include "runtime/cuda_errors.h"

static const char *const cuda_names[CM_OP_COUNT] = {
#define CUDA_NAME(name, cuda, driver, arg, params, args) [CM_OP_##name] = #cuda,
    CM_OPS(CUDA_NAME)
#undef CUDA_NAME
};

static const char *const op_names[CM_OP_COUNT] = {
#define OP_NAME(name, cuda, driver, arg, params, args) [CM_OP_##name] = #name,
    CM_OPS(OP_NAME)
#undef OP_NAME
};

static const int min_drivers[CM_OP_COUNT] = {
#define MIN_DRIVER(name, cuda, driver, arg, params, args) [CM_OP_##name] = (driver),
    CM_OPS(MIN_DRIVER)
#undef MIN_DRIVER
};

static bool
is_op(cm_op op)
{
    return (unsigned)op > CM_OP_none && (unsigned)op < CM_OP_COUNT;
}

const char *
cm_op_cuda_name(cm_op op)
{
    return is_op(op) ? cuda_names[op] : NULL;
}

const char *
cm_op_name(cm_op op)
{
    return is_op(op) ? op_names[op] : NULL;
}

int
cm_op_min_driver(cm_op op)
{
    return is_op(op) ? min_drivers[op] : 0;
}

const char *
cm_cuda_error_name(int32_t code)
{
    switch (code) {
    case 0:
        return "cudaSuccess";
#define ERROR_NAME(value, name, text)                                                  \
    case value:                                                                        \
        return #name;
        CM_CUDA_ERRORS(ERROR_NAME)
#undef ERROR_NAME
    default:
        return "cudaErrorUnknown";
    }
}

const char *
cm_cuda_error_text(int32_t code)
{
    switch (code) {
    case 0:
        return "no error";
#define ERROR_TEXT(value, name, text)                                                  \
    case value:                                                                        \
        return text;
        CM_CUDA_ERRORS(ERROR_TEXT)
#undef ERROR_TEXT
    default:
        return "unknown error";
    }
}
