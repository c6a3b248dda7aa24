# SPDX-License-Identifier: Apache-2.0
"""Tests of how many events the ring keeps, and of what a second record sees.

Most tests let a record have more events than its ring holds, and compare the events
that are kept, the number of lost ones and the answers.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import errno
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.lines import here, nothing_runs  # noqa: F401
from support.recorded import rows

import cumem
from cumem.recording import record
from cumem.recording.events import KINDS

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python


def test_of_more_events_than_fit_the_oldest_are_lost_and_counted(runtime) -> None:
    pool = cumem.Pool("pinned")
    keep = pool.allocate(64)
    with cumem.record(stacks=False, max_entries=10) as rec:
        for i in range(30):
            pool.allocate(64 + i)
        assert len(rec) == 10
    assert len(rec) == len(rec.log.events) == 10
    assert rec.log.lost_count == 60 - 10
    assert list(rows(rec.log, "allocate")["value"]) == [89, 90, 91, 92, 93]
    assert rec.leaks().lost_count == 50
    assert "50" in str(rec.leaks())
    del keep
    pool.close()


def test_what_lived_is_right_where_the_beginning_is_lost(runtime) -> None:
    pool = cumem.Pool("pinned")
    freed = [pool.allocate(1 << 20) for _ in range(4)]
    later = pool.allocate(512)
    with cumem.record(stacks=False, max_entries=6) as rec:
        unseen, gone = pool.allocate(4096), pool.allocate(2048)
        # These events are lost too, like all those before them.
        freed.clear()
        again = [pool.allocate(1 << 20) for _ in range(4)]
        del later, gone
    assert rec.log.lost_count == 6
    mine = rec.log.living[rec.log.living["pool"] == rec.log.events["pool"][0]]
    assert sorted(mine["nbytes"]) == [512, 2048, 4096]
    others = rec.log.living["nbytes"].sum() - mine["nbytes"].sum()
    assert rec.peak().nbytes == (4 << 20) + 512 + 2048 + 4096 + others
    (kind,) = rec.top("kind").groups
    assert kind.living_nbytes == (4 << 20) + 4096 + others
    assert (rec.leaks().count, rec.leaks().nbytes) == (4, 4 << 20)
    del unseen, again
    pool.close()


def test_tag_of_a_generator_may_end_in_another_context(runtime) -> None:
    def batches() -> Iterator[int]:
        with cumem.tag("batches"):
            yield 1

    begun = contextvars.copy_context().run
    generator = batches()
    assert begun(next, generator) == 1
    # The generator ends in this context, where the tag was never set.
    assert list(generator) == []
    with cumem.record(stacks=False) as rec:
        kept = cumem.empty_pinned(64, "u1")
    assert [group.name for group in rec.top("tag").groups if group.count] == [""]
    del kept


def test_running_record_is_not_copied(runtime) -> None:
    with cumem.record(stacks=False) as rec:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="stop"):
                copied(rec)
        kept = cumem.empty_pinned(64, "u1")
    assert len(pickle.loads(pickle.dumps(rec))) == len(rec)
    del kept


def test_record_that_cannot_begin_or_end_is_off(monkeypatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    ends = cumem.record()
    ends.start()
    monkeypatch.setattr(record, "_read_alive", interrupt)
    begins = cumem.record()
    for call in (begins.start, ends.stop):
        with pytest.raises(KeyboardInterrupt):
            call()
    assert not begins.running
    assert not ends.running
    assert record.open_records() == []
    monkeypatch.undo()
    with begins:
        pass
    assert len(begins.log.events) == 0


def test_tag_decorates_what_is_awaited_and_no_generator(runtime) -> None:
    """A tag may decorate a coroutine function. For a generator function, an error says
    to write a `with` block in its body.
    """

    @cumem.tag("step")
    async def step(inner: bool) -> None:
        await asyncio.sleep(0)
        cumem.empty_pinned(64, "u1")
        if inner:
            await step(False)

    async def both() -> None:
        await asyncio.gather(step(True), step(False))

    with cumem.record(stacks=False) as rec:
        asyncio.run(both())
    counts = {group.name: group.count for group in rec.top("tag").groups if group.count}
    assert counts == {"step": 3, "step/step": 1}

    async def batches() -> Any:
        yield 1

    def samples() -> Any:
        yield 1

    for function in (batches, samples):
        with pytest.raises(TypeError, match="write with in its body"):
            cumem.tag("loader")(function)


@pytest.mark.parametrize("suffix", [".npz", ".json.gz"])
def test_file_that_cannot_be_written_whole_leaves_the_one_before(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"old{suffix}"
    path.write_bytes(b"before")
    with cumem.record(stacks=False) as rec:
        pass

    def fail(*_args: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    monkeypatch.setattr(record, "_export", fail)
    with pytest.raises(OSError, match="full"):
        record.write_record(rec, str(path))
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == [path.name]


def test_nested_records_each_have_their_own_events(runtime) -> None:
    pool = cumem.Pool("pinned")
    with cumem.record(stacks=False, max_entries=3) as outer:
        pool.allocate(1)
        # The second record needs a larger ring.
        with cumem.record(max_entries=100) as inner:
            for i in range(2, 6):
                pool.allocate(i)
        pool.allocate(6)
    assert list(rows(inner.log, "allocate")["value"]) == [2, 3, 4, 5]
    assert all(rows(inner.log, "allocate")["stack"])
    assert len(outer.log.events) == 3
    assert list(rows(outer.log, "allocate")["value"]) == [6]
    # There were 6 pairs of events and one growth, of which 3 events are kept.
    assert outer.log.lost_count == 10
    pool.close()


def test_record_of_more_than_there_was_room_for_grows_the_ring_in_order(
    runtime,
) -> None:
    pool = cumem.Pool("pinned")
    pool.allocate(1)
    with cumem.record(stacks=False, max_entries=4) as outer:
        for i in range(1, 6):
            pool.allocate(i)
        with cumem.record(stacks=False, max_entries=50):
            pool.allocate(6)
            assert list(rows(outer.log, "allocate")["value"]) == [5, 6]
    pool.close()


def test_record_can_be_started_and_stopped_again(runtime) -> None:
    pool = cumem.Pool("pinned")
    rec = cumem.record()
    assert "not started" in repr(rec)
    assert len(rec) == 0
    with pytest.raises(RuntimeError, match="not started"):
        rec.summary()
    with pytest.raises(RuntimeError, match="not running"):
        rec.stop()
    rec.start()
    with pytest.raises(RuntimeError, match="running"):
        rec.start()
    assert rec.running
    pool.allocate(7)
    assert list(rows(rec.log, "allocate")["value"]) == [7]
    rec.stop()
    pool.allocate(8)
    assert list(rows(rec.log, "allocate")["value"]) == [7]
    rec.start()
    pool.allocate(9)
    rec.stop()
    assert list(rows(rec.log, "allocate")["value"]) == [9]
    assert "running" not in repr(rec)
    pool.close()


def test_what_lived_before_is_told_apart(runtime) -> None:
    pool = cumem.Pool("mapped")
    early, gone = pool.allocate(100), pool.allocate(5000)
    with cumem.record() as rec:
        del gone
        late = pool.allocate(200)
    lived = rec.log.living[rec.log.living["pool"] == rec.log.events["pool"][0]]
    assert sorted(lived["value"]) == [100, 5000]
    assert set(lived["kind"]) == {KINDS.index("mapped")}
    leaks = rec.leaks()
    assert (leaks.count, leaks.nbytes) == (1, 256)
    (group,) = (g for g in rec.top("kind").groups if g.name == "mapped")
    assert (group.count, group.living_count) == (1, 2)
    del early, late
    pool.close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"stacks": 1.5}, TypeError),
        ({"stacks": "many"}, ValueError),
        ({"stacks": -1}, ValueError),
        ({"max_entries": 0}, ValueError),
        ({"max_entries": True}, TypeError),
        ({"max_entries": 1 << 60}, ValueError),
    ],
)
def test_wrong_arguments_are_refused(arguments, error) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        cumem.record(**arguments)


def test_events_without_room_raise_memory_error_and_nothing_runs() -> None:
    rec = cumem.record(max_entries=1 << 32)
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, before[1]))
    try:
        with pytest.raises(MemoryError):
            rec.start()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert not rec.running
