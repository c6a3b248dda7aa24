# SPDX-License-Identifier: Apache-2.0
"""The stubs say what the extension has, and every public name explains itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from support.rules import check_none

import cumem
from cumem import _core
from cumem.kinds import KINDS

TYPES = [
    value
    for name in dir(_core)
    if isinstance(value := getattr(_core, name), type) and not name.startswith("_")
] + [cumem.Device, cumem.Pool, cumem.Registration]
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
            "--allowlist",
            "tests/stubtest-allow.txt",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


#: Stubs of modules in Python. stubtest does not know what `Unpack` stands for.
OVERLOADS = ("constructors",)


def keywords_of(stub: ast.Module) -> dict[str, set[str]]:
    """The keys of each `TypedDict` of a stub, those of its bases too."""
    keys: dict[str, set[str]] = {}
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            own = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            keys[node.name] = {each.id for each in own if isinstance(each, ast.Name)}
            keys[node.name] |= {key for base in bases for key in keys.get(base, ())}
    return keys


@pytest.mark.parametrize("name", OVERLOADS)
def test_overloads_of_a_stub_take_what_the_functions_take(name: str) -> None:
    module = importlib.import_module(f"cumem.{name}")
    assert module.__file__ is not None
    stub = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text())
    keywords = keywords_of(stub)
    overloads = [node for node in stub.body if isinstance(node, ast.FunctionDef)]
    taken: dict[str, set[str]] = {each.name: set() for each in overloads}
    wrong = []
    for each in overloads:
        found = inspect.signature(getattr(module, each.name)).parameters
        own = [argument.arg for argument in each.args.args + each.args.kwonlyargs]
        if each.args.kwarg is not None:
            assert isinstance(each.args.kwarg.annotation, ast.Subscript)
            own += keywords[ast.unparse(each.args.kwarg.annotation.slice)]
        wrong += [f"{name}.pyi:{each.lineno}: {n}" for n in own if n not in found]
        places = [argument.arg for argument in each.args.args]
        if places != list(found)[: len(places)]:
            wrong.append(f"{name}.pyi:{each.lineno}: the order of {places}")
        taken[each.name].update(own)
    functions = {n for n, f in vars(module).items() if inspect.isfunction(f)}
    public = functions & set(cumem.__all__)
    wrong += [f"{name}.pyi: {each} is not there" for each in public - set(taken)]
    wrong += [
        f"{name}.pyi: {each} lacks {lacking}"
        for each, names in taken.items()
        if (lacking := set(inspect.signature(getattr(module, each)).parameters) - names)
    ]
    assert len(taken) == 8
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
        and member is not None  # defaults of CudaError
        and not inspect.getdoc(member)
    ]
    assert len(TYPES) > 10
    check_none(wrong)


def test_docstrings_of_the_stub_are_those_of_the_extension() -> None:
    """The build puts them there: what a type or a table leaves out is seen here."""
    stub = ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text())
    wrong, seen = [], 0
    for node in stub.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        members = node.body if isinstance(node, ast.ClassDef) else []
        found = getattr(_core, node.name, None)
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
