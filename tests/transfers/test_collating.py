# SPDX-License-Identifier: Apache-2.0
"""Batches stacked into page-locked memory, by this process and by workers that may die.

PinnedCollate stacks samples into a ring of slots that forked workers share. The tests
fork workers like those of a DataLoader, kill them, fill the ring, and look at which
batches are page-locked and which slots are free.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import warnings
from array import array as c_array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import session
from support.forks import FORK, fork_and_run
from support.session import testing

import cumem
from cumem.transfers import collating
from cumem.transfers.worker_slots import Shortage, SlotRing

pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

SLOT = 1 << 20


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass
class Sample:
    image: Any
    name: str


def sample(i: int) -> dict[str, Any]:
    """Return sample number `i`: arrays, numbers and texts in several containers."""
    image = np.full((2, 3), i, "f4")
    return {
        "pair": Pair(image, i),
        "list": [image[:0], (image.T, i / 2)],
        "record": Sample(np.full(5, i % 2 == 0), f"name {i}"),
        "text": str(i),
    }


def is_batch(found: Any, numbers: list[int]) -> bool:
    """Return whether the batch consists of the stacked samples of `numbers`."""
    each = [sample(i) for i in numbers]
    pairs = [
        (found["pair"].image, [s["pair"].image for s in each]),
        (found["pair"].label, numbers),
        (found["list"][0], np.empty((len(each), 0, 3))),
        (found["list"][1][0], [s["list"][1][0] for s in each]),
        (found["list"][1][1], [i / 2 for i in numbers]),
        (found["record"].image, [s["record"].image for s in each]),
    ]
    assert found["text"] == [str(i) for i in numbers]
    assert found["record"].name == [f"name {i}" for i in numbers]
    return all(np.array_equal(np.asarray(a), b) for a, b in pairs)


def is_locked(array: Any) -> bool:
    return cumem.asbuffer(array).kind == "pinned"


HOLD = "hold the lock"


class Worker:
    """A forked child that stacks the samples it is sent, like a worker of a DataLoader."""

    def __init__(self, collate: Any) -> None:
        self._end, end = multiprocessing.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with FORK:
                self._pid = os.fork()
        if self._pid == 0:
            try:
                # Libraries need this after a fork, and children of multiprocessing run
                # it too.
                multiprocessing.util._run_after_forkers()
                self._end.close()
                signal.alarm(session.PATIENCE)
                # A fork does not take PyTorch's threads along, so the child works without
                # them.
                if "torch" in sys.modules:
                    sys.modules["torch"].set_num_threads(1)
                with contextlib.suppress(EOFError):
                    while True:
                        end.send_bytes(answer(collate, end.recv()))
            finally:
                os._exit(0)
        end.close()

    def tell(self, samples: list[Any]) -> None:
        self._end.send(samples)

    def hear(self) -> bytes:
        return self._end.recv_bytes()

    def reported(self, samples: list[Any]) -> bytes:
        self.tell(samples)
        return self.hear()

    def __call__(self, samples: list[Any]) -> Any:
        return pickle.loads(self.reported(samples))

    def kill(self) -> None:
        """Kill the child and leave it a zombie: it is dead, but nobody has asked for
        its status.
        """
        os.kill(self._pid, signal.SIGKILL)
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        self._end.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def answer(collate: Any, samples: list[Any]) -> bytes:
    # For the message HOLD, the worker locks the ring and keeps the lock.
    if isinstance(samples[0], str):
        collate._lock_ring()
        return b"held"
    try:
        return pickle.dumps(
            collating._Message(collate._ring, collating._gathered(samples))
        )
    except Exception as error:
        return pickle.dumps(repr(error))


@contextlib.contextmanager
def workers(collate: Any, count: int = 1) -> Iterator[list[Worker]]:
    """Fork workers that collate, and end them after the block."""
    made = [Worker(collate) for _ in range(count)]
    del collate
    try:
        yield made
    finally:
        for each in made:
            each.end()


def taken(ring: SlotRing) -> int:
    """Return how many slots are not free."""
    ring.reclaim()
    return int(np.count_nonzero(ring._words % 4))


def arrays(count: int, nbytes: int = 1000) -> list[np.ndarray]:
    return [np.full(nbytes // 4, i, "i4") for i in range(count)]


# -- without workers ---------------------------------------------------------------------


def test_samples_are_stacked_into_pinned_memory(runtime) -> None:
    found = cumem.PinnedCollate()([sample(i) for i in range(4)])
    assert is_batch(found, [0, 1, 2, 3])
    assert type(found["pair"]) is Pair
    assert type(found["record"]) is Sample
    for array in (found["pair"].image, found["pair"].label, found["record"].image):
        assert is_locked(array)
    for there in cumem.prefetch([found]):
        image = there["pair"].image
        assert np.array_equal(cumem.asnumpy(image)[3], sample(3)["pair"].image)


def test_mappings_stay_what_they_are(runtime) -> None:
    made = collections.OrderedDict(b=np.ones(2), a=np.zeros(2))
    found = cumem.PinnedCollate()([made, made])
    assert type(found) is collections.OrderedDict
    assert list(found) == ["b", "a"]
    assert tuple(found["b"].shape) == (2, 2)


@pytest.mark.parametrize(
    ("samples", "error"),
    [
        ([np.ones(3), np.ones(4)], (ValueError, RuntimeError)),
        ([[1, 2], [1]], RuntimeError),
        ([np.array([None])] * 2, TypeError),
        ([object()] * 2, TypeError),
        ([None] * 2, TypeError),
        ([], IndexError),
    ],
)
def test_samples_that_make_no_batch_are_refused(runtime, samples, error) -> None:
    with pytest.raises(error):
        cumem.PinnedCollate()(samples)


class Odd(collections.UserList):
    """A sequence that is made from other arguments than its items, and cannot be
    changed.
    """

    def __init__(self, begin: int, end: int) -> None:
        super().__init__(range(begin, end))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("not I")


class Fixed(Sequence):
    """A sequence that has no method to change it."""

    def __init__(self, *items: Any) -> None:
        self._items = items

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __len__(self) -> int:
        return len(self._items)


class Own(Fixed):
    def __init__(self, items: Any) -> None:
        super().__init__(*items)


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        (bytearray(b"\1\2"), list),
        (memoryview(b"\1\2"), list),
        (c_array("h", [1, 2]), list),
        (range(1, 3), list),
        (Odd(1, 3), list),
        (collections.deque([1, 2]), collections.deque),
        (collections.UserList([1, 2]), collections.UserList),
        (Own([1, 2]), Own),
    ],
)
@pytest.mark.parametrize("in_worker", [False, True])
def test_sequences_of_any_kind_are_taken_apart(emulated, one, kind, in_worker) -> None:
    collate = cumem.PinnedCollate(1, SLOT)
    samples = [{"x": one}, {"x": one}, {"x": one}]
    if in_worker:
        made = collating._Message(collate._ring, collating._gathered(samples))
        found = pickle.loads(pickle.dumps(made))
    else:
        found = collate(samples)
    assert type(found["x"]) is kind
    assert [np.asarray(each).tolist() for each in found["x"]] == [[1] * 3, [2] * 3]
    # Without a worker, these few numbers are not worth page-locking.
    assert [is_locked(each) for each in found["x"]] == [in_worker] * 2
    assert list(one) == [1, 2]


@pytest.mark.parametrize("one", [{"x": np.ones(3)}, "text", b"bytes", 5, None])
def test_one_sample_is_no_list_of_samples(runtime, one) -> None:
    with pytest.raises(TypeError, match=r"samples must be a list.*batch_size=None"):
        cumem.PinnedCollate()(one)


def test_rows_of_an_array_are_samples(runtime) -> None:
    rows = np.arange(6.0).reshape(3, 2)
    assert np.array_equal(cumem.PinnedCollate()(rows), rows)
    assert np.array_equal(cumem.PinnedCollate()(iter(rows)), rows)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0,), ValueError, "slots must be at least 1, not 0"),
        ((1.5,), TypeError, "slots must be an int, not float"),
        ((1, 0), ValueError, "slot_nbytes must be at least 1, not 0"),
        ((1, "much"), ValueError, "slot_nbytes must be a number of bytes"),
        ((1 << 40, "1 TiB"), (OSError, OverflowError), "."),
    ],
)
def test_rings_that_make_no_sense_are_refused(arguments, error, text) -> None:
    with pytest.raises(error, match=text):
        cumem.PinnedCollate(*arguments)


def test_ring_without_addresses_says_what_to_make_instead() -> None:
    with pytest.raises(OSError, match=r"no room for 1024 slots .*make a smaller cumem"):
        cumem.PinnedCollate(1 << 10, "1 TiB")


def test_ring_says_what_it_is_and_is_pickled_as_another_one(emulated) -> None:
    collate = cumem.PinnedCollate(3, "1 MiB")
    assert repr(collate) == "cumem.PinnedCollate(slots=3, slot_nbytes=1048576)"
    other = pickle.loads(pickle.dumps(collate))
    assert repr(other) == repr(collate)
    assert other._ring.key != collate._ring.key


# -- with workers ------------------------------------------------------------------------


def test_worker_fills_a_slot_that_is_page_locked_here(runtime) -> None:
    collate = cumem.PinnedCollate(8, SLOT)
    with workers(collate, 2) as (one, other):
        for turn in range(3):
            first = one([sample(i) for i in range(turn, turn + 3)])
            second = other([sample(7)])
            assert is_batch(first, list(range(turn, turn + 3)))
            assert is_batch(second, [7])
            assert is_locked(first["pair"].image)
            assert is_locked(second["list"][1][0])
            assert (
                cumem.copy_async(
                    cumem.empty_device((3, 2, 3), "f4"), first["pair"].image
                ).route
                != "staged"
            )
    first["pair"].image[:] = 3  # The batch can be written.
    del first, second
    session.wait_until(lambda: taken(collate._ring) == 0)


def test_full_ring_falls_back_and_slots_come_back(runtime) -> None:
    collate = cumem.PinnedCollate(2, SLOT)
    with workers(collate, 2) as both:
        found = [both[i % 2](arrays(3)) for i in range(5)]
        assert [is_locked(each) for each in found] == [True, True, False, False, False]
        for each in found:
            assert np.array_equal(each, arrays(3))
        del found, each
        session.wait_until(lambda: taken(collate._ring) == 0)
        assert is_locked(both[1](arrays(3)))


def test_batch_larger_than_a_slot_falls_back(runtime) -> None:
    collate = cumem.PinnedCollate(2, 1 << 16)
    with workers(collate) as (worker,):
        assert is_locked(worker(arrays(16, 4096)))
        large = worker(arrays(17, 4096))
        assert not is_locked(large)
        assert np.array_equal(large, arrays(17, 4096))
        assert tuple(worker(arrays(2, 0)).shape) == (2, 0)


def test_slot_grows_with_what_it_holds(runtime) -> None:
    collate = cumem.PinnedCollate(1, 16 << 20)
    with workers(collate) as (worker,):
        for count in (1, 700, 3, 900):
            found = worker(arrays(count, 16384))
            assert is_locked(found)
            assert is_locked(found[-1])
            assert np.array_equal(found, arrays(count, 16384))
            del found
            session.wait_until(lambda: taken(collate._ring) == 0)


def test_slot_of_a_batch_that_is_not_read_yet_is_not_taken_again(runtime) -> None:
    collate = cumem.PinnedCollate(1, SLOT)
    with workers(collate) as (worker,):
        reported = [worker.reported(arrays(i)) for i in (1, 2, 3)]
        found = [pickle.loads(each) for each in reported]
        assert [is_locked(each) for each in found] == [True, False, False]
        for i, each in enumerate(found, 1):
            assert np.array_equal(each, arrays(i))


def test_slots_that_a_worker_no_longer_needs_are_for_others(runtime) -> None:
    collate = cumem.PinnedCollate(2, SLOT)
    with workers(collate, 2) as (one, other):
        found = [pickle.loads(one.reported(arrays(i))) for i in (1, 2)]
        del found
        session.wait_until(lambda: taken(collate._ring) == 0)
        kept = one(arrays(3))
        assert is_locked(kept)
        assert is_locked(other(arrays(3)))


def test_workers_do_not_get_in_each_others_way(emulated) -> None:
    collate = cumem.PinnedCollate(5, SLOT)
    random = np.random.default_rng(5)
    kept: list[tuple[Any, list[np.ndarray]]] = []
    with workers(collate, 4) as all_of_them:
        for i in range(60):
            chosen = random.choice(4, 3, replace=False)
            samples = [[np.full(500, i * 4 + k, "i4")] * 3 for k in chosen]
            for k, each in zip(chosen, samples, strict=True):
                # The workers work at the same time.
                all_of_them[k].tell(each)
            reported = [all_of_them[k].hear() for k in chosen]
            for message, each in zip(reported, samples, strict=True):
                kept.append((pickle.loads(message), each))
            for found, each in kept:
                assert np.array_equal(found, each)
            del kept[: len(kept) - int(random.integers(0, 4))]
            del found


def test_process_that_takes_a_slot_waits_for_one_that_does(emulated) -> None:
    ring = cumem.PinnedCollate(1, SLOT)._ring
    with workers(ring) as (worker,):
        worker.tell([HOLD])
        worker.hear()
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(ring.take(1)))
        thread.start()
        session.wait_until_waiting(thread)
        assert not found
        worker.kill()  # The kernel unlocks the ring when the worker dies.
        thread.join()
        assert found == [(0, 1)]


def test_slots_of_a_dead_worker_come_back(runtime) -> None:
    collate = cumem.PinnedCollate(2, SLOT)
    with workers(collate, 3) as (one, other, third):
        kept = one(arrays(1))
        lost = one.reported(arrays(2))  # Nobody reads this batch.
        assert not is_locked(other(arrays(3)))
        one.kill()
        found = other(arrays(3))
        assert is_locked(found)
        assert not is_locked(third(arrays(3)))
        with pytest.raises(RuntimeError, match="a batch is lost: the worker"):
            pickle.loads(lost)
        assert np.array_equal(found, arrays(3))
        # The slot of a batch that was read is no longer the worker's.
        assert np.array_equal(kept, arrays(1))
        del kept
        session.wait_until(lambda: taken(collate._ring) == 1)
        assert is_locked(third(arrays(3)))


def test_batch_of_a_dead_worker_that_was_sent_can_be_read(runtime) -> None:
    collate = cumem.PinnedCollate(1, SLOT)
    with workers(collate, 2) as (one, other):
        sent = one.reported(arrays(2))
        one.kill()
        found = pickle.loads(sent)
        assert not is_locked(other(arrays(3)))
        assert np.array_equal(found, arrays(2))


def test_slot_whose_batch_is_not_sent_is_free_again(runtime) -> None:
    collate = cumem.PinnedCollate(1, SLOT)
    with workers(collate) as (worker,):
        for _ in range(2):
            failed = worker([{"x": np.ones(3), "y": "text"}, {"x": np.ones(4)}])
            assert "KeyError" in failed or "shape" in failed or "size" in failed
        assert "pickle" in worker([{"x": np.ones(3), "y": Unsendable()}])
        assert is_locked(worker(arrays(3)))


def change(batch: Any) -> None:
    batch["x"] = 0


def change_field(batch: Any) -> None:
    batch.x = 0


@pytest.mark.parametrize(
    "use",
    [
        lambda batch: batch["x"],
        lambda batch: batch.x,
        lambda batch: batch.items(),
        lambda batch: {**batch},
        lambda batch: "x" in batch,
        lambda batch: batch.pop("x"),
        change,
        change_field,
        list,
        len,
        bool,
    ],
)
def test_result_in_a_worker_when_used_as_a_batch_is_refused(emulated, use) -> None:
    collate = cumem.PinnedCollate(1, SLOT)
    made = collating._Message(collate._ring, collating._gathered([{"x": np.ones(3)}]))
    with pytest.raises(TypeError, match="change the samples before it, or the batch"):
        use(made)
    # The failed uses have not changed `made`.
    found, other = pickle.loads(pickle.dumps((made, "more")))
    assert np.array_equal(found["x"], np.ones((1, 3)))
    assert other == "more"


class Unsendable(str):
    """A text that a worker receives like any other, but that it cannot pickle."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if multiprocessing.parent_process() is None and os.getpid() != PARENT:
            raise pickle.PicklingError("pickle: not I")
        return super().__reduce_ex__(protocol)


