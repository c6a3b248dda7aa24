# SPDX-License-Identifier: Apache-2.0
"""Tests of the batches that prefetch() returns: their structure, order and memory.

Batches are nested structures of many types. The tests check that their memory is on the
device and that the loader's own objects are not changed. Streams whose gates are shut
show the order, and counters show the memory.
"""

from __future__ import annotations

import collections
import collections.abc
import copy
import dataclasses
import gc
import os
import pickle
import sys
import threading
import types
from array import array as c_array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import programs, session
from support.session import testing

import cumem

WIDTH = 1 << 16


def batches(count: int = 6) -> list[np.ndarray]:
    return list(np.random.default_rng(3).random((count, WIDTH), "f4"))


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Any
    weight: float = 1.0
    extra: Any = dataclasses.field(default=None, init=False)


class Named(dict):
    """A mapping that has an attribute besides its items."""

    note = ""


def test_structure_stays_and_its_memory_is_on_the_device(runtime) -> None:
    data = np.arange(12, dtype="i2").reshape(3, 4)
    named = Named(a=data.T)
    named.note = "kept"
    reported = object()
    batch = {
        "pair": Pair(data, [data[::-1], (data[1:1],)]),
        "sample": Sample(np.asfortranarray(data)),
        "named": named,
        "ordered": collections.OrderedDict(b=data, a=np.array(5.0)),
        "frozen": types.MappingProxyType({"x": cumem.array(data, kind="pinned")}),
        "others": ["text", b"bytes", 3, 2.5, None, reported, np.float32(4), Sample],
    }
    (found,) = cumem.prefetch([batch])
    assert list(found) == list(batch)
    pair, sample = found["pair"], found["sample"]
    assert type(pair) is Pair
    assert type(pair.label) is list
    assert type(pair.label[1]) is tuple
    assert type(sample) is Sample
    assert (sample.weight, sample.extra) == (1.0, None)
    assert type(found["named"]) is Named
    assert found["named"].note == "kept"
    assert list(found["ordered"]) == ["b", "a"]
    assert found["others"] == batch["others"]
    assert found["others"][5] is reported
    moved = [
        (pair.image, data),
        (pair.label[0], data[::-1]),
        (pair.label[1][0], data[1:1]),
        (sample.image, data),
        (found["named"]["a"], data.T),
        (found["ordered"]["b"], data),
        (found["ordered"]["a"], np.array(5.0)),
        (found["frozen"]["x"], data),
    ]
    for there, here in moved:
        assert isinstance(there, cumem.DeviceBuffer)
        assert (there.shape, there.dtype) == (here.shape, here.dtype)
        assert np.array_equal(there.to_numpy(), here)
    assert batch["pair"].image is data  # The batch itself was not changed.
    assert isinstance(named["a"], np.ndarray)


def test_sequences_of_other_types_are_taken_apart(runtime) -> None:
    class Odd(list):
        def __init__(self, begin: int, end: int) -> None:
            super().__init__(np.full(3, i) for i in range(begin, end))

        def __setitem__(self, key: Any, value: Any) -> None:
            raise TypeError("not I")

    data = np.arange(3)
    batch = [Odd(1, 3), collections.deque([data]), collections.UserList([data])]
    (found,) = cumem.prefetch([batch])
    assert [type(each) for each in found] == [
        list,
        collections.deque,
        collections.UserList,
    ]
    assert [each.to_numpy().tolist() for each in found[0]] == [[1] * 3, [2] * 3]
    assert found[1][0] is found[2][0]
    assert found[1][0].to_numpy().tolist() == [0, 1, 2]
    assert batch[1][0] is data
    leaves = [bytearray(b"1"), memoryview(b"2"), c_array("h", [3]), range(4)]
    with pytest.warns(UserWarning, match="on the host: array, bytearray, memoryview"):
        (found,) = cumem.prefetch([leaves])
    assert all(a is b for a, b in zip(found, leaves, strict=True))


def test_prefetch_is_true_unless_it_is_known_to_be_empty(emulated) -> None:
    assert cumem.prefetch(iter([]))  # An iterator may have items.
    assert cumem.prefetch(batches(1))
    assert not cumem.prefetch([])
    with pytest.raises(TypeError):
        len(cumem.prefetch(iter([])))


def test_array_that_is_there_twice_goes_once(runtime) -> None:
    array = batches(1)[0]
    same = array.copy()
    (found,) = cumem.prefetch([[array, (array, same)]])
    assert found[0] is found[1][0]
    assert found[0] is not found[1][1]


