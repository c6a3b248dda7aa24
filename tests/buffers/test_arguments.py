# SPDX-License-Identifier: Apache-2.0
"""Every refusal of an argument names the argument and what was expected.

The tests pass shapes, flags, dtypes, kinds, devices and keywords in many forms, and compare
what is accepted with what NumPy makes of it. If an argument is refused, they compare the
message.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import programs, rules

import cumem


class Index:
    """An object that is a number by `__index__()`, as the integers of libraries are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Unkind:
    """An object whose own errors must come out of cumem as they are."""

    def __index__(self) -> int:
        raise ZeroDivisionError

    def __bool__(self) -> bool:
        raise ZeroDivisionError


class Pair:
    """A sequence that is not a tuple, a list or an array."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> object:
        return [np.int32(2), Index(3)][place]


class Shrinking:
    """An integer that empties its own list when its value is read."""

    def __init__(self) -> None:
        self.items: list[object] = [self, 3]

    def __index__(self) -> int:
        self.items.clear()
        return 2


class Undecided:
    def __bool__(self) -> bool:
        raise TypeError


class TorchDevice:
    """An object with the text and the two properties of a torch.device."""

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def type(self) -> str:
        return self.text.partition(":")[0]

    @property
    def index(self) -> int | None:
        number = self.text.partition(":")[2]
        return int(number) if number else None

    def __str__(self) -> str:
        return self.text


class Exported:
    """An exporter that asks its buffer for a DLPack export with its own value of `copy`."""

    def __init__(self, buffer: cumem.Buffer, copy: object) -> None:
        self.buffer = buffer
        self.copy = copy

    def __dlpack__(self, **keywords: object) -> object:
        keywords |= {"copy": self.copy, "dl_device": (1, 0)}
        return self.buffer.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (3, (3,)),
        ((), ()),
        ([], ()),
        ((2, 3), (2, 3)),
        ([2, 3], (2, 3)),
        (range(3), (0, 1, 2)),
        (np.int16(4), (4,)),
        (np.array([2, 3]), (2, 3)),
        (np.array(5), (5,)),
        (Index(3), (3,)),
        ((Index(2), np.uint8(3)), (2, 3)),
        (0, (0,)),
        (np.int64(64), (64,)),
        (np.uint8(7), (7,)),
        ((np.int64(2), np.int64(3)), (2, 3)),
        ([np.array(2), 3], (2, 3)),
        (Pair(), (2, 3)),
        (memoryview(b"\x02\x03"), (2, 3)),
        (array.array("i", [4, 5]), (4, 5)),
        (np.empty((3, 0, 2)).shape, (3, 0, 2)),
        ((np.int8(1),) * 6, (1,) * 6),
    ],
)
def test_shape_is_read_as_numpy_reads_it(runtime, shape, expected) -> None:
    assert np.empty(shape).shape == expected
    assert cumem.empty_pinned(shape).shape == expected


@pytest.mark.parametrize(
    ("shape", "error", "match"),
    [
        (-1, ValueError, "shape must not hold negative lengths, got -1"),
        ((2, -3), ValueError, "shape must not hold negative lengths, got -3"),
        (1.0, TypeError, "shape must be an int or a sequence of ints, not float"),
        ((2, 1.0), TypeError, "shape must be an int or a sequence of ints, not float"),
        ("3", TypeError, "shape must be .* not str"),
        (b"3", TypeError, "shape must be .* not bytes"),
        (bytearray(b"3"), TypeError, "shape must be .* not bytearray"),
        (None, TypeError, "shape must be .* not NoneType"),
        ({2, 3}, TypeError, "shape must be .* not set"),
        ((2, (3,)), TypeError, "shape must be .* not tuple"),
        (2**63, ValueError, "shape: 9223372036854775808 does not fit"),
        ((2**62, 2), ValueError, "shape is too large"),
        ((0, 2**62, 2**62), ValueError, "shape is too large"),
        ((1,) * 65, ValueError, "shape has 65 dimensions: at most 64"),
        (True, TypeError, "shape must be .* not bool"),
        (np.True_, TypeError, "shape must be .* not bool"),
        ((True, 2), TypeError, "shape must be .* not bool"),
        ([3, np.False_], TypeError, "shape must be .* not bool"),
        (np.array([[2]]), TypeError, "shape must be .* not ndarray"),
        ((np.array([2]),), TypeError, "shape must be .* not ndarray"),
        ({2: 1}, TypeError, "shape must be .* not dict"),
        ((i for i in (1, 2)), TypeError, "shape must be .* not generator"),
        (range(65), ValueError, "shape has 65 dimensions: at most 64"),
        (np.int64(-1), ValueError, "shape must not hold negative lengths, got -1"),
        ((np.uint64(2**63),), ValueError, "shape: .*9223372036854775808.* does not"),
        ((2, Unkind()), ZeroDivisionError, None),
        (Shrinking().items, IndexError, None),
        (Unkind(), ZeroDivisionError, None),
    ],
)
def test_wrong_shape_is_refused(runtime, shape, error, match) -> None:
    with pytest.raises(error, match=match):
        cumem.empty_pinned(shape)


@pytest.mark.parametrize(
    ("make", "keywords", "flags"),
    [
        (cumem.empty_pinned, {"portable": False}, ()),
        (cumem.empty_pinned, {"portable": np.True_}, ("portable",)),
        (cumem.empty_pinned, {"write_combined": 1}, ("portable", "write_combined")),
        (cumem.empty_mapped, {"portable": None}, ("mapped",)),
        (cumem.empty_managed, {"attach": "host"}, ("host",)),
        (cumem.empty_managed, {"attach": "global"}, ("global",)),
    ],
)
def test_flags_of_constructors_are_read_by_their_truth(
    runtime, make, keywords, flags
) -> None:
    buffer = make((np.int64(2), 3), "i2", **keywords, order="F", device=0)
    assert tuple(buffer.flags) == flags
    assert (buffer.shape, buffer.strides) == ((2, 3), (2, 4))
    with cumem.Pool(buffer.kind) as pool:
        assert make(np.uint8(3), order="C", pool=pool).shape == (3,)


@pytest.mark.parametrize(
    ("make", "keywords", "error", "match"),
    [
        (cumem.empty_pinned, {"portable": "no"}, TypeError, "portable must be true or"),
        (cumem.empty_mapped, {"write_combined": b""}, TypeError, "write_combined must"),
        (cumem.empty_pinned, {"portable": np.ones(2)}, TypeError, "portable must be"),
        (cumem.empty_pinned, {"portable": Unkind()}, ZeroDivisionError, None),
        (cumem.empty_pinned, {"attach": "host"}, TypeError, r"empty_managed\(\) takes"),
        (cumem.empty_pinned, {"stream": None}, TypeError, "unexpected keyword.*stream"),
        (
            cumem.empty_managed,
            {"attach": "hosts"},
            ValueError,
            'attach must be "global"',
        ),
        (cumem.empty_managed, {"attach": 1}, TypeError, 'attach must be "global"'),
        (cumem.empty_managed, {"portable": True}, TypeError, r"empty_pinned\(\) and"),
        (cumem.empty_device, {"pool": 3}, TypeError, "pool must be a Pool or None"),
        (cumem.empty, {"kind": None}, TypeError, "kind must be"),
    ],
)
def test_wrong_flag_of_a_constructor_is_refused(
    runtime, make, keywords, error, match
) -> None:
    with pytest.raises(error, match=match):
        make(3, **keywords)


@pytest.mark.parametrize("make", [cumem.empty, cumem.empty_pinned, cumem.zeros])
def test_shape_whose_integer_shuts_cumem_down_is_that_of_a_new_buffer(
    emulated, make
) -> None:
    """cumem must choose the pool only after __index__() has run, since __index__() may shut
    cumem down.
    """

    class Shutting:
        def __index__(self) -> int:
            cumem.shutdown()
            return 64

    make(64)  # This warms the pool.
    assert make(Shutting()).shape == (64,)
    assert make((2, Shutting())).shape == (2, 64)


@pytest.mark.parametrize(
    ("arguments", "keywords", "match"),
    [
        ((), {}, r"empty\(\) missing required argument 'shape' \(position 1\)"),
        ((1, "f4", "pinned", 4), {}, r"empty\(\) takes at most 3 positional arguments"),
        ((1,), {"shape": 1}, r"empty\(\) got multiple values for argument 'shape'"),
        ((1,), {"shap": 1}, r"empty\(\) got an unexpected keyword argument 'shap'"),
        ((1,), {"é": 1}, r"empty\(\) got an unexpected keyword argument 'é'"),
    ],
)
def test_wrong_calls_are_refused_as_python_does(
    runtime, arguments, keywords, match
) -> None:
    with pytest.raises(TypeError, match=match):
        cumem.empty(*arguments, **keywords)


def test_keywords_may_come_in_any_order(runtime) -> None:
    buffer = cumem.empty(order="F", dtype="i2", shape=(2, 3), kind="pinned")
    assert buffer.shape == (2, 3)
    assert buffer.strides == (2, 4)


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"kind": "pined"}, ValueError, "kind must be \"pinned\", .* not 'pined'"),
        ({"kind": "pageable"}, ValueError, "kind must be"),
        ({"kind": 1}, TypeError, "kind must be .* not int"),
        ({"order": "A"}, ValueError, 'order must be "C" or "F", not \'A\''),
        ({"order": "c"}, ValueError, "order"),
        ({"order": 1}, TypeError, "order must be .* not int"),
        ({"device": 64}, ValueError, "device 64 does not exist: there"),
        ({"device": "gpu"}, ValueError, 'device must be "cuda" or "cuda:N", not'),
        ({"device": "cpu"}, ValueError, "not 'cpu'"),
        ({"device": "cuda:"}, ValueError, "not 'cuda:'"),
        ({"device": "cuda:-1"}, ValueError, "not 'cuda:-1'"),
        ({"device": "cuda:0x1"}, ValueError, "not 'cuda:0x1'"),
        ({"device": "cuda0"}, ValueError, "not 'cuda0'"),
        ({"device": "cuda:" + "1" * 30}, ValueError, 'must be "cuda" or "cuda:N"'),
        ({"device": "cuda:64"}, ValueError, "device 64 does not exist: there"),
        ({"device": TorchDevice("cpu")}, ValueError, "not 'cpu'"),
        ({"device": [0]}, TypeError, 'device must be an int, a Device, "cuda:N" or'),
        ({"device": True}, TypeError, "not bool"),
        ({"device": 0.5}, TypeError, "not float"),
    ],
)
def test_wrong_options_name_what_was_expected(runtime, keywords, error, match) -> None:
    with pytest.raises(error, match=match):
        cumem.empty(3, **keywords)


def test_order_none_is_c(runtime) -> None:
    assert cumem.empty((2, 3), "i2", "pinned", order=None).strides == (6, 2)


@pytest.mark.parametrize(
    "value", [True, False, np.True_, np.False_, 1, 0, None, [], np.ones(1)]
)
def test_flags_are_read_by_their_truth_as_python_does(runtime, value) -> None:
    buffer = cumem.empty_pinned(3, portable=value)
    assert ("portable" in buffer.flags) == bool(value)


@pytest.mark.parametrize("truth", [True, False])
@pytest.mark.parametrize("kind", [int, np.bool_])
def test_every_flag_takes_numpys_bools_and_ints(runtime, truth, kind) -> None:
    value = kind(truth)
    flags = cumem.empty_mapped(3, write_combined=value).flags
    assert ("write_combined" in flags) == truth
    with cumem.register(bytearray(4096), mapped=value, read_only=False) as buffer:
        assert (buffer.kind == "mapped") == truth
    start = cumem.Event(timing=value, blocking=value).record()
    end = cumem.Event().record()
    end.synchronize()
    if truth:
        assert end.seconds_since(start) >= 0
    else:
        with pytest.raises(ValueError, match="timing=False"):
            end.seconds_since(start)
    cumem.Stream(non_blocking=value).close()
    buffer = cumem.full(3, 1, "u1", "pinned")
    array = buffer.__array__(copy=value)
    assert (array.ctypes.data != buffer.ptr) == truth
    capsule = np.from_dlpack(Exported(buffer, copy=value))
    assert (capsule.ctypes.data != buffer.ptr) == truth


def test_array_that_must_not_be_copied_says_so_also_to_numpys_false(runtime) -> None:
    buffer = cumem.full(3, 1, "u1", "pinned")
    with pytest.raises(ValueError, match="another dtype needs a copy"):
        buffer.__array__("f4", copy=np.False_)


@pytest.mark.parametrize("value", [np.ones(2), Undecided()])
def test_flag_without_a_truth_is_refused_by_name(runtime, value) -> None:
    with pytest.raises(TypeError, match="portable must be true or false, not"):
        cumem.empty_pinned(3, portable=value)


NO: Any = "no"
#: Each entry passes the text NO for a keyword that is true or false. The keyword is the
#: first word of the entry's name.
FLAGS: dict[str, Callable[[Path], object]] = {
    "portable": lambda _: cumem.empty_pinned(3, portable=NO),
    "write_combined": lambda _: cumem.empty_pinned(3, write_combined=NO),
    "non_blocking": lambda _: cumem.Stream(non_blocking=NO),
    "timing": lambda _: cumem.Event(timing=NO),
    "blocking": lambda _: cumem.Event(blocking=NO),
    "wait": lambda _: cumem.trim(wait=NO),
    "mapped": lambda _: cumem.register(np.ones(3), mapped=NO),
    "read_only": lambda _: cumem.register(np.ones(3), read_only=NO),
    "reset_devices": lambda _: cumem.shutdown(reset_devices=NO),
    "copy": lambda _: cumem.asarray(np.ones(3), copy=NO),
    "copy of dlpack": lambda _: cumem.zeros(3).__dlpack__(copy=NO),
    "fresh": lambda _: list(cumem.chunks(np.ones(3), fresh=NO)),
    "fresh batches": lambda _: cumem.prefetch([], fresh=NO),
    "evict": lambda _: cumem.tiles(cumem.empty_managed(9), 8, evict=NO),
    "fsync": lambda path: cumem.tofile(path, np.ones(3), fsync=NO),
    "fsync of save": lambda path: cumem.save(path, np.ones(3), fsync=NO),
    "fsync of ranges": lambda path: cumem.write_ranges(path, [], fsync=NO),
    "fsync of tensors": lambda path: cumem.save_safetensors(path, {}, fsync=NO),
}


@pytest.mark.parametrize("what", FLAGS)
def test_flag_that_is_a_text_is_refused(emulated, tmp_path, what) -> None:
    """Each of these texts is true, although it says no."""
    name = what.split()[0]
    with pytest.raises(TypeError, match=f"{name} must be true or false, not str"):
        FLAGS[what](tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_flag_whose_truth_fails_fails_as_it_does(runtime) -> None:
    with pytest.raises(ZeroDivisionError):
        cumem.empty_pinned(3, portable=Unkind())


def test_device_is_an_index_or_a_device(runtime) -> None:
    for device in (None, 0, np.int8(0), cumem.Device(0), Index(0), "cuda:0", "cuda"):
        assert cumem.empty_device(3, device=device).device == cumem.Device(0)


@pytest.mark.parametrize(
    "device",
    [1, np.uint64(1), "cuda:1", lambda: cumem.Device(1), lambda: TorchDevice("cuda:1")],
)
def test_every_function_with_a_device_reads_it_alike(emulated, device) -> None:
    device = device() if callable(device) else device
    home = cumem.Device(1)
    made = [
        cumem.empty(3, device=device),
        cumem.zeros(3, device=device),
        cumem.full(3, 1, device=device),
        cumem.array([1], device=device),
        cumem.empty_like([1], device=device),
        cumem.empty_pinned(3, device=device),
        cumem.empty_mapped(3, device=device),
        cumem.empty_managed(3, device=device),
        cumem.empty_device(3, device=device),
        cumem.Stream(device=device),
        cumem.Event(device=device),
        cumem.current_stream(device),
    ]
    assert [thing.device for thing in made] == [home] * len(made)
    assert cumem.Device(device) == home
    assert cumem.memory_info(device)[1] == home.total_nbytes
    assert isinstance(cumem.Device(0).can_access_peer(device), bool)
    managed = made[7]
    managed.prefetch_pages(device)
    assert managed.prefetch_location == home
    with cumem.register(bytearray(4096), device=device) as buffer:
        assert buffer.device == home
    cumem.set_current_device(device)
    try:
        assert cumem.current_device() == home
        # As in PyTorch, this means the current device.
        assert cumem.Device("cuda") == home
        assert cumem.Device(TorchDevice("cuda")) == home
    finally:
        cumem.set_current_device(0)


class Acting:
    """A dtype that does something when it is read."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    @property
    def dtype(self) -> np.dtype:
        self.act()
        return np.dtype("i2")


