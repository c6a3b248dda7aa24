# SPDX-License-Identifier: Apache-2.0
"""A record in the formats of other tools must tell them what happened.

Small records are worked out by hand, and large random ones are compared with a plain
loop over the events. Where the tool itself is installed, it reads the file.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import pickle
import pickletools
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import programs
from support.records import MIB, by_hand, event, log_of, random_log

import cumem
from cumem.recording import (
    json_lines,
    perfetto,
    pprof,
    reading,
    summary,
    torch_snapshot,
)
from cumem.recording.events import EVENT, KINDS, OPS, Frame, Log
from cumem.recording.pairing import (
    DIRECTIONS,
    changes,
    directions,
    lanes,
    machine_text,
    pair,
)
from cumem.tools.replay.trace import load_trace

# The C core and the file formats decide what a file holds, so these tests show the same
# under every version of Python.
pytestmark = pytest.mark.any_python

COUNT = 6000
MODULES = (json_lines, perfetto, pprof, torch_snapshot)


@pytest.fixture(scope="module")
def log() -> Log:
    return random_log(COUNT, seed=3)


def followed(log: Log) -> tuple[dict[tuple[int, int], Any], list[int]]:
    """Return what lives at the end, and how many bytes live after each event.

    This is a plain loop, which the fast code must agree with.
    """
    alive: dict[tuple[int, int], Any] = {}
    total, totals = 0, []
    for number, row in enumerate(np.concatenate([log.living, log.events])):
        key = (int(row["kind"]), int(row["address"]))
        if row["op"] < 2 and key in alive:
            total -= int(alive.pop(key)["nbytes"])
        if row["op"] == 0:
            alive[key] = row
            total += int(row["nbytes"])
        if number >= len(log.living):
            totals.append(total)
    return alive, totals


# -- lives and lanes -------------------------------------------------------------------


def test_pair_of_a_record_worked_out_by_hand() -> None:
    lives = pair(by_hand())
    assert lives.before_count == 1
    assert lives.begin.tolist() == [0, 2, 3]
    assert lives.end.tolist() == [7, 6, len(lives.rows)]
    assert lives.unknown_count == 0


@pytest.mark.parametrize("seed", range(3))
def test_pair_agrees_with_a_plain_loop(seed: int) -> None:
    log = random_log(3000, seed)
    # Some of the oldest events are missing, as from a ring that was too small.
    log = log._replace(
        events=np.delete(log.events, slice(100, 700)), living=log.living[3:]
    )
    lives = pair(log)
    alive, totals = followed(log)
    left = lives.rows[lives.begin[lives.end == len(lives.rows)]]
    assert sorted(left["address"].tolist()) == sorted(a for _, a in alive)
    row, life, opens, *_ = changes(lives)
    signed = np.where(opens, 1, -1) * lives.rows["nbytes"][lives.begin[life]].astype(
        int
    )
    after = np.bincount(row, signed, len(lives.rows)).cumsum()[lives.before_count :]
    assert after.astype(int).tolist() == totals
    most = _most(log, [i for i, kind in enumerate(KINDS) if kind != "registered"])
    assert summary.find_peak(log).nbytes == reading.peaks(log)["all"][0] == most
    for group in summary.find_top(log, "kind").groups:
        assert group.peak_nbytes == _most(log, [KINDS.index(group.name)])
        assert group.peak_nbytes == reading.peaks(log)[group.name][0]
    frees = int((log.events["op"] == 1).sum())
    known = int(((lives.end < len(lives.rows)) & _freed(lives)).sum())
    assert lives.unknown_count == frees - known > 0


def _most(log: Log, kinds: list[int]) -> int:
    """Return the largest number of bytes of these kinds that lived at the same time.

    The plain loop gets the events of these kinds only.
    """
    events, living = (r[np.isin(r["kind"], kinds)] for r in (log.events, log.living))
    totals = followed(log._replace(events=events, living=living))[1]
    return max([int(living["nbytes"].sum()), *totals])


def _freed(lives: Any) -> Any:
    return lives.rows["op"][np.minimum(lives.end, len(lives.rows) - 1)] == 1


def test_pair_of_nothing() -> None:
    lives = pair(log_of())
    assert len(lives.begin) == len(changes(lives).row) == lives.unknown_count == 0


def test_pair_puts_events_in_the_order_of_time() -> None:
    log = log_of(
        event("free", "pinned", 200, address=64, nbytes=1),
        event("allocate", "pinned", 100, address=64, nbytes=1),
    )
    assert pair(log).end.tolist() == [1]


def transfers(begin: Any, end: Any) -> Any:
    """Return rows of transfers that begin and end at these times."""
    rows = np.zeros(len(begin), EVENT)
    rows["time_ns"], rows["value"] = begin, end - begin
    return rows


def test_lanes_do_not_overlap_and_are_as_few_as_can_be() -> None:
    random = np.random.default_rng(1)
    begin = np.sort(random.integers(0, 10_000, 500))
    end, group = begin + random.integers(1, 300, 500), random.integers(0, 3, 500)
    found = lanes(transfers(begin, end), group)
    for name in range(3):
        at = np.flatnonzero(group == name)
        most = max(int(((begin[at] <= t) & (end[at] > t)).sum()) for t in begin[at])
        assert set(found[at].tolist()) == set(range(most))
        for lane in range(most):
            mine = at[found[at] == lane]
            assert (end[mine][:-1] <= begin[mine][1:]).all()


def test_lanes_take_what_begins_where_another_ends() -> None:
    begin, end = np.array([0, 10, 10, 19]), np.array([10, 20, 20, 30])
    assert lanes(transfers(begin, end)).tolist() == [0, 0, 1, 2]


def test_directions_name_both_sides() -> None:
    rows = np.concatenate(
        [
            event("transfer", target, 0, source_kind=KINDS.index(source))
            for source, target in (
                ("pinned", "device"),
                ("device", "pageable"),
                ("device", "device"),
                ("device", "managed"),
                ("managed", "pinned"),
                ("mapped", "staging"),
            )
        ]
    )
    assert [DIRECTIONS[i] for i in directions(rows)] == list(DIRECTIONS)


def test_own_line_is_the_innermost_outside_of_the_package() -> None:
    inner = Frame(json_lines.__file__, 3, "write")
    outer = Frame("mine.py", 4, "main")
    stacks = [(), (inner, outer), (inner,)]
    log = by_hand()._replace(stacks=stacks)
    assert [log.user_frame(i) for i in range(3)] == [None, outer, inner]
    elsewhere = log._replace(machine={"inner": ["mine", "/far/cumem/"]})
    assert elsewhere.user_frame(1) == inner, (
        "the folder of the package that the record names was not used"
    )


def test_lines_are_the_users_wherever_a_record_is_read(runtime, tmp_path: Path) -> None:
    """The record is read by a copy of the package in another folder, as on another
    machine.

    The copy must still tell the user's lines from the package's own.
    """
    with cumem.record() as rec:
        cumem.empty_pinned(1000, "u1")
    rec.save(tmp_path / "it.npz")
    rec.to_json_lines(tmp_path / "it.jsonl")
    (name,) = (group.name for group in rec.top().groups)
    assert __name__ in name
    there = tmp_path / "there"
    shutil.copytree(Path(cumem.__file__).parent, there / "cumem")
    code = (
        "import cumem; from cumem.recording import json_lines, summary\n"
        "for log in cumem.Record.load('it.npz').log, json_lines.read('it.jsonl'):\n"
        "    print(cumem.__file__, *(g.name for g in summary.find_top(log, 'line').groups))"
    )
    path = os.pathsep.join([str(there), *filter(None, sys.path)])
    done = programs.run(
        "-c", f"import os; os.chdir({str(tmp_path)!r})\n{code}", PYTHONPATH=path
    )
    full = f"{__file__}:{name.partition(':')[2]}"
    assert done.stdout.splitlines() == [f"{there / 'cumem/__init__.py'} {full}"] * 2, (
        done
    )


def test_machine_is_named_and_emulated_said() -> None:
    log = by_hand()
    assert machine_text(log) == "cumem emulated device"
    real = {"backend": "cuda", "devices": ["NVIDIA H200"] * 2}
    assert machine_text(log._replace(machine=real)) == "2 x NVIDIA H200"
    assert machine_text(log._replace(machine={"backend": "cuda"})) == "no device"
    silent = {"backend": "emulated", "devices": ["Fake"]}
    assert machine_text(log._replace(machine=silent)) == "Fake (emulated)"


# -- files -----------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__[16:])
def test_write_takes_a_name_a_path_or_a_file(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.out"
    module.write(by_hand(), path)
    module.write(by_hand(), str(tmp_path / "b.out"))
    file = io.BytesIO()
    module.write(by_hand(), file)
    assert (
        path.read_bytes() == (tmp_path / "b.out").read_bytes() == file.getvalue() != b""
    )
    with pytest.raises(TypeError, match=r"path must be a str, a Path or .*, not int"):
        module.write(by_hand(), 3)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__[16:])
def test_write_of_nothing_and_of_a_record_without_stacks(
    module: Any, tmp_path: Path
) -> None:
    module.write(log_of(), tmp_path / "empty")
    bare = by_hand()
    bare.events["stack"] = 0
    module.write(bare, tmp_path / "bare")
    assert (tmp_path / "bare").stat().st_size > (tmp_path / "empty").stat().st_size > 0


def test_trace_whose_name_says_so_is_compressed(tmp_path: Path) -> None:
    perfetto.write(by_hand(), tmp_path / "a.json")
    perfetto.write(by_hand(), tmp_path / "a.json.gz")
    packed = (tmp_path / "a.json.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "a.json").read_bytes()


def test_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("before")
    broken = by_hand()
    broken.events["tag"] = 99
    with pytest.raises(IndexError):
        json_lines.write(broken, path)
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]


# -- JSON lines ------------------------------------------------------------------------


def spelled(log: Log) -> dict[str, Any]:
    """Return a record as plain data, with each stack in place of its number."""
    fields = log._asdict() | {"stacks": None}
    for name in ("events", "living"):
        rows = fields[name].copy()
        fields[f"{name} stacks"] = [log.stacks[number] for number in rows["stack"]]
        rows["stack"] = 0
        fields[name] = rows.tolist()
    return fields


@pytest.mark.parametrize("which", ["hand", "random"])
def test_json_lines_are_read_back_as_they_were(which, log, tmp_path: Path) -> None:
    wanted = by_hand() if which == "hand" else log
    json_lines.write(wanted, tmp_path / "a.jsonl")
    read = json_lines.read(tmp_path / "a.jsonl")
    assert read.events.dtype == wanted.events.dtype
    assert spelled(read) == spelled(wanted)


def test_json_lines_name_what_they_hold() -> None:
    entries = [json.loads(line) for line in json_lines.lines(by_hand())]
    assert entries[0]["machine"] == {
        "backend": "emulated",
        "devices": ["cumem emulated device"],
    }
    assert entries[1] == {
        "stack": 1,
        "frames": [["train.py", 12, "step"], ["train.py", 40, "main"]],
    }
    ops = [entry["op"] for entry in entries[3:]]
    assert ops == ["living", *(OPS[row["op"]] for row in by_hand().events)]
    assert entries[6] == {
        "op": "allocate",
        "time_ns": 30_000,
        "kind": "pinned",
        "thread": 2,
        "address": 0x7E00_0000_0000,
        "nbytes": 3 * MIB,
        "value": 5 * MIB // 2,
        "stack": 2,
        "tag": "loader",
    }
    assert entries[7]["source_kind"] == "pinned"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "line 1: "),
        (lambda lines: ["{}"], "line 1: not the header of a record"),
        (lambda lines: [lines[0].replace('"version": 1', '"version": 9')], "version 9"),
        (lambda lines: lines[:-1], "cut short: 1 of 1 living and 8 of 9 events"),
        (lambda lines: [*lines[:5], lines[5][:-9], *lines[6:]], "line 6: "),
        (lambda lines: [*lines[:1], *lines[2:]], "line 2: stack 2 is out of order"),
        (
            lambda lines: [*lines[:-1], lines[-1].replace("trim", "burn")],
            "line 13: .*burn",
        ),
        (lambda lines: [*lines[:-1], lines[-1].replace("device", "moon")], "'moon'"),
        (lambda lines: lines[:1] + lines[3:], "line 3: there is no stack 1"),
    ],
)
def test_json_lines_that_are_damaged_are_refused(change, message, tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(change([*json_lines.lines(by_hand())])))
    with pytest.raises(
        ValueError, match=f"^a.jsonl, line .*{message}|^a.jsonl, {message}"
    ):
        json_lines.read(path)


# -- Chrome traces ---------------------------------------------------------------------


def chrome(log: Log) -> list[dict[str, Any]]:
    """Return the events of the trace that cumem writes for Perfetto."""
    file = io.BytesIO()
    perfetto.write(log, file)
    return list(json.loads(file.getvalue())["traceEvents"])


def test_trace_counts_what_lives_by_kind() -> None:
    entries = [e for e in chrome(by_hand()) if e["ph"] == "C"]
    found = [(e["name"], e["ts"], e["args"]["bytes"] // MIB) for e in entries]
    assert found == [
        ("pinned live", 30, 3),
        ("device live", 0, 1),
        ("device live", 20, 3),
        ("device live", 50, 1),
        ("device live", 60, 0),
    ]


def test_trace_counters_end_with_what_lives_at_the_end(log: Log) -> None:
    wanted: Counter[str] = Counter()
    for (kind, _), row in followed(log)[0].items():
        wanted[f"{KINDS[kind]} live"] += int(row["nbytes"])
    last = {e["name"]: e["args"]["bytes"] for e in chrome(log) if e["ph"] == "C"}
    assert {name: nbytes for name, nbytes in last.items() if nbytes} == dict(wanted)


def test_trace_puts_overlapping_transfers_on_lanes_of_their_own() -> None:
    entries = chrome(by_hand())
    first, second = (e for e in entries if e["ph"] == "X")
    assert (first["ts"], first["dur"], second["ts"]) == (40, 4, 42)
    rows = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in entries
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert rows[first["pid"], first["tid"]] == "host to device, reader (2)"
    assert rows[second["pid"], second["tid"]] == "host to device, reader (2) #2"
    assert first["args"]["rate"] == "524 GB/s"
    assert first["args"]["tag"] == "loader/decode"
    assert first["args"]["stack"].splitlines() == [
        "loader.py:7 read",
        "train.py:41 main",
    ]


def test_trace_has_no_two_transfers_at_once_on_a_row(log: Log) -> None:
    ends: dict[int, float] = defaultdict(float)
    found = [e for e in chrome(log) if e["ph"] == "X"]
    assert len(found) == int((log.events["op"] == OPS.index("transfer")).sum())
    for entry in sorted(found, key=lambda e: e["ts"]):
        assert ends[entry["tid"]] <= entry["ts"] + 1e-6
        ends[entry["tid"]] = entry["ts"] + entry["dur"]


def test_trace_shows_growth_trims_and_memory_that_ran_out() -> None:
    entries = chrome(by_hand())
    found = {e["cat"]: e for e in entries if e["ph"] == "i"}
    assert {name: (e["ts"], e["name"]) for name, e in found.items()} == {
        "grow": (10, "grow 8 MiB"),
        "out_of_memory": (70, "out of memory 1 GiB"),
        "trim": (80, "trim 8 MiB"),
    }
    assert found["grow"]["args"]["stack"].startswith("train.py:12 step")
    assert found["out_of_memory"]["args"]["reserved"] == 8 * MIB
    names = {e["args"].get("name") for e in entries if e["ph"] == "M"}
    assert "MainThread (1)" in names
    assert "cumem: memory on cumem emulated device" in names


# -- pprof -----------------------------------------------------------------------------


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number of variable length, and return it and the place after it."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message in protobuf's format."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
            assert len(value) == at - (at - len(value))
        else:
            assert key & 7 == 0
        yield key >> 3, value


def message(data: bytes) -> dict[int, list[Any]]:
    """Return the values of a message by the numbers of their fields."""
    found: dict[int, list[Any]] = defaultdict(list)
    for field, value in fields(data):
        found[field].append(value)
    return found


def packed(data: bytes) -> list[int]:
    """Return the numbers of a repeated field, which protobuf packs into one string of
    bytes.
    """
    values, at = [], 0
    while at < len(data):
        value, at = varint(data, at)
        values.append(value)
    return values


def decoded(log: Log) -> dict[str, Any]:
    """Return a profile as plain data. Its fields have the numbers of profile.proto."""
    file = io.BytesIO()
    pprof.write(log, file)
    profile = message(gzip.decompress(file.getvalue()))
    texts = [text.decode() for text in profile[6]]
    assert texts[0] == ""
    functions = {
        f[1][0]: (texts[f[2][0]], texts[f[4][0]]) for f in map(message, profile[5])
    }
    places = {}
    for location in map(message, profile[4]):
        line = message(location[4][0])
        places[location[1][0]] = (*functions[line[1][0]], line[2][0])
    samples = []
    for sample in map(message, profile[2]):
        labels = {texts[m[1][0]]: texts[m[2][0]] for m in map(message, sample[3])}
        stack = [places[number] for number in packed(sample[1][0])]
        samples.append((stack, labels, packed(sample[2][0])))
    types = [tuple(texts[m[i][0]] for i in (1, 2)) for m in map(message, profile[1])]
    about = {
        "time": profile[9][0],
        "took": profile[10][0],
        "default": texts[profile[14][0]],
    }
    about["comments"] = [texts[n] for n in packed(profile[13][0])]
    return {"types": types, "samples": samples, **about}


def test_profile_worked_out_by_hand() -> None:
    profile = decoded(by_hand())
    assert profile["types"] == list(pprof.SAMPLE_TYPES)
    assert profile["default"] == "inuse_space"
    assert profile["comments"] == ["cumem on cumem emulated device"]
    assert (profile["time"], profile["took"]) == (1_700_000_000 * 10**9, 81_000)
    step = [("step", "train.py", 12), ("main", "train.py", 40)]
    read = [("read", "loader.py", 7), ("main", "train.py", 41)]
    assert profile["samples"] == [
        (step, {"kind": "device"}, [1, 2 * MIB, 0, 0]),
        (read, {"kind": "pinned", "tag": "loader"}, [1, 3 * MIB, 1, 3 * MIB]),
    ]


def test_profile_says_where_no_stack_was_noted() -> None:
    log = log_of(event("allocate", "mapped", 1, address=64, nbytes=8))
    [(stack, labels, values)] = decoded(log)["samples"]
    assert stack == [("(no stack was noted)", "", 0)]
    assert (labels, values) == ({"kind": "mapped"}, [1, 8, 1, 8])


def test_profile_sums_are_those_of_the_record(log: Log) -> None:
    values = np.array([values for _, _, values in decoded(log)["samples"]])
    alive, _ = followed(log)
    allocated = log.events[log.events["op"] == 0]
    assert values.sum(axis=0).tolist() == [
        *(len(allocated), int(allocated["nbytes"].sum())),
        *(len(alive), sum(int(row["nbytes"]) for row in alive.values())),
    ]


# -- PyTorch's snapshots ---------------------------------------------------------------


def actions(trace: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(e["action"], e["size"]) for e in trace]


def test_snapshot_worked_out_by_hand() -> None:
    found = torch_snapshot.snapshot(by_hand())
    device, pinned = found["device_traces"]
    assert found["cumem_devices"] == ["cumem emulated device", "pinned memory"]
    assert actions(device) == [
        ("segment_alloc", 8 * MIB),
        ("alloc", 2 * MIB),
        ("free_requested", 2 * MIB),
        ("free_completed", 2 * MIB),
        ("free_requested", MIB),
        ("free_completed", MIB),
        ("oom", 1 << 30),
        ("segment_free", 8 * MIB),
    ]
    assert actions(pinned) == [("alloc", 5 * MIB // 2)]
    assert device[1]["stream"] == 5
    assert device[1]["time_us"] == 1_700_000_000 * 10**6 + 20
    first, *_, last = pinned[0]["frames"]
    assert first == {"filename": "loader.py", "line": 7, "name": "read"}
    assert last["name"] == "tag loader"
    assert last["filename"] == "cumem, pinned memory, cumem emulated device"
    sizes = [
        (s["device"], s["total_size"], s["active_size"]) for s in found["segments"]
    ]
    assert sizes == [(0, MIB, 0), (1, 3 * MIB, 3 * MIB)]
    [block] = found["segments"][1]["blocks"]
    assert (block["size"], block["requested_size"]) == (3 * MIB, 5 * MIB // 2)


def check_viewer_can_walk(found: dict[str, Any]) -> None:
    """Walk a trace back from its end, as PyTorch's viewer does.

    The viewer fails if a block lies in no segment, or if an event is about memory that
    does not exist.
    """
    for device, trace in enumerate(found["device_traces"]):
        mine = [s for s in found["segments"] if s["device"] == device]
        for segment in mine:
            assert sum(b["size"] for b in segment["blocks"]) == segment["total_size"]
        reserved = {(s["address"], s["address"] + s["total_size"]) for s in mine}
        blocks = {
            b["address"]: b["size"]
            for s in mine
            for b in s["blocks"]
            if b["state"] == "active_allocated"
        }
        for entry in reversed(trace):
            begin = entry.get("addr", 0)
            end = begin + entry["size"]
            action = entry["action"]
            if action == "alloc":
                del blocks[begin]
            elif action == "free_completed":
                assert begin not in blocks
                blocks[begin] = entry["size"]
            elif action == "segment_alloc":
                reserved.remove((begin, end))
            elif action == "segment_free":
                reserved.add((begin, end))
            elif action == "segment_map":
                (whole,) = [s for s in reserved if s[0] <= begin and end <= s[1]]
                reserved.remove(whole)
                reserved |= {
                    s for s in ((whole[0], begin), (end, whole[1])) if s[0] < s[1]
                }
            elif action == "segment_unmap":
                left = [s for s in reserved if s[1] == begin]
                right = [s for s in reserved if s[0] == end]
                reserved -= {*left, *right}
                reserved.add(
                    (left[0][0] if left else begin, right[0][1] if right else end)
                )
            if action.startswith("segment") or begin in blocks:
                for at in blocks if action.startswith("segment") else [begin]:
                    assert any(a <= at < b for a, b in reserved), entry


def test_snapshot_can_be_walked_back(log: Log) -> None:
    found = torch_snapshot.snapshot(log)
    assert len(found["device_traces"]) == 7
    check_viewer_can_walk(found)
    check_viewer_can_walk(torch_snapshot.snapshot(by_hand()))


def test_snapshot_of_a_pool_that_grows_and_shrinks_by_pages() -> None:
    at = 64 * MIB
    pages = [
        {"address": at + i * 2 * MIB, "nbytes": 2 * MIB, "pool": 1} for i in range(4)
    ]
    block = {"address": at + MIB, "nbytes": 4 * MIB, "value": 4 * MIB}
    found = torch_snapshot.snapshot(
        log_of(
            *(event("grow", "device", 10 + i, **page) for i, page in enumerate(pages)),
            event("allocate", "device", 20, **block),
            event("free", "device", 30, **block),
            event("trim", "device", 40, **pages[1]),
            event("grow", "device", 50, **pages[1]),
            event("trim", "device", 60, **pages[3]),
            living=[event("allocate", "device", 0, address=at - MIB, nbytes=MIB)],
        )
    )
    assert {e["action"] for e in found["device_traces"][0][:4]} == {"segment_map"}
    [segment] = found["segments"]
    assert segment["is_expandable"]
    assert (segment["address"], segment["total_size"]) == (at - MIB, 7 * MIB)
    assert [b["state"] for b in segment["blocks"]] == ["active_allocated", "inactive"]
    check_viewer_can_walk(found)


def test_snapshot_of_memory_given_back_unseen() -> None:
    """The event of a trim names no address, so it does not tell which memory is given back.

    Memory that grows in the same place later must not count twice.
    """
    piece = {"address": 64 * MIB, "nbytes": 8 * MIB, "pool": 1}
    found = torch_snapshot.snapshot(
        log_of(
            event("grow", "device", 10, **piece),
            event("trim", "device", 20, nbytes=8 * MIB, pool=1),
            event("grow", "device", 30, **piece | {"nbytes": 16 * MIB}),
        )
    )
    assert actions(found["device_traces"][0]) == [
        ("segment_alloc", 8 * MIB),
        ("segment_alloc", 8 * MIB),
    ]
    check_viewer_can_walk(found)


def test_snapshot_of_blocks_where_no_growth_was_seen() -> None:
    """The pool reserved these blocks before the record began, and gives them back while it
    runs.
    """
    at = 64 * MIB
    blocks = [{"address": at + i * 3 * MIB, "nbytes": 2 * MIB} for i in range(3)]
    far = {"address": at + 512 * MIB, "nbytes": MIB}
    found = torch_snapshot.snapshot(
        log_of(
            event("allocate", "device", 10, **blocks[1]),
            event("grow", "device", 20, address=at + 8 * MIB, nbytes=4 * MIB),
            # This block begins in memory that was free before, and ends in memory that
            # grew.
            event("allocate", "device", 21, address=at + 7 * MIB, nbytes=3 * MIB),
            event("free", "device", 30, **blocks[0]),
            event("trim", "device", 40, address=at, nbytes=2 * MIB),
            event("allocate", "device", 50, **far),
            living=[event("allocate", "device", 0, **blocks[0])],
        )
    )
    [trace] = found["device_traces"]
    assert [each for each in actions(trace) if "segment" in each[0]] == [
        ("segment_map", 4 * MIB),
        ("segment_unmap", 2 * MIB),
    ]
    sizes = [(s["address"] - at, s["total_size"]) for s in found["segments"]]
    assert sizes == [(2 * MIB, 10 * MIB), (512 * MIB, MIB)]
    check_viewer_can_walk(found)


def test_snapshot_of_a_block_that_is_partly_in_what_grew() -> None:
    grown = {"address": 8 * MIB, "nbytes": 4 * MIB}
    found = torch_snapshot.snapshot(
        log_of(
            event("grow", "device", 20, **grown),
            event("allocate", "device", 21, address=7 * MIB, nbytes=3 * MIB),
        )
    )
    [segment] = found["segments"]
    assert (segment["address"], segment["total_size"]) == (7 * MIB, 5 * MIB)
    assert [b["size"] for b in segment["blocks"]] == [3 * MIB, 2 * MIB]
    check_viewer_can_walk(found)


def test_snapshot_of_a_block_whose_free_was_lost(tmp_path: Path) -> None:
    """As the free was lost, the block must end just before its address is handed
    out again.
    """
    log = log_of(
        event("allocate", "pinned", 10, address=64, nbytes=8),
        event("allocate", "pinned", 20, address=64, nbytes=4),
    )
    found = torch_snapshot.snapshot(log)
    assert actions(found["device_traces"][1]) == [
        ("alloc", 8),
        ("free_requested", 8),
        ("free_completed", 8),
        ("alloc", 4),
    ]
    torch_snapshot.write(log, tmp_path / "a.pickle")
    assert load_trace(tmp_path / "a.pickle").peak_live == 8


@pytest.mark.parametrize("paged", [False, True])
def test_reserved_intervals_agree_with_a_set(paged: bool) -> None:
    random = np.random.default_rng(4)
    held = torch_snapshot._Reserved(paged)
    wanted: set[int] = set()
    for _ in range(600):
        begin = int(random.integers(0, 90))
        mine = set(range(begin, begin + int(random.integers(1, 12))))
        adds = random.random() < 0.5
        change = held.add if adds else held.remove
        parts = change(begin, begin + len(mine))
        reported = {each for a, b in parts for each in range(a, b)}
        assert reported == (mine - wanted if adds else mine & wanted)
        wanted = wanted | mine if adds else wanted - mine
        pairs = list(zip(held.starts, held.ends, strict=True))
        assert {each for a, b in pairs for each in range(a, b)} == wanted
        gaps = [b[0] - a[1] for a, b in itertools.pairwise(pairs)]
        assert all(gap >= paged for gap in gaps)


#: The viewer has an unpickler of its own. These are the opcodes that it knows and that
#: Python writes.
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"),
}


def test_snapshot_is_a_pickle_that_the_viewer_reads(log: Log, tmp_path: Path) -> None:
    torch_snapshot.write(log, tmp_path / "a.pickle")
    data = (tmp_path / "a.pickle").read_bytes()
    assert data[:2] == b"\x80\x04"
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= OPCODES
    assert pickle.loads(data) == torch_snapshot.snapshot(log)


@pytest.mark.parametrize("kind", ["device", "pinned", "staging"])
def test_snapshot_is_a_trace_that_replay_takes(
    kind: str, log: Log, tmp_path: Path
) -> None:
    path = tmp_path / "a.pickle"
    torch_snapshot.write(log, path)
    names = pickle.loads(path.read_bytes())["cumem_devices"]
    place = 0 if kind == "device" else names.index(f"{kind} memory")
    trace = load_trace(path, place)
    rows = log.events[log.events["kind"] == KINDS.index(kind)]
    if kind == "device":
        rows = rows[rows["device"] == 0]
    assert trace.allocations == int((rows["op"] == 0).sum())
    assert trace.events == int((rows["op"] == 0).sum() + _frees_inside(rows))


def _frees_inside(rows: Any) -> int:
    seen: set[int] = set()
    count = 0
    for row in rows[rows["op"] < 2]:
        if row["op"] == 0:
            # A second allocation of an address stands for a lost free.
            count += int(row["address"]) in seen
            seen.add(int(row["address"]))
        elif int(row["address"]) in seen:
            seen.remove(int(row["address"]))
            count += 1
    return count


@pytest.mark.parametrize("command", ["stats", "trace", "trace_plot", "segment_plot"])
def test_snapshot_is_read_by_pytorch(command: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    torch_snapshot.write(by_hand(), tmp_path / "a.pickle")
    plot = ["-o", str(tmp_path / "a.html")] if command.endswith("plot") else []
    done = subprocess.run(
        [sys.executable, "-m", "torch.cuda._memory_viz", command, "a.pickle", *plot],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if command == "stats":
        assert re.search(r"segments: 2\ntotal_reserved: 4.0MiB", done.stdout)
        assert "total_allocated: 2.5MiB" in done.stdout
    elif command == "trace":
        assert "cudaMalloc" in done.stdout
        assert "raise OutOfMemoryError # 1.0GiB requested" in done.stdout
    else:
        assert "snapshot.pickle" in (tmp_path / "a.html").read_text()
