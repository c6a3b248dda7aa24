# SPDX-License-Identifier: Apache-2.0
"""Managed memory whose contents nobody needs any more.

discard() lets the driver drop pages without copying them. The tests look at which bytes
survive, and at the order of a discard and other work on streams.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support import session
from support.managed import NBYTES, PAGE, Streams, managed, steers
from support.session import testing

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # Where the driver lacks these calls, cumem works in other ways.
    pytest.mark.by_driver("context_record_event", "prefetch_batch_async"),
]


@pytest.fixture
def streams(emulated, monkeypatch) -> Iterator[Streams]:
    """Yield a stand-in for the extension, which shuts each stream that
    cumem.transfers.managed makes.
    """
    from cumem.transfers import managed as module

    made = Streams()
    monkeypatch.setattr(module, "_core", made)
    yield made
    made.made.clear()


def has_discard(runtime: session.Runtime) -> None:
    if not runtime.has("discard_batch_async"):
        pytest.skip("this driver cannot discard memory")


def test_discard_takes_no_byte_of_others(runtime) -> None:
    steers(runtime)
    has_discard(runtime)
    buffer = managed(4 * NBYTES)
    part = buffer[NBYTES + 1 : 2 * NBYTES + 100]
    part.discard()
    cumem.current_stream().synchronize()
    array = buffer.numpy()
    assert (array[: NBYTES + PAGE] == 1).all()
    assert (array[2 * NBYTES :] == 1).all()
    part.fill(3)
    assert (array[NBYTES + 1 : 2 * NBYTES + 100] == 3).all()
    # This slice contains no whole page, so nothing is discarded.
    buffer[5:9].discard()
    cumem.current_stream().synchronize()
    assert (array[: NBYTES + 1] == 1).all()


@pytest.mark.parametrize("own", [True, False])
def test_discard_has_its_place_in_the_stream(emulated, own: bool) -> None:
    has_discard(emulated)
    buffer = managed()
    stream = cumem.Stream() if own else cumem.current_stream()
    with session.gate(stream):
        buffer.discard(stream if own else None)
        buffer.fill(4, stream=stream)
        assert (buffer.prefetch_location, testing.host_pages(buffer)) == (None, 256)
    stream.synchronize()
    assert (buffer.numpy() == 4).all(), "the discard came after the later fill"
    buffer.discard(stream)
    stream.synchronize()
    assert not (buffer.numpy() == 4).any(), "nothing was discarded"


def test_discard_on_the_default_stream_comes_before_what_is_queued_later(
    emulated,
) -> None:
    has_discard(emulated)
    buffer = managed()
    out = cumem.zeros(NBYTES, "u1", "pinned")
    stream, other = cumem.current_stream(), cumem.Stream()
    # The discard waits as well, since it comes after the copy on that stream.
    session.shut(other)
    cumem.copy_async(out, buffer, stream=other)
    buffer.discard()
    thread = threading.Thread(target=stream.synchronize)
    thread.start()
    session.wait_until_waiting(thread)
    assert thread.is_alive(), "later work did not wait for the discard"
    testing.gate_open(other)
    thread.join()
    assert (out.numpy() == 1).all()


def test_discard_on_the_default_stream_comes_after_what_was_queued_before(
    emulated,
) -> None:
    has_discard(emulated)
    buffer = managed()
    stream = cumem.current_stream()
    with session.gate(stream):
        buffer.fill(4, stream=stream)
        buffer.discard()
        cumem.Device(1).synchronize()
        assert testing.host_pages(buffer) == NBYTES // PAGE
    stream.synchronize()
    assert not (buffer.numpy() == 4).any(), "the discard came before the earlier fill"


def test_discard_on_the_default_stream_keeps_no_stream(emulated) -> None:
    has_discard(emulated)
    buffer = managed()
    buffer.discard()
    cumem.synchronize()
    before = testing.counts()["streams"]
    for _ in range(100):
        buffer.discard()
        cumem.synchronize()
    assert testing.counts()["streams"] <= before + 1


def test_discard_comes_after_all_work_on_the_buffer(emulated) -> None:
    has_discard(emulated)
    buffer = managed()
    out = cumem.zeros(NBYTES, "u1", "pinned")
    other, stream = cumem.Stream(), cumem.Stream()
    with session.gate(other):
        cumem.copy_async(out, buffer, stream=other)
        buffer.discard(stream)
        cumem.Device(1).synchronize()
        assert not stream.done
    stream.synchronize()
    other.synchronize()
    assert (out.numpy() == 1).all(), "the discard came before the copy"


def test_discard_of_what_has_gaps_is_refused(emulated) -> None:
    buffer = cumem.zeros((8, PAGE), "u1", "managed")
    for part in (buffer[:, 1:], buffer[::2], buffer[3, ::2]):
        with pytest.raises(ValueError, match="contiguous"):
            part.discard()
    assert (buffer.numpy() == 0).all()
