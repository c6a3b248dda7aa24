# SPDX-License-Identifier: Apache-2.0
"""What is alive now, what holds it, and what tracemalloc knows of it.

`live()` lists memory, `who_holds()` finds the names and containers that keep a buffer
alive, and tracemalloc has a domain for cumem's memory. The tests make and drop buffers
and compare these answers with what they did.
"""

from __future__ import annotations

import builtins
import gc
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from support import programs
from support.lines import here, nothing_runs  # noqa: F401

import cumem

POOL_KINDS = ("pinned", "mapped", "managed", "device")


# -- what is alive, and who holds it -----------------------------------------------------


def test_live_names_lines_that_a_running_record_saw(runtime) -> None:
    pool = cumem.Pool("mapped")
    early = pool.allocate(100)
    with cumem.record(), cumem.tag("batch"):
        late = pool.allocate(200); line = here()  # fmt: skip # noqa: E702
        found = {b.requested_nbytes: b for b in cumem.live() if b.kind == "mapped"}
        assert found[100].line is None
        assert found[100].seconds is None
        assert f":{line} " in str(found[200].line)
        assert found[200].tag == "batch"
        assert found[200].seconds > 0
        assert found[200].address == late.ptr
        assert found[200].nbytes == 256
        assert f":{line} " in str(cumem.live())
    after = {b.requested_nbytes: b for b in cumem.live() if b.kind == "mapped"}
    assert after[200].line is None
    del late, early
    assert all(b.kind != "mapped" for b in cumem.live())
    pool.close()


def test_live_has_locked_pages_of_others(runtime) -> None:
    array = np.zeros(5000, "u1")
    with cumem.register(array):
        (found,) = (b for b in cumem.live() if b.kind == "registered")
        assert (found.address, found.nbytes) == (array.ctypes.data, 5000)


class Thing:
    """An object that holds another one in an attribute."""

    def __init__(self, part: object) -> None:
        self.part = part


held: dict[str, Any] = {}


def paths(obj: object) -> set[str]:
    return {holder.path for holder in cumem.who_holds(obj)}


def test_holders_are_found_through_all_that_has_names(runtime) -> None:
    buffer = cumem.empty_pinned(64)
    held["list"] = [None, (buffer,)]
    held["thing"] = Thing(buffer)
    held["only"] = {7: buffer}

    def inner() -> object:
        return buffer

    held["function"] = inner
    found = paths(buffer)
    here_ = f"{__name__}.held"
    assert f"{here_}['list'][1][0]" in found
    assert f"{here_}['thing'].part" in found
    assert f"{here_}['only'][7]" in found
    assert f"{here_}['function'].__closure__[0].cell_contents" in found
    assert any(path.startswith("buffer in test_holders_are") for path in found)
    held.clear()


def test_holders_of_a_generator_and_an_array_are_found(runtime) -> None:
    buffer = cumem.empty_pinned(64)

    def generate(mine: object) -> Any:
        yield mine

    running = generate(buffer)
    next(running)
    assert any("generate" in path for path in paths(buffer))
    running.close()
    array = buffer.numpy()
    assert "an array or another library" in str(cumem.who_holds(buffer))
    del array


def test_temporary_is_held_by_nobody(runtime) -> None:
    found = cumem.who_holds(cumem.empty_pinned(64))
    assert not found
    assert str(found) == "nobody holds it"


def test_a_plain_dict_of_a_running_function_is_found(runtime) -> None:
    """Python's garbage collector tracks neither this dict nor the running function."""
    batch = {"x": cumem.empty_pinned(64)}
    assert not gc.is_tracked(batch)
    found = cumem.who_holds(batch["x"])
    (path,) = (holder.path.partition(" (")[0] for holder in found)
    assert path.startswith("batch['x'] in test_a_plain_dict")
    assert found.unseen_count == 0


@pytest.mark.parametrize("in_dict", [False, True])
def test_a_search_keeps_nothing_alive(runtime, in_dict: bool) -> None:
    pool = cumem.Pool("pinned")
    batch: Any = {0: pool.allocate(64)} if in_dict else [pool.allocate(64)]
    gc.disable()
    try:
        count = len(cumem.who_holds(batch[0]))
        batch.clear()
        assert pool.stats().live_nbytes == 0
    finally:
        gc.enable()
    assert count == 1


def test_history_of_a_notebook_is_shown_as_such(runtime, monkeypatch) -> None:
    main = sys.modules["__main__"]
    buffer = cumem.empty_pinned(64)
    monkeypatch.setattr(main, "Out", {3: buffer}, raising=False)
    monkeypatch.setattr(main, "_", buffer, raising=False)
    monkeypatch.setattr(main, "_3", buffer, raising=False)
    monkeypatch.setattr(main, "mine", buffer, raising=False)
    # The plain Python prompt keeps its last answer there.
    monkeypatch.setattr(builtins, "_", buffer, raising=False)
    found = {h.path: h for h in cumem.who_holds(buffer)}
    for name in ("Out[3]", "_", "_3"):
        assert found[f"__main__.{name}"].kind == "notebook"
        assert "reset" in found[f"__main__.{name}"].hint
    assert found["builtins._"].kind == "notebook"
    assert found["__main__.mine"].kind == "global"


def test_last_error_is_reported_as_such(runtime, monkeypatch) -> None:
    def fail(buffer: object) -> None:
        raise KeyError(id(buffer))

    try:
        fail(cumem.empty_pinned(64))
    except KeyError as error:
        number, last = error.args[0], error
    monkeypatch.setattr(sys, "last_exc", last, raising=False)
    trace = last.__traceback__
    assert trace is not None
    assert trace.tb_next is not None
    buffer = trace.tb_next.tb_frame.f_locals["buffer"]
    assert id(buffer) == number
    found = [h for h in cumem.who_holds(buffer) if h.kind == "traceback"]
    assert any(h.path.startswith("buffer in") for h in found)
    del last, trace


