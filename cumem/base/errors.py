# SPDX-License-Identifier: Apache-2.0
"""The exceptions and the warning, which the extension raises, and how it makes them."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

from cumem.base.answer import Answer
from cumem.base.error_codes import CODES

if TYPE_CHECKING:
    from cumem.base.kinds import Kind


class CudaError(RuntimeError, Answer):
    """A call to CUDA failed.

    The notes of the exception say what cumem was doing, where that is known.

    Attributes
    ----------
    message : str
        The text, as ``str()`` gives it.
    notes : tuple of str
        The notes.
    call : str or None
        Name of the CUDA function, e.g. ``"cudaHostAlloc"``.
    code : int or None
        The ``cudaError_t``, or a negative number of cumem's own.
    name : str or None
        Name of the code, e.g. ``"cudaErrorMemoryAllocation"``.
    arg : int or None
        The call's telling argument: a number of bytes, a device, a handle.

    All but the first two are None in an exception that was made without them.

    Examples
    --------
    >>> try:
    ...     cumem.empty_device(1 << 50, "u1")
    ... except cumem.CudaError as error:
    ...     print(error.code, error.name)
    2 cudaErrorMemoryAllocation
    """

    def __init__(
        self,
        *args: object,
        call: str | None = None,
        code: int | None = None,
        name: str | None = None,
        arg: int | None = None,
    ) -> None:
        super().__init__(*args)
        self.call = call
        self.code = code
        self.name = name
        self.arg = arg

    _keys: ClassVar[tuple[str, ...]] = (
        "message",
        "notes",
        "call",
        "code",
        "name",
        "arg",
    )

    @property
    def message(self) -> str:
        return str(self)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(getattr(self, "__notes__", ()))


class OutOfMemoryError(CudaError, MemoryError):
    """There was not enough memory, on the device or to page-lock.

    Before it is raised cumem waits for freed memory that is still in use by a
    stream, gives back what its pools cache, calls the callbacks of
    `on_out_of_memory`, runs the garbage collector, and tries again after each. It
    is a `CudaError` and a `MemoryError`.

    Attributes
    ----------
    requested : int
        Bytes that were asked for.
    kind, device : str, int
        Of what memory.
    limit : int or None
        The limit that allows least, in bytes; None where there is none.
    live, cached, in_flight, largest_free : int
        Bytes that the pool has handed out, keeps ready, waits for, and has in one
        piece.
    others : int
        Bytes that other pools hold, cached ones included: against the same limit,
        or of the same kind where there is none.
    fragmentation : float
        ``1 - largest_free / cached``; 0 if nothing is cached.
    driver_free, driver_total, outside : int or None
        Bytes of the device that its driver has free and in all, and that are held
        outside cumem; None for pinned and mapped memory.
    available : int or None
        Bytes that the host can still give; None for device and managed memory.
    tried : tuple of str
        What was done before giving up.
    advice : str
        What to do, judged by these numbers.

    All are None where memory ran short in a copy instead of an allocation.

    Examples
    --------
    >>> try:
    ...     cumem.empty_device(1 << 50, "u1")
    ... except cumem.OutOfMemoryError as error:  # before CudaError and MemoryError
    ...     print(error.kind, error.advice is not None)
    device True
    """

    requested: int | None = None
    kind: Kind | None = None
    device: int | None = None
    limit: int | None = None
    live: int | None = None
    cached: int | None = None
    in_flight: int | None = None
    largest_free: int | None = None
    fragmentation: float | None = None
    driver_free: int | None = None
    driver_total: int | None = None
    outside: int | None = None
    available: int | None = None
    tried: tuple[str, ...] | None = None
    advice: str | None = None
    others: int | None = None

    _keys = (
        *("requested_nbytes", "kind", "device", "limit_nbytes", "live_nbytes"),
        *("cached_nbytes", "in_flight_nbytes", "largest_free_nbytes", "fragmentation"),
        *("others_nbytes", "driver_free_nbytes", "driver_total_nbytes"),
        *("outside_nbytes", "available_nbytes", "tried", "advice"),
    )


class CancelledError(RuntimeError):
    """A transfer was cancelled before it began: nothing was read or written.

    Raised by `Transfer.wait`, `Transfer.order` and `await`. It is a
    `RuntimeError` and not ``asyncio.CancelledError``, which would say that the
    awaiting task itself is to end.

    Examples
    --------
    >>> buf = cumem.empty_device(1 << 20, "u1")
    >>> transfer = cumem.copy_async(buf, numpy.ones(1 << 20, "u1"))
    >>> cancelled = transfer.cancel()  # False: it had begun
    >>> try:
    ...     transfer.wait()
    ... except cumem.CancelledError:
    ...     assert cancelled  # nothing was written
    >>> transfer.cancelled == cancelled
    True
    """

    call: None
    code: int
    name: str
    arg: int


class EmulationWarning(UserWarning):
    """No GPU was found and cumem works on an emulated device.

    Given once per process, at first use, naming the reason. Set
    ``CUMEM_BACKEND=emulated`` to choose emulation without it, or
    ``CUMEM_BACKEND=cuda`` to get an error instead.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", cumem.EmulationWarning)
    ...     name = cumem.backend()
    >>> name in ("cuda", "emulated")
    True
    """


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn of the innermost line that is not the package's own."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] == "cumem":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


#: What the codes raise; all others are a CudaError.
_TYPES: dict[str, type[Exception]] = {
    "cudaErrorMemoryAllocation": OutOfMemoryError,
    "CM_ELIMIT": OutOfMemoryError,
    "CM_EHOSTMEMORY": OutOfMemoryError,
    "CM_EINVALID": ValueError,
    "CM_ESHAPE": ValueError,
    "CM_ECLOSED": ValueError,
    "CM_EOVERFLOW": ValueError,
    "CM_ENOMEM": MemoryError,
    "CM_EBUSY": BufferError,
    "CM_ESYSTEM": OSError,
    "CM_EFAULT": OSError,
    "CM_ECAST": ValueError,
    "CM_ETIMEOUT": TimeoutError,
    "CM_ECANCELLED": CancelledError,
    "CM_EFORKED": RuntimeError,
    "CM_ETHREAD": RuntimeError,
    "CM_ENUMA": RuntimeError,
}


#: What NumPy raised while it converted elements of a copy, by the number of the cast, and
#: its text: they wait here until somebody reads how the copy ended, if ever. Not the
#: exception itself, which would keep arrays over memory that may be gone.
_cast_failures: dict[int, tuple[type[BaseException], str]] = {}
_MOST_CAST_FAILURES = 64


def note_cast_failure(number: int, error: BaseException) -> None:
    """Keep what a cast raised first, which threads of the engine have met."""
    _cast_failures.setdefault(number, (type(error), str(error)))
    while len(_cast_failures) > _MOST_CAST_FAILURES:
        _cast_failures.pop(next(iter(_cast_failures)), None)


def is_of_fork(error: BaseException) -> bool:
    """Whether it says that a forked child cannot use what its parent's driver made."""
    return getattr(error, "name", None) == "CM_EFORKED"


