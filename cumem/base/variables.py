# SPDX-License-Identifier: Apache-2.0
"""Reads the environment's variables for cumem, and finds those that are misspelt.

A misspelt variable has no effect: a limit does not apply, or a record is not written.
So a warning names variables that look misspelt.
"""

from __future__ import annotations

import difflib
import os

#: The variables that the package and its tools read.
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
#: The variables of the build, of tests and of benchmarks, which run the package too.
OTHERS = frozenset(
    {
        *("CUMEM_BUILT", "CUMEM_COMMIT", "CUMEM_CUDA_HOME", "CUMEM_DEBUG"),
        *("CUMEM_HYPOTHESIS", "CUMEM_LIMITED_API", "CUMEM_SANITIZE", "CUMEM_TESTING"),
        *("CUMEM_TESTS_CORE", "CUMEM_TRACE", "CUMEM_TRAINING"),
    }
)


_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})
#: The words that a variable for a switch takes, for messages.
SWITCH_WORDS = "1, true, yes or on, or 0, false, no or off"


def read_switch(text: str) -> bool:
    """Return whether the text of a variable switches its feature on.

    All switches take the same words. Case and blanks around the word do not matter. The
    caller has to treat an empty variable as unset before it calls this.

    Raises
    ------
    ValueError
        If `text` is any other word. The caller turns this into a message that names the
        variable and lists `SWITCH_WORDS`.
    """
    word = text.strip().lower()
    if word not in _YES | _NO:
        raise ValueError(text)
    return word in _YES


def misspelt() -> dict[str, str | None]:
    """Return variables that are set but never read, each with the most similar name."""
    found: dict[str, str | None] = {}
    for name in sorted(os.environ):
        upper = name.upper()
        if not upper.startswith("CUMEM_") or name in READ | OTHERS:
            continue
        near = difflib.get_close_matches(upper, sorted(READ), 1, 0.75)
        found[name] = near[0] if near else None
    return found


def advice(found: dict[str, str | None]) -> str:
    """Return a text that says what to do about each of these variables."""
    said = (
        f"{name}: write {near}"
        if near
        else f"{name} is not a variable of cumem's: remove it"
        for name, near in found.items()
    )
    return "; ".join(said)
