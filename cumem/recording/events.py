# SPDX-License-Identifier: Apache-2.0
"""What a record is made of: rows of one dtype, and tables that the rows point into."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Whose lines are nobody's own: ours, and NumPy's, whose arrays may be in our memory.
INNER: Final = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "")
    for file in (os.path.dirname(__file__), np.__file__)
)

#: What can happen, in the order of their numbers in ``events["op"]``.
OPS = (
    "allocate",  # address, nbytes, stream; value: bytes asked for
    "free",  # address, nbytes, stream: back in its pool, where work may still run on it
    "grow",  # a pool: address and nbytes of what it got; value: reserved by it after
    "trim",  # a pool: nbytes given back; value: reserved by it after
    "transfer",  # address: of the target; nbytes; value: ns that the transfer took
    "prefetch",  # address, nbytes; device: where to, -1 the host
    "out_of_memory",  # nbytes that were not there; value: reserved then
)

ALLOCATE, FREE, GROW, TRIM, TRANSFER, PREFETCH, OUT_OF_MEMORY = range(len(OPS))

#: Of what memory, in the order of their numbers in ``events["kind"]``. The same names as
#: everywhere; "registered": pages of others, "staging": what copies go through.
KINDS = ("pinned", "mapped", "managed", "device", "registered", "staging", "pageable")

EVENT = np.dtype(
    [
        ("time_ns", "<u8"),  # since the record began; of a transfer, when it began
        ("address", "<u8"),
        ("nbytes", "<u8"),
        ("value", "<u8"),  # what it is, OPS says
        ("source", "<u8"),  # of a transfer: the source's address; else 0
        ("stream", "<u8"),  # CUDA's handle; 0: none
        ("pool", "<u4"),  # serial number of the pool; 0: none
        ("thread", "<u4"),  # the operating system's number
        ("stack", "<u4"),  # index into Record.stacks; 0: none was noted
        ("tag", "<u4"),  # index into Record.tags; 0: no tag
        ("op", "u1"),
        ("kind", "u1"),  # of a transfer: of the target
        ("source_kind", "u1"),  # of a transfer, else that of `kind`
        ("device", "i1"),  # -1: none
    ]
)


class Frame(NamedTuple):
    """A line of a stack."""

    filename: str
    lineno: int
    function: str


class Log(NamedTuple):
    """All that the readers of a record need: made by `Record`, or by a test.

    Parameters
    ----------
    events : ndarray of EVENT, 1-D
        In the order of time.
    living : ndarray of EVENT, 1-D
        Allocations that lived when the record began, as events ``"allocate"`` of time 0;
        where events were lost, those that lived before the first that is there.
    stacks : sequence of tuple of Frame, or dict of int to such
        Innermost first; index 0 is the empty stack.
    tags : tuple of str
        Nested ones joined by ``/``; index 0 is ``""``.
    threads : dict of int to str
        Names of threads by number.
    lost_count : int
        Events that no longer fitted: the oldest are dropped.
    begin_s : float
        When the record began, in seconds since the epoch.
    duration_ns : int
        Until it ended.
    machine : dict
        What it ran on: ``"backend"`` (``"cuda"``, ``"emulated"``, or ``""`` where that is
        not known), ``"devices"``, a list of names, and ``"inner"``, where `INNER` was.
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
        """The innermost frame of a stack that is neither the package's own nor NumPy's,
        wherever these were, else the innermost; None: there is none.
        """
        frames: Sequence[Frame] = self.stacks[stack]
        inner = tuple(self.machine.get("inner", INNER))
        for frame in frames:
            if not frame.filename.startswith(inner):
                return frame
        return frames[0] if frames else None


#: What no machine has: more bytes in one event, more nanoseconds in one record.
_MOST_NBYTES: Final = 1 << 53
_MOST_NS: Final = 1 << 62
_BACKENDS: Final = ("", "cuda", "emulated")


def checked(log: Log) -> Log:
    """The log of a file, once everything in it is known to make sense.

    Readers of a record index tables by its numbers, so that a damaged file would fail far
    from where it was read. Stacks are numbered anew: a file may name any number.

    Parameters
    ----------
    log : Log
        As it was read. ``stacks`` is a dict of int to a sequence of frames.

    Raises
    ------
    ValueError
        If a number points nowhere, or a value is of another type than it must be; the
        text names the part of the file.
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
    """The stacks that occur, by their numbers."""
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
