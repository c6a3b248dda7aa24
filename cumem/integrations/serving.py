# SPDX-License-Identifier: Apache-2.0
"""Helpers of all integrations, such as the choice of the pools that serve a library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cumem.base.driver import backend
from cumem.buffers.arguments import wrong_type
from cumem.pools.pool import Pool, default_pool


def need_gpu(library: str) -> None:
    """Raise a RuntimeError if memory is emulated, which no library could use."""
    if backend() == "emulated":
        raise RuntimeError(
            f"{library} cannot use the memory of cumem's emulated device: this needs a GPU"
        )


def lend(pool: Pool) -> object:
    """Return an object that makes `shutdown` refuse to run as long as it lives."""
    return pool.allocate(0).__dlpack__()


def made_as(error: Exception, kind: type[Exception]) -> Exception:
    """Return an error of this class with the contents of another error."""
    made = kind(*error.args)
    made.__dict__.update(error.__dict__)
    return made.with_traceback(error.__traceback__)


def check_pool(pool: Any, wanted: str, kind: str | None = None) -> Pool:
    """Return the pool, or raise an error if it is closed or not of `kind`."""
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
    """The pool for each device: a given one, or the default pool.

    Parameters
    ----------
    pool : Pool, iterable of Pool, or None
        The pools, one for each device that is used, or None for the default pools.
    kind : str or None
        The kind that the pools must have; None means any of `kinds`, by default the first.
    kinds : tuple of str
        The kinds that the library can use.
    library : str
        The name of the library, for errors.
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
        """Return the device of the first pool that was given, or None without pools."""
        return next(iter(self._pools), None)

    def of(self, device: int) -> Pool:
        """Return the pool of a device by its index; look up a default pool each time."""
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
