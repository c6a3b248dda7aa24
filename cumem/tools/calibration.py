# SPDX-License-Identifier: Apache-2.0
"""Figures of this machine: measured on request, and kept in the cache directory."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
import zlib
from collections.abc import Mapping
from typing import Any

from cumem import _core
from cumem.base.answer import Answer
from cumem.base.driver import driver_version
from cumem.base.units import format_nbytes, format_rate, format_seconds
from cumem.base.variables import read_switch
from cumem.base.version import __version__
from cumem.buffers.arguments import hinting, read_flag
from cumem.devices.device import Device
from cumem.files.raw import open_regular, replacing
from cumem.tools import measuring

_SCHEMA = 1
_VARIABLE = "CUMEM_CALIBRATION"
_MOST_BYTES = 64 << 10  # of a file that could be one of ours


@dataclasses.dataclass(frozen=True, repr=False)
class Calibration(Answer):
    """Figures of a machine; what `calibrate` returns.

    Attributes
    ----------
    figures : Mapping of str to float
        Rates in bytes per second, times in ns, sizes in bytes. ``up_rate`` and
        ``down_rate``: page-locked memory to the device and from it; ``copy_rate_1`` to
        ``copy_rate_16``: between two places of the host by so many threads, on the line of
        fewer where not all can run, then 0; ``driver_up_rate``, ``driver_down_rate``:
        ordinary memory by the driver; ``dma_gap_ns``: between two copies of a chain;
        ``wake_ns``: until a sleeping thread works; ``staged_up_nbytes``,
        ``staged_down_nbytes``: size from which on pieces through page-locked memory win.
    source : str
        ``"measured"``, ``"kept"`` (from the file), or ``"default"``.
    path : str or None
        The file where they are kept; None if they are kept nowhere.

    Examples
    --------
    >>> calibration = cumem.calibrate()
    >>> calibration.to_dict()
    """

    figures: Mapping[str, float]
    source: str
    path: str | None

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, _text(name, value)) for name, value in self.figures.items()]

    def __repr__(self) -> str:
        rows = self._rows()
        wide = max(len(text) for _, text in rows)
        lines = "\n".join(f"  {name:<18} {text:>{wide}}" for name, text in rows)
        return f"cumem.Calibration, {self.source}\n{lines}"

    def _repr_html_(self) -> str:
        from cumem.tools.notebook.html import page, table

        title = f"cumem.Calibration, {self.source}"
        return page(title, table("", ["figure", "value"], self._rows()))


def _text(name: str, value: float) -> str:
    if name.endswith("_ns"):
        return format_seconds(value * 1e-9)
    if name.endswith("_nbytes"):
        return format_nbytes(int(value))
    return format_rate(value, 1.0) if value > 0 else "-"


@hinting
def calibrate(device: object = None, *, again: bool = False) -> Calibration:
    """Measure this machine, or find what was measured before, and copy accordingly.

    Links, threads of the host and the driver's own copies are measured for a quarter of a
    second, on a very slow link a little more, not counting the opening of a device that is
    not in use yet, with less than 64 MiB of host memory, on a stream of its own. Copies of
    other threads are made meanwhile as is being tried. What is found is kept in the user's
    cache directory, for this kind of processor, number of processors, device, link, driver
    and version of cumem; thresholds, chunks and threads of all later copies follow from it
    (see `configure`), in later processes too, which read the file at their first copy of
    64 KiB or more. Nothing is measured unless this function is called.

    Parameters
    ----------
    device : Device, int or str, optional
        cumem's current device by default.
    again : bool, default False
        Measure even if figures are kept.

    Returns
    -------
    Calibration
        The figures. On the emulated device they are the defaults, which are those of an
        H200: nothing is measured or kept.

    Raises
    ------
    ValueError
        If the device does not exist.
    CudaError
        If a call of the measuring failed; nothing is changed then, nor by Ctrl-C.

    Notes
    -----
    **Blocks** meanwhile, GIL released. Call it while nothing else uses the device or the
    processors, or the figures are too low. ``CUMEM_CALIBRATION=off`` neither keeps nor
    looks up anything; ``CUMEM_CALIBRATION=<path>`` keeps the figures in that file.

    Examples
    --------
    >>> cumem.calibrate()
    """
    again = read_flag(again, "again")
    where: Any = device
    unit = Device(_core.current_device() if device is None else where)
    if unit.emulated:
        measuring.use(None)
        return Calibration(dict(measuring.DEFAULTS), "default", None)
    path = _path(unit)
    figures = None if again or path is None else _load(path, machine_key(unit))
    if figures is not None and _take(figures):
        return Calibration(figures, "kept", str(path))
    figures = measuring.measure(unit.index)
    measuring.use(figures)
    kept = path is not None and _store(path, machine_key(unit), figures)
    return Calibration(figures, "measured", str(path) if kept else None)


def take_kept(index: int) -> None:
    """By the first copy that notices: take figures that `calibrate` has kept, if any."""
    unit = Device(index)
    path = _path(unit)
    figures = None if path is None else _load(path, machine_key(unit))
    if figures is not None:
        _take(figures)


def _take(figures: dict[str, float]) -> bool:
    try:
        measuring.use(figures)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _switch(said: str) -> bool | None:
    """Whether the variable switches calibration on or off; None where it names a file."""
    try:
        return read_switch(said)
    except ValueError:
        return None


# -- the file --------------------------------------------------------------------------


def _path(unit: Device) -> pathlib.Path | None:
    """Where figures are kept; None if they are not to be."""
    said = os.environ.get(_VARIABLE, "")
    if said and (switch := _switch(said)) is not None:
        return kept_path(unit, "calibration") if switch else None
    if said:
        return pathlib.Path(said)
    return kept_path(unit, "calibration")


def kept_path(unit: Device, name: str) -> pathlib.Path | None:
    """Where such figures of this machine are kept; None where there is no place."""
    folder = _kept_folder()
    if folder is None:
        return None
    mark = zlib.crc32(repr(sorted(machine_key(unit).items())).encode())
    return folder / f"{name}-{mark:08x}.json"


def has_kept(name: str) -> bool:
    """Whether such figures of any GPU are kept. To ask which GPU this one is starts the
    driver."""
    folder = _kept_folder()
    return folder is not None and any(folder.glob(f"{name}-*.json"))


def _kept_folder() -> pathlib.Path | None:
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # as its specification says
        root = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(root):  # there is no home
        return None
    return pathlib.Path(root) / "cumem"


def machine_key(unit: Device) -> dict[str, str]:
    """What the figures depend on. Not the device's UUID: another card of the same make
    on the same link does the same."""
    return {
        "processor": _processor(),
        "threads": str(_core._processors()[0]),
        "device": unit.name,
        "link": _link(unit.pci_bus_id),
        "driver": str(driver_version()),
        "cumem": __version__,
    }


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "CPU part")):
            return line.partition(":")[2].strip()
    return os.uname().machine


def _link(bus_id: str) -> str:
    """The fastest that it can be: at rest it is slower."""
    root = f"/sys/bus/pci/devices/{bus_id.lower()}/max_link_"
    return f"{_read(root + 'speed').strip()} x{_read(root + 'width').strip()}"


def _read(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _load(path: pathlib.Path, key: dict[str, str]) -> dict[str, float] | None:
    """The figures of a file of ours; None for anything else."""
    import json

    try:
        with open_regular(path) as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            return None
        content = json.loads(text)
        if content["schema"] != _SCHEMA or content["key"] != key:
            return None
        return {name: float(content["figures"][name]) for name in measuring.DEFAULTS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _store(path: pathlib.Path, key: dict[str, str], figures: dict[str, float]) -> bool:
    """Write the file whole or not at all; False where it cannot be written."""
    import json

    text = json.dumps(
        {
            "schema": _SCHEMA,
            "key": key,
            "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "figures": figures,
        },
        indent=1,
    )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path, follow=False) as new:
            with new.open() as file:
                file.write(f"{text}\n".encode())
            new.place()
    except OSError:
        return False
    return True
