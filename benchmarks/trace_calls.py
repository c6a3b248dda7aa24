# SPDX-License-Identifier: Apache-2.0
"""Trace through how many files a call goes, function by function, in C and in Python.

    make trace                                    # build, trace, print a table
    python benchmarks/trace_calls.py --call fill  # the functions of one call, in order
    python benchmarks/trace_calls.py --json FILE  # write all results to a file

A call that goes through many files is hard for a new reader to follow, and a change of it
touches many places. This program counts the files. It builds a second extension in
``build/trace``, whose C functions call a hook when they begin and when they end
(``benchmarks/trace.c``). It watches Python functions by ``sys.setprofile``. It traces all
threads, including cumem's own and those of the emulated device.

- A *room* is a file. A header and the C file of the same name are one room.
- A *move* is a call from a file into another one. Returns are not counted.
- The files of the emulated device, which stands for a driver, are counted separately.

Each call is made a few times to warm up, and then traced several times. Threads that happen
to work at the same time add rooms, so the run with the fewest rooms is reported. The moves
of a large copy differ from run to run, because a thread looks at a job more or less often
before it begins to wait. Its rooms are the same in each run.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "trace"
HEADERS = ROOT / "build" / "cuda12"
EMULATED = "runtime/emulated/"
CAPACITY = 4_000_000  # how many rows one trace can have
RUNS, WARM_RUNS = 15, 3
RUNS_OF_LARGE = 2  # each has a million rows
CORES = 2  # how many cores a trace may use, since they decide how many threads copy
#: For how long after the call the threads that it has started are traced.
SETTLE_S = 0.02

ENTER, EXIT, ENTER_PYTHON, EXIT_PYTHON = range(4)  # as in benchmarks/trace.c


# -- the build -------------------------------------------------------------------------


def library() -> Path | None:
    """Return the extension of the last build."""
    return next(iter((BUILD / "cumem").glob("_core*.so")), None)


def is_fresh() -> bool:
    """Return whether no source is newer than the extension."""
    built = library()
    if built is None:
        return False
    sources = [ROOT / "setup.py", ROOT / "benchmarks" / "trace.c"]
    sources += [ROOT / "cumem" / "_core.pyi", *(ROOT / "csrc").rglob("*.*")]
    made = built.stat().st_mtime
    return all(path.stat().st_mtime <= made for path in sources)


def build() -> None:
    """Build the extension if a source is newer. It uses the Python package of this tree."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # two builds would overwrite each other's files
        if not is_fresh():
            compile_all()
        for path in (ROOT / "cumem").iterdir():
            if path.suffix != ".so" and path.name != "__pycache__":
                with contextlib.suppress(FileExistsError):
                    (BUILD / "cumem" / path.name).symlink_to(path)


def compile_all() -> None:
    """Run setup.py, which compiles every file of C."""
    # setup.py looks for the headers of CUDA in the package `nvidia`. `make trace` installs
    # that package into the folder HEADERS, from which it can be imported by this path.
    path = os.pathsep.join([str(HEADERS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "CUMEM_TRACE": "1", "PYTHONPATH": path}
    environment |= {"CUMEM_DEBUG": "0", "CUMEM_SANITIZE": ""}
    places = ("--build-lib", str(BUILD), "--build-temp", str(BUILD / "temp"))
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *places],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"the build failed:\n{done.stdout}{done.stderr}")


# -- the trace of one call -------------------------------------------------------------


