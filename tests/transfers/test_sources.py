# SPDX-License-Identifier: Apache-2.0
"""Sources that can be cut into chunks, and sources that write to the same memory again.

Arrays of other libraries are read by a thread of cumem, row by row. A generator may
fill one array again and again, so cumem must have read an item before it asks for the
next.
"""

from __future__ import annotations

import contextvars
import ctypes
import itertools
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import programs, session

import cumem

ROWS, WIDTH = 100, 60
ROW = WIDTH * 4


def numbers() -> np.ndarray:
    return np.arange(ROWS * WIDTH, dtype="f4").reshape(ROWS, WIDTH)


class Lazy:
    """An array like those of other libraries, which reads only the rows that are asked
    for.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self.asked: list[slice] = []

    def __getitem__(self, part: slice) -> Any:
        self.asked.append(part)
        return self.array[part].copy()


class Refilling(Lazy):
    """An array that returns the same memory again and again."""

    held: Any = None

    def __getitem__(self, part: slice) -> Any:
        rows = super().__getitem__(part)
        if self.held is None or len(self.held) < len(rows):
            self.held = np.empty_like(rows)
        self.held[: len(rows)] = rows
        return self.held[: len(rows)]


# Each of these functions returns an array of another library with the same elements.


def h5py_dataset(array: np.ndarray, folder: Path) -> Any:
    h5py = pytest.importorskip("h5py")
    return h5py.File(folder / "a.h5", "w").create_dataset("x", data=array)


def xarray_array(array: np.ndarray, folder: Path) -> Any:
    return pytest.importorskip("xarray").DataArray(array, dims=("row", "column"))


def dask_array(array: np.ndarray, folder: Path) -> Any:
    return pytest.importorskip("dask.array").from_array(array, chunks=(7, 60))


def zarr_array(array: np.ndarray, folder: Path) -> Any:
    zarr = pytest.importorskip("zarr")
    made = zarr.open(str(folder / "a.zarr"), mode="w", shape=array.shape, dtype="f4")
    made[:] = array
    return made


def netcdf_variable(array: np.ndarray, folder: Path) -> Any:
    file = pytest.importorskip("netCDF4").Dataset(folder / "a.nc", "w")
    for name, length in zip("rc", array.shape, strict=True):
        file.createDimension(name, length)
    variable = file.createVariable("x", "f4", ("r", "c"))
    variable[:] = array
    return variable


def pandas_table(array: np.ndarray, folder: Path) -> Any:
    return pytest.importorskip("pandas").DataFrame(array)


def tables_array(array: np.ndarray, folder: Path) -> Any:
    file = pytest.importorskip("tables").open_file(folder / "a.h5", "w")
    return file.create_carray("/", "x", obj=array)


def tensorstore_array(array: np.ndarray, folder: Path) -> Any:
    store = {"driver": "file", "path": str(folder / "store")}
    metadata = {"dtype": "<f4", "shape": list(array.shape), "chunks": [9, WIDTH]}
    spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "create": True}
    made = pytest.importorskip("tensorstore").open(spec).result()
    made[...] = array
    return made


def blosc2_array(array: np.ndarray, folder: Path) -> Any:
    return pytest.importorskip("blosc2").asarray(array)


def awkward_array(array: np.ndarray, folder: Path) -> Any:
    return pytest.importorskip("awkward").Array(array)


def polars_table(array: np.ndarray, folder: Path) -> Any:
    return pytest.importorskip("polars").DataFrame(array)


def arrow_table(array: np.ndarray, folder: Path) -> Any:
    columns = {str(i): column for i, column in enumerate(array.T)}
    return pytest.importorskip("pyarrow").table(columns)


class Whole:
    """An object that becomes an array, but iterates over something else, as tables do."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.array.T)


