# SPDX-License-Identifier: Apache-2.0
"""Tests of which calls may come before a fork.

Some calls only ask or set something and do not start the driver. A child that is forked
after them can use all of cumem. The first tests make such calls, and then every public
call, before a fork. The later ones test how the number of devices is found without starting
the driver: from `CUDA_VISIBLE_DEVICES`, from NVML, or by asking the driver in another
process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import programs
from test_first_calls import CALLS, OTHERS, PROGRAM
from test_first_calls import folder as files_of_calls  # noqa: F401

from cumem.devices import counting

pytestmark = [
    # These tests start separate programs, whose results no version of Python changes.
    pytest.mark.any_python,
    pytest.mark.skipif(
        sys.platform != "linux", reason="forks are tested on Linux only"
    ),
]

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join(p for p in sys.path if p)

#: Calls that ask or set something. Each is made in another process, and starts no driver.
QUESTIONS = {
    "import": "pass",
    "is_available": "cumem.is_available()",
    "backend": "cumem.backend()",
    "device_count": "cumem.device_count()",
    "about": "cumem.info.about()",
    "Device": "cumem.Device(0), repr(cumem.Device(0))",
    "current_device": "cumem.current_device()",
    "set_current_device": "cumem.set_current_device(0)",
    "device block": "cumem.Device(0).__enter__()",
    "get_limit": "cumem.get_limit('pinned')",
    "set_limit": "cumem.set_limit('pinned', '1GiB')",
    "set_limit of a device": "cumem.set_limit('device', '1GiB')",
    "limit": "cumem.limit('pinned', '1GiB').__enter__()",
    "memory_info": "cumem.memory_info('host')",
    "stats": "str(cumem.stats())",
    "measure": "cumem.measure().__enter__()",
    "trim": "cumem.trim()",
    "configure": "cumem.configure(threads=2)",
    "asbuffer": "kept = cumem.asbuffer(numpy.ones(3)), cumem.asbuffer(bytearray(9))",
    "asbuffer of 8 MiB": "kept = cumem.asbuffer(numpy.ones(1 << 20))",
    "memoryview of asbuffer": "memoryview(cumem.asbuffer(numpy.ones(3)))",
    "Pool": "kept = cumem.Pool('pinned'), cumem.Pool('device', limit='1MiB')",
    "Pool.stats": "cumem.Pool('pinned').stats()",
    "pool block": "cumem.Pool('pinned').__enter__()",
    "PinnedCollate": "kept = cumem.PinnedCollate()",
    "numpy_pinned": "kept = cumem.numpy_pinned()",
    "on_out_of_memory": "cumem.on_out_of_memory(print)",
    "record": "cumem.record().__enter__()",
    "recommend": "cumem.recommend('1GiB', reuse=9)",
}

#: A program that makes such a call, forks, and checks that its children can use all of
#: cumem.
ASKING = """
import os, signal, sys, numpy
import cumem

{question}

