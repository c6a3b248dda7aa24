# SPDX-License-Identifier: Apache-2.0
"""`broadcast`, `scatter` and `gather` copy between one array and several.

An *end* is an array that is copied from or to. This module reads and checks all ends before
anything is copied. Each part is then a copy as `copy_async` makes it. All parts begin
together, and blocking calls wait for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cumem import _core
from cumem.base.kinds import is_on_device
from cumem.base.units import read_integer
from cumem.buffers.arguments import hinting
from cumem.buffers.casting import Casting, hint
from cumem.buffers.casting import check as check_casting
from cumem.buffers.progress import Parts, Progress

#: The most steps that NumPy may take to find out whether views share bytes. This many steps
#: take some milliseconds. Views of one array need only a few steps for each axis.
STEPS = 1_000_000


class _Call(NamedTuple):
    """One call of a function of this module, and the words for its errors."""

    name: str
    noun: str  #: the word for each of the several ends
    other: str  #: the word for the single end
    stream: object
    blocking: bool
    progress: Progress
    casting: Casting | None  #: None if dtypes must be equal

    def refuse(self, text: str) -> ValueError:
        return ValueError(f"{self.name}: {text}")

    def of(self, *ends: _End) -> _Call:
        """Return the call, with its stream read for the first end that has a device.

        This is needed for a stream that is a bare handle, since the handles of default
        streams are the same on all devices.
        """
        if not isinstance(self.stream, int):
            return self
        devices = (end.memory.device for end in ends if end.is_on_device)
        stream = _core.Stream.from_external(self.stream, device=next(devices, None))
        return self._replace(stream=stream)


class _End:
    """The memory of one end, as a Buffer or an array."""

    __slots__ = ("axes", "begin", "end", "is_empty", "is_locked", "memory", "place")

    def __init__(self, memory: Any, place: int, is_locked: bool = False) -> None:
        """Take the fields of a `_core._CopyEnd`."""
        self.memory = memory
        self.place = place
        self.is_locked = is_locked
        shape = memory.shape
        self.is_empty = 0 in shape
        self.axes = [
            each for each in zip(shape, memory.strides, strict=True) if each[0] > 1
        ]
        self.begin = place
        self.end = place + memory.itemsize
        for n, step in self.axes:  # plain code, which is fast for many small parts
            if step < 0:
                self.begin += (n - 1) * step
            else:
                self.end += (n - 1) * step

    @property
    def is_readonly(self) -> bool:
        if isinstance(self.memory, _core.Buffer):
            return self.memory.readonly
        return not self.memory.flags.writeable

    @property
    def is_on_device(self) -> bool:
        """Whether only a device can reach the memory."""
        is_buffer = isinstance(self.memory, _core.Buffer)
        return is_buffer and is_on_device(self.memory.residency)

    @property
    def is_run(self) -> bool:
        """Whether the elements are contiguous in C order."""
        step = self.memory.itemsize
        for n, stride in reversed(self.axes):
            if stride != step:
                return False
            step *= n
        return True

    @property
    def current_stream(self) -> _core.Stream | None:
        """The current stream of the end's device, or None for memory of the host."""
        return _core.current_stream(self.memory.device) if self.is_on_device else None

    def slice(self, axis: int, begin: int, count: int) -> _End:
        index = (slice(None),) * axis + (slice(begin, begin + count),)
        place = self.place + begin * self.memory.strides[axis]
        if isinstance(self.memory, np.ndarray):
            part = np.ndarray.__getitem__(self.memory, index)
        else:
            part = self.memory[index]
        return _End(part, place, self.is_locked)

    def is_same(self, other: _End) -> bool:
        """Return whether both ends have the same elements in memory."""
        return self.place == other.place and self.axes == other.axes

    def overlaps(self, other: _End) -> bool:
        """Return True if the ends share a byte, or if it takes too long to find out."""
        if self.is_empty or other.is_empty:
            return False
        if self.end <= other.begin or other.end <= self.begin:
            return False
        try:
            return np.shares_memory(self._bytes(), other._bytes(), STEPS)  # type: ignore[arg-type, unused-ignore]
        except np.exceptions.TooHardError:
            return True

    def _bytes(self) -> np.ndarray[Any, Any]:
        """Return an array over this memory, whose elements are not read."""
        return np.asarray(_Interface(self.place, self.axes, self.memory.itemsize))


