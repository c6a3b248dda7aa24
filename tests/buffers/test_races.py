# SPDX-License-Identifier: Apache-2.0
"""Code that runs in the middle of a call must not take its memory away.

Such code is Python code of exporters, finalizers, garbage collections and other
threads. It frees the call's buffers or shuts cumem down at every place where cumem lets
it run. The call must work or be refused, and must write nothing but its target.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from support import exporters, session, values

import cumem

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python


class FreesOnRead:
    """An exporter that frees the target of the copy while it is asked for its data."""

    def __init__(self, target: cumem.Buffer) -> None:
        self.target = target
        self.inner = np.arange(16, dtype="u1")
        self.error: BaseException | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.inner.__dlpack_device__()

    def __dlpack__(self, **keywords: object) -> object:
        try:
            self.target.free()
        except BufferError as error:
            self.error = error
        return self.inner.__dlpack__(**keywords)


@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_target_cannot_be_freed_while_the_source_is_read(runtime, kind) -> None:
    target = cumem.zeros(16, "u1", kind)
    source = FreesOnRead(target)
    cumem.copy(target, source)
    assert isinstance(source.error, BufferError)
    source.error = None
    assert (values.get(target) == np.arange(16)).all()
    target.free()


class FreesOnStream:
    """A stream of another library that frees the buffer when it is asked for its handle."""

    def __init__(self, buffer: cumem.Buffer, handle: int) -> None:
        self.buffer, self.handle = buffer, handle

    def __cuda_stream__(self) -> tuple[int, int]:
        self.buffer.free()
        return (0, self.handle)


def test_memory_freed_by_the_stream_is_not_prefetched(runtime) -> None:
    stream = cumem.Stream()
    buffer = cumem.zeros(4096, "u1", "managed")
    with pytest.raises(ValueError, match="closed"):
        buffer.prefetch_pages(0, stream=FreesOnStream(buffer, stream.handle))


class ActsWhenDropped:
    """An object that runs an action when its last reference is dropped, and keeps the
    answer.
    """

    def __init__(self, action: Callable[[], object], answers: list[object]) -> None:
        self.action, self.answers = action, answers

    def __del__(self) -> None:
        try:
            self.answers.append(self.action())
        except Exception as error:
            self.answers.append(error)


def in_thread(call: Callable[[], object], answers: list[object]) -> None:
    """Keep what the call returns or raises, unless that is None."""

    def run() -> None:
        try:
            answer = call()
        except Exception as error:
            answer = error
        if answer is not None:
            answers.append(answer)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def during(call: Callable[[], object], action: Callable[[], object]) -> list[object]:
    """Run `action` within `call`, when cumem drops what finished copies kept alive.

    This happens in a new thread, since the main thread might drop what was kept earlier.
    Return what `action` and `call` return or raise.
    """
    answers: list[object] = []

    def run() -> object:
        session.testing.defer(ActsWhenDropped(action, answers))
        return [call()]

    in_thread(run, answers)
    assert len(answers) == 2
    return [answers[0], answers[1][0] if isinstance(answers[1], list) else answers[1]]


#: A pool that holds little takes 2 MiB from the driver, or as much as a request needs. A
#: block of this size fills what was taken for it, so trim() can give these pages back.
LARGE = 8 << 20


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed", "device"])
def test_fill_of_memory_freed_meanwhile_writes_nothing_else(runtime, kind) -> None:
    victim = cumem.zeros(LARGE, "u1", kind)
    others: list[cumem.Buffer] = []

    def free() -> None:
        victim.free()
        others.append(cumem.full(LARGE, 42, "u1", kind))

    freed, filled = during(lambda: victim.fill(7), free)
    if victim.closed:
        assert isinstance(filled, ValueError)
        assert (values.get(others[0]) == 42).all()
    else:
        assert isinstance(freed, BufferError)
        assert (values.get(victim) == 7).all()


@pytest.mark.parametrize("kind", ["pinned", "mapped", "managed", "device"])
def test_fill_of_memory_trimmed_meanwhile_is_refused_or_done(runtime, kind) -> None:
    victim = cumem.zeros(LARGE, "u1", kind)

    def free() -> None:
        victim.free()
        cumem.trim()

    freed, filled = during(lambda: victim.fill(7), free)
    if victim.closed:
        assert isinstance(filled, ValueError)
    else:
        assert isinstance(freed, BufferError)
        assert (values.get(victim) == 7).all()


def test_place_of_memory_trimmed_meanwhile_is_not_asked(emulated) -> None:
    victim = cumem.zeros(LARGE, "u1", "managed")

    def free() -> None:
        victim.free()
        cumem.trim()

    _, place = during(lambda: victim.prefetch_location, free)
    assert isinstance(place, ValueError if victim.closed else (str, type(None)))


@pytest.mark.parametrize("max_version", [None, (1, 0)])
@pytest.mark.parametrize("call", [1, 2])
def test_dlpack_exports_no_memory_that_its_dtype_freed(
    runtime, monkeypatch, max_version, call
) -> None:
    """DLPack reads the name of another package's dtype, which runs Python code."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    buffer = cumem.zeros(4096, ml_dtypes.bfloat16, "pinned")
    others: list[cumem.Buffer] = []
    left = call

    def free(frame: object, event: str, _: object) -> None:
        nonlocal left
        # NumPy's dtype.name runs this function.
        if event == "call" and frame.f_code.co_name == "_name_get":
            left -= 1
            if left == 0:
                with contextlib.suppress(BufferError):
                    buffer.free()
                    others.append(cumem.full(4096, 3, buffer.dtype, "pinned"))

    sys.setprofile(free)
    try:
        capsule = buffer.__dlpack__(max_version=max_version)
    except ValueError:
        assert buffer.closed
        return
    finally:
        sys.setprofile(None)
    assert others == []
    assert (cumem.asbuffer(capsule).to_numpy().view("u2") == 0).all()


