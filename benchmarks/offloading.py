# SPDX-License-Identifier: Apache-2.0
"""Measure how PyTorch's activations, and a whole model, are offloaded to the host.

    python benchmarks/offloading.py --json benchmarks/results/offloading-h200.json

A model of GPT-2's size (12 layers, 768 wide, 1,024 tokens, bfloat16 by autocast) is trained
from the same start on the same data each time: without offloading, with PyTorch's
`save_on_cpu(pin_memory=True)`, and with `offload_activations()`. The losses may differ
by at most four times as much as they differ between two runs without offloading. Then
the whole model moves to the host and back, by `offload` and `restore` and by a loop
over its tensors. The script also runs on the emulated device, and then says that the
figures are not a GPU's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cumem
from cumem.integrations.torch import offload, offload_activations, restore
from cumem.units import format_nbytes, format_rate, format_seconds

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

if importlib.util.find_spec("torch") is None:
    print("offloading.py needs PyTorch", file=sys.stderr)
    sys.exit(2)
# With this setting cuBLAS adds up in the same order in every run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch
from torch import nn
from torch.nn import functional

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Size:
    """The size of a model and its batches."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304  # GPT-2's 50,257, rounded up
    length: int = 1024
    batch: int = 8
    warm: int = 3  # first steps, which are not timed
    steps: int = 10
    rounds: int = 2


LITTLE = Size(2, 64, 4, 96, 32, 4, 1, 2, 1)


class Block(nn.Module):
    """A layer of GPT-2: attention and a perceptron, each added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm_2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, 2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(
            functional.gelu(self.up(self.norm_2(x)), approximate="tanh")
        )


class Model(nn.Module):
    """GPT-2 without dropout, whose output layer shares the weights of the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass
class Case:
    """One way to train, or to move the model.

    Parameters
    ----------
    key : str
        ``"train"``, or ``"model"`` for moving the model to the host and back.
    way : str
        A key of `Bench.ways`, or the way in which the model is moved.
    seconds : list of float
        The time of each step, or of moving the model there and back, after the warm-up.
    first_seconds : float
        The time of the very first one, which has to page-lock memory.
    tokens_per_second : float
        The tokens of a step divided by the time of the median step.
    peak_nbytes, peak_reserved_nbytes : int
        The most device memory that tensors used, and that PyTorch had reserved, during the
        training.
    pinned_nbytes : int
        The most pinned memory that cumem's buffers used.
    offloaded_nbytes : int
        How many bytes cumem copies to the host in a step, or the bytes of the model.
    losses : list of float
        The loss of each step, including those of the warm-up.
    """

    key: str
    way: str
    seconds: list[float] = field(default_factory=list)
    first_seconds: float = 0.0
    tokens_per_second: float = 0.0
    peak_nbytes: int = 0
    peak_reserved_nbytes: int = 0
    pinned_nbytes: int = 0
    offloaded_nbytes: int = 0
    losses: list[float] = field(default_factory=list)


