# SPDX-License-Identifier: Apache-2.0
"""Tests of which device is used by a call that names no device.

The answer may differ in each thread, and is settled when the call is made. The first
tests are about threads, CUDA's current device and PyTorch's; then come default streams,
calls that must not open a device, and copies of several devices. Four emulated devices
stand for GPUs, and most tests look at the device of a new buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from support import session
from support.session import testing
from support.testing import cuda_device

import cumem
from cumem.transfers import collating

A = TypeVar("A")
DEVICES = 4


@pytest.fixture
def four() -> Iterator[session.Runtime]:
    """Open four emulated devices, and undo the choice of a current one afterwards."""
    with session.opened("emulated", device_count=DEVICES) as opened:
        yield opened
        cumem.set_current_device(None)


def in_thread(function: Callable[[], A]) -> A:
    """Return what `function` returns in a new thread."""
    answers: list[A] = []
    thread = threading.Thread(target=lambda: answers.append(function()))
    thread.start()
    thread.join()
    return answers[0]


def current() -> int:
    return cumem.current_device().index


def contexts() -> list[int]:
    return [d for d in range(DEVICES) if testing.contexts() >> d & 1]


class Torch(ModuleType):
    """A stand-in for PyTorch with all that cumem asks it about devices."""

    def __init__(self, device: int, is_initialized: bool = True) -> None:
        super().__init__("torch")
        self.asked = 0

        def current_device() -> int:
            self.asked += 1
            return device

        self.Tensor = type("Tensor", (np.ndarray,), {})
        self.cuda = SimpleNamespace(
            is_initialized=lambda: is_initialized, current_device=current_device
        )


# -- threads ---------------------------------------------------------------------------


def test_set_current_device_in_threads_at_the_same_time_holds_for_each(four) -> None:
    meet = threading.Barrier(DEVICES)
    found: dict[int, list[int]] = {}

    def work(index: int) -> None:
        cumem.set_current_device(index)
        meet.wait()
        with cumem.Device((index + 1) % DEVICES):
            inner = cumem.empty_device(8).device.index
        found[index] = [inner, cumem.zeros(10).device.index, current()]
        found[index] += [
            cumem.Stream().device.index,
            cumem.empty_pinned(8).device.index,
        ]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(DEVICES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [(i + 1) % DEVICES, i, i, i, i] for i in range(DEVICES)}
    assert current() == 0


def test_set_current_device_elsewhere_leaves_a_new_thread_with_cudas(four) -> None:
    cumem.set_current_device(2)
    with cumem.Device(3):
        assert in_thread(current) == 0
        copied = contextvars.copy_context()
        # The copied context contains the block.
        assert in_thread(lambda: copied.run(current)) == 3
    assert current() == 2


def test_set_current_device_none_is_as_if_nothing_had_been_chosen(four) -> None:
    cumem.set_current_device(3)
    cumem.set_current_device(None)
    assert current() == 0
    with cuda_device(1):
        assert current() == 1
    with pytest.raises(
        TypeError, match='an int, a Device, "cuda:N" or None, not object'
    ):
        cumem.set_current_device(object())


def test_set_current_device_ends_with_shutdown_in_all_threads() -> None:
    ready, go_on = threading.Event(), threading.Event()
    found: list[int] = []

    def work() -> None:
        cumem.set_current_device(1)
        found.append(current())
        ready.set()
        go_on.wait()
        found.append(current())

    with session.opened("emulated", device_count=2):
        thread = threading.Thread(target=work)
        thread.start()
        ready.wait()
    with session.opened("emulated", device_count=2):
        go_on.set()
        thread.join()
    assert found == [1, 0]


# -- CUDA's, and PyTorch's -------------------------------------------------------------


def test_current_device_that_nobody_chose_is_cudas_of_the_thread(four) -> None:
    cumem.zeros(4)  # A pool of another device is in use already.
    with cuda_device(2):
        assert current() == 2
        for make in (cumem.empty_device, cumem.zeros, cumem.empty_pinned, cumem.empty):
            assert make(8).device == 2
        assert cumem.Stream().device == cumem.current_stream().device == 2
        assert in_thread(current) == 0
        cumem.set_current_device(1)
        assert cumem.empty_device(8).device == 1
        with cumem.Device(3):
            assert cumem.empty_device(8).device == 3
        cumem.set_current_device(None)
        assert cumem.empty_device(8).device == 2
    assert cumem.empty_device(8).device == 0
    assert contexts() == [0, 1, 2, 3]


def test_current_device_of_one_that_is_visible_asks_nobody() -> None:
    with session.opened("emulated", device_count=1):
        cumem.empty_device(64)
        cumem.empty_pinned(64)
        before = testing.fault_count()
        for _ in range(10):
            cumem.empty_device(64)
            cumem.empty_pinned(64)
            cumem.current_device()
        assert testing.fault_count() == before


def test_current_device_that_was_chosen_asks_nobody() -> None:
    with session.opened("emulated", device_count=2):
        cumem.set_current_device(1)
        cumem.empty_device(64)
        before = testing.fault_count()
        for _ in range(10):
            assert cumem.empty_device(64).device == 1
        assert testing.fault_count() == before
        cumem.set_current_device(None)


def test_current_device_that_cuda_does_not_tell_is_the_first() -> None:
    with session.opened("emulated", device_count=2):
        cumem.empty_device(64)
        testing.plan_fault("context_device", 1, 999, repeat=True)
        assert cumem.empty_device(64).device == 0


def test_chunks_and_prefetch_settle_the_device_at_the_call(four) -> None:
    with cumem.Device(2):
        found = cumem.chunks(np.ones(4))
        batches = cumem.prefetch([np.ones(4)], device="cuda")
        plain = cumem.prefetch([np.ones(4)])
    cumem.set_current_device(1)
    assert next(found)[1].device == 2
    assert [each.device.index for each in batches] == [2]
    assert in_thread(lambda: [each.device.index for each in plain]) == [2]
    assert contexts() == [2]


@pytest.mark.parametrize("index", [1, 3])
def test_prefetch_without_a_device_goes_to_the_current_one_alone(four, index) -> None:
    loader = [{"x": np.ones(4)}] * 2
    cumem.set_current_device(index)
    for batches in (cumem.prefetch(loader), cumem.prefetch(loader, device=None)):
        assert {each["x"].device.index for each in batches} == {index}
    assert contexts() == [index]


def test_prefetch_without_a_device_goes_to_pytorchs(four, monkeypatch) -> None:
    torch = Torch(2)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert [each.device.index for each in cumem.prefetch([np.ones(4)])] == [2]
    with cumem.Device(1):
        assert [each.device.index for each in cumem.prefetch([np.ones(4)])] == [1]
    cumem.set_current_device(3)
    assert [each.device.index for each in cumem.prefetch([np.ones(4)])] == [3]
    explicit = cumem.prefetch([np.ones(4)], device=0)
    assert [each.device.index for each in explicit] == [0]
    # A call without tensors asks only CUDA.
    assert cumem.empty_device(4).device == 3


@pytest.mark.parametrize(
    "torch", [Torch(2, is_initialized=False), Torch(9), ModuleType("torch"), None]
)
def test_pytorch_that_is_not_at_work_has_no_current_device(
    four, monkeypatch, torch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    with cuda_device(1):
        assert [each.device.index for each in cumem.prefetch([np.ones(4)])] == [1]
    if isinstance(torch, Torch) and not torch.cuda.is_initialized():
        assert torch.asked == 0  # Asking would make PyTorch initialise CUDA.


def test_pytorch_without_cuda_is_not_made_to_begin(four) -> None:
    torch = pytest.importorskip("torch")
    cumem.set_current_device(3)
    batches = list(cumem.prefetch([torch.ones(4)]))
    assert batches[0].tolist() == [1] * 4
    for _, chunk in cumem.chunks(torch.ones(4)):
        assert chunk.device == 3
    assert not torch.cuda.is_initialized()
    assert contexts() == [3]


def test_pytorch_current_device_is_that_of_chunks_of_tensors(four, monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert next(cumem.chunks(torch.ones(4)))[1].device == 2
    assert next(cumem.chunks(np.ones(4)))[1].device == 0
    found = cumem.pipeline(lambda x, y, stream: x.device.index, torch.ones(4))
    assert found == [2]


def write_tensors(path: Path) -> str:
    """Save one tensor, and return the path of its file."""
    with cumem.Device(0):
        cumem.save_safetensors(path / "w.safetensors", {"w": np.ones(3)})
    return str(path / "w.safetensors")


def allocations() -> dict[int, int]:
    """Return how many allocations the default pools of each device have served."""
    return {
        device: sum(
            cumem.default_pool(kind, device).stats().allocation_count
            for kind in ("device", "pinned", "mapped")
        )
        for device in range(DEVICES)
    }


def place_of(call: Callable[[], Any]) -> int:
    """Return the device of the object that a call returns.

    A tensor of an emulated device is in ordinary memory and names no device. For a
    tensor, this returns the device whose pools served an allocation.
    """
    before = allocations()
    answer = call()
    if isinstance(answer, int):
        return answer
    after = allocations()
    (found,) = [device for device in after if after[device] > before[device]]
    return found


def device_of(buffer: Any) -> int:
    device = buffer.device
    assert device is not None, buffer
    return int(device.index)


#: Each call takes a tensor, and returns the device that it used, or a tensor.
FOR_TENSORS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "array": lambda torch, x, path: device_of(cumem.array(x)),
    "array pinned": lambda torch, x, path: device_of(cumem.array(x, kind="pinned")),
    "array of a dtype": lambda torch, x, path: device_of(cumem.array(x, "f8")),
    "asarray": lambda torch, x, path: device_of(cumem.asarray(x)),
    "asarray cuda": lambda torch, x, path: device_of(cumem.asarray(x, device="cuda")),
    "asarray C": lambda torch, x, path: device_of(cumem.asarray(x, order="C")),
    "empty_like": lambda torch, x, path: device_of(cumem.empty_like(x)),
    "zeros_like": lambda torch, x, path: device_of(cumem.zeros_like(x, kind="mapped")),
    "full_like": lambda torch, x, path: device_of(cumem.full_like(x, 1)),
    "register": lambda torch, x, path: device_of(cumem.register(x).buffer),
    "load_safetensors": lambda torch, x, path: cumem.load_safetensors(
        write_tensors(path), framework="torch"
    )["w"],
    "load_safetensors pinned": lambda torch, x, path: cumem.load_safetensors(
        write_tensors(path), kind="pinned", framework="torch"
    )["w"],
    "prefetch": lambda torch, x, path: next(iter(cumem.prefetch([x]))),
    "prefetch cuda": lambda torch, x, path: next(
        iter(cumem.prefetch([x], device="cuda"))
    ),
    "prefetch torch.device": lambda torch, x, path: next(
        iter(cumem.prefetch([x], device=torch.device("cuda")))
    ),
    "to_device": lambda torch, x, path: cumem.to_device([x])[0],
    "to_device of arrays": lambda torch, x, path: device_of(
        cumem.to_device([np.ones(3)])[0]
    ),
    "chunks": lambda torch, x, path: device_of(next(cumem.chunks(x))[1]),
    "chunks cuda": lambda torch, x, path: device_of(
        next(cumem.chunks(x, device="cuda"))[1]
    ),
    "pipeline": lambda torch, x, path: cumem.pipeline(
        lambda part, out, stream: device_of(part), x
    )[0],
    "PinnedCollate": lambda torch, x, path: cumem.PinnedCollate(1, 1 << 20)([x, x]),
}


@pytest.mark.parametrize("call", FOR_TENSORS.values(), ids=FOR_TENSORS)
def test_calls_for_tensors_go_where_pytorch_is(
    four, monkeypatch, tmp_path, call
) -> None:
    torch = pytest.importorskip("torch")
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: asked.append(2) or 2)
    tensor = torch.ones(1 << 14)

    def found() -> int:
        return place_of(lambda: call(torch, tensor, tmp_path))

    assert found() == 2
    assert asked
    asked.clear()
    with cumem.Device(1):
        assert found() == 1
    cumem.set_current_device(3)
    assert found() == 3
    assert not asked  # PyTorch need not be asked if cumem's own device was chosen.
    cumem.set_current_device(None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with cuda_device(1):
        assert found() == 1
    assert not asked


@pytest.mark.parametrize("call", FOR_TENSORS.values(), ids=FOR_TENSORS)
def test_calls_for_tensors_with_one_device_ask_nobody(
    monkeypatch, tmp_path, call
) -> None:
    torch = pytest.importorskip("torch")

    def ask() -> int:
        raise AssertionError("PyTorch was asked although there is only one device")

    # The patch ends before shutdown(), which may ask PyTorch. shutdown() does not wait
    # for streams that are captured, so it has to know whether PyTorch captures.
    with (
        session.opened("emulated", device_count=1),
        monkeypatch.context() as patched,
    ):
        patched.setattr(torch.cuda, "is_initialized", ask)
        patched.setattr(torch.cuda, "current_device", ask)
        patched.setattr(collating, "_uses_cuda", lambda torch: False)
        call(torch, torch.ones(1 << 14), tmp_path)


#: Each call does without tensors, and returns the device that it used.
WITHOUT_TENSORS: dict[str, Callable[[Path], int]] = {
    "empty": lambda path: device_of(cumem.empty(8)),
    "empty_pinned": lambda path: device_of(cumem.empty_pinned(8)),
    "empty_managed": lambda path: device_of(cumem.empty_managed(8)),
    "array": lambda path: device_of(cumem.array(np.ones(3))),
    "array of a list": lambda path: device_of(cumem.array([1.0])),
    "array cuda": lambda path: device_of(cumem.array([1.0], device="cuda")),
    "asarray": lambda path: device_of(cumem.asarray(np.ones(3))),
    "register": lambda path: device_of(cumem.register(np.ones(1 << 14)).buffer),
    "Stream": lambda path: device_of(cumem.Stream()),
    "current_stream": lambda path: device_of(cumem.current_stream()),
    "Event": lambda path: device_of(cumem.Event()),
    "Pool": lambda path: device_of(cumem.Pool("pinned")),
    "default_pool": lambda path: device_of(cumem.default_pool("device")),
    "Workspace": lambda path: device_of(cumem.Workspace("1 MiB")),
    "chunks": lambda path: device_of(next(cumem.chunks(np.ones(3)))[1]),
    "load_safetensors": lambda path: device_of(
        cumem.load_safetensors(write_tensors(path))["w"]
    ),
    "fromfile": lambda path: device_of(
        cumem.fromfile(write_tensors(path), "u1", offset=0)
    ),
}


@pytest.mark.parametrize("call", WITHOUT_TENSORS.values(), ids=WITHOUT_TENSORS)
def test_calls_without_tensors_go_where_cuda_is(
    four, monkeypatch, tmp_path, call
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch(2))
    with cuda_device(1):
        assert call(tmp_path) == 1
        with cumem.Device(3):
            assert call(tmp_path) == 3
        cumem.set_current_device(0)
        assert call(tmp_path) == 0


def test_device_that_pytorch_alone_has_does_not_count(four, monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICES)
    with cuda_device(1):
        assert cumem.array(torch.ones(3)).device == 1


def test_failure_of_pytorch_to_tell_its_device_is_raised(four, monkeypatch) -> None:
    torch = pytest.importorskip("torch")

    def fail() -> int:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", fail)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        cumem.array(torch.ones(3))
    with cumem.Device(1):
        assert cumem.array(torch.ones(3)).device == 1


@pytest.mark.parametrize("elsewhere", [None, 1])
def test_thread_that_reads_follows_the_block_of_the_call(four, elsewhere) -> None:
    """The thread that reads has the device of the block in which chunks() was called,
    wherever the chunks are iterated.
    """
    found: list[int] = []

    class Rows:
        shape = (8, 4)
        dtype = np.dtype("f8")

        def __getitem__(self, part: Any) -> Any:
            found.append(current())
            found.append(device_of(cumem.empty_pinned(8)))
            return np.ones((8, 4))[part]

        def __len__(self) -> int:
            return 8

    with cumem.Device(3):
        chunks = cumem.chunks(Rows(), rows=2)
    with contextlib.nullcontext() if elsewhere is None else cumem.Device(elsewhere):
        assert {chunk.device.index for _, chunk in chunks} == {3}
    assert set(found) == {3}
    assert contexts() == [3]


def test_pipeline_function_has_its_lane_as_current(four) -> None:
    found: list[Any] = []

    def work(x: Any, y: Any, stream: Any) -> None:
        scratch = cumem.empty_device(x.shape, x.dtype)
        found.append(
            (cumem.current_stream() == stream, scratch.device.index, current())
        )
        y[...] = x.to_numpy()

    data = np.arange(8.0)
    out = np.empty_like(data)
    cumem.pipeline(work, data, out, rows=2, device=2, streams=2)
    assert found == [(True, 2, 2)] * 4
    assert out.tolist() == data.tolist()
    assert current() == 0
    assert contexts() == [2]


# -- default streams -------------------------------------------------------------------


# Each of these functions starts copies on `side`, a stream of device 3, and returns the
# handle of a copy and the stream.


def device_copy(side: cumem.Stream) -> tuple[cumem.Transfer, cumem.Stream]:
    src = cumem.zeros(1 << 10, kind="pinned")
    return cumem.copy_async(
        cumem.empty_device(1 << 10, device=3), src, stream=side
    ), side


def host_copy(side: cumem.Stream) -> tuple[cumem.Transfer, cumem.Stream]:
    dst = cumem.empty_pinned(1 << 10)
    src = cumem.empty_device(1 << 10, device=3, stream=side)
    return cumem.copy_async(dst, src, stream=side), side


def peer_copy(side: cumem.Stream) -> tuple[cumem.Transfer, cumem.Stream]:
    src = cumem.empty_device(1 << 10, device=1)
    return cumem.copy_async(
        cumem.empty_device(1 << 10, device=3), src, stream=side
    ), side


def many_copies(side: cumem.Stream) -> tuple[cumem.Transfer, cumem.Stream]:
    src = cumem.zeros(1 << 10, kind="pinned")
    pairs = [(cumem.empty_device(1 << 10, device=3), src)]
    return cumem.copy_many_async(pairs, stream=side), side


def several_copies(side: cumem.Stream) -> tuple[cumem.Transfer, cumem.Stream]:
    targets = [cumem.empty_device(1 << 10, device=d) for d in (0, 3)]
    src = cumem.zeros(1 << 10, kind="pinned")
    return cumem.broadcast_async(targets, src, stream=side)[1], side


ORDERS: dict[str, Callable[[cumem.Transfer, cumem.Stream], object]] = {
    "order(None)": lambda copy, side: copy.order(None),
    "order(0)": lambda copy, side: copy.order(0),
    "order(1)": lambda copy, side: copy.order(1),
    "order(current)": lambda copy, side: copy.order(cumem.current_stream(3)),
    "Event.wait()": lambda copy, side: side.record().wait(),
    "Event.wait(handle)": lambda copy, side: side.record().wait(stream=1),
    "Event.wait(stream)": lambda copy, side: side.record().wait(
        cumem.current_stream(3)
    ),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(
    "make", [device_copy, host_copy, peer_copy, many_copies, several_copies]
)
def test_default_stream_is_that_of_the_transfers_or_events_device(
    four, make, order
) -> None:
    side = cumem.Stream(device=3)
    session.shut(side)
    copy, side = make(side)
    order(copy, side)
    marker = cumem.current_stream(3).record()
    assert not marker.done  # The marker waits for the copy.
    testing.gate_open(side)
    marker.synchronize()
    copy.wait()


def test_default_stream_of_a_transfer_is_the_current_one_of_its_device(four) -> None:
    side, mine = cumem.Stream(device=3), cumem.Stream(device=3)
    session.shut(side)
    copy, _ = device_copy(side)
    with mine:
        copy.order(None)
        assert not mine.record().done
    assert cumem.current_stream(3).record().synchronize() is None
    testing.gate_open(side)
    copy.wait()


class Exporter:
    """Another library's memory on a device.

    Only the object itself says which device.
    """

    def __init__(self, buffer: cumem.Buffer) -> None:
        self.buffer = buffer

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.buffer.device.index  # type: ignore[union-attr]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return testing.array_interface(self.buffer)


def test_default_stream_by_its_number_is_that_of_the_memorys_device(four) -> None:
    there = cumem.zeros(1 << 10, device=3)
    pinned = cumem.full(1 << 10, 5.0, kind="pinned")
    for target in there, Exporter(there):
        for stream in 0, 1:
            cumem.copy_async(target, pinned, stream=stream).wait()
            cumem.copy(target, pinned, stream=stream)
            cumem.copy_many([(target, pinned)], stream=stream)
            cumem.copy_async(target, pinned, after=stream).wait()
            cumem.broadcast([target], pinned, stream=stream)
            cumem.gather(target, [pinned], stream=stream)
            cumem.asbuffer(target, stream=stream)
    there.fill(7, stream=1)
    there.record_stream(1)
    assert there.tolist() == [7] * (1 << 10)
    # Device 0 was current when the pinned memory was made. Locking its pages gave
    # device 0 a context.
    assert contexts() == [0, 3]


def test_scatter_says_what_the_lengths_add_up_to(four) -> None:
    targets = [cumem.zeros(4, device=d) for d in (0, 1)]
    with pytest.raises(ValueError, match="add up to 8, but the source has 10 there"):
        cumem.scatter(targets, np.ones(10))
    with pytest.raises(ValueError, match="add up to 8, but the target has 10 there"):
        cumem.gather(np.ones(10), targets)


# -- devices that nobody named ---------------------------------------------------------

T = "w.npy"  # The test runs in an empty folder.

#: These calls use ordinary memory only, and therefore no device at all.
ORDINARY: dict[str, Callable[[], object]] = {
    "asbuffer": lambda: cumem.asbuffer(np.ones(9)),
    "asbuffer of bytes": lambda: cumem.asbuffer(b"abc" * 99),
    "copy": lambda: cumem.copy(np.empty(9), np.ones(9)),
    "copy, large": lambda: cumem.copy(np.empty(1 << 20), np.ones(1 << 20)),
    "copy, strided": lambda: cumem.copy(np.empty((9, 9))[:, ::2], np.ones((9, 5))),
    "copy, casting": lambda: cumem.copy(
        np.empty(9, "f4"), np.ones(9), casting="unsafe"
    ),
    "copy_async": lambda: cumem.copy_async(np.empty(9), np.ones(9)).wait(),
    "copy_many": lambda: cumem.copy_many([(np.empty(9), np.ones(9))] * 10),
    "broadcast": lambda: cumem.broadcast([np.empty(9), np.empty(9)], np.ones(9)),
    "scatter": lambda: cumem.scatter([np.empty(4), np.empty(5)], np.ones(9)),
    "gather": lambda: cumem.gather(np.empty(9), [np.ones(4), np.ones(5)]),
    "explain": lambda: cumem.explain(np.empty(9), np.ones(9)),
    "fill": lambda: cumem.asbuffer(np.ones(9)).fill(3),
    "setitem": lambda: cumem.asbuffer(np.ones(9)).__setitem__(slice(2, 5), 1),
    "repr": lambda: str(cumem.asbuffer(np.ones(9))),
    "save": lambda: cumem.save(T, np.ones(9)),
    "savez": lambda: cumem.savez(T, w=np.ones(9)),
    "save_safetensors": lambda: cumem.save_safetensors(T, {"w": np.ones(9)}),
    "tofile": lambda: cumem.tofile(T, np.ones(1 << 20)),
    "tofile, direct": lambda: cumem.tofile(T, np.ones(1 << 20), direct=True),
    "read_ranges": lambda: (
        cumem.tofile(T, np.ones(9)),
        cumem.read_ranges(T, [(0, np.empty(9))]),
    ),
    "statistics": lambda: (cumem.stats(), cumem.memory_info("host"), cumem.live()),
    "limits": lambda: cumem.get_limit("pinned"),
    "devices": lambda: (cumem.current_device(), cumem.Device(2).name),
    "set_current_device": lambda: cumem.set_current_device(2),
    "current_stream": lambda: cumem.current_stream(2),
    "Pool": lambda: cumem.Pool("pinned", device=2),
}


@pytest.fixture
def in_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("call", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_memory_alone_opens_no_device(four, in_folder, call) -> None:
    call()
    assert contexts() == []


@pytest.mark.parametrize("call", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_memory_beside_a_device_opens_no_other(four, in_folder, call) -> None:
    cumem.empty_device(9, device=3)
    in_thread(call)  # No device is current in the new thread.
    call()
    assert contexts() == [3]


#: These calls name device 2 in different ways.
NAMED: dict[str, Callable[[], object]] = {
    "copy to it": lambda: cumem.copy(cumem.zeros(9, device=2), np.ones(9)),
    "copy from it": lambda: cumem.copy(
        np.ones(1 << 20), cumem.zeros(1 << 20, device=2)
    ),
    "copy_many": lambda: cumem.copy_many([(cumem.zeros(9, device=2), np.ones(9))]),
    "array": lambda: cumem.array(np.ones(9), device=2),
    "asarray": lambda: cumem.asarray(np.ones(9), device=2),
    "empty_like": lambda: cumem.empty_like(np.ones(9), device=2),
    "managed": lambda: cumem.empty_managed(9, device=2).fill(3),
    "register": lambda: cumem.register(np.ones(1 << 14), device=2).close(),
    "gather": lambda: cumem.gather(np.empty(9), [cumem.zeros(9, device=2)]),
    "broadcast": lambda: cumem.broadcast([cumem.zeros(9, device=2)], np.ones(9)),
    "save": lambda: cumem.save(T, cumem.zeros(1 << 20, device=2)),
    "savez": lambda: cumem.savez(T, w=cumem.zeros(1000, device=2)),
    "tofile": lambda: cumem.tofile(T, cumem.zeros(1 << 20, device=2)),
    "save_safetensors": lambda: cumem.save_safetensors(
        T, {"w": cumem.zeros(9, device=2), "v": np.ones(9)}
    ),
    "load": lambda: (
        cumem.save(T, np.ones(1 << 20)),
        cumem.load(T, kind="device", device=2),
    ),
    "load_safetensors": lambda: (
        cumem.save_safetensors(T, {"w": np.ones(9)}),
        cumem.load_safetensors(T, kind="device", device=2),
    ),
    "fromfile": lambda: (
        cumem.tofile(T, np.ones(1 << 20)),
        cumem.fromfile(T, kind="device", device=2),
    ),
    "prefetch": lambda: list(cumem.prefetch([np.ones(9)], device=2)),
    "chunks": lambda: list(cumem.chunks(np.ones(9), device=2)),
    "pipeline": lambda: cumem.pipeline(lambda x, y, s: 1, np.ones(9), device=2),
    "synchronize": lambda: cumem.synchronize(2),
    "Stream": lambda: cumem.Stream(device=2),
    "Workspace": lambda: cumem.Workspace("1MiB", device=2),
    "to_numpy": lambda: cumem.zeros(9, device=2).to_numpy(),
    "copy.deepcopy": lambda: copy.deepcopy(cumem.zeros(9, device=2)),
    "str": lambda: str(cumem.zeros(9, device=2)),
    "setitem": lambda: cumem.zeros(9, device=2).__setitem__(slice(2, 5), 1),
}


@pytest.mark.parametrize("call", NAMED.values(), ids=NAMED)
def test_a_call_that_names_a_device_opens_no_other(four, in_folder, call) -> None:
    call()
    assert contexts() == [2]


#: These calls name no device. They run in a block of device 2.
IN_BLOCK: dict[str, Callable[[], object]] = {
    "register": lambda: cumem.register(np.ones(1 << 14)).close(),
    "PinnedCollate": lambda: cumem.PinnedCollate()([{"x": np.ones(20000)}] * 2),
    "load": lambda: (cumem.save(T, np.ones(9)), cumem.load(T)),
    "fromfile, pinned": lambda: (
        cumem.tofile(T, np.ones(1 << 20)),
        cumem.fromfile(T, kind="pinned"),
    ),
    "unpickled": lambda: pickle.loads(pickle.dumps(cumem.zeros(9, kind="pinned"))),
    "array": lambda: cumem.array([1, 2]),
    "chunk_size": lambda: cumem.chunk_size(9),
    "memory_info": lambda: cumem.memory_info(),
}


@pytest.mark.parametrize("call", IN_BLOCK.values(), ids=IN_BLOCK)
def test_a_call_in_a_block_opens_its_device_alone(four, in_folder, call) -> None:
    with cumem.Device(2):
        call()
    assert contexts() == [2]


def test_numpy_pinned_in_a_block_opens_its_device_alone(four) -> None:
    with cumem.Device(2), cumem.numpy_pinned():
        np.ones(1 << 20)
    assert contexts() == [2]


def test_memory_locked_by_others_is_found_where_nothing_is_current(four) -> None:
    array = np.ones(1 << 14)
    # The device has a context before cumem opens one.
    with cuda_device(3):
        pass
    assert cumem.asbuffer(array).kind == "pageable"
    assert contexts() == [3]
    with cumem.register(array, device=3):
        assert in_thread(lambda: cumem.asbuffer(array).kind) == "pinned"
    assert contexts() == [3]


@pytest.mark.gpu
def test_memory_locked_by_pytorch_is_found_by_the_first_call() -> None:
    pytest.importorskip("torch")
    code = """
