# SPDX-License-Identifier: Apache-2.0
"""Lists the operations, how often each is chosen, and which errors it may raise."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import cumem

#: A type of exception, and a pattern that its text must match.
Raises = tuple[type[BaseException], str]
#: Any call may raise this error, since another thread may have lowered a limit.
SHORT: Raises = (cumem.OutOfMemoryError, "")
OPERATIONS: list[Operation] = []


@dataclasses.dataclass(frozen=True)
class Operation:
    """A function that threads may choose."""

    name: str
    call: Callable[[Any], None]  # its argument is the worker that makes the call
    weight: float
    raises: tuple[Raises, ...]  # the errors that it may raise
    main: bool  # may run in the main thread, which Ctrl-C interrupts


def operation(
    weight: float, *raises: Raises, main: bool = True
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Return a decorator that lets threads choose a function at random.

    Parameters
    ----------
    weight : float
        How often it is chosen, relative to the weights of the others.
    *raises : tuple
        Exceptions that it may raise, besides those of a lack of memory, each with a
        pattern that the text must match.
    main : bool, optional
        Whether the main thread calls it as well, where Ctrl-C may end it anywhere.
    """

    def add(call: Callable[[Any], None]) -> Callable[[Any], None]:
        OPERATIONS.append(
            Operation(call.__name__, call, weight, (SHORT, *raises), main)
        )
        return call

    return add


@functools.cache
def weighted(for_main: bool) -> tuple[list[Operation], list[float]]:
    """Return the operations of the main thread or of the others, and their weights."""
    found = [one for one in OPERATIONS if one.main or not for_main]
    return found, [one.weight for one in found]
