# SPDX-License-Identifier: Apache-2.0
"""Tells where pages of managed memory are, warns, and works on it tile by tile."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np

from cumem import _core
from cumem.base.answer import plain
from cumem.base.errors import warn_caller
from cumem.base.places import found_in
from cumem.base.units import read_integer, read_size
from cumem.buffers.arguments import hinting, read_flag, wrong_type
from cumem.devices.device import Device

_Place = Device | str | None
_LEAVING = 2  #: the number of tiles that move back at a time


class ManagedThrashWarning(UserWarning):
    """Host and device keep taking the same managed memory from each other.

    The warning is given once for each piece of memory, when the side that uses the same
    bytes has changed sixteen times within ten seconds. cumem notices uses by
    `prefetch_pages`, `on` and ``fill``, and everything that passes the memory to the host
    (``numpy()``, the buffer protocol) or to a device's library (DLPack,
    ``__cuda_array_interface__``). It does not notice uses through an array that was made
    from the memory earlier.

    Examples
    --------
    >>> import warnings
    >>> warnings.simplefilter("error", cumem.ManagedThrashWarning)
    """


@found_in("cumem.types")
class Residency(NamedTuple):
    """What is known about the places of the pages of managed memory.

    Attributes
    ----------
    nbytes : int
        The bytes from the lowest element to the end of the highest. Offsets count from the
        lowest element.
    last_prefetch : tuple of (int, int, Device or str or None)
        An item for each range of bytes, with the beginning and the end of the range, and
        the place to which the driver says that it was last *sent*. The place is a `Device`,
        ``"host"``, ``"numa:1"``, or None if the range was never sent, or its parts were
        sent to several places. Ranges are resolved in steps of 64 KiB, or of 1/1024 of the
        memory if that is more. No driver can say where the pages are now, because page
        faults or evictions may have moved them since.
    host_nbytes : int or None
        The bytes on pages that are in the host's page table now, which the host can touch
        without a page fault. Pages that moved to the host but were not touched there may be
        missing. It is None if the system cannot tell.
    sampled : bool
        Whether `host_nbytes` is an estimate from 65,536 pages, because there are more.
    preferred_location : Device, str or None
        The advice for all of the memory, as in `ManagedBuffer.preferred_location`.
    read_mostly : bool
        The advice as in `ManagedBuffer.read_mostly`.
    accessed_by : tuple of Device or str
        The advice as in `ManagedBuffer.accessed_by`.

    Examples
    --------
    >>> buf = cumem.empty_managed(1 << 20, "u1")
    >>> buf.page_residency().nbytes
    1048576
    """

    nbytes: int
    last_prefetch: tuple[tuple[int, int, _Place], ...]
    host_nbytes: int | None
    sampled: bool
    preferred_location: _Place
    read_mostly: bool
    accessed_by: tuple[Device | str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as `Counters.to_dict` does. A device becomes its index."""
        return plain(self)


def warn_of_thrashing(buffer: _core.Buffer) -> None:
    """Warn for the extension about memory that moves to and fro."""
    warn_caller(
        f"host and device keep taking {buffer!r} from each other: the side that used it "
        "changed 16 times within ten seconds, and each time its pages have to move. If it "
        "is mostly read, set `buf.read_mostly = True`; if one side should keep it, "
        "`buf.preferred_location` and `buf.accessed_by`; else do more on one side "
        "before the other has its turn, or go through it by `cumem.tiles`",
        ManagedThrashWarning,
    )


# -- tiles -----------------------------------------------------------------------------


def _is_shape(wanted: Any) -> bool:
    """Return whether the argument is a shape rather than a number of bytes."""
    if isinstance(wanted, np.ndarray):
        return wanted.ndim > 0
    return isinstance(wanted, Sequence) and not isinstance(wanted, str)


