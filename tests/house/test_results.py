# SPDX-License-Identifier: Apache-2.0
"""Figures: each file says where it comes from, each page of what commit its figures are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from support.rules import check_none

# These tests read texts of the tree, which are the same for each Python.
pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[2]

#: Not written by a script of the tree. Their next run is kept by benchmarks/record.py.
BY_HAND = {
    "checks-h200.json",
    "plan-fuzz.json",
    "pools-model.json",
}
WRITERS = [
    *("benchmarks/*.py", "benchmarks/*.c"),
    *("tests/isolated/*.py", "tests/mutants/*.py", "cumem/*.py"),
]


@pytest.fixture(scope="module")
def results() -> ModuleType:
    path = ROOT / "benchmarks" / "results.py"
    spec = importlib.util.spec_from_file_location("results", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_of_results_says_commit_date_and_machine(results) -> None:
    names = sorted(path.name for path in results.RESULTS.iterdir())
    assert len(names) > 20
    check_none(
        f"{name}: no {what}"
        for name in names
        for what in results.lacks(results.read(name))
    )


def test_every_file_of_results_is_about_something(results) -> None:
    names = [path.name for path in results.RESULTS.iterdir()]
    check_none(n for n in names if not any(n.startswith(k) for k in results.SOURCES))
    if not (ROOT / "cumem").is_dir():
        pytest.skip("the sources are not beside the tests")
    patterns = [pattern for sources in results.SOURCES.values() for pattern in sources]
    check_none(p for p in patterns if not list(ROOT.glob(p)))


def test_every_page_names_the_commit_of_its_figures(results) -> None:
    check_none(
        (
            str(page.relative_to(ROOT))
            for page, names in results.pages().items()
            if results.written(page, names) != page.read_text(encoding="utf-8")
        ),
        "run `python benchmarks/results.py --write`; not up to date:",
    )


def test_only_known_files_of_results_were_written_by_hand(results) -> None:
    """A script that writes such a file has `--json`, or prints the lines."""
    names = {path.name for path in results.RESULTS.iterdir()}
    check_none(BY_HAND - names, "not there any more:")
    by_hand = {name for name in names if "added" in results.read(name)}
    check_none(BY_HAND - by_hand, "these name their commit by now:")


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(
            f"docs/{n}.md"
            for n in (
                "copies",
                "files",
                "pools",
                "interop",
                "safetensors",
                "several-gpus",
            )
        ),
    ],
)
def test_figures_of_a_page_are_of_the_code_as_it_is(results, page) -> None:
    """If the figures are older, the test is skipped and says what to measure again.

    It does not fail, since code changes before a machine with a GPU is there to measure it.
    """
    names = results.pages().get(ROOT / page)
    if names is None:
        pytest.skip(f"{page} quotes nothing here")
    if older := results.older(names):
        pytest.skip(f"{page} quotes what is older than the code: {'; '.join(older)}")


def test_a_commit_that_the_history_lacks_is_that_which_brought_the_file(
    results, monkeypatch
) -> None:
    if results.git("rev-parse", "HEAD") is None:
        pytest.skip("there is no history")
    name = "interop-h200.json"
    brought = results.brought_by(name)
    if not brought:
        pytest.skip("the history does not have the file")
    monkeypatch.setattr(results, "read", lambda _: {"commit": "0" * 12})
    monkeypatch.setattr(results, "sources_of", lambda _: ("csrc", "cumem"))
    (line,) = results.older([name])  # once there was no line for such a file
    assert line.startswith(f"{name} is of {brought}: ")
    monkeypatch.setattr(results, "brought_by", lambda _: "")
    assert results.older([name]) == []
