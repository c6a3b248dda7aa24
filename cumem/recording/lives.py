# SPDX-License-Identifier: Apache-2.0
"""What the exports of a record share: which free ends which allocation, lanes, files."""

from __future__ import annotations

import contextlib
import heapq
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cumem.files import replacing
from cumem.recording.events import KINDS, OPS, Frame, Log

ALLOCATE, FREE, GROW, TRIM, TRANSFER, PREFETCH, OUT_OF_MEMORY = range(len(OPS))

#: Directions of transfers, by the sides of both ends.
DIRECTIONS: Final = (
    *("host to device", "device to host", "device to device"),
    *("to managed", "from managed", "host to host"),
)
#: Whose lines are nobody's own: ours, and NumPy's, whose arrays may be in our memory.
_INNER: Final = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "")
    for file in (os.path.dirname(__file__), np.__file__)
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
    # Registered pages may be those of a pool, whose address is then there twice.
    apart = rows["kind"][where] == KINDS.index("registered")
    order = np.lexsort((where, rows["address"][where], apart))
    at = where[order]
    found, apart = rows[at], apart[order]
    same = (found["address"][1:] == found["address"][:-1]) & (apart[1:] == apart[:-1])
    follows = np.concatenate([same, [False]]) if len(at) else np.zeros(0, bool)
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
    """

    row: _Ints
    life: _Ints
    opens: NDArray[np.bool_]


def changes(lives: Lives) -> Changes:
    """Order what changes the bytes that live; an end comes before a beginning."""
    ended = np.flatnonzero(lives.end < len(lives.rows))
    row = np.concatenate([lives.begin, lives.end[ended]])
    life = np.concatenate([np.arange(len(lives.begin)), ended])
    opens = np.arange(len(row)) < len(lives.begin)
    order = np.lexsort((opens, row))
    return Changes(row[order], life[order], opens[order])


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
    begun = lives.rows[lives.begin]
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


def lanes(begin: _Ints, end: _Ints, group: _Ints) -> _Ints:
    """Number lanes so that nothing in a lane of a group overlaps, with as few as can be.

    Parameters
    ----------
    begin, end : ndarray of int64, shape (n,)
        In ns, `begin` ascending.
    group : ndarray of int64, shape (n,)

    Returns
    -------
    ndarray of int64, shape (n,)
        From 0 on in each group.
    """
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


def own_line(stack: Sequence[Frame]) -> Frame | None:
    """The innermost line that is neither this package's nor NumPy's: the user's."""
    for frame in stack:
        if not frame.filename.startswith(_INNER):
            return frame
    return stack[0] if stack else None


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


@contextlib.contextmanager
def opened(path: str | os.PathLike[str] | IO[bytes]) -> Iterator[IO[bytes]]:
    """A binary file to write an export to: takes the place of what has its name once it
    is complete. What is no path is taken to be such a file, and stays open."""
    if not isinstance(path, (str, os.PathLike)):
        if not hasattr(path, "write"):
            what = "a str, a Path or a binary file"
            raise TypeError(f"path must be {what}, not {type(path).__name__}")
        yield path
        return
    with replacing(pathlib.Path(path)) as replacement:
        with replacement.open() as file:
            yield file
        replacement.place()