LAZY = {
    "own": lambda array, _: Lazy(array),
    "whole": lambda array, _: Whole(array),
    "PyTables": tables_array,
    "tensorstore": tensorstore_array,
    "blosc2": blosc2_array,
    "awkward": awkward_array,
    "polars": polars_table,
    "pyarrow": arrow_table,
    "refilling": lambda array, _: Refilling(array),
    "h5py": h5py_dataset,
    "xarray": xarray_array,
    "dask": dask_array,
    "zarr": zarr_array,
    "netCDF4": netcdf_variable,
    "pandas": pandas_table,
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("size", [{"nbytes": 10 * ROW}, {"rows": 10}])
def test_array_that_reads_what_is_asked_for_is_cut_into_rows(
    runtime, tmp_path: Path, name: str, size: dict[str, int]
) -> None:
    array = numbers()
    source = LAZY[name](array, tmp_path)
    found = list(cumem.chunks(source, **size))
    assert [part for part, _ in found] == [slice(i, i + 10) for i in range(0, 100, 10)]
    assert np.array_equal(np.concatenate([c.to_numpy() for _, c in found]), array)
    means = np.full(ROWS, np.nan)
    cumem.pipeline(
        lambda x, y, _: cumem.copy(y, x[:, 0]), source, means.astype("f4"), **size
    )
    for part, chunk in cumem.chunks(source, **size):
        means[part] = chunk.to_numpy().mean(axis=1)
    assert np.array_equal(means, array.mean(axis=1))
    shapes = cumem.pipeline(lambda x, y, _: x.shape, source, **size)
    assert shapes == [(10, WIDTH)] * 10
    half = [c.dtype for _, c in cumem.chunks(source, rows=50, dtype="f8")]
    assert half == [np.dtype("f8")] * 2


def test_reader_thread_is_one_chunk_ahead_and_ends_with_the_loop(emulated) -> None:
    """Reading goes on while a copy is under way, but not further than one chunk ahead."""
    source = Lazy(numbers())
    found = cumem.chunks(source, rows=10, depth=1)
    next(found)
    # Two copies have begun, and two chunks wait.
    session.wait_until(lambda: len(source.asked) == 4)
    reader = [t for t in threading.enumerate() if t.name.startswith("cumem-reader")]
    assert len(reader) == 1
    found.close()
    assert not reader[0].is_alive()
    assert len(source.asked) == 4
    for _ in cumem.chunks(source, rows=10):
        pass
    assert not [t for t in threading.enumerate() if t.name.startswith("cumem-reader")]


def test_reader_thread_reads_while_a_copy_waits(emulated) -> None:
    """A read must not wait for a copy that does not end."""
    read = threading.Event()

    class Second(Lazy):
        def __getitem__(self, part: slice) -> Any:
            if part.start == 30:
                read.set()
            return super().__getitem__(part)

    stream = cumem.Stream()
    with stream:
        found = cumem.chunks(Second(numbers()), rows=10, depth=1)
        session.shut(stream)
        next(found)
        session.wait_until(read.is_set)
        session.testing.gate_open(stream)
        found.close()


def test_reader_thread_has_the_callers_context_and_device(emulated) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("mine")
    seen: list[tuple[str, int]] = []

    class Asking(Lazy):
        def __getitem__(self, part: slice) -> Any:
            seen.append((variable.get("none"), cumem.current_device().index))
            return super().__getitem__(part)

    with cumem.Device(1):
        for _, chunk in cumem.chunks(Asking(numbers()), rows=50):
            assert chunk.device == 1
    assert set(seen) == {("mine", 1)}


def test_failed_read_comes_after_the_chunks_before_it(runtime) -> None:
    class Failing(Lazy):
        def __getitem__(self, part: slice) -> Any:
            if part.start >= 30:
                raise OSError("the disk is gone")
            return super().__getitem__(part)

    found = cumem.chunks(Failing(numbers()), rows=10, depth=5)
    assert [part.start for part, _ in itertools.islice(found, 3)] == [0, 10, 20]
    with pytest.raises(OSError, match="the disk is gone") as raised:
        next(found)
    assert raised.value.__notes__ == ["in chunk 3"]
    assert list(found) == []


#: This program ends or forks while a thread reads the next chunks.
LEFT = """
import numpy as np, os, sys
import cumem

class Lazy:
    shape, dtype = (100, 60), np.dtype("f4")
    def __getitem__(self, part):
        return np.ones((part.stop - part.start, 60), "f4")

found = cumem.chunks(Lazy(), rows=10)
next(found)
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        try:
            next(found)
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(found)) == 9
"""


@pytest.mark.parametrize("how", ["exit", "fork"])
def test_reader_thread_hinders_neither_exit_nor_fork(emulated, how: str) -> None:
    made = programs.run("-W", "ignore", "-c", LEFT, how, CUMEM_BACKEND="emulated")
    assert (made.returncode, made.stderr) == (0, "")


def sparse(_: Path) -> Any:
    return pytest.importorskip("scipy.sparse").csr_matrix(np.eye(4))


def text_table(_: Path) -> Any:
    return pytest.importorskip("pandas").DataFrame({"a": [1.0], "b": ["x"]})


def object_dataset(folder: Path) -> Any:
    """Return a dataset of texts, which are Python objects to NumPy."""
    h5py = pytest.importorskip("h5py")
    file = h5py.File(folder / "a.h5", "w")
    return file.create_dataset("x", data=["a", "bcd"], dtype=h5py.string_dtype())


def group(folder: Path) -> Any:
    return pytest.importorskip("h5py").File(folder / "a.h5", "w")


class Told(Lazy):
    """An array whose rows differ from the shape and dtype that it names."""

    def __init__(self, shape: Any, given: Any, dtype: Any = "f4") -> None:
        super().__init__(np.zeros((4, 2), dtype))
        self.shape = shape
        self.given = given

    def __getitem__(self, part: slice) -> Any:
        return self.given


class Ragged(Whole):
    """A table whose rows have several lengths."""

    def __init__(self) -> None:
        super().__init__(np.zeros((2, 2)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise ValueError("lengths differ")


MASKED = np.ma.array(np.zeros((4, 2), "f4"), mask=np.eye(4, 2))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (sparse, TypeError, "dense form"),
        (text_table, TypeError, r"give \.to_numpy\(dtype\)"),
        (object_dataset, TypeError, "Python objects"),
        (group, TypeError, "give one of its values"),
        (lambda _: {1, 2}, TypeError, "must have an order"),
        (lambda _: Lazy(np.array(3.0)), ValueError, "no axis to cut"),
        (lambda _: Told((4, 2), np.zeros((3, 2), "f4")), ValueError, r"shape \(3, 2\)"),
        (lambda _: Told((4, 2), np.zeros((4, 2), "f8")), ValueError, "dtype float64"),
        (lambda _: Told((4, 2), MASKED), ValueError, "masked elements"),
        (lambda _: Told((4, 2), {}), TypeError, "gives dict"),
        (lambda _: Told((float("nan"), 2), None), ValueError, "compute_chunk_sizes"),
        (lambda _: MASKED, ValueError, "masked elements"),
        (lambda _: Whole(MASKED), ValueError, "masked elements"),
        (lambda _: Whole(np.array([1, "a"], object)), TypeError, "Python objects"),
        (lambda _: Ragged(), ValueError, "lengths differ.*give iter"),
        (lambda _: [([1.0], [1.0, 2.0])], ValueError, "gave a tuple of which NumPy"),
        (lambda _: [MASKED], ValueError, "masked elements"),
        (lambda _: [[np.ones(2), np.ones(2)]], TypeError, "cumem.prefetch"),
        (lambda _: [{"a": np.ones(2)}], TypeError, "must give arrays, not dict"),
    ],
)
def test_source_that_cannot_be_cut_says_what_to_give(
    emulated, tmp_path: Path, make: Any, error: type[Exception], text: str
) -> None:
    source = make(tmp_path)
    for call in (
        lambda: list(cumem.chunks(source)),
        lambda: cumem.pipeline(lambda *_: None, source),
    ):
        with pytest.raises(error, match=text):
            call()


# -- files -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_file_gives_its_array_without_the_header(
    runtime, tmp_path: Path, order: Any
) -> None:
    array = np.asarray(numbers(), order=order)
    path = tmp_path / "x.npy"
    np.save(path, array)
    named = tmp_path / "other.dat"
    named.write_bytes(path.read_bytes())
    for source in (path, str(path), named):
        found = list(cumem.chunks(source, rows=30))
        assert [len(c) for _, c in found] == [30, 30, 30, 10]
        assert np.array_equal(np.concatenate([c.to_numpy() for _, c in found]), array)
    with path.open("rb") as file:
        assert cumem.pipeline(lambda x, y, _: x.dtype, file) == [np.dtype("f4")]
    np.save(path, np.zeros((0, 3)))
    assert list(cumem.chunks(path)) == []


