# SPDX-License-Identifier: Apache-2.0
"""Moves the batches of a loader to a device while the program works on earlier batches.

`prefetch` returns a `_Prefetch`. Each iteration over it is an `Ahead` with a `_Mover`. For
each batch, the mover takes the structure apart (`_TakenApart`), makes memory on the device
for every array in it, and begins one copy for all of them. A `_Batch` has the structure
with the new arrays, and the copy. It tells `Ahead` when the copy is done, and which work
must end before the batch's memory can be dropped.

Batches whose types have a method ``to(device, ...)`` are moved by that method, on a
separate stream of PyTorch.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Self,
    SupportsIndex,
    TypeVar,
    overload,
)

import numpy as np

from cumem import _core
from cumem.base.errors import warn_caller
from cumem.base.kinds import is_on_device
from cumem.base.units import fold, read_count
from cumem.buffers.arguments import hinting, read_flag
from cumem.buffers.hints import framework_hint
from cumem.devices.device import Device
from cumem.interchange.structures import (
    M2,
    M,
    Memory,
    Tree,
    UntypedTree,
    change_attributes,
    exports_memory,
    holds_memory,
    is_functional,
    is_plain_tensor,
    is_tensor,
    mapped,
    move_whole,
    moves_itself,
)
from cumem.transfers.ahead import Ahead, Room
from cumem.transfers.sources import gives_fresh, is_alone

if TYPE_CHECKING:
    from cumem.base._optional_types import Tensor

T = TypeVar("T")
K = TypeVar("K")

_Framework = Literal["torch", "cupy"] | None

#: The types in which the elements of tensors are copied, by their size in bytes. NumPy does
#: not have every dtype of PyTorch.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


#: Types that are not loaders, with words for the items that they yield instead of batches.
_NO_BATCHES: dict[type, str] = {
    Mapping: "keys",
    str: "characters",
    bytes: "numbers",
    bytearray: "numbers",
    memoryview: "numbers",
    io.IOBase: "lines",
}


def _module(name: str) -> Any:
    """Return a library that is imported already."""
    return sys.modules[name]


def _is_at(tensor: Any, device: Device) -> bool:
    """Return whether a tensor stays, on `device` or on an unknown sort of device."""
    place = tensor.device
    if place.type == "cuda":
        return bool(place.index == device.index)
    return bool(place.type != "cpu")


def _carried(tensor: Any) -> Any:
    """Return the memory of a tensor, as elements of a dtype that NumPy has."""
    torch = _module("torch")
    if not is_plain_tensor(tensor):
        raise TypeError(
            f"a {type(tensor).__name__} of {tensor.layout}, {tensor.dtype}, cannot be "
            "copied by its memory: only strided tensors can, not quantized or nested "
            "ones, nor those that wrap others"
        )
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.view(getattr(torch, _CARRIERS[plain.element_size()]))


def _keep_until_used(tensor: Any, stream: Any) -> None:
    """Make PyTorch reuse the memory of a tensor only after the stream's work on it.

    PyTorch cannot do that for sparse, nested and masked tensors. But move_whole() makes
    sure that their memory too is reused only after the work on their batch.
    """
    if not is_tensor(tensor) or is_plain_tensor(tensor):
        tensor.record_stream(stream)
        return
    with (
        contextlib.suppress(NotImplementedError, RuntimeError, TypeError),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        tensor.record_stream(stream)


def is_left(leaf: Any) -> bool:
    """Return whether a leaf that is not moved holds memory, so that a warning is needed."""
    if isinstance(leaf, np.ndarray):  # an array of objects, which may hold arrays
        return any(holds_memory(each) for each in leaf.flat[:8])
    if is_tensor(leaf) or isinstance(leaf, _core.Buffer):
        return False
    return holds_memory(leaf) or exports_memory(leaf)


def _like(tensor: Any, there: Any) -> Any:
    """Give the tensor `there` the dtype, the class and the attributes of `tensor`."""
    there = there.view(tensor.dtype)
    kind = type(tensor.detach())  # the class that PyTorch keeps for such a tensor
    if kind is not type(there):
        there = there.as_subclass(kind)
        vars(there).update(vars(tensor))
    return there


def _moves_by_torch(tensor: Any, device: Device) -> bool:
    """Return whether only PyTorch can move the tensor.

    This is so if it is sparse, quantized or nested, or if its class wraps other tensors.
    Tensors with which a transform traces are refused.
    """
    return not (
        _is_at(tensor, device) or is_plain_tensor(tensor) or is_functional(tensor)
    )


def tensor_over(buffer: _core.Buffer) -> Any:
    """Return a tensor over a buffer's memory, without ordering any streams."""
    return _module("torch").from_dlpack(buffer.__dlpack__(stream=-1))


