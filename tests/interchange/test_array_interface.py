# SPDX-License-Identifier: Apache-2.0
"""The protocol `__cuda_array_interface__`, out of cumem and into it.

The first part compares the dictionary of a buffer with NumPy's, and looks at which
stream it names while work is pending. The second makes buffers from valid
and from invalid dictionaries.
"""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support import session, values
from support.exporters import FakeCAI, interface_of
from support.strategies import DTYPES

import cumem

# Where the driver lacks these calls, cumem works in other ways.
pytestmark = pytest.mark.by_driver("context_record_event", "stream_get_device")

CAI = "__cuda_array_interface__"
CAI_KINDS = ["mapped", "managed", "device"]


def interface(buffer: cumem.Buffer) -> dict[str, Any]:
    """Return the dictionary that consumers see on a GPU, on the emulated device too."""
    return session.testing.array_interface(buffer)


def pointer(buffer: Any) -> int:
    return buffer.device_ptr if isinstance(buffer, cumem.MappedBuffer) else buffer.ptr


# -- out --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CAI_KINDS)
def test_emulated_buffers_offer_none_and_say_why(emulated, kind) -> None:
    buffer = cumem.empty(3, "f4", kind)
    assert not hasattr(buffer, CAI)
    with pytest.raises(AttributeError, match="emulated"):
        getattr(buffer, CAI)


@pytest.mark.parametrize("kind", CAI_KINDS)
def test_real_buffers_offer_it(runtime, kind) -> None:
    buffer = cumem.empty(3, "f4", kind)
    assert hasattr(buffer, CAI) is not runtime.emulated


def test_pinned_and_host_buffers_never_offer_it(runtime) -> None:
    assert not hasattr(cumem.empty(3, "f4", "pinned"), CAI)
    assert not hasattr(cumem.asbuffer(np.zeros(3)), CAI)
    assert not hasattr(type(cumem.empty(3, "f4", "pinned")), CAI)


@pytest.mark.parametrize("kind", CAI_KINDS)
def test_entries_are_numpys(runtime, kind) -> None:
    for dtype in DTYPES:
        array = np.zeros((2, 3), dtype)
        expected = array.__array_interface__
        buffer = cumem.empty((2, 3), dtype, kind)
        found = interface(buffer)
        assert found["shape"] == expected["shape"]
        assert found["typestr"] == expected["typestr"]
        assert found["strides"] is None
        assert found["version"] == 3
        assert found["data"] == (pointer(buffer), False)
        assert found.get("descr") == (expected["descr"] if dtype.names else None)


def test_overlapping_fields_are_left_undescribed(runtime) -> None:
    dtype = np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]})
    assert "descr" not in interface(cumem.empty(2, dtype, "device"))


@pytest.mark.parametrize("kind", CAI_KINDS)
def test_dtype_that_no_type_string_names_is_left_to_dlpack(runtime, kind) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    # NumPy names these dtypes "<V2", "<V1" and "<f1".
    for name in ("bfloat16", "float8_e4m3", "float8_e5m2"):
        buffer = cumem.empty(3, getattr(ml_dtypes, name), kind)
        with pytest.raises(AttributeError, match=rf"no type string.*{name}.*DLPack"):
            interface(buffer)
        assert interface(buffer.view("u1"))["typestr"] == "|u1"


def test_fields_that_cannot_be_read_back_are_left_undescribed(runtime) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    buffer = cumem.empty(2, [("a", ml_dtypes.float8_e5m2), ("b", "u1")], "device")
    entries = interface(buffer)
    assert entries["typestr"] == "|V2"
    assert "descr" not in entries


@pytest.mark.parametrize("kind", CAI_KINDS)
def test_strides_are_given_only_where_they_matter(runtime, kind) -> None:
    buffer = cumem.empty((4, 6), "f4", kind)
    assert interface(buffer)["strides"] is None
    assert interface(buffer[1:3])["strides"] is None
    assert interface(buffer[2, 3])["strides"] is None
    assert interface(buffer[::2])["strides"] == (48, 4)
    assert interface(buffer.T)["strides"] == (4, 24)
    assert interface(buffer[3::2])["data"][0] == pointer(buffer) + 72


@pytest.mark.parametrize("kind", CAI_KINDS)
@pytest.mark.parametrize("shape", [0, (0, 3), (3, 0, 2)])
def test_empty_buffer_has_pointer_0(runtime, kind, shape) -> None:
    found = interface(cumem.empty(shape, "f8", kind))
    assert found["data"] == (0, False)
    assert found["stream"] is None
    assert found["strides"] is None


def test_readonly_is_said(runtime) -> None:
    buffer = cumem.empty(4, "f4", "device")
    view = cumem.asbuffer(
        FakeCAI(interface_of(buffer, data=(buffer.ptr, True)), buffer)
    )
    assert view.readonly
    assert interface(view)["data"] == (buffer.ptr, True)


