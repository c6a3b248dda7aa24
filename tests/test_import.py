# SPDX-License-Identifier: Apache-2.0
"""Importing: no CUDA call, no driver library, nothing heavy, works without a driver."""

from __future__ import annotations

import pathlib
import pickle
import subprocess
import sys
import textwrap

import cumem


def run(code: str, **environment: str) -> str:
    import os

    env = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_opens_no_driver_library() -> None:
    run(
        """
        import numpy
        before = {line.split()[-1] for line in open("/proc/self/maps")}
        import cumem
        new = {line.split()[-1] for line in open("/proc/self/maps")} - before
        assert not [n for n in new if "libcuda" in n or "nvidia" in n], new
        assert not cumem._core._testing.opened()
        """
    )


def test_import_loads_no_optional_library() -> None:
    run(
        """
        import sys
        import cumem
        for name in ("matplotlib", "tqdm", "torch", "cupy", "jax", "asyncio", "ctypes"):
            assert name not in sys.modules or name in ("ctypes",), name
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
            assert value.__module__ in ("cumem", "typing", "collections.abc"), name
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


def test_no_module_takes_the_name_of_a_function() -> None:
    """Loading it would put it in the function's place."""
    modules = {path.stem for path in pathlib.Path(cumem.__file__).parent.glob("*.py")}
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
            assert cumem.emulation_reason() in str(seen[0].message)
            assert "emulated" in repr(cumem.empty_device(3))
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


def test_forked_child_that_is_sent_a_buffer_is_told_how_to_be_started() -> None:
    run(
        """
        import os, pickle, warnings
        import cumem
        data = pickle.dumps(cumem.zeros(3, kind="pinned"))
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            try:
                pickle.loads(data)
            except RuntimeError as error:
                os._exit(0 if "spawn or forkserver" in str(error) else 3)
            os._exit(4)
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
