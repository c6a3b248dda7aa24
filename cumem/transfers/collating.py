# SPDX-License-Identifier: Apache-2.0
"""`PinnedCollate` stacks samples straight into page-locked memory.

A batch that the process itself stacks is in memory of the pinned pool. A worker of a loader
writes its batch to a slot of a `SlotRing`, whose pages the parent process locks, and sends
the number of the slot to the parent. If page-locked memory runs short or no slot is free,
batches are stacked in ordinary memory instead.
"""

from __future__ import annotations

import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import context, reduction
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex, final

import numpy as np

from cumem import _core
from cumem.base.errors import is_of_fork
from cumem.base.units import read_count, read_size
from cumem.buffers.arguments import hinting
from cumem.buffers.values import refuse_masked
from cumem.devices.device import current_streams
from cumem.interchange.structures import (
    has_own_memory,
    is_record,
    is_tensor,
    is_tensordict,
    make_mapping,
    make_record,
    make_sequence,
    make_tensordict,
    mapped,
)
from cumem.transfers.worker_slots import Shortage, SlotRing

#: Remembers for all batches of this process whether page-locked memory ran short.
_shortage = Shortage("cumem.PinnedCollate: batches are stacked in ordinary memory")

#: Fields of a batch begin at multiples of this in a slot, for fast access and copies.
_ALIGNMENT = 256

#: The rings of this process by their keys, which the messages of workers contain.
_rings: weakref.WeakValueDictionary[tuple[int, int], SlotRing] = (
    weakref.WeakValueDictionary()
)


def _torch() -> Any:
    """Return PyTorch if it is imported, else None."""
    return sys.modules.get("torch")


def _device() -> int:
    """Return the index of the device that batches are for."""
    return _core._device(None, "device", True).index


def _streams() -> list[_core.Stream]:
    """Return the streams that may still read a batch which has just died.

    PyTorch's current stream is one of them, because cumem does not see its copies.
    """
    return current_streams(_device())


