# SPDX-License-Identifier: Apache-2.0
"""Makes four arrays of the allocations that cumem, RMM or PyTorch recorded in a file.

It reads three formats: the arrays of one of cumem's records in an ``.npz``, the CSV log of
RMM's ``logging_resource_adaptor``, and the pickle of PyTorch's
``torch.cuda.memory._snapshot()``. Reading a file never runs code from it: arrays of objects
are refused, and so is a pickle with anything but plain containers, strings and numbers.
"""

from __future__ import annotations

import csv
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cumem.base.units import format_nbytes
from cumem.files.opening import open_regular
from cumem.recording.events import KINDS
from cumem.tools.replay.npz import read_arrays

__all__ = ["Hold", "Trace", "load_trace", "make_trace", "parse_late"]

ARRAYS: Final = ("op", "block", "size", "stream")
LARGEST: Final = 1 << 47  # addresses have no more bits
MOST_STREAMS: Final = 1024
_CSV_COLUMNS: Final = ["thread", "time", "action", "pointer", "size", "stream"]

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a freed block stays in use because work on it has not ended.

    Events are counted in windows of `step` events. Blocks that are freed in one window are
    released at the beginning of the `windows`-th window after it.

    Parameters
    ----------
    events : int
        Each block is held for at least this many events, and at most a quarter more.
    """

    events: int

    @property
    def step(self) -> int:
        """The number of events in a window."""
        return max(1, self.events // 4)

    @property
    def windows(self) -> int:
        """The number of windows that a block is held for."""
        return -(-(self.events - 1) // self.step) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A validated sequence of allocations and frees.

    Parameters
    ----------
    name : str
        The name of the file.
    op : ndarray of int64
        1 for an allocation, 0 for a free.
    block : ndarray of int64
        The number of the allocation that a row makes or frees.
    size : ndarray of int64
        The bytes asked for, in rows of frees too.
    stream : ndarray of int64
        The index of the stream that an allocation is made on, from 0 without gaps.
    skipped : int
        The number of rows in the file that are left out: failed allocations, and frees of
        memory that was allocated before the recording began.
    """

    name: str
    op: _Ints
    block: _Ints
    size: _Ints
    stream: _Ints
    skipped: int = 0

    @property
    def events(self) -> int:
        """The number of rows."""
        return len(self.op)

    @property
    def allocations(self) -> int:
        """The number of rows that allocate."""
        return int(self.op.sum())

    @property
    def stream_count(self) -> int:
        """The number of streams."""
        return int(np.max(self.stream)) + 1

    @property
    def peak_live(self) -> int:
        """The largest number of requested bytes that are live at the same time."""
        return int(np.cumsum(np.where(self.op == 1, self.size, -self.size)).max())

    def peak_busy(self, hold: Hold) -> int:
        """Return the most bytes that are live or held at once.

        An allocator that does not reuse memory before the work on it has ended needs at
        least this many bytes.
        """
        frees = np.flatnonzero(self.op == 0)
        change = np.where(self.op == 1, self.size, 0)
        released = (frees // hold.step + hold.windows) * hold.step
        seen = released < self.events
        np.subtract.at(change, released[seen], self.size[frees[seen]])
        return int(np.cumsum(change).max())

    def rows(self, streams: Sequence[object]) -> list[tuple[int, int, int, Any]]:
        """Return the rows as tuples for a plain loop.

        Each tuple has the stream's object in `streams` instead of the stream's index.
        """
        chosen = [streams[index] for index in self.stream.tolist()]
        columns = (self.op.tolist(), self.block.tolist(), self.size.tolist(), chosen)
        return list(zip(*columns, strict=True))


def parse_late(text: str, events: int) -> Hold:
    """Read how long freed blocks are held: a number of events, or a fraction of all.

    Parameters
    ----------
    text : str
        ``"500"`` for 500 events, ``"0.01"`` for a hundredth of all. A number larger than
        the number of events means all.
    events : int
        The number of events in the trace.

    Returns
    -------
    Hold

    Raises
    ------
    ValueError
        If `text` is neither a whole number from 1 on nor a fraction above 0 and up to 1.
    """
    wrong = f"expected a number of events or a fraction such as 0.01, not {text!r}"
    try:
        value = float(text)
    except ValueError:
        raise ValueError(wrong) from None
    if text.strip().isdecimal() and value >= 1:
        return Hold(int(min(value, events)))
    if "." in text and 0 < value <= 1:
        return Hold(max(1, round(value * events)))
    raise ValueError(wrong)


def load_trace(
    path: str | Path, device: int | None = None, kind: str | None = None
) -> Trace:
    """Read a trace in the format that its first bytes show.

    Parameters
    ----------
    path : str or Path
        The file to read.
    device : int, optional
        The device whose trace is taken from a PyTorch snapshot; needed if several devices
        have events.
    kind : str, optional
        The kind of memory whose rows are taken from a record of cumem; by default all rows
        are taken.

    Returns
    -------
    Trace

    Raises
    ------
    ValueError
        If the file has none of the formats or its events make no sense; the message names
        the row.
    OSError
        If the file cannot be read.
    """
    path = Path(path)
    with open_regular(path) as file:
        start = file.read(64)
    if start.startswith(b"PK"):
        return _load_npz(path, kind)
    if start.startswith(b"\x80"):
        return _load_snapshot(path, device)
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(b"thread"):
        return _load_csv(path)
    raise ValueError(
        f"{path}: neither an .npz with the arrays {', '.join(ARRAYS)}, nor a CSV log of "
        "RMM, nor a PyTorch snapshot pickle"
    )


def make_trace(
    name: str,
    op: object,
    block: object,
    size: object,
    stream: object,
    *,
    skipped: int = 0,
    where: Callable[[int], str] = "row {}".format,
) -> Trace:
    """Validate four parallel arrays and make a trace of them.

    Parameters
    ----------
    name : str
        The name of the file, for messages.
    op, block, size, stream : array_like of int, shape (n,)
        See `Trace`; the size of a free may be 0 or that of the block.
    skipped : int
        The number of rows that were left out before.
    where : callable
        A function from an index to the words that messages use for the row.

    Returns
    -------
    Trace

    Raises
    ------
    ValueError
        If lengths, dtypes or values are wrong: an unknown operation, a negative size, a
        block that is freed twice, freed but never allocated, or allocated while it is
        live; or if a size, or the sum of the sizes that are live at once, is larger than an
        address space.
    """
    given = zip(ARRAYS, (op, block, size, stream), strict=True)
    arrays = {key: _integers(name, key, value, where) for key, value in given}
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        text = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise ValueError(f"{name}: the arrays differ in length: {text}")
    _check_values(name, arrays, where)
    sizes = _check_order(name, arrays, where)
    if not (arrays["op"] * sizes).any():
        raise ValueError(f"{name}: no row allocates anything")
    change = np.where(arrays["op"] == 1, sizes, -sizes)
    peak = int(np.max(np.cumsum(change, dtype=np.float64)))  # may exceed 63 bits
    if peak > LARGEST:
        raise ValueError(
            f"{name}: {format_nbytes(peak)} live at once, more than an address space holds"
        )
    known, streams = np.unique(arrays["stream"], return_inverse=True)
    if len(known) > MOST_STREAMS:
        raise ValueError(f"{name}: {len(known)} streams; at most {MOST_STREAMS} work")
    return Trace(
        name, arrays["op"], arrays["block"], sizes, streams.astype(np.int64), skipped
    )


# -- validation ------------------------------------------------------------------------


def _integers(name: str, key: str, value: object, where: Callable[[int], str]) -> _Ints:
    array: NDArray[Any] = np.asarray(value)
    if array.size == 0 and array.ndim == 1:
        raise ValueError(f"{name}: {key} is empty")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: {key} is {array.dtype} of shape {array.shape}; expected integers "
            "of shape (n,)"
        )
    wide = array > np.iinfo(np.int64).max if array.dtype == np.uint64 else None
    if wide is not None and wide.any():
        row = int(np.argmax(wide))
        raise ValueError(f"{name}, {where(row)}: {key} {array[row]} is too large")
    return array.astype(np.int64)


