# SPDX-License-Identifier: Apache-2.0
"""Turns measured results into text, advice, plain data and a plot; it measures nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from cumem.base.units import format_nbytes, format_seconds, format_table
from cumem.tools.bench.cases import (
    ALLOCATE_KINDS,
    BOTH_KINDS,
    COPY_KINDS,
    ROW_KINDS,
    ROW_NBYTES,
    Result,
)
from cumem.tools.plots import PINNED_ROWS, plot_rates

__all__ = ["PLOT_FORMATS", "Report", "save_plot"]

PLOT_FORMATS: Final = (".png", ".svg", ".pdf")

DIRECTIONS: Final = {"h2d": "host → device", "d2h": "device → host"}
_ROWS: Final = {"h2d": "rows → device", "d2h": "rows → host"}
_LABEL = 9  # the width of the first column
_CELL = 18
_SHORT_SIZES = 4  # the number of sizes in the short table
_SHORT: Final = {"write-combined": "w-combined"}
#: Rates count as equal if they differ by less than this factor, or by less than their
#: spreads.
_SAME = 1.05

_Key = tuple[str, str, str, int]


class Report:
    """The text, advice and data about the results of one run.

    Parameters
    ----------
    results : iterable of Result
        The results of `cumem.tools.bench.cases.run`.
    advises : bool, default True
        Whether to give advice. It is False for the emulated device, whose figures say
        nothing about a GPU.
    """

    def __init__(self, results: Iterable[Result], advises: bool = True) -> None:
        self.results: list[Result] = list(results)
        self.advises = advises
        self._by_key: dict[_Key, Result] = {
            (result.group, result.what, result.kind, result.nbytes): result
            for result in self.results
        }

    def find(self, group: str, what: str, kind: str, nbytes: int) -> Result | None:
        """Return one result, or None if it was skipped or is not in the run."""
        result = self._by_key.get((group, what, kind, nbytes))
        return None if result is None or result.skipped is not None else result

    def ceiling(self, what: str) -> float:
        """Return the rate of the CUDA runtime's own copies in one direction, in GB/s.

        If they were not measured, this is the best rate of pinned copies in this run;
        `ceiling_source` says which of the two it is.
        """
        return max((result.gbps for result in self._ceilings(what)), default=0.0)

    def ceiling_source(self, what: str) -> str:
        """Say how the ceiling of one direction was measured."""
        found = self._ceilings(what)
        if found and found[0].group == "ceiling":
            size = format_nbytes(found[0].nbytes)
            return f"plain cudaMemcpyAsync of {size} here"
        return "best pinned rate here"

    def _ceilings(self, what: str) -> list[Result]:
        """Return the results from which the ceiling of a direction is taken."""
        for group in ("ceiling", "copy"):
            found = [
                result
                for result in self.results
                if (result.group, result.what, result.kind) == (group, what, "pinned")
                and result.gbps
            ]
            if found:
                return found
        return []

    def percent(self, result: Result) -> float | None:
        """Return a copy's rate in percent of the ceiling, or None for other groups."""
        if result.group in ("copy", "rows"):
            ceiling = self.ceiling(result.what)
        elif result.group == "both":
            ceiling = self.ceiling("h2d") + self.ceiling("d2h")
        else:
            return None
        return 100 * result.gbps / ceiling if ceiling and result.gbps else None

    @property
    def failures(self) -> list[Result]:
        """The results whose bytes did not arrive as sent."""
        return [
            result
            for result in self.results
            if result.skipped is None and not result.verified
        ]

    @property
    def missing(self) -> list[Result]:
        """The cases that have no figure."""
        return [result for result in self.results if result.skipped is not None]

    @property
    def is_mostly_missing(self) -> bool:
        """Whether fewer than half of all cases have a figure."""
        return 2 * len(self.missing) > len(self.results)

    def sizes(self, group: str) -> list[int]:
        """Return the sizes of a group, ascending."""
        return sorted(
            {result.nbytes for result in self.results if result.group == group}
        )

    # -- advice ------------------------------------------------------------------------

    def advise_copy(self, what: str, nbytes: int) -> str:
        """Say which memory is best for one size and direction, judging by the figures."""
        chosen = self._choose(what, nbytes)
        if chosen is None:
            return "nothing could be measured"
        best, top = chosen
        plain = self.find("copy", what, "pageable", nbytes)
        slow = [
            result.kind
            for result in self._copies(what, nbytes)
            if not self._reads_well(what, result.kind)
        ]
        note = f"; {', '.join(slow)} is too slow to read here" if slow else ""
        if plain is None:
            return f"use {best.kind}{note}"
        if best.kind == "pageable":
            if top.gbps <= best.gbps * _SAME:
                return "use pageable: nothing else is faster by 5 %" + note
            return (
                f"no clear difference: {top.kind} is {_faster(top, best)}; use pageable"
                + note
            )
        times = f"{plain.seconds / best.seconds:.1f} times as fast as pageable"
        return f"use {best.kind}: {times}{self._payback(best, plain)}{note}"

    def _copies(self, what: str, nbytes: int) -> list[Result]:
        """Return the verified copies of one size and direction, without managed memory.

        Managed memory is moved rather than copied, so that the other side no longer has it
        afterwards. So its rate is shown, but does not take part in the choice of a kind for
        copies.
        """
        return [
            result
            for kind in COPY_KINDS
            if (result := self.find("copy", what, kind, nbytes)) is not None
            and result.verified
            and kind != "managed"
        ]

    def _choose(self, what: str, nbytes: int) -> tuple[Result, Result] | None:
        """Return the kind to use for one size and direction, and the fastest one."""
        usable = [
            result
            for result in self._copies(what, nbytes)
            if self._reads_well(what, result.kind)
        ]
        if not usable:
            return None
        top = max(usable, key=lambda result: result.gbps)
        plain = self.find("copy", what, "pageable", nbytes)
        return _simplest(usable, top, plain), top

    def _reads_well(self, what: str, kind: str) -> bool:
        """Return whether the host reads a kind at least half as fast as ordinary memory."""
        if what != "d2h":
            return True
        mine, plain = (self._host("read", name) for name in (kind, "pageable"))
        return (
            mine is None
            or plain is None
            or mine.gbps * 2 >= plain.gbps
            or not _is_clear(plain, mine)
        )

    def _host(self, what: str, kind: str) -> Result | None:
        sizes = self.sizes("host")
        return self.find("host", what, kind, sizes[-1]) if sizes else None

    def _payback(self, best: Result, plain: Result) -> str:
        """Say after how many copies a kind makes up for its slower allocation."""
        nearest = self._nearest_allocation(best.nbytes)
        if nearest is None:
            return ""
        dear = self.find("allocate", "first", best.kind, nearest)
        cheap = self.find("allocate", "first", "pageable", nearest)
        saved = plain.seconds - best.seconds
        if dear is None or cheap is None or saved <= 0:
            return ""
        # The cost grows at most in proportion to the size.
        scale = max(1.0, best.nbytes / nearest)
        copies = (dear.seconds - cheap.seconds) * scale / saved
        if copies <= 1:
            return ", from the first copy on"
        if copies > 10_000:
            return ", but its allocation costs more than 10,000 copies save"
        return f", once the buffer serves {math.ceil(copies):,} copies or more"

    def _nearest_allocation(self, nbytes: int) -> int | None:
        sizes = self.sizes("allocate")
        below = [size for size in sizes if size <= nbytes]
        return below[-1] if below else (sizes[0] if sizes else None)

    def advise_rows(self, what: str, nbytes: int) -> str:
        """Say in which memory to keep a table whose rows are copied by number."""
        found = [
            result
            for kind in ROW_KINDS
            if (result := self.find("rows", what, kind, nbytes)) is not None
            and result.verified
        ]
        if not found:
            return "nothing could be measured"
        plain = self.find("rows", what, "pageable", nbytes)
        top = max(found, key=lambda result: result.gbps)
        best = _simplest(found, top, plain if plain in found else None)
        if best.kind == "pageable":
            return "ordinary memory will do: nothing else is clearly faster"
        if plain is None or plain not in found:
            return f"keep the rows in {best.kind} memory"
        times = f"{plain.seconds / best.seconds:.1f} times as fast as pageable"
        return f"keep the rows in {best.kind} memory: {times}"

    def advise_both(self, kind: str, nbytes: int) -> str:
        """Say how much two simultaneous streams gain over one direction after the other."""
        both = self.find("both", "both", kind, nbytes)
        parts = [self.find("copy", what, kind, nbytes) for what in DIRECTIONS]
        if both is None or any(part is None for part in parts):
            return "nothing to compare with"
        gain = sum(part.seconds for part in parts if part is not None) / both.seconds
        if gain < 1.1:
            return (
                f"no gain ({gain:.2f} times one after the other): one stream is enough"
            )
        noise = both.spread + max(part.spread for part in parts if part is not None)
        if gain - 1 <= noise:
            return (
                f"no clear difference: {100 * (gain - 1):.0f} % faster, spreads are "
                f"{100 * noise:.0f} %; one stream is enough"
            )
        return f"use two streams: {gain:.2f} times one direction after the other"

    def advise_allocate(self, kind: str, nbytes: int) -> str:
        """Say how much is saved by keeping a buffer or taking it from the pool again."""
        first = self.find("allocate", "first", kind, nbytes)
        again = self.find("allocate", "again", kind, nbytes)
        if first is None or again is None:
            return "nothing could be measured"
        gain = first.seconds / again.seconds
        if gain < 2:
            return "allocate when needed: a second time costs about the same"
        if not _is_clear(again, first):
            return f"no clear difference: a second time is {_faster(again, first)}"
        return f"allocate once and reuse: a second time is {gain:,.0f} times cheaper"

    def advise_host(self, kind: str) -> str:
        """Say whether the processor reads and writes a kind at full speed."""
        slow = []
        for what, doing in (("write", "writing"), ("read", "reading")):
            mine, plain = self._host(what, kind), self._host(what, "pageable")
            if mine is None or plain is None:
                return "nothing could be measured"
            if mine.gbps * 2 < plain.gbps and not _is_clear(plain, mine):
                return f"no clear difference: ordinary memory is {_faster(plain, mine)}"
            if mine.gbps * 2 < plain.gbps:
                slow.append(f"{doing} is {plain.gbps / mine.gbps:.0f} times slower")
        if slow:
            return "avoid on the host: " + ", ".join(slow) + " than ordinary memory"
        return "fine for the host to read and write"

    # -- text --------------------------------------------------------------------------

    def render(self, verbose: bool = False) -> str:
        """Return one table and some lines of advice.

        Parameters
        ----------
        verbose : bool, default False
            If True, return all sizes, spreads and percentages of the ceiling instead, in
            a table for each group, with one line of advice per row.

        Returns
        -------
        str
            The lines without a trailing newline.
        """
        if not verbose:
            lines = self._summary_table() + self._summary_advice() + self._notes()
            return "\n".join(lines)
        lines = []
        for what in DIRECTIONS:
            lines += self._copy_table(what)
        for what in DIRECTIONS:
            lines += self._rows_table(what)
        lines += self._both_table() + self._allocate_table() + self._host_table()
        lines += self._notes()
        return "\n".join(lines).rstrip("\n")

    def _copy_table(self, what: str) -> list[str]:
        sizes = self.sizes("copy")
        if not sizes:
            return []
        lines = [
            f"{DIRECTIONS[what]}: GB/s (median), ± spread, % of {self.ceiling(what):.1f} "
            f"GB/s, {self.ceiling_source(what)}",
            _line("size", COPY_KINDS),
        ]
        for nbytes in sizes:
            advice = self.advise_copy(what, nbytes) if self.advises else None
            lines += self._size_lines("copy", what, COPY_KINDS, nbytes, advice)
        return [*lines, ""]

    def _size_lines(
        self,
        name: str,
        what: str,
        kinds: Iterable[str],
        nbytes: int,
        advice: str | None,
    ) -> list[str]:
        """Return the lines of one size: a cell for each kind, and the advice."""
        cells = [self._copy_cell(name, what, kind, nbytes) for kind in kinds]
        line = _line(format_nbytes(nbytes), cells)
        return [line] if advice is None else [line, _advice(advice)]

    # -- the short report: one table of all kinds, and advice ---------------------------

    def _summary_table(self) -> list[str]:
        rows = [_short_row("GB/s (median)", "", ALLOCATE_KINDS)]
        for what, name in DIRECTIONS.items():
            sizes = _some(self.sizes("copy"))
            for i, nbytes in enumerate(sizes):
                cells = [self._rate_cell("copy", what, k, nbytes) for k in COPY_KINDS]
                rows.append(_short_row("" if i else name, nbytes, [*cells, ""]))
        for name, group, what in (
            (_ROWS["h2d"], "rows", "h2d"),
            (_ROWS["d2h"], "rows", "d2h"),
            ("both directions", "both", "both"),
            ("host writes", "host", "write"),
            ("host reads", "host", "read"),
            ("allocate: first", "allocate", "first"),
            ("from the pool", "allocate", "again"),
        ):
            for nbytes in self.sizes(group)[-1:]:
                cell = self._seconds_cell if group == "allocate" else self._rate_cell
                cells = [cell(group, what, kind, nbytes) for kind in ALLOCATE_KINDS]
                rows.append(_short_row(name, nbytes, cells))
        lines = format_table(rows)
        if self.sizes("copy"):
            rates = ", ".join(
                f"{name} {_rate(self.ceiling(what))} GB/s"
                for what, name in DIRECTIONS.items()
            )
            lines.append(f"ceiling ({self.ceiling_source('h2d')}): {rates}")
        if self.sizes("rows"):
            shares = [self._share_of_rows(what) for what in DIRECTIONS]
            lines.append(
                f"rows of {format_nbytes(ROW_NBYTES)} by random numbers, pinned: "
                f"{shares[0]} of the ceiling to the device, {shares[1]} to the host"
            )
        return [*lines, ""]

    def _share_of_rows(self, what: str) -> str:
        result = self.find("rows", what, "pinned", self.sizes("rows")[-1])
        percent = None if result is None else self.percent(result)
        return "no figure" if percent is None else f"{percent:.0f} %"

    def _rate_cell(self, group: str, what: str, kind: str, nbytes: int) -> str:
        result = self.find(group, what, kind, nbytes)
        if result is None:
            return ""
        return _rate(result.gbps) if result.verified else "WRONG"

    def _seconds_cell(self, group: str, what: str, kind: str, nbytes: int) -> str:
        result = self.find(group, what, kind, nbytes)
        if result is None:
            return ""
        return format_seconds(result.seconds) if result.verified else "WRONG"

    def _summary_advice(self) -> list[str]:
        if not self.advises:
            return ["figures of emulation advise nothing", ""]
        lines = [
            f"{name}: {text}"
            for what, name in DIRECTIONS.items()
            if (text := self._advise_direction(what))
        ]
        for what in DIRECTIONS:
            for nbytes in self.sizes("rows")[-1:]:
                text = self.advise_rows(what, nbytes)
                if text.startswith("keep"):
                    lines.append(f"{_ROWS[what]}: {text}")
        for name, group, advise, start in (
            ("both directions", "both", self.advise_both, "use two streams"),
            ("allocation", "allocate", self.advise_allocate, "allocate once"),
            ("the host", "host", lambda kind, _: self.advise_host(kind), "avoid"),
        ):
            for nbytes in self.sizes(group)[-1:]:
                advice = {
                    kind: text
                    for kind in ALLOCATE_KINDS
                    if (text := advise(kind, nbytes)).startswith(start)
                }
                lines += self._name_kinds(name, advice)
        return [*lines, ""]

    def _advise_direction(self, what: str) -> str:
        """Say which kind to use for which sizes: "pageable up to 64 KiB, then pinned"."""
        runs: list[tuple[str, list[int]]] = []
        for nbytes in self.sizes("copy"):
            chosen = self._choose(what, nbytes)
            if chosen is None:
                continue
            kind = chosen[0].kind
            if not runs or runs[-1][0] != kind:
                runs.append((kind, []))
            runs[-1][1].append(nbytes)
        parts = []
        for i, (kind, sizes) in enumerate(runs):
            until = "" if i == len(runs) - 1 else f" up to {format_nbytes(sizes[-1])}"
            parts.append(f"{kind}{until}{self._gain(what, kind, sizes)}")
        return ", then ".join(parts)

    def _gain(self, what: str, kind: str, sizes: list[int]) -> str:
        """Say how much a kind gains at most over ordinary memory, and at which size."""
        gains = [
            (plain.seconds / mine.seconds, nbytes)
            for nbytes in sizes
            if (plain := self.find("copy", what, "pageable", nbytes)) is not None
            and (mine := self.find("copy", what, kind, nbytes)) is not None
        ]
        if kind == "pageable" or not gains:
            return ""
        gain, nbytes = max(gains)
        where = f" at {format_nbytes(nbytes)}" if len(sizes) > 1 else ""
        return f" ({gain:.1f} times as fast{where})"

    @staticmethod
    def _name_kinds(name: str, advice: dict[str, str]) -> list[str]:
        """Return one line for all kinds with the same advice, without their figures."""
        if not advice:
            return []
        if name == "the host":
            return [f"{kind}: {text}" for kind, text in advice.items()]
        verb = next(iter(advice.values())).partition(":")[0]
        return [f"{name}: {verb}, for {', '.join(advice)}"]

    def _copy_cell(self, group: str, what: str, kind: str, nbytes: int) -> str:
        result = self.find(group, what, kind, nbytes)
        if result is None:
            return "-"
        if not result.verified:
            return "WRONG DATA"
        percent = self.percent(result)
        share = "" if percent is None else f"{percent:.0f}%"
        return f"{_rate(result.gbps):>5} {_spread(result):<5} {share:>4}"

    def _rows_table(self, what: str) -> list[str]:
        sizes = self.sizes("rows")
        if not sizes:
            return []
        lines = [
            f"{_ROWS[what]}, {format_nbytes(ROW_NBYTES)} each by random numbers: GB/s, "
            f"± spread, % of {self.ceiling(what):.1f} GB/s",
            _line("all rows", ROW_KINDS),
        ]
        for nbytes in sizes:
            advice = self.advise_rows(what, nbytes) if self.advises else None
            lines += self._size_lines("rows", what, ROW_KINDS, nbytes, advice)
        return [*lines, ""]

    def _both_table(self) -> list[str]:
        sizes = self.sizes("both")
        if not sizes:
            return []
        total = self.ceiling("h2d") + self.ceiling("d2h")
        lines = [
            "both directions at once, two streams: GB/s together, ± spread, "
            f"% of both ceilings: {total:.1f} GB/s"
        ]
        for nbytes in sizes:
            for kind in BOTH_KINDS:
                cell = self._copy_cell("both", "both", kind, nbytes)
                advice = self.advise_both(kind, nbytes) if self.advises else ""
                lines.append(_row(nbytes, kind, cell, advice))
        return [*lines, ""]

    def _allocate_table(self) -> list[str]:
        sizes = self.sizes("allocate")
        if not sizes:
            return []
        lines = ["allocation, ready for use: the first time, then again from the pool"]
        for nbytes in sizes:
            for kind in ALLOCATE_KINDS:
                cells = [
                    self._time_cell("allocate", what, kind, nbytes)
                    for what in ("first", "again")
                ]
                cell = f"{cells[0]:>14}  {cells[1]:>14}"
                advice = self.advise_allocate(kind, nbytes) if self.advises else ""
                lines.append(_row(nbytes, kind, cell, advice))
        return [*lines, ""]

    def _host_table(self) -> list[str]:
        sizes = self.sizes("host")
        if not sizes:
            return []
        lines = ["the processor's own access, one thread: GB/s written, GB/s read"]
        for kind in COPY_KINDS:
            cells = [
                self._copy_cell("host", w, kind, sizes[-1]) for w in ("write", "read")
            ]
            cell = f"{cells[0]:<12}  {cells[1]:<12}"
            advice = self.advise_host(kind) if self.advises else ""
            lines.append(_row(sizes[-1], kind, cell, advice))
        return [*lines, ""]

    def _time_cell(self, group: str, what: str, kind: str, nbytes: int) -> str:
        result = self.find(group, what, kind, nbytes)
        if result is None:
            return "-"
        if not result.verified:
            return "WRONG DATA"
        return f"{format_seconds(result.seconds)} {_spread(result):<5}"

    def _notes(self) -> list[str]:
        """Return the reasons for missing figures, and a line about the checked data."""
        reasons: dict[str, set[str]] = {}
        for result in self.missing:
            # The number of bytes is removed, so that all sizes share one reason.
            reason = re.sub(r"\(\d+ bytes\)", "", result.skipped or "")
            reasons.setdefault(reason, set()).add(result.kind)
        lines = [
            f"no figure for {', '.join(sorted(kinds))}: {reason}"
            for reason, kinds in reasons.items()
        ]
        if self.missing:
            total = len(self.results)
            lines.append(f"{len(self.missing)} of {total} figures are missing")
        if any(
            (result.group, result.kind, result.skipped) == ("copy", "managed", None)
            for result in self.results
        ):
            lines.append("managed memory is not copied but moved, by prefetch_pages()")
        measured = len(self.results) - len(self.missing)
        if self.failures:
            lines.append(
                f"WRONG DATA in {len(self.failures)} of {measured} cases: do not trust "
                "this machine's copies"
            )
        else:
            lines.append(f"data verified in all {measured} cases")
        return lines

    # -- data --------------------------------------------------------------------------

    def curves(self, what: str) -> dict[str, list[tuple[int, float]]]:
        """Return the points of the plot of one direction, for each curve.

        Returns
        -------
        dict
            For each kind of memory, and for rows of pinned memory by random numbers, pairs
            of the bytes of a copy and of its rate in GB/s.
        """

        def points(group: str, kind: str) -> list[tuple[int, float]]:
            sizes = self.sizes(group)
            found = (self.find(group, what, kind, nbytes) for nbytes in sizes)
            return [(each.nbytes, each.gbps) for each in found if each is not None]

        curves = {kind: points("copy", kind) for kind in COPY_KINDS}
        if self.sizes("rows"):
            curves[PINNED_ROWS] = points("rows", "pinned")
        return curves

    def as_data(self) -> dict[str, Any]:
        """Return results, ceilings and advice as plain data for JSON.

        Returns
        -------
        dict
            ``ceiling_gbps`` and ``ceiling_source`` by direction, and ``results`` with an
            object for each case: its seconds, rate, percentage of the ceiling, and the
            advice of its row, which is None if the report gives no advice.
        """
        return {
            "ceiling_gbps": {what: self.ceiling(what) for what in DIRECTIONS},
            "ceiling_source": {what: self.ceiling_source(what) for what in DIRECTIONS},
            "results": [self._result_data(result) for result in self.results],
        }

    def _result_data(self, result: Result) -> dict[str, Any]:
        return asdict(result) | {
            "gbps": result.gbps,
            "spread": result.spread,
            "percent_of_ceiling": self.percent(result),
            "advice": self._advice_for(result),
        }

    def _advice_for(self, result: Result) -> str | None:
        if not self.advises:
            return None
        match result.group:
            case "ceiling":
                return "the rates of copies are compared with this"
            case "copy":
                return self.advise_copy(result.what, result.nbytes)
            case "rows":
                return self.advise_rows(result.what, result.nbytes)
            case "both":
                return self.advise_both(result.kind, result.nbytes)
            case "allocate":
                return self.advise_allocate(result.kind, result.nbytes)
            case "host":
                return self.advise_host(result.kind)


