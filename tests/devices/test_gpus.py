# SPDX-License-Identifier: Apache-2.0
"""If no GPU can be used, cumem either emulates a device or raises an error.

cumem raises if there are signs that a GPU is installed, and also signs that somebody
means to use it. The tests build files such as `/proc/driver/nvidia/version` in a
temporary folder, and pass them with variables and error codes to the function that
decides.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support import programs

import cumem
from cumem.devices import gpus

# This is plain Python code, which every version runs in the same way.
pytestmark = pytest.mark.any_python

INSUFFICIENT, NO_DEVICE, UNKNOWN = 35, 100, 999

#: Each entry alone is a sign of a GPU. A text is a path, or a path, "=" and the
#: contents of the file.
HARDWARE = {
    "on the bus": [
        "sys/bus/pci/devices/0000:1b:00.0/vendor=0x10de\n",
        "sys/bus/pci/devices/0000:1b:00.0/class=0x030200\n",
    ],
    "driver's folder": ["proc/driver/nvidia/version=NVRM 580.65.06"],
    "WSL": ["dev/dxg="],
    "Tegra's release": ["etc/nv_tegra_release=# R36"],
    "Tegra's tree": ["proc/device-tree/compatible=nvidia,p3737\0nvidia,tegra234"],
}
#: None of these entries is a sign of a GPU.
OTHERS = {
    "nothing": [],
    "another's GPU": [
        "sys/bus/pci/devices/0000:01:00.0/vendor=0x1002\n",
        "sys/bus/pci/devices/0000:01:00.0/class=0x030000\n",
    ],
    "its sound and its network": [
        "sys/bus/pci/devices/0000:01:00.1/vendor=0x10de\n",
        "sys/bus/pci/devices/0000:01:00.1/class=0x040300\n",
        "sys/bus/pci/devices/0000:02:00.0/vendor=0x10de\n",
        "sys/bus/pci/devices/0000:02:00.0/class=0x020000\n",
    ],
}


def build(root: Path, files: list[str]) -> Path:
    """Make the files and return `root`, which stands for the root of a file system."""
    for each in files:
        place, _, text = each.partition("=")
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text(text, encoding="utf-8")
    return root


def judge(
    root: Path, code: int = INSUFFICIENT, library: bool = False, **environment: str
) -> gpus.Judgement:
    """Ask what to do after CUDA failed with `code`, on a system whose files lie below
    `root`.

    `library` says whether a library of CUDA is meant to be there.
    """
    return gpus.judge_failure(code, root, environment, lambda: library)


INTENTS = [
    {"library": True},
    {"NVIDIA_VISIBLE_DEVICES": "all"},
    {"NVIDIA_VISIBLE_DEVICES": "0,1"},
    {"NVIDIA_VISIBLE_DEVICES": "GPU-6d2f"},
]
NO_INTENTS = [
    {},
    {"NVIDIA_VISIBLE_DEVICES": ""},
    {"NVIDIA_VISIBLE_DEVICES": "void"},
    {"NVIDIA_VISIBLE_DEVICES": "none"},
]


@pytest.mark.parametrize("code", [INSUFFICIENT, NO_DEVICE, UNKNOWN])
@pytest.mark.parametrize("meant", INTENTS, ids=str)
@pytest.mark.parametrize("there", HARDWARE)
def test_gpu_that_was_meant_and_does_not_open_is_an_error(
    tmp_path, there, meant, code
) -> None:
    may_emulate, text = judge(build(tmp_path, HARDWARE[there]), code, **meant)
    assert not may_emulate
    assert "`python -m cumem doctor`" in text
    assert "CUMEM_BACKEND=emulated" in text


@pytest.mark.parametrize("code", [INSUFFICIENT, NO_DEVICE, UNKNOWN])
@pytest.mark.parametrize("meant", NO_INTENTS, ids=str)
@pytest.mark.parametrize("there", HARDWARE)
def test_gpu_that_nobody_meant_is_emulated(tmp_path, there, meant, code) -> None:
    assert judge(build(tmp_path, HARDWARE[there]), code, **meant).may_emulate


@pytest.mark.parametrize("meant", [*INTENTS, *NO_INTENTS], ids=str)
@pytest.mark.parametrize("there", OTHERS)
def test_machine_without_a_gpu_emulates_whatever_is_meant(
    tmp_path, there, meant
) -> None:
    assert judge(build(tmp_path, OTHERS[there]), **meant).may_emulate


def test_device_node_alone_is_hardware_and_intent(tmp_path) -> None:
    may_emulate, text = judge(build(tmp_path, ["dev/nvidia0="]))
    assert not may_emulate
    assert "/dev/nvidia0" in text


@pytest.mark.parametrize("said", ["", "-1", " -1 "])
def test_gpus_that_the_user_hid_are_emulated(tmp_path, said) -> None:
    root = build(tmp_path, [*HARDWARE["on the bus"], "dev/nvidia0="])
    may_emulate, text = judge(root, NO_DEVICE, True, CUDA_VISIBLE_DEVICES=said)
    assert may_emulate
    assert "hides all GPUs" in text


@pytest.mark.parametrize(
    ("files", "code", "library", "environment", "cause"),
    [
        (
            HARDWARE["on the bus"],
            INSUFFICIENT,
            False,
            {"NVIDIA_VISIBLE_DEVICES": "all"},
            "libcuda.so.1 is not found",
        ),
        (HARDWARE["on the bus"], NO_DEVICE, True, {}, "/dev/nvidia* are missing"),
        (
            [*HARDWARE["on the bus"], "dev/nvidia0="],
            INSUFFICIENT,
            True,
            {},
            "the driver is too old",
        ),
        (
            [*HARDWARE["on the bus"], "dev/nvidia0="],
            NO_DEVICE,
            True,
            {"CUDA_VISIBLE_DEVICES": "7"},
            "CUDA_VISIBLE_DEVICES=7 names no device",
        ),
        (
            [*HARDWARE["on the bus"], "dev/nvidia0="],
            UNKNOWN,
            True,
            {},
            "cudaErrorUnknown",
        ),
    ],
)
def test_error_names_the_cause(
    tmp_path, files, code, library, environment, cause
) -> None:
    may_emulate, text = judge(build(tmp_path, files), code, library, **environment)
    assert not may_emulate
    assert cause in text


#: This program opens cumem on a system whose root is its argument.
PROGRAM = """
import sys
from cumem.devices import gpus
gpus.ROOT = sys.argv[1]
import cumem
print(cumem.is_available())
try:
    print(cumem.backend(), cumem.info.about().emulation_reason)
