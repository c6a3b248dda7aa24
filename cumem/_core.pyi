# SPDX-License-Identifier: Apache-2.0
# The types and the docstrings of the extension. The C sources contain no docstrings,
# because the build makes a header from these (csrc/headers.py).
import contextlib
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from types import GenericAlias, TracebackType
from typing import (
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    Never,
    Self,
    SupportsFloat,
    SupportsIndex,
    final,
    overload,
    type_check_only,
)

import numpy as np
from _typeshed import structseq
from numpy.typing import DTypeLike, NDArray
from typing_extensions import CapsuleType, TypeVar

from cumem.buffers.flags import Flags
from cumem.devices.device import Device
from cumem.pools.pool import Pool
from cumem.transfers.managed import Residency

_T = TypeVar("_T")
_B = TypeVar("_B", bound=Buffer)
#: The type of a pool's buffers, which is the same for all of them. A plain `Pool` may have
#: buffers of any type.
_B_co = TypeVar("_B_co", bound=Buffer, default=Buffer, covariant=True)
_Kind = Literal["pinned", "mapped", "managed", "device"]
_Order = Literal["C", "F"]
_LikeOrder = Literal["C", "F", "A", "K"]
_Shape = SupportsIndex | Sequence[SupportsIndex]
_Index = Any
_Casting = Literal["no", "equiv", "safe", "same_kind", "unsafe"]
_Progress = bool | Callable[[int, int], object] | None

class Buffer:
    """Memory with a shape and a dtype, on the host or on a device.

    This is the base of the types whose names say what kind of memory they have. Buffers are
    made by `empty`, `zeros`, `full`, `array` and so on, never by calling a type. Indexing
    with integers, slices, Ellipsis and None returns views that keep the memory alive, and
    ``buf[index] = value`` copies. Iteration yields the views ``buf[0]``, ``buf[1]``, …;
    ``in`` is refused. ``==`` compares identity, so that buffers can be keys of dicts;
    compare values with ``numpy()``. ``print`` shows the values, and copies them first if
    they are on a device. ``repr`` shows no values and never waits. Dropping a buffer never
    waits. Its memory is reused when all work on it that cumem knows of is done.

    Examples
    --------
    >>> buf = cumem.array([[1.0, 2.0], [3.0, 4.0]], kind="pinned")
    >>> isinstance(buf, cumem.Buffer), buf.shape, buf.nbytes
    (True, (2, 2), 32)
    >>> buf[:, 0].numpy()
    array([1., 3.])
    """

    @property
    def ptr(self) -> int:
        """The address of element 0 as an int. For device memory it is the device's address,
        and otherwise the host's. It is 0 if the buffer has no bytes. Raises ValueError if
        the buffer is closed.
        """
    @property
    def _address(self) -> int:
        """The same as `ptr`, for displays and comparisons of the package itself.

        The address does not count as read, since nobody works at it, and memory that was
        spilled is not woken. Raises the errors of `ptr`.
        """
    @property
    def nbytes(self) -> int:
        """The bytes of all elements, without gaps between them."""
    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the axes in elements."""
    @property
    def strides(self) -> tuple[int, ...]:
        """The steps along the axes in bytes, which may be negative."""
    @property
    def dtype(self) -> np.dtype[Any]:
        """The ``numpy.dtype`` of the elements."""
    @property
    def ndim(self) -> int:
        """The number of axes."""
    @property
    def size(self) -> int:
        """The number of elements."""
    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
    @property
    def kind(self) -> _Kind | Literal["pageable"]:
        """The kind of memory, which says how it can be used: ``'pinned'``, ``'mapped'``,
        ``'managed'``, ``'device'`` or ``'pageable'``.
        """
    @property
    def residency(self) -> _Kind | Literal["pageable"]:
        """The kind of memory for which copies take the bytes. It differs from `kind` after
        ``as_device()``. `ManagedBuffer.page_residency` tells where the pages of managed
        memory are.
        """
    @property
    def device(self) -> Device | None:
        """The `Device` whose context made the memory; None for ordinary memory."""
    @property
    def readonly(self) -> bool:
        """Whether writing is refused."""
    @property
    def base(self) -> Buffer | None:
        """The buffer that this one is a view of, or None."""
    @property
    def flags(self) -> Flags:
        """How the memory was made, and NumPy's flags.

        The value is a tuple of those names of ``'portable'``, ``'mapped'``,
        ``'write_combined'``, ``'global'``, ``'host'``, ``'registered'`` and ``'read_only'``
        that apply. NumPy's flags are its attributes and keys, such as
        ``flags.c_contiguous`` and ``flags["F_CONTIGUOUS"]``, with their present values.
        """
    @property
    def closed(self) -> bool:
        """Whether `free`, the end of a with block or ``shutdown()`` closed the buffer."""
    @property
    def T(self) -> Self:
        """A view with the axes reversed; see `transpose`."""
    def numpy(self) -> NDArray[Any]:
        """View the buffer as a NumPy array, without a copy.

        Returns
        -------
        numpy.ndarray
            An array of the same shape, strides and dtype, which is read-only if the
            buffer is. The array keeps the memory alive, and `free` is refused while it
            lives.

        Raises
        ------
        TypeError
            The memory is on the device: copy it with `to_numpy`, or use a managed
            buffer, which both sides can read.
        ValueError
            The buffer is closed.
        CudaError
            A transfer into the buffer failed.
        RuntimeError
            The process is a child made by ``fork``, and the memory is managed, or a
            transfer was writing to it, or there was not enough memory for a copy of it.

        Notes
        -----
        **Blocks** until unfinished transfers into the memory are done, with the GIL
        released; Ctrl-C interrupts it. **Ordered after** those transfers. It does not wait
        for kernels of other libraries that work on managed or mapped memory, so synchronise
        their stream first.

        Examples
        --------
        >>> buf = cumem.zeros(2, "i4", "pinned")
        >>> buf.numpy()[0] = 7  # no copy: this writes to the buffer
        >>> buf.to_numpy()
        array([7, 0], dtype=int32)
        """
    def _read_by(self, function: Callable[[NDArray[Any]], _T], /) -> _T:
        """Return what `function` returns for the array of `numpy`.

        The package uses this to read memory. Afterwards the memory does not count as
        exported, unless the function kept the array.
        """
    def to_numpy(
        self, *, stream: object = None, progress: _Progress = None
    ) -> NDArray[Any]:
        """Copy into a new NumPy array, from memory of any kind.

        Parameters
        ----------
        stream : stream, optional
            The stream that copies device memory, which must be one of its device;
            by default the current stream.
        progress : bool or callable, optional
            As for `copy`.

        Returns
        -------
        numpy.ndarray
            A new array of the same shape and dtype. It is C-contiguous, writable, and
            in ordinary memory.

        Raises
        ------
        ValueError
            The buffer is closed, or `stream` belongs to another device.
        MemoryError
            There is not enough memory for the array.
        ImportError
            `progress` is True and tqdm is not installed.
        CudaError
            The copy failed, or `stream` is being captured.

        Notes
        -----
        **Blocks** until the bytes are there, with the GIL released; Ctrl-C ends it as it
        ends `copy`. **Ordered after** work that cumem knows of on the memory, and after
        work on `stream` or the current stream of its device.

        Examples
        --------
        >>> cumem.full(2, 1.5).to_numpy()
        array([1.5, 1.5])
        """
    def as_device(self) -> DeviceBuffer:
        """View mapped or managed memory as a plain device buffer.

        Use it for libraries that refuse the other kinds: torch and JAX refuse managed
        memory, and CuPy refuses page-locked memory.

        Returns
        -------
        DeviceBuffer
            A buffer of the same bytes at their device address, which keeps the memory
            alive. For a device buffer it is the buffer itself.

        Raises
        ------
        TypeError
            The memory is pinned or ordinary, so it may have no device address.
        ValueError
            The buffer is closed.
        """
    def reshape(
        self, *shape: _Shape, order: Literal["C", "F", "A"] | None = "C"
    ) -> Self:
        """View the same bytes with another shape.

        Parameters
        ----------
        *shape : int or sequence of int
            The new lengths in elements. One of them may be -1, and is then computed.
        order : {'C', 'F', 'A'}
            Which index runs fastest when elements are read and laid out: the last for
            ``'C'``, the first for ``'F'``. ``'A'`` means ``'F'`` if the buffer is
            Fortran-contiguous and not C-contiguous, else ``'C'``.

        Returns
        -------
        Buffer
            A view of the same type, which keeps the memory alive. It is never a copy.

        Raises
        ------
        ValueError
            The number of elements differs, more than one length is -1, the strides do
            not allow the shape without a copy, or the buffer is closed.
        TypeError
            A length is not an integer, or is a bool.

        Examples
        --------
        >>> buf = cumem.empty_pinned((4, 6))
        >>> buf.reshape(2, -1).shape
        (2, 12)
        >>> buf[:, :5].copy().reshape(-1).shape
        (20,)
        """
    def ravel(self, order: _LikeOrder = "C") -> Self:
        """Return all elements in one row: a view if the strides allow it, else a copy.

        Parameters
        ----------
        order : {'C', 'F', 'A', 'K'}
            The order in which elements are read, as in NumPy.

        Returns
        -------
        Buffer
            A view that keeps the memory alive, or a new buffer of the same kind, flags
            and device (in ordinary memory for a `HostBuffer`). A view has a ``.base``.

        Raises
        ------
        ValueError
            The buffer is closed, or `order` is not one of these.
        TypeError
            `order` is not a string.
        OutOfMemoryError
            There is not enough memory for a copy.
        CudaError
            The copy failed.

        Notes
        -----
        If it copies, it **blocks** until the bytes are there, with the GIL released, and is
        **ordered after** work that cumem knows of on this buffer, and after the current
        stream.

        Examples
        --------
        >>> rows = cumem.zeros((2, 3))
        >>> rows.ravel().shape, rows.ravel().base is rows
        ((6,), True)
        """
    def flatten(self, order: _LikeOrder = "C") -> Self:
        """Copy all elements into a new buffer in one row; see `ravel`.

        Parameters
        ----------
        order : {'C', 'F', 'A', 'K'}
            The order in which elements are read, as in NumPy.

        Returns
        -------
        Buffer
            A new buffer of the same kind, flags and device, never a view.

        Raises
        ------
        ValueError
            The buffer is closed, or `order` is not one of these.
        TypeError
            `order` is not a string.
        OutOfMemoryError
            There is not enough memory for the copy.
        CudaError
            The copy failed.

        Notes
        -----
        **Blocks** until the bytes are there, with the GIL released. **Ordered after** work
        that cumem knows of on this buffer, and after the current stream.

        Examples
        --------
        >>> rows = cumem.zeros((2, 3))
        >>> rows.flatten().shape, rows.flatten().base is None
        ((6,), True)
        """
    def squeeze(
        self, axis: SupportsIndex | Sequence[SupportsIndex] | None = None
    ) -> Self:
        """Return a view without axes of length 1.

        Parameters
        ----------
        axis : int or sequence of int, optional
            The axes to remove, by default all of length 1. Negative numbers count from
            the end.

        Returns
        -------
        Buffer
            A view of the same type, which keeps the memory alive.

        Raises
        ------
        ValueError
            An axis is longer than 1 or is named twice, or the buffer is closed. For an axis
            that does not exist NumPy's AxisError is raised, which is an IndexError too.
        TypeError
            An axis is not an integer.

        Examples
        --------
        >>> cumem.empty((1, 3, 1)).squeeze().shape
        (3,)
        """
    def item(self, *index: SupportsIndex | Sequence[SupportsIndex]) -> Any:
        """Copy one element out as a Python object, from memory of any kind.

        Parameters
        ----------
        *index : int or tuple of int, optional
            An index for each axis, or the number of the element in C order, as in
            NumPy. It may be left out if there is only one element.

        Returns
        -------
        bool, int, float, complex, bytes, str, tuple or other
            The object that NumPy's ``item`` returns for the dtype.

        Raises
        ------
        ValueError
            The index is missing although there is not exactly one element, it has too
            few numbers, or the buffer is closed.
        IndexError
            The index is out of bounds or has too many numbers.
        TypeError
            The index is not an integer.
        CudaError
            The copy failed.

        Notes
        -----
        **Blocks** until the element is there, with the GIL released. From device memory,
        only that element is copied. For device memory it is **ordered after** work that
        cumem knows of on it and after the current stream, and for other memory after
        unfinished transfers into it.

        Examples
        --------
        >>> cumem.array([1, 2]).item(1)
        2
        """
    def tolist(self) -> Any:
        """Copy into nested lists of Python objects, from memory of any kind.

        Returns
        -------
        list or object
            The lists, as NumPy's ``tolist`` returns them. For a buffer without dimensions
            it is the element itself.

        Raises
        ------
        ValueError
            The buffer is closed.
        CudaError
            The copy failed.

        Notes
        -----
        **Blocks** until the bytes are there, with the GIL released. **Ordered after** the
        same work as `item`.

        Examples
        --------
        >>> cumem.array([[1, 2], [3, 4]]).tolist()
        [[1, 2], [3, 4]]
        """
    def transpose(self, *axes: SupportsIndex | Sequence[SupportsIndex] | None) -> Self:
        """Return a view with the axes permuted, or reversed if there are no arguments.

        Parameters
        ----------
        *axes : int or sequence of int
            A permutation of the axes; negative numbers count from the end.

        Returns
        -------
        Buffer
            A view of the same type, which keeps the memory alive.

        Raises
        ------
        ValueError
            `axes` is not a permutation, or the buffer is closed. For an axis that does
            not exist NumPy's AxisError is raised, which is an IndexError too.
        TypeError
            An axis is not an integer.

        Examples
        --------
        >>> cumem.empty((2, 3, 4)).transpose(2, 0, 1).shape
        (4, 2, 3)
        """
    def view(self, dtype: DTypeLike = ...) -> Self:
        """Return a view of the same bytes as another dtype, by NumPy's rules.

        Parameters
        ----------
        dtype : dtype_like, optional
            Any dtype without Python objects; by default the buffer's own. If its itemsize
            differs, the last axis gets longer or shorter, and must be contiguous.

        Returns
        -------
        Buffer
            A view of the same type, which keeps the memory alive.

        Raises
        ------
        ValueError
            The buffer is closed. Or the itemsize differs, and the buffer has no
            dimensions, its last axis is not contiguous, a smaller itemsize does not
            divide the old one, or a larger one does not divide the bytes of that axis.
        TypeError
            `dtype` is not a dtype or holds Python objects.

        Examples
        --------
        >>> cumem.array([1.0], "f4", "pinned").view("u4").numpy()
        array([1065353216], dtype=uint32)
        """
    def fill(
        self, value: object, *, stream: object = None, casting: _Casting | None = None
    ) -> None:
        """Set every element.

        Parameters
        ----------
        value : array_like, Buffer, or exporter of DLPack or the CUDA array interface
            A scalar or list, or an array that broadcasts to the shape. Scalars and lists
            must keep their kind and their value in the buffer's dtype, except that floats
            are rounded. Where NumPy would cut a value (1.5 for ``int32``) an error is
            raised. An array must have the buffer's dtype.
        stream : Stream or other stream object, optional
            The stream to fill on; by default the current stream.
        casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
            Which other dtypes `value` may have, as in `copy`. Values may then be cut as
            this rule allows. Values that are on a device pass through the host on their way
            to device memory.

        Raises
        ------
        ValueError
            The buffer is read-only or closed, `value` does not broadcast, text or a
            time in it does not fit, or the buffer is device memory and `stream` belongs
            to another device.
        TypeError
            `value` is of another kind than the dtype (reals for integers, numbers for
            text), or an array of another dtype that `casting` does not allow.
        OverflowError
            A number does not fit into the dtype, or would become infinite.
        CudaError
            The fill failed.

        Notes
        -----
        **Blocks**, with the GIL released, until `value` is copied if it is an array or
        device memory. Otherwise it first waits for unfinished background transfers of the
        memory, and then, if the host can read the memory, until it is filled. Device memory
        of a pool is filled later, by the device in the order of the stream, and so is
        mapped and managed memory if `stream` is given. `numpy` and other reads through the
        buffer wait for that. Without `stream`, managed memory is filled by the device that
        it was prefetched to, or else by the host. Pinned memory is always filled by the
        host, which waits for the buffer's streams, for `stream`, and for everything that
        those streams were made to wait for. Ctrl-C ends that wait. **Ordered after** work
        that cumem knows of on this buffer, and after work on `stream`.

        Examples
        --------
        >>> buf = cumem.empty(3, "i2")
        >>> buf.fill(4)
        >>> buf.to_numpy()
        array([4, 4, 4], dtype=int16)
        """
    def astype(
        self,
        dtype: DTypeLike,
        order: _LikeOrder = "K",
        casting: _Casting = "unsafe",
        copy: bool = True,
    ) -> Self:
        """Convert into a new buffer of the same kind, flags and device.

        Parameters
        ----------
        dtype : dtype_like
            Any dtype that NumPy can convert to.
        order : {'C', 'F', 'A', 'K'}
            The order of the new elements, as for `copy`.
        casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}
            Which conversions are allowed, as in `numpy.can_cast`.
        copy : bool
            If False, return this buffer itself if it has that dtype already and `order` is
            'K'.

        Returns
        -------
        Buffer
            A buffer of the same kind.

        Raises
        ------
        TypeError
            `casting` does not allow the conversion, or `dtype` is not a dtype.
        ValueError
            The buffer is closed, or `casting` or `order` is not one of these.
        OutOfMemoryError
            There is not enough memory.
        CudaError
            A copy failed.

        Notes
        -----
        **Blocks** until the values are there, with the GIL released. **Ordered after** work
        that cumem knows of on this buffer, and after the current stream. The values are
        those of `cumem.copy` with `casting`. Device memory is converted on the host, so it
        crosses the link twice.

        Examples
        --------
        >>> cumem.array([1.5, 2.5], kind="pinned").astype("f2").dtype
        dtype('float16')
        """
    def copy(self, order: _LikeOrder | None = "C") -> Self:
        """Copy into a new buffer of the same kind, flags and device.

        Parameters
        ----------
        order : {'C', 'F', 'A', 'K'}
            The order of the copy's elements, as in NumPy: 'A' means 'F' if this buffer is
            Fortran-contiguous and not C-contiguous, else 'C'; 'K' keeps the order of its
            strides.

        Returns
        -------
        Buffer
            A new buffer of the same type, kind, flags and device, which shares nothing
            with this one. It is writable even if this one is not. A copy of ordinary
            memory is in memory that NumPy allocates, which is page-locked inside
            `numpy_pinned`.

        Raises
        ------
        TypeError
            `order` is not a string.
        ValueError
            The buffer is closed.
        OutOfMemoryError
            There is not enough memory for the copy.
        CudaError
            The copy failed.

        Notes
        -----
        **Blocks** until the bytes are there, with the GIL released. **Ordered after** work
        that cumem knows of on this buffer, and after the current stream.

        Examples
        --------
        >>> buf = cumem.zeros(2, "i4", "pinned")
        >>> kept = buf.copy()
        >>> buf.fill(7)
        >>> kept.kind, kept.numpy()
        ('pinned', array([0, 0], dtype=int32))
        """
    def __copy__(self) -> Self:
        """Make the copy of ``copy.copy``, which is ``buf.copy(order='K')`` as in NumPy.

        Returns
        -------
        Buffer
            A new buffer of the same type, kind, flags and device, which shares nothing
            with this one. It is writable even if this one is not.

        Raises
        ------
        ValueError
            The buffer is closed.
        OutOfMemoryError
            There is not enough memory for the copy.
        CudaError
            The copy failed.

        Notes
        -----
        **Blocks** until the bytes are there, with the GIL released. **Ordered after** work
        that cumem knows of on this buffer, and after the current stream.
        """
    def __deepcopy__(self, memo: object, /) -> Self:
        """Make the copy of ``copy.deepcopy``, which is ``buf.copy(order='K')``.

        Returns
        -------
        Buffer
            A new buffer of the same type, kind, flags and device, which shares nothing
            with this one. It is writable even if this one is not.

        Raises
        ------
        ValueError
            The buffer is closed.
        OutOfMemoryError
            There is not enough memory for the copy.
        CudaError
            The copy failed.

        Notes
        -----
        **Blocks** until the bytes are there, with the GIL released. **Ordered after** work
        that cumem knows of on this buffer, and after the current stream.
        """
    def record_stream(self, stream: object, /) -> None:
        """Say that a stream works on the memory, which cumem cannot see by itself.

        After the buffer is dropped, its memory is reused only when the work that was queued
        on the stream at that time is done. If the stream is being captured now, the memory
        belongs to the graph from now on, and is not reused before `shutdown`.

        Parameters
        ----------
        stream : Stream, int, ``__cuda_stream__`` object or torch, CuPy or Numba stream
            None means the current stream.

        Raises
        ------
        TypeError
            `stream` is not a stream.
        ValueError
            The buffer or the stream is closed.
        CudaError
            The driver does not know the stream.

        Examples
        --------
        >>> buf, stream = cumem.empty_device(8), cumem.Stream()
        >>> buf.record_stream(stream)  # another library works on it there
        >>> del buf  # the memory is used again after that work
        """
    def keep(self, keep: bool = True) -> None:
        """Keep the memory on the device, or allow it to be spilled again.

        In a `Pool` with ``spill="pinned"``, buffers that have been idle go to pinned
        memory when the device's memory is short. A kept buffer stays on the device. If the
        buffer has been spilled, this call wakes it first. In other pools this has no
        effect. It applies to all buffers that share the memory.

        Parameters
        ----------
        keep : bool
            False undoes an earlier call.

        Raises
        ------
        TypeError
            `keep` is not a bool.
        ValueError
            The buffer is closed.
        OutOfMemoryError
            The buffer was spilled, and there is no memory to wake it.

        Notes
        -----
        **Blocks** while the buffer wakes, with the GIL released.

        Examples
        --------
        >>> pool = cumem.Pool("device", spill="pinned", limit="64MiB")
        >>> weights = pool.allocate(48 << 20)
        >>> weights.keep()
        >>> pool.allocate(48 << 20)  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        cumem.OutOfMemoryError: ...
        >>> weights.keep(False)
        >>> cache = pool.allocate(48 << 20)  # the weights are in pinned memory now
        """
    def free(self) -> None:
        """Give the memory back now instead of when the last reference is dropped.

        All buffers that share the memory are closed. The pool reuses it when the work that
        is queued on it is done. If a transfer of the buffer is unfinished, the memory goes
        back when the transfer is done. If the buffer was ever exported through the buffer
        protocol, the memory goes back when the last reference to the buffer is dropped,
        because ``torch.frombuffer`` keeps only the object alive. Freeing twice does
        nothing.

        Raises
        ------
        BufferError
            An array, memoryview or tensor over the memory is alive, or another thread
            is working on it.
        CudaError
            The memory was registered, and unlocking it failed.

        Examples
        --------
        >>> buf = cumem.empty_pinned(8)
        >>> buf.free()
        >>> buf.closed
        True
        """
    def __getitem__(self, index: _Index, /) -> Self: ...
    def __setitem__(self, index: _Index, value: object, /) -> None: ...
    def __len__(self) -> int: ...
    def __format__(self, spec: str, /) -> str:
        """Return ``str(buf)`` for ``f"{buf}"``; a format is applied to the only element.

        Raises
        ------
        TypeError
            A format is given and the buffer has dimensions.

        Notes
        -----
        **Blocks** until the values are there. **Ordered after** the same work as `item`.
        """
    def __dir__(self) -> list[str]:
        """List the names of the members that can be read now."""
    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows, with everything but the values."""
    def __int__(self) -> int: ...
    def __float__(self) -> float: ...
    def __complex__(self) -> complex:
        """Return the only element, for ``complex(buf)``; it is copied from device memory.

        Raises
        ------
        TypeError
            There is not exactly one element, or it is not a number.
        CudaError
            The copy failed.

        Notes
        -----
        **Blocks** until the element is there, with the GIL released. **Ordered after** the
        same work as `item`.
        """
    def __iter__(self) -> Iterator[Self]: ...
    def __reversed__(self) -> Iterator[Self]:
        """Iterate over the views ``buf[-1]``, ``buf[-2]``, … of the first axis.

        Raises
        ------
        TypeError
            The buffer has no dimensions.
        ValueError
            The buffer is closed.
        """
    def __bytes__(self) -> bytes:
        """Return the values in C order, as ``ndarray.tobytes()`` does, from any memory.

        Raises
        ------
        ValueError
            The buffer is closed.
        CudaError
            The copy failed.

        Examples
        --------
        >>> bytes(cumem.array([1, 2], dtype="u1", kind="pinned"))
        b'\\x01\\x02'
        """
    def __round__(self, ndigits: object = None, /) -> Never:
        """Raise a TypeError that says where to compute.

        Raises
        ------
        TypeError
            Always.
        """
    def __contains__(self, value: object, /) -> Never: ...
    def __bool__(self) -> bool: ...
    def __enter__(self) -> Self:
        """Return the buffer itself.

        Raises
        ------
        ValueError
            The buffer is closed.
        """
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None:
        """Close the buffer and views of it. The memory goes back once nothing uses it.

        Unlike `free` this never fails, and arrays and tensors that were made inside the
        block stay valid. The memory goes back when the last of them is dropped and the last
        transfer of the buffer is done, or at once if there are none. If the buffer was
        exported through the buffer protocol or ``__cuda_array_interface__``, whose users
        may keep only the object alive, the memory goes back when the last reference to the
        buffer is dropped. If this is a view, only the view is closed, and the memory stays
        with its buffer.
        """
    def __reduce_ex__(self, protocol: SupportsIndex, /) -> tuple[Any, ...]:
        """Pickle the kind, dtype, shape, flags, whether it is read-only, and the bytes.

        With protocol 5 the bytes are a ``pickle.PickleBuffer`` over this memory, so that
        a ``buffer_callback`` gets them without a copy. Without a callback, and with older
        protocols, the bytes are in the pickle itself. Unpickling allocates memory of the
        same kind on the current device.

        Raises
        ------
        TypeError
            The memory is on the device.
        ValueError
            The buffer is closed.

        Notes
        -----
        **Blocks** until unfinished transfers into the memory are done. **Ordered after**
        those transfers.
        """
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Make a DLPack capsule, with which another library shares the memory.

        Parameters
        ----------
        stream : int, optional
            The consumer's stream. Work that it gets later is ordered after the pending work
            on the buffer, and the memory is not reused before that later work is done. -1
            orders nothing.
        max_version : tuple of int, optional
            The newest version that the consumer reads. Without it the capsule has the form
            that DLPack had before version 1.0.
        dl_device : tuple of int, optional
            The type and index of the device to export to; ``(1, 0)`` is the CPU.
        copy : bool, optional
            True always copies, False never copies.

        Raises
        ------
        BufferError
            The memory cannot be exported in this way.
        ValueError
            An argument is wrong, or the buffer is closed.

        Notes
        -----
        **Blocks** until pending work is done for an export to the CPU, and never for other
        exports. **Ordered after** work that cumem knows of on this buffer.
        """
    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and index.

        They are ``(3, 0)`` for pinned and mapped memory, ``(13, 0)`` for managed memory,
        ``(2, index)`` for device memory, and ``(1, 0)`` for ordinary memory and for all
        memory of the emulated device.
        """
    def __array__(
        self, dtype: DTypeLike | None = None, *, copy: bool | None = None
    ) -> NDArray[Any]:
        """Return the array of `numpy` or a copy of it, by NumPy's protocol.

        Parameters
        ----------
        dtype : dtype_like, optional
            The dtype of the array. If the buffer has another one, the array is a
            converted copy.
        copy : bool, optional
            True always copies, False never copies.

        Raises
        ------
        ValueError
            A copy is needed and `copy` is False, or the buffer is closed.
        TypeError
            The memory is on a device, where NumPy cannot read it.

        Notes
        -----
        **Blocks** until unfinished transfers into the memory are done. **Ordered after**
        those transfers.
        """

