# SPDX-License-Identifier: Apache-2.0
"""Tests that importing cumem is cheap and opens nothing, and tests of unusual first uses.

Most tests run a program, since only a new process can import the package for the first
time. Importing must not load a driver's library or anything heavy, and needs no driver. The
first use may be in a forked or spawned process, in a thread with a small stack, in a
subinterpreter, or in a program that embeds Python.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import sysconfig
import textwrap

import pytest

import cumem

# These tests fail if a wheel, or an older NumPy, lacks something that cumem needs.
pytestmark = pytest.mark.packaging


def run(code: str, *arguments: str, **environment: str) -> str:
    """Run code in another process, with warnings as errors, and return what it prints."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    env = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        env=env,
        check=False,
        timeout=200,  # ends a process that hangs
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_opens_no_driver_library() -> None:
    run(
        """
        import numpy
        from support import core
        before = {line.split()[-1] for line in open("/proc/self/maps")}
        import cumem
        new = {line.split()[-1] for line in open("/proc/self/maps")} - before
        assert not [n for n in new if "libcuda" in n or "nvidia" in n], new
        assert not getattr(cumem._core, "_test_is_open", bool)()
        """
    )


def test_import_loads_no_optional_library() -> None:
    run(
        """
        import sys
        import cumem
        for name in ("matplotlib", "tqdm", "torch", "cupy", "jax", "asyncio", "ctypes"):
            assert name not in sys.modules or name in ("ctypes",), name
        assert "mmap" not in sys.modules  # only a program that maps files needs it
        """
    )


def test_modules_of_the_package_are_loaded_at_first_use() -> None:
    run(
        """
        import pickle, sys
        import cumem
        loaded = {name for name in sys.modules if name.partition(".")[0] == "cumem"}
        assert loaded == {"cumem", "cumem._core"}, loaded
        names = {name for name in cumem.__all__ if name not in vars(cumem)}
        assert {"stats", "explain", "fromfile", "limit", "save_safetensors"} <= names
        assert names <= set(dir(cumem))
        for name in names:
            value = getattr(cumem, name)
            assert getattr(value, "__module__", "cumem") == "cumem", name
            if isinstance(value, type):
                assert pickle.loads(pickle.dumps(value)) is value
        try:
            cumem.nonsense
        except AttributeError as error:
            assert "'nonsense'" in str(error)
        else:
            raise SystemExit("found")
        """
    )


def test_signal_handler_while_a_module_is_loaded_is_told_so() -> None:
    """A call in the handler that needs the half-loaded module raises an error.

    The call that the handler interrupted goes on.
    """
    run(
        """
        import signal, sys
        import cumem

        class Interrupter:
            def find_spec(self, name, path=None, target=None):
                if name == "cumem.pools.limits" and not told:
                    signal.raise_signal(signal.SIGUSR1)

        def handle(*_):
            for use in lambda: cumem.Pool("pinned"), lambda: cumem.trim():
                try:
                    use()
                except RuntimeError as error:
                    told.append(str(error))
            # This function is in a module that is not being loaded.
            told.append(cumem.units.parse_nbytes("1 KiB"))

        told = []
        signal.signal(signal.SIGUSR1, handle)
        sys.meta_path.insert(0, Interrupter())
        cumem.Pool("pinned").close()
        first, second, nbytes = told
        assert "still loading cumem.pools.pool" in first, told
        assert first == second and nbytes == 1024, told
        cumem.trim()
        """,
        CUMEM_BACKEND="emulated",
    )


def test_classes_of_answers_are_found_in_types_whoever_loaded_their_module() -> None:
    run(
        """
        import pickle
        import cumem
        pool = cumem.default_pool("pinned")
        found = pool.snapshot()  # the pool loads the module of snapshots itself
        assert type(found).__module__ == "cumem.types"
        assert type(pickle.loads(pickle.dumps(found))) is cumem.types.Snapshot
        for name in cumem.types.__all__:
            value = getattr(cumem.types, name)
            assert name == "Kind" or value.__module__ == "cumem.types", name
            if isinstance(value, type):
                assert pickle.loads(pickle.dumps(value)) is value
            assert name in dir(cumem.types)
        assert not {*cumem.types.__all__} & {*cumem.__all__}
        """,
        CUMEM_BACKEND="emulated",
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Stats", "use cumem.types.Stats"),
        ("Registration", "use cumem.types.Registration"),
        ("offload", "from cumem.integrations.torch import offload"),
    ],
)
def test_name_that_is_elsewhere_is_an_error_that_says_where(
    name: str, hint: str
) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(cumem, name)
    assert str(caught.value) == f"module 'cumem' has no attribute {name!r}; {hint}"


