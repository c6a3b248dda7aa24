# SPDX-License-Identifier: Apache-2.0
"""Tests of which dtypes each call may convert to which others, compared with NumPy.

Two ends with dtypes must agree unless `casting=` allows more. A call that names the
dtype converts by "same_kind" unless `casting=` says otherwise, and astype() by
"unsafe". Each call of `CALLS` is made for pairs of dtypes and rules, and
`np.can_cast()` says which must be allowed.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
from support import values
from support.calls import functions_of_the_package
from support.tuning import tuned

import cumem
from cumem.buffers.casting import STANDS_FOR, Casting

# A table in C has the rules of casting, so no version of Python changes them.
pytestmark = pytest.mark.any_python

RULES = get_args(Casting)
BF16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
#: Each rule allows some of these pairs. The copy threads convert some of them, NumPy
#: others.
PAIRS = [
    (np.dtype(source), np.dtype(target))
    for source, target in [
        ("f4", "f4"),
        ("f4", ">f4"),
        ("f4", "f8"),
        ("f8", "f4"),
        ("f8", "i4"),
        ("i4", "f8"),
        ("i8", "i2"),
        ("i4", "u4"),
        ("?", "u1"),
        ("u1", "?"),
        ("f4", BF16),
        (BF16, "f2"),
        ("f4", F8),
        (F8, "f4"),
        ("f4", "c8"),
        ("c8", "f4"),
        ("M8[ms]", "M8[s]"),
        ("S4", "S2"),
        ("g", "f8"),
        ([("a", "f8"), ("b", "i4")], [("a", "f4"), ("b", "i2")]),
    ]
]
IDS = [f"{source}-{target}" for source, target in PAIRS]


def numbers(dtype: np.dtype) -> np.ndarray:
    """Return elements that each numeric dtype of these tests can hold."""
    if dtype.kind == "S":
        return np.array([b"a", b"bc", b"defg"], dtype)
    if dtype.names is not None:
        return np.array([(1, 2), (3, 4), (5, 6)], dtype)
    wide = np.array([0, 1, 3, 5, 100], "i8")
    return wide.astype(dtype)


def make(target: np.dtype, count: int) -> cumem.Buffer:
    return cumem.empty(count, target, "pinned")


def count(a: Any) -> int:
    return int(np.prod(a.shape))


# Each of these functions brings the values of `a` into new memory of the dtype `to`, by
# a different call of cumem, and returns that memory. CALLS lists them.


def copied(a: Any, to: np.dtype, **how: Any) -> cumem.Buffer:
    buffer = make(to, count(a))
    cumem.copy(buffer, a, **how)
    return buffer


def filled(a: Any, to: np.dtype, **how: Any) -> cumem.Buffer:
    buffer = make(to, count(a))
    buffer.fill(a, **how)
    return buffer


def assigned(a: Any, to: np.dtype) -> cumem.Buffer:
    buffer = make(to, count(a))
    buffer[...] = a
    return buffer


def copied_late(a: Any, to: np.dtype, **how: Any) -> cumem.Buffer:
    buffer = make(to, count(a))
    cumem.copy_async(buffer, a, **how).wait()
    return buffer


def copied_on_a_stream(a: Any, to: np.dtype, **how: Any) -> cumem.Buffer:
    stream = cumem.Stream()
    buffer = cumem.zeros(count(a), to, stream=stream)
    cumem.copy_async(buffer, a, stream=stream, **how)
    stream.synchronize()
    return buffer


def copied_between(a: Any, to: np.dtype, **how: Any) -> cumem.Buffer:
    buffer = cumem.zeros(count(a), to)
    cumem.copy(buffer, cumem.array(a), **how)
    return buffer


def explained(a: Any, to: np.dtype, **how: Any) -> Any:
    cumem.explain(make(to, count(a)), a, **how)
    return a.astype(to)


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """Join the elements of all parts. NumPy's own function would change the byte order."""
    return np.frombuffer(b"".join(part.tobytes() for part in parts), parts[0].dtype)


def in_chunks(a: Any, to: np.dtype, **how: Any) -> np.ndarray:
    with cumem.chunks(a, dtype=to, rows=2, **how) as parts:
        return joined([values.get(part) for _, part in parts])


def saved(a: Any, to: np.dtype, **how: Any) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.bin")
        cumem.tofile(path, a, dtype=to, **how)
        return np.fromfile(path, to)


