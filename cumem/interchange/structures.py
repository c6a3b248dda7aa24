# SPDX-License-Identifier: Apache-2.0
"""Copies nested data, and puts other leaves into the same structure.

`mapped` applies a function to each leaf of a structure of dicts, lists, named tuples,
dataclasses and subclasses of these. The result should have the same types as the original
and share nothing with it that can be changed. Types of other libraries make that difficult,
because their copies may share the items, or their constructors may take other arguments. So
a copy is always checked for the items that it should have. If it is wrong, a plain dict or
list takes its place.
"""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from types import ModuleType
from typing import Any, TypeAlias, TypeVar, final

import numpy as np

from cumem import _core

# The types here tell type checkers about structures whose memory is moved.


@final
class Untyped:
    """A type that no value has, so that only an argument of type `Any` matches it.

    Overloads for this type come first and promise nothing about the result. Without them,
    an argument of type `Any` would match a later overload, which promises too much.
    """


#: An array or a buffer, whose type changes when it is moved.
Memory: TypeAlias = np.ndarray[Any, Any] | _core.Buffer
M = TypeVar("M", bound=Memory)
M2 = TypeVar("M2", bound=Memory)
Leaf: TypeAlias = Memory | np.generic | complex | str | bytes | None
#: Nested arrays, buffers, numbers and texts. Overloads give the type of the result only for
#: a few simple structures.
Tree: TypeAlias = "Leaf | Mapping[Any, Tree] | Sequence[Tree] | _Mixed"
_Mixed: TypeAlias = dict[Any, object] | list[object]  # mypy infers these types
UntypedTree: TypeAlias = (
    Untyped | tuple[Untyped, ...] | list[Untyped] | dict[Any, Untyped]
)

#: Sequences whose items cannot be memory, and which are therefore leaves.
_LEAVES = (str, bytes, bytearray, memoryview, array.array, range)


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor of PyTorch, without importing PyTorch."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def is_functional(tensor: Any) -> bool:
    """Return whether a transform such as `vmap` or `compile` traces with this tensor.

    Such a tensor has the type `torch.Tensor` too, but no memory.
    """
    torch = sys.modules["torch"]
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped or bool(torch._is_functional_tensor(tensor))


def is_plain_tensor(tensor: Any) -> bool:
    """Return whether address, strides and dtype alone determine the elements."""
    strided = tensor.layout is sys.modules["torch"].strided
    return strided and not tensor.is_quantized and has_own_memory(tensor)


def has_own_memory(tensor: Any) -> bool:
    """Return whether a tensor has memory itself, unlike one that wraps other tensors."""
    tensors = sys.modules["torch"].Tensor
    own = type(tensor).__torch_dispatch__ == tensors.__torch_dispatch__
    return own and not tensor.is_nested and not is_functional(tensor)


#: Containers of which `copy.copy` makes copies whose items can be replaced separately.
_OWN_ITEMS = (dict, collections.UserDict, list, collections.deque, collections.UserList)


