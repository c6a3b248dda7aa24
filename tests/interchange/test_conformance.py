# SPDX-License-Identifier: Apache-2.0
"""What each entrance of each library must make of each kind of buffer.

An entrance is a function that takes our buffer, such as `np.asarray(buf)`. The tables
`ON_GPU` and `EMULATED` say for each kind of buffer whether the entrance shares the memory,
copies it or refuses. The protocols and docs/interop.md demand the same. What a library does
otherwise is listed in `LIMITS`. On the emulated device, other libraries take all memory for
the CPU's.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.consumers import (
    ENTRANCES,
    NUMBERS,
    NUMPY_LETS_WRITE,
    CudaCore,
    CuPy,
    Jax,
    Library,
    Numba,
    NumPy,
    Torch,
)
from support.exporters import FakeCAI, interface_of

import cumem


@pytest.fixture(autouse=True)
def numpy_can_write(request: pytest.FixtureRequest) -> None:
    """Skip tests that write through DLPack if NumPy is so old that its arrays are
    read-only.
    """
    name = request.node.name
    by_dlpack = "np.from_dlpack" in name or (
        "copy_is_obeyed" in name and "numpy" in name
    )
    if by_dlpack and not NUMPY_LETS_WRITE:
        pytest.skip("this NumPy makes read-only arrays by DLPack")


os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

PAGE = Path(__file__).parents[2] / "docs" / "interop.md"
SHAPE = (12, 16)

# Libraries warn when they are imported, and about some of these buffers.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

# -- what is expected ------------------------------------------------------------------

KINDS = (
    *("ordinary", "pinned", "write-combined", "registered", "mapped", "managed"),
    *("mapped.as_device()", "managed.as_device()", "device"),
)

#: In the tables below, "=" stands for no copy, "c" for a copy, "?" for either, and "~"
#: for the right values or a refusal. A letter stands for one of these refusals.
REFUSALS: dict[str, tuple[Any, str]] = {
    "H": (TypeError, "the host cannot read device memory"),
    "B": ((TypeError, ValueError), "bytes-like|buffer protocol"),
    "U": (BufferError, "Unsupported device"),
    "C": (TypeError, "CPU arrays cannot"),
    "3": (TypeError, "Unsupported array type: 3"),
    "M": (BufferError, "Unsupported device_type: 13"),
    "J": (TypeError, "unsupported device type"),
    "N": (TypeError, "cuda array interface"),
    "A": (AttributeError, "__cuda_array_interface__"),
    "-": (BufferError, "negative strides"),
    "S": (ValueError, "stride"),
    "F": ((BufferError, ValueError, RuntimeError), "contiguous|retrieve buffer"),
    "0": (ValueError, "must not be 0"),
    "T": ((TypeError, BufferError, ValueError, RuntimeError, AttributeError), ""),
}

#: Each entrance has a sign for each kind: six kinds for the host, then three for the
#: device.
ON_GPU = {
    "memoryview(buf)": "======BBB",
    "np.asarray(buf)": "======HHH",
    "np.from_dlpack(buf)": "======UUU",
    'np.from_dlpack(buf, device="cpu")': "========c",
    "np.frombuffer(buf)": "======BBB",
    "cupy.asarray(buf)": "cccc=====",
    "cupy.from_dlpack(buf)": "C3333====",
    "torch.as_tensor(buf)": "=========",
    'torch.as_tensor(buf, device="cuda")': "cccc=====",
    "torch.from_dlpack(buf)": "=====M===",
    "torch.frombuffer(buf)": "======BBB",
    "torch.from_numpy(buf.numpy())": "======HHH",
    "jnp.asarray(buf)": "cccc=====",
    "jax.dlpack.from_dlpack(buf)": "c====J===",
    "tvm_ffi.from_dlpack(buf)": "=========",
    "cuda.as_cuda_array(buf)": "NNNN=====",
    "StridedMemoryView.from_any_interface(buf)": "=========",
    "StridedMemoryView.from_dlpack(buf)": "=========",
    "StridedMemoryView.from_cuda_array_interface(buf)": "AAAA=====",
}
#: Libraries for the CPU answer otherwise on the emulated device.
EMULATED = {
    "np.from_dlpack(buf)": "=========",
    "torch.from_dlpack(buf)": "=========",
    "jnp.asarray(buf)": "??????HHH",
    "jax.dlpack.from_dlpack(buf)": "?========",
}

#: Libraries behave in these ways although no protocol demands it. The versions are
#: those in which this was seen.
LIMITS = {
    "flat": "np.frombuffer and torch.frombuffer return one axis, and refuse gaps between "
    "elements",
    "numpy legacy": "NumPy before 2.1 asks for capsules from before DLPack 1.0 and makes "
    "read-only arrays of them",
    "torch empty": "torch.frombuffer refuses empty memory (2.11, 2.13)",
    "torch read-only": "PyTorch has no read-only tensors. By DLPack it accepts read-only "
    "memory and may write to it (2.11, 2.13). By __cuda_array_interface__ it refuses it",
    "torch stream": "torch.as_tensor ignores the stream of __cuda_array_interface__ "
    "(2.11)",
    "jax compact": "JAX takes only strides that leave no gaps, and copies memory that is "
    "not aligned to 64 bytes (0.11, 0.12)",
    "jax legacy": "JAX asks for capsules from before DLPack 1.0, which cannot say that "
    "memory is read-only (0.11, 0.12)",
    "jax default streams": "JAX ignores the streams 1 and 2 in a "
    "__cuda_array_interface__, which are the default streams, and reads before their work "
    "is done (0.11)",
    "jax owner": "jnp.asarray does not keep an object with __cuda_array_interface__ alive "
    "(0.11): hold the buffer",
    "cupy read-only": "CuPy and Numba ignore that memory is read-only (14.2, 0.68)",
    "float8": "PyTorch and JAX exchange float8 by DLPack only in newer versions (seen in "
    "2.13 and 0.12)",
    "tvm read-only": "TVM FFI ignores that memory is read-only (0.1.15)",
    "tvm legacy": "TVM FFI asks objects without the C functions for capsules from before "
    "DLPack 1.0 (0.1.15)",
}
FLAT = ("np.frombuffer(buf)", "torch.frombuffer(buf)")
CAI_THEN_BUFFER = ("cupy.asarray(buf)", "jnp.asarray(buf)")


def is_device_type(kind: str) -> bool:
    return kind == "device" or kind.endswith(".as_device()")


def answer_of(entrance: str, kind: str, emulated: bool) -> str:
    """Return the letter that the tables have for this entrance and kind of memory."""
    row = ON_GPU[entrance]
    if emulated:
        row = EMULATED.get(entrance, row)
    return row[KINDS.index(kind)]


# -- what is handed over ---------------------------------------------------------------


@dataclass
class Sample:
    """A buffer of a kind, and the owner of its memory."""

    owner: cumem.Buffer
    buffer: cumem.Buffer

    def bases(self) -> set[int]:
        """Return the addresses that the memory may have: for the host, the device and
        the emulation.
        """
        owner: Any = self.owner
        found = {owner.ptr, self.buffer.ptr, getattr(owner, "device_ptr", owner.ptr)}
        if owner.kind == "device" and cumem.backend() == "emulated":
            found.add(session.testing.alias(owner.ptr, owner.nbytes))
        return found

    def addresses(self, view: cumem.Buffer) -> set[int]:
        return {base + view.ptr - self.buffer.ptr for base in self.bases()}

    def write(self, array: np.ndarray) -> None:
        cumem.copy(self.owner, array)

    def read(self) -> np.ndarray:
        return values.get(self.owner)


def where_large_arrays_lie(array: np.ndarray) -> np.ndarray:
    """Return a copy that begins 16 bytes after a multiple of 64, where NumPy puts large
    arrays.

    Small arrays have other alignments, and JAX decides by the alignment whether it
    copies.
    """
    memory = np.empty(array.nbytes + 128, np.uint8)
    begin = (16 - memory.ctypes.data) % 64
    found = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


@contextlib.contextmanager
def sample_of(kind: str, array: np.ndarray) -> Iterator[Sample]:
    """Yield a buffer of a kind with the array's values."""
    with contextlib.ExitStack() as stack:
        base = kind.removesuffix(".as_device()")
        owner: cumem.Buffer
        if base == "ordinary":
            owner = cumem.asbuffer(where_large_arrays_lie(array))
        # These pages contain nothing else.
        elif base == "registered":
            memory = np.frombuffer(mmap.mmap(-1, max(1, array.nbytes)), np.uint8)
            pages = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
            owner = stack.enter_context(cumem.register(pages))
        elif base == "write-combined":
            owner = cumem.empty_pinned(array.shape, array.dtype, write_combined=True)
        else:
            owner = cumem.empty(array.shape, array.dtype, base)  # type: ignore[arg-type]
        if base != "ordinary":
            cumem.copy(owner, array)
        given = owner.as_device() if kind != base else owner
        sample = Sample(owner, given)
        try:
            yield sample
        finally:
            del owner, given, sample.owner, sample.buffer