def test_npy_file_that_holds_objects_or_ends_early_is_refused(
    emulated, tmp_path: Path
) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.array([None]), allow_pickle=True)
    with pytest.raises(ValueError, match="object arrays are refused"):
        cumem.chunks(path)
    np.save(path, numbers())
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(EOFError, match="ends early"):
        cumem.chunks(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.npz", r"cumem\.load\(\)"),
        ("x.safetensors", r"read_safetensors_header\(path\)\.memmap"),
        ("x.h5", r"h5py\.File"),
        ("x.nc", "xarray"),
        ("x.PARQUET", "pyarrow"),
    ],
)
def test_file_with_a_format_of_its_own_is_refused_by_name(
    emulated, tmp_path: Path, name: str, text: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b"PK\x03\x04 whatever")
    with pytest.raises(ValueError, match=text):
        cumem.chunks(path)
    with path.open("rb") as file, pytest.raises(ValueError, match=text):
        cumem.chunks(file)
    assert len(list(cumem.chunks(np.memmap(path, "u1", "r")))) == 1


def test_dtype_of_a_file_without_a_header_is_that_of_its_elements(
    runtime, tmp_path: Path
) -> None:
    path = tmp_path / "x.bin"
    numbers().tofile(path)
    (found,) = cumem.chunks(path, dtype="f4")
    assert np.array_equal(found[1].to_numpy(), numbers().reshape(-1))
    path.write_bytes(b"12345")
    with pytest.raises(ValueError, match="5 bytes, which is not a whole number"):
        cumem.chunks(path, dtype="f4")


