# SPDX-License-Identifier: Apache-2.0
"""Imports scripts of the tree that belong to no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load(path: Path) -> ModuleType:
    """Import a script, such as one of benchmarks/, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module
