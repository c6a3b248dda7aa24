# SPDX-License-Identifier: Apache-2.0
"""Where figures of a machine are kept: one file for each kind of machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cumem.tools import kept

# The C core alone decides what is tested here; Python only calls it.
pytestmark = pytest.mark.any_python


@dataclasses.dataclass
class Unit:
    """As a Device that is real."""

    name: str = "NVIDIA H200"
    pci_bus_id: str = "0000:1b:00.0"


def test_key_tells_machines_apart(emulated, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = kept.kept_path(Unit(), "bench")
    assert path == kept.kept_path(Unit(), "bench")
    assert path.parent == tmp_path / "cumem"
    assert path != kept.kept_path(Unit(name="NVIDIA H100"), "bench")
    monkeypatch.setattr(kept, "_processor", lambda: "another")
    assert path != kept.kept_path(Unit(), "bench")


def test_home_is_used_where_no_cache_directory_is_named(
    emulated, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept.kept_path(Unit(), "bench").parent == tmp_path / ".cache" / "cumem"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert kept.kept_path(Unit(), "bench").parent == tmp_path / ".cache" / "cumem"
    assert not kept.has_kept("bench")


def test_nothing_is_kept_where_there_is_no_home(emulated, monkeypatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "nowhere")
    assert kept.kept_path(Unit(), "bench") is None
    assert not kept.has_kept("bench")
