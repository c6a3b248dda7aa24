# SPDX-License-Identifier: Apache-2.0
"""What a cell of a notebook did with memory: peaks, what it left alive, its copies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from cumem.notebook.html import KIND_COLOURS, Raw, escape, keys, page, rect, svg, table
from cumem.recording.events import KINDS, OPS, Frame, Log
from cumem.units import format_nbytes, format_rate, format_seconds

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MOST_ROWS: Final = 10


class Left(NamedTuple):
    """What a line allocated and is still alive."""

    frame: Frame | None
    kind: str
    buffer_count: int
    nbytes: int
    addresses: tuple[int, ...]


class Copies(NamedTuple):
    """Transfers between two kinds of memory."""

    source_kind: str
    kind: str
    copy_count: int
    nbytes: int
    seconds: float  #: of each, added up


# -- what a log says -------------------------------------------------------------------


def of_op(log: Log, op: str) -> np.ndarray[Any, Any]:
    """The events of one sort."""
    chosen: np.ndarray[Any, Any] = log.events[log.events["op"] == OPS.index(op)]
    return chosen


def living(log: Log) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bytes alive of each kind: times in ns, and a row of bytes for each of KINDS.

    The first time is 0, the last is the end of the record.
    """
    events = log.events
    sign = np.zeros(len(events), np.int64)
    sign[events["op"] == OPS.index("allocate")] = 1
    sign[events["op"] == OPS.index("free")] = -1
    steps = events[sign != 0]
    signed = sign[sign != 0] * steps["nbytes"].astype(np.int64)
    times = np.concatenate([[0], steps["time_ns"].astype(np.int64), [log.duration_ns]])
    rows = np.zeros((len(KINDS), len(times)), np.int64)
    for index, row in enumerate(rows):
        start = log.living["nbytes"][log.living["kind"] == index].sum(dtype=np.int64)
        row[:] = start
        row[1:-1] += np.cumsum(np.where(steps["kind"] == index, signed, 0))
        row[-1] = row[-2]
    # events that were dropped may have allocated what is freed
    return times, np.maximum(rows, 0)


def peaks(log: Log) -> dict[str, tuple[int, int]]:
    """Of each kind that was alive, and ``"all"``: most bytes at once, and when, in ns."""
    times, rows = living(log)
    found = {
        kind: (int(row.max()), int(times[np.argmax(row)]))
        for kind, row in zip(KINDS, rows, strict=True)
        if row.any()
    }
    total = rows.sum(axis=0)
    return found | {"all": (int(total.max()), int(times[np.argmax(total)]))}


def caller(stack: tuple[Frame, ...]) -> Frame | None:
    """The innermost line that is not cumem's own."""
    for frame in stack:
        if not frame.filename.startswith(_PACKAGE):
            return frame
    return stack[0] if stack else None


def left(log: Log) -> list[Left]:
    """What was allocated within the record and is still alive, by line, largest first."""
    alive: dict[tuple[int, int, int], Any] = {}
    ops = (OPS.index("allocate"), OPS.index("free"))
    for event in log.events[np.isin(log.events["op"], ops)]:
        place = int(event["kind"]), int(event["device"]), int(event["address"])
        if event["op"] == ops[0]:
            alive[place] = event
        else:
            alive.pop(place, None)
    lines: dict[tuple[Frame | None, int], list[Any]] = {}
    for event in alive.values():
        line = caller(log.stacks[int(event["stack"])])
        lines.setdefault((line, int(event["kind"])), []).append(event)
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
    """Transfers by kinds, most bytes first."""
    events = of_op(log, "transfer")
    ways = {(int(e["source_kind"]), int(e["kind"])) for e in events}
    found = []
    for source, target in ways:
        own = events[(events["source_kind"] == source) & (events["kind"] == target)]
        nbytes, ns = int(own["nbytes"].sum()), int(own["value"].sum())
        found.append(Copies(KINDS[source], KINDS[target], len(own), nbytes, ns * 1e-9))
    return sorted(found, key=lambda each: -each.nbytes)


