# SPDX-License-Identifier: Apache-2.0
"""Explains by which route a copy would go, and why, and how the work is divided."""

from __future__ import annotations

import dataclasses
from typing import Any, SupportsFloat

from cumem import _core
from cumem.base.answer import Answer
from cumem.base.kinds import is_on_device
from cumem.base.places import found_in
from cumem.base.units import format_nbytes, terminal_width
from cumem.buffers.arguments import hinting, read_flag


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Answer):
    """What a copy would do, as `explain` returns it.

    Attributes
    ----------
    route : str
        The route as in `Transfer.route`, such as ``"direct"`` or ``"staged"``;
        docs/copies.md lists them.
    how : str
        The route in words.
    why : str
        The reason for the route, in a sentence.
    nbytes : int
        The bytes to copy; for a broadcast source, without repetitions.
    pieces : int
        The number of pieces; 1 if the copy is not cut, 0 if there is nothing to copy.
    piece_nbytes : int
        The bytes of the largest piece; those at the end of an axis may be smaller.
    axis : int or None
        The axis of the target along which the copy is cut; None for a single piece.
    threads : int
        The threads of the host that read or write the bytes; 0 if none does.
    chunks : int
        The number of page-locked blocks of `piece_nbytes` bytes that the copy uses at a
        time. It gets fewer of them while other copies use some.
    device : int or None
        The device that does the work; None if only the host works.

    Examples
    --------
    >>> found = cumem.explain(cumem.empty_device(1 << 20), numpy.ones(1 << 20))
    >>> found.nbytes
    8388608
    """

    route: str
    how: str
    why: str
    nbytes: int
    pieces: int
    piece_nbytes: int
    axis: int | None
    threads: int
    chunks: int
    device: int | None

    def _rows(self) -> list[tuple[str, str]]:
        same = self.how == self.route
        route = self.route if same else f"{self.route}: {self.how}"
        rows = [("route", route), ("why", self.why)]
        if self.pieces > 1:
            along = "" if self.axis is None else f" along axis {self.axis}"
            cut = f"{self.pieces} of at most {format_nbytes(self.piece_nbytes)}{along}"
            rows.append(("pieces", cut))
        if self.threads > 0:
            rows.append(("threads", str(self.threads)))
        if self.chunks > 0:
            ring = format_nbytes(self.chunks * self.piece_nbytes)
            rows.append(("chunks", f"{self.chunks}, {ring} of page-locked memory"))
        if self.device is not None:
            rows.append(("device", str(self.device)))
        return rows

    def __repr__(self) -> str:
        import textwrap

        indent = " " * 12
        width = min(terminal_width(), 92)
        lines = (
            textwrap.fill(
                text,
                width,
                initial_indent=f"  {name:<9} ",
                subsequent_indent=indent,
            )
            for name, text in self._rows()
        )
        title = f"cumem.types.Explanation of {format_nbytes(self.nbytes)}"
        return title + "\n" + "\n".join(lines)


@hinting
def explain(
    dst: Any,
    src: Any,
    *,
    stream: object = None,
    blocking: bool = True,
    casting: _core._Casting | None = None,
    scale: SupportsFloat | None = None,
    offset: SupportsFloat | None = None,
) -> Explanation:
    """Return what `copy` would do with these arguments, without copying.

    Parameters
    ----------
    dst, src : Buffer, array, exporter or scalar
        As for `copy`.
    stream : stream, optional
        As for `copy`.
    blocking : bool, default True
        If False, explain `copy_async`.
    casting, scale, offset : optional
        As for `copy`.

    Returns
    -------
    Explanation
        The route with its reason, the pieces and the threads.

    Raises
    ------
    TypeError, ValueError
        As for `copy`.

    Notes
    -----
    This copies nothing and allocates nothing. The answer is for the present thresholds,
    stream and page-locked memory. If target and source overlap, the whole source is read
    first, and `why` says so. Three things show only when a copy is made. The device may
    lack the memory to transpose a source, so that threads of the host do it (``"staged"``
    instead of ``"staged-kernel"``). Other copies may be using all page-locked blocks. And a
    graph that is being captured may be unable to contain the copy.

    Examples
    --------
    >>> found = cumem.explain(cumem.empty_device(1 << 20), numpy.ones(1 << 20))
    >>> found.nbytes, type(found.route).__name__
    (8388608, 'str')
    """
    blocking = read_flag(blocking, "blocking")
    facts = _core._explain(dst, src, stream, blocking, casting, scale, offset)
    return Explanation(
        route=facts.route,
        how=_HOW.get(facts.route, facts.route),
        why=_reason(facts, blocking),
        nbytes=facts.nbytes,
        pieces=facts.pieces,
        piece_nbytes=facts.piece_nbytes,
        axis=facts.axis if facts.axis >= 0 else None,
        threads=facts.threads,
        chunks=facts.chunks,
        device=facts.device if facts.device >= 0 else None,
    )


def _reason(facts: _core._CopyFacts, blocking: bool) -> str:
    reason = _REASONS.get(facts.route, _unknown)(facts, blocking)
    if facts.overlaps:
        reason += "; the ends may overlap, so the source is read whole first"
    if facts.casts and facts.route != "several":
        reason += "; NumPy converts the elements as the host moves them"
    elif facts.from_dtype is not None and facts.route != "several":
        where = "on the device" if facts.converts_on_device else "as the host moves it"
        reason += f"; {facts.from_dtype} becomes {facts.to_dtype} {where}"
    return reason


def _memory(end: _core._EndFacts) -> str:
    if end.kind != "pageable":
        return f"{end.kind} memory"
    if end.is_locked:
        return "registered memory"
    return "ordinary memory" if end.is_whole else "partly registered memory"


