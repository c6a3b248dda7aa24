# SPDX-License-Identifier: Apache-2.0
"""The hooks of testing.c, which cumem._core has only in builds for tests."""

from typing import Any

from cumem import Buffer

def _test_is_open() -> bool:
    """Return whether a runtime is open."""

def _test_check_pools() -> bool:
    """Return whether the equations of all default pools hold."""

def _test_count_storages() -> int:
    """Return the number of storages that are not given back."""

def _test_count_registrations() -> int:
    """Return the number of pieces that cumem has page-locked."""

def _test_count_transfers() -> int:
    """Return the number of unfinished transfers."""

def _test_poll() -> None:
    """Find out which transfers are done, and drop what they have kept."""

def _test_defer(value: object, /) -> None:
    """Drop a reference to `value` at the next use of cumem, as a finished copy does."""

def _test_copy_counts() -> dict[str, int]:
    """Return the number of copies by the text of their route; short ones are "quick"."""

def _test_deny_peers(denied: bool, /) -> None:
    """Copy as if no device reached another, or again as they really do."""

def _test_copy_rows(
    dsts: list[Buffer],
    srcs: list[Buffer],
    dst_rows: Buffer | None,
    src_rows: Buffer | None,
    flag: Buffer,
    max_sms: int,
    repeat: int,
    /,
) -> float:
    """Copy rows by the kernel, `repeat` times, and wait.

    Returns the milliseconds that the device took for all launches but the first.
    """

def _test_answer_types() -> list[type]:
    """Make the types of all answers with names, as the first such answers do."""

def _test_operations() -> list[tuple[str, str, int]]:
    """Return the name, CUDA's name and oldest driver of each call of the runtime."""

def _test_plan_fault(op: str | None, nth: int, code: int, repeat: bool, /) -> None:
    """Let the `nth` call of an operation, or of any, fail with `code`."""

def _test_fault_count(op: str | None, /) -> int:
    """Return the number of calls since the last plan."""

def _test_last_injected_fault() -> str | None:
    """Return the operation that the plan made fail last."""

def _test_delay_op(op: str | None, us: int, /) -> None:
    """Delay each call of an operation, or of any, by `us` microseconds."""

def _test_calls_with_gil() -> dict[str, int]:
    """Return the number of calls that were made with the GIL held, by operation."""

def _test_set_capturing(stream: object, on: bool, /) -> None:
    """Begin or end the capture of an emulated stream."""

def _test_shut_new_streams(on: bool, /) -> None:
    """Hold emulated streams shut that are made from now on, or open all of them."""

def _test_emulated_counts() -> dict[str, int]:
    """Return the number of live objects of the emulated devices, by kind."""

def _test_contexts() -> int:
    """Return the emulated devices that have had a context, as bits."""

def _test_enter_device(device: int, /) -> None:
    """Make an emulated device current in this thread, as a library does."""

def _test_leave_device() -> None:
    """Undo the last _test_enter_device() of this thread."""

def _test_host_pages(address: int, nbytes: int, /) -> int:
    """Return the number of pages of managed memory that are on the host."""

def _test_host_bytes(address: int, nbytes: int, /) -> memoryview:
    """Return the bytes of emulated memory, where the host may touch them."""

def _test_array_interface(buffer: Buffer, /) -> dict[str, Any]:
    """Return the __cuda_array_interface__ that the buffer would have on a GPU."""

def _test_order_consumer(buffer: Buffer, stream: object, /) -> None:
    """Order a stream after the buffer's work, as DLPack does for a consumer."""

def _test_file_plan(
    nth: int,
    most: int,
    held: int,
    error: int,
    repeat: bool,
    is_cold: bool,
    no_direct: bool,
    /,
) -> None:
    """Plan which reads and writes of files fail, are cut short or wait."""

def _test_file_counts() -> dict[str, int]:
    """Return the counts of reads and writes since the plan, and its argument `held`."""

def _test_file_open() -> None:
    """Let reads and writes that wait go on."""
