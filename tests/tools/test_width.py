# SPDX-License-Identifier: Apache-2.0
"""Tests that printed texts keep to the width of the terminal, and that figures have units.

The variable COLUMNS sets the width. The texts are those of answers, commands, help, tables
and errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from support import programs

import cumem
from cumem import doctor
from cumem import info as machine
from cumem.tools import cli
from cumem.tools.doctor.checks import Finding
from cumem.tools.notebook import html
from cumem.units import fit, format_table

# No version of Python changes what these tests show.
pytestmark = pytest.mark.any_python

WIDTHS = (40, 60, 80)


@pytest.fixture(params=WIDTHS)
def width(request, monkeypatch) -> int:
    """Set the width of the terminal, and return it."""
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def check(text: str, width: int) -> None:
    """Fail if a line of the text is wider than this."""
    wide = [line for line in text.splitlines() if len(line) > width]
    assert not wide, wide


def test_answers_keep_to_the_width(emulated, width: int) -> None:
    with cumem.record() as rec, cumem.tag("a rather long tag for a loader of images"):
        host = [cumem.empty_pinned(1 << 20, "u1") for _ in range(3)]
        device = cumem.zeros(1 << 20, "u1")
        cumem.copy(device, host[0])
        found: list[object] = [cumem.live()]
    pool = cumem.default_pool("pinned")
    found += [cumem.live(), cumem.stats(), pool.stats(), pool.snapshot()]
    found += [rec.summary(), rec.leaks(), rec.top(), rec.peak(), rec.diff(rec)]
    found += [cumem.memory_info(), cumem.memory_info("host"), cumem.who_holds(device)]
    found += [cumem.explain(device, host[0]), cumem.recommend(1 << 20)]
    found += [cumem.configure()]
    for each in found:
        check(str(each), width)
        check(repr(each), width)


@pytest.mark.parametrize(
    "command", [("info",), ("doctor",), ("bench", "--quick")], ids=" ".join
)
def test_commands_keep_to_the_width(width: int, command: tuple[str, ...]) -> None:
    if command[0] == "bench" and width != 60:
        pytest.skip("bench takes seconds, so one width is enough")
    done = programs.run("-W", "ignore", "-m", "cumem", *command, COLUMNS=str(width))
    assert done.stdout
    check(done.stdout, width)


@pytest.mark.parametrize("columns", [60, 72, 80])
def test_help_of_every_command_keeps_to_the_width(monkeypatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    parser = cli._parser()
    check(parser.format_help(), columns)
    (commands,) = parser._subparsers._group_actions  # type: ignore[union-attr]
    assert set(commands.choices) == set(cli._COMMANDS)  # type: ignore[arg-type]
    for command in commands.choices.values():  # type: ignore[union-attr]
        check(command.format_help(), columns)


@pytest.mark.parametrize("columns", [60, 72, 80])
def test_large_numbers_and_long_names_keep_to_the_width(
    emulated, monkeypatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    facts = machine.collect()
    for device in facts["devices"]:
        device["name"] = "NVIDIA H200 NVL with a name that goes on and on MIG 1g.18gb"
        device["memory_total_nbytes"] = 3 << 42
        device["memory_free_nbytes"] = 2 << 42
    facts["devices"] *= 8
    check(fit(machine.render(facts)), columns)
    finding = Finding("host", "page-locking", "note", "word " * 40, "do " * 40)
    lines = doctor._lines(finding)
    check("\n".join(lines), columns)
    assert lines[0].split()[1:3] == ["page-locking", "word"]


def test_reprs_are_no_wider_than_80_columns(emulated) -> None:
    fields = [(f"field_number_{i}", "f8", (2, 2)) for i in range(12)]
    device = cumem.empty_device((64, 3, 32, 32), "f4")
    pool = cumem.Pool("device", limit="3 TiB")
    found: list[object] = [
        *(device, device[:, ::2], cumem.empty_managed((1024, 1024))),
        *(cumem.empty_pinned((4, 4), fields), cumem.asbuffer(np.ones((9, 9)))),
        *(pool, cumem.default_pool("device"), cumem.Workspace("10 MiB")),
        *(cumem.Stream(), cumem.Event(), cumem.current_stream(), cumem.Device(0)),
        *(cumem.register(np.ones(1 << 14)), cumem.PinnedCollate()),
        *(cumem.prefetch([np.ones(3)] * 100), cumem.prefetch(iter([]))),
        *(cumem.chunks(np.ones(3)), device.residency),
        cumem.copy_async(device, np.ones((64, 3, 32, 32), "f4")),
    ]
    for each in found:
        check(repr(each), 80)
    assert repr(device) == (
        "cumem.DeviceBuffer(shape=(64, 3, 32, 32), dtype=float32, nbytes=786432,\n"
        "                   device=0, emulated)"
    )
    small = cumem.empty_device(3)
    assert "\n" not in repr(small)


def test_table_that_is_too_wide_goes_on_below_with_its_names(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    rows = [["name", "one", "two", "three"], ["a", "1" * 6, "2" * 6, "3" * 6]]
    assert format_table(rows) == [
        *("name     one     two", "a     111111  222222", "", "name   three"),
        "a     333333",
    ]


def test_broken_lines_are_indented_and_sizes_stay_whole(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    text = "  held by other libraries now: 12.5 GiB\nshort"
    assert fit(text) == "  held by other libraries now:\n      12.5 GiB\nshort"


# -- units -------------------------------------------------------------------------------


def test_number_of_a_device_is_shown_without_bytes(emulated) -> None:
    assert html.value("device", 1) == "1"
    assert html.value("pinned", 1 << 20) == "1 MiB"
    kept = cumem.zeros(10)
    assert ">0 B<" not in re.sub(r"<th.*?</th>", "", cumem.live()._repr_html_())
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty_device(1 << 50, "u1")
    shown = re.search(
        r"device</th>\s*<td[^>]*>([^<]*)", caught.value._repr_html_() or ""
    )
    assert shown is not None
    assert shown[1] == "0"
    assert kept.nbytes == 80


def test_memory_info_prints_units(emulated) -> None:
    for info in (cumem.memory_info("host"), cumem.memory_info()):
        assert re.search(r"total=[\d.]+ [GMT]iB", repr(info))
        assert not re.search(r"=\d+[,)]", repr(info))
    assert "=None" in repr(cumem.types.HostMemory(None, None, None, None, None, 0, 0))


def test_out_of_memory_says_each_fact_on_a_line(emulated) -> None:
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty_device(1 << 50, "u1")
    first, *facts = str(caught.value).splitlines()
    assert first.endswith("out of memory")
    assert len(facts) >= 5
    assert facts[0].startswith("  asked for 1 PiB")
    assert facts[-2].startswith("  Tried: ")
    assert facts[-1] == f"  Advice: {caught.value.advice}"


@pytest.mark.parametrize("call", [cumem.array, cumem.asarray])
def test_errors_name_the_call_that_was_made(
    emulated, call: Callable[..., object]
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(np.array([1.5]), dtype="u1", kind="pinned")
    assert "as to fill" not in str(caught.value)
