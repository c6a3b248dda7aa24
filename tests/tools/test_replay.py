# SPDX-License-Identifier: Apache-2.0
"""Tests of replaying a trace of allocations with an allocator, and of the command.

How much memory an allocator reserves for the live blocks of a short trace is compared with
figures that were worked out by hand. In some tests work on freed blocks is late: `Hold(n)`
cuts the events of the trace into windows, and gates hold the work of each window back for
at least n events. A gate opens early, which `forced` counts, if a call waits for the work
behind it. The later tests run `python -m cumem replay`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import programs
from support.scripts import load
from support.traces import KIB, PEAK_LIVE, SIZE, hand_checked, write_npz

import cumem
from cumem.base.kinds import DEVICE_FIRST
from cumem.tools import cli, replay
from cumem.tools.replay import allocators as replay_allocators
from cumem.tools.replay import hold
from cumem.tools.replay.hold import open_gates
from cumem.tools.replay.trace import Hold, make_trace

# No version of Python changes what these tests show.
pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[2]


# -- replaying -------------------------------------------------------------------------


class Exact(replay_allocators.Allocator):
    """Reserves 4 KiB at a time and gives nothing back, so that its figures are known."""

    name, version = "exact", "1"

    def __init__(self) -> None:
        self.streams: list[Any] = [None]
        self.side = None
        self.live = self.total = 0
        self.reported: list[object] = []

    def allocate(self, size: int) -> object:
        allocator = self
        self.live += size
        self.total = max(self.total, -(-self.live // (4 * KIB)) * 4 * KIB)

        class Block:
            def __del__(self) -> None:
                allocator.live -= size

        return Block()

    def reserved(self) -> int:
        return self.total

    def held(self) -> replay_allocators.Held:
        cached = self.total - self.live
        return replay_allocators.Held(self.total, self.live, cached, 0)

    def empty(self) -> None:
        assert self.live == 0
        self.total = 0


def test_ratio_is_exact_on_a_trace_checked_by_hand(emulated) -> None:
    trace = make_trace(
        "odd", [1, 1, 0, 1], [0, 1, 0, 2], [5 * KIB, 5 * KIB, 0, 6 * KIB], [0] * 4
    )
    result = replay.replay(trace, Exact(), rounds=2, warm=True)
    assert result.peak_live == 11 * KIB
    assert result.peak_reserved == 12 * KIB
    assert result.ratio == 12 / 11
    # The waste is that of the moment when 12 KiB were first reserved, while 10 KiB were
    # live, and not that of the later peak of 11 KiB.
    assert result.waste == replay.Waste(10 * KIB, 0, 2 * KIB, 0)
    assert result.ns_per_event > 0
    assert result.ns_per_event_warm is not None
    assert result.loop_ns > 0
    assert (result.events, result.allocations) == (4, 3)


def test_allocator_that_takes_no_streams_keeps_its_blocks(emulated) -> None:
    """Without streams no work can be late, so the replay frees the blocks later instead."""
    trace = hand_checked()
    result = replay.replay(trace, Exact(), hold=Hold(100))
    assert result.peak_reserved == result.peak_busy == 28 * KIB
    assert result.ratio == 28 / 16
    assert result.ratio_busy == 1.0


def test_replay_leaves_nothing_live_and_the_pool_empty(runtime) -> None:
    allocator = replay_allocators.make("cumem", "device", "default", 0, 1)
    result = replay.replay(hand_checked(), allocator)
    assert result.peak_live == PEAK_LIVE
    assert result.peak_reserved >= PEAK_LIVE
    assert result.waste is not None
    waste = result.waste
    wasted = waste.rounding + waste.fragmentation + waste.in_flight
    assert waste.requested + wasted == result.peak_reserved
    assert allocator.reserved() == 0
    assert result.growths is not None
    assert 1 <= result.growths <= 4


@pytest.mark.parametrize("kind", DEVICE_FIRST)
def test_every_kind_replays(runtime, kind: str) -> None:
    allocator = replay_allocators.make("cumem", kind, "default", 0, 2)
    trace = hand_checked([0, 1, 0, 1, 1, 0, 1])
    result = replay.replay(trace, allocator, kind=kind)
    assert result.peak_reserved >= PEAK_LIVE


def test_late_blocks_are_in_flight_and_not_handed_out(runtime) -> None:
    # Each block is freed before the next one is allocated, so that one block is enough
    # unless blocks are late.
    count, size = 30, 8 << 20
    op, block = [1, 0] * count, [n // 2 for n in range(2 * count)]
    trace = make_trace("one", op, block, [size, 0] * count, [0] * 2 * count)
    allocator = replay_allocators.make("cumem", "device", "default", 0, 1)
    prompt = replay.replay(trace, allocator)
    late = replay.replay(trace, allocator, hold=Hold(20))
    assert late.peak_busy >= 11 * size
    assert late.peak_reserved >= late.peak_busy > prompt.peak_reserved
    assert late.forced == 0
    assert late.waste is not None
    assert late.waste.in_flight >= size
    assert allocator.reserved() == 0


def test_late_blocks_of_a_stream_are_reused_on_that_stream(runtime) -> None:
    """With `own` the work on the trace's own streams is late, and a block that was freed on
    such a stream can be reused on it.
    """
    count = 20
    op, block = [1, 0] * count, [n // 2 for n in range(2 * count)]
    trace = make_trace("one", op, block, [64 * KIB, 0] * count, [0] * 2 * count)
    allocator = replay_allocators.make("cumem", "device", "default", 0, 1)
    late = replay.replay(trace, allocator, hold=Hold(10), own=True)
    assert late.peak_busy == late.peak_live == 64 * KIB
    assert late.forced == 0


def test_gates_release_a_window_after_those_it_is_held_for(runtime) -> None:
    """Work of a window waits while the next windows are entered, and then goes on."""
    hold = Hold(8)  # each window has 2 events
    stream = cumem.Stream()
    gates = open_gates(hold, [stream], 0)
    events = {}
    for window in range(1, 8):
        gates.enter(window)
        events[window] = stream.record()
        for held in range(max(1, window - hold.windows + 1), window + 1):
            assert not events[held].done
        if window > hold.windows:
            events[window - hold.windows].synchronize()
    gates.close()
    stream.synchronize()
    assert all(event.done for event in events.values())
    assert gates.forced == 0


def test_gates_open_for_a_call_that_waits_for_them(runtime, monkeypatch) -> None:
    """A call inside `with gates` waits for held work, and must return all the same."""
    monkeypatch.setattr("cumem.tools.replay.hold.STUCK_SECONDS", 0.05)
    stream = cumem.Stream()
    gates = open_gates(Hold(4), [stream], 0)
    gates.enter(1)
    stream.record()
    with gates:
        stream.synchronize()  # this returns only because the gates open early
    assert gates.forced == 1
    gates.close()


def test_gates_stay_shut_in_a_long_window_where_nobody_waits(runtime, monkeypatch):
    # The thread of the gates now looks too rarely to matter, so the test itself looks.
    monkeypatch.setattr("cumem.tools.replay.hold.STUCK_SECONDS", 3600.0)
    stream = cumem.Stream()
    gates = open_gates(Hold(4), [stream], 0)
    gates.enter(1)
    event = stream.record()
    for _ in range(3):
        gates.look()
        with gates:  # each of these calls is short
            gates.look()
    assert (gates.forced, event.done) == (0, False)
    with gates:
        for _ in range(4):
            gates.look()
        stream.synchronize()
    assert gates.forced == 1
    gates.close()


class FakeDriver:
    """Stands for libcuda. It notes the names of its calls, and fails one of them."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            return 1 if name == self.fails else 0

        return call


