# SPDX-License-Identifier: Apache-2.0
"""Reads and writes sizes, rates and times as people do. All functions are pure."""

from __future__ import annotations

import operator
import re
import shutil
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

__all__ = [
    "format_nbytes",
    "format_rate",
    "format_seconds",
    "parse_nbytes",
]

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
#: A unit with an i is a power of 1024, and one without it a power of 1000. The B is
#: optional, as in memory limits of Kubernetes and Dask. Case does not matter.
_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtpe", 1):
    _FACTORS |= dict.fromkeys((f"{_letter}i", f"{_letter}ib"), 1024**_power)
    _FACTORS |= dict.fromkeys((_letter, f"{_letter}b"), 1000**_power)
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*|%)\s*", re.ASCII)
_EXPECTED = "a text such as '4096', '512 KiB', '1.5GB' or '50%'"
_EXPECTED_WHOLE = "a text such as '4096', '512 KiB' or '1.5GB'"


def parse_nbytes(size: int | str, total: int | None = None) -> int:
    """Read a number of bytes.

    Parameters
    ----------
    size : int or str
        A number of bytes, or a text with a unit. With an ``i`` (``10Gi``, ``10 GiB``) the
        unit is a power of 1024, and without one (``10G``, ``512m``, ``1.5 GB``) a power of
        1000. Case does not matter. ``"50%"`` is a share of `total`.
    total : int, optional
        The number of bytes that ``"100%"`` means.

    Returns
    -------
    int
        The number of bytes, rounded down.

    Raises
    ------
    TypeError
        If `size` is neither an int nor a str.
    ValueError
        If `size` is negative or cannot be read, if a share is over 100 %, or if a share
        is given without `total`.
    """
    expected = f"an int, or {_EXPECTED_WHOLE if total is None else _EXPECTED}"
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"size must be {expected}, not {type(size).__name__}")
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"size must not be negative, got {size}")
        return size
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"size must be {expected}, got {size!r}")
    number, unit = Fraction(match[1]), match[2]
    if unit == "%":
        if total is None:
            raise ValueError(f"a share such as {size!r} has no meaning here")
        if number > 100:
            raise ValueError(f"a share must be at most 100%, got {size!r}")
        return int(number * total / 100)
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        raise ValueError(
            f"unknown unit {unit!r} in {size!r}; use Ki to Ei or KiB to EiB (powers of "
            "1024), K to E or KB to EB (powers of 1000), B or %"
        )
    return int(number * factor)


