# SPDX-License-Identifier: Apache-2.0
"""Tests of the types that type checkers see in programs which use cumem.

The texts below are such programs. `assert_type` says which type a result must have. This
type depends on the kind of memory, the framework and the arguments. mypy and pyright must
refuse exactly the lines that end in ``# wrong``. The later tests are about
tests/isolated/example_types.py, which checks the examples of the documents.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

import cumem
from cumem.base.kinds import KINDS

# These tests start separate programs, whose results no version of Python changes.
pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[2]

#: A program that makes buffers of all kinds.
CONSTRUCTORS = """
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import cumem

table = cumem.zeros((1024, 1024), "f4", "managed")
assert_type(table, cumem.ManagedBuffer)
table.numpy()[:] = 1
table.prefetch_pages(0)
flags = cumem.zeros(4, "i4", "mapped")
print(flags.device_ptr)

assert_type(cumem.zeros(4), cumem.DeviceBuffer)
assert_type(cumem.zeros(4, kind="mapped", device=0), cumem.MappedBuffer)
assert_type(cumem.empty(4), cumem.DeviceBuffer)
assert_type(cumem.empty(4, "f4", "pinned"), cumem.PinnedBuffer)
assert_type(cumem.empty(4, kind="managed"), cumem.ManagedBuffer)
assert_type(cumem.full(4, 1.0, kind="pinned"), cumem.PinnedBuffer)
assert_type(cumem.array([1], kind="pinned", casting="unsafe"), cumem.PinnedBuffer)
assert_type(cumem.array([1]), cumem.DeviceBuffer)
assert_type(cumem.asarray(np.zeros(3)), cumem.Buffer)
assert_type(cumem.asarray(np.zeros(3), kind="mapped", copy=True), cumem.MappedBuffer)
assert_type(cumem.asarray([1], kind="device", order="C"), cumem.DeviceBuffer)
assert_type(cumem.empty_like(np.zeros(3), kind="managed"), cumem.ManagedBuffer)
assert_type(cumem.zeros_like(table), cumem.Buffer)
assert_type(cumem.full_like(table, 1, kind="pinned"), cumem.PinnedBuffer)
with cumem.RowPlan([table], [np.zeros((2, 3))], src_rows=[1]) as plan:
    assert_type(plan, cumem.RowPlan)
    assert_type(plan.copy_layers(), list[cumem.Transfer])
    assert_type(plan.copy_async(layer=0), cumem.Transfer)
    plan.copy(stream=0, layer="0")  # wrong


def make(kind: cumem.types.Kind) -> cumem.Buffer:
    return cumem.zeros(3, kind=kind)


def like(buf: cumem.PinnedBuffer) -> cumem.PinnedBuffer:
    print(buf.device.index)
    return cumem.zeros(3, kind=buf.kind)


async def wait(event: cumem.Event, transfer: cumem.Transfer) -> None:
    transfer.add_done_callback(lambda each: print(each.nbytes))
    await event
    await transfer


array = np.from_dlpack(table)
assert_type(table[0], cumem.ManagedBuffer)
assert_type(table[:, 1:3].T.reshape(-1), cumem.ManagedBuffer)
assert_type(table.astype("i4").view("u1"), cumem.ManagedBuffer)
assert_type(np.asarray(table), NDArray[Any])
assert_type(table.dtype.itemsize * table.size, int)
for row in cumem.zeros((3, 3), kind="pinned"):
    assert_type(row, cumem.PinnedBuffer)


def either(buf: cumem.Buffer) -> NDArray[Any]:
    if isinstance(buf, cumem.DeviceBuffer):
        buf.numpy()  # wrong
        return buf.to_numpy()
    return buf.numpy()


def text(kind: str) -> None:
    cumem.zeros(4, kind=kind)  # wrong


cumem.zeros(4).numpy()  # wrong
cumem.zeros(4)[1:].numpy()  # wrong
cumem.emtpy(3)  # wrong
cumem.zeros(4, kind="host")  # wrong
cumem.zeros(4).device_ptr  # wrong
"""

#: A program that uses pools and workspaces.
POOLS = """
from typing import assert_type