class _HostUsable(
    Buffer
):  # for type checkers only: the base of the four types with the buffer protocol
    __dlpack_c_exchange_api__: ClassVar[object]
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, view: memoryview, /) -> None: ...

@final
class PinnedBuffer(_HostUsable):
    """Page-locked host memory: the fast end of copies to and from devices.

    It has the buffer protocol, so that NumPy, torch and MPI can read and write it without a
    copy.

    Examples
    --------
    >>> buf = cumem.empty_pinned((2, 3), "f4")
    >>> buf.numpy()[:] = 1
    >>> buf.kind, float(buf.numpy().sum())
    ('pinned', 6.0)
    """

    @property
    def kind(self) -> Literal["pinned"]: ...
    @property
    def device(self) -> Device: ...

@final
class MappedBuffer(_HostUsable):
    """Page-locked host memory that devices also read and write over the bus.

    It has the buffer protocol for the host and the CUDA array interface for
    devices.

    Examples
    --------
    >>> flag = cumem.zeros(1, "i4", "mapped")
    >>> flag.numpy()[0] = 1  # a kernel sees it at flag.device_ptr
    >>> flag.kind, flag.device_ptr != 0
    ('mapped', True)
    """

    @property
    def kind(self) -> Literal["mapped"]: ...
    @property
    def device(self) -> Device: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3: a dict with which CuPy, Numba, torch and JAX
        use the memory without a copy. Raises AttributeError on the emulated device, for
        negative strides, and for dtypes of other packages (DLPack has their types).
        """
    @property
    def device_ptr(self) -> int:
        """The device's address of element 0 as an int. It is 0 if there are no bytes.
        Raises ValueError if the buffer is closed.
        """

@final
class ManagedBuffer(_HostUsable):
    """Unified memory: host and devices use one address, and pages move when they are used.

    It has the buffer protocol for the host and the CUDA array interface for
    devices.

    Examples
    --------
    >>> buf = cumem.empty_managed(1 << 20, "u1")
    >>> buf.numpy()[:] = 7
    >>> buf.prefetch_pages(0)
    >>> cumem.current_stream().synchronize()
    >>> buf.prefetch_location == cumem.Device(0)
    True
    """

    @property
    def kind(self) -> Literal["managed"]: ...
    @property
    def device(self) -> Device: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3: a dict with which CuPy, Numba, torch and JAX
        use the memory without a copy. Raises AttributeError on the emulated device, for
        negative strides, and for dtypes of other packages (DLPack has their types).
        """
    def prefetch_pages(self, to: object = None, stream: object = None) -> None:
        """Move the pages to a device or to the host ahead of use.

        Parameters
        ----------
        to : Device, int or str, optional
            A device, ``"cpu"`` (or ``"host"``, which is the same), or a NUMA node of the
            host, such as ``"numa:1"``; by default cumem's current device.
        stream : Stream or other stream object, optional
            The stream that the move is queued on; by default the current stream of that
            device, or of the buffer's device if the pages go to the host.

        Raises
        ------
        ValueError
            There is no such device, or the buffer is closed.
        TypeError
            `to` or `stream` has the wrong type.
        CudaError
            The driver refused, because a device has no concurrent managed access,
            `stream` is being captured, the node does not exist, or the driver is older
            than CUDA 12.2 and does not know nodes.

        Warns
        -----
        ManagedThrashWarning
            Host and device keep taking the same bytes from each other.

        Notes
        -----
        Never **blocks**, since the move is queued. **Ordered after** work on `stream`.
        Whole pages move, from the page of the lowest element to that of the highest, with
        other memory that lies on them. The data may be used meanwhile.
        """
    @property
    def prefetch_location(self) -> Device | str | None:
        """The place to which the memory was last prefetched: a `Device`, ``'host'`` or a
        node such as ``'numa:1'``. It is None if the memory was never prefetched, or if its
        parts went to several places.
        """
    def advise(
        self,
        *,
        read_mostly: bool | None = None,
        preferred_location: object = ...,
        accessed_by: object = None,
    ) -> None:
        """Tell the driver how the memory will be used; advice that is left out stays.

        Parameters
        ----------
        read_mostly : bool, optional
            Whether the host and each device should get their own copies when they read. A
            write drops all copies but one.
        preferred_location : Device, int, str or None, optional
            The place where pages should stay if they can: a device, ``"cpu"`` or a node
            such as ``"numa:1"``. None withdraws this advice.
        accessed_by : sequence of Device, int or str, optional
            The devices, and ``"cpu"``, that should have the memory mapped wherever its
            pages are, so that they use it without page faults. ``()`` means none of them.

        Raises
        ------
        TypeError, ValueError
            An argument is not one of these, or the buffer is closed.
        CudaError
            The driver refused, because a device has no concurrent managed access, or
            because a NUMA node needs a driver of CUDA 12.2.

        Notes
        -----
        Never **blocks**. It is ordered after nothing, since advice takes effect at once. It
        applies to whole pages, from the page of the lowest element to that of the highest,
        and so to other memory on these pages: buffers of less than 1 MiB may share a page.
        When the memory goes back to its pool, the advice is withdrawn.

        Examples
        --------
        >>> table = cumem.empty_managed(1 << 20)
        >>> table.advise(read_mostly=True)
        >>> table.read_mostly
        True
        """
    @property
    def read_mostly(self) -> bool:
        """Whether the host and each device get their own copies when they read. It is True
        only if this was advised for all pages of the buffer; see `advise`.
        """
    @read_mostly.setter
    def read_mostly(self, value: bool) -> None: ...
    @property
    def preferred_location(self) -> Device | str | None:
        """The place where pages should stay: a `Device`, ``'host'`` or a node such as
        ``'numa:1'``. It is None without such advice, or if it differs between pages; see
        `advise`.
        """
    @preferred_location.setter
    def preferred_location(self, value: object) -> None: ...
    @property
    def accessed_by(self) -> tuple[Device | str, ...]:
        """The devices, and ``'host'``, for which all pages are mapped wherever they are;
        see `advise`.
        """
    @accessed_by.setter
    def accessed_by(self, value: object) -> None: ...
    def page_residency(self) -> Residency:
        """Return what is known about the places of the pages.

        Returns
        -------
        Residency

        Raises
        ------
        ValueError
            The buffer is closed.
        CudaError
            The driver cannot answer.

        Notes
        -----
        Never **blocks**, not even for moves that are queued. The driver knows where memory
        was last sent, but not where it is. The host's page tables show which pages the host
        can touch without a fault. This differs from the attribute `residency`, which every
        buffer has and which names a kind of memory.
        """
    def discard(self, stream: object = None) -> None:
        """Give up the contents, so that pages need not be moved or kept any more.

        Parameters
        ----------
        stream : Stream or other stream object, optional
            The stream that this is queued on; by default the current stream of the buffer's
            device.

        Raises
        ------
        ValueError
            The buffer is not contiguous, or is closed.
        TypeError
            `stream` has the wrong type.
        CudaError
            The driver is older than CUDA 13.0, a device has no concurrent managed
            access, or `stream` is being captured.

        Notes
        -----
        **Blocks** only if a background copy of the buffer is unfinished, until its last
        piece is submitted. **Ordered after** work on `stream`, and after all work on the
        buffer that cumem knows of, as a write would be. Work that is queued on `stream`
        later comes after it. The bytes are undefined until they are written. Only pages
        that lie entirely in the buffer are given up, so bytes beside it are never lost.
        """
    def on(
        self, device: object = None, *, stream: object = None
    ) -> contextlib.AbstractContextManager[Self]:
        """Keep the pages on a device inside a ``with`` block.

        Parameters
        ----------
        device : Device, int or str, optional
            The device to move the pages to, as in `prefetch_pages`.
        stream : Stream or other stream object, optional
            The stream for both moves; by default the stream that is current at each of
            them.

        Returns
        -------
        context manager
            A context manager whose value is the buffer. It can be entered once.

        Raises
        ------
        ValueError, TypeError, CudaError
            As for `prefetch_pages`, when the block begins or ends.

        Notes
        -----
        Never **blocks**. The block begins with ``prefetch_pages(device, stream)``. At its
        end the pages are prefetched to the place where they had been prefetched before, or
        to the host if that is not known. This is ordered after the work that was queued on
        the stream in the block.
        """