def test_dtype_that_closes_the_pool_leaves_a_buffer_of_it(runtime) -> None:
    pool = cumem.Pool("pinned")
    pool.allocate(8).free()
    buffer = cumem.empty_pinned(3, Acting(pool.close), pool=pool)
    assert pool.closed
    buffer.numpy()[:] = 7
    assert buffer.numpy().tolist() == [7, 7, 7]


def test_dtype_that_shuts_down_gets_the_error_of_a_call_under_way(runtime) -> None:
    cumem.empty_pinned(3).free()
    # NumPy before 2.3 raises its own error in place of the attribute's.
    said = "a call of cumem is under way|Cannot interpret"
    with pytest.raises((RuntimeError, TypeError), match=said):
        cumem.empty_pinned(3, Acting(cumem.shutdown))
    assert cumem.empty_pinned(3).shape == (3,)


@pytest.mark.parametrize("device", [0, "cuda:0"])
def test_device_may_be_given_in_any_way(runtime, device) -> None:
    for each in (device, cumem.Device(0)):
        with cumem.Pool("pinned") as pool:
            buffers = [cumem.empty_pinned(3, device=each) for _ in range(100)]
            assert pool.stats().live_count == 100
        assert {buffer.device.index for buffer in buffers} == {0}


# -- what was meant ----------------------------------------------------------------------

