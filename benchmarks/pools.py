# SPDX-License-Identifier: Apache-2.0
"""Measure the pools against NumPy and the pools of other libraries, in one run.

    python benchmarks/pools.py --traces DIR --json benchmarks/results/pools-h200.json
    python benchmarks/pools.py --render benchmarks/results/pools-h200.json docs/pools.md

There are four parts, and ``--only T1,T13`` chooses among them:

T1   an allocation from a warm pool and its free, for each kind of memory and each way to
     write the arguments
T2   the first allocation of pinned memory in a process
T13  replays of recorded traces, as they were and with streams that still use a block after
     it was freed; the figures are reserved memory divided by live memory, and the time
     of an event
T14  the cost of an allocation with few and with many live blocks, and with one thread and
     with many

Libraries that are not installed are left out, and the output names them. Cases that need a
fresh process get one. The script also runs on the emulated device, and its output then says
so.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from timeit import Timer
from typing import Any

import numpy as np

import cumem
from cumem import info
from cumem.tools import replay
from cumem.tools.replay import allocators as replay_allocators
from cumem.tools.replay.trace import load_trace, parse_late
from cumem.units import format_nbytes

BEGIN, END = "<!-- pools-table -->", "<!-- /pools-table -->"
PARTS = ("T1", "T2", "T13", "T14")
KINDS = ("pinned", "mapped", "managed", "device")
CHILD_SECONDS = 300
LATE = "0.01"
GIB = 1 << 30

# -- T1: allocate and free -------------------------------------------------------------

#: Ways in which programs write the arguments. `numpy.empty` accepts all of them too.
FORMS = {
    "n": "1024",
    "n, dtype": "1024, f4",
    "n, 'f4'": "1024, 'f4'",
    "n, dtype=": "1024, dtype=f4",
    "(n, m), dtype": "(32, 32), f4",
    "(n, m), dtype=": "(32, 32), dtype=f4",
    "shape=, dtype=": "shape=(32, 32), dtype=f4",
}
SIZES = {"256 B": "64, f4", "1 MiB": "262144, f4", "64 MiB": "16777216, f4"}


@dataclass
class Case:
    """One statement that is timed.

    Parameters
    ----------
    what : str
        The kind of memory, or the other library's name.
    form : str
        How the arguments are written, or how large the allocation is.
    text : str
        The statement's source.
    count : int
        How many allocations the statement makes.
    pools : tuple
        The pools that are current while it runs.
    """

    what: str
    form: str
    text: str
    count: int = 1
    pools: tuple[Any, ...] = ()
    number: int = 0
    times: list[float] = field(default_factory=list)
    error: str | None = None

    def sample(self, names: dict[str, Any], number: int) -> float:
        """Return how many nanoseconds one allocation takes together with its free."""
        timer = Timer(self.text, globals=names)
        with contextlib.ExitStack() as stack:
            for pool in self.pools:
                stack.enter_context(pool)
            return timer.timeit(number) * 1e9 / number / self.count

    def calibrate(self, names: dict[str, Any]) -> None:
        """Warm the pool up, and choose how many runs take about a millisecond."""
        try:
            self.sample(names, 3)
            once = min(self.sample(names, 10) for _ in range(3)) * self.count
        except Exception as error:  # a library's failure is a result too
            self.error = f"{type(error).__name__}: {error}".splitlines()[0]
            return
        self.number = max(10, min(20_000, int(1e6 / max(once, 1.0))))


def our_cases() -> list[Case]:
    """Return the cases of each kind, form and size, and NumPy's with the same arguments."""
    cases = [Case("empty statement", "", "pass")]
    for forms in (FORMS, SIZES):
        for form, arguments in forms.items():
            cases.append(Case("numpy", form, f"numpy_empty({arguments})"))
            for kind in KINDS:
                text = f"empty_{kind}({arguments})"
                cases.append(Case(kind, form, text))
    for kind in KINDS:
        cases.append(Case(kind, "empty(…, kind)", f"empty(1024, f4, '{kind}')"))
    together = "; ".join(f"empty_{kind}(1024, f4)" for kind in KINDS)
    cases.append(Case("alternating kinds", "n, dtype", together, count=len(KINDS)))
    make_pool = getattr(cumem, "Pool", None)
    if make_pool is not None:
        pools = {kind: make_pool(kind) for kind in KINDS}
        for kind, pool in pools.items():
            text = f"empty_{kind}(1024, f4)"
            cases.append(Case(kind, "with pool:", text, pools=(pool,)))
        every = tuple(pools.values())
        cases.append(
            Case("alternating kinds", "with pools:", together, len(KINDS), every)
        )
    return cases