import cumem

pool = cumem.Pool("pinned", limit="64MiB")
assert_type(pool, cumem.Pool[cumem.PinnedBuffer])
assert_type(pool.allocate(4), cumem.PinnedBuffer)
with pool as entered:
    assert_type(entered, cumem.Pool[cumem.PinnedBuffer])
assert_type(cumem.Pool(), cumem.Pool[cumem.DeviceBuffer])
assert_type(cumem.default_pool("managed"), cumem.Pool[cumem.ManagedBuffer])
assert_type(cumem.empty(4, pool=cumem.Pool("mapped")), cumem.MappedBuffer)
assert_type(cumem.zeros(4, pool=pool), cumem.PinnedBuffer)
assert_type(cumem.full(4, 1, pool=pool), cumem.PinnedBuffer)
assert_type(cumem.array([1], pool=pool), cumem.PinnedBuffer)
assert_type(cumem.Workspace("1MiB", "pinned").empty(4), cumem.PinnedBuffer)
assert_type(cumem.Workspace("1MiB").zeros(4), cumem.DeviceBuffer)
cumem.zeros(4, kind=pool.kind)


def allocate(any_pool: cumem.Pool, kind: cumem.types.Kind) -> None:
    assert_type(any_pool.allocate(4), cumem.Buffer)
    assert_type(cumem.Pool(kind).allocate(4), cumem.Buffer)
    assert_type(cumem.Workspace(4, kind).empty(4), cumem.Buffer)


allocate(pool, "device")
for each in cumem.stats().pools:
    assert_type(each.kind, cumem.types.Kind)
    cumem.default_pool(each.kind).trim()
assert_type(pool.snapshot().kind, cumem.types.Kind)
for living in cumem.live().buffers:
    assert_type(living.nbytes, int)
try:
    pool.allocate(1 << 50)
except cumem.OutOfMemoryError as error:
    assert_type(error.kind, cumem.types.Kind | None)
cumem.Pool("host")  # wrong
cumem.Pool("pinned", limits=3)  # wrong
"""

#: A program that reads and writes files, and registers arrays.
FILES = """
from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import cumem

path = "model.safetensors"
assert_type(cumem.load_safetensors(path)["x"], cumem.DeviceBuffer)
assert_type(cumem.load_safetensors(path, kind="pinned")["x"], cumem.PinnedBuffer)
assert_type(cumem.load_safetensors([path], kind="host")["x"], cumem.HostBuffer)
assert_type(cumem.load_safetensors(path, framework="torch")["x"], torch.Tensor)
assert_type(
    cumem.load_safetensors(path, kind="pinned", framework="numpy")["x"], NDArray[Any]
)
weights = cumem.load_safetensors(path, framework="torch", names=["x"])
assert_type(weights.copy()["x"], torch.Tensor)
model = torch.Module()
model.load_state_dict(weights)

assert_type(cumem.fromfile("x", "f4"), cumem.DeviceBuffer)
assert_type(cumem.fromfile("x", "f4", kind="pinned", shape=(2, -1)), cumem.PinnedBuffer)
assert_type(cumem.fromfile("x", pool=cumem.Pool("managed")), cumem.ManagedBuffer)
array: NDArray[np.float32] = np.ones(4, "f4")
assert_type(cumem.fromfile("x", out=array), NDArray[np.float32])
assert_type(cumem.load("x.npy", out=array), NDArray[np.float32])
assert_type(cumem.load("x.npy"), cumem.DeviceBuffer | Any)
assert_type(cumem.load("x.npy", kind="pinned").numpy(), NDArray[Any] | Any)
assert_type(cumem.load("x", pool=cumem.Pool("managed")), cumem.ManagedBuffer | Any)
with cumem.load("x.npz", kind="mapped") as members:
    assert_type(members["a"], cumem.MappedBuffer | Any)