#: Users write these values as a dtype, and the error must say what they mean.
PLACES: dict[str, str] = {
    "pinned": 'a kind of memory, not a dtype: write kind="pinned"',
    "managed": 'a kind of memory, not a dtype: write kind="managed"',
    "cuda": 'a place, not a dtype: write kind="device"',
    "cuda:1": 'write kind="device" and device="cuda:1"',
    "cpu": 'a place, not a dtype: write kind="pinned"',
    "host": 'a place, not a dtype: write kind="pinned"',
}
TAKES_DTYPE: dict[str, Callable[[Any], object]] = {
    "empty": lambda dtype: cumem.empty(4, dtype),
    "zeros": lambda dtype: cumem.zeros(4, dtype),
    "full": lambda dtype: cumem.full(4, 0, dtype),
    "array": lambda dtype: cumem.array([1], dtype),
    "asarray": lambda dtype: cumem.asarray([1], dtype),
    "empty_like": lambda dtype: cumem.empty_like(np.zeros(3), dtype),
    "zeros_like": lambda dtype: cumem.zeros_like(np.zeros(3), dtype),
    "full_like": lambda dtype: cumem.full_like(np.zeros(3), 1, dtype),
    "empty_pinned": lambda dtype: cumem.empty_pinned(4, dtype),
    "empty_mapped": lambda dtype: cumem.empty_mapped(4, dtype),
    "empty_managed": lambda dtype: cumem.empty_managed(4, dtype),
    "empty_device": lambda dtype: cumem.empty_device(4, dtype),
    "astype": lambda dtype: cumem.zeros(3).astype(dtype),
    "view": lambda dtype: cumem.zeros(3).view(dtype),
    "fromfile": lambda dtype: cumem.fromfile("/dev/null", dtype),
    "chunks": lambda dtype: next(cumem.chunks(np.zeros(3), dtype=dtype)),
}


