# SPDX-License-Identifier: Apache-2.0
"""Saves tensors from memory of any kind as safetensors files, completely or not at all.

`save_safetensors` returns when the files are written. `save_safetensors_async` writes the
tensors of devices in the background. The devices first copy those tensors into page-locked
memory, and the streams that may change the tensors wait for these copies (``staging``). The
core then writes the page-locked memory to the file, and renames the file
(``csrc/transfer/file/save.h``).
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cumem import _core
from cumem.base.carried import Note, find
from cumem.base.kinds import is_on_device
from cumem.base.units import read_size
from cumem.buffers.arguments import hinting, read_flag
from cumem.buffers.progress import Parts, Progress
from cumem.files.raw import FILES_AT_ONCE, write_behind, write_files
from cumem.files.replacing import Replacement, replacing, sync_folder
from cumem.files.safetensors.exported import exported
from cumem.files.safetensors.format import (
    INDEX_SUFFIX,
    METADATA,
    TYPES,
    ElementType,
    SafetensorsError,
    SafetensorsInfo,
    check_text,
    checked_path,
    header_bytes,
    index_bytes,
    packed_shape,
    read_index,
    tensor_nbytes,
    type_of,
)
from cumem.files.safetensors.staging import Owners, Staging

__all__ = ["save_safetensors", "save_safetensors_async"]

_Path = str | os.PathLike[str]


class _Source(NamedTuple):
    """A tensor to save, as it will be described in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: _core.Buffer


