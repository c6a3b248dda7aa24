# SPDX-License-Identifier: Apache-2.0
"""Tests of the files in benchmarks/results and of the pages that quote them.

Each file must say its commit, date and machine. Each page that quotes files ends with a
table of their commits. If the figures of a page are older than the code, its test is
skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from support.rules import check_none

# These tests read texts of the tree, which no version of Python changes.
pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[2]

#: Files that no script of the tree wrote. benchmarks/record.py will keep their next run.
BY_HAND = {
    "checks-h200.json",
    "plan-fuzz.json",
    "pools-model.json",
}


@pytest.fixture(scope="module")
def results() -> ModuleType:
    """Import the script benchmarks/results.py."""
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
        f"{name} does not say its {what}"
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
        "run `python benchmarks/results.py --write`, since these are not up to date:",
    )


def test_only_known_files_of_results_were_written_by_hand(results) -> None:
    """All other files come from a script, by its `--json` or from what it prints."""
    names = {path.name for path in results.RESULTS.iterdir()}
    check_none(BY_HAND - names, "take out of BY_HAND, since there is no such file:")
    by_hand = {name for name in names if "added" in results.read(name)}
    check_none(BY_HAND - by_hand, "take out of BY_HAND, since these name their commit:")


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
    """If figures are older than the code, the test is skipped and says what to measure.

    It does not fail, because a change of code does not wait for a machine with a GPU.
    """
    names = results.pages().get(ROOT / page)
    if names is None:
        pytest.skip(f"{page} quotes no file of results here")
    if older := results.older(names):
        pytest.skip(
            f"{page} quotes figures that are older than the code: {'; '.join(older)}"
        )


def test_commit_that_the_history_lacks_is_replaced_by_the_one_that_brought_the_file(
    results, monkeypatch
) -> None:
    if results.git("rev-parse", "HEAD") is None:
        pytest.skip("there is no history of commits beside the tests")
    name = "interop-h200.json"
    brought = results.brought_by(name)
    if not brought:
        pytest.skip("the history of commits lacks the file")
    monkeypatch.setattr(results, "read", lambda _: {"commit": "0" * 12})
    monkeypatch.setattr(results, "sources_of", lambda _: ("csrc", "cumem"))
    (line,) = results.older([name])  # a former version gave no line for such a file
    assert line.startswith(f"{name} is of {brought}: ")
    monkeypatch.setattr(results, "brought_by", lambda _: "")
    assert results.older([name]) == []
