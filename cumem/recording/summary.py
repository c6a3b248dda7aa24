# SPDX-License-Identifier: Apache-2.0
"""Sums a log up, and finds leaks, the lines that use most, the peak, and differences.

Each answer is a frozen dataclass that prints itself as a table. The functions at the end
compute them, and depend on the log alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray

from cumem.base.answer import Answer
from cumem.base.units import (
    fit,
    format_count,
    format_nbytes,
    format_rate,
    format_seconds,
    format_table,
)
from cumem.recording.events import (
    FREE,
    GAINS,
    KINDS,
    LOSSES,
    OUT_OF_MEMORY,
    PREFETCH,
    Log,
)
from cumem.recording.pairing import Lives, pair
from cumem.recording.reading import copies, of_op
from cumem.recording.stacks import format_frame

_REGISTERED: Final = KINDS.index("registered")
_LONGEST: Final = 20  # the most rows of a table
By = Literal["line", "tag", "kind"]

_Ints = NDArray[np.int64]


# -- answers ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Group(Answer):
    """Allocations of one line, tag or kind, in numbers.

    Attributes
    ----------
    name : str
        The line as ``file:line (function)``, the tag, or the kind.
    count : int
        The number of allocations.
    nbytes : int
        The bytes of all of them together.
    peak_nbytes : int
        The largest number of their bytes that was alive at once.
    living_count, living_nbytes : int
        The number of allocations that were alive at the end, and their bytes.
    """

    name: str
    count: int
    nbytes: int
    peak_nbytes: int
    living_count: int
    living_nbytes: int


@dataclasses.dataclass(frozen=True)
class KindSummary(Group):
    """The allocations of one kind of memory, and what its pools did.

    Attributes
    ----------
    free_count : int
        The number of frees.
    grown_nbytes, trimmed_nbytes : int
        The bytes that the pools of this kind got from the system, and those that they gave
        back. Bytes that woke or went to sleep count too.
    """

    free_count: int
    grown_nbytes: int
    trimmed_nbytes: int


@dataclasses.dataclass(frozen=True)
class TransferSummary(Answer):
    """The transfers from one kind of memory to another.

    Attributes
    ----------
    source, target : str
        The kinds.
    count, nbytes : int
    seconds : float
        The sum of the durations of all transfers, even if they ran at the same time.
    """

    source: str
    target: str
    count: int
    nbytes: int
    seconds: float

    _keys: ClassVar[tuple[str, ...]] = ("gbps",)

    @property
    def gbps(self) -> float:
        """The rate in billions of bytes per second; 0 if nothing was moved."""
        return self.nbytes * 1e-9 / self.seconds if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Summary(Answer):
    """What happened during a record, in numbers; ``print()`` shows two tables.

    Attributes
    ----------
    seconds : float
        The length of the record.
    event_count, lost_count : int
        The number of events in the record, and of older ones that were dropped.
    peak_nbytes : int
        The most bytes that were alive at once, of all kinds but registered.
    kinds : tuple of KindSummary
    transfers : tuple of TransferSummary
        Those that moved the most bytes come first.
    prefetch_count, prefetch_nbytes : int
    out_of_memory_count : int
        The number of failed attempts; an allocation makes several before it raises.
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

    def __repr__(self) -> str:
        return fit(self._text())

    __str__ = __repr__

    def _text(self) -> str:
        events = format_count(self.event_count, "event")
        text = f"{events} in {format_seconds(self.seconds)}"
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
            text = f"{format_count(self.prefetch_count, 'prefetch', 'es')} of "
            lines.append(text + format_nbytes(self.prefetch_nbytes))
        if self.out_of_memory_count:
            lines.append(
                f"memory was short {format_count(self.out_of_memory_count, 'time')}"
            )
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Leaks(Answer):
    """The allocations of a record that are still alive, by line.

    Attributes
    ----------
    groups : tuple of Group
        Those with the most bytes alive come first.
    lost_count : int
        The number of events that were dropped; their allocations are missing here.
    """

    groups: tuple[Group, ...]
    lost_count: int

    _keys: ClassVar[tuple[str, ...]] = ("count", "nbytes")

    @property
    def count(self) -> int:
        """The number of allocations that are alive."""
        return sum(group.living_count for group in self.groups)

    @property
    def nbytes(self) -> int:
        """The bytes of the allocations that are alive."""
        return sum(group.living_nbytes for group in self.groups)

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __repr__(self) -> str:
        return fit(self._text())

    __str__ = __repr__

    def _text(self) -> str:
        lines = ["nothing is left"]
        if self.groups:
            lines = [
                f"{format_count(self.count, 'buffer')} left, {format_nbytes(self.nbytes)}"
            ]
            lines += _living(self.groups)
        if self.lost_count:
            lines.append(f"without {self.lost_count} older events, which were lost")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Top(Answer):
    """Lines, tags or kinds, sorted by the most bytes that they had alive at once.

    Attributes
    ----------
    by : str
        ``"line"``, ``"tag"`` or ``"kind"``.
    groups : tuple of Group
        Those with the highest peak come first.
    """

    by: str
    groups: tuple[Group, ...]

    def __repr__(self) -> str:
        return fit(self._text())

    __str__ = __repr__

    def _text(self) -> str:
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
    """The moment when the most bytes were alive, and the allocations they belonged to.

    Attributes
    ----------
    seconds : float
        The time of the peak, since the record began.
    nbytes : int
        The bytes alive then, of all kinds but registered.
    kinds : dict of str to int
        The bytes of each kind then.
    groups : tuple of Group
        The lines that had allocations alive then, with the bytes of these in
        `living_nbytes`. The line with the most bytes comes first.
    """

    seconds: float
    nbytes: int
    kinds: dict[str, int]
    groups: tuple[Group, ...]

    def __repr__(self) -> str:
        return fit(self._text())

    __str__ = __repr__

    def _text(self) -> str:
        parts = ", ".join(f"{k} {format_nbytes(n)}" for k, n in self.kinds.items())
        text = f"{format_nbytes(self.nbytes)} live {format_seconds(self.seconds)} in"
        return "\n".join([f"{text}: {parts}" if parts else text, *_living(self.groups)])


