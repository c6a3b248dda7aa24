# SPDX-License-Identifier: Apache-2.0
"""Our buffers in CuPy, PyTorch, JAX, Numba and cuda.core, and their arrays here.

On a GPU, the tests use the libraries' own streams and waits. Other libraries take the
memory of the emulated device for the CPU's, and work on the CPU there.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.consumers import cupy_compiles

import cumem

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

ROOT = Path(__file__).parents[2]
# A copy of this length is still under way when the next call is made.
COUNT = 1 << 20
ROUNDS = 5
ALL = ("pinned", "mapped", "managed", "device")
ON_DEVICE = ("mapped", "managed", "device")

# The libraries warn when they are imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class CuPy:
    """The part of CuPy that needs no compiler: copies and memset."""

    kinds = ON_DEVICE

    def __init__(self) -> None:
        self.cupy = pytest.importorskip("cupy")

    def stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def current(self, stream: Any) -> Any:
        return stream

    def wait(self, stream: Any) -> None:
        stream.synchronize()

    def empty(self) -> Any:
        return self.cupy.empty(COUNT, np.float32)

    def enter(self, buffer: cumem.Buffer) -> Any:
        return self.cupy.asarray(buffer)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def write(self, array: Any, data: np.ndarray, stream: Any) -> None:
        array.set(data, stream=stream)

    def read(self, array: Any) -> np.ndarray:
        return self.cupy.asnumpy(array)


class Torch:
    kinds = ALL

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        if not self.torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")

    def stream(self) -> Any:
        return self.torch.cuda.Stream()

    def current(self, stream: Any) -> Any:
        return self.torch.cuda.stream(stream)

    def wait(self, stream: Any) -> None:
        stream.synchronize()

    def empty(self) -> Any:
        return self.torch.empty(COUNT, device="cuda")

    def enter(self, buffer: cumem.Buffer) -> Any:
        # PyTorch refuses DLPack's device for managed memory.
        shown = buffer.as_device() if buffer.kind == "managed" else buffer
        return self.torch.from_dlpack(shown)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def write(self, array: Any, data: np.ndarray, stream: Any) -> None:
        with self.current(stream):
            array.copy_(self.torch.from_numpy(data), non_blocking=True)

    def read(self, array: Any) -> np.ndarray:
        return array.cpu().numpy().copy()


class Jax:
    """JAX, whose arrays cannot be written, and which manages its streams itself."""

    kinds = ON_DEVICE
    stream = write = None

    def __init__(self) -> None:
        self.jax = pytest.importorskip("jax")
        importlib.import_module("jax.dlpack")
        if self.jax.default_backend() != "gpu":
            pytest.skip("this JAX has no CUDA")

    def enter(self, buffer: cumem.Buffer) -> Any:
        shown = buffer.as_device() if buffer.kind == "managed" else buffer
        return self.jax.dlpack.from_dlpack(shown)

    def address(self, array: Any) -> int:
        return int(array.unsafe_buffer_pointer())

    def read(self, array: Any) -> np.ndarray:
        return np.array(array)


class Numba:
    """The part of Numba that needs no compiler: copies."""

    kinds = ON_DEVICE

    def __init__(self) -> None:
        self.cuda = pytest.importorskip("numba.cuda")
        if not self.cuda.is_available():
            pytest.skip("this Numba has no CUDA")

    def stream(self) -> Any:
        return self.cuda.stream()

    def current(self, stream: Any) -> Any:
        # Numba's arrays name their streams.
        return contextlib.nullcontext()

    def wait(self, stream: Any) -> None:
        stream.synchronize()

    def empty(self) -> Any:
        return self.cuda.device_array(COUNT, np.float32)

    def enter(self, buffer: cumem.Buffer) -> Any:
        return self.cuda.as_cuda_array(buffer)

    def address(self, array: Any) -> int:
        return int(array.__cuda_array_interface__["data"][0])

    def write(self, array: Any, data: np.ndarray, stream: Any) -> None:
        array.copy_to_device(data, stream=stream)

    def read(self, array: Any) -> np.ndarray:
        return array.copy_to_host()


class CudaCore:
    """The library cuda.core, which has streams, and views whose values it does not
    read.
    """

    kinds = ALL
    write = read = None

    def __init__(self) -> None:
        core = pytest.importorskip("cuda.core")
        places = ("cuda.core.utils", "cuda.core", "cuda.core.experimental.utils")
        for place in places:
            with contextlib.suppress(ImportError, AttributeError):
                self.view = importlib.import_module(place).StridedMemoryView
                break
        else:
            pytest.skip("this cuda.core has no StridedMemoryView")
        if not hasattr(core, "Device"):
            core = importlib.import_module("cuda.core.experimental")
        self.device = core.Device(0)
        self.device.set_current()

    def stream(self) -> Any:
        return self.device.create_stream()

    def wait(self, stream: Any) -> None:
        stream.sync()

    def enter(self, buffer: cumem.Buffer) -> Any:
        return self.view.from_any_interface(buffer, stream_ptr=-1)

    def address(self, array: Any) -> int:
        return int(array.ptr)


LIBRARIES = [CuPy, Torch, Jax, Numba, CudaCore]
WRITERS = [CuPy, Torch, Numba]
READERS = [CuPy, Torch, Jax, Numba]


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(COUNT, np.float32)


def addresses(buffer: cumem.Buffer) -> set[int]:
    """Return the addresses that the memory may have, for the host and for the device."""
    return {buffer.ptr, getattr(buffer, "device_ptr", buffer.ptr)}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("library", LIBRARIES)
def test_buffer_is_the_librarys_array_without_a_copy(cuda, library, kind) -> None:
    lib = library()
    if kind not in lib.kinds:
        pytest.skip(f"this library takes no {kind} memory")
    data = numbers(1)
    buffer = cumem.array(data, kind=kind)
    array = lib.enter(buffer)
    assert lib.address(array) in addresses(buffer)
    if lib.read is not None:
        assert (lib.read(array) == data).all()
    if lib.write is not None and kind != "pinned":
        stream = lib.stream()
        lib.write(array, numbers(2), stream)
        lib.wait(stream)
        assert (values.get(buffer) == numbers(2)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("named", [True, False], ids=["stream named", "protocol"])
@pytest.mark.parametrize("library", WRITERS)
def test_copy_comes_after_the_librarys_work(cuda, library, named) -> None:
    """Either the call names the library's stream, or the array says what to wait for."""
    lib = library()
    stream, out = lib.stream(), np.empty(COUNT, np.float32)
    for i in range(ROUNDS):
        array = lib.empty()
        if library is Numba:
            array = lib.cuda.device_array(COUNT, np.float32, stream=stream)
        data = numbers(i)
        lib.write(array, data, stream)
        if named:
            cumem.copy(out, array, stream=stream)
        else:
            with lib.current(stream):
                cumem.copy(out, array)
        assert (out == data).all(), i


