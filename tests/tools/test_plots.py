# SPDX-License-Identifier: Apache-2.0
"""Tests of the plots of records, pools and benchmarks.

A record is made by hand, so that the areas, bars and labels which Matplotlib has to draw
are known. Each plot must have units and the name of the device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.logs import made

import cumem
from cumem import plots
from cumem.base.colours import KIND_COLOURS, STATE_COLOURS
from cumem.recording.events import KINDS
from cumem.tools.bench.cases import COPY_KINDS

# No version of Python changes what these tests show.
pytestmark = pytest.mark.any_python

matplotlib = pytest.importorskip("matplotlib")

MIB = 1 << 20
#: The colours of Okabe and Ito, which most colour-blind readers can distinguish.
OKABE_ITO = {
    *("#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00"),
    "#cc79a7",
}


@pytest.fixture(autouse=True)
def without_windows() -> Iterator[None]:
    """Draw without a display, and close the figures at the end."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield
    pyplot.close("all")


def event(op: str, time_ns: int, nbytes: int = 0, **more: Any) -> dict[str, Any]:
    """Return an event of a record."""
    return {"op": op, "time_ns": time_ns, "nbytes": nbytes, **more}


#: Three transfers, two of which overlap in time, a block that is freed, and a shortage.
LOG = made(
    [
        event("allocate", 1_000_000, 8 * MIB, address=1),
        event("transfer", 1_500_000, 4 * MIB, value=2_000_000, source_kind="pinned"),
        event("transfer", 2_000_000, 4 * MIB, value=1_000_000, source_kind="pinned"),
        event(
            "transfer", 9_000_000, MIB, value=50, kind="pinned", source_kind="device"
        ),
        event("out_of_memory", 5_000_000, 1 << 40),
        event("free", 6_000_000, 8 * MIB, address=1),
    ],
    living=[event("allocate", 0, 4 * MIB, kind="pinned", address=2)],
    duration_ns=10_000_000,
)


def test_record_is_drawn_with_units_and_the_name_of_the_device() -> None:
    ax = plots.plot_record(LOG)
    [below] = ax.child_axes
    assert ax.get_ylabel() == "memory alive (MiB)"
    assert below.get_xlabel() == "time (ms)"
    assert ax.get_xlim() == (0, 10)
    title = ax.get_title(loc="left")
    assert title == "at most 12 MiB alive · a device (emulated: timings mean nothing)"
    labels = ax.get_legend_handles_labels()[1]
    assert labels == ["pinned", "device", "out of memory"]
    [mark] = ax.lines
    assert mark.get_xdata()[0] == pytest.approx(5)
    assert [each.get_text() for each in below.get_yticklabels()] == [
        "pinned → device",
        "device → pinned",
    ]
    real = LOG._replace(machine={"backend": "cuda", "devices": ["NVIDIA H200"] * 2})
    title = plots.plot_record(real).get_title(loc="left")
    assert title.endswith("alive · NVIDIA H200")


def test_areas_are_as_high_as_what_was_alive() -> None:
    pinned, device = plots.plot_record(LOG).collections[:2]

    def height(area: Any, time_ms: float) -> float:
        """Return how high the area reaches at a time. Areas stand on each other."""
        x, y = area.get_paths()[0].vertices.T
        return float(y[np.abs(x - time_ms) < 0.02].max())

    assert height(pinned, 0.5) == height(pinned, 8) == 4
    assert height(device, 3) == 12
    assert height(device, 8) == 4


def test_transfers_at_one_time_lie_in_different_lanes() -> None:
    [below] = plots.plot_record(LOG).child_axes
    bars = [each.get_paths() for each in below.collections]
    spans = [
        [tuple(p.get_extents().intervalx) for p in paths] for paths in bars if paths
    ]
    assert spans[0] == [pytest.approx((1.5, 3.5))]
    assert spans[1] == [pytest.approx((2.0, 3.0))]
    heights = [paths[0].get_extents().intervaly for paths in bars[:2]]
    assert heights[0][1] < heights[1][0] + 1e-9
    shown_ms = spans[2][0][1] - spans[2][0][0]
    assert shown_ms == pytest.approx(10 / plots._STEPS)  # it is short, but can be seen