class AsksMore:
    """A stand-in for ml_dtypes that runs an action while an import looks for a type in
    it.
    """

    def __init__(self, module: object, action: Callable[[], object]) -> None:
        self.module, self.action = module, action
        self.answer: object = None

    @property
    def bfloat16(self) -> object:
        action, self.action = self.action, None
        if action is not None:
            thread = threading.Thread(target=self.run, args=(action,))
            thread.start()
            thread.join()
        return self.module.bfloat16

    def run(self, action: Callable[[], object]) -> None:
        try:
            self.answer = action()
        except ValueError as error:
            self.answer = error


@pytest.mark.parametrize("versioned", [False, True])
def test_capsule_taken_by_two_threads_is_consumed_once(
    runtime, monkeypatch, versioned
) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    made = exporters.Produced.over(np.arange(8, dtype="u2"), versioned=versioned)
    made.tensor.dtype = exporters.DType(4, 16, 1)
    capsules = [made.capsule()]
    asks = AsksMore(ml_dtypes, lambda: cumem.asbuffer(capsules[0]))
    monkeypatch.setitem(sys.modules, "ml_dtypes", asks)
    buffer = cumem.asbuffer(capsules[0])
    assert "consumed" in str(asks.answer)
    del buffer, asks.answer
    capsules.clear()
    gc.collect()
    assert made.deleted == 1


@pytest.mark.parametrize("versioned", [False, True])
def test_capsule_whose_import_fails_is_as_it_was(runtime, versioned) -> None:
    made = exporters.Produced.over(np.arange(8, dtype="u2"), versioned=versioned)
    made.tensor.dtype = exporters.DType(1, 12, 1)
    capsule = made.capsule()
    with pytest.raises(BufferError, match="whole bytes"):
        cumem.asbuffer(capsule)
    made.tensor.dtype = exporters.DType(1, 16, 1)
    assert (cumem.asbuffer(capsule).to_numpy() == np.arange(8)).all()
    del capsule
    gc.collect()
    assert made.deleted == 1


class PyFuture(asyncio.futures._PyFuture):
    """A future whose done() calls the waker again, as an event loop in Python may do."""

    wake: Callable[[], object] | None = None

    def done(self) -> bool:
        wake, type(self).wake = type(self).wake, None
        if wake is not None:
            wake()
        return super().done()


class PyLoop(asyncio.SelectorEventLoop):
    """An event loop in Python that keeps the callback by which cumem wakes it."""

    wakes: list[Callable[[], object]]

    def create_future(self) -> PyFuture:
        return PyFuture(loop=self)

    def add_reader(
        self, fd: int, callback: Callable[[], object], *args: object
    ) -> None:
        self.wakes = [callback]
        super().add_reader(fd, callback, *args)


