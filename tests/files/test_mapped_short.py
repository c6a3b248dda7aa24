# SPDX-License-Identifier: Apache-2.0
"""Mapped pages that a file has lost raise an OSError and do not end the process.

Each case runs in a separate process, which a signal would end if the test failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# The C core and the file formats decide what a file holds, so these tests show the same
# under every version of Python.
pytestmark = pytest.mark.any_python

PATH = os.pathsep.join(folder for folder in sys.path if folder)
#: Every case begins with this. Its argument is the path of the file that loses pages.
PRELUDE = """
import ctypes, errno, itertools, mmap, os, sys
import numpy as np
from support import core
import cumem

KIB, MIB = 1 << 10, 1 << 20
PATH = sys.argv[1]
LONG = [3 * MIB, 40 * MIB]
# Only copies to and from a device are this short: between two ends on the host, a short
# copy of memory that came by DLPack is not protected.
SHORT = [100 * KIB, 700 * KIB]
SIZES = [(n, place) for place in ("pinned", "mapped", "managed", "numpy") for n in LONG]
SIZES += [(n, "device") for n in SHORT + LONG]


class Exporter:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


VIEWS = {
    "array": lambda array: array,
    "asbuffer": cumem.asbuffer,
    "memoryview": memoryview,
    "DLPack": Exporter,
}


