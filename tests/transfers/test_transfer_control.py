# SPDX-License-Identifier: Apache-2.0
"""Transfers that are cancelled, interrupted, awaited in tasks, or report progress.

Most tests keep a transfer under way behind a stream whose gate is shut, and look at the
ends and the handle afterwards. Such a stream starts no work. The last part is about
callbacks of transfers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from support import programs, session, values

import cumem
from cumem.buffers.progress import Bar

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python

NBYTES = 5000


class Array(np.ndarray):
    """An array that can be weakly referenced."""


def array(value: int, nbytes: int = NBYTES) -> Array:
    return np.full(nbytes, value, "u1").view(Array)


@contextlib.contextmanager
def waiting() -> Iterator[tuple[cumem.Transfer, Array, cumem.Buffer]]:
    """Yield a background transfer, its target and its source.

    The transfer waits for a stream whose gate is shut.
    """
    stream = cumem.Stream()
    source, target = cumem.full(NBYTES, 3, "u1", "pinned"), array(1)
    other = cumem.full(NBYTES, 7, "u1", "device")
    cumem.Device(0).synchronize()
    with session.gate(stream):
        cumem.copy_async(source, other, stream=stream)
        yield cumem.copy_async(target, source), target, source
    stream.synchronize()


# -- cancelling ----------------------------------------------------------------------------


def test_cancelled_transfer_has_neither_read_nor_written(emulated) -> None:
    with waiting() as (transfer, target, source):
        assert not transfer.cancelled
        assert transfer.cancel()
        assert transfer.cancelled
        assert transfer.done
        # Cancelling it again returns True, and does no harm.
        assert transfer.cancel()
        assert transfer.progress == 0
        assert transfer.seconds > 0
        assert transfer.gbps == 0
        assert "cancelled" in repr(transfer)
        with pytest.raises(cumem.CancelledError, match="cancelled"):
            transfer.wait()
        with pytest.raises(cumem.CancelledError):
            transfer.order(cumem.Stream())
        with pytest.raises(cumem.CancelledError):
            cumem.Stream().wait(transfer)
    assert (target == 1).all()
    assert (source.numpy() == 7).all()


def test_cancelled_transfer_lets_go_of_both_ends(emulated) -> None:
    stream = cumem.Stream()
    source, target = cumem.full(NBYTES, 3, "u1", "pinned"), array(1)
    cumem.Device(0).synchronize()
    with session.gate(stream):
        cumem.copy_async(source, cumem.zeros(NBYTES, "u1", "device"), stream=stream)
        transfer = cumem.copy_async(target, source)
        alive = weakref.ref(target)
        del target
        gc.collect()
        assert alive() is not None
        assert transfer.cancel()
        gc.collect()
        assert alive() is None
        transfer = cumem.copy_async(cumem.zeros(NBYTES, "u1", "mapped"), source)
        count = session.testing.live_storages()
        assert transfer.cancel()
        assert session.testing.live_storages() == count - 1
        with pytest.raises(cumem.CancelledError):
            transfer.wait()


def test_transfer_that_has_begun_or_is_done_is_not_cancelled(emulated) -> None:
    stream = cumem.Stream()
    source, target = cumem.full(NBYTES, 3, "u1", "pinned"), cumem.zeros(NBYTES, "u1")
    cumem.Device(0).synchronize()
    with session.gate(stream):
        transfer = cumem.copy_async(target, source, stream=stream)
        assert not transfer.cancel()
        assert not transfer.cancelled
    transfer.wait()
    assert not transfer.cancel()
    assert (values.get(target) == 3).all()


def test_cancelled_transfer_is_not_in_the_way_of_its_ends(emulated) -> None:
    with waiting() as (transfer, target, _):
        middle = cumem.zeros(NBYTES, "u1", "managed")
        # The source is the array that the waiting transfer has as its target. An array does
        # not know its transfers, so this copy does not wait for that transfer.
        second = cumem.copy_async(middle, target)
        second.wait()
        third = cumem.copy_async(middle, transfer_source(transfer, middle))
        third.wait()
        assert transfer.cancel()
        assert (middle.numpy() == 9).all()


def transfer_source(transfer: cumem.Transfer, like: cumem.Buffer) -> np.ndarray:
    """Check that the transfer still waits, and return nines for another one."""
    assert not transfer.done
    return np.full(like.shape, 9, like.dtype)


def test_target_of_a_cancelled_transfer_can_be_read(emulated) -> None:
    stream = cumem.Stream()
    source = cumem.full(NBYTES, 3, "u1", "pinned")
    target = cumem.full(NBYTES, 1, "u1", "pinned")
    other = cumem.full(NBYTES, 7, "u1", "device")
    cumem.Device(0).synchronize()
    with session.gate(stream):
        cumem.copy_async(source, other, stream=stream)
        transfer = cumem.copy_async(target, source)
        assert transfer.cancel()
        assert (target.numpy() == 1).all()
        copied = cumem.zeros(NBYTES, "u1", "device")
        cumem.copy(copied, target)
        assert (values.get(copied) == 1).all()


def test_cancelled_transfer_is_no_failure_for_the_unraisable_hook(
    emulated, monkeypatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    with waiting() as (transfer, _, _):
        assert transfer.cancel()
        del transfer
        gc.collect()
    cumem.shutdown()
    assert seen == []


def test_cancelled_error_is_no_cancelled_task(emulated) -> None:
    assert issubclass(cumem.CancelledError, RuntimeError)
    assert not issubclass(cumem.CancelledError, asyncio.CancelledError)
    assert not issubclass(cumem.CancelledError, concurrent.futures.CancelledError)

    async def main() -> None:
        with waiting() as (transfer, target, _):

            async def work() -> str:
                try:
                    await transfer
                except cumem.CancelledError:
                    return "told"
                return "done"

            task = asyncio.create_task(work())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert transfer.cancel()
            assert await asyncio.wait_for(task, session.PATIENCE) == "told"
            with pytest.raises(cumem.CancelledError):
                await transfer  # A cancelled transfer answers at once.
        assert (target == 1).all()

    asyncio.run(main())


def test_cancelled_task_does_not_cancel_the_transfer(emulated) -> None:
    async def main() -> None:
        with waiting() as (transfer, target, _):

            async def work() -> None:
                await transfer

            task = asyncio.create_task(work())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(work(), 0.01)
            assert not transfer.cancelled
            assert not transfer.done
        await transfer
        assert (target == 7).all()

    asyncio.run(main())


def test_waiting_thread_hears_of_the_cancelling(emulated) -> None:
    heard: list[BaseException] = []
    begun = threading.Event()

    def wait(transfer: cumem.Transfer) -> None:
        begun.set()
        try:
            transfer.wait()
        except cumem.CancelledError as error:
            heard.append(error)

    with waiting() as (transfer, _, _):
        thread = threading.Thread(target=wait, args=(transfer,))
        thread.start()
        begun.wait()
        assert transfer.cancel()
        thread.join()
    assert len(heard) == 1


# -- progress ------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["host", "direct", "kernel", "staged", "down"])
@pytest.mark.parametrize("background", [False, True])
def test_progress_is_all_when_it_is_done(runtime, route, background) -> None:
    nbytes = 24 << 20
    kinds = {
        "host": ("numpy", "numpy"),
        "direct": ("device", "pinned"),
        "kernel": ("device", "device"),
        "staged": ("device", "numpy"),
        "down": ("numpy", "device"),
    }[route]
    step = 2 if route == "kernel" else 1
    target = values.put(np.zeros(nbytes, "u1"), kinds[0])[::step]
    source = values.put(np.full(nbytes, 5, "u1"), kinds[1])[::step]
    stream = None if background or route == "host" else cumem.Stream()
    transfer = cumem.copy_async(target, source, stream=stream)
    seen = [0]
    while seen[-1] < transfer.nbytes:
        seen.append(transfer.progress)
    assert seen == sorted(seen)
    assert transfer.done
    transfer.wait()
    assert transfer.progress == transfer.nbytes == nbytes // step
    assert (values.get(target) == 5).all()


def test_progress_of_a_copy_that_waits_is_nothing(emulated) -> None:
    with waiting() as (transfer, _, _):
        assert transfer.progress == 0
        assert transfer.nbytes == NBYTES
    transfer.wait()
    assert transfer.progress == NBYTES


def test_callable_is_called_at_the_end_of_a_copy(runtime) -> None:
    seen: list[tuple[int, int]] = []
    target = cumem.zeros(NBYTES, "u1", "device")
    cumem.copy(target, array(3), progress=lambda *args: seen.append(args))
    assert seen[-1] == (NBYTES, NBYTES)
    assert (values.get(target) == 3).all()
    seen.clear()
    transfer = cumem.copy_async(target, array(4))
    transfer.wait(progress=lambda *args: seen.append(args))
    assert seen[-1] == (NBYTES, NBYTES)


def test_callable_is_called_while_a_copy_waits(emulated) -> None:
    seen: list[tuple[int, int]] = []
    stream = cumem.Stream()
    target = cumem.zeros(NBYTES, "u1", "device", stream=stream)
    cumem.Device(0).synchronize()
    session.shut(stream)

    def tell(*args: int) -> None:
        if not seen:
            session.testing.gate_open(stream)
        seen.append(args)

    cumem.copy(target, array(3), stream=stream, progress=tell)
    assert seen[0] == (0, NBYTES)
    assert seen[-1] == (NBYTES, NBYTES)
    with waiting() as (transfer, _, _):

        def stop(*args: int) -> None:
            seen[:] = [args]
            raise StopError

        with pytest.raises(StopError):
            transfer.wait(progress=stop)
        assert seen == [(0, NBYTES)]


class StopError(Exception):
    """The error that callables for progress raise in these tests."""


def test_callable_that_raises_ends_the_copy_as_ctrl_c_does(emulated) -> None:
    def stop(done: int, total: int) -> None:
        raise StopError

    stream = cumem.Stream()
    target = cumem.zeros(NBYTES, "u1", "device")
    with session.gate(stream):
        target.fill(1, stream=stream)
        with pytest.raises(StopError):
            cumem.copy(target, array(3), stream=stream, progress=stop)
        assert session.testing.pending_transfers() == 0
    stream.synchronize()
    assert (values.get(target) == 1).all()
    with waiting() as (transfer, out, _):
        with pytest.raises(StopError):
            transfer.wait(progress=stop)
        assert not transfer.done  # Only the waiting has ended.
    transfer.wait()
    assert (out == 7).all()


@pytest.mark.parametrize("wrong", [1, "yes", object()])
def test_progress_that_is_neither_bool_nor_callable_is_refused(emulated, wrong) -> None:
    target = cumem.zeros(NBYTES, "u1", "device")
    with pytest.raises(TypeError, match="progress must be a bool or a callable"):
        cumem.copy(target, array(3), progress=wrong)
    transfer = cumem.copy_async(target, array(3))
    with pytest.raises(TypeError, match="progress must be a bool or a callable"):
        transfer.wait(progress=wrong)
    with pytest.raises(TypeError, match="progress"):
        cumem.copy_async(target, array(3), progress=True)  # type: ignore[call-arg]
    transfer.wait(progress=False)
    cumem.copy(target, array(3), progress=None)


def test_missing_tqdm_is_an_error_that_names_the_extra(emulated, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    target = cumem.zeros(NBYTES, "u1", "device")
    with pytest.raises(ImportError, match=r"cumem\[progress\]") as caught:
        cumem.copy(target, array(3), progress=True)
    assert caught.value.name == "tqdm"
    # The error is raised before anything begins.
    assert (values.get(target) == 0).all()
    transfer = cumem.copy_async(target, array(3))
    with pytest.raises(ImportError, match=r"cumem\[progress\]"):
        transfer.wait(progress=True)
    transfer.wait()


@pytest.fixture
def bars(monkeypatch) -> list[types.SimpleNamespace]:
    """Install a tqdm that records what it is asked to show, and return the bars it
    makes.
    """
    made: list[types.SimpleNamespace] = []

    class Recorder(types.SimpleNamespace):
        def __init__(self, **options: object) -> None:
            super().__init__(n=0, closed=False, seen=[], **options)
            made.append(self)

        def update(self, n: int) -> None:
            self.n += n
            self.seen.append(self.n)

        def close(self) -> None:
            self.closed = True

    module = types.ModuleType("tqdm.auto")
    module.tqdm = Recorder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    return made


def test_short_copy_shows_no_bar(emulated, bars) -> None:
    pytest.importorskip("tqdm")
    target = cumem.zeros(NBYTES, "u1", "device")
    cumem.copy(target, array(3), progress=True)
    cumem.copy_async(target, array(4)).wait(progress=True)
    assert bars == []
    assert (values.get(target) == 4).all()


def test_long_copy_shows_a_bar(emulated, bars, monkeypatch) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr("cumem.buffers.progress.DELAY", 0)

    stream = cumem.Stream()
    source = cumem.full(NBYTES, 7, "u1", "device")
    cumem.Device(0).synchronize()

    def go_on() -> None:
        session.wait_until(lambda: bars)
        session.testing.gate_open(stream)

    with session.rescued(stream), session.gate(stream):
        source.fill(8, stream=stream)
        transfer = cumem.copy_async(array(1), source)
        with session.when_waiting(go_on):
            transfer.wait(progress=True)
    transfer.wait(progress=True)
    (bar,) = bars  # The second wait was done at once, without a bar.
    assert (bar.total, bar.unit, bar.unit_scale) == (NBYTES, "B", True)
    assert bar.closed


def test_bar_follows_the_reported_progress(bars, monkeypatch) -> None:
    pytest.importorskip("tqdm")
    bar = Bar()
    bar(10, 100)
    assert bars == []  # A copy this short shows no bar yet.
    monkeypatch.setattr("cumem.buffers.progress.DELAY", 0)
    for done in (20, 20, 70, 100):
        bar(done, 100)
    bar.close()
    assert bars[0].seen == [20, 20, 70, 100]
    assert bars[0].closed


def test_bar_of_tqdm_itself(capsys, monkeypatch) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr("cumem.buffers.progress.DELAY", 0)
    bar = Bar()
    bar(1 << 20, 4 << 20)
    bar(4 << 20, 4 << 20)
    bar.close()
    assert "100%" in capsys.readouterr().err


# -- Ctrl-C --------------------------------------------------------------------------------


LONG = 48 << 20  # This is more than can be in flight at a time.

ROUTES = {
    # Each route has a target, a source, a number of bytes, and the step of both ends.
    "quick": ("device", "numpy", NBYTES, 1),
    "quick down": ("numpy", "device", NBYTES, 1),
    "direct": ("device", "pinned", LONG, 1),
    "direct down": ("pinned", "device", LONG, 1),
    "driver": ("device", "numpy", 2 << 20, 1),
    "staged": ("device", "numpy", LONG, 1),
    "staged down": ("numpy", "device", LONG, 1),
    "staged-kernel": ("device", "numpy", LONG, 2),
    "staged-kernel down": ("numpy", "device", LONG, 2),
    "kernel": ("device", "device", LONG, 2),
    "kernel of the host": ("mapped", "managed", LONG, 2),
}


@pytest.mark.parametrize("route", ROUTES)
def test_interrupted_copy_leaves_nothing_in_flight(emulated, route) -> None:
    to, source_kind, nbytes, step = ROUTES[route]
    target = values.put(np.full(nbytes, 1, "u1"), to)
    source = values.put(np.full(nbytes, 5, "u1"), source_kind)
    stream = cumem.Stream()
    other = cumem.zeros(8, "u1", "device")
    cumem.Device(0).synchronize()
    with session.alarm(stream):
        # The copy waits for this fill.
        other.fill(1, stream=stream)
        try:
            cumem.copy(target[::step], source[::step], stream=stream)
        finally:
            assert session.testing.pending_transfers() == 0
    stream.synchronize()
    assert (values.get(target) == 1).all()
    cumem.copy(target[::step], source[::step], stream=stream)
    assert (values.get(target)[::step] == 5).all()


@pytest.mark.parametrize("route", ROUTES)
def test_interrupted_copy_that_has_begun_is_over_when_it_raises(
    emulated, route
) -> None:
    to, source_kind, nbytes, step = ROUTES[route]
    target = values.put(np.full(nbytes, 1, "u1"), to)
    source = values.put(np.full(nbytes, 5, "u1"), source_kind)
    if isinstance(target, cumem.Buffer):
        target.record_stream(stream := cumem.Stream())
    else:
        stream = cumem.Stream()
    cumem.Device(0).synchronize()
    # No work is queued before the copy, but the device does not reach the copy for a while.
    session.shut(stream)

    def stop(done: int, total: int) -> None:
        assert done < total
        session.testing.gate_open(stream)
        raise StopError

    try:
        cumem.copy(target[::step], source[::step], stream=stream, progress=stop)
    except StopError:
        assert session.testing.pending_transfers() == 0
        after = values.get(target).copy()
        source[::step] = 9
        stream.synchronize()
        assert (values.get(target) == after).all()
        assert set(np.unique(after)) <= {1, 5}
    else:
        raise AssertionError("the progress was not reported")
    cumem.copy(target[::step], source[::step])
    assert (values.get(target)[::step] == 9).all()


@pytest.mark.parametrize("nbytes", [256, LONG], ids=["short", "long"])
def test_interrupted_copy_keeps_its_ends_until_it_is_done(emulated, nbytes) -> None:
    stream, source = cumem.Stream(), np.full(nbytes, 5, "u1")
    # Otherwise the copy would first wait for another stream.
    with stream:
        target = cumem.zeros(nbytes, "u1")
    held = sys.getrefcount(source)
    cumem.Device(0).synchronize()
    with session.alarm(stream):
        try:
            cumem.copy(target, source, stream=stream)
        finally:
            assert session.testing.pending_transfers() == 1
            assert sys.getrefcount(source) == held + 1
    stream.synchronize()
    session.wait_until(lambda: sys.getrefcount(source) == held)
    # The parts of a long copy that were not queued yet are not copied.
    assert set(np.unique(values.get(target))) <= ({5} if nbytes == 256 else {0, 5})


def test_interrupted_copy_between_hosts_stops_on_the_way(emulated) -> None:
    nbytes = 256 << 20
    target, source = np.zeros(nbytes, "u1"), np.ones(nbytes, "u1")

    def stop(done: int, total: int) -> None:
        assert 0 < done < total == nbytes
        raise StopError

    with pytest.raises(StopError):
        cumem.copy(target, source, progress=stop)
    assert session.testing.pending_transfers() == 0
    copied = int(target.sum(dtype="i8"))
    assert 0 < copied < nbytes
    assert int(target.sum(dtype="i8")) == copied


def test_interrupted_overlapping_copy_between_hosts_stops_on_the_way(emulated) -> None:
    nbytes = 256 << 20
    memory = np.zeros(nbytes + 1, "u1")
    for target, source in ((memory[1:], memory[:-1]), (memory[:-1], memory[1:])):

        def stop(done: int, total: int) -> None:
            assert 0 < done < total == nbytes
            raise StopError

        with pytest.raises(StopError):
            cumem.copy(target, source, progress=stop)
    assert session.testing.pending_transfers() == 0


# -- tasks ---------------------------------------------------------------------------------


def test_ensure_future_makes_a_task_and_create_task_refuses(emulated) -> None:
    async def both() -> None:
        await asyncio.ensure_future(cumem.copy_async(target, array(3)))
        await asyncio.wait_for(cumem.copy_async(target, array(4)), session.PATIENCE)
        transfer = cumem.copy_async(target, array(5))
        with pytest.raises(TypeError, match="coroutine"):
            asyncio.get_running_loop().create_task(transfer)  # type: ignore[arg-type]
        await transfer

    target = cumem.zeros(NBYTES, "u1", "device")
    asyncio.run(both())
    assert (values.get(target) == 5).all()


# -- callbacks ---------------------------------------------------------------------------

THREAD = "cumem-done-callbacks"


def end_of_callbacks() -> None:
    """Wait until the thread that calls back has ended, as the interpreter does at its
    end.
    """
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(session.PATIENCE)
            assert not thread.is_alive()


def test_callback_of_a_transfer_under_way_is_called_once_when_it_is_done(
    emulated,
) -> None:
    stream = cumem.Stream()
    source, target = cumem.zeros(1000, kind="pinned"), cumem.empty_device(1000)
    reported: list[cumem.Transfer] = []
    states: set[tuple[bool, str]] = set()

    def tell(transfer: cumem.Transfer) -> None:
        reported.append(transfer)
        states.add((transfer.done, threading.current_thread().name))

    with session.gate(stream):
        transfers = [cumem.copy_async(target, source, stream=stream) for _ in range(5)]
        for each in transfers:
            each.add_done_callback(tell)
        transfers[0].add_done_callback(tell)
        assert not reported
    for each in transfers:
        each.wait()
    end_of_callbacks()
    assert sorted(map(id, reported)) == sorted(map(id, [*transfers, transfers[0]]))
    assert states == {(True, THREAD)}


def test_callbacks_of_many_transfers_take_no_descriptor_for_each(emulated) -> None:
    stream = cumem.Stream()
    source, target = cumem.zeros(100, kind="pinned"), cumem.empty_device(100)
    reported: list[cumem.Transfer] = []
    with session.gate(stream):
        for i in range(200):
            transfer = cumem.copy_async(target, source, stream=stream)
            transfer.add_done_callback(reported.append)
            if i == 0:
                before = len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) == before
    transfer.wait()
    end_of_callbacks()
    assert len(reported) == 200


def test_callback_of_a_transfer_that_is_done_is_called_at_once(runtime) -> None:
    transfer = cumem.copy_async(cumem.empty_device(10), np.ones(10))
    transfer.wait()
    reported: list[object] = []
    transfer.add_done_callback(lambda each: reported.append(threading.current_thread()))
    assert reported == [threading.current_thread()]


def test_callbacks_hear_of_failures_and_of_cancelling(emulated) -> None:
    stream = cumem.Stream()
    target = cumem.empty_device(1000)
    reported: list[object] = []
    with session.gate(stream):
        target.fill(1, stream=stream)
        transfer = cumem.copy_async(np.zeros(1000), target)
        transfer.add_done_callback(lambda each: reported.append(each.cancelled))
        assert transfer.cancel()
        end_of_callbacks()
        assert reported == [True]
    failed: list[str] = []

    def ask(each: cumem.Transfer) -> None:
        try:
            each.wait()
        except cumem.CudaError as error:
            failed.append(error.call)

    session.testing.plan_fault("copy_async", 1, 999)
    # A worker moves this source.
    source = np.zeros(64, "u1")[::-1]
    failing = cumem.copy_async(cumem.empty_device(64, "u1"), source)
    failing.add_done_callback(ask)
    session.wait_until(lambda: failed)
    session.testing.plan_fault(None, 0)
    assert len(failed) == 1
    end_of_callbacks()


def test_error_in_a_callback_goes_to_the_hook_and_the_others_are_called(
    emulated, monkeypatch
) -> None:
    hooked: list[tuple[object, object]] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda args: hooked.append((args.exc_value, args.object))
    )
    reported: list[object] = []
    failure = LookupError("mine")

    def fail(_: cumem.Transfer) -> None:
        raise failure

    stream = cumem.Stream()
    source, target = cumem.zeros(10, kind="pinned"), cumem.empty_device(10)
    with session.gate(stream):
        transfer = cumem.copy_async(target, source, stream=stream)
        for each in (fail, reported.append):
            transfer.add_done_callback(each)
    end_of_callbacks()
    transfer.add_done_callback(fail)
    assert hooked == [(failure, fail)] * 2
    assert reported == [transfer]


def test_callback_may_add_another_one(emulated) -> None:
    stream = cumem.Stream()
    source, target = cumem.zeros(10, kind="pinned"), cumem.empty_device(10)
    reported: list[str] = []

    def again(transfer: cumem.Transfer) -> None:
        reported.append("first")
        cumem.copy_async(target, source).add_done_callback(
            lambda _: reported.append("second")
        )

    with session.gate(stream):
        cumem.copy_async(target, source, stream=stream).add_done_callback(again)
    session.wait_until(lambda: len(reported) == 2)
    end_of_callbacks()
    assert reported == ["first", "second"]


def test_what_cannot_be_called_back_is_refused(runtime) -> None:
    transfer = cumem.copy_async(cumem.empty_device(10), np.ones(10))
    with pytest.raises(TypeError, match="fn must be callable, not int"):
        transfer.add_done_callback(1)  # type: ignore[arg-type]
    transfer.wait()


def test_interpreter_calls_back_before_it_ends() -> None:
    program = """
import cumem, numpy as np
target = cumem.empty_device(32 << 20, "u1")
transfer = cumem.copy_async(target, np.zeros(32 << 20, "u1"))
transfer.add_done_callback(lambda each: print(each.nbytes, each.done))
"""
    done = programs.run("-W", "ignore", "-c", program)
    assert (done.stdout, done.stderr) == (f"{32 << 20} True\n", "")
