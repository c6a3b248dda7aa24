# SPDX-License-Identifier: Apache-2.0
"""Tests of which chunks come, in which order, and of how much memory they take.

chunks() brings a source to the device piece by piece, and pipeline() also runs a function
on each piece and brings the results back. A stream whose gate is shut starts no work, which
shows the order. Limits on memory show how much memory is in use.
"""

from __future__ import annotations

import gzip
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import consumers, faults, programs, session
from support.session import testing

import cumem

ROWS, WIDTH = 300, 1024
ROW = WIDTH * 4


def data() -> np.ndarray:
    return np.random.default_rng(3).random((ROWS, WIDTH), "f4")


def together(found: Iterator[tuple[slice, cumem.DeviceBuffer]]) -> np.ndarray:
    """Keep all chunks until the end, and return an array with each of them at the place
    that its slice says.
    """
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


@pytest.mark.parametrize(
    "func",
    [lambda x: x, lambda x, y: x, lambda *, stream: None],
    ids=["one", "two", "keyword"],
)
def test_error_of_a_function_of_other_arguments_says_how_it_is_called(
    runtime, func
) -> None:
    calls: list[object] = []
    source = np.ones((8, 2))
    with pytest.raises(TypeError, match=r"called as func\(x, y, stream\)"):
        cumem.pipeline(func, source, rows=4)
    cumem.pipeline(lambda *all_of_them: calls.append(all_of_them), source, rows=4)
    assert [len(each) for each in calls] == [3, 3]  # type: ignore[arg-type]


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


@pytest.mark.parametrize("source", [np.ones(4), [np.ones(4)]], ids=["array", "list"])
def test_dtype_that_casting_does_not_allow_is_refused_by_the_function_called(
    runtime, source
) -> None:
    text = "casting='same_kind' does not allow dtype float64 to become dtype int32"
    with pytest.raises(TypeError, match=f"^chunks: {text}"):
        list(cumem.chunks(source, dtype="i4"))
    with pytest.raises(TypeError, match=f"^pipeline: {text}"):
        cumem.pipeline(lambda x, y, stream: None, source, dtype="i4")
    (found,) = cumem.chunks(source, dtype="i4", casting="unsafe")
    assert found[1].dtype == np.int32


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


def first_length(src: object) -> int:
    """Return how many rows the first chunk has."""
    found = cumem.chunks(src, depth=1)
    length = len(next(found)[1])
    found.close()
    return length


