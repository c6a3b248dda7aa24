# SPDX-License-Identifier: Apache-2.0
"""Writes and reads records as JSON lines, first a header, then stacks, then events.

Allocations from before the record come before the events, with ``"op": "living"``. Names
are written out, and values that are zero or missing are left out, so that ``jq``, pandas,
DuckDB and Polars can read the file without preparation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from cumem.files.opening import open_regular
from cumem.files.replacing import open_export
from cumem.recording.events import EVENT, KINDS, OPS, Frame, Log, checked

__all__ = ["lines", "read", "write"]

FORMAT: Final = "cumem record"
VERSION: Final = 1
_NUMBERS: Final = ("address", "nbytes", "value", "source", "stream", "pool", "stack")


def write(log: Log, path: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write a record as JSON lines.

    Parameters
    ----------
    log : Log
    path : str, Path or binary file
        The file to write; an existing one is replaced once the new one is complete.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    with open_export(path) as file:
        for line in lines(log):
            file.write(line.encode() + b"\n")


def lines(log: Log) -> Iterator[str]:
    """Yield the lines without line ends."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "machine": log.machine,
        "begin_s": log.begin_s,
        "duration_ns": log.duration_ns,
        "event_count": len(log.events),
        "living_count": len(log.living),
        "lost_count": log.lost_count,
        "tags": list(log.tags),
        "threads": {str(number): name for number, name in log.threads.items()},
    }
    yield json.dumps(header)
    used = np.unique(np.concatenate([[0], log.living["stack"], log.events["stack"]]))
    for index, stack in enumerate(used[1:].tolist(), 1):
        frames = [list(frame) for frame in log.stacks[stack]]
        yield json.dumps({"stack": index, "frames": frames})
    tags = [json.dumps(tag) for tag in log.tags]
    yield from _rows(log.living, used, tags, ("living",) * len(OPS))
    yield from _rows(log.events, used, tags, OPS)


def _rows(
    rows: NDArray[Any], used: NDArray[Any], tags: list[str], ops: Sequence[str]
) -> Iterator[str]:
    names = ("op", "time_ns", "kind", "thread", "tag", "device", "source_kind")
    columns = [rows[name].tolist() for name in (*names, *_NUMBERS)]
    columns[-1] = np.searchsorted(used, rows["stack"]).tolist()
    for op, time, kind, thread, tag, device, source, *numbers in zip(
        *columns, strict=True
    ):
        text = (
            f'{{"op": "{ops[op]}", "time_ns": {time}, "kind": "{KINDS[kind]}", '
            f'"thread": {thread}'
        )
        for name, number in zip(_NUMBERS, numbers, strict=True):
            if number:
                text += f', "{name}": {number}'
        if device >= 0:
            text += f', "device": {device}'
        if source != kind:
            text += f', "source_kind": "{KINDS[source]}"'
        if tag:
            text += f', "tag": {tags[tag]}'
        yield text + "}"


def read(path: str | os.PathLike[str]) -> Log:
    """Read a file that `write` wrote.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    Log
        The log. Its stacks have new numbers.

    Raises
    ------
    ValueError
        If the file is not of this format, is cut short, or has a line that cannot be
        read. The message has the number of that line.
    OSError
        If the file cannot be read.
    """
    name = Path(path).name
    number = 1
    with open_regular(path) as file:
        try:
            parts = _Parts(_header(file.readline()))
            for line in file:
                number += 1
                parts.add(json.loads(line))
            return parts.log()
        except KeyError as error:
            raise ValueError(f"{name}, line {number}: no or unknown {error}") from None
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{name}, line {number}: {error}") from None


def _header(line: bytes) -> dict[str, Any]:
    header = json.loads(line)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f'not the header of a record, which has "format": "{FORMAT}"')
    if header["version"] != VERSION:
        raise ValueError(f"version {header['version']} is not known; {VERSION} is")
    return header


class _Parts:
    """Collects the lines of a file, and makes a log of them at the end."""

    _ops: Final = {op: index for index, op in enumerate(OPS)}
    _kinds: Final = {kind: index for index, kind in enumerate(KINDS)}

    def __init__(self, header: dict[str, Any]) -> None:
        self.header = header
        self.tags = {tag: index for index, tag in enumerate(header["tags"])}
        self.stacks: list[tuple[Frame, ...]] = [()]
        self.living: list[tuple[int, ...]] = []
        self.events: list[tuple[int, ...]] = []

    def add(self, entry: dict[str, Any]) -> None:
        if "frames" in entry:
            if entry["stack"] != len(self.stacks):
                raise ValueError(f"stack {entry['stack']} is out of order")
            frames = (Frame(*frame) for frame in entry["frames"])
            self.stacks.append(tuple(frames))
        elif entry["op"] == "living":
            self.living.append(self._row(entry, self._ops["allocate"]))
        else:
            self.events.append(self._row(entry, self._ops[entry["op"]]))

    def _row(self, entry: dict[str, Any], op: int) -> tuple[int, ...]:
        kind = self._kinds[entry["kind"]]
        stack = entry.get("stack", 0)
        if stack >= len(self.stacks):
            raise ValueError(f"there is no stack {stack}")
        numbers = {name: entry.get(name, 0) for name in _NUMBERS}
        fields = numbers | {
            "time_ns": entry["time_ns"],
            "thread": entry["thread"],
            "tag": self.tags[entry.get("tag", "")],
            "op": op,
            "kind": kind,
            "source_kind": self._kinds[entry.get("source_kind", entry["kind"])],
            "device": entry.get("device", -1),
        }
        return tuple(fields[name] for name in EVENT.names or ())

    def log(self) -> Log:
        header = self.header
        found = (len(self.living), len(self.events))
        wanted = (header["living_count"], header["event_count"])
        if found != wanted:
            raise ValueError(
                f"cut short: {found[0]} of {wanted[0]} living and {found[1]} of "
                f"{wanted[1]} events"
            )
        log = Log(
            np.array(self.events, EVENT),
            np.array(self.living, EVENT),
            dict(enumerate(self.stacks)),
            tuple(header["tags"]),
            {int(number): str(name) for number, name in header["threads"].items()},
            header["lost_count"],
            float(header["begin_s"]),
            header["duration_ns"],
            header["machine"],
        )
        return checked(log)
