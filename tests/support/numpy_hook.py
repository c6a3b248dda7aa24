# SPDX-License-Identifier: Apache-2.0
"""A plug-in for pytest that runs tests with every array in pinned memory.

python -m pytest -c /dev/null -p support.numpy_hook --pyargs numpy._core.tests.test_api
"""

from __future__ import annotations

from typing import Any

import cumem


def pytest_configure() -> None:
    """Begin before pytest imports the first test file."""
    cumem.numpy_pinned.enable(0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the number of pinned arrays, since a run without any would look the same."""
    stats = cumem.default_pool("pinned").stats()
    terminalreporter.write_line(f"pinned arrays: {stats.allocation_count}")
