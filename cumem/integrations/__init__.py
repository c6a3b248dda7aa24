# SPDX-License-Identifier: Apache-2.0
"""Lets other libraries allocate their memory from cumem's pools.

A library needs no module here for copies, if its arrays speak DLPack,
``__cuda_array_interface__`` or the buffer protocol. A module here puts the memory that the
library allocates into cumem's pools, over the helpers in ``serving``.

To add one, begin with a module here. These name the libraries that there are, and get the
new one too: ``_FRAMEWORKS`` in cumem/tools/doctor/facts.py, with ``ENABLE_CALLS`` in
checks.py; cumem/buffers/hints.py; PUBLIC_MODULES in tests/support/structure.py, whose
public names count as a debt; benchmarks/interop.py; and tests/torture/libraries.py. Its
tests are in tests/integrations/, and its pages are docs/allocators.md, docs/interop.md and
docs/computing.md.
"""