def test_record_takes_axes_and_whatever_has_a_log() -> None:
    from matplotlib.figure import Figure

    class Record:
        log = LOG

    ax = Figure().subplots()
    assert plots.plot_record(Record(), ax) is ax
    empty = plots.plot_record(made([], duration_ns=0), Figure().subplots())
    assert empty.child_axes == []
    assert empty.get_xlabel() == "time (ns)"


def test_long_record_is_drawn_with_few_shapes() -> None:
    count = 50_000
    events = []
    for i in range(count):
        events += [
            event("allocate", 10 * i, MIB, address=i),
            event("transfer", 10 * i, 10, value=4, source_kind="pinned"),
        ]
    ax = plots.plot_record(made(events, duration_ns=10 * count))
    [below] = ax.child_axes
    assert sum(len(c.get_paths()) for c in below.collections) <= 2 * plots._STEPS
    assert sum(len(c.get_paths()[0].vertices) for c in ax.collections) < 10_000


def test_pool_is_drawn_segment_by_segment(runtime) -> None:
    pool = cumem.Pool("pinned", segments="malloc")
    kept = [pool.allocate(MIB) for _ in range(4)]
    del kept[1]
    ax = pool.plot()
    found = pool.snapshot()
    assert len(ax.get_yticks()) == len(found.segments)
    drawn = {
        matplotlib.colors.to_hex(each.get_facecolor()[0]): each.get_paths()
        for each in ax.collections
    }
    assert set(drawn) == {STATE_COLOURS["live"], STATE_COLOURS["cached"]}
    nbytes = sum(
        np.ptp(path.get_extents().intervalx)
        for each in ax.collections
        for path in each.get_paths()
    )
    scale = {"bytes of the segment (MiB)": MIB, "bytes of the segment (KiB)": 1024}
    reserved = pool.stats().reserved_nbytes
    assert nbytes * scale[ax.get_xlabel()] == pytest.approx(reserved)
    where = "emulated device" if runtime.emulated else cumem.Device(0).name
    assert ax.get_title(loc="left").endswith(where)


def test_snapshot_of_many_segments_is_drawn_with_the_largest_and_says_so(
    emulated,
) -> None:
    segments = tuple(
        cumem.types.Segment(
            i << 30, size, (cumem.types.Block(i << 30, size, 0, "cached"),)
        )
        for i in range(100)
        for size in [(i + 1) * MIB]
    )
    ax = cumem.types.Snapshot("default", "device", 0, segments).plot()
    assert "the largest 40 of 100 segments" in ax.get_title(loc="left")
    assert ax.get_yticklabels()[0].get_text() == hex(60 << 30)


def test_empty_pool_can_be_drawn_and_a_closed_one_cannot(emulated) -> None:
    pool = cumem.Pool()
    axes = pool.plot()
    assert (list(axes.collections), axes.get_xlim()) == ([], (0, 1))
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.plot()


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, emulated) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError) as caught:
        cumem.Pool().plot()
    assert caught.value.__notes__ == [
        "plots need matplotlib: pip install 'cumem[plot]'"
    ]


def test_colours_can_be_distinguished_by_colour_blind_readers() -> None:
    assert tuple(sorted(KIND_COLOURS)) == tuple(sorted(KINDS))
    assert {*KIND_COLOURS.values()} - {"#7f7f7f"} <= OKABE_ITO
    assert len({*KIND_COLOURS.values()}) == len(KINDS)
    assert {*STATE_COLOURS.values()} <= OKABE_ITO | {""}


def test_curves_that_lie_on_each_other_can_be_distinguished() -> None:
    styles = plots._STYLES
    assert list(styles) == [*COPY_KINDS, plots.PINNED_ROWS]
    shapes = [
        (style.get("linestyle", "solid"), style.get("linewidth"), style["marker"])
        for style in styles.values()
    ]
    assert len(set(shapes)) == len(styles)
    # Dashes of the upper curves let the curve beneath them be seen.
    after = list(COPY_KINDS)[list(COPY_KINDS).index("pinned") + 1 :]
    assert all("linestyle" in styles[kind] for kind in after)
    assert plots._LINE["markerfacecolor"] == "none"
