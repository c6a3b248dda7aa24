# SPDX-License-Identifier: Apache-2.0
"""What a forked child finds of the package's own modules.

Most modules are loaded at the first use of a name. A thread that loads one holds its import
lock. Where another thread forks meanwhile, the child inherits the lock without the thread
that would let go of it, and an import there would wait for ever. So whatever a child may
need is loaded before a process with several threads forks. Where a thread does not finish
loading a module of ours, the child drops the lock and what there is of the module, and
loads it anew.
"""

import os
import sys
import time
from _thread import get_ident
from collections.abc import Callable, Iterator
from contextlib import suppress

#: What a fork waits for a thread that is loading one of our modules. Loading takes
#: milliseconds; a thread that takes longer may be waiting for the one that forks.
_PATIENCE_S = 1.0
#: The rooms whose modules a child may need. The tools measure devices or draw, and the
#: integrations import other libraries; whoever uses one of those has loaded it before.
_ROOMS = (
    *("base", "buffers", "interchange", "devices", "pools", "files", "transfers"),
    "recording",
)
#: What functions of the package import where they need it.
_WITHIN_FUNCTIONS = ("inspect", "json", "textwrap")

_is_loaded = False
#: How many threads are between what is called before a fork and what is called after it.
_fork_count = 0
#: What modules that were loaded just before a fork want to be called at forks.
_registered_late: list[dict[str, Callable[..., object]]] = []


def before_fork(load: Callable[[str], object]) -> None:
    """Load the modules of the package by `load`, once, if there are threads that might be
    loading one when the process forks.
    """
    global _is_loaded, _fork_count
    _fork_count += 1
    if _is_loaded or len(sys._current_frames()) == 1:
        return
    end = time.monotonic() + _PATIENCE_S
    while _held_by_others():
        if time.monotonic() > end:
            return
        time.sleep(0.001)
    # A module that is loaded now may ask to be called before forks, to take its lock, and
    # after them, to let go of it. For this fork the one is over: both begin with the next.
    register = os.register_at_fork
    vars(os)["register_at_fork"] = _register_late
    try:
        for module in _modules():
            _try(load, module)
        for module in _WITHIN_FUNCTIONS:
            _try(__import__, module)
    finally:
        vars(os)["register_at_fork"] = register
    _is_loaded = True


def _modules() -> Iterator[str]:
    """The extension, whose names the face takes over, and every module of the rooms."""
    yield "_core"
    home = os.path.dirname(os.path.dirname(__file__))
    for room in _ROOMS:
        for folder, _, files in os.walk(os.path.join(home, room)):
            inside = os.path.relpath(folder, home).replace(os.sep, ".")
            for name, ending in map(os.path.splitext, sorted(files)):
                if ending == ".py":
                    yield inside if name == "__init__" else f"{inside}.{name}"


def _register_late(**hooks: Callable[..., object]) -> None:
    _registered_late.append(hooks)


def after_fork_in_parent() -> None:
    """Register what could not be before the fork, unless another thread is forking: of
    its fork too only the end would be told, and a lock let go of that nobody took.
    """
    global _fork_count
    _fork_count -= 1
    while _registered_late and _fork_count == 0:
        os.register_at_fork(**_registered_late.pop(0))


def after_fork_in_child() -> None:
    """Let go of what threads that are not here were loading."""
    global _fork_count
    _fork_count = 1  # the others that were forking are not here
    after_fork_in_parent()
    for name in _held_by_others():
        _locks().pop(name, None)
        half_loaded = getattr(sys.modules.get(name), "__spec__", None)
        if half_loaded is not None and getattr(half_loaded, "_initializing", False):
            del sys.modules[name]


def _try(load: Callable[[str], object], module: str) -> None:
    # The fork goes on after an error: whoever uses the module is told by the import there.
    with suppress(Exception):
        load(module)


def _locks() -> dict[str, Callable[[], object]]:
    """The import locks of modules that are being loaded: name to weak reference."""
    return getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})


def _held_by_others() -> list[str]:
    """Names of our modules that threads other than this one are loading."""
    return [
        name
        for name, reference in list(_locks().items())
        if name.startswith("cumem.")
        and getattr(reference(), "owner", None) not in (None, get_ident())
    ]
