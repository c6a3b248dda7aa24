# SPDX-License-Identifier: Apache-2.0
"""copy_many() lets the kernel of rows copy many pairs of one size by their numbers."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.pieces import numbers

import cumem

pytestmark = [
    # The C core alone decides what is tested here; Python only calls it.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

COUNT = 300
WIDTH = 64
BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
RANDOM = np.random.default_rng(6)
TO, OF = (RANDOM.permutation(2 * COUNT)[:COUNT] for _ in range(2))


def blocks(kind: str, rows: int = 2 * COUNT, width: int = WIDTH) -> tuple[Any, Any]:
    data = numbers(rows * width).reshape(rows, width)
    return data, cumem.array(data, kind=kind)  # type: ignore[call-overload]


def pairs_of(target: Any, source: Any, to: Any = TO, of: Any = OF) -> list[Any]:
    return [(target[d], source[s]) for d, s in zip(to, of, strict=True)]


def route_of(pairs: list[Any]) -> str | None:
    handle = cumem.copy_many_async(pairs)
    handle.wait()
    return handle.route


@pytest.mark.parametrize(
    ("to", "of"),
    [
        ("device", "pinned"),
        ("mapped", "device"),
        ("device", "device"),
        ("device", "managed"),
    ],
)
@pytest.mark.parametrize("how", ["blocking", "stream", "background"])
def test_pairs_of_one_size_are_rows_for_the_kernel(runtime, to, of, how) -> None:
    data, source = blocks(of)
    target = values.put(np.zeros_like(data), to)
    pairs = pairs_of(target, source)
    if how == "blocking":
        cumem.copy_many(pairs)
    else:
        stream = cumem.Stream() if how == "stream" else None
        handle = cumem.copy_many_async(pairs, stream=stream)
        assert handle.nbytes == COUNT * WIDTH
        handle.wait()
        assert handle.route == "rows"
    expected = np.zeros_like(data)
    expected[TO] = data[OF]
    assert (values.get(target) == expected).all()


def test_pairs_of_one_size_take_one_launch(emulated) -> None:
    _, source = blocks("pinned", 4000)
    target = cumem.zeros((4000, WIDTH), "u1")
    order = np.random.default_rng(7).permutation(4000)
    pairs = pairs_of(target, source, order, order[::-1])
    cumem.copy_many(pairs)  # this loads the kernel
    session.testing.plan_fault("kernel_launch", 0)
    cumem.copy_many(pairs)
    assert session.testing.fault_count("kernel_launch") == 1
    assert (values.get(target)[order] == values.get(source)[order[::-1]]).all()


def test_pairs_of_many_more_than_are_compared_at_once_are_copied(emulated) -> None:
    data, source = blocks("pinned", 5000, 16)
    target = cumem.zeros((5000, 16), "u1")
    order = np.random.default_rng(8).permutation(5000)
    assert route_of(pairs_of(target, source, order, order[::-1])) == "rows"
    assert (values.get(target)[order] == data[order[::-1]]).all()


@pytest.mark.parametrize("of", ["pinned", "device"])
def test_blocks_of_several_allocations_are_rows(emulated, of) -> None:
    """The distances between the blocks are no multiples of a block's size. The kernel
    therefore counts in smaller units, and each block is a row of several units.
    """
    data, _ = blocks(of)
    sources = [cumem.array(data + k, kind=of) for k in range(3)]
    targets = [cumem.zeros(data.shape, "u1") for _ in sources]
    pairs = []
    for i, (d, s) in enumerate(zip(TO, OF, strict=True)):
        pairs.append((targets[i % 3][d], sources[(i + 1) % 3][s]))
    assert route_of(pairs) == "rows"
    for k, target in enumerate(targets):
        expected = np.zeros_like(data)
        expected[TO[k::3]] = data[OF[k::3]] + (k + 1) % 3
        assert (values.get(target) == expected).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_pairs_of_one_size_equal_copies_in_order(backend: str) -> None:
    """Pieces of any size and alignment, of one memory or of two, that may touch."""
    with session.opened(backend):

        @given(st.data())
        def check(data: Any) -> None:
            width = data.draw(st.sampled_from([1, 3, 16, 33, 48, 64, 512, 520]))
            unit = data.draw(st.sampled_from([1, 4, 16, width]))
            size = 900 * max(unit, width)
            kinds = data.draw(
                st.sampled_from([("device", "pinned"), ("managed", "device")])
            )
            expected = numbers(size, 1)
            target = values.put(expected, kinds[0])
            one_memory = data.draw(st.booleans())
            source = target if one_memory else values.put(numbers(size, 2), kinds[1])
            read = expected if one_memory else values.get(source)
            random = np.random.default_rng(data.draw(st.integers(0, 9)))
            places = random.permutation((size - width) // width)[: 2 * COUNT] * width
            at = random.integers(0, (size - width) // unit, 2 * COUNT) * unit
            touches = data.draw(st.booleans())
            to, of = (at if touches else places)[:COUNT], places[COUNT:]
            pairs = [
                (target[d : d + width], source[s : s + width])  # type: ignore[index]
                for d, s in zip(to.tolist(), of.tolist(), strict=True)
            ]
            cumem.copy_many(pairs)
            for d, s in zip(to.tolist(), of.tolist(), strict=True):
                expected[d : d + width] = read[s : s + width].copy()
            assert (values.get(target) == expected).all()

        check()


def test_later_pairs_of_one_size_see_what_earlier_ones_wrote(emulated) -> None:
    data, memory = blocks("device")
    order = [(i + 1, i) for i in range(COUNT)]  # each reads what the one before wrote
    assert route_of([(memory[d], memory[s]) for d, s in order]) == "several"
    data[1 : COUNT + 1] = data[0]
    assert (values.get(memory) == data).all()


def test_last_pair_with_a_target_wins(emulated) -> None:
    data, source = blocks("pinned")
    target = cumem.zeros(data.shape, "u1")
    to = TO.copy()
    to[-1] = to[0]
    assert route_of(pairs_of(target, source, to, OF)) == "several"
    assert (values.get(target)[to[0]] == data[OF[-1]]).all()


def test_targets_that_touch_without_being_equal_are_written_in_order(emulated) -> None:
    data, source = blocks("pinned")
    target = cumem.zeros(data.size, "u1")
    starts = np.append(TO[:-1] * WIDTH, TO[0] * WIDTH + 16 * (1 - 2 * (TO[0] > 0)))
    pairs = [
        (target[d : d + WIDTH], source[s])
        for d, s in zip(starts.tolist(), OF.tolist(), strict=True)
    ]
    assert route_of(pairs) == "several"
    assert (values.get(target)[starts[-1] : starts[-1] + WIDTH] == data[OF[-1]]).all()


@pytest.mark.parametrize(
    ("case", "route"),
    [("few", "table"), ("other size", "table"), ("odd places", "table")],
)
def test_pairs_that_are_no_rows_go_by_the_table(emulated, case, route) -> None:
    data = numbers(COUNT * 200)
    source = cumem.array(data, kind="pinned")
    target = cumem.zeros(data.shape, "u1")
    places = np.random.default_rng(9).permutation(COUNT) * 200
    sizes = np.full(COUNT, 100)
    if case == "few":
        places, sizes = places[:63], sizes[:63]
    elif case == "other size":
        sizes[-1] = 99
    else:
        places[3] += 1
    spans = [slice(p, p + n) for p, n in zip(places, sizes, strict=True)]
    assert route_of([(target[s], source[s]) for s in spans]) == route
    for span in spans:
        assert (values.get(target)[span] == data[span]).all()


def test_pairs_of_two_devices_go_by_the_table(emulated) -> None:
    data, source = blocks("device")
    target = cumem.zeros(data.shape, "u1", device=1)
    assert route_of(pairs_of(target, source)) == "table"
    assert (values.get(target)[TO] == data[OF]).all()


def test_pairs_of_registered_arrays_stay_locked(emulated) -> None:
    data, _ = blocks("pinned")
    target = cumem.zeros(data.shape, "u1")
    stream = cumem.Stream()
    with cumem.register(data), session.gate(stream):
        target.record_stream(stream)
        handle = cumem.copy_many_async(pairs_of(target, data), stream=stream)
        assert handle.route == "table"
    handle.wait()
    assert (values.get(target)[TO] == data[OF]).all()


def test_pairs_go_by_the_engine_where_no_kernel_can_be_made(emulated) -> None:
    data, source = blocks("pinned")
    target = cumem.zeros(data.shape, "u1")
    session.testing.plan_fault("module_load", 1, code=221, repeat=True)
    cumem.copy_many(pairs_of(target, source))
    session.testing.plan_fault(None, 0)
    assert (values.get(target)[TO] == data[OF]).all()


def test_memory_of_the_numbers_stays_until_late_pairs_are_done(emulated) -> None:
    stream = cumem.Stream()
    data, source = blocks("pinned")
    target = cumem.zeros(data.shape, "u1")
    with session.gate(stream):
        cumem.copy_many_async(pairs_of(target, source), stream=stream)
        gc.collect()
        # These buffers have the size of the numbers' memory, so one of them would get that
        # memory if it had been freed too early.
        others = [cumem.array(np.full(640, 9, "i4"), kind="mapped") for _ in "abcd"]
    stream.synchronize()
    assert others
    assert (values.get(target)[TO] == data[OF]).all()


def test_progress_counts_the_bytes_of_all_pairs(emulated) -> None:
    _, source = blocks("pinned")
    told: list[tuple[int, int]] = []
    target = cumem.zeros((2 * COUNT, WIDTH), "u1")
    cumem.copy_many(pairs_of(target, source), progress=lambda *seen: told.append(seen))
    assert told[-1] == (COUNT * WIDTH, COUNT * WIDTH)


def test_numbers_of_captured_pairs_belong_to_the_graph(emulated) -> None:
    stream = cumem.Stream()
    source = cumem.empty_device((2 * COUNT, WIDTH), "u1", stream=stream)
    target = cumem.zeros((2 * COUNT, WIDTH), "u1", "pinned")
    pairs = pairs_of(target, source)
    cumem.copy_many(pairs, stream=stream)  # this loads the kernel
    pool = cumem.default_pool("mapped")
    before = pool.stats().in_flight_nbytes
    session.testing.set_capturing(stream, True)
    try:
        handle = cumem.copy_many_async(pairs, stream=stream)
        assert handle.done
        assert handle.route == "rows"
    finally:
        session.testing.set_capturing(stream, False)
    assert pool.stats().in_flight_nbytes > before


def test_page_locked_pairs_of_two_devices_on_a_stream_are_one_copy(emulated) -> None:
    """The processor copies them, together, and not each pair in a job of its own."""
    stream = cumem.Stream(device=1)
    data = np.arange(50 * 64, dtype=np.uint32).reshape(50, 64)
    src = cumem.array(data, kind="pinned", device=0)
    dst = cumem.zeros((50, 64), np.uint32, "pinned", device=1)
    pairs = [(dst[i], src[49 - i]) for i in range(0, 50, 2)]
    transfer = cumem.copy_many_async(pairs, stream=stream)
    transfer.wait()
    assert transfer.route == "host"
    assert (dst.numpy()[::2] == data[::-1][::2]).all()
