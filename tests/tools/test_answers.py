# SPDX-License-Identifier: Apache-2.0
"""Tests of `to_dict()`, by which every answer of the package can be written as JSON.

An answer is an object of a public class that reports something, such as statistics. `MAKES`
makes one of each class. The last tests are about figures in answers: memory that copies use
for staging is counted apart from the user's memory.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import session

import cumem
from cumem import info

PAGE = Path(__file__).parents[2] / "docs" / "logging.md"
MIB = 1 << 20

#: Public classes that are not answers: objects to work with, and warnings.
OTHERS = {
    *("Buffer", "CancelledError", "Device", "DeviceBuffer"),
    *("EmulationWarning", "Event", "HostBuffer", "LimitBlock", "ManagedBuffer"),
    *("ManagedThrashWarning", "MappedBuffer", "OutOfMemoryHook", "PinnedBuffer"),
    *("NpzDict", "PinnedCollate", "Pool", "Registration", "SafetensorsDict"),
    *("Record", "Region", "RowPlan", "SafetensorsError", "numpy_pinned"),
    *("Stream", "Workspace"),
}
#: Units that a key of the dict may end in while the attribute's name does not.
UNITS = ("_nbytes", "_seconds")


def held() -> Any:
    """Return who holds a buffer, which is this function."""
    buffer = cumem.empty_pinned(10, "u1")
    return cumem.who_holds(buffer)


def living() -> Any:
    """Return which buffers are alive, one of which a record has seen being made."""
    with cumem.record(stacks=True):
        buffer = cumem.empty_pinned(10, "u1")
        assert buffer.nbytes == 10
        return cumem.live()


def copied() -> Any:
    """Measure two copies through staging memory, a plain one and a transposed one."""
    with cumem.measure() as m:
        cumem.copy(cumem.empty_device(8 * MIB, "u1"), np.ones(8 * MIB, "u1"))
        turned = np.ones((1600, 1500), "f4").T
        cumem.copy(cumem.empty_device(turned.shape, "f4"), turned)
    return m


def shortage() -> cumem.OutOfMemoryError:
    with pytest.raises(cumem.OutOfMemoryError) as caught:
        cumem.Pool("device", limit=MIB).allocate(64 * MIB)
    return caught.value


def failure() -> cumem.CudaError:
    stream = cumem.Stream()
    session.testing.plan_fault("event_record", 1, 998)
    with pytest.raises(cumem.CudaError) as caught:
        stream.record()
    session.testing.plan_fault(None, 0)
    return caught.value


def snapshot() -> cumem.types.Snapshot:
    pool = cumem.Pool("pinned")
    kept = [pool.allocate(1000), pool.allocate(100)]
    del kept[0]
    return pool.snapshot()


def transfer() -> cumem.Transfer:
    handle = cumem.copy_async(cumem.empty_device(10), np.ones(10))
    handle.wait()
    return handle


def header(folder: Path) -> cumem.types.SafetensorsHeader:
    path = folder / "a.safetensors"
    cumem.save_safetensors(path, {"w": np.ones((4, 2), "f4")}, metadata={"by": "me"})
    return cumem.read_safetensors_header(path)


#: The public classes, by their names.
CLASSES = {
    name: value
    for face in (cumem, cumem.types)
    for name in face.__all__
    if isinstance(value := getattr(face, name), type)
}
#: For each class a function that makes an answer. Its argument is an empty folder.
MAKES: dict[str, Callable[[Path], Any]] = {
    "About": lambda _: cumem.info.about(),
    "Block": lambda _: snapshot().blocks[0],
    "Configuration": lambda _: cumem.configure(),
    "Counters": lambda _: cumem.stats().total,
    "CudaError": lambda _: failure(),
    "DeviceMemory": lambda _: cumem.memory_info(),
    "Explanation": lambda _: cumem.explain(np.ones(3), cumem.empty_pinned(3)),
    "HostMemory": lambda _: cumem.memory_info("host"),
    "Measure": lambda _: copied(),
    "Holder": lambda _: held().holders[0],
    "Holders": lambda _: held(),
    "Living": lambda _: living().buffers[0],
    "LivingBuffers": lambda _: living(),
    "Measurement": lambda _: copied().result,
    "OutOfMemoryError": lambda _: shortage(),
    "PoolStats": lambda _: cumem.Pool("pinned", limit="64MiB").stats(),
    "Recommendation": lambda _: cumem.recommend("64 MiB"),
    "Residency": lambda _: cumem.zeros(MIB, "u1", "managed").page_residency(),
    "SafetensorsHeader": header,
    "SafetensorsInfo": lambda folder: header(folder).tensors["w"],
    "Segment": lambda _: snapshot().segments[0],
    "Snapshot": lambda _: snapshot(),
    "Stats": lambda _: cumem.stats(),
    "Transfer": lambda _: transfer(),
}


def test_every_public_class_is_an_answer_or_is_known_not_to_be_one() -> None:
    answers = {name for name, value in CLASSES.items() if hasattr(value, "to_dict")}
    assert CLASSES.keys() - answers == OTHERS
    assert answers == MAKES.keys()


def check_plain(value: Any) -> None:
    """Check that a value consists of dicts, lists, numbers, strings, bools and None."""
    if type(value) is dict:
        for key, each in value.items():
            assert type(key) is str
            check_plain(each)
    elif type(value) is list:
        for each in value:
            check_plain(each)
    else:
        assert value is None or type(value) in (int, float, str, bool)


def matches(plain: Any, value: Any) -> bool:
    """Return whether a value of a dict says the same as an attribute."""
    if hasattr(value, "to_dict"):
        return plain == value.to_dict() and says(plain, value)
    if isinstance(value, Mapping):
        return list(plain) == list(value) and all(
            matches(plain[key], each) for key, each in value.items()
        )
    if isinstance(value, tuple):
        return len(plain) == len(value) and all(map(matches, plain, value))
    return plain == (str(value) if isinstance(value, Path) else value)


def says(plain: dict[str, Any], answer: Any) -> bool:
    """Return whether each value of a dict says the same as the answer's attribute."""
    return all(
        matches(each, getattr(answer, attribute_of(key, answer)))
        for key, each in plain.items()
    )


