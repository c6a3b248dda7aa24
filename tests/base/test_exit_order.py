# SPDX-License-Identifier: Apache-2.0
"""Objects that are still open when the interpreter ends are freed safely in any order.

Each program of these tests leaves objects behind: in its main module, or in a cycle that
only the interpreter's last garbage collection frees. The program must end without a crash
or a message.
"""

from __future__ import annotations

import contextlib
import gc

import pytest
from support import programs

import cumem

# A build with checks notices a call of Python that is made without the GIL.
pytestmark = pytest.mark.checked

#: With these variables freed memory is overwritten, so that a later use of it is noticed.
POISONED = {"PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "165"}

#: What a program leaves behind, with the code that makes it.
LEFT = {
    "pools": "kept = [cumem.default_pool('pinned'), cumem.Pool('device')]",
    "streams": "kept = [cumem.Stream() for _ in range(3)]",
    "events": "kept = [cumem.Stream().record() for _ in range(3)]",
    "arrays": "with cumem.numpy_pinned(1):\n    kept = np.ones(1000001)",
    "transfers": "kept = [cumem.copy_async(np.ones(9), np.zeros(9)) for _ in range(3)]",
    "waits that Ctrl-C ended": """
import signal, threading
from support import session
def interrupt():
    session.wait_until_waiting(threading.main_thread())
    signal.raise_signal(signal.SIGINT)
kept = cumem.Stream()
with session.gate(kept):
    cumem.empty_device(100).fill(1, stream=kept)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        cumem.synchronize()
    except KeyboardInterrupt:
        pass
    thread.join()""",
    "all": "kept = [cumem.Stream(), cumem.Event(), cumem.Pool('pinned')]",
}


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("what", LEFT)
def test_objects_that_outlive_the_module_are_freed_without_its_state(
    what: str, cycle: bool
) -> None:
    """AddressSanitizer reports a use of freed memory, which a plain run may survive."""
    code = f"from support import core\nimport cumem, numpy as np\n{LEFT[what]}\n"
    if cycle:  # only the interpreter's last collection frees it
        code += (
            "loop = [kept, np]\nloop.append(loop)\nnp.kept_by_another_module = loop\n"
        )
    done = programs.run("-W", "ignore", "-X", "faulthandler", "-c", code, **POISONED)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.hooks
@pytest.mark.parametrize("cycle", [False, True])
def test_failed_transfers_that_outlive_the_module_are_reported_or_silent(
    cycle: bool,
) -> None:
    """A report of a failure is an exception, which cannot be made without the module."""
    code = """
import numpy as np
from support import testing
import cumem

testing.configure(backend="emulated", faults=True)
target = cumem.empty_device(1 << 20)
testing.plan_fault("copy_async", 1, 999, repeat=True)
kept = [cumem.copy_async(target, cumem.empty_pinned(1 << 20)) for _ in range(3)]
while not all(each.done for each in kept):
    pass
testing.plan_fault(None, 0)
"""
    if cycle:
        code += "loop = [kept, np]\nloop.append(loop)\nnp.kept = loop\n"
    done = programs.run("-W", "ignore", "-X", "faulthandler", "-c", code, **POISONED)
    assert done.returncode == 0, done.stderr
    said = {line.split(":")[0] for line in done.stderr.splitlines()}
    assert said <= {"Exception ignored in", "cumem.CudaError"}, done.stderr


@pytest.mark.parametrize(
    "other", [cumem.Stream, object, lambda: None, lambda: cumem.Pool("pinned")]
)
def test_seconds_since_an_object_that_is_not_an_event_is_refused(
    runtime, other
) -> None:
    with pytest.raises(TypeError, match="start must be an Event"):
        cumem.Event().seconds_since(other())


@pytest.mark.parametrize(
    "make", [lambda: cumem.Pool("pinned"), cumem.Stream, cumem.Event]
)
def test_shutdown_out_of_a_collection_while_an_object_is_made_leaves_it_whole(
    runtime, make
) -> None:
    """Up to Python 3.11 the allocation of an object may run a collection.

    The test makes objects while each collection calls `shutdown()`. Each attempt must
    either raise an error, or make a whole object, which can be shown and closed.
    """
    is_making = False
    tried = 0

    def collected(phase: str, info: dict[str, int]) -> None:
        nonlocal tried
        if phase == "start" and is_making:
            tried += 1
            with contextlib.suppress(RuntimeError):
                cumem.shutdown()

    make().close()  # the first call loads what the others need
    threshold = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1, 1, 1)
    try:
        is_making = True
        for _ in range(20):
            # The shutdown() may close the object before it is used.
            with contextlib.suppress(ValueError, RuntimeError):
                made = make()
                repr(made)
                made.close()
    finally:
        is_making = False
        gc.callbacks.remove(collected)
        gc.set_threshold(*threshold)
    assert tried > 0