PARENT = os.getpid()


def test_slot_is_not_reused_while_it_is_copied(emulated) -> None:
    collate = cumem.PinnedCollate(2, SLOT)
    stream = cumem.Stream()
    with workers(collate) as (worker,):
        there = cumem.empty_device((3, 250), "i4")
        session.shut(stream)
        transfer = cumem.copy_async(there, worker(arrays(3)), stream=stream)
        other = worker([array + 1 for array in arrays(3)])
        assert is_locked(other)
        assert not is_locked(worker(arrays(3)))
        testing.gate_open(stream)
        transfer.wait()
        assert np.array_equal(there.to_numpy(), arrays(3))
        del transfer, other
        session.wait_until(lambda: gc.collect() >= 0 and taken(collate._ring) == 0)


def test_slot_is_not_reused_before_the_current_stream_is_done(emulated) -> None:
    """Another library may have been asked for a copy that cumem does not see."""
    collate = cumem.PinnedCollate(1, SLOT)
    stream = cumem.Stream()
    with workers(collate) as (worker,), stream:
        found = worker(arrays(3))
        session.shut(stream)
        del found
        assert not is_locked(worker(arrays(3)))
        assert not is_locked(worker(arrays(3)))
        testing.gate_open(stream)
        session.wait_until(lambda: taken(collate._ring) == 0)
        assert is_locked(worker(arrays(3)))


