# SPDX-License-Identifier: Apache-2.0
"""Batches of a loader on their way to a device while the one before is worked on."""

from __future__ import annotations

import collections
import contextlib
import importlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np

from cumem import _core
from cumem.devices import Device, choose_device
from cumem.structures import has_own_memory, is_tensor, mapped
from cumem.units import read_count

_Framework = Literal["torch", "cupy"] | None

#: What carries the elements of a tensor, by their bytes: not every dtype of PyTorch is
#: one of NumPy's.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def _module(name: str) -> Any:
    """A library that is loaded already."""
    return sys.modules[name]


def _is_at(tensor: Any, device: Device) -> bool:
    """Is there nothing to move? So it is also where cumem reaches no memory."""
    place = tensor.device
    if place.type == "cuda":
        return bool(place.index == device.index)
    return bool(place.type != "cpu")


def _carried(tensor: Any) -> Any:
    """The memory of a tensor with elements that NumPy knows."""
    torch = _module("torch")
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or not has_own_memory(tensor)
    ):
        raise TypeError(
            f"a batch has a {type(tensor).__name__} of {tensor.layout}, {tensor.dtype}: "
            "only strided tensors can be moved, not quantized or nested ones, nor those "
            "that wrap others"
        )
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.view(getattr(torch, _CARRIERS[plain.element_size()]))


def _like(tensor: Any, there: Any) -> Any:
    """The tensor `there` in the dtype, the class and with the attributes of `tensor`."""
    there = there.view(tensor.dtype)
    kind = type(tensor.detach())  # that of what PyTorch makes of it
    if kind is not type(there):
        there = there.as_subclass(kind)
        vars(there).update(vars(tensor))
    return there


def tensor_over(buffer: _core.Buffer) -> Any:
    """A tensor over the memory, which orders nothing."""
    return _module("torch").from_dlpack(buffer.__dlpack__(stream=-1))


def work_streams(device: int, libraries: Iterable[str]) -> list[_core.Stream]:
    """Where work on the device goes now: cumem's current stream, or those of the
    `libraries` that are at work there.
    """
    if _core._is_emulated():
        return [_core.current_stream(device)]
    found: list[Any] = []
    for name in libraries:
        if name == "torch":
            found.append(_module("torch").cuda.current_stream(device))
        elif name == "cupy":
            found.append(_module("cupy").cuda.get_current_stream(device))
        else:
            found.append(_core.current_stream(device))
    return [_core.Stream.from_external(stream, device=device) for stream in found]


class _Coming(NamedTuple):
    """A batch that is being copied, and whose work it is for."""

    batch: Any
    transfer: _core.Transfer | None
    libraries: set[str]

    def come(self, device: int) -> list[_core.Stream]:
        """Have the streams that will work on it wait for the copy."""
        streams = work_streams(device, self.libraries)
        if self.transfer is not None:
            for stream in streams:
                self.transfer.order(stream)
            if "torch" in self.libraries and _core._is_emulated():
                self.transfer.wait()  # its tensors are the processor's
        return streams


class _Mover:
    """Begins the copies of one batch after the other."""

    def __init__(self, device: Device, framework: _Framework) -> None:
        self._device = device
        self._framework = framework or "cumem"
        # memory is not taken in the order of the work
        self._side = _core.Stream(device=device)

    def start(self, batch: Any) -> _Coming:
        """All copies of a batch, by one call."""
        pairs: list[tuple[_core.Buffer, Any]] = []
        made: dict[int, tuple[Any, Any]] = {}  # by the leaf's id, with the leaf
        libraries: set[str] = set()

        def move(leaf: Any) -> Any:
            if id(leaf) not in made:
                source, library = self._source(leaf)
                there = leaf
                if library is not None:
                    there, library = self._target(source, library, pairs)
                    libraries.add(library)
                    there = _like(leaf, there) if is_tensor(leaf) else there
                made[id(leaf)] = leaf, there
            return made[id(leaf)][1]

        moved = mapped(batch, move)
        transfer = _core.copy_many_async(pairs) if pairs else None
        return _Coming(moved, transfer, libraries or {self._framework})

    def _source(self, leaf: Any) -> tuple[Any, str | None]:
        """What to copy of a leaf, and whose array it is to be; None: it stays."""
        if is_tensor(leaf):
            return (
                (None, None)
                if _is_at(leaf, self._device)
                else (_carried(leaf), "torch")
            )
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            return leaf, self._framework
        if isinstance(leaf, _core.Buffer) and not (
            isinstance(leaf, _core.DeviceBuffer) and leaf.device == self._device
        ):
            return leaf, self._framework
        return None, None

    def _target(
        self, source: Any, library: str, pairs: list[tuple[_core.Buffer, Any]]
    ) -> tuple[Any, str]:
        """New memory on the device, and whose array it is. Handed over before its copy,
        for which an export waits.
        """
        dtype = _CARRIERS[source.element_size()] if is_tensor(source) else source.dtype
        buffer = _core.empty_device(
            tuple(source.shape), dtype, device=self._device, stream=self._side
        )
        pairs.append((buffer, source))
        try:
            if library == "torch":
                return tensor_over(buffer), library
            if library == "cupy":
                return _module("cupy").from_dlpack(buffer), library
        except BufferError:  # text, times, records: DLPack has no code for them
            pass
        return buffer, "cumem"


