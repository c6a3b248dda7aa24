# SPDX-License-Identifier: Apache-2.0
"""Batches of PyTorch: prefetch() and PinnedCollate with a real DataLoader.

The tests move tensors of every dtype, layout and subclass, and batches of types of other
libraries. Tests that need workers run a program that starts these workers. On the emulated
device, PyTorch's tensors stay on the CPU.
"""

from __future__ import annotations

import collections
import gc  # noqa: F401  the programs below take their names from here
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import session
from support.session import testing

import cumem
from cumem import _core
from cumem.integrations.torch import offload, restore
from cumem.interchange import structures
from cumem.transfers import collating

torch = pytest.importorskip("torch")

WIDTH = 1 << 16

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")


def place(runtime: session.Runtime) -> str:
    return "cpu" if runtime.emulated else "cuda"


def need_cuda(runtime: session.Runtime) -> None:
    if not runtime.emulated and not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")


def dtypes() -> list[Any]:
    """Return PyTorch's dtypes, except those of quantized numbers and of plain bits."""
    found = [v for v in vars(torch).values() if isinstance(v, torch.dtype)]
    return sorted(
        {d for d in found if not str(d).startswith(("torch.q", "torch.bits"))}, key=str
    )


def bits(tensor: Any) -> bytes:
    """Return the bits of a tensor, since not every dtype can be compared or copied."""
    carriers = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    plain = tensor.view(carriers.get(tensor.element_size(), torch.uint8))
    return plain.cpu().contiguous().numpy().tobytes()


def test_tensors_of_every_dtype_come_bit_for_bit(runtime) -> None:
    need_cuda(runtime)
    random = torch.Generator().manual_seed(1)
    batch = []
    for dtype in dtypes():
        try:
            row = torch.empty(24, dtype=dtype)
        # Some dtypes are names without elements.
        except (RuntimeError, TypeError):
            continue
        top = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, top, (24 * row.element_size(),), generator=random)
        row = raw.to(torch.uint8).view(dtype)
        matrix = row.reshape(4, 6)
        batch += [matrix, matrix.t(), matrix[::2, 1::3], matrix[0, 0], matrix[:0]]
    assert len(batch) > 5 * 15
    (found,) = cumem.prefetch([batch])
    for here, there in zip(batch, found, strict=True):
        assert there.dtype is here.dtype
        assert there.shape == here.shape
        assert there.device.type == place(runtime)
        # The method `to()` makes these strides.
        assert there.stride() == torch.empty_like(here).stride()
        assert bits(there) == bits(here), here.dtype


def test_tensor_that_is_not_what_its_memory_says_comes_as_it_is(runtime) -> None:
    need_cuda(runtime)
    numbers = torch.randn(3, 4, dtype=torch.complex64)
    wants = torch.ones(3, requires_grad=True)
    batch = [numbers.conj(), numbers.conj().imag, wants, wants * 2]
    (found,) = cumem.prefetch([batch])
    for here, there in zip(batch, found, strict=True):
        assert torch.equal(there.cpu(), here.detach())
        assert not there.requires_grad


SPARSE = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
}


@pytest.mark.filterwarnings("ignore:Sparse :UserWarning")
@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_sparse_tensor_is_moved_by_torch(runtime, make) -> None:
    need_cuda(runtime)
    tensor = make()
    for found in cumem.prefetch([{"a": tensor, "b": torch.ones(3)}] * 3):
        assert found["a"] is not tensor
        assert found["a"].layout is tensor.layout
        assert found["a"].device.type == place(runtime)
        assert torch.equal(found["a"].to_dense().cpu(), torch.eye(3))
        assert torch.equal(found["b"].cpu(), torch.ones(3))


def test_tensor_of_a_transform_is_refused_after_the_batches_before(runtime) -> None:
    need_cuda(runtime)

    def trace(tensor: Any) -> Any:
        found = iter(cumem.prefetch([torch.ones(3), tensor]))
        assert next(found).sum() == 3
        with pytest.raises(TypeError, match=r"cannot be copied by its memory"):
            next(found)
        return tensor

    torch.vmap(trace)(torch.ones(2, 3))


class Image(torch.Tensor):
    """A tensor of a library that gives its tensors a type of their own."""


def test_tensor_of_a_subclass_keeps_it(runtime) -> None:
    need_cuda(runtime)
    image = torch.randn(3, 4).t().as_subclass(Image)
    image.layout_of_axes = "XY"
    weights = torch.nn.Parameter(torch.ones(3))
    (found,) = cumem.prefetch([[image, weights]])
    assert type(found[0]) is Image
    assert found[0].layout_of_axes == "XY"
    assert found[0].device.type == place(runtime)
    assert torch.equal(found[0].cpu(), image)
    assert type(found[1]) is torch.Tensor
    assert not found[1].requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of:UserWarning")
