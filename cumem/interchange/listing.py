# SPDX-License-Identifier: Apache-2.0
"""What ``dir()`` lists of buffers, streams and events.

Whether a buffer can be handed over by one of the array interfaces depends on its memory,
so this lies beside them and not with the other texts about buffers.
"""

from __future__ import annotations

from typing import Any

from cumem import _core
from cumem.buffers.hints import EVENT_MEMBERS, NAMES, STREAM_MEMBERS
from cumem.interchange.array_interface import describe

#: What raises once the object is closed.
_OF_OPEN: dict[type, frozenset[str]] = {
    _core.Buffer: frozenset(
        {"T", "ptr", "device_ptr", "__cuda_array_interface__", "read_mostly"}
        | {"preferred_location", "prefetch_location", "accessed_by"}
    ),
    _core.Stream: frozenset({"done", "handle", "is_capturing", "priority"}),
    _core.Event: frozenset({"done", "handle"}),
}


def list_names(owner: Any) -> list[str]:
    """What ``dir(owner)`` lists of a Buffer, Stream or Event: what can be read now.

    Completion, debuggers and ``inspect.getmembers`` read all that it lists. Nothing is
    read here to find out: a handle that was told once makes its stream one that others
    may use.
    """
    own = next(each for each in _OF_OPEN if isinstance(owner, each))
    hidden = {_core.Buffer: NAMES, _core.Stream: {*STREAM_MEMBERS}}
    names = {*object.__dir__(owner)} - hidden.get(own, {*EVENT_MEMBERS})
    if owner.closed:
        names -= _OF_OPEN[own]
    elif "__cuda_array_interface__" in names and not _has_interface(owner):
        names.discard("__cuda_array_interface__")
    return sorted(names)


def _has_interface(buffer: _core.Buffer) -> bool:
    """Can it be handed over by that protocol? Hands nothing over."""
    if _core._is_emulated():
        return False
    try:
        describe(buffer, 0)
    except (AttributeError, ValueError):
        return False
    return True
