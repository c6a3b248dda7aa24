# SPDX-License-Identifier: Apache-2.0
"""The constructors `array` and `asarray`, which make buffers from array-like objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cumem import _core
from cumem.base.kinds import is_on_device
from cumem.buffers.arguments import hinting, read_dtype, read_flag, refuse_dtype
from cumem.buffers.casting import check
from cumem.buffers.filling import (
    as_array,
    as_value_of,
    copy_as,
    is_memory,
    read_source,
    read_value,
)

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from cumem.pools.pool import Pool

# The default of `kind`. It shows as "device" in signatures, but is another object than the
# literal. So `_place` can see that the caller left `kind` out, and that the pool determines
# it.
_DEVICE: Any = str(b"device", "ascii")


@hinting
def array(
    obj: object,
    dtype: DTypeLike | None = None,
    kind: _core._Kind = _DEVICE,
    *,
    order: _core._LikeOrder | None = "K",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
    casting: _core._Casting | None = None,
) -> _core.Buffer:
    """Copy anything array-like into a new buffer.

    Parameters
    ----------
    obj : array_like, Buffer, or exporter of DLPack or the CUDA array interface
        Where the values come from.
    dtype : dtype_like, optional
        The dtype of the elements; by default that of `obj`. An array of another dtype is
        converted as `casting` says. Python's numbers, NumPy's scalars and lists of them
        must fit into `dtype`. For example, a float for an integer dtype raises TypeError,
        and 300 for ``uint8`` raises OverflowError. Floats are rounded to a shorter float
        dtype.
    kind : str
        The kind of memory, as in `empty`; by default device memory.
    order : {'C', 'F', 'A', 'K'}
        As in NumPy: 'C' and 'F' say whether the last or the first index runs
        fastest, 'A' means 'F' if the original is Fortran-contiguous and not C-contiguous,
        else 'C', and 'K' keeps the order of its strides.
    device : Device, int or str, optional
        The device that has the memory or whose context page-locks it, such as ``0`` or
        ``"cuda:0"``; by default cumem's current device.
    stream : Stream or other stream object, optional
        The stream that will use the memory first; for device memory it must be one of
        `device`. By default it is the current stream.
    pool : Pool, optional
        The pool to take the memory from; by default that of the innermost ``with pool:``
        block that fits, or else the kind's default pool. If `kind` and `device` are not
        given, the pool determines them as well.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        Which dtypes of `obj` may be converted to `dtype`, as in ``numpy.can_cast``;
        by default ``"same_kind"``. Threads of the host convert the elements, so elements
        that come from device memory and go to device memory pass through the host. If
        `casting` is given, it also covers numbers and lists, which otherwise must fit into
        `dtype`.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, there is no such kind,
        order or device, or `stream` belongs to another device.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is not enough memory, even after waiting for freed memory and trimming
        pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        The process is a child made by ``fork``.

    Notes
    -----
    **Blocks** until the values are there, with the GIL released. **Ordered after** work on
    `stream`, and after the work that the exporter of `obj` reports as pending.

    Examples
    --------
    >>> cumem.array([1, 2, 3], "f4", "pinned").numpy()
    array([1., 2., 3.], dtype=float32)
    """
    place = _place(kind, device, stream, pool, obj)
    source = read_source(obj, _first_stream(place))
    wanted = None if dtype is None else _usable(dtype)
    has_dtype = _has_dtype(source)
    if has_dtype or wanted is None:
        source = source if isinstance(source, _core.Buffer) else as_array(source)
    elif casting is None:
        source = as_value_of(source, wanted)
    else:
        source = read_value(source, wanted)
    if wanted is not None and wanted != source.dtype:
        rule = "same_kind" if casting is None else casting
        check("array: ", source.dtype, wanted, rule)
        buffer: _core.Buffer = _core.empty_like(
            source, wanted, order=order, **_apart(place)
        )
        copy_as(buffer, source, stream, rule)
        return buffer
    if casting is not None:
        check("array: ", source.dtype, source.dtype, casting)
    buffer = _core.empty_like(source, order=order, **_apart(place))
    _core.copy(buffer, source, stream=stream)
    return buffer


@hinting
def asarray(
    obj: object,
    dtype: DTypeLike | None = None,
    kind: _core._Kind | None = None,
    *,
    order: _core._LikeOrder | None = "K",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
    copy: bool | None = None,
) -> _core.Buffer:
    """Return a buffer over an object's memory, or over a copy if that memory does not fit.

    Parameters
    ----------
    obj : array_like, Buffer, or exporter of DLPack or the CUDA array interface
        Where the values come from.
    dtype : dtype_like, optional
        The dtype of the elements; by default that of `obj`. Another dtype needs a copy,
        which converts as `array` does.
    kind : {'device', 'pinned', 'mapped', 'managed'}, optional
        The kind of memory that the buffer must have; by default the kind of `obj`, or
        device memory if `obj` is ordinary memory or a value.
    order : {'C', 'F', 'A', 'K'}
        As in NumPy: 'C' and 'F' say whether the last or the first index runs
        fastest, 'A' means 'F' if the original is Fortran-contiguous and not C-contiguous,
        else 'C', and 'K' accepts memory in the order that it has.
    device : Device, int or str, optional
        The device that has the memory or whose context page-locks it, such as ``0`` or
        ``"cuda:0"``; by default that of `obj`, or for a copy cumem's current device.
    stream : Stream or other stream object, optional
        The stream that will use the memory first; for device memory it must be one of
        `device`. By default it is the current stream.
    pool : Pool, optional
        The pool to take the memory from; by default that of the innermost ``with pool:``
        block that fits, or else the kind's default pool. If `kind` and `device` are not
        given, the pool determines them as well.
    copy : bool, optional
        True always copies. False never copies, and raises ValueError instead.

    Returns
    -------
    Buffer
        `obj` itself if it is a buffer that fits, a view of its memory (as from `asbuffer`)
        if it is another exporter whose memory fits, else a new buffer (as from `array`).

    Raises
    ------
    ValueError
        There is no such kind, order or device, `stream` belongs to another device, or
        `copy` is False and a copy is needed.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is not enough memory, even after waiting for freed memory and trimming
        pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        The process is a child made by ``fork``.

    Notes
    -----
    **Blocks** if it copies, until the values are there, with the GIL released. **Ordered
    after** work on `stream`, and after the work that the exporter of `obj` reports as
    pending.

    Examples
    --------
    >>> array = numpy.arange(3)
    >>> cumem.asarray(array, kind="device").to_numpy()
    array([0, 1, 2])
    """
    copy = None if copy is None else read_flag(copy, "copy")
    found = _memory(obj, kind, device, stream, pool)
    wanted = None if dtype is None else _usable(dtype)
    is_fit = found is not None and (
        _fits(found, kind, device, pool)
        and (wanted is None or wanted == found.dtype)
        and _is_laid_out(found, order)
    )
    if is_fit and not copy:
        return found  # type: ignore[return-value]
    if copy is not None and not copy:
        raise ValueError("copy=False, and this memory needs a copy to be that buffer")
    source = obj if found is None else found
    if kind is None and pool is None:
        kind = "device"
        if found is not None and found.kind != "pageable":
            kind = found.kind
            device = found.device if device is None else device
    if pool is None:
        # The device is found from `obj`, because `source` does not show whether the memory
        # belongs to a tensor.
        device = _core._device(device, "device", obj)
    place: dict[str, Any] = {"device": device, "stream": stream, "pool": pool}
    if kind is not None:
        place["kind"] = kind
    made: _core.Buffer = array(source, dtype, order=order, **place)
    return made


def _has_dtype(source: object) -> bool:
    """Return whether a source is memory, to whose dtype `casting` applies, or a value."""
    is_plain = isinstance(source, (bytes, str, list, tuple))
    return is_memory(source) or (not is_plain and _core._is_memory(source))


def _memory(
    obj: Any, kind: str | None, device: object, stream: object, pool: Any
) -> _core.Buffer | None:
    """Return a buffer over the memory of an exporter or array, or None for a value."""
    if isinstance(obj, _core.Buffer):
        _ = obj._address  # raises ValueError if the buffer is closed
        return obj
    if not _core._is_memory(obj) or isinstance(obj, (bytes, bytearray, memoryview)):
        return None
    try:
        return _core.asbuffer(obj, stream=stream)
    except TypeError:  # no buffer has such a dtype; reading it as a value will fail
        return None


def _fits(found: _core.Buffer, kind: str | None, device: object, pool: Any) -> bool:
    wanted = getattr(pool, "kind", None) if kind is None else kind
    if found.kind == "pageable" or wanted not in (None, found.kind):
        return False
    place = getattr(pool, "device", None) if device is None else device
    return place is None or found.device == _core._device(place, "device")


def _is_laid_out(found: _core.Buffer, order: Any) -> bool:
    if order not in (None, "K", "A", "C", "F"):
        raise ValueError(f'order must be "C", "F", "A" or "K", not {order!r}')
    flags = found.flags
    laid = {"C": flags.c_contiguous, "F": flags.f_contiguous}
    return bool(laid.get(order, order != "A" or flags.forc))


def _place(
    kind: Any, device: object, stream: object, pool: Any, source: object = None
) -> dict[str, Any]:
    """Return the keywords of `empty` that say where memory comes from.

    If `source` is a tensor and no device is named, the device is PyTorch's current one.
    """
    if source is not None and pool is None:
        device = _core._device(device, "device", source)
    place = {"device": device, "stream": stream, "pool": pool}
    return place if kind is _DEVICE else {"kind": kind, **place}


def _apart(place: dict[str, Any]) -> dict[str, Any]:
    """Return keywords for `empty_like` that replace the prototype's kind and device."""
    if place["pool"] is not None:
        return place
    device = _core.current_device() if place["device"] is None else place["device"]
    return {"kind": "device", **place, "device": device}


def _first_stream(place: dict[str, Any]) -> object:
    """Return the stream that will read an exporter's values, or None if any stream may."""
    pool = place["pool"]
    kind = place.get("kind", getattr(pool, "kind", "device"))
    if place["stream"] is not None or not is_on_device(kind):
        return place["stream"]
    device = (
        getattr(pool, "device", None) if place["device"] is None else place["device"]
    )
    return _core.current_stream(device)


def _usable(dtype: DTypeLike) -> np.dtype[Any]:
    """Read a dtype, and raise TypeError if a buffer cannot have elements of it."""
    found = read_dtype(dtype)
    if found.hasobject or found.subdtype is not None or found.itemsize == 0:
        refuse_dtype(found)
    return found
