# SPDX-License-Identifier: Apache-2.0
"""`Flags` tells how a buffer's memory was made, and has NumPy's flags of the buffer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

#: The keys, such as ``flags["C"]``, that NumPy takes for flags whose attributes have other
#: names.
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

    The attributes are those of ``numpy.ndarray.flags``, and ``flags["C_CONTIGUOUS"]`` is
    the same as ``flags.c_contiguous``. They have the values at the moment when
    ``buf.flags`` was read. `owndata` is true if cumem made the memory and the buffer is not
    a view. `repr` and `print` show NumPy's flags as NumPy does, and then a line with the
    names.
    """

    c_contiguous: bool
    f_contiguous: bool
    owndata: bool
    writeable: bool
    aligned: bool

    def __new__(cls, names: Iterable[str], **numpys: bool) -> Flags:
        """Make flags of `names` and the five flags of NumPy that determine all others."""
        made = super().__new__(cls, names)
        vars(made).update(numpys)
        return made

    @property
    def contiguous(self) -> bool:
        """The same as `c_contiguous`."""
        return self.c_contiguous

    @property
    def writebackifcopy(self) -> bool:
        """Always False: a buffer never writes back to another array."""
        return False

    @property
    def fnc(self) -> bool:
        """Whether the elements are Fortran-contiguous and not C-contiguous."""
        return self.f_contiguous and not self.c_contiguous

    @property
    def forc(self) -> bool:
        """Whether the elements are contiguous in either order."""
        return self.f_contiguous or self.c_contiguous

    @property
    def behaved(self) -> bool:
        """Whether the memory is aligned and writeable."""
        return self.aligned and self.writeable

    @property
    def carray(self) -> bool:
        """Whether the memory is `behaved` and C-contiguous."""
        return self.behaved and self.c_contiguous

    @property
    def farray(self) -> bool:
        """Whether the memory is `behaved`, Fortran-contiguous and not C-contiguous."""
        return self.behaved and self.fnc

    def __getitem__(self, key: Any) -> Any:
        """Return a name by its position, or one of NumPy's flags by its name."""
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
        """Pickle only the names, since NumPy's flags describe the buffer."""
        return tuple, (tuple(self),)

    def __repr__(self) -> str:
        lines = [f"  {name} : {self[name]}" for name in _SHOWN]
        return "\n".join([*lines, f"  MEMORY : {', '.join(self) or 'no flags'}"])
