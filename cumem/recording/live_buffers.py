# SPDX-License-Identifier: Apache-2.0
"""What is alive now, who keeps it so, and a report of that when the process ends."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import os
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import numpy as np

from cumem import _core
from cumem.base.answer import Answer
from cumem.base.errors import warn_caller
from cumem.base.places import found_in
from cumem.base.units import fit, format_count, format_nbytes, format_seconds
from cumem.base.variables import SWITCH_WORDS, read_switch
from cumem.recording import record as records
from cumem.recording.events import ALLOCATE, KINDS, Log
from cumem.recording.pairing import address_keys
from cumem.recording.reading import of_op
from cumem.recording.stacks import format_frame

_LONGEST: Final = 40  # lines that are shown
_NO_LINES: Final = """\
  where they were made: run the program with CUMEM_RECORD=FILE, or make them
  inside `with cumem.record():` and ask there
  who holds one: cumem.who_holds(row)"""


# -- what is alive ---------------------------------------------------------------------


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class Living(Answer):
    """Memory that is handed out.

    Attributes
    ----------
    kind : str
        ``"pinned"`` and so on; ``"registered"`` pages of others, ``"staging"`` what a
        copy goes through.
    device : int
    address : int
    nbytes, requested_nbytes : int
        Bytes that it takes, and that were asked for.
    line : str or None
        Where it was made, as ``file:line (function)``; None unless a record with stacks,
        which is running, has seen that.
    tag : str
    seconds : float or None
        Its age; None as `line`.

    Examples
    --------
    >>> kept = cumem.empty_pinned(1000, "u1")
    >>> 1000 in [each.requested_nbytes for each in cumem.live().buffers]
    True
    """

    kind: str
    device: int
    address: int
    nbytes: int
    requested_nbytes: int
    line: str | None
    tag: str
    seconds: float | None


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class LivingBuffers(Answer):
    """All that is alive at one moment; ``print()`` shows a table.

    Attributes
    ----------
    buffers : tuple of Living
        The largest first.

    Examples
    --------
    >>> kept = cumem.empty_pinned(1000, "u1")
    >>> cumem.live().nbytes >= 1000
    True
    """

    buffers: tuple[Living, ...]

    _keys: ClassVar[tuple[str, ...]] = ("nbytes",)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, registered ones included."""
        return sum(each.nbytes for each in self.buffers)

    def __len__(self) -> int:
        return len(self.buffers)

    def __iter__(self) -> Iterator[Living]:
        return iter(self.buffers)

    def __bool__(self) -> bool:
        return bool(self.buffers)

    def __repr__(self) -> str:
        return fit(self._text())

    __str__ = __repr__

    def _text(self) -> str:
        if not self.buffers:
            return "nothing is alive"
        count = len(self.buffers)
        lines = [f"{count} alive, {format_nbytes(self.nbytes)}"]
        for each in self.buffers[:_LONGEST]:
            age = "" if each.seconds is None else format_seconds(each.seconds)
            where = " ".join(filter(None, [each.line, each.tag and f"[{each.tag}]"]))
            place = f"{each.kind} {each.device}"
            size = format_nbytes(each.nbytes)
            lines.append(f"  {size:>10}  {place:<12}  {age:>8}  {where}".rstrip())
        if count > _LONGEST:
            lines.append(f"  and {count - _LONGEST} more")
        if self.has_no_lines:
            lines.append(_NO_LINES)
        return "\n".join(lines)

    @property
    def has_no_lines(self) -> bool:
        """Was no record running that would have noted where these were made?"""
        return bool(self.buffers) and all(each.seconds is None for each in self.buffers)


