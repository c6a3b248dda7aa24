# SPDX-License-Identifier: Apache-2.0
"""Replays a trace of allocations on an allocator, and measures its memory and time.

A trace is a list of allocations and frees that a program made. The first pass finds out how
much memory the allocator reserves at the peak and why, and the next ones are timed as plain
loops. With ``--late`` it also keeps freed blocks in use by work on a stream for a while, as
a real program does, so that the allocator cannot reuse them at once (the module ``hold``).
"""

from __future__ import annotations

import contextlib
import gc
import json
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from cumem.base.driver import backend
from cumem.base.kinds import is_on_device
from cumem.base.units import fit, format_nbytes
from cumem.tools import info
from cumem.tools.replay import allocators
from cumem.tools.replay.allocators import ALLOCATORS, Allocator, Held
from cumem.tools.replay.hold import Gates, open_gates
from cumem.tools.replay.report import (
    Replayed,
    Waste,
    as_data,
    render,
    render_comparison,
)
from cumem.tools.replay.trace import Hold, Trace, load_trace, parse_late

__all__ = ["Options", "Replayed", "Waste", "main", "replay", "time_loop"]

PEERS: Final[dict[str, tuple[str, ...]]] = {
    "torch": ("torch", "torch-expandable"),
    "cupy": ("cupy",),
    "rmm": ("rmm",),
}

MOST_EMULATED: Final = 1 << 45  # an emulated pool reserves twice as much address space

_Rows = list[tuple[int, int, int, Any]]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line.

    Parameters
    ----------
    trace : str
        The file of the trace.
    allocator, kind, pool : str
        See `cumem.tools.replay.allocators`.
    device : int
        The index of the device.
    late : str or None
        How long freed blocks stay in use: a number of events or a fraction of the trace.
    late_on : str
        On which streams the late work runs: another stream (``"side"``), or those of the
        trace (``"own"``).
    rounds : int
        The number of timed passes, each from an empty pool; their median counts.
    repeat : bool
        Whether to time another pass on the pool that the last one left warm.
    compare : tuple of str
        Other allocators to replay on as well.
    json : str or None
        The file for the results.
    trace_device : int or None
        The device whose events are taken from a PyTorch snapshot.
    """

    trace: str
    allocator: str = "cumem"
    kind: str = "device"
    pool: str = "default"
    device: int = 0
    late: str | None = None
    late_on: str = "side"
    rounds: int = 1
    repeat: bool = False
    compare: tuple[str, ...] = ()
    json: str | None = None
    trace_device: int | None = None


# -- the loops -------------------------------------------------------------------------


def run_rows(
    rows: _Rows, allocate: Callable[[int], object], live: dict[int, object]
) -> None:
    """Replay on one stream. This loop is timed, and is the same for every allocator."""
    for op, block, size, _ in rows:
        if op:
            live[block] = allocate(size)
        else:
            del live[block]


def run_rows_on_streams(
    rows: _Rows, allocate: Callable[[int, Any], object], live: dict[int, object]
) -> None:
    """Replay with each allocation on its own stream. This loop is timed as well."""
    for op, block, size, stream in rows:
        if op:
            live[block] = allocate(size, stream)
        else:
            del live[block]


@dataclass(slots=True)
class _Observer:
    """Reads the reserved bytes after each allocation, and their uses at each new peak.

    The uses are read when a peak is first reached. Later the allocator may still reserve as
    much although less is needed.
    """

    allocator: Allocator
    peak: int = 0
    waste: Waste | None = None
    requested: int = 0

    def allocated(self, size: int) -> None:
        self.requested += size
        reserved = self.allocator.reserved()
        if reserved > self.peak:
            self.peak = reserved
            held = self.allocator.held()
            self.waste = None if held is None else _waste(held, self.requested)


@dataclass(slots=True)
class _DelayedFrees:
    """Keeps each freed block in use for as many events as `Hold` says."""

    allocator: Allocator
    hold: Hold
    gates: Gates
    own: bool
    blocks: deque[tuple[int, object]] = field(default_factory=deque)
    window: int = 0

    def enter(self, row: int) -> None:
        """Begin the window that starts at a row."""
        self.window = row // self.hold.step + 1
        self.gates.enter(self.window)
        while self.blocks and self.blocks[0][0] + self.hold.windows <= self.window:
            with self.gates:
                self.blocks.popleft()

    def freed(self, block: object) -> None:
        """Take over a block that the trace frees."""
        if not self.own and not self.allocator.use_on_side(block):
            self.blocks.append((self.window, block))


def _walk(
    rows: _Rows,
    allocator: Allocator,
    live: dict[int, Any],
    observer: _Observer | None,
    late: _DelayedFrees | None,
) -> None:
    """Replay row by row, and observe each step or keep freed blocks in use."""
    sizes: dict[int, int] = {}
    several = len(allocator.streams) > 1 or (late is not None and late.own)
    step = late.hold.step if late is not None else 0
    call: contextlib.AbstractContextManager[None]
    call = contextlib.nullcontext() if late is None else late.gates
    for row, (op, block, size, stream) in enumerate(rows):
        if late is not None and row % step == 0:
            late.enter(row)
        if op:
            try:
                with call:
                    live[block] = (
                        allocator.allocate_on(size, stream)
                        if several
                        else allocator.allocate(size)
                    )
            except MemoryError as error:
                error.add_note(_out_of_memory_note(row, size))
                raise
            if observer is not None:
                sizes[block] = size
                observer.allocated(size)
            continue
        if observer is not None:
            observer.requested -= sizes.pop(block)
        gone = live.pop(block)
        with call:
            if late is not None:
                late.freed(gone)
            del gone


def _out_of_memory_note(row: int, size: int) -> str:
    note = f"while replaying row {row}, an allocation of {format_nbytes(size)}"
    if backend() == "emulated":
        note += "; CUMEM_EMULATED_MEMORY sets the size of the emulated device"
    return note


def _waste(held: Held, requested: int) -> Waste:
    return Waste(
        requested=requested,
        rounding=held.live - requested,
        fragmentation=held.cached,
        in_flight=held.in_flight,
    )


def _timed(function: Callable[[], None]) -> int:
    """Return the nanoseconds of one call, with the garbage collector off."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter_ns()
        function()
        return time.perf_counter_ns() - start
    finally:
        if enabled:
            gc.enable()


