# SPDX-License-Identifier: Apache-2.0
"""Has the type `Pool`, the default pools, and the checks of their arguments.

The extension's type ``_core._Pool`` allocates and frees memory. `Pool` derives from it and
adds the other parts that users see: checked arguments, properties, and results such as
those of `stats`. A `Pool` refers to a pool of the extension and has no state of its own.

Constructors that are not given a pool use the default pools of the extension, for which no
`Pool` is needed. `default_pool` makes the `Pool` for one of them at the first request, and
keeps it, so that all callers get the same object.
"""

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
from cumem.pools.limits import limit_in_bytes, read_limit

if TYPE_CHECKING:  # importing these takes milliseconds
    from matplotlib.axes import Axes

    from cumem._core import _B_co
    from cumem.devices.device import Device
    from cumem.pools.snapshot import Snapshot
    from cumem.pools.statistics import PoolStats
else:
    _B_co = TypeVar("_B_co", covariant=True)


class _Options(TypedDict, total=False):
    """The keywords of `Pool`."""

    device: object
    limit: int | str | None
    numa_node: int | None
    segments: Literal["auto", "malloc"]
    fork: Literal["copy", "share", "omit"]
    idle_trim: float | None
    portable: bool
    write_combined: bool
    attach: Literal["global", "host"]
    spill: Literal["pinned"] | None
    spill_limit: int | str | None


