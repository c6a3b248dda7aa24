# SPDX-License-Identifier: Apache-2.0
"""Records of what happens to memory: begun, ended, kept in files; and tags."""

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
from cumem.base.units import parse_nbytes
from cumem.buffers.arguments import hinting
from cumem.devices.device import Device
from cumem.files.raw import open_export, open_regular
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

_NEVER: Final = 2**64 - 1  # no event has so many bytes
_MOST: Final = 1 << 32

_lock = make_lock()
_open: list[Record] = []
_tags: list[str] = [""]
_tag_numbers: dict[str, int] = {"": 0}
#: The number of the context's tag; None until there was one.
_current_tag: contextvars.ContextVar[int] | None = None


class Record:
    """What happened to memory between its start and its end; see `record`.

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
        self._log: Log | None = None  # once it has ended
        self._running = False
        self._begin = 0  # number of the recorder's row
        self._begin_ns = 0
        self._begin_s = 0.0
        self._living = np.zeros(0, EVENT)
        self._threads: dict[int, str] = {}

    # -- life ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin, or begin anew: what it had is forgotten.

        Raises
        ------
        RuntimeError
            If it is running.
        MemoryError
            If there is no memory for the events.
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
        """End. What happens from now on is not in it.

        Raises
        ------
        RuntimeError
            If it is not running.
        """
        with _lock:
            if not self._running:
                raise RuntimeError("the record is not running")
            try:
                self._log = self._read()
            finally:  # without the events, but off, where there is no memory to read them
                self._running = False
                _open.remove(self)
                _adjust(_open)

    def __getstate__(self) -> object:
        if self._running:  # its rows are the recorder's, which knows one of them
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
        if self._running:  # else it was stopped inside
            self.stop()

    @property
    def running(self) -> bool:
        """Whether it notes what happens."""
        return self._running

    def _read(self) -> Log:
        now_ns = time.monotonic_ns()
        alive = _read_alive()  # before the events, so that they tell what it misses
        end = _core._recorder_count()
        first, events = _read_events(max(self._begin, end - self._max_entries), end)
        living = self._living if first == self._begin else _lived_before(events, alive)
        # A transfer is told of at its end, and may have begun before the record did.
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

    # -- what it has -----------------------------------------------------------------

    def __dir__(self) -> list[str]:
        """Names of members that can be read now: the log once it was started."""
        has_log = self._running or self._log is not None
        return sorted({*object.__dir__(self)}.difference(() if has_log else ("log",)))

    @property
    def log(self) -> Log:
        """Its events, and the tables that they point into; up to now while it is
        running. RuntimeError before it was started.
        """
        with _lock:
            if self._running:
                return self._read()
        if self._log is None:
            raise RuntimeError("the record was not started, or a fork has ended it")
        return self._log

    def __len__(self) -> int:
        """Events that it has."""
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
        """Add up: each kind of memory, transfers between kinds, shortages."""
        return summarize(self.log)

    def leaks(self) -> Leaks:
        """What was allocated inside and is still alive, by line.

        That is at the end of the record, or now while it is running. What copies go
        through is left out.
        """
        return find_leaks(self.log)

    def top(self, by: By = "line") -> Top:
        """Who held most at once.

        Parameters
        ----------
        by : {"line", "tag", "kind"}
            A tag counts for those around it as well.

        Raises
        ------
        ValueError
            If `by` is none of them.
        """
        return find_top(self.log, by)

    def peak(self) -> Peak:
        """When most was live, of which kinds, and the lines that it was from."""
        return find_peak(self.log)

    # -- files -----------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str] | IO[bytes]) -> None:
        """Write it to a file, in the format that the suffix names.

        Parameters
        ----------
        path : str, path-like or binary file
            An existing file is replaced once all is written. An open file, and one
            whose name has no suffix, gets what an ``.npz`` holds.

            - ``.npz``: the whole record, which `load_record` reads and ``python -m cumem
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
        """The whole record, as an ``.npz``."""
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
            save: Any = np.savez_compressed  # whose stub takes names for its flags
            save(file, events=log.events, living=log.living, tables=text, **_trace(log))

    def to_torch_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write a pickle that PyTorch's memory viewer opens."""
        _export("torch_snapshot", self.log, path)

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that Perfetto and Chrome open; compressed where the name ends in
        ``.gz``.
        """
        _export("perfetto", self.log, path)

    def to_pprof(self, path: str | os.PathLike[str]) -> None:
        """Write a profile that pprof opens."""
        _export("pprof", self.log, path)

    def to_json_lines(self, path: str | os.PathLike[str]) -> None:
        """Write each event as a line of JSON."""
        _export("json_lines", self.log, path)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that shows it in a browser, without a network."""
        _export("page", self.log, path)

    def plot(self, ax: Any = None) -> Any:
        """Draw what lived over time, by kind, and transfers below; needs matplotlib.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; default: a figure of its own.

        Returns
        -------
        matplotlib.axes.Axes
        """
        return show("plot", self, ax)

    def _repr_html_(self) -> str | None:
        shown: str | None = show("html", self)
        return shown


