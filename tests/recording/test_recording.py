# SPDX-License-Identifier: Apache-2.0
"""Records: what the recorder is told of, on whose behalf, and what is made of it."""

from __future__ import annotations

import _thread
import asyncio
import collections
import contextlib
import contextvars
import copy
import ctypes
import errno
import gc
import json
import linecache
import os
import pickle
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import faults, programs, session
from support.lines import here, nothing_runs  # noqa: F401

import cumem
from cumem import _core
from cumem.recording import record
from cumem.recording.events import EVENT, KINDS, OPS, Log
from cumem.recording.record import FORMATS

# The C core alone decides what is tested here; Python only calls it.
pytestmark = pytest.mark.any_python

MIB = 1 << 20
POOL_KINDS = ("pinned", "mapped", "managed", "device")


def rows(log: Log, op: str, kind: str | None = None) -> np.ndarray[Any, Any]:
    chosen = log.events["op"] == OPS.index(op)
    if kind is not None:
        chosen &= log.events["kind"] == KINDS.index(kind)
    return log.events[chosen]


def line_of(log: Log, event: Any) -> int | None:
    """Line in this file, of the frame that made it."""
    frame = log.user_frame(int(event["stack"]))
    assert frame is None or frame.filename == __file__
    return None if frame is None else frame.lineno


# -- what is noted ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", POOL_KINDS)
def test_row_of_an_allocation_has_all_its_fields(runtime, kind) -> None:
    pool = cumem.Pool(kind)
    stream = cumem.Stream() if kind == "device" else None
    with cumem.record() as rec:
        buffer = pool.allocate(1000, stream=stream); made = here()  # fmt: skip # noqa: E702
        address = buffer.ptr
        del buffer; freed = here()  # fmt: skip # noqa: E702
    assert rec.log.events.dtype == EVENT
    (grown,) = rows(rec.log, "grow")
    (allocated,) = rows(rec.log, "allocate")
    (free,) = rows(rec.log, "free")
    assert grown["value"] == grown["nbytes"] == pool.stats().reserved_nbytes
    assert grown["address"] <= address < grown["address"] + grown["nbytes"]
    for event in (allocated, free):
        assert event["address"] == address
        assert event["nbytes"] == 1024
        assert event["thread"] == threading.get_native_id()
        assert (event["kind"], event["source_kind"]) == (KINDS.index(kind),) * 2
        assert event["device"] == 0
        assert event["pool"] == grown["pool"] > 0
        assert event["stream"] == (0 if stream is None else stream.__cuda_stream__()[1])
    assert (allocated["value"], free["value"]) == (1000, 0)
    assert (line_of(rec.log, allocated), line_of(rec.log, free)) == (made, freed)
    assert line_of(rec.log, grown) == made
    assert 0 < grown["time_ns"] <= allocated["time_ns"] <= free["time_ns"]
    assert free["time_ns"] < rec.log.duration_ns
    del stream
    pool.close()


@pytest.mark.parametrize("kind", POOL_KINDS)
def test_trim_tells_what_went_back(runtime, kind) -> None:
    pool = cumem.Pool(kind)
    del_me = pool.allocate(3 * MIB)
    del del_me
    cumem.Device(0).synchronize()
    reserved = pool.stats().reserved_nbytes
    with cumem.record() as rec:
        released = pool.trim()
    trimmed = rows(rec.log, "trim", kind)
    assert released == reserved == trimmed["nbytes"].sum()
    assert trimmed["value"][-1] == 0
    pool.close()


def test_free_is_noted_when_the_user_lets_go(runtime) -> None:
    """Not when the work that runs on it has ended."""
    if not runtime.emulated:
        pytest.skip("gates")
    stream = cumem.Stream()
    pool = cumem.Pool("pinned")
    source, target = pool.allocate(64), cumem.empty_device(64, "u1")
    with cumem.record() as rec:
        with session.gate(stream):
            target.fill(1, stream=stream)
            source.record_stream(stream)
            del source
            (early,) = rows(rec.log, "free", "pinned")
            assert pool.stats().in_flight_count == 1
        stream.synchronize()
        pool.trim()
    (free,) = rows(rec.log, "free", "pinned")
    assert free == early
    del target
    pool.close()


