# SPDX-License-Identifier: Apache-2.0
"""Tests of the rules that the texts of the C sources and of the tests must follow.

The tests read the sources as text. Includes point one way through the layers, only certain
files know Python, NumPy or CUDA, and some functions and patterns are forbidden. The last
tests read the tests themselves, the Makefile and the faults of the mutants.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from support import session
from support.rules import check_none

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
LAYERS = ["base", "runtime", "pool", "transfer", "python"]
#: The order of a layer's sub-folders. Files of the layer itself come before all of them.
SUB_LAYERS = {
    "runtime": ["emulated"],
    "transfer": [
        *("plan", "host", "device", "engine", "routes", "file", "run", "batch", "rows"),
    ],
    "python": ["core", "device", "buffer", "pool", "protocols", "copy", "module"],
}

pytestmark = [
    # These tests read texts of the tree, which no version of Python changes.
    pytest.mark.any_python,
    pytest.mark.skipif(
        not CSRC.is_dir(), reason="the C sources are not beside the tests"
    ),
]

SOURCES = sorted(CSRC.rglob("*.[ch]"))
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


def name_of(path: Path) -> str:
    """Return the path of a source below csrc/."""
    return str(path.relative_to(CSRC))


def layer_of(path: Path) -> str:
    """Return the layer of a source, which is the first folder of its path."""
    return path.relative_to(CSRC).parts[0]


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


TEXTS = {path: path.read_text() for path in SOURCES}
CODES = {path: without_comments(text) for path, text in TEXTS.items()}
#: Headers that csrc/headers.py makes of the stub and of the PTX texts.
MADE = {
    ('"', f"{name}.h") for name in ("docstrings", "structseqs", "ptx", "gil_checks")
}
INCLUDES = {
    path: [each for each in INCLUDE.findall(text) if each not in MADE]
    for path, text in TEXTS.items()
}


def test_includes_point_to_own_layer_or_left() -> None:
    wrong = []
    for path in SOURCES:
        own = LAYERS.index(layer_of(path))
        for name in (name for bracket, name in INCLUDES[path] if bracket == '"'):
            layer, _, rest = name.partition("/")
            if not rest:
                wrong.append(
                    f'{name_of(path)}: "{name}" is not written with its folder'
                )
            elif layer not in LAYERS:
                wrong.append(f'{name_of(path)}: "{name}" is in no layer')
            elif LAYERS.index(layer) > own:
                wrong.append(f'{name_of(path)}: "{name}" points right')
            elif not (CSRC / name).is_file():
                wrong.append(f'{name_of(path)}: "{name}" does not exist')
    check_none(wrong)


@pytest.mark.parametrize("layer", SUB_LAYERS)
def test_includes_point_to_own_sub_folder_or_left(layer: str) -> None:
    order = ["", *SUB_LAYERS[layer]]

    def place_of(name: str) -> int:
        return order.index("/".join(Path(name).parts[1:-1]))

    names = [name_of(path) for path in SOURCES if layer_of(path) == layer]
    check_none(
        f'{name}: "{included}" points right'
        for name in names
        for _, included in INCLUDES[CSRC / name]
        if included.startswith(f"{layer}/") and place_of(included) > place_of(name)
    )


def test_only_files_that_open_or_test_the_emulated_device_include_it() -> None:
    """Other files use it through the runtime, as they use a GPU."""
    knows = {
        name_of(path)
        for path, includes in INCLUDES.items()
        if layer_of(path) != "runtime"
        and any(name.startswith("runtime/emulated/") for _, name in includes)
    }
    assert knows == {
        "python/device/emulated_stream.c",  # the gates of streams, which a replay uses
        "python/module/open.c",
        "python/module/testing.c",
    }


def test_includes_make_no_circle() -> None:
    graph = {
        name_of(path): [name for bracket, name in includes if bracket == '"']
        for path, includes in INCLUDES.items()
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


DEFINED = re.compile(r"^([a-z]\w+)\([^;{]*\)\s*\{", re.MULTILINE)
NAMED = re.compile(r"\b([a-z]\w+)\s*\(")
TYPED = re.compile(r"^\}\s*(\w+);|^typedef [^;{]*?\b(\w+);", re.MULTILINE)
CONSTANT = re.compile(r"^    (CM_\w+)(?: =[^,}]*)?,?$", re.MULTILINE)


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return each edge of a graph whose beginning can be reached from its end."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            todo += graph[new] - seen if (new := todo.pop()) not in seen else ()
            seen.add(new)
        return seen

    return [f"{a} -> {b}" for a in graph for b in graph[a] if a in reached(b)]


def test_no_two_files_call_each_other() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b -> c", "c -> b"]
    texts = {
        name_of(path): re.sub(r'"(?:\\.|[^"\\])*"', " ", code)
        for path, code in CODES.items()
        if path.suffix == ".c"
    }
    homes: dict[str, set[str]] = {}
    for name, text in texts.items():
        for function in DEFINED.findall(text):
            homes.setdefault(function, set()).add(name)
    home = {
        function: min(files) for function, files in homes.items() if len(files) == 1
    }
    check_none(
        circles(
            {
                name: {home[f] for f in NAMED.findall(text) if f in home} - {name}
                for name, text in texts.items()
            }
        )
    )


def test_types_and_constants_have_one_meaning() -> None:
    """No two files may define a type or a constant of the same name."""
    found: dict[str, set[str]] = {}
    for path, code in CODES.items():
        names = [a or b for a, b in TYPED.findall(code)] + CONSTANT.findall(code)
        for name in names:
            found.setdefault(name, set()).add(name_of(path))
    check_none(
        f"{name}: {', '.join(sorted(files))}"
        for name, files in found.items()
        if len(files) > 1
    )


#: Patterns of headers, each with a pattern of the only files that may include them.
SEAM_INCLUDES = {
    r"Python\.h": r"python/python\.h",
    r"numpy/.*": r"python/core/numpy_bridge\.c",
    r"(cuda|driver_types).*": r"runtime/cuda(_\w+)?\.[ch]",
    r".*dlpack/.*": r"(?!)",  # no file: cumem declares DLPack's structs itself
}


def test_seams_are_one_file() -> None:
    """Only the file of a seam may include or name what is beyond it, such as Python."""
    wrong = [
        f"{name_of(path)}: {name}"
        for path in SOURCES
        for _, name in INCLUDES[path]
        for included, where in SEAM_INCLUDES.items()
        if re.fullmatch(included, name) and not re.fullmatch(where, name_of(path))
    ]
    wrong += [
        f"{name_of(path)}: DLManagedTensor"
        for path in SOURCES
        if not name_of(path).startswith("python/protocols/dlpack")
        and "DLManagedTensor" in CODES[path]
    ]
    check_none(wrong)


def test_core_never_names_python() -> None:
    wrong = [
        f"{name_of(path)}: {name}"
        for path in SOURCES
        if layer_of(path) != "python"
        for name in re.findall(r"\bPy[A-Z_]\w*", CODES[path])
    ]
    check_none(wrong)


def test_spdx_line_comes_first() -> None:
    line = "/* SPDX-License-Identifier: Apache-2.0 */"
    check_none(name_of(p) for p in SOURCES if TEXTS[p].splitlines()[0] != line)


def test_headers_open_with_their_job() -> None:
    """The second line of a header begins the comment that says what it is for."""
    headers = [path for path in SOURCES if path.suffix == ".h"]
    check_none(
        name_of(path)
        for path in headers
        if not TEXTS[path].splitlines()[1].startswith("/* ")
    )


BANNED = ("sprintf", "strcpy", "strcat", "gets", "abort", "printf", "exit")


def test_banned_functions_are_not_called() -> None:
    call = re.compile(rf"(?<![\w.>])({'|'.join(BANNED)})\s*\(")
    check_none(
        f"{name_of(path)}: {name}"
        for path in SOURCES
        for name in call.findall(CODES[path])
    )


def test_no_format_has_a_length() -> None:
    """A format with ``#`` that is compiled with headers of 3.13 fails on 3.11 and 3.12.

    One wheel serves all of these versions, so no format has a ``#``, which stands for a
    length.
    """
    call = re.compile(r"Py_BuildValue|PyArg_Parse|PyObject_Call(?:Function|Method)")
    check_none(
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(TEXTS[path].splitlines(), 1)
        if call.search(line) and re.search(r'"[^"]*\w#[^"]*"', line)
    )


def mutable_globals(code: str) -> list[str]:
    """Return the lines that define a static variable which can change."""
    found = []
    for line in code.splitlines():
        if re.match(r"static\s", line) and line.rstrip().endswith((";", "{")):
            if "(" not in line or "=" in line:
                if not re.match(
                    r"static (const|_Thread_local|inline|_Atomic)|.*\bconst\b", line
                ):
                    found.append(line)
    return found


def test_core_has_no_mutable_globals() -> None:
    assert mutable_globals("static int count;\nstatic const int one = 1;") == [
        "static int count;"
    ]
    check_none(
        f"{name_of(path)}: {line}"
        for path in SOURCES
        if layer_of(path) != "python"
        and path.suffix == ".c"
        # The globals of these files belong to the process, as each file explains. They are
        # the recorder, what a fork must wipe or close, and the slots into which a
        # profiler's tool writes its functions.
        and name_of(path)
        not in (
            "base/nvtx.c",
            "base/recorder.c",
            "base/shared_memory.c",
            "runtime/runtime.c",
        )
        for line in mutable_globals(CODES[path])
    )


#: Calls that sleep, measure time, or wait for a number of seconds.
CLOCKS = {
    ".py": re.compile(
        r"\btime\.(sleep|time|monotonic|perf_counter|process_time)\w*\("
        r"|\bTimer\(|\.(wait|join)\((timeout=)?[\d.]+\)|asyncio\.sleep\((?!0\))"
    ),
    ".c": re.compile(r"\b(u|nano)?sleep\(|\bcm_now_ns\(|\bclock_gettime\("),
}
CLOCKS[".h"] = CLOCKS[".c"]
#: Tests that may use such calls, with the reason. A test that waits for another thread uses
#: tests/support/session.py or tests/c/wait.h.
CLOCKS_ALLOWED = {
    "support/session.py": "this is the one helper, whose deadlines only make a test fail",
    "c/wait.h": "this is the helper for C",
    "c/test_base.c": "the deadline of a condition variable never passes early",
    "c/test_faults.c": "a delay is never shorter than it was asked to be",
    "c/test_engine_handles.c": "a copy takes no longer than from its gate to its end",
    "c/test_workers.c": "nothing shows whether workers are complete or wait for more",
    "transfers/test_transfer.py": "it tests Transfer.wait(timeout=)",
}
#: The beginnings of the names of programs that run for a given time.
CLOCKS_BY_DESIGN = (
    "isolated/",
    "torture/",
    "mutants/",
    "c/stress_",
    "fuzz_",
)


def test_tests_neither_sleep_nor_measure_time() -> None:
    tests = ROOT / "tests"
    found: dict[str, list[str]] = {}
    for path in sorted(p for p in tests.rglob("*") if p.suffix in CLOCKS):
        name = path.relative_to(tests).as_posix()
        if name.startswith(CLOCKS_BY_DESIGN) or path.name == "test_layout.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if CLOCKS[path.suffix].search(line):
                found.setdefault(name, []).append(f"{name}:{number}: {line.strip()}")
    check_none(
        line for name in found if name not in CLOCKS_ALLOWED for line in found[name]
    )
    check_none(
        set(CLOCKS_ALLOWED) - set(found), "these files are allowed without need:"
    )


def test_every_fault_of_the_mutants_has_its_place(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "mutants"))
    faults = importlib.import_module("faults").FAULTS
    pattern_of = importlib.import_module("run").pattern_of
    assert len({fault.name for fault in faults}) == len(faults) >= 20
    lost = [
        f"{fault.name}: {count} times in {fault.file}"
        for fault in faults
        if (
            count := len(pattern_of(fault.old).findall((ROOT / fault.file).read_text()))
        )
        != 1
    ]
    check_none(lost, "change `old` of these faults in tests/mutants/faults.py:")


def test_drivers_of_the_makefile_have_each_set_of_operations() -> None:
    """An operation that came with a later driver needs a run with a driver that lacks it.

    The Makefile lists the older drivers. The suite itself runs with the newest one.
    """
    makefile = ROOT / "Makefile"
    if not makefile.is_file():
        pytest.skip("the Makefile is not beside the tests")
    found = re.search(r"^DRIVERS \?= (.*)$", makefile.read_text(), re.MULTILINE)
    assert found
    tried = f"{found[1]} {session.DRIVER}"
    drivers = [
        int(a) * 1000 + int(b) * 10 for a, b in re.findall(r"(\d+)\.(\d+)", tried)
    ]
    oldest = {driver for _, _, driver in session.testing.op_names()}
    sets = [{o for o in oldest if o <= driver} for driver in drivers]
    wanted = [{o for o in oldest if o <= driver} for driver in sorted(oldest)]
    assert sets == wanted


def test_operations_of_by_driver_are_those_that_not_all_drivers_have() -> None:
    """`make test-all` also runs such a test on a driver that lacks the operation."""
    named = {
        name
        for path in (ROOT / "tests").glob("*/test_*.py")
        for names in re.findall(r"mark\.by_driver\(([^)]*)\)", path.read_text())
        for name in re.findall(r'"(\w+)"', names)
    }
    ops = session.testing.op_names()
    newer = {name for name, _, driver in ops if driver > min(each[2] for each in ops)}
    assert named <= newer
    # A driver that lacks prefetch_batch_async lacks discard_batch_async too, so the mark
    # for the first operation covers both.
    assert newer - named <= {"discard_batch_async"}


def test_no_build_products_are_tracked() -> None:
    patterns = ("*.so", "*.o", "*.whl")
    check_none(path for p in patterns for path in ROOT.glob(f"csrc/**/{p}"))
