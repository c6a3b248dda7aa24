# SPDX-License-Identifier: Apache-2.0
"""Tests of the NVTX ranges that cumem makes around its operations.

A range is a named span of time that NVIDIA's profilers show. A profiler takes part by a
shared library that NVTX loads. The tests build such a library, the tool, which logs each
call that it gets, and run programs with it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

# These tests start separate programs, whose results no version of Python changes.
pytestmark = pytest.mark.any_python

#: The tool in C. Its types are those that nvtxTypes.h and nvToolsExt.h of NVTX 3 declare.
TOOL = r"""
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char *message;
} attributes;
typedef void (*any_function)(void);
typedef struct {
    size_t size;
    int (*get_table)(int module, any_function ***table, unsigned *count);
} callbacks;
typedef struct {
    size_t size;
    uint32_t version, reserved;
    void (*set_version)(uint32_t);
} version_info;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char cumem_domain;
static __thread int depth;

static void
note(const char *what, int depth, uint64_t payload, const char *text)
{
    pthread_mutex_lock(&lock);
    FILE *file = fopen(getenv("SEEN"), "a");
    fprintf(file, "%s %d %llu %s\n", what, depth, (unsigned long long)payload, text);
    fclose(file);
    pthread_mutex_unlock(&lock);
}

static void *
create(const char *name)
{
    note("domain", 0, 0, name);
    return strcmp(name, "cumem") == 0 ? (void *)&cumem_domain : NULL;
}

static int
push(void *domain, const attributes *range)
{
    int good = domain == &cumem_domain && range->version == 3 && range->size == 48
               && range->message_type == 1 && range->payload_type == 1;
    note(good ? "push" : "WRONG", depth, range->payload, range->message);
    return depth++;
}

static int
pop(void *domain)
{
    note(domain == &cumem_domain ? "pop" : "WRONG", --depth, 0, "");
    return depth;
}

static void
nothing(void)
{
}

int
InitializeInjectionNvtx2(const void *(*get)(uint32_t))
{
    static const unsigned sizes[] = {0, 16, 9, 15, 7, 16, 7};
    const callbacks *table_of = get(1);
    const version_info *info = get(3);
    if (getenv("REFUSES") != NULL || info->version != 3 || get(2) != NULL
        || table_of->size != sizeof(*table_of) || info->size != sizeof(*info)) {
        return 0;
    }
    info->set_version(3);
    for (int module = 1; module <= 6; module++) { /* all, as Nsight Systems does */
        any_function **table;
        unsigned count;
        if (!table_of->get_table(module, &table, &count) || count < sizes[module]) {
            return 0;
        }
        for (unsigned i = 1; i < sizes[module]; i++) {
            *table[i] = nothing;
        }
        if (module == 5) {
            *table[4] = (any_function)push;
            *table[5] = (any_function)pop;
            *table[12] = (any_function)create;
        }
    }
    return table_of->get_table(7, NULL, NULL) == 0;
}
"""


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the tool, and return the path of its library."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("tool")
    (folder / "tool.c").write_text(TOOL)
    library = folder / "libtool.so"
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "tool.c")]
    subprocess.run([*command, "-lpthread"], check=True)
    return library


def seen(
    code: str, tool: Path, folder: Path, backend: str = "emulated", **environment: str
) -> list[list[str]]:
    """Run code in another process, and return the calls that the tool logged.

    Each call is a list of texts: its name, the depth of the range in its thread, the
    payload, which is a number of bytes, and the name of the range.
    """
    log = folder / "seen"
    log.write_text("")
    settings = {
        "CUMEM_BACKEND": backend,
        "NVTX_INJECTION64_PATH": str(tool),
        "CUMEM_NVTX": "1",
        "SEEN": str(log),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 3) for line in log.read_text().splitlines()]
    assert "WRONG" not in {what for what, *_ in lines}
    assert len(pushed(lines)) == sum(what == "pop" for what, *_ in lines)
    return lines


def pushed(lines: Sequence[list[str]]) -> list[str]:
    """Return the names of the ranges that were begun."""
    return [text for what, _, _, text in lines if what == "push"]


#: A program that makes ranges of every sort.
WORK = """
    import cumem, numpy as np
    stream = cumem.Stream()
    device = cumem.empty_device(1 << 20, "u1", stream=stream)
    pinned = cumem.empty_pinned(1 << 20, "u1")
    shared = cumem.empty_managed(3 << 20, "u1")
    cumem.copy(device, pinned)
    cumem.copy_async(device, pinned, stream=stream)
    stream.synchronize()
    background = cumem.copy_async(np.empty((64, 96), "u1").T, device[:6144].reshape(96, 64))
    background.wait()
    cumem.copy_many([(device[:512], pinned[:512]), (device[512:1024], pinned[512:1024])])
    cumem.prefetch_pages((shared,), "host", stream)
    cumem.synchronize()
    cumem.tofile("/dev/null", pinned)
