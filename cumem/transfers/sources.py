# SPDX-License-Identifier: Apache-2.0
"""Cuts sources into chunks, and finds out whether these stay unchanged.

There are four sorts of sources whose pieces have a first axis: memory, files, arrays of
other libraries that are read in parts (h5py, zarr, xarray, dask), and iterables of arrays.

A request for the next piece must not change the current one while that is still being
copied. A generator, for instance, may fill one array again and again. A piece is called
*fresh* if nobody writes to its memory again. If the user does not say whether the pieces of
a source are fresh, `gives_fresh` decides for some types, and `is_alone` finds out whether
anybody else has a reference to the piece's memory.
"""

from __future__ import annotations

import collections
import contextvars
import io
import operator
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from cumem import _core
from cumem.buffers.arguments import read_flag
from cumem.files.file_hints import (
    HEAD_NBYTES,
    is_lfs_pointer,
    lfs_text,
    what_it_is,
    why_not_plain,
)
from cumem.files.npy import is_npy, read_array
from cumem.files.opening import open_regular, unwrapped
from cumem.interchange.structures import is_tensor

#: Libraries that two threads may not call at once, and that have no lock of their own. A
#: reader thread beside the caller's own reads could crash the process.
_ONE_THREAD = ("netCDF4", "tables", "osgeo", "rasterio", "pyhdf")

#: Advice on how to read files with such names, which must not be read as plain bytes.
_FORMATS = {
    ".npz": "cumem.load() or np.load() reads its arrays, and those can be cut",
    ".safetensors": "cut a tensor of it: "
    "cumem.read_safetensors_header(path).memmap(name)",
    ".h5": "open it with h5py.File(path) and give one of its datasets",
    ".hdf5": "open it with h5py.File(path) and give one of its datasets",
    ".nc": "open it with netCDF4.Dataset(path) or xarray and give one of its variables",
    ".zarr": "open it with zarr.open(path) and give one of its arrays",
    ".parquet": "read it with pyarrow or pandas and give a column as an array",
}


_AS_IT_IS = 'its bytes as they are: np.memmap(path, "u1", "r")'


class Item(NamedTuple):
    """One piece of a source on its way to the device.

    `part` are the rows of the source that the piece has. `is_fresh` is False if the source
    may write to the same memory again when it is asked for the next piece. `has_more` says
    that the next piece is cut from the same item of an iterable, so that asking for it
    writes nothing.
    """

    part: slice
    piece: Any
    is_fresh: bool
    has_more: bool = False


# -- fresh memory, to which nobody writes again ------------------------------------------


def _references(holder: list[Any]) -> int:
    """Return how many references there are to the only item of a list."""
    value = holder[0]
    return sys.getrefcount(value)


#: The result of `_references` if the list holds the only reference.
_ALONE = _references([np.empty(1)])

#: Types whose iteration runs no code that could write to earlier items.
_HOLD_THEIR_ITEMS: tuple[type, ...] = (
    *(list, tuple, collections.deque, np.ndarray, np.memmap),
    *(type(iter([])), type(iter(()))),
)


def is_alone(holder: list[Any]) -> bool:
    """Return whether nobody but us can write to the array in the list.

    That is so if there is no other reference to the array or to the array that it is a view
    of, or if its memory cannot be written, like that of `bytes`. A file that is mapped for
    reading can still be written, through another map or by its name. The list must hold the
    caller's only reference.
    """
    array = holder[0]
    if not isinstance(array, np.ndarray):
        return False
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, bytes):
        return True
    del base
    if type(array) is not np.ndarray or type(array.base) not in (
        type(None),
        np.ndarray,
    ):
        return False
    under = array.base
    is_view = under is not None
    del under
    if is_view:
        owner = array.base
        if type(owner) is not np.ndarray or not owner.flags.owndata:
            return False
        del owner
        if _references([array.base]) > _ALONE + 1:  # the view itself has one
            return False
    elif not array.flags.owndata:
        return False
    del array
    return _references(holder) <= _ALONE


