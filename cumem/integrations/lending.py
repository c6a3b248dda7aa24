# SPDX-License-Identifier: Apache-2.0
"""What the integrations share: the pools that serve a library, and the proof that memory
is lent to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cumem import _core
from cumem.devices import backend
from cumem.extension.arguments import wrong_type
from cumem.pools import Pool


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
            if each.kind != kind:
                raise ValueError(
                    f"pool is one of {each.kind} memory, but {kind} memory is asked for"
                )
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
            return _core.default_pool(self.kind, device)
        if device not in self._pools:
            raise ValueError(
                f"{self._library} allocates on device {device}, but the pools given are "
                f"of {sorted(self._pools)}: give one of each device that is used"
            )
        return self._pools[device]


def _list_pools(pool: Any) -> list[Pool]:
    if pool is None or isinstance(pool, Pool):
        return [] if pool is None else [pool]
    if not isinstance(pool, Iterable):
        raise wrong_type("pool", "a Pool, or several", pool)
    pools = list(pool)
    for each in pools:
        if not isinstance(each, Pool):
            raise wrong_type("pool", "a Pool, or several", each)
    if not pools:
        raise ValueError("pool holds no pools")
    return pools