@final
class Pool(_core._Pool[_B_co]):
    """Memory of one kind on one device, which is handed out in blocks and kept for reuse.

    A block has exactly the size that was asked for. In a ``with`` block, constructors of
    the pool's kind and device take memory from it, in this thread or task only. Buffers
    keep their memory when the pool is closed or dropped.

    Parameters
    ----------
    kind : str
        A kind that `empty` takes, such as ``"pinned"``.
    device : Device, int or str, optional
        The device of the memory, or the one whose context page-locks it; by default
        cumem's current one.
    limit : int or str, optional
        The most bytes that the pool may hold, including cached ones: a number, a text such
        as ``"4GiB"``, or a share such as ``"50%"`` of the same memory as for `set_limit`.
        What the pool holds also counts against the limit of its kind.
    numa_node : int, optional
        The node on which pages of pinned and mapped memory should be; by default one
        near the device. The node must have memory.
    segments : {'auto', 'malloc'}
        'malloc' takes every segment by one allocation of the CUDA runtime, which
        ``cudaIpc`` and older MPI libraries need. 'auto' may map memory piece by piece,
        which wastes less.
    fork : {'copy', 'share', 'omit'}
        What happens to pinned and mapped memory in forked children. With 'copy' they get a
        copy of live memory, which costs the fork time and memory. With 'share' they get the
        same memory at no cost. Each side then sees what the other writes, and a block that
        was live at a fork is reused only when the children have ended. With 'omit' they get
        nothing, also at no cost, and a signal ends a child that touches the memory.
    idle_trim : float, optional
        The seconds, at most 1e9, after which cached memory that was not needed is given
        back, even if nobody allocates. By default this never happens. A background thread
        does it at most 100 times a second.
    portable, write_combined : bool
        For pinned and mapped memory, as for `empty_pinned`.
    attach : {'global', 'host'}
        For managed memory, as for `empty_managed`.
    spill : {'pinned'}, optional
        With 'pinned', for device memory only, the buffers that have been idle longest go to
        pinned memory when memory is short. They come back at the same addresses when they
        are used. By default the allocation fails instead. Buffers that others may use are
        not moved: those that were exported or captured by a graph, or whose address was
        read.
    spill_limit : int or str, optional
        The most pinned memory that spilled buffers may take, as for `limit`; by default
        only the limit of pinned memory counts.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If an argument has an unknown value, or is for another kind of memory.
    CudaError
        If the driver cannot be opened.

    Notes
    -----
    A pool takes no memory until the first allocation.

    Examples
    --------
    >>> with cumem.Pool("pinned", limit="64MiB") as pool:
    ...     buf = cumem.empty_pinned(1 << 20, "u1")  # from this pool
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
        spill: Literal["pinned"] | None = None,
        spill_limit: int | str | None = None,
    ) -> Pool[Any]:
        check_kind(kind)
        spills = _spills(kind, spill, spill_limit, segments)
        way = _fork(kind, fork, segments, write_combined)
        index = _core._device(device, "device").index
        return super().__new__(
            cls,
            kind,
            index,
            _flags(kind, portable, write_combined, attach),
            read_node(kind, numa_node),
            _is_second(segments, "segments", "auto", "malloc"),
            way,
            _idle_trim_ns(idle_trim),
            _limit_nbytes(kind, index, limit),
            0,
            spills,
            _limit_nbytes("pinned", index, spill_limit),
        )

    @property
    def kind(self) -> _core._Kind:
        """The kind of memory: "device", "pinned", "mapped" or "managed"."""
        return self._config.kind

    @property
    def device(self) -> Device:
        """The device of the memory, or the one whose context page-locks it."""
        return self._config.device

    @property
    def limit(self) -> int | None:
        """The most bytes that the pool may hold, or None.

        It may be set, to a text such as "4GiB" or "50%" too. Cached memory above a new
        limit is given back at once, and live buffers stay. Reading it after close() raises
        a ValueError.
        """
        facts = self._describe()
        return limit_in_bytes(facts.limit, facts.device)

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
        """The NUMA node that was given, or None for one near the device."""
        node = self._config.numa_node
        return None if node < 0 else node

    @property
    def segments(self) -> Literal["auto", "malloc"]:
        """How segments are allocated: "auto" or "malloc"."""
        return "malloc" if self._config.is_plain else "auto"

    @property
    def fork(self) -> Literal["copy", "share", "omit"]:
        """What forked children get: "copy", "share" or "omit"."""
        return _FORKS[self._config.fork]

    @property
    def spill(self) -> Literal["pinned"] | None:
        """Where idle buffers go when memory is short: "pinned", or None for nowhere."""
        return "pinned" if self._config.spills else None

    @property
    def spill_limit(self) -> int | None:
        """The most pinned memory that spilled buffers may take, or None."""
        return self._config.spill_limit if self._config.spills else None

    @property
    def idle_trim(self) -> float | None:
        """The seconds after which unneeded cached memory is given back, or None.

        It may be set, for default pools too. Setting it after close() raises a ValueError.
        """
        ns = self._config.idle_trim_ns
        return ns / 1e9 if ns else None  # the double nearest to the value that was set

    @idle_trim.setter
    def idle_trim(self, value: float | None) -> None:
        self._set_idle_trim(_idle_trim_ns(value))

    @idle_trim.deleter
    def idle_trim(self) -> None:
        raise AttributeError("idle_trim cannot be deleted: set it to None")

    @property
    def closed(self) -> bool:
        """Whether close() or shutdown() was called, after which nothing is allocated."""
        return self._config.is_closed

    def stats(self) -> PoolStats:
        """Read all counters of the pool at one moment.

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
        """Set the peaks to the present values.

        Raises
        ------
        ValueError
            If the pool is closed.
        """
        self._reset_peaks()

    def snapshot(self) -> Snapshot:
        """List all segments and blocks of the pool at one moment.

        Returns
        -------
        Snapshot
            The segments with their blocks; ``print()`` draws them as a map.

        Raises
        ------
        ValueError
            If the pool is closed.
        """
        from cumem.pools.snapshot import snapshot

        return snapshot(self._config, self._list_blocks())

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the segments and blocks as they are now.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; by default in a new figure.

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
            The bytes to keep cached, such as ``1 << 20`` or ``"1MiB"``. Memory is given
            back in whole pieces, as long as at least this much is left.
        wait : bool
            Whether to wait first for work on freed memory, so that it is given back too.

        Returns
        -------
        int
            The bytes that were given back.

        Raises
        ------
        TypeError
            If an argument has the wrong type.
        ValueError
            If `keep` cannot be read or the pool is closed.
        CudaError
            If the driver refuses. Other memory is still given back.

        Notes
        -----
        **Blocks** while it waits and while the driver frees, with the GIL released.
        """
        return _core._trim(self, None, -1, *_trim_options(keep, wait))

    def close(self) -> None:
        """Stop allocating, and give back memory that is not in use.

        Buffers stay valid: their memory is given back when the last of them is dropped.
        Closing a pool twice does nothing.

        Raises
        ------
        ValueError
            If this is a default pool, which stays open.

        Notes
        -----
        **Blocks** until work on freed memory is done, if no buffer is left, with the GIL
        released. Ctrl-C ends this wait and leaves the pool open, so that close() can be
        called again. Dropping the pool, or the last of its buffers after close(), can wait
        in the same way, but then Ctrl-C does not end the wait.
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
        asleep = ""
        if stats.asleep_nbytes:
            asleep = f", {format_nbytes(stats.asleep_nbytes)} asleep"
        return fold(
            f"<cumem.Pool {where}{emulated}: {format_nbytes(stats.live_nbytes)} live, "
            f"{format_nbytes(stats.reserved_nbytes)} reserved{asleep}>"
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

#: The default pool for each kind and device that was asked for.
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
    """Return the pool that constructors use when no other pool is given.

    Parameters
    ----------
    kind : {'pinned', 'mapped', 'managed', 'device'}
    device : Device, int or str, optional
        The device of the memory, or the one whose context page-locks it; by default
        cumem's current one.

    Returns
    -------
    Pool
        The pool, which is the same object until `shutdown` and cannot be closed.

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
    ``attach="host"`` has separate default pools, which `stats` lists.

    Examples
    --------
    >>> pool = cumem.default_pool("pinned")
    >>> pool.stats().kind
    'pinned'
    """
    check_kind(kind)
    key = kind, _core._device(device, "device").index
    found = _DEFAULTS.get(key)
    if found is None or found.closed:  # shutdown() closes default pools
        made = _core._default_pool(*key)
        with _LOCK:  # another thread may have made the pool meanwhile
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
    """Give back to the driver the memory that pools keep for reuse.

    Call it when another library, such as PyTorch, runs out of memory.

    Parameters
    ----------
    kind : str, optional
        The kind of the pools, as for `empty`; by default all pools are trimmed.
    device : Device, int or str, optional
        The device of the pools; by default all devices.
    keep : int or str
        The bytes to keep cached in all of them together, such as ``1 << 20`` or
        ``"1MiB"``. Memory is given back in whole pieces, as long as at least this much is
        left.
    wait : bool
        Whether to wait first for work on freed memory, so that it is given back too.

    Returns
    -------
    int
        The bytes that were given back.

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
    **Blocks** as `Pool.trim` does. Memory of live buffers and of captured graphs is not
    given back.

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
    """Return a value for `Pool.limit` as bytes."""
    place = None if kind in PAGE_LOCKED else device
    return read_limit(kind, limit, place)[0][1]


def _spills(kind: Any, spill: Any, limit: Any, segments: Any) -> bool:
    """Return whether a pool spills, after checking the arguments for this."""
    if spill is None:
        if limit is not None:
            raise ValueError('spill_limit is for pools with spill="pinned"')
        return False
    if not isinstance(spill, str):
        raise wrong_type("spill", "a str or None", spill)
    if spill != "pinned":
        raise ValueError(f"spill must be 'pinned' or None, not {spill!r}")
    if kind != "device":
        raise ValueError(f"spill is for device memory, and not for {kind} memory")
    if segments == "malloc":
        raise ValueError(
            "memory of segments='malloc' cannot be given back piece by piece, so it "
            "cannot spill"
        )
    return True


def _idle_trim_ns(seconds: Any) -> int:
    """Return a value for `Pool.idle_trim` as nanoseconds; None becomes 0."""
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


#: The values of `fork`, in the order of the numbers of cm_fork.
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
    if fork == "share" and (reason := why_shared_pages_are_small()) is not None:
        warn_caller(
            "fork='share' uses pages of 4 KiB on this system, which makes copies and "
            f"page-locking slower: {reason}",
            RuntimeWarning,
        )
    return _FORKS.index(fork)


_SHARED_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def why_shared_pages_are_small() -> str | None:
    """Return why shared memory gets no huge pages here, or None if it may have them."""
    try:
        with open(_SHARED_PAGES, encoding="ascii") as file:
            text = file.read()
    except FileNotFoundError:
        return f"its kernel gives shared memory no huge pages: {_SHARED_PAGES} is not there"
    except OSError as error:
        return f"{_SHARED_PAGES} cannot be read: {error.strerror}"
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "advise", "force"):
        return None
    return (
        f"{_SHARED_PAGES} says '{chosen}'; to allow huge pages, run: "
        f"echo advise | sudo tee {_SHARED_PAGES}"
    )


def read_node(kind: str, numa_node: Any) -> int:
    """Return the number of a NUMA node that was given, or -1 if none was."""
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
    """Return whether `value` is `second`; refuse anything but `first` and `second`."""
    if not isinstance(value, str):
        raise wrong_type(name, "a str", value)
    if value not in (first, second):
        raise ValueError(f"{name} must be '{first}' or '{second}', not {value!r}")
    return value == second


def _other_kind(name: str, kind: str, of: str) -> ValueError:
    return ValueError(f"{name} is for {of} memory, not for {kind} memory")


def refuse_block(kind: str, own_device: int, device: int) -> NoReturn:
    """Raise a ValueError, because constructors in the block would not use the pool."""
    raise ValueError(
        f"the {kind} pool is of device {own_device}, but device {device} is current, so "
        "constructors in the block would not use the pool: write "
        f"'with cumem.Device({own_device}), pool:', or pass pool=pool to each of them"
    )


def refuse_request(own: str, kind: str, own_device: int, device: int) -> NoReturn:
    """Raise a ValueError, because the pool has another kind, device or flags."""
    if own != kind:
        why = f"pool is one of {own} memory, but {kind} memory is asked for"
    elif own_device != device:
        why = f"pool is of device {own_device}, but memory of device {device} is asked for"
    else:
        why = (
            "pool was made with other values of portable, write_combined or attach: "
            "leave them out when pool= is given"
        )
    raise ValueError(why)
