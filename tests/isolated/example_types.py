# SPDX-License-Identifier: Apache-2.0
"""Check that every example of the documents passes mypy and pyright.

    python tests/isolated/example_types.py [--only mypy|pyright] [--installed] [FILE ...]

The examples are the fenced Python blocks of README.md and docs/*.md, the examples (``>>>``)
in docstrings of the package and of the extension's stub, and the code cells of the
notebooks. Each page, docstring and notebook is one program, in which an example sees the
names of those above it. The exit status is 0 if both checkers found nothing, and 1
otherwise.

The names that a page takes as given are declared above their first use, in a comment that
readers of the page do not see. Another such comment says why an example is not to be
checked::

    <!-- given import torch; loader: Iterable[torch.Tensor]; model: torch.nn.Module -->
    <!-- not type checked: it shows what a type checker refuses -->

A cell of a notebook has a tag instead: ``not type checked: it shows …``.

In the program of a page each line has the number that it has on the page, so that reports
of the checkers lead to the page.

Names from libraries other than NumPy have the type `Any`, whether the libraries are
installed or not. Otherwise an example would pass on one machine and fail on another, and
checking PyTorch would take minutes. With --installed the checkers read the types of the
libraries that are installed. Functions of examples need no annotations. Everything else is
as strict as ``mypy --strict`` and pyright's standard rules.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import doctest
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: The first line of each program.
PREAMBLE = (
    "from typing import Any; from collections.abc import Callable, Iterable, Iterator; "
    "_given: Any = ..."
)
#: The same for docstrings, with the names that tests/house/test_docs.py gives to them.
DOCSTRING_PREAMBLE = f"{PREAMBLE}; import cumem; import numpy; import torch"

OPT_OUT = re.compile(r"^<!-- not type checked: (?P<reason>\S.*) -->$")
TAG = re.compile(r"^not type checked: (?P<reason>\S.*)$")
BLOCK = re.compile(r"^(?P<fence>`{3,})python\n(?P<code>.*?)^(?P=fence)$", re.S | re.M)
GIVEN = re.compile(r"^<!-- given (?P<names>.*?)-->$", re.S | re.M)
#: Lines that only IPython understands.
MAGIC = re.compile(r"^\s*[%!].*$|^.*\?$", re.M)


class Page:
    """The examples of a page as one program, each line where it is on the page."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = [""] * (text.count("\n") + 1)
        self.opted_out: list[tuple[int, str]] = []  # line and reason

    def line_of(self, place: int) -> int:
        """Return the line of a character. Both are counted from 0."""
        return self.text.count("\n", 0, place)

    def put(self, line: int, code: list[str]) -> None:
        """Put code into the program, from this line on."""
        self.lines[line : line + len(code)] = code

    def program(self, preamble: str = PREAMBLE) -> str:
        """Return the program, or an empty text if there is no example.

        The preamble replaces the first line, which is a title or a licence.
        """
        has_code = any(line.strip() for line in self.lines[1:])
        return "\n".join([preamble, *self.lines[1:]]) + "\n" if has_code else ""


def declared(names: str) -> list[str]:
    """Return declarations as code: imports as they are, and ``name: type`` with a value.

    Without a value checkers would say that the name is not bound.
    """
    is_import = re.compile(r"import |from ").match
    is_name = re.compile(r"\w+: ").match
    lines = []
    for line in names.splitlines():
        parts = [part.strip() for part in line.split(";") if part.strip()]
        for part in parts:
            if not is_import(part) and not is_name(part):
                raise ValueError(f"given: neither 'name: type' nor an import: {part}")
        lines.append("; ".join(p if is_import(p) else f"{p} = _given" for p in parts))
    return lines


def of_page(text: str) -> Page:
    """Return the examples of a page of Markdown."""
    page = Page(text)
    for given in GIVEN.finditer(text):
        page.put(page.line_of(given.start()), declared(given["names"]))
    for block in BLOCK.finditer(text):
        reason = _reason(text[: block.start()].splitlines())
        if reason is not None:
            page.opted_out.append((page.line_of(block.start()) + 1, reason))
        else:
            page.put(page.line_of(block.start("code")), block["code"].splitlines())
    return page


def _reason(above: list[str]) -> str | None:
    """Return why the example below these lines is not to be checked, or None if it is."""
    while above and above[-1].startswith("<!-- "):
        found = OPT_OUT.match(above.pop())
        if found is not None:
            return found["reason"]
    return None


def of_docstrings(text: str) -> Page:
    """Return the examples of a Python module, those of each docstring as a function."""
    page = Page(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, documented) or ast.get_docstring(node) is None:
            continue
        docstring = node.body[0]
        source = ast.get_source_segment(text, docstring)
        assert source is not None
        examples = doctest.DocTestParser().get_examples(source)
        if not examples:
            continue
        first = docstring.lineno - 1
        # The line above the first example is a ruler or empty.
        page.put(first + examples[0].lineno - 1, [f"def _{first}() -> None:"])
        for example in examples:
            code = [f"    {line}" for line in example.source.splitlines()]
            page.put(first + example.lineno, code)
    return page


