# SPDX-License-Identifier: Apache-2.0
"""Data larger than the GPU, piece by piece, the next pieces already on their way."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

import numpy as np

from cumem import _core
from cumem.devices import Device
from cumem.files import open_regular, unwrapped
from cumem.memory import get_limit, memory_info
from cumem.units import format_nbytes, read_integer, read_size

#: What a chunk has where nobody says.
_CHUNK_NBYTES = 64 << 20


def _count(value: SupportsIndex, name: str) -> int:
    number = read_integer(value, name)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}")
    return number


def _available(device: Device) -> int:
    """Bytes that new buffers of the device may have, with what its pools would reuse."""
    info = memory_info(device)
    free = info.free + info.reserved - info.live
    limit = get_limit("device", device)
    return free if limit is None else max(0, min(free, limit - info.live))


def _share(available: int, fraction: float, count: int) -> int:
    """Bytes for each of `count` chunks."""
    return int(available * fraction) // count


def chunk_size(
    item_nbytes: SupportsIndex | str,
    available: SupportsIndex | str | None = None,
    copies: SupportsIndex = 3,
    fraction: float = 0.8,
) -> int:
    """How many items a chunk may have, so that several chunks fit into memory.

    Parameters
    ----------
    item_nbytes : int or str
        Bytes of one item, such as a row, with all that is made of it; ``"4 KiB"`` too.
    available : int or str, optional
        Bytes that there are for chunks; default: what is free on cumem's current
        device, what its pools have cached included, within its limit.
    copies : int
        Chunks that are there at the same time: with 3 one comes, one is worked on and
        one leaves.
    fraction : float
        The share of `available` that all of them may take, above 0 and at most 1.

    Returns
    -------
    int
        Items of a chunk, at least 1.

    Raises
    ------
    TypeError
        If an argument is no number.
    ValueError
        If an argument is out of its range, or not even chunks of one item fit.
    CudaError
        If the driver cannot say what is free.

    Examples
    --------
    >>> cumem.chunk_size(1 << 20, available="1 GiB")
    273
    """
    nbytes = read_size(item_nbytes, "item_nbytes", False, None)
    if nbytes == 0:
        raise ValueError("item_nbytes must be at least 1, not 0")
    count = _count(copies, "copies")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, not {fraction!r}")
    total = (
        _available(_core.current_device())
        if available is None
        else read_size(available, "available", False, None)
    )
    items = _share(total, fraction, count) // nbytes
    if items == 0:
        raise ValueError(
            f"{count} items of {format_nbytes(nbytes)} do not fit into {fraction:g} of "
            f"{format_nbytes(total)}"
        )
    return items


def _rows(memory: Any, nbytes: int | None, device: Device, depth: int) -> int:
    """Of a chunk: at least one."""
    if nbytes is None:
        nbytes = min(_CHUNK_NBYTES, _share(_available(device), 0.8, depth + 2))
    row_nbytes: int = memory.nbytes // len(memory)
    return max(1, nbytes // max(1, row_nbytes))


def _open(file: Any) -> Any:
    """What is left of a file, mapped."""
    size = os.fstat(file.fileno()).st_size
    plain = unwrapped(file)
    begin = plain.tell()
    return np.memmap(plain, "u1", "r", begin) if begin < size else np.empty(0, "u1")


def _memory(src: Any) -> Any:
    """What has a shape and slices; None: it is no memory."""
    if isinstance(src, (_core.Buffer, np.ndarray)):
        return src
    if isinstance(src, (str, bytes, os.PathLike)):
        with open_regular(os.fsdecode(src)) as file:
            return _open(file)
    if hasattr(src, "readinto"):
        return _open(src)
    try:
        return _core.asbuffer(src)
    except TypeError:
        return None


def _length(memory: Any) -> int:
    if not memory.shape:
        raise ValueError("src has no axis to cut: its shape is ()")
    return len(memory)


def _cut(memory: Any, rows: int) -> Iterator[tuple[slice, Any]]:
    count = len(memory)
    for begin in range(0, count, rows):
        part = slice(begin, min(begin + rows, count))
        yield part, memory[part]


def _in_turn(arrays: Iterable[Any]) -> Iterator[tuple[slice, Any]]:
    begin = 0
    for each in arrays:
        memory = _memory(each)
        memory = np.asarray(each) if memory is None else memory
        end = begin + _length(memory)
        yield slice(begin, end), memory
        begin = end


def chunks(
    src: object,
    nbytes: SupportsIndex | str | None = None,
    device: object = None,
    depth: SupportsIndex = 3,
) -> Iterator[tuple[slice, _core.DeviceBuffer]]:
    """Bring data to a device chunk by chunk, the next ones already on their way.

    Parameters
    ----------
    src : Buffer, array, path, binary file or iterable
        An array of any library, cut along its first axis, also a `numpy.memmap` larger
        than all memory; a file, as bytes from where it stands; or an iterable of
        arrays, each of which is a chunk.
    nbytes : int or str, optional
        Most bytes of a chunk, which has one row in any case; default: 64 MiB, or less
        where that is not free. What an iterable gives is never cut.
    device : Device, int or str, optional
        Default: cumem's current one.
    depth : int
        Copies that may be under way beside the chunk in hand.

    Yields
    ------
    slice
        What of the first axis it is: ``src[slice]``.
    DeviceBuffer
        A chunk of that shape and of the dtype of `src`; it is the caller's.

    Raises
    ------
    TypeError
        If `src` is none of these.
    ValueError
        If an argument is out of its range or `src` has no axis.
    OSError
        If a file cannot be read.
    OutOfMemoryError, CudaError
        If the driver refuses. What was on its way by then is waited for.

    Notes
    -----
    Work given to the device's current stream after a chunk has come is **ordered
    after** its copy. Asking for another **blocks**, GIL released, until the current
    stream is done with the work on the chunk before the last: where chunks are not kept,
    memory for ``depth + 2`` of them is enough. `src` must not change before its last
    chunk has come. An iterator that is closed or dropped early cancels the copies that
    have not begun and waits for the others.

    Examples
    --------
    >>> total = 0.0
    >>> for part, chunk in cumem.chunks(numpy.ones(1 << 20), "1 MiB"):
    ...     total += float(chunk.to_numpy().sum())
    >>> total
    1048576.0
    """
    most = None if nbytes is None else read_size(nbytes, "nbytes", False, None)
    if most == 0:
        raise ValueError("nbytes must be at least 1, not 0")
    ahead = _count(depth, "depth")
    where: Any = device
    unit = _core.current_device() if device is None else Device(where)
    memory = _memory(src)
    if memory is not None:
        rows = _rows(memory, most, unit, ahead) if _length(memory) else 1
        return _chunks(_cut(memory, rows), unit.index, ahead)
    if not isinstance(src, Iterable):
        raise TypeError(
            "src must be an array, a file or an iterable of arrays, not "
            f"{type(src).__name__}"
        )
    return _chunks(_in_turn(src), unit.index, ahead)


def _chunks(
    pieces: Iterator[tuple[slice, Any]], device: int, depth: int
) -> Iterator[tuple[slice, _core.DeviceBuffer]]:
    side = _core.Stream(device=device)  # memory is not taken in the order of the work
    coming: collections.deque[tuple[slice, _core.DeviceBuffer, _core.Transfer]]
    coming = collections.deque()
    done: collections.deque[_core.Event] = collections.deque()
    failures: list[Exception] = []

    def start(count: int) -> None:
        try:
            for part, piece in itertools.islice(pieces, 0 if failures else count):
                buffer = _core.empty_device(
                    piece.shape, piece.dtype, device=device, stream=side
                )
                coming.append((part, buffer, _core.copy_async(buffer, piece)))
        except Exception as error:
            failures.append(error)  # told after the chunks before it

    try:
        start(depth)
        while coming:
            start(1)
            part, buffer, transfer = coming.popleft()
            transfer.order(_core.current_stream(device))
            yield part, buffer
            del buffer, transfer
            done.append(_core.current_stream(device).record())
            if len(done) > 1:
                done.popleft().synchronize()
        if failures:
            raise failures[0]
    finally:
        failures.clear()
        for *_, transfer in coming:
            transfer.cancel()
        for *_, transfer in coming:
            with contextlib.suppress(OSError, RuntimeError):
                transfer.wait()