def lanes(events: np.ndarray[Any, Any]) -> list[int]:
    """Lanes in which transfers lie beside each other that ran at the same time.

    `events` are in order of their beginning; one lane for each comes back.
    """
    ends: list[int] = []
    chosen = []
    for event in events:
        begin = int(event["time_ns"])
        lane = next((i for i, end in enumerate(ends) if end <= begin), len(ends))
        ends[lane : lane + 1] = [begin + int(event["value"])]
        chosen.append(lane)
    return chosen


# -- the picture -----------------------------------------------------------------------

_WIDTH: Final = 560
_HEIGHT: Final = 90
_LEFT: Final = 64  # for the labels
_MOST_LANES: Final = 6
_MOST_COPIES: Final = 500


def timeline(log: Log) -> Raw:
    """Bytes alive over time, kinds above each other; transfers as lanes below."""
    times, rows = living(log)
    end = max(log.duration_ns, 1)
    most = max(int(rows.sum(axis=0).max()), 1)
    columns = np.minimum(times * _WIDTH // end, _WIDTH - 1)
    shapes: list[str] = []
    base = np.zeros(_WIDTH)
    present = [i for i in range(len(KINDS)) if rows[i].any()]
    for index in present:
        top = base + _columns(columns, rows[index]) / most * _HEIGHT
        shapes.append(_area(base, top, KIND_COLOURS[KINDS[index]]))
        base = top
    shapes.append(rect(_LEFT, 0, _WIDTH, _HEIGHT, "", ""))
    shapes.append(_text(_LEFT - 4, 10, format_nbytes(most), "end"))
    shapes.append(_text(_LEFT - 4, _HEIGHT, "0", "end"))
    for event in of_op(log, "out_of_memory")[:_MOST_COPIES]:
        x = _LEFT + _WIDTH * int(event["time_ns"]) / end
        tip = f"out of {KINDS[event['kind']]} memory: {format_nbytes(int(event['nbytes']))}"
        shapes.append(rect(x - 1, 0, 2, _HEIGHT, "#d55e00", tip))
    moved = np.sort(of_op(log, "transfer"), order="time_ns")[:_MOST_COPIES]
    places = lanes(moved)
    for event, lane in zip(moved, places, strict=True):
        tip = (
            f"{KINDS[event['source_kind']]} → {KINDS[event['kind']]}, "
            f"{format_nbytes(int(event['nbytes']))}, "
            f"{format_rate(int(event['nbytes']), int(event['value']) * 1e-9)}"
        )
        x = _LEFT + _WIDTH * int(event["time_ns"]) / end
        wide = min(_WIDTH * int(event["value"]) / end, _LEFT + _WIDTH - x)
        y = _HEIGHT + 6 + 8 * min(lane, _MOST_LANES - 1)
        shapes.append(
            rect(x, y, max(wide, 1), 6, KIND_COLOURS[KINDS[event["kind"]]], tip)
        )
    bottom = _HEIGHT + 6 + 8 * min(max(places, default=-1) + 1, _MOST_LANES)
    if places:
        shapes.append(_text(_LEFT - 4, _HEIGHT + 13, "copies", "end"))
    shapes.append(_text(_LEFT, bottom + 11, "0", "start"))
    shapes.append(_text(_LEFT + _WIDTH, bottom + 11, format_seconds(end * 1e-9), "end"))
    label = (
        f"bytes alive over {format_seconds(end * 1e-9)}, at most {format_nbytes(most)}"
    )
    shown = dict.fromkeys(
        [*(KINDS[i] for i in present), *(KINDS[e["kind"]] for e in moved)]
    )
    picture = svg(_LEFT + _WIDTH + 2, bottom + 14, shapes, label)
    return Raw(keys({kind: KIND_COLOURS[kind] for kind in shown}) + picture)


def _columns(columns: Any, values: Any) -> np.ndarray[Any, Any]:
    """The most of `values` within each column of pixels; between steps the last."""
    most = np.full(_WIDTH, -1.0)
    np.maximum.at(most, columns, values)
    last = np.zeros(_WIDTH)
    last[columns] = values  # the last of each column wins
    current = 0.0
    for i in range(_WIDTH):
        if most[i] < 0:
            most[i] = current
        else:
            most[i], current = max(most[i], current), last[i]
    return most


def _area(base: Any, top: Any, colour: str) -> str:
    """Between two lines; corners alone, for most columns are like their neighbours."""

    def corners(line: Any) -> Iterator[str]:
        for i, value in enumerate(line):
            if i in (0, len(line) - 1) or line[i - 1] != value or line[i + 1] != value:
                for x in (i, i + 1):
                    yield f"{_LEFT + x},{_HEIGHT - value:.1f}"

    there = [*corners(top)]
    back = [*corners(base)][::-1]
    return f'<polygon points="{" ".join(there + back)}" fill="{colour}"></polygon>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


# -- what is shown of a cell -----------------------------------------------------------


class CellReport:
    """What ``%%cumem`` shows of a cell.

    Parameters
    ----------
    log : Log
        Of the cell.
    where : callable, optional
        Says of a file's name how a line of it is called, ``"In[3]"``; default: the name.
    names : callable, optional
        Says of an address which variables hold a buffer there.
    """

    def __init__(
        self,
        log: Log,
        where: Callable[[str], str] = os.path.basename,
        names: Callable[[int], str] = lambda _: "",
    ) -> None:
        self.log = log
        self._where = where
        self._names = names
        self.left = left(log)
        self.peaks = peaks(log)
        self.copies = copies(log)

    def _peak_rows(self) -> list[list[str]]:
        return [
            [kind, format_nbytes(nbytes), format_seconds(ns * 1e-9)]
            for kind, (nbytes, ns) in self.peaks.items()
            if nbytes
        ]

    def _left_rows(self) -> list[list[str]]:
        rows = []
        for each in self.left[:_MOST_ROWS]:
            held = [name for a in each.addresses[:20] if (name := self._names(a))]
            rows.append(
                [
                    self._line(each.frame),
                    ", ".join(dict.fromkeys(held)) or "-",
                    each.kind,
                    str(each.buffer_count),
                    format_nbytes(each.nbytes),
                ]
            )
        return rows

    def _line(self, frame: Frame | None) -> str:
        if frame is None:
            return "no stack was noted"
        return f"{self._where(frame.filename)}, line {frame.lineno}"

    def _copy_rows(self) -> list[list[str]]:
        return [
            [
                f"{each.source_kind} → {each.kind}",
                str(each.copy_count),
                format_nbytes(each.nbytes),
                format_seconds(each.seconds),
                format_rate(each.nbytes, each.seconds),
            ]
            for each in self.copies
        ]

    def _tables(self) -> Iterator[tuple[str, list[str], list[list[str]], str]]:
        """A title, columns, rows, and what to say where there is none."""
        yield (
            "most at once",
            ["kind", "peak", "at"],
            self._peak_rows(),
            "no memory was allocated",
        )
        yield (
            "left alive",
            ["allocated by", "held by", "kind", "buffers", "size"],
            self._left_rows(),
            "nothing",
        )
        yield (
            "copies",
            ["way", "copies", "size", "time of all", "mean rate"],
            self._copy_rows(),
            "none",
        )

    @property
    def _title(self) -> str:
        return f"this cell: {format_seconds(self.log.duration_ns * 1e-9)}"

    @property
    def _note(self) -> str:
        said = []
        if len(self.left) > _MOST_ROWS:
            said.append(f"{len(self.left) - _MOST_ROWS} more lines left memory alive")
        short = len(of_op(self.log, "out_of_memory"))
        if short:
            said.append(f"memory ran short {short} times")
        if self.log.lost_count:
            said.append(
                f"{self.log.lost_count} events did not fit into the record, so figures are "
                "those of the rest"
            )
        return "; ".join(said)

    def __repr__(self) -> str:
        lines = [self._title]
        for title, columns, rows, none in self._tables():
            lines.append(f"{title}:" if rows else f"{title}: {none}")
            cells = [columns, *rows] if rows else []
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            for row in cells:
                padded = (c.ljust(w) for c, w in zip(row, widths, strict=True))
                lines.append("  " + "  ".join(padded).rstrip())
        return "\n".join([*lines, self._note] if self._note else lines)

    def _repr_html_(self) -> str:
        parts = [
            table(title, columns, rows) if rows else Raw(f"<div>{title}: {none}</div>")
            for title, columns, rows, none in self._tables()
        ]
        return page(
            self._title,
            timeline(self.log),
            *parts,
            note=self._note,
            emulated=self.log.machine.get("backend") == "emulated",
        )
