# SPDX-License-Identifier: Apache-2.0
"""What tests of managed memory share."""

from __future__ import annotations

import mmap

import pytest

import cumem
from support import session

PAGE = mmap.PAGESIZE


NBYTES = 1 << 20  # from here on a buffer has its pages for itself


def managed(nbytes: int = NBYTES) -> cumem.ManagedBuffer:
    buffer = cumem.empty_managed(nbytes, "u1")
    buffer.numpy()[:] = 1
    return buffer


def steers(runtime: session.Runtime) -> None:
    if not cumem.Device(0).attributes().get("concurrent_managed_access"):
        pytest.skip("the device has no concurrent managed access")


class Streams:
    """The extension, as tiles() sees it: streams that it makes are shut."""

    def __init__(self) -> None:
        self.made: list[cumem.Stream] = []

    def Stream(self, **where: object) -> cumem.Stream:  # noqa: N802
        self.made.append(cumem.Stream(**where))
        session.shut(self.made[-1])
        return self.made[-1]

    def __getattr__(self, name: str) -> object:
        return getattr(cumem._core, name)