def test_names_are_those_that_type_checkers_see() -> None:
    run(
        """
        import ast
        import cumem
        with open(cumem.__file__ + "i", encoding="utf-8") as file:
            stub = ast.parse(file.read())
        imported = [
            (node.module, alias.name, alias.asname)
            for node in stub.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        assert all(name == shown for _, name, shown in imported)
        modules = [n for m, n, _ in imported if m == "cumem"]
        assert modules == ["doctor", "info", "types", "units"]
        names = sorted(name for module, name, _ in imported if module != "cumem")
        assert len(set(names)) == len(names) and names == cumem.__all__
        space = {}
        exec("from cumem import *", space)
        assert {*names} == {*space} - {"__builtins__"}
        """
    )


def test_no_module_takes_the_name_of_a_function() -> None:
    """Importing a module replaces a function of the same name in its package."""
    modules = {path.stem for path in pathlib.Path(cumem.__file__).parent.iterdir()}
    assert not modules & set(cumem.__all__)


def test_without_a_driver_the_first_use_warns_once_and_emulates() -> None:
    run(
        """
        import os, warnings
        import cumem
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            cumem.empty_pinned(3)
            cumem.empty_device(3)
        if cumem.backend() == "emulated":
            assert [w.category for w in seen] == [cumem.EmulationWarning], seen
            assert seen[0].filename == "<string>"  # this program, not cumem's files
            assert cumem.info.about().emulation_reason in str(seen[0].message)
            assert "emulated" in repr(cumem.empty_device(3))
        """,
        CUDA_VISIBLE_DEVICES="",
        CUMEM_BACKEND="",
    )


@pytest.mark.parametrize(
    "first",
    ["empty_pinned(3)", "Device(0).name", "Pool('device')", "asbuffer(data).copy()"],
)
def test_warning_of_emulation_names_the_line_that_is_the_users(first: str) -> None:
    run(
        f"""
        import warnings
        import numpy, cumem
        data = numpy.ones(3)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            cumem.{first}
        if cumem.backend() == "emulated":
            assert [(w.filename, w.lineno) for w in seen] == [("<string>", 7)], seen
        """,
        CUDA_VISIBLE_DEVICES="",
        CUMEM_BACKEND="",
    )


def test_backend_emulated_does_not_warn() -> None:
    run(
        "import cumem; cumem.empty_pinned(3); assert cumem.backend() == 'emulated'",
        CUMEM_BACKEND="emulated",
    )


def test_backend_cuda_without_a_gpu_is_an_error() -> None:
    run(
        """
        import cumem
        try:
            cumem.empty_pinned(3)
        except cumem.CudaError as error:
            assert error.code in (35, 100), error
        """,
        CUMEM_BACKEND="cuda",
        CUDA_VISIBLE_DEVICES="",
    )


def test_backend_of_another_name_is_an_error() -> None:
    run(
        """
        import cumem
        try:
            cumem.empty_pinned(3)
        except ValueError as error:
            assert "CUMEM_BACKEND" in str(error)
        else:
            raise SystemExit("accepted")
        """,
        CUMEM_BACKEND="quantum",
    )


def test_forked_child_gets_an_error_and_does_not_hang() -> None:
    run(
        """
        import os, warnings
        import cumem
        keep = cumem.empty_pinned(1000)
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            try:
                cumem.empty_pinned(10)
            except RuntimeError as error:
                del keep
                os._exit(0 if "fork" in str(error) else 3)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        cumem.empty_pinned(10)
        """,
        CUMEM_BACKEND="emulated",
    )


def test_forked_child_that_is_sent_a_buffer_gets_ordinary_memory() -> None:
    run(
        """
        import os, pickle, warnings
        import cumem
        data = pickle.dumps(cumem.zeros(3, kind="pinned"))
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if type(pickle.loads(data)) is cumem.HostBuffer else 4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """,
        CUMEM_BACKEND="emulated",
    )


