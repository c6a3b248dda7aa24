# SPDX-License-Identifier: Apache-2.0
"""`PinnedStager` with ``torch.distributed.checkpoint`` in one process.

On the emulated device PyTorch has only tensors of the host. Where a test says so, storages
stand for memory of the device. The stager then copies that memory behind streams that are
shut.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support import session

import cumem
from cumem.integrations import torch_checkpoints
from cumem.integrations.torch import PinnedStager

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
testing = session.testing
SIZE = 50_000


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore PyTorch's warnings, for example that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class OnDevice:
    """Tensors of the host whose storages stand for memory of the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory: dict[int, cumem.Buffer] = {}
        find = torch_checkpoints._memory_of

        def memory_of(torch: Any, storage: Any) -> cumem.Buffer:
            found = self.memory.get(storage.data_ptr())
            return find(torch, storage) if found is None else found

        monkeypatch.setattr(torch_checkpoints, "_memory_of", memory_of)

    def make(self, value: float) -> Any:
        """Return a tensor that stands for memory which holds the value."""
        tensor = torch.full((SIZE,), float("nan"))
        nbytes = tensor.untyped_storage().nbytes()
        made = cumem.full(nbytes // 4, value, "f4", kind="device")
        self.memory[tensor.data_ptr()] = made.view("u1")
        return tensor

    def of(self, tensor: Any) -> cumem.Buffer:
        return self.memory[tensor.data_ptr()].view("f4")


@pytest.fixture
def on_device(emulated, monkeypatch) -> Iterator[OnDevice]:
    found = OnDevice(monkeypatch)
    yield found
    found.memory.clear()


def save(state: Any, path: Path, stager: PinnedStager) -> Future[Any]:
    """Begin to save a state, and return the future of the whole checkpoint."""
    saving = dcp.async_save(
        state, checkpoint_id=path, async_stager=stager, no_dist=True
    )
    assert type(saving).__name__ == "AsyncSaveResponse"
    return saving.upload_completion


def load(state: Any, path: Path) -> Any:
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


# -- what the checkpoint holds -----------------------------------------------------------


def test_changes_right_after_the_call_are_not_in_the_checkpoint(
    runtime, tmp_path
) -> None:
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "half": torch.ones(5, dtype=torch.bfloat16),
        "none": torch.ones(0),
    }
    before = {name: each.clone() for name, each in model.state_dict().items()}
    moment = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    saving = save(state, tmp_path, PinnedStager())
    with torch.no_grad():
        for tensor in (*model.parameters(), state["half"]):
            tensor.zero_()
        optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    state["step"] = 8
    saving.result(session.PATIENCE)
    found = load(state, tmp_path)
    assert all(torch.equal(found["model"][name], each) for name, each in before.items())
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], moment)
    assert found["half"].sum() == 5
    assert found["step"] == 7


def test_the_device_copies_later_and_the_stream_waits(on_device, tmp_path) -> None:
    state = {"a": on_device.make(1.0), "b": [on_device.make(2.0)]}
    cumem.synchronize()
    stream = cumem.current_stream()
    stager = PinnedStager()
    with testing.new_streams_shut() as let_go, session.rescued_by(let_go):
        future = stager.stage(state)
        stream_end = stream.record()
        session.let_workers_pass()
        assert not future.done()
        assert not stream_end.done
        assert not future.cancel()
    stager.synchronize_staging()
    staged = future.result(session.PATIENCE)
    assert set(staged["a"].tolist()) == {1.0}
    assert set(staged["b"][0].tolist()) == {2.0}
    assert cumem.asbuffer(staged["a"]).kind == "pinned"


def test_with_an_optimizer_the_stream_goes_on_until_its_step(
    on_device, tmp_path
) -> None:
    tensor = on_device.make(1.0)
    cumem.synchronize()
    stream = cumem.current_stream()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.state["memory"] = on_device.of(tensor)
    stager = PinnedStager(before=optimizer)
    with testing.new_streams_shut() as let_go, session.rescued_by(let_go):
        future = stager.stage({"a": tensor})
        stream.synchronize()
        optimizer.step()
        stream_end = stream.record()
        session.let_workers_pass()
        assert not stream_end.done
    assert set(future.result(session.PATIENCE)["a"].tolist()) == {1.0}
    optimizer.state.clear()


