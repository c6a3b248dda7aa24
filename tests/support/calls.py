# SPDX-License-Identifier: Apache-2.0
"""Find the functions of the package that a call runs: calls in users' loops run none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import cumem

PACKAGE = Path(cumem.__file__).parent


def functions_of_the_package(run: Callable[[], object]) -> list[str]:
    """List the Python functions that a call runs in its own thread, by file and name."""
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