def work_streams(device: int, libraries: Iterable[str]) -> list[_core.Stream]:
    """Return the streams on which the caller queues work on the device now.

    These are the current streams of the `libraries` that work on it, or of cumem.
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


class _Batch:
    """A batch whose copies have begun: an `InFlightItem` of ahead.py."""

    label = ""

    def __init__(
        self,
        mover: _Mover,
        output: Any,
        transfer: _core.Transfer | None,
        nbytes: int,
        libraries: set[str],
    ) -> None:
        self.output = output
        self.transfer = transfer
        self.nbytes = nbytes
        self._mover = mover
        self._libraries = libraries
        self._moved: list[Any] = []  # parts that moved themselves, through PyTorch
        self._event: Any = None  # PyTorch's event after these moves

    def moved_by_torch(self, moved: list[Any], event: Any) -> None:
        self._moved, self._event = moved, event

    def wait_read(self) -> None:
        if self.transfer is not None:
            self.transfer.wait()
        if self._event is not None:
            self._event.synchronize()

    def order_after_copy(self, index: int) -> None:
        device = self._mover.index
        if self.transfer is not None:
            for stream in work_streams(device, self._libraries):
                self.transfer.order(stream)
            if "torch" in self._libraries and _core._is_emulated():
                self.transfer.wait()  # PyTorch's work runs on the processor
        if self._event is not None:
            stream = _module("torch").cuda.current_stream(device)
            stream.wait_event(self._event)
            for each in self._moved:
                record = getattr(type(each), "record_stream", None)
                if callable(record):
                    _keep_until_used(each, stream)

    def record_use(self, index: int) -> list[_core.Event]:
        self._mover.note_work()
        streams = work_streams(self._mover.index, self._libraries)
        return [_record(stream) for stream in streams]


class _TakenApart:
    """One batch taken apart: its new leaves, and the copies that fill them."""

    def __init__(self, mover: _Mover) -> None:
        self.pairs: list[tuple[_core.Buffer, Any]] = []
        self.libraries: set[str] = set()
        self.whole: list[Any] = []  # parts that have moved themselves
        self.left: list[str] = []  # names of parts that stay on the host
        self._mover = mover
        self._made: dict[int, tuple[Any, Any]] = {}  # new leaves, by the ids of the old

    def of(self, value: Any) -> Any:
        return mapped(value, self._once, moves_itself, self.left.append)

    def _once(self, leaf: Any) -> Any:
        """Return the moved leaf. A leaf that occurs twice is moved only once."""
        if id(leaf) not in self._made:
            self._made[id(leaf)] = leaf, self._moved(leaf)
        return self._made[id(leaf)][1]

    def _moved(self, leaf: Any) -> Any:
        mover = self._mover
        by_torch = is_tensor(leaf) and _moves_by_torch(leaf, mover.device)
        if by_torch or moves_itself(leaf):
            there = mover.move_whole(leaf)
            self.whole.append(there)
            self.libraries.add("torch")
            return there
        source = mover.source(leaf)
        if source is None:
            if is_left(leaf):
                self.left.append(_name(leaf))
            return leaf
        library: str = "torch" if is_tensor(leaf) else mover.framework
        there, library = mover.target(source, library, self.pairs)
        self.libraries.add(library)
        if is_tensor(leaf):
            there = _like(leaf, there)
            self._made[id(leaf)] = leaf, there  # its attributes may refer to itself
            change_attributes(there, self.of)
        return there


class _Mover:
    """Takes batches of a loader and begins their copies: an `ItemSource` of ahead.py."""

    advice = "smaller batches"
    label = ""
    has_more = False

    def __init__(
        self,
        batches: Iterator[Any],
        device: Device,
        framework: _Framework,
        is_fresh: bool,
        may_ask: bool,
    ) -> None:
        self.device = device
        self.index = device.index
        self.nbytes = 0  # of the last batch; the next one is probably as large
        self.reuses = not is_fresh
        self._batches: Iterator[Any] | None = batches
        self.framework = framework or "cumem"
        self._is_fresh = is_fresh
        self._may_ask = may_ask
        # Memory is allocated on a separate stream, so that it need not be ordered after the
        # work on the other streams.
        self._side = _core.Stream(device=device)
        self._lane: Any = None  # PyTorch's stream for parts that move themselves
        self._work: Any = None  # PyTorch's event after the work queued so far
        self._taken: list[Any] = []
        self._has_warned = False  # about parts that stay on the host

    def take(self) -> bool:
        assert self._batches is not None
        try:
            self._taken = [next(self._batches)]
        except StopIteration:
            return False
        # In this method only the list refers to the batch, so that is_alone() can count.
        self.reuses = not (self._is_fresh or (self._may_ask and is_alone(self._taken)))
        return True

    def split(self) -> bool:
        return False  # a batch is never cut

    def close(self) -> None:
        self._batches = None
        self._taken.clear()

    def begin(self) -> _Batch:
        """Begin all copies of a batch, by one call."""
        apart = _TakenApart(self)
        moved = apart.of(self._taken[0])
        self._warn_left(apart.left)
        pairs = apart.pairs
        transfer = _core.copy_many_async(pairs) if pairs else None
        self.nbytes = 0 if transfer is None else transfer.nbytes
        libraries = apart.libraries or {self.framework}
        batch = _Batch(self, moved, transfer, self.nbytes, libraries)
        if apart.whole and self._lane is not None:
            batch.moved_by_torch(apart.whole, self._lane.record_event())
        self._taken = []
        return batch

    # -- batches that move themselves ----------------------------------------------------

    def note_work(self) -> None:
        """Record an event after the work that is queued; `_Batch.record_use` calls this."""
        if self._lane is not None:
            stream = _module("torch").cuda.current_stream(self.index)
            self._work = stream.record_event()

    def move_whole(self, value: Any) -> Any:
        """Move a value by its own method ``to``, on the separate stream of PyTorch.

        PyTorch reuses the value's memory in the order of that stream. So the stream first
        waits for all work that was queued on earlier batches.
        """
        torch = _module("torch")
        if _core._is_emulated():
            return move_whole(value, torch.device("cpu"), True)
        device = torch.device("cuda", self.index)
        if self._lane is None:
            self._lane = torch.cuda.Stream(device)
            self._work = torch.cuda.current_stream(device).record_event()
        self._lane.wait_event(self._work)
        with torch.cuda.stream(self._lane):
            return move_whole(value, device, False)

    def _warn_left(self, left: list[str]) -> None:
        if not left or self._has_warned:
            return
        self._has_warned = True
        names = ", ".join(sorted(set(left)))
        warn_caller(
            f"prefetch() cannot take these apart, and leaves them on the host: {names}. "
            "Give such a type a method to(device, non_blocking=True), make it a dataclass, "
            "or let the loader give dicts, tuples and arrays: numpy.asarray(x) for plain "
            "memory, such as a memoryview",
            UserWarning,
        )

    # -- arrays ----------------------------------------------------------------------------

    def source(self, leaf: Any) -> Any:
        """Return the memory of a leaf that has to be copied, or None if the leaf stays."""
        if is_tensor(leaf):
            return None if _is_at(leaf, self.device) else _carried(leaf)
        if isinstance(leaf, np.ndarray):
            return None if leaf.dtype.hasobject else self._array(leaf)
        if isinstance(leaf, _core.Buffer):
            is_at_target = isinstance(leaf, _core.DeviceBuffer) and (
                leaf.device == self.device
            )
            return None if is_at_target else leaf
        if hasattr(type(leaf), "__dlpack__") and not hasattr(
            type(leaf), "__cuda_array_interface__"
        ):  # such as an array of JAX; if it is on a device, it stays there
            try:
                buffer = _core.asbuffer(leaf)
            except (TypeError, ValueError, BufferError):
                return None
            return None if is_on_device(buffer.kind) else buffer
        return None

    def _array(self, leaf: np.ndarray[Any, Any]) -> Any:
        """Return the array in the native byte order if another library gets it."""
        if isinstance(leaf, np.ma.MaskedArray):
            if np.ma.is_masked(leaf):
                raise TypeError(
                    "a batch has an array with masked elements, whose values would be "
                    "copied like any others: give values in their place first, such as by "
                    ".filled()"
                )
            leaf = leaf.data
        if self.framework == "cumem" or leaf.dtype.isnative or leaf.dtype.names:
            return leaf
        return leaf.astype(leaf.dtype.newbyteorder("="))

    def target(
        self, source: Any, library: str, pairs: list[tuple[_core.Buffer, Any]]
    ) -> tuple[Any, str]:
        """Make memory on the device, and return its array and the array's library.

        The array is made before the copy begins, because an export would wait for it.
        """
        order: list[int] | None = None
        if is_tensor(source):
            order = _dense_order(source)
            source = source if order is None else source.permute(order)
            dtype: Any = _CARRIERS[source.element_size()]
        else:
            dtype = source.dtype
        buffer = _core.empty_device(
            tuple(source.shape), dtype, device=self.device, stream=self._side
        )
        pairs.append((buffer, source))
        try:
            if library == "torch":
                there = tensor_over(buffer)
                if order is not None:
                    back = sorted(range(len(order)), key=order.__getitem__)
                    there = there.permute(back)
                return there, library
            if library == "cupy":
                return _module("cupy").from_dlpack(buffer), library
        except BufferError:  # DLPack has no code for texts, times and records
            pass
        return buffer, "cumem"


def _name(leaf: Any) -> str:
    """Return the name of a leaf's type, for the warning about leaves that stay."""
    name = type(leaf).__name__
    return f"{name} of objects" if isinstance(leaf, np.ndarray) else name


