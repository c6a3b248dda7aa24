# SPDX-License-Identifier: Apache-2.0
"""Time the first load of safetensors files in this process, and print it as JSON.

    python benchmarks/first_load.py "cumem, torch" a.safetensors b.safetensors

`safetensors_files.py` starts this program several times, since a process has only one
first load. The imports of the libraries and the creation of the driver's context are timed
separately, because every program pays for these two steps, whatever loads its files. The
time of the load includes everything else, such as making device memory, page-locked memory
and threads.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from typing import Any

LOADERS = ("cumem", "cumem, torch", "safetensors.torch")


def main() -> None:
    """Load the files once and print the seconds of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loader", choices=LOADERS)
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    with_torch = "torch" in options.loader
    steps = [time.perf_counter()]
    module = importlib.import_module(options.loader.partition(",")[0])
    torch: Any = importlib.import_module("torch") if with_torch else None
    steps.append(time.perf_counter())
    if with_torch:
        torch.zeros(1, device="cuda")
        wait = torch.cuda.synchronize
    else:
        module.empty(1)
        wait = module.current_device().synchronize
    wait()
    steps.append(time.perf_counter())
    if options.loader == "safetensors.torch":
        loaded = [module.load_file(file, device="cuda:0") for file in options.files]
    else:
        framework = "torch" if with_torch else None
        loaded = module.load_safetensors(options.files, framework=framework)
    wait()
    steps.append(time.perf_counter())
    names = ("import", "context", "load")
    pairs = zip(names, steps, steps[1:], strict=False)
    print(json.dumps({name: after - before for name, before, after in pairs}))
    del loaded


if __name__ == "__main__":
    main()