@pytest.mark.parametrize("kind", ["strided", "jagged", "masked"])
def test_tensor_without_memory_of_its_own_is_moved_by_torch(runtime, kind) -> None:
    need_cuda(runtime)
    if kind == "masked":
        mask = torch.tensor([True, False, True])
        tensor = torch.masked.masked_tensor(torch.ones(3), mask)
    else:
        rows = [torch.ones(2), torch.ones(3)]
        tensor = torch.nested.nested_tensor(rows, layout=getattr(torch, kind))
    (found,) = cumem.prefetch([[tensor]])
    there = found[0]
    assert there is not tensor
    assert type(there) is type(tensor)
    assert there.device.type == place(runtime)
    if kind == "masked":
        assert there.get_mask().device.type == place(runtime)
        assert float(there.sum()) == 2
    else:
        parts = there.unbind()
        assert [part.tolist() for part in parts] == [[1] * 2, [1] * 3]


def test_attributes_of_a_tensor_come_with_it(runtime) -> None:
    need_cuda(runtime)
    image = torch.ones(2, 2).as_subclass(Image)
    image.boxes = torch.zeros(3)
    image.again = image
    (found,) = cumem.prefetch([image])
    assert type(found) is Image
    assert found.again is found
    assert found.boxes is not image.boxes
    assert found.boxes.device.type == place(runtime)


class Answer(collections.OrderedDict):  # type: ignore[type-arg]
    """A mapping like the outputs of models in transformers: its fields are items and
    attributes.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)
        vars(self).update(fields)


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """A mapping like BatchEncoding of transformers: its items are in `data`, and
    `_encodings` has something else.
    """

    def __init__(self, data: Any, encodings: Any = None) -> None:
        super().__init__(data)
        self._encodings = encodings

    def to(self, device: Any) -> Any:
        self.data = {k: v.to(device) for k, v in self.data.items()}
        return self


def test_batches_as_of_transformers_come_as_they_are(runtime) -> None:
    need_cuda(runtime)
    tensor = torch.arange(6).view(2, 3)
    batch = {
        "encoding": Encoding({"ids": tensor}, [object()]),
        "answer": Answer(logits=tensor, states=(tensor + 1,)),
    }
    (found,) = cumem.prefetch([batch])
    encoding, answer = found["encoding"], found["answer"]
    assert (type(encoding), type(answer)) == (Encoding, Answer)
    assert encoding["ids"] is encoding.data["ids"] is answer["logits"] is answer.logits
    assert answer.states[0] is answer["states"][0]
    assert encoding._encodings is batch["encoding"]._encodings
    for there in (encoding["ids"], answer.states[0]):
        assert there.device.type == place(runtime)
        assert there is not tensor
    assert batch["encoding"]["ids"] is batch["answer"].logits is tensor


def test_real_batches_of_transformers_come_as_they_are(runtime) -> None:
    need_cuda(runtime)
    transformers = pytest.importorskip("transformers")
    outputs = pytest.importorskip("transformers.modeling_outputs")
    tensor = torch.ones(2, 3)
    batch = [
        transformers.BatchEncoding({"ids": tensor}),
        transformers.BatchFeature({"ids": tensor}),
        outputs.BaseModelOutput(last_hidden_state=tensor),
    ]
    (found,) = cumem.prefetch([batch])
    assert [type(each) for each in found] == [type(each) for each in batch]
    assert found[0]["ids"] is found[1]["ids"] is found[2].last_hidden_state
    assert found[0]["ids"].device.type == place(runtime)
    assert found[0]["ids"] is not tensor
    assert batch[2].last_hidden_state is batch[0]["ids"] is tensor


def test_stacked_tensors_of_a_subclass_keep_it(runtime) -> None:
    rows = torch.randn(3, 2).as_subclass(Image)
    found = cumem.PinnedCollate()(list(rows))
    assert type(found) is type(torch.utils.data.default_collate(list(rows))) is Image
    assert found.is_pinned() or runtime.emulated
    assert torch.equal(found, rows)
    mixed = [rows[0], rows[1].as_subclass(torch.Tensor)]
    both = cumem.PinnedCollate()(mixed)
    assert type(both) is type(torch.utils.data.default_collate(mixed))
    collate = cumem.PinnedCollate(1, WIDTH)
    kept = []
    # The ring has one slot, which the first batch takes.
    for is_first in (True, False):
        made = collating._Message(collate._ring, collating._gathered(list(rows)))
        kept.append(pickle.loads(pickle.dumps(made)))
        assert type(kept[-1]) is Image
        assert torch.equal(kept[-1], rows)
        plain = kept[-1].as_subclass(torch.Tensor)
        assert (cumem.asbuffer(plain).kind == "pinned") is is_first


def test_packed_sequence_keeps_its_sizes_on_the_cpu(runtime) -> None:
    need_cuda(runtime)
    pack = torch.nn.utils.rnn.pack_sequence
    for is_sorted in (True, False):
        parts = [torch.ones(3, 2), torch.full((2, 2), 2.0)]
        packed = pack(parts if is_sorted else parts[::-1], enforce_sorted=is_sorted)
        (found,) = cumem.prefetch([[packed]])
        there = found[0]
        assert type(there) is type(packed)
        assert there.batch_sizes is packed.batch_sizes
        assert there.data is not packed.data
        assert there.data.device.type == place(runtime)
        padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(there)
        assert torch.equal(
            padded.cpu(), torch.nn.utils.rnn.pad_packed_sequence(packed)[0]
        )
        assert lengths.tolist() == ([3, 2] if is_sorted else [2, 3])
        if not is_sorted:
            for name in ("sorted_indices", "unsorted_indices"):
                assert getattr(there, name) is not getattr(packed, name)
                assert getattr(there, name).device.type == place(runtime)


def test_tensor_elsewhere_stays(runtime) -> None:
    nowhere = torch.ones(3, device="meta")
    (found,) = cumem.prefetch([nowhere])
    assert found is nowhere


def test_arrays_become_tensors_where_that_is_asked_for(runtime) -> None:
    need_cuda(runtime)
    batch = {"x": np.arange(5, dtype="i4"), "y": cumem.full(3, 2.5, "f4", "pinned")}
    (found,) = cumem.prefetch([batch], framework="torch")
    assert found["x"].tolist() == [0, 1, 2, 3, 4]
    assert found["y"].tolist() == [2.5] * 3
    assert found["x"].device.type == place(runtime)
    (plain,) = cumem.prefetch([{**batch, "z": torch.ones(2)}])
    assert isinstance(plain["x"], cumem.DeviceBuffer)
    assert isinstance(plain["z"], torch.Tensor)


def test_arrays_that_no_tensor_can_be_become_buffers(runtime) -> None:
    need_cuda(runtime)
    batch = {
        "number": np.arange(3),
        "text": np.array(["a", "bc"]),
        "bytes": np.array([b"a", b"bc"]),
        "time": np.array(["2024-01-02"], "M8[s]"),
        "record": np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]),
    }
    (found,) = cumem.prefetch([batch], framework="torch")
    assert found.pop("number").tolist() == [0, 1, 2]
    for name, there in found.items():
        assert isinstance(there, cumem.DeviceBuffer)
        assert there.dtype == batch[name].dtype
        assert np.array_equal(there.to_numpy(), batch[name])
    (text,) = cumem.prefetch([batch["text"]], framework="torch")
    assert np.array_equal(text.to_numpy(), batch["text"])


def test_tensors_keep_their_memory_and_give_it_back(runtime) -> None:
    need_cuda(runtime)
    found = list(cumem.prefetch(torch.arange(8.0).repeat(4, 1)))
    tail = found[3][4:]
    assert session.leftovers(held=4) == {"storages": 4}
    del found
    assert session.leftovers(held=1) == {"storages": 1}
    assert tail.tolist() == [4, 5, 6, 7]
    del tail
    assert session.leftovers() == {}


def test_next_tensors_come_while_the_stream_is_at_work(emulated) -> None:
    data = torch.randn(6, WIDTH)
    stream = cumem.Stream()
    with stream:
        found = iter(cumem.prefetch(data))
        session.shut(stream)
        first, second = next(found), next(found)
        assert torch.equal(first, data[0])
        assert torch.equal(second, data[1])
        thread = threading.Thread(target=next, args=(found,))
    testing.gate_open(stream)
    thread.start()
    thread.join()
    found.close()


class ByTorch:
    """A stream with the two attributes that cumem reads of PyTorch's streams."""

    device_index = 0

    def __init__(self, stream: cumem.Stream) -> None:
        self.cuda_stream = stream.handle


