# SPDX-License-Identifier: Apache-2.0
"""Managed memory that is steered: pages moved ahead, advised, asked about, tile by tile."""

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
_LEAVING = 2  #: tiles that move back at a time


class ManagedThrashWarning(UserWarning):
    """Host and device keep taking the same managed memory from each other.

    Given once for each piece of memory, where sixteen times within ten seconds the side
    changed that used the same bytes, as far as cumem sees it: `prefetch`, `on`, ``fill``,
    and what hands the memory to the host (``numpy()``, the buffer protocol) or to a
    device's library (DLPack, ``__cuda_array_interface__``). What was made of the memory
    before, such as an array, touches it unseen.

    Examples
    --------
    >>> import warnings
    >>> warnings.simplefilter("error", cumem.ManagedThrashWarning)
    """


@found_in("cumem.types")
class Residency(NamedTuple):
    """What is known of where the pages of managed memory are.

    Attributes
    ----------
    nbytes : int
        Bytes from the lowest element to the end of the highest: offsets count in them.
    last_prefetch : tuple of (int, int, Device or str or None)
        Where each range of bytes, from a begin to an end, was last *sent*, as the driver
        tells: a `Device`, ``"host"``, ``"numa:1"``, or None: nowhere, or parts of it to
        several places. Ranges are told apart in steps of 64 KiB, or of 1/1024 of the
        memory if that is more. Where the pages are by now no driver tells: they may have
        been fetched by a page fault since, or pushed out.
    host_nbytes : int or None
        Bytes on pages that the host's page table has now: those that the host can touch
        without a page fault. Pages that came to the host and were not touched there yet
        may be missing. None where the system does not tell.
    sampled : bool
        Whether `host_nbytes` is drawn from 65,536 pages of more.
    preferred_location : Device, str or None
        What all of it is advised, as `ManagedBuffer.preferred_location`.
    read_mostly : bool
        The same.
    accessed_by : tuple of Device or str
        The same.

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
        """This answer as plain data; see `Counters.to_dict`. A device is its index."""
        return plain(self)


def warn_of_thrashing(buffer: _core.Buffer) -> None:
    """Say which memory is taken to and fro, and what to type; called by the extension."""
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
    """Not a number of bytes."""
    if isinstance(wanted, np.ndarray):
        return wanted.ndim > 0
    return isinstance(wanted, Sequence) and not isinstance(wanted, str)


def _lengths(buf: _core.ManagedBuffer, wanted: Any) -> tuple[int, ...]:
    """Of a tile, along the first axes."""
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
    """Of the device where tiles are used, for which the host is no answer."""
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
    """Go through managed memory tile by tile, the next ones already on their way.

    Parameters
    ----------
    buf : ManagedBuffer
        May be larger than the device's memory.
    nbytes_or_shape : int, str or sequence of int
        Most bytes of a tile, which has whole rows of the first axis, one at least, as in
        ``"64 MiB"``; or lengths of a tile along the first axes.
    device : Device, int or str, optional
        Where tiles are used; default: cumem's current device.
    ahead : int
        Tiles that move in while one is used.
    evict : bool
        Whether a tile moves back to the host after its use. False where all of it fits,
        or where it is only read and `ManagedBuffer.read_mostly`: copies are dropped when
        memory runs short.

    Yields
    ------
    slice or tuple of slice
        Which tile it is, ``buf[slice]``; a tuple where lengths were given.
    ManagedBuffer
        The tile: a view.

    Raises
    ------
    TypeError
        If an argument is of another type.
    ValueError
        If an argument is out of its range, or the buffer has no axis or is closed.
    CudaError
        If the driver refuses, as `ManagedBuffer.prefetch` says.

    Notes
    -----
    Work given to the device's current stream after a tile has come is **ordered after**
    its move, and its way back after that work; both have streams of their own. Asking for
    another tile **blocks**, GIL released, until all but the last two tiles are done with,
    and moved back if they are to be: with `evict`, memory for ``ahead + 3`` tiles is
    enough. The current stream waits for the last ways back when the iterator ends. One
    that is closed or dropped early sends back what was moved in, and does not wait. Tiles
    that are not contiguous move row by row; pages that two tiles share move with both.

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
    # A driver begins a move at once only on a stream that is idle: one for each tile that
    # moves in at a time, waited for before its next one. The way back is behind work, and
    # begins late: another one is under way meanwhile.
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
            del tile  # the user may have closed it
            left.append(send_back(buf[place], _core.current_stream(device).record()))
            if len(left) > _LEAVING:
                left.popleft().synchronize()
        join()
    except GeneratorExit:
        if not buf.closed:
            undo()
    except BaseException:
        with contextlib.suppress(RuntimeError, ValueError):  # one failure is told of
            undo()
        raise
