# SPDX-License-Identifier: Apache-2.0
"""Each name that `dir()` lists of an object can be read, whatever the object's state.

Completion, debuggers and `inspect.getmembers` read all listed names. The functions below
make open and closed objects of the public types. They return dicts, in which each object
has a key that describes it. A test then lists the names of each object and reads them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cumem

Objects = dict[str, Any]
KINDS = ("pinned", "mapped", "managed", "device")


def buffers(folder: Path) -> Objects:
    found: Objects = {}
    for kind in KINDS:
        whole = cumem.zeros((3, 4), "f4", kind)
        closed = cumem.zeros(8, "f4", kind)
        found |= {
            kind: whole,
            f"{kind}, 0-d": cumem.zeros((), "f4", kind),
            f"{kind}, empty": cumem.zeros((0, 3), "f4", kind),
            f"{kind}, strided": whole[:, ::2],
            f"{kind}, reversed": whole[::-1],
            f"{kind}, dates": cumem.zeros(3, "M8[s]", kind),
            f"{kind}, records": cumem.zeros(3, [("a", "i4"), ("b", "f8")], kind),
            f"{kind}, closed": closed,
            f"{kind}, view of a closed one": closed[1:],
        }
        closed.free()
    readonly = np.zeros(4)
    readonly.flags.writeable = False
    return found | {
        "as_device": cumem.zeros(3, kind="mapped").as_device(),
        "attached to the host": cumem.empty_managed(4, attach="host"),
        "ordinary": cumem.asbuffer(np.zeros(4)),
        "readonly": cumem.asbuffer(readonly),
        "flags": found["pinned"].flags,
        "residency": found["managed"].page_residency(),
        "block": found["managed"].on(0),
    }


def streams(folder: Path) -> Objects:
    stream, event = cumem.Stream(), cumem.Event()
    done = cumem.copy_async(cumem.empty_device(4), np.ones(4))
    done.wait()
    closed = cumem.Stream(), cumem.Event().record()
    for each in closed:
        each.close()
    return {
        "stream": stream,
        "default stream": cumem.current_stream(),
        "recorded": stream.record(),
        "never recorded": event,
        "without time": cumem.Event(timing=False),
        "closed stream": closed[0],
        "closed event": closed[1],
        "transfer": done,
        "device": cumem.Device(0),
    }


def pools(folder: Path) -> Objects:
    pool, closed = cumem.Pool("pinned"), cumem.Pool("device")
    held = pool.allocate(1000)
    closed.close()
    hook = cumem.on_out_of_memory(lambda *_: None)
    removed = cumem.on_out_of_memory(lambda *_: None)
    for each in (hook, removed):
        each.remove()
    with cumem.measure() as measured:
        inside = sorted(dir(measured))
    assert "total" not in inside
    snapshot = pool.snapshot()
    workspaces = cumem.Workspace(1 << 16), cumem.Workspace(1 << 16)
    workspaces[1].close()
    return {
        "pool": pool,
        "closed pool": closed,
        "default pool": cumem.default_pool("device"),
        "snapshot": snapshot,
        "segment": snapshot.segments[0],
        "piece": snapshot.segments[0].blocks[0],
        "pool's figures": pool.stats(),
        "figures": cumem.stats(),
        "measurement": measured,
        "measurement that did not begin": cumem.measure(),
        "result": measured.result,
        "hook": hook,
        "limit": cumem.limit("device", "1GiB"),
        "workspace": workspaces[0],
        "closed workspace": workspaces[1],
        "numpy_pinned": cumem.numpy_pinned(),
        "held": held,
    }


def answers(folder: Path) -> Objects:
    host, device = cumem.zeros(8, kind="pinned"), cumem.zeros(8)
    found: Objects = {
        "live": cumem.live(),
        "living": cumem.live().buffers[0],
        "holders": cumem.who_holds(host),
        "holder": cumem.who_holds(host).holders[0],
        "device's memory": cumem.memory_info(),
        "host's memory": cumem.memory_info("host"),
        "explanation": cumem.explain(device, host),
        "settings": cumem.configure(),
        "advice": cumem.recommend(1 << 20),
        "tag": cumem.tag("x"),
    }
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.empty_device(1 << 50, "u1")
    found["error"] = caught.value
    registered = [cumem.register(np.zeros(4096)) for _ in range(2)]
    registered[1].close()
    found |= {"registration": registered[0], "closed registration": registered[1]}
    return found


def records(folder: Path) -> Objects:
    with cumem.record() as record:
        cumem.copy(cumem.zeros(3), np.ones(3))
        running = dir(record)
    assert "log" in running
    return {
        "record that did not begin": cumem.record(),
        "record": record,
        "summary": record.summary(),
        "leaks": record.leaks(),
        "top": record.top(),
        "peak": record.peak(),
        "difference": record.diff(record),
    }


def files(folder: Path) -> Objects:
    cumem.save_safetensors(folder / "a.safetensors", {"a": np.zeros(3, "f4")})
    np.savez(folder / "a.npz", a=np.zeros(3))
    header = cumem.read_safetensors_header(folder / "a.safetensors")
    closed = cumem.load(folder / "a.npz")
    closed.close()
    return {
        "safetensors": cumem.load_safetensors(folder / "a.safetensors"),
        "header": header,
        "info": header.tensors["a"],
        "npz": cumem.load(folder / "a.npz"),
        "closed npz": closed,
        "loader": cumem.prefetch([np.zeros(3)]),
        "chunks": cumem.chunks(np.zeros(4)),
        "collate": cumem.PinnedCollate(),
    }


@pytest.mark.parametrize("make", [buffers, streams, pools, answers, records, files])
def test_names_that_dir_lists_can_all_be_read(
    runtime, tmp_path: Path, make: Callable[[Path], Objects]
) -> None:
    failed: list[str] = []
    for title, each in make(tmp_path).items():
        names = dir(each)
        assert names == sorted(set(names)), title
        for name in names:
            try:
                getattr(each, name)
            except Exception as error:
                failed.append(f"{title}: {name}: {error!r}")
        inspect.getmembers(each)
    assert not failed, "\n".join(failed)


def test_public_names_and_their_members_can_all_be_read() -> None:
    for name in dir(cumem):
        each = getattr(cumem, name)
        for member in dir(each):
            getattr(each, member)


def test_closed_objects_do_not_list_what_they_refuse(runtime) -> None:
    buffer, stream, event = cumem.empty_pinned(3), cumem.Stream(), cumem.Event()
    for each, name in ((buffer, "ptr"), (stream, "handle"), (event, "handle")):
        assert name in dir(each)
        assert not each.closed
    buffer.free()
    stream.close()
    event.close()
    for each, name in ((buffer, "ptr"), (stream, "handle"), (event, "handle")):
        assert name not in dir(each)
        assert "closed" in dir(each)
        assert each.closed
        with pytest.raises(ValueError, match="closed"):
            getattr(each, name)


def test_buffers_without_their_memory_do_not_list_what_they_refuse(emulated) -> None:
    region = cumem.Region("dir")
    with region:
        asleep = cumem.zeros(8, "f4", "device")
    region.sleep()
    names = dir(asleep)
    assert {"T", "ptr", "_address"}.isdisjoint(names)
    assert "nbytes" in names
    for name in names:
        getattr(asleep, name)
    with pytest.raises(RuntimeError, match="asleep"):
        asleep.ptr  # noqa: B018
    region.wake()
    assert {"T", "ptr"} <= set(dir(asleep))


def test_buffers_of_memory_that_moved_do_not_list_what_they_refuse(emulated) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(1000)
    moved = cumem.asbuffer(tensor)
    assert "ptr" in dir(moved)
    tensor.share_memory_()
    for name in dir(moved):
        getattr(moved, name)
    with pytest.raises(BufferError, match="gone"):
        moved.ptr  # noqa: B018


def test_listing_names_exports_nothing(runtime) -> None:
    """Listing names must not count as an export of the memory.

    After an export the block could not be reused at once.
    """
    buffer = cumem.empty_managed(1000, "u1")
    assert ("__cuda_array_interface__" in dir(buffer)) == (not runtime.emulated)
    address = buffer.ptr
    del buffer
    assert cumem.empty_managed(1000, "u1").ptr == address
