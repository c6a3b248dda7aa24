# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks, which are functions that turn facts into findings.

A check reads nothing itself, so that it can be tested with the facts of any machine.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

from cumem.base.answer import Answer
from cumem.base.units import format_count, format_nbytes
from cumem.base.variables import advice, read_switch
from cumem.devices.gpus import gpus_hidden
from cumem.pools.out_of_memory import advise_on_host

__all__ = ["CHECKS", "Finding"]

_GIB: Final = 1 << 30
#: The GB/s of one lane by its GT/s, after line coding but before protocol overhead.
_LANE_GBPS: Final = {
    2.5: 0.25,
    5.0: 0.5,
    8.0: 0.985,
    16.0: 1.969,
    32.0: 3.938,
    64.0: 7.563,
}
_GENERATIONS: Final = {gtps: i for i, gtps in enumerate(_LANE_GBPS, 1)}
#: The fraction of a link's rate that long copies reach: 55.4 of 63.0 GB/s on an H200.
_USABLE: Final = 0.87
_WELL: Final = 0.8  # a link is "ok" from this fraction of the usable rate on
_BADLY: Final = 0.5  # a link is a "problem" below this fraction of it
#: The first driver of NVIDIA's that serves CUDA 12.0.
_OLDEST_MODULE: Final = 525
_FEW_CPUS: Final = 4
_SMALL_SHM: Final = _GIB
#: The oldest version of a framework that can use the integration of this name.
ENABLE_CALLS: Final = {"torch": ((2, 11), "cumem.integrations.torch.enable()")}

Status = Literal["ok", "note", "problem"]


@dataclasses.dataclass(frozen=True)
class Finding(Answer):
    """One thing that the doctor has examined.

    Attributes
    ----------
    group : str
        ``"driver"``, ``"device"``, ``"host"``, ``"fast paths"`` or ``"frameworks"``.
    check : str
        What was examined, such as ``"memlock"`` or ``"link"``; these names do not change.
    status : str
        ``"ok"``, ``"note"`` (it works, but is slow or restricted) or ``"problem"``.
    text : str
        What was found, as a sentence.
    cure : str or None
        What to do; None if there is nothing to do.
    device : int or None
        The device that the finding is about; None for the machine or the process.
    values : Mapping of str to number, str or None
        The values that were read or measured, with the unit in the name.
    """

    group: str
    check: str
    status: Status
    text: str
    cure: str | None = None
    device: int | None = None
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Facts = Mapping[str, Any]
Findings = Iterator[Finding]


# -- driver ----------------------------------------------------------------------------


def check_driver(facts: Facts) -> Findings:
    """Check that there is a driver, that it opens, and that it is new enough."""
    backend, versions, kernel = facts["backend"], facts["versions"], facts["kernel"]
    module = kernel["module"]
    values = {"driver": versions["driver"], "module": module}

    def found(status: Status, text: str, cure: str | None = None) -> Finding:
        return Finding("driver", "driver", status, text, cure, values=values)

    if backend["name"] == "cuda":
        name = "" if module is None else f" (NVIDIA {module})"
        yield found(
            "ok",
            f"the driver serves CUDA {versions['driver']}{name}; cumem carries the "
            f"runtime of {versions['runtime']} and needs {versions['oldest_driver']}",
        )
    elif (
        backend["name"] is None
        and not (kernel["gpus"] or module or kernel["is_wsl"])
        and facts["environment"]["CUMEM_BACKEND"] == "cuda"
    ):
        yield found(
            "problem",
            f"CUMEM_BACKEND=cuda asks for a GPU, and there is none here: "
            f"{backend['reason']}",
            "unset CUMEM_BACKEND to work on the emulated device",
        )
    elif backend["name"] is None:
        yield _no_gpu(facts, found)
    elif "asked for" in backend["reason"]:
        yield found(
            "note",
            "the device is emulated, as CUMEM_BACKEND=emulated asks: results are right, "
            "timings mean nothing",
            "unset CUMEM_BACKEND to use a GPU",
        )
    else:
        yield _no_gpu(facts, found)


