# SPDX-License-Identifier: Apache-2.0
"""What `register` is given, what it answers, and why memory could not be mapped."""

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

    #: `Registration` alone may be of either.
    _R_co = typing_extensions.TypeVar(
        "_R_co", bound=_Registered, default=_Registered, covariant=True
    )
else:
    _R_co = TypeVar("_R_co", covariant=True)


@found_in("cumem.types")
@final
class Registration(Generic[_R_co]):
    """Memory that `register` page-locked.

    In a ``with`` block the target is the buffer. When the last reference to the buffer
    and its views dies, the memory is unlocked as well.

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
        """Made by `register`, never by calling the type."""
        raise TypeError("cannot create 'cumem.types.Registration' instances")

    def __dir__(self) -> list[str]:
        """Names of members that can be read now."""
        closed = () if self._buffer is not None else ("buffer",)
        return sorted({*object.__dir__(self)}.difference(closed))

    @property
    def buffer(self) -> _R_co:
        """PinnedBuffer, or MappedBuffer if made with ``mapped=True``, over the memory.
        Raises ValueError after close().
        """
        if self._buffer is None:
            raise ValueError("the registration is closed")
        return self._buffer

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element, gaps between elements included."""
        return self._nbytes

    def close(self) -> None:
        """Unlock the memory now; doing it twice is not an error.

        Raises
        ------
        BufferError
            While the buffer or a view of it is exported, or another thread works on it;
            nothing is done then.
        CudaError
            If work that uses the memory or the unlocking failed.

        Notes
        -----
        **Blocks** until the transfers and streams that use the memory are done
        with it, and where it was exported, the device as well (GIL released; Ctrl-C
        ends the wait for transfers and streams, and the memory stays locked). Copies
        that were given the array itself, or a neighbour on its pages, are not waited
        for: such pages are unlocked when the last of those copies is done.
        """
        self._end(False)

    def __enter__(self) -> _R_co:
        """The buffer."""
        return self.buffer

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """`close`, but while the buffer is exported the memory is unlocked with the last
        export.
        """
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
        """Raises TypeError: another process has the memory neither at this address nor
        locked, and a copy of its bytes would be another thing than the registration.
        """
        raise TypeError(
            "a Registration cannot be pickled or copied: its pages are locked in this "
            "process alone; send the array or registration.buffer, whose bytes are "
            "copied, and call cumem.register() there, or use cumem.PinnedCollate for "
            "what workers make"
        )

    def __repr__(self) -> str:
        if self._buffer is None:
            return "<cumem.Registration, closed>"
        inner = " ".join(repr(self._buffer).split())
        return fold(f"<cumem.Registration of {format_nbytes(self._nbytes)}: {inner}>")


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
    """Page-lock memory that exists already, in place.

    Copies from and to it then run as fast as with `empty_pinned`. Locking costs time
    for every page, so it pays for memory that is used more than once.

    Parameters
    ----------
    obj : object
        Anything with the buffer protocol (NumPy arrays, ``bytearray``, ``mmap``, shared
        memory), or a CPU tensor that exports DLPack. It may be unaligned, sliced or
        empty. Of a strided one, all bytes from the first to the last element are
        locked.
    mapped : bool
        Give a `MappedBuffer`, which kernels can reach as well.
    read_only : bool, optional
        By default the buffer is read-only if `obj` is. True: a read-only buffer of
        anything. False: a writable one or an error. A mapping that may not be written
        is locked for reading only, where the device can; other pages of what is
        read-only are locked as usual.
    device : Device, int or str, optional
        In whose context; the memory is locked for all devices.

    Returns
    -------
    Registration
        With ``buffer`` of the shape, dtype and strides of `obj`, without a copy. In a
        ``with`` block the target is that buffer, and the end unlocks it.

    Raises
    ------
    TypeError
        If `obj` has no host memory, or its items are Python objects.
    ValueError
        If the device does not exist, the shape of `obj` makes no sense, or
        ``read_only`` is False and `obj` is read-only.
    OutOfMemoryError
        If a limit of pinned memory has no room for it, or the driver refuses to lock so
        much. Nothing of it stays locked.
    CudaError
        If it cannot be locked for another reason, or with ``mapped`` if it was locked
        before in parts that have no common address for devices (the note says where).

    Notes
    -----
    Memory that is locked already, by this or another library, is shared and not
    an error. `obj` stays alive as long as the buffer or a view of it. **Blocks** while
    pages are locked, GIL released.

    What is locked counts as pinned memory, in `stats` (as ``"registered"``),
    `memory_info` and against the limits of `set_limit`, each page once and until it is
    unlocked. Pages that another library had locked are not counted.

    Whole pages are locked, with whatever else lies on the first and the last of them.
    CUDA refuses one copy across the edge of locked pages (cudaErrorInvalidValue).
    cumem's own copies go in pieces there; other libraries' do not, and a neighbour on
    such a page, like a small array of the same heap, may meet that edge. Memory that
    begins and ends at pages, as an ``mmap`` does, has no neighbours.

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
    """Else only pages that may be written can be locked, which those of a read-only
    object often are."""
    return bool(_core._device_attribute(index, "host_register_read_only"))


def _find_memory(obj: Any) -> _core.Buffer | np.ndarray[Any, Any]:
    """The memory of `obj` as an array, or as a buffer that can be page-locked.

    Arrays stay what they are: not every dtype has a format in the buffer protocol.
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
        view = getattr(obj, "buf", None)  # multiprocessing's SharedMemory
    if isinstance(view, memoryview):
        return _core.asbuffer(view)
    if hasattr(obj, "__dlpack__") or type(obj).__name__ == "PyCapsule":
        return _core.asbuffer(obj)
    raise TypeError(
        "obj must be an object with host memory (buffer protocol or a DLPack CPU "
        f"tensor), not {type(obj).__name__}"
    )


def refuse_mapping(error: Exception, has_parts: bool, offset: int) -> NoReturn:
    """Raise it with a note: devices got no address for the memory."""
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