def _shallow(value: Any) -> Any:
    """Copy a container so that changing the copy does not change the original.

    Types of other libraries often keep their items in a dict or list, which `copy.copy`
    shares with the copy. Those attributes are copied as well.
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
    """Copy a mutable container and give it other items, or raise a TypeError.

    Afterwards this checks that the original still has its own items.
    """
    before = [(key, value[key]) for key, _ in changed]
    made = _shallow(value)
    for key, item in changed:
        made[key] = item
    touched = [(key, item) for key, item in before if value[key] is not item]
    if touched and not isinstance(value, _OWN_ITEMS):
        # The copy may share its items in a hidden way. Then the original's items are put
        # back. A container that makes its items on demand returns new ones each time, and
        # was not changed.
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
    """Copy a mapping with other items, or return a dict if its type does not allow that.

    The copy keeps the other attributes of `value`, which is not changed.
    """
    if isinstance(value, MutableMapping):
        try:
            return _with_items(value, list(changed.items()))
        except Exception:  # a type of another library may raise anything
            pass
    try:
        made = type(value)(changed)
        if _has_items(made, changed.items()):
            return made
    except Exception:
        pass
    return changed


def _has_items(made: Any, items: Iterable[tuple[Any, Any]]) -> bool:
    return all(made[key] is item for key, item in items)


def make_sequence(value: Any, parts: list[Any]) -> Any:
    """Copy a sequence with other items, or return a list if its type does not allow that.

    `value` is not changed.
    """
    if isinstance(value, tuple):
        return _make_tuple(value, parts)
    if isinstance(value, MutableSequence):
        try:
            return _with_items(value, list(enumerate(parts)))
        except Exception:
            return parts
    try:
        made = type(value)(parts)
        if len(made) == len(parts) and _has_items(made, enumerate(parts)):
            return made
    except Exception:
        pass
    return parts


def _make_tuple(value: tuple[Any, ...], parts: list[Any]) -> Any:
    """Make a tuple of the same type, as `copy` and `pickle` do.

    The ``__new__`` of the type may take other arguments than the items.
    """
    kind = type(value)
    try:
        made = tuple.__new__(kind, parts)
        vars(made).update(vars(value))
    except TypeError:  # value has no attributes, or is implemented in C like torch.Size
        pass
    else:
        return made
    try:
        return tuple.__new__(kind, parts)
    except TypeError:
        return kind(parts)


def is_packed(value: object) -> bool:
    """Return whether a value is a `PackedSequence`, whose `batch_sizes` stay on the CPU."""
    packed = getattr(sys.modules.get("torch.nn.utils.rnn"), "PackedSequence", None)
    return packed is not None and isinstance(value, packed)


def is_record(value: object) -> bool:
    """Return whether a value is an instance of a dataclass or of a class of attrs."""
    if isinstance(value, type):
        return False
    return dataclasses.is_dataclass(value) or hasattr(type(value), "__attrs_attrs__")


def field_names(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return [field.name for field in type(value).__attrs_attrs__]


def make_record(value: Any, function: Callable[[str], Any]) -> Any:
    """Copy `value`, with ``function(name)`` as the value of each of its fields.

    This does not call ``__init__``, which may take other arguments.
    """
    made = copy.copy(value)
    for name in field_names(value):
        if hasattr(value, name):
            object.__setattr__(made, name, function(name))
    return made


def is_tensordict(value: Any) -> bool:
    """Return whether a value is a TensorDict, without importing its library."""
    kind = getattr(sys.modules.get("tensordict"), "TensorDict", None)
    return kind is not None and isinstance(value, kind)


def make_tensordict(items: Any, batch_size: Any) -> Any:
    """Make a TensorDict of pairs of names and tensors, on whatever devices they are."""
    made = importlib.import_module("tensordict").TensorDict({}, batch_size)
    for key, part in items:
        made[key] = part
    return made


def moves_itself(value: Any) -> bool:
    """Return whether a value should be moved by its own method ``to(device, ...)``.

    Batches of PyTorch Geometric, detectron2 and tensordict are such types. Modules are not,
    because their ``to`` changes them in place. Dicts are not, because they can be taken
    apart.
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
    """Return whether ``to`` takes a device, unlike ``quantity.to(unit)``."""
    parameters = _parameters(to)
    return (
        bool({"device", "non_blocking"} & set(parameters))
        or [each.kind for each in parameters.values()].count(
            inspect.Parameter.VAR_POSITIONAL
        )
        > 0
    )


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Return a method's parameters without `self`, or none if they are unknown."""
    try:
        return dict(list(inspect.signature(function).parameters.items())[1:])
    except (TypeError, ValueError):
        return {}


def move_whole(value: Any, device: Any, copies: bool) -> Any:
    """Return ``value.to(device, non_blocking=True)`` without changing `value`.

    With `copies` the answer is a copy even if `value` is on the device already.
    """
    if is_tensor(value):
        return (
            value.to(device, copy=True)
            if copies
            else value.to(device, non_blocking=True)
        )
    try:
        made = copy.deepcopy(value) if copies else _shallow(value)
    except Exception:  # it cannot be copied, so the value itself is moved
        made = value
    if copies or made is value:
        return _move(made, device)
    places = list(_places(value))
    moved = _move(made, device)
    touched = [put for put, held, read in places if read() is not held]
    if not touched:
        return moved
    # The method changed something in place that the shallow copy shares with the value.
    # This is undone, and everything but the memory is copied for a second attempt.
    for put in touched:
        put()
    memory = {id(held): held for _, held, _ in places if is_memory(held)}
    return _move(copy.deepcopy(value, memory), device)


