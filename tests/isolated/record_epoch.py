# SPDX-License-Identifier: Apache-2.0
"""Record a training epoch of PyTorch, and check what the record says.

    python tests/isolated/record_epoch.py FOLDER [STEPS]

On a GPU cumem serves all of PyTorch's memory, so that device, pinned and staging memory are
in one timeline. The program checks that each allocation has the line and the tag that it
was made with. It keeps three buffers on purpose, and checks that they are found as a leak.
Every second batch is in page-locked memory. The record is saved in FOLDER in every format.
With 22,600 steps it has a million events. Without a GPU only the batches are recorded.
"""

from __future__ import annotations

import linecache
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import cumem
import cumem.integrations.torch as integration
from cumem.recording.record import FORMATS

BATCH, WIDTH = 256, 1024


def main(folder: Path, steps: int = 30) -> None:
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        integration.replace_allocator()
    device = "cuda" if has_gpu else "cpu"
    rng = np.random.default_rng(1)
    left = []
    with cumem.record(max_entries=max(1_000_000, 64 * steps)) as rec:
        with cumem.tag("model"):
            layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10)]
            model = nn.Sequential(*layers).to(device)
            optimizer = torch.optim.AdamW(model.parameters())
        with cumem.tag("data"):
            pinned = cumem.empty_pinned((15, BATCH, WIDTH), "f4")
        rng.random(out=pinned.numpy(), dtype="f4")
        ordinary = rng.random((BATCH, WIDTH), dtype="f4")
        batches = (
            ordinary if step % 2 else pinned[step // 2 % 15] for step in range(steps)
        )
        with cumem.tag("epoch"):
            for step, batch in enumerate(cumem.prefetch(batches, depth=2)):
                x = torch.from_dlpack(batch) if has_gpu else torch.ones(BATCH, WIDTH)
                with cumem.tag("forward"):
                    loss = model(x).square().mean()
                with cumem.tag("backward"):
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step in (0, steps // 3, steps // 2):
                    left.append(cumem.empty_pinned(5000, "u1"))  # the leak
        with cumem.tag("upload"):
            cumem.copy(cumem.empty_device(64 << 20, "u1"), np.ones(64 << 20, "u1"))
        del pinned, batch, batches
    print(rec.summary(), rec.top(), rec.top("tag"), rec.peak(), rec.leaks(), sep="\n\n")
    kinds = {kind.name for kind in rec.summary().kinds}
    assert kinds >= {"device", "pinned", "staging"}, kinds
    found = [g for g in rec.leaks().groups if g.living_count == 3]
    names = [g.name.rpartition(" (")[0].rpartition(":") for g in found]
    lines = [linecache.getline(name, int(line)) for name, _, line in names]
    assert any("# the leak" in line for line in lines), names
    tags = {group.name for group in rec.top("tag").groups if group.count}
    assert {"epoch", "upload"} <= tags, tags
    if has_gpu:
        assert {"model", "epoch/forward"} <= tags, tags
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, method in FORMATS.items():
        try:
            getattr(rec, method)(folder / f"epoch{suffix}")
        except ModuleNotFoundError as error:
            print(f"no {suffix}: {error}")
    again = cumem.Record.load(folder / "epoch.npz")
    assert again.summary() == rec.summary()
    print("ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
