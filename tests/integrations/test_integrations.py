# SPDX-License-Identifier: Apache-2.0
"""Memory of Numba and cuda.core from cumem's pools, with common limits and counters.

On the emulated device, stand-ins replace the two libraries, which need a GPU. With a
GPU, programs use the libraries themselves.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import programs, session, stand_ins
from support.consumers import cupy_compiles
from support.forks import fork_and_run

import cumem

SIZE = 1 << 20
ROOT = Path(__file__).parents[2]

# The libraries warn when they are imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def live(kind: Any = "device", device: int = 0) -> int:
    return cumem.default_pool(kind, device).stats().live_count


def write(stream: Any) -> None:
    """Queue work on a stream, as a library would."""
    cumem.empty_device(SIZE).fill(1, stream=stream)


# -- Numba -------------------------------------------------------------------------------


@pytest.fixture
def numba(emulated, monkeypatch) -> Any:
    """Provide a stand-in for Numba, whose attribute `it` is `cumem.integrations.numba`."""
    made = stand_ins.Numba()
    made.it = stand_ins.install(monkeypatch, made.modules, "numba")  # type: ignore[attr-defined]
    return made


def test_numbas_memory_comes_from_the_pools(numba) -> None:
    numba.it.enable()
    context = numba.context()
    manager = context.memory_manager
    made = {
        "device": manager.memalloc(100),
        "managed": manager.memallocmanaged(100, True),
        "pinned": manager.memhostalloc(100),
        "mapped": manager.memhostalloc(100, mapped=True, portable=True),
    }
    for kind, memory in made.items():
        assert (memory.device_pointer if kind == "pinned" else memory.address) != 0
        assert live(kind) == 1, kind
    del memory
    others = manager.memhostalloc(100, wc=True), manager.memallocmanaged(100, False)
    names = {pool.name for pool in cumem.stats().pools if pool.live_count}
    assert {"default, write-combined", "default, attach host"} <= names
    del others
    made.clear()
    assert [live(kind) for kind in ("device", "managed", "pinned", "mapped")] == [0] * 4
    info = manager.get_memory_info()
    assert 0 < info.free <= info.total == 1 << 30


@pytest.mark.parametrize("kind", ["device", "managed", "pinned", "mapped", "locked"])
def test_running_out_is_numbas_error_too(numba, kind) -> None:
    """Numba's own code catches Numba's error, and users catch cumem's, so one error
    must be both.
    """
    numba.it.enable()
    manager = numba.context().memory_manager
    memory = np.zeros(16 << 20, "u1")
    allocate: Any = {
        "device": manager.memalloc,
        "managed": lambda nbytes: manager.memallocmanaged(nbytes, True),
        "pinned": manager.memhostalloc,
        "mapped": lambda nbytes: manager.memhostalloc(nbytes, mapped=True),
        "locked": lambda nbytes: manager.mempin(memory, memory.ctypes.data, nbytes),
    }[kind]
    if kind == "locked":
        session.testing.plan_fault("host_register", 1, 2, repeat=True)
        limit: Any = contextlib.nullcontext()
    else:
        limit = cumem.limit(kind, "4 MiB")
    with limit, pytest.raises(stand_ins.CudaAPIError) as caught:
        allocate(16 << 20)
    session.testing.plan_fault(None, 0)
    error: Any = caught.value
    assert isinstance(error, cumem.OutOfMemoryError)
    assert (error.code, error.msg) == (2, str(error)), (
        "the error is not CUDA_ERROR_OUT_OF_MEMORY"
    )
    assert not str(error).startswith("["), "the text is Numba's"
    if kind != "locked":
        assert (error.requested, error.limit, error.kind) == (16 << 20, 4 << 20, kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is numba.it.OutOfMemoryError
    assert (again.code, again.requested) == (2, error.requested)
    assert str(again) == str(error)
    kept = allocate(1 << 20)
    del kept


def test_numbas_other_errors_stay_cumems(numba) -> None:
    numba.it.enable()
    manager = numba.context().memory_manager
    memory = np.zeros(16 << 20, "u1")
    session.testing.plan_fault("host_register", 1, 999)
    with pytest.raises(cumem.CudaError) as caught:
        manager.mempin(memory, memory.ctypes.data, memory.nbytes)
    session.testing.plan_fault(None, 0)
    assert not isinstance(caught.value, stand_ins.CudaAPIError)


def test_the_error_is_one_of_the_numba_that_is_installed(runtime) -> None:
    """The installed Numba may want other arguments for its class of errors.

    No GPU is needed to find that out.
    """
    driver = pytest.importorskip("numba.cuda.cudadrv.driver")
    from cumem.integrations import numba as it

    manager = it.CumemMemoryManager(
        context=SimpleNamespace(device=SimpleNamespace(id=0))
    )
    with (
        cumem.limit("pinned", "4 MiB"),
        pytest.raises(driver.CudaAPIError) as caught,
    ):
        manager.memhostalloc(1 << 40)  # No pool can have this much in its cache.
    assert isinstance(caught.value, cumem.OutOfMemoryError)
    assert caught.value.code == 2  # The code 2 is CUDA_ERROR_OUT_OF_MEMORY.
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.code) == (str(caught.value), 2)


def test_numbas_second_device_has_a_pool_of_its_own(numba) -> None:
    numba.it.enable([cumem.Pool("device", device=d) for d in (0, 1)])
    kept = numba.context(1).memory_manager.memalloc(10)
    pools = numba.it.CumemMemoryManager.pools
    assert [pools.of(d).stats().live_count for d in (0, 1)] == [0, 1]
    del kept


def test_numba_that_is_in_use_is_refused_as_too_late(numba) -> None:
    numba.it.enable()
    numba.context()
    with pytest.raises(RuntimeError, match="before its first array"):
        numba.it.enable()
    with pytest.raises(ValueError, match="'device' here, not 'managed'"):
        numba.it.enable(cumem.Pool("managed"))
    with pytest.raises(RuntimeError, match=r"Numba cannot use .* emulated"):
        numba.it.really_need_gpu("Numba")


def test_numba_finds_the_manager_by_its_name(numba) -> None:
    assert numba.it._numba_memory_manager is numba.it.CumemMemoryManager
    numba.manager = numba.it._numba_memory_manager
    kept = numba.context().memory_manager.memalloc(10)
    assert live() == 1
    del kept


def test_numbas_memory_is_reused_when_the_devices_work_is_done(numba) -> None:
    pool = cumem.Pool("device")
    numba.it.enable(pool)
    manager = numba.context().memory_manager
    stream = cumem.Stream()
    memory = manager.memalloc(SIZE)
    address = memory.address
    with session.gate(stream):
        write(stream)
        del memory
        other = manager.memalloc(SIZE)
        assert other.address != address
    stream.synchronize()
    pool.trim()
    assert pool.stats().in_flight_count == 0
    del other


def test_numba_pins_memory_in_place(numba) -> None:
    numba.it.enable()
    manager = numba.context().memory_manager
    memory = np.zeros(1 << 16, "u1")
    for mapped in (False, True):
        pin = manager.mempin(memory, memory.ctypes.data, memory.nbytes, mapped=mapped)
        assert session.testing.registrations() == 1
        del pin
        assert session.testing.registrations() == 0


def test_numba_defers_and_resets(numba) -> None:
    numba.it.enable()
    manager = numba.context().memory_manager
    first, second = manager.memalloc(10), manager.memhostalloc(10)
    with manager.defer_cleanup():
        with manager.defer_cleanup():
            del first
        del second
        assert (live(), live("pinned")) == (1, 1)
    assert (live(), live("pinned")) == (0, 0)
    kept = manager.memalloc(10)
    manager.reset()
    assert live() == 0
    with pytest.raises(ReferenceError):
        kept.address  # noqa: B018


def test_numbas_ipc_needs_plain_segments(numba) -> None:
    numba.it.enable(cumem.Pool("device"))
    memory = numba.context().memory_manager.memalloc(10)
    with pytest.raises(RuntimeError, match='segments="malloc"'):
        numba.devices[0].primary_context.memory_manager.get_ipc_handle(memory)
    del memory
    numba.devices.clear()
    numba.it.enable(cumem.Pool("device", segments="malloc"))
    manager = numba.context().memory_manager
    memory = manager.memalloc(10)
    assert manager.get_ipc_handle(memory)[0] == "handle"
    del memory


def test_numbas_arrays_keep_shutdown_away(numba) -> None:
    numba.it.enable()
    manager = numba.context().memory_manager
    memory = manager.memalloc(10)
    with pytest.raises(BufferError):
        cumem.shutdown()
    del memory
    cumem.shutdown()
    assert manager.memalloc(10).address != 0, "Numba has no memory after a shutdown"


# -- cuda.core ---------------------------------------------------------------------------


@pytest.fixture
def core(emulated, monkeypatch) -> Any:
    return stand_ins.install(monkeypatch, stand_ins.CORE_MODULES, "cuda_core")


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("device", (True, False, False, 0)),
        ("pinned", (True, True, False, -1)),
        ("mapped", (True, True, False, -1)),
        ("managed", (True, True, True, 0)),
    ],
)
def test_resource_is_over_a_pool_of_any_kind(core, kind, facts) -> None:
    pool = cumem.Pool(kind)
    for resource in (core.PoolMemoryResource(pool), core.PoolMemoryResource(kind=kind)):
        buffer = resource.allocate(100, stream=cumem.Stream())
        empty = resource.allocate(0)
        assert (buffer.size, buffer.handle != 0, empty.handle) == (100, True, 0)
        assert resource.pool.stats().live_count == 1
        assert facts == (
            resource.is_device_accessible,
            resource.is_host_accessible,
            resource.is_managed,
            resource.device_id,
        )
        with pytest.raises(BufferError):
            cumem.shutdown()
        buffer.close()
        assert resource.pool.stats().live_count == 0
        del empty, buffer


def test_resource_of_another_device_or_kind_is_refused(core) -> None:
    pool = cumem.Pool("device", device=1)
    assert core.PoolMemoryResource(pool).device_id == 1
    assert core.PoolMemoryResource(device=1).pool is cumem.default_pool("device", 1)
    with pytest.raises(ValueError, match="device 0, but the pools given"):
        core.PoolMemoryResource(pool, device=0)
    with pytest.raises(ValueError, match="pool is one of device memory"):
        core.PoolMemoryResource(pool, kind="pinned")
    with pytest.raises(ValueError, match="not 'paged'"):
        core.PoolMemoryResource(kind="paged")
    with pytest.raises(RuntimeError, match=r"cuda\.core cannot use"):
        core.really_need_gpu("cuda.core")


def test_resource_honours_the_stream_of_the_deallocation(core) -> None:
    resource = core.PoolMemoryResource(cumem.Pool("device"))
    first, second = cumem.Stream(), cumem.Stream()
    # Before version 1.0, the stream was a positional argument.
    buffer = resource.allocate(SIZE, first)
    address = buffer.handle
    with session.gate(second):
        write(second)
        buffer.close(stream=second)
        other = resource.allocate(SIZE, stream=first)
        assert other.handle != address, "the second stream may still use this block"
        other.close()
    second.synchronize()
    buffer = resource.allocate(SIZE, stream=first)
    address = buffer.handle
    with session.gate(first):
        write(first)
        del buffer  # The block goes back on the stream that it was allocated on.
        again = resource.allocate(SIZE, stream=first)
        assert again.handle == address
        again.close()


def test_resource_whose_stream_is_refused_loses_nothing(core) -> None:
    resource = core.PoolMemoryResource(cumem.Pool("device"))
    buffer = resource.allocate(100)
    with pytest.raises(TypeError):
        buffer.close(stream="no stream")
    assert resource.pool.stats().live_count == 0
    with pytest.raises(ValueError, match="nbytes"):
        resource.allocate(-1)
    assert resource.pool.stats().live_count == 0


# -- all together ------------------------------------------------------------------------


def test_one_limit_and_one_table_cover_all_libraries(
    emulated, monkeypatch, numba, core
) -> None:
    cupy = stand_ins.Cupy(2)
    it = stand_ins.install(monkeypatch, cupy.modules, "cupy")
    it.enable()
    numba.it.enable()
    manager = numba.context().memory_manager
    resource = core.PoolMemoryResource()
    cumem.set_limit("device", "8 MiB")
    kept = [
        cupy.empty(2 << 20),
        manager.memalloc(2 << 20),
        resource.allocate(2 << 20),
        cumem.empty_device(2 << 20, "u1"),
    ]
    (pool,) = [p for p in cumem.stats().pools if p.kind == "device"]
    assert (pool.live_count, pool.live_nbytes) == (4, 8 << 20)
    for allocate in (cupy.empty, manager.memalloc, resource.allocate):
        with pytest.raises(cumem.OutOfMemoryError) as caught:
            allocate(2 << 20)
        assert caught.value.limit == 8 << 20
    kept.pop(0)
    # One library gets the memory that another gave back.
    kept.append(resource.allocate(2 << 20))
    cumem.set_limit("device", None)
    kept.clear()
    it.disable()


def test_forked_child_drops_all_quietly(numba, core) -> None:
    numba.it.enable()
    manager = numba.context().memory_manager
    kept = [manager.memalloc(10), core.PoolMemoryResource().allocate(10)]

    def check() -> None:
        kept.clear()
        gc.collect()
        with pytest.raises(RuntimeError, match="forked child"):
            manager.memalloc(10)

    fork_and_run(check)
    assert live() == 2
    kept.clear()


# -- the libraries themselves ------------------------------------------------------------


def run(code: str, **environ: str) -> str:
    """Run code in a new process, since Numba keeps the manager of its first use."""
    command = ["-W", "ignore", "-c", textwrap.dedent(code)]
    done = programs.run(*command, CUMEM_BACKEND="cuda", **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


#: This program uses each kind of memory through Numba, and then tries wrong calls.
NUMBA = """
import gc
import numpy as np
from numba import cuda
import cumem
{enable}
data = np.arange(1 << 20, dtype="f4")
live = lambda kind: cumem.default_pool(kind).stats().live_count
stream = cuda.stream()
for _ in range(5):
    array = cuda.to_device(data, stream=stream)
    other = cuda.device_array_like(array)
    other.copy_to_device(array, stream=stream)
    pinned = cuda.pinned_array(data.shape, data.dtype)
    other[:10].copy_to_host(pinned[:10], stream=stream)
    out = other.copy_to_host(stream=stream)
    stream.synchronize()
    assert (out == data).all() and (pinned[:10] == data[:10]).all()
