# SPDX-License-Identifier: Apache-2.0
"""Data larger than the GPU, piece by piece, the next pieces already on their way."""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from cumem import _core
from cumem.devices import Device, choose_device
from cumem.extension.arguments import read_dtype
from cumem.files import open_regular, unwrapped
from cumem.memory import get_limit, memory_info
from cumem.progress import Parts, Progress
from cumem.units import format_nbytes, read_count, read_size

#: Bytes of a chunk where nobody says: few, for many chunks overlap better. A copy of
#: ordinary memory has a fixed cost, which a long one hides: a 64th of it, up to many.
_LEAST_CHUNK, _MOST_CHUNK = 64 << 20, 256 << 20


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
    count = read_count(copies, "copies")
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


def _chunk_nbytes(memory: Any) -> int:
    locked = isinstance(memory, _core.Buffer) and memory.kind != "pageable"
    return (
        _LEAST_CHUNK
        if locked
        else min(max(_LEAST_CHUNK, int(memory.nbytes) // 64), _MOST_CHUNK)
    )


def _nbytes(memory: Any, dtype: np.dtype[Any] | None) -> int:
    """Once it is of the dtype; None: its own. Of what is no memory nobody knows."""
    if memory is None or dtype is None:
        return 0 if memory is None else int(memory.nbytes)
    return int(memory.size) * dtype.itemsize


def _row_nbytes(memory: Any, dtype: np.dtype[Any] | None = None) -> int:
    return _nbytes(memory, dtype) // len(memory)


def _rows(memory: Any, nbytes: int, dtype: np.dtype[Any] | None) -> int:
    """Of a chunk: at least one."""
    return max(1, nbytes // max(1, _row_nbytes(memory, dtype)))


def _open(file: Any) -> Any:
    """What is left of a file, mapped."""
    plain = unwrapped(file)
    size = os.fstat(plain.fileno()).st_size
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
    return _array(src)


def _array(src: Any) -> Any:
    try:
        return src if isinstance(src, np.ndarray) else _core.asbuffer(src)
    except TypeError:
        return None


def _length(memory: Any, name: str = "src") -> int:
    if not memory.shape:
        raise ValueError(f"{name} has no axis to cut: its shape is ()")
    return len(memory)


def _cut(memory: Any, rows: int) -> Iterator[tuple[slice, Any]]:
    count = len(memory)
    for begin in range(0, count, rows):
        part = slice(begin, min(begin + rows, count))
        yield part, memory[part]


def _pieces(src: object, memory: Any, rows: int) -> Iterator[tuple[slice, Any]]:
    if memory is not None:
        return _cut(memory, rows)
    if isinstance(src, Iterable) and not isinstance(src, (Mapping, io.TextIOBase)):
        return _in_turn(src)
    raise TypeError(
        "src must be an array, a file or an iterable of arrays, not "
        f"{type(src).__name__}"
    )


def _in_turn(arrays: Iterable[Any]) -> Iterator[tuple[slice, Any]]:
    begin = 0
    for each in arrays:
        if isinstance(each, (str, os.PathLike)) or hasattr(each, "readinto"):
            raise TypeError(f"src must give arrays, not {type(each).__name__}")
        memory = _array(each)
        memory = np.asarray(each) if memory is None else memory
        end = begin + _length(memory, "an item of src")
        yield slice(begin, end), memory
        begin = end


def chunks(
    src: object,
    nbytes: SupportsIndex | str | None = None,
    device: object = None,
    depth: SupportsIndex = 3,
    *,
    dtype: DTypeLike | None = None,
    casting: _core._Casting = "same_kind",
) -> Generator[tuple[slice, _core.DeviceBuffer]]:
    """Bring data to a device chunk by chunk, the next ones already on their way.

    Parameters
    ----------
    src : Buffer, array, path, binary file or iterable
        An array of any library, cut along its first axis, also a `numpy.memmap` larger
        than all memory; a file, as bytes from where it stands; or an iterable of
        arrays, each of which is a chunk.
    nbytes : int or str, optional
        Most bytes of a chunk, which has one row in any case; default: 64 MiB, of
        ordinary memory a 64th of `src` if that is more, up to 256 MiB, and less where
        that is not free. What an iterable gives is never cut.
    device : Device, int or str, optional
        Default: the current one as this is called, of PyTorch for a tensor of its
        (see `current_device`).
    depth : int
        Copies that may be under way beside the chunk in hand.
    dtype : dtype_like, optional
        Of the chunks, which the link carries; default: that of `src`.
    casting : str
        What may be converted to it, as in `copy`.

    Yields
    ------
    slice
        What of the first axis it is: ``src[slice]``.
    DeviceBuffer
        A chunk of that shape; it is the caller's.

    Raises
    ------
    TypeError
        If `src` is none of these, or `casting` does not allow its dtype to become
        `dtype`.
    ValueError
        If an argument is out of its range or `src` has no axis.
    OSError
        If a file cannot be read.
    OutOfMemoryError, CudaError
        If the driver refuses. What was on its way by then is waited for. The error has a
        note of the chunk that it is about.

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
    ahead = read_count(depth, "depth")
    unit = choose_device(device, src)
    memory = _memory(src)
    rows = 1
    wanted = None if dtype is None else read_dtype(dtype)
    if memory is not None and _length(memory):
        if most is None:
            share = _share(_available(unit), 0.8, ahead + 2)
            most = min(_chunk_nbytes(memory), share)
        rows = _rows(memory, most, wanted)

    def current(_: int) -> _core.Stream:
        return _core.current_stream(unit.index)

    pieces = _pieces(src, memory, rows)
    return _chunks(pieces, unit.index, ahead, 1, current, wanted, casting)


def _note(error: BaseException, index: int, part: slice | None) -> None:
    rows = "" if part is None else f", src[{part.start}:{part.stop}]"
    error.add_note(f"in chunk {index}{rows}")


@contextlib.contextmanager
def _naming(index: int, part: slice) -> Iterator[None]:
    """An exception says which chunk it is about."""
    try:
        yield
    except Exception as error:
        _note(error, index, part)
        raise


def _chunks(
    pieces: Iterator[tuple[slice, Any]],
    device: int,
    depth: int,
    unfinished: int,
    stream_of: Callable[[int], _core.Stream],
    dtype: np.dtype[Any] | None,
    casting: _core._Casting,
) -> Generator[tuple[slice, _core.DeviceBuffer]]:
    """Another comes once the work on all but so many is finished."""
    rule = None if dtype is None else casting
    side = _core.Stream(device=device)  # memory is not taken in the order of the work
    coming: collections.deque[tuple[slice, _core.DeviceBuffer, _core.Transfer]]
    coming = collections.deque()
    used: collections.deque[tuple[int, slice, _core.Event]] = collections.deque()
    failures: list[Exception] = []
    index = 0

    def start(count: int) -> None:
        part = None
        try:
            for part, piece in itertools.islice(pieces, 0 if failures else count):
                buffer = _core.empty_device(
                    piece.shape, dtype or piece.dtype, device=device, stream=side
                )
                transfer = _core.copy_async(buffer, piece, casting=rule)
                coming.append((part, buffer, transfer))
                part = None
        except Exception as error:
            _note(error, index + len(coming), part)
            failures.append(error)  # told after the chunks before it

    try:
        start(depth)
        while coming:
            start(1)
            part, buffer, transfer = coming.popleft()
            with _naming(index, part):
                transfer.order(stream_of(index))
            try:
                yield part, buffer
            finally:  # for what works on it without telling
                buffer.record_stream(stream_of(index))
            del buffer, transfer
            used.append((index, part, stream_of(index).record()))
            index += 1
            if len(used) > unfinished:
                earlier, part, event = used.popleft()
                with _naming(earlier, part):
                    event.synchronize()
        if failures:
            raise failures[0]
    finally:
        failures.clear()
        for *_, transfer in coming:
            transfer.cancel()
        for *_, transfer in coming:
            with contextlib.suppress(OSError, RuntimeError):
                transfer.wait()


# -- in, work, out ---------------------------------------------------------------------

#: What `pipeline` calls for each chunk: its input, its output or None, and the stream.
Work = Callable[[_core.DeviceBuffer, _core.DeviceBuffer | None, _core.Stream], object]


def _streams(streams: Any, device: int) -> list[_core.Stream]:
    if streams is None:
        return [_core.current_stream(device)]
    if isinstance(streams, SupportsIndex):
        count = read_count(streams, "streams")
        return [_core.Stream(device=device) for _ in range(count)]
    given = list(streams) if isinstance(streams, (list, tuple)) else [streams]
    if not given:
        raise ValueError("streams must not be empty")
    return [_core.Stream.from_external(each, device=device) for each in given]


def _target(out: Any) -> Any:
    """What has a shape and slices to write to."""
    found = out if isinstance(out, (_core.Buffer, np.ndarray)) else _core.asbuffer(out)
    readonly = (
        not found.flags.writeable if isinstance(found, np.ndarray) else found.readonly
    )
    if readonly:
        raise ValueError("out is read-only")
    _length(found, "out")
    return found


def _rows_of_both(
    memory: Any,
    target: Any,
    chunk: Any,
    device: Device,
    counts: tuple[int, int],
    dtype: np.dtype[Any] | None,
) -> int:
    """Of a chunk, where so many inputs and outputs are there at the same time."""
    if not isinstance(chunk, str) and chunk is not None:
        return read_count(chunk, "chunk")
    if chunk is not None:
        most = read_size(chunk, "chunk", False, None)
        if most == 0:
            raise ValueError("chunk must be at least 1 byte, not 0")
        return _rows(memory, most, dtype)
    row_in = max(1, _row_nbytes(memory, dtype))
    row_out = 0 if target is None else _row_nbytes(target)
    share = _share(_available(device), 0.8, counts[0] * row_in + counts[1] * row_out)
    return max(1, min(share, _chunk_nbytes(memory) // max(row_in, row_out)))


def pipeline(
    func: Work,
    src: object,
    out: object = None,
    chunk: SupportsIndex | str | None = None,
    depth: SupportsIndex = 3,
    streams: object = None,
    progress: Progress = False,
    *,
    device: object = None,
    dtype: DTypeLike | None = None,
    casting: _core._Casting = "same_kind",
) -> Any:
    """Work on data chunk by chunk, while the next chunks come and the last ones leave.

    Parameters
    ----------
    func : callable
        ``func(x, y, stream)`` queues the work on one chunk: `x` is a `DeviceBuffer` with
        rows of `src`, `y` one of as many rows of `out`, to be written in full, or None,
        and `stream` the `Stream` for it. During the call it is cumem's current stream,
        and its device cumem's current device.
    src : Buffer, array, path, binary file or iterable
        As for `chunks`.
    out : Buffer or array, optional
        As many rows as `src` has, of any shape and dtype: of any library, also a
        `numpy.memmap`, and also `src` itself. Default: there is no output, and what
        `func` returns is kept.
    chunk : int or str, optional
        Most rows of a chunk, as `chunk_size` gives them, or with a unit its most bytes,
        such as ``"64 MiB"``; default: as for `chunks`, of the larger of `x` and `y`.
        What an iterable gives is never cut.
    depth : int
        Copies that may be under way in each direction.
    streams : stream, list of streams or int, optional
        Where the chunks are worked on, in turns; an int makes so many new ones. Default:
        the device's current stream, which is also that of CuPy and PyTorch where nobody
        has chosen another.
    progress : bool or callable, optional
        True shows a bar of tqdm after half a second, a callable is called with bytes
        that have come to the device and are done, and bytes in all; of an iterable
        these are the ones that have come.
    device : Device, int or str, optional
        Default: the current one, as for `chunks`.
    dtype, casting : optional
        As for `chunks`: what `x` is converted to on its way.

    Returns
    -------
    Buffer, array or list
        `out`; without it what `func` returned for each chunk, in order.

    Raises
    ------
    TypeError
        If an argument is of a type that is not taken.
    ValueError
        If an argument is out of its range, or `out` has another number of rows.
    ImportError
        If `progress` is True and there is no tqdm.
    OSError
        If a file cannot be read.
    OutOfMemoryError, CudaError
        If the driver refuses.
    Exception
        What `func`, `src` or `progress` raises. Of several failures it is the one of the
        first chunk. A note of the exception says which chunk it was.

    Notes
    -----
    **Blocks**, GIL released, until all work is done, also where it fails or is
    interrupted: then nothing is in flight any more, and the rows of the chunks before
    are in `out`; a second Ctrl-C ends that wait. `func` itself need not wait for
    anything: `x` comes before what it queues on `stream`, and `y` leaves after it.
    Device memory for ``depth + 2`` inputs and ``depth + 1`` outputs is enough, whatever
    the size of `src`; each further stream adds an input.

    Examples
    --------
    >>> data = numpy.arange(6.0)
    >>> out = numpy.empty(6)
    >>> def work(x, y, stream):  # CuPy and PyTorch have from_dlpack too
    ...     y[...] = x.to_numpy() * 2
    >>> cumem.pipeline(work, data, out, chunk=4)
    array([ 0.,  2.,  4.,  6.,  8., 10.])
    >>> cumem.pipeline(lambda x, y, stream: len(x), data, chunk=4)
    [4, 2]
    """
    if not callable(func):
        raise TypeError(f"func must be callable, not {type(func).__name__}")
    ahead = read_count(depth, "depth")
    unit = choose_device(device, src)
    lanes = _streams(streams, unit.index)
    memory = _memory(src)
    target = None if out is None else _target(out)
    wanted = None if dtype is None else read_dtype(dtype)
    rows = 1
    if memory is not None:
        if target is not None and len(target) != _length(memory):
            raise ValueError(f"out has {len(target)} rows, src has {len(memory)}")
        if _length(memory):
            counts = (ahead + 1 + len(lanes), ahead + 1)
            rows = _rows_of_both(memory, target, chunk, unit, counts, wanted)
    found = _chunks(
        _pieces(src, memory, rows),
        unit.index,
        ahead,
        len(lanes),
        lambda index: lanes[index % len(lanes)],
        wanted,
        casting,
    )
    parts = Parts(progress, _nbytes(memory, wanted), "pipeline")
    run = _Run(func, target, lanes, ahead, parts, memory is None)
    with run, contextlib.closing(found), parts:
        end = 0
        for index, (part, buffer) in enumerate(found):
            run.give(index, part, buffer)
            end = part.stop
            del buffer
        run.finish()
        if target is not None and end < len(target):
            raise ValueError(f"out has {len(target)} rows, src had {end}")
    return run.results if target is None else out


class _Leaving(NamedTuple):
    chunk: int
    part: slice
    transfer: _core.Transfer
    nbytes: int  # of its source


class _Run:
    """One pipeline: what works on the chunks that come, and what leaves."""

    def __init__(
        self,
        func: Work,
        target: Any,
        lanes: Sequence[_core.Stream],
        depth: int,
        parts: Parts,
        open_ended: bool,
    ) -> None:
        self._func = func
        self._target = target
        self._lanes = lanes
        self._depth = depth
        self._parts = parts
        self._open_ended = open_ended
        self._leaving: collections.deque[_Leaving] = collections.deque()
        self._done = 0
        self.results: list[object] = []

    def give(self, index: int, part: slice, buffer: _core.DeviceBuffer) -> None:
        """Have the work on a chunk queued, and its output."""
        if len(self._leaving) == self._depth:
            self._tell(self._settle_first())
        if self._open_ended:
            self._parts.total += buffer.nbytes
        stream = self._lanes[index % len(self._lanes)]
        with _naming(index, part), stream.device, stream:
            if self._target is None:
                self.results.append(self._func(buffer, None, stream))
                self._tell(buffer.nbytes)
                return
            if part.stop > len(self._target):
                raise ValueError(
                    f"out has {len(self._target)} rows, src has at least {part.stop}"
                )
            into = self._target[part]
            result = _core.empty_device(
                into.shape, into.dtype, device=stream.device, stream=stream
            )
            self._func(buffer, result, stream)
            transfer = _core.copy_async(into, result, after=stream)
        self._leaving.append(_Leaving(index, part, transfer, buffer.nbytes))

    def _settle_first(self) -> int:
        """Wait for the first output: bytes of its source."""
        first = self._leaving[0]
        try:
            with _naming(first.chunk, first.part):
                first.transfer.wait()
        finally:
            if first.transfer.done:  # not if that was interrupted
                self._leaving.popleft()
        return first.nbytes

    def _tell(self, nbytes: int) -> None:
        self._done += nbytes
        tell: Any = self._parts.next(0)
        if tell:
            tell(self._done, 0)

    def finish(self) -> None:
        """Wait for all work; raises the first failure."""
        while self._leaving:
            self._tell(self._settle_first())
        for stream in self._lanes:
            stream.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what a failure has left. That of a chunk before is told in place of
        one of a later chunk."""
        if error is None:
            return
        earlier: list[Exception] = []
        while self._leaving:
            try:
                self._settle_first()
            except Exception as failure:
                earlier.append(failure)
        for stream in self._lanes:
            with contextlib.suppress(RuntimeError):
                stream.synchronize()
        if earlier and isinstance(error, Exception):  # not in place of Ctrl-C
            raise earlier[0]
