# SPDX-License-Identifier: Apache-2.0
"""Records what happens to memory, tags the events, and saves records in files.

The extension has one recorder for the process. While it is open, it appends a row to a
ring for each event, and counts all rows that it ever appended. A `Record` has no rows of
its own while it runs, and only knows the number of its first row. When it stops, it copies
its rows out of the ring into a `Log`, from which all exports and summaries are made.
Several records may run at once; `_adjust` opens the recorder with the largest ring and the
most stacks that any of them wants, and closes it when none is left.

A tag is a number in a context variable, which the recorder reads for each event.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import inspect
import io
import json
import operator
import os
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from cumem import _core
from cumem.base.displays import show
from cumem.base.driver import backend, device_count
from cumem.base.errors import warn_caller
from cumem.base.locks import make_lock
from cumem.base.units import read_size
from cumem.buffers.arguments import hinting
from cumem.devices.device import Device
from cumem.files.opening import open_regular
from cumem.files.replacing import open_export
from cumem.recording.events import ALLOCATE, EVENT, FREE, INNER, KINDS, Log, checked
from cumem.recording.pairing import address_keys, pair
from cumem.recording.stacks import Stacks
from cumem.recording.summary import (
    By,
    Difference,
    Leaks,
    Peak,
    Summary,
    Top,
    find_difference,
    find_leaks,
    find_peak,
    find_top,
    summarize,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NEVER: Final = 2**64 - 1  # a size that no event reaches
_MOST: Final = 1 << 32

#: The suffixes of files, and the methods that write such files.
FORMATS: Final = {
    ".npz": "_save",
    ".html": "to_html",
    ".json": "to_perfetto",
    ".json.gz": "to_perfetto",
    ".jsonl": "to_json_lines",
    ".pb.gz": "to_pprof",
    ".pickle": "to_torch_snapshot",
}

_lock = make_lock()
_open: list[Record] = []
_tags: list[str] = [""]
_tag_numbers: dict[str, int] = {"": 0}
#: Holds the number of the context's tag. It is None until the first tag is made, since the
#: recorder reads it for each event.
_current_tag: contextvars.ContextVar[int] | None = None


class Record:
    """What happened to memory between the start and the end of the record; see `record`.

    Examples
    --------
    >>> rec = cumem.record(stacks=False)
    >>> rec.start()
    >>> kept = cumem.empty_pinned(1000, "u1")
    >>> rec.stop()
    >>> len(rec) >= 1, rec.running
    (True, False)
    """

    def __init__(
        self, stacks: bool | int | str = True, max_entries: int = 1_000_000
    ) -> None:
        self._least = _read_stacks(stacks)
        self._max_entries = _read_count(max_entries)
        self._log: Log | None = None  # set when it has stopped
        self._running = False
        self._begin = 0  # the number of its first row in the recorder
        self._begin_ns = 0
        self._begin_s = 0.0
        self._living = np.zeros(0, EVENT)
        self._threads: dict[int, str] = {}

    # -- life ------------------------------------------------------------------------

    def start(self) -> None:
        """Start recording. A record that was used before forgets its old events.

        Raises
        ------
        RuntimeError
            If the record is running.
        MemoryError
            If there is not enough memory for the events.
        """
        with _lock:
            if self._running:
                raise RuntimeError("the record is running")
            self._log = None
            self._threads = _thread_names()
            _open.append(self)
            try:
                _adjust(_open)
                self._begin = _core._recorder_count()
                self._begin_s = time.time()
                self._begin_ns = time.monotonic_ns()
                alive = _read_alive()
                self._living = _lived_before(_read_events(self._begin)[1], alive)
            except BaseException:
                _open.remove(self)
                _adjust(_open)
                raise
            self._running = True

    def stop(self) -> None:
        """Stop recording; later events are not in the record.

        Raises
        ------
        RuntimeError
            If the record is not running.
        """
        with _lock:
            if not self._running:
                raise RuntimeError("the record is not running")
            try:
                self._log = self._read()
            finally:  # it stops even if there is no memory to read the events into
                self._running = False
                _open.remove(self)
                _adjust(_open)

    def __getstate__(self) -> object:
        # The rows are still in the recorder, and a copy of the record could not stop it.
        if self._running:
            raise TypeError(
                "a running record cannot be copied or pickled: stop() it first"
            )
        return self.__dict__.copy()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._running:  # it may have been stopped inside the block
            self.stop()

    @property
    def running(self) -> bool:
        """Whether the record is running."""
        return self._running

    def _read(self) -> Log:
        now_ns = time.monotonic_ns()
        alive = _read_alive()  # read before the events, which contain all later changes
        end = _core._recorder_count()
        first, events = _read_events(max(self._begin, end - self._max_entries), end)
        living = self._living if first == self._begin else _lived_before(events, alive)
        # A transfer is recorded when it ends, and may have begun before the record did.
        since = events["time_ns"].astype(np.int64) - self._begin_ns
        events["time_ns"] = np.maximum(since, 0)
        if (since[1:] < since[:-1]).any():
            events = events[np.argsort(events["time_ns"], kind="stable")]
        return Log(
            events,
            living,
            Stacks(),
            tuple(_tags),
            _name_threads(events, self._threads | _thread_names()),
            first - self._begin,
            self._begin_s,
            now_ns - self._begin_ns,
            _describe_machine(),
        )

    # -- contents --------------------------------------------------------------------

    def __dir__(self) -> list[str]:
        """Return the names of members that can be read now: `log` only after a start."""
        has_log = self._running or self._log is not None
        return sorted({*object.__dir__(self)}.difference(() if has_log else ("log",)))

    @property
    def log(self) -> Log:
        """The events so far, and the tables that they refer to.

        Reading it raises a RuntimeError if the record was not started.
        """
        with _lock:
            if self._running:
                return self._read()
        if self._log is None:
            raise RuntimeError("the record was not started, or a fork has ended it")
        return self._log

    def __len__(self) -> int:
        """Return the number of events in the record."""
        if self._running:
            noted = _core._recorder_count() - self._begin
            return min(noted, self._max_entries)
        return 0 if self._log is None else len(self._log.events)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        if self._running:
            return f"<cumem.Record, running, {len(self)} events>"
        if self._log is None:
            return "<cumem.Record, not started>"
        seconds = self._log.duration_ns * 1e-9
        return f"<cumem.Record of {seconds:.3g} s, {len(self)} events>"

    def summary(self) -> Summary:
        """Add up the events for each kind of memory, for transfers, and for shortages."""
        return summarize(self.log)

    def leaks(self) -> Leaks:
        """Return what was allocated during the record and is still alive, by line.

        "Still" means at the end of the record, or now if it is running. Memory that copies
        use on the way ("staging") is left out.
        """
        return find_leaks(self.log)

    def top(self, by: By = "line") -> Top:
        """Return the lines, tags or kinds that had the most bytes alive at once.

        Parameters
        ----------
        by : {"line", "tag", "kind"}
            How to group allocations. An allocation in a nested tag also counts for the
            tags around it.

        Raises
        ------
        ValueError
            If `by` is anything else.
        """
        return find_top(self.log, by)

    def peak(self) -> Peak:
        """Return when the most bytes were alive, of which kinds, and from which lines."""
        return find_peak(self.log)

    def diff(self, before: Record) -> Difference:
        """Return the differences between this record and an earlier one.

        Parameters
        ----------
        before : Record
            A record of the same work, for instance of an earlier epoch.

        Returns
        -------
        Difference
            The kinds and lines whose allocations or peaks differ; ``print()`` shows them.

        Raises
        ------
        TypeError
            If `before` is not a record.
        RuntimeError
            If one of the two records was not started.

        Examples
        --------
        >>> with cumem.record() as before:
        ...     pass
        >>> with cumem.record() as after:
        ...     kept = cumem.empty_pinned(1000, "u1")
        >>> print(str(after.diff(before)).splitlines()[0])
        peak +1 KiB
        """
        if not isinstance(before, Record):
            raise TypeError(f"before must be a Record, not {type(before).__name__}")
        return find_difference(before.log, self.log)

    # -- files -----------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str] | IO[bytes]) -> None:
        """Write the record to a file, in the format that its suffix stands for.

        Parameters
        ----------
        path : str, path-like or binary file
            The file to write. An existing file is replaced once the new one is complete.
            An open file, and one whose name has no suffix, is written as an ``.npz``.

            - ``.npz``: the whole record, which `load` reads and ``python -m cumem
              replay`` takes
            - ``.html``: as `to_html`
            - ``.json`` and ``.json.gz``: as `to_perfetto`
            - ``.jsonl``: as `to_json_lines`
            - ``.pb.gz``: as `to_pprof`
            - ``.pickle``: as `to_torch_snapshot`

        Raises
        ------
        ValueError
            If the name has another suffix; nothing is written then.
        OSError
            If the file cannot be written.

        Examples
        --------
        >>> with cumem.record() as rec:
        ...     kept = cumem.empty_pinned(1000, "u1")
        >>> rec.save("epoch.npz")
        >>> rec.save("epoch.html")
        """
        if isinstance(path, (str, bytes, os.PathLike)):
            name = os.fsdecode(path)
            if os.path.splitext(name)[1]:
                write_record(self, name)
                return
        self._save(path)

    def _save(self, path: str | os.PathLike[str] | IO[bytes]) -> None:
        """Write the whole record as an ``.npz``."""
        log = self.log
        used = np.unique(np.concatenate([log.events["stack"], log.living["stack"]]))
        stacks = {int(i): log.stacks[int(i)] for i in used if i}
        tables = {
            "stacks": stacks,
            "tags": log.tags,
            "threads": log.threads,
            "lost_count": log.lost_count,
            "begin_s": log.begin_s,
            "duration_ns": log.duration_ns,
            "machine": log.machine,
        }
        text = np.frombuffer(json.dumps(tables).encode(), np.uint8)
        with open_export(path) as file:
            # NumPy's stub takes the names of arrays for its own flags.
            save: Any = np.savez_compressed
            save(file, events=log.events, living=log.living, tables=text, **_trace(log))

    @classmethod
    @hinting
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a record from an ``.npz`` file that `save` wrote.

        Parameters
        ----------
        path : str or path-like
            The file to read.

        Returns
        -------
        Record
            A record that has stopped.

        Raises
        ------
        ValueError
            If the file is not such a record, or any part of it is damaged.
        OSError
            If the file cannot be read.

        Examples
        --------
        >>> with cumem.record(stacks=False) as rec:
        ...     kept = cumem.empty_pinned(1000, "u1")
        >>> rec.save("epoch.npz")
        >>> len(cumem.Record.load("epoch.npz")) == len(rec)
        True
        """
        where = Path(path)
        try:
            with open_regular(where) as file, _archive(file) as arrays:
                events, living = arrays["events"], arrays["living"]
                tables = json.loads(arrays["tables"].tobytes())
            log = checked(
                Log(
                    events,
                    living,
                    {
                        int(number): frames
                        for number, frames in tables["stacks"].items()
                    },
                    tuple(tables["tags"]),
                    {int(number): name for number, name in tables["threads"].items()},
                    tables["lost_count"],
                    float(tables["begin_s"]),
                    tables["duration_ns"],
                    tables["machine"],
                )
            )
        except OSError:
            raise
        except Exception as error:  # a damaged archive may raise nearly anything
            raise ValueError(f"{where}: not a record of cumem: {error}") from None
        self = cls()
        self._log = log
        return self

    def to_torch_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write a pickle for PyTorch's memory viewer."""
        _export("torch_snapshot", self.log, path)

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for Perfetto and Chrome, compressed if the name ends in ``.gz``."""
        _export("perfetto", self.log, path)

    def to_pprof(self, path: str | os.PathLike[str]) -> None:
        """Write a profile for pprof."""
        _export("pprof", self.log, path)

    def to_json_lines(self, path: str | os.PathLike[str]) -> None:
        """Write each event as a line of JSON."""
        _export("json_lines", self.log, path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that shows the record in a browser and needs no network."""
        _export("page", self.log, path)

    def plot(self, ax: Any = None) -> Any:
        """Draw the bytes alive over time, by kind, with transfers below. Needs matplotlib.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.

        Returns
        -------
        matplotlib.axes.Axes
        """
        return show("plot", self, ax)

    def _repr_html_(self) -> str | None:
        shown: str | None = show("html", self)
        return shown


