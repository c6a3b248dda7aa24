# SPDX-License-Identifier: Apache-2.0
"""Tests of copies between GPUs, whether or not one may use the memory of the other.

The emulated devices allow or refuse access to each other. The tests look at the route
of a copy, at the calls that enable access, and at the bytes that arrive.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support import session, values
from support.session import testing

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

# The runtime itself stages copies that are shorter than this.
LONG = 9 << 20
SHAPE = (60, 40)

#: Each entry has the target's and the source's view of SHAPE and the expected route.
#: The arrays are twice as large along each axis.
LAYOUTS = {
    "rows to packed": (np.s_[:60, :40], np.s_[:60, 10:50], "kernel"),
    "packed to columns": (np.s_[:60, ::2], np.s_[:], "kernel"),
    "columns to packed": (np.s_[:], np.s_[::2, ::2], "kernel"),
    "backwards": (np.s_[:], np.s_[::-1, ::-1], "kernel"),
    "columns to columns": (np.s_[:60, ::2], np.s_[::2, ::2], "peer"),
    "both rows": (np.s_[:60, :40], np.s_[::2, 40:], "kernel"),
}


@pytest.fixture
def apart() -> Iterator[session.Runtime]:
    """Open three devices that cannot use each other's memory."""
    with session.opened("emulated", device_count=3, peers=0) as opened:
        yield opened


@contextlib.contextmanager
def plain_pools() -> Iterator[list[cumem.Pool]]:
    """Make a pool on each of two devices, with memory from cudaMalloc."""
    pools = [cumem.Pool("device", device=d, segments="malloc") for d in (0, 1)]
    try:
        yield pools
    finally:
        for pool in pools:
            pool.close()


def enabled() -> int:
    return testing.fault_count("peer_enable")


def send(to: cumem.Buffer, source: cumem.Buffer) -> str:
    """Copy, wait for the end, and return the route that the copy took."""
    handle = cumem.copy_async(to, source)
    handle.wait()
    return handle.route


def test_access_is_enabled_once_each_way_at_first_need(emulated) -> None:
    with plain_pools() as pools:
        near = pools[0].allocate(1000)
        far = pools[1].allocate(1000)
        before = enabled()
        cumem.copy(near, bytes(range(250)) * 4)
        assert enabled() == before
        assert send(far, near) == "peer"
        assert enabled() == before + 2
        assert send(near, far) == "peer"
        assert enabled() == before + 2
        assert values.get(far).tobytes() == bytes(range(250)) * 4
        del near, far


def test_access_is_enabled_once_for_mapped_pools_too(emulated) -> None:
    near = cumem.array(np.arange(5000), kind="device", device=0)
    far = cumem.empty(5000, int, "device", device=1)
    before = enabled()
    assert send(far, near) == "peer"
    assert enabled() == before + 2
    assert send(far[::2], near[:2500]) == "kernel"
    assert enabled() == before + 2
    assert (values.get(far)[::2] == np.arange(2500)).all()