@functools.cache
def library_of(entrance: str) -> Library:
    found = ENTRANCES[entrance][0]()
    gc.collect()
    # Otherwise each garbage collection would look at the library's objects.
    gc.freeze()
    return found


def is_before(version: str) -> bool:
    return bool(np.lib.NumpyVersion(np.__version__) < version)


def opened(entrance: str, runtime: session.Runtime) -> Library:
    """Return the library, or skip the test if it cannot be used on this runtime."""
    kind = ENTRANCES[entrance][0]
    if runtime.emulated and (kind.needs_gpu or '"cuda"' in entrance):
        pytest.skip("this entrance needs a GPU")
    library = library_of(entrance)
    if isinstance(library, NumPy) and "dlpack" in entrance and is_before("2.1.0"):
        pytest.skip(LIMITS["numpy legacy"])
    if isinstance(library, Torch) and not runtime.emulated and not library.has_cuda:
        pytest.skip("this PyTorch has no CUDA")
    if isinstance(library, Jax) and library.on_gpu is runtime.emulated:
        pytest.skip("JAX works on the other kind of device here")
    return library


def enter(entrance: str, buffer: object) -> Any:
    return ENTRANCES[entrance][1](library_of(entrance), buffer)


def numbers(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).random(shape, np.float32)


def has_values(library: Library, array: Any, expected: np.ndarray) -> bool:
    """Return whether the array has these values, or True if the library's arrays cannot
    be read.
    """
    library.wait()
    try:
        return library.raw(array) == expected.tobytes()
    except NotImplementedError:
        return True


