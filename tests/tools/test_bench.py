# SPDX-License-Identifier: Apache-2.0
"""Tests of what the benchmark measures and concludes, and that it notices wrong data.

Some tests run a tiny plan on the emulated device. Others make results by hand, whose rates
decide what the report has to say. The last ones call the command with wrong options, files
that cannot be written, and so on.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import programs

import cumem
from cumem import info
from cumem.base.kinds import KINDS
from cumem.tools import bench
from cumem.tools.bench import cases as bench_cases
from cumem.tools.bench.cases import COPY_KINDS, KIB, MIB, Plan, Result
from cumem.tools.bench.report import Report

# No version of Python changes what these tests show.
pytestmark = pytest.mark.any_python

#: The smallest plan that has all cases.
TINY = Plan(
    sizes=(4 * KIB, 64 * KIB),
    row_sizes=(4 * KIB, 64 * KIB),
    both_sizes=(64 * KIB,),
    allocate_sizes=(4 * KIB,),
    host_nbytes=64 * KIB,
    budget=0.0,
    least=2,
    seed=1,
)


def copied(
    kind: str,
    gbps: float,
    nbytes: int = MIB,
    what: str = "h2d",
    verified: bool = True,
    spread: float = 0.0,
) -> Result:
    """Make the result of a copy at this rate. Its seconds vary by the fraction `spread`."""
    seconds = nbytes / gbps / 1e9
    low, high = seconds * (1 - spread), seconds * (1 + spread)
    return Result("copy", what, kind, nbytes, seconds, low, high, 5, verified)


def rows(kind: str, gbps: float, what: str = "h2d", nbytes: int = MIB) -> Result:
    """Make the result of a verified copy of rows by random numbers."""
    seconds = nbytes / gbps / 1e9
    return Result("rows", what, kind, nbytes, seconds, seconds, seconds, 5, True)


def allocated(kind: str, what: str, seconds: float, nbytes: int = MIB) -> Result:
    """Make the result of an allocation."""
    return Result("allocate", what, kind, nbytes, seconds, seconds, seconds, 5, True)


def accessed(kind: str, what: str, gbps: float) -> Result:
    """Make the result of reading or writing by the host."""
    seconds = MIB / gbps / 1e9
    return Result("host", what, kind, MIB, seconds, seconds, seconds, 5, True)


# -- measuring -------------------------------------------------------------------------


def test_run_gives_every_case_once_and_verified(runtime) -> None:
    results = list(bench_cases.run(TINY))
    keys = {(r.group, r.what, r.kind, r.nbytes) for r in results}
    assert len(results) == len(keys) == bench_cases.count(TINY)
    measured = [result for result in results if result.skipped is None]
    assert [result for result in measured if not result.verified] == []
    assert all(0 < r.low <= r.seconds <= r.high for r in measured)
    if runtime.emulated:
        assert len(measured) == len(results)
    for kind in COPY_KINDS:
        assert {("copy", "h2d", kind, 4 * KIB), ("copy", "d2h", kind, 64 * KIB)} <= keys
    for kind in ("pageable", "pinned", "mapped"):
        assert {("rows", "h2d", kind, 4 * KIB), ("rows", "d2h", kind, 64 * KIB)} <= keys


@pytest.mark.parametrize("kind", [kind for kind in COPY_KINDS if kind != "pageable"])
def test_first_allocation_is_never_one_from_the_pool(emulated, kind: str) -> None:
    case = bench_cases._Bench(TINY)
    trial = case._first(kind, 64 * KIB)
    assert trial.reset is not None
    for _ in range(10):
        trial.reset()
        before = cumem.stats()
        trial.action()
        after = cumem.stats()
        for kind in KINDS:
            assert after[kind].hit_count == before[kind].hit_count
        assert after.staging.hit_count == before.staging.hit_count
    trial.reset()


def test_run_with_a_copy_that_loses_a_byte_is_not_verified(
    emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cumem.copy

    def lossy(dst: object, src: object, *, stream: object = None) -> None:
        real(dst, src, stream=stream)
        if isinstance(dst, np.ndarray) and dst.nbytes:
            dst[dst.size // 2] ^= 1

    monkeypatch.setattr(cumem._core, "copy", lossy)
    results = list(bench_cases.run(TINY))
    wrong = {(r.group, r.what) for r in results if not r.verified}
    assert {("copy", "h2d"), ("both", "both"), ("allocate", "first")} <= wrong
    assert ("host", "read") not in wrong


def test_run_with_a_copy_that_does_nothing_is_not_verified(
    emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cumem._core, "copy", lambda dst, src, *, stream=None: None)
    results = [r for r in bench_cases.run(TINY) if r.group == "copy"]
    assert [r for r in results if r.verified] == []


@pytest.mark.parametrize("fault", ["does nothing", "moves the wrong rows"])
def test_run_with_wrong_rows_is_not_verified(
    emulated, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    real = cumem.copy_rows

    def wrong(dst: object, src: object, dst_rows: object, src_rows: object) -> None:
        if fault == "moves the wrong rows":
            real(dst, src, dst_rows, np.roll(src_rows, 1))  # type: ignore[call-overload]

    monkeypatch.setattr(cumem._core, "copy_rows", wrong)
    results = list(bench_cases.run(TINY))
    unverified = {(r.group, r.nbytes) for r in results if not r.verified}
    expected = {("rows", 64 * KIB), ("rows", 4 * KIB)}
    if fault == "moves the wrong rows":
        # 4 KiB are a single row. np.roll() does not change its number, so the row is right.
        expected = {("rows", 64 * KIB)}
    assert unverified == expected


def test_run_where_a_kind_cannot_be_had_says_why_and_goes_on(
    emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **keywords: object) -> None:
        raise cumem.CudaError("no managed memory here\nsecond line")

    monkeypatch.setattr(cumem._core, "empty_managed", refuse)
    results = list(bench_cases.run(TINY))
    assert len(results) == bench_cases.count(TINY)
    skipped = [result for result in results if result.skipped is not None]
    assert {result.kind for result in skipped} == {"managed"}
    assert {result.skipped for result in skipped} == {"no managed memory here"}
    text = Report(results).render()
    assert "no figure for managed: no managed memory here" in text
    assert "managed memory is not copied" not in text


def test_report_says_once_what_is_missing_at_each_size() -> None:
    results = [
        Result("copy", "h2d", "managed", n, skipped=f"f({n} bytes): no such")
        for n in (4096, 65536)
    ]
    text = Report(results).render()
    assert [line for line in text.splitlines() if "no such" in line] == [
        "no figure for managed: f: no such"
    ]


# -- planning --------------------------------------------------------------------------


def test_full_plan_goes_from_4_kib_to_256_mib() -> None:
    plan = bench.make_plan(bench.Options(), 1 << 40)
    assert plan.sizes[0] == 4 * KIB
    assert plan.sizes[-1] == 256 * MIB
    assert list(plan.sizes) == sorted(plan.sizes)
    assert plan.both_sizes[-1] == 256 * MIB


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("room", [4 * KIB, 100 * KIB, MIB, 50 * MIB])
def test_plan_fits_in_little_memory(quick: bool, room: int) -> None:
    plan = bench.make_plan(bench.Options(quick=quick), room)
    assert plan.largest <= room
    assert plan.both_sizes
    assert plan.row_sizes
    assert plan.allocate_sizes


def test_plan_without_room_for_anything_is_refused() -> None:
    with pytest.raises(bench.UsageError, match="smallest is 4 KiB"):
        bench.make_plan(bench.Options(), 1000)


def test_plan_has_rows_of_at_most_64_mib() -> None:
    plan = bench.make_plan(bench.Options(), 1 << 40)
    assert plan.row_sizes[0] == 64 * KIB
    assert plan.row_sizes[-1] == 64 * MIB
    assert bench.make_plan(bench.Options(), 4 * KIB).row_sizes == (4 * KIB,)


def test_max_size_leaves_out_larger_copies() -> None:
    plan = bench.make_plan(bench.Options(max_nbytes=MIB), 1 << 40)
    assert plan.largest == MIB


# -- concluding ------------------------------------------------------------------------


def test_ceiling_is_the_runtimes_own_rate() -> None:
    raw = {
        what: Result("ceiling", what, "pinned", MIB, MIB / gbps / 1e9, 0, 0, 5, True)
        for what, gbps in (("h2d", 50.0), ("d2h", 40.0))
    }
    report = Report([*raw.values(), copied("pinned", 49), copied("pageable", 10)])
    assert report.ceiling("h2d") == pytest.approx(50)
    assert report.ceiling("d2h") == pytest.approx(40)
    assert report.percent(report.results[2]) == pytest.approx(98)
    said = "plain cudaMemcpyAsync of 1 MiB here"
    assert f"% of 50.0 GB/s, {said}" in report.render(verbose=True)
    rates = "host → device 50.0 GB/s, device → host 40.0 GB/s"
    assert f"\nceiling ({said}): {rates}\n" in report.render()
    assert report.as_data()["ceiling_source"]["d2h"].startswith("plain cudaMemcpyAsync")
    assert report.percent(raw["h2d"]) is None


def test_ceiling_that_was_not_measured_is_the_best_pinned_rate() -> None:
    report = Report(
        [
            copied("pinned", 5, 4 * KIB),
            copied("pinned", 50),
            copied("pageable", 99),
            copied("pinned", 40, what="d2h"),
        ]
    )
    assert report.ceiling("h2d") == pytest.approx(50)
    assert report.ceiling("d2h") == pytest.approx(40)
    percent = report.percent(report.results[0])
    assert percent == pytest.approx(10)
    assert "% of 50.0 GB/s, best pinned rate here" in report.render(verbose=True)
    assert "\nceiling (best pinned rate here): host → device 50" in report.render()


def test_rates_of_rows_are_compared_with_the_same_ceiling() -> None:
    """The ceiling of rows is that of whole copies in the same direction."""
    report = Report(
        [
            copied("pinned", 50),
            copied("pinned", 40, what="d2h"),
            rows("pinned", 45),
            rows("pinned", 38, "d2h"),
        ]
    )
    assert report.percent(report.results[2]) == pytest.approx(90)
    assert (
        "rows of 16 KiB by random numbers, pinned: 90 % of the ceiling to the device, "
        "95 % to the host"
    ) in report.render()
    table = report.render(verbose=True)
    assert "rows → device, 16 KiB each by random numbers: GB/s, ± spread" in table
    assert [
        line for line in table.splitlines() if "45.0 ±0%" in line and " 90%" in line
    ]


def test_rows_without_a_figure_are_said_to_have_none() -> None:
    skipped = Result("rows", "d2h", "pinned", MIB, skipped="no memory")
    report = Report([copied("pinned", 50), rows("pinned", 25), skipped])
    assert "50 % of the ceiling to the device, no figure to the host" in report.render()
    assert Report([copied("pinned", 50)]).render().count("rows") == 0


def test_advice_on_rows_names_where_to_keep_them() -> None:
    """A report that is not verbose leaves out the advice to stay with ordinary memory."""
    report = Report([rows("pageable", 20), rows("pinned", 40), rows("mapped", 40)])
    advice = "keep the rows in pinned memory: 2.0 times as fast as pageable"
    assert report.advise_rows("h2d", MIB) == advice
    assert report.advise_rows("d2h", MIB) == "nothing could be measured"
    assert f"rows → device: {advice}" in report.render()
    assert "rows → host: keep" not in report.render()
    assert report.as_data()["results"][0]["advice"] == advice
    equal = Report([rows("pageable", 40), rows("pinned", 41)])
    assert equal.advise_rows("h2d", MIB).startswith("ordinary memory will do")
    assert "keep the rows" not in equal.render()
    alone = Report([rows("pinned", 41)])
    assert alone.advise_rows("h2d", MIB) == "keep the rows in pinned memory"


def test_plot_has_a_curve_of_rows_where_they_were_measured() -> None:
    without = Report([copied("pinned", 50)])
    assert [*without.curves("h2d")] == [*COPY_KINDS]
    report = Report(
        [copied("pinned", 50), rows("pinned", 25), rows("pinned", 20, "d2h")]
    )
    assert report.curves("h2d")["pinned, rows of 16 KiB"] == [(MIB, pytest.approx(25))]
    assert report.curves("d2h")["pinned, rows of 16 KiB"] == [(MIB, pytest.approx(20))]


def test_advice_names_the_fastest_kind() -> None:
    report = Report([copied("pageable", 9), copied("pinned", 54), copied("mapped", 50)])
    advice = report.advise_copy("h2d", MIB)
    assert advice == "use pinned: 6.0 times as fast as pageable"


def test_advice_among_equals_is_the_simplest() -> None:
    report = Report(
        [copied("pageable", 50), copied("pinned", 52), copied("managed", 51)]
    )
    assert report.advise_copy("h2d", MIB).startswith("use pageable: nothing else")


def test_advice_sees_no_difference_within_the_spreads() -> None:
    noisy = [
        copied("pageable", 10, spread=0.15),
        copied("pinned", 12, spread=0.1),
        copied("mapped", 11, spread=0.02),
    ]
    assert Report(noisy).advise_copy("h2d", MIB) == (
        "no clear difference: pinned is 20 % faster, spreads are 25 %; use pageable"
    )
    clear = [copied("pageable", 10, spread=0.05), copied("pinned", 12, spread=0.1)]
    assert Report(clear).advise_copy("h2d", MIB).startswith("use pinned: 1.2 times")


def test_advice_names_only_what_is_clearly_faster_than_pageable() -> None:
    report = Report(
        [
            copied("pageable", 10, spread=0.01),
            copied("pinned", 12, spread=0.3),
            copied("mapped", 14, spread=0.01),
        ]
    )
    assert report.advise_copy("h2d", MIB).startswith("use mapped: 1.4 times")


def test_advice_on_two_streams_and_on_the_pool_heeds_the_spreads() -> None:
    results = [copied("pinned", 50), copied("pinned", 50, what="d2h", spread=0.3)]
    seconds = results[0].seconds * 2 / 1.2
    results.append(
        Result("both", "both", "pinned", MIB, seconds, *[seconds] * 2, 5, True)
    )
    assert Report(results).advise_both("pinned", MIB).startswith("no clear difference")
    first = Result("allocate", "first", "pinned", MIB, 3.0, 0.5, 5.5, 5, True)
    again = Result("allocate", "again", "pinned", MIB, 1.0, 0.0, 3.0, 5, True)
    report = Report([first, again])
    assert report.advise_allocate("pinned", MIB).startswith("no clear difference")


def test_advice_on_the_host_heeds_the_spreads() -> None:
    slow = Result("host", "read", "mapped", MIB, 3e-4, 0.0, 9e-4, 5, True)
    fast = Result("host", "read", "pageable", MIB, 1e-4, 0.0, 2e-4, 5, True)
    both = [accessed("mapped", "write", 10), accessed("pageable", "write", 10)]
    report = Report([slow, fast, *both])
    assert report.advise_host("mapped").startswith("no clear difference")
    assert not report.advise_copy("d2h", MIB).startswith("use")


def test_advice_follows_the_figures_also_where_they_are_odd() -> None:
    report = Report([copied("pageable", 9), copied("pinned", 10), copied("mapped", 30)])
    assert report.advise_copy("h2d", MIB).startswith("use mapped: 3.3 times")


def test_advice_never_names_managed_memory_which_is_moved_and_not_copied() -> None:
    report = Report(
        [copied("pageable", 9), copied("pinned", 18), copied("managed", 90)]
    )
    assert report.advise_copy("h2d", MIB).startswith("use pinned: 2.0 times")


def test_advice_never_rests_on_wrong_data() -> None:
    report = Report([copied("pageable", 9), copied("pinned", 54, verified=False)])
    assert report.advise_copy("h2d", MIB).startswith("use pageable")
    assert "WRONG DATA" in report.render()
    assert [result.kind for result in report.failures] == ["pinned"]


def test_advice_counts_the_copies_that_pay_for_the_allocation() -> None:
    results = [copied("pageable", 10), copied("pinned", 20)]
    saved = results[0].seconds - results[1].seconds
    results += [
        allocated("pinned", "first", 10.4 * saved),
        allocated("pageable", "first", 0.4 * saved),
    ]
    advice = Report(results).advise_copy("h2d", MIB)
    assert advice.endswith("once the buffer serves 10 copies or more")


def test_advice_for_reading_back_leaves_out_what_the_host_reads_slowly() -> None:
    results = [
        copied("pageable", 9, what="d2h"),
        copied("write-combined", 55, what="d2h"),
        accessed("pageable", "read", 10),
        accessed("write-combined", "read", 0.2),
        accessed("pageable", "write", 10),
        accessed("write-combined", "write", 9),
    ]
    report = Report(results)
    assert report.advise_copy("d2h", MIB) == (
        "use pageable: nothing else is faster by 5 %; "
        "write-combined is too slow to read here"
    )
    assert "reading is 50 times slower" in report.advise_host("write-combined")
    assert report.advise_host("pageable") == "fine for the host to read and write"


@pytest.mark.parametrize(("together", "start"), [(1.0, "use two"), (1.9, "no gain")])
def test_advice_on_both_directions(together: float, start: str) -> None:
    results = [copied("pinned", 50), copied("pinned", 50, what="d2h")]
    seconds = results[0].seconds * together
    results.append(Result("both", "both", "pinned", MIB, seconds, 0, 0, 5, True))
    assert Report(results).advise_both("pinned", MIB).startswith(start)


@pytest.mark.parametrize(
    ("again", "start"), [(0.9, "allocate when"), (0.001, "alloca")]
)
def test_advice_on_allocation(again: float, start: str) -> None:
    results = [allocated("pinned", "first", 1), allocated("pinned", "again", again)]
    assert Report(results).advise_allocate("pinned", MIB).startswith(start)


def test_table_is_aligned_and_has_one_advice_per_row() -> None:
    results = [
        copied(kind, 50, size) for kind in COPY_KINDS for size in (4 * KIB, 256 * MIB)
    ]
    lines = Report(results).render(verbose=True).splitlines()
    rows = [line for line in lines if "±" in line and "iB  " in line]
    assert len(rows) == 2
    assert len({line.index("50.0") for line in rows}) == 1
    after = [lines[lines.index(row) + 1] for row in rows]
    assert all(line.strip().startswith("use ") for line in after)
    assert max(len(line) for line in lines) <= 100


def results_of_an_h200() -> list[Result]:
    """Read the results that an H200 gave."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "bench-h200.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    names = Result.__dataclass_fields__
    return [Result(**{name: row[name] for name in names}) for row in rows]


