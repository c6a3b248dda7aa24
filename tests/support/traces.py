# SPDX-License-Identifier: Apache-2.0
"""A trace that was worked out by hand, for the tests of traces and of replaying."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cumem.tools.replay.trace import Trace, make_trace

KIB = 1024

# 8 KiB are live after row 1, 4 after row 2, 16 after row 3, 4 after row 4 and 8 after row
# 6. A row that is a free leaves the size of its block out.
OP = [1, 1, 0, 1, 0, 1, 0]
BLOCK = [0, 1, 0, 2, 2, 3, 1]
SIZE = [4 * KIB, 4 * KIB, 0, 12 * KIB, 0, 8 * KIB, 0]
STREAM = [0, 0, 0, 0, 0, 0, 0]
PEAK_LIVE = 16 * KIB


def hand_checked(stream: list[int] = STREAM) -> Trace:
    return make_trace("hand", OP, BLOCK, SIZE, stream)


def write_npz(path: Path, **changes: object) -> Path:
    arrays: dict[str, Any] = {
        "op": np.array(OP, np.uint8),
        "block": np.array(BLOCK, np.uint32),
        "size": np.array(SIZE, np.uint64),
        "stream": np.array(STREAM, np.uint8),
    }
    np.savez(path, **(arrays | changes))
    return path
