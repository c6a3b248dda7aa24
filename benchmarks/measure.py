# SPDX-License-Identifier: Apache-2.0
"""Has what the benchmarks share, such as timing a call and writing a results file."""

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
    """Return the seconds of each call but the first.

    The call is repeated for `seconds`, but at least three times and at most 2,000 times.
    After `LONG_SECONDS` no further call begins, even if there were fewer than three.
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
    """Return cumem's present settings, and for each where its value comes from."""
    now = cumem.configure()
    return {
        name: {"value": getattr(now, name), "from": now.sources[name]}
        for name in now.sources
    }


class Run:
    """One run of a benchmark: it parses options, collects cases and writes their file.

    Parameters
    ----------
    description : str
        The script's docstring, whose first line ``--help`` shows.
    **options : dict
        Options besides ``--json`` and ``--quick``. The key is the name, and the value has
        the keyword arguments of ``add_argument``.
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
        """Note whether the device is emulated, and if so, print a warning."""
        self.emulated = emulated
        if emulated:
            print("EMULATED DEVICE: no GPU took part, these figures are not a GPU's")

    def note(self, schema: int, **facts: Any) -> None:
        """Add facts to the file, which it keeps beside the cases."""
        self.facts |= {"schema": schema, **facts}

    def show(self, cases: Iterable[Any], line: Callable[[Any], str]) -> None:
        """Measure `cases`, print a line of each, and write the file after each.

        If the run is interrupted, the file has the cases so far, and `complete` is false.
        """
        for case in cases:
            self.cases.append(case)
            print(line(case), flush=True)
            self._save(complete=False)

    def end(self) -> None:
        """Mark the run as complete, and write its file if one was asked for."""
        self._save(complete=True)

    def _save(self, *, complete: bool) -> None:
        """Write the file with the cases so far, if one was asked for."""
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
