# SPDX-License-Identifier: Apache-2.0
"""Tests of what blocks of a workspace hand out, and of which arrays outlive them.

A workspace is memory that a block (`with workspace:`) hands out from front to back and
takes back at its end. Most tests compare addresses, counters and `workspace.used`.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading

import numpy as np
import pytest
from support import session
from support.session import testing

import cumem
from cumem.base.kinds import KINDS

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_handed_out_from_front_to_back_and_again(runtime, kind: str) -> None:
    workspace = cumem.Workspace("1 MiB", kind)
    assert (workspace.nbytes, workspace.kind, workspace.device) == (MIB, kind, 0)
    places = []
    for _ in range(2):
        with workspace as same:
            assert same is workspace
            found = [workspace.empty(n, "u1") for n in (512, 5 * 512, 1024, 70 * KIB)]
            assert {buffer.kind for buffer in found} == {kind}
            offsets = [buffer.ptr - found[0].ptr for buffer in found]
            assert offsets[:3] == [0, 512, 6 * 512]
            assert workspace.used == 8 * 512 + 72 * KIB
            places.append(found[0].ptr)
            # Memory that no stream used is free again at once.
            if kind != "device":
                assert len({*places}) == 1
        assert workspace.used == 0
        assert all(buffer.closed for buffer in found)
    assert workspace.high_water == 8 * 512 + 72 * KIB


def test_blocks_allocate_and_free_nothing(runtime) -> None:
    workspace = cumem.Workspace("8 MiB", "pinned")
    before = workspace._pool.stats()
    testing.plan_fault(None, 0)  # This resets the counters of calls.
    for _ in range(3):
        with workspace:
            workspace.empty((64, KIB), "f4")
            with workspace:
                workspace.empty(7 * MIB, "u1")
    # The runtime is called only when a block enters and leaves the context.
    assert testing.fault_count() <= 10
    after = workspace._pool.stats()
    assert after.growth_count == before.growth_count
    assert after.trimmed_nbytes == 0


@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_nested_blocks_leave_no_holes(runtime, kind: str) -> None:
    rng = np.random.default_rng(1)
    workspace = cumem.Workspace("5 MiB", kind)

    def use(depth: int) -> None:
        with workspace:
            for _ in range(int(rng.integers(1, 5))):
                nbytes = int(rng.integers(1, MIB))
                if workspace.used + nbytes + 4096 <= workspace.nbytes:
                    workspace.empty(nbytes, "u1")
                if depth < 3 and rng.random() < 0.5:
                    use(depth + 1)

    for _ in range(100):
        use(0)
    assert workspace.high_water > 4 * MIB


def test_free_bytes_in_two_pieces_are_reported_as_two(emulated) -> None:
    workspace = cumem.Workspace("64 MiB", "pinned")
    stream = cumem.Stream()
    target = cumem.empty_device(10 * MIB, "u1")
    with workspace:
        with workspace:
            session.shut(stream)
            cumem.copy_async(target, workspace.empty(10 * MIB, "u1"), stream=stream)
        workspace.empty(20 * MIB, "u1")
        testing.gate_open(stream)
        stream.synchronize()
        with pytest.raises(
            cumem.OutOfMemoryError, match="largest free piece has 34 MiB"
        ):
            workspace.empty(44 * MIB, "u1")
        workspace.empty(34 * MIB, "u1")
        workspace.empty(10 * MIB, "u1")


def test_end_of_a_nested_block_takes_back_its_own_only(runtime) -> None:
    workspace = cumem.Workspace(MIB, "pinned")
    with workspace:
        outer = workspace.zeros(100, "i4")
        with workspace:
            inner = workspace.empty(100, "i4")
            place = inner.ptr
        assert inner.closed
        assert not outer.closed
        with workspace:
            again = workspace.empty(100, "i4")
            assert again.ptr == place
        later = workspace.empty(100, "i4")
        assert not outer.numpy().any()
        assert workspace.used == 2 * 512
    assert outer.closed
    assert later.closed
    assert workspace.high_water == 2 * 512


def test_buffer_of_an_ended_block_says_so(runtime) -> None:
    workspace = cumem.Workspace(MIB, "pinned")
    with workspace:
        buffer = workspace.empty(100, "i4")
        part = buffer[10:]
    for each in (buffer, part):
        assert each.closed
        with pytest.raises(ValueError, match="the buffer is closed"):
            each.numpy()
        with pytest.raises(ValueError, match="the buffer is closed"):
            cumem.copy(np.empty(each.shape, "i4"), each)


@pytest.mark.parametrize("export", [cumem.Buffer.numpy, memoryview, np.from_dlpack])
def test_array_that_outlives_its_block_keeps_its_bytes(emulated, export) -> None:
    workspace = cumem.Workspace(64 * KIB, "pinned")
    with workspace:
        array = export(workspace.zeros(8 * KIB, "u1"))
    with workspace:
        workspace.empty(8 * KIB, "u1").numpy()[:] = 255
        with workspace:
            workspace.empty(40 * KIB, "u1").numpy()[:] = 255
    assert not np.asarray(array).any()
    del array


def test_room_that_arrays_keep_is_named_and_comes_back(runtime) -> None:
    workspace = cumem.Workspace("2 MiB", "pinned")
    with workspace:
        array = workspace.zeros(MIB, "u1").numpy()
    with workspace:
        with pytest.raises(MemoryError, match="arrays or tensors keep bytes of blocks"):
            workspace.empty(3 * MIB // 2, "u1")
        del array
        workspace.empty(3 * MIB // 2, "u1")


def test_bytes_that_a_stream_still_reads_are_not_handed_out(emulated) -> None:
    workspace = cumem.Workspace("2 MiB", "pinned")
    stream = cumem.Stream()
    target = cumem.empty_device(3 * MIB // 2, "u1")
    with workspace:
        source = workspace.zeros(target.shape, "u1")
        session.shut(stream)
        cumem.copy_async(target, source, stream=stream)
    with workspace:
        # There is room for this one beside the bytes that the stream reads.
        workspace.empty(MIB // 4, "u1").numpy()[:] = 255
        with session.when_waiting(lambda: testing.gate_open(stream)):
            workspace.empty(target.shape, "u1").numpy()[:] = 255
    assert not target.to_numpy().any()


def test_device_memory_is_reused_in_the_order_of_its_stream(emulated) -> None:
    stream = cumem.Stream()
    workspace = cumem.Workspace("2 MiB", stream=stream)
    session.shut(stream)
    places = []
    for value in (1, 2):
        with workspace:
            # There is no room for two such buffers, yet the second need not wait.
            buffer = workspace.empty(3 * MIB // 2, "u1")
            buffer.fill(value, stream=stream)
            places.append(buffer.ptr)
            if value == 2:
                testing.gate_open(stream)
                assert np.all(buffer.to_numpy() == 2)
    assert places[0] == places[1]


def test_full_workspace_says_what_there_is_and_loses_nothing(runtime) -> None:
    called = []
    workspace = cumem.Workspace("100 KiB", "pinned")
    with workspace, cumem.on_out_of_memory(lambda *memory: called.append(memory)):
        buffer = workspace.zeros(10 * KIB, "u1")
        with pytest.raises(cumem.OutOfMemoryError) as caught:
            workspace.empty(91 * KIB, "u1")
        assert str(caught.value) == (
            "the workspace has no room for 91 KiB (93184 bytes): 10 KiB of its 100 KiB of "
            "pinned memory are in use. Make it larger, or end a block first"
        )
        error = caught.value
        assert (error.requested, error.limit, error.live) == (93184, 102400, 10240)
        assert (error.kind, error.device, error.name) == ("pinned", 0, "CM_ELIMIT")
        with pytest.raises(cumem.OutOfMemoryError, match="8 MiB"):
            workspace.empty(8 * MIB, "u1")
        assert not buffer.numpy().any()
        assert workspace.empty(88 * KIB, "u1").nbytes == 88 * KIB
    assert workspace.high_water == 100 * KIB  # The size was rounded up to whole pages.
    with workspace:
        assert workspace.empty(100 * KIB, "u1").nbytes == workspace.nbytes


def test_odd_sizes_that_fit_by_its_count_fit(runtime) -> None:
    rng = np.random.default_rng(5)
    for kind in KINDS:
        workspace = cumem.Workspace("3 MiB", kind)
        for _ in range(5):
            with workspace:
                count = 0
                while True:
                    nbytes = int(rng.choice([1, 100, 10_000, 100_000])) * int(
                        rng.integers(1, 11)
                    )
                    rounded = -(-nbytes // 512) * 512
                    if nbytes >= 64 * KIB:
                        rounded = -(-nbytes // 4096) * 4096
                    used = workspace.used
                    if nbytes >= 64 * KIB:
                        used = -(-used // 4096) * 4096
                    if used + rounded > workspace.nbytes:
                        break
                    workspace.empty(nbytes, "u1")
                    count += 1
                assert count


def test_memory_comes_only_in_blocks_and_of_one_thread(emulated) -> None:
    workspace = cumem.Workspace(MIB, "pinned")
    with pytest.raises(ValueError, match="inside its with block"):
        workspace.empty(1)
    raised: list[BaseException] = []

    def use() -> None:
        leave = functools.partial(workspace.__exit__, None, None, None)
        for act in (lambda: workspace.empty(1), workspace.__enter__, leave):
            try:
                act()
            except RuntimeError as error:
                raised.append(error)

    with workspace:
        buffer = workspace.empty(1)
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert not buffer.closed
    assert ["another thread" in str(error) for error in raised] == [True, True, True]

    def other() -> None:
        with workspace:
            raised.append(workspace.empty(1).closed or AssertionError())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    # After the block of this thread has ended, the other thread can use the workspace.
    assert len(raised) == 4


def test_block_ends_with_an_exception_too(emulated) -> None:
    workspace = cumem.Workspace(MIB, "pinned")
    buffer = None

    def fail() -> None:
        nonlocal buffer
        with workspace:
            buffer = workspace.empty(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert buffer is not None
    assert buffer.closed
    assert workspace.used == 0


def test_closed_workspace_gives_back_all_and_says_so(runtime) -> None:
    workspace = cumem.Workspace("4 MiB", "pinned")
    with workspace:
        buffer = workspace.empty(MIB, "u1")
        array = buffer.numpy()
        array[:] = 3
        workspace.close()
        workspace.close()
        assert buffer.closed
        with pytest.raises(ValueError, match="the workspace is closed"):
            workspace.empty(1)
    assert array.sum() == 3 * MIB
    assert (workspace.closed, workspace.used, repr(workspace)) == (
        *(True, 0),
        "<cumem.Workspace, closed>",
    )
    with pytest.raises(ValueError, match="the workspace is closed"):
        workspace.__enter__()
    del array, buffer
    gc.collect()
    assert sum(pool.reserved_nbytes for pool in cumem.stats().pools) == 0


def test_close_in_another_thread_ends_an_allocation_that_waits(emulated) -> None:
    """The allocation waits for a copy behind a shut gate. Meanwhile another thread
    closes the workspace, and then opens the gate.
    """
    workspace = cumem.Workspace("2 MiB", "pinned")
    stream = cumem.Stream()
    target = cumem.empty_device(3 * MIB // 2, "u1")
    with workspace:
        session.shut(stream)
        source = workspace.zeros(target.shape, "u1")
        cumem.copy_async(target, source, stream=stream)

    def act() -> None:
        closer = threading.Thread(target=workspace.close)
        closer.start()
        session.wait_until_waiting(closer, lambda: workspace.closed)
        testing.gate_open(stream)
        closer.join()

    with (
        workspace,
        session.when_waiting(act),
        pytest.raises(ValueError, match="workspace was closed while"),
    ):
        workspace.empty(target.shape, "u1")
    assert workspace.closed
    assert workspace.used == 0
    assert not target.to_numpy().any()


def test_close_in_another_thread_ends_the_blocks_of_this_one(runtime) -> None:
    workspace = cumem.Workspace(MIB, "pinned")
    with workspace:
        outer = workspace.empty(1000)
        kept = workspace.zeros(100)
        array = kept.numpy()
        with workspace:
            inner = workspace.empty(1000)
            closer = threading.Thread(target=workspace.close)
            closer.start()
            closer.join()
            assert outer.closed
            assert inner.closed
            assert workspace.used == 0
            with pytest.raises(ValueError, match="closed"):
                workspace.empty(1)
    assert not array.any()  # The array's memory lives as long as the array.
    with pytest.raises(ValueError, match="closed"):
        workspace.__enter__()


@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_close_beside_allocations_is_an_error_and_loses_nothing(
    emulated, kind: str
) -> None:
    errors: list[BaseException] = []

    def use(workspace: cumem.Workspace, begun: threading.Event) -> None:
        try:
            while True:
                with workspace:
                    for _ in range(4):
                        workspace.zeros(1000)
                        begun.set()
        except BaseException as error:
            errors.append(error)

    for _ in range(30):
        workspace = cumem.Workspace(MIB, kind)
        begun = threading.Event()
        threads = [threading.Thread(target=use, args=(workspace, begun))]
        threads[0].start()
        begun.wait()
        threads += [threading.Thread(target=workspace.close) for _ in range(2)]
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        assert workspace.closed
        assert workspace.used == 0
        del workspace, threads, thread
    wrong = [error for error in errors if "closed" not in str(error)]
    assert wrong == []
    assert {type(error) for error in errors} == {ValueError}
    errors.clear()


def test_trimmed_workspace_takes_its_memory_anew(runtime) -> None:
    workspace = cumem.Workspace("4 MiB", "pinned")
    assert cumem.trim() >= 4 * MIB
    with workspace:
        workspace.zeros(4 * MIB, "u1")
    buffer = None
    with workspace:
        buffer = workspace.empty(8)
        buffer.free()  # Freeing a buffer before the block ends is allowed.
    assert buffer.closed


def test_shutdown_ends_it(emulated) -> None:
    workspace = cumem.Workspace(MIB, "pinned")
    with workspace:
        workspace.empty(8)
        cumem.shutdown()
        with pytest.raises(ValueError, match="closed"):
            workspace.empty(8)
    assert workspace.closed


def test_layout_and_zeros_are_numpys(runtime) -> None:
    workspace = cumem.Workspace(MIB, "managed")
    with workspace:
        turned = workspace.zeros((3, 5), "c8", order="F")
        assert turned.numpy().flags.f_contiguous
        assert not turned.numpy().any()
        assert workspace.empty(()).shape == ()
        used = workspace.used
        assert workspace.empty(np.array([20, 100])).shape == (20, 100)
        assert workspace.empty([np.int64(20), 100], float).shape == (20, 100)
        assert workspace.used == used + 2 * 16384
        assert workspace.empty(0).nbytes == 0
        with pytest.raises(TypeError):
            workspace.empty(3, object)
        with pytest.raises(ValueError, match="order"):
            workspace.empty(3, order="Z")


def test_arguments_that_make_no_workspace_are_refused(emulated) -> None:
    for nbytes in (0, -1, "nonsense", "50%"):
        with pytest.raises(ValueError, match="nbytes"):
            cumem.Workspace(nbytes)
    with pytest.raises(TypeError, match="nbytes"):
        cumem.Workspace(1.5)
    with pytest.raises(ValueError, match="kind must be"):
        cumem.Workspace(1, "paged")
    with pytest.raises(ValueError, match="device 9"):
        cumem.Workspace(1, device=9)
    with pytest.raises(TypeError):
        cumem.Workspace(1, stream="main")
    with pytest.raises(ValueError):
        cumem.Workspace(1, device=0, stream=cumem.Stream(device=1))
    with pytest.raises(cumem.OutOfMemoryError, match="1 TiB"):
        cumem.Workspace("1 TiB")
    assert repr(cumem.Workspace(100)) == (
        "<cumem.Workspace of device memory, device 0, emulated: 0 B of 4 KiB in use>"
    )


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_workspace_is_not_copied(emulated, copied) -> None:
    with pytest.raises(TypeError, match="make another one"):
        copied(cumem.Workspace(100, "pinned"))
