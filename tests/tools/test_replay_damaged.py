# SPDX-License-Identifier: Apache-2.0
"""Tests of traces in .npz files that are damaged or made to do harm.

The command must refuse each of them with one line of text, and without much memory or time.
"""

from __future__ import annotations

import bz2
import io
import os
import resource
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from random import Random

import numpy as np
import pytest
from support.traces import write_npz

from cumem.tools import cli
from cumem.tools.replay.trace import load_trace

# What files hold is decided by formats and not by the version of Python.
pytestmark = pytest.mark.any_python

ARRAYS = ("op", "block", "size", "stream")


def member(array: np.ndarray) -> bytes:
    """Return an array as a member of an .npz file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(text: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """Return a member with this text as its header, which may be wrong."""
    body = text.encode("latin1") + b"\n"
    length = struct.pack("<H" if version == (1, 0) else "<I", len(body))
    return b"\x93NUMPY" + bytes(version) + length + body + data


def declare(shape: str, dtype: str = "'<i8'", data: bytes = b"\0" * 56) -> bytes:
    """Return a member whose header declares a shape and a dtype."""
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}"
    return header(text, data)


def pack(
    path: Path, compression: int = zipfile.ZIP_STORED, **members: bytes | None
) -> Path:
    """Write a whole trace, with some members replaced, or left out if they are None."""
    whole: dict[str, bytes | None] = {
        "op": member(np.array([1, 0])),
        "block": member(np.array([0, 0])),
        "size": member(np.array([8, 0])),
        "stream": member(np.array([0, 0])),
    }
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in (whole | members).items():
            if content is not None:
                file.writestr(f"{name}.npy", content)
    return path


def patch_flags(path: Path, flags: int = 0, method: int | None = None) -> Path:
    """Set bits of the flags, or the compression, in every header of the archive."""
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        found = data.find(mark)
        while found >= 0:
            (old,) = struct.unpack_from("<H", data, found + at)
            struct.pack_into("<H", data, found + at, old | flags)
            if method is not None:
                struct.pack_into("<H", data, found + at + 2, method)
            found = data.find(mark, found + 4)
    path.write_bytes(data)
    return path


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which the command refuses a trace."""
    assert cli.main(["replay", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("cumem replay: ")
    assert path.name in lines[0]
    return lines[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (declare("(1 << 60,)"), ""),
        (declare(f"({1 << 60},)"), f"declares {1 << 60} rows, but"),
        (declare("(8,)"), "declares 8 rows, but"),
        (declare("(6,)"), "declares 6 rows, but"),
        (declare("(-7,)"), r"\(-7,\) has a negative length"),
        (declare("(7.0,)"), ""),
        (declare("(True,)"), ""),
        (declare("7"), ""),
        (declare("(1, 7)"), r"int64 of shape \(1, 7\)"),
        (declare("()"), r"int64 of shape \(\)"),
        (declare("(7,)", "'|O'"), "[Oo]bject"),
        (declare("(7,)", "'<i99'"), ""),
        (declare("(7,)", "[('a', '<i4'), ('b', '<i4')]"), "expected integers"),
        (declare("(7,)", "'|V8'"), "expected integers"),
        (declare("(7,)", "1"), ""),
        (declare("(" * 3000), ""),
        (header("{"), ""),
        (header("{'descr': '<i8'}"), ""),
        (header("{}" * 9000), ""),
        (header("__import__('os').abort()"), ""),
        (header("{'descr': '<i8', 'shape': (7,)}", version=(9, 0)), ""),
        (b"\x93NUMPY\x01\x00\xff\xff{", ""),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", ""),
        (b"\x93NUMPY", ""),
        (b"no array", ""),
        (b"", ""),
    ],
)
def test_member_that_is_not_an_array_of_integers_is_refused_with_one_line(
    tmp_path: Path, capsys, content: bytes, message: str
) -> None:
    import re

    line = refused(pack(tmp_path / "a.npz", block=content), capsys)
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("flags", "method"),
    [(1, None), (0x40, None), (0x20, None), (0, 99), (0, 12), (0, 14), (0, 8), (0, 1)],
)
def test_odd_flags_and_compressions_are_refused_with_one_line(
    tmp_path: Path, capsys, flags: int, method: int | None
) -> None:
    refused(patch_flags(pack(tmp_path / "a.npz"), flags, method), capsys)


