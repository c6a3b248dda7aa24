# SPDX-License-Identifier: Apache-2.0
"""The doctor finds what keeps this machine from full speed, and says what to do.

The module ``facts`` reads and measures, and ``checks`` judges what it found. This allows
tests of the checks with facts of machines that nobody has at hand.

To add a check, first look at CHECKS in ``checks``, which lists those that exist. If neither
``facts`` nor cumem/tools/info.py reads the fact yet, read it in ``facts``, and name it in
the docstring of ``facts.collect``. Judge it in a function of ``checks``, which goes into
CHECKS. The order of that list is the order of the report. Then add the check to the table
of docs/doctor.md, a healthy value of a new fact to HEALTHY in tests/tools/test_doctor.py,
and a machine with the trouble to the cases there. If ``python -m cumem info`` should show
the fact too, read it in cumem/tools/info.py.
"""

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

_WIDTH: Final = 92  #: the most columns of a line; longer lines are harder to read
_MARK: Final = 9  # the width of "problem" and two blanks
_NAME: Final = 14  # the width of "page-locking" and two blanks


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis(Answer):
    """All findings about a machine; what `diagnose` returns.

    Attributes
    ----------
    findings : tuple of Finding
        The findings, sorted by their groups.
    title : str
        The device, the driver and the version of cumem.
    emulated : bool
        Whether the device is emulated, so that no GPU was examined.
    """

    _keys = ("problems", "notes")

    findings: tuple[Finding, ...]
    title: str
    emulated: bool

    @property
    def problems(self) -> int:
        """The number of findings that are problems."""
        return sum(finding.status == "problem" for finding in self.findings)

    @property
    def notes(self) -> int:
        """The number of findings that are notes."""
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
    """Examine this machine and process, and report what slows memory and copies down.

    Parameters
    ----------
    measure : bool, default True
        Whether to make copies for a second, to compare the link of each GPU with its full
        rate.

    Returns
    -------
    Diagnosis
        Findings, each of which is ``"ok"``, a ``"note"`` or a ``"problem"`` and says what
        to do.

    Raises
    ------
    ValueError
        If a variable ``CUMEM_…`` has a value that cannot be read.

    Notes
    -----
    **Blocks** while it measures, for about a second. It uses 128 MiB at a time for this,
    and gives them back. On the emulated device it measures nothing. It imports no
    framework, but reads the versions of frameworks from their files.

    Examples
    --------
    >>> from cumem import doctor
    >>> diagnosis = doctor.diagnose(measure=False)
    >>> {finding.status for finding in diagnosis.findings} <= {"ok", "note", "problem"}
    True
    """
    return judge(_facts.collect(measure=measure))


def judge(facts: dict[str, Any]) -> Diagnosis:
    """Run every check on facts that were collected."""
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
        Whether to print one JSON object, from `Diagnosis.to_dict`, instead of text.

    Returns
    -------
    int
        0 without problems, 1 with at least one.
    """
    diagnosis = diagnose()
    if as_json:
        print(json.dumps(diagnosis.to_dict(), indent=1, ensure_ascii=False))
    else:
        print(diagnosis)
    return 1 if diagnosis.problems else 0