@pytest.mark.parametrize("name", TAKES_DTYPE)
def test_kind_given_as_a_dtype_says_what_to_type(emulated, name: str) -> None:
    for place, text in PLACES.items():
        with pytest.raises(TypeError, match=re.escape(text)):
            TAKES_DTYPE[name](place)


def test_devices_and_pools_given_as_a_dtype_say_what_to_type(emulated) -> None:
    for given, text in (
        (cumem.Device(0), "write device="),
        (cumem.Stream(), "write stream="),
        (cumem.default_pool("pinned"), "write pool="),
    ):
        with pytest.raises(TypeError, match=text):
            cumem.empty(4, given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("cuda", ValueError, 'write kind="device"'),
        ("cuda:1", ValueError, 'write kind="device", and device="cuda:1"'),
        ("GPU", ValueError, 'write kind="device"'),
        ("cpu", ValueError, 'write kind="pinned"'),
        ("Pinned", ValueError, 'write kind="pinned"'),
        ("page_locked", ValueError, 'write kind="pinned"'),
        ("unified", ValueError, 'write kind="managed"'),
        ("f8", ValueError, "a dtype is given by dtype="),
        (np.float32, TypeError, "a dtype is given by dtype="),
        (0, TypeError, "a device is given by device="),
        ("nowhere", ValueError, "or \"device\", not 'nowhere'"),
        (None, TypeError, "not NoneType"),
    ],
)
def test_kind_of_another_name_says_what_to_type(
    emulated, kind: Any, error: type[Exception], text: str
) -> None:
    for call in (
        lambda: cumem.empty(4, "f4", kind),
        lambda: cumem.zeros(4, "f4", kind=kind),
        lambda: cumem.full(4, 0, kind=kind),
        lambda: cumem.Pool(kind),
        lambda: cumem.set_limit(kind, None),
    ):
        with pytest.raises(error, match=re.escape(text) + "$"):
            call()


