# SPDX-License-Identifier: Apache-2.0
"""Answers questions about a log: bytes alive over time, leftover memory, and copies."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cumem.recording.events import KINDS, TRANSFER, Frame, Log
from cumem.recording.pairing import changes, pair

_REGISTERED, _STAGING = KINDS.index("registered"), KINDS.index("staging")


class BytesOverTime(NamedTuple):
    """The bytes that are alive, over time.

    Attributes
    ----------
    times_ns : ndarray of int64, 1-D
        The times at which the bytes change. The first is 0, the last the end of the record.
    rows : ndarray of int64, 2-D
        The bytes alive from each time on, with a row for each of KINDS.
    """

    times_ns: NDArray[Any]
    rows: NDArray[Any]

    @property
    def total(self) -> NDArray[Any]:
        """The bytes of all kinds but "registered", which is memory of others."""
        total: NDArray[Any] = np.delete(self.rows, _REGISTERED, axis=0).sum(axis=0)
        return total

    @property
    def height(self) -> int:
        """The largest sum of all kinds, "registered" included, which a plot must show."""
        return int(self.rows.sum(axis=0).max())

    def sampled(self, count: int) -> BytesOverTime:
        """Reduce it to `count` steps of equal length.

        The bytes of a step are those at its moment with the most bytes alive.
        """
        times, total = self.times_ns, self.total
        end = max(int(times[-1]), 1)
        step = np.minimum(times * count // end, count - 1)
        order = np.lexsort((total, step))
        last = np.flatnonzero(np.append(np.diff(step[order]), 1))
        most = dict(zip(step[order][last].tolist(), order[last].tolist(), strict=True))
        final = np.flatnonzero(np.append(np.diff(step), 1))
        ends = dict(zip(step[final].tolist(), final.tolist(), strict=True))
        chosen, before = [], 0
        for i in range(count):
            here = most.get(i, before)
            chosen.append(here if total[here] >= total[before] else before)
            before = ends.get(i, before)
        return BytesOverTime(np.arange(count) * end // count, self.rows[:, chosen])


class Left(NamedTuple):
    """The allocations of one line that are still alive."""

    frame: Frame | None
    kind: str
    buffer_count: int
    nbytes: int
    addresses: tuple[int, ...]


class Copies(NamedTuple):
    """Transfers from one kind of memory to another."""

    source_kind: str
    kind: str
    copy_count: int
    nbytes: int
    seconds: float  #: the sum of their durations

    @property
    def way(self) -> str:
        """A text such as ``"pinned → device"``."""
        return way(self.source_kind, self.kind)


def way(source: str, target: str) -> str:
    """Return a text that names both ends of a transfer, such as ``"pinned → device"``."""
    return f"{source} → {target}"


def of_op(log: Log, op: int) -> NDArray[Any]:
    """Return the events with this number in their field ``op``."""
    chosen: NDArray[Any] = log.events[log.events["op"] == op]
    return chosen


def bytes_over_time(log: Log) -> BytesOverTime:
    """Return the bytes alive of each kind, after each allocation and free."""
    lives = pair(log)
    found = changes(lives)
    before = lives.before_count
    times = np.concatenate([[0], found.time_ns[before:], [log.duration_ns]])
    rows = np.zeros((len(KINDS), len(times)), np.int64)
    for index, row in enumerate(rows):
        change = np.where(found.kind == index, found.nbytes, 0)
        row[0] = change[:before].sum()
        row[1:-1] = row[0] + np.cumsum(change[before:])
        row[-1] = row[-2]
    return BytesOverTime(times, rows)


def peaks(log: Log) -> dict[str, tuple[int, int]]:
    """Return the peak of each kind that was alive, as its bytes and its time in ns.

    ``"all"`` is the peak of `BytesOverTime.total`.
    """
    found = bytes_over_time(log)
    rows = dict(zip(KINDS, found.rows, strict=True)) | {"all": found.total}
    return {
        kind: (int(row.max()), int(found.times_ns[np.argmax(row)]))
        for kind, row in rows.items()
        if kind == "all" or row.any()
    }


def left(log: Log) -> list[Left]:
    """Return the allocations of the record that are still alive, by line, largest first.

    Memory that unfinished copies use on the way is left out.
    """
    lives = pair(log)
    begun = lives.begun
    own = lives.is_left & lives.is_inside & (begun["kind"] != _STAGING)
    lines: dict[tuple[Frame | None, int], list[Any]] = {}
    callers: dict[int, Frame | None] = {}
    for event in begun[own]:
        stack = int(event["stack"])
        if stack not in callers:
            callers[stack] = log.user_frame(stack)
        key = callers[stack], int(event["kind"])
        lines.setdefault(key, []).append(event)
    found = [
        Left(
            line,
            KINDS[kind],
            len(events),
            sum(int(event["nbytes"]) for event in events),
            tuple(int(event["address"]) for event in events),
        )
        for (line, kind), events in lines.items()
    ]
    return sorted(found, key=lambda each: -each.nbytes)


def copies(log: Log) -> list[Copies]:
    """Group the transfers by the kinds at their ends, the largest group first."""
    events = of_op(log, TRANSFER)
    ways = np.unique(events[["source_kind", "kind"]])
    found = []
    for source, target in ways.tolist():
        own = events[(events["source_kind"] == source) & (events["kind"] == target)]
        nbytes, ns = int(own["nbytes"].sum()), int(own["value"].sum())
        found.append(Copies(KINDS[source], KINDS[target], len(own), nbytes, ns * 1e-9))
    return sorted(found, key=lambda each: -each.nbytes)


class Span(NamedTuple):
    """Transfers of one lane that are drawn as one."""

    begin_ns: int
    lasts_ns: float
    copy_count: int
    nbytes: int
    seconds: float  #: the sum of their durations


def joined(transfers: NDArray[Any], least_ns: float) -> list[Span]:
    """Join transfers of one lane that are too close to each other for a picture.

    A transfer is drawn at least `least_ns` long, and joined to the one before if the gap
    between them is shorter than that.
    """
    spans: list[Span] = []
    columns = (transfers[name].tolist() for name in ("time_ns", "value", "nbytes"))
    for begin, lasted, nbytes in zip(*columns, strict=True):
        end = begin + max(lasted, least_ns)
        span = Span(begin, end - begin, 1, nbytes, lasted * 1e-9)
        if spans and begin - sum(spans[-1][:2]) < least_ns:
            first = spans.pop()
            span = Span(
                first.begin_ns,
                end - first.begin_ns,
                first.copy_count + 1,
                first.nbytes + nbytes,
                first.seconds + span.seconds,
            )
        spans.append(span)
    return spans