class _Interface:
    def __init__(self, place: int, axes: list[tuple[int, int]], itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (place, True),
            "shape": tuple(n for n, _ in axes),
            "strides": tuple(step for _, step in axes),
            "typestr": f"|V{itemsize}",
        }


# -- reading -------------------------------------------------------------------------


def _is_memory(objects: object) -> bool:
    """Return whether `objects` is one end, such as an array, rather than several.

    Arrays and tensors can be iterated too, but their rows are not meant as several ends.
    """
    if isinstance(objects, (list, tuple)):
        return False
    if isinstance(objects, (str, bytes)) or _core._is_memory(objects):
        return True
    if hasattr(objects, "shape") and hasattr(objects, "dtype"):
        return True  # for instance a sparse tensor or a dataset in a file
    try:
        memoryview(objects).release()  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _holds_memory(objects: object) -> bool:
    """Return whether `objects` contains ends, and not only numbers in lists."""
    if isinstance(objects, Mapping):
        return True
    if isinstance(objects, (list, tuple)):
        return any(_is_memory(each) or _holds_memory(each) for each in objects)
    return isinstance(objects, Iterable) and not _is_memory(objects)


def _refuse_order(call: _Call, objects: object, wanted: str) -> TypeError:
    """Make the error for one end where several are expected, or vice versa.

    The usual reason is that the source was passed before the targets.
    """
    order = "dst, srcs" if call.name.startswith("gather") else "dsts, src"
    return TypeError(
        f"{call.name}: expected {wanted}, not {type(objects)!r}; targets come first: "
        f"{call.name}({order})"
    )


def _listed(call: _Call, objects: Any) -> tuple[Any, ...]:
    """Return several ends as a tuple; refuse a single array, although it is a sequence."""
    wanted = f"a list of {call.noun}s"
    listed = None
    if not _is_memory(objects) and not isinstance(objects, Mapping):
        with contextlib.suppress(TypeError):
            listed = tuple(objects)
    if listed is None:
        raise _refuse_order(call, objects, wanted)
    if not listed:
        raise call.refuse(f"there must be at least one {call.noun}")
    return listed


def _read_one(call: _Call, memory: object, like: _End | None = None) -> _End:
    """Read the single end, and refuse a list of ends."""
    if _holds_memory(memory) or (like is None and not _is_memory(memory)):
        raise _refuse_order(call, memory, f"one {call.other}")
    return _read(call, memory, like)


def _read_targets(call: _Call, dsts: object) -> list[_End]:
    listed = _listed(call, dsts)
    for each in listed:
        if not _is_memory(each):
            raise _refuse_order(call, each, "memory of each target")
    return [_read(call, each) for each in listed]


def _read(call: _Call, memory: object, like: _End | None = None) -> _End:
    """Read an end. Plain values become elements with the dtype of `like`."""
    dtype = None if like is None else like.memory.dtype
    found = _core._read_end(memory, dtype, call.stream)
    return _End(found.memory, found.place, found.is_locked)


def _check(call: _Call, one: _End, many: Sequence[_End]) -> None:
    for i, target in enumerate([one] if call.other == "target" else many):
        if target.is_readonly:
            raise call.refuse(f"target {i} is read-only")
    for i, each in enumerate(many):
        ends = (one, each) if call.other == "source" else (each, one)
        source, target = (end.memory.dtype for end in ends)
        if call.casting is not None:
            check_casting(
                f"{call.name}: {call.noun} {i}: ", source, target, call.casting
            )
        elif source != target:
            raise TypeError(
                f"{call.name}: {call.noun} {i} has dtype {each.memory.dtype}, the "
                f"{call.other} has dtype {one.memory.dtype}; {hint(source, target)}"
            )


