# SPDX-License-Identifier: Apache-2.0
"""Tests of the limit of page-locked memory in one of several ranks of a host.

A rank is one of the processes that a launcher such as torchrun starts. The launcher says in
the environment how many there are. `cumem.base.ranks` divides the memory by this number,
unless a control group limits the memory of one rank alone. Some tests write the kernel's
files about control groups below a temporary folder. Others start programs in the
environment of a rank, and read the limit that is in force there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.programs import run

import cumem
from cumem.base import ranks
from cumem.base.ranks import read_ranks

MIB, GIB = 1 << 20, 1 << 30

#: What each launcher sets in the third of four ranks of a host.
LAUNCHERS = {
    "torchrun": {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "2"},
    "DeepSpeed": {"LOCAL_SIZE": "4", "LOCAL_RANK": "2"},
    "Open MPI": {
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    },
    "MPICH or Intel MPI": {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "2"},
    "MVAPICH": {"MV2_COMM_WORLD_LOCAL_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "2"},
    "Slurm": {
        "SLURM_STEP_TASKS_PER_NODE": "4(x3)",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "2",
    },
}
VARIABLES = {name for variables in LAUNCHERS.values() for name in variables}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what a launcher of the tests themselves has set."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


# -- how many ranks there are ----------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_says_how_many_ranks_there_are(name: str) -> None:
    count, launcher, wrong = read_ranks(LAUNCHERS[name])
    assert launcher is not None
    assert (count, launcher.name, wrong) == (4, name, {})
    assert LAUNCHERS[name][launcher.rank_variable] == "2"


def test_without_a_launcher_there_is_one_rank() -> None:
    assert read_ranks({}) == (1, None, {})
    # A batch script of Slurm has these variables, and the Python in it is no rank.
    job = {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "8", "SLURM_LOCALID": "0"}
    assert read_ranks(job) == (1, None, {})


@pytest.mark.parametrize(
    "text",
    [
        *("0", "-1", "two", "4.0", "\u0664", " ", "4 ranks", "4(x2", "4,,4"),
        *("4194305", "9" * 5000),
    ],
)
@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"])
def test_wrong_number_counts_as_none(name: str, text: str) -> None:
    assert read_ranks({name: text}) == (1, None, {name: text})
    count, launcher, wrong = read_ranks(LAUNCHERS["Open MPI"] | {name: text})
    assert launcher is not None
    assert (count, launcher.name, wrong) == (4, "Open MPI", {name: text})


def test_empty_variable_is_not_wrong() -> None:
    assert read_ranks({"LOCAL_WORLD_SIZE": ""}) == (1, None, {})


@pytest.mark.parametrize(("outer", "inner"), [(1, 8), (8, 1)])
def test_largest_number_of_several_launchers_counts(outer: int, inner: int) -> None:
    said = {
        "SLURM_STEP_TASKS_PER_NODE": str(outer),
        "LOCAL_WORLD_SIZE": str(inner),
    }
    count, launcher, _ = read_ranks(said)
    assert launcher is not None
    assert (count, launcher.name) == (8, "torchrun" if inner == 8 else "Slurm")


def test_common_name_counts_only_beside_its_launchers_other_variable() -> None:
    """Programs of other kinds call something else LOCAL_SIZE."""
    assert read_ranks({"LOCAL_SIZE": "256"}).rank_count == 1
    assert read_ranks({"LOCAL_SIZE": "256", "LOCAL_RANK": "0"}).rank_count == 256


@pytest.mark.parametrize(
    ("text", "node", "count"),
    [
        *(("8(x2),4", str(n), each) for n, each in enumerate((8, 8, 4))),
        ("8(x2),4", "3", 1),
        ("8(x2),4", "", 1),
        ("8(x2),4", "x", 1),
        ("6,6", "", 6),
        ("8(x2),0", "2", 1),
        ("6,6", "7", 6),
    ],
)
def test_number_of_this_host_counts(text: str, node: str, count: int) -> None:
    """Slurm says how many ranks are on each host, and which of the hosts this one is."""
    said = {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node}
    assert read_ranks(said).rank_count == count
    assert bool(read_ranks(said).wrong) == (count == 1)


def test_numbers_of_several_hosts_are_in_slurms_variable_alone() -> None:
    assert read_ranks({"LOCAL_WORLD_SIZE": "4(x2)"}).wrong == {
        "LOCAL_WORLD_SIZE": "4(x2)"
    }


# -- the share of a rank ---------------------------------------------------------------

OWN = "/sys/fs/cgroup/job/rank2"
MOUNTED = {
    "/proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    "/proc/self/cgroup": "0::/job/rank2\n",
}
#: The environments of the processes of a job, by their numbers.
PROCESSES = {
    "100": "PATH=/bin\0",  # the launcher
    "101": "LOCAL_RANK=1\0LOCAL_WORLD_SIZE=4\0",  # another rank
    "102": "PATH=/bin\0LOCAL_RANK=2\0",  # a worker of this rank
    "103": "LOCAL_RANK=22\0",
    "104": "",  # the environment cannot be read
}
ME = str(os.getpid())


def share(
    root: Path, limits: dict[str, int], members: dict[str, str], name: str = "torchrun"
) -> ranks.Share:
    """Return the share of a rank on a machine with 64 GiB.

    `limits` are the limits of control groups by their folders, in GiB, and `members` the
    processes in each group.
    """
    files = MOUNTED | {f"/proc/{n}/environ": text for n, text in PROCESSES.items()}
    files |= {f"{folder}/memory.max": f"{n * GIB}\n" for folder, n in limits.items()}
    files |= {
        f"{folder}/cgroup.procs": numbers.replace(" ", "\n") + "\n"
        for folder, numbers in members.items()
    }
    for place, text in files.items():
        path = root / place.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = read_ranks(LAUNCHERS[name])
    usable = min(64, *limits.values(), 64) * GIB
    return ranks.share_of(found, usable, 64 * GIB, str(root))


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests' own process be the third of four ranks that torchrun started."""
    for name, text in LAUNCHERS["torchrun"].items():
        monkeypatch.setenv(name, text)


