# SPDX-License-Identifier: Apache-2.0
"""New buffers with values in them, or like others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from cumem import _core
from cumem.base.kinds import is_on_device
from cumem.buffers.arguments import hinting, read_dtype, read_flag, refuse_dtype
from cumem.buffers.casting import check
from cumem.buffers.filling import (
    as_array,
    as_value_of,
    copy_as,
    is_memory,
    make_like,
    read_source,
    read_value,
)

if TYPE_CHECKING:
    from cumem.pools.pool import Pool

# Reads as "device", but tells those who give no kind, whose pool may say it, apart.
_DEVICE: Any = str(b"device", "ascii")


@hinting
def zeros(
    shape: _core._Shape,
    dtype: DTypeLike = "float64",
    kind: _core._Kind = _DEVICE,
    *,
    order: _core._Order = "C",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
) -> _core.Buffer:
    """Allocate a buffer and set all its bytes to zero.

    Parameters
    ----------
    shape : int or sequence of int
        Lengths in elements.
    dtype : dtype_like
        Any NumPy dtype without Python objects.
    kind : str
        What memory, as in `empty`; default device memory.
    order : {'C', 'F'}
        Whether the last or the first index runs fastest.
    device : Device, int or str, optional
        Whose memory, or whose context page-locks it, as ``0`` or ``"cuda:0"``; default:
        cumem's current one.
    stream : Stream or other stream object, optional
        The stream to use it on first, for device memory one of `device`; default:
        the current stream.
    pool : Pool, optional
        Where to take it from; default: the pool of the innermost ``with pool:`` block
        that fits, else the kind's default pool. Without `kind` and `device` it says
        these as well.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, kind, order or device
        is none of those that exist, or `stream` is of another device.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is no room, also after waiting for freed memory and trimming pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        In a child made by ``fork``.

    Notes
    -----
    Blocks: for memory the host can read, until it is zero; device memory, and mapped
    and managed memory with `stream`, is set on the stream.
    Ordered after: work on `stream`.

    Examples
    --------
    >>> cumem.zeros(3, "i4", "pinned").numpy()
    array([0, 0, 0], dtype=int32)
    """
    buffer: _core.Buffer = _core.empty(
        shape, dtype, order=order, **_place(kind, device, stream, pool)
    )
    buffer.fill(np.zeros((), buffer.dtype), stream=stream)
    return buffer


@hinting
def full(
    shape: _core._Shape,
    fill_value: object,
    dtype: DTypeLike | None = None,
    kind: _core._Kind = _DEVICE,
    *,
    order: _core._Order = "C",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
    casting: _core._Casting | None = None,
) -> _core.Buffer:
    """Allocate a buffer and set all its elements to a value.

    Parameters
    ----------
    shape : int or sequence of int
        Lengths in elements.
    fill_value : array_like, Buffer, or exporter of DLPack or the CUDA array interface
        A scalar, or an array that broadcasts to the shape; also on a device.
    dtype : dtype_like, optional
        Default: the dtype that `fill_value` has or NumPy gives it.
    kind : str
        What memory, as in `empty`; default device memory.
    order : {'C', 'F'}
        Whether the last or the first index runs fastest.
    device : Device, int or str, optional
        Whose memory, or whose context page-locks it, as ``0`` or ``"cuda:0"``; default:
        cumem's current one.
    stream : Stream or other stream object, optional
        The stream to use it on first, for device memory one of `device`; default:
        the current stream.
    pool : Pool, optional
        Where to take it from; default: the pool of the innermost ``with pool:`` block
        that fits, else the kind's default pool. Without `kind` and `device` it says
        these as well.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        Whether the dtype of an array may become `dtype`, as ``numpy.can_cast`` has it;
        default: ``"same_kind"``. For scalars that do not fit, too.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, kind, order or device
        is none of those that exist, or `stream` is of another device.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is no room, also after waiting for freed memory and trimming pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        In a child made by ``fork``.

    Notes
    -----
    Blocks: for memory the host can read, until it is filled; device memory, and mapped
    and managed memory with `stream`, is filled on the stream.
    Ordered after: work on `stream`.

    Examples
    --------
    >>> cumem.full(3, 7, "i4", "pinned").numpy()
    array([7, 7, 7], dtype=int32)
    """
    place = _place(kind, device, stream, pool)
    source = fill_value
    if dtype is None:
        source = read_source(fill_value, _first_stream(place))
        dtype = (source if isinstance(source, _core.Buffer) else as_array(source)).dtype
    buffer: _core.Buffer = _core.empty(shape, dtype, order=order, **place)
    _set(buffer, source, stream, casting)
    return buffer


@hinting
def empty_like(
    prototype: object,
    dtype: DTypeLike | None = None,
    kind: _core._Kind | None = None,
    *,
    order: _core._LikeOrder | None = "K",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
) -> _core.Buffer:
    """Allocate a buffer with the shape and dtype of another array.

    Parameters
    ----------
    prototype : Buffer or array_like
        Gives shape, dtype and, if it is a buffer, kind, flags and device.
    dtype : dtype_like, optional
        Instead of the prototype's.
    kind : {'device', 'pinned', 'mapped', 'managed'}, optional
        Instead of the prototype's; device memory for what is not a buffer and for ordinary
        memory.
    order : {'C', 'F', 'A', 'K'}
        As in NumPy: 'C' and 'F' say whether the last or the first index runs
        fastest, 'A' is 'F' if the original is Fortran-contiguous only, else 'C', and
        'K' keeps the order of its strides.
    device : Device, int or str, optional
        Whose memory, or whose context page-locks it, as ``0`` or ``"cuda:0"``; default:
        cumem's current one.
    stream : Stream or other stream object, optional
        The stream to use it on first, for device memory one of `device`; default:
        the current stream.
    pool : Pool, optional
        Where to take it from; default: the pool of the innermost ``with pool:`` block
        that fits, else the kind's default pool. Without `kind` and `device` it says
        these as well.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, kind, order or device
        is none of those that exist, or `stream` is of another device.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is no room, also after waiting for freed memory and trimming pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        In a child made by ``fork``.

    Notes
    -----
    Blocks: only when the pool has nothing that fits (GIL released).
    Ordered after: as `empty`.

    Examples
    --------
    >>> buf = cumem.empty_like(numpy.ones((2, 3), "f4"))
    >>> buf.kind, buf.shape
    ('device', (2, 3))
    """
    return make_like(prototype, dtype, kind, order, device, stream, pool)


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
        Default: the dtype of `obj`. What has another one is converted as `casting` says.
        Python's numbers, NumPy's scalars and lists of them stay the same kind and come
        back equal, floats rounded; else it is a TypeError (reals for integers) or an
        OverflowError (300 in ``uint8``).
    kind : str
        What memory, as in `empty`; default device memory.
    order : {'C', 'F', 'A', 'K'}
        As in NumPy: 'C' and 'F' say whether the last or the first index runs
        fastest, 'A' is 'F' if the original is Fortran-contiguous only, else 'C', and
        'K' keeps the order of its strides.
    device : Device, int or str, optional
        Whose memory, or whose context page-locks it, as ``0`` or ``"cuda:0"``; default:
        cumem's current one.
    stream : Stream or other stream object, optional
        The stream to use it on first, for device memory one of `device`; default:
        the current stream.
    pool : Pool, optional
        Where to take it from; default: the pool of the innermost ``with pool:`` block
        that fits, else the kind's default pool. Without `kind` and `device` it says
        these as well.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        Which dtypes of `obj` may become `dtype`, as ``numpy.can_cast`` has it; default:
        ``"same_kind"``. The copy threads convert; from device memory to device memory by
        way of the host. For values that do not fit, too.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, kind, order or device
        is none of those that exist, or `stream` is of another device.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is no room, also after waiting for freed memory and trimming pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        In a child made by ``fork``.

    Notes
    -----
    Blocks: until the values are there (GIL released).
    Ordered after: work on `stream`, and what the exporter of `obj` says is pending.

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
        buffer = make_like(source, wanted, order=order, **_apart(place))
        copy_as(buffer, source, stream, rule)
        return buffer
    if casting is not None:
        check("array: ", source.dtype, source.dtype, casting)
    buffer = make_like(source, order=order, **_apart(place))
    _core.copy(buffer, source, stream=stream)
    return buffer


@hinting
def zeros_like(
    prototype: object,
    dtype: DTypeLike | None = None,
    kind: _core._Kind | None = None,
    *,
    order: _core._LikeOrder | None = "K",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
) -> _core.Buffer:
    """Allocate a buffer like another array and set all its bytes to zero.

    Parameters
    ----------
    prototype : Buffer or array_like
        Gives shape, dtype and, if it is a buffer, kind, flags and device.
    dtype : dtype_like, optional
        Instead of the prototype's.
    kind : {'device', 'pinned', 'mapped', 'managed'}, optional
        Instead of the prototype's; device memory for what is not a buffer and for ordinary
        memory.
    order : {'C', 'F', 'A', 'K'}
        As in NumPy: 'C' and 'F' say whether the last or the first index runs
        fastest, 'A' is 'F' if the original is Fortran-contiguous only, else 'C', and
        'K' keeps the order of its strides.
    device : Device, int or str, optional
        Whose memory, or whose context page-locks it, as ``0`` or ``"cuda:0"``; default:
        that of the prototype or cumem's current one.
    stream : Stream or other stream object, optional
        The stream to use it on first, for device memory one of `device`; default:
        the current stream.
    pool : Pool, optional
        Where to take it from; default: the pool of the innermost ``with pool:`` block
        that fits, else the kind's default pool. Without `kind` and `device` it says
        these as well.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        kind, order or device is none of those that exist, or `stream` is of another
        device.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is no room, also after waiting for freed memory and trimming pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        In a child made by ``fork``.

    Notes
    -----
    Blocks: as `zeros`.
    Ordered after: work on `stream`.

    Examples
    --------
    >>> cumem.zeros_like(numpy.ones(2)).to_numpy()
    array([0., 0.])
    """
    buffer = empty_like(
        prototype,
        dtype,
        kind,
        order=order,
        device=device,
        stream=stream,
        pool=pool,
    )
    buffer.fill(np.zeros((), buffer.dtype), stream=stream)
    return buffer


@hinting
def full_like(
    prototype: object,
    fill_value: object,
    dtype: DTypeLike | None = None,
    kind: _core._Kind | None = None,
    *,
    order: _core._LikeOrder | None = "K",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
    casting: _core._Casting | None = None,
) -> _core.Buffer:
    """Allocate a buffer like another array and set all its elements to a value.

    Parameters
    ----------
    prototype : Buffer or array_like
        Gives shape, dtype and, if it is a buffer, kind, flags and device.
    fill_value : array_like, Buffer, or exporter of DLPack or the CUDA array interface
        A scalar, or an array that broadcasts to the shape; also on a device.
    dtype : dtype_like, optional
        Instead of the prototype's.
    kind : {'device', 'pinned', 'mapped', 'managed'}, optional
        Instead of the prototype's; device memory for what is not a buffer and for ordinary
        memory.
    order : {'C', 'F', 'A', 'K'}
        As in NumPy: 'C' and 'F' say whether the last or the first index runs
        fastest, 'A' is 'F' if the original is Fortran-contiguous only, else 'C', and
        'K' keeps the order of its strides.
    device : Device, int or str, optional
        Whose memory, or whose context page-locks it, as ``0`` or ``"cuda:0"``; default:
        that of the prototype or cumem's current one.
    stream : Stream or other stream object, optional
        The stream to use it on first, for device memory one of `device`; default:
        the current stream.
    pool : Pool, optional
        Where to take it from; default: the pool of the innermost ``with pool:`` block
        that fits, else the kind's default pool. Without `kind` and `device` it says
        these as well.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        Whether the dtype of an array may become this one, as ``numpy.can_cast`` has it;
        default: ``"same_kind"``. For scalars that do not fit, too.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        kind, order or device is none of those that exist, or `stream` is of another
        device, or `fill_value` does not broadcast.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is no room, also after waiting for freed memory and trimming pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        In a child made by ``fork``.

    Notes
    -----
    Blocks: as `full`.
    Ordered after: work on `stream`.

    Examples
    --------
    >>> cumem.full_like(numpy.ones(3), 7.0).to_numpy()
    array([7., 7., 7.])
    """
    buffer = empty_like(
        prototype,
        dtype,
        kind,
        order=order,
        device=device,
        stream=stream,
        pool=pool,
    )
    _set(buffer, fill_value, stream, casting)
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
    """A buffer of what is given: the same memory where it will do, else a copy.

    Parameters
    ----------
    obj : array_like, Buffer, or exporter of DLPack or the CUDA array interface
        Where the values come from.
    dtype : dtype_like, optional
        Default: the dtype of `obj`; another one as for `array`.
    kind : {'device', 'pinned', 'mapped', 'managed'}, optional
        What memory the buffer must be; default: the kind of memory that `obj` is, and
        device memory for what is ordinary memory or a value.
    order : {'C', 'F', 'A', 'K'}
        As in NumPy: 'C' and 'F' say whether the last or the first index runs
        fastest, 'A' is 'F' if the original is Fortran-contiguous only, else 'C', and
        'K' takes memory as it is.
    device : Device, int or str, optional
        Whose memory, or whose context page-locks it, as ``0`` or ``"cuda:0"``; default:
        that of `obj`, of a copy cumem's current one.
    stream : Stream or other stream object, optional
        The stream to use it on first, for device memory one of `device`; default:
        the current stream.
    pool : Pool, optional
        Where to take it from; default: the pool of the innermost ``with pool:`` block
        that fits, else the kind's default pool. Without `kind` and `device` it says
        these as well.
    copy : bool, optional
        True always copies, False never does and raises instead.

    Returns
    -------
    Buffer
        `obj` itself if it is a buffer that fits, a view of its memory if another
        exporter's does (as from `asbuffer`), else a new buffer (as from `array`).

    Raises
    ------
    ValueError
        kind, order or device is none of those that exist, or `stream` is of another
        device, or `copy` is False and a copy is needed.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is no room, also after waiting for freed memory and trimming pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        In a child made by ``fork``.

    Notes
    -----
    Blocks: a copy until the values are there (GIL released), else no.
    Ordered after: work on `stream`, and what the exporter of `obj` says is pending.

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
    if pool is None:  # for a tensor, which `source` is no more
        device = _core._device(device, "device", obj)
    place: dict[str, Any] = {"device": device, "stream": stream, "pool": pool}
    if kind is not None:
        place["kind"] = kind
    made: _core.Buffer = array(source, dtype, order=order, **place)
    return made


