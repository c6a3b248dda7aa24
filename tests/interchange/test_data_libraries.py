# SPDX-License-Identifier: Apache-2.0
"""Tests with libraries that bring data, such as pyarrow, h5py, zarr and pandas.

They write into our memory or give arrays that our copies take; the values must arrive
on the device. The examples of docs/interop.md run as well.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import programs, values
from support.exporters import capsule_name

import cumem

#: The host may touch these kinds. A file is read straight into them.
HOST: list[Any] = ["pinned", "mapped", "managed"]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


PAGE = Path(__file__).parents[2] / "docs" / "interop.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)


def blocks_of(heading: str) -> list[str]:
    """Return the examples of a section of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n### {heading}\n")[2]
    return BLOCK.findall(re.split(r"^##+ ", text, maxsplit=1, flags=re.M)[0])


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).random(shape)


def up(source: object, expected: np.ndarray) -> None:
    """Check that each call that copies takes the source, and brings its values to the
    device.
    """
    for make in (
        lambda d: cumem.copy(d, source),
        lambda d: cumem.copy_async(d, source).wait(),
        lambda d: d.__setitem__(..., source),
    ):
        device = cumem.zeros(expected.shape, expected.dtype, "device")
        make(device)
        assert (values.get(device) == expected).all()
    made = cumem.array(source, kind="device")
    assert made.dtype == expected.dtype
    assert (values.get(made) == expected).all()


# -- pyarrow -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HOST)
def test_arrow_buffer_is_over_our_memory(runtime, kind) -> None:
    arrow = pytest.importorskip("pyarrow")
    data = numbers(100)
    buffer = cumem.array(data, kind=kind)
    whole = arrow.py_buffer(buffer)
    assert (whole.address, whole.size, whole.is_mutable) == (buffer.ptr, 800, True)
    column = arrow.Array.from_buffers(arrow.float64(), 100, [None, whole])
    assert (column.to_numpy() == data).all()
    with pytest.raises(BufferError, match="export"):
        buffer.free()
    foreign = arrow.foreign_buffer(buffer.ptr, buffer.nbytes, base=buffer)
    assert foreign.address == buffer.ptr
    with pytest.raises(BufferError, match="contiguous"):
        arrow.py_buffer(buffer[::2])
    del whole, column, foreign


def test_arrow_does_not_take_device_memory(runtime) -> None:
    arrow = pytest.importorskip("pyarrow")
    with pytest.raises(TypeError, match="bytes-like"):
        arrow.py_buffer(cumem.zeros(4, "f4", "device"))


