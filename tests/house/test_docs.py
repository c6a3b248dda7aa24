# SPDX-License-Identifier: Apache-2.0
"""Tests that the documents keep up with the code.

They compare the lists of names, links, variables, former names and tables of results in the
pages with the code, and run the examples of pages and docstrings on the emulated device.
"""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from support.rules import check_none
from support.scripts import load

import cumem
from cumem import doctor, info, plots, types, units
from cumem.buffers import hints
from cumem.doctor import checks as doctor_checks
from cumem.doctor import facts as doctor_facts
from cumem.files import safetensors
from cumem.files.safetensors import format as safetensors_format
from cumem.files.safetensors import save as safetensors_save
from cumem.integrations import engines as integrations_engines
from cumem.integrations import torch as integrations_torch
from cumem.recording import json_lines as recording_json_lines
from cumem.recording import page as recording_page
from cumem.recording import perfetto as recording_perfetto
from cumem.recording import pprof as recording_pprof
from cumem.recording import torch_snapshot as recording_torch_snapshot
from cumem.tools import bench, cli, replay
from cumem.tools.bench import cases as bench_cases
from cumem.tools.bench import report as bench_report
from cumem.tools.replay import allocators as replay_allocators
from cumem.tools.replay import hold as replay_hold
from cumem.tools.replay import report as replay_report
from cumem.tools.replay import trace as replay_trace

