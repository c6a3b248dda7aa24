# SPDX-License-Identifier: Apache-2.0
"""Makes buffers for tests of managed memory."""

from __future__ import annotations

import mmap

import pytest

import cumem
from support import session

PAGE = mmap.PAGESIZE


NBYTES = 1 << 20  # a buffer of at least this size shares no page with another one


def managed(nbytes: int = NBYTES) -> cumem.ManagedBuffer:
    """Make a managed buffer, and write it on the host."""
    buffer = cumem.empty_managed(nbytes, "u1")
    buffer.numpy()[:] = 1
    return buffer


def steers(runtime: session.Runtime) -> None:
    """Skip the test unless pages of managed memory can be moved by hand."""
    if not cumem.Device(0).attributes().get("concurrent_managed_access"):
        pytest.skip("the device has no concurrent managed access")


class Streams:
    """Stands for the extension in tiles(), and holds the streams of tiles() shut."""

    def __init__(self) -> None:
        self.made: list[cumem.Stream] = []

    def Stream(self, **where: object) -> cumem.Stream:  # noqa: N802
        self.made.append(cumem.Stream(**where))
        session.shut(self.made[-1])
        return self.made[-1]

    def __getattr__(self, name: str) -> object:
        return getattr(cumem._core, name)