def test_failing_allocation_leaves_no_event_but_shortages(runtime) -> None:
    pool = cumem.Pool("device", limit=4 * MIB)
    with cumem.record() as rec, pytest.raises(cumem.OutOfMemoryError):
        pool.allocate(8 * MIB)
    short = rows(rec.log, "out_of_memory")
    assert {OPS[op] for op in rec.log.events["op"]} <= {"out_of_memory", "trim"}
    assert len(short) == pool.stats().out_of_memory_count > 0
    assert (short["nbytes"] == 8 * MIB).all()
    assert (short["value"] == 0).all()
    frame = rec.log.user_frame(int(short[0]["stack"]))
    assert frame is not None
    assert "pool.allocate(8 * MIB)" in linecache.getline(*frame[:2])
    assert rec.summary().out_of_memory_count == len(short)
    pool.close()


def test_pages_of_others_are_told_of_as_registered(runtime) -> None:
    array = np.zeros(5000, "u1")
    with cumem.record() as rec:
        registration = cumem.register(array); line = here()  # fmt: skip # noqa: E702
        registration.close()
    (begun,), (ended,) = (
        rows(rec.log, op, "registered") for op in ("allocate", "free")
    )
    assert begun["address"] == ended["address"] == array.ctypes.data
    assert begun["nbytes"] == ended["nbytes"] == begun["value"] == 5000
    assert line_of(rec.log, begun) == line
    assert rec.summary().peak_nbytes == 0  # it is not ours


def transfer_of(rec: cumem.Record) -> Any:
    (event,) = rows(rec.log, "transfer")
    return event


def test_transfers_of_every_way_are_told_of_once(runtime) -> None:
    size = 3 * MIB
    pinned, device = cumem.empty_pinned(size, "u1"), cumem.empty_device(size, "u1")
    ordinary, stream = np.ones(size, "u1"), cumem.Stream()
    ways = {
        "blocking": lambda: cumem.copy(device, pinned),
        "short": lambda: cumem.copy(device[:100], pinned[:100]),
        "down": lambda: cumem.copy(ordinary, device),
        "stream": lambda: cumem.copy_async(device, pinned, stream=stream).wait(),
        "background": lambda: cumem.copy_async(device, ordinary).wait(),
        "host": lambda: cumem.copy(pinned, ordinary),
    }
    ends = {
        "blocking": ("pinned", "device", size),
        "short": ("pinned", "device", 100),
        "down": ("device", "pageable", size),
        "stream": ("pinned", "device", size),
        "background": ("pageable", "device", size),
        "host": ("pageable", "pinned", size),
    }
    places = {
        "pinned": pinned.ptr, "device": device.ptr, "pageable": ordinary.ctypes.data
    }  # fmt: skip
    for name, act in ways.items():
        with cumem.record() as rec:
            act(); line = here()  # fmt: skip # noqa: E702
        event = transfer_of(rec)
        source, target, nbytes = ends[name]
        assert KINDS[event["source_kind"]] == source, name
        assert KINDS[event["kind"]] == target, name
        assert event["nbytes"] == nbytes, name
        assert (event["source"], event["address"]) == (places[source], places[target])
        assert event["value"] > 0, name
        assert event["time_ns"] + event["value"] <= rec.log.duration_ns, name
        found = [f.lineno for f in rec.log.stacks[int(event["stack"])]]
        assert line in found, name
        assert event["stream"] == (
            stream.__cuda_stream__()[1] if name == "stream" else event["stream"]
        )


def test_many_copies_files_and_fills_are_told_of(runtime, tmp_path) -> None:
    device = [cumem.empty_device(1000, "u1") for _ in range(3)]
    pinned = [cumem.empty_pinned(1000, "u1") for _ in range(3)]
    with cumem.record() as rec:
        cumem.copy_many(zip(device, pinned, strict=True))
    events = rows(rec.log, "transfer")
    assert events["nbytes"].sum() == 3000
    assert {(KINDS[e["source_kind"]], KINDS[e["kind"]]) for e in events} == {
        ("pinned", "device")
    }
    with cumem.record() as rec:
        device[0].fill(7)
        cumem.synchronize()
    event = transfer_of(rec)
    assert (event["nbytes"], event["source"]) == (1000, 0)
    assert event["address"] == device[0].ptr
    path = tmp_path / "bytes"
    with cumem.record() as rec:
        cumem.tofile(path, pinned[0])
        cumem.fromfile(path, dtype="u1", kind="device")
    written, read = rows(rec.log, "transfer")
    assert KINDS[written["source_kind"]] == "pinned"
    assert (KINDS[read["kind"]], read["nbytes"]) == ("device", 1000)


