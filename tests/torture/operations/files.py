# SPDX-License-Identifier: Apache-2.0
"""Reads and writes files, whole or in ranges, mapped files, and safetensors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

import cumem
from torture.registry import operation
from torture.settings import POOLED

if TYPE_CHECKING:
    from torture.worker import Worker


@operation(2)
def files(worker: Worker) -> None:
    """Write a box to a file, and read the file into new memory and into the box."""
    box = worker.take()
    path = worker.path()
    direct: Any = worker.rng.choice((None, True, False))
    cumem.tofile(path, box.memory, direct=direct)
    found = np.fromfile(path, "u1")
    worker.compare(found, box.expect, f"the file of {box!r}")
    made = cumem.fromfile(
        path, "u1", kind=worker.kind(), device=worker.device(), direct=direct
    )
    worker.compare(made.to_numpy(), box.expect, "read from a file")
    content = worker.world.content(worker.rng, box.nbytes)
    content.tofile(path)
    cumem.fromfile(path, out=box.memory)
    box.expect = content.copy()
    worker.verify(box, "read from a file")
    path.unlink()
    worker.give(box)


@operation(2)
def ranges(worker: Worker) -> None:
    """Write boxes to ranges of one file, give the file other contents, and read the
    ranges.
    """
    boxes = [worker.take() for _ in range(worker.rng.randrange(1, 4))]
    offsets = [0, *itertools.accumulate(box.nbytes + 5 for box in boxes)]
    path = worker.path()
    pieces = [(at, b.memory) for at, b in zip(offsets, boxes, strict=False)]
    cumem.write_ranges(path, pieces, fsync=worker.rng.random() < 0.1)
    content = worker.world.content(worker.rng, offsets[-1])
    found = np.fromfile(path, "u1")
    for at, box in zip(offsets, boxes, strict=False):
        worker.compare(found[at : at + box.nbytes], box.expect, f"range of {box!r}")
    content.tofile(path)
    if worker.rng.random() < 0.5:
        with open(path, "rb") as file:
            cumem.read_ranges(file, iter(pieces))
    else:
        cumem.read_ranges(path, pieces)
    for at, box in zip(offsets, boxes, strict=False):
        box.expect = content[at : at + box.nbytes].copy()
        worker.verify(box, "read from a range")
    path.unlink()
    worker.give(*boxes)


@operation(1)
def mapped_file(worker: Worker) -> None:
    """Copy from a mapped file."""
    box = worker.take()
    if box.nbytes == 0:
        return
    content = worker.world.content(worker.rng, box.nbytes)
    path = worker.path()
    content.tofile(path)
    held = np.memmap(path, "u1", "r")
    cumem.copy(box.memory, held)
    box.expect = content.copy()
    worker.verify(box, "from a mapped file")
    path.unlink()
    worker.give(box)


@operation(1)
def safetensors(worker: Worker) -> None:
    """Save boxes as tensors, in one file or several, and load them."""
    rng = worker.rng
    boxes = [worker.take() for _ in range(rng.randrange(1, 4))]
    path = worker.path().with_suffix(".safetensors")
    most = rng.choice((None, 1000))
    named = {f"{i}.w": box.memory for i, box in enumerate(boxes)}
    if rng.random() < 0.5:
        limit = rng.choice((None, 0, 1000))
        cumem.save_safetensors_async(path, named, host_limit=limit).wait()
        saved = path
    else:
        saved = cumem.save_safetensors(path, named, {"a": "b"}, max_shard_nbytes=most)
    if saved == path:
        cumem.read_safetensors_header(path)
    kind: Any = rng.choice((*POOLED, "host"))
    loaded = cumem.load_safetensors(saved, kind=kind, device=worker.device())
    for i, box in enumerate(boxes):
        found = cumem.asnumpy(loaded[f"{i}.w"])
        worker.compare(found, box.expect, f"{box!r}, saved as tensor")
    for left in worker.world.folder.iterdir():  # glob() would cache each pattern
        if left.name.startswith(path.stem) and ".safetensors" in left.name:
            left.unlink()
    worker.give(*boxes)
