# SPDX-License-Identifier: Apache-2.0
"""`shared_pinned` makes page-locked memory that processes share by a name.

The extension has the memory itself (``csrc/base/shared_memory.h`` tells how processes find
it), and ``cumem/interchange/pickling.py`` pickles buffers over it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from cumem import _core
from cumem.base.errors import warn_caller
from cumem.buffers.arguments import hinting, read_dtype, refuse_dtype, wrong_type
from cumem.pools.pool import read_node, why_shared_pages_are_small

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_HUGE_PAGE = 2 << 20
_MOST_NBYTES = (1 << 63) - 1
_NAME_NBYTES = 200
_FORM_NBYTES = 3999


@hinting
def shared_pinned(
    name: str,
    shape: SupportsIndex | Sequence[SupportsIndex],
    dtype: DTypeLike = "float64",
    *,
    numa_node: int | None = None,
) -> _core.PinnedBuffer:
    """Open page-locked memory that all processes of this user share by its name.

    The first process that opens the name makes the memory. Every other one gets the same
    bytes, whether it was forked, spawned or started by hand. The memory is given back when
    the last process has dropped its buffers or has ended, even if it was killed.

    Parameters
    ----------
    name : str
        Any text of 1 to 200 bytes in UTF-8, without ``/`` and without a zero character.
    shape : int or sequence of int
        The lengths in elements, which must be the same in all processes.
    dtype : dtype_like
        Any NumPy dtype without Python objects, which must be the same in all processes.
    numa_node : int, optional
        The NUMA node from whose memory the pages should come. Only the process that makes
        the memory uses this argument; the others only check it.

    Returns
    -------
    PinnedBuffer
        A buffer in C order, of zeros if this process has made the memory.

    Raises
    ------
    ValueError
        If the name is in use with another shape or dtype (the text says both), a length is
        negative, the name is not allowed, or the node does not exist.
    TypeError
        If an argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        If the process may not use that much more memory. This is checked before any memory
        is made.
    BufferError
        If other processes use the name, but none of them can give this process access. They
        may run in another container, or have switched off ``PR_SET_DUMPABLE``.
    OSError
        If the system refuses, for example because another user has created the folder that
        contains the names (``/dev/shm/cumem-UID``).

    Notes
    -----
    **Blocks** while the memory is made, with the GIL released. Processes that open the name
    meanwhile wait for that, and Ctrl-C ends their wait. If the process that makes the
    memory is killed, one of the waiting processes makes it instead.

    When the call returns, the pages exist, but no process has page-locked them yet. Each
    process locks them at its first copy between the buffer and a device, and creates a
    context only on that device. From then on they count as page-locked memory
    (``"registered"`` in `stats`) and against the limits of that process.

    All buffers of one name in a process share one mapping. Copies that use the same buffer
    or its views are ordered among each other. Use locks or messages to order the copies of
    several processes.

    A pickle of the buffer, or of a view, holds no bytes. Unpickling opens the same memory
    if any process still has it, and otherwise raises a RuntimeError.

    Examples
    --------
    >>> weights = cumem.shared_pinned("weights", (1024, 256), "f4")
    >>> weights.numpy()[:] = 1
    >>> again = cumem.shared_pinned("weights", (1024, 256), "f4")
    >>> float(again.numpy()[5, 7])
    1.0
    """
    found = read_dtype(dtype)
    if found.hasobject or found.subdtype is not None or found.itemsize == 0:
        refuse_dtype(found)
    lengths = _read_shape(shape)
    nbytes = math.prod(lengths) * found.itemsize
    if nbytes > _MOST_NBYTES:
        raise ValueError(f"a buffer of {nbytes} bytes is too large")
    form = f"shape {lengths} of {found}"
    if len(form.encode()) > _FORM_NBYTES:
        raise ValueError("the dtype has too many fields to be shared by a name")
    node = read_node("pinned", numa_node)
    strides = _strides(lengths, found.itemsize)
    buffer = _core._shared_pinned(
        _read_name(name), form, nbytes, None, node, found, lengths, strides, 0, False
    )
    if nbytes >= _HUGE_PAGE and (reason := why_shared_pages_are_small()) is not None:
        warn_caller(
            "shared_pinned() uses pages of 4 KiB on this system, which makes copies and "
            f"page-locking slower: {reason}",
            RuntimeWarning,
        )
    return buffer


def _read_name(name: Any) -> str:
    if not isinstance(name, str):
        raise wrong_type("name", "a str", name)
    nbytes = len(name.encode("utf-8", "surrogatepass"))
    if not 0 < nbytes <= _NAME_NBYTES or "/" in name or "\0" in name:
        raise ValueError(
            f"name must have 1 to {_NAME_NBYTES} bytes in UTF-8, without '/' and without "
            f"zeros, not {name!r}"
        )
    return name


def _read_shape(shape: Any) -> tuple[int, ...]:
    lengths: tuple[int, ...]
    try:
        lengths = (operator.index(shape),)
    except TypeError:
        if isinstance(shape, str) or not hasattr(shape, "__iter__"):
            raise wrong_type("shape", "an int or a sequence of ints", shape) from None
        lengths = tuple(operator.index(length) for length in shape)
    if any(length < 0 for length in lengths):
        raise ValueError(f"the lengths in shape must not be negative: {lengths}")
    return lengths


def _strides(lengths: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes for C order, as if axes of length 0 had length 1."""
    strides = []
    for length in reversed(lengths):
        strides.append(itemsize)
        itemsize *= max(length, 1)
    return tuple(reversed(strides))


def refuse_form(name: str, asked: str, found: str) -> NoReturn:
    """Raise a ValueError, because the name is in use with another shape or dtype."""
    raise ValueError(
        f"the name {name!r} is in use for {found}, and cannot be opened for {asked}: take "
        "another name, or open it with the shape and the dtype that it has"
    )


def refuse_gone(name: str) -> NoReturn:
    """Raise a RuntimeError, because no process has the memory of a pickle any more."""
    raise RuntimeError(
        f"the shared memory {name!r} of this pickle is gone, since its last user has "
        "dropped it or ended: a pickle holds no bytes, so whoever sends it must keep the "
        "buffer until the other process has opened it"
    )


def refuse_unreachable(name: str) -> NoReturn:
    """Raise a BufferError, because no process that has the memory gives access to it."""
    raise BufferError(
        f"the name {name!r} is in use, but no process that uses it lets this one have the "
        "memory: they may run in another container, or with PR_SET_DUMPABLE or "
        "capabilities that keep other processes of this user out"
    )
