# SPDX-License-Identifier: Apache-2.0
"""Remembers the real element types of arrays that hold them as integers.

NumPy lacks some types of tensors. Without ``ml_dtypes``, a BF16 tensor is loaded as an
array of ``uint16``. An F4 tensor is always loaded as bytes, each of which packs two
elements. The array itself does not show this. The code that loads such an array makes a
note here, and the code that saves one asks for it, so that
``save_safetensors(path, dict(load_safetensors(other)))`` keeps the types.

A note belongs to one array object and is dropped with it. A view has no note, but `find`
returns that of the array under it.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

__all__ = ["Note", "find", "remember"]


class Note(NamedTuple):
    """The real type of an array's elements.

    Attributes
    ----------
    element : str
        The name of the type in the safetensors format.
    shape : tuple of int
        The shape in elements of this type.
    packed_shape : tuple of int
        The shape of the array.
    """

    element: str
    shape: tuple[int, ...]
    packed_shape: tuple[int, ...]


_notes: dict[int, tuple[weakref.ref[Any], Note]] = {}


def remember(value: Any, element: str, shape: tuple[int, ...]) -> None:
    """Make a note about a new array, unless it does not allow weak references."""
    key = id(value)
    try:
        ref = weakref.ref(value, lambda gone: _notes.pop(key, None) and None)
    except TypeError:
        return
    _notes[key] = ref, Note(element, shape, tuple(value.shape))


def find(value: Any) -> tuple[Note | None, bool]:
    """Return the note of an array or of its base, and whether it is the array's own."""
    seen = value
    for _ in range(64):  # no chain of views is longer than this in practice
        found = _notes.get(id(seen))
        if found is not None and found[0]() is seen:
            return found[1], seen is value
        base = getattr(seen, "base", None)
        seen = getattr(seen, "_base", None) if base is None else base
        if seen is None:
            break
    return None, False
