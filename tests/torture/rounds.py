# SPDX-License-Identifier: Apache-2.0
"""Runs the rounds of the torture, checks what each leaves behind, and reports.

In each round all threads work until a deadline. Then everything must be given back. Figures
such as the number of open files must not grow from round to round.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import testing

import cumem
from cumem import info
from torture.libraries import LIBRARIES, find_libraries
from torture.main_thread import Main, interrupt, plan_faults
from torture.operations import OPERATIONS
from torture.settings import SANITIZED
from torture.watcher import grown, measure, open_files, watch
from torture.worker import Worker
from torture.world import World


def settle(world: World) -> None:
    """Wait until all work has ended and all memory of the round was given back."""
    world.shared = []
    gc.collect()
    cumem.configure(threads="auto", ring_nbytes="auto")
    cumem.set_current_device(0)
    stop = time.monotonic() + 30
    while testing.pending_transfers() and time.monotonic() < stop:
        testing.poll()
        time.sleep(0.001)
    for index in range(world.devices):
        cumem.Device(index).synchronize()
    while testing.live_storages() and time.monotonic() < stop:
        testing.poll()
        gc.collect()
        time.sleep(0.001)
    cumem.trim()
    cumem.trim()


def run_round(world: World, number: int) -> list[Worker]:
    """Run all threads until the deadline of the round, and return them."""
    options = world.options
    seconds = options.seconds / options.rounds
    world.deadline = time.monotonic() + seconds
    world.share()
    main = Main(world, options.threads, number)
    workers = [Worker(world, index, number) for index in range(options.threads)]
    main.others = workers
    everybody = world.workers = [*workers, main]
    over = threading.Event()
    watcher = threading.Thread(
        target=watch, args=(world, everybody, over), daemon=True, name="watcher"
    )
    others = [watcher]
    seed = options.seed * 1000 + number
    calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    calls.append((interrupt, (main, world, seed)))
    if options.faults:
        calls.append((plan_faults, (world, seed)))
    others += [threading.Thread(target=c, args=a, daemon=True) for c, a in calls]
    before = signal.signal(signal.SIGINT, main.hear)
    for thread in (*others, *workers):
        thread.start()
    main.run()
    for worker in workers:
        worker.join()
    for thread in others[1:]:
        thread.join()
    signal.signal(signal.SIGINT, before)
    main.note("settle")
    try:
        settle(world)
    except Exception:
        world.fail(f"at the end of round {number}: {traceback.format_exc()}")
    if not world.failures:
        world.balance()
    over.set()
    watcher.join()
    return everybody


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all rounds, and return the results, whose `failures` are empty if all is well."""
    unread: list[str] = []

    started = datetime.datetime.now(datetime.UTC)
    begin = measure(open_runtime=False)
    for name in cumem.__all__:
        getattr(cumem, name)  # names are loaded at their first use
    world = World(options, folder)
    set_hooks(world, unread)
    if options.libraries or not world.emulated:
        find_libraries()
    counts: Counter[str] = Counter()
    raised: Counter[str] = Counter()
    nbytes = 0
    rounds: list[dict[str, int]] = []
    files: list[Counter[str]] = []
    for number in range(options.rounds):
        for worker in run_round(world, number):
            counts.update(worker.counts)
            raised.update(worker.raised)
            nbytes += worker.nbytes
        del worker
        world.workers = []
        rounds.append(measure())
        files.append(open_files())
        if world.failures or unread:
            break
    failures = world.failures + unread
    if not failures:
        failures = grown(rounds)
    if not testing.check_pools():
        failures.append("the equations of the pools do not hold")
    ran = {*counts, *(name.partition(":")[0] for name in raised)}
    shut = shut_down_at_last(failures)
    return {
        "commit": info.commit(),
        "started": started.isoformat(timespec="seconds"),
        "machine": info.machine(),
        "python": sys.version,
        "backend": cumem.backend(),
        "device": cumem.Device(0).name,
        "sanitized": SANITIZED,
        "options": {k: str(v) for k, v in vars(options).items() if k != "json"},
        "seed": options.seed,
        "libraries": sorted(LIBRARIES),
        "operations": dict(sorted(counts.items())),
        "never_ran": [one.name for one in OPERATIONS if one.name not in ran],
        "operation_count": counts.total(),
        "verified_nbytes": nbytes,
        "exceptions": dict(sorted(raised.items())),
        "shutdowns": world.epoch,
        "copies_excused": world.excused,
        "children_stuck_in_the_sanitizer": world.stuck_children,
        "begin": begin,
        "peaks": dict(world.peaks),
        "after_each_round": rounds,
        "files_after_each_round": files,
        "after_shutdown": shut,
        "failures": failures,
    }


def set_hooks(world: World, unread: list[str]) -> None:
    """Collect errors that nobody could catch, except Ctrl-C and planned faults.

    A copy whose handle nobody kept may fail as any call may. Such failures are counted for
    `World.balance`, and the others are added to `unread`, which fails the run.
    """

    def hook(args: Any) -> None:
        error = args.exc_value
        if getattr(args, "object", None) is cumem.Transfer and world.may_fail(error):
            world.unreported.append(str(error))
        elif not (isinstance(error, KeyboardInterrupt) or world.planned(error)):
            unread.append("".join(traceback.format_exception(error)))

    sys.unraisablehook = hook
    threading.excepthook = hook


def shut_down_at_last(failures: list[str]) -> dict[str, int]:
    """Shut down if nothing failed, and return what is left."""
    if failures:
        return {}  # after a failure shutdown() may wait for ever
    cumem.shutdown()
    return measure(open_runtime=False)
