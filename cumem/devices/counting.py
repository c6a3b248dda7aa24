# SPDX-License-Identifier: Apache-2.0
"""Counts the devices that CUDA would show, without starting its driver in this process.

After a process has started the driver, its forked children cannot use a GPU. So asking how
many devices there are must not start it. NVML counts GPUs without CUDA's driver, and
`CUDA_VISIBLE_DEVICES` says how many of them are shown. If these two leave any doubt,
another process starts the driver and reports its answer. NVML is only asked how many
GPUs there are, since it does not know which GPU CUDA means by an index.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cumem.devices.gpus import visible

_NO_DEVICE = 100  # cudaErrorNoDevice
_UNKNOWN = 999  # cudaErrorUnknown

#: How long another process may take to start the driver. On a large machine where
#: nothing keeps the driver loaded, this can take seconds for each GPU.
_SECONDS = 300

#: The program of that process, which prints the driver's code and its count.
_SCRIPT = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
print("cumem:", code, count.value)
"""


class _UnknownCountError(Exception):
    """The count is not certain, because CUDA might count differently."""


class Counted(NamedTuple):
    """The number of devices, which the extension reads by the names of the members."""

    code: int  #: A code of CUDA, which is 0 if all is well.
    device_count: int  #: -1 if only starting the driver in this process can tell.


def count_devices() -> Counted:
    """Return the number of devices that CUDA would show."""
    try:
        said = os.environ.get("CUDA_VISIBLE_DEVICES")
        return Counted(0, count_visible(said, _list_uuids()))
    except _UnknownCountError:
        return _ask_other_process()


# -- CUDA_VISIBLE_DEVICES --------------------------------------------------------------


def count_visible(text: str | None, uuids: Sequence[str]) -> int:
    """Return how many of the GPUs with these UUIDs the variable shows.

    Raises
    ------
    _UnknownCountError
        If the count depends on which GPU a number means, or on rules that CUDA does not
        document.
    """
    if text is None:
        return len(uuids)
    shown, doubt = visible(text, uuids)
    if doubt is not None:
        raise _UnknownCountError(doubt)
    return len(shown)


# -- NVML ------------------------------------------------------------------------------

_NOT_SUPPORTED, _FUNCTION_NOT_FOUND = 3, 13


class _Fabric(ctypes.Structure):
    """``nvmlGpuFabricInfo_t``."""

    _fields_ = (
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def _list_uuids() -> list[str]:
    """Return the UUIDs of all GPUs that this process may open.

    Raises
    ------
    _UnknownCountError
        If CUDA may see other GPUs than NVML. This is so if GPUs are partitioned, shared
        through a server or cannot be opened, or if NVML does not answer.
    """
    server = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    for path in ("/dev/dxg", "/dev/nvhost-gpu", "/dev/nvmap", server):
        if os.path.exists(path):
            raise _UnknownCountError(f"{path} means rules of its own")
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        _check(nvml.nvmlInit_v2())
    except (OSError, AttributeError):
        raise _UnknownCountError("there is no NVML") from None
    try:
        return _ask_nvml(nvml)
    except AttributeError:
        raise _UnknownCountError("NVML is too old") from None
    finally:
        nvml.nvmlShutdown()


def _check(code: int) -> None:
    if code != 0:
        raise _UnknownCountError(f"NVML answers {code}")


def _ask_nvml(nvml: Any) -> list[str]:
    count = ctypes.c_uint()
    _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    if count.value > 0 and not _can_open("/dev/nvidia-uvm"):
        raise _UnknownCountError("/dev/nvidia-uvm cannot be opened")
    uuids = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        _check(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)))
        mode, pending, minor = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        code = nvml.nvmlDeviceGetMigMode(
            device, ctypes.byref(mode), ctypes.byref(pending)
        )
        if code != _NOT_SUPPORTED:
            _check(code)
            if mode.value or pending.value:
                raise _UnknownCountError("a GPU is in parts")
        _check(nvml.nvmlDeviceGetMinorNumber(device, ctypes.byref(minor)))
        if not _can_open(f"/dev/nvidia{minor.value}"):
            raise _UnknownCountError(f"/dev/nvidia{minor.value} cannot be opened")
        _check_fabric(nvml, device)
        text = ctypes.create_string_buffer(96)
        _check(nvml.nvmlDeviceGetUUID(device, text, len(text)))
        uuids.append(text.value.decode("ascii", "replace"))
    return uuids


def _can_open(path: str) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def _check_fabric(nvml: Any, device: ctypes.c_void_p) -> None:
    """Raise an _UnknownCountError if NVSwitch is not ready, as CUDA cannot start then."""
    if not os.path.isdir("/proc/driver/nvidia-nvswitch/devices"):
        return
    if not any(Path("/proc/driver/nvidia-nvswitch/devices").iterdir()):
        return
    fabric = _Fabric()
    _check(nvml.nvmlDeviceGetGpuFabricInfo(device, ctypes.byref(fabric)))
    if fabric.state != 3 or fabric.status != 0:  # state 3 is "completed"
        raise _UnknownCountError("the GPUs are not joined yet")


# -- the driver ------------------------------------------------------------------------


def _ask_other_process() -> Counted:
    """Ask a new interpreter, which shares only its environment with this process."""
    if getattr(sys, "frozen", False) or not _is_python(sys.executable):
        return Counted(0, -1)  # a frozen program must not be run a second time
    command = [sys.executable, "-I", "-S", "-c", _SCRIPT]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return Counted(0, -1)
    for line in done.stdout.decode("ascii", "replace").splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "cumem:":
            code, count = int(words[1]), int(words[2])
            return Counted(_NO_DEVICE if code == 0 and count == 0 else code, count)
    return Counted(_UNKNOWN, 0)  # the driver ended that process, and would end this one


def _is_python(path: str | None) -> bool:
    return bool(path) and Path(str(path)).name.startswith(("python", "pypy"))