# -- tracemalloc -----------------------------------------------------------------------


@pytest.fixture
def tracing():
    tracemalloc.start(4)
    yield
    tracemalloc.stop()


def traced() -> list[Any]:
    """Return the traces of cumem's domain that come from this file."""
    snapshot = tracemalloc.take_snapshot()
    kept = tracemalloc.DomainFilter(True, cumem.info.about().tracemalloc_domain)
    return list(snapshot.filter_traces([kept]).traces)


@pytest.mark.parametrize("kind", POOL_KINDS)
def test_buffers_are_in_tracemalloc_while_they_live(runtime, tracing, kind) -> None:
    # This opens the driver, which allocates memory too.
    cumem.empty(1, "u1", kind=kind)
    early = len(traced())
    line = here() + 1
    buffers = [cumem.empty(1000, "u1", kind=kind) for _ in range(3)]
    found = traced()
    assert len(found) == early + 3
    assert all(trace.size == 1000 for trace in found)
    assert {trace.traceback[-1].lineno for trace in found} == {line}
    del buffers[0]
    assert len(traced()) == early + 2
    buffers.pop().free()
    assert len(traced()) == early + 1
    view = buffers.pop()[10:]
    assert len(traced()) == early + 1
    del view
    assert len(traced()) == early


def test_buffers_outlive_tracing(runtime) -> None:
    tracemalloc.start()
    buffer = cumem.empty_pinned(1000)
    tracemalloc.stop()
    other = cumem.empty_pinned(1000)
    del buffer, other
    tracemalloc.start()
    assert traced() == []
    tracemalloc.stop()


# -- who holds memory that live() lists --------------------------------------------------


def row_of(address: int) -> Any:
    return next(each for each in cumem.live() if each.address == address)


def test_holders_of_a_row_are_those_of_the_memory(runtime) -> None:
    buffer = cumem.empty_pinned(1 << 16, "u1")
    held["array"] = [buffer.numpy()[100:]]
    address = buffer.ptr
    row = row_of(address)
    held["row"] = row
    del buffer
    where = f"{__name__}.held['array'][0]"
    for asked in (row, address, address + 1000):
        found = cumem.who_holds(asked)
        assert [holder.path for holder in found] == [where], str(found)
        assert found.unseen_count == 0
    held.clear()
    assert str(cumem.who_holds(row)) == "nobody holds it"
    with pytest.raises(ValueError, match=r"print\(cumem.live\(\)\) lists"):
        cumem.who_holds(address)


@pytest.mark.parametrize("kind", POOL_KINDS)
def test_holders_of_memory_are_found_whatever_lies_over_it(runtime, kind) -> None:
    buffer = cumem.zeros(1 << 16, "u1", kind)
    address = buffer.ptr
    held["view"] = (buffer[5:],)
    if kind != "device":
        held["memoryview"] = memoryview(buffer)
        held["nested"] = {"x": (buffer.numpy()[::-1],)}
    del buffer
    found = {holder.path for holder in cumem.who_holds(row_of(address))}
    assert f"{__name__}.held['view'][0]" in found
    if kind != "device":
        assert f"{__name__}.held['memoryview']" in found
        assert f"{__name__}.held['nested']['x'][0]" in found
    held.clear()


def test_tensor_over_memory_is_a_holder_of_it(emulated) -> None:
    torch = pytest.importorskip("torch")
    buffer = cumem.zeros(1 << 16, "u1", "pinned")
    address = buffer.ptr
    held["tensor"] = torch.from_dlpack(buffer)
    del buffer
    assert f"{__name__}.held['tensor']" in {
        holder.path for holder in cumem.who_holds(row_of(address))
    }
    held.clear()


def test_pages_that_were_registered_are_held_by_their_array(runtime) -> None:
    held["mine"] = np.zeros(1 << 16, "u1")
    with cumem.register(held["mine"]):
        (row,) = (each for each in cumem.live() if each.kind == "registered")
        assert f"{__name__}.held['mine']" in {h.path for h in cumem.who_holds(row)}
    held.clear()


def test_live_without_a_record_says_how_to_get_lines(runtime) -> None:
    kept = cumem.empty_pinned(100)
    assert "CUMEM_RECORD=FILE" in str(cumem.live())
    with cumem.record():
        later = cumem.empty_pinned(100)
        assert "CUMEM_RECORD" not in str(cumem.live())
    assert kept.nbytes == later.nbytes


def test_list_of_what_lives_is_whole_where_a_collection_ends_what_it_lists(
    runtime,
) -> None:
    """A garbage collection that frees a listed block must not damage the list.

    Up to Python 3.11, a collection can run while a row of the list is allocated. The
    program's callback frees a registration at each collection.
    """
    done = programs.run(
        "-c",
        """
import gc
import numpy as np
import cumem
from cumem import _core

registered = [cumem.register(np.zeros(1000)) for _ in range(300)]

def collected(phase, info):
    while phase == "start" and registered:
        registered.pop().close()

_core._living()
gc.callbacks.append(collected)
gc.set_threshold(1, 1000, 1000)
rows = _core._living()
gc.callbacks.clear()
assert {type(row).__name__ for row in rows} == {"_LivingBlock"}
print(len(rows))
""",
        PYTHONMALLOC="malloc",
        MALLOC_PERTURB_="165",
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 300
