# SPDX-License-Identifier: Apache-2.0
"""Tests of the rules of cumem.recommend(), and of where its figures come from.

Without figures of the machine the rules decide. The figures of a benchmark decide instead
if they are given as a file or kept from an earlier run.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path

import numpy
import pytest

import cumem
from cumem.tools import bench, cli, recommendation, saved_results
from cumem.tools.bench.cases import Result
from cumem.tools.bench.report import Report

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
H200 = Path(__file__).parents[2] / "benchmarks" / "results" / "bench-h200.json"


class Unit:
    """Stands in for a Device that is not emulated."""

    index = 0
    name = "NVIDIA H200"
    pci_bus_id = "0000:1b:00.0"
    emulated = False


#: Cases for the rows of the table in docs/which-memory.md, in the order of the rows.
RULES = [
    ("managed", {"nbytes": 4 * GIB, "access": "device"}),
    ("device", {"nbytes": MIB, "access": "device", "sharing": "processes"}),
    ("device", {"nbytes": MIB, "access": "device", "sharing": "devices"}),
    ("device", {"nbytes": MIB, "access": "device"}),
    ("registered", {"nbytes": 8, "access": "both", "sharing": "processes"}),
    ("registered", {"nbytes": MIB, "access": "both", "sharing": "libraries"}),
    ("mapped", {"nbytes": 4 * KIB, "access": "both"}),
    ("mapped", {"nbytes": MIB, "access": "both", "reuse": "once"}),
    ("managed", {"nbytes": MIB, "access": "both"}),
    ("managed", {"nbytes": MIB, "access": "both", "sharing": "devices"}),
    ("registered", {"nbytes": MIB, "sharing": "processes"}),
    ("registered", {"nbytes": MIB, "sharing": "libraries", "reuse": 10}),
    ("pageable", {"nbytes": MIB, "sharing": "libraries", "reuse": 9}),
    ("pageable", {"nbytes": MIB, "sharing": "processes", "reuse": "once"}),
    ("pageable", {"nbytes": 1 << 50}),
    ("pageable", {"nbytes": MIB, "reuse": "once"}),
    ("pageable", {"nbytes": MIB, "reuse": 9}),
    ("pinned", {"nbytes": MIB, "reuse": 10}),
    ("pinned", {"nbytes": MIB, "reuse": "many", "sharing": "devices"}),
]


@pytest.mark.parametrize(("kind", "asked"), RULES)
def test_rules_choose(emulated, kind: str, asked: dict) -> None:
    found = cumem.recommend(**asked)
    assert found.kind == kind
    assert (found.source, found.figures) == ("rules", {})
    assert found.call.startswith(("cumem.", "numpy."))
    assert all(other != kind for other, _ in found.alternatives)
    for text in (kind, found.reason, found.call, *dict(found.alternatives).values()):
        assert text in repr(found)


def test_calls_that_are_recommended_can_be_made(runtime) -> None:
    names = {"cumem": cumem, "numpy": numpy, "array": numpy.ones(8, "f4")}
    names |= {"shape": (8,), "dtype": "f4", "nbytes": 32}
    for kind, call in recommendation._CALLS.items():
        made = eval(call, names)
        if kind == "registered":
            made.close()
        elif kind != "pageable":
            assert made.kind == kind.replace("write-combined", "pinned")
    made = eval(cumem.recommend(8, access="device", sharing="processes").call, names)
    assert made.kind == "device"
    with eval(
        cumem.recommend(8, access="both", sharing="libraries").call, names
    ) as one:
        assert one.kind == "mapped"


def test_facts_of_the_device_decide(emulated, monkeypatch) -> None:
    facts = {"integrated": False, "concurrent_managed_access": False}
    monkeypatch.setattr(recommendation, "_attribute", lambda device, name: facts[name])
    assert cumem.recommend(MIB, access="both").kind == "pinned"
    facts["integrated"] = True
    assert cumem.recommend(MIB, access="both").kind == "mapped"


def test_limits_decide(emulated) -> None:
    assert cumem.recommend("512 MiB", access="device").kind == "device"
    with cumem.limit("device", "256 MiB"):
        assert cumem.recommend("512 MiB", access="device").kind == "managed"
    with cumem.limit("pinned", "256 MiB"):
        found = cumem.recommend("512 MiB")
        assert found.kind == "pageable"
        assert "256 MiB" in found.reason
        assert cumem.recommend("512 MiB", access="both", reuse="once").kind == "managed"


def test_write_combined_is_an_alternative_of_the_rules(emulated) -> None:
    kinds = [
        [kind for kind, _ in cumem.recommend(MIB, access=access).alternatives]
        for access in ("host", "host-writes", "host-reads")
    ]
    assert ["write-combined" in each for each in kinds] == [False, True, False]


def test_figures_of_a_file_decide(emulated) -> None:
    """The figures of an H200 decide where the rules would decide otherwise."""

    def ask(nbytes: object, **more: object) -> cumem.types.Recommendation:
        return cumem.recommend(nbytes, figures=H200, **more)

    assert ask("4 KiB").kind == "pageable"  # by the rules it would be pinned
    assert ask("1 MiB").kind == "pinned"
    assert ask("1 MiB", reuse=5).kind == "pageable"
    assert ask("1 MiB", reuse=100).kind == "pinned"
    found = ask("64 MiB", reuse=100, access="host-writes")
    assert found.kind == "pinned"
    assert found.source == "bench of 2026-11-23, NVIDIA H200"
    assert set(found.figures) == {"pageable", "pinned", "write-combined"}
    data = json.loads(H200.read_text())
    rows = {(r["group"], r["what"], r["kind"], r["nbytes"]): r for r in data["results"]}
    expected = (
        rows["allocate", "first", "pinned", 64 * MIB]["seconds"]
        + 100 * rows["copy", "h2d", "pinned", 64 * MIB]["seconds"]
    )
    assert found.figures["pinned"] == pytest.approx(expected)
    larger = ask(GIB, access="host-reads")
    copy = rows["copy", "d2h", "pinned", 256 * MIB]["seconds"]
    assert larger.figures["pinned"] == pytest.approx(4 * copy)
    assert cumem.recommend("4 KiB", figures=data) == ask("4 KiB")
    # Where nothing is copied, figures do not matter.
    assert ask("1 MiB", access="device").source == "rules"


def made_up(**gbps: float) -> dict:
    """Return results as bench writes them, for kinds that copy at these speeds."""
    results = [
        Result("copy", way, kind, MIB, MIB / rate / 1e9, 0, 0, 5, True)
        for kind, rate in ((k.replace("_", "-"), r) for k, r in gbps.items())
        for way in ("h2d", "d2h")
    ]
    return {
        "schema": 2,
        "emulated": False,
        "device": 0,
        "started": "2026-01-02T03:04",
        "devices": [{"index": 0, "name": "GPU"}],
        **Report(results).as_data(),
    }


def test_gain_within_5_percent_does_not_decide(emulated) -> None:
    def ask(access: str = "host", **gbps: float) -> str:
        return cumem.recommend(MIB, access=access, figures=made_up(**gbps)).kind

    assert ask(pageable=10, pinned=10.4) == "pageable"
    assert ask(pageable=10, pinned=10.6) == "pinned"
    three = {"pageable": 10, "pinned": 20, "write_combined": 22}
    assert ask("host-writes", **three) == "write-combined"
    assert ask("host-writes", **{**three, "write_combined": 20.5}) == "pinned"
    assert ask("host", **three) == "pinned"


def test_missing_figures_leave_the_choice_to_the_rules(emulated) -> None:
    only_one = made_up(pageable=10)
    assert cumem.recommend(MIB, figures=only_one).source == "rules"
    no_allocation = made_up(pageable=10, pinned=11)
    assert cumem.recommend(MIB, reuse=3, figures=no_allocation).source == "rules"


def test_value_that_has_no_figures_is_refused(emulated, tmp_path: Path) -> None:
    good = made_up(pageable=10, pinned=20)
    for bad in ({}, {**good, "schema": 1}, {**good, "results": [{}]}, {"schema": 2}):
        with pytest.raises(
            ValueError, match="figures has no results of python -m cumem"
        ):
            cumem.recommend(MIB, figures=bad)
    with pytest.raises(ValueError, match="emulated device, which say nothing"):
        cumem.recommend(MIB, figures={**good, "emulated": True})
    path = tmp_path / "figures.json"
    for text in ("", "[1]", "{" * 10_000, "nonsense"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"figures\.json has no results"):
            cumem.recommend(MIB, figures=path)
    with pytest.raises(FileNotFoundError):
        cumem.recommend(MIB, figures=str(tmp_path / "none"))
    with pytest.raises(TypeError):
        cumem.recommend(MIB, figures=5)


#: Values for a row of results, none of which bench would write.
BAD_ROWS = [
    *({"seconds": value} for value in (0, -1, math.nan, math.inf, 1e300, 10**400)),
    *({"seconds": value} for value in ("1", None, [1], True)),
    *({"nbytes": value} for value in ("x", None, -1, 1.5, 10**400, True)),
    *({"group": []}, {"kind": {}}, {"what": 5}, {"verified": "yes"}),
]


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_rows_that_bench_never_writes_are_refused(kept: Path, bad: dict) -> None:
    good = made_up(pageable=10, pinned=20)
    for row in range(len(good["results"])):
        data = copy.deepcopy(good)
        data["results"][row].update(bad)
        with pytest.raises(
            ValueError, match="figures has no results of python -m cumem"
        ):
            cumem.recommend(MIB, figures=data)
        kept.write_text(json.dumps(data | {"key": saved_results.machine_key(Unit())}))
        assert recommendation._find_report(None, Unit()) == (None, "")


def test_path_of_figures_may_be_bytes(emulated, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(made_up(pageable=10, pinned=20)))
    assert cumem.recommend(MIB, figures=bytes(path)).kind == "pinned"
    with pytest.raises(FileNotFoundError):
        cumem.recommend(MIB, figures=bytes(tmp_path / "none"))


def test_wrong_arguments_list_the_choices(emulated) -> None:
    with pytest.raises(ValueError, match="'once', 'many' or a number of uses"):
        cumem.recommend(1, reuse="often")
    with pytest.raises(ValueError, match="at least 1, not 0"):
        cumem.recommend(1, reuse=0)
    with pytest.raises(ValueError, match=r"less than 2\*\*63"):
        cumem.recommend(1, reuse=10**400, figures=made_up(pageable=10, pinned=20))
    for reuse in (1.5, None, True):
        with pytest.raises(TypeError, match="reuse must be"):
            cumem.recommend(1, reuse=reuse)
    with pytest.raises(
        ValueError, match=r"'host', 'host-writes', .* or 'both', not 'gpu'"
    ):
        cumem.recommend(1, access="gpu")
    with pytest.raises(TypeError, match=r"sharing must be 'none', .*, not bool"):
        cumem.recommend(1, sharing=True)
    with pytest.raises(ValueError, match="nbytes"):
        cumem.recommend("many")
    with pytest.raises(ValueError, match="device 9"):
        cumem.recommend(1, device=9)


# -- kept figures ----------------------------------------------------------------------


@pytest.fixture
def kept(emulated, monkeypatch, tmp_path: Path) -> Path:
    """Return the path at which the figures of `Unit` are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = saved_results.result_path(Unit(), "bench")
    path.parent.mkdir()
    return path


