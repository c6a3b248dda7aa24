# SPDX-License-Identifier: Apache-2.0
"""Buffers that the host can read, as pickles: out, for the extension, and back."""

from __future__ import annotations

import pickle
from typing import Any, cast

import numpy as np

from cumem import _core
from cumem.kinds import KINDS, is_on_device


def reduce(buffer: _core.Buffer, protocol: int, pooled: bool) -> tuple[Any, ...]:
    """What `Buffer.__reduce_ex__` answers.

    The elements are in memory order if they lie side by side, else in C order. From
    protocol 5 on they are the memory itself, which may travel out of band. Memory that
    is not of a pool (`pooled` False) comes back with the flags that are usual.
    """
    if is_on_device(buffer.kind):
        raise TypeError(
            "a device buffer cannot be pickled: copy it to host memory first, e.g. to a "
            "buffer of empty_pinned()"
        )
    array = buffer.numpy()
    order = "F" if array.flags.fnc else "C"
    flat = _flat(array if array.flags.forc else array.copy())
    data = pickle.PickleBuffer(cast("Any", flat)) if protocol >= 5 else flat.tobytes()
    flags = tuple(buffer.flags) if pooled else None
    form = (buffer.kind, buffer.dtype, buffer.shape, order, flags)
    return rebuild, (*form, data, buffer.readonly)


def rebuild(
    kind: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    order: Any,
    flags: tuple[str, ...] | None,
    data: Any,
    readonly: bool,
) -> _core.Buffer:
    """Unpickle a buffer: allocate it and copy `data`, a bytes-like object, into it."""
    buffer = _allocate(kind, dtype, shape, order, flags)
    given = np.frombuffer(data, np.uint8)
    if given.size != buffer.nbytes:
        raise ValueError(f"data has {given.size} bytes, the buffer {buffer.nbytes}")
    _flat(buffer.numpy())[:] = given
    if readonly:
        _core._freeze(buffer)
    return buffer


def _allocate(
    kind: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    order: Any,
    flags: tuple[str, ...] | None,
) -> _core.Buffer:
    if kind == "pageable":
        return _core.asbuffer(np.empty(shape, dtype, order))
    if kind not in KINDS or KINDS[kind].on_device:
        raise ValueError("kind must be of memory that the host can read")
    if KINDS[kind].migrates:
        attach: Any = "host" if flags is not None and "host" in flags else "global"
        return _core.empty_managed(shape, dtype, order=order, attach=attach)
    made: _core.Buffer = getattr(_core, f"empty_{kind}")(
        shape,
        dtype,
        order=order,
        portable=flags is None or "portable" in flags,
        write_combined=flags is not None and "write_combined" in flags,
    )
    return made


def _flat(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return array.reshape(-1, order="A").view(np.uint8)
