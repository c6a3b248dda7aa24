# SPDX-License-Identifier: Apache-2.0
"""Tests of the magics that ``%load_ext cumem`` adds to IPython.

A notebook of the cells below is run once, in a kernel on the emulated device. Each test
looks at what some of its cells have shown.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:zmq.*"),
]

MIB = 1 << 20
#: The cells of the notebook, by names.
CELLS = {
    "load": f"""
import sys
import threading
import numpy as np
import cumem
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
%load_ext cumem
%reload_ext cumem
""",
    "empty": "%cumem once",
    "use": """
weights = cumem.empty_device(3 << 20, "u1")
parts = {
    "a": [[cumem.empty_pinned(1 << 20, "u1")]],
    "<b>": cumem.empty_pinned(2 << 20, "u1"),
}
view = parts["<b>"].numpy()[5:]
""",
    "once": "%cumem once",
    "table": "%cumem",
    # The table is updated very often from here on, so that the next cell can wait for that.
    "patch": """
from cumem.tools.notebook import magics
shown, update = threading.Event(), magics._Magics._update
def seen(self):
    update(self)
    shown.set()
magics._PERIOD_S, magics._Magics._update = 0.001, seen
""",
    "while": """
shown.clear()
while_it_ran = cumem.empty_managed(5 << 20, "u1")
_ = shown.wait()
""",
    "off": "%cumem off",
    "after": "too_late = cumem.empty_pinned(7 << 20, 'u1')",
    "wrong": "%cumem of",
    "measured": """%%cumem
kept = cumem.empty_device(9 << 20, "u1")
cumem.copy(kept, np.zeros(9 << 20, "u1"))
int(kept[0])
""",
    "failed": """%%cumem
x = 1
raise LookupError("here")
""",
    "awaits": """%%cumem
async def arrived(buf):
    await cumem.copy_async(buf, np.zeros(buf.shape, buf.dtype))
    return "arrived"
!:
awaited = cumem.empty_device(13 << 20, "u1")
await arrived(awaited)
""",
    "awaits and fails": """%%cumem

await arrived(awaited)
raise LookupError("here")
""",
    "awaits and is quiet": "%%cumem\nawait arrived(awaited); # not shown",
    "quiet": "%%cumem\nawaited.nbytes; # not shown",
    "awaits elsewhere": "get_ipython().run_cell_magic('cumem', '', 'await it()')",
    "ends": "%%cumem\nnext(iter(()))",
    # Another class takes the place of the recorder. The next cell notes an event in it.
    "recorder": """
from support.logs import made
from cumem.tools.notebook import magics
from cumem.recording.events import Frame
class Record:
    def __init__(self, stacks):
        self.events, self.stacks = [], []
    def __enter__(self):
        global noted
        noted = self
    def __exit__(self, *raised):
        self.log = made(self.events, stacks=self.stacks)
def note(buf):
    frame = sys._getframe(1)
    noted.stacks.append((Frame(frame.f_code.co_filename, frame.f_lineno, "<module>"),))
    noted.events.append({"op": "allocate", "kind": buf.kind, "address": buf.ptr,
        "nbytes": buf.nbytes, "time_ns": 5, "stack": len(noted.stacks)})
magics.record = Record
""",
    "recorded": """%%cumem

kept_by_name = [cumem.empty_pinned(11 << 20, "u1")]
note(kept_by_name[0])
""",
    "line": """
from cumem.tools.notebook.html import in_cell
text = sys._getframe().f_code.co_filename + ":3 (f)"
in_cell(text), in_cell("/a.py:3 (f)"), in_cell("no stack")
""",
    "short": "cumem.Pool('device', limit=1 << 20).allocate(4 << 20)",
    "unload": """%unload_ext cumem
shell = get_ipython()
shell.find_cell_magic('cumem') is None, "cumem" in str(shell.input_transformers_cleanup)
""",
    "display": "cumem.empty_device((2, 3), 'f4')",
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> dict[str, list[Any]]:
    """Run the notebook, and return the outputs of each cell by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUMEM_BACKEND", "emulated")
        cells = [nbformat.v4.new_code_cell(text.strip("\n")) for text in CELLS.values()]
        notebook = nbformat.v4.new_notebook(cells=cells)
        folder = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
        nbclient.NotebookClient(
            notebook,
            timeout=120,
            kernel_name="python3",
            allow_errors=True,
            resources=folder,
        ).execute()
    return {
        name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)
    }


def html_of(outputs: list[Any]) -> str:
    """Return the text of what the outputs show as HTML."""
    found = [
        each.data["text/html"]
        for each in outputs
        if each.output_type in ("display_data", "execute_result")
        and "text/html" in each.data
    ]
    assert found, outputs
    text = re.sub("<style>.*?</style>|<title>.*?</title>", "", "".join(found))
    return re.sub("(<[^>]*>)+", " ", text)


