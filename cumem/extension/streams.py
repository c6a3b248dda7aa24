# SPDX-License-Identifier: Apache-2.0
"""How streams are asked for."""

from __future__ import annotations

import operator
from typing import Any

from cumem import _core
from cumem.extension.arguments import hinting, read_flag, wrong_type


@hinting
def Stream(  # noqa: N802  # as errors of the call name it
    _type: type[_core.Stream],
    *,
    device: object = None,
    priority: Any = 0,
    non_blocking: object = True,
) -> _core.Stream:
    """See `Stream`."""
    try:
        number = operator.index(priority)
    except TypeError:
        raise wrong_type("priority", "an int", priority) from None
    blocks = not read_flag(non_blocking, "non_blocking")
    where = _core._device(device, "device")
    if number != 0:
        least, greatest = _core._stream_priorities(where.index)
        if not greatest <= number <= least:
            raise ValueError(
                f"priority must be from {greatest} to {least}, not {number}"
            )
    return _core._make_stream(where, number, blocks)


@hinting
def from_external(
    _type: type[_core.Stream], obj: object, /, *, device: object = None
) -> _core.Stream:
    """See `Stream.from_external`."""
    index = -1 if device is None else _core._device(device, "device").index
    if obj is None:
        raise wrong_type("obj", "a stream of another library or an int", obj)
    stream = obj if type(obj) is _core.Stream else _core._wrap_stream(obj, index, False)
    if index not in (-1, stream.device.index):
        raise ValueError(
            f"the stream belongs to device {stream.device.index}, not {index}"
        )
    return stream
