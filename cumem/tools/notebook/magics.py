# SPDX-License-Identifier: Apache-2.0
"""Adds ``%cumem``, ``%%cumem`` and displays of memory errors to IPython."""

from __future__ import annotations

import ast
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import CO_COROUTINE
from types import CodeType
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from IPython.core.error import UsageError
from IPython.display import display

from cumem import _core
from cumem.base.errors import OutOfMemoryError
from cumem.base.kinds import KINDS
from cumem.base.units import format_count, format_nbytes, format_table
from cumem.pools.statistics import Stats, stats
from cumem.recording.events import Log
from cumem.recording.live_buffers import live
from cumem.recording.record import record
from cumem.tools.notebook.cell import Report
from cumem.tools.notebook.html import Raw, escape, in_cell, key, page, table
from cumem.tools.notebook.objects import statistics

_PERIOD_S: Final = 1.0  #: the time between two updates while a cell runs
_MOST_BUFFERS: Final = 10
_USAGE: Final = "%cumem [once | off], or %%cumem above a cell"


class _Shell(Protocol):
    """The members of IPython's shell that this module uses."""

    user_ns: dict[str, Any]
    user_ns_hidden: dict[str, Any]
    events: Any
    compile: Any
    displayhook: Any
    input_transformers_cleanup: list[Any]
    should_run_async: Callable[..., bool]
    transform_cell: Callable[[str], str]
    transform_ast: Callable[[Any], Any]


def load(shell: Any) -> None:
    """Add the magics, and show a display after each OutOfMemoryError."""
    if _loaded(shell) is None:
        magics = _Magics(shell)
        shell.register_magic_function(magics.cumem, "line_cell", "cumem")
        shell.events.register("pre_run_cell", magics.begin_cell)
        shell.events.register("post_run_cell", magics.end_cell)
        shell.input_transformers_cleanup.append(magics.let_await)


def unload(shell: Any) -> None:
    """Remove everything that `load` added."""
    magics = _loaded(shell)
    if magics is not None:
        magics.forget_table()
        shell.events.unregister("pre_run_cell", magics.begin_cell)
        shell.events.unregister("post_run_cell", magics.end_cell)
        shell.input_transformers_cleanup.remove(magics.let_await)
        for sort in shell.magics_manager.magics.values():
            sort.pop("cumem", None)


def _loaded(shell: Any) -> _Magics | None:
    function = shell.magics_manager.magics["line"].get("cumem")
    return getattr(function, "__self__", None)


class _Magics:
    """The magics ``%cumem`` and ``%%cumem`` of one shell."""

    def __init__(self, shell: _Shell) -> None:
        self._shell = shell
        self._table: Any = None  #: the handle of the display that is kept up to date
        self._shown = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    def cumem(self, line: str, cell: str | None = None) -> Any:
        """Show what memory is in use, or what a cell does with it.

        ``%cumem`` shows pools, limits and the largest buffers that are alive. The table is
        updated every second while a cell runs and after each cell, until the next
        ``%cumem`` or ``%cumem off``. ``%cumem once`` shows a table that is not updated.

        ``%%cumem`` above a cell runs the cell and shows its peaks, what it left alive, its
        copies and a timeline. The value of the last line is shown as usual.
        """
        __tracebackhide__ = True
        word = line.strip()
        if cell is not None:
            if word:
                raise UsageError(f"%%cumem takes no words, not {word!r}: {_USAGE}")
            return self._run(cell)
        if word not in ("", "once", "off"):
            raise UsageError(f"%cumem {word}: no such word; {_USAGE}")
        self.forget_table()
        if word != "off":
            shown = Overview(self._shell)
            # A terminal cannot update a display, but prints the new one below it.
            keeps_up = word == "" and getattr(self._shell, "kernel", None) is not None
            handle = display(shown, display_id=keeps_up)
            with self._lock:
                self._table, self._shown = handle, shown.key
        return None

    # -- the table that is kept up to date -----------------------------------------

    def forget_table(self) -> None:
        """Stop updating the table that is shown."""
        with self._lock:
            self._table = None

    def begin_cell(self, *_: object) -> None:
        """Start updating the table every second. IPython calls this before each cell."""
        if self._table is None:
            return
        self._ended.clear()
        self._watcher = threading.Thread(
            target=self._watch, name="cumem-notebook", daemon=True
        )
        self._watcher.start()

    def _watch(self) -> None:
        period = _PERIOD_S
        while not self._ended.wait(period):
            began = time.perf_counter()
            self._update()
            # An update takes long if a record runs, because `live` reads all of it. With
            # this period updates take at most a fiftieth of the time.
            spent = time.perf_counter() - began
            period = max(_PERIOD_S, 50 * spent)

    def end_cell(self, result: Any) -> None:
        """Update the table, and show a display if the cell ended in an OutOfMemoryError.

        IPython calls this after each cell.
        """
        self._ended.set()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.join()
        self._update()
        error = getattr(result, "error_in_exec", None)
        if isinstance(error, OutOfMemoryError):
            display({"text/html": error._repr_html_()}, raw=True)

    def _update(self) -> None:
        with self._lock:
            if self._table is None:
                return
            now = Overview(self._shell)
            if now.key != self._shown:
                self._shown = now.key
                self._table.update(now)

    # -- a cell --------------------------------------------------------------------

    def _run(self, cell: str) -> Any:
        __tracebackhide__ = True  # so that IPython leaves these frames out
        codes, names = _compile(self._shell, cell), self._shell.user_ns
        if any(map(_awaits, codes)):
            raise UsageError(
                "%%cumem measures a cell that awaits only if it is the first line of the "
                "cell and %autoawait is on"
            )
        value = None
        with _Measured(self._shell):
            for code in codes:
                value = eval(code, names)
        return value

    async def run_awaiting(self, cell: str) -> Any:
        """Run a cell below ``%%cumem`` that awaits, in the event loop of the notebook."""
        __tracebackhide__ = True
        codes, names = _compile(self._shell, cell), self._shell.user_ns
        value = None
        with _Measured(self._shell):
            for code in codes:
                value = eval(code, names)
                if _awaits(code):
                    value = await value
        return value

    def let_await(self, lines: list[str]) -> list[str]:
        """Rewrite a cell that has ``%%cumem`` and awaits, into a call that is awaited.

        The magic itself cannot run such a cell, because IPython does not await the result
        of a magic.
        """
        if not lines or lines[0].rstrip() != "%%cumem":
            return lines
        cell = "".join(lines[1:])
        code = self._shell.transform_cell(cell)
        if not self._shell.should_run_async(cell, transformed_cell=code):
            return lines
        me = "get_ipython().find_cell_magic('cumem').__self__"
        return [f"await {me}.run_awaiting({cell!r})\n"]

    # IPython calls functions without side effects even while a cell is being typed.
    let_await.has_side_effects = True  # type: ignore[attr-defined]


