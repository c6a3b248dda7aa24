# SPDX-License-Identifier: Apache-2.0
"""Writes a record as a memory snapshot of PyTorch, for its viewer and ``_memory_viz``.

The file is a pickle such as ``torch.cuda.memory._dump_snapshot()`` writes. Device memory is
listed under its device. Each kind of host memory is listed as one more "device" after the
last GPU. The outermost frame of every stack shows the kind and the tag, and the pickle's
`DEVICES` has the names of all devices. PyTorch's format has no place for transfers and
prefetches.

The format has segments, which an allocator got from the driver, and blocks inside them. A
record shows segments as growth of pools, and blocks as allocations, but pools may have
grown before the record began. So the events are read twice. First `_reserved_before` finds
the addresses at which blocks lie although the record shows no growth there, and which must
have been reserved earlier. Then `snapshot` starts from these addresses.
"""

from __future__ import annotations

import bisect
import os
import pickle
from collections.abc import Sequence
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from cumem.files.replacing import open_export
from cumem.recording.events import GAINS, KINDS, LOSSES, OUT_OF_MEMORY, Log
from cumem.recording.pairing import (
    Lives,
    changes,
    machine_text,
    pair,
    with_backend,
)

__all__ = ["snapshot", "write"]

#: The pickle's key for the names of the devices, which PyTorch itself does not use.
DEVICES: Final = "cumem_devices"
_PROTOCOL: Final = 4  # the newest that the viewer reads
_DEVICE: Final = KINDS.index("device")
_HOST_KINDS: Final = tuple(index for index in range(len(KINDS)) if index != _DEVICE)
_NEAR: Final = 2 << 20  # pieces with smaller gaps between them count as one segment
_SMALL: Final = 2 << 20  # PyTorch calls segments of up to this size small

_Entry = dict[str, Any]
_Ints = NDArray[np.int64]


