# SPDX-License-Identifier: Apache-2.0
"""Finds the package's functions that a call runs. Calls in users' loops must run none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import cumem

PACKAGE = Path(cumem.__file__).parent


def functions_of_the_package(run: Callable[[], object]) -> list[str]:
    """Return the Python functions that a call runs in its thread, by file and name."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.append(f"{path.relative_to(PACKAGE)}: {frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found
