# SPDX-License-Identifier: Apache-2.0
"""Reads the values and prototypes of fills and of new buffers, unless they are numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from cumem import _core
from cumem.base.kinds import is_on_device

Array = np.ndarray[Any, Any]


def read_source(value: Any, stream: object) -> Any:
    """Return a Buffer over the memory of an exporter, or `value` itself if it is not one.

    The exporter's own protocol is used rather than NumPy, because NumPy cannot read memory
    of a device, and does not tell of which kind other memory is. Work on the buffer is
    ordered after the work of the exporter.
    """
    kind = type(value)
    is_exporter = (
        hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__")
    ) and not isinstance(value, (_core.Buffer, np.ndarray, np.generic))
    return _core.asbuffer(value, stream=stream) if is_exporter else value


def as_array(value: object) -> Array:
    """Return the value as an array of the dtype that NumPy gives it."""
    return _core._read_array(value)


def as_value_of(value: object, dtype: np.dtype[Any]) -> Array:
    """Return the value as an array of `dtype`; see `_core._read_value`."""
    return _core._read_value(value, dtype)


def read_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a Buffer as it is, and a value as an array.

    The array has the given dtype, or the value's own dtype if the given one would change
    the value.
    """
    if isinstance(value, _core.Buffer):
        return value
    return _core._read_any_value(value, dtype)


def copy_as(target: Any, source: Any, stream: Any, casting: Any, /) -> None:
    """Copy in the order of `stream`, and convert the elements if need be.

    If only the source is on a device, the copy runs on a stream of that device, because
    `stream` may belong to another device. It then comes after the work of `stream`.
    """
    if not _is_on_device(source) or _is_on_device(target):
        _core.copy(target, source, stream=stream, casting=casting)
    else:
        _copy_after(target, source, stream, casting)


def is_memory(source: object) -> bool:
    """Return whether a source is memory, to which `casting` applies, and not a value."""
    return isinstance(source, (_core.Buffer, np.ndarray)) or (
        hasattr(source, "__array__") and not isinstance(source, np.generic)
    )


def _is_on_device(source: object) -> bool:
    """Return whether a source is a Buffer that NumPy cannot read."""
    return isinstance(source, _core.Buffer) and is_on_device(source.kind)


def _copy_after(target: Any, source: Any, stream: Any, casting: Any = None) -> None:
    """Copy after the work of `stream`, on a stream of the source's own device."""
    _core.copy_async(target, source, after=stream, casting=casting).wait()