def child(last):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        assert cumem.device_count() == {count}
        assert cumem.zeros(4, "f4", "device").to_numpy().sum() == 0
        assert cumem.full(4, 2, "f4", "pinned").numpy().sum() == 8
        assert cumem.empty(4, "f4", "pinned", pool=cumem.Pool("pinned")).nbytes == 16
        stream = cumem.Stream()
        cumem.copy_async(cumem.empty_device(9, "u1"), b"123456789", stream=stream)
        stream.synchronize()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the child failed"
    if last == 0:
        return
    pid = os.fork()
    if pid == 0:
        child(last - 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the grandchild failed"

child(1)
assert cumem.zeros(4, "f4", "device").to_numpy().sum() == 0  # the parent can use it, too
"""


def run(code: str, **variables: str) -> str:
    """Run code in another process, which must succeed silently, and return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": PATH} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("question", QUESTIONS)
def test_child_after_a_question_has_all_of_cumem(question) -> None:
    code = ASKING.format(question=QUESTIONS[question], count=3)
    run(code, CUMEM_BACKEND="emulated", CUMEM_EMULATED_DEVICES="3")


def test_child_after_limits_of_the_environment_has_all_of_cumem() -> None:
    limits = {"CUMEM_LIMIT_PINNED": "50%", "CUMEM_LIMIT_DEVICE": "64MiB"}
    limits["CUMEM_LIMIT_MANAGED"] = "50%"
    code = ASKING.format(
        question="assert cumem.get_limit('device') == 1 << 26", count=1
    )
    run(code, CUMEM_BACKEND="emulated", CUMEM_EMULATED_DEVICES="1", **limits)


@pytest.mark.gpu
@pytest.mark.parametrize("question", QUESTIONS)
def test_child_after_a_question_has_its_gpu(question, tmp_path) -> None:
    code = ASKING.format(question=QUESTIONS[question], count="cumem.device_count()")
    # The folder of the cache is empty. To read figures from the cache, cumem would need the
    # name of the GPU, and would start the driver to ask for it.
    run(code, CUMEM_BACKEND="cuda", XDG_CACHE_HOME=str(tmp_path))


@pytest.mark.gpu
def test_count_without_the_driver_is_that_of_the_driver() -> None:
    said = run(
        "import cumem; n = cumem.device_count(); cumem.empty_pinned(1);"
        "print(n == cumem.device_count() == cumem.device_count())",
        CUMEM_BACKEND="cuda",
    )
    assert said == "True\n"


# -- every public call, before a fork ----------------------------------------------------

#: These calls start the driver, so that a child can only work on the host. They allocate,
#: register, make streams and events, or ask for something that only the driver knows.
USES = {
    *("array", "asarray", "empty", "empty_device", "empty_like"),
    *("empty_managed", "empty_mapped", "empty_pinned", "full", "full_like", "zeros"),
    *("zeros_like", "take_rows", "register", "load_safetensors", "to_device"),
    *("Workspace", "Region", "Pool", "sleep"),
    *("chunks", "pipeline", "prefetch", "prefetch_pages", "tiles"),
    *("PinnedCollate", "numpy_pinned", "Stream", "Event", "Device", "memory_info"),
    *("synchronize", "a thread registers", "assignment"),
}

#: A program that makes each call in a child, which then forks as well. It prints what
#: became of the last child: 0 if it could use a device, 7 if it was refused.
TABLE = (
    PROGRAM[: PROGRAM.index("bad = {}")]
    + """
answers = {}
for name, call in calls.items():
    parent = os.fork()
    if parent == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        make(call)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            assert cumem.copy(n(), a) is None
            try:
                assert cumem.zeros(4, "f4", "device").to_numpy().sum() == 0
            except RuntimeError as error:
                assert "forked child" in str(error)
                os._exit(7)
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)
    answers[name] = os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1])
print(json.dumps(answers))
"""
)


@pytest.fixture(scope="module")
def answers(files_of_calls) -> dict[str, int]:  # noqa: F811
    """Return 0 for each call after which the child could use a device, and 7 for others."""
    calls = json.dumps(CALLS | OTHERS)
    program = TABLE.replace("import contextlib", "import signal, contextlib")
    done = programs.run("-c", program, "nothing()", calls, str(files_of_calls))
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CALLS | OTHERS)
def test_first_call_before_a_fork_leaves_the_child_what_the_page_says(
    answers, name
) -> None:
    assert answers[name] == (7 if name in USES else 0)


def test_page_names_each_call_that_starts_the_driver() -> None:
    page = (ROOT / "docs" / "workers.md").read_text()
    missing = [name for name in USES & set(CALLS) if f"`{name}" not in page]
    assert missing == []