def _dense_order(tensor: Any) -> list[int] | None:
    """Return the order of axes in which a copy of the tensor is contiguous, or None.

    PyTorch keeps this order in ``to()``, for instance for `channels_last`. None means the
    order of the axes themselves.
    """
    if tensor.is_contiguous():
        return None
    strides = _module("torch").empty_like(tensor, device="meta").stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return None if order == sorted(order) else order


class _Prefetch(Generic[T]):
    """The result of `prefetch`, which can be iterated as often as its iterable.

    `close`, or the end of a ``with`` block, ends all iterations. All other attributes are
    those of the iterable, such as the ``dataset``, the ``batch_size`` and the ``sampler``
    of a DataLoader.
    """

    __slots__ = (
        "__weakref__",
        "_begun",
        "_depth",
        "_device",
        "_framework",
        "_fresh",
        "_is_open",
        "_iterable",
    )

    _iterable: Iterable[Any]

    def __init__(
        self,
        iterable: Iterable[Any],
        device: Device,
        depth: int,
        framework: _Framework,
        fresh: bool | None,
    ) -> None:
        self._iterable = iterable
        self._device = device
        self._depth = depth
        self._framework = framework
        self._fresh = fresh
        self._is_open = True
        self._begun: list[weakref.ref[Ahead[T]]] = []

    def close(self) -> None:
        """End all iterations, as `Ahead.close` does, and allow no new ones.

        Closing twice is not an error. The iterable itself is not closed. This **blocks**,
        with the GIL released, until the copies that have begun no longer read their
        batches.
        """
        self._is_open = False
        begun, self._begun = self._begun, []
        with contextlib.ExitStack() as stack:  # closes all of them, even if one fails
            for ref in begun:
                if (ahead := ref()) is not None:
                    stack.callback(ahead.close)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("this prefetch is closed: call cumem.prefetch(...) again")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle or copy the object without its iterations."""
        given = self._iterable, self._device, self._depth, self._framework, self._fresh
        return type(self), given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # the interpreter, copy and pickle ask for such names
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name
            )
        return getattr(self._iterable, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._iterable, name, value)

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """Return False only if the iterable is known to have no batches."""
        try:
            return len(self) > 0
        except TypeError:  # a generator, or a loader that does not know its length
            return True

    def __iter__(self) -> Ahead[T]:
        """Iterate over the batches on the device, from the first on."""
        self._check_open()
        batches = iter(self._iterable)  # before any device is opened, since it may fork
        device = self._device
        is_fresh = gives_fresh(self._iterable, self._fresh)
        mover = _Mover(batches, device, self._framework, is_fresh, self._fresh is None)
        room = Room(device.index, self._depth + 2)
        ahead: Ahead[T] = Ahead(mover, self._depth, 1, room, "prefetch", "batch")
        self._begun = [ref for ref in self._begun if ref() is not None]
        self._begun.append(weakref.ref(ahead))
        return ahead

    def __aiter__(self) -> Ahead[T]:
        """Iterate with ``async for``."""
        return iter(self)

    def __repr__(self) -> str:
        what = repr(self._iterable)
        if len(what) > 80 or "\n" in what:  # such as the repr of a list of arrays
            what = f"a {type(self._iterable).__name__}"
        return fold(f"<cumem.prefetch of {what} to cuda:{self._device.index}>")


@overload
def prefetch(
    iterable: Iterable[UntypedTree],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: Literal["torch"] | None = ...,
    fresh: bool | None = ...,
) -> _Prefetch[Any]: ...
@overload
def prefetch(
    iterable: Iterable[Memory],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: None = ...,
    fresh: bool | None = ...,
) -> _Prefetch[_core.DeviceBuffer]: ...
@overload
def prefetch(
    iterable: Iterable[tuple[M, M2]],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: None = ...,
    fresh: bool | None = ...,
) -> _Prefetch[tuple[_core.DeviceBuffer, _core.DeviceBuffer]]: ...
@overload
def prefetch(
    iterable: Iterable[tuple[M, ...]],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: None = ...,
    fresh: bool | None = ...,
) -> _Prefetch[tuple[_core.DeviceBuffer, ...]]: ...
@overload
def prefetch(
    iterable: Iterable[list[M]],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: None = ...,
    fresh: bool | None = ...,
) -> _Prefetch[list[_core.DeviceBuffer]]: ...
@overload
def prefetch(
    iterable: Iterable[dict[K, M]],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: None = ...,
    fresh: bool | None = ...,
) -> _Prefetch[dict[K, _core.DeviceBuffer]]: ...
@overload
def prefetch(
    iterable: Iterable[Memory],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: Literal["torch"],
    fresh: bool | None = ...,
) -> _Prefetch[Tensor]: ...
@overload
def prefetch(
    iterable: Iterable[tuple[M, M2]],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: Literal["torch"],
    fresh: bool | None = ...,
) -> _Prefetch[tuple[Tensor, Tensor]]: ...
@overload
def prefetch(
    iterable: Iterable[tuple[M, ...]],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: Literal["torch"],
    fresh: bool | None = ...,
) -> _Prefetch[tuple[Tensor, ...]]: ...
@overload
def prefetch(
    iterable: Iterable[list[M]],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: Literal["torch"],
    fresh: bool | None = ...,
) -> _Prefetch[list[Tensor]]: ...
@overload
def prefetch(
    iterable: Iterable[dict[K, M]],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: Literal["torch"],
    fresh: bool | None = ...,
) -> _Prefetch[dict[K, Tensor]]: ...
@overload
def prefetch(
    iterable: Iterable[Tree],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: Literal["torch"] | None = ...,
    fresh: bool | None = ...,
) -> _Prefetch[Any]: ...
@overload
def prefetch(
    iterable: Iterable[T],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: Literal["torch"] | None = ...,
    fresh: bool | None = ...,
) -> _Prefetch[T]: ...
@overload
def prefetch(
    iterable: Iterable[Any],
    device: object = ...,
    depth: SupportsIndex = ...,
    *,
    framework: _Framework = ...,
    fresh: bool | None = ...,
) -> _Prefetch[Any]: ...
@hinting
def prefetch(
    iterable: Iterable[Any],
    device: object = None,
    depth: SupportsIndex = 2,
    *,
    framework: _Framework = None,
    fresh: bool | None = None,
) -> _Prefetch[Any]:
    """Move the batches of a loader to a device, while the next ones are on their way.

    Parameters
    ----------
    iterable : iterable
        An object that yields batches, as a `torch.utils.data.DataLoader` does. A batch is
        an array, CPU tensor or buffer; or dicts, lists, tuples, named tuples, dataclasses
        and classes of attrs that contain them, also nested; or an object with a method
        ``to(device, ...)``, as in tensordict, PyTorch Geometric and detectron2. Attributes
        that somebody added to such a container or tensor are moved as well. Everything else
        in a batch stays as it is, and so does everything that is on the device already. A
        warning names parts with arrays or tensors that stay on the host, such as data
        frames and images.
    device : Device, int or str, optional
        The device. By default it is the current one of the thread when it calls `prefetch`
        (see `current_device`): cumem's own if that was chosen, or else PyTorch's, so that
        each process of a distributed job feeds its own GPU.
    depth : int
        The number of batches that may be on their way besides the one in use.
    framework : {"torch", "cupy"}, optional
        The library whose arrays take the place of arrays and buffers. By default, and for
        dtypes that the library lacks, such as texts, times and records, they become
        `DeviceBuffer`. Tensors always become tensors. Arrays of the other byte order are
        converted for the library.
    fresh : bool, optional
        True says that the iterable never writes to the memory of a batch that it has
        yielded, so that the next batch may be requested while this one is still being read.
        False says that it may reuse this memory. By default cumem decides by the type of
        the iterable. Lists, arrays, and a DataLoader that has workers, or uses its own
        `default_collate` or a `PinnedCollate`, count as fresh. For all other iterables, a
        batch is copied before the next one is requested.

    Returns
    -------
    iterable
        An object that yields new structures of the same types, whose memory is on the
        device, with the same shapes and dtypes. Arrays are C-contiguous, and tensors keep
        their memory format (`channels_last`). The object has the length and the attributes
        of `iterable`, such as `dataset` and `sampler`, and can be iterated as often, by
        ``for`` and ``async for``. All copies that are on their way are ended by
        ``batches.close()``, and by the end of a ``with cumem.prefetch(loader) as batches:``
        block, also after an error.

    Warns
    -----
    UserWarning
        If a part of a batch holds memory that stays on the host.

    Raises
    ------
    TypeError
        If `iterable` is not iterable, or yields keys, texts or numbers instead of batches,
        as a dict, a file and a data frame do; if a transform such as ``vmap`` traces with a
        tensor; if elements of an array are masked.
    ValueError
        If an argument is out of range.
    ImportError
        If `framework` is not installed.
    OutOfMemoryError, CudaError
        If the driver refuses. Copies that have begun by then are waited for.

    Notes
    -----
    Work that is queued on the device's current stream (PyTorch's for tensors, CuPy's for
    its arrays, else cumem's) after a batch was returned is **ordered after** the batch's
    copy. Asking for a batch **blocks**, with the GIL released, until the batch ``depth``
    places further on has been taken from `iterable`, and until the current streams have
    finished the work on the batch before the last. So only few batches take memory at the
    same time. The memory of a batch in `iterable` is kept alive until its copy is done. An
    iterator that is closed or dropped early cancels copies that have not begun, and waits
    for the others.

    Tensors on the device do not require a gradient, even if the tensors of the batch do;
    call ``requires_grad_()`` on them. Memory on the device comes from a pool of cumem. It
    is reused only after the device has finished all work that it had when the batch was
    dropped.

    On the emulated device, tensors are CPU tensors over the memory of the device.

    Examples
    --------
    >>> loader = [(numpy.ones((2, 3), "f4"), "name") for _ in range(2)]
    >>> for images, name in cumem.prefetch(loader):  # or a DataLoader of PyTorch
    ...     print(images.kind, images.shape, name)
    device (2, 3) name
    device (2, 3) name
    """
    _check_iterable(iterable)
    ahead = read_count(depth, "depth")
    if framework not in (None, "torch", "cupy"):
        raise ValueError(
            f"framework must be 'torch', 'cupy' or None, not {framework!r}"
            f"{framework_hint(framework, ('torch', 'cupy'))}"
        )
    if framework is not None:
        importlib.import_module(framework)
    fresh = None if fresh is None else read_flag(fresh, "fresh")
    where = _core._device(device, "device", True)
    return _Prefetch(iterable, where, ahead, framework, fresh)


def _check_iterable(iterable: Any) -> None:
    """Refuse an iterable that yields keys, characters or the like instead of batches."""
    name = type(iterable).__name__
    gives = next(
        (text for kind, text in _NO_BATCHES.items() if isinstance(iterable, kind)), None
    )
    if hasattr(iterable, "iloc"):  # pandas
        gives = "labels or single values"
    if gives is not None:
        raise TypeError(
            f"iterable must give batches, and a {name} gives its {gives}: pass a loader "
            "or a list of batches; cumem.to_device(batch) moves a single one"
        )
    if not isinstance(iterable, Iterable) and not hasattr(iterable, "__getitem__"):
        raise TypeError(f"iterable must be iterable, not {name}")


def _record(stream: _core.Stream) -> _core.Event:
    """Record an event; waiting for it leaves the processor free, which loaders need."""
    return stream.record(_core.Event(device=stream.device, timing=False, blocking=True))
