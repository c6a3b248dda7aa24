# SPDX-License-Identifier: Apache-2.0
"""Memory of others that its owner replaces, moves or resizes while a buffer is over it.

The owners are tensors of PyTorch, NumPy arrays and buffers of pyarrow. A buffer must
keep the old memory, raise an error if it is gone, or keep the owner from resizing it.
"""

from __future__ import annotations

import array
import asyncio
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import session

import cumem

COUNT = 10_000


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def reuse_freed(torch: Any) -> list[Any]:
    """Make arrays that are likely to get the memory that was just freed."""
    return [torch.full((COUNT,), 7.0) for _ in range(50)]


#: Each of these gives a tensor another storage. The old one ends with its last owner.
REPLACEMENTS: dict[str, Callable[[Any, Any], object]] = {
    "data": lambda torch, t: setattr(t, "data", torch.zeros(4)),
    "set_": lambda torch, t: t.set_(torch.zeros(4)),
    "half": lambda torch, t: setattr(t, "data", t.half()),
}
#: Each of these moves the bytes of a storage.
MOVES: dict[str, Callable[[Any], object]] = {
    "share_memory_": lambda t: t.share_memory_(),
    "storage": lambda t: t.untyped_storage().share_memory_(),
}
#: Each of these would give a storage another size.
RESIZES: dict[str, Callable[[Any], object]] = {
    "resize_": lambda t: t.resize_(100 * COUNT),
    "free": lambda t: t.untyped_storage().resize_(0),
    "grow": lambda t: t.untyped_storage().resize_(100 * COUNT),
}
#: Each of these makes a buffer of a tensor, and the buffer lives on.
ENTRIES: dict[str, Callable[[Any], Any]] = {
    "asbuffer": cumem.asbuffer,
    "numpy": lambda t: cumem.asbuffer(t.numpy()),
    "memoryview": lambda t: cumem.asbuffer(memoryview(t.numpy())),
    "slice": lambda t: cumem.asbuffer(t)[2:],
    "view": lambda t: cumem.asbuffer(t[2:]),
    "register": lambda t: cumem.register(t).buffer,
    "register numpy": lambda t: cumem.register(t.numpy()).buffer,
    "register buffer": lambda t: cumem.register(cumem.asbuffer(t)).buffer,
}


# -- a tensor gets another storage ---------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("how", REPLACEMENTS)
def test_buffer_of_a_tensor_keeps_its_storage(runtime, torch, entry, how) -> None:
    tensor = torch.full((COUNT,), 1.0)
    buffer = ENTRIES[entry](tensor)
    REPLACEMENTS[how](torch, tensor)
    others = reuse_freed(torch)
    assert np.all(buffer.numpy() == 1.0)
    assert np.all(cumem.array(buffer).to_numpy() == 1.0)
    assert len(others) == 50


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("how", REPLACEMENTS)
def test_copy_in_the_background_keeps_the_storage(
    emulated, torch, how, as_array
) -> None:
    stream = cumem.Stream()
    tensor = torch.full((COUNT,), 1.0)
    targets = [cumem.empty_pinned(COUNT, "f4") for _ in range(2)]
    source = tensor.numpy() if as_array else tensor
    with session.gate(stream):
        one = cumem.copy_async(targets[0], source, after=stream)
        del source
        REPLACEMENTS[how](torch, tensor)
        others = reuse_freed(torch)
    one.wait()
    assert np.all(targets[0].numpy() == 1.0)
    assert len(others) == 50