def read_integer(value: object, name: str) -> int:
    """Read the argument `name`, an int of any size."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        given = type(value).__name__
        raise TypeError(f"{name} must be an int, not {given}") from None


def read_count(value: object, name: str) -> int:
    """Read the argument `name` as an int; raise a ValueError if it is less than 1."""
    number = read_integer(value, name)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}")
    return number


def read_size(size: Any, name: str, shares: bool, total: int | None) -> int:
    """Read the size `name` for the extension, as a number of at most 63 bits.

    `shares` says whether a share such as "50%" is possible for this argument. `total`
    is the number of bytes that 100% means, or None if there is no such number or it is
    unknown.
    """
    expected = f"a number of bytes, or {_EXPECTED if shares else _EXPECTED_WHOLE}"
    if isinstance(size, str):
        if total is None and "%" in size:
            raise ValueError(
                f"{name}: a share such as {size!r} has no meaning here, or the amount "
                "that it is a share of is not known"
            )
        if _SIZE.fullmatch(size) is not None:
            try:
                nbytes = parse_nbytes(size, total)
            except ValueError as error:  # the unit or the share is wrong
                raise ValueError(f"{name}: {error}") from None
            if nbytes < 2**63:
                return nbytes
        raise ValueError(f"{name} must be {expected}, not {size!r}")
    try:
        if isinstance(size, bool):  # a bool is an int, but is never meant as a size
            raise TypeError
        nbytes = operator.index(size)
    except TypeError:  # arrays have __index__ too, which fails for several elements
        has_size = hasattr(size, "nbytes") and not isinstance(size, type)
        hint = ": pass its .nbytes for its size" if has_size else ""
        given = type(size).__name__
        raise TypeError(f"{name} must be {expected}, not {given}{hint}") from None
    if nbytes < 0:
        raise ValueError(f"{name} must not be negative, got {nbytes}")
    if nbytes >= 2**63:
        raise ValueError(f"{name}: {nbytes} does not fit in 63 bits")
    return nbytes


def format_nbytes(nbytes: int) -> str:
    """Write a number of bytes in powers of 1024: ``"4 KiB"``, ``"1.5 GiB"``.

    Parameters
    ----------
    nbytes : int
        The number of bytes, which may be negative.

    Returns
    -------
    str
        The number with at most one decimal, or none if that would be zero, and a unit.
    """
    value = float(abs(nbytes))
    power = 0
    while power + 1 < len(_BINARY) and round(value, 1) >= 1024:
        value /= 1024
        power += 1
    sign = "-" if nbytes < 0 else ""
    return f"{sign}{value:.1f}".removesuffix(".0") + f" {_BINARY[power]}"


def format_rate(nbytes: float, seconds: float) -> str:
    """Write a rate in powers of 1000, as is usual for links: ``"55.3 GB/s"``.

    Parameters
    ----------
    nbytes : float
        The bytes that were moved.
    seconds : float
        The time that this took; 0 gives ``"-"``.

    Returns
    -------
    str
        Three significant figures and a unit.
    """
    if seconds <= 0:
        return "-"
    rate = nbytes / seconds
    power = 0
    while power + 1 < len(_DECIMAL) and float(f"{rate:.3g}") >= 1000:
        rate /= 1000
        power += 1
    return f"{_significant(rate)} {_DECIMAL[power]}/s"


def format_seconds(seconds: float) -> str:
    """Write a time with a suitable unit: ``"7.6 µs"``, ``"342 ms"``.

    Parameters
    ----------
    seconds : float
        The time in seconds, which may not be negative.

    Returns
    -------
    str
        Three significant figures and a unit from ``ns`` to ``s``.
    """
    for factor, unit in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
        value = seconds * factor
        if float(f"{value:.3g}") < 1000:
            return f"{_significant(value)} {unit}"
    return f"{_significant(seconds)} s"


def _significant(value: float) -> str:
    """Write three significant figures, without an exponent."""
    if value >= 100 or value == 0:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_count(number: int, noun: str, ending: str = "s") -> str:
    """Write ``"1 segment"`` or ``"2 segments"``, where `ending` makes the plural."""
    return f"{number} {noun}{ending * (number != 1)}"


#: Matches the number of a size, a rate or a time together with the space behind it.
_OF_A_SIZE = re.compile(r"(\d) (?=(?:[KMGTPE]i?)?B\b|[nµm]?s\b)")


def terminal_width() -> int:
    """Return the width of the terminal, or that in ``COLUMNS``, or 80 without either."""
    return max(shutil.get_terminal_size().columns, 20)


_REPR_WIDTH = 80


def fold(text: str) -> str:
    """Break a `repr` into lines of at most 80 columns, as NumPy does with its arrays.

    The width does not depend on the terminal, as the output of a program should not. Short
    parts in brackets are not broken.
    """
    if len(text) <= _REPR_WIDTH:
        return text
    start = text.find("(") + 1
    indent = " " * (start if 0 < start <= _REPR_WIDTH // 3 else 4)
    whole = _SHORT_PART.sub(lambda part: part[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        _OF_A_SIZE.sub("\\1\0", whole),
        _REPR_WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")


#: Matches a short tuple, or a short item in a list of fields.
_SHORT_PART = re.compile(r"\([^()]{,48}(?:\([^()]{,16}\)[^()]{,8})?\)")


def fit(text: str) -> str:
    """Break lines that are wider than the terminal.

    The first part of a broken line stays as it was, and the other parts are indented by
    four more columns.
    """
    width = terminal_width()
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        start = len(line) - len(line.lstrip())
        indent = " " * min(start + 4, width // 3)
        whole = _OF_A_SIZE.sub("\\1\0", line)  # a size is not broken from its unit
        broken = textwrap.wrap(
            whole, width, subsequent_indent=indent, break_on_hyphens=False
        )
        lines += [each.replace("\0", " ") for each in broken]
    return "\n".join(lines)


def format_table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Make the lines of a table that is no wider than the terminal.

    Parameters
    ----------
    rows : sequence of sequence of str
        The rows, which all have the same number of cells.
    left : int, default 1
        The number of columns that are left-aligned; the others are right-aligned.

    Returns
    -------
    list of str
        The lines. Columns that do not fit follow in further tables below, each of which
        repeats the first column.
    """
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    width = terminal_width()
    groups: list[list[int]] = [[]]
    used = widths[0]
    for i in range(1, len(widths)):
        if used + 2 + widths[i] > width and groups[-1]:
            groups.append([])
            used = widths[0]
        groups[-1].append(i)
        used += 2 + widths[i]
    lines: list[str] = []
    for group in groups:
        lines += [""] if lines else []
        for row in rows:
            cells = [
                row[i].ljust(widths[i]) if i < left else row[i].rjust(widths[i])
                for i in (0, *group)
            ]
            lines += fit("  ".join(cells).rstrip()).split("\n")
    return lines
