# SPDX-License-Identifier: Apache-2.0
"""A GPU that comes into use later can reach memory that was allocated before.

The tests count the grants of access by the emulated driver. With two GPUs, the last
test asks the real driver which access they have.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from support import session, testing

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

READ_WRITE = 3
DEVICE_LOCATION = 1


def grants() -> int:
    return testing.fault_count("address_set_access")


def reach(device: int, buffer: cumem.Buffer) -> int:
    """Return what the driver lets `device` do with virtual memory at `buffer`: 0 or
    READ_WRITE.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    flags = ctypes.c_ulonglong()
    location = (ctypes.c_int * 2)(DEVICE_LOCATION, device)
    code = driver.cuMemGetAccess(
        ctypes.byref(flags), location, ctypes.c_ulonglong(buffer.ptr)
    )
    assert code == 0
    return flags.value


# Each of these functions uses device 1 for the first time.


def use_by_stream() -> object:
    return cumem.Stream(device=1)


def use_by_memory() -> object:
    buffer = cumem.empty(1000, "u1", "device", device=1)
    cumem.copy(buffer, bytes(1000))
    return buffer


@pytest.mark.parametrize("use", [use_by_stream, use_by_memory])
def test_pools_let_in_a_device_that_is_used_later(
    emulated, use: Callable[[], object]
) -> None:
    pool = cumem.Pool("device", device=0)
    held = [pool.allocate(1 << 20), cumem.empty(1 << 20, "u1", "device", device=0)]
    before = grants()
    kept = use()
    after = grants()
    assert after >= before + len(held)
    other = cumem.Stream(device=1)
    cumem.copy(held[0], bytes(1 << 20))
    assert grants() == after, "a device was let in twice"
    del kept, other


def test_device_that_cannot_be_let_in_is_reported_and_does_not_fail_the_call(
    emulated, monkeypatch
) -> None:
    reported: list[BaseException] = []
    monkeypatch.setattr(
        "sys.unraisablehook", lambda args: reported.append(args.exc_value)
    )
    buffer = cumem.empty(1 << 20, "u1", "device", device=0)
    testing.plan_fault("address_set_access", 1, 999)
    stream = cumem.Stream(device=1)
    testing.plan_fault(None, 0)
    assert stream.device == cumem.Device(1)
    assert [error.call for error in reported if isinstance(error, cumem.CudaError)] == [
        "cuMemSetAccess"
    ]
    cumem.copy(buffer, bytes(1 << 20))
    assert session.leftovers(held=1).get("transfers") is None


@pytest.mark.gpu
def test_pools_let_in_a_gpu_that_is_used_later(cuda) -> None:
    if cumem.device_count() < 2 or not cumem.Device(1).can_access_peer(0):
        pytest.skip("this test needs two GPUs that reach each other")
    early = cumem.zeros(1 << 20, "u1", "device", device=0)
    if reach(1, early) == READ_WRITE:
        pytest.skip("the second GPU was in use before")
    stream = cumem.Stream(device=1)
    assert reach(0, early) == READ_WRITE
    assert reach(1, early) == READ_WRITE
    late = cumem.zeros(64 << 20, "u1", "device", device=0)
    assert reach(1, late) == READ_WRITE
    there = cumem.empty(1 << 20, "u1", "device", device=1)
    cumem.copy(there, early)
    del stream
