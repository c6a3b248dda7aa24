# SPDX-License-Identifier: Apache-2.0
"""Ranges in profilers: which tool of NVTX is attached. The rest is csrc/base/nvtx.c."""

from __future__ import annotations

import os

from cumem import _core
from cumem.base.errors import warn_caller


def attach() -> None:
    """Let a tool that listens see ranges from now on; the first call counts.

    The tool is the library that NVTX_INJECTION64_PATH names, which profilers set. Without
    one there are no ranges, and one that cannot be used is a RuntimeWarning.
    """
    path = os.environ.get("NVTX_INJECTION64_PATH")
    if not path:
        return
    reason = _core._attach_nvtx(path)
    if reason is not None:
        warn_caller(
            "CUMEM_NVTX: the tool that NVTX_INJECTION64_PATH names, "
            f"{path}, sees no ranges: {reason}",
            RuntimeWarning,
        )
