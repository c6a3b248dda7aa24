# SPDX-License-Identifier: Apache-2.0
"""Compare copies that convert the dtype on the way with converting before or after.

    python benchmarks/casting.py --json benchmarks/results/casting-h200.json
    python benchmarks/casting.py --arrays  # array(x, dtype) beside array(x.astype(dtype))
    python benchmarks/casting.py --arrays --only complex64 --elements 32,8192,4194304

Large arrays, whose dtypes differ between the two sides, are copied from the host to the
device and back, and each case is compared bit by bit. The same run measures three other
ways: the side that receives the copy converts it afterwards (on the device by PyTorch
or CuPy, whichever is installed); NumPy converts it before it is copied to the device;
and a copy of as many bytes as cumem sends over the link, without any conversion. The
script also runs on the emulated device, and then says that the figures are not a GPU's.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cumem
from cumem.buffers.casting import NUMBERS
from cumem.units import format_nbytes

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH hides it
from measure import Call, Run, times_of

#: (dtype on the host, dtype on the device). The first pair is the one that has to be fast.
PAIRS = [
    ("float64", "float32"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("uint8", "float32"),
    ("int16", "float32"),
]
#: The bytes of an array, counted on the side whose dtype is wider.
SIZES = [32 << 20, 1 << 30]
MOST_SECONDS = 0.5  # how long one way is repeated
PATTERN = 1 << 20  # how many elements differ; larger arrays repeat them
WAYS = ("cumem", "after", "before", "link")


@dataclass
class Case:
    """One conversion, by cumem and by the usual ways.

    Parameters
    ----------
    source, target : str
        The dtypes of the two ends. The source is on the host if `direction` is ``"up"``,
        and on the device if it is ``"down"``.
    key : str
        The host memory that is copied, ``"numpy"`` or ``"pinned"``.
    direction : str
        ``"up"`` (host to device) or ``"down"``.
    nbytes : int
        The size of the array on the side whose dtype is wider.
    route : str
        The route by which cumem moved it, as `cumem.explain` names it.
    seconds : dict
        The best time of each way: ``"cumem"`` converts as it copies; ``"after"`` copies
        the source and has the target's side convert it, which is the device for
        ``"up"`` and NumPy for ``"down"``; ``"before"``, which is only measured for
        ``"up"``, has NumPy convert first; ``"link"`` copies as many bytes as cumem
        sends, and converts nothing.
    spread : dict
        The median time divided by the best one, for each way.
    by : dict
        The library that converts, for each way.
    """

    source: str
    target: str
    key: str
    direction: str
    nbytes: int
    route: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)


def dtype_of(name: str) -> np.dtype[Any] | None:
    """Return a dtype, or None if NumPy needs `ml_dtypes` for it and that is missing."""
    if name != "bfloat16":
        return np.dtype(name)
    if importlib.util.find_spec("ml_dtypes") is None:
        return None
    found: np.dtype[Any] = np.dtype(__import__("ml_dtypes").bfloat16)
    return found


class Bench:
    """The state that all cases share."""

    def __init__(self, quick: bool) -> None:
        self.emulated = cumem.backend() == "emulated"
        small = quick or self.emulated
        self.seconds = 0.02 if small else MOST_SECONDS
        self.sizes = [1 << 20] if small else SIZES
        self.peer = ""
        for name in ("torch", "cupy"):
            if not self.emulated and importlib.util.find_spec(name) is not None:
                self.peer = self.peer or name

    def cases(self) -> Iterator[Case]:
        """Measure every size, kind of host memory, pair of dtypes and direction."""
        for nbytes in self.sizes:
            for key in ("numpy", "pinned"):
                for host, device in PAIRS:
                    if dtype_of(device) is None:
                        continue
                    yield self.measure(Case(host, device, key, "up", nbytes))
                    yield self.measure(Case(device, host, key, "down", nbytes))

    def measure(self, case: Case) -> Case:
        """Time all ways, and compare their results bit by bit."""
        source, target = dtype_of(case.source), dtype_of(case.target)
        assert source is not None
        assert target is not None
        count = case.nbytes // max(source.itemsize, target.itemsize)
        pattern = np.random.default_rng(1).integers(0, 120, PATTERN).astype(source)
        if case.source.startswith("float"):
            pattern += source.type(1) / source.type(3)
        was = np.resize(pattern, count)
        up = case.direction == "up"

        def host(values: np.ndarray[Any, Any]) -> Any:
            return (
                cumem.array(values, kind="pinned") if case.key == "pinned" else values
            )

        given = host(was) if up else cumem.array(was)
        made = cumem.zeros(count, target) if up else host(np.zeros(count, target))
        expected = np.resize(pattern.astype(target), count)
        rule: Any = (
            "same_kind" if np.can_cast(source, target, "same_kind") else "unsafe"
        )
        ways = self.ways(case, made, given, rule)
        calls = {way: make() for way, make in ways.items()}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for way in [*ways, *ways]:  # twice, so that drift affects all alike
            zero: Any = 0 if isinstance(made, cumem.Buffer) else target.type(0)
            made.fill(zero)
            times[way] += times_of(calls[way], self.seconds / 2)
            case.seconds[way] = min(times[way])
            case.spread[way] = statistics.median(times[way]) / min(times[way])
            if way in ("cumem", "before") and not same_bits(made, expected):
                raise AssertionError(f"{way}: other bits than NumPy's: {case}")
        case.route = cumem.explain(made, given, casting=rule).route
        return case

    def ways(
        self, case: Case, made: Any, given: Any, rule: Any
    ) -> dict[str, Callable[[], Call]]:
        """Return, for each way, a function that prepares the call to time.

        That call returns only when all bytes have arrived.
        """
        up = case.direction == "up"
        count, to = len(made), made.dtype

        def ours() -> Call:
            return lambda: cumem.copy(made, given, casting=rule)

        def after_on_device() -> Call:
            there = cumem.empty(count, given.dtype)
            library: Any = __import__(self.peer)
            if self.peer == "torch":
                view = library.as_tensor(there, device="cuda")
                kind = getattr(library, case.target)

                def convert() -> None:
                    view.to(kind)
                    library.cuda.synchronize()
            else:
                view = library.asarray(there)

                def convert() -> None:
                    view.astype(to)
                    library.cuda.get_current_stream().synchronize()

            def call() -> None:
                cumem.copy(there, given)
                convert()

            return call

        def after_on_host() -> Call:
            here = np.empty(count, given.dtype)
            array = made if isinstance(made, np.ndarray) else made.numpy()

            def call() -> None:
                cumem.copy(here, given)
                np.copyto(array, here, casting="unsafe")

            return call

        def before_on_host() -> Call:
            array = given if isinstance(given, np.ndarray) else given.numpy()
            return lambda: cumem.copy(made, array.astype(to))

        def link() -> Call:
            on_link = to if up else given.dtype
            host: Any = np.ones(count, on_link)
            if case.key == "pinned":
                host = cumem.zeros(count, on_link, "pinned")
            device = made if up else given
            return lambda: cumem.copy(*((device, host) if up else (host, device)))

        ways: dict[str, Callable[[], Call]] = {"cumem": ours}
        if not up:
            case.by["after"] = "numpy"
            ways["after"] = after_on_host
        elif self.peer and not (self.peer == "cupy" and case.target == "bfloat16"):
            case.by["after"] = self.peer
            ways["after"] = after_on_device
        if up:
            case.by["before"] = "numpy"
            ways["before"] = before_on_host
        ways["link"] = link
        return ways


def same_bits(made: Any, expected: np.ndarray[Any, Any]) -> bool:
    """Return whether a copy has the expected bits, wherever it lies."""
    found = made if isinstance(made, np.ndarray) else made.to_numpy()
    bits = f"u{expected.itemsize}"
    return np.array_equal(found.view(bits), expected.view(bits))


def line(case: Case) -> str:
    """Return a row of the table."""
    ours = case.seconds["cumem"]
    cells = [
        f"{case.source:>8} to {case.target:<8}",
        f"{case.key:<7}{case.direction:<5}{format_nbytes(case.nbytes):<8}",
        f"{case.route:<7}",
        f"{ours * 1e3:>9.2f} ms",
        f"{case.nbytes / ours / 1e9:>6.1f} GB/s of the wider",
    ]
    for way in WAYS[1:]:
        if way in case.seconds:
            by = f" ({case.by[way]})" if way in case.by else ""
            cells.append(f"{way}{by} {case.seconds[way] / ours:.2f} x")
    return "  ".join(cells)


#: Dtypes that the copy threads cannot convert, which ``--arrays`` measures as well.
OTHERS = (">f4", ">i2", "float8_e4m3fn")


def arrays_options(arguments: list[str]) -> argparse.Namespace:
    """Parse the options of ``--arrays``, which by default measures all pairs and kinds."""
    parser = argparse.ArgumentParser(
        prog="casting.py --arrays", description=(show_arrays.__doc__ or "").strip()
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="DTYPES",
        help="measure only pairs with one of these dtypes (complex64,>f4), or only a pair "
        "that is joined by a colon (float32:complex64)",
    )
    parser.add_argument(
        "--kinds", default="pinned,managed,device", help="of the target"
    )
    parser.add_argument(
        "--elements", default=str(1 << 22), help="lengths of arrays, such as 32,4096"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="calls of each, of which the best counts"
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="count the processor time of all threads, for a machine that others load",
    )
    parser.add_argument(
        "--above", type=float, default=0.0, help="print only ratios above this"
    )
    return parser.parse_args(arguments)


def is_wanted(only: str, source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Return whether `only`, the option's text, names this pair or one of its dtypes."""
    for word in filter(None, only.split(",")):
        dtypes = [dtype_of(name) for name in word.split(":")]
        if dtypes == [source, target] or (
            len(dtypes) == 1 and dtypes[0] in (source, target)
        ):
            return True
    return not only


