# SPDX-License-Identifier: Apache-2.0
"""Plots with matplotlib, which ``pip install 'cumem[plot]'`` installs.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart. Axes have
units, and titles name the GPU or say that the device is emulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cumem import _core
from cumem.base.colours import KIND_COLOURS, STATE_COLOURS
from cumem.base.displays import shows
from cumem.base.units import format_nbytes
from cumem.devices.device import Device
from cumem.pools.snapshot import Snapshot
from cumem.recording import reading
from cumem.recording.events import KINDS, OUT_OF_MEMORY, TRANSFER, Log
from cumem.recording.pairing import lanes
from cumem.recording.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PINNED_ROWS", "plot_pool", "plot_rates", "plot_record"]

_STEPS: Final = 1000  # steps of time, about as many as a picture has pixels
_MOST_SEGMENTS: Final = 40
_EMULATED: Final = "emulated: timings mean nothing"
#: The curve of rows that are copied by random numbers.
PINNED_ROWS: Final = "pinned, rows of 16 KiB"
# All curves must be visible even if they coincide. So each has its own width, dashes and
# marks, and those further down in this table are drawn on top with wider gaps.
_STYLES: Final[dict[str, dict[str, Any]]] = {
    "pageable": {"marker": "o", "markersize": 5},
    "pinned": {"marker": "s", "markersize": 8, "linewidth": 4},
    "write-combined": {"color": "#e69f00", "marker": "D", "linestyle": (0, (4, 2))},
    "mapped": {"marker": "^", "linestyle": (0, (2, 4))},
    "managed": {"marker": "v", "linestyle": (0, (6, 2, 1, 2))},
    PINNED_ROWS: {"color": "black", "marker": "x", "linestyle": (0, (1, 2))},
}
_LINE: Final[dict[str, Any]] = {
    "linewidth": 1.5,
    "markersize": 4,
    "markerfacecolor": "none",
}


@shows("plot", Record)
def plot_record(log: Any, ax: Axes | None = None) -> Axes:
    """Draw a record: the bytes alive over time, by kind, and below them the transfers.

    Parameters
    ----------
    log : Log or Record
        The record to draw.
    ax : matplotlib Axes, optional
        Where to draw; by default in a new figure.

    Returns
    -------
    matplotlib Axes
        The axes of the upper part. If there were transfers, the axes that show them are its
        ``child_axes[0]``.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    log = getattr(log, "log", log)
    ways = reading.copies(log)
    height = 0.09 * len(
        ways
    )  # all lanes, as a fraction of the height of the upper part
    if ax is None:
        ax = _axes(ax, (9, 4.5), constrained=False)
        below_it = (height + 0.06) if ways else 0.0
        bottom = (0.11 + 0.93 * below_it) / (1 + below_it)
        ax.figure.subplots_adjust(left=0.17, right=0.84, top=0.93, bottom=bottom)
    end = max(log.duration_ns, 1)
    unit_ns, unit = _time_unit(end)
    alive = reading.bytes_over_time(log).sampled(
        _STEPS
    )  # each step shows its highest point, so no peak is lost
    times = np.append(alive.times_ns, end) / unit_ns
    most = alive.height
    scale, name = _size_unit(most)
    floor = np.zeros(len(times))
    for kind, row in zip(KINDS, alive.rows, strict=True):
        if row.any():
            top = floor + np.append(row, row[-1]) / scale
            colour = KIND_COLOURS[kind]
            ax.fill_between(
                times, floor, top, step="post", color=colour, label=kind, linewidth=0
            )
            floor = top
    short = reading.of_op(log, OUT_OF_MEMORY)
    for i, event in enumerate(short[:_STEPS]):
        label = "out of memory" if i == 0 else None
        ax.axvline(
            event["time_ns"] / unit_ns, color="black", linestyle="--", label=label
        )
    ax.set_xlim(0, end / unit_ns)
    ax.set_ylim(0, most / scale * 1.05 or 1)
    ax.set_ylabel(f"memory alive ({name})")
    ax.grid(alpha=0.3)
    _title(ax, f"at most {format_nbytes(int(alive.total.max()))} alive", _machine(log))
    if ax.get_legend_handles_labels()[0]:
        ax.legend(
            loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize="small"
        )
    below = _draw_lanes(ax, log, ways, height, unit_ns) if ways else ax
    below.set_xlabel(f"time ({unit})")
    return ax


def _draw_lanes(
    ax: Axes, log: Log, ways: list[reading.Copies], height: float, unit_ns: float
) -> Axes:
    """Draw transfers below `ax`, with a row for each pair of kinds.

    Transfers that ran at the same time have lanes of their own within the row.
    """
    below: Axes = ax.inset_axes((0, -0.06 - height, 1, height), sharex=ax)
    least = max(log.duration_ns, 1) / _STEPS
    transfers = np.sort(reading.of_op(log, TRANSFER), order="time_ns")
    for y, each in enumerate(ways):
        source, target = KINDS.index(each.source_kind), KINDS.index(each.kind)
        own = transfers[
            (transfers["source_kind"] == source) & (transfers["kind"] == target)
        ]
        places = lanes(own)
        deep = 0.8 / (int(np.max(places)) + 1)
        for lane in range(int(np.max(places)) + 1):
            spans = reading.joined(own[places == lane], least)
            below.broken_barh(
                [(span.begin_ns / unit_ns, span.lasts_ns / unit_ns) for span in spans],
                (y - 0.4 + lane * deep, deep * 0.9),
                facecolor=KIND_COLOURS[each.kind],
            )
    below.set_yticks(range(len(ways)), [each.way for each in ways], fontsize="small")
    below.set_ylim(len(ways) - 0.5, -0.5)
    ax.tick_params(labelbottom=False)
    return below


