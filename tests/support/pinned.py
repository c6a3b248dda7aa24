# SPDX-License-Identifier: Apache-2.0
"""Questions that tests of NumPy's pinned arrays ask."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

import cumem


def is_pinned(array: np.ndarray) -> bool:
    """Ask the driver whether an array's memory is page-locked."""
    return cumem.asbuffer(array).kind == "pinned"


def live() -> int:
    """Return how many bytes of the default pool of pinned memory are in arrays."""
    return cumem.default_pool("pinned").stats().live_nbytes


def numpy_core() -> Any:
    """Return `numpy._core`, or `numpy.core` in 1.26, whose `_core` is empty."""
    return np._core if int(np.__version__.partition(".")[0]) >= 2 else np.core


def handler_name(*array: np.ndarray) -> str:
    return numpy_core().multiarray.get_handler_name(*array)


def at_address(address: int, nbytes: int) -> np.ndarray:
    """Return an array over the bytes at an address, which does not know whose they are."""
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    return np.frombuffer(memory, "u1")
