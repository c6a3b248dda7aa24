# SPDX-License-Identifier: Apache-2.0
"""Exceptions as objects: what they tell, and that they can be copied and pickled."""

from __future__ import annotations

import copy
import pickle

import pytest
from support import session

import cumem

COPIES = [
    copy.copy,
    copy.deepcopy,
    *(
        lambda error, p=protocol: pickle.loads(pickle.dumps(error, p))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ),
]


def told(error: cumem.CudaError) -> tuple[object, ...]:
    return (type(error), error.args, error.call, error.code, error.name, error.arg)


@pytest.mark.parametrize("kind", [cumem.CudaError, cumem.OutOfMemoryError])
def test_error_made_by_hand_tells_nothing_that_it_was_not_told(kind) -> None:
    assert told(kind("text")) == (kind, ("text",), None, None, None, None)
    error = kind("text", call="cudaMalloc", code=2, arg=64)
    assert told(error) == (kind, ("text",), "cudaMalloc", 2, None, 64)
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
    assert told(twin) == told(error)
    assert vars(twin) == vars(error)
    assert isinstance(twin, MemoryError)


def test_subclass_of_an_error_is_one() -> None:
    class Mine(cumem.CudaError):
        pass

    assert told(Mine("text", code=1)) == (Mine, ("text",), None, 1, None, None)
