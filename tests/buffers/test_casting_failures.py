# SPDX-License-Identifier: Apache-2.0
"""Tests of what conversions that fail or are refused raise and leave behind.

Each call of the runtime fails once, refused pairs must write nothing, and rules that
cumem remembers from earlier calls must not be mixed up.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from support import values
from support.faults import sweep
from support.session import testing
from support.strategies import same_bytes

import cumem
from cumem.buffers.casting import STANDS_FOR

# A table in C has the rules of casting, so no version of Python changes them.
pytestmark = pytest.mark.any_python


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore NumPy's warnings about values that do not fit the target's dtype."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "invalid value|overflow", RuntimeWarning)
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        yield


# -- failures ---------------------------------------------------------------------------


def cast_both_ways() -> None:
    """Convert numbers on their way to a device and back, by several calls."""
    was = np.arange(60_000.0).reshape(200, 300)
    target = cumem.empty((200, 300), "f4")
    cumem.copy(target, was, casting="same_kind")
    cumem.copy(target[:, ::2], was[:, ::2].T.copy().T, casting="same_kind")
    back = np.zeros((200, 300))
    cumem.copy_async(back, target, casting="safe").wait()
    assert (back == was).all()
    pinned = cumem.empty((200, 300), "f2", "pinned")
    cumem.copy(pinned, target, casting="same_kind", stream=cumem.Stream())
    assert (pinned.numpy() == was.astype("f2")).all()
    assert (values.get(target.astype("f8")) == was).all()


def test_every_runtime_call_of_a_cast_may_fail(emulated) -> None:
    swept = sweep(cast_both_ways)
    assert {"copy_async", "event_record"} <= swept.failed
    assert "copy_async" in swept.raised


def assert_refused(error: type[Exception], match: str, *args, **named) -> None:
    """Check that the copy, its form in the background and explain() refuse alike."""
    with pytest.raises(error, match=match):
        cumem.copy(*args, **named)
    with pytest.raises(error, match=match):
        cumem.copy_async(*args, **named)
    with pytest.raises(error, match=match):
        cumem.explain(*args, **named)


def test_what_cannot_be_cast_is_refused_and_nothing_is_written(runtime) -> None:
    f8, f4, i4 = np.ones(3), np.zeros(3, "f4"), np.zeros(3, "i4")
    other = "copy: source has dtype float64, target has dtype"
    same_kind = f'{other} float32; convert first, or pass casting="same_kind"'
    assert_refused(TypeError, same_kind, f4, f8)
    assert_refused(TypeError, f'{other} int32; .*casting="unsafe"', i4, f8)
    assert_refused(
        TypeError,
        "casting='same_kind' does not allow dtype float64 to become dtype int32; "
        "casting='unsafe' does",
        i4,
        f8,
        casting="same_kind",
    )
    assert_refused(TypeError, "casting='no' does not", f4, f8, casting="no")
    assert_refused(ValueError, "casting must be one of 'no'", f4, f8, casting="any")
    assert_refused(TypeError, "casting must be one of", f4, f8, casting=1)
    assert_refused(TypeError, "need casting=", f4, f4 + 1, scale=2)
    assert_refused(TypeError, "need casting=", f4, f8, offset=2)
    for name in ("scale", "offset"):
        for bad in ("2", 1j, [1]):
            named = {"casting": "unsafe", name: bad}
            assert_refused(TypeError, f"{name} must be a real number", f4, f8, **named)
    for dtype in ("c8", "M8[s]", "S4", [("a", "f4")]):
        odd = np.zeros(3, dtype)
        match = "scale= and offset= are for .* not for dtype|does not allow"
        assert_refused(TypeError, match, f4, odd, casting="unsafe", scale=2)
    assert_refused(
        ValueError, "does not fit the target", f4, np.ones(4), casting="unsafe"
    )
    frozen = np.zeros(3, "f4")
    frozen.flags.writeable = False
    assert_refused(ValueError, "read-only", frozen, f8, casting="unsafe")
    far = cumem.zeros(3, "f4"), cumem.full(3, 1.0)
    assert_refused(TypeError, "'safe' does not allow", *far, casting="safe")
    assert not f4.any()
    assert not i4.any()
    assert not values.get(far[0]).any()
    with pytest.raises(TypeError, match='casting="same_kind"'):
        far[0][...] = f8
    with pytest.raises(TypeError, match="casting"):
        cumem.copy_many([(f4, f8)])
    with pytest.raises(TypeError, match=r"pair 1.*casting"):
        cumem.copy_many([(f4, f4 + 1), (i4, f8)], casting="same_kind")
    assert not f4.any()


def test_same_dtype_with_casting_is_a_plain_copy(runtime) -> None:
    for dtype in ("f8", "c16", "M8[s]", "S3", ">i4", [("a", "f4")]):
        was = np.frombuffer(bytes(range(1, 1 + 5 * np.dtype(dtype).itemsize)), dtype)
        target = cumem.zeros(5, dtype)
        cumem.copy(target, was, casting="no")
        assert same_bytes(values.get(target), was)
        assert "becomes" not in cumem.explain(target, was, casting="no").why


def test_capture_refuses_a_cast(emulated) -> None:
    stream = cumem.Stream()
    target, source = cumem.zeros(100, "f4"), cumem.zeros(100, "f8", "pinned")
    cumem.Device(0).synchronize()
    testing.set_capturing(stream, True)
    try:
        with pytest.raises(cumem.CudaError, match="captur"):
            cumem.copy_async(target, source, stream=stream, casting="same_kind")
    finally:
        testing.set_capturing(stream, False)


# -- a rule that is asked for again and again -------------------------------------------


def test_rule_that_was_asked_for_before_differs_from_others(runtime) -> None:
    f8 = np.ones(3)
    for target in (np.zeros(3, "f4"), cumem.zeros(3, "f4", "pinned")):
        for _ in range(3):
            cumem.copy(target, f8, casting="same_kind")
            cumem.copy(target, f8, casting="".join(["same", "_kind"]))
            cumem.copy(target, f8, casting="same_kind", scale=2)
            assert (values.get(target) == 2).all()
            assert_refused(TypeError, "'safe' does not", target, f8, casting="safe")
            assert_refused(TypeError, "convert first", target, f8)
            assert_refused(ValueError, "must be one of", target, f8, casting="any")


def test_dtypes_that_stand_for_others_differ_from_equal_ones(runtime) -> None:
    """NumPy takes these dtypes for equal, since it ignores metadata, although they mean
    different numbers.
    """
    ones = np.ones(3, "f4")
    numbers = np.zeros(3, "u2")
    stand_in = np.dtype("u2", metadata={STANDS_FOR: "bfloat16"})
    halves = np.zeros(3, "u2").view(stand_in)
    for _ in range(3):
        cumem.copy(numbers, ones, casting="unsafe")
        assert numbers.tolist() == [1] * 3
        cumem.copy(halves, ones, casting="unsafe")
        assert (halves.view("u2") == 0x3F80).all()


def test_dropped_imaginary_parts_are_warned_of_each_time(runtime) -> None:
    target = np.zeros(2)
    for _ in range(3):
        with pytest.warns(np.exceptions.ComplexWarning, match="imaginary") as caught:
            cumem.copy(target, np.array([1 + 2j, 3]), casting="unsafe")
        assert caught[0].filename == __file__
        target[:] = 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(np.exceptions.ComplexWarning):
                cumem.copy(target, np.array([1 + 2j, 3]), casting="unsafe")
        assert not target.any()
