# SPDX-License-Identifier: Apache-2.0
"""Writes texts for the extension.

These are ``repr`` and ``str`` of its objects, the names of flags, and errors that name a
pair of `copy_many` or refuse to free memory.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NoReturn

import numpy as np

from cumem import _core
from cumem.base.errors import CudaError
from cumem.base.kinds import (
    ATTACH_HOST,
    KINDS,
    MAPPED,
    PORTABLE,
    REGISTER_READ_ONLY,
    WRITE_COMBINED,
    is_on_device,
)
from cumem.base.units import fold
from cumem.buffers.flags import Flags

_HOST_FLAGS = {PORTABLE: "portable", MAPPED: "mapped", WRITE_COMBINED: "write_combined"}


def buffer_text(
    buffer: _core.Buffer, with_values: bool, is_emulated: bool, is_lost: bool
) -> str:
    """Return the `repr` of a buffer, open or closed, or with `with_values` its `str`.

    `is_lost` says that this process was forked from one that already used a device, so the
    memory cannot be read any more.
    """
    described = buffer_repr(buffer, is_emulated)
    if not with_values:
        return described
    if buffer.closed:
        lost = ": values cannot be read after the fork" if is_lost else ""
        return f"{described}{lost}"
    return buffer_str(buffer, described)


def buffer_repr(buffer: _core.Buffer, is_emulated: bool) -> str:
    """Return the `repr` of a buffer, without waiting and without asking a device."""
    said = [
        f"shape={buffer.shape}",
        f"dtype={buffer.dtype}",
        f"nbytes={buffer.nbytes}",
    ]
    device = buffer.device
    if buffer.closed:
        said.append("closed")
    else:
        said += [f"device={device.index}"] if device is not None else []
        said += ["readonly"] if buffer.readonly else []
        said += ["emulated"] if device is not None and is_emulated else []
    return fold(f"cumem.{type(buffer).__name__}({', '.join(said)})")


def buffer_str(buffer: _core.Buffer, described: str) -> str:
    """Return the values of an open buffer as NumPy shows them.

    If they cannot be read, return `described`, which is the buffer's `repr`, and the
    reason.
    """
    try:
        if not is_on_device(buffer.kind):
            return buffer._read_by(str)
        device = buffer.device
        if _core.current_stream(0 if device is None else device).is_capturing:
            return f"{described}: values cannot be read during a capture"
        return _shown(buffer)
    except (CudaError, RuntimeError, BufferError, ValueError, OSError) as error:
        return f"{described}: values cannot be read: {error}"


def _shown(buffer: _core.Buffer) -> str:
    """Return the values of device memory as text; copy only those that it shows."""
    options = np.get_printoptions()
    edge, threshold = options["edgeitems"], options["threshold"]
    if buffer.size <= max(threshold, 1) or edge < 1:
        return str(buffer.to_numpy())
    # NumPy shows `edge` elements at both ends of each axis and dots between them. So an
    # array is made that has the buffer's corners and zeros between them, and is just large
    # enough for NumPy to leave the zeros out. Lowering `threshold` in NumPy's print options
    # instead would also shorten arrays inside the elements.
    ends = [
        [slice(None)] if length <= 2 * edge else [slice(None, edge), slice(-edge, None)]
        for length in buffer.shape
    ]
    shape = [length if length <= 2 * edge else 2 * edge + 1 for length in buffer.shape]
    for axis, length in enumerate(buffer.shape):
        others = math.prod(shape) // shape[axis]
        shape[axis] = max(shape[axis], min(length, int(threshold) // others + 1))
    corners: np.ndarray[Any, Any] = np.zeros(shape, buffer.dtype)
    _core.copy_many(
        [(corners[place], buffer[place]) for place in itertools.product(*ends)]
    )
    return str(corners)


def row_plan_repr(plan: _core.RowPlan, row_count: int, is_emulated: bool) -> str:
    """Return the `repr` of a plan."""
    emulated = ", emulated" if is_emulated else ""
    if plan.closed:
        return "<cumem.RowPlan, closed>"
    layers = "1 layer" if plan.layer_count == 1 else f"{plan.layer_count} layers"
    rows = "1 row" if row_count == 1 else f"{row_count} rows"
    return (
        f"<cumem.RowPlan of {layers} with {rows} each, {plan.nbytes} bytes{emulated}>"
    )


def stream_repr(stream: _core.Stream, handle: int, is_emulated: bool) -> str:
    """Return the `repr` of a stream, which is closed if `handle` is 0."""
    if handle == 0:
        return "<cumem.Stream, closed>"
    names = {1: "legacy default", 2: "per-thread default"}
    emulated = ", emulated" if is_emulated else ""
    which = names.get(handle, f"id {stream.id}")
    return f"<cumem.Stream {which}, device {stream.device.index}{emulated}>"


def event_repr(event: _core.Event, is_closed: int, is_emulated: bool) -> str:
    """Return the `repr` of an event, open or closed."""
    if is_closed:
        return "<cumem.Event, closed>"
    timing = "" if event._timing else " without timing"
    emulated = ", emulated" if is_emulated else ""
    return f"<cumem.Event{timing}, device {event.device.index}{emulated}>"


def buffer_flags(
    kind: str,
    flags: int,
    is_registered: bool,
    has_pool: bool,
    c_contiguous: bool,
    f_contiguous: bool,
    owndata: bool,
    writeable: bool,
    aligned: bool,
) -> Flags:
    """Make the `Flags` that `Buffer.flags` returns."""
    return Flags(
        flag_names(kind, flags, is_registered, has_pool),
        c_contiguous=c_contiguous,
        f_contiguous=f_contiguous,
        owndata=owndata,
        writeable=writeable,
        aligned=aligned,
    )


def transfer_repr(
    transfer: _core.Transfer, done: int, good: int, is_emulated: bool
) -> str:
    """Return the `repr` of a transfer that is running, done, failed or cancelled."""
    state = "cancelled" if transfer.cancelled else "done" if good else "failed"
    if not done and not transfer.cancelled:
        state = "running"
    state += ", emulated" if is_emulated else ""
    return f"<cumem.Transfer of {transfer.nbytes} bytes, {transfer.route}, {state}>"


def flag_names(
    kind: str, flags: int, is_registered: bool, has_pool: bool
) -> tuple[str, ...]:
    """Return how the memory was made, as the names that `Buffer.flags` shows."""
    if is_registered:
        is_read_only = flags & REGISTER_READ_ONLY
        return ("registered", "read_only") if is_read_only else ("registered",)
    if not has_pool:
        return ()
    if KINDS[kind].migrates:
        return ("host" if flags == ATTACH_HOST else "global",)
    return tuple(name for bit, name in _HOST_FLAGS.items() if flags & bit)


def name_pair(error: BaseException, index: int) -> BaseException:
    """Name the pair in an error of `copy_many`, and return the error.

    The text of a TypeError or ValueError is cumem's own, so the pair is put in front of
    that text. Other errors get a note.
    """
    if type(error) in (TypeError, ValueError):
        return type(error)(f"copy_many: pair {index}: {error}")
    error.add_note(f"in pair {index} of copy_many")
    return error


def refuse_exported(what: str, count: int) -> NoReturn:
    """Raise a BufferError because `count` exports still use the memory to be freed."""
    exports = "export" if count == 1 else "exports"
    raise BufferError(
        f"cannot {what} with {count} live {exports}: drop the arrays, memoryviews and "
        "tensors over it first, and close each RowPlan of it"
    )


def refuse_shutdown(kind: str, nbytes: int, is_exported: bool) -> NoReturn:
    """Raise a BufferError because `shutdown` would free memory that others may use."""
    why = (
        "is exported; drop the arrays, memoryviews and tensors over it first, and "
        "close each RowPlan of it"
        if is_exported
        else "went through the buffer protocol, so that others may still use its memory "
        "(as torch.frombuffer does); drop it first"
    )
    if is_exported and nbytes == 0:
        why += (
            ". A buffer of 0 bytes may stand for memory that cumem.integrations has lent "
            "to another library: disable() that, and drop the library's arrays"
        )
    raise BufferError(f"shutdown: a {kind} buffer of {nbytes} bytes {why}")
