# SPDX-License-Identifier: Apache-2.0
"""Variables of the environment whose names are misspelt."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from support import programs, rules, session

import cumem
from cumem import devices, variables
from cumem.doctor import checks

ROOT = Path(__file__).parent.parent


@pytest.fixture
def clean(monkeypatch) -> pytest.MonkeyPatch:
    """Nothing is told of yet."""
    monkeypatch.setattr(devices, "_told", set())
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("CUMEM_BACKND", "CUMEM_BACKEND"),
        ("CUMEM_LIMITS_PINNED", "CUMEM_LIMIT_PINNED"),
        ("CUMEM_EMULATED_DEVICE", "CUMEM_EMULATED_DEVICES"),
        ("cumem_record", "CUMEM_RECORD"),
        ("CUMEM_TRANSFER_THREAD", "CUMEM_TRANSFER_THREADS"),
        ("CUMEM_XYZ", None),
    ],
)
def test_misspelt_variable_is_told_once_with_the_nearest_name(
    clean, name: str, near: str | None
) -> None:
    clean.setenv(name, "1")
    expected = f"{name}: write {near}" if near else f"{name} is the name of none"
    with pytest.warns(UserWarning, match=re.escape(expected)), session.opened():
        cumem.empty(1)
    with warnings.catch_warnings(), session.opened():
        warnings.simplefilter("error")
        cumem.empty(1)


def test_warning_that_was_made_an_error_comes_again(clean) -> None:
    with session.opened():
        clean.setenv("CUMEM_LIMIT_PINED", "1GiB")
        for _ in range(2):
            with pytest.raises(UserWarning, match="write CUMEM_LIMIT_PINNED"):
                cumem.empty(1)
        clean.delenv("CUMEM_LIMIT_PINED")
        cumem.empty(1)


def test_variables_that_are_read_are_not_told_of(clean) -> None:
    for name in variables.READ | variables.OTHERS:
        clean.setenv(name, "")
    clean.setenv("CUMEMORY", "1")
    assert variables.misspelt() == {}


def test_doctor_tells_of_misspelt_variables() -> None:
    done = programs.run("-m", "cumem", "doctor", CUMEM_LIMIT_PINED="1GiB")
    assert "nothing reads CUMEM_LIMIT_PINED" in done.stdout
    assert "write CUMEM_LIMIT_PINNED" in done.stdout
    assert done.returncode == 1
    (finding,) = checks.check_variables({"misspelt": {"CUMEM_XYZ": None}})
    assert finding.status == "note"
    assert not list(checks.check_variables({"misspelt": {}}))


@pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="the sources are not there")
def test_variables_are_those_that_the_sources_name() -> None:
    named: set[str] = set()
    for folder, pattern in (("cumem", "*.py"), ("csrc", "*.[ch]")):
        for path in (ROOT / folder).rglob(pattern):
            named |= set(re.findall(r"\bCUMEM_[A-Z_]+[A-Z]\b", path.read_text()))
    known = variables.READ | variables.OTHERS
    rules.check_none(sorted(named - known), "in no list of cumem/variables.py:")
    rules.check_none(sorted(variables.READ - named), "nothing reads or tells of:")
