# SPDX-License-Identifier: Apache-2.0
"""Sets sizes and counts for copies, for tests that need small pieces.

Users cannot set them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cumem.transfers import tuning
from cumem.units import parse_nbytes

#: In the extension the numbers have the names of the fields of `cm_tuning` in
#: csrc/transfer/plan/tuning.h. These two names differ from those here.
_FIELDS = {"threads": "thread_count", "depth": "slot_count"}


def tune(**values: int | str | None) -> dict[str, int | None]:
    """Set numbers for copies from now on, where None means the default.

    Parameters
    ----------
    threads, depth, chunk_nbytes, ring_nbytes, quick_nbytes, bounce_nbytes : optional
    staged_up_nbytes, staged_down_nbytes : optional
        The numbers. Numbers of bytes may be texts.

    Returns
    -------
    dict
        The numbers that were set before.
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
    """Set numbers for copies inside a block."""
    before = tune(**values)
    try:
        yield
    finally:
        tuning.change(tuning.CHOSEN, before)
