# SPDX-License-Identifier: Apache-2.0
"""copy_many() with many pairs does the same as one copy after the other.

Random pieces of all kinds, sizes and alignments are compared with NumPy. Counts of the
runtime's calls show how few copies and kernels the pairs became.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.pieces import numbers, shuffled
from support.strategies import KINDS
from support.tuning import tuned

import cumem

pytestmark = [
    # These tests are about the C core, which every version of Python runs unchanged.
    pytest.mark.any_python,
    # A driver may lack this call, and cumem then waits until the whole device is idle.
    pytest.mark.by_driver("context_record_event"),
]

PLACES = [*KINDS, "numpy"]
BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("how", ["blocking", "stream", "background"])
def test_pieces_between_every_two_kinds(runtime, to, source, how) -> None:
    data = numbers(300 * 37)
    expected = np.zeros_like(data)
    target, read = values.put(expected, to), values.put(data, source)
    places = shuffled(300, 37)
    pairs = [(target[d], read[s]) for d, s in places]
    if how == "blocking":
        assert cumem.copy_many(pairs) is None
    else:
        stream = cumem.Stream() if how == "stream" else None
        handle = cumem.copy_many_async(pairs, stream=stream)
        assert handle.nbytes == data.nbytes
        handle.wait()
        assert handle.done
    for d, s in places:
        expected[d] = data[s]
    assert (values.get(target) == expected).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_pieces_equal_copies_in_order(backend: str) -> None:
    """The pieces are of every kind, size and alignment, and some touch each other."""
    size = 4000
    with session.opened(backend):

        @given(st.data(), st.booleans())
        def check(data, background: bool) -> None:
            places = data.draw(
                st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)
            )
            arrays = [numbers(size, i) for i in range(len(places))]
            held = [values.put(a, p) for a, p in zip(arrays, places, strict=True)]
            pairs = []
            for _ in range(data.draw(st.integers(0, 12))):
                nbytes = data.draw(st.integers(0, 300))
                step = data.draw(st.sampled_from([1, 1, 1, 2, -1]))
                ends = []
                for _ in range(2):
                    which = data.draw(st.integers(0, len(places) - 1))
                    start = data.draw(st.integers(0, size - 600))
                    ends.append((which, start))
                (a, i), (b, k) = ends
                here = (
                    slice(i, i + nbytes * 2, 2) if step == 2 else slice(i, i + nbytes)
                )
                there = slice(k, k + nbytes)
                pairs.append((held[a][here], held[b][there][:: min(step, 1)]))
                arrays[a][here] = arrays[b][there][:: min(step, 1)].copy()
            if background:
                cumem.copy_many_async(pairs).wait()
            else:
                cumem.copy_many(pairs)
            for array, buffer in zip(arrays, held, strict=True):
                assert (values.get(buffer) == array).all()

        check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_alignments_and_sizes(runtime, kind, seed) -> None:
    """Test all alignments of both ends modulo 16, and sizes near the units of the
    kernel.
    """
    random = np.random.default_rng(seed)
    sizes = [
        *range(1, 40),
        127,
        128,
        129,
        4095,
        4096,
        4097,
        16384,
        16385,
        70001,
        300_001,
    ]
    room = sum(sizes) + 64 * len(sizes)
    data = numbers(room, seed)
    expected = numbers(room, seed + 10)
    source, target = values.put(data, kind), values.put(expected, "device")
    pairs = []
    at = 0
    for size in random.permutation(sizes).tolist():
        d = at + int(random.integers(0, 32))
        s = at + int(random.integers(0, 32))
        pairs.append((target[d : d + size], source[s : s + size]))
        expected[d : d + size] = data[s : s + size]
        at += size + 64
    cumem.copy_many(pairs)
    assert (values.get(target) == expected).all()


def test_route_of_page_locked_pieces_is_the_kernel(emulated) -> None:
    source = cumem.array(numbers(4000), kind="pinned")
    target = cumem.zeros(4000, "u1")
    pairs = [(target[d], source[s]) for d, s in shuffled(10, 400)]
    handle = cumem.copy_many_async(pairs, stream=cumem.Stream())
    assert handle.route == "table"
    handle.wait()
    # A single launch of the kernel copies all pieces and leaves out the bytes between
    # them.
    session.testing.plan_fault(None, 0)
    cumem.copy_many(pairs)
    assert session.testing.fault_count("kernel_launch") == 1
    assert session.testing.fault_count("copy_async") == 0


def test_neighbours_become_one_copy(emulated) -> None:
    source = cumem.array(numbers(4000), kind="pinned")
    target = cumem.zeros(4000, "u1")
    pairs = [(target[i : i + 100], source[i : i + 100]) for i in range(0, 4000, 100)]
    handle = cumem.copy_many_async(pairs, stream=cumem.Stream())
    assert handle.route == "direct"
    assert handle.nbytes == 4000
    handle.wait()
    assert (values.get(target) == source.numpy()).all()


def test_rows_at_constant_distances_become_one_pitched_copy(emulated) -> None:
    data = numbers(64 * 2048).reshape(64, 2048)
    source = cumem.array(data, kind="pinned")
    target = cumem.zeros((64, 1024), "u1")
    handle = cumem.copy_many_async(
        [(target[i], source[i, 512:1536]) for i in range(64)], stream=cumem.Stream()
    )
    assert handle.route == "direct-2d"
    handle.wait()
    assert (values.get(target) == data[:, 512:1536]).all()


@pytest.mark.parametrize("down", [False, True])
def test_ordinary_memory_goes_in_few_pieces(emulated, down) -> None:
    data = numbers(1 << 20)
    device = values.put(np.zeros_like(data) if not down else data, "device")
    host = data.copy() if not down else np.zeros_like(data)
    places = shuffled(256, 4096)
    ends = [
        (device[d], host[s]) if not down else (host[d], device[s]) for d, s in places
    ]
    session.testing.plan_fault(None, 0)
    handle = cumem.copy_many_async(ends)
    handle.wait()
    assert handle.route == "staged-table"
    assert session.testing.fault_count("kernel_launch") <= 8
    # There is one copy for each page-locked chunk, whose contents a kernel distributes
    # on the way up, and has gathered on the way down.
    assert session.testing.fault_count("copy_async") == 2
    expected = np.zeros_like(data)
    for d, s in places:
        expected[d] = data[s]
    assert (values.get(device if not down else host) == expected).all()


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("room", ["plenty", "little"])
def test_long_runs_of_a_chunk_go_in_one_copy(emulated, room, down) -> None:
    data = numbers(4 << 20)
    pieces = np.split(data, 32)  # Each piece has 128 KiB, and each chunk 512 KiB.
    there = [cumem.zeros(piece.size + 64, "u1")[64:] for piece in pieces]
    here = [np.zeros_like(piece) for piece in pieces] if down else pieces
    if down:
        cumem.copy_many(list(zip(there, pieces, strict=True)))
    ends = (here, there) if down else (there, here)
    if room == "little":
        cumem.set_limit("device", 10 << 20)
    try:
        session.testing.plan_fault(None, 0)
        cumem.copy_many_async(list(zip(*ends, strict=True))).wait()
        copies = session.testing.fault_count("copy_async")
    finally:
        cumem.set_limit("device", None)
    assert copies == (8 if room == "plenty" else 32)
    for target, piece in zip(ends[0], pieces, strict=True):
        assert (values.get(target) == piece).all()


@pytest.mark.parametrize("down", [False, True])
def test_long_runs_are_copied_one_by_one_without_a_kernel(emulated, down) -> None:
    data = numbers(4 << 20)
    pieces = np.split(data, 32)
    there = [values.put(piece, "device") for piece in pieces]
    here = [piece + 1 for piece in pieces]
    ends = (here, there) if down else (there, here)
    lacks_compiler = 221  # CUDA_ERROR_JIT_COMPILER_NOT_FOUND
    session.testing.plan_fault("module_load", 1, lacks_compiler, repeat=True)
    cumem.copy_many(list(zip(*ends, strict=True)))
    assert session.testing.fault_count("copy_async") == 32
    session.testing.plan_fault(None, 0)
    for one, other in zip(*ends, strict=True):
        assert (values.get(one) == values.get(other)).all()


def test_runs_that_fill_chunks_lie_among_shorter_ones(runtime) -> None:
    """Test chunks of many runs between chunks of a single run, in both directions. Only
    chunks of many runs need a kernel.
    """
    random = np.random.default_rng(3)
    sizes = random.choice([700, 60_000, 1 << 20, (1 << 20) + 3], 60).tolist()
    data = [numbers(size, i) for i, size in enumerate(sizes)]
    there = [cumem.zeros(size, "u1") for size in sizes]
    here = [np.zeros_like(piece) for piece in data]
    with tuned(chunk_nbytes="256 KiB", chunk_min_nbytes="64 KiB"):
        cumem.copy_many(list(zip(there, data, strict=True)))
        cumem.copy_many(list(zip(here, there, strict=True)))
    for got, piece in zip(here, data, strict=True):
        assert (got == piece).all()


def test_long_pieces_go_by_the_copy_engine(emulated) -> None:
    data = numbers(3 << 20)
    source = cumem.array(data, kind="pinned")
    target = cumem.zeros(3 << 20, "u1")
    session.testing.plan_fault(None, 0)
    half = 3 << 19
    cumem.copy_many([(target[half:], source[:half]), (target[:half], source[half:])])
    assert session.testing.fault_count("copy_async") == 2
    assert session.testing.fault_count("kernel_launch") == 0
    assert (values.get(target) == np.roll(data, half)).all()


def test_several_devices_and_directions_in_one_call(runtime) -> None:
    second = min(1, cumem.device_count() - 1)
    data = numbers(64_000)
    pinned = cumem.array(data, kind="pinned")
    devices = [cumem.zeros(64_000, "u1", device=d) for d in (0, second)]
    full = cumem.array(data[::-1].copy())
    other = cumem.zeros(64_000, "u1", device=second)
    host = np.zeros_like(data)
    mixed = np.zeros_like(data)
    pairs = []
    for d, s in shuffled(64, 1000):
        pairs += [(devices[0][d], pinned[s]), (devices[1][d], data[s])]
        pairs += [(host[d], full[s]), (mixed[d], pinned[s]), (other[d], full[s])]
    for how in (cumem.copy_many, lambda p: cumem.copy_many_async(p).wait()):
        for buffer in (*devices, other):
            buffer.fill(0)
        host[:] = mixed[:] = 0
        how(pairs)
        places = shuffled(64, 1000)
        for got, read in [
            (values.get(devices[0]), data),
            (values.get(devices[1]), data),
            (host, data[::-1]),
            (mixed, data),
            (values.get(other), data[::-1]),
        ]:
            expected = np.zeros_like(data)
            for d, s in places:
                expected[d] = read[s]
            assert (got == expected).all()


@pytest.mark.parametrize("driver", [12000, 13000])
@pytest.mark.parametrize("peers", [0, 1])
def test_between_devices(driver: int, peers: int) -> None:
    with session.opened("emulated", driver_version=driver, peers=peers):
        check_between_devices(bool(peers))


def check_between_devices(by_kernel: bool) -> None:
    data = numbers(10_000)
    source = cumem.array(data)
    target = cumem.zeros(10_000, "u1", device=1)
    places = shuffled(100, 100)
    session.testing.plan_fault(None, 0)
    handle = cumem.copy_many_async([(target[d], source[s]) for d, s in places])
    handle.wait()
    assert handle.route == ("table" if by_kernel else "peer")
    assert session.testing.fault_count("kernel_launch") == by_kernel
    assert bool(session.testing.fault_count("copy_peer_async")) != by_kernel
    expected = np.zeros_like(data)
    for d, s in places:
        expected[d] = data[s]
    assert (values.get(target) == expected).all()
    # This call uses the current stream, which is the legacy default stream.
    target.fill(0)
    cumem.copy_many([(target[d], source[s]) for d, s in places])
    assert (values.get(target) == expected).all()


@pytest.mark.parametrize("device", [0, 1])
def test_kernel_that_cannot_be_compiled_is_done_without(emulated, device) -> None:
    """If the kernel cannot be compiled, copies go without it, between pinned memory and
    a device and between two devices.
    """
    data = numbers(1000)
    source = cumem.array(data, kind=None if device else "pinned")
    target = cumem.zeros(1000, "u1", device=device)
    pairs = [(target[d], source[s]) for d, s in shuffled(10, 100)]
    session.testing.plan_fault("module_load", 1, code=221)
    cumem.copy_many(pairs)
    assert session.testing.last_injected_fault() is not None
    expected = np.zeros_like(data)
    for d, s in shuffled(10, 100):
        expected[d] = data[s]
    assert (values.get(target) == expected).all()


def test_later_pairs_see_what_earlier_ones_wrote(runtime) -> None:
    a = cumem.array(numbers(3000))
    expected = values.get(a)
    b = cumem.zeros(3000, "u1", "pinned")
    pairs = [
        (b[:1000], a[:1000]),
        (a[1000:2000], b[:1000]),
        (b[500:1500], a[1000:2000]),
    ]
    cumem.copy_many(pairs)
    expected[1000:2000] = expected[:1000]
    assert (values.get(a) == expected).all()
    assert (b.numpy()[500:1500] == expected[:1000]).all()
    # The last pair that writes a place wins.
    ones, twos = np.full(100, 1, "u1"), np.full(100, 2, "u1")
    cumem.copy_many([(a[:100], ones), (a[50:150], twos), (a[:10], twos[:10])])
    assert values.get(a)[:150].tolist() == [2] * 10 + [1] * 40 + [2] * 100


def test_overlap_through_a_second_view_is_seen(runtime) -> None:
    host = cumem.array(numbers(2000), kind="mapped")
    expected = host.numpy().copy()
    view = host.as_device()
    cumem.copy_many(
        [(view[100:600], host[:500]), (host.numpy()[400:900], view[100:600])]
    )
    expected[100:600] = expected[:500].copy()
    expected[400:900] = expected[100:600].copy()
    assert (host.numpy() == expected).all()


def test_nothing_and_no_bytes(runtime) -> None:
    cumem.copy_many([])
    cumem.copy_many_async(iter(())).wait()
    buffer = cumem.zeros(4, "u1")
    handle = cumem.copy_many_async([(buffer[:0], buffer[1:1])], stream=cumem.Stream())
    handle.wait()
    assert handle.nbytes == 0
    assert handle.route == "nothing"


def test_generators_lists_scalars_and_broadcasting(runtime) -> None:
    buffer = cumem.zeros((3, 4), "i4")
    rows = [[1, 2, 3, 4], 5, np.arange(4, dtype="i4")]
    cumem.copy_many([buffer[i], row] for i, row in enumerate(rows))
    assert values.get(buffer).tolist() == [[1, 2, 3, 4], [5] * 4, [0, 1, 2, 3]]
    cumem.copy_many(zip(buffer, np.ones((3, 4), "i4"), strict=True))
    assert (values.get(buffer) == 1).all()


class TestRefused:
    """All pairs are checked before anything is copied, and the message names the wrong
    one.
    """

    @pytest.mark.parametrize(
        ("bad", "error", "words"),
        [
            (lambda b: (b[:2], b[:3]), ValueError, r"shape \(3,\) does not fit"),
            (lambda b: (b, np.zeros(4, "f4")), TypeError, "has dtype float32"),
            (lambda b: (3, b), TypeError, "cannot be written to"),
            (lambda b: (np.frombuffer(b"abcd", "u1"), b), ValueError, "read-only"),
            (lambda b: (b, object()), TypeError, "object"),
            (lambda b: (b,), TypeError, "expected a tuple"),
            (lambda b: b, TypeError, "expected a tuple"),
            (lambda b: "ab", TypeError, r"expected a tuple .*not <class 'str'>$"),
            (lambda b: (b, b, b), TypeError, "of length 3"),
        ],
    )
    def test_pair_is_named_and_nothing_is_copied(
        self, runtime, bad, error, words
    ) -> None:
        buffer = cumem.zeros(4, "u1")
        good = (buffer, np.ones(4, "u1"))
        with pytest.raises(error, match=rf"copy_many: pair 2: .*{words}"):
            cumem.copy_many([good, good, bad(buffer)])
        assert not values.get(buffer).any()

    def test_closed_buffer(self, runtime) -> None:
        buffer = cumem.zeros(4, "u1")
        closed = cumem.zeros(4, "u1")
        closed.free()
        with pytest.raises(ValueError, match=r"pair 1: .*closed"):
            cumem.copy_many([(buffer, buffer), (buffer, closed)])

    def test_what_an_exporter_raises_has_a_note(self, runtime) -> None:
        class Exporter:
            @property
            def __cuda_array_interface__(self) -> dict[str, object]:
                raise KeyError("mine")

        with pytest.raises(KeyError) as caught:
            cumem.copy_many([(np.zeros(3), Exporter())])
        assert caught.value.__notes__ == ["in pair 0 of copy_many"]

    def test_no_iterable(self, runtime) -> None:
        with pytest.raises(TypeError):
            cumem.copy_many(3)  # type: ignore[arg-type]

    def test_stream_of_another_device(self, emulated) -> None:
        buffer = cumem.zeros(4, "u1")
        with pytest.raises(
            ValueError, match=r"many: stream is of device 1, .* device 0$"
        ):
            cumem.copy_many([(buffer, np.ones(4, "u1"))], stream=cumem.Stream(device=1))


def check_every_byte(kind: str, down: bool, count: int) -> None:
    """Copy many pieces at random places, and check the bytes in and between them."""
    random = np.random.default_rng(count)
    most = 1 << 20 if count < 1000 else 1 << 14
    sizes = (2.0 ** random.uniform(0, np.log2(most), count)).astype(int)
    starts = np.concatenate([[0], np.cumsum(sizes + 48)])
    room = int(starts[-1]) + 48
    data, expected = numbers(room, 1), numbers(room, 2)
    to, source_kind = (kind, "device") if down else ("device", kind)
    target, source = values.put(expected, to), values.put(data, source_kind)
    pairs = []
    for i in random.permutation(count).tolist():
        d = int(starts[i] + random.integers(0, 48))
        s = int(starts[i] + random.integers(0, 48))
        n = int(sizes[i])
        pairs.append((target[d : d + n], source[s : s + n]))
        expected[d : d + n] = data[s : s + n]
    cumem.copy_many(pairs)
    assert (values.get(target) == expected).all()
    cumem.copy(target, np.zeros_like(expected))
    cumem.copy_many_async(pairs).wait()
    for target_piece, source_piece in pairs[:: max(1, count // 50)]:
        assert (values.get(target_piece) == values.get(source_piece)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["pinned", "mapped", "device", "managed", "numpy"])
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("count", [1, 7, 204, 205, 10_000])
def test_every_byte_on_a_gpu(kind, down, count) -> None:
    """Copy random pieces of 1 byte to 1 MiB with random alignments of both ends."""
    with session.opened("cuda"):
        check_every_byte(kind, down, count)