def test_kind_whose_name_was_made_at_run_time_is_found_without_python(emulated) -> None:
    """A name from a file is a new object, so cumem has to compare the text of the name."""
    name = "".join(("man", "aged"))
    cumem.empty(256, "u1", name).free()
    called: list[str] = []
    sys.setprofile(
        lambda frame, event, _: event == "call" and called.append(frame.f_code.co_name)
    )
    try:
        buffer = cumem.empty(256, "u1", name)
    finally:
        sys.setprofile(None)
    assert buffer.kind == "managed"
    assert called == []


@pytest.mark.parametrize("device", ["cpu", "host", "pinned", "managed"])
def test_device_that_is_a_kind_says_so(emulated, device: str) -> None:
    kind = device if device == "managed" else "pinned"
    for call in (cumem.empty, cumem.zeros, cumem.empty_device):
        with pytest.raises(ValueError, match=f'that is memory of kind="{kind}"'):
            call(4, "f4", device=device)


def test_torch_device_in_place_of_a_dtype_or_kind_says_what_to_type(emulated) -> None:
    torch = pytest.importorskip("torch")
    for place, kind in (("cpu", "pinned"), ("cuda:0", "device")):
        for call in (
            lambda device: cumem.empty(4, device),
            lambda device: cumem.empty(4, "f4", device),
        ):
            with pytest.raises(TypeError, match=f'write kind="{kind}"'):
                call(torch.device(place))
    with pytest.raises(ValueError, match='kind="pinned"'):
        cumem.empty(4, device=torch.device("cpu"))
    with pytest.raises(TypeError, match="a dtype is given by dtype="):
        cumem.empty(4, "f4", torch.float32)


