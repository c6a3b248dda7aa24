/* SPDX-License-Identifier: Apache-2.0 */
/* empty, zeros, full, array, empty_like and empty_pinned, _mapped, _managed, _device.
 * GIL held; allocating and copying release it. */
#ifndef CM_PYTHON_CONSTRUCTORS_H
#define CM_PYTHON_CONSTRUCTORS_H

#include "python/objects.h"

extern PyMethodDef cm_constructor_methods[];      /* any kind: constructors.c */
extern PyMethodDef cm_kind_constructor_methods[]; /* one kind each: kind_constructors.c
                                                   */

extern const char cm_empty_doc[]; /* constructor_docs.c */
extern const char cm_zeros_doc[];
extern const char cm_full_doc[];
extern const char cm_array_doc[];
extern const char cm_empty_like_doc[];

#endif
