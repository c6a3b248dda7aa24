# SPDX-License-Identifier: Apache-2.0
"""Tests of how events are recorded, waited for, timed, closed and awaited.

A stream whose gate is shut holds events back, so that a test can look at an event
before and after it is reached.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest
from support import faults, session

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

testing = session.testing


def test_event_that_was_never_recorded_is_done(runtime) -> None:
    event = cumem.Event()
    assert event.done
    event.synchronize()
    assert event.handle != 0
    assert event.device == cumem.Device(0)
    assert ("emulated" in repr(event)) == runtime.emulated


def test_record_returns_the_event(runtime) -> None:
    event = cumem.Event()
    assert event.record() is event
    assert event.record(cumem.Stream()) is event
    assert event.record(None) is event
    event.synchronize()
    assert event.done


def test_event_is_done_when_its_stream_got_there(emulated) -> None:
    stream = cumem.Stream()
    with session.gate(stream):
        event = cumem.Event().record(stream)
        assert not event.done
    event.synchronize()
    assert event.done


def test_record_uses_the_current_stream(emulated) -> None:
    stream = cumem.Stream()
    with session.gate(stream), stream:
        assert not cumem.Event().record().done
    stream.synchronize()


def test_recording_again_moves_the_point(emulated) -> None:
    stream, other = cumem.Stream(), cumem.Stream()
    event = other.record()
    event.synchronize()
    with session.gate(stream):
        event.record(stream)
        assert not event.done
    event.synchronize()


@pytest.mark.parametrize("blocking", [False, True])
def test_synchronize_waits_and_releases_the_gil(emulated, blocking) -> None:
    stream = cumem.Stream()
    event = cumem.Event(blocking=blocking)
    reached = threading.Event()

    def run() -> None:
        event.synchronize()
        reached.set()

    with session.gate(stream):
        event.record(stream)
        thread = threading.Thread(target=run)
        thread.start()
        session.wait_until_waiting(thread)
        assert not reached.is_set()
    thread.join()
    assert reached.is_set()


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("call", ["synchronize", "seconds_since", "elapsed_time"])
def test_signal_ends_the_waiting(emulated, blocking, call) -> None:
    stream = cumem.Stream()
    start, event = stream.record(), cumem.Event(blocking=blocking)
    with session.alarm(stream):
        event.record(stream)
        if call == "synchronize":
            event.synchronize()
        elif call == "seconds_since":
            event.seconds_since(start)
        else:
            start.elapsed_time(event)
    event.synchronize()
    assert event.seconds_since(start) > 0


def test_seconds_between_events(runtime) -> None:
    stream = cumem.Stream()
    source = cumem.array(np.zeros(1 << 20, "u1"), kind="pinned")
    target = cumem.empty_device(1 << 20, "u1")
    start = stream.record()
    transfer = cumem.copy_async(target, source, stream=stream)
    end = stream.record()
    # This waits for both events.
    seconds = end.seconds_since(start)
    assert end.done
    assert 0 < seconds < 60
    assert start.seconds_since(end) == -seconds
    assert start.seconds_since(start) == 0
    transfer.wait()


def test_seconds_of_what_cannot_be_measured_are_refused(runtime) -> None:
    timed = cumem.Event().record()
    with pytest.raises(ValueError, match="start event was never recorded"):
        timed.seconds_since(cumem.Event())
    with pytest.raises(ValueError, match="end event was never recorded"):
        cumem.Event().seconds_since(timed)
    with pytest.raises(ValueError, match="timing=False"):
        timed.seconds_since(cumem.Event(timing=False).record())
    with pytest.raises(TypeError, match="start must be an Event"):
        timed.seconds_since(cumem.current_stream())


def test_milliseconds_between_events_are_the_same_time(runtime) -> None:
    start, end = cumem.Event().record(), cumem.Event().record()
    assert start.elapsed_time(end) == pytest.approx(end.seconds_since(start) * 1000)
    assert end.elapsed_time(start) <= 0


def test_stream_waits_for_a_given_event(emulated) -> None:
    first, then = cumem.Stream(), cumem.Stream()
    with session.gate(first):
        event = cumem.Event().record(first)
        event.wait(then)
        with then:
            event.wait()
        assert not then.done
    then.synchronize()
    assert event.done


def test_event_that_is_closed_while_its_time_is_waited_for_is_refused(emulated) -> None:
    stream = cumem.Stream()
    start = cumem.Event().record()
    end = cumem.Event()
    raised: list[Exception] = []

    def ask() -> None:
        try:
            end.seconds_since(start)
        except ValueError as error:
            raised.append(error)

    with session.gate(stream):
        end.record(stream)
        thread = threading.Thread(target=ask)
        thread.start()
        session.wait_until_waiting(thread)
        end.close()
    thread.join()
    assert "closed" in str(raised[0])


def test_events_of_different_devices_are_not_compared(emulated) -> None:
    first = cumem.Event(device=0).record()
    second = cumem.Event(device=1).record()
    assert second.device == cumem.Device(1)
    with pytest.raises(ValueError, match="different devices"):
        first.seconds_since(second)
    with pytest.raises(ValueError, match="belongs to device 1"):
        second.record(cumem.Stream(device=0))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"device": 99}, ValueError),
        ({"timing": np.ones(2)}, TypeError),
        ({"blocking": np.ones(3)}, TypeError),
        ({"colour": 1}, TypeError),
    ],
)
def test_wrong_constructor_arguments_are_refused(runtime, arguments, error) -> None:
    with pytest.raises(error):
        cumem.Event(**arguments)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: cumem.Event(timin=True),
            r"Event\(\) got an unexpected keyword argument 'timin': did you mean 'timing'",
        ),
        (
            lambda: cumem.Event(1),
            r"Event\(\) takes no positional arguments \(1 given\)",
        ),
        (lambda: cumem.Event(**{1: 2}), "keywords must be strings"),
        (lambda: cumem.Event(timing="no"), "timing must be true or false, not str"),
        (
            lambda: cumem.Event().wait(strem=None),
            r"wait\(\) got an unexpected keyword argument 'strem': did you mean 'stream'",
        ),
        (
            lambda: cumem.Event().wait(None, stream=None),
            r"wait\(\) got multiple values for argument 'stream'",
        ),
        (
            lambda: cumem.Event().wait("default"),
            "stream must be None, a Stream, an int .* not str",
        ),
        (
            lambda: cumem.Event().elapsed_time(None),
            "end must be an Event, not NoneType",
        ),
        (lambda: cumem.Event().seconds_since(1), "start must be an Event, not int"),
    ],
)
def test_wrong_call_of_an_event_says_what_it_takes(runtime, call, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


def test_record_on_what_is_no_stream_is_refused(runtime) -> None:
    event = cumem.Event()
    for wrong in ("x", 1.5, event, -1):
        with pytest.raises((TypeError, ValueError)):
            event.record(wrong)


def test_closed_event_refuses_everything(runtime) -> None:
    event = cumem.Event().record()
    other = cumem.Event().record()
    event.close()
    event.close()
    assert "closed" in repr(event)
    for use in (
        lambda: event.handle,
        lambda: event.done,
        event.record,
        event.synchronize,
        event.query,
        event.wait,
        lambda: event.elapsed_time(other),
        lambda: other.elapsed_time(event),
        lambda: event.seconds_since(other),
        lambda: other.seconds_since(event),
        lambda: cumem.current_stream().wait(event),
        lambda: cumem.current_stream().record(event),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_close_lets_a_waiting_stream_wait(emulated) -> None:
    first, second = cumem.Stream(), cumem.Stream()
    with session.gate(first):
        event = first.record()
        second.wait(event)
        event.close()
        assert not second.record().done
    second.synchronize()


def test_close_during_synchronize_is_safe(emulated) -> None:
    stream = cumem.Stream()
    inside = threading.Event()
    with session.gate(stream):
        event = stream.record()

        def run() -> None:
            inside.set()
            event.synchronize()

        thread = threading.Thread(target=run)
        thread.start()
        inside.wait()
        session.wait_until_waiting(thread)
        event.close()
        with pytest.raises(ValueError, match="closed"):
            event.synchronize()
    thread.join()
    assert "closed" in repr(event)


def test_shutdown_closes_events(runtime) -> None:
    event = cumem.Event().record()
    cumem.shutdown()
    with pytest.raises(ValueError, match="closed"):
        event.synchronize()
    event.close()


def test_no_event_is_left(emulated) -> None:
    cumem.current_stream().synchronize()
    before = testing.counts()["events"]
    event = cumem.Event()
    reference = weakref.ref(event)
    assert testing.counts()["events"] == before + 1
    del event
    gc.collect()
    assert reference() is None
    assert testing.counts()["events"] == before


def test_fault_sweep_of_events(emulated) -> None:
    stream = cumem.Stream()

    def scenario() -> None:
        start = cumem.Event().record(stream)
        end = cumem.Event(blocking=True).record(stream)
        assert end.seconds_since(start) >= 0
        assert end.done
        assert end.query()
        end.wait(stream)
        assert start.elapsed_time(end) >= 0
        end.synchronize()
        start.close()

    swept = faults.sweep(scenario)
    assert {
        "event_create",
        "event_record",
        "event_query",
        "event_synchronize",
        "event_elapsed",
        "event_destroy",
        "stream_wait_event",
    } <= swept.raised


def test_failure_of_a_dropped_event_goes_to_the_unraisable_hook(
    emulated, monkeypatch
) -> None:
    seen: list[BaseException | None] = []
    monkeypatch.setattr("sys.unraisablehook", lambda u: seen.append(u.exc_value))
    events = [cumem.Event()]
    session.testing.plan_fault("event_destroy", 1, 999)
    events.clear()
    session.testing.plan_fault(None, 0)
    assert [(type(error), error.call) for error in seen] == [
        (cumem.CudaError, "cudaEventDestroy")
    ]


# -- awaiting ----------------------------------------------------------------------------


async def _await(event: cumem.Event) -> str:
    await event
    return "reached"


def test_awaited_event_lets_the_loop_go_on_until_it_is_reached(emulated) -> None:
    stream = cumem.Stream()

    async def main() -> None:
        with session.gate(stream):
            event = stream.record()
            tasks = [asyncio.create_task(_await(event)) for _ in range(3)]
            for _ in range(20):
                await asyncio.sleep(0)
            assert not any(task.done() for task in tasks)
        assert await asyncio.gather(*tasks) == ["reached"] * 3
        assert event.done

    asyncio.run(main())


def test_event_that_is_reached_is_awaited_without_a_loop(runtime) -> None:
    event = cumem.Event().record()
    event.synchronize()
    for each in (event, cumem.Event()):
        with pytest.raises(StopIteration) as caught:
            _await(each).send(None)
        assert caught.value.value == "reached"


def test_awaited_event_that_is_recorded_again_or_closed_ends_as_it_was(
    emulated,
) -> None:
    first, second = cumem.Stream(), cumem.Stream()

    async def main() -> None:
        with session.gate(second):
            with session.gate(first):
                event = first.record()
                task = asyncio.create_task(_await(event))
                await asyncio.sleep(0)
                event.record(second)
                other = asyncio.create_task(_await(event))
                await asyncio.sleep(0)
                event.close()
                assert not task.done()
            assert await task == "reached"
            assert not other.done()
        assert await other == "reached"

    asyncio.run(main())


def test_cancelled_wait_for_an_event_leaves_the_event_as_it_is(emulated) -> None:
    stream = cumem.Stream()

    async def main() -> None:
        with session.gate(stream):
            event = stream.record()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_await(event), 0.001)
            assert not event.done
        event.synchronize()

    asyncio.run(main())


def test_event_of_another_device_is_awaited_there(emulated) -> None:
    stream = cumem.Stream(device=1)

    async def main() -> None:
        with session.gate(stream):
            task = asyncio.create_task(_await(stream.record()))
            await asyncio.sleep(0)
            assert not task.done()
        assert await task == "reached"

    asyncio.run(main())


def test_closed_event_cannot_be_awaited(runtime) -> None:
    event = cumem.Event()
    event.close()
    with pytest.raises(ValueError, match="the event is closed"):
        asyncio.run(_await(event))


def test_awaited_events_come_after_the_work_before_them(runtime) -> None:
    async def main() -> None:
        stream = cumem.Stream()
        buffer = cumem.empty_device(1 << 20, "u1")
        for value in range(20):
            buffer.fill(value, stream=stream)
            await stream.record()
            assert stream.done

    asyncio.run(main())