def test_copies_in_the_background_keep_their_storages(emulated, torch) -> None:
    stream = cumem.Stream()
    block = cumem.zeros(COUNT, "f4", "device")
    tensors = [torch.full((COUNT,), 1.0), torch.full((COUNT,), 2.0)]
    targets = [cumem.empty_pinned(COUNT, "f4") for _ in range(2)]
    with session.gate(stream):
        block.fill(1, stream=stream)
        cumem.copy_async(targets[0], block, stream=stream)
        job = cumem.copy_many_async(
            [(targets[0], tensors[0]), (targets[1], tensors[1])]
        )
        for tensor in tensors:
            tensor.data = torch.zeros(4)
        others = reuse_freed(torch)
    job.wait()
    assert [float(target[-1]) for target in targets] == [1.0, 2.0]
    assert len(others) == 50


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "bool", "int8"])
def test_tensor_of_any_dtype_keeps_its_storage(runtime, torch, dtype) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    tensor = torch.ones(COUNT).to(getattr(torch, dtype))
    buffer = cumem.asbuffer(tensor)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
    tensor.share_memory_()
    with pytest.raises(BufferError, match="share_memory_"):
        buffer.numpy()


def test_parameter_keeps_its_storage(runtime, torch) -> None:
    layer = torch.nn.Linear(64, 64).requires_grad_(False)
    buffer = cumem.asbuffer(layer.weight)
    expected = buffer.to_numpy()
    layer.half()
    others = reuse_freed(torch)
    assert np.array_equal(buffer.numpy(), expected)
    assert len(others) == 50


# -- the bytes move inside a storage ---------------------------------------------------

#: Each of these uses a buffer, and would read or write memory that no longer exists.
USES: dict[str, Callable[[Any, Any], object]] = {
    "numpy": lambda b, tmp_path: b.numpy(),
    "to_numpy": lambda b, tmp_path: b.to_numpy(),
    "memoryview": lambda b, tmp_path: memoryview(b),
    "asarray": lambda b, tmp_path: np.asarray(b),
    "dlpack": lambda b, tmp_path: b.__dlpack__(),
    "from_dlpack": lambda b, tmp_path: np.from_dlpack(b),
    "ptr": lambda b, tmp_path: b.ptr,
    "array": lambda b, tmp_path: cumem.array(b),
    "copy": lambda b, tmp_path: cumem.copy(np.empty(COUNT, "f4"), b),
    "copy to": lambda b, tmp_path: cumem.copy(b, np.ones(COUNT, "f4")),
    "copy_async": lambda b, tmp_path: cumem.copy_async(np.empty(COUNT, "f4"), b),
    "copy_many": lambda b, tmp_path: cumem.copy_many([(np.empty(COUNT, "f4"), b)]),
    "fill": lambda b, tmp_path: b.fill(1),
    "item": lambda b, tmp_path: b[3],
    "set": lambda b, tmp_path: b.__setitem__(3, 1),
    "set all": lambda b, tmp_path: b.__setitem__(..., 1),
    "astype": lambda b, tmp_path: b.astype("f8"),
    "asbuffer": lambda b, tmp_path: cumem.asbuffer(b),
    "register": lambda b, tmp_path: cumem.register(b),
    "tofile": lambda b, tmp_path: cumem.tofile(tmp_path / "x", b),
    "pickle": lambda b, tmp_path: __import__("pickle").dumps(b),
}


@pytest.mark.parametrize("use", USES)
def test_use_after_share_memory_raises(runtime, torch, tmp_path, use) -> None:
    tensor = torch.full((COUNT,), 1.0)
    buffer = cumem.asbuffer(tensor)
    tensor.share_memory_()
    with pytest.raises(BufferError, match=r"is gone.*share_memory_.*asbuffer"):
        USES[use](buffer, tmp_path)
    assert "cannot be read" in str(buffer)
    assert "HostBuffer" in repr(buffer)
    buffer.free()  # This reads nothing.
    assert np.all(cumem.asbuffer(tensor).numpy() == 1.0)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("how", MOVES)
def test_buffer_of_moved_bytes_raises(runtime, torch, entry, how) -> None:
    tensor = torch.full((COUNT,), 1.0)
    buffer = ENTRIES[entry](tensor)
    MOVES[how](tensor)
    with pytest.raises(BufferError, match="share_memory_"):
        buffer.numpy()


def test_registration_of_moved_bytes_ends(runtime, torch) -> None:
    tensor = torch.full((COUNT,), 1.0)
    with cumem.register(tensor) as pinned:
        tensor.share_memory_()
        with pytest.raises(BufferError, match="register"):
            cumem.array(pinned)