def test_memory_is_given_back_on_request(runtime) -> None:
    collate = cumem.PinnedCollate(3, SLOT)
    ring = collate._ring

    def nbytes() -> int:
        return os.fstat(ring.fd).st_blocks * 512

    with workers(collate, 2) as (one, other):
        kept = one(arrays(50))
        lost = other.reported(arrays(50))
        one(arrays(50))
        assert nbytes() >= 3 * 50_000
        other.kill()
        before = nbytes()
        # The ring is not the child's, so trim() frees nothing there.
        fork_and_run(collate.trim)
        assert nbytes() == before
        collate.trim()
        assert 50_000 <= nbytes() <= before - 2 * 50_000
        assert session.testing.registrations() == 1
        assert np.array_equal(kept, arrays(50))
        with pytest.raises(RuntimeError, match="a batch is lost"):
            pickle.loads(lost)
        found = one(arrays(50))
        assert is_locked(found)
        assert np.array_equal(found, arrays(50))


def test_ring_after_shutdown_is_as_new(runtime) -> None:
    collate = cumem.PinnedCollate(1, SLOT)
    with workers(collate) as (worker,):
        assert is_locked(worker(arrays(3)))
        collate._ring.reclaim()
        cumem.shutdown()
        assert taken(collate._ring) == 0
        found = worker(arrays(3))
        assert is_locked(found)
        assert np.array_equal(found, arrays(3))


