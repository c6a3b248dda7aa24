# SPDX-License-Identifier: Apache-2.0
"""Measure how much longer a training step takes if a checkpoint is saved every ten steps.

    python benchmarks/saving_behind.py --json benchmarks/results/saving-behind-h200.json

The model of `offloading.py`, of GPT-2's size, is trained with AdamW. Each checkpoint has
the parameters and the optimizer's moments. The ways to save it are `torch.save`,
`save_safetensors`, `save_safetensors_async` without and with ``before=``, and
`torch.distributed.checkpoint.async_save` with PyTorch's stagers and with `PinnedStager`.
The time of a step is that of the whole loop, without waiting for the last file, divided by
the steps. After each way whose files are written behind the loop, one more checkpoint is
saved, and followed by a step at once. What is read back must be what the tensors were at
the call.

The files of `save_safetensors_async` are on the disk in the end (``fsync``). The other ways
may leave theirs in the page cache. The first checkpoint of each way is saved before the
clock starts, since it page-locks memory. The script also runs on the emulated device, and
then says that the figures are not a GPU's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cumem
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

if importlib.util.find_spec("torch") is None:
    print("saving_behind.py needs PyTorch", file=sys.stderr)
    sys.exit(2)
import torch
import torch.distributed.checkpoint as dcp
from offloading import LITTLE, Model, Size
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from cumem.integrations.torch import PinnedStager

FULL = Size(batch=4, warm=3, steps=20)
EVERY = 10


def nothing() -> None:
    """Stand for a wait that is not needed."""


@dataclass(frozen=True)
class Saving:
    """A checkpoint under way."""

    finish: Callable[[], object] = nothing
    #: What the program has to wait for before it changes a tensor.
    before_step: Callable[[], object] = nothing


Save = Callable[[dict[str, Any], Path], Saving]


@dataclass
class Case:
    """One way to save.

    Parameters
    ----------
    way : str
        A key of `Bench.ways`.
    steps : int
        The steps of the loop.
    seconds : float
        The time of the loop, at whose end the device has done all steps.
    added_ms : float
        By how many milliseconds a step was longer than one of the loop without checkpoints.
    call_seconds : list of float
        The time of each call that saves.
    finish_seconds : float
        The time after the loop until all files were written.
    nbytes : int
        The bytes of the tensors of a checkpoint.
    pinned_nbytes : int
        The most page-locked memory that cumem's buffers used.
    resident_nbytes : int
        By how much the resident memory of the process was higher at most than before.
    is_verified : bool
        Whether one more checkpoint was read back and found right.
    """

    way: str
    steps: int
    seconds: float = 0.0
    added_ms: float = 0.0
    call_seconds: list[float] = field(default_factory=list)
    finish_seconds: float = 0.0
    nbytes: int = 0
    pinned_nbytes: int = 0
    resident_nbytes: int = 0
    is_verified: bool = False


def resident(name: str) -> int:
    """Return a figure of the process's resident memory, such as VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    with contextlib.suppress(OSError):  # some containers refuse it
        Path("/proc/self/clear_refs").write_text("5")


