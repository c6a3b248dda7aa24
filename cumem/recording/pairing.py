# SPDX-License-Identifier: Apache-2.0
"""Helpers of all readers of records.

They find which free ends which allocation, group allocations by the place where they
were made, put transfers that overlap into lanes, and name devices and threads.
"""

from __future__ import annotations

import heapq
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cumem.recording.events import ALLOCATE, FREE, KINDS, Log

#: The directions of transfers, by the kinds of memory at both ends.
DIRECTIONS: Final = (
    *("host to device", "device to host", "device to device"),
    *("to managed", "from managed", "host to host"),
)
_Ints = NDArray[np.int64]


class Lives(NamedTuple):
    """The allocations of a record, each with the row that ended it.

    Parameters
    ----------
    rows : ndarray of EVENT, shape (n,)
        The allocations from before the record, and then the events, sorted by time.
    before_count : int
        The number of rows of allocations from before the record.
    begin : ndarray of int64, shape (m,)
        The row of each allocation, ascending.
    end : ndarray of int64, shape (m,)
        The row that ended each allocation, or `n` if it is still alive. This row is its
        free or, if that was lost, the next allocation at the same address.
    unknown_count : int
        The number of frees whose allocation is unknown; nothing else counts them.
    """

    rows: NDArray[Any]
    before_count: int
    begin: _Ints
    end: _Ints
    unknown_count: int

    @property
    def begun(self) -> NDArray[Any]:
        """The event of each allocation."""
        begun: NDArray[Any] = self.rows[self.begin]
        return begun

    @property
    def nbytes(self) -> _Ints:
        """The bytes of each allocation."""
        return self.rows["nbytes"][self.begin].astype(np.int64)

    @property
    def is_inside(self) -> NDArray[np.bool_]:
        """Whether each allocation was made during the record."""
        return self.begin >= self.before_count

    @property
    def is_left(self) -> NDArray[np.bool_]:
        """Whether each allocation is alive at the end."""
        is_left: NDArray[np.bool_] = self.end == len(self.rows)
        return is_left


