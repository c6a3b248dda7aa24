# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: how a call is timed, and what a file of results says."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import cumem
from cumem import info

Call = Callable[[], object]
LONG_SECONDS = 4.0


def times_of(call: Call, seconds: float) -> list[float]:
    """Seconds of each call after one that is dropped.

    As many as fit, and at least three, but no more once they have taken `LONG_SECONDS`.
    """
    call()
    times: list[float] = []
    begin = time.perf_counter()
    while not times or (
        (spent := time.perf_counter() - begin) < LONG_SECONDS
        and (len(times) < 3 or (spent < seconds and len(times) < 2000))
    ):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _tuning() -> dict[str, Any]:
    """How copies are made by now: the first long one measures the machine."""
    now = cumem.configure()
    return {
        name: {"value": getattr(now, name), "from": now.sources[name]}
        for name in now.sources
    }


class Run:
    """One run of a benchmark: its options, its results as they come, and their file.

    Parameters
    ----------
    description : str
        The script's text; the first line is that of its ``--help``.
    **options : dict
        Arguments of ``add_argument`` by name, beside ``--json`` and ``--quick``.
    """

    def __init__(self, description: str, **options: dict[str, Any]) -> None:
        parser = argparse.ArgumentParser(description=description.splitlines()[0])
        parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
        parser.add_argument("--quick", action="store_true", help="small and few")
        for name, arguments in options.items():
            parser.add_argument(f"--{name}", **arguments)
        self.options = parser.parse_args()
        self.started = datetime.now(UTC)
        self.cases: list[Any] = []
        self.facts: dict[str, Any] = {}
        self.emulated = False
        self._collected: dict[str, Any] = {}

    def begin(self, emulated: bool) -> None:
        """Say whose figures these are going to be."""
        self.emulated = emulated
        if emulated:
            print("EMULATED DEVICE: no GPU took part, these figures are not a GPU's")

    def note(self, schema: int, **facts: Any) -> None:
        """Take what stands beside the cases in the file; later calls add to it."""
        self.facts |= {"schema": schema, **facts}

    def show(self, cases: Iterable[Any], line: Callable[[Any], str]) -> None:
        """Measure `cases`, print a line of each and write the file as soon as it is there.

        A run that is cut off leaves what it came to, and the file says so.
        """
        for case in cases:
            self.cases.append(case)
            print(line(case), flush=True)
            self._save(complete=False)

    def end(self) -> None:
        """Write the file asked for: that was all."""
        self._save(complete=True)

    def _save(self, *, complete: bool) -> None:
        if not self.options.json:
            return
        if not self._collected:
            self._collected = info.collect()
        results = {
            "schema": self.facts["schema"],
            "started": self.started.isoformat(timespec="seconds"),
            "complete": complete,
            "emulated": self.emulated,
            "quick": self.options.quick,
            "commit": info.commit(),
            **self._collected,
            "tuning": _tuning(),
            **self.facts,
            "cases": [asdict(case) for case in self.cases],
        }
        info.save(results, self.options.json)
