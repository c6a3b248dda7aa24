# SPDX-License-Identifier: Apache-2.0
"""Stages PyTorch's distributed checkpoints in page-locked memory of cumem's pools.

``torch.distributed.checkpoint.async_save`` first asks a stager for a copy of the state dict
that no later work changes, and then writes that copy in a thread. PyTorch's own walk over a
state dict (``StateDictStager``) knows its tensors, DTensors and sharded tensors, and which
of them share storages. `PinnedStager` lets it walk, and only takes its storages: the device
copies each into page-locked memory, beside the work of the caller's stream, as
`save_safetensors_async` does (``cumem/files/safetensors/staging.py``).
"""

from __future__ import annotations

import functools
import importlib
from concurrent.futures import Future
from typing import Any, final

from cumem import _core
from cumem.base.kinds import is_on_device
from cumem.base.places import found_in
from cumem.base.units import format_nbytes, read_size
from cumem.buffers.arguments import hinting
from cumem.files.safetensors.staging import Owners, Staging
from cumem.transfers.loading import tensor_over

_WALK = "torch.distributed.checkpoint._state_dict_stager"


def _memory_of(torch: Any, storage: Any) -> _core.Buffer:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return _core.asbuffer(flat.set_(storage))


@functools.cache
def _walker_type() -> Any:
    """Return PyTorch's class that copies a state dict, with our copies of storages."""
    try:
        theirs: Any = importlib.import_module(_WALK).StateDictStager
        theirs._stage_untyped_storage  # noqa: B018  what `Walker` replaces
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "PinnedStager() needs PyTorch with torch.distributed and its StateDictStager, "
            "such as PyTorch 2.13"
        ) from error
    torch: Any = importlib.import_module("torch")

    class Walker(theirs):  # type: ignore[misc]
        def __init__(self, staging: Staging, room: int | None) -> None:
            super().__init__()
            self.staging, self.room = staging, room
            self.nbytes = 0

        def _stage_untyped_storage(
            self, storage: Any, non_blocking: bool = False
        ) -> Any:
            """Return the storage of the copy, which the device may still have to make."""
            data = None if storage.nbytes() == 0 else _memory_of(torch, storage)
            if data is None or not is_on_device(data.kind):
                return storage.cpu().clone()
            self.nbytes += data.nbytes
            if self.room is not None and self.nbytes > self.room:
                raise ValueError(
                    f"host_limit is {format_nbytes(self.room)}, but the tensors of devices "
                    "are larger, and all of them must be staged at once"
                )
            return tensor_over(self.staging.add(data)).untyped_storage()

    return Walker


@found_in("cumem.integrations.torch")
@final
class PinnedStager:
    """A stager for ``torch.distributed.checkpoint.async_save``, in page-locked memory.

    Parameters
    ----------
    before : torch.optim.Optimizer or list of them, optional
        As for `save_safetensors_async`: the next ``step()`` of an optimizer waits for the
        copies of its tensors, and the current stream waits at once only for those of all
        others. By default it waits for all.
    host_limit : int or str, optional
        A number of bytes, or a text such as ``"8GiB"``. A state dict whose tensors of
        devices have more is refused. By default there is no limit but those of the pool.

    Raises
    ------
    TypeError, ValueError
        If `host_limit` is not a number of bytes, or `before` is not an optimizer.

    Notes
    -----
    It is an ``AsyncStager``: PyTorch calls its `stage`, and the program may call `close`
    after the last checkpoint. One stager serves any number of checkpoints. Each has memory
    of its own, from the pool of page-locked memory, to which it returns when PyTorch has
    written the checkpoint.

    Examples
    --------
    >>> from cumem.integrations.torch import PinnedStager
    >>> stager = PinnedStager()
    >>> state = {"weight": torch.ones(256)}
    >>> staged = stager.stage(state)  # as dcp.async_save(..., async_stager=stager) does
    >>> _ = state["weight"].zero_()  # this is not in the checkpoint
    >>> float(staged.result()["weight"].sum())
    256.0
    """

    #: Whether ``async_save`` waits for the staging. The streams wait instead.
    _synchronize_after_execute = False

    @hinting
    def __init__(
        self, *, before: object = None, host_limit: int | str | None = None
    ) -> None:
        Owners(before)  # refuses what is not an optimizer
        self._before = before
        self._room: int | None = None
        if host_limit is not None:
            self._room = read_size(host_limit, "host_limit", False, None)
        self._ends: list[_core.Transfer] = []  #: of the last copies

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: work on the current stream comes after the copies by itself."""
        return self._synchronize_after_execute

    def stage(self, state_dict: Any) -> Future[Any]:
        """Begin to copy a state dict, and return a future of the copy.

        Parameters
        ----------
        state_dict : dict
            Tensors, DTensors and any other values, also nested.

        Returns
        -------
        concurrent.futures.Future
            Its result is a state dict with the same values, whose tensors are in memory of
            the host. Tensors that share a storage share one there.

        Raises
        ------
        ValueError
            If the tensors of devices have more than `host_limit` bytes.
        ImportError
            If PyTorch has no such checkpoints, or is too old.
        MemoryError
            If there is no page-locked memory for them.
        CudaError
            If a copy could not be started.

        Notes
        -----
        **Blocks** until tensors of the host are copied. It does not wait for those of
        devices. **Ordered after** the work on the current streams, as
        `save_safetensors_async` is; later work on these streams changes no copy.
        """
        staging = Staging(Owners(self._before))
        staged = _walker_type()(staging, self._room).stage(state_dict)
        staging.begin()
        staging.order()
        self._ends = staging.ends()
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel the copies
        _settle(future, staged, [*self._ends])
        return future

    def synchronize_staging(self) -> None:
        """Wait until the copies of the last `stage` are made, with the GIL released.

        A program need not call this: changes on the stream come after the copies.
        """
        for end in self._ends:
            end.wait()

    def close(self) -> None:
        """Wait for the last copies. The stager may be used again."""
        self.synchronize_staging()
        self._ends.clear()


def _settle(future: Future[Any], staged: Any, ends: list[_core.Transfer]) -> None:
    """Set the result of the future once all transfers have ended."""

    def go_on(end: _core.Transfer) -> None:
        try:
            end.wait()
        except Exception as error:
            future.set_exception(error)
        else:
            _settle(future, staged, ends)

    if ends:
        ends.pop().add_done_callback(go_on)
    else:
        future.set_result(staged)
