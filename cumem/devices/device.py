# SPDX-License-Identifier: Apache-2.0
"""Has the type `Device`, functions about all devices, and the settings that open them.

Devices are opened by the first use of anything that needs them, and anew after a shutdown
and in a forked child. The extension opens them (csrc/python/module/open.c), and asks the
package for every decision. `read_settings` reads from the environment whether to try CUDA,
and what emulated devices are like. `count_devices` of the module ``counting`` counts GPUs
without starting the driver. If CUDA does not open, `judge_failure` of the module ``gpus``
decides whether to raise an error or to emulate the device, and `warn_of_emulation` warns if
it is emulated.
"""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Self, SupportsIndex, final

import numpy as np

from cumem import _core
from cumem.base.displays import show
from cumem.base.driver import backend
from cumem.base.errors import EmulationWarning, warn_caller
from cumem.base.units import format_count, read_size
from cumem.base.variables import SWITCH_WORDS, advice, misspelt, read_switch
from cumem.buffers.arguments import hinting, read_flag
from cumem.devices.gpus import gpus_hidden, visible
from cumem.interchange.structures import is_tensor


@final
class Device(_core._DeviceBlocks):
    """One GPU, or one emulated device.

    Parameters
    ----------
    index : int or str
        The number of a visible device as CUDA counts them, from 0; or ``"cuda:0"`` as in
        PyTorch, or ``"cuda"`` for cumem's current device.

    Raises
    ------
    ValueError
        If there is no such device.
    CudaError
        If the driver cannot be opened.

    Notes
    -----
    A device can be used as its index and equals it: ``buf.device == 0``. It is pickled as
    its index. Reading its properties creates no context.

    In a block ``with device:`` it is cumem's current device, in this thread or task only.
    `set_current_device` sets the one that is current outside such blocks. Blocks may be
    nested and end in any order, like those of streams. They neither read nor change CUDA's
    current device.

    Examples
    --------
    >>> device = cumem.Device(0)
    >>> device.index, device.total_nbytes > 0
    (0, True)
    >>> with device:  # makes it cumem's current device
    ...     buf = cumem.empty_device(16)
    >>> buf.device == device
    True
    """

    __slots__ = ("__weakref__", "_index")
    _index: int

    def __new__(cls, index: SupportsIndex | str = 0, /) -> Self:
        if index is None:
            raise TypeError('index must be an int or "cuda:N", not NoneType')
        return _core._device(index, "device")

    def __reduce__(self) -> tuple[type[Self], tuple[int]]:
        """Pickle the index; unpickling raises a ValueError if the device does not exist."""
        return type(self), (self._index,)

    @property
    def index(self) -> int:
        """The number of the device, from 0."""
        return self._index

    @property
    def name(self) -> str:
        """The name of the product."""
        name = _core._describe_device(self._index).name
        return name.decode("utf-8", "replace")

    @property
    def uuid(self) -> str:
        """The UUID as nvidia-smi prints it, "GPU-…", which is the same in every process."""
        return _uuid_text(_core._describe_device(self._index).uuid)

    @property
    def pci_bus_id(self) -> str:
        """The place on the bus, such as "0000:1b:00.0"."""
        return _core._describe_device(self._index).pci_bus_id

    @property
    def total_nbytes(self) -> int:
        """The bytes of memory on the device."""
        return _core._describe_device(self._index).total_nbytes

    @property
    def compute_capability(self) -> tuple[int, int]:
        """The compute capability as two ints, such as (9, 0)."""
        major, minor = (
            _core._device_attribute(self._index, name) or 0
            for name in ("compute_major", "compute_minor")
        )
        return major, minor

    @property
    def emulated(self) -> bool:
        """Whether the device is emulated rather than a real GPU."""
        return backend() == "emulated"

    def attributes(self) -> dict[str, int]:
        """Return the attributes of the device that matter for memory.

        Returns
        -------
        dict of str to int
            The values by the names of CUDA's device attributes, without those that the
            driver does not know.

        Raises
        ------
        CudaError
            If the driver cannot answer.
        """
        found = {
            name: _core._device_attribute(self._index, name)
            for name in _core._device_attribute_names()
        }
        return {name: value for name, value in found.items() if value is not None}

    def can_access_peer(self, other: object, /) -> bool:
        """Return whether this device can reach the memory of another one directly.

        Parameters
        ----------
        other : Device, int or str

        Returns
        -------
        bool
            False for the device itself.

        Raises
        ------
        ValueError
            If `other` does not exist.
        CudaError
            If the driver cannot answer.
        """
        peer = _core._device(other, "other").index
        return peer != self._index and _core._can_access_peer(self._index, peer)

    def synchronize(self) -> None:
        """Wait until everything that is queued on the device so far is done.

        Raises
        ------
        CudaError
            If work on the device failed.

        Notes
        -----
        **Blocks** until all streams of the device are empty, with the GIL released; Ctrl-C
        interrupts it in the main thread. If the device has no context yet, this creates
        one.
        """
        _core._synchronize_device(self._index)

    def memory_info(self) -> tuple[int, int]:
        """Return the memory of the device as its driver sees it, with all processes.

        Returns
        -------
        tuple of int
            The free and the total bytes.

        Raises
        ------
        CudaError
            If the driver cannot answer.

        Notes
        -----
        If the device has no context yet, this creates one.
        """
        return _core._device_memory(self._index)

    def __index__(self) -> int:
        return self._index

    def __hash__(self) -> int:
        return self._index

    def __eq__(self, other: object, /) -> bool:
        if isinstance(other, Device):
            return self._index == other._index
        if isinstance(other, (int, np.generic)) and not isinstance(other, bool):
            if hasattr(other, "__index__"):
                return self._index == operator.index(other)
        return NotImplemented

    def __repr__(self) -> str:
        emulated = ", emulated" if _core._is_emulated() else ""
        return f"<cumem.Device {self._index}{emulated}>"

    def _repr_html_(self) -> str | None:
        shown: str | None = show("html", self)
        return shown