@pytest.mark.parametrize("count", range(1, 9))
def test_waker_called_by_a_future_settles_each_once(emulated, count: int) -> None:
    loop = PyLoop()
    target = cumem.empty_device(1 << 16, "u1")
    source = cumem.zeros(1 << 16, "u1", "pinned")
    stream = cumem.Stream()

    async def main() -> None:
        with session.gate(stream):
            transfers = [
                cumem.copy_async(target, source, stream=stream) for _ in range(count)
            ]
            tasks = [asyncio.ensure_future(wait(each)) for each in transfers]
            # Now all of them wait.
            await asyncio.sleep(0)
        transfers[-1].wait()
        PyFuture.wake = loop.wakes[0]
        loop.wakes[0]()
        await asyncio.gather(*tasks)

    async def wait(transfer: cumem.Transfer) -> None:
        await transfer

    try:
        loop.run_until_complete(asyncio.wait_for(main(), session.PATIENCE))
    finally:
        PyFuture.wake = None
        loop.close()


class Bomb:
    """An object that goes off when cumem looks for the n-th time at what finished
    copies kept.
    """

    def __init__(
        self, left: int, action: Callable[[], object], armed: list[bool]
    ) -> None:
        self.left, self.action, self.armed = left, action, armed

    def __del__(self) -> None:
        if self.armed and self.left > 0:
            session.testing.defer(Bomb(self.left - 1, self.action, self.armed))
        elif self.armed:
            self.action()


class Collections:
    """A block in which the n-th garbage collection runs an action."""

    def __init__(self, left: int, action: Callable[[], object]) -> None:
        self.left, self.action = left, action

    def __enter__(self) -> None:
        # Python reuses freed tuples and dicts, and then starts no collection. The hoard
        # uses the freed ones up, so that each new object can start a collection.
        self.hoard = [[{}, [], (i,), (i, i), (i, i, i)] for i in range(2000)]
        self.before = gc.get_threshold()
        gc.callbacks.append(self)
        gc.set_threshold(1)

    def __exit__(self, *_: object) -> None:
        gc.set_threshold(*self.before)
        gc.callbacks.remove(self)
        del self.hoard

    def __call__(self, phase: str, _: object) -> None:
        if phase == "start":
            self.left -= 1
            if self.left == -1:
                self.action()


def by_burial(
    left: int, action: Callable[[], object], call: Callable[[], object]
) -> None:
    """Run `action` when `call` looks for the n-th time at what finished copies kept."""
    armed = [True]
    session.testing.defer(Bomb(left, action, armed))
    try:
        call()
    finally:
        armed.clear()