#: Calls that need no driver either, although they collate, copy or set a share.
WITHOUT_DRIVER = {
    "numbers": "cumem.PinnedCollate()([1, 2])",
    "tuples of numbers": "cumem.PinnedCollate()([(1, 2.0), (3, 4.0)])",
    "text": "cumem.PinnedCollate()(['a', 'b'])",
    "share of a device": "cumem.set_limit('device', '50%')",
    "share in a block": "cumem.limit('managed', '50%').__enter__()",
    "share of a pool": "kept = cumem.Pool('device', limit='50%'); kept.stats()",
    "background": "cumem.copy_async(numpy.ones(9), numpy.zeros(9)).wait()",
    "idle trim": "kept = cumem.Pool('pinned', idle_trim=0.001)",
}


@pytest.mark.parametrize("question", WITHOUT_DRIVER)
def test_child_after_calls_that_need_no_driver_has_all_of_cumem(question) -> None:
    code = ASKING.format(question=WITHOUT_DRIVER[question], count=3)
    run(code, CUMEM_BACKEND="emulated", CUMEM_EMULATED_DEVICES="3")


def test_share_of_a_device_is_in_force_from_the_first_memory_on() -> None:
    """A share of the memory is a limit even before anybody asks how many bytes it is."""
    code = """
import cumem
cumem.set_limit("device", "33.3%")
pool = cumem.Pool("device", limit="25%")
assert pool.stats().limit is None  # the size of the memory is not known yet
with cumem.limit("device", "10%"):
    try:
        cumem.empty_device(200 << 20, "u1")
    except cumem.OutOfMemoryError:
        pass
    else:
        raise AssertionError("the share does not hold")
assert cumem.get_limit("device") == int((1 << 30) * 333 / 1000)
try:
    cumem.empty(300 << 20, "u1", "device", pool=pool)
except cumem.OutOfMemoryError as error:
    assert error.limit == pool.limit == 1 << 28
else:
    raise AssertionError("the share of the pool does not hold")
pool.limit = "1%"
assert pool.limit == pool.stats().limit == (1 << 30) // 100
other = cumem.Pool("managed", limit="50%")
assert other.limit == 1 << 29  # asking starts the driver
"""
    variables = {"CUMEM_EMULATED_MEMORY": "1GiB", "CUMEM_LIMIT_DEVICE": "90%"}
    run(code, CUMEM_BACKEND="emulated", **variables)


