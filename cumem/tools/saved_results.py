# SPDX-License-Identifier: Apache-2.0
"""Keeps measured figures of this machine as files in the user's cache directory."""

from __future__ import annotations

import os
import pathlib
import zlib

from cumem import _core
from cumem.base.driver import driver_version
from cumem.base.version import __version__
from cumem.devices.device import Device


def result_path(unit: Device, name: str) -> pathlib.Path | None:
    """Return the path for figures of this machine, or None without a cache directory."""
    folder = _result_folder()
    if folder is None:
        return None
    mark = zlib.crc32(repr(sorted(machine_key(unit).items())).encode())
    return folder / f"{name}-{mark:08x}.json"


def has_results(name: str) -> bool:
    """Return whether figures of this name are kept, for any GPU.

    This does not check that they belong to this machine's GPU, which would start the
    driver.
    """
    folder = _result_folder()
    return folder is not None and any(folder.glob(f"{name}-*.json"))


def _result_folder() -> pathlib.Path | None:
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # the XDG specification says to ignore it then
        root = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(root):  # there is no home directory
        return None
    return pathlib.Path(root) / "cumem"


def machine_key(unit: Device) -> dict[str, str]:
    """Return everything that the figures depend on.

    The device's UUID is not part of it, because another card of the same model on the same
    link has the same figures.
    """
    return {
        "processor": _processor(),
        "threads": str(_core._processors()[0]),
        "device": unit.name,
        "link": _link(unit.pci_bus_id),
        "driver": str(driver_version()),
        "cumem": __version__,
    }


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "CPU part")):
            return line.partition(":")[2].strip()
    return os.uname().machine


def _link(bus_id: str) -> str:
    """Return the fastest state of the link, because an idle link reports a slower one."""
    root = f"/sys/bus/pci/devices/{bus_id.lower()}/max_link_"
    return f"{_read(root + 'speed').strip()} x{_read(root + 'width').strip()}"


def _read(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
