# SPDX-License-Identifier: Apache-2.0
"""A forked child of a process that used the driver can still do all work on the host.

Each test uses the driver, forks, and lets the child work in ordinary memory or in memory
that it inherited. The parent's memory must stay as it was. The last tests check which calls
are refused, and that no call waits for a thread of the parent.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support import session
from support.forks import fork_and_run

import cumem

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="forks are tested on Linux only"
    ),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
]

KINDS = ["pinned", "mapped"]
SIZES = [1, 1000, 5 << 20]


def pattern(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, "u1")


def use_driver() -> None:
    cumem.zeros(9, "u1", "device").to_numpy()


@pytest.fixture
def made(runtime) -> Iterator[dict[tuple[str, int], cumem.Buffer]]:
    """Yield buffers of two kinds and three sizes, in a process that has used its device."""
    use_driver()
    buffers = {
        (kind, nbytes): cumem.array(pattern(nbytes), kind=kind)
        for kind in KINDS
        for nbytes in SIZES
    }
    yield buffers
    buffers.clear()


def test_child_copies_ordinary_memory(runtime) -> None:
    """A child, and a child of a child, make all sorts of copies between arrays."""
    use_driver()

    def check() -> None:
        for nbytes in SIZES:
            source, target = pattern(nbytes), np.zeros(nbytes, "u1")
            cumem.copy(target, source)
            assert np.array_equal(target, source)
            target[:] = 0
            cumem.copy_async(target, source).wait()
            assert np.array_equal(target, source)
            target[:] = 0
            cumem.copy_many([(target, source)])
            assert np.array_equal(target, source)
            cumem.copy(target[::-1], source)
            assert np.array_equal(target[::-1], source)
            buffer = cumem.asbuffer(target)
            buffer[...] = 7
            assert (target == 7).all()
            buffer.fill(9)
            assert (target == 9).all()

    fork_and_run(check)
    fork_and_run(lambda: fork_and_run(check))
    check()


def test_child_copies_inherited_memory_to_and_fro(made) -> None:
    """A child copies from and to buffers of the parent, whose own bytes do not change."""

    def check() -> None:
        for (_, nbytes), buffer in made.items():
            expected, target = pattern(nbytes), np.empty(nbytes, "u1")
            cumem.copy(target, buffer)
            assert np.array_equal(target, expected)
            cumem.copy(buffer, expected[::-1].copy())
            assert np.array_equal(buffer.numpy(), expected[::-1])
            assert np.array_equal(np.from_dlpack(buffer), expected[::-1])
            assert np.array_equal(
                cumem.asbuffer(buffer.numpy()).numpy(), buffer.numpy()
            )
            buffer.fill(3)
            assert (buffer.numpy() == 3).all()
            cumem.copy_async(buffer, expected).wait()
            assert np.array_equal(buffer.numpy(), expected)
            part = buffer[nbytes // 2 :]
            cumem.copy(part, np.zeros(part.nbytes, "u1"))
            assert not part.numpy().any()
        one, other = (made[kind, SIZES[-1]] for kind in KINDS)
        cumem.copy(one, pattern(SIZES[-1]))
        cumem.copy(other, one)
        assert np.array_equal(other.numpy(), pattern(SIZES[-1]))

    fork_and_run(check)
    fork_and_run(lambda: fork_and_run(check))
    for (_, nbytes), buffer in made.items():  # the parent's bytes have not changed
        assert np.array_equal(buffer.numpy(), pattern(nbytes))


def test_child_drops_and_frees_what_it_inherited(made) -> None:
    def check() -> None:
        for kind in KINDS:
            buffer = made.pop((kind, 1000))
            buffer.free()
            with pytest.raises(ValueError, match="closed"):
                buffer.numpy()
        made.clear()

    fork_and_run(check)
    assert len(made) == len(KINDS) * len(SIZES)


def test_child_saves_and_loads(made, tmp_path) -> None:
    def check() -> None:
        for (kind, nbytes), buffer in made.items():
            place = tmp_path / f"{kind}{nbytes}"
            cumem.tofile(place, buffer)
            assert place.read_bytes() == pattern(nbytes).tobytes()
            buffer.fill(0)
            cumem.fromfile(place, out=buffer)
            assert np.array_equal(buffer.numpy(), pattern(nbytes))
            cumem.save(tmp_path / "x.npy", buffer)
            assert np.array_equal(np.load(tmp_path / "x.npy"), pattern(nbytes))
            cumem.save_safetensors(tmp_path / "x.safetensors", {"x": buffer})
            assert cumem.read_safetensors_header(tmp_path / "x.safetensors")

    fork_and_run(check)


def test_child_unpickles_buffers_into_ordinary_memory(runtime) -> None:
    use_driver()
    sent = [
        pickle.dumps(cumem.array(np.arange(6.0).reshape(2, 3), kind=kind), protocol)
        for kind in ("pinned", "mapped", "managed")
        for protocol in (2, 5)
    ]

    def check() -> None:
        for data in sent:
            buffer = pickle.loads(data)
            assert (type(buffer), buffer.kind) == (cumem.HostBuffer, "pageable")
            assert np.array_equal(buffer.numpy(), np.arange(6.0).reshape(2, 3))

    fork_and_run(check)


def total(x: object) -> float:
    return float(np.asarray(x).sum())


@pytest.mark.parametrize("kind", ["pinned", "mapped"])
def test_forked_pool_gets_buffers_that_it_is_sent(runtime, kind) -> None:
    buffer = cumem.full(1000, 2, "f4", kind)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map_async(total, [buffer, buffer[:10], buffer.numpy()])
        assert found.get(60) == [2000, 20, 2000]


def test_child_collates_in_ordinary_memory(runtime) -> None:
    use_driver()
    collate = cumem.PinnedCollate()

    def check() -> None:
        batch = collate([{"x": np.ones(9), "y": 1}, {"x": np.zeros(9), "y": 2}])
        assert np.asarray(batch["x"]).sum() == 9
        assert np.asarray(batch["y"]).tolist() == [1, 2]

    fork_and_run(check)


def test_child_makes_numpy_arrays_in_ordinary_memory(runtime) -> None:
    use_driver()
    before = cumem.numpy_pinned()
    with cumem.numpy_pinned(min_nbytes=1):
        inherited = np.full(50_000, 4.0)

    def check() -> None:
        assert inherited.sum() == 200_000
        for block in before, cumem.numpy_pinned(min_nbytes=1):
            with block:
                assert np.ones(50_000).sum() == 50_000
                assert np.zeros(50_000).sum() == 0
        inherited.resize(60_000, refcheck=False)
        assert inherited.sum() == 200_000

    fork_and_run(check)
    assert inherited.sum() == 200_000


def test_child_reads_and_copies_registered_memory(runtime) -> None:
    array = np.arange(5000.0)
    with cumem.register(array) as registered:

        def check() -> None:
            target = np.empty(5000)
            cumem.copy(target, array)
            assert np.array_equal(target, np.arange(5000.0))
            cumem.copy(array, -target)
            assert np.array_equal(cumem.asnumpy(registered), -target)

        use_driver()
        fork_and_run(check)
        assert np.array_equal(array, np.arange(5000.0))


#: Calls that need the driver. Their argument is a buffer on the device.
REFUSED: dict[str, Callable[[cumem.Buffer], object]] = {
    "empty_pinned": lambda d: cumem.empty_pinned(9),
    "empty_device": lambda d: cumem.empty_device(9),
    "array": lambda d: cumem.array([1, 2]),
    "Pool": lambda d: cumem.empty(9, kind="pinned", pool=cumem.Pool("pinned")),
    "register": lambda d: cumem.register(np.ones(9999)),
    "to_numpy": lambda d: d.to_numpy(),
    "copy": lambda d: cumem.copy(np.ones(d.nbytes, "u1"), d),
    "Stream": lambda d: cumem.Stream(),
    "Event": lambda d: cumem.Event(),
    "synchronize": lambda d: cumem.synchronize(),
    "memory_info": lambda d: cumem.memory_info(0),
    "Device.name": lambda d: cumem.Device(0).name,
    "prefetch": lambda d: next(iter(cumem.prefetch([np.ones(9)]))),
    "shutdown": lambda d: cumem.shutdown(),
}


def test_child_is_refused_what_needs_the_driver(runtime) -> None:
    device = cumem.zeros(100, "u1", "device")
    count = cumem.device_count()

    def check() -> None:
        for name, call in REFUSED.items():
            with pytest.raises(RuntimeError, match="forked child"):
                print(name, call(device))
        assert cumem.device_count() == count
        assert cumem.backend() == runtime.name
        assert cumem.info.about().driver_version >= (12, 0)
        assert not cumem.is_available()
        assert cumem.memory_info("host").total > 0
        assert cumem.set_limit("pinned", "1GiB") is None

    fork_and_run(check)
    fork_and_run(lambda: fork_and_run(check))


def test_child_never_gets_bytes_that_a_transfer_was_writing(emulated) -> None:
    stream = cumem.Stream()
    copied = cumem.zeros(1 << 20, "u1", "pinned")
    source = cumem.full(1 << 20, 3, "u1", "device")
    cumem.synchronize()

    def check() -> None:
        target = np.empty(1 << 20, "u1")
        for use in (
            lambda b: cumem.copy(target, b),
            cumem.Buffer.numpy,
            memoryview,
            pickle.dumps,
        ):
            with pytest.raises(RuntimeError, match="forked child"):
                use(copied)

    with session.gate(stream):
        handle = cumem.copy_async(copied, source, stream=stream)
        fork_and_run(check)
    handle.wait()
    assert (copied.numpy() == 3).all()


def test_child_of_threads_at_work_copies_on(emulated) -> None:
    """Threads may hold any lock at the fork, and no call of the child may wait for one."""
    stop = threading.Event()
    source, target = np.ones(1 << 18, "u1"), cumem.empty_device(1 << 18, "u1")
    inherited = cumem.full(1 << 18, 6, "u1", "pinned")

    def work() -> None:
        while not stop.is_set():
            cumem.copy_many_async([(target[i:999], source[i:999]) for i in range(9)])
            cumem.copy_async(target, source).wait()
            cumem.copy(np.empty_like(source), source)
            cumem.asbuffer(np.ones(100_000))
            cumem.empty_pinned(1000).free()
            cumem.Pool("pinned").allocate(1 << 16)
            cumem.stats()

    def check() -> None:
        found = np.empty_like(source)
        cumem.copy(found, inherited)
        assert (found == 6).all()
        cumem.copy_async(found, source).wait()
        assert found.all()
        assert cumem.asbuffer(found).numpy().all()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            fork_and_run(check)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
