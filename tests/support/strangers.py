# SPDX-License-Identifier: Apache-2.0
"""Makes copies that cumem does not see, as another library would on a stream of its own."""

from __future__ import annotations

import ctypes
import threading
from types import TracebackType
from typing import Self

from support import session  # isort: skip  # before cumem, for the core with hooks

import cumem
from cumem import _core

#: A copy of this many bytes within the device, made this many times, keeps a stream of a
#: GPU busy.
LATE_NBYTES, LATE_COUNT = 1 << 28, 1000


def copy_by_driver(dst: int, src: int, nbytes: int, stream: cumem.Stream) -> None:
    """Copy by the driver, as any program may, so that cumem does not know of it."""
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    index = stream.device.index
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), index) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    ends = ctypes.c_uint64(dst), ctypes.c_uint64(src), ctypes.c_size_t(nbytes)
    failed = driver.cuMemcpyAsync(*ends, ctypes.c_void_p(stream.handle))
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    assert driver.cuDevicePrimaryCtxRelease_v2(index) == 0
    assert failed == 0


class Stranger:
    """Starts late copies inside its ``with`` block.

    On the emulated device they wait until the end of the block. On a GPU they wait for
    other copies, which take some 200 ms. At the end of the block they are done.
    """

    def __init__(self, device: int = 0) -> None:
        self.stream = cumem.Stream(device=device)
        self.threads: list[threading.Thread] = []
        self.is_emulated = cumem.backend() == "emulated"

    def __enter__(self) -> Self:
        if self.is_emulated:
            session.shut(self.stream)
        else:
            ends = cumem.empty_device(2 * LATE_NBYTES, "u1", device=self.stream.device)
            for _ in range(LATE_COUNT):
                cumem.copy_async(
                    ends[:LATE_NBYTES], ends[LATE_NBYTES:], stream=self.stream
                )
        return self

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Start a copy between addresses, and return once the driver has it."""
        if not self.is_emulated:
            copy_by_driver(dst, src, nbytes, self.stream)
            return
        # This call waits for the end of the copy, so it is made in a thread.
        ends = dst, src, nbytes, self.stream
        thread = threading.Thread(target=_core._raw_copy, args=ends, daemon=True)
        thread.start()
        self.threads.append(thread)
        session.wait_until_waiting(thread)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self.is_emulated:
            session.testing.gate_open(self.stream)
        for thread in self.threads:
            thread.join()
        self.stream.synchronize()
