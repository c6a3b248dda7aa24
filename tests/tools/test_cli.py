# SPDX-License-Identifier: Apache-2.0
"""Tests of the command line, mostly as users run it, in a process of its own.

They check what `python -m cumem` prints, its exit codes, and that no trouble, such as
Ctrl-C, a closed output or a missing GPU, ends in a traceback.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cumem
from cumem import info
from cumem.tools import bench, cli

# These tests fail if a wheel, or an older NumPy, lacks something that cumem needs.
pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]
EMULATED = {"CUMEM_BACKEND": "emulated", "CUMEM_EMULATED_DELAY_US": "50"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m cumem` on the emulated device, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "cumem", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | EMULATED | environment,
        timeout=120,
        check=False,
    )


def test_version_is_that_of_the_project_file() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.strip() == cumem.__version__
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{cumem.__version__}"' in project


def test_no_command_is_a_usage_error() -> None:
    done = run()
    assert done.returncode == 2
    assert "COMMAND" in done.stderr


def test_info_prints_versions_backend_devices_and_limits() -> None:
    done = run("info", CUMEM_EMULATED_DEVICES="2", CUMEM_EMULATED_DRIVER="12.4")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for part in (
        r"^cumem +" + re.escape(cumem.__version__),
        r"^CUDA runtime +\d+\.\d+ \(built in\)$",
        r"^oldest driver +CUDA 12\.0",
        r"^driver +CUDA 12\.4 \(emulated\)$",
        r"^backend +emulated: .+",
        r"^device 0 ",
        r"^device 1 ",
        r"^  copy engines +\d+ \(",
        r"^  managed memory +yes",
        r"^  RLIMIT_MEMLOCK +.+; the CUDA driver ignores it$",
        r"^  cgroup limit +\S+",
        r"^  NUMA node",
        r"^  memory +\S+ \S+ available of ",
    ):
        assert re.search(part, done.stdout, re.M), (part, done.stdout)


def test_no_device_at_all_is_reported_and_no_traceback() -> None:
    done = run("info", CUMEM_EMULATED_DEVICES="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^devices +none$", done.stdout, re.M)
    assert "driver" in done.stdout
    done = run("bench", "--quick", CUMEM_EMULATED_DEVICES="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cumem bench: there is no device 0; there are none\n"


def test_info_json_is_what_collect_gives(emulated, capsys) -> None:
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"] == info.collect()["versions"]
    assert [device["index"] for device in facts["devices"]] == [0, 1]


def test_info_on_a_real_gpu_names_it(runtime) -> None:
    text = info.render(info.collect())
    assert cumem.Device(0).name in text
    assert ("emulated" in text) == runtime.emulated


def test_info_says_why_there_is_no_gpu_and_does_not_warn() -> None:
    done = run("info", CUMEM_BACKEND="", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(r"^backend +emulated: .+", done.stdout, re.M)


def test_cuda_that_is_asked_for_and_missing_is_an_error_without_a_traceback() -> None:
    done = run("info", CUMEM_BACKEND="cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("cumem: cuda")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("command", ["info", "bench --quick --max-size 4KiB"])
def test_closed_output_is_treated_as_one_that_nobody_reads(
    command: str, closed: str
) -> None:
    done = subprocess.run(
        f'exec "{sys.executable}" -m cumem {command} {closed}',
        shell=True,
        capture_output=True,
        text=True,
        env=os.environ | EMULATED,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_wrong_environment_variable_is_a_usage_error() -> None:
    done = run("info", CUMEM_BACKEND="quantum")
    assert done.returncode == 2
    assert "CUMEM_BACKEND" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_runs_and_saves(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = run("bench", "--quick", "--max-size", "64KiB", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "host → device" in done.stdout
    assert "figures of emulation advise nothing" in done.stdout
    assert "use " not in done.stdout
    assert "±" not in done.stdout
    assert json.loads(path.read_text(encoding="utf-8"))["plan"]["quick"] is True


def test_bench_verbose_has_spreads_and_shares_of_the_ceiling() -> None:
    done = run("bench", "--quick", "--verbose", "--max-size", "4KiB")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "±" in done.stdout
    assert "% of" in done.stdout
    assert "use " not in done.stdout  # the device is emulated


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--max-size", "much"], "--max-size"),
        (["--max-size", "1KiB"], "smallest is 4 KiB"),
        (["--device", "3"], "there is no device 3"),
        (["--device", "-1"], "there is no device -1"),
    ],
)
def test_bench_with_a_wrong_argument_is_a_usage_error(
    arguments: list[str], part: str
) -> None:
    done = run("bench", "--quick", *arguments)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_failed_verification_is_exit_code_1(emulated, monkeypatch) -> None:
    monkeypatch.setattr(bench, "main", lambda options: 1)
    assert cli.main(["bench"]) == 1


def test_ctrl_c_ends_with_one_line() -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "cumem", "bench"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | EMULATED,
        # A shell lets its background jobs ignore SIGINT, and their children inherit that.
        # So the child sets the default handler again.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert "EMULATED" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted\n"


#: A program that gets Ctrl-C during an import, which swallows it.
SWALLOWS = """
import signal, sys
from cumem.tools import cli

class Swallows:  # it swallows Ctrl-C, as the set-up code of Cython's modules does
    def find_spec(self, name, path=None, target=None):
        if name == "cumem.tools.bench.cases":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pass

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Swallows())
sys.exit(cli.main(["bench", "--quick", "--max-size", "4KiB"]))
"""


def test_ctrl_c_inside_an_import_that_swallows_it_is_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWS],
        capture_output=True,
        text=True,
        env=os.environ | EMULATED,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_bench_imports_nothing_while_it_measures() -> None:
    code = (
        "import sys, cumem.tools.bench as b; before = set(sys.modules);"
        "b.main(b.Options(quick=True, max_nbytes=4096));"
        "late = set(sys.modules) - before; print(late, file=sys.stderr);"
        "sys.exit(any(n.startswith(('numpy', 'cumem')) for n in late))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | EMULATED,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_reader_that_leaves_causes_no_traceback() -> None:
    command = f"{sys.executable} -m cumem info | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env=os.environ | EMULATED,
        check=False,
    )
    assert done.stderr == ""


def test_fifo_for_results_is_not_opened_before_there_are_any(tmp_path: Path) -> None:
    path = tmp_path / "results"
    os.mkfifo(path)
    info.check_writable(str(path))  # opening the FIFO would wait for a reader
    assert path.is_fifo()
