# SPDX-License-Identifier: Apache-2.0
"""The doctor: what stands between this machine and full speed, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import Any, Final

from cumem.base.answer import Answer
from cumem.base.units import fit, terminal_width
from cumem.base.version import __version__
from cumem.tools.doctor import facts as _facts
from cumem.tools.doctor.checks import CHECKS, Finding

__all__ = ["Diagnosis", "Finding", "diagnose", "main"]

_WIDTH: Final = 92  #: at most: longer lines are harder to read
_MARK: Final = 9  # columns of "problem", and two
_NAME: Final = 14  # of "page-locking", and two


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis(Answer):
    """All findings; what `diagnose` returns.

    Attributes
    ----------
    findings : tuple of Finding
        In the order of their groups.
    title : str
        The device, the driver and the version of cumem.
    emulated : bool
        Whether no GPU was looked at.
    """

    _keys = ("problems", "notes")

    findings: tuple[Finding, ...]
    title: str
    emulated: bool

    @property
    def problems(self) -> int:
        """How many findings are problems."""
        return sum(finding.status == "problem" for finding in self.findings)

    @property
    def notes(self) -> int:
        """How many findings are notes."""
        return sum(finding.status == "note" for finding in self.findings)

    def __repr__(self) -> str:
        lines = [self.title]
        group = None
        for finding in self.findings:
            if finding.group != group:
                group = finding.group
                lines += ["", group]
            lines += _lines(finding)
        return fit("\n".join([*lines, "", self._summary()]))

    def _summary(self) -> str:
        if not self.problems + self.notes:
            return "all well"
        counts = ((self.problems, "problem"), (self.notes, "note"))
        return ", ".join(
            f"{count or 'no'} {name}" + ("" if count == 1 else "s")
            for count, name in counts
        )


def _lines(finding: Finding) -> list[str]:
    width = min(terminal_width(), _WIDTH)
    mark = f"  {finding.status:<{_MARK}}{finding.check:<{_NAME - 1}} "
    lines = textwrap.wrap(
        finding.text,
        width,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_on_hyphens=False,
    )
    if finding.cure is not None:
        lines += textwrap.wrap(
            finding.cure,
            width,
            initial_indent=" " * len(mark) + "→ ",
            subsequent_indent=" " * (len(mark) + 2),
            break_on_hyphens=False,
        )
    return lines


def diagnose(*, measure: bool = True) -> Diagnosis:
    """Look at this machine and process, and say what slows memory and copies down.

    Parameters
    ----------
    measure : bool, default True
        Also copy for a second, to compare the link of each GPU with what it should give.

    Returns
    -------
    Diagnosis
        Findings, each ``"ok"``, ``"note"`` or ``"problem"``, with what to do.

    Raises
    ------
    ValueError
        If a variable ``CUMEM_…`` cannot be read.

    Notes
    -----
    **Blocks** for the second that it measures, with 128 MiB at a time, which it gives
    back. On the emulated device nothing is measured. Imports no framework: their versions
    are read from their files.

    Examples
    --------
    >>> from cumem import doctor
    >>> diagnosis = doctor.diagnose(measure=False)
    >>> {finding.status for finding in diagnosis.findings} <= {"ok", "note", "problem"}
    True
    """
    return judge(_facts.collect(measure=measure))


def judge(facts: dict[str, Any]) -> Diagnosis:
    """Of facts that were collected: every check in turn."""
    found = [finding for check in CHECKS for finding in check(facts)]
    order = list(dict.fromkeys(finding.group for finding in found))
    found.sort(key=lambda finding: order.index(finding.group))
    is_real = facts["backend"]["name"] == "cuda"
    device = facts["devices"][0]["name"] if facts["devices"] else "no device"
    version = facts["versions"]["driver"]
    driver = f"driver CUDA {version}" if is_real else "no GPU"
    return Diagnosis(
        tuple(found), f"{device}, {driver}, cumem {__version__}", not is_real
    )


def main(*, as_json: bool) -> int:
    """Print the diagnosis.

    Parameters
    ----------
    as_json : bool
        One JSON object: what `Diagnosis.to_dict` gives.

    Returns
    -------
    int
        0 without problems, 1 with.
    """
    diagnosis = diagnose()
    if as_json:
        print(json.dumps(diagnosis.to_dict(), indent=1, ensure_ascii=False))
    else:
        print(diagnosis)
    return 1 if diagnosis.problems else 0