# -- running a cell --------------------------------------------------------------------


def _compile(shell: _Shell, cell: str) -> list[CodeType]:
    """Compile a cell, with a last expression whose value is shown as a separate part."""
    # Tracebacks count lines from the top of the cell. So empty lines take the place of the
    # magic's line and of the blank ones below it.
    above = next((i for i, line in enumerate(cell.splitlines(), 1) if line.strip()), 1)
    source = "\n" * above + shell.transform_cell(cell)
    name = shell.compile.cache(source, number(shell), raw_code=source)
    tree = shell.transform_ast(ast.parse(source, name))
    parts: list[tuple[ast.AST, str]] = [(tree, "exec")]
    silent = shell.displayhook.semicolon_at_end_of_expression(cell)
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not silent:
        parts.append((ast.Expression(tree.body.pop().value), "eval"))
    with shell.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
        return [shell.compile(part, name, mode) for part, mode in parts]


def _awaits(code: CodeType) -> bool:
    return bool(code.co_flags & CO_COROUTINE)


class _Measured:
    """Records what a cell does, and shows it when the cell ends or fails."""

    def __init__(self, shell: _Shell) -> None:
        self._shell = shell
        self._record = record(stacks=True)

    def __enter__(self) -> None:
        self._record.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._record.__exit__(*raised)
        log: Log = self._record.log
        display(Report(log, "this cell", Holders(self._shell).at))


def number(shell: _Shell) -> int:
    """Return the number of the cell that is running, or of the last one that ran."""
    return len(shell.user_ns.get("In", ())) - 1


# -- which variables hold memory -------------------------------------------------------


def buffer_of(value: object) -> _core.Buffer | None:
    """Return `value` if it is a buffer, the buffer that it is a view of, or None."""
    for _ in range(32):
        if isinstance(value, _core.Buffer):
            return value
        if isinstance(value, np.ndarray):
            value = value.base
        elif isinstance(value, memoryview):
            value = value.obj
        else:
            break
    return None