assert (live("device"), live("pinned")) == (2, 1)
mapped = cuda.mapped_array(10)
mapped[:] = 3
managed = cuda.managed_array(10, "f8")
managed[:] = 4
assert mapped.sum() == 30 and managed.sum() == 40
assert (live("mapped"), live("managed")) == (1, 1)
with cuda.pinned(data), cuda.defer_cleanup():
    del array
    gc.collect()
    assert live("device") == 2
    cuda.to_device(data)
assert cuda.current_context().get_memory_info().total > 1 << 30
try:
    cumem.shutdown()
except BufferError as error:
    print("shutdown refused")
handle = other.get_ipc_handle() if {ipc} else None
del other, out, pinned, mapped, managed, handle
gc.collect()
assert [live(k) for k in ("device", "pinned", "mapped", "managed")] == [0] * 4
try:
    import cumem.integrations.numba as late
    late.enable()
except RuntimeError as error:
    print("too late")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["enable", "environment"])
def test_numba_itself_works_with_memory_of_the_pools(cuda, by) -> None:
    pytest.importorskip("numba.cuda")
    enable = (
        "import cumem.integrations.numba as it\nit.enable()" if by == "enable" else ""
    )
    environ = {}
    if by == "environment":
        environ["NUMBA_CUDA_MEMORY_MANAGER"] = "cumem.integrations.numba"
    out = run(NUMBA.format(enable=enable, ipc=False), **environ)
    assert out.split("\n")[:2] == ["shutdown refused", "too late"]


