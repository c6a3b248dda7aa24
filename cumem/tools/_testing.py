# SPDX-License-Identifier: Apache-2.0
"""Calls of the core itself, by the test-suite and replays. Not a public interface.

The extension tells where functions of the core are; their types are said here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import time
from ctypes import c_bool, c_char_p, c_int, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any

from cumem import _core
from cumem.buffers.arguments import wrong_type
from cumem.devices import device as device_module

_OUT_OF_MEMORY = 2
_COUNTS = (
    *("host_allocs", "registrations", "device_allocs", "managed_allocs"),
    *("physical_allocs", "address_ranges", "mappings", "live_nbytes"),
    *("streams", "events", "modules", "queued"),
)  #: of cm_emulated_counts


class _Status(ctypes.Structure):
    _fields_ = (
        ("code", c_int32),
        ("op", ctypes.c_uint16),
        ("spare", ctypes.c_uint16),
        ("arg", c_uint64),
    )


class _OpFact(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("cuda_name", c_char_p),
        ("argument_kind", c_char_p),
        ("min_driver", c_int),
    )


class _FileFaults(ctypes.Structure):
    __slots__ = ()  # no other names
    _fields_ = (
        ("nth", c_uint64),
        ("most", c_uint64),
        ("held", c_uint64),
        ("count", c_uint64),
        ("direct_count", c_uint64),
        ("advised_count", c_uint64),
        ("error", c_int),
        ("is_on", c_bool),
        ("repeat", c_bool),
        ("is_cold", c_bool),
        ("no_direct", c_bool),
        ("is_shut", c_bool),
    )


def _call(
    name: str, result: Any, *arguments: tuple[Any, Any], without_gil: bool = False
) -> Any:
    """Call a function of the core with pairs of types and values."""
    kinds = [kind for kind, _ in arguments]
    function = _function(name, without_gil, result, *kinds)
    return function(*(value for _, value in arguments))


@functools.cache
def _function(name: str, without_gil: bool, *kinds: Any) -> Any:
    make = ctypes.CFUNCTYPE if without_gil else ctypes.PYFUNCTYPE
    return make(*kinds)(dict(_core._addresses())[name])


def _at(name: str) -> tuple[Any, int]:
    return c_void_p, dict(_core._addresses())[name]


def _check(status: _Status) -> None:
    if status.code:
        said = ((_Status, status), (c_char_p, None))
        _call("cm_py_raise", ctypes.py_object, _at("state"), *said)


# -- what is opened -----------------------------------------------------------------


def configure(**settings: Any) -> None:
    """What is opened at the next first use, of read_settings() in devices/device.py."""
    if opened():
        raise RuntimeError("the runtime is open: shut it down first")
    device_module.test_settings = settings
    try:
        device_module.read_settings()
    except Exception:
        device_module.test_settings = {}
        raise


def opened() -> bool:
    """True while a runtime is open."""
    return dict(_core._addresses())["runtime"] != 0


def _faults_runtime() -> tuple[Any, int]:
    _core._read_backend()  # opens it
    runtime = _at("runtime")
    if not dict(_core._addresses())["has_faults"]:
        raise RuntimeError("opened without configure(faults=True)")
    return runtime


def _emulated_runtime() -> tuple[Any, int]:
    if _core._read_backend()[0] != "emulated":
        raise RuntimeError("only on the emulated device")
    return _at("runtime")


# -- what is alive ------------------------------------------------------------------


def check_pools() -> bool:
    """True when the equations of the default pools hold."""
    return all(
        _call("cm_pool_check", c_bool, (c_void_p, pool))
        for pool, _, (number, *_) in _core._pools()
        if number == 0
    )


def live_storages() -> int:
    """Storages that are not given back."""
    return dict(_core._addresses())["storages"]


def registrations() -> int:
    """Pieces that we page-locked."""
    registry = _at("registry")
    return _call("cm_registry_count", c_uint64, registry) if registry[1] else 0


def pending_transfers() -> int:
    """Unfinished transfers."""
    engine = _at("engine")
    return _call("cm_engine_count_pending", c_uint64, engine) if engine[1] else 0


def poll() -> None:
    """Let go of what is done."""
    if not opened():
        _call("cm_state_drop_deferred", None, _at("state"))
        return
    engine = _at("engine")
    if engine[1]:
        _call("cm_engine_poll", None, engine, without_gil=True)
    _core._read_backend()


def defer(value: object) -> None:
    """Drop a reference at the next use, as a finished copy does.

    As if the interpreter were to do it later: the main thread would do it whenever it
    runs Python, and a test is about a call that does.
    """
    deferred = _call(
        "cm_deferred_new", c_void_p, _at("state"), (ctypes.py_object, value)
    )
    c_bool.from_address(dict(_core._addresses())["call_pending"]).value = True
    _call("cm_deferred_add", None, (c_void_p, deferred))


def copy_counts() -> dict[str, int]:
    """Copies by route since the engine began; quick ones by themselves, and pieces."""
    _core._read_backend()  # opens it
    engine = _call("cm_state_engine", c_void_p, _at("state"), (c_int, -1))
    at = dict(_core._addresses())
    names = [
        c_char_p.from_address(at["cm_routes"] + i * at["route_size"]).value or b""
        for i in range(at["route_count"])
    ]
    names += [b"quick", b"bounced", b"pieces"]
    counts = _call("cm_engine_counts", c_void_p, (c_void_p, engine))
    numbers = (c_uint64 * len(names)).from_address(counts)
    return {name.decode(): n for name, n in zip(names, numbers, strict=True)}


def deny_peers(denied: bool) -> None:
    """Copy as if no device reached another, or not."""
    engine = _call("cm_state_engine", c_void_p, _at("state"), (c_int, -1))
    _call("cm_engine_deny_peers", None, (c_void_p, engine), (c_bool, denied))


# -- calls of the runtime: counted, failed, delayed ---------------------------------


@functools.cache
def op_names() -> list[tuple[str, str, int]]:
    """(name, CUDA's name, oldest driver) of each."""
    found = dict(_core._addresses())
    facts = (_OpFact * found["op_count"]).from_address(found["cm_op_facts"])
    return [
        (fact.name.decode(), fact.cuda_name.decode(), fact.min_driver)
        for fact in facts[1:]
    ]


def _op(name: str | None) -> tuple[Any, int]:
    """An operation by either of its names; None is any."""
    if name is None:
        return c_int, 0
    for number, names in enumerate(op_names(), 1):
        if name in names:
            return c_int, number
    raise ValueError(f"op: there is no operation {name!r}")


def plan_fault(
    op: str | None, nth: int, code: int = _OUT_OF_MEMORY, repeat: bool = False
) -> None:
    """Let the `nth` call (1 is the next) of an operation fail; 0 ends it.

    Resets the counts.
    """
    number = _op(op)
    plan = (number, (c_uint64, nth), (c_int32, code), (c_bool, repeat))
    _call("cm_faults_plan", None, _faults_runtime(), *plan)


def fault_count(op: str | None = None) -> int:
    """Calls since the last plan_fault()."""
    number = _op(op)
    return _call("cm_faults_count", c_uint64, _faults_runtime(), number)  # type: ignore[no-any-return]


def fault_struck() -> str | None:
    """The operation made to fail, or None."""
    number = _call("cm_faults_struck", c_int, _faults_runtime())
    return op_names()[number - 1][0] if number else None


def delay_op(op: str | None, us: int) -> None:
    """Delay each call by so many microseconds."""
    number = _op(op)
    _call("cm_faults_delay", None, _faults_runtime(), number, (c_uint32, us))


def calls_with_gil() -> dict[str, int]:
    """Runtime calls made with the GIL held, by operation."""
    runtime = _faults_runtime()
    counts = {
        name: _call("cm_faults_count_held", c_uint64, runtime, (c_int, number))
        for number, (name, *_) in enumerate(op_names(), 1)
    }
    return {name: count for name, count in counts.items() if count}


# -- the emulated device: gates, capture, counts, the host's side of memory ---------


def _act_on(stream: object, name: str, *more: tuple[Any, Any]) -> None:
    """Call a function with the handle of a stream whose device is current."""
    runtime = _emulated_runtime()
    if stream is None:
        stream = _core.current_stream()
    record = _core.Stream.from_external(stream)
    guard = (ctypes.POINTER(c_uint64), (c_uint64 * 2)())
    where = (c_int, record.device.index)
    _check(_call("cm_device_enter", _Status, runtime, where, guard, without_gil=True))
    handle = (c_uint64, record.handle)
    status = _call(name, _Status, runtime, handle, *more, without_gil=True)
    _call("cm_device_leave", None, runtime, guard, without_gil=True)
    _check(status)


def gate_close(stream: object) -> None:
    """Hold a stream shut."""
    _core._hold_stream(stream)


def gate_open(stream: object) -> None:
    """Let it go on."""
    _core._release_stream(stream)


def set_capturing(stream: object, on: bool) -> None:
    """Put a stream into capture."""
    _act_on(stream, "cm_emulated_set_capturing", (c_bool, on))


def counts() -> dict[str, int]:
    """Live objects of the emulated device."""
    numbers = (c_uint64 * len(_COUNTS))()
    runtime = _emulated_runtime()
    _call(
        "cm_emulated_read_counts", None, runtime, (c_void_p, ctypes.addressof(numbers))
    )
    return dict(zip(_COUNTS, numbers, strict=True))


def contexts() -> int:
    """The emulated devices that have had a context, as bits."""
    runtime = _emulated_runtime()
    by_anyone = (c_bool, True)
    return _call("cm_devices_in_use", c_uint64, runtime, by_anyone, without_gil=True)  # type: ignore[no-any-return]


def host_pages(buffer: _core.ManagedBuffer) -> int:
    """Pages of a ManagedBuffer that are on the host."""
    runtime = _emulated_runtime()
    if not isinstance(buffer, _core.ManagedBuffer):
        raise wrong_type("buffer", "a ManagedBuffer", buffer)
    pages = c_uint64()
    where = ((c_uint64, buffer.ptr), (c_uint64, buffer.nbytes))
    out = (c_void_p, ctypes.addressof(pages))
    _check(_call("cm_emulated_host_pages", _Status, runtime, *where, out))
    return pages.value


def alias(address: int, nbytes: int) -> int:
    """The same bytes where the host may touch them."""
    where = ((c_uint64, address), (c_uint64, nbytes))
    host = _call("cm_runtime_host_alias", c_void_p, _emulated_runtime(), *where)
    if host is None:
        raise ValueError(f"[{address}, +{nbytes}) is inside no live allocation")
    return int(host)


def array_interface(buffer: _core.Buffer) -> dict[str, Any]:
    """The __cuda_array_interface__ that the buffer would have on a GPU."""
    if not isinstance(buffer, _core.Buffer):
        raise wrong_type("buffer", "a Buffer", buffer)
    kind = ctypes.py_object
    return _call("cm_array_interface_dict", kind, (kind, buffer))  # type: ignore[no-any-return]


def order_consumer(buffer: _core.Buffer, stream: object) -> None:
    """Order a stream after the buffer's work, as DLPack does for a consumer's."""
    if not isinstance(buffer, _core.Buffer):
        raise wrong_type("buffer", "a Buffer", buffer)
    consumer = _core.Stream.from_external(stream)
    place = id(buffer) + dict(_core._addresses())["storage_of_buffer"]
    storage = c_void_p.from_address(place)
    where = ((c_int, consumer.device.index), (c_uint64, consumer.handle))
    _call("cm_storage_order_handle", c_int, (c_void_p, storage.value), *where)


# -- calls on files: the nth fails, counted, held -----------------------------------


def _file_faults() -> _FileFaults:
    return _FileFaults.from_address(dict(_core._addresses())["file_faults"])


def file_plan(**plan: Any) -> None:
    """The nth read or write from now on fails with errno `error`.

    `error` 0: it moves nothing. Each moves at most `most` bytes; from number `held` on
    they wait.
    """
    faults = _file_faults()
    made = _FileFaults(is_on=True, is_shut=True, **plan)
    ctypes.memmove(
        ctypes.addressof(faults), ctypes.addressof(made), ctypes.sizeof(made)
    )


def file_counts() -> tuple[int, int, int, int]:
    """Reads and writes since the plan; those past the page cache; announcements; and
    descriptors past the page cache that are open now."""
    faults = _file_faults()
    return faults.count, faults.direct_count, faults.advised_count, _count_direct()


def _count_direct() -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # listdir's own
            flags = fcntl.fcntl(int(number), fcntl.F_GETFL)
            count += flags & os.O_DIRECT != 0
    return count


def file_await() -> None:
    """Wait until the held call waits."""
    faults = _file_faults()
    while faults.count < faults.held:
        time.sleep(0.001)


def file_open() -> None:
    """Let it go on."""
    _file_faults().is_shut = False
