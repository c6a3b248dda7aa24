# SPDX-License-Identifier: Apache-2.0
"""fill(stream=) returns while streams are shut, unless the host has to wait for them."""

from __future__ import annotations

import threading
from random import Random

import pytest
from support import session

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

KINDS = ("device", "pinned", "mapped", "managed")
SIZES = (1, 100, 4096, 70_000, 1 << 20, 3 << 20)


class Late:
    """A record of the streams that, by the rules of order, cannot end before a gate
    opens.
    """

    def __init__(self, streams: list[cumem.Stream], shut: set[int]) -> None:
        self.streams = streams
        self.late = set(shut)

    def follow(self, stream: int, others: set[int]) -> None:
        """Note that `stream` was made to wait for `others`."""
        if others & self.late:
            self.late.add(stream)


def waits() -> int:
    return sum(pool.cross_stream_wait_count for pool in cumem.stats().pools)


def ends(threads: list[threading.Thread]) -> bool:
    """Start the last thread, and return whether it ends in time."""
    threads[-1].start()
    threads[-1].join(session.PATIENCE)
    return not threads[-1].is_alive()


@pytest.mark.parametrize("seed", range(3))
def test_fill_waits_for_no_stream_it_is_not_ordered_after(emulated, seed: int) -> None:
    random = Random(seed)
    streams = [cumem.Stream() for _ in range(3)]
    pools = {k: [None, cumem.Pool(k), cumem.Pool(k, limit="256MiB")] for k in KINDS}
    threads: list[threading.Thread] = []
    for _ in range(6):
        shut = set(random.sample(range(3), random.randrange(1, 3)))
        late = Late(streams, shut)
        held: list[tuple[cumem.Buffer, set[int]]] = []
        for index in shut:
            session.shut(streams[index])
        try:
            for _ in range(30):
                kind, of = random.choice(KINDS), random.randrange(3)
                pool = random.choice(pools[kind])
                before = waits()
                own = streams[of] if kind == "device" else None
                nbytes = random.choice(SIZES)
                if pool is None:
                    buffer = cumem.empty(nbytes, "u1", kind, stream=own)
                else:
                    buffer = pool.allocate(nbytes, own)
                if waits() != before:
                    late.late.add(of)
                held.append((buffer, {of} if own is not None else set()))
                buffer, uses = random.choice(held)
                by = random.randrange(3)
                # The host fills pinned memory itself, so the call would wait for the late
                # streams.
                if buffer.kind == "pinned" and ({by} | uses) & late.late:
                    continue
                threads.append(
                    threading.Thread(
                        target=buffer.fill, args=(7,), kwargs={"stream": streams[by]}
                    )
                )
                assert ends(threads), (buffer.kind, by, uses, late.late)
                late.follow(by, uses)
                uses.add(by)
                if random.random() < 0.5:
                    del held[random.randrange(len(held))]
        finally:
            for index in shut:
                session.testing.gate_open(streams[index])
            for thread in threads:
                thread.join()
            threads.clear()
        for stream in streams:
            stream.synchronize()
        del buffer
        held.clear()
