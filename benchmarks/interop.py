# SPDX-License-Identifier: Apache-2.0
"""Find out which functions of other libraries accept which kinds of buffers.

    python benchmarks/interop.py --json benchmarks/results/interop-h200.json
    python benchmarks/interop.py --render benchmarks/results/interop-h200.json

The first command tries all of them on a GPU. Without one it uses the emulated device, and
says so. Each library runs in a process of its own, so that a crash is a result and does not
end the run. The second command needs no GPU. It writes the table of docs/interop.md between
that page's markers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "interop.md"
BEGIN, END = "<!-- interop-table -->", "<!-- /interop-table -->"
COUNT = 1024
KINDS = (
    "ordinary",
    "pinned",
    "registered",
    "mapped",
    "mapped.as_device()",
    "managed",
    "managed.as_device()",
    "device",
)


@dataclass(frozen=True)
class Consumer:
    """How one library makes, reads and writes its arrays.

    Parameters
    ----------
    version : str
        The version of the library.
    entrances : dict
        The functions that make an array of the library from a buffer. The key is the call
        as a user writes it.
    address : callable
        A function that returns the address of an array's first element.
    read : callable or None
        A function that returns an array's values as a fresh NumPy array, or None if the
        library gives no access to them.
    write : callable or None
        A function that writes values into an array, or None if the library's arrays cannot
        be written.
    wait : callable
        A function that waits for all of the library's work.
    """

    version: str
    entrances: dict[str, Callable[[Any], Any]]
    address: Callable[[Any], int]
    read: Callable[[Any], Any] | None
    write: Callable[[Any, Any], object] | None
    wait: Callable[[], object]


# -- the libraries ---------------------------------------------------------------------


def numpy_consumer() -> Consumer:
    import numpy as np

    def write(array: Any, values: Any) -> None:
        array[...] = values

    return Consumer(
        np.__version__,
        {
            "np.asarray(buf)": np.asarray,
            "np.from_dlpack(buf)": np.from_dlpack,
            'np.from_dlpack(buf, device="cpu")': lambda b: np.from_dlpack(
                b, device="cpu"
            ),
            "np.frombuffer(buf)": lambda b: np.frombuffer(b, np.float32),
        },
        lambda array: int(array.__array_interface__["data"][0]),
        np.array,
        write,
        lambda: None,
    )


def cupy_consumer() -> Consumer:
    import cupy

    def write(array: Any, values: Any) -> None:
        array.set(values)

    return Consumer(
        cupy.__version__,
        {"cupy.asarray(buf)": cupy.asarray, "cupy.from_dlpack(buf)": cupy.from_dlpack},
        lambda array: int(array.data.ptr),
        cupy.asnumpy,
        write,
        lambda: cupy.cuda.Device().synchronize(),
    )


def torch_consumer() -> Consumer:
    import torch

    return Consumer(
        torch.__version__,
        {
            "torch.as_tensor(buf)": torch.as_tensor,
            'torch.as_tensor(buf, device="cuda")': lambda b: torch.as_tensor(
                b, device="cuda"
            ),
            "torch.from_dlpack(buf)": torch.from_dlpack,
            "torch.frombuffer(buf)": lambda b: torch.frombuffer(b, dtype=torch.float32),
            "torch.from_numpy(buf.numpy())": lambda b: torch.from_numpy(b.numpy()),
        },
        lambda tensor: int(tensor.data_ptr()),
        lambda tensor: tensor.cpu().numpy().copy(),
        lambda tensor, values: tensor.copy_(torch.from_numpy(values)),
        lambda: torch.cuda.synchronize() if torch.cuda.is_available() else None,
    )


def jax_consumer() -> Consumer:
    import jax
    import jax.dlpack
    import jax.numpy as jnp
    import numpy as np

    def wait() -> None:
        (jax.device_put(0.0) + 0).block_until_ready()

    return Consumer(
        jax.__version__,
        {
            "jnp.asarray(buf)": jnp.asarray,
            "jax.dlpack.from_dlpack(buf)": jax.dlpack.from_dlpack,
        },
        lambda array: int(array.unsafe_buffer_pointer()),
        np.array,
        None,  # its arrays are immutable
        wait,
    )


def numba_consumer() -> Consumer:
    import numba
    from numba import cuda

    return Consumer(
        numba.__version__,
        {"cuda.as_cuda_array(buf)": cuda.as_cuda_array},
        lambda array: int(array.__cuda_array_interface__["data"][0]),
        lambda array: array.copy_to_host(),
        lambda array, values: array.copy_to_device(values),
        cuda.synchronize,
    )


def cuda_core_consumer() -> Consumer:
    import importlib

    import cuda.core

    view: Any = None
    for place in ("cuda.core.utils", "cuda.core", "cuda.core.experimental.utils"):
        with contextlib.suppress(ImportError, AttributeError):
            view = view or importlib.import_module(place).StridedMemoryView
    if view is None:
        raise ImportError("this cuda.core has no StridedMemoryView")

    def enter(name: str) -> Callable[[Any], Any]:
        return lambda buf: getattr(view, name)(buf, stream_ptr=-1)

    names = ("from_any_interface", "from_dlpack", "from_cuda_array_interface")
    entrances = {
        f"StridedMemoryView.{name}(buf)": enter(name)
        for name in names
        if hasattr(view, name)
    }
    return Consumer(
        cuda.core.__version__,
        entrances,
        lambda found: int(found.ptr),
        None,  # a StridedMemoryView gives no access to the values
        None,
        lambda: None,
    )


CONSUMERS = {
    "NumPy": numpy_consumer,
    "CuPy": cupy_consumer,
    "PyTorch": torch_consumer,
    "JAX": jax_consumer,
    "Numba": numba_consumer,
    "cuda.core": cuda_core_consumer,
}


# -- trying ----------------------------------------------------------------------------


def own_pages(nbytes: int) -> Any:
    """Return an array of bytes that shares no page with other memory.

    The driver refuses a copy of an array that is only partly on page-locked pages. If a
    registered array shared a page with another one, copies of the other one could fail.
    """
    import numpy as np

    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


class Sample:
    """A buffer of one kind, whose values are written and read by cumem alone."""

    def __init__(self, kind: str) -> None:
        import numpy as np

        import cumem

        self.registration: cumem.types.Registration | None = None
        self.owner: Any = None
        self.as_device = kind.endswith(".as_device()")
        match kind.removesuffix(".as_device()"):
            case "ordinary":
                # Large arrays of NumPy begin 16 bytes after a multiple of 64. This
                # small one is placed in the same way, because its alignment may decide
                # whether a library copies it.
                memory = np.zeros(4 * COUNT + 128, np.uint8)
                begin = (16 - memory.ctypes.data) % 64
                array = memory[begin : begin + 4 * COUNT].view(np.float32)
                self.owner = cumem.asbuffer(array)
            case "pinned":
                self.owner = cumem.empty_pinned(COUNT, np.float32)
            case "registered":
                self.registration = cumem.register(
                    own_pages(4 * COUNT).view(np.float32)
                )
                self.owner = self.registration.buffer
            case "mapped":
                self.owner = cumem.empty_mapped(COUNT, np.float32)
            case "managed":
                self.owner = cumem.empty_managed(COUNT, np.float32)
            case _:
                self.owner = cumem.empty_device(COUNT, np.float32)
        self.buffer: Any = self.owner.as_device() if self.as_device else self.owner

    @property
    def addresses(self) -> set[int]:
        """Return the memory's addresses, since host and device may use different ones."""
        found = {self.owner.ptr, self.buffer.ptr}
        return found | {getattr(self.owner, "device_ptr", self.owner.ptr)}

    def write(self, values: Any) -> None:
        """Write values into the memory by cumem, and return when they are there."""
        import cumem

        if self.owner.kind == "device":
            cumem.copy(self.owner, values)
        else:
            cumem.current_device().synchronize()
            self.owner.numpy()[...] = values

    def read(self) -> Any:
        """Return the memory's values, which cumem reads."""
        import numpy as np

        import cumem

        out = np.empty(COUNT, np.float32)
        if self.owner.kind == "device":
            cumem.copy(out, self.owner)
        else:
            cumem.current_device().synchronize()
            out[...] = self.owner.numpy()
        return out