# -- a storage moves beside a copy in the background -------------------------------------


def begin_from(tensor: Any) -> cumem.Transfer:
    return cumem.copy_async(cumem.empty_pinned(COUNT, "f4"), tensor)


def begin_to(tensor: Any) -> cumem.Transfer:
    return cumem.copy_async(tensor, np.ones(COUNT, "f4"))


def begin_from_buffer(tensor: Any) -> cumem.Transfer:
    return begin_from(cumem.asbuffer(tensor))


def begin_from_array(tensor: Any) -> cumem.Transfer:
    return begin_from(tensor.numpy())


def begin_many(tensor: Any) -> cumem.Transfer:
    target = cumem.empty_pinned(COUNT, "f4")
    return cumem.copy_many_async([(target[:9], np.ones(9, "f4")), (target, tensor)])


def begin_several(tensor: Any) -> cumem.Transfer:
    return cumem.broadcast_async([np.empty(COUNT, "f4"), tensor], np.ones(COUNT, "f4"))[
        -1
    ]


BEGINS: dict[str, Callable[[Any], cumem.Transfer]] = {
    "from": begin_from,
    "to": begin_to,
    "from a buffer": begin_from_buffer,
    "from an array": begin_from_array,
    "many": begin_many,
    "several": begin_several,
}


def end_unseen() -> None:
    """Let all copies end without anybody seeing it.

    A move then comes too late to harm them, but cumem cannot know that.
    """
    session.wait_until(lambda: session.testing.pending_transfers() == 0)


@pytest.mark.parametrize("begin", BEGINS.values(), ids=BEGINS)
def test_move_beside_a_copy_in_the_background_raises_when_waited_for(
    runtime, torch, begin
) -> None:
    tensor = torch.full((COUNT,), 1.0)
    transfer = begin(tensor)
    end_unseen()
    tensor.share_memory_()
    for _ in range(2):
        assert transfer.done
        with pytest.raises(BufferError, match=r"not certain.*share_memory_.*wait for"):
            transfer.wait()


@pytest.mark.parametrize("begin", BEGINS.values(), ids=BEGINS)
@pytest.mark.parametrize("seen", ["done", "wait"])
def test_move_after_a_copy_was_seen_to_end_is_free(runtime, torch, begin, seen) -> None:
    tensor = torch.full((COUNT,), 1.0)
    transfer = begin(tensor)
    if seen == "wait":
        transfer.wait()
    else:
        session.wait_until(lambda: transfer.done)
    tensor.share_memory_()
    transfer.wait()


def test_move_beside_an_awaited_copy_raises(runtime, torch) -> None:
    tensor = torch.full((COUNT,), 1.0)

    async def wait() -> None:
        transfer = begin_from(tensor)
        end_unseen()
        tensor.share_memory_()
        await transfer

    with pytest.raises(BufferError, match="not certain"):
        asyncio.run(wait())


def test_array_that_is_resized_beside_a_copy_raises_when_waited_for(runtime) -> None:
    array = np.ones(COUNT, "f4")
    transfer = begin_from(cumem.asbuffer(array))
    end_unseen()
    array.resize(9 * COUNT, refcheck=False)
    with pytest.raises(BufferError, match=r"not certain.*ndarray.resize"):
        transfer.wait()


# -- a storage is resized ----------------------------------------------------------------


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("how", RESIZES)
def test_storage_under_a_buffer_refuses_to_be_resized(
    runtime, torch, entry, how
) -> None:
    tensor = torch.full((COUNT,), 1.0)
    buffer = ENTRIES[entry](tensor)
    with pytest.raises(RuntimeError, match="not resizable"):
        RESIZES[how](tensor)
    assert np.all(buffer.numpy() == 1.0)


def test_storage_under_a_copy_in_the_background_refuses_to_be_resized(
    runtime, torch
) -> None:
    tensor = torch.full((COUNT,), 1.0)
    job = cumem.copy_async(cumem.empty_pinned(COUNT, "f4"), tensor)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
    job.wait()


