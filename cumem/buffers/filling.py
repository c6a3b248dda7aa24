# SPDX-License-Identifier: Apache-2.0
"""What a buffer is filled with and what a new one is made of, where it is not a number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from cumem import _core
from cumem.base.kinds import is_on_device
from cumem.buffers.arguments import hinting
from cumem.buffers.casting import refuse_dtypes

Array = np.ndarray[Any, Any]


def fill(
    buffer: _core.Buffer,
    value: object,
    stream: object,
    casting: Any = None,
) -> None:
    """What `Buffer.fill` does with a value that is neither a number nor an element.

    Values on the device stay there unless they must be converted.
    """
    device = 0 if buffer.device is None else buffer.device
    on = _core.current_stream(device) if stream is None else stream
    source = read_source(value, on)
    if casting is not None:
        copy_as(buffer, read_value(source, buffer.dtype), on, casting)
        return
    if is_memory(source):
        source = source if isinstance(source, _core.Buffer) else as_array(source)
        if source.dtype != buffer.dtype:
            refuse_dtypes("fill: ", source.dtype, buffer.dtype)
    is_kept = _is_on_device(source) and source.dtype == buffer.dtype
    values = source if is_kept else as_value_of(_fetch(source, on), buffer.dtype)
    if is_kept and not is_on_device(buffer.residency):
        _copy_after(buffer, values, on)
    elif is_kept or values.ndim > 0:
        _core.copy(buffer, values, stream=on)
    elif buffer.nbytes > 0:
        buffer.fill(values, stream=stream)


def read_source(value: Any, stream: object) -> Any:
    """A Buffer of what must be asked for by protocol, since NumPy cannot read it or would
    lose sight of where it is; it comes after its exporter's work. Else `value` itself.
    """
    kind = type(value)
    is_exporter = (
        hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__")
    ) and not isinstance(value, (_core.Buffer, np.ndarray, np.generic))
    return _core.asbuffer(value, stream=stream) if is_exporter else value


@hinting
def asnumpy(obj: Any, *, stream: Any = None, progress: Any = None) -> Array:
    """See `cumem.asnumpy`."""
    source = obj
    if isinstance(obj, _core.Buffer):
        return obj.to_numpy(stream=stream, progress=progress)
    if not isinstance(obj, np.ndarray):
        has_memory = _core._is_memory(obj)
        source = _core.asbuffer(obj, stream=stream) if has_memory else as_array(obj)
    array: Array = np.empty(source.shape, source.dtype)
    _core.copy(array, source, stream=stream, progress=progress)
    return array


def read_prototype(value: Any, stream: object) -> Any:
    """A Buffer or an array with the layout and dtype of what a new buffer is made like."""
    source = read_source(value, stream)
    return source if isinstance(source, _core.Buffer) else as_array(source)


def make_like(
    prototype: Any,
    dtype: DTypeLike | None = None,
    kind: str | None = None,
    order: object = "K",
    device: object = None,
    stream: object = None,
    pool: object = None,
) -> _core.Buffer:
    """What `empty_like` answers."""
    like = None  #: whose flags it gets
    layout = prototype
    if isinstance(prototype, _core.Buffer):
        place = prototype.device
        if pool is None and place is not None:  # no ordinary memory
            device = place if device is None else device
            if kind is None:
                kind = prototype.kind
                like = prototype if not is_on_device(kind) else None
    elif not isinstance(prototype, np.ndarray):
        layout = read_prototype(prototype, stream)
        if pool is None:
            device = _core._device(device, "device", prototype)
    if dtype is None:
        dtype = layout.dtype
    if kind is None:
        kind = getattr(pool, "kind", "device")
    return _core._allocate(None, layout, dtype, order, kind, like, device, stream, pool)


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
    if is_memory(value):
        return as_array(value)
    try:
        return as_value_of(value, dtype)
    except (TypeError, OverflowError):
        return as_array(value)


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


def _fetch(source: Any, stream: object) -> Any:
    """The values of a Buffer as an array of their own dtype."""
    if not _is_on_device(source):
        return source.numpy() if isinstance(source, _core.Buffer) else source
    array: Array = np.empty(source.shape, source.dtype)
    _copy_after(array, source, stream)
    return array


def _copy_after(target: Any, source: Any, stream: Any, casting: Any = None) -> None:
    """In the order of `stream`, on a stream of the source's own device."""
    _core.copy_async(target, source, after=stream, casting=casting).wait()