def attempt(
    consumer: Consumer, enter: Callable[[Any], Any], kind: str
) -> dict[str, Any]:
    """Give a buffer to one function of a library, and check the array that it returns."""
    import numpy as np

    generator = np.random.default_rng()
    first, ours, theirs = (generator.random(COUNT).astype(np.float32) for _ in range(3))
    sample = Sample(kind)
    sample.write(first)
    try:
        array = enter(sample.buffer)
        address = consumer.address(array)
    except Exception as error:  # the error is the result
        return {"outcome": "refused", "error": first_line(error)}
    consumer.wait()
    if address not in sample.addresses:
        if consumer.read is not None:
            found = np.asarray(consumer.read(array))
            if found.dtype != first.dtype or not np.array_equal(found.ravel(), first):
                text = f"{found.dtype} array of shape {found.shape}, not the values"
                return {"outcome": "nonsense", "error": text}
        return {"outcome": "copied", "same_address": False}
    result: dict[str, Any] = {"outcome": "no copy", "same_address": True}
    try:
        if consumer.write is not None:
            consumer.write(array, theirs)
            consumer.wait()
            result["their_write_seen"] = bool(np.array_equal(sample.read(), theirs))
    except Exception as error:  # for example because the array is read-only
        result["write_error"] = first_line(error)
    if consumer.read is not None:
        sample.write(ours)
        seen = consumer.read(array)  # only once, because JAX caches what it has read
        consumer.wait()
        result["our_write_seen"] = bool(np.array_equal(seen.ravel(), ours))
    return result


