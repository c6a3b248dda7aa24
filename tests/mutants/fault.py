# SPDX-License-Identifier: Apache-2.0
"""What is known of a fault that is put into the sources."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault, and what run.py needs to try it."""

    name: str
    file: str  # the file of csrc/ that the fault is put into
    what: str  # what goes wrong with the fault, as a sentence
    old: str
    new: str
    tests: list[str]
    how: str = "fails"
