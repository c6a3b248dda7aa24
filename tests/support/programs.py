# SPDX-License-Identifier: Apache-2.0
"""Runs Python programs on the emulated device, with the package that the tests use."""

from __future__ import annotations

import os
import subprocess
import sys


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and environment variables, and read its output."""
    shown = {
        "CUMEM_BACKEND": "emulated",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | shown | environment,
    )
