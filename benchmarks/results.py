# SPDX-License-Identifier: Apache-2.0
"""List the results files that each page cites, and those that are older than their code.

    python benchmarks/results.py            # lists them; exit status 1 if one is older
    python benchmarks/results.py --write    # puts a table of its files on each page

Every file of benchmarks/results/ says which commit was measured (`commit`), when
(`started`) and on which machine (`machine`). The machine is a text, or a dict with
`devices` like the one that `python -m cumem info` prints. Files from before this rule have
`added` instead, which is the commit that added the file, and that commit's date.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
LINK = re.compile(r"benchmarks/results/([\w.-]+)")

#: The sources whose speed a results file shows, by the beginning of the file's name.
SOURCES: dict[str, tuple[str, ...]] = {
    "bench": ("cumem/tools/bench", "csrc/transfer", "csrc/runtime/cuda*"),
    "casting": ("csrc/base/convert.c", "csrc/transfer/routes", "csrc/transfer/host"),
    "ceilings": (),  # the driver and the hardware alone, without cumem
    "checks": ("csrc",),
    "corruption": (
        "csrc/pool",
        "csrc/python/buffer/storage*.c",
        "csrc/python/protocols",
    ),
    "cupy-pool": ("cumem/integrations/cupy.py", "csrc/pool", "csrc/python/pool"),
    "doors": ("csrc/python/protocols", "csrc/python/copy", "csrc/transfer"),
    "driver-calls": (),
    "exports": (
        *("csrc/pool/in_flight.c", "csrc/python/buffer/storage*.c"),
        *("csrc/python/protocols/buffer_export.c", "csrc/python/core/numpy_call.h"),
    ),
    "files": ("csrc/transfer/file", "csrc/runtime/cuda*"),
    "fork": ("csrc/pool",),
    "interop": (
        *("csrc/python/protocols/dlpack*", "csrc/python/protocols/array_interface.c"),
        *("csrc/python/protocols/buffer_export.c", "csrc/python/buffer/methods.c"),
        "csrc/python/copy/dlpack_export.c",
        *("cumem/buffers/views.py", "cumem/buffers/hints.py"),  # texts of errors
    ),
    "links": ("csrc/transfer", "csrc/pool/source*", "cumem/files", "cumem/transfers"),
    "loading": (
        "cumem/transfers/loading.py",
        "cumem/transfers/collating.py",
        "cumem/transfers/worker_slots.py",
    ),
    "managed": (
        *(
            "cumem/transfers/managed.py",
            "csrc/python/buffer/managed.c",
            "csrc/runtime/cuda*",
        ),
        "csrc/python/buffer/page_calls.c",
    ),
    "many": ("csrc/transfer/batch", "csrc/transfer/device/table*"),
    "mutants": ("csrc", "tests/mutants/faults.py"),
    "pipelines": ("cumem/transfers/pipelines.py", "csrc/transfer"),
    "numpy-pinned": ("cumem/pools/numpy_memory.py", "csrc/python/pool/numpy_memory.c"),
    "numpy-tests": ("cumem/pools/numpy_memory.py", "csrc/python/pool/numpy_memory.c"),
    "offloading": ("cumem/transfers/offloading.py",),
    "plan-fuzz": ("csrc/transfer/plan", "csrc/transfer/host"),
    "pools": ("csrc/pool", "csrc/python/buffer/storage*.c"),
    "recording": ("csrc/base/recorder*", "csrc/pool", "csrc/python/core/recording*"),
    "recording-page": ("cumem/recording/page*", "cumem/recording/pairing.py"),
    "rows": (
        *("csrc/transfer/rows", "csrc/transfer/device/rows*"),
        *("csrc/transfer/routes/kernel_rows.c", "csrc/transfer/routes/numbered.c"),
        "csrc/python/copy/rows*.c",
    ),
    "safetensors": ("cumem/files/safetensors", "csrc/transfer/file"),
    "saving-behind": (
        *("cumem/files/safetensors", "cumem/integrations/torch_checkpoints.py"),
        "csrc/transfer/file",
    ),
    "settings": ("csrc/transfer/plan/tuning.[ch]", "csrc/transfer/routes"),
    "sleeping": (
        *("csrc/pool/sleep*", "csrc/python/copy/sleeping*", "cumem/pools/region.py"),
        *("csrc/transfer/batch", "cumem/integrations/torch.py"),
    ),
    "spilling": ("csrc/pool/spill.c", "csrc/python/pool/spilling.c"),
    "stress-transfers": ("csrc/transfer",),
    "training": (
        "cumem/integrations/torch*",
        "csrc/python/pool/lending.c",
        "csrc/pool",
    ),
    "transfer": ("csrc/transfer", "csrc/runtime/cuda*"),
    "threads": ("csrc/transfer", "csrc/python/copy"),
    "torture": ("csrc",),
    "trace": ("csrc", "cumem"),
    "versions": ("csrc",),
    "views": ("csrc/python/buffer", "csrc/python/pool", "csrc/python/core/arguments.c"),
    "two-gpus": ("csrc/transfer/plan", "csrc/transfer/device", "csrc/transfer/routes"),
}


def read(name: str) -> dict[str, Any]:
    """Read what a file says about its run. A file of JSON lines says it in the first."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    found = json.loads(text.splitlines()[0] if name.endswith(".jsonl") else text)
    assert isinstance(found, dict), f"{name} is no object"
    return found


