# SPDX-License-Identifier: Apache-2.0
"""What events say of the time, and what they do by names of other libraries."""

from __future__ import annotations

from cumem import _core
from cumem.extension.arguments import hinting, read_flag, wrong_type


@hinting
def Event(  # noqa: N802  # as errors of the call name it
    _type: type[_core.Event],
    *,
    device: object = None,
    timing: object = True,
    blocking: object = False,
) -> _core.Event:
    """See `Event`."""
    return _core._make_event(
        device, read_flag(timing, "timing"), read_flag(blocking, "blocking")
    )


def seconds_since(event: _core.Event, start: _core.Event, /) -> float:
    """See `Event.seconds_since`."""
    if type(start) is not _core.Event:
        raise wrong_type("start", "an Event", start)
    for each, name in (start, "start"), (event, "end"):
        _ = each.handle  # which says that it is closed
        if not each._timing:
            raise ValueError(f"the {name} event was made with timing=False")
        if not each._recorded:
            raise ValueError(f"the {name} event was never recorded")
    places = start.device.index, event.device.index
    if places[0] != places[1]:
        raise ValueError(
            f"the events belong to different devices: {places[0]} and {places[1]}"
        )
    start.synchronize()
    event.synchronize()
    return event._elapsed(start)


def query(event: _core.Event) -> bool:
    """See `Event.query`."""
    return event.done


@hinting
def wait(event: _core.Event, stream: object = None) -> None:
    """See `Event.wait`."""
    device = event.device
    found = (
        _core.current_stream(device)
        if stream is None
        else _core._wrap_stream(stream, device.index, False)
    )
    found.wait(event)


def elapsed_time(event: _core.Event, end: _core.Event, /) -> float:
    """See `Event.elapsed_time`."""
    if not isinstance(end, _core.Event):
        raise wrong_type("end", "an Event", end)
    return end.seconds_since(event) * 1000
