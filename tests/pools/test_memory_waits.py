# SPDX-License-Identifier: Apache-2.0
"""Copies never wait for memory in flight, and Ctrl-C ends the calls that do.

Memory in flight is a block that was given back while a stream still works on it. Here
that stream is behind a shut gate, so a call that waited for it would not end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from support import session, values

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # Where the driver lacks these calls, cumem works in other ways.
    pytest.mark.by_driver("context_record_event", "prefetch_batch_async"),
]

MIB = 1 << 20


def leave_in_flight(block: cumem.Buffer, stream: cumem.Stream) -> None:
    """Give `block` back while the shut `stream` and a second stream still use it."""
    block.record_stream(stream)
    block.record_stream(cumem.Stream())
    block.free()
    assert cumem.stats()[block.kind].in_flight_nbytes >= block.nbytes


def ends(function: Callable[[], object]) -> bool:
    """Return whether the function ends while the gate around the call is still shut."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(session.PATIENCE)
    return not thread.is_alive()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("count", [1000, MIB])
@pytest.mark.parametrize("way", ["up", "down"])
def test_copy_does_not_wait_for_page_locked_memory(
    emulated, way: str, count: int, strided: bool
) -> None:
    late = cumem.Stream()
    host = np.arange(2 * count, dtype="u4")[:: 2 if strided else 1]
    device = cumem.full(host.shape, 0, "u4", "device")
    if way == "down":
        cumem.copy(device, host)
    target = np.zeros(host.size, "u4")[: host.size]
    cumem.trim()
    ends_of_copy = (device, host) if way == "up" else (target, device)
    with cumem.limit("pinned", 2 * MIB), session.gate(late):
        leave_in_flight(cumem.empty_pinned(2 * MIB, "u1"), late)
        assert ends(lambda: cumem.copy(*ends_of_copy))
    assert ((values.get(device) if way == "up" else target) == host).all()


def check_devices_apart() -> None:
    late = cumem.Stream()
    near = cumem.full(16 * MIB, 7, "u1", "device", device=0)
    far = cumem.zeros(16 * MIB, "u1", "device", device=1)
    cumem.trim()
    routes = []

    def send() -> None:
        handle = cumem.copy_async(far, near)
        handle.wait()  # The copy may have no route before the fills have ended.
        routes.append(handle.route)

    with cumem.limit("pinned", 4 * MIB), session.gate(late):
        leave_in_flight(cumem.empty_pinned(4 * MIB, "u1"), late)
        assert ends(send)
    assert routes == ["peer"]
    assert (values.get(far) == 7).all()


def test_copy_between_devices_apart_does_not_wait_for_page_locked_memory() -> None:
    with session.opened("emulated", peers=0):
        check_devices_apart()


@pytest.mark.parametrize("way", ["up", "down"])
def test_signal_ends_a_copy_that_waits_for_device_memory(emulated, way: str) -> None:
    late, own = cumem.Stream(), cumem.Stream()
    host = np.arange(MIB, dtype="u4")
    device = cumem.empty_device((MIB, 2), "u4")[:, 0]
    ends = (device, host) if way == "up" else (host, device)
    cumem.copy(device, host, stream=own)
    cumem.trim()
    most = cumem.stats()["device"].reserved_nbytes + 32 * MIB
    with cumem.limit("device", most):
        block = cumem.empty_device(32 * MIB, "u1")
        session.shut(late)
        leave_in_flight(block, late)
        with session.alarm(late):
            cumem.copy(*ends, stream=own)
    late.synchronize()
    cumem.copy(*ends, stream=own)
    assert (host == np.arange(MIB, dtype="u4")).all()
