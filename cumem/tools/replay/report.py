# SPDX-License-Identifier: Apache-2.0
"""Has the results of a replay, as data that names the machine, and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cumem.base.units import format_nbytes
from cumem.devices.device import Device
from cumem.tools import info

__all__ = ["Replayed", "Waste", "as_data", "render", "render_comparison"]


@dataclass(frozen=True, slots=True)
class Waste:
    """Why more memory was reserved than requested when the peak was first reached.

    The four numbers add up to the bytes that were reserved just after the growth that
    made the peak. Later as much may still be reserved, although less of it is live.

    Parameters
    ----------
    requested : int
        The requested bytes that were live at that moment, which are not waste.
    rounding : int
        The bytes by which blocks are larger than requested.
    fragmentation : int
        The bytes that were free but could not serve the allocation.
    in_flight : int
        The bytes that were freed while work on them may still run.
    """

    requested: int
    rounding: int
    fragmentation: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a trace on one allocator, with sizes in bytes.

    Parameters
    ----------
    trace, allocator, version, backend, kind, pool : str
        The trace, and the allocator with which it was replayed.
    events, allocations, skipped, streams : int
        The counts of the trace.
    peak_live, peak_reserved : int
        The most bytes that were live at once, and the most that were reserved.
    ratio : float
        `peak_reserved` divided by `peak_live`.
    ns_per_event : float
        The median time of the timed loop per event, from an empty pool, with growth.
    loop_ns : float
        The time per event of the same loop when it allocates nothing.
    ns_per_event_warm : float or None
        The time per event on a warm pool, if this was requested.
    growths : int or None
        How often the driver was asked for memory.
    waste : Waste or None
        The reasons for the reserved bytes that were not live, if the allocator can give
        them.
    late : int
        The number of events for which a freed block stays in use; 0 if it does not.
    late_on : str
        On which streams the late work runs, as in `Options`.
    forced : int
        How often late work was ended early because the allocator waited for it.
    peak_busy : int
        The most bytes that were live or in use by late work at once. At least these
        must be reserved.
    ratio_busy : float
        `peak_reserved` divided by `peak_busy`.
    """

    trace: str
    allocator: str
    version: str
    backend: str
    kind: str
    pool: str
    events: int
    allocations: int
    skipped: int
    streams: int
    peak_live: int
    peak_reserved: int
    ratio: float
    ns_per_event: float
    loop_ns: float
    ns_per_event_warm: float | None
    growths: int | None
    waste: Waste | None
    late: int
    late_on: str
    forced: int
    peak_busy: int
    ratio_busy: float


def as_data(
    result: Replayed, compared: dict[str, dict[str, Any]], device: int
) -> dict[str, Any]:
    """Return the results as one object for ``json``, which also describes the machine."""
    facts = info.collect()
    return {
        **asdict(result),
        "compare": compared,
        "device": facts["devices"][device]["name"],
        "versions": facts["versions"] | {result.allocator: result.version},
        "machine": facts["machine"],
        "commit": info.commit(),
    }


# -- text ------------------------------------------------------------------------------


def render(result: Replayed, device: int) -> str:
    """Return one result as aligned text."""
    emulated = ", EMULATED: times are not a GPU's" if result.backend != "cuda" else ""
    lines = [
        f"{result.trace}: {result.events:,} events, {result.allocations:,} allocations, "
        f"{result.streams} stream{'s' if result.streams > 1 else ''}",
    ]
    if result.skipped:
        lines.append(f"{result.skipped:,} rows of the file are left out")
    lines += [
        f"{result.allocator} {result.version}, {result.kind} memory, pool "
        f"{result.pool}, {Device(device).name}{emulated}",
        "",
        _row("peak live", _bytes(result.peak_live)),
    ]
    if result.late:
        whose = "their own streams" if result.late_on == "own" else "another stream"
        text = f"blocks stay in use by {whose} for {result.late:,} events"
        lines.append(_row("late", text))
        lines.append(_row("peak live or late", _bytes(result.peak_busy)))
    lines += [
        _row("peak reserved", _bytes(result.peak_reserved)),
        _row("ratio", f"{result.ratio:.4f} reserved / live"),
    ]
    if result.late:
        lines.append(_row("", f"{result.ratio_busy:.4f} reserved / (live or late)"))
    if result.forced:
        text = f"{result.forced} times, since the allocator waited for it"
        lines.append(_row("late work let go early", text))
    warm = result.ns_per_event_warm
    text = f"{result.ns_per_event:.0f} ns, of which the loop {result.loop_ns:.0f}"
    lines.append(_row("time per event", text))
    if warm is not None:
        lines.append(_row("  on a warm pool", f"{warm:.0f} ns"))
    if result.growths is not None:
        lines.append(_row("growths", f"{result.growths:,}"))
    if result.waste is not None:
        lines += [
            _row("live at the first peak", _bytes(result.waste.requested)),
            _row("  rounding", _bytes(result.waste.rounding)),
            _row("  fragmentation", _bytes(result.waste.fragmentation)),
            _row("  in flight", _bytes(result.waste.in_flight)),
        ]
    return "\n".join(lines)


def render_comparison(result: Replayed, compared: dict[str, dict[str, Any]]) -> str:
    """Return the results of several allocators as a table."""
    lines = [f"{'allocator':<28}{'reserved':>12}{'ratio':>9}{'ns/event':>10}"]
    for name, found in {"cumem": asdict(result), **compared}.items():
        if "error" in found:
            lines.append(f"{name:<28}{found['error']}")
            continue
        label = f"{found['allocator']} {found['version']}"
        lines.append(
            f"{label:<28}{format_nbytes(found['peak_reserved']):>12}"
            f"{found['ratio']:>9.4f}{found['ns_per_event']:>10.0f}"
        )
    return "\n".join(lines)


def _row(name: str, text: str) -> str:
    return f"{name:<24}{text}".rstrip()


def _bytes(nbytes: int) -> str:
    return f"{format_nbytes(nbytes)} ({nbytes:,} bytes)"
