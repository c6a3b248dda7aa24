# SPDX-License-Identifier: Apache-2.0
"""Types of libraries that may be missing, for type checkers, which have Any for them then.

What a type checker cannot import is unknown to it. A strict one then complains of every
use of a function that has such a type in one of its overloads, whether or not the program
wants tensors. Nothing is imported when the program runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    MYPY = False
    if MYPY:  # which takes this branch, and has Any for what it cannot import
        from jax import Array as Array
        from torch import Tensor as Tensor
    else:
        # Pyright takes the last declaration of a name. The import of all names declares
        # these where the library is there, and nothing where it is not.
        # isort: off
        from typing import Any as Array, Any as Tensor  # noqa: F401
        from jax import *  # noqa: F403
        from torch import *  # noqa: F403
        # isort: on
