# SPDX-License-Identifier: Apache-2.0
"""Makes files without names, which have the contents of a region that sleeps.

The contents are useless once the process has ended, so the files must be gone then, however
it ends. That is why they have no names: the system frees their room once nobody has them
open. The extension writes and reads them (``csrc/python/copy/sleep_bytes.c``).
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from cumem import _core

#: The number of files among which the contents are divided. Linux lets one thread at a time
#: write to a file, so a single file would be written by one thread.
_FILE_COUNT = 8


class SleepFiles:
    """The files of one region, which are open until `close`.

    Parameters
    ----------
    folder : str
        The folder in whose file system the files are made.
    tag : str
        The region's tag, for errors.

    Raises
    ------
    OSError
        If there is no such folder, or no file can be made in it.
    """

    __slots__ = ("_files", "_folder", "_states", "_tag")

    def __init__(self, folder: str, tag: str) -> None:
        self._folder = folder
        self._tag = tag
        self._files: list[IO[bytes]] = []
        self._states: list[tuple[int, int]] = []
        import tempfile  # importing it takes milliseconds

        try:
            for _ in range(_FILE_COUNT):
                file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115
                self._files.append(file)
        except OSError as error:
            self.close()
            error.filename = folder  # and not the name that the file would have had
            raise

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors."""
        return tuple(file.fileno() for file in self._files)

    def note(self) -> None:
        """Remember how the files look now that the contents are in them."""
        self._states = self._look()

    def check(self) -> None:
        """Raise an OSError if a file is not as `note` saw it.

        The files have no names, but a program may open one through /proc and write to it.
        This shows in the file's length and in the time of its last change. But a network
        file system may itself set that time late, after the bytes were written, and then
        the bytes must not be refused for good. So a wrong time raises an error only once:
        the next call compares with the time that this call has seen.
        """
        found = self._look()
        for (nbytes, _), (now, _) in zip(self._states, found, strict=False):
            if now != nbytes:
                raise self._error(
                    errno.EIO, f"is {now} bytes long in place of {nbytes}"
                )
        has_changed = found != self._states
        self._states = found
        if has_changed:
            error = self._error(errno.EIO, "was written to while the region slept")
            error.add_note(
                "Advice: if nobody did that, the file system has set the time of the file "
                "later. Then call wake() again, which takes the bytes as they are; close() "
                "gives them up"
            )
            raise error

    def failure(self, failure: _core._FileFailure, writes: bool) -> OSError:
        """Make the error for a file that could not be written or read."""
        if failure.error == 0:
            what = "cannot be written to" if writes else "ends too early"
            return self._error(errno.EIO, what)
        error = OSError(failure.error, os.strerror(failure.error), self._folder)
        doing = "writing" if writes else "reading"
        error.add_note(f"while {doing} the contents of region {self._tag!r}")
        return error

    def close(self) -> None:
        """Close the files, which frees their room. A second call does nothing."""
        while self._files:
            with contextlib.suppress(OSError):  # the bytes are not wanted any more
                self._files.pop().close()

    def __del__(self) -> None:
        self.close()

    def _look(self) -> list[tuple[int, int]]:
        found = map(os.fstat, self.fds)
        return [(each.st_size, each.st_mtime_ns) for each in found]

    def _error(self, number: int, what: str) -> OSError:
        text = f"a file with the contents of region {self._tag!r} {what}"
        return OSError(number, text, self._folder)