# These tests read texts of the tree, which no version of Python changes.
pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "csrc" / "README.md", *(ROOT / "docs").rglob("*.md")]
)
#: Modules whose public functions and classes must have docstrings.
MODULES = (
    *(bench, bench_cases, bench_report, cli, info, plots, units),
    *(integrations_engines, integrations_torch),
    *(doctor, doctor_checks, doctor_facts),
    *(replay, replay_allocators, replay_hold, replay_report, replay_trace),
    *(recording_json_lines, recording_page, recording_perfetto, recording_pprof),
    recording_torch_snapshot,
    *(safetensors, safetensors_format, safetensors_save),
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(`{3,}).*?^\1", re.S | re.M)
TESTED_COMMANDS = (
    "pip install . && python -m cumem bench --quick",
    "pip install -e '.[test]' && pytest",
)


def test_public_names_are_in_the_list_of_names() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = set(re.findall(r"^\| `(\w+)[`(]", text, re.M))
    check_none(sorted(PUBLIC.keys() - names), "these names are not in docs/api.md:")


#: Aliases of types. Python gives them no docstring, so docs/api.md says what they are.
ALIASES = {"Kind"}
PUBLIC = {name: getattr(face, name) for face in (cumem, types) for name in face.__all__}
#: Names of integrations that need no GPU. The examples in their docstrings run as well.
INTEGRATIONS = {"SleepMode": integrations_engines.SleepMode} | {
    name: getattr(integrations_torch, name)
    for name in (
        *("ActivationOffload", "PinnedStager"),
        *("offload", "offload_activations", "restore"),
    )
}


def test_public_names_have_a_docstring() -> None:
    check_none(
        (
            name
            for name, value in PUBLIC.items()
            if name not in ALIASES and callable(value) and not inspect.getdoc(value)
        ),
        "these names have no docstring:",
    )


def test_former_names_with_an_error_are_on_their_page() -> None:
    rows = rows_of("renamed.md", 3)
    before = " ".join(row[0] for row in rows)
    names = {*hints.FORMER_NAMES, *types.__all__} - {"About"}
    check_none(
        (name for name in sorted(names) if not re.search(rf"[`.]{name}\b", before)),
        "these names are not in the first column of docs/renamed.md:",
    )
    assert len(names) > 30


def former_names() -> list[str]:
    """Return the names in the page's first column: functions, classes, modules and members.

    Environment variables and keys of a file are left out.
    """
    text = (ROOT / "docs" / "renamed.md").read_text(encoding="utf-8")
    names = text.split("## Names that moved")[1].split("## Arguments and behaviour")[0]
    cells = re.findall(r"^\| ([^|]+) \|", names, re.M)
    found = []
    for cell in cells:
        for code in re.findall(r"`([^`]+)`", cell):
            name = code.partition("(")[0].removeprefix("cumem.")
            is_other = name.startswith("CUMEM_") or cell.startswith("`info --json`")
            if not is_other and re.fullmatch(r"[\w.]+", name):
                found.append(name)
    return found


def test_former_names_are_read_from_every_row_of_their_page() -> None:
    names = former_names()
    assert {"Stats", "offload", "diff", "safetensors", "pool_counters"} <= {*names}
    assert "ManagedBuffer.prefetch" in names
    assert len(names) > 45


@pytest.mark.parametrize("name", former_names())
def test_former_name_as_attribute_and_import_says_what_to_type(
    runtime, name: str
) -> None:
    if name in ("configure", "pipeline", "ManagedBuffer.residency"):
        return  # these names still exist; a later test is about their former arguments
    if name == "ManagedBuffer.prefetch":
        with pytest.raises(AttributeError, match=r"; use buf\.prefetch_pages\(to\)$"):
            cumem.empty_managed(1).prefetch  # type: ignore[attr-defined]  # noqa: B018
        return
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; .*use|import"):
        getattr(cumem, name)
    with pytest.raises(ImportError) as caught:
        exec(f"from cumem import {name}", {})
    text = f"cannot import name '{name}' from 'cumem'; "
    assert str(caught.value).startswith(text)
    hint = str(caught.value).removeprefix(text)
    for module, there in re.findall(r"from (cumem[\w.]*) import (\w+)", hint):
        exec(f"from {module} import {there}", {})
    for path in re.findall(r"import (cumem[\w.]*)$", hint):
        exec(f"import {path}", {})
    for path in re.findall(r"use (cumem\.\w+(?:\.\w+)?)", hint):
        assert eval(path, {"cumem": cumem}) is not None
    assert re.search(r"import|use ", hint)


def test_former_arguments_say_what_to_type(runtime) -> None:
    text = (ROOT / "docs" / "renamed.md").read_text(encoding="utf-8")
    settings = ("bounce_nbytes", "chunk_nbytes", "depth", "quick_nbytes")
    settings += ("staged_down_nbytes", "staged_up_nbytes")
    named = re.findall(r"`configure\(([^)]*)\)`", text)[0]
    assert {*re.findall(r"(\w+)=", named)} < {*settings}
    for setting in settings:
        with pytest.raises(TypeError, match="it is a constant now: leave it out"):
            cumem.configure(**{setting: 1})
    with pytest.raises(TypeError, match="'chunk': rows= says how many rows"):
        cumem.pipeline(abs, [1], chunk=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="'device': to= says where the pages go"):
        cumem.empty_managed(1).prefetch_pages(device=0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'device': to= says where the pages go"):
        cumem.prefetch_pages([], device=0)  # type: ignore[call-arg]


def test_import_of_a_room_is_not_an_error() -> None:
    """An import finds a module even if the attribute of that name would raise an error.

    The attribute `cumem.integrations` raises one, with a hint, until an import has set it.
    """
    exec("from cumem import files, integrations, tools, units", {})


def test_list_of_names_has_nothing_that_does_not_exist() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    top = text.split("## `cumem.")[0]
    sections = re.split(r"\| member of every buffer.*?\n\n", top, flags=re.S)
    named = set(re.findall(r"^\| `(\w+)[`(]", "".join(sections), re.M))
    assert named - set(cumem.__all__) == set()


def test_members_of_buffers_are_in_the_list_of_names() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    members = [n for n in dir(cumem.Buffer) if n[0] != "_" and n not in hints.NAMES]
    assert len(members) > 20
    check_none(
        (m for m in members if not re.search(rf"`{m}[`(]", text)),
        "these members are not in docs/api.md:",
    )


def test_public_functions_of_modules_have_a_docstring() -> None:
    objects = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in MODULES
        for name in module.__all__
    }
    check_none(module.__name__ for module in MODULES if not module.__doc__)
    check_none(
        name
        for name, value in objects.items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and not inspect.getdoc(value)
    )


def test_rulers_in_docstrings_stand_alone() -> None:
    """The dashes below a section's title have a line of their own.

    If text follows them, help() and programs that render NumPy's style see no section.
    """
    check_none(
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "cumem").rglob("*.py*"))
        if path.suffix in (".py", ".pyi")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.match(r" +-{3,} +[^-\s]", line)
    )


