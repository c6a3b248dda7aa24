# SPDX-License-Identifier: Apache-2.0
"""Moves a nested structure of arrays and tensors to a device and back, by one copy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from cumem import _core
from cumem.base.errors import warn_caller
from cumem.base.kinds import is_on_device
from cumem.buffers.arguments import hinting
from cumem.interchange.structures import (
    M2,
    M,
    Memory,
    Tree,
    UntypedTree,
    is_tensor,
    mapped,
)
from cumem.transfers.loading import _carried, _like, is_left, tensor_over

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
K = TypeVar("K")
_S = TypeVar("_S", bound=tuple[int, ...])
_D = TypeVar("_D", bound=np.dtype[Any])


class _Leaves:
    """Collects the new leaves of a structure, and the copies that have to fill them.

    A leaf that occurs twice is copied once. So is memory over which several leaves have the
    same shape and strides, such as tied weights. The new leaves share memory as the old
    ones do.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        #: New leaves by the ids of the old ones, which are kept so that ids stay unique.
        self._by_leaf: dict[int, tuple[Any, Any]] = {}
        self._by_memory: dict[tuple[object, ...], Any] = {}

    def once(self, leaf: Any, move: Callable[[Any], Any]) -> Any:
        """Return ``move(leaf)``, which is called only once for each leaf."""
        if id(leaf) not in self._by_leaf:
            self._by_leaf[id(leaf)] = leaf, move(leaf)
        return self._by_leaf[id(leaf)][1]

    def copied(
        self, source: Any, like: object, make: Callable[[Any], tuple[Any, Any]]
    ) -> Any:
        """Return the new leaf that `make` makes for `source`, and plan the copy into it."""
        place = _place(source)
        key = (*place, source.shape, str(source.dtype), like)
        if place[0] == 0 or key not in self._by_memory:
            there, target = make(source)
            self.pairs.append((target, source))
            self._by_memory[key] = there
        return self._by_memory[key]

    def copy(self, stream: Any) -> None:
        """Begin all copies at once; wait for them if no stream is given."""
        if self.pairs and stream is None:
            _core.copy_many(self.pairs)
        elif self.pairs:
            _core.copy_many_async(self.pairs, stream=stream)


def _place(source: Any) -> tuple[int, tuple[int, ...]]:
    """Return the address of the memory, or 0 if there is none, and its strides."""
    if is_tensor(source):
        return source.data_ptr(), source.stride()
    if isinstance(source, _core.Buffer):
        return source._address, source.strides
    return int(
        source.__array_interface__["data"][0]
    ) if source.size else 0, source.strides


@overload
def to_device(
    tree: UntypedTree, device: object = ..., *, stream: object = ...
) -> Any: ...
@overload
def to_device(
    tree: Memory, device: object = ..., *, stream: object = ...
) -> _core.DeviceBuffer: ...
@overload
def to_device(
    tree: tuple[M, M2], device: object = ..., *, stream: object = ...
) -> tuple[_core.DeviceBuffer, _core.DeviceBuffer]: ...
@overload
def to_device(
    tree: tuple[M, ...], device: object = ..., *, stream: object = ...
) -> tuple[_core.DeviceBuffer, ...]: ...
@overload
def to_device(
    tree: list[M], device: object = ..., *, stream: object = ...
) -> list[_core.DeviceBuffer]: ...
@overload
def to_device(
    tree: dict[K, M], device: object = ..., *, stream: object = ...
) -> dict[K, _core.DeviceBuffer]: ...
@overload
def to_device(tree: Tree, device: object = ..., *, stream: object = ...) -> Any: ...
@overload
def to_device(tree: T, device: object = ..., *, stream: object = ...) -> T: ...
@hinting
def to_device(tree: Any, device: object = None, *, stream: object = None) -> Any:
    """Copy the arrays and tensors of a nested structure to a device, by one call.

    Parameters
    ----------
    tree : object
        An array, a CPU tensor or a buffer; or mappings, lists, tuples, named tuples and
        dataclasses that contain them, also nested.
    device : Device, int or str, optional
        The device; by default the current one, as for `prefetch`.
    stream : stream, optional
        The stream of the device in whose order to copy. By default it is the current
        stream, and the call waits for the copies.

    Returns
    -------
    object
        The same structure, with the same types. Arrays of NumPy and buffers become
        `DeviceBuffer`, and tensors of PyTorch become tensors on the device. They keep their
        shape, dtype and order of axes in memory. Other leaves stay as they are: numbers,
        texts, arrays of Python objects, and everything that is on the device already. If
        such a leaf contains arrays, as an object of your own class may, a `UserWarning`
        names its type.

    Raises
    ------
    TypeError
        If a tensor is sparse, quantised or nested, or wraps other tensors, or if elements
        of an array are masked.
    ValueError
        If the device does not exist.
    OutOfMemoryError, CudaError
        If the driver refuses.

    See Also
    --------
    to_host : Copy a structure back.
    prefetch : Copy the batches of a loader, ahead of the work on them.

    Notes
    -----
    **Blocks** until the copies are done. With a stream it blocks only where `copy_async`
    would block for one of the copies. **Ordered after** all work that cumem knows of on any
    leaf. A leaf that occurs twice is copied once, and so is memory over which two leaves
    have the same shape and strides; the new leaves share the copy. Views that overlap in
    another way become separate memory. Tensors arrive without gradients. On the emulated
    device they are CPU tensors over the memory of the device, as with `prefetch`.

    Examples
    --------
    >>> model = {"weight": numpy.ones((2, 3)), "bias": [numpy.zeros(3)], "name": "first"}
    >>> there = cumem.to_device(model)
    >>> there["weight"].kind, there["bias"][0].shape, there["name"]
    ('device', (3,), 'first')
    >>> cumem.to_host(there)["weight"].sum()
    np.float64(6.0)
    """
    place = _core._device(device, "device", True)
    leaves = _Leaves()
    left: set[str] = set()

    def make(source: Any) -> tuple[_core.Buffer, _core.Buffer]:
        like = _core.asbuffer(source) if is_tensor(source) else source
        made = _core.empty_like(like, kind="device", device=place, stream=stream)
        return made, made

    def make_tensor(source: Any) -> tuple[Any, _core.Buffer]:
        buffer, _ = make(source)
        # Export the buffer before the copy is begun, since an export waits for it.
        return tensor_over(buffer), buffer

    def move(leaf: Any) -> Any:
        if is_tensor(leaf):
            if leaf.device.type != "cpu":
                is_at_target = (
                    leaf.device.type != "cuda" or leaf.device.index == place.index
                )
                return leaf if is_at_target else leaf.to(f"cuda:{place.index}")
            there = leaves.copied(_carried(leaf), str(leaf.dtype), make_tensor)
            return _like(leaf, there)
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            return leaves.copied(leaf, None, make)
        if isinstance(leaf, _core.Buffer):
            is_at_target = is_on_device(leaf.kind) and leaf.device == place
            return leaf if is_at_target else leaves.copied(leaf, None, make)
        if is_left(leaf):
            left.add(type(leaf).__name__)
        return leaf

    there = mapped(tree, lambda leaf: leaves.once(leaf, move))
    leaves.copy(stream)
    if left:
        warn_caller(
            "to_device() cannot take these apart and leaves them where they are: "
            f"{', '.join(sorted(left))}. Make such a type a dataclass, give dicts, lists "
            "and arrays in its place, or move it by a method of its own, as .to(device)",
            UserWarning,
        )
    return there