def _export(module: str, log: Log, path: str | os.PathLike[str]) -> None:
    """Write the log with `module` of this package, which is imported only now."""
    import_module(f"cumem.recording.{module}").write(log, path)


@hinting
def record(stacks: bool | int | str = True, max_entries: int = 1_000_000) -> Record:
    """Record what happens to memory in a block of code.

    Write ``with cumem.record() as rec:`` and, after the block, ``print(rec.summary())``,
    ``rec.leaks()``, ``rec.top()`` or ``rec.peak()``. ``rec.start()`` and ``rec.stop()`` do
    the same without a block.

    Parameters
    ----------
    stacks : bool, int or str
        Whether to record the Python stack of each event, up to its 32 innermost frames.
        With a number of bytes, such as ``65536`` or ``"64KiB"``, stacks are recorded only
        for events of at least that size, and for all transfers.
    max_entries : int
        The largest number of events to keep. Each recorded event takes 72 bytes. If there
        are more, the oldest are dropped, and the record only counts them.

    Returns
    -------
    Record

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If an argument is out of range.

    Notes
    -----
    A record has the events of all pools and threads: allocations and frees of pinned,
    mapped, managed and device memory, registrations, memory that copies use on the way
    ("staging"), growth, trims, transfers, prefetches, and attempts that found memory short.

    Several records may run at once and be nested. Each has the events from its start to its
    end. They have stacks if any of the running records asks for stacks. A forked child
    records nothing until it starts a record of its own. The records of its parent are empty
    in the child.

    Examples
    --------
    >>> with cumem.record() as rec:
    ...     kept = cumem.empty_pinned(1000, "u1")
    ...     gone = cumem.empty_pinned(2000, "u1")
    ...     del gone
    >>> [(kind.name, kind.count, kind.living_count) for kind in rec.summary().kinds]
    [('pinned', 2, 1)]
    >>> rec.leaks().count
    1
    """
    return Record(stacks, max_entries)


