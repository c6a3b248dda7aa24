# SPDX-License-Identifier: Apache-2.0
"""Tests of the figures of traces of allocations, and of the formats of their files.

A trace is a list of allocations and frees. It comes from an .npz file, from the CSV that
RMM writes, or from a snapshot of PyTorch. Files that make no sense or could do harm are
refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.traces import (
    BLOCK,
    KIB,
    OP,
    PEAK_LIVE,
    hand_checked,
    write_npz,
)

from cumem.tools.replay.trace import Hold, load_trace, make_trace, parse_late

# No version of Python changes what these tests show.
pytestmark = pytest.mark.any_python


def write_csv(path: Path, *rows: str) -> Path:
    """Write rows as RMM does, below its header."""
    text = "Thread,Time,Action,Pointer,Size,Stream\n" + "\n".join(rows) + "\n"
    path.write_text(text, encoding="utf-8")
    return path


def entry(action: str, addr: int, size: int, stream: int = 0) -> dict[str, object]:
    """Return an entry of a snapshot of PyTorch."""
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": stream,
        "time_us": 1,
        "frames": [{"filename": "a.py", "line": 1, "name": "f"}],
    }


def write_snapshot(path: Path, *devices: list[object], **more: object) -> Path:
    """Write a snapshot of PyTorch, with the entries of each device."""
    snapshot = {"segments": [], "device_traces": list(devices), **more}
    path.write_bytes(pickle.dumps(snapshot))
    return path


# -- facts of a trace ------------------------------------------------------------------


def test_peak_live_is_the_one_worked_out_by_hand() -> None:
    trace = hand_checked()
    assert trace.peak_live == PEAK_LIVE
    assert (trace.events, trace.allocations, trace.stream_count) == (7, 4, 1)
    assert trace.size.tolist() == [n * KIB for n in (4, 4, 4, 12, 12, 8, 4)]


def test_peak_busy_adds_blocks_that_are_held() -> None:
    # If freed blocks are held for one event, each of them counts in one more row. The peak
    # is in the rows in which 12 KiB are live or held beside 4 KiB.
    assert hand_checked().peak_busy(Hold(1)) == (4 + 12) * KIB
    # If blocks are held to the end, every block that was allocated counts.
    assert hand_checked().peak_busy(Hold(100)) == (4 + 4 + 12 + 8) * KIB


@pytest.mark.parametrize("events", [1, 2, 3, 4, 5, 8, 100, 1001])
def test_hold_keeps_blocks_for_its_events_and_at_most_a_quarter_more(
    events: int,
) -> None:
    hold = Hold(events)
    for row in range(3 * hold.step):
        kept = (row // hold.step + hold.windows) * hold.step - row
        assert events <= kept <= events + max(1, events // 4)


def test_peak_busy_agrees_with_a_plain_loop() -> None:
    """The peak of a random trace is worked out once more, with held blocks in a list."""
    random = np.random.default_rng(5)
    live: list[int] = []
    rows: list[tuple[int, int, int]] = []
    sizes: dict[int, int] = {}
    for block in range(400):
        if live and random.random() < 0.45:
            gone = live.pop(int(random.integers(len(live))))
            rows.append((0, gone, 0))
        sizes[block] = int(random.integers(1, 1000))
        rows.append((1, block, sizes[block]))
        live.append(block)
    op, blocks, size = (list(column) for column in zip(*rows, strict=True))
    trace = make_trace("random", op, blocks, size, [0] * len(op))
    for hold in (Hold(1), Hold(7), Hold(50)):
        held: list[tuple[int, int]] = []
        now = peak = 0
        for row, (what, block, _) in enumerate(rows):
            window = row // hold.step
            now -= sum(n for end, n in held if end <= window)
            held = [(end, n) for end, n in held if end > window]
            if what:
                now += sizes[block]
            else:
                held.append((window + hold.windows, sizes[block]))
            peak = max(peak, now)
        assert trace.peak_busy(hold) == peak


def test_streams_are_numbered_densely() -> None:
    trace = hand_checked([7, 200, 7, 7, 7, 200, 200])
    assert trace.stream_count == 2
    assert trace.stream.tolist() == [0, 1, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("text", "events"), [("1", 1), ("500", 500), ("0.01", 10), ("1.0", 1000)]
)
def test_late_is_events_or_a_fraction(text: str, events: int) -> None:
    assert parse_late(text, 1000) == Hold(events)


@pytest.mark.parametrize("text", ["8", str(2**63 - 1), str(2**64), "9" * 5000])
def test_late_beyond_the_trace_is_until_its_end(text: str) -> None:
    trace = hand_checked()
    hold = parse_late(text, trace.events)
    assert hold == Hold(7)
    assert trace.peak_busy(hold) == (4 + 4 + 12 + 8) * KIB


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "0.0", "much", "nan", "inf", ""])
def test_late_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number of events or a fraction"):
        parse_late(text, 1000)


def test_more_live_than_there_are_addresses_is_refused() -> None:
    count, size = 70_000, 1 << 47  # the sum needs more than 63 bits
    with pytest.raises(ValueError, match=r"huge: 8\.5 EiB live at once.*address space"):
        make_trace("huge", [1] * count, range(count), [size] * count, [0] * count)
    with pytest.raises(ValueError, match=r"128 TiB live at once.*address space"):
        make_trace("huge", [1, 1], [0, 1], [size, 1], [0, 0])
    assert make_trace("most", [1, 0, 1], [0, 0, 1], [size] * 3, [0] * 3).peak_live


# -- .npz ------------------------------------------------------------------------------


def test_npz_gives_the_four_arrays(tmp_path: Path) -> None:
    trace = load_trace(write_npz(tmp_path / "a.npz"))
    assert trace.op.tolist() == OP
    assert trace.block.tolist() == BLOCK
    assert trace.peak_live == PEAK_LIVE
    assert trace.name == "a.npz"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": np.array([1, 1, 0, 1, 2, 1, 0])}, "row 4: op 2 is neither"),
        ({"block": np.array([0, 1, 9, 2, 2, 3, 1])}, "row 2: block 9 was never"),
        ({"block": np.array([0, 1, 0, 2, 0, 3, 1])}, "row 4: block 0 was freed before"),
        (
            {"block": np.array([0, 0, 0, 2, 2, 3, 1])},
            "row 1: block 0 is live since row",
        ),
        ({"size": np.array([1, -5, 0, 1, 0, 1, 0])}, "row 1: size -5 is negative"),
        (
            {"size": np.array([1, 1, 0, 1 << 60, 0, 1, 0])},
            "row 3: size .* is more than",
        ),
        (
            {"size": np.array([1, 1, 0, 2**64 - 1, 0, 1, 0], np.uint64)},
            "row 3: size 18446744073709551615 is too large",
        ),
        ({"size": np.array([4, 1, 3, 1, 0, 1, 0])}, "row 2: frees 3 bytes of block 0"),
        ({"size": np.zeros(7, int)}, "no row allocates anything"),
        ({"size": np.ones(7)}, "size is float64"),
        ({"op": np.ones(7, bool)}, "op is bool"),
        ({"block": np.array(["a"] * 7)}, "block is <U1"),
        ({"op": np.array([[1]])}, r"op is int64 of shape \(1, 1\)"),
        ({"stream": np.zeros(6, np.uint8)}, "differ in length: op 7, .* stream 6"),
        ({"op": np.zeros(0, np.uint8)}, "op is empty"),
        ({"op": np.array([object()] * 7)}, "[Oo]bject arrays"),
    ],
)
def test_npz_that_makes_no_sense_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_trace(write_npz(tmp_path / "a.npz", **changes))


def test_npz_without_an_array_says_what_it_has(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", op=[1], weights=[2])
    with pytest.raises(ValueError, match="no array 'block'; there are: op, weights"):
        load_trace(tmp_path / "a.npz")


def test_npz_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="zip"):
        load_trace(path)


def test_block_number_may_come_again_after_its_free(tmp_path: Path) -> None:
    trace = make_trace("again", [1, 0, 1, 0], [5, 5, 5, 5], [3, 0, 8, 8], [0] * 4)
    assert trace.peak_live == 8


def test_file_of_no_format_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"hello", b"\x00" * 100):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ValueError, match=r"neither an \.npz .* nor a PyTorch"):
            load_trace(tmp_path / "a")


# -- RMM's CSV -------------------------------------------------------------------------


def test_csv_follows_addresses(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "rmm.csv",
        "11,09:30:01.000001,allocate,0x7f10,4096,0x0",
        "12,09:30:01.000002,allocate,7f20,100,0x55aa",  # older versions write no 0x
        "11,09:30:01.000003,free,0x7f10,4096,0x0",
        "",
        "11,09:30:01.000004,allocate failure,(nil),99999,0x0",
        "11,09:30:01.000005,allocate,(nil),0,0x0",
        "11,09:30:01.000006,allocate,0x7f10,50,0x0",  # the address is used again
        "11,09:30:01.000007,free,(nil),0,0x0",
        "12,09:30:01.000008,free,0x7f20,100,0x55aa",
    )
    trace = load_trace(path)
    assert trace.op.tolist() == [1, 1, 0, 1, 0]
    assert trace.block.tolist() == [0, 1, 0, 2, 1]
    assert trace.size.tolist() == [4096, 100, 4096, 50, 100]
    assert trace.stream.tolist() == [0, 1, 0, 0, 1]
    assert trace.skipped == 3
    assert trace.peak_live == 4196


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1,0,free,0x20,8,0", "line 3: frees 0x20, which is not live"),
        ("1,0,allocate,0x10,8,0", "line 3: allocates 0x10, which is live already"),
        ("1,0,free,0x10,9,0", "line 3: frees 9 bytes of block 0, which has 8"),
        ("1,0,allocate,0x20,-8,0", "line 3: size -8"),
        ("1,0,allocate,0x20,281474976710656,0", "line 3: size 281474976710656"),
        ("1,0,allocate,0x20,8.5,0", "line 3: '8.5' is not a size"),
        ("1,0,allocate,there,8,0", "line 3: 'there' is not an address"),
        ("1,0,resize,0x10,8,0", "line 3: unknown action 'resize'"),
        ("1,0,free,0x10,8", "line 3: 5 columns instead of 6"),
        ('1,0,free,"0x10,8,0', "unexpected end of data"),
    ],
)
def test_csv_that_makes_no_sense_is_refused(
    tmp_path: Path, row: str, message: str
) -> None:
    path = write_csv(tmp_path / "rmm.csv", "1,0,allocate,0x10,8,0", row)
    with pytest.raises(ValueError, match=message):
        load_trace(path)


def test_csv_with_another_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("Thread,Time,Action,Address\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.csv, line 1: expected the header"):
        load_trace(path)


def test_csv_with_a_header_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no events"):
        load_trace(write_csv(tmp_path / "rmm.csv"))


def test_csv_with_bytes_that_are_not_text_is_refused(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "rmm.csv", "1,0,allocate,0x10,8,0")
    path.write_bytes(path.read_bytes() + b"\xff\xfe")
    with pytest.raises(ValueError, match="utf-8"):
        load_trace(path)


# -- PyTorch's snapshot ----------------------------------------------------------------


def test_snapshot_frees_when_the_free_is_completed(tmp_path: Path) -> None:
    entries: list[object] = [
        entry("free_completed", 0x900, 64),  # this block is older than the recording
        entry("segment_alloc", 0x1000, 2 << 20),
        entry("alloc", 0x1000, 300),
        entry("alloc", 0x1200, 500, stream=94),
        entry("free_requested", 0x1000, 300),
        entry("alloc", 0x1400, 700),
        entry("free_completed", 0x1000, 300),
        entry("snapshot", 0, 0),
        {"action": "oom", "device_free": 1, "size": 1, "stream": 0},
    ]
    trace = load_trace(write_snapshot(tmp_path / "s.pickle", [], entries))
    assert trace.op.tolist() == [1, 1, 1, 0]
    assert trace.block.tolist() == [0, 1, 2, 0]
    assert trace.stream.tolist() == [0, 1, 0, 0]
    assert trace.peak_live == 1500  # block 0 is live until its free is completed
    assert trace.skipped == 1


def test_snapshot_of_two_devices_needs_a_choice(tmp_path: Path) -> None:
    path = write_snapshot(
        tmp_path / "s", [entry("alloc", 1, 10)], [entry("alloc", 1, 20)]
    )
    with pytest.raises(ValueError, match="devices 0, 1 have events; choose one"):
        load_trace(path)
    assert load_trace(path, 1).peak_live == 20
    with pytest.raises(ValueError, match="device 2 has no events"):
        load_trace(path, 2)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry("alloc", 1, 10), entry("alloc", 1, 10)], "entry 1: .* live already"),
        ([entry("alloc", 1, -10)], "entry 0: size -10"),
        ([{"action": "alloc", "addr": 1, "stream": 0}], "entry 0: size is None"),
        ([{"action": "alloc", "addr": "x", "size": 1, "stream": 0}], "addr is 'x'"),
        ([["alloc", 1, 2]], "entry 0: is a list"),
        ([entry("segment_alloc", 1, 10)], "holds no events"),
    ],
)
def test_snapshot_that_makes_no_sense_is_refused(
    tmp_path: Path, entries: list[object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_trace(write_snapshot(tmp_path / "s", entries))


def test_snapshot_without_traces_is_refused(tmp_path: Path) -> None:
    for value in ([1, 2], {"device_traces": 5}, {"device_traces": [5]}, {}):
        (tmp_path / "s").write_bytes(pickle.dumps(value))
        with pytest.raises(ValueError, match="without PyTorch's device_traces"):
            load_trace(tmp_path / "s")
    with pytest.raises(ValueError, match="no events; was"):
        load_trace(write_snapshot(tmp_path / "s", [], []))


class _Creates:
    """An object whose pickle calls a function that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_malicious_pickle_is_refused_and_does_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    good = [entry("alloc", 1, 10)]
    path = write_snapshot(tmp_path / "s", good, extra=_Creates(mark))
    with pytest.raises(ValueError, match=r"asks for .*, which is refused"):
        load_trace(path)
    assert not mark.exists()
    pickle.loads(path.read_bytes())  # an ordinary load runs the call
    assert mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02Psome id\n.",
        b"\x80\x02}}b.",
        b"\x80\x02(S'os'\nios\nsystem\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02",
        b"\x80\x02]q\x00",
        b"\x80\x02.",
        b"\x80\xff.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    ],
)
def test_pickle_of_anything_but_data_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(ValueError, match=r"pickle"):
        load_trace(tmp_path / "s")
