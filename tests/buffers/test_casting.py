# SPDX-License-Identifier: Apache-2.0
"""Copies that convert numbers on the way: against NumPy's astype, bit by bit."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import warnings
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.faults import sweep
from support.session import testing
from support.strategies import KINDS, as_view, basic_indices, places, same_bytes, shapes
from support.tuning import tuned

import cumem
from cumem.buffers.casting import NUMBERS, REALS, STANDS_FOR

# Its rules come from one table in C, which is the same for each Python.
pytestmark = pytest.mark.any_python

BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
ENDS = ["numpy", *KINDS]
#: One at least is the host's.
PAIRS = [ends for ends in itertools.product(ENDS, ENDS) if ends != ("device", "device")]
DTYPES = [np.dtype(ml_dtypes.bfloat16 if n == "bfloat16" else n) for n in NUMBERS]
F4, F8 = np.dtype("f4"), np.dtype("f8")
F2, BF16 = np.dtype("f2"), np.dtype(ml_dtypes.bfloat16)
FLOATS = (F2, BF16, F4, F8)
C8, C16 = np.dtype("c8"), np.dtype("c16")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """NumPy warns of what it makes infinite or cuts, and of imaginary parts it drops."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "invalid value|overflow", RuntimeWarning)
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        yield


def is_far(dst: str, src: str) -> bool:
    return dst == src == "device"


def every_half(dtype: np.dtype) -> np.ndarray:
    return np.arange(1 << 16, dtype="u2").view(dtype)


def both_parts(reals: np.ndarray) -> np.ndarray:
    """Complex numbers with all of these as real and, in another order, as imaginary
    parts, as bits: arithmetic would change NaN and the sign of zero."""
    imaginary = np.random.default_rng(3).permutation(reals)
    imaginary[::5] = 0
    imaginary[1::5] = -0.0
    reals = reals.copy()
    reals[::10] = -0.0
    pairs = np.stack([reals, imaginary], axis=-1)
    return pairs.reshape(-1).view(f"c{2 * reals.itemsize}")


def interesting(dtype: np.dtype) -> np.ndarray:
    """Every value of short types; of others random bits, and those near roundings."""
    rng = np.random.default_rng(7)
    if dtype == "?":
        return rng.integers(0, 2, 3000).astype("?")
    if dtype.itemsize == 1:
        return np.arange(256, dtype="u1").view(dtype)
    if dtype.itemsize == 2:
        return every_half(dtype)
    if dtype.kind == "c":
        return both_parts(interesting(np.dtype(f"f{dtype.itemsize // 2}")))
    drawn = np.frombuffer(rng.bytes(dtype.itemsize << 15), dtype)
    if dtype.kind in "iu":
        small = rng.integers(0, 1 << 26, 20_000).astype(dtype)
        return np.concatenate([drawn, small, np.array([0, 1], dtype)])
    sides = []
    for short in (every_half(F2), every_half(BF16)):
        exact = short.astype(F4).astype(dtype)
        middle = (exact[:-1] + exact[1:]) / dtype.type(2)
        sides += [exact, middle]
    if dtype == F8:
        exact = drawn.view(F4).astype(F8)
        sides += [exact, (exact + np.nextafter(exact.astype(F4), F4.type(0))) / 2]
    near = np.concatenate(sides)
    most = dtype.type(np.inf)
    return np.concatenate(
        [drawn, near, np.nextafter(near, most), np.nextafter(near, -most)]
    )


def that_fit(array: np.ndarray, to: np.dtype) -> np.ndarray:
    """Without what NumPy leaves undefined: floats that an integer cannot hold."""
    if array.dtype.kind == "c":
        real = np.ascontiguousarray(array.real)
        return array[np.isin(real, that_fit(real, to))] if to.kind in "iu" else array
    if array.dtype not in FLOATS or to in FLOATS or to.kind in "?bc":
        return array
    low, high = (float(end) for end in (np.iinfo(to).min, np.iinfo(to).max))
    wide = array.astype(F8)
    ends = low - (1 if low > -(2**31) - 1 else 0), 2.0 ** np.ceil(np.log2(high))
    return array[(wide >= low if low < -(2**53) else wide > ends[0]) & (wide < ends[1])]