def _check_values(
    name: str, arrays: dict[str, _Ints], where: Callable[[int], str]
) -> None:
    op, size = arrays["op"], arrays["size"]
    for bad, key, text in (
        ((op != 0) & (op != 1), "op", "is neither 1 (allocate) nor 0 (free)"),
        (size < 0, "size", "is negative"),
        (size > LARGEST, "size", "is more than an address space holds"),
    ):
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(f"{name}, {where(row)}: {key} {arrays[key][row]} {text}")


def _check_order(
    name: str, arrays: dict[str, _Ints], where: Callable[[int], str]
) -> _Ints:
    """Check the order of each block's rows; return the sizes, also for frees."""
    live: dict[int, int] = {}
    ended: dict[int, int] = {}
    sizes = arrays["size"].tolist()
    pairs = zip(arrays["op"].tolist(), arrays["block"].tolist(), strict=True)
    for row, (op, block) in enumerate(pairs):
        if op:
            if block in live:
                first = where(live[block])
                raise ValueError(
                    f"{name}, {where(row)}: block {block} is live since {first}"
                )
            live[block] = row
            continue
        start = live.pop(block, None)
        if start is None:
            before = ended.get(block)
            what = (
                "was never allocated"
                if before is None
                else f"was freed before, in {where(before)}"
            )
            raise ValueError(f"{name}, {where(row)}: block {block} {what}")
        if sizes[row] not in (0, sizes[start]):
            raise ValueError(
                f"{name}, {where(row)}: frees {sizes[row]} bytes of block {block}, which "
                f"has {sizes[start]}"
            )
        ended[block] = row
        sizes[row] = sizes[start]
    return np.array(sizes, np.int64)


