# SPDX-License-Identifier: Apache-2.0
"""The versions of this package, and of the CUDA that it is built for."""

from typing import Final

from cumem import _core

__version__: Final = "0.1.0"
BUILT_RUNTIME: Final = (
    _core._BUILT_RUNTIME // 1000,
    _core._BUILT_RUNTIME % 1000 // 10,
)
#: A CUDA runtime works with every driver of its own major version and of later ones.
OLDEST_DRIVER: Final = (_core._BUILT_RUNTIME // 1000, 0)
#: The domain of buffers' memory in tracemalloc, for ``tracemalloc.DomainFilter``.
TRACEMALLOC_DOMAIN: Final = _core._TRACE_DOMAIN
