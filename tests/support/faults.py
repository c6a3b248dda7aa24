# SPDX-License-Identifier: Apache-2.0
"""The fault sweep: every runtime call of a scenario fails once, and nothing is lost."""

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

UNKNOWN = 999  # cudaErrorUnknown, which is never tried again and so is never hidden

#: How many calls of an operation fail in a sweep at most. These are operations that poll,
#: and those that a poll needs, whose number depends on the speed of the machine. If there
#: are more calls, the first half of this number fails, and as many of the later ones.
MOST_CALLS = {
    "event_query": 6,
    "stream_query": 6,
    "context_get": 24,
    "context_set": 24,
    "capture_mode_exchange": 24,
}
#: The same limit for every other operation. More calls than this come from a loop over
#: chunks or pairs, and both its first rounds and later ones are among those that fail.
MOST_OF_OTHERS = 20

#: Operations whose failure need not reach the caller, because the core then does something
#: else, which stands beside each.
SECOND_WAY = {
    "event_create": "a block is fenced by a device-wide wait instead of by an event",
    "event_record": "the same",
    "context_record_event": "the same",
    "event_query": "the block stays in flight and is asked about again",
    "stream_query": "an event is recorded and asked instead",
    "address_map": "the memory is asked for in another place, or from another source",
    "address_set_access": "the same",
    "physical_create": "the same: the pool asks for less, or again",
    "physical_release": "a pool's last buffer has nobody to tell",
    "address_unmap": "the same; in trim() the chunk stays until the next try",
    "address_reserve": "the pool takes memory by plain allocations instead",
    "physical_granularity": "the same",
    "address_free": "at the end of a pool only addresses are lost",
    "event_synchronize": "the device or the stream is waited for instead",
    "memory_info": "in the numbers of an OutOfMemoryError: they are None",
    "event_destroy": "only the handle is lost; reported to the unraisable hook",
    "capture_mode_exchange": "the call is made in the mode the thread has",
    "context_get": "as capture_mode_exchange, where nothing could be raised",
    "context_device": "no library has chosen a device as far as cumem can tell: 0",
    "context_set": "the previous context is put back at the second try",
    "device_set": "reported where nothing can be raised",
    "event_elapsed": "a transfer's seconds come from the host's clock",
    "stream_is_capturing": "no fence is taken this time: the block waits for the next",
    "stream_destroy": "only the handle is lost",
    "host_register": "what is read-only is then locked for reading only",
    "host_free": "reported to the unraisable hook: a free has nobody to tell",
    "device_free": "the same",
    "host_unregister": "the same when the last reference did it",
    "advise": "the same where memory goes back without its advice",
    "module_unload": "only the module is lost, at shutdown",
    "peer_can_access": "the runtime's own way between devices is taken",
    "peer_enable": "the same",
    "pointer_access": "the same",
    "context_is_active": "the device counts as in use: it is fenced as well",
    "device_synchronize": "in a fence: the block stays in flight",
}


@dataclasses.dataclass
class Swept:
    """The operations that a sweep made fail, and what came of it."""

    succeeded: set[str]
    failed: set[str]
    raised: set[str]


def reached() -> set[str]:
    """Return the names of the operations that were called since the last plan."""
    return {name for name, _, _ in testing.op_names() if testing.fault_count(name)}


def settle() -> None:
    """Drop everything that can be dropped, so that the next run starts from there too."""
    gc.collect()
    testing.poll()


@contextlib.contextmanager
def unraised() -> Iterator[None]:
    """Accept exceptions in the unraisable hook if they are failures of the runtime."""
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
    """Run `scenario` while the `nth` call of `op` fails, and check what came of it."""
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
        assert op in SECOND_WAY, f"call {nth} of {op} failed unseen"
    else:
        cuda_name = {name: cuda for name, cuda, _ in testing.op_names()}
        assert error.call == cuda_name[op], (op, nth, str(error))
        assert error.code == UNKNOWN
        result.raised.add(op)


def sweep(scenario: Callable[[], None]) -> Swept:
    """Run `scenario`, then once more for each of its runtime calls, with that one failing.

    After each run the exception must name the call that failed, nothing may be live, the
    pools' equations must hold, and the scenario must succeed again. Calls are counted for
    each operation, because a call that fails may change how many others follow.
    """
    scenario()  # once beforehand, so that everything that is made lazily exists
    settle()
    gc.freeze()  # or each of hundreds of collections looks at all older objects
    return inject_all(scenario)


def chosen(op: str, count: int) -> list[int]:
    """Choose which of the `count` calls of an operation fail. They are counted from 1."""
    return some_of(count, MOST_CALLS.get(op, MOST_OF_OTHERS))


def some_of(count: int, most: int) -> list[int]:
    """Choose at most `most` of the numbers from 1 to `count`.

    They are the first ones and some from each part of the rest, among them the last one.
    """
    if count <= most:
        return list(range(1, count + 1))
    first = most // 2
    step = (count - first) / (most - first)
    return [*range(1, first + 1), *(int(first + step * i) for i in range(1, first + 1))]


def inject_all(scenario: Callable[[], None]) -> Swept:
    """Let each call of the scenario fail in turn."""
    testing.plan_fault(None, 0)
    scenario()
    settle()
    result = Swept(reached(), set(), set())
    calls = {op: testing.fault_count(op) for op in result.succeeded}
    for op in sorted(calls):
        for nth in chosen(op, calls[op]):
            inject(scenario, op, nth, result)
            left = session.leftovers()
            # Pages that could not be unlocked stay locked until the next try.
            left.pop("registrations", None)
            assert left == {}, (nth, op)
            assert testing.check_pools(), (nth, op)
            scenario()
            settle()
            assert session.leftovers() == {}, (nth, op)
    return result
