# SPDX-License-Identifier: Apache-2.0
"""Makes buffers from values, and has the texts, casts and refusals of all buffers."""
