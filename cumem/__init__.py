# SPDX-License-Identifier: Apache-2.0
"""Pinned, mapped, managed and device memory for Python, and copies between them.

Importing makes no CUDA call; the driver is opened at first use.
"""

import atexit
import sys
from functools import cache
from importlib import import_module
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Final

# fmt: off
# isort: off
from cumem._core import (
    _BUILT_RUNTIME, _TRACE_DOMAIN, Buffer, DeviceBuffer, Event,
    HostBuffer, ManagedBuffer, MappedBuffer,
    PinnedBuffer, Stream, Transfer,
    asbuffer, asnumpy, copy, copy_async,
    copy_many, copy_many_async, current_device,
    current_stream, empty,
    empty_device, empty_managed, empty_mapped, empty_pinned,
    prefetch_many, set_current_device,
)
if TYPE_CHECKING:
    from types import ModuleType

    from cumem.tools import doctor as doctor
    from cumem.tools import info as info
    from cumem.base import units as units
    from cumem.tools.calibration import Calibration, calibrate
    from cumem.tools.recommendation import Recommendation, recommend
    from cumem.transfers.collating import PinnedCollate, collate_pinned
    from cumem.buffers.constructors import (
        array, asarray, ascontiguousarray, empty_like, full, full_like, zeros,
        zeros_like,
    )
    from cumem.base.driver import (
        backend, device_count, driver_version, emulation_reason, is_available,
        runtime_version,
    )
    from cumem.devices.device import Device, shutdown, synchronize
    from cumem.base.errors import (
        CancelledError, CudaError, EmulationWarning, OutOfMemoryError,
    )
    from cumem.transfers.explanation import Explanation, explain
    from cumem.files.raw import fromfile, read_ranges, tofile, write_ranges
    from cumem.base.kinds import Kind
    from cumem.transfers.loading import prefetch
    from cumem.transfers.managed import (
        ManagedThrashWarning, Residency, tiles,
    )
    from cumem.pools.memory import (
        DeviceMemory, HostMemory, LimitBlock, OutOfMemoryHook, get_limit, limit,
        memory_info, on_out_of_memory, set_limit,
    )
    from cumem.transfers.multi_device import (
        broadcast, broadcast_async, gather, gather_async, scatter, scatter_async,
    )
    from cumem.pools.numpy_memory import numpy_pinned
    from cumem.files.npy import NpzDict, load, save, savez
    from cumem.transfers.offloading import (
        ActivationOffload, offload, offload_activations, restore,
    )
    from cumem.transfers.pipelines import chunk_size, chunks, pipeline
    from cumem.pools.statistics import (
        Counters, Measure, Measurement, PoolStats, Stats, measure, pool_counters,
        stats,
    )
    from cumem.pools.pool import Pool, default_pool, trim
    from cumem.recording.live_buffers import (
        Holder, Holders, Living, LivingBuffers, live, report_leaks_at_exit, who_holds,
    )
    from cumem.recording.record import Record, diff, load_record, record, tag
    from cumem.pools.registering import Registration, register
    from cumem.files.safetensors import SafetensorsDict, load_safetensors
    from cumem.files.safetensors.format import (
        SafetensorsError, SafetensorsHeader, SafetensorsInfo, read_safetensors_header,
    )
    from cumem.files.safetensors.save import save_safetensors
    from cumem.pools.snapshot import Block, Segment, Snapshot
    from cumem.transfers.trees import to_device, to_host
    from cumem.transfers.tuning import Configuration, configure
    from cumem.pools.workspace import Workspace
# isort: on

if hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled():  # from 3.13 on
    raise ImportError(
        "cumem needs the GIL, which PYTHON_GIL=0 or -X gil=0 has switched off: without it "
        "pools and buffers would be corrupted. Leave that out; free-threaded Python then "
        "switches the GIL on when cumem is imported"
    )

__version__ = "0.1.0"

