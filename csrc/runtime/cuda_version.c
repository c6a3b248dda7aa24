/* SPDX-License-Identifier: Apache-2.0 */
/* The version of the CUDA runtime compiled in, known without any driver call. */
#include <cuda_runtime_api.h>

#include "runtime/runtime.h"

int
cm_cuda_built_version(void)
{
    return CUDART_VERSION;
}
