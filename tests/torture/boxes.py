# SPDX-License-Identifier: Apache-2.0
"""Has memory of every kind with the contents that it must have, and reads it.

A `Box` has some memory, and an array of the bytes that must be in it. `Raw` reads the
memory at its address, so that cumem's copies are not checked by other copies of cumem's.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from support import testing

import cumem

#: A function that takes all bytes of a box, as an array or as a buffer, and returns a view
#: of some of them.
Make = Callable[[Any], Any]


def in_own_pages(content: np.ndarray) -> np.ndarray:
    """Make a copy that shares no page with other memory.

    On a GPU the driver refuses a copy that crosses the edge of page-locked memory. cumem
    divides its copies there, but other libraries do not. No such edge can lie inside memory
    that shares no page, so other libraries can copy it too.
    """
    if content.size == 0:
        return content.copy()
    memory = np.frombuffer(mmap.mmap(-1, content.size), "u1")
    memory[...] = content
    return memory


class Raw:
    """Reads and waits on a GPU by the driver alone, without cumem."""

    def __init__(self, emulated: bool) -> None:
        self.emulated = emulated
        self.contexts: list[ctypes.c_void_p] = []
        if emulated:
            return
        self.lib = ctypes.CDLL("libcuda.so.1")
        # cumem starts the driver only at its first copy, which may come later. So it is
        # started here.
        self.check(self.lib.cuInit(0))
        for index in range(cumem.device_count()):
            context = ctypes.c_void_p()
            self.check(self.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), index))
            self.contexts.append(context)

    @staticmethod
    def check(code: int) -> None:
        if code != 0:
            raise RuntimeError(f"the driver answered {code}")

    @contextlib.contextmanager
    def entered(self, device: int) -> Iterator[None]:
        """Make the device's context current inside the block."""
        self.check(self.lib.cuCtxPushCurrent_v2(self.contexts[device]))
        try:
            yield
        finally:
            self.check(self.lib.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))

    def read(self, box: Box) -> np.ndarray:
        """Return the bytes that are in a box."""
        if box.nbytes == 0:
            return np.empty(0, "u1")
        out = in_own_pages(np.empty(box.nbytes, "u1"))
        address = box.address
        if box.kind == "device" and not self.emulated:
            with self.entered(box.device):
                self.check(
                    self.lib.cuMemcpyDtoH_v2(
                        ctypes.c_void_p(out.ctypes.data),
                        ctypes.c_uint64(address),
                        ctypes.c_size_t(box.nbytes),
                    )
                )
            return out
        if box.kind == "device":
            address = testing.alias(address, box.nbytes)
        ctypes.memmove(out.ctypes.data, address, box.nbytes)
        return out

    def synchronize(self, stream: cumem.Stream) -> None:
        """Wait for a stream as any other user of the driver would."""
        with self.entered(stream.device.index):
            self.check(self.lib.cuStreamSynchronize(ctypes.c_void_p(stream.handle)))


class Box:
    """Memory of one kind, as bytes, and the contents that it must have."""

    def __init__(
        self, memory: Any, kind: str, device: int, expect: np.ndarray, keep: Any = None
    ) -> None:
        self.memory, self.kind, self.device = memory, kind, device
        self.expect, self.keep = expect, keep
        self.nbytes = expect.size
        is_array = isinstance(memory, np.ndarray)
        self.address = memory.ctypes.data if is_array else memory.ptr

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.nbytes} bytes on {self.device}>"


def layout(
    rng: random.Random, dtype: np.dtype, shape: tuple[int, ...], nbytes: int
) -> Make:
    """Choose how to view some bytes as this shape and dtype, and return the function.

    The view may be transposed, reversed or have gaps.
    """
    axes = list(range(len(shape)))
    steps, pads = [1] * len(shape), [0] * len(shape)
    if rng.random() < 0.5:
        rng.shuffle(axes)
        steps = [rng.choice((1, 1, 1, 1, -1, 2, 3)) for _ in shape]
        pads = [rng.choice((0, 0, 0, 1, 5)) for _ in shape]
    make = placed(rng, dtype, shape, (axes, steps, pads), (0, nbytes), 16)
    if make is None:
        raise ValueError(f"{nbytes} bytes have no room for {shape} of {dtype}")
    return make


def placed(
    rng: random.Random,
    dtype: np.dtype,
    shape: tuple[int, ...],
    order: tuple[list[int], list[int], list[int]],
    span: tuple[int, int],
    align: int,
) -> Make | None:
    """Choose where an array lies within a span of bytes.

    Parameters
    ----------
    rng : random.Random
        The source of random choices.
    dtype, shape
        The dtype and the shape of the array.
    order : tuple
        The axes from the slowest to the fastest, the step of each axis, which may be
        negative, and how many unused items follow at the end of each axis. If there is no
        room for this, the items lie in C order without gaps.
    span : tuple of int
        Where the span begins in the memory, and how many bytes it has.
    align : int
        The array begins at a multiple of this many bytes from the start of the span.

    Returns
    -------
    callable or None
        A function that makes the array as a view of the bytes of some memory, or None if
        there is no room for it.
    """
    axes, steps, pads = order
    begin, room = span
    big = tuple(
        n * max(step, 1) + (0 if step < 0 else pad)
        for n, step, pad in zip(shape, steps, pads, strict=True)
    )
    if math.prod(big) * dtype.itemsize > room:
        axes, big, steps = list(range(len(shape))), shape, [1] * len(shape)
    total = math.prod(big) * dtype.itemsize
    if total > room:
        return None
    first = begin + rng.randrange((room - total) // align + 1) * align
    inverse = tuple(axes.index(i) for i in range(len(axes)))
    index = tuple(
        slice(None, None, -1) if step < 0 else slice(0, n * step, step)
        for n, step in zip(shape, steps, strict=True)
    )
    laid = tuple(big[axis] for axis in axes)

    def make(memory: Any) -> Any:
        view = memory[first : first + total].view(dtype).reshape(laid)
        return view.transpose(*inverse)[index]

    return make


def registered(
    memory: np.ndarray, device: int, mapped: bool
) -> cumem.types.Registration:
    """Register memory, and map it if possible.

    Mapping can fail if the memory shares a page with other memory that is registered.
    """
    try:
        return cumem.register(memory, mapped=mapped, device=device)
    except cumem.CudaError as error:
        if not mapped or "were page-locked before" not in error.__notes__[0]:
            raise
        return cumem.register(memory, device=device)


def bytes_of(values: np.ndarray) -> np.ndarray:
    """Return the values in C order as bytes."""
    return np.frombuffer(values.tobytes(), "u1")