def test_report_is_a_screen_with_figures_and_conclusions() -> None:
    report = Report(results_of_an_h200())
    lines = report.render().splitlines()
    assert len(lines) <= 24
    table = lines[: lines.index("")]
    assert max(map(len, table[:-1])) <= 80
    sizes = [line[15:23].strip() for line in table[1:9]]
    assert sizes == ["4 KiB", "64 KiB", "4 MiB", "256 MiB"] * 2
    assert "host → device 55.4 GB/s" in table[-1]  # the last line has the ceiling
    assert table[3].split()[2:5] == ["31.4", "48.8", "48.4"]
    advice = lines[len(table) + 1 :]
    assert advice[0] == (
        "host → device: pageable up to 16 KiB, then pinned (2.0 times as fast at 256 KiB)"
    )
    assert "both directions: use two streams, for pinned, mapped" in advice
    assert any(
        line.startswith("allocation: allocate once and reuse") for line in advice
    )


def test_report_names_what_to_avoid_on_the_host() -> None:
    results = [accessed(kind, what, 10) for kind in COPY_KINDS for what in ("write",)]
    slow = {"write-combined": 0.2}
    results += [accessed(kind, "read", slow.get(kind, 10)) for kind in COPY_KINDS]
    text = Report(results).render()
    assert "write-combined: avoid on the host: reading is 50 times slower" in text