def read_into(a: Any, to: np.dtype, **how: Any) -> cumem.Buffer:
    buffer = make(to, count(a))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "x.bin")
        a.tofile(path)
        try:
            cumem.fromfile(path, a.dtype, out=buffer, **how)
        # fromfile() raises this for every argument that contradicts `out`.
        except ValueError as error:
            if how:
                raise
            raise TypeError(str(error)) from error
    return buffer


#: Each entry has a call, its rule without `casting=`, and whether it takes `casting=`.
CALLS: dict[str, tuple[Callable[..., Any], str, bool]] = {
    "array": (
        lambda a, to, **how: cumem.array(a, to, "pinned", **how),
        "same_kind",
        True,
    ),
    "array device": (lambda a, to, **how: cumem.array(a, to, **how), "same_kind", True),
    "array managed": (
        lambda a, to, **how: cumem.array(a, to, "managed", **how),
        "same_kind",
        True,
    ),
    "array of a buffer": (
        lambda a, to, **how: cumem.array(cumem.array(a), to, **how),
        "same_kind",
        True,
    ),
    "asarray": (lambda a, to, **how: cumem.asarray(a, to), "same_kind", False),
    "full": (lambda a, to, **how: cumem.full(a.shape, a, to, **how), "same_kind", True),
    "full_like": (
        lambda a, to, **how: cumem.full_like(a, a, to, **how),
        "same_kind",
        True,
    ),
    "astype": (
        lambda a, to, **how: cumem.array(a, kind="pinned").astype(to, **how),
        "unsafe",
        True,
    ),
    "astype device": (
        lambda a, to, **how: cumem.array(a).astype(to, **how),
        "unsafe",
        True,
    ),
    "fill": (filled, "equal", True),
    "assignment": (assigned, "equal", False),
    "copy": (copied, "equal", True),
    "copy between devices": (copied_between, "equal", True),
    "copy_async": (copied_late, "equal", True),
    "copy_async on a stream": (copied_on_a_stream, "equal", True),
    "explain": (explained, "equal", True),
    "chunks": (in_chunks, "same_kind", True),
    "tofile": (saved, "same_kind", True),
    "fromfile": (read_into, "equal", True),
}


def check(call: str, pair: tuple[np.dtype, np.dtype], rule: str | None) -> None:
    """Check that a call converts as NumPy does if the rule allows it, and else refuses.

    `pair` has the two dtypes. Without a rule, the call's own default holds.
    """
    function, default, has_casting = CALLS[call]
    source, target = pair
    array = numbers(source)
    how = {} if rule is None else {"casting": rule}
    if rule is not None and not has_casting:
        return
    allowed = default if rule is None else rule
    fits = (
        source == target
        if allowed == "equal"
        else bool(np.can_cast(source, target, allowed))
    )
    if not fits:
        with pytest.raises(TypeError, match="dtype"):
            function(array, target, **how)
        return
    found = values.get(function(array, target, **how))
    assert found.dtype == target
    with np.errstate(all="ignore"):
        assert found.tobytes() == array.astype(target).tobytes()


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("pair", PAIRS, ids=IDS)
def test_call_allows_what_numpy_can_cast(runtime, call, pair) -> None:
    for rule in (None, *RULES):
        check(call, pair, rule)


@pytest.mark.parametrize("call", [name for name in CALLS if CALLS[name][2]])
def test_rule_that_there_is_not_is_refused(runtime, call) -> None:
    function = CALLS[call][0]
    for dtype in ("f4", "f8"):
        with pytest.raises(ValueError, match="casting must be one of 'no', 'equiv'"):
            function(np.ones(3), np.dtype(dtype), casting="samekind")


#: Each entry has a number, a dtype that cannot hold it, and the error.
SCALARS = [
    (300, "u1", OverflowError),
    (-1, "u4", OverflowError),
    (2**40, "i4", OverflowError),
    (1.5, "i4", TypeError),
    (float("nan"), "i4", TypeError),
    (1e39, "f4", OverflowError),
    (1j, "f8", TypeError),
    (np.int64(300), "u1", OverflowError),
    (np.float64(1e39), "f4", OverflowError),
    (np.float32(1.5), "i8", TypeError),
]


@pytest.mark.parametrize(("value", "dtype", "error"), SCALARS, ids=repr)
def test_number_that_does_not_fit_raises_in_every_call(
    runtime, value, dtype, error
) -> None:
    buffer = cumem.zeros(3, dtype, "pinned")
    for call in (
        lambda: cumem.array(value, dtype),
        lambda: cumem.array([value, value], dtype),
        lambda: cumem.full(3, value, dtype),
        lambda: cumem.full_like(buffer, value),
        lambda: buffer.fill(value),
        lambda: buffer.__setitem__(..., value),
        lambda: cumem.copy(buffer, value),
    ):
        with pytest.raises(error):
            call()
    assert not buffer.numpy().any()