def test_memory_of_the_machine_is_divided(rank, tmp_path: Path) -> None:
    found = share(tmp_path, {}, {OWN: ME})
    assert (found.nbytes, found.default_limit) == (16 * GIB, 8 * GIB)
    assert found.reason == (
        "half of 64 GiB, divided by the 4 ranks of this host that LOCAL_WORLD_SIZE counts"
    )


@pytest.mark.parametrize(
    "others", ["100", "101", "102 101", "103", "104", "0", "102 100", "999"]
)
def test_memory_of_a_group_with_others_is_divided(
    rank, tmp_path: Path, others: str
) -> None:
    """The launcher, other ranks and processes that cannot be read share the memory."""
    found = share(tmp_path, {OWN: 32}, {OWN: f"{ME} {others}"})
    assert (found.nbytes, found.is_own_group) == (8 * GIB, False)
    assert "half of 32 GiB, divided by the 4 ranks" in found.reason


@pytest.mark.parametrize("others", ["", " 102"])
def test_memory_of_a_group_of_one_rank_is_its_own(
    rank, tmp_path: Path, others: str
) -> None:
    found = share(tmp_path, {OWN: 12}, {OWN: ME + others})
    assert (found.nbytes, found.is_own_group) == (12 * GIB, True)
    assert (
        found.reason
        == "half of 12 GiB, the limit of a control group of this rank alone"
    )


def test_share_of_the_machine_holds_in_a_group_of_one_rank(
    rank, tmp_path: Path
) -> None:
    """Each of four ranks is in a group with 48 GiB, and the machine has 64 GiB in all."""
    found = share(tmp_path, {OWN: 48}, {OWN: ME})
    assert (found.nbytes, found.is_own_group) == (16 * GIB, False)


def test_smallest_share_of_nested_groups_counts(rank, tmp_path: Path) -> None:
    job = OWN.rpartition("/")[0]
    members = {OWN: ME, job: "100", f"{job}/rank1": "101"}
    assert share(tmp_path, {OWN: 12, job: 40}, members).nbytes == 10 * GIB
    assert share(tmp_path, {OWN: 8, job: 40}, members).nbytes == 8 * GIB


def test_processes_of_groups_below_are_in_a_group(rank, tmp_path: Path) -> None:
    """Slurm limits the group of a step, and each task is in a group below that."""
    job = OWN.rpartition("/")[0]
    members = {OWN: ME, f"{job}/rank1": "101"}
    assert share(tmp_path, {job: 32}, members).nbytes == 8 * GIB
    members = {OWN: ME, f"{job}/rank1": "102"}
    assert share(tmp_path, {job: 12}, members).nbytes == 12 * GIB