def commit_of(results: dict[str, Any]) -> str:
    """Return the commit of results, without the mark for uncommitted changes."""
    said = results.get("commit") or results["added"]["commit"]
    return re.sub(r"-(dirty|changed)$", "", said)[:7]


def date_of(results: dict[str, Any]) -> str:
    """Return the date of results, such as 2026-11-26."""
    return str(results.get("started") or results["added"]["date"])[:10]


def machine_of(results: dict[str, Any]) -> str:
    """Return the machine in a few words."""
    machine = results.get("machine", results.get("device", "?"))
    if isinstance(machine, dict):
        devices = results.get("devices") or [{"name": results["device"]}]
        names = [device["name"] for device in devices]
        same = len(set(names)) == 1
        gpus = f"{len(names)} x {names[0]}" if same and names[1:] else ", ".join(names)
        machine = f"{gpus}, {machine['cores']} cores"
    return str(machine)


def lacks(results: dict[str, Any]) -> list[str]:
    """Return which of the required facts the file lacks."""
    has_run = bool(results.get("commit")) and bool(results.get("started"))
    has_added = {"commit", "date"} <= set(results.get("added", ()))
    missing = [] if has_run or has_added else ["commit and started"]
    return missing + ([] if machine_of(results) != "?" else ["machine"])


def pages() -> dict[Path, list[str]]:
    """Return the results files that each page names outside its own table, in order.

    The pages of docs/decisions/ are left out, because they keep the figures of their date.
    """
    found = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        names = LINK.findall(head + rest.partition(END)[2])
        if names:
            found[page] = list(dict.fromkeys(name.rstrip(".") for name in names))
    return found


def sources_of(name: str) -> tuple[str, ...]:
    """Return the sources of a results file, by the longest matching key."""
    keys = [key for key in SOURCES if name.startswith(key)]
    return SOURCES[max(keys, key=len)]


def table(page: Path, names: list[str]) -> str:
    """Return the table that stands between the markers."""
    up = os.path.relpath(RESULTS, page.parent)
    lines = ["| figures | commit | date | machine |", "| --- | --- | --- | --- |"]
    for name in names:
        results = read(name)
        commit = commit_of(results)
        if "commit" not in results:
            commit = f"before {commit}"
        lines.append(
            f"| [{name}]({up}/{name}) | {commit} | {date_of(results)} "
            f"| {machine_of(results)} |"
        )
    return "\n".join(lines)


def written(page: Path, names: list[str]) -> str:
    """Return the page's text with a new table, at its end if it had none before."""
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table(page, names)}\n{END}{rest.partition(END)[2]}"


def changed_since(commit: str, sources: tuple[str, ...]) -> int | None:
    """Count the sources changed since a commit, or return None if git cannot tell."""
    paths = [f":(glob){path}" if "*" in path else path for path in sources]
    said = git("diff", "--name-only", commit, "--", *paths)
    return None if said is None else len(said.splitlines())


def git(*command: str) -> str | None:
    """Return what a git command prints, or None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *command], capture_output=True, text=True
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def brought_by(name: str) -> str:
    """Return the commit that last changed a results file that names no commit itself."""
    said = git("log", "-1", "--format=%h", "--", f"benchmarks/results/{name}")
    return (said or "").strip()


def older(names: list[str]) -> list[str]:
    """Return a line of text for each results file that is older than its sources."""
    lines = []
    for name in names:
        commit, sources = commit_of(read(name)), sources_of(name)
        count = changed_since(commit, sources) if sources else 0
        if count is None:
            commit = brought_by(name)
            count = changed_since(commit, sources) if commit else 0
        if count:
            lines.append(
                f"{name} is of {commit}: {count} files of {', '.join(sources)} are newer"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="figures, their pages and their age")
    parser.add_argument(
        "--write", action="store_true", help="put the tables on the pages"
    )
    options = parser.parse_args()
    stale = False
    for page, names in pages().items():
        if options.write:
            page.write_text(written(page, names), encoding="utf-8")
            continue
        lines = older(names)
        print(page.relative_to(ROOT), *lines, sep="\n    ")
        stale = stale or bool(lines)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
