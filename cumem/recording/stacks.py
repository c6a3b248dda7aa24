# SPDX-License-Identifier: Apache-2.0
"""Stacks of the recorder as lines of source, found when somebody reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import CodeType
from typing import Any, overload

from cumem import _core
from cumem.base.locks import make_lock
from cumem.recording.events import Frame

_lock = make_lock()
#: Of the process, by their numbers; the recorder keeps its code objects for ever.
_raw: list[list[tuple[Any, int]]] = []
_frames: dict[tuple[int, int], Frame] = {}
_lines: dict[int, list[int | None]] = {}


class Stacks(Sequence[tuple[Frame, ...]]):
    """All stacks of this process up to now, by their numbers."""

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
        at = place // 2  # a unit of code has two bytes
        line = lines[at] if 0 <= at < len(lines) else None
        name = getattr(code, "co_qualname", code.co_name)
        frame = Frame(code.co_filename, line or code.co_firstlineno, name)
        _frames[key] = frame
    return frame


def format_frame(frame: Frame | None) -> str:
    """As ``file:line (function)``, the file from here on if it lies below."""
    if frame is None:
        return "no stack"
    try:
        name = frame.filename.removeprefix(os.getcwd() + os.sep)
    except OSError:  # the folder is gone
        name = frame.filename
    return f"{name}:{frame.lineno} ({frame.function})"