class Row(ctypes.Structure):
    """The struct cm_trace_row of ``benchmarks/trace.c``."""

    _fields_ = (
        ("what", ctypes.c_uint64),
        ("thread", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
    )


class Step(NamedTuple):
    """A function that was entered."""

    thread: int
    room: str
    function: str
    #: The file that called it, or "" if no function of cumem called it.
    caller: str
    #: Whether it belongs to the emulated device, which takes the driver's place.
    is_emulated: bool

    @property
    def is_move(self) -> bool:
        """Whether a function of another file made the call."""
        return self.caller not in ("", self.room)


class Tracer:
    """Records the rows of calls, and knows the names of their functions."""

    def __init__(self, core: str) -> None:
        self._core = core
        # A function of a PyDLL keeps the GIL. So no other Python thread runs between the
        # start of a Python function and the row that records it.
        self._hooks = ctypes.PyDLL(core)
        self._hooks.cm_trace_open.restype = ctypes.c_bool
        self._hooks.cm_trace_open.argtypes = [ctypes.c_uint64]
        self._hooks.cm_trace_end.restype = ctypes.c_uint64
        self._hooks.cm_trace_rows.restype = ctypes.POINTER(Row)
        self._hooks.cm_trace_hush.argtypes = [ctypes.c_bool]
        self._hooks.cm_trace_note.argtypes = [ctypes.c_uint32, ctypes.c_uint64]
        self._hooks.cm_trace_note.restype = None
        if not self._hooks.cm_trace_open(CAPACITY):
            sys.exit(f"no memory for {CAPACITY} rows of a trace")
        self._codes: dict[CodeType, int] = {}
        self._in_python: list[tuple[str, str]] = []
        self._in_c: dict[int, tuple[str, str]] = {}
        threading.setprofile(self._profile)  # for threads that begin later
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        """Record that a Python function of the package begins or ends."""
        if event in ("call", "return"):
            number = self._codes.get(frame.f_code)
            if number is None:
                number = self._name(frame.f_code)
            if number:
                kind = ENTER_PYTHON if event == "call" else EXIT_PYTHON
                self._hooks.cm_trace_note(kind, number)

    def _name(self, code: CodeType) -> int:
        """Return the number of a Python function, or 0 if it is not in the package."""
        number = 0
        _, ours, path = code.co_filename.partition("/cumem/")
        # Before Python 3.12 a comprehension was a function, which is not counted here.
        is_part = code.co_name in ("<listcomp>", "<dictcomp>", "<setcomp>")
        if ours and not is_part:
            self._in_python.append((f"cumem/{path}", code.co_qualname))
            number = len(self._in_python)
        self._codes[code] = number
        return number

    def run(
        self, call: Callable[[], object], settle: Callable[[], object]
    ) -> list[Step]:
        """Trace a call until the work that it started has ended."""
        self._hooks.cm_trace_begin()
        answer = call()
        self._hooks.cm_trace_hush(True)
        try:
            settle()
            time.sleep(SETTLE_S)
        finally:
            count = self._hooks.cm_trace_end()
            self._hooks.cm_trace_hush(False)
            del answer
        if count > CAPACITY:
            sys.exit(f"{count} rows are too many for one trace")
        rows = self._hooks.cm_trace_rows()
        return list(self._steps([(r.thread, r.kind, r.what) for r in rows[:count]]))

    def _steps(self, rows: list[tuple[int, int, int]]) -> Iterator[Step]:
        """Turn the rows of a trace into the functions that were entered."""
        self._find({what for _, kind, what in rows if kind == ENTER})
        # Each thread has a stack of the functions that it is in. An entry is the file of a
        # function and whether the function counts as part of the emulated device.
        stacks: dict[int, list[tuple[str, bool]]] = {}
        drivers = self._threads_of_the_driver(rows)
        for thread, kind, what in rows:
            stack = stacks.setdefault(thread, [])
            if kind in (EXIT, EXIT_PYTHON):
                if stack:  # otherwise the function was entered before the trace began
                    stack.pop()
                continue
            room, function = self._named(kind, what)
            caller, in_driver = stack[-1] if stack else ("", thread in drivers)
            # The emulated device also uses functions of base/, which then count as part of
            # it. Other functions that it calls are callbacks into cumem, such as CUDA
            # makes too, and do not count as part of it.
            in_driver = room.startswith(EMULATED) or (
                in_driver and room.startswith("base/")
            )
            if room:
                yield Step(thread, room, function, caller, in_driver)
            # A function from a header of Python or NumPy counts as part of its caller.
            stack.append((room or caller, in_driver))

    def _named(self, kind: int, what: int) -> tuple[str, str]:
        """Return the file and the name of a function."""
        return self._in_python[what - 1] if kind == ENTER_PYTHON else self._in_c[what]

    def _threads_of_the_driver(self, rows: list[tuple[int, int, int]]) -> set[int]:
        """Return the threads whose outermost functions are the emulated device's."""
        depths: Counter[int] = Counter()
        found = set()
        for thread, kind, what in rows:
            if kind in (EXIT, EXIT_PYTHON):
                depths[thread] = max(0, depths[thread] - 1)
                continue
            if not depths[thread] and self._named(kind, what)[0].startswith(EMULATED):
                found.add(thread)
            depths[thread] += 1
        return found

    def _find(self, offsets: set[int]) -> None:
        """Look up the files and names of C functions in the debug information."""
        new = sorted(offsets - set(self._in_c))
        if not new:
            return
        said = subprocess.run(
            ["addr2line", "-f", "-e", self._core],
            input="\n".join(map(hex, new)),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for offset, name, place in zip(new, said[::2], said[1::2], strict=True):
            _, ours, path = place.rpartition(":")[0].rpartition("/csrc/")
            self._in_c[offset] = (path.rpartition(".")[0] if ours else "", name)


def tally(steps: list[Step]) -> dict[str, Any]:
    """Return the counts of a trace, where the emulated device is counted separately."""
    own = [step for step in steps if not step.is_emulated]
    emulated = [step for step in steps if step.is_emulated]
    rooms = Counter(step.room for step in own)
    entered = Counter(step.room for step in own if step.is_move)
    functions = {(step.room, step.function) for step in own}
    return {
        "rooms": len(rooms),
        "rooms_of_the_caller": len({step.room for step in own if step.thread == 1}),
        "moves": sum(step.is_move for step in own),
        "functions": len(functions),
        "python_functions": sum(room[-3:] == ".py" for room, _ in functions),
        "function_calls": len(own),
        "in_python": sorted(
            f"{room}: {n}" for room, n in functions if room[-3:] == ".py"
        ),
        "threads": len({step.thread for step in steps}),
        "emulated": {
            "rooms": len({step.room for step in emulated}),
            "functions": len({(step.room, step.function) for step in emulated}),
            "function_calls": len(emulated),
        },
        # How often each file is entered from another one.
        "moves_into": dict(
            sorted(
                ((room, entered[room]) for room in rooms),
                key=lambda row: (-row[1], row[0]),
            )
        ),
        "in_order": in_order(steps),
    }


def in_order(steps: list[Step]) -> list[str]:
    """List files and functions in the order of their first calls, by thread."""
    counts = Counter((step.thread, step.room, step.function) for step in steps)
    names = {1: ""}  # thread 1 is the caller's
    for step in steps:
        names.setdefault(step.thread, f"[thread {len(names)}] ")
    return [
        f"{names[thread]}{room}: "
        + ", ".join(
            function + (f" x{n}" if (n := counts[thread, room, function]) > 1 else "")
            for _, _, function in same
        )
        for (thread, room), same in groupby(counts, key=lambda key: key[:2])
    ]


# -- the calls -------------------------------------------------------------------------


class Call(NamedTuple):
    """A call that is traced, and how a user writes it."""

    text: str
    make: Callable[[Any, int], Callable[[], object]]


def _numpy_to_device(cumem: Any, _: int) -> Callable[[], object]:
    import numpy as np

    src, dst = np.arange(256, dtype="u1"), cumem.empty_device(256, "u1")
    return lambda: cumem.copy(dst, src)


def _pinned_to_pinned(cumem: Any, _: int) -> Callable[[], object]:
    src, dst = cumem.zeros(256, "u1", "pinned"), cumem.empty_pinned(256, "u1")
    return lambda: cumem.copy(dst, src)


def _on_a_stream(cumem: Any, _: int) -> Callable[[], object]:
    src, dst = cumem.zeros(256, "u1", "pinned"), cumem.empty_device(256, "u1")
    stream = cumem.Stream()
    return lambda: cumem.copy_async(dst, src, stream=stream)


def _fill(cumem: Any, _: int) -> Callable[[], object]:
    buf = cumem.empty_device(256, "u1")
    return lambda: buf.fill(0)


def _large(cumem: Any, nbytes: int) -> Callable[[], object]:
    import numpy as np

    src, dst = np.zeros(nbytes, "u1"), cumem.empty_device(nbytes, "u1")
    return lambda: cumem.copy(dst, src)


def _prefetch(cumem: Any, _: int) -> Callable[[], object]:
    import numpy as np

    def batches() -> Iterator[dict[str, Any]]:
        while True:
            yield {"x": np.zeros((32, 64), "f4"), "y": np.zeros(32, "i8")}

    loader = iter(cumem.prefetch(batches()))
    return lambda: next(loader)


def _empty_pinned(cumem: Any, _: int) -> Callable[[], object]:
    def call() -> None:
        cumem.empty_pinned(256)  # freed at once

    return call


def _stats(cumem: Any, _: int) -> Callable[[], object]:
    alive = cumem.empty_pinned(256), cumem.empty_device(256)  # so two pools exist

    def call() -> object:
        return cumem.stats(), alive

    return call


#: stats() comes first, because it looks at every pool that the process has made so far.
CALLS: dict[str, Call] = {
    "stats": Call("stats() of two pools", _stats),
    "numpy_to_device_256": Call("copy(device, array) of 256 B", _numpy_to_device),
    "pinned_to_pinned_256": Call("copy(pinned, pinned) of 256 B", _pinned_to_pinned),
    "on_a_stream_256": Call(
        "copy_async(device, pinned, stream=s) of 256 B", _on_a_stream
    ),
    "fill": Call("device_buffer.fill(0) of 256 B", _fill),
    "numpy_to_device_large": Call("copy(device, array) of many bytes", _large),
    "prefetch": Call("next() of prefetch(loader), two arrays", _prefetch),
    "empty_pinned": Call("empty_pinned(256), and given back", _empty_pinned),
}


def settle() -> None:
    """Wait, without being traced, until no transfer is under way."""
    from cumem import _core

    # The traced extension contains the functions for tests (csrc/python/module/testing.c).
    while _core._test_count_transfers():
        _core._test_poll()
        time.sleep(0.001)


def trace(names: list[str], nbytes: int, runs: int) -> dict[str, Any]:
    """Return the counts of each call, from the run with the fewest rooms.

    "in_every_run" are the rooms that all runs entered. Whether a run enters others depends
    on how busy the machine is. For example, a thread that has to wait enters base/backoff.
    """
    import cumem

    tracer = Tracer(cumem._core.__file__)
    found = {}
    for name in names:
        call = CALLS[name].make(cumem, nbytes)
        for _ in range(WARM_RUNS):
            call()
            settle()
        is_large = name == "numpy_to_device_large"
        count = min(runs, RUNS_OF_LARGE) if is_large else runs
        tallies = [tally(tracer.run(call, settle)) for _ in range(count)]
        rooms = [each["rooms"] for each in tallies]
        best = min(tallies, key=lambda each: (each["rooms"], each["function_calls"]))
        shared = set.intersection(*(set(each["moves_into"]) for each in tallies))
        found[name] = {
            "call": CALLS[name].text,
            "rooms_of_runs": rooms,
            **best,
            "in_every_run": sorted(shared),
        }
        if is_large:
            found[name]["nbytes"] = nbytes
        del call
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    return found


# -- the program -----------------------------------------------------------------------


def table(calls: dict[str, Any]) -> str:
    """Return a line for each call."""
    head = f"{'call':24} {'rooms':>6} {'moves':>6} {'functions':>10} {'of Python':>10}"
    lines = [head + f" {'emulated':>9}"]
    lines += [
        f"{name:24} {each['rooms']:6} {each['moves']:6} {each['functions']:10} "
        f"{each['python_functions']:10} {each['emulated']['rooms']:9}"
        for name, each in calls.items()
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--call", choices=CALLS, help="only this one, with its functions"
    )
    parser.add_argument("--nbytes", type=int, default=1 << 30, help="of the large copy")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each call")
    parser.add_argument("--json", type=Path, help="write the results to FILE")
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.traced:
        build()
        # The user's settings are left out, because they might change the route of a copy.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("CUMEM_") or name == "CUMEM_BACKEND"
        }
        environment = {"CUMEM_BACKEND": "emulated", **environment}
        environment |= {
            "CUMEM_EMULATED_DELAY_US": "0",
            "CUMEM_EMULATED_MEMORY": "4 GiB",
        }
        environment |= {"PYTHONPATH": str(BUILD), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, __file__, "--traced", *sys.argv[1:]]
        return subprocess.run(command, env=environment).returncode
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    from cumem import info

    started = datetime.now(UTC)
    calls = trace(
        [options.call] if options.call else list(CALLS), options.nbytes, options.runs
    )
    print(table(calls))
    if options.call:
        print(*calls[options.call]["in_order"], sep="\n")
    if options.json:
        results = {
            "commit": info.commit(),
            "started": started.isoformat(timespec="seconds"),
            **info.collect(),
            "calls": calls,
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
