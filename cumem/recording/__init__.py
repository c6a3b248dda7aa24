# SPDX-License-Identifier: Apache-2.0
"""Records of what happens to memory (allocations, copies and so on), and their readers.

To add an export, write a module here with a function ``write(log, path)``, a method of
`Record` that calls it, and a row of FORMATS in record.py for the suffix of its files. Put
the module into MODULES of tests/recording/test_recording_exports.py and into
docs/recording-exports.md. The method is a public member, which counts as a debt
(tests/debts.toml).
"""
