# SPDX-License-Identifier: Apache-2.0
"""The constructors of the extension, with arguments that it does not know at a look.

Their signatures and docstrings are those of `cumem._core`.
"""

from __future__ import annotations

from typing import Any

from cumem import _core
from cumem.extension.arguments import hinting, read_attach, read_flags


@hinting
def empty(
    shape: Any,
    dtype: Any = None,
    kind: Any = ...,
    *,
    order: Any = None,
    device: Any = None,
    stream: Any = None,
    pool: Any = None,
) -> _core.Buffer:
    if kind is ...:  # a pool may say it
        kind = getattr(pool, "kind", "device")
    return _core._allocate(shape, None, dtype, order, kind, None, device, stream, pool)


@hinting
def empty_pinned(
    shape: Any,
    dtype: Any = None,
    *,
    order: Any = None,
    portable: Any = True,
    write_combined: Any = False,
    device: Any = None,
    pool: Any = None,
) -> _core.Buffer:
    flags = read_flags("pinned", portable, write_combined)
    return _core._allocate(
        shape, None, dtype, order, "pinned", flags, device, None, pool
    )


@hinting
def empty_mapped(
    shape: Any,
    dtype: Any = None,
    *,
    order: Any = None,
    portable: Any = True,
    write_combined: Any = False,
    device: Any = None,
    pool: Any = None,
) -> _core.Buffer:
    flags = read_flags("mapped", portable, write_combined)
    return _core._allocate(
        shape, None, dtype, order, "mapped", flags, device, None, pool
    )


@hinting
def empty_managed(
    shape: Any,
    dtype: Any = None,
    *,
    order: Any = None,
    attach: Any = "global",
    device: Any = None,
    pool: Any = None,
) -> _core.Buffer:
    flags = read_attach(attach)
    return _core._allocate(
        shape, None, dtype, order, "managed", flags, device, None, pool
    )


@hinting
def empty_device(
    shape: Any,
    dtype: Any = None,
    *,
    order: Any = None,
    device: Any = None,
    stream: Any = None,
    pool: Any = None,
) -> _core.Buffer:
    return _core._allocate(
        shape, None, dtype, order, "device", None, device, stream, pool
    )
