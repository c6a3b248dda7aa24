# SPDX-License-Identifier: Apache-2.0
"""The hooks of the core for tests; core.py says which core has them.

Each function calls a typed function of the core, whose stub is
csrc/python/module/testing.pyi. On the wheel's core it skips the test. A test whose own
programs call hooks has the marker `hooks`, and is skipped there as well.
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

WITHOUT_HOOKS = (
    "it needs hooks of the core, which only the core for tests has: "
    "`pip install -e '.[test]'` builds that, or CUMEM_TESTING=1 with any other build"
)


def core_path() -> str:
    """Return where the core of this process lies."""
    return str(_core.__file__)


def _hook(name: str) -> Any:
    """A function of the core for tests; without it the test is skipped."""
    function = getattr(_core, f"_test_{name}", None)
    if function is None:
        import pytest

        pytest.skip(WITHOUT_HOOKS)
    return function


# -- what is opened -----------------------------------------------------------------


def configure(**settings: Any) -> None:
    """What is opened at the next first use, of read_settings() in devices/device.py."""
    if opened():
        raise RuntimeError("the runtime is open: shut it down first")
    devices.test_settings = settings
    try:
        devices.read_settings()
    except Exception:
        devices.test_settings = {}
        raise


def opened() -> bool:
    """True while a runtime is open; without hooks nobody knows, and it is False."""
    return HAS_HOOKS and _hook("is_open")()


# -- what is alive ------------------------------------------------------------------


def check_pools() -> bool:
    """True when the equations of the default pools hold."""
    return _hook("check_pools")()


def live_storages() -> int:
    """Storages that are not given back."""
    return _hook("count_storages")()


def registrations() -> int:
    """Pieces that we page-locked."""
    return _hook("count_registrations")()


def pending_transfers() -> int:
    """Unfinished transfers."""
    return _hook("count_transfers")()


def poll() -> None:
    """Let go of what is done."""
    _hook("poll")()


def defer(value: object) -> None:
    """Drop a reference at the next use, as a finished copy does.

    As if the interpreter were to do it later: the main thread would do it whenever it
    runs Python, and a test is about a call that does.
    """
    _hook("defer")(value)


def copy_counts() -> dict[str, int]:
    """Copies by route since the engine began; quick ones by themselves, and pieces."""
    return _hook("copy_counts")()


def deny_peers(denied: bool) -> None:
    """Copy as if no device reached another, or not."""
    _hook("deny_peers")(denied)


# -- calls of the runtime: counted, failed, delayed ---------------------------------


def op_names() -> list[tuple[str, str, int]]:
    """(name, CUDA's name, oldest driver) of each."""
    return _hook("operations")()


def plan_fault(
    op: str | None, nth: int, code: int = _OUT_OF_MEMORY, repeat: bool = False
) -> None:
    """Let the `nth` call (1 is the next) of an operation fail; 0 ends it.

    An operation has either of its names, and None is any. Resets the counts.
    """
    _hook("plan_fault")(op, nth, code, repeat)


def fault_count(op: str | None = None) -> int:
    """Calls since the last plan_fault()."""
    return _hook("fault_count")(op)


def fault_struck() -> str | None:
    """The operation made to fail, or None."""
    return _hook("fault_struck")()


def delay_op(op: str | None, us: int) -> None:
    """Delay each call by so many microseconds."""
    _hook("delay_op")(op, us)


def calls_with_gil() -> dict[str, int]:
    """Runtime calls made with the GIL held, by operation."""
    return _hook("calls_with_gil")()


# -- the emulated device: gates, capture, counts, the host's side of memory ---------


def gate_close(stream: object) -> None:
    """Hold a stream shut."""
    _core._hold_stream(stream)


def gate_open(stream: object) -> None:
    """Let it go on."""
    _core._release_stream(stream)


def set_capturing(stream: object, on: bool) -> None:
    """Put a stream into capture."""
    _hook("set_capturing")(stream, on)


def counts() -> dict[str, int]:
    """Live objects of the emulated device."""
    return _hook("emulated_counts")()


def contexts() -> int:
    """The emulated devices that have had a context, as bits."""
    return _hook("contexts")()


@contextlib.contextmanager
def cuda_device(index: int) -> Any:
    """Make an emulated device current in this thread, as a library's cudaSetDevice."""
    _hook("enter_device")(index)
    yield
    _hook("leave_device")()


def host_pages(buffer: _core.ManagedBuffer) -> int:
    """Pages of a ManagedBuffer that are on the host."""
    if not isinstance(buffer, _core.ManagedBuffer):
        raise wrong_type("buffer", "a ManagedBuffer", buffer)
    return _hook("host_pages")(buffer.ptr, buffer.nbytes)


def alias(address: int, nbytes: int) -> int:
    """Where the host may touch the same bytes."""
    import numpy as np

    return np.frombuffer(_hook("host_bytes")(address, nbytes), "u1").ctypes.data


def array_interface(buffer: _core.Buffer) -> dict[str, Any]:
    """The __cuda_array_interface__ that the buffer would have on a GPU."""
    return _hook("array_interface")(buffer)


def order_consumer(buffer: _core.Buffer, stream: object) -> None:
    """Order a stream after the buffer's work, as DLPack does for a consumer's."""
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
    """The nth read or write from now on fails with errno `error`.

    `error` 0: it moves nothing. Each moves at most `most` bytes; from number `held` on
    they wait.
    """
    _hook("file_plan")(nth, most, held, error, repeat, is_cold, no_direct)


def file_counts() -> tuple[int, int, int, int]:
    """Reads and writes since the plan; those past the page cache; announcements; and
    descriptors past the page cache that are open now."""
    found = _hook("file_counts")()
    return found["count"], found["direct"], found["advised"], _count_direct()


def _count_direct() -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # listdir's own
            flags = fcntl.fcntl(int(number), fcntl.F_GETFL)
            count += flags & os.O_DIRECT != 0
    return count


def file_await() -> None:
    """Wait until the held call waits."""
    from support import session

    def waits() -> bool:
        found = _hook("file_counts")()
        return found["count"] >= found["held"]

    session.wait_until(waits, "a read or write that waits")


def file_open() -> None:
    """Let it go on."""
    _hook("file_open")()