def test_child_that_drops_a_batch_leaves_its_slot_alone(emulated) -> None:
    collate = cumem.PinnedCollate(1, SLOT)
    with workers(collate) as (worker,):
        found = [worker(arrays(3))]

        def check() -> None:
            found.clear()
            gc.collect()
            collate._ring._dead.clear()

        fork_and_run(check)
        assert taken(collate._ring) == 1
        assert not is_locked(worker(arrays(3)))
        assert np.array_equal(found[0], arrays(3))


def test_process_that_did_not_make_the_ring_gets_a_copy(emulated) -> None:
    collate = cumem.PinnedCollate(1, SLOT)
    with workers(collate) as (worker,):
        sent = worker.reported(arrays(3))

        def check() -> None:
            found = pickle.loads(sent)
            assert np.array_equal(found, arrays(3))
            assert not (collate._ring._words % 4).any()

        fork_and_run(check)
        assert is_locked(worker(arrays(3)))


def test_batch_whose_ring_is_gone_is_an_error(emulated) -> None:
    collate = cumem.PinnedCollate(1, SLOT)
    with workers(collate) as (worker,):
        sent = worker.reported(arrays(3))
        del collate
        gc.collect()
        with pytest.raises(RuntimeError, match="PinnedCollate that made it is gone"):
            pickle.loads(sent)


