# SPDX-License-Identifier: Apache-2.0
"""Measure a training loop of PyTorch with five ways to bring its batches to the GPU.

    python benchmarks/loading.py --json benchmarks/results/loading-h200.json

ResNet-50 is trained on images of a memory-mapped file, which 8 workers of a DataLoader
read. The ways are plain ``.cuda()``; ``pin_memory=True`` with ``non_blocking=True``;
`cumem.prefetch`; `cumem.prefetch` with ``fresh=False``; and `cumem.prefetch` with
`cumem.PinnedCollate`. ``fresh=False`` is for loaders that reuse the memory of a batch. It
asks the loader for the next batch only when the last one has been read.

All ways must see the same bytes and have the same losses. Cases without the model measure
the rate of the loader alone. On the emulated device the batches stay on the CPU, and the
script says that its figures are not a GPU's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import cumem
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

#: ``.cuda()`` comes first, because it leaves no page-locked memory behind for the others.
WAYS = ("cuda", "prefetch", "prefetch_waiting", "collate_pinned", "pin_memory")
CLASSES = 100
WARM = 8  # steps that are not timed


@dataclass
class Case:
    """One training loop, measured in each of the ways.

    Parameters
    ----------
    model : str
        ``"resnet50"``, or ``"none"`` for a loop that only sums the batch.
    dtype : str
        The dtype of the images that the workers make: the ``uint8`` of the file, or
        ``float32``.
    batch, width, workers, steps : int
        How many images a batch has, their height and width, how many worker processes
        there are, and how many batches are timed.
    batch_nbytes : int
        The bytes of the images of a batch.
    rates : dict
        For each way, the images per second of each round.
    sums : list of int
        The sum over each batch, taken as integers. It must be the same in all ways.
    host_nbytes, pinned_nbytes : dict
        For each way, the most host memory that the loop and its workers took, without the
        pages of the file, and the part of it that is page-locked.
    losses : list of float
        The loss of each step in the first way.
    loss_difference : float
        The largest relative difference of a loss from that of the first way. It need not
        be 0, since the GPU may add up gradients in any order.
    """

    model: str
    dtype: str
    batch: int
    width: int
    workers: int
    steps: int
    batch_nbytes: int
    rates: dict[str, list[float]] = field(default_factory=dict)
    host_nbytes: dict[str, int] = field(default_factory=dict)
    pinned_nbytes: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    loss_difference: float = 0.0
    sums: list[int] = field(default_factory=list)


class Images(Dataset):  # type: ignore[misc]
    """The images of a file, repeated as needed. Each label is computed from the index."""

    def __init__(self, path: Path, width: int, length: int, dtype: str) -> None:
        self.path = path
        self.shape = (-1, 3, width, width)
        self.length = length
        self.dtype = dtype
        self.images: Any = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        # A worker opens the file itself, so that no array has to be sent to it.
        if self.images is None:
            self.images = np.memmap(self.path, "u1", "r").reshape(self.shape)
        image = torch.from_numpy(np.array(self.images[index % len(self.images)]))
        if self.dtype == "float32":
            image = image.float().div_(255)
        return image, index * 7 % CLASSES


class Bottleneck(nn.Module):
    """A residual block of ResNet-50: three convolutions, and a connection around them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.main = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.beside: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.beside = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.main(x) + self.beside(x))


def resnet50() -> nn.Module:
    """Make ResNet-50 (https://arxiv.org/abs/1512.03385), with strides in its 3x3 layers."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        *(nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
    ]
    before = 64
    for i, count in enumerate((3, 4, 6, 3)):
        for k in range(count):
            stride = 2 if k == 0 and i > 0 else 1
            layers.append(Bottleneck(before, 64 << i, stride))
            before = 4 * (64 << i)
    return nn.Sequential(*layers, Mean(), nn.Linear(before, CLASSES))


class Mean(nn.Module):
    """The mean over an image, whose gradient is the same in every run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


