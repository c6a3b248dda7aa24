# SPDX-License-Identifier: Apache-2.0
"""Tests of which headers and indexes of safetensors files are read or refused.

Headers are written by hand, by Hypothesis and by random changes. What cumem accepts,
the reference implementation (the package safetensors) must accept and read as the same.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cumem
from cumem.files.safetensors import format as form

# The C core and the file formats decide what a file holds, so these tests show the same
# under every version of Python.
pytestmark = pytest.mark.any_python

#: Each element type of the format has this number of bits.
BITS = {name: element.bits for name, element in form.TYPES.items()}
LARGE = 1 << 63


def blob(header: object, data: bytes = b"") -> bytes:
    """Return a file's bytes.

    `header` is written as it is if it is text or bytes, and as JSON otherwise.
    """
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(header)) + header + data


def tensor(
    dtype: Any = "U8", shape: Any = (1,), offsets: Any = (0, 1)
) -> dict[str, Any]:
    """Return the entry of one tensor in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read(tmp_path: Path, content: bytes) -> cumem.types.SafetensorsHeader:
    """Write `content` to a file, and read its header."""
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    return cumem.read_safetensors_header(path)


# -- what is read ----------------------------------------------------------------------


def test_header_gives_types_shapes_places_and_texts(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt", "": "é"},
        "b": tensor("BF16", [2, 3], [8, 20]),
        "a": tensor("F64", [], [0, 8]),
        "empty": tensor("I32", [0, 7], [8, 8]),
        "": tensor("BOOL", [1], [20, 21]),
    }
    content = blob(header, bytes(21))
    read_back = read(tmp_path, content)
    start = len(content) - 21
    assert read_back.tensors == {
        "a": ("F64", (), start, 8),
        "empty": ("I32", (0, 7), start + 8, 0),
        "b": ("BF16", (2, 3), start + 8, 12),
        "": ("BOOL", (1,), start + 20, 1),
    }
    assert list(read_back.tensors) == ["a", "empty", "b", ""]
    assert read_back.metadata == {"format": "pt", "": "é"}
    assert read_back.nbytes == len(content)
    assert read_back.path == tmp_path / "t.safetensors"


@pytest.mark.parametrize("header", ["{}", "{}   ", '{"__metadata__":null}'])
def test_file_without_tensors_is_valid(tmp_path: Path, header: str) -> None:
    found = read(tmp_path, blob(header))
    assert found.tensors == {}
    assert found.metadata == {}


def test_fields_that_are_not_known_are_passed_over(tmp_path: Path) -> None:
    header = {"a": tensor() | {"more": [1.5, None, {"x": True}]}}
    assert list(read(tmp_path, blob(header, b"1")).tensors) == ["a"]


@pytest.mark.parametrize("name", BITS)
def test_element_type_has_its_size(tmp_path: Path, name: str) -> None:
    nbytes = 2 * 8 * BITS[name] // 8
    info = read(
        tmp_path, blob({"a": tensor(name, [2, 8], [0, nbytes])}, bytes(nbytes))
    ).tensors["a"]
    assert (info.dtype, info.shape, info.nbytes) == (name, (2, 8), nbytes)
    shape, dtype = form.packed_shape(info), form.dtype_of(name)
    assert int(np.prod(shape)) * dtype.itemsize == nbytes
    assert len(shape) == 2


@pytest.mark.parametrize(
    ("name", "shape", "packed"),
    [
        ("F4", (3, 4), (3, 2)),
        ("F4", (2, 3), (3,)),
        ("F4", (0, 3), (0,)),
        ("F4", (3, 0), (3, 0)),
        ("F6_E2M3", (2, 4), (2, 3)),
        ("F6_E3M2", (4, 3), (9,)),
        ("F8_E4M3", (3,), (3,)),
    ],
)
def test_packed_elements_lie_along_the_last_axis(name, shape, packed) -> None:
    nbytes = form.tensor_nbytes(form.TYPES[name], shape)
    info = cumem.types.SafetensorsInfo(name, shape, 0, nbytes)
    assert form.packed_shape(info) == packed