def _refuse_shape(call: _Call, i: int, end: _End, why: str, other: _End) -> ValueError:
    shape = end.memory.shape
    return call.refuse(f"{call.noun} {i} of shape {shape} {why} {other.memory.shape}")


# -- overlaps are refused, since parts are copied in any order -----------------------


def _check_targets(call: _Call, targets: Sequence[_End], skips_same: bool) -> None:
    placed = sorted(enumerate(targets), key=lambda each: each[1].begin)
    for at, (i, a) in enumerate(placed):
        for k, b in placed[at + 1 :]:
            if b.begin >= a.end:
                break
            if a.overlaps(b) and not (skips_same and a.is_same(b)):
                raise call.refuse(
                    f"targets {min(i, k)} and {max(i, k)} overlap, and which is written "
                    "last is not defined"
                )


def _check_apart(
    call: _Call, one: _End, many: Sequence[_End], own: Sequence[_End]
) -> None:
    """Refuse an end of `many` that overlaps `one` outside the slice that belongs to it.

    `own[i]` is the slice that `many[i]` is copied from or to. The two may be the same
    memory.
    """
    for i, (each, same) in enumerate(zip(many, own, strict=True)):
        if each.overlaps(one) and not each.is_same(same):
            raise call.refuse(
                f"{call.noun} {i} overlaps the {call.other}; use copy() for that one"
            )


# -- calls ---------------------------------------------------------------------------


def _start(
    call: _Call, targets: Sequence[_End], sources: Sequence[_End], is_broadcast: bool
) -> list[_core.Transfer]:
    """Begin all parts, and return their transfers.

    A blocking call waits until all parts are done, and returns an empty list.
    """
    ends = tuple(end.memory for end in (*targets, *sources))
    parts = _core._begin_parts(call.stream, ends)
    try:
        made = _make(
            call,
            targets,
            sources,
            is_broadcast,
            parts.number,
            parts.before,
            parts.is_captured,
        )
        if call.blocking or (call.stream is not None and not parts.is_captured):
            stream = None if call.blocking else call.stream
            _core._end_parts(parts.number, stream, parts.held)
        return made
    finally:
        del parts  # a traceback of this frame would keep the memory that it holds


def _make(
    call: _Call,
    targets: Sequence[_End],
    sources: Sequence[_End],
    is_broadcast: bool,
    number: int,
    before: int,
    is_captured: bool,
) -> list[_core.Transfer]:
    """Do what `_start` says, with parts that are prepared."""
    progress = Parts(call.progress, 0, "copy")
    stream = None if call.blocking else call.stream
    on_stream = is_captured and not call.blocking
    after: tuple[object, ...] = ()
    if call.stream is not None:
        after = () if on_stream else (call.stream,)
    elif call.blocking:
        currents = {end.current_stream for end in (*targets, *sources)}
        after = tuple(currents - {None})
    groups = {i: [i] for i in range(len(targets))}
    converts = any(
        target.memory.dtype != source.memory.dtype
        for target, source in zip(targets, sources, strict=True)
    )
    if is_broadcast and not is_captured and not converts:
        groups = _group(targets, sources[0])
    made: dict[int, _core.Transfer] = {}
    try:
        for lead, group in groups.items():
            several = tuple(targets[i].memory for i in group)
            source = sources[lead].memory
            begun = _core._copy_part(
                several,
                source,
                stream,
                not on_stream,
                after,
                number,
                before,
                call.casting,
            )
            made.update(zip(group, begun, strict=True))
    except BaseException:
        _stop(made.values())
        for each in made.values():  # no copy may go on after a call that failed
            with contextlib.suppress(Exception):
                each.wait()
        raise
    try:
        if call.blocking:
            _wait([made[lead] for lead in groups], progress)
            made.clear()
        elif after:
            for lead in groups:
                made[lead].order(call.stream)
    except BaseException:
        _stop(made.values())
        raise
    return [made[i] for i in sorted(made)]


