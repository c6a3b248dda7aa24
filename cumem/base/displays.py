# SPDX-License-Identifier: Apache-2.0
"""Which tool shows an object, as HTML or as a plot.

Objects lie below the tools that draw them: a pool knows its figures, and neither HTML nor
matplotlib. So a tool registers its functions here with the types that they draw, by
`shows`, and the method of an object, such as ``_repr_html_`` or ``plot``, asks `show`. Most
programs never show anything; the tools are loaded by the first question, with what the
face has given to `load_with`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

Way = Literal["html", "plot"]
_F = TypeVar("_F", bound=Callable[..., Any])

_functions: dict[tuple[Way, type], Callable[..., Any]] = {}
_load: Callable[[Way], object] | None = None


def load_with(load: Callable[[Way], object]) -> None:
    """Let `load` import the tools that show objects in a way, when somebody first asks."""
    global _load
    _load = load


def shows(way: Way, *kinds: type) -> Callable[[_F], _F]:
    """Register the decorated function as what shows objects of `kinds`.

    It is called with the object, and with what the caller of `show` passes beside it. A
    function for a type serves types derived from it that have none of their own.
    """

    def register(function: _F) -> _F:
        _functions.update({(way, kind): function for kind in kinds})
        return function

    return register


def show(way: Way, thing: object, *more: object) -> Any:
    """Let the tool that has registered for `thing` show it.

    Returns
    -------
    Any
        What the tool's function returns; None if no tool shows such things, which notebooks
        take for "show the repr".
    """
    if _load is not None:
        _load(way)
    for kind in type(thing).__mro__:
        function = _functions.get((way, kind))
        if function is not None:
            return function(thing, *more)
    return None