def _nothing(facts: _core._CopyFacts, blocking: bool) -> str:
    if facts.nbytes > 0:
        return "target and source are the same memory"
    return "there are no bytes"


def _host(facts: _core._CopyFacts, blocking: bool) -> str:
    ends = f"{_memory(facts.src)} to {_memory(facts.dst)}"
    who = "the calling thread copies" if blocking else "a thread of the host copies"
    if facts.threads > 1:
        who = f"{facts.threads} threads copy"
    return f"the host reaches both ends: {who} from {ends}"


def _direct(facts: _core._CopyFacts, blocking: bool) -> str:
    dst, src = facts.dst, facts.src
    size = format_nbytes(facts.nbytes)
    if is_on_device(dst.kind) and is_on_device(src.kind):
        return f"both ends lie on device {facts.device}, each in one run"
    host = src if is_on_device(dst.kind) else dst
    if facts.is_bounced or facts.is_quick:
        reason = f"each end is one run of only {size}"
        reason += ", which the calling thread copies at once"
        if facts.is_bounced:
            reason += ", through a page-locked block of its own"
        return reason
    if host.is_locked:
        return f"each end is one run, and the device reaches {_memory(host)}"
    up = is_on_device(dst.kind)
    least = facts.staged_up_nbytes if up else facts.staged_down_nbytes
    limit = "at any size" if least >= 1 << 40 else f"below {format_nbytes(least)}"
    reason = f"{size} of {_memory(host)} are one run"
    return f"{reason}, and the driver by itself is faster {limit}"


def _rows_reason(facts: _core._CopyFacts, blocking: bool) -> str:
    run = format_nbytes(facts.run_nbytes)
    return f"rows of {run} lie at equal distances, and the device reaches both ends"


def _peer(facts: _core._CopyFacts, blocking: bool) -> str:
    reason = f"device {facts.src_device} sends to device {facts.device}"
    if facts.loops > 0:
        reason += ": the first gathers the elements, and the second scatters them"
    return reason


def _peer_staged(facts: _core._CopyFacts, blocking: bool) -> str:
    return (
        f"device {facts.src_device} and device {facts.device} do not reach each "
        "other, so the bytes pass through the host, on both links at once"
    )


def _kernel(facts: _core._CopyFacts, blocking: bool) -> str:
    ends = f"{_memory(facts.src)} and {_memory(facts.dst)}"
    if facts.converts_on_device:
        return f"device {facts.device} reaches {ends}, and converts such elements"
    if facts.loops == 0:
        return f"device {facts.device} reaches {ends}, in the order of the stream"
    run = format_nbytes(facts.run_nbytes)
    return f"runs of {run} lie apart, and device {facts.device} reaches {ends}"


def _staged(facts: _core._CopyFacts, blocking: bool) -> str:
    down = facts.is_download
    dst, src = facts.dst, facts.src
    host, other = (dst, src) if down else (src, dst)
    device = f"device {facts.device}"
    least = facts.staged_down_nbytes if down else facts.staged_up_nbytes
    if not is_on_device(other.kind):
        reason = f"only {device} reaches {_memory(other)} in the order of the stream"
    elif facts.converts_on_device:
        reason = f"the link carries the shorter elements of {_memory(host)}"
    elif facts.from_dtype is not None or facts.casts:
        reason = f"elements of {_memory(host)} are converted on the way"
    elif facts.loops > 0:
        reason = (
            f"runs of {format_nbytes(facts.run_nbytes)} lie apart in {_memory(host)}"
        )
        if is_on_device(dst.kind) and facts.is_broadcast:
            reason = f"elements of {_memory(host)} are repeated"
    elif not blocking:
        reason = f"the driver copies {_memory(host)} only while the caller waits"
    elif facts.is_fresh:
        reason = f"new pages of {_memory(host)} are made by several threads at once"
    else:
        reason = f"{_memory(host)} from {format_nbytes(least)} on is faster in pieces"
    many = "a thread" if facts.threads == 1 else f"{facts.threads} threads"
    move = ("unpack" if down else "pack") + ("s" if facts.threads == 1 else "")
    what = "each piece while others are on their way" if facts.pieces > 1 else "it"
    reason += f": {many} {move} {what}"
    if facts.rearranges_on_device:
        reason += f", and {device} transposes it"
        reason += ", since neighbours lie along another axis"
    elif facts.route == "staged-kernel" and not facts.converts_on_device:
        verb = "gathers" if down else "repeats" if facts.is_broadcast else "scatters"
        reason += f", and {device} {verb} the elements"
    return reason


def _several(facts: _core._CopyFacts, blocking: bool) -> str:
    return (
        f"from device {facts.src_device} to device {facts.device}, neither of which "
        "converts the elements: they go to the host, which converts them, and on from there"
    )


def _unknown(facts: _core._CopyFacts, blocking: bool) -> str:
    return f"{facts.route} is the first route that is possible for both ends"


_HOW = {
    "host": "by the processor",
    "direct": "one copy by the driver",
    "direct-2d": "one copy of rows by the driver",
    "kernel": "by a kernel on the device",
    "peer-staged": "between two devices, in pieces through page-locked memory",
    "peer": "between two devices",
    "several": "by way of the host",
    "staged": "in pieces through page-locked memory",
    "staged-kernel": "in pieces through page-locked memory, sorted by the device",
}

_REASONS = {
    "nothing": _nothing,
    "host": _host,
    "direct": _direct,
    "direct-2d": _rows_reason,
    "peer": _peer,
    "peer-staged": _peer_staged,
    "kernel": _kernel,
    "several": _several,
    "staged": _staged,
    "staged-kernel": _staged,
}
