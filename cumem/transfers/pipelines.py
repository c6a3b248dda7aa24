# SPDX-License-Identifier: Apache-2.0
"""Works on data larger than the GPU piece by piece, while the next pieces are on their way.

`chunks` brings pieces to the device; `pipeline` also calls a function for each piece and
copies the results back. Both use `Ahead` with `_ChunkSource`, which takes pieces from a
source and begins their copies. If the device runs out of memory, `Ahead` first reduces the
number of pieces on their way, and then `_ChunkSource` cuts pieces into smaller ones.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    Self,
    SupportsIndex,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import numpy as np

from cumem import _core
from cumem.base.units import format_nbytes, read_count, read_size
from cumem.buffers.arguments import hinting, read_dtype
from cumem.buffers.casting import check
from cumem.buffers.progress import Parts, Progress
from cumem.devices.device import Device
from cumem.interchange.structures import Untyped
from cumem.pools.memory import get_limit, memory_info
from cumem.transfers.ahead import Ahead, Room, naming, part_label
from cumem.transfers.sources import (
    Item,
    find_memory,
    length_of,
    pieces,
    row_nbytes,
    total_nbytes,
)

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_R = TypeVar("_R")
_T = TypeVar("_T")

#: The least and the largest default size of a chunk. Small chunks overlap better. But each
#: copy of ordinary memory has a fixed cost, so its chunks have a 64th of the data.
_LEAST_CHUNK, _MOST_CHUNK = 64 << 20, 256 << 20


def _available(device: Device) -> int:
    """Return how many bytes new buffers on the device may take, including cached memory."""
    info = memory_info(device)
    free = info.free + info.reserved - info.live
    limit = get_limit("device", device)
    return free if limit is None else max(0, min(free, limit - info.live))


def _share(available: int, fraction: float, count: int) -> int:
    """Return the bytes for each of `count` chunks."""
    return int(available * fraction) // count


@hinting
def chunk_size(
    item_nbytes: SupportsIndex | str,
    available: SupportsIndex | str | None = None,
    copies: SupportsIndex = 3,
    fraction: float = 0.8,
) -> int:
    """Return how many items a chunk may have, so that several chunks fit into memory.

    Parameters
    ----------
    item_nbytes : int or str
        The bytes of one item, such as a row, and of everything that is computed from it; or
        a text such as ``"4 KiB"``.
    available : int or str, optional
        The bytes that are available for chunks. By default these are the free bytes of
        cumem's current device and those in the caches of its pools, within the device's
        limit.
    copies : int
        The number of chunks that exist at the same time. With 3, one is being copied in,
        one is worked on, and one is being copied out.
    fraction : float
        The share of `available` that all chunks together may take, above 0 and at most 1.

    Returns
    -------
    int
        The number of items in a chunk, at least 1.

    Raises
    ------
    TypeError
        If an argument is not a number.
    ValueError
        If an argument is out of range, or not even chunks of one item fit.
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


def _check_takes_chunks(func: Work) -> None:
    """Raise TypeError now if a call with a chunk, its output and a stream cannot work.

    Without this check the call for the first chunk would fail with an error that only
    counts arguments. A callable whose signature is unknown, as for some functions written
    in C, is not checked.
    """
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None, None)
    except TypeError:
        raise TypeError(
            f"func must take three arguments, not {signature}: it is called as "
            "func(x, y, stream), with a chunk, the rows of out for it (or None) and the "
            "stream to work on"
        ) from None


