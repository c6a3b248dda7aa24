# SPDX-License-Identifier: Apache-2.0
"""Tests of our own streams, those of other libraries, and the current one.

Emulated streams can be shut by a gate. A test then queues work, looks at what has not
happened yet, and opens the gate.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref

import numpy as np
import pytest
from support import faults, session, values
from support.streams import ByProtocol

import cumem

# An older driver lacks these calls, and cumem then does the same work in another way. So
# `make test-all` runs these tests once more with such a driver.
pytestmark = pytest.mark.by_driver("context_record_event", "stream_get_device")

testing = session.testing


# -- one stream ------------------------------------------------------------------------


def test_new_stream_has_a_handle_an_id_and_a_device(runtime) -> None:
    first, second = cumem.Stream(), cumem.Stream()
    assert first.handle > 2
    assert first.id != second.id
    assert first.device == cumem.Device(0)
    assert first.__cuda_stream__() == (0, first.handle)
    assert first.done
    assert not first.is_capturing
    first.synchronize()


def test_repr_names_the_state(runtime) -> None:
    stream = cumem.Stream()
    assert f"id {stream.id}" in repr(stream)
    assert ("emulated" in repr(stream)) == runtime.emulated
    assert "legacy default" in repr(cumem.current_stream())
    assert "per-thread" in repr(cumem.Stream.from_external(2))
    stream.close()
    assert "closed" in repr(stream)


def test_equal_streams_are_the_same_cuda_stream(runtime) -> None:
    stream = cumem.Stream()
    again = cumem.Stream.from_external(stream.handle)
    assert again is not stream
    assert again == stream
    assert hash(again) == hash(stream)
    assert len({stream, again, cumem.Stream()}) == 2
    assert stream != cumem.current_stream()
    assert stream != stream.handle


def test_handle_stays_hashable_after_close(runtime) -> None:
    stream = cumem.Stream()
    known = {stream: 1}
    stream.close()
    assert known[stream] == 1


def test_priority_in_range_is_accepted_and_out_of_range_refused(runtime) -> None:
    stream = cumem.Stream(priority=-1)
    assert stream.priority == -1
    assert cumem.Stream.from_external(stream.handle).priority == -1
    assert cumem.Stream().priority == cumem.current_stream().priority == 0
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        _ = stream.priority
    with pytest.raises(ValueError, match="priority must be from"):
        cumem.Stream(priority=1)
    with pytest.raises(ValueError, match="priority must be from"):
        cumem.Stream(priority=-1000)
    with pytest.raises(ValueError, match=r"priority must be from .* not 1099511627776"):
        cumem.Stream(priority=1 << 40)
    with pytest.raises(ValueError, match="priority"):
        cumem.Stream(priority=1 << 80)
    with pytest.raises(TypeError, match="priority must be an int, not str"):
        cumem.Stream(priority="a")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"device": 99}, ValueError),
        ({"device": -1}, ValueError),
        ({"device": "0"}, ValueError),
        ({"device": True}, TypeError),
        ({"non_blocking": np.ones(2)}, TypeError),
        ({"priority": "high"}, TypeError),
        ({"colour": 1}, TypeError),
    ],
)
def test_wrong_constructor_arguments_are_refused(runtime, arguments, error) -> None:
    with pytest.raises(error):
        cumem.Stream(**arguments)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: cumem.Stream(priorty=1),
            r"Stream\(\) got an unexpected keyword argument 'priorty': did you mean 'pri",
        ),
        (
            lambda: cumem.Stream(0),
            r"Stream\(\) takes no positional arguments \(1 given\)",
        ),
        (
            lambda: cumem.Stream(non_blocking="no"),
            "non_blocking must be true or false, not str",
        ),
        (
            lambda: cumem.Stream.from_external(),
            r"from_external\(\) missing required argument 'obj'",
        ),
        (
            lambda: cumem.Stream.from_external(1, devise=0),
            r"from_external\(\) got an unexpected .* 'devise': did you mean 'device'",
        ),
        (
            lambda: cumem.Stream.from_external(1, 0),
            r"from_external\(\) takes at most 1 positional argument \(2 given\)",
        ),
    ],
)
def test_wrong_call_of_a_stream_says_what_it_takes(runtime, call, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


def test_priority_is_read_before_the_device_and_its_own_errors_pass(runtime) -> None:
    class Broken:
        def __index__(self) -> int:
            raise ZeroDivisionError

    class Text:
        def __index__(self) -> int:
            raise TypeError("a text of its own")

    with pytest.raises(ZeroDivisionError):
        cumem.Stream(priority=Broken(), device=99)
    with pytest.raises(TypeError, match="priority must be an int, not Text"):
        cumem.Stream(priority=Text(), device=99)
    number = -(10**30)
    with pytest.raises(ValueError, match=f"priority must be from .* not {number}$"):
        cumem.Stream(priority=number)
    assert cumem.Stream(priority=np.int16(-1)).priority == -1
    assert cumem.Stream(priority=False).priority == 0


def test_stream_on_another_device(emulated) -> None:
    stream = cumem.Stream(device=1)
    assert stream.device == cumem.Device(1)
    stream.synchronize()
    assert cumem.current_device() == cumem.Device(0)


# -- close -----------------------------------------------------------------------------


def test_closed_stream_refuses_everything(runtime) -> None:
    stream = cumem.Stream()
    event = stream.record()
    stream.close()
    stream.close()
    other = cumem.Stream()
    for use in (
        lambda: stream.handle,
        lambda: stream.done,
        lambda: stream.is_capturing,
        stream.synchronize,
        stream.record,
        stream.__cuda_stream__,
        stream.__enter__,
        lambda: stream.wait(event),
        lambda: other.wait(stream),
        lambda: event.record(stream),
        lambda: cumem.empty_device(4, stream=stream),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_close_lets_queued_work_finish(runtime) -> None:
    stream = cumem.Stream()
    source = cumem.array(np.arange(1000, dtype="i4"), kind="pinned")
    target = cumem.zeros(1000, "i4", "pinned")
    transfer = cumem.copy_async(target, source, stream=stream)
    event = stream.record()
    stream.close()
    event.synchronize()
    transfer.wait()
    assert (target.numpy() == np.arange(1000)).all()


def test_closing_the_default_stream_does_nothing(runtime) -> None:
    stream = cumem.current_stream()
    stream.close()
    stream.synchronize()
    assert cumem.current_stream() is stream


def test_shutdown_closes_streams(runtime) -> None:
    stream = cumem.Stream()
    default = cumem.current_stream()
    cumem.shutdown()
    for closed in (stream, default):
        with pytest.raises(ValueError, match="closed"):
            closed.synchronize()
        closed.close()
    assert cumem.current_stream() != default


def test_no_stream_is_left(emulated) -> None:
    cumem.current_stream().synchronize()
    before = testing.counts()["streams"]
    stream = cumem.Stream()
    reference = weakref.ref(stream)
    assert testing.counts()["streams"] == before + 1
    del stream
    gc.collect()
    assert reference() is None
    assert testing.counts()["streams"] == before


# -- the current stream ----------------------------------------------------------------


def test_default_stream_is_the_legacy_one(runtime) -> None:
    stream = cumem.current_stream()
    assert stream.handle == 1
    assert stream is cumem.current_stream()
    assert stream is cumem.current_stream(0)
    assert stream is cumem.current_stream(device=cumem.Device(0))
    assert stream == cumem.Stream.from_external(0) == cumem.Stream.from_external(1)
    assert stream != cumem.Stream.from_external(2)


def test_with_block_makes_current_and_restores(runtime) -> None:
    first, second = cumem.Stream(), cumem.Stream()
    default = cumem.current_stream()
    with first as entered:
        assert entered is first
        assert cumem.current_stream() is first
        with second:
            assert cumem.current_stream() is second
            with first:
                assert cumem.current_stream() is first
            assert cumem.current_stream() is second
        assert cumem.current_stream() is first
    assert cumem.current_stream() is default


def test_with_block_restores_after_an_exception(runtime) -> None:
    default = cumem.current_stream()
    with pytest.raises(ZeroDivisionError), cumem.Stream():
        raise ZeroDivisionError
    assert cumem.current_stream() is default


def test_current_stream_is_per_thread(runtime) -> None:
    stream = cumem.Stream()
    default = cumem.current_stream()
    seen = []
    inside = threading.Barrier(2)

    def run() -> None:
        seen.append(cumem.current_stream())
        with stream:  # Two threads enter the same object.
            inside.wait()
            seen.append(cumem.current_stream())
            inside.wait()
        seen.append(cumem.current_stream())

    thread = threading.Thread(target=run)
    with stream:
        thread.start()
        inside.wait()
        inside.wait()
    thread.join()
    assert seen == [default, stream, default]
    assert cumem.current_stream() is default


def test_current_stream_is_per_task(runtime) -> None:
    streams = [cumem.Stream() for _ in range(3)]

    async def use(stream: cumem.Stream) -> cumem.Stream:
        with stream:
            await asyncio.sleep(0)
            return cumem.current_stream()

    async def main() -> list[cumem.Stream]:
        return await asyncio.gather(*map(use, streams))

    assert asyncio.run(main()) == streams


def test_copied_context_keeps_its_stream(runtime) -> None:
    stream = cumem.Stream()
    with stream:
        context = contextvars.copy_context()
    assert cumem.current_stream() != stream
    assert context.run(cumem.current_stream) is stream


def test_current_stream_is_per_device(emulated) -> None:
    stream = cumem.Stream(device=1)
    with stream:
        assert cumem.current_stream(1) is stream
        assert cumem.current_stream() == cumem.current_stream(0)
        assert cumem.current_stream(0).handle == 1
        assert cumem.current_stream(0).device == cumem.Device(0)
    assert cumem.current_stream(1).handle == 1
    assert cumem.current_stream(1).device == cumem.Device(1)
    assert cumem.current_stream(0) != cumem.current_stream(1)


def test_stream_closed_inside_its_block_is_refused(runtime) -> None:
    stream = cumem.Stream()
    with stream:
        stream.close()
        with pytest.raises(ValueError, match="closed"):
            cumem.empty_device(4)
    cumem.empty_device(4)


def test_shutdown_inside_a_block_starts_afresh(runtime) -> None:
    with cumem.Stream():
        cumem.shutdown()
        assert cumem.current_stream().handle == 1


def test_current_stream_orders_allocations_and_copies(emulated) -> None:
    stream = cumem.Stream()
    source = cumem.array(np.arange(8, dtype="i4"), kind="pinned")
    target = cumem.empty_device(8, "i4")
    with session.gate(stream), stream:
        transfer = cumem.copy_async(target, source, stream=cumem.current_stream())
        assert not stream.done
    transfer.wait()


# -- waiting ---------------------------------------------------------------------------


def test_synchronize_waits_and_releases_the_gil(emulated) -> None:
    stream = cumem.Stream()
    reached = threading.Event()

    def run() -> None:
        stream.synchronize()
        reached.set()

    with session.gate(stream):
        stream.record()
        assert not stream.done
        thread = threading.Thread(target=run)
        thread.start()
        session.wait_until_waiting(thread)
        assert not reached.is_set()
    thread.join()
    assert reached.is_set()
    assert stream.done


@pytest.mark.parametrize("what", ["stream", "default stream", "device"])
def test_signal_ends_the_waiting(emulated, what: str) -> None:
    stream = cumem.Stream()
    if what == "default stream":
        stream = cumem.Stream.from_external(0)
    source, buffer = cumem.full(100, 7, "u1", "pinned"), cumem.empty_device(100, "u1")
    waits = cumem.Device(0) if what == "device" else stream
    with session.alarm(stream):
        cumem.copy_async(buffer, source, stream=stream)
        waits.synchronize()
    waits.synchronize()
    assert (values.get(buffer) == 7).all()


def test_shutdown_waits_for_what_a_signal_left(emulated) -> None:
    stream = cumem.Stream()
    with session.alarm(stream):
        buffer = cumem.empty_device(100, "u1")
        buffer.fill(7, stream=stream)
        cumem.Device(0).synchronize()
    del buffer
    cumem.shutdown()


@pytest.mark.parametrize("what", ["event", "stream", "foreign", "handle"])
def test_wait_orders_after(emulated, what: str) -> None:
    first, second = cumem.Stream(), cumem.Stream()
    with session.gate(first):
        event = first.record()
        second.wait(
            {
                "event": event,
                "stream": first,
                "foreign": ByProtocol(first.handle),
                "handle": first.handle,
            }[what]
        )
        last = second.record()
        assert not last.done
        assert not second.done
    second.synchronize()
    assert last.done
    assert event.done


def test_wait_for_a_transfer(emulated) -> None:
    first, second = cumem.Stream(), cumem.Stream()
    source = cumem.array(np.arange(100, dtype="i4"), kind="pinned")
    target = cumem.empty_device(100, "i4")
    with session.gate(first):
        transfer = cumem.copy_async(target, source, stream=first)
        second.wait(transfer)
        assert not second.record().done
    second.synchronize()
    transfer.wait()


def test_wait_across_devices(emulated) -> None:
    first, second = cumem.Stream(device=0), cumem.Stream(device=1)
    with session.gate(first):
        first.record()
        second.wait(first)
        assert not second.record().done
    second.synchronize()


@pytest.mark.parametrize("other", [None, "x", 1.5, object()])
def test_wait_for_something_else_is_refused(runtime, other) -> None:
    with pytest.raises(TypeError):
        cumem.Stream().wait(other)


def test_record_makes_or_moves_an_event(runtime) -> None:
    stream = cumem.Stream()
    event = cumem.Event()
    assert stream.record(event) is event
    assert stream.record(None) is not event
    made = stream.record()
    assert type(made) is cumem.Event
    stream.synchronize()
    assert made.done
    assert made.seconds_since(event) >= 0
    with pytest.raises(TypeError, match="event must be an Event"):
        stream.record(stream)
    with pytest.raises(TypeError, match="at most 1"):
        stream.record(event, event)


def test_record_on_another_device_is_refused(emulated) -> None:
    with pytest.raises(ValueError, match="device 1"):
        cumem.Stream(device=0).record(cumem.Event(device=1))


def test_capture_is_seen(emulated) -> None:
    stream = cumem.Stream()
    testing.set_capturing(stream, True)
    assert stream.is_capturing
    testing.set_capturing(stream, False)
    assert not stream.is_capturing


def test_fork_is_refused_by_name(emulated) -> None:
    import os

    stream = cumem.Stream()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        text = b"nothing raised"
        try:
            stream.synchronize()
        except BaseException as error:
            text = str(error).encode()
        os.write(write, text)
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        assert b"fork" in pipe.read()


# -- faults ----------------------------------------------------------------------------


def test_fault_sweep_of_streams(emulated) -> None:
    def scenario() -> None:
        stream = cumem.Stream(priority=-1)
        other = cumem.Stream.from_external(ByProtocol(stream.handle))
        third = cumem.Stream()
        third.wait(other)
        third.wait(stream.record())
        assert third.is_capturing in (True, False)
        assert third.done in (True, False)
        third.synchronize()
        assert third.done

    swept = faults.sweep(scenario)
    assert {
        "stream_create",
        "stream_priority_range",
        "stream_get_id",
        "stream_wait_event",
        "stream_query",
        "stream_synchronize",
        "stream_is_capturing",
        "event_create",
        "event_record",
    } <= swept.raised