def _move(made: Any, device: Any) -> Any:
    to = type(made).to
    parameters = _parameters(to)
    kinds = {each.kind for each in parameters.values()}
    keywords: dict[str, Any] = {}
    if "non_blocking" in parameters or inspect.Parameter.VAR_KEYWORD in kinds:
        keywords["non_blocking"] = True
    place = parameters.get("device")
    if place is not None and place.kind is inspect.Parameter.KEYWORD_ONLY:
        moved = made.to(device=device, **keywords)
    else:
        moved = made.to(device, **keywords)
    # Some types move themselves and return None.
    return made if moved is None else moved


#: How deep `move_whole` searches for memory that a ``to`` has changed in place.
_DEPTH = 6


def _places(
    value: Any, depth: int = _DEPTH
) -> Iterator[tuple[Callable[[], Any], Any, Callable[[], Any]]]:
    """Yield every place at which a structure holds a value.

    For each place, yield a function that puts the present value back, that value, and a
    function that reads the place.
    """
    if depth == 0 or value is None or isinstance(value, (type, ModuleType, *_LEAVES)):
        return
    if is_memory(value):
        return
    for put, held, read in _held_places(value):
        yield functools.partial(put, held), held, read
        yield from _places(held, depth - 1)


def _held_places(
    value: Any,
) -> Iterator[tuple[Callable[[Any], Any], Any, Callable[[], Any]]]:
    """Yield the attributes and items of one object in the same form."""
    partial = functools.partial
    for name, held in _attributes(value):
        yield (
            partial(object.__setattr__, value, name),
            held,
            partial(getattr, value, name, None),
        )
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield (
                partial(value.__setitem__, key),
                value[key],
                partial(_item, value, key),
            )
    elif isinstance(value, tuple):
        for i, held in enumerate(value):  # nothing can change a tuple's items
            yield (lambda same: same), held, partial(_item, value, i)


def _item(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except LookupError:
        return None


#: How many items of a container of unknown type are examined.
_LOOK = 64


def holds_memory(value: Any) -> bool:
    """Return whether a value holds arrays or tensors that `memory_in` can find."""
    return next(memory_in(value), None) is not None


def is_memory(value: object) -> bool:
    """Return whether a value is a tensor or array, or can become one by a protocol."""
    return is_tensor(value) or _is_array(type(value))


def memory_in(value: Any, depth: int = 2) -> Iterator[Any]:
    """Yield the arrays and tensors that can be found in an object.

    This examines attributes, and items of containers. Numbers and texts do not count as
    memory.
    """
    if value is None or isinstance(
        value, (str, bytes, bool, int, float, complex, type)
    ):
        return
    if is_memory(value):
        yield value
        return
    if depth == 0:
        return
    for _, held in _attributes(value):
        yield from memory_in(held, depth - 1)
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        inner = value
    elif isinstance(value, Collection) and not isinstance(value, _LEAVES):
        with contextlib.suppress(Exception):  # an unknown type may raise anything
            inner = list(itertools.islice(value, _LOOK))
    for each in inner:
        yield from memory_in(each, depth - 1)


def exports_memory(value: Any) -> bool:
    """Return whether a value exports bytes, as memoryviews, `mmap` and ctypes arrays do.

    `bytes`, which cannot be changed, and NumPy's scalars export their bytes too, but do not
    count.
    """
    if isinstance(value, bytes) or type(value).__module__ == "numpy":
        return False
    try:
        memoryview(value).release()
    except Exception:  # most types raise TypeError, others may raise anything
        return False
    return True


def _is_array(kind: type) -> bool:
    """Return whether a type is that of arrays on the host; NumPy's scalars do not count."""
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
    report_left: Callable[[str], object] | None = None,
) -> Any:
    """Return the same structure with ``function(leaf)`` for each leaf.

    Mappings, sequences, named tuples, dataclasses and classes of attrs are taken apart.
    Instances of subclasses keep their type if possible, and `function` is also applied to
    memory in their other attributes. `report_left` is called with the names of the
    attributes where that is impossible. Everything else is a leaf, including strings, and
    so is everything for which `is_leaf` returns True. If the same leaf occurs twice,
    `function` should return the same object for it.
    """
    return _Mapping(function, is_leaf, report_left).of(value)


