# SPDX-License-Identifier: Apache-2.0
"""Times copies by the CUDA runtime alone, as a standard for cumem's own copies."""

from __future__ import annotations

import time

from cumem import _core


def raw_copies(
    dst: _core.Buffer, src: _core.Buffer, stream: object, budget: float
) -> list[float]:
    """Return the seconds that each of 5 to 400 copies by the CUDA runtime alone takes.

    Each copy is waited for before the next begins. Together they take about `budget`
    seconds.
    """
    ends = dst.ptr, src.ptr, dst.nbytes
    # The first copy does not count, because it may have to wake up the link.
    _core._raw_copy(*ends, stream)
    end = time.monotonic() + budget
    seconds: list[float] = []
    while len(seconds) < 5 or (len(seconds) < 400 and time.monotonic() < end):
        seconds.append(_core._raw_copy(*ends, stream))
    return seconds