def gives_fresh(iterable: Any, fresh: bool | None) -> bool:
    """Return whether the iterable never writes again to the memory of its items.

    `fresh` is the user's answer. If it is None, the type decides. Sequences hold all their
    items at once. A DataLoader of PyTorch makes new memory for each batch if it has
    workers, or if its collate_fn is `default_collate` or a `PinnedCollate`.
    """
    if fresh is not None:
        return fresh
    return (
        type(iterable) in _HOLD_THEIR_ITEMS
        or is_tensor(iterable)
        or isinstance(iterable, _core.Buffer)
        or _is_fresh_loader(iterable)
    )


def _is_fresh_loader(loader: Any) -> bool:
    data = sys.modules.get("torch.utils.data")
    kind = getattr(data, "DataLoader", None)
    if kind is None or not isinstance(loader, kind):
        return False
    if type(loader).__iter__ is not kind.__iter__:
        return False  # a subclass may change batches after it has returned them
    if loader.num_workers > 0:
        return True
    if loader.batch_sampler is None:  # batch_size=None returns the dataset's own memory
        return False
    collate = loader.collate_fn
    pinned = getattr(
        sys.modules.get("cumem.transfers.collating"), "PinnedCollate", None
    )
    return collate is data.default_collate or (  # type: ignore[union-attr]
        pinned is not None and isinstance(collate, pinned)
    )


# -- arrays that are read in parts -------------------------------------------------------


