# SPDX-License-Identifier: Apache-2.0
"""Memory and streams of other libraries, structures of arrays, and pickles of buffers."""