class _Prefetch:
    """What `prefetch` answers: iterated as often as its iterable can be."""

    def __init__(
        self, iterable: Iterable[Any], device: Device, depth: int, framework: _Framework
    ) -> None:
        self._iterable = iterable
        self._device = device
        self._depth = depth
        self._framework = framework

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """Is it not known to be empty?"""
        try:
            return len(self) > 0
        except TypeError:  # a generator, or a loader of samples that nobody has counted
            return True

    def __iter__(self) -> Iterator[Any]:
        """A generator of the batches on the device."""
        batches = iter(self._iterable)  # may fork: before anything is opened
        return _batches(batches, self._device, self._depth, self._framework)

    def __repr__(self) -> str:
        return f"<cumem.prefetch of {self._iterable!r} to cuda:{self._device.index}>"


def prefetch(
    iterable: Iterable[Any],
    device: object = None,
    depth: SupportsIndex = 2,
    *,
    framework: _Framework = None,
) -> _Prefetch:
    """Bring the batches of a loader to a device, the next ones already on their way.

    Parameters
    ----------
    iterable : iterable
        Gives batches, as a `torch.utils.data.DataLoader` does. A batch is an array, CPU
        tensor or buffer, or dicts, lists, tuples, named tuples and dataclasses of them,
        also nested. What else is in it stays as it is, and so do arrays of Python objects
        and what is on the device already.
    device : Device, int or str, optional
        Where to. Default: the current one of the thread that calls `prefetch`, as it is
        then (see `current_device`): cumem's own where that was chosen, else PyTorch's,
        so that each process of a distributed job feeds its own GPU.
    depth : int
        Batches that may be under way beside the one in hand.
    framework : {"torch", "cupy"}, optional
        What arrays and buffers become; `DeviceBuffer` by default, and where the dtype,
        as of text, times and records, is none of theirs. Tensors become tensors in any
        case.

    Returns
    -------
    iterable
        Gives the same structures with their memory on the device, C-contiguous, in the
        same shapes and dtypes. It has the length of `iterable`, and can be iterated as
        often.

    Raises
    ------
    TypeError
        If `iterable` is none, or a tensor is sparse, quantized or nested, or wraps
        others.
    ValueError
        If an argument is out of its range.
    ImportError
        If `framework` is not installed.
    OutOfMemoryError, CudaError
        If the driver refuses. What was on its way by then is waited for.

    Notes
    -----
    Work given to the device's current stream (PyTorch's for tensors, CuPy's for its
    arrays, else cumem's) after a batch has come is **ordered after** its copy. Asking for
    another **blocks**, GIL released, until the batch is there that comes ``depth`` later,
    and until the current streams are done with the work on the batch before the last: so
    not many batches take memory at the same time. The memory of a batch in `iterable` is
    kept until its copy is done, and must not change before. An iterator that is closed
    or dropped early cancels the copies that have not begun and waits for the others.

    A tensor that wants a gradient comes without: ``requires_grad_()`` it there. Memory on
    the device is a pool's of cumem, reused only when the device is done with what it was
    doing as the batch was dropped.

    On the emulated device tensors are on the CPU, over its memory.

    Examples
    --------
    >>> loader = [(numpy.ones((2, 3), "f4"), "name") for _ in range(2)]
    >>> for images, name in cumem.prefetch(loader):  # or a DataLoader of PyTorch
    ...     print(images.kind, images.shape, name)
    device (2, 3) name
    device (2, 3) name
    """
    if not isinstance(iterable, Iterable) and not hasattr(iterable, "__getitem__"):
        raise TypeError(f"iterable must be iterable, not {type(iterable).__name__}")
    ahead = read_count(depth, "depth")
    if framework not in (None, "torch", "cupy"):
        raise ValueError(
            f"framework must be 'torch', 'cupy' or None, not {framework!r}"
        )
    if framework is not None:
        importlib.import_module(framework)
    where = choose_device(device, tensors=True)
    return _Prefetch(iterable, where, ahead, framework)


def _batches(
    batches: Iterator[Any], device: Device, depth: int, framework: _Framework
) -> Iterator[Any]:
    mover = _Mover(device, framework)
    coming: collections.deque[_Coming] = collections.deque()
    done: collections.deque[list[_core.Event]] = collections.deque()
    failures: list[Exception] = []

    def start(count: int) -> None:
        try:
            for batch in itertools.islice(batches, 0 if failures else count):
                coming.append(mover.start(batch))
        except Exception as error:
            failures.append(error)  # told after the batches before it

    try:
        start(depth)
        while coming:
            start(1)
            next_ = coming.popleft()
            next_.come(device.index)
            batch, libraries = next_.batch, next_.libraries
            del next_
            yield batch
            del batch
            done.append([_record(s) for s in work_streams(device.index, libraries)])
            if len(done) > 1:
                for event in done.popleft():
                    event.synchronize()
        if failures:
            raise failures[0]
    finally:
        failures.clear()
        transfers = [each.transfer for each in coming if each.transfer is not None]
        coming.clear()
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            with contextlib.suppress(OSError, RuntimeError):
                transfer.wait()


def _record(stream: _core.Stream) -> _core.Event:
    """One for which the processor does not spin: loaders have work for it."""
    return stream.record(_core.Event(device=stream.device, timing=False, blocking=True))