def _named(names: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield each variable, and the items of those that are lists, tuples or dicts."""
    for name, value in list(names.items()):
        yield name, value
        # isinstance() would run code of the value if it is a proxy, and type() does not.
        if issubclass(type(value), dict):
            inner: Iterable[tuple[Any, Any]] = list(dict.items(value))[:1000]
        elif issubclass(type(value), (list, tuple)):
            inner = enumerate(value[:1000])
        else:
            continue
        for index, each in inner:
            yield f"{name}[{index!r}]", each


class Holders:
    """The buffers that a notebook's variables hold, and its history in ``Out``."""

    def __init__(self, shell: _Shell) -> None:
        self.found: dict[tuple[str, int], tuple[_core.Buffer, list[str]]] = {}
        hidden = shell.user_ns_hidden
        for name, value in _named(shell.user_ns):
            base = name.partition("[")[0]
            history = base[:1] == "_" and not base.strip("_0123456789i")
            if base != "Out" and (base in hidden or history):
                continue  # such as _ and _3, whose values are in Out as well
            # Another thread may close a buffer meanwhile, and a proxy may raise anything.
            with contextlib.suppress(Exception):
                buf = buffer_of(value)
                while buf is not None and isinstance(buf.base, _core.Buffer):
                    buf = buf.base
                if buf is not None and buf.nbytes:
                    place = buf.kind, buf._address
                    self.found.setdefault(place, (buf, []))[1].append(name)

    def at(self, address: int) -> str:
        """Return the variables whose buffers contain this address, or ``""``."""
        found = [
            names
            for place, (_, names) in self.found.items()
            if self._has(place, address)
        ]
        names = [name for each in found for name in each]
        return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")

    def buffer_at(self, address: int) -> _core.Buffer | None:
        """Return the first buffer that contains this address, or None."""
        each = (b for place, (b, _) in self.found.items() if self._has(place, address))
        return next(each, None)

    def _has(self, place: tuple[str, int], address: int) -> bool:
        return place[1] <= address < place[1] + self.found[place][0].nbytes


class _Alive(NamedTuple):
    kind: str
    device: int | None
    address: int
    nbytes: int
    line: str | None = None


def _alive() -> list[_Alive]:
    """Return the memory that is in use, without staging, the largest piece first."""
    found = [
        _Alive(each.kind, each.device, each.address, each.requested_nbytes, each.line)
        for each in live().buffers
        if each.kind != "staging"
    ]
    return sorted(found, key=lambda each: -each.nbytes)


def _row(holders: Holders, each: _Alive) -> list[str]:
    """Make a row of the table of buffers."""
    buf = holders.buffer_at(each.address)
    return [
        holders.at(each.address) or "-",
        each.kind,
        "-" if buf is None else str(buf.shape),
        "-" if buf is None else str(buf.dtype),
        "-" if each.device is None else str(each.device),
        format_nbytes(each.nbytes),
        in_cell(each.line).rpartition("/")[2] if each.line else "-",
    ]


class Overview:
    """The display of ``%cumem``: pools, limits, and the largest buffers."""

    def __init__(self, shell: _Shell) -> None:
        self.stats: Stats = stats()
        self._after = f"In[{number(shell)}]"
        self._at = time.strftime("%H:%M:%S")
        holders = Holders(shell)
        found = _alive()
        self._rows = [_row(holders, each) for each in found[:_MOST_BUFFERS]]
        self._columns = list(self._BUFFERS)
        if all(row[-1] == "-" for row in self._rows):  # no record knows their lines
            self._columns.pop()
            self._rows = [row[:-1] for row in self._rows]
        self._more = len(found) - len(self._rows)
        self._limits = [
            [kind, device, "none" if nbytes is None else format_nbytes(nbytes), used]
            for kind, device, nbytes, used in _limits(self.stats)
        ]
        #: A text that changes whenever the display would change.
        self.key: str = repr((self.stats, self._rows, self._limits))

    _BUFFERS: Final = (
        *("variables", "kind", "shape", "dtype", "device", "size", "allocated by"),
    )
    _LIMITS: Final = ("limit of", "device", "at most", "held")

    def _note(self) -> str:
        more = (
            f"and {format_count(self._more, 'more buffer')}; " if self._more > 0 else ""
        )
        return f"{more}{self._after}, {self._at}"

    def __repr__(self) -> str:
        lines = [repr(self.stats)]
        for columns, rows in (
            (self._LIMITS, self._limits),
            (self._columns, self._rows),
        ):
            if rows:
                lines += ["", *format_table([columns, *rows], len(columns))]
        return "\n".join([*lines, self._note()])

    def _repr_html_(self) -> str:
        parts = [statistics(self.stats, brief=True)]
        if self._limits:
            rows = [[key(kind), *rest] for kind, *rest in self._limits]
            parts.append(table("", self._LIMITS, rows))
        if self._rows:
            colored = [
                [Raw(f"<code>{escape(row[0])}</code>"), key(row[1]), *row[2:]]
                for row in self._rows
            ]
            parts.append(table("largest buffers", self._columns, colored))
        return page("cumem", *parts, note=self._note())


def _limits(found: Stats) -> Iterator[tuple[str, str, int | None, str]]:
    """Yield the kind, device, limit and held bytes of each kind of memory in use.

    Pinned and mapped memory have one limit for the process, and other kinds one per device.
    """
    places: dict[tuple[str, int], int] = {}
    for pool in found.pools:
        device = -1 if KINDS[pool.kind].page_locked else pool.device
        place = pool.kind, device
        places[place] = places.get(place, 0) + pool.reserved_nbytes
    for (kind, device), held in places.items():
        limit = _core._limit(kind, max(device, 0))
        yield kind, "-" if device < 0 else str(device), limit, format_nbytes(held)