def make(index: int) -> Device:
    """Make the device of an index that exists, for the extension, which keeps it."""
    device = object.__new__(Device)
    device._index = index
    return device


def current_streams(device: int) -> list[_core.Stream]:
    """Return the streams on which the caller may queue work on a device next.

    These are cumem's current stream and, if PyTorch uses the GPUs, also PyTorch's.
    """
    found = [_core.current_stream(device)]
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and not _core._is_emulated():
        theirs = torch.cuda.current_stream(device)
        found.append(_core.Stream.from_external(theirs, device=device))
    return found


def current_of_torch(about: object) -> int:
    """Return the index of PyTorch's current device, or -1 if PyTorch does not matter.

    `about` is the object for which a device is wanted. The answer is -1 unless `about` is a
    tensor of PyTorch or True, and also if PyTorch does not use CUDA yet. This function
    neither imports PyTorch nor makes it start CUDA.
    """
    if about is not True and not is_tensor(about):
        return -1
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return -1
    return int(cuda.current_device())


@hinting
def synchronize(device: object = None) -> None:
    """Wait until everything that is queued on a device so far is done.

    Parameters
    ----------
    device : Device, int or str, optional
        The device; by default cumem's current one.

    Raises
    ------
    TypeError, ValueError
        If `device` is not a device, or does not exist.
    CudaError
        If work on the device failed.

    Notes
    -----
    **Blocks** until all streams of the device are empty, with the GIL released; Ctrl-C
    interrupts it in the main thread. It does not wait for copies in the background
    (`copy_async` without a stream); wait for these by their handles. If the device has no
    context yet, this creates one.

    Examples
    --------
    >>> buf = cumem.empty_device(3)
    >>> buf.fill(1, stream=cumem.Stream())
    >>> cumem.synchronize()  # the fill is done
    """
    _core._device(device, "device").synchronize()


# -- the settings that open devices ----------------------------------------------------


def _count(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) <= most):
            raise ValueError(text)
        return int(text)

    return read


def _memory(text: str) -> int:
    nbytes = read_size(text, "", False, None)
    if not 1 <= nbytes <= 2**62:
        raise ValueError(text)
    return nbytes


