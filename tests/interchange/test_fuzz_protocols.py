# SPDX-License-Identifier: Apache-2.0
"""A short run of the protocol fuzzer; fuzz_protocols.py makes the long ones."""

from __future__ import annotations

import fuzz_protocols
import pytest

# These tests are about the C core, which every version of Python runs unchanged.
pytestmark = pytest.mark.any_python


def test_changed_descriptions_are_refused_or_read_right(emulated) -> None:
    counts = fuzz_protocols.run(200_000, seed=20)
    assert counts["calls"] == 200_000
    assert counts["accepted"] >= 0.3 * counts["calls"]
    assert counts["refused"] >= 0.3 * counts["calls"]
    assert counts["read back"] > 0
