# SPDX-License-Identifier: Apache-2.0
"""What a record is made of: rows of one dtype, and tables that the rows point into."""

from __future__ import annotations

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
    stacks : sequence of tuple of Frame
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
