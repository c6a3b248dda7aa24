/* SPDX-License-Identifier: Apache-2.0 */
/* The one place that includes Python.h. The limited API is set by the build (see
 * setup.py); what it lacks is declared nowhere else. */
#ifndef CM_PYTHON_PYTHON_H
#define CM_PYTHON_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h> /* T_PYSSIZET and READONLY, Py_… only since 3.12 */

#include "base/attributes.h"

#if PY_VERSION_HEX < 0x030B0000
#    error "cumem needs Python 3.11 or newer"
#endif

#endif
