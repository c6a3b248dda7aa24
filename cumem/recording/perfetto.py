# SPDX-License-Identifier: Apache-2.0
"""Writes a record as a Chrome trace, for Perfetto and ``chrome://tracing``.

The trace has three groups of rows. The first has counters of the bytes alive, by kind. The
second has the transfers, in a row for each thread and direction, and in more rows if they
overlap. The third has a row for each thread, with the events that take no time: growth,
trims, prefetches, and memory that ran out.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Iterator
from typing import IO, Any, Final

import numpy as np

from cumem.base.units import format_nbytes, format_rate
from cumem.files.replacing import open_export
from cumem.recording.events import KINDS, OPS, PREFETCH, TRANSFER, Log
from cumem.recording.pairing import (
    DIRECTIONS,
    Lives,
    changes,
    directions,
    lanes,
    machine_text,
    pair,
    thread_name,
)

__all__ = ["entries", "write"]

MEMORY, TRANSFERS, EVENTS = 1, 2, 3  # groups of rows, which the format calls processes
_GROUPS: Final = {MEMORY: "memory", TRANSFERS: "transfers", EVENTS: "events"}
_BATCH: Final = 4096


def write(log: Log, path: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write a record as a Chrome trace.

    Parameters
    ----------
    log : Log
    path : str, Path or binary file
        The file to write, usually called ``NAME.json``, or ``NAME.json.gz``, which is
        compressed. An existing one is replaced once the new one is complete.

    Raises
    ------
    OSError
        If the file cannot be written.

    Notes
    -----
    Times are in µs since the record began, with three decimals. Allocations appear only in
    the counters, without their stacks, which the HTML page and the profile of pprof have.
    """
    about = {
        "tool": "cumem",
        "machine": machine_text(log),
        "begin_s": log.begin_s,
        "lost_count": log.lost_count,
    }
    is_packed = isinstance(path, (str, os.PathLike)) and os.fspath(path).endswith(".gz")
    with (
        open_export(path) as plain,
        gzip.GzipFile("", "wb", fileobj=plain, mtime=0)
        if is_packed
        else contextlib.nullcontext(plain) as file,
    ):
        head = f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(about)}'
        file.write(f'{head},\n"traceEvents": [\n'.encode())
        batch: list[str] = []
        separator = ""
        for entry in entries(log):
            batch.append(entry)
            if len(batch) == _BATCH:
                file.write((separator + ",\n".join(batch)).encode())
                batch.clear()
                separator = ",\n"
        file.write((separator + ",\n".join(batch) if batch else "").encode())
        file.write(b"\n]}\n")


def entries(log: Log) -> Iterator[str]:
    """Yield the entries of ``traceEvents``, each as a JSON object."""
    lives = pair(log)
    for group, name in _GROUPS.items():
        yield _name("process_name", group, 0, f"cumem: {name} on {machine_text(log)}")
        yield _name("process_sort_index", group, 0, group)
    yield from _counters(lives)
    yield from _transfers(log, lives)
    yield from _instants(log, lives)


def _name(what: str, group: int, row: int, value: str | int) -> str:
    key = "name" if what.endswith("name") else "sort_index"
    entry = {"ph": "M", "name": what, "pid": group, "tid": row, "args": {key: value}}
    return json.dumps(entry)


def _counters(lives: Lives) -> Iterator[str]:
    """Yield the bytes alive of each kind after each time at which they change."""
    found = changes(lives)
    for kind, name in enumerate(KINDS):
        at = np.flatnonzero(found.kind == kind)
        live, when = found.nbytes[at].cumsum(), found.time_ns[at]
        last = np.append(np.diff(when) != 0, True)[: len(at)]
        start = f'{{"ph": "C", "pid": {MEMORY}, "name": "{name} live", "ts": '
        for ns, nbytes in zip(when[last].tolist(), live[last].tolist(), strict=True):
            yield f'{start}{ns / 1000:.3f}, "args": {{"bytes": {nbytes}}}}}'


def _transfers(log: Log, lives: Lives) -> Iterator[str]:
    found = lives.rows[lives.rows["op"] == TRANSFER]
    direction = directions(found)
    group = found["thread"].astype(np.int64) * len(DIRECTIONS) + direction
    keys = np.stack([group, lanes(found, group)], axis=1)
    known, lane = np.unique(keys, axis=0, return_inverse=True)
    for number, (key, place) in enumerate(known.tolist(), 1):
        thread, way = divmod(key, len(DIRECTIONS))
        more = f" #{place + 1}" if place else ""
        name = f"{DIRECTIONS[way]}, {thread_name(log, thread)}{more}"
        yield _name("thread_name", TRANSFERS, number, name)
        yield _name("thread_sort_index", TRANSFERS, number, number)
    contexts = _Contexts(log)
    times = (found["time_ns"].tolist(), found["value"].tolist())
    columns = (direction.tolist(), lane.ravel().tolist(), *times)
    for event, way, place, ns, ns_long in zip(found, *columns, strict=True):
        nbytes = int(event["nbytes"])
        args = {
            "bytes": nbytes,
            "size": format_nbytes(nbytes),
            "rate": format_rate(nbytes, ns_long / 1e9),
            "from": KINDS[event["source_kind"]],
            "to": KINDS[event["kind"]],
            "stream": hex(event["stream"]),
        }
        yield json.dumps(
            {
                "ph": "X",
                "pid": TRANSFERS,
                "tid": place + 1,
                "name": DIRECTIONS[way],
                "cat": "transfer",
                "ts": ns / 1000,
                "dur": ns_long / 1000,
                "args": args | contexts.of(event),
            }
        )


def _instants(log: Log, lives: Lives) -> Iterator[str]:
    op = lives.rows["op"]
    found = lives.rows[(op > 1) & (op != TRANSFER)]
    contexts = _Contexts(log)
    for thread in np.unique(found["thread"]).tolist():
        yield _name("thread_name", EVENTS, thread, thread_name(log, thread))
    for event in found:
        nbytes, name = int(event["nbytes"]), OPS[event["op"]].replace("_", " ")
        args = {"bytes": nbytes, "kind": KINDS[event["kind"]]}
        if event["op"] == PREFETCH:
            device = int(event["device"])
            args["to"] = "the host" if device < 0 else f"device {device}"
        else:
            args |= {"reserved": int(event["value"]), "pool": int(event["pool"])}
        yield json.dumps(
            {
                "ph": "i",
                "s": "t",  # draws the event only in the row of its thread
                "pid": EVENTS,
                "tid": int(event["thread"]),
                "name": f"{name} {format_nbytes(nbytes)}",
                "cat": OPS[event["op"]],
                "ts": int(event["time_ns"]) / 1000,
                "args": args | contexts.of(event),
            }
        )


class _Contexts:
    """Makes texts of the tags and stacks of events, with the innermost line first."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.texts: dict[int, str] = {}

    def of(self, event: Any) -> dict[str, str]:
        context = {}
        if event["tag"]:
            context["tag"] = self.log.tags[event["tag"]]
        if stack := int(event["stack"]):
            if stack not in self.texts:
                frames = self.log.stacks[stack]
                lines = (f"{f.filename}:{f.lineno} {f.function}" for f in frames)
                self.texts[stack] = "\n".join(lines)
            context["stack"] = self.texts[stack]
        return context
