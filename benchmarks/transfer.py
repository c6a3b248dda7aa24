# SPDX-License-Identifier: Apache-2.0
"""Measure copies between ordinary memory and a GPU against the link and other libraries.

    python benchmarks/transfer.py --json benchmarks/results/transfer-h200.json
    python benchmarks/transfer.py --draw benchmarks/results/transfer-h200.json --plot FILE
    python benchmarks/transfer.py --render benchmarks/results/transfer-h200.json

The script times blocking copies of NumPy arrays and of PyTorch's CPU tensors, in many
sizes, to the device and back. It also times copies into arrays that are newly allocated for
each call, and copies of strided arrays to the device. The bytes of every library are
compared after its last call.

The same run measures the link, by a copy of pinned memory, and the other libraries that are
installed. `driver` is cuMemcpy, which returns from a short copy to the device before the
bytes are there; `driver-wait` is cuMemcpy and a wait for the device. The script also runs
on the emulated device, and then says that the figures are not a GPU's.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cumem
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Call, Run, times_of

MIB, GIB = 1 << 20, 1 << 30
SIZES = [256 << (2 * i) for i in range(11)] + [GIB, 4 * GIB]
BRIEF_SIZES = [1 << 20, 64 << 20, GIB]
TENSOR_COUNT = 600
MOST_SECONDS = 0.25  # how long one library's call is repeated
TENSORS = "cumem, tensors"  # cumem, which copies CPU tensors of PyTorch
PEERS = (TENSORS, "driver", "driver-wait", "torch", "cupy", "numba", "rmm")
LONGEST = ("cumem", TENSORS, "driver", "torch")  # who is measured beyond 1 GiB
SHOWN = ("cumem", TENSORS, "driver", "torch", "cupy", "numba", "rmm")  # in the plot


@dataclass
class Case:
    """One copy, by cumem and by others.

    Parameters
    ----------
    key : str
        What is copied.
    direction : str
        ``"up"`` (host to device) or ``"down"``.
    nbytes : int
        How many bytes are copied.
    seconds : dict
        The best time of each library.
    spread : dict
        The median time divided by the best one, for each library.
    errors : dict
        The reason for each library that was not measured.
    """

    key: str
    direction: str
    nbytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class Driver:
    """The driver's functions that cudaMemcpy calls, by ctypes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises OSError if it fails."""
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} failed with {code}")

    def copy(self, dst: int, src: int, nbytes: int, *, wait: bool = False) -> Call:
        """Return a call that copies between two addresses and, with `wait`, waits."""
        function = self._library.cuMemcpy
        synchronize = self._library.cuCtxSynchronize
        arguments = ctypes.c_uint64(dst), ctypes.c_uint64(src), ctypes.c_size_t(nbytes)

        def call() -> None:
            if function(*arguments) != 0 or (wait and synchronize() != 0):
                raise OSError("cuMemcpy failed")

        return call

    def copy_rows(self, dst: int, src: int, shape: tuple[int, int], pitch: int) -> Call:
        """Return a call that copies rows, `pitch` bytes apart, to packed device memory."""
        rows, width = shape
        host, device = 1, 2
        plan = Rows(
            src_type=host,
            src_host=src,
            src_pitch=pitch,
            dst_type=device,
            dst_device=dst,
            dst_pitch=width,
            width=width,
            height=rows,
        )
        return lambda: self._call("cuMemcpy2D_v2", ctypes.byref(plan))


