# SPDX-License-Identifier: Apache-2.0
"""Tests of which format a file name means, and of what damage to a file leads to.

A small record is saved, single fields of its arrays and tables are changed, and loading
it must end with an error that names the file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cumem

# The C core and the file formats decide what a file holds, so these tests show the same
# under every version of Python.
pytestmark = pytest.mark.any_python

#: Files with these suffixes must begin with these bytes.
SAVED = {
    "": b"PK",
    ".npz": b"PK",
    ".html": b"<!DOCTYPE html>",
    ".json": b"{",
    ".json.gz": b"\x1f\x8b",
    ".jsonl": b'{"format"',
    ".pb.gz": b"\x1f\x8b",
    ".pickle": b"\x80",
}


@pytest.mark.parametrize("suffix", SAVED)
def test_save_writes_the_format_that_the_suffix_names(
    emulated, tmp_path, suffix
) -> None:
    with cumem.record() as rec:
        cumem.empty_pinned(1000, "u1")
    rec.save(tmp_path / f"it{suffix}")
    begin = (tmp_path / f"it{suffix}").read_bytes()[:20]
    assert begin.lower().startswith(SAVED[suffix].lower())


def test_save_to_an_open_file_writes_the_whole_record(emulated, tmp_path) -> None:
    with cumem.record() as rec:
        cumem.empty_pinned(1000, "u1")
    file = io.BytesIO()
    rec.save(file)
    path = tmp_path / "it.npz"
    path.write_bytes(file.getvalue())
    assert len(cumem.Record.load(path)) == len(rec)


@pytest.mark.parametrize("name", ["it.zip", "it.csv", "it.json.bz2", ".html.old"])
def test_save_by_a_name_that_says_no_format_is_refused(
    emulated, tmp_path, name
) -> None:
    with cumem.record() as rec:
        cumem.empty_pinned(1000, "u1")
    with pytest.raises(ValueError, match=r"must end in one of \.npz, \.html"):
        rec.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def a_saved_record(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save a small record, and return its arrays and its tables, which a test then
    damages.
    """
    with cumem.record() as rec, cumem.tag("a"):
        keep = [cumem.empty_pinned(1000, "u1") for _ in range(4)]
        cumem.copy(cumem.empty_device(1000, "u1"), keep[0])
    rec.save(folder / "whole.npz")
    arrays = dict(np.load(folder / "whole.npz"))
    return arrays, json.loads(arrays["tables"].tobytes())


# Each of these functions returns a function that damages a record in one place.


def set_field(name: str, value: int, rows: str = "events") -> Callable[..., None]:
    def damage(arrays: dict[str, Any], tables: dict[str, Any]) -> None:
        arrays[rows][name][0] = value

    return damage


def set_table(name: str, value: Any) -> Callable[..., None]:
    def damage(arrays: dict[str, Any], tables: dict[str, Any]) -> None:
        tables[name] = value

    return damage


def set_frames(*frames: Any) -> Callable[..., None]:
    def damage(arrays: dict[str, Any], tables: dict[str, Any]) -> None:
        tables["stacks"] = dict.fromkeys(tables["stacks"], frames)

    return damage


def set_rows(rows: Any) -> Callable[..., None]:
    def damage(arrays: dict[str, Any], tables: dict[str, Any]) -> None:
        arrays["events"] = rows

    return damage


#: Each function damages a record, which must then be refused.
DAMAGES = {
    **{f"op {n}": set_field("op", n) for n in (9, 200, 255)},
    **{f"kind {n}": set_field("kind", n) for n in (7, 255)},
    "source": set_field("source_kind", 7),
    "tag": set_field("tag", 1 << 31),
    "stack": set_field("stack", 1 << 31),
    "nbytes": set_field("nbytes", 1 << 63),
    "value": set_field("value", (1 << 64) - 1),
    "time": set_field("time_ns", 1 << 63),
    "no stacks": set_table("stacks", {}),
    "stacks of texts": set_table("stacks", {"one": []}),
    "frame of two": set_frames(["a", 1]),
    "frame of numbers": set_frames([1, 1, "f"]),
    "frame without a line": set_frames(["a", None, "f"]),
    "frame before the file": set_frames(["a", -5, "f"]),
    "frames of none": set_frames(None),
    "tags of lists": set_table("tags", [[""]]),
    "tags of none": set_table("tags", []),
    "first tag": set_table("tags", ["a", "b"]),
    "threads": set_table("threads", {"1": 2}),
    **{
        f"{name} {value}": set_table(name, value)
        for name in ("lost_count", "duration_ns")
        for value in (-1, "x", None, True, 1.5, 1 << 70)
    },
    **{f"begin {v}": set_table("begin_s", v) for v in ("x", None, 1e400, 1e300, -1)},
    **{
        f"machine {value}": set_table("machine", value)
        for value in (
            *(None, [], "x", 5, {}, {"backend": "vulkan"}),
            {"backend": "cuda", "devices": [1]},
            {"backend": "cuda", "inner": "x"},
        )
    },
    "no rows": set_rows(np.array("x")),
    "rows of a table": set_rows(np.zeros((2, 2), "i8")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_record_is_refused_where_it_is_loaded(
    emulated, tmp_path, damage
) -> None:
    arrays, tables = a_saved_record(tmp_path)
    DAMAGES[damage](arrays, tables)
    arrays["tables"] = np.frombuffer(json.dumps(tables).encode(), np.uint8)
    np.savez(tmp_path / "damaged.npz", **arrays)
    with pytest.raises(ValueError, match="not a record of cumem"):
        cumem.Record.load(tmp_path / "damaged.npz")


def test_record_whose_stacks_have_great_numbers_costs_no_more(
    emulated, tmp_path
) -> None:
    arrays, tables = a_saved_record(tmp_path)
    great = 4_000_000_000
    stacks = {str(great + int(n)): frames for n, frames in tables["stacks"].items()}
    tables["stacks"] = stacks | {"99999999": []}
    for rows in ("events", "living"):
        used = arrays[rows]["stack"] > 0
        arrays[rows]["stack"][used] += great
    arrays["tables"] = np.frombuffer(json.dumps(tables).encode(), np.uint8)
    np.savez(tmp_path / "great.npz", **arrays)
    loaded = cumem.Record.load(tmp_path / "great.npz")
    assert len(loaded.log.stacks) == len(stacks) + 1
    names = [group.name for group in loaded.top().groups if group.name != "no stack"]
    assert names
    assert all(Path(__file__).name in name for name in names)


def test_error_of_a_file_that_is_no_archive_says_so_and_not_how_to_load_pickles(
    tmp_path,
) -> None:
    path = tmp_path / "record.html"
    path.write_text("<html></html>")
    with pytest.raises(ValueError, match=r"not a record of cumem: it is not an \.npz$"):
        cumem.Record.load(path)


def test_error_of_a_path_names_it_as_a_text(tmp_path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        cumem.Record.load(tmp_path)
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(IsADirectoryError) as caught:
        cumem.fromfile(tmp_path, "u1")
    assert caught.value.filename == str(tmp_path)
