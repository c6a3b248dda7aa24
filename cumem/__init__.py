# SPDX-License-Identifier: Apache-2.0
"""Pinned, mapped, managed and device memory for Python, and copies between them.

Importing makes no CUDA call; the driver is opened at first use.
"""

from typing import TYPE_CHECKING

# fmt: off
# isort: off
from cumem._core import (
    BUILT_RUNTIME, OLDEST_DRIVER, Buffer, CancelledError, CudaError, Device, DeviceBuffer,
    EmulationWarning, Event, HostBuffer, ManagedBuffer, MappedBuffer,
    OutOfMemoryError, PinnedBuffer, Pool, Registration, Stream, Transfer, array,
    asbuffer, backend, broadcast, broadcast_async, copy, copy_async,
    copy_many, copy_many_async, current_device,
    current_stream, default_pool, device_count, driver_version, emulation_reason, empty,
    empty_device, empty_like, empty_managed, empty_mapped, empty_pinned, full, gather,
    gather_async, get_limit, pool_counters, register, runtime_version, scatter,
    scatter_async, set_current_device, set_limit, shutdown, trim, zeros,
)
from cumem.calibration import Calibration, calibrate
from cumem.explain import Explanation, explain
from cumem.files import fromfile, read_ranges, tofile, write_ranges
from cumem.memory import (
    DeviceMemory, HostMemory, LimitBlock, OutOfMemoryHook, limit, memory_info,
    on_out_of_memory,
)
from cumem import progress as _progress  # what progress=True shows
from cumem.stats import (
    Block, Counters, Measure, Measurement, PoolStats, Segment, Snapshot, Stats, measure,
    stats,
)
from cumem.tuning import Configuration, configure

if TYPE_CHECKING:
    from cumem.safetensors import SafetensorsDict, load_safetensors
    from cumem.safetensors_format import (
        SafetensorsError, SafetensorsHeader, SafetensorsInfo, read_safetensors_header,
    )
    from cumem.safetensors_save import save_safetensors
# isort: on

__version__ = "0.1.0"

__all__ = [
    "BUILT_RUNTIME",
    "OLDEST_DRIVER",
    "Block",
    "Buffer",
    "Calibration",
    "CancelledError",
    "Configuration",
    "Counters",
    "CudaError",
    "Device",
    "DeviceBuffer",
    "DeviceMemory",
    "EmulationWarning",
    "Event",
    "Explanation",
    "HostBuffer",
    "HostMemory",
    "LimitBlock",
    "ManagedBuffer",
    "MappedBuffer",
    "Measure",
    "Measurement",
    "OutOfMemoryError",
    "OutOfMemoryHook",
    "PinnedBuffer",
    "Pool",
    "PoolStats",
    "Registration",
    "SafetensorsDict",
    "SafetensorsError",
    "SafetensorsHeader",
    "SafetensorsInfo",
    "Segment",
    "Snapshot",
    "Stats",
    "Stream",
    "Transfer",
    "__version__",
    "array",
    "asbuffer",
    "backend",
    "broadcast",
    "broadcast_async",
    "calibrate",
    "configure",
    "copy",
    "copy_async",
    "copy_many",
    "copy_many_async",
    "current_device",
    "current_stream",
    "default_pool",
    "device_count",
    "driver_version",
    "empty",
    "empty_device",
    "empty_like",
    "empty_managed",
    "empty_mapped",
    "empty_pinned",
    "emulation_reason",
    "explain",
    "fromfile",
    "full",
    "gather",
    "gather_async",
    "get_limit",
    "limit",
    "load_safetensors",
    "measure",
    "memory_info",
    "on_out_of_memory",
    "pool_counters",
    "read_ranges",
    "read_safetensors_header",
    "register",
    "runtime_version",
    "save_safetensors",
    "scatter",
    "scatter_async",
    "set_current_device",
    "set_limit",
    "shutdown",
    "stats",
    "tofile",
    "trim",
    "write_ranges",
    "zeros",
]
# fmt: on

#: modules that most programs do not need, loaded at the first use of a name in them
_LATER = {
    "SafetensorsDict": "safetensors",
    "SafetensorsError": "safetensors_format",
    "SafetensorsHeader": "safetensors_format",
    "SafetensorsInfo": "safetensors_format",
    "load_safetensors": "safetensors",
    "read_safetensors_header": "safetensors_format",
    "save_safetensors": "safetensors_save",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'cumem' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"cumem.{_LATER[name]}"), name)
    value.__module__ = "cumem"
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# where users import them from: what help() and a pickle name
for _name in set(__all__) - set(_LATER):
    _value = globals()[_name]
    if getattr(_value, "__module__", "").startswith("cumem."):
        _value.__module__ = "cumem"
del _name, _progress, _value
