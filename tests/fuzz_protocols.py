# SPDX-License-Identifier: Apache-2.0
"""Fuzz asbuffer() with CAI dictionaries and DLPack capsules that are nearly valid.

    python tests/fuzz_protocols.py --calls 10000000 --seed 1

Each call starts from a valid description of memory whose bytes are known, changes one to
three fields and imports it. An import that is accepted must describe bytes inside that
memory, and these are compared with what NumPy makes of the same fields over a copy. A
refusal must be a TypeError, ValueError, BufferError or CudaError. A DLPack deleter must run
exactly once for each accepted tensor. The program needs no GPU: it runs on the emulated
device.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from fuzz_changes import CAI_CHANGES, CODES, DELETER, DLPACK_CHANGES, TYPESTRS
from support import session
from support.exporters import (
    CPU,
    CUDA,
    CUDA_HOST,
    CUDA_MANAGED,
    NAMES,
    Legacy,
    Versioned,
)

import cumem

ARENA_NBYTES = 1 << 14
MAX_NDIM = 64
NUMPY_MAX_NDIM = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
REFUSALS = (TypeError, ValueError, BufferError, cumem.CudaError)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

#: Integers that are likely to be treated wrongly, such as those at the ends of types.
INTS = [
    0,
    1,
    2,
    3,
    5,
    7,
    64,
    -1,
    -2,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    1 << 40,
    1 << 61,
    1 << 62,
    (1 << 63) - 1,
    -(1 << 63),
    -(1 << 62),
    -(1 << 31),
]
DTYPES = [np.dtype(t) for t in ("u1", "i2", "f4", "f8", "c16", "?", "i8")]
#: Names of ml_dtypes for codes of types that NumPy lacks.
ML_CODES = {
    (4, 16): "bfloat16",
    (5, 32): "complex32",
    (7, 8): "float8_e3m4",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}
with contextlib.suppress(ImportError):
    import ml_dtypes

    CODES.update(
        {
            code: np.dtype(getattr(ml_dtypes, name))
            for code, name in ML_CODES.items()
            if hasattr(ml_dtypes, name)
        }
    )


class MismatchError(AssertionError):
    """Raised if a wrong description was accepted, or a deleter ran too often or never."""


class _Described:
    """An object that describes one byte of memory which a device can use."""

    def __init__(self, ptr: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (1,),
            "typestr": "|u1",
            "data": (ptr, False),
            "version": 3,
        }


class Arena:
    """Memory of one kind with known bytes, which are read without cumem.

    `pointer` is the address that descriptions start from, `device` the one for a device,
    and `alias` the one at which the test reads.
    """

    def __init__(self, kind: str, rng: np.random.Generator) -> None:
        self.kind = kind
        self.model = rng.integers(0, 256, ARENA_NBYTES, dtype="u1").tobytes()
        source = np.frombuffer(self.model, "u1")
        self.buffer: Any
        if kind == "host":
            self.buffer = source.copy()
            self.pointer = self.alias = self.device = self.buffer.ctypes.data
        else:
            self.buffer = cumem.array(source, kind=kind)
            self.pointer = self.buffer.ptr
            self.device = self.pointer
            if kind in ("pinned", "mapped"):  # these kinds can have two addresses
                self.device = cumem.asbuffer(_Described(self.pointer)).device_ptr
            self.alias = session.testing.alias(self.pointer, ARENA_NBYTES)
        self.memory = (ctypes.c_char * ARENA_NBYTES).from_address(self.alias)

    def extent(
        self, ptr: int, shape: Any, strides: Any, dtype: np.dtype
    ) -> tuple[int, int, Any]:
        """Return where in the arena the bytes begin and end, and their strides."""
        if strides is None:
            step, steps = dtype.itemsize, []
            for length in reversed(shape):
                steps.append(step)
                step *= length
            strides = tuple(reversed(steps))
        low, high = ptr - self.pointer, ptr - self.pointer + dtype.itemsize
        for length, step in zip(shape, strides, strict=True):
            if step < 0:
                low += (length - 1) * step
            else:
                high += (length - 1) * step
        return low, high, strides

    def is_allocated(self, low: int, high: int) -> bool:
        """Return whether the bytes lie in the chunk that the arena was cut from."""
        with contextlib.suppress(ValueError):
            return bool(session.testing.alias(self.pointer + low, high - low))
        return False

    def over(self, ptr: int, shape: Any, strides: Any, dtype: np.dtype) -> np.ndarray:
        """Return the described bytes, or raise a ValueError if some are outside."""
        low, high, strides = self.extent(ptr, shape, strides, dtype)
        if low < 0 or high > ARENA_NBYTES:  # NumPy's own check would overflow
            raise ValueError("some of the bytes are outside of the arena")
        return np.ndarray(shape, dtype, self.model, ptr - self.pointer, strides)


def corner(array: np.ndarray) -> bytes:
    """Return all bytes of a small array, or those at the ends of a large one."""
    if array.size > 4096:
        ends = [
            slice(None) if n <= 4 else slice(None, None, n - 1) for n in array.shape
        ]
        array = array[tuple(ends)][(slice(0, 3),) * min(array.ndim, 2)]
        if array.size > 4096:
            array = (
                array.reshape(-1)[:4096]
                if array.size < 1 << 20
                else array[(0,) * array.ndim]
            )
    return array.tobytes()


class Fuzzer:
    """Makes random descriptions, imports them, and checks and counts the outcomes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        rng = np.random.default_rng(seed)
        kinds = ("host", "pinned", "mapped", "managed", "device")
        self.arenas = {kind: Arena(kind, rng) for kind in kinds}
        self.counts: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()
        self.deleted = 0
        self.deleter = DELETER(self._delete)
        self.managed = {False: Legacy(), True: Versioned()}
        self.shape = (ctypes.c_int64 * MAX_NDIM)()
        self.strides = (ctypes.c_int64 * MAX_NDIM)()
        self.exporter = _DLPack(self)
        self.holder = _CAI()

    def _delete(self, _: int) -> None:
        self.deleted += 1

    # -- pieces ---------------------------------------------------------------------

    def integer(self, old: int) -> int:
        """Choose a number near the old one, a small one, or one of INTS."""
        pick = self.random.random()
        if pick < 0.5:
            return old + self.random.randint(-3, 3)
        if pick < 0.75:
            return self.random.randint(0, 12)
        return self.random.choice(INTS)

    def layout(self, itemsize: int) -> tuple[int, list[int], list[int]]:
        """Choose the offset, shape and strides, in bytes, of a region inside an arena."""
        pick = self.random
        ndim = pick.choice((0, 1, 1, 2, 2, 3, 4))
        shape = [pick.randint(1, 5) for _ in range(ndim)]
        if pick.random() < 0.05 and ndim:
            shape[pick.randrange(ndim)] = 0
        strides, step = [0] * ndim, itemsize * pick.choice((1, 1, 2))
        for axis in reversed(range(ndim)):
            strides[axis] = step
            step *= max(shape[axis], 1)
        offset = 8192 - itemsize * pick.randint(0, 8)
        if ndim and pick.random() < 0.3:
            axis = pick.randrange(ndim)
            strides[axis] = -strides[axis]
        return offset, shape, strides

    def check(
        self, arena: Arena, found: Any, what: tuple[Any, ...], host: bool = False
    ) -> None:
        """Check that `found` has the bytes that `what` describes.

        `what` consists of a pointer, a shape, strides and a dtype.

        With `host` they are said to be ordinary memory, of which nobody knows the end.
        """
        ptr, shape, strides, dtype = what
        shape = tuple(int(n) for n in shape)
        if found.shape != shape or found.dtype != dtype:
            raise MismatchError(f"{found!r} is not {what}")
        if found.size == 0:
            self.counts["accepted"] += 1
            return
        if found.ndim > NUMPY_MAX_NDIM:  # an old NumPy has no array to compare with
            self.counts["unverifiable"] += 1
            return
        try:
            expected = arena.over(ptr, shape, strides, dtype)
        except ValueError as error:
            if host:
                self.counts["unverifiable"] += 1
                return
            low, high, _ = arena.extent(ptr, shape, strides, dtype)
            if 0 <= arena.pointer + low < 1 << 63 and arena.is_allocated(low, high):
                self.counts["neighbours"] += 1
                return
            raise MismatchError(
                f"{what} leaves the allocation, but was accepted: {found!r}"
            ) from error
        address = found.ptr
        if address != ptr - arena.pointer + (
            arena.device if isinstance(found, cumem.DeviceBuffer) else arena.alias
        ):
            raise MismatchError(f"{found!r} is at {address:#x}, not {ptr:#x}")
        base = arena.device if isinstance(found, cumem.DeviceBuffer) else arena.alias
        try:
            seen = np.ndarray(
                found.shape, found.dtype, arena.memory, address - base, found.strides
            )
        except ValueError as error:
            raise MismatchError(f"{found!r} {found.strides} is not {what}") from error
        if corner(seen) != corner(expected):
            raise MismatchError(f"bytes of {found!r} are not those of {what}")
        if found.size <= 64 and self.random.random() < 0.1:
            self.read_back(found, expected)
        self.counts["accepted"] += 1

    def read_back(self, found: Any, expected: np.ndarray) -> None:
        """Compare the bytes again, through a copy or a view as a consumer would."""
        if isinstance(found, cumem.DeviceBuffer):
            seen = np.empty(found.shape, found.dtype)
            cumem.copy(seen, found)
        else:
            seen = found.numpy()
        if seen.tobytes() != expected.tobytes():
            raise MismatchError(f"bytes read from {found!r} are wrong")
        self.counts["read back"] += 1

    def refused(self, error: Exception) -> None:
        self.counts["refused"] += 1
        self.errors[type(error).__name__] += 1

    # -- __cuda_array_interface__ -----------------------------------------------------

    def fuzz_cai(self) -> None:
        """Import a dictionary of the CUDA array interface with one to three changes."""
        pick = self.random
        arena = self.arenas[pick.choice(("pinned", "mapped", "managed", "device"))]
        typestr = pick.choice(TYPESTRS)
        itemsize = np.dtype(typestr).itemsize
        offset, shape, strides = self.layout(itemsize)
        entries: dict[str, Any] = {
            "shape": tuple(shape),
            "typestr": typestr,
            "data": (arena.pointer + offset, False),
            "version": 3,
            "strides": tuple(strides),
            "stream": None,
        }
        for _ in range(pick.randint(1, 3)):
            pick.choice(CAI_CHANGES)(self, entries)
        self.holder.__cuda_array_interface__ = entries
        try:
            found = cumem.asbuffer(self.holder)
        except REFUSALS as error:
            self.refused(error)
            return
        if found.readonly != bool(entries["data"][1]):
            raise MismatchError(f"readonly is not what {entries} says")
        dtype = (
            np.dtype(entries.get("descr") or entries["typestr"])
            if entries["typestr"][1] == "V"
            else np.dtype(entries["typestr"])
        )
        self.check(
            arena,
            found,
            (entries["data"][0], entries["shape"], entries.get("strides"), dtype),
        )

    # -- DLPack -----------------------------------------------------------------------

    def fuzz_dlpack(self) -> None:
        """Import a DLPack tensor with one to three changes, and count its deletions."""
        pick = self.random
        kind = pick.choice(("host", "pinned", "mapped", "managed", "device"))
        arena = self.arenas[kind]
        versioned = pick.random() < 0.7
        managed = self.managed[versioned]
        dtype = pick.choice(DTYPES)
        offset, shape, strides = self.layout(dtype.itemsize)
        self.fill(managed, versioned, arena, dtype, offset, shape, strides)
        advertised = (managed.tensor.device.type, managed.tensor.device.id)
        for _ in range(pick.randint(1, 3)):
            pick.choice(DLPACK_CHANGES)(self, managed, versioned)
        self.deleted = 0
        deletes = 1 if managed.deleter else 0
        capsule = _new_capsule(ctypes.addressof(managed), NAMES[versioned], None)
        asked = pick.random() < 0.25
        if asked:
            self.exporter.capsule, self.exporter.device = capsule, advertised
        try:
            found = cumem.asbuffer(self.exporter if asked else capsule)
        except REFUSALS as error:
            self.refused(error)
            if self.deleted != (deletes if asked else 0):
                raise MismatchError(
                    f"the deleter was called {self.deleted} times after a refusal"
                ) from error
            return
        if self.deleted:
            raise MismatchError("the deleter was called while the tensor is in use")
        self.check_dlpack(arena, managed, versioned, found)
        del found
        if self.deleted != deletes:
            raise MismatchError(
                f"the deleter was called {self.deleted} times, not {deletes}"
            )

    def check_dlpack(
        self, arena: Arena, managed: Any, versioned: bool, found: Any
    ) -> None:
        """Check a buffer that was made of a tensor."""
        tensor = managed.tensor
        dtype = np.dtype(CODES[tensor.dtype.code, tensor.dtype.bits])
        shape = tuple(tensor.shape[: tensor.ndim])
        strides = None
        if tensor.strides:
            strides = tuple(s * dtype.itemsize for s in tensor.strides[: tensor.ndim])
        if found.readonly != bool(versioned and managed.flags & 1):
            raise MismatchError("readonly is not what the tensor's flag says")
        if versioned and managed.version.major != 1:
            raise MismatchError("a tensor of an unknown major version was accepted")
        ptr = (tensor.data or 0) + tensor.byte_offset
        self.check(
            arena, found, (ptr, shape, strides, dtype), tensor.device.type == CPU
        )

    def fill(
        self,
        managed: Any,
        versioned: bool,
        arena: Arena,
        dtype: np.dtype,
        offset: int,
        shape: list[int],
        strides: list[int],
    ) -> None:
        """Write a valid description of a region of an arena into a tensor."""
        types = {
            "host": CPU,
            "pinned": CUDA_HOST,
            "mapped": CUDA_HOST,
            "managed": CUDA_MANAGED,
            "device": CUDA,
        }
        if versioned:
            managed.version.major, managed.version.minor = 1, 1
            managed.flags = 0
        managed.deleter = self.deleter
        tensor = managed.tensor
        tensor.data = arena.pointer + offset
        tensor.device.type, tensor.device.id = types[arena.kind], 0
        tensor.ndim = len(shape)
        tensor.dtype.code = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}[dtype.kind]
        tensor.dtype.bits = dtype.itemsize * 8
        tensor.dtype.lanes = 1
        tensor.byte_offset = 0
        for axis, (length, step) in enumerate(zip(shape, strides, strict=True)):
            self.shape[axis], self.strides[axis] = length, step // dtype.itemsize
        for axis in range(len(shape), len(shape) + 3):
            self.shape[axis], self.strides[axis] = 1, 1
        tensor.shape = self.shape
        tensor.strides = self.strides