# -- sizes -----------------------------------------------------------------------------


def test_nbytes_and_rows_mean_the_same_in_both_calls(runtime) -> None:
    array = numbers()
    for size, rows in (
        ({"nbytes": 10 * ROW}, 10),
        ({"nbytes": f"{10 * ROW}"}, 10),
        ({"nbytes": "2 KiB"}, 8),
        ({"rows": 3}, 3),
        ({"rows": 1000}, ROWS),
    ):
        assert len(next(cumem.chunks(array, **size))[1]) == rows
        assert cumem.pipeline(lambda x, *_: len(x), array, **size)[0] == rows
    for call in (
        lambda **size: cumem.chunks(array, **size),
        lambda **size: cumem.pipeline(print, array, **size),
    ):
        with pytest.raises(ValueError, match="either nbytes= or rows=, not both"):
            call(nbytes=10, rows=10)
        with pytest.raises(ValueError, match="rows must be at least 1, not 0"):
            call(rows=0)
        with pytest.raises(TypeError, match="rows must be an int, not str"):
            call(rows="10")


def test_items_of_an_iterable_are_cut_where_a_size_is_given(runtime) -> None:
    array = numbers()
    for source in (np.split(array, 4), (each for each in np.split(array, 4))):
        found = list(cumem.chunks(source, rows=10))
        assert [len(chunk) for _, chunk in found] == [10, 10, 5] * 4
        assert found[3][0] == slice(25, 35)
        assert np.array_equal(np.concatenate([c.to_numpy() for _, c in found]), array)
    lengths = [len(c) for _, c in cumem.chunks(np.split(array, 2), 20 * ROW)]
    assert lengths == [20, 20, 10] * 2
    assert [len(c) for _, c in cumem.chunks(np.split(array, 2))] == [50, 50]


