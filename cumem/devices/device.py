# SPDX-License-Identifier: Apache-2.0
"""Devices, what drives them, and which are opened: `Device` and what is asked of all."""

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
        As CUDA counts the visible devices, from 0; ``"cuda:0"`` as torch writes it, and
        ``"cuda"`` for cumem's current device.

    Raises
    ------
    ValueError
        If there is no such device.
    CudaError
        If the driver cannot be opened.

    Notes
    -----
    Can be used wherever an index can and equals it: ``buf.device == 0``. Pickles as its
    index. Asking for properties creates no context. Inside of ``with device:`` it is
    cumem's current device, in this thread or task alone; `set_current_device` sets that
    of all others. Blocks nest, end in any order, as those of streams do, and neither
    read nor change CUDA's current device.

    Examples
    --------
    >>> device = cumem.Device(0)
    >>> device.index, device.total_nbytes > 0
    (0, True)
    >>> with device:  # the current one of cumem
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
        """Pickle: the index. Reading it back is a ValueError where there is no such
        device.
        """
        return type(self), (self._index,)

    @property
    def index(self) -> int:
        """Number of the device, from 0."""
        return self._index

    @property
    def name(self) -> str:
        """Name of the product."""
        name = _core._describe_device(self._index).name
        return name.decode("utf-8", "replace")

    @property
    def uuid(self) -> str:
        """ "GPU-…" as nvidia-smi prints it; the same in every process."""
        return _uuid_text(_core._describe_device(self._index).uuid)

    @property
    def pci_bus_id(self) -> str:
        """Place on the bus: "0000:1b:00.0"."""
        return _core._describe_device(self._index).pci_bus_id

    @property
    def total_nbytes(self) -> int:
        """Bytes of memory on the device."""
        return _core._describe_device(self._index).total_nbytes

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Tuple of two ints, e.g. (9, 0)."""
        major, minor = (
            _core._device_attribute(self._index, name) or 0
            for name in ("compute_major", "compute_minor")
        )
        return major, minor

    @property
    def emulated(self) -> bool:
        """True when it is not a real GPU."""
        return backend() == "emulated"

    def attributes(self) -> dict[str, int]:
        """Attributes of the device that matter for memory.

        Returns
        -------
        dict of str to int
            Named after CUDA's device attributes; one that the driver does not know is
            left out.

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
        """Whether this device can reach the memory of another one directly.

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
        """Wait until everything queued on the device so far is done.

        Raises
        ------
        CudaError
            If work on the device failed.

        Notes
        -----
        **Blocks** until all streams of the device are empty, GIL released; Ctrl-C
        interrupts it in the main thread. Creates a context on the device if there is
        none.
        """
        _core._synchronize_device(self._index)

    def memory_info(self) -> tuple[int, int]:
        """Memory of the device as its driver sees it, all processes together.

        Returns
        -------
        tuple of int
            Free and total bytes.

        Raises
        ------
        CudaError
            If the driver cannot answer.

        Notes
        -----
        Creates a context on the device if there is none.
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
    """Of an index that exists, for the extension, which keeps one of each."""
    device = object.__new__(Device)
    device._index = index
    return device


def current_of_torch(about: object) -> int:
    """PyTorch's current device, for one of its tensors, or True for some; -1 where it was
    not asked to work on any, or `about` is nothing of its.

    It is not imported to find out, and asking it does not make it begin with CUDA.
    """
    if about is not True and not is_tensor(about):
        return -1
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return -1
    return int(cuda.current_device())


@hinting
def synchronize(device: object = None) -> None:
    """Wait until everything queued on a device so far is done.

    Parameters
    ----------
    device : Device, int or str, optional
        cumem's current device by default.

    Raises
    ------
    TypeError, ValueError
        If `device` is none, or does not exist.
    CudaError
        If work on the device failed.

    Notes
    -----
    **Blocks** until all streams of the device are empty, GIL released; Ctrl-C interrupts
    it in the main thread. Copies in the background (`copy_async` without a stream) are
    waited for by their handles alone. Creates a context on the device if there is none.

    Examples
    --------
    >>> buf = cumem.empty_device(3)
    >>> buf.fill(1, stream=cumem.Stream())
    >>> cumem.synchronize()  # the fill is done
    """
    _core._device(device, "device").synchronize()


# -- what is opened --------------------------------------------------------------------


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


#: The variable of each setting, how it is read, and what it must be.
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


#: ``CUDA_VISIBLE_DEVICES`` as it was when devices were last opened: a change that comes
#: later has no effect, and the doctor says so.
opened_with: str | None = None

