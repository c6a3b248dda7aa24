# SPDX-License-Identifier: Apache-2.0
"""The control groups that may limit this process: their folders, and what they allow.

The kernel says in ``/proc/self/cgroup`` which group of each hierarchy the process is in,
and in ``/proc/self/mountinfo`` which part of a hierarchy is mounted where: in a container
often the process's own group alone. What is missing there or makes no sense limits nothing.
"""

from __future__ import annotations

import os
import re

_NO_QUOTA = 1 << 32  #: CPUs; more than there are


def memory_folders() -> bytes:
    """List the folders of the groups that may limit memory, a line each. The extension
    asks for them, and for `cpu_quota`, when the driver opens.
    """
    lines = (os.fsencode(folder) + b"\n" for folder in folders("memory"))
    return b"".join(line for line in lines if line.count(b"\n") == 1)


def folders(controller: str, root: str = "") -> list[str]:
    """Folders of the process's groups and those above, as far as they are mounted, of
    both versions, without `root`, below which tests have files of their own.
    """
    return [
        folder
        for controllers in ("", controller)  # version 2 has none in its line
        for folder in _hierarchy(controllers, root)
    ]


def cpu_quota(root: str = "") -> int:
    """CPUs that the quotas allow, the least of all groups', rounded up to whole ones."""
    least = _NO_QUOTA
    for folder in folders("cpu", root):
        words = read(f"{root}{folder}/cpu.max").split() or [
            *read(f"{root}{folder}/cpu.cfs_quota_us").split(),
            *read(f"{root}{folder}/cpu.cfs_period_us").split(),
        ]
        if len(words) == 2 and all(map(is_number, words)) and int(words[1]) > 0:
            least = min(least, max(1, -(-int(words[0]) // int(words[1]))))
    return least


def read(path: str) -> str:
    """The text of one of the kernel's files; "" where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return os.fsdecode(file.read())
    except OSError:
        return ""


def is_number(text: str) -> bool:
    """A count as the kernel writes it; "max" and "-1" are none."""
    return text.isascii() and text.isdecimal()


def _hierarchy(controller: str, root: str) -> list[str]:
    """The same of the hierarchy of one version. Of a group outside of what is mounted the
    mount point is the nearest that can be seen.
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
    """The path of the process's group, as /proc/self/cgroup, which `text` is, names it."""
    for line in text.split("\n"):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and controller in controllers.split(","):
            return path
    return None


def _mounted(line: str, controller: str) -> tuple[str, str] | None:
    """Which group of the hierarchy the line mounts, and where; None: of another one.

    ``36 35 98:0 /root /point rw,noatime shared:1 - type source options``
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
    """Where the group lies below what is mounted, "": just there; None: outside."""
    top = top.rstrip("/")
    inside = own.removeprefix(top)
    if (top and inside == own) or "/.." in own or inside[:1] not in ("", "/"):
        return None
    return inside.rstrip("/")