import torch, cumem
there, ordinary = torch.ones(9).pin_memory(), torch.ones(9)
assert cumem.asbuffer(ordinary).kind == "pageable"
assert cumem.asbuffer(there).kind == "pinned"
assert cumem.asbuffer(there.numpy()).kind == "pinned"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- devices beside each other ---------------------------------------------------------


def copies_of_rows(up: bool) -> tuple[list[cumem.Stream], list[cumem.Transfer]]:
    """Start a copy on each device, of a row of one page-locked batch.

    The first stream is shut. Return the streams and the transfers.
    """
    batch = cumem.zeros((DEVICES, 1024), kind="pinned")
    parts = [cumem.full(1024, 1.0 + d, device=d) for d in range(DEVICES)]
    streams = [cumem.Stream(device=d) for d in range(DEVICES)]
    for d in range(DEVICES):
        cumem.synchronize(d)
    session.shut(streams[0])
    copies = []
    for d, stream in enumerate(streams):
        ends = (parts[d], batch[d]) if up else (batch[d], parts[d])
        copies.append(cumem.copy_async(*ends, stream=stream))
    return streams, copies


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_copies_of_rows_by_several_devices_do_not_wait_for_each_other(four, up) -> None:
    streams, copies = copies_of_rows(up)
    for each in copies[1:]:
        each.wait()
    assert not copies[0].done
    testing.gate_open(streams[0])
    copies[0].wait()


