# SPDX-License-Identifier: Apache-2.0
"""Errors about streams of other libraries, and a check whether those libraries capture."""

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
    """Raise a TypeError, because this argument is not a stream of any library."""
    raise wrong_type(argument, _EXPECTED.get(argument, _FOREIGN), stream)


def refuse_number(number: int, name: str) -> NoReturn:
    """Raise a ValueError, because a number cannot be the handle of a stream."""
    raise ValueError(
        f"{name}: a stream handle is an int from 0 to 2**64 - 1, not {number!r}"
    )


def refuse_device(function: str, device: int, devices: int) -> NoReturn:
    """Raise a ValueError, because the memory is on other devices (bits of `devices`)."""
    places = [
        str(place) for place in range(devices.bit_length()) if devices >> place & 1
    ]
    raise ValueError(
        f"{function}: stream is of device {device}, but the memory is of "
        f"device{'s' * (len(places) > 1)} {' and '.join(places)}"
    )


def is_captured() -> bool:
    """Return whether PyTorch or CuPy is capturing on the current stream of this thread.

    Only libraries that are imported already are asked, and PyTorch only if it has
    initialised CUDA. A library that cannot be asked counts as not capturing, with one
    exception: while a stream that blocks the default stream captures, a question about the
    default stream fails with ``cudaErrorStreamCaptureImplicit``, which counts as capturing.
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
    # These are the errors of the libraries in all their versions. Any other error comes
    # from a signal handler that ran meanwhile, such as a TimeoutError, and must not be
    # dropped.
    try:
        return bool(question())
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        return "StreamCaptureImplicit" in str(error)