def test_batch_outlives_its_ring(emulated) -> None:
    collate = cumem.PinnedCollate(1, SLOT)
    with workers(collate) as (worker,):
        found = worker(arrays(3))
        del collate
        gc.collect()
        assert is_locked(found)
        assert np.array_equal(found, arrays(3))


@pytest.fixture
def short(monkeypatch) -> None:
    """Give the test a record of shortages in which page-locked memory never ran short."""
    monkeypatch.setattr(collating, "_shortage", Shortage("cumem.PinnedCollate: x"))


@pytest.mark.parametrize("code", [2, 801])
def test_pages_that_cannot_be_locked_are_reported_once_and_batches_stay_right(
    emulated, code
) -> None:
    collate = cumem.PinnedCollate(2, SLOT)
    with workers(collate) as (worker,):
        testing.plan_fault("host_register", 1, code, repeat=True)
        with pytest.warns(RuntimeWarning, match="page-locked") as reported:
            found = worker(arrays(3))
        assert len(reported) == 1
        assert np.array_equal(found, arrays(3))
        assert not is_locked(found)
        # There is no second warning.
        assert np.array_equal(worker(arrays(3)), arrays(3))
        testing.plan_fault(None, 0)


def test_pages_are_locked_again_once_there_is_room(emulated) -> None:
    collate = cumem.PinnedCollate(4, SLOT)
    with workers(collate) as (worker,):
        testing.plan_fault("host_register", 1, 2, repeat=True)
        with pytest.warns(RuntimeWarning):
            worker(arrays(3))
        testing.plan_fault(None, 0)
        collate._ring._shortage._left_out = 0
        assert is_locked(worker(arrays(3)))


