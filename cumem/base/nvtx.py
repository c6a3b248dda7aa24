# SPDX-License-Identifier: Apache-2.0
"""Warns if a profiler's library cannot be loaded, and so gets no NVTX ranges.

The file csrc/base/nvtx.c loads that library, which is called the tool, and makes the
ranges.
"""

from __future__ import annotations

from cumem.base.errors import warn_caller


def warn_of_tool(path: str, reason: str) -> None:
    """Give a RuntimeWarning that says why a tool cannot be used."""
    warn_caller(
        "CUMEM_NVTX: the tool that NVTX_INJECTION64_PATH names, "
        f"{path}, sees no ranges: {reason}",
        RuntimeWarning,
    )
