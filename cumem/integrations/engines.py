# SPDX-License-Identifier: Apache-2.0
"""`SleepMode`: regions by tag, for inference engines that put memory to sleep.

An engine asks an allocator for memory under a tag, such as "weights" or "kv_cache", and
later lets tags sleep and wake. vLLM calls its ``CuMemAllocator`` for that, and SGLang and
the frameworks of reinforcement learning call ``torch_memory_saver``. A `SleepMode` has the
methods of both, so that it can take the place of either. Under each tag it has a `Region`,
and it lets PyTorch allocate there by `cumem.integrations.torch.using`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NoReturn

from cumem import _core
from cumem.base.driver import backend
from cumem.buffers.arguments import read_flag, wrong_type
from cumem.integrations.torch import _capturing, using
from cumem.pools.pool import default_pool
from cumem.pools.region import Region

__all__ = ["SleepMode"]

#: The tag of memory for which an engine names none, in vLLM and in torch_memory_saver.
_DEFAULT_TAG = "default"

#: The tags whose contents each of vLLM's sleep levels keeps.
_KEPT_BY_LEVEL: dict[int, tuple[str, ...]] = {1: ("weights",), 2: ()}

#: The members of torch_memory_saver that a SleepMode lacks, and what to type instead.
_ELSEWHERE = {
    "hook_mode": "nothing: cumem replaces no function of CUDA's",
    "memory_margin_bytes": 'cumem.set_limit("device", nbytes)',
    "retain_cpu_backup": 'SleepMode(host="keep") or SleepMode(host="release")',
    "get_cpu_backup": "resume() and tensor.cpu()",
    "set_disk_backup_dir": 'cumem.sleep(tag, keep="file", path=folder)',
}


class SleepMode:
    """Regions by tag, with the calls of vLLM's allocator and of torch_memory_saver.

    Parameters
    ----------
    host : {'keep', 'release'}
        What happens to pinned memory after waking, as for `Region`.

    Notes
    -----
    ==================  ==========================================================
    torch_memory_saver  `region`, `cuda_graph`, `disable`, `pause`, `resume`,
                        `enabled`
    vLLM's allocator    `use_memory_pool`, `sleep`, `wake_up`, `discard`,
                        `get_current_usage`
    ==================  ==========================================================

    All of them act on the same regions. `cumem.sleep` and `cumem.wake` reach these by
    their tags too. A tag under which there is no memory is ignored, since engines may name
    tags that they have not used.

    Regions whose contents are kept go to sleep before those whose contents are given up.
    If putting one of them to sleep fails, the regions that this call has put to sleep are
    woken again. So no contents are given up before all others are safe.

    Examples
    --------
    >>> from cumem.integrations.engines import SleepMode
    >>> mode = SleepMode()
    >>> with mode.region("weights", enable_cpu_backup=True):
    ...     weights = cumem.full(1000, 7, "f4", "device")
    >>> mode.pause("weights")
    >>> mode.resume("weights")
    >>> float(weights[999])
    7.0
    """

    def __init__(self, *, host: Literal["keep", "release"] = "keep") -> None:
        self._host: Literal["keep", "release"] = host
        self._lock = threading.Lock()
        self._regions: dict[tuple[str, bool, int], Region] = {}
        #: The MemPools of graphs that share their memory, as _capturing() needs them.
        self._graph_pools: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_explain_missing(name))

    def __setattr__(self, name: str, value: object) -> None:
        if name in _ELSEWHERE:
            raise AttributeError(_explain_missing(name))
        super().__setattr__(name, value)

    # -- the calls of torch_memory_saver ---------------------------------------------------

    @contextlib.contextmanager
    def region(
        self, tag: str = _DEFAULT_TAG, enable_cpu_backup: bool = False
    ) -> Iterator[Region]:
        """Take device memory that this thread allocates in the block from a region.

        This applies to CUDA tensors of PyTorch and to buffers of cumem, on PyTorch's
        current device. On the emulated device, whose memory PyTorch cannot use, it applies
        only to buffers.

        Parameters
        ----------
        tag : str
            The tag of the region, which is made when it is first needed.
        enable_cpu_backup : bool
            Whether `pause` keeps the contents. Memory whose contents are kept and other
            memory are in two regions of the same tag.

        Yields
        ------
        Region

        Raises
        ------
        RuntimeError
            If the region sleeps, or PyTorch cannot take memory from it.
        TypeError, ValueError
            If an argument has the wrong type, or `host` is neither 'keep' nor 'release'.

        Examples
        --------
        >>> from cumem.integrations.engines import SleepMode
        >>> mode = SleepMode()
        >>> with mode.region("kv_cache"):
        ...     cache = cumem.zeros((16, 1 << 16), "f2", "device")
        >>> mode.pause("kv_cache")  # the contents are given up
        >>> mode.resume("kv_cache")
        """
        chosen = self._open(tag, read_flag(enable_cpu_backup, "enable_cpu_backup"))
        with contextlib.ExitStack() as stack:
            # PyTorch's current device may not be the one that constructors take.
            stack.enter_context(chosen.device)
            stack.enter_context(chosen)
            if backend() != "emulated":
                stack.enter_context(using(chosen))
            yield chosen

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
    ) -> Iterator[Region]:
        """Capture a CUDA graph in the block, with the graph's own memory in a region.

        This calls ``torch.cuda.graph`` with memory of a region. Use it outside blocks of
        `region`: inside one, allocations of the same thread would not come from the graph's
        region.

        Parameters
        ----------
        cuda_graph : torch.cuda.CUDAGraph
            The graph.
        pool : tuple of int, optional
            A handle of ``torch.cuda.graph_pool_handle()``. Graphs with the same handle and
            tag share memory.
        stream : torch.cuda.Stream, optional
            The stream that is captured, as for ``torch.cuda.graph``.
        capture_error_mode : str
            As for ``torch.cuda.graph``.
        tag : str
            The tag of the region, which is made when it is first needed.
        enable_cpu_backup : bool
            Whether `pause` keeps the contents of the graph's memory.

        Yields
        ------
        Region

        Raises
        ------
        RuntimeError
            If the region sleeps, there is no GPU, or PyTorch fails.
        TypeError
            If an argument has the wrong type.

        Notes
        -----
        Results in the graph's memory are undefined after `resume`, unless the contents were
        kept. Every replay computes them again.

        Examples
        --------
        >>> import torch  # doctest: +SKIP
        >>> from cumem.integrations.engines import SleepMode
        >>> mode = SleepMode()
        >>> graph = torch.cuda.CUDAGraph()  # doctest: +SKIP
        >>> with mode.cuda_graph(graph, tag="cuda_graph"):  # doctest: +SKIP
        ...     y = torch.ones(1000, device="cuda").sqrt()
        >>> mode.pause("cuda_graph")  # doctest: +SKIP
        >>> mode.resume("cuda_graph")  # doctest: +SKIP
        >>> graph.replay()  # doctest: +SKIP
        """
        chosen = self._open(tag, read_flag(enable_cpu_backup, "enable_cpu_backup"))
        options = {"stream": stream, "capture_error_mode": capture_error_mode}
        with _capturing(chosen, cuda_graph, pool, self._graph_pools, **options):
            yield chosen

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Take device memory in the block from cumem's default pool, which does not sleep.

        Use it inside a block of `region`, for memory that is needed while that region
        sleeps.

        Examples
        --------
        >>> from cumem.integrations.engines import SleepMode
        >>> mode = SleepMode()
        >>> with mode.region("weights"):
        ...     weights = cumem.zeros(1000, "f4", "device")
        ...     with mode.disable():
        ...         awake = cumem.zeros(1000, "f4", "device")
        >>> mode.pause()
        >>> float(awake[0])
        0.0
        """
        pool = default_pool("device", _core._device(None, "device", True))
        with contextlib.ExitStack() as stack:
            stack.enter_context(pool.device)
            stack.enter_context(pool)
            if backend() != "emulated":
                stack.enter_context(using(pool))
            yield

    def pause(self, tag: str | None = None) -> None:
        """Put the memory under a tag to sleep.

        Contents are kept if ``enable_cpu_backup`` said so, and are given up otherwise.
        Nothing changes for memory that sleeps already.

        Parameters
        ----------
        tag : str, optional
            The tag; None means all tags.

        Raises
        ------
        BufferError, CudaError, OutOfMemoryError
            As for `Region.sleep`. Regions that this call put to sleep are awake again.
        """
        named = _read_tags(tag, "tag")
        self._put_to_sleep(
            (region, keeps)
            for (name, keeps, _), region in self._all()
            if named is None or name in named
        )

    def resume(self, tag: str | None = None) -> None:
        """Wake the memory under a tag.

        Parameters
        ----------
        tag : str, optional
            The tag; None means all tags.

        Raises
        ------
        CudaError, OutOfMemoryError
            As for `Region.wake`. Regions that this call has woken before stay awake.
        """
        self.wake_up(tag)

    @property
    def enabled(self) -> bool:
        """True, which tells SGLang that memory really sleeps."""
        return True

    # -- the calls of vLLM's allocator -----------------------------------------------------

    def use_memory_pool(
        self, tag: str | None = None
    ) -> contextlib.AbstractContextManager[Region]:
        """Take device memory in a ``with`` block from a region whose contents are kept.

        This is `region` with ``enable_cpu_backup=True``. But `sleep` keeps or gives up
        contents by its own `offload_tags`.

        Parameters
        ----------
        tag : str, optional
            The tag; None means "default".

        Returns
        -------
        context manager

        Raises
        ------
        RuntimeError, TypeError, ValueError
            As for `region`, at the beginning of the block.
        """
        return self.region(_DEFAULT_TAG if tag is None else tag, True)

    def sleep(
        self,
        offload_tags: Iterable[str] | str | None = None,
        *,
        level: Literal[1, 2] | None = None,
    ) -> None:
        """Put all memory to sleep, and keep the contents of some tags.

        Parameters
        ----------
        offload_tags : str or iterable of str, optional
            The tags whose contents are kept. The contents of all others are given up. None
            means "default".
        level : {1, 2}, optional
            One of vLLM's sleep levels in place of tags: 1 keeps the contents of "weights",
            and 2 keeps nothing.

        Raises
        ------
        TypeError
            If an argument has the wrong type, or tags and a level are given.
        ValueError
            If there is no such level.
        BufferError, CudaError, OutOfMemoryError
            As for `Region.sleep`. Regions that this call put to sleep are awake again.

        Notes
        -----
        At level 2 vLLM's worker copies the buffers of a model (such as tables of rotary
        embeddings) to the host itself, and fills them again after `wake_up`.

        Examples
        --------
        >>> from cumem.integrations.engines import SleepMode
        >>> mode = SleepMode()
        >>> with mode.use_memory_pool("weights"):
        ...     weights = cumem.full(1000, 7, "f4", "device")
        >>> with mode.use_memory_pool("kv_cache"):
        ...     cache = cumem.zeros(1 << 20, "f2", "device")
        >>> mode.sleep(level=1)
        >>> mode.wake_up(["weights"])
        >>> mode.wake_up(["kv_cache"])
        """
        if level is not None:
            if offload_tags is not None:
                raise TypeError("sleep() takes offload_tags or level, not both")
            if level not in _KEPT_BY_LEVEL:
                raise ValueError(f"level must be 1 or 2, not {level!r}")
            offload_tags = _KEPT_BY_LEVEL[level]
        named = _read_tags(offload_tags, "offload_tags")
        kept = {_DEFAULT_TAG} if named is None else named
        self._put_to_sleep((region, key[0] in kept) for key, region in self._all())

    def wake_up(self, tags: Iterable[str] | str | None = None) -> None:
        """Wake the memory under some tags.

        Parameters
        ----------
        tags : str or iterable of str, optional
            The tags; None means all of them.

        Raises
        ------
        CudaError, OutOfMemoryError
            As for `Region.wake`. Regions that this call has woken before stay awake.
        """
        named = _read_tags(tags, "tags")
        for (tag, _, _), region in self._all():
            if named is None or tag in named:
                region.wake()

    def discard(self, tags: Iterable[str] | str) -> None:
        """Put the memory under some tags to sleep, and give its contents up.

        Nothing changes for memory that sleeps already, not even for contents that are kept.

        Parameters
        ----------
        tags : str or iterable of str
            The tags.

        Raises
        ------
        BufferError, CudaError
            As for `Region.sleep`.
        """
        named = _read_tags(tags, "tags") or set()
        self._put_to_sleep(
            (region, False) for key, region in self._all() if key[0] in named
        )

    def get_current_usage(self) -> int:
        """Return the number of bytes that are allocated under all tags, asleep or awake."""
        return sum(region.pool.stats().live_nbytes for _, region in self._all())

    # -- regions ---------------------------------------------------------------------------

    def _open(self, tag: str, keeps: bool) -> Region:
        """Return the open region for a tag, and make one if there is none."""
        index = _core._device(None, "device", True).index
        key = (tag, keeps, index)
        with self._lock:
            found = self._regions.get(key)
            if found is None or found.pool.closed:
                found = self._regions[key] = Region(tag, index, host=self._host)
        return found

    def _all(self) -> list[tuple[tuple[str, bool, int], Region]]:
        """Return all open regions with their keys, in the order in which they were made."""
        with self._lock:
            pairs = list(self._regions.items())
        return [(key, region) for key, region in pairs if not region.pool.closed]

    def _put_to_sleep(self, chosen: Iterable[tuple[Region, bool]]) -> None:
        """Put all these regions to sleep, or none, those with kept contents first."""
        with contextlib.ExitStack() as undo:
            for region, keeps in sorted(chosen, key=lambda each: not each[1]):
                if not region.is_asleep:
                    # Even a call that fails may have put the region to sleep.
                    undo.callback(region.wake)
                    region.sleep(keeps)
            undo.pop_all()  # all of them sleep, so nothing is undone


def _explain_missing(name: str) -> str:
    if name not in _ELSEWHERE:
        return f"SleepMode has no {name!r}"
    return f"SleepMode has no {name!r} of torch_memory_saver; use {_ELSEWHERE[name]}"


def _read_tags(tags: Iterable[str] | str | None, name: str) -> set[str] | None:
    """Return tags as a set, or None if none were given."""
    if tags is None:
        return None
    if isinstance(tags, str):
        return {tags}
    if not isinstance(tags, Iterable):
        raise wrong_type(name, "a str or several", tags)
    found = set(tags)
    for each in found:
        if not isinstance(each, str):
            raise wrong_type(name, "a str or several", each)
    return found