def check_refused(entrance: str, buffer: object, letter: str) -> None:
    """Check that the entrance raises the error that this letter stands for."""
    error, text = REFUSALS[letter]
    with pytest.raises(error) as caught:
        enter(entrance, buffer)
    lines = str(caught.value)
    assert re.search(text, lines, re.IGNORECASE), lines


def is_right_or_refused(entrance: str, buffer: object, expected: np.ndarray) -> bool:
    """Return whether the library takes the right values or raises any error.

    Libraries have types of errors of their own.
    """
    try:
        array = enter(entrance, buffer)
    except Exception:
        return True
    return has_values(library_of(entrance), array, expected)


# -- each kind, each entrance ----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_answer(runtime, entrance, kind) -> None:
    library = opened(entrance, runtime)
    answer = answer_of(entrance, kind, runtime.emulated)
    first, ours, theirs = (numbers(i) for i in range(3))
    with sample_of(kind, first) as sample:
        if answer in REFUSALS:
            check_refused(entrance, sample.buffer, answer)
            return
        array = enter(entrance, sample.buffer)
        assert has_values(library, array, first)
        shared = library.address(array) in sample.addresses(sample.buffer)
        assert shared is (answer == "=") or answer == "?"
        if library.can_write and answer != "?":
            library.write(array, theirs)
            library.wait()
            assert (sample.read() == theirs).all() == shared
        # JAX keeps the values that it has read, so it would not show what is written later.
        if shared and not isinstance(library, Jax):
            sample.write(ours)
            assert has_values(library, array, ours)
        del array


def test_page_says_what_is_expected() -> None:
    """The measured table of docs/interop.md and the tables in this file agree."""
    words = {"=": "**no copy**", "c": "copied"}
    rows = re.findall(r"^\| `(.*)` \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    heads = re.search(
        r"^\| entrance \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    assert heads is not None
    kinds = [cell.strip(" `") for cell in heads[1].split("|")]
    assert len(rows) > 15
    for entrance, cells in rows:
        for kind, cell in zip(kinds, cells.split("|"), strict=True):
            expected = words.get(answer_of(entrance, kind, False), "refused")
            assert cell.strip().startswith(expected), (entrance, kind)


def test_table_has_every_entrance() -> None:
    assert list(ON_GPU) == list(ENTRANCES)
    assert {len(row) for row in (*ON_GPU.values(), *EMULATED.values())} == {len(KINDS)}


# -- layouts ---------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda b: b,
    "offset": lambda b: b[4:],
    "offset in a row": lambda b: b[2, 5:],
    "strided": lambda b: b[::2, ::4],
    "column": lambda b: b[:, 3],
    "inner block": lambda b: b[3:9, 2:7],
    "transposed": lambda b: b.T,
    "element": lambda b: b[4, 4],
    "empty": lambda b: b[:0],
    "empty, strided": lambda b: b[::2, 5:5],
    "length one": lambda b: b[3:4],
    "three axes": lambda b: b.reshape(3, 4, 16),
    "three axes, turned": lambda b: b.reshape(3, 4, 16).transpose(2, 0, 1),
    "reversed": lambda b: b[::-1],
    "rows reversed": lambda b: b[:, ::-2],
}
GAPS = ("strided", "column", "inner block", "transposed", "three axes, turned")
BACKWARD = ("reversed", "rows reversed")


