# SPDX-License-Identifier: Apache-2.0
"""What the driver is asked of itself and of its devices, each time anew."""

from __future__ import annotations

from typing import Any

from cumem import _core

# As csrc/python/device/device.c numbers them.
_DEVICE_COUNT, _DRIVER_VERSION, _RUNTIME_VERSION, _ATTRIBUTE, _PEER_ACCESS = range(5)
_PRIORITIES, _MEMORY, _DESCRIPTION, _SYNCHRONIZE = range(5, 9)


def _ask(what: int, device: int = 0, second: int = 0) -> Any:
    return _core._ask_driver(what, device, second)


def device_count() -> int:
    """Number of its devices."""
    return int(_ask(_DEVICE_COUNT))


def driver_version() -> int:
    """Newest version of CUDA that it serves."""
    return int(_ask(_DRIVER_VERSION))


def runtime_version() -> int:
    """Version of the runtime library."""
    return int(_ask(_RUNTIME_VERSION))


def attribute(device: int, name: str) -> int | None:
    """An attribute of a device; None where the driver does not know it."""
    value: int | None = _ask(_ATTRIBUTE, device, _core._DEVICE_ATTRIBUTES[name])
    return value


def can_access_peer(device: int, peer: int) -> bool:
    """Whether one device reaches the memory of another one."""
    return bool(_ask(_PEER_ACCESS, device, peer))


def priorities(device: int) -> tuple[int, int]:
    """Of its streams: the least, which is the highest number, and the greatest."""
    least, greatest = _ask(_PRIORITIES, device)
    return least, greatest


def memory_info(device: int) -> tuple[int, int]:
    """Free and total bytes of a device."""
    free, total = _ask(_MEMORY, device)
    return free, total


def describe(device: int) -> tuple[bytes, bytes, str, int]:
    """Its name, UUID, place on the bus, and bytes of memory."""
    name, uuid, place, nbytes = _ask(_DESCRIPTION, device)
    return name, uuid, place, nbytes


def synchronize(device: int) -> None:
    """Wait for all work of a device."""
    _ask(_SYNCHRONIZE, device)
