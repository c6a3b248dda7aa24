# SPDX-License-Identifier: Apache-2.0
"""Data in chunks: what comes, in which order, beside what, and in how much memory."""

from __future__ import annotations

import gzip
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import session
from support.session import testing

import cumem

ROWS, WIDTH = 300, 1024
ROW = WIDTH * 4


def data() -> np.ndarray:
    return np.random.default_rng(3).random((ROWS, WIDTH), "f4")


def together(found: Iterator[tuple[slice, cumem.DeviceBuffer]]) -> np.ndarray:
    """All chunks, kept until the end; each where its slice says."""
    kept = list(found)
    out = np.full((kept[-1][0].stop, *kept[0][1].shape[1:]), 255, kept[0][1].dtype)
    for part, chunk in kept:
        assert isinstance(chunk, cumem.DeviceBuffer)
        assert chunk.shape == out[part].shape
        out[part] = chunk.to_numpy()
    return out


SOURCES: dict[str, Callable[[np.ndarray], object]] = {
    "array": lambda a: a,
    "strided": lambda a: np.repeat(a, 2, axis=0)[::2],
    "turned": lambda a: np.asfortranarray(a),
    "pinned": lambda a: cumem.array(a, kind="pinned"),
    "device": lambda a: cumem.array(a, kind="device"),
    "memoryview": lambda a: memoryview(a),
    "iterable": lambda a: np.split(a, 6),
    "generator": lambda a: (each for each in np.split(a, 6)),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("depth", [1, 3, 1000])
def test_chunks_are_the_source(runtime, name: str, depth: int) -> None:
    array = data()
    found = cumem.chunks(SOURCES[name](array), 50 * ROW, depth=depth)
    assert np.array_equal(together(found), array)


def test_chunks_of_files_are_their_bytes_from_where_they_stand(
    runtime, tmp_path: Path
) -> None:
    array = data()
    path = tmp_path / "numbers.bin"
    array.tofile(path)
    whole = array.reshape(-1).view("u1")
    assert np.array_equal(together(cumem.chunks(path, 100_000)), whole)
    assert np.array_equal(together(cumem.chunks(str(path))), whole)
    with path.open("rb") as file:
        file.seek(5001)
        assert np.array_equal(together(cumem.chunks(file, "64 KiB")), whole[5001:])
        file.seek(0, 2)
        assert list(cumem.chunks(file)) == []
    mapped = np.memmap(path, "f4", "r", shape=(ROWS, WIDTH))
    assert np.array_equal(together(cumem.chunks(mapped, "1 MiB")), array)


def test_file_that_unpacks_as_it_reads_is_refused(emulated, tmp_path: Path) -> None:
    path = tmp_path / "numbers.gz"
    with gzip.open(path, "wb") as file:
        file.write(b"its descriptor holds other bytes")
    with gzip.open(path) as file, pytest.raises(TypeError, match="not GzipFile"):
        cumem.chunks(file)


def test_chunks_have_as_many_rows_as_fit_and_one_at_least(runtime) -> None:
    lengths = [len(chunk) for _, chunk in cumem.chunks(data(), 50 * ROW + 1)]
    assert lengths == [50] * 6
    assert len(list(cumem.chunks(data()[:7], 1))) == 7
    assert [part for part, _ in cumem.chunks(np.ones((5, 2)), 32)] == [
        slice(0, 2),
        slice(2, 4),
        slice(4, 5),
    ]
    assert list(cumem.chunks(np.ones((0, 4)))) == []
    assert list(cumem.chunks([])) == []
    assert [len(c) for _, c in cumem.chunks(np.ones((3, 0)), 4)] == [3]


def test_default_is_64_mib_and_less_where_that_is_not_free(emulated) -> None:
    array = np.zeros((1 << 20, 100), "u1")
    found = cumem.chunks(array)
    assert len(next(found)[1]) == (64 << 20) // 100
    found.close()
    cumem.set_limit("device", "40 MiB", device=0)
    assert sum(len(chunk) for _, chunk in cumem.chunks(array[: 1 << 18])) == 1 << 18
    found = cumem.chunks(array)
    assert len(next(found)[1]) == (40 << 20) * 4 // 5 // 5 // 100
    found.close()
    cumem.set_limit("device", None, device=0)


def test_next_chunks_come_while_the_stream_is_at_work(emulated) -> None:
    array = data()
    stream = cumem.Stream()
    with stream:
        found = cumem.chunks(array, 50 * ROW, depth=2)
        session.shut(stream)  # works on the first chunk and does not come to an end
        first = next(found)[1]
        part, second = next(found)
    with cumem.Stream() as other:  # behind nothing but the copy
        assert np.array_equal(second.to_numpy(), array[part])
        del other
    testing.gate_open(stream)
    assert np.array_equal(first.to_numpy(), array[:50])
    found.close()


def test_third_chunk_waits_for_the_work_on_the_first(emulated) -> None:
    stream = cumem.Stream()
    came = threading.Event()

    def read() -> None:
        with stream:
            for part, _ in cumem.chunks(data(), 50 * ROW):
                if part.start == 100:
                    came.set()

    session.shut(stream)
    thread = threading.Thread(target=read)
    thread.start()
    session.wait_until_waiting(thread)
    assert not came.is_set()
    testing.gate_open(stream)
    thread.join()
    assert came.is_set()


@pytest.mark.parametrize("depth", [1, 3])
def test_memory_of_two_chunks_more_than_are_ahead_is_enough(
    emulated, depth: int
) -> None:
    array = np.random.default_rng(1).integers(0, 255, (64, 1 << 20), "u1")
    total = cumem.zeros(1 << 20, "u1")
    cumem.set_limit("device", (depth + 2) * (2 << 20) + (2 << 20), device=0)
    for part, chunk in cumem.chunks(array, 2 << 20, depth=depth):
        cumem.copy(total, chunk[1])
        assert np.array_equal(total.to_numpy(), array[part][1])
        del chunk
    cumem.set_limit("device", None, device=0)


def test_closed_early_nothing_is_under_way(runtime) -> None:
    array = data()
    found = cumem.chunks(array, 10 * ROW, depth=8)
    _, chunk = next(found)
    found.close()
    array[:] = 0  # nobody reads it any more
    assert chunk.to_numpy().any()
    with pytest.raises(StopIteration):
        next(found)


def test_closed_early_it_waits_for_copies_that_have_begun(emulated) -> None:
    busy = cumem.zeros(1 << 20, "u1")
    stream = cumem.Stream()
    session.shut(stream)
    busy.fill(1, stream=stream)
    found = cumem.chunks([np.ones(5), busy])
    next(found)
    thread = threading.Thread(target=found.close)
    thread.start()
    session.wait_until_waiting(thread)
    assert thread.is_alive()
    testing.gate_open(stream)
    thread.join()
    assert cumem.memory_info(0).live == busy.nbytes


def test_failure_of_an_iterable_comes_after_what_it_gave(runtime) -> None:
    def arrays() -> Iterator[np.ndarray]:
        yield np.ones(3)
        yield np.ones(4)
        raise OSError("the disk is gone")

    found = cumem.chunks(arrays(), depth=5)
    assert [part for part, _ in (next(found), next(found))] == [
        slice(0, 3),
        slice(3, 7),
    ]
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)


