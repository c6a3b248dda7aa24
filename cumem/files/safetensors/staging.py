# SPDX-License-Identifier: Apache-2.0
"""Copies tensors of devices into page-locked memory while the caller computes on.

A tensor must not change before it is copied. The streams of the caller are made to wait for
that, on the device, and how long they wait depends on who changes the tensor next:

- By default that may be any work, so the streams wait from the call on.
- The parameters of a model and the state of its optimizer change only in the next step of
  the optimizer. If the caller names the optimizer, the forward and backward pass of the
  next batch run beside the copies, and only the stream of the step waits (`_Steps`).

Example: the weights, an average of them, and AdamW's moments are saved with
``before=adamw``. The average is copied first, and the caller's stream waits for it. The
weights and moments are copied behind it. ``adamw.step()`` first calls a hook, which makes
the stream of that thread wait until they are copied.

If there is not enough page-locked memory for all tensors, a thread writes the others to the
file, and the device copies them piece by piece. No stream can wait for that, so the host
does: the call, for tensors that are nobody's, and otherwise the hook of the step.

A tensor belongs to an optimizer if its memory lies within that of one of the optimizer's
parameters, or of the tensors in its state. All others count as nobody's, which is safe: it
only makes the caller's stream wait earlier.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from cumem import _core
from cumem.base.kinds import is_on_device
from cumem.devices.device import current_streams
from cumem.files.raw import write_part_behind
from cumem.files.safetensors.exported import exported


class _Copy(NamedTuple):
    """Copies that were begun together on one device, or of which the host makes a part."""

    device: int
    streams: list[_core.Stream]  #: the caller's current streams at the call
    end: _core.Transfer  #: ends with the copies, and keeps no page-locked memory

    def order(self, streams: list[_core.Stream]) -> None:
        """Make streams wait for the copies.

        The host waits as well if it makes a part of the copies, or if a stream captures a
        graph, since such a stream cannot wait for work outside of it.
        """
        for stream in streams:
            if stream.is_capturing:
                self.wait()
                continue
            try:
                self.end.order(stream)
            except (RuntimeError, OSError):
                if self.wait():
                    raise  # the stream refuses

    def wait(self) -> bool:
        """Wait on the host until no copy reads the tensors any more.

        Returns False if a copy has failed, which the transfer of the file reports.
        """
        try:
            self.end.wait()
        except (RuntimeError, OSError):
            return False
        return True

    def is_over(self) -> bool:
        if self.end.done:
            self.wait()  # so that its failure counts as read
        return self.end.done


class _Steps:
    """The hook of an optimizer, with the copies that the next step must wait for.

    PyTorch goes through the dict of an optimizer's hooks while it calls them, so a hook can
    remove neither itself nor, from another thread, anything else. Each optimizer therefore
    gets one hook at its first save, and keeps it. A step that need not wait for anything
    finds an empty list.
    """

    def __init__(self) -> None:
        self._pending: list[_Copy] = []

    def add(self, copy: _Copy) -> None:
        # An optimizer that is saved often and makes no step would collect old copies.
        self._pending[:] = [each for each in self._pending if not each.is_over()]
        self._pending.append(copy)

    def __call__(self, optimizer: object, args: object, kwargs: object) -> None:
        """Make the streams that the step may use wait; PyTorch calls this before it."""
        while self._pending:  # Ctrl-C leaves those for which no stream waits yet
            copy = self._pending[0]
            copy.order(current_streams(copy.device))
            del self._pending[0]

    def settle(self) -> None:
        """Make the streams of the calls wait, as the optimizer makes no more steps.

        Its parameters may live on, and another optimizer may change them.
        """
        while self._pending:
            copy = self._pending.pop()
            # A stream that was closed gets no more work.
            copy.order([stream for stream in copy.streams if not stream.closed])


#: The hooks of the optimizers that have been named in a call.
_steps: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()


def _steps_of(optimizer: Any) -> _Steps:
    steps = _steps.get(optimizer)
    if steps is None:
        steps = _Steps()
        optimizer.register_step_pre_hook(steps)
        weakref.finalize(optimizer, steps.settle).atexit = False
        _steps[optimizer] = steps
    return steps


class _Span(NamedTuple):
    """Addresses of a device's memory; `end` is the one behind the last byte."""

    begin: int
    end: int
    is_dense: bool  #: an element is at every place


def _span(data: _core.Buffer) -> _Span:
    reaches = [
        stride * (length - 1)
        for length, stride in zip(data.shape, data.strides, strict=True)
    ]
    begin = data._address + sum(reach for reach in reaches if reach < 0)
    end = data._address + sum(reach for reach in reaches if reach > 0) + data.itemsize
    return _Span(begin, end, end - begin == data.nbytes)


