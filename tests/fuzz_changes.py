# SPDX-License-Identifier: Apache-2.0
"""The changes that fuzz_protocols.py makes to valid descriptions, one field at a time.

Each change is a function that takes the fuzzer, for its random numbers, and changes one
field of a dictionary of the CUDA array interface (CAI_CHANGES) or of a DLPack tensor
(DLPACK_CHANGES). A change that is twice in a list is twice as likely.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuzz_protocols import Fuzzer

DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

#: Types of elements that the interface can describe.
TYPESTRS = [
    "|u1",
    "|i1",
    "|b1",
    "<i2",
    "<u4",
    "<i8",
    "<f2",
    "<f4",
    "<f8",
    ">f4",
    ">i8",
    "<c8",
    "<c16",
    "|S3",
    "<U2",
    "|V5",
    "<M8[ns]",
    "<m8[s]",
    "<M8[3h]",
]

#: Texts that describe no type, or one that cannot be imported.
BAD_TYPESTRS = [
    "",
    "<",
    "f4",
    "<f3",
    "|O8",
    "<x4",
    "<f4,<f4",
    "<f-4",
    "|V0",
    "|S0",
    "<M8[xx]",
    "<M8[ns",
    "<f99999999999",
    "<i4 ",
    "\0",
    "<f4\0",
    "é",
]


#: NumPy's names of dtypes, by DLPack's code and number of bits.
CODES: dict[tuple[int, int], Any] = {
    (0, 8): "i1",
    (0, 16): "i2",
    (0, 32): "i4",
    (0, 64): "i8",
    (1, 8): "u1",
    (1, 16): "u2",
    (1, 32): "u4",
    (1, 64): "u8",
    (2, 16): "f2",
    (2, 32): "f4",
    (2, 64): "f8",
    (5, 64): "c8",
    (5, 128): "c16",
    (6, 8): "?",
}


# -- changes to a dictionary ------------------------------------------------------------


def _change_ints(key: str) -> Any:
    """Return a change of one number in a tuple."""

    def change(fuzzer: Fuzzer, entries: dict[str, Any]) -> None:
        pick = fuzzer.random
        values = entries.get(key)
        if not isinstance(values, tuple) or not values:
            return
        at = pick.randrange(len(values))
        if type(values[at]) is not int:
            return
        entries[key] = (*values[:at], fuzzer.integer(values[at]), *values[at + 1 :])

    return change


def _change_length(fuzzer: Fuzzer, entries: dict[str, Any]) -> None:
    key = fuzzer.random.choice(("shape", "strides"))
    if isinstance(entries.get(key), tuple):
        values = entries[key]
        longer = (*values, fuzzer.random.choice((1, 1, 2, 0)))
        entries[key] = fuzzer.random.choice((values[:-1], longer, values * 20))


def _change_pointer(fuzzer: Fuzzer, entries: dict[str, Any]) -> None:
    data = entries.get("data")
    if isinstance(data, tuple) and len(data) == 2 and type(data[0]) is int:
        entries["data"] = (_moved(fuzzer, data[0]), data[1])


def _moved(fuzzer: Fuzzer, pointer: int) -> int:
    """Choose another pointer, most often one near by."""
    pick = fuzzer.random
    if pick.random() < 0.7:
        return pointer + pick.randint(-64, 64)
    return pick.choice(
        (
            0,
            1,
            4096,
            pointer + (1 << 20),
            pointer - (1 << 20),
            1 << 47,
            (1 << 64) - 1,
            (1 << 64) - 8,
            1 << 63,
            pick.getrandbits(48),
        )
    )


def _change_flag(fuzzer: Fuzzer, entries: dict[str, Any]) -> None:
    data = entries.get("data")
    if isinstance(data, tuple) and len(data) == 2:
        flag = fuzzer.random.choice((True, False, True, 1, None, "x", 2))
        entries["data"] = (data[0], flag)


def _set(key: str, *values: Any) -> Any:
    """Return a change that sets an entry to one of these values."""

    def change(fuzzer: Fuzzer, entries: dict[str, Any]) -> None:
        entries[key] = fuzzer.random.choice(values)

    return change


def _drop(fuzzer: Fuzzer, entries: dict[str, Any]) -> None:
    entries.pop(
        fuzzer.random.choice(
            (
                "shape",
                "typestr",
                "data",
                "version",
                "strides",
                "stream",
                "stream",
                "strides",
            )
        ),
        None,
    )


#: The changes to a dictionary. A change that is here twice is twice as likely.
CAI_CHANGES: list[Any] = [
    _change_ints("shape"),
    _change_ints("shape"),
    _change_ints("strides"),
    _change_ints("strides"),
    _change_length,
    _change_pointer,
    _change_pointer,
    _change_flag,
    _change_flag,
    _drop,
    _set("typestr", *TYPESTRS),
    _set("typestr", *TYPESTRS),
    _set("typestr", *TYPESTRS, *BAD_TYPESTRS, 4, None, b"<f4"),
    _set("version", 0, 1, 2, 3, 3, 4, -1, 1 << 70, "3", None, 3.0),
    _set("strides", None, None, None, (), [], 8),
    _set("shape", (), None, 3, [2], (True,), ("1",), (2.0,)),
    _set("data", None, 0, (), (1,), ("1", False), (None, False)),
    _set("stream", None, None, 1, 1, 2, 0, -1, 1 << 70, "1", 0xDEAD00, True),
    _set("mask", None, None, 1),
    _set(
        "descr",
        None,
        [("a", "<i2"), ("b", "|V3")],
        [("", "|V5")],
        [("a", "|O")],
        "x",
        [("a", "<f4")],
    ),
    _set("extra", 1),
]

# -- changes to a tensor ----------------------------------------------------------------


def _wrap(value: int, bits: int) -> int:
    """Return the signed number that has the lowest bits of a value."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _dl_shape(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    at = fuzzer.random.randrange(max(1, min(managed.tensor.ndim, 4)))
    fuzzer.shape[at] = _wrap(fuzzer.integer(fuzzer.shape[at]), 64)


