# SPDX-License-Identifier: Apache-2.0
"""The hooks of the core for tests. core.py says which core has them.

Each function here calls a typed function of the core, whose stub is
csrc/python/module/testing.pyi. On the wheel's core, which lacks them, it skips the test. A
test whose own programs call hooks has the marker `hooks`, and is skipped there as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import Any

from support import core  # noqa: F401 - before cumem

# isort: split
from cumem import _core
from cumem.buffers.arguments import wrong_type
from cumem.devices import device as devices

_OUT_OF_MEMORY = 2

#: Whether this process can call the hooks.
HAS_HOOKS = hasattr(_core, "_test_is_open")

#: Why a test is skipped if the core has no hooks.
WITHOUT_HOOKS = (
    "it needs hooks of the core, which only the core for tests has: "
    "`pip install -e '.[test]'` builds that, or CUMEM_TESTING=1 with any other build"
)


def core_path() -> str:
    """Return the path of the core of this process."""
    return str(_core.__file__)


def _hook(name: str) -> Any:
    """Return a function of the core for tests, or skip the test if the core lacks it."""
    function = getattr(_core, f"_test_{name}", None)
    if function is None:
        import pytest

        pytest.skip(WITHOUT_HOOKS)
    return function


# -- what is opened -----------------------------------------------------------------


def configure(**settings: Any) -> None:
    """Set how the next use of cumem opens the runtime, which must not be open yet.

    read_settings() in devices/device.py reads these settings.
    """
    if opened():
        raise RuntimeError("the runtime is open: shut it down first")
    devices.test_settings = settings
    try:
        devices.read_settings()
    except Exception:
        devices.test_settings = {}
        raise


def opened() -> bool:
    """Return True while a runtime is open, and False if there are no hooks to ask."""
    return HAS_HOOKS and _hook("is_open")()


# -- what is alive ------------------------------------------------------------------


def check_pools() -> bool:
    """Return True if the counters of the default pools agree with their blocks."""
    return _hook("check_pools")()


def live_storages() -> int:
    """Count the storages whose memory has not been given back."""
    return _hook("count_storages")()


def registrations() -> int:
    """Count the pieces of memory that cumem has page-locked."""
    return _hook("count_registrations")()


def pending_transfers() -> int:
    """Count the unfinished transfers."""
    return _hook("count_transfers")()


def poll() -> None:
    """Find out which transfers are done, and drop the references that they kept."""
    _hook("poll")()


def defer(value: object) -> None:
    """Drop a reference at the next use of cumem, as a finished copy does.

    A finished copy also asks the interpreter to drop the reference, and the main thread
    does so as soon as it runs Python. This function does not ask, so that a test can show
    that a call of cumem drops the reference.
    """
    _hook("defer")(value)


def copy_counts() -> dict[str, int]:
    """Count copies by route since the engine began, quick ones and pieces separately."""
    return _hook("copy_counts")()


def deny_peers(denied: bool) -> None:
    """Copy as if no device could reach another one, until called with False."""
    _hook("deny_peers")(denied)


def copy_rows(
    dsts: list[Any],
    srcs: list[Any],
    dst_rows: Any,
    src_rows: Any,
    flag: Any,
    *,
    max_sms: int = 0,
    repeat: int = 1,
) -> float:
    """Copy rows of buffers by the kernel, and wait for it.

    Each pair of `dsts` and `srcs` is a layer. The numbers of rows are buffers of integers,
    or None for 0, 1, and so on. `flag` is a buffer of one uint32, into which the kernel
    stores what is wrong with a number. Returns the milliseconds that the device took for
    all launches but the first.
    """
    hook = _hook("copy_rows")
    return hook(dsts, srcs, dst_rows, src_rows, flag, max_sms, repeat)


# -- calls of the runtime: counted, failed, delayed ---------------------------------


def op_names() -> list[tuple[str, str, int]]:
    """Return the name, CUDA's name and the oldest driver of each operation."""
    return _hook("operations")()


def plan_fault(
    op: str | None, nth: int, code: int = _OUT_OF_MEMORY, repeat: bool = False
) -> None:
    """Make the `nth` call of an operation fail, where 1 is the next call and 0 means none.

    `op` is either of the operation's names, or None for any operation. Resets the counts.
    """
    _hook("plan_fault")(op, nth, code, repeat)


