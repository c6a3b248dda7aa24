# SPDX-License-Identifier: Apache-2.0
"""What is said of a ``with`` block of a stream, pool or device that ends wrongly."""

from __future__ import annotations

from typing import NoReturn


def refuse_stray_end(what: str) -> NoReturn:
    """RuntimeError: a `what`, such as a stream, ends a block that nobody began."""
    raise RuntimeError(f"the {what} is not entered here, or its block ended elsewhere")


def refuse_end_elsewhere(what: str) -> NoReturn:
    """RuntimeError: the block of a `what` ended in another context than it began in."""
    raise RuntimeError(
        f"the {what} was entered in another thread or context: a with block must end "
        "where it began; it is current in neither of them now"
    )
