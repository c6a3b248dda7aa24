# SPDX-License-Identifier: Apache-2.0
"""The end of a ``with`` block of a stream or pool, where that is not the usual one.

What is current is a chain in a context variable: None, or a pair of the innermost block
and the chain outside of it. A chain is never changed, since contexts share it: a block
that ends in the middle has the links inside of it made anew.
"""

from __future__ import annotations

from contextvars import ContextVar
from types import FrameType
from typing import Any

_Chain = tuple[Any, "_Chain | None"]


def leave(
    variable: ContextVar[_Chain | None],
    entered: list[Any],
    target: object,
    frame: FrameType | None,
    what: str,
) -> None:
    """End the block of `target` that `frame` entered, or else the innermost one here.

    `entered` are its blocks that were not left, the last first. RuntimeError where there
    is none, and where the block was entered elsewhere: it is over there as well then.
    """
    chain = variable.get()
    block, is_here = _find(chain, entered, target, frame)
    if block is None and frame is not None:  # a function entered it, as stacks do
        block, is_here = _find(chain, entered, target, None)
    is_home = is_here and _take_out(variable, chain, block)
    if block is not None:  # where it is left at home copied contexts go on with it
        block.end(not is_home)
    if not is_home:
        raise RuntimeError(
            f"the {what} is not entered here, or its block ended elsewhere"
            if block is None
            else f"the {what} was entered in another thread or context: a with block "
            "must end where it began; it is current in neither of them now"
        )


def _find(
    chain: _Chain | None, entered: list[Any], target: object, frame: FrameType | None
) -> tuple[Any, bool]:
    """The block, and whether it is in the chain; elsewhere without a frame the only one."""
    while chain is not None:
        block, chain = chain
        if block.object is target and frame in (None, block.frame):
            return block, True
    if frame is None:
        return (entered[0] if len(entered) == 1 else None), False
    return next((block for block in entered if block.frame is frame), None), False


def _take_out(variable: ContextVar[_Chain | None], chain: Any, block: Any) -> bool:
    """Make the chain without the block current: true where it was entered."""
    inside, rest = [], chain
    while rest[0] is not block:
        inside.append(rest[0])
        rest = rest[1]
    rest = rest[1]
    while rest is not None and rest[0].object is None:  # over
        rest = rest[1]
    for each in reversed(inside):
        if each.object is not None:
            rest = (each, rest)
            each.is_relinked = True
    is_home = False
    if block.token is not None:
        try:
            variable.reset(block.token)
            is_home = True
        except ValueError:  # of another context
            pass
    # The innermost one, with all around it still as it was, is out already.
    if not is_home or chain[0] is not block or block.is_relinked:
        variable.set(rest)
    return is_home