# Each of these functions puts the data on the second GPU by another library.


def torch_there(data: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(data).to("cuda:1")


def cupy_there(data: np.ndarray) -> Any:
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Device(1):
        array = cupy.asarray(data)
        cupy.cuda.get_current_stream().synchronize()
    return array


def jax_there(data: np.ndarray) -> Any:
    jax = pytest.importorskip("jax")
    return jax.device_put(data, jax.devices("gpu")[1])


@pytest.mark.gpu
@pytest.mark.parametrize("there", [torch_there, cupy_there, jax_there])
def test_array_of_another_device_than_the_current_one(cuda, there) -> None:
    if cumem.device_count() < 2:
        pytest.skip("this test needs two GPUs")

    def check() -> None:
        array = there(numbers(6))
        assert cumem.asbuffer(array).device == cumem.Device(1)
        host, here = (
            np.empty(COUNT, np.float32),
            cumem.zeros(COUNT, np.float32, device=0),
        )
        cumem.copy(host, array)
        assert (host == numbers(6)).all()
        cumem.copy(here, array, stream=cumem.Stream())
        assert (values.get(here) == numbers(6)).all()

    # JAX and PyTorch may leave device 1 the current one of the thread, so a new thread
    # does this.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(check).result()


@pytest.mark.gpu
@pytest.mark.parametrize("library", READERS)
def test_library_reads_after_work_of_cumem(cuda, library) -> None:
    lib = library()
    stream = cumem.Stream()
    for i in range(ROUNDS):
        buffer = cumem.empty(16 * COUNT, np.float32, "device", stream=stream)
        buffer.fill(i, stream=stream)
        array = lib.enter(buffer)
        assert (lib.read(array) == i).all()
        del array, buffer


@pytest.mark.gpu
@pytest.mark.parametrize("library", [CuPy, Torch, Numba, CudaCore])
def test_bytes_are_there_when_the_librarys_stream_is_waited_for(cuda, library) -> None:
    lib = library()
    stream, out = lib.stream(), np.empty(COUNT, np.float32)
    up, down = cumem.empty_device(COUNT, np.float32), cumem.empty_pinned(COUNT, "f4")
    for i in range(ROUNDS):
        data = numbers(i)
        cumem.copy_async(up, data, stream=stream)
        cumem.copy_async(down, up, stream=stream)
        cumem.copy_async(out, up, stream=stream)
        lib.wait(stream)
        assert (out == data).all(), i
        assert (np.frombuffer(down, np.float32) == data).all(), i


@pytest.mark.gpu
@pytest.mark.parametrize("library", LIBRARIES)
def test_memory_lives_as_long_as_the_librarys_array(cuda, library) -> None:
    lib = library()
    pool = cumem.Pool("device")
    data = numbers(3)
    with pool:
        buffer = cumem.array(data, kind="device")
    array = lib.enter(buffer)
    del buffer
    gc.collect()
    assert pool.stats().live_count == 1
    if lib.read is not None:
        assert (lib.read(array) == data).all()
    del array
    session.wait_until(lambda: gc.collect() >= 0 and pool.stats().live_count == 0)


@pytest.mark.gpu
def test_jax_computes_on_a_buffer_and_the_result_comes_back(cuda) -> None:
    lib = Jax()
    data = numbers(4)
    buffer = cumem.array(data, kind="device")
    there = lib.enter(buffer)
    result = lib.jax.jit(lambda x: 2 * x + 1)(there)
    out = cumem.empty_like(buffer)
    # The copy comes after the computation.
    cumem.copy(out, result)
    assert (values.get(out) == 2 * data + 1).all()
    assert cumem.asbuffer(result).readonly
    with pytest.raises(ValueError, match="read-only"):
        cumem.copy(result, out)


def numba_compiles() -> None:
    """Skip the test if Numba cannot compile for a GPU here."""
    cuda = pytest.importorskip("numba.cuda")
    try:
        cuda.jit("void(int32)")(lambda x: None)
    except Exception as error:
        pytest.skip(f"Numba has no compiler: {error}")


#: Each heading of docs/computing.md has a function that skips if the library cannot
#: compute here.
COMPUTING: dict[str, Callable[[], object]] = {
    "CuPy": cupy_compiles,
    "PyTorch": Torch,
    "JAX": Jax,
    "Numba": numba_compiles,
}


@pytest.mark.gpu
@pytest.mark.parametrize("heading", COMPUTING)
def test_examples_of_the_page_about_computing_double_the_samples(cuda, heading) -> None:
    COMPUTING[heading]()
    text = (ROOT / "docs" / "computing.md").read_text(encoding="utf-8")
    before, _, after = text.partition(f"\n## {heading}\n")
    first, *_ = re.findall(r"^```python\n(.*?)^```$", before, re.S | re.M)
    examples = re.findall(
        r"^```python\n(.*?)^```$", after.split("\n## ")[0], re.S | re.M
    )
    names: dict[str, Any] = {}
    exec(compile(first, "computing.md", "exec"), names)
    assert examples
    for example in examples:
        names["out"].fill(0)
        exec(compile(example, heading, "exec"), names)
        assert (names["out"].numpy() == 2).all()


# -- the emulated device -----------------------------------------------------------------


# Each of these functions doubles the elements of a buffer on the CPU, by a library that
# takes emulated memory for memory of the host.


def torch_doubles(buffer: cumem.Buffer) -> Any:
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(buffer)
    assert tensor.device.type == "cpu"
    return tensor * 2


def jax_doubles(buffer: cumem.Buffer) -> Any:
    jax = pytest.importorskip("jax")
    importlib.import_module("jax.dlpack")
    array = jax.dlpack.from_dlpack(buffer)
    assert next(iter(array.devices())).platform == "cpu"
    return jax.jit(lambda x: x * 2)(array)


def numba_doubles(buffer: cumem.Buffer) -> Any:
    numba = pytest.importorskip("numba")

    @numba.njit
    def double(source: np.ndarray, target: np.ndarray) -> None:
        for i in range(source.size):
            target[i] = source[i] * 2

    out = np.empty(buffer.shape, buffer.dtype)
    double(np.from_dlpack(buffer), out)
    return out


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("doubles", [torch_doubles, jax_doubles, numba_doubles])
def test_emulated_buffer_is_computed_on_by_the_cpu(
    emulated, doubles: Callable[[cumem.Buffer], Any], kind
) -> None:
    data = numbers(5)[:5000]
    stream = cumem.Stream()
    buffer = cumem.zeros(5000, "f4", kind)
    cumem.copy_async(buffer, cumem.array(data, kind="pinned"), stream=stream)
    result = doubles(buffer)  # Asking for the memory waits for the copy.
    for target in (cumem.empty_like(buffer), np.empty(5000, "f4")):
        cumem.copy(target, result)
        assert (values.get(target) == 2 * data).all()
    del buffer, result
    gc.collect()


# -- pipelines -------------------------------------------------------------------------


def on_cupy(hidden: bool) -> Callable[[Any, Any, cumem.Stream], None]:
    """Return a pipeline's function whose work is late.

    With `hidden`, CuPy gets only the addresses, so that cumem sees none of its work.
    """
    cupy = pytest.importorskip("cupy")
    late = cupy.ones(64 << 20, "u1")

    def array(buffer: cumem.DeviceBuffer) -> Any:
        if not hidden:
            return cupy.from_dlpack(buffer)
        memory = cupy.cuda.UnownedMemory(buffer.ptr, buffer.nbytes, None)
        return cupy.ndarray(
            buffer.shape, buffer.dtype, cupy.cuda.MemoryPointer(memory, 0)
        )

    def work(x: Any, y: Any, stream: cumem.Stream) -> None:
        with cupy.cuda.ExternalStream(stream.handle):
            late.copy()
            array(y).data.copy_from_device_async(
                array(x).data, y.nbytes, cupy.cuda.get_current_stream()
            )

    return work


def on_torch() -> Callable[[Any, Any, cumem.Stream], None]:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")

    def work(x: Any, y: Any, stream: cumem.Stream) -> None:
        # PyTorch does not take a handle of a default stream.
        is_default = stream.handle <= 2
        named = None if is_default else torch.cuda.ExternalStream(stream.handle)
        with torch.cuda.stream(named):
            torch.add(torch.from_dlpack(x), 1, out=torch.from_dlpack(y))
            torch.from_dlpack(y).sub_(1)

    return work


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["numpy", "pinned"])
@pytest.mark.parametrize("streams", [None, 2, 3])
@pytest.mark.parametrize("which", ["cupy", "cupy, by address", "torch"])
def test_pipeline_is_in_order_with_the_librarys_work(
    cuda, which, streams, kind
) -> None:
    work = on_torch() if which == "torch" else on_cupy("address" in which)
    data = np.random.default_rng(7).integers(0, 100, (64, 1 << 18)).astype("f4")
    src: Any = cumem.array(data, kind="pinned") if kind == "pinned" else data
    for _ in range(3):
        out = np.zeros_like(data)
        cumem.pipeline(work, src, out, rows=3, streams=streams)
        assert (out == data).all()


@pytest.mark.gpu
def test_chunks_kept_by_a_library_stay(cuda) -> None:
    cupy = pytest.importorskip("cupy")
    data = np.random.default_rng(8).random((64, 1 << 16), np.float32)
    kept = [cupy.from_dlpack(chunk) for _, chunk in cumem.chunks(data, "1 MiB")]
    assert (cupy.asnumpy(cupy.concatenate(kept)) == data).all()