def _group(targets: Sequence[_End], source: _End) -> dict[int, list[int]]:
    """Return groups of targets, each of which one copy should fill.

    A group is a list of indexes, and its key is the first of them. On each device, one
    target is filled first, and the others are copied from it. Elements that the host packs
    are sent to all devices whose targets have the same strides.
    """
    sharing: dict[int | None, list[int]] = {}  # None for all devices together
    for i, target in enumerate(targets):
        if target.is_on_device and (
            target.end <= source.begin or source.end <= target.begin
        ):
            sharing.setdefault(target.memory.device, []).append(i)
            sharing.setdefault(None, []).append(i)
    firsts = {  # the first contiguous target if there is one
        device: next((i for i in some if targets[i].is_run), some[0])
        for device, some in sharing.items()
    }
    groups: dict[int, list[int]] = {}
    for i, target in enumerate(targets):
        lead = i
        if i in sharing.get(None, ()):
            own, first = target.memory.device, firsts[None]
            axes = [targets[k].axes for k in sharing[own]]
            is_packed = not source.is_locked and targets[first].axes in axes
            lead = first if is_packed else firsts[own]
        group = groups.setdefault(lead, [lead])
        group += [i] * (i != lead)
    return groups


def _stop(transfers: Iterable[_core.Transfer]) -> None:
    for each in transfers:
        each._stop()


def _wait(transfers: Sequence[_core.Transfer], progress: Parts) -> None:
    """Wait until all transfers are done, and raise the first failure.

    An exception of a signal handler or of the progress callback ends the wait.
    """
    progress.total = sum(each.nbytes for each in transfers)
    report_part: Any = progress.next(0)
    raised: list[BaseException] = []

    def report(*_: int) -> None:
        try:
            report_part(sum(each.progress for each in transfers), 0)
        except BaseException as error:
            raised.append(error)
            raise

    failure = None
    with progress:
        for each in transfers:
            try:
                each.wait(progress=report if report_part else None)
            except Exception as error:
                if error in raised or not each.done:
                    raise
                failure = failure or error
        if failure is not None:
            raise failure


def _broadcast(call: _Call, dsts: object, src: object) -> list[_core.Transfer]:
    targets = _read_targets(call, dsts)
    first = targets[0]
    source = _read_one(call, src, first)
    _check(call, source, targets)
    if not _fits(source.memory.shape, first.memory.shape):
        why = "does not fit the source of shape"
        raise _refuse_shape(call, 0, first, why, source)
    for i, target in enumerate(targets):
        if target.memory.shape != first.memory.shape:
            why = "must have the shape of target 0,"
            raise _refuse_shape(call, i, target, why, first)
    sources = [source] * len(targets)
    _check_targets(call, targets, True)
    _check_apart(call, source, targets, sources)
    return _start(call.of(*targets, source), targets, sources, True)


