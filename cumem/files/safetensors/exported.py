# SPDX-License-Identifier: Apache-2.0
"""Finds the memory of the objects that are saved as tensors, and their element types."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cumem import _core
from cumem.files.safetensors.format import TORCH_CARRIED, TYPES, ElementType, type_of

_BY_TORCH = {element.torch: element for element in TYPES.values() if element.torch}


def exported(obj: Any) -> tuple[_core.Buffer, ElementType | None]:
    """Return the memory of an object, and its element type if the format has one."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, getattr(torch, "Tensor", ())):
        return _from_torch(obj, torch)
    if isinstance(obj, (np.ndarray, np.generic)):
        obj = _core._read_array(obj)
        if not obj.dtype.isnative:
            obj = obj.astype(obj.dtype.newbyteorder("="))
    data = _core.asbuffer(obj)
    return data, type_of(data.dtype)


def _from_torch(tensor: Any, torch: Any) -> tuple[_core.Buffer, ElementType]:
    """Return the memory of a tensor of PyTorch, and its element type."""
    name = str(tensor.dtype).removeprefix("torch.")
    element = _BY_TORCH.get(name)
    if element is None:
        raise TypeError(f"the format has no element type for {tensor.dtype}")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise TypeError(f"it is not a dense tensor: {tensor.layout} on {tensor.device}")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if element.name in TORCH_CARRIED:
        tensor = tensor.view(getattr(torch, TORCH_CARRIED[element.name]))
    return _core.asbuffer(tensor), element
