# SPDX-License-Identifier: Apache-2.0
"""Tests that `cumem.units` writes sizes, rates, times and tables, and reads sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumem.units import (
    format_count,
    format_nbytes,
    format_rate,
    format_seconds,
    format_table,
    parse_nbytes,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096 B", 4096),
        ("4GiB", 4 << 30),
        (" 4 GiB ", 4 << 30),
        ("4gib", 4 << 30),
        ("1.5 MiB", 3 << 19),
        ("1.5MB", 1_500_000),
        ("2 TB", 2_000_000_000_000),
        (".5KiB", 512),
        ("0.3 B", 0),
        ("1EiB", 1 << 60),
        ("10Gi", 10 << 30),
        ("4 Ki", 4096),
        ("10G", 10_000_000_000),
        ("512m", 512_000_000),
        ("64k", 64_000),
        ("64K", 64_000),
        ("1.5 GB", 1_500_000_000),
        ("2t", 2_000_000_000_000),
        ("7b", 7),
        (12345, 12345),
    ],
)
def test_parse_reads_a_size(text: int | str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"), [("50%", 500), ("0%", 0), ("100 %", 1001), ("12.5%", 125)]
)
def test_parse_reads_a_share_rounded_down(text: str, nbytes: int) -> None:
    assert parse_nbytes(text, total=1001) == nbytes


def test_parse_is_exact_where_floats_are_not() -> None:
    assert parse_nbytes("9007199254740993") == 9007199254740993
    assert parse_nbytes("0.1GB") == 100_000_000


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "such as"),
        ("GiB", "such as"),
        ("-1", "such as"),
        ("1e3", "such as"),
        ("4 GiB x", "such as"),
        ("nan", "such as"),
        ("٤", "such as"),
        ("4 Gb/s", "such as"),
        ("4i", "unknown unit 'i'"),
        ("4 Gig", "powers of 1024"),
        ("4 GBi", "unknown unit 'GBi'"),
        ("50%", "share"),
    ],
)
def test_parse_of_anything_else_says_what_was_expected(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        parse_nbytes(text)


def test_parse_refuses_a_share_over_the_whole() -> None:
    with pytest.raises(ValueError, match="at most 100%"):
        parse_nbytes("101%", total=10)


def test_parse_refuses_a_negative_number() -> None:
    with pytest.raises(ValueError, match="negative"):
        parse_nbytes(-1)


@pytest.mark.parametrize("size", [True, 1.0, None, b"1"])
def test_parse_refuses_other_types(size: object) -> None:
    with pytest.raises(TypeError, match=type(size).__name__):
        parse_nbytes(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (4096, "4 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (1 << 20, "1 MiB"),
        (256 << 20, "256 MiB"),
        (150_754_820_096, "140.4 GiB"),
        (-2048, "-2 KiB"),
        (1 << 70, "1024 EiB"),
    ],
)
def test_format_nbytes(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@given(st.integers(0, 1 << 62))
def test_format_and_parse_agree_to_one_decimal(nbytes: int) -> None:
    back = parse_nbytes(format_nbytes(nbytes))
    assert abs(back - nbytes) <= max(1, nbytes * 0.051)


@pytest.mark.parametrize(
    ("nbytes", "seconds", "text"),
    [
        (55.34e9, 1, "55.3 GB/s"),
        (1e9, 1, "1.00 GB/s"),
        (999.9e6, 1, "1.00 GB/s"),
        (4096, 7.6e-6, "539 MB/s"),
        (5, 1, "5.00 B/s"),
        (0, 1, "0 B/s"),
        (1, 0, "-"),
    ],
)
def test_format_rate(nbytes: float, seconds: float, text: str) -> None:
    assert format_rate(nbytes, seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"),
        (46e-9, "46.0 ns"),
        (7.6e-6, "7.60 µs"),
        (999.9e-6, "1.00 ms"),
        (0.342, "342 ms"),
        (1.5, "1.50 s"),
        (600, "600 s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_format_count_has_the_noun_of_the_number() -> None:
    assert [format_count(n, "time") for n in range(3)] == [
        "0 times",
        "1 time",
        "2 times",
    ]
    assert format_count(2, "prefetch", "es") == "2 prefetches"


def test_format_table_puts_names_left_and_numbers_right() -> None:
    rows = [["name", "size", "-"], ["a", "10", ""]]
    assert format_table(rows) == ["name  size  -", "a       10"]
    assert format_table(rows, 3) == ["name  size  -", "a     10"]
    assert format_table([]) == []
