# SPDX-License-Identifier: Apache-2.0
"""What ``dir()`` lists of buffers, streams and events.

The extension says whether a buffer can be handed over by the CUDA array interface, which
depends on its memory, its strides and its dtype.
"""

from __future__ import annotations

from typing import Any

from cumem import _core
from cumem.buffers.hints import EVENT_MEMBERS, NAMES, STREAM_MEMBERS

#: What raises once the object is closed.
_OF_OPEN: dict[type, frozenset[str]] = {
    _core.Buffer: frozenset(
        {"T", "ptr", "device_ptr", "__cuda_array_interface__", "read_mostly"}
        | {"preferred_location", "prefetch_location", "accessed_by"}
    ),
    _core.Stream: frozenset({"done", "handle", "is_capturing", "priority"}),
    _core.Event: frozenset({"done", "handle"}),
}


def list_names(owner: Any, has_interface: bool = False) -> list[str]:
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
    elif not has_interface:
        names.discard("__cuda_array_interface__")
    return sorted(names)
