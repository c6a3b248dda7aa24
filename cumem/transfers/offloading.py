# SPDX-License-Identifier: Apache-2.0
"""Moves what PyTorch keeps on a device to pinned memory, until it is needed again.

`offload_activations` does this for tensors that autograd saves for backward. PyTorch calls
`_pack` for each saved tensor and `_unpack` when backward needs it. The bytes of a storage
are a `_Saved`, which several tensors may share, and the graph holds a `_Packed` in place
of each tensor. Three things make this harder than two copies:

- PyTorch reuses device memory in the order of its streams. So a copy must keep the memory's
  owner alive until the stream that uses the memory waits for the copy (`_Memory`).
- The host may run far ahead of the device. So `_copy_down` limits how many tensors are
  being copied at a time. Without that limit, the device could need more memory than without
  offloading.
- PyTorch detects when a saved tensor was changed in place. `_Packed.check` does the same
  here, although the bytes were copied.

`offload` and `restore` move the tensors of a module or of a state dict.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, SupportsIndex, TypeVar, final

import numpy as np

from cumem import _core
from cumem.base.locks import make_lock
from cumem.base.places import found_in
from cumem.base.units import format_count, format_nbytes, read_count, read_size
from cumem.buffers.arguments import hinting
from cumem.interchange.structures import has_own_memory, is_tensordict, make_tensordict

_T = TypeVar("_T")


def _torch(who: str) -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ImportError(f"{who}() needs PyTorch, which is not installed") from error


def _device_type() -> str:
    """Return the device type of tensors to offload, which is "cpu" under emulation."""
    return "cpu" if _core._read_backend()[0] == "emulated" else "cuda"


class _Memory:
    """Bytes of a device that take part in a copy.

    A transfer keeps this object alive, and with it the memory's owner, until the host sees
    that the copy is done. But PyTorch reuses memory in the order of streams, so the
    reference to the owner is removed as soon as a stream waits for the copy. If Ctrl-C
    comes before that, the reference stays.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.owner: Any = None
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "stream": None,  # cumem orders the copies itself
        }


class _HostMemory(np.ndarray):
    """Bytes of an emulated device; `_Memory` does the same for a GPU."""

    owner: Any = None


class _Pointed:
    """Gives NumPy the address and length of a tensor's storage."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _pinned(nbytes: int, device: Any) -> _core.Buffer:
    """Allocate pinned memory that this device locks, so that no other gets a context."""
    return _core.empty_pinned(nbytes, "u1", device=device.index)


class _Link:
    """The two streams for copies from a device and to it."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._device = device
        self._down = _core.Stream(device=device.index)
        self._up = _core.Stream(device=device.index)

    def is_open(self) -> bool:
        """Return whether the streams are open; shutdown() closes them."""
        try:
            return self._down.handle != 0
        except ValueError:
            return False

    def current(self) -> Any:
        """Return the stream of PyTorch that the caller works on."""
        return self._torch.cuda.current_stream(self._device)

    def take(self, host: _core.Buffer, memory: Any, stream: Any) -> _core.Transfer:
        """Copy to the host, after the work of `stream`."""
        self._down.wait(stream)
        return _core.copy_async(host, memory, stream=self._down)

    def bring(self, memory: Any, host: _core.Buffer) -> _core.Transfer:
        """Copy to the device, after the work that last used the device memory."""
        self._up.wait(self.current())
        return _core.copy_async(memory, host, stream=self._up)

    def order(self, transfer: _core.Transfer, stream: Any) -> None:
        """Order the work that is queued on `stream` from now on after the copy."""
        transfer.order(stream)

    def copy(self, pairs: list[tuple[Any, Any]]) -> None:
        """Make all copies after the current stream's work, and wait for them."""
        _core.copy_many(pairs, stream=self.current())

    def memory(self, address: int, nbytes: int) -> Any:
        return _Memory(address, nbytes)


