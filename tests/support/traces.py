# SPDX-License-Identifier: Apache-2.0
"""A trace that was worked out by hand, for the tests of traces and of replaying."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cumem.tools.replay.trace import Trace, make_trace

KIB = 1024

# After the first row 4 KiB are live, and after the others 8, 4, 16, 4, 12 and 8 KiB.
# The size in a row that frees a block is 0.
OP = [1, 1, 0, 1, 0, 1, 0]
BLOCK = [0, 1, 0, 2, 2, 3, 1]
SIZE = [4 * KIB, 4 * KIB, 0, 12 * KIB, 0, 8 * KIB, 0]
STREAM = [0, 0, 0, 0, 0, 0, 0]
PEAK_LIVE = 16 * KIB


def hand_checked(stream: list[int] = STREAM) -> Trace:
    """Make the trace."""
    return make_trace("hand", OP, BLOCK, SIZE, stream)


def write_npz(path: Path, **changes: object) -> Path:
    """Write the trace as an .npz file, with some of its arrays replaced."""
    arrays: dict[str, Any] = {
        "op": np.array(OP, np.uint8),
        "block": np.array(BLOCK, np.uint32),
        "size": np.array(SIZE, np.uint64),
        "stream": np.array(STREAM, np.uint8),
    }
    np.savez(path, **(arrays | changes))
    return path