def test_wrong_data_shows_in_the_short_table() -> None:
    report = Report([copied("pageable", 9), copied("pinned", 54, verified=False)])
    (row,) = (
        line for line in report.render().splitlines() if "host → device  " in line
    )
    assert "9.00" in row
    assert "WRONG" in row


@pytest.mark.parametrize("verbose", [False, True])
def test_figures_of_emulation_advise_nothing(verbose: bool) -> None:
    results = results_of_an_h200()
    reported, silent = (Report(results, advises) for advises in (True, False))
    words = ("pinned (2.0", "use two streams", "allocate once", "use pinned")
    assert any(word in reported.render(verbose) for word in words)
    assert not any(word in silent.render(verbose) for word in words)
    assert ("advise nothing" in silent.render(verbose)) or verbose
    assert {row["advice"] for row in silent.as_data()["results"]} == {None}
    assert all(row["advice"] for row in reported.as_data()["results"])


# -- the whole -------------------------------------------------------------------------


@pytest.fixture
def tiny_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "make_plan", lambda options, room: TINY)


@pytest.mark.usefixtures("emulated", "tiny_plan")
def test_first_and_last_line_say_that_the_device_is_emulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.main(bench.Options()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-1]
    assert "not a GPU's" in lines[0]
    assert f"data verified in all {bench_cases.count(TINY)} cases" in lines


