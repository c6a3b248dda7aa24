# SPDX-License-Identifier: Apache-2.0
"""What is current after blocks were left in an unusual order, context or thread.

Each test enters `with stream:` or `with pool:` blocks, leaves them in an unusual way,
and asks which stream or pool is current then.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

import cumem

# A driver may lack this call, and cumem then waits until the whole device is idle.
pytestmark = pytest.mark.by_driver("context_record_event")

T = TypeVar("T")


class Pools:
    """Pools, as one of the two things that can be current.

    cumem does not say which pool is current. So a test allocates, and finds the pool whose
    counters have changed.
    """

    @staticmethod
    def make() -> Any:
        return cumem.Pool("pinned")

    @staticmethod
    def current(made: list[Any]) -> Any:
        before = [pool.stats().allocation_count for pool in made]
        cumem.empty_pinned(8)
        for pool, count in zip(made, before, strict=True):
            if pool.stats().allocation_count > count:
                return pool
        return None


class Streams:
    """Streams, as the other of the two things that can be current."""

    @staticmethod
    def make() -> Any:
        return cumem.Stream()

    @staticmethod
    def current(made: list[Any]) -> Any:
        found = cumem.current_stream()
        return found if found in made else None


@pytest.fixture(params=[Pools, Streams], ids=["pool", "stream"])
def sort(request: pytest.FixtureRequest, runtime) -> Any:
    return request.param


def block(entered: Any) -> Iterator[None]:
    with entered:
        yield


def in_thread(function: Callable[[], T]) -> T:
    """Return what `function` returns in a new thread, or raise what it raises there."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


# -- other orders --------------------------------------------------------------------------


def test_generator_that_ends_inside_another_block_leaves_that_block(sort) -> None:
    made = [sort.make(), sort.make()]
    first, second = made
    generator = block(first)
    next(generator)
    with second:
        generator.close()
        assert sort.current(made) is second
    assert sort.current(made) is None


def test_block_left_from_the_middle_leaves_those_around_it(sort) -> None:
    made = [sort.make() for _ in range(4)]
    generators = [block(one) for one in made]
    for generator in generators:
        next(generator)
    generators[1].close()
    assert sort.current(made) is made[3]
    generators[3].close()
    assert sort.current(made) is made[2]
    generators[2].close()
    assert sort.current(made) is made[0]
    generators[0].close()
    assert sort.current(made) is None


def test_blocks_of_one_object_are_told_apart(sort) -> None:
    made = [sort.make(), sort.make()]
    one, other = made
    generator = block(one)
    next(generator)
    with other:
        with one:
            # This ends the outer one of the two blocks.
            generator.close()
            assert sort.current(made) is one
        assert sort.current(made) is other
    assert sort.current(made) is None


def test_stacks_of_one_object_are_left_innermost_first(sort) -> None:
    made = [sort.make(), sort.make()]
    one, other = made
    with contextlib.ExitStack() as outer:
        outer.enter_context(one)
        with other:
            with contextlib.ExitStack() as inner:
                inner.enter_context(one)
                assert sort.current(made) is one
            assert sort.current(made) is other
        assert sort.current(made) is one
    assert sort.current(made) is None


def test_exit_that_no_enter_precedes_is_an_error(sort) -> None:
    one = sort.make()
    with pytest.raises(RuntimeError, match="not entered"):
        one.__exit__(None, None, None)
    with one:
        pass
    with pytest.raises(RuntimeError, match="not entered"):
        one.__exit__(None, None, None)


# -- other contexts and threads ------------------------------------------------------------


def test_block_left_in_another_thread_is_over_everywhere(sort) -> None:
    made = [sort.make()]
    generator = block(made[0])
    next(generator)
    assert sort.current(made) is made[0]
    with pytest.raises(RuntimeError, match="another thread or context"):
        in_thread(generator.close)
    assert sort.current(made) is None


def test_block_left_in_another_thread_leaves_that_threads_own(sort) -> None:
    made = [sort.make(), sort.make()]
    generator = block(made[0])
    next(generator)

    def leave() -> Any:
        with made[0], made[1]:
            with pytest.raises(RuntimeError, match="another thread or context"):
                generator.close()
            assert sort.current(made) is made[1]
        return sort.current(made)

    assert in_thread(leave) is None
    assert sort.current(made) is None