def time_loop(trace: Trace) -> float:
    """Measure the timed loop itself, with a cheap built-in in place of the allocator.

    Parameters
    ----------
    trace : Trace
        The trace whose rows are walked.

    Returns
    -------
    float
        The nanoseconds per event, the best of three passes.
    """
    rows = trace.rows([object()] * trace.stream_count)

    def walk() -> None:
        if trace.stream_count > 1:
            run_rows_on_streams(rows, operator.is_, {})
        else:
            run_rows(rows, operator.truth, {})

    return min(_timed(walk) for _ in range(3)) / trace.events


# -- one replay ------------------------------------------------------------------------


def replay(
    trace: Trace,
    allocator: Allocator,
    *,
    kind: str = "device",
    pool: str = "default",
    device: int = 0,
    hold: Hold | None = None,
    own: bool = False,
    rounds: int = 1,
    warm: bool = False,
) -> Replayed:
    """Replay a trace once to see how much is reserved, and then again for the time.

    Parameters
    ----------
    trace : Trace
        The trace to replay.
    allocator : Allocator
        The allocator, which is emptied before and after.
    kind, pool, device
        The arguments with which the allocator was made. They become part of the result.
    hold : Hold, optional
        How long to keep freed blocks in use.
    own : bool
        Whether late work runs on the trace's own streams, rather than on another stream.
    rounds : int
        The number of timed passes, each from an empty pool.
    warm : bool
        Whether to time another pass on a warm pool.

    Returns
    -------
    Replayed

    Raises
    ------
    OutOfMemoryError
        If the device has too little memory for the trace. A note names the row.
    """
    rows = trace.rows(allocator.streams)
    allocator.empty()
    observer = _Observer(allocator)
    looks = None if allocator.knows_peak else observer
    forced = _pass(rows, allocator, looks, hold, own, device)
    own_peak = allocator.peak_reserved()
    growths = allocator.growths()
    times = []
    warm_ns = None
    for number in range(rounds):
        allocator.empty()
        times.append(_timed_pass(rows, allocator, hold, own, device))
        if warm and number == rounds - 1:
            warm_ns = _timed_pass(rows, allocator, hold, own, device) / trace.events
    allocator.empty()
    peak_live = trace.peak_live
    peak_busy = trace.peak_busy(hold) if hold and not own else peak_live
    peak_reserved = max(observer.peak, own_peak)
    return Replayed(
        trace=trace.name,
        allocator=allocator.name,
        version=allocator.version,
        backend=backend(),
        kind=kind,
        pool=pool,
        events=trace.events,
        allocations=trace.allocations,
        skipped=trace.skipped,
        streams=trace.stream_count,
        peak_live=peak_live,
        peak_reserved=peak_reserved,
        ratio=peak_reserved / peak_live,
        ns_per_event=statistics.median(times) / trace.events,
        loop_ns=time_loop(trace),
        ns_per_event_warm=warm_ns,
        growths=growths,
        waste=observer.waste,
        late=0 if hold is None else hold.events,
        late_on=("own" if own else "side") if hold else "none",
        forced=forced,
        peak_busy=peak_busy,
        ratio_busy=peak_reserved / peak_busy,
    )