def _driver(text: str) -> int:
    match = re.fullmatch(r"(\d{1,4})(?:\.(\d{1,2}))?", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= 1000:
        raise ValueError(text)
    return int(match[1]) * 1000 + int(match[2] or 0) * 10


def _backend(text: str) -> str:
    if text not in ("cuda", "emulated"):
        raise ValueError(text)
    return text


#: For each setting: its variable, the function that reads it, and what it must be.
_VARIABLES: dict[str, tuple[str, Callable[[str], int | str], str]] = {
    "backend": ("CUMEM_BACKEND", _backend, "'cuda', 'emulated' or unset"),
    "device_count": ("CUMEM_EMULATED_DEVICES", _count(64), "a count from 0 to 64"),
    "memory_nbytes": (
        "CUMEM_EMULATED_MEMORY",
        _memory,
        "a number of bytes such as 1073741824 or 4GiB",
    ),
    "driver_version": (
        "CUMEM_EMULATED_DRIVER",
        _driver,
        "a CUDA version such as 12.4",
    ),
    "max_delay_us": (
        "CUMEM_EMULATED_DELAY_US",
        _count(1_000_000),
        "a number of microseconds from 0 to 1000000",
    ),
    "seed": (
        "CUMEM_EMULATED_SEED",
        _count(2**64 - 1),
        "an integer of at most 64 bits",
    ),
    "peers": ("CUMEM_EMULATED_PEERS", read_switch, SWITCH_WORDS),
    "concurrent": ("CUMEM_EMULATED_CONCURRENT", read_switch, SWITCH_WORDS),
    "nvtx": ("CUMEM_NVTX", read_switch, SWITCH_WORDS),
}


#: ``CUDA_VISIBLE_DEVICES`` when devices were last opened. A later change has no effect,
#: which the doctor reports.
opened_with: str | None = None

#: Settings from tests/support/testing.py, which take precedence over the environment.
test_settings: dict[str, Any] = {}


_MOST_DEVICES = 64  # CM_MAX_DEVICES of csrc/runtime/runtime.h

#: The properties of emulated devices by default.
_EMULATED = {
    "device_count": 1,
    "memory_nbytes": 1 << 30,
    "driver_version": 13000,
    "max_delay_us": 200,
    "seed": 0,
}


class Settings(NamedTuple):
    """The settings of the devices that are opened next.

    The extension reads them by the names of the members.
    """

    tries_cuda: bool  #: Whether to try CUDA, if there is a driver.
    may_emulate: bool  #: Whether emulated devices are acceptable.
    shows_ranges: bool  #: Whether to report NVTX ranges to a profiler.
    # The rest is about emulated devices.
    device_count: int  #: The number of devices.
    memory_nbytes: int  #: The memory of each device.
    driver_version: int  #: The version of CUDA that the driver claims to serve.
    max_delay_us: int  #: The longest random delay of work.
    seed: int  #: The seed of the random delays.
    has_peers: bool  #: Whether devices reach each other's memory.
    is_concurrent: bool  #: Whether the host may use managed memory while devices do.
    has_faults: bool  #: Whether calls can be made to fail.
    numbers: bytes  #: For each device, in one byte, its number on the emulated machine.


def read_settings() -> Settings:
    """Return the settings, which come from the environment and from tests."""
    global opened_with
    opened_with = os.environ.get("CUDA_VISIBLE_DEVICES")
    settings: dict[str, Any] = dict(_EMULATED)
    settings |= {"backend": None, "peers": True, "concurrent": True, "faults": False}
    settings["nvtx"] = False
    for name, (variable, read, expected) in _VARIABLES.items():
        if text := os.environ.get(variable):
            try:
                settings[name] = read(text)
            except ValueError:
                raise ValueError(
                    f"{variable} must be {expected}, not '{text:.100}'"
                ) from None
    for name, value in test_settings.items():
        if name not in settings:
            raise TypeError(f"there is no setting {name!r}")
        if value is not None:
            settings[name] = value
    warn_of_variables()
    backend = settings["backend"]
    numbers = list(range(settings["device_count"]))
    if test_settings.get("device_count") is None:
        numbers = _visible_emulated(settings["device_count"], backend == "emulated")
        settings["device_count"] = len(numbers)
    return Settings(
        tries_cuda=backend != "emulated",
        may_emulate=backend != "cuda",
        shows_ranges=settings["nvtx"],
        has_peers=bool(settings["peers"]),
        is_concurrent=bool(settings["concurrent"]),
        has_faults=settings["faults"],
        numbers=bytes(numbers),
        **{name: settings[name] for name in _EMULATED},
    )


def _visible_emulated(count: int, must_have_one: bool) -> list[int]:
    """Return the emulated machine's devices that ``CUDA_VISIBLE_DEVICES`` shows.

    CUDA's rules apply. Without `CUMEM_EMULATED_DEVICES` the machine has all devices that
    ``CUDA_VISIBLE_DEVICES`` names, so that each process of a job for several GPUs finds its
    own. Each UUID of a real GPU then stands for one emulated device.
    """
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is None or gpus_hidden():
        return list(range(count))
    names = [name.strip() for name in said.split(",")]
    if not os.environ.get("CUMEM_EMULATED_DEVICES"):
        if any(name.startswith(("GPU-", "MIG-")) for name in names):
            return list(range(min(len(names), _MOST_DEVICES)))
        numbers = [int(name) for name in names if re.fullmatch("[0-9]{1,2}", name)]
        count = min(max([count, *(number + 1 for number in numbers)]), _MOST_DEVICES)
    chosen, _ = visible(said, [_emulated_uuid(i) for i in range(count)])
    if must_have_one and not chosen and count > 0:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={said} leaves none of the "
            f"{format_count(count, 'emulated device')}: it takes numbers from 0 to "
            f"{count - 1}, each once, with commas between them; CUMEM_EMULATED_DEVICES "
            "says how many there are"
        )
    return chosen


