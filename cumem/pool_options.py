# SPDX-License-Identifier: Apache-2.0
"""What `Pool` takes, checked and as numbers."""

from __future__ import annotations

import math
import operator
from typing import Any

from cumem import _core

_HOST = ("pinned", "mapped")
# Of cudaHostAlloc and cudaMallocManaged.
_PORTABLE, _MAPPED, _WRITE_COMBINED = 1, 2, 4
_ATTACH_GLOBAL, _ATTACH_HOST = 1, 2
_FLAGS = {
    "pinned": _PORTABLE,
    "mapped": _PORTABLE | _MAPPED,
    "managed": _ATTACH_GLOBAL,
    "device": 0,
}

_Options = tuple[str, int, int, int, bool, int, int | None]


def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Options:
    """From the arguments of `Pool` to its configuration.

    That is the kind, the device's index, the flags of allocations, the NUMA node or -1,
    whether segments are plain, idle_trim in ns or 0, and the limit.
    """
    return Pool(*args, **kwargs)


def Pool(  # noqa: N802
    kind: Any = "device",
    *,
    device: Any = None,
    limit: Any = None,
    numa_node: Any = None,
    segments: Any = "auto",
    idle_trim: Any = None,
    portable: Any = True,
    write_combined: Any = False,
    attach: Any = "global",
) -> _Options:
    """Of the signature, and by the name, that errors about arguments tell."""
    _core._read_limit(kind, None, None)  # is it a kind?
    index = (_core.current_device() if device is None else _core.Device(device)).index
    return (
        kind,
        index,
        _flags(kind, portable, write_combined, attach),
        _node(kind, numa_node),
        _is_second(segments, "segments", "auto", "malloc"),
        idle_trim_ns(idle_trim),
        limit_nbytes(kind, index, limit),
    )


def limit_nbytes(kind: Any, device: int, limit: Any) -> int | None:
    """What `Pool.limit` takes, in bytes."""
    place = None if kind in _HOST else device
    return _core._read_limit(kind, limit, place)[0][1]


def idle_trim_ns(seconds: Any) -> int:
    """What `Pool.idle_trim` takes, in nanoseconds; 0 for None."""
    if seconds is None:
        return 0
    try:
        value = math.fsum((seconds,))  # a float, and of numbers alone
    except TypeError:
        raise TypeError(
            _refusal("idle_trim", "a number of seconds or None", seconds)
        ) from None
    if not 0 < value <= 1e9:
        raise ValueError(
            f"idle_trim must be a number of seconds above 0, not {seconds!r}"
        )
    return max(1, int(value * 1e9))


def _flags(kind: str, portable: Any, write_combined: Any, attach: Any) -> int:
    portable = _truth(portable, "portable")
    write_combined = _truth(write_combined, "write_combined")
    attach_host = _is_second(attach, "attach", "global", "host")
    if kind not in _HOST and (write_combined or not portable):
        name = "write_combined" if write_combined else "portable"
        raise _other_kind(name, kind, "pinned and mapped")
    if attach_host and kind != "managed":
        raise _other_kind("attach", kind, "managed")
    if attach_host:
        return _ATTACH_HOST
    flags = _FLAGS[kind] if portable else _FLAGS[kind] & ~_PORTABLE
    return flags | _WRITE_COMBINED if write_combined else flags


def _node(kind: str, numa_node: Any) -> int:
    if numa_node is None:
        return -1
    if kind not in _HOST:
        raise _other_kind("numa_node", kind, "pinned and mapped")
    if isinstance(numa_node, bool) or not hasattr(numa_node, "__index__"):
        raise TypeError(_refusal("numa_node", "an int or None", numa_node))
    node = operator.index(numa_node)
    mask = _core._numa_nodes()
    nodes = [each for each in range(mask.bit_length()) if mask >> each & 1]
    if node not in nodes:
        raise ValueError(
            f"numa_node {node} does not exist, or has no memory: the nodes with memory "
            f"are {nodes}"
        )
    return node


def _is_second(value: Any, name: str, first: str, second: str) -> bool:
    """Which of two words it is."""
    if not isinstance(value, str):
        raise TypeError(_refusal(name, "a str", value))
    if value not in (first, second):
        raise ValueError(f"{name} must be '{first}' or '{second}', not {value!r}")
    return value == second


def _truth(value: Any, name: str) -> bool:
    try:
        return bool(value)
    except (TypeError, ValueError):  # an array of many elements
        raise TypeError(_refusal(name, "true or false", value)) from None


def _refusal(name: str, expected: str, value: object) -> str:
    return f"{name} must be {expected}, not {type(value).__name__}"


def _other_kind(name: str, kind: str, of: str) -> ValueError:
    return ValueError(f"{name} is for {of} memory, not for {kind} memory")