def peer_cases(names: dict[str, Any]) -> tuple[list[Case], dict[str, str]]:
    """Return other libraries' cases, and each library's version or why it is left out."""
    cases: list[Case] = []
    found: dict[str, str] = {}
    if cumem.backend() == "emulated":
        return cases, dict.fromkeys(PEERS, "needs a GPU")
    for name, add in PEERS.items():
        if importlib.util.find_spec(name) is None:
            found[name] = "not installed"
            continue
        try:
            version, more = add(names)
        except Exception as error:  # a library's failure is a result too
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        found[name] = version
        cases += more
    return cases, found


def cupy_cases(names: dict[str, Any]) -> tuple[str, list[Case]]:
    """Return CuPy's version and its statements."""
    import cupy

    names |= {"cupy": cupy, "cupy_alloc": cupy.cuda.alloc}
    names["cupy_pinned"] = cupy.cuda.alloc_pinned_memory
    return cupy.__version__, [
        Case("cupy", "cuda.alloc(4096)", "cupy_alloc(4096)"),
        Case("cupy", "empty(n, dtype)", "cupy.empty(1024, f4)"),
        Case("cupy", "alloc_pinned_memory(4096)", "cupy_pinned(4096)"),
    ]


def torch_cases(names: dict[str, Any]) -> tuple[str, list[Case]]:
    """Return PyTorch's version and its statements."""
    import torch

    names |= {"torch": torch, "torch_f4": torch.float32}
    device = "torch.empty(1024, dtype=torch_f4, device='cuda')"
    pinned = "torch.empty(1024, dtype=torch_f4, pin_memory=True)"
    return torch.__version__, [
        Case("torch", "empty(n, device)", device),
        Case("torch", "empty(n, pin_memory)", pinned),
    ]


def rmm_cases(names: dict[str, Any]) -> tuple[str, list[Case]]:
    """Return RMM's version, and a statement for each of its pools."""
    import rmm
    import rmm.mr

    cases = []
    makers: dict[str, Callable[[], Any]] = {
        "pool": lambda: rmm.mr.PoolMemoryResource(
            rmm.mr.CudaMemoryResource(), initial_pool_size=GIB
        ),
        "arena": lambda: rmm.mr.ArenaMemoryResource(
            rmm.mr.CudaMemoryResource(), arena_size=GIB
        ),
        # By default this resource would begin by taking half of the device. It gets as
        # much as the other resources.
        "async": lambda: rmm.mr.CudaAsyncMemoryResource(initial_pool_size=GIB),
    }
    names["DeviceBuffer"] = rmm.DeviceBuffer
    for name, make in makers.items():
        names[f"rmm_{name}"] = make()
        text = f"DeviceBuffer(size=4096, mr=rmm_{name})"
        cases.append(Case("rmm", f"DeviceBuffer, {name}", text))
    return rmm.__version__, cases


def numba_cases(names: dict[str, Any]) -> tuple[str, list[Case]]:
    """Return Numba's version and its statement."""
    import numba
    from numba import cuda

    names["device_array"] = cuda.device_array
    text = "device_array(1024, f4)"
    return numba.__version__, [Case("numba", "device_array(n, dtype)", text)]


PEERS: dict[str, Callable[[dict[str, Any]], tuple[str, list[Case]]]] = {
    "cupy": cupy_cases,
    "torch": torch_cases,
    "rmm": rmm_cases,
    "numba": numba_cases,
}


