# SPDX-License-Identifier: Apache-2.0
"""Names the public module of a class or function that is defined in another module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Named = TypeVar("_Named", bound="type | Callable[..., object]")


def found_in(module: str) -> Callable[[_Named], _Named]:
    """Make help(), ``repr`` and pickles name `module`, in which users find the object.

    The code may move to another module later, and old pickles stay readable then.
    """

    def name(named: _Named) -> _Named:
        named.__module__ = module
        return named

    return name