@hinting
def save_safetensors(
    path: _Path,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    dtypes: Mapping[str, str | SafetensorsInfo] | None = None,
    max_shard_nbytes: int | str | None = None,
    fsync: bool = False,
    progress: Progress = None,
) -> Path:
    """Save tensors by name as a safetensors file, or as a checkpoint in several files.

    Parameters
    ----------
    path : str or path-like
        The file. In a folder, the file is called ``model.safetensors``.
    tensors : mapping of str to array
        Anything that `copy` takes: buffers, arrays of NumPy, tensors of PyTorch, arrays of
        CuPy or JAX, with any strides.
    metadata : mapping of str to str, optional
        Texts to keep in the header of each file. If `tensors` is the dict that
        `load_safetensors` returned, perhaps without some of its tensors, the texts of that
        file are the default. For any other mapping, such as a plain dict made from it,
        there are no texts by default. ``{}`` means no texts.
    dtypes : mapping, optional
        For tensors that are held as integers of the same width, their real types under the
        names of the format, such as ``{"w": "BF16"}``. A value may also be a
        `SafetensorsInfo`, which has the shape of packed elements too.
        ``dtypes=loaded.infos`` saves what `load_safetensors` returned, or a part of it.
    max_shard_nbytes : int or str, optional
        A number of bytes, or a text such as ``"5GiB"``. If the tensors together are larger,
        they are written to several files and an index. For a `path` of
        ``model.safetensors`` the files are called ``model-00001-of-00003.safetensors`` and
        so on, and the index ``model.safetensors.index.json``. Tensors keep the given order,
        and each file has at most this many bytes of tensors, unless a single tensor is
        larger. Files of an earlier checkpoint of the same name that the new one does not
        replace are removed, but only if the earlier index names them, they lie in the same
        folder, have such names, and are not links.
    fsync : bool, optional
        If True, return only when the files and their names are on the disk. Files that are
        replaced stay until then, and an index is put in place after the files that it
        names. By default the system writes them some time later, and they may be lost if
        the power fails.
    progress : bool or callable, optional
        As for `copy`; it counts the bytes of all tensors. An exception that a callable
        raises ends the call as Ctrl-C does.

    Returns
    -------
    Path
        The file or the index, which `load_safetensors` takes.

    Raises
    ------
    TypeError
        If an argument is not a mapping, a name or text is not a str, or a value of `dtypes`
        is neither a str nor a `SafetensorsInfo`. If a value of `tensors` is not an array,
        or the format has no type for its dtype. If a tensor was loaded as integers in place
        of another type, and its shape has changed so that cumem cannot tell whether the
        integers still stand for that type.
    ValueError
        If a tensor is called ``__metadata__``, has more than 64 dimensions or a size that
        does not fit in 63 bits; if `dtypes` does not fit a tensor; if `max_shard_nbytes`
        is not at least 1; if a header or index would be longer than 100 MB or list more
        than 524,288 tensors; if `path` ends in ``.json``; if the file's name is one that an
        index cannot hold; if two shards are links to the same file.
    KeyError
        If `dtypes` gives the type of a tensor that does not exist, unless the type is a
        `SafetensorsInfo`.
    OSError
        If a file cannot be written, or its name belongs to something that is not a regular
        file, such as a directory.
    ImportError
        If `progress` is True and tqdm is not installed.

    Notes
    -----
    Equal contents make equal files. The order within a file is that of the reference
    implementation: tensors with wider elements come first, and those of equal width are
    sorted by name.

    Up to 16 files are written at the same time, by a thread each. They have temporary names
    in the same folder until all are complete, and until then only their owner can read
    them. When all are written, they get their own names, the index last. If anything
    fails before that, the new files are removed and an older checkpoint stays. A new file
    takes over the permissions, access list and, if the system allows it, owner and group
    of the file that it replaces. If a name is a link, the file that it leads to is
    replaced.

    **Blocks** until the files are written.

    **Ordered after** the same work as a `copy` from the same objects.

    Examples
    --------
    >>> path = cumem.save_safetensors("a.safetensors", {"w": cumem.zeros(3, "f4")})
    >>> list(cumem.load_safetensors("a.safetensors"))
    ['w']
    """
    fsync = read_flag(fsync, "fsync")
    path, metadata, sources = _checked(path, tensors, metadata, dtypes)
    limit = _limit(max_shard_nbytes)
    shards = _shards(sources, limit)
    stem = path.name.removesuffix(".safetensors")
    index = path.with_name(stem + INDEX_SUFFIX)
    if len(shards) == 1:
        parts = [path]
    else:
        _check_nameable(path)
        parts = [
            path.with_name(f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors")
            for i in range(len(shards))
        ]
    stale = _parts_of(index) if limit is not None else set()
    merged = Replacement(path)  # if there are several shards, they take its place
    merged.check()
    total = sum(source.data.nbytes for source in sources)
    with contextlib.ExitStack() as stack:
        written = []
        with Parts(progress, total, "write") as progress_parts:
            for first in range(0, len(parts), FILES_AT_ONCE):
                some = slice(first, first + FILES_AT_ONCE)
                news = [stack.enter_context(replacing(part)) for part in parts[some]]
                _write(news, shards[some], metadata, progress_parts, fsync)
                written += news
        if len(shards) > 1:
            new = stack.enter_context(replacing(index))
            with new.open(fsync) as file:
                file.write(_index(parts, shards))
            written.append(new)
        if len({new.target for new in written}) < len(written):
            raise ValueError(f"links in {path.parent} lead to one file from several")
        for new in (*written, merged):
            new.check()
        for new in written[: len(shards)]:
            new.place()
        if fsync:
            for folder in {new.target.parent for new in written}:
                sync_folder(folder / "any")
        for new in written[len(shards) :]:
            new.place(fsync)
    result = index if len(shards) > 1 else path
    if len(shards) > 1:
        stale.add(path)
    for old in stale - {*parts, result}:
        if old.is_symlink() or old.is_file():
            old.unlink(missing_ok=True)
    return result


@hinting
def save_safetensors_async(
    path: _Path,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    dtypes: Mapping[str, str | SafetensorsInfo] | None = None,
    host_limit: int | str | None = None,
    before: object = None,
) -> _core.Transfer:
    """Save tensors as a safetensors file in the background, while the device computes on.

    The device copies its tensors into page-locked memory, threads write them from there to
    a new file, and the file takes the place of an older one when it is on the disk.

    Parameters
    ----------
    path : str or path-like
        As for `save_safetensors`.
    tensors : mapping of str to array
        As for `save_safetensors`. The file gets the contents that they have after the work
        that is queued on the current stream now. Later changes on that stream are not in
        the file.
    metadata, dtypes : optional
        As for `save_safetensors`.
    host_limit : int or str, optional
        A number of bytes, or a text such as ``"8GiB"``: the most page-locked memory that
        keeps tensors of devices until they are written. By default there is no limit.
        Tensors that do not fit within the limit are written in pieces before the call
        returns. With 0 this happens to all of them. Tensors of an optimizer of `before` get
        room last. Those that find none are written in the background, and the optimizer's
        next step makes the processor wait for that.
    before : torch.optim.Optimizer or list of them, optional
        Optimizers whose next ``step()`` is the first to change the tensors that belong to
        them: their parameters, the tensors of their state, and parts of these. Until then
        only that step waits for the copies of these tensors, and the current stream waits
        for those of all other tensors. By default it waits for all.

    Returns
    -------
    Transfer
        The transfer is done when the file is on the disk and has its name. ``wait()``
        raises the `OSError` of a file that could not be written. ``cancel()`` succeeds only
        before writing begins, and then removes the new file.

    Raises
    ------
    TypeError, ValueError, KeyError
        As for `save_safetensors`; or if `host_limit` is not a number of bytes, or `before`
        is not an optimizer.
    OSError
        If the file cannot be created, for instance because there is no such folder; if its
        name belongs to something that is not a regular file; or if the disk is full before
        the call returns.
    MemoryError
        If there is no page-locked memory for the tensors of devices.
    CudaError
        If a copy could not be started, or the current stream is being captured.

    Notes
    -----
    **Blocks** until tensors of the host, including page-locked ones, have been written,
    since the host could change them right after the call. It waits for a tensor of a device
    only if `host_limit` leaves no room for it and it belongs to no optimizer of `before`.

    **Ordered after** the same work as a `copy` from the same objects, and after the work
    on the current stream of each device: cumem's and, if PyTorch uses the device, also
    PyTorch's. From the call on, these streams wait until the device has copied its tensors,
    but not until the file is written. If tensors are made or changed on another stream,
    call ``stream.wait`` first.

    With `before`, nothing but the optimizer's ``step()`` may change its tensors before the
    file has them. A step makes the current streams of its own thread wait, whichever they
    are then. The processor goes on, unless the step is captured in a graph or `host_limit`
    left no room for some of the tensors. A replay of a graph is not a step: do not name an
    optimizer whose steps are replayed. If a `torch.amp.GradScaler` skips a step, the next
    one waits. An optimizer that is dropped before its next step makes the streams of the
    call wait. The optimizer keeps one hook (``register_step_pre_hook``), which does nothing
    in its other steps.

    Tensors may be dropped, closed or overwritten in the order of the stream as soon as the
    call returns. Views that share memory are each written in full.

    Files are written one after another in the order of the calls. So after two calls for
    the same path, the file is that of the later call. A process that exits first waits for
    the file. While daemon threads run it waits one second at most, because they may use
    cumem for ever. If the process ends before the file is written, the old file is
    untouched, and a file ``.cumem-….tmp`` is left beside it. A forked child cannot use the
    transfer, which the parent completes.

    Examples
    --------
    >>> saving = cumem.save_safetensors_async("a.safetensors", {"w": cumem.zeros(3, "f4")})
    >>> saving.wait()
    >>> list(cumem.load_safetensors("a.safetensors"))
    ['w']
    """
    path, metadata, sources = _checked(path, tensors, metadata, dtypes)
    room = math.inf
    if host_limit is not None:
        room = read_size(host_limit, "host_limit", False, None)
    head, infos = header_bytes(
        ((name, dtype, shape, data.nbytes) for name, dtype, shape, data in sources),
        metadata,
    )
    staging = Staging(Owners(before))
    now: list[tuple[int, _core.Buffer]] = []
    late: list[tuple[int, _core.Buffer]] = []
    staged: list[tuple[int, Any]] = [(0, np.frombuffer(head, "u1"))]
    # Tensors that belong to no optimizer get room first, as the call waits for the rest.
    for source in sorted(sources, key=lambda each: _is_owned(each, staging.owners)):
        offset, nbytes = infos[source.name].offset, source.data.nbytes
        if nbytes == 0:
            continue
        if is_on_device(source.data.kind) and nbytes <= room:
            room -= nbytes
            staged.append((offset, staging.add(source.data)))
        elif _is_owned(source, staging.owners):
            late.append((offset, source.data))
        else:
            now.append((offset, source.data))
    staged.sort(key=operator.itemgetter(0))
    with replacing(path) as new, new.open_to_leave() as (file, mode):
        file.truncate(len(head) + sum(info.nbytes for info in infos.values()))
        staging.begin()
        write_files([(file, now)])
        first = staging.write(file, late, str(path))
        staging.order()
        return write_behind(file, staged, new, mode, str(path), first)


def _is_owned(source: _Source, owners: Owners) -> bool:
    """Return whether a tensor is on a device and belongs to an optimizer."""
    return is_on_device(source.data.kind) and bool(owners.find(source.data))


def _checked(
    path: _Path,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None,
    dtypes: Mapping[str, str | SafetensorsInfo] | None,
) -> tuple[Path, Mapping[str, str] | None, list[_Source]]:
    """Check the arguments of a save; return the path, the metadata and the tensors."""
    path = checked_path(path, writes=True)
    if path.is_dir():
        path = path / "model.safetensors"
    if path.suffix == ".json":
        raise ValueError(
            f"{path}: a name that ends in .json is that of an index; use a name such as "
            "model.safetensors, also for several files"
        )
    metadata = _checked_metadata(
        _known_texts(tensors) if metadata is None else metadata
    )
    declared = _checked_dtypes(dtypes)
    named = _mapping(tensors, "tensors", "names to arrays")
    for name, value in declared.items():
        # `infos` of a loaded file has all types, even if only some tensors are saved.
        if name not in named and not isinstance(value, SafetensorsInfo):
            raise KeyError(f"dtypes: there is no tensor {name!r} to save")
    known = _known_infos(tensors)
    sources = [_source(name, obj, declared, known) for name, obj in named.items()]
    return path, metadata, sources


def _known_texts(tensors: Any) -> Mapping[str, str] | None:
    """Return the metadata of a dict from `load_safetensors`, or None for other mappings."""
    return tensors.metadata if hasattr(tensors, "infos") else None


def _known_infos(tensors: Any) -> dict[str, SafetensorsInfo]:
    """Return the infos of loaded tensors whose elements were loaded as integers."""
    names = getattr(tensors, "_carried", ())
    infos = getattr(tensors, "infos", {})
    return {name: infos[name] for name in names if name in infos}


def _mapping(value: Any, argument: str, of: str) -> dict[Any, Any]:
    """Return the mapping as a dict; unlike `dict`, refuse a list of pairs."""
    if hasattr(value, "keys") and hasattr(value, "__getitem__"):
        return {key: value[key] for key in value.keys()}  # noqa: SIM118  (TensorDicts)
    given = type(value).__name__
    raise TypeError(f"{argument} must be a mapping of {of}, not {given}")


def _check_name(name: object, argument: str, noun: str) -> None:
    if not isinstance(name, str):
        given = type(name).__name__
        raise TypeError(f"{argument}: {noun} must be str, not {given}: {name!r}")
    check_text(name)


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    texts = _mapping(metadata, "metadata", "str to str")
    for key, value in texts.items():
        _check_name(key, "metadata", "keys")
        if not isinstance(value, str):
            given = type(value).__name__
            raise TypeError(f"metadata {key!r}: values must be str, not {given}")
        check_text(value)
    return texts


def _checked_dtypes(
    dtypes: Mapping[str, str | SafetensorsInfo] | None,
) -> dict[str, str | SafetensorsInfo]:
    of = "names to element types"
    declared = {} if dtypes is None else _mapping(dtypes, "dtypes", of)
    for name, value in declared.items():
        _check_name(name, "dtypes", "names")
        element = value.dtype if isinstance(value, SafetensorsInfo) else value
        if not isinstance(element, str):
            raise TypeError(
                f"dtypes {name!r}: expected the name of an element type, such as 'BF16', "
                f"or a SafetensorsInfo, not {type(element).__name__}"
            )
        if isinstance(value, SafetensorsInfo):
            _check_shape(name, value.shape)
    return declared


def _check_shape(name: str, shape: Any) -> None:
    whole = isinstance(shape, tuple | list) and all(
        isinstance(length, int) and not isinstance(length, bool) for length in shape
    )
    if not whole:
        raise TypeError(f"dtypes {name!r}: shape must be a tuple of int, not {shape!r}")
    if min(shape, default=0) < 0:
        raise ValueError(f"dtypes {name!r}: shape must not be negative, not {shape!r}")


def _limit(max_shard_nbytes: int | str | None) -> int | None:
    if max_shard_nbytes is None:
        return None
    limit = read_size(max_shard_nbytes, "max_shard_nbytes", False, None)
    if limit == 0:
        raise ValueError(
            f"max_shard_nbytes must be at least 1 byte, not {max_shard_nbytes!r}"
        )
    return limit


def _source(
    name: str,
    obj: Any,
    declared: dict[str, str | SafetensorsInfo],
    known: dict[str, SafetensorsInfo],
) -> _Source:
    """Check one tensor, and find out the type and shape that it will have in the file."""
    _check_name(name, "tensors", "names")
    if name == METADATA:
        raise ValueError(f"a tensor cannot be called {METADATA!r}")
    if isinstance(obj, Mapping):
        raise TypeError(
            f"tensors: {name!r} is a {type(obj).__name__} with tensors of its own, and the "
            'names in a file have one level: save {"outer.inner": tensor} '
            '(of a TensorDict: td.flatten_keys("."))'
        )
    try:
        data, element = exported(obj)
        if name in declared:
            element, shape = _declared(data, element, declared[name])
        else:
            carried = _carried(name, obj, data, element, known.get(name))
            if carried is not None:
                element, shape = carried
            elif element is None:
                raise TypeError(
                    f"the format has no element type for dtype {data.dtype}"
                )
            else:
                shape = _logical_shape(data, element)
        tensor_nbytes(element, shape)  # raises an error if no reader could take it
    except (TypeError, ValueError, BufferError) as error:
        error.add_note(f"while saving the tensor {name!r}")
        raise
    return _Source(name, element.name, shape, data)


def _carried(
    name: str,
    obj: Any,
    data: _core.Buffer,
    own: ElementType | None,
    info: SafetensorsInfo | None,
) -> tuple[ElementType, tuple[int, ...]] | None:
    """Return the type and shape in the file from which the tensor was loaded.

    The answer is None unless the tensor holds integers that stand for another type.

    `info` is given if the loaded dict had such integers under this name. It also applies to
    an array that the user has put in the tensor's place, if dtype and shape are the same.
    """
    note, is_itself = find(obj)
    if note is not None:
        element, shape, packed = TYPES[note.element], note.shape, note.packed_shape
    elif info is not None:
        element, shape, packed = TYPES[info.dtype], info.shape, packed_shape(info)
    else:
        return None
    if own is None or own is not type_of(np.dtype(element.numpy)):
        return None
    is_whole = is_itself or note is None or data.flags.c_contiguous
    if data.shape == packed and is_whole:
        return element, shape
    if note is not None and element.bits >= 8:
        return element, data.shape
    if note is not None and _has_whole_rows(data, note):
        return element, _logical_shape(data, element)
    raise TypeError(
        f"it was loaded as {element.name}, for which {data.dtype} stands, and has another "
        f"shape now; say what it is: dtypes={{{name!r}: {element.name!r}}} or "
        f"dtypes={{{name!r}: {own.name!r}}}"
    )


def _has_whole_rows(data: _core.Buffer, note: Note) -> bool:
    """Return whether packed elements still have their whole last axis."""
    return (
        len(data.shape) == len(note.shape) == len(note.packed_shape)
        and data.shape[-1:] == note.packed_shape[-1:]
        and data.strides[-1:] == (1,)
    )


def _logical_shape(data: _core.Buffer, element: ElementType) -> tuple[int, ...]:
    """Return the shape in elements of data that may be packed along its last axis."""
    if element.bits >= 8:
        return data.shape
    nbits = data.shape[-1] * 8 if data.shape else 8
    if not data.shape or nbits % element.bits:
        raise ValueError(
            f"{nbits // 8} bytes do not hold a whole number of {element.name}: pass a "
            "SafetensorsInfo in dtypes, which says the shape"
        )
    return (*data.shape[:-1], nbits // element.bits)


def _declared(
    data: _core.Buffer, own: ElementType | None, declared: str | SafetensorsInfo
) -> tuple[ElementType, tuple[int, ...]]:
    """Return the type and shape that the caller declares, after checking that they fit."""
    name = declared if isinstance(declared, str) else declared.dtype
    element = TYPES.get(name)
    if element is None:
        raise ValueError(f"dtypes: the element type {name!r} is not known")
    integers = data.dtype.kind in "ui" and data.itemsize == max(element.bits // 8, 1)
    if element is not own and not integers:
        raise TypeError(
            f"dtypes: {data.dtype} is neither {name} nor integers of its width"
        )
    if isinstance(declared, str):
        return element, _logical_shape(data, element)
    if tensor_nbytes(element, declared.shape) != data.nbytes:
        raise ValueError(
            f"dtypes: {name} of shape {declared.shape} is not {data.nbytes} bytes"
        )
    return element, declared.shape


def _shards(sources: list[_Source], limit: int | None) -> list[list[_Source]]:
    """Cut the tensors, in their order, into runs of at most `limit` bytes."""
    shards: list[list[_Source]] = [[]]
    held = 0
    for source in sources:
        if limit is not None and shards[-1] and held + source.data.nbytes > limit:
            shards.append([])
            held = 0
        shards[-1].append(source)
        held += source.data.nbytes
    return shards


def _check_nameable(path: Path) -> None:
    try:
        check_text(path.name)
    except ValueError as error:
        raise ValueError(f"{error}: no index can name its shards") from None
    if "\\" in path.name:
        raise ValueError(f"{path.name!r} has a backslash: no index can name its shards")


def _parts_of(index: Path) -> set[Path]:
    """Return the files of an earlier checkpoint that a new one may remove, with its index.

    An index may come from anywhere. A file is taken for one of the checkpoint's only if it
    lies beside the index, has a name that `save_safetensors` gives, and is not a link.
    """
    try:
        files = set(read_index(index).values())
    except (OSError, SafetensorsError):
        return set()
    stem = re.escape(index.name.removesuffix(INDEX_SUFFIX))
    named = re.compile(stem + r"-\d{5}-of-\d{5}\.safetensors")
    return {index} | {
        file
        for file in files
        if file.parent == index.parent
        and named.fullmatch(file.name)
        and not index.is_symlink()
        and not file.is_symlink()
        and file.is_file()
    }


def _index(parts: list[Path], shards: list[list[_Source]]) -> bytes:
    """Return the contents of the index."""
    files, total = {}, 0
    for part, members in zip(parts, shards, strict=True):
        for source in members:
            files[source.name] = part.name
            total += source.data.nbytes
    return index_bytes(files, total)


def _write(
    news: list[Replacement],
    shards: list[list[_Source]],
    metadata: Mapping[str, str] | None,
    progress_parts: Parts,
    fsync: bool,
) -> None:
    """Write the files of some shards at the same time."""
    nbytes = sum(source.data.nbytes for sources in shards for source in sources)
    with contextlib.ExitStack() as stack:
        files = []
        for new, sources in zip(news, shards, strict=True):
            head, infos = header_bytes(
                (
                    (name, dtype, shape, data.nbytes)
                    for name, dtype, shape, data in sources
                ),
                metadata,
            )
            data = {source.name: source.data for source in sources}
            file = stack.enter_context(new.open(fsync))
            file.write(head)
            # This flushes the header too. If the disk is too full for it, the error names
            # the file that was opened last.
            file.truncate(len(head) + sum(info.nbytes for info in infos.values()))
            files.append(
                (file, [(info.offset, data[name]) for name, info in infos.items()])
            )
        write_files(files, progress_parts.next(nbytes))
