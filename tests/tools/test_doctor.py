# SPDX-License-Identifier: Apache-2.0
"""Tests of the doctor, which names each trouble of a machine together with its cure.

`collect` gathers facts about the machine, and `judge` makes findings of them. Most tests
change a few facts of a healthy machine and look at the finding. Others let the doctor read
facts from files that a test has written, or run the command on this machine in unusual
circumstances.
"""

from __future__ import annotations

import ast
import copy
import ctypes
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import cumem
from cumem import doctor, info
from cumem.doctor import checks
from cumem.doctor import facts as doctor_facts
from cumem.tools import cli

# No version of Python changes what these tests show.
pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
PR_SET_THP_DISABLE = 41
Facts = dict[str, Any]


def device(index: int) -> Facts:
    """Return the facts about one of two healthy GPUs."""
    attributes = dict.fromkeys(
        (
            *("managed_memory", "concurrent_managed_access"),
            *("host_register_supported", "host_register_read_only"),
            "virtual_memory_management",
        ),
        1,
    )
    return {
        "index": index,
        "name": "NVIDIA H200",
        "pci_bus_id": f"0000:{index + 1}b:00.0",
        "numa_node": index,
        "emulated": False,
        "attributes": attributes,
        "peers": [1 - index],
        "link": {
            "current_gtps": 32.0,
            "current_lanes": 16,
            "max_gtps": 32.0,
            "max_lanes": 16,
        },
        "iommu": "identity",
        "bandwidth": {"up_gbps": 55.4, "down_gbps": 55.3},
    }


#: The facts about a machine without any trouble.
HEALTHY: Facts = {
    "versions": info.versions() | {"driver": "13.0"},
    "backend": {"name": "cuda", "reason": None},
    "devices": [device(0), device(1)],
    "machine": {
        "numa_nodes": [
            {"index": i, "memory_total_nbytes": 64 * GIB, "cores": cores}
            for i, cores in enumerate(("0-7", "8-15"))
        ],
        "cgroup_limit_nbytes": 100 * GIB,
        "cgroup_used_nbytes": 10 * GIB,
        "memlock_soft_nbytes": None,
        "memlock_hard_nbytes": None,
        "pinned_limit_nbytes": 50 * GIB,
        "pinned_limit_reason": "half of the memory that the process may use",
        "huge_pages": "madvise",
    },
    "environment": dict.fromkeys(doctor_facts._ENVIRONMENT),
    "visible_at_opening": None,
    "misspelt": {},
    "tool_listens": False,
    "kernel": {
        "module": "580.65.06",
        "gpus": ["0000:1b:00.0", "0000:2b:00.0"],
        "mig_capable": False,
        "mig_instances": 0,
        "nodes": {
            "/dev/nvidiactl": "ok",
            "/dev/nvidia-uvm": "ok",
            "/dev/nvidia0": "ok",
        },
        "is_wsl": False,
        "libraries": ["/usr/lib/libcuda.so.580.65.06"],
    },
    "container": {
        "available_nbytes": 90 * GIB,
        "shows_cgroups": True,
        "shows_nodes": True,
        "has_huge_pages": True,
        "shm_nbytes": 64 * GIB,
        "shm_free_nbytes": 60 * GIB,
        "cpus": list(range(16)),
        "usable_cpus": 16,
        "machine_cpus": 16,
    },
    "ranks": {"count": 1, "launcher": None, "variable": None, "wrong": {}},
    "page_locking": {"nbytes": 128 << 20, "error": None, "is_refused": False},
    "calls": [{"name": "cuMemPrefetchBatchAsync", "since": "13.0", "there": True}],
    "copies": {
        "threads": 8,
        "staged_up_nbytes": 4 << 20,
        "ring_nbytes": 256 << 20,
        "sources": {"threads": "default"},
    },
    "frameworks": [{"name": "torch", "version": "2.11.0+cu130", "cuda": "13.0"}],
}


def changed(*changes: tuple[str, object]) -> Facts:
    """Return the facts of a healthy machine with changes.

    Each change is a place, such as ``devices.0.link.current_lanes``, and a value.
    """
    facts = copy.deepcopy(HEALTHY)
    for place, value in changes:
        *path, last = place.split(".")
        inner: Any = facts
        for part in path:
            inner = inner[int(part) if isinstance(inner, list) else part]
        assert last in inner, place
        inner[last] = value
    if ("visible_at_opening", None) not in changes:
        seen = facts["environment"]["CUDA_VISIBLE_DEVICES"]
        facts["visible_at_opening"] = seen
    return facts