#: How an operation's telling argument is written, and 2**(bits - 1) of one with a sign.
_ARGUMENTS: dict[str | None, tuple[str, int]] = {
    None: ("", 0),
    "NOTHING": ("", 0),
    "NBYTES": ("{} bytes", 0),
    "ELEMENTS": ("{} elements", 0),
    "BLOCKS": ("{} blocks", 0),
    "PRIORITY": ("priority {}", 2**63),
    "DEVICE": ("device {}", 2**31),
    "PEER": ("peer {}", 2**31),
    "ATTRIBUTE": ("attribute {}", 2**31),
    "ADDRESS": ("address {:#x}", 0),
    "CONTEXT": ("context {:#x}", 0),
    "EVENT": ("event {:#x}", 0),
    "FLAGS": ("flags {:#x}", 0),
    "HANDLE": ("handle {:#x}", 0),
    "MODULE": ("module {:#x}", 0),
    "STREAM": ("stream {:#x}", 0),
}


def make(
    call: str | None,
    argument: str | None,
    arg: int,
    code: int,
    oldest: int,
    doing: str | None,
    arguments: dict[str | None, tuple[str, int]] = _ARGUMENTS,
    codes: dict[int, tuple[str, str]] = CODES,
    types: dict[str, type[Exception]] = _TYPES,
    default: type[Exception] = CudaError,
    strerror: Any = os.strerror,
    casts: dict[int, tuple[type[BaseException], str]] = _cast_failures,
) -> Exception:
    """The exception of a call that failed, with its attributes and its note `doing`.

    ``cudaHostAlloc(1073741824 bytes): cudaErrorMemoryAllocation (2): out of memory``.
    `argument` says what `arg` is, and `oldest` is the driver's version that the call came
    with. Names no global, since errors are raised at exit too, when a module may be empty.
    """
    unknown = ("cudaErrorUnknown" if code > 0 else "unknown error", "unknown error")
    name, text = codes.get(code, unknown)
    message = f"{name} ({code}): {text}" if code > 0 else text
    if call is not None:
        form, half = arguments[argument]
        value = (arg + half) % (2 * half) - half if half else arg
        message = f"{call}({form.format(value)}): {message}"
    elif code <= 0:
        message = f"cumem: {message}"
    if call is not None and name == "CM_ENOTSUP":
        message += f"; it came with CUDA {oldest // 1000}.{oldest % 1000 // 10}"
    kind: type[BaseException] = types.get(name, default)
    error: Any
    met = casts.get(arg) if name == "CM_ECAST" else None
    if met is not None:
        kind = next((one for one in (TypeError, OverflowError) if one is met[0]), kind)
        error = kind(f"{message}: {met[1]}")
    elif kind is OSError and 0 < arg < 4096:
        error = OSError(arg, strerror(arg) if name == "CM_ESYSTEM" else message)
    else:
        error = kind(message)
    error.call, error.code, error.name, error.arg = call, code, name, arg
    if doing is not None:
        error.add_note(doing)
    return error  # type: ignore[no-any-return]