@pytest.mark.gpu
def test_numbas_ipc_handle_of_a_plain_pool(cuda) -> None:
    pytest.importorskip("numba.cuda")
    out = run("""
        import cumem, numpy as np
        import cumem.integrations.numba as it
        pool = cumem.Pool("device", segments="malloc")
        it.enable(pool)
        from numba import cuda
        array = cuda.to_device(np.arange(10))
        print(type(array.get_ipc_handle()).__name__, pool.stats().live_count)
        """)
    assert out.split() == ["IpcArrayHandle", "1"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["device", "pinned", "mapped", "managed"])
def test_cuda_core_itself_works_with_memory_of_a_pool(cuda, kind) -> None:
    core = pytest.importorskip("cuda.core")
    import cumem.integrations.cuda_core as it

    if not hasattr(core, "Device"):
        core = pytest.importorskip("cuda.core.experimental")
    device = core.Device(0)
    device.set_current()
    first, second = device.create_stream(), device.create_stream()
    pool = cumem.Pool(kind)
    resource = it.PoolMemoryResource(pool)
    source = cumem.array(np.arange(SIZE, dtype="u1"), kind="device")
    for _ in range(4):
        buffer = resource.allocate(SIZE, stream=first)
        assert isinstance(buffer, core.Buffer)
        assert buffer.size == SIZE
        assert buffer.is_device_accessible
        assert buffer.is_host_accessible == (kind != "device")
        cumem.Stream.from_external(first).wait(cumem.current_stream())
        it.core.Buffer.from_handle(source.ptr, SIZE, owner=source).copy_to(
            buffer, stream=first
        )
        first.sync()
        cumem.Stream.from_external(second).wait(cumem.Stream.from_external(first))
        buffer.close(stream=second)
    assert pool.stats().live_count == 0
    kept = resource.allocate(SIZE, stream=first)
    with pytest.raises(BufferError):
        cumem.shutdown()
    del kept
    gc.collect()
    assert pool.stats().live_count == 0