def test_readers_of_the_same_bytes_do_not_wait_for_each_other(four) -> None:
    batch = cumem.zeros(1024, kind="pinned")
    streams = [cumem.Stream(device=d) for d in range(DEVICES)]
    session.shut(streams[0])
    copies = [
        cumem.copy_async(cumem.empty_device(1024, device=d), batch, stream=streams[d])
        for d in range(DEVICES)
    ]
    for each in copies[1:]:
        each.wait()
    assert not copies[0].done
    # The writer has to wait for all readers.
    writer = cumem.Stream(device=1)
    new = cumem.full(1024, 5.0, device=1, stream=writer)
    written = cumem.copy_async(batch, new, stream=writer)
    assert not writer.record().done
    testing.gate_open(streams[0])
    written.wait()
    assert batch.tolist() == [5.0] * 1024


def test_readers_wait_for_the_writer_of_their_bytes_alone(four) -> None:
    batch = cumem.zeros((2, 1024), kind="pinned")
    writer = cumem.Stream(device=0)
    source = cumem.full(1024, 7.0, device=0)
    cumem.synchronize(0)
    session.shut(writer)
    cumem.copy_async(batch[0], source, stream=writer)
    parts, markers = [], []
    for d, row in ((1, 0), (2, 0), (3, 1)):
        stream = cumem.Stream(device=d)
        parts.append(cumem.empty_device(1024, device=d))
        cumem.copy_async(parts[-1], batch[row], stream=stream)
        markers.append(stream.record())
    markers[2].synchronize()  # This is the copy of the row that nobody writes.
    assert [marker.done for marker in markers] == [False, False, True]
    testing.gate_open(writer)
    assert [part.tolist()[0] for part in parts] == [7.0, 7.0, 0.0]