def view_answer(entrance: str, view: str, kind: str, emulated: bool) -> str:
    """Return the expected sign for a view of a buffer that would be shared as a whole."""
    library = ENTRANCES[entrance][0]
    if entrance in FLAT and view in (*GAPS, *BACKWARD):
        return "F"
    if entrance == "torch.frombuffer(buf)" and view.startswith("empty"):
        return "0"
    if view.startswith("empty") and (library is CudaCore or kind == "managed"):
        # These libraries may ask the driver about the address, and empty memory has
        # none.
        return "~" if library in (CudaCore, CuPy, Jax) else "="
    if view in BACKWARD:
        if entrance in ("memoryview(buf)", "np.asarray(buf)"):
            return "="
        if entrance == "torch.from_numpy(buf.numpy())":
            return "S"
        if entrance in CAI_THEN_BUFFER and not is_device_type(kind):
            # These libraries take host memory by the buffer protocol, and may copy it.
            return "?"
        if kind == "device" and 'device="cpu"' in entrance:
            return "c"
        return "-" if "dlpack" in entrance or "as_tensor" in entrance else "T"
    if library is Jax:
        if view in ("strided", "column", "inner block") or not emulated:
            return "=" if view == "whole" else "~"
        return "=" if view == "whole" else "?"
    return "="


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_layouts(runtime, entrance) -> None:
    library = opened(entrance, runtime)
    data = numbers(3)
    kinds = [k for k in KINDS if answer_of(entrance, k, runtime.emulated) == "="]
    if not kinds:
        pytest.skip("this entrance may copy every kind here")
    for kind in kinds:
        with sample_of(kind, data) as sample:
            for name, cut in VIEWS.items():
                view, expected = cut(sample.buffer), cut(data)
                answer = view_answer(entrance, name, kind, runtime.emulated)
                where = f"{entrance}: {name} of {kind}"
                if answer in REFUSALS:
                    check_refused(entrance, view, answer)
                    continue
                if answer == "~":
                    assert is_right_or_refused(entrance, view, expected), where
                    continue
                array = enter(entrance, view)
                assert has_values(library, array, expected), where
                if entrance not in FLAT:
                    assert library.shape(array) == view.shape, where
                if answer == "=" and view.size > 0:
                    assert library.address(array) in sample.addresses(view), where
                del array
            del view


# -- dtypes ----------------------------------------------------------------------------


def dtypes_of(library: Library) -> list[tuple[str, np.dtype[Any]]]:
    """Return the library's dtypes that exist here: those beyond NumPy's need ml_dtypes."""
    found = []
    for name in library.dtypes:
        if name not in NUMBERS:
            try:
                dtype = getattr(importlib.import_module("ml_dtypes"), name)
            except ImportError:
                continue
        found.append((name, np.dtype(dtype if name not in NUMBERS else name)))
    return found


def values_of(dtype: np.dtype[Any]) -> np.ndarray:
    """Return seven elements of a dtype, made of the numbers 0 to 6."""
    if dtype.names is not None:
        made = np.zeros(7, dtype)
        made["x"], made["label"] = np.arange(7), np.arange(7)[::-1]
        return made
    return (np.arange(7) % 2 if dtype.kind == "b" else np.arange(7)).astype(dtype)


def kind_for(entrance: str, emulated: bool) -> str:
    """Return a kind that this entrance shares, of the host if possible."""
    return next(
        kind
        for kind in ("pinned", "device", "mapped")
        if answer_of(entrance, kind, emulated) in "=?"
    )


