# SPDX-License-Identifier: Apache-2.0
"""Displays in notebooks are complete and escaped, load nothing and wait for nothing.

A parser checks the HTML of every display. Other tests compare the sums and peaks that
displays show with events that are made by hand.
"""

from __future__ import annotations

import dataclasses
import html.parser
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import programs, session
from support.logs import made

import cumem
from cumem.base import displays
from cumem.base.answer import Answer
from cumem.recording import reading
from cumem.recording.events import TRANSFER, Frame
from cumem.recording.pairing import lanes
from cumem.recording.summary import summarize
from cumem.tools.notebook import html as pieces
from cumem.tools.notebook.cell import Report

MIB = 1 << 20
EMPTY = {"br", "hr", "img", "input", "meta"}


class Page(html.parser.HTMLParser):
    """A parsed page, in which each tag must be closed and none may load anything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "iframe", "object", "img"}
        for name, value in attrs:
            assert name not in {"src", "href", "onclick", "onload"}, (name, value)
        self.tags.append(tag)
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data + "\n"


def page(thing: Any) -> Page:
    """Read the display that a notebook would show."""
    text = thing._repr_html_()
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text
    return Page(text)


# Each of these functions makes an object whose display is tested.


def shortage() -> cumem.OutOfMemoryError:
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.Pool("device", limit=MIB).allocate(64 * MIB)
    return caught.value


def finished() -> cumem.Transfer:
    handle = cumem.copy_async(cumem.empty_device(10), np.ones(10))
    handle.wait()
    return handle


def measured() -> cumem.types.Measure:
    with cumem.measure() as m:
        cumem.empty_pinned(1000)
    return m


#: Each entry makes an object and a pattern that its display must contain.
SHOWN: dict[str, Callable[[], tuple[Any, str]]] = {
    "buffer": lambda: (cumem.empty_pinned((3, 4), "f4"), r"\(3, 4\)\s+dtype\s+float32"),
    "view": lambda: (cumem.empty_device((3, 4))[1:], r"view of\s+a DeviceBuffer"),
    "turned": lambda: (cumem.empty_managed((3, 4)).T, r"strides\s+\(8, 32\), in bytes"),
    "array": lambda: (cumem.asbuffer(np.ones(3)), "HostBuffer"),
    "empty": lambda: (cumem.empty_mapped(0), r"size\s+0 B"),
    "scalar": lambda: (cumem.empty_pinned(()), r"shape\s+\(\)"),
    "transfer": lambda: (finished(), r"state\s+done\s+time\s+.*\s+rate\s+[\d.]+ .?B/s"),
    "pool": lambda: (cumem.Pool("pinned", limit="4MiB"), r"limit\s+4 MiB"),
    "counters": lambda: (cumem.default_pool("device").stats(), "growth count"),
    "stats": lambda: (cumem.stats(), "Stats"),
    "measure": lambda: (measured(), r"measured: [\d.]+ .?s"),
    "snapshot": lambda: (cumem.Pool("pinned").snapshot(), "0 B in 0 segments"),
    "device": lambda: (cumem.Device(0), r"memory\s+1 GiB"),
    "device memory": lambda: (cumem.memory_info(), "free 1 GiB"),
    "host memory": lambda: (cumem.memory_info("host"), "pinned limit"),
    "explanation": lambda: (
        cumem.explain(bytearray(10), cumem.empty_pinned(10, "u1")),
        r"route\s+host",
    ),
    "settings": lambda: (cumem.configure(), "ring_nbytes"),
    "out of memory": lambda: (shortage(), r"what was tried[\s\S]*trimmed"),
    "error": lambda: (cumem.CudaError("a < b", name="x"), "a < b"),
    "out of memory in a copy": lambda: (
        cumem.OutOfMemoryError("a < b", call="f"),
        r"a < b\s+call\s+f\s*$",
    ),
    "advice": lambda: (cumem.recommend("1MiB"), r"kind\s+pinned"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_display_is_whole_and_says_that_it_is_emulated(emulated, name: str) -> None:
    cumem.default_pool("device")
    thing, expected = SHOWN[name]()
    shown = page(thing)
    assert re.search(expected, shown.text), shown.text
    assert "\nemulated\n" in shown.text


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed", "device"])
def test_buffer_is_shown_on_both_backends(runtime, kind: str) -> None:
    buffer = cumem.empty((3, 4), "f4", kind)
    text = page(buffer).text
    assert f"0x{buffer.ptr:x}" in text
    assert "48 B" in text
    assert ("\nemulated\n" in text) == runtime.emulated
    buffer.free()
    assert "closed" in page(buffer).text


def calls() -> dict[str, int]:
    """Count the runtime's calls, except those that the thread watching transfers makes."""
    watched = session.ANSWERED_AT_ONCE - {"copy_async", "copy_peer_async"}
    names = {name for name, _, _ in session.testing.op_names()} - watched
    return {name: session.testing.fault_count(name) for name in names}


