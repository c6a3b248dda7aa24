# SPDX-License-Identifier: Apache-2.0
"""Nested data: the same structure with other leaves."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any


def is_tensor(value: object) -> bool:
    """Is it PyTorch's? That is not imported to find out."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def _mapping(value: Any, changed: dict[Any, Any]) -> Any:
    """Mappings may hold more than their items: they are copied first."""
    try:
        if not isinstance(value, MutableMapping):
            return type(value)(changed)
        made = copy.copy(value)
        made.update(changed)
        return made
    except TypeError:
        return changed


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with ``function(leaf)`` for each leaf.

    Mappings, lists, tuples, named tuples and dataclasses are taken apart; subclasses
    stay what they are. A leaf is anything else, strings among them.
    """
    if is_tensor(value) or isinstance(value, (str, bytes)):
        return function(value)
    if isinstance(value, Mapping):
        return _mapping(value, {key: mapped(value[key], function) for key in value})
    if isinstance(value, tuple):
        parts = [mapped(part, function) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    made: Any
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = [mapped(part, function) for part in value]
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)  # without __init__, which may want other arguments
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                changed = mapped(getattr(value, field.name), function)
                object.__setattr__(made, field.name, changed)
        return made
    return function(value)
