# SPDX-License-Identifier: Apache-2.0
"""broadcast(), scatter() and gather() between one end and several, on any devices.

Four emulated devices stand for GPUs. Bytes are compared with NumPy, and counts of the
runtime's calls show how often the bytes crossed a link.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import session, values
from support.session import testing

import cumem
from cumem import _core
from cumem.transfers.multi_device import _End, _group

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

DEVICES = 4
# An array of this many elements of four bytes is copied in several pieces.
LONG = 3 << 20


@pytest.fixture
def four() -> Iterator[session.Runtime]:
    with session.opened("emulated", device_count=DEVICES) as opened:
        yield opened


def on(device: int, shape: object, dtype: str = "i4") -> cumem.Buffer:
    return cumem.full(shape, -1, dtype, "device", device=device)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 1 << 30, shape, dtype="i4")


def calls(op: str) -> int:
    return testing.fault_count(op)


def place(data: np.ndarray, where: str) -> object:
    """Return memory with this data, which lies where `where` says."""
    if where == "strided":
        wide = np.zeros((*data.shape[:-1], 2 * data.shape[-1]), data.dtype)
        wide[..., ::2] = data
        return wide[..., ::2]
    if where == "far":
        buffer = cumem.empty(data.shape, data.dtype, "device", device=1)
        cumem.copy(buffer, data)
        return buffer
    return values.put(data, where)


def test_end_is_reported_with_whether_it_is_locked_whole(four) -> None:
    page, pinned = 4096, cumem.zeros(3000, "u1", "pinned")
    pages = np.zeros(8 * page, "u1")[page:]
    pages = pages[-pages.ctypes.data % page :][: 6 * page]
    with cumem.register(pages[page : 3 * page]):
        for memory, is_locked in [
            (pages[:page], False),
            (pages[page : 2 * page], True),
            (pages[3 * page - 1 : page : -7], True),
            (pages[: 2 * page], False),
            (pages[2 * page : 4 * page], False),
            (pages, False),
            (pinned, True),
            (pinned[::-2], True),
            (pinned.numpy()[5:], True),
            (cumem.zeros(3, "u1", "managed"), True),
            (on(1, 3), True),
        ]:
            assert _core._read_end(memory, None, None).is_locked is is_locked
    inner = _core._read_end(pages[page : 2 * page], None, None)
    assert not inner.is_locked


SOURCES = ["numpy", "strided", "pinned", "mapped", "managed", "device", "far"]


@pytest.mark.parametrize("shape", [(700,), (60, 50), (3, 1 << 18)])
@pytest.mark.parametrize("where", SOURCES)
def test_broadcast_reaches_targets_everywhere(four, where, shape) -> None:
    data = numbers(*shape)
    dsts = [
        on(0, shape),
        on(1, shape),
        on(1, (2, *shape))[1],
        on(3, (*shape[:-1], 2 * shape[-1]))[..., ::2],
        on(3, shape),
        cumem.zeros(shape, "i4", "pinned"),
        cumem.zeros(shape, "i4", "managed"),
        np.zeros(shape, "i4"),
    ]
    assert cumem.broadcast(dsts, place(data, where)) is None
    for dst in dsts:
        assert (values.get(dst) == data).all()


@pytest.mark.parametrize("async_", [False, True])
def test_ordinary_source_is_packed_once_for_all_devices(four, async_) -> None:
    data = numbers(LONG)
    dsts = [on(device, LONG) for device in range(DEVICES)]
    before = calls("copy_async")
    if async_:
        handles = cumem.broadcast_async(dsts, data)
        for handle in handles:
            handle.wait()
        assert [handle.route for handle in handles] == ["staged"] * DEVICES
        assert [handle.nbytes for handle in handles] == [data.nbytes] * DEVICES
    else:
        cumem.broadcast(dsts, data)
    copies = calls("copy_async") - before
    pieces, rest = divmod(copies, DEVICES)
    assert rest == 0
    assert 2 <= pieces <= 12
    for dst in dsts:
        assert (values.get(dst) == data).all()


def test_source_is_read_once_whatever_becomes_of_it_meanwhile(four) -> None:
    """All targets must get the same bytes, even if the source is written during the
    copy.
    """
    data = np.zeros(LONG, "i4")
    dsts = [on(device, LONG) for device in range(DEVICES)]
    handles = cumem.broadcast_async(dsts, data)
    for value in range(1, 200):
        data[:] = value
    for handle in handles:
        handle.wait()
    first = values.get(dsts[0])
    assert all((values.get(dst) == first).all() for dst in dsts[1:])


def test_targets_of_one_device_share_one_upload(four) -> None:
    source = cumem.array(numbers(LONG), kind="pinned")
    dsts = [on(0, LONG), on(0, 2 * LONG)[::2], on(2, LONG), on(0, LONG)]
    before = [calls(op) for op in ("copy_async", "kernel_launch")]
    cumem.broadcast(dsts, source)
    after = [calls(op) for op in ("copy_async", "kernel_launch")]
    # There is one copy to each device, and another one on the first device.
    assert after[0] - before[0] == 3
    assert after[1] - before[1] == 1
    for dst in dsts:
        assert (values.get(dst) == source.numpy()).all()


def test_targets_are_grouped_by_what_they_can_share(four) -> None:
    def end_of(given: object) -> _End:
        found = _core._read_end(given, None, None)
        return _End(found.memory, found.place, found.is_locked)

    def grouped(source: object, *targets: object) -> dict[int, list[int]]:
        groups = _group([end_of(each) for each in targets], end_of(source))
        assert all(group[0] == lead for lead, group in groups.items())
        return {lead: sorted(group) for lead, group in groups.items()}

    data, strided = np.zeros(100, "i4"), on(1, 200)[::2]
    all_four = strided, np.zeros(100, "i4"), on(1, 100), on(0, 100)
    # Both devices have a target without gaps, so the host packs the elements once for all.
    assert grouped(data, *all_four) == {1: [1], 2: [0, 2, 3]}
    # The strides of the targets differ, so they cannot share packed elements.
    assert grouped(data, on(0, 100), strided) == {0: [0], 1: [1]}
    # Each device reads pinned memory on its own.
    pinned = cumem.array(data, kind="pinned")
    assert grouped(pinned, *all_four) == {1: [1], 2: [0, 2], 3: [3]}
    own = on(1, 100)
    assert grouped(own, own, on(1, 100), on(1, 100)) == {0: [0], 1: [1, 2]}


def test_source_on_a_device_goes_to_its_peers(four) -> None:
    source = cumem.array(numbers(LONG), kind="device", device=2)
    dsts = [on(device, LONG) for device in range(DEVICES)] + [on(1, LONG)]
    handles = cumem.broadcast_async(dsts, source)
    for handle in handles:
        handle.wait()
    assert [h.route for h in handles] == ["peer", "peer", "direct", "peer", "peer"]
    for dst in dsts:
        assert (values.get(dst) == values.get(source)).all()


@pytest.mark.parametrize("index", [np.s_[::2], np.s_[::-1], np.s_[:, ::3]])
def test_strided_source_on_a_device_goes_to_its_peers(four, index) -> None:
    data = numbers(90, 60)
    source = cumem.array(data, kind="device", device=1)[index]
    dsts = [on(d, data[index].shape) for d in (0, 0, 1, 2)]
    dsts.append(on(2, (*data[index].shape, 2))[..., 1])
    cumem.broadcast(dsts, source)
    for dst in dsts:
        assert (values.get(dst) == data[index]).all()


@pytest.mark.parametrize("source", [7, [1, 2, 3], np.arange(3, dtype="i4")])
def test_values_are_stretched_to_the_targets(four, source) -> None:
    dsts = [on(0, (4, 3)), on(1, (4, 3)), on(1, (3, 4)).reshape(4, 3), on(2, (4, 3))]
    cumem.broadcast(dsts, source)
    for dst in dsts:
        assert (values.get(dst) == np.broadcast_to(source, (4, 3))).all()


def test_repeated_source_travels_once_to_each_device(four) -> None:
    row = numbers(5000)
    dsts = [on(d, (40, 5000)) for d in range(DEVICES)]
    handles = cumem.broadcast_async(dsts, row)
    for handle in handles:
        handle.wait()
        assert handle.nbytes == row.nbytes
    for dst in dsts:
        assert (values.get(dst) == row).all()


def test_transposed_source_is_turned_by_each_device(four) -> None:
    data = numbers(700, 500)
    dsts = [on(d, (500, 700)) for d in range(DEVICES)]
    cumem.broadcast(dsts, data.T)
    for dst in dsts:
        assert (values.get(dst) == data.T).all()


def test_same_memory_may_be_source_and_target(four) -> None:
    source = cumem.array(numbers(1000), kind="device", device=0)
    other = on(1, 1000)
    cumem.broadcast([source, other, other], source)
    assert (values.get(other) == values.get(source)).all()


@settings(max_examples=25)
@given(data=st.data())
def test_any_layouts_of_targets_get_the_source(data: st.DataObject) -> None:
    shape = data.draw(
        st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), label="shape"
    )
    array = numbers(*shape)
    steps = st.sampled_from([1, 1, 2, -1])
    source = array
    for axis in range(len(shape)):
        if data.draw(st.booleans()):
            source = np.flip(source, axis)
    with session.opened("emulated", device_count=3):
        dsts = []
        for device in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5)):
            index = []
            large = []
            for n in shape:
                step = data.draw(steps)
                large.append(n * abs(step))
                index.append(slice(None, None, step))
            order = data.draw(st.sampled_from("CF"))
            base = cumem.full(large, -1, "i4", "device", device=device, order=order)
            dsts.append(base[tuple(index)])
        cumem.broadcast(dsts, source)
        for dst in dsts:
            assert (values.get(dst) == source).all()
        dsts.clear()
        del dst, base


# -- scatter and gather ----------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("where", SOURCES)
def test_scatter_and_gather_are_slices_along_an_axis(four, where, axis) -> None:
    data = numbers(60, 48)
    bounds = [0, 20, 21, 33, 33, data.shape[axis]]
    dsts: list[object] = []
    slices = []
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        index = [np.s_[:], np.s_[:]]
        index[axis] = np.s_[start:stop]
        slices.append(data[tuple(index)])
        shape = slices[-1].shape
        dsts.append(np.zeros(shape, "i4") if i == 1 else on(i % DEVICES, shape))
    assert cumem.scatter(dsts, place(data, where), axis) is None
    for dst, expected in zip(dsts, slices, strict=True):
        assert (values.get(dst) == expected).all()
    back = place(np.zeros_like(data), where)
    assert cumem.gather(back, dsts, axis=axis) is None
    assert (values.get(back) == data).all()


def test_long_slices_travel_at_the_same_time(four) -> None:
    data = numbers(DEVICES, LONG // 2)
    dsts = [on(device, (1, LONG // 2)) for device in range(DEVICES)]
    handles = cumem.scatter_async(dsts, data)
    assert len(handles) == DEVICES
    for handle in handles:
        handle.wait()
        assert handle.nbytes == data.nbytes // DEVICES
    back = np.zeros_like(data)
    for handle in cumem.gather_async(back, dsts):
        handle.wait()
    assert (back == data).all()


@pytest.mark.parametrize("function", ["scatter_async", "gather_async"])
def test_slices_that_interleave_do_not_wait_for_each_other(four, function) -> None:
    stream = cumem.Stream(device=0)
    ends = [on(d, (40, 30)) for d in (0, 1)]
    whole = cumem.full((40, 60), 7, "i4", "pinned")
    with session.gate(stream):
        ends[0].fill(9, stream=stream)
        pair = (ends, whole) if function == "scatter_async" else (whole, ends)
        handles = getattr(cumem, function)(*pair, axis=1)
        handles[1].wait()
        assert not handles[0].done
    handles[0].wait()


def test_every_slice_comes_after_a_copy_that_one_of_them_waits_for(four) -> None:
    stream = cumem.Stream(device=0)
    ends = [on(d, (40, 30)) for d in (0, 1)]
    whole = cumem.full((40, 60), 7, "i4", "pinned")
    rows = on(0, (20, 60))
    with session.gate(stream):
        rows.fill(9, stream=stream)
        before = cumem.copy_async(whole[10:30], rows)
        handles = cumem.gather_async(whole, ends, axis=1)
        assert [handle.done for handle in handles] == [False, False]
    for handle in handles:
        handle.wait()
    before.wait()
    assert (whole.numpy() == -1).all()


# -- order, handles, lifetime ------------------------------------------------------------


def test_copies_come_after_a_stream_and_before_its_next_work(four) -> None:
    stream = cumem.Stream(device=1)
    source = cumem.zeros(5000, "i4", "device", device=1)
    dsts = [on(0, 5000), on(1, 5000), on(2, 5000)]
    with session.gate(stream):
        source.fill(3, stream=stream)
        handles = cumem.broadcast_async(dsts, source, stream=stream)
        source.fill(4, stream=stream)
        assert not any(handle.done for handle in handles)
    stream.synchronize()
    assert all(handle.done for handle in handles)
    for dst in dsts:
        assert (values.get(dst) == 3).all()
    assert (values.get(source) == 4).all()


@pytest.mark.parametrize("function", ["scatter_async", "gather_async"])
def test_slices_come_after_work_on_their_ends(four, function) -> None:
    streams = [cumem.Stream(device=d) for d in (0, 1)]
    ends = [cumem.zeros(1000, "i4", "device", device=d) for d in (0, 1)]
    host = np.arange(2000, dtype="i4")
    with contextlib.ExitStack() as gates:
        for end, stream in zip(ends, streams, strict=True):
            gates.enter_context(session.gate(stream))
            end.fill(9, stream=stream)
        if function == "scatter_async":
            handles = cumem.scatter_async(ends, host)
        else:
            handles = cumem.gather_async(host, ends)
        assert not any(handle.done for handle in handles)
    for handle in handles:
        handle.wait()
    if function == "scatter_async":
        assert (np.concatenate([values.get(end) for end in ends]) == host).all()
    else:
        assert (host == 9).all()


def test_blocking_call_comes_after_the_current_stream_of_each_device(four) -> None:
    address = []
    source = cumem.zeros(1000, "i4", "device", device=1)
    other = on(2, 1000)
    filled = cumem.array(np.full(1000, 6, "i4"), kind="device", device=1)
    stream = cumem.Stream(device=1)
    with stream:
        with session.gate(stream):
            # cumem does not see this work as the buffer's own.
            cumem.copy_async(cumem.asbuffer(source), filled, stream=stream)
            address.append(cumem.broadcast_async([other], source, stream=stream))
        cumem.broadcast([other], source)
    assert (values.get(other) == 6).all()
    address[0][0].wait()


def test_handles_are_awaited(four) -> None:
    data = numbers(LONG)
    dsts = [on(device, LONG) for device in (0, 1)]

    async def work() -> None:
        await asyncio.gather(*map(_wait, cumem.broadcast_async(dsts, data)))

    async def _wait(handle: cumem.Transfer) -> None:
        await handle

    asyncio.run(work())
    for dst in dsts:
        assert (values.get(dst) == data).all()


def test_ends_live_until_the_copies_are_done(four) -> None:
    stream = cumem.Stream(device=0)
    gone: list[str] = []

    class Watched(np.ndarray):
        def __del__(self) -> None:
            gone.append("source")

    source = numbers(5000).view(Watched)
    blocked = on(0, 5000)
    with session.gate(stream):
        blocked.fill(0, stream=stream)
        handles = cumem.broadcast_async([blocked, on(1, 5000)], source)
        del handles, source
        gc.collect()
        assert gone == []
    cumem.Device(0).synchronize()
    assert session.leftovers(held=1).get("transfers") is None
    testing.poll()
    gc.collect()
    assert gone == ["source"]
    del blocked


def test_targets_are_waited_for_by_who_reads_them(four) -> None:
    data = numbers(LONG)
    host = cumem.zeros(LONG, "i4", "pinned")
    cumem.broadcast_async([on(0, LONG), host, on(1, LONG)], data)
    assert (host.numpy() == data).all()


# -- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: cumem.broadcast([], 1), ValueError, "at least one target"),
        (lambda: cumem.gather(np.zeros(3), []), ValueError, "at least one source"),
        (lambda: cumem.broadcast(np.zeros(3), 1), TypeError, "a list of targets"),
        (lambda: cumem.broadcast(on(0, 3), 1), TypeError, "a list of targets"),
        (lambda: cumem.broadcast(5, 1), TypeError, "a list of targets"),
        (
            lambda: cumem.broadcast([on(0, 3), on(1, 3, "f4")], np.zeros(3, "i4")),
            TypeError,
            "target 1 has dtype float32, the source has dtype int32",
        ),
        (
            lambda: cumem.broadcast([on(0, 3), on(1, 4)], np.zeros(3, "i4")),
            ValueError,
            r"target 1 of shape \(4,\) must have the shape of target 0, \(3,\)",
        ),
        (
            lambda: cumem.broadcast([on(0, 3), on(1, 3)], np.zeros(5, "i4")),
            ValueError,
            r"target 0 of shape \(3,\) does not fit the source of shape \(5,\)",
        ),
        (
            lambda: cumem.broadcast([np.zeros(3), np.frombuffer(b"12345678")], 1),
            ValueError,
            "target 1 is read-only",
        ),
        (
            lambda: cumem.scatter([on(0, 4), on(1, 4)], np.zeros(9, "i4")),
            ValueError,
            "lengths of the targets along axis 0 add up to 8, but the source has 9",
        ),
        (
            lambda: cumem.scatter([on(0, 4), on(1, 4)], np.zeros(7, "i4")),
            ValueError,
            "has 7 there",
        ),
        (
            lambda: cumem.scatter([on(0, (4, 2)), on(1, 4)], np.zeros((4, 3), "i4"), 1),
            ValueError,
            r"target 1 of shape \(4,\) does not fit a slice of shape \(4, 3\)",
        ),
        (
            lambda: cumem.scatter([on(0, 3)], np.zeros(3, "i4"), axis=1),
            ValueError,
            "axis 1 is out of range for a source with 1 axes",
        ),
        (
            lambda: cumem.scatter([on(0, 3)], np.zeros(3, "i4"), axis="x"),
            TypeError,
            "axis",
        ),
        (
            lambda: cumem.gather(np.frombuffer(bytes(16)), [np.zeros(2)]),
            ValueError,
            "target 0 is read-only",
        ),
        (lambda: cumem.broadcast([on(0, 3)], 1, 5), TypeError, "broadcast"),
        (lambda: cumem.broadcast([on(0, 3)], 1, axis=0), TypeError, "axis"),
    ],
)
def test_wrong_calls_say_what_is_wrong(
    four, call: Callable[[], None], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        call()


def test_sources_given_first_are_refused_and_nothing_is_written(four) -> None:
    a, b = np.arange(4.0), np.arange(4.0, 8.0)
    device = cumem.full(4, 9.0)
    both = cumem.full(8, 9.0)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("broadcast(dsts, src)", lambda: cumem.broadcast(device, [a])),
        ("broadcast(dsts, src)", lambda: cumem.broadcast(a, (device, b))),
        ("broadcast(dsts, src)", lambda: cumem.broadcast(memoryview(a), [b])),
        ("broadcast(dsts, src)", lambda: cumem.broadcast(7.0, iter([a]))),
        ("broadcast(dsts, src)", lambda: cumem.broadcast([1.0, 2.0], [a, b])),
        ("broadcast(dsts, src)", lambda: cumem.broadcast([1.0, 2.0], a)),
        ("broadcast(dsts, src)", lambda: cumem.broadcast([a], [[b]])),
        ("broadcast(dsts, src)", lambda: cumem.broadcast([a], {"b": b})),
        ("broadcast(dsts, src)", lambda: cumem.broadcast({"a": a}, b)),
        ("broadcast_async(dsts, src)", lambda: cumem.broadcast_async(device, [a])),
        ("scatter(dsts, src)", lambda: cumem.scatter(both, [a, b])),
        ("scatter(dsts, src)", lambda: cumem.scatter([a, b], [both])),
        ("scatter_async(dsts, src)", lambda: cumem.scatter_async(both, [a, b])),
        ("gather(dst, srcs)", lambda: cumem.gather([a, b], both)),
        ("gather(dst, srcs)", lambda: cumem.gather([both], [a, b])),
        ("gather(dst, srcs)", lambda: cumem.gather(1.0, [a])),
        ("gather_async(dst, srcs)", lambda: cumem.gather_async([a, b], both)),
    ]
    for wanted, call in calls:
        with pytest.raises(TypeError, match="targets come first") as caught:
            call()
        assert str(caught.value).endswith(wanted)
    assert a.tolist() == [0, 1, 2, 3]
    assert b.tolist() == [4, 5, 6, 7]
    assert device.tolist() == [9] * 4
    assert both.tolist() == [9] * 8


def test_rows_of_a_tensor_are_not_taken_for_targets(runtime) -> None:
    torch = pytest.importorskip("torch")
    kept = np.arange(3.0)
    for tensor in (torch.zeros(2, 3), torch.zeros(2, 3).to_sparse()):
        for call in (cumem.broadcast, cumem.scatter, cumem.broadcast_async):
            with pytest.raises(TypeError, match="targets come first"):
                call(tensor, [kept])
        with pytest.raises(TypeError, match="targets come first"):
            cumem.gather(kept, tensor)


def test_every_call_with_targets_and_sources_names_targets_first() -> None:
    for name in cumem.__all__:
        call = getattr(cumem, name)
        if isinstance(call, type) or not callable(call) or name == "Kind":
            continue
        names = list(inspect.signature(call).parameters)
        targets = [names.index(n) for n in ("dst", "dsts") if n in names]
        sources = [names.index(n) for n in ("src", "srcs") if n in names]
        if targets and sources:
            assert (targets, sources) == ([0], [1]), name


def test_overlapping_ends_are_refused(four) -> None:
    buffer = on(0, 100)
    with pytest.raises(ValueError, match="target 1 overlaps the source"):
        cumem.broadcast([on(1, 50), buffer[25:75]], buffer[:50])
    with pytest.raises(ValueError, match="source 0 overlaps the target"):
        cumem.gather(buffer, [buffer[50:], buffer[:50]])
    cumem.gather(buffer, [buffer[:50], buffer[50:]])


def test_captured_stream_is_refused(four) -> None:
    stream = cumem.Stream(device=0)
    dsts = [on(0, 10), on(1, 10)]
    testing.set_capturing(stream, True)
    try:
        with pytest.raises(cumem.CudaError, match="being captured"):
            cumem.broadcast_async(dsts, np.zeros(10, "i4"), stream=stream)
        with stream, pytest.raises(cumem.CudaError, match="being captured"):
            cumem.broadcast(dsts, np.zeros(10, "i4"))
    finally:
        testing.set_capturing(stream, False)
    cumem.broadcast(dsts, np.zeros(10, "i4"), stream=stream)


@pytest.mark.parametrize("function", ["broadcast", "scatter", "gather"])
def test_graph_holds_what_it_can(four, function) -> None:
    """As with copy_async(), a graph can hold copies between page-locked memory and its
    own device.
    """
    stream = cumem.Stream(device=1)
    many, apart = [on(1, 500), on(1, 500)], [on(1, 500), on(0, 500)]
    one = cumem.array(numbers(500 if function == "broadcast" else 1000), kind="pinned")
    start, block = getattr(cumem, function + "_async"), getattr(cumem, function)
    turn = 1 if function == "gather" else -1
    cumem.Device(1).synchronize()
    testing.set_capturing(stream, True)
    try:
        handles = start(*(one, many)[::turn], stream=stream)
        assert [handle.done for handle in handles] == [True, True]
        with pytest.raises(cumem.CudaError, match="being captured"):
            start(*(one, apart)[::turn], stream=stream)
        with pytest.raises(cumem.CudaError, match="being captured"):
            block(*(one, many)[::turn], stream=stream)
    finally:
        testing.set_capturing(stream, False)


def test_no_context_is_made_on_other_devices(four) -> None:
    # cumem asks the current device about ordinary memory, so the test makes one current
    # that it uses anyway.
    cumem.set_current_device(2)
    near = cumem.empty(LONG, "i4", "device", device=2)
    far = cumem.empty(LONG, "i4", "device", device=3)
    before = calls("device_set")
    cumem.broadcast([near, far], numbers(LONG))
    cumem.gather(np.zeros(20, "i4"), [near[:10], far[:10]])
    assert calls("device_set") == before


# -- Ctrl-C and failures -----------------------------------------------------------------


@pytest.mark.parametrize("where", ["numpy", "device", "pinned"])
@pytest.mark.parametrize("function", ["broadcast", "scatter"])
def test_interrupted_call_leaves_the_rest_undone(four, function, where) -> None:
    """The wait for another stream's work ends.

    Copies that have not begun are not made, and the others run to their end.
    """
    stream = cumem.Stream(device=0)
    shape = LONG if function == "broadcast" else LONG // 2
    dsts = [on(d, shape) for d in (0, 1)]
    source = values.put(numbers(LONG), where)
    hooked: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda args: hooked.append(args.exc_value))
        with session.alarm(stream):
            dsts[0].fill(1, stream=stream)
            getattr(cumem, function)(dsts, source)
        assert (
            session.leftovers(held=len(dsts) + (where != "numpy")).get("transfers")
            is None
        )
        testing.poll()
    assert hooked == []
    cumem.broadcast(dsts, 5)
    assert (values.get(dsts[0]) == 5).all()


@pytest.mark.parametrize("op", ["copy_async", "event_record", "stream_wait_event"])
@pytest.mark.parametrize("nth", [1, 4, 7])
def test_failed_call_ends_all_and_is_reported_once(four, op, nth) -> None:
    dsts = [on(device, LONG) for device in range(DEVICES)]
    data = numbers(LONG)
    hooked: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda args: hooked.append(args.exc_value))
        testing.plan_fault(op, nth, 999)
        with pytest.raises(cumem.CudaError) as caught:
            cumem.broadcast(dsts, data)
        testing.plan_fault(None, 0)
        assert caught.value.code == 999
        assert session.leftovers(held=DEVICES) == {"storages": DEVICES}
        testing.poll()
    assert hooked == []
    cumem.broadcast(dsts, data)
    for dst in dsts:
        assert (values.get(dst) == data).all()


def test_failure_in_the_background_is_reported_by_the_handles(four) -> None:
    dsts = [on(device, LONG) for device in range(DEVICES)]
    testing.plan_fault("copy_async", 3, 999)
    handles = cumem.broadcast_async(dsts, numbers(LONG))
    for handle in handles:
        with pytest.raises(cumem.CudaError):
            handle.wait()
    testing.plan_fault(None, 0)


def test_devices_apart_are_served_as_well() -> None:
    with session.opened("emulated", device_count=3, peers=0):
        data = numbers(LONG)
        dsts = [on(device, LONG) for device in (0, 1, 2, 2)]
        source = cumem.array(data, kind="device", device=1)
        cumem.broadcast(dsts, source)
        for dst in dsts:
            assert (values.get(dst) == data).all()
        dsts.clear()
        del source, dst


@pytest.mark.gpu
@pytest.mark.parametrize("where", SOURCES)
def test_two_gpus_get_and_give_the_same_bytes(cuda, where) -> None:
    if cumem.device_count() < 2:
        pytest.skip("this test needs two GPUs")
    data = numbers(4, 4 << 20)
    source = place(data, where)
    dsts = [on(0, data.shape), on(1, data.shape), on(1, (4, 8 << 20))[:, ::2]]
    cumem.broadcast(dsts, source)
    for dst in dsts:
        assert (values.get(dst) == data).all()
    halves = [on(0, (2, 4 << 20)), on(1, (2, 4 << 20))]
    cumem.scatter(halves, source)
    assert (values.get(halves[1]) == data[2:]).all()
    back = np.zeros_like(data)
    cumem.gather(back, halves)
    assert (back == data).all()
    columns = [on(0, (4, 1 << 20)), on(1, (4, 3 << 20))]
    for handle in cumem.scatter_async(columns, source, axis=1, stream=cumem.Stream()):
        handle.wait()
    cumem.gather(back, columns, axis=1)
    assert (back == data).all()


@pytest.mark.parametrize("name", ["broadcast", "scatter", "gather"])
def test_ends_are_held_until_the_call_is_over(four, name: str) -> None:
    """As in any call, nobody may free an end, or shut cumem down, while the call runs."""
    parts = [on(i, LONG) for i in range(2)]
    whole = np.zeros(LONG if name == "broadcast" else 2 * LONG, "i4")
    refused: list[BaseException] = []

    def reported(*_: int) -> None:
        for call in (parts[1].free, cumem.shutdown):
            with contextlib.suppress(Exception):
                try:
                    call()
                except BaseException as error:
                    refused.append(error)
                    raise

    ends = (whole, parts) if name == "gather" else (parts, whole)
    getattr(cumem, name)(*ends, progress=reported)
    kinds = {type(error) for error in refused}
    assert kinds == {BufferError, RuntimeError}, refused
    parts[1].free()
    cumem.shutdown()
