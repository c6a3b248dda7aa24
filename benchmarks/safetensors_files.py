# SPDX-License-Identifier: Apache-2.0
"""Measure loading and saving of safetensors files against the reference and the link.

    python benchmarks/safetensors_files.py \
        --json benchmarks/results/safetensors-h200.json

There are two files, both in the page cache: one with the tensors of a language model, and
one with many small tensors. They are loaded into tensors on the GPU by cumem, by
safetensors.torch, and by safetensors.numpy with a copy afterwards. A model in two shards is
also loaded by InstantTensor, with each of the ways in which that reads the page cache. All
tensors are compared bit for bit.

`first_load.py` also loads the model's files in fresh processes, because only the first load
of a process has to make the memory that later loads use again. The link is measured in the
same run by the CUDA runtime's copy from pinned memory. The script also runs on the emulated
device, and then says that the figures are not a GPU's.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cumem
from cumem.files.safetensors.format import TYPES
from cumem.tools.measuring import raw_copies
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Run

GIB = 1 << 30
FIRST_LOAD = Path(__file__).parent / "first_load.py"
LIBRARIES = ("torch", "safetensors.torch", "safetensors.numpy", "instanttensor")
#: InstantTensor's ways to read that use the page cache.
BUFFERED = ("MMAP", "URING_BUFFERED", "AIO_BUFFERED")
Arrays = dict[str, np.ndarray[Any, Any]]
Call = Callable[[], Any]


@dataclass
class Case:
    """One file, loaded or saved by several libraries.

    Parameters
    ----------
    key : str
        What the file holds.
    direction : str
        ``"up"`` for loading and ``"down"`` for saving.
    nbytes : int
        The bytes of all tensors.
    tensors : int
        The number of tensors.
    first, seconds, spread : dict
        For each library, the seconds of the first call, the best time of the later calls,
        and their median time divided by the best.
    fresh : dict
        For each library, a list with an entry for each fresh process: the seconds of its
        ``"import"``, its ``"context"`` and its first ``"load"`` of these files.
    errors : dict
        The reason for each library that was not measured.
    """

    key: str
    direction: str
    nbytes: int
    tensors: int
    first: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    fresh: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


# -- files -----------------------------------------------------------------------------


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Make random bits, so that a value in the wrong place is noticed."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    words = rng.integers(0, 1 << 64, -(-nbytes // 8), "u8")
    return words.view("u1")[:nbytes].view(dtype).reshape(shape)


def model(nbytes: int) -> Arrays:
    """Make the tensors of a language model with as many layers as fit in `nbytes`."""
    rng = np.random.default_rng(1)
    width = 4096 if nbytes >= GIB else 64
    inner, words = width * 43 // 16, width * 8
    layer = {
        **{f"self_attn.{n}_proj.weight": (width, width) for n in "qkvo"},
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    arrays = {"model.embed_tokens.weight": random_array(rng, (words, width), "f2")}
    held, number = arrays["model.embed_tokens.weight"].nbytes, 0
    kinds = {name: "f4" if "norm" in name else "f2" for name in layer}
    size = sum(int(kinds[n][1]) * math.prod(shape) for n, shape in layer.items())
    while held + size <= nbytes or not number:
        for name, shape in layer.items():
            full = f"model.layers.{number}.{name}"
            arrays[full] = random_array(rng, shape, kinds[name])
        held, number = held + size, number + 1
    rest = (nbytes - held) // (2 * width)
    if rest > 0:
        arrays["lm_head.weight"] = random_array(rng, (rest, width), "f2")
    return arrays


def small(count: int) -> Arrays:
    """Make many tensors of 1 to 8 KiB."""
    rng = np.random.default_rng(2)
    return {
        f"model.layers.{i % 60}.experts.{i // 60}.scale": random_array(
            rng, (256 + i % 8 * 256,), "f4"
        )
        for i in range(count)
    }


def every_type(torch: Any) -> bytes:
    """Return a file with a tensor of each type of PyTorch, as the reference writes it."""
    rng = np.random.default_rng(3)
    tensors = {}
    for name, element in TYPES.items():
        own = getattr(torch, element.torch or "", None)
        if own is not None:
            top = 2 if name == "BOOL" else 256
            bits = rng.integers(0, top, (33, 64)).astype("u1")
            tensors[name] = torch.from_numpy(bits).view(own)
            tensors[f"{name}, empty"] = torch.from_numpy(bits[:0]).view(own)
            if name != "F4":
                tensors[f"{name}, scalar"] = tensors[name][0, 0].clone()
    data: bytes = importlib.import_module("safetensors.torch").save(tensors)
    return data


# -- the cases -------------------------------------------------------------------------


class Bench:
    """The state that all cases share."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.folder = folder
        self.emulated = cumem.backend() == "emulated"
        self.little = self.emulated or options.quick
        self.rounds = 3 if self.little else options.rounds
        self.missing: dict[str, str] = {}
        self.peers: dict[str, Any] = {}
        for name in LIBRARIES:
            self._find(name)

    def _find(self, name: str) -> None:
        """Import a library, or note why it cannot be measured."""
        package = name.partition(".")[0]
        if self.emulated and name != "safetensors.numpy":
            self.missing[name] = "needs a GPU"
        elif importlib.util.find_spec(package) is None:
            self.missing[name] = "not installed"
        elif name == "safetensors.torch" and "torch" in self.missing:
            self.missing[name] = f"PyTorch {self.missing['torch']}"
        else:
            self.peers[name] = importlib.import_module(name)

    def wait(self) -> None:
        """Wait until the GPU has nothing to do."""
        cumem.current_device().synchronize()

    def link(self) -> dict[str, float]:
        """Return the rate of the CUDA runtime's pinned copies, in bytes a second."""
        nbytes = (4 << 20) if self.little else (256 << 20)
        pinned = cumem.zeros(nbytes, "u1", "pinned")
        device = cumem.zeros(nbytes, "u1", "device")
        stream = cumem.Stream()
        self.wait()
        up = min(raw_copies(device, pinned, stream, 0.5))
        down = min(raw_copies(pinned, device, stream, 0.5))
        return {"up": nbytes / up, "down": nbytes / down}

    def time(self, case: Case, library: str, call: Call) -> Any:
        """Measure one library, and return the result of its last call."""
        times = []
        result = None
        try:
            for _ in range(1 + self.rounds):
                result = None  # frees the memory, so that the next call can reuse it
                self.wait()
                start = time.perf_counter()
                result = call()
                self.wait()
                times.append(time.perf_counter() - start)
        except (RuntimeError, OSError, MemoryError, ValueError, KeyError) as error:
            text = str(error).splitlines() or [repr(error)]
            case.errors[library] = f"{type(error).__name__}: {text[0]}"
            return None
        case.first[library] = times[0]
        case.seconds[library] = min(times[1:])
        case.spread[library] = statistics.median(times[1:]) / min(times[1:])
        return result

    def time_fresh(self, case: Case, library: str, files: list[str]) -> None:
        """Measure the first load of a library in processes of their own."""
        command = [sys.executable, str(FIRST_LOAD), library, *files]
        case.fresh[library] = [
            json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            for _ in range(1 if self.little else 3)
        ]

    def cases(self, key: str, arrays: Arrays) -> list[Case]:
        """Load and save one file."""
        path = self.folder / f"{key}.safetensors"
        cumem.save_safetensors(path, arrays, {"format": "pt"})
        nbytes = sum(array.nbytes for array in arrays.values())
        load = Case(key, "up", nbytes, len(arrays))
        save = Case(key, "down", nbytes, len(arrays))
        ours = self.time(load, "cumem", lambda: cumem.load_safetensors(path))
        check(ours, arrays)
        self.save(save, "cumem", ours, path)
        del ours
        self.time_fresh(load, "cumem", [str(path)])
        self.numpy(load, path, arrays)
        if "torch" in self.peers:
            self.torch(load, save, path, arrays)
        return [load, save]

    def save(self, case: Case, library: str, tensors: Any, path: Path) -> None:
        """Measure saving the tensors, and compare the new file with the old one."""
        copy = path.with_suffix(".copy")
        if library == "cumem":
            self.time(
                case,
                library,
                lambda: cumem.save_safetensors(copy, tensors, {"format": "pt"}),
            )
        else:
            write = self.peers[library].save_file
            self.time(case, library, lambda: write(tensors, copy, {"format": "pt"}))
        if library in case.seconds and not same_files(path, copy):
            raise AssertionError(f"{library} saved other bytes")
        copy.unlink(missing_ok=True)

    def numpy(self, case: Case, path: Path, arrays: Arrays) -> None:
        """Measure loading by safetensors.numpy with a copy of each array by cumem."""
        peer = self.peers.get("safetensors.numpy")
        if peer is None:
            return

        def call() -> Any:
            loaded = peer.load_file(path)
            return {name: cumem.array(array) for name, array in loaded.items()}

        result = self.time(case, "safetensors.numpy", call)
        if result is not None:
            check(result, arrays)

    def torch(self, load: Case, save: Case, path: Path, arrays: Arrays) -> None:
        """Measure PyTorch tensors that cumem and safetensors.torch load and save."""
        torch = self.peers["torch"]
        ours = self.time(
            load,
            "cumem, torch",
            lambda: cumem.load_safetensors(path, framework="torch"),
        )
        peer = self.peers.get("safetensors.torch")
        if peer is not None:
            theirs = self.time(
                load, "safetensors.torch", lambda: peer.load_file(path, device="cuda:0")
            )
            if theirs is not None:
                compare(torch, ours, theirs)
                ours = None
                self.save(save, "safetensors.torch", theirs, path)
        torch.cuda.empty_cache()

    def shards(self, arrays: Arrays) -> list[Case]:
        """Measure loading a model in two files into PyTorch tensors."""
        folder = self.folder / "shards"
        folder.mkdir()
        both = {
            f"{half}.{name}": array for half in "ab" for name, array in arrays.items()
        }
        nbytes = sum(array.nbytes for array in both.values())
        case = Case("shards", "up", nbytes, len(both))
        index = cumem.save_safetensors(
            folder / "model.safetensors", both, max_shard_nbytes=nbytes // 2 + (1 << 20)
        )
        files = sorted(map(str, folder.glob("*.safetensors")))
        ours = self.time(
            case,
            "cumem, torch",
            lambda: cumem.load_safetensors(index, framework="torch"),
        )
        peer = self.peers["safetensors.torch"]

        def load_all() -> Any:
            return {
                name: tensor
                for file in files
                for name, tensor in peer.load_file(file, device="cuda:0").items()
            }

        theirs = self.time(case, "safetensors.torch", load_all)
        compare(self.peers["torch"], ours, theirs)
        del theirs
        for library in ("cumem", "cumem, torch", "safetensors.torch"):
            self.time_fresh(case, library, files)
        for way in BUFFERED if "instanttensor" in self.peers else ():
            theirs = self.time(
                case, f"instanttensor, {way}", lambda way=way: self.instant(files, way)
            )
            if theirs is not None:
                compare(self.peers["torch"], ours, theirs)
            del theirs
        return [case]

    def instant(self, files: list[str], way: str) -> Any:
        """Load all files by InstantTensor."""
        peer = self.peers["instanttensor"]
        with peer.safe_open(
            files, framework="pt", device=0, backend=peer.Backend[way]
        ) as file:
            return dict(file.tensors())

    def types(self) -> int | None:
        """Check a tensor of every type against the reference, and return how many."""
        peer = self.peers.get("safetensors.torch")
        if peer is None:
            return None
        torch = self.peers["torch"]
        path = self.folder / "types.safetensors"
        path.write_bytes(every_type(torch))
        theirs = peer.load_file(path, device="cuda:0")
        ours = cumem.load_safetensors(path, framework="torch")
        compare(torch, ours, theirs)
        again = cumem.save_safetensors(self.folder / "again", ours)
        if again.read_bytes() != path.read_bytes():
            raise AssertionError("the saved tensors of every type have other bytes")
        return len(theirs)