def address_keys(rows: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a number for each combination of address and kind.

    Registered memory may lie inside memory of a pool, so two allocations that are alive at
    once can have the same address. An address has at most 57 bits, which leaves room for
    the kind above them.
    """
    keys: NDArray[np.uint64] = rows["address"] | rows["kind"].astype("u8") << np.uint64(
        60
    )
    return keys


def pair(log: Log) -> Lives:
    """Find the event that ends each allocation.

    Parameters
    ----------
    log : Log

    Returns
    -------
    Lives
    """
    events = log.events
    if (np.diff(events["time_ns"].astype(np.int64)) < 0).any():
        events = events[np.argsort(events["time_ns"], kind="stable")]
    rows = np.concatenate([log.living, events])
    # Allocations of zero bytes have no address, and nothing else tells them apart.
    where = np.flatnonzero((rows["op"] <= FREE) & (rows["address"] != 0))
    key = address_keys(rows)
    order = np.argsort(key[where], kind="stable")
    at = where[order]
    found, key = rows[at], key[at]
    follows = np.append(key[1:] == key[:-1], False)[: len(at)]
    following = np.where(follows, np.roll(at, -1), len(rows))
    opens = found["op"] == ALLOCATE
    after_open = np.roll(opens & follows, 1)
    begin, end = at[opens], following[opens]
    ascending = np.argsort(begin)
    return Lives(
        rows,
        len(log.living),
        begin[ascending],
        end[ascending],
        int((~opens & ~after_open).sum()),
    )


class Changes(NamedTuple):
    """Beginnings and ends of lives, in order.

    Parameters
    ----------
    row : ndarray of int64, shape (k,)
        Index into `Lives.rows`.
    life : ndarray of int64, shape (k,)
        Index into `Lives.begin` and `Lives.end`.
    opens : ndarray of bool, shape (k,)
        Whether the life begins here.
    time_ns : ndarray of int64, shape (k,)
        The time, which is 0 for allocations from before the record.
    kind : ndarray of uint8, shape (k,)
    nbytes : ndarray of int64, shape (k,)
        How many more bytes are alive afterwards; negative at an end.
    """

    row: _Ints
    life: _Ints
    opens: NDArray[np.bool_]
    time_ns: _Ints
    kind: NDArray[np.uint8]
    nbytes: _Ints


def changes(lives: Lives) -> Changes:
    """Sort beginnings and ends of lives; in the same row, the end comes first."""
    ended = np.flatnonzero(lives.end < len(lives.rows))
    row = np.concatenate([lives.begin, lives.end[ended]])
    life = np.concatenate([np.arange(len(lives.begin)), ended])
    opens = np.arange(len(row)) < len(lives.begin)
    order = np.lexsort((opens, row))
    row, life, opens = row[order], life[order], opens[order]
    time = np.where(row < lives.before_count, 0, lives.rows["time_ns"][row])
    nbytes = np.where(opens, 1, -1) * lives.nbytes[life]
    return Changes(row, life, opens, time, lives.begun["kind"][life], nbytes)


class Sites(NamedTuple):
    """The distinct combinations of stack, tag and kind that allocations have.

    Parameters
    ----------
    stack, tag, kind : ndarray of int64, shape (s,)
        The combination of each site.
    of : ndarray of int64, shape (m,)
        The site of each life.
    """

    stack: _Ints
    tag: _Ints
    kind: _Ints
    of: _Ints


def sites(lives: Lives) -> Sites:
    """Group allocations by their stack, tag and kind."""
    begun = lives.begun
    tag = begun["tag"].astype(np.int64)
    tags = int(np.max(tag, initial=0)) + 1
    key = (begun["stack"].astype(np.int64) * tags + tag) * len(KINDS) + begun["kind"]
    found, of = np.unique(key, return_inverse=True)
    where, kind = np.divmod(found, len(KINDS))
    return Sites(*np.divmod(where, tags), kind, of)


def directions(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the index into `DIRECTIONS` for each transfer."""
    device, managed = KINDS.index("device"), KINDS.index("managed")
    source, target = rows["source_kind"], rows["kind"]
    choices = [
        target == managed,
        source == managed,
        (source == device) & (target == device),
        target == device,
        source == device,
    ]
    return np.select(choices, [3, 4, 2, 0, 1], 5).astype(np.uint8)


def lanes(transfers: NDArray[Any], group: _Ints | None = None) -> _Ints:
    """Put transfers into the fewest lanes in which none overlaps another of its group.

    Parameters
    ----------
    transfers : ndarray of EVENT, shape (n,)
        The transfers, sorted by the time when they began.
    group : ndarray of int64, shape (n,), optional
        The group of each transfer; by default all are in one.

    Returns
    -------
    ndarray of int64, shape (n,)
        The lane of each transfer, counted from 0 in each group.
    """
    begin = transfers["time_ns"].astype(np.int64)
    end = begin + transfers["value"].astype(np.int64)
    group = np.zeros_like(begin) if group is None else group
    busy: dict[int, list[tuple[int, int]]] = {}  # heaps of (end of last transfer, lane)
    free: dict[int, list[int]] = {}
    result = []
    for start, stop, name in zip(
        begin.tolist(), end.tolist(), group.tolist(), strict=True
    ):
        used, unused = busy.setdefault(name, []), free.setdefault(name, [])
        while used and used[0][0] <= start:
            heapq.heappush(unused, heapq.heappop(used)[1])
        lane = heapq.heappop(unused) if unused else len(used)
        heapq.heappush(used, (stop, lane))
        result.append(lane)
    return np.array(result, np.int64)


def machine_text(log: Log) -> str:
    """Return the names of the record's devices, which say so if they are emulated."""
    names = log.machine.get("devices") or ["no device"]
    counts = {name: names.count(name) for name in names}
    text = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())
    return with_backend(log, text)


def with_backend(log: Log, name: str) -> str:
    """Return the name of a device, which says so if it is emulated."""
    is_said = log.machine.get("backend") != "emulated" or "emulated" in name.lower()
    return name if is_said else f"{name} (emulated)"


def thread_name(log: Log, thread: int) -> str:
    """Return the name of the thread that the operating system numbers `thread`."""
    name = log.threads.get(thread, "thread")
    return f"{name} ({thread})"
