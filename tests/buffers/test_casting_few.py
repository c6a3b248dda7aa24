# SPDX-License-Identifier: Apache-2.0
"""Few elements, which the calling thread converts by itself.

Counters of the core show whether a copy became a job for the copy threads. The values
are compared with NumPy's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from support import session, values
from support.casting import (
    assert_same,
)
from support.faults import sweep
from support.session import testing
from support.strategies import same_bytes

import cumem

# A table in C has the rules of casting, so no version of Python changes them.
pytestmark = pytest.mark.any_python


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ignore NumPy's warnings about values that do not fit the target's dtype."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "invalid value|overflow", RuntimeWarning)
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        yield


#: In each pair, one dtype is wider than the other, is complex, or has the other byte
#: order.
FEW = [
    ("f8", "f4"),
    ("f4", "c8"),
    ("c16", "c8"),
    ("u1", "f4"),
    (">i2", "f8"),
    ("?", "c16"),
]


@pytest.mark.parametrize("kind", ["numpy", "pinned", "mapped"])
@pytest.mark.parametrize(("source", "to"), FEW)
def test_few_elements_are_converted_without_a_job(emulated, kind, source, to) -> None:
    was = np.random.default_rng(0).integers(0, 2, (40, 50)).astype(source)
    given = values.put(was, kind)
    far, back = (
        cumem.zeros(was.shape, to),
        values.put(np.zeros(was.shape, source), kind),
    )
    cumem.Device(0).synchronize()
    before = testing.copy_counts()["quick"]
    cumem.copy(far, given, casting="unsafe")
    cumem.copy(back, far, casting="unsafe")
    assert testing.copy_counts()["quick"] == before + 2
    assert_same(values.get(far), was.astype(to), was)
    assert same_bytes(values.get(back), was)
    reported = cumem.explain(far, given, casting="unsafe")
    assert (reported.route, reported.threads, reported.nbytes) == (
        "direct",
        1,
        far.nbytes,
    )
    assert "becomes" in reported.why


def test_few_elements_in_views_or_by_numpy_are_left_to_a_job(emulated) -> None:
    far = cumem.zeros((40, 50), "f4")
    cumem.Device(0).synchronize()
    before = testing.copy_counts()["quick"]
    cumem.copy(far, np.ones((50, 40)).T, casting="same_kind")
    cumem.copy(far, np.ones((40, 50), "g"), casting="same_kind")
    cumem.copy(far[:, :3], np.ones((40, 3)), casting="same_kind")
    assert testing.copy_counts()["quick"] == before
    assert (values.get(far) == 1).all()


@pytest.mark.parametrize("count", [1, 33, 8193, 32767, 32768, 32769])
def test_few_elements_and_many_are_converted_alike(runtime, count) -> None:
    was = np.random.default_rng(count).standard_normal(count)
    for to in ("f4", "c8", "i2"):
        far, back = cumem.zeros(count, to), np.zeros(count)
        cumem.copy(far, was, casting="unsafe")
        assert same_bytes(values.get(far), was.astype(to))
        cumem.copy(back, far, casting="unsafe")
        assert same_bytes(back, was.astype(to).astype("f8"))


def test_few_elements_come_after_what_is_still_written(emulated) -> None:
    far = cumem.zeros(100, "f4")
    given, back = cumem.zeros(100, "f8", "pinned"), np.zeros(100)
    late, stream = cumem.full(100, 7.0), cumem.Stream()
    cumem.Device(0).synchronize()
    with session.when_waiting(lambda: testing.gate_open(stream)):
        session.shut(stream)
        cumem.copy_async(given, late, stream=stream)
        cumem.copy(far, given, casting="same_kind")
    cumem.copy(back, far, casting="safe")
    assert (back == 7).all()


def test_few_elements_are_converted_where_nothing_may_be_page_locked(emulated) -> None:
    with cumem.limit("pinned", 0):
        far, back = cumem.zeros(100, "f4"), np.zeros(100)
        cumem.copy(far, np.arange(100.0), casting="same_kind")
        cumem.copy(back, far, casting="safe")
    assert (back == np.arange(100)).all()


def test_every_runtime_call_of_a_cast_of_few_elements_may_fail(emulated) -> None:
    was = np.arange(100.0)

    def scenario() -> None:
        far, back = cumem.zeros(100, "c8"), np.zeros(100)
        cumem.copy(far, was, casting="same_kind")
        cumem.copy(back, far, casting="unsafe")
        assert (back == was).all()

    swept = sweep(scenario)
    assert {"copy_async", "event_record"} <= swept.failed
    assert "copy_async" in swept.raised
