# SPDX-License-Identifier: Apache-2.0
"""Lets NumPy allocate its arrays in page-locked memory, so that copies of them are fast."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, final

from cumem import _core
from cumem.base.errors import is_of_fork
from cumem.base.kinds import PAGE_LOCKED, WRITE_COMBINED
from cumem.base.units import read_size
from cumem.buffers.arguments import hinting, wrong_type
from cumem.pools.pool import Pool, default_pool

if TYPE_CHECKING:
    from typing_extensions import CapsuleType


@final
class numpy_pinned:  # noqa: N801  # reads as a function where it is used
    """A ``with`` block in which new NumPy arrays are in pinned memory of a pool.

    They are ordinary arrays, which every library copies at the speed of the link:
    ``torch.from_numpy(a).is_pinned()`` is true. They may outlive the block.

    Parameters
    ----------
    min_nbytes : int or str
        The least size of an array that is pinned, as a number or a text such as ``"1MiB"``.
        Smaller arrays stay in ordinary memory.
    pool : Pool, optional
        A pool of kind ``"pinned"`` or ``"mapped"``; by default the default pool of pinned
        memory.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If `min_nbytes` cannot be read, or `pool` is closed, write-combined or of another
        kind.
    CudaError
        If the driver cannot be opened.
    RuntimeError
        If the object is used for a second block.

    Notes
    -----
    The block applies to the current context (`contextvars`): it also covers tasks that are
    created in it, until it ends, but not other threads. `numpy_pinned.enable` applies to
    all threads.

    If the pool cannot give memory, the array is made in ordinary memory. This happens when
    a limit is reached, after `shutdown`, and in forked children. It also happens while the
    freed memory that waits for copies exceeds both 256 MiB and the most memory that was
    ever in use at once. Callbacks of `on_out_of_memory` are not called.

    **Blocks**: an allocation never waits for a device. The GIL is released while a pool
    page-locks more memory, which takes the driver milliseconds.

    **Ordered after**: nothing. Freed memory is reused only after all work that its devices
    had begun, since other libraries may copy from it without telling cumem.

    Examples
    --------
    >>> import cumem, numpy as np
    >>> with cumem.numpy_pinned():
    ...     images = np.zeros((8, 224, 224, 3), "f4")
    >>> cumem.asbuffer(images).kind
    'pinned'
    """

    __slots__ = ("_enter", "_leave")

    @hinting
    def __init__(
        self, min_nbytes: int | str = "64KiB", *, pool: Pool | None = None
    ) -> None:
        handler = _handler(min_nbytes, pool)
        self._enter = MethodType(_core._numpy_enter, handler)
        self._leave = MethodType(_core._numpy_leave, handler)

    if TYPE_CHECKING:

        def __enter__(self) -> None: ...
        def __exit__(self, *exc: object) -> None: ...

    else:
        # __enter__ and __exit__ are functions of C, so Ctrl-C cannot interrupt them
        # halfway.
        __enter__: Callable[[], None] = property(operator.attrgetter("_enter"))
        __exit__: Callable[..., None] = property(operator.attrgetter("_leave"))

    @staticmethod
    @hinting
    def enable(min_nbytes: int | str = "64KiB", *, pool: Pool | None = None) -> None:
        """Put the new NumPy arrays of all threads into pinned memory, until `disable`.

        This includes threads that are running already, and those of thread pools. A second
        call replaces the first. Blocks of `numpy_pinned`, and memory handlers of NumPy that
        others have set in a context, take precedence.

        Parameters
        ----------
        min_nbytes, pool
            As for `numpy_pinned`.

        Raises
        ------
        TypeError, ValueError, CudaError
            As for `numpy_pinned`.
        """
        _core._numpy_enable(_handler(min_nbytes, pool))

    @staticmethod
    def disable() -> None:
        """End what `enable` began; arrays stay where they are.

        Calling it twice is not an error.
        """
        _core._numpy_enable(None)


def _handler(min_nbytes: int | str, pool: Pool | None) -> CapsuleType:
    nbytes = read_size(min_nbytes, "min_nbytes", False, None)
    if pool is None:
        return _core._numpy_handler(nbytes, _default_pool())
    if not isinstance(pool, Pool):
        raise wrong_type("pool", "a Pool or None", pool)
    config = pool._config
    if config.kind not in PAGE_LOCKED:
        raise ValueError(
            f"pool must be of pinned or mapped memory, not of {config.kind}"
        )
    if config.flags & WRITE_COMBINED:
        raise ValueError("pool is write-combined: NumPy would read its arrays slowly")
    if pool.closed:
        raise ValueError("the pool is closed")
    return _core._numpy_handler(nbytes, pool)


def _default_pool() -> Pool | None:
    """Return the default pool of pinned memory, or None in a forked child."""
    try:
        return default_pool("pinned")
    except RuntimeError as error:
        if is_of_fork(error):
            return None
        raise
