# SPDX-License-Identifier: Apache-2.0
"""Attaches a profiler's tool to NVTX ranges; csrc/base/nvtx.c does the rest."""

from __future__ import annotations

import os

from cumem import _core
from cumem.base.errors import warn_caller


def attach() -> None:
    """Let a listening tool see ranges from now on; only the first call has an effect.

    The tool is the library that NVTX_INJECTION64_PATH names; profilers set this variable.
    Without a tool there are no ranges. A tool that cannot be used is a RuntimeWarning.
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
