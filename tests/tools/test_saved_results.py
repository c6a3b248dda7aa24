# SPDX-License-Identifier: Apache-2.0
"""Tests of where figures of a machine are saved: in one file for each kind of machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cumem.tools import saved_results

# No version of Python changes what these tests show.
pytestmark = pytest.mark.any_python


@dataclasses.dataclass
class Unit:
    """Stands for a real Device."""

    name: str = "NVIDIA H200"
    pci_bus_id: str = "0000:1b:00.0"


def test_key_differs_between_machines(emulated, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = saved_results.result_path(Unit(), "bench")
    assert path == saved_results.result_path(Unit(), "bench")
    assert path.parent == tmp_path / "cumem"
    assert path != saved_results.result_path(Unit(name="NVIDIA H100"), "bench")
    monkeypatch.setattr(saved_results, "_processor", lambda: "another")
    assert path != saved_results.result_path(Unit(), "bench")


def test_home_is_used_where_no_cache_directory_is_named(
    emulated, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = saved_results.result_path(Unit(), "bench")
    assert path.parent == tmp_path / ".cache" / "cumem"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    path = saved_results.result_path(Unit(), "bench")
    assert path.parent == tmp_path / ".cache" / "cumem"
    assert not saved_results.has_results("bench")


def test_nothing_is_kept_where_there_is_no_home(emulated, monkeypatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "nowhere")
    assert saved_results.result_path(Unit(), "bench") is None
    assert not saved_results.has_results("bench")
