# SPDX-License-Identifier: Apache-2.0
"""Records what happens to memory, such as allocations and copies, and reads records.

To add an export, write a module here with a function ``write(log, path)``, a method of
`Record` that calls it, and a row of FORMATS in record.py for the suffix of its files. The
docstring of `Record.save` and docs/recording.md list these suffixes by hand. Put the module
into MODULES of tests/recording/test_recording_exports.py and of tests/house/test_docs.py,
into benchmarks/recording_page.py and into docs/recording-exports.md, and the method into
the line of `Record` in docs/api.md. The method is a new public member, so raise `today` of
these in tests/debts.toml with a [[raised]] entry that says why. ``events`` says what the
numbers of a ``Log`` mean, ``pairing`` finds what belongs together, and ``pprof`` is the
shortest example.
"""
