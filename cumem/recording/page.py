# SPDX-License-Identifier: Apache-2.0
"""Writes a record as one HTML page, which needs no network and no other file.

The template is ``page.html`` beside this file. The data are columns, each in the smallest
type that can hold it, compressed together. The page unpacks them into typed arrays and
computes everything else: which allocations are alive at which time, the pyramid from which
it draws, and the rates of transfers.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from cumem.base.colours import KIND_COLOURS
from cumem.files.replacing import open_export
from cumem.recording.events import KINDS, OPS, TRANSFER, Log
from cumem.recording.pairing import (
    DIRECTIONS,
    Lives,
    changes,
    directions,
    lanes,
    machine_text,
    pair,
    sites,
    thread_name,
)

__all__ = ["data", "render", "write"]

MOST_LANES: Final = 32  # per direction; if more are needed, transfers share the last
_TYPES: Final = ("u1", "i1", "u2", "i2", "u4", "i4")
_LEVEL: Final = 1  # six times as fast as level 6, with 3 % more bytes

_Ints = NDArray[np.int64]
_Columns = dict[str, NDArray[Any]]


def write(log: Log, path: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write a record as an HTML page.

    Parameters
    ----------
    log : Log
    path : str, Path or binary file
        The file to write, usually called ``NAME.html``; an existing one is replaced once
        the new one is complete.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    text = render(log)
    with open_export(path) as file:
        file.write(text.encode())


def render(log: Log) -> str:
    """Make the page.

    Parameters
    ----------
    log : Log

    Returns
    -------
    str
        A whole HTML document.
    """
    header, columns = data(log)
    packed = bytearray()
    directory = []
    for name, column in columns.items():
        small = _smallest(column)
        directory.append([name, small.dtype.str[1:], len(small)])
        # Each column begins at a multiple of 8 bytes.
        packed += small.tobytes() + bytes(-small.nbytes % 8)
    header["columns"] = directory
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    said = json.dumps(header).replace("<", "\\u003c")  # no "</script>" can end the data
    body = base64.b64encode(zlib.compress(packed, _LEVEL)).decode()
    before, between, after = text.replace("__DATA__", "__HEADER__").split("__HEADER__")
    return f"{before}{said}{between}{body}{after}"


def data(log: Log) -> tuple[dict[str, Any], _Columns]:
    """Return the data that the page shows, as plain data and as columns.

    Parameters
    ----------
    log : Log

    Returns
    -------
    header : dict
        Names, stacks and the machine, in a form that ``json.dumps`` takes.
    columns : dict of str to ndarray
        Columns of lives (``life_…``), of changes (a life's beginning or end), of transfers,
        of other events (``moment_…``), and of sites, which are the combinations of stack,
        tag and kind that allocations have. Times are differences from the previous row, in
        ns.
    """
    lives = pair(log)
    rows = lives.rows
    stack_at = _Table(np.unique(rows["stack"]))
    thread_at = _Table(np.unique(rows["thread"]))
    stream_at = _Table(np.unique(rows["stream"]))
    columns = _of_lives(lives, stack_at, thread_at, stream_at)
    for name, found in (
        ("transfer", rows[rows["op"] == TRANSFER]),
        ("moment", rows[(rows["op"] > 1) & (rows["op"] != TRANSFER)]),
    ):
        columns[f"{name}_time"] = _differences(found["time_ns"])
        for field in ("nbytes", "value", "kind", "source_kind", "tag", "device"):
            columns[f"{name}_{field}"] = found[field]
        columns[f"{name}_stack"] = stack_at[found["stack"]]
        columns[f"{name}_thread"] = thread_at[found["thread"]]
        columns[f"{name}_stream"] = stream_at[found["stream"]]
        if name == "moment":
            columns["moment_op"], columns["moment_pool"] = found["op"], found["pool"]
            continue
        way = directions(found).astype(np.int64)
        columns["transfer_direction"] = way
        columns["transfer_lane"] = np.minimum(lanes(found, way), MOST_LANES - 1)
    header = {
        "machine": machine_text(log),
        "emulated": log.machine.get("backend") == "emulated",
        "begin_s": log.begin_s,
        "duration_ns": max(log.duration_ns, int(_last_ns(rows))),
        "event_count": len(log.events),
        "lost_count": log.lost_count,
        "unknown_count": lives.unknown_count,
        "kinds": KINDS,
        "colours": [KIND_COLOURS[kind] for kind in KINDS],
        "ops": [op.replace("_", " ") for op in OPS],
        "directions": DIRECTIONS,
        "most_lanes": MOST_LANES,
        "tags": log.tags,
        "threads": [thread_name(log, number) for number in thread_at.known.tolist()],
        "streams": [hex(number) for number in stream_at.known.tolist()],
    }
    return header | _stacks(log, stack_at.known.tolist()), columns


def _of_lives(
    lives: Lives, stacks: _Table, threads: _Table, streams: _Table
) -> _Columns:
    rows = lives.rows
    begun = lives.begun
    found = sites(lives)
    change = changes(lives)
    ended = np.minimum(lives.end, len(rows) - 1)
    is_free = (lives.end < len(rows)) & (rows["op"][ended] == 1)
    last = rows[ended[is_free]]
    free_stack, free_thread = np.zeros((2, len(begun)), np.int64)
    free_stack[is_free] = stacks[last["stack"]]
    free_thread[is_free] = threads[last["thread"]] + 1  # 0 if no free was recorded
    return {
        "site_stack": stacks[found.stack],
        "site_tag": found.tag,
        "site_kind": found.kind,
        "life_site": found.of,
        "life_nbytes": begun["nbytes"],
        "life_asked": begun["value"],
        "life_address": begun["address"],
        "life_thread": threads[begun["thread"]],
        "life_stream": streams[begun["stream"]],
        "life_pool": begun["pool"],
        "life_device": begun["device"],
        "life_free_stack": free_stack,
        "life_free_thread": free_thread,
        "change_time": _differences(change.time_ns),
        "change_of": change.life * 2 + ~change.opens,  # odd for the end of a life
    }


class _Table:
    """Sorted distinct values; indexing by an array returns the places of its values."""

    def __init__(self, known: NDArray[Any]) -> None:
        self.known = known

    def __getitem__(self, values: NDArray[Any]) -> _Ints:
        return np.searchsorted(self.known, values).astype(np.int64)


def _differences(times: NDArray[Any]) -> _Ints:
    result = times.astype(np.int64)
    result[1:] -= result[:-1].copy()
    return result


def _last_ns(rows: NDArray[Any]) -> int:
    took = np.where(rows["op"] == TRANSFER, rows["value"], 0)
    return int((rows["time_ns"] + took).max(initial=0))


def _smallest(column: NDArray[Any]) -> NDArray[Any]:
    """Return the column in the smallest type that can hold it.

    A column that does not fit in any of the integer types becomes float64, which is exact
    up to 2**53.
    """
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    for name in _TYPES:
        if np.iinfo(name).min <= low and high <= np.iinfo(name).max:
            return column.astype("<" + name)
    return column.astype("<f8")


def _stacks(log: Log, used: list[int]) -> dict[str, Any]:
    """Return the stacks with these numbers, with each frame and text listed only once."""
    texts: dict[str, int] = {}
    frames: dict[tuple[int, int, int], int] = {}
    stacks, own = [], []

    def number(frame: Any) -> int:
        file = texts.setdefault(frame.filename, len(texts))
        function = texts.setdefault(frame.function, len(texts))
        return frames.setdefault((file, frame.lineno, function), len(frames))

    for index in used:
        stack = log.stacks[index]
        line = log.user_frame(index)
        stacks.append([number(frame) for frame in stack])
        own.append(-1 if line is None else number(line))
    return {"texts": [*texts], "frames": [*frames], "stacks": stacks, "own": own}
