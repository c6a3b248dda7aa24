# SPDX-License-Identifier: Apache-2.0
"""What `Buffer.flags` is: how the memory was made, and NumPy's flags."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

#: NumPy's letters, and the names that it takes beside those of the attributes.
_SHORT = {
    "C": "C_CONTIGUOUS",
    "CONTIGUOUS": "C_CONTIGUOUS",
    "F": "F_CONTIGUOUS",
    "FORTRAN": "F_CONTIGUOUS",
    "O": "OWNDATA",
    "W": "WRITEABLE",
    "A": "ALIGNED",
    "X": "WRITEBACKIFCOPY",
    "B": "BEHAVED",
    "CA": "CARRAY",
    "FA": "FARRAY",
}
_SHOWN = (
    *("C_CONTIGUOUS", "F_CONTIGUOUS", "OWNDATA", "WRITEABLE", "ALIGNED"),
    "WRITEBACKIFCOPY",
)
_NAMES = (*_SHOWN, "BEHAVED", "CARRAY", "FARRAY", "FNC", "FORC")


class Flags(tuple[str, ...]):
    """How memory was made, as a tuple of names, and NumPy's flags.

    Attributes are those of ``numpy.ndarray.flags``, and ``flags["C_CONTIGUOUS"]`` is the
    same, as when ``buf.flags`` was read. `owndata` is true of a buffer that is not a view
    and whose memory cumem made. `print` shows NumPy's flags.
    """

    c_contiguous: bool
    f_contiguous: bool
    owndata: bool
    writeable: bool
    aligned: bool

    def __new__(cls, names: Iterable[str], **numpys: bool) -> Flags:
        """`numpys` are the five that do not follow from others."""
        made = super().__new__(cls, names)
        vars(made).update(numpys)
        return made

    @property
    def contiguous(self) -> bool:
        """The same as `c_contiguous`."""
        return self.c_contiguous

    @property
    def writebackifcopy(self) -> bool:
        """Never: no buffer stands for another array."""
        return False

    @property
    def fnc(self) -> bool:
        """Fortran-contiguous and not C-contiguous."""
        return self.f_contiguous and not self.c_contiguous

    @property
    def forc(self) -> bool:
        """Contiguous in either order."""
        return self.f_contiguous or self.c_contiguous

    @property
    def behaved(self) -> bool:
        """Aligned and writeable."""
        return self.aligned and self.writeable

    @property
    def carray(self) -> bool:
        """Behaved and C-contiguous."""
        return self.behaved and self.c_contiguous

    @property
    def farray(self) -> bool:
        """Behaved and Fortran-contiguous only."""
        return self.behaved and self.fnc

    def __getitem__(self, key: Any) -> Any:
        """A name by its number, or one of NumPy's flags by its name."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        name = _SHORT.get(key, key)
        if name not in _NAMES:
            raise KeyError(f"unknown flag {key!r}; there are {', '.join(_NAMES)}")
        return getattr(self, name.lower())

    def __setattr__(self, name: str, value: object) -> NoReturn:
        hint = ""
        if name == "writeable":
            hint = "; numpy() of host memory has flags that can be set"
        raise AttributeError(f"flags of a buffer cannot be set{hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle: of the memory alone, since the buffer does not come along."""
        return tuple, (tuple(self),)

    def __str__(self) -> str:
        lines = [f"  {name} : {self[name]}" for name in _SHOWN]
        return "\n".join([*lines, f"  MEMORY : {', '.join(self) or 'no flags'}"])
