# SPDX-License-Identifier: Apache-2.0
"""Helpers of tests in which NumPy's arrays are in pinned memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

import cumem


def is_pinned(array: np.ndarray) -> bool:
    """Return whether an array's memory is page-locked, according to the driver."""
    return cumem.asbuffer(array).kind == "pinned"


def live() -> int:
    """Return how many bytes of the default pool of pinned memory are in use."""
    return cumem.default_pool("pinned").stats().live_nbytes


def numpy_core() -> Any:
    """Return `numpy._core`, or `numpy.core` in 1.26, whose `_core` is empty."""
    return np._core if int(np.__version__.partition(".")[0]) >= 2 else np.core


def handler_name(*array: np.ndarray) -> str:
    """Return the name of the allocator of an array, or of new arrays."""
    return numpy_core().multiarray.get_handler_name(*array)


def at_address(address: int, nbytes: int) -> np.ndarray:
    """Return an array over the bytes at an address, which keeps no memory alive."""
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    return np.frombuffer(memory, "u1")