def test_what_is_on_the_device_stays_what_it_is(runtime) -> None:
    here = cumem.zeros(5, "f4")
    objects = np.array([1, "a"], object)
    (found,) = cumem.prefetch([[here, objects]])
    assert found[0] is here
    assert found[1] is objects


def test_buffer_of_another_device_comes(emulated) -> None:
    there = cumem.full(5, 3, "f4", device=1)
    (found,) = cumem.prefetch([there], device="cuda:0")
    assert found.device == 0
    assert np.array_equal(found.to_numpy(), np.full(5, 3, "f4"))
    (same,) = cumem.prefetch([there], device=1)
    assert same is there


@pytest.mark.parametrize("depth", [1, 2, 100])
def test_batches_come_in_order_and_as_often_as_they_can_be_had(runtime, depth) -> None:
    data = batches()
    found = cumem.prefetch(data, depth=depth)
    assert len(found) == len(data)
    for _ in range(2):
        there = [each.to_numpy() for each in found]
        assert np.array_equal(there, data)
    once = cumem.prefetch(iter(data))
    assert len(list(once)) == len(data)
    assert list(once) == []
    with pytest.raises(TypeError):
        len(once)
    assert list(cumem.prefetch([])) == []
    assert list(cumem.prefetch([3, "text"])) == [3, "text"]


def test_next_batches_come_while_the_stream_is_at_work(emulated) -> None:
    data = batches()
    stream = cumem.Stream()
    with stream:
        found = iter(cumem.prefetch(data))
        # The stream does not finish its work on the first batch.
        session.shut(stream)
        first = next(found)
        second = next(found)
    # The other stream waits only for the copy of the second batch, and not for `stream`.
    with cumem.Stream() as other:
        assert np.array_equal(second.to_numpy(), data[1])
        del other
    testing.gate_open(stream)
    assert np.array_equal(first.to_numpy(), data[0])
    found.close()


def test_work_of_others_on_a_batch_comes_after_its_copy(emulated) -> None:
    """cumem cannot see what other libraries do with a batch, so only the order of the
    stream can keep their work behind the copy.
    """
    held = cumem.array(batches(1)[0], kind="pinned")
    before, stream = cumem.Stream(), cumem.Stream()
    reached: list[cumem.Event] = []

    def read() -> None:
        with stream:
            for _ in cumem.prefetch([held]):
                reached.append(stream.record())

    session.shut(before)
    cumem.copy_async(held, cumem.full(WIDTH, 7, "f4"), stream=before)
    thread = threading.Thread(target=read)
    thread.start()
    session.wait_until_waiting(thread)
    assert not any(event.done for event in reached)
    testing.gate_open(before)
    thread.join()
    reached[0].synchronize()


def test_third_batch_waits_for_the_work_on_the_first(emulated) -> None:
    stream = cumem.Stream()
    came = threading.Event()

    def read() -> None:
        with stream:
            for i, _ in enumerate(cumem.prefetch(batches())):
                if i == 2:
                    came.set()

    session.shut(stream)
    thread = threading.Thread(target=read)
    thread.start()
    session.wait_until_waiting(thread)
    assert not came.is_set()
    testing.gate_open(stream)
    thread.join()
    assert came.is_set()


@pytest.mark.parametrize("depth", [1, 3])
def test_memory_of_two_batches_more_than_are_ahead_is_enough(emulated, depth) -> None:
    data = np.random.default_rng(1).integers(0, 255, (30, 2 << 20), "u1")
    total = cumem.zeros(1 << 20, "u1")
    cumem.set_limit("device", (depth + 2) * (2 << 20) + (2 << 20), device=0)
    for i, batch in enumerate(cumem.prefetch(data, depth=depth)):
        cumem.copy(total, batch[: 1 << 20])
        assert np.array_equal(total.to_numpy(), data[i][: 1 << 20])
        del batch
    cumem.set_limit("device", None, device=0)


def test_source_is_kept_until_its_copy_is_done_and_no_longer(emulated) -> None:
    stream, pool = cumem.Stream(), cumem.Pool("pinned")
    with pool:
        source = cumem.full(WIDTH, 3, "f4", "pinned")
    session.shut(stream)
    cumem.copy_async(source, cumem.full(WIDTH, 5, "f4"), stream=stream)
    given = [source]
    found = iter(cumem.prefetch(given.pop() for _ in range(1)))
    thread = threading.Thread(target=lambda: given.append(next(found)))
    thread.start()
    session.wait_until_waiting(thread)
    del source
    assert pool.stats().live_count == 1
    testing.gate_open(stream)
    thread.join()
    assert (given[0].to_numpy() == 5).all()
    found.close()
    session.wait_until(lambda: pool.stats().live_count == 0)


