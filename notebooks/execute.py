# SPDX-License-Identifier: Apache-2.0
"""Run the notebooks from top to bottom and keep what they show.

    python notebooks/execute.py             # all of them, in place
    python notebooks/execute.py NOTEBOOK... # some

Those that are committed were run on a GPU; the first cell of each prints which. Needs cumem
with its extra `plot`, nbclient and ipykernel. A notebook that fails, says something on
standard error, or shows what differs from run to run for no reason (paths, addresses) is
left as it was, and the exit status is 1.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

#: Of all that one notebook shows.
MOST_NBYTES = 300_000
#: No rate, but what is of this machine or of this run only.
UNWANTED = re.compile(
    r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|work|var)/\S*|\b0x[0-9a-f]{6,}"
)


def run(path: Path) -> Any:
    """The notebook with the outputs of a run in an empty folder."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources=resources
        )
        client.execute()
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec}
    notebook.metadata["language_info"] = {"name": "python"}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        tags = cell.metadata.get("tags")  # such as one that has types not checked
        cell.metadata = {} if tags is None else {"tags": tags}
        for output in cell.get("outputs", ()):
            output.get("metadata", {}).clear()
            data = output.get("data", {})
            if {"text/html", "image/png"} & data.keys():
                data.pop("text/plain", None)  # a repr that nobody sees, with paths
    return notebook


def wrong_with(notebook: Any) -> list[str]:
    """What a committed notebook should not have."""
    found = []
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    for output in outputs:
        if output.get("name") == "stderr":
            found.append(f"on standard error: {output['text'][:200]}")
        texts = [output.get("text", ""), *map(str, output.get("data", {}).values())]
        pictures = [output.get("data", {}).get("image/png", "")]
        for text in set(texts) - set(pictures):
            found += [f"of this run: {each}" for each in UNWANTED.findall(text)]
    nbytes = len(str(outputs))
    if nbytes > MOST_NBYTES:
        found.append(f"outputs of {nbytes} bytes, at most {MOST_NBYTES}")
    return found


def main() -> int:
    named = [Path(name) for name in sys.argv[1:]]
    # What the kernel itself has to say of its start, as that modules are frozen.
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    failed = False
    for path in named or sorted(Path(__file__).parent.glob("*.ipynb")):
        try:
            notebook = run(path)
            wrong = wrong_with(notebook)
        except CellExecutionError as error:
            wrong = [str(error)]
        print(path.name, *(wrong or ["ok"]), sep="\n    ")
        if wrong:
            failed = True
        else:
            nbformat.write(notebook, path)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
