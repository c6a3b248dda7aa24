# SPDX-License-Identifier: Apache-2.0
"""Makes buffers of other libraries' objects, for the extension.

The extension itself handles arrays, bare capsules, and types with DLPack's C functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cumem import _core
from cumem.interchange import array_interface
from cumem.interchange.foreign_memory import check_sign, refuse_object

_ABSENT: Any = object()
# DLPack's device types; streams order the memory of the last two.
_CPU, _CUDA_HOST, _CUDA, _MANAGED = 1, 3, 2, 13


def import_object(
    obj: Any, given: _core.Stream | None, has_buffer: bool
) -> _core.Buffer:
    """Import an object by DLPack, the CUDA array interface or the buffer protocol.

    They are tried in this order. The buffer is ready on the stream `given`, or otherwise on
    the current stream of its device.
    """
    if not isinstance(obj, type):
        method = getattr(obj, "__dlpack__", _ABSENT)
        ask = _ABSENT
        if method is not _ABSENT:
            ask = getattr(obj, "__dlpack_device__", _ABSENT)
        if ask is not _ABSENT:
            kind, index = _read_device(ask())
            told = (obj, method, kind, index, given, has_buffer)
            buffer = _core._on_dlpack_device(kind, index, _import_tensor, told)
            if buffer is not None:
                return buffer  # type: ignore[no-any-return]
        entries = getattr(obj, "__cuda_array_interface__", _ABSENT)
        if entries is not _ABSENT:
            return _import_entries(obj, entries, given)
    if not has_buffer:
        refuse_object(obj, "exports no memory")
    return _core.asbuffer(read_buffer(obj))  # the array holds a view, and so the export


def _read_device(answer: Any) -> tuple[int, int]:
    if isinstance(answer, tuple) and len(answer) == 2:
        kind, index = answer
        is_good = isinstance(kind, int) and isinstance(index, int)
        if is_good and abs(kind) < 2**31 and abs(index) < 2**31:
            return kind, index
    raise TypeError(f"__dlpack_device__() answered {answer!r}, not (type, id)")


def _import_tensor(
    obj: Any,
    method: Callable[..., object],
    kind: int,
    index: int,
    given: _core.Stream | None,
    has_buffer: bool,
) -> _core.Buffer | None:
    """Import by DLPack, or return None if the buffer protocol should be tried."""
    stream, handle = None, 0  # memory that the CPU reads is ready
    if kind in (_CUDA, _MANAGED):
        stream = given
        # A stream of another device means nothing to the exporter, so its own is used.
        if stream is None or (kind == _CUDA and stream.device.index != index):
            stream = _core.current_stream(index if kind == _CUDA else None)
        handle = stream.handle or 1
    try:
        capsule, knows = ask_capsule(method, handle)
    except BufferError:
        if has_buffer:
            return None
        raise
    if stream is not None and not knows:
        stream.wait(1)  # the oldest exporters made the legacy default stream wait
    buffer, is_legacy, *found = _core._take_tensor(capsule)
    if not _is_as_told((kind, index), *found):
        del buffer  # drops the tensor too
        raise ValueError(
            "DLPack tensor: its device is not the one that __dlpack_device__() named"
        )
    if is_legacy and is_readonly(obj, has_buffer):
        _core._freeze(buffer)  # an old capsule cannot say that it is read-only
    if stream is not None:
        after = stream if given is None else given
        _core._order_import(buffer, after, stream.device.index, handle)
    check_sign(obj)
    return buffer


def _is_as_told(told: tuple[int, int], kind: int, index: int) -> bool:
    """Return whether the tensor's device is the one that ``__dlpack_device__`` named."""
    if told[0] == kind:
        return kind != _CUDA or told[1] == index
    # Pinned memory is often exported as memory of the CPU.
    return (told[0], kind) in ((_CUDA_HOST, _CPU), (_MANAGED, _CUDA))


def _import_entries(
    obj: object, entries: Any, given: _core.Stream | None
) -> _core.Buffer:
    pointer, readonly, shape, strides, dtype, handle = array_interface.read(entries)
    buffer = _core._import_entries(obj, pointer, readonly, shape, strides, dtype)
    device = buffer.device
    if handle != 0 and buffer.size > 0 and device is not None:
        _core._order_import(buffer, given, device.index, handle)
    return buffer


def is_readonly(exporter: Any, has_buffer: bool) -> bool:
    """Return whether an object says that its memory must not be written.

    Its buffer protocol is asked, or without one its CUDA array interface. An object that
    cannot answer has said nothing. Arrays of JAX never change, but on a GPU or in bfloat16
    only their type shows it.
    """
    try:
        if has_buffer:
            with memoryview(exporter) as view:
                return view.readonly
    except Exception:
        pass
    try:
        interface = getattr(exporter, "__cuda_array_interface__", None)
        if interface is not None:
            return bool(interface["data"][1])
    except Exception:
        pass
    module = getattr(type(exporter), "__module__", None)
    return isinstance(module, str) and module.split(".")[0] in ("jax", "jaxlib")


def read_buffer(exporter: Any) -> np.ndarray[Any, Any]:
    """Return an array over the buffer protocol's memory, since NumPy knows every format."""
    view = memoryview(exporter)
    if view.suboffsets:  # PIL, for example, has memory behind pointers
        raise BufferError("a buffer with suboffsets is not one piece of memory")
    array = np.asarray(view)
    if array.dtype.hasobject:
        raise TypeError(f"an object of type {type(view)!r} holds no plain values")
    return array


def ask_capsule(method: Callable[..., object], stream: int) -> tuple[object, bool]:
    """Return the capsule from `__dlpack__`, and whether the exporter knows of streams.

    The capsule is ready on a stream, or on none if that is 0. Older exporters do not accept
    ``max_version``, and the oldest do not accept ``stream`` either.
    """
    named: dict[str, object] = {"max_version": (1, 0)}
    if stream != 0:
        named["stream"] = stream
    while True:
        try:
            return method(**named), "stream" in named
        except TypeError:
            if not named:
                raise
        del named[next(iter(named))]