def test_encrypted_member_is_named_so(tmp_path: Path, capsys) -> None:
    assert "encrypted" in refused(patch_flags(pack(tmp_path / "a.npz"), 1), capsys)


@pytest.mark.parametrize(
    "compression",
    [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA],
)
def test_whole_archive_of_any_compression_is_read(
    tmp_path: Path, compression: int
) -> None:
    assert load_trace(pack(tmp_path / "a.npz", compression)).events == 2


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_any_damage_is_refused_with_one_line_or_harmless(
    tmp_path: Path, capsys, compression: int
) -> None:
    """Bytes are changed, dropped and added anywhere, and ends are cut off."""
    random = Random(11)
    path = tmp_path / "a.npz"
    good = pack(path, compression).read_bytes()
    for _ in range(400):
        data = bytearray(good)
        for _ in range(random.randrange(1, 4)):
            at = random.randrange(len(data))
            match random.randrange(4):
                case 0:
                    data[at] = random.randrange(256)
                case 1:
                    del data[at : at + random.randrange(1, 40)]
                case 2:
                    data[at:at] = random.randbytes(random.randrange(1, 40))
                case _:
                    data[at : at + 2] = b"\xff\xff"
        path.write_bytes(data)
        said = ""
        try:
            load_trace(path)
        except ValueError as error:
            said = str(error)
        assert said == "" or ("a.npz" in said and "\n" not in said)


def bomb(path: Path, rows: int) -> Path:
    """Write a trace of zeros, which is a thousand times as long as its file."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({rows},), }}"
    piece = b"\0" * (1 << 20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name in ARRAYS:
            with file.open(f"{name}.npy", "w", force_zip64=True) as out:
                out.write(header(text))
                for _ in range(rows * 8 // len(piece)):
                    out.write(piece)
    return path


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="AddressSanitizer needs more address space than this test allows",
)
def test_bomb_is_refused_before_it_goes_off(tmp_path: Path) -> None:
    path = bomb(tmp_path / "bomb.npz", 1 << 26)  # half a GiB for each array

    def little() -> None:
        room = 3 << 29  # the interpreter itself takes a part of these addresses
        resource.setrlimit(resource.RLIMIT_AS, (room, room))

    done = subprocess.run(
        [sys.executable, "-m", "cumem", "replay", str(path)],
        capture_output=True,
        text=True,
        preexec_fn=little,
        env=os.environ | {"CUMEM_BACKEND": "emulated", "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "rows" in done.stderr


def test_member_longer_than_its_entry_says_is_refused(tmp_path: Path, capsys) -> None:
    path = pack(tmp_path / "a.npz", zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02")
    struct.pack_into("<I", data, at + 24, 90)  # the length that the directory declares
    path.write_bytes(data)
    refused(path, capsys)


def test_broken_streams_of_other_compressions_are_refused_with_one_line(
    tmp_path: Path, capsys
) -> None:
    for method, whole in ((12, bz2.compress(b"0" * 99)), (8, zlib.compress(b"1" * 99))):
        path = pack(tmp_path / "a.npz", op=whole)
        refused(patch_flags(path, method=method), capsys)


def test_names_of_members_cannot_break_the_line(tmp_path: Path, capsys) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("x\nTraceback\x1b[2J.npy", b"")
    refused(tmp_path / "a.npz", capsys)


def test_read_error_of_the_file_is_not_taken_for_damage(tmp_path: Path, capsys) -> None:
    assert cli.main(["replay", str(tmp_path)]) == 1
    assert "directory" in capsys.readouterr().err


def test_trace_of_this_test_is_good(tmp_path: Path) -> None:
    assert load_trace(pack(tmp_path / "a.npz")).events == 2
    assert load_trace(write_npz(tmp_path / "b.npz")).events == 7


def test_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    os.mkfifo(path)
    with pytest.raises(OSError, match="FIFO"):
        load_trace(path)
