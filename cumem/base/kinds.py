# SPDX-License-Identifier: Apache-2.0
"""The kinds of memory that pools can have, as csrc/runtime/runtime.h lists them."""

from __future__ import annotations

from typing import Literal

import numpy as np

from cumem import _core

#: The names of the kinds of memory, which the constructors take.
Kind = Literal["pinned", "mapped", "managed", "device"]


#: The properties of each kind. Ordinary memory is left out, since no pool has it.
KINDS = {kind: facts for kind, facts in _core._KINDS.items() if kind != "pageable"}
#: The kinds in the order in which tables list them: memory of the device comes first.
DEVICE_FIRST = tuple(sorted(KINDS, key=lambda kind: not KINDS[kind].on_device))
PAGE_LOCKED = tuple(kind for kind, facts in KINDS.items() if facts.page_locked)

# Flags of cudaHostAlloc, cudaHostRegister and cudaMallocManaged.
PORTABLE, MAPPED, WRITE_COMBINED = 1, 2, 4
REGISTER_READ_ONLY = 8
ATTACH_GLOBAL, ATTACH_HOST = 1, 2


def is_on_device(kind: str) -> bool:
    """Return whether only a device can reach memory of this kind."""
    return kind in KINDS and KINDS[kind].on_device


def check_kind(kind: object) -> None:
    """Raise a TypeError or ValueError if a pool cannot be of this kind."""
    if isinstance(kind, str) and kind in KINDS:
        return
    *first, last = (f'"{each}"' for each in KINDS)
    expected = f"{', '.join(first)} or {last}"
    hint = kind_hint(kind)
    more = "" if hint is None else f": {hint}"
    if not isinstance(kind, str):
        raise TypeError(f"kind must be {expected}, not {type(kind).__name__}{more}")
    raise ValueError(f"kind must be {expected}, not {kind!r}{more}")


#: Other names that people use for the kinds.
_NAMES = {
    "cpu": "pinned",
    "host": "pinned",
    "page-locked": "pinned",
    "pageable": "pinned",
    "pin": "pinned",
    "cuda": "device",
    "gpu": "device",
    "unified": "managed",
    "uvm": "managed",
    "zero-copy": "mapped",
    "zerocopy": "mapped",
}


def kind_named(value: object) -> str | None:
    """Return the kind that somebody means by any of its names, or None."""
    text = value if isinstance(value, str) else ""
    if type(value).__name__ == "device" and hasattr(value, "type"):  # a torch.device
        text = str(value)
    text = text.strip().lower().replace("_", "-")
    if text in KINDS:
        return text
    return _NAMES.get(text.partition(":")[0])


def kind_hint(value: object) -> str | None:
    """Return advice for an error about something that is not a kind, or None."""
    kind = kind_named(value)
    if kind is not None:
        which = str(value).strip()
        place = f', and device="{which}"' if which.startswith("cuda:") else ""
        return f'write kind="{kind}"{place}'
    if isinstance(value, bool):
        return None
    if type(value).__name__ in ("Device", "int"):
        return "a device is given by device="
    if type(value).__name__ in ("Pool", "Stream"):
        return f"it is given by {type(value).__name__.lower()}="
    if type(value).__module__ != "torch":
        if not isinstance(value, (str, type, np.dtype)):
            return None
        try:
            np.dtype(value)
        except TypeError:
            return None
    return "a dtype is given by dtype="