def _fits(source: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a source of this shape broadcasts to `shape`, ignoring leading 1s."""
    extra = source[: max(len(source) - len(shape), 0)]
    pairs = zip(reversed(source), reversed(shape), strict=False)
    return all(n == 1 for n in extra) and all(n in (1, wanted) for n, wanted in pairs)


def _slices(call: _Call, one: _End, many: Sequence[_End], axis: object) -> list[_End]:
    """Return for each end of `many` the slice of `one` that it is copied from or to."""
    _check(call, one, many)
    whole = one.memory.shape
    along = _axis(call, axis, len(whole))
    step = one.memory.strides[along]
    if call.other == "target" and step == 0 and whole[along] > 1:
        raise call.refuse(
            f"elements of the target share memory: stride 0 along axis {along}"
        )
    slices: list[_End] = []
    begin = 0
    for i, part in enumerate(many):
        shape = part.memory.shape
        others = shape[:along] + shape[along + 1 :]
        if len(shape) != len(whole) or others != whole[:along] + whole[along + 1 :]:
            raise _refuse_shape(call, i, part, "does not fit a slice of shape", one)
        slices.append(one.slice(along, begin, shape[along]))
        begin += shape[along]
    if begin != whole[along]:
        raise call.refuse(
            f"the lengths of the {call.noun}s along axis {along} add up to {begin}, but "
            f"the {call.other} has {whole[along]} there"
        )
    return slices


def _axis(call: _Call, axis: object, ndim: int) -> int:
    number = read_integer(axis, "axis")
    if not -ndim <= number < ndim:
        raise call.refuse(
            f"axis {number} is out of range for a {call.other} with {ndim} axes"
        )
    return number % ndim


def _scatter(
    call: _Call, dsts: object, src: object, axis: object
) -> list[_core.Transfer]:
    targets = _read_targets(call, dsts)
    source = _read_one(call, src, targets[0])
    slices = _slices(call, source, targets, axis)
    _check_targets(call, targets, False)
    _check_apart(call, source, targets, slices)
    return _start(call.of(*targets, source), targets, slices, False)


def _gather(
    call: _Call, dst: object, srcs: object, axis: object
) -> list[_core.Transfer]:
    target = _read_one(call, dst)
    listed = _listed(call, srcs)
    sources = [_read(call, each, target) for each in listed]
    slices = _slices(call, target, sources, axis)
    _check_apart(call, target, sources, slices)
    return _start(call.of(target, *sources), slices, sources, False)


# -- the functions -------------------------------------------------------------------


@hinting
def broadcast(
    dsts: Iterable[object],
    src: object,
    *,
    stream: object = None,
    casting: Casting | None = None,
    progress: Progress = None,
) -> None:
    """Copy one source to several targets, on all links at the same time.

    A source in ordinary memory is read and packed once for all GPUs. If several targets are
    on one GPU, the first is sent and the others are copied from it there.

    Parameters
    ----------
    dsts : iterable of Buffer, array or exporter
        Writable memory anywhere. All targets have the same shape, but their strides may
        differ.
    src : Buffer, array, exporter or scalar
        As for `copy`; its shape must be that of the targets or broadcast to it.
    stream : stream, optional
        A stream of any device. The copies come after its work so far, and before the work
        that it is given next.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        As for `copy`, for each part; by default all dtypes must be equal.
    progress : bool or callable, optional
        As for `copy`, with the bytes of all parts; a source that is read once for several
        targets counts once.

    Raises
    ------
    TypeError
        If an end is not memory, or the dtypes differ and `casting` does not allow it.
    ValueError
        If the shapes do not fit, a target is read-only, a buffer is closed, or ends
        share bytes (see Notes). Nothing has been copied then.
    OSError
        If an end is a mapped file that is cut short or cannot be read.
    CudaError
        If a copy failed, or `stream` is being captured.
    ImportError
        If `progress` is True and tqdm is not installed.

    See Also
    --------
    scatter : Copy a slice of the source to each target.

    Notes
    -----
    **Blocks** until all copies are done, with the GIL released; Ctrl-C ends it within a few
    pieces. **Ordered after** all work that cumem knows of on either end, and after `stream`
    or the current stream of each device that has an end. Parts are copied in any order, so
    two targets, or a target and a source, may not share a byte. Views that only interleave,
    such as columns of one array, are allowed. A target that is the same memory as its
    source is left as it is, and `broadcast` may get the same target twice.

    Examples
    --------
    >>> targets = [cumem.empty_device(3) for _ in range(2)]  # on one device or several
    >>> cumem.broadcast(targets, numpy.arange(3.0))
    >>> targets[1].to_numpy()
    array([0., 1., 2.])
    """
    call = _Call("broadcast", "target", "source", stream, True, progress, casting)
    _broadcast(call, dsts, src)


@hinting
def broadcast_async(
    dsts: Iterable[object],
    src: object,
    *,
    stream: object = None,
    casting: Casting | None = None,
) -> list[_core.Transfer]:
    """Start to copy one source to several targets.

    Parameters
    ----------
    dsts, src
        As for `broadcast`.
    stream : stream, optional
        A stream of any device. The copies come after its work so far, and before the work
        that it is given next.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        As for `copy`, for each part; by default all dtypes must be equal.

    Returns
    -------
    list of Transfer
        One for each target, in order; copies that are made together end together.

    Raises
    ------
    TypeError
        If an end is not memory, or the dtypes differ and `casting` does not allow it.
    ValueError
        If the shapes do not fit, a target is read-only, a buffer is closed, or ends
        share bytes (see Notes). Nothing has been copied then.
    OSError
        If an end is a mapped file that is cut short or cannot be read.
    CudaError
        If a copy failed, or the graph that `stream` is captured into cannot hold it.

    Notes
    -----
    Without a stream the call never waits for other work. With a stream it **blocks**, with
    the GIL released, until the last piece is queued. If the host has to write a target, it
    blocks until that target is written. No end may be changed before its copy is done.
    **Ordered after** all work that cumem knows of on either end, and after `stream`.
    `broadcast` says which ends may overlap.

    Examples
    --------
    >>> targets = [cumem.empty_device(3) for _ in range(2)]
    >>> for transfer in cumem.broadcast_async(targets, numpy.arange(3.0)):
    ...     transfer.wait()
    >>> targets[1].to_numpy()
    array([0., 1., 2.])
    """
    call = _Call("broadcast_async", "target", "source", stream, False, None, casting)
    return _broadcast(call, dsts, src)


@hinting
def scatter(
    dsts: Iterable[object],
    src: object,
    axis: int = 0,
    *,
    stream: object = None,
    casting: Casting | None = None,
    progress: Progress = None,
) -> None:
    """Copy consecutive slices of a source to several targets, on all links at once.

    Parameters
    ----------
    dsts : iterable of Buffer, array or exporter
        Writable memory anywhere. Each target has the shape of the source except along
        `axis`, where the lengths add up to that of the source.
    src : Buffer, array or exporter
        As for `copy`.
    axis : int, default 0
        The axis along which the source is cut; negative numbers count from the end.
    stream : stream, optional
        A stream of any device. The copies come after its work so far, and before the work
        that it is given next.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        As for `copy`, for each part; by default all dtypes must be equal.
    progress : bool or callable, optional
        As for `copy`, with the bytes of all parts; a source that is read once for several
        targets counts once.

    Raises
    ------
    TypeError
        If an end is not memory, or the dtypes differ and `casting` does not allow it.
    ValueError
        If the shapes do not fit, a target is read-only, a buffer is closed, or ends
        share bytes (see Notes). Nothing has been copied then.
    OSError
        If an end is a mapped file that is cut short or cannot be read.
    CudaError
        If a copy failed, or `stream` is being captured.
    ImportError
        If `progress` is True and tqdm is not installed.

    See Also
    --------
    gather : Copy the slices back into one target.

    Notes
    -----
    **Blocks** until all is done, and is **ordered after** other work, as `broadcast` is.
    `broadcast` says which ends may overlap.

    Examples
    --------
    >>> halves = [cumem.empty_device(2) for _ in range(2)]  # on one device or several
    >>> cumem.scatter(halves, numpy.arange(4.0))
    >>> halves[1].to_numpy()
    array([2., 3.])
    """
    call = _Call("scatter", "target", "source", stream, True, progress, casting)
    _scatter(call, dsts, src, axis)


@hinting
def scatter_async(
    dsts: Iterable[object],
    src: object,
    axis: int = 0,
    *,
    stream: object = None,
    casting: Casting | None = None,
) -> list[_core.Transfer]:
    """Start to copy consecutive slices of a source to several targets.

    Parameters
    ----------
    dsts, src, axis
        As for `scatter`.
    stream : stream, optional
        A stream of any device. The copies come after its work so far, and before the work
        that it is given next.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        As for `copy`, for each part; by default all dtypes must be equal.

    Returns
    -------
    list of Transfer
        One for each target, in order; copies that are made together end together.

    Raises
    ------
    TypeError
        If an end is not memory, or the dtypes differ and `casting` does not allow it.
    ValueError
        If the shapes do not fit, a target is read-only, a buffer is closed, or ends
        share bytes (see Notes). Nothing has been copied then.
    OSError
        If an end is a mapped file that is cut short or cannot be read.
    CudaError
        If a copy failed, or the graph that `stream` is captured into cannot hold it.

    Notes
    -----
    **Blocks** and is **ordered after** other work as `broadcast_async` is. `broadcast` says
    which ends may overlap.

    Examples
    --------
    >>> halves = [cumem.empty_device(2) for _ in range(2)]
    >>> for transfer in cumem.scatter_async(halves, numpy.arange(4.0)):
    ...     transfer.wait()
    >>> halves[1].to_numpy()
    array([2., 3.])
    """
    call = _Call("scatter_async", "target", "source", stream, False, None, casting)
    return _scatter(call, dsts, src, axis)


@hinting
def gather(
    dst: object,
    srcs: Iterable[object],
    axis: int = 0,
    *,
    stream: object = None,
    casting: Casting | None = None,
    progress: Progress = None,
) -> None:
    """Copy several sources one after the other into a target, on all links at once.

    Parameters
    ----------
    dst : Buffer, array or exporter
        Writable memory anywhere.
    srcs : iterable of Buffer, array or exporter
        As for `copy`. Each source has the shape of the target except along `axis`, where
        the lengths add up to that of the target.
    axis : int, default 0
        The axis along which the sources follow each other; negative numbers count from the
        end.
    stream : stream, optional
        A stream of any device. The copies come after its work so far, and before the work
        that it is given next.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        As for `copy`, for each part; by default all dtypes must be equal.
    progress : bool or callable, optional
        As for `copy`, with the bytes of all parts.

    Raises
    ------
    TypeError
        If an end is not memory, or the dtypes differ and `casting` does not allow it.
    ValueError
        If the shapes do not fit, a target is read-only, a buffer is closed, or ends
        share bytes (see Notes). Nothing has been copied then.
    OSError
        If an end is a mapped file that is cut short or cannot be read.
    CudaError
        If a copy failed, or `stream` is being captured.
    ImportError
        If `progress` is True and tqdm is not installed.

    See Also
    --------
    scatter : Copy the parts of one array to several targets.

    Notes
    -----
    **Blocks** until all is done, and is **ordered after** other work, as `broadcast` is.
    `broadcast` says which ends may overlap.

    Examples
    --------
    >>> parts = [cumem.array([1.0, 2.0]), cumem.array([3.0])]  # on one device or several
    >>> out = numpy.empty(3)
    >>> cumem.gather(out, parts)
    >>> out
    array([1., 2., 3.])
    """
    call = _Call("gather", "source", "target", stream, True, progress, casting)
    _gather(call, dst, srcs, axis)


@hinting
def gather_async(
    dst: object,
    srcs: Iterable[object],
    axis: int = 0,
    *,
    stream: object = None,
    casting: Casting | None = None,
) -> list[_core.Transfer]:
    """Start to copy several sources one after the other into a target.

    Parameters
    ----------
    dst, srcs, axis
        As for `gather`.
    stream : stream, optional
        A stream of any device. The copies come after its work so far, and before the work
        that it is given next.
    casting : {'no', 'equiv', 'safe', 'same_kind', 'unsafe'}, optional
        As for `copy`, for each part; by default all dtypes must be equal.

    Returns
    -------
    list of Transfer
        One for each source, in order; copies that are made together end together.

    Raises
    ------
    TypeError
        If an end is not memory, or the dtypes differ and `casting` does not allow it.
    ValueError
        If the shapes do not fit, a target is read-only, a buffer is closed, or ends
        share bytes (see Notes). Nothing has been copied then.
    OSError
        If an end is a mapped file that is cut short or cannot be read.
    CudaError
        If a copy failed, or the graph that `stream` is captured into cannot hold it.

    Notes
    -----
    **Blocks** and is **ordered after** other work as `broadcast_async` is. `broadcast` says
    which ends may overlap.

    Examples
    --------
    >>> out = numpy.empty(3)
    >>> parts = [cumem.array([1.0, 2.0]), cumem.array([3.0])]
    >>> for transfer in cumem.gather_async(out, parts):
    ...     transfer.wait()
    >>> out
    array([1., 2., 3.])
    """
    call = _Call("gather_async", "source", "target", stream, False, None, casting)
    return _gather(call, dst, srcs, axis)
