# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of the file functions must say what is wrong, and leave the files alone.

Each test compares the message, and the contents and times of all files before and after
the call.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import session, values

import cumem

BAD_SOURCES = [
    [1, 2],
    3,
    "text",
    None,
    np.float64(3),
    object(),
    {"a": 1},
    np.array([object()]),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make a file of 100 bytes with the values 0 to 99."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    return path


@contextlib.contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Check that the block changes no file of the folder, and adds and removes none."""

    def look() -> dict[str, tuple[bytes, int]]:
        return {
            p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()
        }

    before = look()
    yield
    assert look() == before


# -- sources ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["new", "file"])
@pytest.mark.parametrize("bad", BAD_SOURCES, ids=lambda bad: type(bad).__name__)
def test_bad_source_is_called_so_and_no_file_is_made(
    emulated, path, tmp_path, name, bad
) -> None:
    with untouched(tmp_path):
        with pytest.raises(TypeError) as caught:
            cumem.tofile(tmp_path / name, bad)
        if not isinstance(bad, np.ndarray):
            assert "buf: the source must be" in str(caught.value)
        with pytest.raises(TypeError) as caught:
            cumem.write_ranges(tmp_path / name, [(0, b"good"), (8, bad)])
        if not isinstance(bad, np.ndarray):
            assert "ranges[1]: the source must be" in str(caught.value)


def test_other_wrong_arguments_make_no_file(emulated, path, tmp_path) -> None:
    closed = cumem.zeros(3)
    closed.free()
    new = tmp_path / "new"
    with untouched(tmp_path):
        for call, error, match in (
            (lambda: cumem.tofile(new, closed), ValueError, "freed|closed"),
            (lambda: cumem.tofile(new, b"1", direct="x"), ValueError, "direct"),
            (lambda: cumem.tofile(new, b"1", offset=-1), ValueError, "offset.*-1"),
            (lambda: cumem.tofile(new, b"1", offset=1.5), TypeError, "offset.*float"),
            (lambda: cumem.tofile(new, b"1", stream="x"), TypeError, "stream"),
            (lambda: cumem.write_ranges(new, 5), TypeError, "ranges.*int"),
            (lambda: cumem.write_ranges(new, [5]), TypeError, "a pair"),
            (
                lambda: cumem.write_ranges(new, [(0, b"1"), (-1, b"1")]),
                ValueError,
                r"ranges\[1\]: offset must not be negative, not -1",
            ),
            (
                lambda: cumem.write_ranges(new, [("a", b"1")]),
                TypeError,
                r"ranges\[0\]: offset must be an int, not str",
            ),
        ):
            with pytest.raises(error, match=match):
                call()


def test_ranges_that_fail_to_come_make_no_file(emulated, path, tmp_path) -> None:
    def ranges() -> Iterator[tuple[int, bytes]]:
        yield 0, b"1"
        raise RuntimeError("no more")

    with untouched(tmp_path), pytest.raises(RuntimeError, match="no more"):
        cumem.write_ranges(tmp_path / "new", ranges())


def test_file_that_cannot_be_opened_lets_the_source_go(emulated, tmp_path) -> None:
    source = cumem.zeros(10)
    with pytest.raises(FileNotFoundError):
        cumem.tofile(tmp_path / "none" / "file", source)
    with pytest.raises(IsADirectoryError):
        cumem.tofile(tmp_path, source)
    source.free()


# -- targets ------------------------------------------------------------------------------


def test_kind_must_be_that_of_out(emulated, path) -> None:
    for place in ("device", "pinned", "mapped", "managed"):
        out = cumem.zeros(100, "u1", kind=place)
        assert cumem.fromfile(path, out=out, kind=place) is out
        for kind in {"device", "pinned", "mapped", "managed"} - {place}:
            with pytest.raises(ValueError, match=f"kind.*{kind}.*out.*{place}"):
                cumem.fromfile(path, out=out, kind=kind)
    with pytest.raises(ValueError, match=r"kind.*pinned.*out.*pageable"):
        cumem.fromfile(path, out=np.zeros(3), kind="pinned")
    with pytest.raises(ValueError, match="kind"):
        cumem.fromfile(path, kind="fast")
    assert cumem.fromfile(path, "u1").kind == "device"


def test_arguments_that_out_makes_meaningless_are_named(emulated, path) -> None:
    out = cumem.zeros(4, "u1")
    for bad in ({"count": 4}, {"shape": 4}, {"device": 0}, {"pool": cumem.Pool()}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} .*together with out"):
            cumem.fromfile(path, out=out, **bad)
    with pytest.raises(ValueError, match=r"dtype float32.*out.*uint8"):
        cumem.fromfile(path, "f4", out=out)


def test_target_whose_elements_share_memory_is_refused(emulated, path) -> None:
    row = np.zeros(3, "u1")
    shared = np.lib.stride_tricks.as_strided(row, (2, 3), (0, 1))
    message = "elements share memory: stride 0 along axis 0"
    with pytest.raises(ValueError, match=f"^out: {message}"):
        cumem.fromfile(path, out=shared)
    with pytest.raises(ValueError, match=rf"^ranges\[1\]: {message}"):
        cumem.read_ranges(path, [(0, row), (3, shared)])
    assert not row.any()  # The refused calls have read nothing.
    cumem.fromfile(path, out=shared[:1], offset=5)
    assert row.tolist() == [5, 6, 7]
    cumem.fromfile(path, out=shared[:, :0])


def test_what_is_no_target_is_called_so(emulated, path) -> None:
    for bad in (3, "text", object(), np.float64(3), [1]):
        with pytest.raises(TypeError, match=r"^out: the target must be"):
            cumem.fromfile(path, out=bad)
        with pytest.raises(TypeError, match=r"^ranges\[0\]: the target must be"):
            cumem.read_ranges(path, [(0, bad)])
    with pytest.raises(ValueError, match=r"^out: .*read-only"):
        cumem.fromfile(path, out=b"123")
    with pytest.raises(ValueError, match=r"^ranges\[1\]: the target .*read-only"):
        cumem.read_ranges(path, [(0, bytearray(1)), (0, b"123")])


# -- where and how much -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_offset_past_the_end_is_an_eoferror(emulated, path, kind) -> None:
    assert cumem.fromfile(path, "u1", offset=100, kind=kind).size == 0
    for more in ({}, {"count": 0}, {"count": 4}, {"shape": (-1, 2)}):
        with pytest.raises(EOFError, match=r"offset=101.*100 bytes") as caught:
            cumem.fromfile(path, "u1", offset=101, kind=kind, **more)
        assert caught.value.filename == str(path)
        assert caught.value.offset == 100
    with pytest.raises(EOFError, match=r"offset=200.*100 bytes"):
        cumem.fromfile(path, out=cumem.zeros(0, "u1"), offset=200)
    with path.open("rb") as file:
        file.seek(60)
        with pytest.raises(EOFError, match=r"offset=50 from position 60.*100 bytes"):
            cumem.fromfile(file, "u1", offset=50)
        assert file.tell() == 60


def test_more_items_than_there_are_is_an_eoferror_before_memory_is_made(
    emulated, path
) -> None:
    before = cumem.stats()
    for more, match in (
        ({"count": 26}, "count=26: .* ends early: 100 of the 104 bytes at offset 0"),
        ({"count": 10**15}, "count=10+: .* 100 of the 40+ bytes"),
        ({"count": 2, "offset": 95}, "count=2: .* 5 of the 8 bytes at offset 95"),
        ({"shape": (3, 9)}, r"shape=\(3, 9\): .* 100 of the 108 bytes"),
        ({"shape": 26}, r"shape=26: .* 100 of the 104 bytes"),
    ):
        with pytest.raises(EOFError, match=match) as caught:
            cumem.fromfile(path, "f4", **more)
        assert caught.value.filename == str(path)
        assert caught.value.offset == 100
    assert cumem.stats() == before


def test_negative_numbers_are_refused(emulated, path) -> None:
    with pytest.raises(ValueError, match=r"count must be .*-1.*, not -2"):
        cumem.fromfile(path, "u1", -2)
    with pytest.raises(ValueError, match="offset must not be negative, not -1"):
        cumem.fromfile(path, "u1", offset=-1)
    with path.open("rb") as file:
        file.seek(10)
        with pytest.raises(ValueError, match="offset must not be negative, not -1"):
            cumem.fromfile(file, "u1", offset=-1)
    with pytest.raises(ValueError, match=r"shape.*-2"):
        cumem.fromfile(path, "u1", shape=(-2, 3))
    with pytest.raises(TypeError, match="count must be an int, not float"):
        cumem.fromfile(path, "u1", 1.5)
    with pytest.raises(TypeError, match="offset must be an int, not str"):
        cumem.fromfile(path, "u1", offset="4")


def test_empty_and_made_up_files_are_told_apart(emulated, tmp_path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert cumem.fromfile(path, "u1").size == 0
    with pytest.raises(EOFError, match=r"count=1: .* 0 of the 1 bytes"):
        cumem.fromfile(path, "u1", 1)
    with pytest.raises(EOFError, match=r"offset=1 .* 0 bytes"):
        cumem.fromfile(path, "u1", offset=1)
    with pytest.raises(ValueError, match="no size"):
        cumem.fromfile("/proc/version", "u1")
    assert cumem.fromfile("/proc/version", "S1", 5).size == 5


# -- what has no offsets ------------------------------------------------------------------


def calls(file: object) -> list[object]:
    """Return a call of each function for files, all with the same `file`."""
    return [
        lambda: cumem.fromfile(file, "u1"),
        lambda: cumem.fromfile(file, "u1", 4),
        lambda: cumem.fromfile(file, out=bytearray(4)),
        lambda: cumem.read_ranges(file, [(0, bytearray(4))]),
        lambda: cumem.tofile(file, b"1234"),
        lambda: cumem.write_ranges(file, [(0, b"1234")]),
    ]


def test_fifo_is_refused_and_never_waited_for(emulated, tmp_path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    for call in calls(path):
        with pytest.raises(OSError, match=r"a FIFO or pipe has no offsets.*fifo"):
            call()


def test_pipes_and_sockets_are_refused(emulated, tmp_path) -> None:
    read, write = os.pipe()
    try:
        for call in calls(read)[:4] + calls(write)[4:]:
            with pytest.raises(OSError, match="a FIFO or pipe has no offsets"):
                call()
        with os.fdopen(os.dup(read), "rb") as file:
            for call in calls(file)[:4]:
                with pytest.raises(OSError, match="a FIFO or pipe has no offsets"):
                    call()
    finally:
        os.close(read)
        os.close(write)
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fsencode(path))
        for file in (path, server.fileno()):
            for call in calls(file):
                with pytest.raises(OSError, match="a socket has no offsets"):
                    call()


def test_directories_are_refused(emulated, tmp_path) -> None:
    for call in calls(tmp_path):
        with pytest.raises(IsADirectoryError):
            call()
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        for call in calls(fd):
            with pytest.raises(IsADirectoryError):
                call()
    finally:
        os.close(fd)


def test_other_files_are_waited_for_as_ever(emulated) -> None:
    assert not values.get(cumem.fromfile("/dev/zero", "u1", 10)).any()
    cumem.tofile("/dev/null", b"1234")


@pytest.mark.parametrize("by", ["file", "unbuffered", "descriptor"])
def test_files_open_for_the_other_direction_are_named(emulated, path, by) -> None:
    buffering = 0 if by == "unbuffered" else -1
    calls = {
        "reading": (
            lambda file: cumem.fromfile(file, "u1"),
            lambda file: cumem.fromfile(file, out=np.zeros(3, "u1")),
            lambda file: cumem.read_ranges(file, [(0, np.zeros(3, "u1"))]),
        ),
        "writing": (
            lambda file: cumem.tofile(file, b"123"),
            lambda file: cumem.write_ranges(file, [(0, b"123")]),
        ),
    }
    for what, functions in calls.items():
        for function in functions:
            with path.open("ab" if what == "reading" else "rb", buffering) as file:
                named = file.fileno() if by == "descriptor" else file
                with pytest.raises(OSError, match=f"not open for {what}") as caught:
                    function(named)
                assert caught.value.errno == errno.EBADF
                name = str(path) if by != "descriptor" else named
                assert str(caught.value.filename) == str(name)
    assert path.stat().st_size == 100


def save(path: Path) -> None:
    cumem.save_safetensors(path, {"a": np.arange(9)})


def append(path: Path) -> None:
    with path.open("ab") as file:
        cumem.tofile(file, np.arange(9))


@pytest.mark.parametrize(
    "call",
    [
        lambda path: cumem.fromfile(path, "u1", kind="pinned"),
        lambda path: cumem.tofile(path, np.arange(9)),
        save,
        lambda path: cumem.load_safetensors(path, kind="pinned"),
        append,
    ],
    ids=["fromfile", "tofile", "save", "load", "append"],
)
def test_interrupt_after_an_opening_leaves_no_descriptor(
    emulated, tmp_path, call
) -> None:
    """An interrupt just after a file was opened must not leave it open.

    Python looks for Ctrl-C when a C function such as `os.open()` returns. If Python raises
    an exception there, nobody receives the descriptor. The profile function raises at these
    places.
    """
    path = tmp_path / "a"
    save(path)
    call(path)
    save(path)
    ours = os.path.dirname(cumem.__file__)
    returned = 0

    def call_at_event(frame: Any, event: str, function: Any) -> None:
        nonlocal returned
        if event == "c_return" and frame.f_code.co_filename.startswith(ours):
            returned += function in (os.open, open, next)
            if returned == nth and function in (os.open, open, next):
                raise session.AlarmError

    before = set(os.listdir("/proc/self/fd"))
    for nth in (1, 2, 3):
        returned = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            sys.setprofile(call_at_event)
            try:
                call(path)
            except session.AlarmError:
                assert returned == nth
            finally:
                sys.setprofile(None)
            gc.collect()
        assert set(os.listdir("/proc/self/fd")) == before
        save(path)
    assert sorted(tmp_path.iterdir()) == [path]


def test_save_that_can_open_nothing_says_why(emulated, tmp_path) -> None:
    save(tmp_path / "first")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    holes = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(holes) + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as caught:
            save(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in holes:
            os.close(fd)
    assert caught.value.errno == errno.EMFILE
    assert list(tmp_path.iterdir()) == [tmp_path / "first"]