def found(facts: Facts, check: str) -> checks.Finding:
    """Return the one finding of a check on the host or on device 0."""
    (finding,) = (
        each
        for each in doctor.judge(facts).findings
        if each.check == check and each.device in (None, 0)
    )
    return finding


def test_a_healthy_machine_is_all_well() -> None:
    diagnosis = doctor.judge(HEALTHY)
    assert [each for each in diagnosis.findings if each.status != "ok"] == []
    assert all(each.cure is None for each in diagnosis.findings)
    names = {each.check for each in diagnosis.findings}
    assert names >= {"driver", "visibility", "nodes", "mig", "link", "bandwidth"}
    assert names >= {"managed", "peers", "iommu", "numa", "cpus", "memlock", "cgroup"}
    assert names >= {"shm", "huge pages", "growth", "register", "calls", "copies"}
    assert str(diagnosis).endswith("\nall well")


#: Changes that leave no GPU: without a driver, or with one that sees none.
NO_GPU = (
    ("backend.name", "emulated"),
    ("backend.reason", "no CUDA driver was found, or it is too old"),
    ("devices", []),
)
NONE_SEEN = (
    *NO_GPU,
    ("backend.reason", "the CUDA driver sees no device (cudaErrorNoDevice)"),
)
#: A change after which copies have half of their rate.
HALF = ("devices.0.bandwidth", {"up_gbps": 27.0, "down_gbps": 28.0})
NO_NODES = dict.fromkeys(HEALTHY["kernel"]["nodes"], "missing")
#: The check, the changes, and the status of the finding, with parts of its text and cure.
TROUBLES: list[tuple[str, tuple[tuple[str, object], ...], str, str, str]] = [
    (
        "driver",
        (("backend.name", None), ("backend.reason", "cudaErrorUnknown (999)")),
        "problem",
        "does not open: cudaErrorUnknown (999)",
        "nvidia-smi",
    ),
    (
        "driver",
        (*NO_GPU, ("kernel.module", "470.82.01")),
        "problem",
        "too old: NVIDIA 470.82.01",
        "from 525 on",
    ),
    (
        "driver",
        (*NO_GPU, ("kernel.module", None)),
        "problem",
        "on the bus (0000:1b:00.0, 0000:2b:00.0), but its driver is not loaded",
        "modprobe nvidia",
    ),
    (
        "driver",
        (*NO_GPU, ("kernel.nodes", NO_NODES)),
        "problem",
        "no device nodes",
        "--gpus all",
    ),
    ("driver", NO_GPU, "problem", "no CUDA driver was found", "libcuda.so.1"),
    (
        "driver",
        (*NO_GPU, ("kernel.module", None), ("kernel.gpus", [])),
        "note",
        "no NVIDIA GPU in this machine",
        "run where one is",
    ),
    (
        "driver",
        (*NO_GPU, ("backend.reason", "emulation was asked for")),
        "note",
        "CUMEM_BACKEND=emulated asks",
        "unset CUMEM_BACKEND",
    ),
    (
        "library",
        (("kernel.libraries", ["/usr/local/cuda/lib64/stubs/libcuda.so.1"]),),
        "problem",
        "stub",
        "LD_LIBRARY_PATH",
    ),
    (
        "library",
        (("kernel.libraries", ["/a/libcuda.so.1", "/b/libcuda.so.1"]),),
        "problem",
        "two drivers are loaded in this process: /a/libcuda.so.1 and /b",
        "LD_PRELOAD",
    ),
    (
        "visibility",
        (*NO_GPU, ("environment.CUDA_VISIBLE_DEVICES", "")),
        "note",
        "hides all GPUs",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    (
        "visibility",
        (*NO_GPU, ("environment.NVIDIA_VISIBLE_DEVICES", "void")),
        "note",
        "NVIDIA_VISIBLE_DEVICES=void hides all GPUs",
        "--gpus all",
    ),
    (
        "visibility",
        (("environment.CUDA_VISIBLE_DEVICES", "1"), ("visible_at_opening", None)),
        "problem",
        "CUDA_VISIBLE_DEVICES was unset when the devices were opened and is '1' now",
        "before the program starts",
    ),
    (
        "visibility",
        (("environment.CUDA_VISIBLE_DEVICES", "0,1,7"),),
        "problem",
        "names 3 devices and CUDA sees 2",
        "nvidia-smi -L",
    ),
    (
        "visibility",
        (*NONE_SEEN, ("environment.CUDA_VISIBLE_DEVICES", "7")),
        "problem",
        "CUDA_VISIBLE_DEVICES=7 names 1 device and CUDA sees none",
        "nvidia-smi -L",
    ),
    (
        "driver",
        (*NONE_SEEN, ("environment.CUDA_VISIBLE_DEVICES", "7")),
        "note",
        "all GPUs are hidden from this process",
        "see the finding on visibility",
    ),
    (
        "nodes",
        (*NO_GPU, ("kernel.nodes", HEALTHY["kernel"]["nodes"] | {"/dev/nvidia0": "x"})),
        "problem",
        "/dev/nvidia0 is x",
        "group",
    ),
    (
        "nodes",
        (
            (
                "kernel.nodes",
                HEALTHY["kernel"]["nodes"] | {"/dev/nvidia-uvm": "missing"},
            ),
        ),
        "note",
        "/dev/nvidia-uvm is missing",
        "nvidia-modprobe -u",
    ),
    (
        "mig",
        (("devices.0.name", "NVIDIA H100 MIG 1g.10gb"),),
        "note",
        "MIG slice",
        "-mig 0",
    ),
    (
        "mig",
        (*NO_GPU, ("kernel.mig_capable", True)),
        "note",
        "CUDA sees none before a slice is made",
        "nvidia-smi mig -cgi",
    ),
    (
        "link",
        (("devices.0.link.current_lanes", 8), HALF),
        "problem",
        "8 lanes of 16 (PCIe 5.0 x8 of PCIe 5.0 x16), so copies take 2 times as long",
        "slot",
    ),
    (
        "link",
        (("devices.0.link.current_gtps", 16.0), HALF),
        "problem",
        "runs as PCIe 4.0 x16 but could run as PCIe 5.0 x16",
        "BIOS",
    ),
    (
        "link",
        (("devices.0.link.current_gtps", 2.5), ("devices.0.bandwidth", None)),
        "note",
        "this is usual for an idle link",
        "BIOS",
    ),
    (
        "link",
        (("devices.0.link.max_lanes", None),),
        "note",
        "the kernel does not report its link",
        "measured bandwidth",
    ),
    (
        "page-locking",
        (("page_locking.error", "out of memory"), ("page_locking.is_refused", True)),
        "problem",
        "128 MiB could not be page-locked: out of memory",
        "although the host has 90 GiB free",
    ),
    (
        "page-locking",
        (("page_locking.error", "cumem: the limit would be passed"),),
        "problem",
        "the limit would be passed",
        "CUMEM_LIMIT_PINNED",
    ),
    (
        "bandwidth",
        (("devices.0.bandwidth.down_gbps", 20.0),),
        "problem",
        "55.4 GB/s to the device, 20.0 back; its link should give about 54.8",
        "numa",
    ),
    (
        "bandwidth",
        (("devices.0.bandwidth.up_gbps", 40.0),),
        "note",
        "40.0 GB/s to the device",
        "nothing else runs",
    ),
    (
        "bandwidth",
        (
            ("devices.0.link.current_gtps", None),
            ("devices.0.bandwidth", {"up_gbps": 3.0, "down_gbps": 3.0}),
        ),
        "problem",
        "",
        "numa",
    ),
    (
        "bandwidth",
        (
            (
                "devices.0.bandwidth",
                {"error": "cudaMalloc: out of memory", "is_short": True},
            ),
        ),
        "note",
        "no copy could be measured: cudaMalloc: out of memory",
        "free memory",
    ),
    (
        "bandwidth",
        (("devices.0.bandwidth", {"error": "launch failed", "is_short": False}),),
        "problem",
        "no copy could be measured: launch failed",
        "dmesg",
    ),
    (
        "managed",
        (("devices.0.attributes.concurrent_managed_access", 0),),
        "note",
        "not both at once",
        "pinned",
    ),
    ("managed", (("devices.0.attributes.managed_memory", 0),), "note", "no", "pinned"),
    (
        "peers",
        (("devices.0.peers", []), ("devices.1.peers", [])),
        "note",
        "0 and 1 do not reach each other",
        "topo -p2p",
    ),
    (
        "iommu",
        (("devices.0.iommu", "DMA-FQ"),),
        "note",
        "translates its addresses (DMA-FQ)",
        "iommu=pt",
    ),
    ("iommu", (("devices.0.iommu", "unknown"),), "note", "unknown here", "dmesg"),
    (
        "numa",
        (("machine.numa_nodes", []), ("container.shows_nodes", False)),
        "note",
        "what NUMA nodes there are is unknown here",
        "numactl --hardware",
    ),
    (
        "cgroup",
        (("machine.cgroup_limit_nbytes", None), ("container.shows_cgroups", False)),
        "note",
        "whether a control group limits the memory is unknown here",
        "docker inspect",
    ),
    (
        "cgroup",
        (("container.available_nbytes", 0),),
        "problem",
        "of which 0 B can still be had",
        "docker --memory",
    ),
    (
        "huge pages",
        (("machine.huge_pages", None),),
        "note",
        "whether there are transparent huge pages is unknown here",
        "transparent_hugepage",
    ),
    (
        "numa",
        (("container.cpus", [8, 9]),),
        "problem",
        "device 0 is on NUMA node 0, and this process may only run elsewhere",
        "numactl --cpunodebind=0 --membind=0",
    ),
    (
        "numa",
        (("devices.0.numa_node", None),),
        "note",
        "its NUMA node is unknown",
        "numactl",
    ),
    (
        "cpus",
        (("container.usable_cpus", 2), ("copies.threads", 2)),
        "note",
        "2 processors of 16: 2 threads copy",
        "docker --cpus",
    ),
    (
        "cpus",
        (("container.usable_cpus", 1), ("copies.threads", 1)),
        "note",
        "1 processor of 16: 1 thread copies",
        "taskset",
    ),
    (
        "memlock",
        (("machine.memlock_soft_nbytes", 64 << 10),),
        "note",
        "RLIMIT_MEMLOCK is 64 KiB",
        "--ulimit memlock=-1",
    ),
    (
        "ranks",
        (("ranks.wrong", {"LOCAL_WORLD_SIZE": "0", "MPI_LOCALNRANKS": "x"}),),
        "note",
        "LOCAL_WORLD_SIZE='0' and MPI_LOCALNRANKS='x'",
        "CUMEM_LIMIT_PINNED",
    ),
    (
        "cgroup",
        (("container.available_nbytes", GIB),),
        "problem",
        "allows 100 GiB, of which 1 GiB can still be had",
        "docker --memory",
    ),
    (
        "cgroup",
        (("container.available_nbytes", 5 * GIB),),
        "note",
        "5 GiB can still be had",
        "docker --memory",
    ),
    (
        "cgroup",
        (("machine.cgroup_limit_nbytes", GIB // 2),),
        "problem",
        "allows 512 MiB",
        "limits.memory",
    ),
    (
        "shm",
        (("container.shm_nbytes", 64 << 20), ("container.shm_free_nbytes", 64 << 20)),
        "note",
        "/dev/shm has 64 MiB",
        "--shm-size",
    ),
    ("shm", (("container.shm_nbytes", None),), "note", "there is no /dev/shm", "tmpfs"),
    (
        "huge pages",
        (("machine.huge_pages", "never"),),
        "note",
        "transparent huge pages are off",
        "echo madvise",
    ),
    (
        "huge pages",
        (("container.has_huge_pages", False),),
        "note",
        "switched off for this process",
        "PR_SET_THP_DISABLE",
    ),
    (
        "growth",
        (("devices.0.attributes.virtual_memory_management", 0),),
        "note",
        "by cudaMalloc",
        "newer driver",
    ),
    (
        "register",
        (("devices.0.attributes.host_register_supported", 0),),
        "note",
        "not supported",
        "pinned",
    ),
    (
        "calls",
        (("calls.0.there", False),),
        "note",
        "older than cuMemPrefetchBatchAsync (13.0)",
        "CUDA 13.0",
    ),
    (
        "nvtx",
        (("environment.CUMEM_NVTX", "1"),),
        "note",
        "no tool listens",
        "nsys profile",
    ),
    (
        "nvtx",
        (
            ("environment.CUMEM_NVTX", "1"),
            ("environment.NVTX_INJECTION64_PATH", "/no/tool.so"),
        ),
        "note",
        "/no/tool.so, which NVTX_INJECTION64_PATH names, is not one",
        "nsys profile",
    ),
    (
        "torch",
        (("versions.driver", "12.4"),),
        "problem",
        "built for CUDA 13.0, and the driver serves 12.4",
        "for CUDA 12",
    ),
    (
        "torch",
        (("frameworks.0.cuda", "none"),),
        "note",
        "was built without CUDA: it sees no GPU",
        "build for CUDA",
    ),
]


@pytest.mark.parametrize(
    ("check", "changes", "status", "text", "cure"),
    TROUBLES,
    ids=[f"{row[0]}-{i}" for i, row in enumerate(TROUBLES)],
)
def test_trouble_is_named_with_its_cure(
    check: str,
    changes: tuple[tuple[str, object], ...],
    status: str,
    text: str,
    cure: str,
) -> None:
    facts = changed(*changes)
    before = copy.deepcopy(facts)
    finding = found(facts, check)
    assert facts == before
    assert finding.status == status
    assert text in finding.text
    assert finding.cure is not None
    assert cure in finding.cure
    diagnosis = doctor.judge(facts)
    assert (diagnosis.problems > 0) >= (status == "problem")
    words = " ".join(str(diagnosis).split())
    assert finding.text in words  # no word is lost where a line is broken
    assert finding.cure in words


def test_a_framework_too_old_for_its_integration_is_named() -> None:
    facts = changed(("frameworks.0.version", "2.4.1+cu130"))
    texts = [
        each.text for each in doctor.judge(facts).findings if each.check == "torch"
    ]
    assert any(
        "torch 2.4.1+cu130 is too old for cumem.integrations" in t for t in texts
    )


def test_a_framework_of_unknown_version_is_not_too_old() -> None:
    facts = changed(("frameworks.0.version", "of unknown version"))
    assert found(facts, "torch").status == "ok"


def test_versions_of_the_doctor_are_those_of_the_integrations() -> None:
    source = Path(cumem.__file__).parent / "integrations" / "torch.py"
    (nesting,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == "_NESTING"
        and node.value is not None
    )
    assert checks.ENABLE_CALLS["torch"][0] == nesting


def test_a_link_that_is_not_reported_is_judged_by_the_other_links() -> None:
    facts = changed(("devices.0.link.current_gtps", None))
    finding = found(facts, "bandwidth")
    assert finding.status == "ok"
    assert finding.text.endswith("PCIe 5.0 x16 gives about 54.8")


def test_a_link_that_is_slower_than_its_copies_is_not_believed() -> None:
    """Virtual machines report such links for GPUs that they pass on, and machines with
    Grace report them for NVLink.
    """
    facts = changed(
        ("devices.0.link.current_gtps", 2.5), ("devices.0.link.current_lanes", 1)
    )
    assert found(facts, "link").status == "note"
    assert found(facts, "bandwidth").status == "ok"
    facts = changed(("devices.0.link.current_gtps", 16.0), HALF)
    assert found(facts, "link").status == "problem"
    assert found(facts, "bandwidth").status == "ok"


def test_no_gpu_is_no_problem() -> None:
    facts = changed(*NO_GPU, ("kernel.module", None), ("kernel.gpus", []))
    diagnosis = doctor.judge(facts)
    assert diagnosis.problems == 0
    assert diagnosis.emulated
    assert "no GPU" in diagnosis.title


def test_a_hidden_gpu_has_no_finding_on_mig() -> None:
    hidden = (
        *NO_GPU,
        ("kernel.mig_capable", True),
        ("environment.CUDA_VISIBLE_DEVICES", ""),
    )
    said = {finding.check for finding in doctor.judge(changed(*hidden)).findings}
    assert "visibility" in said
    assert "mig" not in said


def names_of_checks() -> set[str]:
    """Return the names that the source gives to findings, without those of frameworks."""
    tree = ast.parse(Path(checks.__file__).read_text(encoding="utf-8"))
    # These are the positions of the argument that gives the name.
    places = {"Finding": 1, "_unreadable": 0}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = [
        node.args[places[node.func.id]]
        for node in calls
        if isinstance(node.func, ast.Name) and node.func.id in places
    ]
    return {str(node.value) for node in given if isinstance(node, ast.Constant)}


def test_page_of_the_doctor_lists_each_check() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    _, _, table = page.partition("## What it looks at")
    cells = re.findall(r"^\| (`.*?) \|", table.partition("\n## ")[0], re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(.+?)`", cell)}
    assert listed - set(doctor_facts._FRAMEWORKS.values()) == names_of_checks()


def test_each_check_is_among_those_that_run() -> None:
    written = {name for name in vars(checks) if name.startswith("check_")}
    assert {check.__name__ for check in checks.CHECKS} == written


def test_names_of_checks_and_their_texts_are_apart() -> None:
    findings = [checks.Finding("host", "page-locking", "ok", "64 MiB could be")]
    shown = str(doctor.Diagnosis(tuple(findings), "a machine", emulated=False))
    assert "page-locking  64 MiB" in shown


def test_json_is_plain_data_with_all_fields() -> None:
    data = json.loads(json.dumps(doctor.judge(HEALTHY).to_dict()))
    assert data["problems"] == data["notes"] == 0
    first = data["findings"][0]
    assert set(first) == set(checks.Finding.__dataclass_fields__)
    rates = next(each for each in data["findings"] if each["check"] == "bandwidth")
    assert rates["values"]["expected_gbps"] == pytest.approx(54.8, abs=0.05)


# -- what is read ----------------------------------------------------------------------


def write(root: Path, name: str, text: str) -> None:
    """Write a file below `root`, which stands for the root of the file system."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


PCI = "sys/bus/pci/devices/0000:1b:00.0"


def test_link_iommu_and_gpus_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    """The files are those of a GPU and of its sound device, below a temporary folder."""
    for name, text in (
        ("vendor", "0x10de\n"),
        ("class", "0x030200\n"),
        ("current_link_speed", "2.5 GT/s PCIe\n"),
        ("current_link_width", "8\n"),
        ("max_link_speed", "32.0 GT/s PCIe\n"),
        ("max_link_width", "16\n"),
        ("iommu_group/type", "DMA\n"),
    ):
        write(tmp_path, f"{PCI}/{name}", text)
    # The second function of the GPU is its sound device.
    write(tmp_path, "sys/bus/pci/devices/0000:1b:00.1/vendor", "0x10de")
    write(tmp_path, "sys/bus/pci/devices/0000:1b:00.1/class", "0x040300")
    assert doctor_facts.link(tmp_path, "0000:1B:00.0") == {
        "current_gtps": 2.5,
        "current_lanes": 8,
        "max_gtps": 32.0,
        "max_lanes": 16,
    }
    assert doctor_facts._iommu_type(tmp_path, "0000:1b:00.0") == "DMA"
    assert doctor_facts._iommu_type(tmp_path, "0000:1b:00.1") is None
    assert doctor_facts._iommu_type(tmp_path, "0000:2b:00.0") == "unknown"
    assert doctor_facts.kernel(tmp_path)["gpus"] == ["0000:1b:00.0"]


@pytest.mark.parametrize(
    ("speed", "width"), [("Unknown", "0"), ("Unknown speed", "255")]
)
def test_a_link_without_numbers_is_none(tmp_path: Path, speed: str, width: str) -> None:
    for when in ("current", "max"):
        write(tmp_path, f"{PCI}/{when}_link_speed", speed)
        write(tmp_path, f"{PCI}/{when}_link_width", width)
    assert set(doctor_facts.link(tmp_path, "0000:1b:00.0").values()) == {None}


def test_driver_and_device_nodes_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n"
        "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2)\n",
    )
    write(tmp_path, "dev/nvidiactl", "")
    write(tmp_path, "dev/nvidia0", "")
    read = doctor_facts.kernel(tmp_path)
    assert read["module"] == "580.65.06"
    assert read["nodes"] == {
        "/dev/nvidiactl": "ok",
        "/dev/nvidia-uvm": "missing",
        "/dev/nvidia0": "ok",
    }


def test_drivers_of_the_process_are_read_from_its_mappings(tmp_path: Path) -> None:
    line = "7f00-7f01 r-xp 00000000 08:01 42  /usr/lib/libcuda.so.580.65.06\n"
    other = "7f02-7f03 r-xp 00000000 08:01 43  /usr/lib/libcudart.so.12\n"
    write(tmp_path, "proc/self/maps", line + other + line)
    read = doctor_facts.kernel(tmp_path)
    assert read["libraries"] == ["/usr/lib/libcuda.so.580.65.06"]


def distribution(root: Path, name: str, version: str, *needs: str) -> None:
    """Write the metadata of an installed package, with what it requires."""
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    lines = "".join(f"Requires-Dist: {need}\n" for need in needs)
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    write(root, f"{folder}/METADATA", head + lines)


def test_frameworks_are_read_from_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions are read without importing a framework, even from damaged metadata."""
    distribution(tmp_path, "torch", "2.11.0")
    write(tmp_path, "torch/version.py", "cuda: Optional[str] = '13.0'\n")
    write(tmp_path, "torch/__init__.py", "raise SystemExit('imported')\n")
    distribution(tmp_path, "cupy-cuda12x", "14.2.0")
    distribution(tmp_path, "tensorflow", "3.0", "nvidia-cuda-runtime-cu12==12.8.90")
    # Only Python's own library stays on the path.
    own = [path for path in sys.path if not path.endswith("-packages")]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *own])
    read = {each["name"]: each for each in doctor_facts.frameworks()}
    assert read["torch"] == {"name": "torch", "version": "2.11.0", "cuda": "13.0"}
    assert read["cupy"]["cuda"] == "12"
    assert read["tensorflow"]["cuda"] == "12.8"
    distribution(tmp_path, "jax", "0.11.2")
    (jax,) = (each for each in doctor_facts.frameworks() if each["name"] == "jax")
    assert jax["cuda"] == "none"
    distribution(tmp_path, "jax-cuda13-plugin", "0.11.2")
    (jax,) = (each for each in doctor_facts.frameworks() if each["name"] == "jax")
    assert jax["cuda"] == "13"
    write(tmp_path, "numba-0.dist-info/METADATA", "Name: numba\n")  # without a version
    (numba,) = (each for each in doctor_facts.frameworks() if each["name"] == "numba")
    assert numba["version"] == "of unknown version"
    distribution(tmp_path, "numba-cuda", "0.30.4")
    read = {each["name"]: each["version"] for each in doctor_facts.frameworks()}
    assert (read["numba"], read["numba-cuda"]) == ("of unknown version", "0.30.4")
    write(tmp_path, "torch/version.py", "cuda: Optional[str] = None\n")
    (torch,) = (each for each in doctor_facts.frameworks() if each["name"] == "torch")
    assert torch["cuda"] == "none"


def test_bandwidth_is_measured_and_leaves_nothing_behind(runtime) -> None:
    before = cumem.stats().total.reserved_nbytes
    rates = doctor_facts.bandwidth(0, 0.01, 1 << 20)
    assert rates["up_gbps"] > 0
    assert rates["down_gbps"] > 0
    assert cumem.stats().total.reserved_nbytes == before


def test_bandwidth_that_cannot_be_measured_is_an_error_and_no_failure(runtime) -> None:
    with cumem.limit("device", "1MiB"):
        found = doctor_facts.bandwidth(0, 0.01, 4 << 20)
        assert "device" in found["error"]
        assert found["is_short"] is True


def test_a_driver_that_does_not_open_is_a_finding(
    emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Facts:
        raise cumem.CudaError("cudaGetDeviceCount: cudaErrorUnknown (999)")

    monkeypatch.setattr(info, "collect", fail)
    diagnosis = doctor.diagnose()
    assert diagnosis.findings[0].status == "problem"
    assert "cudaErrorUnknown (999)" in diagnosis.findings[0].text


# -- this machine ----------------------------------------------------------------------


def test_doctor_finds_what_there_is_on_this_machine(runtime) -> None:
    diagnosis = doctor.diagnose(measure=not runtime.emulated)
    assert diagnosis.emulated == runtime.emulated
    names = {each.check for each in diagnosis.findings}
    assert names >= {"driver", "managed", "numa", "cpus", "memlock", "cgroup", "shm"}
    assert ("emulated" in names) == runtime.emulated
    assert ("bandwidth" in names) == (not runtime.emulated)
    assert all(
        (each.cure is None) == (each.status == "ok") for each in diagnosis.findings
    )


def command(
    *arguments: str,
    before: Callable[[], None] | None = None,
    inside: Sequence[str] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run the doctor as a program: after a call of `before`, inside another program."""
    return subprocess.run(
        [*inside, sys.executable, "-W", "error", "-m", "cumem", "doctor", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"CUMEM_BACKEND": "emulated"} | environment,
        timeout=120,
        check=False,
        preexec_fn=before,
    )


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, Facts]:
    """Return the findings of a run with --json, by the names of their checks."""
    assert done.stderr == ""
    return {each["check"]: each for each in json.loads(done.stdout)["findings"]}


def test_command_says_that_the_device_is_emulated() -> None:
    done = command()
    assert (done.returncode, done.stderr) == (0, "")
    assert "the device is emulated, as CUMEM_BACKEND=emulated asks" in " ".join(
        done.stdout.split()
    )
    assert max(map(len, done.stdout.splitlines())) <= 92


def test_command_without_a_gpu_has_no_problem_with_that() -> None:
    done = command("--json", CUMEM_BACKEND="", CUDA_VISIBLE_DEVICES="")
    said = findings(done)
    assert said["driver"]["status"] == "note"
    assert done.returncode == 0


def test_command_with_low_memlock_and_two_cores_names_both() -> None:
    few = sorted(os.sched_getaffinity(0))[:2]

    def provoke() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
        os.sched_setaffinity(0, few)

    said = findings(command("--json", before=provoke))
    assert said["memlock"]["values"]["soft_nbytes"] == 64 << 10
    assert "64 KiB" in said["memlock"]["text"]
    assert "memlock=-1" in said["memlock"]["cure"]
    assert said["cpus"]["status"] == "note"
    assert said["cpus"]["values"]["usable"] == len(few)


def test_command_without_huge_pages_says_how_they_were_taken_away() -> None:
    libc = ctypes.CDLL(None)

    def provoke() -> None:
        assert libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0

    said = findings(command("--json", before=provoke))
    assert said["huge pages"]["status"] == "note"
    assert "PR_SET_THP_DISABLE" in said["huge pages"]["cure"]


def test_command_with_an_old_driver_names_what_it_lacks() -> None:
    said = findings(command("--json", CUMEM_EMULATED_DRIVER="12.4"))
    assert said["calls"]["status"] == "note"
    assert "cuMemPrefetchBatchAsync" in said["calls"]["values"]["missing"]
    assert "13.0" in said["calls"]["cure"]


def test_command_where_sys_cannot_be_read_says_so() -> None:
    """The test hides /sys in another mount namespace, as a container might."""
    inside = ("unshare", "--mount", "--map-root-user")
    hide = 'mount -t tmpfs none /sys && exec "$@"'
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            [*inside, "sh", "-c", hide, "-", "true"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no mount namespace can be made here")
    seen = findings(command("--json", inside=(*inside, "sh", "-c", hide, "-")))
    for check in ("numa", "cgroup", "huge pages"):
        assert seen[check]["status"] == "note"
        assert "unknown here" in seen[check]["text"]


def test_command_names_devices_that_do_not_reach_each_other() -> None:
    said = findings(
        command("--json", CUMEM_EMULATED_DEVICES="2", CUMEM_EMULATED_PEERS="0")
    )
    assert said["peers"]["values"]["apart"] == [[0, 1]]


def test_command_without_any_device_still_looks_at_the_host() -> None:
    said = findings(command("--json", CUMEM_EMULATED_DEVICES="0"))
    assert said["devices"]["status"] == "note"
    assert "memlock" in said


def test_command_with_a_problem_ends_with_1(
    emulated, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = changed(("devices.0.link.current_lanes", 8), HALF)
    monkeypatch.setattr(doctor_facts, "collect", lambda **how: facts)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("\n1 problem, no notes\n")


def test_command_with_a_wrong_argument_or_variable_ends_with_2() -> None:
    assert command("--nonsense").returncode == 2
    done = command(CUMEM_BACKEND="quantum")
    assert done.returncode == 2
    assert "CUMEM_BACKEND" in done.stderr
    assert "Traceback" not in done.stderr


def test_cuda_that_is_asked_for_and_missing_is_a_problem_and_no_traceback() -> None:
    done = command("--json", CUMEM_BACKEND="cuda", CUDA_VISIBLE_DEVICES="")
    said = findings(done)
    assert said["driver"]["status"] == "problem"
    assert done.returncode == 1
