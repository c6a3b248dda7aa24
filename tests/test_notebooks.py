# SPDX-License-Identifier: Apache-2.0
"""Each notebook runs from top to bottom, and is committed with what it printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rules import check_none

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:zmq.*"),
]


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_without_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUMEM_BACKEND", "emulated")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
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
            wrong.append(f"{path.name}: without output")
    check_none(wrong)


def test_notebooks_say_where_they_were_emulated() -> None:
    printed = {
        path.name: "".join(
            output.get("text", "")
            for cell in code_cells(nbformat.read(path, as_version=4))
            for output in cell.outputs
        )
        for path in NOTEBOOKS
    }
    check_none(name for name, text in printed.items() if "emulated" not in text)