def _tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors in the state of an optimizer, however they are nested."""
    if hasattr(value, "to_local"):  # a DTensor, of which this process has a part
        yield value.to_local()
    elif hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_of(value.values())
    elif isinstance(value, (list, tuple)):
        yield from _tensors_of(value)


def _tensors_of(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from _tensors_in(value)


def _spans_of(optimizer: Any) -> list[_Span]:
    """Return where the tensors of an optimizer are, in the order of their addresses."""
    groups = [group["params"] for group in optimizer.param_groups]
    spans = []
    for tensor in _tensors_in([*groups, dict(optimizer.state)]):
        try:
            data, _ = exported(tensor)
        except (TypeError, ValueError, BufferError):  # such as a sparse tensor
            continue
        if is_on_device(data.kind) and data.nbytes > 0:
            spans.append(_span(data))
    return sorted(span for span in spans if span.is_dense)


class Owners:
    """Which optimizers the tensors of a call belong to."""

    def __init__(self, before: Any) -> None:
        self._optimizers: list[Any] = []
        self._spans: list[list[_Span]] = []
        if before is not None:
            for each in before if isinstance(before, (list, tuple)) else [before]:
                self._add(each)

    def _add(self, optimizer: Any) -> None:
        try:
            spans = _spans_of(optimizer)
            _steps_of(optimizer)
        except (AttributeError, TypeError) as error:
            raise TypeError(
                "before must be an optimizer of PyTorch with hooks for its steps, or a "
                f"list of such, not {type(optimizer).__name__}"
            ) from error
        self._optimizers.append(optimizer)
        self._spans.append(spans)

    def find(self, data: _core.Buffer) -> tuple[int, ...]:
        """Return the numbers of the optimizers that change a tensor of a device."""
        if not self._spans:
            return ()
        span = _span(data)
        found = []
        for number, spans in enumerate(self._spans):
            at = bisect.bisect_right(spans, span.begin, key=operator.itemgetter(0)) - 1
            if at >= 0 and span.end <= spans[at].end:
                found.append(number)
        return tuple(found)

    def wait_at_step(self, owners: tuple[int, ...], copy: _Copy) -> None:
        """Let the next step of each of some optimizers wait for copies."""
        for number in owners:
            _steps_of(self._optimizers[number]).add(copy)


class Staging:
    """Copies of tensors of devices in page-locked memory, which the devices make.

    The copies of a device are made on a stream of their own, beside the work that the
    caller's streams get meanwhile from other threads. Tensors that belong to no optimizer
    come first, since `order` makes those streams wait for them. Then come the tensors of
    each optimizer, for which its next step waits.
    """

    def __init__(self, owners: Owners) -> None:
        self.owners = owners
        self._pairs: dict[Any, list[tuple[_core.Buffer, _core.Buffer]]] = {}
        self._begun: list[tuple[tuple[int, ...], _Copy]] = []
        self._sides: dict[int, tuple[_core.Stream, list[_core.Stream]]] = {}

    def add(self, data: _core.Buffer) -> _core.Buffer:
        """Return the page-locked memory that the contents of `data` will be copied to."""
        made: _core.Buffer = _core.empty(
            data.shape, data.dtype, "pinned", device=data.device
        )
        key = _index_of(data), self.owners.find(data)
        self._pairs.setdefault(key, []).append((made, data))
        return made

    def begin(self) -> None:
        """Begin the copies, after the work that the caller's streams have so far."""
        for (device, owners), pairs in sorted(self._pairs.items(), key=_key):
            side, streams = self._side(device)
            _core.copy_many_async(pairs, stream=side)
            # The transfer of these copies would keep the page-locked memory alive until
            # the next step, and this one does not.
            copy = _Copy(device, streams, side.record()._follow())
            self._begun.append((owners, copy))
        self._pairs.clear()

    def write(
        self,
        file: io.BufferedWriter,
        ranges: Sequence[tuple[int, _core.Buffer]],
        name: str,
    ) -> _core.Transfer | None:
        """Begin to write tensors of optimizers to a file that is not complete with them.

        Each range is an offset and a tensor. The answer is None if there are none.
        """
        if not ranges:
            return None
        with contextlib.ExitStack() as stack:
            for device in {_index_of(data) for _, data in ranges}:
                stack.enter_context(self._side(device)[0])
            transfer = write_part_behind(file, ranges, name)
        for device, owners in {
            (_index_of(data), self.owners.find(data)) for _, data in ranges
        }:
            copy = _Copy(device, self._side(device)[1], transfer)
            self._begun.append((owners, copy))
        return transfer

    def order(self) -> None:
        """Make the caller's streams, or the next steps, wait until the copies are made."""
        for owners, copy in self._begun:
            if owners:
                self.owners.wait_at_step(owners, copy)
            else:
                copy.order(copy.streams)

    def _side(self, device: int) -> tuple[_core.Stream, list[_core.Stream]]:
        """Return the stream of the copies, and those of the caller, which it is behind."""
        if device not in self._sides:
            streams = current_streams(device)
            side = _core.Stream(device=device)
            for stream in streams:
                side.wait(stream)
            self._sides[device] = side, streams
        return self._sides[device]

    def ends(self) -> list[_core.Transfer]:
        """Return a transfer of no bytes for each device, which ends with its copies."""
        # The copies of a device are on one stream, so the last of them ends last.
        last = {copy.device: copy.end for _, copy in self._begun}
        return list(last.values())


def _index_of(data: _core.Buffer) -> int:
    device: Any = data.device  # only memory of the host has none
    index: int = device.index
    return index


def _key(item: tuple[Any, object]) -> Any:
    return item[0]