def _no_gpu(facts: Facts, found: Callable[..., Finding]) -> Finding:
    """Say why no GPU is used although nobody asked for the emulated device."""
    kernel, reason = facts["kernel"], facts["backend"]["reason"]
    module = kernel["module"]
    is_emulated = facts["backend"]["name"] is not None
    if is_emulated and not (kernel["gpus"] or module or kernel["is_wsl"]):
        return found(
            "note",
            "there is no NVIDIA GPU in this machine and no driver: the device is emulated, "
            "results are right, timings mean nothing",
            "nothing, to develop and test; for a GPU's speed run where one is",
        )
    if _hidden(facts) or _misnamed(facts):
        return found(
            "note",
            "all GPUs are hidden from this process: the device is emulated",
            "see the finding on visibility",
        )
    if module is None and kernel["gpus"]:
        return found(
            "problem",
            f"an NVIDIA GPU is on the bus ({', '.join(kernel['gpus'])}), but its driver is "
            "not loaded",
            "install NVIDIA's driver, or load it: modprobe nvidia",
        )
    if module is not None and int(module.split(".")[0]) < _OLDEST_MODULE:
        return found(
            "problem",
            f"the driver is too old: NVIDIA {module} does not serve CUDA "
            f"{facts['versions']['oldest_driver']}",
            f"install a driver from {_OLDEST_MODULE} on",
        )
    has_nodes = any(state == "ok" for state in kernel["nodes"].values())
    if (kernel["gpus"] or module is not None) and not has_nodes:
        return found(
            "problem",
            "the machine has a GPU and a driver, but this process has no device nodes of "
            "them, as in a container that was given none",
            "start the container with --gpus all (NVIDIA's container toolkit)",
        )
    if not is_emulated:
        return found(
            "problem",
            f"the driver is there but does not open: {reason}",
            "run nvidia-smi: if that fails too, reinstall the driver or restart the "
            "machine; in a container: --gpus all gives it libcuda.so.1 too",
        )
    return found(
        "problem",
        f"the machine has an NVIDIA driver, but {reason}",
        "run nvidia-smi here; in a container: --gpus all gives it libcuda.so.1 too",
    )


def _hidden(facts: Facts) -> bool:
    env = facts["environment"]
    return gpus_hidden(env) or env["NVIDIA_VISIBLE_DEVICES"] in ("void", "none")


