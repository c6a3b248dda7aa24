# SPDX-License-Identifier: Apache-2.0
"""Shows the bar of ``progress=True``, and calls what users pass as ``progress=``."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from cumem.buffers.arguments import wrong_type

#: The type of ``progress=``.
Progress = bool | Callable[[int, int], object] | None

#: A call shows its bar after this many seconds, because the bar of a short call would
#: only flicker.
DELAY = 0.5


class Bar:
    """A tqdm bar of bytes for one call, in a terminal or a notebook.

    It appears once the call has taken half a second, so that short calls show nothing.

    Parameters
    ----------
    title : str
        The text before the bar.

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
        """Leave the bar on the screen as it is. Does nothing if it never appeared."""
        if self._bar is not None:
            self._bar.close()


def begin(progress: Any, title: str) -> Callable[[int, int], object]:
    """Return the callable to report progress to, which the caller passes to `end` later.

    `progress` may not be None or False here. Raises TypeError if it is neither True nor
    callable, and ImportError if a bar is wanted and tqdm is not installed.
    """
    if progress is True:
        return Bar(title)
    if not callable(progress):
        raise wrong_type("progress", "a bool or a callable(done, total)", progress)
    return progress  # type: ignore[no-any-return]


def end(report: Callable[[int, int], object]) -> None:
    """Close what `begin` returned if it is a bar; a user's callable needs no end."""
    if type(report) is Bar:
        report.close()


class Parts:
    """One progress for several calls, each of which has a part of the bytes.

    Parameters
    ----------
    progress : bool or callable, optional
        As for `copy`. The bar is shown, or the callable called, in the ``with`` block, and
        once more at its end.
    total : int
        The bytes of all calls; the attribute ``total`` can be set later.
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
        self._report = begin(progress, title) if wanted else None
        self.total = total
        self._before = 0

    def next(self, nbytes: int) -> Progress:
        """Return what to pass as ``progress=`` to the next call, which moves `nbytes`."""
        before = self._before
        self._before += nbytes
        report, total = self._report, self.total
        if report is None:
            return None

        def of_part(done: int, _: int) -> None:
            if before + done < total:  # only __exit__ reports the end
                report(before + done, total)

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
            if kind is None and self._report is not None:
                self._report(self.total, self.total)
        finally:
            if self._report is not None:
                end(self._report)
