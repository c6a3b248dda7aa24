# SPDX-License-Identifier: Apache-2.0
"""Tests of which calls are C from end to end, so that no function of the package runs.

A list of calls is made under a profiler, which notes each Python function of the package.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest
from support.streams import FOREIGN

import cumem

pytestmark = [
    # No version of Python changes which functions the C core calls.
    pytest.mark.any_python,
]

PACKAGE = os.path.dirname(cumem.__file__) + os.sep


def functions_of_python(call: Callable[[], object]) -> list[str]:
    """Make a call twice, and return the package's functions that the second one runs."""
    call()
    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return called


def test_streams_and_events_run_no_function_of_the_package(emulated) -> None:
    stream, other = cumem.Stream(), cumem.Stream()
    start, end = cumem.Event().record(), cumem.Event(timing=True).record()
    device = cumem.Device(1)
    calls: list[Callable[[], object]] = [
        cumem.Event,
        lambda: cumem.Event(device=1, timing=False, blocking=True),
        lambda: cumem.Event(device=device, timing=np.True_, blocking=0),
        cumem.Stream,
        lambda: cumem.Stream(device=1, priority=-1, non_blocking=False),
        lambda: cumem.Stream(device=device, priority=np.int8(-1)),
        lambda: cumem.Stream.from_external(stream),
        lambda: cumem.Stream.from_external(stream.handle),
        lambda: cumem.Stream.from_external(stream.handle, device=0),
        end.query,
        end.wait,
        lambda: end.wait(stream),
        lambda: end.wait(stream=stream.handle),
        lambda: end.seconds_since(start),
        lambda: start.elapsed_time(end),
        lambda: stream.wait(other),
        lambda: stream.wait(end),
        lambda: stream.wait(other.handle),
    ]
    for number, call in enumerate(calls):
        assert functions_of_python(call) == [], f"calls[{number}] runs Python"


def test_new_buffers_with_values_run_no_function_of_the_package(emulated) -> None:
    buffer, array = cumem.zeros(8, "i4"), np.arange(8)
    with cumem.Pool("pinned") as pool:
        calls: list[Callable[[], object]] = [
            lambda: cumem.zeros(8),
            lambda: cumem.zeros((2, 4), "i2", "pinned", order="F"),
            lambda: cumem.zeros(np.int64(8), pool=pool),
            lambda: cumem.full(8, 1.5, "f4"),
            lambda: cumem.full(8, np.float32(1.5), kind="mapped", device=1),
            lambda: cumem.full((3, 8), array, "f8", casting="unsafe"),
            lambda: cumem.empty_like(buffer),
            lambda: cumem.empty_like(array, kind="pinned"),
            lambda: cumem.zeros_like(buffer, order="C"),
            lambda: cumem.full_like(array, 7),
            lambda: cumem.full_like(buffer, buffer),
        ]
        for number, call in enumerate(calls):
            assert functions_of_python(call) == [], f"calls[{number}] runs Python"


@pytest.mark.parametrize("seconds", [5, 5.0, np.float32(5), np.int64(5), True])
def test_timeout_of_any_number_runs_no_function_of_the_package(
    emulated, seconds
) -> None:
    done = cumem.copy_async(cumem.empty_pinned(8), np.zeros(8))
    done.wait()
    assert functions_of_python(lambda: done.wait(seconds)) == []
    assert functions_of_python(lambda: done.wait(timeout=None)) == []


@pytest.mark.parametrize("name", ["stream", "pool", "device"])
def test_blocks_run_no_function_of_the_package(emulated, name: str) -> None:
    with cumem.Pool("pinned") as pool, cumem.Pool("pinned") as other:
        one, inner = {
            "stream": (cumem.Stream(), cumem.Stream()),
            "pool": (pool, other),
            "device": (cumem.Device(0), cumem.Device(1)),
        }[name]

        def nested() -> None:
            with one, inner, one:
                pass

        def through_a_stack() -> None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(one)
                stack.enter_context(inner)

        def out_of_order() -> None:
            one.__enter__()
            inner.__enter__()
            one.__exit__(None, None, None)
            inner.__exit__(None, None, None)

        for call in (nested, through_a_stack, out_of_order):
            assert functions_of_python(call) == [], call.__name__


@pytest.mark.parametrize("wrap", FOREIGN, ids=lambda c: c.__name__)
def test_stream_of_another_library_runs_no_function_of_the_package(
    emulated, wrap
) -> None:
    own, stream = cumem.Stream(), cumem.Stream()
    foreign, event = wrap(own.handle), cumem.Event()
    pinned, device = cumem.empty_pinned(8), cumem.empty_device(8)
    calls: list[Callable[[], object]] = [
        lambda: stream.wait(foreign),
        lambda: event.record(foreign),
        lambda: event.wait(foreign),
        lambda: cumem.Stream.from_external(foreign),
        lambda: cumem.copy(device, pinned, stream=foreign),
        lambda: cumem.empty_device(8, stream=foreign),
    ]
    for number, call in enumerate(calls):
        assert functions_of_python(call) == [], f"calls[{number}] runs Python"
