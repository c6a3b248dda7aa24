# SPDX-License-Identifier: Apache-2.0
"""Buffers from arrays and back, whatever the kind."""

from __future__ import annotations

import numpy as np

import cumem


def put(array: np.ndarray, place: str, order: str = "C") -> object:
    """Put an array's bytes into memory of `place`, which is a kind or "numpy"."""
    if place == "numpy":
        return np.array(array, order=order)  # type: ignore[call-overload]
    buffer = cumem.empty(array.shape, array.dtype, place, order=order)
    cumem.copy(buffer, array)
    return buffer


def get(obj: object) -> np.ndarray:
    """Return the bytes as a new NumPy array, without using the copy under test.

    Host memory is read at its own address, and device memory through a contiguous copy.
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
    """Copy to the device and back through another stream."""
    device = cumem.empty_device(buffer.shape, buffer.dtype)
    cumem.copy(device, buffer)
    assert (get(device) == buffer.numpy()).all()
    if not buffer.readonly:
        cumem.copy(device, np.zeros(buffer.shape, buffer.dtype))
        cumem.copy(buffer, device)
        assert not buffer.numpy().any()
