# SPDX-License-Identifier: Apache-2.0
"""The records of archives that are too large to be written in a test.

Holes take the place of the members, and `zipfile` reads the records.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from cumem.files.stored_members import Member, directory, local_header, local_nbytes

KIB, GIB = 1 << 10, 1 << 30


def laid_out(path: Path, sizes: list[int]) -> list[Member]:
    """Write an archive whose members have these sizes, with holes for their bytes."""
    members, at = [], 0
    with path.open("wb") as file:
        for number, size in enumerate(sizes):
            checksum = zlib.crc32(bytes(size)) if size < KIB else number
            member = Member(f"{number}.npy".encode(), at, size, checksum)
            members.append(member)
            file.seek(at)
            file.write(local_header(member))
            at += local_nbytes(member.name) + size
        file.seek(at)
        file.write(directory(members, at))
    return members


def check(path: Path, members: list[Member]) -> None:
    with zipfile.ZipFile(path) as archive:
        found = [
            Member(each.filename.encode(), each.header_offset, each.file_size, each.CRC)
            for each in archive.infolist()
        ]
        assert found == members
        for each in archive.infolist()[-2:]:  # `open` compares the local header
            assert each.compress_size == each.file_size
            with archive.open(each) as content:
                assert content.read(KIB) == bytes(min(KIB, each.file_size))


def test_members_of_any_size_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    sizes = [5, 2 * GIB - 1, 2 * GIB, 5 * GIB, 7]
    check(path, laid_out(path, sizes))


def test_more_members_than_16_bits_count_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    check(path, laid_out(path, [1] * 70_000))
