# SPDX-License-Identifier: Apache-2.0
"""What a buffer is filled with and what a new one is made of, where it is no number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from cumem import _core
from cumem.extension.arguments import hinting, read_dtype
from cumem.extension.casting import check, is_converted, refuse_dtypes
from cumem.extension.values import as_value, refuse_objects
from cumem.kinds import is_on_device

Array = np.ndarray[Any, Any]


def fill(
    buffer: _core.Buffer,
    value: object,
    stream: object,
    casting: Any = None,
) -> None:
    """What `Buffer.fill` does with a value that is no number of Python's.

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
        _core._fill(buffer, values, stream)


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
    if dtype is None:
        dtype = layout.dtype
    if kind is None:
        kind = getattr(pool, "kind", "device")
    return _core._allocate(None, layout, dtype, order, kind, like, device, stream, pool)


def as_array(value: object) -> Array:
    """Of the dtype that NumPy gives it."""
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise refuse_objects(value)
    return array


def as_value_of(value: object, dtype: np.dtype[Any]) -> Array:
    """The same as an array of `dtype`; see `as_value`."""
    is_one = isinstance(value, np.ndarray) and value.dtype == dtype
    return value if is_one else as_value(value, dtype)  # type: ignore[return-value]


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
    """A copy that may convert, in the order of `stream`; from device memory to device
    memory by way of the host. What the copy threads do not convert NumPy does."""
    if source.dtype != target.dtype and not is_converted(source.dtype, target.dtype):
        check("", source.dtype, target.dtype, casting)
        _copy_by_numpy(target, source, stream)
        return
    is_far = _is_on_device(source) and _is_on_device(target)
    if is_far and source.dtype != target.dtype:
        there: Array = np.empty(source.shape, target.dtype)
        _copy_after(there, source, stream, casting)
        source = there
    if _is_on_device(target):
        _core.copy(target, source, stream=stream, casting=casting)
    else:
        _copy_after(target, source, stream, casting)


def copy_by_numpy(target: Any, source: Any, stream: Any, casting: Any) -> bool:
    """Make a copy that waits and converts what the copy threads do not; False: those do.

    Only for two ends that tell their dtypes, as buffers and arrays do.
    """
    to, was = getattr(target, "dtype", None), getattr(source, "dtype", None)
    if not (isinstance(to, np.dtype) and isinstance(was, np.dtype)):
        return False
    if to == was or is_converted(was, to):
        return False
    check("copy: ", was, to, casting)
    if getattr(target, "readonly", False):
        raise ValueError(f"copy: the target ({type(target)!r}) is read-only")
    _copy_by_numpy(target, source, stream)
    return True


def _copy_by_numpy(target: Any, source: Any, stream: Any) -> None:
    """A copy between dtypes that NumPy alone converts: those of other packages, complex
    numbers, times, text, records and the other byte order.

    In pieces, so that no second array of the whole is made: NumPy converts one into
    page-locked memory while the one before goes to the device.
    """
    source = (
        source if isinstance(source, (_core.Buffer, np.ndarray)) else as_array(source)
    )
    if source.shape != target.shape:
        source = np.broadcast_to(_fetch(source, stream), target.shape)
    if target.ndim > 1 and not target.flags.c_contiguous and target.flags.f_contiguous:
        source, target = source.transpose(), target.transpose()  # pieces are runs
    if not _is_on_device(target):
        if stream is not None:
            _core.Stream.from_external(stream).synchronize()
        array = target if isinstance(target, np.ndarray) else target.numpy()
        if not _is_on_device(source) and np.may_share_memory(
            array, _fetch(source, None)
        ):
            source = np.array(_fetch(source, stream))  # read whole first
        for index in _pieces(target.shape, _PIECE_NBYTES // _widest(source, target)):
            _cast(array[index], _fetch(source[index], stream))
        return
    slots: list[_core.Buffer] = []
    coming: list[_core.Transfer] = []
    on = _core.current_stream(target.device) if stream is None else stream
    for index in _pieces(target.shape, _PIECE_NBYTES // _widest(source, target)):
        piece = target[index]
        if len(slots) < 2:
            slots.append(_core.empty_pinned(piece.size, target.dtype))
        else:
            coming.pop(0).wait()
        slot = slots[-1][: piece.size].reshape(piece.shape)
        _cast(slot.numpy(), _fetch(source[index], stream))
        coming.append(_core.copy_async(piece, slot, stream=on))
        slots.reverse()
    for transfer in coming:
        transfer.wait()


#: What NumPy converts at a time.
_PIECE_NBYTES = 4 << 20


def _widest(source: Any, target: Any) -> int:
    return max(int(source.dtype.itemsize), int(target.dtype.itemsize))


def _pieces(shape: tuple[int, ...], most: int) -> Iterator[tuple[Any, ...]]:
    """Indices that cut an array of `shape` into pieces of at most `most` elements, which
    lie side by side in C order; one that is empty has none."""
    count = math.prod(shape)
    if count <= max(most, 1):
        if count > 0:
            yield (...,)
        return
    inner = count // shape[0]
    rows = most // inner
    if rows > 0:
        for first in range(0, shape[0], rows):
            yield (slice(first, first + rows),)
        return
    for row in range(shape[0]):
        for index in _pieces(shape[1:], most):
            yield (slice(row, row + 1), *index)


def _cast(target: Array, source: Array) -> None:
    """The rule was looked at before. NumPy would warn of what becomes infinite, which
    the copy threads do not."""
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")


def astype(
    buffer: _core.Buffer,
    dtype: DTypeLike,
    order: Any = "K",
    casting: Any = "unsafe",
    copy: bool = True,
) -> _core.Buffer:
    """See `Buffer.astype`."""
    wanted = read_dtype(dtype)
    check("astype: ", buffer.dtype, wanted, casting)
    if not copy and buffer.dtype == wanted and order in ("K", None):
        return buffer
    is_pageable = buffer.kind == "pageable"
    make: Any = _make_ordinary if is_pageable else make_like
    result: _core.Buffer = make(buffer, wanted, order=order)
    copy_as(result, buffer, None, casting)
    return result


def copy(self: _core.Buffer, order: Any = "C") -> _core.Buffer:
    """See `Buffer.copy`."""
    _ = self.ptr  # a closed one says so
    is_pageable = self.kind == "pageable"
    make: Any = _make_ordinary if is_pageable else make_like
    result: _core.Buffer = make(self, self.dtype, order="C" if order is None else order)
    _core.copy(result, self)
    return result


def _make_ordinary(
    buffer: _core.Buffer, dtype: np.dtype[Any], order: Any
) -> _core.Buffer:
    """Such memory has no pool: it is NumPy's, and page-locked in `numpy_pinned`."""
    made = buffer._read_by(lambda array: np.empty_like(array, dtype, order))
    return _core.asbuffer(made)


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
