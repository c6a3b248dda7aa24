# SPDX-License-Identifier: Apache-2.0
"""Which dtypes become which others in a copy, for the extension and the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn, get_args

import numpy as np

from cumem import _core
from cumem.base.errors import warn_caller

Casting = Literal["no", "equiv", "safe", "same_kind", "unsafe"]
_RULES: tuple[Casting, ...] = get_args(Casting)
#: Names of what the copy threads convert, and of what they scale as well.
NUMBERS = tuple(row.name for row in _core._DTYPES.values() if row.converts)
REALS = tuple(row.name for row in _core._DTYPES.values() if row.scales)

#: The elements of an array of integers whose dtype says so are numbers for which NumPy
#: has no dtype without another package.
STANDS_FOR = "cumem.stands_for"


def _stand_in(dtype: np.dtype[Any]) -> str | None:
    """What the integers of a dtype stand for; None: for themselves."""
    said = None if dtype.metadata is None else dtype.metadata.get(STANDS_FOR)
    return said if isinstance(said, str) else None


def name_of(dtype: np.dtype[Any]) -> str | None:
    """The name of a number that the copy threads convert, after ">" where it is not in this
    machine's byte order; None: it is none."""
    name = _stand_in(dtype) or dtype.name
    if name not in NUMBERS:
        return None
    return name if dtype.isnative else f">{name}"


#: Raises TypeError or ValueError unless a rule allows one dtype to become the other.
check: Callable[[str, np.dtype[Any], np.dtype[Any], object], None] = (
    _core._check_casting
)


def hint(source: np.dtype[Any], target: np.dtype[Any]) -> str:
    """What to do about two dtypes that differ."""
    rule = "same_kind" if np.can_cast(source, target, "same_kind") else "unsafe"
    return f'convert first, or pass casting="{rule}", as to copy()'


def refuse_dtypes(
    before: str, source: np.dtype[Any], target: np.dtype[Any]
) -> NoReturn:
    """Raise that dtypes differ and nobody said what to make of it."""
    raise TypeError(
        f"{before}source has dtype {source}, target has dtype {target}; "
        + hint(source, target)
    )


def refuse_rule(casting: object) -> NoReturn:
    """TypeError or ValueError: `casting` names no rule."""
    words = ", ".join(map(repr, _RULES))
    error = ValueError if isinstance(casting, str) else TypeError
    raise error(f"casting must be one of {words}, not {casting!r}")


def refuse_casting(
    before: str,
    source: np.dtype[Any],
    target: np.dtype[Any],
    casting: str,
    enough: str,
) -> NoReturn:
    """TypeError: the rule does not allow it. The rule `enough`, if there is one, does."""
    raise TypeError(
        f"{before}casting={casting!r} does not allow dtype {source} to become dtype "
        f"{target}" + (f"; casting={enough!r} does" if enough else "")
    )


def refuse_scale_alone(before: str) -> NoReturn:
    """TypeError: elements are to be scaled, and no rule says that they may change."""
    raise TypeError(f'{before}scale= and offset= need casting=, as "same_kind"')


def refuse_scale(before: str, dtype: np.dtype[Any]) -> NoReturn:
    """TypeError: elements of this dtype are not scaled."""
    raise TypeError(
        f"{before}scale= and offset= are for {', '.join(REALS)}, not for dtype {dtype}"
    )


def refuse_conversion(
    before: str, source: np.dtype[Any], target: np.dtype[Any], why: TypeError
) -> NoReturn:
    """TypeError: NumPy has no way from one dtype to the other, for a reason of its own."""
    raise TypeError(
        f"{before}NumPy converts no dtype {source} to dtype {target}: {why}"
    )


def warn_of_imaginary() -> None:
    """Warn as NumPy does where only the real parts of complex numbers are converted."""
    warn_caller(
        "Casting complex values to real discards the imaginary part",
        np.exceptions.ComplexWarning,
    )
