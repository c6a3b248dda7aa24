# SPDX-License-Identifier: Apache-2.0
"""Operations in which other libraries take cumem's memory and give their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import cumem
from torture.boxes import Box
from torture.settings import WrongError

if TYPE_CHECKING:
    from torture.worker import Worker


def use_torch(worker: Worker, box: Box) -> None:
    """Copy a tensor into the box, read the box by PyTorch, and copy it to a tensor."""
    import torch

    content = worker.world.content(worker.rng, box.nbytes)
    tensor = torch.from_numpy(content.copy())
    if not worker.world.emulated:
        if worker.rng.random() < 0.5:
            tensor = tensor.cuda(box.device)
        stream = torch.cuda.Stream(box.device)
        stream.wait_stream(torch.cuda.current_stream(box.device))
        cumem.copy_async(box.memory, tensor, stream=stream)
        stream.synchronize()
    else:
        cumem.copy(box.memory, tensor)
    box.expect = content.copy()
    if box.kind == "pinned":
        seen = torch.as_tensor(box.memory).numpy()
        worker.compare(seen, content, f"{box!r} as a tensor")
    elif box.kind == "device" and not worker.world.emulated:
        seen = torch.as_tensor(box.memory, device=f"cuda:{box.device}").cpu().numpy()
        worker.compare(seen, content, f"{box!r} as a tensor")
    back = torch.zeros_like(tensor)
    cumem.copy(back, box.memory)
    worker.compare(back.cpu().numpy(), content, "a tensor")


def use_cupy(worker: Worker, box: Box) -> None:
    """Copy a CuPy array into the box, read the box by CuPy, and copy it back."""
    import cupy

    content = worker.world.content(worker.rng, box.nbytes)
    with cupy.cuda.Device(box.device):
        stream = cupy.cuda.Stream(non_blocking=True)
        values = cupy.asarray(content)
        cupy.cuda.get_current_stream().synchronize()
        cumem.copy_async(box.memory, values, stream=stream)
        stream.synchronize()
        box.expect = content.copy()
        if box.kind in ("device", "mapped"):
            seen = cupy.asnumpy(cupy.asarray(box.memory))
            worker.compare(seen, content, f"{box!r} as CuPy's array")
        back = cupy.zeros_like(values)
        cupy.cuda.get_current_stream().synchronize()
        cumem.copy(back, box.memory)
        worker.compare(cupy.asnumpy(back), content, "CuPy's array")


def use_jax(worker: Worker, box: Box) -> None:
    """Copy a JAX array into the box, and check that the array cannot be written."""
    import jax

    content = worker.world.content(worker.rng, box.nbytes)
    values = jax.device_put(content.copy())
    values.block_until_ready()
    cumem.copy(box.memory, values)
    box.expect = content.copy()
    try:
        cumem.copy(values, box.memory)
    except (ValueError, TypeError, BufferError):
        return
    raise WrongError("cumem has written into a JAX array, which is read-only")


#: The operations of the libraries that are installed, by the names of the libraries.
LIBRARIES: dict[str, Callable[[Worker, Box], None]] = {}


def find_libraries() -> None:
    """Import the libraries that are there. CuPy works only on a GPU."""
    calls = {"torch": use_torch, "jax": use_jax, "cupy": use_cupy}
    for name, call in calls.items():
        if name == "cupy" and cumem.backend() == "emulated":
            continue
        with contextlib.suppress(ImportError):
            __import__(name)
            LIBRARIES[name] = call