class _EmulatedLink(_Link):
    """A link for PyTorch on the processor, which has no streams; so `order` waits."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._down = _core.Stream()
        self._up = _core.Stream()

    def current(self) -> Any:
        return None

    def take(self, host: _core.Buffer, memory: Any, stream: Any) -> _core.Transfer:
        return _core.copy_async(host, memory, after=self._down)

    def bring(self, memory: Any, host: _core.Buffer) -> _core.Transfer:
        return _core.copy_async(memory, host, after=self._up)

    def order(self, transfer: _core.Transfer, stream: Any) -> None:
        transfer.wait()

    def copy(self, pairs: list[tuple[Any, Any]]) -> None:
        _core.copy_many(pairs)

    def memory(self, address: int, nbytes: int) -> Any:
        return np.asarray(_Pointed(address, nbytes)).view(_HostMemory)


#: The link of each device. It is kept because making streams takes long, and a program may
#: offload many times.
_links: dict[Any, _Link] = {}


def _link_of(torch: Any, device: Any) -> _Link:
    link = _links.get(device)
    if link is None or not link.is_open():
        kind = _Link if device.type == "cuda" else _EmulatedLink
        link = _links[device] = kind(torch, device)
    return link


class _Saved:
    """Bytes that autograd saves, which are on the device, on the host, or on their way."""

    def __init__(
        self,
        link: _Link,
        storage: Any,
        begin: int,
        nbytes: int,
        weak: Any,
        alias: Any,
        previous: _Saved | None,
    ) -> None:
        self.link = link
        self.begin = begin  #: the offset of the bytes in `source`
        self.nbytes = nbytes
        self.weak = weak  #: a weak reference to the storage that was saved
        self.alias = alias  #: a tensor with the change counter of the bytes
        self.source: Any = storage  #: kept until the copy is done in stream order
        self.host: Any = None
        self.down: _core.Transfer | None = None  #: copies the bytes to `host`
        self.down_end: Any = None  #: the device end of that copy, which owns `source`
        self.back: Any = None  #: the storage of the bytes after they were brought back
        self.up: _core.Transfer | None = None  #: copies the bytes back
        self.up_end: Any = None  #: the device end of that copy, which owns `back`
        self.count = 0  #: the number of saved tensors with these bytes
        self.pending = 0  #: how many of them backward has not asked for yet
        self.stream = link.current()
        self.previous = _ref(
            previous
        )  #: the bytes saved before, needed next by backward

    def copy_down(self) -> None:
        """Begin to copy the bytes to the host."""
        self.host = _pinned(self.nbytes, self.source.device)
        address = self.source.data_ptr() + self.begin
        self.down_end = self.link.memory(address, self.nbytes)
        self.down_end.owner = self.source
        self.down = self.link.take(self.host, self.down_end, self.stream)

    def release(self) -> None:
        """Give the device's memory back to PyTorch, which reuses it in stream order."""
        assert self.down is not None
        if not self.down.done:
            self.link.order(self.down, self.stream)
        self.source = self.down_end.owner = None

    def copy_up(self, torch: Any, device: Any) -> None:
        """Begin to bring the bytes back, unless they are on the device."""
        if self.source is None and self.back is None:
            flat = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            self.stream = self.link.current()
            self.up_end = self.link.memory(flat.data_ptr(), self.nbytes)
            self.up_end.owner = flat
            self.up = self.link.bring(self.up_end, self.host)
            self.back = flat.untyped_storage()

    def take(self) -> tuple[Any, int]:
        """Return a storage that the current stream may use, and the offset in it."""
        storage, begin = self.source, self.begin
        if storage is None:
            storage, begin = self.back, 0
            if self.up is not None:
                self.link.order(self.up, self.link.current())
        self.pending -= 1
        if self.pending <= 0:
            self.pending = self.count
            if self.up_end is not None:
                self.up_end.owner = None
            self.back = self.up = self.up_end = None
        return storage, begin

    def __del__(self) -> None:
        # No memory of the device may be reused while a copy of it is running.
        for end, copy in ((self.down_end, self.down), (self.up_end, self.up)):
            if end is not None and end.owner is not None and copy is not None:
                with contextlib.suppress(Exception):  # waiting for the copy reports it
                    if not copy.done:
                        self.link.order(copy, self.stream)
                    end.owner = None


#: Views and casts that layers and autocast make of parameters.
_SAME_VALUES = frozenset(
    f"{name}Backward0"
    for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias")
) | {"ToCopyBackward0"}


def _is_of_parameter(torch: Any, tensor: Any) -> bool:
    """Return whether a tensor is a parameter, or a view or cast of one."""
    function: Any = tensor.grad_fn
    while type(function).__name__ in _SAME_VALUES:
        function = function.next_functions[0][0]
    if type(function).__name__ != "AccumulateGrad":  # this ends the path to a leaf
        return False
    return isinstance(function.variable, torch.nn.Parameter)