def check(loaded: Any, arrays: Arrays) -> None:
    """Check that device buffers have the arrays' bytes, which come to pinned memory."""
    if loaded.keys() != arrays.keys():
        raise AssertionError("other names")
    for name, array in arrays.items():
        back = cumem.empty(array.shape, array.dtype, "pinned")
        cumem.copy(back, loaded[name])
        if not np.array_equal(
            back.numpy().reshape(-1).view("u1"), array.reshape(-1).view("u1")
        ):
            raise AssertionError(f"wrong bytes in {name}")


def compare(torch: Any, ours: Any, theirs: Any) -> None:
    """Check that two sets of tensors are equal bit for bit, in place, type and shape."""
    if ours is None or theirs is None or ours.keys() != theirs.keys():
        raise AssertionError("other names, or nothing to compare")
    for name, t in theirs.items():
        mine = ours[name]
        if (mine.dtype, mine.shape, mine.device) != (t.dtype, t.shape, t.device):
            raise AssertionError(f"{name}: {mine.dtype} {mine.shape} {mine.device}")
        if t.numel() and not torch.equal(octets(torch, mine), octets(torch, t)):
            raise AssertionError(f"wrong bytes in {name}")


def octets(torch: Any, tensor: Any) -> Any:
    """Return a tensor's bytes, to compare those instead of NaNs and unusual dtypes."""
    return tensor.reshape(-1).view(torch.uint8)


