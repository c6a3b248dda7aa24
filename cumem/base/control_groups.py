# SPDX-License-Identifier: Apache-2.0
"""Finds the control groups that may limit this process, and what they allow.

The kernel says in ``/proc/self/cgroup`` which group of each hierarchy the process is in,
and in ``/proc/self/mountinfo`` where each part of a hierarchy is mounted. In a container,
only the process's own group may be mounted. If anything is missing or cannot be read, there
is no limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

_NO_QUOTA = 1 << 32  #: a number of CPUs that no machine has
#: The files with the limit and the use of memory, for versions 2 and 1.
_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_UNLIMITED_V1 = 1 << 62  #: version 1 says "no limit" with a number above this


class MemoryLimit(NamedTuple):
    """What a control group says about memory; None stands for what it does not say."""

    folder: str
    limit: int | None  #: in bytes
    used: int | None  #: in bytes


def memory_folders() -> bytes:
    """Return the folders of the groups that may limit memory, one per line.

    The extension calls this function and `cpu_quota` when the driver opens.
    """
    lines = (os.fsencode(folder) + b"\n" for folder in folders("memory"))
    return b"".join(line for line in lines if line.count(b"\n") == 1)


def folders(controller: str, root: str = "") -> list[str]:
    """Return the folders of the process's groups and of the groups above them.

    Folders that are not mounted are left out. Groups of both versions of the hierarchy are
    returned. Tests put files below another `root`, which the returned paths leave out.
    """
    return [
        folder
        for controllers in ("", controller)  # version 2 does not name a controller
        for folder in _hierarchy(controllers, root)
    ]


def cpu_quota(root: str = "") -> int:
    """Return the smallest quota of all groups, in CPUs, rounded up to a whole number."""
    least = _NO_QUOTA
    for folder in folders("cpu", root):
        words = read(f"{root}{folder}/cpu.max").split() or [
            *read(f"{root}{folder}/cpu.cfs_quota_us").split(),
            *read(f"{root}{folder}/cpu.cfs_period_us").split(),
        ]
        if len(words) == 2 and all(map(is_number, words)) and int(words[1]) > 0:
            least = min(least, max(1, -(-int(words[0]) // int(words[1]))))
    return least


def memory_limits(root: str = "") -> list[MemoryLimit]:
    """Return the limits of all groups that may limit memory."""
    found = []
    for folder in folders("memory", root):
        for names in _MEMORY_FILES:
            limit, used = (_number(f"{root}{folder}/{name}") for name in names)
            if limit is not None and limit >= _UNLIMITED_V1:
                limit = None
            found.append(MemoryLimit(folder, limit, used))
    return found


def processes(folder: str, root: str = "") -> Iterator[str]:
    """Yield the numbers of the processes in a group and in all groups below it, as texts.

    A process that is not visible here, as from within a container, has the number 0.
    """
    for inside, _, _ in os.walk(root + folder):
        yield from read(f"{inside}/cgroup.procs").split()


def _number(path: str) -> int | None:
    text = read(path).strip()
    return int(text) if is_number(text) else None


def read(path: str) -> str:
    """Return the text of a file of the kernel, or "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return os.fsdecode(file.read())
    except OSError:
        return ""


def is_number(text: str) -> bool:
    """Return whether the text is a number; "max" and "-1", which mean no limit, are not."""
    return text.isascii() and text.isdecimal()


def _hierarchy(controller: str, root: str) -> list[str]:
    """Return the folders of the hierarchy of one version.

    If the process's own group is not mounted, the mount point stands for the nearest group
    above it.
    """
    own = _own(controller, read(f"{root}/proc/self/cgroup"))
    if own is None:
        return []
    found: list[str] = []
    for line in read(f"{root}/proc/self/mountinfo").split("\n"):
        mount = _mounted(line, controller)
        if mount is not None:
            top, point = mount
            inside = _path_inside(own, top)
            names = (inside or "").split("/")
            found = [point + "/".join(names[:n]) for n in range(len(names), 0, -1)]
            if inside is not None:
                break
    return found


def _own(controller: str, text: str) -> str | None:
    """Return the path of the process's group in the text of /proc/self/cgroup."""
    for line in text.split("\n"):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and controller in controllers.split(","):
            return path
    return None


def _mounted(line: str, controller: str) -> tuple[str, str] | None:
    """Return the group that a line mounts and where, or None if it is of another hierarchy.

    A line is ``36 35 98:0 /root /point rw,noatime shared:1 - type source options``.
    """
    where, _, what = line.partition(" - ")
    places, system = where.split(" "), what.split(" ")
    if len(places) < 5 or len(system) < 3:
        return None
    if system[0] != ("cgroup" if controller else "cgroup2") or (
        controller and controller not in system[2].split(",")
    ):
        return None
    top, point = (
        re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), place)
        for place in places[3:5]
    )
    return top, point


def _path_inside(own: str, top: str) -> str | None:
    """Return the path of a group relative to the mounted one, or None if it is outside."""
    top = top.rstrip("/")
    inside = own.removeprefix(top)
    if (top and inside == own) or "/.." in own or inside[:1] not in ("", "/"):
        return None
    return inside.rstrip("/")
