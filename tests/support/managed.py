# SPDX-License-Identifier: Apache-2.0
"""Shared by tests of managed memory."""

from __future__ import annotations

import mmap

import pytest

import cumem
from support import session

PAGE = mmap.PAGESIZE


NBYTES = 1 << 20  # a buffer of this size or more shares no page with another one


def managed(nbytes: int = NBYTES) -> cumem.ManagedBuffer:
    buffer = cumem.empty_managed(nbytes, "u1")
    buffer.numpy()[:] = 1
    return buffer


def steers(runtime: session.Runtime) -> None:
    if not cumem.Device(0).attributes().get("concurrent_managed_access"):
        pytest.skip("the device has no concurrent managed access")


class Streams:
    """Replaces the extension in tiles(), and shuts the streams that tiles() makes."""

    def __init__(self) -> None:
        self.made: list[cumem.Stream] = []

    def Stream(self, **where: object) -> cumem.Stream:  # noqa: N802
        self.made.append(cumem.Stream(**where))
        session.shut(self.made[-1])
        return self.made[-1]

    def __getattr__(self, name: str) -> object:
        return getattr(cumem._core, name)