def test_group_whose_processes_are_unknown_is_shared(rank, tmp_path: Path) -> None:
    assert share(tmp_path, {OWN: 12}, {}).nbytes == 3 * GIB
    assert share(tmp_path, {OWN: 12}, {OWN: "102"}).nbytes == 3 * GIB


def test_group_is_shared_if_the_rank_has_no_number(tmp_path: Path) -> None:
    assert share(tmp_path, {OWN: 12}, {OWN: ME}).nbytes == 3 * GIB


def test_memory_is_not_divided_without_other_ranks(tmp_path: Path) -> None:
    for said in ({}, {"LOCAL_WORLD_SIZE": "1"}, {"LOCAL_WORLD_SIZE": "0"}):
        found = ranks.share_of(read_ranks(said), 7, 9, str(tmp_path))
        assert (found.nbytes, found.is_of_rank) == (7, False)
        assert found.reason == "half of the memory that the process may use"


def test_unknown_memory_gives_no_share(rank, tmp_path: Path) -> None:
    found = ranks.share_of(read_ranks(os.environ), None, None, str(tmp_path))
    assert (found.nbytes, found.default_limit) == (None, None)


# -- programs --------------------------------------------------------------------------

#: Prints the limits in force. The groups of the process are those that the test has made.
PROGRAM = """
import json, multiprocessing, os, sys

import cumem
from cumem import _core
from cumem.base import control_groups

folder, others = sys.argv[1:3]
control_groups.folders = lambda controller, root="": [folder] if folder else []


def limits():
    found = [cumem.get_limit(kind) for kind in ("pinned", "mapped")]
    return found + [_core._host_memory().usable_nbytes]


if __name__ == "__main__":
    if folder:
        with open(folder + "/cgroup.procs", "w") as file:
            print(os.getpid(), others, sep="\\n", file=file)
"""