def test_default_is_64_mib_and_more_of_much_ordinary_memory(
    emulated, monkeypatch
) -> None:
    array = np.zeros((1 << 20, 100), "u1")
    assert first_length(array) == (64 << 20) // 100
    monkeypatch.setattr("cumem.transfers.pipelines._LEAST_CHUNK", 1 << 20)
    monkeypatch.setattr("cumem.transfers.pipelines._MOST_CHUNK", 3 << 19)
    assert first_length(array[: 1 << 19]) == (1 << 20) // 100
    assert first_length(array[: 3 << 18]) == (100 * (3 << 18) // 64) // 100
    assert first_length(array) == (3 << 19) // 100
    assert first_length(cumem.array(array, kind="pinned")) == (1 << 20) // 100


def test_default_is_less_where_that_is_not_free(emulated) -> None:
    array = np.zeros((1 << 18, 100), "u1")
    cumem.set_limit("device", "40 MiB", device=0)
    assert sum(len(chunk) for _, chunk in cumem.chunks(array)) == 1 << 18
    found = cumem.chunks(array)
    assert len(next(found)[1]) == (40 << 20) * 4 // 5 // 5 // 100
    found.close()
    cumem.set_limit("device", None, device=0)


def test_next_chunks_come_while_the_stream_is_at_work(emulated) -> None:
    array = data()
    stream = cumem.Stream()
    with stream:
        found = cumem.chunks(array, 50 * ROW, depth=2)
        # The stream does not finish its work on the first chunk.
        session.shut(stream)
        first = next(found)[1]
        part, second = next(found)
    # The other stream waits only for the copy of the second chunk, and not for `stream`.
    with cumem.Stream() as other:
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
    array[:] = 0  # Nobody reads the source any more.
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
        ((io.BytesIO(b"123"),), TypeError, "not BytesIO"),
        ((io.StringIO("123"),), TypeError, "or an iterable of arrays, not StringIO"),
        (({"a": np.ones(2)},), TypeError, "or an iterable of arrays, not dict"),
        ((["a.bin"],), TypeError, "src must give arrays, not str"),
        (
            ([1, 2],),
            ValueError,
            r"an item of src has no axis to cut: its shape is \(\)",
        ),
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
    del held  # The memory is now cached, and new buffers get it.
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


# -- in, work, out ---------------------------------------------------------------------


def halve(x: cumem.DeviceBuffer, y: cumem.Buffer | None, stream: cumem.Stream) -> None:
    """Copy the first half of each row's items to the output, on whatever device."""
    assert y is not None
    assert cumem.current_stream(0) == stream
    cumem.copy_async(y, x[:, : WIDTH // 2], stream=stream)


OUTPUTS: dict[str, Callable[[], cumem.Buffer | np.ndarray]] = {
    "array": lambda: np.zeros((ROWS, WIDTH // 2), "f4"),
    "strided": lambda: np.zeros((ROWS, WIDTH), "f4")[:, ::2],
    "turned": lambda: np.zeros((WIDTH // 2, ROWS), "f4").T,
    "pinned": lambda: cumem.zeros((ROWS, WIDTH // 2), "f4", "pinned"),
    "device": lambda: cumem.zeros((ROWS, WIDTH // 2), "f4", "device"),
}
STREAMS: dict[str, Callable[[], object]] = {
    "current": lambda: None,
    "one": cumem.Stream,
    "list": lambda: [cumem.Stream(), cumem.Stream()],
    "three": lambda: 3,
}


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("depth", [1, 4])
def test_output_is_the_work_on_the_source(runtime, out, streams, depth: int) -> None:
    array = data()
    target = OUTPUTS[out]()
    given = cumem.pipeline(
        halve, array, target, rows=17, depth=depth, streams=STREAMS[streams]()
    )
    assert given is target
    assert np.array_equal(cumem.asnumpy(target), array[:, : WIDTH // 2])


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_goes_through(runtime, name: str) -> None:
    array = data()
    out = np.zeros((ROWS, WIDTH // 2), "f4")
    cumem.pipeline(halve, SOURCES[name](array), out, "200 KiB")
    assert np.array_equal(out, array[:, : WIDTH // 2])


def test_without_output_what_func_returns_is_kept_in_order(runtime) -> None:
    array = np.arange(10.0)
    found = cumem.pipeline(lambda x, y, _: (y, x.to_numpy().sum()), array, rows=4)
    assert found == [(None, 6.0), (None, 22.0), (None, 17.0)]
    assert cumem.pipeline(lambda *_: 1 / 0, []) == []
    assert cumem.pipeline(lambda *_: 1 / 0, np.ones((0, 4))) == []
    empty = np.ones((0, 2))
    assert cumem.pipeline(lambda *_: 1 / 0, np.ones((0, 4)), empty) is empty


def test_source_may_be_the_output(runtime) -> None:
    array = data()
    before = array.copy()

    def turn(x: cumem.DeviceBuffer, y: object, stream: cumem.Stream) -> None:
        cumem.copy_async(y, x[:, ::-1], stream=stream)

    cumem.pipeline(turn, array, array, rows=7)
    assert np.array_equal(array, before[:, ::-1])


@pytest.mark.skipif(
    not consumers.NUMPY_LETS_WRITE, reason="this NumPy makes read-only arrays by DLPack"
)
def test_numpy_works_on_the_emulated_device(emulated) -> None:
    """NumPy does not wait for streams, so memory that is used again must have no
    pending work.
    """
    array = data()
    out = np.zeros(ROWS)

    def work(x: object, y: object, stream: cumem.Stream) -> None:
        np.from_dlpack(y)[...] = np.from_dlpack(x).sum(axis=1, dtype="f8")

    cumem.pipeline(work, array, out, rows=8, streams=2)
    assert np.array_equal(out, array.sum(axis=1, dtype="f8"))


def test_chunks_come_and_leave_while_a_stream_is_at_work(emulated) -> None:
    """The work on the second chunk never ends.

    The first must leave and the third must come nevertheless.
    """
    streams = [cumem.Stream(), cumem.Stream()]
    array, out = data()[:60], np.zeros((60, WIDTH // 2), "f4")
    chunks: list[bytes] = []

    def work(x: cumem.DeviceBuffer, y: cumem.Buffer, stream: cumem.Stream) -> None:
        halve(x, y, stream)
        if stream == streams[0]:
            chunks.append(x.to_numpy().tobytes())

    session.shut(streams[1])
    thread = threading.Thread(
        target=lambda: cumem.pipeline(work, array, out, streams=streams, rows=10)
    )
    thread.start()
    session.wait_until(lambda: np.array_equal(out[:10], array[:10, : WIDTH // 2]))
    session.wait_until(lambda: len(chunks) == 2)
    assert chunks == [array[:10].tobytes(), array[20:30].tobytes()]
    assert not out[10:20].any()
    testing.gate_open(streams[1])
    thread.join()
    assert np.array_equal(out, array[:, : WIDTH // 2])


@pytest.mark.parametrize(("streams", "depth"), [(None, 1), (None, 3), (3, 2)])
def test_memory_of_a_few_chunks_is_enough(emulated, streams, depth: int) -> None:
    array = np.random.default_rng(1).integers(0, 255, (64, 1 << 20), "u1")
    out = np.zeros((64, 1 << 19), "u1")
    count = 1 if streams is None else streams
    most = (depth + 1 + count) * (2 << 20) + (depth + 1) * (1 << 20)
    cumem.set_limit("device", most, device=0)

    def work(x: cumem.DeviceBuffer, y: cumem.Buffer, stream: cumem.Stream) -> None:
        cumem.copy_async(y, x[:, : 1 << 19], stream=stream)

    cumem.pipeline(work, array, out, rows=2, depth=depth, streams=streams)
    assert np.array_equal(out, array[:, : 1 << 19])
    assert cumem.memory_info(0).live == 0
    # Without rows=, the call finds a size that fits.
    cumem.pipeline(work, array, out, depth=depth, streams=streams)
    cumem.set_limit("device", None, device=0)


def test_streams_take_turns(runtime) -> None:
    streams = [cumem.Stream(), cumem.Stream(), cumem.current_stream(0)]
    found = cumem.pipeline(lambda x, y, s: s, np.ones(5), rows=1, streams=streams)
    assert found == [*streams, *streams[:2]]
    found = cumem.pipeline(lambda x, y, s: s, np.ones(5), rows=1, streams=2)
    assert found[0] == found[2] == found[4] != found[1] == found[3]


def test_output_leaves_after_all_that_its_stream_was_given(emulated) -> None:
    """The output also waits for work that cumem does not see."""
    stream = cumem.Stream()
    out = np.zeros(8)
    is_shut = threading.Event()

    def work(x: cumem.DeviceBuffer, y: cumem.Buffer, stream: cumem.Stream) -> None:
        session.shut(stream)
        is_shut.set()

    thread = threading.Thread(
        target=lambda: cumem.pipeline(work, np.ones(8), out, streams=stream)
    )
    thread.start()
    is_shut.wait()
    session.wait_until_waiting(thread)
    session.let_workers_pass()
    assert not out.any()
    testing.gate_open(stream)
    thread.join()
    assert out.any()  # Fresh memory is poisoned, so the output is not zero.


def test_work_that_cumem_does_not_see_keeps_its_input(emulated) -> None:
    """A kernel that got only the address of its input must find the input unchanged."""
    stream = cumem.Stream()
    # The limit allows one block of 2 MiB.
    cumem.set_limit("device", "3 MiB", device=0)
    is_shut = threading.Event()
    came: list[cumem.Buffer] = []

    def work(x: cumem.DeviceBuffer, y: None, stream: cumem.Stream) -> None:
        session.shut(stream)
        is_shut.set()

    data = np.ones((1, 2 << 20), "u1")
    threads = [
        threading.Thread(target=lambda: cumem.pipeline(work, data, streams=stream)),
        threading.Thread(target=lambda: came.append(cumem.empty_device(2 << 20, "u1"))),
    ]
    for thread in threads:
        thread.start()
        is_shut.wait()
        session.wait_until_waiting(thread)
    assert came == []
    testing.gate_open(stream)
    for thread in threads:
        thread.join()
    assert len(came) == 1
    cumem.set_limit("device", None, device=0)


def test_failure_names_its_chunk_and_the_ones_before_are_done(runtime) -> None:
    array, out = data(), np.zeros((ROWS, WIDTH // 2), "f4")
    count = 0

    def work(x: cumem.DeviceBuffer, y: cumem.Buffer, stream: cumem.Stream) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise RuntimeError("no more")
        halve(x, y, stream)

    before = cumem.memory_info(0).live
    with pytest.raises(RuntimeError, match="no more") as raised:
        cumem.pipeline(work, array, out, rows=20, streams=2)
    assert raised.value.__notes__ == ["in chunk 3, src[60:80]"]
    assert np.array_equal(out[:60], array[:60, : WIDTH // 2])
    assert not out[60:].any()
    del raised
    assert cumem.memory_info(0).live == before


def test_failed_copy_of_a_chunk_before_is_the_one_reported(emulated) -> None:
    out = np.zeros((60, WIDTH // 2), "f4")
    stream = cumem.Stream()
    count = 0

    def work(x: cumem.DeviceBuffer, y: cumem.Buffer, stream: cumem.Stream) -> None:
        nonlocal count
        count += 1
        if count == 1:
            session.let_workers_pass()  # After this, all chunks have come.
            session.shut(stream)  # With the stream shut, no output can leave.
        if count == 3:
            testing.plan_fault("copy_async", 1, 999)
            testing.gate_open(stream)
            raise RuntimeError("comes later")

    with pytest.raises(cumem.CudaError) as raised:
        cumem.pipeline(
            work, data()[:60], out, rows=20, streams=[stream, stream, stream]
        )
    testing.plan_fault(None, 0)
    assert raised.value.code == 999
    assert raised.value.__notes__[-1] in (
        "in chunk 0, src[0:20]",
        "in chunk 1, src[20:40]",
    )
    assert isinstance(raised.value.__context__, RuntimeError)


@pytest.mark.parametrize("what", ["its work", "what comes"])
def test_after_a_failure_nothing_is_in_flight(emulated, what: str) -> None:
    stream, other = cumem.Stream(), cumem.Stream()
    busy = cumem.zeros(1 << 20, "u1")
    held = stream if what == "its work" else other
    failures: list[Exception] = []

    def work(x: cumem.DeviceBuffer, y: None, stream: cumem.Stream) -> None:
        x.fill(1, stream=stream)
        raise RuntimeError("at once")

    def run() -> None:
        try:
            cumem.pipeline(work, [np.ones(5), busy], streams=stream)
        except RuntimeError as error:
            failures.append(error)  # The error keeps its frames alive.

    session.shut(held)
    busy.fill(1, stream=held if held is other else None)
    thread = threading.Thread(target=run)
    thread.start()
    session.wait_until_waiting(thread)
    assert thread.is_alive()
    testing.gate_open(held)
    thread.join()
    assert [str(each) for each in failures] == ["at once"]


def test_interrupted_in_func_nothing_is_in_flight(emulated) -> None:
    array, out = data(), np.zeros((ROWS, WIDTH // 2), "f4")
    stream = cumem.Stream()
    count = 0

    def work(x: cumem.DeviceBuffer, y: cumem.Buffer, stream: cumem.Stream) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        halve(x, y, stream)

    with pytest.raises(KeyboardInterrupt):
        cumem.pipeline(work, array, out, rows=10, streams=stream)
    assert cumem.memory_info(0).live == 0
    assert np.array_equal(out[:20], array[:20, : WIDTH // 2])
    assert not out[20:].any()


# With depth 1 the loop waits for an output, with depth 3 for the work.
@pytest.mark.parametrize("depth", [1, 3])
def test_interrupted_while_it_waits_nothing_is_in_flight(emulated, depth: int) -> None:
    array, out = data(), np.zeros((ROWS, WIDTH // 2), "f4")
    stream = cumem.Stream()

    def interrupt() -> None:
        testing.gate_open(stream)
        raise KeyboardInterrupt

    session.shut(stream)
    with session.on_alarm(interrupt), pytest.raises(KeyboardInterrupt):
        cumem.pipeline(halve, array, out, rows=10, depth=depth, streams=stream)
    assert cumem.memory_info(0).live == 0
    rows = out.any(axis=1).sum()
    assert 10 <= rows < ROWS
    assert np.array_equal(out[:rows], array[:rows, : WIDTH // 2])
    assert not out[rows:].any()


def test_progress_is_reported_and_ends_with_all(runtime) -> None:
    reported: list[tuple[int, int]] = []
    array, out = data(), np.zeros((ROWS, WIDTH // 2), "f4")

    def tell(done: int, total: int) -> None:
        reported.append((done, total))

    cumem.pipeline(halve, array, out, rows=50, progress=tell)
    assert reported == [(50 * ROW * i, ROWS * ROW) for i in range(1, 7)]
    reported.clear()
    cumem.pipeline(halve, np.split(array, 3), out, progress=tell)
    assert reported[-1] == (ROWS * ROW, ROWS * ROW)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)

    def fail(done: int, total: int) -> None:
        raise RuntimeError("the bar is closed")

    with pytest.raises(RuntimeError, match="the bar is closed"):
        cumem.pipeline(halve, array, out, rows=50, progress=fail)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((1, [1.0]), TypeError, "func must be callable, not int"),
        ((print, 3), TypeError, "src must be an array, a file or an iterable"),
        ((print, np.ones(3), np.ones(4)), ValueError, "out has 4 rows, src has 3"),
        ((print, np.ones(3), np.array(1.0)), ValueError, "out has no axis to cut"),
        ((print, np.ones(3), np.float32(1)), ValueError, "out is read-only"),
        ((print, np.ones(3), b"123"), ValueError, "out is read-only"),
        ((print, np.ones(3), 7), TypeError, "int"),
        ((print, np.ones(3), None, 0), ValueError, "nbytes must be at least 1, not 0"),
        ((print, np.ones(3), None, "0 B"), ValueError, "nbytes must be at least 1"),
        ((print, np.ones(3), None, 1.5), TypeError, "nbytes must be a number"),
        ((print, np.ones(3), None, 1, 0), ValueError, "depth must be at least 1"),
        ((print, np.ones(3), None, 1, 1, 0), ValueError, "streams must be at least 1"),
        ((print, np.ones(3), None, 1, 1, []), ValueError, "streams must not be empty"),
        ((print, np.ones(3), None, 1, 1, "x"), TypeError, "str"),
        ((print, np.ones(3), None, 1, 1, None, 7), TypeError, "progress must be"),
    ],
)
def test_pipeline_refuses(emulated, arguments, error, text) -> None:
    with pytest.raises(error, match=text):
        cumem.pipeline(*arguments)


def test_stream_of_another_device_is_refused(emulated) -> None:
    with pytest.raises(ValueError, match="the stream belongs to device 1, not 0"):
        cumem.pipeline(print, np.ones(3), streams=cumem.Stream(device=1))


def test_output_that_an_iterable_fills_is_refused_where_it_ends(emulated) -> None:
    out = np.zeros(5)

    def work(x: cumem.DeviceBuffer, y: cumem.Buffer, stream: cumem.Stream) -> None:
        cumem.copy_async(y, x, stream=stream)

    with pytest.raises(
        ValueError, match="out has 5 rows, src has at least 6"
    ) as raised:
        cumem.pipeline(work, [np.ones(3), np.ones(3)], out)
    assert raised.value.__notes__ == ["in chunk 1, src[3:6]"]
    assert list(out) == [1, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="out has 5 rows, src had 4"):
        cumem.pipeline(work, [np.full(4, 2.0)], out)
    assert list(out) == [2, 2, 2, 2, 0]
    with pytest.raises(ValueError, match="out has 5 rows, src had 0"):
        cumem.pipeline(work, [], out)


def test_fault_sweep_of_pipelines(emulated) -> None:
    array, out = data()[:40], np.zeros((40, WIDTH // 2), "f4")

    def scenario() -> None:
        cumem.pipeline(halve, array, out, rows=10, streams=2)
        assert np.array_equal(out, array[:, : WIDTH // 2])

    swept = faults.sweep(scenario)
    assert {"copy_async", "event_record", "stream_wait_event"} <= set(swept.failed)


# -- several devices -------------------------------------------------------------------


#: This program uses the second device, and checks that the first has no context.
ON_THE_SECOND = """
import ctypes, sys
import numpy
from support import testing
import cumem
from cumem.integrations.torch import offload, offload_activations, restore

def contexts():
    # Return a number with a bit for each device that has a context.
    if cumem.backend() == "emulated":
        return testing.contexts()
    flags, active = ctypes.c_uint(), ctypes.c_int()
    found = 0
    for device in range(2):
        state = ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState
        assert state(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        found |= active.value << device
    return found

def second_alone(what):
    assert contexts() == 0b10, f"the contexts after {what}: {contexts():#b}"

data = (numpy.arange(1 << 22, dtype="f4") % 1000).reshape(-1, 1024)
for kind in ("numpy", "pinned", "managed"):
    src = data if kind == "numpy" else cumem.empty(data.shape, "f4", kind, device=1)
    if src is not data:
        src.numpy()[...] = data
    cumem.explain(cumem.empty_device(5, "f4", device=1), data[0, :5])
    found = [c.to_numpy() for _, c in cumem.chunks(src, "4 MiB", 1)]
    assert numpy.array_equal(numpy.concatenate(found), data)
    second_alone(f"chunks of {kind}")
    out = numpy.zeros_like(data)
    def work(x, y, stream):
        assert x.device == y.device == cumem.Device(1)
        cumem.copy_async(y, x, stream=stream)
    cumem.pipeline(work, src, out, nbytes="4 MiB", device=1)
    assert numpy.array_equal(out, data)
    short = [c for _, c in cumem.chunks(src, "4 MiB", 1, dtype="f2")]
    assert numpy.array_equal(short[0].to_numpy(), data[: len(short[0])].astype("f2"))
    second_alone(f"pipeline and dtype of {kind}")
with cumem.Workspace("1 MiB", "device", device=1) as space:
    assert space.empty(100, "u1").device == cumem.Device(1)
managed = cumem.empty(data.shape, "f4", "managed", device=1)
managed.numpy()[...] = data
for _, tile in cumem.tiles(managed, "4 MiB", 1):
    tile.fill(1, stream=cumem.current_stream(1))
cumem.current_stream(1).synchronize()
assert (managed.numpy() == 1).all()
with managed.on(1):
    assert managed.prefetch_location == cumem.Device(1)
cumem.prefetch_pages([managed], 1)
second_alone("managed memory")
for batch in cumem.prefetch([{"x": data[:100]}] * 5, device=1):
    x = batch["x"]
    if "torch" in sys.modules:
        assert x.device.index == 1
second_alone("prefetch")
if "--torch" in sys.argv:
    import torch
    torch.cuda.set_device(1)
    layer = torch.nn.Linear(512, 512, device="cuda:1")
    weight = layer.weight.detach().cpu()
    with offload_activations(min_nbytes=0):
        loss = torch.nn.functional.gelu(layer(torch.ones(64, 512, device="cuda:1"))).sum()
    loss.backward()
    assert layer.weight.grad.device.index == 1
    offload(layer)
    assert layer.weight.device.type == "cpu"
    restore(layer)
    assert layer.weight.device.index == 1
    assert torch.equal(layer.weight.detach().cpu(), weight)
second_alone("PyTorch")
"""


@pytest.mark.hooks
@pytest.mark.parametrize("library", ["", "--torch"])
def test_helpers_of_the_second_gpu_leave_the_first_alone(runtime, library: str) -> None:
    if cumem.device_count() < 2:
        pytest.skip("this test needs two GPUs")
    if library and runtime.emulated:
        pytest.skip("this test needs PyTorch on a GPU")
    if library:
        pytest.importorskip("torch")
    shown = {"CUMEM_BACKEND": runtime.name, "CUMEM_EMULATED_DEVICES": "2"}
    made = programs.run("-c", ON_THE_SECOND, library, **shown)
    assert made.returncode == 0, made.stderr