def _export(module: str, log: Log, path: str | os.PathLike[str]) -> None:
    """By a module of this package, which is loaded when somebody wants it."""
    import_module(f"cumem.recording.{module}").write(log, path)


@hinting
def record(stacks: bool | int | str = True, max_entries: int = 1_000_000) -> Record:
    """Note what happens to memory in a block of code.

    ``with cumem.record() as rec:`` and then, after the block, ``print(rec.summary())``,
    ``rec.leaks()``, ``rec.top()``, ``rec.peak()``; or ``rec.start()`` and ``rec.stop()``.

    Parameters
    ----------
    stacks : bool, int or str
        Whether events have the Python stack, the 32 innermost frames; or the number of
        bytes, as ``65536`` or ``"64KiB"``, from which on they do; transfers always then.
    max_entries : int
        Most events that are kept, at 72 bytes each as they come: of more the oldest are
        lost, and counted.

    Returns
    -------
    Record

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If one is out of bounds.

    Notes
    -----
    Every pool is in it: allocations and frees of pinned, mapped, managed and device
    memory, registrations, what copies go through ("staging"), growth, trims, transfers,
    prefetches, and attempts that found memory short; of all threads. Several may run at
    once and be nested: each has the events from its start to its end, with stacks where
    one of them wants those. A forked child notes nothing until it starts a record of its
    own; those of its parent are over there, and empty.

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


@hinting
def diff(before: Record, after: Record) -> Difference:
    """What a record has more than another.

    Parameters
    ----------
    before, after : Record
        Of the same work, as of two epochs.

    Returns
    -------
    Difference
        Kinds and lines whose allocations or peaks differ; ``print()`` shows them.

    Raises
    ------
    TypeError
        If one is not a record.
    RuntimeError
        If one was not started.

    Examples
    --------
    >>> with cumem.record() as before:
    ...     pass
    >>> with cumem.record() as after:
    ...     kept = cumem.empty_pinned(1000, "u1")
    >>> print(str(cumem.diff(before, after)).splitlines()[0])
    peak +1 KiB
    """
    for name, each in (("before", before), ("after", after)):
        if not isinstance(each, Record):
            raise TypeError(f"{name} must be a Record, not {type(each).__name__}")
    return find_difference(before.log, after.log)


@hinting
def load_record(path: str | os.PathLike[str]) -> Record:
    """Read what `Record.save` wrote.

    Parameters
    ----------
    path : str or path-like

    Returns
    -------
    Record
        One that has ended.

    Raises
    ------
    ValueError
        If the file is no such record, or is damaged: everything in it is looked at.
    OSError
        If it cannot be read.

    Examples
    --------
    >>> with cumem.record(stacks=False) as rec:
    ...     kept = cumem.empty_pinned(1000, "u1")
    >>> rec.save("epoch.npz")
    >>> len(cumem.load_record("epoch.npz")) == len(rec)
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
                {int(number): frames for number, frames in tables["stacks"].items()},
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
        raise ValueError(f"{where}: no record of cumem: {error}") from None
    self = Record()
    self._log = log
    return self


def _archive(file: io.BufferedReader) -> Any:
    """NumPy takes what is no archive for a pickle, and says how to load that."""
    if not zipfile.is_zipfile(file):
        raise ValueError("it is no .npz")
    file.seek(0)
    return np.load(file)


# -- tags ------------------------------------------------------------------------------


class _Tag(contextlib.AbstractContextManager[None]):
    """What `tag` makes. It may be entered again and again, also inside itself and by
    several threads: each context knows the blocks that are open in it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        _be_inside((*_blocks.get(), self))

    def __exit__(self, *_: object) -> None:
        inside = _blocks.get()
        # A generator may end in another context than it began in, which has no such block.
        for i in reversed(range(len(inside))):
            if inside[i] is self:
                _be_inside(inside[:i] + inside[i + 1 :])
                break

    def __call__(self, function: _Function) -> _Function:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(
            function
        ):
            raise TypeError("what a generator does is not in its call: use with in it")

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


#: The blocks that are open in this context, from the outermost on.
_blocks: contextvars.ContextVar[tuple[_Tag, ...]] = contextvars.ContextVar(
    "cumem.tag blocks", default=()
)


def _be_inside(blocks: tuple[_Tag, ...]) -> None:
    """From now on these are the blocks that are open in this context."""
    path = "/".join(each._name for each in blocks)
    _blocks.set(blocks)
    _tag_variable().set(_number_tag(path))


@hinting
def tag(name: str) -> _Tag:
    """Mark what happens in a block: ``with cumem.tag("loader"):``.

    Parameters
    ----------
    name : str
        Not empty. Inside another such block it becomes ``"outer/name"``.

    Raises
    ------
    TypeError
        If `name` is not a str.
    ValueError
        If it is empty.

    Notes
    -----
    It belongs to the context, as ``contextvars`` say: tasks of asyncio have that of the
    code which made them, threads begin with none, unless Python or a
    ``contextvars.copy_context()`` gives them one. It also decorates a function, ``async``
    ones too, but no generator: TypeError. A tag may be entered again and again, also by
    several threads. Each name is kept for as long as the process.

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