def test_kept_figures_of_this_machine_are_taken(kept: Path) -> None:
    assert recommendation._find_report(None, Unit()) == (None, "")
    data = made_up(pageable=10, pinned=20) | {"key": saved_results.machine_key(Unit())}
    kept.write_text(json.dumps(data))
    report, source = recommendation._find_report(None, Unit())
    assert source == "this machine's bench of 2026-01-02, GPU"
    assert report.find("copy", "h2d", "pinned", MIB).gbps == pytest.approx(20)
    # Figures of a real device are not taken for an emulated one.
    assert recommendation._find_report(None, cumem.Device(0)) == (None, "")


@pytest.mark.parametrize(
    "change",
    [{"key": {}}, {"schema": 1}, {"emulated": True}, {"results": 5}, {"devices": []}],
)
def test_kept_figures_of_others_are_ignored(kept: Path, change: dict) -> None:
    data = made_up(pageable=10, pinned=20) | {"key": saved_results.machine_key(Unit())}
    kept.write_text(json.dumps(data | change))
    assert recommendation._find_report(None, Unit()) == (None, "")
    kept.write_text("damaged")
    assert recommendation._find_report(None, Unit()) == (None, "")


def test_bench_keeps_nothing_of_the_emulated_device(kept: Path, capsys) -> None:
    assert cli.main(["bench", "--quick", "--max-size", "4KiB", "--keep"]) == 2
    assert "say nothing about a GPU" in capsys.readouterr().err
    assert not kept.exists()


