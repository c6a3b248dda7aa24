# SPDX-License-Identifier: Apache-2.0
"""What tests of records share: whose line it is, and that no record is left running."""

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
    """The caller's line."""
    return sys._getframe(1).f_lineno
