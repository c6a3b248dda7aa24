/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"

#include <stddef.h>

const char *
cm_error_name(int32_t code)
{
    switch (code) {
#define CM_ERROR_NAME(name, value, text)                                               \
    case value:                                                                        \
        return #name;
        CM_ERRORS(CM_ERROR_NAME)
#undef CM_ERROR_NAME
    default:
        return NULL;
    }
}

const char *
cm_error_text(int32_t code)
{
    switch (code) {
#define CM_ERROR_TEXT(name, value, text)                                               \
    case value:                                                                        \
        return text;
        CM_ERRORS(CM_ERROR_TEXT)
#undef CM_ERROR_TEXT
    default:
        return NULL;
    }
}