def _archive(file: io.BufferedReader) -> Any:
    """Open an ``.npz``, and raise a ValueError if the file is not one.

    ``np.load`` takes any other file for a pickle, and its error would speak of pickles.
    """
    if not zipfile.is_zipfile(file):
        raise ValueError("it is not an .npz")
    file.seek(0)
    return np.load(file)


# -- tags ------------------------------------------------------------------------------


class _Tag(contextlib.AbstractContextManager[None]):
    """The block that `tag` makes.

    It may be entered many times, also inside itself and by several threads, because the
    blocks that are open are kept in the context rather than here.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        _be_inside((*_blocks.get(), self))

    def __exit__(self, *_: object) -> None:
        inside = _blocks.get()
        # A generator may end in another context than it began in. The block is not open in
        # the context where it ends, so nothing is removed there.
        for i in reversed(range(len(inside))):
            if inside[i] is self:
                _be_inside(inside[:i] + inside[i + 1 :])
                break

    def __call__(self, function: _Function) -> _Function:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(
            function
        ):
            raise TypeError("a generator runs after the call: write with in its body")

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            with self:
                return function(*args, **named)

        @functools.wraps(function)
        async def wait(*args: Any, **named: Any) -> Any:
            with self:
                return await function(*args, **named)

        wrapped: Any = wait if inspect.iscoroutinefunction(function) else call
        return cast("_Function", wrapped)


#: The blocks that are open in this context, the outermost first.
_blocks: contextvars.ContextVar[tuple[_Tag, ...]] = contextvars.ContextVar(
    "cumem.tag blocks", default=()
)


def _be_inside(blocks: tuple[_Tag, ...]) -> None:
    """Make these the blocks that are open in this context."""
    path = "/".join(each._name for each in blocks)
    _blocks.set(blocks)
    _tag_variable().set(_number_tag(path))


@hinting
def tag(name: str) -> _Tag:
    """Give the events in a block a tag: ``with cumem.tag("loader"):``.

    Parameters
    ----------
    name : str
        The tag, which may not be empty. Inside another such block it becomes
        ``"outer/name"``.

    Raises
    ------
    TypeError
        If `name` is not a str.
    ValueError
        If `name` is empty.

    Notes
    -----
    A tag belongs to the current context of ``contextvars``: an asyncio task has the tag of
    the code that created it, and a thread begins without one, unless Python or
    ``contextvars.copy_context()`` gives it a context.

    A tag is a decorator too, for ordinary and ``async`` functions; on a generator function
    it raises a TypeError. It may be entered many times, also by several threads. Each name
    is kept until the process ends.

    Examples
    --------
    >>> with cumem.record() as rec, cumem.tag("loader"):
    ...     with cumem.tag("batch"):
    ...         kept = cumem.empty_pinned(1000, "u1")
    >>> [(group.name, group.count) for group in rec.top("tag").groups]
    [('loader', 1), ('loader/batch', 1)]
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    if not name:
        raise ValueError("name must not be empty")
    return _Tag(name)


