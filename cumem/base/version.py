# SPDX-License-Identifier: Apache-2.0
"""Versions of this package, and of the CUDA that it is built for."""

from typing import Final

from cumem import _core

__version__: Final = "0.1.0"
BUILT_RUNTIME: Final = (
    _core._BUILT_RUNTIME // 1000,
    _core._BUILT_RUNTIME % 1000 // 10,
)
#: A CUDA runtime serves every driver of its major version and later ones.
OLDEST_DRIVER: Final = (_core._BUILT_RUNTIME // 1000, 0)
#: Where tracemalloc has the memory of buffers: ``tracemalloc.DomainFilter`` takes it.
TRACEMALLOC_DOMAIN: Final = _core._TRACE_DOMAIN