@final
class DeviceBuffer(Buffer):
    """Memory of a device, which the host cannot touch.

    It has the CUDA array interface and no buffer protocol.

    Examples
    --------
    >>> buf = cumem.array([1.0, 2.0, 3.0])
    >>> buf.kind, buf.to_numpy()
    ('device', array([1., 2., 3.]))
    """

    @property
    def kind(self) -> Literal["device"]: ...
    @property
    def device(self) -> Device: ...
    # NumPy cannot view device memory, so the call always raises. The type of `self` makes
    # type checkers refuse it.
    def numpy(self: _HostUsable) -> NDArray[Any]: ...  # type: ignore[misc]

    __dlpack_c_exchange_api__: ClassVar[object]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface, version 3: a dict with which CuPy, Numba, torch and JAX
        use the memory without a copy. Raises AttributeError on the emulated device, for
        negative strides, and for dtypes of other packages (DLPack has their types).
        """

@final
class HostBuffer(_HostUsable):
    """Ordinary memory that belongs to another object, from `asbuffer`.

    Examples
    --------
    >>> array = numpy.arange(4.0)
    >>> buf = cumem.asbuffer(array)
    >>> type(buf).__name__, buf.ptr == array.ctypes.data
    ('HostBuffer', True)
    """

    @property
    def kind(self) -> Literal["pageable"]: ...
    @property
    def device(self) -> None: ...

@final
class Stream:
    """A queue of device work: the work on one stream runs in order.

    In a ``with`` block the stream is the current one of its device, for this thread or task
    only. Leaving the block neither waits for the work nor closes the stream.

    Parameters
    ----------
    device : Device, int or str, optional
        The device that does the work; by default cumem's current device.
    priority : int
        0 is the lowest priority. Streams with negative numbers come first, down to the
        least number that the device supports.
    non_blocking : bool
        If False, make a blocking stream in CUDA's sense, which is ordered with the legacy
        default stream.

    Raises
    ------
    ValueError
        If the device does not exist or the priority is out of its range.
    CudaError
        If the stream cannot be made.

    Notes
    -----
    Two Streams are equal if they stand for the same CUDA stream. Queued work keeps its
    stream alive.

    Examples
    --------
    >>> pinned, device = cumem.zeros(1000, kind="pinned"), cumem.empty_device(1000)
    >>> with cumem.Stream() as stream:  # the current one in the block
    ...     transfer = cumem.copy_async(device, pinned, stream=stream)
    ...     stream.synchronize()
    >>> transfer.done
    True
    """

    def __new__(
        cls,
        *,
        device: object = None,
        priority: int = 0,
        non_blocking: bool = True,
    ) -> Self: ...
    @classmethod
    def from_external(cls, obj: object, /, *, device: object = None) -> Self:
        """Make a Stream from another library's stream, which the library continues to own.

        The Stream keeps `obj` alive.

        Parameters
        ----------
        obj : object
            Anything with ``__cuda_stream__``, ``.cuda_stream`` (PyTorch), ``.ptr``
            (CuPy) or ``.handle`` (Numba), or a handle as an int: 0 and 1 are the legacy
            default stream, and 2 is the default stream of the calling thread.
        device : Device, int or str, optional
            The device whose default stream is meant, if neither `obj` nor the driver tells.

        Returns
        -------
        Stream

        Raises
        ------
        TypeError
            If `obj` is not a stream.
        ValueError
            If a handle is negative, ``__cuda_stream__`` returns an unknown version, or
            the stream belongs to another device than `device`.
        CudaError
            If the driver does not know the handle.
        """
    @property
    def handle(self) -> int:
        """The cudaStream_t as an int; 1 is the legacy default stream."""
    @property
    def id(self) -> int:
        """A number that no other stream of the process ever gets, unlike the handle."""
    @property
    def device(self) -> Device:
        """The device that the stream belongs to."""
    @property
    def priority(self) -> int:
        """The priority: 0 is the lowest, and negative numbers come first."""
    @property
    def done(self) -> bool:
        """True if all queued work is done. Never blocks. Raises CudaError if it failed."""
    @property
    def is_capturing(self) -> bool:
        """True while queued work goes into a graph instead of running."""
    def synchronize(self) -> None:
        """Wait until everything queued so far is done.

        Raises
        ------
        CudaError
            If work on the stream failed.
        ValueError
            If the stream is closed.

        Notes
        -----
        **Blocks** until the stream is empty, with the GIL released; Ctrl-C interrupts it in
        the main thread.

        Examples
        --------
        >>> stream = cumem.Stream()
        >>> target = cumem.zeros(3, stream=stream)
        >>> stream.synchronize()
        >>> stream.done
        True
        """
    def wait(self, other: object, /) -> None:
        """Make work that is queued from now on wait for `other`.

        Parameters
        ----------
        other : Event, Transfer or stream
            An event, at the point where it was recorded last; a transfer; or a stream, with
            all work that is queued on it so far.

        Raises
        ------
        TypeError
            If `other` is not one of these.
        ValueError
            If the stream or the argument is closed.
        CudaError
            If the driver refuses, or the transfer failed.

        Notes
        -----
        **Blocks** only for a Transfer: until its last piece is submitted, or, if the host
        has the last step, until it is done. **Ordered after** `other`.

        Examples
        --------
        >>> first, second = cumem.Stream(), cumem.Stream()
        >>> second.wait(first)  # what comes next on `second` follows the work of `first`
        """
    def wait_event(self, event: Event, /) -> None:
        """Make work that is queued from now on wait for an event, as `wait` does.

        Parameters
        ----------
        event : Event
            The event, at the point where it was recorded last.

        Raises
        ------
        TypeError
            If `event` cannot be waited for.
        ValueError
            If the stream or the argument is closed.
        CudaError
            If the driver refuses.

        Notes
        -----
        PyTorch and CuPy have a method of this name. Never blocks. **Ordered after**
        `event`.
        """
    def record(self, event: Event | None = None, /) -> Event:
        """Mark this point of the stream.

        Parameters
        ----------
        event : Event, optional
            The event to move to this point; by default a new event.

        Returns
        -------
        Event
            `event`, or the new one.

        Raises
        ------
        ValueError
            If the stream or the event is closed, or they belong to different devices.
        CudaError
            If the event cannot be made or recorded.

        Notes
        -----
        Never blocks. **Ordered after** all work that is queued on the stream.
        """
    def close(self) -> None:
        """Release the stream. Queued work still completes.

        Notes
        -----
        This never waits for that work. Buffers and transfers that used the stream keep it
        until they are done with it. Closing a device's default stream, which
        ``current_stream()`` may return, does nothing.
        """
    @property
    def closed(self) -> bool:
        """Whether `close` or ``shutdown()`` has closed it."""
    def __dir__(self) -> list[str]:
        """List the names of the members that can be read now."""
    def __cuda_stream__(self) -> tuple[int, int]:
        """Return ``(0, handle)``, by the protocol that other libraries use."""
    def __enter__(self) -> Self:
        """Make the stream the current one of its device in this thread or task.

        Blocks may end in any order, as happens with generators. The innermost block that is
        still open determines the current stream. Tasks that are started and contexts that
        are copied inside a block keep its stream after the block.

        Raises
        ------
        ValueError
            If the stream is closed.
        """
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None:
        """End the block that was entered here. Other blocks stay as they are.

        Raises
        ------
        RuntimeError
            If the block was not entered, or was entered in another thread or context, as
            happens with a generator that another thread closes. The block then ends in both
            contexts.
        """
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class Event:
    """A point in a stream that work can wait for, and from which time can be measured.

    Parameters
    ----------
    device : Device, int or str, optional
        The device on whose streams the event is recorded; by default cumem's current
        device.
    timing : bool
        Whether the time is taken when the point is reached. An event without timing is
        cheaper.
    blocking : bool
        Whether `synchronize` sleeps, instead of spinning on a core.

    Raises
    ------
    ValueError
        If the device does not exist.
    CudaError
        If the event cannot be made.

    Notes
    -----
    An event that was never recorded counts as done.

    Examples
    --------
    >>> stream = cumem.Stream()
    >>> start = stream.record()
    >>> cumem.empty_device(1 << 20, "u1").fill(1, stream=stream)
    >>> end = stream.record()
    >>> end.synchronize()
    >>> end.seconds_since(start) >= 0, end.done
    (True, True)
    """

    def __new__(
        cls, *, device: object = None, timing: bool = True, blocking: bool = False
    ) -> Self: ...
    @property
    def handle(self) -> int:
        """The cudaEvent_t as an int."""
    @property
    def device(self) -> Device:
        """The device on whose streams the event is recorded."""
    @property
    def done(self) -> bool:
        """True if the point that was recorded last is reached. Never blocks. Raises
        CudaError if work failed.
        """
    def record(self, stream: object = None, /) -> Self:
        """Move the event to the end of the work that is queued on a stream.

        Parameters
        ----------
        stream : object, optional
            Anything that `Stream.from_external` takes; by default the current stream.

        Returns
        -------
        Event
            The event itself.

        Raises
        ------
        TypeError
            If `stream` is not a stream.
        ValueError
            If the stream or the event is closed, or they belong to different devices.
        CudaError
            If the driver refuses.

        Notes
        -----
        Never blocks. **Ordered after** all work that is queued on the stream.
        """
    def synchronize(self) -> None:
        """Wait until the point at which the event was recorded last is reached.

        Raises
        ------
        ValueError
            If the event is closed.
        CudaError
            If work before the event failed.

        Notes
        -----
        **Blocks** until that point is reached, with the GIL released; Ctrl-C interrupts it
        in the main thread.
        """
    def seconds_since(self, start: Event, /) -> float:
        """Measure the time from another event to this one by the device's clock.

        Parameters
        ----------
        start : Event
            An event of the same device.

        Returns
        -------
        float
            Seconds, with a resolution of about half a microsecond.

        Raises
        ------
        TypeError
            If `start` is not an Event.
        ValueError
            If one of the events is closed, was never recorded or was made without
            ``timing``, or if they belong to different devices.
        CudaError
            If work before the events failed.

        Notes
        -----
        **Blocks** until both are reached, with the GIL released; Ctrl-C interrupts it in
        the main thread. CUDA's documentation of ``cudaEventElapsedTime`` states the
        resolution.

        Examples
        --------
        >>> start, end = cumem.Event().record(), cumem.Event().record()
        >>> end.synchronize()
        >>> end.seconds_since(start) >= 0
        True
        """
    _timing: Final[bool]
    def query(self) -> bool:
        """Return `done`, under the name that PyTorch and Numba use.

        Returns
        -------
        bool

        Raises
        ------
        ValueError
            If the event is closed.
        CudaError
            If work before the event failed.
        """
    def wait(self, stream: object = None) -> None:
        """Make a stream wait for the event, as ``stream.wait(event)`` does.

        Parameters
        ----------
        stream : object, optional
            Anything that `Stream.from_external` takes; by default the current stream of the
            event's device.

        Raises
        ------
        TypeError
            If `stream` is not a stream.
        ValueError
            If the stream or the argument is closed.
        CudaError
            If the driver refuses.

        Notes
        -----
        PyTorch and Numba have a method of this name. It never blocks the host, unlike
        `synchronize`. Work that is queued on `stream` later is **ordered after** the event.
        """
    def elapsed_time(self, end: Event, /) -> float:
        """Measure the milliseconds from this event to a later one, as PyTorch and Numba do.

        Parameters
        ----------
        end : Event
            An event of the same device.

        Returns
        -------
        float
            Milliseconds: ``1000 * end.seconds_since(self)``.

        Raises
        ------
        TypeError, ValueError, CudaError
            As for `seconds_since`.

        Notes
        -----
        **Blocks** until both are reached, with the GIL released.
        """
    def close(self) -> None:
        """Release the event. Streams that wait for it still wait."""
    @property
    def closed(self) -> bool:
        """Whether `close` or ``shutdown()`` has closed it."""
    def __dir__(self) -> list[str]:
        """List the names of the members that can be read now."""
    def _follow(self) -> Transfer: ...
    def __await__(self) -> Generator[Any]: ...

@final
class Transfer:
    """A copy that may still be running, made by `copy_async`.

    A transfer keeps the target and the source alive. Dropping it neither blocks nor cancels
    the copy. Both ends then live until the copy is done, and a failure that nobody has seen
    goes to `sys.unraisablehook`. `await` it in a coroutine, or call `wait`. It is not a
    coroutine itself, so ``asyncio.ensure_future`` makes a task of it, but ``create_task``
    does not.

    Raises
    ------
    CudaError
        Raised by `wait`, `order` and `await` if the copy failed.
    CancelledError
        Raised by the same methods if the copy was cancelled.

    Examples
    --------
    >>> target = cumem.empty_device(1 << 20, "u1")
    >>> transfer = cumem.copy_async(target, numpy.ones(1 << 20, "u1"))
    >>> transfer.wait()
    >>> transfer.done, transfer.nbytes
    (True, 1048576)
    """

    @property
    def done(self) -> bool:
        """True if the copy is over, even if it failed. Never blocks. Raises RuntimeError
        in a child made by ``fork`` if the copy was not over when the process forked.
        """
    @property
    def nbytes(self) -> int:
        """The number of bytes to copy. A source that is broadcast counts once."""
    @property
    def seconds(self) -> float:
        """The seconds from the start to the end of the copy, or 0.0 while it is not done.
        They are measured by the device's clock if the copy ran entirely on a stream, and
        otherwise by the host's clock.
        """
    @property
    def gbps(self) -> float:
        """The rate in 1e9 bytes a second, or 0.0 while the copy is not done."""
    @property
    def route(self) -> str:
        """The name of the route that the bytes took, such as "direct" or "staged";
        docs/copies.md lists them. It is "several" for a call with many copies that took
        different routes.
        """
    @property
    def progress(self) -> int:
        """The number of bytes that have arrived, in whole pieces. It never decreases, and
        equals `nbytes` if and only if the copy is done and has not failed. A piece that one
        call of the driver moves counts only when it is complete. Never blocks.
        """
    @property
    def cancelled(self) -> bool:
        """True if `cancel` has cancelled the copy. Never blocks."""
    def wait(self, timeout: float | None = None, *, progress: _Progress = None) -> None:
        """Wait until the data is there.

        Parameters
        ----------
        timeout : float, optional
            The most seconds to wait; None waits as long as it takes.
        progress : bool or callable, optional
            True shows a bar if the copy takes long (with tqdm, which the extra
            ``cumem[progress]`` installs). A callable is called from time to time, and once
            more at the end, with the number of bytes that have arrived and the number of
            all bytes. An exception that it raises ends the waiting.

        Raises
        ------
        TimeoutError
            If the time has passed. The copy goes on.
        ValueError
            If `timeout` is negative or not a number.
        TypeError
            If `timeout` is not a number or `progress` cannot be called.
        BufferError
            If the owner of an end's memory moved it (``share_memory_()`` of a PyTorch
            tensor) before the end of the copy was noticed.
        ImportError
            If `progress` is True and tqdm is not installed.
        CancelledError
            If the copy was cancelled.
        CudaError
            If the copy failed.
        OSError
            If an end is a mapped file that has become shorter or cannot be read.

        Notes
        -----
        **Blocks** until the copy is done or `timeout` has passed, with the GIL released.
        Ctrl-C interrupts the waiting, not the copy.

        Examples
        --------
        >>> transfer = cumem.copy_async(cumem.empty(3), numpy.ones(3))
        >>> transfer.wait(timeout=60)
        >>> transfer.done
        True
        """
    def cancel(self) -> bool:
        """Cancel the copy if it has not begun.

        Only a copy in the background (one that was made without `stream=`) can be
        cancelled, and only while it waits for a thread or for work that comes before it.
        Once the driver has a copy, it cannot be cancelled.

        Returns
        -------
        bool
            True if this call or an earlier one has cancelled the copy: nothing was or
            will be read or written, the transfer is done, both ends are released, and
            `wait`, `order` and `await` raise `CancelledError`. False if the copy has begun
            or is done. Nothing changes then.

        Notes
        -----
        Copies that waited for this one can then begin. Cancelling a task that awaits a
        transfer does not cancel the transfer. The call returns within a moment, with the
        GIL released.
        """
    def order(self, stream: object, /) -> None:
        """Make a stream wait for the copy.

        Parameters
        ----------
        stream : stream
            Anything that `Stream.from_external` takes. None means the current stream, and
            0 or 1 the default stream, of the target's device, or of the source's if the
            target has no device.

        Raises
        ------
        TypeError
            If `stream` is not a stream.
        CancelledError
            If the copy was cancelled.
        CudaError
            If the copy has failed, or the driver refuses.

        Notes
        -----
        **Blocks**, with the GIL released, until the last piece is queued or, if the host
        has to write the target, until it is written. Work that is queued on `stream`
        afterwards is **ordered after** the copy.

        Examples
        --------
        >>> stream, target = cumem.Stream(), cumem.empty(3)
        >>> transfer = cumem.copy_async(target, numpy.ones(3))
        >>> transfer.order(stream)  # work on `stream` from here on finds the bytes
        """
    def to_dict(self) -> dict[str, Any]:
        """Return the present properties as plain data for ``json.dumps``.

        Returns
        -------
        dict
            ``nbytes``, ``progress_nbytes``, ``done``, ``cancelled``, ``seconds``,
            ``gbps`` and ``route``. Never blocks.
        """
    def __dir__(self) -> list[str]:
        """List the names of the members that can be read."""
    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows, with progress, route and rate."""
    def add_done_callback(self, fn: Callable[[Transfer], object], /) -> None:
        """Call ``fn(transfer)`` when the transfer is done, failed or cancelled.

        Parameters
        ----------
        fn : callable
            The function, which is called once with the transfer. The transfer is `done` by
            then, so its `wait` returns at once or raises the error of the copy. Each call
            of this method adds one more function.

        Raises
        ------
        TypeError
            If `fn` cannot be called.
        RuntimeError
            If the interpreter is ending and no thread can be started any more.
        CudaError
            If this is a forked child, where the parent's transfers never end.

        See Also
        --------
        wait : Block until the transfer is done. With ``await transfer`` an event loop goes
        on.

        Notes
        -----
        Never **blocks**. If the transfer is done already, this call calls `fn` itself, in
        this thread. Otherwise a thread named ``cumem-done-callbacks`` calls it later. That
        thread calls one function after the other, so a function that takes long delays the
        others. No function is called from a callback of CUDA. An exception that `fn` raises
        goes to `sys.unraisablehook`. The interpreter waits for all callbacks before it
        ends, as it does for threads of `concurrent.futures`. The transfer is kept alive
        until `fn` was called.

        Examples
        --------
        >>> source = cumem.array([1.0, 2.0], kind="pinned")
        >>> transfer = cumem.copy_async(cumem.empty_device(2), source)
        >>> transfer.wait()
        >>> transfer.add_done_callback(lambda each: print(each.nbytes, each.done))
        16 True
        """
    def _make_bell(self, fd: int, /) -> CapsuleType: ...
    def _notify(self, bell: CapsuleType, /) -> None: ...
    def _call_back(self, fn: Callable[[Transfer], object], /) -> None: ...
    def _stop(self) -> None: ...
    def __await__(self) -> Generator[Any]: ...