def test_display_of_a_buffer_with_work_on_its_stream_makes_no_call(emulated) -> None:
    stream = cumem.Stream()
    source = cumem.full(MIB, 7, "u1", "pinned")
    target = cumem.empty_managed(MIB, "u1")
    with session.gate(stream):
        handle = cumem.copy_async(target, source, stream=stream)
        before = calls()
        for each in (source, target, handle):
            page(each)
        assert calls() == before
        assert not handle.done
        assert "0%" in page(handle).text
    handle.wait()
    assert "0%" not in page(handle).text


def test_display_of_a_buffer_that_is_asleep_says_so(emulated) -> None:
    region = cumem.Region("display")
    with region:
        buf = cumem.zeros((3, 4))
    turned = buf.T
    region.sleep()
    for each, shape in ((buf, r"\(3, 4\)"), (turned, r"\(4, 3\)")):
        shown = page(each).text
        assert re.search(rf"shape\s+{shape}", shown)
        assert "region 'display', which is asleep: call wake() first" in shown
    region.close()
    assert "was closed while it was asleep" in page(buf).text


def test_names_that_others_choose_are_escaped(emulated) -> None:
    name = "<img src=x>&amp;"
    buffer = cumem.empty_pinned(3, np.dtype([(name, "f4")]))
    assert name in page(buffer).text
    assert "img" not in page(buffer).tags
    table = pieces.table(name, [name], [[name]], name)
    assert Page(table).text.count(name) == 4
    assert Page(pieces.facts([(name, name)])).text.count(name) == 2
    assert name in Page(pieces.data({name: [{name: name}]})).text
    assert name in page(cumem.CudaError(name)).text
    log = made(
        [{"op": "allocate", "address": 1, "nbytes": 9, "stack": 1}],
        stacks=[(Frame(name, 3, name),)],
    )
    assert name in page(Report(log, name, lambda _: name)).text


def test_any_answer_is_shown_with_units_and_tables() -> None:
    @dataclasses.dataclass(frozen=True)
    class Group(Answer):
        name: str
        peak_nbytes: int
        kind: str
        more: dict[str, int]

    @dataclasses.dataclass(frozen=True)
    class Found(Answer):
        spent_seconds: float
        growth_ns: int
        gbps: float
        is_lost: bool
        limit_nbytes: int | None
        parts: dict[str, int]
        groups: tuple[Group, ...]
        none: tuple[Group, ...] = ()

    group = Group("a", 3 * MIB, "pinned", {"x": 1})
    parts = {"b_nbytes": 2048, "pinned": 4096}
    found = Found(0.25, 1500, 2.5, True, None, parts, (group,) * 60)
    shown = page(found)
    text = re.sub(r"\n+", "|", shown.text)
    for expected in (
        "spent|250 ms|growth|1.50 µs|rate|2.50 GB/s|is lost|yes|limit|-|none|-|",
        "parts|b|2 KiB|pinned|4 KiB|",
        "groups|name|peak|kind|a|3 MiB|pinned|",
        "and 10 more",
    ):
        assert expected in text
    assert shown.tags.count("tr") == 6 + 2 + 1 + 50
    assert "details" not in shown.tags