class Rows(ctypes.Structure):
    """The driver's struct CUDA_MEMCPY2D."""

    _fields_ = (
        ("src_x", ctypes.c_size_t), ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_int), ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64), ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t), ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_int), ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64), ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class Bench:
    """The memory that all cases share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.emulated = cumem.backend() == "emulated"
        self.seconds = 0.02 if options.quick else MOST_SECONDS
        limit = 4 << 20 if self.emulated or options.quick else 4 * GIB
        sizes = BRIEF_SIZES if options.brief else SIZES
        self.sizes = [size for size in sizes if size <= limit]
        self.room = max(*self.sizes, 8 << 20)
        rng = np.random.default_rng(1)
        self.host = np.frombuffer(rng.bytes(min(self.room, GIB)), "u1")
        self.host = np.tile(self.host, -(-self.room // self.host.size))
        self.back = np.zeros(self.room, "u1")
        self.device = cumem.empty_device(self.room, "u1")
        self.peers: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        for name in PEERS:
            self._find(name)

    def _find(self, name: str) -> None:
        """Import a library, or note why it cannot be measured."""
        if self.emulated:
            self.missing[name] = "needs a GPU"
        elif name in ("driver", "driver-wait"):
            self.peers[name] = Driver()
        else:
            module = {"numba": "numba.cuda", TENSORS: "torch"}.get(name, name)
            if importlib.util.find_spec(module.split(".")[0]) is None:
                self.missing[name] = "not installed"
            else:
                self.peers[name] = importlib.import_module(module)

    # -- one case --------------------------------------------------------------------------

    def run(
        self,
        case: Case,
        calls: dict[str, Callable[[], Call]],
        clear: Callable[[], object],
        verify: Callable[[], object],
    ) -> Case:
        """Time each library's call, between one call of `clear` and one of `verify`."""
        for name, make in calls.items():
            too_long = case.nbytes > GIB and name not in LONGEST
            if name in self.missing or too_long:
                continue
            clear()
            try:
                times = times_of(make(), self.seconds)
                verify()
            except (
                RuntimeError,
                OSError,
                MemoryError,
                ValueError,
                AttributeError,
                TypeError,
            ) as error:
                case.errors[name] = str(error).splitlines()[0]
                continue
            case.seconds[name] = min(times)
            case.spread[name] = statistics.median(times) / min(times)
        return case

    def links(self) -> dict[str, float]:
        """Return the rate of copies of pinned memory each way, in bytes a second."""
        nbytes = min(self.room, 256 << 20)
        pinned = cumem.zeros(nbytes, "u1", "pinned")
        device = self.device[:nbytes]
        up = min(times_of(lambda: cumem.copy(device, pinned), self.seconds))
        down = min(times_of(lambda: cumem.copy(pinned, device), self.seconds))
        return {"up": nbytes / up, "down": nbytes / down}

    def check(self, wanted: np.ndarray[Any, Any], device: Any) -> None:
        """Copy the device's bytes to pinned memory, and check that they are as wanted."""
        got = cumem.empty(wanted.shape, wanted.dtype, "pinned")
        cumem.copy(got, device)
        if not np.array_equal(got.numpy(), wanted):
            raise AssertionError(f"wrong bytes: {wanted.shape} {wanted.dtype}")

    def same(self, wanted: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> None:
        """Check that an array on the host has the wanted bytes."""
        if not np.array_equal(wanted, got):
            raise AssertionError(f"wrong bytes: {wanted.nbytes} down")

    # -- the cases -------------------------------------------------------------------------

    def sized(self) -> Iterator[Case]:
        """Measure copies of contiguous ordinary memory in both directions."""
        for nbytes in self.sizes:
            host, back = self.host[:nbytes], self.back[:nbytes]
            device = self.device[:nbytes]
            yield self.run(
                Case("contiguous", "up", nbytes),
                self.up_calls(device, host),
                lambda device=device: device.fill(0),
                lambda host=host, device=device: self.check(host, device),
            )
            cumem.copy(device, host)
            yield self.run(
                Case("contiguous", "down", nbytes),
                self.down_calls(back, device),
                lambda back=back: back.fill(0),
                lambda host=host, back=back: self.same(host, back),
            )

    def fresh(self) -> Iterator[Case]:
        """Measure copies from the device into an array that each call allocates."""
        for nbytes in self.sizes:
            if nbytes < 1 << 20:
                continue
            host, device = self.host[:nbytes], self.device[:nbytes]
            cumem.copy(device, host)
            self.last: Any = None
            yield self.run(
                Case("to a new array", "down", nbytes),
                self.fresh_calls(device),
                lambda: setattr(self, "last", None),
                lambda host=host: self.same(host, np.asarray(self.last)),
            )
            self.last = None

    def fresh_calls(self, device: Any) -> dict[str, Callable[[], Call]]:
        """Return each library's call, which keeps only the array that it made last."""

        def keep(make: Callable[[], object]) -> Call:
            def call() -> None:
                self.last = None
                self.last = make()

            return call

        def cumem_call() -> object:
            made = np.empty(device.shape, device.dtype)
            cumem.copy(made, device)
            return made

        def torch() -> Call:
            source = self.peers["torch"].as_tensor(device, device="cuda")
            return keep(lambda: source.cpu().numpy())

        def cupy() -> Call:
            source = self.peers["cupy"].asarray(device)
            return keep(lambda: self.peers["cupy"].asnumpy(source))

        def numba() -> Call:
            source = self.peers["numba"].as_cuda_array(device)
            return keep(source.copy_to_host)

        def rmm() -> Call:
            source = self.peers["rmm"].DeviceBuffer(size=device.nbytes)
            cumem.copy(cumem.asbuffer(source), device)
            return keep(lambda: np.frombuffer(source.tobytes(), "u1"))

        return {
            "cumem": lambda: keep(cumem_call),
            "torch": torch,
            "cupy": cupy,
            "numba": numba,
            "rmm": rmm,
        }

    def shaped(self) -> Iterator[Case]:
        """Measure copies to the device of ordinary memory that is not contiguous."""
        nbytes = min(self.room, GIB)
        words = self.host[:nbytes].view("u4")
        pixels = self.host[: nbytes // 4 * 3].reshape(-1, 3)
        side = int(words.size**0.5)
        sources = {
            "every second of 4 bytes": words[::2],
            "one byte of 3": pixels[:, 1],
            "reversed": words[::-1],
            "32 KiB of every 64": self.host[:nbytes].reshape(-1, 65536)[:, :32768],
            "transposed": words[: side * side].reshape(side, side).T,
        }
        images = self.host[: nbytes // (3 * MIB) * 3 * MIB].reshape(-1, 1024, 1024, 3)
        sources["pixels to planes"] = images[:256].transpose(0, 3, 1, 2)
        for key, source in sources.items():
            device = self.device[: source.nbytes].view(source.dtype)
            device = device.reshape(source.shape)
            calls = self.up_calls(device, source)
            for name in ("driver", "driver-wait", "numba", "rmm"):
                calls.pop(name)
            if key == "32 KiB of every 64":
                calls["driver"] = lambda device=device, source=source: self.peers[
                    "driver"
                ].copy_rows(
                    device.ptr, source.ctypes.data, source.shape, source.strides[0]
                )
            yield self.run(
                Case(key, "up", source.nbytes),
                calls,
                lambda device=device: device.fill(0),
                lambda source=source, device=device: self.check(source, device),
            )

    def tensors(self) -> Iterator[Case]:
        """Measure copies of 600 arrays with sizes like a model's, small and large."""
        sizes = np.random.default_rng(2).lognormal(np.log(160_000), 2, TENSOR_COUNT)
        sizes = np.minimum(sizes, 64e6).astype(int) // 8 * 8 + 8
        ends = np.cumsum(sizes)
        sizes, ends = sizes[ends <= self.room], ends[ends <= self.room]
        spans = [
            slice(e - n, e) for n, e in zip(sizes.tolist(), ends.tolist(), strict=True)
        ]
        nbytes = int(ends[-1])
        up = [(self.device[span], self.host[span].copy()) for span in spans]
        down = [(self.back[span].copy(), self.device[span]) for span in spans]

        def verify_up() -> None:
            self.check(self.host[:nbytes], self.device[:nbytes])

        def verify_down() -> None:
            for (got, _), span in zip(down, spans, strict=True):
                self.same(self.host[span], got)

        for direction, pairs, verify in (
            ("up", up, verify_up),
            ("down", down, verify_down),
        ):
            yield self.run(
                Case(f"{len(spans)} arrays", direction, nbytes),
                self.pair_calls(pairs),
                lambda pairs=pairs: [target.fill(0) for target, _ in pairs],
                verify,
            )

    def pair_calls(self, pairs: list[tuple[Any, Any]]) -> dict[str, Callable[[], Call]]:
        """Return each library's call that copies many pairs. PyTorch's is a loop."""

        def torch() -> Call:
            torch = self.peers["torch"]
            tensors = [
                [
                    torch.from_numpy(end)
                    if isinstance(end, np.ndarray)
                    else torch.as_tensor(end, device="cuda")
                    for end in pair
                ]
                for pair in pairs
            ]

            def call() -> None:
                for dst, src in tensors:
                    dst.copy_(src)

            return call

        return {"cumem": lambda: lambda: cumem.copy_many(pairs), "torch": torch}

    def up_calls(self, device: Any, host: Any) -> dict[str, Callable[[], Call]]:
        """Return, for each library, a function that prepares the call to time."""

        def tensors() -> Call:
            source = self.peers[TENSORS].from_numpy(host)
            return lambda: cumem.copy(device, source)

        def torch() -> Call:
            torch = self.peers["torch"]
            target = torch.as_tensor(device, device="cuda")
            source = torch.from_numpy(host)
            return lambda: target.copy_(source)

        def cupy() -> Call:
            target = self.peers["cupy"].asarray(device)
            return lambda: target.set(host)

        def numba() -> Call:
            target = self.peers["numba"].as_cuda_array(device)
            return lambda: target.copy_to_device(host)

        def rmm() -> Call:
            copy_up = self.peers["rmm"].pylibrmm.device_buffer.copy_host_to_ptr
            return lambda: copy_up(memoryview(host), device.ptr)

        return {
            "cumem": lambda: lambda: cumem.copy(device, host),
            TENSORS: tensors,
            "driver": lambda: self.peers["driver"].copy(
                device.ptr, host.ctypes.data, host.nbytes
            ),
            "driver-wait": lambda: self.peers["driver"].copy(
                device.ptr, host.ctypes.data, host.nbytes, wait=True
            ),
            "torch": torch,
            "cupy": cupy,
            "numba": numba,
            "rmm": rmm,
        }

    def down_calls(self, back: Any, device: Any) -> dict[str, Callable[[], Call]]:
        """Return what `up_calls` returns, for copies from the device."""

        def tensors() -> Call:
            target = self.peers[TENSORS].from_numpy(back)
            return lambda: cumem.copy(target, device)

        def torch() -> Call:
            torch = self.peers["torch"]
            source = torch.as_tensor(device, device="cuda")
            target = torch.from_numpy(back)
            return lambda: target.copy_(source)

        def cupy() -> Call:
            source = self.peers["cupy"].asarray(device)
            return lambda: source.get(out=back)

        def numba() -> Call:
            source = self.peers["numba"].as_cuda_array(device)
            return lambda: source.copy_to_host(back)

        return {
            "cumem": lambda: lambda: cumem.copy(back, device),
            TENSORS: tensors,
            "driver": lambda: self.peers["driver"].copy(
                back.ctypes.data, device.ptr, back.nbytes
            ),
            "torch": torch,
            "cupy": cupy,
            "numba": numba,
        }


def line(case: Case, links: dict[str, float]) -> str:
    """Return a row of the table."""
    ours = case.seconds.get("cumem")
    if ours is None:
        return f"{case.key}: {case.errors}"
    cells = [
        f"{case.direction:<5}{case.key:<24}{format_nbytes(case.nbytes):>8}",
        f"{ours * 1e6:>10.1f} us",
        f"{case.nbytes / ours / 1e9:>6.1f} GB/s",
        f"{100 * case.nbytes / ours / links[case.direction]:>4.0f} % of the link",
    ]
    cells += [
        f"{name} {case.seconds[name] / ours:.2f} x" if name in case.seconds else ""
        for name in PEERS
    ]
    return "  ".join(cell for cell in cells if cell)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw how much of the link each size reaches, with a panel for each direction."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    titles = {"up": "NumPy array to the device", "down": "device to a NumPy array"}
    for panel, (way, title) in zip(panels, titles.items(), strict=True):
        cases = [c for c in results["cases"] if c["key"] == "contiguous"]
        cases = [case for case in cases if case["direction"] == way]
        for name in SHOWN:
            points = [
                (
                    case["nbytes"],
                    100
                    * case["nbytes"]
                    / case["seconds"][name]
                    / results["link_bytes_per_second"][way],
                )
                for case in cases
                if name in case["seconds"]
            ]
            if points:
                style: dict[str, Any] = {"linewidth": 2.5 if name == "cumem" else 1.2}
                if name == TENSORS:
                    style |= {"color": panel.lines[0].get_color(), "linestyle": "--"}
                panel.plot(*zip(*points, strict=True), marker=".", label=name, **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks([1 << i for i in (8, 12, 16, 20, 24, 28, 32)])
        panel.set_xticklabels(
            [format_nbytes(1 << i) for i in (8, 12, 16, 20, 24, 28, 32)]
        )
        panel.set_title(title)
        panel.set_xlabel("bytes")
        panel.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("% of the link (a pinned copy)")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


#: Rows of the page's table, and the key, direction and bytes of the case of each.
LONG = {
    "array → device, 64 MiB": ("contiguous", "up", 64 << 20),
    "array → device, 1 GiB": ("contiguous", "up", GIB),
    "array → device, 4 GiB": ("contiguous", "up", 4 * GIB),
    "device → array, 64 MiB": ("contiguous", "down", 64 << 20),
    "device → array, 1 GiB": ("contiguous", "down", GIB),
    "device → array, 4 GiB": ("contiguous", "down", 4 * GIB),
    "device → new array, 1 GiB": ("to a new array", "down", GIB),
    "32 KiB of every 64 KiB → device, 512 MiB": ("32 KiB of every 64", "up", GIB // 2),
    "transposed, 4 bytes → device, 1 GiB": ("transposed", "up", GIB),
    "reversed, 4 bytes → device, 1 GiB": ("reversed", "up", GIB),
    "every second 4 bytes → device, 512 MiB": (
        "every second of 4 bytes",
        "up",
        GIB // 2,
    ),
    "one byte of 3 → device, 256 MiB": ("one byte of 3", "up", GIB // 4),
    "pixels → planes of the device, 768 MiB": ("pixels to planes", "up", 768 * MIB),
    "600 arrays → device, `copy_many`, 644 MiB": ("600 arrays", "up", 675_276_232),
    "device → 600 arrays, `copy_many`, 644 MiB": ("600 arrays", "down", 675_276_232),
}
SHORT = [size for size in SIZES if size <= 4 << 20]


def render(results: dict[str, Any]) -> str:
    """Return the rates of long copies and the times of short ones, for docs/copies.md."""
    found = {
        (case["key"], case["direction"], case["nbytes"]): case["seconds"]
        for case in results["cases"]
    }
    links = results["link_bytes_per_second"]
    lines = [
        "| blocking copy of ordinary memory | cumem | of the link | fastest other |"
    ]
    lines += ["| --- | ---: | ---: | ---: |"]
    for name, key in LONG.items():
        seconds = found[key]
        rate = key[2] / seconds["cumem"]
        others = {
            who: key[2] / took
            for who, took in seconds.items()
            if who not in ("cumem", TENSORS)
        }
        best = max(others, key=lambda who: others[who])
        lines.append(
            f"| {name} | {rate / 1e9:.1f} | {100 * rate / links[key[1]]:.0f} % "
            f"| {best} {others[best] / 1e9:.1f} |"
        )
    lines += [
        "",
        "| bytes | up: array | tensor | driver and wait | driver | PyTorch "
        "| down: array | tensor | driver | PyTorch |",
    ]
    lines += ["| ---: |" + " ---: |" * 9]
    for nbytes in SHORT:
        up, down = (found["contiguous", way, nbytes] for way in ("up", "down"))
        took = [up[who] for who in ("cumem", TENSORS, "driver-wait", "driver", "torch")]
        took += [down[who] for who in ("cumem", TENSORS, "driver", "torch")]
        cells = " | ".join(f"{1e6 * value:.1f}" for value in took)
        lines.append(f"| {format_nbytes(nbytes)} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print, and write a file if asked to."""
    run = Run(
        __doc__,
        brief={"action": "store_true", "help": "three sizes only"},
        draw={"metavar": "FILE", "help": "measure nothing, but draw these results"},
        render={"metavar": "FILE", "help": "measure nothing, but print their tables"},
        plot={"metavar": "FILE", "help": "draw percent of the link by size into FILE"},
    )
    options = run.options
    if options.draw:
        text = Path(options.draw).read_text(encoding="utf-8")
        draw(json.loads(text), Path(options.plot or "transfer.png"))
        return 0
    if options.render:
        print(render(json.loads(Path(options.render).read_text(encoding="utf-8"))))
        return 0
    bench = Bench(options)
    run.begin(bench.emulated)
    links = bench.links()
    run.note(2, link_bytes_per_second=links, missing=bench.missing)
    for source in (bench.sized, bench.fresh, bench.shaped, bench.tensors):
        run.show(source(), lambda case: line(case, links))
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
