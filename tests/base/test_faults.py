# SPDX-License-Identifier: Apache-2.0
"""In the fault sweep each call of the driver may fail, and cumem loses nothing by it.

A scenario is a function that uses some part of the public API. `sweep` (support/faults.py)
counts the calls of the driver that a scenario makes, and runs the scenario once for each of
these calls, which then fails. The error must name the call, nothing may be left behind, and
the scenario must then succeed. The tests at the end sweep first uses and shutdowns. They
also check that the sweeps reached every operation of `csrc/runtime/ops.h`, each of which is
a call of the driver or of CUDA's runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import mmap
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.faults import Swept, sweep

import cumem
from cumem.tools.measuring import raw_copies
from cumem.transfers import collating

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

SCENARIOS: dict[str, Callable[[], None]] = {}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    """Add a function to the scenarios, under its name."""
    SCENARIOS[function.__name__] = function
    return function


#: These sizes never repeat, so that no cached block fits.
fresh_sizes = itertools.count(1_000, 100)


@scenario
def allocate_every_kind() -> None:
    size = next(fresh_sizes)
    buffers = [
        cumem.empty_pinned(size, write_combined=True),
        cumem.empty_mapped(size),
        cumem.empty_managed(size),
        cumem.empty_managed(size, attach="host"),
        cumem.empty_device(size),
        cumem.empty_device(size, device=1),
    ]
    del buffers
    cumem.trim()


@scenario
def run_out_of_memory() -> None:
    pool = cumem.Pool("mapped", limit=4 << 20)
    other = cumem.Pool("mapped")
    kept = [pool.allocate(1 << 20)]
    used = other.allocate(1 << 20)
    used.fill(1, stream=cumem.Stream())
    del used
    with cumem.on_out_of_memory(lambda *_: kept.clear()):
        large = pool.allocate(4 << 20)
    with contextlib.suppress(cumem.OutOfMemoryError):
        pool.allocate(1 << 40)
    del large
    pool.close()
    other.close()


@scenario
def load_batches() -> None:
    """Load batches, one of which comes through a slot as if a worker had sent it."""
    rows = list(np.ones((3, next(fresh_sizes))))
    collate = cumem.PinnedCollate(2, 1 << 20)
    sent = pickle.dumps(collating._Message(collate._ring, collating._gathered(rows)))
    batches = [pickle.loads(sent), cumem.PinnedCollate()(rows), {"row": rows[0]}]
    for batch in cumem.prefetch(batches, depth=1):
        del batch
    batches.clear()
    collate.trim()


@scenario
def use_pools_of_every_kind() -> None:
    for kind in ("device", "pinned", "mapped", "managed"):
        pool = cumem.Pool(kind, limit="10%")
        with pool:
            buffer = cumem.zeros(next(fresh_sizes), kind=kind)
        assert pool.stats().live_count == 1
        pool.close()
        del buffer
    plain = cumem.Pool("device", segments="malloc")
    plain.allocate(1 << 20)
    plain.close()
    assert cumem.trim() >= 0
    cumem.memory_info()


@scenario
def copy_host_to_device_and_back() -> None:
    buffer = cumem.empty_device((64, 64), "f4")
    data = np.arange(4096, dtype="f4").reshape(64, 64)
    cumem.copy(buffer, data)
    out = np.zeros((64, 64), "f4")
    cumem.copy(out, buffer)
    assert (out == data).all()


@scenario
def copy_rows_and_strided() -> None:
    buffer = cumem.empty_device((64, 64), "f4")
    data = np.arange(4096, dtype="f4").reshape(64, 64)
    pinned = cumem.array(data, kind="pinned")
    cumem.copy(buffer[:, :32], pinned[:, 32:])
    cumem.copy(buffer[:, :32], data[:, 32:])
    cumem.copy(buffer[:, 32:], data[:, ::2])
    cumem.copy(buffer[::2, ::-2], data[::2, ::2])
    other = cumem.empty_device((64, 64), "f4")
    cumem.copy(other.T, buffer)
    out = np.zeros((32, 32), "f4")
    cumem.copy(out, buffer[::2, ::-2])
    assert (out == data[::2, ::2]).all()


@scenario
def copy_and_read_views_of_one_buffer() -> None:
    data = np.arange(4096, dtype="f4").reshape(64, 64)
    for kind in ("device", "managed", "pinned"):
        buffer = cumem.array(data, kind=kind)
        turned = buffer.T
        assert (turned.ravel().to_numpy() == data.T.ravel()).all()
        assert (turned.flatten("F").to_numpy() == data.ravel()).all()
        assert (turned.copy("K").to_numpy() == data.T).all()
        assert (buffer.astype("f4", "F").to_numpy() == data).all()
        assert buffer.reshape(2, -1).item(1, 7) == data.reshape(2, -1)[1, 7]
        assert float(turned[1, 0]) == 1
        assert bytes(turned[:2]) == data.T[:2].tobytes()
        assert turned[0].tolist() == data[:, 0].tolist()


@scenario
def broadcast_to_two_devices() -> None:
    dsts = [cumem.empty_device((2, 150_000), "i4", device=d) for d in (0, 1)]
    dsts.append(cumem.empty_device((2, 300_000), "i4", device=1)[:, ::2])
    source = np.arange(300_000, dtype="i4").reshape(2, 150_000)
    cumem.broadcast(dsts, source[:, ::-1])
    for handle in cumem.broadcast_async(dsts, source, stream=cumem.Stream(device=1)):
        handle.wait()
    for dst in dsts:
        assert (values.get(dst) == source).all()


@scenario
def scatter_and_gather() -> None:
    halves = [cumem.empty_device((1, 200_000), "i4", device=d) for d in (0, 1)]
    source = np.arange(400_000, dtype="i4").reshape(2, 200_000)
    cumem.scatter(halves, source)
    target = cumem.zeros((2, 200_000), "i4", "device")
    cumem.gather(target, halves)
    assert (values.get(target) == source).all()
    cumem.broadcast([half.reshape(2, -1) for half in halves], target[:, ::2])


@scenario
def copy_between_devices() -> None:
    a = cumem.array(np.arange(1000, dtype="i4"))
    b = cumem.empty_device(1000, "i4", device=1)
    cumem.copy(b, a)
    out = np.zeros(1000, "i4")
    cumem.copy(out, b)
    assert (out == np.arange(1000)).all()


@scenario
def fill_every_pattern() -> None:
    for dtype in ("u1", "u2", "f4", "f8", "c16", "V3"):
        buffer = cumem.empty_device(100, dtype)
        buffer.fill(np.frombuffer(bytes(range(1, 1 + buffer.itemsize)), dtype)[0])
        buffer[::3].fill(np.zeros((), dtype))
    cumem.zeros(10, kind="managed")
    cumem.full(10, 3.0, kind="pinned")


@scenario
def fill_in_a_streams_order() -> None:
    stream = cumem.Stream()
    for kind in ("mapped", "managed"):
        buffer = cumem.empty(1000, "f8", kind)
        buffer.fill(0, stream=stream)
        buffer[::2].fill(1.5, stream=stream)
        assert buffer.numpy().sum() == 750
    buffer.prefetch_pages(0)
    buffer.fill(2.5)
    assert (buffer.numpy() == 2.5).all()


@scenario
def copy_async_on_a_stream() -> None:
    stream = cumem.Stream(priority=-1)
    source = cumem.array(np.arange(1000, dtype="i4"), kind="pinned")
    middle = cumem.empty_device(1000, "i4")
    out = np.zeros(1000, "i4")
    first = cumem.copy_async(middle, source, stream=stream)
    second = cumem.copy_async(out, middle, stream=stream)
    first.wait()
    second.wait()
    assert second.seconds >= 0
    assert (out == np.arange(1000)).all()


@scenario
def copy_async_in_the_background() -> None:
    middle = cumem.empty_device(1000, "i4")
    handle = cumem.copy_async(middle, np.arange(1000, dtype="i4"))
    handle.wait()
    out = np.zeros(1000, "i4")
    cumem.copy_async(out, middle).wait()
    assert (out == np.arange(1000)).all()


def many_pairs(to: object, source: object) -> list[tuple[object, object]]:
    """Return two pairs that swap the halves, so that cumem cannot join them to one copy."""
    width = 400
    order = range(0, 800, width)
    return [
        (to[i : i + width], source[j : j + width])  # type: ignore[index]
        for i, j in zip(order, reversed(order), strict=True)
    ]


@scenario
def copy_many_at_once() -> None:
    data = np.arange(800, dtype="i4")
    pinned = cumem.array(data, kind="pinned")
    first, second = (cumem.empty_device(800, "i4", device=d) for d in (0, 1))
    out = np.zeros(800, "i4")
    cumem.copy_many(many_pairs(first, pinned))
    cumem.copy_many(many_pairs(second, first))
    cumem.copy_many_async(many_pairs(out, second), stream=cumem.Stream(device=1)).wait()
    cumem.copy_many(many_pairs(first, out))


@scenario
def copy_many_in_every_way() -> None:
    data = np.arange(800, dtype="i4")
    pinned = cumem.array(data, kind="pinned")
    devices = [cumem.empty_device(800, "i4", device=d) for d in (0, 1, 0, 0)]
    full = cumem.array(data)
    out, other = np.zeros(800, "i4"), np.zeros(800, "i4")
    pairs = many_pairs(devices[0], pinned) + many_pairs(devices[1], full)
    pairs += many_pairs(devices[2], data) + many_pairs(out, full)
    pairs += many_pairs(other, data)
    pairs += [(devices[3][::2], pinned[::2])]
    cumem.copy_many_async(pairs).wait()
    assert (out == np.roll(data, 400)).all()


@scenario
def copy_many_one_after_the_other() -> None:
    full = cumem.array(np.arange(800, dtype="i4"))
    device = cumem.empty_device(800, "i4")
    cumem.copy_many([*many_pairs(device, full), (full[::2], device[:400])])


@scenario
def copy_many_of_one_size() -> None:
    data = np.arange(800, dtype="i4").reshape(400, 2)
    pinned = cumem.array(data, kind="pinned")
    device, out = cumem.empty_device((400, 2), "i4"), cumem.empty_pinned((400, 2), "i4")
    order = np.random.default_rng(0).permutation(400).tolist()
    cumem.copy_many([(device[i], pinned[k]) for i, k in enumerate(order)])
    cumem.copy_many_async([(out[i], device[i]) for i in order]).wait()
    assert (out.numpy() == data[order]).all()


@scenario
def copy_rows_in_every_way() -> None:
    data = np.arange(800, dtype="i4").reshape(200, 4)
    rows = np.arange(200)[::-1]
    pinned = cumem.array(data, kind="pinned")
    first, second = (cumem.empty_device((200, 4), "i4", device=d) for d in (0, 1))
    out = np.zeros((200, 4), "i4")
    cumem.copy_rows(first, pinned, src_rows=rows)
    cumem.copy_rows_async(second, first, dst_rows=rows, stream=cumem.Stream()).wait()
    cumem.copy_rows_async([out, first], [second, data], src_rows=rows).wait()
    assert (out == data[rows]).all()


@scenario
def copy_rows_of_ordinary_memory() -> None:
    """Copy more rows than a single launch of the table kernel could copy."""
    data = np.arange(1200, dtype="i4").reshape(300, 4)
    rows = np.random.default_rng(0).permutation(300)
    device, out = cumem.empty_device((300, 4), "i4"), np.zeros((300, 4), "i4")
    cumem.copy_rows(device, data, dst_rows=rows)
    cumem.copy_rows_async(out, device, src_rows=rows, stream=cumem.Stream()).wait()
    cumem.copy_rows_async(device, out, src_rows=rows).wait()
    assert (out == data).all()


@scenario
def copy_rows_by_numbers_on_a_device() -> None:
    data = np.arange(800, dtype="i4").reshape(200, 4)
    rows = cumem.array(np.arange(200)[::-1], kind="device")
    pinned = cumem.array(data, kind="pinned")
    device, out = cumem.empty_device((200, 4), "i4"), np.zeros((200, 4), "i4")
    cumem.copy_rows(device, pinned, src_rows=rows)
    cumem.copy_rows_async(device, device, np.arange(200), rows).wait()
    cumem.copy_rows(out, device, src_rows=rows, stream=cumem.Stream())
    assert (out == data[::-1]).all()


@scenario
def copy_rows_that_overlap() -> None:
    data = np.arange(800, dtype="i4").reshape(200, 4)
    rows = np.random.default_rng(0).permutation(200)
    device = cumem.array(data, kind="device")
    cumem.copy_rows(device, device, src_rows=rows)
    cumem.copy_rows_async(device, device, src_rows=rows, stream=cumem.Stream()).wait()
    assert (values.get(device) == data[rows[rows]]).all()


@scenario
def copy_rows_by_a_plan() -> None:
    data = np.arange(800, dtype="i4").reshape(200, 4)
    sources = [data, cumem.array(data, kind="pinned")]
    rows = np.random.default_rng(0).permutation(200)
    for src_rows in (rows, cumem.array(rows, kind="device")):
        for source, limit in zip(sources, (None, 4), strict=True):
            targets = [cumem.zeros((200, 4), "i4", "device") for _ in range(2)]
            plan = cumem.RowPlan(targets, [source] * 2, None, src_rows, max_sms=limit)
            with plan:
                plan.copy(layer=1)
                plan.copy_async(layer=0).wait()
                for transfer in plan.copy_layers(stream=cumem.Stream()):
                    transfer.wait()
                plan.check()
            assert all((values.get(target) == data[rows]).all() for target in targets)


@scenario
def take_rows_to_a_new_buffer() -> None:
    data = np.arange(800, dtype="i4").reshape(200, 4)
    assert (values.get(cumem.take_rows(data, [7, 3])) == data[[7, 3]]).all()


@scenario
def follow_the_progress_of_a_copy() -> None:
    seen = []
    target, source = cumem.empty_device(3 << 20, "u1"), np.zeros(3 << 20, "u1")
    cumem.copy(target[::2], source[::2], progress=lambda *args: seen.append(args))
    assert seen[-1] == (3 << 19, 3 << 19)


@scenario
def streams_and_events() -> None:
    stream = cumem.Stream()
    other = cumem.Stream.from_external(stream.handle)
    start, end = cumem.Event(), cumem.Event()
    start.record(stream)
    buffer = cumem.empty_device(1000, "u1")
    buffer.fill(1, stream=stream)
    buffer.record_stream(other)
    end.record(stream)
    end.synchronize()
    assert end.done
    assert end.seconds_since(start) >= 0
    cumem.Stream().wait(end)
    assert not stream.is_capturing
    assert stream.priority == other.priority == 0
    stream.synchronize()
    assert stream.done


def on_own_pages(count: int) -> np.ndarray:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, count * 8, flags=flags), "f8")


#: Each of these arrays has pages to itself, and is the same in each run. Pages whose
#: unlocking failed stay locked until the next try, and a new array over some of them would
#: span two registrations.
WHOLE, PART = on_own_pages(100_000), on_own_pages(100_000)


@scenario
def register_ordinary_memory() -> None:
    with cumem.register(WHOLE, mapped=True) as buffer:
        device = cumem.empty_device(100_000)
        cumem.copy(device, buffer)
    with cumem.register(PART[10:50_000]) as buffer:
        assert buffer.nbytes == 49_990 * 8


@scenario
def share_page_locked_memory() -> None:
    shared = cumem.shared_pinned(f"faults of {os.getpid()}", 100_000, "u1")
    shared.numpy()[:] = 5
    device = cumem.empty_device(100_000, "u1")
    cumem.copy(device, shared)
    cumem.copy_many([(shared[:10], device[10:20]), (shared[20:30], device[:10])])
    assert (shared.numpy() == 5).all()
    assert pickle.loads(pickle.dumps(shared[5:])).ptr == shared.ptr + 5


@scenario
def await_an_event() -> None:
    async def main() -> None:
        stream = cumem.Stream()
        stream.record()
        cumem.empty_device(1 << 20, "u1").fill(1, stream=stream)
        await stream.record()

    asyncio.run(main())


@scenario
def call_back_after_a_transfer() -> None:
    reported: list[cumem.Transfer] = []
    source = cumem.zeros(1 << 20, "u1", "pinned")
    transfer = cumem.copy_async(cumem.empty_device(1 << 20, "u1"), source)
    transfer.add_done_callback(reported.append)
    transfer.wait()
    session.wait_until(lambda: reported)
    reported.clear()


@scenario
def managed_prefetch() -> None:
    buffer = cumem.zeros(100_000, "u1", "managed")
    buffer.prefetch_pages(0)
    assert buffer.prefetch_location == cumem.Device(0)
    buffer.prefetch_pages("host")
    assert buffer.numpy().sum() == 0


@scenario
def steer_managed_memory() -> None:
    buffer = cumem.zeros(1 << 20, "u1", "managed")
    buffer.advise(read_mostly=True, preferred_location="cpu", accessed_by=[0, 1])
    assert buffer.read_mostly
    assert len(buffer.accessed_by) == 2
    buffer.page_residency()
    stream = cumem.Stream()
    cumem.prefetch_pages([buffer[: 1 << 19], buffer[1 << 19 :]], 0, stream)
    stream.synchronize()
    with buffer.on(1):
        pass
    if session.emulated_driver() >= 13000:
        buffer.discard()
        buffer.fill(2)


@scenario
def go_through_tiles() -> None:
    buffer = cumem.zeros((4, 1 << 16), "u1", "managed")
    for _, tile in cumem.tiles(buffer, 1 << 16):
        tile.fill(3, stream=cumem.current_stream())
    assert (values.get(buffer) == 3).all()


@scenario
def import_device_memory() -> None:
    buffer = cumem.empty_device(100, "f4")

    class Exporter:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (100,),
            "typestr": "<f4",
            "data": (buffer.ptr, False),
            "version": 3,
            "stream": 1,
        }

    view = cumem.asbuffer(Exporter())
    view.fill(3)
    assert (values.get(buffer) == 3).all()


@scenario
def ask_the_devices() -> None:
    assert cumem.device_count() == 2
    device = cumem.Device(0)
    assert device.name
    assert device.attributes()["compute_major"] > 0
    assert device.can_access_peer(1) in (True, False)
    device.synchronize()
    free, total = device.memory_info()
    assert free <= total
    about = cumem.info.about()
    assert about.driver_version >= (12, 0)
    assert about.runtime_version >= (12, 0)


@scenario
def export_to_numpy_and_drop() -> None:
    buffer = cumem.zeros(1000, "u1", "pinned")
    view = np.from_dlpack(buffer)
    assert view.sum() == 0
    del view, buffer
    cumem.trim(wait=False)  # records what the dropped block has to wait for
    cumem.empty_pinned(1000, "u1")
    device = cumem.zeros(1000, "u1")
    assert np.from_dlpack(device, device="cpu").sum() == 0


@scenario
def read_and_write_files() -> None:
    """Move more than one chunk, from memory of both devices, contiguous and strided."""
    content = np.arange(9 << 17, dtype="i4")
    with tempfile.TemporaryFile() as file:
        source = cumem.array(content)
        cumem.tofile(file, source)
        cumem.write_ranges(file, [(4, source[1:2000:2])])
        cumem.write_ranges(file, [(0, content[:1001])])
        # This array maps the file itself. Writing could change bytes of the array that are
        # still to be read, so cumem copies all of them first.
        mapped = np.memmap(file, "i4", "r+")
        cumem.write_ranges(file, [(0, mapped[999::-1])])
        cumem.read_ranges(file, [(0, mapped[999::-1])])
        del mapped
        stream = cumem.Stream()
        row = cumem.empty_device(content.shape, "i4")
        rows = cumem.empty_device((1000, 2), "i4")
        other = cumem.empty_device(1000, "i4", device=1)
        host = cumem.empty_pinned(2000, "i4")
        cumem.read_ranges(file, [(0, row)], stream=stream)
        cumem.read_ranges(file, [(0, rows[:, 1]), (40, other), (80, host[::2])])
        assert (values.get(row) == content).all()
        assert (values.get(rows)[:, 1] == content[:1000]).all()
        assert (values.get(other) == content[10:1010]).all()
        assert (host.numpy()[::2] == content[20:1020]).all()


@scenario
def load_and_save_numpys_files() -> None:
    content = np.arange(1000.0).reshape(10, 100)
    with tempfile.TemporaryDirectory() as folder:
        source = cumem.array(content)
        cumem.save(f"{folder}/a.npy", source.T)
        cumem.savez(f"{folder}/a.npz", source, x=source[:, ::2])
        np.savez_compressed(f"{folder}/b.npz", content)
        assert (values.get(cumem.load(f"{folder}/a.npy")) == content.T).all()
        loaded = cumem.load(f"{folder}/a.npz", kind="pinned")
        assert (values.get(loaded["x"]) == content[:, ::2]).all()
        packed = cumem.load(f"{folder}/b.npz")
        assert (values.get(packed["arr_0"]) == content).all()
        assert len(os.listdir(folder)) == 3


@scenario
def keep_pools_from_forked_children() -> None:
    for fork in ("share", "omit"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # about small pages
            pool = cumem.Pool("pinned", fork=fork)  # type: ignore[arg-type]
        buffer = pool.allocate(next(fresh_sizes))
        buffer.fill(3)
        device = cumem.array(buffer)
        out = np.zeros(buffer.shape, "u1")
        cumem.copy(out, device)
        assert (out == 3).all()
        del buffer
        pool.trim()
        pool.close()


def sleep_and_wake_with(**how: Any) -> None:
    """Whatever fails, the region is awake with its bytes, or asleep and can be woken."""
    region = cumem.Region("weights", host="release")
    size = next(fresh_sizes)
    stream = cumem.Stream()
    kept, dropped = (cumem.empty_device(size, "u1", pool=region.pool) for _ in range(2))
    kept.fill(7, stream=stream)
    dropped.fill(8, stream=stream)
    errors: list[cumem.CudaError] = []
    for _ in range(2):  # a second try has to succeed
        try:
            region.sleep(**how)
        except cumem.CudaError as error:
            errors.append(error)
    assert region.is_asleep
    dropped.free()
    for _ in range(2):
        try:
            region.wake()
        except cumem.CudaError as error:
            errors.append(error)
    assert not region.is_asleep
    assert region.pool.stats().asleep_nbytes == 0
    out = np.empty(size, "u1")
    cumem.copy(out, kept)
    assert (out == 7).all()
    region.close()
    if errors:
        raise errors[0]


@scenario
def sleep_and_wake() -> None:
    sleep_and_wake_with(keep=True)


@scenario
def sleep_in_files_and_wake() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sleep_and_wake_with(keep="file", path=folder)
        assert os.listdir(folder) == []


@scenario
def sleep_without_contents() -> None:
    region = cumem.Region("cache", 1)
    buffer = region.pool.allocate(next(fresh_sizes))
    address = buffer.ptr
    cumem.sleep("cache", keep=False)
    cumem.wake("cache")
    assert buffer.ptr == address
    region.close()


@scenario
def spill_and_wake() -> None:
    """Whatever fails, each buffer has its bytes, on the device or in pinned memory."""
    pool = cumem.Pool("device", spill="pinned", limit="12MiB")
    size = (4 << 20) + next(fresh_sizes)
    errors: list[cumem.CudaError] = []
    made: list[cumem.DeviceBuffer] = []
    for _ in range(3):
        for _ in range(2):  # a second try has to succeed
            try:
                buffer = pool.allocate(size)
            except cumem.CudaError as error:
                errors.append(error)
            else:
                break
        made.append(buffer)
        for _ in range(2):
            try:
                buffer.fill(len(made))
            except cumem.CudaError as error:
                errors.append(error)
    made[1].free()
    out = np.empty(size, "u1")
    for number in (0, 2):
        for _ in range(2):
            try:
                cumem.copy(out, made[number])
            except cumem.CudaError as error:
                errors.append(error)
        assert out.min() == out.max() == number + 1
    del buffer, made[:]
    pool.close()
    if errors:
        raise errors[0]


@scenario
def trim_pools_to_a_limit() -> None:
    pool = cumem.Pool("pinned")
    kept, cached = pool.allocate(100_000), pool.allocate(1 << 20)
    cumem.copy(cumem.empty_device(1 << 20, "u1"), cached)
    del cached
    pool.limit = 1 << 19
    with cumem.limit("pinned", "1MiB"):
        pass
    del kept
    pool.close()


@scenario
def move_a_tree_to_a_device_and_back() -> None:
    n = next(fresh_sizes)
    tree = {"a": np.arange(n), "b": [cumem.full(n, 2, "i2", "pinned"), (np.ones(3),)]}
    there = cumem.to_device(tree, 1)
    back = cumem.to_host(cumem.to_device(there, 0, stream=cumem.Stream()))
    assert (values.get(back["a"]) == tree["a"]).all()
    assert (values.get(back["b"][0]) == 2).all()
    assert (values.get(back["b"][1][0]) == 1).all()


@scenario
def convert_on_the_way() -> None:
    data = np.arange(3000, dtype="f8").reshape(30, 100)
    device, row = cumem.empty_device((30, 100), "f4"), cumem.empty_device(100, "f4")
    cumem.copy(device, data, casting="same_kind")
    cumem.copy_many(
        [(row, data[0]), (device[1:, ::2], data[1:, ::2])], casting="unsafe"
    )
    cumem.broadcast(
        [device, cumem.empty_device((30, 100), "f4", device=1)],
        data[:1],
        casting="same_kind",
    )
    whole = cumem.array(np.arange(3000, dtype="i2").reshape(30, 100)).astype("f4")
    assert (values.get(device) == data[0]).all()
    assert (values.get(row) == data[0]).all()
    assert (values.get(whole) == data).all()


@scenario
def write_files_through_to_the_disk() -> None:
    source = cumem.array(np.arange(1000.0))
    with tempfile.TemporaryDirectory() as folder:
        cumem.tofile(f"{folder}/a.bin", source, fsync=True)
        cumem.save(f"{folder}/a.npy", source[::2], fsync=True)
        cumem.savez(f"{folder}/a.npz", x=source, fsync=True)
        for i in (1, 2):
            name = f"{folder}/{i}.safetensors"
            cumem.save_safetensors(
                name,
                {f"x{i}": source, "e": source[:0]} if i == 1 else {f"x{i}": source},
                fsync=True,
            )
        loaded = cumem.load_safetensors(
            [f"{folder}/1.safetensors", f"{folder}/2.safetensors"]
        )
        assert (values.get(loaded["x2"]) == np.arange(1000.0)).all()
        assert loaded["e"].shape == (0,)
        assert len(os.listdir(folder)) == 5


class Optimizer:
    """An optimizer as PyTorch has it, without PyTorch."""

    def __init__(self, *parameters: object) -> None:
        self.param_groups = [{"params": [*parameters]}]
        self.state: dict[object, object] = {}
        self.hooks: list[Callable[..., object]] = []

    def register_step_pre_hook(self, hook: Callable[..., object]) -> None:
        self.hooks.append(hook)

    def step(self) -> None:
        for hook in self.hooks:
            hook(self, (), {})


@scenario
def write_a_file_before_a_step() -> None:
    source = cumem.array(np.arange(1000.0))
    optimizer = Optimizer(source)
    with tempfile.TemporaryDirectory() as folder:
        tensors = {"a": source[::2], "b": cumem.array(2.0)}
        for limit in (None, 8):
            saving = cumem.save_safetensors_async(
                f"{folder}/a.safetensors",
                tensors,
                before=optimizer,
                host_limit=limit,
            )
            try:
                optimizer.step()
            finally:
                saving.wait()
        loaded = cumem.load_safetensors(f"{folder}/a.safetensors", kind="host")
        assert (values.get(loaded["a"]) == np.arange(1000.0)[::2]).all()
        assert len(os.listdir(folder)) == 1


@scenario
def write_a_file_in_the_background() -> None:
    source = cumem.array(np.arange(1000.0))
    with tempfile.TemporaryDirectory() as folder:
        tensors = {"a": source, "b": source[::2]}
        cumem.save_safetensors_async(f"{folder}/a.safetensors", tensors).wait()
        cumem.save_safetensors_async(
            f"{folder}/a.safetensors", tensors, host_limit=source.nbytes
        ).wait()
        loaded = cumem.load_safetensors(f"{folder}/a.safetensors", kind="host")
        assert (values.get(loaded["b"]) == np.arange(1000.0)[::2]).all()
        assert len(os.listdir(folder)) == 1


@scenario
def go_through_chunks() -> None:
    data = np.arange(1 << 16, dtype="i4").reshape(-1, 64)
    chunked = cumem.chunks(data, nbytes=1 << 16, depth=1)
    seen = [int(values.get(chunk).sum()) for _, chunk in chunked]
    assert sum(seen) == int(data.sum())
    out = np.zeros_like(data)

    def double(part: cumem.Buffer, to: cumem.Buffer, stream: cumem.Stream) -> None:
        cumem.copy_async(to, part, stream=stream)

    cumem.pipeline(double, data, out, rows=300)
    assert (out == data).all()


@scenario
def type_what_others_type() -> None:
    with cumem.Device(1):
        buffer = cumem.full_like(np.ones((30, 40)), 2.5)
        assert buffer.device == 1
        assert cumem.zeros_like(buffer, kind="managed").tolist()[0][0] == 0
        assert float(buffer[0, 0]) == buffer.item(1) == 2.5
        assert cumem.asarray(buffer.T[::2], order="C").shape == (20, 30)
        assert cumem.asarray(buffer, kind="pinned").flatten("F").size == 1200
        event = cumem.Stream().record()
        event.wait()
        assert event.elapsed_time(cumem.current_stream().record()) >= 0
        cumem.synchronize()
    assert cumem.current_device() == 0


@scenario
def measure_the_runtimes_own_copies() -> None:
    host = cumem.zeros(1000, "u1", "pinned")
    device = cumem.full(1000, 7, "u1")
    cumem.Device(0).synchronize()  # the raw copies would not wait for the fill
    stream = cumem.Stream()
    assert len(raw_copies(host, device, stream, 0.0)) == 5
    assert (host.numpy() == 7).all()


#: What these operations make is kept, so that only the first use of a runtime calls them.
COLD = ["device_set", "module_load", "module_function"]

swept: dict[str, Swept] = {}


@pytest.fixture
def emulated() -> Iterator[session.Runtime]:
    """Open the emulated device with streams that are late by 20 us at most.

    A scenario runs hundreds of times, and spends much of each run waiting for streams.
    Where streams are later, other tests ask whether work is still done in its order.
    """
    with session.opened("emulated", max_delay_us=20) as opened:
        yield opened


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_runtime_call_may_fail(emulated, name: str) -> None:
    swept[name] = sweep(SCENARIOS[name])


@pytest.mark.parametrize("op", COLD)
def test_first_use_may_fail(emulated, op: str) -> None:
    first = cumem.Device(1).synchronize if op == "device_set" else copy_rows_and_strided
    raised = 0
    for nth in range(1, 10):  # cumem goes on after some failures
        session.testing.plan_fault(op, nth, 999)
        try:
            first()
        except cumem.CudaError as error:
            raised += error.code == 999
        injected = session.testing.last_injected_fault()
        session.testing.plan_fault(None, 0)
        if injected is None:
            break
        assert injected == op
    assert raised >= 1
    first()


def test_a_call_that_only_asks_may_fail(emulated) -> None:
    asks = {
        "driver_version": cumem.info.about,
        "runtime_version": cumem.info.about,
        "device_count": cumem.device_count,
    }
    for op, ask in asks.items():
        session.testing.plan_fault(op, 1, 999)
        with pytest.raises(cumem.CudaError):
            ask()
        assert session.testing.last_injected_fault() == op
        session.testing.plan_fault(None, 0)
        ask()


def shut_down_after_work() -> list[BaseException]:
    """Shut down, and return the errors of whatever could not be given back."""
    found: list[BaseException] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.unraisablehook", lambda u: found.append(u.exc_value))
        try:
            cumem.shutdown(reset_devices=True)
        except cumem.CudaError as error:
            found.append(error)
    return found


def fail_shutdown_at_every_call() -> set[str]:
    """Shut down again and again, each time with a later call failing.

    Returns the names of the operations that failed. If an error was raised, the name is the
    one in the error, which is CUDA's. Otherwise it is the name in ops.h.
    """
    testing = session.testing
    injected_ops = set()
    quiet = 0  # the number of failures in a row that were not reported
    for nth in range(1, 400):
        with session.opened("emulated"):
            copy_rows_and_strided()
            copy_async_in_the_background()
            session.leftovers()
            testing.plan_fault(None, nth, 999)
            found = shut_down_after_work()
            if testing.opened():  # the runtime stays open if nothing was given back yet
                injected_ops.add(testing.last_injected_fault())
                testing.plan_fault(None, 0)
                cumem.shutdown(reset_devices=True)
        for error in found:
            assert isinstance(error, cumem.CudaError)
            injected_ops.add(error.call)
        quiet = 0 if found else quiet + 1
        # A shutdown first asks each stream, on its device, whether it is capturing.
        # Failures of these sixty calls are not reported, so the loop goes on beyond them.
        if quiet == 120:
            break
    return injected_ops


def test_shutdown_may_fail_at_every_call() -> None:
    expected = {
        "cudaDeviceReset",
        "cuModuleUnload",
        "cuMemUnmap",
        "cudaHostUnregister",
    }
    injected_ops = fail_shutdown_at_every_call()
    # A worker thread may make its last call late, and then that call fails in the place of
    # the shutdown's. A few more rounds reach the operations that were missed.
    for _ in range(3):
        if not expected <= injected_ops:
            injected_ops |= fail_shutdown_at_every_call()
    assert expected <= injected_ops


def test_sweep_reached_every_operation(emulated) -> None:
    """Each operation must have succeeded in one call and failed in another."""
    if len(swept) != len(SCENARIOS):
        pytest.skip("this test needs the other tests of the file: run without -k")
    available = {
        name
        for name, _, oldest in session.testing.op_names()
        if oldest <= session.emulated_driver()
    }
    # Other tests of this file sweep the shutdown and the first use.
    elsewhere = {"device_reset", "module_unload", *COLD}
    # A pool gets its memory from a source. The source makes these calls when it opens, when
    # it ends with its pool, or when it has to use cudaMalloc because memory cannot be
    # mapped. No scenario does this, so tests/c sweeps these calls.
    elsewhere |= {
        "address_reserve",
        "address_free",
        "physical_granularity",
        "device_alloc",
    }
    elsewhere |= {"peer_enable"}  # once for each pair of devices: test_peers.py
    elsewhere |= {"context_is_active"}  # for a device that cumem never entered: tests/c
    succeeded = set().union(*(s.succeeded for s in swept.values()))
    failed = set().union(*(s.failed for s in swept.values()))
    assert available - succeeded - elsewhere == set()
    assert available - failed - elsewhere == set()


@pytest.mark.parametrize(
    ("op", "make"),
    [
        ("host_register", cumem.empty_pinned),
        ("host_alloc", functools.partial(cumem.empty_pinned, write_combined=True)),
        ("physical_create", cumem.empty_device),
        ("address_map", cumem.empty_device),
        ("managed_alloc", cumem.empty_managed),
    ],
)
def test_out_of_memory_is_retried_then_raised(emulated, op, make) -> None:
    testing = session.testing
    testing.plan_fault(op, 1, 2)  # once: the retry succeeds
    make(1 << 20)
    assert testing.last_injected_fault() == op
    testing.plan_fault(op, 1, 2, repeat=True)
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        make(2 << 20)  # more than what is in the cache
    testing.plan_fault(None, 0)
    assert caught.value.code == 2
    make(2 << 20)
