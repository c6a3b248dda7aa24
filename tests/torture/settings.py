# SPDX-License-Identifier: Apache-2.0
"""Shared by the parts of the torture: kinds, dtypes, sizes and errors."""

from __future__ import annotations

import os

FAULT = 998
FAULTY = ("copy_async", "kernel_launch", "event_record", "stream_wait_event")
POOLED = ("pinned", "mapped", "managed", "device")
KINDS = (*POOLED, "device", "numpy", "host", "registered")
HOST_KINDS = ("pinned", "mapped", "numpy", "host", "registered")
NUMBERS = ("u1", "u1", "i2", "i4", "f4", "f8", "c16", "f2")
DTYPES = (*NUMBERS, "M8[s]", "S3", "i4,f4")
KIB, MIB = 1 << 10, 1 << 20
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
SMALL_STACK = 256 * KIB if SANITIZED else 64 * KIB
EMULATED_ENVIRONMENT = {
    "CUMEM_EMULATED_DEVICES": "2",
    "CUMEM_EMULATED_MEMORY": "32MiB",
    "CUMEM_EMULATED_DELAY_US": "100",
}
CUDA_ENVIRONMENT = {
    "CUMEM_LIMIT_DEVICE": "6GiB",
    "CUMEM_LIMIT_MANAGED": "768MiB",
    "CUMEM_LIMIT_PINNED": "4GiB",
    "CUMEM_LIMIT_MAPPED": "2GiB",
}


class WrongError(Exception):
    """Something is not what it should be."""


class StopRunError(Exception):
    """A callback of the caller raises this."""
