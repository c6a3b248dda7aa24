# SPDX-License-Identifier: Apache-2.0
"""How arguments are read: every refusal names the argument and what was expected."""

from __future__ import annotations

import numpy as np
import pytest

import cumem


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Unkind:
    def __index__(self) -> int:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (3, (3,)),
        ((), ()),
        ([], ()),
        ((2, 3), (2, 3)),
        ([2, 3], (2, 3)),
        (range(3), (0, 1, 2)),
        (np.int16(4), (4,)),
        (np.array([2, 3]), (2, 3)),
        (np.array(5), (5,)),
        (Index(3), (3,)),
        ((Index(2), np.uint8(3)), (2, 3)),
        (0, (0,)),
    ],
)
def test_shape_is_read_as_numpy_reads_it(runtime, shape, expected) -> None:
    assert np.empty(shape).shape == expected
    assert cumem.empty_pinned(shape).shape == expected


@pytest.mark.parametrize(
    ("shape", "error", "match"),
    [
        (-1, ValueError, "shape must not hold negative lengths, got -1"),
        ((2, -3), ValueError, "shape must not hold negative lengths, got -3"),
        (1.0, TypeError, "shape must be an int or a sequence of ints, not float"),
        ((2, 1.0), TypeError, "shape must be an int or a sequence of ints, not float"),
        ("3", TypeError, "shape must be .* not str"),
        (b"3", TypeError, "shape must be .* not bytes"),
        (bytearray(b"3"), TypeError, "shape must be .* not bytearray"),
        (None, TypeError, "shape must be .* not NoneType"),
        ({2, 3}, TypeError, "shape must be .* not set"),
        ((2, (3,)), TypeError, "shape must be .* not tuple"),
        (2**63, ValueError, "shape: 9223372036854775808 does not fit"),
        ((2**62, 2), ValueError, "shape is too large"),
        ((0, 2**62, 2**62), ValueError, "shape is too large"),
        ((1,) * 65, ValueError, "shape has 65 dimensions: at most 64"),
        (True, TypeError, "shape must be .* not bool"),
        (Unkind(), ZeroDivisionError, None),
    ],
)
def test_wrong_shape_is_refused(runtime, shape, error, match) -> None:
    with pytest.raises(error, match=match):
        cumem.empty_pinned(shape)


@pytest.mark.parametrize(
    ("arguments", "keywords", "match"),
    [
        ((), {}, r"empty\(\) missing required argument 'shape' \(position 1\)"),
        ((1, "f4", "pinned", 4), {}, r"empty\(\) takes at most 3 positional arguments"),
        ((1,), {"shape": 1}, r"empty\(\) got multiple values for argument 'shape'"),
        ((1,), {"shap": 1}, r"empty\(\) got an unexpected keyword argument 'shap'"),
        ((1,), {"é": 1}, r"empty\(\) got an unexpected keyword argument 'é'"),
    ],
)
def test_wrong_calls_are_refused_as_python_does(
    runtime, arguments, keywords, match
) -> None:
    with pytest.raises(TypeError, match=match):
        cumem.empty(*arguments, **keywords)


def test_keywords_may_come_in_any_order(runtime) -> None:
    buffer = cumem.empty(order="F", dtype="i2", shape=(2, 3), kind="pinned")
    assert buffer.shape == (2, 3)
    assert buffer.strides == (2, 4)


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"kind": "pined"}, ValueError, "kind must be \"pinned\", .* not 'pined'"),
        ({"kind": "pageable"}, ValueError, "kind must be"),
        ({"kind": 1}, TypeError, "kind must be .* not int"),
        ({"order": "A"}, ValueError, 'order must be "C" or "F", not \'A\''),
        ({"order": "c"}, ValueError, "order"),
        ({"order": 1}, TypeError, "order must be .* not int"),
        ({"device": 64}, ValueError, "device 64 does not exist: there"),
        ({"device": "gpu"}, TypeError, "device must be an int, a Device or None"),
        ({"device": 0.5}, TypeError, "not float"),
    ],
)
def test_wrong_options_name_what_was_expected(runtime, keywords, error, match) -> None:
    with pytest.raises(error, match=match):
        cumem.empty(3, **keywords)


def test_order_none_is_c(runtime) -> None:
    assert cumem.empty((2, 3), "i2", "pinned", order=None).strides == (6, 2)


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_flags_are_bools(runtime, value) -> None:
    buffer = cumem.empty_pinned(3, portable=value)
    assert ("portable" in buffer.flags) == bool(value)


@pytest.mark.parametrize("value", [0, 1, None, "yes", [], 1.0])
def test_flags_that_are_no_bools_are_refused(runtime, value) -> None:
    with pytest.raises(TypeError, match="portable must be True or False"):
        cumem.empty_pinned(3, portable=value)


def test_device_is_an_index_or_a_device(runtime) -> None:
    for device in (None, 0, np.int8(0), cumem.Device(0), Index(0)):
        assert cumem.empty_device(3, device=device).device == cumem.Device(0)