except cumem.CudaError as error:
    print("refused", error.code, error.__notes__)
try:
    cumem.zeros(4)
except cumem.CudaError as error:
    print("again", error.code)
"""


@pytest.mark.skipif(gpus._has_library(), reason="this machine has CUDA's driver")
def test_first_use_beside_a_gpu_that_does_not_open_raises(tmp_path) -> None:
    root = build(tmp_path, HARDWARE["on the bus"])
    asked = {"CUMEM_BACKEND": "", "NVIDIA_VISIBLE_DEVICES": "all"}
    done = programs.run("-c", PROGRAM, str(root), **asked)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "False"
    assert lines[1].startswith("refused 35")
    assert "libcuda.so.1 is not found" in lines[1]
    assert lines[2] == "again 35"


@pytest.mark.skipif(gpus._has_library(), reason="this machine has CUDA's driver")
@pytest.mark.parametrize("backend", ["emulated", ""])
def test_first_use_emulates_on_purpose_or_where_nobody_meant_a_gpu(
    tmp_path, backend
) -> None:
    root = build(tmp_path, HARDWARE["on the bus"])
    asked = {"CUMEM_BACKEND": backend, "NVIDIA_VISIBLE_DEVICES": "void"}
    done = programs.run("-W", "ignore", "-c", PROGRAM, str(root), **asked)
    assert done.returncode == 0, done.stderr
    assert "emulated" in done.stdout


def test_machine_that_works_is_never_judged(runtime, monkeypatch) -> None:
    monkeypatch.setattr(gpus, "judge_failure", None)
    assert cumem.device_count() > 0