def printed(
    code: str, folder: object = "", others: str = "", **environment: str
) -> list[int]:
    """Return the list that a program prints, which begins with PROGRAM."""
    done = run("-c", PROGRAM + code, str(folder), others, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    answer: list[int] = json.loads(done.stdout)
    return answer


SHOW = "    print(json.dumps(limits()))\n"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_each_rank_may_lock_its_share(name: str) -> None:
    *limits, usable = printed(SHOW, **LAUNCHERS[name])
    assert limits == [usable // 4 // 2] * 2


@pytest.mark.parametrize("text", ["0", "many", "1"])
def test_process_without_other_ranks_may_lock_half(text: str) -> None:
    *limits, usable = printed(SHOW, LOCAL_WORLD_SIZE=text)
    assert limits == [usable // 2] * 2


@pytest.mark.parametrize(("others", "share"), [("", 64), ("{parent}", 16)])
def test_group_limits_a_rank_by_the_processes_in_it(
    tmp_path: Path, others: str, share: int
) -> None:
    """The parent of the program, which is not of its rank, stands for the launcher."""
    (tmp_path / "memory.max").write_text(f"{64 * MIB}\n")
    (tmp_path / "memory.current").write_text("0\n")
    found = printed(
        SHOW,
        tmp_path,
        others.format(parent=os.getpid()),
        **LAUNCHERS["Open MPI"],
    )
    assert found == [share * MIB // 2] * 2 + [64 * MIB]


def test_limits_of_the_user_are_not_divided() -> None:
    ranked = LAUNCHERS["torchrun"]
    pinned, mapped, usable = printed(SHOW, CUMEM_LIMIT_PINNED="50%", **ranked)
    assert (pinned, mapped) == (usable // 2, usable // 8)
    pinned, mapped, _ = printed(SHOW, CUMEM_LIMIT_PINNED="1GiB", **ranked)
    assert (pinned, mapped) == (GIB, usable // 8)
    code = """
    cumem.set_limit("mapped", "100%")
    with cumem.limit("pinned", "75%"):
        print(json.dumps(limits()))
"""
    pinned, mapped, _ = printed(code, **ranked)
    assert (pinned, mapped) == (usable * 3 // 4, usable)


def test_end_of_a_limit_block_restores_the_share() -> None:
    code = """
    with cumem.limit("pinned", "75%"):
        cumem.shutdown()
        limits()
    print(json.dumps(limits()))
"""
    pinned, mapped, usable = printed(code, **LAUNCHERS["torchrun"])
    assert (pinned, mapped) == (usable // 8, usable // 8)


@pytest.mark.parametrize("is_asked_before", [False, True])
def test_forked_child_of_a_rank_has_its_limit(is_asked_before: bool) -> None:
    """A process that has only asked for its limit may fork."""
    code = f"""
    if {is_asked_before}:
        limits()
    child = os.fork()
    if child == 0:
        cumem.empty_pinned(1)
        print(json.dumps(limits()), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    *limits, usable = printed(code, **LAUNCHERS["torchrun"])
    assert limits == [usable // 8] * 2


def test_spawned_child_of_a_rank_has_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "rank.py"
    path.write_text(
        PROGRAM
        + """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps([pool.apply(limits), limits()]))
"""
    )
    done = run(str(path), "", "", **LAUNCHERS["Slurm"])
    assert (done.returncode, done.stderr) == (0, "")
    child, parent = json.loads(done.stdout)
    assert child == parent == [parent[2] // 8] * 2 + [parent[2]]


# -- what users read -------------------------------------------------------------------

#: Prints the text of an error, or whatever `found` is.
TELL = """
    import numpy as np
    try:
        {call}
    except cumem.OutOfMemoryError as error:
        found = str(error)
    print(json.dumps([found]))
"""
DIVIDED = "divided by the 4 ranks of this host that LOCAL_WORLD_SIZE counts)"


@pytest.mark.parametrize(
    "call",
    [
        "cumem.empty_pinned(64 << 20, 'u1')",
        "cumem.empty_mapped(64 << 20, 'u1')",
        "cumem.register(np.empty(64 << 20, 'u1'))",
    ],
)
def test_error_names_the_share(tmp_path: Path, call: str) -> None:
    (tmp_path / "memory.max").write_text(f"{256 * MIB}\n")
    (text,) = printed(
        TELL.format(call=call), tmp_path, str(os.getpid()), **LAUNCHERS["torchrun"]
    )
    assert f"limit 32 MiB (half of 256 MiB, {DIVIDED}" in str(text)


@pytest.mark.parametrize(
    "call",
    [
        "cumem.set_limit('pinned', '16MiB'); cumem.empty_pinned(64 << 20, 'u1')",
        "cumem.set_limit('device', '32MiB'); cumem.empty_device(64 << 20, 'u1')",
    ],
)
def test_error_names_no_share_if_another_limit_was_met(
    tmp_path: Path, call: str
) -> None:
    (tmp_path / "memory.max").write_text(f"{256 * MIB}\n")
    (text,) = printed(
        TELL.format(call=call), tmp_path, str(os.getpid()), **LAUNCHERS["torchrun"]
    )
    assert "MiB\n" in str(text)
    assert "divided" not in str(text)


def test_info_says_what_the_limit_is_a_share_of() -> None:
    done = run("-m", "cumem", "info", **LAUNCHERS["torchrun"])
    (line,) = (row for row in done.stdout.splitlines() if "pinned limit" in row)
    assert line.endswith(DIVIDED)
    done = run(
        "-m", "cumem", "info", CUMEM_LIMIT_PINNED="3MiB", **LAUNCHERS["torchrun"]
    )
    (line,) = (row for row in done.stdout.splitlines() if "pinned limit" in row)
    assert line.endswith("3 MiB (cumem.set_limit)")


def finding(**environment: str) -> dict[str, object]:
    """Return what the doctor finds out about the ranks of this host."""
    done = run("-m", "cumem", "doctor", "--json", **environment)
    found = json.loads(done.stdout)["findings"]
    (said,) = (each for each in found if each["check"] == "ranks")
    return dict(said)


def test_doctor_says_what_the_limit_is_a_share_of() -> None:
    said = finding(**LAUNCHERS["torchrun"])
    assert (said["status"], said["cure"]) == ("ok", None)
    assert str(said["text"]).startswith("torchrun started 4 ranks on this host")
    assert str(said["text"]).endswith(DIVIDED)
    said = finding()
    assert "no launcher says" in str(said["text"])


def test_doctor_names_a_wrong_number_of_ranks() -> None:
    said = finding(LOCAL_WORLD_SIZE="none")
    assert said["status"] == "note"
    assert "LOCAL_WORLD_SIZE='none'" in str(said["text"])
    assert "CUMEM_LIMIT_PINNED" in str(said["cure"])


def test_reason_is_known_in_this_process(emulated) -> None:
    assert cumem.get_limit("pinned") is not None
    assert ranks.at_opening is not None
    assert cumem.info.collect()["machine"]["pinned_limit_reason"] == (
        ranks.at_opening.reason
    )
