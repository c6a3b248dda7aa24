# SPDX-License-Identifier: Apache-2.0
"""The kinds of memory that pools are of, as csrc/runtime/runtime.h lists them."""

from __future__ import annotations

from typing import NamedTuple

from cumem import _core


class KindFacts(NamedTuple):
    """What memory of a kind is, and the flags that it is made with unless asked."""

    page_locked: bool
    migrates: bool
    on_device: bool
    flags: int


KINDS = {
    kind: KindFacts(*facts)
    for kind, facts in _core._KINDS.items()
    if kind != "pageable"
}
#: The same in the order of tables.
DEVICE_FIRST = tuple(sorted(KINDS, key=lambda kind: not KINDS[kind].on_device))
PAGE_LOCKED = tuple(kind for kind, facts in KINDS.items() if facts.page_locked)

# Flags of cudaHostAlloc, cudaHostRegister and cudaMallocManaged.
PORTABLE, MAPPED, WRITE_COMBINED = 1, 2, 4
REGISTER_READ_ONLY = 8
ATTACH_GLOBAL, ATTACH_HOST = 1, 2


def is_on_device(kind: str) -> bool:
    """Is it memory that a device alone reaches? ``"pageable"`` and others are not."""
    return kind in KINDS and KINDS[kind].on_device


def check_kind(kind: object) -> None:
    """TypeError or ValueError where it is none that a pool can be of."""
    if isinstance(kind, str) and kind in KINDS:
        return
    *first, last = (f'"{each}"' for each in KINDS)
    expected = f"{', '.join(first)} or {last}"
    if not isinstance(kind, str):
        raise TypeError(f"kind must be {expected}, not {type(kind).__name__}")
    raise ValueError(f"kind must be {expected}, not {kind!r}")
