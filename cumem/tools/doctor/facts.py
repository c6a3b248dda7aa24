# SPDX-License-Identifier: Apache-2.0
"""Collects the facts that the doctor judges, beyond those of `cumem.info`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import statistics
from pathlib import Path
from typing import Any, Final

from cumem import _core
from cumem.base import ranks, variables
from cumem.base.control_groups import folders
from cumem.base.driver import driver_version
from cumem.base.errors import CudaError, OutOfMemoryError
from cumem.base.version import OLDEST_DRIVER
from cumem.devices import device as device_module
from cumem.devices.gpus import pci_gpus
from cumem.pools.out_of_memory import is_refused
from cumem.pools.pool import Pool
from cumem.tools import info
from cumem.tools.measuring import raw_copies
from cumem.transfers.tuning import configure

__all__ = ["collect"]

_ENVIRONMENT: Final = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUMEM_BACKEND"),
    *("CUMEM_NVTX", "NVTX_INJECTION64_PATH"),
)
_PROBE_NBYTES: Final = 64 << 20  # bytes of the page-locked and of the device memory
_PROBE_SECONDS: Final = 0.8  # the time that the copies of all devices take together
#: Names of distributions, and the library that each belongs to.
_FRAMEWORKS: Final = {
    "torch": "torch",
    "cupy-cuda11x": "cupy",
    "cupy-cuda12x": "cupy",
    "cupy-cuda13x": "cupy",
    "cupy": "cupy",
    "jax-cuda12-plugin": "jax",
    "jax-cuda13-plugin": "jax",
    "jax": "jax",
    "numba-cuda": "numba-cuda",  # a library of its own, with other versions than numba's
    "numba": "numba",
    "rmm-cu12": "rmm",
    "rmm-cu13": "rmm",
    "cuda-core": "cuda.core",
    "tensorflow": "tensorflow",
}


def collect(*, measure: bool = True, root: str | Path = "/") -> dict[str, Any]:
    """Read everything that `cumem.tools.doctor.diagnose` judges.

    Parameters
    ----------
    measure : bool, default True
        Whether to make copies for a second, to measure the link of each real GPU.
    root : path, default "/"
        The folder of ``proc``, ``sys`` and ``dev``, which tests replace.

    Returns
    -------
    dict
        Plain data: the answer of `cumem.tools.info.collect`, and ``environment``,
        ``visible_at_opening``, ``misspelt``, ``tool_listens``, ``kernel``, ``container``,
        ``ranks``, ``page_locking``, ``calls``, ``copies`` and ``frameworks``. Each of
        ``devices`` also has ``link``, ``iommu`` and ``bandwidth``. If the driver cannot be
        opened, the name of the backend is None and its reason is the driver's error.

    Notes
    -----
    **Blocks** while it measures, for about a second. It uses 128 MiB at a time for this,
    and gives them back.
    """
    base = Path(root)
    facts = _from_info()
    facts["environment"] = {name: os.environ.get(name) for name in _ENVIRONMENT}
    facts["visible_at_opening"] = device_module.opened_with
    facts["misspelt"] = variables.misspelt()
    facts["tool_listens"] = _core._nvtx_listens()
    facts["kernel"] = kernel(base)
    facts["container"] = _container(base)
    facts["ranks"] = _ranks()
    is_real = facts["backend"]["name"] == "cuda"
    count = sum(not device["emulated"] for device in facts["devices"])
    for device in facts["devices"]:
        bus = device["pci_bus_id"]
        device["bandwidth"] = None
        if is_real and measure:
            device["bandwidth"] = bandwidth(device["index"], _PROBE_SECONDS / count)
        # An idle link is slower, so its speed is read just after the copies.
        device["link"] = link(base, bus) if is_real else None
        device["iommu"] = _iommu_type(base, bus) if is_real else None
    facts["page_locking"] = None
    if measure and facts["devices"]:
        facts["page_locking"] = page_locking()
    facts["calls"] = _calls(facts)
    facts["copies"] = _copies()
    facts["frameworks"] = frameworks()
    return facts


def _from_info() -> dict[str, Any]:
    try:
        return info.collect()
    except CudaError as error:
        return {
            "versions": info.versions(),
            "backend": {"name": None, "reason": str(error)},
            "devices": [],
            "machine": info.machine(),
        }


# -- the driver and its devices, as the kernel reports them ----------------------------


def kernel(base: Path) -> dict[str, Any]:
    """Return the driver, GPUs and device nodes, which the kernel knows without CUDA."""
    version = info.read_text(base / "proc/driver/nvidia/version") or ""
    module = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", version)
    nodes = [base / f"dev/nvidia{name}" for name in ("ctl", "-uvm")]
    nodes += sorted(base.glob("dev/nvidia[0-9]*"))
    return {
        "module": module[1] if module else None,
        "gpus": pci_gpus(base),
        "mig_capable": any(base.glob("proc/driver/nvidia/capabilities/gpu*/mig")),
        "mig_instances": len(
            list(base.glob("proc/driver/nvidia/capabilities/gpu*/mig/gi*"))
        ),
        "nodes": {f"/{node.relative_to(base)}": _node_state(node) for node in nodes},
        "is_wsl": (base / "dev/dxg").exists(),
        "libraries": _mapped_drivers(base),
    }


def _node_state(node: Path) -> str:
    if not node.exists():
        return "missing"
    return "ok" if os.access(node, os.R_OK | os.W_OK) else "forbidden"


def _mapped_drivers(base: Path) -> list[str]:
    """Return the files of the CUDA driver that this process has loaded."""
    maps = info.read_text(base / "proc/self/maps") or ""
    return sorted(set(re.findall(r"\s(/\S*/libcuda\.so\S*)$", maps, re.M)))


def link(base: Path, bus: str) -> dict[str, Any]:
    """Return the present and the largest GT/s and lanes of a link; None if unknown."""
    folder = base / "sys/bus/pci/devices" / bus.lower()
    found: dict[str, Any] = {}
    for when in ("current", "max"):
        speed = info.read_text(folder / f"{when}_link_speed") or ""
        width = info.read_text(folder / f"{when}_link_width") or ""
        number = re.match(r"\d+(?:\.\d+)?(?= GT/s)", speed)
        lanes = int(width) if width.isdecimal() and 1 <= int(width) <= 32 else None
        found[f"{when}_gtps"] = float(number[0]) if number else None
        found[f"{when}_lanes"] = lanes
    return found


def _iommu_type(base: Path, bus: str) -> str | None:
    """Return the type of the device's IOMMU group, such as "identity" or "DMA".

    The answer is None if the device is in no group, and "unknown" if the kernel's files
    cannot be read.
    """
    folder = base / "sys/bus/pci/devices" / bus.lower()
    return info.read_text(folder / "iommu_group/type") if folder.exists() else "unknown"


# -- measurements ----------------------------------------------------------------------


def bandwidth(
    index: int, seconds: float, nbytes: int = _PROBE_NBYTES
) -> dict[str, Any]:
    """Measure page-locked copies to a device and from it, in GB/s, or say why it failed.

    The memory comes from separate pools, so that none of it stays reserved.
    """
    with contextlib.ExitStack() as opened:
        try:
            pools = [Pool(kind, device=index) for kind in ("pinned", "device")]
            for pool in pools:
                opened.callback(pool.close)
            return _rates(index, seconds, nbytes, *pools)
        except CudaError as error:
            is_short = isinstance(error, OutOfMemoryError)
            said = str(error).splitlines()[:2]  # these say what failed, and the size
            text = "; ".join(line.strip() for line in said)
            return {"error": text, "is_short": is_short}


def page_locking(nbytes: int = _PROBE_NBYTES) -> dict[str, Any]:
    """Try to page-lock `nbytes` in a separate pool; return the reason if this fails."""
    with contextlib.closing(Pool("pinned")) as pool:
        try:
            _core.empty_pinned(nbytes, "u1", pool=pool)
        except CudaError as error:
            reason = str(error).splitlines()[0].partition(";")[0]
            refused = is_refused(error)
            return {"nbytes": nbytes, "error": reason, "is_refused": refused}
    return {"nbytes": nbytes, "error": None, "is_refused": False}


def _rates(
    index: int, seconds: float, nbytes: int, pinned: Pool, device: Pool
) -> dict[str, float]:
    stream = _core.Stream(device=index)
    host = _core.empty_pinned(nbytes, "u1", pool=pinned)
    there = _core.empty_device(nbytes, "u1", stream=stream, pool=device)
    up = raw_copies(there, host, stream, seconds / 2)
    down = raw_copies(host, there, stream, seconds / 2)
    return {
        "up_gbps": nbytes / statistics.median(up) / 1e9,
        "down_gbps": nbytes / statistics.median(down) / 1e9,
    }


# -- the process's surroundings --------------------------------------------------------


def _container(base: Path) -> dict[str, Any]:
    try:
        shm = os.statvfs(base / "dev/shm")
        shm_nbytes: int | None = shm.f_frsize * shm.f_blocks
        shm_free_nbytes: int | None = shm.f_frsize * shm.f_bavail
    except OSError:
        shm_nbytes = shm_free_nbytes = None
    status = info.read_text(base / "proc/self/status") or ""
    thp = re.search(r"^THP_enabled:\s*(\d)", status, re.M)
    return {
        "available_nbytes": _core._host_memory().available_nbytes,
        "shows_cgroups": any(map(os.path.isdir, folders("memory"))),
        "shows_nodes": (base / "sys/devices/system/cpu").is_dir(),
        "has_huge_pages": thp is None or thp[1] != "0",
        "shm_nbytes": shm_nbytes,
        "shm_free_nbytes": shm_free_nbytes,
        "cpus": sorted(os.sched_getaffinity(0)),
        "usable_cpus": _core._processors()[0],
        "machine_cpus": os.cpu_count(),
    }


def _ranks() -> dict[str, Any]:
    """Return what launchers say about the ranks of this host."""
    count, launcher, wrong = ranks.read_ranks(os.environ)
    return {
        "count": count,
        "launcher": None if launcher is None else launcher.name,
        "variable": None if launcher is None else launcher.count_variable,
        "wrong": wrong,
    }


# -- fast paths ------------------------------------------------------------------------


def _calls(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the calls that older drivers may lack, and whether this driver has them."""
    if facts["versions"]["driver"] is None:
        return []
    driver = driver_version()
    newer = [
        (cuda_name, (oldest // 1000, oldest % 1000 // 10))
        for cuda_name, oldest in _core._oldest_drivers().items()
        if oldest > 1000 * OLDEST_DRIVER[0]
    ]
    return [
        {"name": name, "since": f"{since[0]}.{since[1]}", "there": driver >= since}
        for name, since in newer
    ]


def _copies() -> dict[str, Any]:
    """Return how ordinary memory is copied to a device now."""
    now = configure()
    return {
        "threads": now.threads,
        "staged_up_nbytes": _core._read_tuning(True)["staged_up_nbytes"].now,
        "ring_nbytes": now.ring_nbytes,
        "sources": dict(now.sources),
    }


# -- frameworks ------------------------------------------------------------------------


def frameworks() -> list[dict[str, Any]]:
    """Return the installed frameworks, by reading their files, since imports take seconds.

    ``cuda`` is the version of CUDA that a framework was built for, "none" for a build
    without CUDA, or None if its files do not say.
    """
    found: dict[str, dict[str, Any]] = {}
    for distribution, name in _FRAMEWORKS.items():
        try:
            there = importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        cuda = _built_for(distribution, there)
        if name not in found or (found[name]["cuda"] is None and cuda is not None):
            versions = there.metadata.get_all("Version") or ["of unknown version"]
            found[name] = {"name": name, "version": versions[0], "cuda": cuda}
    return list(found.values())


def _built_for(distribution: str, there: importlib.metadata.Distribution) -> str | None:
    if in_name := re.search(r"-cu(?:da)?(\d\d)x?\b", distribution):
        return in_name[1]
    if distribution == "torch":
        text = info.read_text(Path(str(there.locate_file("torch/version.py")))) or ""
        said = re.search(r"^cuda(?::[^=]*)?\s*=\s*(?:'([\d.]+)'|None)", text, re.M)
        return None if said is None else said[1] or "none"
    if distribution == "jax":  # a plugin for CUDA would come earlier in the list
        return "none"
    for need in there.requires or ():
        if pinned := re.match(r"nvidia-cuda-runtime(?:-cu\d\d)?==(\d+\.\d+)", need):
            return pinned[1]
    return None