def test_failed_and_cancelled_transfers_are_not_told_of(runtime) -> None:
    device = cumem.empty_device(1000, "u1")
    with cumem.record() as rec, pytest.raises(ValueError, match="shape"):
        cumem.copy(device, np.ones(7, "u1"))
    assert len(rows(rec.log, "transfer")) == 0


def test_prefetches_say_where_to(runtime) -> None:
    buffer = cumem.empty_managed(2 * MIB, "u1")
    with cumem.record() as rec:
        buffer.prefetch(0); line = here()  # fmt: skip # noqa: E702
        buffer.prefetch("host")
    there, back = rows(rec.log, "prefetch", "managed")
    assert (there["device"], back["device"]) == (0, -1)
    assert there["nbytes"] == back["nbytes"] == 2 * MIB
    assert there["address"] == buffer.ptr
    assert line_of(rec.log, there) == line
    assert rec.summary().prefetch_nbytes == 4 * MIB


def test_what_copies_go_through_is_staging(runtime) -> None:
    device = cumem.empty_device(9 * MIB, "u1")
    with cumem.record() as rec:
        cumem.copy(device, np.ones(9 * MIB, "u1"))
    made, ended = (rows(rec.log, op, "staging") for op in ("allocate", "free"))
    assert len(made) == len(ended) > 0
    assert sorted(made["address"]) == sorted(ended["address"])
    assert rec.leaks().count == 0


def test_lent_memory_has_its_callers_line_without_the_gil(runtime) -> None:
    """As PyTorch asks for it; not segments, for which it holds a lock."""
    import ctypes

    integration = pytest.importorskip("cumem.integrations.torch")
    del integration
    kind = ctypes.CFUNCTYPE(
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    )
    end = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    )
    library = ctypes.CDLL(_core.__file__)
    lend, take_back = kind(("cumem_lend", library)), end(("cumem_take_back", library))
    pool = cumem.Pool("device")
    _core._lend(pool)
    with cumem.record() as rec, cumem.tag("torch"):
        address = lend(1000, 0, None); line = here()  # fmt: skip # noqa: E702
        take_back(address, 1000, 0, None)
    (allocated,) = rows(rec.log, "allocate", "device")
    (free,) = rows(rec.log, "free", "device")
    assert line_of(rec.log, allocated) == line
    assert rec.log.tags[allocated["tag"]] == "torch"
    assert free["address"] == address
    cumem.Device(0).synchronize()
    pool.trim()
    pool.close()


def test_arrays_of_numpy_are_in_it(runtime) -> None:
    with cumem.record() as rec, cumem.numpy_pinned():
        array = np.ones(MIB, "u1"); line = here()  # fmt: skip # noqa: E702
    (allocated,) = rows(rec.log, "allocate", "pinned")
    assert allocated["address"] == array.ctypes.data
    assert line_of(rec.log, allocated) == line
    del array


def test_frees_and_allocations_of_an_address_alternate(runtime) -> None:
    """Whichever threads they are of: nobody is told of memory before it is free."""
    pool = cumem.Pool("pinned")
    count, threads = 400, 4
    barrier = threading.Barrier(threads)

    def work() -> None:
        barrier.wait()
        for i in range(count):
            buffer = pool.allocate(64 * (1 + i % 3))
            del buffer

    with cumem.record(stacks=False) as rec:
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    log = rec.log
    assert len(rows(log, "allocate")) == len(rows(log, "free")) == count * threads
    assert (np.diff(log.events["time_ns"].astype("i8")) >= 0).all()
    live: set[int] = set()
    for event in log.events:
        if OPS[event["op"]] == "allocate":
            assert event["address"] not in live
            live.add(event["address"])
        elif OPS[event["op"]] == "free":
            live.remove(event["address"])
    assert len(set(rows(log, "allocate")["thread"])) == threads
    assert set(log.threads) >= {threading.get_native_id()}
    pool.close()


# -- the ring --------------------------------------------------------------------------


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
        freed.clear()  # lost too, as is what lived before it
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
    assert list(generator) == []  # here, where the tag was never set
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
        with pytest.raises(TypeError, match="use with in it"):
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
        with cumem.record(max_entries=100) as inner:  # makes the ring larger
            for i in range(2, 6):
                pool.allocate(i)
        pool.allocate(6)
    assert list(rows(inner.log, "allocate")["value"]) == [2, 3, 4, 5]
    assert all(rows(inner.log, "allocate")["stack"])
    assert len(outer.log.events) == 3
    assert list(rows(outer.log, "allocate")["value"]) == [6]
    assert outer.log.lost_count == 10  # 6 pairs and a growth, less those three
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
    with pytest.raises(error, match=next(iter(arguments)) + "|size|many"):
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


