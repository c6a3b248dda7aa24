# SPDX-License-Identifier: Apache-2.0
"""Tests of how cumem finds the limits that control groups set on memory and on CPUs.

Linux describes control groups in `/proc/self/mountinfo`, in `/proc/self/cgroup` and in the
file systems that are mounted there. Most tests write such files below a temporary folder,
which `cumem.base.control_groups` then reads as the root of the file system.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cumem
from cumem import _core
from cumem.base import control_groups
from cumem.info import machine

#: A text of `/proc/self/mountinfo` with version 2 of the hierarchy at its usual place.
MOUNT_V2 = (
    "22 27 0:21 / /proc rw - proc proc rw\n"
    "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
)


def make(root: Path, files: dict[str, str]) -> str:
    """Write files, whose paths begin at `root`, and return `root` as a text."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def folders(root: Path, mounts: str, groups: str, controller: str = "memory"):
    """Return the groups' folders that are found if `/proc` has these two texts."""
    files = {"/proc/self/mountinfo": mounts, "/proc/self/cgroup": groups}
    return control_groups.folders(controller, make(root, files))


def test_walk_ends_at_the_mount_point(tmp_path) -> None:
    assert folders(tmp_path, MOUNT_V2, "0::/a.slice/b:c.scope\n") == [
        "/sys/fs/cgroup/a.slice/b:c.scope",
        "/sys/fs/cgroup/a.slice",
        "/sys/fs/cgroup",
    ]


@pytest.mark.parametrize(
    ("mounts", "groups", "found"),
    [
        # A container without a namespace for its groups has only its own group mounted.
        ("1 0 0:9 /docker/ab /m rw - cgroup2 c rw\n", "0::/docker/ab\n", ["/m"]),
        (
            "1 0 0:9 /docker/ab /m rw - cgroup2 c rw\n",
            "0::/docker/ab/x\n",
            ["/m/x", "/m"],
        ),
        # `/docker/abc` merely begins with the name of the mounted group, and `/../other`
        # lies above what is mounted. The mount reaches neither group, so the walk begins at
        # the mount point.
        ("1 0 0:9 /docker/ab /m rw - cgroup2 c rw\n", "0::/docker/abc\n", ["/m"]),
        ("1 0 0:9 / /m rw - cgroup2 c rw\n", "0::/../other\n", ["/m"]),
        ("1 0 0:9 / /m rw - cgroup2 c rw\n", "0::/\n", ["/m"]),
        # If there are two mounts, the one that contains the group counts.
        (
            "1 0 0:9 /q /n rw - cgroup2 c rw\n2 0 0:9 / /m rw - cgroup2 c rw\n",
            "0::/p\n",
            ["/m/p", "/m"],
        ),
        (
            "2 0 0:9 / /m rw - cgroup2 c rw\n1 0 0:9 /q /n rw - cgroup2 c rw\n",
            "0::/p\n",
            ["/m/p", "/m"],
        ),
        (
            "1 0 0:9 / /with\\040space rw - cgroup2 c rw\n",
            "0::/p\n",
            ["/with space/p", "/with space"],
        ),
        # These have version 1 of the hierarchy, first alone and then beside version 2.
        (
            "1 0 0:9 / /m rw - cgroup c rw,memory\n",
            "4:cpu:/no\n3:x,memory:/p\n",
            ["/m/p", "/m"],
        ),
        (
            "35 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n"
            "41 31 0:38 / /cg/unified rw - cgroup2 cgroup2 rw\n",
            "4:memory:/job/7\n0::/\n",
            ["/cg/unified", "/cg/memory/job/7", "/cg/memory/job", "/cg/memory"],
        ),
    ],
)
def test_mounted_part_is_honoured(tmp_path, mounts, groups, found) -> None:
    """The folders are those of the groups that can be reached through the mounts."""
    assert folders(tmp_path, mounts, groups) == found


@pytest.mark.parametrize(
    "mounts",
    [
        "",
        "\n\n - cgroup2\n",
        "1 2 3 - cgroup2 a b\n",
        "- cgroup2 - cgroup2 - cgroup2",
        "1 0 0:9 / /m rw - cgroup c rw,cpu\n",
        "1 0 0:9 / /m rw - cgroup2\n",
    ],
)
@pytest.mark.parametrize("groups", ["", "0", "0:", "0::", ":::::\n", "0::/p"])
def test_garbage_finds_nothing(tmp_path, mounts, groups) -> None:
    assert folders(tmp_path, mounts, groups) == []
    assert control_groups.folders("memory", str(tmp_path / "nothing")) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("100000 100000\n", 1),
        ("1000 100000\n", 1),
        ("150000 100000\n", 2),
        ("0 100000\n", 1),
        *((text, None) for text in ("max 100000\n", "", "100000\n", "100000 0\n")),
        ("100000 x\n", None),
    ],
)
def test_quota_is_rounded_up_to_whole_cpus(tmp_path, text, count) -> None:
    # This call is made for the files that it writes, which `cpu_quota` reads.
    folders(tmp_path, MOUNT_V2, "0::/a/b\n", "cpu")
    root = make(tmp_path, {"/sys/fs/cgroup/a/cpu.max": text})
    assert control_groups.cpu_quota(root) == (count or control_groups._NO_QUOTA)
    make(tmp_path, {"/sys/fs/cgroup/a/b/cpu.max": "300000 100000\n"})
    assert control_groups.cpu_quota(root) == min(3, count or 3)


def test_quota_of_version_1_counts(tmp_path) -> None:
    mounts = "35 31 0:32 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    folders(tmp_path, mounts, "4:cpuacct,cpu:/job\n")
    files = {
        "/cg/cpu/job/cpu.cfs_period_us": "100000\n",
        "/cg/cpu/job/cpu.cfs_quota_us": "50000\n",
    }
    root = make(tmp_path, files)
    assert control_groups.cpu_quota(root) == 1
    make(tmp_path, {"/cg/cpu/job/cpu.cfs_quota_us": "-1\n"})
    assert control_groups.cpu_quota(root) == control_groups._NO_QUOTA


def test_extension_gets_a_line_for_each_folder(monkeypatch) -> None:
    """A folder whose name has a line break would look like two lines, so it is left out."""
    names = ["/m/a", "/m/two\nlines", "/m/\udcff", "/m"]
    monkeypatch.setattr(control_groups, "folders", lambda *_: names)
    assert control_groups.memory_folders() == b"/m/a\n/m/\xff\n/m\n"


#: A program that replaces the texts that cumem reads about control groups, and prints the
#: limits that cumem finds in these texts.
LIMITED = """
import cumem
from cumem import _core
from cumem.base import control_groups

control_groups.memory_folders = lambda: {folder!r}.encode() + b"\\n"
control_groups.cpu_quota = lambda: 1
cumem.device_count()
host = _core._host_memory()
print(host.cgroup_nbytes, host.usable_nbytes)
print(_core._processors()[0], cumem.get_limit("pinned"))
"""


def test_what_is_found_at_opening_holds(tmp_path) -> None:
    """The program is limited to 64 MiB and one CPU.

    The core must report both limits, and half of the 64 MiB must be the limit of pinned
    memory.
    """
    (tmp_path / "memory.max").write_text("67108864\n")
    (tmp_path / "memory.current").write_text("0\n")
    program = LIMITED.format(folder=str(tmp_path))
    reported = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert reported.stdout.split() == ["67108864", "67108864", "1", "33554432"]


def test_info_reads_the_same_limit(emulated) -> None:
    assert cumem.device_count() > 0
    assert machine()["cgroup_limit_nbytes"] == _core._host_memory().cgroup_nbytes
