# SPDX-License-Identifier: Apache-2.0
"""Awaiting transfers: one eventfd for each event loop.

The engine writes to it when a transfer is done, the loop reads it, and then settles the
futures of all transfers that are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Callable, Iterator

from cumem import _core


class _Notifier:
    """Of one event loop, which it knows only while futures wait: an idle one keeps none."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], _core.Transfer] = {}
        self._is_read = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_fd"):
            close(self._fd)

    def future(
        self, transfer: _core.Transfer, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[None]:
        """One that is done when the transfer is."""
        future = loop.create_future()
        if not self._is_read:
            loop.add_reader(self._fd, self._wake)
            self._is_read = True
        self._waiting[future] = transfer
        try:
            transfer._notify(self._fd)
            future.add_done_callback(self._wake)
        except BaseException:
            self._waiting.pop(future, None)
            raise
        return future

    def _wake(self, *_: object) -> None:
        """By the loop: the eventfd was written, or a future is done for another reason.

        A future may call what comes back here: each is settled by whoever takes it out.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        for future, transfer in list(self._waiting.items()):
            if future.done():
                self._waiting.pop(future, None)
            elif transfer.done and self._waiting.pop(future, None) is not None:
                _settle(future, transfer)
        if self._is_read and not self._waiting:
            self._is_read = False
            asyncio.get_running_loop().remove_reader(self._fd)


def _settle(future: asyncio.Future[None], transfer: _core.Transfer) -> None:
    try:
        transfer.wait()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(None)


_notifiers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Notifier] = (
    weakref.WeakKeyDictionary()
)


def await_transfer(transfer: _core.Transfer) -> Iterator[object]:
    """What ``await transfer`` iterates over."""
    if transfer.done:
        transfer.wait()
        return iter(())
    loop = asyncio.get_running_loop()
    notifier = _notifiers.get(loop)
    if notifier is None:
        notifier = _notifiers[loop] = _Notifier()
    return notifier.future(transfer, loop).__await__()