class Bench:
    """The state that all cases share."""

    def __init__(self, quick: bool) -> None:
        self.emulated = cumem.backend() == "emulated"
        self.size = LITTLE if quick or self.emulated else Size()
        self.device = "cpu" if self.emulated else "cuda"
        self.min_nbytes = 1 if self.size is LITTLE else 1 << 20
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False

    def wait(self) -> None:
        """Wait for the GPU, if there is one."""
        if not self.emulated:
            torch.cuda.synchronize()

    def empty(self) -> None:
        """Empty all memory pools, so that the next case begins almost as a new process."""
        gc.collect()
        cumem.trim()
        if not self.emulated:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        cumem.default_pool("pinned").reset_peaks()

    def model(self) -> Model:
        """Return the model, with the same weights at each call."""
        torch.manual_seed(0)
        return Model(self.size).to(self.device)

    def ways(self) -> dict[str, Context]:
        """Return for each way the context manager that offloads during a forward pass."""

        def ours(depth: int) -> Context:
            return lambda: offload_activations(min_nbytes=self.min_nbytes, depth=depth)

        pins = not self.emulated
        return {
            "nothing": contextlib.nullcontext,
            "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(pin_memory=pins),
            "cumem": ours(4),
            "cumem, depth 2": ours(2),
            "cumem, depth 8": ours(8),
            "nothing again": contextlib.nullcontext,
        }

    def train(self, way: str, context: Context) -> Case:
        """Train some steps from the common start."""
        size, case = self.size, Case("train", way)
        self.empty()
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        generator = torch.Generator().manual_seed(1)
        shape = (size.batch, size.length + 1)
        for number in range(size.warm + size.steps):
            text = torch.randint(size.vocabulary, shape, generator=generator)
            text = text.to(self.device)
            self.wait()
            start = time.perf_counter()
            with context() as entered, torch.autocast(self.device, torch.bfloat16):
                loss = model(text[:, :-1], text[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            case.losses.append(loss.item())
            self.wait()
            seconds = time.perf_counter() - start
            if number == 0:
                case.first_seconds = seconds
            if number >= size.warm:
                case.seconds.append(seconds)
            case.offloaded_nbytes = getattr(entered, "offloaded_nbytes", 0)
        tokens = size.batch * size.length
        case.tokens_per_second = tokens / statistics.median(case.seconds)
        if not self.emulated:
            case.peak_nbytes = torch.cuda.max_memory_allocated()
            case.peak_reserved_nbytes = torch.cuda.max_memory_reserved()
        case.pinned_nbytes = cumem.stats()["pinned"].peak_live_nbytes
        return case

    def trainings(self) -> Iterator[Case]:
        """Train in all ways, twice, and compare their losses."""
        found: dict[str, list[float]] = {}
        for _ in range(self.size.rounds):
            for way, context in self.ways().items():
                case = self.train(way, context)
                found.setdefault(way, case.losses)
                yield case

        def difference(way: str) -> float:
            pairs = zip(found["nothing"], found[way], strict=True)
            return max(abs(a - b) for a, b in pairs)

        noise = difference("nothing again")
        for way in found:
            if not difference(way) <= 4 * noise:
                raise AssertionError(
                    f"{way}: losses differ by {difference(way)}, noise is {noise}"
                )

    def moves(self) -> Iterator[Case]:
        """Move the model to the host and back."""
        model = self.model()
        tensors = list(model.parameters())
        before = [tensor.detach().clone() for tensor in tensors]

        def ours() -> None:
            restore(offload(model))

        def by_tensor(pins: bool) -> Callable[[], None]:
            def move() -> None:
                for tensor in tensors:
                    host = torch.empty_like(tensor, device="cpu", pin_memory=pins)
                    tensor.data = host.copy_(tensor.data)
                for tensor in tensors:
                    tensor.data = tensor.data.to(self.device, copy=True)

            return move

        pins = not self.emulated
        ways = {"cumem": ours, "pinned, tensor by tensor": by_tensor(pins)}
        for way, move in (
            ways | {"pageable, tensor by tensor": by_tensor(False)}
        ).items():
            case = Case("model", way)
            case.offloaded_nbytes = sum(t.nbytes for t in tensors)
            self.empty()
            for number in range(1 + self.size.steps):
                self.wait()
                start = time.perf_counter()
                move()
                self.wait()
                seconds = time.perf_counter() - start
                if number == 0:
                    case.first_seconds = seconds
                else:
                    case.seconds.append(seconds)
            if not all(map(torch.equal, tensors, before)):
                raise AssertionError(f"{way}: the model came back changed")
            yield case


def line(case: Case) -> str:
    """Return a row of the table."""
    median = statistics.median(case.seconds)
    cells = [f"{case.key:<6} {case.way:<26} {format_seconds(median):>8}"]
    cells.append(f"first {format_seconds(case.first_seconds):>8}")
    if case.key == "train":
        cells.append(f"{case.tokens_per_second:>9,.0f} tokens/s")
        cells.append(f"peak {format_nbytes(case.peak_nbytes)}")
        cells.append(f"pinned {format_nbytes(case.pinned_nbytes)}")
        cells.append(f"loss {case.losses[-1]:.6f}")
    else:
        cells.append(format_rate(2 * case.offloaded_nbytes, median))
    return "  ".join(cells)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(__doc__)
    bench = Bench(run.options.quick)
    run.begin(bench.emulated)
    run.note(1, torch=torch.__version__, size=vars(bench.size))
    run.show(bench.trainings(), line)
    run.show(bench.moves(), line)
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