def test_copy_that_fails_is_raised_and_leaves_nothing(emulated) -> None:
    testing.plan_fault("copy_async", 2, 999)
    with pytest.raises(cumem.CudaError, match="999"):
        together(cumem.chunks(data(), 50 * ROW))
    testing.plan_fault(None, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            (3,),
            TypeError,
            "src must be an array, a file or an iterable of arrays, not int",
        ),
        ((np.float32(3),), ValueError, r"no axis to cut: its shape is \(\)"),
        (([np.ones(2), 5.0],), ValueError, r"no axis to cut: its shape is \(\)"),
        ((np.ones(3, object),), TypeError, "object"),
        ((np.ones(3), 0), ValueError, "nbytes must be at least 1, not 0"),
        ((np.ones(3), "many"), ValueError, "nbytes must be a number of bytes"),
        ((np.ones(3), 8, 7), ValueError, "device 7"),
        ((np.ones(3), 8, 0, 0), ValueError, "depth must be at least 1, not 0"),
        ((np.ones(3), 8, 0, 1.5), TypeError, "depth must be an int, not float"),
        (("/no/such/file",), FileNotFoundError, "no/such"),
        (("/",), IsADirectoryError, "/"),
        ((io.BytesIO(b"123"),), OSError, "fileno"),
    ],
)
def test_what_cannot_be_cut_is_refused(emulated, arguments, error, text) -> None:
    with pytest.raises(error, match=text):
        list(cumem.chunks(*arguments))


def test_chunk_size_is_what_fits(emulated) -> None:
    assert cumem.chunk_size(100, 1000) == 2
    assert cumem.chunk_size("1 KiB", "1 MiB", copies=2, fraction=1) == 512
    assert cumem.chunk_size(1, 2**62, 1, 0.5) == 2**61
    free = cumem.memory_info(0).free
    held = cumem.empty_device(100 << 20, "u1")
    assert cumem.chunk_size(1 << 20, fraction=1, copies=1) == (free >> 20) - 100
    del held  # cached: new buffers have it
    assert cumem.chunk_size(1 << 20, fraction=1, copies=1) == free >> 20
    cumem.set_limit("device", "50 MiB", device=0)
    assert cumem.chunk_size(1 << 20, fraction=1, copies=1) == 50
    cumem.set_limit("device", None, device=0)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((0,), ValueError, "item_nbytes must be at least 1"),
        ((-1,), ValueError, "item_nbytes must not be negative"),
        ((1.5,), TypeError, "item_nbytes must be a number of bytes"),
        ((1, 10, 0), ValueError, "copies must be at least 1, not 0"),
        (
            (1, 10, 3, 0.0),
            ValueError,
            "fraction must be above 0 and at most 1, not 0.0",
        ),
        ((1, 10, 3, 1.1), ValueError, "fraction must be above 0 and at most 1"),
        ((1, 10, 3, float("nan")), ValueError, "fraction must be above 0"),
        ((1000, 1000), ValueError, "3 items of 1000 B do not fit into 0.8 of 1000 B"),
    ],
)
def test_chunk_size_refuses(emulated, arguments, error, text) -> None:
    with pytest.raises(error, match=text):
        cumem.chunk_size(*arguments)
