# SPDX-License-Identifier: Apache-2.0
"""What events do by the names that two other libraries have for it."""

from __future__ import annotations

from cumem import _core
from cumem.extension.arguments import wrong_type


def query(event: _core.Event) -> bool:
    """See `Event.query`."""
    return event.done


def wait(event: _core.Event, stream: object = None) -> None:
    """See `Event.wait`."""
    device = event.device
    found = (
        _core.current_stream(device)
        if stream is None
        else _core.Stream.from_external(stream)
    )
    found.wait(event)


def elapsed_time(event: _core.Event, end: _core.Event, /) -> float:
    """See `Event.elapsed_time`."""
    if not isinstance(end, _core.Event):
        raise wrong_type("end", "an Event", end)
    return end.seconds_since(event) * 1000
