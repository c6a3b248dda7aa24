# SPDX-License-Identifier: Apache-2.0
"""Nested data: the same structure with other leaves."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import importlib
import inspect
import sys
from collections.abc import (
    Callable,
    Iterator,
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


#: Their copies by `copy.copy` hold their items themselves.
_OWN_ITEMS = (dict, collections.UserDict, list, collections.deque, collections.UserList)


def _shallow(value: Any) -> Any:
    """A copy of a container that may be changed: what holds its items is not shared.

    A type of its own often keeps them in a dict or a list, which `copy.copy` shares with
    the copy: those are copied as well.
    """
    made = copy.copy(value)
    if not isinstance(value, _OWN_ITEMS):
        for name, held in _attributes(made):
            if isinstance(held, (MutableMapping, MutableSequence)):
                object.__setattr__(made, name, copy.copy(held))
    return made


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                yield name, getattr(value, name)


def _with_items(value: Any, changed: list[tuple[Any, Any]]) -> Any:
    """A copy of a mutable container with other items. TypeError: it has none.

    The container is asked afterwards whether it is as it was.
    """
    before = [(key, value[key]) for key, _ in changed]
    made = _shallow(value)
    for key, item in changed:
        made[key] = item
    touched = [(key, item) for key, item in before if value[key] is not item]
    if touched and not isinstance(value, _OWN_ITEMS):
        # The copy shares its items by a way that is not seen here. A container that makes
        # its items when it is asked gives others each time, and is as it was.
        new = {id(item) for _, item in changed}
        shared = [(key, item) for key, item in touched if id(value[key]) in new]
        for key, item in shared:
            value[key] = item
        if shared:
            raise TypeError("the copy shares its items")
    if any(made[key] is not item for key, item in changed):
        raise TypeError("it holds other items than it was given")
    return made


def make_mapping(value: Any, changed: dict[Any, Any]) -> Any:
    """A copy of `value`, which may hold more than its items, with others; a dict where
    its type allows none. `value` stays as it is.
    """
    if isinstance(value, MutableMapping):
        try:
            return _with_items(value, list(changed.items()))
        except Exception:  # whatever a type of its own says to it
            pass
    try:
        made = type(value)(changed)
        if all(made[key] is item for key, item in changed.items()):
            return made
    except Exception:
        pass
    return changed


def make_sequence(value: Any, parts: list[Any]) -> Any:
    """A copy of `value` with other items; a list where its type allows none. `value`
    stays as it is.
    """
    if isinstance(value, MutableSequence):
        try:
            return _with_items(value, list(enumerate(parts)))
        except Exception:
            return parts
    try:
        made = type(value)(parts)
    except Exception:
        return parts
    return made


def is_packed(value: object) -> bool:
    """Is it a `PackedSequence`, whose ``batch_sizes`` PyTorch wants on the CPU?"""
    packed = getattr(sys.modules.get("torch.nn.utils.rnn"), "PackedSequence", None)
    return packed is not None and isinstance(value, packed)


def is_record(value: object) -> bool:
    """Is it a dataclass's, or one of attrs?"""
    if isinstance(value, type):
        return False
    return dataclasses.is_dataclass(value) or hasattr(type(value), "__attrs_attrs__")