def first_line(error: Exception) -> str:
    """Return an exception's type and the first line of its text."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"


def try_consumer(name: str) -> dict[str, Any]:
    """Try all functions of one library in this process."""
    try:
        consumer = CONSUMERS[name]()
    except ImportError as error:
        return {"missing": f"{type(error).__name__}: {error}"}
    rows = [
        {"consumer": name, "entrance": entrance, "kind": kind}
        | attempt(consumer, enter, kind)
        for entrance, enter in consumer.entrances.items()
        for kind in KINDS
    ]
    pinned = pinned_pages() if name == "PyTorch" else []
    return {"version": consumer.version, "rows": rows, "is_pinned": pinned}


def pinned_pages() -> list[dict[str, Any]]:
    """Ask torch's is_pinned() at the first, a middle and the last page of buffers."""
    import numpy as np
    import torch

    import cumem

    page, pages = 4096, 257
    nbytes = page * pages
    whole = cumem.empty_pinned(nbytes, np.uint8)
    array = own_pages(nbytes + page)[100 : 100 + nbytes]  # begins within a page
    cases = {
        "pinned": whole,
        "write-combined": cumem.empty_pinned(nbytes, np.uint8, write_combined=True),
        "mapped": cumem.empty_mapped(nbytes, np.uint8),
        "sliced": whole[page + 7 : -page],
    }
    with cumem.register(array) as registered:
        cases |= {
            "registered": registered,
            "registered, sliced": registered[page + 7 :],
        }
        found = []
        for name, buffer in cases.items():
            tensor = torch.frombuffer(buffer, dtype=torch.uint8)
            places = {
                "first": 0,
                "middle": buffer.nbytes // 2,
                "last": buffer.nbytes - 1,
            }
            answers = {
                place: bool(tensor[offset : offset + 1].is_pinned())
                for place, offset in places.items()
            }
            found.append({"buffer": name} | answers)
            del tensor
        del buffer, registered, cases
    return found


