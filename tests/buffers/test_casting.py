# SPDX-License-Identifier: Apache-2.0
"""Copies that convert numbers on the way give the bits of NumPy's astype().

The tests convert between all pairs of dtypes and ends, in layouts with gaps, in pieces,
and in place, and compare each element. Other functions with `casting=` follow at the
end.
"""

from __future__ import annotations

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
from support.casting import (
    BF16,
    F2,
    F4,
    F8,
    FLOATS,
    LAYOUTS,
    assert_same,
    interesting,
)
from support.session import testing
from support.strategies import KINDS, as_view, basic_indices, places, same_bytes, shapes
from support.tuning import tuned

import cumem
from cumem.buffers.casting import NUMBERS, REALS

# A table in C has the rules of casting, so no version of Python changes them.
pytestmark = pytest.mark.any_python
BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
ENDS = ["numpy", *KINDS]
#: In each pair, at least one end is on the host.
PAIRS = [ends for ends in itertools.product(ENDS, ENDS) if ends != ("device", "device")]
DTYPES = [np.dtype(ml_dtypes.bfloat16 if n == "bfloat16" else n) for n in NUMBERS]
C8, C16 = np.dtype("c8"), np.dtype("c16")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore NumPy's warnings about values that do not fit the target's dtype."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "invalid value|overflow", RuntimeWarning)
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        yield


def goes_via_host(dst: str, src: str) -> bool:
    return dst == src == "device"


def that_fit(array: np.ndarray, to: np.dtype) -> np.ndarray:
    """Leave out floats that an integer cannot hold, since NumPy's result is undefined."""
    if array.dtype.kind == "c":
        real = np.ascontiguousarray(array.real)
        return array[np.isin(real, that_fit(real, to))] if to.kind in "iu" else array
    if array.dtype not in FLOATS or to in FLOATS or to.kind in "?bc":
        return array
    low, high = (float(end) for end in (np.iinfo(to).min, np.iinfo(to).max))
    wide = array.astype(F8)
    ends = low - (1 if low > -(2**31) - 1 else 0), 2.0 ** np.ceil(np.log2(high))
    return array[(wide >= low if low < -(2**53) else wide > ends[0]) & (wide < ends[1])]


# -- the values -------------------------------------------------------------------------


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


# -- the ends and their layouts ---------------------------------------------------------


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
            if goes_via_host(to, source):
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
    """Make copies by four threads, in pieces of 64 KiB."""
    with tuned(chunk_nbytes="64 KiB", threads=4):
        yield


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
    reported = cumem.explain(target, given, casting="same_kind")
    assert reported.route.startswith("staged")
    assert reported.pieces > 4
    assert f"{given.dtype} becomes {target.dtype}" in reported.why
    cumem.copy(target, given, casting="same_kind")
    assert (values.get(target) == view(was).astype(to)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_copies_between_hosts_convert_by_several_threads(
    runtime, in_pieces, layout
) -> None:
    was = np.random.default_rng(0).standard_normal((1500, 1000))
    given = LAYOUTS[layout](was)
    target = np.zeros(given.shape, "f2")
    reported = cumem.explain(target, given, casting="same_kind")
    assert reported.route == "host"
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
    """For cumem, the host's view of the emulated device's memory is ordinary memory.

    A copy between the view and the buffer must read all of its source before it writes.
    """
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
    """Elements that lie together on the device are copied in one run for each piece."""
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
    """The array with the shorter elements ends at a page that cannot be read.

    The conversion must read all of the array and no byte of that page.
    """
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


# -- the other functions with the rule --------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_taken_where_they_fit_or_casting_allows(runtime, kind) -> None:
    buffer = cumem.zeros(3, "u1", kind)
    cumem.copy(buffer, 7)
    # The value fits, so nothing is converted.
    cumem.copy(buffer[:1], 8, casting="no")
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
    with pytest.raises(TypeError, match=r"^full: casting='same_kind' does not allow"):
        cumem.full((2, 3, 4), given, "i2", kind)
    with pytest.raises(TypeError, match=r"^fill: casting='safe' does not allow"):
        made.fill(given, casting="safe")
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