def _pass(
    rows: _Rows,
    allocator: Allocator,
    observer: _Observer | None,
    hold: Hold | None,
    own: bool,
    device: int,
) -> int:
    """Walk all rows once, and return how often late work had to be ended early."""
    live: dict[int, Any] = {}
    if hold is None:
        _walk(rows, allocator, live, observer, None)
        return 0
    streams = allocator.streams if own else [allocator.side]
    gates = open_gates(hold, streams, device)
    late = _DelayedFrees(allocator, hold, gates, own)
    try:
        _walk(rows, allocator, live, observer, late)
    finally:
        gates.close()
        late.blocks.clear()
    return gates.forced


def _timed_pass(
    rows: _Rows, allocator: Allocator, hold: Hold | None, own: bool, device: int
) -> int:
    if hold is not None:
        return _timed(lambda: _discard(_pass(rows, allocator, None, hold, own, device)))
    live: dict[int, object] = {}
    if len(allocator.streams) > 1:
        taken = _timed(lambda: run_rows_on_streams(rows, allocator.allocate_on, live))
    else:
        taken = _timed(lambda: run_rows(rows, allocator.allocate, live))
    live.clear()
    return taken


def _discard(_: object) -> None:
    """Return None, whatever the argument is."""


# -- the command -----------------------------------------------------------------------


def prepare(options: Options) -> Trace:
    """Read the trace and check the options, before any device is opened.

    Raises
    ------
    ValueError
        If the trace or an option is wrong.
    """
    trace = load_trace(options.trace, options.trace_device, options.kind)
    if options.late is not None:
        parse_late(options.late, trace.events)
    if options.late is not None and options.late_on == "own":
        if not is_on_device(options.kind):
            raise ValueError("--late-on own is for device memory, which has a stream")
    unknown = [name for name in options.compare if name not in PEERS]
    if unknown:
        raise ValueError(f"--compare {unknown[0]}: none of {', '.join(PEERS)}")
    if options.rounds < 1:
        raise ValueError("--rounds is at least 1")
    if options.json == "-":
        raise ValueError("--json -: the tables are on standard output; name a file")
    if options.json is not None:
        if os.path.realpath(options.json) == os.path.realpath(options.trace):
            raise ValueError(f"{options.json}: --json names the trace itself")
        info.check_writable(options.json)
    return trace


