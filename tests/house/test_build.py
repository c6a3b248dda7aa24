# SPDX-License-Identifier: Apache-2.0
"""Tests of where setup.py finds CUDA's files, and of what makes the build fail.

The tests run setup.py without setuptools, and make folders of empty files that look like
toolkits. The last test is about the headers that the build makes of the kernels.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "setup.py"
FILES = ("cuda_runtime_api.h", "crt/host_defines.h", "libcudart_static.a")

pytestmark = pytest.mark.skipif(
    not SETUP.is_file(), reason="the sources are not beside the tests"
)


def make_tree(root: Path, library: str = "lib", files: tuple[str, ...] = FILES) -> Path:
    """Make a CUDA toolkit of empty files, and return its folder."""
    for name in files:
        path = root / (library if name.endswith(".a") else "include") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Run setup.py without setuptools, as on a machine without any CUDA.

    Returns the function `find_cuda` and the class `Built` of setup.py. It also returns two
    folders in which setup.py looks for CUDA: that of the build requirements, and the one
    that stands for /usr/local/cuda.
    """
    tools = ModuleType("setuptools")
    tools.Extension = lambda *args: SimpleNamespace()  # type: ignore[attr-defined]
    tools.setup = lambda **options: None  # type: ignore[attr-defined]
    command = ModuleType("setuptools.command.build_ext")
    command.build_ext = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "setuptools", tools)
    monkeypatch.setitem(sys.modules, "setuptools.command.build_ext", command)
    monkeypatch.chdir(SETUP.parent)
    for name in ("CUMEM_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    names: dict[str, Any] = {"__name__": "setup"}
    exec(compile(SETUP.read_text(encoding="utf-8"), str(SETUP), "exec"), names)
    requirements = tmp_path / "site" / "nvidia"

    def spec(name: str) -> SimpleNamespace | None:
        places = [str(requirements)] if requirements.is_dir() else None
        return places and SimpleNamespace(submodule_search_locations=places)

    def places() -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = original()
        assert found["the usual place"] == [Path("/usr/local/cuda")]
        return found | {"the usual place": [tmp_path / "usual"]}

    original: Callable[[], dict[str, list[Path]]] = names["cuda_places"]
    names["find_spec"], names["cuda_places"] = spec, places
    return SimpleNamespace(
        find=names["find_cuda"],
        built=names["Built"],
        requirements=requirements,
        usual=tmp_path / "usual",
    )


@pytest.mark.parametrize("library", ["lib", "lib64"])
def test_cumem_cuda_home_comes_first(build, monkeypatch, tmp_path, library) -> None:
    home = make_tree(tmp_path / "mine", library)
    make_tree(build.requirements / "cuda_runtime")
    make_tree(build.usual)
    monkeypatch.setenv("CUMEM_CUDA_HOME", str(home))
    monkeypatch.setenv("CUDA_HOME", str(make_tree(tmp_path / "other")))
    assert build.find() == (
        [home / "include", home / "include"],
        home / library / "libcudart_static.a",
    )


@pytest.mark.parametrize("target", ["x86_64-linux", "sbsa-linux"])
def test_a_target_folder_of_a_toolkit_is_a_cuda_home(
    build, monkeypatch, tmp_path, target
) -> None:
    home = make_tree(tmp_path / "targets" / target)
    monkeypatch.setenv("CUMEM_CUDA_HOME", str(home))
    assert build.find()[1] == home / "lib" / "libcudart_static.a"


def test_toolkit_whose_folders_are_links_is_found(build, monkeypatch, tmp_path) -> None:
    # On aarch64 the folders of /usr/local/cuda are links.
    make_tree(build.usual / "targets" / "sbsa-linux")
    (build.usual / "include").symlink_to("targets/sbsa-linux/include")
    (build.usual / "lib64").symlink_to("targets/sbsa-linux/lib")
    assert build.find()[1] == build.usual / "lib64" / "libcudart_static.a"


def test_build_requirements_come_before_a_toolkit(build, monkeypatch, tmp_path) -> None:
    # The wheels have the runtime of CUDA 12 and, from CUDA 13, only crt/.
    runtime = make_tree(build.requirements / "cuda_runtime", files=(FILES[0], FILES[2]))
    crt = make_tree(build.requirements / "cu13", files=FILES[:2])
    monkeypatch.setenv("CUDA_HOME", str(make_tree(tmp_path / "other")))
    assert build.find() == (
        [runtime / "include", crt / "include"],
        runtime / "lib" / "libcudart_static.a",
    )


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_toolkit_of_the_environment_comes_before_the_usual_place(
    build, monkeypatch, tmp_path, name
) -> None:
    home = make_tree(tmp_path / "other")
    make_tree(build.usual)
    monkeypatch.setenv(name, str(home))
    assert build.find()[1] == home / "lib" / "libcudart_static.a"


@pytest.mark.parametrize("missing", FILES)
def test_missing_file_is_named_with_the_folders_looked_in(
    build, monkeypatch, tmp_path, missing
) -> None:
    there = tuple(name for name in FILES if name != missing)
    home = make_tree(tmp_path / "mine", files=there)
    monkeypatch.setenv("CUMEM_CUDA_HOME", str(home))
    with pytest.raises(SystemExit) as error:
        build.find()
    lines = str(error.value).splitlines()
    at = lines.index(f"  CUMEM_CUDA_HOME: no {missing}")
    assert lines[at + 1 : at + 4] == [
        f"    {home / folder}" for folder in ("include", "lib64", "lib")
    ]
    everything = ", ".join(FILES)
    for name in ("the build requirements", "CUDA_HOME", "CUDA_PATH"):
        assert f"  {name}: no {everything} (nothing set or installed)" in lines
    assert f"  the usual place: no {everything}" in lines
    assert f"    {build.usual / 'lib64'}" in lines


def test_dtype_of_devices_that_the_kernel_does_not_read_ends_the_build() -> None:
    """A row of the dtypes may say DEVICE only if the text of the kernel names the dtype."""
    check = runpy.run_path(str(ROOT / "csrc" / "headers.py"))[
        "check_device_conversions"
    ]
    kernel = (ROOT / "csrc" / "transfer" / "device" / "strided.ptx").read_text()
    listed = (ROOT / "csrc" / "base" / "dtypes.h").read_text()
    check(kernel, listed)
    with pytest.raises(ValueError, match=r"DEVICE of BFLOAT16: .*strided\.ptx"):
        check(kernel.replace("CM_BFLOAT16", "14"), listed)
    row = '"float8_e5m2", void, NONE, '
    with pytest.raises(ValueError, match="DEVICE of FLOAT8_E5M2: "):
        check(kernel, listed.replace(f"{row}HOST", f"{row}DEVICE"))


def test_what_was_built_is_taken_where_all_that_it_is_made_of_is_the_same(
    build, monkeypatch, tmp_path
) -> None:
    source = tmp_path / "source.c"
    target = tmp_path / "objects" / "source.o"
    made: list[bytes] = []

    def make_target(*given: bytes) -> bytes:
        def make() -> None:
            made.append(source.read_bytes())
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(b"made of " + made[-1])

        target.unlink(missing_ok=True)
        build.built(*given).make(target, make, source)
        return target.read_bytes()

    monkeypatch.setenv("CUMEM_BUILT", str(tmp_path / "built"))
    for text in (b"one", b"two", b"one"):
        source.write_bytes(text)
        assert make_target(b"-O2") == b"made of " + text
    assert made == [b"one", b"two"]
    make_target(b"-O0")  # A file that was made with other switches is not reused.
    assert made == [b"one", b"two", b"one"]
    monkeypatch.delenv("CUMEM_BUILT")
    make_target(b"-O2")
    assert made == [b"one", b"two", b"one", b"one"]