#: What tests/support/testing.py has set, in place of the environment.
test_settings: dict[str, Any] = {}


_MOST_DEVICES = 64  # CM_MAX_DEVICES of csrc/runtime/runtime.h

#: The emulated devices, where nothing is said of them.
_EMULATED = {
    "device_count": 1,
    "memory_nbytes": 1 << 30,
    "driver_version": 13000,
    "max_delay_us": 200,
    "seed": 0,
}


class Settings(NamedTuple):
    """What is opened next, which the extension reads by these names."""

    tries_cuda: bool  #: Whether the driver is opened, if there is one.
    may_emulate: bool  #: Whether emulated devices will do.
    device_count: int  #: How many of these there are, and so on.
    memory_nbytes: int
    driver_version: int
    max_delay_us: int
    seed: int
    has_peers: bool  #: Whether they reach the memory of each other.
    is_concurrent: bool  #: Whether managed memory is theirs and the host's at once.
    has_faults: bool  #: Whether calls can be made to fail.
    numbers: bytes  #: Which of the emulated machine's devices each is, a byte each.


def read_settings() -> Settings:
    """Say what is opened next: as the environment says, but for what a test has set."""
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
    if settings["nvtx"]:
        from cumem.base import nvtx

        nvtx.attach()
    backend = settings["backend"]
    numbers = list(range(settings["device_count"]))
    if test_settings.get("device_count") is None:
        numbers = _visible_emulated(settings["device_count"], backend == "emulated")
        settings["device_count"] = len(numbers)
    return Settings(
        tries_cuda=backend != "emulated",
        may_emulate=backend != "cuda",
        has_peers=bool(settings["peers"]),
        is_concurrent=bool(settings["concurrent"]),
        has_faults=settings["faults"],
        numbers=bytes(numbers),
        **{name: settings[name] for name in _EMULATED},
    )


def _visible_emulated(count: int, must_have_one: bool) -> list[int]:
    """Which of the emulated machine's devices the process sees: what
    ``CUDA_VISIBLE_DEVICES`` leaves of them, by CUDA's rules.

    Where `CUMEM_EMULATED_DEVICES` does not say how many the machine has, it has all those
    that are named, so that each process of a job started for several GPUs finds its own;
    the UUID of a real GPU stands for one of them.
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
    """As `Device.uuid` gives it; csrc/runtime/emulated/emulated.c composes it."""
    return _uuid_text(b"cumem-emulated\0" + bytes([number]))


def _uuid_text(uuid: bytes) -> str:
    """As nvidia-smi prints it."""
    digits = uuid.hex()
    parts = digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]
    return f"GPU-{'-'.join(parts)}"


#: Variables that were told of already: once a process, and once for each name.
_told: set[str] = set()


def warn_of_variables() -> None:
    """Of those that look like cumem's and that nothing reads; of each of them once."""
    found = {name: near for name, near in misspelt().items() if name not in _told}
    if found:
        warn_caller(
            f"cumem reads no such variable of the environment: {advice(found)}",
            UserWarning,
        )
        _told.update(found)  # not where the warning was made an error


def warn_of_emulation(reason: str) -> None:
    """For the caller of the function that opens the devices."""
    warn_caller(
        f"cumem works on an emulated device: {reason}. Results are right but timings mean "
        "nothing. Set CUMEM_BACKEND=emulated to choose this without the warning, or "
        "CUMEM_BACKEND=cuda to make it an error",
        EmulationWarning,
    )


@hinting
def shutdown(*, reset_devices: bool = False) -> None:
    """Finish all work, join cumem's threads, free everything; the next use starts afresh.

    Buffers, streams and events made before are closed.

    Parameters
    ----------
    reset_devices : bool
        Also destroy the contexts of the devices that were used, with all that other
        libraries have on them: for leak checkers.

    Raises
    ------
    BufferError
        While a buffer is exported; nothing is done then.
    RuntimeError
        While a call of cumem is under way in another thread, or below in this one, or
        in a child made by ``fork``; nothing is done then.
    CudaError
        If work or a release failed; the rest is still released.

    Notes
    -----
    **Blocks** until all work is done, GIL released. Ctrl-C ends the wait and
    leaves everything as it was: call it again. Ctrl-C does not end the wait for work
    that other threads begin meanwhile, at interpreter exit, or in threads other than
    the main one.

    Examples
    --------
    >>> cumem.shutdown()
    """
    _core._shutdown(read_flag(reset_devices, "reset_devices"))
