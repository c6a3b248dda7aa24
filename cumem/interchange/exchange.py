# SPDX-License-Identifier: Apache-2.0
"""Parts of DLPack that are in Python.

These are the functions that csrc/python/copy/dlpack_exchange.c calls, and exports for
another device than that of the memory, or of a copy.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np

from cumem import _core
from cumem.base.driver import device_count
from cumem.base.kinds import is_on_device
from cumem.buffers.arguments import read_flag
from cumem.interchange.foreign_memory import refuse_device, refuse_export

#: The kinds of memory by DLPack's codes of device types.
KINDS: Final[dict[int, Literal["pinned", "managed", "device"]]] = {
    1: "pinned",
    2: "device",
    3: "pinned",
    13: "managed",
}


def check_device(kind: int, index: int) -> None:
    """Raise an error unless the device exists."""
    count = (device_count() if kind == 2 else 1) if kind in KINDS else 0
    if not 0 <= index < count:
        refuse_device(kind, index, count)


def current_stream(kind: int, index: int) -> int:
    """Return the handle of the device's current stream, or 0 if the memory needs none."""
    check_device(kind, index)
    if KINDS[kind] == "pinned":
        return 0
    return _core.current_stream(index if kind == 2 else None).handle or 1


def allocate(
    shape: tuple[int, ...], dtype: np.dtype[Any], device: tuple[int, int]
) -> object:
    """Return a capsule over new memory of the device, from its pool."""
    check_device(*device)
    index = device[1] if device[0] == 2 else None
    buffer = _core.empty(shape, dtype, KINDS[device[0]], device=index)
    return buffer.__dlpack__(stream=-1, max_version=(1, 3), dl_device=device)


def export(
    buffer: _core.Buffer, stream: object, max_version: object, device: Any, copy: object
) -> object:
    """Export a buffer as `Buffer.__dlpack__` describes it."""
    wants_copy = None if copy is None else read_flag(copy, "copy")
    if device is not None:
        _check_export(buffer, device)
    capsule = None
    if not wants_copy:
        capsule = _core._export(buffer, stream, max_version, device, False)
    if capsule is None and wants_copy is False:
        raise BufferError(
            "device memory reaches the CPU only as a copy, and copy=False forbids that"
        )
    if capsule is None:
        # The copy has the same kind, but is pinned if the CPU could not reach that.
        if is_on_device(buffer.kind) and device is not None and device[0] == 1:
            copied: _core.Buffer = _core.empty_pinned(
                buffer.shape, buffer.dtype, device=buffer.device
            )
            _core.copy(copied, buffer)
        else:
            copied = buffer.copy()
        capsule = _core._export(copied, stream, max_version, device, True)
    return capsule


def _check_export(buffer: _core.Buffer, device: Any) -> None:
    """Raise an error unless the memory can be exported for this device.

    That is possible for the memory's own device, for the CPU, and for the GPU of mapped or
    managed memory.
    """
    is_pair = isinstance(device, tuple) and len(device) == 2
    if not is_pair or not all(isinstance(each, int) for each in device):
        raise TypeError(
            f"dl_device must be None or a tuple of two ints, not {device!r}"
        )
    memory, where = buffer.kind, buffer.device
    is_emulated = _core._is_emulated()
    can_be = [buffer.__dlpack_device__(), (1, 0)]
    if where is not None and memory in ("mapped", "managed") and not is_emulated:
        can_be.append((2, where.index))
    if device not in can_be:
        refuse_export(device[0], device[1], memory, is_emulated)
