# SPDX-License-Identifier: Apache-2.0
"""Lets other libraries allocate their memory from cumem's pools.

A library needs no module here for copies, if its arrays speak DLPack,
``__cuda_array_interface__`` or the buffer protocol. A module here puts the memory that the
library allocates into cumem's pools, over the helpers in ``serving``.

To add a library, begin with a module here. The following places list the known libraries,
and the new one has to be added to each: ``_FRAMEWORKS`` in cumem/tools/doctor/facts.py,
with ``ENABLE_CALLS`` in checks.py; cumem/buffers/hints.py; PUBLIC_MODULES in
tests/support/structure.py, whose public names count as a debt; the libraries without types
in pyproject.toml; benchmarks/interop.py; and tests/torture/libraries.py. Some tools list
libraries as well. The advice in cumem/pools/out_of_memory.py says how a library gives back
the memory that it caches. PEERS and ALLOCATORS in cumem/tools/replay/ are the allocators to
compare with, and their names are also in the help of cumem/tools/cli.py. The tests of the
new module are in tests/integrations/, with a stand-in for the library in
tests/support/stand_ins.py, and its pages are docs/allocators.md, docs/interop.md,
docs/computing.md and docs/api.md.

If copies do not take the library's arrays and streams yet, begin at one of these places:

- Arrays that speak none of the three protocols need an importer beside
  csrc/python/protocols/dlpack_import.c, which operand.c in that folder then tries.
- For streams, csrc/python/device/stream_handle.c reads their handles, and ``is_captured``
  in cumem/interchange/foreign_stream.py asks whether a stream is being captured.
- For arrays in which `who_holds` should look for memory, ``_span_of`` in
  cumem/recording/live_buffers.py finds their memory.
- To return the library's arrays in place of buffers, extend ``framework=`` of `prefetch`
  (cumem/transfers/loading.py) and of `load_safetensors` (cumem/files/safetensors/).

tests/interchange/test_libraries.py and test_conformance.py test which of cumem's buffers
the library takes. For this it needs a class in tests/support/consumers.py, and
tests/support/streams.py imitates its streams.
"""