def test_closed_buffer_has_none(runtime) -> None:
    buffer = cumem.empty(4, "f4", "device")
    buffer.free()
    expected = ValueError
    with pytest.raises(expected, match="closed"):
        getattr(buffer, CAI)


@pytest.mark.parametrize("kind", CAI_KINDS)
def test_stream_is_named_only_while_work_is_pending(emulated, kind) -> None:
    stream = cumem.Stream()
    buffer = cumem.zeros(64, "u1", kind)
    scratch = cumem.zeros(64, "u1", "device")
    cumem.Device(0).synchronize()
    assert interface(buffer)["stream"] is None
    buffer.record_stream(stream)
    assert interface(buffer)["stream"] is None
    with session.gate(stream):
        scratch.fill(1, stream=stream)
        # The fill has waited for this stream.
        cumem.current_stream().synchronize()
        assert interface(buffer)["stream"] == stream.handle
        assert interface(buffer)["stream"] == stream.handle
    stream.synchronize()
    assert interface(buffer)["stream"] is None


@pytest.mark.parametrize("default", [1, 2], ids=["legacy", "per-thread"])
@pytest.mark.parametrize("way", ["fill", "copy"])
def test_work_of_a_default_stream_is_waited_for_by_a_named_one(
    emulated, way, default
) -> None:
    source = cumem.full(64, 1, "u1", "device")
    buffer = cumem.zeros(64, "u1", "device")
    cumem.Device(0).synchronize()
    with session.gate(default):
        if way == "fill":
            buffer.fill(1, stream=default)
        else:
            cumem.copy_async(buffer, source, stream=default)
        # JAX ignores the numbers that stand for the default streams, so the dictionary must
        # name another stream.
        named = interface(buffer)["stream"]
        assert named not in (None, 1, 2)
        assert interface(buffer)["stream"] == named
        assert not cumem.Stream.from_external(named).done
    cumem.Stream.from_external(named).synchronize()
    assert (values.get(buffer) == 1).all()
    assert interface(buffer)["stream"] is None


@pytest.mark.parametrize("driver", [12040, 13000])
def test_default_stream_of_another_thread_is_not_named(driver) -> None:
    def check() -> None:
        buffer = cumem.zeros(64, "u1", "device")
        cumem.Device(0).synchronize()
        queued, asked = threading.Event(), threading.Event()

        def fill() -> None:
            # The number 2 means another stream in this thread.
            with session.gate(2):
                buffer.fill(1, stream=2)
                queued.set()
                asked.wait()

        writer = threading.Thread(target=fill)
        writer.start()
        queued.wait()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(lambda: interface(buffer)["stream"])
            try:
                # With an older driver, the call itself waits for the device.
                if driver >= 12050:
                    named = answer.result()
                    assert named not in (None, 1, 2)
                    assert not cumem.Stream.from_external(named).done
            finally:
                asked.set()
                writer.join()
        if answer.result() is not None:
            cumem.Stream.from_external(answer.result()).synchronize()
        assert (values.get(buffer) == 1).all()

    with session.opened(driver_version=driver):
        check()


def test_several_pending_streams_are_joined_on_one(emulated) -> None:
    one, two = cumem.Stream(), cumem.Stream()
    buffer = cumem.zeros(64, "u1", "device")
    buffer.record_stream(one)
    buffer.record_stream(two)
    scratch = cumem.zeros(64, "u1", "device")
    other = cumem.zeros(64, "u1", "device")
    cumem.Device(0).synchronize()
    with session.gate(two):
        with session.gate(one):
            scratch.fill(1, stream=one)
            other.fill(2, stream=two)
            cumem.current_stream().synchronize()
            named = interface(buffer)["stream"]
            assert named in (one.handle, two.handle)
            joined = one if named == one.handle else two
        # The first stream is open, and the second still shut. The named stream waits
        # for the second.
        assert not joined.done
    joined.synchronize()
    assert one.done
    assert two.done


@pytest.mark.parametrize("kind", CAI_KINDS)
def test_block_waits_for_the_unseen_work_of_who_read_the_dictionary(
    emulated, kind
) -> None:
    pool = cumem.Pool(kind)
    stream = cumem.Stream()
    scratch = cumem.zeros(64, "u1", "device")
    cumem.Device(0).synchronize()
    for read in (False, True):
        buffer = pool.allocate(4096)
        address = pointer(buffer)
        with session.gate(stream):
            scratch.fill(1, stream=stream)  # This fill stands for work on the buffer.
            if read:
                interface(buffer)
            del buffer
            assert pool.stats().in_flight_count == read
            another = pool.allocate(4096)
            assert (pointer(another) == address) is not read
        del another
        cumem.Device(0).synchronize()
        pool.trim()
    assert pool.stats().in_flight_count == 0


