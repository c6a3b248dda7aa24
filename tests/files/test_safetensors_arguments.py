# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of save_safetensors() say what is wrong, and write nothing.

The second part is about contents that could be written but not read again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import cumem
from cumem.files.safetensors import format as safetensors_format

GOOD = {"w": np.ones(4)}
Info = cumem.types.SafetensorsInfo
Save = Callable[..., Path]


@pytest.mark.parametrize(
    ("tensors", "options", "error", "match"),
    [
        ([1], {}, TypeError, "tensors must be a mapping of names to arrays, not list"),
        (None, {}, TypeError, "tensors must be a mapping .* not NoneType"),
        (np.ones(3), {}, TypeError, "tensors must be a mapping .* not ndarray"),
        ({3: np.ones(3)}, {}, TypeError, "tensors: names must be str, not int: 3"),
        (
            {"k": None},
            {},
            TypeError,
            r".*NoneType.* exports no memory(.|\n)*tensor 'k'",
        ),
        ({"k": [1, 2]}, {}, TypeError, r".*list.* exports no memory(.|\n)*tensor 'k'"),
        ({"k": np.array(["a"])}, {}, TypeError, r".* no element type(.|\n)*tensor 'k'"),
        ({"k": np.array([object()])}, {}, TypeError, r".*objects(.|\n)*tensor 'k'"),
        (GOOD, {"metadata": [1]}, TypeError, "metadata must be a mapping .* not list"),
        (GOOD, {"metadata": []}, TypeError, "metadata must be a mapping .* not list"),
        (GOOD, {"metadata": "a"}, TypeError, "metadata must be a mapping .* not str"),
        (GOOD, {"metadata": {"a": 1}}, TypeError, "metadata 'a': .* str, not int"),
        (GOOD, {"metadata": {"a": b"1"}}, TypeError, "metadata 'a': .* not bytes"),
        (GOOD, {"metadata": {1: "a"}}, TypeError, "metadata: keys must be str, .*: 1"),
        (GOOD, {"dtypes": ["F64"]}, TypeError, "dtypes must be a mapping .* not list"),
        (GOOD, {"dtypes": {1: "F64"}}, TypeError, "dtypes: names must be str, .*: 1"),
        (GOOD, {"dtypes": {"w": 3}}, TypeError, "dtypes 'w': .* SafetensorsInfo, not"),
        (GOOD, {"dtypes": {"x": 3}}, TypeError, "dtypes 'x': .* SafetensorsInfo, not"),
        (GOOD, {"dtypes": {"w": None}}, TypeError, "dtypes 'w': .* not NoneType"),
        (
            GOOD,
            {"dtypes": {"w": np.dtype("f8")}},
            TypeError,
            "dtypes 'w': .* not Float64DType",
        ),
        (
            GOOD,
            {"dtypes": {"w": Info("F64", "abc", 0, 32)}},
            TypeError,
            "dtypes 'w': shape .*'abc'",
        ),
        (
            GOOD,
            {"dtypes": {"w": Info("F64", (2.0, 2), 0, 32)}},
            TypeError,
            r"dtypes 'w': shape .*\(2\.0, 2\)",
        ),
        (
            GOOD,
            {"dtypes": {"w": Info("F64", (-2, -2), 0, 32)}},
            ValueError,
            r"dtypes 'w': shape .*\(-2, -2\)",
        ),
        (
            GOOD,
            {"dtypes": {"w": Info(3, (4,), 0, 32)}},
            TypeError,
            "dtypes 'w': .* not int",
        ),
        (GOOD, {"dtypes": {"w": "F99"}}, ValueError, r"'F99' is not known(.|\n)*'w'"),
        (GOOD, {"max_shard_nbytes": 0}, ValueError, "max_shard_nbytes .* not 0"),
        (GOOD, {"max_shard_nbytes": "0"}, ValueError, "max_shard_nbytes .* not '0'"),
        (GOOD, {"max_shard_nbytes": ".1"}, ValueError, "max_shard_nbytes .*'.1'"),
        (GOOD, {"max_shard_nbytes": -1}, ValueError, "max_shard_nbytes.* -1"),
        (GOOD, {"max_shard_nbytes": "x"}, ValueError, "max_shard_nbytes.*'x'"),
        (GOOD, {"max_shard_nbytes": "5%"}, ValueError, "max_shard_nbytes.*'5%'"),
        (GOOD, {"max_shard_nbytes": 1.5}, TypeError, "max_shard_nbytes.*float"),
        (GOOD, {"max_shard_nbytes": True}, TypeError, "max_shard_nbytes.*bool"),
    ],
)
def test_wrong_argument_is_named_and_nothing_is_written(
    emulated, tmp_path, tensors, options, error, match
) -> None:
    with pytest.raises(error, match=match):
        cumem.save_safetensors(tmp_path / "m.safetensors", tensors, **options)
    assert os.listdir(tmp_path) == []


