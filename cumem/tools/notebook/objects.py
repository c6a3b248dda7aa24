# SPDX-License-Identifier: Apache-2.0
"""Displays of cumem's objects in notebooks.

Like ``repr``, a display asks no device, never waits, and raises no error. So it never shows
the values in a buffer, because reading them might wait for an unfinished copy or move pages
of managed memory. ``print(buf)`` shows them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from cumem import _core
from cumem.base.answer import Answer
from cumem.base.colours import KIND_COLOURS, STATE_COLOURS
from cumem.base.displays import shows
from cumem.base.errors import OutOfMemoryError
from cumem.base.units import format_count, format_nbytes, format_rate, format_seconds
from cumem.devices.device import Device
from cumem.pools.memory import DeviceMemory
from cumem.pools.pool import Pool
from cumem.pools.snapshot import Snapshot
from cumem.pools.statistics import (
    COLUMNS,
    MORE_COLUMNS,
    Measure,
    Measurement,
    PoolStats,
    Stats,
    cells_of,
    rows_of,
)
from cumem.recording.record import Record
from cumem.tools.notebook.cell import Report
from cumem.tools.notebook.html import (
    Part,
    Raw,
    alert,
    answer,
    bar,
    data,
    details,
    escape,
    facts,
    key,
    keys,
    legend,
    page,
    page_of,
    parts_of,
    rect,
    svg,
    table,
)
from cumem.transfers.explanation import Explanation
from cumem.transfers.tuning import Configuration


def size(nbytes: int) -> str:
    """Return a text such as ``"3 MiB (3145728 bytes)"``."""
    return format_nbytes(nbytes) + (f" ({nbytes} bytes)" if nbytes >= 1024 else "")


# -- displays that the extension asks for ----------------------------------------------


def _repr_html_(thing: _core.Buffer | _core.Transfer, is_emulated: bool) -> str:
    """Show a buffer or a transfer, for the extension, whose types these are."""
    if isinstance(thing, _core.Transfer):
        return transfer(thing, is_emulated)
    return buffer(thing, is_emulated)


def buffer(buf: _core.Buffer, is_emulated: bool) -> str:
    """Show everything about a buffer but its values."""
    title = f"cumem.{type(buf).__name__}"
    if buf.closed:
        kind = facts([("kind", key(buf.kind))])
        return page_of(is_emulated, f"{title}, closed", kind)
    device = buf.device
    rows: list[tuple[str, object]] = [
        ("kind", key(buf.kind)),
        ("shape", buf.shape),
        ("dtype", buf.dtype),
        ("size", size(buf.nbytes)),
    ]
    if device is not None:
        rows.append(("device", device.index))
    if buf.nbytes:
        rows.append(("address", _address(buf)))
    if buf.ndim and not buf.flags.c_contiguous:
        rows.append(("strides", f"{buf.strides}, in bytes"))
    if buf.readonly:
        rows.append(("access", "read-only"))
    if buf.flags:
        rows.append(("flags", ", ".join(buf.flags)))
    if buf.base is not None:
        rows.append(("view of", f"a {type(buf.base).__name__}"))
    return page_of(is_emulated, title, facts(rows))


def _address(buf: _core.Buffer) -> Raw | str:
    """Return the address, or why there is none now, such as that the region sleeps."""
    try:
        return Raw(f"<code>0x{buf._address:x}</code>")
    except RuntimeError as error:
        return str(error)


def transfer(handle: _core.Transfer, is_emulated: bool) -> str:
    """Show the progress of a transfer, or its speed once it is done."""
    *_, route, state = repr(handle).strip("<>").removesuffix(", emulated").split(", ")
    nbytes, moved = handle.nbytes, min(handle.progress, handle.nbytes)
    rows: list[tuple[str, object]] = [
        ("size", size(nbytes)),
        ("route", route),
        ("state", state),
    ]
    if state == "running" and nbytes:
        rows.append(("moved", f"{format_nbytes(moved)}, {moved / nbytes:.0%}"))
    if state == "done" and handle.seconds > 0:
        rows.append(("time", format_seconds(handle.seconds)))
        rows.append(("rate", format_rate(nbytes, handle.seconds)))
    colour = "#d55e00" if state == "failed" else KIND_COLOURS["pinned"]
    moved = nbytes if state == "done" else moved
    parts = [bar([Part("moved", moved, colour)], nbytes), facts(rows)]
    return page_of(is_emulated, "cumem.Transfer", *parts)


# -- pools -----------------------------------------------------------------------------


@shows("html", Pool)
def pool(found: Pool[Any], title: str) -> str:
    """Show the memory of a pool, unless it is closed."""
    return page(f"{title}, closed") if found.closed else _figures(found.stats(), title)


@shows("html", PoolStats)
def pool_statistics(found: PoolStats) -> str:
    """Show the memory of a pool at the time when its statistics were read."""
    where = f"{found.kind} {found.device} {found.name}"
    return _figures(found, f"cumem.types.PoolStats of {where}")


def _figures(stats: PoolStats, title: str) -> str:
    """Show the memory of a pool, and after a click all its counters."""
    limit = stats.limit
    parts = parts_of(stats.live_nbytes, stats.in_flight_nbytes, stats.cached_nbytes)
    if limit is not None:
        parts.append(Part("free", max(0, limit - stats.reserved_nbytes), ""))
    asked = stats.allocation_count
    rows: list[tuple[str, object]] = [
        ("kind", key(stats.kind)),
        ("device", stats.device),
        ("limit", "none" if limit is None else size(limit)),
        (
            "live",
            f"{size(stats.live_nbytes)} in {format_count(stats.live_count, 'buffer')}",
        ),
        (
            "reserved",
            f"{size(stats.reserved_nbytes)} in "
            f"{format_count(stats.segment_count, 'segment')}",
        ),
        ("peak live", size(stats.peak_live_nbytes)),
        ("allocations", str(asked)),
        ("hits", f"{stats.hit_count / asked:.1%}" if asked else "-"),
    ]
    counters = details("all counters", data(stats.to_dict()))
    return page(title, bar(parts, limit or 0), legend(parts), facts(rows), counters)


@shows("html", Stats)
def all_statistics(found: Stats) -> str:
    """Show a row for each pool."""
    return page("cumem.types.Stats", statistics(found))


@shows("html", Measurement)
def measurement(found: Measurement) -> str:
    """Show the changes of each pool in a block of code."""
    return page(f"measured: {format_seconds(found.seconds)}", statistics(found))


@shows("html", Measure)
def measure(_: Measure) -> str:
    """Show that a measurement has no figures yet, because its block has not ended."""
    return page("cumem.types.Measure, running")


def statistics(found: Stats, brief: bool = False) -> Raw:
    """Make a table with a row and a bar for each pool.

    With `brief` it has only pools that have ever held memory, and only the columns of the
    memory that they hold.
    """
    rows = rows_of(found)
    if not rows:
        return Raw("<div>no pool yet</div>")
    columns = COLUMNS if brief else COLUMNS | MORE_COLUMNS
    if brief:
        rows = [row for row in rows if row[1].peak_reserved_nbytes] or rows
    most = max(counters.reserved_nbytes for _, counters in rows)
    lines = []
    for row in rows:
        live, in_flight, cached = (
            max(0, getattr(row[1], f"{state}_nbytes"))  # differences may be negative
            for state in ("live", "in_flight", "cached")
        )
        name, *cells = cells_of(*row, columns)
        parts = parts_of(live, in_flight, cached)
        lines.append([name, bar(parts, most, 120 if brief else 80), *cells])
    states = {k: STATE_COLOURS[k] for k in ("live", "in flight", "cached")}
    head = ["pool", "", *columns, "allocations", "hits"]
    return Raw(keys(states) + table("", head, lines))


_WIDTH: Final = 520  # the width of a map in pixels, without the labels
_LABEL: Final = 170  # the width of the labels in pixels
_HEIGHT: Final = 17  # the height of a segment in pixels
_ROWS: Final = 32  # the most segments that are drawn
_SHAPES: Final = 4000  # about the most shapes in a map


@shows("html", Snapshot)
def snapshot(found: Snapshot) -> str:
    """Show a map of segments and blocks."""
    reserved = sum(segment.reserved_nbytes for segment in found.segments)
    title = (
        f"{found.kind} {found.device} {found.name}: {format_nbytes(reserved)} in "
        f"{format_count(len(found.segments), 'segment')}"
    )
    if not found.segments:
        return page(title)
    shown = found.segments
    if len(shown) > _ROWS:
        smallest = sorted(s.nbytes for s in shown)[-_ROWS]
        shown = tuple(s for s in shown if s.nbytes >= smallest)[:_ROWS]
    most = max(_drawn_nbytes(segment) for segment in shown)
    shapes: list[str] = []
    for i, segment in enumerate(shown):
        y = _HEIGHT * i
        label = f"0x{segment.address:x}, {format_nbytes(segment.reserved_nbytes)}"
        shapes.append(f'<text x="0" y="{y + 11}">{escape(label)}</text>')
        runs = _segment(segment, y, _WIDTH / most, _SHAPES // len(shown))
        # Cached blocks are drawn first, so that live ones stay visible even if they are
        # small.
        shapes += sorted(runs, key=lambda each: STATE_COLOURS["cached"] not in each)
    rest = [s for s in found.segments if s not in shown]
    note = ""
    if rest:
        left = format_nbytes(sum(s.reserved_nbytes for s in rest))
        note = f"and {format_count(len(rest), 'segment')} of {left} together"
    colours = {k: v for k, v in STATE_COLOURS.items() if k not in ("free", "gap")}
    colours["live and other"] = _MIXED
    picture = svg(_LABEL + _WIDTH, _HEIGHT * len(shown), shapes, title)
    return page(title, keys(colours), picture, note=note)


_MIXED: Final = "#009e73"
_GAP: Final = 6  # the width of a gap in pixels, whatever its length


def _drawn_nbytes(segment: Any) -> int:
    return max(int(segment.reserved_nbytes), 1)


def _segment(segment: Any, y: float, scale: float, most: int) -> Iterator[str]:
    """Draw blocks to scale, joining those of about a pixel; gaps have a fixed width."""
    least = max(1.5, _drawn_nbytes(segment) * scale / max(most, 1))
    x, begin, run = float(_LABEL), 0.0, list[Any]()
    for block in segment.blocks:
        wide = block.nbytes * scale
        if run and (block.state == "gap" or wide >= least or x - begin >= least):
            yield _run(run, begin, x - begin, y)
            run = []
        if not run:
            begin = x
        if block.state == "gap":
            x += _GAP
        else:
            run.append(block)
            x += wide
    if run:
        yield _run(run, begin, x - begin, y)


def _run(blocks: Sequence[Any], x: float, width: float, y: float) -> str:
    states = {block.state for block in blocks}
    width = max(width, 1.5)
    if len(blocks) == 1:
        [only] = blocks
        tip = f"{only.state}, {format_nbytes(only.nbytes)} at 0x{only.address:x}"
        if only.requested_nbytes:
            tip += f", {only.requested_nbytes} bytes asked for"
        return rect(x, y, width, 12, STATE_COLOURS[only.state], tip)
    total = format_nbytes(sum(block.nbytes for block in blocks))
    colour = STATE_COLOURS[states.pop()] if len(states) == 1 else _MIXED
    return rect(x, y, width, 12, colour, f"{len(blocks)} blocks, {total}")


# -- devices and their memory ----------------------------------------------------------


@shows("html", Device)
def device(unit: Device) -> str:
    """Show the name, size and place of a device, as far as the driver answers."""
    rows: list[tuple[str, object]] = []
    questions: tuple[tuple[str, Callable[[], object]], ...] = (
        ("name", lambda: unit.name),
        ("memory", lambda: size(unit.total_nbytes)),
        ("compute capability", lambda: "{}.{}".format(*unit.compute_capability)),
        ("bus", lambda: unit.pci_bus_id),
        ("uuid", lambda: unit.uuid),
    )
    for name, ask in questions:
        with contextlib.suppress(Exception):
            rows.append((name, ask()))
    return page(f"cumem.Device {unit.index}", facts(rows))


@shows("html", DeviceMemory)
def memory(info: DeviceMemory) -> str:
    """Show who uses the memory of a device."""
    parts = [
        Part("live", info.live, STATE_COLOURS["live"]),
        Part("cached", max(0, info.reserved - info.live), STATE_COLOURS["cached"]),
        Part("staging", info.staging, KIND_COLOURS["staging"]),
        Part("outside cumem", info.outside, KIND_COLOURS["pageable"]),
        Part("free", info.free, ""),
    ]
    return page(
        f"cumem.types.DeviceMemory of {format_nbytes(info.total)}",
        bar(parts, info.total, 480),
        legend(parts),
    )


# -- errors ----------------------------------------------------------------------------


@shows("html", OutOfMemoryError)
def out_of_memory(error: OutOfMemoryError) -> str:
    """Show the requested memory, the memory that there is, and the advice."""
    if error.requested is None:  # an error of a copy, which has no such numbers
        shown = {k: v for k, v in error.to_dict().items() if v and k != "message"}
        return page(type(error).__name__, alert(error.message), data(shown))
    parts = parts_of(error.live or 0, error.in_flight or 0, error.cached or 0)
    parts.append(Part("other pools", error.others or 0, KIND_COLOURS["managed"]))
    if error.outside is not None:
        parts.append(Part("outside cumem", error.outside, KIND_COLOURS["pageable"]))
    free = [
        each - (sum(part.nbytes for part in parts) if each is error.limit else 0)
        for each in (error.limit, error.driver_free, error.available)
        if each is not None
    ]
    parts.append(Part("free", max(0, min(free, default=0)), ""))
    asked = [Part("asked for", error.requested, "#d55e00")]
    whole = max(sum(part.nbytes for part in parts), error.requested)
    values = error.to_dict()
    names = (
        *("requested_nbytes", "kind", "device", "limit_nbytes", "largest_free_nbytes"),
        *("fragmentation", "driver_total_nbytes", "available_nbytes"),
    )
    shown = {name: values[name] for name in names if values[name] is not None}
    return page(
        f"Out of {error.kind} memory: {format_nbytes(error.requested)} asked for",
        alert(error.advice),
        bar(parts, whole, 480),
        bar(asked, whole, 480),
        legend([*parts, *asked]),
        data(shown),
        details("what was tried", facts(_numbered(error.tried or ()))),
    )


def _numbered(texts: Sequence[str]) -> list[tuple[str, object]]:
    """Number the texts from 1."""
    return [(str(i), text) for i, text in enumerate(texts, 1)]


# -- copies and records ----------------------------------------------------------------


@shows("html", Explanation)
def explanation(found: Explanation) -> str:
    """Show the route of a copy, and the reason for it."""
    title = f"cumem.types.Explanation of {format_nbytes(found.nbytes)}"
    return page(title, facts(found._rows()))


@shows("html", Configuration)
def configuration(found: Configuration) -> str:
    """Show each setting and where it comes from."""
    columns = ["setting", "value", "by"]
    return page("cumem.types.Configuration", table("", columns, found._rows()))


@shows("html", Record)
def record(found: Record) -> str:
    """Show the report of a record."""
    return Report(found.log)._repr_html_()


shows("html", Answer)(answer)
