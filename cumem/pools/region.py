# SPDX-License-Identifier: Apache-2.0
"""A `Region` is device memory that can sleep; `sleep` and `wake` take regions by tag.

A `Region` is a tag and a `Pool` of device memory in long chunks. The extension puts the
pool to sleep and wakes it (``csrc/python/copy/sleeping.c``). This module reads the
arguments, raises the errors, and lets only one thread at a time put a region to sleep or
wake it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, final

from cumem import _core
from cumem.base.errors import OutOfMemoryError
from cumem.base.locks import make_lock
from cumem.base.units import fold, format_nbytes
from cumem.buffers.arguments import hinting, read_flag, wrong_type
from cumem.pools.pool import Pool
from cumem.pools.sleep_files import SleepFiles
from cumem.pools.statistics import REGION_NAMES

if TYPE_CHECKING:  # importing it takes milliseconds
    from cumem.devices.device import Device

#: The least length of a chunk. The driver needs about 40 us to take a chunk back and 35 us
#: to map one, and hardly more for a larger chunk. So a region of few large chunks falls
#: asleep faster.
_CHUNK_NBYTES = 64 << 20


@final
class Region:
    """Device memory that the GPU's other users can have while the region sleeps.

    While a region sleeps, the driver has its memory. The addresses stay reserved, and the
    contents wait in pinned memory or in files, or are given up. After waking, every buffer,
    view, tensor and captured graph over the region can be used again, because no address
    has changed.

    Parameters
    ----------
    tag : str
        A name for `sleep` and `wake`, for messages and for statistics. Several regions may
        share it.
    device : Device, int or str, optional
        The device of the memory; by default cumem's current one.
    host : {'keep', 'release'}
        What happens after waking to the pinned memory that held the contents. With 'keep'
        the region keeps it, which makes the next sleep faster. With 'release' it goes back
        to the system.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If `host` is another word, or the device does not exist.
    CudaError
        If the driver cannot be opened.

    Notes
    -----
    Memory comes in chunks of 64 MiB or more. In a ``with`` block of the region,
    constructors take device memory from it, in this thread or task only. `pool` is the
    region's pool for everything that takes ``pool=``. Dropping the last reference to a
    sleeping region gives up its contents, as `close` does.

    Examples
    --------
    >>> region = cumem.Region("weights")
    >>> with region:
    ...     weights = cumem.full(1000, 7, "f4", "device")
    >>> address = weights.ptr
    >>> region.sleep()
    >>> region.is_asleep, region.pool.stats().reserved_nbytes
    (True, 0)
    >>> region.wake()
    >>> weights.ptr == address, float(weights[999])
    (True, 7.0)
    """

    __slots__ = (
        *("__weakref__", "_files", "_find_spare", "_finalizer", "_guest_count"),
        *("_has_given_up", "_host", "_lock", "_moving_pid", "_pool", "_tag"),
    )
    _tag: str
    _files: SleepFiles | None
    _pool: Pool[_core.DeviceBuffer]
    _host: Literal["keep", "release"]
    _lock: threading.RLock
    #: The process in which a call of sleep(), wake() or close() is under way, or None. The
    #: lock keeps other threads out, but not a signal handler or a finaliser that interrupts
    #: this call. A child that is forked meanwhile compares it with its own number, since
    #: the thread that makes the call does not exist there.
    _moving_pid: int | None
    #: close() has begun while the region slept, so its contents may be gone.
    _has_given_up: bool
    #: How many blocks are open in which another library allocates from the region.
    _guest_count: int
    #: Returns the parts of its memory that such a library does not use now, in order of
    #: address. An integration sets this function.
    _find_spare: Callable[[], list[tuple[int, int]]] | None
    _finalizer: weakref.finalize[[Pool[Any]], Self]

    @hinting
    def __new__(
        cls,
        tag: str,
        device: object = None,
        *,
        host: Literal["keep", "release"] = "keep",
    ) -> Self:
        self = super().__new__(cls)
        self._tag = _read_tag(tag)
        self._files = None
        if not isinstance(host, str):
            raise wrong_type("host", "a str", host)
        if host not in ("keep", "release"):
            raise ValueError(f"host must be 'keep' or 'release', not {host!r}")
        self._host = host
        index = _core._device(device, "device").index
        self._pool = _core._Pool.__new__(
            Pool, "device", index, 0, -1, False, 0, 0, None, _CHUNK_NBYTES
        )
        self._lock = make_lock()
        self._moving_pid = None
        self._has_given_up = False
        self._guest_count = 0
        self._find_spare = None
        facts = self._pool._describe()
        REGION_NAMES[facts.number] = f"region {tag}"
        _TAGS[facts.serial] = tag
        _REGIONS[facts.serial] = self
        self._finalizer = weakref.finalize(self, _core._forget_saved, self._pool)
        self._finalizer.atexit = False
        return self

    @property
    def tag(self) -> str:
        """The tag that the region was made with."""
        return self._tag

    @property
    def pool(self) -> Pool[_core.DeviceBuffer]:
        """The region's pool, for everything that takes ``pool=``."""
        return self._pool

    @property
    def device(self) -> Device:
        """The device of the region's memory."""
        return self._pool.device

    @property
    def host(self) -> Literal["keep", "release"]:
        """What happens to the pinned memory after waking: "keep" or "release"."""
        return self._host

    @property
    def is_asleep(self) -> bool:
        """Whether the driver has the region's memory. A closed region is not asleep."""
        return _core._is_asleep(self._pool)

    @hinting
    def sleep(
        self,
        keep: bool | Literal["file"] = True,
        *,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Give the region's memory to the driver, and keep its addresses.

        Parameters
        ----------
        keep : bool or 'file'
            Where the contents of the buffers go until `wake` brings them back. With True
            they go to pinned memory, and with 'file' to files without names, by way of a
            few blocks of pinned memory. With False they are given up, and are undefined
            after waking.
        path : path-like, optional
            The folder in whose file system the files are made. It is required with
            keep='file', and refused otherwise.

        Raises
        ------
        BufferError
            If a call of cumem works on a buffer of the region, in another thread or further
            out in this one, or if a thread is in a block in which PyTorch allocates from
            the region.
        CudaError
            If a stream is being captured, the device cannot map memory, or the driver
            fails.
        OSError
            If there is no such folder, or the files cannot be made or written, for instance
            because the disk is full.
        OutOfMemoryError
            If there is not enough pinned memory, or its limit is too small.
        ValueError
            If the region is closed, or `keep` is another word.
        TypeError
            If `path` is missing with keep='file', or given without it.

        Notes
        -----
        **Ordered after** everything that works on the region: transfers of cumem, and work
        on all streams that its buffers know. If a buffer was exported or its address was
        read, the call waits for all work on the devices in use. Work that others begin
        later, on the addresses of a sleeping region, ends with an error of the driver.

        **Blocks** until the driver has the memory, with the GIL released. Ctrl-C ends the
        wait.

        Memory goes back only once every byte is safe on the host or in the files. If
        anything fails before that, the region stays awake, and the files are removed. If
        the driver then fails to take memory back, the error is raised, and the region
        sleeps.

        The system removes the files when the process ends, however it ends.

        Calling this on a sleeping region does nothing, whatever `keep` says.

        Examples
        --------
        >>> region = cumem.Region("cache")
        >>> cache = cumem.empty_device(1 << 20, "u1", pool=region.pool)
        >>> region.sleep(keep=False)
        >>> cumem.copy(numpy.empty(1 << 20, "u1"), cache)
        Traceback (most recent call last):
        ...
        RuntimeError: the buffer is in region 'cache', which is asleep: call wake() first
        >>> region.wake()
        """
        keep, folder = _read_keep(keep, path)
        with self._move():
            self._check_open()
            if self.is_asleep:
                return
            self._refuse_guests()
            if keep and self._find_spare is not None:
                spare = itertools.chain.from_iterable(self._find_spare())
                _core._set_spare(self._pool, [*spare])
            files = None if folder is None else SleepFiles(folder, self._tag)
            self._files = files
            try:
                failure = _core._sleep(self._pool, bool(keep), _fds_of(files))
            except OutOfMemoryError as error:
                if keep is True:
                    error.add_note(f"Advice: {_FILE_ADVICE}")
                raise
            finally:
                if files is not None and self.is_asleep:
                    files.note()
                elif files is not None:
                    self._files = None
                    files.close()
            if files is not None and failure is not None:
                raise files.failure(failure, writes=True)

    def wake(self) -> None:
        """Get memory at the same addresses, and bring the contents back.

        Raises
        ------
        OutOfMemoryError
            If the device has not enough memory, or a limit is too small. The region stays
            asleep, and wake() can be called again.
        CudaError
            If the driver fails. The region stays asleep.
        OSError
            If the files with the contents cannot be read, or were changed. The region stays
            asleep. If only the time of a file's last change is later than expected, a
            second call accepts the bytes as they are.
        ValueError
            If the region is closed.

        Notes
        -----
        **Blocks** until all bytes are there, with the GIL released, so that work on any
        stream sees them. Ctrl-C ends the wait, and the region stays asleep.

        Chunks whose buffers were all dropped meanwhile get no memory. Waking a region that
        is awake does nothing.
        """
        with self._move():
            if not self._pool.closed and not self.is_asleep:
                return
            if self._has_given_up:
                raise ValueError(
                    f"region {self._tag!r} was closed while it was asleep: its contents "
                    "are gone"
                )
            self._check_open()
            files = self._files
            if files is not None:
                files.check()
            keep_host = self._host == "keep"
            failure = _core._wake(self._pool, keep_host, _fds_of(files))
            if files is None:
                return
            if failure is not None:
                raise files.failure(failure, writes=False)
            self._files = None
            files.close()

    def _check_open(self) -> None:
        if self._pool.closed:
            raise ValueError(f"region {self._tag!r} is closed")

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, since its addresses belong to this process."""
        raise TypeError("cannot pickle a Region: its memory belongs to this process")

    def close(self) -> None:
        """Stop allocating, and give back memory that is not in use.

        Buffers stay valid if the region is awake. If it sleeps, its contents are lost, and
        its buffers cannot be used any more. Closing a region twice does nothing.

        Notes
        -----
        **Blocks** as `Pool.close` does.
        """
        with self._move():
            if not self._pool.closed:
                # Ctrl-C may end this call at any later line, and the contents may be gone
                # then.
                self._has_given_up = self.is_asleep
                _core._forget_saved(self._pool)
                self._pool.close()
            if self._files is not None:
                self._files.close()

    def __enter__(self) -> Self:
        """Let constructors in the block take device memory from the region."""
        self._pool.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        """End the block."""
        self._pool.__exit__(exc_type, exc_value, traceback)

    # An integration calls _enter_guest() and _leave_guest(), in pairs.

    @contextlib.contextmanager
    def _move(self) -> Iterator[None]:
        """Let nobody else put the region to sleep, wake it or close it in the block."""
        with self._lock:
            self._refuse_within_move()
            self._moving_pid = os.getpid()
            try:
                yield
            finally:
                self._moving_pid = None

    def _refuse_within_move(self) -> None:
        if self._moving_pid == os.getpid():
            raise RuntimeError(
                f"region {self._tag!r} is on its way to sleep or awake in a call that this "
                "one has interrupted: do this after that call, not in a signal handler"
            )

    def _enter_guest(self) -> None:
        """Begin a block in which another library allocates from the region."""
        with self._lock:
            self._refuse_within_move()
            if self.is_asleep:
                raise RuntimeError(
                    f"region {self._tag!r} is asleep, and nothing can be allocated from it:"
                    " call wake() first"
                )
            self._guest_count += 1

    def _leave_guest(self) -> None:
        """End a block that `_enter_guest` began."""
        with self._lock:
            self._guest_count -= 1

    def _refuse_guests(self) -> None:
        if self._guest_count > 0:
            raise BufferError(
                f"region {self._tag!r} cannot go to sleep: PyTorch allocates from it, in a "
                "block of using() in this thread or another one, or since enable()"
            )

    def __repr__(self) -> str:
        where = f"{self._tag!r}, device {self._pool.device.index}"
        if self._pool.closed:
            return f"<cumem.Region {where}, closed>"
        emulated = ", emulated" if _core._is_emulated() else ""
        stats = self._pool.stats()
        live = format_nbytes(stats.live_nbytes)
        held = f"{format_nbytes(stats.reserved_nbytes)} reserved"
        state = "asleep" if self.is_asleep else held
        return fold(f"<cumem.Region {where}{emulated}: {live} live, {state}>")


#: All regions that exist, by the serials of their pools, in the order in which they were
#: made.
_REGIONS: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
#: The tags of all regions that there ever were, for messages about their buffers.
_TAGS: dict[int, str] = {}


def region_of(pool: Pool[Any]) -> Region | None:
    """Return the region that a pool belongs to, or None."""
    return next((each for each in list(_REGIONS.values()) if each.pool is pool), None)


def _is_over(region: Region) -> bool:
    """Return whether a region was closed, perhaps by a call that Ctrl-C has ended."""
    return region.pool.closed or region._has_given_up


def _read_tag(tag: Any) -> str:
    if not isinstance(tag, str):
        raise wrong_type("tag", "a str", tag)
    return tag


_FILE_ADVICE = (
    "sleep(keep='file', path=folder) needs no more pinned memory than other transfers of "
    "files"
)


def _fds_of(files: SleepFiles | None) -> tuple[int, ...]:
    return () if files is None else files.fds


def _read_keep(keep: Any, path: Any) -> tuple[bool, None] | tuple[Literal["file"], str]:
    """Return where the contents go, and the folder for their files or None."""
    if isinstance(keep, str) and keep != "file":
        raise ValueError(f"keep must be True, False or 'file', not {keep!r}")
    if isinstance(keep, str):
        if path is None:
            raise TypeError("keep='file' needs path=, a folder for the files")
        if not isinstance(path, str | os.PathLike):
            raise wrong_type("path", "a str or a path", path)
        return "file", os.fsdecode(path)
    if path is not None:
        raise TypeError("path is only for keep='file'")
    return read_flag(keep, "keep"), None


def _find(tags: tuple[Any, ...]) -> list[Region]:
    """Return the open regions with any of the tags, or all open ones if there are none."""
    regions = [each for each in list(_REGIONS.values()) if not _is_over(each)]
    known = {each.tag for each in regions}
    for tag in tags:
        if _read_tag(tag) not in known:
            names = ", ".join(sorted(map(repr, known))) or "none"
            raise ValueError(f"no region has the tag {tag!r}; the tags are: {names}")
    return [each for each in regions if not tags or each.tag in tags]


@hinting
def sleep(
    *tags: str,
    keep: bool | Literal["file"] = True,
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Put all regions with these tags to sleep.

    Parameters
    ----------
    *tags : str
        The tags; without any, all regions are meant.
    keep : bool or 'file'
        Where their contents go, as for `Region.sleep`.
    path : path-like, optional
        The folder for the files of all these regions, as for `Region.sleep`.

    Raises
    ------
    ValueError
        If one of the tags belongs to no region, or `keep` is another word. No region was
        put to sleep then.
    TypeError
        If `path` is missing with keep='file', or given without it. No region was put to
        sleep then.
    BufferError, CudaError, OSError, OutOfMemoryError
        As `Region.sleep`. The regions that were put to sleep before stay asleep.

    Notes
    -----
    **Blocks** as `Region.sleep` does. The regions go to sleep one after the other, in the
    order in which they were made.

    Examples
    --------
    >>> weights = cumem.Region("weights")
    >>> cache = cumem.Region("cache")
    >>> cumem.sleep("weights")
    >>> cumem.sleep("cache", keep=False)
    >>> weights.is_asleep, cache.is_asleep
    (True, True)
    >>> cumem.wake("weights", "cache")
    """
    keep, path = _read_keep(keep, path)
    for region in _find(tags):
        region.sleep(keep, path=path)


@hinting
def wake(*tags: str) -> None:
    """Wake all regions with these tags.

    Parameters
    ----------
    *tags : str
        The tags; without any, all regions are meant.

    Raises
    ------
    ValueError
        If one of the tags belongs to no region. No region was woken then.
    CudaError, OSError, OutOfMemoryError
        As `Region.wake`. The regions that were woken before stay awake.

    Notes
    -----
    **Blocks** as `Region.wake` does. The regions wake one after the other, in the order in
    which they were made.

    Examples
    --------
    >>> region = cumem.Region("weights")
    >>> cumem.sleep("weights")
    >>> cumem.wake("weights")
    >>> region.is_asleep
    False
    """
    for region in _find(tags):
        region.wake()


# -- words for the extension -----------------------------------------------------------


def refuse_use(serial: int) -> NoReturn:
    """Raise a RuntimeError for a buffer whose region sleeps, or was closed asleep."""
    tag = _TAGS.get(serial)
    region = _REGIONS.get(serial)
    if region is None or _is_over(region):
        raise RuntimeError(
            f"the buffer is in region {tag!r}, which was closed while it was asleep: its "
            "contents are gone"
        )
    raise RuntimeError(
        f"the buffer is in region {tag!r}, which is asleep: call wake() first"
    )


def refuse_call(serial: int, nbytes: int) -> NoReturn:
    """Raise a BufferError for a region that cannot sleep while a call uses its buffer."""
    raise BufferError(
        f"region {_TAGS.get(serial)!r} cannot go to sleep: a call of cumem works on a "
        f"buffer of {format_nbytes(nbytes)} in it, in another thread or below this one"
    )
