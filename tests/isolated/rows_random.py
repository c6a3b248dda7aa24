# SPDX-License-Identifier: Apache-2.0
"""Copy random rows by index, and compare all bytes of both ends with NumPy's result.

    python rows_random.py [--cases 100000] [--seed 1] [--first 0] [--processes N]
                          [--backend cuda] [--json FILE]

Each case copies rows of 1 to 4,096 bytes between two pieces of memory of any kinds, which
may be one and the same. Dtypes, layers, gaps, strides, directions and addresses are random.
So are the numbers of the rows, which may be of any width, negative, repeated in the source,
or left out, and which are on the host or on a device. The call blocks, or it runs on a
stream or in the background, and the contents of its ends and its numbers may still be on
their way when it is made.

Some numbers are wrong. Then the call must raise its error, and the bytes must be those that
the error promises. Memory is read at its address, without cumem. The seed and
the number of a case decide everything about it, so that one case can be run again, by a
command that a failure prints. The exit status is 0 if every byte was right.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import faulthandler
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))


# isort: split
from torture.boxes import Box, Raw, in_own_pages
from torture.random_rows import NO_ROW, TWICE, Case, as_numbers, draw

import cumem
from cumem import info

KIB = 1 << 10
LARGEST = 256 * KIB  # the size of each piece of memory
#: Memory that a device reaches, so that its kernel may read numbers there.
REACHED = ("device", "pinned", "mapped", "managed")
KINDS = (*REACHED, "device", "other device", "numpy", "host", "registered", "memmap")
NUMBERS = ("list", "numpy", "numpy", "pinned", "managed", "device", "device", "late")
WAYS = ("blocking", "stream", "stream", "background", "plan", "layers")
SPOILED = 0.08
PATIENCE = 120  # seconds that one case may take, on a machine with other work
CASES_OF_A_TASK = 250


class WrongError(Exception):
    """Raised if a byte or an error is not what it should be."""


class Memories:
    """Memory of all kinds, made once and used by all cases of a process."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.folder = folder
        self.devices = cumem.device_count()
        self.raw = Raw(cumem.backend() == "emulated")
        noise = np.random.default_rng(seed).integers(0, 256, 4 * LARGEST, "u1")
        self.noise = cumem.array(noise, kind="pinned")
        self.content = noise
        self.made: dict[tuple[str, str], tuple[Any, Any]] = {}
        self.streams = [
            [cumem.Stream(device=device) for _ in range(2)]
            for device in range(self.devices)
        ]

    def kind(self, rng: random.Random) -> str:
        """Choose a kind of memory that there is."""
        kind = rng.choice(KINDS)
        return "device" if kind == "other device" and self.devices < 2 else kind

    def memory(self, kind: str, end: str) -> Any:
        """Return the memory of a kind that serves as target or source."""
        if (kind, end) not in self.made:
            self.made[kind, end] = self.make(kind, end)
        return self.made[kind, end][0]

    def make(self, kind: str, end: str) -> tuple[Any, Any]:
        if kind == "numpy":
            return np.zeros(LARGEST, "u1"), None
        if kind == "host":
            return cumem.asbuffer(np.zeros(LARGEST, "u1")), None
        if kind == "registered":
            registration = cumem.register(in_own_pages(np.zeros(LARGEST, "u1")))
            return registration.buffer, registration
        if kind == "memmap":
            path = self.folder / f"{os.getpid()}-{end}"
            path.write_bytes(bytes(LARGEST))
            return np.memmap(path, "u1", "r+"), None
        if kind == "other device":
            return cumem.zeros(LARGEST, "u1", "device", device=1), None
        return cumem.zeros(LARGEST, "u1", kind), None

    def twin(self, end: str) -> Any:
        """Map the file of a memmap once more, and return that array."""
        if ("twin", end) not in self.made:
            path = self.folder / f"{os.getpid()}-{end}"
            self.made["twin", end] = np.memmap(path, "u1", "r+"), None
        return self.made["twin", end][0]