def by_collection(
    left: int, action: Callable[[], object], call: Callable[[], object]
) -> None:
    with Collections(left // 2, action):
        # Every second object starts a collection.
        odd = [[] for _ in range(left % 2)]
        call()
        del odd


SMALL = 1 << 16


def subjects(kind: str) -> list[cumem.Buffer]:
    return [cumem.full(SMALL, i + 1, "u1", kind) for i in range(2)]


def pooled(kind: str, count: int) -> object:
    with cumem.Pool(kind) as pool:
        return [pool.allocate(SMALL) for _ in range(count)]


#: Each entry makes a call with two buffers, and reads buffers, streams, pools or the
#: runtime.
EVERY_KIND = {
    "fill": lambda a, b: a.fill(7),
    "fill with values": lambda a, b: a.fill(np.arange(SMALL, dtype="u1")),
    "fill on a stream": lambda a, b: a.fill(7, stream=cumem.Stream()),
    "fill from a buffer": lambda a, b: a.fill(b),
    "dlpack": lambda a, b: cumem.asbuffer(a.__dlpack__(max_version=(1, 0))).to_numpy(),
    "dlpack copy": lambda a, b: cumem.asbuffer(a.__dlpack__(copy=True)).to_numpy(),
    "dlpack to the host": lambda a, b: np.from_dlpack(cumem.asbuffer(a)).sum(),
    "interface": lambda a, b: session.testing.array_interface(a),
    "copy method": lambda a, b: a.copy().to_numpy(),
    "to_numpy": lambda a, b: a.to_numpy(),
    "copy_many": lambda a, b: cumem.copy_many([(a, b), (np.zeros(SMALL, "u1"), a)]),
    "copy_many views": lambda a, b: cumem.copy_many([(a[::2], b[::2])]),
    "broadcast": lambda a, b: cumem.broadcast([a, b], np.ones(SMALL, "u1")),
    "scatter": lambda a, b: cumem.scatter([a, b], np.ones(2 * SMALL, "u1")),
    "gather": lambda a, b: cumem.gather(np.ones(2 * SMALL, "u1"), [a, b]),
    "broadcast async": lambda a, b: [
        t.wait() for t in cumem.broadcast_async([a, b], np.ones(SMALL, "u1"))
    ],
    "record a stream": lambda a, b: a.record_stream(cumem.Stream()),
    "index": lambda a, b: a[10:20].reshape(2, 5).T,
    "empty_like": lambda a, b: cumem.empty_like(a),
    "array of it": lambda a, b: cumem.array(a),
    "full of it": lambda a, b: cumem.full(SMALL, b),
    "allocate": lambda a, b: cumem.empty(SMALL + 1, "u1", a.kind).fill(1),
    "allocate plainly": lambda a, b: [cumem.empty_device(70001), cumem.empty(70002)],
    "pools": lambda a, b: pooled(a.kind, 2),
    "default pool": lambda a, b: cumem.default_pool(a.kind).allocate(SMALL).fill(1),
    "streams": lambda a, b: cumem.Stream().wait(cumem.Stream().record()),
    "statistics": lambda a, b: [cumem.stats(), cumem.memory_info(), repr(a)],
}
#: These calls need memory that the host can reach.
HOST_KINDS = {
    "numpy": lambda a, b: a.numpy().sum(),
    "memoryview": lambda a, b: bytes(memoryview(a)),
    "asbuffer": lambda a, b: cumem.asbuffer(a.numpy()).fill(3),
    "pickle": lambda a, b: pickle.loads(pickle.dumps(a)).fill(3),
    "register": lambda a, b: cumem.register(a).close(),
}
MANAGED = {
    "prefetch": lambda a, b: a.prefetch_pages(0),
    "prefetch_location": lambda a, b: a.prefetch_location,
}
STEPS = [("pinned", name, call) for name, call in {**EVERY_KIND, **HOST_KINDS}.items()]
STEPS += [("device", name, call) for name, call in EVERY_KIND.items()]
STEPS += [("managed", name, call) for name, call in MANAGED.items()]


@pytest.mark.parametrize("way", [by_burial, by_collection])
@pytest.mark.parametrize(
    ("kind", "name", "call"), STEPS, ids=[f"{kind} {name}" for kind, name, _ in STEPS]
)
def test_code_at_each_step_of_a_call_frees_nothing_in_use(
    emulated, way, kind, name, call
) -> None:
    """Code may run wherever cumem lets go of objects, and wherever Python collects
    garbage.

    The code frees the buffers of the call, takes their memory for others, and tries a
    shutdown. Then the call must work or be refused, and write nothing but its target.
    """
    # A call that waits may look very often, so at most 60 steps are tried.
    for left in range(60):
        ends = subjects(kind)
        others: list[cumem.Buffer] = []
        ran: list[bool] = []

        def act(ends=ends, others=others, ran=ran) -> None:
            ran.append(True)
            for end in ends:
                with contextlib.suppress(BufferError):
                    end.free()
                    others.append(cumem.full(SMALL, 42, "u1", kind))
            with contextlib.suppress(RuntimeError, BufferError):
                cumem.shutdown()

        def run(ends=ends) -> None:
            with contextlib.suppress(ValueError, BufferError):
                call(*ends)

        raised: list[BaseException] = []
        in_thread(lambda left=left, act=act, run=run: way(left, act, run), raised)
        assert raised == []
        assert all(o.closed or (values.get(o) == 42).all() for o in others)
        if not ran:
            break
    session.testing.poll()


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python 3.12 collects only between bytecodes"
)
@pytest.mark.parametrize("others", [[], ["mapped"]])
def test_default_pool_asked_for_in_a_collection_that_shuts_down_is_one(
    emulated, others
) -> None:
    def shut_down(phase: str, _: object) -> None:
        gc.set_threshold(0)
        # A shutdown in the middle of the call is refused.
        with contextlib.suppress(RuntimeError):
            cumem.shutdown()

    cumem.empty_pinned(SMALL)
    pools = [cumem.default_pool(kind) for kind in others]
    before = gc.get_threshold()
    gc.disable()
    # These use up the objects that Python keeps for reuse.
    hoard = [[{}, (i, i)] for i in range(3000)]
    gc.callbacks.append(shut_down)
    gc.set_threshold(1)
    gc.enable()
    try:
        pool = cumem.default_pool("pinned")
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(shut_down)
    assert pool.allocate(SMALL).nbytes == SMALL
    del hoard, pools


