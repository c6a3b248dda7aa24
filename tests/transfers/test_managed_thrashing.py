# SPDX-License-Identifier: Apache-2.0
"""Managed memory that moves to and fro, and devices that cannot share it with the host.

Memory that the host and a device use in turns must cause one warning that says what to do,
and uses that only look like such turns must cause none.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from support import faults, session
from support.managed import NBYTES, PAGE, managed, steers
from support.session import testing

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # Where the driver lacks these calls, cumem works in other ways.
    pytest.mark.by_driver("context_record_event", "prefetch_batch_async"),
]


# -- without concurrent managed access --------------------------------------------------


def test_device_without_concurrent_access_says_so() -> None:
    def check() -> None:
        buffer = managed()
        uses: list[Callable[[], object]] = [
            lambda: buffer.prefetch_pages(0),
            lambda: buffer.prefetch_pages("cpu"),
            lambda: cumem.prefetch_pages([buffer, buffer], 0, cumem.Stream()),
            lambda: setattr(buffer, "preferred_location", 0),
            lambda: setattr(buffer, "accessed_by", [0]),
            lambda: buffer.on(0).__enter__(),
            lambda: next(cumem.tiles(buffer, PAGE)),
        ]
        if session.emulated_driver() >= 13000:
            uses.append(buffer.discard)
        for use in uses:
            with pytest.raises(cumem.CudaError, match="no concurrent managed access"):
                use()
        buffer.read_mostly = True
        buffer.accessed_by = ()
        buffer.preferred_location = "cpu"
        assert buffer.page_residency().read_mostly
        assert (buffer.numpy() == 1).all()

    with session.opened("emulated", concurrent=False):
        check()


# -- thrashing --------------------------------------------------------------------------


def to_and_fro(buffer: cumem.ManagedBuffer, times: int) -> None:
    """Send the pages to the device and read them on the host, `times` times."""
    for _ in range(times):
        buffer.prefetch_pages(0)
        buffer.numpy()


def test_thrashing_names_the_buffer_and_what_to_do(runtime) -> None:
    steers(runtime)
    buffer = managed()
    to_and_fro(buffer, 7)
    with pytest.warns(cumem.ManagedThrashWarning) as caught:
        to_and_fro(buffer, 2)
    text = str(caught[0].message)
    assert len(caught) == 1
    assert repr(buffer) in text
    assert "read_mostly" in text
    assert "tiles" in text
    assert caught[0].filename == __file__
    # The warning comes only once.
    to_and_fro(buffer, 20)


WAYS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "prefetches": (lambda b: b.prefetch_pages(0), lambda b: b.prefetch_pages("cpu")),
    "memoryview": (lambda b: b.prefetch_pages(0), memoryview),
    "fills": (
        lambda b: b.fill(1, stream=cumem.current_stream()),
        lambda b: b.numpy(),
    ),
    "exports": (testing.array_interface, np.from_dlpack),
}


def in_turn(buffer: cumem.ManagedBuffer, name: str) -> None:
    """Use the buffer on the device and on the host in turn, in ways that WAYS names."""
    for _ in range(9):
        for way in WAYS[name]:
            way(buffer)


@pytest.mark.parametrize("name", WAYS)
def test_each_way_to_and_fro_is_seen(emulated, name: str) -> None:
    buffer = managed()
    with pytest.warns(cumem.ManagedThrashWarning):
        in_turn(buffer, name)


def test_what_is_no_thrashing_is_not_warned_of(emulated) -> None:
    buffer = managed(32 * NBYTES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Each part is sent there and back once.
        for part in range(32):
            tile = buffer[part * NBYTES : (part + 1) * NBYTES]
            tile.prefetch_pages(0)
            tile.prefetch_pages("cpu")
        for _ in cumem.tiles(buffer, NBYTES):
            pass
        for _ in range(20):
            buffer.prefetch_pages(0)
        steered = managed()
        steered.read_mostly = True
        to_and_fro(steered, 20)
        view = steered.as_device()
        for _ in range(20):
            testing.array_interface(view)
            steered.numpy()
        for _ in range(20):
            # The memory is different each time.
            to_and_fro(managed(), 7)


def test_advice_that_is_taken_back_does_not_cost_the_warning(emulated) -> None:
    buffer = managed()
    buffer.read_mostly = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_and_fro(buffer, 20)
    buffer.read_mostly = False
    with pytest.warns(cumem.ManagedThrashWarning) as caught:
        to_and_fro(buffer, 20)
    assert len(caught) == 1


def test_driver_that_cannot_be_asked_does_not_cost_the_warning(emulated) -> None:
    buffer = managed()
    to_and_fro(buffer, 7)
    testing.plan_fault("range_attribute", 1, faults.UNKNOWN)
    with pytest.raises(cumem.CudaError, match="cudaMemRangeGetAttribute"):
        to_and_fro(buffer, 2)
    testing.plan_fault(None, 0)
    with pytest.warns(cumem.ManagedThrashWarning) as caught:
        to_and_fro(buffer, 20)
    assert len(caught) == 1


@pytest.mark.parametrize("name", WAYS)
def test_warning_that_is_an_error_leaves_nothing(emulated, name: str) -> None:
    buffer = managed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(cumem.ManagedThrashWarning):
            in_turn(buffer, name)
    cumem.Device(0).synchronize()
    del buffer
    gc.collect()
    assert testing.live_storages() == 0
