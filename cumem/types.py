# SPDX-License-Identifier: Apache-2.0
"""Names the classes of cumem's results for annotations; programs do not make them.

``cumem.stats()`` returns a `Stats`, ``cumem.register(array)`` a `Registration`, and so
on. The docstring of each class says which call returns it. Classes that programs make
or test for, such as `cumem.Pool`, and the errors that they catch, are in `cumem`
itself.

As for `cumem`, only the stub beside this file lists the names, and each class is loaded
at its first use.
"""

import cumem


def __getattr__(name: str) -> object:
    """Load the class that has a public name, at the first use of the name."""
    return cumem._find(__name__, name)


def __dir__() -> list[str]:
    """List the public names for completion."""
    own = (name for name in globals() if name.startswith("__"))
    return sorted({*own, *cumem._homes(__name__), "__all__"})
