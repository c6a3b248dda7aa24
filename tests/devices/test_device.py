# SPDX-License-Identifier: Apache-2.0
"""Tests of devices, the current device, versions, counters, trim() and shutdown().

The tests compare what a device says about itself with the emulated device's settings,
and look what becomes of buffers and streams when functions such as shutdown() change
the state of the whole process.
"""

from __future__ import annotations

import copy
import operator
import pickle
import re
import weakref

import numpy as np
import pytest
from support import faults, session, values

import cumem
from cumem.base import version

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # Where the driver lacks these calls, cumem works in other ways.
    pytest.mark.by_driver("context_record_event", "prefetch_batch_async"),
]

testing = session.testing


def test_device_describes_itself(runtime) -> None:
    device = cumem.Device()
    assert device == cumem.Device(0)
    assert device.index == 0
    assert operator.index(device) == 0
    assert device.name
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", device.uuid)
    assert re.fullmatch(
        r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]",
        device.pci_bus_id,
    )
    assert device.total_nbytes > 0
    major, minor = device.compute_capability
    assert major >= 5
    assert minor >= 0
    assert device.emulated == runtime.emulated
    assert ("emulated" in repr(device)) == runtime.emulated


def test_attributes_are_ints_with_cudas_values(runtime) -> None:
    attributes = cumem.Device(0).attributes()
    assert all(isinstance(value, int) for value in attributes.values())
    capability = attributes["compute_major"], attributes["compute_minor"]
    assert capability == cumem.Device(0).compute_capability
    assert attributes["unified_addressing"] == 1
    assert attributes["can_map_host_memory"] == 1
    assert "host_register_read_only" in attributes


def test_devices_compare_and_hash_by_index(emulated) -> None:
    assert cumem.Device(0) == cumem.Device(0)
    assert cumem.Device(0) != cumem.Device(1)
    assert cumem.Device(1) == 1 == cumem.Device(1)
    assert cumem.Device(1) == np.int64(1)
    assert np.uint8(1) == cumem.Device(1)
    assert cumem.Device(0) != 1
    assert cumem.Device(0) != 2**70
    for other in (False, 0.0, "cuda:0", None, np.float32(0)):
        assert cumem.Device(0) != other
    assert hash(cumem.Device(1)) == hash(1)
    assert {0: "found"}[cumem.Device(0)] == "found"
    assert len({cumem.Device(0), cumem.Device(0), cumem.Device(1)}) == 2
    assert cumem.Device(cumem.Device(1)) == cumem.Device(1)
    assert cumem.Device(np.int32(1)).index == 1
    assert cumem.Device(0).uuid != cumem.Device(1).uuid


def test_devices_pickle_and_copy_as_their_index(emulated) -> None:
    device = cumem.Device(1)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(device, protocol)) == device
    assert copy.copy(device) == copy.deepcopy([device])[0] == device


def test_pickled_device_that_is_not_there_is_a_value_error(emulated) -> None:
    data = pickle.dumps(cumem.Device(1), 2).replace(b"K\x01", b"K\x07")
    with pytest.raises(ValueError, match="device 7 does not exist: there are 2"):
        pickle.loads(data)


@pytest.mark.parametrize(
    ("index", "error", "match"),
    [
        (99, ValueError, "device 99 does not exist: there"),
        (-1, ValueError, "device -1"),
        (2**70, ValueError, "63 bits"),
        ("0", ValueError, 'device must be "cuda" or "cuda:N", not '),
        (b"0", TypeError, 'device must be an int, a Device, "cuda:N" or None, not b'),
        (0.0, TypeError, "not float"),
        (True, TypeError, "not bool"),
        (None, TypeError, "index must be an int"),
    ],
)
def test_what_is_no_device_is_refused(runtime, index, error, match) -> None:
    with pytest.raises(error, match=match):
        cumem.Device(index)


def test_memory_info_counts_allocations(runtime) -> None:
    free, total = cumem.memory_info()
    assert 0 < free <= total
    assert cumem.Device(0).memory_info()[1] == total
    assert cumem.memory_info(device=cumem.Device(0))[1] == total
    if runtime.emulated:
        buffer = cumem.empty_device(64 << 20, "u1")
        assert cumem.memory_info(0)[0] <= free - (64 << 20)
        del buffer


