# SPDX-License-Identifier: Apache-2.0
"""print() and format() show values as NumPy does.

Random arrays are printed by NumPy and by cumem. Other tests print long, busy and closed
buffers, and buffers in a forked child.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.strategies import (
    KINDS,
    dtypes,
    kinds,
    random_array,
)

import cumem

BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("shape", [(2000,), (20, 20, 20), (3, 1000), (2000, 1, 2)])
def test_arrays_in_elements_are_printed_whole(runtime, shape) -> None:
    """NumPy would apply the threshold to these inner arrays as well."""
    array = np.zeros(shape, [("x", "i4", (8,))])
    array["x"] = np.arange(array.size * 8).reshape(*shape, 8)
    assert str(cumem.array(array)) == str(array)


@pytest.mark.parametrize("backend", BACKENDS)
def test_str_is_what_numpy_prints(backend: str) -> None:
    with session.opened(backend):

        @given(
            kinds,
            dtypes,
            st.lists(st.integers(0, 12), max_size=4).map(tuple),
            st.sampled_from([0, 10, 1000]),
            st.integers(1, 4),
        )
        def check(kind, dtype, shape, threshold, edge) -> None:
            array = random_array(shape, dtype, 5)
            buffer: Any = values.put(array, kind)
            with np.printoptions(threshold=threshold, edgeitems=edge):
                assert str(buffer) == str(array)
                assert format(buffer, "") == str(array)

        check()


@pytest.mark.parametrize("kind", KINDS)
def test_format_of_one_element_is_that_of_its_number(runtime, kind) -> None:
    buffer = cumem.array([1.23456, 2], kind=kind)
    assert f"{buffer[0]:.3f} {buffer[1]!s:>4}" == "1.235  2.0"
    with pytest.raises(TypeError, match="one element"):
        f"{buffer:.3f}"


def test_str_of_a_long_device_buffer_copies_what_it_shows(runtime, monkeypatch) -> None:
    array = np.random.default_rng(0).random((50, 40, 30))
    buffer = cumem.array(array)
    copied: list[int] = []

    def copy_many(pairs: list[Any]) -> None:
        copied.extend(pair[1].size for pair in pairs)
        make(pairs)

    make = cumem._core.copy_many
    monkeypatch.setattr(cumem._core, "copy_many", copy_many)
    assert str(buffer) == str(array)
    assert sum(copied) == 6**3


def test_str_waits_for_work_and_repr_does_not(emulated) -> None:
    stream = cumem.Stream()
    buffer = cumem.zeros(3, "i4")
    said: list[str] = []
    with session.gate(stream):
        buffer.fill(8, stream=stream)
        assert repr(buffer).startswith("cumem.DeviceBuffer(shape=(3,)")
        reader = threading.Thread(target=lambda: said.append(str(buffer)))
        reader.start()
        session.wait_until_waiting(reader)
    reader.join()
    assert said == ["[8 8 8]"]


@pytest.mark.parametrize("kind", KINDS)
def test_str_of_a_closed_buffer_is_its_repr(runtime, kind) -> None:
    buffer = cumem.empty(3, kind=kind)
    buffer.free()
    assert str(buffer) == repr(buffer)
    assert "closed" in str(buffer)


def test_str_during_a_capture_says_so(emulated) -> None:
    buffer = cumem.zeros(3)
    stream = cumem.Stream()
    session.testing.set_capturing(stream, True)
    with stream:
        text = str(buffer)
    session.testing.set_capturing(stream, False)
    assert str(buffer) == "[0. 0. 0.]"
    assert text.startswith(repr(buffer))
    assert "capture" in text


@pytest.mark.filterwarnings(
    "ignore:os.fork:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning"
)
@pytest.mark.parametrize("kind", KINDS)
def test_str_in_a_forked_child_shows_values_or_says_why(emulated, kind) -> None:
    buffer = cumem.array([1, 2, 3], "i4", kind)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, f"{buffer}\n{buffer!r}".encode())
        os._exit(0)
    os.close(write)
    said = b""
    while part := os.read(read, 4096):
        said += part
    os.close(read)
    assert os.waitpid(pid, 0)[1] == 0
    shown = said.decode().splitlines()[0]
    if kind in ("pinned", "mapped"):
        assert shown == "[1 2 3]"
    else:
        assert "values cannot be read" in shown
        assert "fork" in shown


def test_str_of_a_copy_that_fails_says_why(emulated) -> None:
    buffer = cumem.array([1, 2, 3])
    session.testing.plan_fault("copy_async", 1, 999)
    text = str(buffer)
    session.testing.plan_fault(None, 0)
    assert text.startswith(repr(buffer))
    assert "values cannot be read: " in text
    assert str(buffer) == "[1 2 3]"
