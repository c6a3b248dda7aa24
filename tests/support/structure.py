# SPDX-License-Identifier: Apache-2.0
"""Measures of the structure of the sources, each a function that reads them as text.

A measure returns a line for each thing that it finds, and the number of lines is its
figure. ``tests/debts.toml`` has today's figure of the tree and the one that is its goal,
and ``tests/house/test_structure.py`` compares them. When this file is run as a program,
it prints all measures::

    python tests/support/structure.py            # figure, debt and goal of each measure
    python tests/support/structure.py NAME       # what this measure finds, line by line
    python tests/support/structure.py --lower    # write lower figures into the file
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "cumem"
DEBTS = ROOT / "tests" / "debts.toml"

# -- texts of C ------------------------------------------------------------------------

COMMENT_OR_TEXT = re.compile(
    r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL
)


def _blank(found: re.Match[str]) -> str:
    """Replace a comment by its line breaks, and a text by an empty one."""
    if found[0][0] in "\"'":
        return found[0][0] * 2
    return "\n" * found[0].count("\n") or " "


def code_of(text: str, keep_texts: bool = False) -> str:
    """Return C code without comments, in which each line keeps its number.

    Texts become empty ones, unless they are to be kept.
    """
    if not keep_texts:
        return COMMENT_OR_TEXT.sub(_blank, text)
    return COMMENT_OR_TEXT.sub(
        lambda found: found[0] if found[0][0] in "\"'" else _blank(found), text
    )


@cache
def c_codes() -> dict[str, str]:
    """Return the code of each C file below csrc/, by its path there."""
    return {
        path.relative_to(CSRC).as_posix(): code_of(path.read_text())
        for path in sorted(CSRC.rglob("*.[ch]"))
    }


def line_at(text: str, place: int) -> int:
    """Return the number of the line at a place in a text."""
    return text.count("\n", 0, place) + 1


# -- conditionals ----------------------------------------------------------------------


class _Frame:
    """The tokens between two brackets, up to a comma or the end of a statement."""

    def __init__(self, start: int, inside: bool, grouped: bool) -> None:
        self.start = start
        #: Whether the bracket only groups and is itself inside a conditional.
        self.inside = inside
        #: Whether the bracket only groups. It then has no call, index, body or keyword.
        self.grouped = grouped
        self.begin()

    def begin(self) -> None:
        """Begin a new expression, which is not an operand of the one before."""
        self.has_conditional = False
        self.holds_grouped = False


TOKEN = re.compile(r"\w+|[^\w\s]")
A_TYPE = re.compile(r"\(\s*(?:const\s+|struct\s+|unsigned\s+)*\w+(?:\s*\*+)?\s*\)")
KEYWORDS = {"return", "case", "else", "do"}
HEADS = {"if", "while", "for", "switch", "sizeof", "_Generic"}


def nested_conditionals(code: str) -> list[int]:
    """Return the line of each `?` that belongs to an operand of another one.

    These are the ones that clang-tidy's readability-avoid-nested-conditional-operator
    finds, and also those in brackets within an operand, as in ``(a ? b : c) == x ? d : e``.
    A conditional in an argument of a call or in an index does not count.
    """
    found: list[int] = []
    frames = [_Frame(0, inside=False, grouped=False)]
    before, closed = "", ""
    for match in TOKEN.finditer(code):
        token, frame = match[0], frames[-1]
        if token in "([{":
            is_call = token == "(" and (before == "]" or re.match(r"\w", before))
            is_call = is_call and before not in KEYWORDS
            is_cast = before == ")" and A_TYPE.fullmatch(closed) is not None
            grouped = token == "(" and not is_call and (before != ")" or is_cast)
            inside = grouped and (frame.has_conditional or frame.inside)
            frames.append(_Frame(match.start(), inside, grouped))
        elif token in ")]}" and len(frames) > 1:
            inner = frames.pop()
            closed = code[inner.start : match.end()]
            outer = frames[-1]
            if inner.grouped and (inner.has_conditional or inner.holds_grouped):
                outer.holds_grouped = True
            if token == "}":
                outer.begin()
        elif token in ",;":
            frame.begin()
        elif token == "?":
            if frame.has_conditional or frame.inside or frame.holds_grouped:
                found.append(line_at(code, match.start()))
            frame.has_conditional = True
        before = token
    return found


STATUS_OF_CHAIN = re.compile(r"\?\s*(?:-1\s*:\s*0|0\s*:\s*-1)\b")


def chained_statuses(code: str) -> list[int]:
    """Return the line of each statement that makes -1 or 0 of conditions with || or &&."""
    lines = []
    for match in STATUS_OF_CHAIN.finditer(code):
        begin = max(code.rfind(mark, 0, match.start()) for mark in ";{}") + 1
        if re.search(r"\|\||&&", code[begin : match.start()]):
            lines.append(line_at(code, match.start()))
    return lines


# -- macros of csrc/python, which name functions of the package ------------------------


class Macro(NamedTuple):
    """A macro with parameters."""

    parameters: list[str]
    body: str


DEFINE = re.compile(
    r"^[ \t]*#[ \t]*define[ \t]+(\w+)\(([^)]*)\)((?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE
)


def macros_of(code: str) -> dict[str, Macro]:
    """Return the macros with parameters that the code defines."""
    return {
        name: Macro(
            [each.strip() for each in parameters.split(",")],
            body.replace("\\\n", "\n"),
        )
        for name, parameters, body in DEFINE.findall(code)
    }


def arguments_at(text: str, begin: int) -> tuple[list[str], int]:
    """Return the arguments in the bracket at `begin`, and the place after the bracket."""
    depth, place, last = 0, begin, begin + 1
    found: list[str] = []
    in_text = False
    while place < len(text):
        char = text[place]
        if char == "\\" and in_text:
            place += 1
        elif char == '"':
            in_text = not in_text
        elif in_text:
            pass
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return [*found, text[last:place].strip()], place + 1
        elif char == "," and depth == 1:
            found.append(text[last:place].strip())
            last = place + 1
        place += 1
    return found, place


def expand(text: str, macros: dict[str, Macro], hidden: frozenset[str]) -> str:
    """Replace the macros that a text uses, and those in their bodies. Hidden ones stay."""
    names = [name for name in macros if name not in hidden]
    if not names:
        return text
    use = re.compile(rf"\b({'|'.join(map(re.escape, names))})\s*\(")
    parts, last = [], 0
    while found := use.search(text, last):
        given, end = arguments_at(text, found.end() - 1)
        macro = macros[found[1]]
        values = dict(zip(macro.parameters, given, strict=False))
        values["__VA_ARGS__"] = ", ".join(given[len(macro.parameters) - 1 :])

        def put(match: re.Match[str], values: dict[str, str] = values) -> str:
            is_text, name = match[1], match[2]
            if name not in values:
                return match[0]
            return f'"{values[name]}"' if is_text else values[name]

        pasted = re.sub(r"\s*##\s*", "\0", macro.body)
        body = re.sub(r"(#\s*)?\b([A-Za-z_]\w*)\b", put, pasted).replace("\0", "")
        parts += [
            text[last : found.start()],
            expand(body, macros, hidden | {found[1]}),
        ]
        last = end
    return "".join([*parts, text[last:]])


CALL_BACK = re.compile(r"\bcm_package_(call|do|refuse|method|pass)\s*\(")
LOAD = re.compile(r"\bcm_package_load\s*\(")
LITERAL = re.compile(r'"([\w.]+)"')


class Named(NamedTuple):
    """A function of the package that C names, and the file that names it."""

    function: str
    place: str


def named_functions() -> list[Named]:
    """Return the functions of the package that C names by texts, once for each file.

    For a module that C loads to look for names in it, the function is ``module.*``.
    """
    texts = {
        path.relative_to(CSRC).as_posix(): code_of(path.read_text(), keep_texts=True)
        for path in sorted((CSRC / "python").rglob("*.[ch]"))
        if path.name != "package.c"
    }
    shared = {
        name: macro
        for path, text in texts.items()
        if path.endswith(".h")
        for name, macro in macros_of(text).items()
    }
    found = set()
    for path, text in texts.items():
        if not path.endswith(".c"):
            continue
        own = DEFINE.sub("", text)
        found |= {
            Named(name, path)
            for name in names_in(expand(own, shared | macros_of(text), frozenset()))
        }
    return sorted(found)


def exists(function: str) -> bool:
    """Return whether the package or the extension has a function of this name."""
    module, _, name = function.rpartition(".")
    if module == "_core":
        return f"def {name}(" in (PACKAGE / "_core.pyi").read_text(encoding="utf-8")
    return module in modules() and (
        name == "*" or name in functions_of(module) or name in aliases_of(module)
    )


def names_in(text: str) -> Iterator[str]:
    """Yield the functions of the package that code names, as ``module.name``."""
    for match in CALL_BACK.finditer(text):
        given, _ = arguments_at(text, match.end() - 1)
        literals = [LITERAL.fullmatch(each) for each in given[:2]]
        if None in literals:
            yield f"?.{', '.join(given[:2])}"  # test_structure.py refuses this
        else:
            yield ".".join(each[1] for each in literals if each is not None)
    for match in LOAD.finditer(text):
        given, _ = arguments_at(text, match.end() - 1)
        if literal := LITERAL.fullmatch(given[0]):
            yield f"{literal[1]}.*"
    if "cm_package_hint" in text:
        yield "buffers.hints.refuse_attribute"


#: The reasons for which C may call the package, with the functions that each one covers, by
#: the last two parts of their names: docs/decisions/0019-words-not-work.md. Every other
#: function that C calls is work.
WORDS: dict[str, tuple[str, ...]] = {
    "relief when memory is short, and what its error says about the pools": (
        "out_of_memory.*",
    ),
    "the text of an error or of a warning": (
        *("*.refuse_*", "errors.*", "kinds.check_kind", "texts.name_pair"),
        *("device.warn_of_emulation", "casting.warn_of_imaginary"),
        "nvtx.warn_of_tool",
        "managed.warn_of_thrashing",
        "gpus.judge_failure",
    ),
    "what an object shows about itself": (
        *("texts.*_repr", "texts.*_text", "listing.list_names", "texts.buffer_flags"),
        *("objects._repr_html_", "answer.to_dict", "managed.Residency"),
    ),
    "what the process may use, which is read once": (
        *(
            "control_groups.memory_folders",
            "control_groups.cpu_quota",
            "ranks.find_share",
            "counting.count_devices",
            "device.read_settings",
        ),
        *(
            "limits.begin",
            "tuning.begin",
        ),
    ),
    "types of the package, made once": ("device.make", "pool.*"),
    "another library is found, or asked": (
        *("device.current_of_torch", "foreign_stream.is_captured"),
        *("foreign_memory.find_table", "foreign_memory.fix_size"),
        "foreign_memory.check_sign",
    ),
    "a protocol whose other side is Python's: bars, event loops, pickles": (
        *("progress.begin", "progress.end", "awaiting.*", "pickling.reduce"),
    ),
}
#: Functions that C calls for these reasons may call the core, since their purpose is to
#: look at pools and to trim them.
MAY_USE_CORE = ("relief when memory is short, and what its error says about the pools",)


def reason_of(function: str) -> str | None:
    """Return the reason for which C may call a function, or None if it is work."""
    short = ".".join(function.split(".")[-2:])
    for reason, patterns in WORDS.items():
        if any(fnmatchcase(short, pattern) for pattern in patterns):
            return reason
    return None


# -- texts of the package --------------------------------------------------------------


@cache
def modules() -> dict[str, Path]:
    """Return the package's modules by name, without ``cumem.``; the package is ``""``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found["" if name == "__init__" else name.removesuffix(".__init__")] = path
    return found


