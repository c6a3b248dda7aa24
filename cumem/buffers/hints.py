# SPDX-License-Identifier: Apache-2.0
"""Tells users who know other libraries what to type in cumem instead.

A name, a member or an argument of NumPy, CuPy, PyTorch or Numba that cumem does not have
raises the usual error, and the tables here add to it what the user should type. A hint is
only text in an error, and does not make the other name work.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

import numpy as np

from cumem import _core
from cumem.base.kinds import is_on_device, kind_named

_COMPUTES = "buffers do not compute: "
_PINNED = 'cumem.array(buf, kind="pinned")'

#: Hints for members that arrays of NumPy, CuPy or PyTorch have and buffers do not.
MEMBERS = {
    "clone": "buf.copy()",
    "close": "buf.free()",
    "contiguous": 'cumem.asarray(buf, order="C")',
    "copy_": "cumem.copy(buf, src), or cumem.copy_async(buf, src) for non_blocking=True",
    "cpu": f"buf.to_numpy(), or {_PINNED} for a buffer",
    "cuda": 'cumem.array(buf, kind="device", device=index)',
    "data_ptr": "buf.ptr",
    "detach": "buf itself: nothing is differentiated",
    "fill_": "buf.fill(value)",
    "float": "buf.astype(np.float32)",
    "get": "buf.to_numpy(), or cumem.copy_async(array, buf) for a copy in the background",
    "is_cuda": 'buf.kind == "device"',
    "is_pinned": 'buf.kind == "pinned"',
    "numel": "buf.size",
    "pin_memory": f"{_PINNED}, or cumem.register(array) to pin it in place",
    "set": "cumem.copy(buf, src) or buf[...] = src, or cumem.copy_async(buf, src)",
    "take": "buf.numpy().take(indices)",
    "to": 'cumem.array(buf, kind="device", device=index), buf.to_numpy() or '
    "buf.astype(dtype), or cumem.copy_async(dst, buf) for non_blocking=True",
    "tobytes": "bytes(buf)",
    "tofile": "cumem.tofile(file, buf)",
    "type": "buf.astype(dtype)",
    "zero_": "buf.fill(0)",
}
#: Members of arrays that compute. They all get the hint of `compute_hint`.
FUNCTIONS = ("max", "mean", "min", "sum")
#: Hints for members that managed buffers had in early builds.
MANAGED_MEMBERS = {"prefetch": "buf.prefetch_pages(to)"}
#: All names for which every buffer raises an AttributeError with a hint.
NAMES = frozenset(MEMBERS).union(FUNCTIONS)
#: Hints for members that streams of other libraries have and those of cumem do not.
STREAM_MEMBERS = {
    "cuda_stream": "stream.handle",
    "is_done": "stream.done",
    "ptr": "stream.handle",
    "query": "stream.done",
    "record_event": "stream.record(event)",
    "sync": "stream.synchronize()",
    "use": "with stream: ...",
    "wait_for_event": "stream.wait(event)",
    "wait_stream": "stream.wait(other)",
}
#: The same for events.
EVENT_MEMBERS = {
    "is_done": "event.done",
    "sync": "event.synchronize()",
    "time_since": "event.seconds_since(start), in seconds",
    "time_till": "end.seconds_since(event), in seconds",
}
#: The same for transfers, which others call futures or events.
TRANSFER_MEMBERS = {
    "get": "transfer.wait(), which returns None: the bytes are in the target",
    "query": "transfer.done",
    "result": "transfer.wait(), which returns None: the bytes are in the target",
    "synchronize": "transfer.wait()",
}
#: The same for pools.
POOL_MEMBERS = {
    "free_all_blocks": "pool.trim()",
    "malloc": "pool.allocate(nbytes)",
    "set_limit": "pool.limit = nbytes",
    "total_bytes": "pool.stats().reserved_nbytes",
    "used_bytes": "pool.stats().live_nbytes",
}
_PAGE_LOCKED = 'kind="pinned" or empty_pinned() is page-locked memory'
_NO_WAIT = "copy_async(dst, src) does not wait, and takes stream= for the order"
_HOST_FLAG = "empty_pinned() and empty_mapped() take it"
#: Hints for arguments that cumem's functions do not take.
ARGUMENTS = {
    "attach": "empty_managed() takes it",
    "attach_global": 'empty_managed(shape, attach="global") or "host"',
    "blocking": _NO_WAIT,
    "callback": "transfer.add_done_callback(function) calls it when the copy is done",
    "copy": "cumem.asarray(obj, copy=False) never copies, cumem.array(obj) always does",
    "kind": "cumem.empty(shape, dtype, kind) makes memory of that kind",
    "layout": "buffers are dense: leave it out",
    "like": "cumem.empty_like(buf) makes the same kind of memory",
    "mapped": 'kind="mapped" or empty_mapped() is such memory',
    "memory_format": 'order="C" or "F" is the order of the axes; for channels_last, '
    "cumem.empty((n, h, w, c)).transpose(0, 3, 1, 2)",
    "ndmin": "buf[None] has one more dimension",
    "non_blocking": _NO_WAIT,
    "out": "cumem.copy(out, src) writes into existing memory",
    "pin": _PAGE_LOCKED,
    "pin_memory": _PAGE_LOCKED,
    "pinned": _PAGE_LOCKED,
    "portable": _HOST_FLAG,
    "requires_grad": "torch.from_dlpack(buf) is a tensor that has it",
    "shape": "cumem.empty(shape, buf.dtype, buf.kind) has another shape than buf",
    "size": "the argument for the lengths is shape=",
    "strides": "cumem.asbuffer(obj) takes memory with the strides it has",
    "subok": "a buffer is always a Buffer: leave it out",
    "wc": "empty_pinned() and empty_mapped() take write_combined=True",
    "write_combined": _HOST_FLAG,
}
_PIECES = "rows= says how many rows a chunk has, nbytes= how many bytes"
_CUT = dict.fromkeys(
    ("batch_size", "chunk", "chunk_rows", "chunk_size", "chunks", "chunksize", "size"),
    _PIECES,
)
_CUT["chunk_nbytes"] = "nbytes= says how many bytes a chunk has"
_NEXT = "depth= says how many batches may be on their way besides the one in use"
_LOADERS = "it is an argument of the DataLoader: give it there"
_PICKLES = "nothing is unpickled: leave it out"
_PLACE = "kind= and device= say where the data goes"
_NO_IPC = "events are not shared between processes: leave it out"
_LIMIT = 'limit= is a number of bytes, or a text such as "4GiB" or "50%"'
_LIMITS = dict.fromkeys(("fraction", "max_size", "maximum_pool_size", "size"), _LIMIT)
_CONSTANT = "it is a constant now: leave it out; threads= and ring_nbytes= remain"
_INTO = {
    "map_location": _PLACE,
    "pin_memory": 'kind="pinned" is page-locked memory',
    "pinned": 'kind="pinned" is page-locked memory',
}
_TEXT = "only binary files are read and written: for text use NumPy"
_AWAITED = (
    "one copy moves all that has to move, and the call waits for it: leave it out"
)
#: Hints for arguments of functions in which these names have another meaning than usual.
#: For a function that is listed here, `ARGUMENTS` is not used.
ARGUMENTS_OF: dict[str, dict[str, str]] = {
    "chunks": _CUT,
    "configure": dict.fromkeys(
        (
            *("bounce_nbytes", "chunk_nbytes", "depth", "quick_nbytes"),
            *("staged_down_nbytes", "staged_up_nbytes"),
        ),
        _CONSTANT,
    ),
    "Pool": {
        **_LIMITS,
        "initial_pool_size": "pool.allocate(nbytes) once fills the pool",
    },
    "set_limit": {**_LIMITS, "nbytes": _LIMIT},
    "take_rows": {
        "axis": "rows lie along the first axis: leave it out",
        "dtype": "rows keep their dtype, which cumem.array(rows, dtype) converts",
        **dict.fromkeys(
            ("device", "kind"),
            "out= takes memory for the rows, such as cumem.empty_pinned(shape, dtype)",
        ),
        **dict.fromkeys(
            ("idx", "ids", "index", "indices"), "rows= takes the numbers of the rows"
        ),
    },
    "record": dict.fromkeys(
        ("file", "filename", "path"), "rec.save(path) writes a record to a file"
    ),
    "Region": {
        "kind": "the memory of a region is device memory: leave it out",
        "name": "tag= is the name of a region",
    },
    "Event": {
        "block": "blocking=True lets the processor sleep in synchronize()",
        "disable_timing": "timing=False makes such an event",
        "enable_timing": "timing=True, which is the default, makes such an event",
        "interprocess": _NO_IPC,
    },
    "Stream": {
        "device_id": "device= is the device",
        "null": "cumem.Stream.from_external(0) is CUDA's default stream",
        "ptds": "cumem.Stream.from_external(2) is the default stream of the thread",
    },
    "pipeline": _CUT,
    "tiles": dict.fromkeys(
        ("nbytes", "rows", "shape", "size", "tile", "tile_shape"),
        "nbytes_or_shape= is a number of bytes, or the shape of a tile: (30, 10) for 30 "
        "rows of 10",
    ),
    "prefetch": {
        "batch_size": _LOADERS,
        "buffer_size": _NEXT,
        "collate_fn": _LOADERS,
        "non_blocking": "copies do not block the loop in any case: leave it out",
        "num_workers": _LOADERS,
        "pin_memory": "batches go through page-locked memory in any case: leave it out, "
        "or give the loader collate_fn=cumem.PinnedCollate()",
        "prefetch_factor": _NEXT,
        "shuffle": _LOADERS,
        "size": _NEXT,
    },
    "reshape": {
        "copy": "a reshape never copies: leave it out, or buf.copy().reshape(...) first",
        **dict.fromkeys(
            ("newshape", "shape", "size"), "the lengths come first: buf.reshape(2, 3)"
        ),
    },
    "transpose": dict.fromkeys(
        ("axes", "dims", "perm"), "the axes come first: buf.transpose(1, 0)"
    ),
    "load": {
        "encoding": _PICKLES,
        "fix_imports": _PICKLES,
        **_INTO,
        "mmap": "np.load(file, mmap_mode=...) maps a file, which copy() and chunks() take",
        "weights_only": _PICKLES,
    },
    "save": {"allow_pickle": _PICKLES, "fix_imports": _PICKLES},
    "load_safetensors": {
        "filename": "the file is path, the first argument",
        "keys": "names= chooses tensors",
        **_INTO,
    },
    "fromfile": {**_INTO, "like": "out= is memory to fill", "sep": _TEXT},
    "tofile": {"format": _TEXT, "sep": _TEXT},
    "prefetch_pages": dict.fromkeys(
        ("device", "dst", "location"),
        'to= says where the pages go: a device, "cpu" or "numa:N"',
    ),
    "to_device": {
        "non_blocking": _AWAITED,
        "copy": _AWAITED,
        "dtype": "cumem.array(obj, dtype) converts one array",
    },
    "to_host": {"non_blocking": _AWAITED, "copy": _AWAITED},
    "copy": {
        **ARGUMENTS,
        "nbytes": "slice both ends: cumem.copy(dst[:n], src[:n])",
        "size": "slice both ends: cumem.copy(dst[:n], src[:n])",
    },
}


_LENGTHS = (
    "the lengths are one argument, as in cumem.empty((2, 3)), and order= and the like are "
    "given by name"
)
_PAIRS = "the pairs are one argument, as in cumem.copy_many(zip(dsts, srcs))"
#: Hints for calls with more arguments by position than a function takes.
POSITIONAL: dict[str, str] = {
    **dict.fromkeys(("empty", "zeros"), _LENGTHS),
    **{f"empty_{kind}": _LENGTHS for kind in ("device", "managed", "mapped", "pinned")},
    "Pool": "a limit and the like are given by name, as in cumem.Pool(kind, limit=limit)",
    "advise": "advice is given by name, as in buf.advise(read_mostly=True)",
    "copy_many": _PAIRS,
    "copy_many_async": _PAIRS,
}


#: Hints for functions of other libraries whose names ``cumem`` does not have.
NAMES_OF_CUMEM: dict[str, str] = {
    "alloc_pinned_memory": 'use cumem.empty_pinned(nbytes, "u1")',
    "arange": "use cumem.array(np.arange(n))",
    "as_tensor": "use cumem.asarray(obj)",
    "asfortranarray": 'use cumem.asarray(obj, order="F")',
    "concatenate": "use cumem.copy(out[part], buf) for each part",
    "copyto": "use cumem.copy(dst, src)",
    "cuda": "use cumem.Stream, cumem.Event and cumem.Device themselves",
    "device": "use cumem.Device(index)",
    "device_array": "use cumem.empty(shape)",
    "empty_cache": "use cumem.trim()",
    "from_dlpack": "use cumem.asbuffer(obj)",
    "from_numpy": "use cumem.asbuffer(obj)",
    "frombuffer": "use cumem.asbuffer(obj)",
    "get_default_memory_pool": "use cumem.default_pool(kind)",
    "get_default_pinned_memory_pool": 'use cumem.default_pool("pinned")',
    "integrations": "import cumem.integrations.torch, .cupy, .numba or .cuda_core",
    "load_file": "use cumem.load_safetensors(path)",
    "managed_array": "use cumem.empty_managed(shape)",
    "mapped_array": "use cumem.empty_mapped(shape)",
    "max_memory_allocated": "use cumem.stats()[kind].peak_live_nbytes",
    "mem_get_info": "use cumem.memory_info()",
    "memcpy": "use cumem.copy(dst, src)",
    "memcpy_async": "use cumem.copy_async(dst, src)",
    "memory_allocated": "use cumem.stats()[kind].live_nbytes",
    "memory_reserved": "use cumem.stats()[kind].reserved_nbytes",
    "memory_stats": "use cumem.stats()",
    "MemoryPool": "use cumem.Pool(kind)",
    "ndarray": "use cumem.empty(shape), which makes a cumem.Buffer",
    "ones": "use cumem.full(shape, 1)",
    "ones_like": "use cumem.full_like(buf, 1)",
    "pin_memory": "use cumem.register(array) in place, or cumem.empty_pinned(shape)",
    "pinned_array": "use cumem.empty_pinned(shape)",
    "reset_peak_memory_stats": "use cumem.default_pool(kind).reset_peaks()",
    "safe_open": "use cumem.load_safetensors(path, names=[...]) for some of the tensors, "
    "cumem.read_safetensors_header(path) for names, shapes and memmap(name)",
    "save_file": "use cumem.save_safetensors(path, tensors)",
    "savez_compressed": "use cumem.savez(file), which does not compress",
    "set_device": "use cumem.set_current_device(index), or `with cumem.Device(index):`",
    "stack": "use cumem.copy(out[index], buf) for each index",
    "tensor": "use cumem.array(obj)",
    "to_gpu": "use cumem.array(obj)",
}


#: Hints for names that ``cumem`` had in early builds; docs/renamed.md has the same list.
#: Names that have moved to ``cumem.types`` need no row, since `cumem` finds them there.
FORMER_NAMES: dict[str, str] = {
    "BUILT_RUNTIME": "use cumem.info.about().runtime_version",
    "Calibration": "nothing is calibrated: use cumem.configure(threads=, ring_nbytes=)",
    "OLDEST_DRIVER": "use cumem.info.about().oldest_driver_version",
    "TRACEMALLOC_DOMAIN": "use cumem.info.about().tracemalloc_domain",
    "ascontiguousarray": 'use cumem.asarray(obj, order="C")',
    "bench": "import cumem.tools.bench",
    "calibrate": "nothing is calibrated: use cumem.configure(threads=, ring_nbytes=)",
    "collate_pinned": "use cumem.PinnedCollate(), which stacks samples when it is called",
    "diff": "use after.diff(before), a method of records",
    "driver_version": "use cumem.info.about().driver_version",
    "emulation_reason": "use cumem.info.about().emulation_reason",
    "load_record": "use cumem.Record.load(path)",
    "pool_counters": "use cumem.stats()[kind], and its to_dict() for plain numbers",
    "prefetch_many": "use cumem.prefetch_pages(buffers, to)",
    "replay": "import cumem.tools.replay",
    "runtime_version": "use cumem.info.about().runtime_version",
    "safetensors": "use cumem.load_safetensors(path), or import cumem.files.safetensors",
    **{
        name: f"from cumem.integrations.torch import {name}"
        for name in ("ActivationOffload", "offload", "offload_activations", "restore")
    },
}


def name_hint(name: str) -> str | None:
    """Return what to type for a name that ``cumem`` does not have, or None if unknown."""
    return NAMES_OF_CUMEM.get(name) or FORMER_NAMES.get(name)


def argument_hint(function: str, keyword: str) -> str | None:
    """Return what to type for an argument that a function does not take, or None."""
    return ARGUMENTS_OF.get(function, ARGUMENTS).get(keyword)


def nearest(keyword: str, names: Iterable[str]) -> str | None:
    """Return a question that names the argument with the most similar spelling, or None."""
    known = [name for name in names if not name.startswith("_")]
    near = difflib.get_close_matches(keyword.lower(), known, 1, 0.7)
    return f"did you mean '{near[0]}'?" if near else None


#: The dtypes in cumem's list that NumPy has only with the ml_dtypes package.
_LISTED = frozenset(row.name for row in _core._DTYPES.values() if not row.kind)
#: Short names that people write, with the full names that NumPy knows.
_SHORT_NAMES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
}


#: Names that safetensors and others use for libraries, with the names used here.
_FRAMEWORK_NAMES = {
    **dict.fromkeys(("pt", "torch", "pytorch"), "torch"),
    **dict.fromkeys(("np", "numpy"), "numpy"),
    **dict.fromkeys(("flax", "jax"), "jax"),
    **dict.fromkeys(("cp", "cupy"), "cupy"),
}


def framework_hint(given: object, known: Collection[str | None]) -> str:
    """Return what to type for the name of a library, or "" if it is not among `known`.

    The text begins with the ": " that separates it from the error's text.
    """
    here = _FRAMEWORK_NAMES.get(str(given).lower())
    return f": say framework={here!r}" if here in known and here is not None else ""


def dtype_hint(dtype: object, is_of_ml_dtypes: bool) -> str | None:
    """Return what is wrong with a dtype that NumPy does not take, and what to type.

    Returns None if there is no advice about it. `is_of_ml_dtypes` says that the dtype is
    the name of a type of ml_dtypes, which must then be missing.
    """
    if isinstance(dtype, str):
        short = dtype.removeprefix("torch.")
        name = _SHORT_NAMES.get(short, short)
        if is_of_ml_dtypes:
            return (
                "is a type of the ml_dtypes package, which is not installed or too old: "
                "pip install -U ml_dtypes"
            )
        if name != dtype:
            return f'is not a name of NumPy\'s: use "{name}"'
    kind = kind_named(dtype)
    if kind is not None:
        is_kind = str(dtype).strip().lower() == kind
        what = "a kind of memory" if is_kind else "a place"
        place = f'kind="{kind}"'
        if str(dtype).startswith("cuda:"):
            place += f' and device="{dtype}"'
        call = f"cumem.empty(shape, dtype, {place.replace(' and', ',')})"
        return f"is {what}, not a dtype: write {place}, as in {call}"
    if isinstance(dtype, int) and not isinstance(dtype, bool):
        return (
            "is a number, not a dtype: the lengths are one argument, as in "
            "cumem.empty((2, 3))"
        )
    if isinstance(dtype, _core.Stream) or type(dtype).__name__ in ("Device", "Pool"):
        name = type(dtype).__name__.lower()
        return f"is a {name}, not a dtype: write {name}="
    library = type(dtype).__module__.partition(".")[0]
    if library not in ("numba", "torch"):
        return None
    name = str(dtype).rpartition(".")[2]
    if name in _LISTED:
        return f"is one of {library}: use ml_dtypes.{name}"
    if name in np.sctypeDict and np.dtype(name).isbuiltin == 1:
        return f'is one of {library}: use "{name}"'
    return f"is one of {library} that NumPy does not have"


def host_array(buffer: _core.Buffer) -> str:
    """Return the call that gives a NumPy array of the buffer's values."""
    return "buf.to_numpy()" if is_on_device(buffer.kind) else "buf.numpy()"


