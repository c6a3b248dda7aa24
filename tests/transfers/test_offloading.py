# SPDX-License-Identifier: Apache-2.0
"""Activations, modules and state dicts of PyTorch in pinned memory.

On the emulated device, tensors in ordinary memory stand for those of a GPU. What only a
GPU can show is marked `gpu`.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import session
from support.session import testing

import cumem
from cumem import _core
from cumem.integrations.torch import offload, offload_activations, restore
from cumem.transfers import offloading

WIDTH, ROWS = 64, 128
NBYTES = WIDTH * ROWS * 4


@pytest.fixture
def torch() -> Any:
    """Return PyTorch with a fixed seed for random numbers."""
    found = pytest.importorskip("torch")
    found.manual_seed(1)
    return found


@pytest.fixture
def device(runtime, torch) -> str:
    """Return the name of the device whose tensors are offloaded."""
    if not runtime.emulated and not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return "cpu" if runtime.emulated else "cuda"


def live() -> int:
    """Return the bytes of pinned memory that buffers hold."""
    gc.collect()
    if cumem.backend() == "cuda":
        cumem.Device(0).synchronize()
    while testing.pending_transfers():
        testing.poll()
    return cumem.stats()["pinned"].live_nbytes


def make_model(torch: Any, device: str, depth: int = 6) -> Any:
    """Return a model whose layers save tensors for the backward pass."""
    layers = [
        torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()
        )
        for _ in range(depth)
    ]
    return torch.nn.Sequential(*layers).to(device)


def train(torch: Any, model: Any, context: Any, steps: int = 4) -> list[Any]:
    """Train the model for some steps, and return the losses and the parameters."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(steps):
        data = torch.randn(ROWS, WIDTH, generator=generator).to(device)
        with context:
            loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return [*found, *(p.detach().clone() for p in model.parameters())]


def are_equal(torch: Any, some: list[Any], others: list[Any]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# -- activations -----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 4, 100])
def test_training_is_the_same(torch, device: str, depth: int) -> None:
    model = make_model(torch, device)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    expected = train(torch, model, contextlib.nullcontext())
    model.load_state_dict(start)
    context = offload_activations(min_nbytes=NBYTES, depth=depth)
    assert are_equal(torch, train(torch, model, context), expected)
    # Each layer saves its input and the results of LayerNorm and Linear. The last
    # difference is not saved, since nothing uses it afterwards.
    assert context.offloaded_nbytes == 4 * NBYTES * 18
    assert context.tensor_count == 4 * 19
    assert repr(context).startswith(
        "<cumem.integrations.torch.ActivationOffload: 76 tensors, "
    )
    assert live() == 0


def test_whole_training_loop_may_be_inside(torch, device: str) -> None:
    model = make_model(torch, device)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    expected = train(torch, model, contextlib.nullcontext())
    model.load_state_dict(start)
    with offload_activations(min_nbytes=1):
        found = train(torch, model, contextlib.nullcontext())
    assert are_equal(torch, found, expected)
    assert live() == 0


class Saves:
    """An autograd function that saves its arguments, and shows what backward() gets of
    them.
    """

    def __init__(self, torch: Any) -> None:
        self.came: list[Any] = []
        came = self.came

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, first: Any, *more: Any) -> Any:
                ctx.save_for_backward(first, *more)
                return first.sum()

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                came.append(ctx.saved_tensors)
                return (gradient.expand_as(ctx.saved_tensors[0]), *[None] * 9)[
                    : len(ctx.saved_tensors)
                ]

        self.apply = Function.apply


def leaf(torch: Any, device: str, *shape: int) -> Any:
    return torch.randn(*shape, device=device, requires_grad=True)


def save_more(torch: Any, device: str, count: int) -> list[Any]:
    """Save other tensors, so that the earlier ones leave the device.

    The caller keeps them.
    """
    return [(leaf(torch, device, ROWS, WIDTH) * 2).square() for _ in range(count)]


