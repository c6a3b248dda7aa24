# SPDX-License-Identifier: Apache-2.0
"""Makes DLPack capsules and CUDA array interfaces by hand, which may be wrong."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
READ_ONLY, IS_COPIED = 1, 2  # bits of DLPack's flags

#: DLPack's type code for each kind of NumPy dtype.
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


class Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DType(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    ]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
CAPSULE_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Legacy(ctypes.Structure):
    """DLManagedTensor, the struct of DLPack before version 1."""

    _fields_ = [
        ("tensor", Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
    ]


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, the struct of DLPack from version 1 on."""

    _fields_ = [
        ("version", Version),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
#: PyCapsule_GetPointer as a function of this module. The whole process shares the function
#: in ``ctypes.pythonapi``, of which other libraries set the types of the arguments. So this
#: module does not use that function.
pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_raw_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)

NAMES = {False: b"dltensor", True: b"dltensor_versioned"}


def capsule_name(capsule: object) -> str:
    """Return the name of a capsule, such as dltensor or used_dltensor_versioned."""
    for name in (*NAMES.values(), *(b"used_" + n for n in NAMES.values())):
        if _is_valid(capsule, name):
            return name.decode()
    return "?"


def read_capsule(capsule: object) -> Legacy | Versioned:
    """Return the managed tensor in a fresh capsule, without consuming it."""
    name = capsule_name(capsule).encode()
    kind = Versioned if name == b"dltensor_versioned" else Legacy
    return kind.from_address(pointer_of(capsule, name))


_given: list[Produced] = []  # the tensors whose deleter has not been called yet


class Produced:
    """A managed tensor over memory of the test. A test may change the fields of the tensor.

    `deleted` counts the calls of its deleter. As the standard demands, a capsule's
    destructor calls the deleter only if nobody has used the capsule.
    """

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: np.dtype[Any],
        *,
        versioned: bool = True,
        device: tuple[int, int] = (CPU, 0),
        flags: int = 0,
        keep: object = None,
        with_destructor: bool = True,
    ) -> None:
        self.deleted = 0
        self.keep = keep
        self.versioned = versioned
        self.managed: Any = Versioned() if versioned else Legacy()
        self._deleter = DELETER(self._delete)  # kept alive with self
        self._destructor = (
            CAPSULE_DESTRUCTOR(self._destroy) if with_destructor else None
        )
        self.managed.deleter = self._deleter
        if versioned:
            self.managed.version = Version(1, 0)
            self.managed.flags = flags
        self.tensor = self.managed.tensor
        self.tensor.data = address
        self.tensor.device = Device(*device)
        self.tensor.ndim = len(shape)
        self.tensor.dtype = DType(CODES[dtype.kind], dtype.itemsize * 8, 1)
        self.shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self.tensor.shape = self.shape
        if strides is not None:
            self.strides = (ctypes.c_int64 * max(1, len(shape)))(*strides)
            self.tensor.strides = self.strides

    @classmethod
    def over(cls, array: np.ndarray[Any, Any], **options: Any) -> Produced:
        """Make a tensor over the memory of an array, which it keeps alive."""
        strides = tuple(s // array.itemsize for s in array.strides)
        return cls(
            array.ctypes.data, array.shape, strides, array.dtype, keep=array, **options
        )

    def _delete(self, _: int) -> None:
        self.deleted += 1
        with contextlib.suppress(ValueError):
            _given.remove(self)

    def _destroy(self, capsule: int) -> None:
        if _raw_is_valid(capsule, NAMES[self.versioned]):
            self._delete(0)

    def capsule(self) -> object:
        """Make a new capsule.

        The tensor lives until its deleter is called, as a tensor of a real exporter does.
        """
        _given.append(self)
        destructor = (
            ctypes.cast(self._destructor, ctypes.c_void_p)
            if self._destructor is not None
            else None
        )
        return new_capsule(
            ctypes.addressof(self.managed), NAMES[self.versioned], destructor
        )


class FakeDLPack:
    """An object with the DLPack protocol, which hands out capsules of a Produced tensor."""

    def __init__(
        self,
        produced: Produced,
        device: tuple[int, int] | None = None,
        *,
        keywords: tuple[str, ...] = ("stream", "max_version", "dl_device", "copy"),
        error: Callable[[], Exception] | None = None,
    ) -> None:
        self.produced = produced
        self.calls: list[dict[str, Any]] = []
        self._keywords = keywords
        self._error = error
        own = produced.tensor.device
        self._device = device if device is not None else (own.type, own.id)

    def __dlpack__(self, **keywords: Any) -> object:
        self.calls.append(keywords)
        unknown = set(keywords) - set(self._keywords)
        if unknown:
            raise TypeError(f"unexpected keyword arguments {sorted(unknown)}")
        if self._error is not None:
            raise self._error()
        return self.produced.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class FakeCAI:
    """An object whose `__cuda_array_interface__` is a given dictionary."""

    def __init__(self, interface: Any, keep: object = None) -> None:
        self.__cuda_array_interface__ = interface
        self.keep = keep


def interface_of(buffer: Any, **changes: Any) -> dict[str, Any]:
    """Return a valid dictionary for a buffer, with some entries changed."""
    pointer = getattr(buffer, "device_ptr", None) or buffer.ptr
    entries = {
        "shape": buffer.shape,
        "typestr": buffer.dtype.str,
        "data": (pointer, buffer.readonly),
        "version": 3,
        "strides": buffer.strides,
        "stream": None,
    }
    entries.update(changes)
    return entries
