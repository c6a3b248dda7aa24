# SPDX-License-Identifier: Apache-2.0
"""``python -m cumem bench`` chooses cases, runs them and reports the results."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

from cumem.base.driver import backend, emulation_reason
from cumem.base.units import fit, format_nbytes
from cumem.base.version import __version__
from cumem.devices.device import Device
from cumem.tools import info, saved_results
from cumem.tools.bench import cases
from cumem.tools.bench.cases import KIB, MIB, Plan, Result
from cumem.tools.bench.report import PLOT_FORMATS, Report, save_plot

__all__ = ["Options", "UsageError", "main", "make_plan"]

# The package imports these modules at their first use, which could be during a
# measurement.
for _module in (
    "base.errors",
    "buffers.casting",
    "buffers.values",
    "buffers.views",
    "interchange.foreign_stream",
    "pools.out_of_memory",
    "pools.pool",
):
    importlib.import_module(f"cumem.{_module}")

QUICK_SIZES: Final = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
FULL_SIZES: Final = tuple(4 * KIB * 4**step for step in range(9))  # 4 KiB … 256 MiB


class UsageError(Exception):
    """The options cannot be met; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line.

    Parameters
    ----------
    quick : bool
        Whether to measure fewer sizes and repeats.
    device : int
        The index of the device.
    json : str or None
        The file to write the results to as one JSON object.
    plot : str or None
        The file for the plot: .png, .svg or .pdf.
    max_nbytes : int or None
        The largest copy to measure.
    keep : bool
        Whether to keep the results for `recommend`, in the user's cache directory.
    verbose : bool
        Whether to print all sizes, spreads and the advice of each row.
    """

    quick: bool = False
    device: int = 0
    json: str | None = None
    plot: str | None = None
    max_nbytes: int | None = None
    keep: bool = False
    verbose: bool = False


def make_plan(options: Options, room: int) -> Plan:
    """Choose sizes and repeats.

    Parameters
    ----------
    options : Options
        The options of the command line.
    room : int
        The bytes that one buffer may take on this machine.

    Returns
    -------
    Plan
        The cases that fit.

    Raises
    ------
    UsageError
        If not even the smallest copy fits.
    """
    limit = room if options.max_nbytes is None else min(room, options.max_nbytes)
    sizes = QUICK_SIZES if options.quick else FULL_SIZES
    fitting = tuple(size for size in sizes if size <= limit)
    if not fitting:
        smallest = format_nbytes(sizes[0])
        raise UsageError(
            f"no copy fits in {format_nbytes(limit)}; the smallest is {smallest}"
        )
    if options.quick:
        ends, budget = fitting[-1:], 0.05
    else:
        ends, budget = tuple(size for size in fitting if size >= MIB)[::2], 0.25
    rows = tuple(size for size in fitting if 64 * KIB <= size <= 64 * MIB)
    allocations = tuple(size for size in (4 * KIB, MIB, 64 * MIB) if size <= limit)
    return Plan(
        sizes=fitting,
        row_sizes=rows or fitting[-1:],
        both_sizes=ends or fitting[-1:],
        allocate_sizes=allocations[:2] if options.quick else allocations,
        host_nbytes=min(fitting[-1], 16 * MIB),
        budget=budget,
        device=options.device,
        seed=time.time_ns(),
    )


def main(options: Options) -> int:
    """Run the benchmark and print what it found.

    Parameters
    ----------
    options : Options
        The options of the command line.

    Returns
    -------
    int
        0 if all went well; 1 if any bytes arrived wrong, or more than half of the
        figures are missing.

    Raises
    ------
    UsageError
        If the device does not exist, a file cannot be written, or a library is missing.
    CudaError
        If the device cannot be used.
    """
    _check(options)
    device = Device(options.device)
    facts = info.collect()
    plan = make_plan(options, _room(facts, device))
    with _said_to_be_emulated():
        return _run(options, plan, facts)


def _run(options: Options, plan: Plan, facts: dict[str, Any]) -> int:
    device = Device(options.device)
    print(fit(_title(device, facts)))
    if plan.sizes[-1] < max(_sizes(options)):
        print(f"copies end at {format_nbytes(plan.sizes[-1])}: not enough free memory")
    print(flush=True)
    started = datetime.now(UTC)
    results = _with_progress(cases.run(plan), cases.count(plan))
    report = Report(results, advises=not device.emulated)
    seconds = (datetime.now(UTC) - started).total_seconds()
    print(fit(report.render(options.verbose)))
    _save(options, report, facts, plan, started)
    more = "" if options.verbose else "; --verbose prints all sizes and spreads"
    print(fit(f"took {seconds:.1f} s{more}"))
    if report.is_mostly_missing:
        print(f"cumem bench: most figures are missing; {_advice()}", file=sys.stderr)
    return 1 if report.failures or report.is_mostly_missing else 0


def _advice() -> str:
    """Say what to do if most figures are missing."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        return (
            f"the address space is limited to {format_nbytes(soft)}, and pools reserve "
            "more: `ulimit -v unlimited`"
        )
    return "the lines above say why; --max-size 1MiB needs less memory"