# -- stacks ----------------------------------------------------------------------------


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


# -- tags ------------------------------------------------------------------------------


def tag_of(rec: cumem.Record) -> dict[int, str]:
    """Of each allocation, by the size asked for."""
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
        ctypes.CDLL(None).prctl(15, b"backward_0", 0, 0, 0)  # PR_SET_NAME
        cumem.empty_pinned(100, "u1")
        noted.set()
        done.wait()

    with cumem.record() as rec:
        _thread.start_new_thread(work, ())  # threading does not know of it
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


# -- answers ---------------------------------------------------------------------------


def test_planted_leaks_of_every_kind_are_found_with_their_lines(runtime) -> None:
    planted: dict[str, list[Any]] = collections.defaultdict(list)
    lines: dict[str, int] = {}
    array = np.zeros(MIB, "u1")
    with cumem.record() as rec:
        for _ in range(3):
            planted["pinned"].append(cumem.empty_pinned(1000, "u1")); lines["pinned"] = here()  # fmt: skip # noqa: E702, E501
            cumem.empty_pinned(2000, "u1")
        planted["mapped"].append(cumem.empty_mapped(1000, "u1")); lines["mapped"] = here()  # fmt: skip # noqa: E702, E501
        planted["managed"].append(cumem.empty_managed(1000, "u1")); lines["managed"] = here()  # fmt: skip # noqa: E702, E501
        planted["device"].append(cumem.empty_device(1000, "u1")); lines["device"] = here()  # fmt: skip # noqa: E702, E501
        planted["registered"].append(cumem.register(array)); lines["registered"] = here()  # fmt: skip # noqa: E702, E501
        cumem.copy(planted["device"][0], np.ones(1000, "u1"))
    leaks = rec.leaks()
    found = {int(g.name.rpartition(":")[2].split()[0]): g for g in leaks.groups}
    assert set(found) == set(lines.values())
    assert found[lines["pinned"]].living_count == 3
    assert found[lines["pinned"]].count == 3
    assert found[lines["registered"]].living_nbytes == MIB
    assert os.path.basename(__file__) in leaks.groups[0].name
    assert leaks.count == 7
    assert str(leaks).startswith("7 buffers left")
    planted.pop("registered")[0].close()
    planted.clear()


def test_peak_says_when_and_what_lived_then(runtime) -> None:
    pool, other = cumem.Pool("pinned"), cumem.Pool("mapped")
    with cumem.record() as rec:
        one = pool.allocate(4096); first = here()  # fmt: skip # noqa: E702
        two = other.allocate(8192); second = here()  # fmt: skip # noqa: E702
        del one
        pool.allocate(64)
        del two
    peak = rec.peak()
    assert peak.nbytes >= 4096 + 8192
    assert peak.kinds["pinned"] == 4096
    assert peak.kinds["mapped"] == 8192
    at = rows(rec.log, "allocate")[1]["time_ns"]
    assert peak.seconds == pytest.approx(at * 1e-9)
    names = [group.name for group in peak.groups]
    assert any(f":{second} " in name for name in names)
    assert any(f":{first} " in name for name in names)
    assert rec.summary().peak_nbytes == peak.nbytes
    pool.close()
    other.close()


def test_answers_of_nothing_are_said_plainly() -> None:
    with cumem.record() as rec:
        pass
    assert not rec.leaks()
    assert str(rec.leaks()) == "nothing is left"
    assert "0 events" in str(rec.summary())
    assert rec.peak().seconds == 0
    assert str(rec.top()).startswith("line")
    assert str(cumem.diff(rec, rec)) == "peak +0 B"
    with pytest.raises(ValueError, match="by must be"):
        rec.top("size")  # type: ignore[arg-type]


def test_answers_are_plain_data_and_readable(runtime) -> None:
    device = cumem.empty_device(MIB, "u1")
    with cumem.record() as rec:
        cumem.copy(device, np.ones(MIB, "u1"))
        keep = cumem.empty_pinned(100)
    answers = (rec.summary(), rec.leaks(), rec.top(), rec.top("tag"), rec.peak())
    for answer in (*answers, cumem.diff(rec, rec), cumem.live()):
        assert json.loads(json.dumps(answer.to_dict()))
        assert "nan" not in str(answer)
        assert str(answer)
    assert rec.summary().to_dict()["transfers"][0]["gbps"] > 0
    assert "pageable -> device" in str(rec.summary())
    del keep


