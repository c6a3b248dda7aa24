# SPDX-License-Identifier: Apache-2.0
"""A plug-in for pytest: every array of the tests that it runs lives in pinned memory.

python -m pytest -c /dev/null -p support.numpy_hook --pyargs numpy._core.tests.test_api
"""

from __future__ import annotations

from typing import Any

import cumem


def pytest_configure() -> None:
    """Begin before the first test file is imported."""
    cumem.numpy_pinned.enable(0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many arrays there were, since no arrays at all would look like a success."""
    stats = cumem.default_pool("pinned").stats()
    terminalreporter.write_line(f"pinned arrays: {stats.allocation_count}")
