# SPDX-License-Identifier: Apache-2.0
"""Recommends a kind of memory, by docs/which-memory.md and the figures of benchmarks.

The rules of that page decide about memory that kernels touch in place. For memory that is
copied, the figures of ``python -m cumem bench`` decide if there are any. The kind with the
least total time for the first allocation and all copies is recommended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Final, Literal, SupportsIndex

from cumem import _core
from cumem.base.answer import Answer
from cumem.base.places import found_in
from cumem.base.units import fit, format_nbytes, format_seconds, read_count, read_size
from cumem.buffers.arguments import hinting
from cumem.devices.device import Device
from cumem.files.opening import open_regular
from cumem.pools.memory import get_limit, memory_info
from cumem.tools.bench.cases import Result
from cumem.tools.bench.report import Report
from cumem.tools.saved_results import has_results, machine_key, result_path

_Reuse = Literal["once", "many"]
_Access = Literal["host", "host-writes", "host-reads", "device", "both"]
_Sharing = Literal["none", "processes", "libraries", "devices"]

_REUSES: Final = ("once", "many")
_ACCESSES: Final = ("host", "host-writes", "host-reads", "device", "both")
_SHARINGS: Final = ("none", "processes", "libraries", "devices")

_FEW_BYTES = 4096  #: up to this size, kernels can read across the link at little cost
_MANY = 10  #: without figures, a buffer with this many uses is worth keeping
_MOST_BYTES = 16 << 20  #: the largest results file that is read
_MOST_SECONDS = 1e9  #: the longest time that a case of a results file may have
_SAME = 1.05  #: a kind that is faster by less than this factor counts as equally fast

#: The call that makes memory of a kind.
_CALLS: Final = {
    "pageable": "numpy.empty(shape, dtype)",
    "pinned": "cumem.empty_pinned(shape, dtype)",
    "write-combined": "cumem.empty_pinned(shape, dtype, write_combined=True)",
    "mapped": "cumem.empty_mapped(shape, dtype)",
    "managed": "cumem.empty_managed(shape, dtype)",
    "device": "cumem.empty_device(shape, dtype)",
    "registered": "cumem.register(array)",
}
_BY_CHUNKS = "to copy it chunk by chunk, with cumem.chunks()"


@found_in("cumem.types")
@dataclasses.dataclass(frozen=True)
class Recommendation(Answer):
    """A recommended kind of memory and the reason, as `recommend` returns it.

    Attributes
    ----------
    kind : str
        ``"pageable"`` (ordinary memory), ``"pinned"``, ``"write-combined"``,
        ``"mapped"``, ``"managed"``, ``"device"``, or ``"registered"`` (existing memory,
        page-locked in place).
    reason : str
        The reason in one sentence.
    call : str
        The call that makes such memory.
    alternatives : tuple of (str, str)
        Other kinds, each with the case in which to prefer it.
    source : str
        The basis of the decision: ``"rules"``, or the date and the device of the results.
    figures : Mapping of str to float
        The seconds that each compared kind takes for allocation and all copies; empty if
        only rules decided.

    Examples
    --------
    >>> found = cumem.recommend("64 MiB", reuse="many", access="host-writes")
    >>> found.kind
    'pinned'
    """

    kind: str
    reason: str
    call: str
    alternatives: tuple[tuple[str, str], ...] = ()
    source: str = "rules"
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)

    _keys = ("figures_seconds",)

    def __repr__(self) -> str:
        rows = [("why", self.reason), ("call", self.call), ("by", self.source)]
        rows += [("or", f"{kind}, {when}") for kind, when in self.alternatives]
        rows += [(k, format_seconds(seconds)) for k, seconds in self.figures.items()]
        lines = "\n".join(f"  {name:<14} {text}" for name, text in rows)
        return fit(f"cumem.types.Recommendation: {self.kind}\n{lines}")


@dataclasses.dataclass(frozen=True)
class _Question:
    nbytes: int
    count: int | None  #: the number of uses; None if they are many
    access: str
    sharing: str
    device: Device


@hinting
def recommend(
    nbytes: SupportsIndex | str,
    *,
    reuse: _Reuse | int = "many",
    access: _Access = "host",
    sharing: _Sharing = "none",
    device: object = None,
    figures: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Recommendation:
    """Recommend a kind of memory, and give the reason.

    Parameters
    ----------
    nbytes : int or str
        The size of the buffer in bytes, or a text such as ``"64 MiB"``.
    reuse : {'many', 'once'} or int
        How often in its life the buffer is filled and copied, or used in place by a kernel.
    access : {'host', 'host-writes', 'host-reads', 'device', 'both'}
        Who touches the bytes in place. 'host' means the processor, while the device only
        receives or sends copies. With 'host-writes' the processor only writes, from front
        to back, and with 'host-reads' it only reads bytes that the device has sent.
        'device' means only kernels. 'both' means kernels and the processor, without a copy.
    sharing : {'none', 'processes', 'libraries', 'devices'}
        Who else uses the memory: nobody, other processes, a library that has allocated it
        itself, or several devices.
    device : Device, int or str, optional
        The device that uses the memory; by default cumem's current one.
    figures : path or mapping, optional
        Results of ``python -m cumem bench --json FILE``. By default the results that
        ``bench --keep`` kept for this machine are used, if there are any.

    Returns
    -------
    Recommendation
        The kind with its reason; ``print()`` shows all of it.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If an argument has a value that is not allowed, or `figures` are not results of
        bench or come from an emulated device.
    OSError
        If the file of `figures` cannot be read.
    CudaError
        If the driver cannot be opened.

    Notes
    -----
    The rules are those of docs/which-memory.md. Figures decide between ordinary, pinned
    and write-combined memory that is copied. The kind with the least time for the first
    allocation and all copies is recommended, but a simpler kind is preferred if it takes at
    most 5 % longer. This function measures nothing.

    Examples
    --------
    >>> cumem.recommend("64 MiB", reuse="once").kind
    'pageable'
    >>> cumem.recommend("64 MiB", reuse="many", access="host-reads").kind
    'pinned'
    >>> print(cumem.recommend(8, access="both").reason)
    it is only a few bytes, which a kernel reads and writes across the link
    """
    question = _Question(
        read_size(nbytes, "nbytes", False, None),
        _read_reuse(reuse),
        _read_word(access, "access", _ACCESSES),
        _read_word(sharing, "sharing", _SHARINGS),
        _core._device(device, "device"),
    )
    report, source = _find_report(figures, question.device)
    if question.access == "device":
        return _for_device(question)
    if question.access == "both":
        return _for_both(question)
    return _for_copies(question, report, source)


def _read_word(value: object, name: str, words: tuple[str, ...]) -> str:
    *first, last = (f"'{word}'" for word in words)
    expected = f"{name} must be {', '.join(first)} or {last}"
    if not isinstance(value, str):
        raise TypeError(f"{expected}, not {type(value).__name__}")
    if value not in words:
        raise ValueError(f"{expected}, not {value!r}")
    return value


def _read_reuse(value: Any) -> int | None:
    if isinstance(value, str):
        if value not in _REUSES:
            raise ValueError(
                f"reuse must be 'once', 'many' or a number of uses, not {value!r}"
            )
        return 1 if value == "once" else None
    if isinstance(value, bool):
        raise TypeError("reuse must be 'once', 'many' or an int, not bool")
    count = read_count(value, "reuse")
    if count >= 2**63:
        raise ValueError("reuse must be less than 2**63")
    return count


# -- the rules -------------------------------------------------------------------------


def _is_often(question: _Question) -> bool:
    return question.count is None or question.count >= _MANY


def _attribute(device: Device, name: str) -> bool:
    return bool(_core._device_attribute(device.index, name))


def _fits_device(question: _Question) -> bool:
    info = memory_info(question.device)
    limit = get_limit("device", question.device)
    room = info.free + info.reserved - info.live
    return question.nbytes <= (room if limit is None else min(room, limit))


def _fits_page_locked(question: _Question) -> bool:
    limit = get_limit("pinned")
    return limit is None or question.nbytes <= limit


def _of(
    kind: str,
    reason: str,
    *alternatives: tuple[str, str],
    call: str | None = None,
) -> Recommendation:
    return Recommendation(kind, reason, call or _CALLS[kind], alternatives)


def _for_device(question: _Question) -> Recommendation:
    if not _fits_device(question):
        return _of(
            "managed",
            f"{format_nbytes(question.nbytes)} are more than device "
            f"{question.device.index} has free; pages of managed memory move to the device "
            "when kernels touch them, and prefetch_pages() moves the next ones ahead of "
            "time",
            ("pageable", _BY_CHUNKS),
        )
    if question.sharing == "processes":
        return _of(
            "device",
            "only kernels touch it, and other processes open it through cudaIpc, which "
            "needs memory from one allocation of the driver",
            call='cumem.Pool("device", segments="malloc").allocate(nbytes)',
        )
    if question.sharing == "devices":
        return _of(
            "device",
            "kernels are fastest on memory of their own device, so each should have a copy",
            ("managed", "if the devices write it in turn"),
            call="cumem.broadcast([a buffer of each device], array)",
        )
    return _of(
        "device",
        "only kernels touch it, and no other memory is faster for them",
        ("managed", "if it does not fit on the device with everything else"),
    )


def _for_both(question: _Question) -> Recommendation:
    few, once = question.nbytes <= _FEW_BYTES, question.count == 1
    device = question.device
    if question.sharing in ("processes", "libraries"):
        whose = (
            "other processes see the same pages of shared memory"
            if question.sharing == "processes"
            else "the other library has allocated it"
        )
        return _of(
            "registered",
            f"{whose}, and page-locking them in place gives kernels an address",
            ("managed", "if a copy into memory of cumem's own does no harm"),
            call="cumem.register(array, mapped=True)",
        )
    if few:
        return _of(
            "mapped",
            "it is only a few bytes, which a kernel reads and writes across the link",
        )
    if _attribute(device, "integrated"):
        return _of(
            "mapped",
            "device and processor share one memory here, so that nothing crosses a link",
            ("managed", "if it may be swapped"),
        )
    if once and _fits_page_locked(question):
        return _of(
            "mapped",
            "a kernel touches each byte once, so each crosses the link once, as in a copy",
            ("managed", "if it touches some bytes more often"),
        )
    if not _attribute(device, "concurrent_managed_access"):
        return _of(
            "pinned",
            "the processor must not touch managed memory here while a kernel runs, so each "
            "side should have a buffer of its own, with copies between them",
            ("managed", "if the processor always waits for the device first"),
        )
    return _of(
        "managed",
        "both sides work on it in place: pages move to the side that touches them, and "
        "prefetch_pages() moves them ahead of time",
        (
            "pinned",
            "with a buffer on the device and copies, if both sides take turns often",
        ),
        ("mapped", "if a kernel touches each byte once"),
    )


def _for_copies(
    question: _Question, report: Report | None, source: str
) -> Recommendation:
    often = _is_often(question)
    if question.sharing in ("processes", "libraries"):
        shared = question.sharing == "processes"
        whose = "shared memory of the system" if shared else "the library's own array"
        if not often:
            return _of(
                "pageable",
                f"{whose} is best copied as it is: page-locking costs more than it saves",
                ("registered", f"from {_MANY} copies on"),
                call="cumem.copy(device_buffer, array)",
            )
        return _of(
            "registered",
            f"{whose} is copied at the speed of the link once it is page-locked in place",
            ("pageable", f"for fewer than {_MANY} copies"),
        )
    if not _fits_page_locked(question):
        return _of(
            "pageable",
            f"{format_nbytes(question.nbytes)} are more than may be page-locked "
            f"({format_nbytes(get_limit('pinned') or 0)})",
            ("pinned", _BY_CHUNKS),
        )
    if report is not None:
        measured = _by_figures(question, report, source)
        if measured is not None:
            return measured
    if not often:
        return _of(
            "pageable",
            "page-locking costs more than it saves for so few copies",
            ("pinned", "if the copy must overlap with other work"),
        )
    found = _of(
        "pinned",
        "it is filled and copied again and again: the device fetches it at the speed of "
        "the link, and its allocation is paid for only once",
        ("pageable", f"for fewer than {_MANY} copies"),
    )
    if question.access == "host-writes":
        more = (
            "write-combined",
            "if the processor never reads it, not even to add to it",
        )
        return dataclasses.replace(found, alternatives=(more, *found.alternatives))
    return found


# -- figures ---------------------------------------------------------------------------


def _find_report(figures: Any, device: Device) -> tuple[Report | None, str]:
    if isinstance(figures, Mapping):
        return _read_report(figures, "figures")
    if figures is not None:
        path = pathlib.Path(os.fsdecode(figures))
        return _read_report(_load(path), str(path))
    if device.emulated or not has_results("bench"):
        return None, ""
    kept = result_path(device, "bench")
    if kept is None:
        return None, ""
    try:
        data = _load(kept)
        if data.get("key") != machine_key(device):
            return None, ""
        report, source = _read_report(data, str(kept))
    except (OSError, ValueError):
        return None, ""  # the file is damaged or of another version
    return report, f"this machine's {source}"


def _load(path: pathlib.Path) -> Mapping[str, Any]:
    with open_regular(path) as file:
        text = file.read(_MOST_BYTES + 1)
    try:
        data = json.loads(text) if len(text) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ValueError(f"{path} has no results of python -m cumem bench")
    return data


def _read_report(data: Mapping[str, Any], name: str) -> tuple[Report, str]:
    try:
        if data["schema"] != 2:
            raise ValueError
        emulated = bool(data["emulated"])
        fields = [field.name for field in dataclasses.fields(Result)]
        results = [
            _check_result(Result(**{field: row[field] for field in fields}))
            for row in data["results"]
        ]
        unit = next(d["name"] for d in data["devices"] if d["index"] == data["device"])
        source = f"bench of {str(data['started'])[:10]}, {unit}"
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
        raise ValueError(f"{name} has no results of python -m cumem bench") from None
    if emulated:
        raise ValueError(
            f"{name} has figures of an emulated device, which say nothing about a GPU"
        )
    return Report(results), source


def _check_result(result: Result) -> Result:
    """Return the result, or raise a ValueError if bench could not have written it."""
    texts = (result.group, result.what, result.kind)
    is_whole = isinstance(result.nbytes, int) and not isinstance(result.nbytes, bool)
    least = 0.0 if result.skipped is not None or not result.verified else 1e-12
    if (
        not all(isinstance(text, str) for text in texts)
        or not is_whole
        or not 0 <= result.nbytes < 2**63
        or not isinstance(result.verified, bool)
        or isinstance(result.seconds, bool)
        or not isinstance(result.seconds, (int, float))
        or not least <= result.seconds < _MOST_SECONDS
    ):
        raise ValueError
    return result


def _by_figures(
    question: _Question, report: Report, source: str
) -> Recommendation | None:
    """Decide by measured figures, or return None if a kind to compare was not measured."""
    ways = {"host-writes": ("h2d",), "host-reads": ("d2h",)}
    kinds = ["pageable", "pinned"]
    if question.access == "host-writes":
        kinds.append("write-combined")
    seconds: dict[str, float] = {}
    for kind in kinds:
        copies = [
            _seconds(report, "copy", way, kind, question.nbytes)
            for way in ways.get(question.access, ("h2d", "d2h"))
        ]
        first = _seconds(report, "allocate", "first", kind, question.nbytes)
        if None in copies or (first is None and question.count is not None):
            continue
        a_copy = sum(way or 0.0 for way in copies) / len(copies)
        uses = question.count
        seconds[kind] = a_copy if uses is None else (first or 0.0) + uses * a_copy
    if "pageable" not in seconds or "pinned" not in seconds:
        return None
    fastest = min(seconds.values())
    best = next(kind for kind in kinds if seconds.get(kind, 1e99) <= _SAME * fastest)
    others = {kind: total for kind, total in seconds.items() if kind != best}
    rest = "pageable" if best != "pageable" else min(others, key=lambda k: others[k])
    gain = others[rest] / seconds[best]
    each = " each" if question.count is None else ""
    if question.count is None:
        what = "copies"
    elif question.count == 1:
        what = "allocation and the copy"
    else:
        what = f"allocation and {question.count} copies"
    than = (
        f"{gain:.1f} times as fast as {rest}"
        if gain > _SAME
        else "and nothing else is clearly faster"
    )
    return Recommendation(
        best,
        f"{what} of {format_nbytes(question.nbytes)} take "
        f"{format_seconds(seconds[best])}{each}, {than}",
        _CALLS[best],
        (("pinned", "if copies must overlap with other work"),)
        if best == "pageable"
        else (),
        source,
        seconds,
    )


def _seconds(
    report: Report, group: str, what: str, kind: str, nbytes: int
) -> float | None:
    """Estimate the time for a size from the largest measured size that is not above it.

    The time grows with the size. A size below all measured ones takes as long as the
    smallest of them. Returns None if nothing was measured.
    """
    found = [
        result
        for size in report.sizes(group)
        if (result := report.find(group, what, kind, size)) is not None
        and result.verified
        and result.nbytes > 0
    ]
    if not found:
        return None
    nearest = max(
        (each for each in found if each.nbytes <= nbytes),
        key=lambda each: each.nbytes,
        default=min(found, key=lambda each: each.nbytes),
    )
    return nearest.seconds * max(1.0, nbytes / nearest.nbytes)