def measure(names: list[str]) -> dict[str, Any]:
    """Try each library in a process of its own."""
    import cumem.info

    started = datetime.now(UTC)
    facts = cumem.info.collect()
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    results: dict[str, Any] = {
        "schema": 1,
        "started": started.isoformat(timespec="seconds"),
        "commit": cumem.info.commit(),
        "emulated": facts["backend"]["name"] == "emulated",
        **facts,
        "consumers": {},
        "rows": [],
        "is_pinned": [],
    }
    for name in names:
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            results["consumers"][name] = f"ended with {done.returncode}: {last}"
            print(
                f"{name}: ended with {done.returncode}\n{done.stderr}", file=sys.stderr
            )
            continue
        answer = json.loads(done.stdout.splitlines()[-1])
        results["consumers"][name] = answer.get("version", "not installed")
        results["rows"] += answer.get("rows", [])
        results["is_pinned"] += answer.get("is_pinned", [])
        print(f"{name}: {results['consumers'][name]}", file=sys.stderr)
    return results


# -- rendering -------------------------------------------------------------------------


def cell(row: dict[str, Any], notes: list[str]) -> str:
    """Return a cell of the table. An outcome that needs words gets a numbered note."""

    def note(text: str) -> str:
        if text not in notes:
            notes.append(text)
        return f"[{notes.index(text) + 1}]"

    if "error" in row:
        return f"{row['outcome']} {note(row['error'])}"
    if row["outcome"] == "copied":
        return "copied"
    text = "**no copy**"
    if "write_error" in row:
        text += f" {note(row['write_error'])}"
    for key, what in (("our", "our write"), ("their", "its write")):
        if row.get(f"{key}_write_seen") is False:
            text += f", {what} not seen"
    return text


def render(results: dict[str, Any]) -> str:
    """Turn measured results into the Markdown between the markers."""
    notes: list[str] = []
    device = results["devices"][0]["name"] if results["devices"] else "no device"
    versions = ", ".join(
        f"{name} {text}" for name, text in results["consumers"].items()
    )
    lines = [
        f"{device}, driver CUDA {results['versions']['driver']}, cumem "
        f"{results['versions']['cumem']}, Python {results['versions']['python']}; "
        f"{versions}.",
        "",
    ]
    if results["emulated"]:
        lines += ["**Emulated device: this is not what a GPU's libraries do.**", ""]
    lines.append("| entrance | " + " | ".join(f"`{kind}`" for kind in KINDS) + " |")
    lines.append("| --- " * (len(KINDS) + 1) + "|")
    rows = {(row["entrance"], row["kind"]): row for row in results["rows"]}
    for entrance in dict.fromkeys(row["entrance"] for row in results["rows"]):
        cells = [cell(rows[entrance, kind], notes) for kind in KINDS]
        lines.append(f"| `{entrance}` | " + " | ".join(cells) + " |")
    lines += [""] + [
        f"- [{number}] `{text.replace('`', chr(39))}`"
        for number, text in enumerate(notes, start=1)
    ]
    if results["is_pinned"]:
        asked = "the first, a middle and the last page of a buffer"
        lines += ["", f"PyTorch's `is_pinned()` for {asked}:", ""]
        lines += ["| buffer | first | middle | last |", "| --- | --- | --- | --- |"]
        for row in results["is_pinned"]:
            answers = " | ".join(
                "yes" if row[place] else "no" for place in ("first", "middle", "last")
            )
            lines.append(f"| {row['buffer']} | {answers} |")
    return "\n".join(lines)


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Put text between two marker lines of a page."""
    old = page.read_text(encoding="utf-8")
    head, rest = old.split(begin, 1)
    _, tail = rest.split(end, 1)
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")


def main() -> int:
    """Measure, render, or (for a child process) try one library."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument(
        "--render", metavar="FILE", help="write docs/interop.md from FILE"
    )
    parser.add_argument(
        "--only", choices=CONSUMERS, action="append", help="one library"
    )
    parser.add_argument("--one", choices=CONSUMERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(try_consumer(options.one)))
        return 0
    if options.render:
        results = json.loads(Path(options.render).read_text(encoding="utf-8"))
        write_between(PAGE, BEGIN, END, render(results))
        return 0
    results = measure(options.only or list(CONSUMERS))
    text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    if options.json:
        Path(options.json).write_text(text, encoding="utf-8")
    else:
        print(render(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
