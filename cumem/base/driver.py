# SPDX-License-Identifier: Apache-2.0
"""Asks the driver for its version, and which devices it has."""

from __future__ import annotations

import warnings
from typing import Literal

from cumem import _core
from cumem.base.errors import CudaError, EmulationWarning

_Backend = Literal["cuda", "emulated"]


def is_available() -> bool:
    """Return whether there is a GPU that cumem can work on.

    Returns
    -------
    bool
        False if devices are emulated, if a driver or GPU is missing or does not work, and
        in a child made by ``fork``. This function raises no errors and emits no
        warnings.

    Notes
    -----
    Like the first use of anything else, this opens the backend and so decides between a
    GPU and emulation. It creates no context.

    Examples
    --------
    >>> cumem.is_available() == (cumem.info.about().emulation_reason is None)
    True
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EmulationWarning)  # the answer says so
            works = backend() == "cuda" and device_count() > 0
            return works and not _core._is_host_only()
    except Exception:
        return False


def device_count() -> int:
    """Return the number of devices, real or emulated.

    Returns
    -------
    int

    Raises
    ------
    CudaError
        If the driver cannot answer.

    Examples
    --------
    >>> cumem.device_count() >= 1
    True
    """
    try:
        return _core._driver_device_count()
    except CudaError as error:
        if error.name == "cudaErrorNoDevice":  # this is how the driver says 0
            return 0
        raise


def backend() -> _Backend:
    """Return the backend: "cuda", or "emulated" if there is no GPU.

    Returns
    -------
    str

    Raises
    ------
    CudaError
        If there is a driver but it cannot be opened.

    Examples
    --------
    >>> cumem.backend() in ("cuda", "emulated")
    True
    """
    return _core._read_backend()[0]


def emulation_reason() -> str | None:
    """Return why devices are emulated, or None on a real GPU."""
    return _core._read_backend()[1]


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA version that the driver serves, such as (13, 0)."""
    return _pair(_core._driver_version())


def runtime_version() -> tuple[int, int]:
    """Return the CUDA version of the runtime library that is built in."""
    return _pair(_core._runtime_version())


def _pair(version: int) -> tuple[int, int]:
    return version // 1000, version % 1000 // 10
