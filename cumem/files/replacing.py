# SPDX-License-Identifier: Apache-2.0
"""Lets a new file replace another one as a whole, so that no reader sees half of it.

The new file is written under a temporary name beside the target, and renamed at the end,
which the system does in one step. If writing fails, the old file is still there.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import IO

from cumem.files.file_hints import explain_missing
from cumem.files.opening import check_regular

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Replacement:
    """A new file that replaces another one as a whole once it is completely written.

    Attributes
    ----------
    target : Path
        The file that is replaced. It is a symbolic link only if the link itself is to be
        replaced.
    temporary : Path
        The name of the new file until `place` renames it.
    is_left : bool
        Whether somebody else will rename the file, or remove it, so that `replacing` does
        not remove it.
    """

    def __init__(self, target: pathlib.Path) -> None:
        self.target = target
        self.temporary: pathlib.Path = target.with_name(
            f".cumem-{os.urandom(8).hex()}.tmp"
        )
        self.is_left = False

    @contextlib.contextmanager
    def open(self, fsync: bool = False) -> Iterator[io.BufferedWriter]:
        """Create the temporary file, and set its rights once the caller has written it.

        Until then only its owner may open it. With `fsync` its bytes are on the disk when
        the ``with`` block ends, which is before `place` gives the file its name.
        """
        with self._created() as (file, before, new_mode):
            yield file
            file.flush()
            if before is None:
                os.fchmod(file.fileno(), new_mode)
            else:
                _give_rights(file.fileno(), before, self.target)
            if fsync:
                os.fsync(file.fileno())

    @contextlib.contextmanager
    def open_to_leave(self) -> Iterator[tuple[io.BufferedWriter, int]]:
        """Create the temporary file for somebody else to complete, after the block.

        Yields the file and the mode that it is to have in the end. Group, access list and
        owner are those of the file that it will replace. Its own mode lets only its owner
        open it, until whoever completes it calls ``os.fchmod``. Whoever takes the file over
        sets `is_left` in the block.
        """
        with self._created() as (file, before, mode):
            if before is not None:
                fd = file.fileno()
                _give_rights(fd, before, self.target)
                mode = stat.S_IMODE(os.fstat(fd).st_mode)
                os.fchmod(fd, mode & 0o700)
            yield file, mode

    @contextlib.contextmanager
    def _created(
        self,
    ) -> Iterator[tuple[io.BufferedWriter, os.stat_result | None, int]]:
        """Yield the temporary file, the status of the old file, and a new file's mode."""
        before = self.check()
        new_mode = self._new_mode() if before is None else 0
        with (
            self._named(),
            open(self.temporary, "xb", opener=_OPEN_PRIVATE) as file,
        ):
            yield file, before, new_mode

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Put the target's name into errors that say that the disk is full.

        Other errors without a name stay as they are: they may come from the data that is
        written, for instance from a mapped file that was cut short.
        """
        try:
            yield
        except OSError as error:
            if error.filename is None and error.errno in _NO_ROOM:
                error.filename = str(self.target)
            raise

    def place(self, fsync: bool = False) -> None:
        """Rename the file to `target`; with `fsync` wait until the name is on the disk."""
        os.replace(self.temporary, self.target)
        if fsync:
            sync_folder(self.target)

    def check(self) -> os.stat_result | None:
        """Return the status of the file that will be replaced.

        The answer is None if nothing is there, or if `target` is a symbolic link, because
        the link itself is then replaced. Raise an OSError if anything but a regular file is
        there.
        """
        try:
            before = os.lstat(self.target)
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(before.st_mode):
            return None
        check_regular(before.st_mode, self.target)
        return before

    def _new_mode(self) -> int:
        """Return the rights that open() gives to a new file in this folder.

        They depend on the umask and on the folder, so an empty file is made to find out.
        The file that will be written cannot serve for this: a program that opened it now,
        with these rights, could read what is written to it later.
        """
        with open(self.temporary, "xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        os.unlink(self.temporary)  # if this is not reached, `replacing` unlinks it
        return mode


@contextlib.contextmanager
def replacing(path: pathlib.Path, follow: bool = True) -> Iterator[Replacement]:
    """Provide a file that will replace `path`, or with `follow` the target of a link.

    Its temporary name is in the folder of the file that it replaces, and nobody can
    predict it. If the file still has that name at the end, it is removed. Errors name
    `path`, which is the name that the caller knows.
    """
    target = pathlib.Path(os.path.realpath(path)) if follow else path
    if follow and target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
    made = Replacement(target)
    try:
        yield made
    except OSError as error:
        named = (os.fspath(made.temporary), os.fspath(target))
        if error.filename is not None and os.fspath(error.filename) in named:
            error.filename = os.fspath(path)
            if error.filename2 is not None:  # os.replace() names both files
                del error.filename2
        explained = explain_missing(path) if error.errno == errno.ENOENT else None
        if explained is None:
            raise
        raise explained from None
    finally:
        if not made.is_left:
            made.temporary.unlink(missing_ok=True)


def sync_folder(path: str | bytes | os.PathLike[str]) -> None:
    """Wait until a folder, and with it the names of its files, is on the disk."""
    folder = os.open(os.path.dirname(os.path.abspath(os.fsdecode(path))), os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:  # some file systems cannot sync folders
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(folder)


#: An opener for open() that runs no Python code of cumem. Otherwise Ctrl-C could come after
#: os.open() and before open() takes the descriptor, which would then stay open.
_OPEN_PRIVATE = functools.partial(os.open, mode=0o600)


_ACL = "system.posix_acl_access"


def _give_rights(fd: int, before: os.stat_result, target: pathlib.Path) -> None:
    """Give a new file the rights of the one it replaces, and never more than those.

    If the system refuses the change, the new file may have another group than the old one,
    or lack its access control list. The group bits of the old mode would then apply to
    other people. So in that case the group gets only the rights of everybody else.
    """
    mode = before.st_mode & 0o777
    with contextlib.suppress(OSError):
        os.fchown(fd, -1, before.st_gid)
    if os.fstat(fd).st_gid != before.st_gid:
        mode = _without_group(mode)
    acl = None
    with contextlib.suppress(OSError):
        acl = os.getxattr(target, _ACL)
    if acl is None:
        os.fchmod(fd, mode)
    else:
        os.fchmod(fd, _without_group(mode))
        with contextlib.suppress(OSError):
            os.setxattr(fd, _ACL, acl)
    # The owner changes last, since only the owner of a file may change its mode.
    with contextlib.suppress(OSError):
        os.fchown(fd, before.st_uid, -1)


def _without_group(mode: int) -> int:
    """Return the mode, with the rights of the group replaced by those of everybody else."""
    return mode & ~0o070 | (mode & 0o007) << 3


@contextlib.contextmanager
def open_export(path: str | os.PathLike[str] | IO[bytes]) -> Iterator[IO[bytes]]:
    """Yield a binary file to write a record to.

    For a path this is a new file, which replaces any file of that name once it is complete.
    Anything else must be an open binary file, which is yielded itself and stays open.
    """
    if not isinstance(path, (str, os.PathLike)):
        if not hasattr(path, "write"):
            what = "a str, a Path or a binary file"
            raise TypeError(f"path must be {what}, not {type(path).__name__}")
        yield path
        return
    with replacing(pathlib.Path(path)) as replacement:
        with replacement.open() as file:
            yield file
        replacement.place()