#: A program that copies on the host before it forks.
WORKED = """
import os, signal, numpy
import cumem

pool = cumem.Pool("pinned")
held = cumem.asbuffer(numpy.ones(9))
source, target = numpy.ones(1 << 23, "u1"), numpy.zeros(1 << 23, "u1")
cumem.explain(target, source)  # this starts the engine that makes copies
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    assert held.numpy().sum() == 9
    assert cumem.empty(4, "f4", "pinned", pool=pool).nbytes == 16
    target[:] = 0
    cumem.copy(target, source)
    assert target.all()
    assert cumem.array(held).to_numpy().sum() == 9
    cumem.shutdown()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_child_of_a_process_with_an_engine_but_no_driver_has_all_of_cumem() -> None:
    run(WORKED, CUMEM_BACKEND="emulated")


# -- CUDA_VISIBLE_DEVICES ------------------------------------------------------------------

UUIDS = ["GPU-1a2b3c4d-0000", "GPU-1a2b9999-0000", "GPU-77777777-0000"]

#: Values of the variable, each with how many of those three GPUs CUDA then shows, or
#: None if only the driver knows.
SHOWN: list[tuple[str | None, int | None]] = [
    (None, 3),
    ("", 0),
    (" ", 0),
    ("0", 1),
    ("2,0,1", 3),
    (" 1 , 2", 2),
    ("\t1", 1),
    ("00", 1),
    ("0,1,", 2),
    (",0", 0),
    ("-1", 0),
    ("0,-1,1", 1),
    ("3", 0),
    ("0,3,1", 1),
    ("99999999999999999999,0", 0),
    ("none", 0),
    ("NoDevFiles", 0),
    ("void", 0),
    ("0,0", 0),
    ("0,1,0", 0),
    ("0,7,0", 1),
    ("1,01", 0),
    ("GPU-77777777-0000", 1),
    ("GPU-7", 1),
    ("GPU-1a2b3", 1),
    ("GPU-1a2b", 0),
    ("GPU-1a2b3,GPU-1a2b9,GPU-7", 3),
    ("GPU-7,GPU-1a2b,GPU-1a2b3", 1),
    ("GPU-7,GPU-777", 0),
    ("GPU-x", 0),
    ("GPU-", 0),
    ("GPU-7,x,0", 1),
    ("0,GPU-7", None),
    ("GPU-7,1", None),
    ("MIG-GPU-77777777/0/0", None),
    ("MIG-4a8b", None),
    ("0,MIG-4a8b", None),
    ("GPU-1A2B3", None),
    ("gpu-7", None),
    (" GPU-7", None),
    ("+1", None),
    ("1x", None),
    ("0x1", None),
    ("1.5", None),
    ("1 2", None),
    ("\u0663", 0),
]


@pytest.mark.parametrize(("text", "count"), SHOWN)
def test_visible_devices_are_read_by_the_rules_of_cuda(text, count) -> None:
    if count is None:
        with pytest.raises(counting._UnknownCountError):
            counting.count_visible(text, UUIDS)
    else:
        assert counting.count_visible(text, UUIDS) == count


def test_machine_without_gpus_has_no_visible_devices() -> None:
    for text in (None, "", "0", "GPU-7"):
        assert counting.count_visible(text, []) == 0


# -- NVML and drivers that a test has made -------------------------------------------------

#: A driver that counts devices, notes each start in a file, and gets its answers from
#: variables of the environment.
DRIVER = """
#include <stdio.h>
#include <stdlib.h>

static int started;

static int number(const char *name, int usual)
{
    const char *text = getenv(name);
    return text == NULL ? usual : atoi(text);
}

int cuInit(unsigned flags)
{
    FILE *file = fopen(getenv("STARTED"), "a");
    if (file != NULL) {
        fprintf(file, "started\\n");
        fclose(file);
    }
    started = number("DRIVER_CODE", 0) == 0;
    return number("DRIVER_CODE", 0);
}

int cuDriverGetVersion(int *version)
{
    *version = number("DRIVER_VERSION", 13000);
    return 0;
}

int cuDeviceGetCount(int *count)
{
    *count = number("DRIVER_COUNT", 5);
    return started ? 0 : 3;
}
"""

#: A program that prints the number of devices and the backend, or the error.
COUNTED = """
import cumem
try:
    print(cumem.device_count(), end=" ")
    print(cumem.backend())
except cumem.CudaError as error:
    print(error.name, error.call)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    """Build a driver that can do nothing but count, and an NVML without functions.

    Returns the folder of both libraries.
    """
    if shutil.which("gcc") is None:
        pytest.skip("this test builds a library")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    (folder / "empty.c").write_text("int nothing;")
    for name, source in ("libcuda.so.1", "driver.c"), ("libnvidia-ml.so.1", "empty.c"):
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-o", folder / name, folder / source],
            check=True,
        )
    return folder


def counted(driver: Path, started: Path, **variables: str) -> str:
    """Return what COUNTED prints with this driver, which notes each start in a file."""
    return run(
        COUNTED,
        LD_LIBRARY_PATH=str(driver),
        STARTED=str(started),
        CUMEM_BACKEND="cuda",
        **variables,
    ).strip()


def test_driver_is_asked_in_another_process_where_nvml_says_nothing(
    driver, tmp_path
) -> None:
    assert counted(driver, tmp_path / "a") == "5 cuda"
    # The driver started once, and not in our process.
    assert (tmp_path / "a").read_text() == "started\n"
    assert counted(driver, tmp_path / "b", DRIVER_COUNT="2") == "2 cuda"


