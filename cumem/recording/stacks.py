# SPDX-License-Identifier: Apache-2.0
"""Turns the recorder's stacks into lines of source when a reader needs them.

The recorder stores a frame as a code object and an offset into its bytecode, which is
quick. Looking up the line of that offset is slow, so it is done only here, and once per
frame.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import CodeType
from typing import Any, overload

from cumem import _core
from cumem.base.locks import make_lock
from cumem.recording.events import Frame

_lock = make_lock()
#: The stacks of the process by number. The recorder keeps the code objects alive for good,
#: so that their ids can be keys below.
_raw: list[list[tuple[Any, int]]] = []
_frames: dict[tuple[int, int], Frame] = {}
_lines: dict[int, list[int | None]] = {}


class Stacks(Sequence[tuple[Frame, ...]]):
    """All stacks that this process has recorded so far, by number."""

    def __init__(self) -> None:
        with _lock:
            _raw.extend(_core._recorder_stacks(len(_raw)))
            self._count = len(_raw)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> tuple[Frame, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[Frame, ...]]: ...
    def __getitem__(
        self, index: int | slice
    ) -> tuple[Frame, ...] | list[tuple[Frame, ...]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError("there is no stack of that number")
        return tuple(_frame(*each) for each in _raw[index % self._count])


def _frame(code: CodeType, place: int) -> Frame:
    key = (id(code), place)
    frame = _frames.get(key)
    if frame is None:
        lines = _lines.get(id(code))
        if lines is None:
            lines = _lines[id(code)] = [line for line, *_ in code.co_positions()]
        at = place // 2  # an instruction has two bytes
        line = lines[at] if 0 <= at < len(lines) else None
        name = getattr(code, "co_qualname", code.co_name)
        frame = Frame(code.co_filename, line or code.co_firstlineno, name)
        _frames[key] = frame
    return frame


def format_frame(frame: Frame | None) -> str:
    """Return ``file:line (function)``, with a path relative to the current folder."""
    if frame is None:
        return "no stack"
    try:
        name = frame.filename.removeprefix(os.getcwd() + os.sep)
    except OSError:  # the folder is gone
        name = frame.filename
    return f"{name}:{frame.lineno} ({frame.function})"
