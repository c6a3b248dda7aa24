# SPDX-License-Identifier: Apache-2.0
"""Operations that copy rows by index between all kinds of memory, some with wrong
numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import cumem
from torture.boxes import Box
from torture.pending import Pending, follow, limit_pending
from torture.random_rows import NO_ROW, NOTHING, TWICE, Case, as_numbers, draw
from torture.registry import operation
from torture.settings import WrongError

if TYPE_CHECKING:
    from torture.worker import Worker

PLACES = ("list", "numpy", "pinned", "mapped", "managed", "device", "device")


class Rows:
    """A case with both its ends and its numbers."""

    def __init__(self, worker: Worker, spoiled: float = 0.0) -> None:
        rng = worker.rng
        self.worker = worker
        self.target = self.source = worker.take()
        if rng.random() < 0.8:
            # A source that threads share must not be an end of a copy that fails.
            self.source = worker.take() if spoiled else worker.source()
        self.case: Case | None = draw(
            rng, self.target.nbytes, self.source.nbytes, spoiled
        )
        self.places = {name: rng.choice(PLACES) for name in ("dst_rows", "src_rows")}

    def give(self) -> None:
        self.worker.give(self.target)
        if self.source is not self.target:
            self.worker.give_source(self.source)

    def ends(self) -> tuple[Any, Any]:
        assert self.case is not None
        to = self.case.targets(self.target.memory)
        of = self.case.sources(self.source.memory)
        if len(to) == 1 and self.worker.rng.random() < 0.7:
            return to[0], of[0]
        return to, of

    def numbers(self, stream: Any = None) -> dict[str, Any]:
        """Put the numbers into memory, of the stream's device if there is a stream."""
        worker = self.worker

        def put(array: np.ndarray, place: str) -> Any:
            device = worker.device() if stream is None else stream.device
            return cumem.array(array, kind=place, device=device)  # type: ignore[call-overload]

        return {
            name: as_numbers(worker.rng, getattr(self.case, name), place, put)
            for name, place in self.places.items()
        }

    def stream(self) -> Any:
        """Choose a stream for the ends, or None if they are on two devices."""
        devices = {b.device for b in (self.target, self.source) if b.kind == "device"}
        if len(devices) > 1:
            return None
        return self.worker.stream_of(self.target, self.source)

    def written(self, by_layer: bool = False) -> np.ndarray:
        """Return what the target holds after the copy."""
        assert self.case is not None
        target = self.target.expect
        return self.case.after(target, self.source.expect, target, by_layer)


def overwrite(rows: dict[str, Any]) -> None:
    """Overwrite numbers on the host, since the call has copied them, and drop all
    others.
    """
    for numbers in rows.values():
        if isinstance(numbers, np.ndarray):
            numbers[...] = 0
    rows.clear()


@operation(4)
def copy_rows(worker: Worker) -> None:
    rows = Rows(worker)
    if rows.case is not None:
        stream = worker.rng.choice((None, rows.stream()))
        max_sms = worker.rng.choice((None, None, 1, 4))
        numbers = rows.numbers(stream)
        cumem.copy_rows(*rows.ends(), **numbers, stream=stream, max_sms=max_sms)
        rows.target.expect = rows.written()
        worker.verify(rows.target, f"after copy_rows of {rows.source!r}")
    rows.give()


@operation(4)
def copy_rows_begun(worker: Worker) -> None:
    """Begin a copy of rows, for which some later operation waits."""
    rows = Rows(worker)
    if rows.case is None:
        rows.give()
        return
    stream = worker.rng.choice((None, rows.stream()))
    given = None if stream is None else worker.spelled(stream)
    numbers = rows.numbers(stream)
    transfer = cumem.copy_rows_async(*rows.ends(), **numbers, stream=given)
    overwrite(numbers)
    is_ours = rows.source is not rows.target and rows.source not in worker.world.shared
    worker.pending.append(
        Pending(
            transfer,
            stream,
            rows.target,
            rows.source if is_ours else None,
            rows.written(),
            f"after copy_rows_async of {rows.source!r}",
        )
    )
    limit_pending(worker)


