# SPDX-License-Identifier: Apache-2.0
"""Tests of read-only objects of other libraries, and of views that these cannot read.

Exporters of old DLPack say nothing about writing, so cumem looks for other signs. Views
with negative strides must be refused with a text that says what to do. The last test is
about memory of a device that the current one cannot reach.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.exporters import CPU, CUDA, FakeCAI, FakeDLPack, Produced, interface_of
from support.strategies import KINDS

import cumem

pytestmark = [
    # Where the driver lacks these calls, cumem works in other ways.
    pytest.mark.by_driver("context_record_event", "stream_get_device"),
    # These tests fail if a wheel, or an older NumPy, lacks something that cumem needs.
    pytest.mark.packaging,
]

# -- objects that may not be written ----------------------------------------------------


def old_exporter(array: np.ndarray, bases: tuple[type, ...] = (), **names: Any) -> Any:
    """Return an exporter from before DLPack 1.0, whose capsule does not say who may
    write.
    """
    made = type("Old", (*bases, FakeDLPack), names)
    return made(Produced.over(array, versioned=False))


def check_not_written(exporter: object, array: np.ndarray) -> None:
    """Check that no call writes to memory that its exporter calls read-only."""
    before = array.copy()
    assert cumem.asbuffer(exporter).readonly
    for write in (
        lambda: cumem.copy(exporter, np.ones_like(array)),
        lambda: cumem.copy(exporter, cumem.zeros(array.shape, array.dtype)),
        lambda: cumem.copy_async(exporter, cumem.zeros(array.shape, array.dtype)),
        lambda: cumem.copy_many([(exporter, np.ones_like(array))]),
        lambda: cumem.asbuffer(exporter).fill(1),
    ):
        with pytest.raises(ValueError, match="read-only"):
            write()
    assert (array == before).all()


def with_buffer(array: np.ndarray, base: type) -> Any:
    """Return an exporter that has the buffer protocol as well, as JAX's arrays on the
    host do.
    """
    produced = Produced.over(array, versioned=False)

    class Both(base):  # type: ignore[misc, valid-type]
        def __dlpack__(self, **_: Any) -> object:
            return produced.capsule()

        def __dlpack_device__(self) -> tuple[int, int]:
            return (CPU, 0)

    return Both(array.tobytes())


def test_old_exporter_with_a_readonly_buffer_is_not_written(runtime) -> None:
    array = np.arange(4, dtype="f4")
    check_not_written(with_buffer(array, bytes), array)


def test_old_exporter_with_a_writable_buffer_is_written(runtime) -> None:
    array = np.zeros(4, "f4")
    cumem.copy(with_buffer(array, bytearray), np.ones(4, "f4"))
    assert array.tolist() == [1] * 4


def test_old_exporter_whose_cai_is_readonly_is_not_written(runtime) -> None:
    array = np.arange(4, dtype="f4")
    interface = {"data": (array.ctypes.data, True), "version": 3}
    exporter = old_exporter(array, __cuda_array_interface__=interface)
    check_not_written(exporter, array)


def test_old_exporter_whose_cai_is_writable_is_written(runtime) -> None:
    array = np.zeros(4, "f4")
    interface = {"data": (array.ctypes.data, False), "version": 3}
    exporter = old_exporter(array, __cuda_array_interface__=interface)
    cumem.copy(exporter, np.ones(4, "f4"))
    assert array.tolist() == [1] * 4


@pytest.mark.parametrize("module", ["jaxlib._jax", "jaxlib", "jax._src.array"])
def test_old_exporter_of_jax_is_not_written(runtime, module) -> None:
    """JAX's bfloat16 arrays on the host have no buffer protocol, so the module's name
    decides.
    """
    array = np.arange(4, dtype="f4")
    check_not_written(old_exporter(array, __module__=module), array)


def test_old_exporter_that_says_nothing_is_written(runtime) -> None:
    for module in ("paddle", "jaxtyping", "jaxlibrary.x", 5):
        array = np.zeros(4, "f4")
        cumem.copy(old_exporter(array, __module__=module), np.ones(4, "f4"))
        assert array.tolist() == [1] * 4


def test_versioned_exporter_is_believed(runtime) -> None:
    array = np.zeros(4, "f4")
    made = type("New", (FakeDLPack,), {"__module__": "jaxlib._jax"})
    cumem.copy(made(Produced.over(array)), np.ones(4, "f4"))
    assert array.tolist() == [1] * 4


def test_exporter_that_is_interrupted_when_asked_says_so(runtime) -> None:
    class Interrupted(FakeDLPack):
        @property
        def __cuda_array_interface__(self) -> object:
            raise KeyboardInterrupt

    produced = Produced.over(np.zeros(4, "f4"), versioned=False)
    with pytest.raises(KeyboardInterrupt):
        cumem.asbuffer(Interrupted(produced))
    assert produced.deleted == 1


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16", "bool"])
def test_jax_arrays_are_read_and_not_written(runtime, dtype) -> None:
    jnp = pytest.importorskip("jax.numpy")
    source = jnp.zeros((2, 3), dtype)
    before = np.array(source)
    check_not_written(source, before)
    assert (np.asarray(source) == before).all()
    found = cumem.array(source)
    assert (values.get(found) == before).all()


@pytest.mark.parametrize("take", [cumem.asbuffer, cumem.asnumpy, cumem.array])
@pytest.mark.parametrize("count", [1, 5])
def test_tensor_whose_values_are_not_its_bytes_is_refused(
    runtime, take, count: int
) -> None:
    class Tensor(FakeDLPack):
        negative = True

        def is_neg(self) -> bool:
            return self.negative

    # The expression x.conj().imag gives such a view.
    parts = np.arange(2 * count, dtype="f4")[1::2]
    tensor = Tensor(Produced.over(parts))
    with pytest.raises(BufferError, match="resolve_neg"):
        take(tensor)
    assert tensor.produced.deleted == 1
    tensor = Tensor(Produced.over(parts))
    tensor.negative = False
    assert values.get(cumem.array(tensor)).tolist() == parts.tolist()


def test_torch_tensor_with_the_negative_bit_is_neither_read_nor_written(
    runtime,
) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    with pytest.raises(BufferError, match="resolve_neg"):
        cumem.asnumpy(tensor)
    with pytest.raises(BufferError, match="resolve_neg"):
        cumem.copy(tensor, np.ones(2, "f4"))
    assert tensor.tolist() == [-2, -4]
    assert cumem.asnumpy(tensor.resolve_neg()).tolist() == [-2, -4]


# -- strides that others cannot read ----------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [{}, {"max_version": (1, 0)}])
def test_dlpack_of_negative_strides_is_refused_and_says_what_to_do(
    runtime, kind, version
) -> None:
    buffer = cumem.array(np.arange(12, dtype="i4").reshape(3, 4), kind=kind)
    for view in (buffer[::-1], buffer[:, ::-2], buffer[1, ::-1]):
        with pytest.raises(BufferError, match=r"negative.*copy\(\)"):
            view.__dlpack__(**version)
    buffer.free()  # Nothing of the buffer is exported.


@pytest.mark.parametrize("kind", KINDS)
def test_negative_strides_that_are_never_stepped_by_are_exported(runtime, kind) -> None:
    buffer = cumem.array(np.arange(12, dtype="i4").reshape(3, 4), kind=kind)
    for view in (buffer[1:2][::-1], buffer[:0, ::-1]):
        found = cumem.asbuffer(view.__dlpack__())
        assert (values.get(found) == values.get(view)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_copy_of_negative_strides_is_exported(runtime, kind) -> None:
    expected = np.arange(12, dtype="i4").reshape(3, 4)[::-1, ::-2]
    view = cumem.array(np.arange(12, dtype="i4").reshape(3, 4), kind=kind)[::-1, ::-2]
    assert (values.get(cumem.asbuffer(view.copy().__dlpack__())) == expected).all()
    capsule = view.__dlpack__(copy=True, max_version=(1, 0))
    assert (values.get(cumem.asbuffer(capsule)) == expected).all()


@pytest.mark.parametrize("kind", KINDS)
def test_own_calls_take_negative_strides(runtime, kind) -> None:
    expected = np.arange(12, dtype="i4").reshape(3, 4)
    view = cumem.array(expected, kind=kind)[::-1, ::-2]
    assert cumem.asbuffer(view) is view
    assert (values.get(view) == expected[::-1, ::-2]).all()
    assert (values.get(cumem.array(view)) == expected[::-1, ::-2]).all()
    cumem.copy(view, np.zeros((3, 2), "i4"))
    assert (values.get(view) == 0).all()


@pytest.mark.parametrize("kind", ["mapped", "managed", "device"])
def test_cai_of_negative_strides_is_not_there(runtime, kind) -> None:
    buffer = cumem.zeros((3, 4), "i4", kind)
    for view in (buffer[::-1], buffer[:, ::-2]):
        with pytest.raises(AttributeError, match=r"negative.*copy\(\)"):
            session.testing.array_interface(view)
    assert session.testing.array_interface(buffer[1:2][::-1])["shape"] == (1, 4)
    assert session.testing.array_interface(buffer[:0, ::-1])["shape"] == (0, 4)


#: This program gives buffers with negative strides to each function of PyTorch that
#: makes tensors of them.
TORCH_CALLS = """
import itertools
import cumem, torch