def error_of(outputs: list[Any]) -> str:
    """Return the traceback among the outputs, without its colours."""
    [error] = [each for each in outputs if each.output_type == "error"]
    return re.sub("\x1b\\[[\\d;]*m", "", "\n".join(error.traceback))


@pytest.mark.parametrize("name", ["load", "use", "patch", "while", "off", "after"])
def test_cells_without_output_say_nothing(shown, name: str) -> None:
    assert shown[name] == []


def test_table_names_the_largest_buffers_by_their_variables(shown) -> None:
    text = html_of(shown["once"])
    assert "emulated" in text
    assert re.search(r"weights  ?device \(3145728,\) uint8 0 3 MiB ", text)
    assert re.search(r"parts\[&#x27;&lt;b&gt;&#x27;\], view  ?pinned", text)
    assert re.search(r"device 0 none 4 MiB", text)  # the device has no limit
    assert re.search("- +pinned - - 0 1 MiB", text)  # its variable is nested too deeply
    [once] = shown["once"]
    assert "weights" in once.data["text/plain"]


def test_table_is_updated_until_another_takes_its_place(shown) -> None:
    text = html_of(shown["table"])
    assert re.search(r"while_it_ran  ?managed \(5242880,\)", text)
    assert "In[7]" in text
    assert "too_late" not in text


def test_table_of_once_is_not_updated(shown) -> None:
    assert "In[4]" in html_of(shown["once"])
    assert "while_it_ran" not in html_of(shown["once"])
    assert "no pool yet" in html_of(shown["empty"])


def test_unknown_word_is_refused_with_the_known_ones(shown) -> None:
    [said] = shown["wrong"]
    assert "%cumem of: no such word; %cumem [once | off]" in said.text


def test_measured_cell_shows_its_report_and_its_value(shown) -> None:
    report, value = shown["measured"]
    assert value.output_type == "execute_result"
    assert value.data["text/plain"] == "0"
    assert "9 MiB" in html_of([report])


def test_failed_cell_shows_its_report_and_where_it_failed(shown) -> None:
    assert "emulated" in html_of(shown["failed"])
    text = error_of(shown["failed"])
    assert re.search(r"line 3\b[\s\S]*---> *3 raise LookupError", text), text
    assert "magics.py" not in text


def test_cell_that_awaits_is_measured(shown) -> None:
    report, value = shown["awaits"]
    assert value.data["text/plain"] == "'arrived'"
    assert f"In[{list(CELLS).index('awaits') + 1}]:6" in html_of([report])
    assert "13 MiB" in html_of([report])
    assert html_of(shown["awaits and fails"])
    text = error_of(shown["awaits and fails"])
    assert re.search(r"line 4\b[\s\S]*---> *4 raise LookupError", text), text
    assert "magics.py" not in text


def test_cell_that_awaits_where_ipython_does_not_is_refused(shown) -> None:
    [said] = shown["awaits elsewhere"]
    assert (
        "%%cumem measures a cell that awaits only if it is the first line" in said.text
    )


@pytest.mark.parametrize("name", ["quiet", "awaits and is quiet"])
def test_semicolon_keeps_the_last_value_back(shown, name: str) -> None:
    assert [each.output_type for each in shown[name]] == ["display_data"]


def test_exceptions_of_a_cell_arrive_as_they_are(shown) -> None:
    assert shown["ends"][-1].ename == "StopIteration"


def test_recorded_cell_names_the_line_and_the_variable_of_what_is_left(shown) -> None:
    text = html_of(shown["recorded"])
    number = list(CELLS).index("recorded") + 1
    assert f"In[{number}]:4 kept_by_name[0] pinned 1 11 MiB" in text


def test_lines_of_cells_are_named_by_their_cell(shown) -> None:
    [said] = shown["line"]
    number = list(CELLS).index("line") + 1
    expected = (f"In[{number}]:3 (f)", "/a.py:3 (f)", "no stack")
    assert said.data["text/plain"] == repr(expected)


def test_shortage_is_drawn_after_its_traceback(shown) -> None:
    kinds = [each.output_type for each in shown["short"]]
    assert kinds == ["error", "display_data"]
    assert "Out of device memory: 4 MiB asked for" in html_of(shown["short"])


def test_unloaded_magics_are_gone_and_displays_stay(shown) -> None:
    [gone] = shown["unload"]
    assert gone.data["text/plain"] == "(True, False)"
    assert "(2, 3)" in html_of(shown["display"])