def measure_t1(options: argparse.Namespace) -> dict[str, Any]:
    """Time all cases in each of many rounds, so that drift of the machine affects all."""
    names: dict[str, Any] = {
        "numpy_empty": np.empty,
        "empty": cumem.empty,
        "f4": np.float32,
        **{f"empty_{kind}": getattr(cumem, f"empty_{kind}") for kind in KINDS},
    }
    cases = our_cases()
    peers, found = peer_cases(names)
    cases += peers
    for case in cases:
        case.calibrate(names)
    good = [case for case in cases if case.error is None]
    gc.collect()
    for round_index in range(7 if options.quick else 25):
        # Each round begins at another case, so that no case is always the first.
        start = round_index * 7 % len(good)
        for case in good[start:] + good[:start]:
            case.times.append(case.sample(names, case.number))
    rows = [row_of(case) for case in cases]
    return {"peers": found, "rows": rows, "summary": summary_t1(rows)}


def row_of(case: Case) -> dict[str, Any]:
    """Return one case as plain data."""
    row: dict[str, Any] = {
        "what": case.what,
        "form": case.form,
        "statement": case.text,
    }
    if case.error is not None:
        return row | {"error": case.error}
    low, middle, high = statistics.quantiles(case.times, n=4)
    return row | {"ns": middle, "ns_q1": low, "ns_q3": high, "rounds": len(case.times)}


def summary_t1(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst ratio to NumPy, and how much faster cumem is than its peers."""
    good = [row for row in rows if "ns" in row]
    numpy = {row["form"]: row["ns"] for row in good if row["what"] == "numpy"}
    ours = [row for row in good if row["what"] in (*KINDS, "alternating kinds")]
    same = [row for row in ours if row["form"] in numpy]
    if not same:
        return {}
    worst = max(same, key=lambda row: row["ns"] / numpy[row["form"]])
    slowest = max(row["ns"] for row in ours)
    return {
        "worst_over_numpy": worst["ns"] / numpy[worst["form"]],
        "worst_statement": worst["statement"],
        "median_over_numpy": statistics.median(
            row["ns"] / numpy[row["form"]] for row in same
        ),
        "slowest_ns": slowest,
        "peer_over_slowest": {
            f"{row['what']} {row['form']}": row["ns"] / slowest
            for row in good
            if row["what"] in PEERS
        },
    }


# -- T2: the first pinned allocation ---------------------------------------------------


def first_cumem(nbytes: int, **flags: bool) -> Callable[[], Any]:
    """Return a function that allocates pinned memory by cumem."""
    cumem.current_stream().synchronize()
    return lambda: cumem.empty_pinned(nbytes, "u1", **flags).numpy()


def first_driver(nbytes: int) -> Callable[[], Any]:
    """Return a function that page-locks memory by the driver call behind cudaHostAlloc."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, address = ctypes.c_void_p(), ctypes.c_void_p()

    def call(name: str, *arguments: Any) -> None:
        code = getattr(driver, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} failed with {code}")

    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)

    def allocate() -> Any:
        size = ctypes.c_size_t(nbytes)
        call("cuMemHostAlloc", ctypes.byref(address), size, ctypes.c_uint(0))
        assert address.value is not None
        return np.ctypeslib.as_array(
            (ctypes.c_uint8 * nbytes).from_address(address.value)
        )

    return allocate


def first_cupy(nbytes: int) -> Callable[[], Any]:
    """Return a function that allocates pinned memory by CuPy."""
    import cupy

    cupy.cuda.Device(0).synchronize()
    make = cupy.cuda.alloc_pinned_memory
    return lambda: np.frombuffer(make(nbytes), np.uint8, nbytes)


def first_torch(nbytes: int) -> Callable[[], Any]:
    """Return a function that allocates pinned memory by PyTorch."""
    import torch

    torch.cuda.init()
    torch.cuda.synchronize()
    return lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


FIRST: dict[str, tuple[str, Callable[[int], Callable[[], Any]]]] = {
    "cumem": ("cumem", first_cumem),
    "cumem, write-combined": (
        "cumem",
        functools.partial(first_cumem, write_combined=True),
    ),
    "cudaHostAlloc": ("cumem", first_driver),
    "cupy": ("cupy", first_cupy),
    "torch": ("torch", first_torch),
}


