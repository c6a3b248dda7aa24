# SPDX-License-Identifier: Apache-2.0
"""Slots of shared memory that worker processes fill and the main process page-locks.

`PinnedCollate` uses this: DataLoader's workers write a batch into a slot, and the main
process copies it to the device from there, without a copy in between.
"""

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

#: Slots begin at multiples of this size and are locked in multiples of it, because no
#: machine has larger pages.
_PAGE = 1 << 16

#: The states of a slot, in the low bits of its word. The higher bits count how often it was
#: taken.
_FREE, _TAKEN, _HELD = 0, 1, 2
_STATES = 4

_T = TypeVar("_T")

_lock = make_lock()  # keeps threads out, which POSIX locks of the process do not
_numbers = itertools.count()


class Shortage:
    """Lets the caller do without page-locked memory while there is none.

    An allocation that fails takes long: it waits, trims, calls callbacks and collects
    garbage. So after a failure a number of attempts is skipped before the next real one.
    Only the first failure gives a warning.
    """

    _LEFT_OUT = 100  # the number of attempts skipped after each failure

    def __init__(self, what: str) -> None:
        self._what = what
        self._left_out = 0
        self._has_warned = False

    def attempt(self, take: Callable[[], _T]) -> _T | None:
        """Return the answer of `take`, or None if no memory can be page-locked.

        Raises
        ------
        CudaError
            If `take` fails for another reason.
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
            if not self._has_warned:
                self._has_warned = True
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


class SlotRing:
    """Slots in a file without a name, shared by the process that made it and its children.

    A child that *takes* a slot holds the POSIX lock on the slot's byte of the file. The
    kernel releases the lock when the child ends, however that happens, and another child
    may then take the slot. The process that receives the slot *claims* it. The slot becomes
    free again after the claimed memory has died and the streams have finished the work that
    they had at that time. The first claim locks the pages that are used. Pages that were
    never used do not exist.

    Parameters
    ----------
    slots : int
        The number of slots.
    slot_nbytes : int
        The most bytes in a slot.
    device, streams : callable
        Functions that return the device to lock pages for, and the streams that may read a
        claimed slot.
    fd, key : int and tuple
        The file and the key of a ring that another process made.
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
        self._memory.madvise(mmap.MADV_DONTDUMP)  # the memory consists mostly of holes
        self._words = np.frombuffer(self._memory, np.int64, slots)
        self._mine: set[int] = set()  # slots whose locks this child holds
        self._locked: dict[int, Registration] = {}
        self._shortage = Shortage(
            "cumem.PinnedCollate: slots of the ring stay ordinary memory"
        )
        self._dead: collections.deque[int] = collections.deque()
        self._in_use: collections.deque[tuple[list[int], list[_core.Event]]]
        self._in_use = collections.deque()

    def view(self, slot: int, nbytes: int) -> Any:
        """Return an object whose memory is the first bytes of a slot."""
        begin = self._begin(slot)
        return (ctypes.c_ubyte * nbytes).from_buffer(self._memory, begin)

    # -- in a child ----------------------------------------------------------------------

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Take a slot; return it and how often it was taken, or None if none is free."""
        if not 0 < nbytes <= self.slot_nbytes:
            return None
        with _lock:
            try:
                self._lock_ring()
                return self._take()
            finally:
                self._unlock_ring()

    def _take(self) -> tuple[int, int] | None:
        states = (self._words % _STATES).tolist()
        own = sorted(each for each in self._mine if states[each] == _FREE)
        for slot in own[1:]:  # one is enough, and other children may need the others
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
        """Free a slot that was not passed on, or whose claimed memory has died."""
        self._words[slot] = self._words[slot] // _STATES * _STATES + _FREE

    # -- in the process that receives slots ----------------------------------------------

    def claim(self, slot: int, turn: int, nbytes: int) -> Any:
        """Return the memory of a slot that a child filled, as `view` does.

        The slot becomes free some time after the memory has died.

        Raises
        ------
        RuntimeError
            If the child has died since, and another child has taken the slot.
        CudaError
            If the pages cannot be locked.
        """
        memory = self.view(slot, nbytes)
        # The finalizer keeps the ring alive, so its pages stay locked.
        end = weakref.finalize(memory, self._note_death, slot, os.getpid())
        end.atexit = False
        with _lock:
            try:
                self._lock_ring()
                if self._words[slot] != turn * _STATES + _TAKEN:
                    end.detach()
                    raise RuntimeError(
                        "a batch is lost: the worker that made it died before it was "
                        "read, and another worker has its memory"
                    )
                self._words[slot] += _HELD - _TAKEN
            finally:
                self._unlock_ring()
            try:
                if self.is_maker:
                    self._lock_pages(slot, nbytes)
            except BaseException:
                del memory  # a traceback would keep it alive
                raise
        return memory

    @property
    def is_maker(self) -> bool:
        """Whether this process made the ring; only that one locks pages."""
        return self.key[0] == os.getpid()

    def reclaim(self) -> None:
        """Free slots whose memory has died and that no stream uses any longer."""
        with _lock:
            count = len(self._dead)
            if count:
                events = [stream.record() for stream in self._streams()]
                left = [self._dead.popleft() for _ in range(count)]
                self._in_use.append((left, events))
            while self._in_use and all(map(_is_done, self._in_use[0][1])):
                for slot in self._in_use.popleft()[0]:
                    self.give(slot)

    def trim(self) -> None:
        """Unlock the pages of slots that nobody uses, and give the memory back."""
        if not self.is_maker:  # another process has locked them
            return
        with _lock:
            self.reclaim()
            for _, events in self._in_use:
                for event in events:
                    event.synchronize()
            self.reclaim()
            try:
                self._lock_ring()
                for slot, word in enumerate(self._words.tolist()):
                    self._trim(slot, word % _STATES)
            finally:
                self._unlock_ring()

    def _trim(self, slot: int, state: int) -> None:
        if state == _HELD or not (state == _FREE or self._try_byte(slot)):
            return
        if slot in self._locked:
            self._locked.pop(slot).close()
        self._memory.madvise(mmap.MADV_REMOVE, self._begin(slot), self.slot_nbytes)
        if state == _TAKEN:
            self.give(slot)
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, slot)

    def _note_death(self, slot: int, pid: int) -> None:
        """Note that claimed memory died; the collector or a forked child may call this."""
        if pid != os.getpid():
            return
        if self.is_maker:
            self._dead.append(slot)
        else:
            self.give(slot)

    def _lock_pages(self, slot: int, nbytes: int) -> None:
        found = self._locked.get(slot)
        if found is not None:
            if not found.buffer.closed and found.nbytes >= nbytes:
                return
            del self._locked[slot]
            found.close()
        # There are four sizes between two powers of two, so that a slot whose batches grow
        # a little is seldom locked anew.
        step = max(_PAGE, 1 << (nbytes.bit_length() - 3))
        size = min(self.slot_nbytes, -(-nbytes // step) * step)
        array = np.frombuffer(self._memory, np.uint8, size, self._begin(slot))
        registration = self._shortage.attempt(
            lambda: register(array, device=self._device())
        )
        if registration is not None:
            self._locked[slot] = registration

    def _begin(self, slot: int) -> int:
        return self._head_nbytes + slot * self.slot_nbytes

    def _lock_ring(self) -> None:
        """Let no other process take or claim slots until the ring is unlocked.

        If this process dies, the kernel unlocks the ring. Call this within the ``try``
        that unlocks the ring, so that no signal leaves it locked.
        """
        fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, self.slots)

    def _unlock_ring(self) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, self.slots)

    def _try_byte(self, slot: int) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except OSError:  # a child that lives holds the lock
            return False
        return True


def _is_done(event: _core.Event) -> bool:
    try:
        return event.done
    except ValueError:  # shutdown() has closed the event after waiting for all work
        return True