# -- tensors -------------------------------------------------------------------------------

#: PyTorch's name of each number that NumPy or ml_dtypes has too.
TENSORS = [
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "complex64"),
]


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_follow_the_same_rules(runtime, name) -> None:
    torch = pytest.importorskip("torch")
    own = np.dtype(getattr(ml_dtypes, name, name))
    array = np.arange(5).astype(own)
    tensor = torch.from_numpy(array.view("u1").copy()).view(getattr(torch, name))
    for to in map(np.dtype, ("?", "u1", "i4", "f2", BF16, "f4", "f8", F8, "c8", ">f4")):
        for rule in (None, *RULES):
            named = {} if rule is None else {"casting": rule}
            may = bool(np.can_cast(own, to, rule or "same_kind"))
            expected = array.astype(to) if may else None
            for call in (
                lambda to=to, how=named: cumem.array(tensor, to, "pinned", **how),
                lambda to=to, how=named: cumem.full(5, tensor, to, **how),
            ):
                if not may:
                    with pytest.raises(TypeError, match="does not allow dtype"):
                        call()
                else:
                    assert values.get(call()).tobytes() == expected.tobytes()
            may = own == to if rule is None else may
            for begin in (copied, copied_late, copied_on_a_stream, filled):
                if not may:
                    with pytest.raises(TypeError, match="dtype"):
                        begin(tensor, to, **named)
                else:
                    found = values.get(begin(tensor, to, **named))
                    assert found.tobytes() == expected.tobytes()


# -- what NumPy converts -------------------------------------------------------------------

#: The copy threads cannot convert these pairs, so NumPy converts them piece by piece.
OTHERS = [("f8", ">f4"), (">f8", "f4"), ("f4", F8), (F8, BF16), ("f4", "c8")]


@pytest.fixture
def in_pieces() -> Iterator[None]:
    """Make copies by four threads, in pieces of 64 KiB."""
    with tuned(chunk_nbytes="64 KiB", threads=4):
        yield


@pytest.mark.parametrize("kind", ["pinned", "managed", "device"])
@pytest.mark.parametrize(("source", "to"), OTHERS, ids=str)
def test_long_arrays_are_converted_in_pieces(
    runtime, in_pieces, kind, source, to
) -> None:
    rng = np.random.default_rng(3)
    array = rng.integers(-9, 9, (7, 5, 403)).astype(source)
    views = (array, array.T, array[::-1, :, ::2], array.transpose(1, 0, 2), array[:1])
    for view, order in itertools.product(views, "CFK"):
        expected = view.astype(to)
        made = cumem.array(view, to, kind, order=order)
        assert values.get(made).tobytes() == expected.tobytes()
        far = cumem.array(cumem.array(view), to, kind, order=order)
        assert values.get(far).tobytes() == expected.tobytes()


def test_conversion_by_numpy_keeps_no_second_array(runtime, monkeypatch) -> None:
    array = np.ones((1 << 18, 4), ">f8")
    made = cumem.array(array, ml_dtypes.float8_e4m3fn)
    assert values.get(made).astype("f8").sum() == array.size


def test_infinities_and_integers_out_of_range_are_numpys(runtime) -> None:
    floats = np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, 1e-300])
    integers = np.array([2**40 + 5, -1, 2**63 - 1, -(2**63)])
    with np.errstate(all="ignore"):
        for to in ("f4", "f2", BF16, F8):
            found = values.get(cumem.array(floats, to))
            assert found.tobytes() == floats.astype(to).tobytes()
        for to in ("i1", "i2", "i4"):
            found = values.get(cumem.array(integers, to))
            assert found.tolist() == integers.astype(to).tolist()


# -- several copies ------------------------------------------------------------------------


def several(
    name: str, a: Any, to: np.dtype, kind: str, far: bool, **how: Any
) -> np.ndarray:
    """Return the elements that the copy of this name leaves.

    With `far`, its source is on a device.
    """
    a = cumem.array(a) if far else a
    if name.startswith("broadcast"):
        targets: Any = [cumem.empty(a.shape, to, kind) for _ in range(2)]
        job = getattr(cumem, name)(targets, a, **how)
    elif name.startswith("scatter"):
        targets = [cumem.empty(n, to, kind) for n in (2, a.size - 2)]
        job = getattr(cumem, name)(targets, a, **how)
    elif name.startswith("gather"):
        targets = [cumem.empty(a.size, to, kind)]
        job = getattr(cumem, name)(targets[0], [a[:1], a[1:]], **how)
    else:
        targets = [cumem.empty(n, to, kind) for n in (2, a.size - 2)]
        pairs = [(targets[0], a[:2]), (targets[1], a[2:])]
        job = getattr(cumem, name)(pairs, **how)
    for each in job if isinstance(job, list) else [job]:
        if each is not None:
            each.wait()
    found = [values.get(target) for target in targets]
    return found[1] if name.startswith("broadcast") else joined(found)


