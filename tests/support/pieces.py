# SPDX-License-Identifier: Apache-2.0
"""Numbers, and pieces of them in another order."""

from __future__ import annotations

import numpy as np


def numbers(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype="u1")


def shuffled(count: int, width: int, seed: int = 0) -> list[tuple[slice, slice]]:
    """Return where `count` pieces of `width` go, and where they come from."""
    order = np.random.default_rng(seed).permutation(count)
    return [
        (slice(i * width, (i + 1) * width), slice(k * width, (k + 1) * width))
        for i, k in enumerate(order.tolist())
    ]
