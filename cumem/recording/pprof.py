# SPDX-License-Identifier: Apache-2.0
"""Writes a record as a heap profile, for pprof, Speedscope, Grafana and IDEs.

The format is `profile.proto
<https://github.com/google/pprof/blob/main/proto/profile.proto>`_, gzipped. The encoding is
written by hand here, because it takes only a few short functions, and a library of protocol
buffers would be one more dependency.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable
from typing import IO, Any, Final

import numpy as np

from cumem.files.replacing import open_export
from cumem.recording.events import KINDS, Frame, Log
from cumem.recording.pairing import machine_text, pair, sites

__all__ = ["encode", "write"]

#: The counts of each sample, with the names of Go's heap profiles, which pprof knows.
SAMPLE_TYPES: Final = (
    ("alloc_objects", "count"),
    ("alloc_space", "bytes"),
    ("inuse_objects", "count"),
    ("inuse_space", "bytes"),
)
_NO_STACK: Final = Frame("", 0, "(no stack was noted)")


def write(log: Log, path: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write a record as a profile of pprof.

    Parameters
    ----------
    log : Log
    path : str, Path or binary file
        The file to write, usually called ``NAME.pb.gz``; an existing one is replaced once
        the new one is complete.

    Raises
    ------
    OSError
        If the file cannot be written.

    Notes
    -----
    ``alloc_`` counts what was allocated during the record. ``inuse_`` counts what was alive
    at the end of the record, including earlier allocations. Samples have the labels
    ``kind`` and ``tag``.
    """
    with open_export(path) as file:
        file.write(gzip.compress(encode(log), 6, mtime=0))


def encode(log: Log) -> bytes:
    """Return the profile before it is compressed."""
    texts = _Numbers({"": 0})
    functions, locations = _Numbers({0: 0}), _Numbers({0: 0})
    body = bytearray()
    for name, unit in SAMPLE_TYPES:
        body += _bytes(1, _number(1, texts[name]) + _number(2, texts[unit]))
    for stack, tag, kind, values in _samples(log):
        ids = [locations[frame] for frame in log.stacks[stack] or (_NO_STACK,)]
        labels = {"kind": KINDS[kind]} | ({"tag": log.tags[tag]} if tag else {})
        sample = _packed(1, ids) + _packed(2, values)
        for key, value in labels.items():
            sample += _bytes(3, _number(1, texts[key]) + _number(2, texts[value]))
        body += _bytes(2, sample)
    for frame, number in [*locations.items()][1:]:
        function = functions[frame.function, frame.filename]
        line = _number(1, function) + _number(2, max(frame.lineno, 0))
        body += _bytes(4, _number(1, number) + _bytes(4, line))
    for (name, filename), number in [*functions.items()][1:]:
        text, file = texts[name], texts[filename]
        fields = ((1, number), (2, text), (3, text), (4, file))
        body += _bytes(5, b"".join(_number(*field) for field in fields))
    comment = _packed(13, [texts[f"cumem on {machine_text(log)}"]])
    for text in texts:
        body += _bytes(6, text.encode("utf-8", "replace"))
    body += _number(9, int(log.begin_s * 1e9)) + _number(10, log.duration_ns)
    return bytes(body + comment + _number(14, texts[SAMPLE_TYPES[-1][0]]))


def _samples(log: Log) -> Iterable[tuple[int, int, int, list[int]]]:
    """Yield a stack, tag and kind with the four counts of all that share them."""
    lives = pair(log)
    stack, tag, kind, of = sites(lives)
    sums = np.zeros((len(stack), 4), np.int64)
    for column, mask in ((0, lives.is_inside), (2, lives.is_left)):
        np.add.at(sums[:, column], of[mask], 1)
        np.add.at(sums[:, column + 1], of[mask], lives.nbytes[mask])
    columns = (stack.tolist(), tag.tolist(), kind.tolist(), sums.tolist())
    yield from (row for row in zip(*columns, strict=True) if any(row[3]))


# -- the encoding ----------------------------------------------------------------------


class _Numbers(dict[Any, int]):
    """Gives each key that is looked up a number, in the order of the first look-ups."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes | bytearray) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _packed(field: int, values: Iterable[int]) -> bytes:
    return _bytes(field, b"".join(map(_varint, values)))
