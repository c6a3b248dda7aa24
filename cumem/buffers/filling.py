# SPDX-License-Identifier: Apache-2.0
"""What a buffer is filled with and what a new one is made of, where it is not a number."""

from __future__ import annotations

from typing import Any

import numpy as np

from cumem import _core
from cumem.base.kinds import is_on_device

Array = np.ndarray[Any, Any]


def read_source(value: Any, stream: object) -> Any:
    """A Buffer of what must be asked for by protocol, since NumPy cannot read it or would
    lose sight of where it is; it comes after its exporter's work. Else `value` itself.
    """
    kind = type(value)
    is_exporter = (
        hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__")
    ) and not isinstance(value, (_core.Buffer, np.ndarray, np.generic))
    return _core.asbuffer(value, stream=stream) if is_exporter else value


def as_array(value: object) -> Array:
    """Of the dtype that NumPy gives it."""
    return _core._read_array(value)


def as_value_of(value: object, dtype: np.dtype[Any]) -> Array:
    """The same as an array of `dtype`; see `_core._read_value`."""
    return _core._read_value(value, dtype)


def read_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """Memory as it is; a value as an array of `dtype`, or of its own where it would
    change."""
    if isinstance(value, _core.Buffer):
        return value
    return _core._read_any_value(value, dtype)


def copy_as(target: Any, source: Any, stream: Any, casting: Any, /) -> None:
    """A copy that may convert, in the order of `stream`.

    Only what comes from a device goes to the background: `stream` may be one of another
    device than that, and then orders the copy without carrying it.
    """
    if not _is_on_device(source) or _is_on_device(target):
        _core.copy(target, source, stream=stream, casting=casting)
    else:
        _copy_after(target, source, stream, casting)


def is_memory(source: object) -> bool:
    """Has it a dtype of its own, which is compared and not converted?"""
    return isinstance(source, (_core.Buffer, np.ndarray)) or (
        hasattr(source, "__array__") and not isinstance(source, np.generic)
    )


def _is_on_device(source: object) -> bool:
    """Is it a Buffer that NumPy cannot read?"""
    return isinstance(source, _core.Buffer) and is_on_device(source.kind)


def _copy_after(target: Any, source: Any, stream: Any, casting: Any = None) -> None:
    """In the order of `stream`, on a stream of the source's own device."""
    _core.copy_async(target, source, after=stream, casting=casting).wait()
