# SPDX-License-Identifier: Apache-2.0
"""What buffers do that takes thought and no hurry: views, numbers, iteration, refusals."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NoReturn, TypeVar

import numpy as np

from cumem import _core
from cumem.extension.arguments import read_dtype, refuse_dtype, wrong_type
from cumem.extension.hints import compute_hint, host_array, refuse_in_place
from cumem.kinds import is_on_device

MAX_NDIM = 64

Array = np.ndarray[Any, Any]
_T = TypeVar("_T")


# -- views -----------------------------------------------------------------------------


def reshape(buffer: _core.Buffer, /, *lengths: Any, **named: Any) -> _core.Buffer:
    """See `Buffer.reshape`."""
    order = _read_order(named)
    if not lengths:
        raise TypeError("reshape() needs a shape")
    shape = _integers(lengths, "shape", "integers or a sequence of integers")
    for length in shape:
        if length < -1:
            raise ValueError(f"shape holds the negative length {length}")
    if shape.count(-1) > 1:
        raise ValueError("only one length of shape can be -1")
    if len(shape) > MAX_NDIM:
        raise ValueError(
            f"shape has {len(shape)} dimensions, at most {MAX_NDIM} are possible"
        )
    size, itemsize = buffer.size, buffer.itemsize
    known = math.prod(length for length in shape if length != -1)
    if -1 in shape and known > 0 and size % known == 0:
        shape[shape.index(-1)] = size // known
    elif -1 in shape or known != size:
        raise ValueError(f"cannot reshape a buffer of {size} elements into that shape")
    turn = -1 if order == "C" else 1  # from here on the fastest axis comes first
    new = shape[::turn]
    old = [*zip(buffer.shape, buffer.strides, strict=True)][::turn]
    strides = _steps(new, itemsize) if size == 0 else _match(old, new, itemsize)
    if strides is None:
        raise ValueError(
            f"the strides of the buffer do not allow that shape in order '{order}' "
            "without a copy; copy() it first"
        )
    return _core._view(buffer, buffer.dtype, tuple(shape), tuple(strides[::turn]))


def transpose(buffer: _core.Buffer, /, *axes: object) -> _core.Buffer:
    """See `Buffer.transpose`."""
    ndim = buffer.ndim
    if not axes or (len(axes) == 1 and axes[0] is None):
        axes = (*range(ndim)[::-1],)
    order = [axis + ndim if axis < 0 else axis for axis in _integers(axes, "axes")]
    if sorted(order) != [*range(ndim)]:
        raise ValueError(f"axes must be a permutation of the {ndim} axes")
    shape, strides = buffer.shape, buffer.strides
    return _core._view(
        buffer,
        buffer.dtype,
        tuple(shape[axis] for axis in order),
        tuple(strides[axis] for axis in order),
    )


def ravel(buffer: _core.Buffer, /, order: Any = "C") -> _core.Buffer:
    """See `Buffer.ravel`."""
    turned = _turned(buffer, order)
    axes = [*zip(turned.shape, turned.strides, strict=True)][::-1]
    is_view = turned.size == 0 or _match(axes, [turned.size], turned.itemsize)
    return (turned if is_view else turned.copy()).reshape(-1)


def flatten(buffer: _core.Buffer, /, order: Any = "C") -> _core.Buffer:
    """See `Buffer.flatten`."""
    return _turned(buffer, order).copy().reshape(-1)


def _turned(buffer: _core.Buffer, order: Any) -> _core.Buffer:
    """A view whose elements, in C order, are those of the buffer in another one."""
    if order is not None and not isinstance(order, str):
        raise wrong_type("order", '"C", "F", "A" or "K"', order)
    if order not in (None, "C", "F", "A", "K"):
        raise ValueError(f'order must be "C", "F", "A" or "K", not {order!r}')
    _ = buffer.ptr  # a closed one says so
    if order == "K":
        steps = [abs(step) for step in buffer.strides]
        axes = sorted(range(buffer.ndim), key=lambda axis: -steps[axis])
        return buffer.transpose(*axes)
    is_turned = order == "F" or (order == "A" and buffer.flags.fnc)
    return buffer.T if is_turned else buffer


def squeeze(buffer: _core.Buffer, /, axis: Any = None) -> _core.Buffer:
    """See `Buffer.squeeze`."""
    ndim, shape = buffer.ndim, buffer.shape
    axes = [place for place, length in enumerate(shape) if length == 1]
    if axis is not None:
        axes = _integers((axis,), "axis")
        for each in axes:
            if not -ndim <= each < ndim:
                raise ValueError(f"axis {each} does not exist: there are {ndim}")
            if shape[each] != 1:
                raise ValueError(
                    f"axis {each} has length {shape[each]}, and only those of length 1 "
                    "can go"
                )
        axes = [each % ndim for each in axes]
        if len(set(axes)) < len(axes):
            raise ValueError("an axis is named twice")
    return buffer[tuple(0 if place in axes else slice(None) for place in range(ndim))]


def as_device(buffer: _core.Buffer) -> _core.Buffer:
    """See `Buffer.as_device`."""
    _ = buffer.ptr  # which says that it is closed
    kind = buffer.kind
    if is_on_device(kind):
        return buffer
    if kind not in ("mapped", "managed"):
        raise TypeError(
            f"as_device() needs mapped or managed memory, and this is {kind}; use "
            "empty_mapped() or empty_managed()"
        )
    return _core._view(buffer, buffer.dtype, buffer.shape, buffer.strides, True)


def view(buffer: _core.Buffer, dtype: Any) -> _core.Buffer:
    """See `Buffer.view`."""
    _ = buffer.ptr  # which says that it is closed
    found = read_dtype(dtype)
    if found.hasobject or found.subdtype is not None or found.itemsize == 0:
        refuse_dtype(found)
    if found.itemsize == buffer.itemsize:
        return _core._view(buffer, found, buffer.shape, buffer.strides)
    return _recast(buffer, found, found.itemsize)


def _recast(buffer: _core.Buffer, dtype: object, itemsize: int) -> _core.Buffer:
    shape, strides, old = [*buffer.shape], [*buffer.strides], buffer.itemsize
    if not shape:
        raise ValueError(
            "the dtype of a buffer without dimensions can only change to one of the same "
            "itemsize"
        )
    if shape[-1] != 1 and buffer.nbytes != 0 and strides[-1] != old:
        raise ValueError(
            "to view as a dtype of another itemsize, the last axis must be contiguous"
        )
    nbytes = shape[-1] * old
    if itemsize < old and old % itemsize != 0:
        raise ValueError(
            f"an itemsize of {itemsize} does not divide the buffer's itemsize of {old}"
        )
    if itemsize > old and nbytes % itemsize != 0:
        raise ValueError(
            f"an itemsize of {itemsize} does not divide the last axis of {nbytes} bytes"
        )
    shape[-1], strides[-1] = nbytes // itemsize, itemsize
    return _core._view(buffer, dtype, tuple(shape), tuple(strides))


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


def iterate(buffer: _core.Buffer, backwards: bool) -> Iterator[_core.Buffer]:
    """Lazily along the first axis; the iterator holds the buffer."""
    if buffer.closed:
        _ = buffer.ptr  # which says so
    if buffer.ndim == 0:
        raise TypeError("iteration over a buffer without dimensions")
    places = range(buffer.shape[0])
    return map(buffer.__getitem__, places[::-1] if backwards else places)


def backwards(buffer: _core.Buffer) -> Iterator[_core.Buffer]:
    """See `Buffer.__reversed__`."""
    return iterate(buffer, True)


def copied(buffer: _core.Buffer, memo: object = None) -> _core.Buffer:
    """See `Buffer.__copy__` and `Buffer.__deepcopy__`."""
    return buffer.copy("K")


def rounded(buffer: _core.Buffer, ndigits: object = None) -> NoReturn:
    """See `Buffer.__round__`."""
    refuse_in_place(buffer, ndigits)


#: As the extension calls them.
__array__: Final = as_array
__complex__: Final = as_complex
__copy__: Final = copied
__deepcopy__: Final = copied
__format__: Final = format_values
__reversed__: Final = backwards
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


# -- arguments -------------------------------------------------------------------------


def _read_order(named: dict[str, Any]) -> str:
    order = named.pop("order", None)
    for name in named:
        raise TypeError(f"reshape() got an unexpected keyword argument '{name}'")
    if order is not None and not isinstance(order, str):
        raise wrong_type("order", '"C" or "F"', order)
    if order not in (None, "C", "F"):
        raise ValueError(f'order must be "C" or "F", not {order!r}')
    return order or "C"


def _is_integer(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) is not None
    except TypeError:  # an array of two elements, for one, has an index and no value
        return False


def _integers(
    values: tuple[object, ...],
    name: str,
    expected: str = "an int or a sequence of ints",
) -> list[int]:
    """From several arguments, or from one that is a sequence."""
    numbers: Any = values
    if len(values) == 1 and not hasattr(values[0], "__index__"):
        numbers = values[0]
    try:
        numbers = tuple(numbers)
    except TypeError:
        raise wrong_type(name, expected, numbers) from None
    return [_integer(number, name) for number in numbers]


def _integer(value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:  # an array of two elements, for one, has an index and no value
        raise wrong_type(name, "an int", value) from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: {number} does not fit in 63 bits")
    return number


# -- strides ---------------------------------------------------------------------------


def _steps(shape: Sequence[int], step: int) -> list[int]:
    """Without gaps from `step` on; in what is empty nobody takes one that does not fit."""
    strides = []
    for length in shape:
        strides.append(step)
        following = step * max(length, 1)
        step = following if -(2**63) <= following < 2**63 else step
    return strides


def _match(
    old: list[tuple[int, int]], new: list[int], itemsize: int
) -> list[int] | None:
    """Strides of `new` lengths over `old` axes; None where that takes a copy.

    Runs of old axes are held against runs of new axes with as many elements: the old run
    must step evenly, and then the new one does. Axes of length 1 have no say.
    """
    left = [axis for axis in old if axis[0] != 1]
    strides: list[int] = []
    step = itemsize
    while len(strides) < len(new):
        at = len(strides)
        if new[at] == 1:
            strides.append(step)
            continue
        run, end = [left.pop(0)], at + 1
        have, want = run[0][0], new[at]
        while have != want:
            if have < want:
                run.append(left.pop(0))
                have *= run[-1][0]
            else:
                want *= new[end]
                end += 1
        if any(
            after != length * before for (length, before), (_, after) in pairwise(run)
        ):
            return None
        strides += _steps(new[at:end], run[0][1])
        step = _steps([new[end - 1], 1], strides[-1])[1]
    return strides
