# SPDX-License-Identifier: Apache-2.0
"""A record has events, which are rows of one dtype, and tables that rows refer to."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Folders whose lines are never the user's own: the package's, and NumPy's, since arrays
#: may be in the package's memory.
INNER: Final = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "")
    for file in (os.path.dirname(__file__), np.__file__)
)

#: What can happen, in the order of the numbers in ``events["op"]``. The comments say what
#: the fields of the event mean.
OPS = (
    "allocate",  # address, nbytes, stream; value is the number of bytes asked for
    "free",  # address, nbytes, stream; the block is in its pool, but work may still use it
    "grow",  # address and nbytes of a pool's new memory; value is the pool's total then
    "trim",  # nbytes that a pool gave back; value is the pool's total then
    "transfer",  # nbytes and the target's address; value is how long it took, in ns
    "prefetch",  # address, nbytes; device is the target, or -1 for the host
    "out_of_memory",  # nbytes that could not be allocated; value is the pool's total then
    "sleep",  # nbytes that a region, or the spilled block at address, gave back to CUDA
    # while it kept its addresses; value is the pool's total then
    "wake",  # nbytes that came back to their addresses; value as for "sleep"
)

ALLOCATE, FREE, GROW, TRIM, TRANSFER, PREFETCH, OUT_OF_MEMORY, SLEEP, WAKE = range(
    len(OPS)
)
#: The operations after which a pool has more memory, and those after which it has less.
GAINS: Final = (GROW, WAKE)
LOSSES: Final = (TRIM, SLEEP)

#: Kinds of memory, in the order of the numbers in ``events["kind"]``, which
#: csrc/base/recorder.h lists too. The names are those used everywhere. "registered" is
#: foreign memory that cumem page-locked, and "staging" is memory that copies use on the
#: way. Saved records contain these numbers, so a new kind must be added at the end.
KINDS = ("pinned", "mapped", "managed", "device", "registered", "staging", "pageable")

EVENT = np.dtype(
    [
        ("time_ns", "<u8"),  # since the record began; for a transfer, when it began
        ("address", "<u8"),
        ("nbytes", "<u8"),
        ("value", "<u8"),  # its meaning depends on op: see OPS
        ("source", "<u8"),  # the address of a transfer's source, else 0
        ("stream", "<u8"),  # CUDA's handle, or 0 if there is none
        ("pool", "<u4"),  # the pool's serial number, or 0 if there is none
        ("thread", "<u4"),  # the operating system's number
        ("stack", "<u4"),  # index into Log.stacks; 0 if none was recorded
        ("tag", "<u4"),  # index into Log.tags; 0 if there is none
        ("op", "u1"),
        ("kind", "u1"),  # the kind of memory; for a transfer, that of its target
        ("source_kind", "u1"),  # the kind of a transfer's source; otherwise `kind`
        ("device", "i1"),  # -1 if there is none
    ]
)


class Frame(NamedTuple):
    """A line of a stack."""

    filename: str
    lineno: int
    function: str


class Log(NamedTuple):
    """The events of a record with the tables that they refer to, as `Record` makes them.

    Parameters
    ----------
    events : ndarray of EVENT, 1-D
        The events, sorted by time.
    living : ndarray of EVENT, 1-D
        The allocations that were alive before the first of `events`, as events
        ``"allocate"`` at time 0. If events were lost, the first of `events` is later than
        the beginning of the record.
    stacks : sequence of tuple of Frame, or dict of int to tuple of Frame
        The stacks by number, each with the innermost frame first. Stack 0 is empty.
    tags : tuple of str
        The tags by number; those of nested blocks are joined by ``/``. Tag 0 is ``""``.
    threads : dict of int to str
        The names of threads by number.
    lost_count : int
        The number of events that were dropped, which are the oldest ones.
    begin_s : float
        The time when the record began, in seconds since the epoch.
    duration_ns : int
        How long the record ran.
    machine : dict
        The machine that the record was made on: ``"backend"`` (``"cuda"``, ``"emulated"``,
        or ``""`` if unknown), ``"devices"``, a list of names, and ``"inner"``, the `INNER`
        of the process.
    """

    events: NDArray[Any]
    living: NDArray[Any]
    stacks: Any
    tags: tuple[str, ...]
    threads: dict[int, str]
    lost_count: int
    begin_s: float
    duration_ns: int
    machine: dict[str, Any]

    def user_frame(self, stack: int) -> Frame | None:
        """Return the innermost frame that is neither the package's nor NumPy's.

        The record says in which folders these two were on its machine. If the stack has no
        other frames, return its innermost one, and for an empty stack None.
        """
        frames: Sequence[Frame] = self.stacks[stack]
        inner = tuple(self.machine.get("inner", INNER))
        for frame in frames:
            if not frame.filename.startswith(inner):
                return frame
        return frames[0] if frames else None


#: Bounds that no machine reaches: of bytes in one event and of nanoseconds in one record.
_MOST_NBYTES: Final = 1 << 53
_MOST_NS: Final = 1 << 62
_BACKENDS: Final = ("", "cuda", "emulated")


def checked(log: Log) -> Log:
    """Check everything in the log of a file, and return it.

    Readers of a record use its numbers as indexes into tables. Without this check, a
    damaged file would cause errors far from where it was read.

    Parameters
    ----------
    log : Log
        The log as it was read, whose ``stacks`` are a dict of int to a sequence of frames.

    Raises
    ------
    ValueError
        If a number refers to nothing, or a value has the wrong type; the message names
        the part of the file.
    """
    for name, rows in (("events", log.events), ("living", log.living)):
        _check_rows(name, rows, log)
    if (log.living["op"] != ALLOCATE).any():
        raise ValueError("living: not all are allocations")
    _check_texts("tags", log.tags)
    if not log.tags or log.tags[0]:
        raise ValueError("tags: the first is not empty")
    _check_texts("threads", list(log.threads.values()))
    _check_number("lost_count", log.lost_count, 0, _MOST_NBYTES)
    _check_number("duration_ns", log.duration_ns, 0, _MOST_NS)
    if not math.isfinite(log.begin_s) or not 0 <= log.begin_s < 1 << 40:
        raise ValueError(f"begin_s: {log.begin_s} is not a time")
    _check_machine(log.machine)
    return log._replace(stacks=_checked_stacks(log))


def _check_rows(name: str, rows: NDArray[Any], log: Log) -> None:
    if not isinstance(rows, np.ndarray) or rows.dtype != EVENT or rows.ndim != 1:
        raise ValueError(f"{name}: of another version")
    bounds = {
        "op": len(OPS),
        "kind": len(KINDS),
        "source_kind": len(KINDS),
        "tag": max(len(log.tags), 1),
        "nbytes": _MOST_NBYTES,
        "value": _MOST_NS,
        "time_ns": _MOST_NS,
    }
    for field, bound in bounds.items():
        bad = np.flatnonzero(rows[field] >= bound)
        if bad.size:
            value = int(rows[field][bad[0]])
            raise ValueError(f"{name}[{bad[0]}]: {field} is {value}, not below {bound}")


def _check_texts(name: str, texts: Sequence[Any]) -> None:
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name}: not all are texts")


def _check_number(name: str, value: Any, least: int, bound: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: {value!r:.40} is not an integer")
    if not least <= value < bound:
        raise ValueError(f"{name}: {value} is not from {least} to {bound - 1}")


def _check_machine(machine: Any) -> None:
    if not isinstance(machine, dict):
        raise ValueError("machine: no table")
    if machine.get("backend") not in _BACKENDS:
        raise ValueError(f"machine: there is no backend {machine.get('backend')!r:.40}")
    for name in ("devices", "inner"):
        texts = machine.get(name, [])
        if not isinstance(texts, list):
            raise ValueError(f"machine: {name} is not a list")
        _check_texts(f"machine: {name}", texts)


def _checked_stacks(log: Log) -> dict[int, tuple[Frame, ...]]:
    """Check the stacks that events refer to, and return them by number."""
    used = np.unique(np.concatenate([log.events["stack"], log.living["stack"]]))
    stacks: dict[int, tuple[Frame, ...]] = {}
    for number in used[used > 0].tolist():
        if number not in log.stacks:
            raise ValueError(f"stacks: {number} is missing")
        stacks[number] = tuple(_frame(number, each) for each in log.stacks[number])
    return {0: ()} | stacks


def _frame(stack: int, entry: Any) -> Frame:
    filename, lineno, function = entry
    _check_texts(f"stacks: {stack}", (filename, function))
    _check_number(f"stacks: {stack}: line", lineno, 0, 1 << 31)
    return Frame(filename, lineno, function)