def main(options: Options, trace: Trace) -> int:
    """Replay, compare, print and save.

    Parameters
    ----------
    options : Options
        The options of the command line.
    trace : Trace
        The trace that `prepare` read.

    Returns
    -------
    int
        0.

    Raises
    ------
    ValueError
        If the device or the allocator does not exist, or the trace has more memory live
        at once than an emulated device can have.
    OutOfMemoryError
        If the device is too small for the trace.
    """
    info.check_device(options.device)
    if backend() == "emulated" and trace.peak_live > MOST_EMULATED:
        raise ValueError(
            f"{trace.name}: {format_nbytes(trace.peak_live)} live at once, more than the "
            f"{format_nbytes(MOST_EMULATED)} that an emulated device can have"
        )
    hold = None if options.late is None else parse_late(options.late, trace.events)
    allocator = allocators.make(
        options.allocator,
        options.kind,
        options.pool,
        options.device,
        trace.stream_count,
    )
    result = replay(
        trace,
        allocator,
        kind=options.kind,
        pool=options.pool,
        device=options.device,
        hold=hold,
        own=options.late_on == "own",
        rounds=options.rounds,
        warm=options.repeat,
    )
    print(fit(render(result, options.device)))
    compared = _compare(options)
    if compared:
        print()
        print(fit(render_comparison(result, compared)))
    if options.json is not None:
        info.save(as_data(result, compared, options.device), options.json)
        print(f"wrote {options.json}")
    return 0


def _compare(options: Options) -> dict[str, dict[str, Any]]:
    """Replay on other allocators, each in its own process, and return results or errors."""
    results: dict[str, dict[str, Any]] = {}
    for peer in options.compare:
        for name in PEERS[peer]:
            print(f"replaying on {name} ...", file=sys.stderr, flush=True)
            results[name] = _replay_elsewhere(replace(options, allocator=name))
    return results


def _replay_elsewhere(options: Options) -> dict[str, Any]:
    if backend() == "emulated":
        return {"error": "needs a GPU"}
    if options.kind != "device":
        return {"error": "is replayed for device memory only"}
    if not allocators.is_installed(options.allocator):
        return {"error": f"{ALLOCATORS[options.allocator]} is not installed"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        arguments = ["--allocator", options.allocator, "--json", str(path)]
        arguments += ["--device", str(options.device), "--rounds", str(options.rounds)]
        if options.late is not None:
            arguments += ["--late", options.late, "--late-on", options.late_on]
        if options.trace_device is not None:
            arguments += ["--trace-device", str(options.trace_device)]
        if options.repeat:
            arguments.append("--repeat")
        command = [sys.executable, "-m", "cumem", "replay", *arguments]
        command += ["--", options.trace]  # "--", since a name may begin with a dash
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not path.exists():
            error = _what_failed(done.stderr) or f"ended with {done.returncode}"
            return {"error": error}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {key: found[key] for key in Replayed.__dataclass_fields__}


def _what_failed(stderr: str) -> str:
    """Return the error that the command printed, or the last line of a traceback."""
    lines = stderr.splitlines()
    own = [at for at, line in enumerate(lines) if line.startswith("cumem")]
    start = own[-1] if own else len(lines)
    while not own and start > 0 and not lines[start - 1].startswith(" "):
        start -= 1
    return "; ".join(line.strip() for line in lines[start:] or lines[-1:])


def environment(trace: Trace, late: str | None = None) -> tuple[tuple[str, str], ...]:
    """Return settings for an emulated device with enough memory and no delays for a trace.

    The caller sets those that the user has not set. Emulated memory costs nothing until it
    is written to.
    """
    peak = trace.peak_live
    if late is not None:
        peak = trace.peak_busy(parse_late(late, trace.events))
    room = min(max(16 * peak, 1 << 30), MOST_EMULATED)
    return (
        ("CUMEM_EMULATED_MEMORY", str(room)),
        ("CUMEM_EMULATED_DELAY_US", "0"),
    )
