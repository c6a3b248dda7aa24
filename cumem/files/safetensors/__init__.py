# SPDX-License-Identifier: Apache-2.0
"""Loads the tensors of safetensors files into memory of any kind.

`load_safetensors` is here. The module ``format`` reads and checks headers and indexes, and
``save`` writes files.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import numpy as np

from cumem import _core
from cumem.base.carried import remember
from cumem.base.kinds import DEVICE_FIRST, is_on_device, kind_hint
from cumem.base.places import found_in
from cumem.buffers.arguments import hinting, read_dtype
from cumem.buffers.casting import Casting
from cumem.buffers.casting import check as check_casting
from cumem.buffers.hints import framework_hint
from cumem.buffers.progress import Parts, Progress
from cumem.files.converting import Item, read_as
from cumem.files.opening import open_regular
from cumem.files.raw import read_ranges
from cumem.files.safetensors.format import (
    TORCH_CARRIED,
    TYPES,
    SafetensorsHeader,
    SafetensorsInfo,
    check_shard,
    checked_path,
    dtype_for_casts,
    dtype_of,
    is_carried,
    opened_shard,
    packed_shape,
    read_groups,
    read_header,
    resolved,
    type_named,
    type_of,
)

if TYPE_CHECKING:
    import typing_extensions
    from numpy.typing import NDArray

    from cumem.base._optional_types import Array, Tensor

    #: The type of the values of a `SafetensorsDict`; Any where an annotation does not
    #: give it.
    _V = typing_extensions.TypeVar("_V", default=Any)
else:
    _V = TypeVar("_V")

__all__ = ["SafetensorsDict", "load_safetensors"]

_Path = str | os.PathLike[str]
_KINDS = (*DEVICE_FIRST, "host")
#: Other names of ordinary memory, for which an error suggests kind="host".
_HOST_NAMES = ("cpu", "numpy", "pageable", "ram")
_FRAMEWORKS = (None, "torch", "numpy", "jax")


@found_in("cumem.types")
class SafetensorsDict(dict[str, _V]):
    """The tensors of a file or checkpoint by name, and what the files say about them.

    Attributes
    ----------
    infos : dict
        A `SafetensorsInfo` for each name: the tensor's element type as the file calls it,
        its shape, and its place in its file.
    metadata : dict
        The texts in the headers of the files that were read. `save_safetensors` keeps them.

    Examples
    --------
    >>> path = cumem.save_safetensors("a.safetensors", {"w": numpy.ones(3, "f4")})
    >>> weights = cumem.load_safetensors("a.safetensors")
    >>> list(weights), weights.infos["w"].shape
    (['w'], (3,))
    """

    infos: dict[str, SafetensorsInfo]
    metadata: dict[str, str]
    _carried: set[str]  # names of tensors whose elements were loaded as integers

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.infos = {}
        self.metadata = {}
        self._carried = set()

    def copy(self) -> SafetensorsDict[_V]:
        """Return a new dict with the same values, `infos` and `metadata`."""
        new: SafetensorsDict[_V] = SafetensorsDict(self)
        new.infos, new.metadata = dict(self.infos), dict(self.metadata)
        new._carried = set(self._carried)
        return new

    def __copy__(self) -> SafetensorsDict[_V]:
        """Return a copy, as `copy` does."""
        return self.copy()


class _From(TypedDict, total=False):
    """The keywords of `load_safetensors` that do not determine the type of its answer."""

    names: Iterable[str] | None
    device: object
    stream: object
    dtype: Any
    casting: Casting | None
    progress: Progress


@overload
def load_safetensors(
    path: _Path | Iterable[_Path],
    *,
    kind: Literal["device"] | None = ...,
    framework: None = ...,
    **options: Unpack[_From],
) -> SafetensorsDict[_core.DeviceBuffer]: ...
@overload
def load_safetensors(
    path: _Path | Iterable[_Path],
    *,
    kind: Literal["pinned"],
    framework: None = ...,
    **options: Unpack[_From],
) -> SafetensorsDict[_core.PinnedBuffer]: ...
@overload
def load_safetensors(
    path: _Path | Iterable[_Path],
    *,
    kind: Literal["mapped"],
    framework: None = ...,
    **options: Unpack[_From],
) -> SafetensorsDict[_core.MappedBuffer]: ...
@overload
def load_safetensors(
    path: _Path | Iterable[_Path],
    *,
    kind: Literal["managed"],
    framework: None = ...,
    **options: Unpack[_From],
) -> SafetensorsDict[_core.ManagedBuffer]: ...
@overload
def load_safetensors(
    path: _Path | Iterable[_Path],
    *,
    kind: Literal["host"],
    framework: None = ...,
    **options: Unpack[_From],
) -> SafetensorsDict[_core.HostBuffer]: ...
@overload
def load_safetensors(
    path: _Path | Iterable[_Path],
    *,
    kind: _core._Kind | Literal["host"] | None,
    framework: None = ...,
    **options: Unpack[_From],
) -> SafetensorsDict[_core.Buffer]: ...
@overload
def load_safetensors(
    path: _Path | Iterable[_Path],
    *,
    kind: _core._Kind | Literal["host"] | None = ...,
    framework: Literal["torch"],
    **options: Unpack[_From],
) -> SafetensorsDict[Tensor]: ...
@overload
def load_safetensors(
    path: _Path | Iterable[_Path],
    *,
    kind: _core._Kind | Literal["host"] | None = ...,
    framework: Literal["numpy"],
    **options: Unpack[_From],
) -> SafetensorsDict[NDArray[Any]]: ...
@overload
def load_safetensors(
    path: _Path | Iterable[_Path],
    *,
    kind: _core._Kind | Literal["host"] | None = ...,
    framework: Literal["jax"],
    **options: Unpack[_From],
) -> SafetensorsDict[Array]: ...
@overload
def load_safetensors(
    path: _Path | Iterable[_Path],
    *,
    kind: _core._Kind | Literal["host"] | None = ...,
    framework: Literal["torch", "numpy", "jax"] | None = ...,
    **options: Unpack[_From],
) -> SafetensorsDict[Any]: ...
@hinting
def load_safetensors(
    path: _Path | Iterable[_Path],
    *,
    names: Iterable[str] | None = None,
    kind: _core._Kind | Literal["host"] | None = None,
    device: object = None,
    stream: object = None,
    framework: Literal["torch", "numpy", "jax"] | None = None,
    dtype: Any = None,
    casting: Casting | None = None,
    progress: Progress = None,
) -> SafetensorsDict[Any]:
    """Load the tensors of a safetensors file or of a checkpoint in several files.

    Parameters
    ----------
    path : str or path-like, or an iterable of them
        A file; the index of a checkpoint in several files (``*.index.json``); a folder
        that holds one ``*.safetensors.index.json``, or else one ``*.safetensors``; or a
        list of these, in which no two may have a tensor of the same name.
    names : iterable of str, optional
        The tensors to load, in this order. By default all are loaded, in the order in which
        the files have them.
    kind : {"device", "pinned", "mapped", "managed", "host"}, optional
        The memory to load into, where ``"host"`` is ordinary memory. The default is
        ``"device"``, or ``"host"`` with ``framework="numpy"``.
    device : Device, int or str, optional
        The device of the memory; by default the current one.
    stream : stream, optional
        The stream on which the memory is allocated and filled; by default the device's
        current stream.
    framework : {"torch", "numpy", "jax"}, optional
        If given, return tensors of PyTorch or arrays of NumPy or JAX instead of buffers.
        They share the memory of the buffers and keep it alive. JAX copies ordinary memory
        that does not begin at a multiple of 64 bytes.
    dtype : dtype_like or mapping, optional
        The dtype that all tensors are converted to, or a mapping from the names of some
        tensors to dtypes; the others keep theirs. It may also be a dtype of PyTorch, or
        the name of a dtype of ``ml_dtypes``. Elements are converted piece by piece while
        they are read.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        Which conversions to `dtype` are allowed, by the rules of ``numpy.can_cast``. The
        default ``"same_kind"`` converts integers to floats, but not floats to integers.
    progress : bool or callable, optional
        As for `copy`; it counts the bytes of all tensors. An exception that a callable
        raises ends the call as Ctrl-C does.

    Returns
    -------
    SafetensorsDict
        A buffer, tensor or array for each name, each with its own memory, with the shape
        and dtype in the file. If NumPy lacks the dtype, it is the one of ``ml_dtypes`` if
        that is installed, and otherwise unsigned integers of the same width;
        ``infos[name].dtype`` always names the type of the elements in the file. Types of
        less than a byte stay packed in bytes (or in PyTorch's ``float4_e2m1fn_x2`` if it
        has that): a byte holds two elements of four bits, and three bytes hold four
        elements of six bits. They are packed along the last axis if its elements fill whole
        bytes, and otherwise into one row. With `dtype`, ``infos`` still describes the
        tensors in the file.

    Raises
    ------
    SafetensorsError
        If a header is wrong, as `read_safetensors_header` explains; if an index is wrong,
        names a file that is missing or outside the index's folder, or says that a file has
        a tensor which that file lacks.
    KeyError
        If the file has no tensor with one of the `names`, or with a name in `dtype`.
    ValueError
        If a folder holds no checkpoint or more than one; if a list is empty or has a
        tensor twice; if `kind` or `framework` is unknown; if JAX would cut elements of 64
        bits to 32 because ``jax_enable_x64`` is not set; if `casting` is given without
        `dtype`.
    BufferError
        If `framework` has no type for the elements of a tensor.
    TypeError
        If `framework` is ``"numpy"`` and `kind` is ``"device"``, which NumPy cannot reach;
        if `casting` does not allow the conversion of a tensor, or its elements cannot be
        converted because they are packed. The error names the tensor.
    OSError
        If a file cannot be read, or is a FIFO, a device or the like.
    EOFError
        If a file is cut short after its header was read.
    OutOfMemoryError
        If there is not enough memory for the tensors.
    ImportError
        If `framework` is not installed, or if `progress` is True and tqdm is not.

    Notes
    -----
    All headers are checked, and memory is made for all tensors, before the first byte of a
    tensor is read. Each file is then read in one call. If anything fails, nothing stays
    allocated.

    **Blocks** until all tensors are loaded.

    **Ordered after** the work on `stream`, which may have used the memory before.

    Examples
    --------
    >>> path = cumem.save_safetensors("a.safetensors", {"w": numpy.ones(3, "f4")})
    >>> weights = cumem.load_safetensors("a.safetensors")
    >>> weights["w"].kind, weights["w"].shape
    ('device', (3,))
    """
    if kind is None:
        kind = "host" if framework == "numpy" else "device"
    finish = _finisher(kind, framework)
    make = _maker(kind, device, stream, framework)
    names = _checked_names(names)
    if dtype is None and casting is not None:
        raise ValueError("casting is given, but no dtype to convert to: pass dtype=")
    rule: Casting = "same_kind" if casting is None else casting
    loaded: SafetensorsDict[Any] = SafetensorsDict()
    buffers: dict[str, _core.Buffer] = {}
    ranges: list[tuple[int, _core.Buffer]] = []
    with contextlib.ExitStack() as stack:
        parts = _parts(stack, path, names)
        for header, members, _ in parts:
            loaded.infos.update({name: header.tensors[name] for name in members})
            loaded.metadata.update(header.metadata)
        if names is not None:
            loaded.infos = {name: loaded.infos[name] for name in names}
        casts = _casts(loaded.infos, dtype, rule, framework)
        try:
            total = sum(info.nbytes for info in loaded.infos.values())
            with Parts(progress, total, "read") as progress_parts:
                if kind == "device" and not casts:
                    place = _core._device(
                        device, "device", framework == "torch" or None
                    )
                    _core._reserve(place.index, total)
                for name, info in loaded.infos.items():
                    cast = casts.get(name)
                    buffers[name] = make(info, None if cast is None else cast.target)
                for part in parts:
                    _read(part, casts, buffers, ranges, rule, stream, progress_parts)
            for name, info in loaded.infos.items():
                if name in casts:
                    loaded[name] = value = casts[name].finish(
                        buffers[name], info, finish, _carrier(framework)
                    )
                    continue
                loaded[name] = value = finish(buffers[name], info)
                if is_carried(value, info.dtype):
                    loaded._carried.add(name)
                    remember(value, info.dtype, info.shape)
        except BaseException:
            # A traceback that is kept also keeps this frame, so the frame must not hold the
            # memory.
            ranges.clear()
            buffers.clear()
            loaded.clear()
            value = None
            raise
    return loaded


class _Cast(NamedTuple):
    """The conversion of one tensor's elements."""

    source: np.dtype[Any]
    target: np.dtype[Any]
    element: str | None  #: the name of the target in the format, or None if it has none

    def finish(
        self,
        buffer: _core.Buffer,
        info: SafetensorsInfo,
        finish: Callable[[_core.Buffer, SafetensorsInfo], Any],
        carrier: Callable[[str], np.dtype[Any]],
    ) -> Any:
        """Turn a buffer of converted elements into what the caller gets."""
        if self.element is None:
            return finish(buffer, info)
        made = info._replace(dtype=self.element)
        value = finish(buffer.view(carrier(self.element)), made)
        if is_carried(value, self.element):
            remember(value, self.element, info.shape)
        return value


