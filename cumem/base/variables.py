# SPDX-License-Identifier: Apache-2.0
"""The variables of the environment that cumem reads, and those that look like one of them.

A variable whose name is misspelt changes nothing, so that a limit is not one and a record
is never written. Whoever sets one is told.
"""

from __future__ import annotations

import difflib
import os

#: By the package and its tools, when they run.
READ = frozenset(
    {
        *("CUMEM_BACKEND", "CUMEM_DIRECT", "CUMEM_LEAKS"),
        *("CUMEM_NVTX", "CUMEM_RECORD"),
        *("CUMEM_EMULATED_CONCURRENT", "CUMEM_EMULATED_DELAY_US"),
        *("CUMEM_EMULATED_DEVICES", "CUMEM_EMULATED_DRIVER"),
        *("CUMEM_EMULATED_MEMORY", "CUMEM_EMULATED_PEERS", "CUMEM_EMULATED_SEED"),
        *("CUMEM_LIMIT_DEVICE", "CUMEM_LIMIT_MANAGED", "CUMEM_LIMIT_MAPPED"),
        "CUMEM_LIMIT_PINNED",
        *("CUMEM_TRANSFER_RING", "CUMEM_TRANSFER_THREADS"),
    }
)
#: By the build, by tests and by benchmarks, in whose processes the package runs as well.
OTHERS = frozenset(
    {
        *("CUMEM_COMMIT", "CUMEM_CUDA_HOME", "CUMEM_DEBUG", "CUMEM_HYPOTHESIS"),
        *("CUMEM_LIMITED_API", "CUMEM_SANITIZE", "CUMEM_TESTING", "CUMEM_TESTS_CORE"),
        *("CUMEM_TRACE", "CUMEM_TRAINING"),
    }
)


_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})
#: What a variable that switches something takes, as messages name it.
SWITCH_WORDS = "1, true, yes or on, or 0, false, no or off"


def read_switch(text: str) -> bool:
    """Whether a variable switches something on: all that do know the same words.

    Capital letters and blanks round the word do not matter. An empty variable is as one
    that is not set, which the caller asks before.

    Raises
    ------
    ValueError
        For any other word. The caller names the variable and `SWITCH_WORDS`.
    """
    word = text.strip().lower()
    if word not in _YES | _NO:
        raise ValueError(text)
    return word in _YES


def misspelt() -> dict[str, str | None]:
    """Variables that are set and that nothing reads, each with the name that is nearest."""
    found: dict[str, str | None] = {}
    for name in sorted(os.environ):
        upper = name.upper()
        if not upper.startswith("CUMEM_") or name in READ | OTHERS:
            continue
        near = difflib.get_close_matches(upper, sorted(READ), 1, 0.75)
        found[name] = near[0] if near else None
    return found


def advice(found: dict[str, str | None]) -> str:
    """What to do about them, in one sentence each."""
    said = (
        f"{name}: write {near}" if near else f"{name} is the name of none"
        for name, near in found.items()
    )
    return "; ".join(said)