def short(nbytes, present=False):
    with open(PATH, "wb") as file:
        file.truncate(nbytes)
    array = np.memmap(PATH, "u1", "r+")
    if present:
        array[::4096] = 1
    os.truncate(PATH, min(nbytes // 2, 64 * KIB))
    return array


def holed(nbytes, at):
    # Map a whole file, and put two pages of an empty file in the place of those at `at`.
    with open(PATH, "wb") as file:
        file.truncate(nbytes)
    array = np.memmap(PATH, "u1", "r+")
    place = ctypes.CDLL(None, use_errno=True).mmap
    place.restype = ctypes.c_void_p
    place.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    with open(PATH + "-empty", "w+b") as file:
        how = mmap.MAP_SHARED | 0x10  # MAP_FIXED
        begin = array.ctypes.data + at
        assert place(begin, 8 * KIB, 3, how, file.fileno(), 0) == begin
    return array


def blank(place, nbytes):
    if place == "numpy":
        return np.zeros(nbytes, "u1")
    return cumem.empty(nbytes, "u1", place)


def refused(call, *what):
    try:
        done = call()
        for handle in done if isinstance(done, list) else [done]:
            if hasattr(handle, "wait"):
                handle.wait()
    except OSError as error:
        assert error.errno == errno.EFAULT, error
        return
    raise AssertionError(f"nothing was said of {what}")
"""

CASES = {
    f"{call} from {view}": f"""
for (nbytes, place), present in itertools.product(SIZES, (False, True)):
    array, target = short(nbytes, present), blank(place, nbytes)
    source = VIEWS[{view!r}](array)
    refused(lambda: cumem.{call}(target, source), nbytes, place)
"""
    for call in ("copy", "copy_async")
    for view in ("array", "asbuffer", "memoryview", "DLPack")
}
CASES |= {
    f"{call} to {view}": f"""
for (nbytes, place), present in itertools.product(SIZES, (False, True)):
    array, source = short(nbytes, present), blank(place, nbytes)
    target = VIEWS[{view!r}](array)
    refused(lambda: cumem.{call}(target, source), nbytes, place)
"""
    for call in ("copy", "copy_async")
    for view in ("array", "asbuffer", "memoryview")
}
CASES |= {
    "casts over a page in the middle that is gone": """
for nbytes, place in itertools.product([3 * MIB, 40 * MIB], ["device", "pinned", "numpy"]):
    other = blank(place, 4 * nbytes).view("f4")
    refused(
        lambda: cumem.copy(other, holed(nbytes, nbytes // 2), casting="safe"),
        nbytes, place,
    )
    refused(
        lambda: cumem.copy(holed(nbytes, nbytes // 2), other, casting="unsafe"),
        nbytes, place,
    )
"""
}
CASES |= {
    "Buffer.copy": """
for nbytes in LONG:
    buffer = cumem.asbuffer(short(nbytes))
    refused(buffer.copy, nbytes)
""",
    "array and asnumpy": """
for nbytes, kind in SIZES:
    buffer = cumem.asbuffer(short(nbytes))
    if kind == "numpy":
        refused(lambda: cumem.asnumpy(buffer), nbytes)
    else:
        refused(lambda: cumem.array(buffer, kind=kind), nbytes, kind)
""",
    "fill": """
for nbytes in LONG:
    buffer = cumem.asbuffer(short(nbytes))
    refused(lambda: buffer.fill(3), nbytes)
""",
    "copies of strided memory": """
VIEWS = {
    "backwards": lambda a: a[::-1],
    "every third": lambda a: a[::3],
    "columns": lambda a: a.reshape(-1, 1024)[:, :100],
    "turned": lambda a: a.reshape(1024, -1).T,
    "far apart": lambda a: a.reshape(-1, 4096)[:, :16],
}
for nbytes, view, place in itertools.product([3 * MIB, 40 * MIB], VIEWS, PLACES):
    array = cumem.asbuffer(VIEWS[view](short(nbytes)))
    other = blank(place, array.nbytes).reshape(array.shape)
    refused(lambda: cumem.copy(other, array), nbytes, view, place)
    refused(lambda: cumem.copy(array, other), nbytes, view, place)
    if place == "device":
        far = blank(place, nbytes)[: 2 * array.nbytes : 2]
        if far.size == array.size:
            refused(lambda: cumem.copy(far.reshape(array.shape), array))
""".replace("PLACES", '["device", "pinned", "numpy"]'),
    "copies that overlap": """
for nbytes in (3 * MIB, 40 * MIB):
    array = cumem.asbuffer(short(nbytes))
    refused(lambda: cumem.copy(array[1:], array[:-1]), nbytes)
    refused(lambda: cumem.copy(array, array[::-1]), nbytes)
""",
    "copies of many": """
for nbytes, place in itertools.product(LONG, PLACES):
    array = cumem.asbuffer(short(nbytes))
    whole, end = blank(place, nbytes), blank(place, 100 * KIB)
    for call in (cumem.copy_many, cumem.copy_many_async):
        refused(lambda: call([(whole, array), (end, array[-100 * KIB :])]), place)
        refused(lambda: call([(array, whole), (whole[::2], whole[1::2])]), place)
""".replace("PLACES", '["device", "pinned", "numpy"]'),
    "broadcast, scatter and gather": """
for nbytes in (700 * KIB, 40 * MIB):
    array, other = cumem.asbuffer(short(nbytes)), blank("device", nbytes)
    refused(lambda: cumem.broadcast([other], array), nbytes)
    refused(lambda: cumem.scatter([other[: nbytes // 2], other[nbytes // 2 :]], array))
    refused(lambda: cumem.gather(array, [other]), nbytes)
""",
    "files": """
path = PATH + "2"
for nbytes in (700 * KIB, 40 * MIB):
    np.zeros(nbytes, "u1").tofile(path)
    for view in (lambda a: a, lambda a: a[::-1]):
        array = view(short(nbytes))
        refused(lambda: cumem.tofile(path + "3", array), nbytes)
        refused(lambda: cumem.fromfile(path, out=array), nbytes)
""",
    "copies in pieces, cut behind those under way": """
# Pieces are delayed by up to a millisecond, so that progress is reported in between.
os.environ["CUMEM_EMULATED_DELAY_US"] = "1000"
from cumem.transfers import tuning
tuning.change(tuning.CHOSEN, {"chunk_nbytes": 64 * KIB, "slot_count": 2})
nbytes = 40 * MIB
device = cumem.full(nbytes, 1, "u1", kind="device")
for upload in (True, False):
    with open(PATH, "wb") as file:
        file.truncate(nbytes)
    array = np.memmap(PATH, "u1", "r+")
    array[::4096] = 1
    array = cumem.asbuffer(array)
    told = []

    def cut(done, total):
        if not told and done > 0:
            told.append(done)
            os.truncate(PATH, done + 2 * MIB)

    pair = (device, array) if upload else (array, device)
    refused(lambda: cumem.copy(*pair, progress=cut), upload)
    assert told[0] < nbytes - 2 * MIB
""",
    "copies over a page in the middle that is gone": """
nbytes = 40 * MIB
KNOWN = [VIEWS[name] for name in ("array", "asbuffer", "memoryview")]
for place, view in itertools.product(("device", "pinned", "numpy"), KNOWN):
    array, other = view(holed(nbytes, nbytes // 2)), blank(place, nbytes)
    for call in (cumem.copy, cumem.copy_async):
        refused(lambda: call(other, array), place)
        refused(lambda: call(array, other), place)
    refused(lambda: cumem.broadcast([other], array), place)
    refused(lambda: cumem.gather(other, [array]), place)
    refused(lambda: cumem.scatter([other[:MIB], other[MIB:]], array), place)
    refused(lambda: cumem.scatter([array], other), place)
    # The copies that failed must not have damaged the engine.
    other = blank(place, nbytes)
    cumem.copy(other, np.ones(nbytes, "u1"))
    assert cumem.asnumpy(other).all()
array = cumem.asbuffer(holed(nbytes, nbytes // 2))
refused(array.copy)
refused(lambda: array.fill(3))
refused(lambda: cumem.copy(array[1:], array[:-1]))
refused(lambda: cumem.copy(array, array[::-1]))
""",
    "rows over a page that is gone, and between them": """
nbytes, row = 40 * MIB, 256 * KIB
rows = lambda array: array.reshape(-1, row)[:, : row // 2]
for place, upload in itertools.product(("device", "pinned", "numpy"), (True, False)):
    other = blank(place, nbytes // 2).reshape(-1, row // 2)
    bad = rows(holed(nbytes, nbytes // 2))
    refused(lambda: cumem.copy(*((other, bad) if upload else (bad, other))), place)
    good = rows(holed(nbytes, nbytes // 2 + row * 3 // 4))
    cumem.copy(*((other, good) if upload else (good, other)))
    cumem.copy_async(*((other, good) if upload else (good, other))).wait()
""",
    "copies that the driver makes": """
from concurrent.futures import ThreadPoolExecutor
from support import testing

stream = cumem.Stream()
for upload in (True, False):
    array = cumem.asbuffer(short(700 * KIB))
    device = cumem.full(700 * KIB, 1, "u1", kind="device")
    pair = (device, array) if upload else (array, device)
    testing.gate_close(stream)
    cumem.Event().record(stream)  # This work makes the copy wait for the stream.
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: cumem.copy(*pair, stream=stream))
        while not testing.pending_transfers():  # The copy waits from then on.
            assert not done.done()
        testing.gate_open(stream)
        refused(done.result, upload)
""",
    "elements apart over a page in the middle that is gone": """
APART = {
    "every third": lambda a: a[::3],
    "columns": lambda a: a.reshape(-1, 1024)[:, :100],
    "turned": lambda a: a.reshape(1024, -1).T,
    "far apart": lambda a: a.reshape(-1, 4096)[:, :16],
    "wide rows": lambda a: a.reshape(-1, 16384)[::-1, :9000],
    "three axes": lambda a: a.view("u2").reshape(16, -1, 32)[::-1, 1:, ::2],
}
for nbytes, view, place in itertools.product([96 * KIB, 3 * MIB], APART, PLACES):
    array = APART[view](holed(nbytes, nbytes // 2))
    other = blank(place, array.nbytes).view(array.dtype).reshape(array.shape)
    for call in (cumem.copy, cumem.copy_async):
        refused(lambda: call(array, other), nbytes, view, place)
        refused(lambda: call(other, array), nbytes, view, place)
    refused(lambda: cumem.broadcast([array, other], other.copy()), nbytes, view, place)
""".replace("PLACES", '["device", "pinned", "numpy"]'),
    "many pieces over a page in the middle that is gone": """
for nbytes, count, place in itertools.product([96 * KIB, 3 * MIB], [8, 96], PLACES):
    length = nbytes // count
    cut = lambda a: [a[i * length : (i + 1) * length] for i in range(count)][::-1]
    for view in (VIEWS["array"], VIEWS["asbuffer"]):
        array = holed(nbytes, nbytes // 2)
        files, others = cut(view(array)), cut(blank(place, nbytes))
        for call in (cumem.copy_many, cumem.copy_many_async):
            refused(lambda: call(zip(files, others, strict=True)), nbytes, count, place)
            refused(lambda: call(zip(others, files, strict=True)), nbytes, count, place)
        refused(lambda: cumem.scatter(files, blank(place, nbytes)), nbytes, place)
        refused(lambda: cumem.gather(blank(place, nbytes), files), nbytes, place)
""".replace("PLACES", '["device", "pinned", "numpy"]'),
    "values into a file with a page in the middle that is gone": """
def assign(buffer, value):
    buffer[...] = value

for nbytes in (96 * KIB, 3 * MIB):
    for part in (lambda a: a, lambda a: a[::2], lambda a: a.reshape(-1, 1024)[:, :9]):
        array = holed(nbytes, nbytes // 2)
        buffer = part(cumem.asbuffer(array))
        refused(lambda: assign(buffer, np.ones(buffer.shape, "u1")), nbytes)
        refused(lambda: assign(buffer, 7), nbytes)
        refused(lambda: buffer.fill(7), nbytes)
        refused(lambda: buffer.copy(), nbytes)
        refused(lambda: buffer.astype("f4"), nbytes)
        refused(lambda: cumem.array(buffer, kind="device"), nbytes)
        refused(lambda: cumem.asnumpy(buffer), nbytes)
        wide = np.ones(buffer.shape, "f8")
        refused(lambda: cumem.copy(buffer, wide, casting="unsafe"), nbytes)
        refused(lambda: cumem.copy(wide, buffer, casting="unsafe"), nbytes)
        spelled = part(array).view("?")  # NumPy makes this conversion.
        refused(lambda: cumem.copy(spelled, wide, casting="unsafe"), nbytes)
""",
    "short copies over a page that is gone": """
for nbytes, place in itertools.product([100, 5000, 20 * KIB], PLACES):
    array = holed(64 * KIB, 16 * KIB)[16 * KIB :][:nbytes]
    other = blank(place, nbytes)
    for call in (cumem.copy, cumem.copy_async):
        refused(lambda: call(array, other), nbytes, place)
        refused(lambda: call(other, array), nbytes, place)
    refused(lambda: cumem.copy(array, other, stream=cumem.Stream()), nbytes, place)
""".replace("PLACES", '["device", "pinned", "managed", "numpy"]'),
    "files over a page in the middle that is gone": """
path = PATH + "2"
for nbytes in (96 * KIB, 3 * MIB):
    np.zeros(nbytes, "u1").tofile(path)
    np.save(path + ".npy", np.zeros((nbytes // 1024, 1024), "u1").T)
    for view in (lambda a: a[::-1], lambda a: a.reshape(-1, 1024).T):
        array = view(holed(nbytes, nbytes // 2))
        refused(lambda: cumem.fromfile(path, "u1", out=array), nbytes)
        refused(lambda: cumem.tofile(path + "3", array), nbytes)
        refused(lambda: cumem.save(path + "4.npy", array), nbytes)
        refused(lambda: cumem.write_ranges(path + "5", [(3, array)]), nbytes)
    array = holed(nbytes, nbytes // 2)
    refused(lambda: cumem.load(path + ".npy", out=array.reshape(1024, -1)), nbytes)
    refused(lambda: cumem.fromfile(path, "u1", out=array, direct=True), nbytes)
""",
    "pages between elements stay as they are": """
for place, upload in itertools.product(("device", "pinned", "numpy"), (True, False)):
    for nbytes in (96 * KIB, 3 * MIB):
        far = lambda a: a.reshape(-1, 12 * KIB)[:, :9]
        bad = far(holed(nbytes, nbytes // 2 // (12 * KIB) * 12 * KIB + 4 * KIB))
        other = blank(place, bad.size).reshape(bad.shape)
        cumem.copy(*((other, bad) if upload else (bad, other)))
        cumem.copy_async(*((other, bad) if upload else (bad, other))).wait()
""",
    "copies that are cut meanwhile": """
nbytes = 136 * MIB
for call in ("source", "target"):
    with open(PATH, "wb") as file:
        file.truncate(nbytes)
    array = np.memmap(PATH, "u1", "r+")
    array[::4096] = 1
    array = cumem.asbuffer(array)
    other = np.ones(nbytes, "u1")
    told = []

    def cut(done, total):
        if 0 < done < total:
            told.append(done)
            os.truncate(PATH, 64 * KIB)

    pair = (other, array) if call == "source" else (array, other)
    refused(lambda: cumem.copy(*pair, progress=cut), call)
    assert told
""",
}


#: This program writes into holes of a file, for which the disk has no room.
FULL = """
def hole(nbytes):
    with open(PATH, "wb") as file:
        file.truncate(nbytes)
    return np.memmap(PATH, "u1", "r+")

CALLS = {
    "copy": lambda a, other: cumem.copy(a, other),
    "strided": lambda a, other: cumem.copy(a[::2], other[::2]),
    "turned": lambda a, other: cumem.copy(a.reshape(64, -1).T, other.reshape(-1, 64)),
    "many": lambda a, other: cumem.copy_many(
        [(a[MIB:], other[MIB:]), (a[:MIB], other[:MIB])]
    ),
    "rows": lambda a, other: [
        cumem.copy(a[i : i + 4096], other[i : i + 4096]) for i in range(0, a.size, 4096)
    ],
    "scatter": lambda a, other: cumem.scatter([a[:100], a[100:]], other),
    "background": lambda a, other: cumem.copy_async(a[::-1], other),
    "fill": lambda a, other: cumem.asbuffer(a)[::3].fill(1),
}
for name, call in CALLS.items():
    for place in ("numpy", "pinned", "device"):
        array = hole(3 * MIB)
        refused(lambda: call(array, blank(place, array.size)), name, place)
"""


def run(case: str, path: Path, *before: str) -> None:
    """Run a case in a separate program, which must succeed.

    `before` is a command that starts the program, such as `unshare`.
    """
    done = subprocess.run(
        [*before, sys.executable, "-c", PRELUDE + case, str(path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "CUMEM_BACKEND": "emulated", "PYTHONPATH": PATH},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.hooks
@pytest.mark.parametrize("case", CASES)
def test_memory_of_a_file_cut_short_is_an_oserror(tmp_path: Path, case: str) -> None:
    run(CASES[case], tmp_path / "file")


def test_holes_of_a_file_on_a_full_disk_are_an_oserror(tmp_path: Path) -> None:
    """The file lies on a file system of 1 MiB, which is mounted in a separate name
    space.
    """
    mount = f'mount -t tmpfs -o size=1m none "{tmp_path}" && exec "$@"'
    inside = ("unshare", "--mount", "--map-root-user", "sh", "-c", mount, "-")
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            [*inside, "true"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("this process may not make a name space of mounts")
    run(FULL, tmp_path / "file", *inside)
