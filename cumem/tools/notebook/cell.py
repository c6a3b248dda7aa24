# SPDX-License-Identifier: Apache-2.0
"""Shows a cell's peaks, the memory that it left alive, and its copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from cumem.base.colours import KIND_COLOURS
from cumem.base.units import (
    format_count,
    format_nbytes,
    format_rate,
    format_seconds,
    format_table,
)
from cumem.recording.events import KINDS, OUT_OF_MEMORY, TRANSFER, Frame, Log
from cumem.recording.pairing import lanes
from cumem.recording.reading import (
    Copies,
    Left,
    bytes_over_time,
    copies,
    joined,
    left,
    of_op,
    peaks,
    way,
)
from cumem.tools.notebook.html import (
    Raw,
    beside,
    escape,
    in_cell,
    key,
    keys,
    page_of,
    rect,
    svg,
    table,
)

_MOST_ROWS: Final = 10


# -- the picture -----------------------------------------------------------------------

_WIDTH: Final = 560
_HEIGHT: Final = 90
_LEFT: Final = 64  # the width of the labels
_MOST_LANES: Final = 6


def timeline(log: Log) -> Raw:
    """Draw the bytes alive over time, stacked by kind, with transfers as lanes below."""
    alive = bytes_over_time(log).sampled(_WIDTH)
    end = max(log.duration_ns, 1)
    most = max(alive.height, 1)
    shapes: list[str] = []
    base = np.zeros(_WIDTH)
    present = [i for i in range(len(KINDS)) if alive.rows[i].any()]
    for index in present:
        top = base + alive.rows[index] / most * _HEIGHT
        shapes.append(_area(base, top, KIND_COLOURS[KINDS[index]]))
        base = top
    shapes.append(rect(_LEFT, 0, _WIDTH, _HEIGHT, "", ""))
    shapes.append(_text(_LEFT - 4, 10, format_nbytes(most), "end"))
    shapes.append(_text(_LEFT - 4, _HEIGHT, "0", "end"))
    marks = {int(e["time_ns"]) * _WIDTH // end: e for e in of_op(log, OUT_OF_MEMORY)}
    for column, event in marks.items():
        tip = f"out of {KINDS[event['kind']]} memory: {format_nbytes(int(event['nbytes']))}"
        shapes.append(rect(_LEFT + column - 1, -4, 2, _HEIGHT + 8, "currentColor", tip))
    moved, lane_count = _lanes(log, end)
    shapes += moved
    bottom = _HEIGHT + 6 + 8 * lane_count
    if lane_count:
        shapes.append(_text(_LEFT - 4, _HEIGHT + 13, "copies", "end"))
    shapes.append(_text(_LEFT, bottom + 11, "0", "start"))
    shapes.append(_text(_LEFT + _WIDTH, bottom + 11, format_seconds(end * 1e-9), "end"))
    label = (
        f"bytes alive over {format_seconds(end * 1e-9)}, at most "
        f"{format_nbytes(int(alive.total.max()))}"
    )
    targets = [each.kind for each in copies(log)]
    shown = dict.fromkeys([*(KINDS[i] for i in present), *targets])
    picture = svg(_LEFT + _WIDTH + 2, bottom + 14, shapes, label)
    return Raw(keys({kind: KIND_COLOURS[kind] for kind in shown}) + picture)


def _lanes(log: Log, end: int) -> tuple[list[str], int]:
    """Draw transfers below the timeline, and return the shapes and the number of lanes.

    Transfers that overlap in time are in different lanes. Those that are less than a pixel
    apart are drawn as one.
    """
    transfers = np.sort(of_op(log, TRANSFER), order="time_ns")
    places = np.minimum(lanes(transfers), _MOST_LANES - 1)
    keyed = np.stack([places, transfers["source_kind"], transfers["kind"]], axis=1)
    shapes = []
    for lane, source, target in np.unique(keyed.astype(int), axis=0).tolist():
        own = transfers[(keyed == (lane, source, target)).all(axis=1)]
        for span in joined(own, end / _WIDTH):
            many = "" if span.copy_count == 1 else f"{span.copy_count} copies, "
            tip = (
                f"{way(KINDS[source], KINDS[target])}, {many}"
                f"{format_nbytes(span.nbytes)}, {format_rate(span.nbytes, span.seconds)}"
            )
            x = _WIDTH * span.begin_ns / end
            wide = min(_WIDTH * span.lasts_ns / end, _WIDTH - x)
            y = _HEIGHT + 6 + 8 * lane
            shapes.append(rect(_LEFT + x, y, wide, 6, KIND_COLOURS[KINDS[target]], tip))
    return shapes, int(places.max(initial=-1)) + 1


def _area(base: Any, top: Any, colour: str) -> str:
    """Draw the area between two lines, with a point only where a line changes."""

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


# -- the report ------------------------------------------------------------------------


class Report:
    """The display of a record, and of a cell after ``%%cumem``.

    Parameters
    ----------
    log : Log
        The log of the record.
    title : str
        A name for the recorded work, such as "this cell".
    names : callable, optional
        A function from an address to the names of variables with a buffer there.
    """

    def __init__(
        self,
        log: Log,
        title: str = "cumem.Record",
        names: Callable[[int], str] = lambda _: "",
    ) -> None:
        self.log = log
        self._what = title
        self._names = names
        self.left: list[Left] = left(log)
        self.peaks: dict[str, tuple[int, int]] = peaks(log)
        self.copies: list[Copies] = copies(log)

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
                    _line(each.frame),
                    ", ".join(dict.fromkeys(held)) or "-",
                    each.kind,
                    str(each.buffer_count),
                    format_nbytes(each.nbytes),
                ]
            )
        return rows

    def _copy_rows(self) -> list[list[str]]:
        return [
            [
                each.way,
                str(each.copy_count),
                format_nbytes(each.nbytes),
                format_seconds(each.seconds),
                format_rate(each.nbytes, each.seconds),
            ]
            for each in self.copies
        ]

    def _tables(self) -> Iterator[tuple[str, list[str], list[list[str]], str]]:
        """Yield each table's title, columns and rows, and a text to show without rows."""
        yield (
            "most at once",
            ["kind", "peak", "at"],
            self._peak_rows(),
            "no memory was allocated",
        )
        held = self._left_rows()
        columns = ["allocated by", "held by", "kind", "buffers", "size"]
        if all(row[1] == "-" for row in held):
            del columns[1]
            held = [row[:1] + row[2:] for row in held]
        yield "left alive", columns, held, "nothing"
        yield (
            "copies",
            ["way", "copies", "size", "time of all", "mean rate"],
            self._copy_rows(),
            "none",
        )

    @property
    def _title(self) -> str:
        return f"{self._what}: {format_seconds(self.log.duration_ns * 1e-9)}"

    @property
    def _note(self) -> str:
        said = []
        if len(self.left) > _MOST_ROWS:
            said.append(f"{len(self.left) - _MOST_ROWS} more lines left memory alive")
        short = len(of_op(self.log, OUT_OF_MEMORY))
        if short:
            said.append(f"memory ran short {format_count(short, 'time')}")
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
            if rows:
                cells = format_table([columns, *rows], len(columns))
                lines += [f"  {line}" for line in cells]
        return "\n".join([*lines, self._note] if self._note else lines)

    def _repr_html_(self) -> str:
        parts = []
        for title, columns, rows, none in self._tables():
            colored = [
                [key(c) if c in KIND_COLOURS else c for c in row] for row in rows
            ]
            parts.append(table(title, columns, colored, "" if rows else none))
        happened = len(self.log.events) or len(self.log.living)
        return page_of(
            self.log.machine.get("backend") == "emulated",
            self._title,
            timeline(self.log) if happened else "",
            beside(parts),
            note=self._note,
        )


def _line(frame: Frame | None) -> str:
    """Return the line of a frame without its folder."""
    if frame is None:
        return "no stack was noted"
    return in_cell(f"{frame.filename}:{frame.lineno}").rpartition("/")[2]