@pytest.mark.parametrize("kind", HOST)
def test_arrow_reads_files_straight_into_it(runtime, kind, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    data = np.arange(250, dtype="u1")
    (tmp_path / "raw").write_bytes(data.tobytes())
    buffer = cumem.zeros(250, "u1", kind)
    with arrow.OSFile(str(tmp_path / "raw")) as file:
        assert file.readinto(buffer) == 250
    assert (values.get(buffer) == data).all()


@pytest.mark.parametrize("form", ["file", "stream"])
def test_columns_of_an_ipc_file_in_pinned_memory_are_pinned(
    runtime, form, tmp_path: Path
) -> None:
    ipc = pytest.importorskip("pyarrow.ipc")
    arrow = pytest.importorskip("pyarrow")
    data = numbers(5000)
    table = arrow.table({"x": data, "n": np.arange(5000)})
    path = str(tmp_path / "table.arrow")
    with getattr(ipc, f"new_{form}")(path, table.schema) as writer:
        writer.write_table(table)
    whole = cumem.fromfile(path, "u1", kind="pinned")
    read = getattr(ipc, f"open_{form}")(arrow.py_buffer(whole)).read_all()
    column = read["x"].chunk(0)
    found = cumem.asbuffer(column)
    assert found.kind == "pinned"
    says = capsule_name(column.__dlpack__()) == "dltensor_versioned"
    # Only a versioned capsule says that memory is read-only. Older versions of pyarrow give
    # older capsules.
    assert found.readonly == says
    assert whole.ptr <= found.ptr < whole.ptr + whole.nbytes
    up(column, data)
    del read, column, found


def test_arrow_arrays_are_sources(runtime) -> None:
    arrow = pytest.importorskip("pyarrow")
    data = numbers(1000)
    up(arrow.array(data), data)
    up(arrow.chunked_array([data[:300], data[300:]]), data)
    device = cumem.zeros(3, "f8", "device")
    with pytest.raises((TypeError, BufferError), match="nulls"):
        cumem.copy(device, arrow.array([1.0, None, 3.0]))
    assert not values.get(device).any()


# -- h5py and zarr -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HOST)
def test_hdf5_reads_straight_into_it(runtime, kind, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    data = numbers(10, 100)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = data
        buffer = cumem.zeros((10, 100), "f8", kind)
        file["x"].read_direct(buffer.numpy())
        assert (values.get(buffer) == data).all()
        file["x"].read_direct(buffer[:5].numpy(), np.s_[5:])
        assert (values.get(buffer)[:5] == data[5:]).all()
        with pytest.raises(TypeError, match="C-contiguous"):
            file["x"].read_direct(buffer[:, ::2].numpy(), np.s_[:, ::2])


def test_hdf5_writes_it_and_is_a_source(runtime, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    data = numbers(10, 100)
    buffer = cumem.array(data, kind="pinned")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = buffer
        kept = file.create_dataset("y", (10, 100), "f8")
        kept.write_direct(buffer.numpy())
        for name in ("x", "y"):
            assert (file[name][...] == data).all()
        up(file["x"], data)
        reported = r"cannot be written to.*assign: obj\[\.\.\.\] = buf\.to_numpy"
        with pytest.raises(TypeError, match=reported):
            cumem.copy(kept, buffer)


@pytest.mark.parametrize("kind", HOST)
def test_zarr_reads_into_it(runtime, kind, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    prototype = pytest.importorskip("zarr.core.buffer").default_buffer_prototype()
    data = numbers(100, 30)
    stored = zarr.create_array(
        str(tmp_path / "z"), shape=data.shape, chunks=(10, 30), dtype="f8"
    )
    stored[:] = data
    buffer = cumem.zeros((50, 30), "f8", kind)
    out = prototype.nd_buffer.from_ndarray_like(buffer.numpy())
    stored.get_basic_selection(np.s_[25:75], out=out)
    assert (values.get(buffer) == data[25:75]).all()
    del out


def test_zarr_writes_it_and_is_a_source(runtime, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    data = numbers(20, 30)
    stored = zarr.create_array(
        str(tmp_path / "z"), shape=data.shape, chunks=(10, 30), dtype="f8"
    )
    stored[:] = cumem.array(data, kind="pinned")
    assert (stored[:] == data).all()
    up(stored, data)


# -- Pillow and pandas ---------------------------------------------------------------------


def test_images_are_sources(runtime) -> None:
    image = pytest.importorskip("PIL.Image")
    data = (np.arange(16 * 16 * 3) % 251).astype("u1").reshape(16, 16, 3)
    up(image.fromarray(data), data)
    up(image.fromarray(data[:, :, 0].copy()), data[:, :, 0])
    buffer = cumem.array(data, kind="pinned")
    assert (np.asarray(image.fromarray(buffer.numpy())) == data).all()
    with pytest.raises(TypeError, match="cannot be written to"):
        cumem.copy(image.fromarray(data), buffer)
    with pytest.raises(TypeError, match="exports no memory"):
        cumem.asbuffer(image.fromarray(data))


def test_series_and_frames_are_sources(runtime) -> None:
    pandas = pytest.importorskip("pandas")
    data = numbers(1000)
    up(pandas.Series(data), data)
    up(pandas.Series(data)[::3], data[::3])
    up(pandas.DataFrame({"a": data, "b": data[::-1]}), np.stack([data, data[::-1]], 1))
    days = np.arange("2026-01", "2026-02", dtype="M8[D]").astype("M8[s]")
    up(pandas.Series(days), days)
    with pytest.raises(TypeError, match="plain values"):
        cumem.copy(cumem.zeros(2, "i8", "device"), pandas.Series(["a", 1.5]))
    # pandas makes NaN of the missing value, so the series has a dtype of floats.
    with pytest.raises(TypeError, match="dtype float64"):
        cumem.copy(cumem.zeros(2, "i8", "device"), pandas.Series([1, None]))


def test_series_may_be_over_pinned_memory(runtime) -> None:
    pandas = pytest.importorskip("pandas")
    buffer = cumem.array(numbers(100), kind="pinned")
    series = pandas.Series(buffer.numpy(), copy=False)
    assert cumem.asbuffer(series.to_numpy()).ptr == buffer.ptr
    assert cumem.asbuffer(series.to_numpy()).kind == "pinned"
    del series


class Interface:
    """An object that has `__array_interface__` and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__


def test_objects_that_become_arrays_are_sources(runtime) -> None:
    data = numbers(7, 5)

    class Method:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return data

    up(Method(), data)
    up(Interface(data), data)
    up(Interface(data[::2].copy()), data[::2])


# -- mpi4py --------------------------------------------------------------------------------

#: This program sends buffers to itself by mpi4py.
MPI_PROGRAM = textwrap.dedent(
    """
    import ctypes, sys
    import numpy as np
    import cumem
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        print(error)
        sys.exit(77)

    world = MPI.COMM_SELF
    data = np.arange(1000.0)

    def send(source, target):
        request = world.Irecv(target, source=0, tag=1)
        world.Send(source, dest=0, tag=1)
        request.Wait()

    kinds = ["pinned", "mapped", "managed"]
    try:
        aware = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support() == 1
    except AttributeError:
        aware = False
    if cumem.backend() == "emulated" or aware:
        kinds.append("device")
    for kind in kinds:
        source, target = cumem.array(data, kind=kind), cumem.zeros(1000, "f8", kind)
        cumem.current_stream().synchronize()
        send(source, target)
        assert (target.to_numpy() == data).all(), kind
        target[...] = 0
        cumem.current_stream().synchronize()
        world.Allreduce(source, target)
        assert (target.to_numpy() == data).all(), kind
        send(source[:10], target[-10:])
        assert (target[-10:].to_numpy() == data[:10]).all(), kind

    def refused(*ends):
        try:
            send(*ends)
        except BufferError as error:
            return str(error)
        raise AssertionError("taken")

    pinned = cumem.array(data, kind="pinned")
    assert "contiguous" in refused(pinned[::2], pinned[:500])
    constant = cumem.asbuffer(b"abcd")
    assert "writ" in refused(constant, constant)
    # This function of mpi4py pickles the buffer.
    back = world.sendrecv(pinned, dest=0, source=0)
    assert isinstance(back, cumem.PinnedBuffer) and (back.numpy() == data).all()
    names = {"cumem": cumem, "np": np, "pinned": cumem.full(1024, 7, "f4", "pinned")}
    # The argument is the example of docs/interop.md.
    exec(sys.argv[1], names)
    names.clear()
    print("sent", *kinds)
    """
)


def test_mpi_sends_and_receives_it(runtime) -> None:
    pytest.importorskip("mpi4py")
    (example,) = blocks_of("mpi4py")
    done = programs.run("-c", MPI_PROGRAM, example, CUMEM_BACKEND=runtime.name)
    if done.returncode == 77:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("sent pinned mapped managed")


# -- the page ------------------------------------------------------------------------------

#: Each heading of docs/interop.md has the modules that its examples need, and whether
#: they need a GPU.
SECTIONS = {
    "PyTorch": (("torch",), False),
    "CuPy": (("cupy",), True),
    "JAX": (("jax",), False),
    "Numba": (("numba.cuda",), True),
    "cuda.core": (("cuda.core.utils",), True),
    "TVM FFI": (("tvm_ffi",), False),
    "pyarrow": (("pyarrow",), False),
    "h5py and zarr": (("h5py", "zarr"), False),
    "Pillow and pandas": (("PIL", "pandas"), False),
}


@pytest.mark.parametrize("heading", SECTIONS)
def test_examples_of_the_page_run(runtime, heading, tmp_path, monkeypatch) -> None:
    modules, needs_gpu = SECTIONS[heading]
    if needs_gpu and runtime.emulated:
        pytest.skip("this test needs a GPU")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for module in modules:
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    pinned = cumem.zeros(1024, "f4", "pinned")
    names: dict[str, Any] = {"cumem": cumem, "np": np, "pinned": pinned}
    blocks = blocks_of(heading)
    assert blocks
    for block in blocks:
        exec(compile(block, heading, "exec"), names)
    names.clear()


def test_page_names_tests_that_there_are() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8")
        for path in Path(__file__).parents[1].glob("*/test_*.py")
    )
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 20
    assert {name for name in named if f"def {name}(" not in tests} == set()