def live() -> LivingBuffers:
    """List what is handed out now, with its lines.

    Returns
    -------
    LivingBuffers
        Of all pools, those that copies go through too, and what `register` has locked.
        Line, tag and age are known of what was made while a record was running that
        still is; the line if it was to note stacks of that size.

    Notes
    -----
    Opens no driver. Takes as long as reading the record does: less than a second for a
    million events.

    Examples
    --------
    >>> kept = cumem.empty_pinned(1000, "u1")
    >>> len(cumem.live().buffers) >= 1
    True
    """
    known = _find_origins()
    buffers = []
    for block in _core._living():
        key = (block.address, block.kind)
        line, tag, seconds = known.get(key, (None, "", None))
        buffers.append(
            Living(
                KINDS[block.kind],
                block.device,
                block.address,
                block.nbytes,
                block.requested_nbytes,
                line,
                tag,
                seconds,
            )
        )
    buffers.sort(key=lambda each: (-each.nbytes, each.address))
    return LivingBuffers(tuple(buffers))


def _find_origins() -> dict[tuple[int, int], tuple[str | None, str, float]]:
    """By address and kind of what running records have seen allocated."""
    running = sorted(records.open_records(), key=lambda each: each._begin)
    if not running:
        return {}
    log: Log = running[0].log
    made = of_op(log, ALLOCATE)[::-1]
    # The last of an address counts.
    made = made[np.unique(address_keys(made), return_index=True)[1]]
    ages = (log.duration_ns - made["time_ns"].astype(np.int64)) * 1e-9
    known: dict[tuple[int, int], tuple[str | None, str, float]] = {}
    lines: dict[int, str | None] = {0: None}
    for event, age in zip(made, ages, strict=True):
        number = int(event["stack"])
        if number not in lines:
            lines[number] = format_frame(log.user_frame(number))
        key = (int(event["address"]), int(event["kind"]))
        known[key] = (lines[number], log.tags[event["tag"]], float(age))
    return known


# -- a report at exit ------------------------------------------------------------------


def report_leaks_at_exit() -> None:
    """Print what is allocated from now on and is alive when the process ends, by line.

    To stderr, after a collection of garbage; what globals still hold counts. Of what was
    allocated before the call and is still alive only a sum is printed, since its lines
    are not known: call it first. The same as ``CUMEM_LEAKS=1`` in the environment, which
    begins with the import. Nothing in a forked child, nor where the process is killed.

    Examples
    --------
    >>> cumem.report_leaks_at_exit()
    """
    older = frozenset(_places())
    rec = records.record()
    rec.start()
    atexit.register(_report, rec, os.getpid(), older)


def report_leaks_if_asked(text: str) -> None:
    """Do what ``CUMEM_LEAKS`` says. A word that it does not know is a warning and reports
    nothing: an error would keep the program from importing cumem.
    """
    try:
        is_asked = read_switch(text)
    except ValueError:
        is_asked = False
        warn_caller(
            f"CUMEM_LEAKS must be {SWITCH_WORDS}, not '{text:.100}': leaks are "
            "not reported",
            UserWarning,
        )
    if is_asked:
        report_leaks_at_exit()


def _report(
    rec: records.Record, process: int, older: frozenset[tuple[int, int]]
) -> None:
    if os.getpid() != process or not rec.running:
        return
    gc.collect()
    rec.stop()
    lines = [f"cumem at exit: {rec.leaks()}"]
    if older:
        made = of_op(rec.log, ALLOCATE)
        anew = set(zip(made["address"].tolist(), made["kind"].tolist(), strict=True))
        left = [nbytes for place, nbytes in _places().items() if place in older - anew]
        if left:
            lines.append(
                f"  and {format_count(len(left), 'buffer')} of before "
                f"report_leaks_at_exit() was called, {format_nbytes(sum(left))}: call it "
                "first, or set CUMEM_LEAKS=1, for their lines"
            )
    print("\n".join(lines), file=sys.stderr)


def _places() -> dict[tuple[int, int], int]:
    """The bytes of what is handed out, by address and kind."""
    return {(block.address, block.kind): block.nbytes for block in _core._living()}