def write(log: Log, path: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write a record as a memory snapshot of PyTorch.

    Parameters
    ----------
    log : Log
    path : str, Path or binary file
        The file to write, usually called ``NAME.pickle``; an existing one is replaced once
        the new one is complete.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    with open_export(path) as file:
        pickle.dump(snapshot(log), file, protocol=_PROTOCOL)


def snapshot(log: Log) -> dict[str, Any]:
    """Make the snapshot of plain containers, strings and numbers.

    Parameters
    ----------
    log : Log

    Returns
    -------
    dict
        The keys ``"segments"`` and ``"device_traces"``, and the others that PyTorch 2.13
        writes. The segments are the memory that pools reserved during the record and did
        not give back, and earlier memory that is inferred from the blocks in it. The sizes
        of entries are the requested ones.
    """
    lives = pair(log)
    rows = lives.rows
    names = _device_names(log, rows)
    place = _places(rows, len(names))
    steps = _steps(lives)
    reserved = _reserved_before(lives, steps, place, len(names))
    traces: list[list[_Entry]] = [[] for _ in names]
    frames = _Frames(log)
    fields = ("address", "nbytes", "value", "stream", "op", "time_ns")
    read = {name: rows[name].tolist() for name in fields}
    keys = list(zip(*(rows[name].tolist() for name in _Frames.key), strict=True))
    begins, places = lives.begin.tolist(), place.tolist()
    begin_us = int(log.begin_s * 1e6)
    for at, life in zip(*steps, strict=True):
        of = at if life is None else begins[life if life >= 0 else ~life]
        held, trace = reserved[places[of]], traces[places[of]]
        address, nbytes = read["address"][of], read["nbytes"][of]
        is_before = at < lives.before_count
        base = {
            "stream": 0,
            "time_us": begin_us + (0 if is_before else read["time_ns"][at] // 1000),
            "frames": frames.of(*keys[at]),
        }
        if life is None and read["op"][at] == OUT_OF_MEMORY:
            said = f"reserved then: {read['value'][at]} bytes"
            oom = {"action": "oom", "size": nbytes, "device_free": 0}
            trace.append(base | oom | {"user_metadata": said})
            continue
        if life is not None and life < 0:
            action, parts = "", []
        elif life is None and read["op"][at] in LOSSES:
            action = "segment_unmap" if held.paged else "segment_free"
            parts = held.remove(address, address + nbytes)
        else:  # growth, or a block where the record shows no growth
            action = "segment_map" if held.paged else "segment_alloc"
            parts = held.add(address, address + nbytes)
        for begin, end in parts:
            trace.append(base | {"action": action, "addr": begin, "size": end - begin})
        if life is None or is_before:
            continue
        base |= {"addr": address, "size": read["value"][of] or nbytes}
        base |= {
            "stream": read["stream"][of],
            "user_metadata": log.tags[keys[of][1]],
        }
        if life >= 0:
            trace.append(base | {"action": "alloc"})
        else:  # PyTorch frees in two steps, and cumem's pools in one
            trace.append(base | {"action": "free_requested"})
            trace.append(base | {"action": "free_completed"})
    return {
        "segments": [
            segment
            for device, held in enumerate(reserved)
            for segment in _segments(device, held, lives, place, frames)
        ],
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
        DEVICES: names,
    }


def _steps(lives: Lives) -> tuple[list[int], list[int | None]]:
    """Return the rows that change memory, sorted, and a number or None for each.

    The number is that of the allocation that begins in this row, or its bitwise complement
    (``~``) if it ends there. None means that a pool grows or shrinks. If one allocation
    ends and another begins in the same row, the end comes first, because it makes room.
    """
    row, life, opens, *_ = changes(lives)
    ops = lives.rows["op"]
    other = np.flatnonzero(np.isin(ops, (*GAINS, *LOSSES, OUT_OF_MEMORY)))
    order = np.argsort(np.concatenate([row, other]), kind="stable")
    of: list[int | None] = [
        *np.where(opens, life, ~life).tolist(),
        *[None] * len(other),
    ]
    steps = np.concatenate([row, other])[order]
    return steps.tolist(), [of[place] for place in order.tolist()]


def _reserved_before(
    lives: Lives, steps: tuple[list[int], list[int | None]], place: _Ints, count: int
) -> list[_Reserved]:
    """Return the intervals that were reserved on each device before the record.

    These are the places where blocks lie later although the record shows no growth there.
    """
    rows = lives.rows
    reserved = [_Reserved(_is_paged(rows, place == device)) for device in range(count)]
    unseen: list[list[tuple[int, int]]] = [[] for _ in reserved]
    begins = rows["address"].tolist()
    ends = (rows["address"] + rows["nbytes"]).tolist()
    ops, places = rows["op"].tolist(), place.tolist()
    for at, life in zip(*steps, strict=True):
        held, begin, end = reserved[places[at]], begins[at], ends[at]
        if life is None:
            if ops[at] in LOSSES:
                held.remove(begin, end)
            elif ops[at] in GAINS:
                held.add(begin, end)
        elif life >= 0:
            parts = held.add(begin, end)
            unseen[places[at]] += parts
            held.paged |= parts not in ([], [(begin, end)])  # only a part is new
    grown = [
        np.sort(rows["address"][np.isin(rows["op"], GAINS) & (place == d)])
        for d in range(count)
    ]
    return [
        _Reserved(held.paged, _joined(parts, starts.tolist()))
        for held, parts, starts in zip(reserved, unseen, grown, strict=True)
    ]


def _joined(parts: list[tuple[int, int]], grown: list[int]) -> list[tuple[int, int]]:
    """Join pieces that are near to each other, unless a pool grew between them."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(parts):
        last = joined[-1] if joined else (0, 0)
        between = bisect.bisect_left(grown, begin) - bisect.bisect_left(grown, last[1])
        if joined and begin - last[1] <= _NEAR and not between:
            joined[-1] = (last[0], max(last[1], end))
        else:
            joined.append((begin, end))
    return joined


def _device_names(log: Log, rows: NDArray[Any]) -> list[str]:
    """Return the names of GPUs, and then of the kinds of host memory in the record."""
    known = list(log.machine.get("devices") or [])
    used = rows["device"][rows["kind"] == _DEVICE]
    known += ["device"] * (int(used.max(initial=-1)) + 1 - len(known))
    names = [with_backend(log, name) for name in known]
    kinds = np.unique(rows["kind"])
    return names + [f"{KINDS[kind]} memory" for kind in _HOST_KINDS if kind in kinds]


def _places(rows: NDArray[Any], count: int) -> _Ints:
    """Return for each row the index of its device's trace."""
    kinds = [kind for kind in _HOST_KINDS if (rows["kind"] == kind).any()]
    place = np.maximum(rows["device"].astype(np.int64), 0)
    for index, kind in enumerate(kinds):
        place[rows["kind"] == kind] = count - len(kinds) + index
    return place


def _is_paged(rows: NDArray[Any], here: NDArray[np.bool_]) -> bool:
    """Return whether pools grow in adjacent pieces, like PyTorch's expandable segments."""
    grown = rows[here & np.isin(rows["op"], GAINS)]
    starts = set(grown["address"].tolist())
    ends = (grown["address"] + grown["nbytes"]).tolist()
    whole = set(zip(grown["address"].tolist(), grown["nbytes"].tolist(), strict=True))
    trimmed = rows[here & np.isin(rows["op"], LOSSES) & (rows["address"] != 0)]
    given = zip(trimmed["address"].tolist(), trimmed["nbytes"].tolist(), strict=True)
    return not starts.isdisjoint(ends) or not whole.issuperset(given)


class _Frames:
    """Makes stacks in PyTorch's form. Equal stacks are one object, for a small pickle."""

    key = ("stack", "tag", "kind")

    def __init__(self, log: Log) -> None:
        self.log = log
        self.made: dict[tuple[int, ...], list[_Entry]] = {}

    def of(self, *key: int) -> list[_Entry]:
        if key not in self.made:
            stack, tag, kind = key
            frames = [
                {"filename": f.filename, "line": f.lineno, "name": f.function}
                for f in self.log.stacks[stack]
            ]
            name = f"tag {self.log.tags[tag]}" if tag else "no tag"
            place = f"cumem, {KINDS[kind]} memory, {machine_text(self.log)}"
            frames.append({"filename": place, "line": 0, "name": name})
            self.made[key] = frames
        return self.made[key]


class _Reserved:
    """Reserved intervals of addresses, which do not overlap.

    If pools are `paged`, adjacent intervals are joined, like expandable segments.
    """

    def __init__(self, paged: bool, intervals: Sequence[tuple[int, int]] = ()) -> None:
        self.paged = paged
        self.starts: list[int] = []
        self.ends: list[int] = []
        for begin, end in intervals:
            self.add(begin, end)

    def add(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Reserve an interval, and return the parts of it that were not reserved yet."""
        parts = []
        at = max(0, bisect.bisect_right(self.starts, begin) - 1)
        while begin < end:
            start = self.starts[at] if at < len(self.starts) else end
            if begin < start:
                parts.append((begin, min(start, end)))
            if at < len(self.starts):
                begin = max(begin, self.ends[at] if start < end else end)
            else:
                begin = end
            at += 1
        for part in parts:
            self._insert(*part)
        return parts

    def _insert(self, begin: int, end: int) -> None:
        at = bisect.bisect_left(self.starts, begin)
        self.starts.insert(at, begin)
        self.ends.insert(at, end)
        for left in (at, at - 1) if self.paged else ():
            if (
                0 <= left < len(self.starts) - 1
                and self.ends[left] == self.starts[left + 1]
            ):
                del self.ends[left], self.starts[left + 1]

    def remove(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Give back an interval, and return the parts of it that were reserved."""
        parts = []
        at = max(0, bisect.bisect_right(self.starts, begin) - 1)
        while at < len(self.starts) and self.starts[at] < end:
            start, stop = self.starts[at], self.ends[at]
            low, high = max(start, begin), min(stop, end)
            rest = [(start, stop)]
            if low < high:
                parts.append((low, high))
                rest = [(a, b) for a, b in ((start, low), (high, stop)) if a < b]
            self.starts[at : at + 1] = [a for a, _ in rest]
            self.ends[at : at + 1] = [b for _, b in rest]
            at += len(rest)
        return parts


def _segments(
    device: int,
    held: _Reserved,
    lives: Lives,
    place: _Ints,
    frames: _Frames,
) -> list[_Entry]:
    left = lives.begin[lives.is_left]
    blocks = np.sort(lives.rows[left[place[left] == device]], order="address")
    segments = []
    for begin, end in zip(held.starts, held.ends, strict=True):
        first, last = np.searchsorted(blocks["address"], [begin, end])
        inside = blocks[first:last]
        segments.append(_segment(device, begin, end, inside, frames, held.paged))
    return segments


def _segment(
    device: int,
    begin: int,
    end: int,
    inside: NDArray[Any],
    frames: _Frames,
    paged: bool,
) -> _Entry:
    blocks: list[_Entry] = []
    at = begin
    for row in inside:
        address, nbytes = int(row["address"]), int(row["nbytes"])
        if address > at:
            blocks.append(_free_block(at, address))
        at = address + nbytes
        blocks.append(
            {
                "address": address,
                "size": nbytes,
                "requested_size": int(row["value"]) or nbytes,
                "state": "active_allocated",
                "frames": frames.of(*(int(row[name]) for name in frames.key)),
            }
        )
    if at < end:
        blocks.append(_free_block(at, end))
    active = int(inside["nbytes"].sum())
    return {
        "device": device,
        "address": begin,
        "total_size": end - begin,
        "allocated_size": active,
        "active_size": active,
        "requested_size": sum(
            b["requested_size"] for b in blocks if b["state"] == "active_allocated"
        ),
        "stream": 0,
        "segment_type": "small" if end - begin <= _SMALL else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": paged,
        "frames": [],
        "blocks": blocks,
    }


def _free_block(begin: int, end: int) -> _Entry:
    size = end - begin
    return {
        "address": begin,
        "size": size,
        "requested_size": size,
        "state": "inactive",
        "frames": [],
    }