def test_peers(emulated) -> None:
    first, second = cumem.Device(0), cumem.Device(1)
    assert first.can_access_peer(second) in (True, False)
    assert first.can_access_peer(1) == first.can_access_peer(second)
    assert not first.can_access_peer(first)
    with pytest.raises(ValueError, match="other: device 7"):
        first.can_access_peer(7)


def test_synchronize_waits_for_every_stream(emulated) -> None:
    import threading

    stream = cumem.Stream()
    reached = threading.Event()

    def run() -> None:
        cumem.Device(0).synchronize()
        reached.set()

    with session.gate(stream):
        stream.record()
        cumem.Device(1).synchronize()
        thread = threading.Thread(target=run)
        thread.start()
        session.wait_until_waiting(thread)
        assert not reached.is_set()
    thread.join()


def test_current_device_is_the_default_everywhere(emulated) -> None:
    assert cumem.current_device() == cumem.Device(0)
    cumem.set_current_device(cumem.Device(1))
    assert cumem.current_device() == cumem.Device(1)
    assert cumem.Stream().device == cumem.Device(1)
    assert cumem.Event().device == cumem.Device(1)
    assert cumem.current_stream().device == cumem.Device(1)
    assert cumem.empty_device(4).device == cumem.Device(1)
    cumem.set_current_device(0)
    assert cumem.empty_device(4).device == cumem.Device(0)
    for wrong, error in ((9, ValueError), (1.5, TypeError), ("0", ValueError)):
        with pytest.raises(error):
            cumem.set_current_device(wrong)
    cumem.set_current_device(1)
    cumem.shutdown()
    assert cumem.current_device() == cumem.Device(0)


def test_device_outlives_a_shutdown(runtime) -> None:
    device = cumem.Device(0)
    name = device.name
    cumem.shutdown()
    assert device.name == name
    device.synchronize()


def test_versions_and_backend(runtime) -> None:
    assert cumem.backend() == runtime.name
    assert cumem.device_count() >= 1
    about = cumem.info.about()
    assert about.backend == runtime.name
    assert about.driver_version >= about.oldest_driver_version
    assert about.runtime_version == version.BUILT_RUNTIME
    reason = about.emulation_reason
    assert isinstance(reason, str) if runtime.emulated else reason is None
    assert about.to_dict()["driver_version"] == [*about.driver_version]


def test_driver_version_is_the_one_emulated() -> None:
    with session.opened("emulated", driver_version=12040, device_count=3):
        assert cumem.info.about().driver_version == (12, 4)
        assert cumem.device_count() == 3


def test_counters_of_a_kind_follow_allocations(runtime) -> None:
    cumem.trim()
    before = cumem.stats()["pinned"]
    buffer = cumem.empty_pinned(1000, "u1")
    during = cumem.stats()["pinned"]
    assert during.live_count == before.live_count + 1
    assert during.live_nbytes >= before.live_nbytes + 1000
    assert during.reserved_nbytes == (
        during.live_nbytes + during.in_flight_nbytes + during.cached_nbytes
    )
    del buffer
    after = cumem.stats()["pinned"]
    assert after.live_count == before.live_count
    assert after.peak_live_nbytes >= during.live_nbytes
    assert cumem.trim() >= 1000
    assert cumem.stats()["pinned"].cached_nbytes == 0


def test_trim_does_not_open_the_driver(emulated) -> None:
    cumem.shutdown()
    assert cumem.trim() == 0
    assert not any(cumem.stats().total.to_dict().values())
    assert not testing.opened()


def test_shutdown_twice_and_with_reset(runtime) -> None:
    cumem.empty_device(4)
    cumem.shutdown()
    cumem.shutdown()
    assert not testing.opened()
    cumem.empty_device(4)
    if runtime.emulated:
        cumem.shutdown(reset_devices=True)
        cumem.empty_device(4)
    with pytest.raises(TypeError):
        cumem.shutdown(True)
    with pytest.raises(TypeError, match="reset_devices must be true or false"):
        cumem.shutdown(reset_devices=np.ones(2))


