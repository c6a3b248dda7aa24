# SPDX-License-Identifier: Apache-2.0
"""What DLPack's C functions leave to the package: csrc/python/copy/dlpack_exchange.c."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from cumem import _core
from cumem.devices import device_count
from cumem.extension.foreign_memory import find_dtype, refuse_device

#: By DLPack's codes: letters of NumPy's own types; kinds of the memory of devices.
PLAIN_TYPES: Final = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
KINDS: Final[dict[int, Literal["pinned", "managed", "device"]]] = {
    1: "pinned",
    2: "device",
    3: "pinned",
    13: "managed",
}


def check_device(kind: int, index: int) -> None:
    """Raise unless there is such a device."""
    count = (device_count() if kind == 2 else 1) if kind in KINDS else 0
    if not 0 <= index < count:
        refuse_device(kind, index, count)


def current_stream(kind: int, index: int) -> int:
    """Handle of the stream that work on the device's memory is queued on; 0: no stream."""
    check_device(kind, index)
    if KINDS[kind] == "pinned":
        return 0
    return _core.current_stream(index if kind == 2 else None).handle or 1


def allocate(
    shape: tuple[int, ...], dtype: tuple[int, int, int], device: tuple[int, int]
) -> object:
    """A capsule over pooled memory of the device, or an exception's name and text."""
    try:
        check_device(*device)
        code, bits, lanes = dtype
        try:
            found = np.dtype(f"{PLAIN_TYPES[code]}{bits / 8:g}" if lanes == 1 else "")
        except (KeyError, TypeError):
            found = find_dtype(*dtype)
        index = device[1] if device[0] == 2 else None
        buffer = _core.empty(shape, found, KINDS[device[0]], device=index)
        return buffer.__dlpack__(stream=-1, max_version=(1, 3), dl_device=device)
    except BaseException as error:
        kind = MemoryError if isinstance(error, MemoryError) else type(error)
        return kind.__name__, str(error)