@pytest.mark.parametrize("fails", ["", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"])
def test_gates_of_a_gpu_give_its_context_back(emulated, monkeypatch, fails) -> None:
    driver = FakeDriver(fails)
    stand_in = SimpleNamespace(**vars(ctypes) | {"CDLL": lambda name: driver})
    monkeypatch.setattr(hold, "ctypes", stand_in)
    if fails:
        with pytest.raises(OSError, match=f"{fails} failed with 1"):
            hold._CudaGates(Hold(4), [], 0)
    else:
        hold._CudaGates(Hold(4), [], 0).close()
    kept = driver.calls.count("cuDevicePrimaryCtxRetain") - fails.endswith("Retain")
    assert driver.calls.count("cuDevicePrimaryCtxRelease_v2") == kept


def test_out_of_memory_names_the_row(emulated) -> None:
    trace = make_trace("big", [1, 1], [0, 1], [KIB, 4 << 30], [0, 0])
    allocator = replay_allocators.make("cumem", "device", "default", 0, 1)
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        replay.replay(trace, allocator)
    assert any("row 1, an allocation of 4 GiB" in n for n in caught.value.__notes__)
    assert any("CUMEM_EMULATED_MEMORY" in n for n in caught.value.__notes__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nobody", "device", "default"), "none of cumem, torch"),
        (("torch", "pinned", "default"), "device memory only"),
        (("torch", "device", "default"), "needs a GPU"),
        (("cumem", "hbm", "default"), "kind 'hbm'"),
        (("cumem", "device", "other"), "pool 'other'"),
    ],
)
def test_allocator_that_cannot_be_had_is_an_error(
    emulated, arguments: tuple[str, str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replay_allocators.make(*arguments, 0, 1)


# -- the command -----------------------------------------------------------------------


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m cumem replay` on the emulated device, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "cumem", "replay", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"CUMEM_BACKEND": "emulated"} | environment,
        timeout=120,
        check=False,
    )


def test_command_prints_and_saves(tmp_path: Path) -> None:
    trace, path = write_npz(tmp_path / "hand.npz"), tmp_path / "result.json"
    done = run(str(trace), "--repeat", "--rounds", "3", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for text in (
        "hand.npz: 7 events",
        "EMULATED",
        "16 KiB (16,384 bytes)",
        "warm pool",
        "live at the first peak",
    ):
        assert text in done.stdout
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["trace"] == "hand.npz"
    assert data["events"] == 7
    assert data["peak_live"] == PEAK_LIVE
    assert data["ratio"] == data["peak_reserved"] / PEAK_LIVE >= 1
    assert data["ns_per_event"] > 0
    assert data["backend"] == "emulated"
    assert {"machine", "versions", "commit", "loop_ns", "compare"} <= set(data)


def test_command_compares_with_each_peer_that_is_named(tmp_path: Path) -> None:
    trace, path = write_npz(tmp_path / "hand.npz"), tmp_path / "result.json"
    arguments = ("--compare", "torch,cupy,rmm", "--json", str(path))
    done = run(str(trace), "--late", "2", *arguments)
    assert done.returncode == 0, done.stderr
    compared = json.loads(path.read_text(encoding="utf-8"))["compare"]
    assert set(compared) == {"torch", "torch-expandable", "cupy", "rmm"}
    assert all(found == {"error": "needs a GPU"} for found in compared.values())
    assert "peak live or late" in done.stdout


def replayed_elsewhere(
    monkeypatch: pytest.MonkeyPatch, trace: Path, stderr: str | None = None
) -> dict[str, Any]:
    """Replay a trace with a stand-in for a peer, from the folder of the trace."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if stderr is not None:
            return subprocess.CompletedProcess(command, 1, "", stderr)
        commands.append(command)
        command[command.index("torch")] = "cumem"
        return real(command, cwd=trace.parent, **options)

    commands: list[list[str]] = []
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(replay, "backend", lambda: "cuda")
    monkeypatch.setattr(replay_allocators, "is_installed", lambda name: True)
    monkeypatch.setenv("CUMEM_BACKEND", "emulated")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = replay.Options(trace=trace.name, allocator="torch", late="2")
    return replay._replay_elsewhere(options)


def test_peer_replays_a_trace_whose_name_looks_like_an_option(
    emulated, tmp_path: Path, monkeypatch
) -> None:
    found = replayed_elsewhere(monkeypatch, write_npz(tmp_path / "-x.npz"))
    assert found.get("error") is None
    assert found["trace"] == "-x.npz"
    assert found["peak_live"] == PEAK_LIVE


def test_failure_of_a_peer_is_reported_with_its_notes(emulated, monkeypatch) -> None:
    for stderr, error in (
        ("cumem: out of memory\n  while replaying row 5\n", "out of memory; while"),
        ("Traceback:\n  File x\nValueError: no\nnote\n", "ValueError: no; note"),
        ("warned\n  here\nValueError: no\n", "ValueError: no"),
        ("", "ended with 1"),
    ):
        assert error in replayed_elsewhere(monkeypatch, Path("a"), stderr)["error"]


def test_emulated_device_is_made_large_enough(tmp_path: Path) -> None:
    # By default the emulated device has 1 GiB.
    size = np.array([3 << 30, *SIZE[1:]], np.uint64)
    trace = write_npz(tmp_path / "big.npz", size=size)
    assert run(str(trace)).returncode == 0
    done = run(str(trace), CUMEM_EMULATED_MEMORY="1GiB")
    assert done.returncode == 1
    assert "while replaying row 0, an allocation of 3 GiB" in done.stderr
    assert "Traceback" not in done.stderr


def test_emulated_device_has_room_for_late_blocks() -> None:
    count, size = 30, 1 << 30
    op, block = [1, 0] * count, [n // 2 for n in range(2 * count)]
    trace = make_trace("one", op, block, [size, 0] * count, [0] * 2 * count)
    for late, peak in ((None, size), ("60", count * size)):
        room = dict(replay.environment(trace, late))["CUMEM_EMULATED_MEMORY"]
        assert int(room) == 16 * peak
    # 16 times this size would not fit.
    most = make_trace("most", [1], [0], [1 << 44], [0])
    room = dict(replay.environment(most))["CUMEM_EMULATED_MEMORY"]
    assert int(room) == replay.MOST_EMULATED


def test_trace_that_no_emulated_device_holds_is_at_fault(tmp_path: Path) -> None:
    size = np.array([1 << 46, *SIZE[1:]], np.uint64)
    done = run(str(write_npz(tmp_path / "huge.npz", size=size)))
    assert done.returncode == 2
    assert "huge.npz: 64 TiB live at once, more than" in done.stderr
    assert "CUMEM_EMULATED_MEMORY" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--late", "never"], "a number of events or a fraction"),
        (["--late", "3", "--late-on", "own", "--kind", "pinned"], "--late-on own"),
        (["--compare", "jax"], "--compare jax: none of torch, cupy, rmm"),
        (["--rounds", "0"], "--rounds"),
        (["--pool", "other"], "pool 'other'"),
        (["--allocator", "other"], "allocator 'other'"),
        (["--device", "9"], "there is no device 9"),
        (["--json", "no/such/folder/a.json"], "no such folder"),
        (["--json", "."], ". cannot be written: Is a directory"),
        (["--json", ""], "cannot be written"),
        (["--json", "/proc/none.json"], "/proc/none.json cannot be written: "),
    ],
)
def test_wrong_option_is_a_usage_error(
    emulated, tmp_path: Path, capsys, arguments: list[str], message: str
) -> None:
    trace = write_npz(tmp_path / "hand.npz")
    assert cli.main(["replay", str(trace), *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""  # the error comes before the work


def test_no_device_at_all_is_a_usage_error(tmp_path: Path) -> None:
    trace = write_npz(tmp_path / "hand.npz")
    done = run(str(trace), CUMEM_EMULATED_DEVICES="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cumem replay: there is no device 0; there are none\n"


@pytest.mark.parametrize("names", [",", "", "torch,", ",cupy", "torch,,rmm", " "])
def test_empty_name_of_a_peer_is_a_usage_error(
    emulated, tmp_path: Path, capsys, names: str
) -> None:
    trace = write_npz(tmp_path / "hand.npz")
    with pytest.raises(SystemExit) as ended:
        cli.main(["replay", str(trace), "--compare", names])
    assert ended.value.code == 2
    assert "--compare: an empty name" in capsys.readouterr().err


def test_results_do_not_replace_the_trace(emulated, tmp_path: Path, capsys) -> None:
    trace = write_npz(tmp_path / "hand.npz")
    before = trace.read_bytes()
    assert cli.main(["replay", str(trace), "--json", str(trace)]) == 2
    assert "names the trace itself" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_json_leaves_an_older_file_until_there_are_results(
    emulated, tmp_path: Path, capsys
) -> None:
    trace, path = write_npz(tmp_path / "hand.npz"), tmp_path / "a.json"
    path.write_text("old")
    arguments = ["replay", str(trace), "--json", str(path)]
    assert cli.main([*arguments, "--device", "9"]) == 2
    assert path.read_text() == "old"
    path.unlink()
    assert cli.main([*arguments, "--device", "9"]) == 2
    assert not path.exists()


def test_json_whose_link_leads_nowhere_is_an_error_and_no_file(
    emulated, tmp_path: Path, capsys
) -> None:
    trace = write_npz(tmp_path / "hand.npz")
    loop, link = tmp_path / "loop.json", tmp_path / "link.json"
    loop.symlink_to(loop)
    link.symlink_to(tmp_path / "target.json")
    arguments = ["replay", str(trace), "--json"]
    assert cli.main([*arguments, str(loop)]) == 2
    said = capsys.readouterr()
    assert "loop.json cannot be written: Too many levels" in said.err
    assert said.out == ""
    assert cli.main([*arguments, str(link), "--device", "9"]) == 2
    assert link.is_symlink()
    assert not link.exists()


def test_json_of_a_name_that_is_not_utf_8_is_read_back(
    emulated, tmp_path: Path
) -> None:
    name = os.fsdecode(b"hand\xff.npz")
    trace, path = write_npz(tmp_path / name), tmp_path / "a.json"
    assert cli.main(["replay", str(trace), "--json", str(path)]) == 0
    assert json.loads(path.read_text(encoding="utf-8"))["trace"] == name


def test_missing_file_and_wrong_trace_are_errors_without_a_traceback(
    emulated, tmp_path: Path, capsys
) -> None:
    assert cli.main(["replay", str(tmp_path / "none.npz")]) == 1
    assert "none.npz" in capsys.readouterr().err
    trace = write_npz(tmp_path / "bad.npz", block=np.arange(7))
    assert cli.main(["replay", str(trace)]) == 2
    assert "row 2: block 2 was never allocated" in capsys.readouterr().err


# -- the benchmark ---------------------------------------------------------------------


def test_benchmark_of_pools_runs_and_renders(tmp_path: Path) -> None:
    write_npz(tmp_path / "hand.npz")
    path = tmp_path / "results.json"
    script = ROOT / "benchmarks" / "pools.py"
    command = [str(script), "--quick", "--only", "T1,T13"]
    command += ["--traces", str(tmp_path), "--json", str(path)]
    done = programs.run(*command, CUMEM_EMULATED_DELAY_US="0")
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text(encoding="utf-8"))
    rows = {row["statement"]: row for row in results["parts"]["T1"]["rows"]}
    assert rows["numpy_empty(1024, f4)"]["ns"] > 0
    assert rows["empty_pinned(1024, dtype=f4)"]["ns"] > 0
    means = results["parts"]["T13"]["geometric_mean"]["cumem"]
    assert means["none"]["ratio"] >= 1
    module = load(script)
    page = tmp_path / "page.md"
    page.write_text(f"a\n{module.BEGIN}\nold\n{module.END}\nb\n", encoding="utf-8")
    module.write_between(page, module.render(results))
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert "**Emulated device" in text
    assert text.startswith("a\n")
    assert text.endswith("b\n")