calls = {
    "as_tensor": torch.as_tensor,
    "tensor": torch.tensor,
    "from_dlpack": torch.from_dlpack,
    "asarray": torch.asarray,
    "frombuffer": lambda buffer: torch.frombuffer(buffer, dtype=torch.float32),
}
for kind, (name, call) in itertools.product(
    ("pinned", "mapped", "managed", "device"), calls.items()
):
    print(kind, name, flush=True)
    view = cumem.full(6, 3, "f4", kind)[::-1]
    try:
        call(view)
    except (BufferError, RuntimeError, ValueError):
        if (kind, name) != ("device", "frombuffer"):
            assert (call(view.copy()) == 3).all()
    else:
        raise SystemExit("a tensor was made of it")
"""


def test_torch_refuses_negative_strides_and_lives() -> None:
    """An older PyTorch aborted the process, so the calls run in a separate one."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-Wignore", "-c", TORCH_CALLS],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- devices out of reach ------------------------------------------------------------------


def as_interface(buffer: cumem.Buffer) -> object:
    return FakeCAI(interface_of(buffer), buffer)


def as_dlpack(buffer: cumem.Buffer) -> object:
    """Return an exporter of the buffer by DLPack, which says that it is on device 1."""
    produced = Produced(
        buffer.ptr, buffer.shape, None, buffer.dtype, device=(CUDA, 1), keep=buffer
    )
    return FakeDLPack(produced)


@pytest.mark.parametrize("shown", [as_interface, as_dlpack])
def test_memory_that_the_current_device_does_not_reach_is_copied(
    emulated, shown
) -> None:
    """The driver names no address for such memory.

    PyTorch's tensors on a second GPU once failed here.
    """
    theirs = cumem.Pool("device", device=1, segments="malloc").allocate(100_000)
    theirs.fill(7)
    array = shown(theirs)
    view = cumem.asbuffer(array)
    assert (view.device, view.ptr) == (cumem.Device(1), theirs.ptr)
    out = np.zeros(theirs.nbytes, "u1")
    cumem.copy(out, array)
    assert (out == 7).all()
    here = cumem.zeros(theirs.nbytes, "u1", device=0)
    cumem.copy(here, array, stream=cumem.Stream())
    assert (values.get(here) == 7).all()