def dtype_answer(entrance: str, name: str, emulated: bool) -> str:
    named = name.startswith(("bfloat", "float8"))
    if named and entrance == "torch.from_numpy(buf.numpy())":
        # PyTorch takes no NumPy arrays of these dtypes.
        return "T"
    if named and entrance == "jnp.asarray(buf)" and not emulated:
        # These dtypes have no type string for __cuda_array_interface__.
        return "T"
    if name.startswith("float8") and not emulated:
        # LIMITS["float8"] says why.
        return "~"
    return "="


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_dtypes(runtime, entrance) -> None:
    library = opened(entrance, runtime)
    kind = kind_for(entrance, runtime.emulated)
    for name, dtype in dtypes_of(library):
        data = values_of(dtype)
        with sample_of(kind, data) as sample:
            answer = dtype_answer(entrance, name, runtime.emulated)
            if answer in REFUSALS:
                check_refused(entrance, sample.buffer, answer)
                continue
            if answer == "~":
                assert is_right_or_refused(entrance, sample.buffer, data), name
                continue
            array = enter(entrance, sample.buffer)
            # TVM FFI cannot name all of these dtypes.
            if library.modules[0] == "tvm_ffi":
                assert library.address(array) in sample.addresses(sample.buffer)
            else:
                assert has_values(library, array, data), name
                assert name in str(getattr(array, "dtype", name)), name
            del array


STRANGE = {
    "structured": np.dtype([("x", "f4"), ("label", "i8")]),
    "days": np.dtype("M8[D]"),
    "big-endian": np.dtype(">i4"),
    "bytes": np.dtype("S3"),
}
AS_NUMPY = ("np.asarray(buf)", "np.frombuffer(buf)")
DATES = ("np.frombuffer(buf)", "days")


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_dtypes_that_no_other_library_knows(runtime, entrance) -> None:
    """NumPy must take its own dtypes.

    Other libraries refuse them, or take the bytes.
    """
    library = opened(entrance, runtime)
    kind = kind_for(entrance, runtime.emulated)
    for name, dtype in STRANGE.items():
        if entrance == "torch.frombuffer(buf)":
            # The caller names one of PyTorch's dtypes.
            continue
        data = values_of(dtype)
        with sample_of(kind, data) as sample:
            if "dlpack" in entrance:
                check_refused(entrance, sample.buffer, "T")
                continue
            try:
                array = enter(entrance, sample.buffer)
            except Exception:
                # The buffer protocol has no format for dates, as with NumPy's own
                # arrays.
                assert entrance not in AS_NUMPY or (entrance, name) == DATES
                continue
            assert has_values(library, array, data), name
            if entrance in AS_NUMPY:
                assert array.dtype == dtype
                assert library.address(array) == sample.buffer.ptr
            del array


# -- read-only -------------------------------------------------------------------------


def readonly(kind: str) -> cumem.Buffer:
    if kind == "device":
        memory = cumem.full(8, 7, "f4", "device")
        # The dictionary made below names no stream, so cumem cannot wait for the work.
        cumem.current_stream().synchronize()
        found: cumem.Buffer = cumem.asbuffer(
            FakeCAI(interface_of(memory, data=(memory.ptr, True)), memory)
        )
    else:
        array = (
            np.full(8, 7, "f4")
            if kind == "ordinary"
            else cumem.full(8, 7, "f4", kind).numpy()  # type: ignore[arg-type]
        )
        array.flags.writeable = False
        found = cumem.asbuffer(array)
    assert found.readonly
    assert found.kind == ("pageable" if kind == "ordinary" else kind)
    return found


#: For each entrance, this says whether its array refuses to be written.
SAYS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("memoryview(buf)", "np.asarray(buf)", "np.from_dlpack(buf)"),
        lambda array: not array.flags.writeable,
    ),
    "np.frombuffer(buf)": lambda array: not array.flags.writeable,
    **dict.fromkeys(
        (e for e in ENTRANCES if e.startswith("StridedMemoryView")),
        lambda view: bool(view.readonly),
    ),
}


@pytest.mark.parametrize("kind", ["ordinary", "pinned", "device"])
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_readonly(runtime, entrance, kind) -> None:
    library = opened(entrance, runtime)
    if answer_of(entrance, kind, runtime.emulated) != "=":
        pytest.skip("this entrance does not share this kind")
    buffer = readonly(kind)
    # LIMITS["jax legacy"] says why.
    if isinstance(library, Jax) and "dlpack" in entrance:
        assert is_right_or_refused(entrance, buffer, np.full(8, 7, "f4"))
        return
    if entrance == "torch.as_tensor(buf)" and kind != "device" and not runtime.emulated:
        # PyTorch goes through DLPack here, in a generation that depends on its version.
        assert is_right_or_refused(entrance, buffer, np.full(8, 7, "f4"))
        return
    if isinstance(library, Torch) and kind == "device" and "as_tensor" in entrance:
        # LIMITS["torch read-only"] says why.
        if not runtime.emulated:
            check_refused(entrance, buffer, "T")
            return
    array = enter(entrance, buffer)
    assert has_values(library, array, np.full(8, 7, "f4"))
    if entrance in SAYS:
        assert SAYS[entrance](array)
    del array