def test_bench_keeps_what_recommend_finds(kept: Path, monkeypatch, capsys) -> None:
    """A class stands for a real device, since bench keeps no figures of an emulated one."""

    class Real(Unit):
        total_nbytes = 1 << 30

    monkeypatch.setattr(bench, "Device", lambda index: Real())
    options = bench.Options(keep=True)
    results = [
        Result("copy", "h2d", kind, MIB, seconds, seconds, seconds, 5, True)
        for kind, seconds in (("pageable", 2e-4), ("pinned", 1e-4))
    ]
    plan = bench.make_plan(bench.Options(quick=True), MIB)
    facts = {"devices": [{"index": 0, "name": "GPU"}], "versions": {"driver": "13.0"}}
    when = bench.datetime(2026, 1, 2, tzinfo=bench.UTC)
    bench._save(options, Report(results), facts, plan, when)
    assert str(kept) in capsys.readouterr().out
    report, source = recommendation._find_report(None, Unit())
    assert source == "this machine's bench of 2026-01-02, GPU"
    assert [dataclasses.asdict(r) for r in report.results] == [
        dataclasses.asdict(r) for r in results
    ]


@pytest.mark.gpu
def test_kept_figures_of_a_gpu_are_found(cuda, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["bench", "--quick", "--max-size", "64KiB", "--keep"]) == 0
    assert cumem.recommend("64 KiB").source.startswith("this machine's bench of")