@pytest.mark.gpu
def test_cuda_cores_device_allocates_from_a_pool(cuda) -> None:
    core = pytest.importorskip("cuda.core")
    import cumem.integrations.cuda_core as it

    if not hasattr(core, "Device"):
        core = pytest.importorskip("cuda.core.experimental")
    device = core.Device(0)
    device.set_current()
    before = device.memory_resource
    pool = cumem.Pool("device")
    device.memory_resource = it.PoolMemoryResource(pool)
    try:
        buffer = device.allocate(100, stream=device.create_stream())
        assert (buffer.size, pool.stats().live_count) == (100, 1)
        del buffer
        gc.collect()
        assert pool.stats().live_count == 0
    finally:
        device.memory_resource = before


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heading", "module"),
    [
        ("One pool", "cupy"),
        ("CuPy", "cupy"),
        ("Numba", "numba.cuda"),
        ("cuda.core",) * 2,
    ],
)
def test_examples_of_the_page_run(cuda, heading, module) -> None:
    pytest.importorskip(module)
    if module == "cupy":
        cupy_compiles()
    text = (ROOT / "docs" / "allocators.md").read_text(encoding="utf-8")
    _, _, after = text.partition(f"# {heading}")
    code = re.findall(r"^```python\n(.*?)^```$", after.split("\n## ")[0], re.S | re.M)
    assert code
    run("import numpy as np\nsamples = np.ones(100, 'f4')\n" + "".join(code))
