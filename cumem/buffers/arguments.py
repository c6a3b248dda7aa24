# SPDX-License-Identifier: Apache-2.0
"""Reads arguments that the extension does not recognise, and refuses wrong ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import numpy as np

from cumem import _core
from cumem.base import errors
from cumem.base.kinds import kind_named
from cumem.buffers import hints

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

P = ParamSpec("P")
R = TypeVar("R")
#: The names of the first parameter of methods, which callers do not pass themselves.
_OWNERS = ("self", "cls", "buffer", "event")


def refuse_call(
    function: str,
    given: int,
    keywords: tuple[str, ...] | None,
    names: list[str],
    positional: int,
) -> NoReturn:
    """Raise a TypeError, because the function does not take these arguments."""
    raise wrong_call(function, given, keywords or (), names, positional)


def wrong_call(
    function: str,
    given: int,
    keywords: Iterable[str],
    names: list[str],
    positional: int,
) -> TypeError:
    """Make the TypeError that says why a function does not take the arguments of a call."""
    if given > positional:
        most = "no" if positional == 0 else f"at most {positional}"
        hint = hints.POSITIONAL.get(function)
        return TypeError(
            f"{function}() takes {most} positional "
            f"argument{'s' * (positional != 1)} ({given} given)"
            + (f": {hint}" if hint else "")
        )
    found = names[:given]
    for keyword in keywords:
        if keyword not in names:
            return unexpected(function, keyword, names)
        if keyword in found:
            return TypeError(
                f"{function}() got multiple values for argument '{keyword}'"
            )
        found.append(keyword)
    missing = next(name for name in names if name not in found)
    return TypeError(
        f"{function}() missing required argument '{missing}' "
        f"(position {names.index(missing) + 1})"
    )


def unexpected(function: str, keyword: str, names: Iterable[str] = ()) -> TypeError:
    """Make the TypeError for a keyword that a function does not have.

    Its text suggests what to type. If the keyword belongs to another library, that is what
    cumem has in its place, and otherwise the most similar of `names`.
    """
    text = f"{function}() got an unexpected keyword argument '{keyword}'"
    hint = hints.argument_hint(function, keyword) or hints.nearest(keyword, names)
    return TypeError(text if hint is None else f"{text}: {hint}")


def hinting(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that wrong calls raise the errors that the extension raises.

    These errors say what to type in place of an argument that the function does not have.
    If the function is a constructor, they name its class.
    """

    @functools.wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        try:
            return function(*args, **named)
        except TypeError:
            wrong = _wrong_call_of(function, args, named)
            if wrong is None:
                raise
            raise wrong from None

    return call


def _wrong_call_of(
    function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> TypeError | None:
    import inspect

    signature = inspect.signature(function)
    try:
        signature.bind(*args, **named)
    except TypeError:
        parameters = list(signature.parameters.values())
        given, name = len(args), function.__name__
        first = parameters[0].name if parameters else ""
        if first in _OWNERS or first.startswith("_"):
            del parameters[0]
            given -= 1
        if name in ("__init__", "__new__", "__call__"):
            name = function.__qualname__.split(".")[-2]
        kinds = [each.kind for each in parameters]
        takes_any_number = inspect.Parameter.VAR_POSITIONAL in kinds
        if takes_any_number and inspect.Parameter.VAR_KEYWORD in kinds:
            return None
        positional = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
        positional += kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if takes_any_number:
            positional = max(positional, given)
        names = [
            each.name
            for each in parameters
            if each.kind is not inspect.Parameter.VAR_POSITIONAL
        ]
        return wrong_call(name, given, named, names, positional)
    return None


def refuse_device_name(name: str, text: str) -> NoReturn:
    """Raise a ValueError for a text that names no device; a kind of memory gets a hint."""
    meant = kind_named(text)
    hint = "" if meant is None else f': that is memory of kind="{meant}"'
    if meant == "device":
        hint = ': write "cuda"'
    raise ValueError(f'{name} must be "cuda" or "cuda:N", not {text!r}{hint}')


def refuse_device(name: str, index: int, count: int) -> NoReturn:
    """Raise a ValueError, because there are only `count` devices."""
    there = "is 1 device" if count == 1 else f"are {count} devices"
    what = name if name == "device" else f"{name}: device"
    raise ValueError(f"{what} {index} does not exist: there {there}")


def refuse_location(name: str, text: str) -> NoReturn:
    """Raise a ValueError for a text that names no place for managed memory."""
    raise ValueError(f'{name} must be a device, "cpu" or "numa:N", not {text!r}')


def refuse_node(name: str, oldest: int) -> NoReturn:
    """Raise a CudaError, because the driver is too old to take a NUMA node as a place."""
    call = "cudaMemPrefetchAsync" if name == "to" else "cudaMemAdvise"
    doing = f"{name} is a NUMA node, which takes a newer driver"
    raise errors.make(call, None, 0, -8, oldest, doing)


#: Returns the NumPy dtype that a `DTypeLike` means.
read_dtype: Callable[[DTypeLike], np.dtype[Any]] = _core._read_dtype


def refuse_unknown_dtype(
    given: Any, error: TypeError, is_of_ml_dtypes: bool
) -> NoReturn:
    """Raise a TypeError, because NumPy knows no such dtype.

    For a dtype of another library the text says what to type instead. For anything else
    NumPy's own `error` is raised.
    """
    hint = hints.dtype_hint(given, is_of_ml_dtypes)
    if hint is None:
        raise error
    raise TypeError(f"dtype {given!r} {hint}") from error


def refuse_dtype(dtype: np.dtype[Any]) -> NoReturn:
    """Raise a TypeError, because elements of a buffer cannot have this dtype."""
    if dtype.subdtype is not None:
        why = "a sub-array dtype is not an element type: put its shape into `shape`"
    elif dtype.hasobject:
        why = "objects cannot live in a cumem buffer"
    else:
        why = "its items have no size, e.g. 'S' instead of 'S8'"
    raise TypeError(f"dtype {dtype!r}: {why}")


def refuse_format(dtype: np.dtype[Any]) -> NoReturn:
    """Raise a ValueError, because PEP 3118 has no format for the dtype."""
    raise ValueError(
        f"cannot include dtype {dtype} in a buffer, it has no format: use numpy(), or "
        "view() as integers of its size"
    )


def read_seconds(seconds: Any, name: str) -> float:
    """Return a number of seconds of any type that Python reads as a float."""
    try:
        return math.fsum((seconds,))  # float() would read texts as well
    except TypeError:
        raise wrong_type(name, "a number of seconds or None", seconds) from None


def read_flag(value: Any, name: str) -> bool:
    """Return whether a flag is true, as Python's own functions read flags.

    A text raises a TypeError, because it would be true whatever it says, even "no". So does
    an array of several elements, which is neither true nor false.
    """
    try:
        if not isinstance(value, (str, bytes)):
            return bool(value)
    except (TypeError, ValueError):  # an array of many elements
        pass
    raise wrong_type(name, "true or false", value)


def refuse_choice(value: object, name: str, expected: str) -> NoReturn:
    """Raise an error, because an argument is not one of the expected texts."""
    if isinstance(value, str):
        raise ValueError(f"{name} must be {expected}, not {value!r}")
    raise wrong_type(name, expected, value)


def refuse_type(name: str, value: object, expected: str) -> NoReturn:
    """Raise a TypeError, because an argument does not have the expected type."""
    raise wrong_type(name, expected, value)


def wrong_type(name: str, expected: str, value: object) -> TypeError:
    """Make the TypeError for an argument that does not have the expected type."""
    return TypeError(f"{name} must be {expected}, not {type(value).__name__}")