def child_first(job: dict[str, Any]) -> dict[str, Any]:
    """Time one allocation in this process, then check that every page exists."""
    nbytes = int(job["nbytes"])
    allocate = FIRST[job["how"]][1](nbytes)
    start = time.perf_counter_ns()
    array = allocate()
    ready = time.perf_counter_ns()
    array[::4096] = 1
    touched = time.perf_counter_ns()
    return {"ms": (ready - start) / 1e6, "touch_ms": (touched - ready) / 1e6}


def measure_t2(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each way in processes of its own, which alternate with those of others."""
    emulated = cumem.backend() == "emulated"
    nbytes = GIB // 16 if emulated else GIB
    times: dict[str, list[dict[str, Any]]] = {name: [] for name in FIRST}
    errors: dict[str, str] = {}
    # A virtual machine gets its memory from the host only when it first touches it. Without
    # these two runs the way that comes first would pay for that.
    for _ in range(0 if emulated or options.quick else 2):
        run_child({"what": "first", "how": "cumem", "nbytes": nbytes})
    for _ in range(1 if options.quick else 3):
        for name, (module, _) in FIRST.items():
            if importlib.util.find_spec(module) is None:
                errors[name] = "not installed"
            elif emulated and not name.startswith("cumem"):
                errors[name] = "needs a GPU"
            else:
                found = run_child({"what": "first", "how": name, "nbytes": nbytes})
                if "error" in found:
                    errors[name] = found["error"]
                else:
                    times[name].append(found)
    rows: dict[str, Any] = {name: {"error": text} for name, text in errors.items()}
    for name, found_times in times.items():
        if found_times:
            milliseconds = [found["ms"] for found in found_times]
            rows[name] = {
                "ms": statistics.median(milliseconds),
                "ms_all": milliseconds,
                "touch_ms": statistics.median(f["touch_ms"] for f in found_times),
            }
    return {"nbytes": nbytes, "rows": {name: rows[name] for name in FIRST}}


# -- T13: traces -----------------------------------------------------------------------


def child_replay(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Replay all traces on one kind of allocator, a new one for each replay."""
    results = []
    for path in job["traces"]:
        trace = load_trace(path)
        for late, own in ((None, False), (job["late"], False), (job["late"], True)):
            allocator = replay_allocators.make(
                job["allocator"], "device", job["pool"], 0, trace.stream_count
            )
            hold = None if late is None else parse_late(late, trace.events)
            rounds = job["rounds"] if hold is None else 1
            result = replay.replay(
                trace,
                allocator,
                pool=job["pool"],
                hold=hold,
                own=own,
                rounds=rounds,
                warm=hold is None,
            )
            results.append(asdict(result))
            del allocator
    return results


def measure_t13(options: argparse.Namespace) -> dict[str, Any]:
    """Replay on cumem and on each peer, with a process for each allocator."""
    if options.traces is None:
        return {"error": "no --traces"}
    paths = sorted(
        str(path)
        for path in Path(options.traces).iterdir()
        if path.suffix in (".npz", ".csv", ".pickle", ".pkl")
    )
    if not paths:
        return {"error": f"no traces in {options.traces}"}
    emulated = cumem.backend() == "emulated"
    largest = max((load_trace(path) for path in paths), key=lambda t: t.peak_live)
    found: dict[str, Any] = {}
    for name in replay_allocators.ALLOCATORS:
        if not replay_allocators.is_installed(name):
            found[name] = {"error": "not installed"}
        elif emulated and name != "cumem":
            found[name] = {"error": "needs a GPU"}
        else:
            job = {
                "what": "replay",
                "allocator": name,
                "pool": options.pool,
                "traces": paths,
                "late": LATE,
                "rounds": 1 if options.quick else 3,
            }
            answer = run_child(job, dict(replay.environment(largest, LATE)))
            found[name] = answer if "error" in answer else answer["results"]
    means = {
        name: means_of(results)
        for name, results in found.items()
        if isinstance(results, list)
    }
    return {"late": LATE, "allocators": found, "geometric_mean": means}


def means_of(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return geometric means over the traces, for each choice of which streams are late."""
    means = {}
    for late_on in ("none", "side", "own"):
        rows = [row for row in results if row["late_on"] == late_on]
        means[late_on] = {
            key: math.exp(statistics.fmean(math.log(row[key]) for row in rows))
            for key in ("ratio", "ratio_busy", "ns_per_event")
        }
    return means


# -- T14: many blocks, many threads ----------------------------------------------------


def churn(
    live: list[object], plan: list[tuple[int, int]], allocate: Callable[[int], object]
) -> None:
    """Follow a plan of (index, bytes): allocate, and free the old block at that index."""
    for index, size in plan:
        live[index] = allocate(size)


def churn_ns(
    live: list[object], allocate: Callable[[int], object], rounds: int, seed: int
) -> list[float]:
    """Return the nanoseconds of an allocation with the free of another block, by round."""
    random = np.random.default_rng(seed)
    count = 100_000 if len(live) > 100_000 else 20_000
    times = []
    for _ in range(rounds):
        places = random.integers(0, len(live), count).tolist()
        sizes = (random.integers(1, 9, count) * 512).tolist()
        plan = list(zip(places, sizes, strict=True))
        start = time.perf_counter_ns()
        churn(live, plan, allocate)
        times.append((time.perf_counter_ns() - start) / count)
    return times


def populations(
    allocate: Callable[[int], object], counts: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Time `churn` with each number of live blocks, and with the first number again."""
    random = np.random.default_rng(1)
    rows = []
    live: list[object] = []
    for count in (*counts, counts[0]):
        sizes = (random.integers(1, 9, max(0, count - len(live))) * 512).tolist()
        live.extend(allocate(size) for size in sizes)
        del live[count:]
        churn_ns(live, allocate, 1, 2)
        times = churn_ns(live, allocate, rounds, 3)
        rows.append({"live": count, "ns": statistics.median(times), "ns_all": times})
    return rows


def thread_rate(
    allocate: Callable[[int], object], threads: int, operations: int
) -> float:
    """Return the allocations and frees per second of all threads together."""
    share = operations // threads
    barrier = threading.Barrier(threads + 1)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        places = random.integers(0, 64, share).tolist()
        sizes = (random.integers(1, 65, share) * 512).tolist()
        plan = list(zip(places, sizes, strict=True))
        live: list[object] = [None] * 64
        churn(live, plan, allocate)
        barrier.wait()
        churn(live, plan, allocate)
        barrier.wait()

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    start = time.perf_counter_ns()
    barrier.wait()
    seconds = (time.perf_counter_ns() - start) / 1e9
    for worker in workers:
        worker.join()
    return share * threads / seconds


def child_scale(job: dict[str, Any]) -> dict[str, Any]:
    """Measure one allocator by live blocks and by threads.

    The allocator ``loop`` makes Python floats instead, which shows what the loop costs.
    """
    if job["allocator"] == "loop":
        allocate: Callable[[int], object] = float
    else:
        allocator = replay_allocators.make(
            job["allocator"], "device", job["pool"], 0, 1
        )
        allocator.empty()
        allocate = allocator.allocate
    with collector_off():
        rates: dict[int, list[float]] = {threads: [] for threads in job["threads"]}
        for _ in range(job["rounds"]):
            for threads in rates:
                rate = thread_rate(allocate, threads, job["operations"])
                rates[threads].append(rate)
        rows = populations(allocate, job["live"], job["rounds"])
    return {
        "populations": rows,
        "threads": {
            threads: {"per_second": statistics.median(all_), "all": all_}
            for threads, all_ in rates.items()
        },
    }


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Keep the garbage collector from running during the ``with`` block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure_t14(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the loop alone, cumem, and CuPy, each in a process of its own."""
    emulated = cumem.backend() == "emulated"
    many = 2_000 if emulated else 1_000_000
    results: dict[str, Any] = {}
    for name in ("loop", "cumem", "cupy"):
        if name == "cupy" and emulated:
            results[name] = {"error": "needs a GPU"}
        elif name == "cupy" and not replay_allocators.is_installed(name):
            results[name] = {"error": "not installed"}
        else:
            results[name] = run_child(
                {
                    "what": "scale",
                    "allocator": name,
                    "pool": options.pool,
                    "live": [1000, many],
                    "threads": [1, 2, 4, 8, 16],
                    "operations": 4_000 if emulated else 400_000,
                    "rounds": 3 if options.quick or emulated else 5,
                }
            )
    return results


# -- processes -------------------------------------------------------------------------

CHILDREN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "first": child_first,
    "replay": lambda job: {"results": child_replay(job)},
    "scale": child_scale,
}


def run_child(
    job: dict[str, Any], environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return what a job measured in a new process, or the text of its error."""
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    variables = (environment or {}) | dict(os.environ)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=variables,
            timeout=CHILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {CHILD_SECONDS} s"}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        return {"error": lines[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


# -- text ------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("| --- " + "| ---: " * (len(head) - 1) + "|")
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def lines_t1(part: dict[str, Any]) -> list[str]:
    """Return tables of nanoseconds: cumem's by form and kind, then those of the peers."""
    rows = part["rows"]

    def cell(what: str, form: str) -> str:
        for row in rows:
            if (row["what"], row["form"]) == (what, form):
                return f"{row['ns']:.0f}" if "ns" in row else "failed"
        return ""

    forms = list(dict.fromkeys(row["form"] for row in rows if row["what"] in KINDS))
    cells = [
        [f"`{form}`", cell("numpy", form), *(cell(kind, form) for kind in KINDS)]
        for form in forms
    ]
    others = [row for row in rows if row["what"] in (*PEERS, "alternating kinds")]
    summary = part["summary"]
    closing = []
    if summary:
        closing = [
            "",
            f"Median {summary['median_over_numpy']:.2f} times `numpy.empty` with the same "
            f"arguments, at worst {summary['worst_over_numpy']:.2f} times "
            f"(`{summary['worst_statement']}`).",
        ]
    return [
        "Allocate and free from a warm pool, in nanoseconds:",
        "",
        *table(["arguments", "`numpy.empty`", *KINDS], cells),
        "",
        *table(
            ["others", "ns"],
            [
                [f"{r['what']}: `{r['form']}`", cell(r["what"], r["form"])]
                for r in others
            ],
        ),
        *closing,
    ]


def lines_t2(part: dict[str, Any]) -> list[str]:
    """Return a table of the milliseconds of the first pinned allocation."""
    rows = []
    for name, row in part["rows"].items():
        if "error" in row:
            rows.append([name, row["error"], ""])
        else:
            rows.append([name, f"{row['ms']:.1f}", f"{row['touch_ms']:.1f}"])
    size = format_nbytes(part["nbytes"])
    return [
        f"First pinned allocation of a process, {size}:",
        "",
        *table(["by", "ms", "then touching every page, ms"], rows),
    ]


def lines_t13(part: dict[str, Any]) -> list[str]:
    """Return a table of reserved bytes divided by live bytes, and the times, by trace."""
    if "error" in part:
        return [f"Traces: {part['error']}."]
    found = part["allocators"]
    names = list(
        dict.fromkeys(
            row["trace"]
            for results in found.values()
            if isinstance(results, list)
            for row in results
        )
    )
    titles = {
        "none": "as recorded: reserved ÷ live, and ns per event with growth, then "
        "on the warm pool",
        "side": "each freed block in use elsewhere for a while: reserved ÷ (live or in "
        "use)",
        "own": "the trace's own streams late: reserved ÷ live",
    }
    lines = ["Traces replayed. Late work lasts for 1 % of the events:"]
    for late_on, title in titles.items():
        rows = []
        key = "ratio_busy" if late_on == "side" else "ratio"
        for name, results in found.items():
            if not isinstance(results, list):
                rows.append([name, results["error"], *[""] * len(names)])
                continue
            by_trace = {
                row["trace"]: row for row in results if row["late_on"] == late_on
            }
            cells = []
            for trace in names:
                row = by_trace[trace]
                early = "*" if row["forced"] else ""
                times = [row["ns_per_event"], row["ns_per_event_warm"]]
                texts = [f", {ns:.0f} ns" for ns in times if ns and late_on == "none"]
                cells.append(f"{row[key]:.3f}{early}{''.join(texts)}")
            mean = part["geometric_mean"][name][late_on][key]
            rows.append([f"{name} {results[0]['version']}", *cells, f"{mean:.3f}"])
        stems = [Path(name).stem for name in names]
        lines += ["", *table([title, *stems, "geometric mean"], rows)]
    if any(
        row["forced"]
        for results in found.values()
        if isinstance(results, list)
        for row in results
    ):
        lines += ["", "* The allocator waited for late work, which was let go early."]
    return lines


def lines_t14(part: dict[str, Any]) -> list[str]:
    """Return a table of the cost by live blocks, and one of the rate by threads."""
    good = {name: row for name, row in part.items() if "error" not in row}
    bad = [f"{name}: {row['error']}" for name, row in part.items() if "error" in row]
    if not good:
        return ["Scale: " + "; ".join(bad)]
    first = next(iter(good.values()))
    head = ["live blocks"] + [f"{row['live']:,}" for row in first["populations"]]
    rows = [
        [f"{name}, ns"] + [f"{row['ns']:.0f}" for row in found["populations"]]
        for name, found in good.items()
    ]
    threads = list(first["threads"])
    rates = [
        [f"{name}, million a second"]
        + [f"{found['threads'][t]['per_second'] / 1e6:.2f}" for t in threads]
        for name, found in good.items()
    ]
    lines = ["One allocation and one free at random places:", ""]
    lines += table(head, rows)
    lines += ["", *table(["threads", *threads], rates)]
    return lines + (["", "Not measured: " + "; ".join(bad)] if bad else [])


LINES = {"T1": lines_t1, "T2": lines_t2, "T13": lines_t13, "T14": lines_t14}


def render(results: dict[str, Any]) -> str:
    """Turn measured results into the Markdown between the markers."""
    device = results["devices"][0]["name"] if results["devices"] else "no device"
    versions, host = results["versions"], results["machine"]
    lines = [
        f"{device}, driver CUDA {versions['driver']}, cumem {versions['cumem']}, Python "
        f"{versions['python']}, NumPy {versions['numpy']}, {host['cpu']}; medians."
    ]
    if results["emulated"]:
        lines += ["", "**Emulated device: these figures are not a GPU's.**"]
    for part in PARTS:
        if part in results["parts"]:
            lines += ["", *LINES[part](results["parts"][part])]
    return "\n".join(lines)


def write_between(page: Path, text: str) -> None:
    """Put text between the two marker lines of a page."""
    old = page.read_text(encoding="utf-8")
    head, rest = old.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


MEASURES = {
    "T1": measure_t1,
    "T2": measure_t2,
    "T13": measure_t13,
    "T14": measure_t14,
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen parts, and note the machine and the versions."""
    started = datetime.now(UTC)
    parts = {}
    for name in options.only:
        start = time.perf_counter()
        print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
        parts[name] = MEASURES[name](options)
        print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return {
        "schema": 1,
        "started": started.isoformat(timespec="seconds"),
        "seconds": (datetime.now(UTC) - started).total_seconds(),
        "emulated": cumem.backend() == "emulated",
        "quick": options.quick,
        "pool": options.pool,
        "commit": options.commit or info.commit(),
        **info.collect(),
        "parts": parts,
    }


def parse_parts(text: str) -> list[str]:
    """Turn an argument such as ``T1,T13`` into the names of parts."""
    parts = [part.strip().upper() for part in text.split(",")]
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(PARTS)}")
    return parts


def main() -> int:
    """Measure, render, or (in a child process) do one job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", metavar="FILE", help="write the results to FILE")
    add("--only", type=parse_parts, default=list(PARTS), help="parts, such as T1,T13")
    add("--traces", metavar="DIR", help="folder of traces, for T13")
    add("--pool", default="default", help="cumem's pool to measure (default: default)")
    add("--quick", action="store_true", help="fewer rounds")
    add("--commit", metavar="TEXT", help="name the commit where there is no repository")
    add("--render", nargs=2, metavar=("FILE", "PAGE"), help="write the page's table")
    add("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        job = json.loads(options.child)
        print(json.dumps(CHILDREN[job["what"]](job)))
        return 0
    if options.render:
        results = json.loads(Path(options.render[0]).read_text(encoding="utf-8"))
        write_between(Path(options.render[1]), render(results))
        return 0
    results = measure(options)
    print(render(results))
    if options.json:
        info.save(results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
