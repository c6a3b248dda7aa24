# SPDX-License-Identifier: Apache-2.0
"""Makes the package's modules usable in a forked child.

Most modules are imported when a name is first used, and the importing thread holds the
module's import lock. If another thread forks meanwhile, the child inherits the lock
without the thread that would release it, so that an import there would wait for ever.

So, before a process with several threads forks, every module that a child may need is
imported. If another thread is still importing one of our modules when the process forks,
the child drops the lock and the half-imported module, and imports it anew.
"""

import os
import sys
import time
from _thread import get_ident
from collections.abc import Callable, Iterator
from contextlib import suppress

#: How long a fork waits for a thread that is importing one of our modules. An import takes
#: milliseconds; a thread that takes longer may be waiting for the thread that forks.
_PATIENCE_S = 1.0
#: The rooms whose modules a child may need. The tools measure devices or draw, and the
#: integrations import other libraries; a program that uses those has imported them before.
_ROOMS = (
    *("base", "buffers", "interchange", "devices", "pools", "files", "transfers"),
    "recording",
)
#: Modules that functions of the package import when they need them.
_WITHIN_FUNCTIONS = ("inspect", "json", "textwrap")

_is_loaded = False
#: How many threads have run `before_fork` and not yet `after_fork_in_parent`.
_fork_count = 0
#: The hooks that modules registered while they were imported for this fork. They run at
#: later forks only.
_registered_late: list[dict[str, Callable[..., object]]] = []


def before_fork(load: Callable[[str], object]) -> None:
    """Import the package's modules by `load`, once, if several threads are running.

    If there is only one thread, no other can be importing a module during the fork.
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
    # A module that is imported here may register two hooks, one before forks to take its
    # lock and one after them to release it. The first would be registered too late for this
    # fork, so both are registered after it.
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
    """Yield the extension, whose names the face offers, and every module of the rooms."""
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
    """Register the late hooks, unless another thread is forking as well.

    If they were registered during the other thread's fork, only the second hook of each
    pair would run for that fork, and would release a lock that nobody took.
    """
    global _fork_count
    _fork_count -= 1
    while _registered_late and _fork_count == 0:
        os.register_at_fork(**_registered_late.pop(0))


def after_fork_in_child() -> None:
    """Drop the locks of threads that were importing a module and are not in this child."""
    global _fork_count
    _fork_count = 1  # other threads that were forking are not in this child
    after_fork_in_parent()
    for name in _held_by_others():
        _locks().pop(name, None)
        half_loaded = getattr(sys.modules.get(name), "__spec__", None)
        if half_loaded is not None and getattr(half_loaded, "_initializing", False):
            del sys.modules[name]


def _try(load: Callable[[str], object], module: str) -> None:
    # The fork goes on after an error. A program that uses the module meets the error there.
    with suppress(Exception):
        load(module)


def _locks() -> dict[str, Callable[[], object]]:
    """Return the locks of modules that are being imported, as weak references by name."""
    return getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})


def _held_by_others() -> list[str]:
    """Return the names of our modules that other threads are importing."""
    return [
        name
        for name, reference in list(_locks().items())
        if name.startswith("cumem.")
        and getattr(reference(), "owner", None) not in (None, get_ident())
    ]
