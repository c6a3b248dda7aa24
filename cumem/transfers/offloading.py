# SPDX-License-Identifier: Apache-2.0
"""What PyTorch keeps on a device, moved to pooled pinned memory until it is needed."""

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
    """Of tensors that are on a device: where it is emulated, ordinary ones stand for
    them."""
    return "cpu" if _core._read_backend()[0] == "emulated" else "cuda"


class _Memory:
    """Bytes of a device for a copy. A transfer keeps it, and so its owner, until the host
    sees it done. PyTorch reuses memory in stream order: as soon as a stream waits for
    the copy, the owner is taken away. Ctrl-C before that leaves it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.owner: Any = None
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "stream": None,  # ordered by us
        }


class _HostMemory(np.ndarray):
    """Bytes of an emulated device, which is the host: as _Memory for a copy."""

    owner: Any = None


class _Pointed:
    """What NumPy reads where the storage of a tensor lies."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _pinned(nbytes: int, device: Any) -> _core.Buffer:
    """Locked by that device: no other one gets a context for it."""
    return _core.empty_pinned(nbytes, "u1", device=device.index)


class _Link:
    """The streams that copies from a device and to it go by."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._device = device
        self._down = _core.Stream(device=device.index)
        self._up = _core.Stream(device=device.index)

    def is_open(self) -> bool:
        """False after shutdown()."""
        try:
            return self._down.handle != 0
        except ValueError:
            return False

    def current(self) -> Any:
        """Stream of PyTorch that the caller works on."""
        return self._torch.cuda.current_stream(self._device)

    def take(self, host: _core.Buffer, memory: Any, stream: Any) -> _core.Transfer:
        """After the work of `stream`."""
        self._down.wait(stream)
        return _core.copy_async(host, memory, stream=self._down)

    def bring(self, memory: Any, host: _core.Buffer) -> _core.Transfer:
        """After the current stream's work, which may have used that memory."""
        self._up.wait(self.current())
        return _core.copy_async(memory, host, stream=self._up)

    def order(self, transfer: _core.Transfer, stream: Any) -> None:
        """What `stream` is given from now on comes after the copy."""
        transfer.order(stream)

    def copy(self, pairs: list[tuple[Any, Any]]) -> None:
        """All of them, after the current stream's work; waits."""
        _core.copy_many(pairs, stream=self.current())

    def memory(self, address: int, nbytes: int) -> Any:
        return _Memory(address, nbytes)


class _EmulatedLink(_Link):
    """PyTorch's work on the processor follows no stream, and so waits itself."""

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


#: By device: streams take long to make, and a context may be made for each step.
_links: dict[Any, _Link] = {}


def _link_of(torch: Any, device: Any) -> _Link:
    link = _links.get(device)
    if link is None or not link.is_open():
        kind = _Link if device.type == "cuda" else _EmulatedLink
        link = _links[device] = kind(torch, device)
    return link


class _Saved:
    """Bytes that autograd keeps: on the device, on the host, or on their way."""

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
        self.begin = begin  #: in `kept`
        self.nbytes = nbytes
        self.weak = weak  #: of the storage that was saved
        self.alias = alias  #: with the count of changes that the bytes are of
        self.kept: Any = storage  #: until the copy is done, in the order of `stream`
        self.host: Any = None
        self.down: _core.Transfer | None = None  #: which takes the bytes to `host`
        self.down_end: Any = None  #: on the device; owns `kept`
        self.back: Any = None  #: storage of the bytes brought back
        self.up: _core.Transfer | None = None  #: which brings them
        self.up_end: Any = None  #: on the device; owns `back`
        self.count = 0  #: of tensors over them
        self.left = 0  #: so many of them have not been asked for since
        self.stream = link.current()
        self.previous = _ref(previous)  #: what was packed before, for prefetching

    def leave(self) -> None:
        """Begin to copy the bytes to the host."""
        self.host = _pinned(self.nbytes, self.kept.device)
        address = self.kept.data_ptr() + self.begin
        self.down_end = self.link.memory(address, self.nbytes)
        self.down_end.owner = self.kept
        self.down = self.link.take(self.host, self.down_end, self.stream)

    def let_go(self) -> None:
        """Of the device's memory: PyTorch may reuse it in the order of the stream."""
        assert self.down is not None
        if not self.down.done:
            self.link.order(self.down, self.stream)
        self.kept = self.down_end.owner = None

    def come(self, torch: Any, device: Any) -> None:
        """Begin to bring the bytes back, if they are not there."""
        if self.kept is None and self.back is None:
            flat = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            self.stream = self.link.current()
            self.up_end = self.link.memory(flat.data_ptr(), self.nbytes)
            self.up_end.owner = flat
            self.up = self.link.bring(self.up_end, self.host)
            self.back = flat.untyped_storage()

    def take(self) -> tuple[Any, int]:
        """A storage that work of the current stream may use, and where in it they are."""
        storage, begin = self.kept, self.begin
        if storage is None:
            storage, begin = self.back, 0
            if self.up is not None:
                self.link.order(self.up, self.link.current())
        self.left -= 1
        if self.left <= 0:
            self.left = self.count
            if self.up_end is not None:
                self.up_end.owner = None
            self.back = self.up = self.up_end = None
        return storage, begin

    def __del__(self) -> None:
        # no memory of the device may be reused while a copy of it is under way
        for end, copy in ((self.down_end, self.down), (self.up_end, self.up)):
            if end is not None and end.owner is not None and copy is not None:
                with contextlib.suppress(Exception):  # it says so elsewhere
                    if not copy.done:
                        self.link.order(copy, self.stream)
                    end.owner = None