def _misnamed(facts: Facts) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES names more devices than a working driver sees."""
    said, backend = facts["environment"]["CUDA_VISIBLE_DEVICES"], facts["backend"]
    works = backend["name"] == "cuda" or (
        "cudaErrorNoDevice" in backend["reason"]
        and "ok" in facts["kernel"]["nodes"].values()
    )
    return works and len(_names(said)) > len(_real(facts))


def _names(said: str | None) -> list[str]:
    return [part for part in (said or "").split(",") if part.strip()]


def check_libraries(facts: Facts) -> Findings:
    """Check that all libraries of the process use the same real driver library."""
    paths = facts["kernel"]["libraries"]
    values = {"libraries": list(paths)}
    if any("/stubs/" in path for path in paths):
        yield Finding(
            "driver",
            "library",
            "problem",
            f"libcuda is the toolkit's stub, which only serves to link: {paths[0]}",
            "take the folder stubs out of LD_LIBRARY_PATH",
            values=values,
        )
    # The driver of WSL consists of two files, both of which are loaded there.
    elif len(paths) > 1 and not facts["kernel"]["is_wsl"]:
        yield Finding(
            "driver",
            "library",
            "problem",
            f"two drivers are loaded in this process: {' and '.join(paths)}",
            "keep one: look at LD_LIBRARY_PATH and LD_PRELOAD",
            values=values,
        )
    elif paths:
        yield Finding(
            "driver",
            "library",
            "ok",
            f"every library of this process uses {paths[0]}",
            values=values,
        )


def check_visibility(facts: Facts) -> Findings:
    """Check that the process sees the GPUs that its variables name."""
    said = facts["environment"]["CUDA_VISIBLE_DEVICES"]
    nvidia = facts["environment"]["NVIDIA_VISIBLE_DEVICES"]
    gpus = facts["kernel"]["gpus"]
    there = _real(facts)
    values = {
        "CUDA_VISIBLE_DEVICES": said,
        "NVIDIA_VISIBLE_DEVICES": nvidia,
        "devices": len(there),
        "gpus": len(gpus),
    }

    def found(status: Status, text: str, cure: str | None = None) -> Finding:
        return Finding("driver", "visibility", status, text, cure, values=values)

    at_opening = facts["visible_at_opening"]
    if said != at_opening:
        before = "unset" if at_opening is None else f"'{at_opening}'"
        now = "unset" if said is None else f"'{said}'"
        yield found(
            "problem",
            f"CUDA_VISIBLE_DEVICES was {before} when the devices were opened and is {now} "
            "now: a change that comes later has no effect",
            "set it before the program starts, or before the first use of a device",
        )
    elif _hidden(facts):
        by_nvidia = nvidia in ("void", "none")
        name = "NVIDIA_VISIBLE_DEVICES" if by_nvidia else "CUDA_VISIBLE_DEVICES"
        value = nvidia if by_nvidia else said
        cure = "start the container with --gpus all" if by_nvidia else f"unset {name}"
        yield found("note", f"{name}={value} hides all GPUs", cure)
    elif _misnamed(facts):
        yield found(
            "problem",
            f"CUDA_VISIBLE_DEVICES={said} names "
            f"{format_count(len(_names(said)), 'device')} and CUDA sees "
            f"{len(there) or 'none'}: it stops at the first that does not exist "
            "or comes twice",
            "name devices that nvidia-smi -L lists, each once",
        )
    elif there and said is not None:
        yield found(
            "ok",
            f"CUDA_VISIBLE_DEVICES={said}: {format_count(len(there), 'device')} visible",
        )
    elif there:
        many = f" of {len(gpus)} on the bus" if len(gpus) > len(there) else ""
        yield found("ok", f"{format_count(len(there), 'device')}{many} visible")


def check_nodes(facts: Facts) -> Findings:
    """Check that the process may open the device nodes."""
    kernel = facts["kernel"]
    nodes = kernel["nodes"]
    if kernel["module"] is None or "ok" not in nodes.values():
        forbidden = [name for name, state in nodes.items() if state == "forbidden"]
        if not forbidden:
            return  # check_driver says what is missing
    bad = {name: state for name, state in nodes.items() if state != "ok"}
    if not bad:
        text = "this process may use the device nodes"
        yield Finding("driver", "nodes", "ok", text, values=nodes)
        return
    if "/dev/nvidia-uvm" in bad and bad["/dev/nvidia-uvm"] == "missing":
        cure = "as root: nvidia-modprobe -u -c 0; in a container: --gpus all"
    else:
        cure = "add the user to the group that owns them; in a container: --gpus all"
    works = facts["backend"]["name"] == "cuda"
    said = ", ".join(f"{name} is {state}" for name, state in bad.items())
    yield Finding(
        "driver", "nodes", "note" if works else "problem", said, cure, values=nodes
    )


def check_mig(facts: Facts) -> Findings:
    """Report whether a device is a slice of a GPU."""
    kernel = facts["kernel"]
    slices = [device for device in facts["devices"] if " MIG " in device["name"]]
    for device in slices:
        yield Finding(
            "driver",
            "mig",
            "note",
            f"device {device['index']} is a MIG slice ({device['name']}): it has a part of "
            "the memory and the copy engines, and no peers",
            "for the whole GPU: nvidia-smi -i N -mig 0, as root",
            device["index"],
        )
    if not slices and facts["backend"]["name"] == "cuda":
        yield Finding("driver", "mig", "ok", "no device is a MIG slice")
    elif (
        kernel["mig_capable"]
        and kernel["mig_instances"] == 0
        and kernel["module"]
        and facts["backend"]["reason"]
        and not _hidden(facts)
    ):
        yield Finding(
            "driver",
            "mig",
            "note",
            "a GPU can be in MIG mode, where CUDA sees none before a slice is made",
            "nvidia-smi shows the mode; make slices with nvidia-smi mig -cgi … -C, or "
            "leave the mode with nvidia-smi -mig 0",
        )


# -- devices ---------------------------------------------------------------------------


def _real(facts: Facts) -> list[Mapping[str, Any]]:
    return [device for device in facts["devices"] if not device["emulated"]]


def check_emulated(facts: Facts) -> Findings:
    """Report that the findings about devices are not those of a GPU."""
    if facts["devices"] and not _real(facts):
        yield Finding(
            "device",
            "emulated",
            "note",
            f"{format_count(len(facts['devices']), 'emulated device')}: link, bandwidth "
            "and IOMMU are not looked at, and what follows is the emulation's",
            "run on a machine with a GPU for findings about one",
        )
    elif not facts["devices"]:
        yield Finding(
            "device",
            "devices",
            "note",
            "there is no device",
            "see the driver's findings",
        )


def check_link(facts: Facts) -> Findings:
    """Check that each GPU's link runs with all its lanes at full speed."""
    for device in _real(facts):
        link, index = reported_link(device), device["index"]
        now, most = (
            (link[f"{when}_gtps"], link[f"{when}_lanes"]) for when in ("current", "max")
        )

        def found(
            status: Status,
            text: str,
            cure: str | None = None,
            place: tuple[int, Mapping[str, Any]] = (index, link),
        ) -> Finding:
            return Finding("device", "link", status, text, cure, *place)

        if None in now or None in most:
            yield found(
                "note",
                f"device {index}: the kernel does not report its link, or reports less "
                "than copies show, as in many virtual machines",
                "go by the measured bandwidth",
            )
        elif now[1] < most[1]:
            yield found(
                "problem",
                f"device {index}: the link has {now[1]} lanes of {most[1]} "
                f"({_link(*now)} of {_link(*most)}), so copies take "
                f"{most[1] / now[1]:.0f} times as long",
                "reseat the card, or move it to a slot with all lanes; look for a "
                "riser or a slot shared with another card",
            )
        elif now[0] < most[0]:
            measured = device["bandwidth"] is not None
            yield found(
                "problem" if measured else "note",
                f"device {index}: the link runs as {_link(*now)} but could run as "
                f"{_link(*most)}"
                + ("" if measured else "; this is usual for an idle link"),
                "look for a limit in the BIOS, an older slot or a riser; dmesg may say why",
            )
        else:
            yield found("ok", f"device {index}: {_link(*now)}, its fastest")


