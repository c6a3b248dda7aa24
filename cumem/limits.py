# SPDX-License-Identifier: Apache-2.0
"""What a limit means in bytes: of arguments, and of the variables CUMEM_LIMIT_..."""

from __future__ import annotations

import os
from typing import Any

from cumem import _core
from cumem.devices import Device, device_count
from cumem.kinds import KINDS, PAGE_LOCKED, check_kind
from cumem.units import read_size


def read_limit(kind: Any, limit: Any, device: Any) -> list[tuple[int, int | None]]:
    """What `set_limit` would set: the indices of devices, and bytes or None for each."""
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
    return [(index, _nbytes(kind, limit, index)) for index in places]


def _nbytes(kind: str, limit: Any, index: int) -> int | None:
    if limit is None:
        return None
    if not isinstance(limit, str) or "%" not in limit:
        whole = None
    elif kind in PAGE_LOCKED:
        whole = _core._host_memory()[3]
    else:
        whole = Device(index).total_nbytes
    return read_size(limit, "limit", True, whole)


def set_from_environment(usable: int | None, totals: list[int]) -> None:
    """By the extension, when it opens and there are such variables: all limits or none.

    Shares are those of the memory that the process may use and of the devices.
    """
    found = []
    for kind in KINDS:
        name = f"CUMEM_LIMIT_{kind.upper()}"
        if text := os.environ.get(name):
            wholes = [usable] if kind in PAGE_LOCKED else totals
            found += [
                (kind, index, read_size(text, name, True, whole))
                for index, whole in enumerate(wholes)
            ]
    for kind, index, nbytes in found:
        _core._put_limit(kind, index, nbytes, None)