@pytest.mark.parametrize("again", range(3))
def test_a_second_reader_waits_although_the_first_came_after_the_writer(
    four, again
) -> None:
    """A reader that came after the writer does not stand for the writer: the next
    reader still has to wait for the writer itself.
    """
    batch = cumem.zeros(1024, kind="pinned")
    writer, first, second = (cumem.Stream(device=d) for d in (0, 1, 2))
    source = cumem.full(1024, 7.0, device=0)
    cumem.synchronize(0)
    session.shut(writer)
    cumem.copy_async(batch, source, stream=writer)
    one, two = (cumem.empty_device(1024, device=d) for d in (1, 2))
    # From the second copy on, the stream already waits for the writer.
    for _ in range(again + 1):
        cumem.copy_async(one, batch, stream=first)
    cumem.copy_async(two, batch, stream=second)
    assert not first.record().done
    assert not second.record().done
    testing.gate_open(writer)
    assert two.tolist() == one.tolist() == [7.0] * 1024


def test_a_stream_asks_another_once_for_the_same_work(four) -> None:
    batch = cumem.zeros(1024, kind="pinned")
    writer, reader = (cumem.Stream(device=d) for d in (0, 1))
    there = cumem.empty_device(1024, device=1, stream=reader)
    cumem.copy_async(batch, cumem.zeros(1024, device=0), stream=writer).wait()
    # This copy makes the reader's stream wait for an event of the writer's stream. It
    # ends before the gate shuts, because the gate would hold up that event too.
    cumem.copy_async(there, batch, stream=reader).wait()
    session.shut(writer)
    # The writer's stream is busy with work on other memory.
    cumem.empty_device(8, device=0).fill(1, stream=writer)
    for _ in range(5):
        cumem.copy_async(there, batch, stream=reader).wait()
    testing.gate_open(writer)
    # The writer's stream has new work on the batch, so the reader must wait once more.
    session.shut(writer)
    cumem.copy_async(batch, cumem.zeros(1024, device=0), stream=writer)
    cumem.copy_async(there, batch, stream=reader)
    assert not reader.record().done
    testing.gate_open(writer)
    cumem.synchronize(1)