class Training:
    """A model with its optimiser."""

    def __init__(self, model: str, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model: nn.Module | None = None
        if model == "resnet50":
            made = resnet50().to(device, memory_format=torch.channels_last)
            self.model = made
            self.optimizer = torch.optim.SGD(made.parameters(), 0.01, momentum=0.9)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Queue one training step, and return its loss without waiting for the GPU."""
        if self.model is None:
            return images.float().mean() + labels.sum()
        if images.dtype is torch.uint8:
            images = images.float().div_(255)
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device, torch.bfloat16, self.device == "cuda"):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def held_nbytes() -> int:
    """Return the bytes of this process and its workers, without pages of files."""
    total = 0
    for pid in ["self", *(each.pid for each in multiprocessing.active_children())]:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
            for name in ("Pss_Anon", "Pss_Shmem"):
                total += int(fields[name].split()[0]) << 10
    return total


def pinned_nbytes() -> int:
    """Return the bytes that PyTorch's and cumem's allocators have page-locked."""
    host = cumem.memory_info("host")
    found = host.reserved + host.staging
    if torch.cuda.is_available() and hasattr(torch.cuda, "host_memory_stats"):
        found += torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return int(found)


class Bench:
    """The file of images, and the device."""

    def __init__(self, quick: bool, folder: Path) -> None:
        self.emulated = cumem.backend() == "emulated"
        self.device = "cpu" if self.emulated else "cuda"
        small = quick or self.emulated
        self.batch, self.width, self.workers = (4, 32, 2) if small else (256, 224, 8)
        self.steps, self.rounds = (1, 1) if small else (40, 2)
        self.warm = 1 if small else WARM
        self.kinds = [("resnet50", "uint8")]
        if not small:
            self.kinds += [
                ("resnet50", "float32"),
                ("none", "uint8"),
                ("none", "float32"),
            ]
        self.path = folder / "images.bin"
        count = 16 if small else 2048
        random = np.random.default_rng(0)
        with self.path.open("wb") as file:
            for _ in range(count):
                file.write(random.bytes(3 * self.width**2))
        self.missing = {"pin_memory": "needs a GPU"} if self.emulated else {}
        torch.backends.cudnn.deterministic = True  # so that all ways have equal losses

    def cases(self) -> Iterator[Case]:
        """Measure the ways in turns."""
        for model, dtype in self.kinds:
            nbytes = self.batch * 3 * self.width**2 * np.dtype(dtype).itemsize
            case = Case(
                *(model, dtype, self.batch, self.width, self.workers, self.steps),
                batch_nbytes=nbytes,
            )
            for _ in range(self.rounds):
                for way in WAYS:
                    if way not in self.missing:
                        self.measure(case, way)
            yield case

    def loader(self, case: Case, way: str) -> tuple[Any, Iterable[Any]]:
        """Return a DataLoader, and the iterable from which the loop takes batches."""
        length = case.batch * (self.warm + case.steps)
        options: dict[str, Any] = {"pin_memory": way == "pin_memory"}
        if way == "collate_pinned":
            options["collate_fn"] = cumem.PinnedCollate()
        loader = DataLoader(
            Images(self.path, case.width, length, case.dtype),
            case.batch,
            shuffle=True,
            generator=torch.Generator().manual_seed(1),
            num_workers=case.workers,
            **options,
        )
        if way in ("prefetch", "collate_pinned"):
            return loader, cumem.prefetch(loader)
        if way == "prefetch_waiting":
            return loader, cumem.prefetch(loader, fresh=False)
        return loader, (
            [each.to(self.device, non_blocking=way == "pin_memory") for each in batch]
            for batch in loader
        )

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def measure(self, case: Case, way: str) -> None:
        """Run one epoch, and check that its losses equal those of all other epochs."""
        if self.device == "cuda" and hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()
        cumem.trim()
        training = Training(case.model, self.device)
        shape = (case.batch, 3, case.width, case.width)
        blank = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        training.step(blank, blank[:, 0, 0, 0].long())  # loads the kernels of a step
        self.synchronize()
        before = held_nbytes() + pinned_nbytes()
        losses, sums, most, pinned, begin = [], [], 0, 0, 0.0
        loader, batches = self.loader(case, way)
        for i, (images, labels) in enumerate(batches):
            if i == self.warm:
                self.synchronize()
                begin = time.perf_counter()
            bits = images.view(torch.int32) if case.dtype == "float32" else images
            sums.append(bits.sum(dtype=torch.int64) + labels.sum())
            losses.append(training.step(images, labels))
            # Memory is looked at before the timed steps. By then the loader is ahead, so
            # its memory has reached the most.
            if i == self.warm - 1:
                pinned = pinned_nbytes()
                most = held_nbytes() + pinned
        self.synchronize()
        seconds = time.perf_counter() - begin
        del images, labels, bits, batches, loader
        case.rates.setdefault(way, []).append(case.batch * case.steps / seconds)
        case.host_nbytes[way] = max(case.host_nbytes.get(way, 0), most - before)
        case.pinned_nbytes[way] = max(case.pinned_nbytes.get(way, 0), pinned)
        self.compare(
            case, way, torch.stack(losses).tolist(), torch.stack(sums).tolist()
        )

    def compare(
        self, case: Case, way: str, losses: list[float], sums: list[int]
    ) -> None:
        """Compare the losses and the bytes with those of the first way."""
        if not case.sums:
            case.losses, case.sums = losses, sums
        if case.sums != sums:
            raise AssertionError(f"{way}: other bytes: {case}")
        apart = np.abs(np.subtract(losses, case.losses)) / np.abs(case.losses)
        case.loss_difference = max(case.loss_difference, float(apart.max()))
        if case.loss_difference > 0.05:
            raise AssertionError(f"{way}: other losses: {losses}, {case}")


def line(case: Case) -> str:
    """Return a row of the table."""
    cells = [
        f"{case.model:<9}{case.dtype:<8}{format_nbytes(case.batch_nbytes)} a batch"
    ]
    for way, rates in case.rates.items():
        held = format_nbytes(case.host_nbytes[way])
        cells.append(f"{way} {max(rates):.0f} images/s, {held}")
    return "  ".join(cells)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(__doc__, dir={"default": None, "help": "folder for the file of images"})
    with tempfile.TemporaryDirectory(dir=run.options.dir) as folder:
        bench = Bench(run.options.quick, Path(folder))
        run.begin(bench.emulated)
        run.note(1, torch=torch.__version__, missing=bench.missing)
        run.show(bench.cases(), line)
        run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
