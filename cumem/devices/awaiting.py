# SPDX-License-Identifier: Apache-2.0
"""Awaits transfers and events, and calls functions when transfers are done.

The engine writes to an eventfd when a transfer is done. Each event loop has one eventfd,
which it reads to settle the futures of all transfers that are done. Callbacks have another
eventfd, which is read by a thread that lives as long as there are callbacks. For each
eventfd the engine has one duplicate, a *bell*, however many transfers there are. To await
an event, a transfer of no bytes is made that ends when the event does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cumem import _core
from cumem.base.locks import make_lock
from cumem.buffers.arguments import wrong_type

if TYPE_CHECKING:
    from typing_extensions import CapsuleType


class _Notifier:
    """The eventfd of one event loop, which reads it only while futures are pending."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], _core.Transfer] = {}
        self._is_read = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._bell: CapsuleType | None = None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_fd"):
            close(self._fd)

    def future(
        self, transfer: _core.Transfer, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[None]:
        """Return a future that is done when the transfer is."""
        future = loop.create_future()
        if not self._is_read:
            loop.add_reader(self._fd, self._wake)
            self._is_read = True
        self._waiting[future] = transfer
        try:
            if self._bell is None:
                self._bell = transfer._make_bell(self._fd)
            transfer._notify(self._bell)
            future.add_done_callback(self._forget)
        except BaseException:
            self._waiting.pop(future, None)
            raise
        return future

    def _wake(self) -> None:
        """Settle the futures of transfers that are done, after the eventfd was written.

        The loop calls this. Settling a future may run code that calls this again, so only
        the call that removes a future from the dict settles it.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        for future, transfer in list(self._waiting.items()):
            is_over = future.done() or transfer.done
            if not is_over or self._waiting.pop(future, None) is None:
                continue
            if not future.done():
                _settle(future, transfer)
        self._stop_reading()

    def _forget(self, future: asyncio.Future[None]) -> None:
        """Drop a future that is done, perhaps because its task was cancelled."""
        self._waiting.pop(future, None)
        self._stop_reading()

    def _stop_reading(self) -> None:
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
    """Return the iterator that ``await transfer`` goes through."""
    if transfer.done:
        transfer.wait()
        return iter(())
    loop = asyncio.get_running_loop()
    notifier = _notifiers.get(loop)
    if notifier is None:
        notifier = _notifiers[loop] = _Notifier()
    return notifier.future(transfer, loop).__await__()


# -- callbacks ---------------------------------------------------------------------------

_Callback = Callable[[_core.Transfer], object]


class _Caller:
    """Calls functions in a thread of its own, which ends when nothing is left to wait for.

    The interpreter joins that thread before it ends, like those of `concurrent.futures`, so
    that no callback is lost. No callback runs while the lock is held.
    """

    def __init__(self) -> None:
        self._lock = make_lock()
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Drop all callbacks; a forked child does so, since it has no thread for them."""
        self._waiting: list[tuple[_core.Transfer, _Callback]] = []
        self._fd = -1
        self._bell: CapsuleType | None = None
        self._is_running = False

    def add(self, transfer: _core.Transfer, fn: _Callback) -> None:
        entry = (transfer, fn)
        with self._lock:
            if self._fd < 0:
                self._fd = os.eventfd(0, os.EFD_CLOEXEC)
            if self._bell is None:
                self._bell = transfer._make_bell(self._fd)
            self._waiting.append(entry)
            try:
                transfer._notify(self._bell)
                if not self._is_running:
                    thread = threading.Thread(
                        target=self._run, name="cumem-done-callbacks", daemon=False
                    )
                    thread.start()
                    self._is_running = True
            except BaseException:
                self._waiting = [each for each in self._waiting if each is not entry]
                raise

    def _take_done(self) -> list[tuple[_core.Transfer, _Callback]] | None:
        """Return the callbacks of finished transfers, or None if the thread should end."""
        with self._lock:
            entries = [(entry[0].done, entry) for entry in self._waiting]
            done = [entry for is_done, entry in entries if is_done]
            self._waiting = [entry for is_done, entry in entries if not is_done]
            if done or self._waiting:
                return done
            self._is_running = False
            return None

    def _run(self) -> None:
        while (taken := self._take_done()) is not None:
            for transfer, fn in taken:
                transfer._call_back(fn)
            if not taken:
                os.eventfd_read(self._fd)
            # While the thread sleeps, it must not keep transfers or functions alive.
            taken = transfer = fn = None  # type: ignore[assignment]


_caller = _Caller()


def add_done_callback(transfer: _core.Transfer, fn: _Callback, /) -> None:
    """Call a function when the transfer is done; see `Transfer.add_done_callback`."""
    if not callable(fn):
        raise wrong_type("fn", "callable", fn)
    if transfer.done:
        transfer._call_back(fn)
    else:
        _caller.add(transfer, fn)