def _casts(
    infos: dict[str, SafetensorsInfo],
    dtype: Any,
    rule: Casting,
    framework: str | None,
) -> dict[str, _Cast]:
    """Return a checked conversion for each tensor whose elements will be converted."""
    if dtype is None:
        return {}
    wanted = dtype if isinstance(dtype, Mapping) else dict.fromkeys(infos, dtype)
    targets: dict[Any, tuple[np.dtype[Any], str | None]] = {}
    casts: dict[str, _Cast] = {}
    for name, given in wanted.items():
        if name not in infos:
            raise KeyError(
                f"dtype names {name!r}, which is not a tensor that is loaded"
            )
        if given not in targets:
            targets[given] = _target(given, framework)
        target, element = targets[given]
        info = infos[name]
        if info.dtype == element:
            continue
        try:
            source = dtype_for_casts(info.dtype)
            check_casting("", source, target, rule)
        except TypeError as error:
            raise TypeError(f"tensor {name!r}: {error}") from None
        casts[name] = _Cast(source, target, element)
    return casts


def _target(given: Any, framework: str | None) -> tuple[np.dtype[Any], str | None]:
    """Return the dtype to convert to, and its name in the format if it has one."""
    kind = type_named(given)
    target = read_dtype(given) if kind is None else dtype_for_casts(kind.name)
    kind = type_of(target) if kind is None else kind
    if kind is None and framework in ("torch", "jax"):
        raise TypeError(f"framework={framework!r} has no type for dtype {target}")
    if framework == "jax" and kind is not None:
        _jax_dtype(kind.name)
    return target, None if kind is None else kind.name


