# SPDX-License-Identifier: Apache-2.0
"""Write the README's table of copy rates from the results of a run.

    python -m cumem bench --json benchmarks/results/bench-h200.json \
        --plot docs/images/bench-h200.png
    python benchmarks/render_readme.py benchmarks/results/bench-h200.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cumem.bench.cases import COPY_KINDS
from cumem.bench.report import DIRECTIONS
from cumem.units import format_nbytes

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- bench-table -->", "<!-- /bench-table -->"


def table(data: dict[str, Any]) -> str:
    """Rates in GB/s by size and kind, one table per direction, with the advice."""
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
    if row is None or row["skipped"] is not None:
        return "-"
    return f"{row['gbps']:.1f}" if row["gbps"] >= 10 else f"{row['gbps']:.2f}"


def rendered(readme: str, data: dict[str, Any]) -> str:
    """Put the table between the markers of the README's text."""
    head, rest = readme.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    return f"{head}{BEGIN}\n{table(data)}\n{END}{tail}"


def main() -> int:
    """Rewrite the README from the results file named."""
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} RESULTS.json", file=sys.stderr)
        return 2
    data = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    text = rendered(README.read_text(encoding="utf-8"), data)
    README.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