def _field_names(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return [field.name for field in type(value).__attrs_attrs__]


def make_record(value: Any, function: Callable[[str], Any]) -> Any:
    """A copy of `value` with ``function(name)`` for each field that it has.

    Without ``__init__``, which may want other arguments.
    """
    made = copy.copy(value)
    for name in _field_names(value):
        if hasattr(value, name):
            object.__setattr__(made, name, function(name))
    return made


def is_tensordict(value: Any) -> bool:
    """Is it a TensorDict? Its library is not imported to find out."""
    kind = getattr(sys.modules.get("tensordict"), "TensorDict", None)
    return kind is not None and isinstance(value, kind)


def make_tensordict(items: Any, batch_size: Any) -> Any:
    """A TensorDict with these pairs of names and tensors, on whatever device they are."""
    made = importlib.import_module("tensordict").TensorDict({}, batch_size)
    for key, part in items:
        made[key] = part
    return made


def moves_itself(value: Any) -> bool:
    """Has it a ``to(device, ...)`` of its own, as batches of PyTorch Geometric,
    detectron2 and tensordict have?

    Modules are left out, which ``to`` changes in place, and so are dicts, which can be
    taken apart.
    """
    torch = sys.modules.get("torch")
    if torch is None or isinstance(value, (type, dict, collections.UserDict)):
        return False
    modules = getattr(sys.modules.get("torch.nn"), "Module", ())
    if isinstance(value, modules) or is_tensor(value) or is_packed(value):
        return False
    to = getattr(type(value), "to", None)
    return callable(to) and _takes_device(to)


def _takes_device(to: Any) -> bool:
    """Not so ``quantity.to(unit)`` and ``time.to(zone)``."""
    parameters = _parameters(to)
    return (
        bool({"device", "non_blocking"} & set(parameters))
        or [each.kind for each in parameters.values()].count(
            inspect.Parameter.VAR_POSITIONAL
        )
        > 0
    )


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Those of a method, without `self`; none of what does not tell."""
    try:
        return dict(list(inspect.signature(function).parameters.items())[1:])
    except (TypeError, ValueError):
        return {}


def move_whole(value: Any, device: Any, copies: bool) -> Any:
    """``value.to(device, non_blocking=True)``, which leaves `value` as it is.

    With `copies` it is a copy also where the device is that of `value`.
    """
    try:
        made = copy.deepcopy(value) if copies else _shallow(value)
    except Exception:  # what cannot be copied is moved itself
        made = value
    parameters = _parameters(type(value).to)
    kinds = {each.kind for each in parameters.values()}
    if "non_blocking" in parameters or inspect.Parameter.VAR_KEYWORD in kinds:
        return made.to(device, non_blocking=True)
    return made.to(device)


def holds_memory(value: Any, depth: int = 2) -> bool:
    """Does what is no array itself hold some, as far as can be seen?

    Its attributes and the items of its containers are looked at, and whether it says
    that it can become an array. Numbers and text are none.
    """
    kind = type(value)
    if value is None or isinstance(
        value, (str, bytes, bool, int, float, complex, type)
    ):
        return False
    if is_tensor(value) or _is_array(kind):
        return True
    if depth == 0:
        return False
    inner: list[Any] = [item for _, item in _attributes(value)]
    if isinstance(value, Mapping):
        inner += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        inner += value
    return any(holds_memory(each, depth - 1) for each in inner)


def _is_array(kind: type) -> bool:
    """Not a NumPy scalar, which is of a dtype, and what is on a device already."""
    if kind.__module__ == "numpy" and kind.__name__ != "ndarray":
        return False
    if hasattr(kind, "__cuda_array_interface__"):
        return False
    names = ("__array__", "__array_interface__", "__dlpack__")
    return any(hasattr(kind, name) for name in names)


def mapped(
    value: Any,
    function: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """The same structure with ``function(leaf)`` for each leaf.

    Mappings, sequences, named tuples, dataclasses and those of attrs are taken apart;
    subclasses stay what they are where they can. A leaf is anything else, strings among
    them, and what `is_leaf` says is one.
    """
    if is_tensor(value) or isinstance(value, _LEAVES):
        return function(value)
    if is_leaf is not None and is_leaf(value):
        return function(value)

    def inner(part: Any) -> Any:
        return mapped(part, function, is_leaf)

    if isinstance(value, Mapping):
        return make_mapping(value, {key: inner(value[key]) for key in value})
    if isinstance(value, Sequence):
        kept = 1 if is_packed(value) else None
        parts = [part if i == kept else inner(part) for i, part in enumerate(value)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts)
        return make_sequence(value, parts)
    if is_record(value):
        return make_record(value, lambda name: inner(getattr(value, name)))
    return function(value)
