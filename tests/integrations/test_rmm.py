# SPDX-License-Identifier: Apache-2.0
"""RMM as a peer in replays and in the benchmark of pools, with a module in its place.

The module has RMM's names and signatures (26.08) and nothing else. A call that RMM
would refuse is therefore refused here too.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import cumem
from cumem.tools.replay import allocators as replay_allocators

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


class Resource:
    """A memory resource that hands out no memory, and counts the bytes that are
    allocated.
    """

    def __init__(self) -> None:
        self.out = 0
        self.peak = 0
        self.total = 0

    def allocate(self, nbytes: int) -> None:
        self.out += nbytes
        self.peak = max(self.peak, self.out)
        self.total += 1

    def deallocate(self, nbytes: int) -> None:
        self.out -= nbytes


class CudaMemoryResource(Resource):
    pass


class CudaAsyncMemoryResource(Resource):
    def __init__(
        self,
        initial_pool_size: int | None = None,
        release_threshold: int | None = None,
        enable_ipc: bool = False,
        enable_fabric: bool = False,
    ) -> None:
        super().__init__()
        self.initial = initial_pool_size


class Upstream(Resource):
    """A pool that takes from `upstream_mr` only the bytes that it lacks, and keeps
    them.
    """

    def __init__(self, upstream_mr: Resource, initial: int | None) -> None:
        super().__init__()
        assert isinstance(upstream_mr, Resource)
        self.upstream_mr = upstream_mr
        self.initial = initial
        self.held = 0

    def allocate(self, nbytes: int) -> None:
        super().allocate(nbytes)
        if self.out > self.held:
            self.upstream_mr.allocate(self.out - self.held)
            self.held = self.out


class PoolMemoryResource(Upstream):
    def __init__(
        self,
        upstream_mr: Resource,
        initial_pool_size: int | None = None,
        maximum_pool_size: int | None = None,
    ) -> None:
        super().__init__(upstream_mr, initial_pool_size)


class ArenaMemoryResource(Upstream):
    def __init__(
        self,
        upstream_mr: Resource,
        arena_size: int | None = None,
        dump_log_on_failure: bool = False,
    ) -> None:
        super().__init__(upstream_mr, arena_size)


class Statistics:
    """The numbers of a resource at the time of the question, under RMM's names."""

    def __init__(self, of: Resource) -> None:
        self.current_bytes = of.out
        self.peak_bytes = of.peak
        self.total_count = of.total


class StatisticsResourceAdaptor(Resource):
    def __init__(self, upstream_mr: Resource) -> None:
        super().__init__()
        self.upstream_mr = upstream_mr

    @property
    def allocation_counts(self) -> Statistics:
        return Statistics(self)


class Stream:
    """A stream that is made of any object with `__cuda_stream__()`, as RMM's is."""

    def __init__(self, obj: object = None) -> None:
        version, self.handle = obj.__cuda_stream__()  # type: ignore[attr-defined]
        assert version == 0


class Current:
    """The place of the resource that set_current_device_resource() sets."""

    resource: Resource = CudaMemoryResource()


def set_current_device_resource(mr: Resource) -> None:
    assert isinstance(mr, Resource)
    Current.resource = mr


class DeviceBuffer:
    """A buffer that holds bytes of a resource while it lives."""

    def __init__(
        self,
        *,
        ptr: int = 0,
        size: int = 0,
        stream: Stream | None = None,
        mr: Resource | None = None,
    ) -> None:
        assert stream is None or isinstance(stream, Stream)
        self.size = size
        self.mr = mr if mr is not None else Current.resource
        self.mr.allocate(size)

    def __del__(self) -> None:
        self.mr.deallocate(self.size)


@pytest.fixture
def rmm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put modules with these classes in the place of RMM, whether it is installed or
    not.
    """
    names = {
        "rmm": {"DeviceBuffer": DeviceBuffer, "__version__": "26.8.0"},
        "rmm.mr": {
            made.__name__: made
            for made in (
                CudaMemoryResource,
                CudaAsyncMemoryResource,
                PoolMemoryResource,
                ArenaMemoryResource,
                StatisticsResourceAdaptor,
                set_current_device_resource,
            )
        },
        "rmm.pylibrmm": {},
        "rmm.pylibrmm.stream": {"Stream": Stream},
    }
    modules = {}
    for name, attributes in names.items():
        modules[name] = ModuleType(name)
        modules[name].__spec__ = importlib.util.spec_from_loader(name, None)
        for attribute, value in attributes.items():
            setattr(modules[name], attribute, value)
        monkeypatch.setitem(sys.modules, name, modules[name])
    modules["rmm"].mr = modules["rmm.mr"]  # type: ignore[attr-defined]
    modules["rmm"].pylibrmm = modules["rmm.pylibrmm"]  # type: ignore[attr-defined]
    modules["rmm.pylibrmm"].stream = modules["rmm.pylibrmm.stream"]  # type: ignore[attr-defined]
    return modules["rmm"]


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pools", FOLDER / "pools.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The dataclasses of the module look for the module there.
    sys.modules["pools"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["pools"]
    return module


def test_replay_on_rmm_counts_what_its_pool_holds(emulated, rmm) -> None:
    allocator = replay_allocators.RmmAllocator(0, 2)
    assert replay_allocators.is_installed("rmm")
    assert allocator.version == "26.8.0"
    assert allocator.reserved() == 0, (
        "the pool has reserved memory before its first use"
    )
    first = allocator.allocate(1000)
    second = allocator.allocate_on(500, allocator.streams[1])
    assert (allocator.reserved(), allocator.growths()) == (1500, 2)
    del first
    third = allocator.allocate_on(1000, allocator.side)
    assert (allocator.reserved(), allocator.growths()) == (1500, 2)
    assert allocator.peak_reserved() == 1500
    del second, third
    allocator.empty()
    assert (allocator.reserved(), allocator.peak_reserved()) == (0, 0)


def test_replay_on_rmm_needs_a_gpu(emulated, rmm) -> None:
    with pytest.raises(ValueError, match="rmm needs a GPU"):
        replay_allocators.make("rmm", "device", "default", 0, 1)


def test_benchmark_measures_rmms_pool_arena_and_async(
    emulated, rmm, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = load_benchmark()
    monkeypatch.setattr(cumem, "backend", lambda: "cuda")
    monkeypatch.setattr(pools, "PEERS", {"rmm": pools.rmm_cases})
    names: dict[str, object] = {}
    cases, found = pools.peer_cases(names)
    assert found == {"rmm": "26.8.0"}
    assert [case.form for case in cases] == [
        "DeviceBuffer, pool",
        "DeviceBuffer, arena",
        "DeviceBuffer, async",
    ]
    for case in cases:
        assert case.sample(names, 3) > 0
    for resource in (names["rmm_pool"], names["rmm_arena"], names["rmm_async"]):
        assert isinstance(resource, Resource)
        assert (resource.total, resource.out) == (3, 0)
        assert resource.initial == 1 << 30, "RMM would choose half of the device"  # type: ignore[attr-defined]
