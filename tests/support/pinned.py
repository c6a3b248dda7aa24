# SPDX-License-Identifier: Apache-2.0
"""What tests of pinned arrays of NumPy ask."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

import cumem


def is_pinned(array: np.ndarray) -> bool:
    """What the driver says of its memory."""
    return cumem.asbuffer(array).kind == "pinned"


def live() -> int:
    """Bytes in arrays of the default pool of pinned memory."""
    return cumem.default_pool("pinned").stats().live_nbytes


def numpy_core() -> Any:
    """NumPy's own modules, which 1.26 has under their old name, its `_core` empty."""
    return np._core if int(np.__version__.partition(".")[0]) >= 2 else np.core


def handler_name(*array: np.ndarray) -> str:
    return numpy_core().multiarray.get_handler_name(*array)


def at_address(address: int, nbytes: int) -> np.ndarray:
    """The bytes there, of which nobody knows whose they are."""
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    return np.frombuffer(memory, "u1")