def _link(gtps: float, lanes: int) -> str:
    generation = _GENERATIONS.get(gtps)
    name = f"{gtps:g} GT/s" if generation is None else f"PCIe {generation}.0"
    return f"{name} x{lanes}"


def reported_link(device: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the link as reported, without numbers if copies were faster than these."""
    link: Mapping[str, Any] = device["link"]
    measured, expected = device["bandwidth"], expected_gbps(link)
    if measured is not None and "error" not in measured and expected is not None:
        if max(measured["up_gbps"], measured["down_gbps"]) * _USABLE > expected:
            return dict.fromkeys(link)
    return link


def expected_gbps(link: Mapping[str, Any]) -> float | None:
    """Return the rate that long copies reach on a link, or None if it is not known."""
    gtps, lanes = link["current_gtps"], link["current_lanes"]
    if gtps is None or lanes is None or gtps not in _LANE_GBPS:
        return None
    return _USABLE * _LANE_GBPS[gtps] * float(lanes)


def check_bandwidth(facts: Facts) -> Findings:
    """Check that copies reach the rate that the link allows."""
    for device in _real(facts):
        measured = device["bandwidth"]
        if measured is not None and "error" in measured:
            yield Finding(
                "device",
                "bandwidth",
                "note" if measured["is_short"] else "problem",
                f"device {device['index']}: no copy could be measured: {measured['error']}",
                "free memory of the device or the host; dmesg has the driver's log",
                device["index"],
            )
        elif measured is not None:
            yield _judge_rates(device, measured)


def _judge_rates(device: Mapping[str, Any], measured: Mapping[str, float]) -> Finding:
    up, down = measured["up_gbps"], measured["down_gbps"]
    expected = expected_gbps(reported_link(device))
    text = f"device {device['index']}: {up:.1f} GB/s to the device, {down:.1f} back"
    source = "its link should give"
    # If the link is unknown, the rate is compared with the links that GPUs can have.
    if expected is None:
        rates = {
            f"{_link(gtps, 16)} gives": _USABLE * lane * 16
            for gtps, lane in _LANE_GBPS.items()
            if gtps >= 8.0  # the driver serves no GPU with an older link
        }
        fitting = [
            name for name, rate in rates.items() if min(up, down) >= _WELL * rate
        ]
        source = fitting[-1] if fitting else "PCIe 3.0 x16 gives"
        expected = rates[source]
    share = min(up, down) / expected
    text += f"; {source} about {expected:.1f}"
    cure = (
        "repeat it while nothing else runs; then run on the processor next to the GPU "
        "(see numa), and look at link and iommu"
    )
    status: Status = (
        "ok" if share >= _WELL else "note" if share >= _BADLY else "problem"
    )
    values = {**measured, "expected_gbps": expected}
    return Finding(
        "device",
        "bandwidth",
        status,
        text,
        None if status == "ok" else cure,
        device["index"],
        values,
    )


def check_numa(facts: Facts) -> Findings:
    """Check that the process runs near each GPU."""
    nodes = {node["index"]: node for node in facts["machine"]["numa_nodes"]}
    if not nodes and not facts["container"]["shows_nodes"]:
        yield _unreadable(
            "numa", "what NUMA nodes there are", "numactl --hardware shows them"
        )
        return
    if len(nodes) <= 1:
        yield Finding("host", "numa", "ok", "one NUMA node: all memory is equally near")
        return
    mine = set(facts["container"]["cpus"])
    layout = "; ".join(f"node {i} has cores {nodes[i]['cores']}" for i in nodes)
    for device in _real(facts):
        index, near = device["index"], _near_node(device)
        if near not in nodes:
            yield Finding(
                "host",
                "numa",
                "note",
                f"device {index}: its NUMA node is unknown ({layout})",
                "measure with numactl --cpunodebind=N for each node N",
                index,
            )
        elif mine & cores_of(nodes[near]["cores"]):
            yield Finding(
                "host",
                "numa",
                "ok",
                f"device {index} is on NUMA node {near}, on which this process may run "
                f"({layout})",
                None,
                index,
            )
        else:
            yield Finding(
                "host",
                "numa",
                "problem",
                f"device {index} is on NUMA node {near}, and this process may only run "
                f"elsewhere: copies cross the link between processors ({layout})",
                f"numactl --cpunodebind={near} --membind={near} python …, or --cpuset-cpus "
                "and --cpuset-mems of the container",
                index,
            )
    if not _real(facts):
        yield Finding("host", "numa", "ok", f"{len(nodes)} NUMA nodes: {layout}")


def _unreadable(check: str, what: str, cure: str) -> Finding:
    """Make a finding that says that files of the kernel about the host cannot be read."""
    text = f"{what} is unknown here: the kernel's files are out of reach"
    return Finding("host", check, "note", text, f"outside of the container {cure}")


def _near_node(device: Mapping[str, Any]) -> int | None:
    if device["numa_node"] is not None:
        return int(device["numa_node"])
    near = device["attributes"].get("host_numa_id")
    return near if near is not None and near >= 0 else None


def cores_of(text: str) -> set[int]:
    """Return the numbers in a list such as ``0-3,8``."""
    found: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(low), int(high or low) + 1))
    return found


def check_managed(facts: Facts) -> Findings:
    """Report what managed memory can do here."""
    for device in facts["devices"]:
        index, has = device["index"], device["attributes"]

        def found(
            status: Status, text: str, cure: str | None = None, index: int = index
        ) -> Finding:
            return Finding(
                "device", "managed", status, f"device {index}: {text}", cure, index
            )

        if not has.get("managed_memory"):
            yield found("note", "no managed memory", "use pinned or mapped memory")
        elif not has.get("concurrent_managed_access"):
            yield found(
                "note",
                "managed memory is the host's or the device's, not both at once: no "
                "prefetch, and the host must wait for the device before it touches any",
                "use pinned memory and copies; Linux outside of WSL has more",
            )
        else:
            pageable = has.get("pageable_memory_access")
            also = "; kernels read ordinary memory too" if pageable else ""
            yield found("ok", f"managed memory with prefetch, for both at once{also}")


def check_peers(facts: Facts) -> Findings:
    """Check that GPUs can reach each other's memory."""
    devices = facts["devices"]
    apart = [
        (device["index"], other["index"])
        for device in devices
        for other in devices
        if device["index"] < other["index"] and other["index"] not in device["peers"]
    ]
    if len(devices) < 2:
        return
    values = {"apart": [list(pair) for pair in apart]}
    if not apart:
        text = f"all {len(devices)} devices reach each other's memory"
        yield Finding("device", "peers", "ok", text, values=values)
        return
    said = ", ".join(f"{a} and {b}" for a, b in apart)
    yield Finding(
        "device",
        "peers",
        "note",
        f"devices {said} do not reach each other: copies between them go through the host",
        "nvidia-smi topo -p2p r says why: often an IOMMU that translates, or ACS",
        values=values,
    )


def check_iommu(facts: Facts) -> Findings:
    """Check whether an IOMMU translates the addresses that the GPU uses."""
    for device in _real(facts):
        index, kind = device["index"], device["iommu"]
        values = {"type": kind}
        if kind == "unknown":
            yield Finding(
                "device",
                "iommu",
                "note",
                f"device {index}: whether an IOMMU translates is unknown here",
                "outside of the container dmesg | grep -i iommu shows it",
                index,
                values,
            )
        elif kind is None or kind == "identity":
            how = "no IOMMU is seen" if kind is None else "the IOMMU passes through"
            text = f"device {index}: {how}"
            yield Finding("device", "iommu", "ok", text, None, index, values)
        else:
            yield Finding(
                "device",
                "iommu",
                "note",
                f"device {index}: the IOMMU translates its addresses ({kind}): copies can "
                "be slower, and those between GPUs over PCIe can fail",
                "boot with iommu=pt on the kernel's command line, unless a virtual machine "
                "needs it",
                index,
                values,
            )


# -- the host --------------------------------------------------------------------------


def check_cpus(facts: Facts) -> Findings:
    """Check that there are enough processors to copy ordinary memory."""
    usable, machine = (
        facts["container"][f"{which}_cpus"] for which in ("usable", "machine")
    )
    threads = facts["copies"]["threads"]
    values = {"usable": usable, "machine": machine, "threads": threads}
    many = format_count(usable, "processor")
    if usable >= _FEW_CPUS:
        text = f"this process may use {many}; {format_count(threads, 'thread')} copy"
        yield Finding("host", "cpus", "ok", text, values=values)
        return
    verb = "copies" if threads == 1 else "copy"
    text = (
        f"this process may use {many} of {machine}: "
        f"{format_count(threads, 'thread')} {verb} "
        "ordinary memory, slower than a link"
    )
    yield Finding(
        "host",
        "cpus",
        "note",
        text,
        "give it more (docker --cpus, taskset, the batch system's --cpus-per-task), or "
        "copy from pinned memory, which needs no thread",
        values=values,
    )


def check_memlock(facts: Facts) -> Findings:
    """Check whether other libraries can lock pages."""
    soft, hard = (
        facts["machine"][f"memlock_{which}_nbytes"] for which in ("soft", "hard")
    )
    values = {"soft_nbytes": soft, "hard_nbytes": hard}
    if soft is None:
        text = "RLIMIT_MEMLOCK is unlimited"
        yield Finding("host", "memlock", "ok", text, values=values)
        return
    first = "ulimit -l unlimited" if hard is None else "raise memlock in limits.conf"
    yield Finding(
        "host",
        "memlock",
        "note",
        f"RLIMIT_MEMLOCK is {format_nbytes(soft)}: the CUDA driver and so cumem ignore it, "
        "but RDMA (NCCL and MPI over InfiniBand) and io_uring fail beyond it",
        f"{first}; docker --ulimit memlock=-1",
        values=values,
    )


def check_cgroup(facts: Facts) -> Findings:
    """Check that the limit of the container leaves memory."""
    limit, used = (
        facts["machine"][f"cgroup_{which}_nbytes"] for which in ("limit", "used")
    )
    values = {"limit_nbytes": limit, "used_nbytes": used}
    if limit is None and not facts["container"]["shows_cgroups"]:
        cure = "docker inspect or kubectl describe shows it"
        yield _unreadable("cgroup", "whether a control group limits the memory", cure)
        return
    if limit is None:
        text = "no control group limits the memory"
        yield Finding("host", "cgroup", "ok", text, values=values)
        return
    available = facts["container"]["available_nbytes"]  # includes memory of caches
    left = limit if available is None else min(limit, available)
    text = (
        f"the control group allows {format_nbytes(limit)}, of which {format_nbytes(left)} "
        "can still be had; page-locked memory counts"
    )
    cure = "raise it: docker --memory, or resources.limits.memory of the pod"
    status: Status = "ok"
    if limit < _GIB or left < limit // 50:
        status = "problem"
    elif left < max(_GIB, limit // 10):
        status = "note"
    yield Finding(
        "host", "cgroup", status, text, None if status == "ok" else cure, values=values
    )


def check_ranks(facts: Facts) -> Findings:
    """Report the limit of page-locked memory, and which ranks share the memory."""
    said, machine = facts["ranks"], facts["machine"]
    limit, reason = (machine[f"pinned_limit_{name}"] for name in ("nbytes", "reason"))
    values = said | {"pinned_limit_nbytes": limit}
    text = "no launcher says that other ranks share this host's memory"
    if said["launcher"] is not None:
        many = format_count(said["count"], "rank")
        text = f"{said['launcher']} started {many} on this host ({said['variable']})"
    if limit is not None:
        text += f"; the limit of pinned memory is {format_nbytes(limit)} ({reason})"
    if not said["wrong"]:
        yield Finding("host", "ranks", "ok", text, values=values)
        return
    names = " and ".join(f"{name}={what!r:.60}" for name, what in said["wrong"].items())
    yield Finding(
        "host",
        "ranks",
        "note",
        f"{names}: this is not a number of ranks and is ignored; {text}",
        "set the variable to the number of ranks on this host, as a launcher does, or set "
        "CUMEM_LIMIT_PINNED to the share of a rank",
        values=values,
    )


def check_shm(facts: Facts) -> Findings:
    """Check that /dev/shm has room to pass batches between processes."""
    size, free = (facts["container"][f"shm_{which}nbytes"] for which in ("", "free_"))
    values = {"nbytes": size, "free_nbytes": free}
    if size is None:
        text = "there is no /dev/shm, through which DataLoader's workers pass batches"
        cure = "mount a tmpfs there"
        yield Finding("host", "shm", "note", text, cure, values=values)
    elif size < _SMALL_SHM or free < size // 20:
        yield Finding(
            "host",
            "shm",
            "note",
            f"/dev/shm has {format_nbytes(size)}, {format_nbytes(free)} of them free: "
            "DataLoader's workers and NCCL, which pass data there, end with a bus error",
            "docker --shm-size=8g or --ipc=host; a memory volume at /dev/shm of the pod; "
            "or remove what others left there",
            values=values,
        )
    else:
        text = f"/dev/shm has {format_nbytes(size)}, {format_nbytes(free)} of them free"
        yield Finding("host", "shm", "ok", text, values=values)


def check_huge_pages(facts: Facts) -> Findings:
    """Check whether new ordinary memory can come in huge pages."""
    mode = facts["machine"]["huge_pages"]
    values = {"mode": mode}
    if not facts["container"]["has_huge_pages"]:
        yield Finding(
            "host",
            "huge pages",
            "note",
            "transparent huge pages are switched off for this process: new ordinary memory "
            "comes 4 KiB at a time, which makes copies into it slower",
            "look for who starts it with prctl(PR_SET_THP_DISABLE), as some services do",
            values=values,
        )
        return
    if mode in ("always", "madvise"):
        text = f"transparent huge pages: {mode}; cumem asks for them where they help"
        yield Finding("host", "huge pages", "ok", text, values=values)
        return
    if mode is None:
        cure = "cat /sys/kernel/mm/transparent_hugepage/enabled shows it, if it exists"
        yield _unreadable(
            "huge pages", "whether there are transparent huge pages", cure
        )
        return
    yield Finding(
        "host",
        "huge pages",
        "note",
        "transparent huge pages are off: new ordinary memory comes 4 KiB at a time, "
        "which makes copies into it slower",
        "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        values=values,
    )


# -- fast paths ------------------------------------------------------------------------


def check_growth(facts: Facts) -> Findings:
    """Check whether pools of device memory grow without gaps."""
    for device in facts["devices"]:
        index = device["index"]
        if device["attributes"].get("virtual_memory_management"):
            text = (
                f"device {index}: its pool grows by mapping pages, exact to the granule"
            )
            yield Finding("fast paths", "growth", "ok", text, None, index)
        else:
            text = (
                f"device {index}: its pool grows by cudaMalloc, since the device maps no "
                "memory on demand; free pieces of different segments do not join, regions "
                "cannot sleep and pools cannot spill"
            )
            cure = "a newer driver, or a device outside of WSL and vGPU without UVM"
            yield Finding("fast paths", "growth", "note", text, cure, index)


def check_registering(facts: Facts) -> Findings:
    """Check whether existing memory can be page-locked."""
    for device in facts["devices"]:
        index, has = device["index"], device["attributes"]
        if not has.get("host_register_supported"):
            text = f"device {index}: register() is not supported"
            cure = "copy into pinned memory instead"
            yield Finding("fast paths", "register", "note", text, cure, index)
        else:
            read_only = bool(has.get("host_register_read_only"))
            what = "read-only memory too" if read_only else "writable memory only"
            text = f"device {index}: register() page-locks existing memory, {what}"
            yield Finding("fast paths", "register", "ok", text, None, index)


def check_page_locking(facts: Facts) -> Findings:
    """Check whether the system lets memory be page-locked."""
    tried = facts.get("page_locking")
    if tried is None:
        return
    size = format_nbytes(tried["nbytes"])
    if tried["error"] is None:
        text = f"{size} could be page-locked"
        yield Finding("host", "page-locking", "ok", text, values=dict(tried))
        return
    free = facts["container"]["available_nbytes"]
    yield Finding(
        "host",
        "page-locking",
        "problem",
        f"{size} could not be page-locked: {tried['error']}",
        advise_on_host(tried["nbytes"], free, True)
        if tried["is_refused"]
        else "raise the limit of pinned memory (CUMEM_LIMIT_PINNED, cumem.set_limit), or "
        "give the container more memory",
        values=dict(tried),
    )


def check_calls(facts: Facts) -> Findings:
    """Report the newer calls of CUDA that the driver lacks."""
    missing = [call for call in facts["calls"] if not call["there"]]
    values = {"missing": [call["name"] for call in missing]}
    if missing:
        said = ", ".join(f"{call['name']} ({call['since']})" for call in missing)
        newest = max(
            (call["since"] for call in missing),
            key=lambda text: [int(part) for part in text.split(".")],
        )
        yield Finding(
            "fast paths",
            "calls",
            "note",
            f"the driver is older than {said}; cumem does without",
            f"a driver of CUDA {newest} has all",
            values=values,
        )
    elif facts["calls"]:
        text = "the driver has every call that cumem can make"
        yield Finding("fast paths", "calls", "ok", text, values=values)


def check_copies(facts: Facts) -> Findings:
    """Report how ordinary memory is copied to a device."""
    copies = facts["copies"]
    least = copies["staged_up_nbytes"]
    how = (
        "by the driver alone"
        if least >= 1 << 40
        else f"in pieces by {format_count(copies['threads'], 'thread')} from "
        f"{format_nbytes(least)} on"
    )
    sources = set(copies["sources"].values())
    text = f"ordinary memory that lies together goes to the device {how}"
    values = {name: copies[name] for name in ("threads", "staged_up_nbytes")}
    if sources & {"environment", "configure"}:
        text += ", as set"
    yield Finding("fast paths", "copies", "ok", text, values=values)


def check_variables(facts: Facts) -> Findings:
    """Look for variables that resemble cumem's and that nothing reads."""
    found = facts["misspelt"]
    if found:
        yield Finding(
            "driver",
            "variables",
            "problem" if any(found.values()) else "note",
            f"nothing reads {', '.join(found)}, which then changes nothing",
            advice(found),
            values={"variables": dict(found)},
        )


def check_nvtx(facts: Facts) -> Findings:
    """Check that a tool listens to the ranges that CUMEM_NVTX asks for."""
    env = facts["environment"]
    try:
        asks = read_switch(env["CUMEM_NVTX"] or "no")
    except ValueError:
        return  # opening the devices reports the wrong value
    if not asks:
        return
    path = env["NVTX_INJECTION64_PATH"]
    if facts["tool_listens"]:
        text = "CUMEM_NVTX: ranges go to the tool of NVTX_INJECTION64_PATH"
        yield Finding("fast paths", "nvtx", "ok", text)
        return
    named = f": {path}, which NVTX_INJECTION64_PATH names, is not one" if path else ""
    yield Finding(
        "fast paths",
        "nvtx",
        "note",
        f"CUMEM_NVTX asks for ranges and no tool listens{named}",
        "run under a profiler: nsys profile -t cuda,nvtx python …",
    )


# -- frameworks ------------------------------------------------------------------------


def check_frameworks(facts: Facts) -> Findings:
    """Check that the driver serves the CUDA that each framework was built for."""
    driver = facts["versions"]["driver"]
    is_real = facts["backend"]["name"] == "cuda"
    for framework in facts["frameworks"]:
        name, version, cuda = (framework[key] for key in ("name", "version", "cuda"))
        title = f"{name} {version}"

        def found(
            status: Status,
            text: str,
            cure: str | None = None,
            values: Mapping[str, Any] = framework,
        ) -> Finding:
            return Finding(
                "frameworks", values["name"], status, text, cure, None, values
            )

        enabling = ENABLE_CALLS.get(name)
        if cuda == "none":
            yield found(
                "note" if is_real else "ok",
                f"{title} was built without CUDA" + (": it sees no GPU" * is_real),
                "install its build for CUDA" if is_real else None,
            )
        elif is_real and cuda is not None and _major(cuda) > _major(driver):
            yield found(
                "problem",
                f"{title} was built for CUDA {cuda}, and the driver serves {driver}: it "
                "will not see the GPU that cumem sees",
                f"install a newer driver, or {name} for CUDA {_major(driver)}",
            )
        else:
            built = f", built for CUDA {cuda}" if cuda is not None else ""
            yield found("ok", title + built)
        if enabling is not None and () < _pair(version) < enabling[0]:
            wanted = ".".join(str(part) for part in enabling[0])
            yield found(
                "note",
                f"{title} is too old for {enabling[1]}",
                f"install {name} {wanted} or newer",
            )


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _pair(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


#: All checks, in the order in which their findings are shown.
CHECKS: Final[tuple[Callable[[Facts], Findings], ...]] = (
    *(
        check_driver,
        check_libraries,
        check_variables,
        check_visibility,
        check_nodes,
        check_mig,
    ),
    *(check_emulated, check_link, check_bandwidth, check_managed, check_peers),
    *(check_iommu, check_numa, check_cpus, check_memlock, check_cgroup),
    *(check_ranks, check_shm),
    *(check_huge_pages, check_growth, check_registering, check_page_locking),
    *(check_calls, check_copies),
    *(check_nvtx, check_frameworks),
)
