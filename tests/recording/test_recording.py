# SPDX-License-Identifier: Apache-2.0
"""Tests of which events records hold, and of how their files are written and read.

Each test runs calls inside `with cumem.record():`, and compares the rows of the log
with the calls: kinds, addresses, sizes, and the line of this file that made the call.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import threading
import traceback
from typing import Any

import numpy as np
import pytest
from support import faults, programs, session
from support.lines import here, nothing_runs  # noqa: F401
from support.recorded import rows, transfer_of

import cumem
from cumem import _core
from cumem.base import kinds
from cumem.recording.events import EVENT, KINDS, OPS, Log
from cumem.recording.record import FORMATS, write_record

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python
MIB = 1 << 20


def test_kinds_in_saved_records_keep_their_numbers() -> None:
    saved = (
        "pinned",
        "mapped",
        "managed",
        "device",
        "registered",
        "staging",
        "pageable",
    )
    assert KINDS[: len(saved)] == saved


def line_of(log: Log, event: Any) -> int | None:
    """Return the line of this file that caused the event, or None if it has no stack."""
    frame = log.user_frame(int(event["stack"]))
    assert frame is None or frame.filename == __file__
    return None if frame is None else frame.lineno


# -- what is noted ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds.KINDS)
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


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_trim_reports_what_went_back(runtime, kind) -> None:
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
    """The event is noted at once, although the memory is still in use by a stream."""
    if not runtime.emulated:
        pytest.skip("only emulated streams can be shut by a gate")
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


def test_pages_of_others_are_reported_as_registered(runtime) -> None:
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
    # The peak counts only memory that cumem allocated.
    assert rec.summary().peak_nbytes == 0


def test_transfers_of_every_way_are_reported_once(runtime) -> None:
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


def test_many_copies_files_and_fills_are_reported(runtime, tmp_path) -> None:
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


def test_failed_and_cancelled_transfers_are_not_reported(runtime) -> None:
    device = cumem.empty_device(1000, "u1")
    with cumem.record() as rec, pytest.raises(ValueError, match="shape"):
        cumem.copy(device, np.ones(7, "u1"))
    assert len(rows(rec.log, "transfer")) == 0


def test_prefetches_say_where_to(runtime) -> None:
    buffer = cumem.empty_managed(2 * MIB, "u1")
    with cumem.record() as rec:
        buffer.prefetch_pages(0); line = here()  # fmt: skip # noqa: E702
        buffer.prefetch_pages("host")
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
    """PyTorch asks for memory in this way, through C functions that ctypes can call.

    During a call for a whole segment PyTorch holds a lock, for which threads with the GIL
    wait. Reading the stack takes the GIL, so cumem does not read it then.
    """
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
    """A free is noted before any thread can be given the same memory again."""
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


# -- files ------------------------------------------------------------------------------


def test_record_is_written_and_read_again(runtime, tmp_path) -> None:
    path = tmp_path / "record.npz"
    device = cumem.empty_device(MIB, "u1")
    with cumem.record() as rec, cumem.tag("here"):
        cumem.copy(device, np.ones(MIB, "u1"))
        keep = cumem.empty_pinned(100)
    rec.save(path)
    again = cumem.Record.load(path)
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
    with pytest.raises(ValueError, match="not a record"):
        cumem.Record.load(path)
    np.savez(path, op=np.zeros(3))
    with pytest.raises(ValueError, match="not a record"):
        cumem.Record.load(path)
    np.savez(path, events=np.zeros(3), living=np.zeros(3), tables=np.zeros(0, "u1"))
    with pytest.raises(ValueError, match="not a record"):
        cumem.Record.load(path)
    with pytest.raises(FileNotFoundError):
        cumem.Record.load(tmp_path / "none")
    with pytest.raises(TypeError, match="should be a str"):
        cumem.Record.load(b"record.npz")  # type: ignore[arg-type]


#: This program does not know that it is recorded.
PROGRAM = """
import numpy as np
import cumem
kept = [cumem.empty_pinned(1000, "u1") for _ in range(3)]
device = cumem.empty_device(1000, "u1")
with cumem.tag("work"):
    cumem.copy(device, np.ones(1000, "u1"))
"""


def test_program_that_is_not_changed_is_recorded(tmp_path) -> None:
    """The record is written even if an exception ends the program."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "raise KeyError('dies')\n")
    path = tmp_path / "{pid}.npz"
    done = programs.run(str(program), CUMEM_RECORD=str(path), CUMEM_LEAKS="1")
    assert "KeyError: 'dies'" in done.stderr
    assert "cumem at exit: 4 buffers left" in done.stderr
    assert f"3 x  {program}:4 (" in done.stderr
    (written,) = tmp_path.glob("*.npz")
    assert written.stem.isdecimal()
    rec = cumem.Record.load(written)
    assert rec.summary().kinds[0].count == 3
    assert "work" in rec.log.tags
    assert transfer_of(rec)["nbytes"] == 1000


#: This program has buffers before it asks for a report at exit.
OLDER = """
import cumem
older = [cumem.empty_pinned(1000, "u1") for _ in range(3)]
gone = cumem.empty_pinned(1 << 20, "u1")
cumem.report_leaks_at_exit()
del gone
"""


def test_report_at_exit_sums_up_what_is_older_than_the_call() -> None:
    done = programs.run("-c", OLDER)
    assert "nothing is left\n  and 3 buffers from before report_leaks" in done.stderr
    assert "CUMEM_LEAKS=1" in done.stderr
    done = programs.run("-c", OLDER + "older.clear()\n")
    assert done.stderr == "cumem at exit: nothing is left\n"


def test_report_at_exit_takes_reused_memory_for_new() -> None:
    """The new buffer gets the address of an older one that has been freed."""
    anew = "older.pop(); made = cumem.empty_pinned(1000, 'u1')\n"
    done = programs.run("-c", OLDER + anew)
    assert "1 buffer left" in done.stderr
    assert "and 2 buffers from before" in done.stderr


def test_suffix_that_ends_with_another_has_its_own_format(
    runtime, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(FORMATS, ".lines.json", "to_json_lines")
    with cumem.record() as rec:
        cumem.empty_pinned(1000, "u1")
    rec.to_json_lines(tmp_path / "expected.jsonl")
    write_record(rec, str(tmp_path / "made.lines.json"))
    expected = (tmp_path / "expected.jsonl").read_bytes()
    assert (tmp_path / "made.lines.json").read_bytes() == expected


def test_environment_that_names_no_format_is_refused(tmp_path) -> None:
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


# -- faults -----------------------------------------------------------------------------


def test_faults_leave_a_record_that_adds_up(emulated, monkeypatch) -> None:
    """Whichever call of the runtime fails, each allocation is matched by a free."""

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