def test_map_has_each_block_or_says_how_many_it_has_joined() -> None:
    def shapes(count: int) -> list[str]:
        blocks = tuple(
            cumem.types.Block(512 * i, 512, 500, ("live", "cached")[i % 2])
            for i in range(count)
        )
        segment = cumem.types.Segment(0, 512 * count, blocks)
        text = cumem.types.Snapshot("default", "device", 0, (segment,))._repr_html_()
        Page(text)
        return re.findall("<title>(.*?)</title>", text)

    assert len(shapes(10)) == 10
    assert shapes(10)[-1] == "live, 512 B at 0x1000, 500 bytes asked for"
    many = shapes(100_000)
    assert len(many) < 5000
    joined = [int(tip.split()[0]) for tip in many if "blocks" in tip]
    alone = sum("blocks" not in tip for tip in many)
    assert sum(joined) + alone == 100_000


def test_map_leaves_out_the_smallest_of_many_segments_and_says_so() -> None:
    segments = tuple(
        cumem.types.Segment(
            i << 30, size, (cumem.types.Block(i << 30, size, 0, "cached"),)
        )
        for i in range(50)
        for size in [(i + 1) * MIB]
    )
    text = page(cumem.types.Snapshot("default", "device", 0, segments)).text
    assert "0x0," not in text
    assert f"0x{49 << 30:x}, 50 MiB" in text
    assert "and 18 segments of 171 MiB together" in text


# -- what a log says -------------------------------------------------------------------


def event(op: str, time_ns: int, address: int = 0, nbytes: int = 0, **more: Any) -> Any:
    return {"op": op, "time_ns": time_ns, "address": address, "nbytes": nbytes, **more}


def test_living_counts_each_kind_from_what_lived_before() -> None:
    log = made(
        [
            event("allocate", 100, 1, 10),
            event("allocate", 200, 1, 5, kind="pinned"),
            event("free", 300, 1, 10),
            event("free", 400, 9, 7),
        ],
        living=[event("allocate", 0, 9, 7)],
    )
    found = reading.bytes_over_time(log)
    assert found.times_ns.tolist() == [0, 100, 200, 300, 400, 1000]
    assert found.rows[3].tolist() == [7, 17, 17, 7, 0, 0]
    assert found.rows[0].tolist() == [0, 0, 5, 5, 5, 5]
    assert reading.peaks(log) == {
        "pinned": (5, 200),
        "device": (17, 100),
        "all": (22, 200),
    }


def test_pages_of_others_are_in_no_peak_of_all() -> None:
    log = made(
        [
            event("allocate", 100, 1, 10),
            event("allocate", 200, 5, 90, kind="registered"),
        ]
    )
    found = reading.bytes_over_time(log)
    assert reading.peaks(log)["registered"] == (90, 200)
    assert reading.peaks(log)["all"] == (10, 100) == (summarize(log).peak_nbytes, 100)
    # A picture shows registered memory too, so it is higher than the peak of all.
    assert found.height == 100
    assert "at most 10 B" in Report(log)._repr_html_()


def test_sampled_shows_each_step_at_its_most() -> None:
    log = made(
        [
            event("allocate", 10, 1, 100),
            event("free", 11, 1, 100),
            event("allocate", 560, 2, 8),
        ]
    )
    few = reading.bytes_over_time(log).sampled(10)
    assert few.times_ns.tolist() == [*range(0, 1000, 100)]
    assert few.rows[3].tolist() == [100, 0, 0, 0, 0, 8, 8, 8, 8, 8]
    assert reading.bytes_over_time(made([])).sampled(3).total.tolist() == [0, 0, 0]


