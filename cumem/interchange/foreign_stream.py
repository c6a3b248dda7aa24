# SPDX-License-Identifier: Apache-2.0
"""What is said of streams of other libraries, and what such libraries are asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from cumem.buffers.arguments import wrong_type

_FOREIGN = (
    "a Stream, an int or an object with __cuda_stream__, .cuda_stream, .ptr or .handle"
)
_EXPECTED = {
    "stream": f"None, {_FOREIGN}",
    "other": f"an Event, a Transfer, {_FOREIGN}",
}


def refuse_stream(stream: object, argument: str) -> NoReturn:
    """TypeError: the argument of this name is no stream of any library."""
    raise wrong_type(argument, _EXPECTED.get(argument, _FOREIGN), stream)


def refuse_number(number: int, name: str) -> NoReturn:
    """ValueError: a number is no handle of a stream."""
    raise ValueError(
        f"{name}: a stream handle is an int from 0 to 2**64 - 1, not {number!r}"
    )


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