@operation(3)
def copy_rows_by_a_plan(worker: Worker) -> None:
    """Copy by a plan once or twice, all layers together or one by one.

    The plan may be closed while its copies are still under way.
    """
    rows = Rows(worker)
    if rows.case is None:
        rows.give()
        return
    stream = worker.rng.choice((None, rows.stream()))
    numbers = rows.numbers(stream)
    by_layer = worker.rng.random() < 0.5
    transfers: list[cumem.Transfer] = []
    max_sms = worker.rng.choice((None, None, 4))
    with cumem.RowPlan(*rows.ends(), **numbers, max_sms=max_sms) as plan:
        overwrite(numbers)
        for _ in range(worker.rng.choice((1, 1, 2))):
            if rows.target.kind == "numpy":  # an array does not know its transfers
                for transfer in transfers:
                    transfer.wait()
            if by_layer:
                transfers += plan.copy_layers(stream=stream)
            elif worker.rng.random() < 0.5:
                plan.copy(stream=stream)
            else:
                transfers.append(plan.copy_async(stream=stream))
            rows.target.expect = rows.written(by_layer)
        if worker.rng.random() < 0.5:
            for transfer in transfers:
                transfer.wait()
    for transfer in transfers:
        transfer.wait()
    worker.verify(rows.target, f"after a plan of rows, {len(transfers)} transfers")
    rows.give()


@operation(2)
def take_rows(worker: Worker) -> None:
    source = worker.source()
    case = draw(worker.rng, source.nbytes, source.nbytes, layers=1)
    if case is not None and case.src_rows is not None:
        place = worker.rng.choice(PLACES)
        numbers = as_numbers(
            worker.rng,
            case.src_rows,
            place,
            lambda array, kind: cumem.array(array, kind=kind),  # type: ignore[call-overload]
        )
        got = cumem.take_rows(case.sources(source.memory)[0], numbers)
        taken = case.sources(source.expect)[0][case.src_rows]
        content = np.frombuffer(taken.tobytes(), "u1")
        box = Box(got, "device", got.device.index, content)
        worker.verify(box, f"after take_rows of {source!r}")
    worker.give_source(source)


@operation(2, main=False)
def copy_rows_by_wrong_numbers(worker: Worker) -> None:
    """Copy by numbers of which one is wrong, and check the error and the bytes.

    Numbers on the host are checked before a byte is written. A kernel that reads them on a
    device leaves the wrong one out.
    """
    rows = Rows(worker, 1.0)
    case = rows.case
    if case is None or case.wrong == NOTHING:
        rows.give()
        return
    numbers = rows.numbers()
    raised: Exception | None = None
    transfer = None
    cancelled = False
    try:
        if worker.rng.random() < 0.5:
            cumem.copy_rows(*rows.ends(), **numbers)
        else:
            transfer = cumem.copy_rows_async(*rows.ends(), **numbers)
            overwrite(numbers)
            cancelled = not follow(worker, transfer)
    except (IndexError, ValueError) as error:
        raised = error
    where = f"after {raised!r}, copy_rows of {rows.source!r} by {case!r}"
    on_device = rows.places[case.wrong_side] == "device"
    expected = {NO_ROW: IndexError, TWICE: ValueError}[case.wrong]
    passes = cancelled or (case.wrong == TWICE and on_device)
    if not (isinstance(raised, expected) or (raised is None and passes)):
        raise WrongError(f"wrong numbers, and not {expected.__name__}: {where}")
    if on_device and not cancelled:
        found = worker.world.raw.read(rows.target)
        written = case.after(rows.target.expect, rows.source.expect, found)
        if not np.array_equal(found, rows.target.expect):
            rows.target.expect = written
    worker.verify(rows.target, where)
    if raised is None or not on_device:
        rows.give()
    # If the copy failed on a device, both ends are dropped and not given back. As after any
    # copy in the background that failed, their next export would raise the failure once
    # more.
