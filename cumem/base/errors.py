# SPDX-License-Identifier: Apache-2.0
"""Makes the exceptions and the warning that the extension raises."""

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

    If it is known what cumem was doing, a note of the exception says so.

    Attributes
    ----------
    message : str
        The text that ``str()`` returns.
    notes : tuple of str
        The notes of the exception.
    call : str or None
        The name of the CUDA function, such as ``"cudaHostAlloc"``.
    code : int or None
        The ``cudaError_t``, or one of cumem's own codes, which are negative.
    name : str or None
        The name of the code, such as ``"cudaErrorMemoryAllocation"``.
    arg : int or None
        The call's most informative argument: a number of bytes, a device, or a handle.

    All but the first two are None if a program made the exception without passing them.

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
    """There was not enough memory on the device, or not enough that can be page-locked.

    Before this is raised, cumem waits for freed memory that a stream still uses, gives back
    what its pools cache, calls the callbacks of `on_out_of_memory`, and runs the garbage
    collector; after each step it tries again. The error is both a `CudaError` and a
    `MemoryError`.

    Attributes
    ----------
    requested : int
        The bytes that were asked for.
    kind, device : str, int
        The kind of memory and its device.
    limit : int or None
        The strictest limit in bytes, or None if there is no limit.
    live, cached, in_flight, largest_free : int
        The bytes of the pool that are in use, that are free, that were freed but are still
        used by streams, and the size of its largest free piece.
    others : int
        The bytes, including cached ones, that other pools hold under the same limit.
        Without a limit, those of all other pools of the same kind.
    fragmentation : float
        ``1 - largest_free / cached``; 0 if nothing is cached.
    driver_free, driver_total, outside : int or None
        The bytes of the device that are free, that it has in all, and that are used
        outside cumem; None for pinned and mapped memory.
    available : int or None
        The bytes that the host can still provide; None for device and managed memory.
    tried : tuple of str
        The steps that were tried before this was raised.
    advice : str
        Advice that follows from these numbers.

    All are None if memory ran short in a copy rather than in an allocation.

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

    `Transfer.wait`, `Transfer.order` and `await` raise this. It is a `RuntimeError` and not
    an ``asyncio.CancelledError``, because that would end the awaiting task itself.

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
    """No GPU was found, so cumem works on an emulated device.

    The warning is given once per process, when the backend is first used, and says the
    reason. Set ``CUMEM_BACKEND=emulated`` to choose emulation without a warning, or
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
    """Emit a warning at the innermost line that does not belong to the package."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] == "cumem":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


#: The exception for each code; all other codes raise a CudaError.
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
    "CM_EROWS": IndexError,
    "CM_ETIMEOUT": TimeoutError,
    "CM_ECANCELLED": CancelledError,
    "CM_EFORKED": RuntimeError,
    "CM_EASLEEP": RuntimeError,
    "CM_ETHREAD": RuntimeError,
    "CM_ENUMA": RuntimeError,
}


#: The types and texts of exceptions that NumPy raised when it converted the elements of a
#: copy, by the number of the conversion. They stay here until the result of the copy is
#: read. The exceptions themselves are not kept, since they could keep an array alive after
#: its memory is gone.
_cast_failures: dict[int, tuple[type[BaseException], str]] = {}
_MOST_CAST_FAILURES = 64


def note_cast_failure(number: int, error: BaseException) -> None:
    """Remember the first exception of a conversion, for the error of the copy.

    A thread of the copy engine calls this.
    """
    _cast_failures.setdefault(number, (type(error), str(error)))
    while len(_cast_failures) > _MOST_CAST_FAILURES:
        _cast_failures.pop(next(iter(_cast_failures)), None)


def is_of_fork(error: BaseException) -> bool:
    """Return whether an error says that a forked child used its parent's CUDA objects."""
    return getattr(error, "name", None) == "CM_EFORKED"


#: The names of the parameters that held a wrong row number. The key is the argument of the
#: failure, whose code is CM_EROWS.
_WRONG_ROWS = {1: "dst_rows", 2: "src_rows", 3: "dst_rows and src_rows", 6: "rows"}

#: How messages show the argument of a failed operation. If the argument is signed, the
#: second item is 2**(bits - 1): an unsigned number from there on means a negative one.
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
    wrong_rows: dict[int, str] = _WRONG_ROWS,
) -> Exception:
    """Make the exception for a failed call, with its attributes and the note `doing`.

    The message is such as
    ``cudaHostAlloc(1073741824 bytes): cudaErrorMemoryAllocation (2): out of memory``.
    `argument` says what `arg` is, and `oldest` is the first version of the driver that has
    the call. The function reaches globals only through its default arguments, because
    errors are also raised at exit, when the module's globals may already be gone.
    """
    unknown = ("cudaErrorUnknown" if code > 0 else "unknown error", "unknown error")
    name, text = codes.get(code, unknown)
    if name == "CM_EROWS":
        text = f"{wrong_rows.get(arg, 'rows')}: {text}"
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
