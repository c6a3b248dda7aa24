# SPDX-License-Identifier: Apache-2.0
"""asnumpy() and to_numpy() make new NumPy arrays of anything.

The tests compare shape, dtype and bytes with the source, and check that the array owns
its memory, is contiguous and can be written.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import session, values

import cumem

KINDS = ["pinned", "mapped", "managed", "device"]
DTYPES = ["?", "i1", "<f4", ">i4", "c16", "M8[s]", "m8[ns]", "S5", "U3", "V7"]
RECORD = np.dtype([("a", "u1"), ("b", ">f8"), ("c", "M8[D]", (2,))])


def check(made: np.ndarray, wanted: np.ndarray) -> None:
    """Check that an array is contiguous, writeable, owns its memory and has the wanted
    bytes.
    """
    assert type(made) is np.ndarray
    assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)
    assert made.flags.c_contiguous
    assert made.flags.writeable
    assert made.flags.owndata
    assert made.tobytes() == wanted.tobytes()


def numbers(shape, dtype) -> np.ndarray:
    """Return an array whose bytes are 0 and 1 in turn: a bool may have no other byte."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(bytes(i % 2 for i in range(count)), dtype).reshape(shape)


@pytest.mark.parametrize("kind", [*KINDS, "numpy"])
@pytest.mark.parametrize("dtype", [*DTYPES, RECORD], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (2, 3, 4)])
def test_same_shape_dtype_and_bytes(emulated, kind, dtype, shape) -> None:
    wanted = numbers(shape, dtype)
    source = values.put(wanted.copy(), kind)
    check(cumem.asnumpy(source), wanted)
    if kind != "numpy":
        check(source.to_numpy(), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_of_others(emulated, kind) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    wanted = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    check(values.put(wanted, kind).to_numpy(), wanted)


@pytest.mark.parametrize("kind", [*KINDS, "numpy"])
def test_strided_views_become_contiguous(emulated, kind) -> None:
    wanted = np.arange(60, dtype="i4").reshape(5, 12)
    source = values.put(wanted.copy(), kind)
    check(cumem.asnumpy(source.T), wanted.T)
    check(cumem.asnumpy(source[::-2, 1::3]), wanted[::-2, 1::3])


def test_read_only_sources_give_writable_arrays(emulated) -> None:
    wanted = np.arange(9.0)
    frozen = wanted.copy()
    frozen.flags.writeable = False
    check(cumem.asnumpy(frozen), wanted)
    check(cumem.asnumpy(cumem.asbuffer(frozen)), wanted)
    check(cumem.asnumpy(b"abc"), np.frombuffer(b"abc", "u1"))
    check(cumem.asnumpy(memoryview(frozen)), wanted)


def test_values_and_what_only_numpy_reads(emulated) -> None:
    class Only:
        def __array__(self, dtype=None, copy=None) -> np.ndarray:
            return kept

    kept = np.arange(4)
    check(cumem.asnumpy([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]]))
    check(cumem.asnumpy(2.5), np.array(2.5))
    made = cumem.asnumpy(Only())
    check(made, kept)
    assert not np.shares_memory(made, kept)
    with pytest.raises(TypeError, match="object"):
        cumem.asnumpy(object())
    with pytest.raises(TypeError, match="object"):
        cumem.asnumpy(np.array([None]))


def test_tensors_of_torch(emulated) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    check(cumem.asnumpy(tensor.T), tensor.numpy().T)


def test_mapped_file_is_read(emulated, tmp_path) -> None:
    path = tmp_path / "bytes.bin"
    path.write_bytes(bytes(range(256)) * (1 << 18))
    mapped = np.memmap(path, "u1", "r")
    check(cumem.asnumpy(mapped), np.asarray(mapped))


def test_comes_after_the_stream(emulated) -> None:
    stream, other = cumem.Stream(), cumem.Stream()
    memory = cumem.zeros(5000, "u1", "device")
    reported: list[tuple[int, int]] = []

    def tell(*args: int) -> None:
        reported.append(args)
        session.testing.gate_open(stream)

    with session.gate(stream):
        memory.fill(7, stream=stream)
        made = memory.to_numpy(stream=other, progress=tell)
    assert (made == 7).all()
    assert reported[0] == (0, 5000)
    assert reported[-1] == (5000, 5000)
    with session.gate(stream):
        memory.fill(8, stream=stream)
        session.testing.gate_open(stream)
        assert (cumem.asnumpy(memory, stream=stream) == 8).all()


def test_interrupted_call_leaves_nothing_in_flight(emulated) -> None:
    stream = cumem.Stream()
    memory = cumem.zeros(5000, "u1", "device")
    with session.alarm(stream):
        memory.fill(7, stream=stream)
        try:
            memory.to_numpy()
        finally:
            assert session.testing.pending_transfers() == 0


def test_wrong_arguments_are_refused(emulated) -> None:
    memory = cumem.zeros(5, "u1", "device")
    with pytest.raises(TypeError, match="progress must be a bool or a callable"):
        memory.to_numpy(progress=3)
    with pytest.raises(TypeError, match="stream"):
        cumem.asnumpy(memory, stream="x")
    with pytest.raises(ValueError, match="stream is of device 1"):
        cumem.asnumpy(memory, stream=cumem.Stream(device=1))
    memory.free()
    with pytest.raises(ValueError, match="closed"):
        memory.to_numpy()