@shows("plot", Snapshot)
def plot_pool(pool: Any, ax: Axes | None = None) -> Axes:
    """Draw each segment of a pool as a row, with its blocks coloured by their state.

    Parameters
    ----------
    pool : Pool or Snapshot
        A pool, which is drawn as it is now, or a snapshot of an earlier state.
    ax : matplotlib Axes, optional
        Where to draw; by default in a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    ValueError
        If the pool is closed.

    Notes
    -----
    Addresses that have no memory are left out. If there are more than 40 segments, only the
    40 largest are drawn.
    """
    found = pool.snapshot() if hasattr(pool, "snapshot") else pool
    segments = sorted(found.segments, key=lambda each: -int(each.reserved_nbytes))
    shown = sorted(segments[:_MOST_SEGMENTS], key=lambda each: int(each.address))
    ax = _axes(ax, (9, 1.6 + 0.22 * len(shown)))
    most = max((int(each.reserved_nbytes) for each in shown), default=0)
    scale, unit = _size_unit(most)
    for y, segment in enumerate(shown):
        spans: dict[str, list[tuple[float, float]]] = {}
        x = 0
        for block in segment.blocks:
            if block.state != "gap":
                spans.setdefault(block.state, []).append(
                    (x / scale, block.nbytes / scale)
                )
                x += block.nbytes
        for state, bars in spans.items():
            ax.broken_barh(
                bars,
                (y - 0.4, 0.8),
                facecolor=STATE_COLOURS[state],
                edgecolor="white",
                linewidth=0.4 if len(bars) < 200 else 0,
            )
    names = [f"0x{each.address:x}" for each in shown]
    ax.set_yticks(range(len(shown)), names, fontsize="small", family="monospace")
    ax.set_ylim(max(len(shown), 1) - 0.5, -0.5)
    ax.set_xlim(0, most / scale or 1)
    ax.set_ylabel("segment at")
    ax.set_xlabel(f"bytes of the segment ({unit})")
    _state_legend(ax)
    reserved = sum(int(each.reserved_nbytes) for each in segments)
    what = f"{found.kind} {found.device} {found.name}: {format_nbytes(reserved)}"
    if len(segments) > len(shown):
        what += f", the largest {len(shown)} of {len(segments)} segments"
    _title(ax, what, _device_name(found.device))
    return ax


def _state_legend(ax: Axes) -> None:
    from matplotlib.patches import Patch

    states = ("live", "in flight", "cached")
    ax.legend(
        handles=[Patch(color=STATE_COLOURS[each], label=each) for each in states],
        loc="upper left",
        bbox_to_anchor=(1.005, 1),
        frameon=False,
        fontsize="small",
    )


def plot_rates(
    panels: Mapping[str, tuple[Mapping[str, Sequence[tuple[int, float]]], float]],
    title: str,
    warning: str | None,
) -> Figure:
    """Draw rates over sizes, for ``python -m cumem bench --plot``.

    Parameters
    ----------
    panels : mapping
        Maps the name of each panel to a pair. The first item maps each kind of memory, and
        `PINNED_ROWS`, to its points (bytes, GB/s). The second is the ceiling in GB/s.
    title : str
        The name of the machine that was measured.
    warning : str or None
        A text to write large across the picture, for figures that are not a GPU's.

    Returns
    -------
    matplotlib Figure
    """
    _need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (name, (curves, ceiling)) in zip(axes, panels.items(), strict=True):
        ticks = sorted({nbytes for points in curves.values() for nbytes, _ in points})
        for kind, points in curves.items():
            colour = {"color": KIND_COLOURS.get(kind)}
            axis.plot(*_columns(points), label=kind, **_LINE | colour | _STYLES[kind])
        axis.axhline(
            ceiling, color="black", linewidth=0.8, linestyle=":", label="ceiling"
        )
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [format_nbytes(tick) for tick in ticks], rotation=45)
        axis.set_title(name)
        axis.set_xlabel("bytes per copy")
        axis.grid(alpha=0.3)
    axes[0].set_ylim(
        bottom=0
    )  # after all lines, each of which may raise the upper limit
    axes[0].set_ylabel("GB/s (median)")
    axes[-1].legend(frameon=False)
    figure.suptitle(title)
    if warning is not None:
        place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 22}
        figure.text(0.5, 0.5, warning, alpha=0.3, rotation=20, **place)
    return figure


# -- helpers of all plots --------------------------------------------------------------


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        error.add_note("plots need matplotlib: pip install 'cumem[plot]'")
        raise


def _axes(ax: Axes | None, size: tuple[float, float], constrained: bool = True) -> Axes:
    _need_matplotlib()
    if ax is not None:
        return ax
    from matplotlib import pyplot

    layout = "constrained" if constrained else None
    axes: Axes = pyplot.subplots(figsize=size, layout=layout)[1]
    return axes


def _title(ax: Axes, what: str, machine: str) -> None:
    ax.set_title(f"{what} · {machine}", fontsize="medium", loc="left")


def _machine(log: Log) -> str:
    names = ", ".join(dict.fromkeys(log.machine.get("devices", ()))) or "no device"
    return (
        f"{names} ({_EMULATED})" if log.machine.get("backend") == "emulated" else names
    )


def _device_name(index: int) -> str:
    return "emulated device" if _core._is_emulated() else Device(index).name


def _columns(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    points = list(points)
    return [nbytes for nbytes, _ in points], [rate for _, rate in points]


def _size_unit(most: int) -> tuple[int, str]:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if most >= 1 << power:
            return 1 << power, unit
    return 1, "bytes"


def _time_unit(ns: int) -> tuple[float, str]:
    for unit_ns, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if ns >= 2 * unit_ns:
            return unit_ns, unit
    return 1.0, "ns"
