# SPDX-License-Identifier: Apache-2.0
"""Reads versions, devices and the limits on host memory of this machine.

`collect` reads everything once into plain data, and `render` turns the data into text.
`about` answers the few questions on which programs base decisions.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import resource
import subprocess
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cumem.base import ranks
from cumem.base.answer import Answer
from cumem.base.control_groups import memory_limits
from cumem.base.driver import (
    backend,
    device_count,
    driver_version,
    emulation_reason,
    runtime_version,
)
from cumem.base.errors import CudaError
from cumem.base.places import found_in
from cumem.base.units import format_nbytes
from cumem.base.version import (
    BUILT_RUNTIME,
    OLDEST_DRIVER,
    TRACEMALLOC_DOMAIN,
    __version__,
)
from cumem.devices.device import Device
from cumem.pools.memory import get_limit

__all__ = ["about", "collect", "commit", "render", "save"]


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class About(Answer):
    """What cumem works on in this process, as `cumem.info.about` returns it.

    Attributes
    ----------
    backend : str
        ``"cuda"`` or ``"emulated"``.
    emulation_reason : str or None
        Why devices are emulated, or None on a real GPU.
    driver_version : tuple of int
        The newest CUDA version that the driver serves, such as ``(13, 0)``.
    runtime_version : tuple of int
        The CUDA version of the runtime library that is built in, such as ``(12, 9)``.
    oldest_driver_version : tuple of int
        The CUDA version of the oldest driver that this build works with.
    tracemalloc_domain : int
        The domain in which ``tracemalloc`` lists the memory of buffers:
        ``tracemalloc.DomainFilter(True, domain)`` keeps only that memory.

    Examples
    --------
    >>> isinstance(cumem.info.about(), cumem.types.About)
    True
    """

    backend: Literal["cuda", "emulated"]
    emulation_reason: str | None
    driver_version: tuple[int, int]
    runtime_version: tuple[int, int]
    oldest_driver_version: tuple[int, int]
    tracemalloc_domain: int


def about() -> About:
    """Return what cumem works on, for programs whose behaviour depends on it.

    `collect` reads much more about each device and the host, as plain data that can be
    saved.

    Returns
    -------
    About
        The backend and why it is emulated, versions of CUDA, and the domain of
        ``tracemalloc``.

    Raises
    ------
    CudaError
        If there is a driver but it cannot be opened.

    Notes
    -----
    **Blocks** while the driver is opened at its first use. It creates no context on a GPU.

    Examples
    --------
    >>> found = cumem.info.about()
    >>> found.driver_version >= found.oldest_driver_version
    True
    >>> (found.emulation_reason is None) == (cumem.backend() == "cuda")
    True
    """
    return About(
        backend(),
        emulation_reason(),
        driver_version(),
        runtime_version(),
        OLDEST_DRIVER,
        TRACEMALLOC_DOMAIN,
    )


def collect() -> dict[str, Any]:
    """Read versions, devices and limits.

    Returns
    -------
    dict
        Plain data that ``json`` can write: ``versions``, ``backend``, ``devices`` and
        ``machine``. Sizes are in bytes; a value that cannot be read is ``None``.

    Raises
    ------
    CudaError
        If there is a driver but it cannot be opened.

    Notes
    -----
    **Blocks** while the driver is opened, if nothing has opened it yet. It creates contexts
    on GPUs only where these are needed to read free memory.
    """
    return {
        "versions": versions() | {"driver": _dotted(driver_version())},
        "backend": {"name": backend(), "reason": emulation_reason()},
        "devices": [_device(index) for index in range(device_count())],
        "machine": machine(),
    }


def versions() -> dict[str, str | None]:
    """Return all versions that are known without a driver; the driver's own is None."""
    return {
        "cumem": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "driver": None,
        "runtime": _dotted(BUILT_RUNTIME),
        "oldest_driver": _dotted(OLDEST_DRIVER),
    }


def machine() -> dict[str, Any]:
    """Read what the operating system says about this host.

    Returns
    -------
    dict
        The processor, the cores that this process may use, memory, NUMA nodes,
        ``RLIMIT_MEMLOCK`` and the memory limit of the control group. Sizes are in bytes;
        a limit that is not set is ``None``.
    """
    memory = _meminfo()
    limit, used = _cgroup_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pinned = _pinned_limit()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "page_nbytes": os.sysconf("SC_PAGE_SIZE"),
        "memory_total_nbytes": memory.get("MemTotal"),
        "memory_available_nbytes": memory.get("MemAvailable"),
        "huge_pages": _selected("/sys/kernel/mm/transparent_hugepage/enabled"),
        "cgroup_limit_nbytes": limit,
        "cgroup_used_nbytes": used,
        "pinned_limit_nbytes": pinned,
        "pinned_limit_reason": _reason_of_limit(pinned),
        "memlock_soft_nbytes": _finite(soft),
        "memlock_hard_nbytes": _finite(hard),
        "numa_nodes": _numa_nodes(),
    }