def assert_same(found: np.ndarray, expected: np.ndarray, was: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    if found.dtype.kind == "c":
        part = f"f{found.itemsize // 2}"
        found = np.ascontiguousarray(found).view(part).reshape(-1, 2)
        expected = np.ascontiguousarray(expected).view(part).reshape(-1, 2)
        for i in range(2):
            assert_same(found[:, i], expected[:, i], was)
        return
    bits = f"u{found.itemsize}"
    differ = np.ascontiguousarray(found).view(bits) != np.ascontiguousarray(
        expected
    ).view(bits)
    if was.dtype == BF16 and found.dtype == F2:  # its NaN has other bits in ml_dtypes
        differ &= ~(np.isnan(found) & np.isnan(expected))
    assert not differ.any(), (was[differ][:3], found[differ][:3], expected[differ][:3])


# -- the values --------------------------------------------------------------------


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_cast_has_the_bits_of_numpys(emulated, source, to) -> None:
    was = that_fit(interesting(source), to)
    expected = was.astype(to)
    found = np.empty(was.shape, to)
    cumem.copy(found, was, casting="unsafe")
    assert_same(found, expected, was)
    strided = np.zeros(2 * was.size, to)
    cumem.copy(strided[::2], was[::-1], casting="unsafe")
    assert_same(strided[::2], expected[::-1], was[::-1])
    assert not strided[1::2].tobytes().strip(b"\0")


@pytest.mark.parametrize(
    ("source", "to"),
    [(F8, F4), (F4, F2), (F4, BF16), (F8, F2), (F2, F4), (BF16, F4), (F4, F8)]
    + [(np.dtype(i), F4) for i in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")]
    + [
        (np.dtype(i), C8)
        for i in ("?", "u1", "i4", "u8", "f2", BF16, "f4", "f8", "c16")
    ]
    + [(C8, np.dtype(i)) for i in ("?", "f2", BF16, "f4", "f8", "c16")]
    + [(np.dtype("f8"), C16), (np.dtype("c16"), F8), (F2, C16), (C16, F2)],
    ids=str,
)
def test_cast_on_the_link_has_the_bits_of_numpys(runtime, source, to) -> None:
    was = interesting(source)
    up = cumem.empty(was.shape, to)
    cumem.copy(up, was, casting="unsafe")
    assert_same(values.get(up), was.astype(to), was)
    device = cumem.array(was)
    down = np.empty(was.shape, to)
    cumem.copy(down, device, casting="unsafe")
    assert_same(down, was.astype(to), was)


@pytest.mark.parametrize("to", [F2, BF16, F4, F8, "u1", "i2"], ids=str)
@pytest.mark.parametrize("source", DTYPES[: len(REALS)], ids=str)
def test_scale_and_offset_are_numpys_product_and_sum(emulated, source, to) -> None:
    was = interesting(source)
    wide = F8 if F8 in (source, to) else F4
    scaled = was.astype(wide) * wide.type(0.1) + wide.type(-3)
    if to == "?" or np.dtype(to).kind in "iu":
        low, high = np.iinfo(to).min, np.iinfo(to).max
        scaled = np.nan_to_num(np.clip(scaled, low, high), nan=0)
    found = np.empty(was.shape, to)
    cumem.copy(found, was, casting="unsafe", scale=0.1, offset=-3)
    assert_same(found, scaled.astype(to), was)


def test_scale_or_offset_may_stand_alone_and_dtypes_may_be_the_same(runtime) -> None:
    was = np.arange(100, dtype="f4")
    found = np.empty(100, "f4")
    cumem.copy(found, was, casting="no", scale=np.float32(3))
    assert (found == was * 3).all()
    target = cumem.empty(100, "f4")
    cumem.copy(target, was, casting="no", offset=-1)
    assert (values.get(target) == was - 1).all()


def test_floats_that_an_integer_cannot_hold_become_the_nearest(emulated) -> None:
    was = [np.nan, np.inf, -np.inf, 1e30, -1e30, -0.5, 127.9, -128.9, 300, -1]
    for dtype in FLOATS:
        for to in [d for d in DTYPES if d.kind in "iu"]:
            source = np.array(was).astype(dtype)
            found = np.empty(len(was), to)
            cumem.copy(found, source, casting="unsafe")
            low, high = np.iinfo(to).min, np.iinfo(to).max
            exact = [
                0 if np.isnan(x) else low if x < low else high if x >= high else int(x)
                for x in map(float, source)
            ]
            assert found.tolist() == exact, (dtype, to)


# -- the ends and their layouts ----------------------------------------------------


@pytest.mark.parametrize(("dst", "src"), PAIRS)
@pytest.mark.parametrize(("source", "to"), [("f8", "f4"), ("f4", "f8"), ("i4", "f4")])
def test_every_pair_of_ends_converts(runtime, dst, src, source, to) -> None:
    was = np.arange(30_000, dtype=source).reshape(100, 300)
    target = values.put(np.zeros(was.shape, to), dst)
    cumem.copy(target, values.put(was, src), casting="same_kind")
    assert (values.get(target) == was.astype(to)).all()
    cumem.copy_async(target, values.put(-was, src), casting="same_kind").wait()
    assert (values.get(target) == -was.astype(to)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_cast_of_any_views_equals_numpy_assignment(backend: str) -> None:
    with session.opened(backend):
        simple = st.sampled_from([np.dtype(d) for d in ("u1", "i2", "f2", "f4", "f8")])

        @given(st.data(), places, places, simple, simple, shapes, st.sampled_from("CF"))
        def check(data, to, source, dtype, other, shape, order) -> None:
            if is_far(to, source):
                return
            expected = np.zeros(shape, dtype)
            index = as_view(data.draw(basic_indices(shape)))
            target = values.put(expected, to, order)
            part = expected[index]
            lead = data.draw(st.integers(0, part.ndim))
            steps = [data.draw(st.sampled_from([1, 2, -1, -2])) for _ in part.shape]
            source_shape = tuple(
                1 if n and data.draw(st.booleans()) and data.draw(st.booleans()) else n
                for n in part.shape[lead:]
            )
            large = tuple(
                n * abs(s) for n, s in zip(source_shape, steps[lead:], strict=True)
            )
            whole = np.arange(np.prod(large, dtype=int)).reshape(large) % 120
            whole = whole.astype(other)
            cut = (*(slice(None, None, s) for s in steps[lead:]), ...)
            expected[index] = whole[cut]
            cumem.copy(target[index], values.put(whole, source)[cut], casting="unsafe")
            assert same_bytes(values.get(target), expected)

        check()


@pytest.fixture
def in_pieces() -> Iterator[None]:
    """By four threads, in pieces of 64 KiB."""
    with tuned(chunk_nbytes="64 KiB", threads=4):
        yield


LAYOUTS = {
    "whole": lambda a: a,
    "transposed": lambda a: a.T,
    "every third column": lambda a: a[:, ::3],
    "few columns": lambda a: a.reshape(-1, 10)[:, :3],
    "upside down": lambda a: a[::-1],
    "planes": lambda a: a.reshape(-1, 250, 4).transpose(2, 0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize(("source", "to"), [("f8", "f4"), ("f4", "f8"), ("i4", "f4")])
def test_long_copies_convert_in_pieces(
    runtime, in_pieces, layout, down, source, to
) -> None:
    was = np.arange(1500 * 1000, dtype=source).reshape(1500, 1000)
    view = LAYOUTS[layout]
    shape = view(was).shape
    given = view(cumem.array(was) if down else was)
    target = np.zeros(shape, to) if down else cumem.zeros(shape, to)
    told = cumem.explain(target, given, casting="same_kind")
    assert told.route.startswith("staged")
    assert told.pieces > 4
    assert f"{given.dtype} becomes {target.dtype}" in told.why
    cumem.copy(target, given, casting="same_kind")
    assert (values.get(target) == view(was).astype(to)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_copies_between_hosts_convert_by_several_threads(
    runtime, in_pieces, layout
) -> None:
    was = np.random.default_rng(0).standard_normal((1500, 1000))
    given = LAYOUTS[layout](was)
    target = np.zeros(given.shape, "f2")
    told = cumem.explain(target, given, casting="same_kind")
    assert told.route == "host"
    cumem.copy(target, given, casting="same_kind")
    assert (target == given.astype("f2")).all()


@pytest.mark.parametrize("dst", ENDS)
def test_unaligned_elements_are_converted(runtime, dst) -> None:
    room = np.zeros(8 * 5000 + 3, "u1")
    was = np.frombuffer(room, "f8", 5000, 3)
    room[3:] = np.arange(5000, dtype="f8").view("u1")
    assert not was.flags.aligned
    target = values.put(np.zeros(5000, "f4"), dst)
    cumem.copy(target, was, casting="same_kind")
    assert (values.get(target) == np.arange(5000)).all()
    back = np.frombuffer(bytearray(8 * 5000 + 3), "f8", 5000, 3)
    cumem.copy(back, target, casting="safe")
    assert (back == np.arange(5000)).all()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2)])
@pytest.mark.parametrize(("dst", "src"), PAIRS)
def test_small_and_empty_ends_convert(runtime, shape, dst, src) -> None:
    was = np.full(shape, 2.5)
    target = values.put(np.zeros(shape, "f2"), dst)
    cumem.copy(target, values.put(was, src), casting="same_kind")
    assert (values.get(target) == 2.5).all()


@pytest.mark.parametrize("dst", ENDS)
def test_repeated_source_is_converted(runtime, dst) -> None:
    row = np.arange(1000, dtype="i4")
    for part in (row, row[:, None][:10]):
        shape = (10, 1000)
        target = values.put(np.zeros(shape, "f8"), dst)
        cumem.copy(target, part, casting="safe")
        assert (values.get(target) == np.broadcast_to(part, shape)).all()


@pytest.mark.parametrize("kind", ["numpy", "pinned", "mapped", "managed"])
@pytest.mark.parametrize(("source", "to"), [("f8", "f4"), ("f4", "f8"), ("i4", "f4")])
@pytest.mark.parametrize("count", [10, 300_000])
def test_overlapping_ends_are_read_whole_first(
    runtime, kind, source, to, count
) -> None:
    room = values.put(np.zeros(2 * count, "f8"), kind)
    host = room if kind == "numpy" else room.numpy()
    was = host.view(source)[count // 2 : count // 2 + count]
    was[:] = np.arange(count)
    target = room.view(to)[:count]
    cumem.copy(
        target,
        room.view(source)[count // 2 : count // 2 + count],
        casting="safe" if (source, to) == ("f4", "f8") else "same_kind",
    )
    assert (host.view(to)[:count] == np.arange(count).astype(to)).all()


@pytest.mark.parametrize("kind", ["numpy", "pinned", "managed"])
@pytest.mark.parametrize(("source", "to"), [("f4", "i4"), ("f8", "u8")])
def test_elements_are_converted_in_their_place(runtime, kind, source, to) -> None:
    room = values.put(np.arange(100_000, dtype=source), kind)
    cumem.copy(room.view(to), room, casting="unsafe")
    assert (values.get(room.view(to)) == np.arange(100_000)).all()


@pytest.mark.parametrize("kind", ["device", "mapped", "managed"])
@pytest.mark.parametrize("down", [False, True])
def test_overlap_of_the_host_with_the_device_is_read_whole_first(
    emulated, kind, down
) -> None:
    """The host's view of the emulated device's memory is none of its buffers to cumem."""
    count = 200_000
    far = cumem.zeros(2 * count, "f8", kind)
    room = cumem.asbuffer(np.from_dlpack(far))
    assert kind != "device" or room.kind == "pageable"
    far = far.as_device() if kind != "device" else far
    was = np.arange(count, dtype="f8")
    room.numpy()[5 : 5 + count] = was
    target = (room if down else far).view("f4")[: 2 * count][:count]
    cumem.copy(target, (far if down else room)[5 : 5 + count], casting="same_kind")
    assert (room.numpy().view("f4")[:count] == was.astype("f4")).all()


def test_tensors_are_converted(runtime) -> None:
    torch = pytest.importorskip("torch")
    was = torch.randn(300, 200, dtype=torch.float64)
    places = ["cpu", "cuda"] if runtime.name == "cuda" else ["cpu"]
    for place in places:
        made = torch.zeros(200, 300, dtype=torch.float16, device=place)
        cumem.copy(made, was.T, casting="same_kind")
        assert (made.cpu().numpy() == was.T.numpy().astype("f2")).all()
        back = np.zeros((200, 300), "f4")
        cumem.copy(back, made, casting="safe")
        assert (back == made.cpu().float().numpy()).all()
        half = torch.zeros(300, 200, dtype=torch.bfloat16, device=place)
        cumem.copy(half, was.float(), casting="same_kind")
        assert torch.equal(half.cpu(), was.float().bfloat16())


@pytest.mark.parametrize("limit", ["100 KiB", "1 MiB"])
def test_cast_makes_do_with_little_page_locked_memory(emulated, limit) -> None:
    was = np.random.default_rng(0).standard_normal((1000, 400))
    target = cumem.zeros(was.T.shape, "f4")
    back = np.zeros(was.T.shape)
    with cumem.limit("pinned", limit):
        cumem.copy(target, was.T, casting="same_kind")
        cumem.copy(back, target, casting="safe")
    assert (back == was.T.astype("f4")).all()


@pytest.mark.parametrize("kind", ["numpy", "pinned", "managed"])
def test_other_devices_get_and_give_what_is_converted(emulated, kind) -> None:
    was = np.arange(200_000.0)
    stream = cumem.Stream(device=1)
    source = values.put(was, kind)
    target = cumem.zeros(was.shape, "f4", device=1, stream=stream)
    cumem.copy_async(target, source, stream=stream, casting="same_kind")
    back = values.put(np.zeros(was.shape, "i4"), kind)
    cumem.copy(back, target, casting="unsafe", stream=stream)
    assert (values.get(back) == was).all()
    made = target.astype("f2")
    assert made.device == target.device
    assert (values.get(made) == was.astype("f4").astype("f2")).all()


def test_device_gets_and_gives_whole_elements_without_a_kernel(emulated) -> None:
    """What lies together on the device is copied in one run a piece."""
    host, device = np.arange(500_000.0), cumem.zeros(500_000, "f4")
    cumem.copy(device, np.zeros(500_000, "f4"))
    testing.plan_fault(None, 0)
    cumem.copy(device, host, casting="same_kind")
    cumem.copy(host, device, casting="safe")
    assert testing.fault_count("copy_async") >= 2
    assert testing.fault_count("kernel_launch") == 0


@pytest.mark.parametrize("dst", ENDS)
def test_mapped_files_are_converted(runtime, tmp_path, dst) -> None:
    was = np.arange(300_000, dtype="f8")
    (tmp_path / "data").write_bytes(was.tobytes())
    source = np.memmap(tmp_path / "data", "f8", "r")
    target = values.put(np.zeros(was.shape, "f4"), dst)
    cumem.copy(target, source, casting="same_kind")
    assert (values.get(target) == was).all()
    back = np.memmap(tmp_path / "back", "f2", "w+", shape=was.shape)
    cumem.copy(back, target, casting="same_kind")
    assert (np.array(back) == was.astype("f2")).all()


def test_mapped_file_cut_short_is_an_oserror(runtime, tmp_path) -> None:
    (tmp_path / "data").write_bytes(bytes(8 * 300_000))
    source = np.memmap(tmp_path / "data", "f8", "r+")
    (tmp_path / "data").write_bytes(bytes(1000))
    for dst in ENDS:
        target = values.put(np.zeros(source.shape, "f4"), dst)
        with pytest.raises(OSError) as caught:
            cumem.copy(target, source, casting="same_kind")
        assert caught.value.errno == errno.EFAULT


def test_last_element_before_a_page_that_is_not_there_is_converted(runtime) -> None:
    """What the shorter side has is looked at, and no byte behind it."""
    room = mmap.mmap(-1, 1 << 20)
    was = np.frombuffer(room, "f4")
    was[:] = np.arange(was.size)
    half = was[: was.size // 2]
    lock = ctypes.CDLL(None, use_errno=True).mprotect
    lock.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert lock(half.ctypes.data + half.nbytes, 1 << 19, 0) == 0
    for dst in ("device", "pinned", "numpy"):
        target = values.put(np.zeros(half.size, "f8"), dst)
        cumem.copy(target, half, casting="safe")
        assert (values.get(target) == half).all()
        cumem.copy(half, target, casting="same_kind")
    assert lock(half.ctypes.data + half.nbytes, 1 << 19, 3) == 0


# -- order -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_cast_to_the_device_comes_after_what_the_stream_writes(emulated, kind) -> None:
    stream = cumem.Stream()
    source = cumem.full(5000, 1.0, "f8", kind)
    other = cumem.full(5000, 3.0)
    target = cumem.zeros(5000, "f4")
    cumem.Device(0).synchronize()
    with session.when_waiting(lambda: testing.gate_open(stream)):
        session.shut(stream)
        cumem.copy_async(source, other, stream=stream)
        cumem.copy_async(target, source, stream=stream, casting="same_kind")
    stream.synchronize()
    assert (values.get(target) == 3).all()


def test_ordinary_source_may_change_once_the_call_is_back(emulated) -> None:
    stream = cumem.Stream()
    target, source = cumem.zeros(5000, "f4"), np.arange(5000.0)
    cumem.Device(0).synchronize()
    with session.gate(stream):
        transfer = cumem.copy_async(target, source, stream=stream, casting="same_kind")
        source[:] = 0
        assert not transfer.done
    stream.synchronize()
    assert (values.get(target) == np.arange(5000)).all()


@pytest.mark.parametrize("dst", ["numpy", "pinned", "mapped"])
@pytest.mark.parametrize("src", ["numpy", "pinned", "device"])
def test_stream_that_is_done_means_that_the_values_are_there(
    emulated, dst, src
) -> None:
    stream = cumem.Stream()
    source = values.put(np.arange(5000.0), src)
    target = values.put(np.zeros(5000, "f4"), dst)
    cumem.Device(0).synchronize()
    with session.when_waiting(lambda: testing.gate_open(stream)):
        session.shut(stream)
        cumem.copy_async(target, source, stream=stream, casting="same_kind")
    stream.synchronize()
    seen = target if dst == "numpy" else target.numpy()
    assert (seen == np.arange(5000)).all()


def test_cast_comes_after_streams_and_does_not_wait(emulated) -> None:
    stream = cumem.Stream()
    source = cumem.full(5000, 2.0, "f8", "pinned")
    other = cumem.full(5000, 3.0, "f8")
    target = np.zeros(5000, "f4")
    cumem.Device(0).synchronize()
    with session.gate(stream):
        cumem.copy_async(source, other, stream=stream)
        transfer = cumem.copy_async(target, source, after=stream, casting="same_kind")
        assert not transfer.done
        assert not target.any()
    transfer.wait()
    assert (target == 3).all()


@pytest.mark.parametrize("kind", ["numpy", "device"])
def test_cast_that_is_cancelled_leaves_its_target(emulated, kind) -> None:
    stream = cumem.Stream()
    source = cumem.full(5000, 2.0, "f8", "pinned")
    other = cumem.full(5000, 3.0, "f8")
    target = values.put(np.ones(5000, "f4"), kind)
    cumem.Device(0).synchronize()
    with session.gate(stream):
        cumem.copy_async(source, other, stream=stream)
        transfer = cumem.copy_async(target, source, casting="same_kind")
        assert transfer.cancel()
    with pytest.raises(cumem.CancelledError):
        transfer.wait()
    assert (values.get(target) == 1).all()


def test_cast_that_waits_hears_of_a_signal(emulated) -> None:
    stream = cumem.Stream()
    source, other = cumem.full(5000, 2.0, "f8", "pinned"), cumem.full(5000, 3.0)
    target = np.zeros(5000, "f4")
    cumem.Device(0).synchronize()
    with session.alarm(stream):
        cumem.copy_async(source, other, stream=stream)
        cumem.copy(target, source, casting="same_kind")
    stream.synchronize()
    assert not target.any()


def test_progress_is_told_to_the_end(runtime) -> None:
    seen: list[tuple[int, int]] = []
    target = cumem.zeros(1_000_000, "f4")
    cumem.copy(
        target,
        np.ones(1_000_000),
        casting="same_kind",
        progress=lambda *args: seen.append(args),
    )
    assert seen[-1] == (4_000_000, 4_000_000)  # what crosses the link


# -- failures ----------------------------------------------------------------------


def cast_both_ways() -> None:
    was = np.arange(60_000.0).reshape(200, 300)
    target = cumem.empty((200, 300), "f4")
    cumem.copy(target, was, casting="same_kind")
    cumem.copy(target[:, ::2], was[:, ::2].T.copy().T, casting="same_kind")
    back = np.zeros((200, 300))
    cumem.copy_async(back, target, casting="safe").wait()
    assert (back == was).all()
    pinned = cumem.empty((200, 300), "f2", "pinned")
    cumem.copy(pinned, target, casting="same_kind", stream=cumem.Stream())
    assert (pinned.numpy() == was.astype("f2")).all()
    assert (values.get(target.astype("f8")) == was).all()


def test_every_runtime_call_of_a_cast_may_fail(emulated) -> None:
    swept = sweep(cast_both_ways)
    assert {"copy_async", "event_record"} <= swept.failed
    assert "copy_async" in swept.raised


def assert_refused(error: type[Exception], match: str, *args, **named) -> None:
    with pytest.raises(error, match=match):
        cumem.copy(*args, **named)
    with pytest.raises(error, match=match):
        cumem.copy_async(*args, **named)
    with pytest.raises(error, match=match):
        cumem.explain(*args, **named)


def test_what_cannot_be_cast_is_refused_and_nothing_is_written(runtime) -> None:
    f8, f4, i4 = np.ones(3), np.zeros(3, "f4"), np.zeros(3, "i4")
    other = "copy: source has dtype float64, target has dtype"
    same_kind = f'{other} float32; convert first, or pass casting="same_kind"'
    assert_refused(TypeError, same_kind, f4, f8)
    assert_refused(TypeError, f'{other} int32; .*casting="unsafe"', i4, f8)
    assert_refused(
        TypeError,
        "casting='same_kind' does not allow dtype float64 to become dtype int32; "
        "casting='unsafe' does",
        i4,
        f8,
        casting="same_kind",
    )
    assert_refused(TypeError, "casting='no' does not", f4, f8, casting="no")
    assert_refused(ValueError, "casting must be one of 'no'", f4, f8, casting="any")
    assert_refused(TypeError, "casting must be one of", f4, f8, casting=1)
    assert_refused(TypeError, "need casting=", f4, f4 + 1, scale=2)
    assert_refused(TypeError, "need casting=", f4, f8, offset=2)
    for name in ("scale", "offset"):
        for bad in ("2", 1j, [1]):
            named = {"casting": "unsafe", name: bad}
            assert_refused(TypeError, f"{name} must be a real number", f4, f8, **named)
    for dtype in ("c8", "M8[s]", "S4", [("a", "f4")]):
        odd = np.zeros(3, dtype)
        match = "scale= and offset= are for .* not for dtype|does not allow"
        assert_refused(TypeError, match, f4, odd, casting="unsafe", scale=2)
    assert_refused(
        ValueError, "does not fit the target", f4, np.ones(4), casting="unsafe"
    )
    frozen = np.zeros(3, "f4")
    frozen.flags.writeable = False
    assert_refused(ValueError, "read-only", frozen, f8, casting="unsafe")
    far = cumem.zeros(3, "f4"), cumem.full(3, 1.0)
    assert_refused(TypeError, "'safe' does not allow", *far, casting="safe")
    assert not f4.any()
    assert not i4.any()
    assert not values.get(far[0]).any()
    with pytest.raises(TypeError, match='casting="same_kind"'):
        far[0][...] = f8
    with pytest.raises(TypeError, match="casting"):
        cumem.copy_many([(f4, f8)])
    with pytest.raises(TypeError, match=r"pair 1.*casting"):
        cumem.copy_many([(f4, f4 + 1), (i4, f8)], casting="same_kind")
    assert not f4.any()


def test_same_dtype_with_casting_is_a_plain_copy(runtime) -> None:
    for dtype in ("f8", "c16", "M8[s]", "S3", ">i4", [("a", "f4")]):
        was = np.frombuffer(bytes(range(1, 1 + 5 * np.dtype(dtype).itemsize)), dtype)
        target = cumem.zeros(5, dtype)
        cumem.copy(target, was, casting="no")
        assert same_bytes(values.get(target), was)
        assert "becomes" not in cumem.explain(target, was, casting="no").why


def test_capture_refuses_a_cast(emulated) -> None:
    stream = cumem.Stream()
    target, source = cumem.zeros(100, "f4"), cumem.zeros(100, "f8", "pinned")
    cumem.Device(0).synchronize()
    testing.set_capturing(stream, True)
    try:
        with pytest.raises(cumem.CudaError, match="captur"):
            cumem.copy_async(target, source, stream=stream, casting="same_kind")
    finally:
        testing.set_capturing(stream, False)


# -- few elements, which the calling thread converts by itself ------------------------

FEW = [
    ("f8", "f4"),
    ("f4", "c8"),
    ("c16", "c8"),
    ("u1", "f4"),
    (">i2", "f8"),
    ("?", "c16"),
]


@pytest.mark.parametrize("kind", ["numpy", "pinned", "mapped"])
@pytest.mark.parametrize(("source", "to"), FEW)
def test_few_elements_are_converted_without_a_job(emulated, kind, source, to) -> None:
    was = np.random.default_rng(0).integers(0, 2, (40, 50)).astype(source)
    given = values.put(was, kind)
    far, back = (
        cumem.zeros(was.shape, to),
        values.put(np.zeros(was.shape, source), kind),
    )
    cumem.Device(0).synchronize()
    before = testing.copy_counts()["quick"]
    cumem.copy(far, given, casting="unsafe")
    cumem.copy(back, far, casting="unsafe")
    assert testing.copy_counts()["quick"] == before + 2
    assert_same(values.get(far), was.astype(to), was)
    assert same_bytes(values.get(back), was)
    told = cumem.explain(far, given, casting="unsafe")
    assert (told.route, told.threads, told.nbytes) == ("direct", 1, far.nbytes)
    assert "becomes" in told.why


def test_few_elements_in_views_or_by_numpy_are_left_to_a_job(emulated) -> None:
    far = cumem.zeros((40, 50), "f4")
    cumem.Device(0).synchronize()
    before = testing.copy_counts()["quick"]
    cumem.copy(far, np.ones((50, 40)).T, casting="same_kind")
    cumem.copy(far, np.ones((40, 50), "g"), casting="same_kind")
    cumem.copy(far[:, :3], np.ones((40, 3)), casting="same_kind")
    assert testing.copy_counts()["quick"] == before
    assert (values.get(far) == 1).all()


@pytest.mark.parametrize("count", [1, 33, 8193, 32767, 32768, 32769])
def test_few_elements_and_many_are_converted_alike(runtime, count) -> None:
    was = np.random.default_rng(count).standard_normal(count)
    for to in ("f4", "c8", "i2"):
        far, back = cumem.zeros(count, to), np.zeros(count)
        cumem.copy(far, was, casting="unsafe")
        assert same_bytes(values.get(far), was.astype(to))
        cumem.copy(back, far, casting="unsafe")
        assert same_bytes(back, was.astype(to).astype("f8"))


def test_few_elements_come_after_what_is_still_written(emulated) -> None:
    far = cumem.zeros(100, "f4")
    given, back = cumem.zeros(100, "f8", "pinned"), np.zeros(100)
    late, stream = cumem.full(100, 7.0), cumem.Stream()
    cumem.Device(0).synchronize()
    with session.when_waiting(lambda: testing.gate_open(stream)):
        session.shut(stream)
        cumem.copy_async(given, late, stream=stream)
        cumem.copy(far, given, casting="same_kind")
    cumem.copy(back, far, casting="safe")
    assert (back == 7).all()


def test_few_elements_are_converted_where_nothing_may_be_page_locked(emulated) -> None:
    with cumem.limit("pinned", 0):
        far, back = cumem.zeros(100, "f4"), np.zeros(100)
        cumem.copy(far, np.arange(100.0), casting="same_kind")
        cumem.copy(back, far, casting="safe")
    assert (back == np.arange(100)).all()


def test_every_runtime_call_of_a_cast_of_few_elements_may_fail(emulated) -> None:
    was = np.arange(100.0)

    def scenario() -> None:
        far, back = cumem.zeros(100, "c8"), np.zeros(100)
        cumem.copy(far, was, casting="same_kind")
        cumem.copy(back, far, casting="unsafe")
        assert (back == was).all()

    swept = sweep(scenario)
    assert {"copy_async", "event_record"} <= swept.failed
    assert "copy_async" in swept.raised


# -- a rule that is asked for again and again ------------------------------------------


def test_rule_that_was_asked_for_before_is_told_from_others(runtime) -> None:
    f8 = np.ones(3)
    for target in (np.zeros(3, "f4"), cumem.zeros(3, "f4", "pinned")):
        for _ in range(3):
            cumem.copy(target, f8, casting="same_kind")
            cumem.copy(target, f8, casting="".join(["same", "_kind"]))
            cumem.copy(target, f8, casting="same_kind", scale=2)
            assert (values.get(target) == 2).all()
            assert_refused(TypeError, "'safe' does not", target, f8, casting="safe")
            assert_refused(TypeError, "convert first", target, f8)
            assert_refused(ValueError, "must be one of", target, f8, casting="any")


def test_dtypes_that_stand_for_others_are_told_from_equal_ones(runtime) -> None:
    """Equal to NumPy, as metadata does not count, and of another meaning."""
    ones = np.ones(3, "f4")
    numbers = np.zeros(3, "u2")
    stand_in = np.dtype("u2", metadata={STANDS_FOR: "bfloat16"})
    halves = np.zeros(3, "u2").view(stand_in)
    for _ in range(3):
        cumem.copy(numbers, ones, casting="unsafe")
        assert numbers.tolist() == [1] * 3
        cumem.copy(halves, ones, casting="unsafe")
        assert (halves.view("u2") == 0x3F80).all()


def test_dropped_imaginary_parts_are_warned_of_each_time(runtime) -> None:
    target = np.zeros(2)
    for _ in range(3):
        with pytest.warns(np.exceptions.ComplexWarning, match="imaginary") as caught:
            cumem.copy(target, np.array([1 + 2j, 3]), casting="unsafe")
        assert caught[0].filename == __file__
        target[:] = 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(np.exceptions.ComplexWarning):
                cumem.copy(target, np.array([1 + 2j, 3]), casting="unsafe")
        assert not target.any()


# -- the other functions with the rule ---------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_taken_where_they_fit_or_casting_allows(runtime, kind) -> None:
    buffer = cumem.zeros(3, "u1", kind)
    cumem.copy(buffer, 7)
    cumem.copy(buffer[:1], 8, casting="no")  # fits: nothing is changed
    assert values.get(buffer).tolist() == [8, 7, 7]
    with pytest.raises(TypeError, match="would change"):
        cumem.copy(buffer, 1.5)
    with pytest.raises(TypeError, match="does not allow dtype float64"):
        cumem.copy(buffer, 1.5, casting="same_kind")
    with pytest.raises(TypeError, match='casting="unsafe"'):
        buffer.fill(1.5)
    with pytest.raises(TypeError, match="does not allow dtype float64"):
        buffer.fill(1.5, casting="same_kind")
    cumem.copy(buffer, [1.5, 2.5, 300.0], casting="unsafe")
    assert values.get(buffer).tolist() == [1, 2, 255]
    buffer.fill(2.9, casting="unsafe")
    assert values.get(buffer).tolist() == [2] * 3
    buffer.fill(9, casting="no")
    assert values.get(buffer).tolist() == [9] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ENDS)
def test_array_full_and_fill_convert_by_casting(runtime, kind, source) -> None:
    was = np.linspace(-3, 300, 12).reshape(3, 4)
    given = values.put(was, source)
    made = cumem.array(given, "f4", kind, casting="same_kind")
    assert made.kind == kind
    assert same_bytes(values.get(made), was.astype("f4"))
    with pytest.raises(TypeError, match="casting='same_kind' does not allow"):
        cumem.array(given, "i4", kind, casting="same_kind")
    whole = cumem.array(given, "i4", kind, casting="unsafe")
    assert (values.get(whole) == was.astype("i4")).all()
    filled = cumem.full((2, 3, 4), given, "i2", kind, casting="unsafe")
    assert (values.get(filled) == was.astype("i2")).all()
    with pytest.raises(TypeError, match=r'fill: .*casting="same_kind"'):
        made.fill(given)
    made.fill(values.put(was[::-1], source), casting="same_kind")
    assert same_bytes(values.get(made), was[::-1].astype("f4"))


def test_array_converts_what_lies_on_a_device(runtime) -> None:
    assert values.get(cumem.array(cumem.full(3, 1.5), "f4")).tolist() == [1.5] * 3
    with pytest.raises(TypeError, match="casting='unsafe' does"):
        cumem.array(cumem.zeros(3), "i4")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", ["f4", "i4", "f8", "c8", BF16], ids=str)
def test_astype_answers_the_same_kind(runtime, kind, to) -> None:
    was = np.arange(24.0).reshape(4, 6)
    buffer = cumem.array(was, kind=kind)
    made = buffer[:, ::2].astype(to)
    assert type(made) is type(buffer)
    assert made.dtype == to
    assert same_bytes(values.get(made), was[:, ::2].astype(to))
    turned = buffer.T.astype(to, order="C")
    assert turned.strides[-1] == turned.itemsize
    assert same_bytes(values.get(turned), was.T.astype(to))


def test_astype_follows_numpys_arguments(runtime) -> None:
    buffer = cumem.full(3, 1.5, kind="pinned")
    assert buffer.astype("f8", copy=False) is buffer
    assert buffer.astype("f8") is not buffer
    assert buffer.astype("f4", "K", "same_kind").dtype == np.float32
    with pytest.raises(TypeError, match="astype: casting='safe' does not allow"):
        buffer.astype("f4", casting="safe")
    with pytest.raises(ValueError, match="casting must be one of"):
        buffer.astype("f4", casting="other")
    with pytest.raises(TypeError):
        buffer.astype("no such dtype")
    with pytest.raises(ValueError, match="order"):
        buffer.astype("f4", order="X")
    ordinary = cumem.asbuffer(np.ones(3)).astype("f2")
    assert ordinary.kind == "pageable"
    assert ordinary.numpy().dtype == np.float16
    buffer.free()
    with pytest.raises(ValueError, match="closed"):
        buffer.astype("f4")


def test_chunks_have_the_dtype_that_is_asked_for(runtime) -> None:
    was = np.random.default_rng(0).standard_normal((1000, 7))
    parts = []
    for part, chunk in cumem.chunks(was, "4 KiB", dtype="f4"):
        assert chunk.dtype == np.float32
        assert chunk.nbytes <= 4096
        assert same_bytes(values.get(chunk), was[part].astype("f4"))
        parts.append(part.stop)
    assert parts[-1] == 1000
    assert len(parts) > 5
    with pytest.raises(TypeError, match="does not allow dtype float64"):
        next(cumem.chunks(was, "4 KiB", dtype="i4"))
    part, chunk = next(cumem.chunks(was, "4 KiB", dtype="i4", casting="unsafe"))
    assert (values.get(chunk) == was[part].astype("i4")).all()


# -- numbers that grow on the device ---------------------------------------------------

SHORT = [np.dtype(t) for t in ("?", "i1", "u1", "i2", "u2")]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("source", [*SHORT, F2, BF16], ids=str)
def test_short_numbers_cross_the_link_and_grow_there(runtime, source, scaled) -> None:
    was = np.resize(interesting(source), 300_001)
    how = {"scale": 0.1, "offset": -3} if scaled else {}
    expected = was.astype(F4)
    if scaled:
        expected = expected * F4.type(0.1) + F4.type(-3)
    target = cumem.empty(was.shape, F4)
    done = cumem.copy_async(target, was, casting="unsafe", **how)
    done.wait()
    on_host = scaled and source in FLOATS  # NaN would come out with other bits
    assert done.nbytes == (expected if on_host else was).nbytes
    assert_same(values.get(target), expected, was)


@pytest.mark.parametrize("number", [np.inf, np.nan, 1e39])
def test_scale_that_is_no_float32_is_left_to_the_host(emulated, number) -> None:
    was = np.resize(np.arange(256, dtype="u1"), 300_000)
    target = cumem.empty(was.shape, F4)
    cumem.copy(target, was, casting="same_kind", scale=number)
    expected = was.astype(F4) * F4.type(number)
    assert np.array_equal(values.get(target), expected, equal_nan=True)
    assert testing.fault_count("kernel_launch") == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("into", ["whole", "every other", "turned", "upside down"])
@pytest.mark.parametrize("kind", ["numpy", "pinned"])
def test_views_grow_on_the_device(runtime, in_pieces, layout, into, kind) -> None:
    was = np.random.default_rng(0).integers(0, 1 << 16, (1500, 1000), "u2")
    given = LAYOUTS[layout](values.put(was, kind) if layout != "planes" else was)
    expected = LAYOUTS[layout](was).astype(F4)
    shape = given.shape
    room = {
        "whole": lambda: cumem.zeros(shape, F4),
        "every other": lambda: cumem.zeros((*shape[:-1], 2 * shape[-1]), F4)[..., ::2],
        "turned": lambda: cumem.zeros(shape[::-1], F4).T,
        "upside down": lambda: cumem.zeros(shape, F4)[::-1],
    }
    target = room[into]()
    told = cumem.explain(target, given, casting="same_kind")
    assert told.route == "staged-kernel"
    assert told.nbytes == given.size * 2
    assert "uint16 becomes float32 on the device" in told.why
    cumem.copy(target, given, casting="same_kind")
    assert (values.get(target) == expected).all()


def test_repeated_numbers_cross_the_link_once(runtime) -> None:
    row = np.resize(np.arange(256, dtype="u1"), 300_000)
    target = cumem.zeros((3, 300_000), F4)
    done = cumem.copy_async(target, row, casting="same_kind")
    done.wait()
    assert done.nbytes == row.nbytes
    assert (values.get(target) == row).all()


@pytest.mark.parametrize("edge", [0, 1, 2, 4])
def test_unaligned_target_is_left_to_the_host(emulated, edge: int) -> None:
    was = np.resize(np.arange(256, dtype="u1"), 300_000)
    room = cumem.zeros(4 * 300_000 + 4, "u1")
    target = room[edge : edge + 4 * 300_000].view(F4)
    cumem.copy(target, was, casting="same_kind")
    assert (values.get(target) == was).all()
    assert (testing.fault_count("kernel_launch") > 0) == (edge % 4 == 0)


def test_few_numbers_take_no_kernel(emulated) -> None:
    was = np.arange(256, dtype="u1")
    target = cumem.zeros(256, F4)
    cumem.copy(target, was, casting="same_kind")
    assert (values.get(target) == was).all()
    assert testing.fault_count("kernel_launch") == 0


def fill_device() -> list[cumem.Buffer]:
    """All that the limit, or what is reserved, lets be had, but what is in flight."""
    cumem.set_limit("device", cumem.stats()["device"].reserved_nbytes)
    taken = []
    for nbytes in (1 << 20, 1 << 16, 1 << 12, 512):
        with contextlib.suppress(cumem.OutOfMemoryError):
            while True:
                taken.append(cumem.empty_device(nbytes, "u1"))
    return taken


@pytest.mark.parametrize("pinned", [None, 0])
def test_host_converts_where_the_device_has_no_memory_to_spare(
    emulated, pinned
) -> None:
    """It neither waits for what is in flight on other streams nor asks for relief."""
    was = np.resize(np.arange(256, dtype="u1"), 3_000_000)
    target = cumem.zeros(was.shape, F4)
    busy = cumem.Stream()
    gone = cumem.zeros(4 << 20, "u1", stream=busy)
    busy.synchronize()
    taken = fill_device()
    session.shut(busy)
    gone.fill(3, stream=busy)
    del gone
    asked: list[object] = []
    handle = cumem.on_out_of_memory(asked.append)
    with cumem.limit("pinned", pinned), handle:
        done = cumem.copy_async(target, was, casting="same_kind", scale=2)
        done.wait()
    assert done.nbytes == target.nbytes
    assert testing.fault_count("kernel_launch") == 0
    assert asked == []
    testing.gate_open(busy)
    assert (values.get(target) == was.astype(F4) * 2).all()
    taken.clear()


def test_overlapping_source_grows_without_memory_for_a_block(emulated) -> None:
    """The kernel reads the page-locked slots themselves."""
    far = cumem.zeros(8 << 20, "u1")
    room = cumem.asbuffer(np.from_dlpack(far))
    was = np.resize(np.arange(256, dtype="u1"), 400_000)
    room.numpy()[5:400_005] = was
    taken = fill_device()
    target = far.view(F4)[:400_000]
    cumem.copy(target, room[5:400_005], casting="same_kind")
    assert (values.get(target) == was).all()
    assert testing.fault_count("kernel_launch") > 0
    taken.clear()


def test_source_that_overlaps_grows_on_the_device(emulated) -> None:
    far = cumem.zeros(2_000_000, "u1")
    room = cumem.asbuffer(np.from_dlpack(far))
    was = np.resize(np.arange(256, dtype="u1"), 400_000)
    room.numpy()[5:400_005] = was
    target = far.view(F4)[:400_000]
    cumem.copy(target, room[5:400_005], casting="same_kind")
    assert (values.get(target) == was).all()
    assert testing.fault_count("kernel_launch") > 0


def test_every_runtime_call_of_numbers_that_grow_may_fail(emulated) -> None:
    was = np.resize(np.arange(256, dtype="u1"), 300_000)

    def scenario() -> None:
        target = cumem.zeros(was.shape, F4)
        cumem.copy(target, was, casting="same_kind", scale=0.5)
        assert (values.get(target) == was.astype(F4) * F4.type(0.5)).all()

    swept = sweep(scenario)
    assert {"copy_async", "kernel_launch"} <= swept.failed
    assert "kernel_launch" in swept.raised