def test_closed_early_nothing_is_under_way(runtime) -> None:
    data = batches(20)
    found = iter(cumem.prefetch(data, depth=8))
    first = next(found)
    found.close()
    for array in data:
        array[:] = 0  # Nobody reads the source any more.
    assert first.to_numpy().any()
    with pytest.raises(StopIteration):
        next(found)


def test_closed_early_it_waits_for_copies_that_have_begun(emulated) -> None:
    busy = cumem.zeros(1 << 20, "u1", "managed")
    stream = cumem.Stream()
    session.shut(stream)
    busy.fill(1, stream=stream)
    found = iter(cumem.prefetch([np.ones(5), busy]))
    next(found)
    thread = threading.Thread(target=found.close)
    thread.start()
    session.wait_until_waiting(thread)
    assert thread.is_alive()
    testing.gate_open(stream)
    thread.join()
    # The one storage is that of `busy`.
    assert session.leftovers(held=1) == {"storages": 1}


def test_failure_of_an_iterable_comes_after_what_it_gave(runtime) -> None:
    def arrays() -> Iterator[np.ndarray]:
        yield np.ones(3)
        yield np.ones(4)
        raise OSError("the disk is gone")

    found = iter(cumem.prefetch(arrays(), depth=5))
    assert [len(each) for each in (next(found), next(found))] == [3, 4]
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)


def test_interrupt_in_the_iterable_leaves_nothing_under_way(runtime) -> None:
    def arrays() -> Iterator[np.ndarray]:
        yield from batches(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(cumem.prefetch(arrays()))
    assert testing.pending_transfers() == 0


def test_signal_ends_the_wait_for_a_batch_and_leaves_nothing(emulated) -> None:
    stream = cumem.Stream()
    found = iter(cumem.prefetch(batches()))
    with stream:
        batch = next(found)
    with session.alarm(stream), stream:
        for batch in found:
            assert batch.shape == (WIDTH,)
    with pytest.raises(StopIteration):
        next(found)
    # The one storage is that of `batch`.
    assert session.leftovers(held=1) == {"storages": 1}


def test_copy_that_fails_is_raised_and_leaves_nothing(emulated) -> None:
    testing.plan_fault("copy_async", 2, 999)
    with pytest.raises(cumem.CudaError, match="999"):
        list(cumem.prefetch(batches()))
    testing.plan_fault(None, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3,), TypeError, "iterable must be iterable, not int"),
        (([], 0, 0), ValueError, "depth must be at least 1, not 0"),
        (([], 0, 1.5), TypeError, "depth must be an int, not float"),
        (([], 7), ValueError, "device 7"),
        (([], "gpu"), ValueError, "gpu"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(emulated, arguments, error, text):
    with pytest.raises(error, match=text):
        cumem.prefetch(*arguments)


def test_framework_that_is_unknown_or_missing_is_refused(emulated, monkeypatch) -> None:
    with pytest.raises(ValueError, match="'torch', 'cupy' or None, not 'jax'"):
        cumem.prefetch([], framework="jax")
    for given, name in (("pt", "torch"), ("PyTorch", "torch"), ("cp", "cupy")):
        with pytest.raises(ValueError, match=f"say framework='{name}'"):
            cumem.prefetch([], framework=given)  # type: ignore[call-overload]
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError):
        cumem.prefetch([], framework="cupy")


class OverDict(collections.abc.MutableMapping):
    """A mapping that keeps its items in another object, as those of many libraries do."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class OverOther(OverDict):
    """A mapping whose items are in an object that is not copied with it."""

    def __init__(self, items: dict[str, Any]) -> None:
        super().__init__(types.SimpleNamespace(items=items))  # type: ignore[arg-type]

    def __getitem__(self, key: str) -> Any:
        return self.items_.items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_.items[key] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_.items)

    def __len__(self) -> int:
        return len(self.items_.items)


class Making(OverDict):
    """A mapping that makes its items when it is asked."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key) + 0


class Slotted(OverDict):
    __slots__ = ("items_",)


