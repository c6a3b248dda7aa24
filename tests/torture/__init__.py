# SPDX-License-Identifier: Apache-2.0
"""The parts of tests/isolated/torture.py, whose docstring says what the torture is.

``settings``
    Kinds, dtypes and sizes that all parts use.
``boxes``
    Memory with known contents, which tests read at its address.
``registry``, ``operations``
    The operations that a thread may do at random, in a module for each room of the package.
``world``
    Everything that the threads share, such as options and failures.
``worker``, ``pending``, ``calm``
    A thread with its memory, the copies that it has begun, and the few operations that it
    does while the main thread shuts cumem down.
``main_thread``
    Operations of the main thread alone: limits, shutdowns, and copies under Ctrl-C.
``libraries``
    Operations with PyTorch, JAX and CuPy.
``random_rows``
    Rows by index that lie in memory in random ways, and what NumPy makes of them.
``watcher``, ``rounds``
    How hangs and leaks are found, and the run from its first round to its report.
"""