@pytest.fixture
def as_if_cuda(emulated, monkeypatch) -> Iterator[cumem.Stream]:
    """Make cumem believe that PyTorch uses a GPU, and yield PyTorch's current stream."""
    stream = cumem.Stream()
    monkeypatch.setattr(_core, "_is_emulated", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ByTorch(stream))
    yield stream
    stream.synchronize()


def test_torchs_current_stream_waits_for_a_batch_of_tensors(as_if_cuda) -> None:
    held = cumem.zeros(WIDTH, "f4", "pinned")
    before = cumem.Stream()
    reached: list[cumem.Event] = []

    # The batch is a buffer, and cumem knows the pending work on it.
    def read() -> None:
        cumem.copy_async(held, cumem.full(WIDTH, 7, "f4"), stream=before)
        ready.set()
        for batch in cumem.prefetch([held], framework="torch"):
            assert type(batch) is torch.Tensor
            reached.append(as_if_cuda.record())

    ready = threading.Event()
    session.shut(before)
    thread = threading.Thread(target=read)
    thread.start()
    ready.wait()
    session.wait_until_waiting(thread)
    assert not any(event.done for event in reached)
    testing.gate_open(before)
    thread.join()
    reached[0].synchronize()


def test_third_batch_waits_for_the_work_of_torch_on_the_first(as_if_cuda) -> None:
    came: list[int] = []

    def read() -> None:
        for i, _ in enumerate(cumem.prefetch(torch.ones(6, 10))):
            came.append(i)

    session.shut(as_if_cuda)
    thread = threading.Thread(target=read)
    thread.start()
    session.wait_until_waiting(thread)
    assert came == [0, 1]
    testing.gate_open(as_if_cuda)
    thread.join()
    assert came == [0, 1, 2, 3, 4, 5]