#: Held whenever a change counter is read, since `_count_together` changes one briefly.
_counting = make_lock()


def _count_together(torch: Any, one: Any, other: Any) -> bool:
    """Return whether both tensors have the same change counter.

    Tensors that share a storage may have separate counters, such as the parts that
    `torch.unsafe_chunk` returns.
    """
    with _counting, torch.autograd._unsafe_preserve_version_counter(one):
        before = other._version
        torch.autograd.graph.increment_version(one)
        return bool(other._version != before)


def _nothing() -> None:
    """Return None, as a dead weak reference does."""


def _ref(saved: _Saved | None) -> weakref.ref[_Saved] | None:
    return None if saved is None else weakref.ref(saved)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """Stands for a saved tensor in the graph."""

    saved: _Saved
    layout: tuple[Any, ...]  #: offset, shape and strides, in elements
    dtype: Any
    device: Any
    alias: Any  #: a tensor without bytes, but with the saved tensor's change counter
    version: int

    def check(self) -> None:
        """Raise a RuntimeError if the tensor was changed in place."""
        with _counting:
            version = self.alias._version
        if version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified "
                f"by an inplace operation: [{self.alias.type()} {list(self.layout[1])}] is "
                f"at version {version}; expected version {self.version} instead. It was "
                "offloaded by cumem.integrations.torch.offload_activations()"
            )


