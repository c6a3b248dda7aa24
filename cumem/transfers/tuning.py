# SPDX-License-Identifier: Apache-2.0
"""How copies are made: threads, chunks and thresholds, and what they are now."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Mapping
from typing import Any, Literal, Self, SupportsIndex

from cumem import _core
from cumem.base.answer import Answer
from cumem.base.locks import make_lock
from cumem.base.units import format_nbytes, read_size
from cumem.buffers.arguments import hinting

_Count = SupportsIndex | Literal["auto"]

#: What users may set: the value of the extension and the variable that it is.
_SETTINGS = {
    "threads": ("thread_count", "CUMEM_TRANSFER_THREADS"),
    "chunk_nbytes": ("chunk_nbytes", "CUMEM_TRANSFER_CHUNK"),
    "depth": ("slot_count", "CUMEM_TRANSFER_DEPTH"),
    "ring_nbytes": ("ring_nbytes", "CUMEM_TRANSFER_RING"),
    "staged_up_nbytes": ("staged_up_nbytes", "CUMEM_TRANSFER_STAGED_UP"),
    "staged_down_nbytes": ("staged_down_nbytes", "CUMEM_TRANSFER_STAGED_DOWN"),
    "quick_nbytes": ("quick_nbytes", "CUMEM_TRANSFER_QUICK"),
    "bounce_nbytes": ("bounce_nbytes", "CUMEM_TRANSFER_BOUNCE"),
}
#: What was measured, is set in the environment and was chosen: values of the extension,
#: of which a later layer's come before an earlier one's.
layers: list[dict[str, int]] = [{}, {}, {}]
CALIBRATION, _ENVIRONMENT, _CHOSEN = range(3)
#: While a machine is measured, what holds in place of all layers.
_alone: dict[str, int] | None = None
_lock = make_lock()
_SOURCES = ("calibration", "environment", "configure", "default")
NEVER = 1 << 40


@dataclasses.dataclass(frozen=True, repr=False)
class Configuration(Answer):
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

    Examples
    --------
    >>> cumem.configure().threads > 0
    True
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
    _before: Mapping[str, int | None] = dataclasses.field(
        default_factory=dict, compare=False, hash=False
    )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        change(_CHOSEN, self._before)

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


def _text(name: str, value: int) -> str:
    if not name.endswith("_nbytes"):
        return str(value)
    return "never" if value >= NEVER else format_nbytes(value)


@hinting
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
        Up to 256 MiB, and up to 1 GiB.

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
    rows = dict(_core._read_tuning(True))
    changes = {
        _SETTINGS[name][0]: _read(name, value, rows)
        for name, value in given.items()
        if value is not None
    }
    before = {field: layers[_CHOSEN].get(field) for field in changes}
    if changes:
        change(_CHOSEN, changes)
        rows = dict(_core._read_tuning(True))
    now: dict[str, Any] = {
        name: rows[field][0] for name, (field, _) in _SETTINGS.items()
    }
    sources = {name: _source(field) for name, (field, _) in _SETTINGS.items()}
    return Configuration(**now, sources=sources, _before=before)


def _source(field: str) -> str:
    found = [place for place, layer in enumerate(layers) if field in layer]
    return _SOURCES[max(found, default=-1)]


def change(layer: int, changes: Mapping[str, int | None]) -> None:
    """Change values of a layer, or nothing; None takes one out of it."""
    with _lock:
        changed = layers.copy()
        values = {**layers[layer], **changes}
        changed[layer] = {name: n for name, n in values.items() if n is not None}
        _install(changed, layer == CALIBRATION)


def stand_alone(values: dict[str, int] | None) -> None:
    """Have these values, and the defaults of the others, in place of all layers, which
    may change meanwhile; None: the layers again."""
    global _alone
    with _lock:
        before, _alone = _alone, values
        try:
            _install(layers, True)
        except BaseException:
            _alone = before
            raise


def _install(new: list[dict[str, int]], is_measured: bool) -> None:
    asked_for = new[_ENVIRONMENT] | new[_CHOSEN]
    values = new[CALIBRATION] | asked_for
    if "thread_count" in asked_for:  # few threads: no more for fresh pages either
        values["fresh_thread_count"] = values["thread_count"]
    _core._set_tuning(values if _alone is None else _alone, is_measured)
    layers[:] = new


def _read(name: str, value: Any, rows: Mapping[str, Any]) -> int | None:
    """A setting as the extension takes it; None for "auto"."""
    if isinstance(value, str) and value == "auto":
        return None
    if name.endswith("_nbytes"):
        number = read_size(value, name, False, None)
    elif isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f'{name} must be an int or "auto", not {type(value).__name__}')
    else:
        number = operator.index(value)
        if number < 0:
            raise ValueError(f"{name} must not be negative, got {number}")
    return _in_range(name, name, number, rows)


def _in_range(name: str, said: str, number: int, rows: Mapping[str, Any]) -> int:
    _, least, most = rows[_SETTINGS[name][0]]
    least = max(least, int(name == "threads"))  # 0 is "auto" there
    if not least <= number <= most:
        low, high, given = (_text(name, value) for value in (least, most, number))
        raise ValueError(f"{said} must be from {low} to {high}, not {given}")
    return number


def begin() -> None:
    """By the extension, when it opens and there may be values; nothing is measured yet."""
    found = _read_environment()
    with _lock:
        _install([{}, found, layers[_CHOSEN]], False)


def _read_environment() -> dict[str, int]:
    rows = dict(_core._read_tuning(False))
    found: dict[str, int] = {}
    for name, (field, variable) in _SETTINGS.items():
        text = os.environ.get(variable, "")
        if text in ("", "auto"):
            continue
        try:
            is_size = name.endswith("_nbytes")
            number = read_size(text, variable, False, None) if is_size else _count(text)
        except ValueError:
            wanted = (
                "a number of bytes such as 4194304 or 4MiB" if is_size else "a count"
            )
            raise ValueError(
                f"{variable} must be {wanted} or auto, not '{text:.100}'"
            ) from None
        found[field] = _in_range(name, variable, number, rows)
    return found


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError
    return int(text)
