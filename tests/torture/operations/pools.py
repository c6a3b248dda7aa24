# SPDX-License-Identifier: Apache-2.0
"""Operations on pools, limits and statistics, and on the settings of copies."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
from support.tuning import tuned

import cumem
from torture.boxes import Box
from torture.operations.transfers import copy_blocking
from torture.registry import operation
from torture.settings import MIB, POOLED, WrongError

if TYPE_CHECKING:
    from torture.worker import Worker


@operation(2)
def own_pool(worker: Worker) -> None:
    """Make a pool with random options, use it, and maybe close it while a buffer lives."""
    rng = worker.rng
    kind, device = worker.kind(), worker.device()
    options: dict[str, Any] = {"limit": rng.choice((None, "4MiB", "50%"))}
    options["idle_trim"] = rng.choice((None, 0.001, 1))
    if kind != "managed":
        options["segments"] = rng.choice(("auto", "malloc"))
    pool = cumem.Pool(kind, device=device, **options)
    if rng.random() < 0.5:
        with pool.device, pool:
            memory = cumem.empty(worker.size(), "u1", kind, device=device)
    else:
        memory = pool.allocate(worker.size())
    content = worker.world.content(rng, memory.nbytes)
    memory[...] = content
    worker.give(Box(memory, kind, device, content.copy()))
    repr(pool.stats()), repr(pool), pool.limit, pool.numa_node, pool.closed
    snapshot = pool.snapshot()
    if not snapshot.blocks and memory.nbytes > 0:
        raise WrongError("the snapshot of a pool that is in use has no blocks")
    str(snapshot)
    pool.reset_peaks()
    pool.limit = rng.choice((None, "64MiB"))
    if rng.random() < 0.5:
        pool.trim(wait=rng.random() < 0.5)
    if rng.random() < 0.5:
        pool.close()


@operation(2)
def sleep_in_a_region(worker: Worker) -> None:
    """Let buffers of a region sleep once or twice, behind work on streams.

    Some of them are dropped while they are asleep. The others outlive the region.
    """
    rng, device = worker.rng, worker.device()
    region = cumem.Region("torture", device, host=rng.choice(("keep", "release")))
    boxes = []
    for _ in range(rng.randrange(4)):
        memory = region.pool.allocate(worker.size())
        content = worker.world.content(rng, memory.nbytes)
        if rng.random() < 0.5:
            cumem.copy(memory, content)
        else:
            cumem.copy_async(memory, content, stream=cumem.Stream(device=device))
        boxes.append(Box(memory, "device", device, content.copy()))
        del memory
    for _ in range(rng.choice((1, 2))):
        try:
            region.sleep()
        except cumem.CudaError as error:  # another thread may be capturing
            if error.name != "CM_ECAPTURING":
                raise
            continue
        if boxes and rng.random() < 0.3:
            boxes.pop(rng.randrange(len(boxes)))
        repr(region), repr(region.pool.stats())
        region.wake()
    for box in boxes:
        worker.verify(box, "after its region slept")
    worker.give(*boxes)
    if rng.random() < 0.5:
        region.close()


@operation(2)
def spill_and_use(worker: Worker) -> None:
    """Use buffers of a pool that spills, more of them than it has room for, in random
    order.

    Some of the buffers are kept on the device meanwhile, and some outlive the pool.
    """
    rng, device = worker.rng, worker.device()
    pool = cumem.Pool("device", device=device, spill="pinned", limit="16MiB")
    held: list[tuple[cumem.Buffer, np.ndarray]] = []
    for _ in range(rng.randrange(2, 5)):
        try:
            memory = pool.allocate(rng.choice((1000, 5 << 20, 9 << 20)))
            content = worker.world.content(rng, memory.nbytes)
            cumem.copy(memory, content)
        except cumem.OutOfMemoryError:
            continue
        held.append((memory, content.copy()))
        if rng.random() < 0.2:
            memory.keep()
    for _ in range(4 if held else 0):
        memory, content = rng.choice(held)
        try:
            found = memory.to_numpy()
        except cumem.OutOfMemoryError:
            continue
        worker.compare(found, content, "after its pool spilled")
    repr(pool), repr(pool.stats())
    if rng.random() < 0.5:
        pool.limit = None
        # A box reads the address, so the memory stays on the device from then on.
        worker.give(*(Box(each, "device", device, content) for each, content in held))
    if rng.random() < 0.5:
        pool.close()


# Ctrl-C could come while the limit begins, so that the limit would never end.
@operation(1, main=False)
def with_limit(worker: Worker) -> None:
    nbytes = worker.rng.choice(("2MiB", "30%", None))
    kind = worker.kind()
    device = worker.device() if kind in ("device", "managed") else None
    with worker.world.limit_lock, cumem.limit(kind, nbytes, device):
        worker.give(worker.make(kind))


@operation(1)
def trim(worker: Worker) -> None:
    kind = worker.rng.choice((None, *POOLED))
    keep = worker.rng.choice((0, "1MiB"))
    cumem.trim(kind, keep=keep, wait=worker.rng.random() < 0.5)


@operation(1)
def short_of_memory(worker: Worker) -> None:
    """Allocate too much, with a callback that frees memory of this thread."""
    called = []

    def make_room(kind: str, device: int, nbytes: int) -> None:
        called.append(kind)
        if worker.boxes:
            worker.boxes.pop()

    device = worker.device()
    nbytes = 24 * MIB if worker.world.emulated else 7 << 30
    with cumem.on_out_of_memory(make_room):
        cumem.empty_device(nbytes, "u1", device=device)


@operation(2)
def reads(worker: Worker) -> None:
    """Read statistics, facts about a device, and settings."""
    device = worker.device()
    repr(cumem.stats()), repr(cumem.memory_info(device))
    cumem.memory_info("host"), cumem.get_limit("pinned")
    str(cumem.default_pool(worker.kind(), device).snapshot())
    repr(cumem.stats()[worker.kind()]), cumem.stats().total
    cumem.backend(), cumem.info.about(), cumem.device_count()
    one = cumem.Device(device)
    repr(one), one.name, one.uuid, one.pci_bus_id, one.total_nbytes
    one.compute_capability, one.emulated, one.attributes(), one.memory_info()
    one.can_access_peer(worker.device()), hash(one), pickle.loads(pickle.dumps(one))
    repr(cumem.configure()), repr(cumem.current_stream(device))


@operation(1)
def measured(worker: Worker) -> None:
    with cumem.measure() as measure:
        box = worker.make(worker.kind())
    repr(measure), measure.total, measure.seconds, measure.result.kinds
    worker.give(box)


@operation(1, main=False)
def configured(worker: Worker) -> None:
    """Copy with random settings of copies."""
    rng = worker.rng
    settings: dict[str, Any] = {
        "threads": rng.choice((1, 2, 5, None)),
        "chunk_nbytes": rng.choice(("64KiB", "1MiB", None)),
        "depth": rng.choice((2, 8, None)),
        "staged_up_nbytes": rng.choice((0, "64KiB", None)),
        "staged_down_nbytes": rng.choice((0, "64KiB", None)),
        "quick_nbytes": rng.choice((0, "4KiB", None)),
        "bounce_nbytes": rng.choice((0, "1KiB", None)),
        "ring_nbytes": rng.choice(("1MiB", "8MiB", None)),
    }
    chosen = rng.sample(sorted(settings), rng.randrange(1, 4))
    with tuned(**{name: settings[name] for name in chosen}):
        copy_blocking(worker)


@operation(1)
def explained(worker: Worker) -> None:
    target, source = worker.take(), worker.take()
    to, of = worker.ends(target.nbytes, source.nbytes)
    blocking = worker.rng.random() < 0.5
    ends = to(target.memory), of(source.memory)
    repr(cumem.explain(*ends, blocking=blocking))
    worker.give(target, source)