def box_of(memory: Any, kind: str, content: np.ndarray) -> Box:
    """Make a box of the beginning of some memory, which must have these contents."""
    device = 1 if kind == "other device" else 0
    kind = "device" if kind == "other device" else kind
    return Box(memory[: content.size], kind, device, content.copy())


def drop_numbers(rows: dict[str, Any]) -> None:
    """Overwrite numbers on the host, since the call has copied them, and drop all
    numbers.
    """
    for numbers in rows.values():
        if isinstance(numbers, np.ndarray):
            numbers[...] = 0
    rows.clear()


class Run:
    """One case, with its memory and its call."""

    def __init__(self, memories: Memories, seed: int, number: int) -> None:
        self.memories = memories
        self.rng = rng = random.Random(f"{seed} {number}")
        self.to_kind, self.of_kind = memories.kind(rng), memories.kind(rng)
        self.one_memory = rng.random() < 0.2
        if self.one_memory:
            self.of_kind = self.to_kind
        self.case = self.drawn()
        self.way = rng.choice(WAYS)
        if self.can_be_taken() and rng.random() < 0.3:
            self.way = "take"
        self.places = {name: rng.choice(NUMBERS) for name in ("dst_rows", "src_rows")}
        self.max_sms = rng.choice((None, None, None, 1, 3))
        self.streams = memories.streams[self.device()]
        self.arriving: list[cumem.Transfer] = []
        self.route = ""
        # A plan copies twice. If the ends overlap, the second copy moves the rows once
        # more.
        is_planned = self.way in ("plan", "layers")
        self.rounds = 2 if is_planned and not self.case.wrong else 1

    def drawn(self) -> Case:
        """Draw cases until one fits into its memory, which is larger in later tries."""
        rng = self.rng
        for attempt in range(100):
            rooms = [
                min(LARGEST, int(2 ** rng.uniform(9, 16)) << attempt // 8)
                for _ in range(2)
            ]
            if self.one_memory:
                rooms[1] = rooms[0]
            case = draw(rng, *rooms, spoiled=SPOILED)
            if case is not None:
                self.rooms = rooms
                return case
        raise AssertionError("no case fits into the memory")

    def can_be_taken(self) -> bool:
        """Return whether the case is one that `take_rows` can do."""
        case = self.case
        return case.dst_rows is None and len(case.to.views) == 1

    def device(self) -> int:
        """Return the device whose streams the call may get."""
        kinds = (self.to_kind, self.of_kind)
        is_other = "other device" in kinds and "device" not in kinds
        return 1 if is_other else 0

    def __repr__(self) -> str:
        ends = f"{self.to_kind} <- {self.of_kind}{' (one)' if self.one_memory else ''}"
        return (
            f"{self.way}, {ends}, numbers {self.places}, max_sms={self.max_sms}, "
            f"{self.case!r}"
        )

    # -- memory before and after

    def fill(self, kind: str, end: str, room: int) -> Box:
        """Give memory new contents, which may arrive late, and return it as a box."""
        memories, rng = self.memories, self.rng
        begin = rng.randrange(memories.content.size - room + 1)
        box = box_of(
            memories.memory(kind, end), kind, memories.content[begin : begin + room]
        )
        source = memories.noise[begin : begin + room]
        if kind in REACHED and rng.random() < 0.3:
            stream = rng.choice(memories.streams[box.device])
            self.arriving.append(cumem.copy_async(box.memory, source, stream=stream))
        else:
            cumem.copy(box.memory, source)
        return box

    def settle(self) -> None:
        """Wait for the contents of both ends if no copy of rows has waited for them."""
        for transfer in self.arriving:
            transfer.wait()

    def put(self, array: np.ndarray, place: str) -> Any:
        """Put numbers into memory, where they may arrive late."""
        device = self.device()
        if place != "late":
            return cumem.array(array, kind=place, device=device)  # type: ignore[call-overload]
        there = cumem.full(array.shape, 99, array.dtype, "device", device=device)
        pinned = cumem.array(array, kind="pinned")
        stream = self.rng.choice(self.memories.streams[device])
        cumem.copy_async(there, pinned, stream=stream)
        return there

    # -- the call

    def check(self) -> None:
        """Run the case, and raise a WrongError if anything is wrong."""
        case, rng = self.case, self.rng
        target = self.fill(self.to_kind, "target", self.rooms[0])
        source = target
        if not self.one_memory:
            source = self.fill(self.of_kind, "source", self.rooms[1])
        elif self.to_kind == "memmap" and rng.random() < 0.5:
            twin = self.memories.twin("target")
            source = box_of(twin, "memmap", target.expect)
            source.expect = target.expect
        rows = {
            name: as_numbers(rng, getattr(case, name), place, self.put)
            for name, place in self.places.items()
        }
        if self.way == "take":
            self.take(source, rows["src_rows"])
            return
        before = target.expect.copy()
        raised = self.call(target, source, rows)
        self.judge(raised)
        if raised is not None or case.count == 0:
            self.settle()
        self.expect(target, source)
        self.compare(target, before)
        if not self.one_memory:
            self.compare(source, source.expect)

    def take(self, source: Box, rows: Any) -> None:
        """Take rows into a new buffer, and compare its bytes with NumPy's."""
        case = self.case
        read = case.sources(source.expect)[0]
        stream = self.memories.streams[source.device][0]
        try:
            got = cumem.take_rows(
                case.sources(source.memory)[0],
                rows,
                stream=self.rng.choice((None, stream)),
                max_sms=self.max_sms,
            )
        except (IndexError, ValueError) as error:
            self.judge(error)
            return
        self.judge(None)
        if case.count == 0:
            self.settle()
        wanted = np.frombuffer(read[case.src_rows].tobytes(), "u1")
        if wanted.size:
            found = Box(got, "device", got.device.index, wanted)
            self.compare(found, np.zeros_like(wanted))
        self.compare(source, source.expect)

    def call(self, target: Box, source: Box, rows: Any) -> Exception | None:
        """Make the copy in one of the ways, and return the error that it raises, if any."""
        case, rng = self.case, self.rng
        ends = [case.targets(target.memory), case.sources(source.memory)]
        if len(ends[0]) == 1 and rng.random() < 0.7:
            ends = [ends[0][0], ends[1][0]]
        if self.way in ("plan", "layers"):
            return self.by_plan(ends, rows)
        try:
            if self.way == "blocking":
                stream = rng.choice((None, self.streams[0]))
                cumem.copy_rows(*ends, **rows, stream=stream, max_sms=self.max_sms)
                return None
            used = self.streams[1] if self.way == "stream" else None
            transfer = cumem.copy_rows_async(
                *ends, **rows, stream=used, max_sms=self.max_sms
            )
        except (IndexError, ValueError) as error:
            return error
        drop_numbers(rows)
        ends.clear()
        return self.wait(transfer, used)

    def by_plan(self, ends: list[Any], rows: Any) -> Exception | None:
        """Make a plan and copy by it: all layers together, or one after the other."""
        stream = self.rng.choice((None, self.streams[0]))
        try:
            plan = cumem.RowPlan(*ends, **rows, max_sms=self.max_sms)
        except (IndexError, ValueError) as error:
            return error
        drop_numbers(rows)
        raised: Exception | None = None
        with plan:
            for _ in range(self.rounds):
                copied = self.copied if self.way == "plan" else self.copied_by_layer
                raised = copied(plan, stream)
            told = None
            try:
                plan.check()
            except IndexError as error:
                told = error
            if raised is not None and self.read_by_kernel() and told is None:
                raise WrongError("a copy has raised, but check() says nothing")
            plan.check()  # once it has told of the wrong numbers, it is silent
        return raised

    def copied_by_layer(self, plan: Any, stream: Any) -> Exception | None:
        """Begin all layers before one is waited for, and return an error if all raise."""
        try:
            transfers = plan.copy_layers(stream=stream)
        except (IndexError, ValueError) as error:
            return error
        errors = [self.wait(transfer, stream) for transfer in transfers]
        if len({type(error) for error in errors}) > 1:
            raise WrongError(f"not every layer has raised: {errors}")
        return errors[0]

    def copied(self, plan: Any, stream: Any) -> Exception | None:
        """Copy all layers by a plan, and return the error that it raises, if any."""
        try:
            if self.rng.random() < 0.5:
                plan.copy(stream=stream)
                return None
            transfer = plan.copy_async(stream=stream)
        except (IndexError, ValueError) as error:
            return error
        return self.wait(transfer, stream)

    def wait(self, transfer: Any, stream: Any) -> Exception | None:
        """Wait for the copy in some way, and return the error that it raises, if any."""
        self.route = transfer.route
        how = self.rng.randrange(3)
        try:
            if stream is not None and how > 0:
                stream.synchronize()
            elif how == 0:
                other = cumem.Stream(device=self.device())
                transfer.order(other)
                other.synchronize()
            transfer.wait()
        except IndexError as error:
            return error
        return None

    # -- what has to be there

    def read_by_kernel(self) -> bool | None:
        """Return whether a kernel reads the wrong numbers, or None if that is not known."""
        place = self.places[self.case.wrong_side]
        if place not in ("device", "late"):
            return False
        kinds = {self.to_kind, self.of_kind}
        if kinds & {"numpy", "host", "memmap"}:
            return False
        return True if kinds <= {*REACHED} else None

    def judge(self, raised: Exception | None) -> None:
        """Fail unless the call raised the error that the numbers must cause, or none."""
        case = self.case
        wanted: tuple[type[Exception] | None, ...] = (None,)
        if case.wrong == NO_ROW:
            wanted = (IndexError,)
        elif case.wrong == TWICE:
            by_kernel = self.read_by_kernel()
            wanted = (None,) if by_kernel else (ValueError,)
            if by_kernel is None:
                wanted = (None, ValueError)
        kind = None if raised is None else type(raised)
        if kind not in wanted:
            raise WrongError(f"raised {raised!r}, and not {wanted}") from raised

    def expect(self, target: Box, source: Box) -> None:
        """Work out which bytes the target has now."""
        case = self.case
        by_kernel = self.read_by_kernel() if case.wrong else True
        if by_kernel is False:
            return  # the call found the wrong number before any byte was written
        found = self.memories.raw.read(target)
        if by_kernel is None and np.array_equal(found, target.expect):
            return
        by_layer = self.way == "layers"
        for _ in range(self.rounds):
            read = target if self.one_memory else source
            target.expect = case.after(
                target.expect, read.expect, found, by_layer=by_layer
            )

    def compare(self, box: Box, before: np.ndarray) -> None:
        """Fail if the bytes of a box are not what they must be."""
        found = self.memories.raw.read(box)
        if np.array_equal(found, box.expect):
            return
        different = np.flatnonzero(found != box.expect)
        old = int(np.count_nonzero(found[different] == before[different]))
        raise WrongError(
            f"{different.size} bytes of {box!r} are wrong, from {different[0]} to "
            f"{different[-1]}, {old} of them as they were before"
        )


# -- many cases ------------------------------------------------------------------------

memories_of_process: Memories | None = None


def begin_process(seed: int, folder: str) -> None:
    global memories_of_process
    faulthandler.enable()
    memories_of_process = Memories(seed, Path(folder))


def run_cases(
    seed: int, numbers: range, talks: bool = False
) -> tuple[Counter[str], list[str]]:
    """Check some cases. Returns counts of what they covered, and what was wrong."""
    assert memories_of_process is not None
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for number in numbers:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        run = Run(memories_of_process, seed, number)
        if talks:
            print(f"case {number}: {run!r}", flush=True)
        try:
            run.check()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if not isinstance(error, WrongError):
                reason += "\n" + traceback.format_exc()
            wrong.append(f"{again(seed, number)}\n  {run!r}\n  {reason}")
        case = run.case
        counts["rows"] += case.count * len(case.to.views)
        counts["nbytes"] += case.nbytes
        counts["compared_nbytes"] += sum(run.rooms)
        counts[f"{run.to_kind} from {run.of_kind}"] += 1
        counts[f"way {run.way}"] += 1
        counts[f"wrong: {case.wrong or 'nothing'}"] += 1
        if run.route:
            counts[f"route {run.route}"] += 1
        for name, place in run.places.items():
            if getattr(case, name) is not None:
                counts[f"numbers {place}"] += 1
        if run.one_memory:
            counts["one memory"] += 1
    faulthandler.cancel_dump_traceback_later()
    return counts, wrong


def again(seed: int, number: int) -> str:
    """Return the command that runs a case again."""
    backend = cumem.backend()
    return (
        f"python tests/isolated/rows_random.py --seed {seed} --first {number} "
        f"--cases 1 --backend {backend}"
    )


def run_all(options: argparse.Namespace, folder: str) -> tuple[Counter[str], list[str]]:
    """Check all cases, in several processes if that was asked for."""
    numbers = range(options.first, options.first + options.cases)
    tasks = [
        numbers[i : i + CASES_OF_A_TASK]
        for i in range(0, len(numbers), CASES_OF_A_TASK)
    ]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    if options.processes == 1:
        begin_process(options.seed, folder)
        for task in tasks:
            found = run_cases(options.seed, task, options.verbose)
            counts.update(found[0])
            wrong += found[1]
        return counts, wrong
    with concurrent.futures.ProcessPoolExecutor(
        options.processes,
        multiprocessing.get_context("spawn"),
        begin_process,
        (options.seed, folder),
    ) as pool:
        futures = {pool.submit(run_cases, options.seed, task): task for task in tasks}
        for future in concurrent.futures.as_completed(futures):
            task = futures[future]
            try:
                found = future.result()
            except concurrent.futures.process.BrokenProcessPool:
                wrong.append(
                    f"a process died; one of these did it: --seed {options.seed} --first "
                    f"{task.start} --cases {len(task)} --processes 1 --verbose"
                )
                continue
            counts.update(found[0])
            wrong += found[1]
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of a case")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--backend", choices=("cuda", "emulated"))
    parser.add_argument("--verbose", action="store_true", help="with one process")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.processes = max(1, min(options.processes, options.cases // 50))
    if options.backend is not None:
        os.environ["CUMEM_BACKEND"] = options.backend
    os.environ.setdefault("CUMEM_EMULATED_DEVICES", "2")
    started, begin = datetime.now(UTC), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cumem-rows-") as folder:
        counts, wrong = run_all(options, folder)
    seconds = time.monotonic() - begin
    result = {
        "commit": info.commit(),
        "started": started.isoformat(timespec="seconds"),
        "machine": f"{cumem.Device(0).name}, {len(os.sched_getaffinity(0))} cores",
        "emulated": cumem.backend() == "emulated",
        "seed": options.seed,
        "first": options.first,
        "cases": options.cases,
        "processes": options.processes,
        "seconds": round(seconds, 1),
        "wrong": wrong,
        "covered": dict(sorted(counts.items())),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for text in wrong[:20]:
        print(f"WRONG: {text}", file=sys.stderr)
    print(json.dumps(result["covered"], indent=1))
    print(
        f"{options.cases} cases from {options.first} on, seed {options.seed}, "
        f"{seconds:.0f} s: {len(wrong)} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
