# SPDX-License-Identifier: Apache-2.0
"""The handle of a stream of another library, read from whatever it has."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from cumem import _core
from cumem.devices import Device
from cumem.extension.arguments import wrong_type

_FOREIGN = (
    "a Stream, an int or an object with __cuda_stream__, .cuda_stream, .ptr or .handle"
)
_EXPECTED = {
    "stream": f"None, {_FOREIGN}",
    "other": f"an Event, a Transfer, {_FOREIGN}",
}
_NAMES = ("cuda_stream", "ptr", "handle")
_ARRAY_MARKS = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")


def read_handle(stream: Any, argument: str) -> tuple[int, bool]:
    """The handle, and whether `stream` is an object to keep alive.

    Errors call the stream `argument`.
    """
    # Before 2.3 NumPy's bool is an index, too.
    if isinstance(stream, (bool, np.bool_, str, float)):
        raise wrong_type(argument, _EXPECTED.get(argument, _FOREIGN), stream)
    if isinstance(stream, int):
        return _from_int(stream, argument), False
    if hasattr(stream, "__cuda_stream__"):
        method = stream.__cuda_stream__
        if not callable(method):
            raise wrong_type("__cuda_stream__", "a method", method)
        return _from_protocol(method()), True
    if not isinstance(stream, Device) and hasattr(stream, "__index__"):
        try:
            number = operator.index(stream)  # NumPy's ints
        except TypeError:
            pass  # an array of two elements, for one
        else:
            return _from_int(number, argument), False
    if hasattr(stream, _NAMES[0]) or _may_be_stream(stream):
        for name in _NAMES:
            if hasattr(stream, name):
                return _from_value(getattr(stream, name), f".{name}"), True
    raise wrong_type(argument, _EXPECTED.get(argument, _FOREIGN), stream)


def _from_protocol(answer: object) -> int:
    if not isinstance(answer, tuple):
        raise wrong_type(
            "the answer of __cuda_stream__()", "a tuple (0, handle)", answer
        )
    if len(answer) != 2:
        raise ValueError(
            f"__cuda_stream__() must answer a tuple (0, handle), not {len(answer)} items"
        )
    version = _from_value(answer[0], "the version __cuda_stream__() answers")
    if version != 0:
        raise ValueError(
            f"__cuda_stream__() speaks version {version}: only version 0 is known"
        )
    return _from_value(answer[1], "the handle __cuda_stream__() answers")


def _may_be_stream(stream: object) -> bool:
    """Events, arrays and buffers have .ptr or .handle too, and may crash the driver."""
    return not (
        isinstance(stream, (_core.Buffer, _core.Event))
        or any(hasattr(stream, mark) for mark in _ARRAY_MARKS)
        or "Event" in type(stream).__name__
    )


def _from_value(value: Any, name: str) -> int:
    """An int, a ctypes pointer (.value, None for 0) or what turns into an int."""
    if not isinstance(value, int) and hasattr(value, "value"):
        value = value.value
        if value is None:
            return 0
    if isinstance(value, (bool, float, str, bytes, bytearray)) or not (
        hasattr(value, "__index__") or hasattr(value, "__int__")
    ):
        raise wrong_type(name, "an int", value)
    return _from_int(int(value), name)


def _from_int(number: int, name: str) -> int:
    if not 0 <= number < 2**64:
        raise ValueError(
            f"{name}: a stream handle is an int from 0 to 2**64 - 1, not {number!r}"
        )
    return number


def refuse_device(function: str, device: int, devices: int) -> NoReturn:
    """ValueError: the memory of a copy is of the devices of that set of bits alone."""
    places = [
        str(place) for place in range(devices.bit_length()) if devices >> place & 1
    ]
    raise ValueError(
        f"{function}: stream is of device {device}, but the memory is of "
        f"device{'s' * (len(places) > 1)} {' and '.join(places)}"
    )


def is_captured() -> bool:
    """Whether PyTorch or CuPy capture on the stream that is current in this thread.

    Only libraries that are imported already are asked, and of PyTorch only what has
    initialised CUDA. What cannot be asked does not capture, but for a default stream that
    answers that a stream which blocks it does.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and _asks(lambda: torch.cuda.is_initialized()):
        asked = _asks(lambda: torch.cuda.is_current_stream_capturing())
        if asked:
            return True
    cupy: Any = sys.modules.get("cupy")
    if cupy is None:
        return False
    return _asks(lambda: cupy.cuda.get_current_stream().is_capturing())


def _asks(question: Callable[[], object]) -> bool:
    # Libraries and their other versions raise these. All else is what the handler of a
    # signal raises that came meanwhile, as a TimeoutError, and is not ours to drop.
    try:
        return bool(question())
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        return "StreamCaptureImplicit" in str(error)
