# SPDX-License-Identifier: Apache-2.0
"""The parts of tests/isolated/torture.py, which says what the torture is.

``settings``
    Kinds, dtypes and sizes, on which all agree.
``boxes``
    Memory with known contents, which is read at its address.
``registry``, ``operations``
    What a thread may do at random, a module for each room of the package.
``world``, ``worker``, ``pending``, ``calm``
    What the threads share, what each owns, the copies that it has begun, and what it does
    while the main thread shuts cumem down.
``main_thread``
    What only one thread does: limits, shutdowns, and copies under Ctrl-C.
``libraries``
    PyTorch, JAX and CuPy.
``watcher``, ``rounds``
    What would be a hang or a leak, and the run from its first round to what it tells.
"""