class Bench:
    """A model that is trained, and the ways to save it."""

    def __init__(self, quick: bool, folder: Path) -> None:
        self.emulated = cumem.backend() == "emulated"
        self.size = LITTLE if quick or self.emulated else FULL
        self.device = "cpu" if self.emulated else "cuda"
        self.folder = folder
        torch.manual_seed(0)
        self.model = Model(self.size).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        shape = (self.size.batch, self.size.length + 1)
        self.text = torch.randint(self.size.vocabulary, shape).to(self.device)
        for _ in range(self.size.warm):
            self.step(Saving())
        self.nbytes = sum(tensor.nbytes for tensor in self.state().values())
        self.step_seconds = 0.0

    def wait(self) -> None:
        if not self.emulated:
            torch.cuda.synchronize()

    def state(self) -> dict[str, Any]:
        """Return the tensors of a checkpoint, each once."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = value
        return found

    def step(self, saving: Saving) -> None:
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(self.text[:, :-1], self.text[:, 1:])
        loss.backward()
        saving.before_step()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def ways(self) -> dict[str, Save | None]:
        """Return for each way the function that saves."""

        def with_torch(state: dict[str, Any], path: Path) -> Saving:
            torch.save(state, path)
            return Saving()

        def with_cumem(state: dict[str, Any], path: Path) -> Saving:
            cumem.save_safetensors(path, state)
            return Saving()

        def behind(**options: Any) -> Save:
            def save(state: dict[str, Any], path: Path) -> Saving:
                saving = cumem.save_safetensors_async(path, state, **options)
                return Saving(saving.wait)

            return save

        def distributed(stager: Any, waits: bool) -> Save:
            def save(state: dict[str, Any], path: Path) -> Saving:
                found: Any = dcp.async_save(
                    state, checkpoint_id=path, async_stager=stager, no_dist=True
                )
                if not hasattr(found, "upload_completion"):
                    return Saving(found.result)
                staged = found.staging_completion.result if waits else nothing
                return Saving(found.upload_completion.result, staged)

            return save

        ways: dict[str, Save | None] = {
            "nothing": None,
            "save_safetensors_async": behind(),
            "save_safetensors_async, before=": behind(before=self.optimizer),
            "save_safetensors_async, before=, half the room": behind(
                before=self.optimizer, host_limit=self.nbytes // 2
            ),
            "dcp.async_save, PinnedStager(before=)": distributed(
                PinnedStager(before=self.optimizer), waits=False
            ),
            "dcp.async_save": distributed(None, waits=True),
            "save_safetensors": with_cumem,
            "torch.save": with_torch,
        }
        if not self.emulated:
            pinned = StagingOptions(True, False, True, True)
            ways["dcp.async_save, DefaultStager"] = distributed(
                DefaultStager(pinned), waits=True
            )
        return ways | {"nothing again": None}

    def run(self, way: str, save: Save | None) -> Case:
        """Train with one way to save."""
        gc.collect()
        cumem.trim()
        case = Case(way, self.size.steps, nbytes=self.nbytes)
        every = min(EVERY, self.size.steps)
        if save is not None:
            save(self.state(), self.folder / "warm").finish()
        cumem.default_pool("pinned").reset_peaks()
        before = resident("VmRSS")
        reset_peak()
        savings = []
        self.wait()
        start = time.perf_counter()
        last = Saving()
        for number in range(self.size.steps):
            self.step(last)
            last = Saving()
            if save is not None and number % every == every - 1:
                begin = time.perf_counter()
                last = save(self.state(), self.folder / f"{number}")
                case.call_seconds.append(time.perf_counter() - begin)
                savings.append(last)
        last.before_step()
        self.wait()
        case.seconds = time.perf_counter() - start
        start = time.perf_counter()
        for saving in savings:
            saving.finish()
        case.finish_seconds = time.perf_counter() - start
        case.resident_nbytes = max(resident("VmHWM") - before, 0)
        case.pinned_nbytes = cumem.stats()["pinned"].peak_live_nbytes
        if way == "nothing":
            self.step_seconds = case.seconds / case.steps
        case.added_ms = 1e3 * (case.seconds / case.steps - self.step_seconds)
        if save is not None and "async" in way:
            self.verify(way, save)
            case.is_verified = True
        return case

    def verify(self, way: str, save: Save) -> None:
        """Save once more, make a step at once, and compare what was saved."""
        path = self.folder / "verified"
        expected = {name: each.clone() for name, each in self.state().items()}
        saving = save(self.state(), path)
        self.step(saving)
        saving.finish()
        if path.is_dir():
            found = {name: torch.zeros_like(each) for name, each in expected.items()}
            dcp.load(found, checkpoint_id=path, no_dist=True)
        else:
            loaded = cumem.load_safetensors(path, kind="host", framework="torch")
            found = {
                name: each.to(expected[name].device) for name, each in loaded.items()
            }
        for name, each in expected.items():
            if not torch.equal(found[name], each):
                raise AssertionError(f"{way}: the checkpoint has another {name}")

    def cases(self) -> Iterator[Case]:
        for way, save in self.ways().items():
            yield self.run(way, save)
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def line(case: Case) -> str:
    """Return a row of the table."""
    cells = [f"{case.way:<48} {1e3 * case.seconds / case.steps:8.2f} ms a step"]
    cells.append(f"added {case.added_ms:8.2f} ms")
    if case.call_seconds:
        cells.append(f"call {1e3 * max(case.call_seconds):8.1f} ms")
        cells.append(f"then {case.finish_seconds:6.2f} s")
        cells.append(f"pinned {format_nbytes(case.pinned_nbytes)}")
        cells.append(f"resident {format_nbytes(case.resident_nbytes)}")
    return "  ".join(cells)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(
        __doc__, folder={"default": None, "help": "where the checkpoints are written"}
    )
    # PyTorch says at each checkpoint that there is no process group.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory(dir=run.options.folder) as folder:
        bench = Bench(run.options.quick, Path(folder))
        run.begin(bench.emulated)
        run.note(1, torch=torch.__version__, size=vars(bench.size), every=EVERY)
        run.show(bench.cases(), line)
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