def test_background_transfer_is_waited_for(emulated) -> None:
    source = cumem.full(1 << 12, 4, "u1", "pinned")
    buffer = cumem.zeros(1 << 12, "u1", "device")
    session.testing.delay_op("copy_async", 2000)
    transfer = cumem.copy_async(buffer, source)
    found = interface(buffer)
    session.testing.delay_op("copy_async", 0)
    if found["stream"] is not None:
        cumem.Stream.from_external(found["stream"]).synchronize()
    transfer.wait()
    assert (values.get(buffer) == 4).all()


# -- in ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CAI_KINDS)
def test_round_trip_keeps_everything(runtime, kind) -> None:
    for dtype in DTYPES:
        check_round_trip(cumem.empty((4, 6), dtype, kind), kind)


def check_round_trip(buffer: cumem.Buffer, kind: str) -> None:
    """Export views of a buffer and import them again. For one view, put only its shape,
    strides and address into the dictionary of the whole buffer.
    """
    for view in (buffer, buffer[1:, ::2], buffer.T, buffer[2, 3], buffer[:0]):
        check_import(view, interface(view), kind)
    view = buffer[1:, ::-2]
    places = {key: interface_of(view)[key] for key in ("shape", "strides", "data")}
    check_import(view, {**interface(buffer), **places}, kind)


def check_import(view: cumem.Buffer, entries: dict[str, Any], kind: str) -> None:
    """Import memory by `entries`, and check that it is the memory of `view`."""
    found = cumem.asbuffer(FakeCAI(entries, view))
    assert found.shape == view.shape
    assert found.dtype == view.dtype, view.dtype
    if view.size:
        assert pointer(found) == pointer(view)
        assert found.strides == view.strides
        assert found.kind == kind


@pytest.mark.parametrize("kind", CAI_KINDS)
def test_bytes_are_the_same_bytes(runtime, kind) -> None:
    data = np.arange(24, dtype="i4").reshape(4, 6)
    buffer = cumem.array(data, kind=kind)
    found = cumem.asbuffer(FakeCAI(interface_of(buffer[::2, 1:]), buffer))
    assert (values.get(found) == data[::2, 1:]).all()
    found[...] = 7
    data[::2, 1:] = 7
    assert (values.get(buffer) == data).all()


def test_pinned_pointer_becomes_a_mapped_buffer(runtime) -> None:
    buffer = cumem.full(8, 3, "u1", "pinned")
    found = cumem.asbuffer(FakeCAI(interface_of(buffer), buffer))
    assert isinstance(found, cumem.MappedBuffer)
    assert (found.numpy() == 3).all()


def test_owner_lives_as_long_as_the_view(runtime) -> None:
    class Owner(FakeCAI):
        pass

    buffer = cumem.empty(8, "u1", "device")
    owner = Owner(interface_of(buffer), buffer)
    found = cumem.asbuffer(owner)
    part = found[2:]
    reference = weakref.ref(owner)
    del owner, found
    gc.collect()
    assert reference() is not None
    del part
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_versions_are_read(runtime, version) -> None:
    buffer = cumem.empty(8, "u1", "device")
    entries = interface_of(buffer, version=version)
    del entries["strides"], entries["stream"]
    assert cumem.asbuffer(FakeCAI(entries)).shape == (8,)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"version": 4}, ValueError, "version"),
    ({"version": -1}, ValueError, "version"),
    ({"version": "3"}, TypeError, "version"),
    ({"shape": [2, 4]}, TypeError, "shape"),
    ({"shape": (2, -4)}, ValueError, "shape"),
    ({"shape": (2, 4.0)}, TypeError, "shape"),
    ({"shape": (1 << 63,)}, ValueError, "shape"),
    ({"shape": (1 << 62, 1 << 62)}, ValueError, "63 bits"),
    ({"shape": (1 << 40, 4), "strides": None}, ValueError, "allocation"),
    ({"shape": (1,) * 65}, ValueError, "64"),
    ({"typestr": 4}, TypeError, "typestr"),
    ({"typestr": "f4"}, ValueError, "typestr"),
    ({"typestr": "<f3"}, ValueError, "typestr"),
    ({"typestr": "<f4,<f4"}, ValueError, "typestr"),
    ({"typestr": "|O8"}, ValueError, "typestr"),
    ({"typestr": "<f99999999999"}, ValueError, "typestr"),
    ({"typestr": "|V0"}, ValueError, "typestr"),
    ({"typestr": "|V4", "descr": [("a", "<i2")]}, ValueError, "descr"),
    ({"typestr": "|V8", "descr": [("a", "|O")]}, ValueError, "descr"),
    ({"typestr": "|V4", "descr": "x"}, TypeError, "descr"),
    ({"data": None}, ValueError, "data"),
    ({"data": 5}, TypeError, "data"),
    ({"data": (5, False, 1)}, TypeError, "data"),
    ({"data": ("5", False)}, TypeError, "data"),
    ({"data": (0, False)}, ValueError, "NULL"),
    ({"data": (-1, False)}, ValueError, "data"),
    ({"data": (1 << 64, False)}, ValueError, "data"),
    ({"data": ((1 << 64) - 4, False)}, ValueError, "address space"),
    ({"strides": (16,)}, ValueError, "strides"),
    ({"strides": [16, 4]}, TypeError, "strides"),
    ({"strides": (1 << 62, 4)}, ValueError, "reach|address space|allocation"),
    ({"strides": (-(1 << 62), 4)}, ValueError, "reach|address space|allocation"),
    ({"strides": (1 << 63, 4)}, ValueError, "strides"),
    ({"mask": 1}, ValueError, "mask"),
    ({"stream": 0}, ValueError, "stream"),
    ({"stream": -1}, ValueError, "stream"),
    ({"stream": "1"}, TypeError, "stream"),
    ({"stream": True}, TypeError, "stream"),
]


