# SPDX-License-Identifier: Apache-2.0
"""Random bytes, and pieces of arrays in a random order, for tests of many copies."""

from __future__ import annotations

import numpy as np


def numbers(size: int, seed: int = 0) -> np.ndarray:
    """Return random bytes."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype="u1")


def shuffled(count: int, width: int, seed: int = 0) -> list[tuple[slice, slice]]:
    """Return pairs of slices: where each of the pieces goes, and where it comes from."""
    order = np.random.default_rng(seed).permutation(count)
    return [
        (slice(i * width, (i + 1) * width), slice(k * width, (k + 1) * width))
        for i, k in enumerate(order.tolist())
    ]