locked: cumem.PinnedBuffer = cumem.load("x.npy", kind="pinned")
archive: cumem.types.NpzDict[cumem.PinnedBuffer] = cumem.load("x.npz", kind="pinned")
assert_type(archive.files, list[str])
assert_type(archive["a"], cumem.PinnedBuffer)
loaded = cumem.load("x")
if isinstance(loaded, cumem.types.NpzDict):
    print(loaded.files)
else:
    print(loaded.to_numpy())


def archived(path: str, kind: cumem.types.Kind) -> cumem.types.NpzDict[cumem.DeviceBuffer]:
    assert_type(cumem.load(path, kind=kind), cumem.Buffer | Any)
    return cumem.load(path)


some = cumem.load("x.npz", names=["a"], kind="pinned")
assert_type(some["a"], cumem.PinnedBuffer)
cumem.savez("y.npz", **some)
cumem.savez("y.npz", a=[1, 2], fsync=True)

assert_type(cumem.register(array), cumem.types.Registration[cumem.PinnedBuffer])
with cumem.register(array) as pinned:
    assert_type(pinned, cumem.PinnedBuffer)
with cumem.register(array, mapped=True) as mapped:
    assert_type(mapped, cumem.MappedBuffer)


def either(
    is_mapped: bool, kind: cumem.types.Kind, some: cumem.types.SafetensorsDict
) -> None:
    with cumem.register(array, mapped=is_mapped) as locked:
        assert_type(locked, cumem.PinnedBuffer | cumem.MappedBuffer)
    assert_type(cumem.fromfile("x", kind=kind), cumem.Buffer)
    assert_type(some["x"], Any)


either(True, "pinned", weights)
cumem.load("x.npy").numpy()  # wrong
cumem.load("x.npy", kind="pinned").nunpy()  # wrong
other: cumem.PinnedBuffer = cumem.load("x.npy", kind="mapped")  # wrong
cumem.load_safetensors(path, framework="pt")  # wrong
cumem.savez("y.npz", fsync="yes")  # wrong
"""

#: A program that loads batches and moves trees of arrays.
TREES = """
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar, assert_type

import numpy as np
import torch
from numpy.typing import NDArray

import cumem

F4 = NDArray[np.float32]


T = TypeVar("T")


@dataclass
class Batch:
    x: torch.Tensor


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Named(TypedDict):
    x: torch.Tensor


def arrays(
    alone: Iterable[F4],
    pairs: Iterable[tuple[F4, NDArray[np.int64]]],
    lists: Iterable[list[F4]],
    dicts: Iterable[dict[str, F4]],
) -> None:
    for one in cumem.prefetch(alone):
        assert_type(one, cumem.DeviceBuffer)
    for x, y in cumem.prefetch(pairs):
        assert_type(x, cumem.DeviceBuffer)
        assert_type(y, cumem.DeviceBuffer)
    for items in cumem.prefetch(lists):
        assert_type(items, list[cumem.DeviceBuffer])
    for by_name in cumem.prefetch(dicts):
        assert_type(by_name, dict[str, cumem.DeviceBuffer])
    for tensors in cumem.prefetch(dicts, framework="torch"):
        assert_type(tensors, dict[str, torch.Tensor])


def kept(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], batches: Iterable[Batch]
) -> None:
    for pair in cumem.prefetch(pairs, depth=3):
        assert_type(pair, tuple[torch.Tensor, torch.Tensor])
    for batch in cumem.prefetch(batches):
        assert_type(batch, Batch)


def named(pairs: Iterable[Pair], mappings: Iterable[Named]) -> None:
    for pair in cumem.prefetch(pairs):
        assert_type(pair, Pair)
    for mapping in cumem.prefetch(mappings):
        assert_type(mapping, Named)


class Loader(Generic[T]):
    def __iter__(self) -> Iterator[T]:
        raise NotImplementedError