class Refusing(dict):
    """A dict that cannot be updated, like the outputs of transformers."""

    def update(self, *_: Any) -> None:
        raise Exception("not so")

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


class OverList(collections.abc.MutableSequence):
    """A list that keeps its items in another list, and is not a subclass of `list`."""

    def __init__(self, items: list[Any]) -> None:
        self.items_ = items

    def __getitem__(self, i: Any) -> Any:
        return self.items_[i]

    def __setitem__(self, i: Any, value: Any) -> None:
        self.items_[i] = value

    def __delitem__(self, i: Any) -> None:
        del self.items_[i]

    def insert(self, i: int, value: Any) -> None:
        self.items_.insert(i, value)

    def __len__(self) -> int:
        return len(self.items_)


@pytest.mark.parametrize(
    ("kind", "comes_as"),
    [
        *((OverDict, OverDict), (Slotted, Slotted), (Refusing, Refusing)),
        *((OverOther, OverOther), (Making, dict)),
        (collections.UserDict, collections.UserDict),
        (collections.defaultdict, dict),
    ],
)
def test_mapping_of_the_loader_stays_as_it_is(
    runtime, kind: Any, comes_as: Any
) -> None:
    array = np.arange(5.0)
    if kind is collections.defaultdict:
        batch = collections.defaultdict(list, x=array, n=3)
    else:
        batch = kind({"x": array, "n": np.int64(3)})
    (found,) = cumem.prefetch([batch])
    assert isinstance(found, comes_as)
    assert isinstance(found["x"], cumem.DeviceBuffer)
    assert np.array_equal(found["x"].to_numpy(), array)
    assert int(found["n"]) == 3
    assert isinstance(batch["x"], np.ndarray)
    assert np.array_equal(batch["x"], array)
    assert list(batch) == ["x", "n"]
    del found
    assert session.leftovers() == {}


def test_sequence_of_the_loader_stays_as_it_is(runtime) -> None:
    array = np.arange(5.0)
    for batch in (OverList([array, 3]), collections.UserList([array, 3])):
        (found,) = cumem.prefetch([batch])
        assert type(found) is type(batch)
        assert isinstance(found[0], cumem.DeviceBuffer)
        assert batch[0] is array


def test_attrs_of_a_batch_are_moved(runtime) -> None:
    attr = pytest.importorskip("attr")
    made = attr.make_class("Sample", ["x", "n"], frozen=True, slots=True)
    batch = made(np.ones(3), 2)
    (found,) = cumem.prefetch([batch])
    assert isinstance(found.x, cumem.DeviceBuffer)
    assert (found.n, type(batch.x)) == (2, np.ndarray)


class Holding:
    """An object that cumem does not know how to take apart."""

    def __init__(self, held: Any) -> None:
        self.held = held


@pytest.mark.parametrize(
    "left",
    [
        lambda array: Holding(array),
        lambda array: Holding([array]),
        lambda array: Holding({"a": array}),
        lambda array: {Holding(array)},
        lambda array: np.array([array, None], object),
        lambda array: {"x": array}.values(),
        lambda array: SimpleNamespace(x=array),
    ],
)
def test_memory_that_stays_on_the_host_is_named_once(runtime, left: Any) -> None:
    batches = [{"a": left(np.ones(3)), "n": 1, "text": "x", "none": Holding(3)}] * 4
    with pytest.warns(
        UserWarning,
        match="leaves them on the host: (Hold|set|ndarray of|dict_v|Simple)",
    ) as w:
        found = list(cumem.prefetch(batches))
    assert len(w) == 1
    assert w[0].filename == __file__
    assert found[0]["a"] is batches[0]["a"]


FRAMES = {
    "pandas": ("pandas", lambda lib: lib.DataFrame({"a": [1, 2]})),
    "pandas series": ("pandas", lambda lib: lib.Series([1, 2])),
    "polars": ("polars", lambda lib: lib.DataFrame({"a": [1, 2]})),
    "polars series": ("polars", lambda lib: lib.Series([1, 2])),
    "awkward": ("awkward", lambda lib: lib.Array([[1, 2], [3]])),
    "pillow": ("PIL.Image", lambda lib: lib.new("RGB", (3, 2))),
    "scipy": ("scipy.sparse", lambda lib: lib.csr_matrix(np.eye(3))),
}


