# SPDX-License-Identifier: Apache-2.0
"""Errors for ``with`` blocks of a stream, pool or device that end in the wrong place."""

from __future__ import annotations

from typing import NoReturn


def refuse_stray_end(what: str) -> NoReturn:
    """Raise a RuntimeError, because no block of the `what` was begun here."""
    raise RuntimeError(f"the {what} is not entered here, or its block ended elsewhere")


def refuse_end_elsewhere(what: str) -> NoReturn:
    """Raise a RuntimeError, because a block ended in another context than it began in."""
    raise RuntimeError(
        f"the {what} was entered in another thread or context: a with block must end "
        "where it began; it is current in neither of them now"
    )