def as_limit(size: Any) -> object:
    return cumem.set_limit("device", size)


@pytest.mark.parametrize(
    "call",
    [
        cumem.recommend,
        cumem.Workspace,
        as_limit,
        lambda size: cumem.chunks(np.zeros(8), size),
    ],
)
@pytest.mark.parametrize("made", [np.zeros, cumem.zeros])
def test_array_in_place_of_a_size_says_what_to_pass(emulated, call, made) -> None:
    with pytest.raises(TypeError, match=r"must be a number of bytes, .*its \.nbytes"):
        call(made(3))


def test_function_without_positional_arguments_says_that_it_takes_none(
    emulated,
) -> None:
    buffer: Any = cumem.zeros(3)
    with pytest.raises(TypeError, match=r"takes no positional arguments \(1 given\)"):
        buffer.to_numpy(1)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_name_of_ml_dtypes_is_read_before_anybody_imports_it(name: str) -> None:
    pytest.importorskip("ml_dtypes")
    done = programs.run(
        "-c",
        "import sys, cumem\n"
        "assert 'ml_dtypes' not in sys.modules\n"
        f"print(cumem.zeros(1, {name!r}).dtype, cumem.zeros(1).astype({name!r}).dtype)",
        CUMEM_BACKEND="emulated",
    )
    assert done.stdout == f"{name} {name}\n", done.stderr