@found_in("cumem.integrations.torch")
@final
class ActivationOffload:
    """The context manager that `offload_activations` returns; it may be entered again.

    Attributes
    ----------
    tensor_count : int
        The number of saved tensors that go to the host.
    offloaded_nbytes : int
        The bytes that were copied for them so far, counting shared memory once.

    Examples
    --------
    >>> from cumem.integrations.torch import offload_activations
    >>> with offload_activations() as offloaded:
    ...     loss = torch.nn.Linear(4, 4)(torch.ones(4)).sum()
    >>> offloaded.tensor_count  # tensors of a few bytes stay where they are
    0
    """

    def __init__(self, torch: Any, min_nbytes: int, depth: int) -> None:
        self.tensor_count: int = 0
        self.offloaded_nbytes: int = 0
        self._torch = torch
        self._weak = importlib.import_module("torch.multiprocessing.reductions")
        self._min_nbytes = min_nbytes
        self._depth = depth
        self._device_type = _device_type()
        self._lock = make_lock()  # PyTorch runs backward in a thread for each device
        self._known: weakref.WeakValueDictionary[Any, _Saved]
        self._known = weakref.WeakValueDictionary()
        self._leaving: collections.deque[weakref.ref[_Saved]] = collections.deque()
        self._last: dict[Any, weakref.ref[_Saved]] = {}
        self._hooks = threading.local()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__module__}.ActivationOffload: "
            f"{format_count(self.tensor_count, 'tensor')}, "
            f"{format_nbytes(self.offloaded_nbytes)} copied to the host>"
        )

    def __enter__(self) -> Self:
        """Offload what autograd saves in this thread from now on."""
        hooks = self._torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        vars(self._hooks).setdefault("open", []).append(hooks)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Stop offloading; what was saved stays where it is."""
        self._hooks.open.pop().__exit__(exc_type, exc, tb)

    def _is_worth_it(self, tensor: Any) -> bool:
        torch = self._torch
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False  # a parameter, or a tensor without memory of its own
        if not has_own_memory(tensor):
            return False
        if tensor.is_leaf and tensor.requires_grad:
            return False
        if isinstance(tensor._base, torch.nn.Parameter) or _is_of_parameter(
            torch, tensor
        ):
            return False
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < self._min_nbytes or tensor.device.type != self._device_type:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        # A captured graph keeps its memory in any case.
        return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())

    def _pack(self, tensor: Any) -> Any:
        with self._lock, self._torch.no_grad():
            if not self._is_worth_it(tensor):
                return tensor
            return self._save(tensor)

    def _save(self, tensor: Any) -> _Packed:
        torch = self._torch
        alias = tensor.detach()
        with _counting:
            version = alias._version
        device, dtype = tensor.device, tensor.dtype
        size = tensor.element_size()
        storage = tensor.untyped_storage()
        layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        key: tuple[Any, ...] = (storage._cdata, version)
        begin, nbytes = 0, storage.nbytes()
        # If the tensor is a small part of a large storage, only that part is copied.
        if nbytes > 4 * tensor.numel() * size:
            key += (*layout, dtype)
            tensor = tensor.contiguous()
            begin = tensor.storage_offset() * size
            nbytes = tensor.numel() * size
            layout = (0, layout[1], tensor.stride())
        saved = self._known.get(key)
        if saved is None or not _count_together(torch, alias, saved.alias):
            last = self._last.get(device, _nothing)()
            if last is not None and last.down is None:
                self._copy_down(last)
            saved = _Saved(
                _link_of(torch, device),
                tensor.untyped_storage(),
                begin,
                nbytes,
                self._weak.StorageWeakRef(storage),
                alias,
                last,
            )
            # As long as `weak` lives, no other storage can have this key.
            self._known[key] = saved
            self._last[device] = weakref.ref(saved)
        saved.count += 1
        saved.pending += 1
        self.tensor_count += 1
        alias.data = torch.empty(0, dtype=dtype, device=device)
        return _Packed(saved, layout, dtype, device, alias, version)

    def _copy_down(self, saved: _Saved) -> None:
        """Begin to copy `saved` to the host, and release the device memory of older ones.

        At most `depth` copies may be unfinished. So the device needs no more memory if the
        host runs far ahead of it.
        """
        saved.copy_down()
        self.offloaded_nbytes += saved.nbytes
        self._leaving.append(weakref.ref(saved))
        while self._leaving:
            oldest = self._leaving[0]()
            if oldest is not None:
                assert oldest.down is not None
                if len(self._leaving) <= self._depth and not oldest.down.done:
                    break
                oldest.release()
            self._leaving.popleft()

    def _unpack(self, packed: Any) -> Any:
        if not isinstance(packed, _Packed):
            return packed
        packed.check()
        torch, saved = self._torch, packed.saved
        with self._lock, torch.no_grad():
            saved.copy_up(torch, packed.device)
            before = saved
            for _ in range(self._depth):
                following = None if before.previous is None else before.previous()
                if following is None:
                    break
                following.copy_up(torch, packed.device)
                before = following
            tensor = torch.empty(0, dtype=packed.dtype, device=packed.device)
            storage, begin = saved.take()
            offset, shape, strides = packed.layout
            offset += begin // tensor.element_size()
            tensor.set_(storage, offset, shape, strides)
            counted = packed.alias.detach()
            counted.data = tensor  # now a change in place counts for the saved tensor
            return counted


@found_in("cumem.integrations.torch")
@hinting
def offload_activations(
    *, min_nbytes: SupportsIndex | str = "1 MiB", depth: SupportsIndex = 4
) -> ActivationOffload:
    """Keep what PyTorch saves for backward in pinned memory instead of on the device.

    In a ``with`` block, tensors that autograd saves are copied to pooled pinned memory
    while the next layers are computed. Backward brings them back in the reverse order, and
    begins to copy the next ones before it needs them.

    Parameters
    ----------
    min_nbytes : int or str
        Tensors with fewer bytes stay on the device.
    depth : int
        How many tensors may be on their way at the same time, at least 1. These take device
        memory in addition to the tensor that was saved last.

    Returns
    -------
    ActivationOffload
        A context manager to put around the forward pass.

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    TypeError
        If an argument has the wrong type.
    ValueError
        If an argument is out of range.

    Notes
    -----
    Copies run on streams of their own, **ordered after** the work that made a tensor.
    PyTorch's current stream waits for them when it needs the bytes or the memory. The host
    never waits. The copy of a tensor begins when the next one is saved, and the tensor's
    device memory is released when the copy is done in stream order, at the latest after
    `depth` further tensors. The tensors that were saved last are still on the device when
    backward begins, so they need not be copied back. The very last one is not copied at
    all.

    Parameters and their views stay on the device, and so do tensors of less than
    `min_nbytes`, sparse and quantized ones, subclasses, and everything that is saved while
    a CUDA graph is captured. Tensors that share memory are copied once; the copy has the
    whole memory, unless that is more than four times the tensor.

    As without offloading, backward raises a RuntimeError for a tensor that was changed in
    place after it was saved or after backward got it. Changes through ``.data`` are not
    noticed, as in PyTorch itself. If there is not enough pinned memory, the operation whose
    tensor is saved raises an OutOfMemoryError.

    On the emulated device, ordinary CPU tensors take the place of device tensors.

    Examples
    --------
    >>> layers = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU())
    >>> data = torch.ones(1024, 64)
    >>> from cumem.integrations.torch import offload_activations
    >>> with offload_activations() as offloaded:
    ...     loss = layers(data).square().mean()
    >>> loss.backward()
    >>> offloaded.tensor_count, offloaded.offloaded_nbytes
    (2, 2097152)
    """
    torch = _torch("offload_activations")
    number = read_count(depth, "depth")
    least = read_size(min_nbytes, "min_nbytes", False, None)
    return ActivationOffload(torch, max(1, least), number)


# -- modules and state dicts -----------------------------------------------------------

#: The pinned memory of each offloaded tensor, as a weak reference, and the tensor's device,
#: by the address of the memory. If Ctrl-C interrupts a finalizer, an entry may outlive its
#: memory. Its weak reference is dead then.
_homes: dict[int, tuple[weakref.ref[_core.Buffer], Any]] = {}


def _make_host(torch: Any, nbytes: int, device: Any) -> tuple[Any, Any]:
    """Make pinned memory that remembers the device of its bytes, and a tensor over it.

    An empty tensor gets one byte, so that it is remembered too.
    """
    host = _pinned(max(1, nbytes), device)
    _homes[host.ptr] = weakref.ref(host), device
    weakref.finalize(host, _homes.pop, host.ptr, None).atexit = False
    return host, torch.frombuffer(host, dtype=torch.uint8)


def _move(torch: Any, tensors: Iterable[Any], to_host: bool) -> dict[int, Any]:
    """Copy tensors to the host or back; return the new ones by the ids of the old ones.

    Tensors that share memory share it afterwards as well. Tensors that are not on a device,
    or did not come from one, are left out.
    """
    pairs: dict[Any, list[tuple[Any, Any]]] = {}
    flats: dict[int, Any] = {}  # new memory, by the old storage
    moved: dict[int, Any] = {}
    for tensor in tensors:
        device = _find_device(torch, tensor, to_host)
        if device is None:
            continue
        storage = tensor.untyped_storage()
        nbytes, flat = storage.nbytes(), flats.get(storage._cdata)
        if flat is None:
            memory = _link_of(torch, device).memory
            old = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            old = old.set_(storage, 0, (nbytes,), (1,))
            if to_host:
                host, flat = _make_host(torch, nbytes, device)
                device_end = memory(old.data_ptr(), nbytes)
                pair = (host, device_end)
            else:
                flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
                device_end = memory(flat.data_ptr(), nbytes)
                pair = (device_end, old)
            device_end.owner = old, flat  # Ctrl-C may leave the copy unfinished
            flats[storage._cdata] = flat
            pairs.setdefault(device, []).extend([pair] if nbytes else [])
        new = torch.empty(0, dtype=tensor.dtype, device=flat.device)
        layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        new.set_(flat.untyped_storage(), *layout)
        if tensor.is_conj():
            new = new.conj()
        moved[id(tensor)] = torch._neg_view(new) if tensor.is_neg() else new
    for device, each in pairs.items():
        _link_of(torch, device).copy(each)
    return moved


def _find_device(torch: Any, tensor: Any, to_host: bool) -> Any:
    """Return the device that a tensor moves from or to, or None if it does not move."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    home = None
    if tensor.device.type == "cpu":
        owner, home = _homes.get(tensor.untyped_storage().data_ptr(), (_nothing, None))
        if owner() is None:
            home = None
    if not to_host:
        return home
    return (
        tensor.device if home is None and tensor.device.type == _device_type() else None
    )