def _dl_strides(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    at = fuzzer.random.randrange(max(1, min(managed.tensor.ndim, 4)))
    fuzzer.strides[at] = _wrap(fuzzer.integer(fuzzer.strides[at]), 64)


def _dl_ndim(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    old = managed.tensor.ndim
    managed.tensor.ndim = fuzzer.random.choice(
        (
            0,
            max(old - 1, 0),
            min(old + 1, 64),
            old + 1 if old < 64 else old,
            64,
            65,
            -1,
            (1 << 31) - 1,
            -(1 << 31),
        )
    )


def _dl_data(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    managed.tensor.data = _moved(fuzzer, managed.tensor.data or 0) & ((1 << 64) - 1)


def _dl_offset(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    managed.tensor.byte_offset = fuzzer.random.choice(
        (0, 1, 4, 8, 64, 1000, 1 << 20, 1 << 63, (1 << 64) - 1, (1 << 64) - 8)
    )


def _dl_type(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    managed.tensor.dtype.code, managed.tensor.dtype.bits = fuzzer.random.choice(
        list(CODES)
    )


def _dl_code(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    managed.tensor.dtype.code = fuzzer.random.choice((0, 1, 2, 3, 4, 5, 6, 18, 255))


def _dl_bits(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    managed.tensor.dtype.bits = fuzzer.random.choice((0, 1, 4, 8, 16, 32, 64, 128, 255))


def _dl_lanes(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    managed.tensor.dtype.lanes = fuzzer.random.choice((0, 1, 1, 1, 2, 65535))


def _dl_device(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    device = managed.tensor.device
    if fuzzer.random.random() < 0.5:
        device.type = fuzzer.random.choice((0, 1, 2, 3, 4, 10, 13, 14, -1, 1 << 30))
    else:
        device.id = fuzzer.random.choice((0, 0, 0, 1, 2, -1, 1 << 30, -(1 << 31)))


def _dl_version(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    if versioned:
        managed.version.major = fuzzer.random.choice((1, 1, 1, 0, 2, (1 << 32) - 1))
        managed.version.minor = fuzzer.random.choice((0, 1, 2, 3, 99, (1 << 32) - 1))


def _dl_flags(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    if versioned:
        managed.flags = fuzzer.random.choice(
            (0, 1, 1, 2, 3, 4, 7, (1 << 64) - 1, 1 << 63)
        )


def _dl_null(fuzzer: Fuzzer, managed: Any, versioned: bool) -> None:
    what = fuzzer.random.choice(("strides", "strides", "strides", "shape", "deleter"))
    if what == "deleter":
        managed.deleter = DELETER()
    else:
        setattr(managed.tensor, what, None)


#: The changes to a tensor. A change that is here twice is twice as likely.
DLPACK_CHANGES: list[Any] = [
    _dl_shape,
    _dl_shape,
    _dl_strides,
    _dl_strides,
    _dl_ndim,
    _dl_data,
    _dl_data,
    _dl_offset,
    _dl_type,
    _dl_type,
    _dl_code,
    _dl_bits,
    _dl_lanes,
    _dl_device,
    _dl_version,
    _dl_version,
    _dl_flags,
    _dl_flags,
    _dl_flags,
    _dl_null,
]