def commit() -> str | None:
    """Return the commit of the checkout that holds this package, or None.

    An installed wheel does not know its commit; the variable `CUMEM_COMMIT` can supply it.
    """
    if given := os.environ.get("CUMEM_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None  # another project's checkout may contain the installed package
    commands = (
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no"],
    )
    try:
        head, changes = (
            subprocess.run(
                ["git", "-C", str(root), *command],
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            ).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("-dirty" if changes else "")


def save(results: dict[str, Any], path: str | Path) -> None:
    """Write results as one JSON object.

    The text is made before the file is opened, because opening empties the file. File names
    that are not valid text are written with backslash escapes.
    """
    text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    Path(path).write_bytes(text.encode("utf-8", "backslashreplace"))


def check_device(index: int) -> None:
    """Raise a ValueError if the command line names a device that does not exist."""
    count = device_count()
    if not 0 <= index < count:
        there = "there is 1" if count == 1 else f"there are {count or 'none'}"
        raise ValueError(f"there is no device {index}; {there}")


def check_writable(name: str) -> None:
    """Check that `save` will be able to write a file, before the work for it begins.

    A file that exists keeps its contents.

    Raises
    ------
    ValueError
        If the file cannot be written; the message has its name.
    """
    path = Path(name)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{name}: there is no such folder")
    is_new = not os.path.exists(path)
    try:
        # Opening a FIFO waits for a reader, which would notice when we close it again.
        if path.is_fifo():
            return
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{name} cannot be written: {error.strerror}") from error
    if is_new:
        os.unlink(os.path.realpath(path))  # a dangling link itself stays


def render(facts: dict[str, Any]) -> str:
    """Turn what `collect` read into aligned text.

    Parameters
    ----------
    facts : dict
        The answer of `collect`.

    Returns
    -------
    str
        Lines without a trailing newline.
    """
    versions, backend, host = facts["versions"], facts["backend"], facts["machine"]
    lines = [
        _row("cumem", versions["cumem"]),
        _row("Python, NumPy", f"{versions['python']}, {versions['numpy']}"),
        _row("CUDA runtime", f"{versions['runtime']} (built in)"),
        _row(
            "oldest driver", f"CUDA {versions['oldest_driver']} (served by this build)"
        ),
        _row("driver", f"CUDA {versions['driver']}" + _emulated_note(backend)),
        _row("backend", _backend_text(backend)),
    ]
    if not facts["devices"]:
        lines.append(_row("devices", "none"))
    for device in facts["devices"]:
        lines += ["", *_device_lines(device)]
    lines += ["", *_host_lines(host)]
    return "\n".join(lines)


def _device(index: int) -> dict[str, Any]:
    device = Device(index)
    free, total = device.memory_info()
    bus = device.pci_bus_id
    return {
        "index": index,
        "name": device.name,
        "uuid": device.uuid,
        "pci_bus_id": bus,
        "numa_node": None if device.emulated else _pci_numa_node(bus),
        "compute_capability": _dotted(device.compute_capability),
        "memory_total_nbytes": total,
        "memory_free_nbytes": free,
        "emulated": device.emulated,
        "attributes": dict(device.attributes()),
        "peers": [
            other
            for other in range(device_count())
            if other != index and device.can_access_peer(other)
        ],
    }


def _device_lines(device: dict[str, Any]) -> list[str]:
    attributes = device["attributes"]
    capability = device["compute_capability"]
    free, total = device["memory_free_nbytes"], device["memory_total_nbytes"]
    place = [part for part in (device["pci_bus_id"], device["uuid"]) if part]
    if device["numa_node"] is not None:
        place.append(f"NUMA node {device['numa_node']}")
    emulated = " (emulated)" if device["emulated"] else ""
    lines = [
        _row(f"device {device['index']}", device["name"] + emulated),
        _row("  where", ", ".join(place)),
        _row("  compute capability", capability),
        _row(
            "  memory",
            f"{format_nbytes(free)} free of {format_nbytes(total)}",
        ),
        _row("  copy engines", _engines(attributes.get("copy_engine_count"))),
        _row("  mapped memory", _yes(attributes.get("can_map_host_memory"))),
        _row("  managed memory", _managed(attributes)),
        _row("  maps on demand", _yes(attributes.get("virtual_memory_management"))),
        _row("  reads pageable", _yes(attributes.get("pageable_memory_access"))),
        _row("  register()", _register(attributes)),
    ]
    if device["peers"]:
        peers = ", ".join(str(peer) for peer in device["peers"])
        lines.append(_row("  peer access to", f"device {peers}"))
    return lines


def _host_lines(host: dict[str, Any]) -> list[str]:
    soft, hard = host["memlock_soft_nbytes"], host["memlock_hard_nbytes"]
    memlock = f"{_size(soft)} (hard {_size(hard)})" if soft != hard else _size(soft)
    nodes = host["numa_nodes"]
    lines = [
        _row("host", host["system"]),
        _row("  processor", f"{host['cpu']}, {host['cores']} cores usable"),
        _row(
            "  memory",
            f"{_size(host['memory_available_nbytes'], 'unknown')} available of "
            f"{_size(host['memory_total_nbytes'], 'unknown')}",
        ),
        _row("  cgroup limit", _cgroup_text(host)),
        _row(
            "  pinned limit",
            f"{_size(host['pinned_limit_nbytes'])} ({host['pinned_limit_reason']})",
        ),
        _row("  RLIMIT_MEMLOCK", f"{memlock}; the CUDA driver ignores it"),
        _row("  huge pages", host["huge_pages"] or "unknown"),
    ]
    if not nodes:
        return [*lines, _row("  NUMA nodes", "unknown")]
    for node in nodes:
        text = f"{_size(node['memory_total_nbytes'], 'unknown')}, cores {node['cores']}"
        lines.append(_row(f"  NUMA node {node['index']}", text))
    return lines


def _cgroup_text(host: dict[str, Any]) -> str:
    used = host["cgroup_used_nbytes"]
    text = _size(host["cgroup_limit_nbytes"], "none")
    return text if used is None else f"{text}, {format_nbytes(used)} used"


def _row(name: str, text: str) -> str:
    return f"{name:<22}{text}"


def _size(nbytes: int | None, missing: str = "unlimited") -> str:
    return missing if nbytes is None else format_nbytes(nbytes)


def _yes(value: int | None) -> str:
    return "unknown" if value is None else ("yes" if value else "no")


def _engines(count: int | None) -> str:
    if count is None:
        return "unknown"
    both = "both directions at once" if count > 1 else "one direction at a time"
    return f"{count} ({both})"


def _managed(attributes: dict[str, int]) -> str:
    if not attributes.get("managed_memory"):
        return "no"
    if not attributes.get("concurrent_managed_access"):
        return "yes, but not while the host uses it; no prefetch"
    return "yes, host and device at the same time; prefetch works"


def _register(attributes: dict[str, int]) -> str:
    if not attributes.get("host_register_supported"):
        return "no"
    read_only = attributes.get("host_register_read_only")
    return "yes, read-only memory too" if read_only else "yes, writable memory only"


def _emulated_note(backend: dict[str, Any]) -> str:
    return " (emulated)" if backend["name"] == "emulated" else ""


def _backend_text(backend: dict[str, Any]) -> str:
    if backend["name"] != "emulated":
        return str(backend["name"])
    return f"emulated: {backend['reason'] or 'asked for by CUMEM_BACKEND=emulated'}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(str(part) for part in version)


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def read_text(path: str | Path) -> str | None:
    """Return the stripped text of a small file of the kernel, or None without one."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _selected(path: str) -> str | None:
    """Return the bracketed word of a sysfs choice, such as ``always [madvise] never``."""
    match = re.search(r"\[(\w+)\]", read_text(path) or "")
    return match[1] if match else None


def _kib_table(text: str) -> dict[str, int]:
    """Return lines such as ``MemTotal:  24689764 kB`` as bytes by name."""
    found = re.findall(r"(\w+):\s+(\d+) kB", text)
    return {name: int(number) * 1024 for name, number in found}


def _meminfo() -> dict[str, int]:
    return _kib_table(read_text("/proc/meminfo") or "")


def _cpu_name() -> str:
    match = re.search(
        r"^model name\s*:\s*(.+)$", read_text("/proc/cpuinfo") or "", re.M
    )
    return match[1] if match else platform.processor() or platform.machine()


def _pinned_limit() -> int | None:
    """Return the limit of pinned memory; None without a limit or a working driver."""
    try:
        return get_limit("pinned")
    except CudaError:
        return None


def _reason_of_limit(pinned: int | None) -> str:
    """Return where the limit of pinned memory comes from."""
    share = ranks.at_opening
    is_default = share is not None and pinned == share.default_limit
    return share.reason if share is not None and is_default else "cumem.set_limit"


def _numa_nodes() -> list[dict[str, Any]]:
    nodes = []
    for folder in Path("/sys/devices/system/node").glob("node[0-9]*"):
        memory = _kib_table(read_text(folder / "meminfo") or "")
        nodes.append(
            {
                "index": int(folder.name.removeprefix("node")),
                "memory_total_nbytes": memory.get("MemTotal"),
                "cores": read_text(folder / "cpulist") or "none",
            }
        )
    return sorted(nodes, key=lambda node: int(node["index"]))


def _pci_numa_node(bus: str) -> int | None:
    text = read_text(Path("/sys/bus/pci/devices") / bus.lower() / "numa_node")
    return int(text) if text is not None and text.isdecimal() else None


def _cgroup_memory() -> tuple[int | None, int | None]:
    """Return the lowest memory limit of a control group above this process, and its use."""
    found = memory_limits()
    used = next((each.used for each in found if each.used is not None), None)
    limits = [(each.limit, each.used) for each in found if each.limit is not None]
    return min(limits, key=lambda each: each[0], default=(None, used))