def test_helpers_of_units_are_in_the_list_of_names() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    check_none(name for name in units.__all__ if f"| `{name}(" not in text)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them.

    If two headings have the same text, the second anchor ends in -1.
    """
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?) *$", text, re.M):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        number = 0
        while (anchor if number == 0 else f"{anchor}-{number}") in found:
            number += 1
        found.add(anchor if number == 0 else f"{anchor}-{number}")
    return found


def leads_somewhere(page: Path, target: str) -> bool:
    """Return whether a link leads to a file that exists and to a heading that it has."""
    name, _, anchor = target.partition("#")
    other = page.parent / name if name else page
    return other.exists() and (not anchor or anchor in anchors(other))


def test_links_lead_somewhere() -> None:
    check_none(
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
        for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
        if "://" not in target and not leads_somewhere(page, target)
    )


#: A file that a text names, with as many of its folders as the text has. A path that
#: begins with dots does not match: it is a link, and the test above checks links.
NAMED_FILE = re.compile(
    r"(?<![\w./*<>{}$-])((?:[\w-]+/)*[\w-]+\.(?:c|h|ptx|py|pyi|md|toml|cpp|sh))\b(?![\w/])"
)
#: Files that are not in the tree: made by the build, of other projects, or of users.
FILES_ELSEWHERE = {
    *("docstrings.h", "structseqs.h", "ptx.h", "gil_checks.h", "name.ptx"),
    *("Python.h", "nvtxTypes.h", "torch/version.py"),
    *("program.py", "train.py", "app.py"),
}


def test_files_that_sources_and_pages_name_exist() -> None:
    roots = ("csrc", "cumem", "docs", "tests", "benchmarks", "notebooks")
    files = [path for root in roots for path in (ROOT / root).rglob("*.*")]
    files += [path for path in ROOT.glob("*.*") if path.is_file()]
    parts = [path.relative_to(ROOT).parts for path in files]
    ends = {"/".join(each[i:]) for each in parts for i in range(len(each))}
    texts = [path for path in files if path.suffix in {".c", ".h", ".ptx", ".pyi"}]
    texts += [*(ROOT / "cumem").rglob("*.py"), ROOT / "CONTRIBUTING.md", *PAGES]
    check_none(
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts
        for name in NAMED_FILE.findall(FENCE.sub("", path.read_text(encoding="utf-8")))
        if name not in ends and name.removeprefix("build/") not in FILES_ELSEWHERE
    )


@pytest.mark.parametrize("command", TESTED_COMMANDS)
def test_readme_has_the_two_commands_on_lines_of_their_own(command: str) -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines.count(command) == 1


def test_readme_example_runs(emulated) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.S)
    assert example is not None
    code = example[1].replace("(64, 1080, 1920)", "(2, 108, 192)")
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    batch = names["batch"]
    assert isinstance(batch, cumem.DeviceBuffer)
    assert (batch.copy().shape) == (2, 108, 192)


RUNS = "<!-- runs -->"
RUNS_WITH_TORCH = "<!-- runs with torch -->"
EXAMPLE = re.compile(
    r"^<!-- runs(?P<torch> with torch)? -->\n```python\n(?P<code>.*?)^```$", re.S | re.M
)
RUNNABLE = [page for page in PAGES if "\n<!-- runs" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_marked_examples_of_a_page_run(emulated, page, tmp_path, monkeypatch) -> None:
    """The examples run in order, with one set of names, and begin in an empty folder.

    Without PyTorch only those run that do not need it.
    """
    text = page.read_text(encoding="utf-8")
    examples = list(EXAMPLE.finditer(text))
    marks = text.count(RUNS) + text.count(RUNS_WITH_TORCH)
    assert len(examples) == marks, "a mark of this page has no example below it"
    if importlib.util.find_spec("torch") is None:
        examples = [example for example in examples if not example["torch"]]
        if not examples:
            pytest.skip("all examples of this page need PyTorch")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for example in examples:
        lines_before = text.count("\n", 0, example.start("code"))
        code = "\n" * lines_before + example["code"]  # errors name the page's own line
        exec(compile(code, str(page), "exec"), names)
    names.clear()


#: Names whose examples need something that is not there, or change the process.
NOT_RUN = {"ManagedThrashWarning", "report_leaks_at_exit"}
NOT_RUN |= {"shutdown"}
CONSTANTS = {"__version__"}


@pytest.mark.parametrize(
    "name", sorted((PUBLIC | INTEGRATIONS).keys() - CONSTANTS - ALIASES)
)
def test_each_public_name_has_an_example_that_runs(
    emulated, tmp_path, monkeypatch, name: str
) -> None:
    text = inspect.getdoc((PUBLIC | INTEGRATIONS)[name])
    assert text is not None
    assert text.count("\nExamples\n--------\n>>> ") == 1
    if name in NOT_RUN:
        return
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"cumem": cumem, "numpy": numpy}
    if "torch." in text.partition("\nExamples\n")[2]:
        names["torch"] = pytest.importorskip("torch")
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert example.examples
    said: list[str] = []
    doctest.DocTestRunner().run(example, out=said.append)
    assert not said, "".join(said)


#: Public methods whose docstrings have an example.
METHODS = {
    f"{name}.{member}": method
    for name, cls in PUBLIC.items()
    if inspect.isclass(cls)
    for member, method in vars(cls).items()
    if member[0] != "_" and "\n>>> " in (inspect.getdoc(method) or "")
}


def test_methods_that_every_program_calls_have_an_example() -> None:
    known = {
        "Buffer.numpy",
        "Buffer.to_numpy",
        "Buffer.fill",
        "Buffer.copy",
        "Buffer.view",
    }
    assert known | {"Transfer.wait", "Stream.wait"} <= METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
def test_example_of_each_method_runs(
    emulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(METHODS[name])
    assert text is not None
    names: dict[str, object] = {"cumem": cumem, "numpy": numpy}
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    said: list[str] = []
    doctest.DocTestRunner().run(example, out=said.append)
    assert not said, "".join(said)


#: The page of each environment variable, whose name is written without `CUMEM_`.
VARIABLES = {
    "emulation": (
        *("BACKEND", "EMULATED_DEVICES", "EMULATED_MEMORY", "EMULATED_DRIVER"),
        *("EMULATED_DELAY_US", "EMULATED_SEED"),
    ),
    "tuning": ("TRANSFER_THREADS", "TRANSFER_RING", "NVTX"),
    "recording": ("RECORD", "LEAKS"),
}


def test_environment_variables_are_documented_and_read() -> None:
    package = Path(cumem.__file__).parent  # a wheel that is tested is not below ROOT
    files = [*ROOT.glob("csrc/**/*.c"), *package.rglob("*.py")]
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    for page, variables in VARIABLES.items():
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        names = [f"CUMEM_{variable}" for variable in variables]
        check_none(
            (n for n in names if not re.search(rf"\b{n}\b", text)),
            f"these variables are not in {page}.md:",
        )
        check_none(
            (n for n in names if f'"{n}"' not in sources),
            "no source reads these variables:",
        )


@pytest.mark.parametrize("page", ["README.md", "docs/memory-kinds.md"])
def test_figures_of_the_start_are_those_of_their_results(page: str) -> None:
    """The two pages that new readers see have the figures of the files of results."""
    script = load(ROOT / "benchmarks" / "render_readme.py")
    text = (ROOT / page).read_text(encoding="utf-8")
    marker = {"README.md": "<!-- figures -->"}.get(page, "<!-- bench-table -->")
    assert text.count(marker) == 1
    assert not script.read("bench-h200.json")["emulated"]
    assert script.rendered(ROOT / page) == text


@pytest.mark.parametrize(
    ("name", "page_name"),
    [("interop", "interop"), ("pools", "pools"), ("transfer", "copies")],
)
def test_tables_of_a_page_are_those_of_its_results(name: str, page_name: str) -> None:
    path = ROOT / "benchmarks" / "results" / f"{name}-h200.json"
    script = load(ROOT / "benchmarks" / f"{name}.py")
    results = json.loads(path.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / f"{page_name}.md").read_text(encoding="utf-8")
    assert not results["emulated"]
    assert script.render(results) in page


def test_benchmark_of_driver_calls_says_that_it_needs_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "driver_calls.py")],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("driver_calls.py needs a GPU and its driver: ")
    assert "Traceback" not in done.stderr


def test_decisions_are_numbered_and_at_most_a_page() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    texts = {page.name: page.read_text(encoding="utf-8") for page in pages}
    assert [int(name[:4]) for name in texts] == list(range(1, len(pages) + 1))
    check_none(n for n, text in texts.items() if len(text.splitlines()) > 60)
    check_none(
        f"{name} has no part {part}"
        for name, text in texts.items()
        for part in ("Context", "Decision", "Cost", "What would change it")
        if f"**{part}.**" not in text
    )


def rows_of(page: str, columns: int) -> list[list[str]]:
    """Return the cells of the rows of a page's tables that have this many columns."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in rows if len(row) == columns and set(row[0]) != {"-"}]


