# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel that copies blocks as vLLM's offloading does, for rows_beside.py.

Triton calls a block of threads a program. A few programs go through a list of jobs, where a
job is two addresses and a length. A program copies the bytes of a job in chunks of 8-byte
words, which its threads divide among themselves. vLLM starts 12 programs for blocks that go
to the GPU.
"""

import triton
import triton.language as tl

PROGRAMS = 12


@triton.jit
def copy_blocks(sources, targets, lengths, count, chunk: tl.constexpr):
    """Copy `lengths[i]` bytes from `sources[i]` to `targets[i]`, for each job."""
    job = tl.program_id(0)
    lanes = tl.arange(0, chunk // 8)
    while job < count:
        source = tl.load(sources + job).to(tl.pointer_type(tl.int64))
        target = tl.load(targets + job).to(tl.pointer_type(tl.int64))
        words = tl.load(lengths + job) // 8
        for begin in range(0, words, chunk // 8):
            at = begin + lanes
            inside = at < words
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
        job += tl.num_programs(0)
