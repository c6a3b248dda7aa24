# SPDX-License-Identifier: Apache-2.0
"""Nested data: the same structure with other leaves."""

from __future__ import annotations

import array
import copy
import dataclasses
import sys
from collections.abc import (
    Callable,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from typing import Any

#: Sequences whose items can be nothing else: leaves.
_LEAVES = (str, bytes, bytearray, memoryview, array.array, range)


def is_tensor(value: object) -> bool:
    """Is it PyTorch's? That is not imported to find out."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def is_functional(tensor: Any) -> bool:
    """Does a transform trace with it, such as `vmap`, `functionalize` or `compile`? It is
    of the type `torch.Tensor` then, and has no memory all the same.
    """
    torch = sys.modules["torch"]
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped or bool(torch._is_functional_tensor(tensor))


def has_own_memory(tensor: Any) -> bool:
    """Are its elements in memory of its own: is it not nested, and no wrapper?"""
    tensors = sys.modules["torch"].Tensor
    own = type(tensor).__torch_dispatch__ == tensors.__torch_dispatch__
    return own and not tensor.is_nested and not is_functional(tensor)


def make_mapping(value: Any, changed: dict[Any, Any]) -> Any:
    """A copy of `value`, which may hold more than its items, with others."""
    try:
        if not isinstance(value, MutableMapping):
            return type(value)(changed)
        made = copy.copy(value)
        made.update(changed)
        return made
    except TypeError:
        return changed


def make_sequence(value: Any, parts: list[Any]) -> Any:
    """A copy of `value` with other items; a list where its type allows none."""
    try:
        if not isinstance(value, MutableSequence):
            return type(value)(parts)
        made = copy.copy(value)
        for i, part in enumerate(parts):
            made[i] = part
        return made
    except TypeError:
        return parts


def _is_packed(value: object) -> bool:
    """Is it a `PackedSequence`, whose ``batch_sizes`` PyTorch wants on the CPU?"""
    packed = getattr(sys.modules.get("torch.nn.utils.rnn"), "PackedSequence", None)
    return packed is not None and isinstance(value, packed)


def is_record(value: object) -> bool:
    """Is it a dataclass's?"""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def make_record(value: Any, function: Callable[[str], Any]) -> Any:
    """A copy of `value` with ``function(name)`` for each field that it has.

    Without ``__init__``, which may want other arguments.
    """
    made = copy.copy(value)
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            object.__setattr__(made, field.name, function(field.name))
    return made


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with ``function(leaf)`` for each leaf.

    Mappings, sequences, named tuples and dataclasses are taken apart; subclasses stay
    what they are where they can. A leaf is anything else, strings among them.
    """
    if is_tensor(value) or isinstance(value, _LEAVES):
        return function(value)
    if isinstance(value, Mapping):
        return make_mapping(value, {key: mapped(value[key], function) for key in value})
    if isinstance(value, Sequence):
        kept = 1 if _is_packed(value) else None
        parts = [
            part if i == kept else mapped(part, function)
            for i, part in enumerate(value)
        ]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts)
        return make_sequence(value, parts)
    if is_record(value):
        return make_record(value, lambda name: mapped(getattr(value, name), function))
    return function(value)
