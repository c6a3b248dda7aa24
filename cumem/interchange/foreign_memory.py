# SPDX-License-Identifier: Apache-2.0
"""Errors about memory of other libraries, and checks of it, for the extension."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import numpy as np

from cumem.interchange.structures import is_functional


def refuse_object(obj: object, what: str) -> NoReturn:
    """Raise a TypeError that says what the memory should be."""
    kind = type(obj)
    is_store = hasattr(kind, "__setitem__") and hasattr(kind, "shape")  # as in h5py
    hint = "; to store values there, assign: obj[...] = buf.to_numpy()"
    raise TypeError(
        f"an object of type {kind!r} {what}: expected a Buffer, a NumPy array, or an "
        "object with DLPack, __cuda_array_interface__ or the buffer protocol"
        f"{hint if is_store and 'written' in what else ''}"
    )


def refuse_shapes(before: str, dst: tuple[int, ...], src: tuple[int, ...]) -> NoReturn:
    """Raise a ValueError, because the shapes of a copy's ends do not fit."""
    raise ValueError(
        f"{before}the source of shape {src} does not fit the target of shape {dst}"
    )


def refuse_shared(
    before: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> NoReturn:
    """Raise a ValueError, because elements of a target share memory."""
    raise ValueError(
        f"{before}elements of the target share memory (shape {shape}, strides {strides} "
        "in bytes), as after expand(), broadcast_to() or in windows that slide, and which "
        "value stays is not defined: copy into an array that holds each element once"
    )


def find_table(kind: type) -> object:
    """Return the capsule with DLPack's C functions that a type has, or None."""
    return getattr(kind, "__dict__", {}).get("__dlpack_c_exchange_api__")


def check_sign(tensor: Any) -> None:
    """Raise a BufferError for a tensor whose values are the negative of its memory."""
    if getattr(tensor, "is_neg", bool)() is True:
        raise BufferError(
            "a tensor with the negative bit set has other values than its memory: take "
            "tensor.resolve_neg()"
        )


def refuse_tensor(tensor: Any) -> None:
    """Raise an error that says why a tensor of PyTorch cannot be imported.

    Return if nothing is special about the tensor, so that there must be another reason.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        return
    try:
        what = _what_tensor_is(torch, tensor)
    except Exception:  # PyTorch is old, or the tensor's class does not support this
        return
    if what is not None:
        raise BufferError(f"{type(tensor).__name__} of PyTorch: {what}")


def _what_tensor_is(torch: Any, tensor: Any) -> str | None:
    """Return what is special about a tensor and what to pass instead, or None."""
    dispatch = type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__
    if is_functional(tensor):
        return (
            "a functional tensor, which a transform such as vmap(), functionalize() or "
            "torch.compile() traces with, has no memory; call cumem outside of it"
        )
    if tensor.is_nested:
        return "a nested tensor is several; pass tensor.values() or those of unbind()"
    if tensor.layout is not torch.strided:
        return (
            f"a tensor of layout {tensor.layout} is several arrays; pass each of them, "
            "as tensor.values() and tensor.indices()"
        )
    if tensor.is_quantized:
        return "a quantised tensor holds codes; pass tensor.int_repr()"
    if tensor.is_meta:
        return "a tensor on the device 'meta' has a shape but no memory"
    if dispatch and tensor.data_ptr() == 0:
        return (
            "a subclass that wraps others or only stands for one, as FakeTensor does, "
            "has no memory of its own; pass the tensor that it holds"
        )
    if tensor.requires_grad:
        return "it requires a gradient; pass tensor.detach()"
    if tensor.is_conj():
        return (
            "it is read with the conjugate of what is in memory; pass "
            "tensor.resolve_conj()"
        )
    if tensor.is_neg():
        return "it is read as the negative of its memory; pass tensor.resolve_neg()"
    return None


def fix_size(memory: Any) -> None:
    """Prevent a PyTorch storage on the CPU from being resized as long as it lives.

    PyTorch forbids resizing after `Tensor.numpy` was called. To make it do so for every
    dtype, and for tensors with gradients, an empty tensor of bytes over the same storage is
    used.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(memory, torch.UntypedStorage):
        return
    if memory.device.type == "cpu" and memory.resizable():
        torch.empty(0, dtype=torch.uint8).set_(memory).numpy()


def refuse_moved(
    memory: object,
    address: int,
    nbytes: int,
    new_address: int,
    new_nbytes: int,
    in_copy: bool,
) -> NoReturn:
    """Raise a BufferError, because the owner of a buffer's memory has replaced it.

    `in_copy` says that a copy may have used the new or the old memory.
    """
    if isinstance(memory, np.ndarray):
        what, how = "array", "ndarray.resize()"
        cure = "resize it before"
    elif hasattr(memory, "data_ptr"):
        what, how = (
            "storage",
            "share_memory_(), resize_() or untyped_storage().resize_()",
        )
        cure = "call that before"
    else:
        what, how = f"{type(memory).__name__}", "resize()"
        cure = "resize it before"
    if in_copy:
        raise BufferError(
            f"what this copy did is not certain: the {what} of one of its ends had "
            f"{nbytes} bytes at {address:#x} when it began, and has {new_nbytes} bytes at "
            f"{new_address:#x} now, as after {how}; {cure} or wait for the copy first, "
            "and copy again"
        )
    raise BufferError(
        f"the memory of this buffer is gone: the {what} that it was made of had {nbytes} "
        f"bytes at {address:#x} and has {new_nbytes} bytes at {new_address:#x} now, as "
        f"after {how}; {cure}, and make a new buffer of it, as with "
        "cumem.asbuffer() or cumem.register()"
    )


def refuse_dlpack_dtype(dtype: np.dtype[Any]) -> NoReturn:
    """Raise a BufferError, because DLPack has no type for a dtype."""
    if not dtype.isnative:
        why = "the bytes are not in this machine's order"
    elif dtype.num >= 256:  # another package registered the dtype
        why = "it has no code for this type"
    elif dtype.char in "gG":
        why = "extended precision has no code"
    elif dtype.kind in "mM":
        why = "it has no code for times; hand over view('i8') and view the result as "
        why += "this dtype again"
    else:
        why = "only numbers and booleans have codes; view('u1') carries the bytes"
    raise BufferError(f"DLPack cannot describe dtype {dtype!r}: {why}")


def refuse_dlpack_type(code: int, bits: int, lanes: int, name: str | None) -> NoReturn:
    """Raise a BufferError, because NumPy has no dtype for a type of DLPack.

    `name` is given if ml_dtypes has the type.
    """
    if lanes != 1:
        raise BufferError(f"DLPack element type has {lanes} lanes, not 1")
    if name is not None:
        why = "NumPy has this type only with the ml_dtypes package, which is not "
        why += "installed or too old"
    elif bits == 0 or bits % 8 != 0:
        why = "elements must fill whole bytes"
    else:
        why = "NumPy has no such type"
    raise BufferError(f"DLPack element type code {code} with {bits} bits: {why}")


def refuse_device(kind: int, index: int, count: int) -> NoReturn:
    """Raise an error, because there are only `count` devices of this type."""
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
    """Raise a BufferError, because memory of this kind cannot be exported for a device."""
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
    """Raise a BufferError, because DLPack has no such stride."""
    if step < 0:
        raise BufferError(
            "DLPack export of negative strides: PyTorch ends the process when it is given "
            "any; hand over copy() of this view, or the buffer before it is reversed"
        )
    raise BufferError(
        f"DLPack counts strides in elements: {step} bytes are not a multiple of "
        f"the itemsize {itemsize}"
    )