def what_iteration_gives(
    loader: torch.DataLoader[tuple[torch.Tensor, int]],
    own: Loader[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    # PyTorch declares Any here, because a collate function decides. The default one makes
    # lists of tuples, and tensors of numbers.
    for batch in loader:
        assert_type(batch, Any)
    for x, y in cumem.prefetch(loader):
        assert_type(x, Any)
        assert_type(y, Any)
    for pair in cumem.prefetch(own):
        assert_type(pair, tuple[torch.Tensor, torch.Tensor])


def unknown(
    loader: torch.DataLoader[Any],
    dicts: Iterable[dict[str, Any]],
    mixed: Iterable[tuple[F4, str]],
    nested: Iterable[dict[str, tuple[F4, int]]],
) -> None:
    for batch in cumem.prefetch(loader):
        assert_type(batch, Any)
    for by_name in cumem.prefetch(dicts):
        assert_type(by_name, Any)
    for pair in cumem.prefetch(mixed):
        assert_type(pair, Any)
    for deep in cumem.prefetch(nested):
        assert_type(deep, Any)


def moved(array: F4, state: dict[str, torch.Tensor], unknown: dict[str, Any]) -> None:
    assert_type(cumem.to_device(array), cumem.DeviceBuffer)
    assert_type(cumem.to_device([array], 1), list[cumem.DeviceBuffer])
    there = cumem.to_device({"x": array})
    assert_type(there, dict[str, cumem.DeviceBuffer])
    assert_type(cumem.to_host(there), dict[str, NDArray[Any]])
    assert_type(cumem.to_host((there["x"], there["x"])), tuple[NDArray[Any], NDArray[Any]])
    assert_type(cumem.to_device(state), dict[str, torch.Tensor])
    assert_type(cumem.to_host(Batch(torch.Tensor())), Batch)
    assert_type(cumem.to_device(unknown), Any)
    model = {"weight": array, "bias": [array], "name": "first"}
    assert_type(cumem.to_device(model)["weight"], Any)


def cut(data: cumem.ManagedBuffer) -> None:
    for rows, tile in cumem.tiles(data, "1 MiB"):
        tile.fill(rows.start)
        assert_type(rows.start, int)
    for places, tile in cumem.tiles(data, (16, 16)):
        tile.fill(places[0].start)


with cumem.prefetch([np.ones(3)]).__iter__() as batches:
    assert_type(next(batches), cumem.DeviceBuffer)
for row in cumem.prefetch([np.ones(3)]):
    row.numpy_array()  # wrong
"""

#: A program that goes through data in pieces, and awaits.
PIPELINES = """
import asyncio
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import cumem
from cumem import DeviceBuffer, Stream

F4 = NDArray[np.float32]


def filling(x: DeviceBuffer, y: DeviceBuffer, stream: Stream) -> None:
    y[...] = x


def counting(x: DeviceBuffer, y: None, stream: Stream) -> float:
    return len(x)


def both(x: DeviceBuffer, y: DeviceBuffer | None, stream: Stream) -> int:
    return len(x)


def run(data: F4, out: cumem.PinnedBuffer, untyped: Any, maybe: F4 | None) -> None:
    assert_type(cumem.pipeline(filling, data, data), F4)
    assert_type(cumem.pipeline(filling, data, out, "1 MiB", streams=2), cumem.PinnedBuffer)
    assert_type(cumem.pipeline(counting, data, rows=4), list[float])
    assert_type(cumem.pipeline(lambda x, y, stream: len(x), data), list[int])
    assert_type(cumem.pipeline(both, data), list[int])
    assert_type(cumem.pipeline(both, data, out), cumem.PinnedBuffer)
    assert_type(cumem.pipeline(filling, data, untyped), Any)
    print(cumem.pipeline(both, data, maybe))
    cumem.pipeline(filling, data)  # wrong
    cumem.pipeline(counting, data, out)  # wrong
    cumem.pipeline(both, data, outs=out)  # wrong


def pieces(data: F4) -> None:
    for part, chunk in cumem.chunks(data, rows=4):
        assert_type(part.start + part.stop, int)
        assert_type(chunk, DeviceBuffer)
    with cumem.chunks("x.npy", "1 MiB") as iterator:
        assert_type(next(iterator)[1], DeviceBuffer)


async def ahead(data: F4, transfer: cumem.Transfer, event: cumem.Event) -> None:
    async for _, chunk in cumem.chunks(data):
        assert_type(chunk, DeviceBuffer)
    async for batch in cumem.prefetch([data]):
        assert_type(batch, DeviceBuffer)
    assert_type(await cumem.copy_async(cumem.empty(3), data), None)
    await asyncio.gather(transfer, event)


@cumem.tag("step")
def step(count: int) -> str:
    return str(count)


assert_type(step(3), str)
with cumem.record() as record, cumem.tag("load"):
    assert_type(record, cumem.Record)
with cumem.Device(0) as device, cumem.Stream() as stream:
    assert_type(device, cumem.Device)
    assert_type(stream, Stream)
assert_type(cumem.PinnedCollate(), cumem.PinnedCollate)
assert_type(cumem.memory_info("host"), cumem.types.HostMemory)
assert_type(cumem.memory_info().free, int)
"""

#: A stub that takes the place of PyTorch, which may be missing or takes a minute to check.
TORCH = """
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")

class Tensor: ...
class Module:
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
class DataLoader(Generic[T]):
    def __iter__(self) -> Iterator[Any]: ...
"""

#: How each type checker is run.
COMMANDS = {
    "mypy": ("mypy", "--strict", "--no-error-summary"),
    "pyright": ("pyright", "-p", "."),
}


@pytest.mark.parametrize("checker", COMMANDS)
def test_programs_of_users_have_the_types_that_they_expect(
    tmp_path: Path, checker: str
) -> None:
    """The checker must refuse the lines that end in ``# wrong``, and no others."""
    pytest.importorskip(checker)
    texts = {
        "constructors": CONSTRUCTORS,
        "pools": POOLS,
        "files": FILES,
        "trees": TREES,
        "pipelines": PIPELINES,
    }
    wrong = set()
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
        lines = enumerate(text.splitlines(), 1)
        wrong |= {(name, n) for n, line in lines if line.endswith("# wrong")}
    (tmp_path / "typings").mkdir()
    (tmp_path / "typings" / "torch.pyi").write_text(TORCH)
    # The types of a library that cannot be imported must not make others unknown.
    (tmp_path / "typings" / "jax.pyi").touch()
    # Errors within the package are not reported, as if it were installed.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-cumem.*]\nignore_errors = True\n")
    settings = {"include": ["*.py"], "extraPaths": [str(ROOT)]}
    settings |= {"typeCheckingMode": "strict", "reportUnusedVariable": False}
    settings |= {"reportUnusedExpression": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    files = [f"{name}.py" for name in texts] if checker == "mypy" else []
    cache = ("--cache-dir", os.devnull) if checker == "mypy" else ()
    done = subprocess.run(
        [sys.executable, "-m", *COMMANDS[checker], *cache, *files],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": f"{ROOT}:{tmp_path / 'typings'}"},
    )
    said = done.stdout + done.stderr
    error = re.compile(r"(\w+)\.py:(\d+)(?::\d+)?(?: -|:) error")
    found = {(each[1], int(each[2])) for each in error.finditer(said)}
    assert wrong == found, said


def test_type_of_every_public_symbol_is_known() -> None:
    """In a user's program a strict checker complains of each symbol of unknown type."""
    pytest.importorskip("pyright")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pyright", "--verifytypes", "cumem"),
            # Types of NumPy's own, some of which are unknown, do not count.
            *("--ignoreexternal", "--outputjson"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    said = json.loads(done.stdout)["typeCompleteness"]
    assert said["packageRootDirectory"] == str(ROOT / "cumem")
    unknown = {
        each["name"]: [reported["message"] for reported in each["diagnostics"]]
        for each in said["symbols"]
        if each["isExported"] and (not each["isTypeKnown"] or each["isTypeAmbiguous"])
    }
    assert not unknown
    assert said["completenessScore"] == 1


def test_public_kind_has_the_names_of_all_kinds() -> None:
    assert set(get_args(cumem.types.Kind)) == set(KINDS)


def test_generic_types_can_be_named_in_annotations_that_are_evaluated() -> None:
    for generic in (
        cumem.Pool,
        cumem.types.Registration,
        cumem.Workspace,
        cumem.types.NpzDict,
        cumem.types.SafetensorsDict,
    ):
        assert get_args(generic[cumem.PinnedBuffer]) == (cumem.PinnedBuffer,)


# -- the examples of the documents, which tests/isolated/example_types.py checks ---------

SCRIPT = ROOT / "tests" / "isolated" / "example_types.py"
#: A page with examples: one with names that are declared, and one that is not checked.
PAGE = """# A page

```python
import cumem

first = cumem.zeros(3, kind="pinned")
```

<!-- given loader: Iterable[dict[str, int]]; import numpy as np -->
```python
for batch in loader:
    np.ones(batch["n"])
first.numpy()
first.device_ptr
```

<!-- not type checked: it shows an error -->
<!-- runs -->
```python
first.nothing()
```

```
first.no_python()
```
"""


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import tests/isolated/example_types.py."""
    spec = importlib.util.spec_from_file_location("example_types", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_of_a_page_are_one_program_with_the_lines_of_the_page(
    examples: ModuleType,
) -> None:
    page = examples.of_page(PAGE)
    lines = page.program().splitlines()
    shown = PAGE.splitlines()
    assert lines[0] == examples.PREAMBLE
    assert lines[3] == shown[3] == "import cumem"
    assert lines[8] == "loader: Iterable[dict[str, int]] = _given; import numpy as np"
    assert lines[13] == shown[13] == "first.device_ptr"
    assert not any(lines[14:])
    assert page.opted_out == [(19, "it shows an error")]


def test_examples_that_opt_out_without_a_reason_are_checked(
    examples: ModuleType,
) -> None:
    page = examples.of_page(PAGE.replace(": it shows an error -->", " -->"))
    assert "first.nothing()" in page.program()
    assert not page.opted_out


def test_given_of_an_example_is_a_declaration_or_an_error(examples: ModuleType) -> None:
    with pytest.raises(ValueError, match="neither 'name: type' nor an import: loader"):
        examples.declared("loader")


def test_examples_of_docstrings_are_functions_where_they_stand(
    examples: ModuleType,
) -> None:
    text = (
        '"""Module.\n\nExamples\n--------\n>>> import json\n"""\n\n'
        'def f():\n    """F.\n\n    >>> for i in [1]:\n    ...     print(i)\n'
        '    1\n    """\n'
    )
    lines = examples.of_docstrings(text).program("").splitlines()
    assert lines[3:5] == ["def _0() -> None:", "    import json"]
    assert lines[9:12] == ["def _8() -> None:", "    for i in [1]:", "        print(i)"]


def test_cells_of_a_notebook_are_named_by_their_numbers(examples: ModuleType) -> None:
    text = (
        '{"cells": [{"cell_type": "markdown", "source": "x"}, {"cell_type": "code", '
        '"metadata": {}, "source": ["%load_ext cumem\\n", "y = 1"]}, {"cell_type": "code",'
        '"metadata": {"tags": ["a", "not type checked: it fails"]}, "source": ["y.z"]}]}'
    )
    program, places, opted_out = examples.of_notebook(text)
    assert program.splitlines()[1:] == ["...", "y = 1"]
    assert places == ["", "cell 2, line 1", "cell 2, line 2"]
    assert opted_out == ["cell 3: it fails"]


def test_libraries_of_examples_are_any_with_their_submodules(
    examples: ModuleType, tmp_path: Path
) -> None:
    program = "import a.b.c, os, numpy.linalg\nfrom d.e import f\nimport cumem.units"
    examples.write_stubs(tmp_path, examples.imported(program))
    found = {p.parent.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.pyi")}
    assert found == {"a", "a/b", "a/b/c", "d", "d/e"}


@pytest.mark.parametrize("checker", COMMANDS)
def test_wrong_example_is_named_with_its_line_of_the_page(
    tmp_path: Path, checker: str
) -> None:
    pytest.importorskip(checker)
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--only", checker, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1, done.stdout
    assert "page.md:14" in errors[0]
    assert "device_ptr" in errors[0]
    assert "page.md:19: it shows an error" in done.stdout
