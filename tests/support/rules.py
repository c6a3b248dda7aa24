# SPDX-License-Identifier: Apache-2.0
"""Rules that texts keep: one test a rule, which names all that break it."""

from __future__ import annotations

from collections.abc import Iterable


def check_none(offences: Iterable[object], hint: str = "") -> None:
    """Fail with a line of each offence, all of them."""
    lines = [str(offence) for offence in offences]
    assert not lines, "\n".join([hint or "not allowed:", *lines])
