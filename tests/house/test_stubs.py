# SPDX-License-Identifier: Apache-2.0
"""Tests that the stubs describe the extension, and that every public name has a docstring.

Type checkers and the build read `cumem/_core.pyi` and a few other stubs. The tests compare
them with the extension and with the modules beside them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import testing
from support.rules import check_none
from support.structure import ROOT

import cumem
from cumem import _core
from cumem.base.kinds import KINDS
from cumem.recording import events

# These tests read texts of the tree, which no version of Python changes.
pytestmark = pytest.mark.any_python

#: The public types that are made in C, and three of the package.
TYPES = [
    value
    for name in dir(_core)
    if isinstance(value := getattr(_core, name), type) and not name.startswith("_")
] + [cumem.Device, cumem.Pool, cumem.types.Registration]
#: The public functions that are made in C.
FUNCTIONS = [
    value
    for name in dir(_core)
    if inspect.isbuiltin(value := getattr(_core, name)) and not name.startswith("_")
]


def test_stubs_match_the_extension() -> None:
    pytest.importorskip("mypy")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy.stubtest",
            "cumem._core",
            "--ignore-disjoint-bases",
            "--mypy-config-file",
            "pyproject.toml",
            "--allowlist",
            "tests/stubtest-allow.txt",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_answers_with_names_have_the_members_of_the_stub() -> None:
    stub = ast.parse((ROOT / "cumem" / "_core.pyi").read_text(encoding="utf-8"))
    said = {
        node.name: {
            each.name: inspect.cleandoc(ast.get_docstring(each) or "")
            for each in node.body
            if isinstance(each, ast.FunctionDef)
        }
        for node in stub.body
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).startswith("structseq[") for base in node.bases)
    }
    assert "_DeviceFacts" in said
    types = {made.__name__: made for made in testing.answer_types()}
    assert types.keys() == said.keys()
    for name, members in said.items():
        made = types[name]
        assert made.__module__ == "cumem._core"
        assert made.n_fields == made.n_sequence_fields == len(members)
        found = {each: getattr(made, each).__doc__ for each in made.__match_args__}
        assert found == members
        assert "" not in members.values(), name


#: Modules that have overloads, in a stub or above the functions. stubtest does not follow
#: `Unpack`, so that nothing else notices a keyword which an overload leaves out.
WITH_OVERLOADS = (
    *("buffers.constructors", "files.npy", "files.raw", "files.safetensors"),
    *("pools.registering", "pools.memory", "pools.pool", "pools.workspace"),
    *("transfers.loading", "transfers.managed", "transfers.trees"),
)


def is_overload(node: ast.AST) -> bool:
    """Return whether a node is a function with the decorator `overload`."""
    return isinstance(node, ast.FunctionDef) and "overload" in map(
        ast.unparse, node.decorator_list
    )


def overloads_of(tree: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    """Return overloads, each with the name of its function, or of the class it makes."""
    found = [(node.name, node) for node in tree.body if is_overload(node)]
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found += [(cls.name, node) for node in cls.body if is_overload(node)]
    return found


def keywords_of(tree: ast.Module) -> dict[str, list[str]]:
    """Return the keys of each `TypedDict`, with those of its bases."""
    keys: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = [
                key for base in node.bases for key in keys.get(ast.unparse(base), ())
            ]
            own = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            keys[node.name] = [*bases, *map(ast.unparse, own)]
    return keys


@pytest.mark.parametrize("name", WITH_OVERLOADS)
def test_overloads_take_what_their_functions_take(name: str) -> None:
    """Every parameter of an overload must be one of its function, in the same order.

    Each parameter of the function must be in at least one overload.
    """
    module = importlib.import_module(f"cumem.{name}")
    assert module.__file__ is not None
    path = Path(module.__file__)
    stub = path.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else path).read_text(encoding="utf-8"))
    keywords, overloads = keywords_of(tree), overloads_of(tree)
    taken: dict[str, set[str]] = {function: set() for function, _ in overloads}
    wrong = []
    for function, node in overloads:
        found = [*inspect.signature(getattr(module, function)).parameters]
        places = [each.arg for each in node.args.posonlyargs + node.args.args]
        places = [each for each in places if each not in ("self", "cls")]
        own = [*places, *(each.arg for each in node.args.kwonlyargs)]
        own += [each.arg for each in (node.args.vararg, node.args.kwarg) if each]
        annotation = node.args.kwarg and node.args.kwarg.annotation
        if isinstance(annotation, ast.Subscript):  # Unpack[...]
            own = [*own[:-1], *keywords[ast.unparse(annotation.slice)]]
        where = f"{path.name}:{node.lineno}"
        wrong += [f"{where}: {each}" for each in own if each not in found]
        if places != found[: len(places)]:
            wrong.append(f"{where}: the order of {places}")
        taken[function].update(own)
    for function, names in taken.items():
        parameters = inspect.signature(getattr(module, function)).parameters
        wrong += [f"{function} lacks {n}" for n in parameters if n not in names]
    assert taken
    check_none(wrong)


def test_stub_of_a_module_has_all_of_its_public_functions() -> None:
    """Beside a stub, type checkers do not read the module itself."""
    package = Path(cumem.__file__).parent
    wrong = []
    for stub in package.rglob("*.pyi"):
        if not stub.with_suffix(".py").exists():
            continue  # this is the stub of the extension
        if stub.stem == "__init__":
            continue  # the face has no functions, and importing it here would load it twice
        name = ".".join(stub.relative_to(package).with_suffix("").parts)
        module = importlib.import_module(f"cumem.{name}")
        functions = {n for n, f in vars(module).items() if inspect.isfunction(f)}
        known = {
            n for n, _ in overloads_of(ast.parse(stub.read_text(encoding="utf-8")))
        }
        wrong += [f"{stub.name}: {n}" for n in functions & {*cumem.__all__} - known]
    check_none(wrong)


def test_kinds_in_the_stubs_are_those_of_the_extension() -> None:
    tree = ast.parse(Path("cumem/_core.pyi").read_text())
    (literal,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_Kind"
    )
    assert isinstance(literal, ast.Subscript)
    assert ast.literal_eval(literal.slice) == tuple(KINDS)


def test_kinds_in_records_are_those_of_the_recorder() -> None:
    text = (ROOT / "csrc" / "base" / "recorder.h").read_text()
    (listed,) = re.findall(r"enum \{\s+(CM_EVENT_PINNED,.*?)\};", text, re.DOTALL)
    names = re.findall(r"CM_EVENT_(\w+),", listed)
    assert tuple(name.lower() for name in names) == events.KINDS


def test_functions_have_a_signature_and_a_docstring() -> None:
    wrong = []
    for function in FUNCTIONS:
        try:
            inspect.signature(function)
        except ValueError:
            wrong.append(f"{function.__name__}: no signature")
        if len(function.__doc__ or "") <= 40:
            wrong.append(f"{function.__name__}: no docstring")
    assert len(FUNCTIONS) > 10
    check_none(wrong)


def test_types_and_their_members_have_docstrings() -> None:
    wrong = [cls.__name__ for cls in TYPES if not cls.__doc__]
    wrong += [
        f"{cls.__name__}.{name}"
        for cls in TYPES
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and member is not None  # the attributes of CudaError are None by default
        and not inspect.getdoc(member)
    ]
    assert len(TYPES) > 10
    check_none(wrong)


def test_docstrings_of_the_stub_are_those_of_the_extension() -> None:
    """The build copies each one, unless a table of the extension leaves it out."""
    stub = ast.parse(Path("cumem/_core.pyi").read_text())
    answers = {each.__name__: each for each in testing.answer_types()}
    wrong, seen = [], 0
    for node in stub.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        members = node.body if isinstance(node, ast.ClassDef) else []
        found = getattr(_core, node.name, answers.get(node.name))
        pairs = [(node, found)]
        pairs += [
            (each, inspect.getattr_static(found, each.name, None))
            for each in members
            if isinstance(each, ast.FunctionDef)
        ]
        for each, thing in pairs:
            text = ast.get_docstring(each)
            seen += text is not None
            if text is not None and text != inspect.cleandoc(thing.__doc__ or ""):
                wrong.append(f"{node.name}: {each.name}")
    assert seen > 110
    check_none(wrong)


def test_every_public_name_exists() -> None:
    for name in cumem.__all__:
        assert hasattr(cumem, name)