class _DeviceBlocks:
    """The part of `Device` that is written in C: its ``with`` blocks."""

    def __enter__(self) -> Self:
        """Make this the current device of the thread or task."""
    def __exit__(self, *raised: object) -> None:
        """Make the previous current device current again."""

class _Pool(Generic[_B_co]):
    """The part of `Pool` that is written in C. Every pool is a `cumem.pools.pool.Pool`."""

    @classmethod
    def __class_getitem__(cls, item: object, /) -> GenericAlias: ...
    def __new__(
        cls,
        kind: str,
        device: int,
        flags: int,
        numa_node: int,
        plain: bool,
        fork: int,
        idle_trim_ns: int,
        limit: int | None,
        granule_nbytes: int,
        spills: bool = False,
        spill_limit: int | None = None,
        /,
    ) -> Self: ...
    def __dir__(self) -> list[str]:
        """List the names of the members that can be read."""
    @property
    def _config(self) -> _PoolConfig:
        """How the pool was made. This can be read even after the pool is closed."""
    def allocate(self, nbytes: int, stream: object = None) -> _B_co:
        """Allocate a one-dimensional buffer of bytes.

        Parameters
        ----------
        nbytes : int
            The length of the buffer in bytes, which may be 0.
        stream : Stream or other stream object, optional
            The stream that will use the memory first; by default the current stream for
            device memory, and none for the other kinds.

        Returns
        -------
        Buffer
            A buffer of dtype uint8 and of the pool's kind, whose bytes are not set.

        Raises
        ------
        TypeError
            If an argument has the wrong type.
        ValueError
            If `nbytes` is negative or does not fit in 63 bits, `stream` belongs to
            another device, or the pool is closed.
        OutOfMemoryError
            If there is not enough memory, even after waiting for freed memory and
            trimming pools.
        CudaError
            If a call to CUDA failed.

        Notes
        -----
        **Blocks** only if the pool has nothing that fits, with the GIL released. **Ordered
        after**: device memory may be used at once on `stream`. To use it on another stream,
        the caller has to order that stream after `stream`.
        """
    def _describe(self) -> _PoolFacts:
        """Describe the pool and its memory. Raises ValueError if it is closed."""
    def _list_blocks(self) -> list[_PoolBlock]:
        """List its blocks by segment and address. Raises ValueError if it is closed."""
    def _reset_peaks(self) -> None:
        """Start the peaks of the counters again. Raises ValueError if it is closed."""
    def _set_idle_trim(self, ns: int, /) -> None:
        """Set after how many nanoseconds unused memory goes back; 0 means never."""
    def _set_limit(self, limit: int | None, /) -> None:
        """Set the limit in bytes; None means that there is none."""
    def _close(self) -> None:
        """Close the pool. The caller has checked that it is not a default pool."""
    def __enter__(self) -> Self:
        """Make the pool the current one of its kind and device in this thread or task.

        Blocks may end in any order, as happens with generators. The innermost block that is
        still open determines the current pool. Tasks that are started and contexts that are
        copied inside a block keep its pool after the block.

        Raises
        ------
        ValueError
            If the pool is closed.
        """
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None:
        """End the block that was entered here. Other blocks stay as they are, and the pool
        stays open.

        Raises
        ------
        RuntimeError
            If the block was not entered, or was entered in another thread or context, as
            happens with a generator that another thread closes. The block then ends in both
            contexts.
        """

