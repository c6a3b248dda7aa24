# SPDX-License-Identifier: Apache-2.0
"""Pinned, mapped, managed and device memory for Python, and copies between them.

Importing makes no CUDA call; the driver is opened at first use.
"""

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

#: The tools that show objects, by the way in which they do: `cumem.base.displays`.
_DISPLAYS = {"html": "tools.notebook.objects", "plot": "tools.plots"}


#: The stubs that list public names, by the module in which users find those names.
_STUBS = {"cumem": "__init__.pyi", "cumem.types": "types.pyi"}


@cache
def _homes(face: str = "cumem") -> dict[str, str]:
    """Each public name with the module that has it, as the stub tells type checkers.

    Modules such as `doctor` and `units` are names of the package itself, ``""``.
    """
    with open(f"{__path__[0]}/{_STUBS[face]}", encoding="utf-8") as file:
        imports = file.read().split("\nfrom cumem")[1:]
    homes = {}
    for each in imports:  # ".files.raw import fromfile as fromfile, tofile as tofile"
        module, _, names = each.partition(" import ")
        for name in names.split(","):
            public, _, again = name.partition(" as ")
            if again:
                homes[public.strip(" (\n")] = module.removeprefix(".")
    return homes


@cache
def _load(module: str) -> ModuleType:
    """Load a module of the package, whose public names users then find.

    The extension calls this as well, for what it asks of Python.
    """
    if module != "base.displays":
        _load("base.displays").load_with(_load_display)
    loaded = import_module(f"cumem.{module}")
    for face in _STUBS:
        for name, home in _homes(face).items():
            if home == module:
                value = getattr(loaded, name)
                if getattr(value, "__module__", "cumem") not in _STUBS:
                    value.__module__ = "cumem"  # what help() and a pickle name
                if face in sys.modules:
                    setattr(sys.modules[face], name, value)
    return loaded


def _find(face: str, name: str) -> object:
    """Load what has a public name, which is then an attribute of its public module."""
    homes = _homes(face)
    if name == "__all__":
        return sorted(public for public, module in homes.items() if module)
    if name not in homes:
        text = f"module {face!r} has no attribute {name!r}"
        hint = None if name.startswith("_") else _load("buffers.hints").name_hint(name)
        if name in _homes("cumem.types"):
            hint = f"use cumem.types.{name}"
        raise AttributeError(text if hint is None else f"{text}; {hint}")
    if not homes[name]:
        return import_module(f"cumem.{name}")
    return getattr(_load(homes[name]), name)


@cache
def _load_display(way: str) -> None:
    import_module(f"cumem.{_DISPLAYS[way]}")


def __getattr__(name: str) -> object:
    """Load what has a public name, at the first use of one."""
    return _find("cumem", name)


def __dir__() -> list[str]:
    """What completion shows: the public names and modules, and no import of this file."""
    own = (name for name in globals() if name.startswith("__"))
    return sorted({*own, *_homes(), "__all__"})


def load_ipython_extension(shell: object) -> None:
    """By ``%load_ext cumem`` in a notebook: see docs/notebooks.md."""
    from cumem.tools.notebook.magics import load

    load(shell)


def unload_ipython_extension(shell: object) -> None:
    """By ``%unload_ext cumem``."""
    from cumem.tools.notebook.magics import unload

    unload(shell)


def _watch() -> None:
    """Watch forks, after which the parent's threads and its driver are not in the child,
    and what the environment asks for. That ends after `_at_exit`, whose transfers it sees.
    """
    import os

    # The module is loaded by the first fork, since most programs never do; before the
    # fork, so that the child need not.
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
    """After the handlers of those who import cumem, and before finalisation, when threads
    could not be joined any more. Daemon threads are not joined."""
    others_run = True
    try:
        import threading

        others_run = threading.active_count() != 1
    finally:
        _core._at_exit(others_run)


_watch()
atexit.register(_at_exit)