def test_mappings_need_not_be_dicts(emulated, tmp_path) -> None:
    class Lazy:
        """A mapping that is not a dict: it only has keys and items."""

        def keys(self) -> list[str]:
            return ["w"]

        def __getitem__(self, name: str) -> np.ndarray:
            return np.arange(4.0)

    path = cumem.save_safetensors(tmp_path, Lazy())  # type: ignore[arg-type]
    assert cumem.load_safetensors(path)["w"].shape == (4,)
    loaded = cumem.load_safetensors(path, kind="pinned")
    cumem.save_safetensors(path, loaded, loaded.metadata, dtypes=loaded.infos)
    cumem.save_safetensors(path, GOOD, {}, dtypes={}, max_shard_nbytes=1)


def test_errors_of_writing_name_the_path_that_was_given(emulated, tmp_path) -> None:
    path = tmp_path / "no" / "b.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        cumem.save_safetensors(path, GOOD)
    assert caught.value.filename == str(path)
    assert caught.value.filename2 is None
    with pytest.raises(FileNotFoundError, match="b-00001-of-0000"):
        cumem.save_safetensors(path, GOOD | {"v": np.ones(4)}, max_shard_nbytes=1)
    taken = tmp_path / "taken.safetensors" / "model.safetensors"
    taken.mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as caught:
        cumem.save_safetensors(taken.parent, GOOD)
    assert str(taken) in str(caught.value)
    assert ".cumem-" not in str(caught.value)
    assert list(taken.parent.iterdir()) == [taken]


def test_type_of_no_tensor_is_refused(emulated, tmp_path) -> None:
    bits = np.arange(4, dtype="u2")
    path = tmp_path / "a.safetensors"
    with pytest.raises(KeyError, match="dtypes: there is no tensor 'b'"):
        cumem.save_safetensors(path, {"a": bits}, dtypes={"a": "BF16", "b": "BF16"})
    assert not path.exists()
    cumem.save_safetensors(path, {"a": bits, "b": bits}, dtypes={"a": "BF16"})
    infos = cumem.load_safetensors(path, kind="host").infos
    # `infos` also names a tensor that is not saved here.
    cumem.save_safetensors(path, {"a": bits}, dtypes=infos)
    assert list(cumem.load_safetensors(path, kind="host")) == ["a"]


# -- what would not be read again ----------------------------------------------------------


def no_elements(*shape: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(np.zeros(0, "u1"), shape)


@pytest.mark.parametrize(
    ("array", "declared", "message"),
    [
        (np.zeros(1, "u1"), Info("U8", (1,) * 65, 0, 1), "65 dimensions"),
        (no_elements(0, 1 << 62), "F4", "does not fit in 63 bits"),
        (no_elements(0, (1 << 63) - 1), "F4", "does not fit in 63 bits"),
    ],
)
def test_shape_that_would_not_be_read_again_is_refused(
    emulated, tmp_path, array, declared, message
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        cumem.save_safetensors(
            tmp_path / "m.safetensors", {"w": array}, dtypes={"w": declared}
        )
    assert "while saving the tensor 'w'" in caught.value.__notes__
    assert os.listdir(tmp_path) == []
    most = Info("U8", (1,) * 64, 0, 1)
    path = cumem.save_safetensors(
        tmp_path / "m.safetensors", {"w": np.ones(1, "u1")}, dtypes={"w": most}
    )
    assert cumem.read_safetensors_header(path).tensors["w"].shape == (1,) * 64


@pytest.mark.parametrize("name", ["m.json", "m.safetensors.index.json"])
def test_name_of_an_index_is_no_name_of_a_file_to_save(
    emulated, tmp_path, name
) -> None:
    (tmp_path / name).write_text("mine")
    for limit in (None, 8):
        with pytest.raises(ValueError, match=r"json.*index.*\.safetensors"):
            cumem.save_safetensors(
                tmp_path / name,
                {"a": np.zeros(8, "u1"), "b": np.zeros(8, "u1")},
                max_shard_nbytes=limit,
            )
    assert (tmp_path / name).read_text() == "mine"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["a\\b.safetensors", "\udcff.safetensors"])
def test_shards_have_names_that_an_index_can_say(emulated, tmp_path, name) -> None:
    tensors = {"a": np.zeros(8, "u1"), "b": np.zeros(8, "u1")}
    with pytest.raises(ValueError, match="no index can name its shards"):
        cumem.save_safetensors(tmp_path / name, tensors, max_shard_nbytes=8)
    assert os.listdir(tmp_path) == []
    path = cumem.save_safetensors(tmp_path / name, tensors)
    assert set(cumem.load_safetensors(path, kind="host")) == set(tensors)


@pytest.mark.parametrize(
    ("limit", "value"), [("MAX_NAMES", 2), ("MAX_HEADER_NBYTES", 150)]
)
def test_index_that_would_not_be_read_again_is_refused(
    emulated, tmp_path, monkeypatch, limit, value
) -> None:
    tensors = {name: np.zeros(8, "u1") for name in "abc"}
    monkeypatch.setattr(safetensors_format, limit, value)
    with pytest.raises(ValueError, match="index"):
        cumem.save_safetensors(tmp_path / "m", tensors, max_shard_nbytes=8)
    assert os.listdir(tmp_path) == []
