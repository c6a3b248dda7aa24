# SPDX-License-Identifier: Apache-2.0
"""Each public call may be the first one of its process, inside every kind of block.

The first call opens the driver, and a block changes which device, stream, pool and so on is
current. Where the two meet, code runs that no other test reaches. Each call is made in a
child of its own, which is forked from a process that has imported the package and opened
nothing. The call may succeed or raise, but the child must not die of a signal.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from support import programs

import cumem

# The children run the same code of the extension under every version of Python.
pytestmark = pytest.mark.any_python

#: A call of each public function, and of each type that users make. In these calls `a` is
#: an array of 1,000 floats, `n()` makes another one, and `t` is a folder that has the
#: files.
CALLS = {
    "array": "cumem.array(a, kind='pinned')",
    "asarray": "cumem.asarray(a)",
    "asbuffer": "cumem.asbuffer(a)",
    "asnumpy": "cumem.asnumpy(a)",
    "backend": "cumem.backend()",
    "broadcast": "cumem.broadcast([n()], a)",
    "broadcast_async": "[each.wait() for each in cumem.broadcast_async([n()], a)]",
    "chunk_size": "cumem.chunk_size(1000, '1MiB')",
    "chunks": "list(cumem.chunks(a))",
    "configure": "cumem.configure(threads=1)",
    "copy": "cumem.copy(n(), a)",
    "copy_async": "cumem.copy_async(n(), a).wait()",
    "copy_many": "cumem.copy_many([(n(), a), (n(), a)])",
    "copy_many_async": "cumem.copy_many_async([(n(), a)]).wait()",
    "copy_rows": "cumem.copy_rows(n(), a, src_rows=[3, 1])",
    "copy_rows_async": "cumem.copy_rows_async(n(), a, [3, 1]).wait()",
    "current_device": "cumem.current_device()",
    "current_stream": "cumem.current_stream()",
    "default_pool": "cumem.default_pool('pinned')",
    "device_count": "cumem.device_count()",
    "empty": "cumem.empty(10)",
    "empty_device": "cumem.empty_device(10)",
    "empty_like": "cumem.empty_like(a)",
    "empty_managed": "cumem.empty_managed(10)",
    "empty_mapped": "cumem.empty_mapped(10)",
    "empty_pinned": "cumem.empty_pinned(10)",
    "explain": "cumem.explain(n(), a)",
    "fromfile": "cumem.fromfile(t + '/y.bin', out=n())",
    "full": "cumem.full(10, 3)",
    "full_like": "cumem.full_like(a, 3)",
    "gather": "cumem.gather(np.empty(2000), [a, a])",
    "gather_async": "[x.wait() for x in cumem.gather_async(np.empty(2000), [a, a])]",
    "get_limit": "cumem.get_limit('pinned')",
    "is_available": "cumem.is_available()",
    "limit": "cumem.limit('device', '50%').__enter__()",
    "live": "cumem.live()",
    "load": "cumem.load(t + '/y.npy', out=n())",
    "load_safetensors": "cumem.load_safetensors(t + '/y.safetensors')",
    "measure": "cumem.measure().__enter__()",
    "memory_info": "cumem.memory_info()",
    "on_out_of_memory": "cumem.on_out_of_memory(print)",
    "pipeline": "cumem.pipeline(lambda x, y, s: 1, a)",
    "prefetch": "list(cumem.prefetch([a]))",
    "prefetch_pages": "cumem.prefetch_pages([cumem.empty_managed(10)], 0)",
    "read_ranges": "cumem.read_ranges(t + '/y.bin', [(0, n())])",
    "read_safetensors_header": "cumem.read_safetensors_header(t + '/y.safetensors')",
    "recommend": "cumem.recommend('1MiB')",
    "record": "cumem.record().start()",
    "register": "cumem.register(a)",
    "report_leaks_at_exit": "cumem.report_leaks_at_exit()",
    "save": "cumem.save(t + '/z.npy', a)",
    "save_safetensors": "cumem.save_safetensors(t + '/z.safetensors', {'a': a})",
    "save_safetensors_async": (
        "cumem.save_safetensors_async(t + '/z.safetensors', {'a': a}).wait()"
    ),
    "savez": "cumem.savez(t + '/z.npz', a=a)",
    "scatter": "cumem.scatter([np.empty(500), np.empty(500)], a)",
    "scatter_async": "[x.wait() for x in cumem.scatter_async([n()[:500], n()[500:]], a)]",
    "set_current_device": "cumem.set_current_device(0)",
    "set_limit": "cumem.set_limit('pinned', '50%')",
    "shared_pinned": "cumem.shared_pinned('first call', 10)",
    "shutdown": "cumem.shutdown()",
    "sleep": "r = cumem.Region('x'); b = r.pool.allocate(100); cumem.sleep('x')",
    "stats": "cumem.stats()",
    "synchronize": "cumem.synchronize()",
    "tag": "cumem.tag('x').__enter__()",
    "take_rows": "cumem.take_rows(a, [3, 1])",
    "tiles": "list(cumem.tiles(cumem.empty_managed(1000), 100))",
    "to_device": "cumem.to_device([a])",
    "to_host": "cumem.to_host([a])",
    "tofile": "cumem.tofile(t + '/z.bin', a)",
    "trim": "cumem.trim()",
    "wake": "r = cumem.Region('x'); cumem.sleep('x'); cumem.wake('x')",
    "who_holds": "cumem.who_holds(a)",
    "write_ranges": "cumem.write_ranges(t + '/z.bin', [(0, a)])",
    "zeros": "cumem.zeros(10)",
    "zeros_like": "cumem.zeros_like(a)",
    # These are types.
    "Device": "cumem.Device(0).name",
    "Event": "cumem.Event().record()",
    "PinnedCollate": "cumem.PinnedCollate()([a, a])",
    "RowPlan": "cumem.RowPlan(n(), a, [3, 1]).copy()",
    "Pool": "cumem.Pool('device').allocate(100)",
    "Region": "cumem.Region('x').pool.allocate(100)",
    "Stream": "cumem.Stream().synchronize()",
    "Workspace": "cumem.Workspace('1MiB', 'pinned')",
    "numpy_pinned": "cumem.numpy_pinned(1).__enter__(); np.ones(1000)",
}

#: Calls that reach the driver in other ways than by a public function.
OTHERS = {
    "mapped file": "cumem.copy(n(), np.memmap(t + '/y.bin', 'f8', 'r'))",
    "memoryview": "cumem.asbuffer(memoryview(a))",
    "array interface": "cumem.asbuffer(Interface(a))",
    "capsule": "cumem.asbuffer(Exporter(a))",
    "assignment": "b = cumem.empty_pinned(1000); b[...] = a",
    "pickle": "import pickle; pickle.loads(pickle.dumps(cumem.asbuffer(a)))",
    "conversion": "cumem.copy(np.empty(1000, 'f4'), a, casting='same_kind')",
    "of host": "cumem.memory_info('host')",
    "offload": "from cumem.integrations.torch import offload; offload({'x': a})",
    "offload_activations": "from cumem.integrations import torch; "
    "torch.offload_activations()",
    "restore": "from cumem.integrations.torch import restore; restore({'x': a})",
    "stage a checkpoint": "from cumem.integrations import torch; "
    "torch.PinnedStager().stage({'x': 1})",
    "load a record": "cumem.Record.load(t + '/y.npz')",
    "about": "cumem.info.about()",
    "a thread registers": "aside(lambda: [cumem.register(n()).close() for _ in range(9)])",
}

#: These calls raise an error in every block: the file holds no record, the interface says
#: that ordinary memory is CUDA's, and the rest need PyTorch, which may not be installed.
RAISE = {
    "load a record",
    "array interface",
    "offload",
    "offload_activations",
    "restore",
    "stage a checkpoint",
}

#: The expressions of the blocks.
BLOCKS = (
    pytest.param("cumem.Device(0)", marks=pytest.mark.checked),
    # By default a record has a ring of a million entries. POISONED makes malloc() overwrite
    # new memory too, so each child would write over a whole ring at its start.
    *("cumem.Stream()", "cumem.Pool('pinned')", "cumem.record(max_entries=1000)"),
    *("cumem.Pool('device')", "cumem.numpy_pinned(1)", "cumem.limit('pinned', '1GiB')"),
    *("cumem.measure()", "cumem.tag('a')", "nothing()"),
    # Up to Python 3.11 the allocation of an object may run a collection.
    pytest.param("at_collections(cumem.shutdown)", marks=pytest.mark.checked),
    "at_collections(end_oldest, 20)",
)

#: With these variables freed memory is overwritten, so that a later use of it is noticed.
POISONED = {"PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "165"}
#: With one device the code never asks which device is current.
SEVERAL = {"CUMEM_EMULATED_DEVICES": "2"}

#: The program that makes each call in a child. Its arguments are a block, the calls and the
#: folder `t`.
PROGRAM = """
import contextlib, faulthandler, gc, json, os, sys, threading, warnings
import numpy as np
import cumem

