# SPDX-License-Identifier: Apache-2.0
"""Pinned, mapped, managed and device memory for Python, and copies between them.

Importing makes no CUDA call; the driver is opened at first use.
"""

# fmt: off
# isort: off
from cumem._core import (
    BUILT_RUNTIME, OLDEST_DRIVER, Buffer, CudaError, Device, DeviceBuffer,
    EmulationWarning, Event, HostBuffer, ManagedBuffer, MappedBuffer,
    OutOfMemoryError, PinnedBuffer, Registration, Stream, Transfer, array, asbuffer,
    backend, copy, copy_async, current_device, current_stream, device_count,
    driver_version, emulation_reason, empty, empty_device, empty_like, empty_managed,
    empty_mapped, empty_pinned, full, memory_info, pool_counters, register,
    runtime_version, set_current_device, shutdown, trim, zeros,
)
# isort: on

__version__ = "0.1.0"

__all__ = [
    "BUILT_RUNTIME", "OLDEST_DRIVER", "Buffer", "CudaError", "Device", "DeviceBuffer",
    "EmulationWarning", "Event", "HostBuffer", "ManagedBuffer", "MappedBuffer",
    "OutOfMemoryError", "PinnedBuffer", "Registration", "Stream", "Transfer",
    "__version__", "array", "asbuffer", "backend", "copy", "copy_async",
    "current_device", "current_stream", "device_count", "driver_version",
    "empty", "empty_device", "empty_like", "empty_managed", "empty_mapped",
    "empty_pinned", "emulation_reason", "full", "memory_info", "pool_counters",
    "register", "runtime_version", "set_current_device", "shutdown", "trim", "zeros",
]
# fmt: on
