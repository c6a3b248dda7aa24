# SPDX-License-Identifier: Apache-2.0
"""Slots of shared memory that other processes fill and this one page-locks."""

from __future__ import annotations

import collections
import ctypes
import fcntl
import itertools
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from cumem import _core
from cumem.base.errors import CudaError, OutOfMemoryError, warn_caller
from cumem.base.locks import make_lock
from cumem.pools.out_of_memory import is_refused
from cumem.pools.registering import Registration, register

#: What slots begin at, and pages are locked by: the largest page of any machine.
_PAGE = 1 << 16

#: States of a slot, in the low bits of its word; above them is how often it was taken.
_FREE, _TAKEN, _HELD = 0, 1, 2
_STATES = 4

_T = TypeVar("_T")

_lock = make_lock()  # POSIX locks are the process's: they do not part its threads
_numbers = itertools.count()


class Shortage:
    """Goes on without page-locked memory where there is none to be had.

    An allocation that fails tries much first: it waits, trims, calls callbacks and
    collects garbage. So after a failure the next ones are left out, and one is tried
    again now and then. The first failure is told by a warning, the only one.
    """

    _LEFT_OUT = 100  # as many attempts, after each failure

    def __init__(self, what: str) -> None:
        self._what = what
        self._left_out = 0
        self._was_told = False

    def attempt(self, take: Callable[[], _T]) -> _T | None:
        """What `take` answers, or None where no page-locked memory is to be had.

        Raises
        ------
        CudaError
            If it is for another reason that it fails.
        """
        if self._left_out > 0:
            self._left_out -= 1
            return None
        try:
            return take()
        except CudaError as error:
            if not (isinstance(error, OutOfMemoryError) or is_refused(error)):
                raise
            self._left_out = self._LEFT_OUT
            if not self._was_told:
                self._was_told = True
                warn_caller(
                    f"{self._what}, from where copies are slower, since no more can be "
                    f"page-locked: {_reason(error)}",
                    RuntimeWarning,
                )
            return None


def _reason(error: CudaError) -> str:
    if isinstance(error, OutOfMemoryError) and error.advice is not None:
        return error.advice
    return str(error)


