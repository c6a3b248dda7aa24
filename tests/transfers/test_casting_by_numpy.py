# SPDX-License-Identifier: Apache-2.0
"""Conversions that NumPy makes for copies, and conversions between memory of devices.

Where the core cannot convert a pair of dtypes, NumPy does, in a thread of the core or
of the user. Conversions from device to device go through the host. Values, errors and
warnings are compared with NumPy's astype().
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from support import programs, session, values
from support.faults import sweep
from support.session import testing
from support.strategies import same_bytes
from support.tuning import tuned

import cumem

F8 = np.dtype(ml_dtypes.float8_e4m3fn)
COUNT = 5000


def texts(count: int, bad: int | None = None) -> np.ndarray:
    """Return numbers as texts. With `bad`, the text of that index is not a number."""
    made = np.arange(count).astype("S8")
    if bad is not None:
        made[bad] = b"x"
    return made


# -- what cannot be converted --------------------------------------------------------------

CALLS: dict[str, Callable[[cumem.Buffer, np.ndarray], object]] = {
    "copy": lambda dst, src: cumem.copy(dst, src, casting="unsafe"),
    "copy_async": lambda dst, src: cumem.copy_async(dst, src, casting="unsafe").wait(),
    "on a stream": lambda dst, src: cumem.copy_async(
        dst, src, casting="unsafe", stream=cumem.Stream()
    ).wait(),
    "copy_many": lambda dst, src: cumem.copy_many(
        [(dst[:5], src[:5]), (dst[5:], src[5:])], casting="unsafe"
    ),
    "broadcast": lambda dst, src: cumem.broadcast([dst], src, casting="unsafe"),
    "from a device": lambda dst, src: cumem.copy(
        dst, cumem.array(src), casting="unsafe"
    ),
    "fill": lambda dst, src: dst.fill(src, casting="unsafe"),
}


@pytest.mark.parametrize("kind", ["pinned", "device"])
@pytest.mark.parametrize("call", CALLS)
def test_text_that_is_no_number_gets_the_error_of_numpy(runtime, call, kind) -> None:
    target = cumem.zeros(COUNT, "f8", kind)
    for bad in (0, COUNT - 1):
        with pytest.raises(ValueError, match=r"cannot be converted.*'x'") as raised:
            CALLS[call](target, texts(COUNT, bad))
        assert raised.value.name == "CM_ECAST"  # type: ignore[attr-defined]
    CALLS[call](target, texts(COUNT))
    assert (values.get(target) == np.arange(COUNT)).all()


def test_failures_that_nobody_reads_do_not_pile_up(runtime) -> None:
    from cumem.base.errors import _cast_failures

    target = np.zeros(3)
    for _ in range(100):
        with pytest.raises(ValueError, match="'x'"):
            cumem.copy(target, texts(3, 1), casting="unsafe")
    assert len(_cast_failures) <= 64


@pytest.mark.parametrize(
    ("source", "to"), [("M8[s]", "c8"), ("f8", "M8[s]"), ("f4", "m8[ms]")]
)
def test_pair_is_refused_exactly_where_numpy_has_no_way(runtime, source, to) -> None:
    array = np.arange(3).astype("i8").view(source) if source[0] == "M" else None
    array = np.arange(3, dtype=source) if array is None else array
    target = np.zeros(3, to)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = array.astype(to)
        except TypeError:
            with pytest.raises(TypeError):
                cumem.copy_async(target, array, casting="unsafe")
        else:
            cumem.copy_async(target, array, casting="unsafe").wait()
            assert target.tobytes() == expected.tobytes()


def test_objects_are_refused_by_every_call(runtime) -> None:
    target = cumem.zeros(3, "f4")
    objects = np.array([1, None, "x"], object)
    for call in CALLS.values():
        with pytest.raises((TypeError, ValueError)):
            call(target, objects)
    with pytest.raises(TypeError):
        cumem.array(objects, "f4")


def test_complex_to_real_warns_once_of_the_caller(runtime) -> None:
    array = np.array([1 + 2j, 3 - 4j], "c8")
    for to in ("f8", "i2", ml_dtypes.bfloat16, ">f4", F8, "f8", "i2"):
        target = cumem.zeros(2, to)
        with pytest.warns(np.exceptions.ComplexWarning, match="imaginary") as caught:
            cumem.copy_async(target, array, casting="unsafe").wait()
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert values.get(target).astype("f8").tolist() == [1, 3]
    target = cumem.zeros(2, "?")
    # NumPy does not warn about this conversion either.
    cumem.copy(target, np.array([0j, 2j]), casting="unsafe")
    assert values.get(target).tolist() == [False, True]


@pytest.mark.parametrize("name", ["complex32", "bcomplex32"])
def test_complex_numbers_of_ml_dtypes_keep_their_imaginary_parts(runtime, name) -> None:
    if not hasattr(ml_dtypes, name):
        pytest.skip("this ml_dtypes does not have these dtypes")
    short = np.dtype(getattr(ml_dtypes, name))
    for source in ("c8", "c16", ">c8"):
        array = np.array([1 + 2j, 3 - 4j, -0j], source)
        target = cumem.zeros(3, short)
        cumem.copy(target, array, casting="unsafe")
        assert values.get(target).tobytes() == array.astype(short).tobytes()
        back = cumem.zeros(3, source, "pinned")
        cumem.copy(back, target, casting="unsafe")
        assert same_bytes(values.get(back), array)
    with pytest.warns(np.exceptions.ComplexWarning, match="imaginary") as caught:
        cumem.copy(np.zeros(3, "f4"), target, casting="unsafe")
    assert caught[0].filename == __file__


def test_numpys_warnings_and_its_state_of_errors_play_no_part(runtime) -> None:
    array = np.array([1e300, -1e300, 1e-300])
    with np.errstate(all="raise"):
        for to in (F8, "c8", ">f4", "f2"):
            target = cumem.zeros(3, to)
            cumem.copy_async(target, array, casting="unsafe").wait()
            with np.errstate(all="ignore"):
                assert values.get(target).tobytes() == array.astype(to).tobytes()


# -- how it is made ------------------------------------------------------------------------


def test_elements_longer_than_a_piece_are_not_cut(runtime) -> None:
    array = np.array([b"a" * 200_000, b"b", b""] * 3, "S200000")
    target = cumem.zeros(9, "S300000")
    with tuned(chunk_nbytes="64 KiB"):
        cumem.copy(target, array, casting="safe")
        back = np.zeros(9, "S200001")
        cumem.copy(back, target, casting="same_kind")
    assert (back == array).all()


@pytest.mark.parametrize("to", ["c16", "g"])
@pytest.mark.parametrize("kind", ["numpy", "pinned", "managed", "device"])
def test_many_axes_of_any_strides_are_converted(runtime, kind, to) -> None:
    rng = np.random.default_rng(0)
    array = rng.integers(0, 99, (2, 3) * 6).astype("f8")
    turned = array.transpose(*range(0, 12, 2), *range(1, 12, 2))[:, ::-1, ..., ::2]
    target = values.put(np.zeros(turned.shape, to), kind)
    cumem.copy(target, turned, casting="safe")
    assert (values.get(target) == turned).all()


@pytest.mark.parametrize("to", ["c8", "g"])
def test_threads_may_convert_at_once(runtime, to) -> None:
    arrays = [np.arange(60_000.0) + i for i in range(4)]
    targets = [np.zeros(60_000, to) for _ in arrays]

    def convert(i: int) -> None:
        for _ in range(5):
            cumem.copy(targets[i], arrays[i], casting="same_kind")

    threads = [threading.Thread(target=convert, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for target, array in zip(targets, arrays, strict=True):
        assert (target == array).all()


def test_cast_in_the_background_waits_for_the_stream_and_nobody_for_it(
    emulated,
) -> None:
    stream = cumem.Stream()
    source = cumem.zeros(COUNT, "f8", "pinned")
    late, target = cumem.full(COUNT, 7.0, "f8"), cumem.zeros(COUNT, ">f8")
    cumem.Device(0).synchronize()
    with session.gate(stream):
        cumem.copy_async(source, late, stream=stream)
        transfer = cumem.copy_async(target, source, casting="equiv")
        other = cumem.copy_async(np.zeros(3, F8), np.ones(3), casting="unsafe")
        other.wait()
        assert not transfer.done
    transfer.wait()
    assert (values.get(target) == 7).all()


#: This program ends while conversions by NumPy are under way.
ENDS = """
import numpy as np, cumem
texts = np.arange(200_000).astype("S8")
source = cumem.array(texts) if {far} else texts
targets = [cumem.empty_device(200_000, "f8") for _ in range(3)]
kept = [cumem.copy_async(target, source, casting="unsafe") for target in targets]
"""


@pytest.mark.parametrize("far", [False, True])
def test_program_ends_while_casts_are_under_way(far) -> None:
    done = programs.run("-c", ENDS.format(far=far))
    assert done.returncode == 0, done.stderr
    assert not done.stderr


# -- between memory of devices -------------------------------------------------------------

#: The copy threads convert some of these pairs, and NumPy the others.
FAR = [
    ("f8", "f4"),
    ("f4", "f8"),
    ("f4", ">f4"),
    ("i4", "u1"),
    ("f4", F8),
    ("f8", "S32"),
]


@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize(("source", "to"), FAR, ids=str)
def test_device_to_device_converts_views_of_any_strides(runtime, source, to, other):
    if other >= cumem.device_count():
        pytest.skip("this test needs two devices")
    array = np.arange(60 * 70).reshape(60, 70).astype(source)
    there = cumem.array(array)
    for view in (
        np.s_[:],
        np.s_[::2, ::-3],
        np.s_[5:6],
        np.s_[:, 3],
        np.s_[4, 5, ...],
        np.s_[:0],
    ):
        expected = array[view].astype(to)
        for turned in (False, True):
            src = there[view].T if turned else there[view]
            target = cumem.zeros(src.shape, to, device=other)
            how: dict = {"casting": "unsafe"}
            cumem.copy(target, src, **how)
            cumem.copy_async(target, src, **how).wait()
            wanted = expected.T if turned else expected
            assert values.get(target).tobytes() == wanted.tobytes()
            assert cumem.explain(target, src, **how).route in ("several", "nothing")


def test_device_to_device_repeats_a_source(runtime) -> None:
    row = cumem.array(np.arange(300.0))
    target = cumem.zeros((200, 300), "f4")
    cumem.copy(target, row, casting="same_kind")
    assert (values.get(target) == np.arange(300)).all()


def test_device_to_device_goes_in_pieces_through_one_stage(emulated) -> None:
    count = 9_000_001  # These elements of 8 bytes make three pieces.
    source = cumem.empty(count, "f8")
    cumem.copy(source, np.arange(count, dtype="f8"))
    target = cumem.empty(count, "f4")
    cumem.copy(target, source, casting="same_kind")
    assert (values.get(target) == np.arange(count, dtype="f4")).all()
    rows = cumem.empty((3, 3_000_000), "f4")
    cumem.copy(rows, source[:-1].reshape(3, -1), casting="same_kind")
    assert (values.get(rows).reshape(-1) == np.arange(count - 1, dtype="f4")).all()


@pytest.mark.parametrize("first", ["source", "target"])
def test_device_to_device_reads_a_source_that_overlaps_whole(runtime, first) -> None:
    memory = cumem.empty(9_000_000, "f4")
    cumem.copy(memory, np.arange(9_000_000, dtype="f4"))
    short, long = memory.view("f2"), memory
    was = np.resize(np.arange(1000), 9_000_000).astype("f4")
    cumem.copy(memory, was)
    if first == "source":
        cumem.copy(short[: long.size], long, casting="same_kind")
        assert (values.get(short[: long.size]) == was).all()
    else:
        half = long.size // 2
        cumem.copy(short[-half:], was[:half].astype("f2"))
        cumem.copy(long[-half:], short[-half:], casting="safe")
        assert (values.get(long[-half:]) == was[:half]).all()


def test_device_to_device_is_in_the_order_of_the_stream(emulated) -> None:
    stream = cumem.Stream()
    source = cumem.zeros(COUNT, "f8", stream=stream)
    new = cumem.full(COUNT, 3.0, "f8")
    target = cumem.zeros(COUNT, "f4", stream=stream)
    after = cumem.zeros(COUNT, "f4", stream=stream)
    cumem.Device(0).synchronize()
    with session.when_waiting(lambda: testing.gate_open(stream)):
        session.shut(stream)
        cumem.copy_async(source, new, stream=stream)
        cumem.copy_async(target, source, stream=stream, casting="same_kind")
    cumem.copy_async(after, target, stream=stream)
    cumem.copy_async(source, cumem.zeros(COUNT, "f8"), stream=stream)
    stream.synchronize()
    assert (values.get(target) == 3).all()
    assert (values.get(after) == 3).all()


def test_device_to_device_in_the_background_does_not_wait(emulated) -> None:
    stream = cumem.Stream()
    source, new = cumem.zeros(COUNT, "f8"), cumem.full(COUNT, 3.0, "f8")
    target = cumem.zeros(COUNT, ">i4")
    cumem.Device(0).synchronize()
    with session.gate(stream):
        cumem.copy_async(source, new, stream=stream)
        transfer = cumem.copy_async(target, source, casting="unsafe")
        given = cumem.copy_async(
            cumem.zeros(COUNT, "f4"), new, after=stream, casting="same_kind"
        )
        assert not transfer.done
        assert not given.done
    transfer.wait()
    given.wait()
    assert (values.get(target) == 3).all()


def test_device_to_device_cannot_be_in_a_graph(emulated) -> None:
    stream = cumem.Stream()
    source, target = cumem.zeros(COUNT, "f8"), cumem.zeros(COUNT, "f4")
    cumem.Device(0).synchronize()
    testing.set_capturing(stream, True)
    try:
        with pytest.raises(cumem.CudaError, match="captur"):
            cumem.copy_async(target, source, stream=stream, casting="same_kind")
    finally:
        testing.set_capturing(stream, False)
    assert not values.get(target).any()


def test_numbers_grow_within_a_device_without_the_host(emulated) -> None:
    for source, place in itertools.product(("u1", "i2", "f2", "?"), (0, 1)):
        was = np.arange(60_000).astype(source).reshape(200, 300)
        far = cumem.array(was)
        target = cumem.zeros((200, 301), "f4", device=place)[:, :300]
        before = testing.fault_count("kernel_launch")
        found = cumem.explain(target, far, casting="safe", scale=0.5, offset=3)
        cumem.copy(target, far, casting="safe", scale=0.5, offset=3)
        grows = place == 0 and source != "f2"
        assert found.route == ("kernel" if grows else "several")
        if grows:
            assert testing.fault_count("kernel_launch") == before + 1
        expected = was.astype("f4") * np.float32(0.5) + np.float32(3)
        assert (values.get(target) == expected).all()


def test_numbers_that_lie_askew_grow_by_way_of_the_host(emulated) -> None:
    room = cumem.zeros(4 * COUNT + 1, "u1")
    target = room[1:].view("f4")
    cumem.copy(target, cumem.full(COUNT, 5, "u1"), casting="safe")
    assert (values.get(target) == 5).all()
    odd = room[1 : 2 * COUNT + 1].view("i2")
    cumem.copy(odd, np.arange(COUNT, dtype="i2"))
    even = cumem.zeros(COUNT, "f4")
    cumem.copy(even, odd, casting="safe")
    assert (values.get(even) == np.arange(COUNT)).all()


def test_pairs_between_devices_go_beside_others_in_one_call(runtime) -> None:
    sources = [
        cumem.array(np.arange(100.0)),
        np.arange(100.0),
        cumem.array(np.arange(100.0, dtype="f4")),
        cumem.array(np.arange(100, dtype="u1")),
    ]
    targets = [cumem.zeros(100, "f4") for _ in sources]
    cumem.copy_many(zip(targets, sources, strict=True), casting="same_kind")
    for target in targets:
        assert (values.get(target) == np.arange(100)).all()


def test_every_runtime_call_of_a_cast_between_devices_may_fail(emulated) -> None:
    was = np.arange(60_000.0).reshape(200, 300)

    def scenario() -> None:
        source = cumem.array(was)
        target = cumem.zeros(was.shape, "f4")
        cumem.copy(target, source, casting="same_kind")
        assert (values.get(target) == was).all()
        other = cumem.zeros(was.shape, ">f8", device=1)
        cumem.copy_async(other, source, casting="equiv").wait()
        assert (values.get(other) == was).all()

    swept = sweep(scenario)
    assert "copy_async" in swept.raised


def test_failure_that_was_reported_is_no_concern_of_what_is_written_later(
    emulated,
) -> None:
    """A short copy has often failed before the buffer takes note of the copy.

    An error that was already raised must not come up again in later calls.
    """
    target = cumem.zeros(8, "f8", "pinned")
    for _ in range(300):
        with pytest.raises(ValueError, match="cannot be converted"):
            cumem.copy_async(target, texts(8, 0), casting="unsafe").wait()
        cumem.copy_async(target, texts(8), casting="unsafe").wait()
        assert target.numpy().tolist() == list(range(8))