def of_notebook(text: str) -> tuple[str, list[str], list[str]]:
    """Return the program of a notebook, the place of each line, and which cells opt out.

    A cell opts out by a tag, which readers do not see.
    """
    lines, places, opted_out = [PREAMBLE], [""], []
    for number, cell in enumerate(json.loads(text)["cells"], 1):
        if cell["cell_type"] != "code":
            continue
        tags = map(TAG.match, cell["metadata"].get("tags", ()))
        if reasons := [tag["reason"] for tag in tags if tag is not None]:
            opted_out.append(f"cell {number}: {reasons[0]}")
            continue
        source = MAGIC.sub("...", "".join(cell["source"]))
        for line, code in enumerate(source.splitlines(), 1):
            lines.append(code)
            places.append(f"cell {number}, line {line}")
    return "\n".join(lines) + "\n", places, opted_out


def imported(program: str) -> Iterator[str]:
    """Yield the names of the modules that a program imports."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def write_stubs(folder: Path, modules: Iterable[str]) -> None:
    """Write stubs of libraries other than NumPy, in which every name is `Any`."""
    known = {"cumem", "numpy", *sys.stdlib_module_names}
    for module in modules:
        parts = module.split(".")
        if parts[0] in known:
            continue
        for count in range(1, len(parts) + 1):
            package = folder.joinpath(*parts[:count])
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.pyi").write_text(
                "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n"
            )


class Programs:
    """A folder with the programs to check, and the document that each comes from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.origins: dict[str, tuple[str, list[str] | None]] = {}
        self.modules: set[str] = set()
        self.opted_out: list[str] = []

    def add(self, path: Path) -> None:
        """Add the examples of a page, a module or a notebook."""
        text = path.read_text(encoding="utf-8")
        origin = os.path.relpath(path, ROOT)
        places = None
        if path.suffix == ".ipynb":
            program, places, cells = of_notebook(text)
            self.opted_out += [f"{origin}:{each}" for each in cells]
        elif path.suffix == ".md":
            page = of_page(text)
            program = page.program()
            self.opted_out += [f"{origin}:{n}: {why}" for n, why in page.opted_out]
        else:
            program = of_docstrings(text).program(DOCSTRING_PREAMBLE)
        if program:
            name = re.sub(r"\W", "_", origin)
            (self.folder / f"{name}.py").write_text(program, encoding="utf-8")
            self.origins[name] = origin, places
            self.modules.update(imported(program))

    def reported(self, line: str) -> str:
        """Return a line of a checker's report with the place in the document."""
        found = re.match(r"\s*(?:\S*/)?(\w+)\.py:(\d+)(?::\d+)?(.*)", line)
        if found is None or found[1] not in self.origins:
            return line
        origin, places = self.origins[found[1]]
        place = found[2] if places is None else places[int(found[2]) - 1]
        return f"{origin}:{place}{found[3]}"


def documents() -> list[Path]:
    modules = (ROOT / "cumem").rglob("*.py*")
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted(path for path in modules if path.suffix in (".py", ".pyi")),
        *sorted((ROOT / "notebooks").glob("*.ipynb")),
    ]


#: The settings of mypy. An example may define a name twice, and a loop in it may not have
#: run. Errors in the package itself are left to `make lint`.
MYPY = """[mypy]
python_version = 3.11
strict = true
warn_unused_ignores = false
allow_redefinition = true
disable_error_code = no-redef
allow_untyped_defs = true
allow_incomplete_defs = true
allow_untyped_calls = true
allow_subclassing_any = true
allow_untyped_decorators = true
ignore_missing_imports = true
[mypy-cumem.*]
follow_imports = silent
"""
#: The settings of pyright, which allow the same as those of mypy.
PYRIGHT = {
    "include": ["*.py"],
    "pythonVersion": "3.11",
    "pythonPlatform": "Linux",
    "typeCheckingMode": "standard",
    "extraPaths": [str(ROOT)],
    "stubPath": "stubs",
    "reportMissingImports": False,
    "reportMissingModuleSource": False,
    "reportPossiblyUnboundVariable": False,
    "reportRedeclaration": False,
    "reportUnusedCoroutine": False,
    "reportUnusedExpression": False,
}
#: How each type checker is run.
COMMANDS = {
    "mypy": (
        *("mypy", "--config-file", "mypy.ini", "--no-error-summary"),
        *("--cache-dir", str(ROOT / ".mypy_cache" / "examples"), "."),
    ),
    "pyright": ("pyright", "-p", "."),
}


def check(checker: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *COMMANDS[checker]],
        cwd=folder,
        env=os.environ | {"MYPYPATH": f"{ROOT}:{folder / 'stubs'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--only", choices=COMMANDS)
    parser.add_argument("--installed", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = Programs(folder)
        for path in options.files or documents():
            programs.add(path.resolve())
        if not options.installed:
            write_stubs(folder / "stubs", programs.modules)
        (folder / "mypy.ini").write_text(MYPY)
        (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
        checkers = [options.only] if options.only else list(COMMANDS)
        with concurrent.futures.ThreadPoolExecutor() as executor:
            ends = list(executor.map(lambda each: check(each, folder), checkers))
    for checker, end in zip(checkers, ends, strict=True):
        said = "\n".join(map(programs.reported, end.stdout.splitlines()))
        print(f"{checker}: {said or 'nothing'}")
    for each in programs.opted_out:
        print(f"not checked: {each}")
    print(f"{len(programs.origins)} documents have examples")
    return int(any(end.returncode != 0 for end in ends))


if __name__ == "__main__":
    sys.exit(main())
