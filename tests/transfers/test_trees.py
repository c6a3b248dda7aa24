# SPDX-License-Identifier: Apache-2.0
"""Nested structures that to_device() and to_host() copy to a device and back.

The tests compare structure, values and sharing of memory before and after.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import session, values
from support.faults import sweep

import cumem


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Any
    label: int = 3


def make_tree() -> dict[str, Any]:
    shared = np.arange(6.0).reshape(2, 3)
    return {
        "array": np.arange(4, dtype="i2"),
        "shared": [shared, shared, shared[:]],
        "pair": Pair(np.float32(2.5), np.ones((3, 2), "f4", order="F")),
        "sample": Sample(np.zeros((0, 4))),
        "frozen": types.MappingProxyType({"x": np.ones(2)}),
        "ordered": collections.OrderedDict(a=(np.ones(1), "text"), b=None),
        "objects": np.array([None, "a"], object),
        "times": np.array(["2020-01-01"], "M8[D]"),
        "buffer": cumem.full(3, 7, "i4", "pinned"),
    }


def test_structure_goes_to_a_device_and_comes_back(runtime) -> None:
    tree = make_tree()
    there = cumem.to_device(tree)
    assert list(there) == list(tree)
    assert type(there["pair"]) is Pair
    assert type(there["sample"]) is Sample
    assert there["sample"].label == 3
    assert type(there["ordered"]) is collections.OrderedDict
    assert there["ordered"]["a"][1] == "text"
    assert there["objects"] is tree["objects"]
    assert there["pair"].first == np.float32(2.5)
    for found in (
        there["array"],
        there["buffer"],
        there["times"],
        there["frozen"]["x"],
    ):
        assert isinstance(found, cumem.DeviceBuffer)
    assert there["pair"].second.flags.f_contiguous
    back = cumem.to_host(there)
    assert np.array_equal(back["array"], tree["array"])
    assert np.array_equal(back["pair"].second, tree["pair"].second)
    assert back["pair"].second.flags.f_contiguous
    assert back["sample"].image.shape == (0, 4)
    assert back["times"].dtype == tree["times"].dtype
    assert back["buffer"].tolist() == [7] * 3
    assert isinstance(back["buffer"], np.ndarray)


def test_shared_memory_is_copied_once_and_stays_shared(runtime) -> None:
    there = cumem.to_device(make_tree())
    first, second, third = there["shared"]
    assert first is second
    assert first is third  # It is a view of the same memory with the same layout.
    back = cumem.to_host(there)
    back["shared"][0][0, 0] = 100
    assert back["shared"][2][0, 0] == 100


def test_leaf_alone_is_a_tree(runtime) -> None:
    array = np.arange(3)
    there = cumem.to_device(array)
    assert np.array_equal(cumem.to_host(there), array)
    assert cumem.to_device(there) is there
    assert cumem.to_device(5) == cumem.to_host(5) == 5
    assert cumem.to_device([]) == []


@pytest.mark.parametrize("order", "CF")
def test_elements_of_every_small_dtype_come_back(runtime, order) -> None:
    """NumPy gives some dtypes of ml_dtypes names from which NumPy itself makes no
    dtype.
    """
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e5m2", "float8_e4m3fn", "int4"):
        array = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name), order)
        records = np.zeros(2, [("a", array.dtype), ("b", "i8")])
        back = cumem.to_host(cumem.to_device([array, records]))
        assert [each.dtype for each in back] == [array.dtype, records.dtype], name
        assert back[0].astype("f4").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], name
        assert back[0].flags.f_contiguous == (order == "F"), name


def test_device_that_is_named_gets_the_memory(emulated) -> None:
    there = cumem.to_device([np.ones(3)], 1)
    assert there[0].device.index == 1
    moved = cumem.to_device(there, "cuda:0")
    assert moved[0].device.index == 0
    with cumem.Device(1):
        assert cumem.to_device(np.ones(3)).device.index == 1
    with pytest.raises(ValueError, match="device"):
        cumem.to_device(there, 17)
    assert cumem.to_host(moved)[0].tolist() == [1.0] * 3


def test_stream_orders_the_copies(emulated) -> None:
    stream = cumem.Stream()
    block = cumem.full(1000, 2.0, "f4")
    source = cumem.full(1000, 1.0, "f4", "pinned")
    with session.gate(stream):
        cumem.copy_async(source, block, stream=stream)
        # The device makes the whole copy, in the order of the stream.
        there = cumem.to_device({"x": source}, stream=stream)
    stream.synchronize()
    assert values.get(there["x"]).tolist() == [2.0] * 1000


def test_tensors_stay_tensors(runtime) -> None:
    torch = pytest.importorskip("torch")
    weight = (
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    )
    tree = {
        "weight": weight,
        "tied": [weight, weight.detach()],
        "bf16": torch.ones(5, dtype=torch.bfloat16, requires_grad=True),
        "array": np.ones(2),
    }
    there = cumem.to_device(tree)
    assert isinstance(there["weight"], torch.Tensor)
    assert there["weight"].is_contiguous(memory_format=torch.channels_last)
    assert there["tied"][0] is there["weight"]
    assert there["tied"][1].data_ptr() == there["weight"].data_ptr()
    assert there["bf16"].dtype is torch.bfloat16
    assert not there["bf16"].requires_grad
    assert isinstance(there["array"], cumem.DeviceBuffer)
    if runtime.name == "cuda":
        assert there["weight"].device.type == "cuda"
    back = cumem.to_host(there)
    assert back["weight"].device.type == "cpu"
    assert torch.equal(back["weight"], weight)
    assert torch.equal(back["bf16"], tree["bf16"].detach())
    with pytest.raises(TypeError, match="strided"):
        cumem.to_device([torch.eye(3).to_sparse()])


def test_every_runtime_call_may_fail(emulated) -> None:
    tree = [np.arange(100.0), np.ones(5, "i2")]

    def scenario() -> None:
        back = cumem.to_host(cumem.to_device(tree))
        assert all(map(np.array_equal, back, tree))

    sweep(scenario)


class Opaque:
    """An object that holds an array, and that cumem cannot make again."""

    def __init__(self, array: Any) -> None:
        self.array = array


def test_leaf_that_holds_arrays_and_stays_is_named(emulated) -> None:
    opaque = Opaque(np.ones(3))
    objects = np.array([np.ones(2), None], object)
    with pytest.warns(
        UserWarning, match=r"to_device\(\) cannot take .*: Opaque, ndarray\. "
    ):
        there = cumem.to_device({"a": [opaque, np.ones(2)], "b": objects})
    assert there["a"][0] is opaque
    assert there["b"] is objects
    assert there["a"][1].kind == "device"


def test_leaf_without_arrays_stays_in_silence(emulated) -> None:
    leaves = [
        Opaque(None),
        Opaque("text"),
        3,
        "text",
        np.array(["a", None], object),
        {1},
    ]
    assert cumem.to_device(leaves) == leaves