@pytest.mark.parametrize(("name", "make"), FRAMES.values(), ids=FRAMES)
def test_frames_and_images_of_libraries_are_named_once(runtime, name, make) -> None:
    left = make(pytest.importorskip(name))
    with pytest.warns(UserWarning, match=f"host: {type(left).__name__}") as w:
        found = list(cumem.prefetch([{"a": left, "b": np.ones(3)}] * 3))
    assert len(w) == 1
    assert all(each["a"] is left for each in found)
    assert all(each["b"].kind == "device" for each in found)


class PairSub(Pair):
    """A named tuple that may be given attributes."""


class Twice(NamedTuple("Twice", [("a", Any), ("b", Any)])):
    """A named tuple whose ``__new__`` takes other arguments."""

    def __new__(cls, a: Any) -> Twice:
        return super().__new__(cls, a, a)


class Two(tuple[Any, ...]):
    def __new__(cls, a: Any, b: Any) -> Two:
        return tuple.__new__(cls, (a, b))


@dataclasses.dataclass
class Counted(dict[str, Any]):
    """A dict that also has a field."""

    field: Any = None


class Items(list[Any]):
    pass


def given(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


def counted(array: Any) -> Any:
    made = Counted(array)
    made["item"] = array
    return made


#: These containers hold memory in their items and also in attributes.
WITH_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "named tuple": lambda a: given(PairSub(a, a), held=a, deep={"x": [a]}, n=1),
    "dict": lambda a: given(Named(x=a), held=a, deep=(a,)),
    "list": lambda a: given(Items([a]), held=a),
    "user dict": lambda a: given(collections.UserDict(x=a), held=a),
    "dataclass": lambda a: given(Counted(a), held={"x": a}),
    "dataclass of items": counted,
    "mapping": lambda a: given(OverDict({"x": a}), held=a),
    "chain": lambda a: collections.ChainMap({"x": a}, {"y": a}),
}


def arrays_in(value: Any, depth: int = 5) -> list[Any]:
    """Return all memory in the items and attributes of a value."""
    if isinstance(value, (np.ndarray, cumem.Buffer)):
        return [value]
    if depth == 0 or isinstance(value, str):
        return []
    inner = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, collections.abc.Mapping):
        inner += [value[key] for key in value]
    elif isinstance(value, collections.abc.Sequence):
        inner += list(value)
    return [each for part in inner for each in arrays_in(part, depth - 1)]


@pytest.mark.parametrize("make", WITH_ATTRIBUTES.values(), ids=WITH_ATTRIBUTES)
def test_attributes_beside_the_items_are_moved(runtime, make) -> None:
    batch = make(np.ones(3))
    before = arrays_in(batch)
    (found,) = cumem.prefetch([batch])
    assert type(found) is type(batch)
    there = arrays_in(found)
    assert len(there) == len(before) > 1
    assert {each.kind for each in there} == {"device"}
    assert all(a is b for a, b in zip(arrays_in(batch), before, strict=True))


def test_tuples_that_are_made_in_their_own_way_stay_what_they_are(runtime) -> None:
    array = np.ones(3)
    batch = [Twice(array), Two(array, 1), os.stat_result(range(10))]
    (found,) = cumem.prefetch([batch])
    assert [type(each) for each in found] == [type(each) for each in batch]
    assert found[0].a is found[0].b is found[1][0]
    assert found[0].a.kind == "device"


class Picky(dict[str, Any]):
    """A dict that cannot be made again.

    It becomes a plain dict, and its attributes are lost.
    """

    def __init__(self, *, x: Any) -> None:
        super().__init__(x=x)
        self.held = x + 1

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("it is fixed")


def test_attribute_that_cannot_come_is_named(runtime) -> None:
    batch = Picky(x=np.ones(3))
    with pytest.warns(UserWarning, match=r"host: Picky\.held"):
        (found,) = cumem.prefetch([batch])
    assert found["x"].kind == "device"
    assert batch.held.tolist() == [2] * 3


def test_attributes_that_lead_back_have_an_end(runtime) -> None:
    batch = Named(x=np.ones(3))
    batch.me = batch
    batch.held = [np.ones(2), batch]
    (found,) = cumem.prefetch([batch])
    assert found["x"].kind == found.held[0].kind == "device"
    assert batch.held[1] is batch.me is batch


def test_names_and_numbers_that_stay_are_no_warning(runtime) -> None:
    batch = [
        np.array(["a", None], object),
        Holding(3),
        {1, 2},
        np.float32(1),
        Holding("x"),
    ]
    (found,) = cumem.prefetch([batch])
    assert all(a is b for a, b in zip(found, batch, strict=True))


