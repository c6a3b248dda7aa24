# SPDX-License-Identifier: Apache-2.0
"""Let many threads make random calls of the whole package, and verify every byte.

    python torture.py [--seconds 60] [--rounds 4] [--threads 8] [--seed 1] [--faults]
                      [--largest 1048576] [--patience 60] [--libraries] [--json FILE]

Each thread owns memory of all kinds with known contents. After a call the thread compares
what was written, and the bytes around it, with NumPy's own result. It reads the memory at
its address without calling cumem, once the stream has been waited for in one of the
ways that CUDA has. Only for a copy in the background does it wait by the handle.

The main thread makes copies as well, which Ctrl-C may end at any moment, and it changes
limits, trims and shuts down. Threads fork, and each child reads the memory that it
inherited. The run fails after an exception that the call may not raise, a wrong byte, a
hang, or growth from round to round. The seed decides what each thread does, but not when.
After a shutdown() or an error its choices differ from run to run.

On a GPU the run uses up to 6 GiB of device memory, 768 MiB of managed and 4 GiB of pinned
memory, unless CUMEM_LIMIT_... or CUMEM_EMULATED_... of the environment say otherwise. With
--faults calls of the driver fail now and then, and with --libraries PyTorch and JAX are
used on the emulated device as well. The exit status is 0 if all was right, 1 if something
was wrong, and 3 for a hang.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import testing
from torture import rounds, watcher
from torture.settings import CUDA_ENVIRONMENT, EMULATED_ENVIRONMENT, MIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=4, help="4 or more")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--largest", type=int, default=MIB)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--libraries", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rounds < 4:
        parser.error("--rounds must be 4 or more")
    warnings.filterwarnings("ignore", ".*fork")  # Python warns of forks beside threads
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)
    watcher.have_malloc_give_back()
    for name, value in (EMULATED_ENVIRONMENT | CUDA_ENVIRONMENT).items():
        if name.startswith("CUMEM_EMULATED") or os.environ.get("CUMEM_BACKEND") == (
            "cuda"
        ):
            os.environ.setdefault(name, value)
    os.environ.setdefault("CUMEM_EMULATED_SEED", str(options.seed))
    if options.faults:
        testing.configure(faults=True)
    folder = Path(tempfile.mkdtemp(prefix="cumem-torture-"))
    try:
        result = rounds.run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    for failure in result["failures"]:
        print(f"WRONG, seed {options.seed}: {failure}", file=sys.stderr)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
