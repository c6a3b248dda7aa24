# SPDX-License-Identifier: Apache-2.0
"""What objects of other libraries tell of their memory, for the extension."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NoReturn

import numpy as np

#: DLPack's codes and bits of types of the ml_dtypes package, a byte or more an element.
NAMED_TYPES = {
    "bfloat16": (4, 16),
    "complex32": (5, 32),
    "float8_e3m4": (7, 8),
    "float8_e4m3": (8, 8),
    "float8_e4m3b11fnuz": (9, 8),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}


def refuse_object(obj: object, what: str) -> NoReturn:
    """Raise what memory is expected to be."""
    raise TypeError(
        f"an object of type {type(obj)!r} {what}: expected a Buffer, a NumPy array, or an "
        "object with DLPack, __cuda_array_interface__ or the buffer protocol"
    )


def refuse_shapes(before: str, dst: tuple[int, ...], src: tuple[int, ...]) -> NoReturn:
    """Raise that a copy's ends do not fit."""
    raise ValueError(
        f"{before}the source of shape {src} does not fit the target of shape {dst}"
    )


def find_table(kind: type) -> object:
    """The capsule of DLPack's C functions that a type has itself; None: it has none."""
    return getattr(kind, "__dict__", {}).get("__dlpack_c_exchange_api__")


def check_sign(tensor: Any) -> None:
    """BufferError for one of PyTorch's with other values than its memory."""
    if getattr(tensor, "is_neg", bool)() is True:
        raise BufferError(
            "a tensor with the negative bit set has other values than its memory: take "
            "tensor.resolve_neg()"
        )


def find_code(dtype: np.dtype[Any]) -> tuple[int, int]:
    """DLPack's code and bits of a dtype that is not plain, or why it has none."""
    if dtype.num >= 256:  # registered by another package
        if dtype.name in NAMED_TYPES:
            return NAMED_TYPES[dtype.name]
        why = "it has no code for this type"
    elif not dtype.isnative:
        why = "the bytes are not in this machine's order"
    elif dtype.char in "gG":
        why = "extended precision has no code"
    elif dtype.kind in "mM":
        why = "it has no code for times; hand over view('i8') and view the result as "
        why += "this dtype again"
    else:
        why = "only numbers and booleans have codes; view('u1') carries the bytes"
    raise BufferError(f"DLPack cannot describe dtype {dtype!r}: {why}")


@cache  # as often as there are tensors
def find_dtype(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    """The dtype of an element type that is not plain, or why there is none."""
    if lanes != 1:
        raise BufferError(f"DLPack element type has {lanes} lanes, not 1")
    name = next((name for name, it in NAMED_TYPES.items() if it == (code, bits)), None)
    if name is not None:
        try:
            found: np.dtype[Any] = np.dtype(getattr(import_module("ml_dtypes"), name))
            return found
        except (ImportError, AttributeError):
            why = "NumPy has this type only with the ml_dtypes package, which is not "
            why += "installed or too old"
    elif bits == 0 or bits % 8 != 0:
        why = "elements must fill whole bytes"
    else:
        why = "NumPy has no such type"
    raise BufferError(f"DLPack element type code {code} with {bits} bits: {why}")


def refuse_device(kind: int, index: int, count: int) -> NoReturn:
    """Raise why there is no such device, of whose type there are so many."""
    if kind == 2:
        what = (
            f"there {'is' if count == 1 else 'are'} {count} device{'s' * (count != 1)}"
        )
        raise ValueError(f"DLPack tensor: device ({kind}, {index}), but {what}")
    if count > 0:
        raise ValueError(f"DLPack tensor: device ({kind}, {index}): the id must be 0")
    raise BufferError(
        f"DLPack tensor: device type {kind}: cumem knows 1 (CPU), 2 (CUDA), 3 (pinned) "
        "and 13 (managed)"
    )


def refuse_export(kind: int, index: int, memory: str, is_emulated: bool) -> NoReturn:
    """Raise why memory of a buffer is not to be had as that of this device."""
    hint = "use copy() into a buffer there"
    if is_emulated:
        hint = "the emulated device is ordinary memory: only (1, 0) can be had"
    elif kind == 2 and memory == "pinned":
        hint = "memory from empty_mapped() can be exported so"
    raise BufferError(
        f"dl_device=({kind}, {index}): {memory} memory cannot be exported there without a "
        f"copy; {hint}"
    )


def refuse_stride(step: int, itemsize: int) -> NoReturn:
    """BufferError: DLPack has no such stride."""
    if step < 0:
        raise BufferError(
            "DLPack export of negative strides: PyTorch ends the process over them; hand "
            "over copy() of this view, or the buffer before it is reversed"
        )
    raise BufferError(
        f"DLPack counts strides in elements: {step} bytes are no multiple of the "
        f"itemsize {itemsize}"
    )