# -- lifetime --------------------------------------------------------------------------


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_memory_lives_as_long_as_the_array(runtime, entrance) -> None:
    library = opened(entrance, runtime)
    if entrance == "jnp.asarray(buf)":
        pytest.skip(LIMITS["jax owner"])
    kind = kind_for(entrance, runtime.emulated)
    data = numbers(4)
    with cumem.Pool(kind) as pool:  # type: ignore[arg-type]
        buffer: Any = cumem.array(data, kind=kind)
    array = enter(entrance, buffer)
    del buffer
    gc.collect()
    assert pool.stats().live_count == 1
    assert has_values(library, array, data)
    del array
    session.wait_until(lambda: gc.collect() >= 0 and pool.stats().live_count == 0)


# -- both generations of DLPack --------------------------------------------------------

BY_DLPACK = [e for e in ENTRANCES if "dlpack(buf)" in e]


class Old:
    """An exporter from before DLPack 1.0."""

    def __init__(self, buffer: cumem.Buffer) -> None:
        self.buffer = buffer

    def __dlpack__(self, stream: int | None = None) -> object:
        return self.buffer.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.buffer.__dlpack_device__()


class New(Old):
    """An exporter that gives capsules of DLPack 1.0 and later only, as a read-only
    buffer does.
    """

    def __dlpack__(self, stream: Any = None, **keywords: Any) -> object:  # type: ignore[override]
        if (keywords.get("max_version") or (0, 0)) < (1, 0):
            raise BufferError("only of DLPack 1.0 and later")
        return self.buffer.__dlpack__(stream=stream, **keywords)


@pytest.mark.parametrize("generation", [Old, New])
@pytest.mark.parametrize("entrance", BY_DLPACK)
def test_both_generations(runtime, entrance, generation) -> None:
    library = opened(entrance, runtime)
    kind = kind_for(entrance, runtime.emulated)
    data = numbers(5)
    asks_old = isinstance(library, Jax) or library.modules[0] == "tvm_ffi"
    with sample_of(kind, data) as sample:
        given = generation(sample.buffer)
        # LIMITS["jax legacy"] and LIMITS["tvm legacy"] say why.
        if generation is New and asks_old:
            assert is_right_or_refused(entrance, given, data)
            return
        array = enter(entrance, given)
        assert library.address(array) in sample.addresses(sample.buffer)
        assert has_values(library, array, data)
        del array, given


# -- what an array library must offer --------------------------------------------------

FROM_DLPACK = {"numpy": NumPy, "torch": Torch}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FROM_DLPACK)
@pytest.mark.parametrize("copy", [None, False, True])
def test_copy_is_obeyed(runtime, name, kind, copy) -> None:
    library = opened(f"{'np' if name == 'numpy' else name}.from_dlpack(buf)", runtime)
    where = "np.from_dlpack(buf)" if name == "numpy" else "torch.from_dlpack(buf)"
    if answer_of(where, kind, runtime.emulated) != "=":
        pytest.skip("this library does not share this kind")
    data, other = numbers(6), numbers(7)
    with sample_of(kind, data) as sample:
        try:
            array = library.module.from_dlpack(sample.buffer, copy=copy)
        except TypeError:
            pytest.skip(f"{name} {library.version} has no copy=")
        assert has_values(library, array, data)
        sample.write(other)
        assert has_values(library, array, data if copy else other)
        library.write(array, numbers(8))
        library.wait()
        assert (sample.read() == (other if copy else numbers(8))).all()
        del array


