# SPDX-License-Identifier: Apache-2.0
"""What readers of a record share: which free ends which allocation, lanes, names."""

from __future__ import annotations

import heapq
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cumem.recording.events import ALLOCATE, FREE, KINDS, Log

#: Directions of transfers, by the sides of both ends.
DIRECTIONS: Final = (
    *("host to device", "device to host", "device to device"),
    *("to managed", "from managed", "host to host"),
)
_Ints = NDArray[np.int64]


class Lives(NamedTuple):
    """Allocations of a record, each with the row that ended it.

    Parameters
    ----------
    rows : ndarray of EVENT, shape (n,)
        What lived before, then the events, in the order of time.
    before_count : int
        How many rows are of what lived before.
    begin : ndarray of int64, shape (m,)
        Row of each allocation, ascending.
    end : ndarray of int64, shape (m,)
        Row that ended it; `n`: it still lives. It is its free, or, where the free was
        dropped, the next allocation at its address.
    unknown_count : int
        Frees of what nobody saw allocated; they change nothing here.
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
        """Bytes of each."""
        return self.rows["nbytes"][self.begin].astype(np.int64)

    @property
    def is_inside(self) -> NDArray[np.bool_]:
        """Whether each was allocated in the record."""
        return self.begin >= self.before_count

    @property
    def is_left(self) -> NDArray[np.bool_]:
        """Whether each lives at the end."""
        is_left: NDArray[np.bool_] = self.end == len(self.rows)
        return is_left


def address_keys(rows: NDArray[Any]) -> NDArray[np.uint64]:
    """A number for each address and kind: registered pages may be those of a pool, whose
    address is then there twice. No more than 57 bits of addresses are used."""
    keys: NDArray[np.uint64] = rows["address"] | rows["kind"].astype("u8") << np.uint64(
        60
    )
    return keys


def pair(log: Log) -> Lives:
    """Find what ends each allocation.

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
    # Zero bytes have no address, and nothing to tell them apart by.
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
        Index into `Lives.begin`.
    opens : ndarray of bool, shape (k,)
        Whether it begins here.
    time_ns : ndarray of int64, shape (k,)
        When, 0 for what lived before.
    kind : ndarray of uint8, shape (k,)
    nbytes : ndarray of int64, shape (k,)
        So many more live; of ends negative.
    """

    row: _Ints
    life: _Ints
    opens: NDArray[np.bool_]
    time_ns: _Ints
    kind: NDArray[np.uint8]
    nbytes: _Ints


def changes(lives: Lives) -> Changes:
    """Order what changes the bytes that live; an end comes before a beginning."""
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
    """What allocations with one stack, tag and kind share.

    Parameters
    ----------
    stack, tag, kind : ndarray of int64, shape (s,)
        Of each site.
    of : ndarray of int64, shape (m,)
        Site of each life.
    """

    stack: _Ints
    tag: _Ints
    kind: _Ints
    of: _Ints


def sites(lives: Lives) -> Sites:
    """Group allocations by where and as what they were made."""
    begun = lives.begun
    tag = begun["tag"].astype(np.int64)
    tags = int(np.max(tag, initial=0)) + 1
    key = (begun["stack"].astype(np.int64) * tags + tag) * len(KINDS) + begun["kind"]
    found, of = np.unique(key, return_inverse=True)
    where, kind = np.divmod(found, len(KINDS))
    return Sites(*np.divmod(where, tags), kind, of)


def directions(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """Index into `DIRECTIONS` of each transfer."""
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
    """Number lanes so that nothing in a lane of a group overlaps, with as few as can be.

    Parameters
    ----------
    transfers : ndarray of EVENT, shape (n,)
        In the order of their beginning.
    group : ndarray of int64, shape (n,), optional
        Default: all are of one.

    Returns
    -------
    ndarray of int64, shape (n,)
        From 0 on in each group.
    """
    begin = transfers["time_ns"].astype(np.int64)
    end = begin + transfers["value"].astype(np.int64)
    group = np.zeros_like(begin) if group is None else group
    busy: dict[int, list[tuple[int, int]]] = {}  # (until when, lane)
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
    """What a record was made on; names the emulated device as such."""
    names = log.machine.get("devices") or ["no device"]
    counts = {name: names.count(name) for name in names}
    text = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())
    return with_backend(log, text)


def with_backend(log: Log, name: str) -> str:
    """A name of devices that says so where they are emulated."""
    is_said = log.machine.get("backend") != "emulated" or "emulated" in name.lower()
    return name if is_said else f"{name} (emulated)"


def thread_name(log: Log, thread: int) -> str:
    """Of a thread, with the operating system's number."""
    name = log.threads.get(thread, "thread")
    return f"{name} ({thread})"