def save_plot(report: Report, path: str, title: str, warning: str | None) -> None:
    """Draw the rates over the sizes, one panel per direction.

    Parameters
    ----------
    report : Report
        The results.
    path : str
        The file of the plot; its suffix is one of `PLOT_FORMATS`.
    title : str
        The name of the machine that was measured.
    warning : str or None
        A text that is written large across the plot if the figures are not from a GPU.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    panels = {
        name: (report.curves(what), report.ceiling(what))
        for what, name in DIRECTIONS.items()
    }
    plot_rates(panels, title, warning).savefig(path, dpi=120)


def _is_clear(fast: Result, slow: Result) -> bool:
    """Return whether `fast` is faster by 5 % and by more than both spreads together."""
    gain = slow.seconds / fast.seconds
    return gain > _SAME and gain - 1 > fast.spread + slow.spread


def _faster(fast: Result, slow: Result) -> str:
    gain = 100 * (slow.seconds / fast.seconds - 1)
    return f"{gain:.0f} % faster, spreads are {100 * (fast.spread + slow.spread):.0f} %"


def _simplest(usable: list[Result], top: Result, plain: Result | None) -> Result:
    """Return the first result that the fastest one does not clearly beat.

    If the fastest one clearly beats ordinary memory, the result must do so as well.
    """
    equal = [result for result in usable if not _is_clear(top, result)]
    if plain is None or plain in equal:
        return equal[0]
    return next(result for result in equal if result is top or _is_clear(result, plain))


def _line(label: str, cells: Sequence[str]) -> str:
    fields = "".join(f"  {cell:<{_CELL - 2}}" for cell in cells)
    return (f"{label:>{_LABEL}}" + fields).rstrip()


def _advice(text: str) -> str:
    return " " * (_LABEL + 2) + text


def _row(nbytes: int, kind: str, cell: str, advice: str) -> str:
    size = format_nbytes(nbytes)
    return f"{size:>{_LABEL}}  {kind:<15} {cell:<{_CELL}}  {advice}".rstrip()


def _some(sizes: list[int]) -> list[int]:
    """Return at most four of the sizes: the first, the last, and two evenly between."""
    count = min(len(sizes), _SHORT_SIZES)
    return [sizes[i * (len(sizes) - 1) // max(1, count - 1)] for i in range(count)]


def _short_row(name: str, nbytes: int | str, cells: Sequence[str]) -> list[str]:
    """Return the cells of a row, with name and size in the first.

    A table that is too wide is cut into parts, each of which repeats the first cell.
    """
    size = nbytes if isinstance(nbytes, str) else format_nbytes(nbytes)
    return [f"{name:<15}{size:>8}", *(_SHORT.get(cell, cell) for cell in cells)]


def _rate(gbps: float) -> str:
    return f"{gbps:.1f}" if gbps >= 10 else f"{gbps:.2f}"


def _spread(result: Result) -> str:
    return f"±{100 * result.spread:.0f}%"