@pytest.mark.parametrize("kind", KINDS)
def test_exporter_keeps_to_the_standard(runtime, kind) -> None:
    with sample_of(kind, numbers(9)) as sample:
        buffer = sample.buffer
        device = buffer.__dlpack_device__()
        assert [type(each) for each in device] == [int, int]
        for version in (None, (0, 8), (1, 0), (1, 3), (2, 0)):
            buffer.__dlpack__(max_version=version)
        # Emulated device memory is offered to the CPU, which gets a copy of it.
        no_copy = not (runtime.emulated and kind == "device")
        buffer.__dlpack__(dl_device=device, copy=False if no_copy else None)
        for wrong in ((7, 0), (device[0], 99)):
            with pytest.raises(BufferError, match="dl_device"):
                buffer.__dlpack__(dl_device=wrong)
        with pytest.raises(ValueError, match="stream=-2"):
            buffer.__dlpack__(stream=-2)
        with pytest.raises(TypeError, match="stream"):
            buffer.__dlpack__(stream="none")  # type: ignore[arg-type]
        if device[0] == 2:
            with pytest.raises(ValueError, match="ambiguous"):
                buffer.__dlpack__(stream=0)
        gc.collect()
        if not is_device_type(kind) and kind != "registered":
            buffer.free()  # Capsules that nobody took no longer count.


@pytest.mark.parametrize("name", FROM_DLPACK)
def test_capsule_is_used_once(runtime, name) -> None:
    library = opened(f"{'np' if name == 'numpy' else name}.from_dlpack(buf)", runtime)
    buffer = cumem.zeros(4, "f4", "pinned")
    capsule = buffer.__dlpack__(max_version=(1, 0))

    class Same(Old):
        def __dlpack__(self, **_: Any) -> object:  # type: ignore[override]
            return capsule

    array = library.module.from_dlpack(Same(buffer))
    with pytest.raises((RuntimeError, ValueError, BufferError)):
        library.module.from_dlpack(Same(buffer))
    with pytest.raises(ValueError, match="consumed"):
        cumem.asbuffer(capsule)
    with pytest.raises(BufferError, match="export"):
        buffer.free()
    del array


def test_strides_of_axes_of_one_element_are_those_of_c_order(runtime) -> None:
    """PyTorch uses these strides to tell whether a tensor is contiguous."""
    buffer = cumem.zeros((4, 1, 6), "f4", "pinned")
    torch = pytest.importorskip("torch")
    for view in (buffer, buffer[1:2], buffer[:, :, 3:4][:, :, ::3], buffer[2]):
        tensor = torch.from_dlpack(view)
        assert tensor.is_contiguous() is view.numpy().flags.c_contiguous
    del tensor


# -- into cumem ------------------------------------------------------------------------


def made_by(library: Library, data: np.ndarray, gpu: bool) -> Any:
    """Return an array of the library with these elements."""
    if isinstance(library, Torch):
        dtype = getattr(library.module, data.dtype.name)
        raw = library.module.from_numpy(data.view(np.uint8).copy())
        return raw.view(dtype).to("cuda" if gpu else "cpu")
    if isinstance(library, CuPy):
        return library.module.asarray(data)
    if isinstance(library, Numba):
        return library.module.to_device(data)
    if isinstance(library, Jax):
        return library.module.numpy.asarray(data)
    return data.copy()


@pytest.mark.parametrize("library_type", [NumPy, Torch, CuPy, Jax, Numba])
def test_their_arrays_are_taken_without_a_copy(runtime, library_type) -> None:
    entrance = next(e for e, (t, _) in ENTRANCES.items() if t is library_type)
    library = opened(entrance, runtime)
    gpu = not runtime.emulated
    for name, dtype in dtypes_of(library):
        if dtype.isbuiltin != 1 and library_type is Numba:
            continue
        data = values_of(dtype)
        array = made_by(library, data, gpu)
        try:
            buffer = cumem.asbuffer(array)
        except (BufferError, RuntimeError):
            assert name.startswith("float8")  # LIMITS["float8"] says why.
            continue
        assert buffer.dtype == dtype, name
        assert buffer.ptr == library.address(array), name
        assert buffer.readonly is (library_type is Jax), name
        assert values.get(buffer).tobytes() == data.tobytes(), name
        out = np.empty(7, dtype)
        cumem.copy(out, array)
        assert out.tobytes() == data.tobytes(), name
        if library.can_write:
            cumem.copy(array, values_of(dtype)[::-1].copy())
            assert library.raw(array) == data[::-1].tobytes(), name
        del buffer, array