class _DLPack:
    """An exporter of the capsule that the fuzzer put into it."""

    def __init__(self, fuzzer: Fuzzer) -> None:
        self.capsule: object = None
        self.device = (CPU, 0)

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> object:
        capsule, self.capsule = self.capsule, None
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class _CAI:
    """An exporter of the dictionary that the fuzzer put into it."""

    __cuda_array_interface__: Any = None


def run(calls: int, seed: int, progress: bool = False) -> collections.Counter[str]:
    """Make `calls` calls inside an open emulated runtime, and count their outcomes."""
    fuzzer = Fuzzer(seed)
    start = time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt):
        for call in range(calls):
            if call & 1:
                fuzzer.fuzz_cai()
            else:
                fuzzer.fuzz_dlpack()
            fuzzer.counts["calls"] += 1
            if progress and call % 100_000 == 99_999:
                rate = call / (time.perf_counter() - start)
                print(
                    f"{call + 1} calls, {rate:.0f}/s, {dict(fuzzer.counts)}", flush=True
                )
    for name, count in fuzzer.errors.items():
        fuzzer.counts[name] = count
    return fuzzer.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    with session.opened("emulated"):
        counts = run(options.calls, options.seed, progress=True)
    seconds = time.perf_counter() - start
    share = counts["accepted"] / max(1, counts["calls"])
    print(f"seed {options.seed}: {dict(counts)}")
    print(f"{share:.1%} accepted and verified, {seconds:.0f} s")
    if share < 0.3:
        raise SystemExit("too few were accepted: the changes are too coarse")


if __name__ == "__main__":
    main()