# -- formats ---------------------------------------------------------------------------


def _load_npz(path: Path, kind: str | None) -> Trace:
    *columns, kinds = [*read_arrays(path, ARRAYS, ("kind",)), None][: len(ARRAYS) + 1]
    if kinds is not None and kind is not None:  # the file is a record of cumem
        chosen = kinds == KINDS.index(kind)
        if not chosen.any():
            there = ", ".join(KINDS[i] for i in np.unique(kinds))
            raise ValueError(
                f"{path.name}: no {kind} memory in it; there is {there}: choose by --kind"
            )
        columns = [column[chosen] for column in columns if column is not None]
    return make_trace(path.name, *columns)


@dataclass(slots=True)
class _Columns:
    """Collects events from a file.

    Allocations are numbered from 0, and each address is replaced by the number of the
    allocation that returned it.
    """

    name: str
    word: str
    op: list[int]
    block: list[int]
    size: list[int]
    stream: list[int]
    places: list[int]
    live: dict[int, int]
    streams: dict[object, int]
    count: int = 0
    skipped: int = 0

    @classmethod
    def empty(cls, name: str, word: str) -> _Columns:
        """Make an object without events; `word` is what errors call a place in the file."""
        return cls(name, word, [], [], [], [], [], {}, {})

    def fail(self, place: int, text: str) -> ValueError:
        """Make the error for a place in the file."""
        return ValueError(f"{self.name}, {self.word} {place}: {text}")

    def allocate(self, place: int, address: int, size: int, stream: object) -> None:
        """Add an allocation."""
        if address in self.live:
            raise self.fail(place, f"allocates {address:#x}, which is live already")
        self.live[address] = self.count
        self._add(place, 1, self.count, size, stream)
        self.count += 1

    def free(self, place: int, address: int, size: int, stream: object) -> None:
        """Add a free of an address that is live."""
        self._add(place, 0, self.live.pop(address), size, stream)

    def _add(self, place: int, op: int, block: int, size: int, stream: object) -> None:
        if not 0 <= size <= LARGEST:
            raise self.fail(place, f"size {size} is not that of a piece of memory")
        self.op.append(op)
        self.block.append(block)
        self.size.append(size)
        self.stream.append(self.streams.setdefault(stream, len(self.streams)))
        self.places.append(place)

    def trace(self) -> Trace:
        """Make a trace of the events that were added."""
        if not self.op:
            raise ValueError(f"{self.name}: holds no events")
        return make_trace(
            self.name,
            np.array(self.op, np.int64),
            np.array(self.block, np.int64),
            np.array(self.size, np.int64),
            np.array(self.stream, np.int64),
            skipped=self.skipped,
            where=lambda row: f"{self.word} {self.places[row]}",
        )


