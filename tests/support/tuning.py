# SPDX-License-Identifier: Apache-2.0
"""Values of copies that users cannot set, for tests that need small pieces and few."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cumem.transfers import tuning
from cumem.units import parse_nbytes

#: By their names in the extension (`cm_tuning` in csrc/transfer/plan/tuning.h).
_FIELDS = {"threads": "thread_count", "depth": "slot_count"}


def tune(**values: int | str | None) -> dict[str, int | None]:
    """Have copies made so from now on; None for the default. Returns what held before.

    Parameters
    ----------
    threads, depth, chunk_nbytes, ring_nbytes, quick_nbytes, bounce_nbytes : optional
    staged_up_nbytes, staged_down_nbytes : optional
        Numbers; bytes may be a text.
    """
    fields = {
        _FIELDS.get(name, name): parse_nbytes(n) if isinstance(n, str) else n
        for name, n in values.items()
    }
    before = {name: tuning.layers[tuning.CHOSEN].get(name) for name in fields}
    tuning.change(tuning.CHOSEN, fields)
    return before


@contextmanager
def tuned(**values: int | str | None) -> Iterator[None]:
    """The same for a block."""
    before = tune(**values)
    try:
        yield
    finally:
        tuning.change(tuning.CHOSEN, before)
