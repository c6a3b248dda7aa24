# SPDX-License-Identifier: Apache-2.0
"""What arrays of integers stand for, where NumPy has no dtype for the elements.

Without ``ml_dtypes`` the elements of a BF16 tensor come as ``uint16``, and those of an F4
tensor always come as the bytes that they are packed in. The array itself cannot say so.
Whoever makes such an array from a file notes it here, and whoever writes it to a file
asks, so that ``save_safetensors(path, dict(load_safetensors(other)))`` keeps the types.

A note belongs to the object and goes with it. Views of the object are found by what they
are views of.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

__all__ = ["Note", "find", "remember"]


class Note(NamedTuple):
    """What the elements of an array are.

    Attributes
    ----------
    element : str
        As the safetensors format calls it.
    shape : tuple of int
        In such elements.
    packed_shape : tuple of int
        Of the array.
    """

    element: str
    shape: tuple[int, ...]
    packed_shape: tuple[int, ...]


_notes: dict[int, tuple[weakref.ref[Any], Note]] = {}


def remember(value: Any, element: str, shape: tuple[int, ...]) -> None:
    """Note what a new array stands for; what cannot be referred to weakly is left out."""
    key = id(value)
    try:
        ref = weakref.ref(value, lambda gone: _notes.pop(key, None) and None)
    except TypeError:
        return
    _notes[key] = ref, Note(element, shape, tuple(value.shape))


def find(value: Any) -> tuple[Note | None, bool]:
    """The note of an array, or of what it is a view of, and whether it is of itself."""
    seen = value
    for _ in range(64):  # views of views of NumPy's are not as deep
        found = _notes.get(id(seen))
        if found is not None and found[0]() is seen:
            return found[1], seen is value
        base = getattr(seen, "base", None)
        seen = getattr(seen, "_base", None) if base is None else base
        if seen is None:
            break
    return None, False
