# SPDX-License-Identifier: Apache-2.0
"""Lets other libraries allocate their memory from cumem's pools.

A library needs no module here for copies, if its arrays speak DLPack,
``__cuda_array_interface__`` or the buffer protocol. A module here puts the memory that the
library allocates into cumem's pools, over the helpers in ``serving``.

To add one, begin with a module here. These name the libraries that there are, and get the
new one too: ``_FRAMEWORKS`` in cumem/tools/doctor/facts.py, with ``ENABLE_CALLS`` in
checks.py; cumem/buffers/hints.py; PUBLIC_MODULES in tests/support/structure.py, whose
public names count as a debt; the libraries without types in pyproject.toml;
benchmarks/interop.py; and tests/torture/libraries.py. Some tools have such lists as well,
for libraries that they are to know: the advice in cumem/pools/out_of_memory.py, which says
how a library gives back what it caches, and PEERS and ALLOCATORS in cumem/tools/replay/,
the allocators to compare with, whose names are also in the help of cumem/tools/cli.py. The
tests of the new module are in tests/integrations/, with a stand-in for the library in
tests/support/stand_ins.py, and its pages are docs/allocators.md, docs/interop.md,
docs/computing.md and docs/api.md.

To let copies take its arrays and streams, begin at what it lacks:

- Arrays that speak none of the three protocols: an importer beside
  csrc/python/protocols/dlpack_import.c, which operand.c there tries in its turn.
- Streams: csrc/python/device/stream_handle.c reads their handles, and ``is_captured`` in
  cumem/interchange/foreign_stream.py asks whether one is captured.
- Arrays in which `who_holds` looks for memory: ``_span_of`` in
  cumem/recording/live_buffers.py.
- Arrays of its own in place of buffers: ``framework=`` of `prefetch`
  (cumem/transfers/loading.py) and of `load_safetensors` (cumem/files/safetensors/).

tests/interchange/test_libraries.py and test_conformance.py test which of cumem's buffers it
takes, through its class in tests/support/consumers.py, and tests/support/streams.py has
streams like its own.
"""
