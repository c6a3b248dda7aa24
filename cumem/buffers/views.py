# SPDX-License-Identifier: Apache-2.0
"""Makes the errors of views about bad indices and axes, and about forbidden reads."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import numpy as np

from cumem import _core
from cumem.base.kinds import is_on_device
from cumem.buffers.hints import compute_hint, host_array

MAX_NDIM = 64


def refuse_axis(function: str, axis: int, ndim: int) -> NoReturn:
    """Raise NumPy's AxisError because the buffer does not have this axis."""
    raise np.exceptions.AxisError(axis, ndim, function)


def refuse_index(buffer: _core.Buffer, index: Any) -> NoReturn:
    """Raise the IndexError that says why the buffer does not take this index."""
    items = index if isinstance(index, tuple) else (index,)
    if sum(item is Ellipsis for item in items) > 1:
        raise IndexError("an index holds at most one Ellipsis")
    used = [item for item in items if item is not None and item is not Ellipsis]
    for item in used:
        if not isinstance(item, slice) and not _is_integer(item):
            raise IndexError(
                "buffers take basic indexing only (integers, slices, Ellipsis, None), "
                f"not {type(item).__name__}; index {host_array(buffer)} instead"
            )
    ndim = buffer.ndim
    if len(used) > ndim:
        raise IndexError(
            f"too many indices: the buffer has {ndim} dimension{'s' * (ndim != 1)}"
        )
    axis = 0
    for item in items:
        if item is Ellipsis:
            axis += ndim - len(used)
        elif item is not None:
            length = buffer.shape[axis]
            if not isinstance(item, slice) and not (
                -length <= operator.index(item) < length
            ):
                raise IndexError(
                    f"index {item} is out of bounds for axis {axis} with length {length}"
                )
            axis += 1
    raise IndexError(f"a view has at most {MAX_NDIM} dimensions")


def refuse_array(buffer: _core.Buffer) -> NoReturn:
    """Raise the TypeError of `Buffer.__array__` for device memory."""
    raise TypeError(
        "the host cannot read device memory; copy it first, with buf.to_numpy() or "
        f"cumem.asnumpy(buf); to compute, {compute_hint(buffer)}"
    )


def refuse_host(buffer: _core.Buffer) -> NoReturn:
    """Raise the TypeError of `Buffer.numpy` for device memory."""
    raise TypeError(
        "numpy(): the host cannot read device memory; copy it first, with "
        "buf.to_numpy() or cumem.asnumpy(buf), or use a managed buffer"
    )


def refuse_search(buffer: _core.Buffer) -> NoReturn:
    """Raise TypeError for `value in buffer`, and say what to write instead."""
    hint = "use `value in buf.numpy()`"
    if is_on_device(buffer.kind):
        hint = (
            'copy it to the host first, as in cumem.array(buf, kind="pinned"), and '
            f"{hint} on that"
        )
    raise TypeError(f"a buffer does not search its values; {hint}")


def _is_integer(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) is not None
    except TypeError:  # an array of two elements has __index__, and it raises
        return False