@overload
def empty(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: None = ...,
) -> DeviceBuffer: ...
@overload
def empty(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool[_B],
) -> _B: ...
@overload
def empty(
    shape: _Shape,
    dtype: DTypeLike,
    kind: Literal["pinned"],
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> PinnedBuffer: ...
@overload
def empty(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    kind: Literal["pinned"],
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> PinnedBuffer: ...
@overload
def empty(
    shape: _Shape,
    dtype: DTypeLike,
    kind: Literal["mapped"],
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> MappedBuffer: ...
@overload
def empty(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    kind: Literal["mapped"],
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> MappedBuffer: ...
@overload
def empty(
    shape: _Shape,
    dtype: DTypeLike,
    kind: Literal["managed"],
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> ManagedBuffer: ...
@overload
def empty(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    kind: Literal["managed"],
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> ManagedBuffer: ...
@overload
def empty(
    shape: _Shape,
    dtype: DTypeLike,
    kind: Literal["device"],
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> DeviceBuffer: ...
@overload
def empty(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    kind: Literal["device"],
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> DeviceBuffer: ...
@overload
def empty(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    kind: _Kind,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> Buffer: ...
@overload  # the last overload has the signature of the extension
def empty(
    shape: _Shape,
    dtype: DTypeLike = "float64",
    kind: _Kind = "device",
    *,
    order: _Order = "C",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
) -> Buffer:
    """Allocate a buffer from the pool of its kind, without setting its bytes.

    Parameters
    ----------
    shape : int or sequence of int
        The lengths in elements, which may be 0; ``()`` makes a buffer of one element.
    dtype : dtype_like
        Any NumPy dtype without Python objects.
    kind : {'device', 'pinned', 'mapped', 'managed'}
        The kind of memory; by default device memory.
    order : {'C', 'F'}
        Whether the last or the first index runs fastest.
    device : Device, int or str, optional
        The device that has the memory or whose context page-locks it, such as ``0`` or
        ``"cuda:0"``; by default cumem's current device.
    stream : Stream or other stream object, optional
        The stream that will use the memory first; for device memory it must be one of
        `device`. By default it is the current stream.
    pool : Pool, optional
        The pool to take the memory from; by default that of the innermost ``with pool:``
        block that fits, or else the kind's default pool. If `kind` and `device` are not
        given, the pool determines them as well.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, there is no such kind,
        order or device, or `stream` belongs to another device.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is not enough memory, even after waiting for freed memory and trimming
        pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        The process is a child made by ``fork``.

    Notes
    -----
    **Blocks** only if the pool has nothing that fits, with the GIL released. **Ordered
    after**: device memory may be used at once on `stream`. To use it on another stream, the
    caller has to order that stream after `stream`.

    Examples
    --------
    >>> cumem.empty((2, 3), "f4", "pinned").kind
    'pinned'
    """

@overload
def zeros(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: None = ...,
) -> DeviceBuffer: ...
@overload
def zeros(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool[_B],
) -> _B: ...
@overload
def zeros(
    shape: _Shape,
    dtype: DTypeLike,
    kind: Literal["pinned"],
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> PinnedBuffer: ...
@overload
def zeros(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    kind: Literal["pinned"],
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> PinnedBuffer: ...
@overload
def zeros(
    shape: _Shape,
    dtype: DTypeLike,
    kind: Literal["mapped"],
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> MappedBuffer: ...
@overload
def zeros(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    kind: Literal["mapped"],
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> MappedBuffer: ...
@overload
def zeros(
    shape: _Shape,
    dtype: DTypeLike,
    kind: Literal["managed"],
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> ManagedBuffer: ...
@overload
def zeros(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    kind: Literal["managed"],
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> ManagedBuffer: ...
@overload
def zeros(
    shape: _Shape,
    dtype: DTypeLike,
    kind: Literal["device"],
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> DeviceBuffer: ...
@overload
def zeros(
    shape: _Shape,
    dtype: DTypeLike = ...,
    *,
    kind: Literal["device"],
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> DeviceBuffer: ...
@overload
def zeros(
    shape: _Shape,
    dtype: DTypeLike,
    kind: _Kind,
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> Buffer: ...
@overload  # the last overload has the signature of the extension
def zeros(
    shape: _Shape,
    dtype: DTypeLike = "float64",
    kind: _Kind = "device",
    *,
    order: _Order = "C",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
) -> Buffer:
    """Allocate a buffer and set all its bytes to zero.

    Parameters
    ----------
    shape : int or sequence of int
        The lengths in elements.
    dtype : dtype_like
        Any NumPy dtype without Python objects.
    kind : str
        The kind of memory, as in `empty`; by default device memory.
    order : {'C', 'F'}
        Whether the last or the first index runs fastest.
    device : Device, int or str, optional
        The device that has the memory or whose context page-locks it, such as ``0`` or
        ``"cuda:0"``; by default cumem's current device.
    stream : Stream or other stream object, optional
        The stream that will use the memory first; for device memory it must be one of
        `device`. By default it is the current stream.
    pool : Pool, optional
        The pool to take the memory from; by default that of the innermost ``with pool:``
        block that fits, or else the kind's default pool. If `kind` and `device` are not
        given, the pool determines them as well.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, there is no such kind,
        order or device, or `stream` belongs to another device.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is not enough memory, even after waiting for freed memory and trimming
        pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        The process is a child made by ``fork``.

    Notes
    -----
    **Blocks** until the memory is zero if the host can read it. Device memory is set to
    zero later, in the order of the stream, and so is mapped and managed memory if `stream`
    is given. **Ordered after** work on `stream`.

    Examples
    --------
    >>> cumem.zeros(3, "i4", "pinned").numpy()
    array([0, 0, 0], dtype=int32)
    """

@overload
def full(
    shape: _Shape,
    fill_value: object,
    dtype: DTypeLike | None = ...,
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: None = ...,
    casting: _Casting | None = ...,
) -> DeviceBuffer: ...
@overload
def full(
    shape: _Shape,
    fill_value: object,
    dtype: DTypeLike | None = ...,
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool[_B],
    casting: _Casting | None = ...,
) -> _B: ...
@overload
def full(
    shape: _Shape,
    fill_value: object,
    dtype: DTypeLike | None,
    kind: Literal["pinned"],
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> PinnedBuffer: ...
@overload
def full(
    shape: _Shape,
    fill_value: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["pinned"],
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> PinnedBuffer: ...
@overload
def full(
    shape: _Shape,
    fill_value: object,
    dtype: DTypeLike | None,
    kind: Literal["mapped"],
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> MappedBuffer: ...
@overload
def full(
    shape: _Shape,
    fill_value: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["mapped"],
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> MappedBuffer: ...
@overload
def full(
    shape: _Shape,
    fill_value: object,
    dtype: DTypeLike | None,
    kind: Literal["managed"],
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> ManagedBuffer: ...
@overload
def full(
    shape: _Shape,
    fill_value: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["managed"],
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> ManagedBuffer: ...
@overload
def full(
    shape: _Shape,
    fill_value: object,
    dtype: DTypeLike | None,
    kind: Literal["device"],
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> DeviceBuffer: ...
@overload
def full(
    shape: _Shape,
    fill_value: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["device"],
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> DeviceBuffer: ...
@overload
def full(
    shape: _Shape,
    fill_value: object,
    dtype: DTypeLike | None,
    kind: _Kind,
    *,
    order: _Order = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> Buffer: ...
@overload  # the last overload has the signature of the extension
def full(
    shape: _Shape,
    fill_value: object,
    dtype: DTypeLike | None = None,
    kind: _Kind = "device",
    *,
    order: _Order = "C",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
    casting: _Casting | None = None,
) -> Buffer:
    """Allocate a buffer and set all its elements to a value.

    Parameters
    ----------
    shape : int or sequence of int
        The lengths in elements.
    fill_value : array_like, Buffer, or exporter of DLPack or the CUDA array interface
        A scalar, or an array that broadcasts to the shape and may be on a device.
    dtype : dtype_like, optional
        The dtype of the elements; by default that of `fill_value`, or the one that NumPy
        gives it.
    kind : str
        The kind of memory, as in `empty`; by default device memory.
    order : {'C', 'F'}
        Whether the last or the first index runs fastest.
    device : Device, int or str, optional
        The device that has the memory or whose context page-locks it, such as ``0`` or
        ``"cuda:0"``; by default cumem's current device.
    stream : Stream or other stream object, optional
        The stream that will use the memory first; for device memory it must be one of
        `device`. By default it is the current stream.
    pool : Pool, optional
        The pool to take the memory from; by default that of the innermost ``with pool:``
        block that fits, or else the kind's default pool. If `kind` and `device` are not
        given, the pool determines them as well.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        Which dtypes of an array may be converted to `dtype`, as in ``numpy.can_cast``;
        by default ``"same_kind"``. If it is given, it also applies to scalars, which
        otherwise must fit into `dtype`.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, there is no such kind,
        order or device, or `stream` belongs to another device.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is not enough memory, even after waiting for freed memory and trimming
        pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        The process is a child made by ``fork``.

    Notes
    -----
    **Blocks** until the memory is filled if the host can read it. Device memory is filled
    later, in the order of the stream, and so is mapped and managed memory if `stream` is
    given. **Ordered after** work on `stream`.

    Examples
    --------
    >>> cumem.full(3, 7, "i4", "pinned").numpy()
    array([7, 7, 7], dtype=int32)
    """

@overload
def empty_like(
    prototype: object,
    dtype: DTypeLike | None = ...,
    kind: None = ...,
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> Buffer: ...
@overload
def empty_like(
    prototype: object,
    dtype: DTypeLike | None,
    kind: Literal["pinned"],
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> PinnedBuffer: ...
@overload
def empty_like(
    prototype: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["pinned"],
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> PinnedBuffer: ...
@overload
def empty_like(
    prototype: object,
    dtype: DTypeLike | None,
    kind: Literal["mapped"],
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> MappedBuffer: ...
@overload
def empty_like(
    prototype: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["mapped"],
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> MappedBuffer: ...
@overload
def empty_like(
    prototype: object,
    dtype: DTypeLike | None,
    kind: Literal["managed"],
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> ManagedBuffer: ...
@overload
def empty_like(
    prototype: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["managed"],
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> ManagedBuffer: ...
@overload
def empty_like(
    prototype: object,
    dtype: DTypeLike | None,
    kind: Literal["device"],
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> DeviceBuffer: ...
@overload
def empty_like(
    prototype: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["device"],
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> DeviceBuffer: ...
@overload
def empty_like(
    prototype: object,
    dtype: DTypeLike | None,
    kind: _Kind | None,
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> Buffer: ...
@overload  # the last overload has the signature of the extension
def empty_like(
    prototype: object,
    dtype: DTypeLike | None = None,
    kind: _Kind | None = None,
    *,
    order: _LikeOrder | None = "K",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
) -> Buffer:
    """Allocate a buffer with the shape and dtype of another array.

    Parameters
    ----------
    prototype : Buffer or array_like
        The object whose shape and dtype the new buffer gets. If it is a buffer, the new one
        also gets its kind, flags and device.
    dtype : dtype_like, optional
        A dtype to use instead of the prototype's.
    kind : {'device', 'pinned', 'mapped', 'managed'}, optional
        A kind to use instead of the prototype's. The default is device memory if the
        prototype is ordinary memory or not a buffer.
    order : {'C', 'F', 'A', 'K'}
        As in NumPy: 'C' and 'F' say whether the last or the first index runs
        fastest, 'A' means 'F' if the original is Fortran-contiguous and not C-contiguous,
        else 'C', and 'K' keeps the order of its strides.
    device : Device, int or str, optional
        The device that has the memory or whose context page-locks it, such as ``0`` or
        ``"cuda:0"``; by default the prototype's, or cumem's current device.
    stream : Stream or other stream object, optional
        The stream that will use the memory first; for device memory it must be one of
        `device`. By default it is the current stream.
    pool : Pool, optional
        The pool to take the memory from; by default that of the innermost ``with pool:``
        block that fits, or else the kind's default pool. If `kind` and `device` are not
        given, the pool determines them as well.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, there is no such kind,
        order or device, or `stream` belongs to another device.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is not enough memory, even after waiting for freed memory and trimming
        pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        The process is a child made by ``fork``.

    Notes
    -----
    **Blocks** only if the pool has nothing that fits, with the GIL released. **Ordered
    after** the same work as `empty`.

    Examples
    --------
    >>> buf = cumem.empty_like(numpy.ones((2, 3), "f4"))
    >>> buf.kind, buf.shape
    ('device', (2, 3))
    """

@overload
def zeros_like(
    prototype: object,
    dtype: DTypeLike | None = ...,
    kind: None = ...,
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> Buffer: ...
@overload
def zeros_like(
    prototype: object,
    dtype: DTypeLike | None,
    kind: Literal["pinned"],
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> PinnedBuffer: ...
@overload
def zeros_like(
    prototype: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["pinned"],
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> PinnedBuffer: ...
@overload
def zeros_like(
    prototype: object,
    dtype: DTypeLike | None,
    kind: Literal["mapped"],
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> MappedBuffer: ...
@overload
def zeros_like(
    prototype: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["mapped"],
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> MappedBuffer: ...
@overload
def zeros_like(
    prototype: object,
    dtype: DTypeLike | None,
    kind: Literal["managed"],
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> ManagedBuffer: ...
@overload
def zeros_like(
    prototype: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["managed"],
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> ManagedBuffer: ...
@overload
def zeros_like(
    prototype: object,
    dtype: DTypeLike | None,
    kind: Literal["device"],
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> DeviceBuffer: ...
@overload
def zeros_like(
    prototype: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["device"],
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> DeviceBuffer: ...
@overload
def zeros_like(
    prototype: object,
    dtype: DTypeLike | None,
    kind: _Kind | None,
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
) -> Buffer: ...
@overload  # the last overload has the signature of the extension
def zeros_like(
    prototype: object,
    dtype: DTypeLike | None = None,
    kind: _Kind | None = None,
    *,
    order: _LikeOrder | None = "K",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
) -> Buffer:
    """Allocate a buffer like another array and set all its bytes to zero.

    Parameters
    ----------
    prototype : Buffer or array_like
        The object whose shape and dtype the new buffer gets. If it is a buffer, the new one
        also gets its kind, flags and device.
    dtype : dtype_like, optional
        A dtype to use instead of the prototype's.
    kind : {'device', 'pinned', 'mapped', 'managed'}, optional
        A kind to use instead of the prototype's. The default is device memory if the
        prototype is ordinary memory or not a buffer.
    order : {'C', 'F', 'A', 'K'}
        As in NumPy: 'C' and 'F' say whether the last or the first index runs
        fastest, 'A' means 'F' if the original is Fortran-contiguous and not C-contiguous,
        else 'C', and 'K' keeps the order of its strides.
    device : Device, int or str, optional
        The device that has the memory or whose context page-locks it, such as ``0`` or
        ``"cuda:0"``; by default the prototype's, or cumem's current device.
    stream : Stream or other stream object, optional
        The stream that will use the memory first; for device memory it must be one of
        `device`. By default it is the current stream.
    pool : Pool, optional
        The pool to take the memory from; by default that of the innermost ``with pool:``
        block that fits, or else the kind's default pool. If `kind` and `device` are not
        given, the pool determines them as well.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        There is no such kind, order or device, or `stream` belongs to another device.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is not enough memory, even after waiting for freed memory and trimming
        pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        The process is a child made by ``fork``.

    Notes
    -----
    **Blocks** as `zeros` does. **Ordered after** work on `stream`.

    Examples
    --------
    >>> cumem.zeros_like(numpy.ones(2)).to_numpy()
    array([0., 0.])
    """

@overload
def full_like(
    prototype: object,
    fill_value: object,
    dtype: DTypeLike | None = ...,
    kind: None = ...,
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> Buffer: ...
@overload
def full_like(
    prototype: object,
    fill_value: object,
    dtype: DTypeLike | None,
    kind: Literal["pinned"],
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> PinnedBuffer: ...
@overload
def full_like(
    prototype: object,
    fill_value: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["pinned"],
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> PinnedBuffer: ...
@overload
def full_like(
    prototype: object,
    fill_value: object,
    dtype: DTypeLike | None,
    kind: Literal["mapped"],
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> MappedBuffer: ...
@overload
def full_like(
    prototype: object,
    fill_value: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["mapped"],
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> MappedBuffer: ...
@overload
def full_like(
    prototype: object,
    fill_value: object,
    dtype: DTypeLike | None,
    kind: Literal["managed"],
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> ManagedBuffer: ...
@overload
def full_like(
    prototype: object,
    fill_value: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["managed"],
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> ManagedBuffer: ...
@overload
def full_like(
    prototype: object,
    fill_value: object,
    dtype: DTypeLike | None,
    kind: Literal["device"],
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> DeviceBuffer: ...
@overload
def full_like(
    prototype: object,
    fill_value: object,
    dtype: DTypeLike | None = ...,
    *,
    kind: Literal["device"],
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> DeviceBuffer: ...
@overload
def full_like(
    prototype: object,
    fill_value: object,
    dtype: DTypeLike | None,
    kind: _Kind | None,
    *,
    order: _LikeOrder | None = ...,
    device: object = ...,
    stream: object = ...,
    pool: Pool | None = ...,
    casting: _Casting | None = ...,
) -> Buffer: ...
@overload  # the last overload has the signature of the extension
def full_like(
    prototype: object,
    fill_value: object,
    dtype: DTypeLike | None = None,
    kind: _Kind | None = None,
    *,
    order: _LikeOrder | None = "K",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
    casting: _Casting | None = None,
) -> Buffer:
    """Allocate a buffer like another array and set all its elements to a value.

    Parameters
    ----------
    prototype : Buffer or array_like
        The object whose shape and dtype the new buffer gets. If it is a buffer, the new one
        also gets its kind, flags and device.
    fill_value : array_like, Buffer, or exporter of DLPack or the CUDA array interface
        A scalar, or an array that broadcasts to the shape and may be on a device.
    dtype : dtype_like, optional
        A dtype to use instead of the prototype's.
    kind : {'device', 'pinned', 'mapped', 'managed'}, optional
        A kind to use instead of the prototype's. The default is device memory if the
        prototype is ordinary memory or not a buffer.
    order : {'C', 'F', 'A', 'K'}
        As in NumPy: 'C' and 'F' say whether the last or the first index runs
        fastest, 'A' means 'F' if the original is Fortran-contiguous and not C-contiguous,
        else 'C', and 'K' keeps the order of its strides.
    device : Device, int or str, optional
        The device that has the memory or whose context page-locks it, such as ``0`` or
        ``"cuda:0"``; by default the prototype's, or cumem's current device.
    stream : Stream or other stream object, optional
        The stream that will use the memory first; for device memory it must be one of
        `device`. By default it is the current stream.
    pool : Pool, optional
        The pool to take the memory from; by default that of the innermost ``with pool:``
        block that fits, or else the kind's default pool. If `kind` and `device` are not
        given, the pool determines them as well.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        Which dtypes of an array may be converted to the buffer's, as in
        ``numpy.can_cast``; by default ``"same_kind"``. If it is given, it also applies to
        scalars, which otherwise must fit into the dtype.

    Returns
    -------
    Buffer
        A `PinnedBuffer`, `MappedBuffer`, `ManagedBuffer` or `DeviceBuffer`.

    Raises
    ------
    ValueError
        There is no such kind, order or device, `stream` belongs to another device, or
        `fill_value` does not broadcast.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is not enough memory, even after waiting for freed memory and trimming
        pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        The process is a child made by ``fork``.

    Notes
    -----
    **Blocks** as `full` does. **Ordered after** work on `stream`.

    Examples
    --------
    >>> cumem.full_like(numpy.ones(3), 7.0).to_numpy()
    array([7., 7., 7.])
    """

def empty_pinned(
    shape: _Shape,
    dtype: DTypeLike = "float64",
    *,
    order: _Order = "C",
    portable: bool = True,
    write_combined: bool = False,
    device: object = None,
    pool: Pool | None = None,
) -> PinnedBuffer:
    """Allocate page-locked host memory from its pool.

    Parameters
    ----------
    shape : int or sequence of int
        The lengths in elements, which may be 0; ``()`` makes a buffer of one element.
    dtype : dtype_like
        Any NumPy dtype without Python objects.
    order : {'C', 'F'}
        Whether the last or the first index runs fastest.
    portable : bool
        Whether the memory is page-locked for every device, not only for `device`.
    write_combined : bool
        Whether the memory is uncached, which makes it fast for devices to read and for
        the host to write in order, but very slow for the host to read.
    device : Device, int or str, optional
        The device whose context page-locks the memory; by default cumem's current device.
    pool : Pool, optional
        The pool to take the memory from; by default that of the innermost ``with pool:``
        block that fits, or else the kind's default pool. If `device` is not given, the pool
        determines it as well.

    Returns
    -------
    PinnedBuffer
        A buffer whose bytes are not set.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, or an argument is not
        one of its choices.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is not enough memory, even after waiting for freed memory and trimming
        pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        The process is a child made by ``fork``.

    Notes
    -----
    **Blocks** only if the pool has nothing that fits, with the GIL released. **Ordered
    after** nothing, since memory is handed out only when no device uses it.

    Examples
    --------
    >>> buf = cumem.empty_pinned((2, 3), "f4")
    >>> buf.numpy()[:] = 1
    >>> float(buf.numpy().sum())
    6.0
    """

def empty_mapped(
    shape: _Shape,
    dtype: DTypeLike = "float64",
    *,
    order: _Order = "C",
    portable: bool = True,
    write_combined: bool = False,
    device: object = None,
    pool: Pool | None = None,
) -> MappedBuffer:
    """Allocate page-locked host memory that devices read and write in place.

    Parameters
    ----------
    shape : int or sequence of int
        The lengths in elements, which may be 0; ``()`` makes a buffer of one element.
    dtype : dtype_like
        Any NumPy dtype without Python objects.
    order : {'C', 'F'}
        Whether the last or the first index runs fastest.
    portable : bool
        Whether the memory is page-locked for every device, not only for `device`.
    write_combined : bool
        Whether the memory is uncached, which makes it fast for devices to read and for
        the host to write in order, but very slow for the host to read.
    device : Device, int or str, optional
        The device whose context page-locks the memory; by default cumem's current device.
    pool : Pool, optional
        The pool to take the memory from; by default that of the innermost ``with pool:``
        block that fits, or else the kind's default pool. If `device` is not given, the pool
        determines it as well.

    Returns
    -------
    MappedBuffer
        A buffer whose bytes are not set; `device_ptr` is its address for devices.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, or an argument is not
        one of its choices.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is not enough memory, even after waiting for freed memory and trimming
        pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        The process is a child made by ``fork``.

    Notes
    -----
    **Blocks** only if the pool has nothing that fits, with the GIL released. **Ordered
    after** nothing, since memory is handed out only when no device uses it.

    Examples
    --------
    >>> buf = cumem.empty_mapped(4, "i4")
    >>> buf.kind
    'mapped'
    """

def empty_managed(
    shape: _Shape,
    dtype: DTypeLike = "float64",
    *,
    order: _Order = "C",
    attach: Literal["global", "host"] = "global",
    device: object = None,
    pool: Pool | None = None,
) -> ManagedBuffer:
    """Allocate unified memory, whose pages move to the side that uses them.

    Parameters
    ----------
    shape : int or sequence of int
        The lengths in elements, which may be 0; ``()`` makes a buffer of one element.
    dtype : dtype_like
        Any NumPy dtype without Python objects.
    order : {'C', 'F'}
        Whether the last or the first index runs fastest.
    attach : {'global', 'host'}
        Which devices may use the memory at first. With ``'global'`` these are all devices,
        on any stream, and with ``'host'`` none.
    device : Device, int or str, optional
        The device whose context allocates the memory; by default cumem's current device.
    pool : Pool, optional
        The pool to take the memory from; by default that of the innermost ``with pool:``
        block that fits, or else the kind's default pool. If `device` is not given, the pool
        determines it as well.

    Returns
    -------
    ManagedBuffer
        A buffer whose bytes are not set.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, or an argument is not
        one of its choices.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is not enough memory, even after waiting for freed memory and trimming
        pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        The process is a child made by ``fork``.

    Notes
    -----
    **Blocks** only if the pool has nothing that fits, with the GIL released. **Ordered
    after** nothing, since memory is handed out only when no device uses it.

    Examples
    --------
    >>> buf = cumem.empty_managed((2, 3), "f4")
    >>> buf.numpy()[:] = 1  # the host's side of the same memory
    >>> buf.kind
    'managed'
    """

def empty_device(
    shape: _Shape,
    dtype: DTypeLike = "float64",
    *,
    order: _Order = "C",
    device: object = None,
    stream: object = None,
    pool: Pool | None = None,
) -> DeviceBuffer:
    """Allocate memory of a device from its pool.

    Parameters
    ----------
    shape : int or sequence of int
        The lengths in elements, which may be 0; ``()`` makes a buffer of one element.
    dtype : dtype_like
        Any NumPy dtype without Python objects.
    order : {'C', 'F'}
        Whether the last or the first index runs fastest.
    device : Device, int or str, optional
        The device that has the memory; by default cumem's current device.
    stream : Stream or other stream object, optional
        The stream of that device that will use the memory first; by default its current
        stream.
    pool : Pool, optional
        The pool to take the memory from; by default that of the innermost ``with pool:``
        block that fits, or else the kind's default pool. If `device` is not given, the pool
        determines it as well.

    Returns
    -------
    DeviceBuffer
        A buffer whose bytes are not set.

    Raises
    ------
    ValueError
        A length is negative, the size does not fit in 63 bits, or an argument is not
        one of its choices.
    TypeError
        An argument has the wrong type, or the dtype holds Python objects.
    OutOfMemoryError
        There is not enough memory, even after waiting for freed memory and trimming
        pools.
    CudaError
        A call to CUDA failed.
    RuntimeError
        The process is a child made by ``fork``.

    Notes
    -----
    **Blocks** only if the pool has nothing that fits, with the GIL released. **Ordered
    after**: the memory may be used at once on `stream`. To use it on another stream, the
    caller has to order that stream after `stream`.

    Examples
    --------
    >>> buf = cumem.empty_device((2, 3), "f4")
    >>> buf.shape, buf.nbytes
    ((2, 3), 24)
    """

def asbuffer(obj: object, *, stream: object = None) -> Buffer:
    """View the memory of any exporter as a Buffer, without a copy.

    Parameters
    ----------
    obj : object
        A Buffer, which is returned as it is, a NumPy array, a DLPack exporter or capsule,
        an object with ``__cuda_array_interface__``, or anything with the buffer
        protocol. These are tried in this order.
    stream : stream, optional
        The stream that will use device memory first; by default the current stream of its
        device.

    Returns
    -------
    Buffer
        A buffer whose type says where the memory is: HostBuffer for ordinary memory,
        PinnedBuffer for page-locked memory, and so on. It keeps `obj` alive, or the object
        that `obj` exported. If `obj` is a PyTorch tensor, the buffer keeps the tensor's
        storage alive, which cannot be resized from then on. If the owner moves the bytes
        nevertheless, as ``tensor.share_memory_()`` does, each use of the buffer raises
        BufferError.

    Raises
    ------
    TypeError
        `obj` does not export memory, or its elements are Python objects.
    ValueError
        The description of the memory contradicts itself, or the driver's information about
        the address.
    BufferError
        `obj` exports a DLPack version, device or element type that cumem cannot use.

    Notes
    -----
    **Ordered after** the exporter's pending work: `stream` waits for it.

    Examples
    --------
    >>> array = numpy.arange(3)
    >>> view = cumem.asbuffer(array)  # no copy
    >>> array[0] = 7
    >>> int(view.numpy()[0])
    7
    """

def asnumpy(
    obj: object, *, stream: object = None, progress: _Progress = None
) -> NDArray[Any]:
    """Copy anything into a new NumPy array.

    Several threads make and fill the pages of long arrays.

    Parameters
    ----------
    obj : Buffer, array, exporter or value
        Memory of any kind and strides that `copy` reads, such as buffers, PyTorch tensors
        and arrays of CuPy, JAX or NumPy, or a value that ``numpy.asarray`` takes.
    stream : stream, optional
        The stream that copies device memory, which must be one of its device; by default
        the current stream.
    progress : bool or callable, optional
        As for `copy`.

    Returns
    -------
    numpy.ndarray
        A new array of the same shape and dtype. It is C-contiguous, writable, and in
        ordinary memory.

    Raises
    ------
    TypeError
        NumPy would make an array of Python objects.
    ValueError
        The buffer is closed, or `stream` is of another device.
    MemoryError
        There is not enough memory for the array.
    ImportError
        `progress` is True and tqdm is not installed.
    CudaError
        The copy failed, or `stream` is being captured.
    OSError
        `obj` is a mapped file that has become shorter or cannot be read.

    Notes
    -----
    **Blocks** until the bytes are there, with the GIL released; Ctrl-C ends it as it ends
    `copy`. **Ordered after** work that cumem knows of on the memory, and after work on
    `stream` or the current stream of its device.

    Examples
    --------
    >>> cumem.asnumpy(cumem.array([1.0, 2.0]))
    array([1., 2.])
    """

def copy(
    dst: object,
    src: object,
    *,
    stream: object = None,
    progress: _Progress = None,
    casting: _Casting | None = None,
    scale: SupportsFloat | None = None,
    offset: SupportsFloat | None = None,
) -> None:
    """Copy between any two pieces of memory and wait until the data is there.

    Parameters
    ----------
    dst : Buffer, array or exporter
        Writable memory: a Buffer, a NumPy array of any strides, or anything with
        DLPack, ``__cuda_array_interface__`` or the buffer protocol.
    src : Buffer, array, exporter or scalar
        Memory like `dst`, or a scalar or list whose values must fit into the dtype of `dst`
        unchanged. Its shape must be that of `dst` or broadcast to it as in NumPy.
    stream : stream, optional
        The stream to copy on, of a device that has the target or the source; by default
        that device's current stream.
    progress : bool or callable, optional
        As for `Transfer.wait`. An exception that a callable raises ends the copy as Ctrl-C
        does.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        Which other dtypes `dst` may have, as in `numpy.can_cast`; by default none. Numbers
        (bool, integers, float16, bfloat16, float32, float64, complex64, complex128) are
        converted by the host's copy threads while they pack or unpack, so that between host
        and device the link carries the device's dtype. The device itself converts only
        numbers of 8 or 16 bits that become float32, from 1 MiB on. Results are those of
        NumPy, except that floats which an integer dtype cannot hold become its nearest
        value, and NaN becomes 0. All other dtypes are converted by NumPy, in the same
        threads. If both ends are device memory, the elements pass through the host, unless
        they have 8 or 16 bits and become float32 within one device.
    scale, offset : float, optional
        With `casting`, each value becomes ``value * scale + offset``. This is computed in
        float64 if that is the dtype of an end, else in float32.

    Raises
    ------
    TypeError
        If an end is not memory or has masked elements, the dtypes differ and `casting` does
        not allow it, NumPy cannot convert one dtype to the other, or the dtypes cannot be
        scaled by `scale` and `offset`.
    ValueError
        If the shapes do not fit, `dst` is read-only or elements of it share memory, a
        buffer is closed, `stream` belongs to another device, `casting` is not a rule, or an
        element cannot be converted, such as a text that is not a number. It is an
        OverflowError where NumPy raises that.
    ImportError
        If `progress` is True and tqdm is not installed.
    CudaError
        If the copy failed, or `stream` is being captured.
    OSError
        If an end is a mapped file that has become shorter or cannot be read.

    Notes
    -----
    **Blocks** until the copy is done, with the GIL released. Ctrl-C ends it within a few
    pieces, and nothing is read or written afterwards. The call then waits at most a second
    for pieces that the driver already has. If they take longer, they go on, and both ends
    are kept alive until they are done. **Ordered after** all work that cumem knows of on
    the target or the source, except background copies of other bytes of them. Overlapping
    ends behave as if all of `src` were read first. Bytes between the elements of a strided
    target are never written.

    Examples
    --------
    >>> target = cumem.empty_device((2, 3))
    >>> cumem.copy(target, numpy.ones((3, 2)).T)  # any strides
    >>> back = numpy.empty((2, 3))
    >>> cumem.copy(back, target)
    >>> float(back.sum())
    6.0
    """

def copy_async(
    dst: object,
    src: object,
    *,
    stream: object = None,
    after: object = None,
    casting: _Casting | None = None,
    scale: SupportsFloat | None = None,
    offset: SupportsFloat | None = None,
) -> Transfer:
    """Start a copy between any two pieces of memory.

    Parameters
    ----------
    dst, src : Buffer, array, exporter
        As for `copy`.
    stream : stream, optional
        The stream in whose order the copy is made: once the stream is done, the bytes are
        at `dst`. If an end is device memory, the stream must belong to the device of the
        target or of the source. Without a stream the copy runs in the background. Then only
        its handle tells when it is complete, and waiting for a stream, event or device does
        not help.
    after : stream, or tuple or list of streams, optional
        The copy also comes after the work that is queued on these streams so far. With
        `after` and without `stream`, even a copy of ordinary memory is ordered without a
        wait in the call.
    casting, scale, offset : optional
        As for `copy`.

    Returns
    -------
    Transfer
        The handle of the copy, which keeps both ends alive.

    Raises
    ------
    TypeError
        If an end is not memory, `after` is not a stream, or the dtypes differ and `casting`
        does not allow it, as for `copy`.
    ValueError
        If the shapes do not fit, `dst` is read-only or elements of it share memory, a
        buffer is closed or `stream` belongs to another device.
    OSError
        If an end is a mapped file that has become shorter or cannot be read.
    CudaError
        If the copy failed before the call returned, or `stream` is being captured and the
        host has a part in the copy, which a graph cannot hold.

    Notes
    -----
    Without a stream the call never waits for other work, and the source must not be
    changed before the copy is done, even if it is ordinary memory. With a stream the call
    **blocks**, with the GIL released, if the processor takes part in the copy: until an
    ordinary source has been read, so that it may be changed, and until an ordinary target
    has been written. (Page-locked memory counts as ordinary here if its elements are
    converted, or if they lie apart and no kernel reaches them.) So the call waits for the
    stream's earlier work if the target is ordinary memory, or if an ordinary source does
    not fit into the page-locked pieces that the copy uses. Ctrl-C ends the waiting. Pieces
    that are queued by then are still copied. Page-locked and device memory must not be
    changed before the copy is done. **Ordered after** `after`, and after all work that
    cumem knows of on the target or the source, except background copies of other bytes of
    them. A conversion that NumPy makes (to and from times and text) needs the GIL in a
    thread of the copy engine. So code that holds the GIL while it waits for the copy, other
    than in a call of cumem, waits for ever.

    Examples
    --------
    >>> target = cumem.empty_device(1000)
    >>> stream = cumem.Stream()
    >>> transfer = cumem.copy_async(target, numpy.ones(1000), after=stream)
    >>> transfer.wait()  # Python went on meanwhile
    >>> transfer.done
    True
    """

def copy_many(
    pairs: Iterable[Sequence[object]],
    *,
    stream: object = None,
    casting: _Casting | None = None,
    progress: _Progress = None,
) -> None:
    """Make many copies with one call, and wait until all the data is there.

    Many small copies cost far less in one call than in separate calls. One kernel makes all
    copies between page-locked and device memory, and ordinary memory is gathered and sent
    in large pieces.

    Parameters
    ----------
    pairs : iterable of (dst, src)
        Tuples or lists of two ends that `copy` takes. All pairs are read and checked
        before anything is copied.
    stream : stream, optional
        The stream to copy on, of a device that has a target or a source; by default the
        current stream of the first such device.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        As for `copy`, for each pair; by default the dtypes of a pair must be equal.
    progress : bool or callable, optional
        As for `copy`, for the bytes of all pairs.

    Raises
    ------
    ImportError
        If `progress` is True and tqdm is not installed.
    TypeError
        If an item is not a pair, an end is not memory or the dtypes differ.
    ValueError
        If shapes do not fit, a target is read-only or elements of it share memory, a
        buffer is closed or `stream` belongs to another device. The text of this and of
        TypeError has the index of the pair.
    CudaError
        If a copy failed, or `stream` is being captured. Some of the other copies may have
        been made.

    Notes
    -----
    **Blocks** until all copies are done, with the GIL released; Ctrl-C interrupts it.
    **Ordered after** all work that cumem knows of on any end. The outcome is the same as if
    one pair were copied after the other. If a target overlaps any other end, the pairs
    really are copied one after the other. Otherwise all may be in flight at the same time.

    Examples
    --------
    >>> weights = [numpy.ones(i) for i in range(1, 4)]
    >>> places = [cumem.empty_device(i) for i in range(1, 4)]
    >>> cumem.copy_many(zip(places, weights))
    >>> places[2].to_numpy()
    array([1., 1., 1.])
    """

def copy_many_async(
    pairs: Iterable[Sequence[object]],
    *,
    stream: object = None,
    casting: _Casting | None = None,
) -> Transfer:
    """Start many copies with one call.

    Parameters
    ----------
    pairs : iterable of (dst, src)
        As for `copy_many`.
    stream : stream, optional
        The stream in whose order the copies are made, of a device that has a target or a
        source. Once the stream is done, the bytes are at all targets. Without a stream the
        copies run in the background, and only their handle tells when they are complete.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        As for `copy_many`.

    Returns
    -------
    Transfer
        One handle for all copies, which is done when the last copy is done. It keeps all
        ends alive.

    Raises
    ------
    TypeError
        If an item is not a pair, an end is not memory or the dtypes differ.
    ValueError
        If shapes do not fit, a target is read-only or elements of it share memory, a
        buffer is closed or `stream` belongs to another device. The text of this and of
        TypeError has the index of the pair.
    CudaError
        If the copies could not be started, or `stream` is being captured and the host has
        a part in a copy, which a graph cannot hold. Copies that were started still run, or
        are in the graph.

    Notes
    -----
    **Blocks** if `copy_async` would block for any of the pairs. **Ordered after** all
    work that cumem knows of on any end. Overlapping ends are treated as by `copy_many`.

    Examples
    --------
    >>> weights = [numpy.ones(i) for i in range(1, 4)]
    >>> places = [cumem.empty_device(i) for i in range(1, 4)]
    >>> cumem.copy_many_async(list(zip(places, weights))).wait()
    >>> places[2].to_numpy()
    array([1., 1., 1.])
    """

def copy_rows(
    dst: object,
    src: object,
    dst_rows: object = None,
    src_rows: object = None,
    *,
    stream: object = None,
    max_sms: int | None = None,
    progress: _Progress = None,
) -> None:
    """Copy rows that are chosen by their numbers, and wait until the data is there.

    This does ``dst[dst_rows[i]] = src[src_rows[i]]`` for each ``i``, along the first axis
    of both, as NumPy's ``dst[dst_rows] = src[src_rows]`` does.

    Parameters
    ----------
    dst, src : buffer, array or list of these
        The target and the source, in memory of any two kinds, mapped files included.
        Their rows must have equal dtypes and shapes, though the arrays may have different
        numbers of rows, and strides. Two lists of equal length stand for layers: the first
        array of `dst` gets rows of the first of `src`, and so on, by the same numbers.
    dst_rows, src_rows : sequence or array of int, shape (n,)
        The numbers of the rows in `dst` and in `src`, of any integer dtype. A negative
        number counts from the end. One of the two may be None, which means 0, 1, and so on.
        Numbers in memory of the host are copied before the call returns. Those in device
        memory are read in the order of the copy.
    stream : stream, optional
        The stream to copy on, of a device that has a target or a source; by default the
        current stream of the first such device.
    max_sms : int, optional
        The number of multiprocessors that the copy may keep busy, if one device reaches
        both ends. By default these are the few that saturate the bus, or all of them within
        device memory. A smaller number leaves more of them to other work.
    progress : bool or callable, optional
        As for `copy`, for the bytes of all rows.

    Raises
    ------
    IndexError
        If a number names no row. Nothing has been copied then. But if a device has read the
        numbers, all other rows have been copied.
    TypeError
        If `dst` or `src` is not memory or only one of them is a list, the numbers are not
        integers (bools are not), or both are None.
    ValueError
        If the dtypes or the shapes of rows differ, `dst_rows` and `src_rows` have different
        lengths, `dst_rows` in memory of the host has a row twice, the target is
        read-only or elements of it share memory, a buffer is closed, `max_sms` is below 1
        or `stream` belongs to another device. Nothing has been copied then.
    ImportError
        If `progress` is True and tqdm is not installed.
    CudaError
        If a copy failed, or `stream` is being captured. Some of the rows may have been
        copied.

    Notes
    -----
    **Blocks** until all rows are there, with the GIL released; Ctrl-C interrupts it.
    **Ordered after** all work that cumem knows of on any end. If rows that are written
    overlap rows that are read, all rows are read first. This takes additional memory of the
    size of the rows while the copy runs.

    Numbers in device memory stay there if one device reaches both ends. A kernel of that
    device then reads them, and the host does not wait for them first. So the host does not
    know which rows will be written. If the arrays overlap, all rows are therefore read
    first, and a row that `dst_rows` names twice gets bytes of either source row. With
    ordinary memory or files, the call first copies the numbers to the host.

    Examples
    --------
    >>> table = numpy.arange(12.0).reshape(6, 2)
    >>> chosen = cumem.empty_device((3, 2))
    >>> cumem.copy_rows(chosen, table, src_rows=[5, 0, -2])
    >>> chosen.to_numpy()
    array([[10., 11.],
           [ 0.,  1.],
           [ 8.,  9.]])
    """

def copy_rows_async(
    dst: object,
    src: object,
    dst_rows: object = None,
    src_rows: object = None,
    *,
    stream: object = None,
    max_sms: int | None = None,
    after: object = None,
) -> Transfer:
    """Start copying rows that are chosen by their numbers.

    Parameters
    ----------
    dst, src : buffer, array or list of these
        As for `copy_rows`.
    dst_rows, src_rows : sequence or array of int, shape (n,)
        As for `copy_rows`. Numbers in device memory are read when the copy runs, and at
        each replay of a graph that contains it. So change them only in the order of the
        copy's stream.
    stream : stream, optional
        The stream in whose order the rows are copied, of a device that has the target or
        the source. Once the stream is done, the bytes are at the target. Without a stream
        the copy runs in the background, and only its handle tells when it is complete.
    max_sms : int, optional
        As for `copy_rows`.
    after : stream or sequence of streams, optional
        Streams after whose work so far the rows are copied, as for `copy_async`.

    Returns
    -------
    Transfer
        One handle for all rows. It keeps all ends alive.

    Raises
    ------
    IndexError
        If a number names no row. Nothing is copied then. If a device has read the numbers,
        `Transfer.wait` raises it, and all other rows are copied. A graph leaves such rows
        out without an error.
    TypeError
        If `dst` or `src` is not memory or only one of them is a list, the numbers are not
        integers (bools are not), or both are None.
    ValueError
        If the dtypes or the shapes of rows differ, `dst_rows` and `src_rows` have different
        lengths, `dst_rows` in memory of the host has a row twice, the target is
        read-only or elements of it share memory, a buffer is closed, `max_sms` is below 1
        or `stream` belongs to another device. Nothing is copied then.
    CudaError
        If the copy could not be started, or `stream` is being captured and the host has a
        part in the copy, which a graph cannot hold, or has to fetch numbers from a device.

    Notes
    -----
    **Blocks** if `copy_async` would block for the same ends, or if the host has to fetch
    numbers from a device, as `copy_rows` says. **Ordered after** all work that cumem knows
    of on any end, and on numbers in device memory. Overlapping ends are treated as by
    `copy_rows`.

    Examples
    --------
    >>> cache = cumem.zeros((8, 4), "u1", "device")
    >>> saved = cumem.empty_pinned((2, 4), "u1")
    >>> cumem.copy_rows_async(saved, cache, src_rows=[6, 1]).wait()
    """

@overload
def take_rows(
    src: object,
    rows: object,
    out: _T,
    *,
    stream: object = ...,
    max_sms: int | None = ...,
    progress: _Progress = ...,
) -> _T: ...
@overload
def take_rows(
    src: object,
    rows: object,
    out: None = None,
    *,
    stream: object = None,
    max_sms: int | None = None,
    progress: _Progress = None,
) -> DeviceBuffer:
    """Copy rows that are chosen by their numbers to a new device buffer, and wait.

    Parameters
    ----------
    src : buffer or array
        The source, in memory of any kind.
    rows : sequence or array of int, shape (n,)
        The numbers of the rows, as `src_rows` of `copy_rows`.
    out : buffer or array, optional
        The target, with one row for each number; by default a new buffer. It is on the
        device that has the source or, if none has it, on the device of `stream` or of
        `rows`, or else on the current device.
    stream : stream, optional
        As for `copy_rows`.
    max_sms : int, optional
        As for `copy_rows`.
    progress : bool or callable, optional
        As for `copy_rows`.

    Returns
    -------
    DeviceBuffer or object
        `out`, or the new buffer, of shape ``(n, *src.shape[1:])``.

    Raises
    ------
    IndexError
        If a number names no row.
    TypeError
        If `src` or `out` is not memory, or `rows` are not integers.
    ValueError
        If `out` does not have one row for each number, or its rows have another dtype or
        shape.
    OutOfMemoryError
        If there is no room for the new buffer.
    CudaError
        If the copy failed.

    Notes
    -----
    **Blocks** until all rows are there, as `copy_rows` does, and is **ordered after** the
    same work.

    Examples
    --------
    >>> features = numpy.arange(12.0).reshape(6, 2)
    >>> cumem.take_rows(features, [4, 1]).to_numpy()
    array([[8., 9.],
           [2., 3.]])
    """

@final
class RowPlan:
    """Rows that are copied again and again, all layers together or one by one.

    A plan does once the work that `copy_rows` does at each call before it copies. It reads
    the arrays, pairs them, checks the numbers of the rows, and puts these where the copy
    reads them. Its copies then only do ``dsts[k][dst_rows[i]] = srcs[k][src_rows[i]]`` for
    each layer ``k`` and each ``i``.

    Parameters
    ----------
    dsts, srcs : buffer, array or list of these
        The targets and the sources, as `dst` and `src` of `copy_rows`. Two lists of equal
        length are layers, and a single array is one layer.
    dst_rows, src_rows : sequence or array of int, shape (n,)
        The numbers of the rows, as for `copy_rows`. Numbers in memory of the host are read
        now. Numbers in device memory are read again at each copy.
    max_sms : int, optional
        As for `copy_rows`.

    Raises
    ------
    IndexError
        If a number in memory of the host names no row.
    TypeError
        If `dsts` or `srcs` is not memory or only one of them is a list, the numbers are not
        integers (bools are not), or both are None.
    ValueError
        If the dtypes or the shapes of rows differ, `dst_rows` and `src_rows` have different
        lengths, `dst_rows` in memory of the host has a row twice, a target is
        read-only or elements of it share memory, a buffer is closed or `max_sms` is below
        1.
    OutOfMemoryError
        If there is no page-locked memory for the numbers.

    Notes
    -----
    The constructor copies no rows. It **blocks** only while unfinished transfers still
    write numbers that the host reads.

    The plan keeps its arrays alive until `close`, and ``free()`` of a buffer among them
    raises a BufferError until then. A plan may be used by several threads at once. It
    cannot be pickled or copied, and in a forked child its methods raise RuntimeError.

    Work that another library has queued on its own arrays comes before the copies if it was
    queued before the plan was made. Work that was queued later comes before them only if
    its stream is `stream` or one of `after`.

    A graph can capture the copies if one device reaches both ends and its kernel reads the
    numbers, in device memory or where the plan has put them. The memory that the graph uses
    lives as long as the process, even if the plan is gone.

    Examples
    --------
    >>> cache = [cumem.zeros((8, 2), "f4", "device") for _ in range(3)]
    >>> saved = [cumem.full((4, 2), layer, "f4", "pinned") for layer in range(3)]
    >>> plan = cumem.RowPlan(cache, saved, [5, 1], [0, 3])
    >>> compute = cumem.Stream()
    >>> for layer, transfer in enumerate(plan.copy_layers()):
    ...     transfer.order(compute)  # What compute gets from now on finds the layer.
    >>> transfer.wait()
    >>> cache[2].to_numpy()[[5, 1]]
    array([[2., 2.],
           [2., 2.]], dtype=float32)
    """

    def __new__(
        cls,
        dsts: object,
        srcs: object,
        dst_rows: object = None,
        src_rows: object = None,
        *,
        max_sms: int | None = None,
    ) -> Self: ...
    @property
    def layer_count(self) -> int:
        """The number of layers, which is 1 for single arrays."""
    @property
    def nbytes(self) -> int:
        """The number of bytes that a copy of all layers moves."""
    @property
    def closed(self) -> bool:
        """Whether `close` or ``shutdown()`` has closed it."""
    def copy(
        self,
        *,
        stream: object = None,
        layer: int | None = None,
        progress: _Progress = None,
    ) -> None:
        """Copy the rows of all layers, or of one, and wait until all the data is there.

        Parameters
        ----------
        stream : stream, optional
            The stream to copy on, as for `copy_rows`.
        layer : int, optional
            The layer whose rows are copied. A negative number counts from the end. By
            default the rows of all layers are copied.
        progress : bool or callable, optional
            As for `copy_rows`.

        Raises
        ------
        IndexError
            If there is no such layer, or if the device has read a number that names no row.
            All other rows have been copied in the second case.
        ValueError
            If the plan or a buffer is closed, or `stream` belongs to another device.
        BufferError
            If the memory of another library's array has moved since the plan was made.
        ImportError
            If `progress` is True and tqdm is not installed.
        CudaError
            If a copy failed, or `stream` is being captured. Some of the rows may have been
            copied.

        Notes
        -----
        **Blocks** and is **ordered after** other work as `copy_rows` is.
        """
    def copy_async(
        self,
        *,
        stream: object = None,
        after: object = None,
        layer: int | None = None,
    ) -> Transfer:
        """Start copying the rows of all layers, or of one.

        Parameters
        ----------
        stream : stream, optional
            The stream in whose order the rows are copied, as for `copy_rows_async`. Without
            one the copy runs in the background.
        after : stream or sequence of streams, optional
            Streams after whose work so far the rows are copied, as for `copy_async`.
        layer : int, optional
            As for `copy`.

        Returns
        -------
        Transfer
            One handle for all rows. It keeps the arrays of the plan alive.

        Raises
        ------
        IndexError
            If there is no such layer. `Transfer.wait` raises it if the device has read a
            number that names no row.
        ValueError
            If the plan or a buffer is closed, or `stream` belongs to another device.
        BufferError
            If the memory of another library's array has moved since the plan was made.
        CudaError
            If the copy could not be started, or `stream` is being captured and the host has
            a part in the copy.

        Notes
        -----
        **Blocks** and is **ordered after** other work as `copy_rows_async` is.
        """
    def copy_layers(
        self, *, stream: object = None, after: object = None
    ) -> list[Transfer]:
        """Start copying the rows of all layers, one layer after the other.

        A stream that computes with the layers waits for each layer by `Transfer.order`,
        while the host does not wait. So the first layers can be used while the last ones
        are still being copied.

        Parameters
        ----------
        stream : stream, optional
            The stream in whose order the rows are copied, as for `copy_async`.
        after : stream or sequence of streams, optional
            Streams after whose work so far the rows are copied, as for `copy_async`.

        Returns
        -------
        list of Transfer
            One handle for each layer, in their order.

        Raises
        ------
        ValueError
            If the plan or a buffer is closed, or `stream` belongs to another device.
        BufferError
            If the memory of another library's array has moved since the plan was made.
        CudaError
            If a copy could not be started. The copies of earlier layers still run.

        Notes
        -----
        **Blocks** and is **ordered after** other work as `copy_async` is, for each layer.
        Within a capture the handles do not order the layers, because they are done at once.
        Call ``copy_async(layer=k)`` there, and record an event after each call.

        Examples
        --------
        >>> tables = [numpy.arange(6.0).reshape(3, 2) + layer for layer in range(2)]
        >>> got = [cumem.empty_device((1, 2)) for _ in tables]
        >>> first, second = cumem.RowPlan(got, tables, src_rows=[2]).copy_layers()
        >>> second.wait()
        >>> got[0].to_numpy(), got[1].to_numpy()
        (array([[4., 5.]]), array([[5., 6.]]))
        """
    def check(self) -> None:
        """Raise an IndexError if a number in device memory named no row.

        This covers all copies of the plan that have run since the last check. These include
        copies in a graph, whose errors nothing else reports, and copies that have already
        raised the error.

        Raises
        ------
        IndexError
            If there was such a number. The next check covers only later copies.
        ValueError
            If the plan is closed.

        Notes
        -----
        Never blocks, so wait for the copies first. Copies that still run are covered by a
        later check.

        Examples
        --------
        >>> table = cumem.array(numpy.arange(4.0), kind="pinned")
        >>> rows = cumem.array([1, 4], kind="device")
        >>> plan = cumem.RowPlan(cumem.zeros(2, kind="device"), table, src_rows=rows)
        >>> try:
        ...     plan.copy()
        ... except IndexError as error:
        ...     print(str(error)[:15])
        cumem: src_rows
        >>> try:
        ...     plan.check()
        ... except IndexError as error:
        ...     print(str(error)[:15])
        cumem: src_rows
        >>> plan.check()  # The error is told once.
        """
    def close(self) -> None:
        """Drop the arrays and the numbers. Copies that have been started go on.

        A second call does nothing. Later copies and checks raise a ValueError.
        """
    def __enter__(self) -> Self:
        """Return the plan itself.

        Raises
        ------
        ValueError
            If the plan is closed.
        """
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None:
        """Close the plan, as `close` does."""
    def __reduce_ex__(self, protocol: SupportsIndex, /) -> Never:
        """Refuse a pickle or a copy, since a plan is bound to memory of this process.

        Raises
        ------
        TypeError
            Always.
        """

def prefetch_pages(
    buffers: Iterable[ManagedBuffer],
    to: object = None,
    stream: object = None,
) -> None:
    """Move the pages of many buffers to a device or to the host ahead of use.

    Parameters
    ----------
    buffers : iterable of ManagedBuffer
        The buffers, among which may be slices of one buffer.
    to : Device, int or str, optional
        As for `ManagedBuffer.prefetch_pages`; by default cumem's current device.
    stream : Stream or other stream object, optional
        The stream that the moves are queued on; by default the current stream of that
        device, or of the first buffer's device if the pages go to the host.

    Raises
    ------
    TypeError
        If one of the buffers is not a `ManagedBuffer`, or `to` or `stream` has the wrong
        type.
    ValueError
        If there is no such device, or a buffer is closed.
    CudaError
        If the driver refuses, as for `ManagedBuffer.prefetch_pages`. Some pages may be
        moving by then.

    Notes
    -----
    Never **blocks**: the moves are queued. They are **ordered after** work on `stream`, but
    not among each other. From CUDA 13.0 on, one call of the driver moves all buffers,
    unless `stream` is the legacy default stream. Otherwise there is one call for each
    buffer.

    Examples
    --------
    >>> buffers = [cumem.empty_managed(1 << 20, "u1") for _ in range(3)]
    >>> cumem.prefetch_pages(buffers, 0)
    >>> buffers[2].prefetch_location
    <cumem.Device 0, emulated>
    """

def current_stream(device: object = None) -> Stream:
    """Return the stream that functions use when none is given.

    Parameters
    ----------
    device : Device, int or str, optional
        The device whose stream it is; by default cumem's current device.

    Returns
    -------
    Stream
        The stream of the innermost ``with stream:`` block of this thread or task whose
        stream belongs to the device. If there is none, it is the device's legacy default
        stream, with which the default streams of PyTorch and CuPy are ordered.

    Raises
    ------
    ValueError
        If the device does not exist.
    CudaError
        If the driver cannot be opened.

    Examples
    --------
    >>> with cumem.Stream() as stream:
    ...     cumem.current_stream() == stream
    True
    """

def current_device() -> Device:
    """Return the device that functions use when none is given.

    Returns
    -------
    Device

    Raises
    ------
    CudaError
        If the driver cannot be opened.

    Notes
    -----
    It is the first of these devices that exists:

    1. the device of the innermost ``with device:`` block of this thread or task;
    2. the device that `set_current_device` chose in this thread;
    3. for tensors of PyTorch, PyTorch's current device, if PyTorch has begun to use CUDA:
       in calls that are given a tensor (`array`, `register`, `chunks`, ...) or make tensors
       (``load_safetensors(framework="torch")``), in `prefetch`, `to_device`,
       `PinnedCollate` and `cumem.integrations.torch`;
    4. CUDA's current device of this thread, which PyTorch, CuPy and Numba set, and which is
       0 in a thread that has not used CUDA.

    So each thread has its own current device, as in CUDA. A new thread begins with CUDA's
    current device, and does not inherit the choice of its parent, unless it runs in a copy
    of the parent's context (``contextvars.copy_context().run``), which has the parent's
    blocks. Threads that cumem starts itself work for the device that was current when they
    were started. The device is determined when a call is made, so an iterator of `chunks`
    or `prefetch` keeps its device.

    This function creates no context. If only one device is visible, it does not call the
    driver. If there are several, each call that names no device calls the driver once in
    step 4, which takes about as long as calling an empty Python function.

    Examples
    --------
    >>> cumem.current_device().index
    0
    """

def set_current_device(device: object, /) -> None:
    """Choose the device that functions use when none is given.

    Parameters
    ----------
    device : Device, int, str or None
        The device. None undoes the choice, so that the other rules of `current_device`
        apply again.

    Raises
    ------
    TypeError
        If `device` is not one of these.
    ValueError
        If the device does not exist.
    CudaError
        If the driver cannot be opened.

    Notes
    -----
    The choice applies only to the calling thread, until `shutdown`, and not inside ``with
    device:`` blocks. It neither changes CUDA's current device nor creates a context.

    Examples
    --------
    >>> cumem.set_current_device(0)
    >>> cumem.current_device().index
    0
    """

def _shutdown(reset_devices: bool, /) -> None:
    """Do the work of `cumem.shutdown`."""

def _device(object: object, name: str, about: object = None, /) -> Device:
    """Return the Device that the argument called `name` means.

    If cumem's current device was not chosen, None and "cuda" mean PyTorch's current device
    for a tensor in `about`, or if `about` is True.
    """

def _is_host_only() -> bool:
    """Return True in a forked child of a process that used the driver.

    In such a child only work on the host is possible.
    """

def _is_emulated() -> bool:
    """Return True if emulated devices are open. This opens nothing."""

def _hold_stream(stream: object, /) -> None:
    """Hold an emulated stream shut, so that all work that is queued on it waits.

    Raises
    ------
    RuntimeError
        If no emulated device is open.
    """

def _release_stream(stream: object, /) -> None:
    """Let an emulated stream that was held shut go on.

    Raises
    ------
    RuntimeError
        If no emulated device is open.
    """

def _read_backend() -> tuple[Literal["cuda", "emulated"], str | None]:
    """Return the name of the open backend, and the reason for emulation or None."""

def _wrap_stream(obj: object, device: int, lasts: bool, /) -> Stream:
    """Make a Stream from another library's stream.

    `device` is the device of a default stream, or -1 if that is not known. `lasts` says
    that the stream exists as long as the object.
    """

def _driver_device_count() -> int:
    """Ask the driver how many devices there are now."""

def _driver_version() -> int:
    """Return the newest version of CUDA that the driver serves, such as 12080 for 12.8."""

def _runtime_version() -> int:
    """Return the version of the linked CUDA runtime, such as 12090 for 12.9."""

def _oldest_drivers() -> dict[str, int]:
    """Return the oldest driver that has each CUDA call of the core, by the call's name.

    A driver is a number, such as 12020 for 12.2.
    """

def _device_attribute_names() -> tuple[str, ...]:
    """Return the names that `_device_attribute` knows."""

def _device_attribute(device: int, name: str, /) -> int | None:
    """Return an attribute of a device, or None if the driver does not know it."""

def _can_access_peer(device: int, peer: int, /) -> bool:
    """Return True if one device can reach the memory of the other."""

def _device_memory(device: int, /) -> tuple[int, int]:
    """Return how many bytes of a device are free, and how many there are in all."""

@final
@type_check_only
class _DeviceFacts(structseq[Any]):
    """The facts about a device that the driver reports."""

    @property
    def name(self) -> bytes:
        """The name of the product, as the driver's bytes."""
    @property
    def uuid(self) -> bytes:
        """The 16 bytes of the UUID."""
    @property
    def pci_bus_id(self) -> str:
        """The place on the bus, such as ``"0000:1b:00.0"``."""
    @property
    def total_nbytes(self) -> int:
        """The number of bytes of memory on the device."""

def _describe_device(device: int, /) -> _DeviceFacts:
    """Read the facts about a device from the driver."""

def _synchronize_device(device: int, /) -> None:
    """Wait for all work of a device. Ctrl-C ends the wait."""

@final
@type_check_only
class _PoolConfig(structseq[Any]):
    """How a pool was made."""

    @property
    def kind(self) -> _Kind:
        """The kind of its memory."""
    @property
    def device(self) -> Device:
        """The device that has the memory, or whose context page-locks it."""
    @property
    def flags(self) -> int:
        """The CUDA flags with which its memory is allocated."""
    @property
    def numa_node(self) -> int:
        """The NUMA node that was requested for its pages; -1 means near the device."""
    @property
    def is_plain(self) -> bool:
        """Whether its segments are plain allocations of the driver."""
    @property
    def fork(self) -> int:
        """What forked children get, as a number of ``cm_fork`` in ``csrc/pool/pool.h``."""
    @property
    def idle_trim_ns(self) -> int:
        """The time after which unused cached memory goes back; 0 means never."""
    @property
    def is_closed(self) -> bool:
        """Whether nothing is allocated any more."""
    @property
    def number(self) -> int:
        """The number in its name; 0 means a default pool."""
    @property
    def spills(self) -> bool:
        """Whether idle buffers go to pinned memory when memory is short."""
    @property
    def spill_limit(self) -> int | None:
        """The most pinned memory for spilled buffers, or None without such a limit."""

@final
@type_check_only
class _PoolFacts(structseq[Any]):
    """A pool and its counters at one moment."""

    @property
    def address(self) -> int:
        """A number that tells pools apart while they live. For the memory that `register`
        has locked, which is described as if it were a pool, it is 0.
        """
    @property
    def serial(self) -> int:
        """A number that no other pool of the process ever gets."""
    @property
    def number(self) -> int:
        """The number as in `_PoolConfig`; the largest ones mean cumem's internal pools."""
    @property
    def flags(self) -> int:
        """The flags as in `_PoolConfig`."""
    @property
    def kind(self) -> _Kind:
        """The kind of its memory."""
    @property
    def device(self) -> int:
        """The index of the device."""
    @property
    def limit(self) -> int | None:
        """The most bytes that it may hold; None if there is no limit."""
    @property
    def counters(self) -> dict[str, int]:
        """The counters by their names in `PoolStats`."""

@final
@type_check_only
class _PoolBlock(structseq[Any]):
    """A block of a pool."""

    @property
    def segment(self) -> int:
        """The number of its segment in the list."""
    @property
    def address(self) -> int:
        """The address at which it begins, as the device sees it."""
    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
    @property
    def requested_nbytes(self) -> int:
        """The number of requested bytes."""
    @property
    def state(self) -> int:
        """The state, as a number of ``cm_block_state`` in ``csrc/pool/pool.h``."""

def _pools(window: bool = False, /) -> list[_PoolFacts]:
    """Describe all pools; with `window`, with the peaks since the last such call."""

def _is_memory_in_flight(device: int, nbytes: int, /) -> bool:
    """Return whether a device's current pool could get this many bytes by waiting for work.

    This is so if the pool would have to grow for them, although at least as many bytes were
    freed on which work is still running.
    """

def _reserve(device: int, nbytes: int, /) -> None:
    """Prepare a device's current pool for many buffers with this many bytes in total.

    If the pool has hardly any free memory, it grows by the total at once. Nothing happens
    if there is not enough memory.
    """

def _default_pool(kind: str, device: int, /) -> Pool:
    """Make a Pool object for the default pool of a device."""

def _set_pool_type(cls: type[Pool], /) -> None:
    """Set the type that all Pool objects have from now on."""

def _sleep(pool: _Pool, keep: bool, fds: tuple[int, ...], /) -> _FileFailure | None:
    """Put a pool of device memory to sleep, with or without the contents of its blocks.

    The contents go to the empty files `fds`, or to page-locked memory if there are no
    files. Returns the failure of a file, or None. After a failure or an exception the pool
    is awake as before, unless `_is_asleep` says that it sleeps.
    """

def _set_spare(pool: _Pool, parts: list[int], /) -> None:
    """Set the bytes that `_sleep` need not copy, as the address and length of each part.

    The parts are in order of address. They are forgotten when the pool wakes or `_sleep`
    fails.
    """

def _wake(pool: _Pool, keep_host: bool, fds: tuple[int, ...], /) -> _FileFailure | None:
    """Wake a pool, with the contents that `_sleep` has written to the same files.

    With `keep_host` the page-locked memory that held the contents is kept for the next
    time. Returns the failure of a file, or None. After a failure or an exception the pool
    sleeps as before.
    """

def _is_asleep(pool: _Pool, /) -> bool:
    """Return whether a pool sleeps."""

def _forget_saved(pool: _Pool, /) -> None:
    """Give up the contents of a sleeping pool that nobody will wake."""

def _trim(
    pool: _Pool | None, kind: str | None, device: int, keep: int, wait: bool, /
) -> int:
    """Trim a pool, or all pools of a kind and of a device (-1 for all devices).

    Up to `keep` bytes of free memory stay. Returns the number of bytes that were given
    back.
    """

def _numpy_handler(min_nbytes: int, pool: Pool | None, /) -> CapsuleType:
    """Make a memory handler for NumPy's arrays.

    Arrays of at least `min_nbytes` get memory of the pool. If that is None, all arrays get
    memory from NumPy's own allocator.
    """

def _numpy_enter(handler: CapsuleType, /) -> None:
    """Make `handler` NumPy's memory handler in this context.

    Raises
    ------
    RuntimeError
        If it was entered before.
    """

def _numpy_leave(handler: CapsuleType, /, *exc: object) -> None:
    """End the block of a handler in every context.

    In a context where it was NumPy's handler, the innermost outer handler whose block has
    not ended takes its place.
    """

def _numpy_enable(handler: CapsuleType | None, /) -> None:
    """Make NumPy's default handler allocate as this one does, in every thread.

    With None, it allocates as NumPy itself does.
    """

def _lend(pool: _Pool, /) -> None:
    """Lend a pool of device memory to functions that other libraries call."""

def _open_desk(pool: _Pool, /) -> int | None:
    """Lend a pool of device memory to one function that another library calls.

    Returns the function's number, or None if all functions are taken. The pool keeps the
    number until `_close_desk` was called once for each call of this function.
    """

def _close_desk(number: int, /) -> None:
    """End one call of `_open_desk`, once all memory is back."""

def _retry(attempt: object, callback: object, /) -> bool:
    """Try an allocation again, after calling `callback` unless that is None.

    Returns True if no more tries are needed.
    """

def _processors() -> tuple[int, int]:
    """Return how many threads of this process can run at once, and NUMA nodes with memory.

    The nodes are a number with one bit for each.
    """

def _limit(kind: str, device: int, new: int | None = ..., /) -> int | None:
    """Return the limit of a kind on a device, after setting it to `new` if it is given.

    None means that there is no limit. A share of a device's memory stays a share until the
    driver is started.
    """

@final
@type_check_only
class _EndFacts(structseq[Any]):
    """Memory at an end of a copy."""

    @property
    def kind(self) -> str:
        """The kind of the memory, or ``"pageable"``."""
    @property
    def is_locked(self) -> bool:
        """Whether it is page-locked or on a device, so that a copy may outlive the call."""
    @property
    def is_whole(self) -> bool:
        """Whether no edge of a registration lies within the memory."""
    @property
    def device(self) -> int:
        """The index of its device; -1 means ordinary memory."""

@final
@type_check_only
class _CopyFacts(structseq[Any]):
    """The facts about a copy before it is made."""

    @property
    def route(self) -> str:
        """The route, as in `Transfer.route`; ``"nothing"`` means that no bytes move."""
    @property
    def nbytes(self) -> int:
        """The number of bytes to move, without the repeats of a broadcast source."""
    @property
    def dst(self) -> _EndFacts:
        """The target."""
    @property
    def src(self) -> _EndFacts:
        """The source."""
    @property
    def device(self) -> int:
        """The index of the device whose stream does the work; -1 means the host."""
    @property
    def src_device(self) -> int:
        """The index of the device that has the source, or `device` if none has it."""
    @property
    def pieces(self) -> int:
        """The number of pieces that the copy is cut into."""
    @property
    def piece_nbytes(self) -> int:
        """The number of bytes of the largest piece."""
    @property
    def axis(self) -> int:
        """The axis of the target along which it is cut; -1 means that it is not cut."""
    @property
    def threads(self) -> int:
        """The number of threads of the host that work on a piece; 0 means none."""
    @property
    def chunks(self) -> int:
        """The number of page-locked slots; 0 means that the copy uses none."""
    @property
    def run_nbytes(self) -> int:
        """The number of bytes in a run, which are contiguous at both ends."""
    @property
    def loops(self) -> int:
        """The number of loops over such runs; 0 means that each end is one run."""
    @property
    def is_quick(self) -> bool:
        """Whether the calling thread makes the copy at once."""
    @property
    def is_bounced(self) -> bool:
        """Whether a quick copy goes through a separate page-locked block."""
    @property
    def is_broadcast(self) -> bool:
        """Whether elements of the source are repeated."""
    @property
    def rearranges_on_device(self) -> bool:
        """Whether pieces have the order of the source, and the device transposes them."""
    @property
    def is_download(self) -> bool:
        """Whether the bytes come to the host through page-locked blocks."""
    @property
    def is_fresh(self) -> bool:
        """Whether pages of the target do not exist yet."""
    @property
    def overlaps(self) -> bool:
        """Whether the source is read whole before the target is written."""
    @property
    def converts_on_device(self) -> bool:
        """Whether a device converts the elements."""
    @property
    def casts(self) -> bool:
        """Whether NumPy converts the elements."""
    @property
    def from_dtype(self) -> str | None:
        """The dtype that the copy threads or a device convert from, or None."""
    @property
    def to_dtype(self) -> str | None:
        """The dtype that the elements are converted to, or None."""
    @property
    def staged_up_nbytes(self) -> int:
        """The least number of bytes at which copies to a device go in pieces."""
    @property
    def staged_down_nbytes(self) -> int:
        """The least number of bytes at which copies from a device go in pieces."""

def _explain(
    dst: object,
    src: object,
    stream: object,
    blocking: bool,
    casting: object = None,
    scale: object = None,
    offset: object = None,
    /,
) -> _CopyFacts:
    """Plan a copy as `copy` or `copy_async` would make it, without making it."""

def _set_tuning(values: dict[str, int], /) -> None:
    """Set all of these values, and give the others their defaults.

    If one of the values is refused, nothing changes.
    """

@final
@type_check_only
class _TuningValue(structseq[Any]):
    """A value of the settings of copies."""

    @property
    def now(self) -> int:
        """The value for copies that begin now."""
    @property
    def least(self) -> int:
        """The smallest value that is allowed."""
    @property
    def most(self) -> int:
        """The largest value that is allowed."""

def _read_tuning(opens: bool, /) -> dict[str, _TuningValue]:
    """Return the settings of copies, by their names.

    With `opens` the environment is read first, unless it was read before.
    """

def _flush_cache(obj: object, /) -> None:
    """Flush the bytes of an object with the buffer protocol from the processor's caches."""

@final
@type_check_only
class _HostMemory(structseq[Any]):
    """Memory of the host. A member is None if there is no limit or it is not known."""

    @property
    def total_nbytes(self) -> int | None:
        """The bytes of memory that the machine has."""
    @property
    def available_nbytes(self) -> int | None:
        """The bytes that this process can still get now: from the machine, in its control
        groups, and under ``ulimit -v``."""
    @property
    def cgroup_nbytes(self) -> int | None:
        """The smallest limit of the process's control groups and those above."""
    @property
    def usable_nbytes(self) -> int | None:
        """The bytes that the process may use: the memory of the machine, or less if the
        groups allow less."""

def _host_memory() -> _HostMemory:
    """Read the amount of memory that the host has, and that the process may use."""

@final
@type_check_only
class _FileFailure(structseq[Any]):
    """A failed read or write of a file."""

    @property
    def error(self) -> int:
        """The errno of the system; 0 means that the file ends early."""
    @property
    def offset(self) -> int:
        """The offset at which the failure happened, or at which the file ends."""
    @property
    def index(self) -> int:
        """The number of the end that was being moved."""

@final
@type_check_only
class _FileOutcome(structseq[Any]):
    """The result of a call that reads or writes a file."""

    @property
    def nbytes(self) -> int:
        """The number of bytes that were moved; 0 if another member says why not."""
    @property
    def own_maps(self) -> list[int]:
        """The numbers of the ends that are maps of bytes which the call touches. If there
        are any, nothing was moved, because these would change during the call."""
    @property
    def failure(self) -> _FileFailure | None:
        """The failure of the file, or None."""
    @property
    def checksums(self) -> list[int]:
        """The CRC-32 of each run of ranges without a gap, if checksums were requested."""

def _transfer_file(
    open: Callable[[], int],
    offsets: tuple[int, ...],
    memories: tuple[object, ...],
    writes: bool,
    cuts: bool,
    sums: bool,
    stream: object,
    direct: int,
    progress: _Progress,
    /,
) -> _FileOutcome:
    """Read or write a file at `offsets`, from or to the memory for each of them.

    cumem/files/raw.py has read and checked the arguments. `open` returns the descriptor,
    and is called once everything else is checked. With `cuts` the file will end with the
    last range, so the bytes behind that count as touched. With `sums` a call that writes
    also computes checksums.
    """

def _write_files(
    fds: tuple[int, ...],
    counts: tuple[int, ...],
    offsets: tuple[int, ...],
    memories: tuple[object, ...],
    direct: int,
    progress: _Progress,
    /,
) -> _FileFailure | None:
    """Write several new files at the same time, at most 16.

    `memories` and `offsets` begin with the items of the first file, followed by those of
    the second, and so on. `counts` has the number of items of each file. Returns the
    failure of one of the files, or None.
    """

def _write_file_async(
    fd: int,
    offsets: tuple[int, ...],
    memories: tuple[object, ...],
    direct: int,
    name: object,
    temporary: bytes,
    target: bytes,
    permissions: int,
    first: Transfer | None,
    new: object,
    /,
) -> Transfer:
    """Write memory to a new file in the background, and let the file replace another one.

    `temporary` is the path of the file. The file is renamed to the absolute path `target`
    once it has all bytes and its permissions, and is on the disk. If the transfer fails or
    is cancelled, the file is removed. As soon as the file belongs to the transfer, and the
    caller must not remove it any more, the attribute `is_left` of `new` becomes True.
    Errors call the file `name`. The transfer begins when the transfers of earlier calls are
    done. If the transfer `first` has failed, this one fails in the same way.

    If `temporary` is empty, the call writes only a part of the file. The transfer then
    waits for no earlier one, and the file remains the caller's.
    """

def _maps_file(open: Callable[[], int], offset: int, memory: object, /) -> bool:
    """Return whether memory is a map of the file, of bytes from `offset` on."""

@final
@type_check_only
class _LockedPages(structseq[Any]):
    """Foreign memory that `_register` has page-locked."""

    @property
    def buffer(self) -> PinnedBuffer | MappedBuffer:
        """A buffer over the memory."""
    @property
    def nbytes(self) -> int:
        """The number of its bytes, from the lowest one to the highest."""

def _register(
    memory: Buffer | np.ndarray[Any, Any],
    device: int,
    mapped: bool,
    read_only: bool,
    lock_read_only: bool,
    /,
) -> _LockedPages:
    """Page-lock the memory of an array or buffer in place."""

@final
@type_check_only
class _SharedFacts(structseq[Any]):
    """The contents of a pickle of a buffer from `cumem.shared_pinned`, or of a view."""

    @property
    def name(self) -> str:
        """The name of the memory."""
    @property
    def form(self) -> str:
        """A text of the dtype and shape, in which all users of the name must agree."""
    @property
    def nbytes(self) -> int:
        """The number of its bytes, which may be more than the view has."""
    @property
    def token(self) -> bytes:
        """The 16 bytes that distinguish the memory from other memory of the same name."""
    @property
    def offset(self) -> int:
        """The place of element 0 of the view, in bytes from the first byte on."""

def _shared_pinned(
    name: str,
    form: str,
    nbytes: int,
    token: bytes | None,
    numa_node: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    readonly: bool,
    /,
) -> PinnedBuffer:
    """Open memory by its name, or make it, and return a buffer over a part of it.

    With a `token` this opens only the memory that has the token, and makes none.
    `numa_node` is -1 for any node. Offset and strides are in bytes.
    """

def _unregister(buffer: Buffer, defers: bool, /) -> None:
    """Unlock memory, for ``Registration.close()``.

    With `defers`, memory that is exported is unlocked when its last export ends. For a
    buffer that was closed before, this only waits until no transfer uses it.
    """

def _is_memory(obj: object, /) -> bool:
    """Return whether an object is memory, and not a value that copy() makes an array of."""

@final
@type_check_only
class _CopyEnd(structseq[Any]):
    """An object as `copy` would read it."""

    @property
    def memory(self) -> Buffer | NDArray[Any]:
        """The memory, as a Buffer or an array."""
    @property
    def place(self) -> int:
        """The place of element 0, by which all views of one memory can be compared."""
    @property
    def is_locked(self) -> bool:
        """Whether the memory is page-locked in one piece, or on a device."""

def _read_end(obj: object, dtype: np.dtype[Any] | None, stream: object, /) -> _CopyEnd:
    """Read anything that `copy` takes. Values become an array of `dtype`."""

@final
@type_check_only
class _CopyParts(structseq[Any]):
    """Copies that begin together."""

    @property
    def number(self) -> int:
        """A number from which the memory recognises the copies that belong together."""
    @property
    def before(self) -> int:
        """The number of the first transfer that none of these copies waits for."""
    @property
    def is_captured(self) -> bool:
        """Whether the stream is being captured."""
    @property
    def held(self) -> object:
        """While this object lives, the ends cannot be freed, and ``shutdown()`` fails."""

def _begin_parts(stream: object, ends: tuple[object, ...], /) -> _CopyParts:
    """Begin copies on `stream` whose ends are in the memory of `ends`."""

def _end_parts(number: int, stream: object, held: object, /) -> None:
    """End copies that began together.

    The caller has ordered `stream` after all of them or, if it is None, has waited for
    them. So the memory of the ends, which `held` keeps, need remember only that stream
    among those that these copies used.
    """

def _copy_part(
    dsts: tuple[object, ...],
    src: object,
    stream: object,
    on_engine_stream: bool,
    after: tuple[object, ...],
    number: int,
    before: int,
    casting: str | None,
    /,
) -> list[Transfer]:
    """Begin a copy to all of `dsts` as copy_async() does; return a Transfer for each.

    The copy is not ordered after transfers whose numbers are `before` or later. With
    `on_engine_stream` it is not made on `stream`, which the caller will order after it.
    """

def _prefetch_rows(tile: ManagedBuffer, device: int | None, stream: object, /) -> None:
    """Prefetch a tile in parts whose elements have no other memory between them.

    The parts go to a device or, if `device` is None, to the host.
    """

def _at_exit(others_run: bool, /) -> None:
    """Wait for unfinished transfers, and end the worker threads if no other thread may be
    using the engine.
    """

def _after_fork() -> None:
    """Replace, in a forked child, the backend that the parent opened by one that works."""

def _nvtx_listens() -> bool:
    """Return whether a profiler that receives NVTX ranges is attached."""

def _recorder_open(capacity: int, least_nbytes: int, tags: object, /) -> None:
    """Begin to record events of memory, with room for at least `capacity` rows.

    Events of at least `least_nbytes` are recorded with their stacks. `tags` is None, or the
    ContextVar that has the number of the current tag.
    """

def _recorder_close() -> None:
    """Stop recording, and drop all rows."""

def _recorder_count() -> int:
    """Return the number of rows so far, in all recordings together."""

def _recorder_read(begin: int, end: int, /) -> tuple[int, bytes]:
    """Read the rows from number `begin` up to `end`.

    They have the layout of EVENT in cumem/recording/events.py. Returns the number of the
    first row that still exists, and the rows. Rows before that one have no meaning.
    """

@final
@type_check_only
class _LivingBlock(structseq[Any]):
    """Memory that is in use, or that `register` has locked."""

    @property
    def address(self) -> int:
        """The address at which it begins, on the host if the host can use it."""
    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
    @property
    def requested_nbytes(self) -> int:
        """The number of bytes that were asked for."""
    @property
    def pool_serial(self) -> int:
        """The serial of its pool; 0 means that it belongs to no pool."""
    @property
    def kind(self) -> int:
        """The number of its kind in KINDS of ``cumem/recording/events.py``."""
    @property
    def device(self) -> int:
        """The index of the device."""

def _living() -> list[_LivingBlock]:
    """List the live blocks of all pools, and foreign memory that is locked."""

def _recorder_stacks(begin: int, /) -> list[list[tuple[object, int]]]:
    """Return all stacks from that number on.

    A stack is a list of code objects and places in their bytecode, the innermost first.
    """

@final
@type_check_only
class _MemoryPlace(structseq[Any]):
    """The place of foreign memory when a copy began. A `Transfer` has a list of these."""

    @property
    def memory(self) -> object:
        """The object that has the bytes: a storage of PyTorch, or an array."""
    @property
    def address(self) -> int:
        """The address at which the memory began."""
    @property
    def nbytes(self) -> int:
        """The number of bytes that the memory had."""

def _freeze(buffer: Buffer, /) -> None:
    """Make a new buffer read-only, before anybody else has a reference to it."""

def _read_value(value: object, dtype: np.dtype[Any], /) -> NDArray[Any]:
    """Return an array of `dtype` with the same contents as a value; floats are rounded.

    Raises a TypeError if the kind of a value would change (from 1.5 to an integer, from a
    number to text), and an OverflowError or a ValueError if a value does not fit.
    """

def _read_any_value(value: object, dtype: np.dtype[Any], /) -> NDArray[Any]:
    """Return an array as `_read_value` does, but accept values that would change.

    A value that would change, and a value that is an array already, becomes an array of its
    own dtype. A later copy then converts it by its casting rule.
    """

def _read_array(value: object, /) -> NDArray[Any]:
    """Return the array that NumPy makes of a value, in the dtype that NumPy gives it.

    Raises a TypeError if the array holds Python objects or has masked elements.
    """

def _read_dtype(dtype: DTypeLike, /) -> np.dtype[Any]:
    """Return the numpy.dtype that an argument means.

    For a dtype of another library, raises a TypeError that says what to type instead. NumPy
    knows "bfloat16" only once ml_dtypes has been imported. Here the name always means the
    same, whatever a program has imported.
    """

def _check_casting(
    before: str, source: np.dtype[Any], target: np.dtype[Any], casting: object, /
) -> None:
    """Raise a TypeError or ValueError unless a rule of NumPy allows a conversion.

    The rule is `casting`, and the conversion is from `source` to `target`. The text of the
    error begins with `before`.
    """

def _raw_copy(dst: int, src: int, nbytes: int, stream: object, /) -> float:
    """Copy between two addresses by the CUDA runtime alone; return the seconds it took.

    This calls cudaMemcpyAsync, and waits for it.
    """

@final
@type_check_only
class _KindFacts(structseq[Any]):
    """The properties of a kind of memory, and the flags that it has by default."""

    @property
    def page_locked(self) -> bool:
        """Whether its pages stay where they are, so that a device reaches them."""
    @property
    def migrates(self) -> bool:
        """Whether its pages move between the host and devices."""
    @property
    def on_device(self) -> bool:
        """Whether only a device can reach it."""
    @property
    def flags(self) -> int:
        """The CUDA flags with which it is allocated unless others are requested."""

_KINDS: Final[dict[str, _KindFacts]]
"""The properties of each kind of memory, by its name."""

@final
@type_check_only
class _Dtype(structseq[Any]):
    """A row of the list of dtypes that cumem knows by name (``csrc/base/dtypes.h``)."""

    @property
    def name(self) -> str:
        """Its name in NumPy, or in ml_dtypes if NumPy has no such dtype."""
    @property
    def kind(self) -> str:
        """Its ``numpy.dtype.kind``, or an empty text if NumPy has no such dtype."""
    @property
    def bits(self) -> int:
        """The number of bits of an element."""
    @property
    def dlpack_code(self) -> int | None:
        """Its type code in DLPack, or None."""
    @property
    def file_name(self) -> str | None:
        """Its name in safetensors files, or None."""
    @property
    def file_rank(self) -> int:
        """The rank that orders tensors in such files: those of higher rank come first."""
    @property
    def torch_name(self) -> str | None:
        """Its name in PyTorch, or None."""
    @property
    def converts(self) -> bool:
        """Whether the copy threads convert its elements themselves."""
    @property
    def scales(self) -> bool:
        """Whether ``scale=`` and ``offset=`` may be given for it."""

_DTYPES: Final[dict[str, _Dtype]]
"""Each dtype of the list by its name, beginning with those that copy threads convert."""
_BUILT_RUNTIME: Final[int]
_TRACE_DOMAIN: Final[int]
_out_of_memory_callbacks: list[Any]
