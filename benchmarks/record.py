# SPDX-License-Identifier: Apache-2.0
"""Run a check that writes no results file, such as pytest, and keep how it ended.

    python benchmarks/record.py --json FILE [--limit SECONDS] -- COMMAND [ARGUMENT ...]

The script runs the command and shows its output. It then adds to FILE the exit status, the
duration and the last lines of the output, with the commit, the date and the machine. Its
own exit status is that of the command.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from cumem import info

LINES = 20  # how many of the last lines that the command prints are kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="add the run to FILE")
    parser.add_argument("--limit", type=float, help="stop it after so many seconds")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    started, begin = datetime.now(UTC), time.perf_counter()
    lines: list[str] = []
    with subprocess.Popen(
        options.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines = [*lines, line.rstrip()][-LINES:]
            if options.limit and time.perf_counter() - begin > options.limit:
                process.terminate()
                options.limit = None
    run = {
        "command": options.command,
        "status": process.returncode,
        "seconds": round(time.perf_counter() - begin, 1),
        "said": lines,
    }
    facts = info.collect()
    results = {
        "commit": info.commit(),
        "started": started.isoformat(timespec="seconds"),
        **facts,
        "runs": [],
    }
    if options.json.exists():
        before = json.loads(options.json.read_text(encoding="utf-8"))
        if before["commit"] != results["commit"]:
            parser.error(f"{options.json} is of another commit: take another file")
        results = before
    results["runs"].append(run)
    info.save(results, str(options.json))
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