def churn(stop: threading.Event, failures: list[BaseException]) -> None:
    array, out = np.zeros(1000), np.zeros(1000)
    while not stop.is_set():
        try:
            cumem.empty_device(1000)
            cumem.copy(out, array)
        # Another thread has shut cumem down in between.
        except (RuntimeError, ValueError):
            pass
        except BaseException as error:
            failures.append(error)
            return


def test_shutdown_beside_working_threads_refuses_or_works(emulated) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    threads = [threading.Thread(target=churn, args=(stop, failures)) for _ in range(4)]
    for thread in threads:
        thread.start()
    refusals = []
    for _ in range(50):
        try:
            cumem.shutdown()
        except RuntimeError as error:
            refusals.append(str(error))
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all("another thread" in refusal for refusal in refusals)


def test_import_waits_for_the_stream_of_the_memorys_device(emulated) -> None:
    count = 4096
    buffer = cumem.zeros(count, "u1", "device", device=1)
    session.testing.check_pools()
    producer = cumem.current_stream(1)
    source = cumem.full(count, 9, "u1", "pinned", device=1)
    target = cumem.zeros(count, "u1", "device", device=0)
    stream = cumem.Stream(device=0)
    interface = {
        "shape": (count,),
        "typestr": "|u1",
        "data": (buffer.ptr, False),
        "version": 3,
        "stream": 1,
    }
    exporter = type("Exporter", (), {"__cuda_array_interface__": interface})()
    with session.gate(producer):
        cumem.copy_async(buffer, source, stream=producer)
        handle = cumem.copy_async(target, exporter, stream=stream)
        assert not handle.done
    handle.wait()
    assert (values.get(target) == 9).all()


class ShutsDown:
    """An exporter that calls shutdown() while it is asked for its stream or its memory."""

    def __init__(self) -> None:
        self.inner = np.arange(16, dtype="u1")
        self.error: BaseException | None = None

    def shut_down(self) -> None:
        try:
            cumem.shutdown()
        except RuntimeError as error:
            self.error = error

    def __cuda_stream__(self) -> tuple[int, int]:
        self.shut_down()
        return (0, 1)

    def __dlpack_device__(self) -> tuple[int, int]:
        self.shut_down()
        return self.inner.__dlpack_device__()

    def __dlpack__(self, **keywords: object) -> object:
        return self.inner.__dlpack__(**keywords)


@pytest.mark.parametrize(
    "call",
    [
        lambda guest: cumem.Stream.from_external(guest),
        lambda guest: cumem.Event().record(guest),
        lambda guest: cumem.Stream().wait(guest),
        lambda guest: cumem.empty_device(10, stream=guest),
        lambda guest: cumem.asbuffer(guest),
        lambda guest: cumem.copy(cumem.zeros(16, "u1"), guest),
        lambda guest: cumem.register(guest),
        lambda guest: cumem.full(16, guest, kind="pinned"),
        lambda guest: cumem.array(guest, kind="pinned"),
        lambda guest: cumem.empty_like(guest, kind="pinned"),
    ],
)
def test_shutdown_below_a_call_is_refused(emulated, call) -> None:
    guest = ShutsDown()
    call(guest)
    assert "a call of cumem is under way" in str(guest.error)


def pending(kind: str) -> cumem.Buffer:
    """Return memory that a stream has worked on."""
    buffer = cumem.empty(4096, "u1", kind)
    buffer.fill(1, stream=cumem.Stream())
    return buffer


def recorded() -> cumem.Event:
    return cumem.Stream().record()


def trimmable() -> None:
    cumem.empty_pinned(5000).free()


def closed_after_work() -> cumem.types.Registration:
    return cumem.register(np.zeros(5000))