def compute_hint(buffer: _core.Buffer) -> str:
    """Return which library to compute with; the one for the buffer's side comes first."""
    there = "cupy.asarray(buf) or torch.from_dlpack(buf) on the device"
    here = host_array(buffer)
    return (
        f"use {there}, or {here}"
        if is_on_device(buffer.kind)
        else f"use {here}, or {there}"
    )


def _members_of(owner: object) -> dict[str, str]:
    """Return the hints for the members of one of cumem's objects that is not a buffer."""
    for cls, members in (
        (_core.Stream, STREAM_MEMBERS),
        (_core.Event, EVENT_MEMBERS),
        (_core.Transfer, TRANSFER_MEMBERS),
    ):
        if isinstance(owner, cls):
            return members
    return POOL_MEMBERS


def refuse_attribute(owner: Any, name: str) -> NoReturn:
    """Raise an AttributeError that says what to type; so ``hasattr`` is False."""
    kind = type(owner).__name__
    if isinstance(owner, _core.Buffer):
        if name in FUNCTIONS:
            hint = _COMPUTES + compute_hint(owner)
        else:
            typed = {**MEMBERS, **MANAGED_MEMBERS}[name]
            hint = f"use {typed.replace('buf.numpy()', host_array(owner))}"
    else:
        hint = f"use {_members_of(owner)[name]}"
    text = f"{kind!r} object has no attribute {name!r}; {hint}"
    raise AttributeError(text)