def test_difference_names_the_lines_that_changed(runtime) -> None:
    pool = cumem.Pool("pinned")

    def work(count: int) -> list[Any]:
        same = [pool.allocate(64)]
        more = [pool.allocate(4096) for _ in range(count)]; work.line = here()  # fmt: skip # noqa: E702
        return same + more

    recs = []
    for count in (1, 3):
        with cumem.record() as rec:
            work(count)
        recs.append(rec)
    found = cumem.diff(*recs)
    (change,) = found.lines
    assert f":{work.line} " in change.name
    assert (change.count, change.peak_nbytes) == (2, 2 * 4096)
    assert found.peak_nbytes == 2 * 4096
    back = cumem.diff(*reversed(recs))
    assert back.lines[0].count == -2
    with pytest.raises(TypeError, match="after"):
        cumem.diff(recs[0], 3)  # type: ignore[arg-type]
    pool.close()


def test_log_that_lost_frees_does_not_count_twice() -> None:
    """An address allocated again has been freed, whether or not that was seen."""
    events = np.zeros(3, EVENT)
    events["address"] = (64, 64, 128)
    events["nbytes"] = 64
    events["op"] = [OPS.index(op) for op in ("allocate", "allocate", "free")]
    log = Log(events, np.zeros(0, EVENT), [()], ("",), {}, 5, 0.0, 10, {})
    from cumem.recording import summary

    assert summary.summarize(log).peak_nbytes == 64
    assert [g.peak_nbytes for g in summary.find_top(log, "kind").groups] == [64]
    leaks = summary.find_leaks(log)
    assert (leaks.count, leaks.nbytes) == (1, 64)


# -- files -----------------------------------------------------------------------------


def test_record_is_written_and_read_again(runtime, tmp_path) -> None:
    path = tmp_path / "record.npz"
    device = cumem.empty_device(MIB, "u1")
    with cumem.record() as rec, cumem.tag("here"):
        cumem.copy(device, np.ones(MIB, "u1"))
        keep = cumem.empty_pinned(100)
    rec.save(path)
    again = cumem.load_record(path)
    assert (again.log.events == rec.log.events).all()
    assert (again.log.living == rec.log.living).all()
    for name in ("tags", "threads", "lost_count", "begin_s", "duration_ns", "machine"):
        assert getattr(again.log, name) == getattr(rec.log, name)
    assert again.log.machine["backend"] == runtime.name
    assert again.leaks() == rec.leaks()
    assert again.top() == rec.top()
    assert again.summary() == rec.summary()
    del keep


def test_replay_takes_a_record(runtime, tmp_path) -> None:
    from cumem.tools.replay.trace import load_trace

    path = tmp_path / "record.npz"
    pool = cumem.Pool("pinned")
    early = pool.allocate(300)
    with cumem.record(stacks=False) as rec:
        keep = pool.allocate(1000)
        pool.allocate(2000)
        del early
    rec.save(path)
    trace = load_trace(path)
    assert list(trace.size[trace.op == 1])[-2:] == [1000, 2000]
    assert trace.peak_live >= 3300
    assert trace.events >= 5
    assert load_trace(path, kind="pinned").op.tolist() == trace.op.tolist()
    with pytest.raises(
        ValueError, match="device memory in it; there is pinned: choose by --kind"
    ):
        load_trace(path, kind="device")
    del keep
    pool.close()


def test_damaged_files_are_refused(tmp_path) -> None:
    path = tmp_path / "record.npz"
    path.write_bytes(b"PK of nothing")
    with pytest.raises(ValueError, match="no record"):
        cumem.load_record(path)
    np.savez(path, op=np.zeros(3))
    with pytest.raises(ValueError, match="no record"):
        cumem.load_record(path)
    np.savez(path, events=np.zeros(3), living=np.zeros(3), tables=np.zeros(0, "u1"))
    with pytest.raises(ValueError, match="no record"):
        cumem.load_record(path)
    with pytest.raises(FileNotFoundError):
        cumem.load_record(tmp_path / "none")
    with pytest.raises(TypeError, match="should be a str"):
        cumem.load_record(b"record.npz")  # type: ignore[arg-type]


