# SPDX-License-Identifier: Apache-2.0
"""The operations that threads do at random, in a module for each room of the package.

Copies of rows by index have a module of their own.

Each module adds its functions to `torture.registry.OPERATIONS`. A seed chooses an operation
by its position there, so the order of these imports must stay as it is. In another order
the seeds of earlier runs would choose other operations.
"""

from __future__ import annotations

import importlib

from torture.registry import OPERATIONS

__all__ = ["OPERATIONS"]

for room in (
    *("transfers", "buffers", "interchange", "lifetimes"),
    *("pools", "devices", "files", "processes", "rows"),
):
    importlib.import_module(f"{__name__}.{room}")
