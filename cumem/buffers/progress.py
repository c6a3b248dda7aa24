# SPDX-License-Identifier: Apache-2.0
"""What ``progress=True`` shows while bytes move."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from cumem.buffers.arguments import wrong_type

#: what ``progress=`` takes
Progress = bool | Callable[[int, int], object] | None

#: Seconds that a call has taken before a bar is worth looking at.
DELAY = 0.5


class Bar:
    """A tqdm bar of bytes for one call, in a terminal or a notebook.

    It appears once the call has taken half a second, so that short ones show nothing.

    Parameters
    ----------
    title : str
        What stands before the bar.

    Raises
    ------
    ImportError
        If tqdm is not installed.
    """

    def __init__(self, title: str = "copy") -> None:
        if importlib.util.find_spec("tqdm") is None:
            raise ImportError(
                "progress=True needs tqdm, of the extra 'progress': "
                "pip install 'cumem[progress]' (or pass a callable(done, total))",
                name="tqdm",
            )
        self._title = title
        self._start = time.monotonic()
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes have arrived."""
        if self._bar is None:
            if done >= total or time.monotonic() - self._start < DELAY:
                return
            tqdm = importlib.import_module("tqdm.auto").tqdm
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc=self._title)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is; nothing if there is none."""
        if self._bar is not None:
            self._bar.close()


def begin(progress: Any, title: str) -> Callable[[int, int], object]:
    """Whom to tell, where that is wanted at all; `end` it."""
    if progress is True:
        return Bar(title)
    if not callable(progress):
        raise wrong_type("progress", "a bool or a callable(done, total)", progress)
    return progress  # type: ignore[no-any-return]


def end(tell: Callable[[int, int], object]) -> None:
    """Close it, if it is a bar of ours."""
    if type(tell) is Bar:
        tell.close()


class Parts:
    """One progress of several calls.

    Parameters
    ----------
    progress : bool or callable, optional
        As for `copy`: shown or called within the ``with`` block, at its end as well.
    total : int
        Bytes of all calls; may be set later, as ``total``.
    title : str
        As for `Bar`.

    Raises
    ------
    TypeError
        If `progress` is neither a bool nor callable.
    ImportError
        If tqdm is needed and not installed.
    """

    def __init__(self, progress: Progress, total: int, title: str) -> None:
        wanted = progress is not None and progress is not False
        self._tell = begin(progress, title) if wanted else None
        self.total = total
        self._before = 0

    def next(self, nbytes: int) -> Progress:
        """What the next call, of so many bytes, takes as its own progress."""
        before = self._before
        self._before += nbytes
        tell, total = self._tell, self.total
        if tell is None:
            return None

        def of_part(done: int, _: int) -> None:
            if before + done < total:  # the end is told once
                tell(before + done, total)

        return of_part

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._tell is not None:
                self._tell(self.total, self.total)
        finally:
            if self._tell is not None:
                end(self._tell)
