# SPDX-License-Identifier: Apache-2.0
"""Shared by tests of records: the number of a line, and no record that is left running."""

from __future__ import annotations

import gc
import sys

import pytest

from cumem.recording import record


@pytest.fixture(autouse=True)
def nothing_runs():
    yield
    gc.collect()
    assert record.open_records() == []


def here() -> int:
    """Return the number of the caller's line."""
    return sys._getframe(1).f_lineno
