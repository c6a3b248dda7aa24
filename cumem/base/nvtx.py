# SPDX-License-Identifier: Apache-2.0
"""Ranges in profilers: a client of NVTX 3, which hands the tool's functions to the core.

A tool is a library that NVTX_INJECTION64_PATH names. It asks each client for tables of
places, by module, and puts its functions there. That interface is the same in all versions
3 (nvtxTypes.h), and is declared here, so that neither the build nor the wheel needs
NVTX.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_uint, c_uint32, c_void_p
from typing import Any

from cumem import _core
from cumem.base.errors import warn_caller

_CORE2, _MODULES = 5, 6
_PUSH, _POP, _CREATE = 4, 5, 12  # of that module
_SLOTS = 16  # each module has fewer
_CALLBACKS, _VERSION_INFO = 1, 3

#: What the tool and the core have addresses of: it lasts as long as the process.
_kept: list[Any] = []

_GiveTable = CFUNCTYPE(c_int, c_int, POINTER(c_void_p), POINTER(c_uint))
_SetVersion = CFUNCTYPE(None, c_uint32)
_GiveExports = CFUNCTYPE(c_void_p, c_uint32)


class _Callbacks(ctypes.Structure):
    _fields_ = (("nbytes", ctypes.c_size_t), ("give_table", _GiveTable))


class _VersionInfo(ctypes.Structure):
    _fields_ = (
        ("nbytes", ctypes.c_size_t),
        ("version", c_uint32),
        ("reserved", c_uint32),
        ("set_version", _SetVersion),
    )


class _Tool(ctypes.Structure):
    """cm_nvtx_tool."""

    _fields_ = (("push", c_void_p), ("pop", c_void_p), ("domain", c_void_p))


def attach() -> None:
    """Let a tool that listens see ranges, from now on; the first call counts.

    Without a tool there are none, and a tool that cannot be loaded is a RuntimeWarning.
    """
    path = os.environ.get("NVTX_INJECTION64_PATH")
    if not path or _kept:
        return
    slots, other = (c_void_p * _SLOTS)(), c_void_p()
    try:
        tool = ctypes.CDLL(path, mode=os.RTLD_LAZY)
        _kept.append(tool)
        attached = tool.InitializeInjectionNvtx2(_exports(slots, other))
    except (OSError, AttributeError) as error:
        _warn(path, str(error))
        return
    if not attached or slots[_PUSH] is None or slots[_POP] is None:
        _warn(path, "it refused")
        return
    create = slots[_CREATE]
    domain = CFUNCTYPE(c_void_p, c_char_p)(create)(b"cumem") if create else None
    known = _Tool(slots[_PUSH], slots[_POP], domain)
    _kept.append(known)
    _place().value = ctypes.addressof(known)


def listens() -> bool:
    """Whether a tool is attached."""
    return _place().value is not None


def _place() -> c_void_p:
    """cm_nvtx_tool_now, where the core looks for the tool."""
    return c_void_p.from_address(dict(_core._addresses())["nvtx_tool"])


def _exports(slots: ctypes.Array[c_void_p], other: c_void_p) -> Any:
    """What a tool is given: it finds the tables by it."""
    step = ctypes.sizeof(c_void_p)
    first = ctypes.addressof(slots)
    # each begins and ends with NULL
    ours = (c_void_p * (_SLOTS + 1))()
    others = (c_void_p * (_SLOTS + 1))()
    for i in range(1, _SLOTS):
        ours[i] = first + i * step
        others[i] = ctypes.addressof(other)

    def give_table(module: int, table: Any, count: Any) -> int:
        if not 1 <= module <= _MODULES:
            return 0
        if table:
            table[0] = ctypes.addressof(ours if module == _CORE2 else others)
        if count:
            count[0] = _SLOTS
        return 1

    callbacks = _Callbacks(ctypes.sizeof(_Callbacks), _GiveTable(give_table))
    version = _VersionInfo(
        ctypes.sizeof(_VersionInfo), 3, 0, _SetVersion(lambda version: None)
    )
    tables = {_CALLBACKS: callbacks, _VERSION_INFO: version}

    def give_exports(number: int) -> int | None:
        return ctypes.addressof(tables[number]) if number in tables else None

    exports = _GiveExports(give_exports)
    _kept.extend((slots, other, ours, others, tables, exports))
    return exports


def _warn(path: str, reason: str) -> None:
    warn_caller(
        f"CUMEM_NVTX: the tool that NVTX_INJECTION64_PATH names, {path}, sees no ranges: "
        f"{reason}",
        RuntimeWarning,
    )