#: Views and casts, as layers and autocast make them of parameters.
_SAME_VALUES = frozenset(
    f"{name}Backward0"
    for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias")
) | {"ToCopyBackward0"}


def _is_of_parameter(torch: Any, tensor: Any) -> bool:
    """Is it a parameter but for these?"""
    function: Any = tensor.grad_fn
    while type(function).__name__ in _SAME_VALUES:
        function = function.next_functions[0][0]
    if type(function).__name__ != "AccumulateGrad":  # where gradients end
        return False
    return isinstance(function.variable, torch.nn.Parameter)


#: Over every look at a count of changes, as one of them changes it for a moment.
_counting = make_lock()


def _count_together(torch: Any, one: Any, other: Any) -> bool:
    """Is a change in place of one of them seen as one of the other? Not for parts by
    `torch.unsafe_chunk`, say, though they share a storage."""
    with _counting, torch.autograd._unsafe_preserve_version_counter(one):
        before = other._version
        torch.autograd.graph.increment_version(one)
        return bool(other._version != before)


def _nothing() -> None:
    """As a weak reference to what is gone."""


def _ref(saved: _Saved | None) -> weakref.ref[_Saved] | None:
    return None if saved is None else weakref.ref(saved)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """What stands for a tensor in the graph."""

    saved: _Saved
    layout: tuple[Any, ...]  #: offset, shape and strides in elements
    dtype: Any
    device: Any
    alias: Any  #: without bytes, but with the tensor's own count of changes in place
    version: int

    def check(self) -> None:
        """RuntimeError: it was changed in place."""
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
    """What `offload_activations` returns: a context manager, which may be entered again.

    Attributes
    ----------
    tensor_count : int
        Tensors that autograd saved and that go to the host.
    offloaded_nbytes : int
        Bytes that were copied for them so far: shared memory once.

    Examples
    --------
    >>> from cumem.integrations.torch import offload_activations
    >>> with offload_activations() as offloaded:
    ...     loss = torch.nn.Linear(4, 4)(torch.ones(4)).sum()
    >>> offloaded.tensor_count  # so few bytes stay where they are
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
        self._lock = make_lock()  # backward runs in threads of PyTorch, one a device
        self._known: weakref.WeakValueDictionary[Any, _Saved]
        self._known = weakref.WeakValueDictionary()
        self._leaving: collections.deque[weakref.ref[_Saved]] = collections.deque()
        self._last: dict[Any, weakref.ref[_Saved]] = {}
        self._hooks = threading.local()

    def __repr__(self) -> str:
        return (
            f"<cumem.ActivationOffload: {format_count(self.tensor_count, 'tensor')}, "
            f"{format_nbytes(self.offloaded_nbytes)} copied to the host>"
        )

    def __enter__(self) -> Self:
        """Save by way of the host what autograd saves in this thread from now on."""
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
        """End that. What was saved stays where it is."""
        self._hooks.open.pop().__exit__(exc_type, exc, tb)

    def _is_worth_it(self, tensor: Any) -> bool:
        torch = self._torch
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False  # parameters, and what has no memory of its own
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
        # a graph that is captured keeps its memory anyway
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
        if nbytes > 4 * tensor.numel() * size:  # a small part of something large
            key += (*layout, dtype)
            tensor = tensor.contiguous()
            begin = tensor.storage_offset() * size
            nbytes = tensor.numel() * size
            layout = (0, layout[1], tensor.stride())
        saved = self._known.get(key)
        if saved is None or not _count_together(torch, alias, saved.alias):
            last = self._last.get(device, _nothing)()
            if last is not None and last.down is None:
                self._leave(last)
            saved = _Saved(
                _link_of(torch, device),
                tensor.untyped_storage(),
                begin,
                nbytes,
                self._weak.StorageWeakRef(storage),
                alias,
                last,
            )
            self._known[key] = saved  # no other storage has the key while `weak` lives
            self._last[device] = weakref.ref(saved)
        saved.count += 1
        saved.left += 1
        self.tensor_count += 1
        alias.data = torch.empty(0, dtype=dtype, device=device)
        return _Packed(saved, layout, dtype, device, alias, version)

    def _leave(self, saved: _Saved) -> None:
        """Begin to copy it to the host. Those before the last few make way, so that the
        device need not hold more, however far the host is ahead of it."""
        saved.leave()
        self.offloaded_nbytes += saved.nbytes
        self._leaving.append(weakref.ref(saved))
        while self._leaving:
            oldest = self._leaving[0]()
            if oldest is not None:
                assert oldest.down is not None
                if len(self._leaving) <= self._depth and not oldest.down.done:
                    break
                oldest.let_go()
            self._leaving.popleft()

    def _unpack(self, packed: Any) -> Any:
        if not isinstance(packed, _Packed):
            return packed
        packed.check()
        torch, saved = self._torch, packed.saved
        with self._lock, torch.no_grad():
            saved.come(torch, packed.device)
            before = saved
            for _ in range(self._depth):
                following = None if before.previous is None else before.previous()
                if following is None:
                    break
                following.come(torch, packed.device)
                before = following
            tensor = torch.empty(0, dtype=packed.dtype, device=packed.device)
            storage, begin = saved.take()
            offset, shape, strides = packed.layout
            offset += begin // tensor.element_size()
            tensor.set_(storage, offset, shape, strides)
            counted = packed.alias.detach()
            counted.data = tensor  # a change of it in place is one of what was saved
            return counted


@found_in("cumem.integrations.torch")
@hinting
def offload_activations(
    *, min_nbytes: SupportsIndex | str = "1 MiB", depth: SupportsIndex = 4
) -> ActivationOffload:
    """Keep what PyTorch saves for backward in pinned memory instead of on the device.

    In a ``with`` block tensors that autograd saves are copied to pooled pinned memory
    while the next layers are computed. Backward brings them back in the reverse order,
    the next ones already on their way.

    Parameters
    ----------
    min_nbytes : int or str
        Smaller tensors stay on the device.
    depth : int
        How many tensors may be on their way at the same time, at least 1: so many are
        on the device beside the one that was saved last.

    Returns
    -------
    ActivationOffload
        For ``with``, around the forward pass.

    Raises
    ------
    ImportError
        If there is no PyTorch.
    TypeError
        If an argument has the wrong type.
    ValueError
        If an argument is out of its range.

    Notes
    -----
    Copies run on streams of their own, **ordered after** the work that made a tensor;
    PyTorch's current stream waits for them where it needs the bytes, or the memory. The
    host waits for nothing. The copy of a tensor begins when the next one is saved, and
    the device's memory is let go once it is done, in stream order: `depth` tensors later
    at the latest. The last ones are still there when backward begins: they are not copied
    back, and the very last is not copied at all.

    Left on the device are parameters and views of them, tensors of less than
    `min_nbytes`, sparse and quantized ones, subclasses, and what is saved while a CUDA
    graph is captured. Tensors that share memory are copied once, the whole of it unless
    it is more than four times the tensor. A tensor that was changed in place after it was
    saved, or as backward was given it, is a RuntimeError in backward, as without
    offloading; like PyTorch, it does not see changes through ``.data``.
    OutOfMemoryError, of pinned memory, is raised by the operation whose tensor is saved.

    On the emulated device ordinary tensors take the place of the device's.

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

