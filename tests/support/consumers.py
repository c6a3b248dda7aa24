# SPDX-License-Identifier: Apache-2.0
"""Lists the libraries that take cumem's buffers, and tells the tests how to use each.

Each class stands for a library. It finds the address of one of the library's arrays, reads
and writes the array, and waits for the library's work. `ENTRANCES` has the calls that take
a buffer.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cumem

Enter = Callable[[Any], Any]


class Library:
    """A library. Making an instance skips the test if the library is not installed.

    Attributes
    ----------
    modules : tuple of str
        The names of the modules to import. The first becomes `module`, and its version
        becomes `version` unless a derived class sets another one.
    """

    modules: tuple[str, ...] = ()
    #: The dtypes that the library knows, by their names in NumPy and ml_dtypes.
    dtypes: tuple[str, ...] = ()
    needs_gpu = False
    can_write = True

    def __init__(self) -> None:
        found = [pytest.importorskip(name) for name in self.modules]
        self.module: Any = found[0]
        self.version: str = getattr(self.module, "__version__", "?")

    def address(self, array: Any) -> int:
        """Return the address of the first element."""
        raise NotImplementedError

    def raw(self, array: Any) -> bytes:
        """Return the values in C order, as bytes."""
        raise NotImplementedError

    def write(self, array: Any, values: np.ndarray) -> None:
        """Write values into an array."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until all work that the library was given is done."""

    def shape(self, array: Any) -> tuple[int, ...]:
        """Return the shape as a tuple of plain numbers."""
        return tuple(array.shape)


NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
NUMBERS += ("uint64", "float16", "float32", "float64", "complex64", "complex128")


class NumPy(Library):
    modules = ("numpy",)
    dtypes = NUMBERS

    def address(self, array: Any) -> int:
        return int(array.__array_interface__["data"][0])

    def raw(self, array: Any) -> bytes:
        return np.asarray(array).tobytes()

    def write(self, array: Any, values: np.ndarray) -> None:
        array[...] = values.reshape(array.shape)


class Torch(Library):
    modules = ("torch",)
    dtypes = (*NUMBERS, "bfloat16", "float8_e4m3fn", "float8_e5m2")

    @property
    def has_cuda(self) -> bool:
        return bool(self.module.cuda.is_available())

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def raw(self, array: Any) -> bytes:
        found: bytes = (
            array.cpu()
            .contiguous()
            .reshape(-1)
            .view(self.module.uint8)
            .numpy()
            .tobytes()
        )
        return found

    def write(self, array: Any, values: np.ndarray) -> None:
        array.copy_(self.module.from_numpy(values).reshape(array.shape))

    def wait(self) -> None:
        if self.has_cuda:
            self.module.cuda.synchronize()


class Jax(Library):
    modules = ("jax", "jax.numpy", "jax.dlpack")
    dtypes = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32")
    dtypes += ("float16", "float32", "complex64", "bfloat16", "float8_e4m3fn")
    can_write = False

    def address(self, array: Any) -> int:
        return int(array.unsafe_buffer_pointer())

    def raw(self, array: Any) -> bytes:
        return np.array(array).tobytes()

    def wait(self) -> None:
        (self.module.device_put(0.0) + 0).block_until_ready()

    @property
    def on_gpu(self) -> bool:
        return bool(self.module.default_backend() == "gpu")


class TvmFfi(Library):
    """TVM-FFI, which imports through DLPack's C functions. NumPy reads its tensors."""

    modules = ("tvm_ffi",)
    dtypes = (*NUMBERS, "bfloat16", "float8_e4m3fn", "float8_e5m2")
    can_write = False

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def raw(self, array: Any) -> bytes:
        if array.device.type != "cpu" and "cpu" not in str(array.device):
            raise NotImplementedError
        return NumPy().raw(np.from_dlpack(array))


class CuPy(Library):
    modules = ("cupy",)
    dtypes = NUMBERS
    needs_gpu = True

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def raw(self, array: Any) -> bytes:
        if not array.flags.c_contiguous:  # CuPy would need a compiler to read this
            out = np.empty(array.shape, array.dtype)
            cumem.copy(out, array)
            return out.tobytes()
        found: bytes = self.module.asnumpy(array).tobytes()
        return found

    def write(self, array: Any, values: np.ndarray) -> None:
        array[...] = self.module.asarray(values.reshape(array.shape))

    def wait(self) -> None:
        self.module.cuda.Device().synchronize()