def same_files(one: Path, two: Path) -> bool:
    """Return whether two files have the same bytes."""
    if one.stat().st_size != two.stat().st_size:
        return False
    a, b = (np.memmap(path, "u1", "r") for path in (one, two))
    step = 256 << 20
    return all(
        np.array_equal(a[i : i + step], b[i : i + step]) for i in range(0, len(a), step)
    )


def headers(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """Return the best times of reading the names, types and shapes of many tensors.

    cumem reads them all at once, and ``safe_open`` reads them one by one. The result also
    has the time in which ``safe_open`` reads the names alone.
    """
    path = cumem.save_safetensors(
        folder / "header.safetensors",
        {
            f"model.layers.{i // 100}.mlp.experts.{i % 100}.down_proj.weight": np.zeros(
                (4, 2), "f2"
            )
            for i in range(count)
        },
    )
    calls: dict[str, Call] = {"cumem": lambda: cumem.read_safetensors_header(path)}
    if importlib.util.find_spec("safetensors") is not None:
        safe_open = importlib.import_module("safetensors").safe_open

        def names() -> list[str]:
            with safe_open(path, "np") as file:
                return list(file.keys())

        def shapes() -> list[Any]:
            with safe_open(path, "np") as file:
                slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
                return [(one.get_dtype(), one.get_shape()) for one in slices]

        calls |= {"safe_open, names": names, "safe_open, names and shapes": shapes}
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for key, call in calls.items():
            begun = time.perf_counter()
            call()
            best[key] = min(best[key], time.perf_counter() - begun)
    path.unlink()
    for key, seconds in best.items():
        print(f"header of {count} tensors: {seconds * 1000:.0f} ms, {key}")
    return {"tensors": count, "seconds": best}


def line(case: Case, links: dict[str, float]) -> str:
    """Return rows of the table."""
    what = "loaded" if case.direction == "up" else "saved"
    rows = [
        f"{case.key}, {case.tensors} tensors, {format_nbytes(case.nbytes)}, {what}:"
    ]
    for library, seconds in case.seconds.items():
        rate = case.nbytes / seconds
        rows.append(
            f"  {library:<20}{seconds * 1e3:>10.1f} ms {rate / 1e9:>7.1f} GB/s "
            f"{100 * rate / links[case.direction]:>4.0f} % of the link, first call "
            f"{case.first[library] * 1e3:.0f} ms, "
            f"{seconds / case.tensors * 1e6:.1f} us a tensor"
        )
    for library, runs in case.fresh.items():
        best = min(runs, key=lambda run: run["load"])
        rate = case.nbytes / best["load"]
        rows.append(
            f"  {library:<20}{best['load'] * 1e3:>10.1f} ms {rate / 1e9:>7.1f} GB/s, the "
            f"first load of a process, after {best['import'] * 1e3:.0f} ms of imports "
            f"and {best['context'] * 1e3:.0f} for the context"
        )
    rows += [f"  {library:<20}{error}" for library, error in case.errors.items()]
    return "\n".join(rows)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(
        __doc__,
        dir={"metavar": "FOLDER", "help": "where the files are made (12 GiB)"},
        gib={"type": float, "default": 4.0, "help": "size of the model's file"},
        rounds={"type": int, "default": 5, "help": "timed calls of each library"},
    )
    options = run.options
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        bench = Bench(options, Path(folder))
        run.begin(bench.emulated)
        links = bench.link()
        types = bench.types()
        if types is not None:
            print(f"{types} tensors of every type equal safetensors.torch's")
        nbytes = (4 << 20) if bench.little else int(options.gib * GIB)
        files = {
            "model": lambda: model(nbytes),
            "small": lambda: small(200 if bench.little else 20000),
        }
        run.note(
            1,
            libraries={
                name: importlib.metadata.version(name.partition(".")[0])
                for name in bench.peers
            },
            threads=len(os.sched_getaffinity(0)),
            link_bytes_per_second=links,
            missing=bench.missing,
            types_compared=types,
            headers=headers(
                Path(folder), 1000 if bench.little else 100_000, options.rounds
            ),
        )
        for key, make in files.items():
            run.show(bench.cases(key, make()), lambda case: line(case, links))
        if "safetensors.torch" in bench.peers:
            run.show(bench.shards(model(nbytes)), lambda case: line(case, links))
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