#: Code in the page's tables: all of the second column, and calls of cumem in the third.
HABITS = [
    code
    for row in rows_of("coming-from.md", 3)
    for place, cell in enumerate(row[1:])
    for code in re.findall(r"`([^`]+)`", cell)
    if place == 0 or re.match(r"(cumem|buf|end|torch)\.", code)
]


@pytest.mark.parametrize("code", sorted(set(HABITS)))
def test_habits_of_other_libraries_run_as_they_are_written(
    emulated, tmp_path, monkeypatch, code
) -> None:
    """Each piece of code of the page is run alone, with the names that the page uses."""
    monkeypatch.chdir(tmp_path)
    torch = pytest.importorskip("torch") if code.startswith("torch.") else None
    array = numpy.ones((4, 4), "f4")
    pinned = cumem.array(array, kind="pinned")
    stream, other = cumem.Stream(), cumem.Stream()
    start, end, event = cumem.Event(), cumem.Event(), cumem.Event()
    start.record(stream)
    end.record(stream)
    names: dict[str, object] = {"np": numpy, "cumem": cumem, "array": array}
    names |= {
        "torch": torch,
        "pinned": pinned,
        "buf": cumem.array(array),
        "stream": stream,
    }
    names |= {"other": other, "start": start, "end": end, "event": event}
    if "cumem.load(" in code:
        cumem.save("x.npy", array)
    try:
        exec(compile(code, "docs/coming-from.md", "exec"), names)
    finally:
        cumem.set_limit("device", None)
        names.clear()


def test_habits_of_all_five_libraries_are_listed() -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    for name in ("PyTorch", "CuPy", "PyCUDA", "RMM", "Numba"):
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert section.count("\n| `") > 8, name
    assert len(HABITS) > 100


def test_names_of_streams_and_events_are_there() -> None:
    """The names that the table of streams and events gives for cumem exist."""
    rows = rows_of("coming-from.md", 7)[1:]
    assert len(rows) == 9
    for row in rows:
        owner = cumem.Event if row[0] in ("is an event reached",) else None
        for name in re.findall(r"`(\w+)(?:\(\))?`", row[6]):
            owners = [owner] if owner else [cumem.Stream, cumem.Event]
            assert any(hasattr(each, name) for each in owners), (row[0], name)