def _set(buffer: _core.Buffer, value: object, stream: object, casting: Any) -> None:
    if isinstance(value, (int, float, complex, np.generic)) and casting is None:
        buffer.fill(value, stream=stream)
    else:
        source = read_source(value, stream)
        if casting is None and is_memory(source) and source.dtype != buffer.dtype:
            casting = "same_kind"
        buffer.fill(source, stream=stream, casting=casting)


def _has_dtype(source: object) -> bool:
    """Is it memory, whose dtype a rule of casting is about, and no value?"""
    is_plain = isinstance(source, (bytes, str, list, tuple))
    return is_memory(source) or (not is_plain and _core._is_memory(source))


def _memory(
    obj: Any, kind: str | None, device: object, stream: object, pool: Any
) -> _core.Buffer | None:
    """The memory of an exporter, or of an array, as it is; None: a value."""
    if isinstance(obj, _core.Buffer):
        _ = obj.ptr  # a closed one says so
        return obj
    if not _core._is_memory(obj) or isinstance(obj, (bytes, bytearray, memoryview)):
        return None
    try:
        return _core.asbuffer(obj, stream=stream)
    except TypeError:  # of a dtype that no buffer can have: as a value it says so
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
    """Where memory comes from, as keywords of `empty`; that of values of `source`."""
    if source is not None and pool is None:
        device = _core._device(device, "device", source)
    place = {"device": device, "stream": stream, "pool": pool}
    return place if kind is _DEVICE else {"kind": kind, **place}


def _apart(place: dict[str, Any]) -> dict[str, Any]:
    """The same for `empty_like`, which else takes kind and device of the prototype."""
    if place["pool"] is not None:
        return place
    device = _core.current_device() if place["device"] is None else place["device"]
    return {"kind": "device", **place, "device": device}


def _first_stream(place: dict[str, Any]) -> object:
    """What values that an exporter has are wanted on; None: wherever they are."""
    pool = place["pool"]
    kind = place.get("kind", getattr(pool, "kind", "device"))
    if place["stream"] is not None or not is_on_device(kind):
        return place["stream"]
    device = (
        getattr(pool, "device", None) if place["device"] is None else place["device"]
    )
    return _core.current_stream(device)


def _usable(dtype: DTypeLike) -> np.dtype[Any]:
    """A dtype that elements of a buffer can have."""
    found = read_dtype(dtype)
    if found.hasobject or found.subdtype is not None or found.itemsize == 0:
        refuse_dtype(found)
    return found