"""


@pytest.mark.parametrize(
    "backend", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_tool_sees_each_operation_with_its_size(
    tool: Path, tmp_path: Path, backend: str
) -> None:
    lines = seen(WORK, tool, tmp_path, backend)
    assert lines[0] == ["domain", "0", "0", "cumem"]
    texts = pushed(lines)
    for text in (
        *("copy 1 MiB", "copy_async 1 MiB", "wait", "copy_async 6 KiB"),
        *("background copy 6 KiB", "wait for copy 6 KiB", "copy_many"),
        *("prefetching managed memory 3 MiB", "wait for device", "write file 1 MiB"),
    ):
        assert text in texts
    assert sum(text.startswith("grow ") for text in texts) >= 3  # one pool of each kind
    payloads = {text: payload for what, _, payload, text in lines if what == "push"}
    assert payloads["copy 1 MiB"] == str(1 << 20)
    assert payloads["copy_many"] == "0"


def test_ranges_nest_in_their_thread(tool: Path, tmp_path: Path) -> None:
    code = """
        import cumem
        cumem.empty_device(1000, "u1").copy()
    """
    lines = seen(code, tool, tmp_path)
    depth = 0
    for what, at, _, _ in lines[1:]:
        depth -= what == "pop"
        assert int(at) == depth
        depth += what == "push"
    assert depth == 0


def test_a_range_ends_with_an_error_too(tool: Path, tmp_path: Path) -> None:
    code = """
        import cumem
        cumem.set_limit("device", 1 << 20)
        try:
            cumem.empty_device(1 << 21, "u1")
        except cumem.OutOfMemoryError:
            pass
        else:
            raise SystemExit("no error")
    """
    assert "grow 2 MiB" in pushed(seen(code, tool, tmp_path))


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_loaded_unless_asked_for(
    tool: Path, tmp_path: Path, value: str
) -> None:
    code = """
        import cumem
        cumem.empty_device(1000, "u1").copy()
        assert "libtool.so" not in open("/proc/self/maps").read()
    """
    assert seen(code, tool, tmp_path, CUMEM_NVTX=value) == []


def test_without_a_tool_nothing_happens(tool: Path, tmp_path: Path) -> None:
    code = "import cumem; cumem.empty_device(1000, 'u1').copy()"
    assert seen(code, tool, tmp_path, NVTX_INJECTION64_PATH="") == []


def test_tool_stays_after_a_shutdown(tool: Path, tmp_path: Path) -> None:
    code = """
        import cumem
        from cumem import _core
        assert not _core._nvtx_listens()
        cumem.backend()
        cumem.shutdown()
        cumem.empty_device(1000, "u1").copy()
        assert _core._nvtx_listens()
    """
    lines = seen(code, tool, tmp_path)
    assert [what for what, *_ in lines].count("domain") == 1
    assert "copy 1000 B" in pushed(lines)


@pytest.mark.parametrize("trouble", ["refuses", "missing", "no tool"])
def test_tool_that_cannot_be_used_is_a_warning(
    tool: Path, tmp_path: Path, trouble: str
) -> None:
    path = tool
    if trouble == "missing":
        path = tmp_path / "nowhere.so"
    elif trouble == "no tool":
        path = Path("libc.so.6")
    code = """
        import warnings, cumem
        from cumem import doctor
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cumem.empty_device(1000, "u1").copy()
        (warned,) = caught
        assert warned.category is RuntimeWarning, warned
        assert "sees no ranges" in str(warned.message), warned
        findings = doctor.diagnose(measure=False).findings
        (found,) = (each for each in findings if each.check == "nvtx")
        assert found.status == "note", found
    """
    more = {"REFUSES": "1"} if trouble == "refuses" else {}
    assert seen(code, path, tmp_path, **more) == []


@pytest.mark.parametrize("trouble", ["refuses", "no tool"])
def test_tool_that_was_refused_is_unloaded_and_reported_again(
    tool: Path, tmp_path: Path, trouble: str
) -> None:
    """The next opening of the devices warns again, or uses the tool if it works by then."""
    empty = tmp_path / "libnothing.so"
    if trouble == "no tool":
        command = [shutil.which("gcc") or "cc", "-shared", "-fPIC", "-x", "c"]
        subprocess.run(
            [*command, "-o", str(empty), "-"], check=True, input=b"int nothing;"
        )
    code = """
        import os, warnings, cumem
        from cumem import _core
        path = os.environ["NVTX_INJECTION64_PATH"]
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                cumem.empty_device(1000, "u1").copy()
            assert ["sees no ranges" in str(each.message) for each in caught] == [True]
            assert not _core._nvtx_listens()
            assert path not in open("/proc/self/maps").read()
            cumem.shutdown()
        os.environ.pop("REFUSES", None)
        os.environ["NVTX_INJECTION64_PATH"] = os.environ["WORKS"]
        cumem.empty_device(1000, "u1").copy()
        assert _core._nvtx_listens()
    """
    path = tool if trouble == "refuses" else empty
    more = {"REFUSES": "1"} if trouble == "refuses" else {}
    lines = seen(code, path, tmp_path, WORKS=str(tool), **more)
    assert "copy 1000 B" in pushed(lines)


def test_another_value_of_the_variable_is_refused(tool: Path, tmp_path: Path) -> None:
    code = """
        import cumem
        try:
            cumem.backend()
        except ValueError as error:
            assert "CUMEM_NVTX must be 1, true, yes or on" in str(error), error
            assert "not 'maybe'" in str(error), error
        else:
            raise SystemExit("no error")
    """
    assert seen(code, tool, tmp_path, CUMEM_NVTX="maybe") == []


def test_sizes_are_written_as_people_read_them(tool: Path, tmp_path: Path) -> None:
    code = """
        import cumem
        for nbytes in (1, 1023, 1024, 1536, 5 << 20):
            a = cumem.empty_pinned(nbytes, "u1")
            cumem.copy(cumem.empty_pinned(nbytes, "u1"), a)
    """
    texts = [t for t in pushed(seen(code, tool, tmp_path)) if re.match(r"copy \d", t)]
    wanted = ["1 B", "1023 B", "1 KiB", "1.5 KiB", "5 MiB"]
    assert texts == [f"copy {size}" for size in wanted]


#: A program that gets ranges from CUPTI, NVIDIA's own library for profilers.
CUPTI = """
    import ctypes, os, cumem, numpy as np

    class Range(ctypes.Structure):
        _fields_ = (
            ("version_and_size", ctypes.c_uint32),
            ("category_and_colours", ctypes.c_uint32 * 3),
            ("payload_type", ctypes.c_uint32 * 2),
            ("payload", ctypes.c_uint64),
            ("message_type", ctypes.c_int32),
            ("message", ctypes.c_char_p),
        )

    class Push(ctypes.Structure):
        _fields_ = (("domain", ctypes.c_void_p), ("range", ctypes.POINTER(Range)))

    class Data(ctypes.Structure):
        _fields_ = (("function", ctypes.c_char_p), ("given", ctypes.POINTER(Push)))

    seen = []

    @ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(Data)
    )
    def note(user, domain, number, data):
        if data.contents.function == b"nvtxDomainRangePushEx":
            found = data.contents.given.contents.range.contents
            seen.append((found.message.decode(), found.payload))

    cupti = ctypes.CDLL(os.environ["NVTX_INJECTION64_PATH"])
    subscriber = ctypes.c_void_p()
    assert cupti.cuptiSubscribe(ctypes.byref(subscriber), note, None) == 0
    assert cupti.cuptiEnableDomain(1, subscriber, 5) == 0  # CUPTI_CB_DOMAIN_NVTX
    cumem.copy(cumem.empty_device(1 << 20, "u1"), np.ones(1 << 20, "u1"))
    cumem.synchronize()
    assert ("copy 1 MiB", 1 << 20) in seen, seen
    assert ("wait for device", 0) in seen, seen
"""


def find_cupti() -> Path | None:
    """Return the path of CUPTI's library from NVIDIA's wheels or from CUDA's folder."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec and spec.submodule_search_locations) or ()]
    found = [lib for f in folders for lib in f.glob("*/lib/libcupti.so.1[0-9]")]
    found += Path("/usr/local/cuda/extras/CUPTI/lib64").glob("libcupti.so.1[0-9]")
    return min(found, default=None)


@pytest.mark.gpu
def test_nvidias_own_tool_sees_the_ranges(tmp_path: Path) -> None:
    cupti = find_cupti()
    if cupti is None:
        pytest.skip("there is no libcupti")
    seen(CUPTI, cupti, tmp_path, "cuda")
