# SPDX-License-Identifier: Apache-2.0
"""Train a model of GPT-2's size with each of four allocators behind PyTorch.

    python benchmarks/training.py --json benchmarks/results/training-h100.json

The allocators are PyTorch's own, PyTorch's own with expandable segments, cumem's pools
under PyTorch's cache (`cumem.integrations.torch.enable`), and cumem's pools in place of
that cache (`replace_allocator`). Each is measured in several processes, and the processes
of the four alternate. A process trains 24 steps whose batch and length vary, and repeats
these steps four times. The losses of all processes must be equal bit for bit.

The GPU waits for the processor between kernels, so other load of the machine makes a step
longer. The table therefore sums the best time of each step. Without a GPU the script trains
a small model on the CPU with PyTorch's own allocator, and says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn import functional

import cumem
from cumem.integrations import torch as integration
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

WAYS = ("native", "expandable", "enable", "replace")
PROCESSES = 3  # for each allocator
AGAIN = 4
STEPS = 24
TOKENS = 16384  # at most, in one step
VOCABULARY = 50304  # GPT-2's 50,257, rounded up to a multiple that suits tensor cores


@dataclass
class Case:
    """The training with one allocator.

    Parameters
    ----------
    way : str
        The allocator: "native", "expandable", "enable" or "replace".
    parameters : int
        How many parameters the model has.
    shapes : list of (int, int)
        Batch and length of each step.
    losses : list of float
        The loss of each step in each pass, which is the same in all processes.
    first_seconds : list of list of float
        For each step, its time in the first pass of each process, when the allocator
        grows.
    again_seconds : list of list of float
        For each step, its time in each later pass of each process.
    reserved_nbytes, live_nbytes : int
        The most bytes that the allocator had reserved, and the most that tensors used,
        according to its own statistics.
    used_nbytes : int
        The most device memory in use after a step, according to the driver, minus what
        was in use before the model was made.
    """

    way: str
    parameters: int
    shapes: list[tuple[int, int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_seconds: list[list[float]] = field(default_factory=list)
    again_seconds: list[list[float]] = field(default_factory=list)
    reserved_nbytes: int = 0
    live_nbytes: int = 0
    used_nbytes: int = 0


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(
            functional.gelu(self.wide(self.norms[1](x)), approximate="tanh")
        )


class Model(nn.Module):
    """GPT-2 without dropout: 124 million parameters by default."""

    def __init__(
        self, width: int = 768, depth: int = 12, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def shapes(quick: bool) -> list[tuple[int, int]]:
    """Return the batch and length of each step, which are the same for all allocators."""
    choose = random.Random(24)
    most, tokens = (64, 256) if quick else (1024, TOKENS)
    found = []
    for _ in range(4 if quick else STEPS):
        length = choose.randrange(most // 8, most + 1)
        found.append((max(1, choose.randrange(tokens // 2, tokens) // length), length))
    return found


def memory(way: str) -> tuple[int, int]:
    """Return the most bytes reserved, and live, by the allocator's own statistics."""
    if not torch.cuda.is_available():
        return 0, 0
    if way == "replace":
        stats = cumem.default_pool("device").stats()
        return stats.peak_reserved_nbytes, stats.peak_live_nbytes
    return torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()


def used_nbytes() -> int:
    """Return how much memory of the GPU is in use, or 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def train(way: str, quick: bool) -> Case:
    """Train in this process, which must be a fresh one."""
    if way == "replace":
        integration.replace_allocator()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if way == "enable":
        integration.enable()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(24)
    torch.empty(1, device=device)  # the context's memory is not the model's
    before = used_nbytes()
    sizes = (128, 2, 512) if quick else (768, 12, VOCABULARY)
    model = Model(*sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")
    case = Case(way, sum(p.numel() for p in model.parameters()), shapes(quick))
    for times in (case.first_seconds, *[case.again_seconds] * AGAIN):
        generator = torch.Generator().manual_seed(24)
        times.append([])
        for batch, length in case.shapes:
            ids = torch.randint(sizes[2], (batch, length + 1), generator=generator)
            begin = time.perf_counter()
            ids = ids.to(device)
            with torch.autocast(device, torch.bfloat16):
                logits = model(ids[:, :-1])
            loss = functional.cross_entropy(
                logits.float().flatten(0, 1), ids[:, 1:].flatten()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            case.losses.append(loss.item())  # item() waits for the step's kernels
            times[-1].append(time.perf_counter() - begin)
            case.used_nbytes = max(case.used_nbytes, used_nbytes() - before)
            del ids, logits, loss
    case.reserved_nbytes, case.live_nbytes = memory(way)
    return case


def run_apart(way: str, quick: bool) -> Case:
    """Train in a new process, because a process cannot change its allocator later."""
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUMEM_TRAINING": way}
    if way == "expandable":
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    command = [sys.executable, __file__, *(["--quick"] if quick else [])]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | variables,
    )
    return Case(**json.loads(done.stdout.splitlines()[-1]))


def measured(ways: tuple[str, ...], quick: bool) -> Iterator[Case]:
    """Run the processes of all allocators in turn, and join those of one into a case."""
    count = 1 if quick else PROCESSES
    turns = [[run_apart(way, quick) for way in ways] for _ in range(count)]
    for case, *others in zip(*turns, strict=True):
        for other in others:
            if other.losses != case.losses:
                # With more losses than the other cases have, main() reports a difference.
                case.losses += other.losses
            case.first_seconds += other.first_seconds
            case.again_seconds += other.again_seconds
            for name in ("reserved_nbytes", "live_nbytes", "used_nbytes"):
                setattr(case, name, max(getattr(case, name), getattr(other, name)))
        yield case


def best(times: list[list[float]]) -> float:
    """Return the sum over all steps of the best time of each, in seconds."""
    return sum(map(min, zip(*times, strict=True)))


def line(case: Case) -> str:
    """Return a row of the table."""
    again = median(map(sum, case.again_seconds))
    return (
        f"{case.way:<11}{best(case.again_seconds):.3f} s for {len(case.shapes)} steps, "
        f"median {again:.3f} s; {best(case.first_seconds):.3f} s the first time; peaks: "
        f"{format_nbytes(case.reserved_nbytes)} reserved, "
        f"{format_nbytes(case.live_nbytes)} live, "
        f"{format_nbytes(case.used_nbytes)} of the device; last loss "
        f"{case.losses[-1]:.6f}"
    )


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(__doc__)
    quick = run.options.quick
    if way := os.environ.get("CUMEM_TRAINING"):  # a process that run_apart() began
        with contextlib.redirect_stdout(sys.stderr):
            case = train(way, quick)
        print(json.dumps(asdict(case)))
        return 0
    emulated = cumem.backend() == "emulated"
    run.begin(emulated)
    ways = WAYS[:1] if emulated else WAYS
    missing = {way: "needs a GPU" for way in WAYS if way not in ways}
    run.note(2, torch=torch.__version__, missing=missing)
    run.show(measured(ways, quick), line)
    run.end()
    apart = {tuple(case.losses) for case in run.cases}
    if len(apart) != 1:
        print("THE LOSSES DIFFER", file=sys.stderr)
    return len(apart) - 1


if __name__ == "__main__":
    sys.exit(main())