block, calls, t = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
warnings.simplefilter("ignore")
nothing = contextlib.nullcontext
a = np.arange(1000.0)
n = lambda: np.empty(1000)

class Interface:
    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = dict(
            shape=(4,), typestr="<f8", data=(array.ctypes.data, False), version=3
        )

class Exporter:
    def __init__(self, array):
        self.array = array
    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)
    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

def aside(work):
    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(9):
        cumem.asbuffer(a)
    thread.join()

@contextlib.contextmanager
def at_collections(work, every=1):
    # Call `work` when a collection begins; the threshold lets one begin very often.
    busy = False

    def collected(phase, info):
        nonlocal busy
        if phase == "start" and not busy:
            busy = True
            with contextlib.suppress(Exception):
                work()
            busy = False

    gc.callbacks.append(collected)
    gc.set_threshold(every, 1000, 1000)
    try:
        yield
    finally:
        gc.callbacks.remove(collected)

# SORTS says how each sort of object is made, and by which method it is ended. `made` has
# the objects that have not been ended yet, the oldest first.
SORTS = [
    (lambda: cumem.empty_pinned(10), "free"), (lambda: cumem.register(n()), "close"),
    (lambda: cumem.empty_device(10), "free"), (cumem.Stream, "close"),
    (lambda: cumem.Pool("pinned"), "close"), (cumem.Event, "close"),
]
made = []