def attribute_of(key: str, answer: Any) -> str:
    """Return the attribute for a key, whose name may lack the key's unit."""
    if not hasattr(answer, key) and key.endswith(UNITS):
        return key.rpartition("_")[0]
    return key


@pytest.mark.parametrize("name", sorted(MAKES))
def test_answer_goes_through_json_and_says_what_its_attributes_do(
    runtime, name, tmp_path
) -> None:
    answer = MAKES[name](tmp_path)
    assert type(answer) is CLASSES[name]
    plain = answer.to_dict()
    check_plain(plain)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    if name in ("CudaError", "OutOfMemoryError"):
        assert plain["message"] == str(answer)
        assert plain["notes"] == getattr(answer, "__notes__", [])
    if name == "Measure":
        answer = answer.result
    assert says(plain, answer)


@pytest.mark.parametrize(
    "name", sorted({*MAKES} & {*cumem.types.__all__} - {"Measure"})
)
def test_pickled_answer_names_the_public_place_and_loads(
    emulated, name, tmp_path
) -> None:
    answer = MAKES[name](tmp_path)
    written = pickle.dumps(answer, protocol=2)
    assert b"ccumem.types\n" + name.encode() in written
    again = pickle.loads(written)
    assert type(again) is CLASSES[name]
    assert again.to_dict() == answer.to_dict()


@pytest.mark.parametrize("name", sorted(MAKES))
def test_every_attribute_of_the_docstring_is_written(emulated, name, tmp_path) -> None:
    kind = CLASSES[name]
    text = next(
        (k.__doc__ for k in kind.__mro__ if "Attributes" in (k.__doc__ or "")), ""
    )
    _, _, attributes = text.partition("Attributes\n")
    names = {
        each.strip()
        for line in re.findall(r"^    (\w[\w, ]*) : ", attributes, re.MULTILINE)
        for each in line.split(",")
    }
    keys = MAKES[name](tmp_path).to_dict().keys()
    assert names <= {key for n in keys for key in (n, n.rpartition("_")[0])}


def test_page_lists_the_keys_of_each_answer(emulated, tmp_path) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    listed = {name: re.findall(r"`(\w+)`", keys) for name, keys in rows}
    counters = list(cumem.types.Counters().to_dict())
    for name, make in MAKES.items():
        if name not in ("Counters", "Measure"):
            keys = list(make(tmp_path).to_dict())
            if name == "PoolStats":
                keys = [key for key in keys if key not in counters]
            assert sorted(listed.pop(name)) == sorted(keys), name
    assert not listed


def test_dict_is_a_copy(emulated) -> None:
    reported = cumem.configure()
    reported.to_dict()["sources"].clear()
    assert reported.to_dict()["sources"] == reported.sources


