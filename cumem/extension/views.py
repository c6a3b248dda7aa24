# SPDX-License-Identifier: Apache-2.0
"""What buffers do that takes thought and no hurry: values as Python's objects, refusals."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

import numpy as np

from cumem import _core
from cumem.extension.hints import compute_hint, host_array, refuse_in_place
from cumem.kinds import is_on_device

MAX_NDIM = 64

Array = np.ndarray[Any, Any]
_T = TypeVar("_T")


# -- refusals --------------------------------------------------------------------------


def refuse_axis(function: str, axis: int, ndim: int) -> NoReturn:
    """Raise that a buffer has no such axis, as NumPy does."""
    raise np.exceptions.AxisError(axis, ndim, function)


def refuse_index(buffer: _core.Buffer, index: Any) -> NoReturn:
    """Raise why this is not a basic index of the buffer."""
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


# -- as an array, a number, a collection -----------------------------------------------


def as_array(buffer: _core.Buffer, dtype: Any = None, *, copy: object = None) -> object:
    """See `Buffer.__array__`."""
    if is_on_device(buffer.kind) and not buffer.closed:
        raise TypeError(
            "the host cannot read device memory; copy it first, with buf.to_numpy() or "
            f"cumem.asnumpy(buf); to compute, {compute_hint(buffer)}"
        )
    if dtype is not None and not buffer.closed and buffer.dtype != dtype:
        if copy is not None and not copy:
            raise ValueError("another dtype needs a copy")
        return buffer._read_by(lambda array: array.astype(dtype))
    return buffer._read_by(np.copy) if copy else buffer.numpy()


def refuse_host(buffer: _core.Buffer) -> NoReturn:
    """TypeError, of `Buffer.numpy` on a device."""
    raise TypeError(
        "numpy(): the host cannot read device memory; copy it first, with "
        "buf.to_numpy() or cumem.asnumpy(buf), or use a managed buffer"
    )


def on_host(buffer: _core.Buffer, read: Callable[[Array], _T]) -> _T:
    """What `read` answers to the values, of which it keeps nothing: device memory is
    copied, on the current stream."""
    if is_on_device(buffer.kind):
        return read(buffer.to_numpy())
    return buffer._read_by(read)


def as_bytes(buffer: _core.Buffer) -> bytes:
    """See `Buffer.__bytes__`."""
    return on_host(buffer, lambda array: array.tobytes())


def as_number(buffer: _core.Buffer, kind: type) -> object:
    """The only element as a Python number or, as with NumPy's arrays, a bool."""
    if kind is bool and buffer.size != 1:
        raise ValueError(
            f"the truth of a buffer of {buffer.size} elements is ambiguous; use "
            f"`buf is not None`, `buf.size > 0` or {host_array(buffer)}.any()"
        )
    if buffer.size != 1:  # before they are copied
        raise TypeError(
            f"only a buffer of one element is a number, and this has {buffer.size}"
        )
    return on_host(buffer, kind)


def item(buffer: _core.Buffer, /, *index: Any) -> object:
    """See `Buffer.item`."""
    if not is_on_device(buffer.kind):
        return buffer._read_by(lambda array: array.item(*index))
    _ = buffer.ptr  # a closed one says so
    np.broadcast_to(np.zeros((), "u1"), buffer.shape).item(*index)  # NumPy's errors
    if len(index) == 1 and isinstance(index[0], tuple):
        index = index[0]
    place: Any = index or (0,) * buffer.ndim
    if len(index) == 1 and buffer.ndim != 1:
        place = np.unravel_index(operator.index(index[0]) % buffer.size, buffer.shape)
    element = buffer[tuple(int(each) for each in place)]
    return element.to_numpy().item()


def tolist(buffer: _core.Buffer) -> object:
    """See `Buffer.tolist`."""
    return on_host(buffer, lambda array: array.tolist())


def format_values(buffer: _core.Buffer, spec: str, /) -> str:
    """See `Buffer.__format__`."""
    if not spec:
        return str(buffer)
    if buffer.ndim > 0:
        raise TypeError(
            f"{spec!r} formats one element, as of buf[0]; "
            "np.array2string(buf.to_numpy()) formats many"
        )
    return on_host(buffer, lambda array: format(array[()], spec))


def as_complex(buffer: _core.Buffer) -> object:
    """See `Buffer.__complex__`."""
    return as_number(buffer, complex)


def rounded(buffer: _core.Buffer, ndigits: object = None) -> NoReturn:
    """See `Buffer.__round__`."""
    refuse_in_place(buffer, ndigits)


#: As the extension calls them.
__array__: Final = as_array
__complex__: Final = as_complex
__format__: Final = format_values
__round__: Final = rounded


def refuse_search(buffer: _core.Buffer) -> NoReturn:
    """Raise what to do in place of `value in buffer`."""
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
    except TypeError:  # an array of two elements, for one, has an index and no value
        return False
