# SPDX-License-Identifier: Apache-2.0
"""Pinned, mapped, managed and device memory for Python, and copies between them.

Importing cumem makes no CUDA call: the driver is opened when a call first needs it.
"""

# This file is the face of the package. It names no function itself: `__init__.pyi` lists
# the public names with the modules that have them, for type checkers and for this file,
# which loads a module when somebody first uses one of its names. So ``import cumem`` is
# quick, and a public name is written down once.

import atexit
import sys
from functools import cache
from importlib import import_module
from types import ModuleType

from cumem import _core

if hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled():  # from 3.13 on
    raise ImportError(
        "cumem needs the GIL, which PYTHON_GIL=0 or -X gil=0 has switched off: without it "
        "pools and buffers would be corrupted. Leave that out; free-threaded Python then "
        "switches the GIL on when cumem is imported"
    )

#: The module to load when an object is first shown in one of these ways, which registers
#: its displays with `cumem.base.displays`.
_DISPLAYS = {"html": "tools.notebook.objects", "plot": "tools.plots"}

#: The stubs that list public names, by the module in which users find those names.
_STUBS = {"cumem": "__init__.pyi", "cumem.types": "types.pyi"}


@cache
def _homes(face: str = "cumem") -> dict[str, str]:
    """Return the module that has each public name, as the stub of `face` lists them.

    The module is ``""`` for a name that is itself a module of the package, such as `units`.
    """
    with open(f"{__path__[0]}/{_STUBS[face]}", encoding="utf-8") as file:
        imports = file.read().split("\nfrom cumem")[1:]
    homes = {}
    # An import is such as ".files.raw import fromfile as fromfile, tofile as tofile".
    for each in imports:
        module, _, names = each.partition(" import ")
        for name in names.split(","):
            public, _, again = name.partition(" as ")
            if again:
                homes[public.strip(" (\n")] = module.removeprefix(".")
    return homes


@cache
def _load(module: str) -> ModuleType:
    """Load a module of the package, and put its public names where users find them.

    The extension also calls this, to load the functions that it needs. Raises RuntimeError
    if a signal handler or a finalizer calls it while the thread that it has interrupted is
    loading the module, because a module that is half loaded cannot be used.
    """
    if module != "base.displays":
        _load("base.displays").load_with(_load_display)
    loaded = import_module(f"cumem.{module}")
    if getattr(loaded.__spec__, "_initializing", False):
        raise RuntimeError(
            f"this thread is still loading cumem.{module}, which the signal handler or "
            "finalizer that needs it now has interrupted: let the handler set a flag and "
            "do its work afterwards, or make the same call once before"
        )
    for face in _STUBS:
        for name, home in _homes(face).items():
            if home == module:
                value = getattr(loaded, name)
                if getattr(value, "__module__", "cumem") not in _STUBS:
                    value.__module__ = "cumem"  # help() and pickles show this name
                if face in sys.modules:
                    setattr(sys.modules[face], name, value)
    return loaded


def _find(face: str, name: str) -> object:
    """Return the object or module that has a public name, and load it if need be.

    `face` is "cumem" or "cumem.types". Raises AttributeError if there is no such name, with
    a hint if one is known. The statement ``from cumem import name`` turns an AttributeError
    into an ImportError with Python's own text. So for that statement this raises an
    ImportError with the hint.
    """
    homes = _homes(face)
    if name == "__all__":
        return sorted(public for public, module in homes.items() if module)
    if name not in homes:
        text = f"module {face!r} has no attribute {name!r}"
        hint = None if name.startswith("_") else _load("buffers.hints").name_hint(name)
        if name in _homes("cumem.types"):
            hint = f"use cumem.types.{name}"
        if hint is None:
            raise AttributeError(text)
        if _is_import_from() and not _is_folder(name):
            text = f"cannot import name {name!r} from {face!r}"
            raise ImportError(f"{text}; {hint}", name=face, path=__file__)
        raise AttributeError(f"{text}; {hint}")
    if not homes[name]:
        return import_module(f"cumem.{name}")
    return getattr(_load(homes[name]), name)


def _is_import_from() -> bool:
    """Return whether `_find` was called for ``from cumem import name``.

    For that statement importlib asks with ``hasattr`` whether the package has the name,
    before it looks for a module of that name. Only the caller's frame shows that it is
    importlib.
    """
    caller = sys._getframe(3).f_code  # of `__getattr__`, which called `_find`
    return caller.co_name == "_handle_fromlist"


def _is_folder(name: str) -> bool:
    """Return whether `name` is a room of the package, which an import finds by itself."""
    from os.path import isdir

    return isdir(f"{__path__[0]}/{name}")


@cache
def _load_display(way: str) -> None:
    import_module(f"cumem.{_DISPLAYS[way]}")


def __getattr__(name: str) -> object:
    """Load the object that has a public name, at the first use of the name."""
    return _find("cumem", name)


def __dir__() -> list[str]:
    """List the public names and modules for completion, without what this file imports."""
    own = (name for name in globals() if name.startswith("__"))
    return sorted({*own, *_homes(), "__all__"})


def load_ipython_extension(shell: object) -> None:
    """Add cumem's magics to IPython, for ``%load_ext cumem``: see docs/notebooks.md."""
    from cumem.tools.notebook.magics import load

    load(shell)


def unload_ipython_extension(shell: object) -> None:
    """Take the magics away again, for ``%unload_ext cumem``."""
    from cumem.tools.notebook.magics import unload

    unload(shell)


def _watch() -> None:
    """Register what happens at forks, and begin what the environment asks for.

    A child has neither the parent's threads nor its driver, so the core is told of it. The
    recordings end after `_at_exit`, so that they contain the transfers that it waits for.
    """
    import os

    # The first fork loads the module that handles forks, since most programs never fork. It
    # does so before the fork, so that the child need not import anything.
    def before() -> None:
        import_module("cumem.base.forking").before_fork(_load)

    def begin_child() -> None:
        try:
            import_module("cumem.base.forking").after_fork_in_child()
        finally:
            _core._after_fork()

    os.register_at_fork(
        before=before,
        after_in_child=begin_child,
        after_in_parent=lambda: import_module(
            "cumem.base.forking"
        ).after_fork_in_parent(),
    )
    if text := os.environ.get("CUMEM_LEAKS"):
        _load("recording.live_buffers").report_leaks_if_asked(text)
    if path := os.environ.get("CUMEM_RECORD"):
        _load("recording.record").record_until_exit(path)


def _at_exit() -> None:
    """Wait for transfers and end the worker threads, before the interpreter is finalised.

    This is registered when cumem is imported. So it runs after the handlers that programs
    registered later, and while threads can still be joined. `others_run` tells the core
    that daemon threads, which nobody joins, may still be calling it.
    """
    others_run = True
    try:
        import threading

        others_run = threading.active_count() != 1
    finally:
        _core._at_exit(others_run)


_watch()
atexit.register(_at_exit)
