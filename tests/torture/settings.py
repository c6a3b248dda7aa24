# SPDX-License-Identifier: Apache-2.0
"""Constants and errors that the parts of the torture share."""

from __future__ import annotations

import os

#: The code of a planned fault, and the operations of the driver that get one.
FAULT = 998
FAULTY = ("copy_async", "kernel_launch", "event_record", "stream_wait_event")
#: Kinds of memory that pools have.
POOLED = ("pinned", "mapped", "managed", "device")
#: Kinds of boxes. "host" is a buffer over ordinary memory, and "device" is chosen more
#: often.
KINDS = (*POOLED, "device", "numpy", "host", "registered")
HOST_KINDS = ("pinned", "mapped", "numpy", "host", "registered")
NUMBERS = ("u1", "u1", "i2", "i4", "f4", "f8", "c16", "f2")
DTYPES = (*NUMBERS, "M8[s]", "S3", "i4,f4")
KIB, MIB = 1 << 10, 1 << 20
#: Whether AddressSanitizer runs, with which the process needs more memory and stack.
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
SMALL_STACK = 256 * KIB if SANITIZED else 64 * KIB
#: Variables of the environment for each backend, unless they are set. Memory is small, so
#: that it is often used up. A region needs 64 MiB of it.
EMULATED_ENVIRONMENT = {
    "CUMEM_EMULATED_DEVICES": "2",
    "CUMEM_EMULATED_MEMORY": "64MiB",
    "CUMEM_EMULATED_DELAY_US": "100",
}
#: Limits of the memory that cumem takes on a GPU.
CUDA_ENVIRONMENT = {
    "CUMEM_LIMIT_DEVICE": "6GiB",
    "CUMEM_LIMIT_MANAGED": "768MiB",
    "CUMEM_LIMIT_PINNED": "4GiB",
    "CUMEM_LIMIT_MAPPED": "2GiB",
}


class WrongError(Exception):
    """Raised by the torture itself, with a text that says what is wrong."""


class StopRunError(Exception):
    """Raised by a callback of the torture, to stop cumem's call that called it."""