#: Each entry has a preparation, the call of another thread, and the operation of the
#: runtime that is held up.
CALLS = {
    "make a stream": (None, lambda _: cumem.Stream(), "stream_create"),
    "check a priority": (
        None,
        lambda _: cumem.Stream(priority=-1),
        "stream_priority_range",
    ),
    "close a stream": (cumem.Stream, lambda s: s.close(), "stream_destroy"),
    "drop a stream": (lambda: [cumem.Stream()], lambda s: s.clear(), "stream_destroy"),
    "wait for a stream": (
        cumem.Stream,
        lambda s: s.synchronize(),
        "stream_synchronize",
    ),
    "query a stream": (cumem.Stream, lambda s: s.done, "stream_query"),
    "ask for a priority": (cumem.Stream, lambda s: s.priority, "stream_get_priority"),
    "ask for a capture": (
        cumem.Stream,
        lambda s: s.is_capturing,
        "stream_is_capturing",
    ),
    "wrap a stream": (
        cumem.Stream,
        lambda s: cumem.Stream.from_external(s.handle),
        "stream_get_id",
    ),
    "let a stream wait": (
        lambda: [cumem.Stream(), cumem.Stream()],
        lambda s: s[0].wait(s[1]),
        "stream_wait_event",
    ),
    "make an event": (None, lambda _: cumem.Event(), "event_create"),
    "close an event": (cumem.Event, lambda e: e.close(), "event_destroy"),
    "drop an event": (lambda: [cumem.Event()], lambda e: e.clear(), "event_destroy"),
    "record an event": (cumem.Event, lambda e: e.record(), "event_record"),
    "wait for an event": (recorded, lambda e: e.synchronize(), "event_synchronize"),
    "query an event": (recorded, lambda e: e.done, "event_query"),
    "measure": (recorded, lambda e: e.seconds_since(e), "event_elapsed"),
    "wait for a device": (
        None,
        lambda _: cumem.Device(0).synchronize(),
        "device_synchronize",
    ),
    "ask for memory": (None, lambda _: cumem.memory_info(), "memory_info"),
    "describe a device": (None, lambda _: cumem.Device(0).name, "device_describe"),
    "ask for peers": (
        None,
        lambda _: cumem.Device(0).can_access_peer(1),
        "peer_can_access",
    ),
    "ask for a version": (None, lambda _: cumem.info.about(), "driver_version"),
    "allocate": (None, lambda _: cumem.empty_device(5000), "physical_create"),
    "trim": (trimmable, lambda _: cumem.trim(), "host_unregister"),
    "fill": (
        lambda: cumem.empty_device(5000, "u1"),
        lambda b: b.fill(1),
        "fill_8_async",
    ),
    "copy": (
        # A short copy would keep the GIL, and the main thread could not run beside it.
        lambda: cumem.empty_device(16 << 20, "u1"),
        lambda b: cumem.copy(b, np.zeros(16 << 20, "u1")),
        "copy_async",
    ),
    "prefetch": (
        lambda: cumem.zeros(5000, "u1", "managed"),
        lambda b: b.prefetch_pages(0),
        "prefetch_async",
    ),
    "ask where pages are": (
        lambda: cumem.zeros(5000, "u1", "managed"),
        lambda b: b.prefetch_location,
        "range_attribute",
    ),
    "drop used memory": (
        lambda: [pending("pinned")],
        lambda b: b.clear(),
        "event_record",
    ),
    "read late memory": (
        lambda: pending("managed"),
        lambda b: b.numpy().sum(),
        "stream_query",
    ),
    "export to CUDA": (
        lambda: pending("device"),
        session.testing.array_interface,
        "stream_query",
    ),
    "export by DLPack": (
        lambda: pending("managed"),
        lambda b: b.__dlpack__(),
        "stream_query",
    ),
    "register": (
        lambda: np.zeros(5000),
        lambda array: cumem.register(array).close(),
        "host_register",
    ),
    "unregister": (closed_after_work, lambda r: r.close(), "host_unregister"),
}

HELD_UP_US = 100_000


@pytest.mark.parametrize("what", CALLS)
def test_shutdown_beside_a_call_is_refused(emulated, what: str) -> None:
    prepare, call, operation = CALLS[what]
    testing = session.testing
    subjects = [None if prepare is None else prepare()]
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call(subjects[0])
        except BaseException as error:
            failures.append(error)

    testing.check_pools()
    testing.plan_fault(None, 0)
    testing.delay_op(operation, HELD_UP_US)
    thread = threading.Thread(target=run)
    thread.start()
    session.wait_until(
        lambda: not thread.is_alive() or testing.fault_count(operation) > 0
    )
    with pytest.raises(RuntimeError, match="another thread"):
        cumem.shutdown()
    testing.delay_op(operation, 0)
    thread.join()
    assert failures == []
    subjects.clear()
    cumem.shutdown()