# -- who holds it ----------------------------------------------------------------------


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class Holder(Answer):
    """A way from a name to an object.

    Attributes
    ----------
    path : str
        As it would be written, as ``"app.cache['x'][3]"`` or ``"buf in train (app.py:7)"``.
    kind : str
        ``"global"``, ``"local"``, ``"notebook"``, ``"traceback"``, or ``"object"``: one
        that no name was found for.
    hint : str
        What to do about it; ``""`` where that is plain.

    Examples
    --------
    >>> kept = [cumem.empty_pinned(1000)]
    >>> found = cumem.who_holds(kept[0])
    >>> all(isinstance(each, cumem.types.Holder) for each in found.holders)
    True
    """

    path: str
    kind: str
    hint: str


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class Holders(Answer):
    """Who keeps an object alive; ``print()`` shows one a line.

    Attributes
    ----------
    holders : tuple of Holder
    unseen_count : int
        References of those that Python's collector does not see: views, arrays and
        tensors over the memory, transfers under way, other extensions.

    Examples
    --------
    >>> kept = [cumem.empty_pinned(1000)]
    >>> isinstance(cumem.who_holds(kept[0]), cumem.types.Holders)
    True
    """

    holders: tuple[Holder, ...]
    unseen_count: int

    def __len__(self) -> int:
        return len(self.holders)

    def __iter__(self) -> Iterator[Holder]:
        return iter(self.holders)

    def __bool__(self) -> bool:
        return bool(self.holders) or self.unseen_count > 0

    def __repr__(self) -> str:
        return fit(self._text())

    __str__ = __repr__

    def _text(self) -> str:
        lines = [
            f"{each.path}: {each.hint}" if each.hint else each.path
            for each in self.holders
        ]
        if self.unseen_count:
            what = "a view, an array, a tensor, a transfer or an extension holds it"
            lines.append(f"{self.unseen_count} more that cannot be seen: {what}")
        return "\n".join(lines) or "nobody holds it"


_DEPTH: Final = 8  # containers inside each other
_MOST: Final = 100  # ways
_RESET: Final = "history of what was shown; `%reset -f out` or `del` ends it"
_LAST: Final = "the last error that was shown; `del sys.last_exc, sys.last_value, \
sys.last_traceback` ends it"
_VIEW: Final = "an array or another library works on it"
_VIEWS: Final = ("memoryview", "managedbuffer")
_VISITS: Final = 8  # ways through the same container
_HISTORY: Final = ("_", "__", "___")
_LAST_ERRORS: Final = ("last_exc", "last_value", "last_traceback")


def who_holds(obj: object) -> Holders:
    """Find the names that keep an object alive.

    Parameters
    ----------
    obj : object
        A buffer, or anything else. A row of `live` or an address stands for the memory
        there: then all buffers, NumPy arrays, memoryviews and tensors of PyTorch and CuPy
        over it are looked for.

    Returns
    -------
    Holders
        Globals of modules, locals of running functions and of generators, the way from
        there through attributes, containers and closures; a notebook's history (``Out``,
        ``_``) and the error that was shown last (``sys.last_exc``) are told as such.

    Raises
    ------
    ValueError
        If `obj` is an int and no memory that is handed out has that address.

    Notes
    -----
    Looks at every object that Python's collector knows, several times: for a person who
    asks, not for a loop. A NumPy array or a tensor over the memory cannot be looked into
    and is counted instead.

    Examples
    --------
    >>> def train():
    ...     batch = {"x": cumem.empty_pinned(1000)}
    ...     for holder in cumem.who_holds(batch["x"]):
    ...         print(holder.path.partition(" (")[0])
    >>> train()
    batch['x'] in train
    """
    gc.collect()  # what only a cycle holds is gone then
    if isinstance(obj, Living):
        return _who_holds_memory(obj.address, max(obj.nbytes, 1))
    if isinstance(obj, int) and not isinstance(obj, bool):
        for block in _core._living():
            nbytes = max(block.nbytes, 1)
            if block.address <= obj < block.address + nbytes:
                return _who_holds_memory(block.address, nbytes)
        raise ValueError(
            f"no memory that is handed out has the address {obj}: print(cumem.live()) "
            "lists what there is, and an int is taken for an address"
        )
    return _Search(obj, _count_own()).run()