def test_work_of_others_on_a_buffer_is_in_the_way_of_all(four) -> None:
    batch = cumem.zeros((2, 1024), kind="pinned")
    theirs, ours = cumem.Stream(device=0), cumem.Stream(device=1)
    batch.record_stream(theirs)
    session.shut(theirs)
    cumem.empty_device(8, device=0).fill(1, stream=theirs)
    there = cumem.empty_device(1024, device=1)
    cumem.copy_async(there, batch[1], stream=ours)
    assert not ours.record().done
    testing.gate_open(theirs)
    cumem.synchronize(1)


def test_memory_that_several_devices_read_is_not_reused_before_all_are_done(
    four,
) -> None:
    streams, copies = copies_of_rows(True)
    pool = cumem.default_pool("pinned")
    # This drops the batch, too.
    del copies
    again = cumem.empty_pinned((DEVICES, 1024))
    stats = pool.stats()
    batch_nbytes = again.nbytes
    assert stats.live_nbytes + stats.in_flight_nbytes >= 2 * batch_nbytes
    testing.gate_open(streams[0])
    cumem.synchronize(0)
    del again


def test_streams_of_one_copy_each_do_not_gather(four) -> None:
    batch = cumem.zeros(1024, kind="pinned")
    there = cumem.empty_device(1024, device=1)
    counts = []
    for _ in range(100):
        stream = cumem.Stream(device=1)
        cumem.copy_async(there, batch, stream=stream).wait()
        counts.append(testing.counts()["streams"])
    assert max(counts[50:]) <= max(counts[:50])


