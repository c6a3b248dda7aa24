# SPDX-License-Identifier: Apache-2.0
"""Takes memory and streams of other libraries, and nested data, and pickles buffers."""
