# SPDX-License-Identifier: Apache-2.0
"""Rows by their numbers, copied by several threads of the host.

The tests in other files copy few rows. Here the rows fill several page-locked slots, and a
row at the end of a slot is cut in two.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.pieces import numbers

import cumem

pytestmark = pytest.mark.any_python

PLACES = [
    ("device", "numpy"),
    ("numpy", "device"),
    ("numpy", "numpy"),
    ("pinned", "numpy"),
]


def copy_by(how: str, *ends: Any, **rows: Any) -> cumem.Transfer | None:
    if how == "blocking":
        cumem.copy_rows(*ends, **rows)
        return None
    stream = cumem.Stream() if how == "stream" else None
    handle = cumem.copy_rows_async(*ends, **rows, stream=stream)
    handle.wait()
    return handle


@pytest.mark.parametrize("width", [1, 16, 100, 256, 5000, 300_001])
@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize(("to", "source"), PLACES)
@pytest.mark.parametrize("how", ["blocking", "stream", "background"])
def test_rows_of_several_slots_equal_numpys(
    runtime, how, to, source, scatters, width
) -> None:
    count = min(30_000, (3 << 20) // width)
    data = numbers(2 * count * width).reshape(2 * count, width)
    random = np.random.default_rng(width)
    src_rows = random.integers(-2 * count, 2 * count, count)
    dst_rows = random.permutation(2 * count)[:count] if scatters else None
    expected = np.zeros((2 * count if scatters else count, width), "u1")
    target, read = values.put(expected, to), values.put(data, source)
    copy_by(how, target, read, dst_rows=dst_rows, src_rows=src_rows)
    expected[slice(None) if dst_rows is None else dst_rows] = data[src_rows]
    assert (values.get(target) == expected).all()


@pytest.mark.parametrize("to", ["device", "numpy"])
def test_layers_of_ordinary_memory_share_slots(runtime, to) -> None:
    """Layers end within slots, their rows differ in length, and gaps lie between rows."""
    rows = np.random.default_rng(0).permutation(4000)[:3000]
    whole = [numbers(4000 * w, w).reshape(4000, w) for w in (60, 7, 200)]
    sources = [whole[0], whole[1], whole[2][::-1, :130]]
    targets = [values.put(np.zeros((4000, s.shape[1]), "u1"), to) for s in sources]
    cumem.copy_rows(targets, sources, dst_rows=rows[::-1], src_rows=rows)
    for target, source in zip(targets, sources, strict=True):
        assert (values.get(target)[rows[::-1]] == source[rows]).all()


@pytest.mark.parametrize(("to", "source"), PLACES)
def test_slice_by_numbers_is_copied(runtime, to, source) -> None:
    """Numbers that rise by one name a slice, so they are not looked up one by one."""
    data = numbers(3000 * 40).reshape(3000, 40)
    expected = np.zeros((3000, 40), "u1")
    order = np.random.default_rng(0).permutation(3000)[:2000]
    for dst_rows, src_rows in [
        (np.arange(700, 2700), order),
        (order, np.arange(9, 2009)),
    ]:
        target = values.put(np.zeros_like(data), to)
        cumem.copy_rows(target, values.put(data, source), dst_rows, src_rows)
        expected[:] = 0
        expected[dst_rows] = data[src_rows]
        assert (values.get(target) == expected).all()


@pytest.mark.parametrize("width", [24, 9000])
def test_rows_of_a_mapped_file_go_to_a_device_and_back(
    runtime, tmp_path, width
) -> None:
    data = numbers(2000 * width).reshape(2000, width)
    np.save(tmp_path / "rows.npy", data)
    np.save(tmp_path / "out.npy", np.zeros_like(data))
    source = np.load(tmp_path / "rows.npy", mmap_mode="r")
    target = np.load(tmp_path / "out.npy", mmap_mode="r+")
    rows = np.random.default_rng(1).permutation(2000)
    device = cumem.take_rows(source, rows)
    cumem.copy_rows(target, device, dst_rows=rows)
    target.flush()
    assert (values.get(device) == data[rows]).all()
    assert (np.load(tmp_path / "out.npy") == data).all()


@pytest.mark.parametrize("width", [64, 2 << 20])
def test_file_that_was_cut_short_is_an_error(emulated, tmp_path: Path, width) -> None:
    """Rows past the file's end have no memory, and touching them would end the process."""
    path = tmp_path / "rows"
    count = 3 * mmap.PAGESIZE // width + 6
    path.write_bytes(bytes(count * width))
    source = np.memmap(path, "u1", "r", shape=(count, width))
    device = cumem.empty_device((count, width), "u1")
    with path.open("r+b") as file:
        file.truncate(width)
    with pytest.raises(OSError, match="cut short"):
        cumem.copy_rows(device, source, src_rows=np.arange(count)[::-1])


