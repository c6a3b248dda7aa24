# SPDX-License-Identifier: Apache-2.0
"""Tests of the emulated device and of the variables that configure it.

The emulated device has to show bugs that a real one might hide: its streams are late at
random, the host cannot touch its memory, and its memory runs out. The later tests check
which settings `read_settings` makes of the variables of the environment.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from support import programs, session
from support.strategies import KINDS

import cumem
from cumem.devices import device as device_module

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

DEFAULTS = (1, 1 << 30, 13000, 200, 0)
#: A value for each variable of the emulated device, different from its default.
VARIABLES = {
    "BACKEND": "emulated",
    "EMULATED_DEVICES": "3",
    "EMULATED_MEMORY": "1.5 GiB",
    "EMULATED_DRIVER": "12.4",
    "EMULATED_DELAY_US": "7",
    "EMULATED_SEED": "5",
    "EMULATED_PEERS": "0",
    "EMULATED_CONCURRENT": "0",
}


def test_suite_runs_with_random_delays(emulated) -> None:
    cumem.empty_pinned(1)
    delay_us = device_module.read_settings().max_delay_us
    assert delay_us == session.MAX_DELAY_US > 0


def test_driver_version_is_the_one_asked_for(emulated) -> None:
    major, minor = cumem.info.about().driver_version
    assert major * 1000 + minor * 10 == session.emulated_driver()


def check_round_trip(kind: str) -> None:
    buffer = cumem.array(np.arange(1000), kind=kind)
    out = np.zeros(1000, int)
    cumem.copy(out[::-1], buffer)
    assert (out[::-1] == np.arange(1000)).all()


@pytest.mark.parametrize("driver", [12000, 12040, 12080, 13000])
def test_every_kind_works_on_every_driver(driver: int) -> None:
    with session.opened("emulated", driver_version=driver):
        for kind in KINDS:
            check_round_trip(kind)


def test_host_access_to_device_memory_crashes() -> None:
    code = (
        "import cumem, ctypes\nb = cumem.zeros(10, 'u1')\nctypes.string_at(b.ptr, 1)\n"
    )
    import os

    done = subprocess.run(
        [sys.executable, "-X", "faulthandler=0", "-c", code],
        env={**os.environ, "CUMEM_BACKEND": "emulated"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == -11


def test_no_buffer_offers_the_cuda_array_interface(emulated) -> None:
    for kind in KINDS:
        assert not hasattr(cumem.empty(3, kind=kind), "__cuda_array_interface__")


def test_dlpack_exports_emulated_memory_as_cpu(emulated) -> None:
    for kind in KINDS:
        buffer = cumem.array(np.arange(10), kind=kind)
        assert buffer.__dlpack_device__() == (1, 0)
        view = np.from_dlpack(buffer)
        assert (view == np.arange(10)).all()


def test_memory_size_is_a_limit() -> None:
    with session.opened("emulated", memory_nbytes=16 << 20):
        free, total = cumem.memory_info()
        assert total == 16 << 20
        buffer = cumem.empty_device(8 << 20, "u1")
        assert cumem.memory_info()[0] <= free - (8 << 20)
        with pytest.raises(cumem.OutOfMemoryError):
            cumem.empty_device(16 << 20, "u1")
        del buffer
        cumem.empty_device(12 << 20, "u1")


def test_managed_pages_move_when_prefetched(emulated) -> None:
    buffer = cumem.zeros(1 << 16, "u1", "managed")
    buffer.prefetch_pages(0)
    cumem.Device(0).synchronize()
    assert session.testing.host_pages(buffer) == 0
    buffer.prefetch_pages("host")
    cumem.Device(0).synchronize()
    assert session.testing.host_pages(buffer) > 0


@pytest.mark.parametrize("index", [0, 1])
def test_prefetch_names_its_device_and_uses_its_stream(emulated, index) -> None:
    buffer = cumem.zeros(1 << 16, "u1", "managed")
    buffer.prefetch_pages("host")
    cumem.Device(0).synchronize()
    with session.gate(cumem.current_stream(index)):
        buffer.prefetch_pages(index)
        assert buffer.prefetch_location == cumem.Device(index)
        cumem.Device(1 - index).synchronize()
        assert session.testing.host_pages(buffer) > 0
    cumem.Device(index).synchronize()
    assert session.testing.host_pages(buffer) == 0


def test_prefetch_uses_the_stream_of_any_device(emulated) -> None:
    buffer = cumem.zeros(1 << 16, "u1", "managed")
    for target, home in ((1, 0), (0, 1), (1, 1)):
        stream = cumem.Stream(device=home)
        buffer.prefetch_pages("host", stream=stream)
        stream.synchronize()
        with session.gate(stream):
            buffer.prefetch_pages(target, stream=stream)
            assert buffer.prefetch_location == cumem.Device(target)
            cumem.Device(1 - home).synchronize()
            assert session.testing.host_pages(buffer) > 0
        stream.synchronize()
        assert session.testing.host_pages(buffer) == 0


def test_capturing_stream_is_seen_and_copies_stay_legal(emulated) -> None:
    stream = cumem.Stream()
    source = cumem.zeros(100, "u1", "pinned")
    target = cumem.zeros(100, "u1", "device")
    session.testing.set_capturing(stream, True)
    try:
        assert stream.is_capturing
        before = cumem.stats()["pinned"].growth_count
        cumem.empty_pinned(64 << 20, "u1")  # the pool may grow while a stream captures
        assert cumem.stats()["pinned"].growth_count == before + 1
        with pytest.raises(cumem.CudaError) as caught:
            stream.synchronize()
        assert caught.value.code in (900, 901)
    finally:
        with pytest.raises(cumem.CudaError, match="901"):
            session.testing.set_capturing(stream, False)
    cumem.copy(target, source)


def test_emulated_machine_without_devices_can_be_asked_and_refuses_memory() -> None:
    with session.opened("emulated", device_count=0):
        assert cumem.device_count() == 0
        about = cumem.info.about()
        assert about.driver_version >= (12, 0)
        assert about.runtime_version >= (12, 0)
        cumem.set_limit("pinned", "1GiB")
        assert cumem.get_limit("pinned") == 1 << 30
        assert cumem.memory_info("host").live == 0
        assert not cumem.stats().pools
        assert cumem.trim() == 0
        for use in (cumem.Stream, cumem.memory_info, lambda: cumem.empty_pinned(3)):
            with pytest.raises(ValueError, match="device 0 does not exist"):
                use()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("CUMEM_BACKEND", "quantum", "'cuda', 'emulated' or unset"),
        ("CUMEM_EMULATED_DEVICES", "65", "a count from 0 to 64"),
        ("CUMEM_EMULATED_DEVICES", "-1", "a count from 0 to 64"),
        ("CUMEM_EMULATED_DEVICES", "two", "a count from 0 to 64"),
        ("CUMEM_EMULATED_MEMORY", "0", "a number of bytes such as"),
        ("CUMEM_EMULATED_MEMORY", "5 elephants", "a number of bytes such as"),
        ("CUMEM_EMULATED_MEMORY", "8EiB", "a number of bytes such as"),
        ("CUMEM_EMULATED_DRIVER", "12.4.1", "a CUDA version such as 12.4"),
        ("CUMEM_EMULATED_DRIVER", "0.4", "a CUDA version such as 12.4"),
        ("CUMEM_EMULATED_DELAY_US", "1000001", "from 0 to 1000000"),
        ("CUMEM_EMULATED_SEED", str(2**64), "at most 64 bits"),
        ("CUMEM_EMULATED_PEERS", "2", "1, true, yes or on, or 0, false, no or off"),
        ("CUMEM_EMULATED_CONCURRENT", "never", "0, false, no or off"),
        ("CUMEM_NVTX", "y", "1, true, yes or on"),
    ],
)
def test_wrong_variable_is_named(monkeypatch, name, text, expected) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(
        ValueError, match=f"{name} must be .*{expected}.*, not '{text}'"
    ):
        device_module.read_settings()


def test_variables_say_what_is_opened(monkeypatch) -> None:
    for name, text in VARIABLES.items():
        monkeypatch.setenv(f"CUMEM_{name}", text)
    found = device_module.read_settings()
    # The members are in the order of `Settings` in devices/device.py.
    assert found == (
        False,
        True,
        False,
        3,
        1536 << 20,
        12040,
        7,
        5,
        False,
        False,
        False,
        b"\0\1\2",
    )


def test_settings_of_a_test_win_over_variables(monkeypatch) -> None:
    for name, text in VARIABLES.items():
        monkeypatch.setenv(f"CUMEM_{name}", text)
    given = {"backend": "cuda", "faults": True, "device_count": 2, "seed": None}
    monkeypatch.setattr(device_module, "test_settings", given)
    found = device_module.read_settings()
    # The members are in the order of `Settings` in devices/device.py.
    assert found == (
        True,
        False,
        False,
        2,
        1536 << 20,
        12040,
        7,
        5,
        False,
        False,
        True,
        b"\0\1",
    )
    monkeypatch.setattr(device_module, "test_settings", {"colour": 1})
    with pytest.raises(TypeError, match="colour"):
        device_module.read_settings()


def test_without_variables_cuda_is_tried_and_the_defaults_hold(monkeypatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(f"CUMEM_{name}", "")
    found = device_module.read_settings()
    assert found == (True, True, False, *DEFAULTS, True, True, False, b"\0")


# -- CUDA_VISIBLE_DEVICES -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "said", "numbers"),
    [
        ("4", "1,2", [1, 2]),
        ("4", " 3 , 0 ", [3, 0]),
        ("4", "1,9,2", [1]),
        ("4", "1,-1,2", [1]),
        ("4", "", [0, 1, 2, 3]),
        ("4", "-1", [0, 1, 2, 3]),
        ("4", "GPU-63756d65-6d2d-656d-756c-617465640002,0", [2, 0]),
        (None, "1,2", [1, 2]),
        (None, "5", [5]),
        (None, "GPU-6d2f1c1e-a,GPU-77", [0, 1]),
        (None, None, [0]),
    ],
)
def test_visible_devices_are_those_of_the_emulated_machine(
    monkeypatch, machine, said, numbers
) -> None:
    monkeypatch.setattr(device_module, "test_settings", {})
    for name, value in {
        "CUMEM_EMULATED_DEVICES": machine,
        "CUDA_VISIBLE_DEVICES": said,
    }.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    found = device_module.read_settings()
    assert (found.device_count, list(found.numbers)) == (len(numbers), numbers)


@pytest.mark.parametrize("said", ["7", "0,0", "all", "GPU-", "GPU-63756d65"])
def test_visible_devices_that_leave_none_are_an_error(monkeypatch, said) -> None:
    monkeypatch.setattr(device_module, "test_settings", {"backend": "emulated"})
    monkeypatch.setenv("CUMEM_EMULATED_DEVICES", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES={said} leaves none"):
        device_module.read_settings()


def test_visible_devices_keep_their_identity_and_later_changes_are_reported() -> None:
    program = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = "2,1"
import cumem
from cumem import doctor
assert cumem.device_count() == 2
assert [cumem.Device(i).uuid[-1] for i in range(2)] == ["2", "1"]
assert cumem.Device(0).pci_bus_id == "0000:03:00.0"
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
assert cumem.device_count() == 2
(found,) = (
    each
    for each in doctor.diagnose(measure=False).findings
    if each.check == "visibility"
)
assert found.status == "problem", found
assert "was '2,1' when the devices were opened and is '0' now" in found.text
"""
    done = programs.run("-c", program, CUMEM_EMULATED_DEVICES="4")
    assert done.returncode == 0, done.stderr