def test_block_left_in_a_copied_context_is_over_everywhere(sort) -> None:
    made = [sort.make()]
    generator = block(made[0])
    next(generator)
    copied = contextvars.copy_context()
    with pytest.raises(RuntimeError, match="another thread or context"):
        copied.run(generator.close)
    assert sort.current(made) is None
    assert copied.run(sort.current, made) is None


def test_block_left_in_a_copied_context_leaves_the_blocks_around_it(sort) -> None:
    made = [sort.make(), sort.make()]
    with made[1]:
        generator = block(made[0])
        next(generator)
        copied = contextvars.copy_context()
        with pytest.raises(RuntimeError, match="another thread or context"):
            copied.run(generator.close)
        assert sort.current(made) is made[1]
        assert copied.run(sort.current, made) is made[1]
    assert sort.current(made) is None


def test_stack_left_in_another_thread_is_over_everywhere(sort) -> None:
    made = [sort.make()]
    stack = contextlib.ExitStack()
    stack.enter_context(made[0])
    with pytest.raises(RuntimeError, match="another thread or context"):
        in_thread(stack.close)
    assert sort.current(made) is None


def test_many_threads_leave_stacks_of_one_object(sort) -> None:
    made = [sort.make()]
    inside = threading.Barrier(8)

    def run() -> Any:
        with contextlib.ExitStack() as stack:
            inside.wait()
            stack.enter_context(made[0])
            inside.wait()
        inside.wait()
        return sort.current(made)

    seen: list[Any] = []
    threads = [threading.Thread(target=lambda: seen.append(run())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [None] * 8


def test_generator_of_a_task_closed_by_another_leaves_nothing_current(sort) -> None:
    made = [sort.make()]

    async def main() -> tuple[Any, Any]:
        generator = block(made[0])

        async def begin() -> None:
            next(generator)

        async def end() -> Any:
            with pytest.raises(RuntimeError, match="another thread or context"):
                generator.close()
            return sort.current(made)

        await asyncio.create_task(begin())
        return await asyncio.create_task(end()), sort.current(made)

    assert asyncio.run(main()) == (None, None)


def test_task_inside_a_block_keeps_its_own_after_leaving_one(sort) -> None:
    made = [sort.make(), sort.make()]

    async def inner() -> Any:
        with made[1]:
            await asyncio.sleep(0)
        return sort.current(made)

    async def main() -> Any:
        with made[0]:
            task = asyncio.create_task(inner())
        return await task

    assert asyncio.run(main()) is made[0]


# -- lifetime ------------------------------------------------------------------------------


class Witness:
    pass


def test_open_block_of_a_dropped_context_keeps_nothing_alive(sort) -> None:
    witness = Witness()
    gone = weakref.ref(witness)

    def enter(kept: Witness) -> None:
        sort.make().__enter__()
        assert kept is not None

    contextvars.Context().run(enter, witness)
    del witness
    gc.collect()
    assert gone() is None


def test_context_kept_after_a_block_does_not_keep_its_frame(sort) -> None:
    def enter() -> tuple[contextvars.Context, weakref.ref[Witness]]:
        witness = Witness()
        with sort.make():
            return contextvars.copy_context(), weakref.ref(witness)

    kept, gone = enter()
    assert gone() is None
    del kept


def test_deep_nesting_is_undone(sort) -> None:
    made = [sort.make()]

    def run() -> None:
        for _ in range(200_000):
            made[0].__enter__()

    context = contextvars.Context()
    context.run(run)
    assert context.run(sort.current, made) is made[0]
    del context
    gc.collect()
    assert sort.current(made) is None


@pytest.mark.parametrize("make", [cumem.Stream, lambda: cumem.Pool("pinned")])
def test_ctrl_c_during_the_last_operation_of_a_block_is_heard(emulated, make) -> None:
    """A signal that arrives with the last operation of a block must not be lost in the
    code that leaves the block.
    """
    current = make()
    # `raise` is C code, and nothing looks for signals until it has returned.
    ahead = map(ctypes.CDLL(None)["raise"], [signal.SIGINT])
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), current:
            [*ahead]  # noqa: B018 - a call would look for signals when it ends
    finally:
        signal.signal(signal.SIGINT, handler)
    assert cumem.current_stream() is not current