@pytest.mark.parametrize(
    "call",
    [
        lambda: cumem.current_stream(9),
        lambda: cumem.memory_info(9),
        lambda: cumem.current_stream(colour=1),
        lambda: cumem.current_stream(0, 0),
        lambda: cumem.current_stream(0, device=0),
    ],
)
def test_wrong_function_arguments_are_refused(runtime, call) -> None:
    with pytest.raises((TypeError, ValueError)):
        call()


def test_fault_sweep_of_devices(emulated) -> None:
    def scenario() -> None:
        device = cumem.Device(0)
        assert device.name
        assert device.attributes()
        device.can_access_peer(1)
        device.synchronize()
        device.memory_info()
        cumem.device_count()
        cumem.info.about()

    swept = faults.sweep(scenario)
    assert {
        "device_describe",
        "device_attribute",
        "peer_can_access",
        "device_synchronize",
        "memory_info",
        "device_count",
        "driver_version",
        "runtime_version",
    } <= swept.failed


@pytest.mark.parametrize(
    "make",
    [
        lambda stream: cumem.empty_device(8, device=1, stream=stream),
        lambda stream: cumem.empty(8, kind="device", device=1, stream=stream),
        lambda stream: cumem.zeros(8, device=1, stream=stream),
        lambda stream: cumem.full(8, 1.0, device=1, stream=stream),
        lambda stream: cumem.array([1.0], device=1, stream=stream),
        lambda stream: cumem.empty_like(np.zeros(8), device=1, stream=stream),
        lambda stream: cumem.empty_like(cumem.empty_device(8, device=1), stream=stream),
        lambda stream: cumem.empty_device(8, device=1).fill(1, stream=stream),
        lambda stream: cumem.empty_device(8, device=1).fill(np.ones(8), stream=stream),
        lambda stream: cumem.copy(
            cumem.empty_device(8, device=1), np.ones(8), stream=stream
        ),
        lambda stream: cumem.copy_async(
            np.ones(8), cumem.empty_device(8, device=1), stream=stream
        ).wait(),
    ],
)
def test_stream_of_another_device_is_refused(emulated, make) -> None:
    with pytest.raises(ValueError, match=r"stream is of device 0, .* of device 1"):
        make(cumem.Stream(device=0))
    make(cumem.Stream(device=1))


def copy_on_streams_of_three_devices() -> None:
    """Check that a copy between two devices accepts a stream of either, and none of a
    third.

    Copies on the host accept a stream of any device.
    """
    ends = [cumem.full(8, float(i), device=i) for i in range(2)]
    for device in range(2):
        stream = cumem.Stream(device=device)
        cumem.copy_async(ends[1], ends[0], stream=stream).wait()
        assert (values.get(ends[1]) == 0).all()
    third = cumem.Stream(device=2)
    with pytest.raises(ValueError, match=r"device 2, .* devices 0 and 1"):
        cumem.copy_async(ends[1], ends[0], stream=third)
    pinned = cumem.empty_pinned(8, device=0)
    cumem.copy_async(ends[1], pinned, stream=cumem.Stream(device=0)).wait()
    mapped = cumem.zeros(8, kind="mapped", device=0)
    mapped.fill(3, stream=third)
    cumem.copy_async(pinned, mapped, stream=third).wait()
    assert (pinned.numpy() == 3).all()


def test_copy_takes_a_stream_of_either_end() -> None:
    with session.opened("emulated", device_count=3):
        copy_on_streams_of_three_devices()


def test_empty_like_is_used_on_a_stream_of_its_device(emulated) -> None:
    there = cumem.empty_device(8, device=1)
    like = cumem.empty_like(there)
    assert like.device == cumem.Device(1)
    like.fill(2)
    assert (values.get(like) == 2).all()


def test_device_may_be_a_key_of_a_weak_dictionary(emulated) -> None:
    device = cumem.Device(0)
    found = weakref.WeakKeyDictionary({device: 1})
    assert weakref.ref(device)() is device
    # A device equals its index and has the same hash.
    assert found[cumem.Device(0)] == 1
    assert pickle.loads(pickle.dumps(device)) == device