def test_spawned_worker_is_sent_buffers_and_sends_them_back() -> None:
    run(
        """
        import multiprocessing, operator
        import cumem
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            sent = cumem.full(3, 7, "u1", "pinned")
            back = pool.apply(operator.methodcaller("copy"), (sent,))
        assert type(back) is cumem.PinnedBuffer
        assert back.numpy().tolist() == [7, 7, 7]
        """,
        CUMEM_BACKEND="emulated",
    )


def test_interpreter_exit_with_live_buffers_and_transfers_is_clean() -> None:
    run(
        """
        import cumem, numpy as np
        a = cumem.empty_device(1_000_000, "u1")
        h = [cumem.copy_async(a, np.ones(1_000_000, "u1")) for _ in range(5)]
        view = cumem.empty_pinned(10).numpy()
        s = cumem.Stream()
        cumem.copy_async(a, cumem.empty_pinned(1_000_000, "u1"), stream=s)
        """,
        CUMEM_BACKEND="emulated",
    )


def test_public_names_say_where_they_are_imported_from() -> None:
    for name in cumem.__all__:
        value = getattr(cumem, name)
        if callable(value):
            assert value.__module__ == "cumem", name
            assert pickle.loads(pickle.dumps(value)) is value


#: A program whose first uses of everything are made in a thread with a small stack.
FIRST_USES = """
import threading

import numpy as np

import cumem


def use() -> None:
    device = cumem.empty_device((500, 500), "f4")
    pinned = cumem.empty_pinned(1 << 20, "u1")
    array = np.ones((500, 500), "f4")
    cumem.copy(device, array)
    cumem.copy(device, array.T)
    cumem.copy(device[::2, ::3], array[::2, ::3])
    cumem.copy(device.T[::2], device[:, ::2].T)
    cumem.copy_async(device, array).wait()
    cumem.copy_many([(device[0], array[0]), (device[::7], array[::7])])
    other = cumem.empty_device((500, 500), "f4", device=1)
    cumem.copy(other, device)
    cumem.broadcast([device, other], array)
    cumem.gather(np.zeros((1000, 500), "f4"), [device, other])
    pinned.fill(2)
    managed = cumem.zeros((10, 20), "f4", "managed")
    managed.prefetch_pages(0)
    assert managed.prefetch_location == 0
    cumem.register(array).close()
    assert cumem.asbuffer(array).reshape(10, 50, 500)[1:3].shape == (2, 50, 500)
    assert np.from_dlpack(pinned)[0] == 2
    pool = cumem.Pool("pinned", numa_node=0)
    pool.allocate(1 << 21).free()
    pool.close()
    cumem.set_limit("pinned", "50%")
    cumem.memory_info("host")
    cumem.stats()
    cumem.configure()
    cumem.Device(0).synchronize()
    cumem.Stream().record().synchronize()
    cumem.trim()
    cumem.shutdown()
    done.append(True)


for name in cumem.__all__:
    getattr(cumem, name)  # importing a module needs more stack than the thread will have
done = []
threading.stack_size(32 << 10)
thread = threading.Thread(target=use)
thread.start()
thread.join()
assert done
"""


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="AddressSanitizer needs a larger stack",
)
def test_first_uses_in_a_thread_with_the_smallest_stack_work() -> None:
    run(FIRST_USES, CUMEM_BACKEND="emulated", CUMEM_EMULATED_DEVICES="2")


@pytest.mark.parametrize("where", ["the same thread", "another"])
def test_code_that_shows_the_warning_may_use_the_package(where: str) -> None:
    """The code that shows the warning of emulation may itself use the devices."""
    run(
        """
        import sys, threading, warnings
        import cumem

        def use():
            seen.append(cumem.empty_device(3))

        def show(*args, **keywords):
            shown.append(args)
            if sys.argv[-1] == "another":
                thread = threading.Thread(target=use)
                thread.start()
                thread.join()
            else:
                use()

        seen, shown = [], []
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            used = cumem.empty_device(3)
        if cumem.backend() == "emulated":
            assert len(shown) == 1
            cumem.copy(used, seen[0])  # both belong to one runtime
        """,
        where,
        CUDA_VISIBLE_DEVICES="",
        CUMEM_BACKEND="",
    )


