# SPDX-License-Identifier: Apache-2.0
"""Finds events in records, for tests of recording."""

from __future__ import annotations

from typing import Any

import numpy as np

import cumem
from cumem.recording.events import KINDS, OPS, Log
from support.lines import here, nothing_runs  # noqa: F401


def rows(log: Log, op: str, kind: str | None = None) -> np.ndarray[Any, Any]:
    """Return the events of an operation, and only those of `kind` if that is given."""
    chosen = log.events["op"] == OPS.index(op)
    if kind is not None:
        chosen &= log.events["kind"] == KINDS.index(kind)
    return log.events[chosen]


def transfer_of(rec: cumem.Record) -> Any:
    """Return the only transfer of a record."""
    (event,) = rows(rec.log, "transfer")
    return event
