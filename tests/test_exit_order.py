# SPDX-License-Identifier: Apache-2.0
"""What is still open when the interpreter ends, freed in any order."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys

import pytest

import cumem

LEFT = {
    "pools": "kept = [cumem.default_pool('pinned'), cumem.Pool('device')]",
    "streams": "kept = [cumem.Stream() for _ in range(3)]",
    "events": "kept = [cumem.Stream().record() for _ in range(3)]",
    "arrays": "with cumem.numpy_pinned(1):\n    kept = np.ones(1000001)",
    "all": "kept = [cumem.Stream(), cumem.Event(), cumem.Pool('pinned')]",
}


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("what", LEFT)
def test_objects_that_outlive_the_module_are_freed_without_its_state(
    what: str, cycle: bool
) -> None:
    """AddressSanitizer sees what a plain run may survive."""
    code = f"import cumem, numpy as np\n{LEFT[what]}\n"
    if cycle:  # only the last collection frees it
        code += (
            "loop = [kept, np]\nloop.append(loop)\nnp.kept_by_another_module = loop\n"
        )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize(
    "other", [cumem.Stream, object, lambda: None, lambda: cumem.Pool("pinned")]
)
def test_elapsed_of_what_is_no_event_is_refused(runtime, other) -> None:
    with pytest.raises(TypeError, match="start must be an Event"):
        cumem.Event()._elapsed(other())


@pytest.mark.parametrize(
    "make", [lambda: cumem.Pool("pinned"), cumem.Stream, cumem.Event]
)
def test_shutdown_out_of_a_collection_while_an_object_is_made_leaves_it_whole(
    runtime, make
) -> None:
    """Up to Python 3.11 a collection runs inside the allocation of the object."""
    is_making = False
    tried = 0

    def collected(phase: str, info: dict[str, int]) -> None:
        nonlocal tried
        if phase == "start" and is_making:
            tried += 1
            with contextlib.suppress(RuntimeError):
                cumem.shutdown()

    make().close()  # which loads what it needs
    threshold = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1, 1, 1)
    try:
        is_making = True
        for _ in range(20):
            with contextlib.suppress(
                ValueError, RuntimeError
            ):  # closed by the shutdown()
                made = make()
                repr(made)
                made.close()
    finally:
        is_making = False
        gc.callbacks.remove(collected)
        gc.set_threshold(*threshold)
    assert tried > 0
