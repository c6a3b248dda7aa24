# SPDX-License-Identifier: Apache-2.0
"""The names of ``cumem.types``, each with the module that has it: see `types.py`."""

# isort: off
from cumem.base.kinds import Kind as Kind
from cumem.files.npy import NpzDict as NpzDict
from cumem.files.safetensors import SafetensorsDict as SafetensorsDict
from cumem.files.safetensors.format import (
    SafetensorsHeader as SafetensorsHeader,
    SafetensorsInfo as SafetensorsInfo,
)
from cumem.pools.memory import (
    DeviceMemory as DeviceMemory,
    HostMemory as HostMemory,
    LimitBlock as LimitBlock,
    OutOfMemoryHook as OutOfMemoryHook,
)
from cumem.pools.registering import Registration as Registration
from cumem.pools.snapshot import (
    Block as Block,
    Segment as Segment,
    Snapshot as Snapshot,
)
from cumem.pools.statistics import (
    Counters as Counters,
    Measure as Measure,
    Measurement as Measurement,
    PoolStats as PoolStats,
    Stats as Stats,
)
from cumem.recording.live_buffers import (
    Holder as Holder,
    Holders as Holders,
    Living as Living,
    LivingBuffers as LivingBuffers,
)
from cumem.tools.info import About as About
from cumem.tools.recommendation import Recommendation as Recommendation
from cumem.transfers.explanation import Explanation as Explanation
from cumem.transfers.managed import Residency as Residency
from cumem.transfers.tuning import Configuration as Configuration
# isort: on