@pytest.mark.parametrize("segments", ["auto", "malloc"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strided_copies_cross_in_one_kernel_where_that_is_best(
    emulated, layout, segments
) -> None:
    to, source, route = layout
    rng = np.random.default_rng(1)
    shapes = [SHAPE if index == np.s_[:] else (120, 80) for index in (to, source)]
    data = rng.integers(0, 1 << 30, shapes[1], dtype="i4")
    expected = np.full(shapes[0], -1, "i4")
    expected[to] = data[source][: SHAPE[0], : SHAPE[1]]
    buffers = []
    pools = []
    for device, shape in zip((1, 0), shapes, strict=True):
        pools.append(cumem.Pool("device", device=device, segments=segments))
        nbytes = 4 * shape[0] * shape[1]
        buffers.append(pools[-1].allocate(nbytes).view("i4").reshape(shape))
    buffers[0][:] = -1
    cumem.copy(buffers[1], data)
    view = buffers[1][source][: SHAPE[0], : SHAPE[1]]
    assert send(buffers[0][to], view) == route
    out = np.empty(shapes[0], "i4")
    cumem.copy(out, buffers[0])
    assert (out == expected).all()
    del buffers, view


def test_repeated_source_crosses_once(emulated) -> None:
    row = cumem.array(np.arange(300, dtype="i4"), kind="device", device=0)
    far = cumem.empty((50, 300), "i4", "device", device=1)
    handle = cumem.copy_async(far, row)
    handle.wait()
    assert handle.route == "peer"
    assert handle.nbytes == 1200
    assert (values.get(far) == np.arange(300)).all()


@pytest.mark.parametrize("op", ["peer_enable", "peer_can_access", "pointer_access"])
def test_access_that_is_refused_is_done_without(emulated, op) -> None:
    with plain_pools() as pools:
        near = pools[0].allocate(4000)
        far = pools[1].allocate(4000)
        cumem.copy(near, bytes(range(250)) * 16)
        testing.plan_fault(op, 1, 999)
        cumem.copy(far.view("u2")[::2], near.view("u2")[1::2])
        assert testing.last_injected_fault() is not None
        testing.plan_fault(None, 0)
        got = values.get(far).view("u2")[::2]
        assert (got == np.frombuffer(bytes(range(250)) * 16, "u2")[1::2]).all()
        del near, far


@pytest.mark.parametrize("way", ["pulls", "pushes"])
@pytest.mark.parametrize("op", ["peer_enable", "peer_can_access", "pointer_access"])
def test_no_kernel_crosses_where_access_is_refused(emulated, op, way) -> None:
    with plain_pools() as pools:
        near = pools[0].allocate(4000).view("u2")
        far = pools[1].allocate(4000).view("u2")
        cumem.copy(near, np.arange(2000, dtype="u2"))
        to, source = {
            "pulls": (far[::2], near[:1000]),
            "pushes": (far[:1000], near[::2]),
        }[way]
        testing.deny_peers(True)
        # After this copy the pools need no more memory. For new memory, they would ask
        # for access as well.
        send(to, source)
        testing.deny_peers(False)
        testing.plan_fault(op, 1, 999, repeat=True)
        assert send(to, source) == "peer"
        assert testing.last_injected_fault() == op
        testing.plan_fault(None, 0)
        assert (values.get(to) == values.get(source)).all()
        del near, far, to, source


def test_enabling_does_not_break_the_capture_of_another_stream(emulated) -> None:
    captured = cumem.Stream()
    near = cumem.Pool("device", device=0, segments="malloc").allocate(1000)
    far = cumem.Pool("device", device=1, segments="malloc").allocate(1000)
    cumem.copy(near, bytes(1000))
    before = enabled()
    testing.set_capturing(captured, True)
    try:
        handle = cumem.copy_async(far, near)
        assert enabled() == before + 2
    finally:
        testing.set_capturing(captured, False)
    handle.wait()
    assert testing.last_injected_fault() is None
    assert not values.get(far).any()
    # A kernel does the copy, so peer access was enabled.
    assert send(far.view("u2")[::2], near[:500].view("u2")) == "kernel"
    assert enabled() == before + 2


def quick() -> int:
    return testing.copy_counts()["quick"]


@pytest.mark.parametrize("on", [0, 1, None])
def test_short_copies_between_devices_need_no_job(emulated, on) -> None:
    data = np.arange(5000)
    near = cumem.array(data, kind="device", device=0)
    far = cumem.zeros(data.shape, data.dtype, "device", device=1)
    stream = None if on is None else cumem.Stream(device=on)
    send(far, near)  # This copy enables access between the two devices.
    far.fill(0)
    cumem.copy(near, data[::-1].copy())
    for device in range(2):
        cumem.Device(device).synchronize()
    before = quick()
    cumem.copy(far, near, stream=stream)
    assert quick() == before + 1
    assert (values.get(far) == data[::-1]).all()


def test_short_copies_between_devices_come_after_what_is_queued(emulated) -> None:
    near = cumem.zeros(1 << 20, "u1", "device", device=0)
    far = cumem.zeros(1 << 20, "u1", "device", device=1)
    send(far, near)
    other = cumem.Stream(device=0)
    for value in range(1, 20):
        near.fill(value, stream=other)
        cumem.copy(far, near)
        assert (values.get(far) == value).all()


@pytest.mark.parametrize("on", [0, 1])
def test_copies_between_devices_on_a_stream_need_no_job(emulated, on: int) -> None:
    data = np.arange(5000)
    near = cumem.array(data, kind="device", device=0)
    far = cumem.zeros(data.shape, data.dtype, "device", device=1)
    stream = cumem.Stream(device=on)
    send(far, near)  # This copy enables access between the two devices.
    cumem.copy(near, data[::-1].copy())
    testing.plan_fault(None, 0)  # This resets the counters.
    with session.gate(stream):
        transfer = cumem.copy_async(far, near, stream=stream)
        assert not transfer.done
    stream.synchronize()
    assert transfer.route == "peer"
    # A plan of a job asks whether the devices reach the memory. Nobody asked, so no job was
    # made.
    assert testing.fault_count("pointer_access") == 0
    assert (values.get(far) == data[::-1]).all()


@pytest.mark.parametrize("on", [0, 1])
def test_copies_between_devices_on_a_stream_come_after_what_is_queued(
    emulated, on: int
) -> None:
    near = cumem.zeros(4096, "u1", "device", device=0)
    far = cumem.zeros(4096, "u1", "device", device=1)
    send(far, near)
    stream = cumem.Stream(device=on)
    others = [cumem.Stream(device=0), cumem.Stream(device=1)]
    for other, buffer in zip(others, (near, far), strict=True):
        with session.gate(other):
            buffer.fill(7, stream=other)
            transfer = cumem.copy_async(far, near, stream=stream)
            # A copy that did not wait would end during this loop.
            for _ in range(20):
                session.let_workers_pass()
            assert not transfer.done
        transfer.wait()
        assert (values.get(far) == 7).all()


@pytest.mark.parametrize("on", [0, 1, None])
def test_copies_between_devices_wait_for_no_idle_stream(emulated, on) -> None:
    """The copy need not wait for the default streams of the buffers, which are idle."""
    near = cumem.full(4096, 7, "u1", "device", device=0)
    far = cumem.zeros(4096, "u1", "device", device=1)
    send(far, near)
    stream = None if on is None else cumem.Stream(device=on)
    for device in range(2):
        cumem.Device(device).synchronize()
    testing.plan_fault(None, 0)  # This resets the counters.
    cumem.copy_async(far, near, stream=stream).wait()
    assert testing.fault_count("stream_wait_event") == 0
    assert (values.get(far) == 7).all()


def test_blocking_copies_that_cross_do_not_wait_for_each_other(emulated) -> None:
    """All four buffers were allocated for the default streams of their devices. The copy
    one way is held up. The copy the other way must end meanwhile.
    """
    near, back = (cumem.zeros(4096, "u1", "device", device=0) for _ in range(2))
    far, other = (cumem.full(4096, 5, "u1", "device", device=1) for _ in range(2))
    send(far, near)
    late = cumem.Stream(device=0)
    for device in range(2):
        cumem.Device(device).synchronize()
    with session.gate(late):
        near.fill(7, stream=late)
        held = threading.Thread(target=cumem.copy, args=(far, near))
        held.start()
        session.wait_until(testing.pending_transfers)
        free = threading.Thread(target=cumem.copy, args=(back, other))
        free.start()
        session.wait_until(lambda: not free.is_alive())
        assert held.is_alive()
    for thread in (held, free):
        thread.join()
    assert (values.get(far) == 7).all()
    assert (values.get(back) == 5).all()


@pytest.mark.parametrize("shift", [1, 600, -600])
def test_copies_within_a_device_that_overlap_are_no_short_ones(emulated, shift) -> None:
    data = np.arange(5000)
    buf = cumem.array(data, kind="device")
    apart = cumem.empty(1000, data.dtype, "device")
    before = quick()
    cumem.copy(apart, buf[1000:2000])
    assert quick() == before + 1
    cumem.copy(buf[1000 + shift : 3000 + shift], buf[1000:3000])
    assert quick() == before + 1
    assert (values.get(apart) == data[1000:2000]).all()
    data[1000 + shift : 3000 + shift] = data[1000:3000].copy()
    assert (values.get(buf) == data).all()


def test_devices_apart_make_no_short_copies(apart) -> None:
    near = cumem.array(np.arange(5000), kind="device", device=0)
    far = cumem.empty(5000, int, "device", device=1)
    send(far, near)
    before = quick()
    cumem.copy(far, near)
    assert quick() == before
    assert (values.get(far) == np.arange(5000)).all()


def test_no_access_is_asked_for_where_there_are_no_bytes(emulated) -> None:
    before = testing.fault_count("pointer_access")
    near = cumem.empty((0, 3), "i4", "device", device=0)
    far = cumem.empty((0, 3), "i4", "device", device=1)
    assert send(far, near) == "nothing"
    assert testing.fault_count("pointer_access") == before


@pytest.mark.parametrize("nbytes", [LONG, LONG + 12345, 1000])
def test_devices_apart_send_through_the_host(apart, nbytes) -> None:
    data = np.random.default_rng(2).integers(0, 256, nbytes, dtype="u1")
    near = cumem.array(data, kind="device", device=0)
    far = cumem.empty(nbytes, "u1", "device", device=2)
    assert not cumem.Device(0).can_access_peer(2)
    assert send(far, near) == ("peer-staged" if nbytes >= LONG else "peer")
    assert enabled() == 0
    assert (values.get(far) == data).all()


@pytest.mark.parametrize("index", [np.s_[::2], np.s_[::-1], np.s_[1::3]])
@pytest.mark.parametrize("which", ["target", "source", "both"])
def test_devices_apart_send_strided_memory_through_the_host(
    apart, index, which
) -> None:
    data = np.random.default_rng(3).integers(0, 1 << 30, LONG, dtype="i4")
    picked = data[index]
    near = cumem.array(data if which != "target" else picked, kind="device", device=0)
    source = near[index] if which != "target" else near
    far = cumem.full(LONG, -1, "i4", "device", device=1)
    target = far[index] if which != "source" else far[: len(picked)]
    assert send(target, source) == "peer-staged"
    expected = np.full(LONG, -1, "i4")
    expected[index if which != "source" else np.s_[: len(picked)]] = picked
    assert (values.get(far) == expected).all()


@pytest.mark.parametrize("step", [1, 2])
def test_devices_apart_without_page_locked_memory_leave_it_to_the_runtime(
    apart, step: int
) -> None:
    expected = np.arange(LONG, dtype="u1")
    near = cumem.array(expected, kind="device", device=0)
    far = cumem.empty(LONG * step, "u1", "device", device=1)[::step]
    cumem.trim()
    with cumem.limit("pinned", 1 << 20):
        assert send(far, near) == "peer"
    assert (values.get(far) == expected).all()


@pytest.mark.parametrize("peers", [0, 1])
@pytest.mark.parametrize("which", ["target", "source", "both"])
def test_strided_copies_have_fewer_pieces_at_once_where_memory_is_short(
    peers, which
) -> None:
    with session.opened("emulated", device_count=2, peers=peers):
        stays = cumem.zeros(LONG, "i2", "device", device=0)
        far = cumem.full(LONG, -1, "i2", "device", device=1)
        data = np.random.default_rng(5).integers(0, 1 << 15, LONG, dtype="i2")
        near = stays if which != "target" else stays[: LONG // 2]
        target = far[::2] if which != "source" else far[: LONG // 2]
        cumem.copy(near, data[: near.size])
        cumem.trim()
        # The limit leaves 2 MiB, and one piece needs 1.1 MiB, so there is no room for two.
        cumem.set_limit("device", LONG * 2 + (2 << 20))
        source = near[::2] if which != "target" else near
        handle = cumem.copy_async(target, source)
        handle.wait()
        cumem.set_limit("device", None)
        assert handle.route in ({"peer-staged"} if not peers else {"peer", "kernel"})
        assert (cumem.asnumpy(target) == cumem.asnumpy(source)).all()
        assert which == "source" or (cumem.asnumpy(far)[1::2] == -1).all()
        del stays, near, far, source, target, handle


@pytest.mark.parametrize("on_stream", [False, True])
def test_many_pieces_between_devices_apart_arrive(apart, on_stream) -> None:
    data = np.arange(100_000, dtype="u4")
    near = cumem.array(data, kind="device", device=0)
    far = cumem.zeros(data.shape, "u4", "device", device=1)
    parts = [slice(i, i + 500) for i in range(0, data.size, 1000)]
    stream = cumem.Stream(device=1) if on_stream else None
    handle = cumem.copy_many_async([(far[p], near[p]) for p in parts], stream=stream)
    handle.wait()
    assert handle.route == "peer"
    expected = np.where(data % 1000 < 500, data, 0)
    assert (values.get(far) == expected).all()


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_no_kernel_takes_many_pieces_where_an_end_is_refused(emulated, nth) -> None:
    """cumem asks about the first and the last byte of both ends, hence four questions.

    A fifth is never asked.
    """
    data = np.arange(10_000, dtype="u1")
    near = cumem.array(data, kind="device", device=0)
    far = cumem.zeros(data.shape, "u1", "device", device=1)
    parts = [slice(i, i + 500) for i in range(0, data.size, 1000)]
    for refuse, route in [(0, "table"), (nth, "peer"), (5, "table")]:
        far.fill(0)
        testing.plan_fault("pointer_access", refuse, 999)
        handle = cumem.copy_many_async([(far[p], near[p]) for p in parts])
        handle.wait()
        testing.plan_fault(None, 0)
        assert handle.route == route
        expected = np.where(np.arange(data.size) % 1000 < 500, data, 0)
        assert (values.get(far) == expected).all()


def test_devices_apart_keep_the_order_of_streams(apart) -> None:
    stream = cumem.Stream(device=0)
    near = cumem.zeros(LONG, "u1", "device", device=0)
    far = cumem.zeros(LONG, "u1", "device", device=1)
    with session.gate(stream):
        near.fill(7, stream=stream)
        handle = cumem.copy_async(far, near, stream=stream)
        near.fill(9, stream=stream)
        assert not handle.done
    handle.wait()
    stream.synchronize()
    assert (values.get(far) == 7).all()
    assert (values.get(near) == 9).all()


def test_graphs_of_devices_apart_hold_the_copy_of_the_runtime(apart) -> None:
    stream = cumem.Stream(device=1)
    near = cumem.zeros(LONG, "u1", "device", device=0, stream=stream.device.index)
    far = cumem.zeros(LONG, "u1", "device", device=1)
    for device in (0, 1):
        cumem.Device(device).synchronize()
    testing.set_capturing(stream, True)
    try:
        cumem.copy_async(far, near, stream=stream)
    finally:
        testing.set_capturing(stream, False)


@pytest.mark.parametrize("kind", ["mapped", "managed", "pinned"])
@pytest.mark.parametrize("home", [0, 1])
def test_memory_of_the_host_goes_to_every_device(emulated, kind, home) -> None:
    pool = cumem.Pool(kind, device=home)
    with pool.device, pool:
        shared = cumem.array(np.arange(6000, dtype="i4"), kind=kind)
        other = cumem.zeros(6000, "i4", kind)
    for device in (0, 1):
        there = cumem.zeros(6000, "i4", "device", device=device)
        stream = cumem.Stream(device=device)
        cumem.copy(there, shared)
        cumem.copy_async(there[::2], shared[::2], stream=stream).wait()
        cumem.copy_async(other[1::2], there[1::2], stream=stream).wait()
        cumem.copy_async(other[::2], shared[::2], stream=stream).wait()
        assert (values.get(there) == np.arange(6000)).all()
        assert (values.get(other) == np.arange(6000)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("segments", ["auto", "malloc"])
def test_two_gpus_copy_whole_and_strided_memory(cuda, segments) -> None:
    if cumem.device_count() < 2:
        pytest.skip("this test needs two GPUs")
    reach = cumem.Device(0).can_access_peer(1)
    data = np.random.default_rng(4).integers(0, 1 << 30, 8 << 20, dtype="i4")
    pools = [cumem.Pool("device", device=d, segments=segments) for d in (0, 1)]
    near, far = (pool.allocate(data.nbytes).view("i4") for pool in pools)
    cumem.copy(near, data)
    assert send(far, near) == ("peer" if reach else "peer-staged")
    assert (values.get(far) == data).all()
    far[:] = -1
    assert (send(far[::2], near[: 4 << 20]) == "kernel") == reach
    assert (values.get(far)[::2] == data[: 4 << 20]).all()
    assert (values.get(far)[1::2] == -1).all()
    assert (send(far[: 4 << 20], near[1::2]) == "kernel") == reach
    assert (values.get(far)[: 4 << 20] == data[1::2]).all()
    send(far[::2], near[1::2])
    assert (values.get(far)[::2] == data[1::2]).all()
    del near, far