def test_storage_after_a_copy_that_was_waited_for_can_be_resized(
    runtime, torch
) -> None:
    tensor = torch.full((COUNT,), 1.0)
    cumem.copy(cumem.empty_device(COUNT, "f4"), tensor)
    assert tensor.untyped_storage().resizable()
    tensor.untyped_storage().resize_(0)


# -- other owners -----------------------------------------------------------------------


@pytest.mark.parametrize("entry", [cumem.asbuffer, lambda a: cumem.register(a).buffer])
@pytest.mark.parametrize("is_view", [False, True])
def test_buffer_of_a_resized_array_raises(runtime, entry, is_view) -> None:
    numbers = np.ones(1000)
    buffer = entry(numbers[2:] if is_view else numbers)
    with pytest.raises(ValueError, match="resize"):
        # NumPy sees that somebody refers to the array.
        numbers.resize(100_000)
    # A resize moves the array. It is not tried with page-locked memory, which would have to
    # be unlocked at its old address.
    if buffer.kind == "pageable":
        numbers.resize(100_000, refcheck=False)
        with pytest.raises(BufferError, match=r"array.*ndarray\.resize"):
            buffer.numpy()


def test_owner_that_knows_of_exports_refuses_to_be_resized(runtime, tmp_path) -> None:
    with open(tmp_path / "x", "wb+") as file:
        file.truncate(1 << 16)
        pages = mmap.mmap(file.fileno(), 1 << 16)
    line, numbers = bytearray(1000), array.array("d", [0.0] * 1000)
    buffers = [cumem.asbuffer(owner) for owner in (pages, line, numbers)]
    for act in (
        pages.close,
        lambda: pages.resize(1 << 20),
        lambda: line.extend(bytes(1 << 16)),
        lambda: numbers.extend([0.0] * 10_000),
    ):
        with pytest.raises(BufferError):
            act()  # type: ignore[no-untyped-call]
    assert all(buffer.numpy().sum() == 0 for buffer in buffers)


def test_buffer_of_a_resized_arrow_buffer_raises(runtime) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    owner = pyarrow.allocate_buffer(1000, resizable=True)
    buffer = cumem.asbuffer(owner)
    buffer.fill(0)
    owner.resize(1_000_000)
    with pytest.raises(BufferError, match=r"ResizableBuffer.*resize"):
        buffer.numpy()


# -- tensors without memory of their own ------------------------------------------------


def _fake(torch: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


TENSORS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "gradient": (lambda torch: torch.ones(3, requires_grad=True), r"detach\(\)"),
    "parameter": (lambda torch: torch.nn.Parameter(torch.ones(3)), r"detach\(\)"),
    "meta": (lambda torch: torch.ones(3, device="meta"), "'meta'"),
    "fake": (_fake, "FakeTensor"),
    "sparse": (lambda torch: torch.ones(3, 3).to_sparse(), "sparse_coo"),
    "nested": (
        lambda torch: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "nested",
    ),
    "conjugate": (
        lambda torch: torch.ones(3, dtype=torch.complex64).conj(),
        r"resolve_conj\(\)",
    ),
    "negative": (
        lambda torch: torch.ones(3, dtype=torch.complex64).conj().imag,
        r"resolve_neg\(\)",
    ),
}


# PyTorch warns about prototypes.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TENSORS)
def test_tensor_that_is_no_plain_memory_says_what_it_is(runtime, torch, name) -> None:
    make, words = TENSORS[name]
    tensor = make(torch)
    for call in (cumem.asbuffer, cumem.register, cumem.array, cumem.asnumpy):
        with pytest.raises(BufferError, match=words):
            call(tensor)
    with pytest.raises(BufferError, match=words):
        cumem.copy(cumem.empty_pinned(3, "f4"), tensor)


@pytest.mark.parametrize("transform", ["vmap", "functionalize"])
def test_functional_tensor_says_what_it_is(runtime, torch, transform) -> None:
    def function(tensor: Any) -> Any:
        with pytest.raises(BufferError, match="functional tensor"):
            cumem.asbuffer(tensor)
        return tensor

    getattr(torch.func, transform)(function)(torch.ones(3, 3))
