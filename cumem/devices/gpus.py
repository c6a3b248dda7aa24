# SPDX-License-Identifier: Apache-2.0
"""Finds out which GPUs a machine has, and whether the process sees and should use them.

If CUDA's driver does not open, cumem works on an emulated device or raises an error.
Neither is always right: a laptop without a GPU should run every example, and a training
job whose container was started without ``--gpus all`` should not compute for a day on an
emulated device. Two questions decide. They are answered from files, and never by CUDA:

- *Hardware*: is there an NVIDIA GPU in this machine?
- *Intent*: was this process meant to use it? A driver library, device nodes and
  ``NVIDIA_VISIBLE_DEVICES`` are signs of that.

If both answers are yes, a driver that does not open is an error. If either is no, the
device is emulated: images with CUDA's libraries run on machines without a GPU, and pods
that were given no GPU run on machines that have some. A user who hides all GPUs by
``CUDA_VISIBLE_DEVICES`` also gets emulation.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cumem.base.error_codes import CODES

__all__ = [
    *("Judgement", "gpus_hidden", "hardware", "intent", "judge_failure", "pci_gpus"),
    "visible",
]

#: The folder that holds ``proc``, ``sys``, ``dev`` and ``etc``; tests set another one.
ROOT = "/"

_NO_DEVICE, _INSUFFICIENT_DRIVER = 100, 35
#: Values of ``CUDA_VISIBLE_DEVICES`` with which people hide all GPUs on purpose.
_HIDING = ("", "-1", "none", "NoDevFiles")


def pci_gpus(root: str | Path = "/") -> list[str]:
    """Return the PCI addresses of NVIDIA's display and 3D controllers."""
    return sorted(
        folder.name
        for folder in Path(root).glob("sys/bus/pci/devices/*")
        if _read(folder / "vendor").strip() == "0x10de"
        and _read(folder / "class").startswith("0x03")
    )


def hardware(root: str | Path = "/") -> str | None:
    """Return a sign that this machine has an NVIDIA GPU, or None if there is no sign."""
    base = Path(root)
    if places := pci_gpus(base):
        return f"an NVIDIA GPU is on the PCI bus ({', '.join(places)})"
    for place in ("proc/driver/nvidia", "dev/dxg", "etc/nv_tegra_release"):
        if (base / place).exists():
            return f"/{place} exists"
    if nodes := _nodes(base):
        return f"/dev/{nodes[0]} exists"
    if "nvidia,tegra" in _read(base / "proc/device-tree/compatible"):
        return "this is an NVIDIA Tegra"
    return None


def intent(
    root: str | Path = "/",
    environment: Mapping[str, str] = os.environ,
    has_library: Callable[[], bool] | None = None,
) -> str | None:
    """Return a sign that this process was meant to use a GPU, or None without a sign."""
    if nodes := _nodes(Path(root)):
        return f"it has the device node /dev/{nodes[0]}"
    if (has_library or _has_library)():
        return "the loader finds the driver's library libcuda.so.1"
    said = environment.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    if said not in ("", "void", "none"):
        return f"NVIDIA_VISIBLE_DEVICES={said} asks for one"
    return None