def test_devices_are_their_indices_and_places_texts(emulated) -> None:
    buffer = cumem.zeros(MIB, "u1", "managed")
    buffer.prefetch_pages("host", stream=cumem.Stream())
    buffer.preferred_location = 0
    reported = json.loads(json.dumps(buffer.page_residency().to_dict()))
    assert reported["preferred_location"] == 0
    assert reported["last_prefetch"] == [[0, MIB, "host"]]


def test_measurement_that_is_not_over_has_no_dict(emulated) -> None:
    with cumem.measure() as m, pytest.raises(RuntimeError, match="not over"):
        m.to_dict()


def test_what_the_command_line_reports_is_plain(emulated) -> None:
    facts = info.collect()
    check_plain(facts)
    host = cumem.memory_info("host").to_dict()
    same = ("pinned_limit_nbytes", "cgroup_limit_nbytes")
    assert {k: facts["machine"][k] for k in same} == {k: host[k] for k in same}
    assert facts["machine"]["memlock_soft_nbytes"] == host["memlock_limit_nbytes"]
    assert facts["devices"][0]["memory_total_nbytes"] == cumem.memory_info().total
    check_plain(cumem.info.about().to_dict())


# -- staging ---------------------------------------------------------------------------


def test_staging_memory_of_copies_is_not_counted_as_the_users(emulated) -> None:
    """Statistics and displays count the memory that copies use apart from the user's."""
    source = np.ones(8 * MIB, "u1")
    buffer = cumem.empty_device(source.size, "u1")
    turned = cumem.empty_device((1500, 1600), "f4")
    kinds, device = cumem.stats().kinds, cumem.memory_info()
    cumem.copy(buffer, source)
    cumem.copy(turned, np.ones((1600, 1500), "f4").T)
    after = cumem.stats()
    assert {
        k: v.reserved_nbytes for k, v in after.kinds.items() if v.reserved_nbytes
    } == {k: v.reserved_nbytes for k, v in kinds.items() if v.reserved_nbytes}
    assert after["pinned"].allocation_count == 0
    staging = {p.kind: p.reserved_nbytes for p in after.pools if p.is_staging}
    assert staging.keys() == {"pinned", "device"}
    assert all(staging.values())
    assert after.staging.reserved_nbytes == sum(staging.values())
    assert after.total.reserved_nbytes == after.staging.reserved_nbytes + sum(
        one.reserved_nbytes for one in after.kinds.values()
    )
    assert after["pinned"].reserved_nbytes == 0
    now, host = cumem.memory_info(), cumem.memory_info("host")
    assert (now.staging, host.staging) == (staging["device"], staging["pinned"])
    assert (now.reserved, now.live) == (device.reserved, device.live)
    assert (host.reserved, host.live, now.outside) == (0, 0, device.outside)
    text = repr(after)
    assert "pinned 0 staging" in text
    assert "staging, all pools" in text
    assert "staging=" in repr(now)
    assert "pinned 0 staging" in after._repr_html_()


def test_limits_count_staging_memory_and_trim_gives_it_back(emulated) -> None:
    cumem.copy(cumem.empty_device(8 * MIB, "u1"), np.ones(8 * MIB, "u1"))
    held = cumem.memory_info("host").staging
    assert held > 0
    cumem.set_limit("pinned", held + MIB)
    big = cumem.empty_pinned(held, "u1")  # staging memory is given back for it
    assert cumem.memory_info("host").staging == 0
    del big
    cumem.copy(cumem.empty_device(8 * MIB, "u1"), np.ones(8 * MIB, "u1"))
    cumem.trim()
    assert cumem.stats().total.reserved_nbytes == 0


def test_copies_use_the_users_free_memory_if_there_is_no_other_for_staging(
    emulated,
) -> None:
    pool = cumem.default_pool("pinned")
    blocks = [pool.allocate(16 * MIB) for _ in range(4)]
    cumem.set_limit("pinned", pool.stats().reserved_nbytes)
    del blocks[1:]
    before = pool.stats().allocation_count
    source = np.arange(2 * MIB)
    target = cumem.empty_device(source.shape, source.dtype)
    assert cumem.copy_async(target, source, stream=cumem.Stream()).route == "staged"
    cumem.copy(source, target)
    assert pool.stats().allocation_count > before
    assert cumem.stats().staging.allocation_count == 0
    assert (source == np.arange(2 * MIB)).all()
