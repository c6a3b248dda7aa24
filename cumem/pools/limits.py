# SPDX-License-Identifier: Apache-2.0
"""Limits of memory, which come from `set_limit`, blocks of `limit` and CUMEM_LIMIT_...

A *place* is a kind of memory together with the index of a device. It has one limit at a
time. While blocks of `limit` are open for the place, that is the limit of the block entered
last. Otherwise it is the limit that `set_limit` set last, or the initial one. The extension
has the limit that is in force, and this module has the others.
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

#: A share of a device's memory is stored as _SHARE plus the parts of _WHOLE that it has, as
#: in csrc/pool/budget.h. So 50 % is _SHARE + 500_000_000. A share becomes bytes when the
#: driver starts, since only the driver knows how much memory the device has.
_SHARE, _WHOLE = 1 << 63, 10**9


def read_limit(kind: Any, limit: Any, device: Any) -> list[tuple[int, int | None]]:
    """Return the limits that a call of `set_limit` sets, as pairs of a device and a limit.

    A limit is a number of bytes, a share as above, or None.
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
    """Return a limit in bytes or as a share, or None for no limit."""
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
    """Return the limit in bytes. If it is a share, this starts the driver."""
    if limit is None or not is_share(limit):
        return limit
    return (limit - _SHARE) * Device(index).total_nbytes // _WHOLE


# -- the limits in force ---------------------------------------------------------------

_Place = tuple[str, int]  #: a kind, and the index of a device

#: The limit that `set_limit` set for each place since the driver was opened. If it was not
#: called for a place, the first block stores here the limit that it replaces.
_limits_set: dict[_Place, int | None] = {}
#: The open blocks with their limits, in the order in which they were entered.
_blocks: dict[_Place, list[tuple[object, int | None]]] = {}
lock: threading.RLock = make_lock()  #: guards both; callers of put to leave hold it


def put(kind: str, index: int, nbytes: int | None) -> None:
    """Set the limit of `set_limit`, which is in force unless a block is open."""
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
    """End a block, and put the limit of the remaining blocks or of `set_limit` in force."""
    place = kind, index
    left = [each for each in _blocks[place] if each[0] is not block]
    _blocks[place] = left
    _core._limit(kind, index, left[-1][1] if left else _limits_set[place])


def begin(
    usable: int | None, count: int, page_locked: int | None
) -> dict[str, dict[int, int | None]]:
    """Return the limits of a driver that has just opened, by kinds and devices.

    The extension calls this with the number of devices and the limit that page-locked
    memory has by default; the other kinds have no limit by default. The result has the
    limits from the environment, or in their place those of open blocks. Raise a ValueError
    if a variable is wrong. Shares are parts of `usable`, the memory that the process may
    use, or of each device's memory.
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
