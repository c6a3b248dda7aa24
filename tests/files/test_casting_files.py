# SPDX-License-Identifier: Apache-2.0
"""Files whose elements have another dtype than the memory that is read or written.

The tests check the elements, piece by piece, and that cumem makes no second array of the
whole file.
"""

from __future__ import annotations

import itertools
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import values
from support.faults import sweep

import cumem
from cumem.files import converting
from cumem.files.safetensors import format as safetensors_format

# The C core and the file formats decide what a file holds, so these tests show the same
# under every version of Python.
pytestmark = pytest.mark.any_python

BF16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
KINDS = ["pinned", "managed", "device"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stages so short that everything is converted in pieces."""
    monkeypatch.setattr(converting, "STAGE_NBYTES", 1000)


# -- plain files ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", *KINDS])
@pytest.mark.parametrize(("source", "to"), [("f8", "f4"), ("u1", ">i8"), ("f4", F8)])
def test_files_are_written_and_read_in_pieces(
    runtime, tmp_path, small, kind, source, to
) -> None:
    path = tmp_path / "x.bin"
    array = np.resize(np.arange(100), (7, 30, 41)).astype(source)
    for view in (array, array.T, array[:, ::-2], array[3], array[:0], array[1, 2, 3:4]):
        memory = values.put(view, kind, "F" if view is array else "C")
        cumem.tofile(path, memory, dtype=to, casting="unsafe")
        assert path.read_bytes() == view.astype(to).tobytes()
        out = values.put(np.zeros(view.shape, source), kind)
        back = out.T if view.ndim > 1 else out
        turned = values.put(np.zeros(back.shape, source), kind)
        cumem.fromfile(path, to, out=out, casting="unsafe")
        assert values.get(out).tobytes() == view.astype(to).astype(source).tobytes()
        cumem.fromfile(path, to, out=turned.T, casting="unsafe")
        expected = view.astype(to).astype(source).reshape(turned.T.shape)
        assert (expected == values.get(turned).T).all()


def test_positions_of_open_files_move_by_what_is_in_the_file(
    runtime, tmp_path, small
) -> None:
    path = tmp_path / "x.bin"
    array = np.arange(900.0)
    with path.open("w+b") as file:
        file.write(b"head")
        cumem.tofile(file, array, dtype="i2", casting="unsafe")
        assert file.tell() == 4 + 1800
        cumem.tofile(file, array, dtype="f4")
        assert file.tell() == 4 + 1800 + 3600
        file.seek(4)
        out = np.zeros(900, "f4")
        cumem.fromfile(file, "i2", out=out, casting="safe")
        assert file.tell() == 4 + 1800
        assert (out == array).all()


def test_file_that_is_too_short_is_found_before_anything_is_written(
    runtime, tmp_path, small
) -> None:
    path = tmp_path / "x.bin"
    np.arange(900.0).tofile(path)
    out = np.zeros(901, "f4")
    with pytest.raises(EOFError, match="7200 of the 7208 bytes"):
        cumem.fromfile(path, "f8", out=out, casting="same_kind")
    assert not out.any()


def test_dtype_beside_out_converts_as_it_does_alone(runtime, tmp_path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(6, dtype="f8"))
    out = np.zeros(6, "f4")
    assert cumem.load(path, dtype="f4", out=out) is out
    assert out.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(TypeError, match="same_kind"):
        cumem.load(path, dtype="i4", out=np.zeros(6, "i4"))


def test_casting_without_a_dtype_says_what_is_missing(runtime, tmp_path) -> None:
    path = tmp_path / "x.bin"
    with pytest.raises(ValueError, match="pass dtype="):
        cumem.tofile(path, np.ones(3), casting="unsafe")
    assert not path.exists()
    with pytest.raises(TypeError, match="'same_kind' does not allow"):
        cumem.tofile(path, np.ones(3), dtype="i4")
    assert not path.exists()
    cumem.save_safetensors(tmp_path / "x.safetensors", {"a": np.ones(3)})
    with pytest.raises(ValueError, match="pass dtype="):
        cumem.load_safetensors(tmp_path / "x.safetensors", casting="unsafe")


@pytest.mark.parametrize("to", ["<f4", "<f8", "<u8", "<u2"])
def test_map_of_the_file_itself_is_converted_whole(
    runtime, tmp_path, small, to
) -> None:
    path = tmp_path / "x.bin"
    was = np.arange(100_000, dtype="<u4")
    was.tofile(path)
    mapped = np.memmap(path, "<u4", "r+")
    cumem.tofile(path, mapped, dtype=to, casting="unsafe")
    assert (np.fromfile(path, to) == was.astype(to)).all()
    # A new file has taken the place of the old one, whose pages the map still has.
    assert mapped[-1:].size == 1
    int(mapped[-1])


def test_map_of_the_file_itself_is_read_into_whole(runtime, tmp_path, small) -> None:
    path = tmp_path / "x.bin"
    was = np.arange(100_000, dtype="<u2")
    np.concatenate([was, was]).tofile(path)
    mapped = np.memmap(path, "<f4", "r+")
    cumem.fromfile(path, "<u2", out=mapped, casting="safe")
    assert (mapped == was).all()


# -- NumPy's files -------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["npy", "npz", "packed.npz"])
def test_one_long_row_is_converted_in_pieces_too(runtime, tmp_path, suffix) -> None:
    path = tmp_path / f"x.{suffix}"
    save = {"npy": np.save, "npz": np.savez}.get(suffix, np.savez_compressed)
    save(path, np.arange(3_000_000.0).reshape(1, -1))
    assert peak_of(lambda: cumem.load(path, dtype="f4", kind="pinned")) < 70 << 20


# -- memory --------------------------------------------------------------------------------


def peak_of(call: Callable[[], object]) -> int:
    """Return by how many bytes the memory of NumPy and Python grew at most in the call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_second_array_of_the_whole_is_made(runtime, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(converting, "STAGE_NBYTES", 1 << 20)
    array = np.arange(4_000_000.0)  # 32 MB
    plain, npy = tmp_path / "x.bin", tmp_path / "x.npy"
    tensors = tmp_path / "x.safetensors"
    out = cumem.empty(array.shape, "f4", "pinned")
    np.save(npy, array)
    cumem.save_safetensors(tensors, {"a": array, "b": array[:1000]})
    calls: list[Callable[[], Any]] = [
        lambda: cumem.tofile(plain, array, dtype="f4"),
        lambda: cumem.fromfile(plain, "f4", out=array, casting="safe"),
        lambda: cumem.load(npy, out=out, casting="same_kind"),
        lambda: cumem.load_safetensors(tensors, dtype="f4", kind="pinned").clear(),
    ]
    for call in calls:
        # The first call may import modules, whose memory would count as well. So each call
        # is made once before it is measured.
        call()
    peaks = [peak_of(call) for call in calls[:3]]
    assert max(peaks) < 8 << 20
    assert (out.numpy() == array).all()


# -- safetensors ---------------------------------------------------------------------------


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, np.ndarray]:
    """Make arrays of several types, and a file that holds them."""
    rng = np.random.default_rng(5)
    made = {
        "weight": rng.normal(size=(30, 70)).astype(BF16),
        "bias": rng.normal(size=70).astype("f4"),
        "scale": np.full((), 0.5, "f2"),
        "ids": np.arange(40, dtype="i8"),
        "mask": rng.integers(0, 2, 50).astype("?"),
        "small": np.arange(20).astype(F8),
        "none": np.zeros((0, 5), "f8"),
    }
    cumem.save_safetensors(tmp_path / "x.safetensors", made)
    return made


@pytest.mark.parametrize("kind", [*KINDS, "host"])
def test_tensors_become_the_dtype_that_is_named(
    runtime, tmp_path, tensors, small, kind
) -> None:
    path = tmp_path / "x.safetensors"
    for to in ("f4", BF16, "f8", ">f4", F8):
        loaded = cumem.load_safetensors(path, dtype=to, kind=kind, casting="unsafe")
        assert loaded.keys() == tensors.keys()
        for name, array in tensors.items():
            assert loaded[name].dtype == to
            assert values.get(loaded[name]).tobytes() == array.astype(to).tobytes()
        assert loaded.infos["weight"].dtype == "BF16"


@pytest.mark.parametrize("rule", [None, "no", "equiv", "safe", "same_kind", "unsafe"])
def test_tensors_follow_the_rule_of_casting(runtime, tmp_path, tensors, rule) -> None:
    path = tmp_path / "x.safetensors"
    how: dict[str, Any] = {} if rule is None else {"casting": rule}
    for (name, array), to in itertools.product(
        tensors.items(), ("f4", "f2", "i4", BF16)
    ):
        call = {"names": [name], "dtype": to, "kind": "pinned", **how}
        if np.can_cast(array.dtype, to, rule or "same_kind"):
            found = values.get(cumem.load_safetensors(path, **call)[name])
            assert found.tobytes() == array.astype(to).tobytes()
        else:
            with pytest.raises(TypeError, match=f"tensor '{name}': casting"):
                cumem.load_safetensors(path, **call)


def test_some_tensors_by_name_and_the_others_stay(runtime, tmp_path, tensors) -> None:
    path = tmp_path / "x.safetensors"
    wanted = {"weight": "f4", "ids": "i4", "bias": "f4"}
    loaded = cumem.load_safetensors(path, dtype=wanted)
    for name, array in tensors.items():
        expected = array.astype(wanted.get(name, array.dtype))
        assert loaded[name].dtype == expected.dtype
        assert values.get(loaded[name]).tobytes() == expected.tobytes()
    with pytest.raises(
        KeyError, match="'wieght', which is not a tensor that is loaded"
    ):
        cumem.load_safetensors(path, dtype={"wieght": "f4"})


def test_frameworks_give_their_own_dtype(runtime, tmp_path, tensors) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "x.safetensors"
    wanted = {"f4": torch.float32, torch.bfloat16: torch.bfloat16, "bfloat16": None}
    for given, own in wanted.items():
        how: dict[str, Any] = {"dtype": given, "kind": "host", "casting": "unsafe"}
        loaded = cumem.load_safetensors(path, framework="torch", **how)
        for name, array in tensors.items():
            expected = torch.from_numpy(array.astype("f4")).to(own or torch.bfloat16)
            assert loaded[name].dtype == expected.dtype
            assert torch.equal(loaded[name], expected)
    with pytest.raises(TypeError, match="has no type for dtype"):
        cumem.load_safetensors(path, framework="torch", dtype=">f4", kind="host")
    arrays = cumem.load_safetensors(path, framework="numpy", dtype="f4")
    assert (arrays["weight"] == tensors["weight"].astype("f4")).all()


def test_what_is_packed_cannot_become_another(runtime, tmp_path) -> None:
    path = tmp_path / "x.safetensors"
    packed = np.arange(6, dtype="u1")
    given = {"a": packed, "b": np.ones(3, "f4")}
    cumem.save_safetensors(path, given, dtypes={"a": "F4"})
    with pytest.raises(TypeError, match=r"tensor 'a': .* packed"):
        cumem.load_safetensors(path, dtype="f8")
    loaded = cumem.load_safetensors(path, dtype={"b": "f8"})
    assert (values.get(loaded["a"]) == packed).all()
    assert loaded["b"].dtype == "f8"


@pytest.fixture
def without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide ml_dtypes.

    NumPy then has no dtype for BF16, so that uint16 stands for it.
    """
    safetensors_format.dtype_of.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    yield
    monkeypatch.undo()
    safetensors_format.dtype_of.cache_clear()


def test_bfloat16_is_converted_where_numpy_does_not_have_it(
    runtime, tmp_path, tensors, small, without_ml_dtypes
) -> None:
    path, again = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    names = ["weight", "bias", "ids"]
    loaded = cumem.load_safetensors(path, dtype="f4", names=names)
    for name in names:
        expected = tensors[name].astype("f4")
        assert (values.get(loaded[name]) == expected).all()
    short = cumem.load_safetensors(path, dtype="bfloat16", names=names)
    for name in names:
        assert short[name].dtype == "u2"
        expected = tensors[name].astype(BF16)
        assert values.get(short[name]).tobytes() == expected.tobytes()
    cumem.save_safetensors(again, short)
    infos = cumem.read_safetensors_header(again).tensors
    assert {info.dtype for info in infos.values()} == {"BF16"}
    with pytest.raises(TypeError, match="'same_kind' does not allow"):
        cumem.load_safetensors(path, dtype="f2", names=["weight"])
    with pytest.raises(TypeError, match=r"tensor 'small': .*ml_dtypes"):
        cumem.load_safetensors(path, dtype="f4", names=["small"])


def test_checkpoint_of_several_files_is_converted(runtime, tmp_path, small) -> None:
    arrays = {f"t{i}": np.arange(100.0 * i).reshape(-1, 10) for i in range(9)}
    index = cumem.save_safetensors(
        tmp_path / "m.safetensors", arrays, max_shard_nbytes=4000
    )
    assert index.suffix == ".json"
    reported: list[tuple[int, int]] = []
    loaded = cumem.load_safetensors(
        index, dtype="f2", progress=lambda done, total: reported.append((done, total))
    )
    for name, array in arrays.items():
        assert (values.get(loaded[name]) == array.astype("f2")).all()
    total = sum(array.nbytes for array in arrays.values())
    assert reported[-1] == (total, total)
    assert all(a <= b for (a, _), (b, _) in itertools.pairwise(reported))


def test_every_runtime_call_of_converted_tensors_may_fail(
    emulated, tmp_path, tensors, small
) -> None:
    path = tmp_path / "x.safetensors"

    def scenario() -> None:
        loaded = cumem.load_safetensors(path, dtype="f4", names=["weight", "bias"])
        assert (values.get(loaded["weight"]) == tensors["weight"].astype("f4")).all()

    swept = sweep(scenario)
    assert "copy_async" in swept.raised
