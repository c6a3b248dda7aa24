# SPDX-License-Identifier: Apache-2.0
"""What the integrations share: the pools that serve a library, and the proof that memory
is lent to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cumem.base.driver import backend
from cumem.buffers.arguments import wrong_type
from cumem.pools.pool import Pool, default_pool


def need_gpu(library: str) -> None:
    """RuntimeError where memory is emulated, which no library could use."""
    if backend() == "emulated":
        raise RuntimeError(
            f"{library} cannot use the memory of cumem's emulated device: this needs a GPU"
        )


def lend(pool: Pool) -> object:
    """An export of no bytes: while it lives, `shutdown` is refused."""
    return pool.allocate(0).__dlpack__()


def made_as(error: Exception, kind: type[Exception]) -> Exception:
    """An error of this class with all that another one knows."""
    made = kind(*error.args)
    made.__dict__.update(error.__dict__)
    return made.with_traceback(error.__traceback__)


def check_pool(pool: Any, wanted: str, kind: str | None = None) -> Pool:
    """The pool, if it is an open one, of `kind` (None: of any); TypeError or ValueError."""
    if not isinstance(pool, Pool):
        raise wrong_type("pool", wanted, pool)
    if pool.closed:
        raise ValueError("the pool is closed")
    if kind not in (None, pool.kind):
        raise ValueError(
            f"pool is one of {pool.kind} memory, but {kind} memory is asked for"
        )
    return pool


class Pools:
    """The pool of each device: those given, or the default ones.

    Parameters
    ----------
    pool : Pool, iterable of Pool, or None
        One for each device that is used.
    kind : str or None
        What they must be of; None: of any in `kinds`, by default the first.
    kinds : tuple of str
        What the library can use.
    library : str
        Its name, for errors.
    """

    def __init__(
        self, pool: object, kind: str | None, kinds: tuple[str, ...], library: str
    ) -> None:
        given = _list_pools(pool)
        if kind is None:
            kind = given[0].kind if given else kinds[0]
        if kind not in kinds:
            raise ValueError(
                f"{library} takes memory of kind {' or '.join(map(repr, kinds))} here, "
                f"not {kind!r}"
            )
        for each in given:
            check_pool(each, _WANTED, kind)
        self.kind: Any = kind
        self._pools = {each.device.index: each for each in given}
        if len(self._pools) != len(given):
            raise ValueError("pool: there are two of one device")
        self._library = library

    def first(self) -> int | None:
        """The device of the first pool that was given; None: none was."""
        return next(iter(self._pools), None)

    def of(self, device: int) -> Pool:
        """The pool of a device, by its index; a default one is that of now."""
        if not self._pools:
            return default_pool(self.kind, device)
        if device not in self._pools:
            raise ValueError(
                f"{self._library} allocates on device {device}, but the pools given are "
                f"of {sorted(self._pools)}: give one of each device that is used"
            )
        return self._pools[device]


_WANTED = "a Pool, or several"


def _list_pools(pool: Any) -> list[Pool]:
    if pool is None:
        return []
    is_one = isinstance(pool, Pool) or not isinstance(pool, Iterable)
    pools = [check_pool(each, _WANTED) for each in ([pool] if is_one else pool)]
    if not pools:
        raise ValueError("pool holds no pools")
    return pools