SEVERAL = [
    f"{name}{suffix}"
    for name in ("copy_many", "broadcast", "scatter", "gather")
    for suffix in ("", "_async")
]


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("kind", ["pinned", "device"])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_copies_allow_what_numpy_can_cast(runtime, name, kind) -> None:
    for (source, to), far in itertools.product(PAIRS, (False, True)):
        array = numbers(source)
        for rule in (None, *RULES):
            how = {} if rule is None else {"casting": rule}
            fits = source == to if rule is None else np.can_cast(source, to, rule)
            if not fits:
                with pytest.raises(TypeError, match="dtype"):
                    several(name, array, to, kind, far, **how)
                continue
            found = several(name, array, to, kind, far, **how)
            assert found.tobytes() == array.astype(to).tobytes()


@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_pairs_that_convert_go_beside_those_that_do_not(runtime, kind) -> None:
    sources = [
        np.arange(9.0),
        np.arange(9, dtype="f4"),
        np.arange(12.0).reshape(3, 4).T,
    ]
    targets = [cumem.empty(source.shape, "f4", kind) for source in sources]
    cumem.copy_many(zip(targets, sources, strict=True), casting="same_kind")
    for target, source in zip(targets, sources, strict=True):
        assert np.array_equal(values.get(target), source.astype("f4"))


def test_broadcast_converts_for_targets_of_several_dtypes(runtime) -> None:
    targets = [cumem.empty(5, dtype) for dtype in ("f4", "f8", "f2", "f4")]
    cumem.broadcast(targets, np.arange(5.0), casting="same_kind")
    assert [values.get(target).tolist() for target in targets] == [
        [*map(float, range(5))]
    ] * 4


# -- files ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("kind", ["pinned", "device"])
@pytest.mark.parametrize("suffix", ["npy", "npz", "packed.npz"])
def test_load_converts_by_rule(runtime, tmp_path, monkeypatch, suffix, kind) -> None:
    monkeypatch.setattr("cumem.files.converting.STAGE_NBYTES", 1000)
    path = tmp_path / f"x.{suffix}"
    save = {"npy": np.save, "npz": np.savez}.get(suffix, np.savez_compressed)
    for source, to in PAIRS:
        if source.num >= 256 or source.kind == "S":
            continue
        for shape in ((), (0, 3), (5, 200), (200, 3)):
            array = np.resize(numbers(source), shape)
            array = array.copy(order="F") if shape == (200, 3) else array
            save(path, array)
            for rule in (None, *RULES):
                how: dict[str, Any] = {"dtype": to, "kind": kind}
                how |= {} if rule is None else {"casting": rule}
                if not np.can_cast(source, to, rule or "same_kind"):
                    with pytest.raises(TypeError, match="does not allow dtype"):
                        cumem.load(path, **how)
                    continue
                found = cumem.load(path, **how)
                found = values.get(found["arr_0"] if suffix != "npy" else found)
                assert found.dtype == to
                assert np.array_equal(found, array.astype(to))


def test_load_into_another_dtype_needs_casting(runtime, tmp_path) -> None:
    array = np.arange(12.0).reshape(3, 4)
    np.save(tmp_path / "x.npy", array)
    out = cumem.zeros((3, 4), "f4", "pinned")
    with pytest.raises(ValueError, match="dtype float32"):
        cumem.load(tmp_path / "x.npy", out=out)
    assert cumem.load(tmp_path / "x.npy", out=out, casting="same_kind") is out
    assert np.array_equal(out.numpy(), array)
    with pytest.raises(TypeError, match="'safe' does not allow"):
        cumem.load(tmp_path / "x.npy", out=out, casting="safe")
    with pytest.raises(ValueError, match="dtype int32 is given"):
        cumem.load(tmp_path / "x.npy", dtype="i4", out=out)


