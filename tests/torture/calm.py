# SPDX-License-Identifier: Apache-2.0
"""While the main thread calls shutdown(), threads do only what cannot prevent it.

shutdown() refuses while memory is exported, so these operations export none.
"""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

import numpy as np

import cumem
from torture.settings import POOLED

if TYPE_CHECKING:
    from torture.worker import Worker


def step(worker: Worker) -> int:
    """Do one operation without an export, at random.

    Returns 1 if it succeeded, and 0 if it failed as it may beside a shutdown.
    """
    world, rng = worker.world, worker.rng
    epoch = world.epoch
    content = world.content(rng, rng.randrange(1, 100_000))
    out = np.empty_like(content)
    what = rng.randrange(7)
    try:
        if what == 0:
            cumem.copy(out, cumem.array(content, kind=rng.choice(POOLED)))
        elif what == 1:
            stream = cumem.Stream()
            middle = cumem.empty_device(content.size, "u1", stream=stream)
            cumem.copy_async(middle, content, stream=stream)
            cumem.copy_async(out, middle, stream=stream)
            stream.synchronize()
        elif what == 2:
            middle = cumem.empty(content.size, "u1", rng.choice(POOLED))
            cumem.copy_async(middle, content).wait()
            cumem.copy_async(out, middle).wait()
        elif what == 3:
            pool = cumem.Pool(rng.choice(POOLED))
            middle = pool.allocate(content.size)
            middle[...] = content
            out = middle.to_numpy()
            pool.close()
        elif what == 4:
            event = cumem.Event().record()
            event.synchronize()
            cumem.copy(out, content)
        elif what == 5:
            path = worker.path()
            cumem.tofile(path, content)
            out = cumem.fromfile(path, "u1", kind=rng.choice(POOLED)).to_numpy()
            path.unlink()
        else:
            held = world.to_register(content)
            with cumem.register(held) as buffer:
                cumem.copy(out, buffer)
    except (ValueError, RuntimeError, OSError, BufferError) as error:
        worker.raised[f"calm: {type(error).__name__}"] += 1
        if isinstance(error, MemoryError) or world.planned(error):
            return 0
        # The order of these two matters, because a shutdown() that ends is counted in
        # `epoch` before `shutting` becomes false.
        if not world.shutting and world.epoch == epoch:
            reported = "".join(traceback.format_exception(error))
            world.fail(f"{worker.name}, calm {what}, but no shutdown(): {reported}")
        return 0
    if not np.array_equal(out, content):
        world.fail(f"{worker.name}, calm {what}: {content.size} bytes are wrong")
    worker.nbytes += content.size
    time.sleep(rng.random() * 0.01)
    return 1
