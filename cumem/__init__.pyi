# SPDX-License-Identifier: Apache-2.0
"""The names of ``cumem``, each with the module that has it.

Type checkers read this file, and so does ``__init__.py``, which loads a module at the first
use of one of its names. So to add a public name, add it here, and to no other list of
names in the package. Each public name counts as a debt. So take another name away, or
raise `today` in tests/debts.toml with a [[raised]] entry that says why. The names that
are imported from ``cumem`` itself are modules.
"""

# isort: off
from cumem import doctor as doctor, info as info, types as types, units as units
from cumem._core import (
    Buffer as Buffer,
    DeviceBuffer as DeviceBuffer,
    Event as Event,
    HostBuffer as HostBuffer,
    ManagedBuffer as ManagedBuffer,
    MappedBuffer as MappedBuffer,
    PinnedBuffer as PinnedBuffer,
    RowPlan as RowPlan,
    Stream as Stream,
    Transfer as Transfer,
    asbuffer as asbuffer,
    asnumpy as asnumpy,
    copy as copy,
    copy_async as copy_async,
    copy_many as copy_many,
    copy_many_async as copy_many_async,
    copy_rows as copy_rows,
    copy_rows_async as copy_rows_async,
    current_device as current_device,
    current_stream as current_stream,
    empty as empty,
    empty_device as empty_device,
    empty_like as empty_like,
    empty_managed as empty_managed,
    empty_mapped as empty_mapped,
    empty_pinned as empty_pinned,
    full as full,
    full_like as full_like,
    prefetch_pages as prefetch_pages,
    set_current_device as set_current_device,
    take_rows as take_rows,
    zeros as zeros,
    zeros_like as zeros_like,
)
from cumem.base.driver import (
    backend as backend,
    device_count as device_count,
    is_available as is_available,
)
from cumem.base.errors import (
    CancelledError as CancelledError,
    CudaError as CudaError,
    EmulationWarning as EmulationWarning,
    OutOfMemoryError as OutOfMemoryError,
)
from cumem.base.version import __version__ as __version__
from cumem.buffers.constructors import array as array, asarray as asarray
from cumem.devices.device import (
    Device as Device,
    shutdown as shutdown,
    synchronize as synchronize,
)
from cumem.files.npy import load as load, save as save, savez as savez
from cumem.files.raw import (
    fromfile as fromfile,
    read_ranges as read_ranges,
    tofile as tofile,
    write_ranges as write_ranges,
)
from cumem.files.safetensors import load_safetensors as load_safetensors
from cumem.files.safetensors.format import (
    SafetensorsError as SafetensorsError,
    read_safetensors_header as read_safetensors_header,
)
from cumem.files.safetensors.save import (
    save_safetensors as save_safetensors,
    save_safetensors_async as save_safetensors_async,
)
from cumem.pools.memory import (
    get_limit as get_limit,
    limit as limit,
    memory_info as memory_info,
    on_out_of_memory as on_out_of_memory,
    set_limit as set_limit,
)
from cumem.pools.numpy_memory import numpy_pinned as numpy_pinned
from cumem.pools.region import Region as Region, sleep as sleep, wake as wake
from cumem.pools.pool import Pool as Pool, default_pool as default_pool, trim as trim
from cumem.pools.registering import register as register
from cumem.pools.sharing import shared_pinned as shared_pinned
from cumem.pools.statistics import (
    measure as measure,
    stats as stats,
)
from cumem.pools.workspace import Workspace as Workspace
from cumem.recording.live_buffers import (
    live as live,
    report_leaks_at_exit as report_leaks_at_exit,
    who_holds as who_holds,
)
from cumem.recording.record import (
    Record as Record,
    record as record,
    tag as tag,
)
from cumem.tools.recommendation import recommend as recommend
from cumem.transfers.collating import PinnedCollate as PinnedCollate
from cumem.transfers.explanation import explain as explain
from cumem.transfers.loading import prefetch as prefetch
from cumem.transfers.managed import (
    ManagedThrashWarning as ManagedThrashWarning,
    tiles as tiles,
)
from cumem.transfers.multi_device import (
    broadcast as broadcast,
    broadcast_async as broadcast_async,
    gather as gather,
    gather_async as gather_async,
    scatter as scatter,
    scatter_async as scatter_async,
)
from cumem.transfers.pipelines import (
    chunk_size as chunk_size,
    chunks as chunks,
    pipeline as pipeline,
)
from cumem.transfers.trees import to_device as to_device, to_host as to_host
from cumem.transfers.tuning import configure as configure
# isort: on

def load_ipython_extension(shell: object) -> None: ...
def unload_ipython_extension(shell: object) -> None: ...
