# SPDX-License-Identifier: Apache-2.0
"""The loop that copies items to a device before the caller asks for them.

`chunks`, `pipeline` and `prefetch` all use this loop. A source yields items, such as slices
of an array or batches of a loader, and the loop begins the copies of `depth` items ahead.
When the caller asks for an item, the streams that will work on it are made to wait for its
copy, and the processor does not wait. But the loop waits until the work on the item before
the last is done before it asks for the next one. Otherwise a caller that only queues work
would fill the device.

The loop keeps two promises that a plain queue would not:

- *The host memory of an item has been read before the next item is asked for*, unless it is
  known that nobody will write there again. Some readers fill the same buffer again and
  again (``file.readinto(buffer); yield buffer``), and they do so inside ``next()``.
- *Memory for depth + 2 items is enough*, if the caller keeps none. Another library may have
  used the memory of a dropped item (by ``from_dlpack``). Such memory is free only when all
  work that the device had at that time is done, and the next copy waits for it. Meanwhile
  the items whose copies have begun are handed out, so that the copies stay as far ahead as
  the memory allows. If a limit leaves no room for that many items, fewer are copied ahead.
  If there is no room for a single one, the item is cut into smaller pieces.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, final

from cumem import _core
from cumem.base.errors import OutOfMemoryError
from cumem.base.units import format_nbytes
from cumem.pools.pool import trim

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: The longest time, in seconds, that a copy waits for memory that was dropped. The wait is
#: limited because the memory may be in use until unrelated work has ended.
_PATIENCE = 1.0


class InFlightItem(Protocol[T_co]):
    """An item whose copies have begun."""

    @property
    def output(self) -> T_co:
        """The object that the caller gets."""

    @property
    def label(self) -> str:
        """The name of the item's part of the source, for notes of errors, or ``""``."""

    @property
    def transfer(self) -> _core.Transfer | None:
        """The copy of the item, or None if there is nothing to copy."""

    @property
    def nbytes(self) -> int:
        """The number of bytes that the item takes on the device."""

    def wait_read(self) -> None:
        """Wait until the host memory of the item has been read."""

    def order_after_copy(self, index: int) -> None:
        """Make the streams that will work on item number `index` wait for its copy."""

    def record_use(self, index: int) -> list[_core.Event]:
        """Return events after the work that the caller queued on item number `index`."""


class ItemSource(Protocol[T_co]):
    """A source of items, which also begins their copies."""

    def take(self) -> bool:
        """Ask the source for the next item and keep it until its copies begin.

        Returns False when the source has no more items.
        """

    @property
    def reuses(self) -> bool:
        """Whether a later item may overwrite the memory of the one that was taken."""

    @property
    def has_more(self) -> bool:
        """Whether the next item is known not to overwrite the items before it."""

    @property
    def nbytes(self) -> int:
        """The device bytes of the item that was taken, as far as they are known."""

    @property
    def label(self) -> str:
        """The `InFlightItem.label` of the item that was taken."""

    def begin(self) -> InFlightItem[T_co]:
        """Begin the copies of the item that was taken."""

    def split(self) -> bool:
        """Cut the taken item, to begin its first half; return False if it cannot be cut."""

    def close(self) -> None:
        """Drop the source, because nobody will ask for more items."""

    @property
    def advice(self) -> str:
        """Words for a message that tell the user how to get smaller items."""


class Room:
    """Finds out whether the pools of a device have room for one more item of a loop.

    The first items may make the pools grow. Later ones should use the memory of items
    that the caller has dropped, which is in flight until the device has finished with
    it.
    """

    def __init__(self, device: int, free_count: int) -> None:
        self._device = device
        self._free_count = free_count  # how many more items may make the pools grow
        self._is_patient = True  # False after a wait that ran out of patience

    def has(self, nbytes: int, must: bool) -> bool:
        """Return whether to begin an item: it has memory, or waiting would not help.

        With `must`, wait up to `_PATIENCE` seconds for the memory, and return True in any
        case.
        """
        if self._free_count > 0:
            self._free_count -= 1
            return True
        if nbytes == 0 or not self._is_short(nbytes):
            self._is_patient = True
            return True
        begin = time.monotonic()
        nap = 0.0
        while not self._look(nbytes):
            if not must:
                return False
            if not self._is_patient or time.monotonic() - begin > _PATIENCE:
                self._is_patient = False
                return True
            time.sleep(nap)
            nap = min(2 * nap + 20e-6, 1e-3)
        self._is_patient = True
        return True

    def _look(self, nbytes: int) -> bool:
        """Let pools take back memory whose work has ended; return whether it is enough."""
        trim("device", device=self._device, keep=1 << 62, wait=False)
        return not self._is_short(nbytes)

    def _is_short(self, nbytes: int) -> bool:
        """Return whether the pool would grow although enough of its memory is in flight."""
        return _core._is_memory_in_flight(self._device, nbytes)


