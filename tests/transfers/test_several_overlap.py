# SPDX-License-Identifier: Apache-2.0
"""Ends of broadcast(), scatter() and gather() that share memory.

Targets that overlap must be refused by name, and targets that only interleave must be
served. Sets of byte addresses and np.shares_memory() say which is which.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support import session, values

import cumem
from cumem.transfers.multi_device import _End

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

as_strided = np.lib.stride_tricks.as_strided


@pytest.fixture
def two() -> Iterator[session.Runtime]:
    with session.opened("emulated", device_count=2) as opened:
        yield opened


def memory(kind: str) -> object:
    array = np.arange(100, dtype="i4")
    return values.put(array, kind, "C")


KINDS = ["device", "pinned", "mapped", "managed", "numpy"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["broadcast", "broadcast_async"])
def test_targets_of_broadcast_that_overlap_are_refused(two, kind, name) -> None:
    call = getattr(cumem, name)
    whole = memory(kind)
    other = cumem.zeros(50, "i4", device=1)
    source = np.full(50, 7, "i4")
    for targets, first, second in (
        ([whole[:50], whole[49::-1]], 0, 1),
        ([whole[:50], other, whole[49:99]], 0, 2),
        ([other, whole[50:], whole[::2]], 1, 2),
        ([other, other, whole[:50], whole[::2]], 2, 3),
    ):
        message = f"{name}: targets {first} and {second} overlap"
        with pytest.raises(ValueError, match=re.escape(message)):
            call(targets, source)
    assert (values.get(whole) == np.arange(100)).all()  # Nothing was copied.
    assert not values.get(other).any()
    cumem.broadcast([whole[::2], other, whole[1::2], whole[::2]], source)
    assert (values.get(whole) == 7).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["scatter", "scatter_async"])
def test_targets_of_scatter_that_overlap_are_refused(two, kind, name) -> None:
    call = getattr(cumem, name)
    whole = memory(kind)
    source = np.arange(60, dtype="i4") + 1000
    for targets, first, second in (
        ([whole[:30], whole[:30]], 0, 1),
        ([whole[70:], whole[40:60], whole[59:69]], 1, 2),
        ([whole[9::-1], whole[:50]], 0, 1),
    ):
        message = f"{name}: targets {first} and {second} overlap"
        with pytest.raises(ValueError, match=re.escape(message)):
            call(targets, source)
    assert (values.get(whole) == np.arange(100)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_one_array_are_no_overlap(two, kind) -> None:
    source = np.arange(400, dtype="i4").reshape(20, 20)
    whole = values.put(np.zeros((20, 20), "i4"), kind, "C")
    parts = [whole[:, 13:], whole[:, :5], whole[:, 5:13]]
    cumem.scatter(parts, source, axis=1)
    expected = np.concatenate([source[:, 7:12], source[:, 12:], source[:, :7]], axis=1)
    assert (values.get(whole) == expected).all()
    back = values.put(np.zeros((20, 20), "i4"), kind, "F")
    cumem.gather(back, parts, axis=1)
    assert (values.get(back) == source).all()


@pytest.mark.parametrize("kind", KINDS)
def test_source_and_target_that_share_bytes_are_refused(two, kind) -> None:
    whole = memory(kind)
    other = cumem.zeros(50, "i4", device=1)
    with pytest.raises(ValueError, match="broadcast: target 1 overlaps the source"):
        cumem.broadcast([other, whole[25:75]], whole[:50])
    with pytest.raises(ValueError, match="scatter: target 0 overlaps the source"):
        cumem.scatter([whole[50:], other], whole)
    for name in ("gather", "gather_async"):
        with pytest.raises(ValueError, match=f"{name}: source 1 overlaps the target"):
            getattr(cumem, name)(whole, [other, whole[49:99]])
    with pytest.raises(ValueError, match="gather: source 0 overlaps the target"):
        cumem.gather(whole, [whole[::-1]])
    assert (values.get(whole) == np.arange(100)).all()
    assert not values.get(other).any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_interleaves_or_is_the_same_is_served(two, kind) -> None:
    whole = memory(kind)
    other = cumem.zeros(50, "i4", device=1)
    expected = np.arange(100)
    expected[1::2] = expected[::2]
    cumem.broadcast([whole[1::2], other, whole[::2]], whole[::2])
    assert (values.get(whole) == expected).all()
    assert (values.get(other) == expected[::2]).all()
    cumem.gather(whole[::2], [whole[1::2]])
    cumem.scatter([whole[:50], other], whole)
    assert (values.get(whole) == expected).all()
    assert (values.get(other) == expected[50:]).all()


def test_target_of_gather_whose_elements_share_memory_is_refused(emulated) -> None:
    row = np.zeros(4, "i4")
    with pytest.raises(
        ValueError, match=r"gather: .* share memory: stride 0 along axi"
    ):
        cumem.gather(as_strided(row, (5,), (0,)), [np.ones(3, "i4"), np.ones(2, "i4")])
    assert not row.any()


def test_empty_targets_overlap_nothing(emulated) -> None:
    whole = memory("device")
    cumem.scatter([whole[5:5], whole, whole[:0]], np.arange(100, dtype="i4")[::-1])
    assert (values.get(whole) == np.arange(100)[::-1]).all()


def test_emulated_memory_and_its_view_on_the_host_are_one(emulated) -> None:
    whole = memory("device")
    view = np.from_dlpack(whole)
    with pytest.raises(ValueError, match="targets 0 and 1 overlap"):
        cumem.broadcast([whole[50:], view[:51][1:]], 5)
    with pytest.raises(ValueError, match="target 0 overlaps the source"):
        cumem.broadcast([whole[:-1]], view[1:])


def end(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 1, place: int = 0
) -> _End:
    """Return an end of a copy that has a layout, but no memory."""
    memory = SimpleNamespace(shape=shape, strides=strides, itemsize=itemsize)
    return _End(memory, (1 << 40) + place)


def bytes_of(view: _End) -> set[int]:
    """Return the addresses of all bytes of a view, found one by one."""
    if view.is_empty:
        return set()
    steps = [range(0, n * step, step) if step else [0] for n, step in view.axes]
    firsts = [view.place + sum(each) for each in itertools.product(*steps)]
    return {first + i for first in firsts for i in range(view.memory.itemsize)}


ENDS = st.lists(st.tuples(st.integers(0, 5), st.integers(-60, 60)), max_size=3)


@given(ENDS, ENDS, *[st.sampled_from([1, 2, 3, 4, 8])] * 2, st.integers(-80, 80))
def test_overlap_of_random_views_is_that_of_their_bytes(a, b, wide, narrow, at) -> None:
    first = end(tuple(n for n, _ in a), tuple(step for _, step in a), wide)
    second = end(tuple(n for n, _ in b), tuple(step for _, step in b), narrow, at)
    assert first.overlaps(second) == bool(bytes_of(first) & bytes_of(second))
    assert first.overlaps(second) == second.overlaps(first)


def test_overlap_of_large_columns_is_exact() -> None:
    """Large arrays are compared in blocks.

    The bounds of two columns may overlap although their bytes do not.
    """
    shape, strides = (100000, 50, 3), (4000, -40, 4)
    columns = end(shape, strides, 4)
    for place in (0, 3, 29, 4000 * 99999):
        assert columns.overlaps(end(shape, strides, 4, place))
    for place in (12, 28, 2000, 4000 * 99999 + 2000):
        assert not columns.overlaps(end(shape, strides, 4, place))


def test_overlap_that_takes_long_to_tell_counts() -> None:
    shape = (2000000,) * 3
    one = end(shape, (1000006, 1000036, 1000066))
    assert one.overlaps(end(shape, (1000012, 1000042, 1000072), 1, 2000000000000))


def test_two_of_many_that_overlap_are_named(two) -> None:
    array = np.zeros(1000, "u1")
    columns = [array[49 - i :: 50] for i in range(50)]
    cumem.broadcast(columns, 3)
    wide = [as_strided(array[49 - i :], (20, 1 + (i == 7)), (50, 1)) for i in range(49)]
    with pytest.raises(ValueError, match="scatter: targets 6 and 7 overlap"):
        cumem.scatter(wide, np.zeros((20, 50), "u1"), axis=1)


def test_overlap_is_what_numpy_says(emulated) -> None:
    @given(st.data())
    def check(data: st.DataObject) -> None:
        base = np.zeros(64, "u1")

        def view() -> np.ndarray:
            strides = [data.draw(st.sampled_from([1, 2, 3, 5, 8, 16])) for _ in "ab"]
            # Each element has its own bytes.
            assume(strides[1] not in (strides[0], 2 * strides[0]))
            room = 63 - sum(s * (n - 1) for s, n in zip(strides, (3, 2), strict=True))
            part = as_strided(base[data.draw(st.integers(0, room)) :], (3, 2), strides)
            return part[:: data.draw(st.sampled_from([1, -1]))]

        targets = [view() for _ in range(3)]
        expected = {
            (i, k)
            for i, k in itertools.combinations(range(3), 2)
            if np.shares_memory(targets[i], targets[k])
            and (targets[i].strides, targets[i].ctypes.data)
            != (targets[k].strides, targets[k].ctypes.data)
        }
        if expected:
            with pytest.raises(
                ValueError, match=r"targets \d and \d overlap"
            ) as caught:
                cumem.broadcast(targets, 7)
            named = re.findall(r"\d", str(caught.value))
            assert tuple(map(int, named)) in expected
            assert not base.any()
        else:
            cumem.broadcast(targets, 7)
            assert all((t == 7).all() for t in targets)

    check()
