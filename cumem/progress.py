# SPDX-License-Identifier: Apache-2.0
"""What ``progress=True`` shows while a copy runs."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

__all__ = ["Bar"]

#: Seconds that a copy has taken before a bar is worth looking at.
DELAY = 0.5


class Bar:
    """A tqdm bar of bytes for one copy, in a terminal or a notebook.

    It appears once the copy has taken half a second, so that short ones show nothing.

    Raises
    ------
    ImportError
        If tqdm is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("tqdm") is None:
            raise ImportError(
                "progress=True needs tqdm, of the extra 'progress': "
                "pip install 'cumem[progress]' (or pass a callable(done, total))",
                name="tqdm",
            )
        self._start = time.monotonic()
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes have arrived."""
        if self._bar is None:
            if done >= total or time.monotonic() - self._start < DELAY:
                return
            tqdm = importlib.import_module("tqdm.auto").tqdm
            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="copy")
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is; nothing if there is none."""
        if self._bar is not None:
            self._bar.close()