def test_what_stays_on_the_device(torch, device: str) -> None:
    weight = torch.nn.Parameter(torch.randn(WIDTH, ROWS, device=device))
    frozen = torch.nn.Parameter(torch.randn(WIDTH, ROWS, device=device), False)
    leaves = [weight, frozen, frozen.T, weight.T, weight.T.to(torch.bfloat16)]
    others = [
        leaf(torch, device, WIDTH, ROWS),
        torch.ones(WIDTH * ROWS // 4 - 1, device=device),  # This one is too small.
        torch.ones(WIDTH, ROWS, device=device).to_sparse(),
        torch.ones(WIDTH, ROWS, device=device, dtype=torch.complex64).conj(),
    ]
    saves = Saves(torch)
    first = leaf(torch, device, 3)
    with offload_activations(min_nbytes=NBYTES // 4) as context:
        saves.apply(first * 1, *leaves, *others).backward()
        assert context.tensor_count == 0
        saves.apply(first * 1, weight.T * 2).backward()
        assert context.tensor_count == 1


def test_shared_memory_goes_once_and_keeps_its_layout(torch, device: str) -> None:
    saves = Saves(torch)
    packed = leaf(torch, device, ROWS, 3 * WIDTH) * 2
    parts = [
        part.view(ROWS, 4, WIDTH // 4).transpose(0, 1) for part in packed.chunk(3, 1)
    ]
    with offload_activations(min_nbytes=1, depth=1) as context:
        result = saves.apply(*parts)
        more = save_more(torch, device, 2)
        assert context.offloaded_nbytes == 4 * NBYTES
        assert context.tensor_count == 3 + len(more)
    result.backward()
    for came, part in zip(saves.came[0], parts, strict=True):
        assert torch.equal(came, part)
        assert came.stride() == part.stride()
        assert came.untyped_storage().data_ptr() != packed.data_ptr()
    storages = {came.untyped_storage().data_ptr() for came in saves.came[0]}
    assert len(storages) == 1


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("is_kept", [True, False])
def test_small_part_of_something_large_goes_alone(
    torch, device: str, is_contiguous: bool, is_kept: bool
) -> None:
    saves = Saves(torch)
    large = leaf(torch, device, 10 * ROWS, WIDTH) * 2
    part = large[ROWS : 2 * ROWS] if is_contiguous else large[::10]
    with offload_activations(min_nbytes=1, depth=1) as context:
        result = saves.apply(part)
        more = save_more(torch, device, 1 if is_kept else 2)
        assert context.offloaded_nbytes == len(more) * NBYTES
    expected = part.detach().clone()
    result.backward()
    assert torch.equal(saves.came[0][0], expected)


@pytest.mark.parametrize("through", ["itself", "view"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_change_in_place_after_saving_is_an_error(
    torch, device: str, through: str, is_kept: bool
) -> None:
    def go(context: Any) -> None:
        tensor = leaf(torch, device, ROWS, WIDTH) * 2
        with context:
            result = tensor.square().sum()
            more = save_more(torch, device, 0 if is_kept else 2)
        with torch.no_grad():
            (tensor if through == "itself" else tensor[0]).add_(1)
        result.backward()
        del more

    said = "has been modified by an inplace operation"
    with pytest.raises(RuntimeError, match=said):
        go(contextlib.nullcontext())
    with pytest.raises(RuntimeError, match=said) as caught:
        go(offload_activations(min_nbytes=1, depth=1))
    assert f"[{ROWS}, {WIDTH}]] is at version 1; expected version 0" in str(
        caught.value
    )
    del caught
    assert live() == 0


def test_change_in_place_of_a_saved_result_is_an_error(torch, device: str) -> None:
    with offload_activations(min_nbytes=1) as context:
        result = leaf(torch, device, ROWS, WIDTH).exp()
    assert context.tensor_count == 1
    result.sum().backward(retain_graph=True)
    with torch.no_grad():
        result.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("is_kept", [True, False])
def test_change_in_place_during_backward_is_an_error(
    torch, device: str, is_kept: bool
) -> None:
    """A backward pass changes a saved tensor in place. The next backward pass must then
    raise the same error as without offloading.
    """

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            ctx.save_for_backward(value)
            return value.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (value,) = ctx.saved_tensors
            return gradient * value.mul_(2)

    def go(context: Any, is_same: bool) -> None:
        tensor = leaf(torch, device, ROWS, WIDTH) * 2
        with context:
            if not is_same:
                other = tensor.view(WIDTH, ROWS).sin().sum()
            result = Doubles.apply(tensor)
            more = save_more(torch, device, 0 if is_kept else 2)
        result.backward(retain_graph=True)
        (result if is_same else other).backward()
        del more

    for is_same in (True, False):
        for context in (
            contextlib.nullcontext(),
            offload_activations(min_nbytes=1, depth=1),
        ):
            with pytest.raises(RuntimeError, match="at version 1; expected version 0"):
                go(context, is_same)


def test_change_in_place_before_it_is_saved_again_is_none(torch, device: str) -> None:
    """The bytes at the time of saving count.

    A tensor that changed in between is copied again.
    """
    tensor = leaf(torch, device, ROWS, WIDTH) * 2
    with torch.no_grad():
        tensor.add_(1)
    saves = Saves(torch)
    with offload_activations(min_nbytes=1) as context:
        before = saves.apply(tensor)
        with torch.no_grad():
            tensor.add_(1)
        result = saves.apply(tensor)
        assert context.offloaded_nbytes == NBYTES
    result.backward()
    assert torch.equal(saves.came[0][0], tensor)
    with pytest.raises(RuntimeError, match="is at version 2; expected version 1"):
        before.backward()


@pytest.mark.parametrize("is_fresh", [False, True])
def test_tensors_that_share_memory_but_count_changes_apart(
    torch, device: str, is_fresh: bool
) -> None:
    """A copy that was saved for one of them must not be used for the other, even if
    both count the same number of changes.
    """
    source = leaf(torch, device, ROWS, WIDTH)

    def gradient(context: Any) -> Any:
        with context:
            a, b = torch.unsafe_chunk(source * 2, 2)
            if is_fresh:
                first = b.sin()
            else:
                a = first = a.sigmoid_()
            # Saving these makes the earlier ones leave the device.
            more = save_more(torch, device, 2)
            if is_fresh:
                # The bytes have changed, but the view's version starts again.
                second = torch.ops.aten._unsafe_view(a.sigmoid_(), a.shape).sin()
            else:
                second = b.sigmoid_()
            result = (first * second).sum()
        (found,) = torch.autograd.grad(result, source)
        del more
        return found

    expected = gradient(contextlib.nullcontext())
    found = gradient(offload_activations(min_nbytes=1, depth=1))
    assert torch.equal(found, expected)


def test_graph_may_be_kept(torch, device: str) -> None:
    model = make_model(torch, device)
    data = torch.randn(ROWS, WIDTH, device=device)

    def gradients(context: Any) -> list[Any]:
        with context:
            loss = model(data).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    expected = gradients(contextlib.nullcontext())
    found = gradients(offload_activations(min_nbytes=1, depth=2))
    assert are_equal(torch, found, expected)


def test_gradients_of_gradients(torch, device: str) -> None:
    weight = torch.randn(WIDTH, WIDTH, device=device, requires_grad=True)
    data = torch.randn(ROWS, WIDTH, device=device)

    def second(context: Any) -> Any:
        with context:
            value = (data @ weight).tanh().pow(3).sum()
        (first,) = torch.autograd.grad(value, weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    expected = second(contextlib.nullcontext())
    context = offload_activations(min_nbytes=1, depth=1)
    assert torch.equal(second(context), expected)
    assert context.tensor_count


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_and_autocast(torch, device: str, use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model = make_model(torch, device)
    start = {key: value.clone() for key, value in model.state_dict().items()}

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, data: Any) -> Any:
            data = data * data.new_ones(1).requires_grad_()
            with torch.autocast(device, torch.bfloat16):
                for layer in self.layers[:3]:
                    data = checkpoint(layer, data, use_reentrant=use_reentrant)
                return self.layers[3:](data).float()

    expected = train(torch, Wrapped(), contextlib.nullcontext())
    model.load_state_dict(start)
    context = offload_activations(min_nbytes=1)
    assert are_equal(torch, train(torch, Wrapped(), context), expected)
    assert context.tensor_count


def test_nothing_is_left_where_backward_never_runs(torch, device: str) -> None:
    model = make_model(torch, device)
    context = offload_activations(min_nbytes=1)
    with context:
        loss = model(torch.randn(ROWS, WIDTH, device=device)).sum()
    assert live() > 10 * NBYTES
    del loss
    assert live() == 0
    assert not context._known


def test_block_that_fails_saves_nothing_more(torch, device: str) -> None:
    context = offload_activations(min_nbytes=1)
    tensor = leaf(torch, device, ROWS, WIDTH) * 2
    with pytest.raises(ValueError), context:
        raise ValueError
    tensor.square()
    assert context.tensor_count == 0
    with context, context:  # One block is inside the other.
        tensor.square()
    tensor.square()
    assert context.tensor_count == 1


def test_pinned_memory_that_runs_out_is_reported_and_nothing_is_lost(
    torch, device: str
) -> None:
    model = make_model(torch, device)
    data = torch.randn(1 << 14, WIDTH, device=device)
    small = cumem.Pool("pinned", limit="2 MiB")
    context = offload_activations()
    with small, context, pytest.raises(cumem.OutOfMemoryError):
        model(data)
    small.close()
    assert live() == 0
    with offload_activations():
        model(data).sum().backward()
    assert live() == 0


# -- in which order --------------------------------------------------------------------


@pytest.fixture
def links(monkeypatch) -> Iterator[list[Any]]:
    """Return a list of the links that are made.

    A link copies tensors in both directions on streams of its own.
    """
    made: list[Any] = []

    class Link(offloading._EmulatedLink):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(offloading, "_EmulatedLink", Link)
    return made


def shut_down(link: Any) -> None:
    """Let copies under way arrive, and then shut the link's stream to the host."""
    while testing.pending_transfers():
        testing.poll()
    session.shut(link._down)


def weak(torch: Any, tensor: Any) -> Any:
    """Return a weak reference to the memory of a tensor."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def test_tensor_is_kept_until_its_copy_is_done(emulated, torch, links) -> None:
    source = leaf(torch, "cpu", ROWS, WIDTH)
    context = offload_activations(min_nbytes=1, depth=3)
    with context:
        # This makes the link.
        (source * 2).square()
        shut_down(links[0])
        tensor = source * 3
        expected = (2 * tensor.detach()).clone()
        result = tensor.square()
        kept = weak(torch, tensor)
        del tensor
        more = [(source * n).square() for n in (4, 5)]
        assert not kept.expired()
        testing.gate_open(links[0]._down)
        while testing.pending_transfers():
            testing.poll()
        more.append((source * 6).square())
        assert kept.expired()
    (gradient,) = torch.autograd.grad(result.sum(), source)
    assert torch.equal(gradient, 3 * expected)
    del more


def test_host_goes_no_further_than_depth_tensors_ahead(emulated, torch, links) -> None:
    source = leaf(torch, "cpu", ROWS, WIDTH)
    with offload_activations(min_nbytes=1, depth=2):
        # This makes the link.
        (source * 9).square()
        shut_down(links[0])
        tensor = source * 2
        kept = weak(torch, tensor)
        results = [tensor.square()]
        del tensor
        results += [(source * n).square() for n in (3, 4)]
        with session.when_waiting(lambda: testing.gate_open(links[0]._down)):
            # Here the host waits. On a GPU, its stream would wait instead.
            results.append((source * 5).square())
        assert kept.expired()
    total = sum(each.sum() for each in results)
    (gradient,) = torch.autograd.grad(total, source)
    assert torch.allclose(gradient, source * 2 * (4 + 9 + 16 + 25))


def test_graph_that_ends_during_a_copy_waits_for_it(emulated, torch, links) -> None:
    source = leaf(torch, "cpu", ROWS, WIDTH)
    with offload_activations(min_nbytes=1, depth=3):
        (source * 2).square()
        shut_down(links[0])
        tensor = source * 3
        kept = weak(torch, tensor)
        result = tensor.square()
        del tensor
        other = (source * 4).square()
    order: list[str] = []

    def open_gate() -> None:
        order.append("kept" if not kept.expired() else "gone")
        testing.gate_open(links[0]._down)

    with session.when_waiting(open_gate):
        del result
        gc.collect()
    assert kept.expired()
    assert order == ["kept"]
    del other


@pytest.mark.parametrize("method", ["take", "bring", "order"])
def test_interrupt_leaves_a_copy_its_memory(
    emulated, torch, links, monkeypatch, method: str
) -> None:
    """The interrupt comes as soon as the copy has begun, before anything else is noted
    about it.
    """
    source = leaf(torch, "cpu", ROWS, WIDTH)
    context = offload_activations(min_nbytes=1, depth=9 if method == "order" else 1)
    with context:
        # This makes the link.
        more = [(source * 2).square()]
        tensor = source * 3
        result = tensor.square().sum()
        kept = [weak(torch, tensor)]
        del tensor
        (link,) = links
        if method == "bring":
            more += save_more(torch, "cpu", 2)
            session.shut(link._up)
        else:
            while testing.pending_transfers():
                testing.poll()
            shut_down(link)
        call = getattr(link, method)
        empty = torch.empty

        def interrupted(*arguments: Any) -> Any:
            if method != "order":
                call(*arguments)
            raise KeyboardInterrupt

        def empty_and_note(*arguments: Any, **more: Any) -> Any:
            found = empty(*arguments, **more)
            if method == "bring" and found.numel():
                kept[:] = [weak(torch, found)]
            return found

        monkeypatch.setattr(torch, "empty", empty_and_note)
        setattr(link, method, interrupted)
        if method == "order":
            other = (source * 4).square()  # The copy starts here.
            ignored: list[Any] = []
            monkeypatch.setattr(sys, "unraisablehook", ignored.append)
            del result
            gc.collect()
            assert [each.exc_type for each in ignored] == [KeyboardInterrupt]
            ignored.clear()
            del other
        else:
            with pytest.raises(KeyboardInterrupt):
                result.backward() if method == "bring" else (source * 4).square()
            del result
        setattr(link, method, call)
        monkeypatch.undo()
    more.clear()
    gc.collect()
    assert not kept[0].expired()
    testing.gate_open(link._up if method == "bring" else link._down)

    def is_let_go() -> bool:
        # The thread that finished the copy lets go of the memory a moment later.
        testing.poll()
        gc.collect()
        return bool(kept[0].expired())

    session.wait_until(is_let_go, "the end of the memory")


def test_next_ones_are_on_their_way_before_they_are_needed(
    emulated, torch, links
) -> None:
    source = leaf(torch, "cpu", ROWS, WIDTH)
    events: list[str] = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any, name: str) -> Any:
            ctx.name = name
            ctx.save_for_backward(value)
            return value * 1

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            _ = ctx.saved_tensors
            events.append(ctx.name)
            return gradient, None

    with offload_activations(min_nbytes=1, depth=2) as context:
        value = source * 2
        for name in "abcdef":
            value = Note.apply(value, name)
        result = value.sum()
        more = save_more(torch, "cpu", 4)  # All of these have to leave the device.
    (link,) = links
    bring, numbers = link.bring, {}
    for number, saved in enumerate(context._known.values()):
        if saved.host is not None:
            numbers[saved.host.ptr] = "abcdef????"[number]

    def bring_and_note(memory: Any, host: Any) -> Any:
        events.append(f"bring {numbers[host.ptr]}")
        return bring(memory, host)

    link.bring = bring_and_note
    result.backward()
    del more
    assert events == [
        *("bring f", "bring e", "bring d", "f", "bring c", "e", "bring b", "d"),
        *("bring a", "c", "b", "a"),
    ]


def test_last_tensors_are_not_copied_back(emulated, torch, links) -> None:
    source = leaf(torch, "cpu", ROWS, WIDTH)
    with offload_activations(min_nbytes=1, depth=4):
        (source * 1).square()
        shut_down(links[0])
        results = [(source * n).square().sum() for n in (2, 3)]
    # A copy back would never arrive.
    session.shut(links[0]._up)
    with session.when_waiting(lambda: testing.gate_open(links[0]._down)):
        (gradient,) = torch.autograd.grad(sum(results), source)
    assert torch.allclose(gradient, source * 2 * 4 + source * 2 * 9)


def test_copies_of_a_gpu_follow_its_streams(emulated) -> None:
    """A GPU's link copies between memory of the emulated device."""
    stream = cumem.Stream()
    cuda = types.SimpleNamespace(current_stream=lambda device: stream)
    link = offloading._Link(
        types.SimpleNamespace(cuda=cuda), types.SimpleNamespace(index=0)
    )
    device = cumem.zeros(NBYTES, "u1", stream=stream)
    host = cumem.zeros(NBYTES, "u1", "pinned")
    session.shut(stream)
    device.fill(7, stream=stream)
    # The call returns at once, and the copy comes after the fill.
    down = link.take(host, link.memory(device.ptr, NBYTES), stream)
    link.order(down, stream)
    # This fill comes after the copy.
    device.fill(9, stream=stream)
    assert not down.done
    testing.gate_open(stream)
    stream.synchronize()
    assert np.all(device.to_numpy() == 9)
    session.shut(stream)
    device.fill(9, stream=stream)
    # This copy comes after the fill.
    up = link.bring(link.memory(device.ptr, NBYTES), host)
    session.let_workers_pass()
    assert not up.done
    link.order(up, stream)
    testing.gate_open(stream)
    stream.synchronize()
    assert np.all(device.to_numpy() == 7)
    assert np.all(host.numpy() == 7)
    link.copy([(host, link.memory(device.ptr, NBYTES))])
    assert (down.route, up.route) == ("direct", "direct")


def test_two_threads_offload_at_the_same_time(emulated, torch) -> None:
    model = make_model(torch, "cpu")
    data = torch.randn(ROWS, WIDTH)
    context = offload_activations(min_nbytes=1, depth=2)
    found: list[Any] = []
    barrier = threading.Barrier(2)

    def run() -> None:
        parameters = list(model.parameters())
        with context:
            barrier.wait()
            loss = model(data).square().mean()
            barrier.wait()
        found.append(torch.autograd.grad(loss, parameters))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = torch.autograd.grad(
        model(data).square().mean(), list(model.parameters())
    )
    assert len(found) == 2
    assert all(are_equal(torch, list(each), list(expected)) for each in found)


# -- modules and state dicts -----------------------------------------------------------


def test_module_moves_in_place_and_back(torch, device: str) -> None:
    linear = torch.nn.Linear(WIDTH, WIDTH, device=device)
    tied = torch.nn.Embedding(WIDTH, WIDTH, device=device)
    tied.weight = linear.weight
    model = torch.nn.ModuleList([linear, tied, torch.nn.BatchNorm1d(8, device=device)])
    base = torch.arange(20, device=device)
    model.register_buffer("every_second", base[::2])
    model.register_buffer("first", base[:3])
    model.register_buffer("nothing", torch.empty(0, device=device))
    linear(torch.ones(WIDTH, device=device)).sum().backward()
    tensors = [*model.parameters(), linear.weight.grad, *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    places = [tensor.data_ptr() for tensor in tensors]
    names = list(model.state_dict())

    assert offload(model) is model
    # This is more than the weight and its gradient.
    assert live() > 2 * 4 * WIDTH * WIDTH
    # The shared weight counts once.
    assert live() < 3 * 4 * WIDTH * WIDTH
    after = [*model.parameters(), linear.weight.grad, *model.buffers()]
    assert all(a is b for a, b in zip(after, tensors, strict=True))
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert are_equal(torch, [t.cpu() for t in before], tensors)
    assert tied.weight is linear.weight
    assert model.every_second.stride() == (2,)
    shared = {b.untyped_storage().data_ptr() for b in (model.every_second, model.first)}
    assert len(shared) == 1
    assert not {p for p in places if p} & {t.data_ptr() for t in tensors}
    assert list(model.state_dict()) == names

    linear.weight.data.add_(1)  # The change is made on the host.
    assert restore(model) is model
    assert {str(t.device).partition(":")[0] for t in tensors} == {device}
    assert torch.equal(linear.weight, before[0] + 1)
    assert are_equal(torch, before[1:], tensors[1:])
    shared = {b.untyped_storage().data_ptr() for b in (model.every_second, model.first)}
    assert len(shared) == 1
    del after
    assert live() == 0
    assert not offloading._homes
    linear(torch.ones(WIDTH, device=device)).sum().backward()


def test_state_dict_becomes_a_new_one(torch, device: str) -> None:
    model = make_model(torch, device, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(ROWS, WIDTH, device=device)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n": 3}
    moved = offload(states)
    assert moved is not states
    assert moved["n"] == 3
    # These entries contain no tensors.
    assert moved["optimizer"]["param_groups"] == states["optimizer"]["param_groups"]
    assert next(model.parameters()).device.type == device
    weights = moved["model"]
    assert list(weights) == list(states["model"])
    assert all(value.device.type == "cpu" for value in weights.values())
    assert are_equal(
        torch, [v.cpu() for v in states["model"].values()], list(weights.values())
    )
    assert live() > 0
    back = restore(moved)
    assert are_equal(
        torch, list(states["model"].values()), list(back["model"].values())
    )
    mine, theirs = (each["optimizer"]["state"] for each in (back, states))
    for number, state in theirs.items():
        assert are_equal(torch, list(state.values()), list(mine[number].values()))
        assert mine[number]["exp_avg"].device.type == device
    del moved, weights
    assert live() == 0
    optimizer.load_state_dict(back["optimizer"])


class Pair(NamedTuple):
    first: Any
    second: int


def test_state_dict_keeps_its_kinds(torch, device: str) -> None:
    model = torch.nn.BatchNorm1d(8, device=device)
    states = model.state_dict()
    states["extra"] = Pair(torch.ones(8, device=device), 3)
    back = restore(moved := offload(states))
    for found in (moved, back):
        assert type(found) is collections.OrderedDict
        assert found._metadata == states._metadata
        assert found._metadata[""] == {"version": 2}
        assert type(found["extra"]) is Pair
        assert found["extra"].second == 3
        assert found["extra"].first.data_ptr() != states["extra"].first.data_ptr()
        assert torch.equal(found["extra"].first.cpu(), torch.ones(8))
    plain = offload(model.state_dict(keep_vars=True))["weight"]
    assert type(plain) is torch.Tensor
    assert not plain.requires_grad


def test_conjugated_and_negated_tensors_stay_so(torch, device: str) -> None:
    values = torch.randn(8, dtype=torch.complex64, device=device)
    states = {"conj": values.conj(), "neg": values.conj().imag, "plain": values}
    moved = offload(states)
    back = restore(moved)
    for name, value in states.items():
        for found in (moved[name], back[name]):
            assert torch.equal(found.cpu(), value.cpu())
            assert (found.is_conj(), found.is_neg()) == (
                value.is_conj(),
                value.is_neg(),
            )
    model = torch.nn.Module()
    model.register_buffer("conj", values.conj())
    expected = model.conj.clone()
    assert torch.equal(restore(offload(model)).conj, expected)


def test_record_that_was_left_behind_counts_for_nothing(
    emulated, torch, monkeypatch
) -> None:
    """Ctrl-C may end the finalizer that would remove the record."""

    class Left(dict[int, Any]):
        def pop(self, *arguments: Any) -> None:
            pass

    monkeypatch.setattr(offloading, "_homes", Left())
    moved = offload({"a": torch.ones(4096)})
    del moved
    gc.collect()
    (left,) = offloading._homes.values()
    host = cumem.empty_pinned(4096 * 4, "u1")
    # The pool may hand out the same memory again.
    offloading._homes[host.ptr] = left
    tensor = torch.frombuffer(host, dtype=torch.uint8)
    assert restore({"a": tensor})["a"] is tensor
    moved = offload({"a": tensor})
    assert moved["a"] is not tensor


def test_offloading_twice_or_restoring_what_was_not_changes_nothing(
    torch, device: str
) -> None:
    model = torch.nn.Linear(8, 8, device=device)
    places = [p.data_ptr() for p in model.parameters()]
    restore(model)
    assert [p.data_ptr() for p in model.parameters()] == places
    offload(model)
    places = [p.data_ptr() for p in model.parameters()]
    offload(model)
    assert [p.data_ptr() for p in model.parameters()] == places
    restore(model)
    assert offload({}) == {}


def test_all_go_with_one_call(torch, device: str, monkeypatch) -> None:
    calls: list[int] = []
    copy_many = _core.copy_many

    def count(pairs: Any, **more: Any) -> None:
        calls.append(len(pairs))
        copy_many(pairs, **more)

    monkeypatch.setattr(offloading._core, "copy_many", count)
    model = make_model(torch, device)
    restore(offload(model))
    assert calls == [24, 24]


def test_memory_that_runs_out_moves_nothing(torch, device: str) -> None:
    model = torch.nn.ModuleList(
        [torch.nn.Linear(512, 512, device=device) for _ in "abc"]
    )
    tensors = list(model.parameters())
    places = [p.data_ptr() for p in tensors]
    with cumem.Pool("pinned", limit="2 MiB"), pytest.raises(cumem.OutOfMemoryError):
        offload(model)
    assert [p.data_ptr() for p in tensors] == places
    assert not offloading._homes
    assert live() == 0


# -- arguments -------------------------------------------------------------------------


def test_without_pytorch_it_says_so(emulated, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"offload_activations\(\) needs PyTorch"):
        offload_activations()
    for function in (offload, restore):
        with pytest.raises(ImportError, match=f"{function.__name__}.. needs PyTorch"):
            function({})


def test_tensor_that_a_transform_traces_with_is_left_alone(emulated, torch) -> None:
    """The tensor has the type Tensor and says that it is strided, but has no memory."""
    x = torch.ones(1 << 16, requires_grad=True)
    with offload_activations(min_nbytes=1) as context:
        traced = torch._to_functional_tensor(x.detach())
        traced.requires_grad_(True)
        torch._enable_functionalization(reapply_views=True)
        try:
            out = (traced.sin() * traced.cos()).sum()
        finally:
            torch._disable_functionalization()
        assert context.tensor_count == 0
        plain = (x.sin() * x.cos()).sum()
    assert context.tensor_count > 0
    plain.backward()
    assert torch.allclose(x.grad, torch.cos(2 * x.detach()))
    del out


def test_wrong_arguments_are_refused(emulated, torch) -> None:
    with pytest.raises(ValueError, match="depth must be at least 1, not 0"):
        offload_activations(depth=0)
    with pytest.raises(TypeError, match="depth must be an int"):
        offload_activations(depth=1.5)
    with pytest.raises(ValueError, match="min_nbytes"):
        offload_activations(min_nbytes="small")
    for function in (offload, restore):
        with pytest.raises(
            TypeError, match="a module of PyTorch or a state dict, not int"
        ):
            function(5)


def test_streams_are_made_once_and_anew_after_shutdown(emulated, torch, links) -> None:
    for count in (1, 2):
        for _ in range(3):
            with offload_activations(min_nbytes=1):
                (leaf(torch, "cpu", ROWS, WIDTH) * 2).square().sum().backward()
            restore(offload(torch.nn.Linear(8, 8)))
        assert len(links) == count
        gc.collect()
        cumem.shutdown()


# -- what only a GPU shows -------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("on_side_stream", [False, True])
def test_device_of_a_gpu_holds_less(cuda, torch, on_side_stream: bool) -> None:
    """The host runs far ahead of the device. This lead alone would keep memory
    alive.
    """
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU())] * 24
    model = torch.nn.Sequential(*layers).cuda()
    data = torch.randn(8192, 1024, device="cuda")
    tensor_nbytes = data.nbytes
    stream = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()

    def peak(context: Any) -> tuple[int, list[Any]]:
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.cuda.stream(stream):
            with context:
                loss = model(data).square().mean()
            loss.backward()
        torch.cuda.synchronize()
        gradients = [p.grad.clone() for p in model.parameters()]
        return torch.cuda.max_memory_allocated() - before, gradients

    plain, expected = peak(contextlib.nullcontext())
    for _ in range(2):
        less, found = peak(offload_activations(depth=2))
        assert are_equal(torch, found, expected)
        assert plain > 40 * tensor_nbytes
        assert less < 16 * tensor_nbytes


@pytest.mark.gpu
def test_module_on_the_host_frees_the_memory_of_a_gpu(cuda, torch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    model = torch.nn.Linear(4096, 4096, device="cuda")
    before = torch.cuda.memory_allocated()
    offload(model)
    assert torch.cuda.memory_allocated() <= before - model.weight.nbytes
    assert model.weight.is_pinned()
    restore(model)
    assert model.weight.is_cuda
    assert torch.cuda.memory_allocated() >= before