def refuse_arithmetic(a: Any, b: Any) -> Any:
    """Raise a TypeError that says where to compute, or return NotImplemented.

    The error is raised if the other operand is a buffer, a plain number, a list or a tuple.
    Operands of other types may be able to compute with a buffer, and NotImplemented lets
    them try.
    """
    for each, other in ((a, b), (b, a)):
        if isinstance(each, _core.Buffer) and (
            isinstance(other, (_core.Buffer, int, float, complex, list, tuple))
            and type(other).__module__ != "numpy"
        ):
            refuse_in_place(each, other)
    return NotImplemented


def refuse_equality(buffer: _core.Buffer, number: complex) -> NoReturn:
    """Raise a TypeError for ``==`` and ``!=`` with a number.

    The user may have meant one element or all of them, so the text shows both.
    """
    element = "buf.item()" if buffer.ndim == 0 else "buf[index].item()"
    raise TypeError(
        "a buffer is compared by identity, so it equals no number: write "
        f"{element} == {number!r} for one element, {host_array(buffer)} == {number!r} "
        "for all"
    )


def refuse_in_place(buffer: _core.Buffer, other: object) -> NoReturn:
    """Raise a TypeError that says where to compute, whatever `other` is."""
    raise TypeError(_COMPUTES + compute_hint(buffer))