def _who_holds_memory(address: int, nbytes: int) -> Holders:
    """Who holds a buffer, an array or a tensor that lies there."""
    targets = _objects_at(address, address + nbytes)
    found: dict[str, Holder] = {}
    own = _count_own()
    for each in targets:
        search = _Search(each, own)
        search.ignored.add(id(targets))
        found |= {holder.path: holder for holder in search.run()}
    # What the search of a buffer calls an object is an array, which has its own search.
    named = tuple(each for each in found.values() if each.kind != "object")
    holders = named or tuple(found.values())
    is_alive = any(block.address == address for block in _core._living())
    return Holders(holders, int(is_alive and not holders))


def _objects_at(begin: int, end: int) -> list[Any]:
    """Buffers, arrays, memoryviews and tensors over a byte of these.

    The collector does not know arrays, nor dicts and tuples that hold nothing it knows:
    they are found in what refers to them.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo = _roots()
    own = {id(found), id(seen), id(todo)}
    for each in todo:  # which grows
        if id(each) in own:
            continue
        for inner in (each, *gc.get_referents(each)):
            if id(inner) in seen or id(inner) in own:
                continue
            seen.add(id(inner))
            if type(inner) in (dict, tuple) and not gc.is_tracked(inner):
                todo.append(inner)
            span = _span_of(inner)
            if span is not None and span[0] < end and begin < span[1]:
                found[id(inner)] = inner
    return list(found.values())


def _span_of(obj: Any) -> tuple[int, int] | None:
    """Where the memory of an array begins and ends; None: it has none, or is none."""
    try:
        if isinstance(obj, _core.Buffer):
            return (obj.ptr, obj.ptr + max(obj.nbytes, 1))
        if isinstance(obj, memoryview):
            obj = np.asarray(obj)
        if isinstance(obj, np.ndarray):
            low = high = obj.__array_interface__["data"][0]
            for length, step in zip(obj.shape, obj.strides, strict=True):
                low += min((length - 1) * step, 0)
                high += max((length - 1) * step, 0)
            return (low, high + max(obj.itemsize, 1)) if obj.size else None
        library = type(obj).__module__.partition(".")[0]
        if library == "torch" and isinstance(obj, sys.modules["torch"].Tensor):
            begin = obj.data_ptr()
            return (begin, begin + max(obj.untyped_storage().nbytes(), 1))
        if library == "cupy" and isinstance(obj, sys.modules["cupy"].ndarray):
            return (obj.data.ptr, obj.data.ptr + max(obj.nbytes, 1))
    except Exception:  # closed, released, sparse, or of another library's own kind
        return None
    return None


def _count_own() -> int:
    """References that a search itself has."""
    obj = object()
    return _Search(obj, 0).run().unseen_count


class _Search:
    """One search, outwards from the object."""

    def __init__(self, obj: object, own_count: int) -> None:
        self.own_count = own_count
        self.found: dict[str, Holder] = {}
        self.seen: dict[int, Any] = {id(obj): obj}  # kept, so that numbers stay theirs
        self.visits: dict[int, int] = {}
        self.globals: dict[int, list[str]] = {}
        for name, module in list(sys.modules.items()):
            for key, value in list(getattr(module, "__dict__", {}).items()):
                if name == getattr(module, "__name__", None):
                    self.globals.setdefault(id(value), []).append(f"{name}.{key}")
        self.ignored: set[int] = set()  # copies of locals
        #: By the number of what they hold.
        self.untracked: dict[int, list[Any]] = {}
        self.queue: deque[tuple[int, str, int]] = deque([(id(obj), "", 0)])
        self.start = id(obj)
        self.known_count = 0

    def run(self) -> Holders:
        obj = self.seen[self.start]
        self.work()
        if self.own_count and self.count_unseen(obj) > 0:
            self.look_at_untracked(obj)
            self.work()
        return Holders(tuple(self.found.values()), self.count_unseen(obj))

    def work(self) -> None:
        while self.queue and len(self.found) < _MOST:
            self.look(*self.queue.popleft())

    def count_unseen(self, obj: object) -> int:
        return max(sys.getrefcount(obj) - self.known_count - self.own_count, 0)

    def look_at_untracked(self, obj: object) -> None:
        """The collector leaves out dicts and tuples of nothing that it knows, and those
        of such ones: they are found in what holds them."""
        todo = _roots()
        met: set[int] = {id(self.seen), id(self.untracked)}
        for each in todo:  # which grows
            for inner in gc.get_referents(each):
                if (
                    type(inner) in (dict, tuple)
                    and id(inner) not in met
                    and not gc.is_tracked(inner)
                ):
                    met.add(id(inner))
                    todo.append(inner)
                    for value in inner.values() if type(inner) is dict else inner:
                        # Whatever leads on to it: the object, or one more of these.
                        if value is obj or type(value) in (dict, tuple):
                            self.untracked.setdefault(id(value), []).append(inner)
        for inner in self.untracked.get(self.start, ()):
            if id(inner) not in self.seen:
                steps = self.steps(inner, self.start)
                self.known_count += len(steps)
                for step in steps:
                    self.go_on(inner, step, 0)

    def add(self, path: str, kind: str, hint: str = "") -> None:
        if kind == "global":
            module, _, rest = path.partition(".")
            name = rest.partition("[")[0].partition(".")[0]
            if module in ("__main__", "builtins") and (
                name in ("Out", "_oh", *_HISTORY)
                or (name[:1] == "_" and name[1:].isdecimal())
            ):
                kind, hint = "notebook", _RESET
            elif module == "sys" and name in _LAST_ERRORS:
                kind, hint = "traceback", _LAST
        self.found.setdefault(path, Holder(path, kind, hint))

    def look(self, number: int, path: str, depth: int) -> None:
        """At all that refers to it directly."""
        found = len(self.found)
        self.look_at_frames(number, path)
        # Not by what refers to it: the collector may have been told to forget modules.
        for name in self.globals.get(number, ()):
            self.add(name + path, "global")
            self.known_count += number == self.start
        gone_on = False
        own = {id(self.seen), id(self.__dict__), id(self), id(self.untracked)}
        own |= {id(each) for each in self.untracked.values()}
        referrers = gc.get_referrers(self.seen[number])
        if number != self.start:
            referrers += self.untracked.get(number, ())
        for each in referrers:
            if id(each) in self.ignored:
                self.known_count += number == self.start
            if (
                id(each) in own | self.ignored
                or isinstance(each, types.FrameType)
                or _is_module_space(each)
            ):
                continue
            steps = self.steps(each, number)
            if number == self.start:
                self.known_count += len(steps)
            for step in steps:
                gone_on |= self.go_on(each, step + path, depth)
        del referrers
        if number != self.start and not gone_on and len(self.found) == found:
            name = type(self.seen[number]).__name__
            self.add(f"{name} object{path}", "object", _VIEW if name in _VIEWS else "")

    def go_on(self, holder: Any, path: str, depth: int) -> bool:
        """From what holds it, unless that has a name itself."""
        visits = self.visits.get(id(holder), 0)
        if id(holder) == self.start or visits == _VISITS:
            return True
        self.seen[id(holder)] = holder
        self.visits[id(holder)] = visits + 1
        if isinstance(holder, (types.GeneratorType, types.CoroutineType)):
            self.add(f"{path.removeprefix('.')} in {holder.__qualname__}", "local")
        elif depth < _DEPTH:
            self.queue.append((id(holder), path, depth + 1))
        return True

    def look_at_frames(self, number: int, path: str) -> None:
        """At locals of functions that run, and of those that the last error left."""
        for frame in _running_frames():
            self.look_at_locals(frame, number, path, "local", "")
        for name in _LAST_ERRORS:
            error = getattr(sys, name, None)
            trace = getattr(error, "__traceback__", error)
            while isinstance(trace, types.TracebackType):
                if not _is_module(trace.tb_frame):
                    self.look_at_locals(
                        trace.tb_frame, number, path, "traceback", _LAST
                    )
                trace = trace.tb_next

    def look_at_locals(
        self, frame: types.FrameType, number: int, path: str, kind: str, hint: str
    ) -> None:
        local = frame.f_locals
        self.ignored.add(id(local))
        for name, value in local.items():
            if id(value) == number:
                code = frame.f_code
                where = f"{code.co_filename}:{frame.f_lineno}"
                text = f"{name}{path} in {code.co_qualname} ({where})"
                self.known_count += number == self.start and text not in self.found
                self.add(text, kind, hint)

    def steps(self, holder: Any, number: int) -> list[str]:
        """How it is written from there."""
        if isinstance(holder, dict):
            form = ".{}" if _is_instance_dict(holder) else "[{!r}]"
            return [form.format(k) for k, v in list(holder.items()) if id(v) == number]
        if isinstance(holder, (list, tuple, deque)):
            return [f"[{i}]" for i, v in enumerate(holder) if id(v) == number]
        if isinstance(holder, (set, frozenset)):
            return ["{...}"]
        if isinstance(holder, types.CellType):
            return [".cell_contents"]
        if type(holder).__name__ in _VIEWS or id(_space_of(holder)) == number:
            return [""]
        if isinstance(holder, (types.GeneratorType, types.CoroutineType)):
            frame = getattr(holder, "gi_frame", None) or getattr(
                holder, "cr_frame", None
            )
            local = {} if frame is None else frame.f_locals
            return [f".{k}" for k, v in local.items() if id(v) == number] or ["()"]
        return [f".{name}" for name in _attributes(holder, number)] or [".?"]


def _roots() -> list[Any]:
    """From where all objects are found; a program may have told the collector to forget
    its modules, and functions that run are not among what it knows.
    """
    found: list[Any] = gc.get_objects()  # without itself: a list of it would never go
    found += [_space_of(module) for module in list(sys.modules.values())]
    found += [list(frame.f_locals.values()) for frame in _running_frames()]
    return found


def _running_frames() -> list[types.FrameType]:
    """Those whose locals are no globals, less our own."""
    found: list[types.FrameType] = []
    frame: types.FrameType | None  # never this one at the end, a cycle
    for frame in list(sys._current_frames().values()):
        while frame is not None:
            if frame.f_globals is not globals() and not _is_module(frame):
                found.append(frame)
            frame = frame.f_back
    return found


def _is_module_space(space: Any) -> bool:
    name = space.get("__name__") if isinstance(space, dict) else None
    module = sys.modules.get(name) if isinstance(name, str) else None
    return module is not None and _space_of(module) is space


def _is_module(frame: types.FrameType) -> bool:
    """Its locals are globals."""
    return frame.f_locals is frame.f_globals or frame.f_code.co_name == "<module>"


def _is_instance_dict(space: dict[Any, Any]) -> bool:
    return any(
        _space_of(owner) is space
        for owner in gc.get_referrers(space)
        if not isinstance(owner, types.FrameType)
    )


def _space_of(holder: Any) -> Any:
    return getattr(holder, "__dict__", None)


def _attributes(holder: Any, number: int) -> list[str]:
    space = _space_of(holder)
    names = [name for name, value in dict(space or {}).items() if id(value) == number]
    if isinstance(holder, types.FunctionType):
        parts = ("__closure__", "__defaults__", "__kwdefaults__")
        return [name for name in parts if id(getattr(holder, name)) == number]
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if id(getattr(holder, name, None)) == number:
                names.append(name)
    if not names and id(getattr(holder, "base", None)) == number:  # of a view
        names = ["base"]
    return names