def test_warning_made_an_error_leaves_the_package_closed() -> None:
    run(
        """
        from support import core
        import cumem
        for _ in range(2):
            try:
                cumem.device_count()
            except cumem.EmulationWarning:
                assert not getattr(cumem._core, "_test_is_open", bool)()
        """,
        CUDA_VISIBLE_DEVICES="",
        CUMEM_BACKEND="",
    )


def test_subinterpreter_is_refused_and_the_process_ends() -> None:
    """The import must fail there, and the main interpreter must go on and end as usual."""
    run(
        """
        import sys
        try:
            import _interpreters as interpreters
        except ImportError:
            try:
                import _xxsubinterpreters as interpreters
            except ImportError:
                sys.exit(0)
        import cumem

        lines = [
            "try:",
            "    import cumem",
            "except ImportError as error:",
            "    text = str(error)  # cumem's text, or Python's own from 3.12 on",
            "    assert 'main interpreter' in text or 'subinterpreters' in text, error",
            "else:",
            "    raise AssertionError('imported')",
        ]
        one = interpreters.create()
        failure = interpreters.run_string(one, chr(10).join(lines))
        assert failure is None, failure
        interpreters.destroy(one)
        cumem.empty_device(3).fill(1)
        """,
        CUMEM_BACKEND="emulated",
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_import_without_the_gil_is_refused(enabled: bool) -> None:
    run(
        f"""
        import sys
        sys._is_gil_enabled = lambda: {enabled}
        try:
            import cumem
        except ImportError as error:
            assert "PYTHON_GIL=0" in str(error), error
            assert not {enabled}
        else:
            assert {enabled}
        """
    )


#: A C program that runs Python in a thread other than its first one.
EMBEDDING = """
#include <pthread.h>
extern int Py_BytesMain(int, char **);
static char **arguments;
static int count, result;
static void *run(void *unused)
{
    result = Py_BytesMain(count, arguments);
    return unused;
}
int main(int argc, char **argv)
{
    pthread_t thread;
    count = argc;
    arguments = argv;
    if (pthread_create(&thread, 0, run, 0) != 0) {
        return 9;
    }
    pthread_join(thread, 0);
    return result;
}
"""

#: A program that waits for a stream that is held shut, until Ctrl-C comes.
INTERRUPTED = """
import os, signal, threading
from support import session, testing
import cumem

stream = cumem.Stream()
buffer = cumem.empty_device(100, "u1")
testing.gate_close(stream)
buffer.fill(1, stream=stream)
assert threading.get_native_id() != os.getpid()
try:
    with session.rescued(stream):
        try:
            with session.when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT)):
                WAIT
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("Ctrl-C was not heard")
finally:
    testing.gate_open(stream)
"""


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Build the program of EMBEDDING, and return its path."""
    directory, library = (
        sysconfig.get_config_var(name) for name in ("LIBDIR", "INSTSONAME")
    )
    compiler = shutil.which("cc")
    if compiler is None or ".so" not in library:
        pytest.skip("this test needs a C compiler and Python as a shared library")
    folder = tmp_path_factory.mktemp("embedding")
    source = folder / "program.c"
    source.write_text(EMBEDDING)
    program = folder / "program"
    link = [f"-L{directory}", f"-Wl,-rpath,{directory}", f"-l:{library}"]
    subprocess.run(
        [compiler, str(source), "-o", str(program), "-pthread", *link], check=True
    )
    return program


@pytest.mark.parametrize(
    "wait",
    [
        "stream.synchronize()",
        "cumem.Device(0).synchronize()",
        "buffer.to_numpy()",
        "cumem.shutdown()",
    ],
)
def test_signal_ends_a_wait_if_python_runs_in_another_thread_than_the_first(
    embedding, wait: str
) -> None:
    done = subprocess.run(
        [str(embedding), "-c", INTERRUPTED.replace("WAIT", wait)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONHOME": sys.base_prefix,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "CUMEM_BACKEND": "emulated",
        },
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def test_dir_lists_public_names_and_modules_alone() -> None:
    listed = {name for name in dir(cumem) if not name.startswith("__")}
    modules = {"doctor", "info", "types", "units"}
    assert listed == {*cumem.__all__, *modules} - {"__version__"}
    for name in listed:
        assert getattr(cumem, name) is not None
