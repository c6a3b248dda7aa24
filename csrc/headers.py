# SPDX-License-Identifier: Apache-2.0
"""Make the C headers that the build generates: `python csrc/headers.py build`.

docstrings.h has the docstrings of the extension. They are written in the stubs, where
editors find them: cumem/_core.pyi, and testing.pyi for the hooks of the tests. Each one
becomes a macro CM_DOC_Type_method, which begins with the signature that `inspect.signature`
reads.

structseqs.h lists the struct sequences of the stub and their fields. They are the types of
results whose members have names.

ptx.h has the kernels: a macro CM_PTX_name for each name.ptx, without its comments, and with
the numbers of dtypes in place of their names.

gil_checks.h has a macro for each function of Python that the sources call. It ends the
process if the caller does not have the GIL. Only debug builds include it.
"""

import ast
import inspect
import json
import os
import re
import sys
from pathlib import Path

Function = ast.FunctionDef


def signature(node: Function, first: str | None) -> str:
    """Return a signature as ``__text_signature__`` needs it, with `first` for ``self``."""
    given = node.args.posonlyargs + node.args.args
    defaults = [None] * (len(given) - len(node.args.defaults)) + node.args.defaults
    words = []
    for i, (argument, default) in enumerate(zip(given, defaults, strict=True)):
        is_self = first is not None and i == 0
        name = first if is_self else argument.arg
        words.append(name + (f"={ast.unparse(default)}" if default else ""))
        if i == len(node.args.posonlyargs) - 1 or (
            is_self and not node.args.posonlyargs
        ):
            words.append("/")
    if node.args.vararg:
        words.append("*" + node.args.vararg.arg)
    elif node.args.kwonlyargs:
        words.append("*")
    for argument, default in zip(
        node.args.kwonlyargs, node.args.kw_defaults, strict=True
    ):
        words.append(argument.arg + (f"={ast.unparse(default)}" if default else ""))
    return f"{node.name}({', '.join(words)})\n--\n\n"


def decorators(node: Function) -> set[str]:
    return {ast.unparse(each) for each in node.decorator_list}


def method_text(node: Function) -> str:
    if "property" in decorators(node):
        return ""
    return signature(node, "$type" if "classmethod" in decorators(node) else "$self")


def class_text(node: ast.ClassDef) -> str:
    """Return the signature of a class that can be called, else an empty text."""
    for each in node.body:
        if isinstance(each, Function) and each.name == "__new__":
            each.args.args = each.args.args[1:]
            each.args.posonlyargs = each.args.posonlyargs[1:]
            return signature(each, None).replace("__new__", node.name, 1)
    return ""


def docstrings(stub: str) -> dict[str, str]:
    found = {}
    for node in ast.parse(stub).body:
        if isinstance(node, Function):
            found[node.name] = (node, signature(node, None))
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, Function):
                    found.setdefault(
                        f"{node.name}_{each.name}", (each, method_text(each))
                    )
            found[node.name] = (node, class_text(node))
    return {
        name: head + inspect.cleandoc(text)
        for name, (node, head) in found.items()
        if (text := ast.get_docstring(node, clean=False))
    }


def structseqs(stub: str) -> dict[str, list[str]]:
    """Return the fields of each struct sequence, by its name without the underscore."""
    return {
        node.name.removeprefix("_"): [
            each.name
            for each in node.body
            if isinstance(each, Function) and "property" in decorators(each)
        ]
        for node in ast.parse(stub).body
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).startswith("structseq[") for base in node.bases)
    }


def structseq_lists(found: dict[str, list[str]]) -> str:
    """Return X macros: one over all struct sequences, and one over the fields of each."""
    text = "/* Made by csrc/headers.py. */\n"
    every = " ".join(f"X({name})" for name in found)
    text += f"#define CM_STRUCTSEQS(X) {every}\n"
    for name, fields in found.items():
        rows = " ".join(f"X({name}, {field})" for field in fields)
        text += f"#define CM_FIELDS_{name}(X) {rows}\n"
    return text


def dtypes(listed: str) -> dict[str, int]:
    """Return the number that C gives to each dtype, by the name of its enumerator.

    The numbers count from 1 in the order of the rows, as the enumerators do. ptx.h has
    assertions that make the compiler check this.
    """
    rows = re.findall(r"^ +X\(to, (\w+), \"", listed, re.MULTILINE)
    names = ["CM_NUMBER_NONE", *(f"CM_{row}" for row in rows)]
    return {name: number for number, name in enumerate(names)}


def check_device_conversions(kernel: str, listed: str) -> None:
    """Raise a ValueError if a dtype that devices convert is not named in this kernel.

    Without a branch of its own a dtype would be read as an unsigned integer of its
    size, and no test would fail without a GPU: the emulated device converts by
    base/convert.c. For dtypes that are read where no branch was taken, it is enough that
    a comment of the kernel names them there.
    """
    rows = re.findall(r"^ +X\(to, (\w+), .*\bDEVICE\b", listed, re.MULTILINE)
    lacking = [row for row in rows if not re.search(rf"\bCM_{row}\b", kernel)]
    if lacking:
        raise ValueError(
            f"csrc/base/dtypes.h says DEVICE of {', '.join(lacking)}: read it in "
            "csrc/transfer/device/strided.ptx after CONVERT, or write HOST in the row"
        )