def test_pages_that_fail_for_another_reason_are_an_error_and_the_slot_is_free(
    emulated,
) -> None:
    collate = cumem.PinnedCollate(1, SLOT)
    with workers(collate) as (worker,):
        testing.plan_fault("host_register", 1, 999)
        with pytest.raises(cumem.CudaError):
            worker(arrays(3))
        testing.plan_fault(None, 0)
        session.wait_until(lambda: taken(collate._ring) == 0)
        assert is_locked(worker(arrays(3)))


def test_batch_without_workers_goes_on_in_ordinary_memory(emulated, short) -> None:
    """WSL, gVisor and confidential computing refuse to page-lock however much memory is
    free.
    """
    testing.plan_fault("host_register", 1, 2, repeat=True)
    samples = [{"x": np.ones(100_000), "y": 1}, {"x": np.zeros(100_000), "y": 2}]
    with pytest.warns(RuntimeWarning, match="refuses to page-lock") as reported:
        batches = [cumem.PinnedCollate()(samples) for _ in range(3)]
    assert len(reported) == 1
    for batch in batches:
        assert np.array_equal(batch["x"], np.stack([each["x"] for each in samples]))
        assert [int(each) for each in batch["y"]] == [1, 2]


def test_batch_above_a_limit_goes_on_in_ordinary_memory(emulated, short) -> None:
    samples = [np.ones(1 << 20)] * 2
    cumem.set_limit("pinned", "1MiB")
    with pytest.warns(RuntimeWarning, match="set_limit") as reported:
        batches = [cumem.PinnedCollate()(samples) for _ in range(2)]
    assert len(reported) == 1
    assert all(np.array_equal(batch, np.stack(samples)) for batch in batches)


def test_collate_in_a_with_block_is_closed_by_its_end(emulated) -> None:
    samples = [np.ones(3), np.zeros(3)]
    with cumem.PinnedCollate(4, "1MiB") as collate:
        batch = collate(samples)
    with pytest.raises(ValueError, match="this PinnedCollate is closed"):
        collate(samples)
    with pytest.raises(ValueError, match="closed"), collate:
        pass
    collate.close()
    assert (np.asarray(batch) == samples).all()
