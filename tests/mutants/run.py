# SPDX-License-Identifier: Apache-2.0
"""Put the faults of faults.py into the C sources, one at a time, and check that tests fail.

    python tests/mutants/run.py [NAME ...] [--json FILE [--resume]]
    python tests/mutants/run.py NAME --find tests/pools/test_pool.py tests/c/test_pool.c

A copy of the tree in a temporary folder is built once, and all tests that faults.py names
must pass there. Then, for each fault, its file is compiled again with the fault in it. If
it is a header, every file that includes it is compiled. Each test that the fault names must
then fail; it may crash or hang only if the fault says so. `--find` runs other tests on a
fault and prints which of them fail, so that the tests of a new fault can be chosen.

FILE is written after each fault, so that a run which was stopped can go on. A fault is
killed if its tests notice it. `--resume` keeps the rows of faults that were killed at this
commit, and tries only the others. On a busy machine raise `--limit SECONDS`, since a test
that takes longer counts as one that hangs.

It needs gcc, the packages of `pip install '.[test]'` and CUDA's headers and static
library, which setup.py finds (`make mutants` fetches them).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as Xml
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from fault import Fault  # noqa: E402
from faults import FAULTS  # noqa: E402

#: A run of tests that takes longer than this, in seconds, counts as one that hangs.
LIMIT = 120.0
#: A run is marked "-dirty" if a file on these paths differs from the commit.
ABOUT = ("csrc", "cumem", "tests", "benchmarks/*.py", "setup.py")
LEFT_OUT = (".git", ".venv*", "build", "dist", "*.so", "__pycache__", ".*_cache")


@dataclasses.dataclass
class Outcome:
    """The outcome of one test: "passes", "fails", "crashes", "hangs" or "missing"."""

    how: str
    detail: str = ""


def pattern_of(text: str) -> re.Pattern[str]:
    """Return a pattern that matches a text even if its white space has changed."""
    return re.compile(r"\s+".join(re.escape(word) for word in text.split()))


def mutated(fault: Fault, source: str) -> str:
    """Return the source with the fault, or raise SystemExit unless its place is unique."""
    found = list(pattern_of(fault.old).finditer(source))
    if len(found) != 1:
        raise SystemExit(
            f"{fault.name}: its old text is {len(found)} times in {fault.file}, but must "
            f"be there once. Change `old` in faults.py:\n{fault.old}"
        )
    return source[: found[0].start()] + fault.new + source[found[0].end() :]


class Tree:
    """A copy of the tree with the objects of all sources, which are linked on demand."""

    def __init__(self, folder: Path, limit: float = LIMIT) -> None:
        self.root = folder / "tree"
        self.limit = limit
        self.objects = folder / "objects"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*LEFT_OUT))
        self.compile, self.link = self.commands()
        self.sources = sorted(
            str(path.relative_to(self.root)) for path in self.root.glob("csrc/**/*.c")
        )
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.compile_one, self.sources))
        self.programs: dict[str, Path] = {}

    def commands(self) -> tuple[list[str], list[str]]:
        """Return the commands of setup.py, for a quick build that checks invariants."""
        import numpy
        import setuptools

        # `make mutants` puts CUDA's headers and library there.
        sys.path.insert(0, str(ROOT / "build" / "cuda12"))
        setup, setuptools.setup = setuptools.setup, lambda **_: None
        before = os.getcwd()
        os.chdir(self.root)
        try:
            made = runpy.run_path("setup.py")
        finally:
            os.chdir(before)
            setuptools.setup = setup
        core = made["core"]
        includes, library = made["find_cuda"]()
        import sysconfig

        macros = [*core.define_macros, ("CM_DEBUG", "1")]
        compile_ = [
            "gcc",
            "-std=c17",
            "-O1",
            "-g1",
            "-fPIC",
            "-fvisibility=hidden",
            "-w",
        ]
        compile_ += [f"-D{k}" if v is None else f"-D{k}={v}" for k, v in macros]
        compile_ += [f"-I{folder}" for folder in core.include_dirs]
        for folder in (*includes, numpy.get_include(), sysconfig.get_path("include")):
            compile_ += ["-isystem", str(folder)]
        link = [str(library), "-Wl,--exclude-libs,ALL"]
        link += [f"-l{name}" for name in core.libraries]
        return compile_, link

    def run(self, command: list[str]) -> None:
        """Run a compiler or linker, and raise SystemExit with its errors if it fails."""
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
        if done.returncode != 0:
            said = "\n".join(done.stderr.splitlines()[:20])
            raise SystemExit(f"{shlex.join(command)[:200]} ...\n{said}")

    def object_of(self, source: str) -> Path:
        return self.objects / source.replace("/", "_").replace(".c", ".o")

    def compile_one(self, source: str) -> None:
        self.objects.mkdir(exist_ok=True)
        out = self.object_of(source)
        self.run([*self.compile, "-c", "-o", str(out), source])

    def link_extension(self) -> None:
        objects = [str(self.object_of(source)) for source in self.sources]
        out = self.root / "cumem" / "_core.abi3.so"
        self.run(["gcc", "-shared", "-o", str(out) + ".new", *objects, *self.link])
        os.replace(str(out) + ".new", out)

    def link_program(self, source: str) -> Path:
        """Link a C test with the core alone, as tests/c/programs.mk does."""
        out = self.objects / Path(source).stem
        core = [
            str(self.object_of(each))
            for each in self.sources
            if not re.match(r"csrc/(python/|runtime/cuda)", each)
        ]
        self.run([*self.compile, "-o", str(out), source, *core, "-lpthread", "-lm"])
        return out

    def compile_changed(self, file: str) -> None:
        """Compile a file, or all sources that include it, directly or through others."""
        changed, added = {file}, {file}
        while added:
            lines = [f'#include "{each.removeprefix("csrc/")}"' for each in added]
            added = {
                str(path.relative_to(self.root))
                for path in self.root.glob("csrc/**/*.[ch]")
                if any(line in path.read_text() for line in lines)
            } - changed
            changed |= added
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            sources = [source for source in self.sources if source in changed]
            list(pool.map(self.compile_one, sources))

    def put_in(self, fault: Fault) -> str:
        """Compile the fault's file with the fault in it, and return the original text."""
        path = self.root / fault.file
        original = path.read_text()
        path.write_text(mutated(fault, original))
        self.compile_changed(fault.file)
        return original

    def take_out(self, fault: Fault, original: str) -> None:
        """Write the original text back, and compile it."""
        (self.root / fault.file).write_text(original)
        self.compile_changed(fault.file)

    # -- tests ---------------------------------------------------------------------------

    def run_tests(
        self, names: list[str], stop_early: bool = True
    ) -> dict[str, Outcome]:
        """Return the outcome of each test. A name without brackets means all its cases."""
        outcomes: dict[str, Outcome] = {}
        in_c = [name for name in names if name.startswith("tests/c/")]
        in_python = [name for name in names if name not in in_c]
        if in_python:
            self.link_extension()
        for name in in_python:
            outcomes.update(self.run_python(name, stop_early))
        for name in in_c:
            outcomes[name] = self.run_c(name)
        return outcomes

    def run_python(self, name: str, stop_early: bool) -> dict[str, Outcome]:
        """Run a Python test, and return its outcome, or that of each case."""
        report = self.objects / "report.xml"
        report.unlink(missing_ok=True)
        environment = os.environ | {
            "PYTHONPATH": f"{self.root}",
            "CUMEM_TESTS_CORE": "package",  # the package's core has the hooks
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        environment.pop("CUMEM_BACKEND", None)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junit-xml={report}", f"--timeout={self.limit}", name]
        command += ["-x"] if stop_early else []
        try:
            done = subprocess.run(
                command,
                cwd=self.root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=self.limit + 30,
            )
        except subprocess.TimeoutExpired:
            return {name: Outcome("hangs")}
        if "+ Timeout +" in done.stderr + done.stdout:
            return {name: Outcome("hangs")}
        if done.returncode not in (0, 1) or not report.exists():
            how = "missing" if done.returncode in (2, 4, 5) else "crashes"
            return {name: Outcome(how, (done.stdout + done.stderr)[-2000:])}
        if stop_early:
            bad = [
                f"{case.get('name')}: {found.get('message', '').splitlines()[0:1]}"
                for case in Xml.parse(report).iter("testcase")
                for found in case
                if found.tag in ("failure", "error")
            ]
            return {name: Outcome("fails" if bad else "passes", "; ".join(bad))}
        return {
            f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}": Outcome(
                "fails"
                if any(found.tag in ("failure", "error") for found in case)
                else "passes"
            )
            for case in Xml.parse(report).iter("testcase")
        }

    def run_c(self, name: str) -> Outcome:
        """Build and run a test in C."""
        source, _, test = name.partition("::")
        if not (self.root / source).is_file():
            return Outcome("missing")
        program = self.link_program(source)
        try:
            done = subprocess.run(
                [str(program), *([test] if test else [])],
                capture_output=True,
                text=True,
                timeout=self.limit,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            return Outcome("hangs")
        if done.returncode == 0:
            return Outcome("passes", done.stdout)
        if done.returncode == 1 and "FAILED " in done.stdout:
            return Outcome("fails", done.stderr.strip().splitlines()[0])
        if done.returncode == 1 and done.stdout.startswith("0 tests"):
            return Outcome("missing")
        return Outcome("crashes", f"status {done.returncode}: {done.stderr[-500:]}")


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def describe_run() -> dict[str, Any]:
    """Describe the run for the file of results.

    "-dirty" is added to the commit if code or tests differ from it. Files of results may
    differ, because they are being written.
    """
    commit = git("describe", "--always", "--abbrev=12")
    if git("status", "--porcelain", "--", *ABOUT):
        commit += "-dirty"
    return {
        "what": "whether the tests notice faults that are put into the C sources",
        "commit": commit,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"emulated device; {os.cpu_count()} {platform.machine()} cores, "
        f"Python {platform.python_version()}",
    }


def check_unmutated(tree: Tree, faults: list[Fault]) -> None:
    """Raise SystemExit if a test fails without the fault that names it. A test may be
    missing.
    """
    names = sorted({name for fault in faults for name in fault.tests})
    bad = {
        name: outcome
        for name, outcome in tree.run_tests(names).items()
        if outcome.how not in ("passes", "missing")
    }
    for name, outcome in bad.items():
        print(f"without any fault {outcome.how}: {name}\n{outcome.detail}")
    if bad:
        raise SystemExit(
            "these tests must pass without a fault before faults are tried"
        )


def judge(fault: Fault, outcomes: dict[str, Outcome]) -> str:
    """Return "killed" if each test ends as the fault says, else which tests did not."""
    wrong = [
        f"{name} {outcome.how}"
        for name, outcome in outcomes.items()
        if outcome.how != fault.how
    ]
    return "survived: " + "; ".join(wrong) if wrong else "killed"


def rows_kept(file: Path, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of faults that an earlier run killed at the same commit."""
    if not file.exists():
        return []
    earlier = json.loads(file.read_text())
    if earlier["commit"] != run["commit"] or earlier["commit"].endswith("-dirty"):
        return []
    tests = {fault.name: list(fault.tests) for fault in FAULTS}
    return [
        row
        for row in earlier["rows"]
        if row["result"] == "killed" and row["tests"] == tests.get(row["name"])
    ]


def write_rows(file: Path, run: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write the rows so far, in the order of faults.py."""
    places = {fault.name: place for place, fault in enumerate(FAULTS)}
    rows = sorted(rows, key=lambda row: places[row["name"]])
    killed = sum(row["result"] == "killed" for row in rows)
    summary = {"faults": len(rows), "killed": killed}
    text = json.dumps(run | summary | {"rows": rows}, indent=1)
    file.write_text(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults; all if left out")
    parser.add_argument(
        "--json", type=Path, help="write the outcome of each fault here"
    )
    parser.add_argument(
        "--find", nargs="+", metavar="TESTS", help="print which of these tests fail"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows of the file of --json whose faults were killed at this commit",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        metavar="SECONDS",
        help="how long a run of tests may take before it counts as one that hangs",
    )
    options = parser.parse_args()
    if options.resume and options.json is None:
        parser.error("--resume goes on with a file: add --json FILE")
    unknown = set(options.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    faults = [f for f in FAULTS if not options.names or f.name in options.names]
    for fault in faults:
        mutated(fault, (ROOT / fault.file).read_text())
    run = describe_run()
    rows = rows_kept(options.json, run) if options.resume else []
    kept = {row["name"] for row in rows}
    faults = [fault for fault in faults if fault.name not in kept]
    if kept:
        print(f"{len(kept)} were killed by an earlier run")
    with tempfile.TemporaryDirectory(prefix="cumem-mutants-") as folder:
        tree = Tree(Path(folder), options.limit)
        if options.find is None:
            check_unmutated(tree, faults)
        for fault in faults:
            began = time.monotonic()
            original = tree.put_in(fault)
            outcomes = tree.run_tests(options.find or fault.tests, not options.find)
            tree.take_out(fault, original)
            if options.find:
                failing = [name for name, o in outcomes.items() if o.how != "passes"]
                print(fault.name, *failing, sep="\n    ", flush=True)
                continue
            result = judge(fault, outcomes)
            seconds = round(time.monotonic() - began, 1)
            print(
                f"{result:9.9s} {seconds:6.1f} s  {fault.name}: {fault.what}",
                flush=True,
            )
            if result != "killed":
                print(f"    {result}")
            rows.append(
                {
                    "name": fault.name,
                    "file": fault.file,
                    "what": fault.what,
                    "tests": list(fault.tests),
                    "result": result,
                    "how": sorted({outcome.how for outcome in outcomes.values()}),
                    "seconds": seconds,
                }
            )
            if options.json:
                write_rows(options.json, run, rows)
    killed = sum(row["result"] == "killed" for row in rows)
    if options.find is None:
        print(f"{killed} of {len(rows)} killed")
    return 0 if killed == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
