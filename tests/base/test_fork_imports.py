# SPDX-License-Identifier: Apache-2.0
"""Tests of a fork while another thread of the process imports a module of the package.

The child lacks that thread. Without further care the module's import lock would stay locked
in the child, and an import there would wait for ever. Each test runs a program that stops a
thread in the middle of an import, forks, and lets the child use the package.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import programs

pytestmark = [
    # A build with checks notices a call of Python that is made without the GIL.
    pytest.mark.checked,
    pytest.mark.skipif(
        sys.platform != "linux", reason="forks are tested on Linux only"
    ),
]

#: The first part of a program. Its `hold(names)` starts a thread for each of these modules,
#: which begins to import the module and then waits for `go_on`. It waits before the module
#: is made or, if IN_THE_MIDDLE is true, before the module is executed. `fork_and_work()`
#: lets a child use the package.
HOLD = """
import ast, importlib.machinery, os, signal, sys, threading, warnings
import numpy as np
import cumem

warnings.simplefilter("ignore")
go_on, names, failures = threading.Event(), set(), []

class Loader(importlib.machinery.SourceFileLoader):
    def create_module(self, spec):
        if not IN_THE_MIDDLE:
            stop_here(spec.name)  # the lock is held, and nothing is in sys.modules

    def exec_module(self, module):
        if IN_THE_MIDDLE:
            stop_here(module.__name__)
        super().exec_module(module)

class Finder:
    # Only the loader stops: finders run under the global import lock, which a fork takes.
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(name, spec.origin)
        return spec

def stop_here(name):
    if threading.current_thread().name == name:
        at_it[name].set()
        go_on.wait()

def load(name):
    try:
        __import__(name)
    except BaseException as error:
        failures.append(error)

def hold(held):
    for name in held:
        assert name not in sys.modules, name
        names.add(name)
        at_it[name] = threading.Event()
        threads.append(threading.Thread(target=load, args=(name,), name=name, daemon=True))
        threads[-1].start()
        at_it[name].wait()

at_it, threads = {}, []
sys.meta_path.insert(0, Finder)

def work():
    import pickle
    source, target = np.arange(1000.0), np.zeros(1000)
    cumem.copy(target, source)
    assert (target == source).all()
    cumem.copy_many([(target, source)])
    buffer = cumem.asbuffer(source)
    assert repr(buffer) and str(buffer)
    assert (pickle.loads(pickle.dumps(buffer)).numpy() == source).all()
    buffer.reshape(10, 100)[1:].fill(3)
    buffer[:4] = [1, 2, 3, 4]
    pinned = cumem.array(target, kind="pinned")
    assert (cumem.zeros_like(pinned).numpy() == 0).all()
    assert cumem.explain(target, source) and str(cumem.memory_info("host"))
    assert cumem.PinnedCollate()([source, source]).shape == (2, 1000)
    cumem.save("a.npy", target)
    assert (cumem.load("a.npy", kind="pinned").numpy() == target).all()
    cumem.tofile("a.bin", target)
    assert cumem.fromfile("a.bin", kind="pinned").nbytes == 8000
    cumem.save_safetensors("a.safetensors", {"a": target})
    cumem.load_safetensors("a.safetensors", kind="pinned")
    with cumem.record() as rec:
        cumem.empty_pinned(10)
    assert rec.summary() and cumem.live() is not None and cumem.stats()
    cumem.set_limit("pinned", None)
    with cumem.limit("pinned", "1GiB"), cumem.numpy_pinned(1):
        np.ones(100)
    try:
        cumem.empty_pinned(-1)
    except ValueError:
        pass
    else:
        raise AssertionError

def fork_and_work(check=lambda: None):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(40)
            work()
            check()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    go_on.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert status == 0, status
"""
#: The function `work` imports these modules, and nothing imports them earlier.
HELD = ["cumem.interchange.pickling", "cumem.devices.device", "cumem.files.npy"]


def run(tmp_path, in_the_middle: bool, code: str) -> None:
    """Run HOLD and then `code` in another process, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", f"IN_THE_MIDDLE = {in_the_middle}\n{HOLD}{code}"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_child_of_a_process_whose_thread_does_not_finish_loading_loads_anew(
    tmp_path, in_the_middle: bool
) -> None:
    run(tmp_path, in_the_middle, f"hold({HELD})\nfork_and_work()")