def _emulated_uuid(number: int) -> str:
    """Return as text the UUID that csrc/runtime/emulated/emulated.c gives this device."""
    return _uuid_text(b"cumem-emulated\0" + bytes([number]))


def _uuid_text(uuid: bytes) -> str:
    """Return a UUID as nvidia-smi prints it."""
    digits = uuid.hex()
    parts = digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]
    return f"GPU-{'-'.join(parts)}"


#: The variables that a warning has named, so that each is named once per process.
_warned: set[str] = set()


def warn_of_variables() -> None:
    """Warn about variables that resemble cumem's and that nothing reads, once for each."""
    found = {name: near for name, near in misspelt().items() if name not in _warned}
    if found:
        warn_caller(
            f"cumem reads no such variable of the environment: {advice(found)}",
            UserWarning,
        )
        _warned.update(found)  # this is not reached if the warning is made an error


def warn_of_emulation(reason: str) -> None:
    """Warn the caller of the function that opened the devices."""
    warn_caller(
        f"cumem works on an emulated device: {reason}. Results are right but timings mean "
        "nothing. Set CUMEM_BACKEND=emulated to choose this without the warning, or "
        "CUMEM_BACKEND=cuda to make it an error",
        EmulationWarning,
    )


@hinting
def shutdown(*, reset_devices: bool = False) -> None:
    """Finish all work, join cumem's threads and free all memory.

    Buffers, streams and events that were made before are closed. The next use of cumem
    starts afresh.

    Parameters
    ----------
    reset_devices : bool
        Whether to destroy the contexts of the devices that were used, with everything that
        other libraries have on them. Leak checkers need this.

    Raises
    ------
    BufferError
        If a buffer is exported. Nothing is shut down then.
    RuntimeError
        If a call of cumem is running in another thread, or further up the stack in this
        one, or in a child made by ``fork``. Nothing is shut down then.
    CudaError
        If work or a release failed; the rest is still released.

    Notes
    -----
    **Blocks** until all work is done, with the GIL released. Ctrl-C ends the wait and
    leaves everything as it was, so that `shutdown` can be called again. Ctrl-C does not end
    the wait for work that other threads begin meanwhile, nor a wait at interpreter exit or
    outside the main thread.

    Examples
    --------
    >>> cumem.shutdown()
    """
    _core._shutdown(read_flag(reset_devices, "reset_devices"))