def end_oldest():
    # Make one more object, of the next sort, and end the oldest if there are many.
    make_one, end = SORTS[0]
    SORTS.append(SORTS.pop(0))
    made.append((make_one(), end))
    if len(made) > len(SORTS):
        thing, end = made.pop(0)
        getattr(thing, end)()

def make(call):
    try:
        with eval(block):
            exec(call)
    except Exception as error:
        print(f"{call}: {error!r}")

# Load everything here, so that no child has to. Loading a name does not open the driver.
with contextlib.suppress(ImportError):
    import torch
for name in cumem.__all__:
    getattr(cumem, name)

bad = {}
for name, call in calls.items():
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        make(call)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status):
        bad[name] = os.waitstatus_to_exitcode(status)
print(json.dumps(bad))
"""


def public_calls() -> set[str]:
    """Return the names of the public functions."""
    found = set()
    for name in cumem.__all__:
        value = getattr(cumem, name)
        if inspect.isroutine(value):
            found.add(name)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import numpy as np

    path = tmp_path_factory.mktemp("first")
    array = np.arange(1000.0)
    array.tofile(path / "y.bin")
    np.save(path / "y.npy", array)
    np.savez(path / "y.npz", a=array)
    header = json.dumps(
        {"a": {"dtype": "F64", "shape": [1000], "data_offsets": [0, 8000]}}
    )
    text = header.encode()
    (path / "y.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + array.tobytes()
    )
    return path


def test_every_public_function_is_among_the_first_calls() -> None:
    assert public_calls() - set(CALLS) == set()


@pytest.mark.parametrize("block", BLOCKS)
def test_first_call_of_a_process_inside_a_block_does_not_crash(folder, block) -> None:
    calls = json.dumps(CALLS | OTHERS)
    done = programs.run("-c", PROGRAM, block, calls, str(folder), **POISONED, **SEVERAL)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}, done.stderr


def test_calls_that_come_first_are_right_without_a_block(folder) -> None:
    """Each call must succeed without a block: one that always raises would show nothing."""
    program = PROGRAM.replace('print(f"{call}: {error!r}")', "os._exit(3)")
    right = {name: call for name, call in (CALLS | OTHERS).items() if name not in RAISE}
    done = programs.run("-c", program, "nothing()", json.dumps(right), str(folder))
    assert json.loads(done.stdout.splitlines()[-1]) == {}, done.stderr
