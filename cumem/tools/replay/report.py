# SPDX-License-Identifier: Apache-2.0
"""What a replay found: its numbers, as data with the machine they come from and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cumem.base.units import format_nbytes
from cumem.devices.device import Device
from cumem.tools import info

__all__ = ["Replayed", "Waste", "as_data", "render", "render_comparison"]


@dataclass(frozen=True, slots=True)
class Waste:
    """Reserved bytes that nobody asked for, by cause, when the peak was reached first.

    All four together are what was reserved. It is the moment of the growth that made the
    peak; as much may be reserved later again, or still, with less of it live.

    Parameters
    ----------
    requested : int
        What was asked for and live at that moment, which is not waste.
    rounding : int
        Blocks larger than what was asked for.
    fragmentation : int
        Free and held, but of no use for what was asked for then.
    in_flight : int
        Freed, with work that may still run.
    """

    requested: int
    rounding: int
    fragmentation: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one allocator made of a trace. Sizes in bytes, times in nanoseconds.

    Parameters
    ----------
    trace, allocator, version, backend, kind, pool : str
        What was replayed, on what.
    events, allocations, skipped, streams : int
        Of the trace.
    peak_live, peak_reserved : int
        Most that was asked for at once, and most that was held from the driver.
    ratio : float
        The second over the first.
    ns_per_event : float
        Of the timed loop, growth included, from an empty pool; median of the rounds.
    loop_ns : float
        What the same loop costs per event when it allocates nothing.
    ns_per_event_warm : float or None
        The same on a warm pool, where asked for.
    growths : int or None
        Times that the driver was asked for memory.
    waste : Waste or None
        Where the allocator tells.
    late : int
        Events that a freed block stays in use for; 0 for none.
    late_on : str
        Whose work is late.
    forced : int
        Times that late work had to be let go since the allocator waited for it.
    peak_busy : int
        Most that was live or late at once: the least that can be reserved.
    ratio_busy : float
        Peak reserved over that.
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
    """Results as one object for ``json``, with the machine they come from."""
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
    """Turn one result into aligned text."""
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
    """Turn results of several allocators into a table."""
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