def _read(
    part: _Part,
    casts: dict[str, _Cast],
    buffers: dict[str, _core.Buffer],
    ranges: list[tuple[int, _core.Buffer]],
    rule: Casting,
    stream: object,
    progress_parts: Parts,
) -> None:
    """Read the tensors of one file, in one call except for those that are converted."""
    header, members, file = part
    at = header.tensors
    whole = [name for name in members if name not in casts]
    ranges[:] = [(at[name].offset, buffers[name]) for name in whole]
    if ranges or not casts:
        progress = progress_parts.next(sum(at[name].nbytes for name in whole))
        read_ranges(file, ranges, stream=stream, progress=progress)

    def read(pieces: list[tuple[int, Any]]) -> None:
        progress = progress_parts.next(sum(view.nbytes for _, view in pieces))
        read_ranges(file, pieces, progress=progress)

    items = (
        Item(at[name].offset, casts[name].source, buffers[name])
        for name in members
        if name in casts
    )
    read_as(items, read, rule, stream)


def _checked_names(names: Iterable[str] | None) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, (str, bytes)):
        raise TypeError(f"names must be a list of names, not {type(names).__name__}")
    names = list(names)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"names must be str, not {type(name).__name__}")
    return names


class _Part(NamedTuple):
    """An open file, its header, and the names of the tensors wanted from it, in order."""

    header: SafetensorsHeader
    members: list[str]
    file: BufferedReader