@pytest.mark.parametrize(
    "shape", [(2**40, 0), (2**40, 3, 0), (5, 0), (0,), (0, 4), (0, 0)]
)
def test_rows_without_bytes_come_at_once(runtime, shape: tuple[int, ...]) -> None:
    source = np.empty(shape, "f4")
    for size in ({}, {"nbytes": 1}, {"nbytes": "64 MiB"}):
        found = [chunk.shape for _, chunk in cumem.chunks(source, **size)]
        assert found == ([shape] if shape[0] else [])
        assert cumem.pipeline(lambda x, *_: x.shape, source, **size) == found
    assert [c.shape for _, c in cumem.chunks(iter([source]), 1)] == [shape]


# -- memory that is written again ------------------------------------------------------


def refilled(memory: np.ndarray, count: int = 20) -> Iterator[np.ndarray]:
    """Yield the same array again and again, filled with the number of the item."""
    for i in range(count):
        memory[...] = i
        yield memory


MEMORY = {
    "short": lambda: np.empty(1 << 10, "f4"),
    "long": lambda: np.empty(1 << 20, "f4"),
    "pinned": lambda: cumem.empty_pinned(1 << 20, "f4").numpy(),
    "managed": lambda: cumem.empty_managed(1 << 18, "f4").numpy(),
    "strided": lambda: np.empty((1 << 10, 2), "f4")[:, 0],
}