def test_slot_waits_for_what_torch_copies_on_its_current_stream(as_if_cuda) -> None:
    collate = cumem.PinnedCollate(1, "1 MiB")
    ring = collate._ring

    def batch() -> Any:
        sent = collating._Message(ring, collating._gathered([torch.ones(9)] * 2))
        return pickle.loads(pickle.dumps(sent))

    found = batch()
    assert cumem.asbuffer(found).kind == "pinned"
    session.shut(as_if_cuda)
    del found
    ring.reclaim()
    # This stream has nothing to do with PyTorch's copy.
    cumem.current_stream().synchronize()
    ring.reclaim()
    assert cumem.asbuffer(batch()).kind == "pageable"
    testing.gate_open(as_if_cuda)
    session.wait_until(lambda: ring.reclaim() or not (ring._words % 4).any())
    assert cumem.asbuffer(batch()).kind == "pinned"


@pytest.mark.gpu
def test_tensors_are_right_on_streams_that_are_behind(cuda) -> None:
    """Work on a batch is queued long before the batch's copy is done, and the batch is
    dropped at once.
    """
    need_cuda(cuda)
    data = torch.randn(12, 1 << 20)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        sums = []
        with torch.cuda.stream(stream):
            for batch in cumem.prefetch(data):
                torch.cuda._sleep(20_000_000)
                sums.append((batch.double() * 2).sum())
                del batch
            stream.synchronize()
        got = torch.stack(sums).cpu()
        assert torch.allclose(got, data.double().sum(1) * 2)


@pytest.mark.gpu
def test_tensors_come_to_the_device_of_the_call(cuda) -> None:
    need_cuda(cuda)
    last = cumem.device_count() - 1
    here = torch.ones(3, device=f"cuda:{last}")
    (found,) = cumem.prefetch([[here, torch.ones(2)]], device=f"cuda:{last}")
    assert found[0] is here
    assert found[1].device == torch.device("cuda", last)


class Numbers(torch.utils.data.IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(40.0).reshape(10, 4)


def test_loader_is_prefetched_in_every_epoch(runtime) -> None:
    need_cuda(runtime)
    data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10) % 3)
    loader = torch.utils.data.DataLoader(data, 4)
    found = cumem.prefetch(loader)
    assert len(found) == len(loader) == 3
    for _ in range(2):
        images, labels = (torch.cat(each).cpu() for each in zip(*found, strict=True))
        assert torch.equal(images, data.tensors[0])
        assert torch.equal(labels, data.tensors[1])
    endless = cumem.prefetch(torch.utils.data.DataLoader(Numbers(), 4))
    assert [len(each) for each in endless] == [4, 4, 2]
    with pytest.raises(TypeError):
        len(endless)


# -- batches that move themselves ------------------------------------------------------


class Graph:
    """A batch like those of PyTorch Geometric: its own method moves it in place."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y, self.calls = x, y, 0

    def to(self, device: Any, non_blocking: bool = False) -> Graph:
        self.x = self.x.to(device, non_blocking=non_blocking)
        self.calls += 1
        return self


class Boxes:
    """A batch like the boxes of detectron2: its method takes a device only, and returns
    a new object.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def to(self, device: Any) -> Boxes:
        return Boxes(self.tensor.to(device))


class Fields:
    """A batch like Instances of detectron2. Its `to()` takes any arguments, and its fields
    are found by `__getattr__()`.
    """

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def to(self, *args: Any, **kwargs: Any) -> Fields:
        return Fields(**{k: v.to(*args, **kwargs) for k, v in self._fields.items()})

    def __getattr__(self, name: str) -> Any:
        if name == "_fields" or name not in self._fields:
            raise AttributeError(name)
        return self._fields[name]


class Quantity:
    def to(self, unit: str) -> Any:
        raise AssertionError("a batch is not a unit")


def test_batch_that_moves_itself_is_a_new_one_on_the_device(runtime) -> None:
    """prefetch() must call the method `to()` of each batch once, and leave the caller's
    batch as it was.
    """
    need_cuda(runtime)
    data = torch.arange(6.0)
    batch = {
        "graph": Graph(data, 1),
        "boxes": [Boxes(data)],
        "fields": Fields(a=data, b=data * 2),
        "length": Quantity(),
        "array": np.ones(3),
    }
    (found,) = cumem.prefetch([batch])
    moved = [
        (found["graph"].x, data),
        (found["boxes"][0].tensor, data),
        (found["fields"].a, data),
        (found["fields"].b, data * 2),
    ]
    for there, here in moved:
        assert there.device.type == place(runtime)
        assert there.data_ptr() != data.data_ptr()
        assert torch.equal(there.cpu(), here)
    assert (found["graph"].calls, found["graph"].y) == (1, 1)
    assert (batch["graph"].calls, batch["graph"].x) == (0, data)
    assert found["length"] is batch["length"]
    assert isinstance(found["array"], cumem.DeviceBuffer)


def test_batch_that_moves_itself_may_be_filled_again(runtime) -> None:
    need_cuda(runtime)
    graph = Graph(torch.empty(1 << 18), 0)

    def batches() -> Iterator[Any]:
        for i in range(12):
            graph.x.fill_(i)
            yield graph

    assert [int(g.x[-1]) for g in cumem.prefetch(batches())] == list(range(12))