def _load_csv(path: Path) -> Trace:
    """Read the log that RMM's logging_resource_adaptor writes.

    Addresses are hexadecimal, with or without ``0x``; null is ``(nil)`` or 0.
    """
    columns = _Columns.empty(path.name, "line")
    try:
        text = path.read_text(encoding="utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = [cell.strip().lower() for cell in next(reader)]
        if header != _CSV_COLUMNS:
            raise ValueError(
                "line 1: expected the header Thread,Time,Action,Pointer,Size,Stream"
            )
        for cells in reader:
            if cells:
                _add_csv_row(columns, reader.line_num, [cell.strip() for cell in cells])
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    except ValueError as error:
        if str(error).startswith("line"):
            raise ValueError(f"{path.name}, {error}") from None
        raise
    return columns.trace()


def _add_csv_row(columns: _Columns, line: int, cells: list[str]) -> None:
    if len(cells) != len(_CSV_COLUMNS):
        raise columns.fail(line, f"{len(cells)} columns instead of {len(_CSV_COLUMNS)}")
    _, _, action, pointer, size_text, stream = cells
    if action == "allocate failure":
        columns.skipped += 1
        return
    if action not in ("allocate", "free"):
        raise columns.fail(line, f"unknown action {action!r}")
    try:
        address = 0 if pointer == "(nil)" else int(pointer, 16)
    except ValueError:
        raise columns.fail(line, f"{pointer!r} is not an address") from None
    try:
        size = int(size_text)
    except ValueError:
        raise columns.fail(line, f"{size_text!r} is not a size") from None
    if address == 0 and size == 0:
        columns.skipped += 1  # a request for 0 bytes, which got no memory
    elif action == "allocate":
        columns.allocate(line, address, size, stream)
    elif address in columns.live:
        columns.free(line, address, size, stream)
    else:
        raise columns.fail(line, f"frees {address:#x}, which is not live")


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, strings and numbers, and refuses to import or call anything."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is refused")

    def persistent_load(self, pid: object, /) -> Any:
        raise pickle.UnpicklingError("it asks for an object from elsewhere")


def _load_snapshot(path: Path, device: int | None) -> Trace:
    """Read the pickle of ``torch.cuda.memory._snapshot()``.

    A block counts as freed at ``free_completed``, when PyTorch may reuse it. PyTorch's
    recording keeps only the latest entries. So frees of memory that was allocated earlier
    are normal, and are left out.
    """
    try:
        with open_regular(path) as file:
            snapshot = _PlainUnpickler(file).load()
    except OSError:
        raise
    except Exception as error:  # a broken pickle may raise nearly anything
        raise ValueError(
            f"{path}: not a pickle of plain containers, strings and numbers: {error}"
        ) from None
    index, entries = _choose_device(path, snapshot, device)
    columns = _Columns.empty(path.name, f"device {index}, entry")
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise columns.fail(place, f"is a {type(entry).__name__}, not a dict")
        action = entry.get("action")
        if action not in ("alloc", "free_completed"):
            continue  # entries of segments, requests to free, and marks change no blocks
        address, size = (_whole(columns, place, entry, key) for key in ("addr", "size"))
        stream = _whole(columns, place, entry, "stream")
        if action == "alloc":
            columns.allocate(place, address, size, stream)
        elif address in columns.live:
            columns.free(place, address, size, stream)
        else:
            columns.skipped += 1
    return columns.trace()


def _choose_device(
    path: Path, snapshot: object, device: int | None
) -> tuple[int, list[object]]:
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not isinstance(traces, list) or not all(isinstance(t, list) for t in traces):
        raise ValueError(f"{path}: a pickle, but without PyTorch's device_traces")
    filled = [index for index, entries in enumerate(traces) if entries]
    if device is None:
        if not filled:
            raise ValueError(
                f"{path}: no events; was torch.cuda.memory._record_memory_history() "
                "called before?"
            )
        if len(filled) > 1:
            names = ", ".join(map(str, filled))
            raise ValueError(f"{path}: devices {names} have events; choose one")
        device = filled[0]
    elif device not in filled:
        raise ValueError(f"{path}: device {device} has no events")
    return device, traces[device]


def _whole(columns: _Columns, place: int, entry: dict[Any, Any], key: str) -> int:
    value = entry.get(key)
    if not isinstance(value, int):
        raise columns.fail(place, f"{key} is {value!r}, not a whole number")
    return value
