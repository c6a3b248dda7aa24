# SPDX-License-Identifier: Apache-2.0
"""Has the base class of all results of cumem, which turns them into plain data."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from typing import Any, ClassVar, SupportsIndex

from cumem import _core
from cumem.base.displays import show

_UNITS = ("_nbytes", "_seconds")


class Answer:
    """A result that is only read, such as statistics, reasons, or the facts of an error."""

    __slots__ = ()
    #: Further keys of the plain data: names of properties, and of fields with their unit.
    _keys: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return this answer as plain data, which ``json.dumps`` can write.

        Returns
        -------
        dict
            A copy, made of str, int, float, bool, None, and lists and dicts of these. The
            keys are the names of the attributes, with their unit added if the name has
            none: ``limit`` becomes ``"limit_nbytes"``. docs/logging.md lists them. A
            device becomes its index.

        Notes
        -----
        This asks no device and never blocks.
        """
        each = reversed(type(self).__mro__)
        return plain(
            self, *(key for base in each for key in vars(base).get("_keys", ()))
        )

    def _repr_html_(self) -> str | None:
        shown: str | None = show("html", self)
        return shown


def plain(answer: Any, *more: str) -> dict[str, Any]:
    """Return the public fields of a dataclass or named tuple, and the keys `more`."""
    kind = type(answer)
    fields = getattr(kind, "__dataclass_fields__", getattr(kind, "_fields", ()))
    keys = {name: name for name in fields if not name.startswith("_")}
    for key in more:
        has_unit = hasattr(kind, key) or not key.endswith(_UNITS)
        keys[key if has_unit else key.rpartition("_")[0]] = key
    return {key: _plain(getattr(answer, name)) for name, key in keys.items()}


def to_dict(transfer: _core.Transfer) -> dict[str, Any]:
    """Return a transfer as plain data; the extension calls this for `Transfer.to_dict`."""
    more = (
        "nbytes",
        "progress_nbytes",
        "done",
        "cancelled",
        "seconds",
        "gbps",
        "route",
    )
    return plain(transfer, *more)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, SupportsIndex):  # integers of NumPy, and devices
        return operator.index(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    raise TypeError(f"{type(value).__name__} is not plain data")