def test_driver_that_fails_in_another_process_fails_here(driver, tmp_path) -> None:
    said = counted(driver, tmp_path / "a", DRIVER_CODE="802")
    assert said == "cudaErrorSystemNotReady cudaGetDeviceCount"


def test_driver_that_shows_no_device_counts_none(driver, tmp_path) -> None:
    said = counted(driver, tmp_path / "a", DRIVER_CODE="100")
    assert said == "0 cudaErrorNoDevice cudaGetDeviceCount"
    said = counted(driver, tmp_path / "b", DRIVER_COUNT="0")
    assert said == "0 cudaErrorNoDevice cudaGetDeviceCount"


def test_driver_that_is_too_old_is_not_started(driver, tmp_path) -> None:
    said = counted(driver, tmp_path / "a", DRIVER_VERSION="11080")
    assert said.startswith("cudaErrorInsufficientDriver")
    assert not (tmp_path / "a").exists()


def test_program_other_than_an_interpreter_is_not_run_again(monkeypatch) -> None:
    def run_again(*args: object, **named: object) -> None:
        raise AssertionError("the program was run again")

    monkeypatch.setattr(subprocess, "run", run_again)
    monkeypatch.setattr(sys, "executable", "/opt/simulation")
    assert counting._ask_other_process() == (0, -1)
    monkeypatch.setattr(sys, "executable", "")
    assert counting._ask_other_process() == (0, -1)
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert counting._ask_other_process() == (0, -1)


class Nvml:
    """Has the functions of NVML that counting.py calls.

    The fields of `said` are what the functions answer and the codes that they return.
    """

    def __init__(self, **said: object) -> None:
        self.said: dict[str, object] = {"count": 2, "mig": 3, "minor": 0, "fabric": 0}
        self.said |= said

    def _code(self, name: str) -> int:
        code = self.said.get(f"{name}_code", 0)
        assert isinstance(code, int)
        return code

    def nvmlDeviceGetCount_v2(self, count) -> int:  # noqa: N802
        count._obj.value = self.said["count"]
        return self._code("count")

    def nvmlDeviceGetHandleByIndex_v2(self, index, device) -> int:  # noqa: N802
        return self._code("handle")

    def nvmlDeviceGetMigMode(self, device, mode, pending) -> int:  # noqa: N802
        if self.said["mig"] == 3:
            return 3
        mode._obj.value, pending._obj.value = self.said["mig"]
        return 0

    def nvmlDeviceGetMinorNumber(self, device, minor) -> int:  # noqa: N802
        minor._obj.value = self.said["minor"]
        return 0

    def nvmlDeviceGetUUID(self, device, text, room) -> int:  # noqa: N802
        text.value = b"GPU-1"
        return self._code("uuid")


@pytest.mark.parametrize(
    "said",
    [
        {"count_code": 999},
        {"handle_code": 4},  # no permission
        {"mig": (1, 1)},
        {"mig": (0, 1)},  # MIG mode begins at the next reset
        {"mig": (1, 0)},
        {"uuid_code": 3},
        {"minor": 7},
    ],
)
def test_nvml_that_leaves_a_doubt_is_not_believed(monkeypatch, said) -> None:
    monkeypatch.setattr(counting, "_can_open", lambda path: path != "/dev/nvidia7")
    monkeypatch.setattr(counting, "_check_fabric", lambda nvml, device: None)
    assert counting._ask_nvml(Nvml()) == ["GPU-1", "GPU-1"]
    assert counting._ask_nvml(Nvml(mig=(0, 0))) == ["GPU-1", "GPU-1"]
    with pytest.raises(counting._UnknownCountError):
        counting._ask_nvml(Nvml(**said))


def test_server_that_shares_gpus_makes_the_count_doubtful(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    with pytest.raises(counting._UnknownCountError, match=str(tmp_path)):
        counting._list_uuids()
