# SPDX-License-Identifier: Apache-2.0
"""Awaiting transfers and events, and calling back when transfers are done.

The engine writes to an eventfd when a transfer is done. Each event loop has one, which it
reads to settle the futures of all transfers that are; what callbacks wait for has another,
which a thread reads that lives while there are any. An event is awaited as a transfer of
no bytes that ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from cumem import _core
from cumem.base.locks import make_lock
from cumem.buffers.arguments import wrong_type


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


# -- callbacks ---------------------------------------------------------------------------

_Callback = Callable[[_core.Transfer], object]


class _Caller:
    """Calls back in a thread of its own, which ends when nothing is left to wait for.

    The interpreter joins that thread before it ends, as those of `concurrent.futures`, so
    no callback is lost. No callback runs while the lock is held.
    """

    def __init__(self) -> None:
        self._lock = make_lock()
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """A forked child has neither the thread nor transfers that end."""
        self._waiting: list[tuple[_core.Transfer, _Callback]] = []
        self._fd = -1
        self._is_running = False

    def add(self, transfer: _core.Transfer, fn: _Callback) -> None:
        entry = (transfer, fn)
        with self._lock:
            if self._fd < 0:
                self._fd = os.eventfd(0, os.EFD_CLOEXEC)
            self._waiting.append(entry)
            try:
                transfer._notify(self._fd)
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
        """None: nothing is left, and the thread is to end."""
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
            taken = transfer = fn = None  # type: ignore[assignment]  # kept while it sleeps


_caller = _Caller()


def add_done_callback(transfer: _core.Transfer, fn: _Callback, /) -> None:
    """See `Transfer.add_done_callback`."""
    if not callable(fn):
        raise wrong_type("fn", "callable", fn)
    if transfer.done:
        transfer._call_back(fn)
    else:
        _caller.add(transfer, fn)