def _tag_variable() -> contextvars.ContextVar[int]:
    global _current_tag
    with _lock:
        if _current_tag is None:
            _current_tag = contextvars.ContextVar("cumem.tag", default=0)
            _adjust(_open)
        return _current_tag


def _number_tag(name: str) -> int:
    with _lock:
        number = _tag_numbers.get(name)
        if number is None:
            number = _tag_numbers[name] = len(_tags)
            _tags.append(name)
        return number


# -- the recorder ----------------------------------------------------------------------


def _adjust(records: list[Record]) -> None:
    """Open the recorder with the settings that all these records need, or close it."""
    if not records:
        _core._recorder_close()
        return
    capacity = max(each._max_entries for each in records)
    _core._recorder_open(capacity, min(each._least for each in records), _current_tag)


def open_records() -> list[Record]:
    """Return the records that are running."""
    with _lock:
        return list(_open)


def _forget_in_child() -> None:
    """Drop the running records, which may be large and stay with the parent."""
    for each in _open:
        each._running = False
    _open.clear()
    _core._recorder_close()


os.register_at_fork(after_in_child=_forget_in_child)


def _read_events(begin: int, end: int | None = None) -> tuple[int, NDArray[Any]]:
    """Return the rows from `begin` on, and the number of the first that is still there."""
    end = _core._recorder_count() if end is None else end
    first, rows = _core._recorder_read(begin, end)
    return first, np.frombuffer(rows, EVENT)[first - begin :].copy()


