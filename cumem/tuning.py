# SPDX-License-Identifier: Apache-2.0
"""How copies are made: threads, chunks and thresholds, and what they are now."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from typing import Any, Literal, Self, SupportsIndex

from cumem import _core
from cumem.units import format_nbytes

__all__ = ["Configuration", "configure"]

_Count = SupportsIndex | Literal["auto"]
_SETTINGS = (
    "threads",
    "chunk_nbytes",
    "depth",
    "ring_nbytes",
    "staged_up_nbytes",
    "staged_down_nbytes",
    "quick_nbytes",
    "bounce_nbytes",
)
_NEVER = 1 << 40


@dataclasses.dataclass(frozen=True, repr=False)
class Configuration:
    """How copies that begin now are made; what `configure` returns.

    As a context manager it takes back, at the end of the block, what the call that made it
    has changed.

    Attributes
    ----------
    threads : int
        Threads that pack and unpack ordinary memory, the one that runs the copy among them.
    chunk_nbytes : int
        Most bytes of one piece of a copy that goes through page-locked memory.
    depth : int
        Most pieces of one such copy in flight.
    ring_nbytes : int
        Most bytes of page-locked memory that all copies together use for it; each copy
        has one piece in any case.
    staged_up_nbytes, staged_down_nbytes : int
        Ordinary memory that lies together is left to the driver below that size, to the
        device and from it.
    quick_nbytes : int
        Most bytes of a copy that the calling thread makes by itself, in a few calls.
    bounce_nbytes : int
        Of those, ordinary memory goes up through a page-locked block from that size on;
        what is shorter goes as part of the driver's command.
    sources : Mapping of str to str
        Where each of them comes from: ``"default"``, ``"calibration"``,
        ``"environment"`` or ``"configure"``.
    """

    threads: int
    chunk_nbytes: int
    depth: int
    ring_nbytes: int
    staged_up_nbytes: int
    staged_down_nbytes: int
    quick_nbytes: int
    bounce_nbytes: int
    sources: Mapping[str, str]
    _before: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, compare=False, hash=False
    )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        _core._set_tuning(self._before)

    def _rows(self) -> list[tuple[str, str, str]]:
        return [
            (name, _text(name, getattr(self, name)), self.sources[name])
            for name in _SETTINGS
        ]

    def __repr__(self) -> str:
        rows = self._rows()
        wide = max(len(text) for _, text, _ in rows)
        lines = (f"  {name:<18} {text:>{wide}}  {where}" for name, text, where in rows)
        return "cumem.Configuration\n" + "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self._rows()
        )
        return f"<table><caption>cumem.Configuration</caption>{cells}</table>"


def _text(name: str, value: int) -> str:
    if not name.endswith("_nbytes"):
        return str(value)
    return "never" if value >= _NEVER else format_nbytes(value)


def configure(
    *,
    threads: _Count | None = None,
    chunk_nbytes: int | str | None = None,
    depth: _Count | None = None,
    ring_nbytes: int | str | None = None,
    staged_up_nbytes: int | str | None = None,
    staged_down_nbytes: int | str | None = None,
    quick_nbytes: int | str | None = None,
    bounce_nbytes: int | str | None = None,
) -> Configuration:
    """Change, or only read, how copies are made in this process.

    What is set here comes before the variables ``CUMEM_TRANSFER_THREADS``, ``_CHUNK``,
    ``_DEPTH``, ``_RING``, ``_STAGED_UP``, ``_STAGED_DOWN``, ``_QUICK`` and ``_BOUNCE``,
    these before what `calibrate` measured, and that before defaults. ``"auto"`` takes back
    what was set here. Copies that have begun go on as they are, but for the number of
    threads, which follows at once. Reading opens no driver: before the first use of a
    device it shows defaults where a kept measurement will then count.

    Parameters
    ----------
    threads : int, optional
        From 1 to 16; by default as many as the process may use, by its CPU affinity and
        the quota of its control group, eight at most.
    chunk_nbytes, ring_nbytes : int or str, optional
        Bytes, or a text such as ``"4MiB"``: from 64 KiB to 1 GiB, and from 1 MiB to 1 TiB.
    depth : int, optional
        From 2 to 32.
    staged_up_nbytes, staged_down_nbytes : int or str, optional
        Up to 1 TiB, which is never; what no driver takes goes in pieces all the same.
    quick_nbytes, bounce_nbytes : int or str, optional
        Up to 1 GiB.

    Returns
    -------
    Configuration
        What holds now. Used in a ``with`` statement, what was changed holds for the block;
        such blocks end in the reverse order of their beginning.

    Raises
    ------
    TypeError
        If an argument is neither a number nor a text.
    ValueError
        If an argument, or a variable, cannot be read or is out of range; nothing is
        changed then.
    RuntimeError
        If something is to be changed in a forked child of a process that has opened the
        driver; the end of a block changes something too.

    Examples
    --------
    >>> import cumem
    >>> with cumem.configure(threads=2, chunk_nbytes="1MiB") as now:
    ...     now.threads, now.chunk_nbytes
    (2, 1048576)
    """
    given = {
        "threads": threads,
        "chunk_nbytes": chunk_nbytes,
        "depth": depth,
        "ring_nbytes": ring_nbytes,
        "staged_up_nbytes": staged_up_nbytes,
        "staged_down_nbytes": staged_down_nbytes,
        "quick_nbytes": quick_nbytes,
        "bounce_nbytes": bounce_nbytes,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    before = {
        name: value if source == "configure" else "auto"
        for name, value, source in _core._read_tuning()
        if name in changes
    }
    if changes:
        _core._set_tuning(changes)
    rows = _core._read_tuning()
    values = {name: value for name, value, _ in rows}
    sources = {name: source for name, _, source in rows}
    return Configuration(**values, sources=sources, _before=before)