def _array_over(raw: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """View the bytes `raw` as an array or a tensor, according to the type of `dtype`."""
    if isinstance(dtype, np.dtype):
        return raw.view(dtype).reshape(shape)
    if not isinstance(dtype, tuple):
        return _torch().from_numpy(raw).view(dtype).reshape(shape)
    plain, kind = dtype
    return _torch().from_numpy(raw).view(plain).reshape(shape).as_subclass(kind)


@final
class _Stack:
    """A field of a batch: samples to be stacked, or a few that are stacked already.

    `dtype` is the NumPy or PyTorch dtype of the samples. `made` is the dtype of the result.
    If the result is of a subclass of tensors, `made` is the pair of the dtype and that
    subclass. `is_of_numbers` says that the samples are plain numbers.
    """

    __slots__ = ("dtype", "is_of_numbers", "made", "nbytes", "samples", "shape")

    def __init__(self, samples: Any, dtype: Any, made: Any, shape: Any) -> None:
        self.samples = samples
        self.dtype = dtype
        self.made = made
        self.shape = tuple(shape)
        self.is_of_numbers = False
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * dtype.itemsize

    def write(self, raw: Any) -> None:
        target = _array_over(raw, self.dtype, self.shape)
        if not isinstance(self.samples, list):
            target[...] = self.samples
        elif isinstance(self.dtype, np.dtype):
            np.stack(self.samples, out=target)
        else:
            _torch().stack(self.samples, out=target)

    def plain(self) -> Any:
        """Return the field in ordinary memory, which PyTorch shares if this is a worker."""
        if not isinstance(self.samples, list):
            if isinstance(self.made, tuple):
                return self.samples.as_subclass(self.made[1])
            return self.samples
        return _stacked(self.samples)

    def pooled(self) -> Any:
        """Return the field in page-locked memory of the pool.

        If there is no such memory, as in a forked child, the field is in ordinary
        memory.
        """
        device = _device()
        try:
            buffer = _shortage.attempt(
                lambda: _core.empty_pinned(self.nbytes, "uint8", device=device)
            )
        except RuntimeError as error:
            if not is_of_fork(error):
                raise
            buffer = None
        if buffer is None:
            return self.plain()
        raw = buffer.numpy()
        self.write(raw)
        return _array_over(raw, self.made, self.shape)


@final
class _Place:
    """The place of a field in a slot."""

    __slots__ = ("begin", "dtype", "nbytes", "shape")

    def __init__(self, begin: int, nbytes: int, dtype: Any, shape: Any) -> None:
        self.begin = begin
        self.nbytes = nbytes
        self.dtype = dtype
        self.shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        return _Place, (self.begin, self.nbytes, self.dtype, self.shape)

    def over(self, raw: Any) -> Any:
        part = raw[self.begin : self.begin + self.nbytes]
        return _array_over(part, self.dtype, self.shape)


def _stacked(samples: Sequence[Any]) -> Any:
    """Stack as PyTorch does, or with NumPy if PyTorch is not imported."""
    torch = _torch()
    if torch is not None:
        return torch.utils.data.default_collate(samples)
    first = samples[0]
    if isinstance(first, np.ndarray):
        return np.stack(samples)
    if isinstance(first, (int, float, complex, np.generic)):
        return np.asarray(samples)
    raise TypeError(
        "a batch must be of tensors, arrays, numbers, text, or dicts, lists, tuples and "
        f"dataclasses of them; found {type(first).__name__}"
    )


def _ready(samples: Sequence[Any]) -> Any:
    """Stack samples at once that differ, have few bytes, or are of a special type."""
    found = _stacked(samples)
    if is_tensor(found):
        if _is_plain(found):
            tensor = _torch().Tensor
            made = found.dtype if type(found) is tensor else (found.dtype, type(found))
            found = found.as_subclass(tensor)
            return _Stack(found, found.dtype, made, found.shape)
    elif isinstance(found, np.ndarray):
        if found.dtype.hasobject:
            raise TypeError("a batch must not be of Python objects")
        return _Stack(found, found.dtype, found.dtype, found.shape)
    return found


def _is_plain(tensor: Any) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is _torch().strided
        and not (tensor.requires_grad or tensor.is_quantized)
        and has_own_memory(tensor)
    )


def _tensors(samples: Sequence[Any]) -> Any:
    first = samples[0]
    dtype, shape = first.dtype, first.shape
    if not all(
        type(each) is _torch().Tensor  # PyTorch chooses the class for subclasses
        and each.dtype is dtype
        and each.shape == shape
        and _is_plain(each)
        for each in samples
    ):
        return _ready(samples)
    return _Stack(list(samples), dtype, dtype, (len(samples), *shape))


def _arrays(samples: Sequence[Any]) -> Any:
    for each in samples:
        refuse_masked(each)
    first = samples[0]
    dtype, shape = first.dtype, first.shape
    alike = not dtype.hasobject and all(
        isinstance(each, np.ndarray) and each.dtype == dtype and each.shape == shape
        for each in samples
    )
    made: Any = dtype
    if alike and _torch() is not None:
        try:
            made = _torch().from_numpy(np.empty(0, dtype)).dtype
        except (TypeError, ValueError):  # PyTorch has no such dtype and says so
            alike = False
    if not alike:
        return _ready(samples)
    return _Stack(list(samples), dtype, made, (len(samples), *shape))


@final
class _TensorDict:
    """The parts of a TensorDict, which need not be tensors until it is made."""

    __slots__ = ("batch_size", "keys", "parts")

    def __init__(self, keys: list[Any], parts: list[Any], batch_size: Any) -> None:
        self.keys = keys  # a nested key is a tuple of names
        self.parts = parts
        self.batch_size = batch_size

    def __reduce__(self) -> tuple[Any, ...]:
        return _TensorDict, (self.keys, self.parts, self.batch_size)

    def changed(self, function: Callable[[Any], Any]) -> _TensorDict:
        return _TensorDict(self.keys, list(map(function, self.parts)), self.batch_size)

    def made(self) -> Any:
        return make_tensordict(zip(self.keys, self.parts, strict=True), self.batch_size)


