# SPDX-License-Identifier: Apache-2.0
"""New buffers with values in them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from cumem import _core
from cumem.extension.arguments import refuse_dtype
from cumem.extension.casting import hint
from cumem.extension.filling import (
    as_array,
    as_value_of,
    copy_as,
    fill,
    read_source,
    read_value,
)
from cumem.kinds import is_on_device
from cumem.pools import Pool

# Reads as "device", but tells those who give no kind, whose pool may say it, apart.
_DEVICE: Any = str(b"device", "ascii")


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
    """
    buffer = _core.empty(
        shape, dtype, order=order, **_place(kind, device, stream, pool)
    )
    _core._fill(buffer, np.zeros((), buffer.dtype), stream)
    return buffer


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
        What may be converted to `dtype` if it does not fit, as in `copy`.

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
    """
    place = _place(kind, device, stream, pool)
    source = fill_value
    if dtype is None:
        source = read_source(fill_value, _first_stream(place))
        dtype = (source if isinstance(source, _core.Buffer) else as_array(source)).dtype
    buffer = _core.empty(shape, dtype, order=order, **place)
    if isinstance(source, (int, float)) and casting is None:
        buffer.fill(source, stream=stream)
    else:
        fill(buffer, source, stream, casting, takes_fitting=True)
    return buffer


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
        Default: the dtype of `obj`. Values that the host can read take another one as
        Python's numbers do: they stay the same kind and come back equal, floats
        rounded. Else it is a TypeError (reals for integers) or an OverflowError (300 in
        ``uint8``), unless `casting` allows it.
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
        What may be converted to `dtype` if it does not fit, or lies on a device, as in
        `copy`; from device memory to device memory by way of the host.

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
    """
    place = _place(kind, device, stream, pool)
    source = read_source(obj, _first_stream(place))
    if casting is not None and dtype is not None:
        source = read_value(source, _usable(dtype))
        buffer = _core.empty_like(source, dtype, order=order, **_apart(place))
        copy_as(buffer, source, stream, casting)
        return buffer
    if not isinstance(source, _core.Buffer):
        source = as_array(obj) if dtype is None else as_value_of(obj, _usable(dtype))
    elif dtype is not None and source.dtype != _usable(dtype):
        if is_on_device(source.kind):
            raise TypeError(
                f"dtype {np.dtype(dtype)} is asked for but the source on the device has "
                f"{source.dtype}; {hint(source.dtype, np.dtype(dtype))}"
            )
        source = as_value_of(source.numpy(), np.dtype(dtype))
    buffer = _core.empty_like(source, order=order, **_apart(place))
    _core.copy(buffer, source, stream=stream)
    return buffer


def _place(kind: Any, device: object, stream: object, pool: Any) -> dict[str, Any]:
    """Where memory comes from, as keywords of `empty`."""
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
    found = np.dtype(dtype)
    if found.hasobject or found.subdtype is not None or found.itemsize == 0:
        refuse_dtype(found)
    return found
