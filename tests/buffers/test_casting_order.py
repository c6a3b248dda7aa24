# SPDX-License-Identifier: Apache-2.0
"""The order of copies that convert numbers and of other work.

A stream whose gate is shut starts no work. So a test can see whether a copy comes after
the stream's work, and whether the call waits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from support import session, values
from support.session import testing

import cumem

# A table in C has the rules of casting, so no version of Python changes them.
pytestmark = pytest.mark.any_python


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore NumPy's warnings about values that do not fit the target's dtype."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "invalid value|overflow", RuntimeWarning)
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        yield


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_cast_to_the_device_comes_after_what_the_stream_writes(emulated, kind) -> None:
    stream = cumem.Stream()
    source = cumem.full(5000, 1.0, "f8", kind)
    other = cumem.full(5000, 3.0)
    target = cumem.zeros(5000, "f4")
    cumem.Device(0).synchronize()
    with session.when_waiting(lambda: testing.gate_open(stream)):
        session.shut(stream)
        cumem.copy_async(source, other, stream=stream)
        cumem.copy_async(target, source, stream=stream, casting="same_kind")
    stream.synchronize()
    assert (values.get(target) == 3).all()


def test_ordinary_source_may_change_once_the_call_is_back(emulated) -> None:
    stream = cumem.Stream()
    target, source = cumem.zeros(5000, "f4"), np.arange(5000.0)
    cumem.Device(0).synchronize()
    with session.gate(stream):
        transfer = cumem.copy_async(target, source, stream=stream, casting="same_kind")
        source[:] = 0
        assert not transfer.done
    stream.synchronize()
    assert (values.get(target) == np.arange(5000)).all()


@pytest.mark.parametrize("dst", ["numpy", "pinned", "mapped"])
@pytest.mark.parametrize("src", ["numpy", "pinned", "device"])
def test_stream_that_is_done_means_that_the_values_are_there(
    emulated, dst, src
) -> None:
    stream = cumem.Stream()
    source = values.put(np.arange(5000.0), src)
    target = values.put(np.zeros(5000, "f4"), dst)
    cumem.Device(0).synchronize()
    with session.when_waiting(lambda: testing.gate_open(stream)):
        session.shut(stream)
        cumem.copy_async(target, source, stream=stream, casting="same_kind")
    stream.synchronize()
    seen = target if dst == "numpy" else target.numpy()
    assert (seen == np.arange(5000)).all()


def test_cast_comes_after_streams_and_does_not_wait(emulated) -> None:
    stream = cumem.Stream()
    source = cumem.full(5000, 2.0, "f8", "pinned")
    other = cumem.full(5000, 3.0, "f8")
    target = np.zeros(5000, "f4")
    cumem.Device(0).synchronize()
    with session.gate(stream):
        cumem.copy_async(source, other, stream=stream)
        transfer = cumem.copy_async(target, source, after=stream, casting="same_kind")
        assert not transfer.done
        assert not target.any()
    transfer.wait()
    assert (target == 3).all()


@pytest.mark.parametrize("kind", ["numpy", "device"])
def test_cast_that_is_cancelled_leaves_its_target(emulated, kind) -> None:
    stream = cumem.Stream()
    source = cumem.full(5000, 2.0, "f8", "pinned")
    other = cumem.full(5000, 3.0, "f8")
    target = values.put(np.ones(5000, "f4"), kind)
    cumem.Device(0).synchronize()
    with session.gate(stream):
        cumem.copy_async(source, other, stream=stream)
        transfer = cumem.copy_async(target, source, casting="same_kind")
        assert transfer.cancel()
    with pytest.raises(cumem.CancelledError):
        transfer.wait()
    assert (values.get(target) == 1).all()


def test_cast_that_waits_hears_of_a_signal(emulated) -> None:
    stream = cumem.Stream()
    source, other = cumem.full(5000, 2.0, "f8", "pinned"), cumem.full(5000, 3.0)
    target = np.zeros(5000, "f4")
    cumem.Device(0).synchronize()
    with session.alarm(stream):
        cumem.copy_async(source, other, stream=stream)
        cumem.copy(target, source, casting="same_kind")
    stream.synchronize()
    assert not target.any()


def test_progress_is_reported_to_the_end(runtime) -> None:
    seen: list[tuple[int, int]] = []
    target = cumem.zeros(1_000_000, "f4")
    cumem.copy(
        target,
        np.ones(1_000_000),
        casting="same_kind",
        progress=lambda *args: seen.append(args),
    )
    # These are the bytes that cross the link.
    assert seen[-1] == (4_000_000, 4_000_000)