def ratio_to_hand(
    array: np.ndarray[Any, Any],
    target: np.dtype[Any],
    kind: Any,
    rounds: int,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Return the seconds of `array(x, dtype)`, and their ratio to converting by hand."""
    ours, by_hand = [], []
    # This is outside of the loop, because it takes as long as a short conversion.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(rounds):
            begin = clock()
            cumem.array(array, target, kind, casting="unsafe")
            middle = clock()
            cumem.array(array.astype(target), kind=kind)
            by_hand.append(clock() - middle)
            ours.append(middle - begin)
    return min(ours), min(ours) / min(by_hand)


def show_arrays(arguments: list[str]) -> None:
    """Compare `array(x, dtype)` with ``array(x.astype(dtype))`` for every pair of dtypes.

    The two calls alternate, and the ratio is the best time of the first divided by that of
    the second. The pairs with the largest ratios, whose call with a dtype is slower than
    converting by hand, are printed first.
    """
    options = arrays_options(arguments)
    names = (*NUMBERS, *OTHERS)
    dtypes = [found for found in map(dtype_of, names) if found is not None]
    clock = time.process_time if options.cpu else time.perf_counter
    rows = []
    for source, target in itertools.product(dtypes, dtypes):
        if (
            source == target
            or not np.can_cast(source, target, "unsafe")
            or not is_wanted(options.only, source, target)
        ):
            continue
        for count in map(int, options.elements.split(",")):
            array = np.random.default_rng(3).integers(0, 2, count).astype(source)
            for kind in options.kinds.split(","):
                seconds, ratio = ratio_to_hand(
                    array, target, kind, options.rounds, clock
                )
                rows.append((ratio, seconds, f"{source} {target} {kind} {count}"))
    for ratio, seconds, case in sorted(rows, reverse=True):
        if ratio > options.above:
            print(f"{ratio:6.2f} x  {seconds * 1e6:10.1f} us  {case}")
    slower = sum(ratio > 1.03 for ratio, *_ in rows)
    print(f"{slower} of {len(rows)} are slower than by hand by more than 3 %")


def main() -> int:
    """Measure and print, and write a file if asked to."""
    if "--arrays" in sys.argv:
        show_arrays([word for word in sys.argv[1:] if word != "--arrays"])
        return 0
    run = Run(__doc__)
    bench = Bench(run.options.quick)
    run.begin(bench.emulated)
    run.note(1, library=bench.peer)
    run.show(bench.cases(), line)
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