def _parts(
    stack: contextlib.ExitStack, path: Any, names: list[str] | None
) -> list[_Part]:
    """Open all needed files at once, so that the files checked are the files read."""
    if _is_list(path):
        return _parts_of_list(stack, list(path), names)
    path = resolved(checked_path(path))
    if path.suffix != ".json":
        header, file = _opened(stack, path)
        for name in names or ():
            if name not in header.tensors:
                raise KeyError(f"{path} has no tensor {name!r}")
        return [_part(header, file, names)]
    parts = []
    for place, members in read_groups(path, names).items():
        file = stack.enter_context(opened_shard(path, place, members[0]))
        header = read_header(file, place)
        check_shard(path, header, members)
        parts.append(_part(header, file, members))
    return parts


def _is_list(path: object) -> bool:
    """Return whether `path` is an iterable of paths rather than one path."""
    single = (str, bytes, bytearray, memoryview, os.PathLike, Mapping, np.ndarray)
    is_file = hasattr(path, "read")
    return isinstance(path, Iterable) and not is_file and not isinstance(path, single)


def _parts_of_list(
    stack: contextlib.ExitStack, paths: list[Any], names: list[str] | None
) -> list[_Part]:
    """Open files that together are a checkpoint, without an index that says so."""
    if not paths:
        raise ValueError("path: the list has no files")
    parts = [part for path in paths for part in _parts(stack, path, None)]
    found: dict[str, Path] = {}
    for header, members, _ in parts:
        for name in members:
            if name in found:
                raise ValueError(
                    f"the tensor {name!r} is in two of the files, {found[name]} and "
                    f"{header.path}: load them one by one"
                )
            found[name] = header.path
    if names is None:
        return parts
    for name in names:
        if name not in found:
            raise KeyError(f"none of the {len(paths)} files has a tensor {name!r}")
    wanted = set(names)
    kept = [
        _Part(header, [name for name in members if name in wanted], file)
        for header, members, file in parts
    ]
    return [part for part in kept if part.members]


