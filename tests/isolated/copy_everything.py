# SPDX-License-Identifier: Apache-2.0
"""Copy between all kinds of memory, give everything back, and reset the device.

    compute-sanitizer --leak-check full python copy_everything.py [--plant-leak]

NVIDIA's compute-sanitizer then reports what was not given back. With --plant-leak the
program takes 4096 bytes without cumem and keeps them. The tool must report them, or else
its silence about cumem shows nothing.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys

import numpy as np

import cumem

KINDS = ["pinned", "mapped", "managed", "device"]


def plant_leak() -> None:
    """Take 4096 bytes of device 0, in the primary context, which is cumem's context too."""
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    address = ctypes.c_uint64()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4096)) == 0
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0


def copy_rows(data: np.ndarray) -> None:
    """Copy rows by numbers, of which some are wrong, on the host and on the device.

    The kernel must leave wrong numbers out. If it read or wrote such a row, the sanitizer
    would report that.
    """
    count = len(data)
    random = np.random.default_rng(1)
    dst_rows = random.permutation(count)[: count // 2]
    src_rows = random.integers(-count, count, count // 2)
    on_device = [cumem.array(rows, kind="device") for rows in (dst_rows, src_rows)]
    far = np.where(src_rows < 0, -(1 << 40), 1 << 40)
    outside = cumem.array(far, kind="device")
    for to, source in itertools.product([*KINDS, None], repeat=2):
        for width in (1, 16, 37, 130):
            wanted = np.zeros((count, width), "u1")
            wanted[dst_rows] = data[src_rows, :width]
            a = cumem.array(data, kind=source) if source else data
            for numbers in ((dst_rows, src_rows), on_device):
                b = cumem.zeros(wanted.shape, "u1", to) if to else np.zeros_like(wanted)
                cumem.copy_rows(b, a[:, :width], *numbers)
                assert (cumem.asnumpy(b) == wanted).all(), (to, source, width)
            try:
                cumem.copy_rows(b, a[:, :width], on_device[0], outside)
            except IndexError:
                assert (cumem.asnumpy(b) == wanted).all(), (to, source, width)
            else:
                raise AssertionError("numbers that name no row were not seen")
        if source == to:
            rows = cumem.array(data, kind=source) if source else data.copy()
            cumem.copy_rows(rows, rows, *on_device)
            wanted = data.copy()
            wanted[dst_rows] = data[src_rows]
            assert (cumem.asnumpy(rows) == wanted).all(), (to, source)


def main() -> None:
    """Copy between all kinds, whole and strided, and use all other sorts of memory."""
    data = np.random.default_rng(0).integers(0, 256, (96, 130), dtype="u1")
    for to, source in itertools.product([*KINDS, None], repeat=2):
        a = cumem.array(data, kind=source) if source else data
        b = cumem.zeros(data.shape, "u1", to) if to else np.zeros_like(data)
        for cut in (np.s_[:, :], np.s_[::2, ::-3], np.s_[:, 5:40], np.s_[3]):
            cumem.copy(b[cut], a[cut])
            out = np.zeros_like(data)
            cumem.copy(out, b)
            assert (out[cut] == data[cut]).all(), (to, source, cut)
    copy_rows(data)
    stream = cumem.Stream()
    device = cumem.empty_device(1_000_000, "u1")
    out = np.zeros(1_000_000, "u1")
    for dtype in ("u1", "u2", "u4", "f8", "c16"):
        device.view(dtype).fill(1, stream=stream)
    handle = cumem.copy_async(out, device, stream=stream)
    handle.wait()
    cumem.copy_async(device, out).wait()
    with cumem.register(out) as pinned:
        cumem.copy(device, pinned)
    managed = cumem.zeros(1 << 20, "u1", "managed")
    managed.prefetch_pages(0)
    managed.prefetch_pages("host")
    managed.advise(read_mostly=True, preferred_location="cpu", accessed_by=[0])
    managed.page_residency()
    for _, tile in cumem.tiles(managed, 1 << 18):
        tile.fill(1)
    cumem.prefetch_pages([managed[:4096], managed[4096:]], 0, stream)
    if cumem.info.about().driver_version >= (13, 0):
        managed.discard(stream)
    cumem.Event().record(stream).synchronize()
    if "--plant-leak" in sys.argv:
        plant_leak()
    del a, b, device, pinned, managed, tile, handle, stream
    gc.collect()
    cumem.shutdown(reset_devices=True)
    print("copied everything")


if __name__ == "__main__":
    main()
