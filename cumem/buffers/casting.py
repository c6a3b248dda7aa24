# SPDX-License-Identifier: Apache-2.0
"""Which dtypes become which others in a copy, for the extension and the package."""

from __future__ import annotations

import functools
from typing import Any, Literal, NoReturn, SupportsFloat, get_args

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


#: ``numpy.can_cast`` of plain dtypes without metadata, which equality does not look at.
_can_cast = functools.lru_cache(maxsize=1024)(np.can_cast)


def allows(casting: Casting, source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether the rule lets the one dtype become the other, as NumPy says.

    The only numbers that integers stand for are bfloat16. Of these ml_dtypes says that they
    become what holds all of them, or anything by "unsafe", and that they are made of what
    float16 is made of.
    """
    if (
        source.isbuiltin
        and target.isbuiltin
        and not (source.metadata or target.metadata)
    ):
        return bool(_can_cast(source, target, casting))
    if _stand_in(source) is not None and _stand_in(target) is None:
        source = np.dtype("f4")
        casting = "safe" if casting == "same_kind" else casting
    if _stand_in(target) is not None:
        source = np.dtype("f4") if source == "f2" else source
        target = np.dtype("f2")
    return bool(np.can_cast(source, target, casting))


def hint(source: np.dtype[Any], target: np.dtype[Any]) -> str:
    """What to do about two dtypes that differ."""
    rule = "same_kind" if allows("same_kind", source, target) else "unsafe"
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
    if casting not in _RULES:
        words = ", ".join(map(repr, _RULES))
        error = ValueError if isinstance(casting, str) else TypeError
        raise error(f"casting must be one of {words}, not {casting!r}")
    if not allows(casting, source, target):
        widest = next((rule for rule in _RULES if allows(rule, source, target)), "")
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


@functools.lru_cache(maxsize=256)
def _refusal(source: np.dtype[Any], target: np.dtype[Any]) -> str:
    """Why NumPy has no way from the one dtype to the other; empty: it has one.

    It says so of a first element: whether that one can be converted is another matter.
    """
    try:
        cast(np.zeros(1, target), np.zeros(1, source))
    except TypeError as error:
        return str(error)
    except Exception:  # the value's fault, as of an empty text that is to be a number
        return ""
    return ""


def cast(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Convert elements as NumPy does. The rule was looked at before, and what becomes
    infinite is no reason to warn, which the engine's own numbers do not either."""
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")


def _drops_imaginary(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether only the real parts of complex numbers are converted, as in NumPy.

    ml_dtypes has complex dtypes beside its real ones, and only the name tells which.
    """
    is_foreign = target.type.__module__ == "ml_dtypes"
    is_real = target.kind in "iuf" or (is_foreign and "complex" not in target.name)
    return is_real and (source.kind == "c" or "complex" in source.name)


def warn_of_imaginary() -> None:
    """Warn as NumPy does where only the real parts of complex numbers are converted."""
    warn_caller(
        "Casting complex values to real discards the imaginary part",
        np.exceptions.ComplexWarning,
    )


def plan(
    before: str,
    source: np.dtype[Any],
    target: np.dtype[Any],
    casting: object,
    scale: object,
    offset: object,
) -> tuple[str, str, float, float] | tuple[Any, np.dtype[Any], np.dtype[Any]] | None:
    """What becomes of the elements of a copy; None: they stay as they are.

    The names of two numbers that the copy threads convert, and what they are multiplied
    by and moved by; or a function by which NumPy converts them, and its two dtypes.
    """
    scales = scale is not None or offset is not None
    if casting is None:
        raise TypeError(f'{before}scale= and offset= need casting=, as "same_kind"')
    check(before, source, target, casting)
    factor, term = real(scale, "scale", 1.0), real(offset, "offset", 0.0)
    is_same = source == target and _stand_in(source) == _stand_in(target)
    if is_same and not scales:
        return None
    names = name_of(source), name_of(target)
    if scales:
        for dtype, name in zip((source, target), names, strict=True):
            if name is None or name.lstrip(">") not in REALS:
                raise TypeError(
                    f"{before}scale= and offset= are for {', '.join(REALS)}, not for "
                    f"dtype {dtype}"
                )
    part = source
    if _drops_imaginary(source, target):
        warn_of_imaginary()
        if source.kind == "c":  # by the real parts alone NumPy does not warn again
            part = np.dtype(f"f{source.itemsize // 2}").newbyteorder(source.byteorder)
    if names[0] is not None and names[1] is not None:
        return names[0], names[1], factor, term
    refusal = _refusal(part, target)
    if refusal:
        raise TypeError(
            f"{before}NumPy converts no dtype {source} to dtype {target}: {refusal}"
        )
    return cast, part, target