def test_fork_waits_for_a_thread_that_loads_and_the_child_loads_nothing(
    tmp_path,
) -> None:
    run(
        tmp_path,
        False,
        """
loaded = []
def note(event, args):
    # Importing a module that is loaded takes no lock.
    is_ours = event == "import" and args[0].startswith("cumem.")
    if is_ours and args[0] not in sys.modules:
        loaded.append(args[0])

def check():
    assert not loaded, loaded
os.register_at_fork(before=go_on.set, after_in_child=lambda: sys.addaudithook(note))
hold(["cumem.devices.device"])
fork_and_work(check)
""",
    )


def test_fork_of_a_process_without_threads_loads_only_what_looks_for_threads(
    tmp_path,
) -> None:
    run(
        tmp_path,
        False,
        """
before = set(sys.modules)
if os.fork() == 0:
    os._exit(0)
os.wait()
loaded = {name for name in set(sys.modules) - before if name.startswith("cumem")}
assert loaded <= {"cumem.base", "cumem.base.forking"}, loaded
""",
    )


def test_fork_beside_threads_loads_whatever_a_name_of_the_package_needs(
    tmp_path,
) -> None:
    run(
        tmp_path,
        False,
        """
idle = threading.Event()
beside = threading.Thread(target=idle.wait)
beside.start()
if os.fork() == 0:
    os._exit(0)
os.wait()
idle.set()
beside.join()
with open(cumem.__file__ + "i", encoding="utf-8") as file:
    stub = ast.parse(file.read())
needed = {node.module for node in stub.body if isinstance(node, ast.ImportFrom)}
missing = {name for name in needed - {*sys.modules} if "tools" not in name}
assert "cumem.files.safetensors.save" in needed and not missing, missing
assert not [name for name in sys.modules if name.startswith("cumem.tools")]
""",
    )


#: A program that forks twice beside a thread, and looks at the lock of a module that the
#: first fork has loaded.
LOCKS = """
import os, sys, threading
import cumem

raised = []
sys.unraisablehook = raised.append
idle = threading.Event()
beside = threading.Thread(target=idle.wait)
beside.start()
assert "concurrent.futures.thread" not in sys.modules
for _ in range(2):
    child = os.fork()
    if child == 0:
        os._exit(0 if not raised else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
idle.set()
beside.join()
import concurrent.futures.thread as pools
assert not pools._global_shutdown_lock.locked()
assert raised == [], raised
"""


def test_modules_loaded_before_a_fork_run_their_hooks_from_the_next_one_on() -> None:
    """A module may have two hooks, which take its lock before a fork and release it after.

    A fork that makes cumem load the module is too late to run the first hook. So it may not
    run the second hook either, which would release a lock that nobody has taken.
    """
    done = programs.run("-c", LOCKS)
    assert done.returncode == 0, done.stderr


#: A program in which two threads fork. The fork of the first thread makes cumem load
#: modules, and then stops. Meanwhile the second thread forks.
TWO_FORKS = """
import os, sys, threading
stopped, go_on = threading.Event(), threading.Event()

def stop_here():
    if threading.current_thread().name == "late":
        stopped.set()
        go_on.wait()

os.register_at_fork(before=stop_here)
import cumem

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

late = threading.Thread(target=fork, name="late")
late.start()
assert stopped.wait()
registered = sys.modules["concurrent.futures.thread"]  # it takes a lock before forks
fork()
go_on.set()
late.join()
fork()
assert not registered._global_shutdown_lock.locked()
"""


def test_thread_that_forks_beside_another_releases_no_lock_that_it_did_not_take() -> (
    None
):
    # From 3.12 on CPython warns of forks beside threads, which this test has to make.
    done = programs.run("-W", "ignore::DeprecationWarning", "-c", TWO_FORKS)
    assert (done.returncode, done.stderr) == (0, "")
