# SPDX-License-Identifier: Apache-2.0
"""Tests that the list of dtypes in `csrc/base/dtypes.h` is the only one, and is right.

DLPack, safetensors, the copy threads and the kernels take all facts about a dtype from its
row in that list. Python sees the rows in `_core._DTYPES`. Most tests compare a row with
what one of those parts does. The last ones search the sources for dtypes that are named
elsewhere.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import exporters
from support.calls import PACKAGE, functions_of_the_package
from support.rules import check_none

import cumem
from cumem import _core
from cumem.files.safetensors import format as form

# The rows are compiled into the extension, so that every version of Python reads the same.
pytestmark = pytest.mark.any_python

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "csrc" / "base" / "dtypes.h"
ROWS = list(_core._DTYPES.values())
by_name = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
reads_sources = pytest.mark.skipif(
    not LIST.is_file(), reason="the C sources are not beside the tests"
)


def dtype_of(row: _core._Dtype) -> np.dtype:
    return np.dtype(row.name if row.kind else getattr(ml_dtypes, row.name))


def is_packed(row: _core._Dtype) -> bool:
    return row.bits % 8 != 0


# -- each consumer has each row --------------------------------------------------------


@by_name
def test_row_says_the_kind_and_the_size_that_numpy_has(row) -> None:
    if not hasattr(ml_dtypes, row.name) and not row.kind:
        pytest.skip("this ml_dtypes does not have the type yet")
    dtype = dtype_of(row)
    assert dtype.name == row.name
    assert is_packed(row) or dtype.itemsize * 8 == row.bits
    assert (dtype.isbuiltin == 1) == (row.kind != "")
    assert not row.kind or dtype.kind == row.kind


@by_name
def test_row_is_found_under_its_name(row) -> None:
    assert _core._DTYPES[row.name] is row


def test_rows_that_numpy_has_are_all_of_its_numbers_of_common_size() -> None:
    """Long doubles are left out, because their size depends on the machine."""
    letters = np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"
    names = {np.dtype(letter).name for letter in letters}
    names -= {np.dtype(letter).name for letter in "gG"}
    assert {row.name for row in ROWS if row.kind} == names


@by_name
def test_dlpack_gives_the_rows_code_and_takes_it(runtime, row) -> None:
    dtype = dtype_of(row)
    buffer = cumem.zeros(3, dtype, "pinned")
    if row.dlpack_code is None:
        with pytest.raises(BufferError, match="it has no code for this type"):
            buffer.__dlpack__()
        return
    capsule = buffer.__dlpack__(max_version=(1, 3))
    at = exporters.pointer_of(capsule, b"dltensor_versioned")
    said = exporters.Versioned.from_address(at).tensor.dtype
    assert (said.code, said.bits, said.lanes) == (row.dlpack_code, row.bits, 1)
    assert cumem.asbuffer(capsule).dtype == dtype


@pytest.mark.parametrize("row", [r for r in ROWS if r.bits > 8], ids=lambda r: r.name)
def test_dlpack_refuses_rows_in_the_other_byte_order(runtime, row) -> None:
    """DLPack has no codes for such types, so consumers would misread the bytes."""
    buffer = cumem.zeros(3, dtype_of(row).newbyteorder(), "pinned")
    with pytest.raises(BufferError, match="not in this machine's order"):
        buffer.__dlpack__()


@by_name
def test_dlpack_passes_no_python_of_the_package_for_rows_with_a_code(
    runtime, row
) -> None:
    if row.dlpack_code is None:
        pytest.skip("DLPack has no code for it, so the package words the refusal")
    buffer = cumem.zeros(3, dtype_of(row), "pinned")
    made: list[object] = []

    def go_round() -> None:
        made.append(cumem.asbuffer(buffer.__dlpack__(max_version=(1, 3))))

    assert functions_of_the_package(go_round) == []
    assert made[0].dtype == buffer.dtype  # type: ignore[attr-defined]


def test_dlpack_codes_differ_from_row_to_row() -> None:
    codes = [(r.dlpack_code, r.bits) for r in ROWS if r.dlpack_code is not None]
    assert len(set(codes)) == len(codes)


@by_name
def test_files_keep_the_elements_of_rows_that_they_have(runtime, tmp_path, row) -> None:
    if row.file_name is None:
        assert form.type_of(dtype_of(row)) is None
        return
    element = form.TYPES[row.file_name]
    assert (element.bits, element.torch) == (row.bits, row.torch_name)
    if is_packed(row):
        assert form.dtype_of(row.file_name) == np.uint8
        return
    assert form.type_of(dtype_of(row)) is element
    assert form.dtype_of(row.file_name) == dtype_of(row)
    data = np.arange(6, dtype="u1").repeat(row.bits // 8).view(dtype_of(row))
    path = cumem.save_safetensors(tmp_path / "a", {"w": data})
    assert cumem.read_safetensors_header(path).tensors["w"].dtype == row.file_name
    assert cumem.load_safetensors(path)["w"].to_numpy().tobytes() == data.tobytes()


def test_files_have_no_other_types_and_one_order() -> None:
    named = [row for row in ROWS if row.file_name is not None]
    assert {row.file_name for row in named} == set(form.TYPES)
    assert sorted(row.file_rank for row in named) == list(range(len(named)))


@by_name
def test_torch_has_the_type_under_the_rows_name(row) -> None:
    torch = pytest.importorskip("torch")
    if row.torch_name is None or not hasattr(torch, row.torch_name):
        pytest.skip("this PyTorch does not have the type")
    nbytes = 1 if is_packed(row) else row.bits // 8
    assert getattr(torch, row.torch_name).itemsize == nbytes


@by_name
def test_copy_threads_convert_the_rows_that_say_so(runtime, row) -> None:
    source, target = np.zeros(2, dtype_of(row)), np.zeros(2, "c16")
    if row.name == "complex128":
        target = np.zeros(2, "c8")
    facts = _core._explain(target, source, None, True, "unsafe", None, None)
    assert (facts.from_dtype == row.name) == row.converts
    assert facts.casts == (not row.converts)


@by_name
def test_scale_is_taken_for_the_rows_that_say_so(runtime, row) -> None:
    source, target = np.ones(2, dtype_of(row)), np.zeros(2, "f4")
    if row.scales:
        cumem.copy(target, source, casting="unsafe", scale=3)
        assert (target == 3).all()
        return
    with pytest.raises(TypeError, match=rf"not for dtype {row.name}$"):
        cumem.copy(target, source, casting="unsafe", scale=3)


def test_scale_error_names_the_rows_in_the_order_of_the_list(runtime) -> None:
    names = ", ".join(row.name for row in ROWS if row.scales)
    with pytest.raises(TypeError, match=f"are for {names}, not for dtype"):
        cumem.copy(np.zeros(2, "c8"), np.zeros(2, "c8"), casting="unsafe", scale=3)


# -- the kernel ------------------------------------------------------------------------


def converted_on_device() -> set[str]:
    """Return the dtypes whose rows say that a device converts them to float32."""
    row = re.compile(r"^ +X\(to, (\w+), .* DEVICE, ", re.MULTILINE)
    return set(row.findall(LIST.read_text()))


@reads_sources
def test_kernel_names_each_dtype_that_it_reads_and_no_other() -> None:
    text = (ROOT / "csrc/transfer/device/strided.ptx").read_text()
    named = set(re.findall(r"\bCM_(\w+)", text)) - {"NUMBER_NONE"}
    assert named == converted_on_device()
    assert not re.search(r"%from, *\d", text), (
        "the kernel must name dtypes and not use their numbers"
    )


@reads_sources
def test_headers_put_the_numbers_of_the_list_into_kernels() -> None:
    headers = runpy.run_path(str(ROOT / "csrc" / "headers.py"))
    numbers = headers["dtypes"](LIST.read_text())
    ids = [f"CM_{row.name.upper()}" for row in ROWS]
    assert numbers == dict(zip(["CM_NUMBER_NONE", *ids], range(100), strict=False))
    line = "    setp.eq.u32 %p, %from, CM_BFLOAT16;  // CM_OF_NOTHING\n"
    at = numbers["CM_BFLOAT16"]
    assert headers["kernel"](line, numbers) == f"    setp.eq.u32 %p, %from, {at};\n"
    with pytest.raises(KeyError, match="CM_FLOAT15"):
        headers["kernel"]("    setp.eq.u32 %p, %from, CM_FLOAT15;\n", numbers)


@pytest.mark.parametrize("name", [row.name for row in ROWS if row.scales])
def test_device_converts_to_the_bits_that_copy_threads_make(runtime, name) -> None:
    """Device and host must agree for all values of a short dtype, or 65,536 of a long one.

    The emulated device runs the kernel as C. There are 2**19 elements because the device
    converts only copies of 1 MiB or more.
    """
    dtype = dtype_of(_core._DTYPES[name])
    ends = range(1 << 8 * dtype.itemsize if dtype.itemsize < 4 else 1 << 16)
    values = np.array(ends, f"u{dtype.itemsize}").view(dtype)
    values = np.resize(values, 1 << 19)
    on_host = np.empty(values.shape, "f4")
    cumem.copy(on_host, values, casting="unsafe")
    there = cumem.empty_device(values.shape, "f4")
    cumem.copy(there, values, casting="unsafe")
    assert there.to_numpy().tobytes() == on_host.tobytes()


# -- there is no second list -----------------------------------------------------------


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each string of a module that is not a docstring, with its line."""
    tree = ast.parse(path.read_text())
    said = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in said:
                yield node.lineno, node.value


def test_package_names_no_dtype_of_another_package_or_of_files() -> None:
    """So a new dtype needs a row in the list, and no change of the package."""
    names = {row.name for row in ROWS if not row.kind}
    names |= {row.file_name for row in ROWS if row.file_name}
    # hints.py has this name because it tells people who write "bf16" to write "bfloat16".
    known = {("hints", "bfloat16")}
    check_none(
        (
            f"{path.relative_to(PACKAGE)}:{line}: {text!r}: ask _core._DTYPES"
            for path in PACKAGE.rglob("*.py")
            for line, text in texts_of(path)
            if text in names and (path.stem, text) not in known
        ),
    )


@reads_sources
def test_core_names_dtypes_of_another_package_in_the_list_and_its_converter() -> None:
    """Other code that depends on such a dtype reads its row."""
    names = [row.name for row in ROWS if not row.kind]
    ids, texts = "|".join(names).upper(), "|".join(names)
    named = re.compile(rf'\bCM_(?:{ids})\b|"(?:{texts})"')
    check_none(
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in (ROOT / "csrc").rglob("*.[ch]")
        if path.name not in ("dtypes.h", "convert.c")
        for found in named.finditer(path.read_text())
    )
