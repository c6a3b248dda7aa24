# SPDX-License-Identifier: Apache-2.0
"""Write ptx.h from the PTX beside this file: a macro CM_PTX_name for each name.ptx, its
text as a C string, without comments. `python csrc/transfer/device/ptx.py ptx.h`
"""

import os
import sys
from pathlib import Path


def text(path: Path) -> list[str]:
    lines = [line.split("//")[0].rstrip() for line in path.read_text().splitlines()]
    return [line for line in lines if line]


def write(header: Path) -> None:
    lines = ["/* Made by ptx.py. */"]
    for path in sorted(Path(__file__).parent.glob("*.ptx")):
        quoted = [f'"{line}\\n"' for line in text(path)]
        lines.append(" \\\n    ".join([f"#define CM_PTX_{path.stem}", *quoted]))
    made = "\n".join(lines) + "\n"
    if not header.exists() or header.read_text() != made:
        header.parent.mkdir(parents=True, exist_ok=True)
        new = header.with_suffix(f".{os.getpid()}")
        new.write_text(made)
        new.replace(header)  # others may read it now


if __name__ == "__main__":
    write(Path(sys.argv[1]))
