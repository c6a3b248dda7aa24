# SPDX-License-Identifier: Apache-2.0
"""Makes buffers of any kind from NumPy arrays, and reads their values back."""

from __future__ import annotations

import numpy as np

import cumem


def put(array: np.ndarray, place: str, order: str = "C") -> object:
    """Put an array's bytes into memory of a place, which is a kind or "numpy"."""
    if place == "numpy":
        return np.array(array, order=order)  # type: ignore[call-overload]
    buffer = cumem.empty(array.shape, array.dtype, place, order=order)
    cumem.copy(buffer, array)
    return buffer


def get(obj: object) -> np.ndarray:
    """Return the values of a buffer or an array as a new NumPy array.

    Host memory is read at its own address. Device memory is read by a copy.
    """
    if isinstance(obj, np.ndarray):
        return obj.copy()
    assert isinstance(obj, cumem.Buffer)
    if isinstance(obj, cumem.DeviceBuffer):
        out = np.empty(obj.shape, obj.dtype)
        cumem.copy(out, obj)
        return out
    return obj.numpy().copy()


def round_trip(buffer: cumem.Buffer) -> None:
    """Copy a buffer to the device, and zeros from the device into it, and check both."""
    device = cumem.empty_device(buffer.shape, buffer.dtype)
    cumem.copy(device, buffer)
    assert (get(device) == buffer.numpy()).all()
    if not buffer.readonly:
        cumem.copy(device, np.zeros(buffer.shape, buffer.dtype))
        cumem.copy(buffer, device)
        assert not buffer.numpy().any()
