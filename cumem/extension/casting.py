# SPDX-License-Identifier: Apache-2.0
"""Which dtypes become which others in a copy, for the extension and the package."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, SupportsFloat, get_args

import numpy as np

Casting = Literal["no", "equiv", "safe", "same_kind", "unsafe"]
#: What the copy threads convert.
NUMBERS = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
)


def name_of(dtype: np.dtype[Any]) -> str | None:
    """The name of a number that the copy threads convert; None: it is none."""
    return dtype.name if dtype.isnative and dtype.name in NUMBERS else None


def is_converted(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Do the copy threads convert the one to the other?"""
    return name_of(source) is not None and name_of(target) is not None


def hint(source: np.dtype[Any], target: np.dtype[Any]) -> str:
    """What to do about two dtypes that differ."""
    if name_of(source) is None or name_of(target) is None:
        return "convert first"
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


def check(
    before: str, source: np.dtype[Any], target: np.dtype[Any], casting: Any
) -> None:
    """TypeError or ValueError unless `casting` allows it."""
    rules = get_args(Casting)
    if casting not in rules:
        words = ", ".join(map(repr, rules))
        error = ValueError if isinstance(casting, str) else TypeError
        raise error(f"casting must be one of {words}, not {casting!r}")
    if not np.can_cast(source, target, casting):
        widest = next((rule for rule in rules if np.can_cast(source, target, rule)), "")
        raise TypeError(
            f"{before}casting={casting!r} does not allow dtype {source} to become dtype "
            f"{target}" + (f"; casting={widest!r} does" if widest else "")
        )


def real(value: Any, name: str, default: float) -> float:
    """What `scale` and `offset` are."""
    if value is None:
        return default
    if isinstance(value, (str, bytes)) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} must be a real number, not {type(value).__name__}")
    return float(value)


def plan(
    before: str,
    source: np.dtype[Any],
    target: np.dtype[Any],
    casting: object,
    scale: object,
    offset: object,
    between_devices: int,
) -> tuple[str, str, float, float] | None:
    """What the elements of a copy are, are to be and are multiplied by; None: they stay."""
    scales = scale is not None or offset is not None
    if casting is None:
        raise TypeError(f'{before}scale= and offset= need casting=, as "same_kind"')
    check(before, source, target, casting)
    factor, term = real(scale, "scale", 1.0), real(offset, "offset", 0.0)
    if source == target and not scales:
        return None
    names = name_of(source), name_of(target)
    if names[0] is None or names[1] is None:
        other = source if names[0] is None else target
        raise TypeError(
            f"{before}dtype {other} is not one that a copy converts: those are "
            f"{', '.join(NUMBERS)}, in this machine's byte order; copy() without scale "
            "and offset, array() and astype() leave others to NumPy"
        )
    if between_devices:
        raise TypeError(
            f"{before}nothing converts {names[0]} to {names[1]} between device memory "
            "and device memory: go by way of the host, as buf.astype() does"
        )
    return names[0], names[1], factor, term