def _read_alive() -> NDArray[Any]:
    """Return a row for each allocation that is alive now."""
    try:
        found = _core._living()
    except RuntimeError:  # this is a forked child
        found = []
    alive = np.zeros(len(found), EVENT)
    alive["address"] = [block.address for block in found]
    alive["nbytes"] = [block.nbytes for block in found]
    alive["value"] = [block.requested_nbytes for block in found]
    alive["pool"] = [block.pool_serial for block in found]
    alive["kind"] = [block.kind for block in found]
    alive["device"] = [block.device for block in found]
    return alive


def _lived_before(events: NDArray[Any], alive: NDArray[Any]) -> NDArray[Any]:
    """Return the allocations that were alive before the first of `events`.

    An allocation whose first event is its free was alive before the events. So was
    everything in `alive` that the events do not mention: `alive` was read while the events
    were recorded, and no allocation begins or ends without an event.
    """
    steps = events[events["op"] <= FREE]
    known, first = np.unique(address_keys(steps), return_index=True)
    freed = steps[first]
    freed = freed[freed["op"] == FREE]
    freed["value"] = freed["nbytes"]  # the number of bytes asked for is lost
    for name in ("time_ns", "stream", "thread", "stack", "tag"):
        freed[name] = 0
    living = np.concatenate([alive[~np.isin(address_keys(alive), known)], freed])
    living["op"], living["source_kind"] = ALLOCATE, living["kind"]
    return living


def _thread_names() -> dict[int, str]:
    return {
        thread.native_id: thread.name
        for thread in threading.enumerate()
        if thread.native_id is not None
    }


def _name_threads(events: np.ndarray, known: dict[int, str]) -> dict[int, str]:
    """Return `known` and the system's names of other threads, such as PyTorch's."""
    for thread in np.unique(events["thread"]).tolist():
        if thread not in known:
            with contextlib.suppress(OSError, UnicodeDecodeError):  # it may have ended
                text = Path(f"/proc/self/task/{thread}/comm").read_text(
                    encoding="utf-8"
                )
                known[thread] = text.strip()
    return known


