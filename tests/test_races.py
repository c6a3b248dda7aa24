# SPDX-License-Identifier: Apache-2.0
"""Code that runs in the middle of a call must not take the memory away from under it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support import session, values

import cumem


class FreesOnRead:
    """An exporter that frees the copy's target while it is asked for its data."""

    def __init__(self, target: cumem.Buffer) -> None:
        self.target = target
        self.inner = np.arange(16, dtype="u1")
        self.error: BaseException | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.inner.__dlpack_device__()

    def __dlpack__(self, **keywords: object) -> object:
        try:
            self.target.free()
        except BufferError as error:
            self.error = error
        return self.inner.__dlpack__(**keywords)


@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_target_cannot_be_freed_while_the_source_is_read(runtime, kind) -> None:
    target = cumem.zeros(16, "u1", kind)
    source = FreesOnRead(target)
    cumem.copy(target, source)
    assert isinstance(source.error, BufferError)
    source.error = None
    assert (values.get(target) == np.arange(16)).all()
    target.free()


class FreesOnStream:
    def __init__(self, buffer: cumem.Buffer, handle: int) -> None:
        self.buffer, self.handle = buffer, handle

    def __cuda_stream__(self) -> tuple[int, int]:
        self.buffer.free()
        return (0, self.handle)


def test_memory_freed_by_the_stream_is_not_prefetched(runtime) -> None:
    stream = cumem.Stream()
    buffer = cumem.zeros(4096, "u1", "managed")
    with pytest.raises(ValueError, match="closed"):
        buffer.prefetch(0, stream=FreesOnStream(buffer, stream.handle))


def churn(stop: threading.Event, failures: list[BaseException]) -> None:
    array, out = np.zeros(1000), np.zeros(1000)
    while not stop.is_set():
        try:
            cumem.empty_device(1000)
            cumem.copy(out, array)
        except (RuntimeError, ValueError):  # shut down in between
            pass
        except BaseException as error:
            failures.append(error)
            return


def test_shutdown_beside_working_threads_refuses_or_works(emulated) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    threads = [threading.Thread(target=churn, args=(stop, failures)) for _ in range(4)]
    for thread in threads:
        thread.start()
    refusals = []
    for _ in range(50):
        try:
            cumem.shutdown()
        except RuntimeError as error:
            refusals.append(str(error))
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all("another thread" in refusal for refusal in refusals)


def test_import_waits_for_the_stream_of_the_memorys_device(emulated) -> None:
    count = 4096
    buffer = cumem.zeros(count, "u1", "device", device=1)
    session.testing.check_pools()
    producer = cumem.current_stream(1)
    source = cumem.full(count, 9, "u1", "pinned", device=1)
    target = cumem.zeros(count, "u1", "device", device=0)
    stream = cumem.Stream(device=0)
    interface = {
        "shape": (count,),
        "typestr": "|u1",
        "data": (buffer.ptr, False),
        "version": 3,
        "stream": 1,
    }
    exporter = type("Exporter", (), {"__cuda_array_interface__": interface})()
    with session.gate(producer):
        cumem.copy_async(buffer, source, stream=producer)
        handle = cumem.copy_async(target, exporter, stream=stream)
        assert not handle.done
    handle.wait()
    assert (values.get(target) == 9).all()