@overload
def to_host(tree: UntypedTree, *, stream: object = ...) -> Any: ...
@overload
def to_host(tree: _core.Buffer, *, stream: object = ...) -> NDArray[Any]: ...
@overload
def to_host(
    tree: tuple[M, M2], *, stream: object = ...
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def to_host(
    tree: tuple[M, ...], *, stream: object = ...
) -> tuple[NDArray[Any], ...]: ...
@overload
def to_host(tree: list[M], *, stream: object = ...) -> list[NDArray[Any]]: ...
@overload
def to_host(tree: dict[K, M], *, stream: object = ...) -> dict[K, NDArray[Any]]: ...
@overload
def to_host(
    tree: np.ndarray[_S, _D], *, stream: object = ...
) -> np.ndarray[_S, _D]: ...
@overload
def to_host(tree: Tree, *, stream: object = ...) -> Any: ...
@overload
def to_host(tree: T, *, stream: object = ...) -> T: ...
@hinting
def to_host(tree: Any, *, stream: object = None) -> Any:
    """Copy the buffers and tensors of a nested structure to the host, by one call.

    Parameters
    ----------
    tree : object
        A buffer or a tensor; or mappings, lists, tuples, named tuples and dataclasses that
        contain them, also nested.
    stream : stream, optional
        The stream in whose order to copy. It must belong to a device that has memory of the
        structure, and the call waits for it. By default it is the device's current stream.

    Returns
    -------
    object
        The same structure, with the same types. Buffers become arrays of NumPy with memory
        of their own, tensors on a device become CPU tensors, and other libraries' arrays on
        a device become arrays of NumPy. Other leaves stay as they are, including arrays and
        CPU tensors.

    Raises
    ------
    TypeError
        If a tensor on a device is sparse, quantised or nested, or wraps other tensors.
    ValueError
        If a buffer is closed.
    CudaError
        If a copy failed.

    See Also
    --------
    to_device : Copy a structure to a device.

    Notes
    -----
    **Blocks** until the copies are done, with the GIL released. **Ordered after** all work
    that cumem knows of on any leaf. Shared memory is copied once, as by `to_device`. On the
    emulated device, tensors are on the CPU already and stay as they are.

    Examples
    --------
    >>> host = cumem.to_host([cumem.full(3, 7.0), ("text", cumem.zeros(2, "i4", "pinned"))])
    >>> host[0]
    array([7., 7., 7.])
    >>> host[1]
    ('text', array([0, 0], dtype=int32))
    """
    leaves = _Leaves()

    def make(source: Any) -> tuple[Any, Any]:
        # Only the strides of this array are read. It has bytes for elements, since NumPy's
        # as_strided() does not know each dtype of ml_dtypes.
        layout = np.lib.stride_tricks.as_strided(
            np.empty(1, "u1"), source.shape, source.strides
        )
        made = np.empty_like(layout, source.dtype, order="K", subok=False)
        return made, made

    def make_tensor(source: Any) -> tuple[Any, Any]:
        made = sys.modules["torch"].empty_like(source, device="cpu")
        return made, made

    def move(leaf: Any) -> Any:
        if is_tensor(leaf):
            if leaf.device.type != "cuda":
                return leaf
            there = leaves.copied(_carried(leaf), str(leaf.dtype), make_tensor)
            return _like(leaf, there)
        if isinstance(leaf, _core.Buffer):
            return leaves.copied(leaf, None, make)
        if hasattr(leaf, "__cuda_array_interface__"):
            return leaves.copied(_core.asbuffer(leaf, stream=stream), None, make)
        return leaf

    there = mapped(tree, lambda leaf: leaves.once(leaf, move))
    if leaves.pairs:
        _core.copy_many(leaves.pairs, stream=stream)
    return there