class Lazy:
    """An array of another library, from which ``array[a:b]`` reads rows.

    Like memory, it has a shape, a dtype and a number of bytes.

    Parameters
    ----------
    array : object
        An object with `shape`, `dtype` and slices.

    Raises
    ------
    TypeError
        If its elements are Python objects or strings of any length.
    ValueError
        If its length is unknown.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        self._name = type(array).__name__
        self.shape: tuple[int, ...] = tuple(map(self._length, array.shape))
        self.dtype: np.dtype[Any] = self._read_dtype()
        if self.dtype.hasobject:
            raise TypeError(
                f"src is a {self._name} of Python objects (dtype {array.dtype}), which "
                "have no bytes to copy: convert it to a dtype of fixed size first"
            )
        self.size: int = 1
        for length in self.shape:
            self.size *= length
        self.nbytes: int = self.size * self.dtype.itemsize
        library = type(array).__module__.partition(".")[0]
        self.has_reader: bool = library not in _ONE_THREAD

    def _length(self, length: Any) -> int:
        try:
            return operator.index(length)
        except TypeError:  # dask does not know the lengths of what it has filtered
            raise ValueError(
                f"src is a {self._name} of shape {self._array.shape}, whose lengths are "
                "not known: compute them first, with compute_chunk_sizes() in dask"
            ) from None

    def _read_dtype(self) -> np.dtype[Any]:
        given = self._array.dtype
        given = getattr(given, "numpy_dtype", given)  # tensorstore has its own dtypes
        try:
            found: np.dtype[Any] = np.dtype(given)
        except TypeError:
            found = np.asarray(self._array[0:1]).dtype
        return found

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, part: slice) -> np.ndarray[Any, Any]:
        """Return the rows of a slice, as an array in memory.

        Raises
        ------
        TypeError
            If the slice is not an array.
        ValueError
            If it has another shape than the rows, or masked elements.
        """
        found = self._array[part.start : part.stop]
        if isinstance(found, np.ma.MaskedArray):
            if np.ma.is_masked(found):
                raise ValueError(
                    f"{self._name}[{part.start}:{part.stop}] has masked elements, which "
                    "a chunk cannot tell from others: give values in their place first, "
                    "such as by .filled(), or switch masks off (netCDF4: "
                    "variable.set_auto_mask(False))"
                )
            found = found.data
        wanted = (part.stop - part.start, *self.shape[1:])
        array = found if isinstance(found, np.ndarray) else np.asarray(found)
        if array.dtype.hasobject:
            raise TypeError(
                f"{self._name}[{part.start}:{part.stop}] gives {type(found).__name__}, "
                "which is not an array of numbers: src must be an array whose slices are "
                "arrays, such as its dense form"
            )
        if array.shape != wanted:
            raise ValueError(
                f"{self._name}[{part.start}:{part.stop}] has the shape {array.shape}, "
                f"but should have {wanted}, since src has the shape {self.shape}: src "
                "must be an array whose slices are rows of its first axis"
            )
        if array.dtype != self.dtype:
            raise ValueError(
                f"{self._name}[{part.start}:{part.stop}] has the dtype {array.dtype}, "
                f"but should have {self.dtype}, as src does"
            )
        return array


class _Reader:
    """Reads the slices of a `Lazy` in a thread, ahead of the user of the pieces.

    At most two pieces are read ahead. The thread reads with the contextvars of the thread
    that asked for the first piece, and with the device that was current when the reader was
    made. If a read might write to the memory of the current piece, it begins only when the
    user asks for the next piece, after copying the current one.
    """

    _AHEAD = 2

    def __init__(
        self, source: Lazy, parts: Iterator[slice], fresh: bool | None
    ) -> None:
        self._source = source
        self._parts = parts
        self._fresh = fresh
        self._is_sure = fresh is True  # whether every piece so far had its own memory
        self._device = _core.current_device()

    def _read(self, part: slice, must: bool) -> Item | None:
        """Read a piece, or return None if that might change the previous piece."""
        if not (must or self._is_sure):
            return None
        with self._device:
            holder: list[Any] = [self._source.read(part)]
        is_fresh = is_alone(holder) if self._fresh is None else self._fresh
        self._is_sure = is_fresh
        return Item(part, holder.pop(), is_fresh)

    def items(self) -> Generator[Item]:
        pid = os.getpid()
        context = contextvars.copy_context()
        pool = ThreadPoolExecutor(1, "cumem-reader")
        begun: collections.deque[tuple[slice, Future[Item | None]]] = (
            collections.deque()
        )

        def submit(part: slice, must: bool) -> Future[Item | None]:
            return pool.submit(context.run, self._read, part, must)

        def fill(count: int) -> None:
            while len(begun) < count and (part := next(self._parts, None)) is not None:
                begun.append((part, submit(part, not begun and not self._is_sure)))

        try:
            fill(1)
            while begun:
                part, future = begun.popleft()
                item = future.result()
                if item is None:
                    item = submit(part, True).result()
                del future
                assert item is not None
                if self._is_sure:
                    fill(self._AHEAD)
                yield item
                del item
                if os.getpid() != pid:
                    raise RuntimeError(
                        "chunks were begun before this process was forked, and their "
                        "reader thread is not here: begin anew in the child"
                    )
                fill(1)
        finally:
            if os.getpid() == pid:
                pool.shutdown(wait=True, cancel_futures=True)


# -- files -------------------------------------------------------------------------------


def _map_file(file: Any, dtype: np.dtype[Any] | None) -> Any:
    """Map the rest of a file.

    An ``.npy`` becomes its array, and other files become elements of the dtype, or bytes.
    """
    plain = unwrapped(file)
    name = str(plain.name)
    size = os.fstat(plain.fileno()).st_size
    begin = plain.tell()
    if is_npy(plain):
        array = read_array(plain)
        plain.seek(begin)
        order: Any = "F" if array.fortran else "C"
        if array.nbytes == 0:
            return np.empty(array.shape, array.dtype, order)
        return np.memmap(plain, array.dtype, "r", array.offset, array.shape, order)
    _, _, suffix = name.rpartition("/")[2].rpartition(".")
    advice = _FORMATS.get(f".{suffix.lower()}")
    head = os.pread(plain.fileno(), HEAD_NBYTES, begin)
    if is_lfs_pointer(head):
        raise ValueError(lfs_text(repr(name)))
    if suffix and advice is not None:
        raise ValueError(
            f"{name!r} is not a file of plain elements: {advice}; {_AS_IT_IS}"
        )
    known = why_not_plain(name, head)
    if known is None and suffix == "npy":
        known = f"{name!r} is not an .npy file, but {what_it_is(head) or 'other bytes'}"
    if known is not None:
        raise ValueError(f"{known}; {_AS_IT_IS}")
    element = np.dtype("u1") if dtype is None else dtype
    left = max(size - begin, 0)
    if left % element.itemsize != 0:
        raise ValueError(
            f"{name!r} has {left} bytes, which is not a whole number of elements of "
            f"{element} ({element.itemsize} bytes each)"
        )
    return np.memmap(plain, element, "r", begin) if left else np.empty(0, element)


# -- any source --------------------------------------------------------------------------


def find_memory(src: Any, dtype: np.dtype[Any] | None = None) -> Any:
    """Return the source as memory or as a `Lazy`, or None if it is neither.

    Both have a shape, rows and a number of bytes. `dtype` is the dtype of the elements in a
    file without a header.
    """
    if isinstance(src, (_core.Buffer, np.ndarray)):
        return _unmasked(src, "src")
    if isinstance(src, (str, bytes, os.PathLike)):
        with open_regular(os.fsdecode(src)) as file:
            return _map_file(file, dtype)
    if hasattr(src, "readinto"):
        return _map_file(src, dtype)
    memory = find_array(src)
    if memory is not None or isinstance(src, Mapping):
        return memory
    if hasattr(src, "iloc"):  # a table of pandas, which is in memory
        return _of_table(src)
    names = ("shape", "dtype", "__getitem__")
    if isinstance(src, type):
        return None
    if all(hasattr(src, name) for name in names):
        return Lazy(src) if src.shape else np.empty(())
    # This is one array, although iteration yields its columns (polars), its rows (awkward)
    # or its values (pyarrow). It has no dtype, and is read as a whole.
    return _of_table(src) if hasattr(src, "__array__") else None


def find_array(src: Any) -> Any:
    """Return the memory of another library without a copy, or None if it has none."""
    if isinstance(src, np.ndarray):
        return _unmasked(src, "an item of src")
    try:
        return _core.asbuffer(src)
    except TypeError:
        return None


def _unmasked(array: Any, name: str) -> Any:
    """Return an array as an ordinary one; raise an error if any element is masked."""
    if isinstance(array, np.ma.MaskedArray):
        if np.ma.is_masked(array):
            raise ValueError(
                f"{name} has masked elements, whose values would be copied like any "
                "others: give values in their place first, such as by .filled()"
            )
        return array.data
    return array


def _of_table(src: Any) -> np.ndarray[Any, Any]:
    name = type(src).__name__
    try:
        array = np.asanyarray(src)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"src has the type {name}, of which NumPy cannot make an array ({error}): give "
            "iter(src) if its items are arrays, which then come one by one"
        ) from None
    if array.dtype.hasobject:
        raise TypeError(
            f"src is a {name} with columns of text, of Python objects or of several "
            "sorts: choose columns of numbers, and give .to_numpy(dtype) of them"
        )
    return np.asarray(_unmasked(array, "src"))


def length_of(memory: Any, name: str = "src") -> int:
    """Return the number of rows, or raise a ValueError if there is no axis."""
    if not memory.shape:
        raise ValueError(f"{name} has no axis to cut: its shape is ()")
    return len(memory)


def pieces(
    src: object,
    memory: Any,
    rows: int | None,
    row_nbytes: int | None,
    fresh: bool | None,
) -> Iterator[Item]:
    """Yield the pieces of a source, in order.

    `rows` is the number of rows in a piece of `memory`. Items of an iterable that have
    more rows than that, or more bytes than `row_nbytes`, are cut as well. With None for
    both they are not cut.
    """
    fresh = None if fresh is None else read_flag(fresh, "fresh")
    if isinstance(memory, Lazy):
        parts = _parts(len(memory), rows or 1)
        if not memory.has_reader:
            return _read_here(memory, parts, fresh)
        return _Reader(memory, parts, fresh).items()
    if memory is not None:
        return (
            Item(part, memory[part], True) for part in _parts(len(memory), rows or 1)
        )
    if isinstance(src, Set):
        raise TypeError(f"src must have an order, and a {type(src).__name__} has none")
    if isinstance(src, Mapping):
        raise TypeError(
            "src must be an array, a file or an iterable of arrays, not "
            f"{type(src).__name__}: give one of its values"
        )
    if isinstance(src, Iterable) and not isinstance(src, io.TextIOBase):
        return _in_turn(src, rows, row_nbytes, gives_fresh(src, fresh), fresh is None)
    raise TypeError(
        "src must be an array, a file or an iterable of arrays, not "
        f"{type(src).__name__}"
    )


def _parts(count: int, rows: int) -> Iterator[slice]:
    for begin in range(0, count, rows):
        yield slice(begin, min(begin + rows, count))


def _read_here(
    source: Lazy, parts: Iterator[slice], fresh: bool | None
) -> Iterator[Item]:
    for part in parts:
        holder: list[Any] = [source.read(part)]
        is_fresh = is_alone(holder) if fresh is None else fresh
        yield Item(part, holder.pop(), is_fresh)


def _in_turn(
    arrays: Iterable[Any],
    rows: int | None,
    most_nbytes: int | None,
    all_fresh: bool,
    may_ask: bool,
) -> Iterator[Item]:
    begin = 0
    source = iter(arrays)
    holder: list[Any] = []
    while True:
        try:
            holder.append(next(source))
        except StopIteration:
            return
        is_fresh = all_fresh or (may_ask and is_alone(holder))
        memory = _item_memory(holder.pop())
        count = length_of(memory, "an item of src")
        step = max(1, count)
        if rows is not None:
            step = rows
        elif most_nbytes is not None and memory.nbytes > 0:
            step = max(1, most_nbytes // max(1, memory.nbytes // count))
        if step >= count:
            yield Item(slice(begin, begin + count), memory, is_fresh)
        else:
            for part in _parts(count, step):
                where = slice(begin + part.start, begin + part.stop)
                yield Item(where, memory[part], is_fresh, part.stop < count)
        begin += count
        del memory


def _item_memory(each: Any) -> Any:
    if isinstance(each, (str, os.PathLike, Mapping, Set)) or hasattr(each, "readinto"):
        raise TypeError(f"src must give arrays, not {type(each).__name__}")
    if isinstance(each, (list, tuple)) and any(hasattr(x, "shape") for x in each):
        raise TypeError(
            f"src must give arrays, not a {type(each).__name__} of them: choose one of "
            "each, or give cumem.prefetch() the loader, whose batches may have several"
        )
    memory = find_array(each)
    if memory is not None:
        return memory
    if all(hasattr(each, name) for name in ("shape", "dtype", "__getitem__")):
        whole = Lazy(each) if each.shape else None
        return np.empty(()) if whole is None else whole.read(slice(0, len(whole)))
    try:
        return np.asarray(_unmasked(np.asanyarray(each), "an item of src"))
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"src must give arrays, and gave a {type(each).__name__} of which NumPy cannot "
            f"make one: {error}"
        ) from None


def row_nbytes(memory: Any, dtype: np.dtype[Any] | None = None) -> int:
    """Return the bytes of one row, after a conversion to `dtype` if that is given."""
    return total_nbytes(memory, dtype) // len(memory)


def total_nbytes(memory: Any, dtype: np.dtype[Any] | None) -> int:
    """Return the bytes of all rows, after a conversion to `dtype`; 0 for an iterable."""
    if memory is None or dtype is None:
        return 0 if memory is None else int(memory.nbytes)
    return int(memory.size) * dtype.itemsize
