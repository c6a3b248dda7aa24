# SPDX-License-Identifier: Apache-2.0
"""Limits of memory: their values in bytes, the blocks of `limit`, and CUMEM_LIMIT_...

A place, which is a kind of memory and the index of a device, has one limit at a time.
While blocks of `limit` are open for it, the limit is that of the block entered last.
Otherwise it is the one that `set_limit` set last, or the one that the driver began with.
The extension has the limit that is in force; this module has the others.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from cumem import _core
from cumem.base.driver import device_count
from cumem.base.kinds import KINDS, PAGE_LOCKED, check_kind
from cumem.base.locks import make_lock
from cumem.base.units import read_size
from cumem.devices.device import Device

#: A share of a device's memory is written as _SHARE plus its parts of _WHOLE, as in
#: csrc/pool/budget.h: 50 % is _SHARE + 500_000_000. It becomes bytes when the driver
#: starts, which alone knows how much memory the device has.
_SHARE, _WHOLE = 1 << 63, 10**9


def read_limit(kind: Any, limit: Any, device: Any) -> list[tuple[int, int | None]]:
    """Return what a call of `set_limit` sets: pairs of a device's index and a limit.

    The limit is in bytes, a share as above, or None.
    """
    check_kind(kind)
    count = device_count()
    if kind in PAGE_LOCKED and device is not None:
        raise ValueError(
            f"the limit of {kind} memory is the whole process's: it takes no device"
        )
    if kind in PAGE_LOCKED:
        places = range(1)
    elif device is None:
        places = range(count)
    else:
        index = _core._device(device, "device").index
        places = range(index, index + 1)
    nbytes = _nbytes(kind, limit)
    return [(index, nbytes) for index in places]


def _nbytes(kind: str, limit: Any) -> int | None:
    """Return a limit in bytes or as a share of a device's memory; None means no limit."""
    if limit is None:
        return None
    if kind not in PAGE_LOCKED:
        return _of_device(limit, "limit")
    is_share = isinstance(limit, str) and "%" in limit
    return read_size(
        limit, "limit", True, _core._host_memory().usable_nbytes if is_share else None
    )


def _of_device(limit: Any, name: str) -> int:
    """Return a limit for memory of a device, in bytes or as a share."""
    if isinstance(limit, str) and "%" in limit:
        return _SHARE + read_size(limit, name, True, _WHOLE)
    return min(read_size(limit, name, True, None), _SHARE - 1)


def is_share(limit: int | None) -> bool:
    """Return whether the limit is a share of a device's memory."""
    return limit is not None and limit >= _SHARE


def limit_in_bytes(limit: int | None, index: int) -> int | None:
    """Return the limit in bytes, for which a share starts the driver."""
    if limit is None or not is_share(limit):
        return limit
    return (limit - _SHARE) * Device(index).total_nbytes // _WHOLE


# -- the limits in force ---------------------------------------------------------------

_Place = tuple[str, int]  #: a kind, and the index of a device

#: What `set_limit` set for a place since the driver was opened. If it was never called for
#: a place, the first block notes here the limit that it replaces.
_limits_set: dict[_Place, int | None] = {}
#: The open blocks with their limits, in the order in which they were entered.
_blocks: dict[_Place, list[tuple[object, int | None]]] = {}
lock: threading.RLock = make_lock()  #: guards both; callers of the next three hold it


def put(kind: str, index: int, nbytes: int | None) -> None:
    """Set a limit for `set_limit`, which is in force unless a block is open."""
    _limits_set[kind, index] = nbytes
    if not _blocks.get((kind, index)):
        _core._limit(kind, index, nbytes)


def enter(block: object, kind: str, index: int, nbytes: int | None) -> None:
    """Begin a block, whose limit is in force from now on."""
    place = kind, index
    _limits_set.setdefault(place, _core._limit(kind, index))
    _blocks.setdefault(place, []).append((block, nbytes))
    _core._limit(kind, index, nbytes)


def leave(block: object, kind: str, index: int) -> None:
    """End a block, and put the limit in force that follows from the rest."""
    place = kind, index
    left = [each for each in _blocks[place] if each[0] is not block]
    _blocks[place] = left
    _core._limit(kind, index, left[-1][1] if left else _limits_set[place])


def begin(
    usable: int | None, count: int, page_locked: int | None
) -> dict[str, dict[int, int | None]]:
    """Return the limits of a driver that has just opened, by kinds and devices.

    The extension calls this with the number of devices and the limit that page-locked
    memory has by default; the other kinds have none. The limits of the environment are
    returned, unless one is wrong, and those of open blocks in place of them. Shares are of
    `usable`, the memory that the process may use, or of each device's memory.
    """
    with lock:
        said: dict[_Place, int | None] = {}
        for kind in KINDS:
            name = f"CUMEM_LIMIT_{kind.upper()}"
            if text := os.environ.get(name):
                if kind in PAGE_LOCKED:
                    said[kind, 0] = read_size(text, name, True, usable)
                    continue
                nbytes = _of_device(text, name)
                said |= {(kind, index): nbytes for index in range(count)}
        in_force = dict(said)
        for place, blocks in _blocks.items():
            if blocks:
                said.setdefault(place, page_locked if place[0] in PAGE_LOCKED else None)
                in_force[place] = blocks[-1][1]
        _limits_set.clear()
        _limits_set.update(said)
        limits: dict[str, dict[int, int | None]] = {}
        for (kind, index), nbytes_or_none in in_force.items():
            limits.setdefault(kind, {})[index] = nbytes_or_none
        return limits
