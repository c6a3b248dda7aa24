# SPDX-License-Identifier: Apache-2.0
"""`register` page-locks memory that exists, and returns an object that unlocks it."""

from __future__ import annotations

from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    Self,
    SupportsIndex,
    TypeVar,
    final,
    overload,
)

import numpy as np

from cumem import _core
from cumem.base.kinds import KINDS, is_on_device
from cumem.base.places import found_in
from cumem.base.units import fold, format_nbytes
from cumem.buffers.arguments import hinting, read_flag
from cumem.pools.out_of_memory import lock_pages

_Registered = _core.PinnedBuffer | _core.MappedBuffer

if TYPE_CHECKING:
    import typing_extensions

    #: The type of the buffer in a `Registration`: a PinnedBuffer or a MappedBuffer.
    _R_co = typing_extensions.TypeVar(
        "_R_co", bound=_Registered, default=_Registered, covariant=True
    )
else:
    _R_co = TypeVar("_R_co", covariant=True)


@found_in("cumem.types")
@final
class Registration(Generic[_R_co]):
    """Memory that `register` page-locked.

    The target of a ``with`` statement is the buffer. The memory is also unlocked when the
    last reference to the buffer and its views is dropped.

    Examples
    --------
    >>> array = numpy.ones(1 << 20)
    >>> with cumem.register(array) as pinned:
    ...     pinned.kind, pinned.ptr == array.ctypes.data
    ('pinned', True)
    """

    __slots__ = ("__weakref__", "_buffer", "_nbytes")
    _buffer: _R_co | None
    _nbytes: int

    def __new__(cls) -> Self:
        """Raise a TypeError: only `register` makes registrations."""
        raise TypeError("cannot create 'cumem.types.Registration' instances")

    def __dir__(self) -> list[str]:
        """Return the names of members that can be read now."""
        closed = () if self._buffer is not None else ("buffer",)
        return sorted({*object.__dir__(self)}.difference(closed))

    @property
    def buffer(self) -> _R_co:
        """The buffer over the memory, a MappedBuffer if ``mapped=True`` was given.

        Otherwise it is a PinnedBuffer. Reading it after close() raises a ValueError.
        """
        if self._buffer is None:
            raise ValueError("the registration is closed")
        return self._buffer

    @property
    def nbytes(self) -> int:
        """The bytes from the first to the last element, including gaps between elements."""
        return self._nbytes

    def close(self) -> None:
        """Unlock the memory now; closing twice is not an error.

        Raises
        ------
        BufferError
            If the buffer or a view of it is exported, or another thread works on it; the
            memory stays locked then.
        CudaError
            If work that uses the memory failed, or the memory could not be unlocked.

        Notes
        -----
        **Blocks** until the transfers and streams that use the memory are done with it,
        with the GIL released. If it was exported, this also waits until the device is idle.
        Ctrl-C ends the wait for transfers and streams, and the memory stays locked. This
        does not wait for copies that were given the array itself, or an array that shares a
        page with it. Such pages are unlocked when the last of those copies is done.
        """
        self._end(False)

    def __enter__(self) -> _R_co:
        """Return the buffer."""
        return self.buffer

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close the registration; if the buffer is exported, do so when the exports end."""
        self._end(True)

    def _end(self, defers: bool) -> None:
        buffer = self._buffer
        if buffer is not None:
            try:
                _core._unregister(buffer, defers)
            finally:
                if buffer.closed:
                    self._buffer = None

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        """Raise a TypeError.

        In another process the memory is neither at this address nor locked, and a copy of
        its bytes would not be the registered memory.
        """
        raise TypeError(
            "a Registration cannot be pickled or copied: its pages are locked in this "
            "process alone; send the array or registration.buffer, whose bytes are "
            "copied, and call cumem.register() there, or use cumem.PinnedCollate for "
            "what workers make"
        )

    def __repr__(self) -> str:
        if self._buffer is None:
            return "<cumem.types.Registration, closed>"
        inner = " ".join(repr(self._buffer).split())
        return fold(
            f"<cumem.types.Registration of {format_nbytes(self._nbytes)}: {inner}>"
        )


@overload
def register(
    obj: object,
    *,
    mapped: Literal[False] = ...,
    read_only: bool | None = ...,
    device: object = ...,
) -> Registration[_core.PinnedBuffer]: ...
@overload
def register(
    obj: object,
    *,
    mapped: Literal[True],
    read_only: bool | None = ...,
    device: object = ...,
) -> Registration[_core.MappedBuffer]: ...
@overload
def register(
    obj: object,
    *,
    mapped: bool,
    read_only: bool | None = ...,
    device: object = ...,
) -> Registration: ...
@hinting
def register(
    obj: object,
    *,
    mapped: bool = False,
    read_only: bool | None = None,
    device: object = None,
) -> Registration[Any]:
    """Page-lock memory that exists already, where it is.

    Copies from it and to it are then as fast as with `empty_pinned`. Locking takes time for
    every page, so it pays off for memory that is used more than once.

    Parameters
    ----------
    obj : object
        Anything with the buffer protocol (NumPy arrays, ``bytearray``, ``mmap``, shared
        memory), or a CPU tensor that exports DLPack. It may be unaligned, sliced or
        empty. If it is strided, all bytes from the first to the last element are locked.
    mapped : bool
        Whether to return a `MappedBuffer`, which kernels can reach as well.
    read_only : bool, optional
        By default the buffer is read-only if `obj` is. True always returns a read-only
        buffer, and False a writable one or an error. A mapping that may not be written is
        locked for reading only, if the device can do that. Other pages of a read-only
        object are locked as usual.
    device : Device, int or str, optional
        The device in whose context the memory is locked. All devices can use the locked
        memory.

    Returns
    -------
    Registration
        An object whose ``buffer`` has the shape, dtype and strides of `obj` and shares its
        memory. The target of a ``with`` statement is that buffer, and the end of the block
        unlocks the memory.

    Raises
    ------
    TypeError
        If `obj` has no host memory, or its items are Python objects.
    ValueError
        If the device does not exist, the shape of `obj` makes no sense, or
        ``read_only`` is False and `obj` is read-only.
    OutOfMemoryError
        If a limit of pinned memory has no room for `obj`, or the driver refuses to lock
        that much. Nothing stays locked then.
    CudaError
        If the memory cannot be locked for another reason. With ``mapped``, also if it was
        locked before in parts that do not follow each other in the addresses of devices; a
        note says where.

    Notes
    -----
    Memory that cumem or another library has locked already causes no error, and is not
    locked again. The buffer and its views keep `obj` alive. **Blocks** while pages are
    locked, with the GIL released.

    Locked memory counts as pinned memory in `stats` (as ``"registered"``), in
    `memory_info` and against the limits of `set_limit`, each page once and until it is
    unlocked. Pages that another library had locked before do not count.

    Whole pages are locked, with everything else that is on the first and the last of them.
    CUDA refuses a copy across the edge of locked pages (cudaErrorInvalidValue). cumem's own
    copies are cut there, but those of other libraries are not. So another library's copy of
    a small array that lies across that edge may fail. Memory that begins and ends at page
    boundaries, as an ``mmap`` does, has no neighbours.

    Examples
    --------
    >>> array = numpy.ones(1 << 20)
    >>> target = cumem.empty_device(1 << 20)
    >>> with cumem.register(array) as pinned:
    ...     cumem.copy(target, pinned)
    """
    index = _core._device(device, "device", obj).index
    memory = _find_memory(obj)
    fixed = (
        memory.readonly
        if isinstance(memory, _core.Buffer)
        else not memory.flags.writeable
    )
    wanted = fixed if read_only is None else read_flag(read_only, "read_only")
    if fixed and not wanted:
        raise ValueError(
            "read_only=False, but obj is read-only: leave read_only out for a read-only "
            "buffer, or pass a writable object"
        )
    made: Registration = object.__new__(Registration)
    is_mapped = read_flag(mapped, "mapped")
    locks_read_only = wanted and _can_lock_read_only(index)
    locked = lock_pages(
        lambda: _core._register(memory, index, is_mapped, wanted, locks_read_only),
        "mapped" if is_mapped else "pinned",
        index,
    )
    made._buffer, made._nbytes = locked.buffer, locked.nbytes
    return made


def _can_lock_read_only(index: int) -> bool:
    """Return whether the device can lock pages that may not be written.

    If it cannot, only writable pages can be locked. The pages of a read-only object are
    often writable.
    """
    return bool(_core._device_attribute(index, "host_register_read_only"))


def _find_memory(obj: Any) -> _core.Buffer | np.ndarray[Any, Any]:
    """Return the memory of `obj` as an array, or as a buffer that can be page-locked.

    Arrays are returned as they are, since not every dtype has a format in the buffer
    protocol.
    """
    if isinstance(obj, np.ndarray):
        return obj
    found = obj if isinstance(obj, _core.Buffer) else _import_host(obj)
    kind = found.residency if is_on_device(found.residency) else found.kind
    if kind in KINDS and not KINDS[kind].page_locked:
        raise TypeError(
            "obj must be host memory that stays where it is, not "
            f"{found.kind} memory: that cannot be page-locked, and copies of it need no "
            "registration"
        )
    return found


def _import_host(obj: Any) -> _core.Buffer:
    view: Any
    try:
        view = memoryview(obj)
    except TypeError:
        view = getattr(obj, "buf", None)  # a SharedMemory of multiprocessing has this
    if isinstance(view, memoryview):
        return _core.asbuffer(view)
    if hasattr(obj, "__dlpack__") or type(obj).__name__ == "PyCapsule":
        return _core.asbuffer(obj)
    raise TypeError(
        "obj must be an object with host memory (buffer protocol or a DLPack CPU "
        f"tensor), not {type(obj).__name__}"
    )


def refuse_mapping(error: Exception, has_parts: bool, offset: int) -> NoReturn:
    """Raise the error, with a note that says why devices got no address for the memory."""
    why = (
        f"parts of the memory were page-locked before, and from byte {offset} on devices "
        "reach it by an address that does not follow on: end the earlier registration "
        "first, or register without mapped"
        if has_parts
        else "devices have no address for the memory; whoever page-locked it before may "
        "not have mapped it"
    )
    error.add_note(f"while registering with mapped=True: {why}")
    raise error
