# SPDX-License-Identifier: Apache-2.0
"""What a log says: sums, leaks, the lines that use most, the peak. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from cumem.answers import Answer
from cumem.recording.events import KINDS, OPS, Log
from cumem.recording.stacks import format_frame, user_frame
from cumem.units import format_nbytes, format_rate, format_seconds, format_table

_OP: Final = {name: number for number, name in enumerate(OPS)}
_REGISTERED: Final = KINDS.index("registered")
_LONGEST: Final = 20  # lines of a table
By = Literal["line", "tag", "kind"]

_Ints = NDArray[np.int64]


# -- what is answered ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Group(Answer):
    """What allocations have in common, and what became of them.

    Attributes
    ----------
    name : str
        A line as ``file:line (function)``, a tag or a kind.
    count : int
        Allocations.
    nbytes : int
        Bytes of all of them together.
    peak_nbytes : int
        The most of them that was live at once.
    living_count, living_nbytes : int
        Those that were live at the end.
    """

    name: str
    count: int
    nbytes: int
    peak_nbytes: int
    living_count: int
    living_nbytes: int


@dataclasses.dataclass(frozen=True)
class KindSummary(Group):
    """A kind of memory: a `Group`, and what its pools did.

    Attributes
    ----------
    free_count : int
        Frees.
    grown_nbytes, trimmed_nbytes : int
        What its pools got and gave back.
    """

    free_count: int
    grown_nbytes: int
    trimmed_nbytes: int


@dataclasses.dataclass(frozen=True)
class TransferSummary(Answer):
    """Transfers from a kind of memory to another.

    Attributes
    ----------
    source, target : str
        Kinds.
    count, nbytes : int
    seconds : float
        Of all of them together, each as if it were alone.
    """

    source: str
    target: str
    count: int
    nbytes: int
    seconds: float

    _keys: ClassVar[tuple[str, ...]] = ("gbps",)

    @property
    def gbps(self) -> float:
        """Billions of bytes in a second; 0 where nothing was moved."""
        return self.nbytes * 1e-9 / self.seconds if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Summary(Answer):
    """What happened, in numbers; ``print()`` shows two tables.

    Attributes
    ----------
    seconds : float
        How long the record is.
    event_count, lost_count : int
        Events that it has, and those that no longer fitted.
    peak_nbytes : int
        The most that was live at once, of all kinds but registered.
    kinds : tuple of KindSummary
    transfers : tuple of TransferSummary
        Those that moved most first.
    prefetch_count, prefetch_nbytes : int
    out_of_memory_count : int
        Attempts that failed; an allocation makes several before it raises.
    """

    seconds: float
    event_count: int
    lost_count: int
    peak_nbytes: int
    kinds: tuple[KindSummary, ...]
    transfers: tuple[TransferSummary, ...]
    prefetch_count: int
    prefetch_nbytes: int
    out_of_memory_count: int

    def __str__(self) -> str:
        text = f"{_count(self.event_count, 'event')} in {format_seconds(self.seconds)}"
        if self.lost_count:
            text += f", {self.lost_count} older ones lost"
        lines = [f"{text}; at most {format_nbytes(self.peak_nbytes)} live"]
        if self.kinds:
            head = [
                "kind",
                "allocations",
                "bytes",
                "peak",
                "frees",
                "live",
                "bytes live",
            ]
            rows = [
                [
                    k.name,
                    str(k.count),
                    format_nbytes(k.nbytes),
                    format_nbytes(k.peak_nbytes),
                    str(k.free_count),
                    str(k.living_count),
                    format_nbytes(k.living_nbytes),
                ]
                for k in self.kinds
            ]
            lines += format_table([head, *rows])
        if self.transfers:
            rows = [
                [
                    f"{t.source} -> {t.target}",
                    str(t.count),
                    format_nbytes(t.nbytes),
                    format_seconds(t.seconds),
                    format_rate(t.nbytes, t.seconds) if t.seconds > 0 else "-",
                ]
                for t in self.transfers
            ]
            lines += format_table(
                [["transfers", "count", "bytes", "time", "rate"], *rows]
            )
        if self.prefetch_count:
            text = f"{_count(self.prefetch_count, 'prefetch', 'es')} of "
            lines.append(text + format_nbytes(self.prefetch_nbytes))
        if self.out_of_memory_count:
            lines.append(f"memory was short {_count(self.out_of_memory_count, 'time')}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Leaks(Answer):
    """What was allocated inside and is still alive, by line.

    Attributes
    ----------
    groups : tuple of Group
        Those with most bytes alive first.
    lost_count : int
        Events that no longer fitted: what was allocated in them is not here.
    """

    groups: tuple[Group, ...]
    lost_count: int

    _keys: ClassVar[tuple[str, ...]] = ("count", "nbytes")

    @property
    def count(self) -> int:
        """Allocations that are alive."""
        return sum(group.living_count for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return sum(group.living_nbytes for group in self.groups)

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __str__(self) -> str:
        lines = ["nothing is left"]
        if self.groups:
            lines = [
                f"{_count(self.count, 'buffer')} left, {format_nbytes(self.nbytes)}"
            ]
            lines += _living(self.groups)
        if self.lost_count:
            lines.append(f"without {self.lost_count} older events, which were lost")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Top(Answer):
    """Lines, tags or kinds by what they held at most.

    Attributes
    ----------
    by : str
        ``"line"``, ``"tag"`` or ``"kind"``.
    groups : tuple of Group
        Those with the highest peak first.
    """

    by: str
    groups: tuple[Group, ...]

    def __str__(self) -> str:
        head = [self.by, "peak", "allocations", "bytes", "live"]
        rows = [
            [
                g.name or "no tag",
                format_nbytes(g.peak_nbytes),
                str(g.count),
                format_nbytes(g.nbytes),
                format_nbytes(g.living_nbytes),
            ]
            for g in self.groups[:_LONGEST]
        ]
        return "\n".join(format_table([head, *rows]) + _rest(self.groups))


@dataclasses.dataclass(frozen=True)
class Peak(Answer):
    """When most was live, and what that was.

    Attributes
    ----------
    seconds : float
        When, since the record began.
    nbytes : int
        How much, of all kinds but registered.
    kinds : dict of str to int
        Bytes of each kind then.
    groups : tuple of Group
        Lines whose allocations lived then, as `living_nbytes`; most first.
    """

    seconds: float
    nbytes: int
    kinds: dict[str, int]
    groups: tuple[Group, ...]

    def __str__(self) -> str:
        parts = ", ".join(f"{k} {format_nbytes(n)}" for k, n in self.kinds.items())
        text = f"{format_nbytes(self.nbytes)} live {format_seconds(self.seconds)} in"
        return "\n".join([f"{text}: {parts}" if parts else text, *_living(self.groups)])


@dataclasses.dataclass(frozen=True)
class Change(Answer):
    """A line of a record against the same line of another.

    Attributes
    ----------
    name : str
    before, after : Group or None
        None: it allocates nothing there.
    """

    name: str
    before: Group | None
    after: Group | None

    _keys: ClassVar[tuple[str, ...]] = ("peak_nbytes", "living_nbytes", "count")

    def _change(self, field: str) -> int:
        after = 0 if self.after is None else getattr(self.after, field)
        before = 0 if self.before is None else getattr(self.before, field)
        return int(after - before)

    @property
    def count(self) -> int:
        """More allocations than before."""
        return self._change("count")

    @property
    def peak_nbytes(self) -> int:
        """So much more was live at once."""
        return self._change("peak_nbytes")

    @property
    def living_nbytes(self) -> int:
        """So much more was live at the end."""
        return self._change("living_nbytes")


@dataclasses.dataclass(frozen=True)
class Difference(Answer):
    """What a record has more or less than another.

    Attributes
    ----------
    peak_nbytes : int
        So much higher was the peak.
    kinds : tuple of Change
        Kinds of memory that differ.
    lines : tuple of Change
        Lines that differ, those with the greatest change of their peak first.
    """

    peak_nbytes: int
    kinds: tuple[Change, ...]
    lines: tuple[Change, ...]

    def __str__(self) -> str:
        lines = [f"peak {_signed(self.peak_nbytes)}"]
        for name, changes in (("kind", self.kinds), ("line", self.lines)):
            rows = [
                [
                    c.name,
                    _signed(c.peak_nbytes),
                    f"{c.count:+d}",
                    _signed(c.living_nbytes),
                ]
                for c in changes[:_LONGEST]
            ]
            if rows:
                lines += format_table([[name, "peak", "allocations", "live"], *rows])
                lines += _rest(changes)
        return "\n".join(lines)


# -- text ------------------------------------------------------------------------------


def _count(count: int, what: str, ending: str = "s") -> str:
    return f"{count} {what}{ending * (count != 1)}"


def _signed(nbytes: int) -> str:
    return ("-" if nbytes < 0 else "+") + format_nbytes(abs(nbytes))


def _living(groups: tuple[Group, ...]) -> list[str]:
    rows = [
        [f"  {format_nbytes(g.living_nbytes)}", f"{g.living_count} x", f"  {g.name}"]
        for g in groups[:_LONGEST]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{a.rjust(widths[0])}  {b.rjust(widths[1])}{name}" for a, b, name in rows]
    return lines + _rest(groups)


def _rest(groups: tuple[Any, ...]) -> list[str]:
    more = len(groups) - _LONGEST
    return [f"  and {more} more"] if more > 0 else []


# -- allocations -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Spans:
    """Allocations of a log, with those that lived when it began first, and when each
    ended: each array has one entry for each."""

    rows: NDArray[Any]  #: events "allocate"
    begin: _Ints  #: place in the log; -1: before it
    end: _Ints  #: place in the log; its length: not yet

    @property
    def nbytes(self) -> _Ints:
        """Bytes of each."""
        return self.rows["nbytes"].astype(np.int64)


def find_spans(log: Log) -> Spans:
    """Match frees with what they free.

    A free of something that is not known, as of one whose allocation no longer fitted,
    is left out.
    """
    events = np.concatenate([log.living, log.events])
    before = len(log.living)
    places = np.flatnonzero(events["op"] <= _OP["free"])
    chosen = events[places]
    # Registered pages may be those of a pool, whose address is then there twice.
    apart = chosen["kind"] == _REGISTERED
    order = np.lexsort((places, chosen["address"], apart))
    key = chosen["address"][order]
    same = np.zeros(len(order), bool)
    same[:-1] = (key[1:] == key[:-1]) & (apart[order][1:] == apart[order][:-1])
    follower = np.full(len(order), len(events))
    follower[:-1] = np.where(same[:-1], places[order][1:], len(events))
    allocates = (chosen["op"] == _OP["allocate"])[order]
    begin, end = places[order][allocates], follower[allocates]
    back = np.argsort(begin, kind="stable")
    begin, end = begin[back], end[back]
    return Spans(events[begin], np.maximum(begin - before, -1), end - before)


def _course(begin: _Ints, end: _Ints, nbytes: _Ints, length: int) -> _Ints:
    """Bytes that live after each event; the first: before them all."""
    change = np.zeros(length + 2, np.int64)
    np.add.at(change, begin + 1, nbytes)
    np.subtract.at(change, end + 1, nbytes)
    return np.cumsum(change)[: length + 1]


def _name_lines(log: Log, spans: Spans) -> tuple[list[str], list[_Ints]]:
    known, inverse = np.unique(spans.rows["stack"], return_inverse=True)
    names: dict[str, int] = {}
    number = [
        names.setdefault(format_frame(user_frame(log.stacks[int(stack)])), len(names))
        for stack in known
    ]
    return list(names), [np.array(number, np.int64)[inverse.reshape(-1)]]


def _name_kinds(_log: Log, spans: Spans) -> tuple[list[str], list[_Ints]]:
    return list(KINDS), [spans.rows["kind"].astype(np.int64)]


def _name_tags(log: Log, spans: Spans) -> tuple[list[str], list[_Ints]]:
    """Each tag counts for those around it as well: a list for each depth, -1: none."""
    names: dict[str, int] = {}
    paths = []
    for tag in log.tags:
        parts = tag.split("/") if tag else [""]
        ends = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        paths.append([names.setdefault(end, len(names)) for end in ends])
    depth = max(map(len, paths), default=0)
    table = np.full((depth, len(paths)), -1, np.int64)
    for i, path in enumerate(paths):
        table[: len(path), i] = path
    return list(names), [row[spans.rows["tag"]] for row in table]


_NAMES: dict[str, Callable[[Log, Spans], tuple[list[str], list[_Ints]]]] = {
    "line": _name_lines,
    "tag": _name_tags,
    "kind": _name_kinds,
}


def _groups(log: Log, spans: Spans, by: str, lives: NDArray[np.bool_]) -> list[Group]:
    """Every group that has an allocation; `lives`: those that count as living."""
    names, levels = _NAMES[by](log, spans)
    owner = np.concatenate([np.zeros(0, np.int64), *levels])
    which = np.tile(np.arange(len(spans.rows)), len(levels))[owner >= 0]
    owner = owner[owner >= 0]
    nbytes, inside = spans.nbytes[which], spans.begin[which] >= 0
    size = len(names)

    def total(weights: NDArray[Any]) -> list[int]:
        found = np.zeros(size, np.int64)
        np.add.at(found, owner, weights.astype(np.int64))
        return [int(each) for each in found]

    # What lives of each group, as its allocations begin and end, one after the other.
    at = np.concatenate([spans.begin[which], spans.end[which]])
    change = np.concatenate([nbytes, -nbytes])
    group = np.concatenate([owner, owner])
    order = np.lexsort((at, group))
    course = np.cumsum(change[order])  # a group's changes add up to 0
    peaks = np.zeros(size, np.int64)
    np.maximum.at(peaks, group[order], course)
    counts, sums = total(inside), total(np.where(inside, nbytes, 0))
    alive, alive_nbytes = total(lives[which]), total(np.where(lives[which], nbytes, 0))
    present = np.unique(owner)
    return [
        Group(names[i], counts[i], sums[i], int(peaks[i]), alive[i], alive_nbytes[i])
        for i in present
    ]


def _most_living(groups: list[Group]) -> tuple[Group, ...]:
    found = (group for group in groups if group.living_count)
    return tuple(sorted(found, key=lambda g: (-g.living_nbytes, g.name)))


# -- answers ---------------------------------------------------------------------------


def _peak(log: Log, spans: Spans) -> tuple[int, int]:
    """Place in the log, -1: before it, and how much then."""
    own = spans.rows["kind"] != _REGISTERED
    course = _course(
        spans.begin[own], spans.end[own], spans.nbytes[own], len(log.events)
    )
    place = int(np.argmax(course))
    return place - 1, int(course[place])


def summarize(log: Log) -> Summary:
    """Add up a log."""
    spans = find_spans(log)
    events = log.events
    groups = {g.name: g for g in _groups(log, spans, "kind", _is_living(log, spans))}
    kinds = []
    for number, name in enumerate(KINDS):
        mine = events[events["kind"] == number]
        group = groups.get(name, Group(name, 0, 0, 0, 0, 0))
        sums = [
            int(mine["nbytes"][mine["op"] == _OP[op]].sum()) for op in ("grow", "trim")
        ]
        frees = int((mine["op"] == _OP["free"]).sum())
        if name in groups or frees or any(sums):
            fields = {f.name: getattr(group, f.name) for f in dataclasses.fields(Group)}
            kinds.append(
                KindSummary(
                    **fields,
                    free_count=frees,
                    grown_nbytes=sums[0],
                    trimmed_nbytes=sums[1],
                )
            )
    moved = events[events["op"] == _OP["transfer"]]
    transfers = []
    for pair in np.unique(moved[["source_kind", "kind"]]):
        each = moved[
            (moved["source_kind"] == pair["source_kind"])
            & (moved["kind"] == pair["kind"])
        ]
        transfers.append(
            TransferSummary(
                KINDS[pair["source_kind"]],
                KINDS[pair["kind"]],
                len(each),
                int(each["nbytes"].sum()),
                float(each["value"].sum()) * 1e-9,
            )
        )
    prefetched = events[events["op"] == _OP["prefetch"]]
    return Summary(
        log.duration_ns * 1e-9,
        len(events),
        log.lost_count,
        _peak(log, spans)[1],
        tuple(kinds),
        tuple(sorted(transfers, key=lambda t: -t.nbytes)),
        len(prefetched),
        int(prefetched["nbytes"].sum()),
        int((events["op"] == _OP["out_of_memory"]).sum()),
    )


def _is_living(log: Log, spans: Spans) -> NDArray[np.bool_]:
    living: NDArray[np.bool_] = spans.end >= len(log.events)
    return living


def find_leaks(log: Log) -> Leaks:
    """What was allocated inside and never freed, by line; not what copies go through."""
    spans = find_spans(log)
    staging = spans.rows["kind"] == KINDS.index("staging")
    left = _is_living(log, spans) & (spans.begin >= 0) & ~staging
    return Leaks(_most_living(_groups(log, spans, "line", left)), log.lost_count)


def find_top(log: Log, by: str) -> Top:
    """Groups by their peak."""
    if by not in _NAMES:
        raise ValueError(f"by must be 'line', 'tag' or 'kind', not {by!r}")
    spans = find_spans(log)
    groups = _groups(log, spans, by, _is_living(log, spans))
    return Top(by, tuple(sorted(groups, key=lambda g: (-g.peak_nbytes, g.name))))


def find_peak(log: Log) -> Peak:
    """When most was live, and what."""
    spans = find_spans(log)
    place, nbytes = _peak(log, spans)
    lived = (spans.begin <= place) & (spans.end > place)
    kinds = {
        g.name: g.living_nbytes
        for g in _groups(log, spans, "kind", lived)
        if g.living_count
    }
    seconds = float(log.events["time_ns"][place]) * 1e-9 if place >= 0 else 0.0
    groups = _most_living(_groups(log, spans, "line", lived))
    return Peak(seconds, nbytes, kinds, groups)


def find_difference(before: Log, after: Log) -> Difference:
    """What `after` has more."""
    both = [find_spans(log) for log in (before, after)]
    peaks = [
        _peak(log, spans)[1] for log, spans in zip((before, after), both, strict=True)
    ]

    def changes(by: str) -> tuple[Change, ...]:
        one, two = (
            {g.name: g for g in _groups(log, spans, by, _is_living(log, spans))}
            for log, spans in zip((before, after), both, strict=True)
        )
        found = (Change(n, one.get(n), two.get(n)) for n in {**one, **two})
        differ = (c for c in found if c.before != c.after)
        return tuple(sorted(differ, key=lambda c: (-abs(c.peak_nbytes), c.name)))

    return Difference(peaks[1] - peaks[0], changes("kind"), changes("line"))