@dataclasses.dataclass(frozen=True)
class Change(Answer):
    """How a line, or a kind, differs between two records.

    Attributes
    ----------
    name : str
    before, after : Group or None
        The numbers in each record; None for a record in which nothing was allocated.
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
        """How many more allocations there are than before."""
        return self._change("count")

    @property
    def peak_nbytes(self) -> int:
        """How many more bytes were alive at once."""
        return self._change("peak_nbytes")

    @property
    def living_nbytes(self) -> int:
        """How many more bytes were alive at the end."""
        return self._change("living_nbytes")


@dataclasses.dataclass(frozen=True)
class Difference(Answer):
    """The differences between two records.

    Attributes
    ----------
    peak_nbytes : int
        By how many bytes the peak is higher; negative if it is lower.
    kinds : tuple of Change
        The kinds of memory that differ.
    lines : tuple of Change
        The lines that differ; those whose peaks differ most come first.
    """

    peak_nbytes: int
    kinds: tuple[Change, ...]
    lines: tuple[Change, ...]

    def __repr__(self) -> str:
        return fit(self._text())

    __str__ = __repr__

    def _text(self) -> str:
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


def _name_lines(log: Log, lives: Lives) -> tuple[list[str], list[_Ints]]:
    known, inverse = np.unique(lives.begun["stack"], return_inverse=True)
    names: dict[str, int] = {}
    number = [
        names.setdefault(format_frame(log.user_frame(int(stack))), len(names))
        for stack in known
    ]
    return list(names), [np.array(number, np.int64)[inverse.reshape(-1)]]


def _name_kinds(_log: Log, lives: Lives) -> tuple[list[str], list[_Ints]]:
    return list(KINDS), [lives.begun["kind"].astype(np.int64)]


def _name_tags(log: Log, lives: Lives) -> tuple[list[str], list[_Ints]]:
    """Return names, and for each depth of nested tags the index of each life's name or -1.

    An allocation in a nested tag counts for the tags around it too, so a life may have an
    index at several depths.
    """
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
    return list(names), [row[lives.begun["tag"]] for row in table]


_NAMES: dict[str, Callable[[Log, Lives], tuple[list[str], list[_Ints]]]] = {
    "line": _name_lines,
    "tag": _name_tags,
    "kind": _name_kinds,
}


def _groups(log: Log, lives: Lives, by: str, living: NDArray[np.bool_]) -> list[Group]:
    """Return all groups with an allocation; `living` says which lives count as alive."""
    names, levels = _NAMES[by](log, lives)
    owner = np.concatenate([np.zeros(0, np.int64), *levels])
    which = np.tile(np.arange(len(lives.begin)), len(levels))[owner >= 0]
    owner = owner[owner >= 0]
    nbytes, inside = lives.nbytes[which], lives.is_inside[which]
    size = len(names)

    def total(weights: NDArray[Any]) -> list[int]:
        found = np.zeros(size, np.int64)
        np.add.at(found, owner, weights.astype(np.int64))
        return [int(each) for each in found]

    # Sort the ends and beginnings of each group's lives by row, with ends first in the same
    # row, and add up the bytes. The largest sum is the group's peak.
    at = np.concatenate([lives.end[which], lives.begin[which]])
    change = np.concatenate([-nbytes, nbytes])
    group = np.concatenate([owner, owner])
    order = np.lexsort((at, group))
    course = np.cumsum(change[order])  # each group adds up to 0 in the end
    peaks = np.zeros(size, np.int64)
    np.maximum.at(peaks, group[order], course)
    counts, sums = total(inside), total(np.where(inside, nbytes, 0))
    alive, alive_nbytes = (
        total(living[which]),
        total(np.where(living[which], nbytes, 0)),
    )
    present = np.unique(owner)
    return [
        Group(names[i], counts[i], sums[i], int(peaks[i]), alive[i], alive_nbytes[i])
        for i in present
    ]


def _most_living(groups: list[Group]) -> tuple[Group, ...]:
    found = (group for group in groups if group.living_count)
    return tuple(sorted(found, key=lambda g: (-g.living_nbytes, g.name)))


# -- answers ---------------------------------------------------------------------------


def _peak(lives: Lives) -> tuple[int, int]:
    """Return the row after which the most bytes were alive, and how many."""
    own = lives.begun["kind"] != _REGISTERED
    change = np.zeros(len(lives.rows) + 1, np.int64)
    change[lives.begin[own]] = lives.nbytes[own]
    change[lives.end[own]] -= lives.nbytes[own]
    course = np.cumsum(change)[:-1]
    row = int(np.argmax(course)) if len(course) else -1
    return max(row, lives.before_count - 1), int(np.max(course, initial=0))


def summarize(log: Log) -> Summary:
    """Add up a log."""
    lives = pair(log)
    events = log.events
    groups = {g.name: g for g in _groups(log, lives, "kind", lives.is_left)}
    kinds = []
    for number, name in enumerate(KINDS):
        mine = events[events["kind"] == number]
        group = groups.get(name, Group(name, 0, 0, 0, 0, 0))
        sums = [
            int(mine["nbytes"][np.isin(mine["op"], ops)].sum())
            for ops in (GAINS, LOSSES)
        ]
        frees = int((mine["op"] == FREE).sum())
        if name in groups or frees or any(sums):
            kinds.append(
                KindSummary(
                    **vars(group),
                    free_count=frees,
                    grown_nbytes=sums[0],
                    trimmed_nbytes=sums[1],
                )
            )
    transfers = (TransferSummary(*each) for each in copies(log))
    prefetched = of_op(log, PREFETCH)
    return Summary(
        log.duration_ns * 1e-9,
        len(events),
        log.lost_count,
        _peak(lives)[1],
        tuple(kinds),
        tuple(transfers),
        len(prefetched),
        int(prefetched["nbytes"].sum()),
        len(of_op(log, OUT_OF_MEMORY)),
    )


def find_leaks(log: Log) -> Leaks:
    """Find the allocations of the record that were not freed, by line, without staging."""
    lives = pair(log)
    staging = lives.begun["kind"] == KINDS.index("staging")
    left = lives.is_left & lives.is_inside & ~staging
    return Leaks(_most_living(_groups(log, lives, "line", left)), log.lost_count)


def find_top(log: Log, by: str) -> Top:
    """Sort groups by their peaks."""
    if by not in _NAMES:
        raise ValueError(f"by must be 'line', 'tag' or 'kind', not {by!r}")
    lives = pair(log)
    groups = _groups(log, lives, by, lives.is_left)
    return Top(by, tuple(sorted(groups, key=lambda g: (-g.peak_nbytes, g.name))))


def find_peak(log: Log) -> Peak:
    """Find the moment when the most bytes were alive, and the lines that had them."""
    lives = pair(log)
    row, nbytes = _peak(lives)
    lived = (lives.begin <= row) & (lives.end > row)
    kinds = {
        g.name: g.living_nbytes
        for g in _groups(log, lives, "kind", lived)
        if g.living_count
    }
    is_inside = row >= lives.before_count
    seconds = float(lives.rows["time_ns"][row]) * 1e-9 if is_inside else 0.0
    groups = _most_living(_groups(log, lives, "line", lived))
    return Peak(seconds, nbytes, kinds, groups)


def find_difference(before: Log, after: Log) -> Difference:
    """Find the differences of `after` from `before`."""
    both = [pair(log) for log in (before, after)]
    peaks = [_peak(lives)[1] for lives in both]

    def changes(by: str) -> tuple[Change, ...]:
        one, two = (
            {g.name: g for g in _groups(log, lives, by, lives.is_left)}
            for log, lives in zip((before, after), both, strict=True)
        )
        found = (Change(n, one.get(n), two.get(n)) for n in {**one, **two})
        differ = (c for c in found if c.before != c.after)
        return tuple(sorted(differ, key=lambda c: (-abs(c.peak_nbytes), c.name)))

    return Difference(peaks[1] - peaks[0], changes("kind"), changes("line"))
