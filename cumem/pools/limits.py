# SPDX-License-Identifier: Apache-2.0
"""What a limit means in bytes: of arguments, and of the variables CUMEM_LIMIT_..."""

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

#: A limit that is a share of a device's memory is this and so many parts of the second,
#: as in csrc/pool/budget.h, until the driver is started: only that knows how much it is.
_SHARE, _WHOLE = 1 << 63, 10**9


def read_limit(kind: Any, limit: Any, device: Any) -> list[tuple[int, int | None]]:
    """What `set_limit` would set: the indices of devices, and bytes, a share or None for
    each."""
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
    """Bytes, or a share of a device's memory; None: no limit."""
    if limit is None:
        return None
    if kind not in PAGE_LOCKED:
        return _of_device(limit, "limit")
    is_share = isinstance(limit, str) and "%" in limit
    return read_size(
        limit, "limit", True, _core._host_memory().usable_nbytes if is_share else None
    )


def _of_device(limit: Any, name: str) -> int:
    """The same of memory of a device."""
    if isinstance(limit, str) and "%" in limit:
        return _SHARE + read_size(limit, name, True, _WHOLE)
    return min(read_size(limit, name, True, None), _SHARE - 1)


def is_share(limit: int | None) -> bool:
    """Whether it is a share of a device's memory that nobody has asked for yet."""
    return limit is not None and limit >= _SHARE


def settled(limit: int | None, index: int) -> int | None:
    """The limit in bytes; starts the driver where it is a share."""
    if limit is None or not is_share(limit):
        return limit
    return (limit - _SHARE) * Device(index).total_nbytes // _WHOLE


# -- what holds ------------------------------------------------------------------------

_Place = tuple[str, int]  #: a kind, and the index of a device

#: What `set_limit` said of a place since the driver was opened; where blocks were open,
#: else what was at first.
_said: dict[_Place, int | None] = {}
#: Open blocks and their limits, in the order of entering: the last one's holds.
_blocks: dict[_Place, list[tuple[object, int | None]]] = {}
lock: threading.RLock = make_lock()  #: of both, which the next three are called with


def put(kind: str, index: int, nbytes: int | None) -> None:
    """For `set_limit`: it counts while no block is open."""
    _said[kind, index] = nbytes
    if not _blocks.get((kind, index)):
        _core._limit(kind, index, nbytes)


def enter(block: object, kind: str, index: int, nbytes: int | None) -> None:
    """Begin a block."""
    place = kind, index
    _said.setdefault(place, _core._limit(kind, index))
    _blocks.setdefault(place, []).append((block, nbytes))
    _core._limit(kind, index, nbytes)


def leave(block: object, kind: str, index: int) -> None:
    """End a block."""
    place = kind, index
    left = [each for each in _blocks[place] if each[0] is not block]
    _blocks[place] = left
    _core._limit(kind, index, left[-1][1] if left else _said[place])


def begin(usable: int | None, count: int) -> None:
    """By the extension, for a driver of `count` devices that opens, with all limits as at
    first: those of the environment hold, all or none, and those of blocks that are open
    still.

    Shares are those of the memory that the process may use and of the devices.
    """
    with lock:
        _said.clear()
        for (kind, index), blocks in _blocks.items():
            if blocks:
                _said[kind, index] = _core._limit(kind, index)
                _core._limit(kind, index, blocks[-1][1])
        found = []
        for kind in KINDS:
            name = f"CUMEM_LIMIT_{kind.upper()}"
            if text := os.environ.get(name):
                if kind in PAGE_LOCKED:
                    found.append((kind, 0, read_size(text, name, True, usable)))
                    continue
                nbytes = _of_device(text, name)
                found += [(kind, index, nbytes) for index in range(count)]
        for kind, index, nbytes in found:
            put(kind, index, nbytes)
