# SPDX-License-Identifier: Apache-2.0
"""Makes numbers for tests of conversions between dtypes, and compares results."""

from __future__ import annotations

import ml_dtypes
import numpy as np

F4, F8 = np.dtype("f4"), np.dtype("f8")


F2, BF16 = np.dtype("f2"), np.dtype(ml_dtypes.bfloat16)


FLOATS = (F2, BF16, F4, F8)


def every_half(dtype: np.dtype) -> np.ndarray:
    """Make all values of a type of two bytes."""
    return np.arange(1 << 16, dtype="u2").view(dtype)


def both_parts(reals: np.ndarray) -> np.ndarray:
    """Make complex numbers of these real parts and of imaginary parts in another order.

    The parts are joined as bits, since arithmetic would change NaN and the sign of zero.
    """
    imaginary = np.random.default_rng(3).permutation(reals)
    imaginary[::5] = 0
    imaginary[1::5] = -0.0
    reals = reals.copy()
    reals[::10] = -0.0
    pairs = np.stack([reals, imaginary], axis=-1)
    return pairs.reshape(-1).view(f"c{2 * reals.itemsize}")


def interesting(dtype: np.dtype) -> np.ndarray:
    """Make all values of a type of one or two bytes, or some values of a longer one.

    The values of a longer type are random bits, all values of shorter types, the middle
    between each two of these, and the numbers right beside a middle. Rounding changes its
    direction at a middle.
    """
    rng = np.random.default_rng(7)
    if dtype == "?":
        return rng.integers(0, 2, 3000).astype("?")
    if dtype.itemsize == 1:
        return np.arange(256, dtype="u1").view(dtype)
    if dtype.itemsize == 2:
        return every_half(dtype)
    if dtype.kind == "c":
        return both_parts(interesting(np.dtype(f"f{dtype.itemsize // 2}")))
    drawn = np.frombuffer(rng.bytes(dtype.itemsize << 15), dtype)
    if dtype.kind in "iu":
        small = rng.integers(0, 1 << 26, 20_000).astype(dtype)
        return np.concatenate([drawn, small, np.array([0, 1], dtype)])
    sides = []
    for short in (every_half(F2), every_half(BF16)):
        exact = short.astype(F4).astype(dtype)
        middle = (exact[:-1] + exact[1:]) / dtype.type(2)
        sides += [exact, middle]
    if dtype == F8:
        exact = drawn.view(F4).astype(F8)
        sides += [exact, (exact + np.nextafter(exact.astype(F4), F4.type(0))) / 2]
    near = np.concatenate(sides)
    most = dtype.type(np.inf)
    return np.concatenate(
        [drawn, near, np.nextafter(near, most), np.nextafter(near, -most)]
    )


def assert_same(found: np.ndarray, expected: np.ndarray, was: np.ndarray) -> None:
    """Fail if two arrays differ in dtype or in any bit.

    `was` is the array that was converted.
    """
    assert found.dtype == expected.dtype
    if found.dtype.kind == "c":
        part = f"f{found.itemsize // 2}"
        found = np.ascontiguousarray(found).view(part).reshape(-1, 2)
        expected = np.ascontiguousarray(expected).view(part).reshape(-1, 2)
        for i in range(2):
            assert_same(found[:, i], expected[:, i], was)
        return
    bits = f"u{found.itemsize}"
    differ = np.ascontiguousarray(found).view(bits) != np.ascontiguousarray(
        expected
    ).view(bits)
    if was.dtype == BF16 and found.dtype == F2:  # the NaN of ml_dtypes has other bits
        differ &= ~(np.isnan(found) & np.isnan(expected))
    assert not differ.any(), (was[differ][:3], found[differ][:3], expected[differ][:3])


#: Functions that view an array in another layout.
LAYOUTS = {
    "whole": lambda a: a,
    "transposed": lambda a: a.T,
    "every third column": lambda a: a[:, ::3],
    "few columns": lambda a: a.reshape(-1, 10)[:, :3],
    "upside down": lambda a: a[::-1],
    "planes": lambda a: a.reshape(-1, 250, 4).transpose(2, 0, 1),
}
