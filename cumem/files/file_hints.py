# SPDX-License-Identifier: Apache-2.0
"""Recognises a file of another format by its first bytes, and says what reads it.

Errors use this: a reader that was given a wrong file says what the file is and which
function reads it, such as "a ZIP archive: cumem.load() reads an .npz, ...".
"""

from __future__ import annotations

import errno
import os
import re
from typing import Any

__all__ = [
    "HEAD_NBYTES",
    "check_is_name",
    "explain_missing",
    "is_lfs_pointer",
    "lfs_text",
    "text_of",
    "what_it_is",
    "why_not_plain",
]

#: The number of first bytes that are needed to recognise a file.
HEAD_NBYTES = 64
_LFS = b"version https://git-lfs.github.com/spec/"
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\x00": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "unzstd"),
}
_OTHERS = {
    b"\x93NUMPY": "an .npy file: cumem.load() reads it",
    b"PK\x03\x04": (
        "a ZIP archive: cumem.load() reads an .npz, torch.load(file, mmap=True) what "
        "PyTorch saved"
    ),
    b"PK\x05\x06": "an empty ZIP archive",
    b"GGUF": "a GGUF file: the package gguf reads it",
    b"\x89HDF": "an HDF5 file: h5py reads it",
    b"PAR1": "a Parquet file: pyarrow reads it",
    b"ARROW1": "an Arrow file: pyarrow reads it",
    b"\x80": "a pickle, which is not read: torch.load() or pickle reads those you trust",
}
#: The first bytes of formats that begin with so many fixed bytes that no array begins with
#: them by chance.
_LONG = (b"\x93NUMPY", b"GGUF", b"\x89HDF\r\n\x1a\n", b"ARROW1", b"\xfd7zXZ\x00")
_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
_ARCHIVES = (".npz", ".pt", ".pth", ".ckpt", ".zip")
_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE)
_JSON = re.compile(rb'\{\s*("|\})')
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib joins two slashes to one
_SHORT_NBYTES = 8  # fewer bytes may be printable by chance
_PATH_NBYTES = 4096  # no path is longer


def is_lfs_pointer(head: bytes) -> bool:
    """Return whether these bytes begin the text that Git LFS leaves in place of a file."""
    return head.startswith(_LFS)


def lfs_text(name: object) -> str:
    """Return the message about the text that Git LFS leaves in place of a file."""
    return (
        f"{name} is a Git LFS pointer, a text that stands for the file, which was not "
        "downloaded: run `git lfs pull` in its repository, or download the file itself"
    )


def what_it_is(head: bytes) -> str | None:
    """Return what a file with these first bytes is and what reads it, or None."""
    for magic, (name, command) in _PACKED.items():
        if head.startswith(magic):
            return f"packed by {name}: unpack it first ({command})"
    for magic, text in _OTHERS.items():
        if head.startswith(magic):
            return text
    if _PAGE.match(head):
        return "a web page or an error message of a server: download the file again"
    if _JSON.match(head) and b"\0" not in head:
        return (
            "JSON: cumem.load_safetensors() reads the index of a checkpoint of several "
            "files, and what a server answered has to be downloaded again"
        )
    length = int.from_bytes(head[:8], "little")
    if len(head) > 9 and head[8:9] == b"{" and 2 <= length <= 100_000_000:
        return "a safetensors file: cumem.load_safetensors() reads it"
    return None


def text_of(head: bytes) -> str | None:
    """Return the text that the file begins with, in quotes, or None if it is not text."""
    begin = head[:40].split(b"\n")[0].rstrip()
    is_text = len(begin) >= _SHORT_NBYTES and begin.isascii()
    return repr(begin.decode()) if is_text and begin.decode().isprintable() else None


def why_not_plain(name: str, head: bytes, as_bytes: bool = False) -> str | None:
    """Return what the file is and what reads it, or None if it may hold plain elements.

    A reader of plain elements asks this, since nobody means to read a header as elements.
    Some formats are known by so few bytes that an array may begin with them by chance; the
    name of the file must agree for those. With `as_bytes` the caller reads elements of one
    byte, which is a way to read any file. Even then it refuses Git LFS pointers, and
    NumPy's own files, because these may hold an array of bytes behind their header.
    """
    if is_lfs_pointer(head):
        return lfs_text(repr(name))
    is_archive = head.startswith(_ZIP) and name.lower().endswith(_ARCHIVES)
    is_numpys = head.startswith(_NPY) or (is_archive and name.lower().endswith(".npz"))
    if as_bytes and not is_numpys:
        return None
    known = what_it_is(head)
    is_tensors = known is not None and known.startswith("a safetensors file")
    is_sure = is_archive or is_tensors or head.startswith(_LONG)
    return f"{name!r} is {known}" if is_sure else None


def check_is_name(path: Any) -> None:
    """Raise a TypeError if the contents of a file were passed in place of its name."""
    if not isinstance(path, bytes):
        return
    is_content = len(path) >= _PATH_NBYTES or b"\0" in path or b"\n" in path
    if is_content or is_lfs_pointer(path) or what_it_is(path[:HEAD_NBYTES]) is not None:
        raise TypeError(
            "these bytes are the contents of a file, not its name: pass the name; or "
            "np.load(io.BytesIO(data)) reads an .npy or .npz and np.frombuffer(data, "
            "dtype) plain elements, which cumem.array() takes"
        )


def explain_missing(path: Any) -> OSError | None:
    """Make a FileNotFoundError that explains itself, if the name shows the mistake."""
    name = os.fsdecode(path)
    why = None
    if _SCHEME.match(name):
        why = "it is a URL, and files are read by their path: download it first"
    elif name.startswith("~") and not os.path.lexists(name.partition("/")[0]):
        why = "~ is not expanded: pass os.path.expanduser(path)"
    if why is None:
        return None
    return FileNotFoundError(errno.ENOENT, f"{os.strerror(errno.ENOENT)}; {why}", path)