def _is_tensor_like(value: Any) -> bool:
    """Return whether PyTorch stacks such objects as it stacks tensors."""
    return _torch() is not None and hasattr(type(value), "__torch_function__")


def _tensor_likes(samples: Sequence[Any]) -> Any:
    stacked = _torch().stack(list(samples))
    if not is_tensordict(stacked):
        return stacked
    parts = []
    for part in stacked.values(True, True):
        plain = is_tensor(part) and type(part) is _torch().Tensor and _is_plain(part)
        parts.append(
            _Stack(part, part.dtype, part.dtype, part.shape) if plain else part
        )
    keys = list(stacked.keys(True, True))
    return _TensorDict(keys, parts, tuple(stacked.batch_size))


def _gathered(samples: Sequence[Any]) -> Any:
    """Return a batch with a `_Stack` for each field, structured as by `default_collate`."""
    first = samples[0]
    if is_tensor(first):
        return _tensors(samples)
    if isinstance(first, _core.Buffer):
        samples = [_core.asnumpy(each) for each in samples]
        return _arrays(samples)
    if isinstance(first, np.ndarray):
        return _arrays(samples)
    if _is_tensor_like(first):
        return _tensor_likes(samples)
    if isinstance(first, (str, bytes)):
        return samples
    if isinstance(first, Mapping):
        fields = {key: _gathered([each[key] for each in samples]) for key in first}
        return make_mapping(first, fields)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(_gathered, _turned(samples)))
    if isinstance(first, Sequence):
        parts = [_gathered(part) for part in _turned(samples)]
        return parts if isinstance(first, tuple) else make_sequence(first, parts)
    if is_record(first):
        return make_record(
            first, lambda name: _gathered([getattr(each, name) for each in samples])
        )
    found = _ready(samples)
    if isinstance(found, _Stack):
        found.is_of_numbers = True
    return found


def _turned(samples: Sequence[Any]) -> list[tuple[Any, ...]]:
    if any(len(each) != len(samples[0]) for each in samples):
        raise RuntimeError("each element in list of batch should be of equal size")
    return list(zip(*samples, strict=True))


def _each(
    batch: Any, kind: type[Any], function: Callable[[Any], Any], ends: bool = True
) -> Any:
    """Return a copy of the batch with ``function(field)`` for each field of type `kind`.

    With `ends`, each `_TensorDict` becomes a TensorDict again.
    """

    def change(field: Any) -> Any:
        return function(field) if isinstance(field, kind) else field

    def leaf(value: Any) -> Any:
        if not isinstance(value, _TensorDict):
            return change(value)
        changed = value.changed(change)
        return changed.made() if ends else changed

    return mapped(batch, leaf, lambda value: isinstance(value, _TensorDict))


