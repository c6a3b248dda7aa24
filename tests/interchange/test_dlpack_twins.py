# SPDX-License-Identifier: Apache-2.0
"""Twins of the tests of DLPack by PyTorch and by the array API standard.

Two tables say which test here asks the same of our buffers. Twins that no other file
has follow below.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import session, values
from support.exporters import CPU, CUDA, capsule_name
from support.strategies import KINDS, kinds, random_array, same_bytes, shapes

import cumem

HERE = Path(__file__).parent
BACKENDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
NUMBERS = [
    np.dtype(text)
    for text in (
        *("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"),
        *("f2", "f4", "f8", "c8", "c16"),
    )
]
NARROW = (
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e8m0fnu", "bfloat16"),
)

#: Each case of PyTorch's test/test_dlpack.py, with the tests here that ask the same of
#: our buffers.
OF_TORCH = {
    "capsule conversion": ("conformance", "dtypes"),
    "protocol conversion": ("conformance", "dtypes"),
    "shared storage": ("conformance", "answer"),
    "conversion with streams": (
        *("conformance", "library_reads_after_a_long_kernel_of_ours"),
        *("conformance", "we_read_after_a_long_kernel_of_theirs"),
    ),
    "the same, narrow precision": (
        *("dlpack_twins", "narrow_numbers_come_after_work_of_another_stream"),
    ),
    "from_dlpack, and its dtype": ("conformance", "dtypes"),
    "from_dlpack, not contiguous": ("conformance", "layouts"),
    "different streams": ("dlpack", "consumer_stream_waits_for_pending_work"),
    "different streams, narrow precision": (
        *("dlpack_twins", "narrow_numbers_come_after_work_of_another_stream"),
    ),
    "default stream is called 1": ("asbuffer", "device_exporter_is_given_our_stream"),
    "default stream gets a wait and no pause": (
        *("dlpack_twins", "export_to_the_default_stream_does_not_wait"),
    ),
    "stream of a wrong type": ("dlpack", "wrong_arguments_are_refused"),
    # PyTorch refuses this stream.
    "per-thread stream": ("dlpack", "cuda_streams_are_taken"),
    "stream 0 of CUDA": ("dlpack", "forbidden_streams_are_refused"),
    # PyTorch refuses this stream.
    "stream of the CPU": ("dlpack", "host_memory_takes_any_stream"),
    "another device is current": (
        *("dlpack_twins", "buffer_of_another_device_than_the_current_one"),
        *("dlpack", "exporter_is_asked_with_its_device_current"),
    ),
    "requires grad": (
        *("dlpack_twins", "tensors_that_have_no_memory_to_share_say_why"),
        *("dlpack_exchange", "gradient_is_python_s_to_refuse"),
    ),
    "is conj": (
        *("dlpack_twins", "tensors_that_have_no_memory_to_share_say_why"),
        *("dlpack_exchange", "complex_numbers_may_be_conjugates"),
    ),
    "not strided": ("dlpack_twins", "tensors_that_have_no_memory_to_share_say_why"),
    "unsupported dtype": (
        *("dlpack_twins", "tensors_that_have_no_memory_to_share_say_why"),
        *("dlpack", "other_dtypes_are_refused_by_name"),
    ),
    "strides of axes of one element": (
        *("conformance", "strides_of_axes_of_one_element_are_those_of_c_order"),
    ),
    "creation takes what has DLPack alone": (
        *("dlpack_twins", "creation_reads_memory_and_no_elements"),
    ),
    "max_version": ("dlpack", "capsule_is_of_the_generation_asked_for"),
    "NumPy and back": ("dlpack", "numbers_round_trip_through_numpy"),
    "copy": ("conformance", "copy_is_obeyed"),
    "no copy": ("conformance", "copy_is_obeyed"),
    "copy to the CPU is needed": (
        *("dlpack", "device_memory_is_not_copied_against_the_callers_will"),
    ),
    "unsupported device": ("dlpack", "impossible_devices_are_refused"),
}
#: The tests of the array API standard have these twins here.
OF_THE_STANDARD = {
    "__dlpack_device__": ("conformance", "exporter_keeps_to_the_standard"),
    "__dlpack__": ("dlpack_twins", "every_combination_of_keywords_gives_the_values"),
    "from_dlpack": ("dlpack_twins", "from_dlpack_of_numpy_keeps_to_the_standard"),
}


@pytest.mark.parametrize("case", [*OF_TORCH.values(), *OF_THE_STANDARD.values()])
def test_the_twin_exists(case: tuple[str, ...]) -> None:
    for file, name in zip(case[::2], case[1::2], strict=True):
        text = (HERE / f"test_{file}.py").read_text("utf-8")
        assert re.search(rf"^def test_{name}\(", text, re.MULTILINE), (file, name)


# -- the array API ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_combination_of_keywords_gives_the_values(backend: str) -> None:
    with session.opened(backend):

        @given(
            kinds,
            st.sampled_from(NUMBERS),
            shapes,
            st.sampled_from([{}, {"copy": None}, {"copy": False}, {"copy": True}]),
            st.one_of(
                st.just({}),
                st.tuples(st.integers(0, 2), st.just(0)).map(
                    lambda version: {"max_version": version}
                ),
            ),
            st.sampled_from([{}, {"dl_device": (CPU, 0)}, {"dl_device": None}]),
        )
        def check(kind, dtype, shape, copy, version, device) -> None:
            array = random_array(shape, dtype, 4)
            buffer: Any = values.put(array, kind)
            keywords = {**copy, **version, **device}
            needs_copy = kind == "device" and device.get("dl_device") is not None
            if needs_copy and array.size and copy.get("copy") is False:
                with pytest.raises((BufferError, ValueError), match="copy"):
                    buffer.__dlpack__(**keywords)
                return
            capsule = buffer.__dlpack__(**keywords)
            is_new = version.get("max_version", (0, 0))[0] >= 1
            assert capsule_name(capsule) == (
                "dltensor_versioned" if is_new else "dltensor"
            )
            found = cumem.asbuffer(capsule)
            assert (found.shape, found.dtype) == (shape, dtype)
            assert same_bytes(found.to_numpy(), array)
            if array.size and not needs_copy:
                cumem.copy(buffer, np.zeros_like(array))
                left = array if copy.get("copy") else np.zeros_like(array)
                assert same_bytes(found.to_numpy(), left)

        check()


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0",
    reason="from_dlpack() of this NumPy has no device= and copy=",
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_from_dlpack_of_numpy_keeps_to_the_standard(backend: str) -> None:
    with session.opened(backend):

        @given(
            kinds,
            st.sampled_from(NUMBERS),
            shapes,
            st.sampled_from([{}, {"copy": None}, {"copy": False}, {"copy": True}]),
        )
        def check(kind, dtype, shape, copy) -> None:
            array = random_array(shape, dtype, 5)
            buffer: Any = values.put(array, kind)
            if kind == "device" and array.size and copy.get("copy") is False:
                with pytest.raises((BufferError, ValueError), match="copy"):
                    np.from_dlpack(buffer, device="cpu", **copy)
                return
            found = np.from_dlpack(buffer, device="cpu", **copy)
            assert (found.shape, found.dtype, found.device) == (shape, dtype, "cpu")
            assert same_bytes(found, array)
            if array.size and kind != "device":
                shares = np.shares_memory(found, buffer.numpy())
                assert shares is not bool(copy.get("copy"))

        check()


# -- PyTorch ---------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", NARROW)
def test_narrow_numbers_come_after_work_of_another_stream(cuda, name) -> None:
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    producer, consumer = cumem.Stream(), cumem.Stream()
    bytes_ = cumem.zeros(1 << 26, "u1")
    for value in (1, 2, 3) * 20 + (9,):
        bytes_.fill(value, stream=producer)
    capsule = bytes_.view(dtype).__dlpack__(stream=consumer.handle, max_version=(1, 0))
    found = cumem.asbuffer(capsule, stream=consumer)
    assert found.dtype == dtype
    out = cumem.zeros(1 << 26, "u1", "pinned")
    cumem.copy_async(out, found.view("u1"), stream=consumer).wait()
    assert (out.numpy() == 9).all()


@pytest.mark.gpu
def test_export_to_the_default_stream_does_not_wait(cuda) -> None:
    default = cumem.Stream.from_external(1)
    buffer = cumem.zeros(1 << 28, "u1")
    default.synchronize()
    producer = cumem.Stream()
    for _ in range(500):
        buffer.fill(5, stream=producer)
    capsule = buffer.__dlpack__(stream=1, max_version=(1, 0))
    was_done = default.done
    assert not producer.done, "the work ended before the test could look"
    assert not was_done, "the default stream does not wait for the producer"
    found = cumem.asbuffer(capsule, stream=default)
    assert (found.to_numpy() == 5).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_buffer_of_another_device_than_the_current_one(backend, kind) -> None:
    """PyTorch refuses such a tensor. A buffer knows its device, so cumem need not
    refuse it.
    """
    options = {"device_count": 2} if backend == "emulated" else {}
    with session.opened(backend, **options):
        if cumem.device_count() < 2:
            pytest.skip("this test needs two devices")
        buffer = cumem.array([1, 2, 3], "i4", kind, device=1)
        assert cumem.current_device() == 0
        capsule = buffer.__dlpack__(max_version=(1, 0))
        if kind == "device":
            there = (CPU, 0) if backend == "emulated" else (CUDA, 1)
            assert buffer.__dlpack_device__() == there
        found = cumem.asbuffer(capsule)
        assert found.tolist() == [1, 2, 3]
        assert cumem.current_device() == 0
        del capsule, found, buffer


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda torch: torch.ones(3, requires_grad=True), r"detach\(\)"),
        (lambda torch: torch.tensor([1j, 2]).conj(), "conjugate"),
        (lambda torch: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda torch: torch.ones(3, device="meta"), "meta"),
        (
            lambda torch: torch.quantize_per_tensor(
                torch.zeros(3), 0.1, 10, torch.qint8
            ),
            "quantised",
        ),
    ],
    ids=["grad", "conj", "sparse", "meta", "quantized"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_have_no_memory_to_share_say_why(runtime, make, text) -> None:
    torch = pytest.importorskip("torch")
    tensor = make(torch)
    target = cumem.full(3, 7, "f4", "pinned")
    for call in (
        cumem.asbuffer,
        cumem.array,
        cumem.asarray,
        lambda source: cumem.copy(target, source),
    ):
        with pytest.raises((BufferError, ValueError), match=text):
            call(tensor)
    assert target.tolist() == [7, 7, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_creation_reads_memory_and_no_elements(runtime, kind) -> None:
    class Only:
        """An object that has DLPack, and no elements to read one by one."""

        def __init__(self, buffer: Any) -> None:
            self.buffer = buffer
            self.count = 0

        def __dlpack__(self, **keywords: Any) -> object:
            self.count += 1
            return self.buffer.__dlpack__(**keywords)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.buffer.__dlpack_device__()  # type: ignore[no-any-return]

    array = np.arange(10, dtype="f4")
    buffer = cumem.array(array, kind=kind)
    for make in (
        lambda obj: cumem.array(obj, kind="pinned"),
        lambda obj: cumem.full(10, obj, kind="pinned"),
        lambda obj: cumem.asarray(obj, kind="mapped"),
    ):
        only = Only(buffer)
        assert make(only).tolist() == array.tolist()
        assert only.count == 1
    if kind == "managed":
        # torch.tensor() asks for the memory's device, and does not know this kind.
        return
    torch = pytest.importorskip("torch")
    only = Only(buffer)
    tensor = torch.tensor(only)
    assert only.count == 1
    assert tensor.tolist() == array.tolist()
    assert torch.tensor(buffer).tolist() == array.tolist()
