# SPDX-License-Identifier: Apache-2.0
"""Pools as objects, and what they take, checked and as numbers."""

from __future__ import annotations

import operator
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    TypedDict,
    TypeVar,
    Unpack,
    final,
    overload,
)

from cumem import _core
from cumem.base.displays import show
from cumem.base.errors import warn_caller
from cumem.base.kinds import (
    ATTACH_HOST,
    KINDS,
    PAGE_LOCKED,
    PORTABLE,
    WRITE_COMBINED,
    check_kind,
)
from cumem.base.locks import make_lock
from cumem.base.units import fold, format_nbytes, read_size
from cumem.buffers.arguments import hinting, read_flag, read_seconds, wrong_type
from cumem.pools.limits import read_limit, settled

if TYPE_CHECKING:  # they take milliseconds to load
    from matplotlib.axes import Axes

    from cumem._core import _B_co
    from cumem.devices.device import Device
    from cumem.pools.snapshot import Snapshot
    from cumem.pools.statistics import PoolStats
else:
    _B_co = TypeVar("_B_co", covariant=True)


class _Options(TypedDict, total=False):
    """What `Pool` takes by name."""

    device: object
    limit: int | str | None
    numa_node: int | None
    segments: Literal["auto", "malloc"]
    fork: Literal["copy", "share", "omit"]
    idle_trim: float | None
    portable: bool
    write_combined: bool
    attach: Literal["global", "host"]


