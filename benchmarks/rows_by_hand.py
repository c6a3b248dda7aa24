# SPDX-License-Identifier: Apache-2.0
"""A kernel that copies rows by index, written in CUDA C as a user would write it.

Each warp copies one row at a time, with four loads of 16 bytes in flight in each thread.
The benchmarks of rows compare it with cumem's kernel.
"""

from __future__ import annotations

from typing import Any

BLOCKS, THREADS = 32, 1024

_SOURCE = r"""
extern "C" __global__ void rows(char *dst, const char *src, const long long *dst_rows,
                                const long long *src_rows, long long count,
                                long long units)
{
    long long warp = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    long long warps = (long long)gridDim.x * blockDim.x / 32;
    int lane = threadIdx.x % 32;
    for (long long i = warp; i < count; i += warps) {
        uint4 *to = (uint4 *)(dst + dst_rows[i] * units * 16);
        const uint4 *from = (const uint4 *)(src + src_rows[i] * units * 16);
        long long k = lane;
        for (; k + 96 < units; k += 128) {
            uint4 a = __ldcs(from + k), b = __ldcs(from + k + 32);
            uint4 c = __ldcs(from + k + 64), d = __ldcs(from + k + 96);
            to[k] = a;
            to[k + 32] = b;
            to[k + 64] = c;
            to[k + 96] = d;
        }
        for (; k < units; k += 32)
            to[k] = __ldcs(from + k);
    }
}
"""


def kernel(cupy: Any) -> Any:
    """Return the kernel, which CuPy compiles at its first launch.

    Its arguments are the addresses of the target, of the source, and of the indices of
    the target's and of the source's rows (both int64), then how many rows are copied,
    and how many units of 16 bytes a row has.
    """
    return cupy.RawKernel(_SOURCE, "rows")
