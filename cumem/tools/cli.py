# SPDX-License-Identifier: Apache-2.0
"""The command line runs ``info``, ``doctor``, ``bench`` and ``replay``.

A command's module is imported only when the command runs, so that one command does not pay
for the imports of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence

from cumem.base.driver import backend
from cumem.base.errors import CudaError, EmulationWarning
from cumem.base.kinds import DEVICE_FIRST
from cumem.base.units import fit, parse_nbytes
from cumem.base.version import __version__

__all__ = ["main"]

# The exit statuses that a shell reports for programs which SIGINT and SIGPIPE ended.
_INTERRUPTED = 130
_BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments to use instead of ``sys.argv[1:]``.

    Returns
    -------
    int
        0 if all went well; 1 if data arrived wrong, the device failed, or the doctor found
        a problem; 2 for wrong arguments; 130 after Ctrl-C; 141 if the program that reads
        the output through a pipe has ended.
    """
    options = _parser().parse_args(arguments)
    with _streams_open():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that has no arrows shows question marks instead of failing.
        sys.stdout.reconfigure(errors="replace")
    try:
        with warnings.catch_warnings():
            # Each command says in its own text that the device is emulated.
            warnings.simplefilter("ignore", EmulationWarning)
            code = _COMMANDS[options.command](options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has ended. Without this, the interpreter would complain
        # when it flushes stdout at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except (CudaError, OSError, MemoryError) as error:
        print(f"cumem: {error or 'out of ordinary memory'}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr)
        return 1
    return code


@contextlib.contextmanager
def _streams_open() -> Iterator[None]:
    """Replace standard streams that the caller has closed (``>&-``) by ``/dev/null``."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = before[0] or nowhere, before[1] or nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, in which modules are imported.

    The initialisation of modules made by Cython, such as NumPy's random generators, loses
    any exception that is raised inside it, including KeyboardInterrupt.
    """
    handler = signal.getsignal(signal.SIGINT)
    if (
        not callable(handler)
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if seen:
        raise KeyboardInterrupt


def _opens() -> bool:
    """Open the runtime, which reads the CUMEM_… variables; return False if one is wrong."""
    try:
        backend()
    except ValueError as error:
        print(f"cumem: {error}", file=sys.stderr)
        return False
    return True


def _info(options: argparse.Namespace) -> int:
    with _interrupts_held():
        from cumem.tools import info

    if not _opens():
        return 2
    facts = info.collect()
    if options.json:
        print(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        print(fit(info.render(facts)))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    with _interrupts_held():
        from cumem.tools import doctor

    try:
        return doctor.main(as_json=options.json)
    except ValueError as error:  # a variable CUMEM_… is wrong
        print(f"cumem: {error}", file=sys.stderr)
        return 2


def _bench(options: argparse.Namespace) -> int:
    with _interrupts_held():
        from cumem.tools import bench

    if not _opens():
        return 2
    wishes = bench.Options(
        quick=options.quick,
        device=options.device,
        json=options.json,
        plot=options.plot,
        max_nbytes=options.max_size,
        keep=options.keep,
        verbose=options.verbose,
    )
    try:
        return bench.main(wishes)
    except bench.UsageError as error:
        print(f"cumem bench: {error}", file=sys.stderr)
        return 2


def _replay(options: argparse.Namespace) -> int:
    from cumem.tools import replay

    names = replay.Options.__dataclass_fields__
    wishes = replay.Options(**{name: getattr(options, name) for name in names})
    try:
        trace = replay.prepare(wishes)
        for name, value in replay.environment(trace, options.late):
            os.environ.setdefault(name, value)  # before the device is opened
        return replay.main(wishes, trace) if _opens() else 2
    except ValueError as error:
        print(f"cumem replay: {error}", file=sys.stderr)
        return 2


_COMMANDS = {"info": _info, "doctor": _doctor, "bench": _bench, "replay": _replay}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cumem",
        description="Memory that feeds GPUs: what there is here and how fast it is.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="print versions, devices and limits")
    info.add_argument(
        "--json", action="store_true", help="print one JSON object instead"
    )
    doctor = commands.add_parser(
        "doctor",
        help="look for what slows this machine down, and say what to do",
        description="Look at driver, devices, link, container and settings, and measure "
        "the link for a second. Each finding is ok, a note or a problem, with what to do. "
        "Exit status: 0 without problems, 1 with, 2 for a wrong argument or variable.",
    )
    doctor.add_argument(
        "--json", action="store_true", help="print one JSON object instead"
    )
    bench = commands.add_parser(
        "bench",
        help="measure copies and allocations, and say which memory to use here",
        description="Measure this machine with verified data: copies between host and "
        "device, rows by random numbers, both directions at once, allocation, and the "
        "processor's own access, for each kind of memory; with advice from the figures "
        "of a real GPU.",
    )
    bench.add_argument("--quick", action="store_true", help="fewer sizes: some seconds")
    bench.add_argument(
        "--verbose",
        action="store_true",
        help="all sizes, spreads, shares of the ceiling, and advice for each row",
    )
    bench.add_argument(
        "--device", type=int, default=0, metavar="N", help="index of the device (0)"
    )
    bench.add_argument("--json", metavar="FILE", help="write the results to FILE")
    bench.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw the rates (matplotlib); also .svg and .pdf",
    )
    bench.add_argument(
        "--max-size", type=_size, metavar="SIZE", help="leave out larger copies: 64MiB"
    )
    bench.add_argument(
        "--keep",
        action="store_true",
        help="keep the results for cumem.recommend(), in the cache directory",
    )
    _add_replay(commands)
    return parser


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = commands.add_parser(
        "replay",
        help="replay recorded allocations: what is reserved, and the time of each",
        description="Replay the allocations and frees that a program made, from an .npz, "
        "a CSV log of RMM or a PyTorch snapshot, and print what the pool reserved for "
        "them, where the difference to what was asked for went, and the time per event.",
    )
    add = replay.add_argument
    add("trace", metavar="TRACE", help="the file")
    add(
        "--kind",
        choices=DEVICE_FIRST,
        default="device",
        metavar="KIND",  # the list of choices would be too wide for some terminals
        help="kind of memory: " + ", ".join(DEVICE_FIRST) + " (device)",
    )
    add("--pool", default="default", help="which of cumem's pools (default)")
    add("--device", type=int, default=0, metavar="N", help="index of the device (0)")
    add(
        "--late",
        metavar="N",
        help="keep freed blocks in use by work that runs late, for this number of events "
        "or this fraction of the trace",
    )
    add(
        "--late-on",
        choices=("side", "own"),
        default="side",
        help="whose work is late: that of another stream which used each block too "
        "(side), or that of the trace's own streams (own)",
    )
    add(
        "--compare",
        type=_peers,
        default=(),
        metavar="NAMES",
        help="replay on others too, each in its own process: torch,cupy,rmm",
    )
    add(
        "--rounds", type=int, default=1, metavar="N", help="timed passes; median counts"
    )
    add("--repeat", action="store_true", help="also time a pass on the warm pool")
    add("--json", metavar="FILE", help="write the results to FILE")
    add(
        "--allocator",
        default="cumem",
        metavar="NAME",
        help="replay on this one: cumem, torch, torch-expandable, cupy, rmm",
    )
    add(
        "--trace-device",
        type=int,
        metavar="N",
        help="the device whose events to take from a PyTorch snapshot of several devices",
    )


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"an empty name in {text!r}")
    return names


def _size(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