# -- order -----------------------------------------------------------------------------


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_emulated_work_is_done_before_others_look(emulated, entrance) -> None:
    library = opened(entrance, emulated)
    kind: Any = kind_for(entrance, True)
    stream = cumem.Stream()
    buffer, nines = cumem.zeros(64, "f4", kind), cumem.full(64, 9, "f4", "device")
    found: list[Any] = []
    with session.gate(stream):
        cumem.copy_async(buffer, nines, stream=stream)
        thread = threading.Thread(target=lambda: found.append(enter(entrance, buffer)))
        thread.start()
        session.wait_until_waiting(thread)
        assert not found
    thread.join()
    assert has_values(library, found.pop(), np.full(64, 9, "f4"))


#: LIMITS["torch stream"] says why torch.as_tensor is missing here.
ORDERED = (
    *("cupy.asarray(buf)", "cupy.from_dlpack(buf)", "torch.from_dlpack(buf)"),
    *("jnp.asarray(buf)", "jax.dlpack.from_dlpack(buf)", "cuda.as_cuda_array(buf)"),
)


def own_stream(library: Library) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the library works on another stream, if the library can be
    told to.
    """
    if isinstance(library, Torch):
        found: Any = library.module.cuda.stream(library.module.cuda.Stream())
        return found
    if isinstance(library, CuPy):
        return library.module.cuda.Stream(non_blocking=True)  # type: ignore[no-any-return]
    return contextlib.nullcontext()


def is_refused(entrance: str, buffer: object) -> bool:
    """Return whether JAX refuses the buffer because it names a stream.

    Our buffers name one while work is pending.
    """
    try:
        enter(entrance, buffer)
    except Exception as error:
        return "failed to find stream" in str(error)
    return False


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", ["device", "mapped.as_device()", "managed.as_device()"]
)
@pytest.mark.parametrize("entrance", ORDERED)
@pytest.mark.parametrize("on", ["a stream", "the legacy stream"])
def test_library_reads_after_a_long_kernel_of_ours(cuda, on, entrance, kind) -> None:
    library = opened(entrance, cuda)
    late = cumem.empty(1 << 30, "u1", "device")
    is_legacy = on == "the legacy stream"
    stream = cumem.Stream.from_external(1) if is_legacy else cumem.Stream()
    data = np.full(SHAPE, 7, np.float32)
    refused = 0
    with sample_of(kind, np.zeros(SHAPE, np.float32)) as sample:
        for _ in range(3):
            source = cumem.array(data, kind="device")
            cumem.copy(sample.owner, np.zeros(SHAPE, np.float32))
            for _ in range(20):
                late.fill(1, stream=stream)
            cumem.copy_async(sample.owner, source, stream=stream)
            if entrance == "jnp.asarray(buf)" and is_refused(entrance, sample.buffer):
                refused += 1
                stream.synchronize()  # From here on no stream is named.
            with own_stream(library):
                array = enter(entrance, sample.buffer)
                assert library.raw(array) == data.tobytes()
            del array
    # JAX need not refuse in every round. On a slow host the kernels may have ended before
    # it is asked.
    assert refused > 0 or entrance != "jnp.asarray(buf)"


@pytest.mark.gpu
@pytest.mark.parametrize("library_type", [Torch, CuPy])
@pytest.mark.parametrize("way", ["copy", "asbuffer", "background"])
def test_we_read_after_a_long_kernel_of_theirs(cuda, library_type, way) -> None:
    """The stream of the other library is busy when the copy begins, so the copy must
    wait for it.
    """
    entrance = next(e for e, (t, _) in ENTRANCES.items() if t is library_type)
    library = opened(entrance, cuda)
    out, count = np.zeros(1 << 16, np.float32), 1 << 16
    for i in range(1, 4):
        with own_stream(library) as stream:
            if isinstance(library, Torch):
                array = library.module.zeros(count, device="cuda")
                late: Any = library.module.zeros(1 << 28, device="cuda")
                for _ in range(20):
                    late.fill_(1)
                array.fill_(i)
            else:
                array = library.module.zeros(count, np.float32)
                late = library.module.zeros(1 << 30, np.uint8)
                source = np.full(count, i, np.float32)
                for _ in range(20):
                    late.data.memset_async(1, late.nbytes, stream)
                array.set(source, stream=stream)
            if way == "copy":
                cumem.copy(out, array)
            elif way == "asbuffer":
                cumem.copy(out, cumem.asbuffer(array))
            else:
                cumem.copy_async(out, array).wait()
        assert (out == i).all()
        del late, array


def test_limits_are_stated() -> None:
    """The page docs/interop.md quotes each limit."""
    text = " ".join(PAGE.read_text(encoding="utf-8").replace("`", "").split())
    for limit in LIMITS.values():
        assert limit in text