PROGRAM = """
import numpy as np
import cumem
kept = [cumem.empty_pinned(1000, "u1") for _ in range(3)]
device = cumem.empty_device(1000, "u1")
with cumem.tag("work"):
    cumem.copy(device, np.ones(1000, "u1"))
"""


def test_program_that_is_not_changed_is_recorded(tmp_path) -> None:
    """Also one that dies by an exception."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "raise KeyError('dies')\n")
    path = tmp_path / "{pid}.npz"
    done = programs.run(str(program), CUMEM_RECORD=str(path), CUMEM_LEAKS="1")
    assert "KeyError: 'dies'" in done.stderr
    assert "cumem at exit: 4 buffers left" in done.stderr
    assert f"3 x  {program}:4 (" in done.stderr
    (written,) = tmp_path.glob("*.npz")
    assert written.stem.isdecimal()
    rec = cumem.load_record(written)
    assert rec.summary().kinds[0].count == 3
    assert "work" in rec.log.tags
    assert transfer_of(rec)["nbytes"] == 1000


OLDER = """
import cumem
older = [cumem.empty_pinned(1000, "u1") for _ in range(3)]
gone = cumem.empty_pinned(1 << 20, "u1")
cumem.report_leaks_at_exit()
del gone
"""


def test_report_at_exit_sums_up_what_is_older_than_the_call() -> None:
    done = programs.run("-c", OLDER)
    assert "nothing is left\n  and 3 buffers of before report_leaks" in done.stderr
    assert "CUMEM_LEAKS=1" in done.stderr
    done = programs.run("-c", OLDER + "older.clear()\n")
    assert done.stderr == "cumem at exit: nothing is left\n"


def test_report_at_exit_takes_reused_memory_for_new() -> None:
    """At the place of an older buffer that has ended there is another one."""
    anew = "older.pop(); made = cumem.empty_pinned(1000, 'u1')\n"
    done = programs.run("-c", OLDER + anew)
    assert "1 buffer left" in done.stderr
    assert "and 2 buffers of before" in done.stderr


def test_environment_that_names_no_format_is_told_so(tmp_path) -> None:
    done = programs.run("-c", "import cumem", CUMEM_RECORD=str(tmp_path / "a.txt"))
    assert "RuntimeWarning" in done.stderr
    assert ".npz" in done.stderr
    done = programs.run("-c", PROGRAM, CUMEM_RECORD=str(tmp_path / "no" / "a.npz"))
    assert done.returncode == 0
    assert f"the folder {tmp_path / 'no'} is not there now" in done.stderr
    assert "could not be written" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert ".npz" in FORMATS


def test_forked_child_writes_and_reports_nothing(tmp_path) -> None:
    path = tmp_path / "{pid}.npz"
    fork = "import os, sys\nif os.fork() == 0: sys.exit()\nos.wait()\n"
    done = programs.run(
        "-W", "ignore", "-c", PROGRAM + fork, CUMEM_RECORD=str(path), CUMEM_LEAKS="1"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cumem at exit") == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_records_end_with_a_fork_in_the_child(runtime) -> None:
    pool = cumem.Pool("pinned")
    with cumem.record() as rec:
        keep = pool.allocate(64)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert not rec.running
                with pytest.raises(RuntimeError, match="fork"):
                    rec.leaks()
                with cumem.record() as own:
                    pass
                assert len(own) == 0
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert rec.running
        pool.allocate(65)
    assert list(rows(rec.log, "allocate")["value"]) == [64, 65]
    del keep
    pool.close()


# -- faults ----------------------------------------------------------------------------


def test_faults_leave_a_record_that_adds_up(emulated, monkeypatch) -> None:
    """Each call of the runtime fails once: what is allocated is freed, or lives."""

    def scenario() -> None:
        with cumem.record(stacks=False) as rec:
            pool = cumem.Pool("device")
            buffers = [pool.allocate(3 * MIB), cumem.empty_pinned(1000)]
            cumem.copy(buffers[0][:1000], np.ones(1000, "u1"))
            buffers.clear()
            pool.close()
        recs.append(rec)

    for op in ("device_count", "device_describe"):
        monkeypatch.setitem(faults.SECOND_WAY, op, "the record has no names of devices")
    recs: list[cumem.Record] = []
    faults.sweep(scenario)
    assert len(recs) > 5
    for rec in recs:
        assert rec.leaks().count == 0, rec.log.events