@pytest.mark.parametrize("name", MEMORY)
def test_generator_that_refills_one_array_gives_what_it_wrote(runtime, name) -> None:
    make = MEMORY[name]
    wanted = list(range(20))
    for depth in (1, 4):
        found = [
            int(c.to_numpy()[-1])
            for _, c in cumem.chunks(refilled(make()), depth=depth)
        ]
        assert found == wanted
        found = [
            int(b.to_numpy()[-1]) for b in cumem.prefetch(refilled(make()), depth=depth)
        ]
        assert found == wanted
        batches = cumem.prefetch(
            ({"x": [a], "y": a[:5]} for a in refilled(make())), depth=depth
        )
        found = [int(b["x"][0].to_numpy()[-1] + b["y"].to_numpy()[0]) for b in batches]
        assert found == [2 * i for i in wanted]
    found = cumem.pipeline(lambda x, *_: int(x.to_numpy()[-1]), refilled(make()))
    assert found == wanted
    size = make().size
    # Each cut takes rows of a single array.
    cut = cumem.chunks(refilled(make()), rows=size // 3 + 1)
    assert [(p.start // size, int(c.to_numpy()[0])) for p, c in cut] == [
        (i, i) for i in wanted for _ in range(3)
    ]


# Each of these functions yields items whose memory it writes again for the next one.


def over(memory: Any) -> Iterator[np.ndarray]:
    """Yield a new array over the same memory for each item."""
    for i in range(COUNT):
        np.frombuffer(memory, "f4")[:] = i
        yield np.frombuffer(memory, "f4")


def readonly_views(_: Path) -> Iterator[np.ndarray]:
    array = np.empty(LENGTH, "f4")
    for i in range(COUNT):
        array[:] = i
        view = array[:]
        view.flags.writeable = False
        yield view
        del view


def file_read_again(folder: Path) -> Iterator[np.ndarray]:
    np.repeat(np.arange(COUNT, dtype="f4"), LENGTH).tofile(folder / "x")
    array = np.empty(LENGTH, "f4")
    with (folder / "x").open("rb", buffering=0) as file:
        while file.readinto(array):
            yield array


def map_that_another_writes(folder: Path) -> Iterator[np.ndarray]:
    np.zeros(LENGTH, "f4").tofile(folder / "x")
    written = np.memmap(folder / "x", "f4", "r+")
    read = np.memmap(folder / "x", "f4", "r")
    for i in range(COUNT):
        written[:] = i
        yield read


def tensors_over_an_array(_: Path) -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    array = np.empty(LENGTH, "f4")
    for i in range(COUNT):
        array[:] = i
        yield torch.from_numpy(array)


def arrays_over_a_tensor(_: Path) -> Iterator[Any]:
    tensor = pytest.importorskip("torch").empty(LENGTH)
    for i in range(COUNT):
        tensor.fill_(i)
        yield tensor.numpy()


def registered(_: Path) -> Iterator[Any]:
    array = np.empty(LENGTH, "f4")
    with cumem.register(array) as held:
        for i in range(COUNT):
            array[:] = i
            yield held


def two_in_turn(_: Path) -> Iterator[np.ndarray]:
    arrays = np.empty(LENGTH, "f4"), np.empty(LENGTH, "f4")
    for i in range(COUNT):
        arrays[i % 2][:] = i
        yield arrays[i % 2]


COUNT, LENGTH = 12, 1 << 18
BEHIND: dict[str, Any] = {
    "bytearray": lambda _: over(bytearray(4 * LENGTH)),
    "mmap": lambda _: over(mmap.mmap(-1, 4 * LENGTH)),
    "ctypes": lambda _: over((ctypes.c_float * LENGTH)()),
    **{
        each.__name__: each
        for each in (
            readonly_views,
            file_read_again,
            map_that_another_writes,
            tensors_over_an_array,
            arrays_over_a_tensor,
            registered,
            two_in_turn,
        )
    },
}


@pytest.mark.parametrize("name", BEHIND)
def test_memory_written_behind_an_item_gives_what_it_held(
    runtime, tmp_path: Path, name: str
) -> None:
    """The memory belongs to another object than the item, so the item does not show that
    others write to that memory.
    """

    def last(item: Any) -> float:
        return float((item if hasattr(item, "numel") else item.to_numpy())[-1])

    def source() -> Iterator[Any]:
        return BEHIND[name](tmp_path)

    wanted = [float(i) for i in range(COUNT)]
    assert [last(batch) for batch in cumem.prefetch(source(), depth=3)] == wanted
    assert [last(chunk) for _, chunk in cumem.chunks(source(), depth=3)] == wanted
    assert cumem.pipeline(lambda x, *_: last(x), source()) == wanted


class Waiting:
    """An iterator that counts how often it was asked, and returns the same memory or a
    copy of it.
    """

    def __init__(self, held: cumem.Buffer, shared: bool) -> None:
        self.memory = held.numpy()
        self.shared = shared
        self.count = 0

    def __iter__(self) -> Waiting:
        return self

    def __next__(self) -> np.ndarray:
        self.count += 1
        if self.count > 3:
            raise StopIteration
        return self.memory if self.shared else self.memory.copy()


@pytest.mark.parametrize(
    ("fresh", "shared", "asked"),
    [(None, True, 1), (None, False, 3), (True, True, 4), (False, False, 1)],
)
def test_next_item_is_asked_for_once_the_last_was_read(
    emulated, fresh: bool | None, shared: bool, asked: int
) -> None:
    """A copy is held up by the stream that writes to its source."""
    held = cumem.full(1 << 16, 1, "f4", "pinned")
    source = Waiting(held, shared)
    stream = cumem.Stream()
    session.shut(stream)
    if shared:
        cumem.copy_async(held, cumem.full(1 << 16, 7, "f4"), stream=stream)
    blocked: list[Any] = []

    def read() -> None:
        blocked.extend(cumem.prefetch(source, depth=2, fresh=fresh))

    # Nothing holds up copies of these items, so it is enough that all of them come.
    if not shared:
        session.testing.gate_open(stream)
    thread = threading.Thread(target=read)
    thread.start()
    if shared:
        session.wait_until_waiting(thread)
        assert source.count == asked
        session.testing.gate_open(stream)
    thread.join()
    assert len(blocked) == 3
    assert source.count == 4


def test_array_that_nobody_else_has_is_not_waited_for() -> None:
    from cumem.transfers.sources import is_alone

    array = np.arange(6.0)
    assert is_alone([np.arange(6.0)])
    assert is_alone([np.arange(6.0).reshape(2, 3)])
    assert is_alone([np.frombuffer(b"12345678", "f8")])
    assert not is_alone([array])
    assert not is_alone([array[:3]])
    assert not is_alone([array[:3].reshape(3, 1)])
    assert not is_alone([np.frombuffer(bytearray(8), "f8")])
    assert not is_alone([memoryview(b"1")])
    view = memoryview(np.arange(3.0))
    assert not is_alone([np.asarray(view)])
