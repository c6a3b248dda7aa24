# SPDX-License-Identifier: Apache-2.0
"""Write the README's table of figures and the copy rates on docs/memory-kinds.md.

The figures come from the files in benchmarks/results/. To measure the copy rates anew, run
the first of these commands before the second:

    python -m cumem bench --json benchmarks/results/bench-h200.json \
        --plot docs/images/bench-h200.png
    python benchmarks/render_readme.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cumem.tools.bench.cases import COPY_KINDS
from cumem.tools.bench.report import DIRECTIONS
from cumem.units import format_nbytes

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
KINDS = ROOT / "docs" / "memory-kinds.md"


def read(name: str) -> dict[str, Any]:
    """Read a results file."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def case(data: dict[str, Any], **wanted: object) -> dict[str, Any]:
    """Return the only case whose members have the wanted values."""
    [found] = [c for c in data["cases"] if all(c[k] == v for k, v in wanted.items())]
    return dict(found)


def figures() -> str:
    """Return the README's table, with the fastest peer's figures beside cumem's."""
    lines = ["| | cumem | others, in the same run |", "| --- | ---: | --- |"]

    def rates(
        name: str, what: str, ours: str, theirs: dict[str, str], **key: object
    ) -> None:
        data = read(name)
        found = case(data, **key)
        rate = {who: found["nbytes"] / s / 1e9 for who, s in found["seconds"].items()}
        share = 100e9 * rate[ours] / data["link_bytes_per_second"]["up"]
        other = max((who for who in rate if who in theirs), key=rate.__getitem__)
        lines.append(
            f"| {what} | [{rate[ours]:.1f} GB/s](benchmarks/results/{name}), "
            f"{share:.0f} % of the link | {rate[other]:.1f}, {theirs[other]} |"
        )

    rates(
        "transfer-h200.json",
        "a NumPy array of 1 GiB to the GPU",
        "cumem",
        {"driver": "the driver", "torch": "PyTorch", "cupy": "CuPy", "numba": "Numba"},
        key="contiguous",
        direction="up",
        nbytes=1 << 30,
    )
    rates(
        "files-h200.json",
        "a file of 4 GiB, in the page cache, to the GPU",
        "cumem",
        {
            "torch np.memmap": "PyTorch from a `np.memmap`",
            "torch np.fromfile": "PyTorch from `np.fromfile`",
        },
        key="page cache to device",
    )
    rates(
        "safetensors-h200.json",
        "a checkpoint of 4 GiB into tensors of PyTorch",
        "cumem, torch",
        {"safetensors.torch": "`safetensors.torch`"},
        key="model",
        direction="up",
    )
    name = "pipelines-h100.json"
    ours, theirs = (
        case(read(name), group="file", key=key)
        for key in ("cumem.pipeline", "PyTorch, two buffers by hand")
    )
    rate, other = (c["nbytes"] / c["seconds"]["all"] / 1e9 for c in (ours, theirs))
    lines.append(
        f"| the sum of a file of 40 GiB, in 2 GiB of an H100's memory | [{rate:.1f} GB/s]"
        f"(benchmarks/results/{name}), in {ours['lines']} lines of code | {other:.1f}, "
        f"PyTorch with two buffers by hand, in {theirs['lines']} lines of code |"
    )
    name = "pools-h200.json"
    first = read(name)["parts"]["T2"]["rows"]
    lines.append(
        f"| the first GiB of pinned memory of a process | [{first['cumem']['ms']:.0f} ms]"
        f"(benchmarks/results/{name}) | {first['torch']['ms']:.0f}, PyTorch; "
        f"{first['cudaHostAlloc']['ms']:.0f}, `cudaHostAlloc` |"
    )
    return "\n".join(lines)


def table(data: dict[str, Any]) -> str:
    """Return a table of copy rates for each direction, by size and kind of memory."""
    device = data["devices"][data["device"]]["name"]
    lines = [
        f"Copies on {device}, driver CUDA {data['versions']['driver']}, "
        f"{data['machine']['cpu']}; GB/s, median, every case verified:"
    ]
    if data["emulated"]:
        lines = ["**Emulated device: these figures are not a GPU's.**", "", *lines]
    for what, name in DIRECTIONS.items():
        rows = [r for r in data["results"] if (r["group"], r["what"]) == ("copy", what)]
        lines += ["", f"| {name} | " + " | ".join(COPY_KINDS) + " | use here |"]
        lines.append("| ---: " * (len(COPY_KINDS) + 1) + "| --- |")
        for nbytes in sorted({row["nbytes"] for row in rows}):
            found = {row["kind"]: row for row in rows if row["nbytes"] == nbytes}
            cells = [_cell(found.get(kind)) for kind in COPY_KINDS]
            advice = found["pinned"]["advice"]
            lines.append(
                f"| {format_nbytes(nbytes)} | " + " | ".join(cells) + f" | {advice} |"
            )
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    """Return a rate as a cell of the table."""
    if row is None or row["skipped"] is not None:
        return "-"
    return f"{row['gbps']:.1f}" if row["gbps"] >= 10 else f"{row['gbps']:.2f}"


def rendered(page: Path) -> str:
    """Return the page with new text between its markers."""
    text = page.read_text(encoding="utf-8")
    made = {"figures": figures, "bench-table": lambda: table(read("bench-h200.json"))}
    for name, make in made.items():
        head, begin, rest = text.partition(f"<!-- {name} -->\n")
        if begin:
            _, end, tail = rest.partition(f"<!-- /{name} -->")
            text = f"{head}{begin}{make()}\n{end}{tail}"
    return text


def main() -> int:
    for page in (README, KINDS):
        page.write_text(rendered(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
