# SPDX-License-Identifier: Apache-2.0
"""Writes ZIP archives whose members are stored without compression.

Each member lies in the archive as a local header with its bytes behind it, and the
directory at the end of the archive says where each member is. `zipfile` does all writing
itself, one member after the other. Here the place of each member is known before anything
is written, so that one call of `write_ranges` can write the bytes of all of them.

The records are those that `zipfile` writes when NumPy saves arrays: the date is the first
one that the format can express, and the sizes in local headers have 64 bits. The fields of
the directory have 32 bits. A number that does not fit is in an extra record, with 64 bits.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cumem import _core
from cumem.files.raw import write_ranges, write_summed

__all__ = [
    "Member",
    "directory",
    "local_header",
    "local_nbytes",
    "member_name",
    "write_archive",
]

#: `zipfile` writes numbers up to this one with 32 bits.
_LARGEST = (1 << 31) - 1
_IN_EXTRA = 0xFFFFFFFF  #: stands for a number that is in the extra record
_MOST_MEMBERS = 0xFFFF
_NAME_NBYTES = 0xFFFF  #: the length of the longest name
_UTF8 = 0x800  #: the flag of a name that is UTF-8
_VERSION = 45  #: version 4.5 of the format has numbers of 64 bits
_UNIX = 3
_RIGHTS = 0o600 << 16
_STORED = 0
_TIME, _DATE = 0, 1 << 5 | 1  #: midnight, and January 1 of 1980
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL_EXTRA = struct.Struct("<2H2Q")
_CENTRAL = struct.Struct("<4s2B5H3L5H2L")
_WIDE_END = struct.Struct("<4sQ2H2L4Q")
_WIDE_PLACE = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")


class Member(NamedTuple):
    """A member of an archive.

    Attributes
    ----------
    name : bytes
        The name, in UTF-8.
    offset : int
        The offset of its local header in the file.
    nbytes : int
        The number of its bytes.
    checksum : int
        The CRC-32 of these bytes.
    """

    name: bytes
    offset: int
    nbytes: int
    checksum: int

    @property
    def flags(self) -> int:
        return 0 if self.name.isascii() else _UTF8

    @property
    def fields(self) -> tuple[int, int, int, int, int]:
        """The fields that both of its headers have: flags to checksum, in this order."""
        return self.flags, _STORED, _TIME, _DATE, self.checksum


def local_nbytes(name: bytes) -> int:
    """Return the length in bytes of the local header of a member with this name."""
    return _LOCAL.size + len(name) + _LOCAL_EXTRA.size


def local_header(member: Member) -> bytes:
    """Return the header that lies before the bytes of a member."""
    head = _LOCAL.pack(
        b"PK\3\4",
        _VERSION,
        *member.fields,
        _IN_EXTRA,
        _IN_EXTRA,
        len(member.name),
        _LOCAL_EXTRA.size,
    )
    # The extra record has the number 1. Its length does not include its first two fields.
    extra = _LOCAL_EXTRA.pack(1, _LOCAL_EXTRA.size - 4, member.nbytes, member.nbytes)
    return head + member.name + extra


def directory(members: Sequence[Member], offset: int) -> bytes:
    """Return the directory, which begins at `offset` in the file and ends the archive."""
    central = b"".join(_central_header(member) for member in members)
    count, nbytes = len(members), len(central)
    wide = b""
    if count > _MOST_MEMBERS or offset > _LARGEST or nbytes > _LARGEST:
        # The length of this record does not include its first two fields.
        own = (_WIDE_END.size - 12, _VERSION, _VERSION, 0, 0)
        wide = _WIDE_END.pack(b"PK\6\6", *own, count, count, nbytes, offset)
        wide += _WIDE_PLACE.pack(b"PK\6\7", 0, offset + nbytes, 1)
        count = min(count, _MOST_MEMBERS)
        nbytes, offset = min(nbytes, _IN_EXTRA), min(offset, _IN_EXTRA)
    end = _END.pack(b"PK\5\6", 0, 0, count, count, nbytes, offset, 0)
    return central + wide + end


def _central_header(member: Member) -> bytes:
    """Return the header of a member in the directory."""
    size, offset = member.nbytes, member.offset
    wide: list[int] = []
    if size > _LARGEST:
        wide += [size, size]
        size = _IN_EXTRA
    if offset > _LARGEST:
        wide.append(offset)
        offset = _IN_EXTRA
    extra = b""
    if wide:
        extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide)
    head = _CENTRAL.pack(
        b"PK\1\2",
        _VERSION,
        _UNIX,
        _VERSION,
        *member.fields,
        size,
        size,
        len(member.name),
        len(extra),
        0,
        0,
        0,
        _RIGHTS,
        offset,
    )
    return head + member.name + extra


def member_name(text: str) -> bytes:
    """Return the name of a member in UTF-8; raise a ValueError if it is too long."""
    name = text.encode()
    if len(name) > _NAME_NBYTES:
        raise ValueError(
            f"the name {text[:40]!r}… has {len(name)} bytes; an archive can hold "
            f"{_NAME_NBYTES}"
        )
    return name


def write_archive(
    opened: Any, members: Sequence[tuple[bytes, bytes, _core.Buffer]]
) -> None:
    """Write an archive at the position of the file, and move the position past it.

    Each member is its name, its first bytes as `bytes`, and its other bytes in a buffer.
    The bytes of all members are written first, since the local headers and the directory
    contain their checksums.
    """
    if fcntl.fcntl(opened.fileno(), fcntl.F_GETFL) & os.O_APPEND:
        opened.seek(0, os.SEEK_END)  # an appending file writes there
    at = opened.tell()
    places = []
    parts: list[tuple[int, Any]] = []
    for name, head, data in members:
        begin = at + local_nbytes(name)
        parts += [(begin, np.frombuffer(head, "u1")), (begin + len(head), data)]
        places.append(at)
        at = begin + len(head) + data.nbytes
    checksums = write_summed(opened, parts)
    written = [
        Member(name, place, len(head) + data.nbytes, checksum)
        for (name, head, data), place, checksum in zip(
            members, places, checksums, strict=True
        )
    ]
    records = [(member.offset, local_header(member)) for member in written]
    records.append((at, directory(written, at)))
    write_ranges(opened, [(place, np.frombuffer(r, "u1")) for place, r in records])
    opened.seek(at + len(records[-1][1]))
