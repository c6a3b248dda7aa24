# SPDX-License-Identifier: Apache-2.0
"""Times of copies by the CUDA runtime alone, beside which others are held."""

from __future__ import annotations

import time

from cumem import _core


def raw_copies(
    dst: _core.Buffer, src: _core.Buffer, stream: object, budget: float
) -> list[float]:
    """Seconds of each of 5 to 400 copies by the CUDA runtime alone, waited for one by
    one, that take about `budget` seconds together."""
    ends = dst.ptr, src.ptr, dst.nbytes
    _core._raw_copy(*ends, stream)  # wakes up what sleeps
    end = time.monotonic() + budget
    seconds: list[float] = []
    while len(seconds) < 5 or (len(seconds) < 400 and time.monotonic() < end):
        seconds.append(_core._raw_copy(*ends, stream))
    return seconds
