# SPDX-License-Identifier: Apache-2.0
"""The rules by which a copy converts one dtype to another.

The extension decides whether a rule allows a conversion (`check`). The functions here that
are called `refuse_...` raise its errors, whose texts change more often than the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn, get_args

import numpy as np

from cumem import _core
from cumem.base.errors import warn_caller

Casting = Literal["no", "equiv", "safe", "same_kind", "unsafe"]
_RULES: tuple[Casting, ...] = get_args(Casting)
#: The names of the dtypes that the copy threads convert themselves, without NumPy. Those in
#: `REALS` can also be scaled, by ``scale=`` and ``offset=``.
NUMBERS = tuple(row.name for row in _core._DTYPES.values() if row.converts)
REALS = tuple(row.name for row in _core._DTYPES.values() if row.scales)

#: A key of a dtype's metadata. An integer dtype with this key holds numbers for which NumPy
#: has no dtype without another package. For example, without ml_dtypes the bfloat16 of a
#: safetensors file is read as ``uint16`` with the metadata ``{STANDS_FOR: "bfloat16"}``.
STANDS_FOR = "cumem.stands_for"


def _stand_in(dtype: np.dtype[Any]) -> str | None:
    """Return the name of the dtype that integers stand for, or None for plain integers."""
    said = None if dtype.metadata is None else dtype.metadata.get(STANDS_FOR)
    return said if isinstance(said, str) else None


def name_of(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a dtype if the copy threads convert it, else None.

    The name begins with ">" if the elements are not in this machine's byte order.
    """
    name = _stand_in(dtype) or dtype.name
    if name not in NUMBERS:
        return None
    return name if dtype.isnative else f">{name}"


#: Raises TypeError or ValueError unless a rule allows one dtype to become the other.
check: Callable[[str, np.dtype[Any], np.dtype[Any], object], None] = (
    _core._check_casting
)


def hint(source: np.dtype[Any], target: np.dtype[Any]) -> str:
    """Return advice for two dtypes that differ, which an error ends with."""
    rule = "same_kind" if np.can_cast(source, target, "same_kind") else "unsafe"
    return f'convert first, or pass casting="{rule}", which copy() takes'


def refuse_dtypes(
    before: str, source: np.dtype[Any], target: np.dtype[Any]
) -> NoReturn:
    """Raise TypeError because the dtypes differ and the call had no `casting`."""
    raise TypeError(
        f"{before}source has dtype {source}, target has dtype {target}; "
        + hint(source, target)
    )


def refuse_rule(casting: object) -> NoReturn:
    """Raise TypeError or ValueError because `casting` is not the name of a rule."""
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
    """Raise TypeError because the rule `casting` does not allow the conversion.

    `enough` is the name of a rule that would allow it, or empty if no rule does.
    """
    raise TypeError(
        f"{before}casting={casting!r} does not allow dtype {source} to become dtype "
        f"{target}" + (f"; casting={enough!r} does" if enough else "")
    )


def refuse_scale_alone(before: str) -> NoReturn:
    """Raise TypeError because elements can only be scaled in a call that has `casting`."""
    raise TypeError(f'{before}scale= and offset= need casting=, such as "same_kind"')


def refuse_scale(before: str, dtype: np.dtype[Any]) -> NoReturn:
    """Raise TypeError because elements of this dtype cannot be scaled."""
    raise TypeError(
        f"{before}scale= and offset= are for {', '.join(REALS)}, not for dtype {dtype}"
    )


def refuse_conversion(
    before: str, source: np.dtype[Any], target: np.dtype[Any], why: TypeError
) -> NoReturn:
    """Raise TypeError because NumPy cannot convert the dtype, for the reason `why`."""
    raise TypeError(
        f"{before}NumPy converts no dtype {source} to dtype {target}: {why}"
    )


def warn_of_imaginary() -> None:
    """Warn, as NumPy does, that complex numbers lose their imaginary parts."""
    warn_caller(
        "Casting complex values to real discards the imaginary part",
        np.exceptions.ComplexWarning,
    )
