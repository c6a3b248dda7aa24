# SPDX-License-Identifier: Apache-2.0
"""Managed memory that is steered: pages moved ahead, advised, asked about, tile by tile."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import mmap
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np

from cumem import _core
from cumem.answers import plain
from cumem.devices import Device
from cumem.errors import warn_caller
from cumem.extension.arguments import hinting, read_flag, read_location, wrong_type
from cumem.units import read_integer, read_size

_Place = Device | str | None
_PREFETCH, _DISCARD, _ADVISE = range(3)  #: of `_core._managed`
_HOST, _NOWHERE = -1, -2  #: as locations; below them NUMA nodes
#: CUDA's numbers: the advice, the one that takes it back, and the attribute.
_READ_MOSTLY, _PREFERRED, _ACCESSED_BY = (1, 2, 1), (3, 4, 2), (5, 6, 3)
_PREFETCHED = 4
_BLOCK = 64 << 10  #: ranges are told apart by that
_MOST_RANGES = 1024
_MOST_PAGES, _RUN_PAGES = 1 << 16, 256  #: that are looked at, and in one piece
_LEAVING = 2  #: tiles that move back at a time
_MANY_TURNS, _WINDOW = 16, 10.0  #: of host and devices, within so many seconds


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


# -- locations -------------------------------------------------------------------------


_EXPECTED = 'a device, "cpu" or "numa:N"'


def _location(value: Any, name: str) -> int:
    if isinstance(value, str):
        return read_location(value, name)
    try:
        return _core._device(value, name).index
    except TypeError:
        if name == "device":
            raise
        expected = 'a device or "cpu"' if name == "accessed_by" else _EXPECTED
        raise wrong_type(name, expected, value) from None


def _place(location: int) -> _Place:
    """As it is shown."""
    if location >= 0:
        return Device(location)
    if location == _NOWHERE:
        return None
    return "host" if location == _HOST else f"numa:{-3 - location}"


def _stream(stream: Any, device: int) -> _core.Stream:
    if stream is None:
        return _core.current_stream(device)
    return _core._wrap_stream(stream, device, False)


def _home(buffer: _core.ManagedBuffer) -> int:
    return buffer.device.index


# -- methods and properties of ManagedBuffer, which the extension calls ----------------


@hinting
def prefetch(
    buffer: _core.ManagedBuffer, /, to: object = None, stream: object = None
) -> None:
    """See `ManagedBuffer.prefetch`."""
    _prefetch((buffer,), to, stream, True)


def _prefetch(
    buffers: tuple[_core.ManagedBuffer, ...], to: object, stream: object, is_turn: bool
) -> None:
    location = _location(to, "to")
    home = location if location >= 0 else _home(buffers[0])
    _core._managed(_PREFETCH, buffers, is_turn, location, stream, home)


def read_advice(buffer: _core.ManagedBuffer, name: str) -> Any:
    """Value of a property."""
    if name == "read_mostly":
        return bool(_ask(buffer, _READ_MOSTLY[2])[0])
    if name == "accessed_by":
        found = _ask(buffer, _ACCESSED_BY[2], _core._driver_device_count() + 1)
        return tuple(_place(each) for each in sorted(found) if each != _NOWHERE)
    attribute = _PREFERRED[2] if name == "preferred_location" else _PREFETCHED
    return _place(_ask(buffer, attribute)[0])


def set_advice(buffer: _core.ManagedBuffer, name: str, value: Any) -> None:
    """Set a property."""
    if value is None and name != "preferred_location":
        expected = "true or false" if name == "read_mostly" else "a sequence of devices"
        raise wrong_type(name, expected, value)
    if value is ...:  # which leaves it as it is, in advise()
        expected = "a device, a text or None"
        raise wrong_type(name, expected, value)
    advise(buffer, **{name: value})


def _ask(
    buffer: _core.ManagedBuffer, attribute: int, count: int = 1
) -> tuple[int, ...]:
    found = _core._managed_ask(buffer, attribute, 0, 2**64 - 1, count)
    return tuple(memoryview(found).cast("i"))


def _accessors(accessed_by: Any) -> list[tuple[int, int]]:
    """Pieces of advice by which exactly those access it."""
    if isinstance(accessed_by, str) or not isinstance(accessed_by, Iterable):
        raise wrong_type("accessed_by", "a sequence of devices", accessed_by)
    wanted = {_location(each, "accessed_by") for each in accessed_by}
    if min(wanted, default=0) < _HOST:
        raise ValueError('accessed_by must hold devices and "cpu", and no NUMA nodes')
    others = {_HOST} | {
        index
        for index in range(_core._driver_device_count())
        if _core._device_attribute(
            index, "concurrent_managed_access"
        )  # else it refuses
    }
    return [
        *((_ACCESSED_BY[1], each) for each in sorted(others - wanted)),
        *((_ACCESSED_BY[0], each) for each in sorted(wanted)),
    ]


@hinting
def advise(
    buffer: _core.ManagedBuffer,
    *,
    read_mostly: bool | None = None,
    preferred_location: object = ...,
    accessed_by: object = None,
) -> None:
    """See `ManagedBuffer.advise`."""
    advice: list[tuple[int, int]] = []
    if read_mostly is not None:
        if not isinstance(read_mostly, (bool, np.bool_)):
            raise wrong_type("read_mostly", "true or false", read_mostly)
        advice.append((_READ_MOSTLY[0 if read_mostly else 1], _HOST))
    if preferred_location is None:
        advice.append((_PREFERRED[1], _HOST))
    elif not isinstance(preferred_location, EllipsisType):
        where = _location(preferred_location, "preferred_location")
        advice.append((_PREFERRED[0], where))
    if accessed_by is not None:
        advice += _accessors(accessed_by)
    for number, where in advice:
        _core._managed(_ADVISE, (buffer,), number, where, None)


@hinting
def discard(buffer: _core.ManagedBuffer, stream: object = None) -> None:
    """See `ManagedBuffer.discard`."""
    _, nbytes = _span(buffer)
    if nbytes != buffer.nbytes:
        raise ValueError(
            "discard() needs a contiguous buffer: what lies between the elements of this "
            "one would be lost"
        )
    where = _stream(stream, _home(buffer))
    if where.handle > 1:
        _core._managed(_DISCARD, (buffer,), 0, _HOST, where)
        return
    side = _core.Stream(device=where.device)  # the driver takes no legacy default
    side.wait(where)
    _core._managed(_DISCARD, (buffer,), 0, _HOST, side)
    where.wait(side)


@hinting
@contextlib.contextmanager
def on(
    buffer: _core.ManagedBuffer, device: object = None, *, stream: object = None
) -> Iterator[_core.ManagedBuffer]:
    """See `ManagedBuffer.on`."""
    location = _location(device, "device")
    home = location if location >= 0 else _home(buffer)
    before = _ask(buffer, _PREFETCHED)[0]
    buffer.prefetch(_place(location), stream)
    try:
        yield buffer
    finally:
        if not buffer.closed:
            back = _place(_HOST if before == _NOWHERE else before)
            buffer.prefetch(back, _stream(stream, home))


# -- where pages are -------------------------------------------------------------------


def _span(buffer: _core.Buffer) -> tuple[int, int]:
    """Address of the lowest element, and bytes to the end of the highest."""
    if buffer.size == 0:
        return buffer.ptr, 0
    ends = [(n - 1) * s for n, s in zip(buffer.shape, buffer.strides, strict=True)]
    below = sum(min(end, 0) for end in ends)
    above = sum(max(end, 0) for end in ends)
    return buffer.ptr + below, above - below + buffer.itemsize


def _sent(
    buffer: _core.ManagedBuffer, address: int, nbytes: int
) -> Iterator[tuple[int, int, _Place]]:
    """Where each range was last sent, halved until that is one place."""
    step = -(-max(nbytes // _MOST_RANGES, 1) // _BLOCK) * _BLOCK
    todo = [(0, nbytes)] if nbytes else []
    while todo:
        begin, end = todo.pop()
        found = _core._managed_ask(buffer, _PREFETCHED, begin, end, 1)
        (where,) = memoryview(found).cast("i")
        middle = -(-(address + (begin + end) // 2) // step) * step - address
        if where != _NOWHERE or not begin < middle < end:
            yield begin, end, _place(where)
        else:
            todo += [(middle, end), (begin, middle)]


def _joined(
    ranges: Iterable[tuple[int, int, _Place]],
) -> tuple[tuple[int, int, _Place], ...]:
    joined: list[tuple[int, int, _Place]] = []
    for begin, end, place in ranges:
        if joined and joined[-1][2] == place:
            joined[-1] = (joined[-1][0], end, place)
        else:
            joined.append((begin, end, place))
    return tuple(joined)


def _on_host(address: int, nbytes: int) -> tuple[int | None, bool]:
    """Bytes on pages that the page table has, and whether only some were looked at."""
    page = mmap.PAGESIZE
    first = address // page
    count = -(-(address + nbytes) // page) - first if nbytes else 0
    runs = [(first, count)]
    if sampled := count > _MOST_PAGES:
        number = _MOST_PAGES // _RUN_PAGES
        last = count - _RUN_PAGES
        runs = [(first + i * last // (number - 1), _RUN_PAGES) for i in range(number)]
    seen = present = 0
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as table:
            for start, length in runs:
                entries = np.frombuffer(
                    os.pread(table.fileno(), 8 * length, 8 * start), "<u8"
                )
                seen += len(entries)
                present += int(np.count_nonzero(entries >> np.uint64(63)))
    except OSError:
        return None, False
    if seen != sum(length for _, length in runs):
        return None, False
    return min(nbytes, present * page * count // max(seen, 1)), sampled


def page_residency(buffer: _core.ManagedBuffer) -> Residency:
    """See `ManagedBuffer.page_residency`."""
    address, nbytes = _span(buffer)
    host_nbytes, sampled = _on_host(address, nbytes)
    return Residency(
        nbytes,
        _joined(_sent(buffer, address, nbytes)),
        host_nbytes,
        sampled,
        buffer.preferred_location,
        buffer.read_mostly,
        buffer.accessed_by,
    )


@dataclasses.dataclass(slots=True)
class _Sides:
    """Who used managed memory last, which of its bytes, and how often that changed."""

    low: int
    high: int
    on_device: bool
    turns: int = 0
    since: float = 0.0  #: seconds, of the first change
    has_warned: bool = False


#: By the buffer that others are views of.
_sides: weakref.WeakKeyDictionary[_core.Buffer, _Sides] = weakref.WeakKeyDictionary()


def note_side(buffer: _core.Buffer, low: int, high: int, on_device: bool) -> None:
    """By the extension: the host, or a device, is about to use these bytes of the memory
    of `buffer`. Warns where both keep doing so in turn, once, and not where the user has
    steered it.
    """
    root = buffer if buffer.base is None else buffer.base
    sides = _sides.setdefault(root, _Sides(low, high, on_device))
    is_same = low < sides.high and sides.low < high
    if is_same and sides.on_device == on_device:
        return
    now = time.monotonic()
    if not is_same or now - sides.since > _WINDOW:
        sides.turns, sides.since = 0, now
    sides.turns += is_same
    sides.low, sides.high, sides.on_device = low, high, on_device
    if sides.turns != _MANY_TURNS or sides.has_warned:
        return
    sides.has_warned = True
    managed = buffer if isinstance(buffer, _core.ManagedBuffer) else root
    if isinstance(managed, _core.ManagedBuffer) and (
        managed.read_mostly or managed.preferred_location is not None
    ):
        return
    warn_caller(
        f"host and device keep taking {buffer!r} from each other: the side that used it "
        "changed 16 times within ten seconds, and each time its pages have to move. If it "
        "is mostly read, set `buf.read_mostly = True`; if one side should keep it, "
        "`buf.preferred_location` and `buf.accessed_by`; else do more on one side "
        "before the other has its turn, or go through it by `cumem.tiles`",
        ManagedThrashWarning,
    )


# -- many buffers, and tiles -----------------------------------------------------------


@hinting
def prefetch_many(
    buffers: Iterable[_core.ManagedBuffer],
    to: object = None,
    stream: object = None,
) -> None:
    """Move the pages of many buffers to a device or to the host ahead of use.

    Parameters
    ----------
    buffers : iterable of ManagedBuffer
        Slices of one buffer too.
    to : Device, int or str, optional
        As for `ManagedBuffer.prefetch`; default: cumem's current device.
    stream : Stream or other stream object, optional
        Default: the current stream of that device, for the host that of the first
        buffer's.

    Raises
    ------
    TypeError
        If one of them is no `ManagedBuffer`, or `to` or `stream` is of another type.
    ValueError
        If there is no such device, or a buffer is closed.
    CudaError
        If the driver refuses, as `ManagedBuffer.prefetch` says. Some may be moving by then.

    Notes
    -----
    Never **blocks**: the moves are queued. **Ordered after** work on `stream`, in any order
    among themselves. From CUDA 13.0 on it is one call of the driver, but on the legacy
    default stream; else one for each buffer.

    Examples
    --------
    >>> buffers = [cumem.empty_managed(1 << 20, "u1") for _ in range(3)]
    >>> cumem.prefetch_many(buffers, 0)
    >>> buffers[2].prefetch_location
    <cumem.Device 0, emulated>
    """
    every = tuple(buffers)
    for each in every:
        if not isinstance(each, _core.ManagedBuffer):
            raise wrong_type("buffers", "ManagedBuffers", each)
    if every:
        _prefetch(every, to, stream, False)
    else:
        _location(to, "to")


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


def _rows(tile: _core.ManagedBuffer) -> tuple[_core.ManagedBuffer, ...]:
    """The parts of a tile that have nothing of others between them."""
    if _span(tile)[1] == tile.nbytes or tile.ndim < 2:
        return (tile,)
    return tuple(itertools.chain.from_iterable(map(_rows, tile)))


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
    location = _location(device, "device")
    if location < 0:
        raise ValueError(f"device must be a device, not {device!r}")
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
    return _tiles(buf, places, _is_shape(nbytes_or_shape), location, count, goes_back)


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
            _core._managed(_PREFETCH, _rows(tile), 0, device, stream)
            coming.append((place, tile, stream.record()))

    def send_back(tile: _core.ManagedBuffer, after: _core.Event) -> _core.Event:
        if not evict:
            return after
        stream = outward[0]
        outward.rotate()
        stream.wait(after)
        _core._managed(_PREFETCH, _rows(tile), 0, _HOST, stream)
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