# -- what the recorder does ------------------------------------------------------------


def _adjust(records: list[Record]) -> None:
    """Let the recorder do what all of these want."""
    if not records:
        _core._recorder_close()
        return
    capacity = max(each._max_entries for each in records)
    _core._recorder_open(capacity, min(each._least for each in records), _current_tag)


def open_records() -> list[Record]:
    """Those that are running."""
    with _lock:
        return list(_open)


def _forget_in_child() -> None:
    """What they have is the parent's to read: children are many, and it may be much."""
    for each in _open:
        each._running = False
    _open.clear()
    _core._recorder_close()


os.register_at_fork(after_in_child=_forget_in_child)


def _read_events(begin: int, end: int | None = None) -> tuple[int, NDArray[Any]]:
    """Rows from `begin` on, or from the first that is still there, which is said."""
    end = _core._recorder_count() if end is None else end
    first, rows = _core._recorder_read(begin, end)
    return first, np.frombuffer(rows, EVENT)[first - begin :].copy()


def _read_alive() -> NDArray[Any]:
    """What lives now, as rows."""
    try:
        found = _core._living()
    except RuntimeError:  # in a forked child
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
    """What lived before the first of `events`: what they free first, and of `alive`, what
    lived at a moment among them, whatever they do not tell of."""
    steps = events[events["op"] <= FREE]
    known, first = np.unique(address_keys(steps), return_index=True)
    freed = steps[first]
    freed = freed[freed["op"] == FREE]
    freed["value"] = freed["nbytes"]  # what was asked for is not known any more
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
    """Those that Python has not begun, PyTorch's of backward say, as the system knows
    them."""
    for thread in np.unique(events["thread"]).tolist():
        if thread not in known:
            with contextlib.suppress(OSError, UnicodeDecodeError):  # it has ended
                text = Path(f"/proc/self/task/{thread}/comm").read_text(
                    encoding="utf-8"
                )
                known[thread] = text.strip()
    return known


def _describe_machine() -> dict[str, Any]:
    """Without opening a driver for it."""
    machine: dict[str, Any] = {"backend": "", "devices": [], "inner": list(INNER)}
    with contextlib.suppress(Exception):  # at exit, or in a forked child
        if _core._pools():
            machine["backend"] = backend()
            machine["devices"] = [Device(i).name for i in range(device_count())]
    return machine


def _trace(log: Log) -> dict[str, NDArray[Any]]:
    """What ``python -m cumem replay`` reads: allocations and frees of pools."""
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
    """From so many bytes on events have stacks."""
    if isinstance(stacks, (bool, np.bool_)):
        return 0 if stacks else _NEVER
    if not isinstance(stacks, str) and not hasattr(stacks, "__index__"):
        what = "a bool, a number of bytes or a text such as '64KiB'"
        raise TypeError(f"stacks must be {what}, not {type(stacks).__name__}")
    if not isinstance(stacks, str):
        stacks = operator.index(stacks)
    return min(parse_nbytes(stacks), _NEVER)


def _read_count(count: int) -> int:
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TypeError(f"max_entries must be an int, not {type(count).__name__}")
    count = operator.index(count)
    if not 1 <= count <= _MOST:
        raise ValueError(f"max_entries must be from 1 to {_MOST}, not {count}")
    return count


# -- for programs that are not changed -------------------------------------------------

#: Suffixes of files, and the methods that write them.
FORMATS: Final = {
    ".npz": "_save",
    ".html": "to_html",
    ".json": "to_perfetto",
    ".json.gz": "to_perfetto",
    ".jsonl": "to_json_lines",
    ".pb.gz": "to_pprof",
    ".pickle": "to_torch_snapshot",
}


def write_record(rec: Record, path: str) -> None:
    """Write it in the format that the suffix names.

    Raises
    ------
    ValueError
        If it names none.
    """
    for suffix, method in FORMATS.items():
        if path.endswith(suffix):
            getattr(rec, method)(path)
            return
    raise ValueError(f"the name must end in one of {', '.join(FORMATS)}, not {path!r}")


def record_until_exit(path: str) -> None:
    """For CUMEM_RECORD: note all that happens in this process, and write it at its end,
    also that by an exception. A forked child writes nothing; ``{pid}`` in the path tells
    the files of several processes apart."""
    if not path.endswith(tuple(FORMATS)):
        text = f"must end in one of {', '.join(FORMATS)}; nothing is recorded"
        warn_caller(f"CUMEM_RECORD={path} {text}", RuntimeWarning)
        return
    path = os.path.abspath(path)
    folder = os.path.dirname(path.replace("{pid}", str(os.getpid())))
    if not os.access(folder, os.W_OK | os.X_OK):  # which may change until the end
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