class Nest:
    """A batch that moves in place, deeper than a shallow copy reaches."""

    def __init__(self, tensor: Any, array: Any = None) -> None:
        self.parts = {"a": {"b": [tensor, tensor]}, "c": (array, {"d": tensor})}

    # This method returns nothing.
    def to(self, device: Any) -> None:
        self.parts["a"]["b"] = [each.to(device) for each in self.parts["a"]["b"]]
        self.parts["c"][1]["d"] = self.parts["c"][1]["d"].to(device)


def test_batch_that_moves_in_place_leaves_the_loaders_own_alone() -> None:
    """The meta device stands for a GPU.

    The emulated device will not do, since everything would be copied there first.
    """
    tensor, array = torch.ones(3), np.ones(3)
    mine = Nest(tensor, array)
    there = structures.move_whole(mine, torch.device("meta"), False)
    assert type(there) is Nest
    assert there.parts["a"]["b"][1].device.type == "meta"
    assert there.parts["c"][1]["d"].device.type == "meta"
    # Arrays on the host are not copied.
    assert there.parts["c"][0] is array
    assert mine.parts["a"]["b"] == [tensor, tensor]
    assert mine.parts["c"][1]["d"] is tensor


def test_batch_whose_to_answers_nothing_comes(runtime) -> None:
    need_cuda(runtime)
    mine = Nest(torch.ones(3))
    (found,) = cumem.prefetch([mine])
    assert type(found) is Nest
    assert found.parts["a"]["b"][0].device.type == place(runtime)
    assert found.parts["a"]["b"][0] is not mine.parts["a"]["b"][0]
    assert mine.parts["a"]["b"][0].device.type == "cpu"