def fault_count(op: str | None = None) -> int:
    """Count the calls since the last plan_fault()."""
    return _hook("fault_count")(op)


def last_injected_fault() -> str | None:
    """Return the operation that was made to fail, or None."""
    return _hook("last_injected_fault")()


def delay_op(op: str | None, us: int) -> None:
    """Delay each call of an operation by this number of microseconds."""
    _hook("delay_op")(op, us)


def calls_with_gil() -> dict[str, int]:
    """Count the runtime calls that were made with the GIL held, by operation."""
    return _hook("calls_with_gil")()


# -- the emulated device: gates, capture, counts, the host's side of memory ---------


def gate_close(stream: object) -> None:
    """Hold a stream shut."""
    _core._hold_stream(stream)


def gate_open(stream: object) -> None:
    """Let a stream that was held shut go on."""
    _core._release_stream(stream)


@contextlib.contextmanager
def new_streams_shut() -> Any:
    """Hold shut the streams that are made in the block.

    The end of the block opens all streams.

    The block gets a function that opens them earlier.
    """
    hook = _hook("shut_new_streams")
    hook(True)
    try:
        yield lambda: hook(False)
    finally:
        hook(False)


def set_capturing(stream: object, on: bool) -> None:
    """Make a stream capture, or end its capture."""
    _hook("set_capturing")(stream, on)


def counts() -> dict[str, int]:
    """Count the live objects of the emulated device."""
    return _hook("emulated_counts")()


def contexts() -> int:
    """Return a number with a bit for each emulated device that has had a context."""
    return _hook("contexts")()


@contextlib.contextmanager
def cuda_device(index: int) -> Any:
    """Make an emulated device current in this thread, as another library might."""
    _hook("enter_device")(index)
    yield
    _hook("leave_device")()


def host_pages(buffer: _core.ManagedBuffer) -> int:
    """Count the pages of a ManagedBuffer that are on the host."""
    if not isinstance(buffer, _core.ManagedBuffer):
        raise wrong_type("buffer", "a ManagedBuffer", buffer)
    return _hook("host_pages")(buffer.ptr, buffer.nbytes)


def alias(address: int, nbytes: int) -> int:
    """Return an address at which the host may use the bytes of an emulated device."""
    import numpy as np

    return np.frombuffer(_hook("host_bytes")(address, nbytes), "u1").ctypes.data


def answer_types() -> list[type]:
    """Return the types of the extension's answers that have named members."""
    return _hook("answer_types")()


def array_interface(buffer: _core.Buffer) -> dict[str, Any]:
    """Return the __cuda_array_interface__ that a buffer would have on a GPU."""
    return _hook("array_interface")(buffer)


def order_consumer(buffer: _core.Buffer, stream: object) -> None:
    """Order a stream after a buffer's work, as DLPack does for a consumer's stream."""
    _hook("order_consumer")(buffer, stream)


# -- calls on files: the nth fails, counted, held -----------------------------------


def file_plan(
    nth: int = 0,
    most: int = 0,
    held: int = 0,
    error: int = 0,
    repeat: bool = False,
    is_cold: bool = False,
    no_direct: bool = False,
) -> None:
    """Make the nth read or write from now on fail with errno `error`.

    If `error` is 0, that call moves nothing instead. Each call moves at most `most` bytes,
    and calls from number `held` on wait for `file_open`.
    """
    _hook("file_plan")(nth, most, held, error, repeat, is_cold, no_direct)


def file_counts() -> tuple[int, int, int, int]:
    """Return three counts of calls since `file_plan`, and one of open descriptors.

    The first counts reads and writes, and the second only those that bypassed the page
    cache. The third counts the calls that told the kernel which bytes will be read. The
    last is the number of descriptors, open now, that bypass the page cache.
    """
    found = _hook("file_counts")()
    return found["count"], found["direct"], found["advised"], _count_direct()


def _count_direct() -> int:
    """Count the open descriptors that bypass the page cache."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of listdir() is closed
            flags = fcntl.fcntl(int(number), fcntl.F_GETFL)
            count += flags & os.O_DIRECT != 0
    return count


def file_await() -> None:
    """Wait until a call that `file_plan` holds is waiting."""
    from support import session

    def waits() -> bool:
        found = _hook("file_counts")()
        return found["count"] >= found["held"]

    session.wait_until(waits, "a read or write that waits")


def file_open() -> None:
    """Let the reads and writes that are held go on."""
    _hook("file_open")()
