# SPDX-License-Identifier: Apache-2.0
"""Makes a record by hand, and random records like those of a training loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cumem.recording.events import EVENT, KINDS, OPS, Frame, Log

MIB = 1 << 20
MACHINE = {"backend": "emulated", "devices": ["cumem emulated device"]}


def event(op: str, kind: str, time_ns: int, **fields: int) -> NDArray[Any]:
    """Make an array of one event."""
    row = np.zeros(1, EVENT)
    row["op"], row["kind"] = OPS.index(op), KINDS.index(kind)
    row["source_kind"], row["time_ns"] = row["kind"], time_ns
    row["device"] = 0 if kind == "device" else -1
    for name, value in fields.items():
        row[name] = value
    return row


def log_of(*events: NDArray[Any], living: list[NDArray[Any]] | None = None) -> Log:
    """Make a record of these events, with two stacks and two tags that they may name."""
    none = np.zeros(0, EVENT)
    rows = np.concatenate([none, *events])
    return Log(
        rows,
        np.concatenate([none, *(living or [])]),
        [
            (),
            (Frame("train.py", 12, "step"), Frame("train.py", 40, "main")),
            (Frame("loader.py", 7, "read"), Frame("train.py", 41, "main")),
        ],
        ("", "loader", "loader/decode"),
        {1: "MainThread", 2: "reader"},
        0,
        1_700_000_000.0,
        int(rows["time_ns"].max(initial=0)) + 1000,
        MACHINE,
    )


def by_hand() -> Log:
    """Make a record whose figures were worked out by hand.

    1 MiB of device memory is live before the record. At these times in µs it then says:

    - 10: a pool reserves 8 MiB on the device
    - 20: 2 MiB of the device are allocated, with stack 1; they are freed at 50
    - 30: 3 MiB of pinned memory, of which 2.5 were asked for, are allocated with stack 2
      and tag 1; they are never freed
    - 40 to 44, and 42 to 46: two transfers go from pinned memory to the device, with 2 MiB
      each
    - 60: the MiB from before the record is freed
    - 70: an allocation of 1 GiB fails
    - 80: the pool gives its 8 MiB back

    The peak of 6 MiB is live from 30 to 50, and 3 MiB are live at the end.
    """
    device, pinned = 0x7F00_0000_0000, 0x7E00_0000_0000
    copied = {"nbytes": 2 * MIB, "value": 4000, "thread": 2, "stack": 2, "tag": 2}
    copied |= {"source": pinned, "source_kind": KINDS.index("pinned"), "stream": 5}
    first = {"address": device + 32 * MIB, "nbytes": MIB, "value": MIB, "thread": 1}
    second = {"address": device, "nbytes": 2 * MIB, "value": 2 * MIB, "thread": 1}
    pool = {"address": device, "nbytes": 8 * MIB, "pool": 1, "thread": 1, "stack": 1}
    third = {"address": pinned, "nbytes": 3 * MIB, "value": 5 * MIB // 2, "thread": 2}
    return log_of(
        event("grow", "device", 10_000, value=8 * MIB, **pool),
        event("allocate", "device", 20_000, stack=1, stream=5, pool=1, **second),
        event("allocate", "pinned", 30_000, stack=2, tag=1, **third),
        event("transfer", "device", 40_000, address=device, **copied),
        event("transfer", "device", 42_000, address=device, **copied),
        event("free", "device", 50_000, stream=5, pool=1, **second),
        event("free", "device", 60_000, **first),
        event(
            "out_of_memory", "device", 70_000, nbytes=1 << 30, value=8 * MIB, thread=1
        ),
        event("trim", "device", 80_000, value=0, **pool),
        living=[event("allocate", "device", 0, **first)],
    )


#: How a program uses memory. Each entry has a kind, the kind's share of all allocations,
#: their mean size in MiB, the largest number of them that are live at once (the slots), and
#: indices of tags.
_USES = (
    ("device", 0.5, 6.0, 900, (3, 4, 5)),
    ("pinned", 0.2, 4.0, 160, (1, 2)),
    ("staging", 0.12, 8.0, 24, (1,)),
    ("managed", 0.08, 12.0, 60, (0,)),
    ("mapped", 0.05, 0.2, 200, (0, 5)),
    ("registered", 0.05, 10.0, 40, (1,)),
)
_TAGS = ("", "loader", "loader/decode", "forward", "backward", "optimizer")
_WORDS = ("block", "attention", "mlp", "norm", "read", "decode", "augment", "collate")


def random_log(count: int, seed: int = 0) -> Log:
    """Make about `count` events like those of a training loop.

    They have stacks, tags and transfers. No two live allocations overlap, and each lies in
    memory that a pool has reserved.
    """
    random = np.random.default_rng(seed)
    spacing = 60_000  # nanoseconds between two events
    duration = count * spacing
    step = duration / max(4, count // 8000)
    parts: list[NDArray[Any]] = []
    for index, (kind, share, mib, slots, tags) in enumerate(_USES):
        number = max(2, int(count * 0.38 * share))
        slots = min(slots, number)
        parts += _uses(random, number, duration, step, slots, mib, (index, kind, tags))
    parts += [_transfers(random, int(count * 0.22), duration, step)]
    parts += [_others(random, max(3, count // 5000), duration)]
    rows = np.concatenate(parts)
    rows = rows[np.argsort(rows["time_ns"], kind="stable")]
    # Allocations of the first moments become blocks that were live before the record.
    early = rows["time_ns"] < step / 50
    living = np.flatnonzero((rows["op"] == 0) & early)
    old = rows[living].copy()
    old["time_ns"] = 0
    grown = np.flatnonzero((rows["op"] == OPS.index("grow")) & early)
    return Log(
        np.delete(rows, np.concatenate([living, grown])),
        old,
        _stacks(),
        _TAGS,
        {100: "MainThread", **{101 + i: f"loader-{i}" for i in range(4)}},
        0,
        1_700_000_000.0,
        duration,
        {"backend": "emulated", "devices": ["cumem emulated device"] * 2},
    )


def _stacks() -> list[tuple[Frame, ...]]:
    """Make 240 stacks of various depths. An event names a stack by its index here."""
    stacks: list[tuple[Frame, ...]] = [()]
    for number in range(240):
        word = _WORDS[number % len(_WORDS)]
        file = "loader.py" if word in ("read", "decode", "collate") else "model.py"
        depth = 3 + number % 9
        inner = Frame(f"project/{file}", 20 + number // 4, f"{word}_{number % 5}")
        outer = [Frame("project/train.py", 90 + i, f"level_{i}") for i in range(depth)]
        stacks.append((inner, *outer))
    return stacks


def _uses(
    random: Any,
    number: int,
    duration: int,
    step: float,
    slots: int,
    mib: float,
    use: tuple[int, str, tuple[int, ...]],
) -> list[NDArray[Any]]:
    """Make allocations that use `slots` in turn, their frees, and the pool's growth."""
    index, kind, tags = use
    # Allocation k is in slot k % slots, and ends before allocation k + slots begins there.
    times = np.sort(random.integers(1000, duration, number + slots))
    born, next_born = times[:number], times[slots:]
    sizes = np.exp(random.normal(np.log(mib * MIB), 0.8, number)).clip(512, 64 * MIB)
    sizes = sizes.astype(np.int64) // 512 * 512
    rows = np.zeros(number, EVENT)
    rows["op"] = 0
    rows["time_ns"] = born
    rows["address"] = (index + 1 << 40) + (np.arange(number) % slots) * 64 * MIB
    rows["nbytes"], rows["value"] = sizes, sizes - random.integers(0, 500, number)
    rows["stream"] = random.choice([0, 0x55AA10, 0x55AA20], number)
    rows["pool"] = index + 1
    rows["kind"] = rows["source_kind"] = KINDS.index(kind)
    # A pool of device memory grows by pieces of eight slots.
    on = np.arange(number) % slots // 8 % 2
    rows["device"] = on if kind == "device" else -1
    loader = kind in ("pinned", "staging", "registered")
    rows["thread"] = random.integers(101, 105, number) if loader else 100
    rows["tag"] = random.choice(tags, number)
    rows["stack"] = 1 + (random.zipf(1.4, number) * 7 + index * 40) % 240
    frees = rows.copy()
    frees["op"] = 1
    ends = (born // step + 1) * step - random.exponential(step / 6, number)
    early = random.random(number) < 0.4
    ends[early] = born[early] + random.exponential(step / 20, early.sum())
    frees["time_ns"] = np.clip(ends, born + 1, next_born - 1).clip(0, duration - 1)
    kept = random.random(number) > 0.00002
    # A block without a free lives on to the end of the record.
    kept[number - slots :] &= random.random(slots) > 0.3
    frees = frees[(next_born - 1 > born) & kept]
    grown = rows[np.arange(0, slots, 8)].copy()
    grown["op"] = OPS.index("grow")
    grown["nbytes"] = 8 * 64 * MIB
    grown["time_ns"] -= 1
    grown["value"] = np.cumsum(grown["nbytes"])
    return [rows, frees, grown]


def _transfers(random: Any, number: int, duration: int, step: float) -> NDArray[Any]:
    """Make transfers, most of which are at the beginning of a step of the loop."""
    rows = np.zeros(number, EVENT)
    rows["op"] = OPS.index("transfer")
    phase = random.beta(1.2, 4, number)
    rows["time_ns"] = random.integers(0, max(1, int(duration / step)), number) * step
    rows["time_ns"] += (phase * step).astype(np.uint64)
    rows["nbytes"] = np.exp(random.normal(np.log(MIB), 1.2, number)).astype(np.int64)
    rate = random.choice([54.0, 52.0, 25.0], number) * random.uniform(0.8, 1, number)
    rows["value"] = rows["nbytes"] / rate + 4000
    kinds = np.array(
        [KINDS.index(k) for k in ("pinned", "device", "pageable", "managed")]
    )
    source = random.choice(4, number, p=[0.6, 0.25, 0.1, 0.05])
    target = np.where(source == 1, random.choice(2, number), 1)
    rows["source_kind"], rows["kind"] = kinds[source], kinds[target]
    rows["source"], rows["address"] = (
        (1 << 42) + source * 4096,
        (1 << 43) + target * 4096,
    )
    rows["thread"] = random.integers(100, 105, number)
    rows["stack"] = 1 + random.integers(0, 40, number)
    rows["tag"] = random.choice([1, 2, 0], number)
    rows["stream"] = 0x55AA10
    return rows


def _others(random: Any, number: int, duration: int) -> NDArray[Any]:
    """Make prefetches of managed memory, trims and shortages."""
    rows = np.zeros(number, EVENT)
    names = [OPS.index(op) for op in ("trim", "prefetch", "out_of_memory")]
    rows["op"] = random.choice(names, number, p=[0.3, 0.68, 0.02])
    rows["time_ns"] = random.integers(0, duration, number)
    rows["nbytes"] = random.integers(1, 64, number) * MIB
    rows["value"] = np.where(rows["op"] == OPS.index("prefetch"), 0, 8 << 30)
    managed = rows["op"] == OPS.index("prefetch")
    rows["kind"] = np.where(managed, KINDS.index("managed"), KINDS.index("device"))
    rows["source_kind"], rows["thread"], rows["stack"] = rows["kind"], 100, 5
    rows["pool"] = np.where(managed, 0, 1)
    return rows