class ByName:
    """An object like PyTorch's storages: the device can be given by name only."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def to(self, *, device: Any, non_blocking: bool = False) -> Any:
        return ByName(self.tensor.to(device, non_blocking=non_blocking))


def test_batch_whose_to_takes_the_device_by_name_comes(runtime) -> None:
    need_cuda(runtime)
    batch = [ByName(torch.ones(3)), torch.ones(3).untyped_storage()]
    (found,) = cumem.prefetch([batch])
    assert found[0].tensor.device.type == place(runtime)
    assert found[0].tensor is not batch[0].tensor
    assert found[1].device.type == place(runtime)
    assert found[1].data_ptr() != batch[1].data_ptr()


def test_module_in_a_batch_is_left_alone(runtime) -> None:
    need_cuda(runtime)
    layer = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="leaves them on the host: .*Linear"):
        (found,) = cumem.prefetch([[layer]])
    assert found[0] is layer
    assert layer.weight.device.type == "cpu"


def test_tensordict_comes_as_one(runtime) -> None:
    need_cuda(runtime)
    tensordict = pytest.importorskip("tensordict")
    inner = {"reward": torch.zeros(4)}
    made = tensordict.TensorDict({"obs": torch.ones(4, 3), "next": inner}, [4])
    loader = torch.utils.data.DataLoader(
        [made[i] for i in range(4)], 2, collate_fn=lambda x: torch.stack(list(x))
    )
    found = list(cumem.prefetch(loader))
    assert [type(each) for each in found] == [tensordict.TensorDict] * 2
    assert found[0].batch_size == torch.Size([2])
    assert found[0]["next", "reward"].device.type == place(runtime)
    assert torch.equal(found[1]["obs"].cpu(), torch.ones(2, 3))


def test_graphs_of_pyg_come_as_a_batch(runtime) -> None:
    need_cuda(runtime)
    pyg = pytest.importorskip("torch_geometric.data")
    graph = pyg.Data(x=torch.ones(3, 2), edge_index=torch.zeros(2, 2, dtype=torch.long))
    batch = pyg.Batch.from_data_list([graph, graph])
    (found,) = cumem.prefetch([batch])
    assert type(found) is type(batch)
    assert found.x.device.type == place(runtime)
    assert found.x.data_ptr() != batch.x.data_ptr()
    assert found.num_graphs == 2


def test_memory_format_of_tensors_is_kept(runtime) -> None:
    need_cuda(runtime)
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    volume = torch.randn(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d)
    cases = [
        *(image, volume, image.half(), torch.randn(3, 4).t()),
        *(torch.randn(2, 3, 4).permute(1, 2, 0), torch.ones(1).expand(5)),
        *(torch.randn(4, 6)[:, ::2], image[:, 1:], torch.ones(2, 1, 3).transpose(0, 2)),
    ]
    for here, there in zip(cases, *cumem.prefetch([cases]), strict=True):
        assert torch.equal(there.cpu(), here)
        wanted = here.to("cpu", copy=True).stride()
        # The stride of an axis of length 1 means nothing.
        assert [
            (a, length)
            for a, length in zip(there.stride(), here.shape, strict=True)
            if length > 1
        ] == [(a, n) for a, n in zip(wanted, here.shape, strict=True) if n > 1]
    (found,) = cumem.prefetch([image])
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_arrays_of_the_other_byte_order_become_tensors(runtime) -> None:
    need_cuda(runtime)
    batch = [np.arange(3, dtype=">f4"), np.arange(4, dtype=">i8").reshape(2, 2)]
    (found,) = cumem.prefetch([batch], framework="torch")
    assert [each.tolist() for each in found] == [each.tolist() for each in batch]
    (found,) = cumem.prefetch([batch])
    assert [each.dtype for each in found] == [each.dtype for each in batch]


# -- which loaders are waited for --------------------------------------------------------


class Refilled(torch.utils.data.Dataset):  # type: ignore[misc]
    """A dataset whose samples are one tensor, which is filled again for each."""

    def __init__(self) -> None:
        self.held = torch.empty(WIDTH)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return self.held.fill_(i)


def first_sample(samples: Any) -> Any:
    return samples[0]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": None},
        {"batch_size": 1, "collate_fn": first_sample},
        {"batch_size": 1},
        {"batch_size": 1, "collate_fn": cumem.PinnedCollate()},
    ],
)
def test_dataset_that_fills_one_tensor_again_comes_right(runtime, options) -> None:
    need_cuda(runtime)
    loader = torch.utils.data.DataLoader(Refilled(), **options)
    for depth in (1, 3):
        found = cumem.prefetch(loader, depth=depth)
        assert [int(each.reshape(-1)[-1]) for each in found] == list(range(12))


def test_loaders_whose_batches_are_new_are_known() -> None:
    from cumem.transfers.sources import gives_fresh

    loader = torch.utils.data.DataLoader
    data = Refilled()

    class Changed(loader):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Any:
            return super().__iter__()

    assert gives_fresh(loader(data, 2), None)
    assert gives_fresh(loader(data, 2, num_workers=1, collate_fn=first_sample), None)
    assert gives_fresh(loader(data, 2, collate_fn=cumem.PinnedCollate(1, 1)), None)
    assert gives_fresh([data], None)
    assert gives_fresh(torch.ones(3), None)
    assert not gives_fresh(loader(data, 2, collate_fn=first_sample), None)
    assert not gives_fresh(loader(data, batch_size=None), None)
    assert not gives_fresh(Changed(data, 2), None)
    assert not gives_fresh((x for x in [data]), None)
    assert gives_fresh((x for x in [data]), True)
    assert not gives_fresh(loader(data, 2), False)


# -- PinnedCollate -----------------------------------------------------------------------


def random_samples(count: int) -> list[Any]:
    """Return samples that `default_collate` can stack."""
    random = torch.Generator().manual_seed(count)
    Pair = collections.namedtuple("Pair", "a b")
    return [
        {
            "tensor": torch.randn(3, 4, generator=random).t(),
            "scalar": torch.tensor(i, dtype=torch.bfloat16),
            "empty": torch.empty(0, 2),
            "array": np.full((2, 2), i, "u2"),
            "slice": np.arange(12.0).reshape(3, 4)[1:, ::2],
            "zero": np.array(i),
            "pair": Pair(torch.ones(2, dtype=torch.bool), (i, i / 2, i > 1)),
            "list": [np.float32(i), "text", b"bytes", {"deep": torch.tensor(i)}],
            "mixed": torch.ones(2, dtype=torch.float32 if i else torch.float64),
            "conj": torch.full((2,), 1 + 1j * i).conj(),
        }
        for i in range(count)
    ]


def same(found: Any, wanted: Any) -> None:
    """Check that two batches have the same types, dtypes and values throughout."""
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype is wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            same(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        for a, b in zip(found, wanted, strict=True):
            same(a, b)
    else:
        assert found == wanted


def test_batch_is_that_of_default_collate_in_pinned_memory(runtime) -> None:
    need_cuda(runtime)
    samples = random_samples(5)
    found = cumem.PinnedCollate()(samples)
    same(found, torch.utils.data.default_collate(samples))
    for name in ("tensor", "scalar", "array", "slice", "zero", "mixed", "conj"):
        assert cumem.asbuffer(found[name]).kind == "pinned", name
        assert runtime.emulated or found[name].is_pinned()
    kept = found["tensor"][1:]
    del found
    assert session.leftovers(held=1) == {"storages": 1}
    assert torch.equal(kept, torch.stack([s["tensor"] for s in samples])[1:])


@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(2), torch.ones(3)],
        [np.ones(2), np.ones(3)],
        [[1, 2], [1]],
        [np.array(["text"])] * 2,
        [np.ones(2, ">f4")] * 2,
        [object()] * 2,
        [torch.eye(2).to_sparse()] * 2,
        [2**70, 1],
    ],
)
def test_what_default_collate_refuses_is_refused_alike(emulated, samples) -> None:
    with pytest.raises(Exception) as wanted:
        torch.utils.data.default_collate(samples)
    with pytest.raises(wanted.type) as found:
        cumem.PinnedCollate()(samples)
    assert str(found.value) == str(wanted.value)


def test_samples_that_want_a_gradient_are_stacked_as_ever(emulated) -> None:
    sample = torch.ones(2, requires_grad=True)
    found = cumem.PinnedCollate()([sample, sample])
    found.sum().backward()
    assert sample.grad.tolist() == [2, 2]


def test_buffers_of_cumem_are_stacked_as_arrays(runtime) -> None:
    need_cuda(runtime)
    for kind in ("pinned", "managed", "device"):
        samples = [{"x": cumem.full(2, i, "f4", kind)} for i in range(3)]
        found = cumem.PinnedCollate()(samples)["x"]
        assert found.tolist() == [[0, 0], [1, 1], [2, 2]]
        assert found.dtype is torch.float32
        assert cumem.asbuffer(found).kind == "pinned"


def nested_tensordicts(count: int) -> list[Any]:
    """Return samples that are TensorDicts with another TensorDict inside."""
    tensordict = pytest.importorskip("tensordict")
    inner = {"reward": torch.arange(count)}
    made = {"obs": torch.arange(3.0 * count).reshape(count, 3), "next": inner}
    whole = tensordict.TensorDict(made, [count])
    return [whole[i] for i in range(count)]


def test_tensordicts_are_stacked_into_pinned_memory(runtime) -> None:
    need_cuda(runtime)
    samples = nested_tensordicts(4)
    found = cumem.PinnedCollate()(samples)
    assert type(found) is type(samples[0])
    assert found.batch_size == torch.Size([4])
    assert torch.equal(found["obs"], torch.arange(12.0).reshape(4, 3))
    assert found["next", "reward"].tolist() == [0, 1, 2, 3]
    assert cumem.asbuffer(found["next", "reward"]).kind == "pinned"
    collate = cumem.PinnedCollate(2, "1 MiB")
    sent = collating._Message(collate._ring, collating._gathered(samples))
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is type(samples[0])
    assert torch.equal(received["obs"], found["obs"])
    assert cumem.asbuffer(received["obs"]).kind == "pinned"


def test_tensordict_is_offloaded_and_saved(runtime, tmp_path: Path) -> None:
    need_cuda(runtime)
    whole = torch.stack(nested_tensordicts(4)).to(place(runtime))
    there = offload(whole)
    assert type(there) is type(whole)
    assert there["next", "reward"].device.type == "cpu"
    back = restore(there)
    assert type(back) is type(whole)
    assert torch.equal(back["obs"], whole["obs"])
    path = tmp_path / "a.safetensors"
    with pytest.raises(TypeError, match=r"td\.flatten_keys"):
        cumem.save_safetensors(path, whole)
    cumem.save_safetensors(path, whole.flatten_keys("."))
    assert sorted(cumem.load_safetensors(path)) == ["next.reward", "obs"]


class Images(torch.utils.data.Dataset):  # type: ignore[misc]
    """A dataset in which one sample may kill its worker."""

    def __init__(self, deadly: int = -1) -> None:
        self.deadly = deadly

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> Any:
        if i == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"image": torch.full((3, 100), i), "numbers": (i, np.full(2, i, "u1"))}


class Watching(Images):
    """A dataset that fails in a worker where the driver is open.

    A forked worker could not use the driver.
    """

    def __getitem__(self, i: int) -> Any:
        assert torch.utils.data.get_worker_info() is not None
        assert not testing.opened()
        return super().__getitem__(i)


def is_epoch(batches: Any, pinned: bool = False) -> bool:
    """Return whether these are all samples in order and, with `pinned`, in page-locked
    memory.
    """
    count = 0
    for batch in batches:
        numbers, arrays = batch["numbers"]
        wanted = torch.arange(count, count + len(numbers))
        assert torch.equal(numbers.cpu(), wanted)
        assert torch.equal(arrays.cpu()[:, 1], wanted.to(torch.uint8))
        assert torch.equal(batch["image"].cpu()[:, 2, 99], wanted)
        if pinned:
            assert cumem.asbuffer(batch["image"]).kind == "pinned"
        count += len(numbers)
    return count == 48


def in_a_program(
    runtime: session.Runtime, tmp_path: Path, body: str, quiet: bool = True
) -> None:
    """Run a program with one thread, which starts the workers, as programs usually do."""
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    script = tmp_path / "program.py"
    script.write_text(
        f"import sys; sys.path[:0] = {folders!r}\n"
        "from test_loading_torch import *\n"
        "DataLoader = torch.utils.data.DataLoader\n"
        "if __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(body), "    ")
    )
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", str(script)],
        env=os.environ | {"CUMEM_BACKEND": runtime.name},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert not quiet or done.stderr == ""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_fill_slots_and_prefetch_moves_them(runtime, tmp_path, method) -> None:
    need_cuda(runtime)
    in_a_program(
        runtime,
        tmp_path,
        f"""
        collate = cumem.PinnedCollate(slot_nbytes="1 MiB")
        images = Images() if {method!r} == "fork" else Watching()
        some = dict(batch_size=8, num_workers=2, multiprocessing_context={method!r})
        loader = DataLoader(images, collate_fn=collate, **some)
        assert is_epoch(loader, pinned=True)
        assert is_epoch(cumem.prefetch(loader))
        whole = DataLoader(images, collate_fn=cumem.PinnedCollate(), **some)
        assert is_epoch(cumem.prefetch(whole))
        if {method!r} == "fork":
            assert is_epoch(cumem.prefetch(DataLoader(images, **some)))
        """,
    )


def test_loaders_of_all_sorts_share_a_ring(runtime, tmp_path) -> None:
    need_cuda(runtime)
    in_a_program(
        runtime,
        tmp_path,
        """
        collate = cumem.PinnedCollate(16, "1 MiB")
        some = dict(batch_size=8, num_workers=2, collate_fn=collate)
        kept = DataLoader(Images(), persistent_workers=True, **some)
        short = DataLoader(Images(), prefetch_factor=1, **some)
        pinned = DataLoader(Images(), pin_memory=torch.cuda.is_available(), **some)
        for _ in range(3):
            for loader in (kept, short, pinned):
                assert is_epoch(cumem.prefetch(loader))
                for each in cumem.prefetch(loader):
                    break
            both = zip(cumem.prefetch(kept), cumem.prefetch(short))
            assert all(torch.equal(a["image"], b["image"]) for a, b in both)
        """,
    )


def test_ring_that_is_full_falls_back_to_plain_stacking(runtime, tmp_path) -> None:
    need_cuda(runtime)
    in_a_program(
        runtime,
        tmp_path,
        """
        collate = cumem.PinnedCollate(3, "1 MiB")
        loader = DataLoader(Images(), 8, num_workers=2, collate_fn=collate)
        batches = list(loader)
        kinds = [cumem.asbuffer(b["image"]).kind for b in batches]
        assert kinds.count("pinned") == 3, kinds
        assert is_epoch(batches)
        assert is_epoch(cumem.prefetch(batches))
        del batches
        small = cumem.PinnedCollate(3, 1)
        loader = DataLoader(Images(), 32, num_workers=1, collate_fn=small)
        assert cumem.asbuffer(next(iter(loader))["image"]).kind == "pageable"
        assert is_epoch(cumem.prefetch(loader))
        """,
    )


def test_slots_of_killed_workers_come_back(runtime, tmp_path) -> None:
    need_cuda(runtime)
    in_a_program(
        runtime,
        tmp_path,
        """
        collate = cumem.PinnedCollate(12, "1 MiB")
        some = dict(batch_size=8, num_workers=2, collate_fn=collate)
        for deadly in (47, 20, 8, 0) * 2:
            with pytest.raises(RuntimeError, match="DataLoader worker"):
                is_epoch(cumem.prefetch(DataLoader(Images(deadly), **some)))
            gc.collect()
            assert is_epoch(DataLoader(Images(), **some), pinned=True)
        """,
        quiet=False,  # PyTorch raises from its handler of the signal.
    )


def test_failure_in_a_worker_comes_after_the_batches_before(runtime, tmp_path) -> None:
    need_cuda(runtime)
    in_a_program(
        runtime,
        tmp_path,
        """
        class Failing(Images):
            def __getitem__(self, i):
                if i == 20:
                    raise OSError("the disk is gone")
                return super().__getitem__(i)

        collate = cumem.PinnedCollate(12, "1 MiB")
        loader = DataLoader(Failing(), 8, num_workers=2, collate_fn=collate)
        found = []
        with pytest.raises(OSError, match="the disk is gone"):
            for batch in cumem.prefetch(loader, depth=4):
                found.append(batch["image"][0, 0, 0].item())
        assert found == [0, 8]
        """,
    )


@pytest.mark.gpu
def test_torchs_own_copy_of_a_slot_is_not_overwritten(cuda, tmp_path) -> None:
    """Each batch is copied with `non_blocking=True` and dropped at once, while the
    device is busy.
    """
    need_cuda(cuda)
    in_a_program(
        cuda,
        tmp_path,
        """
        # Before this call, PyTorch takes no memory for pinned.
        torch.cuda.init()
        collate = cumem.PinnedCollate(6, "1 MiB")
        loader = DataLoader(Images(), 4, num_workers=2, collate_fn=collate)
        for epoch in range(3):
            there = []
            for batch in loader:
                # Batches lie in pinned slots as long as there are free ones.
                assert batch["image"].is_pinned() or len(there) > 3 or epoch > 0
                torch.cuda._sleep(50_000_000)
                there.append(batch["image"].to("cuda", non_blocking=True))
                del batch
            found = torch.cat(there)[:, 0, 0].cpu()
            assert torch.equal(found, torch.arange(48))
        """,
    )


@pytest.mark.gpu
def test_no_other_gpu_gets_a_context(cuda, tmp_path) -> None:
    need_cuda(cuda)
    if cumem.device_count() < 2:
        pytest.skip("this test needs two GPUs")
    in_a_program(
        cuda,
        tmp_path,
        """
        torch.cuda.set_device(1)
        torch.ones(1, device="cuda")
        for workers in (0, 2):
            collate = cumem.PinnedCollate(12, "1 MiB")
            loader = DataLoader(Images(), 8, num_workers=workers, collate_fn=collate)
            assert is_epoch(cumem.prefetch(loader, 1))
        assert not torch._C._cuda_hasPrimaryContext(0)
        """,
    )