def _tensors_of(torch: Any, module: Any) -> list[Any]:
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*parameters, *gradients, *module.buffers()]


def _is_sequence(value: Any) -> bool:
    """Return whether a value is a list or tuple, whose items are moved too."""
    named = isinstance(value, tuple) and hasattr(value, "_make")
    return named or type(value) in (list, tuple)


def _leaves(torch: Any, value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(torch, each)
    elif _is_sequence(value):
        for each in value:
            yield from _leaves(torch, each)


def _replaced(value: Any, moved: dict[int, Any]) -> Any:
    """Return a copy of the containers in `value`, with the new tensors in them."""
    if isinstance(value, Mapping):
        pairs = ((key, _replaced(each, moved)) for key, each in value.items())
        if is_tensordict(value):
            return make_tensordict(pairs, getattr(value, "batch_size"))  # noqa: B009
        if hasattr(value, "infos") and isinstance(value, dict):
            kept: Any = value.copy()  # a dict from load_safetensors() keeps its types
            kept.update(pairs)
            return kept
        if not isinstance(value, collections.OrderedDict):
            return dict(pairs)
        new = collections.OrderedDict(pairs)
        vars(new).update(vars(value))  # has versions of modules for load_state_dict()
        return new
    if _is_sequence(value):
        each_new = [_replaced(each, moved) for each in value]
        return getattr(type(value), "_make", type(value))(each_new)
    return moved.get(id(value), value)


def _move_all(name: str, value: _T, to_host: bool) -> _T:
    torch = _torch(name)
    with torch.no_grad():
        if isinstance(value, torch.nn.Module):
            tensors = _tensors_of(torch, value)
            moved = _move(torch, tensors, to_host)
            for tensor in tensors:
                if id(tensor) in moved:
                    tensor.data = moved[id(tensor)]
            return value
        if isinstance(value, Mapping):
            tensors = list(_leaves(torch, value))
            return _replaced(value, _move(torch, tensors, to_host))  # type: ignore[no-any-return]
    raise TypeError(
        f"{name}() takes a module of PyTorch or a state dict, not {type(value).__name__}"
    )


@found_in("cumem.integrations.torch")
@hinting
def offload(module_or_state_dict: _T) -> _T:
    """Move the tensors of a module or a state dict from devices to pooled pinned memory.

    Parameters
    ----------
    module_or_state_dict : torch.nn.Module or mapping
        A module, whose parameters, gradients and buffers are moved in place; or a state
        dict, also of an optimizer, with tensors in dicts, lists, tuples, named tuples and
        TensorDicts. Parameters in a state dict (``keep_vars=True``) become plain tensors.

    Returns
    -------
    torch.nn.Module or dict
        The module itself, or a new dict whose tensors are in pinned memory. For a
        TensorDict it is a new TensorDict.

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    TypeError
        If the argument is neither.
    OutOfMemoryError
        If there is not enough pinned memory; then nothing has moved.
    CudaError
        If a copy failed; then nothing has moved.

    Notes
    -----
    **Blocks** until the bytes are on the host, with the GIL released. **Ordered after** the
    work of PyTorch's current stream of each device. All tensors of a device are copied by
    one call of `copy_many`. Memory that is shared, as that of tied parameters, is copied
    once and shared afterwards. The device's memory goes back to PyTorch, whose cache keeps
    it; ``torch.cuda.empty_cache()`` makes it available to others. Tensors on the host, and
    sparse and quantized ones, stay as they are.

    On the emulated device, ordinary CPU tensors take the place of device tensors.

    Examples
    --------
    >>> layer = torch.nn.Linear(256, 256)
    >>> from cumem.integrations.torch import offload, restore
    >>> offload(layer) is layer
    True
    >>> layer(torch.ones(256)).shape  # on the processor
    torch.Size([256])
    >>> restore(layer) is layer
    True
    """
    return _move_all("offload", module_or_state_dict, True)


@found_in("cumem.integrations.torch")
@hinting
def restore(module_or_state_dict: _T) -> _T:
    """Move tensors that `offload` moved to the host back to their devices.

    Parameters
    ----------
    module_or_state_dict : torch.nn.Module or mapping
        What `offload` returned, or anything with its tensors.

    Returns
    -------
    torch.nn.Module or dict
        The module itself, or a new dict.

    Raises
    ------
    ImportError
        If PyTorch is not installed.
    TypeError
        If the argument is neither.
    RuntimeError
        PyTorch's error, if a device has not enough memory; then nothing has moved.
    CudaError
        If a copy failed; then nothing has moved.

    Notes
    -----
    **Blocks** until the bytes are on the devices, with the GIL released. **Ordered after**
    the work of PyTorch's current stream of each device. Everything else is as for
    `offload`. Tensors that it did not move stay as they are.

    Examples
    --------
    >>> from cumem.integrations.torch import offload, restore
    >>> weights = offload({"a": torch.ones(256)})
    >>> float(restore(weights)["a"].sum())
    256.0
    """
    return _move_all("restore", module_or_state_dict, False)
