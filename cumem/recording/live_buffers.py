# SPDX-License-Identifier: Apache-2.0
"""Lists what is alive now, finds who keeps it alive, and reports leaks at exit.

`who_holds` searches outwards from an object, from each holder to that holder's own holders,
until it reaches names: globals of modules or locals of functions. It asks Python's garbage
collector for the holders (`gc.get_referrers`). Three things complicate this:

- The collector tracks neither arrays nor dicts and tuples without tracked contents. The
  search finds them through the objects that refer to them (`_roots`).
- The search itself holds references, and those must neither be reported nor counted.
- References from C, such as a transfer's, cannot be seen at all. Their number is the
  object's reference count less all references that were found.
"""

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

_LONGEST: Final = 40  # the most rows that are shown
_NO_LINES: Final = """\
  where they were made: run the program with CUMEM_RECORD=FILE, or make them
  inside `with cumem.record():` and ask there
  who holds one: cumem.who_holds(row)"""


# -- what is alive ---------------------------------------------------------------------


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class Living(Answer):
    """One piece of memory that is in use.

    Attributes
    ----------
    kind : str
        ``"pinned"`` and so on; ``"registered"`` is memory of others that is page-locked,
        and ``"staging"`` is memory that a copy uses on the way.
    device : int
    address : int
    nbytes, requested_nbytes : int
        The bytes that the memory takes, and those that were asked for.
    line : str or None
        The line that allocated it, as ``file:line (function)``; None unless a record with
        stacks was running then and still is.
    tag : str
    seconds : float or None
        The age of the memory; None unless a record was running when it was allocated and
        still is.

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
    """Everything that is alive at one moment; ``print()`` shows a table.

    Attributes
    ----------
    buffers : tuple of Living
        All pieces, the largest first.

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
        """The bytes of all pieces, including registered memory."""
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
        """Whether no running record saw any of these pieces being allocated."""
        return bool(self.buffers) and all(each.seconds is None for each in self.buffers)


def live() -> LivingBuffers:
    """List the memory that is in use now, with the lines that allocated it.

    Returns
    -------
    LivingBuffers
        The memory of all pools, including what copies use on the way, and what `register`
        has page-locked. Line, tag and age are known for memory that was allocated while a
        record was running, as long as that record runs. The line is known if the record
        has stacks for that size.

    Notes
    -----
    This opens no driver. It takes as long as reading the running record, which is less
    than a second for a million events.

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
    """Return the line, tag and age that running records have, by address and kind."""
    running = sorted(records.open_records(), key=lambda each: each._begin)
    if not running:
        return {}
    log: Log = running[0].log
    made = of_op(log, ALLOCATE)[::-1]
    # The latest allocation at an address is the one that is alive.
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
    """Print at exit, by line, the memory allocated after this call that is still alive.

    The report is printed to stderr after a garbage collection. Memory that globals still
    hold is part of it. For memory that was allocated before this call only the sum is
    printed, since its lines are not known, so call this first. ``CUMEM_LEAKS=1`` in the
    environment does the same from the import on. A forked child does not report, and
    neither does a process that is killed.

    Examples
    --------
    >>> cumem.report_leaks_at_exit()
    """
    older = frozenset(_places())
    rec = records.record()
    rec.start()
    atexit.register(_report, rec, os.getpid(), older)


def report_leaks_if_asked(text: str) -> None:
    """Obey the variable ``CUMEM_LEAKS``.

    A wrong value causes a warning and no report, since an error would make the import of
    cumem fail.
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
                f"  and {format_count(len(left), 'buffer')} from before "
                f"report_leaks_at_exit() was called, {format_nbytes(sum(left))}: call it "
                "first, or set CUMEM_LEAKS=1, for their lines"
            )
    print("\n".join(lines), file=sys.stderr)


def _places() -> dict[tuple[int, int], int]:
    """Return the size in bytes of all memory in use, by address and kind."""
    return {(block.address, block.kind): block.nbytes for block in _core._living()}


# -- who holds an object ---------------------------------------------------------------


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class Holder(Answer):
    """A name or object that keeps an object alive, and the path from it to the object.

    Attributes
    ----------
    path : str
        The expression that leads to the object, such as ``"app.cache['x'][3]"`` or
        ``"buf in train (app.py:7)"``.
    kind : str
        ``"global"``, ``"local"``, ``"notebook"``, ``"traceback"``, or ``"object"`` if no
        name was found for the holder.
    hint : str
        What to do about it; ``""`` if that is obvious.

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
    """Who keeps an object alive; ``print()`` shows one holder per line.

    Attributes
    ----------
    holders : tuple of Holder
    unseen_count : int
        The number of references that Python's garbage collector does not see: those of
        views, arrays and tensors over the memory, of unfinished transfers, and of other
        extensions.

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


_DEPTH: Final = 8  # the most nested containers that a path goes through
_MOST: Final = 100  # the most holders that are reported
_RESET: Final = "history of what was shown; `%reset -f out` or `del` ends it"
_LAST: Final = "the last error that was shown; `del sys.last_exc, sys.last_value, \
sys.last_traceback` ends it"
_VIEW: Final = "an array or another library works on it"
_VIEWS: Final = ("memoryview", "managedbuffer")
_VISITS: Final = 8  # the most paths through the same container
_HISTORY: Final = ("_", "__", "___")
_LAST_ERRORS: Final = ("last_exc", "last_value", "last_traceback")


