# SPDX-License-Identifier: Apache-2.0
"""Tests that the benchmarks run, and tests of `benchmarks/measure.py`, which they share.

Most tests run a benchmark with `--quick` on the emulated device, and check its results:
they must be marked as emulated, be complete, and have a time for each way to do a thing.
Others check that a benchmark notices wrong bytes, how often a call is repeated, and which
results are left if a run is cut off.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import programs

import cumem

# These tests start separate programs, whose results no version of Python changes.
pytestmark = pytest.mark.any_python

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def measure(monkeypatch):
    """Import `benchmarks/measure.py` for one test, as a benchmark does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = pytest.importorskip("measure")
    yield module
    sys.modules.pop("measure")


def run_quick(name: str, folder: Path, *more: str) -> dict[str, Any]:
    """Run a short form of a benchmark, and return its results.

    They must be complete, and marked as those of an emulated device.
    """
    path = folder / "results.json"
    script = str(FOLDER / name)
    done = programs.run(
        *("-W", "ignore", script, "--quick", "--json", str(path), *more),
        CUMEM_EMULATED_DELAY_US="0",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("EMULATED DEVICE")
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert (results["emulated"], results["complete"]) == (True, True)
    return results


def test_benchmark_of_rows_runs_and_says_that_it_is_emulated(tmp_path: Path) -> None:
    results = run_quick("rows.py", tmp_path)
    ways = {(case["key"], case["direction"]) for case in results["cases"]}
    assert ("blocks", "down") in ways
    assert ("ordinary table", "up") in ways
    for case in results["cases"]:
        assert not case["errors"]
        assert case["seconds"]["cumem"] > 0


def test_benchmark_of_rows_beside_a_product_runs_and_says_that_it_is_emulated(
    tmp_path: Path,
) -> None:
    results = run_quick("rows_beside.py", tmp_path)
    assert results["missing"] == {"triton": "needs a GPU"}
    ways = {(case["direction"], case["beside"]) for case in results["cases"]}
    assert {("up", "cumem"), ("down", "cumem"), ("up", "copy engine")} <= ways
    for case in results["cases"]:
        assert not case["error"]
        assert case["product_us"] > 0


def test_benchmark_of_managed_memory_runs_and_says_that_it_is_emulated(
    tmp_path: Path,
) -> None:
    results = run_quick("managed.py", tmp_path)
    assert results["missing"] == dict.fromkeys(("torch", "cupy", "raw"), "needs a GPU")
    ways = {case["key"]: set(case["seconds"]) for case in results["cases"]}
    assert ways["prefetch to the GPU"] == {"cumem", "cumem, many"}
    assert ways["page faults, read on the GPU"] == {"cumem"}
    both = {"cumem", "cumem, 2 ahead", "cumem, all at once", "cumem, faults"}
    both |= {"cumem, copies"}
    assert ways["tiles of 1 MiB, read"] == both | {"cumem, read mostly"}
    assert ways["tiles of 1 MiB, written, back on the host"] == both
    assert all(s > 0 for case in results["cases"] for s in case["seconds"].values())


def test_benchmark_of_views_runs_and_says_that_it_is_emulated(tmp_path: Path) -> None:
    results = run_quick("views.py", tmp_path)
    cases = {(case["key"], case["kind"]): case for case in results["cases"]}
    for key in ("reshape(6, 4)", "transpose(1, 0)", "view(dtype)", "ravel()", "[1:3]"):
        assert cases[key, "pinned"]["ratio"] > 0
    assert cases["empty(np.int64)", "device"]["numpy_ns"] > 0
    assert cases["zeros(64)", "device"]["ratio"] > 0
    assert cases["full_like(array, 1.5)", "device"]["ratio"] > 0
    assert cases["stats()", ""]["ns"] > 0
    assert cases["fill(0) of 256 B", "managed"]["ns"] > 0


def test_benchmark_of_records_runs_and_says_that_it_is_emulated(
    tmp_path: Path,
) -> None:
    before = str(Path(cumem.__file__).parents[1])
    results = run_quick("recording.py", tmp_path, "--before", before)
    cases = {case["key"]: case for case in results["cases"]}
    assert {"events", "stacks", "deep stacks", "off, before", "off, now"} <= set(cases)
    assert all(case["call_ns"] > 0 for case in results["cases"])
    assert cases["events, off"]["event_ns"] == 0


def test_benchmark_of_doors_runs_and_says_that_it_is_emulated(tmp_path: Path) -> None:
    results = run_quick("doors.py", tmp_path)
    cases = {(c["what"], c["target"], c["source"]): c for c in results["cases"]}
    for pair in (("buffer", "ndarray"), ("ndarray", "buffer"), ("buffer", "buffer")):
        assert cases["copy", *pair]["seconds"]["cumem"] > 0
    has_torch = "torch" in results["libraries"]
    assert ("torch" in cases["copy", "ndarray", "ndarray"]["seconds"]) is has_torch
    assert (("in", "asbuffer", "cpu tensor") in cases) is has_torch
    assert set(results["libraries"]) | set(results["missing"]) == {
        *("torch", "cupy", "tvm_ffi")
    }


def test_copy_of_a_door_that_is_wrong_is_seen(emulated, monkeypatch) -> None:
    """The benchmark must notice that a copy does nothing."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("doors")
    try:
        bench = module.Bench(quick=True)
        monkeypatch.setattr(module.cumem, "copy", lambda dst, src: None)
        with pytest.raises(AssertionError, match="what='copy'"):
            list(bench.copies())
    finally:
        for name in ("doors", "measure"):
            sys.modules.pop(name)


def test_managed_words_that_are_wrong_are_seen(emulated, monkeypatch) -> None:
    """The benchmark must notice that a word of managed memory was overwritten."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("managed")
    try:
        bench = module.Bench(quick=True)
        way = (bench.to_host, lambda: bench.buffer[5:6].fill(0))
        case = bench.run(module.Case("one word", 4, ""), {"cumem": way})
        assert case.errors == {"cumem": "AssertionError: wrong bytes"}
    finally:
        for name in ("managed", "measure"):
            sys.modules.pop(name)


@dataclass
class Case:
    """The result of one case, as a benchmark yields it."""

    seconds: float


def test_calls_are_repeated_three_times_at_least_and_long_ones_less(
    measure, monkeypatch
) -> None:
    now = 0.0

    def call_of(seconds: float) -> Callable[[], None]:
        def call() -> None:
            nonlocal now
            now += seconds

        return call

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    assert measure.times_of(call_of(0.25), 0.125) == [0.25] * 3
    assert len(measure.times_of(call_of(0.25), 2.5)) == 10
    monkeypatch.setattr(measure, "LONG_SECONDS", 0.5)
    assert measure.times_of(call_of(0.75), 16) == [0.75]
    now = 0.0
    calls = []
    measure.times_of(lambda: calls.append(1), 0)
    assert len(calls) == 4  # the first is not timed


def test_run_that_is_cut_off_leaves_its_results_so_far(
    emulated, measure, monkeypatch, tmp_path: Path, capsys
) -> None:
    """The results are written after each case, and marked as complete only at the end."""
    path = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--json", str(path)])

    def cut() -> Iterator[Case]:
        yield Case(1.0)
        yield Case(2.0)
        raise KeyboardInterrupt

    run = measure.Run("A benchmark.")
    run.begin(True)
    run.note(7, link=5)
    with pytest.raises(KeyboardInterrupt):
        run.show(cut(), lambda case: f"{case.seconds} s")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert (results["complete"], results["schema"], results["link"]) == (False, 7, 5)
    assert results["cases"] == [{"seconds": 1.0}, {"seconds": 2.0}]
    run.note(7, link=6)
    with cumem.configure(ring_nbytes="32MiB"):
        run.end()
    results = json.loads(path.read_text(encoding="utf-8"))
    assert (results["complete"], results["link"]) == (True, 6)
    assert results["tuning"]["ring_nbytes"] == {"value": 32 << 20, "from": "configure"}
    assert results["tuning"]["threads"]["value"] == cumem.configure().threads
    assert capsys.readouterr().out.endswith("1.0 s\n2.0 s\n")


def test_benchmark_of_casts_runs_verifies_and_says_that_it_is_emulated(
    tmp_path: Path,
) -> None:
    results = run_quick("casting.py", tmp_path)
    assert len(results["cases"]) == 20
    for case in results["cases"]:
        grows = case["direction"] == "up" and case["source"] in ("uint8", "int16")
        assert case["route"] == ("staged-kernel" if grows else "staged")
        other = "before" if case["direction"] == "up" else "after"
        assert set(case["seconds"]) == {"cumem", other, "link"}
        assert min(case["seconds"].values()) > 0


def test_benchmark_of_numpy_pinned_runs_and_says_that_it_is_emulated(
    tmp_path: Path,
) -> None:
    results = run_quick("numpy_pinned.py", tmp_path)
    ways = {(case["key"], case["way"]) for case in results["cases"]}
    for key in ("copy", "loop", "threads"):
        assert {(key, "NumPy"), (key, "numpy_pinned"), (key, "enable()")} <= ways
    assert {("link", "pinned memory"), ("make", "NumPy"), ("cost", "NumPy")} <= ways
    assert all(min(case["seconds"]) > 0 for case in results["cases"])


def test_benchmark_of_offloading_runs_and_says_that_it_is_emulated(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    results = run_quick("offloading.py", tmp_path)
    cases = results["cases"]
    trained = {case["way"]: case for case in cases if case["key"] == "train"}
    assert {"nothing", "save_on_cpu", "cumem"} <= set(trained)
    assert len({tuple(case["losses"]) for case in trained.values()}) == 1
    assert (
        trained["cumem"]["offloaded_nbytes"] > 0 == trained["nothing"]["pinned_nbytes"]
    )
    moved = [case["way"] for case in cases if case["key"] == "model"]
    assert moved[0] == "cumem"


def test_benchmark_of_saving_behind_runs_and_says_that_it_is_emulated(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    results = run_quick("saving_behind.py", tmp_path)
    cases = {case["way"]: case for case in results["cases"]}
    assert {"save_safetensors_async, before=", "torch.save", "nothing"} <= set(cases)
    assert {"dcp.async_save, PinnedStager(before=)", "dcp.async_save"} <= set(cases)
    for way, case in cases.items():
        assert case["seconds"] > 0
        assert case["is_verified"] == ("async" in way)


def test_benchmark_of_sleeping_runs_and_says_that_it_is_emulated(
    tmp_path: Path,
) -> None:
    results = run_quick(
        "sleeping.py", tmp_path, "--parts", "cases,turns", "--folder", str(tmp_path)
    )
    cases = {
        (case["shape"], case["way"]): case for case in results["cases"] if "way" in case
    }
    ours = {way for way in OURS_ASLEEP if way not in results["missing"]}
    shapes = {shape for shape, _ in cases}
    assert len(shapes) == 2
    assert set(cases) == {(shape, way) for shape in shapes for way in ours | {"link"}}
    for (_, way), case in cases.items():
        assert not case["error"]
        assert min(case["sleeps"] + case["wakes"]) > 0
        assert case["keeps_addresses"]
        if way != "link":
            assert case["free_asleep"] == case["free_before"]
        if way in ('cumem, host="keep"', 'cumem, host="release"'):
            assert 1 <= case["copied_nbytes"] / case["live_nbytes"] <= 1.02
    assert set(results["missing"]) >= {"torch_memory_saver", "training"}
    (turns,) = (case for case in results["cases"] if "shares_gpu" in case)
    assert not turns["error"]
    assert not turns["shares_gpu"]  # each process has an emulated GPU of its own
    assert [len(each) for each in turns["seconds"]] == [2, 2]
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


#: The benchmark of sleeping compares several ways. These use cumem's regions and need no
#: PyTorch.
OURS_ASLEEP = (
    *('cumem, host="keep"', 'cumem, host="release"'),
    *("cumem, keep=False", 'cumem, keep="file"'),
)


def test_sleep_that_loses_bytes_is_seen(emulated, monkeypatch) -> None:
    """The benchmark must notice if waking does not bring the contents of a block back."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("sleeping")
    try:
        case = module.Case("64 blocks", module.KEEP)
        way = module.Buffers(True)
        really_wake = way.wake

        def wake() -> None:
            really_wake()
            way.blocks[5][-1:].fill(77)

        monkeypatch.setattr(way, "wake", wake)
        with pytest.raises(AssertionError, match="block 5 came back changed"):
            module.measure(case, way, [1000] * 64, module.LITTLE)
        way.close()
    finally:
        for name in ("sleeping", "measure"):
            sys.modules.pop(name)


def test_benchmark_of_spilling_runs_and_says_that_it_is_emulated(
    tmp_path: Path,
) -> None:
    link, turns, allocation = run_quick("spilling.py", tmp_path)["cases"]
    assert [link["key"], turns["key"], allocation["key"]] == [
        "link",
        "turns",
        "allocation",
    ]
    # Each use has made one buffer sleep and woken another.
    assert turns["moved_nbytes"] == 2 * turns["nbytes"]
    assert min(turns["seconds"] + allocation["plain_seconds"]) > 0


def test_benchmark_of_cupy_says_what_it_needs() -> None:
    done = programs.run("-W", "ignore", str(FOLDER / "cupy_pool.py"), "--quick")
    assert done.returncode == 2
    assert "cupy_pool.py needs " in done.stderr


def test_benchmark_of_loading_has_the_same_losses_by_each_way(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    results = run_quick("loading.py", tmp_path, "--dir", str(tmp_path))
    assert results["missing"] == {"pin_memory": "needs a GPU"}
    (case,) = results["cases"]
    ways = {"cuda", "prefetch", "prefetch_waiting", "collate_pinned"}
    assert set(case["rates"]) == ways
    assert len(case["losses"]) == len(set(case["sums"])) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


def test_benchmark_of_training_runs_without_a_gpu_by_pytorch_alone(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    results = run_quick("training.py", tmp_path)
    assert set(results["missing"]) == {"expandable", "enable", "replace"}
    (case,) = results["cases"]
    assert case["way"] == "native"
    assert len(case["shapes"]) == 4
    assert [len(case["first_seconds"]), len(case["again_seconds"])] == [1, 4]
    assert all(len(times) == 4 for times in case["again_seconds"])
    assert len(case["losses"]) == 20
    assert case["losses"][-1] < case["losses"][0]


@pytest.mark.hooks
def test_benchmark_of_the_rows_kernel_runs_verifies_and_says_that_it_is_emulated(
    tmp_path: Path,
) -> None:
    results = run_quick("rows_kernel.py", tmp_path)
    assert results["missing"] == {"anchor": "needs a GPU"}
    cases = results["cases"]
    assert {case["direction"] for case in cases} == {"up", "down", "within"}
    assert {case["numbers"] for case in cases} == {"device", "mapped"}
    assert all(case["seconds"]["cumem"] > 0 for case in cases)
    assert not any(case["errors"] for case in cases)