def kernel(text: str, numbers: dict[str, int]) -> str:
    """Return PTX without its comments, and with these numbers in place of their names."""
    lines = [line.split("//")[0].rstrip() for line in text.splitlines()]
    bare = "".join(f"{line}\n" for line in lines if line)
    return re.sub(r"\bCM_\w+", lambda name: str(numbers[name[0]]), bare)


def ptx(kernels: dict[str, str], listed: str) -> str:
    """Return the kernels as macros, and assertions that C has the same numbers."""
    check_device_conversions(kernels["strided"], listed)
    numbers = dtypes(listed)
    texts = {name: kernel(text, numbers) for name, text in kernels.items()}
    checks = [
        f'_Static_assert({name} == {number}, "as the kernels have it");\n'
        for name, number in numbers.items()
    ]
    head = '#include "base/dtypes.h"\n'
    return macros("CM_PTX_", texts) + head + "".join(checks)


def macros(prefix: str, texts: dict[str, str]) -> str:
    """Return a header that defines a macro for each of the texts."""
    lines = ["/* Made by csrc/headers.py. */"]
    for name, text in texts.items():
        quoted = [
            json.dumps(line, ensure_ascii=False) for line in text.splitlines(True)
        ]
        lines.append(" \\\n    ".join([f"#define {prefix}{name}", *quoted]))
    return "\n".join(lines) + "\n"


def replace(header: Path, made: str) -> None:
    """Write a header, unless it has this text already: then its file time stays."""
    if not header.exists() or header.read_text() != made:
        header.parent.mkdir(parents=True, exist_ok=True)
        new = header.with_suffix(f".{os.getpid()}")
        new.write_text(made)
        new.replace(header)  # in one step, since another build may be reading it


#: Names that may be called without the GIL, or that are not calls.
WITHOUT_GIL = {
    *("PyEval_SaveThread", "PyEval_RestoreThread", "PyThread_get_thread_ident"),
    *("PyGILState_Ensure", "PyGILState_Release", "PyGILState_GetThisThreadState"),
    *("PyGILState_Check", "Py_IsInitialized", "Py_AddPendingCall"),
    *("PyErr_SetInterrupt", "PyDoc_STRVAR", "PyInit__core", "PyObject_New"),
    *("Py_UNUSED", "Py_TYPE", "Py_IS_TYPE", "Py_REFCNT", "Py_VISIT", "Py_CLEAR"),
}
#: Names for which Python.h has a macro over a function of the same name.
OVER_FUNCTIONS = ("Py_INCREF", "Py_DECREF", "Py_XINCREF", "Py_XDECREF")


def gil_checks(sources: list[str]) -> str:
    """Return a macro for each function of Python that the sources call by its name.

    Names that Python.h defines as macros stay as they are, except those that count
    references.
    """
    called: set[str] = set()
    for text in sources:
        bare = re.sub(r'/\*.*?\*/|"(?:\\.|[^"\\])*"', " ", text, flags=re.S)
        called |= set(re.findall(r"\b(Py[A-Z_]\w*)\s*\(", bare))
    text = "/* Made by csrc/headers.py. */\n"
    for name in OVER_FUNCTIONS:
        text += f"#undef {name}\n#define {name}(object) \\\n"
        text += (
            f"    (cm_gil_check(__FILE__, __LINE__), ({name})((PyObject *)(object)))\n"
        )
    numpy = ("PyArray_", "PyDataType_", "PyDataMem_")  # macros over a table
    for name in sorted(called - WITHOUT_GIL - set(OVER_FUNCTIONS)):
        if not name.startswith(numpy):
            text += f"#ifndef {name}\n#define {name}(...) \\\n"
            text += "    (cm_gil_check(__FILE__, __LINE__), "
            text += f"({name})(__VA_ARGS__))\n#endif\n"
    return text


def write(folder: Path) -> None:
    """Make all four headers. The current folder is the root of the tree."""
    stub = Path("cumem/_core.pyi").read_text()
    made = docstrings(stub)
    made |= docstrings(Path("csrc/python/module/testing.pyi").read_text())
    replace(folder / "docstrings.h", macros("CM_DOC_", made))
    replace(folder / "structseqs.h", structseq_lists(structseqs(stub)))
    kernels = sorted(Path("csrc/transfer/device").glob("*.ptx"))
    texts = {path.stem: path.read_text() for path in kernels}
    replace(folder / "ptx.h", ptx(texts, Path("csrc/base/dtypes.h").read_text()))
    sources = sorted(Path("csrc/python").rglob("*.[ch]"))
    replace(folder / "gil_checks.h", gil_checks([path.read_text() for path in sources]))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
