# SPDX-License-Identifier: Apache-2.0
"""Arrays with masked elements, whose masks lie in other memory and must not get lost.

cumem copies elements only. Every call that takes memory must therefore refuse an array
in which an element is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import programs, values
from support.strategies import KINDS

import cumem


def masked() -> Any:
    return np.ma.array(np.arange(3.0), mask=[False, True, False])


#: These calls read or write the memory of an array.
USES: dict[str, Callable[[Any, Any, Path], object]] = {
    "array": lambda m, b, path: cumem.array(m),
    "array, converted": lambda m, b, path: cumem.array(m, "f4", casting="same_kind"),
    "array, by NumPy": lambda m, b, path: cumem.array(m, "c16"),
    "asarray": lambda m, b, path: cumem.asarray(m),
    "asbuffer": lambda m, b, path: cumem.asbuffer(m),
    "asnumpy": lambda m, b, path: cumem.asnumpy(m),
    "asarray in order": lambda m, b, path: cumem.asarray(m, order="C"),
    "register": lambda m, b, path: cumem.register(m),
    "copy": lambda m, b, path: cumem.copy(b, m),
    "copy to it": lambda m, b, path: cumem.copy(m, b),
    "copy, converted": lambda m, b, path: cumem.copy(
        cumem.zeros(3, "c16"), m, casting="unsafe"
    ),
    "copy_async": lambda m, b, path: cumem.copy_async(b, m),
    "copy_many": lambda m, b, path: cumem.copy_many([(b, m)]),
    "scatter": lambda m, b, path: cumem.scatter([b], m),
    "fill": lambda m, b, path: b.fill(m),
    "setitem": lambda m, b, path: b.__setitem__(..., m),
    "setitem of one": lambda m, b, path: b.__setitem__(0, np.ma.masked),
    "full": lambda m, b, path: cumem.full(3, m),
    "to_device": lambda m, b, path: cumem.to_device({"a": [m]}),
    "PinnedCollate": lambda m, b, path: cumem.PinnedCollate()([np.zeros(3), m]),
    "save": lambda m, b, path: cumem.save(path, m),
    "savez": lambda m, b, path: cumem.savez(path, a=m),
    "tofile": lambda m, b, path: cumem.tofile(path, m),
    "save_safetensors": lambda m, b, path: cumem.save_safetensors(path, {"a": m}),
}


@pytest.mark.parametrize("use", USES)
def test_masked_elements_are_refused_by_whatever_takes_memory(
    emulated, tmp_path: Path, use: str
) -> None:
    buffer = cumem.zeros(3)
    with pytest.raises(TypeError, match=r"masked elements.*array\.filled\(value\)"):
        USES[use](masked(), buffer, tmp_path / "x")
    assert buffer.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [np.ma.nomask, False, [False] * 3], ids=str)
def test_a_mask_that_hides_nothing_is_no_obstacle(runtime, kind, mask) -> None:
    plain = np.ma.array(np.arange(3.0), mask=mask)
    buffer = cumem.array(plain, kind=kind)
    assert values.get(buffer).tolist() == [0, 1, 2]
    buffer.fill(7)
    cumem.copy(plain, buffer)
    assert plain.tolist() == [7, 7, 7]


def test_what_the_error_says_to_type_is_taken(emulated) -> None:
    assert cumem.array(masked().filled(9)).tolist() == [0, 9, 2]
    assert cumem.array(masked().data).tolist() == [0, 1, 2]
    assert cumem.zeros_like(masked()).shape == (3,)  # zeros_like() reads no elements.


class Variable:
    """A variable like netCDF4's, which gives masked arrays without being asked."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return masked()


READS = (
    *("array", "array, converted", "array, by NumPy", "asarray", "copy", "copy_async"),
    *("copy_many", "fill", "setitem", "full", "save", "savez"),
)


@pytest.mark.parametrize("use", READS)
def test_an_object_that_becomes_a_masked_array_is_refused(
    runtime, tmp_path: Path, use: str
) -> None:
    buffer = cumem.zeros(3)
    with pytest.raises(TypeError, match=r"masked elements.*array\.filled\(value\)"):
        USES[use](Variable(), buffer, tmp_path / "x")
    assert buffer.to_numpy().tolist() == [0, 0, 0]
    assert not list(tmp_path.iterdir())


#: This program says whether work with plain arrays has loaded numpy.ma.
ASK = """
import sys
import numpy as np
if "numpy.ma" in sys.modules:
    sys.exit("loaded by NumPy itself")
import cumem
buffer = cumem.array([1.0, 2.0])
buffer[...] = np.ones(2)
cumem.copy(buffer, np.ones(2))
print("numpy.ma" in sys.modules)
"""


def test_arrays_without_masks_do_not_load_the_module_of_masks() -> None:
    """NumPy's code recurses if several threads begin to load numpy.ma at once."""
    done = programs.run("-c", ASK)
    if "loaded by NumPy itself" in done.stderr:
        pytest.skip("this NumPy always loads numpy.ma")
    assert done.stdout == "False\n", done.stderr
