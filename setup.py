# SPDX-License-Identifier: Apache-2.0
"""Builds cumem._core. Everything else about the package is in pyproject.toml.

A build in place, or one with CUMEM_TESTING set, also links a second core, which is for the
tests. It has the same objects, and the hooks that the tests call, which are in
csrc/python/module/testing.c. It lies in tests/core/, and no wheel contains it. A build into
a folder of its own, which .ci/beside makes, is for tests alone, so its only core has the
hooks.

These variables change how it is built:

CUMEM_TESTING=1             link the core for the tests in any case
CUMEM_CUDA_HOME=/path       take the headers and libcudart_static.a of this toolkit
CUMEM_DEBUG=1               check invariants, do not optimise, keep symbols, use -Werror
CUMEM_SANITIZE=address,undefined (or thread)  build with these sanitizers
CUMEM_TRACE=1               do not optimise; functions report that they run (make trace)
CUMEM_LIMITED_API=0         build for this version of Python alone
CUMEM_BUILT=/folder         keep compiled and linked files there, and take those that an
                            earlier build made from the same sources with the same switches
                            and tools
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FILES = ("cuda_runtime_api.h", "crt/host_defines.h", "libcudart_static.a")
DEBUG = os.environ.get("CUMEM_DEBUG", "0") != "0"
TRACE = os.environ.get("CUMEM_TRACE", "0") != "0"
#: The folder of the core for tests. It is not in the package, so that no wheel contains it.
TEST_CORE = Path("tests/core")
LIMITED = os.environ.get("CUMEM_LIMITED_API", "1") != "0"
LIMITED &= not sysconfig.get_config_var("Py_GIL_DISABLED")


def cuda_places():
    """Return the places of CUDA as {name: roots}, the preferred ones first.

    A root is a folder that has include/ and lib/.
    """
    spec = find_spec("nvidia")
    trees = [Path(p) for p in (spec and spec.submodule_search_locations) or ()]
    # CUDA 12's own headers come first: only crt/ may come from the CUDA 13 tree.
    wheels = [t / "cuda_runtime" for t in trees] + [t / "cu13" for t in trees]
    places = {"CUMEM_CUDA_HOME": None, "the build requirements": wheels}
    places |= {"CUDA_HOME": None, "CUDA_PATH": None}
    for name, home in ((n, os.environ.get(n)) for n in places if n.isupper()):
        places[name] = [Path(home)] if home else []
    return places | {"the usual place": [Path("/usr/local/cuda")]}


def find_cuda():
    """Return (include folders, static library) of the first place that has all files."""
    report = "cumem: a file of CUDA is missing. Looked in"
    for name, roots in cuda_places().items():
        tried = [root / sub for root in roots for sub in ("include", "lib64", "lib")]
        has = {f: next((d for d in tried if (d / f).is_file()), None) for f in FILES}
        if all(has.values()):
            return [has[FILES[0]], has[FILES[1]]], has[FILES[2]] / FILES[2]
        missing = ", ".join(file for file, folder in has.items() if not folder)
        where = "".join(f"\n    {d}" for d in tried) or " (nothing set or installed)"
        report += f"\n  {name}: no {missing}{where}"
    raise SystemExit(report)


class Built:
    """The folder CUMEM_BUILT, where the name of a file is the digest of its ingredients.

    Several checkouts can share the folder, because no digest depends on where a checkout
    lies. If the variable is not set, everything is made anew.
    """

    def __init__(self, *given):
        folder = os.environ.get("CUMEM_BUILT")
        self.folder = folder and Path(folder)
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            compiler = sysconfig.get_config_var("CC").split()[0]
            about = subprocess.check_output([compiler, "--version"])
            headers = sorted([*Path("csrc").rglob("*.h"), *Path("build").glob("*.h")])
            self.common = self.digest(about, sys.version.encode(), *given, *headers)

    @staticmethod
    def digest(*parts):
        """Return the digest of bytes, and of the paths and contents of files."""
        found = hashlib.sha256()
        for part in parts:
            texts = (
                [part] if isinstance(part, bytes) else [bytes(part), part.read_bytes()]
            )
            for text in texts:
                found.update(b"%d " % len(text) + text)
        return found.digest()

    def make(self, target, make, *parts):
        """Copy the file `target` from the folder, or call `make` and keep what it made."""
        if not self.folder:
            make()
            return
        kept = self.folder / self.digest(self.common, *parts).hex()
        if kept.exists():
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(kept, target)
            return
        make()
        partial = f"{kept}-{os.getpid()}"
        shutil.copyfile(target, partial)
        os.replace(partial, kept)


class BuildExt(build_ext):
    def run(self):
        # setuptools clears `inplace` while it builds, and copies the result afterwards.
        self.is_in_place = self.inplace or getattr(self, "editable_mode", False)
        super().run()

    def build_extensions(self):
        includes, library = find_cuda()
        for folder in (*includes, numpy.get_include()):
            core.extra_compile_args += ["-isystem", str(folder)]
        core.extra_objects.append(str(library))
        headers = [Path(folder, file) for folder in includes for file in FILES[:2]]
        built = Built(
            repr((flags + sanitize, core.extra_link_args, core.define_macros)).encode(),
            numpy.__version__.encode(),
            *(file.read_bytes() for file in [*headers, library] if file.is_file()),
        )
        compile_all, link = self.compiler.compile, self.compiler.link_shared_object
        own_folder = self.build_lib != self.get_finalized_command("build").build_lib
        test_core = TEST_CORE / Path(self.get_ext_filename("cumem._core")).name
        # If a core for tests exists it is always linked anew, or it would be older than the
        # package's.
        has_test_core = not own_folder and (
            self.is_in_place or "CUMEM_TESTING" in os.environ or test_core.exists()
        )

        def compile_one(source, **options):
            folder = options["output_dir"]
            [target] = self.compiler.object_filenames([source], output_dir=folder)
            built.make(target, lambda: compile_all([source], **options), Path(source))
            return target

        def compile_each(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return list(pool.map(lambda one: compile_one(one, **options), sources))

        def link_one(objects, target, *rest, **options):
            texts = [
                Path(name).read_bytes() for name in objects if name != str(library)
            ]
            built.make(target, lambda: link(objects, target, *rest, **options), *texts)

        def link_each(objects, target, *rest, **options):
            hooks = [name for name in objects if Path(name).stem == "testing"]
            others = [name for name in objects if name not in hooks]
            link_one(objects if own_folder else others, target, *rest, **options)
            if has_test_core:
                link_one(objects, str(test_core), *rest, **options)

        self.compiler.compile = compile_each
        self.compiler.link_shared_object = link_each
        super().build_extensions()
        # `python -m cumem` in the checkout runs the checkout's package, which therefore
        # needs the extension too. A build with a folder of its own leaves the package as
        # it is.
        if not own_folder and not self.is_in_place:
            self.copy_file(self.get_ext_fullpath("cumem._core"), "cumem")


NUMPY = ("NPY_TARGET_VERSION", "NPY_NO_DEPRECATED_API")
macros = dict.fromkeys(NUMPY, "NPY_1_22_API_VERSION") | {"_GNU_SOURCE": None}
macros |= {"Py_LIMITED_API": "0x030B0000"} if LIMITED else {}
macros |= {"CM_DEBUG": "1"} if DEBUG else {}
flags = ["-std=c17", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow", "-Wundef"]
flags += ["-Wstrict-prototypes", "-Wmissing-prototypes", "-Wconversion"]
# If the compiler reads neighbouring counters as one vector, the load stalls when one of
# them was written just before, as happens in each allocation. Code that needs vectors
# says so.
fast = [
    "-O2",
    "-fno-tree-vectorize",
    "-flto=auto",
    "-fno-plt",
    "-fno-semantic-interposition",
]
if sanitize := [f"-fsanitize={s}" for s in [os.environ.get("CUMEM_SANITIZE")] if s]:
    sanitize.append("-fno-omit-frame-pointer")
if TRACE:
    fast = ["-O0", "-g1", "-gdwarf-4", "-finstrument-functions"]
if DEBUG:
    flags += ["-O1" if sanitize else "-O0", "-g", "-UNDEBUG", "-Werror"]
elif not sanitize:
    flags += fast
link = ["-Wl,--exclude-libs,ALL"]
link += [] if DEBUG or sanitize or TRACE else ["-Wl,-s", *fast]
run_path("csrc/headers.py")["write"](Path("build"))
sources = sorted(map(str, Path("csrc").rglob("*.c")))
core = Extension("cumem._core", sources + ["benchmarks/trace.c"] * TRACE)
core.include_dirs, core.define_macros = ["csrc", "build"], list(macros.items())
core.extra_compile_args, core.extra_link_args = flags + sanitize, link + sanitize
core.libraries, core.py_limited_api = ["dl", "rt", "pthread"], LIMITED
options = {"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {}
# File times do not show that a switch has changed, so everything is always built.
options["build_ext"] = {"force": True}
setup(ext_modules=[core], cmdclass={"build_ext": BuildExt}, options=options)