@pytest.mark.usefixtures("emulated", "tiny_plan")
@pytest.mark.parametrize(
    ("wanted", "is_said"),
    [(None, True), (MIB, True), (256 * KIB, True), (64 * KIB, False)],
)
def test_copies_left_out_for_lack_of_memory_are_reported(
    capsys: pytest.CaptureFixture[str], wanted: int | None, is_said: bool
) -> None:
    assert bench.main(bench.Options(max_nbytes=wanted)) == 0
    said = "copies end at 64 KiB: not enough free memory" in capsys.readouterr().out
    assert said == is_said


def test_benchmark_where_most_figures_are_missing_fails_and_says_so(
    emulated, monkeypatch, capsys
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise MemoryError("cumem: out of ordinary host memory")

    for kind in ("pinned", "mapped", "managed"):
        monkeypatch.setattr(cumem._core, f"empty_{kind}", refuse)
    assert bench.main(bench.Options(quick=True, max_nbytes=64 * KIB)) == 1
    said = capsys.readouterr()
    assert "figures are missing" in said.out
    assert "out of ordinary host memory" in said.out
    assert "most figures are missing" in said.err


def test_benchmark_in_little_address_space_names_the_limit() -> None:
    limit = "import resource, sys; from cumem.tools import cli\n"
    limit += "resource.setrlimit(resource.RLIMIT_AS, (500 << 20, 500 << 20))\n"
    limit += "sys.exit(cli.main(['bench', '--quick']))"
    for _ in range(5):
        done = programs.run("-c", limit, OPENBLAS_NUM_THREADS="1")
        # The C library aborts if a new thread finds no memory for its variables.
        if "thread-local data" not in done.stderr:
            break
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "limited to 500 MiB" in done.stderr
    assert "ulimit -v unlimited" in done.stderr


@pytest.mark.usefixtures("emulated")
def test_json_in_a_loop_of_links_is_a_usage_error(tmp_path: Path) -> None:
    loop = tmp_path / "loop.png"
    loop.symlink_to(loop)
    pytest.importorskip("matplotlib")
    for options in (
        bench.Options(json=str(loop)),
        bench.Options(json=str(loop), plot=str(tmp_path / "a.png")),
    ):
        with pytest.raises(
            bench.UsageError, match="cannot be written: Too many levels"
        ):
            bench.main(options)


@pytest.mark.usefixtures("emulated", "tiny_plan")
def test_wrong_data_is_a_failure_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(np, "array_equal", lambda a, b: False)
    assert bench.main(bench.Options()) == 1
    assert "WRONG DATA" in capsys.readouterr().out


@pytest.mark.usefixtures("emulated", "tiny_plan")
def test_json_is_one_object_with_machine_versions_and_results(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert bench.main(bench.Options(json=str(path))) == 0
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["emulated"] is True
    assert data["versions"]["cumem"] == data["cumem"] == cumem.__version__
    assert data["commit"] == info.commit()
    assert data["ceiling_gbps"]["h2d"] > 0
    assert data["ceiling_source"]["h2d"].startswith("plain cudaMemcpyAsync")
    places = (str(Path(__file__).parents[2]), str(tmp_path), str(Path.home()))
    assert [place for place in places if f"{place}/" in path.read_text("utf-8")] == []
    assert data["machine"]["cores"] >= 1
    assert data["devices"][0]["emulated"] is True
    assert len(data["results"]) == bench_cases.count(TINY)
    first = data["results"][0]
    assert first["verified"] is True
    assert first["advice"] is None  # no advice from emulated figures
    assert first["gbps"] == pytest.approx(first["nbytes"] / first["seconds"] / 1e9)


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, and return what it prints."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=0"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="this test needs git")
def test_commit_is_that_of_the_checkout_and_says_when_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "checkout" / "cumem" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text("")
    monkeypatch.setattr(info, "__file__", str(package.parent / "tools" / "info.py"))
    assert info.commit() is None
    root = package.parent.parent
    git(root, "init", "-q")
    assert info.commit() is None  # the checkout has no commit yet
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    head = git(root, "rev-parse", "HEAD")
    assert info.commit() == head
    (root / "results.json").write_text("{}")
    assert info.commit() == head
    package.write_text("changed = 1\n")
    assert info.commit() == head + "-dirty"
    inner = root / "venv" / "cumem" / "__init__.py"  # in a checkout, but not from it
    monkeypatch.setattr(info, "__file__", str(inner.parent / "tools" / "info.py"))
    assert info.commit() is None


#: How files of each format begin.
PICTURES = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.usefixtures("emulated", "tiny_plan")
@pytest.mark.parametrize("ending", PICTURES)
def test_plot_is_of_the_format_that_its_name_says(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out{ending}"
    assert bench.main(bench.Options(plot=str(path))) == 0
    assert path.read_bytes().startswith(PICTURES[ending])


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", ["out.foo", "out", "png"])
def test_plot_of_no_known_format_is_refused_before_measuring(name: str) -> None:
    with pytest.raises(bench.UsageError, match=r"ends in \.png, \.svg, \.pdf"):
        bench.main(bench.Options(plot=name))


@pytest.mark.usefixtures("emulated")
def test_one_file_for_two_things_and_a_dash_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "same.png"
    other = tmp_path / "." / "same.png"
    link = tmp_path / "link.png"
    link.symlink_to(path)
    for name in (path, other, link):
        with pytest.raises(bench.UsageError, match="same file"):
            bench.main(bench.Options(json=str(path), plot=str(name)))
    with pytest.raises(bench.UsageError, match="name a file"):
        bench.main(bench.Options(json="-"))
    assert [found.name for found in tmp_path.iterdir()] == ["link.png"]


@pytest.mark.usefixtures("emulated")
def test_plot_without_matplotlib_names_the_extra_before_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(bench.UsageError, match=r"pip install 'cumem\[plot\]'"):
        bench.main(bench.Options(plot="out.png"))


@pytest.mark.usefixtures("emulated")
def test_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(bench.UsageError, match="no device 7; there are 2"):
        bench.main(bench.Options(device=7))


@pytest.mark.usefixtures("emulated")
def test_folder_that_is_not_there_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(bench.UsageError, match="no such folder"):
        bench.main(bench.Options(json=str(tmp_path / "none" / "out.json")))


@pytest.mark.usefixtures("emulated")
def test_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path,
) -> None:
    for name in (tmp_path, tmp_path / ("a" * 300)):
        with pytest.raises(bench.UsageError, match="cannot be written: "):
            bench.main(bench.Options(json=str(name)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("emulated")
def test_refused_run_leaves_files_as_they_were(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    for path in (old, new):
        with pytest.raises(bench.UsageError, match="smallest is 4 KiB"):
            bench.main(bench.Options(json=str(path), max_nbytes=1024))
    assert old.read_text() == "{}"
    assert not new.exists()


@pytest.mark.usefixtures("emulated", "tiny_plan")
def test_run_that_is_cut_short_ends_with_the_emulated_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(plan: Plan) -> Iterator[Result]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(bench_cases, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        bench.main(bench.Options())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-1]
    assert lines[0].startswith("EMULATED")


@pytest.mark.usefixtures("emulated")
def test_refused_run_prints_no_figures_and_so_no_emulated_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(bench.UsageError):
        bench.main(bench.Options(max_nbytes=1024))
    assert capsys.readouterr().out == ""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def three() -> Iterator[Result]:
    """Yield three results."""
    yield from (copied(kind, 1) for kind in COPY_KINDS[:3])


@pytest.mark.parametrize("have_tqdm", [True, False])
def test_progress_shows_on_a_terminal_and_passes_results_on(
    have_tqdm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if have_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    terminal = Terminal()
    monkeypatch.setattr(bench.sys, "stderr", terminal)
    assert len(list(bench._with_progress(three(), 3))) == 3
    assert ("0/3" if have_tqdm else "3/3") in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")


def test_progress_is_silent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(bench.sys, "stderr", stream)
    assert len(list(bench._with_progress(three(), 3))) == 3
    assert stream.getvalue() == ""