def test_left_is_by_line_of_the_user_and_copies_by_way() -> None:
    """What is left is added up by the user's line, and copies by their direction.

    Lines of cumem and of NumPy in a stack are passed over.
    """
    own = Frame(cumem.__file__, 1, "empty")
    first, second = Frame("/a/b.py", 3, "f"), Frame("/a/b.py", 8, "g")
    log = made(
        [
            event("allocate", 1, 1, 10, stack=1),
            event("allocate", 2, 2, 20, stack=1),
            event("allocate", 3, 3, 40, stack=2),
            event("free", 4, 3, 40),
            event("allocate", 5, 3, 5, stack=2),
            event("allocate", 5, 3, 6, stack=0, kind="pinned"),
            event("allocate", 5, 9, 6, stack=1, kind="staging"),
            event("transfer", 6, 1, 1000, value=500, source_kind="pinned"),
            event("transfer", 7, 1, 3000, value=500, source_kind="pinned"),
            event("transfer", 8, 1, 10, value=1, kind="pinned", source_kind="device"),
        ],
        stacks=[(own, first, second), (own, Frame(np.__file__, 1, "zeros"), second)],
    )
    assert reading.left(log) == [
        (first, "device", 2, 30, (1, 2)),
        (None, "pinned", 1, 6, (3,)),
        (second, "device", 1, 5, (3,)),
    ]
    up, down = reading.copies(log)
    assert (up.way, up.copy_count, up.nbytes) == ("pinned → device", 2, 4000)
    assert up.seconds == pytest.approx(1e-6)
    assert (down.way, down.copy_count) == ("device → pinned", 1)
    assert lanes(reading.of_op(log, TRANSFER)).tolist() == [0, 1, 2]


def test_report_of_a_cell_has_peaks_what_is_left_and_copies() -> None:
    line = Frame("/cells/7.py", 2, "<module>")
    log = made(
        [
            event("allocate", 10, 4096, 3 * MIB, stack=1),
            event("transfer", 20, 4096, 2 * MIB, value=400, source_kind="pinned"),
            event("out_of_memory", 600, 0, 1 << 40),
        ],
        stacks=[(line,)],
        lost_count=5,
    )
    report = Report(log, "x", {4096: "x"}.get)
    shown = page(report)
    for text in (repr(report), re.sub(r"\n+", "  ", shown.text)):
        assert re.search(r"7\.py:2\s+x\s+device  1\s+3 MiB", text)
        assert re.search(r"device  3 MiB\s+10\.0 ns", text)
        assert re.search(r"pinned → device  1\s+2 MiB\s+400 ns\s+5\.24 TB/s", text)
        assert "memory ran short 1 time" in text
        assert "5 events did not fit" in text
    assert "\nemulated\n" in shown.text
    assert {"polygon", "rect", "svg"} <= set(shown.tags)
    real = log._replace(machine={"backend": "cuda", "devices": ["H200"]})
    assert "emulated" not in page(Report(real)).text


def test_transfers_less_than_a_pixel_apart_are_drawn_as_one() -> None:
    events = [
        event("transfer", 10 * i, 0, 7, value=9, source_kind="pinned")
        for i in range(10_000)
    ]
    events.append(event("transfer", 150_000, 0, 7, value=100_000, source_kind="pinned"))
    log = made(events, duration_ns=200_000)
    assert reading.joined(reading.of_op(log, TRANSFER), 20) == [
        (0, pytest.approx(100_010), 10_000, 70_000, pytest.approx(90_000e-9)),
        (150_000, 100_000, 1, 7, pytest.approx(1e-4)),
    ]
    shown = Report(log)._repr_html_()
    tips = re.findall("<title>(.*?)</title>", shown)
    assert tips == [
        "pinned → device, 10000 copies, 68.4 KiB, 778 MB/s",
        "pinned → device, 7 B, 70.0 KB/s",
    ]
    ends = [
        float(x) + float(wide)
        for x, wide in re.findall(
            r'<rect x="([\d.]+)" y="96.0" width="([\d.]+)"', shown
        )
    ]
    # One transfer still runs when the picture ends, so its bar is cut off there.
    assert ends == pytest.approx([345, 624], abs=0.2)


def test_report_of_a_cell_that_did_nothing_says_so() -> None:
    report = Report(made([], duration_ns=0))
    assert "left alive: nothing" in repr(report)
    shown = page(report)
    assert "no memory was allocated" in shown.text
    assert not {"svg", "table"} & set(shown.tags)


def test_colours_are_variables_of_the_notebook_or_those_of_the_page() -> None:
    """This makes a page readable in light and in dark mode."""
    style = pieces._STYLE
    for name, value in re.findall(r"(--cm-\w+):([^;]*);", style):
        assert re.fullmatch(r"var\(--jp-[\w-]+,color-mix\(.*\)\)", value), name
    without = re.sub(r"--cm-\w+:[^;]*;", "", style)
    # Only the edge of an alert has a fixed colour.
    assert re.findall(r"#[0-9a-f]{3,6}", without) == ["#d55e00"]
    assert Path(pieces.__file__).read_text().count("prefers-color-scheme") == 0


