# SPDX-License-Identifier: Apache-2.0
"""The bytes of a buffer, as a pickle takes them, for the extension."""

from __future__ import annotations

import pickle
from typing import Any, cast

import numpy as np

__all__ = ["data_of"]


def data_of(array: np.ndarray[Any, Any], protocol: int) -> bytes | pickle.PickleBuffer:
    """The elements in memory order if they lie side by side, else in C order.

    From protocol 5 on they are the memory itself, which may travel out of band.
    """
    if not array.flags.forc:
        array = array.copy()
    flat = array.reshape(-1, order="A").view(np.uint8)
    return pickle.PickleBuffer(cast("Any", flat)) if protocol >= 5 else flat.tobytes()