class _Mapping:
    """One call of `mapped`."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        is_leaf: Callable[[Any], bool] | None,
        report_left: Callable[[str], object] | None,
    ) -> None:
        self._function = function
        self._is_leaf = is_leaf
        self._report_left = report_left
        self._path: set[int] = set()  # ids of the containers that are being taken apart

    def of(self, value: Any) -> Any:
        if is_tensor(value) or isinstance(value, _LEAVES):
            return self._function(value)
        if self._is_leaf is not None and self._is_leaf(value):
            return self._function(value)
        if id(value) in self._path:  # an attribute of the container leads back to it
            return self._apart(value)
        self._path.add(id(value))
        try:
            return self._apart(value)
        finally:
            self._path.discard(id(value))

    def _apart(self, value: Any) -> Any:
        parts: list[tuple[Any, Any]]
        if isinstance(value, Mapping):
            parts = [(key, self.of(value[key])) for key in value]
            made = make_mapping(value, dict(parts))
            return self._with_attributes(value, made, parts)
        if isinstance(value, Sequence):
            kept = 1 if is_packed(value) else None
            parts = [
                (i, part if i == kept else self.of(part))
                for i, part in enumerate(value)
            ]
            made = make_sequence(value, [part for _, part in parts])
            return self._with_attributes(value, made, parts)
        if is_record(value):
            made = make_record(value, lambda name: self.of(getattr(value, name)))
            return self._with_attributes(value, made, [], field_names(value))
        return self._function(value)

    def _with_attributes(
        self,
        value: Any,
        made: Any,
        items: list[tuple[Any, Any]],
        fields: Sequence[str] = (),
    ) -> Any:
        """Return `made` with the memory that `value` has outside its items and fields.

        Such memory is in attributes that a program has set. `items` are the items of
        `made`.
        """
        if type(value) in (dict, list, tuple):
            return made
        known: set[int] | None = None  # ids of the memory of the items
        for name, held in _attributes(value):
            if name in fields or id(held) in self._path:
                continue
            memory = list(memory_in(held))
            if not memory:
                continue
            if known is None:
                before = [value[key] for key, _ in items]
                known = {id(each) for part in before for each in memory_in(part)}
            # An attribute that holds only the items themselves gets the new items. If it
            # cannot be taken apart, it stays as it is.
            is_more = any(id(each) not in known for each in memory)
            if not is_more and self._is_opaque(held):
                continue
            is_set = self._set(made, name, held, value, items)
            # If the type of the container does not allow other items, `made` is a dict or a
            # list. Its items may come from this very attribute, and then nothing is lost.
            is_lost = type(made) is type(value) or memory[0] is held
            if is_more and not is_set and is_lost and self._report_left is not None:
                self._report_left(f"{type(value).__name__}.{name}")
        return made

    def _is_opaque(self, held: Any) -> bool:
        """Return whether `mapped` would treat a value as a leaf."""
        return not (
            is_memory(held)
            or isinstance(held, (Mapping, Sequence))
            or is_record(held)
            or (self._is_leaf is not None and self._is_leaf(held))
        )

    def _set(
        self, made: Any, name: str, held: Any, value: Any, items: list[tuple[Any, Any]]
    ) -> bool:
        """Set the attribute, or return False if that would change the items."""
        if type(made) is not type(value):
            return False
        try:
            before = getattr(made, name)
            object.__setattr__(made, name, self.of(held))
            if _has_items(made, items):
                return True
            object.__setattr__(made, name, before)
        except AttributeError:
            pass
        return False


def change_attributes(tensor: Any, function: Callable[[Any], Any]) -> None:
    """Replace each attribute of a tensor that holds memory by ``function(held)``."""
    for name, held in list(vars(tensor).items()):
        if holds_memory(held):
            vars(tensor)[name] = function(held)
