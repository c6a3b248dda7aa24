# SPDX-License-Identifier: Apache-2.0
"""Finds the tool that shows an object, as HTML or as a plot.

The module of a type does not import the tools that draw its objects. For instance, the
module of pools knows nothing of HTML or matplotlib. So a tool registers its functions here,
with `shows`, for the types that they draw. The methods of an object that show it, such as
``_repr_html_`` or ``plot``, call `show`. Most programs never show anything, so the tools
are imported at the first call, by the function that ``cumem/__init__.py`` has passed to
`load_with`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

Way = Literal["html", "plot"]
_F = TypeVar("_F", bound=Callable[..., Any])

_functions: dict[tuple[Way, type], Callable[..., Any]] = {}
_load: Callable[[Way], object] | None = None


def load_with(load: Callable[[Way], object]) -> None:
    """Register the function that imports the tools when an object is first shown."""
    global _load
    _load = load


def shows(way: Way, *kinds: type) -> Callable[[_F], _F]:
    """Register the decorated function for objects of `kinds`.

    It is called with the object and with the other arguments of `show`. A function for a
    type is also used for derived types without a function of their own.
    """

    def register(function: _F) -> _F:
        _functions.update({(way, kind): function for kind in kinds})
        return function

    return register


def show(way: Way, thing: object, *more: object) -> Any:
    """Let the tool that is registered for the type of `thing` show it.

    Returns
    -------
    Any
        The answer of the tool's function, or None if no tool shows such things, which tells
        notebooks to show the repr.
    """
    if _load is not None:
        _load(way)
    for kind in type(thing).__mro__:
        function = _functions.get((way, kind))
        if function is not None:
            return function(thing, *more)
    return None
