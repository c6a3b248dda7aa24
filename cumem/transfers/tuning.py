# SPDX-License-Identifier: Apache-2.0
"""Keeps the settings of copies that users may change, and tells the values in force.

The extension has more values than users may set. Tests set the others by `change`, under
the names of the extension (`cm_tuning` in ``csrc/transfer/plan/tuning.h``).
"""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Mapping
from typing import Any, Literal, Self, SupportsIndex

from cumem import _core
from cumem.base.answer import Answer
from cumem.base.locks import make_lock
from cumem.base.places import found_in
from cumem.base.units import format_nbytes, read_size
from cumem.buffers.arguments import hinting

_Count = SupportsIndex | Literal["auto"]

#: For each setting of users, the extension's name of the value, and the environment
#: variable.
_SETTINGS = {
    "threads": ("thread_count", "CUMEM_TRANSFER_THREADS"),
    "ring_nbytes": ("ring_nbytes", "CUMEM_TRANSFER_RING"),
}
#: Values from the environment, and values that were set in this process, which take
#: precedence. The keys are the extension's names.
layers: list[dict[str, int]] = [{}, {}]
_ENVIRONMENT, CHOSEN = range(2)
_lock = make_lock()
_SOURCES = ("environment", "configure", "default")


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True, repr=False)
class Configuration(Answer):
    """The settings of copies that begin now; `configure` returns it.

    Used as a context manager, it undoes the changes of its `configure` call at the end of
    the block.

    Attributes
    ----------
    threads : int
        The number of threads that pack and unpack ordinary memory, including the one that
        runs the copy.
    ring_nbytes : int
        The most bytes of page-locked memory that all copies together use for pieces of
        ordinary memory. Every copy may use at least one piece.
    sources : Mapping of str to str
        Where each setting comes from: ``"default"``, ``"environment"`` or ``"configure"``.

    Examples
    --------
    >>> cumem.configure().threads > 0
    True
    """

    threads: int
    ring_nbytes: int
    sources: Mapping[str, str]
    _before: Mapping[str, int | None] = dataclasses.field(
        default_factory=dict, compare=False, hash=False
    )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        change(CHOSEN, self._before)

    def _rows(self) -> list[tuple[str, str, str]]:
        return [
            (name, _text(name, getattr(self, name)), self.sources[name])
            for name in _SETTINGS
        ]

    def __repr__(self) -> str:
        rows = self._rows()
        wide = max(len(text) for _, text, _ in rows)
        lines = (f"  {name:<18} {text:>{wide}}  {where}" for name, text, where in rows)
        return "cumem.types.Configuration\n" + "\n".join(lines)


def _text(name: str, value: int) -> str:
    return format_nbytes(value) if name.endswith("_nbytes") else str(value)


@hinting
def configure(
    *,
    threads: _Count | None = None,
    ring_nbytes: int | str | None = None,
) -> Configuration:
    """Change how copies are made in this process, or only read the settings.

    Values that are set here take precedence over the variables ``CUMEM_TRANSFER_THREADS``
    and ``CUMEM_TRANSFER_RING``, which take precedence over the defaults. ``"auto"`` removes
    a value that was set here. Copies that have begun keep their settings, except for the
    number of threads, which changes at once. Reading opens no driver.

    Parameters
    ----------
    threads : int, optional
        The number of threads that pack and unpack ordinary memory, including the one that
        runs the copy, from 1 to 16. By default it is the number of processors that the
        process may use, by its CPU affinity and the quota of its control group, but at most
        eight.
    ring_nbytes : int or str, optional
        The most bytes of page-locked memory for all copies together, or a text such as
        ``"64MiB"``; from 1 MiB to 1 TiB, by default 256 MiB.

    Returns
    -------
    Configuration
        The settings in force. In a ``with`` statement, the changes of this call apply to
        the block; such blocks must end in the reverse order of their beginning.

    Raises
    ------
    TypeError
        If an argument is neither a number nor a text.
    ValueError
        If an argument or a variable cannot be read or is out of range. Nothing is changed
        then.

    Examples
    --------
    >>> import cumem
    >>> with cumem.configure(threads=2, ring_nbytes="64MiB") as now:
    ...     now.threads, now.ring_nbytes
    (2, 67108864)
    """
    given = {"threads": threads, "ring_nbytes": ring_nbytes}
    values = _core._read_tuning(True)
    changes = {
        _SETTINGS[name][0]: _read(name, value, values)
        for name, value in given.items()
        if value is not None
    }
    before = {field: layers[CHOSEN].get(field) for field in changes}
    if changes:
        change(CHOSEN, changes)
        values = _core._read_tuning(True)
    now: dict[str, Any] = {
        name: values[field].now for name, (field, _) in _SETTINGS.items()
    }
    sources = {name: _source(field) for name, (field, _) in _SETTINGS.items()}
    return Configuration(**now, sources=sources, _before=before)


def _source(field: str) -> str:
    found = [place for place, layer in enumerate(layers) if field in layer]
    return _SOURCES[max(found, default=-1)]


def change(layer: int, changes: Mapping[str, int | None]) -> None:
    """Change all of these values of a layer, or none of them if one is wrong.

    A value of None removes the setting from the layer.
    """
    with _lock:
        changed = layers.copy()
        values = {**layers[layer], **changes}
        changed[layer] = {name: n for name, n in values.items() if n is not None}
        _install(changed)


def _install(new: list[dict[str, int]]) -> None:
    _core._set_tuning(_values_of(new))
    layers[:] = new


def _values_of(new: list[dict[str, int]]) -> dict[str, int]:
    """Return the values that the extension should use, according to these layers."""
    values = new[_ENVIRONMENT] | new[CHOSEN]
    if "thread_count" in values:  # users set one number for copies of all sorts
        values["fresh_thread_count"] = values["thread_count"]
        values["links_thread_count"] = values["thread_count"]
    return values


def _read(
    name: str, value: Any, values: Mapping[str, _core._TuningValue]
) -> int | None:
    """Return the number for a setting, or None for "auto"; refuse a wrong value."""
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
    return _in_range(name, name, number, values)


def _in_range(
    name: str, said: str, number: int, values: Mapping[str, _core._TuningValue]
) -> int:
    value = values[_SETTINGS[name][0]]
    # The extension takes 0 threads for "auto".
    least = max(value.least, int(name == "threads"))
    if not least <= number <= value.most:
        low, high, given = (_text(name, each) for each in (least, value.most, number))
        raise ValueError(f"{said} must be from {low} to {high}, not {given}")
    return number


def begin(now: Mapping[str, _core._TuningValue]) -> dict[str, int]:
    """Read the environment, and return the values that the extension should use.

    The extension calls this when it opens devices, with its own values in `now`.
    """
    found = _read_environment(now)
    with _lock:
        layers[_ENVIRONMENT] = found
        return _values_of(layers)


def _read_environment(values: Mapping[str, _core._TuningValue]) -> dict[str, int]:
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
        found[field] = _in_range(name, variable, number, values)
    return found


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError
    return int(text)