class Ring:
    """Slots in memory without a name, for the process that made it and its children.

    A child that *takes* a slot holds the POSIX lock of its byte of the file: the kernel
    lets go of that when the child ends, however it does, and another may take the slot.
    The process that is told of the slot *claims* it, and it is free again once the
    claimed memory has died and the streams are done with what they had by then. Pages
    are locked at the first claim, as far as they are used: what is not used is not there.

    Parameters
    ----------
    slots : int
        How many.
    slot_nbytes : int
        Most bytes in one.
    device, streams : callable
        Give the device to lock pages by, and the streams that may read a claimed slot.
    fd, key : int and tuple
        Of a ring that another process made.
    """

    def __init__(
        self,
        slots: int,
        slot_nbytes: int,
        device: Callable[[], int],
        streams: Callable[[], list[_core.Stream]],
        fd: int | None = None,
        key: tuple[int, int] | None = None,
    ) -> None:
        self.slots = slots
        self.slot_nbytes: int = -(-slot_nbytes // _PAGE) * _PAGE
        self.key: tuple[int, int] = (
            (os.getpid(), next(_numbers)) if key is None else key
        )
        self._device = device
        self._streams = streams
        self._head_nbytes = -(-8 * slots // _PAGE) * _PAGE
        total = self._head_nbytes + slots * self.slot_nbytes
        self.fd: int = os.memfd_create("cumem-ring") if fd is None else fd
        weakref.finalize(self, os.close, self.fd)
        try:
            if fd is None:
                os.ftruncate(self.fd, total)
            self._memory = mmap.mmap(self.fd, total)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no room for {slots} slots of {self.slot_nbytes} bytes, {total} of "
                f"addresses ({error.strerror}; ulimit -v and -f count them): make a "
                "smaller cumem.PinnedCollate(slots=, slot_nbytes=)",
            ) from error
        self._memory.madvise(mmap.MADV_DONTDUMP)  # mostly holes
        self._words = np.frombuffer(self._memory, np.int64, slots)
        self._mine: set[int] = set()  # whose locks this child has
        self._locked: dict[int, Registration] = {}
        self._shortage = Shortage(
            "cumem.PinnedCollate: slots of the ring stay ordinary memory"
        )
        self._left: collections.deque[int] = collections.deque()
        self._in_use: collections.deque[tuple[list[int], list[_core.Event]]]
        self._in_use = collections.deque()

    def view(self, slot: int, nbytes: int) -> Any:
        """An object that is the first bytes of a slot to whoever views its memory."""
        begin = self._begin(slot)
        return (ctypes.c_ubyte * nbytes).from_buffer(self._memory, begin)

    # -- a child -------------------------------------------------------------------------

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """A free slot, and how often it was taken by now; None: there is none."""
        if not 0 < nbytes <= self.slot_nbytes:
            return None
        with _lock:
            try:
                self._close_door()
                return self._take()
            finally:
                self._open_door()

    def _take(self) -> tuple[int, int] | None:
        states = (self._words % _STATES).tolist()
        own = sorted(each for each in self._mine if states[each] == _FREE)
        for slot in own[1:]:  # others may need them
            self._mine.remove(slot)
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, slot)
        for slot in own[:1] or range(self.slots):
            if states[slot] == _HELD or (slot in self._mine and not own):
                continue
            if slot in self._mine or self._try_byte(slot):
                self._mine.add(slot)
                turn = int(self._words[slot]) // _STATES + 1
                self._words[slot] = turn * _STATES + _TAKEN
                return slot, turn
        return None

    def give(self, slot: int) -> None:
        """Have it free again: what was taken is not told of, or what was claimed died."""
        self._words[slot] = self._words[slot] // _STATES * _STATES + _FREE

    # -- the process that is told --------------------------------------------------------

    def claim(self, slot: int, turn: int, nbytes: int) -> Any:
        """The memory of a slot that a child filled, as `view` gives it; the slot is free
        some time after the memory has died.

        Raises
        ------
        RuntimeError
            If the child has died since, and another has taken the slot.
        CudaError
            If the pages cannot be locked.
        """
        memory = self.view(slot, nbytes)
        # it keeps the ring, and with it the pages locked
        end = weakref.finalize(memory, self._leave, slot, os.getpid())
        end.atexit = False
        with _lock:
            try:
                self._close_door()
                if self._words[slot] != turn * _STATES + _TAKEN:
                    end.detach()
                    raise RuntimeError(
                        "a batch is lost: the worker that made it died before it was "
                        "read, and another worker has its memory"
                    )
                self._words[slot] += _HELD - _TAKEN
            finally:
                self._open_door()
            try:
                if self.is_maker:
                    self._lock_pages(slot, nbytes)
            except BaseException:
                del memory  # which a traceback would keep
                raise
        return memory

    @property
    def is_maker(self) -> bool:
        """Did this process make it? Pages are locked by no other."""
        return self.key[0] == os.getpid()

    def settle(self) -> None:
        """Free what was left and is no longer in use."""
        with _lock:
            count = len(self._left)
            if count:
                events = [stream.record() for stream in self._streams()]
                left = [self._left.popleft() for _ in range(count)]
                self._in_use.append((left, events))
            while self._in_use and all(map(_is_done, self._in_use[0][1])):
                for slot in self._in_use.popleft()[0]:
                    self.give(slot)

    def trim(self) -> None:
        """Unlock the pages of slots that nobody uses, and give them back."""
        if not self.is_maker:  # they are locked elsewhere
            return
        with _lock:
            self.settle()
            for _, events in self._in_use:
                for event in events:
                    event.synchronize()
            self.settle()
            try:
                self._close_door()
                for slot, word in enumerate(self._words.tolist()):
                    self._trim(slot, word % _STATES)
            finally:
                self._open_door()

    def _trim(self, slot: int, state: int) -> None:
        if state == _HELD or not (state == _FREE or self._try_byte(slot)):
            return
        if slot in self._locked:
            self._locked.pop(slot).close()
        self._memory.madvise(mmap.MADV_REMOVE, self._begin(slot), self.slot_nbytes)
        if state == _TAKEN:
            self.give(slot)
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, slot)

    def _leave(self, slot: int, pid: int) -> None:
        """Also within the collector, and in a child that was forked since."""
        if pid != os.getpid():
            return
        if self.is_maker:
            self._left.append(slot)
        else:
            self.give(slot)

    def _lock_pages(self, slot: int, nbytes: int) -> None:
        found = self._locked.get(slot)
        if found is not None:
            if not found.buffer.closed and found.nbytes >= nbytes:
                return
            del self._locked[slot]
            found.close()
        step = max(_PAGE, 1 << (nbytes.bit_length() - 3))  # few steps to a larger size
        size = min(self.slot_nbytes, -(-nbytes // step) * step)
        array = np.frombuffer(self._memory, np.uint8, size, self._begin(slot))
        registration = self._shortage.attempt(
            lambda: register(array, device=self._device())
        )
        if registration is not None:
            self._locked[slot] = registration

    def _begin(self, slot: int) -> int:
        return self._head_nbytes + slot * self.slot_nbytes

    def _close_door(self) -> None:
        """Only this process takes or claims now; the kernel opens it for one that dies.

        Within a ``try`` that opens it: no signal leaves it closed.
        """
        fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, self.slots)

    def _open_door(self) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, self.slots)

    def _try_byte(self, slot: int) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except OSError:  # of a child that lives
            return False
        return True


def _is_done(event: _core.Event) -> bool:
    try:
        return event.done
    except ValueError:  # shutdown() has closed it, and has waited for all work
        return True
