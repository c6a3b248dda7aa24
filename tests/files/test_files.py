# SPDX-License-Identifier: Apache-2.0
"""Tests of bytes, positions and order when files are read to and written from memory.

Random reads and writes are compared with NumPy's. Hooks count the calls of the
operating system, and pretend that a file is or is not in the page cache.
"""

from __future__ import annotations

import errno
import gzip
import io
import itertools
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.strategies import (
    KINDS,
    as_view,
    basic_indices,
    dtypes,
    kinds,
    places,
    random_array,
    same_bytes,
    shapes,
)

import cumem

# The C core and the file formats decide what a file holds, so these tests show the same
# under every version of Python.
pytestmark = pytest.mark.any_python

testing = session.testing
PLACES = [*KINDS, "numpy"]
BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
MIB = 1 << 20
#: This length exceeds each unit of a read: parts of 512 KiB, chunks of 4 MiB and spans
#: of 32 MiB.
LONG = 36 * MIB + 4097


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file of LONG random bytes, which no test of this module changes."""
    path = tmp_path_factory.mktemp("files") / "long"
    np.random.default_rng(0).integers(0, 256, LONG, "u1").tofile(path)
    return path


@pytest.fixture(scope="module")
def long_bytes(long_file: Path) -> np.ndarray:
    return np.fromfile(long_file, "u1")


@pytest.fixture(autouse=True)
def plain_calls() -> Iterator[None]:
    """End the plan of faults that a test may have made."""
    yield
    testing.file_plan()


def blank(place: str, shape: object, dtype: str = "u1", order: str = "C") -> object:
    """Return zeros in memory of `place`."""
    return values.put(np.zeros(shape, dtype), place, order)  # type: ignore[arg-type]


# -- against NumPy -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_fromfile_and_tofile_equal_numpy(backend: str, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    with session.opened(backend):

        @given(st.data(), kinds, dtypes, st.integers(0, 50), st.sampled_from([0, 1, 9]))
        def check(data, kind, dtype, length, offset) -> None:
            array = random_array((length,), dtype, 1)
            direct = data.draw(st.sampled_from([True, False, "auto"]))
            count = data.draw(st.sampled_from([-1, length // 2]))
            tail = b"tail"[: dtype.itemsize // 2] if count >= 0 else b""
            theirs.write_bytes(bytes(offset) + array.tobytes() + tail)
            buffer = cumem.fromfile(
                theirs, dtype, count, offset=offset, kind=kind, direct=direct
            )
            expected = np.fromfile(theirs, dtype, count, offset=offset)
            assert buffer.dtype == dtype
            assert buffer.kind == kind
            assert same_bytes(values.get(buffer), expected)
            cumem.tofile(ours, buffer, direct=direct)
            assert ours.read_bytes() == expected.tobytes()

        check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranges_of_any_views_equal_numpy(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = np.random.default_rng(2).integers(0, 256, 100_000, "u1")
    with session.opened(backend):

        @given(st.data(), st.booleans())
        def check(data, direct) -> None:
            content.tofile(path)
            after = content.copy()
            ranges, targets = [], []
            for place in data.draw(st.lists(places, max_size=4)):
                dtype, shape = data.draw(dtypes), data.draw(shapes)
                whole = random_array(shape, dtype, 3)
                memory = values.put(whole, place, data.draw(st.sampled_from("CF")))
                index = as_view(data.draw(basic_indices(shape)))
                part = whole[index]
                offset = data.draw(st.integers(0, len(content) - part.nbytes))
                raw = content[offset : offset + part.nbytes]
                whole[index] = raw.view(dtype).reshape(part.shape)
                ranges.append((offset, memory[index]))
                targets.append((memory, whole, index))
            cumem.read_ranges(path, ranges, direct=direct)
            for memory, whole, _ in targets:
                assert same_bytes(values.get(memory), whole)
            end = 0
            writes = []
            for memory, whole, index in targets:
                end += data.draw(st.integers(0, 5000))
                writes.append((end, memory[index]))
                raw = np.frombuffer(whole[index].tobytes(), "u1")
                after[end : end + len(raw)] = raw
                end += len(raw)
            cumem.write_ranges(path, writes, direct=direct)
            assert (np.fromfile(path, "u1") == after).all()

        check()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("offset", [0, 4096, 5])
def test_long_file_is_read_and_written_whole(
    runtime, long_file, long_bytes, tmp_path, place, direct, offset
) -> None:
    target = blank(place, LONG - offset)
    testing.file_plan()
    assert cumem.fromfile(long_file, out=target, offset=offset, direct=direct) is target
    _, direct_count, _, opened = testing.file_counts()
    assert (direct_count > 0) == direct
    assert opened == 0
    assert (values.get(target) == long_bytes[offset:]).all()
    path = tmp_path / "copy"
    cumem.tofile(path, target, offset=offset, direct=direct)
    assert (np.fromfile(path, "u1", offset=offset) == long_bytes[offset:]).all()
    assert not np.fromfile(path, "u1", offset).any()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[:, ::2],
        lambda a: a[::-1, 3:],
        lambda a: a[:, :2048],
        lambda a: a[2::3, ::-5],
    ],
    ids=["transposed", "every-second", "reversed", "rows", "both"],
)
def test_long_strided_memory_is_taken_in_c_order(
    runtime, long_file, long_bytes, tmp_path, place, view
) -> None:
    memory = blank(place, (1100, 2100), "<i4")
    expected = np.zeros((1100, 2100), "<i4")
    part = view(expected)
    part[...] = long_bytes[3 : 3 + part.nbytes].view("<i4").reshape(part.shape)
    cumem.read_ranges(long_file, [(3, view(memory))])
    assert (values.get(memory) == expected).all()
    path = tmp_path / "copy"
    cumem.tofile(path, view(memory))
    assert path.read_bytes() == part.tobytes()


def test_memory_of_all_chunks_is_locked_by_one_call(
    emulated, long_file, long_bytes
) -> None:
    target = cumem.empty(len(long_bytes), "u1")
    session.testing.plan_fault(None, 0)
    cumem.fromfile(long_file, out=target)
    assert session.testing.fault_count("host_register") == 1
    assert (values.get(target) == long_bytes).all()


def test_many_ranges_of_all_sizes_go_in_one_call(
    runtime, long_file, long_bytes
) -> None:
    rng = np.random.default_rng(4)
    sizes = [int(2 ** rng.uniform(0, 22)) for _ in range(300)]
    offsets = [int(rng.integers(0, LONG - n)) for n in sizes]
    memory = [blank(PLACES[i % 5], n) for i, n in enumerate(sizes)]
    cumem.read_ranges(long_file, zip(offsets, memory, strict=True))
    for offset, target, n in zip(offsets, memory, sizes, strict=True):
        assert (values.get(target) == long_bytes[offset : offset + n]).all()


def test_neighbouring_ranges_may_share_pages(runtime, long_file, long_bytes) -> None:
    whole = blank("device", 10 * MIB)
    edges = [0, 1, 4095, 4097, 3 * MIB + 7, 9 * MIB, 10 * MIB]
    pairs = [(a + 13, whole[a:b]) for a, b in itertools.pairwise(edges)]
    for direct in (True, False):
        whole.fill(0)
        cumem.read_ranges(long_file, pairs, direct=direct)
        assert (values.get(whole) == long_bytes[13 : 13 + 10 * MIB]).all()


def test_one_call_serves_several_devices(runtime, long_file, long_bytes) -> None:
    count = cumem.device_count()
    memory = [cumem.empty(6 * MIB + i, "u1", device=i % count) for i in range(4)]
    cumem.read_ranges(long_file, [(i * 7 * MIB, m) for i, m in enumerate(memory)])
    for i, m in enumerate(memory):
        assert (values.get(m) == long_bytes[i * 7 * MIB :][: m.size]).all()
    stream = cumem.Stream(device=0)
    if count > 1:
        with pytest.raises(ValueError, match="stream is of device 0"):
            cumem.read_ranges(long_file, [(0, memory[1])], stream=stream)


# -- what names a file --------------------------------------------------------------------


def test_paths_of_every_sort(runtime, tmp_path) -> None:
    path = tmp_path / "file"
    for name in (path, str(path), os.fsencode(path)):
        cumem.tofile(name, np.arange(5.0))
        assert values.get(cumem.fromfile(name)).tolist() == [0, 1, 2, 3, 4]


def test_file_is_read_from_its_position_on(runtime, tmp_path) -> None:
    path = tmp_path / "file"
    np.arange(20, dtype="i2").tofile(path)
    for buffering in (0, -1):
        with path.open("rb", buffering) as file:
            assert file.read(2) == b"\0\0"
            part = cumem.fromfile(file, "i2", 3, offset=4)
            assert values.get(part).tolist() == [3, 4, 5]
            assert file.tell() == 12
            assert file.read(2) == b"\6\0"
            rest = cumem.fromfile(file, "i2", kind="pinned")
            assert rest.numpy().tolist() == list(range(7, 20))
            assert file.tell() == 40
            assert cumem.fromfile(file, "i2").size == 0
            out = np.zeros(2, "i2")
            cumem.read_ranges(file, [(2, out)])
            assert out.tolist() == [1, 2]
            assert file.tell() == 40


def test_file_is_written_from_its_position_on(runtime, tmp_path) -> None:
    path = tmp_path / "file"
    with path.open("w+b") as file:
        file.write(b"head")
        cumem.tofile(file, cumem.array(np.arange(3, dtype="u1")))
        assert file.tell() == 7
        file.write(b"tail")
        cumem.tofile(file, b"x", offset=1)
        file.seek(0)
        assert file.read() == b"head\0\1\2tail\0x"
    with path.open("ab") as file:
        cumem.tofile(file, b"end")
    assert path.read_bytes().endswith(b"\0xend")


def test_descriptor_keeps_its_position(runtime, tmp_path) -> None:
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, b"0123456789")
        cumem.tofile(fd, b"ab", offset=4)
        assert os.lseek(fd, 0, os.SEEK_CUR) == 10
        assert values.get(cumem.fromfile(fd, "S1")).tobytes() == b"0123ab6789"
        assert os.lseek(fd, 0, os.SEEK_CUR) == 10
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        cumem.fromfile(fd, "u1", 1)


def test_temporary_files_are_files(runtime) -> None:
    with tempfile.NamedTemporaryFile() as file:
        cumem.tofile(file, np.arange(4))
        file.seek(8)
        assert values.get(cumem.fromfile(file, int)).tolist() == [1, 2, 3]
    with tempfile.TemporaryFile() as file:
        cumem.tofile(file, b"abc")
        assert file.tell() == 3


def test_what_is_no_binary_file_is_refused(runtime, tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"123")
    with gzip.open(tmp_path / "packed", "wb") as packed, path.open() as text:
        for file in (packed, text, io.BytesIO(b"123"), None, 1.5, True, []):
            with pytest.raises(TypeError, match="file must be a path"):
                cumem.fromfile(file, "u1")
            with pytest.raises(TypeError, match="file must be a path"):
                cumem.tofile(file, b"123")


def test_tofile_replaces_and_offset_keeps(runtime, tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    inode = path.stat().st_ino
    cumem.tofile(path, b"ab", offset=0)
    assert path.read_bytes() == b"ab23456789"
    cumem.tofile(path, b"xyz", fsync=True)
    assert path.read_bytes() == b"xyz"
    cumem.write_ranges(path, [(5, b"!"), (1, b"Y")], fsync=True)
    assert path.read_bytes() == b"xYz\0\0!"
    assert path.stat().st_ino == inode
    cumem.tofile(path, b"")
    assert path.read_bytes() == b""


# -- arguments ----------------------------------------------------------------------------


def test_shape_may_leave_one_length_open(runtime, tmp_path) -> None:
    path = tmp_path / "file"
    np.arange(26, dtype="f4").tofile(path)
    buffer = cumem.fromfile(path, "f4", shape=(-1, 2, 3), offset=8)
    assert buffer.shape == (4, 2, 3)
    assert (values.get(buffer).ravel() == np.arange(2, 26)).all()
    assert cumem.fromfile(path, "f4", shape=5, offset=8).shape == (5,)
    assert cumem.fromfile(path, "f4", shape=()).shape == ()
    assert cumem.fromfile(path, "f4", shape=(0, -1)).shape == (0, 0)
    assert cumem.fromfile(path, "f4", offset=104).shape == (0,)
    with pytest.raises(ValueError, match="count and shape"):
        cumem.fromfile(path, "f4", 3, shape=3)
    with pytest.raises(ValueError, match="only one length of shape can be -1"):
        cumem.fromfile(path, "f4", shape=(-1, -1))


def test_open_length_must_leave_no_bytes_over(runtime, tmp_path) -> None:
    path = tmp_path / "file"
    np.arange(1000, dtype="f4").tofile(path)
    rows = (
        rf"shape=\(-1, 7\): the 4000 bytes of '{path}' at offset 0 .* 28: 24 are left"
    )
    with pytest.raises(ValueError, match=rows):
        cumem.fromfile(path, "f4", shape=(-1, 7))
    with pytest.raises(ValueError, match=r"3998 bytes of .* at offset 2 .* 2 are left"):
        cumem.fromfile(path, "f4", shape=-1, offset=2)
    with pytest.raises(ValueError, match="multiple of 160: 120 are left over"):
        cumem.fromfile(path, "f4", shape=(5, -1, 8), offset=40)
    with path.open("rb") as file:
        file.seek(4)
        with pytest.raises(ValueError, match=r"at offset 8 .* 16 are left over"):
            cumem.fromfile(file, "f4", shape=(7, -1), offset=4)
        assert file.tell() == 4
    assert cumem.fromfile(path, "f4", shape=(-1, 7), offset=24).shape == (142, 7)
    assert cumem.fromfile(path, "f4", shape=(-1, 7), offset=4000).shape == (0, 7)
    with pytest.raises(ValueError, match="count=999 reads"):
        cumem.fromfile(path, "f4", offset=2)
    assert cumem.fromfile(path, "f4", 7, offset=2).shape == (7,)
    assert cumem.fromfile(path, "f4", shape=(3, 7)).shape == (3, 7)


def test_arguments_that_make_no_sense_are_refused(runtime, tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    out = cumem.zeros(4, "f4")
    for bad in ({"count": 4}, {"shape": 4}, {"device": 0}):
        with pytest.raises(ValueError, match="together with out"):
            cumem.fromfile(path, out=out, **bad)
    with pytest.raises(ValueError, match="dtype"):
        cumem.fromfile(path, "f8", out=out)
    with pytest.raises(ValueError, match="no bytes"):
        cumem.fromfile(path, "V0")
    with pytest.raises(ValueError, match="direct"):
        cumem.fromfile(path, direct="always")
    with pytest.raises(ValueError, match="offset"):
        cumem.fromfile(path, "u1", 1, offset=-1)
    with pytest.raises(ValueError, match="63 bits"):
        cumem.read_ranges(path, [(2**63 - 1, out)])
    with pytest.raises(ValueError, match="read-only"):
        cumem.read_ranges(path, [(0, b"123")])
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        cumem.read_ranges(path, [(0, frozen)])
    for pair in (1, (1,), (1, out, 2)):
        with pytest.raises(TypeError, match="a pair of an offset and memory"):
            cumem.read_ranges(path, [pair])
    for source in ([1, 2], 3, "text"):
        with pytest.raises(TypeError, match="the source must be"):
            cumem.tofile(tmp_path / "new", source)
    shared = np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (0, 8))
    with pytest.raises(ValueError):
        cumem.read_ranges(path, [(0, shared)])
    cumem.write_ranges(path, [(0, shared)])
    cumem.read_ranges(path, [])


def test_environment_says_whether_to_go_past_the_page_cache(
    runtime, long_file, monkeypatch
) -> None:
    out = blank("numpy", LONG)
    for text, expected in (("1", True), ("0", False), ("true", True), ("auto", False)):
        monkeypatch.setenv("CUMEM_DIRECT", text)
        testing.file_plan()
        cumem.fromfile(long_file, out=out)
        assert (testing.file_counts()[1] > 0) == expected
    monkeypatch.setenv("CUMEM_DIRECT", "perhaps")
    with pytest.raises(ValueError, match="CUMEM_DIRECT"):
        cumem.fromfile(long_file, out=out)


# -- the page cache -----------------------------------------------------------------------


def test_what_is_long_and_cold_goes_past_the_page_cache(
    runtime, long_file, long_bytes
) -> None:
    memory = [blank(place, LONG) for place in ("device", "numpy")]
    pairs = [(0, m) for m in memory]
    testing.file_plan(is_cold=True)
    # These are 72 MiB, more than the limit above which reads are direct.
    cumem.read_ranges(long_file, pairs)
    count, direct, advised, opened = testing.file_counts()
    # All reads are direct except those of the short pieces at the ends.
    assert count - 2 <= direct > 0
    assert advised <= 2
    assert opened == 0
    for m in memory:
        assert (values.get(m) == long_bytes).all()
    testing.file_plan(is_cold=True, no_direct=True)
    cumem.read_ranges(long_file, pairs)
    count, direct, advised, _ = testing.file_counts()
    assert direct == 0
    # Each part is at most 1 MiB, and gets its own advice.
    assert advised >= 2 * LONG // (1 << 20)
    testing.file_plan(is_cold=True)
    cumem.read_ranges(long_file, pairs[:1])  # These are 36 MiB, less than the limit.
    assert testing.file_counts()[1] == 0
    testing.file_plan()
    cumem.read_ranges(long_file, pairs)  # Now the file is in the cache.
    assert testing.file_counts()[1:3] == (0, 0)


@pytest.mark.parametrize(
    ("nbytes", "most"), [(4 << 20, 256 << 10), (36 << 20, 1 << 20)]
)
def test_short_files_are_shared_out_in_small_parts(
    runtime, long_file, long_bytes, nbytes: int, most: int
) -> None:
    target = cumem.zeros(nbytes, "u1")
    testing.file_plan()
    cumem.fromfile(long_file, out=target)
    assert testing.file_counts()[0] >= nbytes // most
    assert (values.get(target) == long_bytes[:nbytes]).all()


@pytest.mark.parametrize("place", ["device", "numpy"])
@pytest.mark.parametrize("error", ["EINVAL", "EFAULT"])
def test_refused_direct_reads_are_done_the_other_way(
    runtime, long_file, long_bytes, place, error
) -> None:
    target = blank(place, LONG)
    testing.file_plan(nth=1, error=getattr(errno, error))
    cumem.fromfile(long_file, out=target, direct=True)
    assert (values.get(target) == long_bytes).all()
    count, direct, _, opened = testing.file_counts()
    assert direct < count
    assert opened == 0


# -- order --------------------------------------------------------------------------------


def test_reading_comes_after_work_on_the_target(
    emulated, long_file, long_bytes
) -> None:
    for kind in ("device", "managed", "mapped"):
        stream = cumem.Stream()
        target = blank(kind, 9 * MIB)
        done = threading.Event()

        def read(target=target, done=done) -> None:
            cumem.fromfile(long_file, out=target)
            done.set()

        with session.gate(stream):
            target.fill(7, stream=stream)
            thread = threading.Thread(target=read)
            thread.start()
            session.wait_until_waiting(thread)
            assert not done.is_set()
        thread.join()
        assert (values.get(target) == long_bytes[: 9 * MIB]).all()


def test_writing_comes_after_work_on_the_source(emulated, tmp_path) -> None:
    path = tmp_path / "file"
    for kind in KINDS:
        stream = cumem.Stream()
        source = blank(kind, 9 * MIB)
        ones = cumem.full(9 * MIB, 1, "u1")
        with session.gate(stream):
            handle = cumem.copy_async(source, ones, stream=stream)
            thread = threading.Thread(target=cumem.tofile, args=(path, source))
            thread.start()
        thread.join()
        handle.wait()
        assert (np.fromfile(path, "u1") == 1).all()
        assert path.stat().st_size == 9 * MIB


def test_a_captured_stream_is_refused(emulated, long_file) -> None:
    stream = cumem.Stream()
    target = blank("device", 1000)
    testing.set_capturing(stream, True)
    try:
        with pytest.raises(cumem.CudaError, match="being captured"):
            cumem.fromfile(long_file, out=target, stream=stream)
    finally:
        testing.set_capturing(stream, False)
    cumem.fromfile(long_file, out=target, stream=stream)


def test_several_threads_share_the_readers(runtime, long_file, long_bytes) -> None:
    targets = [blank(place, LONG) for place in ("device", "numpy", "pinned", "device")]
    threads = [
        threading.Thread(target=cumem.read_ranges, args=(long_file, [(0, t)]))
        for t in targets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for target in targets:
        assert (values.get(target) == long_bytes).all()
