# SPDX-License-Identifier: Apache-2.0
"""Batches of PyTorch: `prefetch` and `collate_pinned` round a real DataLoader."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import session
from support.session import testing

import cumem

torch = pytest.importorskip("torch")

WIDTH = 1 << 16

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")


def place(runtime: session.Runtime) -> str:
    return "cpu" if runtime.emulated else "cuda"


def need_cuda(runtime: session.Runtime) -> None:
    if not runtime.emulated and not torch.cuda.is_available():
        pytest.skip("PyTorch without CUDA")


def dtypes() -> list[Any]:
    found = [v for v in vars(torch).values() if isinstance(v, torch.dtype)]
    return sorted(
        {d for d in found if not str(d).startswith(("torch.q", "torch.bits"))}, key=str
    )


def bits(tensor: Any) -> bytes:
    """Not every dtype can be compared, or copied."""
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
        except (RuntimeError, TypeError):  # a name without elements
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
        assert there.is_contiguous()
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


def test_tensor_without_plain_memory_is_refused_after_the_batches_before(
    runtime,
) -> None:
    need_cuda(runtime)
    found = iter(cumem.prefetch([torch.ones(3), torch.eye(3).to_sparse()]))
    assert next(found).sum() == 3
    with pytest.raises(TypeError, match=r"torch\.sparse_coo, torch\.float32"):
        next(found)


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


@pytest.mark.gpu
def test_tensors_are_right_on_streams_that_are_behind(cuda) -> None:
    """Work is queued on a batch long before its copy, and the batch dropped at once."""
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
