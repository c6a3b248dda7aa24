# SPDX-License-Identifier: Apache-2.0
"""Pickles and unpickles buffers that the host can read, for the extension."""

from __future__ import annotations

import pickle
from typing import Any, cast

import numpy as np

from cumem import _core
from cumem.base.errors import is_of_fork
from cumem.base.kinds import KINDS, is_on_device


def reduce(
    buffer: _core.Buffer,
    protocol: int,
    pooled: bool,
    shared: _core._SharedFacts | None,
) -> tuple[Any, ...]:
    """Return the result of `Buffer.__reduce_ex__`.

    If the memory has a name (`shared` is not None), the pickle has the name and no bytes.

    The elements are in memory order if they are contiguous, and otherwise in C order. From
    protocol 5 on the pickle refers to the memory itself, which may travel out of band.
    Memory that is not from a pool (`pooled` is False) is unpickled with the default flags.
    """
    if is_on_device(buffer.kind):
        raise TypeError(
            "a device buffer cannot be pickled: copy it to host memory first, e.g. to a "
            "buffer of empty_pinned()"
        )
    if shared is not None:
        place = (shared.name, shared.form, shared.nbytes, shared.token, shared.offset)
        view = (buffer.dtype, buffer.shape, buffer.strides, buffer.readonly)
        return reopen, (machine(), *place, *view)
    order = "F" if buffer.flags.fnc else "C"
    data: Any
    if protocol < 5:
        data = buffer._read_by(lambda array: _in_order(array).tobytes())
    else:
        data = pickle.PickleBuffer(cast("Any", _in_order(buffer.numpy())))
    flags = tuple(buffer.flags) if pooled else None
    form = (buffer.kind, buffer.dtype, buffer.shape, order, flags)
    return rebuild, (*form, data, buffer.readonly)


def machine() -> str:
    """Return a text that is different on every machine and after every start of it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def reopen(
    made_on: str,
    name: str,
    form: str,
    nbytes: int,
    token: bytes,
    offset: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    readonly: bool,
) -> _core.Buffer:
    """Unpickle a buffer over memory that has a name, by opening that memory."""
    if made_on != machine():
        raise RuntimeError(
            f"the shared memory {name!r} of this pickle is on another machine, or was "
            "there before this machine was started: a pickle holds no bytes, so send a "
            "copy of the elements, such as buf.to_numpy()"
        )
    return _core._shared_pinned(
        name, form, nbytes, token, -1, dtype, shape, strides, offset, readonly
    )


def _in_order(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bytes in memory order, copied if they are not contiguous."""
    return _flat(array if array.flags.forc else array.copy())


def rebuild(
    kind: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    order: Any,
    flags: tuple[str, ...] | None,
    data: Any,
    readonly: bool,
) -> _core.Buffer:
    """Unpickle a buffer: allocate it and copy `data`, a bytes-like object, into it.

    In a forked child of a process that used the driver, it becomes ordinary memory (the
    kind "pageable"), because nothing can be page-locked there.
    """
    try:
        buffer = _allocate(kind, dtype, shape, order, flags)
    except RuntimeError as error:
        if not is_of_fork(error):
            raise
        # A worker process without a driver gets the bytes in this way. An error here would
        # end the worker, and the program would wait for it for ever.
        buffer = _core.asbuffer(np.empty(shape, dtype, order))
    given = np.frombuffer(data, np.uint8)
    if given.size != buffer.nbytes:
        raise ValueError(f"data has {given.size} bytes, the buffer {buffer.nbytes}")
    buffer._read_by(lambda array: np.copyto(_flat(array), given))
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
