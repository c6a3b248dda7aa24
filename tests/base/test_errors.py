# SPDX-License-Identifier: Apache-2.0
"""Tests that exceptions have the right attributes, texts and codes, and can be copied.

Errors are made by hand, by `errors.make` as the extension makes them, or by a call of the
driver that a test makes fail. The last tests compare the lists of codes with C headers.
"""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
from support import session

import cumem
from cumem.base import errors
from cumem.base.error_codes import CODES

# These tests fail if a wheel, or an older NumPy, lacks something that cumem needs.
pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]

#: Functions that copy an error, or pickle it and load it again.
COPIES = [
    copy.copy,
    copy.deepcopy,
    *(
        lambda error, p=protocol: pickle.loads(pickle.dumps(error, p))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ),
]


def reported(error: cumem.CudaError) -> tuple[object, ...]:
    return (type(error), error.args, error.call, error.code, error.name, error.arg)


@pytest.mark.parametrize("kind", [cumem.CudaError, cumem.OutOfMemoryError])
def test_error_made_by_hand_shows_only_what_it_was_given(kind) -> None:
    assert reported(kind("text")) == (kind, ("text",), None, None, None, None)
    error = kind("text", call="cudaMalloc", code=2, arg=64)
    assert reported(error) == (kind, ("text",), "cudaMalloc", 2, None, 64)
    assert kind().args == ()
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        kind("text", size=1)


@pytest.mark.parametrize("again", COPIES)
def test_error_survives_copying(emulated, again) -> None:
    session.testing.plan_fault("physical_create", 1, 2, True)
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty_device(1 << 20)
    session.testing.plan_fault(None, 0)
    error = caught.value
    assert error.call == "cuMemCreate"
    twin = again(error)
    assert reported(twin) == reported(error)
    assert vars(twin) == vars(error)
    assert isinstance(twin, MemoryError)


def test_subclass_of_an_error_is_one() -> None:
    class Mine(cumem.CudaError):
        pass

    assert reported(Mine("text", code=1)) == (Mine, ("text",), None, 1, None, None)


@pytest.mark.parametrize(
    ("kind", "arg", "text"),
    [
        ("NOTHING", 7, ""),
        ("NBYTES", 1 << 63, "9223372036854775808 bytes"),
        ("ELEMENTS", 3, "3 elements"),
        ("PRIORITY", (1 << 64) - 5, "priority -5"),
        ("DEVICE", 0xFFFFFFFF, "device -1"),
        ("STREAM", 0x7F10, "stream 0x7f10"),
    ],
)
def test_argument_in_an_error_is_named_by_its_kind(kind, arg, text) -> None:
    error = errors.make("cudaCall", kind, arg, 1, 12000, None)
    assert (
        str(error) == f"cudaCall({text}): cudaErrorInvalidValue (1): invalid argument"
    )
    assert error.arg == arg


def test_code_that_is_not_known_says_so() -> None:
    error = errors.make("cudaCall", "NOTHING", 0, 123456, 12000, None)
    assert str(error) == "cudaCall(): cudaErrorUnknown (123456): unknown error"
    assert error.name == "cudaErrorUnknown"
    assert str(errors.make(None, None, 0, -1000, 0, None)) == "cumem: unknown error"


def test_codes_of_cumem_are_those_of_the_core() -> None:
    text = (ROOT / "csrc/base/status.h").read_text()
    found = {int(code): name for name, code in re.findall(r"(CM_E\w+) = (-\d+)", text)}
    assert found == {code: name for code, (name, _) in CODES.items() if code < 0}


def test_codes_of_cuda_are_those_of_its_headers() -> None:
    folders = [ROOT / "build/cuda12/nvidia/cuda_runtime", Path("/usr/local/cuda")]
    headers = [folder / "include/driver_types.h" for folder in folders]
    text = next((h.read_text() for h in headers if h.is_file()), "")
    found = dict(re.findall(r"^\s+(cudaError\w+)\s+=\s+(\d+)", text, re.M))
    if not found:
        pytest.skip("there are no headers of CUDA: `make check-cuda` fetches them")
    assert {name: int(found[name]) for name in found if int(found[name]) in CODES} == {
        name: code for code, (name, _) in CODES.items() if code > 0
    }