@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_plain_files_convert_by_rule(runtime, tmp_path, kind) -> None:
    path = tmp_path / "x.bin"
    array = np.arange(1000.0)
    source = cumem.array(array, kind=kind)
    cumem.tofile(path, source, dtype=">f4")
    assert np.array_equal(np.fromfile(path, ">f4"), array)
    with pytest.raises(TypeError, match="'same_kind' does not allow"):
        cumem.tofile(path, source, dtype="i4")
    assert np.array_equal(np.fromfile(path, ">f4"), array)
    cumem.tofile(path, source, dtype="i4", casting="unsafe")
    out = cumem.zeros(1000, "f8", kind)
    with pytest.raises(ValueError, match="pass casting="):
        cumem.fromfile(path, "i4", out=out)
    assert cumem.fromfile(path, "i4", out=out, casting="safe") is out
    assert np.array_equal(values.get(out), array)
    short = cumem.zeros(1000, "f4", kind)
    with pytest.raises(TypeError, match="'safe' does not allow"):
        cumem.fromfile(path, "i4", out=short, casting="safe")
    assert not values.get(short).any()


# -- who is asked ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "source", "how"),
    [
        ("f4", "f8", {"casting": "same_kind"}),
        ("f4", ">f8", {"casting": "same_kind"}),
        ("f4", "u1", {"casting": "safe", "scale": 0.5, "offset": -1}),
        (BF16, "f4", {"casting": "unsafe"}),
        # NumPy converts this pair.
        ("M8[s]", "M8[ms]", {"casting": "same_kind"}),
    ],
    ids=str,
)
def test_conversion_passes_no_python_of_the_package(
    runtime, target, source, how
) -> None:
    """cumem remembers the plan of each pair.

    It cannot do so for ">f8", whose dtype is a new object in each call. Its plan must be
    made without Python.
    """
    there = cumem.empty(3, target, "pinned")
    given = np.arange(3, dtype="u1").astype(source)
    assert functions_of_the_package(lambda: cumem.copy(there, given, **how)) == []
    wanted = given.astype(target)
    if "scale" in how:
        wanted = wanted * how["scale"] + how["offset"]
    assert np.array_equal(there.to_numpy(), wanted)
    buffer = cumem.array(given)
    rule = how["casting"]
    convert = lambda: buffer.astype(target, casting=rule)  # noqa: E731
    assert functions_of_the_package(convert) == []


@pytest.mark.parametrize("pair", PAIRS, ids=IDS)
def test_rule_that_is_refused_names_the_strictest_that_is_not(runtime, pair) -> None:
    source, target = pair
    allowed = [rule for rule in RULES if np.can_cast(source, target, rule)]
    for rule in RULES:
        if rule in allowed:
            cumem._core._check_casting("", source, target, rule)
            continue
        with pytest.raises(TypeError, match=f"; casting='{allowed[0]}' does$"):
            cumem._core._check_casting("", source, target, rule)


def allows(source: np.dtype, target: np.dtype, rule: str) -> bool:
    """Return whether the core lets a copy convert these dtypes by the rule."""
    try:
        cumem._core._check_casting("", source, target, rule)
    except TypeError:
        return False
    return True


def test_integers_that_stand_for_bfloat16_are_judged_as_it(runtime) -> None:
    """These rules allow the same as ml_dtypes allows for bfloat16."""
    stands = np.dtype("u2", metadata={STANDS_FOR: "bfloat16"})
    for other in map(np.dtype, ("?", "i1", "u2", "i8", "f2", "f4", "f8", "c8", "g")):
        for rule in ("safe", "unsafe"):
            assert allows(stands, other, rule) == np.can_cast(BF16, other, rule)
            assert allows(other, stands, rule) == np.can_cast(other, BF16, rule)


def test_plan_that_is_remembered_still_warns_of_imaginary_parts(runtime) -> None:
    for source, target in [("c8", "f4"), ("c8", "f2"), ("G", "f4")]:
        ends = np.zeros(2, target), np.ones(2, source)
        for _ in range(3):
            with pytest.warns(np.exceptions.ComplexWarning, match="imaginary"):
                cumem.copy(*ends, casting="unsafe")
            assert (ends[0] == 1).all()


@pytest.mark.parametrize("scale", ["3", b"3", 1j, [1.0], None.__class__])
def test_scale_that_is_no_real_number_is_a_type_error(runtime, scale) -> None:
    ends = np.zeros(2, "f4"), np.ones(2, "f4")
    name = type(scale).__name__
    with pytest.raises(TypeError, match=f"scale must be a real number, not {name}$"):
        cumem.copy(*ends, casting="unsafe", scale=scale)
    with pytest.raises(TypeError, match="need casting="):
        cumem.copy(*ends, scale=2)
