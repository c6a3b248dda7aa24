# SPDX-License-Identifier: Apache-2.0
"""Tests of misspelt environment variables, and of the words that switch things.

If nothing reads a variable whose name begins with `CUMEM_`, one warning is shown. The later
tests check that all switches know the same words, such as "yes" and "off".
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from support import programs, rules, session

import cumem
from cumem.base import variables
from cumem.devices import device as device_module
from cumem.doctor import checks
from cumem.files import raw

# What these tests show is the same under every version of Python.
pytestmark = pytest.mark.any_python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clean(monkeypatch) -> pytest.MonkeyPatch:
    """Forget which variables a warning has named."""
    monkeypatch.setattr(device_module, "_warned", set())
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
def test_misspelt_variable_is_reported_once_with_the_nearest_name(
    clean, name: str, near: str | None
) -> None:
    clean.setenv(name, "1")
    expected = (
        f"{name}: write {near}"
        if near
        else f"{name} is not a variable of cumem's: remove it"
    )
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


def test_variables_that_are_read_are_not_reported(clean) -> None:
    for name in variables.READ | variables.OTHERS:
        clean.setenv(name, "")
    clean.setenv("CUMEMORY", "1")
    assert variables.misspelt() == {}


def test_doctor_reports_misspelt_variables() -> None:
    done = programs.run("-m", "cumem", "doctor", CUMEM_LIMIT_PINED="1GiB")
    assert "nothing reads CUMEM_LIMIT_PINED" in done.stdout
    assert "write CUMEM_LIMIT_PINNED" in done.stdout
    assert done.returncode == 1
    (finding,) = checks.check_variables({"misspelt": {"CUMEM_XYZ": None}})
    assert finding.status == "note"
    assert not list(checks.check_variables({"misspelt": {}}))


@pytest.mark.skipif(
    not (ROOT / "csrc").is_dir(), reason="the C sources are not beside the tests"
)
def test_variables_are_those_that_the_sources_name() -> None:
    named: set[str] = set()
    for folder, pattern in (("cumem", "*.py"), ("csrc", "*.[ch]")):
        for path in (ROOT / folder).rglob(pattern):
            named |= set(re.findall(r"\bCUMEM_[A-Z_]+[A-Z]\b", path.read_text()))
    known = variables.READ | variables.OTHERS
    rules.check_none(sorted(named - known), "not in a list of cumem/base/variables.py:")
    rules.check_none(sorted(variables.READ - named), "no source names these:")


YES = ["1", "true", "Yes", "ON", " 1 "]
NO = ["0", "false", "No", "OFF", "off "]


@pytest.mark.parametrize(
    ("text", "is_on"),
    [*((text, True) for text in YES), *((text, False) for text in NO)],
)
def test_switches_know_the_same_words(clean, text: str, is_on: bool) -> None:
    assert variables.read_switch(text) is is_on
    clean.setenv("CUMEM_EMULATED_PEERS", text)
    clean.setenv("CUMEM_EMULATED_CONCURRENT", text)
    settings = device_module.read_settings()
    assert settings.has_peers is settings.is_concurrent is is_on
    clean.setenv("CUMEM_DIRECT", text)
    assert raw._direct_number(None) == 1 + is_on
    assert (
        bool(list(checks.check_nvtx(NVTX | {"environment": environment(text)})))
        is is_on
    )


NVTX = {"tool_listens": True}


def environment(text: str) -> dict[str, str | None]:
    return {"CUMEM_NVTX": text, "NVTX_INJECTION64_PATH": None}


def test_empty_switches_are_as_unset_ones(clean) -> None:
    for name in ("PEERS", "CONCURRENT"):
        clean.setenv(f"CUMEM_EMULATED_{name}", "")
    settings = device_module.read_settings()
    assert settings.has_peers is settings.is_concurrent is True
    clean.setenv("CUMEM_DIRECT", "")
    assert raw._direct_number(None) == 0
    assert not list(checks.check_nvtx(NVTX | {"environment": environment("")}))


LEAK = "import cumem; kept = cumem.empty_pinned(3)"


@pytest.mark.parametrize("text", [*NO, ""])
def test_leaks_that_are_switched_off_are_not_reported(text: str) -> None:
    assert programs.run("-c", LEAK, CUMEM_LEAKS=text).stderr == ""


@pytest.mark.parametrize("text", YES)
def test_leaks_that_are_switched_on_are_reported(text: str) -> None:
    assert "cumem at exit" in programs.run("-c", LEAK, CUMEM_LEAKS=text).stderr


def test_word_that_no_switch_knows_is_a_warning_with_those_it_knows() -> None:
    said = programs.run("-c", LEAK, CUMEM_LEAKS="nein").stderr
    assert "CUMEM_LEAKS must be 1, true, yes or on, or 0, false, no or off" in said
    assert "not 'nein': leaks are not reported" in said
    assert "cumem at exit" not in said