@pytest.mark.parametrize(("changes", "error", "word"), WRONG, ids=lambda v: str(v)[:40])
def test_wrong_entries_are_refused_by_name(runtime, changes, error, word) -> None:
    buffer = cumem.empty((2, 4), "f4", "device")
    if word == "allocation" and not runtime.emulated:
        error, word = (ValueError, cumem.CudaError), None
    with pytest.raises(error, match=word):
        cumem.asbuffer(FakeCAI(interface_of(buffer, **changes)))


@pytest.mark.parametrize("key", ["shape", "typestr", "data", "version"])
def test_missing_entries_are_named(runtime, key) -> None:
    entries = interface_of(cumem.empty((2, 4), "f4", "device"))
    del entries[key]
    with pytest.raises(ValueError, match=key):
        cumem.asbuffer(FakeCAI(entries))


def test_something_else_than_a_dict_is_refused(runtime) -> None:
    with pytest.raises(TypeError, match="dict"):
        cumem.asbuffer(FakeCAI([("shape", (1,))]))


def test_ordinary_memory_is_no_device_memory(runtime) -> None:
    array = np.zeros(8, "u1")
    entries = {
        "shape": (8,),
        "typestr": "|u1",
        "data": (array.ctypes.data, False),
        "version": 3,
    }
    with pytest.raises(ValueError, match="ordinary host memory"):
        cumem.asbuffer(FakeCAI(entries, array))


def test_region_past_its_allocation_is_refused(emulated) -> None:
    buffer = cumem.empty(1 << 20, "u1", "device")
    entries = interface_of(buffer, shape=(1 << 30,))
    with pytest.raises(ValueError, match="allocation"):
        cumem.asbuffer(FakeCAI(entries, buffer))


def test_freed_memory_is_refused(emulated) -> None:
    buffer = cumem.empty(1 << 20, "u1", "device")
    entries = interface_of(buffer)
    buffer.free()
    released = cumem.trim()  # The pool records a fence here.
    # The pool gives the memory back only after the fence has passed.
    cumem.Device(0).synchronize()
    assert released + cumem.trim() > 0
    with pytest.raises(ValueError, match=r"ordinary host memory|allocation"):
        cumem.asbuffer(FakeCAI(entries))


def test_exception_of_the_property_comes_through(runtime) -> None:
    class Broken:
        @property
        def __cuda_array_interface__(self) -> object:
            raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        cumem.asbuffer(Broken())


def test_entries_that_change_while_read_are_harmless(runtime) -> None:
    buffer = cumem.empty((2, 4), "f4", "device")
    entries = interface_of(buffer)

    class Hostile:
        def __index__(self) -> int:
            entries.clear()
            return 2

    entries["shape"] = (Hostile(), 4)
    assert cumem.asbuffer(FakeCAI(entries, buffer)).shape == (2, 4)


def test_import_waits_for_the_named_stream(emulated) -> None:
    producer, consumer = cumem.Stream(), cumem.Stream()
    buffer = cumem.zeros(64, "u1", "device")
    out = cumem.zeros(64, "u1", "pinned")
    entries = interface_of(buffer, stream=producer.handle)
    with session.gate(producer):
        buffer.fill(6, stream=producer)
        found = cumem.asbuffer(FakeCAI(entries, buffer), stream=consumer)
        cumem.copy_async(out, found, stream=consumer)
        assert not consumer.done
    consumer.synchronize()
    assert (out.numpy() == 6).all()


def test_unknown_stream_is_an_error(emulated) -> None:
    entries = interface_of(cumem.zeros(64, "u1", "device"), stream=0xDEAD0)
    with pytest.raises(cumem.CudaError):
        cumem.asbuffer(FakeCAI(entries))