@cache
def tree_of(module: str) -> ast.Module:
    """Parse a module of the package."""
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def running(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run, which are all but those below ``if TYPE_CHECKING``."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield from running(other)
        else:
            yield from running(child)


class Import(NamedTuple):
    """A name that a module imports, and the module and attribute that it stands for."""

    name: str
    module: str
    attribute: str | None


def imports_of(module: str) -> Iterator[Import]:
    """Yield a module's imports from the package, at its top and in its functions."""
    for node in running(tree_of(module)):
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if parts[0] != "cumem" or node.level:
                continue
            inside = ".".join(parts[1:])
            for alias in node.names:
                full = f"{inside}.{alias.name}".lstrip(".")
                if full in modules() or full == "_core":
                    yield Import(alias.asname or alias.name, full, None)
                else:
                    yield Import(alias.asname or alias.name, inside, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "cumem":
                    yield Import(
                        alias.asname or "cumem",
                        alias.name.removeprefix("cumem").lstrip("."),
                        None,
                    )
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            for literal in re.findall(r"'cumem\.([\w.]+)'", ast.unparse(node)):
                yield Import("", literal, None)


@cache
def arrows() -> dict[str, set[str]]:
    """Return each module with the modules that it imports, without the extension."""
    return {
        module: {each.module for each in imports_of(module)} - {module, "_core"}
        for module in modules()
    }


#: The rooms of the package: each imports from the rooms before it, and from itself.
ROOMS = (
    *("base", "buffers", "interchange", "devices", "pools", "files", "transfers"),
    *("recording", "integrations", "tools", "face"),
)
#: Modules beside the face, by which users import modules of the rooms.
PUBLIC_NAMES = ("doctor", "info", "plots", "types", "units")


@cache
def room_of(module: str) -> str | None:
    """Return the room of a module, or None if it is in no room.

    The modules that are in no folder belong to the face.
    """
    if module in ("", "__main__", *PUBLIC_NAMES):
        return "face"
    first = module.split(".")[0]
    return first if first in ROOMS and (PACKAGE / first).is_dir() else None


def components(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of nodes in which each node reaches all others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = todo.pop()
            for after in graph.get(new, set()) - seen:
                seen.add(after)
                todo.append(after)
        return seen

    reach = {node: reached(node) for node in graph}
    found: list[set[str]] = []
    for node in graph:
        circle = {other for other in reach[node] if node in reach.get(other, set())}
        if circle and circle not in found:
            found.append(circle)
    return found


# -- functions of the package that C calls ---------------------------------------------


class Function(NamedTuple):
    """A function of the package. A method has the name ``Class.method``."""

    module: str
    name: str


@cache
def functions_of(module: str) -> dict[str, ast.AST]:
    """Return the functions and classes of a module, with methods as ``Class.method``."""
    found: dict[str, ast.AST] = {}
    for node in tree_of(module).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}": each
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


@cache
def aliases_of(module: str) -> dict[str, str]:
    """Return the names in a module that stand for other names, as in ``a, b = f, g``."""
    found: dict[str, str] = {}
    for node in tree_of(module).body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        else:
            continue
        both = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            both = list(zip(target.elts, value.elts, strict=False))
        found |= {
            one.id: other.id
            for one, other in both
            if isinstance(one, ast.Name) and isinstance(other, ast.Name)
        }
    return found


@cache
def names_of(module: str) -> dict[str, Import]:
    """Return what each imported name of a module stands for."""
    return {each.name: each for each in imports_of(module)}


def called_by(function: Function) -> Iterator[Function]:
    """Yield the functions of the package that a function calls by their names."""
    node = functions_of(function.module)[function.name]
    names = names_of(function.module)
    for each in ast.walk(node):
        if not isinstance(each, ast.Call):
            continue
        target = each.func
        if isinstance(target, ast.Name):
            if target.id in functions_of(function.module):
                yield Function(function.module, target.id)
            elif (known := names.get(target.id)) and known.attribute:
                yield Function(known.module, known.attribute)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            if target.value.id in ("self", "cls") and "." in function.name:
                own = function.name.split(".")[0]
                yield Function(function.module, f"{own}.{target.attr}")
            elif (known := names.get(target.value.id)) and known.attribute is None:
                yield Function(known.module, target.attr)


def reached_from(starts: Iterable[Function]) -> set[Function]:
    """Return these functions, and all that they call in turn."""
    seen: set[Function] = set()
    todo = list(starts)
    while todo:
        new = todo.pop()
        if new in seen or new.module not in modules():
            continue
        if new.name in aliases_of(new.module):
            new = Function(new.module, aliases_of(new.module)[new.name])
        if new.name in functions_of(new.module):
            seen.add(new)
            todo.append(Function(new.module, f"{new.name}.__init__"))  # of a class
            todo.extend(called_by(new))
    return seen


def core_calls(function: Function) -> list[str]:
    """Return a function's private calls of the extension, except one that it returns."""
    node = functions_of(function.module)[function.name]
    if isinstance(node, ast.ClassDef):
        return []  # its methods are functions of their own
    answers = {
        id(each.value) for each in ast.walk(node) if isinstance(each, ast.Return)
    }
    found = []
    for each in ast.walk(node):
        if not isinstance(each, ast.Call) or id(each) in answers:
            continue
        called = ast.unparse(each.func)
        known = names_of(function.module).get(called)
        if known and known.module == "_core":
            called = f"_core.{known.attribute}"
        if called.startswith("_core._"):
            found.append(f"{function.module}.{function.name}: {called}")
    return found


# -- the seam: private functions of the extension --------------------------------------

#: NumPy's own types are written with Any, whatever their elements are.
TYPE_OF_NUMPY = re.compile(r"\b(?:dtype|ndarray|NDArray)\[Any(?:, Any)?\]")
#: If an argument with one of these names is a number, it chooses what the function does.
OPCODES = {"attribute", "code", "mode", "op", "opcode", "what", "which", "work"}


def bare_reasons(function: ast.FunctionDef) -> list[str]:
    """Return what a caller of the function has to know because no type says it."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    reasons = [
        f"{each.arg}= is a number that says what to do"
        for each in every
        if each.arg in OPCODES
        and each.annotation is not None
        and ast.unparse(each.annotation) == "int"
    ]
    answer = "None" if function.returns is None else ast.unparse(function.returns)
    if answer == "object" or re.search(r"\bAny\b", TYPE_OF_NUMPY.sub("", answer)):
        reasons.append(f"answers {answer}")
    for each in ast.walk(function.returns or ast.Constant(None)):
        if isinstance(each, ast.Subscript) and ast.unparse(each.value) == "tuple":
            members = each.slice.elts if isinstance(each.slice, ast.Tuple) else []
            if len(members) > 2:
                reasons.append(f"answers a tuple of {len(members)} without names")
    if "address" in function.name:
        reasons.append("hands out addresses")
    return reasons


# -- the measures ----------------------------------------------------------------------


def work_called_from_c() -> list[str]:
    """Find functions of the package that C calls for work, and not for words."""
    named: dict[str, list[str]] = {}
    for function, place in named_functions():
        named.setdefault(function, []).append(place)
    return [
        f"{function}, of {', '.join(places)}"
        for function, places in named.items()
        if reason_of(function) is None
    ]


def core_calls_of_what_c_calls() -> list[str]:
    """Find calls back into the extension from functions that C calls."""
    starts = {
        Function(*function.rpartition(".")[::2])
        for function, _ in named_functions()
        if reason_of(function) not in MAY_USE_CORE
    }
    return sorted(call for each in reached_from(starts) for call in core_calls(each))


def bare_functions_of_the_seam() -> list[str]:
    """Find private functions and methods with opcodes, or with answers without names."""
    stub = ast.parse((PACKAGE / "_core.pyi").read_text(encoding="utf-8"))
    return [
        f"{node.name}: {', '.join(reasons)}"
        for node in ast.walk(stub)
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("_")
        and not node.name.startswith("__")
        if (reasons := bare_reasons(node))
    ]


def raw_addresses_in_the_package() -> list[str]:
    """Find places where the package asks the core for addresses, or writes through one.

    The integrations are left out, because other libraries hand over addresses there.
    """
    use = re.compile(r"_core\._addresses\(|\.from_address\(|\baddressof\(|\bmemmove\(")
    return [
        f"cumem/{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for module, path in modules().items()
        if not module.startswith("integrations.")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if use.search(line)
    ]


def tuples_that_c_reads() -> list[str]:
    """Find places where C takes a tuple apart by position, except a function's arguments.

    In two of these places DLPack prescribes the tuple: the version that a consumer asks
    for, and the device of a producer's memory.
    """
    read = re.compile(r"\bPyArg_ParseTuple\(\s*(?!args\b)")
    return [
        f"csrc/{path}:{line_at(code, match.start())}"
        for path, code in c_codes().items()
        for match in read.finditer(code)
    ]


def arrows_up() -> list[str]:
    """Find imports of the package that point at a room above that of the file."""
    return [
        f"{module or 'cumem'} ({room_of(module)}) -> {other or 'cumem'} "
        f"({room_of(other)})"
        for module, others in arrows().items()
        for other in sorted(others)
        if ROOMS.index(room_of(other) or "face")
        > ROOMS.index(room_of(module) or "base")
    ]


def modules_in_circles() -> list[str]:
    """Find modules of the package that import each other, directly or through others."""
    inner = {
        module: {each for each in others if each}
        for module, others in arrows().items()
        if module
    }
    return sorted(module for circle in components(inner) for module in circle)


def rooms_in_circles() -> list[str]:
    """Find rooms of the package that import each other, directly or through others."""
    graph: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, others in arrows().items():
        for other in others:
            graph[room_of(module) or "base"].add(room_of(other) or "face")
    graph = {room: others - {room} for room, others in graph.items()}
    return sorted(room for circle in components(graph) for room in circle)


#: The constants of routes. The names that are left out are macros over all rows.
ROUTE = re.compile(r"\bCM_ROUTE_(?!NAME\b|ROW\b|FUNCTIONS\b)[A-Z]\w*")
#: Code that asks which route a plan has: it names a route, compares the row with another
#: one, indexes the table, or looks at the row's text. Reading a fact of the row, such as
#: ``plan->row->uses_ring``, or asking whether there is a row, is allowed.
ROUTE_ASKED = re.compile(
    rf"{ROUTE.pattern}|\bcm_routes\b|(?:->|\.)route\b|\brow->text\b"
    r"|(?:->|\.)row\s*[!=]=(?!\s*NULL\b)"
)


def files_that_name_routes() -> list[str]:
    """Find C files that have CM_ROUTE_ in their code."""
    return [f"csrc/{path}" for path, code in c_codes().items() if ROUTE.search(code)]


def files_that_ask_the_route() -> list[str]:
    """Find C files that ask which route a job takes, however that is spelled."""
    return [
        f"csrc/{path}" for path, code in c_codes().items() if ROUTE_ASKED.search(code)
    ]


ROWS = re.compile(r"X\((\w+),\s*\"\",\s*(\w+),")


def rows_that_are_no_routes() -> list[str]:
    """Find rows of CM_ROUTES that suit no plan, so that other code must choose them."""
    table, _, _ = c_codes()["transfer/plan/route.h"].partition("CM_ROUTES_OF_MANY(X)")
    never = re.compile(r"\b(\w+)\([^;{}]*\)\s*\{\s*return false;\s*\}")
    never_suits = {name for code in c_codes().values() for name in never.findall(code)}
    return [name for name, suits in ROWS.findall(table) if suits in never_suits]


def conditionals_in_conditionals() -> list[str]:
    """Find conditional operators in the operands of another one."""
    return [
        f"csrc/{path}:{line}"
        for path, code in c_codes().items()
        for line in nested_conditionals(code)
    ]


def statuses_of_chains() -> list[str]:
    """Find statements of the form ``a || b ? -1 : 0``."""
    return [
        f"csrc/{path}:{line}"
        for path, code in c_codes().items()
        for line in chained_statuses(code)
    ]


#: The modules that users import: the package, and those that it does not load by itself.
PUBLIC_MODULES = (
    *("cumem", "cumem.tools.bench", "cumem.doctor", "cumem.info", "cumem.tools.replay"),
    *("cumem.plots", "cumem.recording", "cumem.recording.events", "cumem.types"),
    "cumem.units",
    *("cumem.integrations.cuda_core", "cumem.integrations.cupy"),
    *("cumem.integrations.engines", "cumem.integrations.numba"),
    "cumem.integrations.torch",
)


#: The modules whose names come from the rooms and are listed in a stub.
FACES = ("cumem", "cumem.types")


def names_at_the_top() -> list[str]:
    """List the public names of ``cumem``."""
    return all_of("cumem")


def all_of(module: str) -> list[str]:
    """Read a module's ``__all__`` from its text, since its library may not be installed."""
    if module in FACES:
        return list(importlib.import_module(module).__all__)
    inside = module.removeprefix("cumem").lstrip(".")
    if inside in PUBLIC_NAMES:  # it stands for the module that it imports
        inside = next(each.module for each in imports_of(inside) if each.module)
    for node in tree_of(inside).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def names_of_public_modules() -> list[str]:
    """List the public names of all modules that users import, each thing once."""
    top = names_at_the_top()
    return top + [
        f"{module}.{name}"
        for module in PUBLIC_MODULES[1:]
        for name in all_of(module)
        if name not in top
    ]


def members_of_public_types() -> list[str]:
    """List the public attributes of the types of FACES, including inherited ones."""
    return [
        f"{name}.{member}"
        for face in FACES
        for name in all_of(face)
        if isinstance(value := getattr(importlib.import_module(face), name), type)
        for member in dir(value)
        if not member.startswith("_")
    ]


def variables_of_users() -> list[str]:
    """List the variables of the environment, without those of the emulated device."""
    read = importlib.import_module("cumem.base.variables").READ
    return sorted(name for name in read if not name.startswith("CUMEM_EMULATED_"))


#: Settings of copies, with the results file that shows the gain of each; at most three.
SHOWN_SETTINGS: dict[str, str] = {}


def settings_of_copies() -> list[str]:
    """List the keywords of ``cumem.configure``, without those of SHOWN_SETTINGS."""
    for module in modules():
        if "configure" in functions_of(module) and module.split(".")[-1] == "tuning":
            node = functions_of(module)["configure"]
            assert isinstance(node, ast.FunctionDef)
            keywords = [each.arg for each in node.args.kwonlyargs]
            return [each for each in keywords if each not in SHOWN_SETTINGS]
    raise LookupError("configure() is not in a module tuning: say here where it is")


MOST_LINES = 1200
CODE_FOLDERS = ("csrc", "cumem", "tests", "benchmarks")


def files_too_long() -> list[str]:
    """Find C and Python files of more than 1,200 lines. Stubs may be longer."""
    return [
        f"{path.relative_to(ROOT).as_posix()}: {count} lines"
        for folder in CODE_FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".c", ".h", ".py")
        if (count := path.read_text(encoding="utf-8").count("\n")) > MOST_LINES
    ]


#: The measures, by their names.
MEASURES: dict[str, Callable[[], list[str]]] = {
    each.__name__: each
    for each in (
        work_called_from_c,
        core_calls_of_what_c_calls,
        bare_functions_of_the_seam,
        tuples_that_c_reads,
        raw_addresses_in_the_package,
        arrows_up,
        modules_in_circles,
        rooms_in_circles,
        files_that_name_routes,
        files_that_ask_the_route,
        rows_that_are_no_routes,
        conditionals_in_conditionals,
        statuses_of_chains,
        names_at_the_top,
        names_of_public_modules,
        members_of_public_types,
        variables_of_users,
        settings_of_copies,
        files_too_long,
    )
}

#: Measures of the results of benchmarks/trace_calls.py, which tests/house/test_trace.py
#: compares.
TRACED = (
    *("rooms_of_numpy_to_device_256", "rooms_of_pinned_to_pinned_256"),
    *("rooms_of_on_a_stream_256", "rooms_of_fill", "rooms_of_numpy_to_device_large"),
    *("rooms_of_prefetch", "python_functions_on_the_way"),
)


#: Files that a batch of a loader passes only on some machines. If a copy is not over when
#: its call returns, the storage remembers the copy in an array, which is in base/array. If
#: a thread has to wait, it first spins, by base/backoff.
BY_CHANCE = {"base/array", "base/backoff"}


def traced(calls: dict[str, Any]) -> dict[str, list[str]]:
    """Return what the measures of TRACED find in the results of a trace."""
    found = {
        name: list(calls[name.removeprefix("rooms_of_")]["in_every_run"])
        for name in TRACED
        if name.startswith("rooms_of_")
    }
    batch = found["rooms_of_prefetch"]
    found["rooms_of_prefetch"] = [room for room in batch if room not in BY_CHANCE]
    found["python_functions_on_the_way"] = [
        f"{name}: {function}"
        for name, call in calls.items()
        if f"rooms_of_{name}" in TRACED and name != "prefetch"
        for function in call["in_python"]
    ]
    return found


# -- debts -----------------------------------------------------------------------------


class Debt(NamedTuple):
    """The figure that a measure may have today, and the one that is its goal."""

    today: int
    goal: int


def read_debts(text: str) -> dict[str, Debt]:
    """Read the text of debts.toml."""
    return {
        name: Debt(row["today"], row["goal"])
        for name, row in tomllib.loads(text).items()
        if isinstance(row, dict)
    }


def rises(before: dict[str, Debt], after: dict[str, Debt]) -> list[tuple[str, int]]:
    """Return the debts that have risen, with their present figures."""
    return [
        (name, debt.today)
        for name, debt in after.items()
        if name in before and debt.today > before[name].today
    ]


def read_reasons(text: str) -> set[tuple[str, int]]:
    """Return the debts that were raised for a reason, with their figures then."""
    rows = tomllib.loads(text).get("raised", [])
    return {(row["name"], row["today"]) for row in rows if row["why"]}


def judge(name: str, found: list[str], debt: Debt, by: str = "--lower") -> str | None:
    """Return what is wrong with a measure's figure, and what to type, or None."""
    figure = len(found)
    if figure > debt.today:
        lines = by_file(found)
        return (
            f"{name} is {figure}, which is {figure - debt.today} more than the debt "
            "that tests/debts.toml allows. Take as many out again, or raise `today` there "
            "and say why in a [[raised]] entry at its end. All of them:\n"
            + "\n".join(f"  {line}" for line in lines)
        )
    lowest = max(figure, debt.goal)
    if lowest < debt.today:
        return (
            f"{name} is {figure} by now: write `today = {lowest}` under [{name}] in "
            f"tests/debts.toml, or run `python tests/support/structure.py {by}`, so "
            "that it stays there"
        )
    return None


def by_file(found: list[str]) -> list[str]:
    """Join places such as ``file:line`` to a line for each file, and keep other lines."""
    places: dict[str, list[str]] = {}
    lines: Counter[str] = Counter()
    for line in found:
        path, mark, number = line.partition(":")
        if mark and number.isdigit():
            places.setdefault(path, []).append(number)
        else:
            lines[line] += 1
    return [
        *(f"{path}: {len(n)}, lines {', '.join(n)}" for path, n in places.items()),
        *(line if n == 1 else f"{line} ({n} times)" for line, n in lines.items()),
    ]


def lowered(text: str, figures: dict[str, int]) -> str:
    """Return the text of the debts with those figures lowered that have become lower."""
    debts = read_debts(text)
    for name, figure in figures.items():
        debt = debts[name]
        lowest = max(figure, debt.goal)
        if lowest < debt.today:
            text, count = re.subn(
                rf"(?m)^(\[{name}\]\n(?:[^\[\n].*\n|\n)*?today = )\d+",
                rf"\g<1>{lowest}",
                text,
            )
            assert count == 1, f"[{name}] has no line `today = ...`"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="the measures of the structure")
    parser.add_argument("name", nargs="?", choices=MEASURES, help="print what it finds")
    parser.add_argument("--lower", action="store_true", help="write lower figures")
    parser.add_argument(
        "--trace", type=Path, help="results of benchmarks/trace_calls.py"
    )
    options: Any = parser.parse_args()
    if options.name:
        print(*MEASURES[options.name](), sep="\n")
        return 0
    text = DEBTS.read_text(encoding="utf-8")
    debts = read_debts(text)
    figures = {name: len(measure()) for name, measure in MEASURES.items()}
    if options.trace:
        calls = json.loads(options.trace.read_text(encoding="utf-8"))["calls"]
        figures |= {name: len(found) for name, found in traced(calls).items()}
    for name, figure in figures.items():
        debt = debts.get(name)
        said = f"debt {debt.today:4}, goal {debt.goal:4}" if debt else "no debt"
        print(f"{name:32} {figure:4}  {said}")
    reasons = Counter(reason_of(each.function) or "work" for each in named_functions())
    print("C calls the package for:")
    for reason, count in reasons.most_common():
        print(f"  {count:4}  {reason}")
    if options.lower:
        DEBTS.write_text(lowered(text, figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
