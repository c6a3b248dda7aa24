# SPDX-License-Identifier: Apache-2.0
"""Transfers that are under way when the interpreter ends or the process forks.

Programs start long transfers and end in several ways, without an error. The last test
is a short run of the stress test of transfers.
"""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
from support import programs, session

import cumem

# Most of these tests start separate programs, whose results no version of Python changes.
pytestmark = pytest.mark.any_python

#: Each program begins with transfers between many kinds of memory.
START = """
import numpy as np, cumem, sys, threading
kinds = ("pinned", "managed", "device")
targets = [cumem.empty(20 << 20, "u1", kind) for kind in kinds] + [np.zeros(20 << 20, "u1")]
sources = [np.ones(40 << 20, "u1")[::2], cumem.zeros(20 << 20, "u1", "device")]
handles = [cumem.copy_async(t, s) for t in targets for s in sources for _ in range(3)]
stream = cumem.Stream()
handles += [cumem.copy_async(t, s, stream=stream) for t in targets for s in sources]
"""

#: The program then does this last, while these transfers are under way.
ENDS = {
    "at once": "",
    "handles dropped": "del handles, targets, sources, stream",
    "some cancelled": "[handle.cancel() for handle in handles]",
    "a thread waits": """
def wait():
    for handle in handles:
        handle.wait()
threading.Thread(target=wait, daemon=True).start()
""",
    "a loop waits": """
import asyncio
async def wait(handle):
    await handle
async def main():
    tasks = [asyncio.create_task(wait(handle)) for handle in handles]
    await asyncio.sleep(0)
asyncio.run(main())
""",
    "in an exit function": """
import atexit
atexit.register(lambda: cumem.copy_async(targets[0], sources[0]))
""",
    "after shutdown": "cumem.shutdown(); assert all(h.done for h in handles)",
    "with an error": "sys.exit(3)",
    "kept by a cycle": "cycle = [handles]; cycle.append(cycle); del handles, targets",
}


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return programs.run("-X", "faulthandler", "-W", "error", "-c", code, **environment)


@pytest.mark.parametrize("end", ENDS)
def test_interpreter_ends_with_transfers_under_way(end) -> None:
    done = run(START + ENDS[end])
    assert done.stderr == ""
    assert done.returncode == (3 if end == "with an error" else 0)


@pytest.mark.hooks
def test_interpreter_reports_failures_that_nobody_read() -> None:
    code = """
from support import testing
import numpy as np, cumem
testing.configure(backend="emulated", faults=True)
target = cumem.zeros(64, "u1", "device")
testing.plan_fault("copy_async", 1, 999, True)
handle = cumem.copy_async(target, np.zeros(128, "u1")[::2])
while not handle.done:
    pass
"""
    done = run(code)
    assert "cudaMemcpyAsync" in done.stderr
    assert done.returncode == 0


def test_child_of_a_process_with_transfers_ends_in_peace() -> None:
    code = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if child != 0:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for handle in handles:
        handle.wait()
"""
    done = run(START + code)  # The child ends as any interpreter does.
    assert done.stderr == ""
    assert done.returncode == 0


def test_child_sees_transfers_as_they_were(emulated) -> None:
    stream = cumem.Stream()
    source, target = cumem.full(5000, 3, "u1", "pinned"), np.zeros(5000, "u1")
    other = cumem.full(5000, 7, "u1", "device")
    cumem.Device(0).synchronize()
    with session.gate(stream), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        cumem.copy_async(source, other, stream=stream)
        waiting = cumem.copy_async(target, source)
        running = cumem.copy_async(other, other[::-1], stream=stream)
        child = os.fork()
        if child == 0:
            try:
                for transfer in (waiting, running):
                    assert not transfer.cancel()
                    assert not transfer.cancelled
                    assert transfer.progress == 0
                    assert transfer.nbytes == 5000
                    with pytest.raises(RuntimeError, match="forked child"):
                        transfer.wait(progress=print)
                del waiting, running, transfer
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not waiting.done  # The parent's transfers go on.
    waiting.wait()
    running.wait()
    assert (target == 7).all()


@pytest.mark.hooks
@pytest.mark.parametrize("faults", [False, True])
def test_stress_of_transfers_in_short(tmp_path: Path, faults) -> None:
    script = Path(__file__).parents[1] / "isolated" / "stress_transfers.py"
    path = tmp_path / "result.json"
    options = ["--seconds", "2", "--largest", "1000000", "--json", str(path)]
    done = programs.run(str(script), *options, *["--faults"][: int(faults)])
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["copies"]["done"] > 0
    assert result["wrong"] == []
    # The emulated device keeps no memory for itself, so its count is exact.
    assert len(set(result["free_nbytes_after_each_round"])) == 1
