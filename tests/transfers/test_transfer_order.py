# SPDX-License-Identifier: Apache-2.0
"""Which background transfers wait for which others of the same buffer.

A transfer is held up behind a shut stream. Later transfers of the same buffer must wait
if their bytes overlap with its own, and must not wait otherwise.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import pytest
from support import session, values

import cumem

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

NBYTES = 4096
KINDS = ("device", "pinned", "managed")


@contextlib.contextmanager
def held() -> Iterator[cumem.Buffer]:
    """Yield a source that will contain sevens.

    Background copies from it wait until the end of the `with` block.
    """
    stream = cumem.Stream()
    source = cumem.full(NBYTES, 3, "u1", "pinned")
    sevens = cumem.full(NBYTES, 7, "u1", "device")
    cumem.Device(0).synchronize()
    with session.gate(stream):
        cumem.copy_async(source, sevens, stream=stream)
        yield source
    stream.synchronize()


def ones(nbytes: int = NBYTES) -> np.ndarray:
    return np.ones(nbytes, "u1")


@pytest.mark.parametrize("kind", KINDS)
def test_other_bytes_of_the_buffer_are_not_waited_for(emulated, kind: str) -> None:
    buffer = cumem.zeros(3 * NBYTES, "u1", kind)
    cumem.Device(0).synchronize()
    with held() as source:
        late = cumem.copy_async(buffer[NBYTES : 2 * NBYTES], source)
        cumem.copy_async(buffer[:NBYTES], ones()).wait()
        cumem.copy(buffer[2 * NBYTES :], ones())
        down = np.zeros(NBYTES, "u1")
        cumem.copy_async(down, buffer[:NBYTES]).wait()
        assert (down == 1).all()
        assert not late.done
        reverse = cumem.copy_async(buffer[: NBYTES - 1 : -1][:NBYTES], ones())
        reverse.wait()
        assert not late.done
        overlapping = cumem.copy_async(buffer[NBYTES - 1 : NBYTES + 1], ones(2))
        assert not overlapping.done
    overlapping.wait()
    late.wait()
    expected = np.repeat(np.array([1, 7, 1], "u1"), NBYTES)
    expected[NBYTES] = 1
    assert (values.get(buffer) == expected).all()


def test_bytes_between_strided_elements_are_waited_for(emulated) -> None:
    buffer = cumem.zeros(2 * NBYTES, "u1", "device")
    with held() as source:
        late = cumem.copy_async(buffer[::2], source)
        between = cumem.copy_async(buffer[1:NBYTES:2], ones(NBYTES // 2))
        session.let_workers_pass()
        assert not between.done
    between.wait()
    late.wait()


def test_transfers_that_read_the_same_do_not_wait_for_each_other(emulated) -> None:
    with held() as blocker:
        source = cumem.full(NBYTES, 5, "u1", "pinned")
        target = cumem.zeros(NBYTES, "u1", "device")
        cumem.copy_async(target, blocker)
        late = cumem.copy_async(target, source)
        other = np.zeros(NBYTES, "u1")
        cumem.copy_async(other, source).wait()
        assert (other == 5).all()
        write = cumem.copy_async(source, ones())
        session.let_workers_pass()
        assert not late.done
        assert not write.done
    write.wait()
    assert (values.get(target) == 5).all()


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("backwards", [False, True])
def test_cancelled_transfers_leave_what_they_waited_for_to_the_next(
    emulated, count: int, backwards: bool
) -> None:
    target = cumem.zeros(NBYTES, "u1", "pinned")
    with held() as source:
        cumem.copy_async(target, source)
        between = [cumem.copy_async(target, ones()) for _ in range(count)]
        after = cumem.copy_async(target[:NBYTES], ones() * 9)
        for transfer in reversed(between) if backwards else between:
            assert transfer.cancel()
        later = cumem.copy_async(target[1:], ones(NBYTES - 1) * 4)
        session.let_workers_pass()
        assert not after.done
        assert not later.done
    later.wait()
    assert values.get(target)[0] == 9
    assert (values.get(target)[1:] == 4).all()


def run_at_random(seed: int) -> None:
    """Write, read and cancel slices of one buffer at random, and compare with a model."""
    rng = random.Random(seed)
    size = 64
    kind = rng.choice(KINDS)
    buffer = cumem.zeros(size, "u1", kind)
    model = np.zeros(size, "u1")
    cumem.Device(0).synchronize()
    steps = []
    with held() as source:
        for number in range(1, 60):
            low = rng.randrange(size)
            part = slice(low, rng.randint(low + 1, size), rng.choice([1, 1, 2]))
            length = len(range(*part.indices(size)))
            if rng.random() < 0.3:
                target = np.zeros(length, "u1")
                steps.append((cumem.copy_async(target, buffer[part]), part, target))
            elif rng.random() < 0.2:
                transfer = cumem.copy_async(buffer[part], source[:length])
                steps.append((transfer, part, 7))
            elif rng.random() < 0.2:
                pairs = [(buffer[part], np.full(length, number, "u1"))] * 2
                steps.append((cumem.copy_many_async(pairs), part, number))
            else:
                value = np.full(length, number, "u1")
                steps.append((cumem.copy_async(buffer[part], value), part, number))
            if rng.random() < 0.3:
                rng.choice(steps)[0].cancel()
    for transfer, part, what in steps:
        if not transfer.cancelled:
            transfer.wait()
        if isinstance(what, np.ndarray):
            assert transfer.cancelled or (what == model[part]).all()
        elif not transfer.cancelled:
            model[part] = what
    assert (values.get(buffer) == model).all()


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_slices_ends_as_one_after_the_other(emulated, seed: int) -> None:
    run_at_random(seed)


@pytest.mark.parametrize("way", ["rows", "same", "many", "host"])
def test_long_queue_comes_to_its_end(emulated, way: str) -> None:
    """The queue must come to its end.

    tests/c/test_engine_order.c tests that no transfer searches the queue.
    """
    count = 3000
    source = np.ones((count, 256), "u1")
    target = cumem.empty((count, 256), "u1", "pinned" if way == "host" else "device")
    if way == "many":
        transfers = [cumem.copy_many_async([(target[0], source[0])] * count)]
    else:
        rows = range(count) if way == "rows" else [0] * count
        transfers = [cumem.copy_async(target[i], source[i]) for i in rows]
    for transfer in transfers:
        transfer.wait()
    rows_made = slice(None) if way == "rows" else 0
    assert (values.get(target)[rows_made] == 1).all()


# -- after= ------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, tuple, list])
@pytest.mark.parametrize("direction", ["up", "down", "host"])
def test_background_copy_comes_after_the_streams_named(
    emulated, direction, several
) -> None:
    """The copy waits even if cumem knows of no work on either end.

    The caller goes on.
    """
    other, stream = cumem.Stream(), cumem.Stream()
    device = cumem.full(NBYTES, 7, "u1", "device")
    sevens, out = np.full(NBYTES, 7, "u1"), np.zeros(NBYTES, "u1")
    target = cumem.zeros(NBYTES, "u1", "device")
    ends = {"up": (target, sevens), "down": (out, device), "host": (out, sevens)}
    unrelated = cumem.empty_device(NBYTES, "u1")
    cumem.Device(0).synchronize()
    with session.gate(stream):
        unrelated.fill(1, stream=stream)
        after = several([other, stream]) if several else stream
        transfer = cumem.copy_async(*ends[direction], after=after)
        free = cumem.copy_async(np.zeros(NBYTES, "u1"), sevens, after=other)
        free.wait()
        assert not transfer.done
        assert not out.any()
    transfer.wait()
    assert (values.get(ends[direction][0]) == 7).all()


def test_after_comes_before_the_stream_of_the_copy_too(emulated) -> None:
    first, stream = cumem.Stream(), cumem.Stream()
    source = cumem.full(NBYTES, 7, "u1", "pinned")
    target = cumem.zeros(NBYTES, "u1", "device")
    cumem.Device(0).synchronize()
    with session.gate(first):
        cumem.empty_device(NBYTES, "u1").fill(1, stream=first)
        cumem.copy_async(target, source, stream=stream, after=first)
        assert not stream.done
    stream.synchronize()
    assert (values.get(target) == 7).all()


@pytest.mark.parametrize(
    "after", ["no stream", 1.5, [None], [object()], -1, np.zeros(3)]
)
def test_after_must_be_streams(emulated, after) -> None:
    out = np.zeros(NBYTES, "u1")
    with pytest.raises((TypeError, ValueError), match="after"):
        cumem.copy_async(out, ones(), after=after)
    assert not out.any()
    cumem.copy_async(out, ones(), after=()).wait()
    cumem.copy_async(out, ones(), after=None).wait()
