# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a file, or with an end of its transfer, for the extension."""

from __future__ import annotations

import operator
import os
from typing import Any

__all__ = ["raise_failure", "refuse_end"]


def refuse_end(
    why: str, argument: str | None, index: int, given: object, writes: bool, axis: int
) -> None:
    """Raise what is wrong with an end, which the error names.

    Parameters
    ----------
    why : str
        ``"memory"``, ``"readonly"``, ``"repeated"`` or ``"offset"``.
    argument : str or None
        What the one end is called; None: it is ``ranges[index]``.
    given : object
        The end, or its offset.
    writes : bool
        To the file: the end is a source.
    axis : int
        Along which elements share memory.
    """
    name = argument or f"ranges[{index}]"
    role = "source" if writes else "target"
    kind = type(given).__name__
    if why == "memory":
        raise TypeError(
            f"{name}: the {role} must be a Buffer, an array or an object with DLPack, "
            f"__cuda_array_interface__ or the buffer protocol, not {kind}"
        )
    if why == "readonly":
        raise ValueError(f"{name}: the target ({type(given)!r}) is read-only")
    if why == "repeated":
        raise ValueError(
            f"{name}: elements share memory: stride 0 along axis {axis}; read into memory "
            "that holds each element once"
        )
    offset = "offset" if argument else f"{name}: offset"
    try:
        number = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{offset} must be an int, not {kind}") from None
    if number < 0:
        raise ValueError(f"{offset} must not be negative, not {number}")
    raise ValueError(f"{offset}: {number} does not fit in 63 bits")


def raise_failure(
    number: int, filename: object, offset: int, begin: int, nbytes: int, writes: bool
) -> None:
    """Raise what the system said (`number`, an errno), or that the file ends (0).

    The range is `nbytes` from `begin` on; it got as far as `offset`. The exception has
    both as attributes, `filename` and `offset`.
    """
    error: Any
    if number == 0:
        there = max(offset - begin, 0)
        error = EOFError(
            f"{filename!r} ends early: {there} of the {nbytes} bytes at offset {begin} "
            "are there"
        )
        error.filename = filename
    else:
        error = OSError(number, os.strerror(number), filename)
        error.add_note(f"while {'writing' if writes else 'reading'} at offset {offset}")
    error.offset = offset
    raise error