def test_a_checkpoint_of_a_device_is_saved_and_loaded(on_device, tmp_path) -> None:
    state = {"a": on_device.make(1.0), "host": torch.ones(3)}
    cumem.synchronize()
    for number in range(3):
        path = tmp_path / str(number)
        saving = save(state, path, PinnedStager())
        on_device.of(state["a"]).fill(number + 2.0)
        state["host"].fill_(number + 2.0)
        saving.result(session.PATIENCE)
        found = load({"a": torch.zeros(SIZE), "host": torch.zeros(3)}, path)
        assert set(found["a"].tolist()) == set(found["host"].tolist()) == {number + 1.0}


def test_tensors_that_share_a_storage_are_copied_once(on_device) -> None:
    whole = on_device.make(3.0)
    cumem.synchronize()
    state = {"whole": whole, "part": whole[10:20], "tied": whole.view(100, -1).T}
    staged = PinnedStager().stage(state).result(session.PATIENCE)
    assert {each.untyped_storage().data_ptr() for each in staged.values()} == {
        staged["whole"].data_ptr()
    }
    assert staged["tied"].stride() == state["tied"].stride()
    assert set(staged["part"].tolist()) == {3.0}


def test_a_distributed_tensor_stays_one(on_device, tmp_path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = on_device.make(4.0)
        cumem.synchronize()
        state = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
        stager = PinnedStager()
        staged = stager.stage(state).result(session.PATIENCE)
        assert isinstance(staged["w"], DTensor)
        assert cumem.asbuffer(staged["w"].to_local()).kind == "pinned"
        path = tmp_path / "saved"
        dcp.async_save(
            state, checkpoint_id=path, async_stager=stager
        ).upload_completion.result(session.PATIENCE)
        found = {"w": DTensor.from_local(torch.zeros(SIZE), mesh, [Shard(0)])}
        dcp.load(found, checkpoint_id=path)
        assert set(found["w"].to_local().tolist()) == {4.0}
    finally:
        distributed.destroy_process_group()


# -- memory and limits -------------------------------------------------------------------


def test_page_locked_memory_is_free_again_after_the_checkpoint(
    on_device, tmp_path
) -> None:
    state = {"a": on_device.make(1.0)}
    stager = PinnedStager()
    for number in range(3):
        save(state, tmp_path / str(number), stager).result(session.PATIENCE)
        gc.collect()
        session.wait_until(lambda: cumem.stats().kinds["pinned"].live_nbytes == 0)
    stager.close()


def test_more_than_the_limit_is_refused(on_device) -> None:
    state = {"a": on_device.make(1.0), "b": on_device.make(1.0), "c": torch.ones(9999)}
    nbytes = 8 * SIZE
    PinnedStager(host_limit=nbytes).stage(state).result(session.PATIENCE)
    with pytest.raises(ValueError, match="host_limit is 390"):
        PinnedStager(host_limit=nbytes - 1).stage(state)


def test_wrong_arguments_are_refused(runtime) -> None:
    with pytest.raises(TypeError, match="before must be an optimizer"):
        PinnedStager(before=1)
    with pytest.raises(ValueError, match="host_limit"):
        PinnedStager(host_limit=-1)


def test_a_copy_that_cannot_be_started_is_an_error(on_device) -> None:
    state = {"a": on_device.make(1.0)}
    cumem.synchronize()
    testing.plan_fault("copy_async", 1, repeat=True)
    with pytest.raises(cumem.CudaError):
        PinnedStager().stage(state)
    testing.plan_fault(None, 0)


def test_it_is_a_stager_of_pytorch(runtime) -> None:
    from torch.distributed.checkpoint.staging import AsyncStager

    stager = PinnedStager()
    assert isinstance(stager, AsyncStager)
    assert not stager.should_synchronize_after_execute
    stager.synchronize_staging()
    stager.close()


def test_an_old_pytorch_is_named(runtime, monkeypatch) -> None:
    monkeypatch.setattr(torch_checkpoints, "_WALK", "torch.nothing")
    torch_checkpoints._walker_type.cache_clear()
    with pytest.raises(ImportError, match="such as PyTorch"):
        PinnedStager().stage({})
    torch_checkpoints._walker_type.cache_clear()
