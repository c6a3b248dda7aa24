# SPDX-License-Identifier: Apache-2.0
"""The list of operations: how often each is chosen, and which errors it may raise."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import cumem

Raises = tuple[type[BaseException], str]
#: Errors that any call may raise while another thread's limit is in force.
SHORT: Raises = (cumem.OutOfMemoryError, "")
OPERATIONS: list[Operation] = []


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    call: Callable[[Any], None]  # with the worker that makes it
    weight: float
    raises: tuple[Raises, ...]  # what it may raise, and a pattern of the text
    main: bool  # may be interrupted by Ctrl-C


def operation(
    weight: float, *raises: Raises, main: bool = True
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Let threads choose the function with this weight.

    Parameters
    ----------
    weight : float
        How often it is chosen, relative to the weights of the others.
    *raises : tuple
        Exceptions that it may raise, besides those of a lack of memory, each with a pattern
        that its text must match.
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
