# SPDX-License-Identifier: Apache-2.0
"""Operations with foreign objects, exports by protocols, pickles, and other libraries."""

from __future__ import annotations

import array
import contextlib
import ctypes
import mmap
import pickle
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from support.exporters import FakeCAI, FakeDLPack, Produced, interface_of

import cumem
from torture.libraries import LIBRARIES
from torture.registry import operation
from torture.settings import POOLED, WrongError

if TYPE_CHECKING:
    from torture.worker import Worker


class Lasting(Produced):
    """A DLPack tensor that lives until a consumer has called its deleter."""

    living: ClassVar[set[Lasting]] = set()

    def capsule(self) -> object:
        self.living.add(self)
        return super().capsule()

    def _delete(self, context: int) -> None:
        super()._delete(context)
        self.living.discard(self)


class Held:
    """An object with the DLPack protocol that always gives the same capsule."""

    def __init__(self, capsule: object, place: tuple[int, int]) -> None:
        self.capsule, self.place = capsule, place

    def __dlpack__(self, **_: object) -> object:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place


def foreign(
    worker: Worker, content: np.ndarray, writable: bool
) -> tuple[Any, np.ndarray]:
    """Make a foreign object with a copy of these bytes, and an array over its memory."""
    rng = worker.rng
    under = content.copy()
    n = content.size
    how = rng.randrange(12)
    if how == 0:
        memory = bytearray(n)
        under = np.frombuffer(memory, "u1")
        under[:] = content
        return memory, under
    if how == 1:
        return memoryview(under), under
    if how == 2 and n > 0:
        pages = mmap.mmap(-1, n)
        under = np.frombuffer(pages, "u1", n)
        under[:] = content
        return pages, under
    if how == 3:
        chars = (ctypes.c_ubyte * n).from_buffer(under)
        return chars, under
    if how == 4:
        other = array.array("B", content.tobytes())
        return other, np.frombuffer(other, "u1")
    if how == 5:
        versioned = rng.random() < 0.5
        return FakeDLPack(Lasting.over(under, versioned=versioned)), under
    if how == 6:
        wide = np.zeros((n, 2), "u1")
        wide[:, 1] = content
        return wide[:, 1], wide[:, 1]
    if how == 7:
        back = content[::-1].copy()
        return back[::-1], back[::-1]
    if how == 8 and n > 0:
        path = worker.path()
        content.tofile(path)
        held = np.memmap(path, "u1", "r+" if writable else "r")
        path.unlink()
        return held, held
    if how == 9 and not writable:
        return bytes(content), under
    if how == 10 and not writable:
        under.flags.writeable = False
        return under, under
    if how == 11:
        return np.asfortranarray(under.reshape(1, n)).reshape(n), under
    return under, under


@operation(4)
def from_foreign(worker: Worker) -> None:
    """Copy from a foreign object into a box."""
    target = worker.take()
    content = worker.world.content(worker.rng, target.nbytes)
    obj, _ = foreign(worker, content, writable=False)
    how = worker.rng.randrange(4)
    if how == 0:
        cumem.copy_async(target.memory, obj).wait()
    elif how == 1:
        stream = worker.stream_of(target)
        cumem.copy_async(target.memory, obj, stream=stream)
        worker.wait_for(stream)
    elif how == 2:
        cumem.copy_many([(target.memory, obj)])
    else:
        cumem.copy(target.memory, cumem.asbuffer(obj))
    target.expect = content.copy()
    worker.verify(target, f"after a copy of a {type(obj).__name__}, way {how}")
    worker.give(target)


@operation(4)
def to_foreign(worker: Worker) -> None:
    """Copy from a box into a foreign object."""
    source = worker.source()
    obj, under = foreign(worker, np.zeros(source.nbytes, "u1"), writable=True)
    how = worker.rng.randrange(4)
    if how == 0:
        cumem.copy_async(obj, source.memory).wait()
    elif how == 1:
        stream = worker.stream_of(source)
        cumem.copy_async(obj, source.memory, stream=stream)
        worker.wait_for(stream)
    elif how == 2:
        cumem.copy_many([(obj, source.memory)])
    else:
        cumem.copy(obj, source.memory)
    what = f"a {type(obj).__name__} after a copy of {source!r}, way {how}"
    worker.compare(under, source.expect, what)
    worker.give_source(source)


@operation(3)
def exchange(worker: Worker) -> None:
    """Export by DLPack or the CUDA array interface, and import again."""
    box = worker.take(POOLED)
    memory = box.memory
    if worker.rng.random() < 0.5 and box.nbytes > 0 and box.kind != "pinned":
        entries = interface_of(memory, strides=None)
        outside: Any = FakeCAI(entries, keep=memory)
    else:
        newest: Any = worker.rng.choice((None, (1, 0)))
        capsule = memory.__dlpack__(max_version=newest)
        place = memory.__dlpack_device__()
        outside = Held(capsule, place)
    view = cumem.asbuffer(outside)
    out = np.empty(box.nbytes, "u1")
    cumem.copy(out, view)
    worker.compare(out, box.expect, f"{box!r} through {type(outside).__name__}")
    del view, outside
    worker.give(box)


@operation(0.5)
def capsule_for_all(worker: Worker) -> None:
    """Give one capsule to three threads, of which exactly one may get it."""
    box = worker.take("pinned")
    held = Held(box.memory.__dlpack__(), box.memory.__dlpack_device__())
    taken: list[object] = []

    def grab() -> None:
        with contextlib.suppress(BufferError, ValueError, TypeError):
            taken.append(cumem.asbuffer(held))  # raises if the capsule was used

    threads = [threading.Thread(target=grab) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(taken) != 1:
        raise WrongError(f"a capsule was taken {len(taken)} times")
    taken.clear()
    worker.give(box)


@operation(1)
def pickled(worker: Worker) -> None:
    """Pickle a box, with its bytes in the pickle or beside it, and load it again."""
    box = worker.take(("pinned", "mapped", "managed", "host"))
    buffers: list[pickle.PickleBuffer] = []
    if worker.rng.random() < 0.5:
        text = pickle.dumps(box.memory, protocol=5, buffer_callback=buffers.append)
    else:
        text = pickle.dumps(box.memory, protocol=worker.rng.choice((2, 4, 5)))
    again = pickle.loads(text, buffers=buffers)
    out = np.array(np.asarray(again))
    worker.compare(out, box.expect, f"{box!r}, pickled")
    del again, buffers
    worker.give(box)


@operation(1)
def libraries(worker: Worker) -> None:
    """Let another library use a box."""
    if not LIBRARIES:
        return
    name = worker.rng.choice(sorted(LIBRARIES))
    box = worker.take(("pinned", "mapped", "device", "numpy"))
    if box.nbytes > 0:
        LIBRARIES[name](worker, box)
        worker.verify(box, f"after {name} had it")
    worker.give(box)
