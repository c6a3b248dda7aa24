# SPDX-License-Identifier: Apache-2.0
"""Finds how many ranks share this host, and which part of the memory is this rank's.

A *rank* is one of several processes that a launcher such as torchrun starts on a host to
run the same program, usually one for each GPU. All of them lock pages of the same memory,
so each of them may have only a share of it. A launcher tells its ranks in variables of the
environment how many ranks are on the host, and which number each of them has.

The memory of a control group is divided in the same way, unless the group is *the rank's
own*, which means that all processes in it, and in the groups below it, belong to this rank.
A process belongs to the rank if it was started with the rank's number in its environment.
The processes that the rank itself starts have that number, and the launcher does not. So a
group that contains the launcher is shared, even if the other ranks have not started yet.

If groups are nested, each of them is a limit, and the smallest share counts. For example, a
job of 8 ranks may use 512 GiB, and each rank is in a group of its own with 128 GiB. Then
the share of a rank is 64 GiB, an eighth of the job's memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from cumem.base.control_groups import memory_limits, processes, read
from cumem.base.units import format_nbytes

#: Linux has no more processes than this, so a larger number of ranks is a mistake.
_MOST_PROCESSES: Final = 1 << 22


class Launcher(NamedTuple):
    """A program that starts ranks, and the variables that it sets for each of them."""

    name: str
    count_variable: str  #: the variable with the number of ranks on the host
    rank_variable: str  #: the variable with the number of this rank among them, from 0
    #: Other programs may use a variable of this name for something else. So the number
    #: counts only if the launcher's other variable is set too.
    is_common: bool = False


#: The launchers that say how many ranks are on a host. `mpiexec` of MPICH and of Intel MPI
#: is called Hydra. Slurm has variables about a whole job as well. They do not count: a
#: batch script has them too, and a program that it starts without `srun` is alone.
LAUNCHERS: Final = (
    Launcher("torchrun", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    Launcher("DeepSpeed", "LOCAL_SIZE", "LOCAL_RANK", is_common=True),
    Launcher("Open MPI", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("MPICH or Intel MPI", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    Launcher("MVAPICH", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    Launcher("Slurm", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
)


class Ranks(NamedTuple):
    """How many ranks are on this host, according to the launchers."""

    rank_count: int  #: 1 if no launcher says how many there are
    launcher: Launcher | None  #: the launcher that says so
    wrong: dict[str, str]  #: variables whose values are not a number of ranks


class Share(NamedTuple):
    """The part of the memory of which this rank may page-lock one half by default."""

    ranks: Ranks
    nbytes: int | None  #: the part; None if it is not known how much memory there is
    whole_nbytes: int | None  #: the memory of which this is a part
    is_own_group: bool  #: whether that memory is of a group that is the rank's own

    @property
    def default_limit(self) -> int | None:
        """The limit in bytes that page-locked memory has by default."""
        return None if self.nbytes is None else self.nbytes // 2

    @property
    def is_of_rank(self) -> bool:
        """Whether the memory is that of one of several ranks."""
        return self.ranks.rank_count > 1 and self.nbytes is not None

    @property
    def reason(self) -> str:
        """Where the default limit comes from, as a part of a sentence."""
        launcher, whole = self.ranks.launcher, self.whole_nbytes
        if launcher is None or whole is None or not self.is_of_rank:
            return "half of the memory that the process may use"
        size = format_nbytes(whole)
        if self.is_own_group:
            return f"half of {size}, the limit of a control group of this rank alone"
        counted = f"{self.ranks.rank_count} ranks of this host"
        return (
            f"half of {size}, divided by the {counted} that {launcher.count_variable} "
            "counts"
        )


#: The share that was found when the driver was opened. The default limits in force follow
#: from it.
at_opening: Share | None = None


def find_share(usable: int | None, total: int | None) -> int | None:
    """Return how many bytes are this rank's share of the memory, or None if not known.

    The extension calls this when the driver opens, with the memory that the process may use
    and with all memory of the machine.
    """
    global at_opening
    at_opening = share_of(read_ranks(os.environ), usable, total)
    return at_opening.nbytes


def read_ranks(environment: Mapping[str, str]) -> Ranks:
    """Return what the launchers say in these variables.

    One launcher may start another. For example, `srun` starts one torchrun on each host,
    and torchrun starts the ranks. Therefore the largest number is the one that counts.
    """
    count, launcher = 1, None
    wrong: dict[str, str] = {}
    for each in LAUNCHERS:
        text = environment.get(each.count_variable, "")
        if not text or (each.is_common and each.rank_variable not in environment):
            continue
        found = (
            _number_on_host(text, environment.get("SLURM_NODEID", ""))
            if each.name == "Slurm"
            else _number(text)
        )
        if found is None:
            wrong[each.count_variable] = text
        elif launcher is None or found > count:
            count, launcher = found, each
    return Ranks(count, launcher, wrong)


def _number(text: str) -> int | None:
    """Return the number of ranks that a text is, or None if it is something else."""
    number = int(text) if re.fullmatch(r"[0-9]{1,7}", text) else 0
    return number if 0 < number <= _MOST_PROCESSES else None


def _number_on_host(text: str, host: str) -> int | None:
    """Return the number of ranks on one host, from what Slurm says about all hosts.

    The text is ``8(x2),4`` for two hosts with 8 ranks each and one with 4. `host` is the
    number of the host in this order, as a text.
    """
    place = int(host) if re.fullmatch(r"[0-9]{1,7}", host) else None
    numbers: set[int | None] = set()
    end = 0
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,7})\))?", part)
        number = None if match is None else _number(match[1])
        if match is None or number is None:
            return None
        numbers.add(number)
        end += int(match[2] or 1)
        if place is not None and place < end:
            return number
    return numbers.pop() if len(numbers) == 1 else None


def share_of(
    ranks: Ranks, usable: int | None, total: int | None, root: str = ""
) -> Share:
    """Return the share of one of these ranks. Tests put files below another `root`."""
    if ranks.rank_count == 1:
        return Share(ranks, usable, usable, False)
    shares = []
    if total is not None:
        shares.append(Share(ranks, total // ranks.rank_count, total, False))
    for folder, limit, _ in memory_limits(root):
        if limit is not None:
            is_own = _is_own(folder, ranks.launcher, root)
            part = limit if is_own else limit // ranks.rank_count
            shares.append(Share(ranks, part, limit, is_own))
    unknown = Share(ranks, None, None, False)
    return min(shares, key=lambda share: share.nbytes or 0, default=unknown)


def _is_own(folder: str, launcher: Launcher | None, root: str) -> bool:
    """Return whether a control group has processes of this rank alone.

    A process whose environment cannot be read counts as one of another rank.
    """
    rank = os.environ.get(launcher.rank_variable) if launcher is not None else None
    if launcher is None or rank is None:
        return False
    said = f"{launcher.rank_variable}={rank}"
    own = str(os.getpid())
    is_there = False
    for process in processes(folder, root):
        if process == own:
            # The program may have set the variable itself, and then the kernel's file does
            # not have it.
            is_there = True
        elif said not in read(f"{root}/proc/{process}/environ").split("\0"):
            return False
    return is_there