@final
class Ahead(Generic[T]):
    """Yields items on a device while the next ones are already being copied there.

    `chunks` and iterations over `prefetch` return this iterator, for ``for`` and ``async
    for``. `close`, the end of a ``with`` block, and dropping the iterator cancel the copies
    that have not begun and wait for the others. Afterwards the source is not read any more.

    Notes
    -----
    In ``async for`` the event loop goes on while the source is read, a copy is under
    way and the device is at work. A separate thread asks the source, in a copy of the
    task's contextvars. The streams are those that are current in the task.
    """

    def __init__(
        self,
        source: ItemSource[T],
        depth: int,
        unfinished: int,
        room: Room,
        name: str,
        word: str,
    ) -> None:
        self._word = word  # what messages call an item
        self._source = source
        self._depth = depth
        self._unfinished = unfinished
        self._room = room
        self._name = name
        self._in_flight: collections.deque[InFlightItem[T]] = collections.deque()
        self._unread: list[
            InFlightItem[T]
        ] = []  # items whose source may be overwritten
        self._used: collections.deque[tuple[int, str, list[_core.Event]]]
        self._used = collections.deque()
        self._ready: InFlightItem[T] | None = None  # the item to deliver next
        self._in_hand: InFlightItem[T] | None = None
        # The bytes of the item that was delivered last, and a reference to it.
        self._last: tuple[int, weakref.ref[Any]] | None = None
        self._failure: Exception | None = None
        self._is_taken = False  # whether an item was taken whose copy has not begun
        self._is_open = True
        self._has_ended = False
        self._index = 0
        self._turn = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    # -- for ---------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """Return the next item.

        **Blocks** as `chunks` and `prefetch` say, with the GIL released.
        """
        with self._own_turn():
            if not self._is_open:
                raise StopIteration
            try:
                self._leave()
                self._prepare()
                return self._deliver()
            except BaseException:
                self._end()
                raise

    def close(self) -> None:
        """Cancel the copies that have not begun and wait for the others.

        A second call does nothing.
        """
        with self._own_turn():
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self._end()

    def __repr__(self) -> str:
        state = f"{self._index} so far" if self._is_open else "ended"
        return f"<cumem.{self._name}, {state}>"

    # -- async for -----------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Return the next item. The event loop goes on meanwhile."""
        if not self._is_open:
            raise StopAsyncIteration
        if self._thread is None:
            # The context carries the ``with device`` blocks, but not the device that
            # was set for the calling thread, so the new thread sets it itself.
            current = _core.current_device().index
            self._thread = ThreadPoolExecutor(
                1, "cumem-ahead", _core.set_current_device, (current,)
            )
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        try:
            with self._own_turn():
                self._leave()
            work = self._thread.submit(context.run, self._prepare_in_turn)
            await asyncio.wrap_future(work, loop=loop)
            ready = self._ready
            if ready is not None and ready.transfer is not None:
                with self._naming(self._index, ready.label):
                    await ready.transfer
            del ready
            with self._own_turn():
                return self._deliver()
        except StopIteration:
            await self.aclose()
            raise StopAsyncIteration from None
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close as `close` does. The event loop goes on meanwhile."""
        thread, self._thread = self._thread, None
        if thread is None:
            self.close()
            return
        done = thread.submit(self._end_in_turn)
        thread.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(done))

    def _prepare_in_turn(self) -> None:
        with self._turn:
            self._prepare()

    def _end_in_turn(self) -> None:
        with self._turn:
            self._end()

    # -- the loop ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _own_turn(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise ValueError(
                f"{self._name} is being asked for the next item by another thread or task"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _leave(self) -> None:
        """Note that the caller has queued its work on the item in hand."""
        in_hand, self._in_hand = self._in_hand, None
        if in_hand is not None:
            self._used.append(
                (self._index, in_hand.label, in_hand.record_use(self._index))
            )
            self._index += 1

    def _prepare(self) -> None:
        """Wait for old work, begin new copies, and set the item to deliver next."""
        if len(self._used) > self._unfinished:
            index, label, events = self._used.popleft()
            with self._naming(index, label):
                for event in events:
                    event.synchronize()
        self._begin_more()
        self._ready = self._in_flight.popleft() if self._in_flight else None

    def _deliver(self) -> T:
        item = self._ready
        if item is None:
            failure, self._failure = self._failure, None
            raise StopIteration if failure is None else failure
        with self._naming(self._index, item.label):
            item.order_after_copy(self._index)
        self._in_hand, self._ready = item, None
        self._last = _watched(item)
        return item.output

    def _begin_more(self) -> None:
        """Begin copies until enough are ahead or memory runs short."""
        try:
            while len(self._in_flight) <= self._depth and self._take():
                must = not self._in_flight
                if not self._room.has(self._source.nbytes, must):
                    return
                try:
                    item = self._source.begin()
                except OutOfMemoryError as error:
                    if not must:  # delivering the items that are ahead makes room
                        self._depth = len(self._in_flight) - 1
                        return
                    if self._source.split():
                        continue
                    self._advise(error)
                    raise
                self._is_taken = False
                self._in_flight.append(item)
                if self._source.reuses:
                    self._unread.append(item)
        except Exception as error:
            self._note(error, self._index + len(self._in_flight), self._source.label)
            self._failure = error  # raised after the items before it are delivered
            self._has_ended = True

    def _take(self) -> bool:
        """Ask for the next item, once those before it have been read."""
        if self._is_taken or self._has_ended:
            return self._is_taken
        if self._unread and not self._source.has_more:
            for item in self._unread:
                # If the copy failed, `order_after_copy` raises the error later.
                with contextlib.suppress(OSError, RuntimeError):
                    item.wait_read()
            self._unread.clear()
        self._is_taken = self._source.take()
        self._has_ended = not self._is_taken
        return self._is_taken

    def _advise(self, error: OutOfMemoryError) -> None:
        error.add_note(
            f"{self._name} wants memory for depth + 2 pieces, of which this one has "
            f"{format_nbytes(self._source.nbytes)}, and has tried with fewer: lower "
            f"depth= and {self._source.advice}, and keep fewer of those that have come"
        )
        if self._last is not None and self._last[1]() is not None:
            error.add_note(
                f"the {self._word} before is still referred to and has "
                f"{format_nbytes(self._last[0])}: `del` it before the next one is asked "
                "for, as a loop's variable holds it until then"
            )

    def _end(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(Exception):  # the device may be gone
            self._leave()
        items = [*([] if self._ready is None else [self._ready]), *self._in_flight]
        self._ready = None
        self._in_flight.clear()
        self._unread.clear()
        self._used.clear()
        self._failure = None
        transfers = [each.transfer for each in items if each.transfer is not None]
        for transfer in transfers:
            transfer.cancel()
        for each in items:
            with contextlib.suppress(OSError, RuntimeError):
                each.wait_read()
        self._source.close()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False)

    def _note(self, error: BaseException, index: int, label: str) -> None:
        error.add_note(place_text(self._word, index, label))

    def _naming(
        self, index: int, label: str
    ) -> contextlib.AbstractContextManager[None]:
        return naming(self._word, index, label)


def _watched(item: InFlightItem[Any]) -> tuple[int, weakref.ref[Any]] | None:
    """Return an item's bytes and a weak reference to it, or None if it allows none."""
    output = item.output
    try:
        return item.nbytes, weakref.ref(output[1] if type(output) is tuple else output)
    except (IndexError, TypeError):
        return None


def place_text(word: str, index: int, label: str) -> str:
    """Return the text of a note that names the item of an exception."""
    return f"in {word} {index}{label}"


def part_label(part: slice) -> str:
    """Return the name of a chunk's part of the source, as `place_text` takes it."""
    return f", src[{part.start}:{part.stop}]"


@contextlib.contextmanager
def naming(word: str, index: int, label: str) -> Iterator[None]:
    """Add a note that names the item to an exception in the block."""
    try:
        yield
    except Exception as error:
        error.add_note(place_text(word, index, label))
        raise
