# SPDX-License-Identifier: Apache-2.0
"""The ``with`` blocks of streams and pools, and the end of one where it is not usual.

What is current is a chain in a context variable: None, or a pair of the innermost block
and the chain outside of it. A chain is never changed, since contexts share it: a block
that ends in the middle has the links inside of it made anew.
"""

from __future__ import annotations

import sys
import weakref
from contextvars import ContextVar
from operator import itemgetter
from types import FrameType
from typing import TYPE_CHECKING, Any

_Chain = tuple["Block", "_Chain | None"]
_Variable = ContextVar[_Chain | None]
#: Blocks that are not over, the last one last.
_Entered = dict["weakref.ref[Block]", None]


class Block(list[Any]):
    """What a block made current, and where; the extension reads and sets it by place.

    Blocks end in any order, and one object may be entered by many threads and tasks: so
    each has the frame that entered it and the token of the context it did so in. What it
    has goes when it is over. No code of Python runs when one is deallocated, which is at
    the end of most blocks: a Ctrl-C that came there would be lost.
    """

    __slots__ = ("__weakref__",)
    if TYPE_CHECKING:

        def __eq__(self, other: object, /) -> bool: ...
        def __hash__(self) -> int: ...  # type: ignore[override]
    else:
        __eq__ = object.__eq__
        __hash__ = object.__hash__

    #: None: the block is over, in all contexts.
    target: Any = property(itemgetter(0))
    #: None: there was none, or it was left at home.
    frame: Any = property(itemgetter(1))
    #: None likewise.
    token: Any = property(itemgetter(2))
    #: So that the chain of its token is an old one.
    is_relinked: Any = property(itemgetter(3))

    def end(self, everywhere: _Entered | None) -> None:
        """Here alone, or in every context: then it is none of those any more."""
        self[1:3] = None, None
        if everywhere is not None:
            self[0] = None
            everywhere.pop(weakref.ref(self), None)


def begin(variable: _Variable, entered: _Entered) -> _Chain:
    """The chain with a block of the calling frame, for the extension to make current."""
    block = Block((None, sys._getframe().f_back, None, False))
    entered[weakref.ref(block, entered.pop)] = None
    return block, _skip_over(variable.get(None))


def _skip_over(chain: _Chain | None) -> _Chain | None:
    """From its first block on that is not over."""
    while chain is not None and chain[0].target is None:
        chain = chain[1]
    return chain


def leave(
    variable: _Variable,
    entered: _Entered,
    target: object,
    frame: FrameType | None,
    what: str,
) -> None:
    """End the block of `target` that `frame` entered, or else the innermost one here.

    RuntimeError where there is none, and where the block was entered elsewhere: it is
    over there as well then.
    """
    blocks = [
        block
        for each in reversed(list(entered))
        if (block := each()) is not None
        and block.target is target
        and block.token is not None  # it was not left
    ]
    chain = variable.get(None)
    block, is_here = _find(chain, blocks, target, frame)
    if block is None and frame is not None:  # a function entered it, as stacks do
        block, is_here = _find(chain, blocks, target, None)
    is_home = is_here and _take_out(variable, chain, block)
    if block is not None:  # where it is left at home copied contexts go on with it
        block.end(None if is_home else entered)
    if not is_home:
        raise RuntimeError(
            f"the {what} is not entered here, or its block ended elsewhere"
            if block is None
            else f"the {what} was entered in another thread or context: a with block "
            "must end where it began; it is current in neither of them now"
        )


def _find(
    chain: _Chain | None, blocks: list[Block], target: object, frame: FrameType | None
) -> tuple[Block | None, bool]:
    """The block, and whether it is in the chain; elsewhere without a frame the only one."""
    while chain is not None:
        block, chain = chain
        if block.target is target and frame in (None, block.frame):
            return block, True
    if frame is None:
        return (blocks[0] if len(blocks) == 1 else None), False
    return next((block for block in blocks if block.frame is frame), None), False


def _take_out(variable: _Variable, chain: Any, block: Any) -> bool:
    """Make the chain without the block current: true where it was entered."""
    inside, rest = [], chain
    while rest[0] is not block:
        inside.append(rest[0])
        rest = rest[1]
    rest = _skip_over(rest[1])
    for each in reversed(inside):
        if each.target is not None:
            rest = (each, rest)
            each[3] = True
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