def test_types_are_those_of_the_reference_implementation(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(blob({"a": tensor("X")}, b"1"))
    known = str(caught.value).split("expected one of ")[1].split(" at line")[0]
    assert known.replace("`", "").split(", ") == list(form.TYPES)


def test_types_that_numpy_lacks_are_those_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    form.dtype_of.cache_clear()
    for name, own in (
        ("BF16", ml_dtypes.bfloat16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
        ("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz),
    ):
        assert form.dtype_of(name) == np.dtype(own)
        assert form.type_of(np.dtype(own)) is form.TYPES[name]
    for own in (ml_dtypes.float4_e2m1fn, ml_dtypes.int4, ml_dtypes.float8_e4m3):
        assert form.type_of(np.dtype(own)) is None


def test_types_that_nobody_has_are_unsigned_integers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    form.dtype_of.cache_clear()
    try:
        assert form.dtype_of("BF16") == np.uint16
        assert form.dtype_of("F8_E5M2") == np.uint8
        assert form.dtype_of("F4") == np.uint8
        assert form.dtype_of("F16") == np.float16
    finally:
        form.dtype_of.cache_clear()


@pytest.mark.parametrize("dtype", [">f4", "M8[s]", "c16", "S4", "f16", "V2", "i4,f4"])
def test_dtypes_that_the_format_lacks_have_no_type(dtype: str) -> None:
    assert form.type_of(np.dtype(dtype)) is None


# -- what is refused -------------------------------------------------------------------

GOOD = '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 bytes are too few"),
    "7 bytes": (b"1234567", "7 bytes are too few"),
    "length over 100 MB": (struct.pack("<Q", 100_000_001) + b"{}", "100000001"),
    "length over 63 bits": (
        struct.pack("<Q", LARGE + 8) + b"{}",
        "more than 100000000",
    ),
    "length beyond the file": (struct.pack("<Q", 3) + b"{}", "cut short"),
    "no header": (blob(""), "does not begin"),
    "a list": (blob("[]"), "does not begin"),
    "spaces first": (blob(" " + GOOD, b"1"), "does not begin"),
    "a byte order mark": (blob("\ufeff" + GOOD, b"1"), "does not begin"),
    "not UTF-8": (blob(b'{"\xff":1}'), "not UTF-8"),
    "not JSON": (blob("{'a':1}"), "not JSON"),
    "JSON and more": (blob("{}{}"), "not JSON"),
    "zeros after it": (blob(b"{}\0\0"), "not JSON"),
    "NaN": (blob('{"a":NaN}'), "not JSON"),
    "infinite": (blob('{"a":1e999}'), "not JSON"),
    "nested too deep": (blob('{"a":' + "[" * 100_000), "nested too deep"),
    "a name twice": (blob(GOOD[:-1] + "," + GOOD[1:], b"1"), "'a' stands twice"),
    "a field twice": (
        blob(GOOD.replace('"shape"', '"dtype":"U8","shape"'), b"1"),
        "'dtype' stands twice",
    ),
    "half a surrogate pair": (blob(GOOD.replace('"a"', '"\\ud800"'), b"1"), "UTF-8"),
    "texts that are a list": (blob({"__metadata__": []}), "not a JSON object"),
    "a text that is a number": (blob({"__metadata__": {"k": 1}}), "no text for 'k'"),
    "half a pair in a text": (blob('{"__metadata__":{"k":"\\udc00"}}'), "UTF-8"),
    "a tensor that is a list": (blob({"a": ["U8", [1], [0, 1]]}, b"1"), "tensor 'a'"),
    "a tensor that is null": (blob({"a": None}), "tensor 'a': it is not a JSON object"),
    "no dtype": (blob({"a": {"shape": [], "data_offsets": [0, 1]}}), "'a'.*no 'dtype'"),
    "no shape": (blob({"a": {"dtype": "U8", "data_offsets": [0, 1]}}), "'shape'"),
    "no offsets": (blob({"a": {"dtype": "U8", "shape": []}}), "no 'data_offsets'"),
    "another element type": (blob({"a": tensor("U7")}, b"1"), "'a'.*'U7' is not known"),
    "a list as element type": (blob({"a": tensor([])}, b"1"), "is not known"),
    "small letters": (blob({"a": tensor("u8")}, b"1"), "'u8' is not known"),
    "a shape that is a number": (
        blob({"a": tensor(shape=1)}, b"1"),
        "shape is not a list",
    ),
    "a negative shape": (blob({"a": tensor(shape=[-1])}, b"1"), "negative"),
    "minus zero": (blob(GOOD.replace("[1]", "[-0]")), "negative"),
    "a true shape": (blob({"a": tensor(shape=[True])}, b"1"), "'a'.*shape has True"),
    "a float as shape": (blob({"a": tensor(shape=[1.0])}, b"1"), "shape has 1.0"),
    "a text as shape": (blob({"a": tensor(shape=["1"])}, b"1"), "shape has '1'"),
    "65 dimensions": (blob({"a": tensor(shape=[1] * 65)}, b"1"), "65 dimensions"),
    "one offset": (blob({"a": tensor(offsets=[0])}, b"1"), "1 numbers, not 2"),
    "three offsets": (blob({"a": tensor(offsets=[0, 1, 1])}, b"1"), "3 numbers, not 2"),
    "an end before the beginning": (
        blob({"a": tensor(), "b": tensor(offsets=[2, 1])}, b"12"),
        "'b'.*end at 1, before they begin at 2",
    ),
    "a negative offset": (blob({"a": tensor(offsets=[-1, 0])}, b"1"), "negative"),
    "too many bytes for the shape": (
        blob({"a": tensor("U16", [1], [0, 1])}, b"1"),
        r"'a'.*U16 of shape \(1,\) takes 2 bytes, data_offsets give it 1",
    ),
    "an extent over 63 bits": (
        blob({"a": tensor(shape=[LARGE, 0], offsets=[0, 0])}),
        "'a'.*63 bits",
    ),
    "extents over 63 bits together": (
        blob({"a": tensor(shape=[1 << 40, 1 << 40], offsets=[0, 0])}),
        "'a'.*63 bits",
    ),
    "extents that wrap round to fit": (
        blob({"a": tensor(shape=[1 << 32, 1 << 32], offsets=[0, 0])}),
        "'a'.*63 bits",
    ),
    "bytes over 63 bits": (
        blob({"a": tensor("F64", [1 << 61], [0, 0])}),
        "'a'.*63 bits",
    ),
    "an empty tensor over 63 bits": (
        blob({"a": tensor(shape=[0, 1 << 40, 1 << 40], offsets=[0, 0])}),
        "'a'.*63 bits",
    ),
    "a number of many digits": (blob('{"a":' + "9" * 10_000 + "}"), "63 bits"),
    "half a byte": (blob({"a": tensor("F4", [3], [0, 2])}, b"12"), "'a'.*3 elements"),
    "a hole": (
        blob({"a": tensor(), "b": tensor(offsets=[2, 3])}, b"123"),
        "'b'.* 1 bytes before",
    ),
    "a hole at the start": (blob({"a": tensor(offsets=[1, 2])}, b"12"), "'a'.*before"),
    "two tensors in one place": (
        blob({"a": tensor(), "b": tensor()}, b"1"),
        "'b'.*overlap those of 'a'",
    ),
    "an overlap": (
        blob(
            {"a": tensor(shape=[2], offsets=[0, 2]), "b": tensor(offsets=[1, 2])}, b"12"
        ),
        "'b'.*overlap those of 'a'",
    ),
    "an empty tensor within another": (
        blob(
            {
                "a": tensor(shape=[2], offsets=[0, 2]),
                "b": tensor(shape=[0], offsets=[1, 1]),
            },
            b"12",
        ),
        "'b'.*overlap",
    ),
    "data beyond the file": (blob(GOOD), "'a'.*cut short"),
    "bytes of nobody": (blob(GOOD, b"123"), "last 2 bytes"),
    "bytes of nobody at all": (blob("{}", b"123"), "last 3 bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_header_is_refused(tmp_path: Path, what: str) -> None:
    content, why = REFUSED[what]
    with pytest.raises(cumem.SafetensorsError, match=why) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith(f"{tmp_path / 't.safetensors'}: ")
    assert len(str(caught.value)) < 1000
    assert isinstance(caught.value, ValueError)


def test_what_the_reference_implementation_refuses_is_refused(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    ours_alone = {
        *("spaces first", "a tensor that is a list", "a name twice"),
        *("65 dimensions", "an extent over 63 bits", "an empty tensor over 63 bits"),
    }
    accepted = set()
    for what, (content, _) in REFUSED.items():
        try:
            safetensors.deserialize(content)
            accepted.add(what)
        except safetensors.SafetensorError:
            pass
    assert accepted <= ours_alone


def test_file_that_is_missing_is_an_oserror_and_a_folder_without_one_an_error(
    tmp_path: Path,
) -> None:
    with pytest.raises(FileNotFoundError):
        cumem.read_safetensors_header(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match=r"holds no \*.safetensors"):
        cumem.read_safetensors_header(tmp_path)


# -- fuzz ------------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(-2, 40),
    st.sampled_from([LARGE - 1, LARGE, 1 << 32, 1 << 64, 0.5, 1.0, True, None]),
)
values = st.one_of(
    numbers,
    st.text(max_size=3),
    st.lists(numbers, max_size=4),
    st.sampled_from([*form.TYPES, "u8", ""]),
    # Each draw makes a new dict, because the tests change them.
    st.builds(dict),
    st.builds(dict, dtype=st.just("U8")),
)
fields = st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "more"])


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Draw a valid header, and the size of its data."""
    header: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(st.text(max_size=3), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(list(form.TYPES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        if BITS[dtype] < 8:
            shape.append(draw(st.sampled_from([0, 4, 8])))
        nbytes = form.tensor_nbytes(form.TYPES[dtype], shape)
        header[name] = tensor(dtype, shape, [at, at + nbytes])
        at += nbytes
    if draw(st.booleans()):
        header["__metadata__"] = draw(
            st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=2)
        )
    return header, at


def verdict(path: Path, content: bytes) -> cumem.types.SafetensorsHeader | None:
    """Return the header, or None if cumem refuses it.

    Any other exception fails the test.
    """
    path.write_bytes(content)
    try:
        return cumem.read_safetensors_header(path)
    except cumem.SafetensorsError:
        return None


def agree(found: cumem.types.SafetensorsHeader | None, content: bytes) -> None:
    """Check that the reference implementation accepts what cumem accepts, and reads the
    same.
    """
    if found is None:
        return
    safetensors = pytest.importorskip("safetensors")
    theirs = dict(safetensors.deserialize(content))
    assert theirs.keys() == found.tensors.keys()
    for name, info in found.tensors.items():
        other = theirs[name]
        assert (other["dtype"], tuple(other["shape"])) == (info.dtype, info.shape)
        assert other["data"] == content[info.offset : info.offset + info.nbytes]


@given(headers(), st.data())
def test_valid_headers_are_read_as_the_reference_implementation_does(
    tmp_path_factory: pytest.TempPathFactory, header, data
) -> None:
    entries, size = header
    items = data.draw(st.permutations(list(entries.items())))
    text = json.dumps(dict(items), ensure_ascii=data.draw(st.booleans()))
    content = blob(text, data.draw(st.binary(min_size=size, max_size=size)))
    found = verdict(tmp_path_factory.getbasetemp() / "f.safetensors", content)
    assert found is not None
    assert len(found.tensors) == len(entries) - ("__metadata__" in entries)
    agree(found, content)


@given(headers(), st.data())
def test_changed_headers_are_read_alike_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header, data
) -> None:
    entries, size = header
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from([*entries, "new", "__metadata__"]))
        entry = entries.get(name)
        if isinstance(entry, dict) and data.draw(st.booleans()):
            field = data.draw(st.sampled_from([*entry, "more"]))
            if isinstance(entry.get(field), list) and entry[field]:
                place = data.draw(st.integers(0, len(entry[field]) - 1))
                entry[field][place] = data.draw(numbers)
            else:
                entry[field] = data.draw(values)
        else:
            entries[name] = data.draw(values)
    size = max(0, size + data.draw(st.sampled_from([0, 0, 0, 1, -1])))
    content = blob(json.dumps(entries), bytes(size))
    agree(verdict(tmp_path_factory.getbasetemp() / "f.safetensors", content), content)


@given(headers(), st.data())
def test_changed_bytes_are_read_alike_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header, data
) -> None:
    entries, size = header
    content = bytearray(blob(entries, bytes(size)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        change = data.draw(st.sampled_from(["set", "cut", "put"]))
        if change == "set":
            content[place] = data.draw(st.integers(0, 255))
        elif change == "put":
            content[place:place] = data.draw(st.binary(max_size=3))
        elif len(content) > 1:
            del content[place]
    path = tmp_path_factory.getbasetemp() / "f.safetensors"
    agree(verdict(path, bytes(content)), bytes(content))


@given(st.binary(max_size=200))
@example(struct.pack("<Q", 2**64 - 1))
@settings(max_examples=200)
def test_random_bytes_are_refused(
    tmp_path_factory: pytest.TempPathFactory, content
) -> None:
    path = tmp_path_factory.getbasetemp() / "f.safetensors"
    agree(verdict(path, content), content)
    whole = blob(content)
    agree(verdict(path, whole), whole)


# -- indexes ---------------------------------------------------------------------------


def test_index_names_the_files_beside_it_and_below(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors.index.json"
    files = {"b": "m-1.safetensors", "a": "deep/er/m-2.safetensors"}
    path.write_text(json.dumps({"metadata": {"total_size": 1.5}, "weight_map": files}))
    found = form.read_index(path)
    assert found == {name: tmp_path / file for name, file in files.items()}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "weight_map"),
        ('{"weight_map":[]}', "weight_map"),
        ('{"weight_map":{"a":1}}', "'a'.*not a text"),
        ('{"weight_map":{"a":"x","a":"y"}}', "'a' stands twice"),
        ('{"weight_map":{},"weight_map":{}}', "'weight_map' stands twice"),
        ('{"weight_map":{"a":"\\ud800"}}', "UTF-8"),
        ('{"weight_map":{"\\ud800":"a"}}', "UTF-8"),
        *(
            (json.dumps({"weight_map": {"a": file}}), "'a'.*inside the index's folder")
            for file in (
                *("", ".", "..", "../x", "x/../../y", "/etc/passwd", "x//y", "./../x"),
                *("x\0y", "x\\..\\y", "x/"),
            )
        ),
    ],
)
def test_index_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "m.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(cumem.SafetensorsError, match=why) as caught:
        form.read_index(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_index_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors.index.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(cumem.SafetensorsError, match="not UTF-8"):
        form.read_index(path)


def test_index_of_more_than_100_mb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors.index.json"
    with open(path, "wb") as file:
        file.truncate(form.MAX_HEADER_NBYTES + 1)
    with pytest.raises(cumem.SafetensorsError, match="more than 100000000 bytes"):
        form.read_index(path)


# -- the two ways to read a header --------------------------------------------------------

SEPARATORS = [(",", ":"), (", ", ": "), (",", ": ")]


def both_ways(path: Path) -> tuple[object, object, bool]:
    """Read a header twice: as users do, and by the scanner alone.

    cumem first tries a quick way, `_usual_header()`, and asks its scanner only where
    that gives up. Return both results, which are texts of errors if the header is
    refused, and whether the quick way was enough.
    """
    answers: list[object] = []
    usual: list[bool] = []
    own = form._usual_header

    def watched(*arguments: Any) -> Any:
        found = own(*arguments)
        usual.append(found is not None)
        return found

    for way in (watched, lambda *arguments: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(form, "_usual_header", way)
            try:
                header = cumem.read_safetensors_header(path)
                answers.append((list(header.tensors.items()), header.metadata))
            except cumem.SafetensorsError as error:
                answers.append(str(error))
    return answers[0], answers[1], usual == [True]


@pytest.mark.parametrize("separators", SEPARATORS)
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "k": "\N{BULLET}"}])
@pytest.mark.parametrize("padding", ["", "     "])
def test_usual_header_is_read_as_the_scanner_reads_it(
    tmp_path: Path, separators, metadata, padding
) -> None:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for index in range(200):
        name = list(form.TYPES)[index % len(form.TYPES)]
        shape = [[], [8], [0, 4], [2, 3, 4]][index % 4] or [8]
        nbytes = form.tensor_nbytes(form.TYPES[name], shape)
        header[f"layer.{index}.\N{BULLET}"] = tensor(name, shape, [at, at + nbytes])
        at += nbytes
    text = json.dumps(header, separators=separators, ensure_ascii=False) + padding
    path = tmp_path / "t.safetensors"
    path.write_bytes(blob(text, bytes(at)))
    one, other, is_usual = both_ways(path)
    assert one == other
    assert len(one[0]) == 200  # type: ignore[index]
    assert is_usual == (separators in SEPARATORS[:2])


@pytest.mark.parametrize("what", REFUSED)
def test_header_is_refused_in_both_ways(tmp_path: Path, what: str) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(REFUSED[what][0])
    one, other, is_usual = both_ways(path)
    assert one == other
    assert not is_usual


@settings(max_examples=300)
@given(st.data(), headers(), st.sampled_from(SEPARATORS), st.integers(0, 3))
def test_header_with_any_change_is_the_same_in_both_ways(
    tmp_path_factory: pytest.TempPathFactory, data, made, separators, changes
) -> None:
    header, size = made
    text = list(json.dumps(header, separators=separators))
    for _ in range(changes):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.text(st.sampled_from('{}[],:" 0129ade-.\\'), max_size=2)
        )
    path = tmp_path_factory.mktemp("both") / "t.safetensors"
    path.write_bytes(blob("".join(text), bytes(size)))
    one, other, _ = both_ways(path)
    assert one == other


def test_header_of_several_windows_is_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(form, "_WINDOW", 100)
    header = {f"t{i}": tensor("U8", [1], [i, i + 1]) for i in range(50)}
    path = tmp_path / "t.safetensors"
    path.write_bytes(blob(json.dumps(header, separators=(",", ":")), bytes(50)))
    one, other, is_usual = both_ways(path)
    assert one == other
    assert is_usual


# -- how much of a file of unknown origin is read --------------------------------------

NAMES = 100
LENGTH = 10_000
#: Each header exceeds a bound that `small_bounds` sets. The text beside the header must be
#: in the error.
LARGE_HEADERS = {
    "many tensors": (
        json.dumps({str(i): tensor(shape=[0], offsets=[0, 0]) for i in range(101)}),
        "more than 100 names",
    ),
    "many texts": (
        json.dumps({"__metadata__": {str(i): "" for i in range(101)}}),
        "more than 100 names",
    ),
    "lists": ('{"a":[' + "[]," * LENGTH + "[]]}", "goes on for more than 8192"),
    "objects": ('{"a":[' + "{}," * LENGTH + "{}]}", "goes on for more than 8192"),
    "a shape": (
        json.dumps({"a": tensor(shape=[300] * LENGTH)}),
        "goes on for more than 8192",
    ),
    "fields": (
        '{"a":{' + ",".join(f'"{i}":0' for i in range(LENGTH)) + "}}",
        "goes on for more than 8192",
    ),
    "texts that are lists": (
        '{"__metadata__":{"a":[' + "[]," * LENGTH + "[]]}}",
        "goes on for more than 8192",
    ),
    "a list never ends": ('{"a":[' + "[]," * LENGTH, "goes on for more than 8192"),
    "a name never ends": ('{"' + "a" * LENGTH, "not JSON: Unterminated string"),
}


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "MAX_NAMES", NAMES)
    monkeypatch.setattr(form, "_MAX_VALUE_LENGTH", 8192)


@pytest.mark.parametrize("what", LARGE_HEADERS)
def test_header_that_would_take_much_memory_is_refused(
    tmp_path: Path, small_bounds: None, what: str
) -> None:
    text, why = LARGE_HEADERS[what]
    with pytest.raises(cumem.SafetensorsError, match=why) as caught:
        read(tmp_path, blob(text))
    # An exception in `__context__` would keep the whole text of the header alive.
    assert caught.value.__context__ is None


def test_header_within_all_bounds_is_read(tmp_path: Path, small_bounds: None) -> None:
    entry = {**tensor(shape=[0], offsets=[0, 0]), "more": "x" * 7000}
    header = {str(i): entry for i in range(NAMES - 1)}
    header["__metadata__"] = {str(i): "é" * LENGTH for i in range(NAMES)}
    found = read(tmp_path, blob(header))
    assert len(found.tensors) == NAMES - 1
    assert found.metadata == header["__metadata__"]


def test_memory_of_reading_a_header_is_bounded(tmp_path: Path) -> None:
    text = '{"a":[' + "[]," * (1 << 20) + "[]]}"
    path = tmp_path / "t.safetensors"
    path.write_bytes(blob(text))
    tracemalloc.start()
    try:
        with pytest.raises(cumem.SafetensorsError, match="goes on"):
            cumem.read_safetensors_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(text) + (8 << 20)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            json.dumps({"weight_map": {str(i): "x" for i in range(101)}}),
            "more than 100 names",
        ),
        (json.dumps({str(i): 0 for i in range(101)}), "more than 100 names"),
        ('{"metadata":[' + "{}," * LENGTH + "0]}", "goes on for more than 8192"),
        ('{"weight_map":{"a":[' + "{}," * LENGTH + "0]}}", "goes on for more"),
    ],
)
def test_index_that_would_take_much_memory_is_refused(
    tmp_path: Path, small_bounds: None, text: str, why: str
) -> None:
    path = tmp_path / "m.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(cumem.SafetensorsError, match=why):
        form.read_index(path)


# -- writing ---------------------------------------------------------------------------

ARRAYS = ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "c8", "u8", "i8", "f8"]


@given(
    st.dictionaries(
        st.text(max_size=4),
        st.tuples(st.sampled_from(ARRAYS), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    ),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), min_size=1, max_size=1),
)
def test_header_is_written_as_the_reference_implementation_does(made, texts) -> None:
    oracle = pytest.importorskip("safetensors.numpy")
    arrays = {name: np.zeros(shape, dtype) for name, (dtype, shape) in made.items()}
    arrays.pop("__metadata__", None)
    entries = []
    for name, array in arrays.items():
        element = form.type_of(array.dtype)
        assert element is not None
        entries.append((name, element.name, array.shape, array.nbytes))
    head, infos = form.header_bytes(entries, texts)
    data = b"".join(arrays[name].tobytes() for name in infos)
    assert head + data == oracle.save(arrays, texts)
    assert all(info.offset >= len(head) for info in infos.values())


def test_texts_are_written_sorted() -> None:
    one, _ = form.header_bytes([], {"b": "1", "a": "2"})
    two, _ = form.header_bytes([], {"a": "2", "b": "1"})
    assert one == two
    assert form.header_bytes([], None)[0] == form.header_bytes([], {})[0]


def test_header_over_100_mb_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "MAX_HEADER_NBYTES", 64)
    form.header_bytes([], {"a": "b"})
    with pytest.raises(ValueError, match="more than 64"):
        form.header_bytes([], {"a": "b" * 64})


def test_more_tensors_than_are_read_are_not_written(small_bounds: None) -> None:
    entries = [(str(i), "U8", (0,), 0) for i in range(NAMES)]
    form.header_bytes(entries, None)
    for more in ([*entries, ("a", "U8", (0,), 0)], None), (entries, {"a": "b"}):
        with pytest.raises(ValueError, match="at most 100"):
            form.header_bytes(*more)
    with pytest.raises(ValueError, match="at most 100"):
        form.header_bytes([], {str(i): "" for i in range(NAMES + 1)})
