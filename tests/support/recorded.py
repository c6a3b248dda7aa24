# SPDX-License-Identifier: Apache-2.0
"""Parts of records that tests look at."""

from __future__ import annotations

from typing import Any

import numpy as np

import cumem
from cumem.recording.events import KINDS, OPS, Log
from support.lines import here, nothing_runs  # noqa: F401


def rows(log: Log, op: str, kind: str | None = None) -> np.ndarray[Any, Any]:
    chosen = log.events["op"] == OPS.index(op)
    if kind is not None:
        chosen &= log.events["kind"] == KINDS.index(kind)
    return log.events[chosen]


def transfer_of(rec: cumem.Record) -> Any:
    (event,) = rows(rec.log, "transfer")
    return event