def gpus_hidden(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` hides every GPU on purpose."""
    said = environment.get("CUDA_VISIBLE_DEVICES")
    return said is not None and said.strip() in _HIDING


def visible(said: str, uuids: Sequence[str]) -> tuple[list[int], str | None]:
    """Return the devices that a value of ``CUDA_VISIBLE_DEVICES`` shows, in its order.

    Parameters
    ----------
    said : str
        Numbers or beginnings of UUIDs, separated by commas.
    uuids : sequence of str
        The UUID of each device of the machine, such as ``"GPU-6d2f..."``.

    Returns
    -------
    devices : list of int
        The devices by CUDA's rules. The list ends before the first entry that names no
        device, or several devices, and it is empty if a device is named twice.
    doubt : str or None
        Why the number of devices is in doubt, for instance because CUDA's rules do not
        cover an entry; None if there is no doubt.

    Notes
    -----
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    chosen: list[int] = []
    numbers: list[bool] = []  # for each chosen device, whether a number named it
    doubt: str | None = None
    for entry in said.split(","):
        index, why = _named(entry, uuids)
        if index is not None:
            numbers.append(entry.strip(_BLANKS)[:1] in _DIGITS)
            if numbers[0] != numbers[-1]:
                why = "whether a number and a UUID mean the same GPU"
        doubt = doubt or why
        if index is None:
            break
        chosen.append(index)
    return chosen if len(set(chosen)) == len(chosen) else [], doubt


_DIGITS = tuple("0123456789")
_BLANKS = " \t"


def _named(entry: str, uuids: Sequence[str]) -> tuple[int | None, str | None]:
    """Return the device that an entry names, and a reason for doubt; either may be None."""
    name = entry.strip(_BLANKS)
    unclear = f"how CUDA reads {entry!r}"
    if name.startswith(_DIGITS):
        if name.strip("0123456789"):
            return None, unclear
        return (int(name) if int(name) < len(uuids) else None), None
    if name.upper().startswith("MIG"):
        return None, "parts of a GPU are not counted here"
    if not name.startswith("GPU-"):
        is_unclear = name.upper().startswith("GPU") or name.startswith("+")
        return None, unclear if is_unclear else None
    found = [i for i, uuid in enumerate(uuids) if uuid.startswith(name)]
    doubt = None if name == entry else unclear
    if not found and any(uuid.lower().startswith(name.lower()) for uuid in uuids):
        doubt = doubt or "whether capital letters matter"
    return (found[0] if len(found) == 1 else None), doubt


class Judgement(NamedTuple):
    """What to do after a driver did not open.

    The extension reads it by the names of the members.
    """

    may_emulate: bool  #: Whether to use the emulated device.
    why: str  #: The reason for emulation, or the error's text about cause and cure.


def judge_failure(
    code: int,
    root: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
    has_library: Callable[[], bool] | None = None,
) -> Judgement:
    """Decide for the extension what to do after a driver did not open.

    Parameters
    ----------
    code : int
        The CUDA error with which the driver failed to open.

    Returns
    -------
    Judgement
        Whether to emulate, and the reason.
    """
    base = ROOT if root is None else root
    library = has_library or _has_library
    if gpus_hidden(environment):
        value = environment["CUDA_VISIBLE_DEVICES"]
        return Judgement(True, f"CUDA_VISIBLE_DEVICES={value} hides all GPUs")
    there, meant = hardware(base), intent(base, environment, library)
    if there is None or meant is None:
        return Judgement(True, _reason(code, there))
    return Judgement(
        False,
        f"cumem does not emulate a GPU that this process was meant to use: {there}, and "
        f"{meant}, but {_cause(code, base, environment, library)}. "
        "`python -m cumem doctor` says what is wrong and how to repair it; set "
        "CUMEM_BACKEND=emulated to emulate on purpose",
    )


def _reason(code: int, there: str | None) -> str:
    """Return the reason why the device is emulated."""
    if code == _NO_DEVICE:
        return "the CUDA driver sees no device (cudaErrorNoDevice)"
    if code == _INSUFFICIENT_DRIVER:
        reason = "no CUDA driver was found, or it is too old"
        return f"{reason} (cudaErrorInsufficientDriver)"
    name = CODES[code][0] if code in CODES else f"error {code}"
    where = "" if there is not None else ", and this machine has no NVIDIA GPU"
    return f"the CUDA driver does not open ({name}){where}"


def _cause(
    code: int,
    root: str | Path,
    environment: Mapping[str, str],
    has_library: Callable[[], bool],
) -> str:
    """Return the most likely cause of a driver that does not open."""
    if not has_library():
        return (
            "the driver's library libcuda.so.1 is not found here (in a container: start "
            "it with --gpus all, and with the capability `compute`)"
        )
    base = Path(root)
    needs_nodes = not (base / "dev/dxg").exists() and pci_gpus(base)
    if needs_nodes and not _nodes(base):
        return (
            "the device nodes /dev/nvidia* are missing (in a container: start it with "
            "--gpus all)"
        )
    said = environment.get("CUDA_VISIBLE_DEVICES")
    if code == _NO_DEVICE and said is not None:
        return f"CUDA_VISIBLE_DEVICES={said} names no device that is there"
    if code == _NO_DEVICE:
        return "the driver sees no device"
    if code == _INSUFFICIENT_DRIVER:
        return "the driver is too old, or does not answer"
    return f"the driver does not open ({CODES[code][0] if code in CODES else code})"


def _nodes(base: Path) -> list[str]:
    """Return the names of the device nodes of NVIDIA's driver."""
    return sorted(node.name for node in base.glob("dev/nvidia*"))


def _has_library() -> bool:
    """Return whether the loader finds the driver's library, which the runtime loads."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
