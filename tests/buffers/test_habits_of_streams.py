# SPDX-License-Identifier: Apache-2.0
"""Names of devices, streams and events that users of other libraries type.

Each name must do what it does in PyTorch or CuPy, or the error must say what to type.
Most tests are about `with Device(...):`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
from contextvars import ContextVar
from typing import Any

import pytest
from support import session
from support.strategies import (
    KINDS,
)

import cumem


def test_with_device_is_current_in_the_block_alone() -> None:
    with session.opened("emulated", device_count=3):
        one, two = cumem.Device(1), cumem.Device(2)
        with one as entered:
            assert entered is one
            assert cumem.current_device() == 1
            assert cumem.empty_device(4).device == 1
            assert cumem.empty_pinned(4).device == 1
            assert cumem.empty(4, kind="device").device == 1
            assert cumem.zeros(4).device == 1
            assert cumem.current_stream().device == 1
            assert cumem.Stream().device == 1
            assert cumem.Event().device == 1
            assert cumem.default_pool("device").device == 1
            with two:
                assert cumem.array([1]).device == 2
                with one:
                    assert cumem.current_device() == 1
                assert cumem.current_device() == 2
            assert cumem.array([1]).device == 1
            assert cumem.empty_device(4, device=0).device == 0
            assert cumem.asarray([1]).device == 1
        assert cumem.current_device() == 0
        assert cumem.empty_device(4).device == 0


def test_with_device_places_memory_there(runtime) -> None:
    last = cumem.Device(cumem.device_count() - 1)
    with last:
        buffers = [cumem.zeros(4, kind=kind) for kind in KINDS]
        assert all(buffer.device == last for buffer in buffers)
        stream = cumem.Stream()
        assert stream.device == cumem.current_stream().device == last
        buffers[-1].fill(3, stream=stream)
        assert buffers[-1].tolist() == [3] * 4
    assert cumem.current_device() == 0


def test_what_is_current_is_seen_by_the_collector() -> None:
    """If the garbage collector did not see the context variables of the module, they would
    keep the current stream alive forever.
    """
    referents = gc.get_referents(cumem._core)
    names = {each.name for each in referents if isinstance(each, ContextVar)}
    assert names == {
        *("cumem.current_stream", "cumem.current_pool", "cumem.current_device"),
    }


def test_with_device_ends_with_an_exception_and_out_of_order() -> None:
    with session.opened("emulated", device_count=3):
        with pytest.raises(KeyError), cumem.Device(2):
            raise KeyError
        assert cumem.current_device() == 0

        def block(index: int) -> Any:
            with cumem.Device(index):
                yield

        outer, inner = block(1), block(2)
        next(outer)
        next(inner)
        outer.close()
        assert cumem.current_device() == 2
        inner.close()
        assert cumem.current_device() == 0
        with pytest.raises(RuntimeError, match="not entered"):
            cumem.Device(1).__exit__(None, None, None)


def test_with_device_works_in_an_exit_stack() -> None:
    with session.opened("emulated", device_count=3):
        with contextlib.ExitStack() as stack:
            for index in (1, 2):
                assert stack.enter_context(cumem.Device(index)) == index
                assert cumem.current_device() == index
        assert cumem.current_device() == 0
        assert isinstance(cumem.Device(1), contextlib.AbstractContextManager)


def test_with_device_is_of_its_thread_and_its_task() -> None:
    with session.opened("emulated", device_count=3):
        found: dict[str, Any] = {}
        with cumem.Device(1):
            thread = threading.Thread(
                target=lambda: found.update(thread=cumem.current_device().index)
            )
            thread.start()
            thread.join()

        async def task(index: int, other: asyncio.Barrier) -> int:
            with cumem.Device(index):
                await other.wait()
                return int(cumem.empty_device(1).device.index)  # type: ignore[union-attr]

        async def run() -> list[int]:
            barrier = asyncio.Barrier(3)
            return await asyncio.gather(*(task(index, barrier) for index in range(3)))

        assert asyncio.run(run()) == [0, 1, 2]
        assert found == {"thread": 0}


def test_set_current_device_in_a_block_holds_after_it() -> None:
    with session.opened("emulated", device_count=3):
        with cumem.Device(1):
            cumem.set_current_device(2)
            assert cumem.current_device() == 1
        assert cumem.current_device() == 2
        cumem.set_current_device(0)


def test_with_device_that_a_shutdown_took_away_is_passed_over() -> None:
    with session.opened("emulated", device_count=2), cumem.Device(1):
        cumem.shutdown()
        with session.opened("emulated", device_count=1):
            assert cumem.current_device() == 0
            assert cumem.empty_device(4).device == 0


def test_synchronize_waits_for_a_device(emulated) -> None:
    stream = cumem.Stream()
    done: list[bool] = []
    with session.gate(stream):
        cumem.zeros(3).fill(1, stream=stream)
        waiter = threading.Thread(
            target=lambda: done.append(cumem.synchronize() is None)
        )
        waiter.start()
        session.wait_until_waiting(waiter)
        assert not done
    waiter.join()
    assert done == [True]
    cumem.synchronize(0)
    cumem.synchronize("cuda:0")
    with pytest.raises(ValueError, match="does not exist"):
        cumem.synchronize(99)


def test_is_available_says_whether_there_is_a_gpu(runtime) -> None:
    assert cumem.is_available() is not runtime.emulated


@pytest.mark.parametrize("name", ["cuda", "nonsense"])
def test_is_available_never_raises_and_never_warns(name) -> None:
    code = (
        "import cumem; found = cumem.is_available(); print(found);"
        "assert found == (cumem.is_available())"
    )
    environment = {**os.environ, "CUMEM_BACKEND": name, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_names_that_two_peers_share_do_what_theirs_do(emulated) -> None:
    stream, other = cumem.Stream(), cumem.Stream()
    event, later = cumem.Event(), cumem.Event()
    with session.gate(stream):
        event.record(stream)
        assert event.query() is False
        other.wait_event(event)
        assert not other.done
        with other:
            event.wait()
        event.wait(other)
    other.synchronize()
    later.record(other)
    assert event.query() is True
    seconds = later.seconds_since(event)
    assert event.elapsed_time(later) == pytest.approx(1000 * seconds, rel=1e-12)
    with pytest.raises(TypeError, match="end"):
        event.elapsed_time(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        event.wait("nonsense")


@pytest.mark.parametrize(
    ("name", "call", "answer"),
    [
        ("units", "units.parse_nbytes('4 KiB')", "4096"),
        ("info", "info.collect.__module__", "cumem.tools.info"),
    ],
)
def test_modules_can_be_reached_without_an_import_of_their_own(
    name, call, answer
) -> None:
    code = f"import cumem; print(cumem.{call}, {name!r} in dir(cumem))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{answer} True\n"
