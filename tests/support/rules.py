# SPDX-License-Identifier: Apache-2.0
"""Helps tests of rules about texts, each of which names everything that breaks its rule."""

from __future__ import annotations

from collections.abc import Iterable


def check_none(offences: Iterable[object], hint: str = "") -> None:
    """Fail if there are offences, with a hint and a line for each of them."""
    lines = [str(offence) for offence in offences]
    assert not lines, "\n".join([hint or "not allowed:", *lines])
