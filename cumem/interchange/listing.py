# SPDX-License-Identifier: Apache-2.0
"""Lists the names of buffers, streams, events, transfers and pools for ``dir()``.

The extension passes whether a buffer has the CUDA array interface, which depends on its
memory, its strides and its dtype, and whether its memory is there.
"""

from __future__ import annotations

from typing import Any

from cumem import _core
from cumem.buffers.hints import (
    EVENT_MEMBERS,
    MANAGED_MEMBERS,
    NAMES,
    POOL_MEMBERS,
    STREAM_MEMBERS,
    TRANSFER_MEMBERS,
)

#: Members that raise an error once the object is closed. Those of a buffer also raise
#: one while its region sleeps.
_OF_OPEN: dict[type, frozenset[str]] = {
    _core.Buffer: frozenset(
        {
            "T",
            "ptr",
            "_address",
            "device_ptr",
            "__cuda_array_interface__",
            "read_mostly",
        }
        | {"preferred_location", "prefetch_location", "accessed_by"}
    ),
    _core.Stream: frozenset({"done", "handle", "is_capturing", "priority"}),
    _core.Event: frozenset({"done", "handle"}),
    _core._Pool: frozenset({"limit"}),
}


#: Members that exist only to raise errors, which say what to type instead.
_HIDDEN: dict[type, frozenset[str]] = {
    _core.Buffer: NAMES.union(MANAGED_MEMBERS),
    _core.Stream: frozenset(STREAM_MEMBERS),
    _core.Event: frozenset(EVENT_MEMBERS),
    _core.Transfer: frozenset(TRANSFER_MEMBERS),
    _core._Pool: frozenset(POOL_MEMBERS),
}


def list_names(
    owner: Any, has_interface: bool = False, is_there: bool = True
) -> list[str]:
    """Return the names that can be read now, for ``dir(owner)``.

    Completion, debuggers and ``inspect.getmembers`` read every name in the list. This
    function reads none of them: reading a stream's handle, for example, marks the stream as
    one that others may use.
    """
    own = next(each for each in _HIDDEN if isinstance(owner, each))
    names = {*object.__dir__(owner)} - _HIDDEN[own]
    if own not in _OF_OPEN:
        return sorted(names)
    if owner.closed or not is_there:
        names -= _OF_OPEN[own]
    elif not has_interface:
        names.discard("__cuda_array_interface__")
    return sorted(names)
