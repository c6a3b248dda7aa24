# SPDX-License-Identifier: Apache-2.0
"""Makes logs of records by hand, for tests of code that reads records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from cumem.recording.events import EVENT, KINDS, OPS, Frame, Log


def rows(events: Iterable[dict[str, Any]]) -> np.ndarray:
    """Make rows of a log from dicts.

    In the dicts `op` and the kinds are names. Fields that a dict lacks become 0.
    """
    events = list(events)
    made = np.zeros(len(events), EVENT)
    for row, event in zip(made, events, strict=True):
        kind = event.get("kind", "device")
        fields = {"source_kind": kind, "device": 0} | event | {"kind": kind}
        fields["op"] = OPS.index(fields["op"])
        fields["kind"] = KINDS.index(kind)
        fields["source_kind"] = KINDS.index(fields["source_kind"])
        for name, value in fields.items():
            row[name] = value
    return made


def made(
    events: Iterable[dict[str, Any]],
    living: Iterable[dict[str, Any]] = (),
    stacks: Iterable[tuple[Frame, ...]] = (),
    duration_ns: int = 1000,
    lost_count: int = 0,
    backend: str = "emulated",
) -> Log:
    """Make a log of these events, of blocks that are alive before, and of stacks."""
    return Log(
        events=rows(events),
        living=rows(living),
        stacks=[(), *stacks],
        tags=("",),
        threads={1: "MainThread"},
        lost_count=lost_count,
        begin_s=0.0,
        duration_ns=duration_ns,
        machine={"backend": backend, "devices": ["a device"]},
    )
