# SPDX-License-Identifier: Apache-2.0
"""Files that `save_safetensors_async` writes with ``before=``, an optimizer of PyTorch.

The optimizers are real ones, with hooks that PyTorch calls. PyTorch cannot make tensors on
the emulated device. So the state of the optimizers has objects of the class `Memory` in the
place of tensors. They export memory of a device as another library does. cumem does not
order the changes of such memory by itself. New streams are held shut, so that the device
cannot copy before the changes.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import gc
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import session

import cumem

testing = session.testing
SIZE = 60_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def no_plan_left() -> Iterator[None]:
    yield
    testing.file_plan()


class Memory:
    """A tensor on a device, as another library has it."""

    def __init__(self, value: float, device: int = 0, size: int = SIZE) -> None:
        self.owner, *self.others = (
            cumem.full(size, each, "f4", kind="device", device=device)
            for each in (value, 5.0, 7.0)
        )
        cumem.Device(device).synchronize()
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "<f4",
            "data": (self.owner.ptr, False),
            "version": 3,
            "stream": None,
        }

    def fill(self, value: float) -> None:
        """Fill it with 5 or 7 on the current stream. cumem does not know of the fill."""
        stream = cumem.current_stream(self.owner.device)
        cumem.copy_async(self, self.others[value == 7.0], stream=stream)

    def peek(self) -> set[float]:
        """Return the values that it has now, without waiting for the work of any stream."""
        address = testing.alias(self.owner.ptr, self.owner.nbytes)
        found = (ctypes.c_float * self.owner.size).from_address(address)
        return set(found)


class Part:
    """A part of a tensor."""

    def __init__(self, whole: Memory, begin: int, end: int) -> None:
        self.whole = whole
        self.__cuda_array_interface__ = {
            **whole.__cuda_array_interface__,
            "shape": (end - begin,),
            "data": (whole.owner.ptr + 4 * begin, False),
        }


def optimizer_of(torch: Any, *memories: Memory) -> Any:
    """Return an optimizer whose step adds nothing, but fills its memories with 7."""

    class Filling(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.parameter = torch.nn.Parameter(torch.zeros(1))
            super().__init__([self.parameter], {})
            self.state[self.parameter] = {"step": 3, "nested": [{"a": [*memories]}]}

        def step(self, closure: Callable[[], object] | None = None) -> None:
            if closure is not None:
                closure()
            for nested in self.state[self.parameter]["nested"]:
                for memory in nested["a"]:
                    memory.fill(7.0)

    return Filling()


def saved(path: Path) -> dict[str, set[float]]:
    """Return the values that each tensor of a file has."""
    loaded = cumem.load_safetensors(path, kind="host", framework="numpy")
    return {name: set(found.ravel().tolist()) for name, found in loaded.items()}


def names(path: Path) -> list[str]:
    """Return the names of all files beside `path`, temporary ones too."""
    return sorted(os.listdir(path.parent))


@contextlib.contextmanager
def copies_held() -> Iterator[Callable[[], None]]:
    """Hold shut all streams that the block makes. Copies to the host run on these streams.

    The block gets a function that opens them.
    """
    with testing.new_streams_shut() as let_go, session.rescued_by(let_go):
        yield let_go


# -- what waits --------------------------------------------------------------------------


def test_the_stream_waits_for_the_optimizers_tensors_only_at_its_step(
    emulated, path, torch
) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    stream = cumem.current_stream()
    with copies_held():
        saving = cumem.save_safetensors_async(path, {"w": weight}, before=optimizer)
        # This returns, because the stream does not wait for the copies.
        stream.synchronize()
        optimizer.step()
        session.let_workers_pass()
        assert not stream.done
        assert weight.peek() == {1.0}
    saving.wait()
    assert saved(path) == {"w": {1.0}}
    stream.synchronize()
    assert weight.peek() == {7.0}


def test_the_stream_waits_at_once_for_the_tensors_of_nobody(
    emulated, path, torch
) -> None:
    weight, average = Memory(1.0), Memory(2.0)
    optimizer = optimizer_of(torch, weight)
    stream = cumem.current_stream()
    with copies_held():
        saving = cumem.save_safetensors_async(
            path, {"w": weight, "a": average}, before=optimizer
        )
        average.fill(5.0)
        session.let_workers_pass()
        assert not stream.done
        assert average.peek() == {2.0}
    optimizer.step()
    saving.wait()
    assert saved(path) == {"w": {1.0}, "a": {2.0}}


def test_without_an_optimizer_the_stream_waits_for_everything(
    emulated, path, torch
) -> None:
    weight = Memory(1.0)
    stream = cumem.current_stream()
    with copies_held():
        saving = cumem.save_safetensors_async(path, {"w": weight})
        weight.fill(5.0)
        session.let_workers_pass()
        assert not stream.done
    saving.wait()
    assert saved(path) == {"w": {1.0}}


def test_a_step_on_another_stream_waits_there(emulated, path, torch) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    with cumem.Stream() as other, copies_held():
        with cumem.Stream():
            saving = cumem.save_safetensors_async(path, {"w": weight}, before=optimizer)
        optimizer.step()
        session.let_workers_pass()
        assert not other.done
    saving.wait()
    assert saved(path) == {"w": {1.0}}
    other.synchronize()
    assert weight.peek() == {7.0}


def test_a_step_in_another_thread_waits(emulated, path, torch) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    stream = cumem.current_stream()
    with copies_held():
        saving = cumem.save_safetensors_async(path, {"w": weight}, before=optimizer)
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        assert not stream.done
    saving.wait()
    assert saved(path) == {"w": {1.0}}


def test_a_step_waits_on_each_device(emulated, path, torch) -> None:
    weights = {str(device): Memory(1.0, device) for device in (0, 1)}
    optimizer = optimizer_of(torch, *weights.values())
    with copies_held():
        saving = cumem.save_safetensors_async(path, weights, before=optimizer)
        for device in (0, 1):
            cumem.current_stream(device).synchronize()
        optimizer.step()
        session.let_workers_pass()
        assert not cumem.current_stream(0).done
        assert not cumem.current_stream(1).done
    saving.wait()
    assert saved(path) == {"0": {1.0}, "1": {1.0}}


def test_a_step_that_is_captured_waits_on_the_host(emulated, path, torch) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch)
    optimizer.state[optimizer.parameter]["memory"] = weight
    with cumem.Stream() as stream, copies_held() as let_go:
        saving = cumem.save_safetensors_async(path, {"w": weight}, before=optimizer)
        testing.set_capturing(stream, True)
        with session.when_waiting(let_go):
            # The hook waits now, since a replay of the graph would call no hook.
            optimizer.step()
        testing.set_capturing(stream, False)
    saving.wait()
    assert saved(path) == {"w": {1.0}}


def test_of_two_optimizers_each_waits_for_its_own(emulated, path, torch) -> None:
    weights = [Memory(1.0), Memory(2.0), Memory(3.0)]
    both = [optimizer_of(torch, weights[0]), optimizer_of(torch, weights[1])]
    stream = cumem.current_stream()
    with copies_held():
        saving = cumem.save_safetensors_async(
            path, {"a": weights[0], "b": weights[1]}, before=both
        )
        optimizer_of(torch, weights[2]).step()
        stream.synchronize()
        both[1].step()
        session.let_workers_pass()
        assert not stream.done
    both[0].step()
    saving.wait()
    assert saved(path) == {"a": {1.0}, "b": {2.0}}


def test_a_tensor_of_two_optimizers_waits_for_the_first_step(
    emulated, path, torch
) -> None:
    weight = Memory(1.0)
    both = [optimizer_of(torch, weight), optimizer_of(torch, weight)]
    stream = cumem.current_stream()
    for value, each in zip((1.0, 7.0), both, strict=True):
        with copies_held():
            saving = cumem.save_safetensors_async(path, {"a": weight}, before=both)
            stream.synchronize()
            each.step()
            session.let_workers_pass()
            assert not stream.done
        saving.wait()
        assert saved(path) == {"a": {value}}
        stream.synchronize()


def test_several_saves_before_one_step_are_all_waited_for(
    emulated, path, torch
) -> None:
    weights = [Memory(1.0), Memory(2.0)]
    optimizer = optimizer_of(torch, *weights)
    other = path.with_name("b.safetensors")
    with copies_held():
        cumem.save_safetensors_async(path, {"w": weights[0]}, before=optimizer)
        last = cumem.save_safetensors_async(other, {"w": weights[1]}, before=optimizer)
        optimizer.step()
        session.let_workers_pass()
    last.wait()
    assert saved(path) == {"w": {1.0}}
    assert saved(other) == {"w": {2.0}}


def test_a_closure_runs_after_the_wait(emulated, path, torch) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    with copies_held():
        saving = cumem.save_safetensors_async(path, {"w": weight}, before=optimizer)
        optimizer.step(lambda: weight.fill(5.0))
        session.let_workers_pass()
    saving.wait()
    assert saved(path) == {"w": {1.0}}


def test_a_step_that_a_scaler_skips_is_no_step(emulated, path, torch) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    scaler = torch.amp.GradScaler("cpu")
    stream = cumem.current_stream()
    with copies_held():
        saving = cumem.save_safetensors_async(path, {"w": weight}, before=optimizer)
        for gradient in (float("inf"), 1.0):
            loss = scaler.scale((optimizer.parameter * gradient).sum())
            optimizer.zero_grad()
            loss.backward()
            stream.synchronize()
            scaler.step(optimizer)
            scaler.update()
        session.let_workers_pass()
        assert not stream.done
    saving.wait()
    assert saved(path) == {"w": {1.0}}


# -- which tensors are the optimizer's ---------------------------------------------------


def test_parts_of_its_tensors_are_the_optimizers(emulated, path, torch) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    turned = cumem.asbuffer(weight).reshape(300, 200).T[::3, ::-1]
    tensors = {"part": Part(weight, 10, 20), "turned": turned, "none": turned[:0]}
    with copies_held():
        saving = cumem.save_safetensors_async(path, tensors, before=optimizer)
        cumem.current_stream().synchronize()
        optimizer.step()
        session.let_workers_pass()
    saving.wait()
    assert saved(path) == {"part": {1.0}, "turned": {1.0}, "none": set()}


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        pytest.param(11, 21, id="beyond the end"),
        pytest.param(9, 12, id="before the beginning"),
        pytest.param(50, 52, id="over a gap"),
    ],
)
def test_tensors_that_are_only_partly_the_optimizers_are_not_its_own(
    emulated, path, torch, begin, end
) -> None:
    whole = Memory(1.0)
    cumem.synchronize()
    gaps = cumem.asbuffer(whole)[30::2]
    optimizer = optimizer_of(torch)
    state = optimizer.state[optimizer.parameter]
    state.update(part=Part(whole, 10, 20), gaps=gaps, sparse=torch.eye(2).to_sparse())
    stream = cumem.current_stream()
    with copies_held():
        saving = cumem.save_safetensors_async(
            path, {"a": Part(whole, begin, end)}, before=optimizer
        )
        whole.fill(5.0)
        session.let_workers_pass()
        assert not stream.done
    saving.wait()
    assert saved(path) == {"a": {1.0}}


def test_an_optimizer_without_tensors_in_the_file_changes_nothing(
    emulated, path, torch
) -> None:
    weight = Memory(1.0)
    stream = cumem.current_stream()
    with copies_held():
        saving = cumem.save_safetensors_async(
            path, {"w": weight}, before=optimizer_of(torch, Memory(2.0))
        )
        weight.fill(5.0)
        session.let_workers_pass()
        assert not stream.done
    saving.wait()
    assert saved(path) == {"w": {1.0}}


def test_parameters_on_the_host_are_read_before_the_call_returns(
    runtime, path, torch
) -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(100)).sum().backward()
        before = {name: each.clone() for name, each in model.state_dict().items()}
        saving = cumem.save_safetensors_async(
            path, model.state_dict(), before=optimizer
        )
        optimizer.step()
        saving.wait()
        found = cumem.load_safetensors(path, kind="host", framework="torch")
        assert all(torch.equal(found[name], each) for name, each in before.items())


@pytest.mark.parametrize("host_limit", [0, 4 * SIZE])
def test_a_limit_of_host_memory_changes_no_byte(
    emulated, path, torch, host_limit
) -> None:
    weights = {"a": Memory(1.0), "b": Memory(2.0), "c": Memory(3.0)}
    optimizer = optimizer_of(torch, weights["b"], weights["c"])
    saving = cumem.save_safetensors_async(
        path, weights, before=optimizer, host_limit=host_limit
    )
    optimizer.step()
    saving.wait()
    assert saved(path) == {"a": {1.0}, "b": {2.0}, "c": {3.0}}


# -- a limit of host memory --------------------------------------------------------------


def test_what_finds_no_room_is_written_behind_the_call_and_the_step_waits(
    emulated, path, torch
) -> None:
    weights = {"a": Memory(1.0), "b": Memory(2.0)}
    optimizer = optimizer_of(torch, *weights.values())
    stream = cumem.current_stream()
    testing.file_plan(held=1)
    with session.rescued_by(testing.file_open):
        saving = cumem.save_safetensors_async(
            path, weights, before=optimizer, host_limit=4 * SIZE
        )
        testing.file_await()
        stream.synchronize()
    with session.when_waiting(testing.file_open):
        optimizer.step()
    saving.wait()
    assert saved(path) == {"a": {1.0}, "b": {2.0}}
    assert names(path) == [path.name]


def test_the_step_of_a_copy_that_is_held_changes_nothing_yet(
    emulated, path, torch
) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    testing.file_plan(held=1)
    saving = cumem.save_safetensors_async(
        path, {"a": weight}, before=optimizer, host_limit=0
    )
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    session.wait_until_waiting(thread)
    assert thread.is_alive()
    assert weight.peek() == {1.0}
    testing.file_open()
    thread.join()
    saving.wait()
    assert saved(path) == {"a": {1.0}}


def test_tensors_of_nobody_get_the_room_first(emulated, path, torch) -> None:
    tensors = {"w": Memory(1.0), "average": Memory(2.0)}
    optimizer = optimizer_of(torch, tensors["w"])
    testing.file_plan(held=1)
    with session.rescued_by(testing.file_open):
        saving = cumem.save_safetensors_async(
            path, tensors, before=optimizer, host_limit=4 * SIZE
        )
    testing.file_open()
    saving.wait()
    assert saved(path) == {"w": {1.0}, "average": {2.0}}


def test_the_work_before_the_call_is_in_what_finds_no_room(
    emulated, path, torch
) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    stream = cumem.current_stream()
    with session.rescued(stream), session.gate(stream):
        weight.fill(5.0)
        saving = cumem.save_safetensors_async(
            path, {"w": weight}, before=optimizer, host_limit=0
        )
        assert not saving.done
    optimizer.step()
    saving.wait()
    assert saved(path) == {"w": {5.0}}


def test_a_part_that_cannot_be_written_fails_the_file(emulated, path, torch) -> None:
    weights = {"a": Memory(1.0), "b": Memory(2.0)}
    optimizer = optimizer_of(torch, *weights.values())
    cumem.save_safetensors_async(path, {"old": np.ones(3)}).wait()
    for _ in range(2):  # the second call forgets what the first has left to the step
        # The second write is of the part that is written first, not of the header.
        testing.file_plan(nth=2, error=errno.ENOSPC)
        saving = cumem.save_safetensors_async(
            path, weights, before=optimizer, host_limit=0
        )
        with pytest.raises(OSError, match="No space left") as caught:
            saving.wait()
        assert caught.value.filename == str(path)
    optimizer.step()
    assert saved(path) == {"old": {1.0}}
    assert names(path) == [path.name]


def test_a_file_is_cancelled_while_a_part_is_written(emulated, path, torch) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    testing.file_plan(held=1)
    saving = cumem.save_safetensors_async(
        path, {"w": weight}, before=optimizer, host_limit=0
    )
    testing.file_await()
    assert saving.cancel()
    assert names(path) == []
    testing.file_open()
    optimizer.step()
    cumem.synchronize()
    assert weight.peek() == {7.0}


def test_page_locked_memory_is_free_while_a_part_waits_for_its_step(
    emulated, path, torch
) -> None:
    weights = {"a": Memory(1.0), "b": Memory(2.0)}
    optimizer = optimizer_of(torch, *weights.values())
    cumem.save_safetensors_async(
        path, weights, before=optimizer, host_limit=4 * SIZE
    ).wait()
    assert cumem.stats().kinds["pinned"].live_nbytes == 0


# -- lives -------------------------------------------------------------------------------


def test_an_optimizer_that_is_dropped_makes_the_stream_wait(
    emulated, path, torch
) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    stream = cumem.current_stream()
    with copies_held():
        saving = cumem.save_safetensors_async(path, {"w": weight}, before=optimizer)
        stream.synchronize()
        del optimizer
        gc.collect()
        optimizer_of(torch, weight).step()
        session.let_workers_pass()
        assert not stream.done
    saving.wait()
    assert saved(path) == {"w": {1.0}}


def test_an_optimizer_that_outlives_the_stream_of_the_call_is_dropped(
    emulated, path, torch
) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    with copies_held():
        with cumem.Stream() as stream:
            cumem.save_safetensors_async(path, {"w": weight}, before=optimizer)
        stream.close()
        del optimizer
        gc.collect()


def test_tensors_that_are_dropped_after_the_call_are_saved(
    emulated, path, torch
) -> None:
    tensor = cumem.full(SIZE, 1.0, "f4", kind="device")
    optimizer = optimizer_of(torch)
    optimizer.state[optimizer.parameter]["memory"] = tensor
    with copies_held():
        saving = cumem.save_safetensors_async(path, {"w": tensor}, before=optimizer)
        optimizer.state.clear()
        del tensor
        gc.collect()
        cumem.full(SIZE, 5.0, "f4", kind="device")
        session.let_workers_pass()
    saving.wait()
    assert saved(path) == {"w": {1.0}}


def test_an_optimizer_keeps_one_hook_and_calls_the_others(
    emulated, path, torch
) -> None:
    weight, called = Memory(1.0), []
    optimizer = optimizer_of(torch, weight)
    optimizer.register_step_pre_hook(lambda *_: called.append("first"))
    for _ in range(3):
        saving = cumem.save_safetensors_async(path, {"w": weight}, before=optimizer)
        if not called:
            optimizer.register_step_pre_hook(lambda *_: called.append("last"))
        optimizer.step()
        saving.wait()
    assert called == ["first", "last"] * 3
    assert len(optimizer._optimizer_step_pre_hooks) == 3


def test_an_optimizer_can_be_copied_and_pickled_afterwards(
    runtime, path, torch
) -> None:
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cumem.save_safetensors_async(path, model.state_dict(), before=optimizer).wait()
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        made.step()


def test_a_step_after_shutdown_waits_for_nothing(emulated, path, torch) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    tensor = cumem.full(SIZE, 1.0, "f4", kind="device")
    optimizer.state["memory"] = tensor
    saving = cumem.save_safetensors_async(path, {"w": tensor}, before=optimizer)
    saving.wait()
    optimizer.state.clear()
    del tensor, saving
    cumem.shutdown()
    optimizer.step()
    assert saved(path) == {"w": {1.0}}
    cumem.save_safetensors_async(path, {"w": np.ones(3)}, before=optimizer).wait()


def test_page_locked_memory_is_free_again_without_a_step(emulated, path, torch) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    before = cumem.stats().kinds["pinned"].live_nbytes
    for _ in range(3):
        cumem.save_safetensors_async(path, {"w": weight}, before=optimizer).wait()
        assert cumem.stats().kinds["pinned"].live_nbytes == before


# -- failures ----------------------------------------------------------------------------


@pytest.mark.parametrize("host_limit", [0, None])
def test_a_save_that_fails_disturbs_no_step(emulated, path, torch, host_limit) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    testing.file_plan(nth=1, error=errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        cumem.save_safetensors_async(
            path, {"w": weight}, before=optimizer, host_limit=host_limit
        ).wait()
    testing.file_plan()
    optimizer.step()
    cumem.current_stream().synchronize()
    assert weight.peek() == {7.0}
    assert not path.exists()


def test_a_save_that_is_cancelled_disturbs_no_step(emulated, path, torch) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    with copies_held():
        saving = cumem.save_safetensors_async(path, {"w": weight}, before=optimizer)
        assert saving.cancel()
        optimizer.step()
    cumem.current_stream().synchronize()
    assert weight.peek() == {7.0}


def test_a_signal_in_the_hook_leaves_the_rest_to_the_next_step(
    emulated, path, torch
) -> None:
    weight = Memory(1.0)
    optimizer = optimizer_of(torch, weight)
    stream = cumem.Stream()
    with copies_held() as let_go, stream:
        saving = cumem.save_safetensors_async(path, {"w": weight}, before=optimizer)
        testing.set_capturing(stream, True)  # so that the hook waits on the host

        def ring() -> None:
            raise session.AlarmError

        with session.on_alarm(ring), pytest.raises(session.AlarmError):
            optimizer.step()
        testing.set_capturing(stream, False)
        optimizer.step()
        session.let_workers_pass()
        assert not stream.done
        let_go()
    saving.wait()
    assert saved(path) == {"w": {1.0}}


@pytest.mark.parametrize("wrong", [1, "adam", [None], object()])
def test_what_is_not_an_optimizer_is_refused(runtime, path, wrong) -> None:
    with pytest.raises(TypeError, match="before must be an optimizer of PyTorch"):
        cumem.save_safetensors_async(path, {"a": np.ones(3)}, before=wrong)
    assert not path.exists()


def test_an_optimizer_without_hooks_is_refused(runtime, path, torch) -> None:
    class Wrapper(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.param_groups: list[Any] = []
            self.state: dict[Any, Any] = {}

    with pytest.raises(TypeError, match="Wrapper"):
        cumem.save_safetensors_async(path, {"a": np.ones(3)}, before=Wrapper())