#: Of the pinned memory of tensors that were offloaded, by its address: its owner, for
#: an entry may outlive it where Ctrl-C ends a finalizer, and the tensors' device.
_homes: dict[int, tuple[weakref.ref[_core.Buffer], Any]] = {}


def _make_host(torch: Any, nbytes: int, device: Any) -> tuple[Any, Any]:
    """Pinned memory that knows where its bytes are from, also without any, and a tensor
    over it."""
    host = _pinned(max(1, nbytes), device)
    _homes[host.ptr] = weakref.ref(host), device
    weakref.finalize(host, _homes.pop, host.ptr, None).atexit = False
    return host, torch.frombuffer(host, dtype=torch.uint8)


def _move(torch: Any, tensors: Iterable[Any], to_host: bool) -> dict[int, Any]:
    """New tensors with the same bytes elsewhere, by the id of the old: those that share
    memory share it again. What is not on a device, or not from one, is left out."""
    pairs: dict[Any, list[tuple[Any, Any]]] = {}
    flats: dict[int, Any] = {}  # by storage
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
            device_end.owner = old, flat  # Ctrl-C may leave a copy under way
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
    """From which, or to which, the tensor is to be moved; None: it stays."""
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
    """Of those that are gone through: lists, tuples and named tuples."""
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
    """The same containers with new tensors."""
    if isinstance(value, Mapping):
        pairs = ((key, _replaced(each, moved)) for key, each in value.items())
        if is_tensordict(value):
            return make_tensordict(pairs, getattr(value, "batch_size"))  # noqa: B009
        if hasattr(value, "infos") and isinstance(value, dict):
            kept: Any = value.copy()  # what load_safetensors() gave keeps its types
            kept.update(pairs)
            return kept
        if not isinstance(value, collections.OrderedDict):
            return dict(pairs)
        new = collections.OrderedDict(pairs)
        vars(new).update(vars(value))  # the versions of modules, for load_state_dict()
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
    """Move what a module or a state dict has on devices to pooled pinned memory.

    Parameters
    ----------
    module_or_state_dict : torch.nn.Module or mapping
        A module, whose parameters, their gradients and buffers are moved in place; or a
        state dict, also of an optimizer, with tensors in dicts, lists and tuples, also
        named ones, and TensorDicts. Its parameters (``keep_vars=True``) become plain
        tensors.

    Returns
    -------
    torch.nn.Module or dict
        The module itself; or a new dict, whose tensors are in pinned memory; of a
        TensorDict a new TensorDict.

    Raises
    ------
    ImportError
        If there is no PyTorch.
    TypeError
        If it is neither.
    OutOfMemoryError
        If there is no room in pinned memory. Nothing has moved then.
    CudaError
        If a copy failed. Nothing has moved then.

    Notes
    -----
    **Blocks** until the bytes are on the host, GIL released. **Ordered after** the work of
    PyTorch's current stream of each device. All tensors of a device go with one call of
    `copy_many`, and memory that is shared, as that of tied parameters, goes once and is
    shared again. The device's memory goes back to PyTorch, whose cache keeps it:
    ``torch.cuda.empty_cache()`` gives it to others. Tensors on the host, sparse and
    quantized ones stay as they are.

    On the emulated device ordinary tensors take the place of the device's.

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
    """Move what `offload` moved back to the devices where it was.

    Parameters
    ----------
    module_or_state_dict : torch.nn.Module or mapping
        What `offload` returned, or anything with its tensors.

    Returns
    -------
    torch.nn.Module or dict
        The module itself; or a new dict.

    Raises
    ------
    ImportError
        If there is no PyTorch.
    TypeError
        If it is neither.
    RuntimeError
        If there is no room on a device, as PyTorch says it. Nothing has moved then.
    CudaError
        If a copy failed. Nothing has moved then.

    Notes
    -----
    **Blocks** until the bytes are on the devices, GIL released. **Ordered after** the work
    of PyTorch's current stream of each device. All as for `offload`; tensors that it did
    not move stay as they are.

    Examples
    --------
    >>> from cumem.integrations.torch import offload, restore
    >>> weights = offload({"a": torch.ones(256)})
    >>> float(restore(weights)["a"].sum())
    256.0
    """
    return _move_all("restore", module_or_state_dict, False)