def _lengths(buf: _core.ManagedBuffer, wanted: Any) -> tuple[int, ...]:
    """Return the lengths of a tile along the first axes."""
    if _is_shape(wanted):
        lengths = tuple(read_integer(each, "nbytes_or_shape") for each in wanted)
        if not 1 <= len(lengths) <= buf.ndim or min(lengths) < 1:
            raise ValueError(
                f"nbytes_or_shape must be 1 to {buf.ndim} lengths of at least 1, not "
                f"{lengths}"
            )
        return lengths
    nbytes = read_size(wanted, "nbytes_or_shape", False, None)
    if nbytes == 0:
        raise ValueError("nbytes_or_shape must be at least 1, not 0")
    rows = len(buf)
    return (max(1, nbytes // max(1, buf.nbytes // max(1, rows))),)


def _device_index(device: object) -> int:
    """Return the index of the device on which tiles are used, and refuse the host."""
    if isinstance(device, str) and not device.startswith("cuda"):
        raise ValueError(f"device must be a device, not {device!r}")
    return _core._device(device, "device").index


@overload
def tiles(
    buf: _core.ManagedBuffer,
    nbytes_or_shape: SupportsIndex | str,
    device: object = ...,
    ahead: SupportsIndex = ...,
    evict: bool = ...,
) -> Iterator[tuple[slice[int, int, Any], _core.ManagedBuffer]]: ...
@overload
def tiles(
    buf: _core.ManagedBuffer,
    nbytes_or_shape: Sequence[SupportsIndex],
    device: object = ...,
    ahead: SupportsIndex = ...,
    evict: bool = ...,
) -> Iterator[tuple[tuple[slice[int, int, Any], ...], _core.ManagedBuffer]]: ...
@hinting
def tiles(
    buf: _core.ManagedBuffer,
    nbytes_or_shape: SupportsIndex | str | Sequence[SupportsIndex],
    device: object = None,
    ahead: SupportsIndex = 1,
    evict: bool = True,
) -> Iterator[tuple[Any, _core.ManagedBuffer]]:
    """Iterate over managed memory tile by tile, while the next tiles are moved.

    Parameters
    ----------
    buf : ManagedBuffer
        The memory, which may be larger than the device's.
    nbytes_or_shape : int, str or sequence of int
        The most bytes of a tile, such as ``"64 MiB"``. A tile then has whole rows of the
        first axis, and at least one. A sequence gives the lengths of a tile along the first
        axes instead.
    device : Device, int or str, optional
        The device on which tiles are used; by default cumem's current device.
    ahead : int
        The number of tiles that move to the device while one is used.
    evict : bool
        Whether a tile moves back to the host after its use. Pass False if everything fits,
        or if the memory is only read and `ManagedBuffer.read_mostly` is set, since the
        driver then drops copies when memory runs short.

    Yields
    ------
    slice or tuple of slice
        The place of the tile, which is ``buf[slice]``. It is a tuple if lengths were given.
    ManagedBuffer
        The tile, which is a view.

    Raises
    ------
    TypeError
        If an argument is of another type.
    ValueError
        If an argument is out of range, or the buffer has no axis or is closed.
    CudaError
        If the driver refuses, as for `ManagedBuffer.prefetch_pages`.

    Notes
    -----
    Work that is queued on the device's current stream after a tile was returned is
    **ordered after** the tile's move, and the move back is ordered after that work. Moves
    run on separate streams. Asking for another tile **blocks**, with the GIL released,
    until all but the last two tiles are finished and, with `evict`, moved back. With
    `evict`, memory for ``ahead + 3`` tiles is enough. When the iterator ends, the current
    stream waits for the last moves back. An iterator that is closed or dropped early moves
    back the tiles that are on the device, and does not wait. Tiles that are not contiguous
    move row by row. Pages that two tiles share move with both.

    Examples
    --------
    >>> data = cumem.zeros((1024, 1024), "f4", "managed")
    >>> for rows, tile in cumem.tiles(data, "1 MiB"):
    ...     tile.fill(rows.start, stream=cumem.current_stream())
    >>> cumem.current_stream().synchronize()
    >>> float(data.numpy()[-1, 0])
    768.0
    """
    if not isinstance(buf, _core.ManagedBuffer):
        raise wrong_type("buf", "a ManagedBuffer", buf)
    if buf.ndim == 0:
        raise ValueError("buf has no axis to cut: its shape is ()")
    lengths = _lengths(buf, nbytes_or_shape)
    index = _device_index(device)
    count = read_integer(ahead, "ahead")
    if count < 0:
        raise ValueError(f"ahead must not be negative, not {count}")
    places: Iterator[tuple[slice, ...]] = itertools.product(
        *(
            [slice(i, min(i + step, n)) for i in range(0, n, step)]
            for n, step in zip(buf.shape, lengths, strict=False)
        )
    )
    goes_back = read_flag(evict, "evict")
    return _tiles(buf, places, _is_shape(nbytes_or_shape), index, count, goes_back)


def _tiles(
    buf: _core.ManagedBuffer,
    places: Iterator[tuple[slice, ...]],
    is_shape: bool,
    device: int,
    ahead: int,
    evict: bool,
) -> Iterator[tuple[slice | tuple[slice, ...], _core.ManagedBuffer]]:
    # A driver begins a move at once only if the stream is idle. So each tile that moves in
    # has its own stream, and the stream must be idle before it gets another tile. A move
    # back waits for the work on its tile and needs no idle stream, so two streams take
    # turns.
    inward: collections.deque[_core.Stream] = collections.deque()
    outward = collections.deque(_core.Stream(device=device) for _ in range(_LEAVING))
    coming: collections.deque[
        tuple[tuple[slice, ...], _core.ManagedBuffer, _core.Event]
    ] = collections.deque()
    left: collections.deque[_core.Event] = collections.deque()

    def start(count: int) -> None:
        for place in itertools.islice(places, count):
            tile = buf[place]
            is_full = len(inward) > ahead
            stream = inward.popleft() if is_full else _core.Stream(device=device)
            inward.append(stream)
            stream.synchronize()
            _core._prefetch_rows(tile, device, stream)
            coming.append((place, tile, stream.record()))

    def send_back(tile: _core.ManagedBuffer, after: _core.Event) -> _core.Event:
        if not evict:
            return after
        stream = outward[0]
        outward.rotate()
        stream.wait(after)
        _core._prefetch_rows(tile, None, stream)
        return stream.record()

    def join() -> None:
        for stream in outward:
            _core.current_stream(device).wait(stream)

    def undo() -> None:
        current = _core.current_stream(device)
        used = current.record()
        for place, _, moved in coming:
            outward[0].wait(moved)
            send_back(buf[place], used)
        for _, _, moved in coming:
            current.wait(moved)
        join()

    try:
        start(ahead)
        while True:
            start(1)
            if not coming:
                break
            place, tile, moved = coming[0]
            _core.current_stream(device).wait(moved)
            yield place if is_shape else place[0], tile
            coming.popleft()
            del tile  # the user may have closed this view, so another one is made
            left.append(send_back(buf[place], _core.current_stream(device).record()))
            if len(left) > _LEAVING:
                left.popleft().synchronize()
        join()
    except GeneratorExit:
        if not buf.closed:
            undo()
    except BaseException:
        with contextlib.suppress(RuntimeError, ValueError):  # the first error counts
            undo()
        raise
