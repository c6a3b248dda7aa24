# SPDX-License-Identifier: Apache-2.0
"""Random shapes, dtypes and basic indices for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

#: Dtypes of all sorts, among them one in the other byte order and records.
DTYPES = [
    np.dtype(d)
    for d in (
        "?",
        "i1",
        "u2",
        "<i4",
        ">i4",
        "i8",
        "f2",
        "f4",
        "f8",
        "c8",
        "c16",
        "S3",
        "U2",
        "V5",
        "M8[ns]",
        "m8[s]",
        [("a", "i2"), ("b", "f8")],
        [("x", "f4", (3,))],
    )
]

KINDS = ["pinned", "mapped", "managed", "device"]

dtypes = st.sampled_from(DTYPES)
kinds = st.sampled_from(KINDS)
#: Where a copy may start or end: the kinds of cumem's memory, and a NumPy array.
places = st.sampled_from([*KINDS, "numpy"])
shapes = st.lists(st.integers(0, 7), min_size=0, max_size=4).map(tuple)


@st.composite
def slices(draw: st.DrawFn, length: int) -> slice:
    """Draw a slice, whose ends may lie outside of an axis of this length."""
    bound = st.none() | st.integers(-length - 2, length + 2)
    step = draw(st.none() | st.integers(-3, 3).filter(bool))
    return slice(draw(bound), draw(bound), step)


@st.composite
def basic_indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[object, ...]:
    """Draw an index of ints, slices, None and at most one Ellipsis, to fit `shape`."""
    index: list[object] = []
    used = draw(st.integers(0, len(shape)))
    for length in shape[:used]:
        if length and draw(st.booleans()) and draw(st.booleans()):
            index.append(draw(st.integers(-length, length - 1)))
        else:
            index.append(draw(slices(length)))
    if draw(st.booleans()):
        index.append(Ellipsis)
    if draw(st.booleans()):
        index.insert(draw(st.integers(0, len(index))), None)
    return tuple(index)


def as_view(index: tuple[object, ...]) -> tuple[object, ...]:
    """Add an Ellipsis to an index, so that NumPy always returns a view."""
    return index if Ellipsis in index else (*index, Ellipsis)


def random_array(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Make an array of any dtype out of random bytes."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return np.zeros(shape, dtype)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape).copy()


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays have the same bytes, even those of NaNs and NaTs."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    )