BUILT_RUNTIME: Final = (_BUILT_RUNTIME // 1000, _BUILT_RUNTIME % 1000 // 10)
#: Where tracemalloc has the memory of buffers: ``tracemalloc.DomainFilter`` takes it.
TRACEMALLOC_DOMAIN: Final = _TRACE_DOMAIN
#: A CUDA runtime serves every driver of its major version and later ones.
OLDEST_DRIVER: Final = (_BUILT_RUNTIME // 1000, 0)

__all__ = [
    "BUILT_RUNTIME",
    "OLDEST_DRIVER",
    "TRACEMALLOC_DOMAIN",
    "ActivationOffload",
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
    "Holder",
    "Holders",
    "HostBuffer",
    "HostMemory",
    "Kind",
    "LimitBlock",
    "Living",
    "LivingBuffers",
    "ManagedBuffer",
    "ManagedThrashWarning",
    "MappedBuffer",
    "Measure",
    "Measurement",
    "NpzDict",
    "OutOfMemoryError",
    "OutOfMemoryHook",
    "PinnedBuffer",
    "PinnedCollate",
    "Pool",
    "PoolStats",
    "Recommendation",
    "Record",
    "Registration",
    "Residency",
    "SafetensorsDict",
    "SafetensorsError",
    "SafetensorsHeader",
    "SafetensorsInfo",
    "Segment",
    "Snapshot",
    "Stats",
    "Stream",
    "Transfer",
    "Workspace",
    "__version__",
    "array",
    "asarray",
    "asbuffer",
    "ascontiguousarray",
    "asnumpy",
    "backend",
    "broadcast",
    "broadcast_async",
    "calibrate",
    "chunk_size",
    "chunks",
    "collate_pinned",
    "configure",
    "copy",
    "copy_async",
    "copy_many",
    "copy_many_async",
    "current_device",
    "current_stream",
    "default_pool",
    "device_count",
    "diff",
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
    "full_like",
    "gather",
    "gather_async",
    "get_limit",
    "is_available",
    "limit",
    "live",
    "load",
    "load_record",
    "load_safetensors",
    "measure",
    "memory_info",
    "numpy_pinned",
    "offload",
    "offload_activations",
    "on_out_of_memory",
    "pipeline",
    "pool_counters",
    "prefetch",
    "prefetch_many",
    "read_ranges",
    "read_safetensors_header",
    "recommend",
    "record",
    "register",
    "report_leaks_at_exit",
    "restore",
    "runtime_version",
    "save",
    "save_safetensors",
    "savez",
    "scatter",
    "scatter_async",
    "set_current_device",
    "set_limit",
    "shutdown",
    "stats",
    "synchronize",
    "tag",
    "tiles",
    "to_device",
    "to_host",
    "tofile",
    "trim",
    "who_holds",
    "write_ranges",
    "zeros",
    "zeros_like",
]
# fmt: on

for _each in [*globals().values()]:
    if isinstance(_each, BuiltinFunctionType):
        _each.__module__ = "cumem"  # what help() and a pickle name
del _each


def _watch() -> None:
    """Watch forks, after which the parent's threads and its driver are not in the child,
    and what the environment asks for. That ends after `_at_exit`, whose transfers it sees.
    """
    import os

    from cumem._core import _after_fork

    # The module is loaded by the first fork, since most programs never do; before the
    # fork, so that the child need not.
    def before() -> None:
        import_module("cumem.base.forking").before_fork(_load, _LATER)

    def begin_child() -> None:
        try:
            import_module("cumem.base.forking").after_fork_in_child()
        finally:
            _after_fork()

    os.register_at_fork(
        before=before,
        after_in_child=begin_child,
        after_in_parent=lambda: import_module(
            "cumem.base.forking"
        ).after_fork_in_parent(),
    )
    if text := os.environ.get("CUMEM_LEAKS"):
        _report_leaks_if_asked(text)
    if path := os.environ.get("CUMEM_RECORD"):
        _load("recording.record").record_until_exit(path)


def _report_leaks_if_asked(text: str) -> None:
    """What ``CUMEM_LEAKS`` says. A word that it does not know is a warning and reports
    nothing: an error would keep the program from importing cumem.
    """
    variables = import_module("cumem.base.variables")
    try:
        is_asked = variables.read_switch(text)
    except ValueError:
        is_asked = False
        import_module("cumem.base.errors").warn_caller(
            f"CUMEM_LEAKS must be {variables.SWITCH_WORDS}, not '{text:.100}': leaks are "
            "not reported",
            UserWarning,
        )
    if is_asked:
        _load("recording.live_buffers").report_leaks_at_exit()


def _at_exit() -> None:
    """After the handlers of those who import cumem, and before finalisation, when threads
    could not be joined any more. Daemon threads are not joined."""
    from cumem import _core

    others_run = True
    try:
        import threading

        others_run = threading.active_count() != 1
    finally:
        _core._at_exit(others_run)


#: Modules that are loaded at the first use of one of these names, and for what `_core`
#: asks of Python: making their classes takes longer than the extension does.
_LATER: dict[str, tuple[str, ...]] = {
    "base.answer": (),
    "buffers.arguments": (),
    "interchange.array_interface": (),
    "devices.awaiting": (),
    "devices.blocks": (),
    "buffers.casting": (),
    "devices.counting": (),
    "tools.calibration": ("Calibration", "calibrate"),
    "tools.recommendation": ("Recommendation", "recommend"),
    "transfers.collating": ("PinnedCollate", "collate_pinned"),
    "buffers.constructors": (
        "array",
        "asarray",
        "ascontiguousarray",
        "empty_like",
        "full",
        "full_like",
        "zeros",
        "zeros_like",
    ),
    "base.control_groups": (),
    "base.displays": (),
    "base.driver": (
        "backend",
        "device_count",
        "driver_version",
        "emulation_reason",
        "is_available",
        "runtime_version",
    ),
    "devices.device": ("Device", "shutdown", "synchronize"),
    "base.errors": (
        "CancelledError",
        "CudaError",
        "EmulationWarning",
        "OutOfMemoryError",
    ),
    "transfers.explanation": ("Explanation", "explain"),
    "files.raw": ("fromfile", "read_ranges", "tofile", "write_ranges"),
    "interchange.exchange": (),
    "buffers.filling": (),
    "interchange.foreign_memory": (),
    "interchange.foreign_stream": (),
    "buffers.hints": (),
    "interchange.importing": (),
    "interchange.listing": (),
    "transfers.loading": ("prefetch",),
    "tools.notebook.objects": (),
    "transfers.managed": ("ManagedThrashWarning", "Residency", "tiles"),
    "pools.memory": (
        "DeviceMemory",
        "HostMemory",
        "LimitBlock",
        "OutOfMemoryHook",
        "get_limit",
        "limit",
        "memory_info",
        "on_out_of_memory",
        "set_limit",
    ),
    "transfers.multi_device": (
        "broadcast",
        "broadcast_async",
        "gather",
        "gather_async",
        "scatter",
        "scatter_async",
    ),
    "pools.numpy_memory": ("numpy_pinned",),
    "files.npy": ("NpzDict", "load", "save", "savez"),
    "transfers.offloading": (
        "ActivationOffload",
        "offload",
        "offload_activations",
        "restore",
    ),
    "pools.out_of_memory": (),
    "transfers.pipelines": ("chunk_size", "chunks", "pipeline"),
    "pools.pool": ("Pool", "default_pool", "trim"),
    "interchange.pickling": (),
    "pools.statistics": (
        "Counters",
        "Measure",
        "Measurement",
        "PoolStats",
        "Stats",
        "measure",
        "pool_counters",
        "stats",
    ),
    "buffers.progress": (),
    "recording.live_buffers": (
        "Holder",
        "Holders",
        "Living",
        "LivingBuffers",
        "live",
        "report_leaks_at_exit",
        "who_holds",
    ),
    "recording.record": ("Record", "diff", "load_record", "record", "tag"),
    "pools.registering": ("Registration", "register"),
    "buffers.texts": (),
    "pools.limits": (),
    "base.kinds": ("Kind",),
    "files.safetensors": ("SafetensorsDict", "load_safetensors"),
    "files.safetensors.format": (
        "SafetensorsError",
        "SafetensorsHeader",
        "SafetensorsInfo",
        "read_safetensors_header",
    ),
    "files.safetensors.save": ("save_safetensors",),
    "pools.snapshot": ("Block", "Segment", "Snapshot"),
    "transfers.trees": ("to_device", "to_host"),
    "transfers.tuning": ("Configuration", "configure"),
    "buffers.values": (),
    "buffers.views": (),
    "pools.workspace": ("Workspace",),
}


#: The tools that show objects, by the way in which they do.
_DISPLAYS = {"html": "notebook.objects", "plot": "plots"}
#: Modules that are there without an import of their own.
_MODULES = ("doctor", "info", "units")
#: What other libraries have by a name that is not here, and what to type.
_ELSEWHERE = {
    "arange": "use cumem.array(np.arange(n))",
    "as_tensor": "use cumem.asarray(obj)",
    "concatenate": "use cumem.copy(out[part], buf) for each part",
    "device_array": "use cumem.empty(shape)",
    "empty_cache": "use cumem.trim()",
    "from_dlpack": "use cumem.asbuffer(obj)",
    "from_numpy": "use cumem.asbuffer(obj)",
    "frombuffer": "use cumem.asbuffer(obj)",
    "get_default_memory_pool": "use cumem.default_pool(kind)",
    "integrations": "import cumem.integrations.torch, .cupy, .numba or .cuda_core",
    "load_file": "use cumem.load_safetensors(path)",
    "managed_array": "use cumem.empty_managed(shape)",
    "mapped_array": "use cumem.empty_mapped(shape)",
    "mem_get_info": "use cumem.memory_info()",
    "memory_allocated": "use cumem.stats()",
    "MemoryPool": "use cumem.Pool(kind)",
    "ones": "use cumem.full(shape, 1)",
    "ones_like": "use cumem.full_like(buf, 1)",
    "pin_memory": "use cumem.register(array) in place, or cumem.empty_pinned(shape)",
    "pinned_array": "use cumem.empty_pinned(shape)",
    "safe_open": "use cumem.load_safetensors(path, names=[...]) for some of the tensors, "
    "cumem.read_safetensors_header(path) for names, shapes and memmap(name)",
    "save_file": "use cumem.save_safetensors(path, tensors)",
    "savez_compressed": "use cumem.savez(file), which does not compress",
    "stack": "use cumem.copy(out[index], buf) for each index",
    "tensor": "use cumem.array(obj)",
    "to_gpu": "use cumem.array(obj)",
}


@cache
def _load(module: str) -> "ModuleType":
    """Load one of these modules; its public names are then this package's."""
    if module != "base.displays":
        _load("base.displays").load_with(_load_display)
    loaded = import_module(f"cumem.{module}")
    for name in _LATER[module]:
        value = getattr(loaded, name)
        value.__module__ = "cumem"  # what help() and a pickle name
        globals()[name] = value
    return loaded


@cache
def _load_display(way: str) -> None:
    """Load the tools that show objects in one of the ways of `cumem.base.displays`."""
    import_module(f"cumem.tools.{_DISPLAYS[way]}")


def _look_up(name: str) -> object:
    for module, names in _LATER.items():
        if name in names:
            return getattr(_load(module), name)
    if name in _MODULES:
        return import_module(f"cumem.{name}")
    text = f"module 'cumem' has no attribute {name!r}"
    hint = _ELSEWHERE.get(name)
    raise AttributeError(text if hint is None else f"{text}; {hint}")


if not TYPE_CHECKING:  # for which any name would be one that the package has
    __getattr__ = _look_up


def load_ipython_extension(shell: object) -> None:
    """By ``%load_ext cumem`` in a notebook: see docs/notebooks.md."""
    from cumem.tools.notebook.magics import load

    load(shell)


def unload_ipython_extension(shell: object) -> None:
    """By ``%unload_ext cumem``."""
    from cumem.tools.notebook.magics import unload

    unload(shell)


def __dir__() -> list[str]:
    """What completion shows: the public names and modules, and no import of this file."""
    own = (name for name in globals() if name.startswith("__"))
    return sorted({*own, *__all__, *_MODULES})


_watch()
atexit.register(_at_exit)
