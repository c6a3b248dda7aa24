# SPDX-License-Identifier: Apache-2.0
"""Views of buffers whose lengths and steps take thought: reshape, transpose, view.

Each answers the shape of the view and its strides in bytes; the extension makes it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from cumem import _core

_Layout = tuple[tuple[int, ...], tuple[int, ...]]


def reshape(buffer: _core.Buffer, lengths: tuple[object, ...], order: str) -> _Layout:
    """Of the same elements with other lengths; see `Buffer.reshape`."""
    shape = _integers(lengths, "shape", "integers or a sequence of integers")
    for length in shape:
        if length < -1:
            raise ValueError(f"shape holds the negative length {length}")
    if shape.count(-1) > 1:
        raise ValueError("only one length of shape can be -1")
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
    return tuple(shape), tuple(strides[::turn])


def transpose(buffer: _core.Buffer, axes: tuple[object, ...]) -> _Layout:
    """With the axes in another order; see `Buffer.transpose`."""
    ndim = buffer.ndim
    order = [axis + ndim if axis < 0 else axis for axis in _integers(axes, "axes")]
    if sorted(order) != [*range(ndim)]:
        raise ValueError(f"axes must be a permutation of the {ndim} axes")
    shape, strides = buffer.shape, buffer.strides
    return tuple(shape[axis] for axis in order), tuple(strides[axis] for axis in order)


def recast(buffer: _core.Buffer, itemsize: int) -> _Layout:
    """Of the same bytes as elements of another size; see `Buffer.view`."""
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
    return tuple(shape), tuple(strides)


def convert(array: Any, dtype: object, copy: bool | None) -> object:
    """What ``__array__`` answers: the array, as another dtype or a copy if need be."""
    if dtype is not None and array.dtype != dtype:
        if copy is False:
            raise ValueError("another dtype needs a copy")
        return array.astype(dtype)
    return array.copy() if copy else array


# -- strides ---------------------------------------------------------------------------


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
        raise TypeError(_refusal(name, expected, numbers)) from None
    return [_integer(number, name) for number in numbers]


def _integer(value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:  # an array of two elements, for one, has an index and no value
        raise TypeError(_refusal(name, "an int", value)) from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: {number} does not fit in 63 bits")
    return number


def _refusal(name: str, expected: str, value: object) -> str:
    return f"{name} must be {expected}, not {type(value).__name__}"


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
