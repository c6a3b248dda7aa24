# SPDX-License-Identifier: Apache-2.0
"""In the fault sweep each call of the runtime fails once, and nothing is lost.

A scenario is a function that uses some part of the public API. tests/base/test_faults.py
has the scenarios.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cumem
from support import session

testing = session.testing

# cudaErrorUnknown. cumem never repeats a call after this error, so no retry hides it.
UNKNOWN = 999

#: How many calls of an operation fail at most in a sweep. These operations poll, or are
#: needed by one that polls, so the number of their calls depends on the machine's speed. If
#: there are more calls than this, `some_of` chooses those that fail.
MOST_CALLS = {
    "event_query": 6,
    "stream_query": 6,
    "context_get": 24,
    "context_set": 24,
    "capture_mode_exchange": 24,
}
#: The same limit for every other operation. One that is called more often is called in a
#: loop over chunks or pairs. The first rounds of the loop and some later ones then fail.
MOST_OF_OTHERS = 20

#: Operations whose failure need not reach the caller. The text says how the core goes on
#: after the failure, or where it reports the error instead.
SECOND_WAY = {
    "event_create": "a block waits for the whole device instead of for an event",
    "event_record": "a block waits for the whole device instead of for an event",
    "context_record_event": "a block waits for the whole device instead of for an event",
    "event_query": "the block stays in flight and is asked about again",
    "stream_query": "an event is recorded and asked instead",
    "address_map": "the memory is asked for at another place, or from another source",
    "address_set_access": "the memory is asked for at another place or source",
    "physical_create": "the pool asks for less, or again, or asks another source",
    "physical_release": "nobody can be told when the last buffer of a pool ends",
    "address_unmap": "as physical_release; in trim() the chunk stays until the next try",
    "address_reserve": "the pool takes memory by plain allocations instead",
    "physical_granularity": "the pool takes memory by plain allocations instead",
    "address_free": "only addresses are lost, at the end of a pool",
    "event_synchronize": "cumem waits for the device or the stream instead",
    "memory_info": "the numbers in the OutOfMemoryError are None",
    "event_destroy": "only the handle is lost; it is reported to the unraisable hook",
    "capture_mode_exchange": "the call is made in the mode that the thread has",
    "context_get": "where no error can be raised, the call for that context is left out",
    "context_device": "cumem takes device 0, as if no library had chosen another one",
    "context_set": "the previous context is put back at the second try",
    "device_set": "it is reported where nothing can be raised",
    "event_elapsed": "a transfer's seconds come from the host's clock",
    "stream_is_capturing": "no fence is recorded now, and the block waits for the next one",
    "stream_destroy": "only the handle is lost",
    "host_register": "memory that is read-only is then locked for reading only",
    "host_free": "it is reported to the unraisable hook, since a free cannot raise",
    "device_free": "it is reported to the unraisable hook, since a free cannot raise",
    "host_unregister": "as host_free, if the memory's last reference was dropped",
    "advise": "as host_free, if a free could not take the memory's advice back",
    "module_unload": "only the module is lost, at shutdown",
    "peer_can_access": "the copy between devices is left to the runtime",
    "peer_enable": "the copy between devices is left to the runtime",
    "pointer_access": "the copy between devices is left to the runtime",
    "context_is_active": "the device counts as in use, and is fenced as well",
    "device_synchronize": "in a fence, the block stays in flight",
}


@dataclasses.dataclass
class Swept:
    """The operations that a sweep saw succeed, those that failed, and those that raised."""

    succeeded: set[str]
    failed: set[str]
    raised: set[str]


def reached() -> set[str]:
    """Return the names of the operations that were called since the last planned fault."""
    return {name for name, _, _ in testing.op_names() if testing.fault_count(name)}


def settle() -> None:
    """Drop everything that can be dropped, so that each run starts from the same state."""
    gc.collect()
    testing.poll()


@contextlib.contextmanager
def unraised() -> Iterator[None]:
    """Inside the block, allow exceptions in the unraisable hook if the runtime failed."""
    others: list[object] = []

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, cumem.CudaError):
            others.append(unraisable.exc_value)

    before, sys.unraisablehook = sys.unraisablehook, hook
    try:
        yield
    finally:
        sys.unraisablehook = before
    assert others == []


def inject(scenario: Callable[[], None], op: str, nth: int, result: Swept) -> None:
    """Run a scenario while one call of an operation fails, and check what comes of it."""
    testing.plan_fault(op, nth, UNKNOWN)
    error: cumem.CudaError | None = None
    with unraised():
        try:
            scenario()
        except cumem.CudaError as caught:
            error = caught.with_traceback(None)
        injected = testing.last_injected_fault()
        testing.plan_fault(None, 0)
        settle()
    if injected is None:
        return
    result.failed.add(op)
    if error is None:
        assert op in SECOND_WAY, f"call {nth} of {op} failed, and no error was raised"
    else:
        cuda_name = {name: cuda for name, cuda, _ in testing.op_names()}
        assert error.call == cuda_name[op], (op, nth, str(error))
        assert error.code == UNKNOWN
        result.raised.add(op)


def sweep(scenario: Callable[[], None]) -> Swept:
    """Run a scenario, then once more for each of its runtime calls, with that one failing.

    If an error is raised, it must name the call that failed. After each run nothing may be
    live, the equations of the pools must hold, and the scenario must succeed again. Calls
    are counted for each operation, because a call that fails may change how many others
    follow.
    """
    scenario()  # this first run makes everything that is made lazily
    settle()
    gc.freeze()  # so that hundreds of collections need not look at all older objects
    return inject_all(scenario)


def chosen(op: str, count: int) -> list[int]:
    """Choose which of the calls of an operation fail. They are numbered from 1."""
    return some_of(count, MOST_CALLS.get(op, MOST_OF_OTHERS))


def some_of(count: int, most: int) -> list[int]:
    """Choose at most `most` of the numbers from 1 to `count`.

    If there are more than `most`, half of the chosen numbers are the first ones. The others
    are spread evenly over the rest, and end with `count`.
    """
    if count <= most:
        return list(range(1, count + 1))
    first = most // 2
    step = (count - first) / (most - first)
    return [*range(1, first + 1), *(int(first + step * i) for i in range(1, first + 1))]


def inject_all(scenario: Callable[[], None]) -> Swept:
    """Let each call of the scenario fail in turn, and check that nothing is lost."""
    testing.plan_fault(None, 0)
    scenario()
    settle()
    result = Swept(reached(), set(), set())
    calls = {op: testing.fault_count(op) for op in result.succeeded}
    for op in sorted(calls):
        for nth in chosen(op, calls[op]):
            inject(scenario, op, nth, result)
            left = session.leftovers()
            # Pages whose unlocking failed stay locked until the next try.
            left.pop("registrations", None)
            assert left == {}, (nth, op)
            assert testing.check_pools(), (nth, op)
            scenario()
            settle()
            assert session.leftovers() == {}, (nth, op)
    return result