def test_masked_elements_of_a_batch_are_refused(emulated) -> None:
    masked = np.ma.array([1, 2], mask=[0, 1])
    with pytest.raises(TypeError, match=r"masked elements.*filled\(\)"):
        list(cumem.prefetch([{"x": masked}]))
    (found,) = cumem.prefetch([np.ma.array([1, 2])])
    assert found.to_numpy().tolist() == [1, 2]


def test_attributes_are_those_of_the_loader(emulated) -> None:
    class Loader:
        batch_size = 4

        def __init__(self) -> None:
            self.dataset = [1]
            self.epochs: list[int] = []

        def __iter__(self) -> Iterator[Any]:
            return iter([np.ones(3)])

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    loader = Loader()
    found = cumem.prefetch(loader)
    assert found.dataset is loader.dataset
    assert found.batch_size == 4
    found.set_epoch(3)
    assert loader.epochs == [3]
    found.batch_size = 8
    assert loader.batch_size == 8
    with pytest.raises(AttributeError, match="nothing"):
        _ = found.nothing
    assert not hasattr(found, "_private")
    assert all(hasattr(found, name) for name in dir(found))


@pytest.mark.gpu
def test_arrays_become_cupys_where_that_is_asked_for(cuda) -> None:
    cupy = pytest.importorskip("cupy")
    data = batches()
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        with stream:
            kept = []
            for batch in cumem.prefetch(data, framework="cupy"):
                assert isinstance(batch, cupy.ndarray)
                kept.append(batch.copy())
            assert np.array_equal([each.get() for each in kept], data)


#: This program ends while batches are on their way and slots of a ring are taken.
LEAVING = """
import numpy as np
import cumem

found = iter(cumem.prefetch([np.ones(1 << 20)] * 9, depth=3))
first = next(found)
batch = cumem.PinnedCollate()([np.ones(1000)] * 3)
collate = cumem.PinnedCollate(2)
ring = collate._ring
memory = ring.claim(*ring.take(1 << 16), 1 << 16)
"""


def test_interpreter_exit_in_the_middle_is_clean(runtime) -> None:
    done = programs.run("-W", "ignore", "-c", LEAVING, CUMEM_BACKEND=runtime.name)
    assert (done.returncode, done.stderr) == (0, "")


def batches_of(count: int, ended: list[int]) -> Iterator[np.ndarray]:
    """Yield `count` batches, and report in `ended` when the iterator is closed."""
    try:
        for i in range(count):
            yield np.full(64, i, "f4")
    finally:
        ended.append(count)


def test_prefetch_in_a_with_block_ends_with_it(runtime) -> None:
    ended: list[int] = []
    with cumem.prefetch(batches_of(9, ended)) as batches:
        iterator = iter(batches)
        assert next(iterator).to_numpy()[0] == 0
    assert next(iterator, None) is None
    assert "ended" in repr(iterator)
    with pytest.raises(ValueError, match=r"closed: call cumem\.prefetch"):
        iter(batches)
    with pytest.raises(ValueError, match="closed"), batches:
        pass
    batches.close()
    assert not ended  # The iterable belongs to the caller, so it stays open.
    del iterator, batches
    gc.collect()
    assert ended == [9]


def test_prefetch_whose_body_raises_is_closed_with_copies_under_way(emulated) -> None:
    source = [cumem.zeros(1 << 16, "u1", kind="pinned") for _ in range(8)]
    begun = []

    def work() -> None:
        with cumem.prefetch(source, depth=3) as batches:
            begun.extend([iter(batches), iter(batches)])
            for _ in zip(*begun, strict=True):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert [next(each, None) for each in begun] == [None, None]
    # The copies of delivered batches are in the stream's order, and end soon after.
    session.wait_until(lambda: testing.pending_transfers() == 0)


def test_closed_prefetch_keeps_batches_that_have_come(runtime) -> None:
    with cumem.prefetch([np.arange(5.0)] * 3) as batches:
        kept = list(batches)
        assert len(list(batches)) == 3  # The batches can be read once more.
    assert all((each.to_numpy() == np.arange(5.0)).all() for each in kept)


def test_copy_of_a_prefetch_is_open_by_itself(emulated) -> None:
    batches = cumem.prefetch([np.arange(5.0)] * 3, depth=1)
    begun = iter(batches)
    for other in (copy.copy(batches), pickle.loads(pickle.dumps(batches))):
        other.close()
    assert len(list(begun)) == len(list(batches)) == 3