def test_busy_streams_of_one_copy_each_do_not_gather_for_ever(four) -> None:
    batch = cumem.zeros(1024, kind="pinned")
    shut = cumem.Stream(device=1)
    session.shut(shut)
    counts = []
    for _ in range(200):
        stream = cumem.Stream(device=1)
        stream.wait(shut)
        there = cumem.empty_device(1024, device=1, stream=stream)
        cumem.copy_async(there, batch, stream=stream)
        counts.append(testing.counts()["streams"])
    assert len(counts) == 200
    testing.gate_open(shut)
    cumem.synchronize(1)
    assert batch.tolist() == [0.0] * 1024


# -- blocks and what is sent elsewhere -------------------------------------------------


@pytest.mark.parametrize("kind", ["pinned", "device", "mapped", "managed"])
def test_pool_of_another_device_is_not_entered_without_it(four, kind) -> None:
    pool = cumem.Pool(kind, device=3, limit="4 MiB")
    with pytest.raises(
        ValueError, match=r"device 3.*write 'with cumem\.Device\(3\), pool:'"
    ):
        pool.__enter__()
    with pytest.raises(ValueError, match="device 0 is current"), pool:
        pass
    with cumem.Device(3), pool:
        assert cumem.empty(8, kind=kind).device == 3
        with pytest.raises(cumem.OutOfMemoryError):
            cumem.empty(8 << 20, "u1", kind=kind)
        # This takes effect after the block.
        cumem.set_current_device(1)
        assert cumem.empty(8, kind=kind).device == 3
    assert pool.stats().allocation_count >= 2
    assert cumem.empty(8, kind=kind).device == 1


def test_registration_is_not_pickled_but_refused(four) -> None:
    array = np.ones(1 << 14)
    with cumem.register(array) as buffer:
        kept = cumem.register(np.ones(1 << 14))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(
                TypeError, match=r"cannot be pickled.*cumem\.register\(\)"
            ):
                pickle.dumps(kept, protocol)
        for duplicate in copy.copy, copy.deepcopy:
            with pytest.raises(
                TypeError, match="Registration cannot be pickled or copied"
            ):
                duplicate(kept)
        assert pickle.loads(pickle.dumps(buffer)).tolist() == array.tolist()
        kept.close()


@pytest.mark.parametrize("in_block", [True, False], ids=["block", "chosen"])
def test_threads_of_our_own_have_the_current_device_of_their_caller(
    four, in_block
) -> None:
    found: list[int] = []

    def batches() -> Iterator[np.ndarray]:
        for _ in range(3):
            found.append(current())
            yield np.ones(4)

    async def run() -> None:
        async for batch in cumem.prefetch(batches()):
            assert batch.device == 3

    if in_block:
        with cumem.Device(3):
            asyncio.run(run())
    else:
        cumem.set_current_device(3)
        asyncio.run(run())
    assert found == [3] * 3
    assert contexts() == [3]