def _chunk_nbytes(memory: Any) -> int:
    """Return the default size of a chunk, which is larger for ordinary memory and files."""
    if isinstance(memory, _core.Buffer) and memory.kind != "pageable":
        return _LEAST_CHUNK
    return min(max(_LEAST_CHUNK, int(memory.nbytes) // 64), _MOST_CHUNK)


class _Size(NamedTuple):
    """The size of a chunk as the user gave it; at most one of the fields is set."""

    nbytes: int | None
    rows: int | None

    @classmethod
    def read(cls, nbytes: Any, rows: Any) -> Self:
        if nbytes is not None and rows is not None:
            raise ValueError("a chunk is given either nbytes= or rows=, not both")
        most = None if nbytes is None else read_size(nbytes, "nbytes", False, None)
        if most == 0:
            raise ValueError("nbytes must be at least 1, not 0")
        return cls(most, None if rows is None else read_count(rows, "rows"))

    def rows_of(
        self, row_nbytes: int, length: int, default_nbytes: Callable[[], int]
    ) -> int:
        """Return the number of rows of a chunk; rows without bytes are all in one chunk."""
        if self.rows is not None:
            return self.rows
        if row_nbytes == 0:
            return max(1, length)
        most = self.nbytes if self.nbytes is not None else default_nbytes()
        return max(1, most // row_nbytes)


class _Chunk:
    """A chunk whose copy has begun: an `InFlightItem` of ahead.py."""

    __slots__ = ("_after", "label", "nbytes", "output", "transfer")

    def __init__(
        self,
        output: tuple[slice[int, int, Any], _core.DeviceBuffer],
        transfer: _core.Transfer,
        label: str,
        after: Callable[[int], _core.Stream],
    ) -> None:
        self.output = output
        self.transfer = transfer
        self.label = label
        self.nbytes = output[1].nbytes
        self._after = after

    def wait_read(self) -> None:
        self.transfer.wait()

    def order_after_copy(self, index: int) -> None:
        self.transfer.order(self._after(index))

    def record_use(self, index: int) -> list[_core.Event]:
        stream = self._after(index)
        self.output[1].record_stream(stream)  # for libraries that do not tell cumem
        return [stream.record()]


class _ChunkSource:
    """Takes the pieces of a source and begins their copies: an `ItemSource` of ahead.py."""

    advice = "nbytes= or rows="

    def __init__(
        self,
        pieces: Iterator[Item],
        device: int,
        stream_of: Callable[[int], _core.Stream],
        dtype: np.dtype[Any] | None,
        casting: _core._Casting,
        function: str,
        available: Callable[[], int] | None = None,
    ) -> None:
        self._pieces = pieces
        self._function = function  # errors begin with its name
        self._available = available  # called once, when the first piece is taken
        self._device = device
        self._stream_of = stream_of
        self._dtype = dtype
        self._rule = None if dtype is None else casting
        # Memory is allocated on a separate stream, so that it need not be ordered after the
        # work on the other streams.
        self._side = _core.Stream(device=device)
        self._item: Item | None = None
        #: The rest of pieces that were cut. The last item is taken next.
        self._rest: list[Item] = []
        #: The most rows of a piece that fit in memory, once that is known.
        self._most_rows: int | None = None
        self.reuses = self.has_more = False

    def take(self) -> bool:
        item = self._rest.pop() if self._rest else next(self._pieces, None)
        self._item = item
        if item is None:
            return False
        self.reuses, self.has_more = not item.is_fresh, item.has_more
        if self._available is not None:
            self._leave_room_for_two(self._available())
            self._available = None
        if self._most_rows is not None and len(item.piece) > self._most_rows:
            self._cut(self._most_rows)
        return True

    def _leave_room_for_two(self, available: int) -> None:
        """Limit pieces to half of the available memory.

        A loop such as ``for part, chunk in chunks(...)`` still holds one chunk while it
        asks for the next.
        """
        assert self._item is not None
        rows = len(self._item.piece)
        if rows > 1 and 2 * self.nbytes > available:
            self._most_rows = max(1, rows * available // (2 * self.nbytes))

    def _cut(self, rows: int) -> None:
        """Keep the first rows of the piece that was taken, and put the others back."""
        assert self._item is not None
        part, piece, is_fresh, has_more = self._item
        middle = part.start + rows
        self._item = Item(slice(part.start, middle), piece[:rows], is_fresh, True)
        self._rest.append(
            Item(slice(middle, part.stop), piece[rows:], is_fresh, has_more)
        )
        self.has_more = True

    @property
    def nbytes(self) -> int:
        assert self._item is not None
        return total_nbytes(self._item.piece, self._dtype)

    @property
    def label(self) -> str:
        if self._item is None:
            return ""
        return part_label(self._item.part)

    def begin(self) -> _Chunk:
        assert self._item is not None
        part, piece, *_ = self._item
        if self._dtype is not None:
            check(f"{self._function}: ", piece.dtype, self._dtype, self._rule)
        buffer = _core.empty_device(
            piece.shape,
            self._dtype or piece.dtype,
            device=self._device,
            stream=self._side,
        )
        transfer = _core.copy_async(buffer, piece, casting=self._rule)
        chunk = _Chunk((part, buffer), transfer, self.label, self._stream_of)
        self._item = None
        return chunk

    def split(self) -> bool:
        if self._item is None or len(self._item.piece) < 2:
            return False
        self._most_rows = len(self._item.piece) // 2
        self._cut(self._most_rows)
        return True

    def close(self) -> None:
        self._item = None
        self._rest.clear()
        close = getattr(self._pieces, "close", None)
        if close is not None:
            close()


@hinting
def chunks(
    src: object,
    nbytes: SupportsIndex | str | None = None,
    device: object = None,
    depth: SupportsIndex = 3,
    *,
    rows: SupportsIndex | None = None,
    dtype: DTypeLike | None = None,
    casting: _core._Casting = "same_kind",
    fresh: bool | None = None,
) -> Ahead[tuple[slice[int, int, Any], _core.DeviceBuffer]]:
    """Bring data to a device chunk by chunk, while the next ones are on their way.

    Parameters
    ----------
    src : Buffer, array, path, binary file or iterable
        Anything with rows along a first axis: an array of any library, including a
        `numpy.memmap` larger than all memory; an array that is read in parts, such as a
        dataset of h5py or an array of zarr, xarray, dask or netCDF4, which is cut by
        ``src[a:b]``; an ``.npy`` file; another file, from its position on, as bytes or as
        elements of `dtype`; or an iterable of arrays, each of which is a chunk.
    nbytes : int or str, optional
        The most bytes of a chunk, such as ``64 << 20`` or ``"64 MiB"``, but a chunk always
        has at least one row. The default is 64 MiB. For ordinary memory and files it is a
        64th of `src` if that is more, up to 256 MiB. The default is smaller if the device
        has too little free memory. Items of an iterable are cut only if `nbytes` or `rows`
        is given.
    device : Device, int or str, optional
        The device. By default it is the current device at the time of this call. For a
        tensor of PyTorch that is PyTorch's current device (see `current_device`).
    depth : int
        The number of copies that may be on their way besides the chunk in use.
    rows : int, optional
        The most rows of a chunk, instead of `nbytes`.
    dtype : dtype_like, optional
        The dtype of the chunks, to which elements are converted before they are copied to
        the device; by default that of `src`. For a file without a header it is also the
        dtype of the elements in the file.
    casting : str
        Which conversions to `dtype` are allowed, as for `copy`.
    fresh : bool, optional
        True says that `src` never changes a piece after it has returned it, so that the
        next piece may be requested while this one is still being read. False says that
        `src` may reuse the memory of a piece. By default cumem decides by the type of
        `src`. If it does not know the type, a piece is copied before the next one is
        requested.

    Returns
    -------
    Ahead
        An iterator for ``for`` and ``async for``, which can be closed. It yields pairs:

        slice
            The rows of the first axis that the chunk has, as in ``src[slice]``.
        DeviceBuffer
            A chunk with the shape of these rows, which belongs to the caller.

    Raises
    ------
    TypeError
        If `src` is none of these, its elements have no fixed size, or `casting` does not
        allow the conversion of its dtype to `dtype`.
    ValueError
        If an argument is out of range, `src` has no axis, a slice of it has another shape
        than its rows, elements are masked, or a file has a format of its own or does not
        hold a whole number of elements.
    OSError
        If a file cannot be read.
    EOFError
        If an ``.npy`` ends early.
    OutOfMemoryError, CudaError
        If the driver refuses. Copies that have begun by then are waited for, and a note of
        the error says which chunk failed. If memory is short, fewer chunks are copied at a
        time, and then chunks get fewer rows. A chunk then takes at most half of the
        available memory, since a loop holds one chunk while it asks for the next. An error
        is raised only if a single row does not fit beside the chunks that the caller keeps.

    Notes
    -----
    Work that is queued on the device's current stream after a chunk was returned is
    **ordered after** the chunk's copy. Asking for another chunk **blocks**, with the GIL
    released, until the current stream has finished the work on the chunk before the last.
    If the caller keeps no chunks, memory for ``depth + 2`` of them is enough. An array in
    memory must not change before its last chunk was returned; a generator may fill the same
    array again and again. An iterator that is closed or dropped early cancels the copies
    that have not begun, and waits for the others.

    Slices of other libraries' arrays are read in a thread, one chunk ahead, so that reading
    and copying overlap. The thread ends with the iterator. Libraries that two threads may
    not call at once, such as netCDF4 and PyTables, are called by the caller's own thread.

    Examples
    --------
    >>> total = 0.0
    >>> for part, chunk in cumem.chunks(numpy.ones(1 << 20), "1 MiB"):
    ...     total += float(chunk.to_numpy().sum())
    >>> total
    1048576.0
    """
    size = _Size.read(nbytes, rows)
    ahead = read_count(depth, "depth")
    unit = _core._device(device, "device", src)
    wanted = None if dtype is None else read_dtype(dtype)
    memory = find_memory(src, wanted)
    step = size.rows
    if memory is not None:
        length = length_of(memory)
        if wanted is not None:
            check("chunks: ", memory.dtype, wanted, casting)
        step = size.rows_of(
            row_nbytes(memory, wanted) if length else 0,
            length,
            lambda: min(
                _chunk_nbytes(memory), _share(_available(unit), 0.8, ahead + 2)
            ),
        )

    def current(_: int) -> _core.Stream:
        return _core.current_stream(unit.index)

    found = pieces(src, memory, step, size.nbytes, fresh)
    source = _ChunkSource(
        found, unit.index, current, wanted, casting, "chunks", lambda: _available(unit)
    )
    return Ahead(source, ahead, 1, Room(unit.index, ahead + 2), "chunks", "chunk")


# -- pipeline: chunks are copied in, worked on, and copied out -------------------------

#: The function of `pipeline`. It is called with an input, an output or None, and a stream.
Work = Callable[[_core.DeviceBuffer, Any, _core.Stream], object]


class _Options(TypedDict, total=False):
    """The keyword-only arguments of `pipeline`."""

    rows: SupportsIndex | None
    device: object
    dtype: DTypeLike | None
    casting: _core._Casting
    fresh: bool | None


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
    """Return the output as an object with a shape whose slices can be written to."""
    found = out if isinstance(out, (_core.Buffer, np.ndarray)) else _core.asbuffer(out)
    readonly = (
        not found.flags.writeable if isinstance(found, np.ndarray) else found.readonly
    )
    if readonly:
        raise ValueError("out is read-only")
    length_of(found, "out")
    return found


# The arguments of `func` and the result depend on whether there is an output. If the type
# of `out` is Any, that is unknown, so the first overload takes this case: the other two
# would promise too much.
@overload
def pipeline(
    func: Work,
    src: object,
    out: Untyped,
    nbytes: SupportsIndex | str | None = ...,
    depth: SupportsIndex = ...,
    streams: object = ...,
    progress: Progress = ...,
    **options: Unpack[_Options],
) -> Any: ...
@overload
def pipeline(
    func: Callable[[_core.DeviceBuffer, None, _core.Stream], _R],
    src: object,
    out: None = ...,
    nbytes: SupportsIndex | str | None = ...,
    depth: SupportsIndex = ...,
    streams: object = ...,
    progress: Progress = ...,
    **options: Unpack[_Options],
) -> list[_R]: ...
@overload
def pipeline(
    func: Callable[[_core.DeviceBuffer, _core.DeviceBuffer, _core.Stream], object],
    src: object,
    out: _T,
    nbytes: SupportsIndex | str | None = ...,
    depth: SupportsIndex = ...,
    streams: object = ...,
    progress: Progress = ...,
    **options: Unpack[_Options],
) -> _T: ...
@hinting
def pipeline(
    func: Work,
    src: object,
    out: Any = None,
    nbytes: SupportsIndex | str | None = None,
    depth: SupportsIndex = 3,
    streams: object = None,
    progress: Progress = False,
    *,
    rows: SupportsIndex | None = None,
    device: object = None,
    dtype: DTypeLike | None = None,
    casting: _core._Casting = "same_kind",
    fresh: bool | None = None,
) -> Any:
    """Work on data chunk by chunk, while other chunks are copied to the device and back.

    Parameters
    ----------
    func : callable
        ``func(x, y, stream)`` queues the work on one chunk. `x` is a `DeviceBuffer` with
        rows of `src`. `y` is a `DeviceBuffer` with as many rows of `out`, and the work must
        write all of them; without `out` it is None. `stream` is the `Stream` for the work.
        During the call it is cumem's current stream, and its device cumem's current device.
    src : Buffer, array, path, binary file or iterable
        As for `chunks`.
    out : Buffer or array, optional
        Memory with as many rows as `src`, of any shape, dtype and library. It may be a
        `numpy.memmap`, or `src` itself. By default there is no output, and what `func`
        returns is collected.
    nbytes : int or str, optional
        The most bytes of `x`, such as ``64 << 20`` or ``"64 MiB"``. The default is that of
        `chunks`, for the larger of `x` and `y`.
    depth : int
        The number of copies that may be on their way in each direction.
    streams : stream, list of streams or int, optional
        The streams on which chunks are worked on in turn; an int makes that many new ones.
        By default it is the device's current stream, which is also that of CuPy and PyTorch
        unless somebody has chosen another.
    progress : bool or callable, optional
        True shows a bar of tqdm after half a second. A callable is called with the bytes of
        `src` whose work is finished, and with the total. For an iterable the total is that
        of the chunks so far.
    rows : int, optional
        The most rows of a chunk, such as `chunk_size` returns, instead of `nbytes`.
    device : Device, int or str, optional
        The device; by default the current one, as for `chunks`.
    dtype, casting : optional
        The conversion of `x` on its way, as for `chunks`.
    fresh : bool, optional
        As for `chunks`.

    Returns
    -------
    Buffer, array or list
        `out`, or without it a list of what `func` returned for each chunk, in order.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If an argument is out of range, or `out` has another number of rows than `src`.
    ImportError
        If `progress` is True and tqdm is not installed.
    OSError
        If a file cannot be read.
    OutOfMemoryError, CudaError
        If the driver refuses.
    Exception
        Any error that `func`, `src` or `progress` raises. If several chunks fail, it is the
        error of the first one. A note of the exception says which chunk failed.

    Notes
    -----
    **Blocks**, with the GIL released, until all work is done. If the work fails or is
    interrupted, the call also waits, so that nothing is running when it returns, and `out`
    has the rows of the earlier chunks. A second Ctrl-C ends that wait. `func` itself need
    not wait for anything: the work that it queues on `stream` begins once `x` has arrived,
    and `y` is copied after that work. Even the largest `src` needs device memory for only
    ``depth + 2`` inputs and ``depth + 1`` outputs, and for one more input with each further
    stream.

    Examples
    --------
    >>> data = numpy.arange(6.0)
    >>> out = numpy.empty(6)
    >>> def work(x, y, stream):  # CuPy and PyTorch have from_dlpack too
    ...     y[...] = x.to_numpy() * 2
    >>> cumem.pipeline(work, data, out, rows=4)
    array([ 0.,  2.,  4.,  6.,  8., 10.])
    >>> cumem.pipeline(lambda x, y, stream: len(x), data, rows=4)
    [4, 2]
    """
    if not callable(func):
        raise TypeError(f"func must be callable, not {type(func).__name__}")
    size = _Size.read(nbytes, rows)
    ahead = read_count(depth, "depth")
    unit = _core._device(device, "device", src)
    lanes = _streams(streams, unit.index)
    wanted = None if dtype is None else read_dtype(dtype)
    memory = find_memory(src, wanted)
    target = None if out is None else _target(out)
    _check_takes_chunks(func)
    step = size.rows
    if memory is not None:
        length = length_of(memory)
        if wanted is not None:
            check("pipeline: ", memory.dtype, wanted, casting)
        if target is not None and len(target) != length:
            raise ValueError(f"out has {len(target)} rows, src has {length}")
        row_in = row_nbytes(memory, wanted) if length else 0
        row_out = row_nbytes(target) if length and target is not None else 0
        counts = (ahead + 1 + len(lanes)) * row_in + (ahead + 1) * row_out

        def default_nbytes() -> int:
            share = _share(_available(unit), 0.8, counts) * max(row_in, row_out)
            return min(share, _chunk_nbytes(memory))

        row = row_in if size.nbytes is not None and row_in > 0 else max(row_in, row_out)
        step = size.rows_of(row, length, default_nbytes)
    source = _ChunkSource(
        pieces(src, memory, step, size.nbytes, fresh),
        unit.index,
        lambda index: lanes[index % len(lanes)],
        wanted,
        casting,
        "pipeline",
    )
    room = Room(unit.index, ahead + 1 + len(lanes))
    found = Ahead(source, ahead, len(lanes), room, "pipeline", "chunk")
    parts = Parts(progress, total_nbytes(memory, wanted), "pipeline")
    run = _Run(func, target, lanes, ahead, parts, memory is None)
    with run, contextlib.closing(found), parts:
        end = 0
        for part, buffer in found:  # enumerate() would keep the last buffer alive
            run.give(part, buffer)
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
    nbytes: int  # the bytes of its source


class _Run:
    """One call of `pipeline`: the work on its chunks and the copies of its results."""

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
        self._room = Room(lanes[0].device.index, depth + 1)
        self._given = 0  # the number of chunks so far
        self._done = 0  # the bytes that are finished
        self.results: list[object] = []

    def give(self, part: slice, buffer: _core.DeviceBuffer) -> None:
        """Queue the work on the next chunk, and the copy of its output."""
        index = self._given
        self._given += 1
        if len(self._leaving) == self._depth:
            self._report(self._finish_first())
        if self._open_ended:
            self._parts.total += buffer.nbytes
        stream = self._lanes[index % len(self._lanes)]
        with naming("chunk", index, part_label(part)), stream.device, stream:
            if self._target is None:
                self.results.append(self._func(buffer, None, stream))
                self._report(buffer.nbytes)
                return
            if part.stop > len(self._target):
                raise ValueError(
                    f"out has {len(self._target)} rows, src has at least {part.stop}"
                )
            into = self._target[part]
            self._room.has(into.nbytes, must=True)
            result = _core.empty_device(
                into.shape, into.dtype, device=stream.device, stream=stream
            )
            self._func(buffer, result, stream)
            transfer = _core.copy_async(into, result, after=stream)
        self._leaving.append(_Leaving(index, part, transfer, buffer.nbytes))

    def _finish_first(self) -> int:
        """Wait for the oldest output, and return the bytes of its source."""
        first = self._leaving[0]
        try:
            with naming("chunk", first.chunk, part_label(first.part)):
                first.transfer.wait()
        finally:
            if first.transfer.done:  # not done if the wait was interrupted
                self._leaving.popleft()
        return first.nbytes

    def _report(self, nbytes: int) -> None:
        self._done += nbytes
        report: Any = self._parts.next(0)
        if report:
            report(self._done, 0)

    def finish(self) -> None:
        """Wait for all work, and raise the first failure."""
        while self._leaving:
            self._report(self._finish_first())
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
        """Wait for the work that a failure has left running.

        If a chunk before the failed one fails too, its error is raised instead.
        """
        if error is None:
            return
        earlier: list[Exception] = []
        while self._leaving:
            try:
                self._finish_first()
            except Exception as failure:
                earlier.append(failure)
        for stream in self._lanes:
            with contextlib.suppress(RuntimeError):
                stream.synchronize()
        if earlier and isinstance(error, Exception):  # Ctrl-C is not replaced
            raise earlier[0]