def test_name_of_ml_dtypes_without_it_says_what_to_install(
    emulated, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    name = "float6_e9m9"  # No version of NumPy knows this name.
    with pytest.raises(TypeError, match="pip install -U ml_dtypes"):
        cumem.zeros(1, name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("fp32", "float32"),
        ("torch.float32", "float32"),
        ("torch.bfloat16", "bfloat16"),
    ],
)
def test_short_name_of_a_dtype_says_the_long_one(emulated, name, meant) -> None:
    with pytest.raises(TypeError, match=f'{name}.* use "{meant}"'):
        cumem.zeros(1, name)


@pytest.mark.parametrize("name", ["empty", "zeros", "empty_pinned"])
def test_lengths_one_by_one_are_asked_for_as_a_tuple(emulated, name: str) -> None:
    with pytest.raises(TypeError, match=r"dtype 3 is a number.*empty\(\(2, 3\)\)"):
        getattr(cumem, name)(2, 3)


#: Users never call these types, because cumem makes the objects. Results are
#: dataclasses and tuples, and need no entry here.
MADE = {"ActivationOffload", "DeviceMemory", "LimitBlock", "OutOfMemoryHook", "Record"}
#: The keywords of these functions are names of arrays.
NAMING = {"savez"}


def keywords_of(function: Any) -> list[str]:
    """Return the names of keywords that are long enough to be recognised if misspelt."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        each.name
        for each in parameters
        if each.kind in kinds and len(each.name) > 3 and each.name != "self"
    ]


def is_made_by_cumem(kind: type) -> bool:
    """Return whether users never call this type, so that its keywords need no test."""
    return (
        issubclass(kind, BaseException)
        or dataclasses.is_dataclass(kind)
        or hasattr(kind, "_fields")
        or kind.__name__ in MADE
        or inspect.isabstract(kind)
    )


@functools.cache
def public_callables() -> dict[str, Any]:
    """Return public functions, classes that users call, and methods of their objects."""
    found: dict[str, Any] = {}
    for name in sorted(cumem.__all__):
        each = getattr(cumem, name)
        if inspect.ismodule(each) or not callable(each) or name in NAMING:
            continue
        if not isinstance(each, type) or not is_made_by_cumem(each):
            found[name] = each
    found["numpy_pinned.enable"] = cumem.numpy_pinned.enable
    return found


@pytest.mark.parametrize("name", public_callables())
def test_misspelt_keyword_of_a_public_name_is_refused_with_the_one_meant(
    emulated, name: str
) -> None:
    function = public_callables()[name]
    names = keywords_of(function)
    if not names or isinstance(function, cumem.PinnedCollate):
        pytest.skip("this function has no keywords")
    for each in names:
        with pytest.raises(TypeError, match="unexpected keyword") as caught:
            function(**{each + "x": 1})
        assert f"did you mean '{each}'?" in str(caught.value)
        called = name.rpartition(".")[2]
        assert str(caught.value).startswith(f"{called}()"), caught.value


def test_misspelt_keyword_of_a_method_is_refused_with_the_one_meant(emulated) -> None:
    lacking: list[str] = []
    buffer = cumem.empty_managed(8)
    with cumem.Workspace("1MiB") as workspace, cumem.Pool("pinned") as pool:
        for each in (buffer, workspace, pool, cumem.Stream(), cumem.Event()):
            for name in dir(each):
                method = getattr(type(each), name, None)
                if name.startswith("_") or name == "view" or not callable(method):
                    continue  # The only argument of view() is the first one.
                for keyword in keywords_of(method):
                    with pytest.raises(TypeError, match="unexpected keyword") as caught:
                        getattr(each, name)(**{keyword + "x": 1})
                    if f"did you mean '{keyword}'?" not in str(caught.value):
                        lacking.append(f"{type(each).__name__}.{name}: {caught.value}")
    rules.check_none(lacking)


def test_names_of_other_libraries_come_before_the_nearest_one(emulated) -> None:
    with pytest.raises(TypeError, match="take write_combined=True"):
        cumem.empty_pinned(3, wc=True)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'quux'$"):
        cumem.empty_pinned(3, quux=True)