def _opened(
    stack: contextlib.ExitStack, path: Path
) -> tuple[SafetensorsHeader, BufferedReader]:
    file = stack.enter_context(open_regular(path))
    return read_header(file, path), file


def _part(
    header: SafetensorsHeader, file: BufferedReader, names: list[str] | None
) -> _Part:
    """Choose the named tensors, all of which the file has, in the order of the file."""
    tensors = header.tensors
    if names is None:
        return _Part(header, list(tensors), file)
    ordered = sorted(set(names), key=lambda name: tensors[name].offset)
    return _Part(header, ordered, file)


def _maker(
    kind: str, device: object, stream: object, framework: str | None
) -> Callable[[SafetensorsInfo, np.dtype[Any] | None], _core.Buffer]:
    """Return a function that makes the buffer of a tensor, with another dtype if given."""
    find = _carrier(framework)

    def host(info: SafetensorsInfo, other: np.dtype[Any] | None) -> _core.Buffer:
        dtype = find(info.dtype) if other is None else other
        return _core.asbuffer(np.empty(packed_shape(info), dtype))

    if kind != "host":
        device = _core._device(device, "device", framework == "torch" or None)

    def pooled(info: SafetensorsInfo, other: np.dtype[Any] | None) -> _core.Buffer:
        shape = packed_shape(info)
        dtype = find(info.dtype) if other is None else other
        place: Any = kind  # `_finisher` has refused anything that is not a kind
        made: _core.Buffer = _core.empty(
            shape, dtype, place, device=device, stream=stream
        )
        return made

    return host if kind == "host" else pooled


def _carrier(framework: str | None) -> Callable[[str], np.dtype[Any]]:
    """Return a function that gives the dtype of the buffer for an element type."""
    finds = {"torch": _torch_carrier, "jax": _jax_dtype}
    return finds.get(framework or "", dtype_of)


def _finisher(
    kind: str, framework: str | None
) -> Callable[[_core.Buffer, SafetensorsInfo], Any]:
    """Return a function that turns a buffer into what the caller asked for."""
    if not isinstance(kind, str) or kind not in _KINDS:
        _refuse_kind(kind)
    if framework not in _FRAMEWORKS:
        raise ValueError(
            f"framework must be 'torch', 'numpy', 'jax' or None, not {framework!r}"
            f"{framework_hint(framework, _FRAMEWORKS)}"
        )
    if framework is None:
        return lambda buffer, info: buffer
    if framework == "numpy":
        if is_on_device(kind):
            raise TypeError("NumPy cannot reach device memory: ask for another kind")
        return lambda buffer, info: buffer.numpy()
    if framework == "jax":
        _library("jax")
        from_dlpack = _library("jax.dlpack").from_dlpack
        # JAX accepts managed memory only as device memory.
        return lambda buffer, info: from_dlpack(
            buffer.as_device() if kind == "managed" else buffer
        )
    torch = _library("torch")

    def tensor(buffer: _core.Buffer, info: SafetensorsInfo) -> Any:
        # PyTorch accepts managed memory only as device memory.
        made = torch.from_dlpack(buffer.as_device() if kind == "managed" else buffer)
        element = TYPES[info.dtype]
        wanted = getattr(torch, element.torch or "", None)
        return made if wanted in (None, made.dtype) else made.view(wanted)

    return tensor


def _refuse_kind(kind: object) -> NoReturn:
    expected = ", ".join(f'"{name}"' for name in _KINDS)
    hint = 'write kind="host"' if str(kind).lower() in _HOST_NAMES else kind_hint(kind)
    more = "" if hint is None else f": {hint}"
    if not isinstance(kind, str):
        raise TypeError(
            f"kind must be one of {expected}, not {type(kind).__name__}{more}"
        )
    raise ValueError(f"kind must be one of {expected}, not {kind!r}{more}")


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"framework={name.split('.')[0]!r} needs that library: {error}",
            name=error.name,
        ) from None


def _jax_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of the buffer under a JAX array; refuse one that JAX would cut."""
    dtype = dtype_of(name)
    wide = ("int64", "uint64", "float64", "complex128")
    if dtype.name in wide and not _library("jax").config.jax_enable_x64:
        raise ValueError(
            f"JAX would cut {dtype.name} to 32 bits: set "
            'jax.config.update("jax_enable_x64", True), or leave those tensors out (names=)'
        )
    return dtype


def _torch_carrier(name: str) -> np.dtype[Any]:
    """Return the dtype for a buffer under a tensor of PyTorch."""
    return np.dtype(TORCH_CARRIED.get(name) or TYPES[name].numpy)
