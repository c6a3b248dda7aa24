# SPDX-License-Identifier: Apache-2.0
"""Tests that each notebook runs from top to bottom and is committed with its output.

The tests run the notebooks on the emulated device, and check the outputs that are
committed: all cells in order, and no paths, addresses or warnings.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from support.rules import check_none

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
assert spec is not None
assert spec.loader is not None
execute = importlib.util.module_from_spec(spec)
spec.loader.exec_module(execute)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:zmq.*"),
    # These tests start separate programs, whose results no version of Python changes.
    pytest.mark.any_python,
]


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_without_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUMEM_BACKEND", "emulated")
    notebook = execute.run(path)
    committed = nbformat.read(path, as_version=4)
    for old, new in zip(code_cells(committed), code_cells(notebook), strict=True):
        assert bool(old.outputs) == bool(new.outputs), new.source
        assert [o for o in new.outputs if o.get("name") == "stderr"] == [], new.source


def test_notebooks_are_committed_with_their_output_in_order() -> None:
    wrong = []
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        cells = code_cells(notebook)
        counts = [cell.execution_count for cell in cells]
        if counts != list(range(1, len(cells) + 1)):
            wrong.append(f"{path.name}: cells were run as {counts}")
        if not any(cell.outputs for cell in cells):
            wrong.append(f"{path.name}: no cell has an output")
    check_none(wrong)


def test_notebooks_are_committed_with_what_execute_keeps() -> None:
    """Outputs must have no warning and no path, and be shorter than a megabyte."""
    check_none(
        f"{path.name}: {wrong}"
        for path in NOTEBOOKS
        for wrong in execute.wrong_with(nbformat.read(path, as_version=4))
    )


def test_notebooks_say_what_they_ran_on() -> None:
    """The first cell names the device, and explains what an emulated one means."""
    first = {
        path.name: "".join(
            output.get("text", "")
            for output in code_cells(nbformat.read(path, as_version=4))[0].outputs
        )
        for path in NOTEBOOKS
    }
    check_none(name for name, text in first.items() if "ran on: " not in text)
    check_none(
        name
        for name, text in first.items()
        if "emulated" in text and "is a GPU's" not in text
    )


def test_notebooks_have_one_cell_of_imports() -> None:
    check_none(
        f"{path.name}: {line}"
        for path in NOTEBOOKS
        for cell in code_cells(nbformat.read(path, as_version=4))[1:]
        for line in cell.source.splitlines()
        if re.match(r"(import|from) ", line)
    )


def output(text: str, name: str = "stdout") -> Any:
    """Make an output of a cell, as printed to one of the two streams."""
    return nbformat.v4.new_output("stream", name=name, text=text)


@pytest.mark.parametrize(
    "shown",
    [
        output("/home/me/file.py:3: something"),
        output("<object at 0x7f3a2b4c5d60>"),
        output("a warning", "stderr"),
        output("x" * 1_000_000),
    ],
)
def test_outputs_that_are_not_for_a_commit_are_refused(shown) -> None:
    cell = nbformat.v4.new_code_cell("pass", outputs=[shown])
    assert execute.wrong_with(nbformat.v4.new_notebook(cells=[cell]))


def test_outputs_with_rates_are_kept() -> None:
    cell = nbformat.v4.new_code_cell("pass", outputs=[output("52.0 GB/s up/down\n")])
    assert not execute.wrong_with(nbformat.v4.new_notebook(cells=[cell]))
