# SPDX-License-Identifier: Apache-2.0
"""Lists the names of buffers, streams and events for ``dir()``.

The extension says whether a buffer has the CUDA array interface, which depends on its
memory, its strides and its dtype.
"""

from __future__ import annotations

from typing import Any

from cumem import _core
from cumem.buffers.hints import (
    EVENT_MEMBERS,
    MANAGED_MEMBERS,
    NAMES,
    STREAM_MEMBERS,
)

#: Members that raise an error once the object is closed.
_OF_OPEN: dict[type, frozenset[str]] = {
    _core.Buffer: frozenset(
        {"T", "ptr", "device_ptr", "__cuda_array_interface__", "read_mostly"}
        | {"preferred_location", "prefetch_location", "accessed_by"}
    ),
    _core.Stream: frozenset({"done", "handle", "is_capturing", "priority"}),
    _core.Event: frozenset({"done", "handle"}),
}


def list_names(owner: Any, has_interface: bool = False) -> list[str]:
    """Return the names that can be read now, for ``dir(owner)``.

    Completion, debuggers and ``inspect.getmembers`` read every name in the list. This
    function reads none of them: reading a stream's handle, for example, marks the stream as
    one that others may use.
    """
    own = next(each for each in _OF_OPEN if isinstance(owner, each))
    hidden = {
        _core.Buffer: NAMES.union(MANAGED_MEMBERS),
        _core.Stream: {*STREAM_MEMBERS},
    }
    names = {*object.__dir__(owner)} - hidden.get(own, {*EVENT_MEMBERS})
    if owner.closed:
        names -= _OF_OPEN[own]
    elif not has_interface:
        names.discard("__cuda_array_interface__")
    return sorted(names)