# -- the table of %cumem, without a kernel ---------------------------------------------


def shell_of(**names: Any) -> Any:
    """Make an object with the parts of IPython's shell that the table uses."""
    return types.SimpleNamespace(
        user_ns={"In": ["", "x"], **names},
        user_ns_hidden={"In": [], "Out": {}},
    )


def test_table_lists_what_lives_with_its_line_and_its_variables(
    emulated, monkeypatch
) -> None:
    magics = pytest.importorskip("cumem.tools.notebook.magics")
    buf = cumem.empty_pinned((2, 3), "f4")
    alive = [
        types.SimpleNamespace(
            kind=kind,
            device=0,
            address=address,
            requested_nbytes=nbytes,
            line=line,
        )
        for kind, address, nbytes, line in (
            ("pinned", buf.ptr, 24, "/c/d.py:7 (f)"),
            ("device", 4096, 3 * MIB, "/a/b.py:2 (g)"),
            ("staging", 9, 9 * MIB, None),
            *(("managed", 1 << 20 + i, 8, None) for i in range(20)),
        )
    ]
    living = types.SimpleNamespace(buffers=alive)
    monkeypatch.setattr(magics, "live", lambda: living)
    table = magics.Overview(shell_of(_1=buf, Out={1: buf}, array=buf.numpy()[1:]))
    lines = [re.split("  +", line) for line in repr(table).splitlines()]
    assert ["-", "device", "-", "-", "0", "3 MiB", "b.py:2 (g)"] in lines
    own = ["Out[1], array", "pinned", "(2, 3)", "float32", "0", "24 B", "d.py:7 (f)"]
    assert own in lines
    assert "and 12 more buffers; In[1], " in repr(table)
    assert "9 MiB" not in repr(table)
    assert "b.py:2 (g)" in page(table).text
    del alive[1]
    assert magics.Overview(shell_of()).key != table.key


def test_variables_of_closed_and_changing_things_are_passed_over(emulated) -> None:
    """A variable may hold a freed buffer, a released view, a list that contains itself,
    or a proxy that raises. The search must go on after each of them.
    """
    magics = pytest.importorskip("cumem.tools.notebook.magics")
    buf, gone = cumem.empty_pinned(8, "u1"), cumem.empty_pinned(8, "u1")
    gone.free()
    loop: list[Any] = []
    loop.append(loop)

    class Proxy:
        @property
        def __class__(self) -> type:
            raise RuntimeError("of nothing yet")

    with memoryview(buf) as released:
        pass
    found = magics.Holders(
        shell_of(
            x=released,
            y=Proxy(),
            a=gone,
            b=memoryview(buf.numpy()),
            c=loop,
            d=(buf[2:],),
            e=cumem.empty(0),
        )
    )
    assert found.at(buf.ptr) == "b, d[0]"
    assert found.buffer_at(buf.ptr + 7) is buf
    assert found.at(buf.ptr + 8) == ""


def test_tools_are_loaded_by_the_first_display_and_not_before() -> None:
    done = programs.run(
        "-c",
        "import sys, cumem\n"
        "pool = cumem.default_pool('pinned')\n"
        "found = cumem.stats(), repr(pool)\n"
        "assert not [name for name in sys.modules if name.startswith('cumem.tools')]\n"
        "assert '<table>' in found[0]._repr_html_() and 'cumem.Pool' in pool._repr_html_()",
    )
    assert done.returncode == 0, done.stderr


def test_display_is_that_of_the_nearest_type_or_none() -> None:
    class Thing:
        pass

    class Special(Thing):
        pass

    assert displays.show("html", Thing()) is None
    displays.shows("html", Thing)(lambda thing, *more: ("thing", *more))
    assert displays.show("html", Special(), 3) == ("thing", 3)
    displays.shows("html", Special)(lambda thing: "special")
    assert displays.show("html", Special()) == "special"
    assert displays.show("html", Thing()) == ("thing",)
    assert displays.show("plot", Special()) is None