class _Message:
    """The message that brings a batch from a worker to the parent process.

    It is pickled as the number of the slot, and unpickled as the batch itself.
    """

    def __init__(self, ring: SlotRing, batch: Any) -> None:
        self._ring = ring
        self._slot: int | None = None
        stacks: list[tuple[_Stack, _Place]] = []
        end = 0

        def place(stack: _Stack) -> _Place:
            nonlocal end
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + stack.nbytes
            stacks.append((stack, _Place(begin, stack.nbytes, stack.made, stack.shape)))
            return stacks[-1][1]

        self._batch = _each(batch, _Stack, place, ends=False)
        self._nbytes = end
        taken = ring.take(end)
        if taken is None:
            self._batch = _each(batch, _Stack, _Stack.plain)
            return
        self._slot, self._turn = taken
        raw = np.frombuffer(ring.view(self._slot, end), np.uint8)
        for stack, there in stacks:
            stack.write(raw[there.begin : there.begin + there.nbytes])

    def __reduce__(self) -> tuple[Any, ...]:
        # The batch is pickled first. If that fails, the slot still belongs to this object,
        # which gives it back.
        data = bytes(reduction.ForkingPickler.dumps(self._batch))
        slot, self._slot = self._slot, None
        if slot is None:
            return _received, (self._ring.key, None, 0, 0, data)
        return _received, (self._ring.key, slot, self._turn, self._nbytes, data)

    def __del__(self) -> None:
        if self._slot is not None:
            self._ring.give(self._slot)

    def _refuse(self, *_: object) -> NoReturn:
        """Raise a TypeError if a collate_fn in the worker uses the message as a batch."""
        raise TypeError(
            "in a worker the result of a PinnedCollate is not yet the batch, but a message "
            "about its slot: change the samples before it, or the batch that the loader "
            "gives"
        )

    __getitem__ = __setitem__ = __delitem__ = _refuse
    __contains__ = __iter__ = __len__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # asked for by the interpreter and by pickle
            raise AttributeError(name)
        self._refuse()

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            self._refuse()
        object.__setattr__(self, name, value)


def _received(
    key: tuple[int, int], slot: int | None, turn: int, nbytes: int, data: bytes
) -> Any:
    """Return the batch of a worker's message, in the process that receives it."""
    ring = _rings.get(key)
    if ring is None:
        raise RuntimeError("a batch is lost: the PinnedCollate that made it is gone")
    ring.reclaim()
    if slot is None:
        return pickle.loads(data)
    raw = np.frombuffer(ring.claim(slot, turn, nbytes), np.uint8)
    if not ring.is_maker:
        raw = raw.copy()
    batch = pickle.loads(data)
    return _each(batch, _Place, lambda place: place.over(raw))


def _attached(
    file: Any, slots: int, slot_nbytes: int, key: tuple[int, int]
) -> PinnedCollate:
    """Return the PinnedCollate of a worker that was not forked."""
    made = PinnedCollate.__new__(PinnedCollate)
    made._ring = SlotRing(slots, slot_nbytes, _device, _streams, file.detach(), key)
    _rings[key] = made._ring
    return made


