# SPDX-License-Identifier: Apache-2.0
"""Holds streams while a trace is replayed, so that freed memory is really still in use.

A GPU's streams wait by ``cuStreamWaitValue32`` until a number in mapped memory is large
enough. It is called in the driver directly, because cumem itself does not use it. Emulated
streams wait for the events of other streams, whose gates are closed. In both cases nothing
depends on time: the work on memory that was freed in one window of the trace ends when the
last window for which it is held has passed.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from cumem import _core
from cumem.base.driver import backend
from cumem.devices.device import Device
from cumem.pools.registering import register
from cumem.tools.replay.trace import Hold

__all__ = ["Gates", "open_gates", "stream_handle"]

STUCK_SECONDS: Final = 1.0
MOST_FORCED: Final = 3  # after this many waits of the allocator, nothing is held
_FOREVER: Final = 0x7FFF_FFFF  # the driver compares cyclically; this is half the range


def stream_handle(stream: object) -> int:
    """Return the CUDA handle of a stream of any library."""
    for name in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, cumem
        value = getattr(stream, name, None)
        if isinstance(value, int):
            return value
    protocol: Any = getattr(stream, "__cuda_stream__")  # noqa: B009 - RMM
    return int(protocol()[1])


class Gates:
    """Keeps streams busy with work that ends when the replay has gone far enough.

    Each call of the allocator is made inside a ``with`` block of this object. An allocator
    that waits for the device would wait for ever, because the work is held. So a watcher
    thread ends all held work if a call takes too long, and `forced` counts how often. After
    the third time nothing is held any more.

    Parameters
    ----------
    hold : Hold
        The length of a window, and the number of windows for which work is held.
    """

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self.forced: int = 0
        self._calls = 0  # odd while a call is running
        self._seen = self._opened = 0
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def enter(self, window: int) -> None:
        """Begin a window, numbered from 1.

        This ends the work that was held for long enough, and holds all later work.
        """
        if self.forced < MOST_FORCED:
            self._enter(window)

    def close(self) -> None:
        """End all held work."""
        self._ended.set()
        self._watcher.join()
        self._open_all()

    def __enter__(self) -> None:
        self._calls += 1

    def __exit__(self, *exc: object) -> None:
        self._calls += 1

    def look(self) -> None:
        """End all held work if the call that ran at the last look is still running.

        The watcher calls this. A call that takes so long must be waiting for the held work.
        """
        seen, self._seen = self._seen, self._calls
        if seen % 2 and seen == self._seen != self._opened:
            self._opened = seen
            self.forced += 1
            self._open_all()

    def _watch(self) -> None:
        while not self._ended.wait(STUCK_SECONDS):
            self.look()

    def _enter(self, window: int) -> None:
        raise NotImplementedError

    def _open_all(self) -> None:
        raise NotImplementedError


class _EmulatedGates(Gates):
    """Uses one stream with a gate for each window that is held at a time, in turn."""

    def __init__(self, hold: Hold, streams: Sequence[object], device: int) -> None:
        self._streams = [s for s in streams if isinstance(s, _core.Stream)]
        self._gates = [_core.Stream(device=device) for _ in range(hold.windows + 1)]
        self._closed: set[int] = set()
        self._lock = threading.Lock()  # guards the gates, which the watcher opens too
        super().__init__(hold)

    def _enter(self, window: int) -> None:
        with self._lock:
            self._open((window - self.hold.windows) % len(self._gates))
            index = window % len(self._gates)
            gate = self._gates[index]
            _core._hold_stream(gate)
            self._closed.add(index)
            event = gate.record()
        for stream in self._streams:
            stream.wait(event)

    def _open(self, index: int) -> None:
        if index in self._closed:
            self._closed.discard(index)
            _core._release_stream(self._gates[index])
            self._gates[index].synchronize()

    def _open_all(self) -> None:
        with self._lock:
            for index in list(self._closed):
                self._open(index)


class _CudaGates(Gates):
    """Counts up one number in mapped memory; each window's work waits for its own value."""

    def __init__(self, hold: Hold, streams: Sequence[object], device: int) -> None:
        self._handles = [stream_handle(stream) for stream in streams]
        self._device = device
        self._number = np.zeros(1024, np.uint32)
        # The number is not in memory of a pool, because the pools are being measured.
        self._registration = register(self._number, mapped=True, device=device)
        flag = self._registration.buffer
        assert isinstance(flag, _core.MappedBuffer)
        self._address = flag.device_ptr
        self._driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        with contextlib.ExitStack() as undo:
            undo.callback(self._registration.close)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            undo.callback(self._call, "cuDevicePrimaryCtxRelease_v2", device)
            self._call("cuCtxSetCurrent", context)
            self._undo = undo.pop_all()
        super().__init__(hold)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} failed with {code}; --late needs it on a GPU")

    def _enter(self, window: int) -> None:
        self._number[0] = max(0, window - self.hold.windows)
        address = ctypes.c_uint64(self._address)
        for handle in self._handles:
            self._call(
                "cuStreamWaitValue32_v2",
                ctypes.c_void_p(handle),
                address,
                ctypes.c_uint32(window),
                ctypes.c_uint(0),  # greater or equal
            )

    def _open_all(self) -> None:
        self._number[0] = _FOREVER

    def close(self) -> None:
        super().close()
        Device(self._device).synchronize()  # afterwards no stream reads the number
        self._undo.close()


def open_gates(hold: Hold, streams: Sequence[object], device: int) -> Gates:
    """Make gates for the backend that cumem runs on.

    Parameters
    ----------
    hold : Hold
        How long to hold work.
    streams : sequence
        The streams of any library, or on the emulated device those of cumem.
    device : int
        The device of the streams.

    Returns
    -------
    Gates
        Gates that are open until the first window is entered.

    Raises
    ------
    OSError
        If the driver cannot make a stream wait.
    """
    kind = _EmulatedGates if backend() == "emulated" else _CudaGates
    return kind(hold, streams, device)