@final
class Pool(_core._Pool[_B_co]):
    """Memory of one kind on one device, cut into blocks of exactly the size asked for and
    kept for reuse.

    In a ``with`` block it is what constructors of its kind and device take memory from,
    in this thread or task alone. Buffers keep the memory they have when the pool is
    closed or dropped.

    Parameters
    ----------
    kind : str
        One that `empty` takes, such as ``"pinned"``.
    device : Device, int or str, optional
        Whose memory, or whose context page-locks it; default: cumem's current one.
    limit : int or str, optional
        Most that it may hold, cached memory included: bytes, a text such as ``"4GiB"``,
        or a share such as ``"50%"`` of what `set_limit` takes a share of. It counts
        against the limit of its kind as well.
    numa_node : int, optional
        Where pages of pinned and mapped memory are to lie; default: near the
        device. The node must have memory.
    segments : {'auto', 'malloc'}
        'malloc' takes every segment by one allocation of the CUDA runtime, as
        ``cudaIpc`` and older MPI libraries need it; 'auto' may map memory piece by
        piece, which wastes less.
    fork : {'copy', 'share', 'omit'}
        What children that are forked get of pinned and mapped memory. 'copy': a copy of
        their own of what lives, which the fork takes the time and the memory for.
        'share': the same memory, at no cost, and each side sees what the other writes;
        a block that lived at a fork is used again only when those children have ended.
        'omit': nothing, at no cost; a child that touches it is ended by a signal.
    idle_trim : float, optional
        Seconds, at most 1e9, after which cached memory that was not needed goes back, also
        while nobody allocates; default: never. A thread that the copies have as well sees
        to it, 100 times a second at most.
    portable, write_combined : bool
        Of pinned and mapped memory, as in `empty_pinned`.
    attach : {'global', 'host'}
        Of managed memory, as in `empty_managed`.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If a value is none of those that exist, or belongs to another kind of memory.
    CudaError
        If the driver cannot be opened.

    Notes
    -----
    Takes no memory until the first allocation.

    Examples
    --------
    >>> with cumem.Pool("pinned", limit="64MiB") as pool:
    ...     buf = cumem.empty_pinned(1 << 20, "u1")  # of this pool
    >>> pool.stats().live_nbytes
    1048576
    """

    __slots__ = ()

    @overload
    def __new__(
        cls, kind: Literal["device"] = ..., **options: Unpack[_Options]
    ) -> Pool[_core.DeviceBuffer]: ...
    @overload
    def __new__(
        cls, kind: Literal["pinned"], **options: Unpack[_Options]
    ) -> Pool[_core.PinnedBuffer]: ...
    @overload
    def __new__(
        cls, kind: Literal["mapped"], **options: Unpack[_Options]
    ) -> Pool[_core.MappedBuffer]: ...
    @overload
    def __new__(
        cls, kind: Literal["managed"], **options: Unpack[_Options]
    ) -> Pool[_core.ManagedBuffer]: ...
    @overload
    def __new__(
        cls, kind: _core._Kind, **options: Unpack[_Options]
    ) -> Pool[_core.Buffer]: ...
    @hinting
    def __new__(
        cls,
        kind: _core._Kind = "device",
        *,
        device: object = None,
        limit: int | str | None = None,
        numa_node: int | None = None,
        segments: Literal["auto", "malloc"] = "auto",
        fork: Literal["copy", "share", "omit"] = "copy",
        idle_trim: float | None = None,
        portable: bool = True,
        write_combined: bool = False,
        attach: Literal["global", "host"] = "global",
    ) -> Pool[Any]:
        check_kind(kind)
        way = _fork(kind, fork, segments, write_combined)
        index = _core._device(device, "device").index
        return super().__new__(
            cls,
            kind,
            index,
            _flags(kind, portable, write_combined, attach),
            _node(kind, numa_node),
            _is_second(segments, "segments", "auto", "malloc"),
            way,
            _idle_trim_ns(idle_trim),
            _limit_nbytes(kind, index, limit),
        )

    @property
    def kind(self) -> _core._Kind:
        """ "device", "pinned", "mapped" or "managed"."""
        return self._config.kind

    @property
    def device(self) -> Device:
        """Device whose memory it is, or whose context page-locks it."""
        return self._config.device

    def __dir__(self) -> list[str]:
        """Names of members that can be read now."""
        return sorted({*object.__dir__(self)}.difference(("limit",) * self.closed))

    @property
    def limit(self) -> int | None:
        """Most bytes that it may hold, or None; may be set, also to "4GiB" or "50%". What
        it caches above that goes back at once, buffers that live stay. Raises ValueError
        after close().
        """
        facts = self._describe()
        return settled(facts.limit, facts.device)

    @limit.setter
    def limit(self, value: int | str | None) -> None:
        if not self.closed:
            config = self._config
            value = _limit_nbytes(config.kind, config.device.index, value)
        self._set_limit(value)  # type: ignore[arg-type]

    @limit.deleter
    def limit(self) -> None:
        raise AttributeError("limit cannot be deleted: set it to None")

    @property
    def numa_node(self) -> int | None:
        """Where the pages were asked to lie, or None: near the device."""
        node = self._config.numa_node
        return None if node < 0 else node

    @property
    def segments(self) -> Literal["auto", "malloc"]:
        """ "auto" or "malloc"."""
        return "malloc" if self._config.is_plain else "auto"

    @property
    def fork(self) -> Literal["copy", "share", "omit"]:
        """ "copy", "share" or "omit": what forked children get."""
        return _FORKS[self._config.fork]

    @property
    def idle_trim(self) -> float | None:
        """Seconds after which cached memory that was not needed goes back, or None; may be
        set, also of a default pool. Raises ValueError if set after close().
        """
        ns = self._config.idle_trim_ns
        return ns / 1e9 if ns else None  # the nearest to what was given

    @idle_trim.setter
    def idle_trim(self, value: float | None) -> None:
        self._set_idle_trim(_idle_trim_ns(value))

    @idle_trim.deleter
    def idle_trim(self) -> None:
        raise AttributeError("idle_trim cannot be deleted: set it to None")

    @property
    def closed(self) -> bool:
        """True after close() or shutdown(): nothing is allocated any more."""
        return self._config.is_closed

    def stats(self) -> PoolStats:
        """Read all counters at one moment.

        Returns
        -------
        PoolStats

        Raises
        ------
        ValueError
            If the pool is closed.
        """
        from cumem.pools.statistics import pool_stats

        return pool_stats(self._describe())

    def reset_peaks(self) -> None:
        """Let the peaks start again from what is held now.

        Raises
        ------
        ValueError
            If the pool is closed.
        """
        self._reset_peaks()

    def snapshot(self) -> Snapshot:
        """List all segments and blocks at one moment.

        Returns
        -------
        Snapshot
            ``print()`` draws it as a map.

        Raises
        ------
        ValueError
            If the pool is closed.
        """
        from cumem.pools.snapshot import snapshot

        return snapshot(self._config, self._list_blocks())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw its segments and blocks as they are now.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to; default: a new figure.

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        ImportError
            If matplotlib is not installed: ``pip install 'cumem[plot]'``.
        ValueError
            If the pool is closed.
        """
        return self.snapshot().plot(ax)

    @hinting
    def trim(self, keep: int | str = 0, wait: bool = True) -> int:
        """Give cached memory back to the driver.

        Parameters
        ----------
        keep : int or str
            So many bytes stay cached, as ``1 << 20`` or ``"1MiB"``: memory goes back in
            whole pieces while so much is left.
        wait : bool
            Wait first for work on memory that was freed, so that it goes back as well.

        Returns
        -------
        int
            Bytes given back.

        Raises
        ------
        TypeError
            If an argument has the wrong type.
        ValueError
            If `keep` cannot be read or the pool is closed.
        CudaError
            If the driver refuses; the rest is still given back.

        Notes
        -----
        **Blocks** while it waits and while the driver frees, GIL released.
        """
        return _core._trim(self, None, -1, *_trim_options(keep, wait))

    def close(self) -> None:
        """Allocate no more, and give back what is not in use; a second time does nothing.

        Buffers stay valid: their memory goes back when the last of them dies.

        Raises
        ------
        ValueError
            If it is a default pool; nothing is done then.

        Notes
        -----
        **Blocks** until work on memory that was freed is done, if no buffer is
        left; GIL released. Ctrl-C ends the wait and leaves the pool open: close it
        again. Not so where the pool is dropped instead, or where the last of its
        buffers dies after close(): that waits to the end.
        """
        config = self._config
        if config.number == 0 and not config.is_closed:
            raise ValueError(
                "a default pool cannot be closed: trim() it, or shutdown()"
            )
        self._close()

    def __repr__(self) -> str:
        from cumem.pools.statistics import pool_name, pool_stats

        config = self._config
        where = (
            f"{pool_name(config)!r} of {config.kind} memory, "
            f"device {config.device.index}"
        )
        if config.is_closed:
            return f"<cumem.Pool {where}, closed>"
        emulated = ", emulated" if _core._is_emulated() else ""
        stats = pool_stats(self._describe())
        return fold(
            f"<cumem.Pool {where}{emulated}: {format_nbytes(stats.live_nbytes)} live, "
            f"{format_nbytes(stats.reserved_nbytes)} reserved>"
        )

    def _repr_html_(self) -> str | None:
        from cumem.pools.statistics import pool_name

        config = self._config
        title = (
            f"cumem.Pool {pool_name(config)!r} of {config.kind} memory, "
            f"device {config.device.index}"
        )
        shown: str | None = show("html", self, title)
        return shown


_core._set_pool_type(Pool)

#: Of each kind and device, once it was asked for.
_DEFAULTS: dict[tuple[str, int], Pool[Any]] = {}
_LOCK = make_lock()


@overload
def default_pool(
    kind: Literal["pinned"], device: object = ...
) -> Pool[_core.PinnedBuffer]: ...
@overload
def default_pool(
    kind: Literal["mapped"], device: object = ...
) -> Pool[_core.MappedBuffer]: ...
@overload
def default_pool(
    kind: Literal["managed"], device: object = ...
) -> Pool[_core.ManagedBuffer]: ...
@overload
def default_pool(
    kind: Literal["device"], device: object = ...
) -> Pool[_core.DeviceBuffer]: ...
@overload
def default_pool(kind: _core._Kind, device: object = ...) -> Pool[_core.Buffer]: ...
@hinting
def default_pool(kind: _core._Kind, device: object = None) -> Pool[Any]:
    """The pool that constructors take memory from when no other is asked for.

    Parameters
    ----------
    kind : {'pinned', 'mapped', 'managed', 'device'}
    device : Device, int or str, optional
        Whose memory, or whose context page-locks it; default: cumem's current one.

    Returns
    -------
    Pool
        Always the same until `shutdown`. It cannot be closed.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If the kind or the device does not exist.
    CudaError
        If the driver cannot be opened.

    Notes
    -----
    Memory made with ``write_combined=True``, ``portable=False`` or
    ``attach="host"`` has default pools of its own, which `stats` lists.

    Examples
    --------
    >>> pool = cumem.default_pool("pinned")
    >>> pool.stats().kind
    'pinned'
    """
    check_kind(kind)
    key = kind, _core._device(device, "device").index
    found = _DEFAULTS.get(key)
    if found is None or found.closed:  # by shutdown()
        made = _core._default_pool(*key)
        with _LOCK:  # another thread may have made one
            found = _DEFAULTS.get(key)
            if found is None or found.closed:
                found = _DEFAULTS[key] = made
    return found


@hinting
def trim(
    kind: _core._Kind | None = None,
    *,
    device: object = None,
    keep: int | str = 0,
    wait: bool = True,
) -> int:
    """Give memory that the pools keep for reuse back to the driver.

    Call it when another library runs out of memory, PyTorch for instance.

    Parameters
    ----------
    kind : str, optional
        Which pools, as in `empty`; default: all.
    device : Device, int or str, optional
        Only pools of this device; default: all.
    keep : int or str
        So many bytes stay cached in all of them together, as ``1 << 20`` or
        ``"1MiB"``: memory goes back in whole pieces while so much is left.
    wait : bool
        Wait first for work on memory that was freed, so that it goes back as well.

    Returns
    -------
    int
        Bytes given back.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If the kind or the device does not exist or `keep` cannot be read.
    CudaError
        If the driver refuses; the rest is still given back.

    Notes
    -----
    **Blocks** as `Pool.trim` does. Buffers that are in use and memory that belongs to a
    captured graph stay.

    Examples
    --------
    >>> buf = cumem.empty_pinned(1 << 20, "u1")
    >>> del buf  # its memory stays in the pool
    >>> cumem.trim("pinned") >= 1 << 20
    True
    """
    if kind is not None:
        check_kind(kind)
    index = -1 if device is None else _core._device(device, "device").index
    return _core._trim(None, kind, index, *_trim_options(keep, wait))


def _trim_options(keep: int | str, wait: bool) -> tuple[int, bool]:
    return read_size(keep, "keep", False, None), read_flag(wait, "wait")


def _limit_nbytes(kind: Any, device: int, limit: Any) -> int | None:
    """What `Pool.limit` takes, in bytes."""
    place = None if kind in PAGE_LOCKED else device
    return read_limit(kind, limit, place)[0][1]


def _idle_trim_ns(seconds: Any) -> int:
    """What `Pool.idle_trim` takes, in nanoseconds; 0 for None."""
    if seconds is None:
        return 0
    value = read_seconds(seconds, "idle_trim")
    if not 0 < value <= 1e9:
        raise ValueError(
            "idle_trim must be a number of seconds above 0 and up to 1e9, not "
            f"{seconds!r}"
        )
    return max(1, round(value * 1e9))


def _flags(kind: str, portable: Any, write_combined: Any, attach: Any) -> int:
    portable = read_flag(portable, "portable")
    write_combined = read_flag(write_combined, "write_combined")
    attach_host = _is_second(attach, "attach", "global", "host")
    if kind not in PAGE_LOCKED and (write_combined or not portable):
        name = "write_combined" if write_combined else "portable"
        raise _other_kind(name, kind, "pinned and mapped")
    if attach_host and not KINDS[kind].migrates:
        raise _other_kind("attach", kind, "managed")
    if attach_host:
        return ATTACH_HOST
    flags = KINDS[kind].flags if portable else KINDS[kind].flags & ~PORTABLE
    return flags | WRITE_COMBINED if write_combined else flags


#: As cm_fork numbers them.
_FORKS: tuple[Literal["copy", "share", "omit"], ...] = ("copy", "share", "omit")


def _fork(kind: str, fork: Any, segments: Any, write_combined: Any) -> int:
    if not isinstance(fork, str):
        raise wrong_type("fork", "a str", fork)
    if fork not in _FORKS:
        raise ValueError(f"fork must be 'copy', 'share' or 'omit', not {fork!r}")
    if fork != "copy" and kind not in PAGE_LOCKED:
        raise _other_kind("fork", kind, "pinned and mapped")
    if fork == "share" and (segments == "malloc" or write_combined):
        other = "segments='malloc'" if segments == "malloc" else "write_combined=True"
        raise ValueError(
            f"fork='share' needs memory that cumem maps itself: leave out {other}"
        )
    if fork == "share" and (setting := _small_shared_pages()) is not None:
        warn_caller(
            "fork='share' has pages of 4 KiB on this system, where copies and page-locking "
            f"take longer: {_SHARED_PAGES} says '{setting}'; "
            f"echo advise | sudo tee {_SHARED_PAGES} gives it huge ones",
            RuntimeWarning,
        )
    return _FORKS.index(fork)


_SHARED_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def _small_shared_pages() -> str | None:
    """The setting by which shared memory has no huge pages; None: it has them."""
    try:
        with open(_SHARED_PAGES, encoding="ascii") as file:
            text = file.read()
    except OSError:
        return "nothing"
    chosen = text.partition("[")[2].partition("]")[0]
    return None if chosen in ("always", "within_size", "advise", "force") else chosen


def _node(kind: str, numa_node: Any) -> int:
    if numa_node is None:
        return -1
    if kind not in PAGE_LOCKED:
        raise _other_kind("numa_node", kind, "pinned and mapped")
    if isinstance(numa_node, bool) or not hasattr(numa_node, "__index__"):
        raise wrong_type("numa_node", "an int or None", numa_node)
    node = operator.index(numa_node)
    _, mask = _core._processors()
    nodes = [each for each in range(mask.bit_length()) if mask >> each & 1]
    if node not in nodes:
        raise ValueError(
            f"numa_node {node} does not exist, or has no memory: the nodes with memory "
            f"are {nodes}"
        )
    return node


def _is_second(value: Any, name: str, first: str, second: str) -> bool:
    """Which of two words it is."""
    if not isinstance(value, str):
        raise wrong_type(name, "a str", value)
    if value not in (first, second):
        raise ValueError(f"{name} must be '{first}' or '{second}', not {value!r}")
    return value == second


def _other_kind(name: str, kind: str, of: str) -> ValueError:
    return ValueError(f"{name} is for {of} memory, not for {kind} memory")


def refuse_block(kind: str, own_device: int, device: int) -> NoReturn:
    """ValueError: a pool is entered where no constructor would take memory from it."""
    raise ValueError(
        f"the {kind} pool is of device {own_device}, but device {device} is current, so "
        f"that constructors in the block would not use it: write with "
        f"cumem.Device({own_device}), pool: or pass pool=pool to each"
    )


def refuse_request(own: str, kind: str, own_device: int, device: int) -> NoReturn:
    """ValueError: a pool of that kind and device was given for other memory."""
    if own != kind:
        why = f"pool is one of {own} memory, but {kind} memory is asked for"
    elif own_device != device:
        why = f"pool is of device {own_device}, but memory of device {device} is asked for"
    else:
        why = (
            "pool was made with other values of portable, write_combined or attach: "
            "leave them out beside pool="
        )
    raise ValueError(why)