class Numba(Library):
    modules = ("numba.cuda", "numba")
    dtypes = tuple(n for n in NUMBERS if n != "float16")
    needs_gpu = True

    def __init__(self) -> None:
        super().__init__()
        self.version = importlib.import_module("numba").__version__

    def address(self, array: Any) -> int:
        return int(array.__cuda_array_interface__["data"][0])

    def raw(self, array: Any) -> bytes:
        found: bytes = np.ascontiguousarray(array.copy_to_host()).tobytes()
        return found

    def write(self, array: Any, values: np.ndarray) -> None:
        array.copy_to_device(values.reshape(array.shape))

    def wait(self) -> None:
        self.module.synchronize()


class CudaCore(Library):
    """cuda.core, whose views cannot read their own values."""

    modules = ("cuda.core",)
    dtypes = NUMBERS
    needs_gpu = True
    can_write = False

    def __init__(self) -> None:
        super().__init__()
        for place in ("cuda.core.utils", "cuda.core", "cuda.core.experimental.utils"):
            with contextlib.suppress(ImportError, AttributeError):
                self.view = importlib.import_module(place).StridedMemoryView
                return
        pytest.skip("this cuda.core has no StridedMemoryView")

    def address(self, array: Any) -> int:
        return int(array.ptr)

    def raw(self, array: Any) -> bytes:
        raise NotImplementedError


def _of(library: type[Library], function: Callable[[Any, Any], Any]) -> Any:
    """Pair a library and a function, so that the types of a lambda are known."""
    return library, function


def _torch_dtype(torch: Any, buffer: Any) -> Any:
    return getattr(torch, buffer.dtype.name)


def _view(name: str) -> Callable[[Any, Any], Any]:
    return lambda lib, buf: getattr(lib.view, name)(buf, stream_ptr=-1)


#: The library and the function of each call, by the text of the call in docs/interop.md.
ENTRANCES: dict[str, tuple[type[Library], Callable[[Any, Any], Any]]] = {
    "memoryview(buf)": _of(NumPy, lambda _, b: np.array(memoryview(b), copy=False)),
    "np.asarray(buf)": _of(NumPy, lambda _, b: np.asarray(b)),
    "np.from_dlpack(buf)": _of(NumPy, lambda _, b: np.from_dlpack(b)),
    'np.from_dlpack(buf, device="cpu")': _of(
        NumPy, lambda _, b: np.from_dlpack(b, device="cpu")
    ),
    "np.frombuffer(buf)": _of(NumPy, lambda _, b: np.frombuffer(b, b.dtype)),
    "cupy.asarray(buf)": _of(CuPy, lambda lib, b: lib.module.asarray(b)),
    "cupy.from_dlpack(buf)": _of(CuPy, lambda lib, b: lib.module.from_dlpack(b)),
    "torch.as_tensor(buf)": _of(Torch, lambda lib, b: lib.module.as_tensor(b)),
    'torch.as_tensor(buf, device="cuda")': _of(
        Torch, lambda lib, b: lib.module.as_tensor(b, device="cuda")
    ),
    "torch.from_dlpack(buf)": _of(Torch, lambda lib, b: lib.module.from_dlpack(b)),
    "torch.frombuffer(buf)": _of(
        Torch,
        lambda lib, b: lib.module.frombuffer(b, dtype=_torch_dtype(lib.module, b)),
    ),
    "torch.from_numpy(buf.numpy())": _of(
        Torch, lambda lib, b: lib.module.from_numpy(b.numpy())
    ),
    "jnp.asarray(buf)": _of(Jax, lambda lib, b: lib.module.numpy.asarray(b)),
    "jax.dlpack.from_dlpack(buf)": _of(
        Jax, lambda lib, b: lib.module.dlpack.from_dlpack(b)
    ),
    "tvm_ffi.from_dlpack(buf)": _of(TvmFfi, lambda lib, b: lib.module.from_dlpack(b)),
    "cuda.as_cuda_array(buf)": _of(Numba, lambda lib, b: lib.module.as_cuda_array(b)),
    "StridedMemoryView.from_any_interface(buf)": _of(
        CudaCore, _view("from_any_interface")
    ),
    "StridedMemoryView.from_dlpack(buf)": _of(CudaCore, _view("from_dlpack")),
    "StridedMemoryView.from_cuda_array_interface(buf)": _of(
        CudaCore, _view("from_cuda_array_interface")
    ),
}

#: Whether arrays of `numpy.from_dlpack` are writable, as they are from NumPy 2.2.5 on.
NUMPY_LETS_WRITE = np.lib.NumpyVersion(np.__version__) >= "2.2.5"


def cupy_compiles() -> None:
    """Skip the test if CuPy has no compiler, without which it cannot compute."""
    cupy = pytest.importorskip("cupy")
    try:
        cupy.ones(1) * 2
    except Exception as error:
        pytest.skip(f"CuPy has no compiler: {error}")