def _check(options: Options) -> None:
    """Raise a UsageError now for options that would only fail after the measurement."""
    try:
        info.check_device(options.device)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if options.json == "-":
        raise UsageError("--json -: the tables are on standard output; name a file")
    if options.plot is not None:
        if Path(options.plot).suffix.lower() not in PLOT_FORMATS:
            endings = ", ".join(PLOT_FORMATS)
            raise UsageError(f"{options.plot}: a picture's name ends in {endings}")
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--plot needs matplotlib: pip install 'cumem[plot]'")
    if options.json is not None and options.plot is not None:
        if os.path.realpath(options.json) == os.path.realpath(options.plot):
            raise UsageError(f"{options.plot}: --json and --plot name the same file")
    device = Device(options.device)
    if options.keep and device.emulated:
        raise UsageError(
            "--keep: figures of the emulated device say nothing about a GPU"
        )
    keep_at = _result_path(device) if options.keep else None
    for path in (options.json, options.plot, keep_at):
        if path is not None:
            try:
                info.check_writable(path)
            except ValueError as error:
                raise UsageError(str(error)) from error


def _sizes(options: Options) -> tuple[int, ...]:
    """Return the sizes that the options ask for, even those that do not fit."""
    sizes = QUICK_SIZES if options.quick else FULL_SIZES
    most = options.max_nbytes
    return sizes if most is None else tuple(n for n in sizes if n <= most)


def _room(facts: dict[str, Any], device: Device) -> int:
    """Return the most bytes of a buffer with which every case still fits in memory."""
    host = facts["machine"]
    room = [device.memory_info()[0] // 3]  # for two buffers, and one of managed memory
    # The host holds the store of random bytes, two buffers of a kind, and the copy that
    # is compared. It also holds the memory of an emulated device.
    shares = 8 if device.emulated else 5
    if host["memory_available_nbytes"] is not None:
        room.append(host["memory_available_nbytes"] // shares)
    if (
        host["cgroup_limit_nbytes"] is not None
        and host["cgroup_used_nbytes"] is not None
    ):
        room.append(
            max(0, host["cgroup_limit_nbytes"] - host["cgroup_used_nbytes"]) // shares
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        # Pools reserve more address space than they fill.
        room.append(max(0, soft - _address_space()) // (4 * shares))
    return min(room)


def _address_space() -> int:
    """Return the address space that this process uses, as ``ulimit -v`` counts it."""
    pages = (info.read_text("/proc/self/statm") or "0").split()[0]
    return int(pages) * resource.getpagesize()


@contextlib.contextmanager
def _said_to_be_emulated() -> Iterator[None]:
    """Print in the first and last line that the device is emulated, even on failure."""
    if backend() != "emulated":
        yield
        return
    reason = emulation_reason() or "asked for by CUMEM_BACKEND=emulated"
    warning = (
        f"EMULATED DEVICE: no GPU took part, these figures are not a GPU's ({reason})"
    )
    print(fit(warning), flush=True)
    try:
        yield
    except BrokenPipeError:
        raise  # nobody reads the output any more
    except BaseException:
        print(fit(warning), flush=True)
        raise
    print(fit(warning))


def _title(device: Device, facts: dict[str, Any]) -> str:
    versions = facts["versions"]
    return (
        f"{device.name} (device {device.index}), driver CUDA {versions['driver']}, "
        f"cumem {versions['cumem']}, {facts['machine']['cpu']}"
    )


def _save(
    options: Options, report: Report, facts: dict[str, Any], plan: Plan, when: datetime
) -> None:
    device = Device(options.device)
    if options.json is not None or options.keep:
        data = {
            "schema": 2,
            "cumem": __version__,
            "commit": info.commit(),
            "started": when.isoformat(timespec="seconds"),
            "emulated": device.emulated,
            "device": device.index,
            "key": saved_results.machine_key(device),
            "plan": {
                "sizes": plan.sizes,
                "row_sizes": plan.row_sizes,
                "row_nbytes": cases.ROW_NBYTES,
                "budget": plan.budget,
                "quick": options.quick,
            },
            **facts,
            **report.as_data(),
        }
        for path in (options.json, _result_path(device) if options.keep else None):
            if path is not None:
                info.save(data, path)
                print(f"wrote {path}")
    if options.plot is not None:
        warning = "emulated device: not a GPU's figures" if device.emulated else None
        title = f"{device.name}, driver CUDA {facts['versions']['driver']}"
        save_plot(report, options.plot, title, warning)
        print(f"wrote {options.plot}")


def _result_path(device: Device) -> str:
    """Return the path of the saved results, and create its directory."""
    path = saved_results.result_path(device, "bench")
    if path is None:
        raise UsageError("--keep: there is no home and no XDG_CACHE_HOME to keep it in")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(path)


def _with_progress(results: Iterable[Result], total: int) -> Iterator[Result]:
    """Yield the results, and on a terminal show a progress bar."""
    stream = sys.stderr
    if not stream.isatty():
        yield from results
    elif importlib.util.find_spec("tqdm") is not None:
        tqdm: Any = importlib.import_module("tqdm").tqdm
        with tqdm(total=total, file=stream, leave=False, unit="case") as bar:
            for result in results:
                bar.set_postfix_str(f"{result.group} {result.kind}", refresh=False)
                bar.update()
                yield result
    else:
        yield from _plain_progress(results, total, stream)


def _plain_progress(
    results: Iterable[Result], total: int, stream: TextIO
) -> Iterator[Result]:
    """Show the progress in one line, which is erased at the end or after a failure."""
    try:
        for done, result in enumerate(results, start=1):
            filled = 30 * done // total
            bar = "#" * filled + "." * (30 - filled)
            text = f"[{bar}] {done}/{total} {result.group} {result.kind}"
            stream.write(f"\r{text:<76}")
            stream.flush()
            yield result
    finally:
        stream.write("\r" + " " * 76 + "\r")
        stream.flush()
