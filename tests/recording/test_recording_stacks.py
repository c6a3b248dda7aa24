# SPDX-License-Identifier: Apache-2.0
"""Tests of the Python stacks and tags on whose behalf events happen.

The tests allocate memory in functions, generators, threads and tasks, and compare the
lines and the tags of the events.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import contextvars
import ctypes
import gc
import threading
from typing import Any

import numpy as np
import pytest
from support.lines import here, nothing_runs  # noqa: F401
from support.recorded import rows, transfer_of

import cumem
from cumem.recording.events import Log

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python
MIB = 1 << 20


def line_of(log: Log, event: Any) -> int | None:
    """Return the line in this file of the frame that made the event, or None without a
    stack.
    """
    frame = log.user_frame(int(event["stack"]))
    assert frame is None or frame.filename == __file__
    return None if frame is None else frame.lineno


# -- stacks -----------------------------------------------------------------------------


def test_stacks_are_noted_from_so_many_bytes_on(runtime) -> None:
    pool = cumem.Pool("pinned")
    for stacks, wanted in ((True, 2), (False, 0), (4096, 1), ("4KiB", 1)):
        with cumem.record(stacks=stacks) as rec:
            pool.allocate(4096)
            pool.allocate(64)
        made = rows(rec.log, "allocate")
        assert np.count_nonzero(made["stack"]) == wanted, stacks
    pool.close()


def test_stack_has_the_callers_innermost_first(runtime) -> None:
    pool = cumem.Pool("pinned")

    def inner() -> Any:
        return pool.allocate(64)

    def outer() -> Any:
        return inner()

    with cumem.record() as rec:
        buffers = [outer() for _ in range(2)]
    first, second = rows(rec.log, "allocate")
    assert first["stack"] == second["stack"] > 0
    names = [f.function.rpartition(".")[2] for f in rec.log.stacks[int(first["stack"])]]
    assert names[:2] == ["inner", "outer"]
    assert len(names) <= 32
    assert rec.log.stacks[0] == ()
    assert rec.log.stacks[-1:] == [rec.log.stacks[len(rec.log.stacks) - 1]]
    with pytest.raises(IndexError):
        rec.log.stacks[len(rec.log.stacks)]
    del buffers
    pool.close()


def test_deep_stacks_are_cut_at_the_outer_end(runtime) -> None:
    pool = cumem.Pool("pinned")

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        else:
            pool.allocate(64)

    with cumem.record() as rec:
        deep(100)
    (made,) = rows(rec.log, "allocate")
    stack = rec.log.stacks[int(made["stack"])]
    assert len(stack) == 32
    assert {f.function.rpartition(".")[2] for f in stack} == {"deep"}
    pool.close()


def test_lines_of_generators_and_of_code_that_is_gone_are_right(runtime) -> None:
    pool = cumem.Pool("pinned")
    space: dict[str, Any] = {"pool": pool}
    exec(
        compile("\n\n\ndef make():\n    return pool.allocate(64)\n", "gone", "exec"),
        space,
    )
    with cumem.record() as rec:
        buffers = list(pool.allocate(128) for _ in range(1)); line = here()  # fmt: skip # noqa: E702, C400
        buffers.append(space.pop("make")())
    gc.collect()
    one, other = rows(rec.log, "allocate")
    assert line_of(rec.log, one) == line
    frame = rec.log.user_frame(int(other["stack"]))
    assert frame == ("gone", 5, "make")
    del buffers
    space.clear()
    pool.close()


def test_exceptions_under_way_survive_a_stack(runtime) -> None:
    pool = cumem.Pool("pinned")
    with cumem.record() as rec:
        try:
            buffer = pool.allocate(64)
            raise KeyError("mine")
        except KeyError as error:
            del buffer
            caught = error
    assert caught.args == ("mine",)
    assert len(rows(rec.log, "free")) == 1
    pool.close()


# -- tags -------------------------------------------------------------------------------


def tag_of(rec: cumem.Record) -> dict[int, str]:
    """Return the tag of each allocation, by the size that was asked for."""
    log = rec.log
    return {int(e["value"]): log.tags[e["tag"]] for e in rows(log, "allocate")}


def test_tags_nest_and_end_with_their_block(runtime) -> None:
    pool = cumem.Pool("pinned")

    @cumem.tag("decorated")
    def make() -> None:
        pool.allocate(5)

    with cumem.record(stacks=False) as rec:
        pool.allocate(1)
        with cumem.tag("loader"):
            pool.allocate(2)
            with contextlib.suppress(KeyError), cumem.tag("batch"):
                pool.allocate(3)
                raise KeyError
            pool.allocate(4)
            make()
        pool.allocate(6)
    assert tag_of(rec) == {
        1: "", 2: "loader", 3: "loader/batch", 4: "loader", 5: "loader/decorated", 6: ""
    }  # fmt: skip
    with pytest.raises(TypeError, match="name"), cumem.tag(3):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="name"), cumem.tag(""):
        pass
    pool.close()


def test_tag_may_be_entered_again_inside_itself_and_by_threads(runtime) -> None:
    pool = cumem.Pool("pinned")
    outer, inner = cumem.tag("outer"), cumem.tag("inner")
    ready = threading.Barrier(2)

    def work(nbytes: int) -> None:
        with inner:
            ready.wait()
            pool.allocate(nbytes)
            ready.wait()

    with cumem.record(stacks=False) as rec:
        for nbytes in (1, 2):
            with outer:
                pool.allocate(nbytes)
        with outer, inner, outer:
            pool.allocate(3)
        threads = [threading.Thread(target=work, args=(n,)) for n in (4, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pool.allocate(6)
    assert tag_of(rec) == {
        1: "outer", 2: "outer", 3: "outer/inner/outer", 4: "inner", 5: "inner", 6: ""
    }  # fmt: skip
    pool.close()


def test_tags_that_end_in_another_order_leave_those_that_are_open(runtime) -> None:
    pool = cumem.Pool("pinned")
    outer, inner = cumem.tag("outer"), cumem.tag("inner")
    with cumem.record(stacks=False) as rec:
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        pool.allocate(1)
        inner.__exit__(None, None, None)
        pool.allocate(2)
    assert tag_of(rec) == {1: "inner", 2: ""}
    pool.close()


def test_tasks_have_the_tag_of_who_made_them(runtime) -> None:
    pool = cumem.Pool("pinned")

    async def work(number: int) -> None:
        with cumem.tag(f"task {number}"):
            pool.allocate(10 + number)
            await asyncio.sleep(0)
            pool.allocate(20 + number)
        pool.allocate(30 + number)

    async def main() -> None:
        with cumem.tag("main"):
            await asyncio.gather(*(work(i) for i in range(2)))

    with cumem.record(stacks=False) as rec:
        asyncio.run(main())
    found = tag_of(rec)
    for i in range(2):
        assert found[10 + i] == found[20 + i] == f"main/task {i}"
        assert found[30 + i] == "main"
    pool.close()


def test_threads_that_python_has_not_begun_have_the_systems_name(runtime) -> None:
    noted, done = threading.Event(), threading.Event()

    def work() -> None:
        # 15 is PR_SET_NAME: the call names the thread.
        ctypes.CDLL(None).prctl(15, b"backward_0", 0, 0, 0)
        cumem.empty_pinned(100, "u1")
        noted.set()
        done.wait()

    with cumem.record() as rec:
        # The module threading does not know this thread.
        _thread.start_new_thread(work, ())
        noted.wait()
    (thread,) = {int(each) for each in rows(rec.log, "allocate")["thread"]}
    assert rec.log.threads[thread] == "backward_0"
    done.set()


def test_threads_have_the_tag_of_the_context_that_they_run_in(runtime) -> None:
    pool = cumem.Pool("pinned")
    with cumem.record(stacks=False) as rec, cumem.tag("mine"):
        context = contextvars.copy_context()
        given = threading.Thread(target=context.run, args=(pool.allocate, 1))
        given.start()
        given.join()
        bare = threading.Thread(
            target=contextvars.Context().run, args=(pool.allocate, 2)
        )
        bare.start()
        bare.join()
    assert tag_of(rec) == {1: "mine", 2: ""}
    pool.close()


def test_transfers_in_the_background_have_tag_and_line_of_their_caller(runtime) -> None:
    device, array = cumem.empty_device(9 * MIB, "u1"), np.ones(9 * MIB, "u1")
    with cumem.record() as rec:
        with cumem.tag("load"):
            transfer = cumem.copy_async(device, array); line = here()  # fmt: skip # noqa: E702
        transfer.wait()
    staged = rows(rec.log, "allocate", "staging")
    assert len(staged) > 0
    for event in [transfer_of(rec), *staged]:
        assert rec.log.tags[event["tag"]] == "load"
        assert line_of(rec.log, event) == line


def test_statistics_of_a_tag_have_those_inside(runtime) -> None:
    pool = cumem.Pool("pinned")
    with cumem.record() as rec, cumem.tag("outer"):
        keep = pool.allocate(1024)
        with cumem.tag("inner"):
            two = [pool.allocate(2048) for _ in range(2)]
            del two
        pool.allocate(64)
    groups = {g.name: g for g in rec.top("tag").groups}
    outer, inner = groups["outer"], groups["outer/inner"]
    assert (outer.count, outer.nbytes, outer.living_count) == (4, 1024 + 4096 + 64, 1)
    assert (outer.peak_nbytes, inner.peak_nbytes) == (1024 + 4096, 4096)
    assert (inner.count, inner.living_nbytes) == (2, 0)
    del keep
    pool.close()
