# SPDX-License-Identifier: Apache-2.0
"""Stream objects like those of other libraries, which show their handle in various ways."""

from __future__ import annotations

import ctypes

import numpy as np


class ByProtocol:
    def __init__(self, handle: object, version: object = 0) -> None:
        self.answer = (version, handle)

    def __cuda_stream__(self) -> object:
        return self.answer


class ByTorch:
    def __init__(self, handle: object, device_index: int | None = None) -> None:
        self.cuda_stream = handle
        if device_index is not None:
            self.device_index = device_index


class ByCupy:
    def __init__(self, handle: object, device_id: int = -1) -> None:
        self.ptr = handle
        self.device_id = device_id


class ByNumba:
    def __init__(self, handle: object) -> None:
        self.handle = handle


class ByCtypes(ByNumba):
    def __init__(self, handle: int) -> None:
        super().__init__(ctypes.c_void_p(handle))


class Castable:
    def __init__(self, handle: int) -> None:
        self.number = handle

    def __int__(self) -> int:
        return self.number


class ByCastable(ByNumba):
    def __init__(self, handle: int) -> None:
        super().__init__(Castable(handle))


FOREIGN = [ByProtocol, ByTorch, ByCupy, ByNumba, ByCtypes, ByCastable, int, np.uint64]
