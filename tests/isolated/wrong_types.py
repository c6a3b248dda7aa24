# SPDX-License-Identifier: Apache-2.0
"""Call every callable of the extension with arguments of wrong types.

    python tests/isolated/wrong_types.py PART PARTS FILE FOLDER

C casts its arguments to a Buffer, a Pool or a stream. If it does so without checking the
type, it reads memory that holds something else. If it uses a number as an index without
checking it, it reads beyond an array. Private functions are called as well, because the
package may pass them other arguments one day. Each call is written into FILE before it is
made, since after a crash nothing can be written. Files are made in FOLDER.

The callables are divided into PARTS parts, and this process tries part number PART.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import faulthandler
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cumem
from cumem import _core

Good = dict[str, Any]
Parameters = list[tuple[str, str]]  # name and annotation of each


#: Functions that are not called, each with the reason.
SKIPPED = {
    "_raw_copy": "copies between the addresses that it is given",
    "_at_exit": "nothing can be used after it",
}


#: After a call of one of these functions, what it changed in the process is put back.
CHANGES_THE_PROCESS = (
    *("_set_pool_type", "_recorder_open", "_numpy_enable", "_numpy_enter"),
    *("_hold_stream", "_limit"),
)


#: The limits on memory of the host and of device 0, by kind.
LIMITS = {kind: _core._limit(kind, 0) for kind in ("pinned", "managed", "device")}
#: A descriptor for functions that read or write a file.
NOWHERE = os.open(os.devnull, os.O_RDWR)


class Odd:
    """An object with a length and an index, and without any other meaning."""

    def __index__(self) -> int:
        return 3

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> object:
        raise IndexError

    def __getattr__(self, name: str) -> object:
        raise AttributeError(name)


class Closing:
    """An object that shuts cumem down when it is read as a number."""

    def __index__(self) -> int:
        with contextlib.suppress(RuntimeError):
            cumem.shutdown()
        return 0


def fresh() -> Good:
    """Make a good value of each sort. A call may have closed the values before."""
    array = np.arange(24.0)
    stream = cumem.Stream()
    found = {
        "array": array,
        "dtype": array.dtype,
        "pinned": cumem.empty_pinned(24),
        "managed": cumem.empty_managed(24),
        "device": cumem.empty_device(24),
        "host": cumem.asbuffer(array),
        "pool": cumem.Pool("pinned"),
        "stream": stream,
        "event": cumem.Event(),
        "transfer": cumem.copy_async(cumem.empty_device(24), array),
        "gpu": cumem.Device(0),
        "capsule": array.__dlpack__(),
        "handler": _core._numpy_handler(1, None),
        "closed": cumem.empty_pinned(8),
        "type": cumem.Pool,
        "plan": cumem.RowPlan(cumem.empty_device(24), array, [2, 1]),
    }
    found["transfer"].wait()
    found["closed"].free()
    return found


#: Values of ordinary types. For any parameter, most of these values are wrong.
PLAIN = {
    "none": None,
    "zero": 0,
    "negative": -7,
    "some": 77,
    "huge": 2**70,
    "most": 2**63 - 1,
    "float": 0.5,
    "text": "pinned",
    "word": "x",
    "bytes": b"abc",
    "empty": (),
    "tuple": (1, 2, 3),
    "tuples": ((0, None),),
    "long": (1,) * 200,
    "list": [1, 2],
    "dict": {},
    "flag": True,
    "call": print,
    "odd": Odd(),
    "closing": Closing(),
    "object": object(),
}


def plausible(name: str, annotation: str, good: Good) -> object:
    """Return a value that suits a parameter, as far as its name and annotation show."""
    by_name = {
        "device": 0,
        "home": 0,
        "kind": "pinned",
        "shape": (24,),
        "strides": (8,),
        "order": "C",
        "dtype": good["dtype"],
        "stream": None,
        "fn": print,
        "open": lambda: NOWHERE,
        "offsets": (0,),
        "memories": (good["pinned"],),
        "offset": 0,
        "buffers": (good["managed"],),
        "dsts": (good["pinned"],),
        "srcs": (good["array"],),
        "src": good["array"],
        "dst": good["pinned"],
        "ends": (good["pinned"],),
        "pairs": [(good["pinned"], good["array"])],
        "obj": good["array"],
        "memory": good["array"],
        "like": None,
        "flags": None,
        "pool": None,
        "casting": None,
        "progress": None,
        "max_sms": 4,
        "after": (),
        "name": "device",
        "new": None,
        "max_version": None,
        "dl_device": None,
        "handler": good["handler"],
        "cls": good["type"],
        "capsule": good["capsule"],
        "args": (),
        "function": print,
        "tags": None,
        "callback": None,
        "least_nbytes": 100,
        "capacity": 100,
        "keep": 0,
        "what": 3,
        "element": np.ones(()),
        "value": 1,
        "held": good["capsule"],
        "number": 1,
    }
    if name in by_name:
        return by_name[name]
    if "Buffer" in annotation:
        return good["managed" if "Managed" in annotation else "pinned"]
    for word, value in (
        ("bool", False),
        ("int", 1),
        ("str", "x"),
        ("Stream", good["stream"]),
        ("Event", good["event"]),
        ("Callable", print),
        ("tuple", ()),
    ):
        if word in annotation:
            return value
    return good["pinned"]


def parameters(node: ast.FunctionDef, is_method: bool) -> Parameters:
    """Return the positional parameters of a function of the stub, without `self`."""
    given = node.args.posonlyargs + node.args.args
    static = {ast.unparse(each) for each in node.decorator_list}
    return [
        (each.arg, ast.unparse(each.annotation) if each.annotation else "")
        for each in given[is_method and "staticmethod" not in static :]
    ]


def callables() -> Iterator[tuple[str | None, str, Parameters]]:
    """Yield each callable of the stub: its owner, its name and its parameters."""
    tree = ast.parse(Path(cumem.__file__).with_name("_core.pyi").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and hasattr(_core, node.name):
            yield None, node.name, parameters(node, False)
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(each, ast.FunctionDef):
                yield node.name, each.name, parameters(each, True)
    # The stub leaves these methods out.
    for name in ("_elapsed", "_make_bell", "_notify", "_call_back", "_stop"):
        for kind in ("Event", "Transfer"):
            if hasattr(getattr(_core, kind), name):
                yield kind, name, [("other", "")]


#: Which of the good values have the methods of a class.
OWNERS = {
    "Buffer": ("pinned", "device", "host", "closed"),
    "PinnedBuffer": ("pinned",),
    "MappedBuffer": (),
    "ManagedBuffer": ("managed",),
    "DeviceBuffer": ("device",),
    "HostBuffer": ("host",),
    "Stream": ("stream",),
    "Event": ("event",),
    "Transfer": ("transfer",),
    "RowPlan": ("plan",),
    "_Pool": ("pool",),
    "Pool": ("pool",),
}


def arguments(params: Parameters, good: Good) -> Iterator[list[object]]:
    """Yield lists of arguments. In the first all are good, and in the next ones each in
    turn is replaced by every other value.

    After these come lists that are too short, too long, or all of one value.
    """
    right = [plausible(name, note, good) for name, note in params]
    yield right
    for i in range(len(right)):
        for value in (*PLAIN.values(), *good.values()):
            yield [*right[:i], value, *right[i + 1 :]]
    for value in PLAIN.values():
        yield [value] * len(right)
    for count in range(12):
        yield [None] * count
    yield [*right, None]


def targets(owner: str | None, name: str, good: Good) -> list[Callable[..., object]]:
    """Return the function, or the methods of that name of all good values of the class."""
    if owner is None:
        return [getattr(_core, name)]
    found = []
    for key in OWNERS.get(owner, ()):
        with contextlib.suppress(Exception):
            found.append(getattr(good[key], name))
    kind = getattr(_core, owner, None)
    if kind is not None and hasattr(kind, name):
        found.append(getattr(kind, name))  # unbound, so that `self` is wrong as well
    return found


def call(
    owner: str | None, name: str, params: Parameters, last: int, good: Good
) -> tuple[int, Good]:
    """Call one callable in all ways. Returns the number of calls, and good values."""
    tried = 0
    for i in range(len(targets(owner, name, good))):
        for args in arguments(params, good):
            if good["pool"].closed or good["pinned"].closed or good["stream"].closed:
                good = fresh()
            bound = targets(owner, name, good)
            if i >= len(bound):
                continue
            shown = ", ".join(type(each).__name__ for each in args)
            line = f"{owner}.{name}({shown}) {str(args)[:150]}"
            os.pwrite(last, line.encode().ljust(400), 0)
            tried += 1
            answer = None
            with contextlib.suppress(Exception):
                # A `with` block that is entered stays in force only in this context.
                answer = contextvars.copy_context().run(bound[i], *args)
            if isinstance(answer, cumem.Buffer):
                assert isinstance(answer.dtype, np.dtype), line
            if name in CHANGES_THE_PROCESS:
                _core._set_pool_type(cumem.Pool)
                _core._recorder_close()
                _core._numpy_enable(None)
                for kind, limit in LIMITS.items():
                    _core._limit(kind, 0, limit)
                with contextlib.suppress(Exception):
                    _core._release_stream(*args)  # work on a held stream never ends
    return tried, good


def main() -> None:
    part, parts = int(sys.argv[1]), int(sys.argv[2])
    last = os.open(sys.argv[3], os.O_RDWR)
    os.chdir(sys.argv[4])
    faulthandler.enable()
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None
    os.dup2(os.open("said", os.O_CREAT | os.O_WRONLY), 1)  # takes what calls print
    tried = 0
    good = fresh()
    for at, (owner, name, params) in enumerate(callables()):
        if at % parts == part and name not in SKIPPED:
            more, good = call(owner, name, params, last, good)
            tried += more
    sys.stderr.write(f"tried {tried}\n")


if __name__ == "__main__":
    main()