def test_rows_before_the_end_of_a_shortened_file_are_read(
    emulated, tmp_path: Path
) -> None:
    """Pages near the rows are brought into memory with them. The file has lost some of
    these pages, which must do no harm.
    """
    path = tmp_path / "rows"
    data = numbers(4 * mmap.PAGESIZE).reshape(-1, 64)
    path.write_bytes(data.tobytes())
    source = np.memmap(path, "u1", "r", shape=data.shape)
    rows = np.random.default_rng(0).permutation(mmap.PAGESIZE // 64)
    with path.open("r+b") as file:
        file.truncate(mmap.PAGESIZE)
    assert (values.get(cumem.take_rows(source, rows)) == data[rows]).all()


def test_progress_of_rows_grows_slot_by_slot(emulated) -> None:
    data = numbers(60_000 * 100).reshape(60_000, 100)
    rows = np.random.default_rng(0).integers(0, 60_000, 60_000)
    seen: list[tuple[int, int]] = []
    cumem.copy_rows(
        cumem.empty_device(data.shape, "u1"),
        data,
        src_rows=rows,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (data.nbytes, data.nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_rows_that_wait_can_be_cancelled_before_they_are_read(emulated) -> None:
    data = numbers(4000 * 64).reshape(4000, 64)
    rows = np.random.default_rng(0).permutation(4000)
    device, stream = cumem.zeros(data.shape, "u1", "device"), cumem.Stream()
    with session.gate(stream):
        device.fill(7, stream=stream)
        handle = cumem.copy_rows_async(device, data, src_rows=rows)
        assert handle.cancel()
    with pytest.raises(cumem.CancelledError):
        handle.wait()
    assert (values.get(device) == 7).all()


def test_numbers_and_source_are_read_before_the_call_on_a_stream_returns(
    emulated,
) -> None:
    """The host does its half of the copy within the call, so the numbers and the source may
    change afterwards.
    """
    data = numbers(4000 * 64).reshape(4000, 64)
    rows = np.random.default_rng(0).permutation(4000)
    expected = data[rows]
    device, stream = cumem.empty_device(data.shape, "u1"), cumem.Stream()
    cumem.copy_rows_async(device, data, src_rows=rows, stream=stream)
    data[:] = 0
    rows[:] = 0
    stream.synchronize()
    assert (values.get(device) == expected).all()


#: The length of a table that is longer than the memory whose addresses a device remembers.
LONG_NBYTES = (768 << 20) + (1 << 22)


@pytest.fixture(scope="module")
def long_table() -> np.ndarray:
    """A table whose pages exist only where something was written."""
    return np.empty(LONG_NBYTES, "u1")


def routes_of(rows: Any, target: Any, source: Any, **more: Any) -> str | None:
    handle = cumem.copy_rows_async(target, source, src_rows=rows, **more)
    handle.wait()
    return handle.route


class TestLongPageLockedTable:
    """A kernel reads short rows of a long table slowly, so threads gather them."""

    @pytest.fixture(autouse=True)
    def enough_threads(self, runtime) -> Iterator[None]:
        with cumem.configure(threads=6):
            yield

    WIDTH, COUNT = 256, 20_000

    def rows(self, table: np.ndarray) -> np.ndarray:
        """Return rows at both ends of the table, where it is filled with numbers."""
        last = len(table) - 1
        near = np.random.default_rng(0).permutation(self.COUNT)
        rows = np.where(near % 2, near, last - near)
        table[rows] = numbers(self.COUNT * self.WIDTH).reshape(self.COUNT, self.WIDTH)
        return rows

    def test_threads_gather_short_rows(self, runtime, long_table) -> None:
        table = long_table[: LONG_NBYTES // self.WIDTH * self.WIDTH]
        table = table.reshape(-1, self.WIDTH)
        rows = self.rows(table)
        target = cumem.zeros((self.COUNT, self.WIDTH), "u1")
        with cumem.register(long_table) as locked:
            source = locked[: table.size].reshape(table.shape)
            assert routes_of(rows, target, source) == "staged-table"
            assert (values.get(target) == table[rows]).all()
            target.fill(0)
            cumem.copy_rows(target, source, src_rows=rows - len(table))
            assert (values.get(target) == table[rows]).all()

    @pytest.mark.parametrize(
        "why", ["stream", "max_sms", "long rows", "few", "short", "few threads"]
    )
    def test_a_kernel_reads_the_others(self, runtime, long_table, why) -> None:
        width = 516 if why == "long rows" else self.WIDTH
        table = long_table[: LONG_NBYTES // width * width].reshape(-1, width)
        rows = np.arange(self.COUNT)[::-1] * 3
        rows = rows[:100] if why == "few" else rows
        table[rows] = numbers(len(rows) * width).reshape(len(rows), width)
        target = cumem.zeros((len(rows), width), "u1")
        more: dict[str, Any] = {}
        if why == "stream":
            more["stream"] = cumem.Stream()
        if why == "max_sms":
            more["max_sms"] = 4
        if why == "few threads":
            cumem.configure(threads=5)
        with cumem.register(long_table) as locked:
            length = (768 << 20) // width if why == "short" else len(table)
            source = locked[: length * width].reshape(length, width)
            assert routes_of(rows, target, source, **more) == "rows"
            assert (values.get(target) == table[rows]).all()

    def test_threads_come_after_what_writes_the_table(
        self, emulated, long_table
    ) -> None:
        table = long_table[: LONG_NBYTES // self.WIDTH * self.WIDTH]
        table = table.reshape(-1, self.WIDTH)
        rows = self.rows(table)
        target = cumem.zeros((self.COUNT, self.WIDTH), "u1")
        new = cumem.full((10, self.WIDTH), 77, "u1", "device")
        late = cumem.Stream()
        with cumem.register(long_table) as locked:
            source = locked[: table.size].reshape(table.shape)
            first = int(rows[0])
            with session.gate(late):
                cumem.copy_async(source[first : first + 1], new[:1], stream=late)
                handle = cumem.copy_rows_async(target, source, src_rows=rows)
                assert not handle.done
            handle.wait()
            assert handle.route == "staged-table"
            assert (values.get(target)[0] == 77).all()
            assert (values.get(target)[1:] == table[rows[1:]]).all()

    def test_write_combined_memory_is_not_read_by_the_host(self, emulated) -> None:
        source = cumem.empty_pinned(LONG_NBYTES, "u1", write_combined=True)
        source = source[: LONG_NBYTES // 256 * 256].reshape(-1, 256)
        target = cumem.zeros((self.COUNT, 256), "u1")
        assert routes_of(np.arange(self.COUNT)[::-1], target, source) == "rows"
