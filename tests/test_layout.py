# SPDX-License-Identifier: Apache-2.0
"""The architecture, read off the text of the sources: layers, seams, lengths, names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
LAYERS = ["base", "runtime", "pool", "transfer", "python"]
PACKAGE_LAYERS = [
    {"_core"},
    {"units"},
    {"pool_stats", "snapshot", "memory", "progress"},
    {"tuning", "explanation", "calibration", "files"},
    {"safetensors_format"},
    {"safetensors", "safetensors_save"},
    {"info", "bench", "bench_cases", "bench_report"},
    {"replay_npz"},
    {"replay_trace", "replay_report"},
    {"replay_allocators", "replay_hold"},
    {"replay"},
    {"cli"},
    {"__main__"},
]

pytestmark = pytest.mark.skipif(
    not CSRC.is_dir(), reason="the C sources are not beside the tests"
)

SOURCES = sorted(CSRC.rglob("*.[ch]"))
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


def ids(path: Path) -> str:
    return str(path.relative_to(CSRC)) if path.is_relative_to(CSRC) else path.name


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_include_points_to_own_layer_or_left(path: Path) -> None:
    own = LAYERS.index(path.relative_to(CSRC).parts[0])
    for bracket, name in INCLUDE.findall(path.read_text()):
        if bracket == '"':
            layer, _, rest = name.partition("/")
            assert rest, f'"{name}" is not written with its folder'
            assert layer in LAYERS, f'"{name}" is in no layer'
            assert LAYERS.index(layer) <= own, f'"{name}" points right'
            assert (CSRC / name).is_file(), f'"{name}" does not exist'


def test_includes_make_no_circle() -> None:
    graph = {
        str(p.relative_to(CSRC)): [
            name for bracket, name in INCLUDE.findall(p.read_text()) if bracket == '"'
        ]
        for p in SOURCES
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        if name not in done:
            for below in graph[name]:
                visit(below, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_seam_is_one_file(path: Path) -> None:
    relative = str(path.relative_to(CSRC))
    for _, name in INCLUDE.findall(path.read_text()):
        if name == "Python.h":
            assert relative == "python/python.h"
        if name.startswith("numpy/"):
            assert re.fullmatch(r"python/numpy_bridge(_\w+)?\.[ch]", relative)
        if name.startswith(("cuda", "driver_types")):
            assert re.fullmatch(r"runtime/cuda(_\w+)?\.[ch]", relative)
        assert "dlpack/" not in name
    if not re.match(r"python/dlpack", relative):
        assert "DLManagedTensor" not in without_comments(path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_core_never_names_python(path: Path) -> None:
    if path.relative_to(CSRC).parts[0] != "python":
        code = without_comments(path.read_text())
        assert not re.search(r"\bPy[A-Z_]\w*", code)


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_file_length(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    # objects.h, runtime.h and ops.h are contracts read as one page
    assert lines <= (600 if path.suffix == ".c" else 300)


def functions(text: str) -> list[tuple[str, int]]:
    """Name and length of each function body that starts in column 0."""
    found = []
    lines = text.splitlines()
    start = None
    for number, line in enumerate(lines):
        if line == "{":
            start = number
        elif line == "}" and start is not None:
            head = "\n".join(lines[max(0, start - 6) : start])
            names = re.findall(r"^(\w+)\(", head, re.MULTILINE)
            found.append((names[-1] if names else "?", number - start + 1))
            start = None
    return found


@pytest.mark.parametrize("path", [p for p in SOURCES if p.suffix == ".c"], ids=ids)
def test_function_length(path: Path) -> None:
    long = [(n, length) for n, length in functions(path.read_text()) if length > 80]
    assert not long, f"functions over 80 lines: {long}"


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_spdx_line_comes_first(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first == "/* SPDX-License-Identifier: Apache-2.0 */"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.suffix == ".h"], ids=ids)
def test_header_opens_with_its_job(path: Path) -> None:
    assert path.read_text().splitlines()[1].startswith("/* ")


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_banned_functions(path: Path) -> None:
    code = without_comments(path.read_text())
    for banned in ("sprintf", "strcpy", "strcat", "gets", "abort", "printf", "exit"):
        assert not re.search(rf"(?<![\w.>]){banned}\s*\(", code), banned


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_core_has_no_mutable_globals(path: Path) -> None:
    if path.relative_to(CSRC).parts[0] == "python" or path.suffix != ".c":
        return
    for line in without_comments(path.read_text()).splitlines():
        if re.match(r"static\s", line) and line.rstrip().endswith((";", "{")):
            if "(" not in line or "=" in line:
                allowed = re.match(
                    r"static (const|_Thread_local|inline|_Atomic)|.*\bconst\b", line
                )
                assert allowed, line


def test_package_imports_point_left() -> None:
    order = {name: i for i, layer in enumerate(PACKAGE_LAYERS) for name in layer}
    for path in sorted((ROOT / "cumem").glob("*.py")):
        if path.stem == "__init__":
            continue
        assert path.stem in order, f"{path.name} is in no layer"
        names = re.findall(r"from (?:cumem|\.)(?:\.)?(\w*) import", path.read_text())
        for name in names:
            if name in order:
                assert order[name] <= order[path.stem], f"{path.name} -> {name}"


def test_no_build_products_are_tracked() -> None:
    for pattern in ("*.so", "*.o", "*.whl"):
        tracked = list(ROOT.glob(f"csrc/**/{pattern}"))
        assert tracked == []