def who_holds(obj: object) -> Holders:
    """Find the names that keep an object alive.

    Parameters
    ----------
    obj : object
        A buffer or any other object. If it is a row of `live` or an address, the search is
        for all buffers, NumPy arrays, memoryviews and tensors of PyTorch and CuPy over the
        memory there.

    Returns
    -------
    Holders
        Globals of modules and locals of running functions and of generators, each with the
        path from there through attributes, containers and closures. A notebook's history
        (``Out``, ``_``) and the last error that was shown (``sys.last_exc``) are marked as
        such.

    Raises
    ------
    ValueError
        If `obj` is an int and no memory with that address is in use.

    Notes
    -----
    This looks at every object that Python's garbage collector knows, several times, so it
    is meant for interactive use and not for a loop. References from NumPy arrays and
    tensors over the memory cannot be seen, and are only counted.

    Examples
    --------
    >>> def train():
    ...     batch = {"x": cumem.empty_pinned(1000)}
    ...     for holder in cumem.who_holds(batch["x"]):
    ...         print(holder.path.partition(" (")[0])
    >>> train()
    batch['x'] in train
    """
    gc.collect()  # nothing that only a cycle holds is left then
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
    """Return who holds a buffer, an array or a tensor over this memory."""
    targets = _objects_at(address, address + nbytes)
    found: dict[str, Holder] = {}
    own = _count_own()
    for each in targets:
        search = _Search(each, own)
        search.ignored.add(id(targets))
        found |= {holder.path: holder for holder in search.run()}
    # The search for a buffer's holders may end at an array over it, which has no name.
    # There is a separate search for the holders of that array. So objects without a name
    # are reported only if no name was found at all.
    named = tuple(each for each in found.values() if each.kind != "object")
    holders = named or tuple(found.values())
    is_alive = any(block.address == address for block in _core._living())
    return Holders(holders, int(is_alive and not holders))


def _objects_at(begin: int, end: int) -> list[Any]:
    """Return the buffers, arrays, memoryviews and tensors over any of these bytes.

    The collector tracks neither arrays nor dicts and tuples without tracked contents. This
    function finds them through the objects that refer to them.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo = _roots()
    own = {id(found), id(seen), id(todo)}
    for each in todo:  # the list grows meanwhile
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
    """Return where the memory of an array begins and ends, or None if it has none."""
    try:
        if isinstance(obj, _core.Buffer):
            begin = obj._address
            return (begin, begin + max(obj.nbytes, 1))
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
    except Exception:  # closed, released, sparse, or a tensor of an unknown sort
        return None
    return None


def _count_own() -> int:
    """Return how many references to its object the search itself holds."""
    obj = object()
    return _Search(obj, 0).run().unseen_count


class _Search:
    """One search outwards from an object; see the top of this file."""

    def __init__(self, obj: object, own_count: int) -> None:
        self.own_count = own_count
        self.found: dict[str, Holder] = {}
        # What was seen is kept alive here, so that its ids stay unique.
        self.seen: dict[int, Any] = {id(obj): obj}
        self.visits: dict[int, int] = {}
        self.globals: dict[int, list[str]] = {}
        for name, module in list(sys.modules.items()):
            for key, value in list(getattr(module, "__dict__", {}).items()):
                if name == getattr(module, "__name__", None):
                    self.globals.setdefault(id(value), []).append(f"{name}.{key}")
        self.ignored: set[int] = set()  # dicts of locals that the search itself made
        #: Untracked dicts and tuples, by the ids of what they contain.
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
        """Find dicts and tuples that the collector leaves out because of their contents.

        Those that contain only such dicts and tuples are left out as well.
        """
        todo = _roots()
        met: set[int] = {id(self.seen), id(self.untracked)}
        for each in todo:  # the list grows meanwhile
            for inner in gc.get_referents(each):
                if (
                    type(inner) in (dict, tuple)
                    and id(inner) not in met
                    and not gc.is_tracked(inner)
                ):
                    met.add(id(inner))
                    todo.append(inner)
                    for value in inner.values() if type(inner) is dict else inner:
                        # Keep items that may lead to the object: the object itself, or a
                        # dict or tuple.
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
        """Look at everything that refers directly to the object with this id."""
        found = len(self.found)
        self.look_at_frames(number, path)
        # Globals are not found by their referrers, because a program may have told the
        # collector to ignore its modules (gc.freeze).
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
        """Continue with what holds the holder, or end here if the holder has a name."""
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
        """Look at locals of running functions, and of those that the last error left."""
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
        """Return the ways to write the object with this id as a part of `holder`."""
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
    """Return objects from which all others can be reached.

    A program may have told the collector to ignore its modules (gc.freeze), and the
    collector does not know running functions, so these are added.
    """
    # The list must not be in itself, or it would never be freed.
    found: list[Any] = gc.get_objects()
    found += [_space_of(module) for module in list(sys.modules.values())]
    found += [list(frame.f_locals.values()) for frame in _running_frames()]
    return found


def _running_frames() -> list[types.FrameType]:
    """Return the running frames of functions, without those of this file."""
    found: list[types.FrameType] = []
    frame: types.FrameType | None  # None in the end, as its own frame makes a cycle
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
    """Return whether the locals of a frame are globals of a module."""
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
    if not names and id(getattr(holder, "base", None)) == number:  # holder is a view
        names = ["base"]
    return names
