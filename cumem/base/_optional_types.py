# SPDX-License-Identifier: Apache-2.0
"""Types of libraries that may not be installed, for type checkers only.

A type checker does not know the types of a library that it cannot import. A strict one
then complains about every use of a function which has such a type in one of its overloads,
whether or not the program uses that library. Here such a type becomes Any. Nothing is
imported when the program runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    MYPY = False
    if MYPY:  # mypy takes this branch, and uses Any for anything that it cannot import
        from jax import Array as Array
        from torch import Tensor as Tensor
    else:
        # Pyright uses the last declaration of a name. The star import declares these names
        # if the library is installed, and declares nothing if it is not.
        # isort: off
        from typing import Any as Array, Any as Tensor  # noqa: F401
        from jax import *  # noqa: F403
        from torch import *  # noqa: F403
        # isort: on