@final
class PinnedCollate:
    """Stacks samples straight into page-locked memory.

    Use it as ``DataLoader(collate_fn=cumem.PinnedCollate())``. A batch is structured as
    by `default_collate`: tensors, arrays and numbers become tensors with one more axis
    in front, inside dicts, lists, tuples and named tuples, and also inside dataclasses
    and TensorDicts. Texts come in lists. Buffers of cumem are treated as arrays. If
    PyTorch is not imported, arrays and numbers become NumPy arrays.

    Without workers, the memory comes from the pool of pinned memory. With workers, it
    comes from a ring of slots that this process shares with them: a worker fills a slot
    without calling CUDA, and sends back the number of the slot.

    Parameters
    ----------
    slots : int
        The number of batches for which there is room at the same time. These are the
        batches that the loader has (``num_workers * prefetch_factor``), and those that the
        program keeps or that are being copied.
    slot_nbytes : int or str
        The most bytes of a batch. Slots take only as much memory as their batches fill.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or is out of range.
    OSError
        If the process has no free addresses for this many bytes.

    Notes
    -----
    Make the object in the process that reads the batches, before the workers start. A batch
    that is larger than a slot, or for which no slot is free, is stacked as PyTorch does it.
    If the limit or the system allows no more page-locked memory, batches come in ordinary
    memory, and one RuntimeWarning says why. Batches of plain numbers alone are also in
    ordinary memory, because for so few bytes the driver should not be started. If a worker
    dies, its slots become free. Memory is page-locked in the context of the current device,
    which is PyTorch's unless cumem's own was chosen (see `current_device`). No other GPU
    gets a context.

    In a worker, a call returns a message about the slot, which becomes the batch when the
    loader gives it. So a ``collate_fn`` that calls this one may change the samples before
    the call, but not the result of the call.

    A slot is free again when all tensors over it have died, the copies of `prefetch` are
    done, and the current streams (cumem's, and PyTorch's on its current device) have
    finished the work that they had at that time. So on these streams it is safe to call
    ``.to("cuda", non_blocking=True)`` and drop the batch at once. A program that copies on
    another stream must keep the batch until that copy is done.

    Examples
    --------
    >>> collate = cumem.PinnedCollate(slots=32, slot_nbytes="64 MiB")
    >>> len(collate([numpy.ones(3), numpy.zeros(3)]))  # DataLoader(collate_fn=collate)
    2
    """

    _ring: SlotRing
    _is_open = True

    @hinting
    def __init__(
        self,
        slots: SupportsIndex = 128,
        slot_nbytes: SupportsIndex | str = "256 MiB",
    ) -> None:
        count = read_count(slots, "slots")
        nbytes = read_size(slot_nbytes, "slot_nbytes", False, None)
        if nbytes < 1:
            raise ValueError("slot_nbytes must be at least 1, not 0")
        self._ring = SlotRing(count, nbytes, _device, _streams)
        _rings[self._ring.key] = self._ring

    def __call__(self, samples: Any) -> Any:
        """Stack a list of samples.

        Raises
        ------
        TypeError
            If they are not a list, or have a type that cannot be stacked.
        IndexError
            If the list is empty; PyTorch's `default_collate` raises the same error.
        RuntimeError, ValueError
            If their shapes or lengths differ.
        CudaError
            If the driver fails. A lack of page-locked memory is not an error: the batch
            is then in ordinary memory.
        """
        if isinstance(samples, (Mapping, str, bytes)) or not (
            isinstance(samples, Iterable) or hasattr(samples, "__getitem__")
        ):
            raise TypeError(
                f"samples must be a list of samples, not {type(samples).__name__}: with "
                "DataLoader(batch_size=None) there is nothing to stack, leave collate_fn "
                "out"
            )
        listed = list(samples)
        if not listed:
            raise IndexError("samples must hold at least one sample to be stacked")
        if not self._is_open:
            raise ValueError("this PinnedCollate is closed: make another one")
        batch = _gathered(listed)
        data = sys.modules.get("torch.utils.data")
        if data is not None and data.get_worker_info() is not None:
            return _Message(self._ring, batch)
        stacks: list[_Stack] = []

        def look(stack: _Stack) -> _Stack:
            stacks.append(stack)
            return stack

        _each(batch, _Stack, look, ends=False)
        # Numbers alone are too few bytes to start the driver for page-locking them.
        is_small = all(each.is_of_numbers for each in stacks)
        return _each(batch, _Stack, _Stack.plain if is_small else _Stack.pooled)

    def trim(self) -> None:
        """Give back to the system the memory of slots that nobody uses.

        The next batches take memory again.

        Notes
        -----
        **Blocks** until the streams have finished with batches that have died.
        """
        self._ring.trim()

    def close(self) -> None:
        """Give back the memory of slots, as `trim` does, and refuse further calls.

        Batches that are still alive keep their memory. A second call does nothing.
        """
        if self._is_open:
            self._is_open = False
            self._ring.trim()

    def __enter__(self) -> Self:
        if not self._is_open:
            raise ValueError("this PinnedCollate is closed: make another one")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        ring = self._ring
        if context.get_spawning_popen() is None:
            return PinnedCollate, (ring.slots, ring.slot_nbytes)
        file = reduction.DupFd(ring.fd)
        return _attached, (file, ring.slots, ring.slot_nbytes, ring.key)

    def __repr__(self) -> str:
        ring = self._ring
        return (
            f"cumem.PinnedCollate(slots={ring.slots}, slot_nbytes={ring.slot_nbytes})"
        )