def _describe_machine() -> dict[str, Any]:
    """Return the backend and its devices, if the process has used them already."""
    machine: dict[str, Any] = {"backend": "", "devices": [], "inner": list(INNER)}
    with contextlib.suppress(Exception):  # fails at exit and in a forked child
        if _core._pools():
            machine["backend"] = backend()
            machine["devices"] = [Device(i).name for i in range(device_count())]
    return machine


def _trace(log: Log) -> dict[str, NDArray[Any]]:
    """Return the columns for ``python -m cumem replay``: allocations and frees of pools."""
    lives = pair(log)
    pooled = lives.begun["kind"] < KINDS.index("registered")
    begin, end, rows = lives.begin[pooled], lives.end[pooled], lives.begun[pooled]
    block = np.arange(len(rows))
    ended = end < len(lives.rows)
    at = np.concatenate([begin, end[ended]])
    order = np.argsort(at, kind="stable")

    def column(values: Any) -> NDArray[Any]:
        both = np.concatenate([values, np.asarray(values)[ended]])
        return np.asarray(both[order], np.int64)

    op = np.repeat([1, 0], [len(rows), int(ended.sum())])[order].astype(np.int64)
    return {
        "op": op,
        "block": column(block),
        "size": column(rows["value"]),
        "stream": column(rows["stream"].astype(np.int64)),
        "kind": column(rows["kind"]),
    }


# -- arguments -------------------------------------------------------------------------


def _read_stacks(stacks: bool | int | str) -> int:
    """Return the least number of bytes of an event that gets a stack."""
    if isinstance(stacks, (bool, np.bool_)):
        return 0 if stacks else _NEVER
    if not isinstance(stacks, str) and not hasattr(stacks, "__index__"):
        what = "a bool, a number of bytes or a text such as '64KiB'"
        raise TypeError(f"stacks must be {what}, not {type(stacks).__name__}")
    return min(read_size(stacks, "stacks", False, None), _NEVER)


def _read_count(count: int) -> int:
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TypeError(f"max_entries must be an int, not {type(count).__name__}")
    count = operator.index(count)
    if not 1 <= count <= _MOST:
        raise ValueError(f"max_entries must be from 1 to {_MOST}, not {count}")
    return count


# -- recording programs without changing them ------------------------------------------


def write_record(rec: Record, path: str) -> None:
    """Write a record in the format that the suffix of the path names.

    Raises
    ------
    ValueError
        If there is no format for the suffix.
    """
    for suffix in sorted(FORMATS, key=len, reverse=True):  # one may end with another
        if path.endswith(suffix):
            getattr(rec, FORMATS[suffix])(path)
            return
    raise ValueError(f"the name must end in one of {', '.join(FORMATS)}, not {path!r}")


def record_until_exit(path: str) -> None:
    """Record everything in this process and write it when the process ends.

    ``CUMEM_RECORD`` asks for this. The record is written after an exception as well, but
    not by forked children. ``{pid}`` in the path stands for the number of the process.
    """
    if not path.endswith(tuple(FORMATS)):
        text = f"must end in one of {', '.join(FORMATS)}; nothing is recorded"
        warn_caller(f"CUMEM_RECORD={path} {text}", RuntimeWarning)
        return
    path = os.path.abspath(path)
    folder = os.path.dirname(path.replace("{pid}", str(os.getpid())))
    if not os.access(folder, os.W_OK | os.X_OK):  # only a warning: this may change
        text = f"the folder {folder} is not there now, or may not be written"
        warn_caller(f"CUMEM_RECORD={path}: {text}", RuntimeWarning)
    rec = Record()
    rec.start()
    atexit.register(_write_at_exit, rec, path, os.getpid())


def _write_at_exit(rec: Record, path: str, process: int) -> None:
    if os.getpid() != process or not rec._running:
        return
    rec.stop()
    path = path.replace("{pid}", str(process))
    try:
        write_record(rec, path)
    except Exception as error:
        print(f"cumem: {path} could not be written: {error!r}", file=sys.stderr)
