# SPDX-License-Identifier: Apache-2.0
"""Batches of a loader on their way to a device while the one before is worked on."""

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

#: What carries the elements of a tensor, by their bytes: not every dtype of PyTorch is
#: one of NumPy's.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


#: What iterating over these gives, of which nothing can be moved.
_NO_BATCHES: dict[type, str] = {
    Mapping: "keys",
    str: "characters",
    bytes: "numbers",
    bytearray: "numbers",
    memoryview: "numbers",
    io.IOBase: "lines",
}


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
    if not is_plain_tensor(tensor):
        raise TypeError(
            f"a {type(tensor).__name__} of {tensor.layout}, {tensor.dtype}, cannot be "
            "copied by its memory: only strided tensors can, not quantized or nested "
            "ones, nor those that wrap others"
        )
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.view(getattr(torch, _CARRIERS[plain.element_size()]))


def _keep_until_used(tensor: Any, stream: Any) -> None:
    """Have PyTorch reuse the memory of a tensor only after the stream's work on it.

    PyTorch has no way to do that for sparse, nested and masked tensors.
    Their memory is reused after the work on their batch all the same: see move_whole().
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
    """Does a leaf that is not moved hold memory, so that somebody should know of it?"""
    if isinstance(leaf, np.ndarray):  # of Python objects; text is nothing to move
        return any(holds_memory(each) for each in leaf.flat[:8])
    if is_tensor(leaf) or isinstance(leaf, _core.Buffer):
        return False
    return holds_memory(leaf) or exports_memory(leaf)


def _like(tensor: Any, there: Any) -> Any:
    """The tensor `there` in the dtype, the class and with the attributes of `tensor`."""
    there = there.view(tensor.dtype)
    kind = type(tensor.detach())  # that of what PyTorch makes of it
    if kind is not type(there):
        there = there.as_subclass(kind)
        vars(there).update(vars(tensor))
    return there


def _moves_by_torch(tensor: Any, device: Device) -> bool:
    """Is it one that only PyTorch can move: sparse, quantized, nested, or of a class that
    wraps others? Those of a transform are traced with, and are refused.
    """
    return not (
        _is_at(tensor, device) or is_plain_tensor(tensor) or is_functional(tensor)
    )


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


class _Batch:
    """A batch whose copies have begun, as `Ahead` asks for."""

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
        self._moved: list[Any] = []  # by PyTorch, as they moved themselves
        self._event: Any = None  # PyTorch's, which ends with these

    def moved_by_torch(self, moved: list[Any], event: Any) -> None:
        self._moved, self._event = moved, event

    def wait_read(self) -> None:
        if self.transfer is not None:
            self.transfer.wait()
        if self._event is not None:
            self._event.synchronize()

    def come(self, index: int) -> None:
        device = self._mover.index
        if self.transfer is not None:
            for stream in work_streams(device, self._libraries):
                self.transfer.order(stream)
            if "torch" in self._libraries and _core._is_emulated():
                self.transfer.wait()  # its tensors are the processor's
        if self._event is not None:
            stream = _module("torch").cuda.current_stream(device)
            stream.wait_event(self._event)
            for each in self._moved:
                record = getattr(type(each), "record_stream", None)
                if callable(record):
                    _keep_until_used(each, stream)

    def leave(self, index: int) -> list[_core.Event]:
        self._mover.note_work()
        streams = work_streams(self._mover.index, self._libraries)
        return [_record(stream) for stream in streams]


class _Moving:
    """One batch as it is taken apart: what its leaves have become, and the copies."""

    def __init__(self, mover: _Mover) -> None:
        self.pairs: list[tuple[_core.Buffer, Any]] = []
        self.libraries: set[str] = set()
        self.whole: list[Any] = []  # what has moved itself
        self.left: list[str] = []  # names of what stays on the host
        self._mover = mover
        self._made: dict[int, tuple[Any, Any]] = {}  # by the leaf's id, with the leaf

    def of(self, value: Any) -> Any:
        return mapped(value, self._once, moves_itself, self.left.append)

    def _once(self, leaf: Any) -> Any:
        """A leaf that is there twice goes once."""
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
            self._made[id(leaf)] = leaf, there  # which its attributes may name
            change_attributes(there, self.of)
        return there


class _Mover:
    """Takes the batches of a loader, and begins their copies."""

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
        self.nbytes = 0  # of the last batch: the next one is about as large
        self.reuses = not is_fresh
        self._batches: Iterator[Any] | None = batches
        self.framework = framework or "cumem"
        self._is_fresh = is_fresh
        self._may_ask = may_ask
        # memory is not taken in the order of the work
        self._side = _core.Stream(device=device)
        self._lane: Any = None  # a stream of PyTorch, for what moves itself
        self._work: Any = None  # PyTorch's event over the work queued so far
        self._taken: list[Any] = []
        self._is_told = False  # of what stays on the host

    def take(self) -> bool:
        assert self._batches is not None
        try:
            self._taken = [next(self._batches)]
        except StopIteration:
            return False
        # no other name has it here
        self.reuses = not (self._is_fresh or (self._may_ask and is_alone(self._taken)))
        return True

    def split(self) -> bool:
        return False  # a batch comes whole

    def close(self) -> None:
        self._batches = None
        self._taken.clear()

    def begin(self) -> _Batch:
        """All copies of a batch, by one call."""
        moving = _Moving(self)
        moved = moving.of(self._taken[0])
        self._tell(moving.left)
        pairs = moving.pairs
        transfer = _core.copy_many_async(pairs) if pairs else None
        self.nbytes = 0 if transfer is None else transfer.nbytes
        libraries = moving.libraries or {self.framework}
        batch = _Batch(self, moved, transfer, self.nbytes, libraries)
        if moving.whole and self._lane is not None:
            batch.moved_by_torch(moving.whole, self._lane.record_event())
        self._taken = []
        return batch

    # -- batches of types of their own ---------------------------------------------------

    def note_work(self) -> None:
        """By the thread that works on the batches, which has queued its work on one."""
        if self._lane is not None:
            stream = _module("torch").cuda.current_stream(self.index)
            self._work = stream.record_event()

    def move_whole(self, value: Any) -> Any:
        """By its own ``to``, on a stream beside the work.

        Its memory is PyTorch's, which reuses it in the order of that stream: so what is
        copied there comes after all work that was queued on the batches before.
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

    def _tell(self, left: list[str]) -> None:
        if not left or self._is_told:
            return
        self._is_told = True
        names = ", ".join(sorted(set(left)))
        warn_caller(
            f"prefetch() leaves on the host what it cannot take apart: {names}. Give "
            "such a type a method to(device, non_blocking=True), make it a dataclass, or "
            "let the loader give dicts, tuples and arrays: numpy.asarray(x) of what is "
            "plain memory, such as a memoryview",
            UserWarning,
        )

    # -- arrays ----------------------------------------------------------------------------

    def source(self, leaf: Any) -> Any:
        """What to copy of a leaf; None: it stays as it is."""
        if is_tensor(leaf):
            return None if _is_at(leaf, self.device) else _carried(leaf)
        if isinstance(leaf, np.ndarray):
            return None if leaf.dtype.hasobject else self._array(leaf)
        if isinstance(leaf, _core.Buffer):
            is_there = isinstance(leaf, _core.DeviceBuffer) and (
                leaf.device == self.device
            )
            return None if is_there else leaf
        if hasattr(type(leaf), "__dlpack__") and not hasattr(
            type(leaf), "__cuda_array_interface__"
        ):  # JAX's and others'; what is on a device already stays there
            try:
                buffer = _core.asbuffer(leaf)
            except (TypeError, ValueError, BufferError):
                return None
            return None if buffer.kind == "device" else buffer
        return None

    def _array(self, leaf: np.ndarray[Any, Any]) -> Any:
        """In the byte order of the libraries that are to have it."""
        if isinstance(leaf, np.ma.MaskedArray):
            if np.ma.is_masked(leaf):
                raise TypeError(
                    "a batch has an array with masked elements, which would come as any "
                    "others: give values in their place first, such as by .filled()"
                )
            leaf = leaf.data
        if self.framework == "cumem" or leaf.dtype.isnative or leaf.dtype.names:
            return leaf
        return leaf.astype(leaf.dtype.newbyteorder("="))

    def target(
        self, source: Any, library: str, pairs: list[tuple[_core.Buffer, Any]]
    ) -> tuple[Any, str]:
        """New memory on the device, and whose array it is. Handed over before its copy,
        for which an export waits.
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
        except BufferError:  # text, times, records: DLPack has no code for them
            pass
        return buffer, "cumem"


def _name(leaf: Any) -> str:
    """What a warning calls something that stays on the host."""
    name = type(leaf).__name__
    return f"{name} of objects" if isinstance(leaf, np.ndarray) else name


def _dense_order(tensor: Any) -> list[int] | None:
    """The order of its axes in which a copy of the tensor is contiguous, such as that of
    `channels_last`, as PyTorch decides it in ``to()``; None: as they stand.
    """
    if tensor.is_contiguous():
        return None
    strides = _module("torch").empty_like(tensor, device="meta").stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return None if order == sorted(order) else order


class _Prefetch(Generic[T]):
    """What `prefetch` answers: iterated as often as its iterable can be, until `close` or
    the end of a ``with`` block.

    All other attributes are those of the iterable, such as the ``dataset``, the
    ``batch_size`` and the ``sampler`` of a DataLoader.
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
        """End all iterations over it, as `Ahead.close` does, and allow no others; twice is
        no error.

        **Blocks**, GIL released, until the copies that have begun no longer read their
        batches. The iterable itself is not closed.
        """
        self._is_open = False
        begun, self._begun = self._begun, []
        with contextlib.ExitStack() as stack:  # all are closed, also where one fails
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
        """Iterations stay behind."""
        given = self._iterable, self._device, self._depth, self._framework, self._fresh
        return type(self), given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by the interpreter, by copy and by pickle
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
        """Is it not known to be empty?"""
        try:
            return len(self) > 0
        except TypeError:  # a generator, or a loader of samples that nobody has counted
            return True

    def __iter__(self) -> Ahead[T]:
        """The batches on the device, from the first on."""
        self._check_open()
        batches = iter(self._iterable)  # may fork: before anything is opened
        device = self._device
        is_fresh = gives_fresh(self._iterable, self._fresh)
        mover = _Mover(batches, device, self._framework, is_fresh, self._fresh is None)
        room = Room(device.index, self._depth + 2)
        ahead: Ahead[T] = Ahead(mover, self._depth, 1, room, "prefetch", "batch")
        self._begun = [ref for ref in self._begun if ref() is not None]
        self._begun.append(weakref.ref(ahead))
        return ahead

    def __aiter__(self) -> Ahead[T]:
        """The same, for ``async for``."""
        return iter(self)

    def __repr__(self) -> str:
        what = repr(self._iterable)
        if len(what) > 80 or "\n" in what:  # a list of arrays, for instance
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
    """Bring the batches of a loader to a device, the next ones already on their way.

    Parameters
    ----------
    iterable : iterable
        Gives batches, as a `torch.utils.data.DataLoader` does. A batch is an array, CPU
        tensor or buffer, or dicts, lists, tuples, named tuples, dataclasses and classes
        of attrs with them, also nested, or has a method ``to(device, ...)`` of its own,
        as those of tensordict, PyTorch Geometric and detectron2 have. Attributes that
        someone gave such a container or tensor besides are moved as well. What else is in
        it stays as it is, and so does what is on the device already; a warning names what
        holds arrays or tensors and is left on the host, such as data frames and images.
    device : Device, int or str, optional
        Where to. Default: the current one of the thread that calls `prefetch`, as it is
        then (see `current_device`): cumem's own where that was chosen, else PyTorch's,
        so that each process of a distributed job feeds its own GPU.
    depth : int
        Batches that may be under way beside the one in hand.
    framework : {"torch", "cupy"}, optional
        What arrays and buffers become; `DeviceBuffer` by default, and where the dtype,
        as of text, times and records, is none of theirs. Tensors become tensors in any
        case. For them arrays of the other byte order are turned.
    fresh : bool, optional
        True: no batch lies in memory that the iterable writes to again, so that the next
        one may be asked for while this one is still read. False: it may. Default: what
        is known of the iterable. It is true of lists and arrays, and of a DataLoader
        that has workers, or stacks by its own `default_collate` or a `PinnedCollate`.
        Of all others a batch is copied before the next one is asked for.

    Returns
    -------
    iterable
        Gives new structures of the same types with their memory on the device, in the
        same shapes and dtypes: arrays C-contiguous, tensors in their memory format
        (`channels_last`). It has the length and the attributes of `iterable`, such as
        `dataset` and `sampler`, and can be iterated as often, by ``for`` and
        ``async for``. ``with cumem.prefetch(loader) as batches:`` or ``batches.close()``
        ends what is under way, also where the body raises.

    Warns
    -----
    UserWarning
        If something in a batch holds memory that stays on the host.

    Raises
    ------
    TypeError
        If `iterable` is none, or gives keys, text or numbers in place of batches, as a
        dict, a file and a data frame do, a tensor is one that a transform such as
        ``vmap`` traces with, or elements of an array are masked.
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
    kept until its copy is done. An iterator that is closed
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
    """Refuse what gives no batches when it is iterated, but its keys or characters."""
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
    """One for which the processor does not spin: loaders have work for it."""
    return stream.record(_core.Event(device=stream.device, timing=False, blocking=True))
